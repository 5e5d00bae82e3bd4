/* SPDX-License-Identifier: Apache-2.0 */
/* The pure parts of the shim: the ordered copy and the arena of staging memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "shim/arena.h"
#include "shim/copy.h"

static uint32_t prng(uint32_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 17;
	*state ^= *state << 5;
	return *state;
}

/* --- copy ------------------------------------------------------------------------------------------------------- */

static void test_copy_is_exact(void **state)
{
	enum { MOST = 600, EDGE = 16 };
	static _Alignas(64) uint8_t from[MOST + 2 * EDGE], to[MOST + 2 * EDGE];
	uint32_t x = 1;

	(void)state;
	for (size_t i = 0; i < sizeof from; i++)
		from[i] = (uint8_t)prng(&x);
	for (size_t target = 0; target < EDGE; target++)
		for (size_t source = 0; source < EDGE; source += 3)
			for (size_t bytes = 0; bytes <= MOST; bytes += bytes < 150 ? 1 : 37) {
				memset(to, 0xc3, sizeof to);
				dq_copy_ordered(to + target, from + source, bytes);
				if (memcmp(to + target, from + source, bytes) != 0)
					fail_msg("%zu bytes, target %zu, source %zu", bytes, target, source);
				for (size_t i = 0; i < sizeof to; i++)
					if ((i < target || i >= target + bytes) && to[i] != 0xc3)
						fail_msg("%zu bytes, target %zu: byte %zu outside was written", bytes, target, i);
			}
}

#define LINES 64
#define LINE_WORDS 16

static _Alignas(128) _Atomic uint64_t polled[LINES * LINE_WORDS];
static _Atomic uint64_t rounds_seen;
static _Atomic bool wrong;

/* A reader as NCCL's LL128: sees the flag in a line's last word, then takes the line. */
static void *poll_lines(void *arg)
{
	uint64_t rounds = *(uint64_t *)arg;

	for (uint64_t round = 1; round <= rounds && !wrong; round++) {
		for (unsigned line = LINES; line-- > 0;) { /* the last first: then all before it must be there */
			_Atomic uint64_t *words = &polled[line * LINE_WORDS];

			while (atomic_load_explicit(&words[LINE_WORDS - 1], memory_order_acquire) != round)
				sched_yield();
			for (unsigned i = 0; i < LINE_WORDS; i++)
				if (atomic_load_explicit(&words[i], memory_order_relaxed) != round)
					wrong = true;
		}
		rounds_seen = round;
	}
	return NULL;
}

static void test_copy_order_for_flag_pollers(void **state)
{
	static uint64_t source[LINES * LINE_WORDS];
	uint64_t rounds = 2000;
	pthread_t reader;

	(void)state;
	assert_int_equal(pthread_create(&reader, NULL, poll_lines, &rounds), 0);
	for (uint64_t round = 1; round <= rounds && !wrong; round++) {
		for (unsigned i = 0; i < LINES * LINE_WORDS; i++)
			source[i] = round;
		dq_copy_ordered((void *)(uintptr_t)polled, source, sizeof source);
		while (rounds_seen < round && !wrong)
			sched_yield();
	}
	pthread_join(reader, NULL);
	assert_false(wrong);
}

/* --- arena ------------------------------------------------------------------------------------------------------ */

static void test_arena_bounds(void **state)
{
	struct dq_arena a;

	(void)state;
	assert_int_equal(dq_arena_init(&a, 0), -EINVAL);
	assert_int_equal(dq_arena_init(&a, UINT64_MAX), -EINVAL);
	assert_int_equal(dq_arena_init(&a, 5 * DQ_ARENA_GRANULE - 1), 0); /* rounded up */
	assert_int_equal(dq_arena_take(&a, 0), UINT32_MAX);
	assert_int_equal(dq_arena_take(&a, 5 * DQ_ARENA_GRANULE + 1), UINT32_MAX);
	assert_int_equal(dq_arena_take(&a, UINT64_MAX - 10 * DQ_ARENA_GRANULE), UINT32_MAX);
	assert_int_equal(dq_arena_take(&a, 5 * DQ_ARENA_GRANULE), 0);
	assert_int_equal(dq_arena_take(&a, 1), UINT32_MAX);
	assert_false(dq_arena_give(&a, 1));
	assert_false(dq_arena_give(&a, 5));
	assert_true(dq_arena_give(&a, 0));
	assert_false(dq_arena_give(&a, 0));
	assert_int_equal(a.used, 0);
	dq_arena_destroy(&a);
}

static void test_arena_against_a_map(void **state)
{
	enum { GRANULES = 777, PIECES = 200 };
	static uint8_t map[GRANULES];
	struct {
		uint32_t first, length;
	} pieces[PIECES] = {0};
	struct dq_arena a;
	uint32_t x = 99, used = 0;

	(void)state;
	assert_int_equal(dq_arena_init(&a, (uint64_t)GRANULES * DQ_ARENA_GRANULE), 0);
	for (int step = 0; step < 30000; step++) {
		uint32_t i = prng(&x) % PIECES;

		if (pieces[i].length) {
			assert_true(dq_arena_give(&a, pieces[i].first));
			memset(map + pieces[i].first, 0, pieces[i].length);
			used -= pieces[i].length;
			pieces[i].length = 0;
		} else {
			uint32_t want = 1 + prng(&x) % (prng(&x) % 8 ? 8 : 120);
			uint32_t first = dq_arena_take(&a, (uint64_t)want * DQ_ARENA_GRANULE - prng(&x) % DQ_ARENA_GRANULE);
			uint32_t longest = 0;

			for (uint32_t k = 0, run = 0; k < GRANULES; k++) {
				run = map[k] ? 0 : run + 1;
				longest = run > longest ? run : longest;
			}
			/* Refused exactly when no free run is long enough: neighbours are merged. */
			assert_int_equal(first == UINT32_MAX, longest < want);
			if (first == UINT32_MAX)
				continue;
			assert_true(first + want <= GRANULES);
			for (uint32_t k = first; k < first + want; k++) {
				assert_int_equal(map[k], 0);
				map[k] = 1;
			}
			pieces[i].first = first;
			pieces[i].length = want;
			used += want;
		}
		assert_int_equal(a.used, used);
	}
	for (int i = 0; i < PIECES; i++)
		if (pieces[i].length)
			assert_true(dq_arena_give(&a, pieces[i].first));
	assert_int_equal(dq_arena_take(&a, (uint64_t)GRANULES * DQ_ARENA_GRANULE), 0);
	dq_arena_destroy(&a);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_copy_is_exact),
		cmocka_unit_test(test_copy_order_for_flag_pollers),
		cmocka_unit_test(test_arena_bounds),
		cmocka_unit_test(test_arena_against_a_map),
	};
	return cmocka_run_group_tests_name("shim parts", tests, NULL, NULL);
}
