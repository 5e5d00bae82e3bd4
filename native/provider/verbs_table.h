/* SPDX-License-Identifier: Apache-2.0 */
/* The table of the verbs provider; without libibverbs' header at build time one whose device_open says so. */
#ifndef DQ_PROVIDER_VERBS_TABLE_H
#define DQ_PROVIDER_VERBS_TABLE_H

#include "provider/provider.h"

extern const struct dq_provider dq_provider_verbs;

#endif
