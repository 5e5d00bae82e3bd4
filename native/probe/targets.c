/* SPDX-License-Identifier: Apache-2.0 */
#include "probe/targets.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

bool dq_endpoint_same(const struct dq_endpoint *a, const struct dq_endpoint *b)
{
	return a->len == b->len && a->len <= DQ_ENDPOINT_MAX && memcmp(a->data, b->data, a->len) == 0;
}

static uint32_t *bucket_of(struct dq_targets *t, const struct dq_endpoint *e)
{
	uint64_t h = t->seed ^ e->len;
	for (unsigned i = 0; i < e->len; i++) {
		h = (h ^ e->data[i]) * 0x9e3779b97f4a7c15ull;
		h ^= h >> 29;
	}
	return &t->buckets[(h ^ h >> 32) & t->bucket_mask];
}

static void unlink_id(struct dq_targets *t, uint32_t id)
{
	uint32_t *at = bucket_of(t, &t->table[id].endpoint);
	while (*at != id + 1)
		at = &t->table[*at - 1].chain;
	*at = t->table[id].chain;
}

int dq_targets_init(struct dq_targets *t, uint32_t max, uint64_t seed)
{
	uint32_t buckets = 64;
	while (buckets < max)
		buckets *= 2;
	/* calloc: pages of ids never used are never touched. */
	*t = (struct dq_targets){ .max = max, .seed = seed, .bucket_mask = buckets - 1 };
	t->table = calloc(max, sizeof *t->table);
	t->buckets = calloc(buckets, sizeof *t->buckets);
	if (t->table && t->buckets)
		return 0;
	dq_targets_destroy(t);
	return -ENOMEM;
}

void dq_targets_destroy(struct dq_targets *t)
{
	free(t->table);
	free(t->buckets);
	*t = (struct dq_targets){ 0 };
}

struct dq_target *dq_targets_set(struct dq_targets *t, uint32_t id, const struct dq_endpoint *endpoint)
{
	struct dq_target *target = &t->table[id];
	if (dq_endpoint_same(&target->endpoint, endpoint))
		return target;
	if (target->endpoint.len)
		unlink_id(t, id);
	else
		t->count++;
	uint32_t *bucket = bucket_of(t, endpoint);
	*target = (struct dq_target){ .endpoint = *endpoint, .generation = target->generation + 1, .chain = *bucket };
	*bucket = id + 1;
	return target;
}

void dq_targets_remove(struct dq_targets *t, uint32_t id)
{
	unlink_id(t, id);
	t->table[id] = (struct dq_target){ .generation = t->table[id].generation };
	t->count--;
}

struct dq_target *dq_targets_find(struct dq_targets *t, const struct dq_endpoint *from)
{
	if (from->len == 0 || from->len > DQ_ENDPOINT_MAX)
		return NULL;
	for (uint32_t at = *bucket_of(t, from); at != 0; at = t->table[at - 1].chain)
		if (dq_endpoint_same(&t->table[at - 1].endpoint, from))
			return &t->table[at - 1];
	return NULL;
}
