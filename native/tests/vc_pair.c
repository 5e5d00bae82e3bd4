/* SPDX-License-Identifier: Apache-2.0 */
#include "vc_pair.h"

#include <errno.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/vc_private.h"
#include "prng.h"

enum kind { EV_INGRESS, EV_WRITE, EV_ACK, EV_SEEN, EV_CONTROL, EV_REPOST, EV_FAIL, EV_GRANT, EV_OUTBOUND };

struct vp_event {
	uint64_t ns, seq;
	enum kind kind;
	uint32_t end;
	uint32_t bytes;
	void *packet;
	struct dq_segment s;
};

#define START_NS 1000000000ull
#define ADDR(mem, offset) (((uint64_t)(mem) + 1) << 36 | (offset))
#define KEY(host, mem) ((uint64_t)(host) << 32 | (0x5a000000u + (mem)))

/* --- events --------------------------------------------------------------------------------------------------- */

static bool before(const struct vp_event *a, const struct vp_event *b)
{
	return a->ns != b->ns ? a->ns < b->ns : a->seq < b->seq;
}

static void push(struct vp *w, struct vp_event e)
{
	uint32_t i = w->heap_count++;
	if (i == w->heap_room) {
		w->heap_room = w->heap_room ? w->heap_room * 2 : 1024;
		w->heap = realloc(w->heap, w->heap_room * sizeof *w->heap);
		assert_non_null(w->heap);
	}
	assert_true(e.ns >= w->now_ns);
	e.seq = w->seq++;
	for (; i && before(&e, &w->heap[(i - 1) / 2]); i = (i - 1) / 2)
		w->heap[i] = w->heap[(i - 1) / 2];
	w->heap[i] = e;
}

static struct vp_event pop(struct vp *w)
{
	struct vp_event top = w->heap[0], last = w->heap[--w->heap_count];
	uint32_t i = 0;
	for (;;) {
		uint32_t c = 2 * i + 1;
		if (c >= w->heap_count)
			break;
		if (c + 1 < w->heap_count && before(&w->heap[c + 1], &w->heap[c]))
			c++;
		if (!before(&w->heap[c], &last))
			break;
		w->heap[i] = w->heap[c];
		i = c;
	}
	w->heap[i] = last;
	return top;
}

static uint64_t up_to(struct vp *w, uint64_t ns)
{
	return ns ? prng_next(&w->prng) % (ns + 1) : 0;
}

/* --- memory --------------------------------------------------------------------------------------------------- */

uint32_t vp_mem(struct vp *w, uint32_t host, uint64_t bytes)
{
	struct vp_host *h = &w->hosts[host];
	if ((h->mem_count & (h->mem_count - 1)) == 0) {
		h->mems = realloc(h->mems, (h->mem_count ? 2 * h->mem_count : 1) * sizeof *h->mems);
		assert_non_null(h->mems);
	}
	h->mems[h->mem_count] = (struct vp_mem){ .data = w->check_content ? malloc(bytes + 1) : NULL, .bytes = bytes };
	return h->mem_count++;
}

static void release(struct vp_host *h, uint32_t mem)
{
	assert_true(mem < h->mem_count && h->mems[mem].refs > 0);
	if (--h->mems[mem].refs == 0) {
		free(h->mems[mem].data); /* who touches it now is caught, by `touch` or by the sanitizer */
		h->mems[mem].data = NULL;
	}
}

/* Memory that a device reads or writes: it must hold a reference. */
static uint8_t *touch(struct vp *w, uint32_t host, uint32_t mem, uint64_t offset, uint64_t bytes, const char *what)
{
	struct vp_host *h = &w->hosts[host];
	assert_true(mem < h->mem_count);
	if (h->mems[mem].refs == 0)
		fail_msg("%s of %llu bytes at %llu of memory %u of host %u, which was released", what, (unsigned long long)bytes,
			 (unsigned long long)offset, mem, host);
	assert_true(offset <= h->mems[mem].bytes && bytes <= h->mems[mem].bytes - offset);
	return h->mems[mem].data ? h->mems[mem].data + offset : NULL;
}

/* The first word names the operation, the others follow from it. */
static uint64_t word(uint64_t name, uint64_t i)
{
	return i ? (name + 1) * 0x9e3779b97f4a7c15ull ^ i * 0xbf58476d1ce4e5b9ull : name;
}

static void fill(uint8_t *data, uint64_t bytes, uint64_t name)
{
	for (uint64_t i = 0; i * 8 < bytes; i++) {
		uint64_t v = word(name, i);
		memcpy(data + i * 8, &v, DQ_MIN(8, bytes - i * 8));
	}
}

static void verify(const uint8_t *data, uint64_t bytes, uint64_t name)
{
	for (uint64_t i = 0; i * 8 < bytes; i++) {
		uint64_t v = word(name, i);
		if (memcmp(data + i * 8, &v, DQ_MIN(8, bytes - i * 8)))
			fail_msg("byte %llu of %llu is not what operation %llu sent", (unsigned long long)i * 8, (unsigned long long)bytes,
				 (unsigned long long)name);
	}
}

/* --- callbacks of the VC --------------------------------------------------------------------------------------- */

static struct vp_flow *flow_slot(struct vp_end *e, uint32_t flow)
{
	if (flow >= e->flow_room) {
		uint32_t room = DQ_MAX(flow + 1, e->flow_room * 2);
		e->flows = realloc(e->flows, room * sizeof *e->flows);
		assert_non_null(e->flows);
		memset(e->flows + e->flow_room, 0, (room - e->flow_room) * sizeof *e->flows);
		e->flow_room = room;
	}
	return &e->flows[flow];
}

static void on_segment(void *user, struct dq_vc *vc, const struct dq_segment *s)
{
	struct vp_end *e = user;
	struct vp *w = e->world;
	struct vp_host *h = &w->hosts[e->host];
	uint64_t limit = DQ_MIN(vc->window.limit, vc->grants_on ? vc->grant_in : UINT64_MAX);
	const struct dq_vc_seg *seg;
	uint64_t at;

	assert_ptr_equal(vc, &e->vc);
	assert_true(e->up);
	assert_true(s->qp < DQ_MAX(e->config.active, 1u) && s->qp < e->config.qps);
	assert_true(e->qp_segments[s->qp] < DQ_MAX(e->config.outstanding, 1u) && e->qp_segments[s->qp] < e->config.depth);
	e->qp_segments[s->qp]++;
	assert_true(e->inflight == 0 || e->inflight + s->bytes <= limit);
	e->inflight += s->bytes;
	e->inflight_peak = DQ_MAX(e->inflight_peak, e->inflight);
	assert_int_equal(s->offset % DQ_ALIGN_BYTES, 0);
	assert_true(w->expect_broken || s->remote_addr % DQ_ALIGN_BYTES == 0);
	touch(w, e->host, (uint32_t)s->mem - 1, s->offset, s->bytes, "post");
	seg = dq_slab_at(&vc->segs, s->id);
	e->client_bytes[dq_flow_at(vc->pools, dq_msg_at(vc, seg->msg)->flow)->client % 16] += s->bytes;

	at = h->egress.rate_bps ? dq_queue_push(&h->egress, w->now_ns, s->bytes) : w->now_ns;
	at = e->path.rate_bps ? dq_queue_push(&e->path, at, s->bytes) : at;
	at += e->link.delay_ns + up_to(w, e->link.jitter_ns) + (s->qp == 0 ? w->slow_qp_ns : 0);
	at = DQ_MAX(at, e->qp_last[s->qp]);
	e->qp_last[s->qp] = at;
	push(w, (struct vp_event){ .ns = at, .kind = EV_INGRESS, .end = e->index, .s = *s });
}

static void *on_buffer(void *user, struct dq_vc *vc)
{
	struct vp_end *e = user;
	(void)vc;
	if (!e->up || (e->config.control_buffers && e->control_out == e->config.control_buffers))
		return NULL;
	e->control_out++;
	return malloc(DQ_CONTROL_BYTES);
}

static void on_control(void *user, struct dq_vc *vc, void *buffer, uint32_t bytes)
{
	struct vp_end *e = user;
	struct vp *w = e->world;
	uint64_t at = DQ_MAX(w->now_ns + e->link.control_ns, e->control_last);
	(void)vc;
	assert_true(bytes >= DQ_WIRE_HEAD_BYTES && bytes <= DQ_CONTROL_BYTES);
	e->control_last = at;
	e->packets++;
	push(w, (struct vp_event){ .ns = at, .kind = EV_CONTROL, .end = e->peer, .packet = buffer, .bytes = bytes });
}

static void check_content(struct vp *w, struct vp_op *op, const struct dq_done *d)
{
	struct vp_host *h = &w->hosts[op->host];
	uint64_t name;
	struct vp_op *from;

	if (op->kind == VP_NOTIFY) {
		name = d->tag;
		assert_true(name < w->op_count);
		from = &w->ops[name];
		assert_int_equal(from->kind, VP_PUT);
		assert_int_equal(from->region, d->region);
		assert_int_equal(from->remote_offset, d->offset);
	} else {
		if (d->bytes < 8)
			return;
		memcpy(&name, h->mems[op->mem].data + op->offset, 8);
		assert_true(name < w->op_count);
		from = &w->ops[name];
		assert_int_equal(from->kind, VP_SEND);
		assert_int_equal(from->tag, op->tag);
		verify(h->mems[op->mem].data + op->offset, d->bytes, name);
	}
	assert_int_equal(from->bytes, d->bytes);
	assert_int_equal(from->end, w->ends[op->end]->peer);
	assert_int_equal(from->flow, w->ends[op->end]->flows[op->flow].peer);
	assert_false(from->delivered);
	from->delivered = true;
	if (op->kind == VP_NOTIFY && from->target != DQ_NONE) {
		struct vp_mem *m = &h->mems[w->ops[from->target].mem];
		if (m->refs) /* else the region was withdrawn since */
			verify(m->data + d->offset, d->bytes, name);
	}
}

static void on_done(void *user, struct dq_vc *vc, const struct dq_done *d)
{
	static const enum dq_completion_kind kinds[] = { DQ_DONE_SEND, DQ_DONE_RECV, DQ_DONE_PUT, DQ_DONE_NOTIFY, DQ_DONE_EXPORT,
							 DQ_DONE_UNEXPORT };
	struct vp_end *e = user;
	struct vp *w = e->world;
	struct vp_op *op;

	(void)vc;
	assert_true(d->request < w->op_count);
	op = &w->ops[d->request];
	if (op->done)
		fail_msg("operation %llu (kind %d) completed twice: %d, now %d", (unsigned long long)d->request, op->kind, op->status, d->status);
	assert_int_equal(d->kind, kinds[op->kind]);
	assert_int_equal(op->end, e->index);
	assert_int_equal(op->flow, d->flow);
	assert_int_equal(e->flows[d->flow].client, d->client);
	op->done = true;
	op->status = d->status;
	op->done_bytes = d->bytes;
	op->done_ns = w->now_ns;
	w->op_open--;
	if (op->kind == VP_EXPORT)
		op->region = d->region;
	if (d->status == DQ_OK) {
		if (op->kind == VP_SEND || op->kind == VP_PUT || op->kind == VP_EXPORT)
			assert_int_equal(d->bytes, op->bytes);
		if ((op->kind == VP_RECV || op->kind == VP_NOTIFY) && w->check_content)
			check_content(w, op, d);
	}
	if (w->on_done)
		w->on_done(w, op);
}

static void on_release(void *user, uint64_t mem)
{
	struct vp_end *e = user;
	release(&e->world->hosts[e->host], (uint32_t)mem - 1);
}

static void on_key(void *user, struct dq_vc *vc, uint64_t mem, uint64_t offset, uint64_t bytes, uint64_t *addr, uint64_t *key)
{
	struct vp_end *e = user;
	(void)vc;
	(void)bytes;
	*addr = ADDR(mem - 1, offset);
	*key = KEY(e->host, (uint32_t)mem - 1);
}

static void on_incoming(void *user, struct dq_vc *vc, uint32_t flow, const struct dq_message *open)
{
	struct vp_end *e = user;
	struct vp_flow *f = flow_slot(e, flow);
	*f = (struct vp_flow){ .state = VP_FLOW_INCOMING, .client = open->client, .peer = open->flow };
	if (!e->world->manual_accept && dq_vc_flow_accept(vc, flow, open->client) == 0)
		f->state = VP_FLOW_OPEN;
}

static void on_opened(void *user, struct dq_vc *vc, uint32_t flow, int32_t status)
{
	struct vp_end *e = user;
	struct vp_flow *f = flow_slot(e, flow);
	assert_int_equal(f->state, VP_FLOW_OPENING);
	f->status = status;
	f->state = status == DQ_OK ? VP_FLOW_OPEN : VP_FLOW_REFUSED;
	if (status == DQ_OK)
		f->peer = dq_flow_at(vc->pools, flow)->peer_flow;
}

static void on_gone(void *user, struct dq_vc *vc, uint32_t flow)
{
	struct vp_end *e = user;
	struct vp_flow *f = flow_slot(e, flow);
	(void)vc;
	assert_true(f->state == VP_FLOW_OPENING || f->state == VP_FLOW_INCOMING || f->state == VP_FLOW_OPEN);
	assert_true(f->closed || f->state == VP_FLOW_INCOMING);
	f->state = VP_FLOW_GONE;
}

static const struct dq_vc_ops ops = {
	.post_segment = on_segment, .control_buffer = on_buffer, .post_control = on_control, .done = on_done, .mem_release = on_release,
	.mem_key = on_key, .flow_incoming = on_incoming, .flow_opened = on_opened, .flow_gone = on_gone,
};

/* --- the world ------------------------------------------------------------------------------------------------- */

struct vp_config vp_config_default(void)
{
	return (struct vp_config){
		.link = { .delay_ns = 5000, .rate_bps = 100000000000ull, .control_ns = 5000 },
		.profile = { .window_bytes = 2 << 20, .floor_bytes = 64 << 10, .segment_bytes = 64 << 10, .base_rtt_ns = 16000,
			     .rate_bps = 100000000000ull, .adapt = false },
		.qps = 8, .depth = 16, .outstanding = 8, .credits = 16,
	};
}

struct vp *vp_new(uint64_t seed)
{
	struct vp *w = calloc(1, sizeof *w);
	assert_non_null(w);
	w->prng = seed;
	w->now_ns = START_NS;
	w->check_content = true;
	w->next_mem = w->put_target = DQ_NONE;
	return w;
}

uint32_t vp_host(struct vp *w, uint64_t egress_bps, uint64_t ingress_bps)
{
	struct vp_host *h = &w->hosts[w->host_count];
	assert_true(w->host_count < VP_MAX_HOSTS);
	assert_int_equal(dq_pools_init(&h->pools, 65536, 1 << 20), 0);
	dq_grants_init(&h->grants);
	dq_grants_device(&h->grants, ingress_bps, 0);
	h->departure.rate_bps = egress_bps;
	dq_queue_init(&h->egress, egress_bps, 0);
	dq_queue_init(&h->ingress, ingress_bps, 0);
	return w->host_count++;
}

static struct vp_end *end_new(struct vp *w, uint32_t host, const struct vp_config *c)
{
	struct vp_end *e = calloc(1, sizeof *e);
	struct dq_vc_config vc = { .id = w->end_count, .qps = c->qps, .depth = c->depth, .credits = c->credits,
				   .segment_bytes = c->profile.segment_bytes, .slot_share = c->slot_share,
				   .cancel_deadline_ns = c->cancel_deadline_ns, .stall_ns = c->stall_ns };
	assert_non_null(e);
	assert_true(w->end_count < VP_MAX_ENDS);
	e->world = w;
	e->index = w->end_count;
	e->peer = e->index ^ 1;
	e->host = host;
	e->config = *c;
	e->config.active = c->qps;
	e->link = c->link;
	e->up = true;
	e->control_posted = c->credits;
	dq_queue_init(&e->path, c->link.rate_bps, 0);
	assert_int_equal(dq_vc_init(&e->vc, &vc, &c->profile, c->outstanding, c->qps, c->grants, &w->hosts[host].pools,
				    &w->hosts[host].departure, &w->hosts[host].grants, &ops, e), 0);
	for (uint32_t i = 0; i < c->qps; i++)
		e->vc.qps.usable[i] = 1;
	w->ends[w->end_count++] = e;
	return e;
}

uint32_t vp_pair(struct vp *w, uint32_t host_a, uint32_t host_b, const struct vp_config *config)
{
	struct vp_end *a, *b;
	assert_int_equal(w->end_count % 2, 0);
	a = end_new(w, host_a, config);
	b = end_new(w, host_b, config);
	vp_kick(w, a->index);
	vp_kick(w, b->index);
	return a->index;
}

/* Turns of VCs that waited for the outbound budget of their host. */
static void turns(struct vp *w, uint32_t host)
{
	struct dq_outbound *o = &w->hosts[host].departure.outbound;
	struct dq_outbound_member *m;
	uint64_t due;
	while ((m = dq_outbound_next(o, w->now_ns))) {
		struct dq_vc *vc = (struct dq_vc *)((char *)m - offsetof(struct dq_vc, outbound));
		struct vp_end *e = vc->user;
		if (!e->up || e->silent)
			dq_outbound_pass(o, m);
		else
			while (dq_vc_run(vc, 32, w->now_ns))
				;
	}
	due = dq_outbound_due(o, w->now_ns);
	if (due == DQ_NEVER)
		return;
	for (uint32_t i = 0; i < w->heap_count; i++)
		if (w->heap[i].kind == EV_OUTBOUND && w->heap[i].end == host && w->heap[i].ns <= due)
			return;
	push(w, (struct vp_event){ .ns = due, .kind = EV_OUTBOUND, .end = host });
}

void vp_kick(struct vp *w, uint32_t end)
{
	struct vp_end *e = w->ends[end];
	if (!e->up || e->silent)
		return;
	while (dq_vc_run(&e->vc, 32, w->now_ns))
		;
	turns(w, e->host);
	if (e->vc.lost && w->may_lack_memory) {
		bool stalled;
		assert_int_equal(dq_vc_check(&e->vc, w->now_ns, &stalled), DQ_ERR_NOMEM);
		vp_fail(w, end, DQ_ERR_NOMEM);
	}
}

static void grants(struct vp *w, uint32_t host)
{
	uint64_t wake = dq_grants_split(&w->hosts[host].grants, w->now_ns);
	for (uint32_t i = 0; i < w->end_count; i++) {
		if (w->ends[i]->host == host && w->ends[i]->up && w->ends[i]->vc.grants_on && w->ends[i]->vc.grant_out.changed)
			vp_kick(w, i);
	}
	if (wake != DQ_NEVER) {
		/* `end` is the host here; a later one than the earliest scheduled is found out when that fires */
		for (uint32_t i = 0; i < w->heap_count; i++)
			if (w->heap[i].kind == EV_GRANT && w->heap[i].end == host && w->heap[i].ns <= wake)
				return;
		push(w, (struct vp_event){ .ns = DQ_MAX(wake, w->now_ns), .kind = EV_GRANT, .end = host });
	}
}

void vp_profile(struct vp *w, uint32_t end, const struct dq_window_profile *p, uint32_t outstanding, uint32_t active, bool grants_on)
{
	struct vp_end *e = w->ends[end];
	e->config.outstanding = outstanding;
	e->config.active = active;
	dq_vc_profile(&e->vc, p, outstanding, active, grants_on);
	vp_kick(w, end);
}

void vp_fail(struct vp *w, uint32_t end, int32_t status)
{
	struct vp_end *e = w->ends[end];
	if (!e->up)
		return;
	e->up = false;
	dq_vc_fail(&e->vc, status, w->now_ns);
	push(w, (struct vp_event){ .ns = w->now_ns + e->link.delay_ns + up_to(w, 2 * e->link.delay_ns), .kind = EV_FAIL, .end = e->peer });
}

static void took(struct vp *w, struct vp_end *e, int rc)
{
	if (rc == 0)
		return;
	assert_true(rc < 0);
	assert_true(e->vc.why[0] != '\0');
	if (!w->expect_broken && !(w->may_lack_memory && rc == -ENOMEM))
		fail_msg("end %u: %d, %s", e->index, rc, e->vc.why);
	e->broken = rc;
	vp_fail(w, e->index, DQ_ERR_UNREACHABLE);
}

static void move_bytes(struct vp *w, struct vp_end *from, const struct dq_segment *s)
{
	struct vp_end *to = w->ends[from->peer];
	uint32_t mem = (uint32_t)((s->remote_addr >> 36) - 1);
	uint64_t offset = s->remote_addr & ((1ull << 36) - 1);
	uint8_t *src, *dst;

	if (w->expect_broken)
		return;
	assert_int_equal(s->remote_key, KEY(to->host, mem));
	if (s->bytes == 0)
		return; /* touches nothing: RDMA checks no key then */
	src = touch(w, from->host, (uint32_t)s->mem - 1, s->offset, s->bytes, "read");
	dst = touch(w, to->host, mem, offset, s->bytes, "write");
	if (src && dst)
		memcpy(dst, src, s->bytes);
}

bool vp_step(struct vp *w)
{
	struct vp_event ev;
	struct vp_end *e, *peer;
	if (w->heap_count == 0)
		return false;
	ev = pop(w);
	w->now_ns = ev.ns;
	w->events++;
	if (ev.kind == EV_GRANT) {
		grants(w, ev.end);
		return true;
	}
	if (ev.kind == EV_OUTBOUND) {
		turns(w, ev.end);
		return true;
	}
	e = w->ends[ev.end];
	peer = w->ends[e->peer];
	switch (ev.kind) {
	case EV_INGRESS: {
		struct dq_queue *q = &w->hosts[peer->host].ingress;
		if (!e->up || !peer->up)
			break;
		ev.kind = EV_WRITE;
		ev.ns = q->rate_bps ? dq_queue_push(q, w->now_ns, ev.s.bytes) : w->now_ns;
		push(w, ev);
		break;
	}
	case EV_WRITE:
		if (!e->up || !peer->up)
			break; /* fenced */
		move_bytes(w, e, &ev.s);
		ev.kind = EV_ACK;
		ev.ns = w->now_ns + peer->link.delay_ns;
		push(w, ev);
		ev.kind = EV_SEEN;
		ev.ns = DQ_MAX(w->now_ns + up_to(w, e->link.poll_ns), e->qp_seen[ev.s.qp]);
		e->qp_seen[ev.s.qp] = ev.ns;
		push(w, ev);
		break;
	case EV_ACK:
		if (!e->up)
			break;
		e->qp_segments[ev.s.qp]--;
		e->inflight -= ev.s.bytes;
		e->completed_bytes += ev.s.bytes;
		if (!e->silent)
			took(w, e, dq_vc_segment_done(&e->vc, ev.s.id, w->now_ns, w->now_ns));
		vp_kick(w, e->index);
		break;
	case EV_SEEN:
		if (!peer->up || peer->silent)
			break;
		took(w, peer, dq_vc_segment_in(&peer->vc, ev.s.imm, ev.s.bytes, w->now_ns));
		vp_kick(w, peer->index);
		grants(w, peer->host);
		break;
	case EV_CONTROL:
		peer->control_out--;
		if (e->up && !e->silent) {
			if (e->control_posted == 0)
				fail_msg("control packet for end %u without a posted receive", e->index);
			e->control_posted--;
			push(w, (struct vp_event){ .ns = w->now_ns + up_to(w, e->link.poll_ns), .kind = EV_REPOST, .end = e->index });
			took(w, e, dq_vc_control_in(&e->vc, ev.packet, ev.bytes, w->now_ns));
			vp_kick(w, e->index);
			grants(w, e->host);
		}
		free(ev.packet);
		vp_kick(w, peer->index); /* it has its buffer again */
		break;
	case EV_REPOST:
		e->control_posted++;
		dq_vc_control_posted(&e->vc);
		vp_kick(w, e->index);
		break;
	case EV_FAIL:
		vp_fail(w, e->index, DQ_ERR_UNREACHABLE);
		break;
	case EV_GRANT:
	case EV_OUTBOUND:
		break;
	}
	return true;
}

void vp_run_until(struct vp *w, uint64_t ns)
{
	while (w->heap_count && w->heap[0].ns <= ns)
		vp_step(w);
	w->now_ns = DQ_MAX(w->now_ns, ns);
}

void vp_settle(struct vp *w)
{
	while (vp_step(w))
		;
}

void vp_load(struct vp *w, uint32_t end, uint64_t bytes)
{
	dq_queue_push(&w->ends[end]->path, w->now_ns, bytes);
}

void vp_control_inject(struct vp *w, uint32_t end, const void *packet, size_t bytes)
{
	struct vp_end *e = w->ends[end];
	void *copy = malloc(bytes ? bytes : 1); /* exactly so large, so that reading over its end is seen */
	assert_non_null(copy);
	memcpy(copy, packet, bytes);
	if (e->up)
		took(w, e, dq_vc_control_in(&e->vc, copy, bytes, w->now_ns));
	free(copy);
	vp_kick(w, end);
}

void vp_free(struct vp *w)
{
	for (uint32_t i = 0; i < w->end_count; i++) {
		struct vp_end *e = w->ends[i];
		if (e->up)
			dq_vc_fail(&e->vc, DQ_ERR_UNREACHABLE, w->now_ns);
		dq_vc_fini(&e->vc);
		for (uint32_t f = 0; f < e->flow_room; f++)
			if (e->flows[f].state == VP_FLOW_OPEN && !e->flows[f].closed)
				vp_close(w, i, f, DQ_ERR_CLOSED);
		free(e->flows);
		free(e);
	}
	for (uint32_t i = 0; i < w->host_count; i++) {
		dq_pools_fini(&w->hosts[i].pools);
		for (uint32_t m = 0; m < w->hosts[i].mem_count; m++)
			free(w->hosts[i].mems[m].data);
		free(w->hosts[i].mems);
	}
	for (uint32_t i = 0; i < w->heap_count; i++)
		free(w->heap[i].packet);
	free(w->heap);
	free(w->ops);
	free(w);
}

/* --- flows and operations -------------------------------------------------------------------------------------- */

uint32_t vp_open(struct vp *w, uint32_t end, uint32_t client, uint32_t peer_client)
{
	struct vp_end *e = w->ends[end];
	uint32_t flow;
	struct dq_message open = { .client = peer_client, .listener = 7, .nonce = { 1, 2 } };
	if (dq_vc_flow_open(&e->vc, client, &open, &flow))
		return DQ_NONE;
	*flow_slot(e, flow) = (struct vp_flow){ .state = VP_FLOW_OPENING, .client = client };
	vp_kick(w, end);
	return flow;
}

uint32_t vp_connect(struct vp *w, uint32_t end, uint32_t client, uint32_t peer_client, uint32_t *peer_flow)
{
	uint32_t flow = vp_open(w, end, client, peer_client);
	assert_int_not_equal(flow, DQ_NONE);
	while (w->ends[end]->flows[flow].state == VP_FLOW_OPENING && vp_step(w))
		;
	assert_int_equal(w->ends[end]->flows[flow].state, VP_FLOW_OPEN);
	*peer_flow = w->ends[end]->flows[flow].peer;
	return flow;
}

struct vp_flow *vp_flow(struct vp *w, uint32_t end, uint32_t flow)
{
	assert_true(flow < w->ends[end]->flow_room);
	return &w->ends[end]->flows[flow];
}

void vp_close(struct vp *w, uint32_t end, uint32_t flow, int32_t reason)
{
	struct vp_end *e = w->ends[end];
	struct vp_flow *f = vp_flow(w, end, flow);
	assert_false(f->closed);
	f->closed = true;
	dq_flow_close(&w->hosts[e->host].pools, &ops, e, flow, reason, w->now_ns);
	vp_kick(w, end);
}

static uint32_t op_new(struct vp *w, struct vp_op op)
{
	if (w->op_count == w->op_room) {
		w->op_room = w->op_room ? w->op_room * 2 : 256;
		w->ops = realloc(w->ops, w->op_room * sizeof *w->ops);
		assert_non_null(w->ops);
	}
	op.host = w->ends[op.end]->host;
	w->ops[w->op_count] = op;
	w->op_open++;
	return w->op_count++;
}

static uint32_t start(struct vp *w, uint32_t index)
{
	struct vp_op *op = &w->ops[index];
	struct vp_end *e = w->ends[op->end];
	struct vp_host *h = &w->hosts[op->host];
	bool has_mem = op->kind == VP_SEND || op->kind == VP_RECV || op->kind == VP_PUT || op->kind == VP_EXPORT;
	struct dq_operation o = { .flow = op->flow, .request = index, .bytes = op->bytes, .tag = op->kind == VP_PUT ? index : op->tag,
				  .region = op->region, .remote_offset = op->remote_offset };
	int rc = 0;

	if (has_mem) {
		bool out = op->kind == VP_SEND || op->kind == VP_PUT;
		op->mem = w->next_mem != DQ_NONE ? w->next_mem : vp_mem(w, op->host, op->bytes);
		assert_true(op->bytes <= h->mems[op->mem].bytes);
		h->mems[op->mem].refs++;
		if (w->check_content) {
			assert_non_null(h->mems[op->mem].data);
			if (out)
				fill(h->mems[op->mem].data, op->bytes, index);
		}
		o.mem = op->mem + 1ull;
	}
	switch (op->kind) {
	case VP_SEND: rc = dq_vc_send(&e->vc, &o, w->now_ns); break;
	case VP_RECV: rc = dq_vc_recv(&e->vc, &o, w->now_ns); break;
	case VP_PUT: rc = dq_vc_put(&e->vc, &o, w->now_ns); break;
	case VP_NOTIFY: rc = dq_vc_notify(&e->vc, &o, w->now_ns); break;
	case VP_EXPORT: rc = dq_vc_export(&e->vc, &o, w->now_ns); break;
	case VP_UNEXPORT: rc = dq_vc_unexport(&e->vc, &o, w->now_ns); break;
	}
	op = &w->ops[index];
	if (rc) {
		assert_true(rc < 0 && rc >= DQ_ERR_INTERNAL);
		assert_false(op->done);
		op->done = true;
		op->status = rc;
		w->op_open--;
		if (has_mem)
			release(h, op->mem);
	}
	vp_kick(w, op->end);
	return index;
}

uint32_t vp_send(struct vp *w, uint32_t end, uint32_t flow, uint64_t tag, uint64_t bytes)
{
	return start(w, op_new(w, (struct vp_op){ .kind = VP_SEND, .end = end, .flow = flow, .tag = tag, .bytes = bytes }));
}

uint32_t vp_recv(struct vp *w, uint32_t end, uint32_t flow, uint64_t tag, uint64_t bytes)
{
	return start(w, op_new(w, (struct vp_op){ .kind = VP_RECV, .end = end, .flow = flow, .tag = tag, .bytes = bytes }));
}

uint32_t vp_export(struct vp *w, uint32_t end, uint32_t flow, uint64_t bytes)
{
	return start(w, op_new(w, (struct vp_op){ .kind = VP_EXPORT, .end = end, .flow = flow, .bytes = bytes, .region = DQ_NONE }));
}

uint32_t vp_unexport(struct vp *w, uint32_t end, uint32_t flow, uint32_t region)
{
	return start(w, op_new(w, (struct vp_op){ .kind = VP_UNEXPORT, .end = end, .flow = flow, .region = region }));
}

uint32_t vp_put(struct vp *w, uint32_t end, uint32_t flow, uint32_t region, uint64_t remote_offset, uint64_t bytes)
{
	return start(w, op_new(w, (struct vp_op){ .kind = VP_PUT, .end = end, .flow = flow, .region = region,
						  .remote_offset = remote_offset, .bytes = bytes, .target = w->put_target }));
}

uint32_t vp_notify(struct vp *w, uint32_t end, uint32_t flow)
{
	return start(w, op_new(w, (struct vp_op){ .kind = VP_NOTIFY, .end = end, .flow = flow }));
}

void vp_cancel_mem(struct vp *w, uint32_t end, uint32_t flow, uint32_t mem)
{
	dq_vc_cancel_mem(&w->ends[end]->vc, flow, mem + 1ull, w->now_ns);
	vp_kick(w, end);
}

const struct vp_op *vp_done(struct vp *w, uint32_t op)
{
	if (!w->ops[op].done)
		fail_msg("operation %u of kind %d is not done", op, w->ops[op].kind);
	return &w->ops[op];
}

void vp_close_all(struct vp *w)
{
	bool again = true;
	while (again) { /* flows may still be on their way in */
		again = false;
		for (uint32_t i = 0; i < w->end_count; i++) {
			for (uint32_t f = 0; f < w->ends[i]->flow_room; f++) {
				enum vp_flow_state s = w->ends[i]->flows[f].state;
				if (w->ends[i]->flows[f].closed || !(s == VP_FLOW_OPENING || s == VP_FLOW_INCOMING || s == VP_FLOW_OPEN))
					continue;
				vp_close(w, i, f, DQ_ERR_CLOSED);
				again = true;
			}
		}
		vp_settle(w);
	}
}

void vp_check_clean(struct vp *w)
{
	if (w->op_open) {
		for (uint32_t i = 0; i < w->op_count; i++)
			if (!w->ops[i].done)
				fail_msg("operation %u of kind %d at end %u never completed", i, w->ops[i].kind, w->ops[i].end);
	}
	for (uint32_t i = 0; i < w->end_count; i++) {
		struct dq_vc *vc = &w->ends[i]->vc;
		for (uint32_t f = 0; f < w->ends[i]->flow_room; f++) {
			enum vp_flow_state s = w->ends[i]->flows[f].state;
			if (s == VP_FLOW_OPENING || s == VP_FLOW_INCOMING || s == VP_FLOW_OPEN)
				fail_msg("flow %u of end %u is still there", f, i);
		}
		assert_int_equal(vc->flow_count, 0);
		assert_null(vc->clients);
		if (!w->ends[i]->up)
			continue;
		assert_int_equal(vc->segs.used, 0);
		assert_int_equal(w->ends[i]->inflight, 0);
		assert_int_equal(vc->window.inflight, 0);
		for (uint32_t q = 0; q < w->ends[i]->config.qps; q++) {
			assert_int_equal(vc->qps.bytes[q], 0);
			assert_int_equal(vc->qps.segments[q], 0);
		}
		for (int dir = 0; dir < 2; dir++) {
			assert_int_equal(vc->slots[dir].used, 0);
			assert_int_equal(vc->slots[dir].shared, 0);
			assert_int_equal(vc->slots[dir].waiting, 0);
			assert_int_equal(vc->slots[dir].free_count, vc->slots[dir].fresh);
		}
		for (uint32_t s = 0; s < 65536; s++) {
			assert_int_equal(dq_slot_get(vc->incoming_pages, (uint16_t)s), DQ_NONE);
			assert_int_equal(dq_slot_get(vc->outgoing_pages, (uint16_t)s), DQ_NONE);
		}
		assert_int_equal(vc->backlog, 0);
		assert_int_equal(vc->awaiting, 0);
		assert_int_equal(vc->tracker.live, 0);
		assert_int_equal(vc->imports, 0);
		assert_int_equal(vc->exporting_head, DQ_NONE);
		assert_int_equal(vc->exporting_tail, DQ_NONE);
		assert_int_equal(vc->counters.receives_waiting, 0);
		assert_int_equal(vc->sched.active_flows, 0);
		assert_false(vc->lost);
		assert_int_equal(vc->control.sent, vc->control.tail);
	}
	for (uint32_t i = 0; i < w->host_count; i++) {
		struct vp_host *h = &w->hosts[i];
		assert_int_equal(h->pools.flows.used, 0);
		assert_int_equal(h->pools.messages.used, 0);
		assert_int_equal(h->pools.rtrs.used, 0);
		assert_int_equal(h->pools.regions.used, 0);
		for (uint32_t m = 0; m < h->mem_count; m++)
			if (h->mems[m].refs)
				fail_msg("memory %u of host %u still has %u references", m, i, h->mems[m].refs);
	}
}
