/* SPDX-License-Identifier: Apache-2.0 */
/* Messages, exports and puts: check, copy into staging where needed, hand to the daemon. */
#include "shim/shim.h"

#include <unistd.h>

#include "shim/staging.h"

bool dq_shim_room(dqplb_context *ctx, uint32_t n)
{
	int64_t space = dq_ring_space(&ctx->sq, n);

	if (space < 0)
		dq_shim_die(ctx, DQPLB_ERR_DAEMON, "the daemon's submission ring is broken: its index is out of range");
	return space >= (int64_t)n;
}

void dq_shim_submit(dqplb_context *ctx, const void *entries, uint32_t n)
{
	const uint8_t *e = entries;
	uint64_t one = 1;

	for (uint32_t i = 0; i < n; i++)
		dq_ring_write(&ctx->sq, i, e + (size_t)i * DQ_RING_ENTRY_BYTES);
	dq_ring_produce(&ctx->sq, n);
	/* The engine says that it sleeps, then looks at the ring once more: one of the two sees the other. */
	dq_ring_fence();
	if (atomic_load_explicit(&ctx->control->engine_asleep, memory_order_relaxed) &&
	    atomic_exchange_explicit(&ctx->control->engine_asleep, 0, memory_order_relaxed)) {
		/* Lowered here, so that one call wakes it and not each of a burst; it raises the flag before it sleeps again. */
		/* Full (EAGAIN) is as good as written: it is awake then. A daemon that is gone is noticed elsewhere. */
		ssize_t ignored = write(ctx->eventfd, &one, sizeof one);
		(void)ignored;
	}
}

int dq_shim_begin(dqplb_context *ctx, uint16_t op, uint32_t entries, struct dq_shim_request **out)
{
	struct dq_shim_request *r;

	dq_shim_drain(ctx);
	dq_shim_liveness(ctx, false);
	if (ctx->dead)
		return dq_shim_dead(ctx);
	if (!dq_shim_room(ctx, entries)) {
		if (ctx->dead)
			return dq_shim_dead(ctx);
		return dq_shim_fail(DQPLB_ERR_AGAIN, "the submission ring of %u entries is full: call again", ctx->entries);
	}
	r = dq_shim_request_take(ctx, op, false);
	if (!r)
		return dq_shim_fail(DQPLB_ERR_AGAIN,
				    "%u requests are outstanding and ring_entries is %u (%u are kept for closing): test or wait for "
				    "some, then call again", ctx->live, ctx->entries, DQ_SHIM_INTERNAL_RESERVE);
	*out = r;
	return DQPLB_OK;
}

/* What all operations on a flow ask first. On success the lock is held. */
static int enter_flow(const char *call, dqplb_flow *flow, dqplb_request **out)
{
	if (!flow || !out)
		return dq_shim_fail(DQPLB_ERR_INVALID, "%s: %s is NULL", call, flow ? "out" : "flow");
	if (dq_shim_is_forked(flow->ctx))
		return dq_shim_forked();
	pthread_mutex_lock(&flow->ctx->lock);
	if (flow->closing) {
		pthread_mutex_unlock(&flow->ctx->lock);
		return dq_shim_fail(DQPLB_ERR_INVALID, "%s: flow %u was closed with dqplb_flow_close()", call, flow->id);
	}
	return DQPLB_OK;
}

static int check_range(const char *call, const dqplb_flow *flow, const dqplb_mem *mem, size_t offset, size_t bytes)
{
	if (!mem)
		return dq_shim_fail(DQPLB_ERR_INVALID, "%s: mem is NULL", call);
	if (mem->ctx != flow->ctx)
		return dq_shim_fail(DQPLB_ERR_INVALID, "%s: memory and flow belong to different contexts", call);
	if (offset > mem->bytes || bytes > mem->bytes - offset)
		return dq_shim_fail(DQPLB_ERR_INVALID, "%s: offset %zu and %zu bytes lie outside of memory of %llu bytes", call, offset,
				    bytes, (unsigned long long)mem->bytes);
	return DQPLB_OK;
}

/* lock held. Hand one entry over: the daemon has the operation from here on. */
static void launch(struct dq_shim_request *r, struct dq_submission *s, dqplb_request **out)
{
	s->op = r->op;
	s->flow = r->flow_id;
	s->request = dq_shim_request_cookie(r);
	dq_shim_request_enter(r, DQ_SHIM_PENDING);
	*out = dq_shim_request_handle(r);
	dq_shim_submit(r->ctx, s, 1);
}

static void bind_flow(struct dq_shim_request *r, dqplb_flow *flow)
{
	r->flow = flow;
	r->flow_id = flow->id;
	flow->pending++;
}

static void unbind_flow(struct dq_shim_request *r)
{
	dqplb_flow *flow = r->flow;

	r->flow = NULL;
	flow->pending--;
	dq_shim_flow_settle(flow);
}

/*
 * lock held, request bound. Take a place for the message and, for what is sent, fill it; for that the lock is dropped when the
 * message is large. On failure the request is gone.
 */
static int stage(struct dq_shim_request *r, dqplb_mem *mem, size_t offset, bool outgoing)
{
	dqplb_context *ctx = r->ctx;
	int status = dq_staging_take(ctx, r->bytes, outgoing ? DQ_SHIM_OUT : DQ_SHIM_IN, r->flow->pending == 1, &r->piece);

	if (status == DQPLB_OK && !outgoing)
		r->copy_to = mem->address + offset;
	if (status == DQPLB_OK && outgoing) {
		if (r->bytes <= DQ_SHIM_INLINE_COPY_BYTES) {
			memcpy(dq_staging_address(&r->piece), mem->address + offset, r->bytes);
		} else {
			pthread_mutex_unlock(&ctx->lock);
			memcpy(dq_staging_address(&r->piece), mem->address + offset, r->bytes);
			pthread_mutex_lock(&ctx->lock);
			if (ctx->dead)
				status = dq_shim_dead(ctx);
			else if (!dq_shim_room(ctx, 1))
				status = dq_shim_fail(DQPLB_ERR_AGAIN, "the submission ring is full: call again");
			pthread_cond_broadcast(&ctx->copied); /* dqplb_mem_free() may wait for this copy */
		}
	}
	if (status != DQPLB_OK) {
		dq_staging_give(ctx, &r->piece);
		unbind_flow(r);
		dq_shim_request_free(r);
	}
	return status;
}

/* send, recv and put differ in their name and what else stands in the entry. */
static int move(const char *call, uint16_t op, dqplb_flow *flow, dqplb_mem *mem, size_t offset, size_t bytes,
		struct dq_submission *s, dqplb_request **out)
{
	struct dq_shim_request *r;
	int status = enter_flow(call, flow, out);

	if (status != DQPLB_OK)
		return status;
	dqplb_context *ctx = flow->ctx;
	status = check_range(call, flow, mem, offset, bytes);
	if (status == DQPLB_OK)
		status = dq_shim_begin(ctx, op, 1, &r);
	if (status == DQPLB_OK) {
		bind_flow(r, flow);
		r->mem = mem;
		r->bytes = bytes;
		if (mem->kind == DQ_SHIM_MEM_STAGED)
			status = stage(r, mem, offset, op != DQ_OP_RECV);
		if (status == DQPLB_OK) {
			s->mem = r->piece.chunk ? r->piece.chunk->id : mem->id;
			s->offset = r->piece.chunk ? dq_staging_offset(&r->piece) : offset;
			s->bytes = bytes;
			launch(r, s, out);
		}
	}
	pthread_mutex_unlock(&ctx->lock);
	return status;
}

int dqplb_send(dqplb_flow *flow, dqplb_mem *mem, size_t offset, size_t bytes, uint64_t tag, dqplb_request **out)
{
	struct dq_submission s = {.tag = tag};

	return move("dqplb_send", DQ_OP_SEND, flow, mem, offset, bytes, &s, out);
}

int dqplb_recv(dqplb_flow *flow, dqplb_mem *mem, size_t offset, size_t bytes, uint64_t tag, dqplb_request **out)
{
	struct dq_submission s = {.tag = tag};

	return move("dqplb_recv", DQ_OP_RECV, flow, mem, offset, bytes, &s, out);
}

int dqplb_put(dqplb_flow *flow, uint32_t region, uint64_t remote_offset, dqplb_mem *mem, size_t offset, size_t bytes,
	      uint64_t cookie, dqplb_request **out)
{
	struct dq_submission s = {.region = region, .remote_offset = remote_offset, .tag = cookie};

	return move("dqplb_put", DQ_OP_PUT, flow, mem, offset, bytes, &s, out);
}

/* export, unexport and notify: nothing to copy. */
static int ask(uint16_t op, dqplb_flow *flow, dqplb_mem *mem, struct dq_submission *s, dqplb_request **out)
{
	struct dq_shim_request *r;
	int status = dq_shim_begin(flow->ctx, op, 1, &r);

	if (status == DQPLB_OK) {
		bind_flow(r, flow);
		r->mem = mem;
		r->bytes = s->bytes;
		launch(r, s, out);
	}
	return status;
}

int dqplb_export(dqplb_flow *flow, dqplb_mem *mem, size_t offset, size_t bytes, dqplb_request **out)
{
	int status = enter_flow("dqplb_export", flow, out);

	if (status != DQPLB_OK)
		return status;
	dqplb_context *ctx = flow->ctx;
	status = check_range("dqplb_export", flow, mem, offset, bytes);
	if (status == DQPLB_OK && bytes == 0)
		status = dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_export: 0 bytes: there is nothing to write into");
	if (status == DQPLB_OK && mem->kind == DQ_SHIM_MEM_STAGED)
		status = dq_shim_fail(DQPLB_ERR_INVALID,
				      "dqplb_export: memory of dqplb_mem_register() is copied by this process, so nobody else can "
				      "write into it: export memory of dqplb_mem_alloc() or a dma-buf");
	if (status == DQPLB_OK) {
		struct dq_submission s = {.mem = mem->id, .offset = offset, .bytes = bytes};
		status = ask(DQ_OP_EXPORT, flow, mem, &s, out);
	}
	pthread_mutex_unlock(&ctx->lock);
	return status;
}

int dqplb_unexport(dqplb_flow *flow, uint32_t region, dqplb_request **out)
{
	struct dq_submission s = {.region = region};
	int status = enter_flow("dqplb_unexport", flow, out);

	if (status != DQPLB_OK)
		return status;
	dqplb_context *ctx = flow->ctx;
	status = ask(DQ_OP_UNEXPORT, flow, NULL, &s, out);
	pthread_mutex_unlock(&ctx->lock);
	return status;
}

int dqplb_flush(dqplb_flow *flow, dqplb_mem *mem, size_t offset, dqplb_request **out)
{
	int status = enter_flow("dqplb_flush", flow, out);

	if (status != DQPLB_OK)
		return status;
	dqplb_context *ctx = flow->ctx;
	status = check_range("dqplb_flush", flow, mem, offset, 0);
	if (status == DQPLB_OK && mem->kind != DQ_SHIM_MEM_DMABUF)
		status = dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_flush: memory of the host needs none: expected memory of "
				      "dqplb_mem_register_dmabuf()");
	if (status == DQPLB_OK && offset >= mem->bytes)
		status = dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_flush: offset %zu, expected less than %llu", offset,
				      (unsigned long long)mem->bytes);
	if (status == DQPLB_OK) {
		struct dq_submission s = {.mem = mem->id, .offset = offset};
		status = ask(DQ_OP_FLUSH, flow, mem, &s, out);
	}
	pthread_mutex_unlock(&ctx->lock);
	return status;
}

int dqplb_notify(dqplb_flow *flow, dqplb_request **out)
{
	struct dq_submission s = {0};
	int status = enter_flow("dqplb_notify", flow, out);

	if (status != DQPLB_OK)
		return status;
	dqplb_context *ctx = flow->ctx;
	status = ask(DQ_OP_NOTIFY, flow, NULL, &s, out);
	pthread_mutex_unlock(&ctx->lock);
	return status;
}
