/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Single-producer single-consumer ring of 64-byte entries in memory that two processes share. Neither side trusts the
 * other: each keeps its own index privately and only publishes it; the other's published index is checked (distance at
 * most the size), entries are copied out before they are looked at. No syscalls.
 */
#ifndef DQ_CORE_RING_H
#define DQ_CORE_RING_H

#include <stdatomic.h>
#include <string.h>

#include "core/base.h"

#define DQ_RING_ENTRY_BYTES 64u

/* The shared part: two published indices, each on its own pair of cache lines. Free-running 32-bit counters. */
struct dq_ring_shared {
	_Alignas(128) _Atomic uint32_t tail; /* written by the producer: entries produced */
	_Alignas(128) _Atomic uint32_t head; /* written by the consumer: entries consumed */
};
_Static_assert(sizeof(struct dq_ring_shared) == 256, "shared-memory layout");

/* One side's private view. size is a power of two, 2..65536. */
struct dq_ring {
	struct dq_ring_shared *shared;
	uint8_t *entries;
	uint32_t mask;
	uint32_t mine;   /* my index */
	uint32_t theirs; /* the other's index as last read */
};

static inline void dq_ring_init(struct dq_ring *r, struct dq_ring_shared *shared, void *entries, uint32_t size)
{
	r->shared = shared;
	r->entries = entries;
	r->mask = size - 1;
	r->mine = 0;
	r->theirs = 0;
}

/* Producer: free entries; negative when the consumer's published index is impossible (the other side is broken or hostile). */
static inline int64_t dq_ring_space(struct dq_ring *r, uint32_t want)
{
	uint32_t used = r->mine - r->theirs;
	if (DQ_UNLIKELY(r->mask + 1 - used < want)) {
		uint32_t theirs = atomic_load_explicit(&r->shared->head, memory_order_acquire);
		used = r->mine - theirs;
		if (DQ_UNLIKELY(used > r->mask + 1))
			return -1; /* not remembered: every later call says so too */
		r->theirs = theirs;
	}
	return r->mask + 1 - used;
}

/* Producer: write entry number i (0 = next) ahead of publication. */
static inline void dq_ring_write(struct dq_ring *r, uint32_t i, const void *entry)
{
	memcpy(r->entries + (size_t)((r->mine + i) & r->mask) * DQ_RING_ENTRY_BYTES, entry, DQ_RING_ENTRY_BYTES);
}

/* Producer: publish n written entries. */
static inline void dq_ring_produce(struct dq_ring *r, uint32_t n)
{
	r->mine += n;
	atomic_store_explicit(&r->shared->tail, r->mine, memory_order_release);
}

/* Consumer: entries there to read; negative when the producer's published index is impossible. */
static inline int64_t dq_ring_avail(struct dq_ring *r)
{
	uint32_t n = r->theirs - r->mine;
	if (n == 0) {
		uint32_t theirs = atomic_load_explicit(&r->shared->tail, memory_order_acquire);
		n = theirs - r->mine;
		if (DQ_UNLIKELY(n > r->mask + 1))
			return -1;
		r->theirs = theirs;
	}
	return n;
}

/* Consumer: as dq_ring_avail, but always looks at the shared index. */
static inline int64_t dq_ring_refresh(struct dq_ring *r)
{
	uint32_t theirs = atomic_load_explicit(&r->shared->tail, memory_order_acquire);
	if (DQ_UNLIKELY(theirs - r->mine > r->mask + 1))
		return -1;
	r->theirs = theirs;
	return theirs - r->mine;
}

/* Consumer: copy out entry number i (0 = oldest). */
static inline void dq_ring_read(const struct dq_ring *r, uint32_t i, void *entry)
{
	memcpy(entry, r->entries + (size_t)((r->mine + i) & r->mask) * DQ_RING_ENTRY_BYTES, DQ_RING_ENTRY_BYTES);
}

/* Consumer: give n entries back. */
static inline void dq_ring_consume(struct dq_ring *r, uint32_t n)
{
	r->mine += n;
	atomic_store_explicit(&r->shared->head, r->mine, memory_order_release);
}

/* Between publishing and looking at the other side's "asleep" flag, and between setting that flag and the last look at the
 * ring: the one order that acquire and release do not give. */
static inline void dq_ring_fence(void)
{
#ifdef __SANITIZE_THREAD__
	/* That sanitizer refuses fences; a locked exchange orders as much on the machines where it runs. */
	static _Atomic int order;
	atomic_exchange_explicit(&order, 1, memory_order_seq_cst);
#else
	atomic_thread_fence(memory_order_seq_cst);
#endif
}

#endif
