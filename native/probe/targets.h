/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The peers that a prober knows: by the caller's id, and by the endpoint that their datagrams come from. Pure but for the
 * allocation at set-up. Two ids may have the same endpoint; the one set last is then found by it.
 */
#ifndef DQ_PROBE_TARGETS_H
#define DQ_PROBE_TARGETS_H

#include "probe/limiter.h"
#include "provider/provider.h"

struct dq_target {
	struct dq_endpoint endpoint;  /* len is 0: the id is not used */
	uint64_t token;               /* the peer's: shown in everything sent there */
	uint32_t flow_label;
	struct dq_link *link;
	uint64_t interval_ns;
	struct dq_limiter limiter;
	uint32_t generation;          /* another one for each user of the id */
	uint32_t chain;               /* next with the same hash: id + 1, 0 = last */
	uint32_t extra;               /* extra probes that wait to be sent */
};

struct dq_targets {
	struct dq_target *table;
	uint32_t *buckets;            /* hash of the endpoint → id + 1 */
	uint32_t bucket_mask;
	uint32_t max;
	uint32_t count;
	uint64_t seed;
};

/* seed: random, so that peers cannot choose their bucket. 0 or -ENOMEM; then nothing is to be destroyed. */
int dq_targets_init(struct dq_targets *t, uint32_t max, uint64_t seed);
void dq_targets_destroy(struct dq_targets *t); /* a zeroed one is fine */
/* Make id the peer at this endpoint; only its own fields change when it is already. id < max, 1 <= len <= DQ_ENDPOINT_MAX. */
struct dq_target *dq_targets_set(struct dq_targets *t, uint32_t id, const struct dq_endpoint *endpoint);
/* id must be in use. */
void dq_targets_remove(struct dq_targets *t, uint32_t id);
/* NULL when the endpoint (of any length) is not known. */
struct dq_target *dq_targets_find(struct dq_targets *t, const struct dq_endpoint *from);

static inline struct dq_target *dq_targets_get(struct dq_targets *t, uint32_t id) /* NULL: not used. id < max */
{
	return t->table[id].endpoint.len ? &t->table[id] : NULL;
}

/* The peer that had the id when the generation was read; NULL when it is gone. */
static inline struct dq_target *dq_targets_same(struct dq_targets *t, uint32_t id, uint32_t generation)
{
	struct dq_target *target = dq_targets_get(t, id);
	return target && target->generation == generation ? target : NULL;
}

static inline uint32_t dq_targets_id(const struct dq_targets *t, const struct dq_target *target)
{
	return (uint32_t)(target - t->table);
}

bool dq_endpoint_same(const struct dq_endpoint *a, const struct dq_endpoint *b);

#endif
