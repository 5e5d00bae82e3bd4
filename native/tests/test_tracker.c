/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <errno.h>
#include <cmocka.h>

#include "core/tracker.h"
#include "prng.h"

static void test_single_segment(void **state)
{
	struct dq_tracker t;

	(void)state;
	assert_int_equal(dq_tracker_init(&t), 0);
	assert_int_equal(dq_tracker_segment(&t, 5, 0, true, 10), DQ_TRACK_UNARMED);
	assert_false(dq_tracker_live(&t, 5));
	assert_int_equal(dq_tracker_arm(&t, 5), 0);
	assert_int_equal(dq_tracker_arm(&t, 5), -EBUSY);
	assert_true(dq_tracker_live(&t, 5));
	assert_false(dq_tracker_complete(&t, 5));
	assert_int_equal(dq_tracker_segment(&t, 5, 0, true, 0), DQ_TRACK_COMPLETE); /* an empty message */
	assert_true(dq_tracker_complete(&t, 5));
	assert_int_equal(dq_tracker_bytes(&t, 5), 0);
	assert_int_equal(dq_tracker_segment(&t, 5, 0, true, 0), DQ_TRACK_DUPLICATE);
	assert_int_equal(t.duplicates, 1);
	assert_int_equal(t.segments, 1);
	dq_tracker_release(&t, 5);
	dq_tracker_release(&t, 5);
	assert_false(dq_tracker_live(&t, 5));
	assert_false(dq_tracker_complete(&t, 5));
	assert_int_equal(dq_tracker_segment(&t, 5, 0, true, 0), DQ_TRACK_UNARMED);
	assert_int_equal(dq_tracker_arm(&t, 5), 0);
	assert_int_equal(dq_tracker_segment(&t, 5, 0, true, 7), DQ_TRACK_COMPLETE);
	assert_int_equal(dq_tracker_bytes(&t, 5), 7);
	dq_tracker_fini(&t);
}

/* Sender-named slots begin by themselves, the last of all too. */
static void test_unknown_puts(void **state)
{
	struct dq_tracker t;

	(void)state;
	assert_int_equal(dq_tracker_init(&t), 0);
	assert_int_equal(dq_tracker_segment(&t, 0x8000, 3, true, 1), DQ_TRACK_NEW);
	assert_int_equal(dq_tracker_segment(&t, 0xffff, 0, true, 1), DQ_TRACK_COMPLETE);
	assert_int_equal(dq_tracker_segment(&t, 0x7fff, 0, true, 1), DQ_TRACK_UNARMED);
	assert_int_equal(t.live, 2);
	assert_int_equal(dq_tracker_arm(&t, 0x8000), -EBUSY);
	dq_tracker_fini(&t);
}

static void test_conflicts(void **state)
{
	struct dq_tracker t;

	(void)state;
	assert_int_equal(dq_tracker_init(&t), 0);
	assert_int_equal(dq_tracker_arm(&t, 1), 0);
	assert_int_equal(dq_tracker_segment(&t, 1, 0x8000, false, 1), DQ_TRACK_CONFLICT); /* an index has 15 bits */
	assert_int_equal(dq_tracker_segment(&t, 1, 9, false, 1), DQ_TRACK_NEW);
	assert_int_equal(dq_tracker_segment(&t, 1, 5, true, 1), DQ_TRACK_CONFLICT);  /* 9 was there: 5 is not the last */
	assert_int_equal(dq_tracker_segment(&t, 1, 9, true, 1), DQ_TRACK_CONFLICT);  /* came without `last` before */
	assert_int_equal(dq_tracker_segment(&t, 1, 20, true, 1), DQ_TRACK_NEW);
	assert_int_equal(dq_tracker_segment(&t, 1, 21, false, 1), DQ_TRACK_CONFLICT);
	assert_int_equal(dq_tracker_segment(&t, 1, 21, true, 1), DQ_TRACK_CONFLICT);
	assert_int_equal(dq_tracker_segment(&t, 1, 19, true, 1), DQ_TRACK_CONFLICT);
	assert_int_equal(dq_tracker_segment(&t, 1, 20, false, 1), DQ_TRACK_CONFLICT); /* came with `last` before */
	assert_int_equal(dq_tracker_segment(&t, 1, 20, true, 1), DQ_TRACK_DUPLICATE);
	assert_int_equal(dq_tracker_bytes(&t, 1), 2);

	/* The same where the words before are full and forgotten. */
	assert_int_equal(dq_tracker_arm(&t, 2), 0);
	for (uint16_t i = 0; i < 64; i++)
		assert_int_equal(dq_tracker_segment(&t, 2, i, false, 1), DQ_TRACK_NEW);
	assert_int_equal(dq_tracker_segment(&t, 2, 63, true, 1), DQ_TRACK_CONFLICT);
	assert_int_equal(dq_tracker_segment(&t, 2, 63, false, 1), DQ_TRACK_DUPLICATE);
	assert_int_equal(dq_tracker_segment(&t, 2, 64, true, 1), DQ_TRACK_COMPLETE);
	assert_int_equal(dq_tracker_segment(&t, 2, 65, false, 1), DQ_TRACK_CONFLICT);
	assert_int_equal(dq_tracker_segment(&t, 2, 3, true, 1), DQ_TRACK_CONFLICT);
	assert_int_equal(dq_tracker_segment(&t, 2, 3, false, 1), DQ_TRACK_DUPLICATE);
	dq_tracker_fini(&t);
}

/* What the tracker should know of one message. */
struct model {
	uint32_t count;
	uint32_t got;
	uint32_t seen;
	bool last_seen;
	uint64_t bytes;
	uint8_t *have;
};

static void model_check_bitmap(const struct dq_tracker *t, uint16_t slot, const struct model *m)
{
	uint64_t words[512];
	uint32_t segments = m->last_seen ? m->count : m->seen;
	unsigned n = dq_tracker_bitmap(t, slot, words, 512);

	assert_int_equal(n, (segments + 63) / 64);
	for (uint32_t i = 0; i < n * 64; i++)
		assert_int_equal(words[i / 64] >> (i % 64) & 1, i < m->count && m->have[i]);
}

/* One message of `count` segments in an order where none comes more than `spread` places early, with duplicates. */
static void run_message(struct dq_tracker *t, uint16_t slot, uint32_t count, uint32_t spread, uint64_t *seed)
{
	struct model m = { .count = count, .have = calloc(count, 1) };
	uint16_t *order = malloc(count * sizeof *order);
	uint64_t duplicates = t->duplicates;

	assert_non_null(m.have);
	assert_non_null(order);
	for (uint32_t i = 0; i < count; i++)
		order[i] = (uint16_t)i;
	for (uint32_t i = 0; i + 1 < count; i++) {
		uint32_t j = i + prng_below(seed, DQ_MIN(spread, count - i - 1) + 1);
		uint16_t x = order[i];

		order[i] = order[j];
		order[j] = x;
	}
	for (uint32_t i = 0; i < count; i++) {
		uint16_t index = order[i];
		uint32_t bytes = prng_below(seed, 70000);
		enum dq_track got = dq_tracker_segment(t, slot, index, index + 1u == count, bytes);

		m.have[index] = 1;
		m.got++;
		m.seen = DQ_MAX(m.seen, index + 1u);
		m.last_seen |= index + 1u == count;
		m.bytes += bytes;
		assert_int_equal(got, m.got == count ? DQ_TRACK_COMPLETE : DQ_TRACK_NEW);
		if (prng_below(seed, 8) == 0) {
			uint16_t again = order[prng_below(seed, i + 1)];

			duplicates++;
			assert_int_equal(dq_tracker_segment(t, slot, again, again + 1u == count, bytes), DQ_TRACK_DUPLICATE);
		}
		if (prng_below(seed, 1 + count / 3) == 0)
			model_check_bitmap(t, slot, &m);
	}
	assert_int_equal(t->duplicates, duplicates);
	assert_true(dq_tracker_complete(t, slot));
	assert_int_equal(t->bitmap_bytes, 0); /* complete: nothing to remember but that */
	assert_int_equal(dq_tracker_bytes(t, slot), m.bytes);
	model_check_bitmap(t, slot, &m);
	dq_tracker_release(t, slot);
	free(order);
	free(m.have);
}

static void test_any_order(void **state)
{
	static const uint32_t counts[] = { 1, 2, 3, 63, 64, 65, 127, 128, 129, 511, 512, 513, 577, 4095, 4096, 4097, 32767, 32768 };
	static const uint32_t spreads[] = { 0, 1, 16, 63, 64, 65, 500, 5000, 32768 };
	struct dq_tracker t;
	uint64_t seed = 21;

	(void)state;
	assert_int_equal(dq_tracker_init(&t), 0);
	for (unsigned c = 0; c < sizeof counts / sizeof *counts; c++) {
		for (unsigned s = 0; s < sizeof spreads / sizeof *spreads; s++)
			run_message(&t, (uint16_t)(DQ_SLOT_PUT_BASE + prng_below(&seed, 0x8000)), counts[c], spreads[s], &seed);
	}
	for (unsigned i = 0; i < 3000; i++) {
		uint16_t slot = (uint16_t)prng_below(&seed, 0x8000);

		assert_int_equal(dq_tracker_arm(&t, slot), 0);
		run_message(&t, slot, 1 + prng_below(&seed, 1u << prng_below(&seed, 11)), 1u << prng_below(&seed, 12), &seed);
	}
	assert_int_equal(t.live, 0);
	assert_int_equal(t.bitmap_bytes, 0);
	dq_tracker_fini(&t);
}

/* Segments that are only shuffled among a few QPs need no memory besides their slot. */
static void test_near_order_takes_no_bitmap(void **state)
{
	struct dq_tracker t;
	uint64_t seed = 2;

	(void)state;
	assert_int_equal(dq_tracker_init(&t), 0);
	t.bitmap_limit = 0;
	/* Two neighbours 32 places apart at most: with the alignment to words, never beyond the slot's own word and a half. */
	for (uint32_t i = 0; i < 32768; i += 32) {
		for (uint32_t j = 32; j-- > 0;) {
			bool last = i + j == 32767;

			assert_int_equal(dq_tracker_segment(&t, 0x9000, (uint16_t)(i + j), last, 1),
					 i == 32768 - 32 && j == 0 ? DQ_TRACK_COMPLETE : DQ_TRACK_NEW);
		}
	}
	assert_int_equal(dq_tracker_bytes(&t, 0x9000), 32768);
	dq_tracker_release(&t, 0x9000);

	/* With holes left open it must grow; without memory for that it says so and records nothing. */
	assert_int_equal(dq_tracker_segment(&t, 0x9000, 64, false, 1), DQ_TRACK_NOMEM);
	assert_false(dq_tracker_live(&t, 0x9000));
	assert_int_equal(dq_tracker_segment(&t, 0x9000, 63, false, 1), DQ_TRACK_NEW);
	assert_int_equal(dq_tracker_segment(&t, 0x9000, 64, false, 1), DQ_TRACK_NOMEM);
	assert_int_equal(dq_tracker_bytes(&t, 0x9000), 1);
	t.bitmap_limit = DQ_TRACK_BITMAP_LIMIT;
	assert_int_equal(dq_tracker_segment(&t, 0x9000, 64, false, 1), DQ_TRACK_NEW);
	assert_int_equal(dq_tracker_segment(&t, 0x9000, 63, false, 1), DQ_TRACK_DUPLICATE);
	assert_int_equal(t.bitmap_bytes, 64);
	assert_int_equal(dq_tracker_segment(&t, 0x9000, 32767, true, 1), DQ_TRACK_NEW);
	assert_int_equal(t.bitmap_bytes, 4096);
	dq_tracker_release(&t, 0x9000);
	assert_int_equal(t.bitmap_bytes, 0);
	run_message(&t, 0x9000, 32768, 32768, &seed);
	dq_tracker_fini(&t);
}

/* 30,000 slots at once, their segments mixed, some lost for good; everything comes back. */
static void test_many_slots(void **state)
{
	enum { SLOTS = 30000 };
	static struct { uint16_t slot; uint32_t count, got, lost; } live[SLOTS];
	static uint16_t names[65536];
	struct dq_tracker t;
	uint64_t seed = 77, segments = 0;
	uint32_t complete = 0, open = SLOTS, lossy = 0;

	(void)state;
	assert_int_equal(dq_tracker_init(&t), 0);
	for (unsigned i = 0; i < 65536; i++)
		names[i] = (uint16_t)i;
	for (unsigned i = 0; i < SLOTS; i++) {
		unsigned j = i + prng_below(&seed, 65536 - i);
		uint16_t x = names[i];

		names[i] = names[j];
		names[j] = x;
		live[i].slot = names[i];
		live[i].count = 1 + prng_below(&seed, 24);
		if (prng_below(&seed, 1000) == 0)
			live[i].count = 1 + prng_below(&seed, 2000);
		live[i].got = 0;
		live[i].lost = prng_below(&seed, 50) == 0 ? prng_below(&seed, live[i].count) : DQ_NONE;
		lossy += live[i].lost != DQ_NONE;
		if (live[i].slot < DQ_SLOT_PUT_BASE)
			assert_int_equal(dq_tracker_arm(&t, live[i].slot), 0);
	}
	/* From the end to the start within each, slots in random turns. */
	while (open) {
		uint32_t i = prng_below(&seed, open);
		uint32_t index = live[i].count - 1 - live[i].got;
		bool done = ++live[i].got == live[i].count;
		uint16_t slot = live[i].slot;

		if (index != live[i].lost) {
			enum dq_track r = dq_tracker_segment(&t, slot, (uint16_t)index, index + 1 == live[i].count, 100);

			segments++;
			assert_int_equal(r, done && live[i].lost == DQ_NONE ? DQ_TRACK_COMPLETE : DQ_TRACK_NEW);
			complete += r == DQ_TRACK_COMPLETE;
		}
		if (done) {
			if (live[i].lost != DQ_NONE && live[i].lost == 0 && live[i].count > 1)
				assert_int_equal(dq_tracker_bytes(&t, slot), 100 * (live[i].count - 1));
			open--;
			live[i] = live[open];
		}
	}
	assert_int_equal(complete, SLOTS - lossy);
	assert_int_equal(t.segments, segments);
	assert_true(lossy > 0);
	for (unsigned i = 0; i < SLOTS; i++) {
		assert_true(dq_tracker_live(&t, names[i]) || names[i] >= DQ_SLOT_PUT_BASE);
		dq_tracker_release(&t, names[i]);
	}
	assert_int_equal(t.live, 0);
	assert_int_equal(t.bitmap_bytes, 0);
	dq_tracker_trim(&t);
	for (unsigned i = 0; i < 512; i++)
		assert_null(t.pages[i]);
	dq_tracker_fini(&t);
}

/* Any calls in any order: never a wrong count, and memory within its limit. */
static void test_random_calls(void **state)
{
	enum { SLOTS = 64, CALLS = 400000 };
	struct model models[SLOTS];
	struct dq_tracker t;
	uint64_t seed = 123;

	(void)state;
	memset(models, 0, sizeof models);
	assert_int_equal(dq_tracker_init(&t), 0);
	t.bitmap_limit = 20000;
	for (unsigned i = 0; i < CALLS; i++) {
		uint32_t k = prng_below(&seed, SLOTS);
		uint16_t slot = (uint16_t)(DQ_SLOT_PUT_BASE - SLOTS / 2 + k); /* half of either kind */
		struct model *m = &models[k];
		uint16_t index = (uint16_t)prng_below(&seed, 1u << prng_below(&seed, 17));
		bool last = prng_below(&seed, 20) == 0;
		enum dq_track r, want;

		switch (prng_below(&seed, 50)) {
		case 0:
			dq_tracker_release(&t, slot);
			free(m->have);
			memset(m, 0, sizeof *m);
			continue;
		case 1:
			if (m->have) {
				assert_int_equal(dq_tracker_arm(&t, slot), -EBUSY);
			} else {
				assert_int_equal(dq_tracker_arm(&t, slot), 0);
				m->have = calloc(1, DQ_MAX_SEGMENTS);
				assert_non_null(m->have);
			}
			continue;
		default:
			break;
		}
		r = dq_tracker_segment(&t, slot, index, last, 3);
		assert_true(t.bitmap_bytes <= t.bitmap_limit);
		if (r == DQ_TRACK_NOMEM) {
			assert_int_equal(dq_tracker_live(&t, slot), m->have != NULL);
			continue;
		}
		if (index >= DQ_MAX_SEGMENTS) {
			assert_int_equal(r, DQ_TRACK_CONFLICT);
			continue;
		}
		if (!m->have && slot < DQ_SLOT_PUT_BASE) {
			assert_int_equal(r, DQ_TRACK_UNARMED);
			continue;
		}
		if (!m->have) {
			m->have = calloc(1, DQ_MAX_SEGMENTS);
			assert_non_null(m->have);
		}
		if (m->count ? index >= m->count || last != (index + 1u == m->count) : last && index + 1u < m->seen) {
			want = DQ_TRACK_CONFLICT;
		} else if (m->have[index]) {
			want = last && !m->count ? DQ_TRACK_CONFLICT : DQ_TRACK_DUPLICATE;
		} else {
			m->have[index] = 1;
			m->got++;
			m->bytes += 3;
			m->seen = DQ_MAX(m->seen, index + 1u);
			if (last)
				m->count = index + 1u;
			want = m->got == m->count ? DQ_TRACK_COMPLETE : DQ_TRACK_NEW;
		}
		assert_int_equal(r, want);
		assert_int_equal(dq_tracker_bytes(&t, slot), m->bytes);
		assert_int_equal(dq_tracker_complete(&t, slot), m->count && m->got == m->count);
	}
	for (unsigned k = 0; k < SLOTS; k++)
		free(models[k].have);
	dq_tracker_fini(&t); /* with slots live: the sanitizer sees what is left over */
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_single_segment),
		cmocka_unit_test(test_unknown_puts),
		cmocka_unit_test(test_conflicts),
		cmocka_unit_test(test_any_order),
		cmocka_unit_test(test_near_order_takes_no_bitmap),
		cmocka_unit_test(test_many_slots),
		cmocka_unit_test(test_random_calls),
	};

	return cmocka_run_group_tests_name("tracker", tests, NULL, NULL);
}
