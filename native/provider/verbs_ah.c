/* SPDX-License-Identifier: Apache-2.0 */
#include "provider/verbs_ah.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define MAX_SIZE 65536u

struct entry {
	struct dq_verbs_ud_peer peer;
	uint32_t flow_label;
	uint32_t next;               /* of the same bucket, or of the free ones */
	struct dq_verbs_ah *ah;      /* NULL: none yet */
	uint64_t used_ns;
	uint64_t again_ns;           /* when to make it anew: it is old, or the last attempt failed */
	uint64_t wanted;             /* place in the order of wishes; 0 = not wanted */
	uint32_t failures;           /* in a row */
	int error;                   /* of the last attempt; 0 = none failed */
	uint32_t generation;         /* of the use of this entry: what is made for an earlier one is not for this */
};

struct dq_verbs_ah_cache {
	struct dq_verbs_ah_ops ops;
	int notify_fd;
	pthread_t thread;
	pthread_mutex_t lock;        /* all below, and the uses of handles */
	pthread_cond_t wish;
	pthread_cond_t done;         /* by CLOCK_MONOTONIC */
	bool stop;
	uint32_t size, used, free;
	uint32_t mask;
	uint32_t *buckets;
	struct entry *entries;
	uint64_t wishes;
	uint32_t news;
};

static uint32_t bucket_of(const struct dq_verbs_ah_cache *c, const struct dq_verbs_ud_peer *peer, uint32_t flow_label)
{
	uint64_t h = (uint64_t)flow_label << 32 | peer->lid; /* the QP number is no part of an address handle */
	for (unsigned i = 0; i < DQ_VERBS_GID_BYTES; i += 8) {
		uint64_t word;
		memcpy(&word, peer->gid + i, sizeof word);
		h = (h ^ word ^ h >> 29) * 0x9e3779b97f4a7c15ull;
	}
	return (uint32_t)(h >> 40) & c->mask;
}

static bool is_for(const struct entry *e, const struct dq_verbs_ud_peer *peer, uint32_t flow_label)
{
	return e->flow_label == flow_label && e->peer.lid == peer->lid && e->peer.layer == peer->layer &&
	       memcmp(e->peer.gid, peer->gid, sizeof peer->gid) == 0;
}

/* Take it out of its entry; returned if nobody uses it: to be destroyed by the caller. */
static struct dq_verbs_ah *retire(struct dq_verbs_ah *ah)
{
	if (!ah)
		return NULL;
	ah->retired = true;
	return ah->uses == 0 ? ah : NULL;
}

static void destroy(struct dq_verbs_ah_cache *c, struct dq_verbs_ah *ah)
{
	if (!ah)
		return;
	c->ops.destroy(c->ops.ctx, ah->handle);
	free(ah);
}

static void wish_for(struct dq_verbs_ah_cache *c, struct entry *e)
{
	if (e->wanted)
		return;
	e->wanted = ++c->wishes;
	pthread_cond_signal(&c->wish);
}

/* The thread */

static struct entry *next_wish(struct dq_verbs_ah_cache *c)
{
	struct entry *best = NULL;
	for (uint32_t i = 0; i < c->size; i++) {
		struct entry *e = &c->entries[i];
		if (e->wanted && (!best || e->failures < best->failures ||
				  (e->failures == best->failures && e->wanted < best->wanted)))
			best = e;
	}
	return best;
}

static uint64_t patience(uint32_t failures)
{
	uint64_t ns = DQ_VERBS_AH_RETRY_NS;
	for (uint32_t i = 1; i < failures && ns < DQ_VERBS_AH_RETRY_MAX_NS; i++)
		ns *= 2;
	return DQ_MIN(ns, DQ_VERBS_AH_RETRY_MAX_NS);
}

static void *run(void *arg)
{
	struct dq_verbs_ah_cache *c = arg;
	prctl(PR_SET_NAME, "dq-address", 0ul, 0ul, 0ul);

	pthread_mutex_lock(&c->lock);
	while (!c->stop) {
		struct entry *e = next_wish(c);
		if (!e) {
			pthread_cond_wait(&c->wish, &c->lock);
			continue;
		}
		const struct dq_verbs_ud_peer peer = e->peer;
		const uint32_t flow_label = e->flow_label, generation = e->generation;
		pthread_mutex_unlock(&c->lock);

		struct dq_verbs_ah *made = calloc(1, sizeof *made);
		int rc = made ? c->ops.create(c->ops.ctx, &peer, flow_label, &made->handle) : -ENOMEM;
		if (rc) {
			free(made);
			made = NULL;
		}

		pthread_mutex_lock(&c->lock);
		struct dq_verbs_ah *old = NULL;
		if (e->generation != generation) {
			old = made; /* nobody wants it any more */
		} else {
			e->wanted = 0;
			e->error = rc;
			e->failures = rc ? e->failures + 1 : 0;
			e->again_ns = 0; /* counted from when the user sees it */
			if (made) {      /* else the old one, which may still be right */
				old = retire(e->ah);
				e->ah = made;
			}
		}
		pthread_cond_signal(&c->done);
		/* Both under the lock: who finds the descriptor readable finds the news as well, without turning in a circle. */
		const uint64_t one = 1;
		ssize_t done = write(c->notify_fd, &one, sizeof one); /* EAGAIN: is readable anyway */
		(void)done;
		c->news++;
		if (old) {
			pthread_mutex_unlock(&c->lock);
			destroy(c, old);
			pthread_mutex_lock(&c->lock);
		}
	}
	pthread_mutex_unlock(&c->lock);
	return NULL;
}

/* The user */

/* Take the entry out of its bucket; the handle is returned as by retire. */
static struct dq_verbs_ah *entry_remove(struct dq_verbs_ah_cache *c, struct entry *e)
{
	const uint32_t index = (uint32_t)(e - c->entries);
	uint32_t *at = &c->buckets[bucket_of(c, &e->peer, e->flow_label)];
	while (*at != index)
		at = &c->entries[*at].next;
	*at = e->next;
	struct dq_verbs_ah *old = retire(e->ah);
	const uint32_t generation = e->generation + 1;
	*e = (struct entry){.next = c->free, .generation = generation};
	c->free = index;
	c->used--;
	return old;
}

/* A new entry; *old: a handle to destroy. NULL: all are in use. */
static struct entry *entry_add(struct dq_verbs_ah_cache *c, const struct dq_verbs_ud_peer *peer, uint32_t flow_label,
			       struct dq_verbs_ah **old)
{
	if (c->free == DQ_NONE) {
		struct entry *oldest = NULL;
		for (struct entry *e = c->entries; e < c->entries + c->size; e++)
			if ((!e->ah || e->ah->uses == 0) && (!oldest || e->used_ns < oldest->used_ns))
				oldest = e;
		if (!oldest)
			return NULL;
		*old = entry_remove(c, oldest);
	}
	struct entry *e = &c->entries[c->free];
	const uint32_t index = c->free, bucket = bucket_of(c, peer, flow_label), generation = e->generation;
	c->free = e->next;
	*e = (struct entry){.peer = *peer, .flow_label = flow_label, .next = c->buckets[bucket], .generation = generation};
	c->buckets[bucket] = index;
	c->used++;
	return e;
}

/* The user is the only one who removes entries, so this one stays what it is. */
static void wait_for(struct dq_verbs_ah_cache *c, const struct entry *e, uint64_t wait_ns)
{
	struct timespec until;

	clock_gettime(CLOCK_MONOTONIC, &until);
	wait_ns += (uint64_t)until.tv_nsec;
	until.tv_sec += (time_t)(wait_ns / 1000000000u);
	until.tv_nsec = (long)(wait_ns % 1000000000u);
	while (e->wanted && pthread_cond_timedwait(&c->done, &c->lock, &until) != ETIMEDOUT)
		;
}

int dq_verbs_ah_take(struct dq_verbs_ah_cache *c, const struct dq_verbs_ud_peer *peer, uint32_t flow_label, uint64_t now_ns,
		     uint64_t wait_ns, struct dq_verbs_ah **out)
{
	struct dq_verbs_ah *old = NULL;
	struct entry *e = NULL;
	int rc = 0;

	pthread_mutex_lock(&c->lock);
	for (uint32_t i = c->buckets[bucket_of(c, peer, flow_label)]; i != DQ_NONE && !e; i = c->entries[i].next)
		if (is_for(&c->entries[i], peer, flow_label))
			e = &c->entries[i];
	if (!e)
		e = entry_add(c, peer, flow_label, &old);
	if (!e) {
		rc = -ENOBUFS;
	} else {
		const bool was_wanted = e->wanted != 0;
		e->used_ns = now_ns;
		if (!e->ah && !e->error) {
			wish_for(c, e);
		} else {
			if (e->again_ns == 0)
				e->again_ns = now_ns + (e->error ? patience(e->failures) : DQ_VERBS_AH_FRESH_NS);
			if (now_ns >= e->again_ns)
				wish_for(c, e);
		}
		if (wait_ns > 0 && !e->ah && e->wanted && !was_wanted)
			wait_for(c, e, wait_ns);
		if (e->ah) {
			e->ah->uses++;
			*out = e->ah;
		} else {
			rc = e->error && !e->wanted ? e->error : -EINPROGRESS;
		}
	}
	pthread_mutex_unlock(&c->lock);
	destroy(c, old);
	return rc;
}

uint32_t dq_verbs_ah_news(struct dq_verbs_ah_cache *c)
{
	pthread_mutex_lock(&c->lock);
	const uint32_t news = c->news;
	pthread_mutex_unlock(&c->lock);
	return news;
}

void dq_verbs_ah_give(struct dq_verbs_ah_cache *c, struct dq_verbs_ah *ah)
{
	pthread_mutex_lock(&c->lock);
	const bool last = --ah->uses == 0 && ah->retired;
	pthread_mutex_unlock(&c->lock);
	if (last)
		destroy(c, ah);
}

void dq_verbs_ah_flush(struct dq_verbs_ah_cache *c)
{
	for (uint32_t i = 0; i < c->mask + 1; i++)
		for (;;) {
			pthread_mutex_lock(&c->lock);
			struct entry *e = c->buckets[i] == DQ_NONE ? NULL : &c->entries[c->buckets[i]];
			struct dq_verbs_ah *old = e ? entry_remove(c, e) : NULL;
			pthread_mutex_unlock(&c->lock);
			if (!e)
				break;
			destroy(c, old);
		}
}

static void cache_free(struct dq_verbs_ah_cache *c)
{
	pthread_cond_destroy(&c->wish);
	pthread_cond_destroy(&c->done);
	pthread_mutex_destroy(&c->lock);
	free(c->buckets);
	free(c->entries);
	free(c);
}

int dq_verbs_ah_cache_create(unsigned size, const struct dq_verbs_ah_ops *ops, int notify_fd, struct dq_verbs_ah_cache **out)
{
	if (size == 0 || size > MAX_SIZE)
		return -EINVAL;
	struct dq_verbs_ah_cache *c = calloc(1, sizeof *c);
	if (!c)
		return -ENOMEM;
	c->ops = *ops;
	c->notify_fd = notify_fd;
	c->size = size;
	for (c->mask = 1; c->mask < size; c->mask = c->mask << 1 | 1)
		;
	pthread_mutex_init(&c->lock, NULL);
	pthread_cond_init(&c->wish, NULL);
	pthread_condattr_t monotonic;
	pthread_condattr_init(&monotonic);
	pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
	pthread_cond_init(&c->done, &monotonic);
	pthread_condattr_destroy(&monotonic);
	c->entries = calloc(size, sizeof *c->entries);
	c->buckets = malloc(((size_t)c->mask + 1) * sizeof *c->buckets);
	if (!c->entries || !c->buckets) {
		cache_free(c);
		return -ENOMEM;
	}
	for (uint32_t i = 0; i <= c->mask; i++)
		c->buckets[i] = DQ_NONE;
	for (uint32_t i = 0; i < size; i++)
		c->entries[i].next = i + 1 < size ? i + 1 : DQ_NONE;

	/* Signals are the daemon's business: they must not land in this thread. */
	sigset_t all, before;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	const int failed = pthread_create(&c->thread, NULL, run, c);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (failed) {
		cache_free(c);
		return -failed;
	}
	*out = c;
	return 0;
}

void dq_verbs_ah_cache_destroy(struct dq_verbs_ah_cache *c)
{
	if (!c)
		return;
	pthread_mutex_lock(&c->lock);
	c->stop = true;
	pthread_cond_signal(&c->wish);
	pthread_mutex_unlock(&c->lock);
	pthread_join(c->thread, NULL);
	dq_verbs_ah_flush(c);
	cache_free(c);
}
