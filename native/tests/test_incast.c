/* SPDX-License-Identifier: Apache-2.0 */
/* Windows and grants together: many senders, one receiver, the model of a fabric. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "fabric.h"

static const uint64_t RATE = 100 * GBIT;

static struct sim *incast(unsigned senders, const uint64_t *bases, const uint32_t *segments, unsigned kinds, bool adapt)
{
	struct sim *s = sim_new(RATE, RATE);

	s->grants_on = true;
	for (unsigned i = 0; i < senders; i++) {
		struct dq_window_profile p = profile_of(bases[i % kinds], RATE, segments[i % kinds], 1.25);

		p.adapt = adapt;
		vc_add(s, i, bases[i % kinds], &p);
	}
	/* Levels of the start are told when all have joined, as after a settled hour. */
	dq_grants_split(&s->grants, s->now);
	for (unsigned i = 0; i < senders; i++) {
		s->vc[i].grant = s->vc[i].member.level_bytes;
		s->vc[i].grant_serial = s->vc[i].member.serial;
		s->vc[i].member.changed = false;
	}
	return s;
}

static double jain(const struct sim *s, const uint64_t *start)
{
	double sum = 0, squares = 0;

	for (unsigned i = 0; i < s->vcs; i++) {
		double x = (double)(s->vc[i].delivered - start[i]);

		sum += x;
		squares += x * x;
	}
	return sum * sum / (s->vcs * squares);
}

static void remember(const struct sim *s, uint64_t *start)
{
	for (unsigned i = 0; i < s->vcs; i++)
		start[i] = s->vc[i].delivered;
}

/* 64 could send, one does: as fast as if it were alone. */
static void test_one_of_many(void **state)
{
	const uint64_t base = 56 * US;
	const uint32_t segment = 64 * KIB;
	struct sim *s = incast(64, &base, &segment, 1, true);
	double used;

	(void)state;
	vc_start(s, &s->vc[9]);
	measure(s, 5 * base);
	used = measure(s, 100 * base);
	show("one of 64", used, s, &s->vc[9]);
	assert_true(used >= 0.97);
	assert_int_equal(s->vc[9].grant, s->vc[9].window.profile.window_bytes);
	free(s);
}

/*
 * All 64 wake up in the same moment: the queue never holds more than their starting levels and what the first comers are
 * given, a window x (1 + 1/2 + ... + 1/64), which is 13 times less than their windows; then it settles at what the grants
 * leave, fairly shared. With windows that adapt and without.
 */
static void test_all_at_once(void **state)
{
	const uint64_t base = 120 * US;
	const uint32_t segment = 16 * KIB;
	const double pipe = 120e3 * 12.5;

	(void)state;
	for (unsigned adapt = 0; adapt < 2; adapt++) {
		struct sim *s = incast(64, &base, &segment, 1, adapt);
		uint64_t start[MAX_VCS];
		double used;

		for (unsigned i = 0; i < 64; i++)
			vc_start(s, &s->vc[i]);
		used = measure(s, 20 * base);
		show("64 wake up", used, s, &s->vc[0]);
		assert_true((double)s->queue_peak <= 4.75 * (double)s->vc[0].window.profile.window_bytes);
		assert_true(used >= 0.9);
		remember(s, start);
		used = measure(s, 200 * base);
		show("64 go on", used, s, &s->vc[0]);
		assert_true(used >= 0.99);
		assert_true((double)s->queue_peak <= pipe / 8 + 64 * segment);
		assert_true(jain(s, start) >= (adapt ? 0.9 : 0.999));
		free(s);
	}
}

/* Near and far senders get the same, and the near ones see no queue of the far ones' windows. */
static void test_near_and_far(void **state)
{
	static const uint64_t bases[] = { 8 * US, 240 * US };
	static const uint32_t segments[] = { 16 * KIB, 128 * KIB };
	struct sim *s = incast(4, bases, segments, 2, false);
	uint64_t start[MAX_VCS];
	double used;

	(void)state;
	for (unsigned i = 0; i < 4; i++)
		vc_start(s, &s->vc[i]);
	measure(s, 5 * MS);
	remember(s, start);
	used = measure(s, 20 * MS);
	show("near and far", used, s, &s->vc[0]);
	assert_true(used >= 0.97);
	assert_true(jain(s, start) >= 0.8);
	/* Less than a tenth of what the two far windows alone would keep there. */
	assert_true(s->queue_peak <= 6 * 128 * KIB);
	free(s);
}

static void swap(struct sim *s)
{
	bool first = s->vc[0].active;

	vc_stop(s, &s->vc[first ? 0 : 1]);
	vc_start(s, &s->vc[first ? 1 : 0]);
	sim_at(s, (struct event){ .time_ns = s->now + 40 * 56 * US, .kind = EVENT_CALL, .call = swap });
}

/* Two take turns, 40 RTTs each: whoever sends soon has it all. */
static void test_turns(void **state)
{
	const uint64_t base = 56 * US;
	const uint32_t segment = 64 * KIB;
	struct sim *s = incast(2, &base, &segment, 1, true);
	uint64_t a, b;
	double used;

	(void)state;
	vc_start(s, &s->vc[0]);
	swap(s);
	measure(s, 400 * base);
	a = s->vc[0].delivered;
	b = s->vc[1].delivered;
	used = measure(s, 800 * base);
	show("turns", used, s, &s->vc[0]);
	assert_true(used >= 0.95);
	assert_in_range((s->vc[0].delivered - a) * 100 / (s->vc[1].delivered - b), 90, 110);
	free(s);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_one_of_many),
		cmocka_unit_test(test_all_at_once),
		cmocka_unit_test(test_near_and_far),
		cmocka_unit_test(test_turns),
	};

	return cmocka_run_group_tests_name("incast", tests, NULL, NULL);
}
