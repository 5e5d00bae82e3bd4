/* SPDX-License-Identifier: Apache-2.0 */
#include "core/slab.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define OBJECT_ALIGN 16u /* of malloc, so that any object type may be stored */

int dq_slab_init(struct dq_slab *s, uint32_t object_bytes, uint32_t chunk_objects, uint32_t limit)
{
	size_t chunks;

	memset(s, 0, sizeof *s);
	s->free_head = DQ_NONE;
	if (object_bytes == 0 || object_bytes > UINT32_MAX - OBJECT_ALIGN || chunk_objects == 0 ||
	    (chunk_objects & (chunk_objects - 1)) != 0 || limit == 0 || limit >= DQ_SLAB_LIVE)
		return -EINVAL;
	s->object_bytes = (object_bytes + OBJECT_ALIGN - 1) & ~(OBJECT_ALIGN - 1);
	s->chunk_shift = (uint32_t)__builtin_ctz(chunk_objects);
	s->limit = limit;
	chunks = ((size_t)limit + chunk_objects - 1) >> s->chunk_shift;
	s->chunks = calloc(chunks, sizeof *s->chunks);
	return s->chunks ? 0 : -ENOMEM;
}

void dq_slab_fini(struct dq_slab *s)
{
	if (s->chunks) {
		size_t chunks = ((size_t)s->capacity + (1u << s->chunk_shift) - 1) >> s->chunk_shift;

		for (size_t i = 0; i < chunks; i++)
			free(s->chunks[i]);
	}
	free(s->chunks);
	free(s->next_free);
	memset(s, 0, sizeof *s);
	s->free_head = DQ_NONE;
}

/* One more chunk; its indices join the free list in ascending order. */
static bool slab_grow(struct dq_slab *s)
{
	uint32_t first = s->capacity;
	uint32_t objects = DQ_MIN(1u << s->chunk_shift, s->limit - first);
	uint32_t *next_free;
	uint8_t *chunk;

	if (objects == 0)
		return false;
	next_free = realloc(s->next_free, ((size_t)first + objects) * sizeof *next_free);
	if (!next_free)
		return false;
	s->next_free = next_free;
	chunk = malloc((size_t)objects * s->object_bytes);
	if (!chunk)
		return false;
	s->chunks[first >> s->chunk_shift] = chunk;
	for (uint32_t i = 0; i < objects; i++)
		next_free[first + i] = i + 1 < objects ? first + i + 1 : s->free_head;
	s->free_head = first;
	s->capacity = first + objects;
	return true;
}

uint32_t dq_slab_alloc(struct dq_slab *s)
{
	uint32_t index;

	if (DQ_UNLIKELY(s->free_head == DQ_NONE) && (!s->chunks || !slab_grow(s)))
		return DQ_NONE;
	index = s->free_head;
	s->free_head = s->next_free[index];
	s->next_free[index] = DQ_SLAB_LIVE;
	memset(dq_slab_at(s, index), 0, s->object_bytes);
	if (++s->used > s->peak)
		s->peak = s->used;
	return index;
}

void dq_slab_free(struct dq_slab *s, uint32_t index)
{
	if (index >= s->capacity || s->next_free[index] != DQ_SLAB_LIVE)
		return;
	s->next_free[index] = s->free_head;
	s->free_head = index;
	s->used--;
}
