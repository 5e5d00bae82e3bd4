/* SPDX-License-Identifier: Apache-2.0 */
#include "core/grant.h"

#include <string.h>

void dq_grants_init(struct dq_grants *g)
{
	memset(g, 0, sizeof *g);
	g->boost = 1;
}

void dq_grants_device(struct dq_grants *g, uint64_t rate_bps, uint64_t noise_ns)
{
	if (g->rate_bps != rate_bps)
		g->dirty = g->resized = true;
	g->rate_bps = rate_bps;
	g->noise_ns = noise_ns;
}

static void list_remove(struct dq_grants *g, struct dq_grant_member *m)
{
	if (m->prev)
		m->prev->next = m->next;
	else
		g->head = m->next;
	if (m->next)
		m->next->prev = m->prev;
	else
		g->tail = m->prev;
	m->next = m->prev = NULL;
}

static void list_prepend(struct dq_grants *g, struct dq_grant_member *m)
{
	m->prev = NULL;
	m->next = g->head;
	if (g->head)
		g->head->prev = m;
	else
		g->tail = m;
	g->head = m;
}

static void list_append(struct dq_grants *g, struct dq_grant_member *m)
{
	m->next = NULL;
	m->prev = g->tail;
	if (g->tail)
		g->tail->next = m;
	else
		g->head = m;
	g->tail = m;
}

void dq_grants_add(struct dq_grants *g, struct dq_grant_member *m, uint64_t window_bytes, uint32_t segment_bytes, uint64_t rtt_ns)
{
	memset(m, 0, sizeof *m);
	m->level_bytes = dq_grants_initial(g, window_bytes, segment_bytes);
	m->serial = 1;
	m->changed = true;
	list_append(g, m);
	g->members++;
	dq_grants_profile(g, m, window_bytes, segment_bytes, rtt_ns);
}

void dq_grants_remove(struct dq_grants *g, struct dq_grant_member *m)
{
	list_remove(g, m);
	g->active -= m->active;
	g->warm -= m->warm;
	m->active = m->warm = false;
	g->members--;
	g->dirty = g->resized = true;
}

void dq_grants_profile(struct dq_grants *g, struct dq_grant_member *m, uint64_t window_bytes, uint32_t segment_bytes, uint64_t rtt_ns)
{
	m->window_bytes = DQ_MAX(window_bytes, (uint64_t)segment_bytes);
	m->segment_bytes = segment_bytes;
	m->rtt_ns = rtt_ns;
	g->dirty = g->resized = true;
}

void dq_grants_round(struct dq_grants *g, uint64_t now_ns)
{
	uint64_t ns = now_ns - g->round_start_ns;
	double old = g->boost, used;

	if (g->round_ns == 0 || g->rate_bps == 0 || ns > 4 * g->round_ns + g->noise_ns) {
		g->boost = 1; /* there was a pause: what came in says nothing */
	} else {
		used = (double)g->round_bytes * 8e9 / (double)ns / (double)g->rate_bps;
		if (used < DQ_GRANT_FULL)
			g->boost *= DQ_MIN(DQ_GRANT_FULL / DQ_MAX(used, 0.01), 1.5);
		else
			g->boost *= 0.95;
		g->boost = DQ_MAX(1.0, DQ_MIN(g->boost, DQ_GRANT_BOOST));
	}
	if (g->boost != old)
		g->dirty = true;
	g->round_start_ns = now_ns;
	g->round_bytes = 0;
}

void dq_grants_wake(struct dq_grants *g, struct dq_grant_member *m)
{
	g->dirty = true;
	if (m->warm)
		return;
	m->warm = true;
	g->warm++;
	list_remove(g, m);
	list_prepend(g, m);
}

void dq_grants_backlog(struct dq_grants *g, struct dq_grant_member *m, uint64_t backlog_bytes)
{
	if (m->backlog_bytes && backlog_bytes == 0)
		g->dirty = m->drained = true;
	if (backlog_bytes) {
		m->drained = false;
		m->drained_ns = 0;
	}
	m->backlog_bytes = backlog_bytes;
	m->backlog_ns = 0;
	if (!m->active && backlog_bytes)
		dq_grants_wake(g, m);
}

static uint64_t later(uint64_t ns, uint64_t by_ns)
{
	return by_ns < DQ_NEVER - 1 - ns ? ns + by_ns : DQ_NEVER - 1;
}

/* Until when this sender counts as active without news of it. */
static uint64_t active_until(const struct dq_grants *g, struct dq_grant_member *m, uint64_t now_ns)
{
	uint64_t until = 0;

	if (m->drained) {
		m->drained = false;
		m->drained_ns = later(now_ns, m->rtt_ns);
	}
	if (m->last_bytes_ns > m->drained_ns)
		until = later(m->last_bytes_ns, later(m->rtt_ns, m->rtt_ns) + DQ_MIN(g->noise_ns, DQ_GRANT_STALE_NS));
	if (m->backlog_bytes) {
		if (m->backlog_ns == 0)
			m->backlog_ns = DQ_MAX(now_ns, 1);
		until = DQ_MAX(until, later(DQ_MAX(m->backlog_ns, m->last_bytes_ns), DQ_GRANT_STALE_NS));
	}
	return until;
}

/* Who is active and who is warm now; sets dirty when that changed. Returns when it will change without news. */
static uint64_t members_age(struct dq_grants *g, uint64_t now_ns)
{
	struct dq_grant_member *next;
	uint64_t wake = DQ_NEVER;

	for (struct dq_grant_member *m = g->head; m && m->warm; m = next) {
		uint64_t active = active_until(g, m, now_ns);
		uint64_t warm = DQ_MAX(active, later(DQ_MAX(m->last_bytes_ns, m->backlog_ns), DQ_GRANT_WARM_NS));

		next = m->next;
		if (m->active != (active > now_ns)) {
			m->active = !m->active;
			g->active += m->active ? 1 : -1u;
			g->dirty = true;
		}
		if (m->active) {
			wake = DQ_MIN(wake, active);
		} else if (warm > now_ns) {
			wake = DQ_MIN(wake, warm);
		} else {
			/* To the cold ones' end: this walk stops before it. */
			m->warm = false;
			g->warm--;
			list_remove(g, m);
			list_append(g, m);
			g->dirty = g->resized = true;
		}
	}
	return wake;
}

/* Shares of the active senders: as even as their windows allow, one pipe in all. */
static void shares_fill(struct dq_grants *g)
{
	uint32_t open = g->active;
	double left = 1.0;
	bool again = true;

	for (struct dq_grant_member *m = g->head; m && m->warm; m = m->next)
		m->share = -1.0;
	while (again && open) {
		double even = left / open;

		again = false;
		for (struct dq_grant_member *m = g->head; m && m->warm; m = m->next) {
			double most = (double)m->window_bytes / (double)m->pipe_bytes;

			if (!m->active || m->share >= 0 || most > even)
				continue;
			m->share = most;
			left = DQ_MAX(left - most, 0.0);
			open--;
			again = true;
		}
	}
	for (struct dq_grant_member *m = g->head; m && m->warm; m = m->next) {
		if (m->share < 0)
			m->share = m->active ? left / open : 1.0 / g->warm;
	}
}

/*
 * A level is news when it is a segment or an eighth away from the one told, or the whole window, or the one told is not
 * allowed any more. While the last one waits to be told, it is simply replaced.
 */
static void level_set(struct dq_grant_member *m, uint64_t level)
{
	uint64_t away = level > m->level_bytes ? level - m->level_bytes : m->level_bytes - level;

	if (away == 0)
		return;
	if (!m->changed && away < m->segment_bytes && away < m->level_bytes / 8 && level != m->window_bytes &&
	    m->level_bytes <= m->window_bytes && m->level_bytes >= m->segment_bytes)
		return;
	m->level_bytes = level;
	m->serial++;
	m->changed = true;
}

uint64_t dq_grants_split(struct dq_grants *g, uint64_t now_ns)
{
	uint64_t wake = members_age(g, now_ns);

	if (!g->dirty)
		return wake;
	g->round_ns = 0;
	for (struct dq_grant_member *m = g->head; m && m->warm; m = m->next)
		if (m->active)
			g->round_ns = DQ_MAX(g->round_ns, m->rtt_ns);
	for (struct dq_grant_member *m = g->head; m && (m->warm || g->resized); m = m->next) {
		__extension__ unsigned __int128 pipe = (unsigned __int128)g->rate_bps * m->rtt_ns / 8000000000ull;

		m->pipe_bytes = pipe < 1ull << 62 ? (uint64_t)pipe : 1ull << 62;
		if (m->pipe_bytes == 0)
			m->pipe_bytes = DQ_MAX(m->window_bytes, 1);
		m->share = 1.0 / g->members;
	}
	shares_fill(g);

	g->budget_bytes = 0;
	for (struct dq_grant_member *m = g->head; m && (m->warm || g->resized); m = m->next) {
		uint32_t sharers = m->active ? g->active : m->warm ? g->warm : g->members;
		/* Of one segment each for up to DQ_GRANT_MARGIN senders; among more, bursts even out. */
		uint64_t margin = (uint64_t)m->segment_bytes * DQ_GRANT_MARGIN / DQ_MAX(sharers, DQ_GRANT_MARGIN);
		uint64_t bytes = (uint64_t)(m->share * (m->active ? g->boost : 1.0) * (double)m->pipe_bytes) + margin;
		uint64_t level = sharers == 1 ? m->window_bytes : DQ_MIN(bytes + m->segment_bytes, m->window_bytes);

		if (m->active)
			g->budget_bytes += DQ_MIN(bytes, m->window_bytes);
		level_set(m, DQ_MAX(level, (uint64_t)m->segment_bytes));
	}
	g->dirty = g->resized = false;
	return wake;
}

uint64_t dq_grants_initial(const struct dq_grants *g, uint64_t window_bytes, uint32_t segment_bytes)
{
	uint64_t level = g->members ? window_bytes / (g->members + 1) + segment_bytes : window_bytes;

	return DQ_MAX(DQ_MIN(level, window_bytes), (uint64_t)segment_bytes);
}
