/* SPDX-License-Identifier: Apache-2.0 */
/* VCs of the engine: their QPs and buffers, the glue between the pure core and the provider, failure and clean-up. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "engine/private.h"

#define CONNECT_DEADLINE_NS 10000000000ull

struct eng_vc *eng_vc_of(struct dq_vc *core)
{
	return core->user;
}

static const struct dq_provider *provider_of(struct eng_vc *vc)
{
	return vc->engine->devices[vc->device].provider;
}

void eng_vc_profile_of(const struct dq_profile *p, struct dq_window_profile *out)
{
	*out = (struct dq_window_profile){ .window_bytes = p->window_bytes, .floor_bytes = p->floor_bytes,
		.segment_bytes = p->segment_bytes, .base_rtt_ns = p->rtt_ns, .rate_bps = p->rate_bps, .noise_ns = p->noise_ns,
		.adapt = p->adapt };
}

void eng_vc_touch(struct dq_engine *e, struct eng_vc *vc)
{
	if (vc->running || vc->failing)
		return;
	vc->running = true;
	vc->next_run = DQ_NONE;
	if (e->run_tail == DQ_NONE)
		e->run_head = vc->id;
	else
		eng_vc_at(e, e->run_tail)->next_run = vc->id;
	e->run_tail = vc->id;
}

/* --- what the core asks for -------------------------------------------------------------------------------------- */

/* What a post function returned for `wanted` pieces of work. */
static void check_posted(struct eng_vc *vc, int n, unsigned wanted, const char *what)
{
	/* -EIO: the QP has failed meanwhile. Its DQ_WC_FAILED is due and knows why: mostly that the peer is gone, which is no
	 * fault of this device. */
	if (n != (int)wanted && n != -EIO)
		eng_vc_fail(vc->engine, vc, DQ_ERR_DEVICE, "device %s: posting %u %s: %s", vc->engine->devices[vc->device].name, wanted, what,
			    n < 0 ? strerror(-n) : "queue depth exceeded");
}

static void flush(struct eng_vc *vc, struct eng_qp *q)
{
	check_posted(vc, provider_of(vc)->post_write(q->qp, q->batch, q->pending), q->pending, "writes on a data QP");
	q->pending = 0;
}

static void op_post_segment(void *user, struct dq_vc *core, const struct dq_segment *s)
{
	struct eng_vc *vc = user;
	struct eng_qp *q = &vc->qps[s->qp + 1];
	struct eng_mem *m = eng_mem_at(vc->engine, (uint32_t)(s->mem - 1));
	(void)core;
	q->batch[q->pending++] = (struct dq_write){ .wr_id = s->id, .mem = m->on[vc->device], .offset = s->offset, .len = s->bytes,
						    .remote_addr = s->remote_addr, .remote_key = s->remote_key, .imm = s->imm };
	if (q->pending == ENG_BATCH)
		flush(vc, q);
}

static void *op_control_buffer(void *user, struct dq_vc *core)
{
	struct eng_vc *vc = user;
	(void)core;
	if (!vc->free_send_count)
		return NULL;
	return vc->buffers + (size_t)vc->free_sends[--vc->free_send_count] * DQ_CONTROL_BYTES;
}

static void op_post_control(void *user, struct dq_vc *core, void *buffer, uint32_t bytes)
{
	struct eng_vc *vc = user;
	uint64_t offset = (uint64_t)((uint8_t *)buffer - vc->buffers);
	struct dq_send s = { .wr_id = offset / DQ_CONTROL_BYTES, .mem = vc->buffers_mem, .offset = offset, .len = bytes };
	(void)core;
	check_posted(vc, provider_of(vc)->post_send(vc->qps[0].qp, &s, 1), 1, "control packets");
}

static void op_done(void *user, struct dq_vc *core, const struct dq_done *d)
{
	struct eng_vc *vc = user;
	struct dq_engine *e = vc->engine;
	struct eng_client *c = eng_client_at(e, d->client);
	struct dq_completion cq = { .request = d->request, .status = d->status, .flow = d->flow, .bytes = d->bytes, .tag = d->tag,
				    .offset = d->offset, .region = d->region };
	(void)core;
	if (!c)
		return;
	if (d->status == DQ_OK) {
		if (d->kind == DQ_DONE_SEND || d->kind == DQ_DONE_PUT) {
			c->tx_bytes += d->bytes;
			c->tx_messages++;
		} else if (d->kind == DQ_DONE_RECV || d->kind == DQ_DONE_NOTIFY) {
			c->rx_bytes += d->bytes;
			c->rx_messages++;
		}
	}
	eng_client_complete(e, c, &cq);
}

static void op_mem_release(void *user, uint64_t mem)
{
	struct eng_vc *vc = user;
	eng_mem_unref(vc->engine, (uint32_t)(mem - 1));
}

static void op_mem_key(void *user, struct dq_vc *core, uint64_t mem, uint64_t offset, uint64_t bytes, uint64_t *addr, uint64_t *key)
{
	struct eng_vc *vc = user;
	struct dq_mem_key k = { 0 };
	(void)core;
	/* Cannot fail: clients.c asked for the same range before it gave the operation to the core. */
	(void)provider_of(vc)->mem_key(eng_mem_at(vc->engine, (uint32_t)(mem - 1))->on[vc->device], offset, bytes, &k);
	*addr = k.addr;
	*key = k.key;
}

static void op_flow_incoming(void *user, struct dq_vc *core, uint32_t flow, const struct dq_message *open)
{
	struct eng_vc *vc = user;
	(void)core;
	eng_flow_incoming(vc->engine, vc, flow, open);
}

static void op_flow_opened(void *user, struct dq_vc *core, uint32_t flow, int32_t status)
{
	struct eng_vc *vc = user;
	(void)core;
	eng_flow_opened(vc->engine, flow, status);
}

static void op_flow_gone(void *user, struct dq_vc *core, uint32_t flow)
{
	struct eng_vc *vc = user;
	(void)core;
	eng_flow_gone(vc->engine, flow);
}

const struct dq_vc_ops eng_vc_ops = {
	.post_segment = op_post_segment, .control_buffer = op_control_buffer, .post_control = op_post_control, .done = op_done,
	.mem_release = op_mem_release, .mem_key = op_mem_key, .flow_incoming = op_flow_incoming, .flow_opened = op_flow_opened,
	.flow_gone = op_flow_gone,
};

void eng_vc_run_all(struct dq_engine *e)
{
	uint32_t id = e->run_head, next;
	e->run_head = e->run_tail = DQ_NONE;
	for (; id != DQ_NONE; id = next) {
		struct eng_vc *vc = eng_vc_at(e, id);
		bool more;
		next = vc->next_run;
		vc->running = false;
		if (vc->state != ENG_VC_UP || vc->failing)
			continue;
		more = dq_vc_run(&vc->core, ENG_RUN_BUDGET, e->now_ns);
		for (uint32_t q = 1; q < vc->nqps && !vc->failing; q++)
			if (vc->qps[q].pending)
				flush(vc, &vc->qps[q]);
		if (more)
			eng_vc_touch(e, vc);
	}
}

/* --- what the provider tells --------------------------------------------------------------------------------------- */

static const char *status_text(uint8_t status)
{
	switch (status) {
	case DQ_WC_FLUSHED: return "flushed";
	case DQ_WC_REMOTE_ACCESS: return "a write was refused, here or by the peer: its key, bounds or rights are wrong, or the peer ended";
	case DQ_WC_REMOTE_GONE: return "the peer closed the connection";
	case DQ_WC_TIMEOUT: return "no answer before the deadline";
	case DQ_WC_LOCAL: return "local error";
	case DQ_WC_PROTOCOL: return "the peer sent what it may not, or what this version does not understand";
	case DQ_WC_NOT_READY: return "the peer had no receive posted";
	case DQ_WC_PATH_MTU: return "small packets pass, packets of the path MTU do not: check the MTU of both interfaces and of all "
				    "switches between, or lower mtu_bytes of the device";
	case DQ_WC_DEVICE: return "the local device or its port failed";
	default: return "unknown status";
	}
}

static void vc_up(struct dq_engine *e, struct eng_vc *vc)
{
	struct dq_engine_event ev = { .type = DQ_EV_VC_UP, .path = vc->path, .vc = vc->id, .device = vc->device };
	vc->state = ENG_VC_UP;
	vc->core.last_heard_ns = e->now_ns;
	eng_event(e, &ev);
	eng_connections_vc_up(e, vc);
	eng_vc_touch(e, vc);
}

static void post_receive(struct eng_vc *vc, uint32_t buffer)
{
	struct dq_recv r = { .wr_id = buffer, .mem = vc->buffers_mem, .offset = (uint64_t)buffer * DQ_CONTROL_BYTES, .len = DQ_CONTROL_BYTES };
	check_posted(vc, provider_of(vc)->post_recv(vc->qps[0].qp, &r, 1), 1, "control receives");
}

static void completion(struct dq_engine *e, struct eng_vc *vc, const struct dq_wc *w, const struct eng_qp *q)
{
	int rc = 0;
	switch (w->op) {
	case DQ_WC_CONNECTED:
		if (++vc->connected == vc->nqps && vc->state == ENG_VC_CONNECTING)
			vc_up(e, vc);
		return;
	case DQ_WC_FAILED:
		eng_vc_fail(e, vc, w->status == DQ_WC_TIMEOUT || w->status == DQ_WC_REMOTE_GONE || w->status == DQ_WC_PATH_MTU ||
			    w->status == DQ_WC_NOT_READY ? DQ_ERR_UNREACHABLE : DQ_ERR_DEVICE,
			    "device %s: %s QP %u failed: %s (detail %u)", e->devices[vc->device].name, q == vc->qps ? "control" : "data",
			    (unsigned)(q - vc->qps), status_text(w->status), w->vendor);
		return;
	case DQ_WC_WRITE:
		if (w->status != DQ_WC_SUCCESS)
			return; /* its QP says DQ_WC_FAILED */
		rc = dq_vc_segment_done(&vc->core, (uint32_t)w->wr_id, w->time_ns, e->now_ns);
		break;
	case DQ_WC_SEND:
		if (w->status == DQ_WC_SUCCESS)
			vc->free_sends[vc->free_send_count++] = (uint16_t)w->wr_id;
		break;
	case DQ_WC_SEGMENT:
		if (w->status != DQ_WC_SUCCESS)
			return;
		rc = dq_vc_segment_in(&vc->core, w->imm, w->len, e->now_ns);
		break;
	case DQ_WC_RECV:
		if (w->status != DQ_WC_SUCCESS)
			return;
		rc = dq_vc_control_in(&vc->core, vc->buffers + w->wr_id * DQ_CONTROL_BYTES, w->len, e->now_ns);
		if (!rc) {
			post_receive(vc, (uint32_t)w->wr_id);
			dq_vc_control_posted(&vc->core);
		}
		break;
	default:
		return;
	}
	if (rc)
		eng_vc_fail(e, vc, rc == -ENOMEM ? DQ_ERR_NOMEM : DQ_ERR_UNREACHABLE, "protocol: %s",
			    vc->core.why[0] ? vc->core.why : strerror(-rc));
	else
		eng_vc_touch(e, vc);
}

void eng_vc_completions(struct dq_engine *e, const struct dq_wc *wc, int n)
{
	for (int i = 0; i < n; i++) {
		struct eng_qp *q = wc[i].ctx;
		if (!q->vc->failing)
			completion(e, q->vc, &wc[i], q);
	}
	eng_vc_reap(e);
}

/* --- failure and clean-up ------------------------------------------------------------------------------------------ */

static void list_failing(struct dq_engine *e, struct eng_vc *vc)
{
	vc->next_failing = e->fail_head;
	e->fail_head = vc->id;
}

void eng_vc_fail(struct dq_engine *e, struct eng_vc *vc, int32_t status, const char *fmt, ...)
{
	va_list ap;
	if (vc->failing)
		return;
	va_start(ap, fmt);
	vsnprintf(vc->why, sizeof vc->why, fmt, ap);
	va_end(ap);
	vc->failing = true;
	vc->fail_status = status;
	if (!vc->held)
		list_failing(e, vc);
}

static void destroy_qps(struct dq_engine *e, struct eng_vc *vc)
{
	struct eng_device *d = &e->devices[vc->device];
	for (uint32_t i = 0; i < vc->nqps; i++) {
		if (!vc->qps[i].qp)
			continue;
		d->provider->qp_destroy(vc->qps[i].qp);
		vc->qps[i].qp = NULL;
		d->qps--;
	}
}

static void free_vc(struct dq_engine *e, struct eng_vc *vc)
{
	struct eng_device *d = &e->devices[vc->device];
	destroy_qps(e, vc);
	for (uint32_t i = 0; i < vc->nqps; i++)
		free(vc->qps[i].batch);
	if (vc->buffers_mem)
		d->provider->mem_deregister(vc->buffers_mem);
	if (vc->buffers)
		munmap(vc->buffers, vc->buffers_bytes);
	free(vc->qps);
	free(vc->free_sends);
	d->vcs--;
	dq_slab_free(&e->vcs, vc->id);
	free(vc);
}

static void unlink_from_path(struct dq_engine *e, struct eng_vc *vc)
{
	struct eng_path *p = eng_path_at(e, vc->path);
	uint32_t *at = &p->vcs;
	while (*at != vc->id)
		at = &eng_vc_at(e, *at)->next_in_path;
	*at = vc->next_in_path;
}

static void take_off_run_list(struct dq_engine *e, struct eng_vc *vc)
{
	uint32_t last = DQ_NONE, *at = &e->run_head;
	if (!vc->running)
		return;
	while (*at != vc->id) {
		last = *at;
		at = &eng_vc_at(e, *at)->next_run;
	}
	*at = vc->next_run;
	if (e->run_tail == vc->id)
		e->run_tail = last;
}

void eng_vc_reap(struct dq_engine *e)
{
	while (e->fail_head != DQ_NONE) {
		struct eng_vc *vc = eng_vc_at(e, e->fail_head);
		struct dq_engine_event ev = { .type = DQ_EV_VC_DOWN, .path = vc->path, .vc = vc->id, .device = vc->device,
					      .status = vc->fail_status };
		e->fail_head = vc->next_failing;
		/* Fence all, so that the peer notices at once, then destroy all: only then is it true that nothing can read or
		 * write the memory whose references fall. */
		for (uint32_t i = 0; i < vc->nqps; i++)
			if (vc->qps[i].qp)
				provider_of(vc)->qp_fence(vc->qps[i].qp);
		destroy_qps(e, vc);
		eng_path_account(e, vc);
		if (vc->state != ENG_VC_PREPARED) {
			dq_vc_fail(&vc->core, vc->fail_status, e->now_ns);
			dq_vc_fini(&vc->core);
		}
		eng_path_at(e, vc->path)->past.failures += vc->fail_status != DQ_OK;
		take_off_run_list(e, vc);
		unlink_from_path(e, vc);
		memcpy(ev.text, vc->why, sizeof vc->why);
		free_vc(e, vc);
		eng_event(e, &ev);
	}
}

void eng_vc_tick(struct dq_engine *e)
{
	for (uint32_t i = 0; i < e->vcs.capacity; i++) {
		struct eng_vc *vc = eng_vc_at(e, i);
		bool stalled;
		int status;
		if (!vc || vc->failing)
			continue;
		if (vc->state != ENG_VC_UP) {
			if (vc->deadline_ns && e->now_ns > vc->deadline_ns)
				eng_vc_fail(e, vc, DQ_ERR_UNREACHABLE, "%u of %u QPs connected within %llu s", vc->connected, vc->nqps,
					    CONNECT_DEADLINE_NS / 1000000000ull);
			continue;
		}
		status = dq_vc_check(&vc->core, e->now_ns, &stalled);
		if (stalled) {
			struct dq_engine_event ev = { .type = DQ_EV_STALL, .path = vc->path, .vc = vc->id, .device = vc->device };
			snprintf(ev.text, sizeof ev.text, "%llu bytes in %u segments posted, nothing completed for %llu ms; window %llu, "
				 "grant %llu, backlog %llu bytes, %u flows", (unsigned long long)vc->core.window.inflight,
				 dq_vc_outstanding(&vc->core),
				 (unsigned long long)((e->now_ns - vc->core.last_progress_ns) / 1000000),
				 (unsigned long long)vc->core.window.limit, (unsigned long long)vc->core.grant_in,
				 (unsigned long long)vc->core.backlog, vc->core.flow_count);
			eng_event(e, &ev);
		}
		if (status)
			eng_vc_fail(e, vc, status, "%s", vc->core.why);
	}
}

/* --- making, from the control plane ---------------------------------------------------------------------------------- */

/*
 * Creating and connecting QPs takes a millisecond and more for a VC, in which the engine's thread would move no data. So where
 * the provider allows it, that is done on the caller's thread, between two calls to the engine's: the first makes the VC
 * and holds it, the second lets go. What goes wrong with a held VC meanwhile waits until then.
 */

struct vc_args {
	uint32_t path, vc;
	const struct dq_vc_limits *limits;
	const struct dq_endpoint_blob *in;
	struct dq_endpoint_blob *out;
	uint8_t dial;
	int32_t status;
	const char *why;
	uint32_t *id;
	struct dq_text *err;
	int rc;
	struct eng_vc *held;
	bool elsewhere;                         /* held for the caller's thread, else done with */
	struct dq_link *link;                   /* of the path; the rest is a copy */
	struct dq_profile profile;
	uint32_t label_seed;
};

static int make_qps(struct dq_engine *e, struct eng_vc *vc, const struct vc_args *a)
{
	const struct eng_device *d = &e->devices[vc->device];
	struct dq_text *err = a->err;
	struct dq_error perr = { 0 };
	uint32_t credits = vc->limits.credits;
	struct dq_mem_desc desc = { .dmabuf_fd = -1 };
	int rc;

	vc->qps = calloc(vc->nqps, sizeof *vc->qps);
	vc->free_sends = calloc(credits, sizeof *vc->free_sends);
	vc->buffers_bytes = (size_t)credits * 2 * DQ_CONTROL_BYTES;
	vc->buffers = mmap(NULL, vc->buffers_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (vc->buffers == MAP_FAILED)
		vc->buffers = NULL;
	if (!vc->qps || !vc->free_sends || !vc->buffers)
		return eng_error(err, -ENOMEM, "VC: no memory for %u QPs", vc->nqps);
	desc.addr = vc->buffers;
	desc.len = vc->buffers_bytes;
	rc = d->provider->mem_register(d->dev, &desc, &vc->buffers_mem, &perr);
	for (uint32_t i = 0; i < vc->nqps && !rc; i++) {
		struct eng_qp *q = &vc->qps[i];
		struct dq_qp_attr attr = { .ctx = q, .kind = i ? DQ_QP_DATA : DQ_QP_CONTROL, .send_depth = i ? vc->limits.depth : credits,
					   .recv_depth = i ? vc->limits.depth : credits, .link = a->link,
					   .flow_label = eng_flow_label(a->label_seed, i),
					   .ack_timeout_ns = a->profile.ack_timeout_ns, .retries = a->profile.retries };
		q->vc = vc;
		if (i) {
			q->batch = calloc(ENG_BATCH, sizeof *q->batch);
			if (!q->batch)
				return eng_error(err, -ENOMEM, "VC: no memory for %u QPs", vc->nqps);
		}
		rc = d->provider->qp_create(d->dev, &attr, &q->qp, &perr);
	}
	if (rc)
		return eng_error(err, rc, "%s", perr.text);
	for (uint32_t i = 0; i < credits; i++) {
		struct dq_recv r = { .wr_id = i, .mem = vc->buffers_mem, .offset = (uint64_t)i * DQ_CONTROL_BYTES, .len = DQ_CONTROL_BYTES };
		if (d->provider->post_recv(vc->qps[0].qp, &r, 1) != 1)
			return eng_error(err, -EIO, "VC: the control QP of device %s takes only %u of %u receives", d->name, i, credits);
	}
	for (uint32_t i = 0; i < vc->nqps; i++) {
		struct dq_endpoint ep;
		d->provider->qp_endpoint(vc->qps[i].qp, &ep);
		a->out[i].len = ep.len;
		memcpy(a->out[i].data, ep.data, sizeof ep.data);
	}
	return 0;
}

/* The end of vc_prepare, and of vc_connect: a->rc is how the work on the QPs ended. */
static void vc_made(struct dq_engine *e, void *arg)
{
	struct vc_args *a = arg;
	struct eng_vc *vc = a->held;
	for (uint32_t i = 0; vc->qps && i < vc->nqps; i++)
		e->devices[vc->device].qps += vc->qps[i].qp != NULL;
	vc->held = false;
	if (a->rc) { /* nobody was told of it yet: it goes without an event */
		if (!vc->qps)
			vc->nqps = 0;
		unlink_from_path(e, vc);
		free_vc(e, vc);
		return;
	}
	*a->id = vc->id;
	if (vc->failing)
		list_failing(e, vc);
}

static void vc_connected(struct dq_engine *e, void *arg)
{
	struct vc_args *a = arg;
	struct eng_vc *vc = a->held;
	if (a->rc)
		eng_vc_fail(e, vc, DQ_ERR_UNREACHABLE, "%s", a->err->text);
	vc->held = false;
	if (vc->failing)
		list_failing(e, vc);
}

static void vc_prepare(struct dq_engine *e, void *arg)
{
	struct vc_args *a = arg;
	struct eng_path *p = eng_path_at(e, a->path);
	const struct dq_vc_limits *l = a->limits;
	struct eng_vc **slot, *vc;
	uint32_t id;

	if (!p) {
		a->rc = eng_error(a->err, -ENOENT, "VC: no path %u", a->path);
		return;
	}
	if (l->qps < 1 || l->qps > DQ_MAX_QPS || l->depth < 1 || l->depth > 65536 || l->credits < 4 || l->credits > 4096 ||
	    l->segment_bytes < DQ_MIN_SEGMENT_BYTES || l->segment_bytes > DQ_MAX_SEGMENT_BYTES) {
		a->rc = eng_error(a->err, -EINVAL, "VC to %s: limits out of range: QPs %u (1..%u), depth %u (1..65536), credits %u (4..4096), "
				  "segment %u (%u..%u bytes)", p->host_id, l->qps, DQ_MAX_QPS, l->depth, l->credits, l->segment_bytes,
				  DQ_MIN_SEGMENT_BYTES, DQ_MAX_SEGMENT_BYTES);
		return;
	}
	id = dq_slab_alloc(&e->vcs);
	vc = calloc(1, sizeof *vc);
	if (id == DQ_NONE || !vc) {
		if (id != DQ_NONE)
			dq_slab_free(&e->vcs, id);
		free(vc);
		a->rc = eng_error(a->err, -ENOMEM, "VC to %s: no memory", p->host_id);
		return;
	}
	slot = dq_slab_at(&e->vcs, id);
	*slot = vc;
	vc->engine = e;
	vc->id = id;
	vc->path = a->path;
	vc->device = p->device;
	vc->limits = *l;
	vc->nqps = l->qps + 1;
	vc->deadline_ns = e->now_ns + CONNECT_DEADLINE_NS;
	e->devices[vc->device].vcs++;
	vc->next_in_path = p->vcs;
	p->vcs = id;
	vc->held = true;
	a->held = vc;
	a->link = p->link;
	a->profile = p->profile;
	a->label_seed = p->label_seed;
	a->elsewhere = provider_of(vc)->qp_any_thread;
	if (!a->elsewhere) {
		a->rc = make_qps(e, vc, a);
		vc_made(e, a);
	}
}

int dq_engine_vc_prepare(dq_engine *e, uint32_t path, const struct dq_vc_limits *limits, uint32_t *vc,
			 struct dq_endpoint_blob *endpoints, struct dq_text *err)
{
	struct vc_args a = { .path = path, .limits = limits, .id = vc, .out = endpoints, .err = err };
	int rc;
	pthread_mutex_lock(&e->making);
	rc = eng_call(e, vc_prepare, &a);
	if (!rc && a.elsewhere) {
		a.rc = make_qps(e, a.held, &a);
		rc = eng_call(e, vc_made, &a);
	}
	pthread_mutex_unlock(&e->making);
	return rc ? rc : a.rc;
}

/* err is there: vc_connected tells with it why. */
static int connect_qps(struct eng_vc *vc, const struct vc_args *a)
{
	for (uint32_t i = 0; i < vc->nqps; i++) {
		struct dq_endpoint ep = { .len = a->in[i].len };
		struct dq_error perr = { 0 };
		int rc;
		memcpy(ep.data, a->in[i].data, sizeof ep.data);
		rc = provider_of(vc)->qp_connect(vc->qps[i].qp, &ep, a->dial, &perr);
		if (rc)
			return eng_error(a->err, rc, "%s", perr.text);
	}
	return 0;
}

static void vc_connect(struct dq_engine *e, void *arg)
{
	struct vc_args *a = arg;
	struct eng_vc *vc = eng_vc_at(e, a->vc);
	const struct dq_vc_limits *l = a->limits;
	struct eng_device *d;
	struct eng_path *p;
	struct dq_window_profile wp;
	struct dq_vc_config cfg;

	if (!vc || vc->failing || vc->state != ENG_VC_PREPARED) {
		a->rc = eng_error(a->err, -ENOENT, "VC %u is not there, or not in preparation", a->vc);
		return;
	}
	if (l->qps < 1 || l->qps > vc->limits.qps || l->depth < 1 || l->depth > vc->limits.depth || l->credits < 4 ||
	    l->credits > vc->limits.credits || l->segment_bytes < DQ_MIN_SEGMENT_BYTES || l->segment_bytes > vc->limits.segment_bytes) {
		a->rc = eng_error(a->err, -EINVAL, "VC %u: negotiated QPs %u, depth %u, credits %u, segment %u exceed what was prepared (%u, %u, %u, %u)",
				  a->vc, l->qps, l->depth, l->credits, l->segment_bytes, vc->limits.qps, vc->limits.depth, vc->limits.credits,
				  vc->limits.segment_bytes);
		return;
	}
	d = &e->devices[vc->device];
	p = eng_path_at(e, vc->path);
	for (uint32_t i = l->qps + 1; i < vc->nqps; i++) { /* what the peer has no partner for */
		d->provider->qp_destroy(vc->qps[i].qp);
		d->qps--;
		free(vc->qps[i].batch);
	}
	for (uint32_t i = 0; i < l->credits; i++) /* behind the receive buffers, which were posted in preparation */
		vc->free_sends[vc->free_send_count++] = (uint16_t)(vc->limits.credits + i);
	vc->nqps = l->qps + 1;
	vc->limits = *l;
	cfg = (struct dq_vc_config){ .id = vc->id, .qps = l->qps, .depth = l->depth, .credits = l->credits, .segment_bytes = l->segment_bytes,
				     .cancel_deadline_ns = e->config.cancel_deadline_ns, .stall_ns = e->config.stall_ns };
	eng_vc_profile_of(&p->profile, &wp);
	a->rc = dq_vc_init(&vc->core, &cfg, &wp, p->profile.outstanding_per_qp, p->profile.qps, p->profile.grants, &e->pools, &d->departure,
			   &d->grants, &eng_vc_ops, vc);
	if (a->rc) {
		eng_error(a->err, a->rc, "VC %u: %s", a->vc, strerror(-a->rc));
		eng_vc_fail(e, vc, DQ_ERR_NOMEM, "no memory");
		return;
	}
	vc->state = ENG_VC_CONNECTING;
	vc->deadline_ns = e->now_ns + CONNECT_DEADLINE_NS;
	vc->held = true;
	a->held = vc;
	a->elsewhere = d->provider->qp_any_thread;
	if (!a->elsewhere) {
		a->rc = connect_qps(vc, a);
		vc_connected(e, a);
	}
}

int dq_engine_vc_connect(dq_engine *e, uint32_t vc, const struct dq_vc_limits *negotiated, const struct dq_endpoint_blob *endpoints,
			 uint8_t dial, struct dq_text *err)
{
	struct dq_text text = { 0 };
	struct vc_args a = { .vc = vc, .limits = negotiated, .in = endpoints, .dial = dial, .err = err ? err : &text };
	int rc;
	pthread_mutex_lock(&e->making);
	rc = eng_call(e, vc_connect, &a);
	if (!rc && a.elsewhere) {
		a.rc = connect_qps(a.held, &a);
		rc = eng_call(e, vc_connected, &a);
	}
	pthread_mutex_unlock(&e->making);
	return rc ? rc : a.rc;
}

static void vc_close(struct dq_engine *e, void *arg)
{
	struct vc_args *a = arg;
	struct eng_vc *vc = eng_vc_at(e, a->vc);
	a->rc = vc ? 0 : -ENOENT;
	if (vc)
		eng_vc_fail(e, vc, a->status, "%s", a->why ? a->why : "closed");
}

int dq_engine_vc_close(dq_engine *e, uint32_t vc, int32_t status, const char *why)
{
	struct vc_args a = { .vc = vc, .status = status, .why = why };
	int rc = eng_call(e, vc_close, &a);
	return rc ? rc : a.rc;
}
