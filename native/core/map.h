/* SPDX-License-Identifier: Apache-2.0 */
/* A hash map from 64-bit keys to 32-bit values: open addressing, grows by doubling. One thread. */
#ifndef DQ_CORE_MAP_H
#define DQ_CORE_MAP_H

#include "core/base.h"

struct dq_map_entry {
	uint64_t key;
	uint32_t value;    /* DQ_NONE: free */
};

struct dq_map {
	struct dq_map_entry *entries;
	uint32_t room;     /* power of two, 0 before the first entry */
	uint32_t used;
};

void dq_map_fini(struct dq_map *m);
uint32_t dq_map_get(const struct dq_map *m, uint64_t key);              /* DQ_NONE when it is not there */
int dq_map_set(struct dq_map *m, uint64_t key, uint32_t value);         /* value not DQ_NONE; 0 or -ENOMEM */
void dq_map_remove(struct dq_map *m, uint64_t key);

#endif
