/* SPDX-License-Identifier: Apache-2.0 */
#include "shim/staging.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define RETRY_NS 500000000ull   /* after a refusal, ask again so much later */
#define SMALL_BYTES (1ull << 20) /* when the usual size is refused, no chunk smaller than this */

static uint64_t round_up(uint64_t bytes)
{
	return (bytes + DQ_ARENA_GRANULE - 1) & ~(uint64_t)(DQ_ARENA_GRANULE - 1);
}

static struct dq_client_request chunk_request(uint64_t bytes)
{
	return (struct dq_client_request){.type = DQ_REQ_MEM_ALLOC, .arg0 = bytes, .arg1 = 1};
}

void dq_staging_answer(dqplb_context *ctx, uint64_t bytes, struct dq_shim_answer *answer)
{
	struct dq_shim_chunk *chunk = NULL;

	ctx->growing = false;
	ctx->grow_status = answer->reply.status;
	if (answer->reply.status != DQPLB_OK) {
		snprintf(ctx->grow_text, sizeof ctx->grow_text, "%s", answer->reply.text);
		ctx->grow_retry = dq_shim_now_coarse() + RETRY_NS;
		return;
	}
	if (answer->fds[0] >= 0 && answer->reply.arg1 >= bytes && answer->reply.arg0 < UINT32_MAX)
		chunk = calloc(1, sizeof *chunk);
	if (chunk && dq_arena_init(&chunk->arena, bytes) == 0) {
		chunk->id = (uint32_t)answer->reply.arg0;
		chunk->bytes = bytes;
		chunk->base = dq_shim_map(answer->fds[0], bytes);
		if (chunk->base) {
			chunk->idle_since = dq_shim_now_coarse();
			ctx->staging_bytes += bytes;
			chunk->next = ctx->chunks;
			if (chunk->next)
				chunk->next->prev = chunk;
			ctx->chunks = chunk;
			return;
		}
		dq_arena_destroy(&chunk->arena);
	}
	/* The daemon keeps an allocation that is of no use here until the context closes. */
	free(chunk);
	ctx->grow_status = DQPLB_ERR_NOMEM;
	ctx->grow_retry = dq_shim_now_coarse() + RETRY_NS;
	snprintf(ctx->grow_text, sizeof ctx->grow_text, "the daemon's answer of %llu bytes of staging memory cannot be mapped: %s",
		 (unsigned long long)answer->reply.arg1, strerror(errno));
}

/* preparing is set: nobody else asks for the first chunk. */
static int first_chunk(dqplb_context *ctx)
{
	int status = DQPLB_OK;

	for (uint64_t bytes = DQ_SHIM_STAGING_BYTES; bytes >= SMALL_BYTES; bytes /= 8) {
		struct dq_client_request request = chunk_request(bytes);
		struct dq_shim_answer answer;

		status = dq_shim_call(ctx, &request, -1, &answer);
		if (status == DQPLB_ERR_NOMEM)
			continue; /* perhaps the quota has room for a smaller one */
		if (status != DQPLB_OK)
			return status;
		pthread_mutex_lock(&ctx->lock);
		dq_staging_answer(ctx, bytes, &answer);
		status = ctx->grow_status;
		if (status != DQPLB_OK)
			dq_shim_fail(status, "no staging memory: %s", ctx->grow_text);
		pthread_mutex_unlock(&ctx->lock);
		dq_shim_answer_close(&answer);
		return status;
	}
	return status;
}

int dq_staging_prepare(dqplb_context *ctx)
{
	int status = DQPLB_OK;

	pthread_mutex_lock(&ctx->lock);
	while (ctx->preparing)
		pthread_cond_wait(&ctx->copied, &ctx->lock);
	if (!ctx->chunks) {
		ctx->preparing = true;
		pthread_mutex_unlock(&ctx->lock);
		status = first_chunk(ctx);
		pthread_mutex_lock(&ctx->lock);
		ctx->preparing = false;
		pthread_cond_broadcast(&ctx->copied);
	}
	pthread_mutex_unlock(&ctx->lock);
	return status;
}

/* Ask for a chunk that holds `bytes`, unless an answer is awaited. */
static void grow(dqplb_context *ctx, uint64_t bytes)
{
	uint64_t want = DQ_MAX(bytes, DQ_SHIM_STAGING_BYTES);
	struct dq_client_request request;

	if (ctx->growing)
		return;
	/* The usual size was refused just now: try the size that is needed. */
	if (ctx->grow_status != DQPLB_OK && ctx->grow_bytes == want)
		want = DQ_MAX(bytes, SMALL_BYTES);
	request = chunk_request(want);
	if (dq_shim_call_async(ctx, &request) == DQPLB_OK) {
		ctx->growing = true;
		ctx->grow_bytes = want;
	}
}

int dq_staging_take(dqplb_context *ctx, uint64_t bytes, enum dq_shim_direction direction, bool first, struct dq_shim_piece *piece)
{
	bool later = false, enough;

	if (bytes > (uint64_t)DQ_ARENA_GRANULE << 31)
		return dq_shim_fail(DQPLB_ERR_INVALID, "a staged message of %llu bytes: at most %llu are possible",
				    (unsigned long long)bytes, (unsigned long long)DQ_ARENA_GRANULE << 31);
	bytes = bytes ? round_up(bytes) : DQ_ARENA_GRANULE; /* an empty message has a place, too: one rule for all */
	if (ctx->growing)
		dq_shim_async_poll(ctx);
	/* One alone may be as large as a chunk. */
	enough = ctx->staged[direction] && ctx->staged[direction] + bytes > ctx->staging_bytes / 4 * (first ? 3 : 2);
	for (struct dq_shim_chunk *chunk = ctx->chunks; chunk; chunk = chunk->next) {
		uint32_t granule = enough ? UINT32_MAX : dq_arena_take(&chunk->arena, bytes);
		if (granule != UINT32_MAX) {
			*piece = (struct dq_shim_piece){.chunk = chunk, .granule = granule, .direction = direction, .bytes = bytes};
			ctx->staged[direction] += bytes;
			return DQPLB_OK;
		}
		later |= chunk->bytes >= bytes;
	}
	if (!ctx->growing && ctx->grow_status != DQPLB_OK && ctx->grow_bytes <= DQ_MAX(bytes, SMALL_BYTES) &&
	    dq_shim_now_coarse() < ctx->grow_retry) {
		if (!later)
			return dq_shim_fail(DQPLB_ERR_NOMEM,
					    "no staging memory for a message of %llu bytes: %s. Use smaller messages, memory of "
					    "dqplb_mem_alloc(), or raise the client's quota in the daemon's configuration",
					    (unsigned long long)bytes, ctx->grow_text);
	} else {
		grow(ctx, bytes);
	}
	return dq_shim_fail(DQPLB_ERR_AGAIN, "no staging memory for %llu bytes now: test or wait for something, then call again",
			    (unsigned long long)bytes);
}

void dq_staging_give(dqplb_context *ctx, struct dq_shim_piece *piece)
{
	struct dq_shim_chunk *chunk = piece->chunk;

	if (!chunk)
		return;
	piece->chunk = NULL;
	ctx->staged[piece->direction] -= piece->bytes;
	dq_arena_give(&chunk->arena, piece->granule);
	if (chunk->arena.used == 0)
		chunk->idle_since = dq_shim_now_coarse();
}

static void unlink_chunk(dqplb_context *ctx, struct dq_shim_chunk *chunk)
{
	if (chunk->prev)
		chunk->prev->next = chunk->next;
	else
		ctx->chunks = chunk->next;
	if (chunk->next)
		chunk->next->prev = chunk->prev;
}

static void destroy(struct dq_shim_chunk *chunk)
{
	munmap(chunk->base, chunk->bytes);
	dq_arena_destroy(&chunk->arena);
	free(chunk);
}

void dq_staging_tick(dqplb_context *ctx)
{
	uint64_t now;

	if (ctx->growing)
		dq_shim_async_poll(ctx);
	if (!ctx->chunks || !ctx->chunks->next || ctx->dead)
		return;
	now = dq_shim_now_coarse();
	if (now < ctx->next_trim)
		return;
	ctx->next_trim = now + ctx->chunk_idle_ns / 8;
	struct dq_shim_chunk *idle = NULL; /* the largest: one a round, and the usual size stays */
	for (struct dq_shim_chunk *chunk = ctx->chunks; chunk; chunk = chunk->next)
		if (!chunk->arena.used && now - chunk->idle_since >= ctx->chunk_idle_ns && (!idle || chunk->bytes > idle->bytes))
			idle = chunk;
	if (!idle)
		return;
	struct dq_client_request request = {.type = DQ_REQ_MEM_FREE, .arg0 = idle->id};
	dq_shim_async_poll(ctx); /* the answer about the one before */
	if (dq_shim_call_async(ctx, &request) != DQPLB_OK)
		return;
	unlink_chunk(ctx, idle);
	ctx->staging_bytes -= idle->bytes;
	destroy(idle);
}

void dq_staging_destroy(dqplb_context *ctx)
{
	while (ctx->chunks) {
		struct dq_shim_chunk *chunk = ctx->chunks;
		ctx->chunks = chunk->next;
		destroy(chunk);
	}
}
