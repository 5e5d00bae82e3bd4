/* SPDX-License-Identifier: Apache-2.0 */
#include "core/queue.h"

#include <string.h>

#define BIT_NS 8000000000ull /* ns for one byte at 1 bit/s */

void dq_queue_init(struct dq_queue *q, uint64_t rate_bps, uint64_t limit_bytes)
{
	memset(q, 0, sizeof *q);
	q->rate_bps = rate_bps;
	q->limit_bytes = limit_bytes;
}

void dq_queue_set_rate(struct dq_queue *q, uint64_t now_ns, uint64_t rate_bps, uint64_t limit_bytes)
{
	if (q->free_ns < now_ns)
		q->free_ns = now_ns;
	/* The remainder counts fractions of the old rate: less than 1 ns, dropped. */
	q->remainder = 0;
	q->rate_bps = rate_bps;
	q->limit_bytes = limit_bytes;
}

uint64_t dq_queue_push(struct dq_queue *q, uint64_t now_ns, uint64_t bytes)
{
	uint64_t backlog;

	if (q->free_ns < now_ns) {
		q->free_ns = now_ns;
		q->remainder = 0;
	}
	q->total_bytes += bytes;
	if (q->rate_bps == 0) {
		/* What an earlier, finite rate still holds stays ahead: a queue never reorders. */
		return q->free_ns;
	}
	if (DQ_LIKELY(bytes < UINT64_MAX / BIT_NS && q->remainder <= UINT64_MAX - bytes * BIT_NS)) {
		uint64_t work = bytes * BIT_NS + q->remainder;
		uint64_t ns = work / q->rate_bps;

		q->remainder = work % q->rate_bps;
		q->free_ns = ns < DQ_NEVER - 1 - q->free_ns ? q->free_ns + ns : DQ_NEVER - 1;
	} else {
		__extension__ unsigned __int128 work = (unsigned __int128)bytes * BIT_NS + q->remainder;
		__extension__ unsigned __int128 end = work / q->rate_bps + q->free_ns;

		q->remainder = (uint64_t)(work % q->rate_bps);
		q->free_ns = end < DQ_NEVER - 1 ? (uint64_t)end : DQ_NEVER - 1;
	}
	backlog = dq_queue_backlog(q, now_ns);
	if (backlog > q->peak_bytes)
		q->peak_bytes = backlog;
	return q->free_ns;
}

uint64_t dq_queue_backlog(const struct dq_queue *q, uint64_t now_ns)
{
	__extension__ unsigned __int128 bytes;

	if (q->rate_bps == 0 || q->free_ns < now_ns || (q->free_ns == now_ns && q->remainder == 0))
		return 0;
	/* Rounded up: a byte that has partly left still takes its place. */
	bytes = (unsigned __int128)(q->free_ns - now_ns) * q->rate_bps + q->remainder;
	bytes = (bytes + BIT_NS - 1) / BIT_NS;
	if (q->limit_bytes && bytes > q->limit_bytes)
		return q->limit_bytes;
	return bytes < UINT64_MAX ? (uint64_t)bytes : UINT64_MAX;
}
