/* SPDX-License-Identifier: Apache-2.0 */
/* The outbound budget: shares, turns, ramp, and what delay does to it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <string.h>
#include <cmocka.h>

#include "core/outbound.h"

#define KIB 1024u
#define MIB (1024u * KIB)
#define US 1000ull
#define BASE (240 * US)
#define SEGMENT (64 * KIB)
#define WINDOW (16ull * MIB)
#define TARGET (2ull * MIB)
#define MEMBERS 32u

static struct dq_outbound outbound;
static struct dq_outbound_member members[MEMBERS];

static void begin(unsigned n, uint64_t base_ns)
{
	memset(&outbound, 0, sizeof outbound);
	memset(members, 0, sizeof members);
	for (unsigned i = 0; i < n; i++) {
		dq_outbound_join(&outbound, &members[i], WINDOW, TARGET, base_ns, 0);
		dq_outbound_active(&outbound, &members[i], true);
	}
}

static bool post(unsigned i, uint64_t now_ns)
{
	if (!dq_outbound_admits(&outbound, &members[i], SEGMENT, WINDOW, now_ns))
		return false;
	dq_outbound_post(&outbound, &members[i], SEGMENT);
	return true;
}

static void done(unsigned i, uint64_t posted_ns, uint64_t delay_ns)
{
	dq_outbound_done(&outbound, &members[i], SEGMENT, posted_ns, 0, posted_ns + BASE + delay_ns, BASE, true);
}

/* Everybody posts what it can, as an owner does; how many bytes are in flight then. */
static uint64_t fill(unsigned n, uint64_t now_ns)
{
	struct dq_outbound_member *m;
	uint64_t sum = 0;

	for (unsigned i = 0; i < n; i++) {
		while (post(i, now_ns))
			;
		dq_outbound_pass(&outbound, &members[i]);
	}
	while ((m = dq_outbound_next(&outbound, now_ns))) {
		while (post((unsigned)(m - members), now_ns))
			;
		dq_outbound_pass(&outbound, m);
	}
	for (unsigned i = 0; i < n; i++)
		sum += members[i].inflight;
	return sum;
}

/* Members that have what the first limit lets them; their group. */
static struct dq_outbound_group *begin_and_fill(unsigned n, uint64_t now_ns)
{
	begin(n, BASE);
	for (uint64_t t = 0; t <= BASE; t += US)
		fill(n, now_ns + t);
	return &outbound.groups[members[0].group];
}

/* What begins leaves at the rate that the limit means: nothing but the margin at once, 3/8 of a pipe after an RTT. */
static void test_ramp(void **state)
{
	uint64_t now = 1000 * US, first = now;

	(void)state;
	begin(8, BASE);
	assert_int_equal(fill(8, now), DQ_OUTBOUND_MARGIN * SEGMENT);
	for (unsigned steps = 0; dq_outbound_due(&outbound, now) != DQ_NEVER; steps++) {
		uint64_t due = dq_outbound_due(&outbound, now), sum;

		assert_true(due > now && steps < 10000);
		now = due;
		sum = fill(8, now);
		assert_true((double)sum <= 0.375 * WINDOW * (double)(now - first) / BASE + DQ_OUTBOUND_MARGIN * SEGMENT + 1);
	}
	assert_in_range(fill(8, now), WINDOW * 3 / 8 - SEGMENT, WINDOW * 3 / 8 + DQ_OUTBOUND_MARGIN * SEGMENT);
	assert_in_range(now - first, BASE * 9 / 10, BASE + 1);
}

/* All wait in one line and get their turns: nobody is left out, nobody gets more than the others. */
static void test_turns_are_even(void **state)
{
	uint64_t now = 1000 * US, least = UINT64_MAX, most = 0;

	(void)state;
	begin(MEMBERS, BASE);
	for (uint64_t t = 0; t <= BASE; t += US)
		fill(MEMBERS, now + t);
	for (unsigned i = 0; i < MEMBERS; i++) {
		least = DQ_MIN(least, members[i].inflight);
		most = DQ_MAX(most, members[i].inflight);
	}
	assert_true(least > 0);
	assert_true(most - least <= 2 * SEGMENT);
}

/* A turn is as long as the backlog of who has it, against the mean of those that wait, and DQ_OUTBOUND_TURN at most. */
static void test_turns_follow_the_backlog(void **state)
{
	uint64_t now = 1000 * US;
	struct dq_outbound_member *m;

	(void)state;
	begin(MEMBERS, BASE);
	fill(1, now);
	for (unsigned i = 1; i < MEMBERS; i++)
		assert_false(dq_outbound_admits(&outbound, &members[i], SEGMENT, i == 1 ? 100 * MIB : i == 2 ? SEGMENT : MIB, now));
	now += BASE;
	for (unsigned i = 0; i < 3; i++) {
		m = dq_outbound_next(&outbound, now);
		assert_ptr_equal(m, &members[i]);
		assert_int_equal(m->turn, i == 0 ? 4 : i == 1 ? DQ_OUTBOUND_TURN : 1); /* 16 MiB, of 4.5 MiB in the mean */
		dq_outbound_pass(&outbound, m);
	}
}

/* Members that are far share the pipe with those that are near, by their numbers, each in bytes of its own windows. */
static void test_groups_share_the_device(void **state)
{
	uint64_t now = 1000 * US, far = 0, near = 0;

	(void)state;
	begin(24, BASE);
	for (unsigned i = 24; i < MEMBERS; i++) {
		dq_outbound_join(&outbound, &members[i], WINDOW / 4, TARGET / 4, BASE / 4, 0);
		dq_outbound_active(&outbound, &members[i], true);
	}
	for (uint64_t t = 0; t <= BASE; t += US)
		fill(MEMBERS, now + t);
	for (unsigned i = 0; i < MEMBERS; i++)
		*(i < 24 ? &far : &near) += members[i].inflight;
	assert_in_range(far, WINDOW * 3 / 8 * 3 / 4 - SEGMENT, WINDOW * 3 / 8 * 3 / 4 + DQ_OUTBOUND_MARGIN * SEGMENT);
	assert_in_range(near, WINDOW / 4 * 3 / 8 / 4 - SEGMENT, WINDOW / 4 * 3 / 8 / 4 + DQ_OUTBOUND_MARGIN * SEGMENT);
}

/* A way that carries a part of the device's rate, which is a window an RTT here: one queue, first in, first out. */
struct way {
	double rate;             /* bytes a ns */
	double busy_ns;
	struct { uint32_t member; uint64_t posted_ns, done_ns; } line[1024];
	unsigned head, tail;
};

static void send_all(struct way *w, unsigned i, uint64_t now_ns)
{
	while (post(i, now_ns)) {
		assert_true(w->tail - w->head < 1024);
		w->busy_ns = DQ_MAX(w->busy_ns, (double)now_ns) + SEGMENT / w->rate;
		w->line[w->tail % 1024].member = i;
		w->line[w->tail % 1024].posted_ns = now_ns;
		w->line[w->tail++ % 1024].done_ns = (uint64_t)w->busy_ns + BASE;
	}
	dq_outbound_pass(&outbound, &members[i]);
}

/* What is in the queue at the end of so many RTTs, and what part of the way's rate its last ten used. */
static void run(double part, unsigned rounds, double *queue, double *used)
{
	static struct way w;
	uint64_t now = 1000 * US, end = now + rounds * BASE, carried = 0;
	struct dq_outbound_member *m;

	memset(&w, 0, sizeof w);
	w.rate = part * (double)WINDOW / BASE;
	begin(8, BASE);
	for (unsigned i = 0; i < 8; i++)
		send_all(&w, i, now);
	for (; now < end; now += 100) {
		while (w.head != w.tail && w.line[w.head % 1024].done_ns <= now) {
			unsigned at = w.head++ % 1024, i = w.line[at].member;

			dq_outbound_done(&outbound, &members[i], SEGMENT, w.line[at].posted_ns, 0, w.line[at].done_ns, BASE, true);
			carried += now >= end - 10 * BASE ? SEGMENT : 0;
			if (!members[i].waiting)
				send_all(&w, i, now);
		}
		while ((m = dq_outbound_next(&outbound, now)))
			send_all(&w, (unsigned)(m - members), now);
	}
	*queue = DQ_MAX(w.busy_ns - (double)now, 0.0) * w.rate;
	*used = (double)carried / (10.0 * BASE) / w.rate;
}

static void test_settles(void **state)
{
	static const double parts[] = { 1.0 / 8, 1.0 / 3, 0.7 };

	(void)state;
	for (unsigned i = 0; i < 3; i++) {
		double queue, used;

		run(parts[i], 60, &queue, &used);
		assert_true(used >= 0.97);
		assert_true(queue >= TARGET / 2 && queue <= 1.5 * TARGET);
	}
}

/* The first segments of all hosts that begin at once may meet: what only they saw does not end the doubling. */
static void test_first_samples_may_meet_a_burst(void **state)
{
	uint64_t now = 1000 * US;
	struct dq_outbound_group *g;

	(void)state;
	g = begin_and_fill(2, now);
	done(0, now, BASE / 4);
	assert_true(g->doubling && g->grows == 0);
	for (unsigned i = 0; i < 20; i++)
		done(i % 2, now + i * US, 0);
	assert_true(g->doubling && g->grows == 1);
	for (unsigned i = 0; i < 60; i++) /* but a queue that stays does */
		done(i % 2, now + (i < 30 ? 2 : 4) * BASE + i * US, BASE / 4);
	assert_false(g->doubling);
}

/* Who is alone may have more of the pipe than a window; the ramp to it is over where a window is. */
static void test_nothing_is_due_beyond_a_window(void **state)
{
	uint64_t now = 1000 * US, all = 0;
	struct dq_outbound_group *g;

	(void)state;
	begin(1, BASE);
	g = &outbound.groups[members[0].group];
	g->scale = 4;
	for (unsigned steps = 0;; steps++) {
		uint64_t due;

		all = fill(1, now);
		due = dq_outbound_due(&outbound, now);
		if (due == DQ_NEVER)
			break;
		assert_true(steps <= WINDOW / SEGMENT + 1);
		now = due;
	}
	assert_in_range(all, WINDOW, WINDOW + DQ_OUTBOUND_MARGIN * SEGMENT);
}

/* Nothing queues: after a few RTTs the group has the whole pipe, and no more. */
static void test_free_way(void **state)
{
	double queue, used;

	(void)state;
	run(1.0, 20, &queue, &used);
	assert_true(used >= 0.97);
	assert_true(outbound.groups[members[0].group].shrinks <= 1);
}

/* Samples that departed before a step down still saw the old limit: one queue, one step. */
static void test_one_step_for_one_queue(void **state)
{
	uint64_t now = 1000 * US;
	struct dq_outbound_group *g;

	(void)state;
	g = begin_and_fill(2, now);
	for (unsigned i = 0; i < 60; i++)
		done(i % 2, now, BASE);
	assert_int_equal(g->shrinks, 1);
	done(0, now + 3 * BASE, 0);
	done(1, now + 4 * BASE + 1, 0);
	assert_int_equal(g->shrinks, 1);
}

/* Wake-ups of this host, and its NIC taking queue pairs in turn, are no queues of the fabric. */
static void test_what_is_not_the_fabric(void **state)
{
	struct dq_outbound_group *g;
	uint64_t now = 1000 * US;

	(void)state;
	begin(1, BASE);
	dq_outbound_join(&outbound, &members[0], WINDOW, TARGET, BASE, 50 * US);
	g = &outbound.groups[members[0].group];
	fill(1, now);
	dq_outbound_done(&outbound, &members[0], SEGMENT, now + 30 * US, 30 * US, now + BASE + 100 * US, BASE, true);
	assert_int_equal(g->delay_ns, 0);
	dq_outbound_done(&outbound, &members[0], SEGMENT, now + BASE + 130 * US, 30 * US, now + 2 * BASE + 270 * US, BASE, true);
	assert_int_equal(g->delay_ns, 60 * US);
}

/* A question of a few bytes does not wait behind those who send much. */
static void test_small_ones_do_not_wait(void **state)
{
	uint64_t now = 1000 * US;

	(void)state;
	begin(3, BASE);
	fill(2, now);
	assert_true(dq_outbound_admits(&outbound, &members[2], 4096, 4096, now));
	dq_outbound_post(&outbound, &members[2], 4096);
	assert_false(dq_outbound_admits(&outbound, &members[2], 4096, 4096, now)); /* one at a time */
}

/* Members come and go, with bytes in flight and in line; the sums are those of who is there. */
static void test_leaving(void **state)
{
	uint64_t now = 1000 * US;

	(void)state;
	begin(4, BASE);
	fill(4, now);
	assert_int_equal(outbound.waiting, 4);
	dq_outbound_join(&outbound, &members[0], WINDOW, TARGET, BASE / 8, 0); /* its path got shorter */
	dq_outbound_leave(&outbound, &members[1]);
	dq_outbound_leave(&outbound, &members[1]);
	assert_int_equal(outbound.active, 3);
	assert_int_equal(outbound.waiting, 3);
	assert_true(dq_outbound_admits(&outbound, &members[1], SEGMENT, 0, now)); /* takes no part any more */
	for (unsigned i = 0; i < 4; i++)
		dq_outbound_leave(&outbound, &members[i]);
	assert_int_equal(outbound.active + outbound.waiting + outbound.targets, 0);
	for (unsigned i = 0; i < DQ_OUTBOUND_GROUPS; i++) {
		const struct dq_outbound_group *g = &outbound.groups[i];

		assert_int_equal(g->active + g->waiting + g->inflight + g->promised + g->windows + g->backlog, 0);
		assert_null(g->head);
	}
	assert_null(dq_outbound_next(&outbound, now + BASE));
	assert_int_equal(dq_outbound_due(&outbound, now), DQ_NEVER);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_ramp),
		cmocka_unit_test(test_turns_are_even),
		cmocka_unit_test(test_turns_follow_the_backlog),
		cmocka_unit_test(test_groups_share_the_device),
		cmocka_unit_test(test_settles),
		cmocka_unit_test(test_first_samples_may_meet_a_burst),
		cmocka_unit_test(test_nothing_is_due_beyond_a_window),
		cmocka_unit_test(test_free_way),
		cmocka_unit_test(test_one_step_for_one_queue),
		cmocka_unit_test(test_what_is_not_the_fabric),
		cmocka_unit_test(test_small_ones_do_not_wait),
		cmocka_unit_test(test_leaving),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
