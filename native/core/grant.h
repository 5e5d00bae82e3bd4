/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Grants: how a receiving device splits its inbound budget among its senders. A grant is a level, not a credit: the bytes
 * one sender (VC) may have in flight to this device; with a serial, the newest wins; never under one segment. The budget is
 * about one BDP and a segment for each; it is split among the senders that have backlog or sent bytes in the last two RTTs:
 * each gets at most its own window, what one does not need goes to the others. A sender that is alone gets its window.
 * 64 receives posted to 64 peers of which one sends must not slow that one. Pure, one thread.
 */
#ifndef DQ_CORE_GRANT_H
#define DQ_CORE_GRANT_H

#include "core/base.h"

struct dq_grant_member {            /* one sender; embedded in the VC */
	struct dq_grant_member *next, *prev;
	uint64_t window_bytes;      /* what it could use: its profile's window on this path */
	uint32_t segment_bytes;
	uint64_t rtt_ns;
	uint64_t backlog_bytes;     /* as it last told */
	uint64_t last_bytes_ns;     /* when bytes of it last came in, 0 = never */
	uint64_t level_bytes;       /* granted now */
	uint32_t serial;            /* of level_bytes */
	bool changed;               /* level_bytes is not told yet */
};

struct dq_grants {                  /* one a receiving device */
	struct dq_grant_member *head;
	uint32_t members;
	uint32_t active;            /* with backlog or recent bytes at the last split */
	uint64_t budget_bytes;      /* at the last split */
	bool dirty;
};

void dq_grants_init(struct dq_grants *g);
void dq_grants_add(struct dq_grants *g, struct dq_grant_member *m, uint64_t window_bytes, uint32_t segment_bytes, uint64_t rtt_ns);
void dq_grants_remove(struct dq_grants *g, struct dq_grant_member *m);
void dq_grants_profile(struct dq_grants *g, struct dq_grant_member *m, uint64_t window_bytes, uint32_t segment_bytes, uint64_t rtt_ns);
void dq_grants_backlog(struct dq_grants *g, struct dq_grant_member *m, uint64_t backlog_bytes);
void dq_grants_bytes(struct dq_grants *g, struct dq_grant_member *m, uint32_t bytes, uint64_t now_ns);
/* Split again if something changed or a sender went quiet; marks members whose level changed by at least one segment or an
 * eighth. Returns the time to call again at the latest (DQ_NEVER: only after a change). */
uint64_t dq_grants_split(struct dq_grants *g, uint64_t now_ns);
/* What a new sender may start with: min(window, budget / senders active). */
uint64_t dq_grants_initial(const struct dq_grants *g, uint64_t window_bytes, uint32_t segment_bytes);

#endif
