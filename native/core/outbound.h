/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The outbound budget of a device: what its VCs may have in flight together. Windows and grants bound what goes to one peer;
 * a device that sends to a hundred peers at once overruns what they share, the way out of its rack, zone or building, though
 * each of them stays within its own bounds. Nobody told this host how fast that way is, nor who else uses it: the delay
 * does. Pure: time is an argument. One thread.
 *
 * The rule.
 *  Group     VCs whose base RTT is of the same octave: about the same distance, so about the same way. Each group has a
 *            scale, the fraction of its share that it may have in flight.
 *  Share     A device's VCs with something to send (active) share one pipe. Of a group: mean window x active of the group /
 *            active of the device. Limit = scale x share, at most one mean window, + DQ_OUTBOUND_MARGIN segments.
 *  Turns     VCs that find the limit reached wait in line. A turn is one segment, and up to DQ_OUTBOUND_TURN of them for one
 *            with more backlog than the mean of those that wait: so what is posted together ends together, and a receiver
 *            that everybody sends much to is not idle at first and last to be done.
 *  Start     At 3/8, doubled after each RTT in which the limit was reached and nothing queued, until something does, and not
 *            only where the first few segments met with those of others. Ways out of a place are oversubscribed by two or
 *            three as a rule. A VC alone, too: many hosts that begin at once have one VC each in a ring.
 *  Ramp      Raised limits, and those of a group that was idle for an RTT, are not there at once but grow over one RTT, from
 *            the old one or from nothing. So the first bytes leave at the rate that the limit means, not at that of the NIC,
 *            and a queue of a burst never forms. Whole pipes are larger than what the NIC can send in an RTT: where scale is
 *            1 this costs nothing.
 *  Delay     After each RTT: scale = used x base / (base + delay) + target / mean window, where used is the scale that
 *            was in flight, delay the mean of the group's samples of one RTT. By Little's law that keeps `target` bytes of
 *            this group in queues, wherever they are, and gives VCs on a shared way about the same rate whatever their RTT,
 *            since target is the mean of all active VCs' (rate x what a window tolerates as delay), times (2 + used) / 3:
 *            on a narrower way fewer bytes are the same delay. Down at once, at most by half; up by half of the way.
 *  Samples   completion - base - departure - (departure - post). The mean, since it is queues in all that count, and one
 *            segment's luck with its path does not. The NIC takes its QPs in turn and not in the order of posts, so that
 *            segments leave up to as much later than the departure model says as that makes them wait: twice the wait is
 *            subtracted. What the host's own wake-ups add (noise) is too.
 */
#ifndef DQ_CORE_OUTBOUND_H
#define DQ_CORE_OUTBOUND_H

#include "core/base.h"

#define DQ_OUTBOUND_GROUPS 40u /* octaves of base RTT in ns: up to half an hour */
#define DQ_OUTBOUND_MARGIN 2u  /* segments */
#define DQ_OUTBOUND_TURN 8u    /* segments */
#define DQ_OUTBOUND_SMALL 8192u /* bytes: a VC with no more than this, and nothing in flight, does not wait */

struct dq_outbound_member {         /* one VC; embedded in it */
	struct dq_outbound_member *next, *prev; /* in the line of those that wait */
	uint64_t window_bytes;
	uint64_t target_bytes;      /* in queues, if it were alone */
	uint64_t noise_ns;
	uint64_t inflight;
	uint64_t backlog_bytes;     /* when it began to wait */
	uint32_t group;
	uint32_t segment_bytes;     /* that it waits for, or that are promised */
	uint32_t turn;              /* segments that it may post without regard to the limit */
	bool on;                    /* joined */
	bool active;                /* has something to send or in flight */
	bool waiting;
	bool promised;              /* its turn has come, and it has not posted yet */
};

struct dq_outbound_group {
	struct dq_outbound_member *head, *tail; /* those that wait */
	uint32_t active, waiting;
	uint64_t windows;           /* of the active ones */
	uint64_t backlog;           /* of the waiting ones */
	uint64_t inflight;
	uint64_t promised;          /* to those whose turn has come */
	double from, scale;         /* the limit goes from one to the other within base_ns of ramp_ns */
	uint64_t ramp_ns;
	uint64_t base_ns;           /* of its last sample */
	uint64_t idle_ns;           /* when its last segment completed */
	uint64_t fresh_ns;          /* samples that departed before this saw an older, larger limit */
	uint64_t round_start_ns;    /* a sample that departed at or after this ends the round */
	uint64_t peak;              /* most in flight in this round */
	int64_t delay_sum_ns;
	uint64_t samples;
	uint64_t delay_ns;          /* mean of the last round */
	uint64_t shrinks, grows;
	bool begun;                 /* scale is set */
	bool doubling;              /* nothing ever queued yet */
	bool limited;               /* somebody waited in this round */
	bool stale;                 /* no sample since the limit shrank departed after that */
};

struct dq_outbound {                /* one a sending device; all zeros is a valid start */
	struct dq_outbound_group groups[DQ_OUTBOUND_GROUPS];
	uint32_t active;            /* members with something to send or in flight */
	uint32_t waiting;
	uint64_t targets;           /* of the active ones */
};

/*
 * m takes part, or goes on with other numbers. base_ns > 0; target_bytes: what may queue of it; in flight and waiting stay.
 */
void dq_outbound_join(struct dq_outbound *o, struct dq_outbound_member *m, uint64_t window_bytes, uint64_t target_bytes,
		      uint64_t base_ns, uint64_t noise_ns);
void dq_outbound_leave(struct dq_outbound *o, struct dq_outbound_member *m); /* no-op when it takes no part; likewise below */
void dq_outbound_active(struct dq_outbound *o, struct dq_outbound_member *m, bool active);
/* May m post a segment now? If not it waits, until dq_outbound_next gives it its turn. */
bool dq_outbound_admits(struct dq_outbound *o, struct dq_outbound_member *m, uint32_t bytes, uint64_t backlog_bytes, uint64_t now_ns);
void dq_outbound_post(struct dq_outbound *o, struct dq_outbound_member *m, uint32_t bytes);
/* A segment completed, or was flushed (sample false). wait_ns = departure - post; base_ns: of its path, as known now. */
void dq_outbound_done(struct dq_outbound *o, struct dq_outbound_member *m, uint32_t bytes, uint64_t departure_ns, uint64_t wait_ns,
		      uint64_t completion_ns, uint64_t base_ns, bool sample);
/* m has posted what it can: what is left of its turn goes to others. */
void dq_outbound_pass(struct dq_outbound *o, struct dq_outbound_member *m);
/* Whose turn it is: its owner lets it post, soon. NULL: nobody's. Call it after completions, and when dq_outbound_due says. */
struct dq_outbound_member *dq_outbound_next(struct dq_outbound *o, uint64_t now_ns);
/* When the ramp of a group will admit the next that waits; DQ_NEVER: only completions will. */
uint64_t dq_outbound_due(const struct dq_outbound *o, uint64_t now_ns);

#endif
