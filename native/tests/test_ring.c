/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>
#include <pthread.h>
#include <sched.h>

#include "core/ring.h"
#include "prng.h"

struct entry {
	uint64_t number;
	uint64_t words[7];
};
_Static_assert(sizeof(struct entry) == DQ_RING_ENTRY_BYTES, "an entry");

struct pair {
	struct dq_ring_shared *shared;
	uint8_t *entries;
	struct dq_ring producer;
	struct dq_ring consumer;
};

/* Both sides start at `index`, so that the 32-bit counters can be seen to wrap. */
static void pair_init(struct pair *p, uint32_t size, uint32_t index)
{
	p->shared = aligned_alloc(128, sizeof *p->shared);
	p->entries = calloc(size, DQ_RING_ENTRY_BYTES);
	assert_non_null(p->shared);
	assert_non_null(p->entries);
	atomic_init(&p->shared->tail, index);
	atomic_init(&p->shared->head, index);
	dq_ring_init(&p->producer, p->shared, p->entries, size);
	dq_ring_init(&p->consumer, p->shared, p->entries, size);
	p->producer.mine = p->producer.theirs = index;
	p->consumer.mine = p->consumer.theirs = index;
}

static void pair_fini(struct pair *p)
{
	free(p->shared);
	free(p->entries);
}

static struct entry entry_make(uint64_t number)
{
	struct entry e = { .number = number };

	for (unsigned i = 0; i < 7; i++)
		e.words[i] = number * (i + 3) ^ 0x5aa5;
	return e;
}

static bool entry_good(const struct entry *e, uint64_t number)
{
	struct entry want = entry_make(number);

	return memcmp(e, &want, sizeof want) == 0;
}

static void test_full_and_empty(void **state)
{
	struct pair p;

	(void)state;
	pair_init(&p, 4, 0);
	assert_int_equal(dq_ring_avail(&p.consumer), 0);
	assert_int_equal(dq_ring_space(&p.producer, 1), 4);
	for (uint64_t i = 0; i < 4; i++) {
		struct entry e = entry_make(i);

		dq_ring_write(&p.producer, (uint32_t)i, &e);
	}
	/* Written is not published. */
	assert_int_equal(dq_ring_avail(&p.consumer), 0);
	dq_ring_produce(&p.producer, 4);
	assert_int_equal(dq_ring_space(&p.producer, 1), 0);
	assert_int_equal(dq_ring_avail(&p.consumer), 4);
	for (uint64_t i = 0; i < 4; i++) {
		struct entry e;

		dq_ring_read(&p.consumer, (uint32_t)i, &e);
		assert_true(entry_good(&e, i));
	}
	dq_ring_consume(&p.consumer, 1);
	assert_int_equal(dq_ring_space(&p.producer, 1), 1);
	dq_ring_consume(&p.consumer, 3);
	assert_int_equal(dq_ring_avail(&p.consumer), 0);
	/* A known space is not looked up again; one that asks for more sees it all. */
	assert_int_equal(dq_ring_space(&p.producer, 4), 4);
	pair_fini(&p);
}

/* Random batches of both sides, every size, across the wrap of the counters. */
static void test_order_across_wrap(void **state)
{
	uint64_t seed = 7;

	(void)state;
	for (uint32_t size = 2; size <= 65536; size *= 2) {
		uint64_t produced = 0, consumed = 0;
		struct pair p;

		pair_init(&p, size, UINT32_MAX - size);
		while (consumed < 4ull * size) {
			uint32_t n = prng_below(&seed, size + 1);
			int64_t space = dq_ring_space(&p.producer, n);
			int64_t avail;

			assert_in_range(space, 0, size);
			assert_true(produced - consumed + (uint64_t)space <= size);
			n = (uint32_t)DQ_MIN((int64_t)n, space);
			for (uint32_t i = 0; i < n; i++) {
				struct entry e = entry_make(produced++);

				dq_ring_write(&p.producer, i, &e);
			}
			dq_ring_produce(&p.producer, n);
			avail = prng_below(&seed, 2) ? dq_ring_avail(&p.consumer) : dq_ring_refresh(&p.consumer);
			assert_true(avail >= 0 && (uint64_t)avail <= produced - consumed);
			n = avail ? prng_below(&seed, (uint32_t)avail + 1) : 0;
			for (uint32_t i = 0; i < n; i++) {
				struct entry e;

				dq_ring_read(&p.consumer, i, &e);
				assert_true(entry_good(&e, consumed++));
			}
			dq_ring_consume(&p.consumer, n);
		}
		pair_fini(&p);
	}
}

/* Whatever the other side publishes: an error, again and again, or a count that fits the ring. */
static void test_hostile_indices(void **state)
{
	uint64_t seed = 99;

	(void)state;
	for (unsigned i = 0; i < 100000; i++) {
		uint32_t size = 2u << prng_below(&seed, 6);
		uint32_t index = (uint32_t)prng_next(&seed);
		uint32_t used = prng_below(&seed, size + 1);
		uint32_t lie = prng_below(&seed, 2) ? (uint32_t)prng_next(&seed) : index + prng_below(&seed, 3 * size) - size;
		struct dq_ring_shared shared;
		struct dq_ring r = { .shared = &shared, .mask = size - 1 };
		int64_t first;

		/* As producer: `used` entries are out, the consumer says head = lie. */
		r.mine = index + used;
		r.theirs = index;
		atomic_init(&shared.head, lie);
		first = dq_ring_space(&r, size + 1);
		if ((uint32_t)(index + used - lie) > size)
			assert_int_equal(first, -1);
		else
			assert_int_equal(first, size - (index + used - lie));
		assert_int_equal(dq_ring_space(&r, size + 1), first);

		/* As consumer with nothing left to read: the producer says tail = lie. */
		r.mine = r.theirs = index;
		atomic_init(&shared.tail, lie);
		first = dq_ring_avail(&r);
		assert_int_equal(first, (uint32_t)(lie - index) > size ? -1 : (int64_t)(uint32_t)(lie - index));
		assert_int_equal(dq_ring_avail(&r), first);
		assert_int_equal(dq_ring_refresh(&r), first);
	}
}

#define THREAD_ENTRIES 300000u

static void *producer_main(void *arg)
{
	struct pair *p = arg;
	uint64_t seed = 1, sent = 0;

	while (sent < THREAD_ENTRIES) {
		uint32_t want = 1 + prng_below(&seed, 8);
		int64_t space = dq_ring_space(&p->producer, want);
		uint32_t n = (uint32_t)DQ_MIN(DQ_MIN((int64_t)want, space), (int64_t)(THREAD_ENTRIES - sent));

		if (space == 0) {
			sched_yield();
			continue;
		}
		for (uint32_t i = 0; i < n; i++) {
			struct entry e = entry_make(sent++);

			dq_ring_write(&p->producer, i, &e);
		}
		dq_ring_produce(&p->producer, n);
	}
	return NULL;
}

static void test_two_threads(void **state)
{
	uint64_t taken = 0, bad = 0;
	pthread_t thread;
	struct pair p;

	(void)state;
	pair_init(&p, 64, UINT32_MAX - 1000);
	assert_int_equal(pthread_create(&thread, NULL, producer_main, &p), 0);
	while (taken < THREAD_ENTRIES) {
		int64_t n = dq_ring_avail(&p.consumer);

		if (n <= 0) {
			bad += n < 0;
			sched_yield();
			continue;
		}
		for (int64_t i = 0; i < n; i++) {
			struct entry e;

			dq_ring_read(&p.consumer, (uint32_t)i, &e);
			bad += !entry_good(&e, taken++);
		}
		dq_ring_consume(&p.consumer, (uint32_t)n);
	}
	pthread_join(thread, NULL);
	assert_int_equal(bad, 0);
	assert_int_equal(dq_ring_refresh(&p.consumer), 0);
	pair_fini(&p);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_full_and_empty),
		cmocka_unit_test(test_order_across_wrap),
		cmocka_unit_test(test_hostile_indices),
		cmocka_unit_test(test_two_threads),
	};

	return cmocka_run_group_tests_name("ring", tests, NULL, NULL);
}
