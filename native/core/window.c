/* SPDX-License-Identifier: Apache-2.0 */
#include "core/window.h"

#include <string.h>

#define BIT_NS 8000000000ull /* ns for one byte at 1 bit/s */

uint64_t dq_departure_next(struct dq_departure *d, uint64_t now_ns, uint32_t bytes)
{
	__extension__ unsigned __int128 end;

	if (d->last_ns < now_ns) {
		d->last_ns = now_ns;
		d->fraction = 0;
	}
	if (DQ_UNLIKELY(d->rate_bps != d->scaled_rate_bps)) {
		d->scaled_rate_bps = d->rate_bps;
		/* 8e9 << 32 does not fit 64 bits; slow rates are cut off at about 1 s a byte. */
		end = d->rate_bps ? ((unsigned __int128)BIT_NS << 32) / d->rate_bps : 0;
		d->ns_per_byte = end < 1ull << 62 ? (uint64_t)end : 1ull << 62;
	}
	end = (unsigned __int128)bytes * d->ns_per_byte + d->fraction;
	d->fraction = (uint32_t)end;
	d->last_ns += (uint64_t)(end >> 32);
	return d->last_ns;
}

/* Upper bound of times in profiles: an hour, so that sums cannot overflow whatever a configuration says. */
#define MAX_NS 3600000000000ull

uint64_t dq_window_threshold(const struct dq_window_profile *p, uint64_t base_ns)
{
	uint64_t segments_ns = p->rate_bps ? 2 * (uint64_t)p->segment_bytes * BIT_NS / p->rate_bps : 0;

	return DQ_MAX(DQ_MIN(base_ns, MAX_NS) / 4, DQ_MAX(segments_ns, DQ_MIN(p->noise_ns, MAX_NS)));
}

static void window_base(struct dq_window *w, uint64_t base_ns)
{
	w->base_ns = DQ_MIN(base_ns, MAX_NS);
	w->threshold_ns = dq_window_threshold(&w->profile, w->base_ns);
}

/* A round without a break of the pinned ones; the next begins with the samples to come. */
static void window_unpin(struct dq_window *w)
{
	w->pinned_rounds = 0;
	w->pinned_min_ns = DQ_NEVER;
}

/* Nothing that samples taught holds any more: back to the profile. */
static void window_forget(struct dq_window *w)
{
	w->limit = w->profile.window_bytes;
	w->pinned_limit = DQ_WINDOW_PINNED_ROUNDS;
	w->round_min_ns = DQ_NEVER;
	w->stale = false;
	window_unpin(w);
	window_base(w, w->profile.base_rtt_ns);
	w->fitted_ns = w->base_ns;
}

void dq_window_init(struct dq_window *w, const struct dq_window_profile *p)
{
	memset(w, 0, sizeof *w);
	w->limit = DQ_NEVER; /* at the bound, whatever it is */
	w->round_min_ns = DQ_NEVER;
	w->pinned_limit = DQ_WINDOW_PINNED_ROUNDS;
	window_unpin(w);
	dq_window_set_profile(w, p);
}

void dq_window_set_profile(struct dq_window *w, const struct dq_window_profile *p)
{
	bool unbounded = w->limit >= w->profile.window_bytes;
	uint64_t old_base = w->profile.base_rtt_ns;
	uint64_t away = old_base > p->base_rtt_ns ? old_base - p->base_rtt_ns : p->base_rtt_ns - old_base;
	bool new_base = away > old_base / 8;

	w->profile = *p;
	w->profile.floor_bytes = DQ_MAX(p->floor_bytes, (uint64_t)p->segment_bytes);
	w->profile.window_bytes = DQ_MAX(p->window_bytes, w->profile.floor_bytes);
	if (unbounded || !p->adapt || p->base_rtt_ns == 0)
		w->limit = w->profile.window_bytes;
	w->limit = DQ_MAX(DQ_MIN(w->limit, w->profile.window_bytes), w->profile.floor_bytes);
	if (new_base) {
		w->pinned_limit = DQ_WINDOW_PINNED_ROUNDS;
		w->round_min_ns = DQ_NEVER;
		window_unpin(w);
	}
	window_base(w, new_base ? p->base_rtt_ns : w->base_ns);
	if (new_base)
		w->fitted_ns = w->base_ns;
}

/*
 * limit *= part / whole, in whole segments: rounded up, since a part of one is never posted, but less by one at least.
 * Samples of what departed before now do not show it yet.
 */
static void window_shrink(struct dq_window *w, uint64_t part, uint64_t whole, uint64_t now_ns)
{
	uint64_t segment = DQ_MAX(w->profile.segment_bytes, 1u);
	__extension__ unsigned __int128 scaled = (unsigned __int128)w->limit * part / whole;
	uint64_t limit = ((uint64_t)scaled + segment - 1) / segment * segment;

	if (w->limit <= w->profile.floor_bytes)
		return;
	limit = DQ_MIN(limit, w->limit - DQ_MIN(w->limit, segment));
	w->limit = DQ_MAX(limit, w->profile.floor_bytes);
	w->shrinks++;
	w->fresh_ns = now_ns;
	w->stale = true;
}

static void window_round(struct dq_window *w, uint64_t now_ns)
{
	const struct dq_window_profile *p = &w->profile;
	uint64_t rtt = w->round_min_ns;
	uint64_t target = w->base_ns + w->threshold_ns;

	w->delay_ns = rtt - w->base_ns;
	if (rtt <= target) {
		window_unpin(w);
		if (w->limit < p->window_bytes) {
			w->limit = DQ_MIN(w->limit + p->segment_bytes, p->window_bytes);
			w->grows++;
		}
		return;
	}
	if (w->limit <= p->floor_bytes + p->segment_bytes) {
		w->pinned_min_ns = DQ_MIN(w->pinned_min_ns, rtt);
		if (++w->pinned_rounds >= w->pinned_limit) {
			window_base(w, w->pinned_min_ns);
			w->fitted_ns = w->base_ns;
			w->pinned_limit = DQ_MIN(w->pinned_limit * 2, DQ_WINDOW_PINNED_MAX);
			w->reroutes++;
			window_unpin(w);
			return;
		}
	} else {
		window_unpin(w);
	}
	/* At most by half; and to the middle of what is tolerated, so that the next step down is not due at once. */
	target = w->base_ns + w->threshold_ns / 2;
	window_shrink(w, DQ_MAX(target, rtt / 2), rtt, now_ns);
}

void dq_window_done(struct dq_window *w, uint32_t bytes, uint64_t departure_ns, uint64_t completion_ns, bool sample)
{
	uint64_t rtt;

	w->inflight -= DQ_MIN(w->inflight, (uint64_t)bytes);
	if (!sample || !w->profile.adapt || w->profile.base_rtt_ns == 0)
		return;
	if (DQ_UNLIKELY(completion_ns < departure_ns)) {
		w->skewed++;
		window_forget(w);
		return;
	}
	rtt = completion_ns - departure_ns;
	if (DQ_UNLIKELY(rtt < w->base_ns)) {
		/* It is this short now, so what was taken for the path's before was not. */
		window_base(w, rtt);
		w->pinned_limit = DQ_WINDOW_PINNED_ROUNDS;
		window_unpin(w);
	}
	if (DQ_UNLIKELY(w->stale)) {
		if (departure_ns < w->fresh_ns)
			return;
		/* The first that departed after the change: the round begins, and with it an RTT of samples. */
		w->stale = false;
		w->round_start_ns = completion_ns;
		w->round_min_ns = rtt;
		return;
	}
	if (DQ_UNLIKELY(w->fitted_ns > w->base_ns + w->threshold_ns)) {
		window_shrink(w, w->base_ns, 2 * w->fitted_ns, completion_ns);
		w->fitted_ns = w->base_ns;
		return;
	}
	if (rtt < w->round_min_ns)
		w->round_min_ns = rtt;
	if (departure_ns >= w->round_start_ns) {
		window_round(w, completion_ns);
		w->round_start_ns = completion_ns;
		w->round_min_ns = DQ_NEVER;
	}
}
