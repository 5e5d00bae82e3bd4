/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Objects of one size, named by a 32-bit index. Grows by chunks up to a limit, never moves an object, never shrinks before
 * fini. Whether an index is live is known, so that a stale or hostile index is an error and not a wild pointer.
 * One thread. dq_slab_alloc may allocate a chunk (amortised); after warm-up it does not.
 */
#ifndef DQ_CORE_SLAB_H
#define DQ_CORE_SLAB_H

#include "core/base.h"

struct dq_slab {
	uint8_t **chunks;
	uint32_t *next_free;     /* per object: next free index, or DQ_SLAB_LIVE */
	uint32_t object_bytes;
	uint32_t chunk_shift;    /* objects per chunk = 1 << chunk_shift */
	uint32_t capacity;       /* objects in allocated chunks */
	uint32_t limit;
	uint32_t free_head;
	uint32_t used;
	uint32_t peak;
};

#define DQ_SLAB_LIVE (UINT32_MAX - 1)

/* limit: most objects. chunk_objects: power of two, objects allocated at a time. Returns 0 or -EINVAL/-ENOMEM. */
int dq_slab_init(struct dq_slab *s, uint32_t object_bytes, uint32_t chunk_objects, uint32_t limit);
void dq_slab_fini(struct dq_slab *s);
/* A zeroed object's index, or DQ_NONE when the limit or memory is reached. */
uint32_t dq_slab_alloc(struct dq_slab *s);
void dq_slab_free(struct dq_slab *s, uint32_t index);

/* The object, or NULL when index is not live. */
static inline void *dq_slab_at(const struct dq_slab *s, uint32_t index)
{
	if (DQ_UNLIKELY(index >= s->capacity || s->next_free[index] != DQ_SLAB_LIVE))
		return NULL;
	return s->chunks[index >> s->chunk_shift] +
	       (size_t)(index & ((1u << s->chunk_shift) - 1)) * s->object_bytes;
}

#endif
