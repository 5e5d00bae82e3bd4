/* SPDX-License-Identifier: Apache-2.0 */
/* The table of requests, and the calls that ask whether one is done. */
#include "shim/shim.h"

#include <stdlib.h>

struct dq_shim_request *dq_shim_request_at(dqplb_context *ctx, uint32_t index)
{
	return &ctx->slabs[index / DQ_SHIM_REQUESTS_PER_SLAB][index % DQ_SHIM_REQUESTS_PER_SLAB];
}

static bool grow(dqplb_context *ctx)
{
	uint32_t first = ctx->slab_count * DQ_SHIM_REQUESTS_PER_SLAB;
	struct dq_shim_request *slab;

	if (first >= ctx->entries)
		return false;
	slab = aligned_alloc(DQ_SHIM_REQUEST_ALIGN, DQ_SHIM_REQUESTS_PER_SLAB * sizeof *slab);
	if (!slab)
		return false;
	memset(slab, 0, DQ_SHIM_REQUESTS_PER_SLAB * sizeof *slab);
	ctx->slabs[ctx->slab_count++] = slab;
	for (uint32_t i = DQ_SHIM_REQUESTS_PER_SLAB; i-- > 0;) {
		slab[i].ctx = ctx;
		slab[i].index = first + i;
		slab[i].generation = 1;
		slab[i].next = ctx->free_requests;
		ctx->free_requests = &slab[i];
	}
	return true;
}

struct dq_shim_request *dq_shim_request_take(dqplb_context *ctx, uint16_t op, bool internal)
{
	uint32_t limit = internal ? ctx->entries : ctx->entries - DQ_SHIM_INTERNAL_RESERVE;
	struct dq_shim_request *r;

	if (ctx->live >= limit || (!ctx->free_requests && !grow(ctx)))
		return NULL;
	r = ctx->free_requests;
	ctx->free_requests = r->next;
	ctx->live++;
	r->op = op;
	r->internal = internal;
	r->mem_freed = false;
	r->orphan = false;
	r->flow_id = 0;
	r->piece.chunk = NULL;
	r->flow = NULL;
	r->listener = NULL;
	r->mem = NULL;
	r->copy_to = NULL;
	r->bytes = 0;
	r->next = NULL;
	memset(&r->result, 0, sizeof r->result);
	dq_shim_request_enter(r, DQ_SHIM_RESERVED);
	return r;
}

void dq_shim_request_free(struct dq_shim_request *r)
{
	dqplb_context *ctx = r->ctx;

	r->generation++;
	dq_shim_request_enter(r, DQ_SHIM_FREE);
	r->next = ctx->free_requests;
	ctx->free_requests = r;
	ctx->live--;
}

struct dq_shim_request *dq_shim_request_find(dqplb_context *ctx, uint64_t cookie)
{
	uint32_t index = (uint32_t)cookie, generation = (uint32_t)(cookie >> 32);
	struct dq_shim_request *r;

	if (index >= ctx->slab_count * DQ_SHIM_REQUESTS_PER_SLAB)
		return NULL;
	r = dq_shim_request_at(ctx, index);
	return r->generation == generation ? r : NULL;
}

static struct dq_shim_request *place_of(dqplb_request *request, uint32_t *generation)
{
	uintptr_t p = (uintptr_t)request;

	*generation = p & (DQ_SHIM_REQUEST_ALIGN - 1);
	return (struct dq_shim_request *)(p & ~(uintptr_t)(DQ_SHIM_REQUEST_ALIGN - 1));
}

static int not_live(void)
{
	return dq_shim_fail(DQPLB_ERR_INVALID,
			    "request: not pending: it was freed when test or wait reported it done, and may not be used again");
}

/* lock held. Is this pointer the present user of its place? */
static bool live(const struct dq_shim_request *r, uint32_t generation)
{
	uint32_t state = dq_shim_request_state(r);

	return (r->generation & (DQ_SHIM_REQUEST_ALIGN - 1)) == generation && state != DQ_SHIM_FREE && state != DQ_SHIM_ORPHAN &&
	       !r->internal;
}

static const char *op_name(uint16_t op)
{
	static const char *const names[] = {
		[DQ_OP_SEND] = "send",         [DQ_OP_RECV] = "recv",       [DQ_OP_PUT] = "put",
		[DQ_OP_NOTIFY] = "notify",     [DQ_OP_EXPORT] = "export",   [DQ_OP_UNEXPORT] = "unexport",
		[DQ_OP_LISTEN] = "listen",     [DQ_OP_UNLISTEN] = "unlisten", [DQ_OP_ACCEPT] = "accept",
		[DQ_OP_CONNECT] = "connect",   [DQ_OP_CLOSE] = "close",     [DQ_OP_FLUSH] = "flush",
	};
	return op < sizeof names / sizeof names[0] && names[op] ? names[op] : "operation";
}

/* lock held. Hand the result over and free the place. */
static void collect(struct dq_shim_request *r, dqplb_result *result)
{
	if (r->result.status != DQPLB_OK) {
		if (r->op == DQ_OP_CONNECT || r->op == DQ_OP_ACCEPT)
			dq_shim_fail(r->result.status, "%s: %s", op_name(r->op), dqplb_strerror(r->result.status));
		else
			dq_shim_fail(r->result.status, "%s of %llu bytes on flow %u: %s", op_name(r->op),
				     (unsigned long long)r->bytes, r->flow_id, dqplb_strerror(r->result.status));
	}
	if (result)
		*result = r->result;
	else if (r->result.flow)
		dq_shim_flow_begin_close(r->result.flow); /* nobody will know of it */
	if (r->orphan)
		dq_shim_request_enter(r, DQ_SHIM_ORPHAN);
	else
		dq_shim_request_free(r);
}

/* lock held. The context is dead: this request ends with it. */
static int collect_dead(struct dq_shim_request *r, dqplb_result *result)
{
	int status = dq_shim_dead(r->ctx);

	if ((r->op == DQ_OP_CONNECT || r->op == DQ_OP_ACCEPT) && r->flow)
		free(r->flow); /* never opened */
	if (result) {
		memset(result, 0, sizeof *result);
		result->status = status;
	}
	dq_shim_request_free(r);
	return status;
}

/*
 * Without the lock: nothing has happened that a test of this request would see or do. Threads that poll requests of one context
 * so do not keep each other from the lock. False when in doubt, and from time to time, so that the daemon's end is seen.
 */
static bool still_pending(dqplb_context *ctx, const struct dq_shim_request *r, uint32_t generation)
{
	return dq_shim_request_state(r) == DQ_SHIM_PENDING && (r->generation & (DQ_SHIM_REQUEST_ALIGN - 1)) == generation &&
	       !r->internal && dq_shim_ring_idle(ctx) && !atomic_load_explicit(&ctx->dead, memory_order_relaxed) &&
	       !atomic_load_explicit(&ctx->control->closed, memory_order_relaxed) &&
	       dq_shim_now_coarse() < atomic_load_explicit(&ctx->next_liveness, memory_order_relaxed);
}

int dqplb_test(dqplb_request *request, int *done, dqplb_result *result)
{
	uint32_t generation;
	struct dq_shim_request *r;
	dqplb_context *ctx;
	int status = DQPLB_OK;

	if (!request || !done)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_test: %s is NULL", request ? "done" : "request");
	*done = 0;
	r = place_of(request, &generation);
	ctx = r->ctx;
	if (dq_shim_is_forked(ctx))
		return dq_shim_forked();
	if (still_pending(ctx, r, generation))
		return DQPLB_OK;

	pthread_mutex_lock(&ctx->lock);
	if (!live(r, generation)) {
		pthread_mutex_unlock(&ctx->lock);
		return not_live();
	}
	if (dq_shim_request_state(r) != DQ_SHIM_DONE) {
		dq_shim_progress(ctx, r);
		if (!live(r, generation)) { /* another thread collected it while the lock was dropped */
			pthread_mutex_unlock(&ctx->lock);
			return not_live();
		}
		if (dq_shim_request_state(r) == DQ_SHIM_PENDING)
			dq_shim_liveness(ctx, false);
	}
	if (dq_shim_request_state(r) == DQ_SHIM_DONE) {
		collect(r, result);
		*done = 1;
	} else if (ctx->dead && dq_shim_request_state(r) == DQ_SHIM_PENDING) {
		status = collect_dead(r, result);
		*done = 1;
	}
	pthread_mutex_unlock(&ctx->lock);
	return status;
}

int dqplb_abandon(dqplb_request *request)
{
	uint32_t generation, state = DQ_SHIM_FREE;
	struct dq_shim_request *r;
	dqplb_context *ctx;

	if (!request)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_abandon: request is NULL");
	r = place_of(request, &generation);
	ctx = r->ctx;
	if (dq_shim_is_forked(ctx))
		return dq_shim_forked();

	pthread_mutex_lock(&ctx->lock);
	while (live(r, generation) && (state = dq_shim_request_state(r)) == DQ_SHIM_COPYING) {
		dq_shim_progress(ctx, r); /* bytes on their way into the program's memory: not behind its back */
		if (live(r, generation) && dq_shim_request_state(r) == DQ_SHIM_COPYING)
			pthread_cond_wait(&ctx->copied, &ctx->lock);
	}
	if (!live(r, generation)) {
		pthread_mutex_unlock(&ctx->lock);
		return not_live();
	}
	if (state == DQ_SHIM_DONE) {
		if (r->result.flow && !ctx->dead)
			dq_shim_flow_begin_close(r->result.flow);
		if (r->orphan)
			dq_shim_request_enter(r, DQ_SHIM_ORPHAN);
		else
			dq_shim_request_free(r);
	} else if (ctx->dead) {
		collect_dead(r, NULL);
	} else {
		r->mem = NULL;
		r->copy_to = NULL;
		dq_shim_request_enter(r, DQ_SHIM_ORPHAN);
	}
	pthread_mutex_unlock(&ctx->lock);
	return DQPLB_OK;
}

/* Spin without the lock until `stop` says so or the time is up. */
static void spin(dqplb_context *ctx, const struct dq_shim_request *r, uint64_t until)
{
	do {
		for (unsigned i = 0; i < 64; i++) {
			if (!dq_shim_ring_idle(ctx) || (r && dq_shim_request_state(r) == DQ_SHIM_DONE))
				return;
#if defined(__x86_64__) || defined(__i386__)
			__builtin_ia32_pause();
#elif defined(__aarch64__)
			__asm__ __volatile__("yield");
#endif
		}
	} while (dq_shim_now() < until);
}

/* When the time is up: DQ_NEVER for no limit. */
static uint64_t deadline_of(uint64_t now, int timeout_ms)
{
	return timeout_ms < 0 ? DQ_NEVER : now + (uint64_t)timeout_ms * 1000000u;
}

int dqplb_wait(dqplb_request *request, int timeout_ms, dqplb_result *result)
{
	uint64_t deadline = 0, spin_until = 0;
	struct dq_shim_request *r;
	uint32_t generation;
	dqplb_context *ctx;
	int status;

	if (!request)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_wait: request is NULL");
	r = place_of(request, &generation);
	ctx = r->ctx;
	if (dq_shim_is_forked(ctx))
		return dq_shim_forked();

	pthread_mutex_lock(&ctx->lock);
	for (;;) {
		if (!live(r, generation)) {
			status = not_live();
			break;
		}
		if (dq_shim_request_state(r) != DQ_SHIM_DONE) {
			dq_shim_progress(ctx, r);
			if (!live(r, generation)) {
				status = not_live();
				break;
			}
		}
		if (dq_shim_request_state(r) == DQ_SHIM_DONE) {
			collect(r, result);
			status = DQPLB_OK;
			break;
		}
		if (ctx->dead && dq_shim_request_state(r) == DQ_SHIM_PENDING) {
			status = collect_dead(r, result);
			break;
		}
		uint64_t now = dq_shim_now();
		if (!deadline) {
			deadline = deadline_of(now, timeout_ms);
			spin_until = now + ctx->spin_ns;
		}
		if (now >= deadline) {
			dq_shim_liveness(ctx, false);
			if (ctx->dead)
				continue;
			status = dq_shim_fail(DQPLB_ERR_TIMEOUT, "dqplb_wait: %s still pending after %d ms", op_name(r->op),
					      timeout_ms);
			break;
		}
		if (now < spin_until) {
			pthread_mutex_unlock(&ctx->lock);
			spin(ctx, r, DQ_MIN(spin_until, deadline));
			pthread_mutex_lock(&ctx->lock);
			continue;
		}
		dq_shim_sleep(ctx, deadline);
	}
	pthread_mutex_unlock(&ctx->lock);
	return status;
}

int dqplb_wait_any(dqplb_context *ctx, int timeout_ms)
{
	uint64_t deadline = 0, spin_until = 0, seen;
	int status;

	if (!ctx)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_wait_any: context is NULL");
	if (dq_shim_is_forked(ctx))
		return dq_shim_forked();

	pthread_mutex_lock(&ctx->lock);
	seen = ctx->wait_any_seen;
	for (;;) {
		dq_shim_progress(ctx, NULL);
		dq_shim_liveness(ctx, false);
		if (ctx->dead) {
			status = dq_shim_dead(ctx);
			break;
		}
		if (ctx->completed != seen) {
			ctx->wait_any_seen = ctx->completed;
			status = DQPLB_OK;
			break;
		}
		uint64_t now = dq_shim_now();
		if (!deadline) {
			deadline = deadline_of(now, timeout_ms);
			spin_until = now + ctx->spin_ns;
		}
		if (now >= deadline) {
			status = dq_shim_fail(DQPLB_ERR_TIMEOUT, "dqplb_wait_any: no request completed within %d ms", timeout_ms);
			break;
		}
		if (now < spin_until) {
			pthread_mutex_unlock(&ctx->lock);
			spin(ctx, NULL, DQ_MIN(spin_until, deadline));
			pthread_mutex_lock(&ctx->lock);
			continue;
		}
		dq_shim_sleep(ctx, deadline);
	}
	pthread_mutex_unlock(&ctx->lock);
	return status;
}
