/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who sends the next segment, and on which QP. Deficit round robin in two levels: clients, then their flows; each turn is
 * one segment. The nodes are embedded in the caller's objects. The quantum of both levels is the largest segment, so one
 * pass over all active clients sends the same number of bytes for each, however many flows each has. One thread, no
 * allocation.
 */
#ifndef DQ_CORE_SCHED_H
#define DQ_CORE_SCHED_H

#include "core/base.h"

struct dq_sched_flow {
	struct dq_sched_flow *next, *prev;     /* ring of the client's active flows; NULL when not active */
	struct dq_sched_client *client;
	int64_t deficit;
};

struct dq_sched_client {
	struct dq_sched_client *next, *prev;   /* ring of active clients; NULL when not active */
	struct dq_sched_flow *head;            /* flow whose turn it is, NULL when none is active */
	int64_t deficit;
};

struct dq_sched {
	struct dq_sched_client *head;          /* client whose turn it is */
	uint32_t quantum;                      /* bytes */
	uint32_t active_flows;
};

void dq_sched_init(struct dq_sched *s, uint32_t quantum_bytes);
void dq_sched_set_quantum(struct dq_sched *s, uint32_t quantum_bytes);
void dq_sched_client_init(struct dq_sched_client *c);
void dq_sched_flow_init(struct dq_sched_flow *f, struct dq_sched_client *c);
bool dq_sched_is_active(const struct dq_sched_flow *f);
void dq_sched_activate(struct dq_sched *s, struct dq_sched_flow *f);    /* has something to send; no-op when active */
void dq_sched_deactivate(struct dq_sched *s, struct dq_sched_flow *f);  /* has nothing to send; its debt is kept no longer */
/* The flow whose turn it is, or NULL. Does not change the order: call dq_sched_charge after posting its segment. */
struct dq_sched_flow *dq_sched_next(struct dq_sched *s);
/* The flow posted `bytes` (0 counts as a minimal cost, so that empty messages take turns too); moves the turn on. */
void dq_sched_charge(struct dq_sched *s, struct dq_sched_flow *f, uint32_t bytes);

/* The data QPs of a VC as the scheduler sees them. */
struct dq_qps {
	uint32_t n;                            /* QPs that exist */
	uint32_t limit;                        /* segments outstanding per QP */
	uint32_t active;                       /* use only the first `active` for new segments */
	uint32_t cursor;
	uint64_t bytes[DQ_MAX_QPS];            /* outstanding bytes */
	uint32_t segments[DQ_MAX_QPS];         /* outstanding segments */
	uint8_t usable[DQ_MAX_QPS];
};

void dq_qps_init(struct dq_qps *q, uint32_t n, uint32_t limit);
/* The usable QP with the fewest outstanding bytes and room for a segment (ties: round robin), or DQ_NONE. */
uint32_t dq_qps_pick(struct dq_qps *q);
static inline void dq_qps_post(struct dq_qps *q, uint32_t qp, uint32_t bytes)
{
	q->bytes[qp] += bytes;
	q->segments[qp]++;
}
static inline void dq_qps_done(struct dq_qps *q, uint32_t qp, uint32_t bytes)
{
	q->bytes[qp] -= bytes;
	q->segments[qp]--;
}

/* Segment size of one message: the profile's, at least length / DQ_MAX_SEGMENTS, a multiple of DQ_ALIGN_BYTES. */
uint32_t dq_segment_bytes(uint64_t message_bytes, uint32_t profile_segment_bytes);
uint32_t dq_segment_count(uint64_t message_bytes, uint32_t segment_bytes); /* at least 1 */

#endif
