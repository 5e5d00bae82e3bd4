/* SPDX-License-Identifier: Apache-2.0 */
#include "core/map.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static uint32_t slot_of(const struct dq_map *m, uint64_t key)
{
	uint64_t h = key * 0x9e3779b97f4a7c15ull; /* Fibonacci hashing; keys are not chosen by peers */
	uint32_t i = (uint32_t)(h >> 32) & (m->room - 1);
	while (m->entries[i].value != DQ_NONE && m->entries[i].key != key)
		i = (i + 1) & (m->room - 1);
	return i;
}

void dq_map_fini(struct dq_map *m)
{
	free(m->entries);
	memset(m, 0, sizeof *m);
}

uint32_t dq_map_get(const struct dq_map *m, uint64_t key)
{
	return m->room ? m->entries[slot_of(m, key)].value : DQ_NONE;
}

static int grow(struct dq_map *m)
{
	struct dq_map old = *m;
	m->room = old.room ? old.room * 2 : 64;
	m->entries = malloc(m->room * sizeof *m->entries);
	if (!m->entries) {
		*m = old;
		return -ENOMEM;
	}
	for (uint32_t i = 0; i < m->room; i++)
		m->entries[i].value = DQ_NONE;
	for (uint32_t i = 0; i < old.room; i++)
		if (old.entries[i].value != DQ_NONE)
			m->entries[slot_of(m, old.entries[i].key)] = old.entries[i];
	free(old.entries);
	return 0;
}

int dq_map_set(struct dq_map *m, uint64_t key, uint32_t value)
{
	uint32_t i;
	if (m->used * 2 >= m->room && grow(m))
		return -ENOMEM;
	i = slot_of(m, key);
	m->used += m->entries[i].value == DQ_NONE;
	m->entries[i] = (struct dq_map_entry){ key, value };
	return 0;
}

void dq_map_remove(struct dq_map *m, uint64_t key)
{
	uint32_t hole, i;
	if (!m->room)
		return;
	hole = slot_of(m, key);
	if (m->entries[hole].value == DQ_NONE)
		return;
	m->used--;
	/* Close the gap: move back what would no longer be found from its own place. */
	for (i = (hole + 1) & (m->room - 1); m->entries[i].value != DQ_NONE; i = (i + 1) & (m->room - 1)) {
		uint32_t home = (uint32_t)((m->entries[i].key * 0x9e3779b97f4a7c15ull) >> 32) & (m->room - 1);
		if (((i - home) & (m->room - 1)) >= ((i - hole) & (m->room - 1))) {
			m->entries[hole] = m->entries[i];
			hole = i;
		}
	}
	m->entries[hole].value = DQ_NONE;
}
