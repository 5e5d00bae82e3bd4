/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From the completion ring to finished requests, and how threads sleep until there is something.
 *
 * All waiting threads sleep on one futex word, control->wake, which the engine raises when client_waiting is set. A thread that
 * takes completions for others raises it, too. client_waiting is set, and the ring looked at again, with the lock held: what
 * the engine produces later meets the flag, what it produced before is seen.
 */
#include "shim/shim.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "shim/copy.h"
#include "shim/staging.h"

#define COPY_PLAIN_BYTES (8u << 20) /* from here on received bytes are copied without regard to order */

bool dq_shim_ring_idle(dqplb_context *ctx)
{
	return atomic_load_explicit(&ctx->cq.shared->tail, memory_order_acquire) ==
	       atomic_load_explicit(&ctx->cq.shared->head, memory_order_relaxed);
}

void dq_shim_wake_sleepers(dqplb_context *ctx)
{
	ctx->woke_needed = false;
	if (!ctx->sleepers)
		return;
	atomic_fetch_add(&ctx->control->wake, 1);
	/* Not a private futex: the engine wakes the same word through its own mapping. */
	syscall(SYS_futex, &ctx->control->wake, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void dq_shim_sleep(dqplb_context *ctx, uint64_t deadline)
{
	uint32_t value = atomic_load(&ctx->control->wake);
	uint64_t now = dq_shim_now(), slice;
	struct timespec t;

	atomic_store(&ctx->control->client_waiting, 1);
	dq_ring_fence();
	if (!dq_shim_ring_idle(ctx) || ctx->copy_head) {
		atomic_store(&ctx->control->client_waiting, ctx->sleepers ? 1u : 0u);
		return;
	}
	slice = deadline > now ? DQ_MIN(deadline - now, ctx->slice_ns) : 0; /* DQ_NEVER is later than everything */
	t.tv_sec = (time_t)(slice / 1000000000u);
	t.tv_nsec = (long)(slice % 1000000000u);
	ctx->sleepers++;
	pthread_mutex_unlock(&ctx->lock);
	syscall(SYS_futex, &ctx->control->wake, FUTEX_WAIT, value, &t, NULL, 0);
	pthread_mutex_lock(&ctx->lock);
	ctx->sleepers--;
	/* Others may still sleep, and an engine may lower the flag when it wakes: raise it again before the ring is looked at. */
	atomic_store(&ctx->control->client_waiting, ctx->sleepers ? 1u : 0u);
	dq_ring_fence();
	dq_shim_liveness(ctx, false);
}

/* The request is done. Its waiters learn it from the state, or are woken at the end of the round. */
static void finish(dqplb_context *ctx, struct dq_shim_request *r)
{
	ctx->completed++;
	ctx->woke_needed = true;
	dq_shim_request_enter(r, DQ_SHIM_DONE);
}

static void queue_copy(dqplb_context *ctx, struct dq_shim_request *r)
{
	dq_shim_request_enter(r, DQ_SHIM_COPYING);
	r->next = NULL;
	if (ctx->copy_tail)
		ctx->copy_tail->next = r;
	else
		ctx->copy_head = r;
	ctx->copy_tail = r;
}

/* LISTEN, UNLISTEN and CLOSE: what the program does not wait for. */
static void complete_internal(struct dq_shim_request *r, int status)
{
	dqplb_listener *listener = r->listener;
	dqplb_flow *flow = r->flow;
	uint16_t op = r->op;

	dq_shim_request_free(r);
	if (op == DQ_OP_CLOSE) {
		flow->closed = true;
		flow->pending--;
		dq_shim_flow_settle(flow);
		return;
	}
	if (op == DQ_OP_LISTEN)
		listener->status = status;
	else
		listener->closed = true;
	listener->pending--;
	dq_shim_listener_settle(listener);
}

static void complete(dqplb_context *ctx, const struct dq_completion *c)
{
	struct dq_shim_request *r = dq_shim_request_find(ctx, c->request);
	uint32_t state = r ? dq_shim_request_state(r) : DQ_SHIM_FREE;
	int status = c->status;

	if (!r || !(state == DQ_SHIM_PENDING || state == DQ_SHIM_ORPHAN || (state == DQ_SHIM_DONE && r->orphan))) {
		ctx->unknown_completions++;
		return;
	}
	if (status > 0 || status < DQPLB_ERR_INTERNAL)
		status = DQPLB_ERR_INTERNAL;
	if (r->internal) {
		complete_internal(r, status);
		return;
	}

	if (r->op == DQ_OP_CONNECT || r->op == DQ_OP_ACCEPT) {
		if (status == DQPLB_OK) {
			struct dq_completion_opened opened;

			memcpy(&opened, c, sizeof opened);
			r->flow->id = c->flow;
			r->flow->device = opened.device;
			r->flow->path_class = opened.path_class;
			memcpy(r->flow->peer, opened.peer, sizeof r->flow->peer - 1);
			dq_shim_flow_link(r->flow);
			r->result.flow = r->flow;
			if (state == DQ_SHIM_ORPHAN) /* nobody will know of it */
				dq_shim_flow_begin_close(r->flow);
		} else {
			free(r->flow);
		}
		r->flow = NULL;
		if (r->listener) {
			if (status != DQPLB_OK && r->listener->status != DQPLB_OK)
				status = r->listener->status;
			r->listener->pending--;
			dq_shim_listener_settle(r->listener);
			r->listener = NULL;
		}
	} else {
		r->flow->pending--;
		dq_shim_flow_settle(r->flow);
		r->flow = NULL;
	}

	if (state != DQ_SHIM_PENDING) { /* canceled long ago */
		dq_staging_give(ctx, &r->piece);
		if (state == DQ_SHIM_ORPHAN)
			dq_shim_request_free(r);
		else
			r->orphan = false;
		return;
	}

	if (r->mem_freed && status != DQPLB_OK)
		status = DQPLB_ERR_CANCELED;
	if (r->op == DQ_OP_RECV && status == DQPLB_OK && c->bytes > r->bytes)
		status = DQPLB_ERR_INTERNAL;
	r->result.status = status;
	if (status == DQPLB_OK) {
		switch (r->op) {
		case DQ_OP_SEND:
		case DQ_OP_PUT:
			r->result.bytes = r->bytes;
			break;
		case DQ_OP_RECV:
			r->result.bytes = c->bytes;
			r->result.tag = c->tag;
			break;
		case DQ_OP_EXPORT:
			r->result.region = c->region;
			break;
		case DQ_OP_NOTIFY:
			r->result.bytes = c->bytes;
			r->result.cookie = c->tag;
			r->result.offset = c->offset;
			r->result.region = c->region;
			break;
		default:
			break;
		}
	}
	if (r->piece.chunk && r->op == DQ_OP_RECV && r->result.bytes > 0) {
		if (r->result.bytes > DQ_SHIM_INLINE_COPY_BYTES) {
			queue_copy(ctx, r);
			return;
		}
		dq_copy_ordered(r->copy_to, dq_staging_address(&r->piece), r->result.bytes);
	}
	dq_staging_give(ctx, &r->piece);
	finish(ctx, r);
}

static void drain_ring(dqplb_context *ctx)
{
	struct dq_completion c;
	int64_t n;

	while ((n = dq_ring_avail(&ctx->cq)) > 0) {
		dq_ring_read(&ctx->cq, 0, &c);
		/* Given back before it is acted on: what completes may free room that the engine needs. */
		dq_ring_consume(&ctx->cq, 1);
		complete(ctx, &c);
	}
	if (n < 0)
		dq_shim_die(ctx, DQPLB_ERR_DAEMON, "the daemon's completion ring is broken: its index is out of range");
}

void dq_shim_drain(dqplb_context *ctx)
{
	if (!ctx->dead)
		drain_ring(ctx);
	if (ctx->deferred_flows || ctx->deferred_listeners)
		dq_shim_submit_deferred(ctx);
	if (ctx->woke_needed)
		dq_shim_wake_sleepers(ctx);
}

void dq_shim_progress(dqplb_context *ctx, const struct dq_shim_request *want)
{
	struct dq_shim_request *r;

	dq_shim_drain(ctx);
	while ((r = ctx->copy_head) && !(want && dq_shim_request_state(want) == DQ_SHIM_DONE)) {
		ctx->copy_head = r->next;
		if (!ctx->copy_head)
			ctx->copy_tail = NULL;
		pthread_mutex_unlock(&ctx->lock);
		/* Nobody polls flags in messages of this size: protocols that do use buffers of some hundred KiB at most. */
		if (r->result.bytes >= COPY_PLAIN_BYTES)
			memcpy(r->copy_to, dq_staging_address(&r->piece), r->result.bytes);
		else
			dq_copy_ordered(r->copy_to, dq_staging_address(&r->piece), r->result.bytes);
		pthread_mutex_lock(&ctx->lock);
		dq_staging_give(ctx, &r->piece);
		finish(ctx, r);
		pthread_cond_broadcast(&ctx->copied);
		dq_shim_drain(ctx);
	}
}
