/* SPDX-License-Identifier: Apache-2.0 */
/* The hosts of a simulated job: NICs with their QPs, and the VCs whose owner they are. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "sim/private.h"

#define RUN_BUDGET 32u
#define START_PS (1000000ull * DQ_SIM_PS_PER_NS) /* the core takes time 0 for "never" */

static uint64_t mix(uint64_t z)
{
	z += 0x9e3779b97f4a7c15ull; /* splitmix64 */
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

/* --- the NIC ------------------------------------------------------------------------------------------------------ */

static void qp_activate(struct dq_sim *s, uint32_t index)
{
	struct sim_qp *q = &s->qps[index];
	struct sim_gpu *g = &s->gpus[q->gpu];
	struct sim_ring *ring = &g->qps[q->control && s->config.priority ? DQ_SIM_FIRST : DQ_SIM_DATA];

	q->active = true;
	q->next = DQ_NONE;
	if (ring->tail == DQ_NONE)
		ring->head = index;
	else
		s->qps[ring->tail].next = index;
	ring->tail = index;
}

static void qp_post(struct dq_sim *s, uint32_t index, uint32_t segment)
{
	struct sim_qp *q = &s->qps[index];

	if (q->tail == DQ_NONE)
		q->head = segment;
	else
		((struct sim_segment *)dq_slab_at(&s->segments, q->tail))->next = segment;
	q->tail = segment;
	if (!q->active)
		qp_activate(s, index);
	dq_sim_port_kick(&s->fabric, dq_sim_topology_nic(&s->topology, q->gpu));
}

static uint32_t segment_new(struct dq_sim *s, uint32_t qp, uint32_t bytes)
{
	uint32_t index = dq_slab_alloc(&s->segments);
	struct sim_segment *seg = dq_slab_at(&s->segments, index);

	if (!seg) {
		sim_fail(s, -ENOMEM, "no memory for a segment: %u are under way", s->segments.used);
		return DQ_NONE;
	}
	seg->next = DQ_NONE;
	seg->qp = qp;
	seg->bytes = bytes;
	return index;
}

/* The next packet of the QP whose turn it is. */
static uint32_t pull_qp(struct dq_sim *s, struct sim_ring *ring)
{
	uint32_t index = ring->head, packet;
	struct sim_qp *q = &s->qps[index];
	struct sim_segment *seg = dq_slab_at(&s->segments, q->head);
	uint32_t payload = DQ_MIN(seg->bytes - q->sent, s->payload);
	uint32_t packets = DQ_MAX(1u, (payload + s->config.mtu_bytes - 1) / s->config.mtu_bytes);
	struct dq_sim_packet *p;

	packet = dq_sim_packet_new(&s->fabric);
	if (packet == DQ_NONE) {
		sim_fail(s, -ENOMEM, "no memory for a packet: %u are under way", s->fabric.packets_used);
		return DQ_NONE;
	}
	p = dq_sim_packet_at(&s->fabric, packet);
	p->bytes = payload + packets * s->config.header_bytes;
	p->kind = SIM_PACKET_SEGMENT;
	p->class = q->control && s->config.priority ? DQ_SIM_FIRST : DQ_SIM_DATA;
	p->owner[0] = q->head;
	p->hops = q->hops;
	memcpy(p->route, q->route, sizeof p->route);
	q->sent += payload;
	ring->head = q->next;
	if (ring->head == DQ_NONE)
		ring->tail = DQ_NONE;
	q->active = false;
	if (q->sent == seg->bytes) {
		p->flags = DQ_SIM_LAST;
		q->sent = 0;
		q->head = seg->next;
		if (q->head == DQ_NONE)
			q->tail = DQ_NONE;
	}
	if (q->head != DQ_NONE)
		qp_activate(s, index);
	return packet;
}

static uint32_t pull(void *user, uint32_t port, bool first_only)
{
	struct dq_sim *s = user;
	struct sim_gpu *g = &s->gpus[port - s->topology.nic];

	if (g->acks.head != DQ_NONE) {
		uint32_t packet = g->acks.head;

		g->acks.head = dq_sim_packet_at(&s->fabric, packet)->next;
		if (g->acks.head == DQ_NONE)
			g->acks.tail = DQ_NONE;
		return packet;
	}
	if (g->qps[DQ_SIM_FIRST].head != DQ_NONE)
		return pull_qp(s, &g->qps[DQ_SIM_FIRST]);
	if (g->qps[DQ_SIM_DATA].head != DQ_NONE && !first_only)
		return pull_qp(s, &g->qps[DQ_SIM_DATA]);
	return DQ_NONE;
}

/* What arrived is handled host_ns later. */
static void soon(struct dq_sim *s, enum sim_timer timer, uint32_t index)
{
	dq_sim_events_after(&s->events, s->lane_host, s->host_ps, SIM_WHAT(timer), index);
}

/* The last packet of a segment, or an acknowledgement, is here. */
static void deliver(void *user, uint32_t packet)
{
	struct dq_sim *s = user;
	struct dq_sim_packet *p = dq_sim_packet_at(&s->fabric, packet);
	struct sim_segment *seg = dq_slab_at(&s->segments, p->owner[0]);
	struct sim_qp *q = &s->qps[seg->qp], *back = &s->qps[q->peer];
	struct sim_gpu *g;

	if (p->kind == SIM_PACKET_ACK) {
		seg->time_ns = sim_now_ns(s);
		soon(s, SIM_SEGMENT_DONE, p->owner[0]);
		dq_sim_packet_free(&s->fabric, packet);
		return;
	}
	soon(s, SIM_SEGMENT_IN, p->owner[0]);
	/* The same packet goes back as the acknowledgement. */
	p->kind = SIM_PACKET_ACK;
	p->flags = DQ_SIM_LAST;
	p->class = DQ_SIM_FIRST;
	p->bytes = s->config.ack_bytes;
	p->hop = 0;
	p->hops = back->hops;
	memcpy(p->route, back->route, sizeof p->route);
	p->next = DQ_NONE;
	g = &s->gpus[back->gpu];
	if (g->acks.tail == DQ_NONE)
		g->acks.head = packet;
	else
		dq_sim_packet_at(&s->fabric, g->acks.tail)->next = packet;
	g->acks.tail = packet;
	dq_sim_port_kick(&s->fabric, dq_sim_topology_nic(&s->topology, back->gpu));
}

const struct dq_sim_fabric_ops sim_fabric_ops = { .pull = pull, .deliver = deliver };

/* --- what the core asks for ---------------------------------------------------------------------------------------- */

static void op_post_segment(void *user, struct dq_vc *vc, const struct dq_segment *segment)
{
	struct sim_end *e = user;
	struct dq_sim *s = e->sim;
	uint32_t index = segment_new(s, e->first_qp + 1 + segment->qp, segment->bytes);
	struct sim_segment *seg = dq_slab_at(&s->segments, index);

	(void)vc;
	if (!seg)
		return;
	seg->id = segment->id;
	seg->imm = segment->imm;
	s->segments_posted++;
	qp_post(s, seg->qp, index);
}

static void *op_control_buffer(void *user, struct dq_vc *vc)
{
	struct sim_end *e = user;
	struct dq_sim *s = e->sim;
	uint32_t index;

	(void)vc;
	if (e->control_out == s->config.credits)
		return NULL;
	index = dq_slab_alloc(&s->controls);
	if (index == DQ_NONE) {
		sim_fail(s, -ENOMEM, "no memory for a control packet: %u are under way", s->controls.used);
		return NULL;
	}
	e->control_out++;
	/* Its index lies behind what the core may fill. */
	memcpy((uint8_t *)dq_slab_at(&s->controls, index) + DQ_CONTROL_BYTES, &index, sizeof index);
	return dq_slab_at(&s->controls, index);
}

static void op_post_control(void *user, struct dq_vc *vc, void *buffer, uint32_t bytes)
{
	struct sim_end *e = user;
	struct dq_sim *s = e->sim;
	uint32_t index = segment_new(s, e->first_qp, bytes);
	struct sim_segment *seg = dq_slab_at(&s->segments, index);

	(void)vc;
	if (!seg)
		return;
	seg->control = buffer;
	s->control_packets++;
	qp_post(s, seg->qp, index);
}

static void op_done(void *user, struct dq_vc *vc, const struct dq_done *d)
{
	struct sim_end *e = user;
	(void)vc;
	sim_on_done(e->sim, e, d);
}

static void op_mem_release(void *user, uint64_t mem)
{
	(void)user;
	(void)mem;
}

static void op_mem_key(void *user, struct dq_vc *vc, uint64_t mem, uint64_t offset, uint64_t bytes, uint64_t *addr, uint64_t *key)
{
	(void)user;
	(void)vc;
	(void)bytes;
	*addr = offset;
	*key = mem;
}

static void op_flow_incoming(void *user, struct dq_vc *vc, uint32_t flow, const struct dq_message *open)
{
	struct sim_end *e = user;
	(void)vc;
	sim_on_incoming(e->sim, e, flow, open);
}

static void op_flow_opened(void *user, struct dq_vc *vc, uint32_t flow, int32_t status)
{
	struct sim_end *e = user;
	(void)vc;
	sim_on_opened(e->sim, e, flow, status);
}

static void op_flow_gone(void *user, struct dq_vc *vc, uint32_t flow)
{
	(void)user;
	(void)vc;
	(void)flow;
}

static const struct dq_vc_ops vc_ops = {
	.post_segment = op_post_segment, .control_buffer = op_control_buffer, .post_control = op_post_control, .done = op_done,
	.mem_release = op_mem_release, .mem_key = op_mem_key, .flow_incoming = op_flow_incoming, .flow_opened = op_flow_opened,
	.flow_gone = op_flow_gone,
};

/* --- running VCs --------------------------------------------------------------------------------------------------- */

static void grants_due(struct dq_sim *s, uint32_t gpu, uint64_t ns)
{
	struct sim_gpu *g = &s->gpus[gpu];

	if (g->split_ns <= ns)
		return;
	g->split_ns = ns;
	dq_sim_events_at(&s->events, ns * DQ_SIM_PS_PER_NS, SIM_WHAT(SIM_GRANTS), gpu);
}

void sim_touch(struct dq_sim *s, struct sim_end *e)
{
	if (e->touched)
		return;
	e->touched = true;
	dq_sim_events_at(&s->events, s->events.now_ps, SIM_WHAT(SIM_RUN), e->index);
}

/* Turns of VCs that waited for the outbound budget. */
static void outbound(struct dq_sim *s, uint32_t gpu)
{
	struct sim_gpu *g = &s->gpus[gpu];
	struct dq_outbound_member *m;
	uint64_t due;

	while ((m = dq_outbound_next(&g->departure.outbound, sim_now_ns(s))))
		sim_touch(s, (struct sim_end *)((char *)m - offsetof(struct sim_end, vc.outbound)));
	due = dq_outbound_due(&g->departure.outbound, sim_now_ns(s));
	if (due < g->outbound_ns) {
		g->outbound_ns = due;
		dq_sim_events_at(&s->events, due * DQ_SIM_PS_PER_NS, SIM_WHAT(SIM_OUTBOUND), gpu);
	}
}

void sim_kick(struct dq_sim *s, struct sim_end *e)
{
	while (dq_vc_run(&e->vc, RUN_BUDGET, sim_now_ns(s)) && !s->failed)
		;
	outbound(s, e->gpu);
	if (e->vc.lost)
		sim_fail(s, -ENOMEM, "no memory for a control message of GPU %u", e->gpu);
	if (s->gpus[e->gpu].grants.dirty)
		grants_due(s, e->gpu, sim_now_ns(s) + DQ_MAX(s->config.host_ns, 1));
}

static void split(struct dq_sim *s, uint32_t gpu)
{
	struct sim_gpu *g = &s->gpus[gpu];
	uint64_t wake;

	if (g->split_ns > sim_now_ns(s))
		return; /* there was an earlier one since */
	g->split_ns = DQ_NEVER;
	wake = dq_grants_split(&g->grants, sim_now_ns(s));
	for (struct dq_grant_member *m = g->grants.head; m && !s->failed; m = m->next)
		if (m->changed)
			sim_kick(s, (struct sim_end *)((char *)m - offsetof(struct sim_end, vc.grant_out)));
	if (wake < DQ_NEVER / DQ_SIM_PS_PER_NS)
		grants_due(s, gpu, DQ_MAX(wake, sim_now_ns(s) + 1));
}

static void took(struct dq_sim *s, struct sim_end *e, int rc)
{
	if (rc)
		sim_fail(s, rc, "VC of GPUs %u and %u: %s", e->gpu, s->ends[e->peer]->gpu, e->vc.why);
	else
		sim_kick(s, e);
}

static void segment_in(struct dq_sim *s, uint32_t index)
{
	struct sim_segment *seg = dq_slab_at(&s->segments, index);
	struct sim_end *e = s->ends[s->ends[s->qps[seg->qp].end]->peer];

	if (seg->control) {
		int rc = dq_vc_control_in(&e->vc, seg->control, seg->bytes, sim_now_ns(s));

		dq_vc_control_posted(&e->vc);
		took(s, e, rc);
	} else {
		took(s, e, dq_vc_segment_in(&e->vc, seg->imm, seg->bytes, sim_now_ns(s)));
	}
}

static void segment_done(struct dq_sim *s, uint32_t index)
{
	struct sim_segment seg = *(struct sim_segment *)dq_slab_at(&s->segments, index);
	struct sim_end *e = s->ends[s->qps[seg.qp].end];

	dq_slab_free(&s->segments, index);
	if (seg.control) {
		uint32_t buffer;

		memcpy(&buffer, seg.control + DQ_CONTROL_BYTES, sizeof buffer);
		dq_slab_free(&s->controls, buffer);
		e->control_out--;
		sim_kick(s, e);
		return;
	}
	took(s, e, dq_vc_segment_done(&e->vc, seg.id, seg.time_ns, sim_now_ns(s)));
}

bool sim_host_event(struct dq_sim *s, uint32_t timer, uint32_t index)
{
	switch (timer) {
	case SIM_SEGMENT_IN:
		segment_in(s, index);
		return true;
	case SIM_SEGMENT_DONE:
		segment_done(s, index);
		return true;
	case SIM_RUN:
		s->ends[index]->touched = false;
		sim_kick(s, s->ends[index]);
		return true;
	case SIM_OUTBOUND:
		if (s->gpus[index].outbound_ns <= sim_now_ns(s)) { /* else there was an earlier one since */
			s->gpus[index].outbound_ns = DQ_NEVER;
			outbound(s, index);
		}
		return true;
	case SIM_GRANTS:
		split(s, index);
		return true;
	default:
		return false;
	}
}

/* --- making -------------------------------------------------------------------------------------------------------- */

int sim_hosts_init(struct dq_sim *s)
{
	uint32_t n = s->topology.gpus;

	s->events.now_ps = START_PS;
	s->host_ps = s->config.host_ns * DQ_SIM_PS_PER_NS;
	s->lane_host = dq_sim_events_lane(&s->events, s->host_ps);
	s->gpus = calloc(n, sizeof *s->gpus);
	if (!s->gpus || dq_slab_init(&s->segments, sizeof(struct sim_segment), 4096, 1u << 28) ||
	    dq_slab_init(&s->controls, DQ_CONTROL_BYTES + sizeof(uint32_t), 64, 1u << 24))
		return -ENOMEM;
	for (uint32_t i = 0; i < n; i++) {
		struct sim_gpu *g = &s->gpus[i];

		if (dq_pools_init(&g->pools, 2 * n + 2, 1u << 22))
			return -ENOMEM;
		dq_grants_init(&g->grants);
		dq_grants_device(&g->grants, s->config.region.nic_bps, 0);
		g->departure.rate_bps = s->config.region.nic_bps;
		dq_queue_init(&g->nvlink, s->config.nvlink_bps, 0);
		g->acks = (struct sim_ring){ DQ_NONE, DQ_NONE };
		g->qps[0] = g->qps[1] = (struct sim_ring){ DQ_NONE, DQ_NONE };
		g->split_ns = g->outbound_ns = DQ_NEVER;
	}
	return 0;
}

void sim_hosts_fini(struct dq_sim *s)
{
	for (uint32_t i = 0; i < s->end_count; i++) {
		dq_vc_fail(&s->ends[i]->vc, DQ_ERR_CANCELED, sim_now_ns(s));
		dq_vc_fini(&s->ends[i]->vc);
		free(s->ends[i]);
	}
	for (uint32_t i = 0; s->gpus && i < s->topology.gpus; i++)
		dq_pools_fini(&s->gpus[i].pools);
	free(s->ends);
	free(s->qps);
	free(s->gpus);
	dq_slab_fini(&s->segments);
	dq_slab_fini(&s->controls);
}

static bool room(void **array, uint32_t count, uint32_t more, uint32_t *have, size_t bytes)
{
	uint32_t want = *have;
	void *new;

	while (want < count + more)
		want = want ? want * 2 : 64;
	if (want == *have)
		return true;
	new = realloc(*array, (size_t)want * bytes);
	if (!new)
		return false;
	*array = new;
	*have = want;
	return true;
}

static uint32_t end_new(struct dq_sim *s, uint32_t gpu, uint32_t to, const struct dq_sim_profile *p)
{
	struct sim_gpu *g = &s->gpus[gpu];
	struct dq_vc_config config = { .id = s->end_count, .qps = p->qps, .depth = s->config.queue_depth, .credits = s->config.credits,
				       .segment_bytes = p->segment_bytes };
	struct dq_window_profile window = { .window_bytes = p->window_bytes, .floor_bytes = p->floor_bytes, .segment_bytes = p->segment_bytes,
					    .base_rtt_ns = p->rtt_ns, .rate_bps = p->rate_bps, .adapt = p->adapt };
	uint64_t label = mix(s->config.seed ^ mix((uint64_t)gpu << 32 | to));
	struct sim_end *e;

	if (!room((void **)&s->ends, s->end_count, 1, &s->end_room, sizeof *s->ends) ||
	    !room((void **)&s->qps, s->qp_count, p->qps + 1, &s->qp_room, sizeof *s->qps))
		return DQ_NONE;
	e = calloc(1, sizeof *e);
	if (!e)
		return DQ_NONE;
	if (dq_vc_init(&e->vc, &config, &window, p->outstanding, p->qps, s->config.grants, &g->pools, &g->departure, &g->grants, &vc_ops, e)) {
		free(e);
		return DQ_NONE;
	}
	e->sim = s;
	e->index = s->end_count;
	e->peer = e->index ^ 1;
	e->gpu = gpu;
	e->first_qp = s->qp_count;
	for (uint32_t i = 0; i <= p->qps; i++) {
		struct sim_qp *q = &s->qps[s->qp_count++];
		uint64_t plane = s->config.spread_labels ? label + i : mix(label + i);

		memset(q, 0, sizeof *q);
		q->end = e->index;
		q->gpu = gpu;
		q->head = q->tail = q->next = DQ_NONE;
		q->control = i == 0;
		q->hops = (uint8_t)dq_sim_topology_route(&s->topology, gpu, to, (uint32_t)(plane % s->config.region.planes), q->route);
	}
	s->ends[s->end_count] = e;
	return s->end_count++;
}

uint32_t sim_pair(struct dq_sim *s, uint32_t from, uint32_t to)
{
	const struct dq_sim_profile *p = &s->config.profiles[dq_sim_topology_class(&s->topology, from, to)];
	uint32_t a = end_new(s, from, to, p), b = a == DQ_NONE ? DQ_NONE : end_new(s, to, from, p);

	if (b == DQ_NONE)
		return DQ_NONE;
	for (uint32_t i = 0; i <= p->qps; i++) {
		s->qps[s->ends[a]->first_qp + i].peer = s->ends[b]->first_qp + i;
		s->qps[s->ends[b]->first_qp + i].peer = s->ends[a]->first_qp + i;
	}
	return a;
}
