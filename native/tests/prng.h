/* SPDX-License-Identifier: Apache-2.0 */
/* A small seeded generator (splitmix64), so that a property test that fails fails again the same way. */
#ifndef DQ_TESTS_PRNG_H
#define DQ_TESTS_PRNG_H

#include <stdint.h>

static inline uint64_t prng_next(uint64_t *state)
{
	uint64_t z = *state += 0x9e3779b97f4a7c15ull;

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

/* 0 .. n-1 */
static inline uint32_t prng_below(uint64_t *state, uint32_t n)
{
	return (uint32_t)(prng_next(state) % n);
}

#endif
