/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arithmetic of one output queue with a rate, in virtual time: when does what is handed over now leave? Used by the
 * emulated link of the tcp provider and by the fabric simulator. Pure: time is an argument, non-decreasing per queue.
 */
#ifndef DQ_CORE_QUEUE_H
#define DQ_CORE_QUEUE_H

#include "core/base.h"

struct dq_queue {
	uint64_t rate_bps;       /* 0 = infinitely fast */
	uint64_t limit_bytes;    /* what the queue holds; beyond it arrivals wait in front of it; 0 = unlimited */
	uint64_t free_ns;        /* when the last accepted byte has left */
	uint64_t remainder;      /* of ns arithmetic, so that rates are exact over any number of packets */
	uint64_t peak_bytes;
	uint64_t total_bytes;
};

void dq_queue_init(struct dq_queue *q, uint64_t rate_bps, uint64_t limit_bytes);
void dq_queue_set_rate(struct dq_queue *q, uint64_t now_ns, uint64_t rate_bps, uint64_t limit_bytes);
/* Take bytes at now_ns; returns the time the last of them has left the queue. */
uint64_t dq_queue_push(struct dq_queue *q, uint64_t now_ns, uint64_t bytes);
/* Bytes waiting or being sent at now_ns (at most limit_bytes when there is a limit). */
uint64_t dq_queue_backlog(const struct dq_queue *q, uint64_t now_ns);

#endif
