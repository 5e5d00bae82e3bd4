/* SPDX-License-Identifier: Apache-2.0 */
/* A VC's life, the posting of segments, and the control messages' way to those who handle them. */
#include "core/vc.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/vc_private.h"

/* What peers can make us keep is bounded by a VC (slots, DQ_VC_MAX_IMPORTS); this is the room of all VCs of a thread. */
#define MAX_OBJECTS (1u << 22)

int dq_pools_init(struct dq_pools *p, uint32_t max_flows, uint32_t max_messages)
{
	int rc;
	memset(p, 0, sizeof *p);
	rc = dq_slab_init(&p->flows, sizeof(struct dq_flow), 256, max_flows);
	p->max_messages = max_messages;
	rc = rc ? rc : dq_slab_init(&p->messages, sizeof(struct dq_msg), 256, DQ_MIN(max_messages, MAX_OBJECTS) + MAX_OBJECTS);
	rc = rc ? rc : dq_slab_init(&p->rtrs, sizeof(struct dq_rtr), 256, MAX_OBJECTS);
	rc = rc ? rc : dq_slab_init(&p->regions, sizeof(struct dq_region), 64, MAX_OBJECTS);
	if (rc)
		dq_pools_fini(p);
	return rc;
}

void dq_pools_fini(struct dq_pools *p)
{
	dq_slab_fini(&p->flows);
	dq_slab_fini(&p->messages);
	dq_slab_fini(&p->rtrs);
	dq_slab_fini(&p->regions);
}

int dq_vc_broken(struct dq_vc *vc, const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(vc->why, sizeof vc->why, fmt, ap);
	va_end(ap);
	return -EPROTO;
}

bool dq_vc_tell(struct dq_vc *vc, const struct dq_message *m, uint64_t *number)
{
	uint64_t n = dq_control_queue(&vc->control, m);
	if (number)
		*number = n;
	if (!n)
		vc->lost = true;
	return n != 0;
}

void dq_vc_owes(struct dq_vc *vc, uint64_t now_ns)
{
	if (vc->awaiting++ == 0) {
		vc->checked_ns = now_ns;
		vc->waited_ns = 0;
	}
}

void dq_vc_answered(struct dq_vc *vc, uint64_t now_ns)
{
	if (vc->awaiting)
		vc->awaiting--;
	vc->checked_ns = now_ns;
	vc->waited_ns = 0;
}

/* --- life ------------------------------------------------------------------------------------------------------ */

static void tell_grant(struct dq_vc *vc)
{
	uint64_t level = vc->grants_on ? vc->grant_out.level_bytes : UINT64_MAX;
	if (!vc->grants_on)
		vc->grant_out.serial++;
	vc->grant_out.changed = false;
	dq_vc_tell(vc, &(struct dq_message){ .type = DQ_MSG_GRANT, .grant = level, .grant_serial = vc->grant_out.serial }, NULL);
}

int dq_vc_init(struct dq_vc *vc, const struct dq_vc_config *config, const struct dq_window_profile *profile,
	       uint32_t outstanding_per_qp, uint32_t active_qps, bool grants, struct dq_pools *pools,
	       struct dq_departure *departure, struct dq_grants *device_grants, const struct dq_vc_ops *ops, void *user)
{
	int rc;
	memset(vc, 0, sizeof *vc);
	if (config->qps == 0 || config->qps > DQ_MAX_QPS || config->depth == 0 || config->depth > DQ_MAX_SEGMENTS ||
	    config->segment_bytes < DQ_MIN_SEGMENT_BYTES || config->segment_bytes > DQ_MAX_SEGMENT_BYTES ||
	    profile->segment_bytes < DQ_MIN_SEGMENT_BYTES)
		return -EINVAL;
	vc->config = *config;
	vc->ops = ops;
	vc->user = user;
	vc->pools = pools;
	vc->departure = departure;
	vc->grants = device_grants;
	vc->flow_list = (struct dq_list){ DQ_NONE, DQ_NONE };
	vc->exporting_head = vc->exporting_tail = DQ_NONE;
	vc->throttle_reason = -1;
	vc->grant_in = UINT64_MAX;
	rc = dq_control_init(&vc->control, config->credits);
	rc = rc ? rc : dq_tracker_init(&vc->tracker);
	rc = rc ? rc : dq_slab_init(&vc->segs, sizeof(struct dq_vc_seg), 64, config->qps * config->depth);
	if (rc) {
		dq_vc_fini(vc);
		return rc;
	}
	dq_sched_init(&vc->sched, profile->segment_bytes);
	dq_qps_init(&vc->qps, config->qps, config->depth);
	dq_window_init(&vc->window, profile);
	vc->grants_on = grants;
	if (grants)
		dq_grants_add(vc->grants, &vc->grant_out, profile->window_bytes, profile->segment_bytes, profile->base_rtt_ns);
	tell_grant(vc); /* the first thing the peer hears: it precedes any RTR, so any segment */
	dq_vc_profile(vc, profile, outstanding_per_qp, active_qps, grants);
	return 0;
}

void dq_vc_profile(struct dq_vc *vc, const struct dq_window_profile *profile, uint32_t outstanding_per_qp, uint32_t active_qps, bool grants)
{
	struct dq_window_profile p = *profile;
	p.segment_bytes = DQ_MIN(p.segment_bytes, vc->config.segment_bytes);
	p.segment_bytes = DQ_MAX(p.segment_bytes & ~(DQ_ALIGN_BYTES - 1), DQ_ALIGN_BYTES);
	if (p.adapt && p.base_rtt_ns) {
		/* What many VCs share, the outbound budget sees and bounds. The window is left with what is this path's alone. */
		uint64_t threshold = dq_window_threshold(&p, p.base_rtt_ns);
		double target = (double)p.rate_bps * (double)threshold / 8e9;

		dq_outbound_join(&vc->departure->outbound, &vc->outbound, p.window_bytes,
				 p.rate_bps ? (uint64_t)DQ_MIN(target, 1e15) : p.window_bytes, p.base_rtt_ns, p.noise_ns);
		if (vc->backlog || vc->window.inflight)
			dq_outbound_active(&vc->departure->outbound, &vc->outbound, true);
		p.noise_ns = DQ_MAX(p.noise_ns, p.base_rtt_ns);
	} else {
		dq_outbound_leave(&vc->departure->outbound, &vc->outbound);
	}
	dq_window_set_profile(&vc->window, &p);
	dq_sched_set_quantum(&vc->sched, p.segment_bytes);
	vc->qps.limit = DQ_MAX(1u, DQ_MIN(outstanding_per_qp, vc->config.depth));
	vc->qps.active = DQ_MAX(1u, DQ_MIN(active_qps, vc->config.qps));
	if (grants && !vc->grants_on) {
		uint32_t serial = vc->grant_out.serial;
		dq_grants_add(vc->grants, &vc->grant_out, p.window_bytes, p.segment_bytes, p.base_rtt_ns);
		vc->grant_out.serial += serial; /* the newest wins at the peer: never go back */
	} else if (grants)
		dq_grants_profile(vc->grants, &vc->grant_out, p.window_bytes, p.segment_bytes, p.base_rtt_ns);
	else if (vc->grants_on)
		dq_grants_remove(vc->grants, &vc->grant_out);
	if (grants != vc->grants_on) {
		vc->grants_on = grants;
		tell_grant(vc);
	}
}

void dq_vc_fail(struct dq_vc *vc, int32_t status, uint64_t now_ns)
{
	if (vc->failed)
		return;
	vc->failed = status;
	dq_outbound_leave(&vc->departure->outbound, &vc->outbound);
	while (vc->flow_list.head != DQ_NONE)
		dq_flow_fail(vc, vc->flow_list.head, status, now_ns);
	if (vc->grants_on)
		dq_grants_remove(vc->grants, &vc->grant_out);
	vc->grants_on = false;
}

void dq_vc_fini(struct dq_vc *vc)
{
	dq_control_fini(&vc->control);
	dq_tracker_fini(&vc->tracker);
	dq_slab_fini(&vc->segs);
	dq_map_fini(&vc->incoming);
	for (int i = 0; i < 256; i++) {
		free(vc->incoming_pages[i]);
		free(vc->outgoing_pages[i]);
	}
	free(vc->slots[0].free_ids);
	free(vc->slots[1].free_ids);
	memset(vc, 0, sizeof *vc);
}

/* --- what came from the provider -------------------------------------------------------------------------------- */

int dq_vc_segment_done(struct dq_vc *vc, uint32_t id, uint64_t completion_ns, uint64_t now_ns)
{
	struct dq_vc_seg *s = dq_slab_at(&vc->segs, id);
	uint32_t index;
	if (vc->failed)
		return 0;
	if (!s)
		return dq_vc_broken(vc, "completion of segment %u, which is not outstanding", id);
	index = s->msg;
	dq_qps_done(&vc->qps, s->qp, s->bytes);
	dq_window_done(&vc->window, s->bytes, s->departure_ns, completion_ns, s->bytes > 0);
	if (vc->window.delay_ns > vc->counters.delay_max_ns && vc->window.delay_ns != DQ_NEVER)
		vc->counters.delay_max_ns = vc->window.delay_ns;
	dq_outbound_done(&vc->departure->outbound, &vc->outbound, s->bytes, s->departure_ns, s->wait_ns, completion_ns, vc->window.base_ns,
			 s->bytes > 0);
	dq_slab_free(&vc->segs, id);
	vc->last_progress_ns = now_ns; /* says that the peer's device lives, not that its daemon does */
	vc->stalled = false;
	dq_msg_at(vc, index)->seg_done++;
	dq_msg_settle(vc, index, now_ns);
	return 0;
}

struct handling {
	struct dq_vc *vc;
	uint64_t now_ns;
};

static int handle(void *user, const struct dq_message *m)
{
	struct handling *h = user;
	struct dq_vc *vc = h->vc;
	switch (m->type) {
	case DQ_MSG_FLOW_OPEN: return dq_flow_on_open(vc, m);
	case DQ_MSG_FLOW_ACCEPT: return dq_flow_on_accept(vc, m, h->now_ns);
	case DQ_MSG_FLOW_CLOSE: return dq_flow_on_close(vc, m, h->now_ns);
	case DQ_MSG_RTR:
		if (m->grant && (int32_t)(m->grant_serial - vc->grant_in_serial) > 0) {
			vc->grant_in = m->grant;
			vc->grant_in_serial = m->grant_serial;
		}
		return dq_msg_on_rtr(vc, m);
	case DQ_MSG_EXPORT: return dq_msg_on_export(vc, m);
	case DQ_MSG_UNEXPORT: return dq_msg_on_unexport(vc, m, h->now_ns);
	case DQ_MSG_PUT: return dq_msg_on_put(vc, m, h->now_ns);
	case DQ_MSG_DONE: return dq_msg_on_done(vc, m, h->now_ns);
	case DQ_MSG_CANCEL: return dq_msg_on_cancel(vc, m, h->now_ns);
	case DQ_MSG_GRANT:
		if ((int32_t)(m->grant_serial - vc->grant_in_serial) > 0) { /* the newest wins */
			vc->grant_in = m->grant;
			vc->grant_in_serial = m->grant_serial;
		}
		return 0;
	case DQ_MSG_BACKLOG:
		if (vc->grants_on)
			dq_grants_backlog(vc->grants, &vc->grant_out, m->backlog);
		return 0;
	case DQ_MSG_ERROR:
		return dq_vc_broken(vc, "peer gave up: %s", m->text);
	default:
		return dq_vc_broken(vc, "control message of type %u, which version %u does not know", m->type, DQ_WIRE_VERSION);
	}
}

int dq_vc_control_in(struct dq_vc *vc, const void *packet, size_t bytes, uint64_t now_ns)
{
	struct handling h = { vc, now_ns };
	int rc;
	if (vc->failed)
		return 0;
	vc->last_heard_ns = now_ns;
	vc->counters.control_rx++;
	rc = dq_control_unpack(&vc->control, packet, bytes, handle, &h);
	if (rc && !vc->why[0])
		dq_vc_broken(vc, "control packet of %zu bytes is malformed (%s)", bytes,
			     rc == -EPROTONOSUPPORT ? "unknown version" : rc == -ENOMEM ? "no memory for it" : "lengths, numbers or credits");
	dq_region_exported(vc);
	return rc;
}

/* --- posting ---------------------------------------------------------------------------------------------------- */

static void post(struct dq_vc *vc, struct dq_flow *f, uint32_t index, uint32_t id, uint32_t qp, uint32_t bytes, uint64_t now_ns)
{
	struct dq_msg *m = dq_msg_at(vc, index);
	struct dq_vc_seg *s = dq_slab_at(&vc->segs, id);
	uint64_t at = (uint64_t)m->seg_next * m->seg_bytes;
	bool last = m->seg_next + 1 == m->seg_count;
	struct dq_segment out = { .id = id, .qp = qp, .mem = m->mem, .offset = m->offset + at, .remote_addr = m->remote_addr + at,
				  .remote_key = m->remote_key, .bytes = bytes,
				  .imm = dq_imm_encode(m->slot, last, (uint16_t)m->seg_next) };

	s->msg = index;
	s->bytes = bytes;
	s->qp = qp;
	s->departure_ns = dq_departure_next(vc->departure, now_ns, bytes);
	s->wait_ns = s->departure_ns - now_ns;
	if (vc->segs.used == 1)
		vc->last_progress_ns = now_ns;
	dq_qps_post(&vc->qps, qp, bytes);
	dq_window_post(&vc->window, bytes);
	dq_outbound_post(&vc->departure->outbound, &vc->outbound, bytes);
	if (!m->counted) {
		m->counted = true;
		f->outstanding++;
	}
	m->seg_next++;
	f->backlog -= bytes;
	vc->backlog -= bytes;
	vc->counters.tx_segments++;
	vc->counters.tx_bytes += bytes;
	dq_sched_charge(&vc->sched, &f->sched, bytes);
	if (last)
		dq_msg_unqueue(vc, f, index); /* deactivates the flow when this was its last message */
	vc->ops->post_segment(vc->user, vc, &out);
}

static bool post_segments(struct dq_vc *vc, uint32_t budget, uint64_t now_ns)
{
	int reason = -1;
	if (vc->throttle_reason >= 0)
		vc->counters.throttled_ns[vc->throttle_reason] += now_ns - vc->throttle_since_ns;
	while (budget) {
		struct dq_sched_flow *next = dq_sched_next(&vc->sched);
		struct dq_flow *f;
		struct dq_msg *m;
		uint32_t qp, bytes, id;
		if (!next)
			break;
		f = (struct dq_flow *)((char *)next - offsetof(struct dq_flow, sched));
		m = dq_msg_at(vc, f->ready.head);
		bytes = (uint32_t)DQ_MIN((uint64_t)m->seg_bytes, m->bytes - (uint64_t)m->seg_next * m->seg_bytes);
		if (!dq_window_admits(&vc->window, vc->grants_on ? vc->grant_in : UINT64_MAX, bytes)) {
			reason = vc->grants_on && vc->grant_in < vc->window.limit ? DQ_THROTTLE_GRANT : DQ_THROTTLE_WINDOW;
			break;
		}
		if (!dq_outbound_admits(&vc->departure->outbound, &vc->outbound, bytes, vc->backlog, now_ns)) {
			reason = DQ_THROTTLE_OUTBOUND;
			break;
		}
		qp = dq_qps_pick(&vc->qps);
		id = qp == DQ_NONE ? DQ_NONE : dq_slab_alloc(&vc->segs);
		if (id == DQ_NONE) {
			reason = DQ_THROTTLE_QP;
			break;
		}
		post(vc, f, f->ready.head, id, qp, bytes, now_ns);
		budget--;
	}
	vc->throttle_reason = reason;
	vc->throttle_since_ns = now_ns;
	return budget == 0;
}

bool dq_vc_run(struct dq_vc *vc, uint32_t budget, uint64_t now_ns)
{
	bool more;
	uint64_t backlog;
	if (vc->failed)
		return false;
	if (vc->slots[0].freed || vc->slots[1].freed)
		dq_slot_serve(vc);
	more = post_segments(vc, budget, now_ns);
	dq_outbound_pass(&vc->departure->outbound, &vc->outbound);
	if (!vc->backlog && !vc->window.inflight)
		dq_outbound_active(&vc->departure->outbound, &vc->outbound, false);
	/* A sender says when it begins to wait for the network and when it no longer does; single small messages say nothing. */
	backlog = vc->backlog > 2ull * vc->window.profile.segment_bytes ? vc->backlog : 0;
	if (vc->grants_on && (backlog == 0) != (vc->backlog_told == 0)) {
		vc->backlog_told = backlog;
		dq_vc_tell(vc, &(struct dq_message){ .type = DQ_MSG_BACKLOG, .backlog = backlog }, NULL);
	}
	if (vc->grants_on && vc->grant_out.changed)
		tell_grant(vc);
	while (dq_control_ready(&vc->control)) {
		void *buffer = vc->ops->control_buffer(vc->user, vc);
		if (!buffer)
			break;
		vc->counters.control_tx++;
		vc->ops->post_control(vc->user, vc, buffer, dq_control_pack(&vc->control, buffer));
	}
	return more;
}

int dq_vc_check(struct dq_vc *vc, uint64_t now_ns, bool *stalled)
{
	uint64_t deadline = vc->config.cancel_deadline_ns, silent = now_ns - DQ_MIN(now_ns, vc->checked_ns);
	*stalled = false;
	if (vc->failed)
		return 0;
	if (vc->lost) {
		dq_vc_broken(vc, "no memory for a control message, or %u MiB of them wait for the peer", DQ_CONTROL_QUEUE_LIMIT >> 20);
		return DQ_ERR_NOMEM;
	}
	if (vc->segs.used && !vc->stalled && vc->config.stall_ns && now_ns > vc->last_progress_ns + vc->config.stall_ns) {
		vc->stalled = *stalled = true;
		vc->counters.stalls++;
	}
	if (vc->last_heard_ns != vc->waited_heard_ns)
		vc->waited_ns = 0;
	else
		vc->waited_ns += DQ_MIN(silent, deadline / 4 + 1);
	vc->waited_heard_ns = vc->last_heard_ns;
	vc->checked_ns = now_ns;
	if (vc->awaiting && deadline && vc->waited_ns >= deadline) {
		dq_vc_broken(vc, "the peer did not answer a withdrawal within %llu ms",
			     (unsigned long long)(vc->config.cancel_deadline_ns / 1000000));
		return DQ_ERR_UNREACHABLE;
	}
	return 0;
}
