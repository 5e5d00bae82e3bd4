/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Address handles of a datagram endpoint, by peer and flow label. Making one may have to ask the network for the peer's MAC
 * address, which takes until the peer answers, or a second when it does not. So a thread of the cache makes them, those never
 * tried before those that failed; the user is told by an event fd and asks again.
 *
 * The least recently used goes when the cache is full; all go when the local address changed. Each is made anew after a while,
 * because peers move to other MAC addresses; the old one is used until the new one is there. What could not be made is tried
 * again after a time that doubles. One that is in use is not destroyed before it is given back.
 *
 * Threads: one user; functions of dq_verbs_ah_ops are called by the user's and by the cache's thread. Knows no libibverbs.
 */
#ifndef DQ_PROVIDER_VERBS_AH_H
#define DQ_PROVIDER_VERBS_AH_H

#include "provider/verbs_ud.h"

#define DQ_VERBS_AH_FRESH_NS 30000000000ull      /* older ones are made anew when they are used */
#define DQ_VERBS_AH_RETRY_NS 250000000ull        /* after the first failure */
#define DQ_VERBS_AH_RETRY_MAX_NS 32000000000ull

struct dq_verbs_ah_ops {
	int (*create)(void *ctx, const struct dq_verbs_ud_peer *peer, uint32_t flow_label, void **handle); /* may block */
	void (*destroy)(void *ctx, void *handle);
	void *ctx;
};

struct dq_verbs_ah {                 /* belongs to the cache; valid between take and give */
	void *handle;
	uint32_t uses;
	bool retired;                /* in no entry any more: destroyed with its last use */
};

struct dq_verbs_ah_cache;

/* size: most handles kept, 1 to 65536. notify_fd: eventfd to which the thread writes when something was made, or could not be;
 * stays the caller's. Negative errno when there is no memory or no thread. */
int dq_verbs_ah_cache_create(unsigned size, const struct dq_verbs_ah_ops *ops, int notify_fd, struct dq_verbs_ah_cache **out);
/* All were given back. Waits for the handle being made. */
void dq_verbs_ah_cache_destroy(struct dq_verbs_ah_cache *c);
/* 0: *out is in use until it is given back. -EINPROGRESS: it is being made. -ENOBUFS: all are in use. Else: why it could not be
 * made, until it is time to try again. wait_ns: the one who asks first waits so long, at most. */
int dq_verbs_ah_take(struct dq_verbs_ah_cache *c, const struct dq_verbs_ud_peer *peer, uint32_t flow_label, uint64_t now_ns,
		     uint64_t wait_ns, struct dq_verbs_ah **out);
/* How often notify_fd was written to. One not seen before: read the descriptor, and ask again for what was being made. */
uint32_t dq_verbs_ah_news(struct dq_verbs_ah_cache *c);
void dq_verbs_ah_give(struct dq_verbs_ah_cache *c, struct dq_verbs_ah *ah);
/* The local address changed: forget all. */
void dq_verbs_ah_flush(struct dq_verbs_ah_cache *c);

#endif
