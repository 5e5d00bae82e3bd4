/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which 4 KiB granules of a range are taken. Pure bookkeeping beside the memory it speaks of: best fit among free runs by
 * power-of-two class, neighbours merged at once, all steps constant time but a search in one class when memory is scarce.
 * Not thread safe.
 */
#ifndef DQ_SHIM_ARENA_H
#define DQ_SHIM_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DQ_ARENA_GRANULE 4096u
#define DQ_ARENA_CLASSES 32u

struct dq_arena {
	uint32_t granules;
	uint32_t used;                   /* granules taken */
	uint32_t classes;                /* bit c: heads[c] is not empty */
	uint32_t heads[DQ_ARENA_CLASSES];
	struct dq_arena_run *runs;       /* one a granule; valid at the first and last of each run */
};

/* Granules are rounded up from bytes. Returns 0 or -ENOMEM, -EINVAL (bytes 0 or more than 2^43). */
int dq_arena_init(struct dq_arena *arena, uint64_t bytes);
void dq_arena_destroy(struct dq_arena *arena);
/* bytes > 0. Returns the first granule, or UINT32_MAX: no run is long enough now. */
uint32_t dq_arena_take(struct dq_arena *arena, uint64_t bytes);
/* Give back what dq_arena_take() returned. Returns false, and changes nothing, when granule is not the start of a taken run. */
bool dq_arena_give(struct dq_arena *arena, uint32_t granule);

#endif
