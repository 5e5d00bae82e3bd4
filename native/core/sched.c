/* SPDX-License-Identifier: Apache-2.0 */
#include "core/sched.h"

#include <string.h>

/* Doubly linked rings, the same for flows and clients: *head is the first node, head->prev the last. */
#define RING_APPEND(head, node)                         \
	do {                                            \
		if (*(head)) {                          \
			(node)->next = *(head);         \
			(node)->prev = (*(head))->prev; \
			(node)->prev->next = (node);    \
			(*(head))->prev = (node);       \
		} else {                                \
			(node)->next = (node);          \
			(node)->prev = (node);          \
			*(head) = (node);               \
		}                                       \
	} while (0)

#define RING_REMOVE(head, node)                                                         \
	do {                                                                            \
		if (*(head) == (node))                                                  \
			*(head) = (node)->next == (node) ? NULL : (node)->next;         \
		(node)->next->prev = (node)->prev;                                      \
		(node)->prev->next = (node)->next;                                      \
		(node)->next = (node)->prev = NULL;                                     \
	} while (0)

void dq_sched_init(struct dq_sched *s, uint32_t quantum_bytes)
{
	memset(s, 0, sizeof *s);
	s->round = 1; /* 0 is the tag of a node never served */
	dq_sched_set_quantum(s, quantum_bytes);
}

void dq_sched_set_quantum(struct dq_sched *s, uint32_t quantum_bytes)
{
	s->quantum = DQ_MAX(quantum_bytes, DQ_SCHED_MIN_COST);
}

void dq_sched_client_init(struct dq_sched_client *c)
{
	memset(c, 0, sizeof *c);
	c->flow_round = 1;
}

void dq_sched_flow_init(struct dq_sched_flow *f, struct dq_sched_client *c)
{
	memset(f, 0, sizeof *f);
	f->client = c;
}

/* When the current round has no node left, the waiting ones are the next round; their tags say so already. */
static inline void flows_turn(struct dq_sched_client *c)
{
	if (!c->head && c->later) {
		c->head = c->later;
		c->later = NULL;
		c->flow_round++;
	}
}

static inline void clients_turn(struct dq_sched *s)
{
	if (!s->head && s->later) {
		s->head = s->later;
		s->later = NULL;
		s->round++;
	}
}

void dq_sched_activate(struct dq_sched *s, struct dq_sched_flow *f)
{
	struct dq_sched_client *c = f->client;
	bool was_idle = !c->head;

	if (f->next)
		return;
	if (f->round < c->flow_round) {
		f->round = c->flow_round;
		f->deficit = s->quantum;
	}
	if (f->round == c->flow_round)
		RING_APPEND(&c->head, f);
	else
		RING_APPEND(&c->later, f);
	flows_turn(c);
	s->active_flows++;

	if (!was_idle)
		return;
	if (c->round < s->round) {
		c->round = s->round;
		c->deficit = s->quantum;
	}
	if (c->round == s->round)
		RING_APPEND(&s->head, c);
	else
		RING_APPEND(&s->later, c);
	clients_turn(s);
}

void dq_sched_deactivate(struct dq_sched *s, struct dq_sched_flow *f)
{
	struct dq_sched_client *c = f->client;

	if (!f->next)
		return;
	if (f->round == c->flow_round)
		RING_REMOVE(&c->head, f);
	else
		RING_REMOVE(&c->later, f);
	flows_turn(c);
	s->active_flows--;

	if (c->head)
		return;
	if (c->round == s->round)
		RING_REMOVE(&s->head, c);
	else
		RING_REMOVE(&s->later, c);
	clients_turn(s);
}

/*
 * Takes the cost off a deficit that belongs to round `round`. True when that is the current round and nothing is left; then
 * the next round's quantum is in it. What belongs to an earlier round is worth nothing any more and stays as it is.
 */
static inline bool spend(int64_t *deficit, uint64_t round, uint64_t current, uint32_t quantum, uint32_t cost)
{
	if (DQ_UNLIKELY(round < current))
		return false;
	*deficit -= cost;
	if (*deficit > 0)
		return false;
	if (round == current)
		*deficit += quantum;
	if (*deficit <= 0)
		*deficit = 1; /* a segment larger than the quantum: cut off, else a node could sit out many rounds */
	return round == current;
}

void dq_sched_charge(struct dq_sched *s, struct dq_sched_flow *f, uint32_t bytes)
{
	struct dq_sched_client *c = f->client;
	uint32_t cost = DQ_MAX(bytes, DQ_SCHED_MIN_COST);

	if (spend(&f->deficit, f->round, c->flow_round, s->quantum, cost)) {
		f->round++;
		if (f->next) {
			RING_REMOVE(&c->head, f);
			RING_APPEND(&c->later, f);
			flows_turn(c);
		}
	} else if (c->head == f) {
		c->head = f->next;
	}

	if (spend(&c->deficit, c->round, s->round, s->quantum, cost)) {
		c->round++;
		if (c->next) {
			RING_REMOVE(&s->head, c);
			RING_APPEND(&s->later, c);
			clients_turn(s);
		}
	} else if (s->head == c) {
		s->head = c->next;
	}
}

void dq_qps_init(struct dq_qps *q, uint32_t n, uint32_t limit)
{
	memset(q, 0, sizeof *q);
	q->n = DQ_MIN(n, DQ_MAX_QPS);
	q->active = q->n;
	q->limit = limit;
	memset(q->usable, 1, q->n);
}

/*
 * Order of the QPs: outstanding bytes, then the distance from the cursor; both in one number, the key, so that a minimum
 * needs no branch. Branches on these values would be as good as random, and mispredicted ones cost more than the scan.
 */
_Static_assert((DQ_MAX_QPS & (DQ_MAX_QPS - 1)) == 0, "a key is bytes * DQ_MAX_QPS + distance");

static inline uint64_t least_key(const struct dq_qps *q, uint32_t from, uint32_t to, uint64_t distance, uint64_t least)
{
#pragma GCC unroll 4
	for (uint32_t i = from; i < to; i++, distance++) {
		uint64_t key = q->bytes[i] * DQ_MAX_QPS + distance;

		least = key < least ? key : least;
	}
	return least;
}

static inline uint32_t key_qp(uint64_t key, uint32_t cursor, uint32_t n)
{
	uint32_t qp = (uint32_t)(key & (DQ_MAX_QPS - 1)) + cursor;

	return qp < n ? qp : qp - n;
}

static inline bool qp_open(const struct dq_qps *q, uint32_t i)
{
	return q->usable[i] && q->segments[i] < q->limit;
}

uint32_t dq_qps_pick(struct dq_qps *q)
{
	uint32_t n = DQ_MIN(q->active, q->n);
	uint32_t cursor = q->cursor < n ? q->cursor : 0;
	uint64_t least;
	uint32_t best;

	if (DQ_UNLIKELY(n == 0))
		return DQ_NONE;
	/* First without a look at who is open: most often all are, or the one with the fewest bytes is. */
	least = least_key(q, cursor, n, 0, UINT64_MAX);
	least = least_key(q, 0, cursor, n - cursor, least);
	best = key_qp(least, cursor, n);
	if (DQ_UNLIKELY(!qp_open(q, best))) {
		least = UINT64_MAX;
		for (uint32_t distance = 0; distance < n; distance++) {
			uint32_t i = key_qp(distance, cursor, n);

			if (qp_open(q, i))
				least = DQ_MIN(least, q->bytes[i] * DQ_MAX_QPS + distance);
		}
		if (least == UINT64_MAX)
			return DQ_NONE;
		best = key_qp(least, cursor, n);
	}
	q->cursor = best + 1;
	return best;
}

uint32_t dq_segment_bytes(uint64_t message_bytes, uint32_t profile_segment_bytes)
{
	uint64_t least = message_bytes / DQ_MAX_SEGMENTS + (message_bytes % DQ_MAX_SEGMENTS != 0);
	uint64_t bytes = DQ_MAX((uint64_t)profile_segment_bytes, least);

	if (message_bytes > DQ_MAX_MESSAGE_BYTES)
		return 0;
	bytes = (bytes + DQ_ALIGN_BYTES - 1) & ~(uint64_t)(DQ_ALIGN_BYTES - 1);
	bytes = DQ_MAX(bytes, (uint64_t)DQ_MIN_SEGMENT_BYTES);
	return (uint32_t)DQ_MIN(bytes, (uint64_t)DQ_MAX_SEGMENT_BYTES);
}

uint32_t dq_segment_count(uint64_t message_bytes, uint32_t segment_bytes)
{
	uint64_t count;

	if (segment_bytes == 0)
		return 0;
	if (message_bytes == 0)
		return 1;
	count = message_bytes / segment_bytes + (message_bytes % segment_bytes != 0);
	return count <= DQ_MAX_SEGMENTS ? (uint32_t)count : 0;
}
