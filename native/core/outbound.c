/* SPDX-License-Identifier: Apache-2.0 */
#include "core/outbound.h"

#define START 0.375
#define LEAST (1.0 / 64)
#define QUIET_PART 8 /* of a base RTT: less delay is none, while doubling */

static struct dq_outbound_group *group(struct dq_outbound *o, const struct dq_outbound_member *m)
{
	return &o->groups[m->group];
}

/* --- membership ------------------------------------------------------------------------------------------------- */

static void unwait(struct dq_outbound *o, struct dq_outbound_member *m)
{
	struct dq_outbound_group *g = group(o, m);

	if (!m->waiting)
		return;
	if (m->prev)
		m->prev->next = m->next;
	else
		g->head = m->next;
	if (m->next)
		m->next->prev = m->prev;
	else
		g->tail = m->prev;
	m->next = m->prev = NULL;
	m->waiting = false;
	g->waiting--;
	g->backlog -= m->backlog_bytes;
	o->waiting--;
}

static void wait(struct dq_outbound *o, struct dq_outbound_member *m, uint32_t bytes, uint64_t backlog_bytes)
{
	struct dq_outbound_group *g = group(o, m);

	if (m->waiting)
		return;
	m->waiting = true;
	m->segment_bytes = bytes;
	m->backlog_bytes = backlog_bytes;
	m->next = NULL;
	m->prev = g->tail;
	if (g->tail)
		g->tail->next = m;
	else
		g->head = m;
	g->tail = m;
	g->waiting++;
	g->backlog += backlog_bytes;
	o->waiting++;
}

void dq_outbound_active(struct dq_outbound *o, struct dq_outbound_member *m, bool active)
{
	struct dq_outbound_group *g = group(o, m);

	if (!m->on || m->active == active)
		return;
	m->active = active;
	g->active += active ? 1 : -1u;
	g->windows += active ? m->window_bytes : -m->window_bytes;
	o->active += active ? 1 : -1u;
	o->targets += active ? m->target_bytes : -m->target_bytes;
}

void dq_outbound_pass(struct dq_outbound *o, struct dq_outbound_member *m)
{
	if (m->promised)
		group(o, m)->promised -= m->segment_bytes;
	m->promised = false;
	m->turn = 0;
}

void dq_outbound_leave(struct dq_outbound *o, struct dq_outbound_member *m)
{
	if (!m->on)
		return;
	dq_outbound_active(o, m, false);
	dq_outbound_pass(o, m);
	unwait(o, m);
	group(o, m)->inflight -= m->inflight;
	m->inflight = 0;
	m->on = false;
}

void dq_outbound_join(struct dq_outbound *o, struct dq_outbound_member *m, uint64_t window_bytes, uint64_t target_bytes,
		      uint64_t base_ns, uint64_t noise_ns)
{
	bool active = m->active, waiting = m->waiting;
	uint64_t inflight = m->inflight;
	struct dq_outbound_group *g;

	dq_outbound_leave(o, m);
	m->window_bytes = DQ_MAX(window_bytes, 1);
	m->target_bytes = target_bytes;
	m->noise_ns = noise_ns;
	m->group = DQ_MIN(63u - (uint32_t)__builtin_clzll(DQ_MAX(base_ns, 1)), DQ_OUTBOUND_GROUPS - 1);
	m->on = true;
	g = group(o, m);
	g->base_ns = base_ns;
	if (!g->begun) {
		g->begun = g->doubling = true;
		g->scale = START;
	}
	g->inflight += inflight;
	m->inflight = inflight;
	dq_outbound_active(o, m, active);
	if (waiting)
		wait(o, m, m->segment_bytes, m->backlog_bytes);
}

/* --- the limit ---------------------------------------------------------------------------------------------------- */

static double mean_window(const struct dq_outbound_group *g)
{
	return g->active ? (double)g->windows / g->active : 1.0;
}

/* Part of the device's pipe that is this group's. */
static double part(const struct dq_outbound *o, const struct dq_outbound_group *g)
{
	return o->active && g->active ? (double)g->active / o->active : 1.0;
}

static double scale_at(const struct dq_outbound_group *g, uint64_t now_ns)
{
	uint64_t since = now_ns - DQ_MIN(now_ns, g->ramp_ns);

	return since < g->base_ns ? g->from + (g->scale - g->from) * (double)since / (double)g->base_ns : g->scale;
}

/* Without the margin. */
static double limit(const struct dq_outbound *o, const struct dq_outbound_group *g, uint64_t now_ns)
{
	double pipe = scale_at(g, now_ns) * part(o, g);

	return mean_window(g) * (pipe < 1 ? pipe : 1);
}

static bool fits(const struct dq_outbound *o, const struct dq_outbound_group *g, uint32_t bytes, uint64_t now_ns)
{
	uint64_t all = g->inflight + g->promised + bytes, margin = (uint64_t)bytes * DQ_OUTBOUND_MARGIN;

	return all <= margin || (double)(all - margin) <= limit(o, g, now_ns);
}

bool dq_outbound_admits(struct dq_outbound *o, struct dq_outbound_member *m, uint32_t bytes, uint64_t backlog_bytes, uint64_t now_ns)
{
	struct dq_outbound_group *g = group(o, m);

	if (!m->on)
		return true;
	if (m->promised) {
		g->promised -= m->segment_bytes;
		m->promised = false;
	}
	if (m->turn) {
		m->turn--;
		return true;
	}
	if (g->inflight + g->promised == 0 && !g->head && now_ns >= g->idle_ns + g->base_ns) {
		g->from = 0;
		g->ramp_ns = now_ns;
	}
	if ((!g->head && fits(o, g, bytes, now_ns)) || (m->inflight == 0 && backlog_bytes <= DQ_OUTBOUND_SMALL && !m->waiting))
		return true;
	wait(o, m, bytes, backlog_bytes);
	g->limited = true;
	return false;
}

struct dq_outbound_member *dq_outbound_next(struct dq_outbound *o, uint64_t now_ns)
{
	if (DQ_LIKELY(!o->waiting))
		return NULL;
	for (uint32_t i = 0; i < DQ_OUTBOUND_GROUPS; i++) {
		struct dq_outbound_group *g = &o->groups[i];
		struct dq_outbound_member *m = g->head;
		double mean;

		if (!m || !fits(o, g, m->segment_bytes, now_ns))
			continue;
		mean = DQ_MAX((double)g->backlog / g->waiting, 1.0);
		m->turn = (uint32_t)DQ_MAX(1.0, DQ_MIN((double)m->backlog_bytes / mean + 0.5, (double)DQ_OUTBOUND_TURN));
		unwait(o, m);
		m->promised = true;
		g->promised += m->segment_bytes;
		return m;
	}
	return NULL;
}

uint64_t dq_outbound_due(const struct dq_outbound *o, uint64_t now_ns)
{
	uint64_t due = DQ_NEVER;

	for (uint32_t i = 0; o->waiting && i < DQ_OUTBOUND_GROUPS; i++) {
		const struct dq_outbound_group *g = &o->groups[i];
		uint64_t all;
		double need, at;

		if (!g->head || g->scale <= g->from || now_ns >= g->ramp_ns + g->base_ns)
			continue;
		all = g->inflight + g->promised + g->head->segment_bytes;
		all -= DQ_MIN(all, (uint64_t)g->head->segment_bytes * DQ_OUTBOUND_MARGIN);
		need = (double)all / mean_window(g) / part(o, g);
		if (need > g->scale || (double)all > mean_window(g))
			continue;
		at = (double)g->ramp_ns + DQ_MAX(need - g->from, 0.0) / (g->scale - g->from) * (double)g->base_ns;
		due = DQ_MIN(due, DQ_MAX((uint64_t)at + 1, now_ns + 1));
	}
	return due;
}

void dq_outbound_post(struct dq_outbound *o, struct dq_outbound_member *m, uint32_t bytes)
{
	struct dq_outbound_group *g = group(o, m);

	if (!m->on)
		return;
	m->inflight += bytes;
	g->inflight += bytes;
	g->peak = DQ_MAX(g->peak, g->inflight);
}

/* --- delay --------------------------------------------------------------------------------------------------------- */

static void round_begin(struct dq_outbound_group *g, uint64_t now_ns)
{
	g->round_start_ns = now_ns;
	g->delay_sum_ns = 0;
	g->samples = 0;
	g->peak = g->inflight;
	g->limited = g->head != NULL;
}

static uint64_t mean_delay(const struct dq_outbound_group *g)
{
	return g->delay_sum_ns > 0 ? (uint64_t)g->delay_sum_ns / g->samples : 0;
}

static bool quiet(const struct dq_outbound_group *g)
{
	return mean_delay(g) <= g->base_ns / QUIET_PART;
}

static void adapt(struct dq_outbound *o, struct dq_outbound_group *g, uint64_t now_ns)
{
	double base = (double)g->base_ns, mean = mean_window(g), most = 1 / part(o, g), lim = limit(o, g, now_ns), used, target, to;

	if (!g->active)
		return;
	g->delay_ns = mean_delay(g);
	g->scale = DQ_MIN(g->scale, most);
	used = (double)g->peak < lim ? g->scale * (double)g->peak / lim : g->scale;
	target = (double)o->targets / o->active / mean * (2 + DQ_MIN(used, 1.0)) / 3;
	to = used * base / (base + (double)g->delay_ns) + target;
	if (to < used) {
		g->scale = g->from = DQ_MAX(DQ_MAX(to, used / 2), LEAST);
		g->doubling = false;
		g->stale = true;
		g->fresh_ns = now_ns;
		g->shrinks++;
		return;
	}
	g->doubling &= quiet(g);
	if (!g->limited)
		return;
	to = g->doubling ? 2 * g->scale : g->scale + DQ_MAX(to - g->scale, 0.0) / 2;
	g->from = scale_at(g, now_ns);
	g->ramp_ns = now_ns;
	g->scale = DQ_MIN(to, most);
	g->grows++;
}

void dq_outbound_done(struct dq_outbound *o, struct dq_outbound_member *m, uint32_t bytes, uint64_t departure_ns, uint64_t wait_ns,
		      uint64_t completion_ns, uint64_t base_ns, bool sample)
{
	struct dq_outbound_group *g = group(o, m);

	if (!m->on)
		return;
	bytes = (uint32_t)DQ_MIN((uint64_t)bytes, m->inflight);
	m->inflight -= bytes;
	g->inflight -= bytes;
	if (!g->inflight)
		g->idle_ns = completion_ns;
	if (!sample || completion_ns < departure_ns)
		return;
	g->base_ns = base_ns;
	if (g->stale) {
		if (departure_ns < g->fresh_ns)
			return;
		g->stale = false;
		round_begin(g, completion_ns);
		g->peak += bytes;
	}
	g->delay_sum_ns += (int64_t)(completion_ns - departure_ns) - (int64_t)(base_ns + wait_ns + m->noise_ns);
	g->samples++;
	if (departure_ns < g->round_start_ns)
		return;
	if (g->doubling && 2 * g->samples * bytes < g->peak && !quiet(g))
		return; /* the first few may have met with a burst: the round goes on */
	adapt(o, g, completion_ns);
	round_begin(g, completion_ns);
}
