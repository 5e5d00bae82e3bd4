/* SPDX-License-Identifier: Apache-2.0 */
/* A simulated job: its messages, what they wait for, and what is measured. */
#include "sim/sim.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "sim/private.h"

#define MAX_MESSAGES (1u << 26)
#define MAX_SAMPLES 512u         /* then every second one is dropped, and the interval doubled */
#define CLIENT 0u                /* one process a GPU */

void sim_fail(struct dq_sim *s, int rc, const char *fmt, ...)
{
	va_list ap;

	if (s->failed)
		return;
	s->failed = rc;
	va_start(ap, fmt);
	vsnprintf(s->why, sizeof s->why, fmt, ap);
	va_end(ap);
}

static int refuse(struct dq_sim_text *err, int rc, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static int refuse(struct dq_sim_text *err, int rc, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(err->text, sizeof err->text, fmt, ap);
	va_end(ap);
	return rc;
}

static uint64_t job_ns(const struct dq_sim *s)
{
	return (s->events.now_ps - s->begin_ps) / DQ_SIM_PS_PER_NS;
}

/* --- making -------------------------------------------------------------------------------------------------------- */

static int check(const struct dq_sim_config *c, struct dq_sim_text *err)
{
	static const char *const classes[] = { "host", "rack", "zone", "building", "region" };

	if (c->mtu_bytes < 256 || c->mtu_bytes > 65536)
		return refuse(err, -EINVAL, "the MTU is %u bytes: expected 256 to 65536", c->mtu_bytes);
	if (c->header_bytes > 4096 || c->ack_bytes == 0 || c->ack_bytes > 4096)
		return refuse(err, -EINVAL, "headers of %u bytes and acknowledgements of %u: expected 4096 at most, and at least 1 for the latter",
			      c->header_bytes, c->ack_bytes);
	if (c->cell_packets == 0 || c->cell_packets > 256)
		return refuse(err, -EINVAL, "a cell has %u packets: expected 1 to 256", c->cell_packets);
	if (c->nvlink_bps < 1000000)
		return refuse(err, -EINVAL, "NVLink has %llu bit/s: expected at least 1 Mbit/s", (unsigned long long)c->nvlink_bps);
	if (c->receives_ahead == 0 || c->receives_ahead > 4096)
		return refuse(err, -EINVAL, "%u receives are posted ahead: expected 1 to 4096", c->receives_ahead);
	if (c->queue_depth == 0 || c->queue_depth > DQ_MAX_SEGMENTS)
		return refuse(err, -EINVAL, "the queue depth is %u: expected 1 to %u", c->queue_depth, DQ_MAX_SEGMENTS);
	if (c->credits < 4 || c->credits > 4096)
		return refuse(err, -EINVAL, "%u control credits: expected 4 to 4096", c->credits);
	if (c->host_ns > 1000000000 || c->nvlink_ns > 1000000000)
		return refuse(err, -EINVAL, "delays of a host are at most 1 s");
	if (!(c->alpha >= 0 && c->alpha <= 1024))
		return refuse(err, -EINVAL, "alpha of the dynamic threshold is %g: expected 0 to 1024", c->alpha);
	if (c->ecn_min_bytes && (c->ecn_max_bytes < c->ecn_min_bytes || !(c->ecn_probability >= 0 && c->ecn_probability <= 1)))
		return refuse(err, -EINVAL, "ECN marks from %llu to %llu bytes with probability %g: expected a range, and 0 to 1",
			      (unsigned long long)c->ecn_min_bytes, (unsigned long long)c->ecn_max_bytes, c->ecn_probability);
	for (unsigned i = DQ_SIM_RACK; i < DQ_SIM_PATH_CLASSES; i++) {
		const struct dq_sim_profile *p = &c->profiles[i];

		if (p->qps == 0 || p->qps > DQ_MAX_QPS || p->outstanding == 0 || p->segment_bytes < DQ_MIN_SEGMENT_BYTES ||
		    p->segment_bytes > DQ_MAX_SEGMENT_BYTES || p->segment_bytes % DQ_ALIGN_BYTES)
			return refuse(err, -EINVAL, "profile of class %s: %u QPs, %u outstanding, segments of %u bytes: expected 1 to %u QPs, at least 1 "
				      "outstanding, segments of %u to %u bytes, a multiple of %u", classes[i], p->qps, p->outstanding, p->segment_bytes,
				      DQ_MAX_QPS, DQ_MIN_SEGMENT_BYTES, DQ_MAX_SEGMENT_BYTES, DQ_ALIGN_BYTES);
	}
	return 0;
}

int dq_sim_create(const struct dq_sim_config *config, dq_sim **out, struct dq_sim_text *err)
{
	struct dq_sim_fabric_config fabric = {
		.full_bytes = config->cell_packets * (config->mtu_bytes + config->header_bytes), .small_bytes = config->ack_bytes,
		.buffer_bytes = config->buffer_bytes, .alpha = config->alpha, .ecn_min_bytes = config->ecn_min_bytes,
		.ecn_max_bytes = config->ecn_max_bytes, .ecn_probability = config->ecn_probability, .priority = config->priority,
		.seed = config->seed };
	struct dq_error error = { 0 };
	struct dq_sim *s;
	int rc = check(config, err);

	*out = NULL;
	if (rc)
		return rc;
	s = calloc(1, sizeof *s);
	if (!s)
		return refuse(err, -ENOMEM, "no memory for a simulation");
	s->config = *config;
	s->payload = config->cell_packets * config->mtu_bytes;
	dq_sim_events_init(&s->events);
	rc = dq_sim_fabric_init(&s->fabric, &s->events, &fabric, &sim_fabric_ops, s);
	rc = rc ? rc : dq_sim_topology_build(&s->topology, &config->region, &s->fabric, &error);
	if (rc) {
		refuse(err, rc, "%s", error.text);
	} else {
		rc = sim_hosts_init(s);
		if (rc)
			refuse(err, rc, "no memory for %u GPUs", s->topology.gpus);
	}
	if (rc) {
		dq_sim_destroy(s);
		return rc;
	}
	*out = s;
	return 0;
}

void dq_sim_destroy(dq_sim *s)
{
	if (!s)
		return;
	s->state = SIM_OVER; /* what the core tells from here on is of no interest */
	sim_hosts_fini(s);
	dq_map_fini(&s->pairs);
	free(s->flows);
	free(s->messages);
	free(s->series);
	dq_sim_fabric_fini(&s->fabric);
	dq_sim_events_fini(&s->events);
	free(s);
}

/* The flow of a pair, made when there is none; DQ_NONE: no memory. */
static uint32_t flow_of(struct dq_sim *s, uint32_t from, uint32_t to)
{
	uint64_t key = (uint64_t)from << 32 | to;
	uint32_t index = dq_map_get(&s->pairs, key), back, end;

	if (index != DQ_NONE)
		return index;
	if (s->flow_count == s->flow_room) {
		uint32_t room = s->flow_room ? s->flow_room * 2 : 64;
		struct sim_flow *flows = realloc(s->flows, room * sizeof *flows);

		if (!flows)
			return DQ_NONE;
		s->flows = flows;
		s->flow_room = room;
	}
	back = dq_map_get(&s->pairs, (uint64_t)to << 32 | from);
	end = back == DQ_NONE ? sim_pair(s, from, to) : s->flows[back].peer;
	if (end == DQ_NONE || dq_map_set(&s->pairs, key, s->flow_count))
		return DQ_NONE;
	s->flows[s->flow_count] = (struct sim_flow){ .from = from, .to = to, .end = end, .peer = s->ends[end]->peer, .id = DQ_NONE,
						     .peer_id = DQ_NONE, .head = DQ_NONE, .tail = DQ_NONE, .receive = DQ_NONE };
	return s->flow_count++;
}

int dq_sim_add(dq_sim *s, const struct dq_sim_message *messages, uint32_t count, struct dq_sim_text *err)
{
	if (s->state != SIM_ADDING)
		return refuse(err, -EBUSY, "the job has begun: messages must be added before");
	if (count > MAX_MESSAGES - s->message_count)
		return refuse(err, -EINVAL, "more than %u messages", MAX_MESSAGES);
	if (s->message_count + count > s->message_room) {
		uint32_t room = DQ_MAX(s->message_count + count, s->message_room * 2);
		struct sim_message *all = realloc(s->messages, room * sizeof *all);

		if (!all)
			return refuse(err, -ENOMEM, "no memory for %u messages", s->message_count + count);
		s->messages = all;
		s->message_room = room;
	}
	for (uint32_t i = 0; i < count; i++) {
		uint32_t index = s->message_count;
		struct sim_message *m = &s->messages[index];
		const struct dq_sim_message *in = &messages[i];

		if (in->from >= s->topology.gpus || in->to >= s->topology.gpus || in->from == in->to)
			return refuse(err, -EINVAL, "message %u goes from GPU %u to %u: expected two different ones of %u", index, in->from, in->to,
				      s->topology.gpus);
		if (in->after != DQ_NONE && (in->after >= index || s->messages[in->after].m.to != in->from))
			return refuse(err, -EINVAL, "message %u from GPU %u waits for message %u: expected an earlier one to that GPU", index, in->from,
				      in->after);
		if (in->bytes > 1ull << 40 || in->start_ns > 1000000000000ull)
			return refuse(err, -EINVAL, "message %u has %llu bytes and starts at %llu ns: expected at most 1 TiB, and 1000 s", index,
				      (unsigned long long)in->bytes, (unsigned long long)in->start_ns);
		*m = (struct sim_message){ .m = *in, .times = { UINT64_MAX, UINT64_MAX }, .flow = DQ_NONE, .next = DQ_NONE, .dependents = DQ_NONE,
					   .next_dependent = DQ_NONE };
		if (dq_sim_topology_class(&s->topology, in->from, in->to) != DQ_SIM_HOST) {
			uint32_t flow = flow_of(s, in->from, in->to);
			struct sim_flow *f = &s->flows[flow];
			uint64_t most = (uint64_t)s->config.profiles[dq_sim_topology_class(&s->topology, in->from, in->to)].segment_bytes *
					DQ_MAX_SEGMENTS;

			if (flow == DQ_NONE)
				return refuse(err, -ENOMEM, "no memory for the flow from GPU %u to %u: there are %u", in->from, in->to, s->flow_count);
			if (in->bytes > most)
				return refuse(err, -EINVAL, "message %u has %llu bytes: with these segments %llu at most", index,
					      (unsigned long long)in->bytes, (unsigned long long)most);
			m->flow = flow;
			if (f->tail == DQ_NONE)
				f->head = f->receive = index;
			else
				s->messages[f->tail].next = index;
			f->tail = index;
		}
		if (in->after != DQ_NONE) {
			m->next_dependent = s->messages[in->after].dependents;
			s->messages[in->after].dependents = index;
		}
		s->message_count++;
	}
	return 0;
}

/* --- messages ------------------------------------------------------------------------------------------------------ */

static void received(struct dq_sim *s, uint32_t index);

static void post(struct dq_sim *s, uint32_t index)
{
	struct sim_message *m = &s->messages[index];
	struct sim_flow *f;
	struct sim_end *e;
	int rc;

	m->times.posted_ns = job_ns(s);
	if (m->flow == DQ_NONE) {
		uint64_t done = dq_queue_push(&s->gpus[m->m.from].nvlink, sim_now_ns(s), m->m.bytes) + s->config.nvlink_ns;

		dq_sim_events_at(&s->events, done * DQ_SIM_PS_PER_NS, SIM_WHAT(SIM_NVLINK), index);
		return;
	}
	f = &s->flows[m->flow];
	e = s->ends[f->end];
	rc = dq_vc_send(&e->vc, &(struct dq_operation){ .flow = f->id, .request = index, .mem = 1, .bytes = m->m.bytes, .tag = index }, sim_now_ns(s));
	if (rc)
		sim_fail(s, -EPROTO, "message %u was refused by the sender's VC: status %d", index, rc);
	else
		sim_touch(s, e); /* a library posts what it sends at once: no VC goes before it is all there */
}

/* It may go as far as others are concerned: at its time. */
static void ready(struct dq_sim *s, uint32_t index)
{
	uint64_t start_ps = s->begin_ps + s->messages[index].m.start_ns * DQ_SIM_PS_PER_NS;

	if (start_ps > s->events.now_ps)
		dq_sim_events_at(&s->events, start_ps, SIM_WHAT(SIM_START), index);
	else
		post(s, index);
}

static void post_receives(struct dq_sim *s, struct sim_flow *f)
{
	struct sim_end *e = s->ends[f->peer];

	while (f->receive != DQ_NONE && f->receives < s->config.receives_ahead) {
		const struct sim_message *m = &s->messages[f->receive];
		int rc = dq_vc_recv(&e->vc, &(struct dq_operation){ .flow = f->peer_id, .request = f->receive, .mem = 1, .bytes = m->m.bytes,
								    .tag = f->receive }, sim_now_ns(s));

		if (rc) {
			sim_fail(s, -EPROTO, "message %u was refused by the receiver's VC: status %d", f->receive, rc);
			return;
		}
		f->receives++;
		f->receive = m->next;
	}
}

static void received(struct dq_sim *s, uint32_t index)
{
	struct sim_message *m = &s->messages[index];

	m->times.received_ns = job_ns(s);
	s->received++;
	s->bytes += m->m.bytes;
	s->done_ps = s->events.now_ps;
	for (uint32_t d = m->dependents; d != DQ_NONE; d = s->messages[d].next_dependent)
		ready(s, d);
}

void sim_on_done(struct dq_sim *s, struct sim_end *e, const struct dq_done *d)
{
	if (s->state == SIM_OVER)
		return;
	if (d->status != DQ_OK) {
		sim_fail(s, -EPROTO, "message %llu ended with status %d at GPU %u", (unsigned long long)d->request, d->status, e->gpu);
		return;
	}
	if (d->kind != DQ_DONE_RECV) {
		s->sends_done++;
		return;
	}
	s->fabric_bytes += d->bytes;
	s->flows[s->messages[d->request].flow].receives--;
	/* Callbacks must not call into the VC: what follows from this happens right after. */
	dq_sim_events_at(&s->events, s->events.now_ps, SIM_WHAT(SIM_RECEIVED), (uint32_t)d->request);
}

/* --- beginning ----------------------------------------------------------------------------------------------------- */

void sim_on_incoming(struct dq_sim *s, struct sim_end *e, uint32_t flow, const struct dq_message *open)
{
	if (s->state == SIM_OVER)
		return;
	s->flows[open->nonce[0]].peer_id = flow;
	if (dq_vc_flow_accept(&e->vc, flow, CLIENT))
		sim_fail(s, -ENOMEM, "no memory for a flow at GPU %u", e->gpu);
}

void sim_on_opened(struct dq_sim *s, struct sim_end *e, uint32_t flow, int32_t status)
{
	(void)flow;
	if (s->state == SIM_OVER)
		return;
	if (status)
		sim_fail(s, -EPROTO, "a flow of GPU %u was refused: status %d", e->gpu, status);
	s->flows_open++;
}

static void open_flows(struct dq_sim *s)
{
	s->state = SIM_OPENING;
	for (uint32_t i = 0; i < s->flow_count && !s->failed; i++) {
		struct sim_flow *f = &s->flows[i];
		struct dq_message open = { .client = CLIENT, .listener = 0, .nonce = { i, 0 } };

		if (dq_vc_flow_open(&s->ends[f->end]->vc, CLIENT, &open, &f->id))
			sim_fail(s, -ENOMEM, "no memory for flow %u", i);
	}
	for (uint32_t i = 0; i < s->end_count && !s->failed; i++)
		sim_kick(s, s->ends[i]);
}

static void sample(struct dq_sim *s)
{
	uint32_t columns = 2 + s->fabric.switch_count;
	uint64_t *row;

	if (s->samples == MAX_SAMPLES) {
		s->samples /= 2;
		for (uint32_t i = 1; i < s->samples; i++)
			memcpy(s->series + (size_t)i * columns, s->series + (size_t)2 * i * columns, columns * sizeof *row);
		s->sample_ps *= 2;
	}
	row = s->series + (size_t)s->samples++ * columns;
	row[0] = job_ns(s);
	row[1] = s->fabric.bytes;
	for (uint32_t i = 0; i < s->fabric.switch_count; i++)
		row[2 + i] = s->fabric.switches[i].bytes;
	if (s->received < s->message_count)
		dq_sim_events_at(&s->events, s->events.now_ps + s->sample_ps, SIM_WHAT(SIM_SAMPLE), 0);
}

/* All flows are open and nothing is under way: time 0 of the job. */
static void begin(struct dq_sim *s)
{
	s->state = SIM_RUNNING;
	s->begin_ps = s->done_ps = s->events.now_ps;
	s->begin_hops = s->fabric.hops;
	s->begin_events = s->events.handled;
	s->segments_posted = s->control_packets = 0;
	dq_sim_fabric_reset(&s->fabric);
	if (s->config.sample_ns) {
		s->sample_ps = s->config.sample_ns * DQ_SIM_PS_PER_NS;
		s->series = calloc((size_t)MAX_SAMPLES * (2 + s->fabric.switch_count), sizeof *s->series);
		if (!s->series) {
			sim_fail(s, -ENOMEM, "no memory for %u samples", MAX_SAMPLES);
			return;
		}
		sample(s);
	}
	for (uint32_t i = 0; i < s->flow_count && !s->failed; i++)
		post_receives(s, &s->flows[i]);
	for (uint32_t i = 0; i < s->end_count && !s->failed; i++)
		sim_kick(s, s->ends[i]);
	for (uint32_t i = 0; i < s->message_count && !s->failed; i++)
		if (s->messages[i].m.after == DQ_NONE)
			ready(s, i);
}

/* --- running ------------------------------------------------------------------------------------------------------- */

static void event(struct dq_sim *s, const struct dq_sim_event *e)
{
	uint32_t timer = DQ_SIM_NUMBER(e->what);

	if (DQ_LIKELY(dq_sim_fabric_event(&s->fabric, e)) || sim_host_event(s, timer, e->arg))
		return;
	switch (timer) {
	case SIM_START:
		post(s, e->arg);
		break;
	case SIM_NVLINK:
		received(s, e->arg);
		break;
	case SIM_RECEIVED: {
		struct sim_flow *f = &s->flows[s->messages[e->arg].flow];

		post_receives(s, f);
		sim_kick(s, s->ends[f->peer]);
		received(s, e->arg);
		break;
	}
	case SIM_SAMPLE:
		sample(s);
		break;
	}
}

int dq_sim_run(dq_sim *s, uint64_t events, struct dq_sim_text *err)
{
	struct dq_sim_event e;

	if (s->state == SIM_ADDING)
		open_flows(s);
	while (!s->failed && events) {
		if (s->events.lost) {
			sim_fail(s, -ENOMEM, "no memory for an event");
			break;
		}
		if (DQ_LIKELY(dq_sim_events_pop(&s->events, DQ_NEVER - 1, &e))) {
			/* Grants that nobody uses any more go on ageing: not of interest. */
			if (DQ_UNLIKELY(s->received == s->message_count && s->state == SIM_RUNNING && s->segments.used == 0))
				return 0;
			event(s, &e);
			events--;
			if (s->state == SIM_OPENING && s->flows_open == s->flow_count && s->segments.used == 0)
				begin(s);
		} else if (s->state == SIM_OPENING && s->flows_open == s->flow_count) {
			begin(s);
		} else if (s->state == SIM_RUNNING && s->received == s->message_count) {
			return 0;
		} else {
			sim_fail(s, -EPROTO, "nothing is under way, but %u of %u messages did not come in", s->message_count - s->received,
				 s->message_count);
		}
	}
	return s->failed ? refuse(err, s->failed, "%s", s->why) : 1;
}

/* --- results ------------------------------------------------------------------------------------------------------- */

void dq_sim_get_totals(const dq_sim *s, struct dq_sim_totals *out)
{
	*out = (struct dq_sim_totals){
		.now_ns = job_ns(s), .done_ns = (s->done_ps - s->begin_ps) / DQ_SIM_PS_PER_NS, .messages = s->message_count,
		.received = s->received, .bytes = s->bytes, .fabric_bytes = s->fabric_bytes, .peak_bytes = s->fabric.peak_bytes,
		.packet_hops = s->fabric.hops - s->begin_hops, .events = s->events.handled - s->begin_events, .segments = s->segments_posted,
		.control_packets = s->control_packets, .switches = s->fabric.switch_count, .ports = s->fabric.port_count, .vcs = s->end_count / 2,
		.samples = s->samples };
	for (uint32_t i = 0; i < s->end_count; i++) {
		const struct dq_vc *vc = &s->ends[i]->vc;

		out->shrinks += vc->window.shrinks;
		out->window_ns += vc->counters.throttled_ns[DQ_THROTTLE_WINDOW];
		out->grant_ns += vc->counters.throttled_ns[DQ_THROTTLE_GRANT];
		out->depth_ns += vc->counters.throttled_ns[DQ_THROTTLE_QP];
		out->outbound_ns += vc->counters.throttled_ns[DQ_THROTTLE_OUTBOUND];
	}
}

void dq_sim_get_times(const dq_sim *s, struct dq_sim_message_times *out)
{
	for (uint32_t i = 0; i < s->message_count; i++)
		out[i] = s->messages[i].times;
}

static double mean(const struct dq_sim *s, double byte_ps)
{
	uint64_t ps = s->done_ps - s->begin_ps;

	return ps ? byte_ps / (double)ps : 0;
}

void dq_sim_get_switches(const dq_sim *s, struct dq_sim_switch_stats *out)
{
	for (uint32_t i = 0; i < s->fabric.switch_count; i++) {
		const struct dq_sim_switch *w = &s->fabric.switches[i];

		out[i] = (struct dq_sim_switch_stats){ .tier = w->tier, .peak_bytes = w->peak_bytes, .mean_bytes = mean(s, w->byte_ps),
						       .over_bytes = w->over_bytes, .pauses = w->pauses_sent };
	}
}

void dq_sim_get_ports(const dq_sim *s, struct dq_sim_port_stats *out)
{
	for (uint32_t i = 0; i < s->fabric.port_count; i++) {
		const struct dq_sim_port *p = &s->fabric.ports[i];

		out[i] = (struct dq_sim_port_stats){ .sw = p->sw, .peak_bytes = p->peak_bytes, .sent_bytes = p->sent_bytes,
						     .sent_packets = p->sent_packets, .marks = p->marks, .pauses = p->pauses,
						     .paused_ns = dq_sim_port_paused(&s->fabric, i) / DQ_SIM_PS_PER_NS, .mean_bytes = mean(s, p->byte_ps) };
	}
}

void dq_sim_get_found(const dq_sim *s, uint32_t tier, uint64_t counts[256], uint64_t bounds[256])
{
	_Static_assert(DQ_SIM_HISTOGRAM == 256, "bins of the interface");
	for (uint32_t b = 0; b < DQ_SIM_HISTOGRAM; b++) {
		counts[b] = 0;
		bounds[b] = dq_sim_bin_bytes(b);
	}
	for (uint32_t i = 0; i < s->fabric.switch_count; i++)
		for (uint32_t b = 0; s->fabric.switches[i].tier == tier && b < DQ_SIM_HISTOGRAM; b++)
			counts[b] += s->fabric.switches[i].found[b];
}

void dq_sim_get_series(const dq_sim *s, uint64_t *ns, uint64_t *bytes, uint64_t *of_switch)
{
	uint32_t n = s->fabric.switch_count;

	for (uint32_t i = 0; i < s->samples; i++) {
		const uint64_t *row = s->series + (size_t)i * (2 + n);

		ns[i] = row[0];
		bytes[i] = row[1];
		if (of_switch)
			memcpy(of_switch + (size_t)i * n, row + 2, n * sizeof *row);
	}
}
