/* SPDX-License-Identifier: Apache-2.0 */
/* The window alone, and against the model of a fabric. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "core/window.h"
#include "fabric.h"
#include "prng.h"

/* Bytes of queue that the rule tolerates, and the steps it takes above that before it acts. */
static double queue_allowed(const struct vc *v, uint64_t rate_bps, unsigned vcs)
{
	return (double)v->window.threshold_ns * (double)rate_bps / 8e9 + 2.0 * vcs * v->segment;
}

static const struct { uint64_t base; uint32_t segment; } paths[] = {
	{ 8 * US, 16 * KIB }, { 8 * US, 32 * KIB }, { 56 * US, 64 * KIB }, { 120 * US, 256 * KIB }, { 240 * US, 512 * KIB },
};

/* One VC whose profile is right, or much too large: the rate is reached, the queue stays a few segments. */
static void test_converges(void **state)
{
	static const double gains[] = { 1.25, 2.0, 8.0 };

	(void)state;
	for (unsigned p = 0; p < sizeof paths / sizeof *paths; p++) {
		for (unsigned g = 0; g < sizeof gains / sizeof *gains; g++) {
			struct dq_window_profile prof = profile_of(paths[p].base, 100 * GBIT, paths[p].segment, gains[g]);
			struct sim *s = sim_new(200 * GBIT, 100 * GBIT);
			struct vc *v = vc_add(s, 0, paths[p].base, &prof);
			double used;

			vc_start(s, v);
			measure(s, 100 * paths[p].base);
			used = measure(s, 300 * paths[p].base);
			show("converges", used, s, v);
			assert_true(used >= 0.97);
			assert_true((double)s->queue_peak <= queue_allowed(v, 100 * GBIT, 1));
			assert_true(mean_queue(s) <= 5.0 * paths[p].segment);
			assert_int_equal(v->window.reroutes, 0);
			free(s);
		}
	}
}


/* Another VC enters the bottleneck and leaves it: both get about the same, then the first has it all again. */
static void test_competing_flow(void **state)
{
	(void)state;
	for (unsigned p = 0; p < sizeof paths / sizeof *paths; p++) {
		struct dq_window_profile prof = profile_of(paths[p].base, 100 * GBIT, paths[p].segment, 1.25);
		struct sim *s = sim_new(200 * GBIT, 100 * GBIT);
		struct vc *a = vc_add(s, 0, paths[p].base, &prof);
		struct vc *b = vc_add(s, 1, paths[p].base, &prof);
		uint64_t rtt = paths[p].base, a0, b0;
		double used, ratio;

		vc_start(s, a);
		measure(s, 100 * rtt);
		vc_start(s, b);
		measure(s, 200 * rtt);
		a0 = a->delivered;
		b0 = b->delivered;
		used = measure(s, 400 * rtt);
		ratio = (double)(a->delivered - a0) / (double)(b->delivered - b0);
		show("competing", used, s, a);
		if (getenv("DQ_SHOW"))
			printf("    ratio %.3f\n", ratio);
		assert_true(used >= 0.97);
		/* With eight segments for both, 5 to 3 is as near to even as it may stay. */
		assert_true(ratio > 0.55 && ratio < 1.8);
		assert_true((double)s->queue_peak <= queue_allowed(a, 100 * GBIT, 2));
		b->active = false;
		measure(s, 100 * rtt);
		used = measure(s, 100 * rtt);
		show("alone again", used, s, a);
		assert_true(used >= 0.97);
		assert_true((double)s->queue_peak <= queue_allowed(a, 100 * GBIT, 1));
		assert_int_equal(a->window.reroutes + b->window.reroutes, 0);
		free(s);
	}
}

/* Eight VCs of one bottleneck: the rate is reached, the queue is shared, nobody takes it for a longer path. */
static void test_eight_share(void **state)
{
	struct dq_window_profile prof = profile_of(120 * US, 100 * GBIT, 64 * KIB, 1.25);
	struct sim *s = sim_new(200 * GBIT, 100 * GBIT);
	uint64_t start[8];
	double used, sum = 0, squares = 0;

	(void)state;
	for (unsigned i = 0; i < 8; i++)
		vc_start(s, vc_add(s, i % MAX_HOSTS, 120 * US, &prof));
	measure(s, 100 * MS);
	for (unsigned i = 0; i < 8; i++)
		start[i] = s->vc[i].delivered;
	used = measure(s, 100 * MS);
	show("eight", used, s, &s->vc[0]);
	for (unsigned i = 0; i < 8; i++) {
		double x = (double)(s->vc[i].delivered - start[i]);

		sum += x;
		squares += x * x;
		assert_int_equal(s->vc[i].window.reroutes, 0);
	}
	assert_true(used >= 0.97);
	assert_true((double)s->queue_peak <= queue_allowed(&s->vc[0], 100 * GBIT, 8));
	assert_true(sum * sum / (8 * squares) >= 0.9);
	free(s);
}

/*
 * The path gets longer, 8 to 240 us, and the profile does not know yet. The window falls to its floor, understands, and
 * grows to the profile's bound again; more it may not, so the rate is what that bound gives on the longer path.
 */
static void test_reroute_to_longer(void **state)
{
	struct dq_window_profile prof = profile_of(8 * US, 100 * GBIT, 16 * KIB, 1.25);
	struct sim *s = sim_new(200 * GBIT, 100 * GBIT);
	struct vc *v = vc_add(s, 0, 8 * US, &prof);
	double used, best;

	(void)state;
	vc_start(s, v);
	measure(s, 2 * MS);
	v->base_ns = 240 * US;
	measure(s, 2 * MS);
	assert_true(v->window.limit < prof.window_bytes); /* it did shrink: this test means something */
	measure(s, 18 * MS);
	used = measure(s, 20 * MS);
	best = (double)prof.window_bytes * 8e9 / (240.0 * US + 2 * 1310 + 655) / (100.0 * GBIT);
	show("longer", used, s, v);
	assert_int_equal(v->window.reroutes, 1);
	assert_int_equal(v->window.limit, prof.window_bytes);
	assert_true(used >= 0.97 * best);

	/* The profile learns of it: the window grows at once, and the rate is reached. */
	prof = profile_of(240 * US, 100 * GBIT, 16 * KIB, 1.25);
	dq_window_set_profile(&v->window, &prof);
	vc_post(s, v);
	measure(s, 20 * MS);
	used = measure(s, 20 * MS);
	show("longer, new profile", used, s, v);
	assert_true(used >= 0.97);
	assert_true((double)s->queue_peak <= queue_allowed(v, 100 * GBIT, 1));

	/* And back to the short path, with the long path's profile: no queue of 232 us. */
	v->base_ns = 8 * US;
	measure(s, 20 * MS);
	used = measure(s, 20 * MS);
	show("back", used, s, v);
	assert_true(used >= 0.97);
	assert_true((double)s->queue_peak <= 6.0 * v->segment);
	free(s);
}

/* From any path to any other, under a profile of the first: never at the floor for long, never a long queue for long. */
static void test_any_reroute(void **state)
{
	(void)state;
	for (unsigned from = 0; from < sizeof paths / sizeof *paths; from++) {
		for (unsigned to = 0; to < sizeof paths / sizeof *paths; to++) {
			struct dq_window_profile prof = profile_of(paths[from].base, 100 * GBIT, paths[from].segment, 1.25);
			struct sim *s = sim_new(200 * GBIT, 100 * GBIT);
			struct vc *v = vc_add(s, 0, paths[from].base, &prof);
			uint64_t round = DQ_MAX(paths[from].base, paths[to].base);
			double used, best, segment_ns = paths[from].segment * 0.08;

			vc_start(s, v);
			measure(s, 50 * paths[from].base);
			v->base_ns = paths[to].base;
			measure(s, 200 * round);
			used = measure(s, 100 * round);
			best = (double)prof.window_bytes * 0.08 / ((double)paths[to].base + 1.5 * segment_ns);
			show("any reroute", used, s, v);
			assert_true(used >= 0.95 * DQ_MIN(best, 1.0));
			/* The base found on a shorter path may hide a queue of one more threshold. */
			assert_true((double)s->queue_peak <= 2 * queue_allowed(v, 100 * GBIT, 1));
			free(s);
		}
	}
}

/* A host that sees completions a millisecond late: with its noise told, that is no congestion; untold, it would be. */
static void test_noisy_host(void **state)
{
	for (unsigned told = 0; told < 2; told++) {
		struct dq_window_profile prof = profile_of(8 * US, 100 * GBIT, 16 * KIB, 1.25);
		struct sim *s = sim_new(200 * GBIT, 100 * GBIT);
		struct vc *v;

		(void)state;
		prof.noise_ns = told ? MS : 0;
		v = vc_add(s, 0, 8 * US, &prof);
		v->wake_ns = MS;
		vc_start(s, v);
		/* Fewer rounds than it takes to be taken for a longer path. */
		measure(s, 12 * MS);
		if (told) {
			assert_int_equal(v->window.shrinks, 0);
			assert_int_equal(v->window.limit, prof.window_bytes);
		} else {
			assert_true(v->window.shrinks > 0);
		}
		free(s);
	}
}

/* Now and then a late completion, and the rest in time: the smallest sample of a round counts, nothing shrinks. */
static void test_jitter(void **state)
{
	struct dq_window_profile prof = profile_of(56 * US, 100 * GBIT, 64 * KIB, 1.25);
	struct dq_window w;
	uint64_t seed = 9, now = MS;

	(void)state;
	dq_window_init(&w, &prof);
	for (unsigned round = 0; round < 2000; round++) {
		for (unsigned i = 0; i < 10; i++) {
			uint64_t late = prng_below(&seed, 4) ? prng_below(&seed, 500 * US) : prng_below(&seed, 10 * US);

			now += 6 * US;
			dq_window_post(&w, 64 * KIB);
			dq_window_done(&w, 64 * KIB, now - 6 * US, now + 50 * US + late, true);
		}
		now += 500 * US;
	}
	assert_true(w.limit >= prof.window_bytes * 9 / 10);
	assert_int_equal(w.inflight, 0);
}

/* VCs that share a NIC and nothing else: the wait for the NIC is the host's own, no window shrinks. */
static void test_shared_departure(void **state)
{
	enum { VCS = 6 };
	struct dq_window_profile prof = profile_of(56 * US, 100 * GBIT, 64 * KIB, 1.25);
	struct sim *s = sim_new(100 * GBIT, 100 * GBIT);
	double used;

	(void)state;
	for (unsigned i = 0; i < VCS; i++) {
		struct vc *v = vc_add(s, 0, 56 * US, &prof);

		v->direct = true;
		vc_start(s, v);
	}
	measure(s, 10 * MS);
	used = measure(s, 20 * MS);
	show("shared NIC", used, s, &s->vc[0]);
	assert_true(used >= 0.99);
	for (unsigned i = 0; i < VCS; i++) {
		assert_int_equal(s->vc[i].window.shrinks, 0);
		assert_int_equal(s->vc[i].window.limit, prof.window_bytes);
		assert_true(s->vc[i].window.delay_ns < 10);
	}
	/* The NIC really had a queue: without the departure model each sample would have shown it. */
	assert_true(dq_queue_backlog(&s->nic[0], s->now) > 3 * prof.window_bytes);
	free(s);
}

/* A NIC 2 % slower than its nominal rate: the windows settle, the NIC stays busy. */
static void test_nominal_rate_too_high(void **state)
{
	struct dq_window_profile prof = profile_of(56 * US, 100 * GBIT, 64 * KIB, 1.25);
	struct sim *s = sim_new(98 * GBIT, 98 * GBIT);
	double used;

	(void)state;
	s->departure[0].rate_bps = 100 * GBIT;
	for (unsigned i = 0; i < 4; i++) {
		struct vc *v = vc_add(s, 0, 56 * US, &prof);

		v->direct = true;
		vc_start(s, v);
	}
	measure(s, 20 * MS);
	used = measure(s, 20 * MS);
	show("nominal rate", used, s, &s->vc[0]);
	assert_true(used >= 0.99);
	free(s);
}

/* A device that sends four times what it is told to: the model is wrong, and the windows are the profile's, not the floor. */
static void test_nominal_rate_too_low(void **state)
{
	struct dq_window_profile prof = profile_of(56 * US, 100 * GBIT, 64 * KIB, 1.25);
	struct sim *s = sim_new(400 * GBIT, 400 * GBIT);
	double used;

	(void)state;
	s->departure[0].rate_bps = 100 * GBIT;
	for (unsigned i = 0; i < 4; i++) {
		struct vc *v = vc_add(s, 0, 56 * US, &prof);

		v->direct = true;
		vc_start(s, v);
	}
	used = measure(s, 20 * MS);
	show("nominal rate low", used, s, &s->vc[0]);
	assert_true(used >= 0.97);
	for (unsigned i = 0; i < 4; i++) {
		assert_true(s->vc[i].window.skewed > 0);
		assert_int_equal(s->vc[i].window.limit, prof.window_bytes);
	}
	free(s);
}

static void change_profile(struct sim *s)
{
	struct dq_window_profile p = profile_of(56 * US, 100 * GBIT, 32 * KIB, 0.5);

	dq_window_set_profile(&s->vc[0].window, &p);
	s->vc[0].segment = p.segment_bytes;
}

/* Profiles change under a running window: bounds hold at once for what is posted, in-flight bytes drain, nothing is lost. */
static void test_set_profile_running(void **state)
{
	struct dq_window_profile prof = profile_of(56 * US, 100 * GBIT, 64 * KIB, 1.25), small = profile_of(56 * US, 100 * GBIT, 32 * KIB, 0.5);
	struct sim *s = sim_new(200 * GBIT, 100 * GBIT);
	struct vc *v = vc_add(s, 0, 56 * US, &prof);
	double used;

	(void)state;
	vc_start(s, v);
	sim_at(s, (struct event){ .time_ns = s->now + MS, .kind = EVENT_CALL, .call = change_profile });
	measure(s, 2 * MS);
	assert_int_equal(v->window.limit, small.window_bytes);
	assert_true(v->window.inflight <= small.window_bytes);
	v->window.inflight_peak = 0;
	used = measure(s, 2 * MS);
	assert_true(v->window.inflight_peak <= small.window_bytes);
	assert_true(used > 0.45 && used < 0.7);
	/* Back: it was at the bound, so it is at the new one at once. */
	dq_window_set_profile(&v->window, &prof);
	v->segment = prof.segment_bytes;
	assert_int_equal(v->window.limit, prof.window_bytes);
	vc_post(s, v);
	measure(s, 5 * MS);
	used = measure(s, 20 * MS);
	assert_true(used >= 0.97);

	/* Bounds of any kind, at any limit. */
	for (uint64_t seed = 1, i = 0; i < 20000; i++) {
		struct dq_window_profile p = {
			.window_bytes = prng_next(&seed) >> prng_below(&seed, 64),
			.floor_bytes = prng_next(&seed) >> (20 + prng_below(&seed, 44)),
			.segment_bytes = prng_below(&seed, DQ_MAX_SEGMENT_BYTES),
			.base_rtt_ns = prng_next(&seed) >> prng_below(&seed, 64),
			.rate_bps = prng_next(&seed) >> prng_below(&seed, 64),
			.noise_ns = prng_next(&seed) >> prng_below(&seed, 64),
			.adapt = prng_below(&seed, 8) != 0,
		};
		struct dq_window *w = &v->window;

		dq_window_set_profile(w, &p);
		for (unsigned k = 0; k < 5; k++) {
			uint64_t departure = prng_next(&seed) >> (1 + prng_below(&seed, 40));

			dq_window_done(w, 0, departure, departure + (prng_next(&seed) >> (1 + prng_below(&seed, 60))), true);
			assert_true(w->limit >= w->profile.floor_bytes && w->limit <= w->profile.window_bytes);
			assert_true(w->limit >= p.segment_bytes);
		}
		if (!p.adapt || p.base_rtt_ns == 0)
			assert_int_equal(w->limit, w->profile.window_bytes);
	}
	free(s);
}

/* With a floor of one segment, at the floor, under a grant of nothing: one segment at a time goes on. */
static void test_floor_progresses(void **state)
{
	struct dq_window_profile prof = profile_of(8 * US, 100 * GBIT, 16 * KIB, 1.25);
	struct sim *s = sim_new(200 * GBIT, 100 * GBIT);
	struct vc *v;

	(void)state;
	prof.window_bytes = prof.segment_bytes;
	v = vc_add(s, 0, 240 * US, &prof);
	v->grant = 0;
	vc_start(s, v);
	measure(s, 10 * MS);
	assert_in_range(v->delivered / v->segment, 39, 42);
	assert_int_equal(v->window.inflight_peak, v->segment);
	/* A segment larger than the whole window is posted alone. */
	assert_false(dq_window_admits(&v->window, UINT64_MAX, 64 * KIB));
	dq_window_done(&v->window, v->segment, 0, 0, false);
	assert_true(dq_window_admits(&v->window, 0, 64 * KIB));
	free(s);
}

/*
 * A crowd at its floors keeps a real queue whatever any of them does, which looks like a longer path. Each may be fooled once
 * in a while, and ever more seldom: the queue grows by a few segments each, not to the sum of all windows.
 */
static void test_crowd_creeps_slowly(void **state)
{
	struct dq_window_profile prof = profile_of(8 * US, 100 * GBIT, 32 * KIB, 1.25);
	struct sim *s = sim_new(200 * GBIT, 100 * GBIT);
	uint64_t reroutes = 0;
	double used;

	(void)state;
	for (unsigned i = 0; i < MAX_VCS; i++)
		vc_start(s, vc_add(s, i % MAX_HOSTS, 8 * US, &prof));
	/* A second of this is 24,000 rounds at the floor. */
	measure(s, 900 * MS);
	used = measure(s, 100 * MS);
	for (unsigned i = 0; i < MAX_VCS; i++)
		reroutes += s->vc[i].window.reroutes;
	show("crowd", used, s, &s->vc[0]);
	if (getenv("DQ_SHOW"))
		printf("    reroutes %llu\n", (unsigned long long)reroutes);
	assert_true(used >= 0.99);
	assert_true(mean_queue(s) < 0.75 * MAX_VCS * (double)prof.window_bytes);
	free(s);
}

static void test_no_adaptation(void **state)
{
	struct dq_window_profile prof = profile_of(8 * US, 100 * GBIT, 16 * KIB, 4);

	(void)state;
	for (unsigned i = 0; i < 2; i++) {
		struct dq_window_profile p = prof;
		struct sim *s = sim_new(200 * GBIT, 100 * GBIT);
		struct vc *v;

		if (i == 0)
			p.adapt = false;
		else
			p.base_rtt_ns = 0;
		v = vc_add(s, 0, 8 * US, &p);
		vc_start(s, v);
		measure(s, 2 * MS);
		assert_int_equal(v->window.limit, prof.window_bytes);
		assert_int_equal(v->window.shrinks, 0);
		free(s);
	}
}

/* Samples by hand: `n` segments that depart 1 us apart from `from` on, each taking `rtt`. Returns the last completion. */
static uint64_t feed(struct dq_window *w, uint64_t from, unsigned n, uint64_t rtt)
{
	for (unsigned i = 0; i < n; i++)
		dq_window_done(w, 0, from + i * US, from + i * US + rtt, true);
	return from + (n - 1) * US + rtt;
}

static void test_samples_that_say_nothing(void **state)
{
	struct dq_window_profile prof = profile_of(8 * US, 100 * GBIT, 16 * KIB, 1.25);
	struct dq_window w;

	(void)state;
	dq_window_init(&w, &prof);
	for (unsigned i = 0; i < 100; i++) {
		dq_window_post(&w, 16 * KIB);
		dq_window_done(&w, 16 * KIB, i * MS, i * MS + 10 * MS, false); /* flushed */
		dq_window_post(&w, 16 * KIB);
		dq_window_done(&w, 16 * KIB, i * MS + 5, i * MS, true);        /* before it departed */
	}
	assert_int_equal(w.skewed, 100);
	/* Whatever was learnt before: it goes with the first such sample. */
	feed(&w, 200 * MS, 100, 300 * US);
	assert_true(w.limit < prof.window_bytes);
	dq_window_done(&w, 0, 301 * MS, 300 * MS, true);
	assert_int_equal(w.skewed, 101);
	w.shrinks = 0;
	assert_int_equal(w.shrinks, 0);
	assert_int_equal(w.base_ns, 8 * US);
	assert_int_equal(w.limit, prof.window_bytes);
	assert_int_equal(w.inflight, 0);
	dq_window_done(&w, 16 * KIB, 0, 0, false); /* one too many: never below 0 */
	assert_int_equal(w.inflight, 0);
}

/* One long queue shrinks the window once: what departed before the change says nothing about the window after it. */
static void test_one_shrink_for_one_queue(void **state)
{
	struct dq_window_profile prof = profile_of(8 * US, 100 * GBIT, 4 * KIB, 2);
	struct dq_window w;
	uint64_t start = MS, end;

	(void)state;
	dq_window_init(&w, &prof);
	/* The first sample ends a round. All others departed before it completed. */
	end = feed(&w, start, 100, 100 * US);
	assert_int_equal(w.shrinks, 1);
	/* At most by half, however long the queue. */
	assert_int_equal(w.limit, (prof.window_bytes / 2 + 4 * KIB - 1) / (4 * KIB) * (4 * KIB));
	/* A round begins when the first that departed after the change completes, and ends an RTT later. */
	assert_true(end < start + 200 * US);
	feed(&w, start + 100 * US, 100, 100 * US);
	assert_int_equal(w.shrinks, 1);
	feed(&w, start + 200 * US, 1, 100 * US);
	assert_int_equal(w.shrinks, 2);
	/* A delay just over the threshold goes to the middle of what is tolerated, and costs a segment at least. */
	dq_window_init(&w, &prof);
	feed(&w, start, 1, 8 * US + w.threshold_ns + 1);
	assert_in_range(w.limit, prof.window_bytes * 9 / 10, prof.window_bytes * 9 / 10 + 4 * KIB);
	prof.window_bytes = 2 * prof.segment_bytes;
	dq_window_init(&w, &prof);
	feed(&w, start, 1, 8 * US + w.threshold_ns + 1);
	assert_int_equal(w.limit, prof.segment_bytes);
	dq_window_init(&w, &prof);
	feed(&w, start, 1, 8 * US + w.threshold_ns);
	assert_int_equal(w.limit, prof.window_bytes);
}

/* Each time the base is raised without proof, it takes twice as many rounds to do so again; a proof resets that. */
static void test_raising_gets_harder(void **state)
{
	struct dq_window_profile prof = profile_of(8 * US, 100 * GBIT, 16 * KIB, 1.25);
	uint64_t now = MS, rtt = 8 * US;
	unsigned want = DQ_WINDOW_PINNED_ROUNDS;
	struct dq_window w;

	(void)state;
	prof.window_bytes = prof.floor_bytes;
	dq_window_init(&w, &prof);
	for (unsigned raised = 1; raised <= 12; raised++) {
		unsigned rounds = 0;

		rtt = 2 * (w.base_ns + w.threshold_ns);
		for (; w.reroutes < raised; rounds++, now += 2 * rtt)
			dq_window_done(&w, 0, now, now + rtt, true);
		assert_int_equal(rounds, want);
		assert_int_equal(w.base_ns, rtt);
		want = DQ_MIN(want * 2, DQ_WINDOW_PINNED_MAX);
	}
	dq_window_done(&w, 0, now, now + rtt - 1, true);
	assert_int_equal(w.base_ns, rtt - 1);
	assert_int_equal(w.pinned_limit, DQ_WINDOW_PINNED_ROUNDS);
}

/* What was learnt about the base outlives profiles that say the same as before, give or take an eighth. */
static void test_learnt_base_and_profiles(void **state)
{
	struct dq_window_profile prof = profile_of(8 * US, 100 * GBIT, 16 * KIB, 1.25);
	struct dq_window w;
	uint64_t now = MS;

	(void)state;
	dq_window_init(&w, &prof);
	for (; w.reroutes == 0; now += 500 * US)
		dq_window_done(&w, 0, now, now + 240 * US, true);
	assert_int_equal(w.base_ns, 240 * US);
	prof.base_rtt_ns = 9 * US;
	dq_window_set_profile(&w, &prof);
	assert_int_equal(w.base_ns, 240 * US);
	prof.base_rtt_ns = 230 * US;
	dq_window_set_profile(&w, &prof);
	assert_int_equal(w.base_ns, 230 * US);
	dq_window_done(&w, 0, now, now + 200 * US, true);
	assert_int_equal(w.base_ns, 200 * US);
	prof.base_rtt_ns = 240 * US;
	dq_window_set_profile(&w, &prof);
	assert_int_equal(w.base_ns, 200 * US);
	prof.base_rtt_ns = 8 * US;
	dq_window_set_profile(&w, &prof);
	assert_int_equal(w.base_ns, 8 * US);
}

static void test_departure(void **state)
{
	static const uint64_t rates[] = { 1000, 999999937, 100 * GBIT, 400 * GBIT, 799999999999ull, UINT64_MAX };
	struct dq_departure d = { 0 };
	uint64_t seed = 4;

	(void)state;
	/* Unknown rate: departs when posted, in order. */
	assert_int_equal(dq_departure_next(&d, 100, 1 << 20), 100);
	assert_int_equal(dq_departure_next(&d, 90, 1 << 20), 100);
	for (unsigned r = 0; r < sizeof rates / sizeof *rates; r++) {
		uint64_t total = 0, end = 0;

		d = (struct dq_departure){ .rate_bps = rates[r] };
		for (unsigned i = 0; i < 10000; i++) {
			uint32_t bytes = prng_below(&seed, 1 << 20);
			__extension__ unsigned __int128 want;

			total += bytes;
			assert_true(dq_departure_next(&d, 1000, bytes) >= end);
			end = d.last_ns;
			want = (unsigned __int128)total * 8000000000u / rates[r] + 1000;
			/* No drift: within what 32 bits of fraction a byte can lose. */
			assert_true(end <= want && end + 1 + total / (1ull << 32) >= want);
		}
		/* Idle time is not saved up. */
		assert_int_equal(dq_departure_next(&d, end + 5 * MS, 0), end + 5 * MS);
	}
	/* A change of rate holds from the next segment on. */
	d = (struct dq_departure){ .rate_bps = 8 * GBIT };
	assert_int_equal(dq_departure_next(&d, 0, 1000), 1000);
	d.rate_bps = 80 * GBIT;
	assert_in_range(dq_departure_next(&d, 0, 1000), 1099, 1100);
	d.rate_bps = 0;
	assert_in_range(dq_departure_next(&d, 0, 1000), 1099, 1100);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_converges),
		cmocka_unit_test(test_competing_flow),
		cmocka_unit_test(test_eight_share),
		cmocka_unit_test(test_reroute_to_longer),
		cmocka_unit_test(test_any_reroute),
		cmocka_unit_test(test_noisy_host),
		cmocka_unit_test(test_jitter),
		cmocka_unit_test(test_shared_departure),
		cmocka_unit_test(test_nominal_rate_too_high),
		cmocka_unit_test(test_nominal_rate_too_low),
		cmocka_unit_test(test_set_profile_running),
		cmocka_unit_test(test_floor_progresses),
		cmocka_unit_test(test_crowd_creeps_slowly),
		cmocka_unit_test(test_no_adaptation),
		cmocka_unit_test(test_samples_that_say_nothing),
		cmocka_unit_test(test_one_shrink_for_one_queue),
		cmocka_unit_test(test_raising_gets_harder),
		cmocka_unit_test(test_learnt_base_and_profiles),
		cmocka_unit_test(test_departure),
	};

	return cmocka_run_group_tests_name("window", tests, NULL, NULL);
}
