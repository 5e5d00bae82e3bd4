/* SPDX-License-Identifier: Apache-2.0 */
#include "shim/arena.h"

#include <errno.h>
#include <stdlib.h>

#define NIL UINT32_MAX

/* At a run's first granule: all fields. At its last: first (so that a neighbour finds the start) and taken. */
struct dq_arena_run {
	uint32_t length;
	uint32_t first;
	uint32_t prev, next; /* of its class, when free */
	bool start, taken;
};

static uint32_t class_of(uint32_t length)
{
	return 31u - (uint32_t)__builtin_clz(length);
}

static void tag(struct dq_arena *a, uint32_t first, uint32_t length, bool taken)
{
	struct dq_arena_run *head = &a->runs[first], *end = &a->runs[first + length - 1];

	end->start = false;
	end->first = first;
	end->taken = taken;
	head->start = true;
	head->first = first;
	head->length = length;
	head->taken = taken;
}

static void link_free(struct dq_arena *a, uint32_t first, uint32_t length)
{
	uint32_t c = class_of(length);

	tag(a, first, length, false);
	a->runs[first].prev = NIL;
	a->runs[first].next = a->heads[c];
	if (a->heads[c] != NIL)
		a->runs[a->heads[c]].prev = first;
	a->heads[c] = first;
	a->classes |= 1u << c;
}

static void unlink_free(struct dq_arena *a, uint32_t first)
{
	struct dq_arena_run *r = &a->runs[first];
	uint32_t c = class_of(r->length);

	if (r->prev != NIL)
		a->runs[r->prev].next = r->next;
	else
		a->heads[c] = r->next;
	if (r->next != NIL)
		a->runs[r->next].prev = r->prev;
	if (a->heads[c] == NIL)
		a->classes &= ~(1u << c);
}

int dq_arena_init(struct dq_arena *arena, uint64_t bytes)
{
	uint64_t granules = (bytes + DQ_ARENA_GRANULE - 1) / DQ_ARENA_GRANULE;

	if (bytes == 0 || bytes > (uint64_t)DQ_ARENA_GRANULE << 31)
		return -EINVAL;
	arena->runs = calloc(granules, sizeof *arena->runs);
	if (!arena->runs)
		return -ENOMEM;
	arena->granules = (uint32_t)granules;
	arena->used = 0;
	arena->classes = 0;
	for (uint32_t c = 0; c < DQ_ARENA_CLASSES; c++)
		arena->heads[c] = NIL;
	link_free(arena, 0, arena->granules);
	return 0;
}

void dq_arena_destroy(struct dq_arena *arena)
{
	free(arena->runs);
	arena->runs = NULL;
}

uint32_t dq_arena_take(struct dq_arena *arena, uint64_t bytes)
{
	uint64_t wanted = (bytes + DQ_ARENA_GRANULE - 1) / DQ_ARENA_GRANULE;
	uint32_t need, c, larger, at = NIL;

	if (bytes == 0 || wanted > arena->granules - arena->used)
		return NIL;
	need = (uint32_t)wanted;
	c = class_of(need);
	/* A run of the same class may fit closely; look at a few, so that a long list costs little. */
	uint32_t looked = 0;
	for (uint32_t i = arena->heads[c]; i != NIL && looked < 8; i = arena->runs[i].next, looked++)
		if (arena->runs[i].length >= need && (at == NIL || arena->runs[i].length < arena->runs[at].length))
			at = i;
	larger = c < 31 ? arena->classes & ~((2u << c) - 1) : 0;
	if (at == NIL && larger)
		at = arena->heads[__builtin_ctz(larger)];
	if (at == NIL)
		for (uint32_t i = arena->heads[c]; i != NIL && at == NIL; i = arena->runs[i].next)
			if (arena->runs[i].length >= need)
				at = i;
	if (at == NIL)
		return NIL;

	uint32_t length = arena->runs[at].length;
	unlink_free(arena, at);
	if (length > need)
		link_free(arena, at + need, length - need);
	tag(arena, at, need, true);
	arena->used += need;
	return at;
}

bool dq_arena_give(struct dq_arena *arena, uint32_t granule)
{
	if (granule >= arena->granules)
		return false;
	struct dq_arena_run *r = &arena->runs[granule];
	if (!r->start || !r->taken)
		return false;

	uint32_t first = granule, length = r->length, after = granule + length;
	arena->used -= length;
	r->start = false;
	if (after < arena->granules && !arena->runs[after].taken) {
		uint32_t more = arena->runs[after].length;
		unlink_free(arena, after);
		arena->runs[after].start = false;
		length += more;
	}
	if (first > 0 && !arena->runs[first - 1].taken) {
		uint32_t before = arena->runs[first - 1].first;
		unlink_free(arena, before);
		length += first - before;
		first = before;
	}
	link_free(arena, first, length);
	return true;
}
