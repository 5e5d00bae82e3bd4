/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/events.h"

#include <stdlib.h>
#include <string.h>

#define LANE_FIRST_ROOM 256u
#define HEAP_FIRST_ROOM 256u

void dq_sim_events_init(struct dq_sim_events *q)
{
	memset(q, 0, sizeof *q);
	for (uint32_t i = 0; i <= DQ_SIM_LANES; i++)
		q->next[i] = DQ_NEVER;
}

void dq_sim_events_fini(struct dq_sim_events *q)
{
	for (uint32_t i = 0; i < DQ_SIM_LANES; i++)
		free(q->lanes[i].ring);
	free(q->heap);
	dq_sim_events_init(q);
}

uint32_t dq_sim_events_lane(struct dq_sim_events *q, uint64_t delay_ps)
{
	for (uint32_t i = 0; i < q->lane_count; i++)
		if (q->lanes[i].delay_ps == delay_ps)
			return i;
	if (q->lane_count == DQ_SIM_LANES)
		return DQ_SIM_HEAP;
	q->lanes[q->lane_count].delay_ps = delay_ps;
	return q->lane_count++;
}

void dq_sim_events_grow(struct dq_sim_events *q, struct dq_sim_lane *lane)
{
	uint32_t room = lane->room ? lane->room * 2 : LANE_FIRST_ROOM;
	struct dq_sim_event *ring = room ? malloc((size_t)room * sizeof *ring) : NULL;

	if (!ring) {
		q->lost = true;
		return;
	}
	for (uint32_t i = lane->head; i != lane->tail; i++)
		ring[i & (room - 1)] = lane->ring[i & (lane->room - 1)];
	free(lane->ring);
	lane->ring = ring;
	lane->room = room;
}

static inline bool before(const struct dq_sim_timer *a, const struct dq_sim_timer *b)
{
	return a->event.ps != b->event.ps ? a->event.ps < b->event.ps : a->order < b->order;
}

void dq_sim_events_at(struct dq_sim_events *q, uint64_t ps, uint32_t what, uint32_t arg)
{
	struct dq_sim_timer t = { { DQ_MAX(ps, q->now_ps), what, arg }, q->orders++ };
	uint32_t i;

	if (q->heap_count == q->heap_room) {
		uint32_t room = q->heap_room ? q->heap_room * 2 : HEAP_FIRST_ROOM;
		struct dq_sim_timer *heap = room ? realloc(q->heap, (size_t)room * sizeof *heap) : NULL;

		if (!heap) {
			q->lost = true;
			return;
		}
		q->heap = heap;
		q->heap_room = room;
	}
	for (i = q->heap_count++; i > 0 && before(&t, &q->heap[(i - 1) / 2]); i = (i - 1) / 2)
		q->heap[i] = q->heap[(i - 1) / 2];
	q->heap[i] = t;
	q->next[DQ_SIM_HEAP] = q->heap[0].event.ps;
}

void dq_sim_events_pop_timer(struct dq_sim_events *q, struct dq_sim_event *out)
{
	struct dq_sim_timer last;
	uint32_t i = 0;

	*out = q->heap[0].event;
	last = q->heap[--q->heap_count];
	for (;;) {
		uint32_t child = 2 * i + 1;

		if (child >= q->heap_count)
			break;
		if (child + 1 < q->heap_count && before(&q->heap[child + 1], &q->heap[child]))
			child++;
		if (!before(&q->heap[child], &last))
			break;
		q->heap[i] = q->heap[child];
		i = child;
	}
	q->heap[i] = last;
	q->next[DQ_SIM_HEAP] = q->heap_count ? q->heap[0].event.ps : DQ_NEVER;
}
