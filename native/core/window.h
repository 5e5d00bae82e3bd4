/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The window of one VC in bytes, and its adaptation to delay. A completed segment gives one sample:
 *     completion - departure - base RTT,   departure = max(post, previous departure on the device) + bytes / rate
 * so that waiting behind other traffic of this host's own NIC does not count as congestion of the fabric. When the minimum
 * of the samples of one RTT exceeds max(RTT/4, two segments' time, noise), the window shrinks (by the excess share of it,
 * at most by half an RTT), else it grows by one segment an RTT, never above the profile's window nor under the floor.
 * Pure: time is an argument. One thread.
 */
#ifndef DQ_CORE_WINDOW_H
#define DQ_CORE_WINDOW_H

#include "core/base.h"

/* When the device's NIC has sent what was given to it so far; one a device, shared by its VCs. */
struct dq_departure {
	uint64_t last_ns;
	uint64_t rate_bps;
};
/* Departure time of `bytes` posted at now_ns. */
uint64_t dq_departure_next(struct dq_departure *d, uint64_t now_ns, uint32_t bytes);

struct dq_window_profile {
	uint64_t window_bytes;   /* upper bound */
	uint64_t floor_bytes;    /* lower bound, at least one segment */
	uint32_t segment_bytes;
	uint64_t base_rtt_ns;    /* 0 = unknown: no adaptation */
	uint64_t rate_bps;
	uint64_t noise_ns;       /* measured wake-up noise */
	bool adapt;
};

struct dq_window {
	struct dq_window_profile profile;
	uint64_t limit;          /* now */
	uint64_t inflight;       /* posted and not completed */
	uint64_t inflight_peak;
	uint64_t round_end_ns;   /* this RTT's samples end here */
	uint64_t round_min_ns;   /* smallest queueing delay of this round, DQ_NEVER = no sample */
	uint64_t delay_ns;       /* smallest queueing delay of the last full round */
	uint64_t base_floor_ns;  /* smallest sample seen over a longer time, to recover after a reroute to a longer path */
	uint64_t reroute_since_ns;
	uint64_t shrinks;
	uint64_t grows;
};

void dq_window_init(struct dq_window *w, const struct dq_window_profile *p);
/* New profile for a running VC: in-flight bytes stay; limit is clamped into the new bounds. */
void dq_window_set_profile(struct dq_window *w, const struct dq_window_profile *p);
/* May a segment of `bytes` be posted under this limit and `grant` bytes? One segment is always allowed when nothing is in flight. */
static inline bool dq_window_admits(const struct dq_window *w, uint64_t grant, uint32_t bytes)
{
	uint64_t limit = DQ_MIN(w->limit, grant);
	return w->inflight == 0 || w->inflight + bytes <= limit;
}
static inline void dq_window_post(struct dq_window *w, uint32_t bytes)
{
	w->inflight += bytes;
	if (w->inflight > w->inflight_peak)
		w->inflight_peak = w->inflight;
}
/* A segment completed (or was flushed: sample false). */
void dq_window_done(struct dq_window *w, uint32_t bytes, uint64_t departure_ns, uint64_t completion_ns, bool sample);

#endif
