/* SPDX-License-Identifier: Apache-2.0 */
/* The pure parts of the prober: schedule, limiter and packet format, against plain models with seeded random input. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "probe/limiter.h"
#include "probe/packet.h"
#include "probe/schedule.h"

#define SECOND 1000000000ull

static uint64_t random_state;

static uint64_t random_next(void) /* splitmix64 */
{
	uint64_t z = random_state += 0x9e3779b97f4a7c15ull;
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ z >> 27) * 0x94d049bb133111ebull;
	return z ^ z >> 31;
}

static uint64_t random_below(uint64_t n)
{
	return random_next() % n;
}

/* Any sequence of set, remove and pop gives what a table searched from end to end gives. */
static void schedule_behaves_like_a_table(void **state)
{
	(void)state;
	enum { IDS = 97, OPS = 20000 };
	struct dq_schedule s;
	uint64_t due[IDS];

	random_state = 1;
	assert_int_equal(dq_schedule_init(&s, IDS), 0);
	for (unsigned i = 0; i < IDS; i++)
		due[i] = DQ_NEVER;

	for (unsigned op = 0; op < OPS; op++) {
		uint32_t id = (uint32_t)random_below(IDS), first = DQ_NONE;
		for (uint32_t i = 0; i < IDS; i++)
			if (due[i] != DQ_NEVER && (first == DQ_NONE || due[i] < due[first]))
				first = i;
		assert_int_equal(dq_schedule_next(&s), first == DQ_NONE ? DQ_NEVER : due[first]);

		switch (random_below(4)) {
		case 0:
		case 1:
			due[id] = random_below(50); /* many are equal */
			dq_schedule_set(&s, id, due[id]);
			break;
		case 2:
			due[id] = DQ_NEVER;
			dq_schedule_remove(&s, id);
			break;
		default: {
			uint64_t now = random_below(60), when = 0;
			uint32_t got = dq_schedule_pop(&s, now, &when);
			if (first == DQ_NONE || due[first] > now) {
				assert_int_equal(got, DQ_NONE);
			} else {
				assert_int_equal(got, first);
				assert_int_equal(when, due[first]);
				due[first] = DQ_NEVER;
			}
		}
		}
	}
	dq_schedule_destroy(&s);
}

/* 10,000 targets with their own intervals and phases, simulated: each is probed exactly when it should be. */
static void schedule_keeps_ten_thousand_targets_in_time(void **state)
{
	(void)state;
	enum { TARGETS = 10000 };
	static uint64_t interval[TARGETS], phase[TARGETS], count[TARGETS];
	const uint64_t start = 123456789, end = start + 20 * SECOND;
	struct dq_schedule s;
	uint64_t total = 0, expected = 0;

	random_state = 2;
	assert_int_equal(dq_schedule_init(&s, TARGETS), 0);
	for (uint32_t i = 0; i < TARGETS; i++) {
		interval[i] = SECOND / 2 + random_below(5 * SECOND);
		phase[i] = random_below(interval[i]);
		count[i] = 0;
		dq_schedule_set(&s, i, start + phase[i]);
		expected += (end - start - phase[i]) / interval[i] + 1;
	}
	while (dq_schedule_next(&s) <= end) {
		uint64_t now = dq_schedule_next(&s), due;
		uint32_t id = dq_schedule_pop(&s, now, &due);
		assert_in_range(id, 0, TARGETS - 1);
		assert_int_equal(due, start + phase[id] + count[id] * interval[id]);
		count[id]++;
		total++;
		dq_schedule_set(&s, id, dq_schedule_following(due, interval[id], now));
	}
	assert_int_equal(total, expected);
	assert_int_equal(s.count, TARGETS);
	dq_schedule_destroy(&s);
}

static void following_skips_what_was_missed_and_does_not_drift(void **state)
{
	(void)state;
	random_state = 3;
	assert_int_equal(dq_schedule_following(100, 10, 100), 110);
	assert_int_equal(dq_schedule_following(100, 10, 99), 110);
	assert_int_equal(dq_schedule_following(100, 10, 109), 110);
	assert_int_equal(dq_schedule_following(100, 10, 110), 120);
	for (unsigned i = 0; i < 20000; i++) {
		uint64_t due = random_below(1ull << 40), interval = 1 + random_below(1ull << 33);
		uint64_t now = due + random_below(1ull << 36);
		uint64_t next = dq_schedule_following(due, interval, now);
		assert_true(next > now && next > due);
		assert_true(next - interval <= now);
		assert_int_equal((next - due) % interval, 0);
	}
}

static void schedule_refuses_size_zero(void **state)
{
	(void)state;
	struct dq_schedule s;
	assert_int_equal(dq_schedule_init(&s, 0), -EINVAL);
	dq_schedule_destroy(&s);
}

/* In any span, at most depth + span * rate tokens; a source that keeps to the rate gets every one. */
static void limiter_keeps_the_rate(void **state)
{
	(void)state;
	static const uint32_t rates[] = { 1, 3, 7, 100, 999, 1000, 1000000 };
	random_state = 4;
	for (unsigned r = 0; r < sizeof rates / sizeof rates[0]; r++) {
		struct dq_limiter greedy = { 0 }, modest = { 0 };
		struct dq_limiter_rate rate;
		dq_limiter_rate_set(&rate, rates[r]);
		uint64_t depth = rate.depth_ns / rate.cost_ns;
		assert_true(depth >= 1 && depth <= rates[r]);

		uint64_t start = random_below(1ull << 50), now = start, taken = 0;
		for (unsigned i = 0; i < 20000; i++) {
			taken += dq_limiter_take(&greedy, &rate, now);
			assert_true(taken <= depth + (now - start) / rate.cost_ns);
			now += random_below(rate.cost_ns / 2 + 1);
		}
		/* Asking more than once a token's time; where the bucket holds more than one it never flows over. */
		if (depth > 1)
			assert_true(taken + 1 >= (now - start) / rate.cost_ns);
		for (unsigned i = 0; i < 1000; i++)
			assert_true(dq_limiter_take(&modest, &rate, start + i * rate.cost_ns));
	}
}

static void limiter_takes_extreme_rates(void **state)
{
	(void)state;
	struct dq_limiter_rate rate;
	struct dq_limiter l = { 0 };
	dq_limiter_rate_set(&rate, 0);
	assert_int_equal(rate.cost_ns, SECOND);
	assert_true(dq_limiter_take(&l, &rate, 5));
	assert_false(dq_limiter_take(&l, &rate, 5 + SECOND - 1));
	assert_true(dq_limiter_take(&l, &rate, 5 + SECOND));
	dq_limiter_rate_set(&rate, UINT32_MAX);
	assert_int_equal(rate.cost_ns, 1);
}

static void packet_has_the_documented_bytes(void **state)
{
	(void)state;
	static const uint8_t expected[DQ_PROBE_PACKET_BYTES] = {
		'D', 'Q', 'P', 'B', 1, 3, 0, 0,
		0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x01,
		0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11,
		0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
	};
	struct dq_probe_packet p = { .type = DQ_PROBE_ACK2, .id = 0x0102030405060708, .token = 0x1112131415161718, .delta_ns = -2 };
	uint8_t bytes[DQ_PROBE_PACKET_BYTES];
	dq_probe_packet_encode(&p, bytes);
	assert_memory_equal(bytes, expected, sizeof bytes);
}

static void packet_survives_a_round_trip(void **state)
{
	(void)state;
	random_state = 5;
	for (unsigned i = 0; i < 5000; i++) {
		struct dq_probe_packet in = { .type = (enum dq_probe_type)(1 + random_below(3)), .id = random_next(),
					      .token = random_next() }, out;
		uint8_t bytes[DQ_PROBE_PACKET_BYTES];
		if (in.type == DQ_PROBE_ACK2)
			in.delta_ns = (int64_t)random_next();
		dq_probe_packet_encode(&in, bytes);
		assert_int_equal(dq_probe_packet_decode(bytes, sizeof bytes, &out), 0);
		assert_int_equal(out.type, in.type);
		assert_true(out.id == in.id && out.token == in.token && out.delta_ns == in.delta_ns);
	}
}

static void packet_refuses_what_is_not_one(void **state)
{
	(void)state;
	struct dq_probe_packet p = { .type = DQ_PROBE_PROBE, .id = 1, .token = 2 }, out;
	uint8_t bytes[2 * DQ_PROBE_PACKET_BYTES] = { 0 };

	dq_probe_packet_encode(&p, bytes);
	for (size_t len = 0; len < sizeof bytes; len++)
		assert_int_equal(dq_probe_packet_decode(bytes, len, &out), len == DQ_PROBE_PACKET_BYTES ? 0 : -EMSGSIZE);
	/* Every single bit of the fixed fields matters, and a delta in a packet that has none. */
	for (unsigned bit = 0; bit < 8 * DQ_PROBE_PACKET_BYTES; bit++) {
		unsigned at = bit / 8;
		bytes[at] ^= (uint8_t)(1u << bit % 8);
		int rc = dq_probe_packet_decode(bytes, DQ_PROBE_PACKET_BYTES, &out);
		if (at < 4 || at == 6 || at == 7 || at >= 24)
			assert_int_equal(rc, -EPROTO);
		else if (at == 4)
			assert_int_equal(rc, -EPROTONOSUPPORT);
		else if (at == 5)
			assert_int_equal(rc, bytes[5] >= 1 && bytes[5] <= 3 ? 0 : -EPROTO);
		else
			assert_int_equal(rc, 0);
		bytes[at] ^= (uint8_t)(1u << bit % 8);
	}
	random_state = 6;
	for (unsigned i = 0; i < 20000; i++) {
		/* In memory of just that size, so that a sanitizer sees a read beyond it. */
		size_t len = random_below(DQ_PROBE_PACKET_BYTES + 8);
		uint8_t *garbage = malloc(len ? len : 1);
		assert_non_null(garbage);
		for (size_t k = 0; k < len; k++)
			garbage[k] = (uint8_t)random_next();
		assert_true(dq_probe_packet_decode(garbage, len, &out) < 0);
		free(garbage);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(schedule_behaves_like_a_table),
		cmocka_unit_test(schedule_keeps_ten_thousand_targets_in_time),
		cmocka_unit_test(following_skips_what_was_missed_and_does_not_drift),
		cmocka_unit_test(schedule_refuses_size_zero),
		cmocka_unit_test(limiter_keeps_the_rate),
		cmocka_unit_test(limiter_takes_extreme_rates),
		cmocka_unit_test(packet_has_the_documented_bytes),
		cmocka_unit_test(packet_survives_a_round_trip),
		cmocka_unit_test(packet_refuses_what_is_not_one),
	};
	return cmocka_run_group_tests_name("probe_parts", tests, NULL, NULL);
}
