/* SPDX-License-Identifier: Apache-2.0 */
#include "probe/schedule.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static bool before(const struct dq_schedule_entry *a, const struct dq_schedule_entry *b)
{
	return a->due_ns != b->due_ns ? a->due_ns < b->due_ns : a->id < b->id;
}

static void put(struct dq_schedule *s, uint32_t at, struct dq_schedule_entry e)
{
	s->heap[at] = e;
	s->place[e.id] = at + 1;
}

static void sift_up(struct dq_schedule *s, uint32_t at, struct dq_schedule_entry e)
{
	while (at > 0) {
		uint32_t parent = (at - 1) / 2;
		if (!before(&e, &s->heap[parent]))
			break;
		put(s, at, s->heap[parent]);
		at = parent;
	}
	put(s, at, e);
}

static void sift_down(struct dq_schedule *s, uint32_t at, struct dq_schedule_entry e)
{
	for (;;) {
		uint32_t child = 2 * at + 1;
		if (child >= s->count)
			break;
		if (child + 1 < s->count && before(&s->heap[child + 1], &s->heap[child]))
			child++;
		if (!before(&s->heap[child], &e))
			break;
		put(s, at, s->heap[child]);
		at = child;
	}
	put(s, at, e);
}

/* Find the right place for e, whose hole is at. */
static void settle(struct dq_schedule *s, uint32_t at, struct dq_schedule_entry e)
{
	if (at > 0 && before(&e, &s->heap[(at - 1) / 2]))
		sift_up(s, at, e);
	else
		sift_down(s, at, e);
}

int dq_schedule_init(struct dq_schedule *s, uint32_t max)
{
	memset(s, 0, sizeof *s);
	if (max == 0)
		return -EINVAL;
	/* calloc: pages of ids never used are never touched. */
	s->heap = calloc(max, sizeof *s->heap);
	s->place = calloc(max, sizeof *s->place);
	s->max = max;
	if (!s->heap || !s->place) {
		dq_schedule_destroy(s);
		return -ENOMEM;
	}
	return 0;
}

void dq_schedule_destroy(struct dq_schedule *s)
{
	free(s->heap);
	free(s->place);
	memset(s, 0, sizeof *s);
}

void dq_schedule_set(struct dq_schedule *s, uint32_t id, uint64_t due_ns)
{
	struct dq_schedule_entry e = { .due_ns = due_ns, .id = id };
	uint32_t at = s->place[id] ? s->place[id] - 1 : s->count++;
	settle(s, at, e);
}

void dq_schedule_remove(struct dq_schedule *s, uint32_t id)
{
	if (s->place[id] == 0)
		return;
	uint32_t at = s->place[id] - 1;
	struct dq_schedule_entry last = s->heap[--s->count];
	s->place[id] = 0;
	if (last.id != id)
		settle(s, at, last);
}

uint64_t dq_schedule_next(const struct dq_schedule *s)
{
	return s->count ? s->heap[0].due_ns : DQ_NEVER;
}

uint32_t dq_schedule_pop(struct dq_schedule *s, uint64_t now_ns, uint64_t *due_ns)
{
	if (s->count == 0 || s->heap[0].due_ns > now_ns)
		return DQ_NONE;
	uint32_t id = s->heap[0].id;
	*due_ns = s->heap[0].due_ns;
	dq_schedule_remove(s, id);
	return id;
}

uint64_t dq_schedule_following(uint64_t due_ns, uint64_t interval_ns, uint64_t now_ns)
{
	uint64_t steps = now_ns > due_ns ? (now_ns - due_ns) / interval_ns + 1 : 1;
	return due_ns + steps * interval_ns;
}
