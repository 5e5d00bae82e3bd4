/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The window of one VC in bytes, and its adaptation to delay. A completed segment gives one sample:
 *     rtt = completion - departure,   departure = max(post, previous departure on the device) + bytes / rate
 *     delay = rtt - base
 * so that waiting behind other traffic of this host's own NIC does not count as congestion of the fabric. Pure: time is an
 * argument. One thread.
 *
 * In a VC, what many VCs share is bounded by the device's outbound budget (outbound.h), and the VC gives its window a threshold
 * of one base RTT: what is left to it are paths that are congested alone, and rerouted ones.
 *
 * The rule.
 *  Round     It ends with the first sample of a segment that departed after the round began: one real RTT, however long
 *            that is now. Its delay is the smallest of its samples: a standing queue delays every segment, jitter and
 *            late wake-ups only some.
 *  Threshold max(base / 4, two segments' time at the path's rate, noise). Under it there is no use in less queue, and
 *            nothing can be told from noise. Two segments, because a segment is stored and forwarded whole at places, and
 *            one queues behind another wherever two QPs meet.
 *  Shrink    When the delay exceeds the threshold: limit *= (base + threshold / 2) / rtt, which by Little's law is what fits
 *            at the rate seen with half the threshold for queue; a longer step down than just to the threshold makes
 *            VCs that share a queue even out faster. At most by half, at least by a segment, in whole segments rounded up
 *            (a part of one is never posted, and is throughput lost). Samples of segments that departed before the change
 *            are then ignored: they still saw the old window, and would shrink it twice for one queue. So: at most once
 *            in two RTTs.
 *  Grow      Else by one segment a round, up to the profile's window. Never under the floor.
 *  Base      Starts as the profile's base RTT. A shorter sample lowers it at once. When it came down by more than the
 *            threshold, the path got shorter, and the window, fitted to the longer one, keeps a queue that hides the true
 *            base: limit *= new base / old base / 2, so that the queue drains and shows a shorter RTT still, and so on until
 *            that no longer moves. A sample with completion before departure says that the departure model (or a clock)
 *            is wrong, and with it all that earlier samples taught: it is counted, and base and window are the profile's.
 *  Reroute   On a longer path every delay exceeds the threshold, whatever the window does. When the window has stayed
 *            at its floor (or within a segment of it) for DQ_WINDOW_PINNED_ROUNDS rounds that all exceed the threshold, the
 *            smallest of those delays is taken for the path's and added to the base, and the window grows again. Many
 *            VCs that share one bottleneck, each at its floor, look the same; so the number of rounds doubles with each such
 *            step (to DQ_WINDOW_PINNED_MAX), until a shorter sample or a new profile base proves the base. A true
 *            reroute needs one step; a crowd can creep upwards only by the logarithm of time.
 */
#ifndef DQ_CORE_WINDOW_H
#define DQ_CORE_WINDOW_H

#include "core/base.h"
#include "core/outbound.h"

#define DQ_WINDOW_PINNED_ROUNDS 16u
#define DQ_WINDOW_PINNED_MAX 4096u

/*
 * When the device's NIC has sent what was given to it so far; one a device, shared by its VCs. rate_bps may be set at any
 * time; 0 = unknown or unlimited: a segment departs when it is posted. All zeros is a valid start. The rate must be at
 * least what the device can send: a model slower than the device runs ahead of it, and hides queues (a faster one only
 * takes some of the host's own queue for the fabric's, and the window settles with the device still busy).
 */
struct dq_departure {
	uint64_t last_ns;
	uint64_t rate_bps;
	uint64_t scaled_rate_bps;    /* rate_bps that ns_per_byte was computed for */
	uint64_t ns_per_byte;        /* ns << 32 */
	uint32_t fraction;           /* ns << 32, of last_ns: no drift over any number of segments */
	struct dq_outbound outbound; /* what its VCs may have in flight together */
};
/* Departure time of the last byte of `bytes` posted at now_ns. */
uint64_t dq_departure_next(struct dq_departure *d, uint64_t now_ns, uint32_t bytes);

struct dq_window_profile {
	uint64_t window_bytes;   /* upper bound; raised to floor_bytes when less */
	uint64_t floor_bytes;    /* lower bound; raised to one segment when less */
	uint32_t segment_bytes;
	uint64_t base_rtt_ns;    /* 0 = unknown: no adaptation */
	uint64_t rate_bps;       /* of the path, 0 = unknown: segments take no time */
	uint64_t noise_ns;       /* measured wake-up noise */
	bool adapt;              /* false: limit is always window_bytes */
};

struct dq_window {
	struct dq_window_profile profile;
	uint64_t limit;          /* now */
	uint64_t inflight;       /* posted and not completed */
	uint64_t inflight_peak;
	uint64_t base_ns;        /* base RTT used now; differs from the profile's after a reroute */
	uint64_t fitted_ns;      /* base RTT that the limit was last fitted to */
	uint64_t threshold_ns;   /* delay that is tolerated */
	uint64_t delay_ns;       /* smallest queueing delay of the last full round */
	uint64_t round_start_ns; /* a sample that departed at or after this ends the round */
	uint64_t round_min_ns;   /* smallest RTT of this round, DQ_NEVER = no sample */
	uint64_t fresh_ns;       /* samples that departed before this saw an older, larger window */
	bool stale;              /* no sample since the window shrank departed after that */
	uint32_t pinned_rounds;  /* rounds over the threshold at the floor, without a break */
	uint32_t pinned_limit;   /* so many of them mean a longer path */
	uint64_t pinned_min_ns;  /* smallest RTT of those */
	uint64_t shrinks;
	uint64_t grows;
	uint64_t reroutes;       /* times the base was raised */
	uint64_t skewed;         /* samples with completion before departure */
};

/* The delay that is tolerated on a path of this base RTT: Threshold, above. */
uint64_t dq_window_threshold(const struct dq_window_profile *p, uint64_t base_ns);
void dq_window_init(struct dq_window *w, const struct dq_window_profile *p);
/*
 * New profile for a running VC: in-flight bytes and statistics stay. A limit that was at the old upper bound goes to the
 * new one at once, another is clamped into the new bounds and goes on from there. What was learnt about the base stays
 * unless the profile's base RTT moved by more than an eighth: profiles are computed again and again from measurements that
 * differ a little.
 */
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
