/* SPDX-License-Identifier: Apache-2.0 */
/* Listeners and flows: opening and closing. Nothing here waits. */
#include "shim/shim.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>

static bool submit_internal(dqplb_context *ctx, uint16_t op, dqplb_flow *flow, dqplb_listener *listener, struct dq_submission *s)
{
	struct dq_shim_request *r;

	if (!dq_shim_room(ctx, 1))
		return false;
	r = dq_shim_request_take(ctx, op, true);
	if (!r)
		return false;
	r->flow = flow;
	r->listener = listener;
	if (flow)
		flow->pending++;
	else
		listener->pending++;
	s->op = op;
	s->request = dq_shim_request_cookie(r);
	dq_shim_request_enter(r, DQ_SHIM_PENDING);
	dq_shim_submit(ctx, s, 1);
	return true;
}

/* --- flows --- */

void dq_shim_flow_link(dqplb_flow *flow)
{
	flow->next = flow->ctx->flows;
	if (flow->next)
		flow->next->prev = flow;
	flow->ctx->flows = flow;
}

void dq_shim_flow_settle(dqplb_flow *flow)
{
	if (!flow->closed || flow->pending)
		return;
	if (flow->prev)
		flow->prev->next = flow->next;
	else
		flow->ctx->flows = flow->next;
	if (flow->next)
		flow->next->prev = flow->prev;
	free(flow);
}

static bool submit_close(dqplb_flow *flow)
{
	struct dq_submission s = {.flow = flow->id};

	return submit_internal(flow->ctx, DQ_OP_CLOSE, flow, NULL, &s);
}

void dq_shim_flow_begin_close(dqplb_flow *flow)
{
	dqplb_context *ctx = flow->ctx;

	flow->closing = true;
	if (!ctx->deferred_flows && submit_close(flow))
		return;
	flow->deferred = true;
	flow->next_deferred = ctx->deferred_flows;
	ctx->deferred_flows = flow;
}

static bool submit_unlisten(dqplb_listener *listener)
{
	struct dq_submission s = {.flow = listener->id};

	return submit_internal(listener->ctx, DQ_OP_UNLISTEN, NULL, listener, &s);
}

void dq_shim_submit_deferred(dqplb_context *ctx)
{
	while (ctx->deferred_flows && !ctx->dead) {
		dqplb_flow *flow = ctx->deferred_flows;
		if (!submit_close(flow))
			return;
		flow->deferred = false;
		ctx->deferred_flows = flow->next_deferred;
	}
	while (ctx->deferred_listeners && !ctx->dead) {
		dqplb_listener *listener = ctx->deferred_listeners;
		if (!submit_unlisten(listener))
			return;
		listener->deferred = false;
		ctx->deferred_listeners = listener->next_deferred;
	}
}

int dqplb_flow_close(dqplb_flow *flow)
{
	dqplb_context *ctx;
	int status = DQPLB_OK;

	if (!flow)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_flow_close: flow is NULL");
	ctx = flow->ctx;
	if (dq_shim_is_forked(ctx))
		return dq_shim_forked();
	pthread_mutex_lock(&ctx->lock);
	if (flow->closing) {
		status = dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_flow_close: flow %u was closed before", flow->id);
	} else {
		dq_shim_drain(ctx);
		dq_shim_liveness(ctx, false);
		if (ctx->dead)
			status = dq_shim_dead(ctx);
		dq_shim_flow_begin_close(flow);
	}
	pthread_mutex_unlock(&ctx->lock);
	return status;
}

int dqplb_flow_query(dqplb_flow *flow, dqplb_flow_info *out)
{
	static const char *const classes[] = {
		[DQ_CLASS_UNKNOWN] = "unknown", [DQ_CLASS_HOST] = "host",         [DQ_CLASS_RACK] = "rack",
		[DQ_CLASS_ZONE] = "zone",       [DQ_CLASS_BUILDING] = "building", [DQ_CLASS_REGION] = "region",
	};
	dqplb_flow_info info = {.size = sizeof info};

	if (!flow || !out)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_flow_query: %s is NULL", flow ? "out" : "flow");
	if (dq_shim_is_forked(flow->ctx))
		return dq_shim_forked();
	if (out->size < sizeof out->size || out->size > 4096)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_flow_query: size is %zu, expected sizeof(struct dqplb_flow_info), %zu", out->size,
				    sizeof info);
	/* None of this changes while the flow is open. */
	memcpy(info.peer, flow->peer, sizeof flow->peer);
	snprintf(info.path_class, sizeof info.path_class, "%s",
		 classes[flow->path_class < sizeof classes / sizeof classes[0] ? flow->path_class : DQ_CLASS_UNKNOWN]);
	info.device = flow->device;
	info.size = DQ_MIN(out->size, sizeof info);
	memset(out, 0, out->size);
	memcpy(out, &info, info.size);
	return DQPLB_OK;
}

int dqplb_handle_host(const dqplb_handle *handle, char *out, size_t bytes)
{
	struct dq_handle h;
	size_t n = 0;

	if (!handle || !out || !bytes)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_handle_host: %s", !handle ? "handle is NULL" : !out ? "out is NULL" : "bytes is 0");
	out[0] = 0;
	memcpy(&h, handle->bytes, sizeof h);
	if (h.magic != DQ_HANDLE_MAGIC)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_handle_host: the handle starts with 0x%08x, expected 0x%08x", h.magic, DQ_HANDLE_MAGIC);
	/* It came over a network: only what can be shown. */
	while (n < sizeof h.host_id - 1 && n < bytes - 1 && h.host_id[n] > ' ' && h.host_id[n] < 0x7f) {
		out[n] = h.host_id[n];
		n++;
	}
	out[n] = 0;
	return n ? DQPLB_OK : dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_handle_host: the handle names no host");
}

/* --- listeners --- */

void dq_shim_listener_settle(dqplb_listener *listener)
{
	if (!listener->closed || listener->pending)
		return;
	if (listener->prev)
		listener->prev->next = listener->next;
	else
		listener->ctx->listeners = listener->next;
	if (listener->next)
		listener->next->prev = listener->prev;
	free(listener);
}

/* lock held. A nonce that nobody can guess, and that is forgotten here. */
static int take_nonce(dqplb_context *ctx, uint8_t nonce[16])
{
	if (ctx->nonce_bytes < 16) {
		if (getrandom(ctx->nonces, sizeof ctx->nonces, 0) != (ssize_t)sizeof ctx->nonces)
			return dq_shim_fail(DQPLB_ERR_INTERNAL, "dqplb_listen: getrandom: %s", strerror(errno));
		ctx->nonce_bytes = sizeof ctx->nonces;
	}
	ctx->nonce_bytes -= 16;
	memcpy(nonce, ctx->nonces + ctx->nonce_bytes, 16);
	explicit_bzero(ctx->nonces + ctx->nonce_bytes, 16);
	return DQPLB_OK;
}

static uint64_t little_endian(const uint8_t *p)
{
	uint64_t v = 0;

	for (int i = 7; i >= 0; i--)
		v = v << 8 | p[i];
	return v;
}

static int check_device(const char *call, dqplb_context *ctx, int device)
{
	if (device < 0 || (uint32_t)device >= ctx->device_count)
		return dq_shim_fail(DQPLB_ERR_INVALID, "%s: device %d: expected 0 to %d (the daemon has %u)", call, device,
				    (int)ctx->device_count - 1, ctx->device_count);
	return DQPLB_OK;
}

int dqplb_listen(dqplb_context *ctx, int device, dqplb_handle *handle, dqplb_listener **out)
{
	dqplb_listener *listener;
	struct dq_handle h;
	int status;

	if (!ctx || !handle || !out)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_listen: %s is NULL", !ctx ? "context" : !handle ? "handle" : "out");
	if (dq_shim_is_forked(ctx))
		return dq_shim_forked();
	listener = calloc(1, sizeof *listener);
	if (!listener)
		return dq_shim_fail(DQPLB_ERR_NOMEM, "dqplb_listen: no memory for a listener");

	pthread_mutex_lock(&ctx->lock);
	status = check_device("dqplb_listen", ctx, device);
	if (status == DQPLB_OK) {
		dq_shim_drain(ctx);
		dq_shim_liveness(ctx, false);
		if (ctx->dead)
			status = dq_shim_dead(ctx);
	}
	if (status == DQPLB_OK) {
		h = ctx->template;
		h.magic = DQ_HANDLE_MAGIC;
		h.version = DQ_HANDLE_VERSION;
		h.rail = (uint16_t)ctx->devices[device].rail;
		h.client = ctx->client_id;
		h.listener = ++ctx->next_listener;
		status = take_nonce(ctx, h.nonce);
	}
	if (status == DQPLB_OK) {
		struct dq_submission s = {
			.flow = h.listener,
			.mem = (uint32_t)device,
			.tag = little_endian(h.nonce),
			.remote_offset = little_endian(h.nonce + 8),
		};
		listener->ctx = ctx;
		listener->id = h.listener;
		listener->device = (uint32_t)device;
		if (submit_internal(ctx, DQ_OP_LISTEN, NULL, listener, &s)) {
			listener->next = ctx->listeners;
			if (listener->next)
				listener->next->prev = listener;
			ctx->listeners = listener;
			memcpy(handle->bytes, &h, sizeof h);
			*out = listener;
			listener = NULL;
		} else {
			status = ctx->dead ? dq_shim_dead(ctx)
					   : dq_shim_fail(DQPLB_ERR_AGAIN, "dqplb_listen: the ring of %u entries is full: test or wait for "
							  "something, then call again", ctx->entries);
		}
	}
	pthread_mutex_unlock(&ctx->lock);
	free(listener);
	return status;
}

int dqplb_listener_close(dqplb_listener *listener)
{
	dqplb_context *ctx;
	int status = DQPLB_OK;

	if (!listener)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_listener_close: listener is NULL");
	ctx = listener->ctx;
	if (dq_shim_is_forked(ctx))
		return dq_shim_forked();
	pthread_mutex_lock(&ctx->lock);
	if (listener->closing) {
		status = dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_listener_close: it was closed before");
	} else {
		dq_shim_drain(ctx);
		dq_shim_liveness(ctx, false);
		if (ctx->dead)
			status = dq_shim_dead(ctx);
		listener->closing = true;
		if (ctx->deferred_listeners || !submit_unlisten(listener)) {
			listener->deferred = true;
			listener->next_deferred = ctx->deferred_listeners;
			ctx->deferred_listeners = listener;
		}
	}
	pthread_mutex_unlock(&ctx->lock);
	return status;
}

int dqplb_accept(dqplb_listener *listener, dqplb_request **out)
{
	struct dq_shim_request *r;
	dqplb_context *ctx;
	dqplb_flow *flow;
	int status;

	if (!listener || !out)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_accept: %s is NULL", listener ? "out" : "listener");
	ctx = listener->ctx;
	if (dq_shim_is_forked(ctx))
		return dq_shim_forked();
	/* Made now, so that taking completions never allocates. */
	flow = calloc(1, sizeof *flow);
	if (!flow)
		return dq_shim_fail(DQPLB_ERR_NOMEM, "dqplb_accept: no memory for a flow");
	flow->ctx = ctx;

	pthread_mutex_lock(&ctx->lock);
	dq_shim_drain(ctx);
	if (listener->closing)
		status = dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_accept: the listener was closed");
	else if (listener->status != DQPLB_OK)
		status = dq_shim_fail(listener->status, "dqplb_accept: the daemon refused to listen on device %u: %s", listener->device,
				      dqplb_strerror(listener->status));
	else
		status = dq_shim_begin(ctx, DQ_OP_ACCEPT, 1, &r);
	if (status == DQPLB_OK) {
		struct dq_submission s = {.op = DQ_OP_ACCEPT, .flow = listener->id, .request = dq_shim_request_cookie(r)};

		r->listener = listener;
		r->flow = flow;
		flow = NULL;
		listener->pending++;
		dq_shim_request_enter(r, DQ_SHIM_PENDING);
		*out = dq_shim_request_handle(r);
		dq_shim_submit(ctx, &s, 1);
	}
	pthread_mutex_unlock(&ctx->lock);
	free(flow);
	return status;
}

int dqplb_connect(dqplb_context *ctx, int device, const dqplb_handle *handle, dqplb_request **out)
{
	struct dq_shim_request *r;
	struct dq_handle h;
	dqplb_flow *flow;
	int status;

	if (!ctx || !handle || !out)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_connect: %s is NULL", !ctx ? "context" : !handle ? "handle" : "out");
	if (dq_shim_is_forked(ctx))
		return dq_shim_forked();
	memcpy(&h, handle->bytes, sizeof h);
	if (h.magic != DQ_HANDLE_MAGIC)
		return dq_shim_fail(DQPLB_ERR_INVALID,
				    "dqplb_connect: the handle starts with 0x%08x, expected 0x%08x: it is not one, or was damaged on its "
				    "way (all 128 bytes must arrive)", h.magic, DQ_HANDLE_MAGIC);
	if (h.version != DQ_HANDLE_VERSION)
		return dq_shim_fail(DQPLB_ERR_VERSION, "dqplb_connect: the handle has version %u, this library knows version %u", h.version,
				    DQ_HANDLE_VERSION);
	flow = calloc(1, sizeof *flow);
	if (!flow)
		return dq_shim_fail(DQPLB_ERR_NOMEM, "dqplb_connect: no memory for a flow");
	flow->ctx = ctx;

	pthread_mutex_lock(&ctx->lock);
	status = check_device("dqplb_connect", ctx, device);
	if (status == DQPLB_OK)
		status = dq_shim_begin(ctx, DQ_OP_CONNECT, DQ_CONNECT_ENTRIES, &r);
	if (status == DQPLB_OK) {
		struct {
			struct dq_submission s;
			struct dq_handle h;
		} entries = {{.op = DQ_OP_CONNECT, .mem = (uint32_t)device, .request = dq_shim_request_cookie(r)}, h};
		_Static_assert(sizeof entries == DQ_CONNECT_ENTRIES * DQ_RING_ENTRY_BYTES, "ring entries");

		r->flow = flow;
		flow = NULL;
		dq_shim_request_enter(r, DQ_SHIM_PENDING);
		*out = dq_shim_request_handle(r);
		dq_shim_submit(ctx, &entries, DQ_CONNECT_ENTRIES);
	}
	pthread_mutex_unlock(&ctx->lock);
	free(flow);
	return status;
}
