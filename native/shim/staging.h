/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pieces of shared memory for messages in memory that the daemon cannot reach. Chunks come from the daemon, the first when
 * memory is registered, more on demand and without blocking; a chunk that nobody used for a while goes back, but the last one.
 * All functions expect the context's lock, but dq_staging_prepare().
 */
#ifndef DQ_SHIM_STAGING_H
#define DQ_SHIM_STAGING_H

#include "shim/shim.h"

/* No lock held. Have at least one chunk; one round trip to the daemon when there is none. */
int dq_staging_prepare(dqplb_context *ctx);
/*
 * DQPLB_ERR_AGAIN: none now, more was asked for or will be given back. DQPLB_ERR_NOMEM: there will never be as much.
 * Sends wait for receives of the peer, and receives for its sends. So neither may take all there is, or two processes could wait
 * for each other for ever: a direction gets half, and its flows that have nothing under way another quarter. `first`: so for this one.
 */
int dq_staging_take(dqplb_context *ctx, uint64_t bytes, enum dq_shim_direction direction, bool first, struct dq_shim_piece *piece);
void dq_staging_give(dqplb_context *ctx, struct dq_shim_piece *piece); /* nothing when there is none */
static inline uint8_t *dq_staging_address(const struct dq_shim_piece *piece)
{
	return piece->chunk->base + (uint64_t)piece->granule * DQ_ARENA_GRANULE;
}
static inline uint64_t dq_staging_offset(const struct dq_shim_piece *piece)
{
	return (uint64_t)piece->granule * DQ_ARENA_GRANULE;
}
/* From time to time: take answers, give idle chunks back. Cheap when there is nothing to do. */
void dq_staging_tick(dqplb_context *ctx);
/* The answer to a request for a chunk of so many bytes; takes the fd out of it. */
void dq_staging_answer(dqplb_context *ctx, uint64_t bytes, struct dq_shim_answer *answer);
void dq_staging_destroy(dqplb_context *ctx); /* unmaps all */

#endif
