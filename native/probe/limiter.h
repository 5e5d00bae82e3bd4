/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A token bucket in one word: how far into the future the budget of one source is spent. Pure: time is an argument (ns). A
 * zeroed limiter is full. The rate is kept apart, as all sources share it.
 */
#ifndef DQ_PROBE_LIMITER_H
#define DQ_PROBE_LIMITER_H

#include "core/base.h"

struct dq_limiter_rate {
	uint64_t cost_ns;    /* time that earns one token */
	uint64_t depth_ns;   /* what the bucket holds */
};

struct dq_limiter {
	uint64_t spent_ns;
};

/* per_second: 1..1e9 (0 is taken as 1). The bucket holds an eighth of a second, at least min(4, per_second) tokens. */
void dq_limiter_rate_set(struct dq_limiter_rate *rate, uint32_t per_second);
/* Take one token; false when there is none. */
bool dq_limiter_take(struct dq_limiter *limiter, const struct dq_limiter_rate *rate, uint64_t now_ns);

#endif
