/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Grants: how a receiving device splits its inbound budget among its senders. A grant is a level, not a credit: the bytes
 * one sender (VC) may have in flight to this device; with a serial, the newest wins; never under one segment. 64 receives
 * posted to 64 peers of which one sends must not slow that one. Pure, one thread.
 *
 * The rule.
 *  Active    A sender that has backlog, or whose bytes came in within its last two RTTs (plus the host's noise). Backlog
 *            without any bytes for DQ_GRANT_STALE_NS counts no longer: whatever holds that sender back, others can go on.
 *  Pipe      Of a sender: the bytes in flight that fill the device from there, rate x RTT (its window when the device's
 *            rate is unknown). What is split is not bytes but the pipe: near and far senders get the same share of the
 *            device's rate, each in bytes of its own RTT. Split evenly in bytes, their rates would differ as their RTTs
 *            do; each with its whole window, the queue would be nearly as long as the longest window.
 *  Split     Shares of the active senders sum to one pipe, evenly, but none gets more than its own window can use; what it
 *            leaves goes to the others (water-filling). Level = share x pipe + margin + one segment, at most the window.
 *            The segment because a sender posts whole ones, and what a level has above the last multiple is lost. The
 *            margin because segments of several senders meet and wait for each other, and shares without any leave gaps:
 *            a segment for each, but not over DQ_GRANT_MARGIN segments in all. Alone, a sender gets its whole window.
 *  Idle      A sender that is not active keeps a level to start with. One that sent in the last DQ_GRANT_WARM_NS (warm): the
 *            share if all warm ones were active, so that a lone partner of questions and answers always has its whole
 *            window, while the 64 of the last all-to-all begin the next with a 64th each. Any other (cold): the share if
 *            all members were active. So however many wake up at once, they overrun the budget by two budgets and a few
 *            segments each at most. Those whose news come first are then given the shares of those that are not known yet,
 *            for the RTT until the next levels arrive: a window x (1 + 1/2 + ... + 1/n) in all, and not n windows.
 *  Boost     RTTs are longer than the profile's while queues stand elsewhere, and not everybody uses its share. So each round
 *            (the longest RTT of the active ones) looks at what came in: when that was less than DQ_GRANT_FULL of the
 *            device's rate, all shares are raised by as much, at most by half a round and to twice in all; when the device
 *            was full they sink back. Incast fills the device, and so boosts nothing.
 *  Drained   A sender that says it has no backlog any more gives its share away at once: the others' bytes that follow from
 *            their new levels arrive an RTT later, when its last ones are here.
 *  Told      A level is news when it differs from the one told by a segment or by an eighth; smaller steps are not worth
 *            a message, so the levels told may exceed the split by an eighth.
 */
#ifndef DQ_CORE_GRANT_H
#define DQ_CORE_GRANT_H

#include "core/base.h"

#define DQ_GRANT_STALE_NS 1000000000ull
#define DQ_GRANT_WARM_NS 1000000000ull
#define DQ_GRANT_MARGIN 4u /* segments */
#define DQ_GRANT_FULL 0.96 /* of the device's rate: headers take the rest */
#define DQ_GRANT_BOOST 2.0

struct dq_grant_member {            /* one sender; embedded in the VC */
	struct dq_grant_member *next, *prev;
	uint64_t window_bytes;      /* what it could use: its profile's window on this path */
	uint32_t segment_bytes;
	uint64_t rtt_ns;
	uint64_t backlog_bytes;     /* as it last told, less what came in since */
	uint64_t backlog_ns;        /* of the first split that saw this backlog, 0 = none did */
	uint64_t drained_ns;        /* until when its bytes are the last of what it had */
	uint64_t last_bytes_ns;     /* when bytes of it last came in, 0 = never */
	uint64_t level_bytes;       /* granted now */
	uint64_t pipe_bytes;        /* private to the split */
	double share;               /* of the device's rate at the last split; private to the split */
	uint32_t serial;            /* of level_bytes, from 1 on, wraps around */
	bool active;                /* at the last split */
	bool drained;               /* it said so since the last split */
	bool warm;                  /* active, or was in the last DQ_GRANT_WARM_NS */
	bool changed;               /* level_bytes is not told yet: the caller tells it and clears this */
};

struct dq_grants {                  /* one a receiving device */
	struct dq_grant_member *head, *tail; /* warm ones first */
	uint32_t members;
	uint32_t active;            /* with backlog or recent bytes at the last split */
	uint32_t warm;
	uint64_t budget_bytes;      /* at the last split: of the active senders, shares in bytes of their pipes, and margins */
	uint64_t rate_bps;          /* of the device, 0 = unknown */
	uint64_t noise_ns;          /* time that bytes may be late for reasons of this host */
	double boost;               /* of all shares, from 1 on */
	uint64_t round_ns;          /* longest RTT of the active senders at the last split */
	uint64_t round_start_ns;
	uint64_t round_bytes;       /* that came in since */
	bool dirty;                 /* the active senders are others than at the last split */
	bool resized;               /* members, windows or the device are others: the cold ones' levels too are to be looked at */
};

void dq_grants_init(struct dq_grants *g);
/* Rate and noise of the device; may change at any time. */
void dq_grants_device(struct dq_grants *g, uint64_t rate_bps, uint64_t noise_ns);
/* A new member is to be told its level (changed is set): dq_grants_initial's, until the next split. */
void dq_grants_add(struct dq_grants *g, struct dq_grant_member *m, uint64_t window_bytes, uint32_t segment_bytes, uint64_t rtt_ns);
void dq_grants_remove(struct dq_grants *g, struct dq_grant_member *m);
void dq_grants_profile(struct dq_grants *g, struct dq_grant_member *m, uint64_t window_bytes, uint32_t segment_bytes, uint64_t rtt_ns);
void dq_grants_backlog(struct dq_grants *g, struct dq_grant_member *m, uint64_t backlog_bytes);
/* private: a round is over */
void dq_grants_round(struct dq_grants *g, uint64_t now_ns);
/* private: m, which was not active, has something to send */
void dq_grants_wake(struct dq_grants *g, struct dq_grant_member *m);
/* Bytes of m came in at now_ns (> 0). */
static inline void dq_grants_bytes(struct dq_grants *g, struct dq_grant_member *m, uint32_t bytes, uint64_t now_ns)
{
	m->last_bytes_ns = now_ns;
	g->round_bytes += bytes;
	if (DQ_UNLIKELY(now_ns - g->round_start_ns >= g->round_ns))
		dq_grants_round(g, now_ns);
	if (m->backlog_bytes && m->backlog_bytes <= bytes)
		g->dirty = true; /* from here on it counts as active for two RTTs only: the next split must know */
	m->backlog_bytes -= DQ_MIN(m->backlog_bytes, (uint64_t)bytes);
	if (DQ_UNLIKELY(!m->active) && now_ns > m->drained_ns)
		dq_grants_wake(g, m);
}
/*
 * Split again if something changed or a sender went quiet; marks the members whose level is news. Returns the time to call
 * again at the latest (DQ_NEVER: only after a change). Costs a walk over the warm senders; over all members only when
 * members or windows changed.
 */
uint64_t dq_grants_split(struct dq_grants *g, uint64_t now_ns);
/* What a new sender may start with: about window / (members and this one), at least a segment. */
uint64_t dq_grants_initial(const struct dq_grants *g, uint64_t window_bytes, uint32_t segment_bytes);

#endif
