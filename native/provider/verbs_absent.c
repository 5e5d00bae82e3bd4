/* SPDX-License-Identifier: Apache-2.0 */
/* The table of the verbs provider in a build without libibverbs' header: it says so when a device is to be opened. */
#include <errno.h>

#include "provider/verbs_table.h"

static int device_open(const struct dq_device_config *cfg, struct dq_device **out, struct dq_error *err)
{
	(void)out;
	return dq_error_set(err, -ENOSYS, "device %.31s: this build has no verbs provider: install libibverbs-dev and build again", cfg->name);
}

/* Nothing else can be called without a device. */
const struct dq_provider dq_provider_verbs = {.name = "verbs", .device_open = device_open};
