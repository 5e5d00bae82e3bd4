/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The events of a simulation, in order of time. Nearly all of them happen a fixed time after the event that makes them: a
 * packet of full size leaves a port of some rate, or reaches the end of a link of some delay. Events with the same delay
 * stay in the order in which they were made, so each delay has a lane, a first-in first-out ring, and only the heads of the
 * lanes are compared; what has no lane goes to a heap. Equal times: the lower lane first, the heap last, and in each the
 * order of creation; so a run is determined by what it is given.
 * Time is picoseconds: a byte at 400 Gbit/s takes 20 of them. Pure, one thread. Memory grows by doubling.
 */
#ifndef DQ_SIM_EVENTS_H
#define DQ_SIM_EVENTS_H

#include "core/base.h"

#define DQ_SIM_LANES 15u
#define DQ_SIM_HEAP DQ_SIM_LANES /* "lane" of events that have none */
#define DQ_SIM_PS_PER_NS 1000ull

struct dq_sim_event {
	uint64_t ps;
	uint32_t what;           /* the owner's */
	uint32_t arg;
};

struct dq_sim_lane {
	struct dq_sim_event *ring;
	uint32_t room;           /* power of two, 0 before the first event */
	uint32_t head;           /* free-running */
	uint32_t tail;
	uint64_t delay_ps;
};

struct dq_sim_timer {            /* an entry of the heap */
	struct dq_sim_event event;
	uint64_t order;
};

struct dq_sim_events {
	uint64_t next[DQ_SIM_LANES + 1]; /* time of each head, DQ_NEVER when empty; the last is the heap's */
	struct dq_sim_lane lanes[DQ_SIM_LANES];
	uint32_t lane_count;
	struct dq_sim_timer *heap;
	uint32_t heap_room;
	uint32_t heap_count;
	uint64_t orders;
	uint64_t now_ps;
	uint64_t handled;
	uint32_t popped;         /* lane of the last event */
	bool lost;               /* no memory for an event: the run cannot go on */
};

void dq_sim_events_init(struct dq_sim_events *q);
void dq_sim_events_fini(struct dq_sim_events *q);
/* The lane of a delay; DQ_SIM_HEAP when there are too many different ones. For set-up: it searches. */
uint32_t dq_sim_events_lane(struct dq_sim_events *q, uint64_t delay_ps);
void dq_sim_events_grow(struct dq_sim_events *q, struct dq_sim_lane *lane); /* private */
/* At any time, not before now. */
void dq_sim_events_at(struct dq_sim_events *q, uint64_t ps, uint32_t what, uint32_t arg);
void dq_sim_events_pop_timer(struct dq_sim_events *q, struct dq_sim_event *out); /* private */

/* delay_ps, the lane's, after now. */
static inline void dq_sim_events_after(struct dq_sim_events *q, uint32_t lane_index, uint64_t delay_ps, uint32_t what, uint32_t arg)
{
	struct dq_sim_lane *lane = &q->lanes[lane_index];
	uint64_t ps = q->now_ps + delay_ps;

	if (DQ_UNLIKELY(lane_index == DQ_SIM_HEAP)) {
		dq_sim_events_at(q, ps, what, arg);
		return;
	}
	if (DQ_UNLIKELY(lane->tail - lane->head == lane->room)) {
		dq_sim_events_grow(q, lane);
		if (q->lost)
			return;
	}
	if (lane->head == lane->tail)
		q->next[lane_index] = ps;
	lane->ring[lane->tail++ & (lane->room - 1)] = (struct dq_sim_event){ ps, what, arg };
}

/* The next event, which is then now; false when there is none up to until_ps. */
static inline bool dq_sim_events_pop(struct dq_sim_events *q, uint64_t until_ps, struct dq_sim_event *out)
{
	struct dq_sim_lane *lane;
	uint64_t least = q->next[DQ_SIM_HEAP];
	uint32_t at = DQ_SIM_HEAP, n = q->lane_count;

	for (uint32_t i = n; i-- > 0;) {
		bool less = q->next[i] <= least;

		least = less ? q->next[i] : least;
		at = less ? i : at;
	}
	if (least > until_ps || least == DQ_NEVER)
		return false;
	q->now_ps = least;
	q->handled++;
	q->popped = at;
	if (DQ_UNLIKELY(at == DQ_SIM_HEAP)) {
		dq_sim_events_pop_timer(q, out);
		return true;
	}
	lane = &q->lanes[at];
	*out = lane->ring[lane->head++ & (lane->room - 1)];
	q->next[at] = lane->head == lane->tail ? DQ_NEVER : lane->ring[lane->head & (lane->room - 1)].ps;
	return true;
}

/* Argument of the event that comes so many after the next one in the lane of the last; `own` when there is none. */
static inline uint32_t dq_sim_events_ahead(const struct dq_sim_events *q, uint32_t ahead, uint32_t own)
{
	const struct dq_sim_lane *lane;

	if (q->popped == DQ_SIM_HEAP)
		return own;
	lane = &q->lanes[q->popped];
	return lane->tail - lane->head > ahead ? lane->ring[(lane->head + ahead) & (lane->room - 1)].arg : own;
}

#endif
