/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <errno.h>
#include <cmocka.h>

#include "core/slab.h"
#include "prng.h"

static void test_bad_arguments(void **state)
{
	struct dq_slab s;

	(void)state;
	assert_int_equal(dq_slab_init(&s, 0, 8, 8), -EINVAL);
	assert_int_equal(dq_slab_init(&s, 8, 0, 8), -EINVAL);
	assert_int_equal(dq_slab_init(&s, 8, 3, 8), -EINVAL);
	assert_int_equal(dq_slab_init(&s, 8, 8, 0), -EINVAL);
	assert_int_equal(dq_slab_init(&s, 8, 8, UINT32_MAX), -EINVAL);
	/* After a failed init everything is still safe. */
	assert_int_equal(dq_slab_alloc(&s), DQ_NONE);
	assert_null(dq_slab_at(&s, 0));
	dq_slab_free(&s, 0);
	dq_slab_fini(&s);
}

static void test_limit_inside_a_chunk(void **state)
{
	struct dq_slab s;

	(void)state;
	assert_int_equal(dq_slab_init(&s, 24, 8, 13), 0);
	for (uint32_t i = 0; i < 13; i++)
		assert_int_equal(dq_slab_alloc(&s), i);
	assert_int_equal(dq_slab_alloc(&s), DQ_NONE);
	assert_null(dq_slab_at(&s, 13));
	assert_int_equal(s.used, 13);
	dq_slab_free(&s, 5);
	assert_null(dq_slab_at(&s, 5));
	assert_int_equal(dq_slab_alloc(&s), 5);
	assert_int_equal(dq_slab_alloc(&s), DQ_NONE);
	assert_int_equal(s.peak, 13);
	dq_slab_fini(&s);
}

static void test_stale_and_hostile_indices(void **state)
{
	struct dq_slab s;
	uint32_t a, b;

	(void)state;
	assert_int_equal(dq_slab_init(&s, 16, 4, 1000), 0);
	assert_null(dq_slab_at(&s, 0));
	a = dq_slab_alloc(&s);
	b = dq_slab_alloc(&s);
	dq_slab_free(&s, a);
	dq_slab_free(&s, a); /* twice: no effect */
	dq_slab_free(&s, 700);
	dq_slab_free(&s, DQ_NONE);
	dq_slab_free(&s, DQ_SLAB_LIVE);
	assert_int_equal(s.used, 1);
	assert_null(dq_slab_at(&s, a));
	assert_null(dq_slab_at(&s, DQ_NONE));
	assert_null(dq_slab_at(&s, DQ_SLAB_LIVE));
	assert_non_null(dq_slab_at(&s, b));
	assert_int_equal(dq_slab_alloc(&s), a);
	assert_int_not_equal(dq_slab_alloc(&s), a);
	dq_slab_fini(&s);
}

struct object {
	uint64_t stamp;
	uint8_t body[39];
};

/* Against a model: no two live objects share memory, none moves, each starts zeroed, each stays aligned. */
static void test_random_against_model(void **state)
{
	enum { LIMIT = 3000 };
	static struct object *at[LIMIT];
	static uint64_t stamps[LIMIT];
	static const struct object zero;
	uint64_t seed = 5, next = 1;
	uint32_t live = 0;
	struct dq_slab s;

	(void)state;
	memset(at, 0, sizeof at);
	assert_int_equal(dq_slab_init(&s, sizeof(struct object), 64, LIMIT), 0);
	for (unsigned step = 0; step < 300000; step++) {
		/* Grows, then shrinks, then grows, ... */
		bool grow = prng_below(&seed, 100) < (step / 20000 % 2 ? 40u : 60u);

		if (grow) {
			uint32_t i = dq_slab_alloc(&s);

			if (live == LIMIT) {
				assert_int_equal(i, DQ_NONE);
				continue;
			}
			assert_true(i < LIMIT && !at[i]);
			at[i] = dq_slab_at(&s, i);
			assert_non_null(at[i]);
			assert_int_equal((uintptr_t)at[i] % 16, 0);
			assert_memory_equal(at[i], &zero, sizeof zero);
			memset(at[i], 0xee, sizeof zero);
			at[i]->stamp = stamps[i] = next++;
			live++;
		} else {
			uint32_t i = prng_below(&seed, LIMIT);

			assert_ptr_equal(dq_slab_at(&s, i), at[i]);
			if (!at[i])
				continue;
			assert_int_equal(at[i]->stamp, stamps[i]);
			dq_slab_free(&s, i);
			at[i] = NULL;
			live--;
		}
		assert_int_equal(s.used, live);
	}
	dq_slab_fini(&s);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_bad_arguments),
		cmocka_unit_test(test_limit_inside_a_chunk),
		cmocka_unit_test(test_stale_and_hostile_indices),
		cmocka_unit_test(test_random_against_model),
	};

	return cmocka_run_group_tests_name("slab", tests, NULL, NULL);
}
