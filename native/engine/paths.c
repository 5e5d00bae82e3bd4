/* SPDX-License-Identifier: Apache-2.0 */
/* Paths: what the control plane knows of the way to one life of a peer, and the counters of its VCs. */
#include <errno.h>
#include <string.h>
#include <sys/random.h>

#include "engine/private.h"

uint32_t eng_path_find(struct dq_engine *e, uint32_t device, const char *host_id, uint64_t epoch)
{
	for (uint32_t i = 0; i < e->paths.capacity; i++) {
		struct eng_path *p = eng_path_at(e, i);
		if (p && p->device == device && p->epoch == epoch && !strcmp(p->host_id, host_id))
			return i;
	}
	return DQ_NONE;
}

/*
 * RoCE v2 derives the UDP source port from the flow label: its lower 14 bits, folded with the upper 6, so here all entropy is
 * in the lower 14. The stride is odd, so the first 16384 QPs of a path have distinct ports; and large, because neighbouring
 * ports often fall on the same way. Label 0 would leave the choice to the driver: 0x4001 has the same port.
 */
uint32_t eng_flow_label(uint32_t seed, uint32_t qp)
{
	uint32_t label = (seed + qp * 0x1e35u) & 0x3fffu;
	return label ? label : 0x4001u;
}

static bool link_wanted(const struct dq_link_setting *s)
{
	return s && (s->delay_ns || s->rate_bps || s->queue_bytes);
}

static bool profile_ok(const struct dq_profile *p)
{
	return p->window_bytes && p->segment_bytes >= DQ_MIN_SEGMENT_BYTES && p->segment_bytes <= DQ_MAX_SEGMENT_BYTES &&
	       p->segment_bytes % DQ_ALIGN_BYTES == 0 && p->qps >= 1 && p->qps <= DQ_MAX_QPS && p->outstanding_per_qp >= 1;
}

struct path_add {
	uint32_t device;
	const char *host_id;
	uint64_t epoch;
	const struct dq_link_setting *link;
	const struct dq_profile *profile;
	uint32_t *path;
	struct dq_text *err;
	int rc;
};

static void path_add(struct dq_engine *e, void *arg)
{
	struct path_add *a = arg;
	struct eng_path *p;
	uint32_t i;
	a->rc = -EINVAL;
	if (a->device >= e->device_count) {
		eng_error(a->err, a->rc, "path to %s: no device %u", a->host_id, a->device);
		return;
	}
	if (!a->host_id[0] || strlen(a->host_id) >= DQ_HOST_ID_MAX) {
		eng_error(a->err, a->rc, "path: host_id \"%.80s\" must be a text of 1 to %u bytes", a->host_id, DQ_HOST_ID_MAX - 1);
		return;
	}
	if (!profile_ok(a->profile)) {
		eng_error(a->err, a->rc, "path to %s: profile out of range: window %llu, segment %u (128..%u, multiple of 128), QPs %u (1..%u), "
			  "outstanding %u", a->host_id, (unsigned long long)a->profile->window_bytes, a->profile->segment_bytes,
			  DQ_MAX_SEGMENT_BYTES, a->profile->qps, DQ_MAX_QPS, a->profile->outstanding_per_qp);
		return;
	}
	if (eng_path_find(e, a->device, a->host_id, a->epoch) != DQ_NONE) {
		a->rc = eng_error(a->err, -EEXIST, "path to %s: exists already", a->host_id);
		return;
	}
	i = dq_slab_alloc(&e->paths);
	if (i == DQ_NONE) {
		a->rc = eng_error(a->err, -ENOMEM, "path to %s: no memory", a->host_id);
		return;
	}
	p = eng_path_at(e, i);
	/* Without random numbers all paths would take the same ways through the fabric, but work. */
	if (getrandom(&p->label_seed, sizeof p->label_seed, GRND_NONBLOCK) != (ssize_t)sizeof p->label_seed)
		p->label_seed = i * 0x9e3779b1u;
	p->device = a->device;
	p->epoch = a->epoch;
	p->profile = *a->profile;
	p->vcs = DQ_NONE;
	memcpy(p->host_id, a->host_id, strlen(a->host_id) + 1);
	if (link_wanted(a->link)) {
		struct dq_link_config lc = { a->link->delay_ns, a->link->rate_bps, a->link->queue_bytes };
		p->setting = *a->link;
		a->rc = dq_link_create(&lc, &p->link);
		if (a->rc) {
			eng_error(a->err, a->rc, "path to %s: no memory for its emulated link", a->host_id);
			dq_slab_free(&e->paths, i);
			return;
		}
	}
	*a->path = i;
	a->rc = 0;
}

int dq_engine_path_add(dq_engine *e, uint32_t device, const char *host_id, uint64_t epoch, const struct dq_link_setting *link,
		       const struct dq_profile *profile, uint32_t *path, struct dq_text *err)
{
	struct path_add a = { device, host_id, epoch, link, profile, path, err, 0 };
	int rc = eng_call(e, path_add, &a);
	return rc ? rc : a.rc;
}

struct path_args {
	uint32_t path;
	int32_t status;
	const char *why;
	const struct dq_profile *profile;
	const struct dq_link_setting *link;
	void *handle;
	uint32_t *label;
	struct dq_path_stats *stats;
	int rc;
};

static void path_remove(struct dq_engine *e, void *arg)
{
	struct path_args *a = arg;
	struct eng_path *p = eng_path_at(e, a->path);
	a->rc = p ? 0 : -ENOENT;
	if (!p)
		return;
	for (uint32_t v = p->vcs; v != DQ_NONE; v = eng_vc_at(e, v)->next_in_path)
		eng_vc_fail(e, eng_vc_at(e, v), a->status, "%s", a->why ? a->why : "path removed");
	eng_vc_reap(e);
	dq_link_destroy(p->link);
	dq_slab_free(&e->paths, a->path);
}

int dq_engine_path_remove(dq_engine *e, uint32_t path, int32_t status, const char *why)
{
	struct path_args a = { .path = path, .status = status, .why = why };
	int rc;
	pthread_mutex_lock(&e->making); /* a VC being made holds on to its path */
	rc = eng_call(e, path_remove, &a);
	pthread_mutex_unlock(&e->making);
	return rc ? rc : a.rc;
}

static void path_profile(struct dq_engine *e, void *arg)
{
	struct path_args *a = arg;
	struct eng_path *p = eng_path_at(e, a->path);
	a->rc = !p ? -ENOENT : profile_ok(a->profile) ? 0 : -EINVAL;
	if (a->rc)
		return;
	p->profile = *a->profile;
	for (uint32_t v = p->vcs; v != DQ_NONE; v = eng_vc_at(e, v)->next_in_path) {
		struct eng_vc *vc = eng_vc_at(e, v);
		struct dq_window_profile wp;
		if (vc->state == ENG_VC_PREPARED || vc->failing)
			continue;
		eng_vc_profile_of(&p->profile, &wp);
		dq_vc_profile(&vc->core, &wp, p->profile.outstanding_per_qp, p->profile.qps, p->profile.grants);
		eng_vc_touch(e, vc);
	}
}

int dq_engine_path_profile(dq_engine *e, uint32_t path, const struct dq_profile *profile)
{
	struct path_args a = { .path = path, .profile = profile };
	int rc = eng_call(e, path_profile, &a);
	return rc ? rc : a.rc;
}

static void path_link(struct dq_engine *e, void *arg)
{
	struct path_args *a = arg;
	struct eng_path *p = eng_path_at(e, a->path);
	struct dq_link_config lc = { a->link->delay_ns, a->link->rate_bps, a->link->queue_bytes };
	a->rc = p ? 0 : -ENOENT;
	if (!p)
		return;
	if (!p->link) {
		/* QPs and the prober hold the link by pointer from their beginning: a path that began without one stays so. */
		if (link_wanted(a->link))
			a->rc = -EBUSY;
		return;
	}
	p->setting = *a->link;
	dq_link_configure(p->link, &lc);
}

int dq_engine_path_link(dq_engine *e, uint32_t path, const struct dq_link_setting *link)
{
	struct path_args a = { .path = path, .link = link };
	int rc = eng_call(e, path_link, &a);
	return rc ? rc : a.rc;
}

static void path_link_handle(struct dq_engine *e, void *arg)
{
	struct path_args *a = arg;
	struct eng_path *p = eng_path_at(e, a->path);
	a->handle = p ? p->link : NULL;
}

void *dq_engine_path_link_handle(dq_engine *e, uint32_t path)
{
	struct path_args a = { .path = path };
	return eng_call(e, path_link_handle, &a) ? NULL : a.handle;
}

static void path_flow_label(struct dq_engine *e, void *arg)
{
	struct path_args *a = arg;
	const struct eng_path *p = eng_path_at(e, a->path);
	a->rc = p ? 0 : -ENOENT;
	if (p)
		*a->label = eng_flow_label(p->label_seed, 1);
}

int dq_engine_path_flow_label(dq_engine *e, uint32_t path, uint32_t *label)
{
	struct path_args a = { .path = path, .label = label };
	int rc = eng_call(e, path_flow_label, &a);
	return rc ? rc : a.rc;
}

static void add_counters(struct dq_path_stats *s, const struct dq_vc *c)
{
	s->tx_bytes += c->counters.tx_bytes;
	s->rx_bytes += c->counters.rx_bytes;
	s->tx_segments += c->counters.tx_segments;
	s->rx_segments += c->counters.rx_segments;
	s->tx_messages += c->counters.tx_messages;
	s->rx_messages += c->counters.rx_messages;
	s->duplicates += c->tracker.duplicates;
	s->retransmits += c->counters.retransmits;
	s->stalls += c->counters.stalls;
	s->window_shrinks += c->window.shrinks;
	s->window_grows += c->window.grows;
	s->window_reroutes += c->window.reroutes;
	s->throttled_window_ns += c->counters.throttled_ns[DQ_THROTTLE_WINDOW];
	s->throttled_grant_ns += c->counters.throttled_ns[DQ_THROTTLE_GRANT];
	s->throttled_qp_ns += c->counters.throttled_ns[DQ_THROTTLE_QP];
	s->throttled_outbound_ns += c->counters.throttled_ns[DQ_THROTTLE_OUTBOUND];
	s->control_tx_packets += c->counters.control_tx;
	s->control_rx_packets += c->counters.control_rx;
}

void eng_path_account(struct dq_engine *e, struct eng_vc *vc)
{
	struct eng_path *p = eng_path_at(e, vc->path);
	if (p && vc->state != ENG_VC_PREPARED)
		add_counters(&p->past, &vc->core);
}

static void path_stats(struct dq_engine *e, void *arg)
{
	struct path_args *a = arg;
	struct eng_path *p = eng_path_at(e, a->path);
	struct dq_path_stats *s = a->stats;
	struct dq_link_stats ls = { 0 };
	a->rc = p ? 0 : -ENOENT;
	if (!p)
		return;
	*s = p->past;
	s->time_ns = eng_clock_ns();
	s->profile_window_bytes = p->profile.window_bytes;
	s->grant_in_bytes = s->grant_out_bytes = UINT64_MAX;
	for (uint32_t v = p->vcs; v != DQ_NONE; v = eng_vc_at(e, v)->next_in_path) {
		struct eng_vc *vc = eng_vc_at(e, v);
		const struct dq_vc *c = &vc->core;
		s->vcs++;
		s->qps += vc->nqps;
		if (vc->state == ENG_VC_PREPARED)
			continue;
		add_counters(s, c);
		s->inflight_bytes += c->window.inflight;
		s->inflight_peak_bytes = DQ_MAX(s->inflight_peak_bytes, c->window.inflight_peak);
		s->window_bytes += c->window.limit;
		s->backlog_bytes += c->backlog;
		s->queue_delay_ns = DQ_MAX(s->queue_delay_ns, c->window.delay_ns == DQ_NEVER ? 0 : c->window.delay_ns);
		s->queue_delay_max_ns = DQ_MAX(s->queue_delay_max_ns, c->counters.delay_max_ns);
		if (c->grants_on) {
			s->grant_in_bytes = DQ_MIN(s->grant_in_bytes, c->grant_in);
			s->grant_out_bytes = DQ_MIN(s->grant_out_bytes, c->grant_out.level_bytes);
		}
		s->flows += c->flow_count;
		s->slots_receive += c->slots[0].used;
		s->slots_put += c->slots[1].used;
		s->receives_waiting += c->counters.receives_waiting;
	}
	if (p->link) {
		dq_link_stats(p->link, e->now_ns, &ls);
		s->link_queue_bytes = ls.queue_bytes;
		s->link_queue_peak_bytes = ls.queue_peak_bytes;
	}
}

int dq_engine_path_stats(dq_engine *e, uint32_t path, struct dq_path_stats *out)
{
	struct path_args a = { .path = path, .stats = out };
	int rc;
	memset(out, 0, sizeof *out);
	rc = eng_call(e, path_stats, &a);
	return rc ? rc : a.rc;
}

static void path_reset_peaks(struct dq_engine *e, void *arg)
{
	struct path_args *a = arg;
	struct eng_path *p = eng_path_at(e, a->path);
	a->rc = p ? 0 : -ENOENT;
	if (!p)
		return;
	for (uint32_t v = p->vcs; v != DQ_NONE; v = eng_vc_at(e, v)->next_in_path) {
		struct eng_vc *vc = eng_vc_at(e, v);
		if (vc->state == ENG_VC_PREPARED)
			continue;
		vc->core.window.inflight_peak = vc->core.window.inflight;
		vc->core.counters.delay_max_ns = 0;
	}
	if (p->link)
		dq_link_reset_peak(p->link);
}

int dq_engine_path_reset_peaks(dq_engine *e, uint32_t path)
{
	struct path_args a = { .path = path };
	int rc = eng_call(e, path_reset_peaks, &a);
	return rc ? rc : a.rc;
}
