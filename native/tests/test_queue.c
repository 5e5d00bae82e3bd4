/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "core/queue.h"
#include "prng.h"

static void test_rate_and_idle(void **state)
{
	struct dq_queue q;

	(void)state;
	dq_queue_init(&q, 8000000000ull, 0); /* one byte a nanosecond */
	assert_int_equal(dq_queue_push(&q, 1000, 500), 1500);
	assert_int_equal(dq_queue_backlog(&q, 1000), 500);
	assert_int_equal(dq_queue_backlog(&q, 1400), 100);
	assert_int_equal(dq_queue_push(&q, 1400, 100), 1600);
	assert_int_equal(dq_queue_backlog(&q, 1600), 0);
	/* Idle time is not saved up. */
	assert_int_equal(dq_queue_push(&q, 5000, 10), 5010);
	assert_int_equal(q.peak_bytes, 500);
	assert_int_equal(q.total_bytes, 610);
}

/* At rates that do not divide, a busy queue is exact over any number of packets. */
static void test_no_drift(void **state)
{
	static const uint64_t rates[] = { 1, 7, 999999937, 3000000000ull, 100000000000ull, 400000000000ull, 799999999999ull };
	uint64_t seed = 3;

	(void)state;
	for (unsigned r = 0; r < sizeof rates / sizeof *rates; r++) {
		uint32_t most = rates[r] < 1000 ? 4 : 9000;
		struct dq_queue q;
		uint64_t total = 0;

		dq_queue_init(&q, rates[r], 0);
		for (unsigned i = 0; i < 20000; i++) {
			uint32_t bytes = prng_below(&seed, most);
			uint64_t end = dq_queue_push(&q, 0, bytes);

			__extension__ unsigned __int128 want;

			total += bytes;
			want = (unsigned __int128)total * 8000000000ull / rates[r];
			assert_int_equal(end, (uint64_t)want);
		}
		/* Rounded up to whole bytes, so what is still there is never more than a byte off. */
		assert_int_equal(dq_queue_backlog(&q, 0), total);
	}
}

static void test_limit_shows_in_backlog_only(void **state)
{
	struct dq_queue q;

	(void)state;
	dq_queue_init(&q, 8000000000ull, 1000);
	assert_int_equal(dq_queue_push(&q, 0, 5000), 5000);
	assert_int_equal(dq_queue_backlog(&q, 0), 1000);
	assert_int_equal(dq_queue_backlog(&q, 4500), 500);
	assert_int_equal(q.peak_bytes, 1000);
}

static void test_change_of_rate(void **state)
{
	struct dq_queue q;

	(void)state;
	dq_queue_init(&q, 8000000000ull, 0);
	assert_int_equal(dq_queue_push(&q, 0, 1000), 1000);
	/* What is under way keeps its time, what comes after goes at the new rate. */
	dq_queue_set_rate(&q, 100, 800000000ull, 0);
	assert_int_equal(dq_queue_push(&q, 200, 10), 1100);
	dq_queue_set_rate(&q, 300, 0, 0);
	assert_int_equal(dq_queue_push(&q, 300, 1 << 30), 1100);
	assert_int_equal(dq_queue_backlog(&q, 300), 0);
	assert_int_equal(dq_queue_push(&q, 2000, 1 << 30), 2000);
	dq_queue_set_rate(&q, 3000, 8000000000ull, 0);
	assert_int_equal(dq_queue_push(&q, 3000, 1), 3001);
}

static void test_extremes_do_not_wrap(void **state)
{
	struct dq_queue q;
	uint64_t end;

	(void)state;
	dq_queue_init(&q, 1, 0);
	end = dq_queue_push(&q, 10, UINT64_MAX);
	assert_true(end >= 10 && end < DQ_NEVER);
	assert_true(dq_queue_push(&q, 20, UINT64_MAX) >= end);
	dq_queue_init(&q, UINT64_MAX, 0);
	assert_int_equal(dq_queue_push(&q, 5, 1), 5);
	end = dq_queue_push(&q, 5, UINT64_MAX);
	assert_int_equal(end, 5 + 8000000000ull);
}

/* Order and backlog against a plain model with packets. */
static void test_against_model(void **state)
{
	uint64_t seed = 11, now = 0, prev = 0;
	struct dq_queue q;
	double free_ns = 0;

	(void)state;
	dq_queue_init(&q, 25000000000ull, 0);
	for (unsigned i = 0; i < 200000; i++) {
		uint32_t bytes = prng_below(&seed, 70000);
		uint64_t end;

		now += prng_below(&seed, 22000);
		if (free_ns < (double)now)
			free_ns = (double)now;
		free_ns += bytes * 8.0 / 25.0;
		end = dq_queue_push(&q, now, bytes);
		assert_true(end >= prev && end >= now);
		assert_true(free_ns - (double)end < 2.0 && free_ns - (double)end > -2.0);
		assert_true((double)dq_queue_backlog(&q, now) - (free_ns - (double)now) * 25.0 / 8.0 < 8.0);
		prev = end;
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_rate_and_idle),
		cmocka_unit_test(test_no_drift),
		cmocka_unit_test(test_limit_shows_in_backlog_only),
		cmocka_unit_test(test_change_of_rate),
		cmocka_unit_test(test_extremes_do_not_wrap),
		cmocka_unit_test(test_against_model),
	};

	return cmocka_run_group_tests_name("queue", tests, NULL, NULL);
}
