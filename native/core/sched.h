/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who sends the next segment, and on which QP. Deficit round robin in two levels: clients, then their flows; each turn is
 * one segment. The nodes are embedded in the caller's objects. The quantum of both levels is the largest segment, so one
 * round over all active clients sends the same number of bytes for each, however many flows each has. One thread, no
 * allocation, every function O(1) but dq_qps_pick.
 *
 * The rule, the same at both levels. A node has a deficit: the bytes it may still send in the round its tag names. The turn
 * goes round the nodes of the current round, one segment each, so that a client of small messages never waits for a whole
 * quantum of each other one. A node whose deficit is used up (it may go negative by less than a quantum, since a segment is
 * never cut for fairness) gets a quantum more and waits for the next round, which begins when the current one has no node
 * left. A node that becomes active joins the current round at its end with a whole quantum, unless its tag says that it
 * was served in this round already: then it goes on with the deficit that it had. So neither going away and coming back
 * nor many small messages ever earn more than a quantum a round.
 */
#ifndef DQ_CORE_SCHED_H
#define DQ_CORE_SCHED_H

#include "core/base.h"

/* Least cost of a segment, bytes: empty and tiny messages take turns too. About what a segment costs besides its bytes. */
#define DQ_SCHED_MIN_COST 512u

struct dq_sched_client;

struct dq_sched_flow {
	struct dq_sched_flow *next, *prev;     /* ring of the client's flows of one round; NULL when not active */
	struct dq_sched_client *client;
	int64_t deficit;                       /* bytes, in round `round` */
	uint64_t round;                        /* of the client's rounds */
};

struct dq_sched_client {
	struct dq_sched_client *next, *prev;   /* ring of the clients of one round; NULL when not active */
	struct dq_sched_flow *head;            /* flow whose turn it is, NULL when none is active */
	struct dq_sched_flow *later;           /* flows that wait for the next round */
	int64_t deficit;
	uint64_t round;                        /* of the scheduler's rounds */
	uint64_t flow_round;                   /* the current round of its flows */
};

struct dq_sched {
	struct dq_sched_client *head;          /* client whose turn it is, NULL when none is active */
	struct dq_sched_client *later;         /* clients that wait for the next round */
	uint64_t round;                        /* the current one */
	uint32_t quantum;                      /* bytes */
	uint32_t active_flows;
};

/* The quantum must be at least the largest segment still to be posted; one that is larger counts as one quantum only. */
void dq_sched_init(struct dq_sched *s, uint32_t quantum_bytes);
void dq_sched_set_quantum(struct dq_sched *s, uint32_t quantum_bytes);
void dq_sched_client_init(struct dq_sched_client *c);
void dq_sched_flow_init(struct dq_sched_flow *f, struct dq_sched_client *c);
static inline bool dq_sched_is_active(const struct dq_sched_flow *f)
{
	return f->next != NULL;
}
void dq_sched_activate(struct dq_sched *s, struct dq_sched_flow *f);    /* has something to send; no-op when active */
/* Has nothing to send (now); no-op when not active. Its deficit is kept for the current round only. */
void dq_sched_deactivate(struct dq_sched *s, struct dq_sched_flow *f);
/* The flow whose turn it is, or NULL. Does not change the order: call dq_sched_charge after posting its segment. */
static inline struct dq_sched_flow *dq_sched_next(const struct dq_sched *s)
{
	return s->head ? s->head->head : NULL;
}
/*
 * The flow posted `bytes` (counted as DQ_SCHED_MIN_COST at least); moves the turn on. When that segment was the flow's last:
 * charge first, then deactivate, else the segment may be free of charge. Any flow may be charged at any time.
 */
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

/* n is cut to DQ_MAX_QPS. All QPs start empty, active and usable: the caller clears usable[i] of one that failed. */
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

/* Longest message that 15 bits of index can number. */
#define DQ_MAX_MESSAGE_BYTES ((uint64_t)DQ_MAX_SEGMENTS * DQ_MAX_SEGMENT_BYTES)

/*
 * Segment size of one message: the profile's, at least message_bytes / DQ_MAX_SEGMENTS, a multiple of DQ_ALIGN_BYTES, from
 * DQ_MIN_SEGMENT_BYTES to DQ_MAX_SEGMENT_BYTES. 0 when the message is longer than DQ_MAX_MESSAGE_BYTES.
 */
uint32_t dq_segment_bytes(uint64_t message_bytes, uint32_t profile_segment_bytes);
/* Segments of a message: 1 to DQ_MAX_SEGMENTS; 0 when segment_bytes is 0 or too small for that. */
uint32_t dq_segment_count(uint64_t message_bytes, uint32_t segment_bytes);

#endif
