/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is due next? A binary heap over at most max ids, each with one due time. Pure: time is an argument (ns). Ids with
 * the same due time come in the order of their numbers. Set-up allocates; the other functions do not.
 */
#ifndef DQ_PROBE_SCHEDULE_H
#define DQ_PROBE_SCHEDULE_H

#include "core/base.h"

struct dq_schedule_entry {
	uint64_t due_ns;
	uint32_t id;
};

struct dq_schedule {
	struct dq_schedule_entry *heap;
	uint32_t *place;     /* of each id: index in the heap + 1; 0 = not in it */
	uint32_t count;
	uint32_t max;
};

int dq_schedule_init(struct dq_schedule *s, uint32_t max); /* 0, -EINVAL (max is 0), -ENOMEM */
void dq_schedule_destroy(struct dq_schedule *s);           /* a zeroed one is fine */
/* Put id in, or move it. id < max. */
void dq_schedule_set(struct dq_schedule *s, uint32_t id, uint64_t due_ns);
/* Take id out; does nothing when it is not in. id < max. */
void dq_schedule_remove(struct dq_schedule *s, uint32_t id);
/* When the first is due; DQ_NEVER when there is none. */
uint64_t dq_schedule_next(const struct dq_schedule *s);
/* Take out the first id that is due at now_ns; DQ_NONE when there is none. */
uint32_t dq_schedule_pop(struct dq_schedule *s, uint64_t now_ns, uint64_t *due_ns);
/* The first of due, due + interval, due + 2 interval, ... after both due and now: no drift, and what was missed is skipped. */
uint64_t dq_schedule_following(uint64_t due_ns, uint64_t interval_ns, uint64_t now_ns);

#endif
