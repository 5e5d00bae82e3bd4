/* SPDX-License-Identifier: Apache-2.0 */
#include "probe/limiter.h"

#define NS_PER_S 1000000000ull

void dq_limiter_rate_set(struct dq_limiter_rate *rate, uint32_t per_second)
{
	uint64_t n = DQ_MIN(DQ_MAX((uint64_t)per_second, 1u), NS_PER_S);
	/* Rounded up: over a long time never more than the rate. */
	rate->cost_ns = (NS_PER_S + n - 1) / n;
	rate->depth_ns = rate->cost_ns * DQ_MAX(n / 8, DQ_MIN(n, 4u));
}

bool dq_limiter_take(struct dq_limiter *limiter, const struct dq_limiter_rate *rate, uint64_t now_ns)
{
	uint64_t spent = DQ_MAX(limiter->spent_ns, now_ns);
	if (spent - now_ns + rate->cost_ns > rate->depth_ns)
		return false;
	limiter->spent_ns = spent + rate->cost_ns;
	return true;
}
