/* SPDX-License-Identifier: Apache-2.0 */
/* The window of a whole VC on a path that changes: limits obeyed, full rate kept, found again after a reroute. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "prng.h"
#include "vc_pair.h"

#define RATE 25000000000ull
#define MESSAGE (8ull << 20)

struct flow { uint32_t a, b; };

static struct vp_config far_and_near(uint64_t one_way_ns)
{
	struct vp_config c = vp_config_default();
	c.link = (struct vp_link){ .delay_ns = one_way_ns, .rate_bps = RATE, .control_ns = one_way_ns };
	c.profile = (struct dq_window_profile){ .window_bytes = 2 << 20, .floor_bytes = 32 << 10, .segment_bytes = 16 << 10,
						.base_rtt_ns = 2 * one_way_ns, .rate_bps = RATE, .noise_ns = 1000, .adapt = true };
	c.depth = c.outstanding = 64;
	return c;
}

/* Enough messages that the sender never runs dry. */
static struct vp *busy(const struct vp_config *c, struct flow *f, uint32_t messages)
{
	struct vp *w = vp_new(3);
	w->check_content = false;
	vp_host(w, 0, 0);
	vp_host(w, 0, 0);
	vp_pair(w, 0, 1, c);
	f->a = vp_connect(w, 0, 1, 2, &f->b);
	for (uint32_t i = 0; i < messages; i++) {
		vp_recv(w, 1, f->b, 1, MESSAGE);
		vp_send(w, 0, f->a, 1, MESSAGE);
	}
	return w;
}

/* Part of the path's rate that gets through from now on. */
static double goodput(struct vp *w, uint64_t ns)
{
	uint64_t before = w->ends[0]->completed_bytes;
	vp_run_until(w, w->now_ns + ns);
	assert_true(w->ends[0]->vc.backlog > 0);
	return (double)(w->ends[0]->completed_bytes - before) * 8e9 / (double)ns / (double)RATE;
}

static void finish(struct vp *w)
{
	vp_settle(w);
	for (uint32_t i = 0; i < w->op_count; i++)
		assert_int_equal(vp_done(w, i)->status, DQ_OK);
	vp_close_all(w);
	vp_check_clean(w);
	vp_free(w);
}

/* The window is 80 times the path's BDP at first: the queue goes, the rate stays. */
static void test_small_queue_at_full_rate(void **state)
{
	struct vp_config c = far_and_near(4000);
	struct flow f;
	struct vp *w = busy(&c, &f, 50);
	uint64_t bdp = RATE / 8 * 8000 / 1000000000;
	(void)state;
	goodput(w, 5000000);
	assert_true(goodput(w, 20000000) >= 0.97);
	w->ends[0]->inflight_peak = 0;
	assert_true(goodput(w, 20000000) >= 0.97);
	assert_true(w->ends[0]->inflight_peak <= bdp + 6 * c.profile.segment_bytes);
	finish(w);
}

/* The path becomes 30 times longer in the middle of a transfer, and then short again. Nobody tells the VC. */
static void test_reroute(void **state)
{
	struct vp_config c = far_and_near(4000);
	struct flow f;
	struct vp *w = busy(&c, &f, 200);
	uint64_t bdp = RATE / 8 * 240000 / 1000000000;
	(void)state;
	goodput(w, 5000000);
	assert_true(goodput(w, 5000000) >= 0.97);

	for (int end = 0; end < 2; end++)
		w->ends[end]->link.delay_ns = w->ends[end]->link.control_ns = 120000;
	goodput(w, 60000000); /* it sees it, believes it, and grows by a segment an RTT */
	assert_true(w->ends[0]->vc.window.reroutes >= 1);
	assert_true(goodput(w, 50000000) >= 0.9);
	w->ends[0]->inflight_peak = 0;
	goodput(w, 20000000);
	assert_true(w->ends[0]->inflight_peak <= 2 * bdp);

	for (int end = 0; end < 2; end++)
		w->ends[end]->link.delay_ns = w->ends[end]->link.control_ns = 4000;
	goodput(w, 5000000);
	assert_true(goodput(w, 20000000) >= 0.97);
	w->ends[0]->inflight_peak = 0;
	goodput(w, 20000000);
	assert_true(w->ends[0]->inflight_peak <= RATE / 8 * 8000 / 1000000000 + 6 * c.profile.segment_bytes);
	finish(w);
}

/* Other traffic takes half of the path for a while, in bursts. */
static void test_competing_load(void **state)
{
	struct vp_config c = far_and_near(20000);
	struct flow f;
	struct vp *w = busy(&c, &f, 200);
	uint64_t before, began;
	(void)state;
	goodput(w, 10000000);
	assert_true(goodput(w, 10000000) >= 0.97);
	before = w->ends[0]->completed_bytes;
	began = w->now_ns;
	for (int i = 0; i < 4000; i++) { /* 16 KiB each 10.5 us: half the rate */
		vp_load(w, 0, 16 << 10);
		vp_run_until(w, began + (uint64_t)i * 10486);
	}
	assert_true((double)(w->ends[0]->completed_bytes - before) * 8e9 / (double)(w->now_ns - began) >= 0.9 * 0.5 * RATE);
	goodput(w, 10000000);
	assert_true(goodput(w, 10000000) >= 0.97); /* and takes it again */
	finish(w);
}

/* Segments arrive in any order over the QPs, and the profile changes all the time: nothing is lost, nothing comes twice. */
static void test_profile_changes(void **state)
{
	struct vp_config c = far_and_near(10000);
	struct vp *w = vp_new(5);
	struct flow f;
	uint64_t prng = 5;
	(void)state;
	c.link.jitter_ns = 50000;
	c.link.poll_ns = 20000;
	vp_host(w, 0, 0);
	vp_host(w, 0, 0);
	vp_pair(w, 0, 1, &c);
	f.a = vp_connect(w, 0, 1, 2, &f.b);
	for (int i = 0; i < 12; i++) {
		vp_recv(w, 1, f.b, 1, 2 << 20);
		vp_send(w, 0, f.a, 1, (2 << 20) - prng_below(&prng, 2000));
	}
	for (int i = 0; w->heap_count && i < 2000; i++) {
		struct dq_window_profile p = c.profile;
		vp_run_until(w, w->now_ns + prng_below(&prng, 20000));
		p.segment_bytes = 128u * (1 + prng_below(&prng, 200)); /* above what was negotiated, too */
		p.window_bytes = 1 + prng_below(&prng, 3 << 20);
		p.floor_bytes = prng_below(&prng, 100000);
		p.base_rtt_ns = prng_below(&prng, 100000);
		p.adapt = prng_below(&prng, 2);
		vp_profile(w, 0, &p, prng_below(&prng, 100), prng_below(&prng, 20), prng_below(&prng, 2));
		assert_true(w->ends[0]->vc.window.profile.segment_bytes <= c.profile.segment_bytes);
		assert_true(w->ends[0]->vc.qps.limit >= 1 && w->ends[0]->vc.qps.limit <= c.depth);
		assert_true(w->ends[0]->vc.qps.active >= 1 && w->ends[0]->vc.qps.active <= c.qps);
	}
	finish(w);
}

/* A slow QP gets less, and does not hold the others back. */
static void test_slow_queue_pair(void **state)
{
	struct vp_config c = far_and_near(10000);
	struct vp *w = vp_new(5);
	struct flow f;
	(void)state;
	c.link.jitter_ns = 0;
	c.profile.adapt = false;
	c.profile.window_bytes = 512 << 10;
	w->check_content = false;
	vp_host(w, 0, 0);
	vp_host(w, 0, 0);
	vp_pair(w, 0, 1, &c);
	w->slow_qp_ns = 200000; /* QP 0: 20 times as long */
	f.a = vp_connect(w, 0, 1, 2, &f.b);
	for (int i = 0; i < 20; i++) {
		vp_recv(w, 1, f.b, 1, MESSAGE);
		vp_send(w, 0, f.a, 1, MESSAGE);
	}
	goodput(w, 5000000);
	assert_true(goodput(w, 20000000) >= 0.9);
	finish(w);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_small_queue_at_full_rate),
		cmocka_unit_test(test_reroute),
		cmocka_unit_test(test_competing_load),
		cmocka_unit_test(test_profile_changes),
		cmocka_unit_test(test_slow_queue_pair),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
