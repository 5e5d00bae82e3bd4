/* SPDX-License-Identifier: Apache-2.0 */
/* The VC between two hosts: messages, puts, closing, canceling, failing. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "core/vc_private.h"
#include "prng.h"
#include "vc_pair.h"

/* Two hosts, one pair, ends 0 and 1. The completions are seen late, so that they cross control messages. */
static struct vp *pair(uint64_t seed, uint64_t jitter_ns, uint64_t poll_ns)
{
	struct vp_config c = vp_config_default();
	struct vp *w = vp_new(seed);
	c.link.jitter_ns = jitter_ns;
	c.link.poll_ns = poll_ns;
	c.profile.segment_bytes = 4096;
	c.profile.window_bytes = 128 << 10;
	vp_host(w, 0, 0);
	vp_host(w, 0, 0);
	vp_pair(w, 0, 1, &c);
	return w;
}

static void end(struct vp *w)
{
	vp_settle(w);
	vp_close_all(w);
	vp_check_clean(w);
	vp_free(w);
}

static void test_any_size(void **state)
{
	static const uint64_t sizes[] = { 0, 1, 7, 8, 127, 128, 129, 4095, 4096, 4097, 65536, 100001, 1 << 20, (8 << 20) - 1, 8 << 20 };
	(void)state;
	for (unsigned late = 0; late < 3; late++) {
		struct vp *w = pair(late, late * 50000, late * 70000);
		uint32_t b, a = vp_connect(w, 0, 1, 2, &b);
		for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
			uint32_t s, r;
			if (i & 1)
				r = vp_recv(w, 1, b, i, sizes[i] + (i % 3) * 1000), s = vp_send(w, 0, a, i, sizes[i]);
			else
				s = vp_send(w, 0, a, i, sizes[i]), r = vp_recv(w, 1, b, i, sizes[i] + (i % 3) * 1000);
			vp_settle(w);
			assert_int_equal(vp_done(w, s)->status, DQ_OK);
			assert_int_equal(vp_done(w, r)->status, DQ_OK);
			assert_int_equal(vp_done(w, r)->done_bytes, sizes[i]);
		}
		end(w);
	}
}

static void test_tags_in_any_order(void **state)
{
	(void)state;
	for (uint64_t seed = 0; seed < 20; seed++) {
		struct vp *w = pair(seed, 30000, 30000);
		uint64_t prng = seed;
		uint32_t b, a = vp_connect(w, 0, 1, 2, &b), ops[400], tags[200];
		for (uint32_t i = 0; i < 200; i++)
			tags[i] = i;
		for (uint32_t i = 0; i < 200; i++) {
			uint32_t j = i + prng_below(&prng, 200 - i), t = tags[i];
			tags[i] = tags[j];
			tags[j] = t;
			ops[i] = vp_recv(w, 1, b, tags[i], 20000);
			ops[200 + i] = vp_send(w, 0, a, i, 8 + prng_below(&prng, 19992));
		}
		vp_settle(w);
		for (uint32_t i = 0; i < 400; i++)
			assert_int_equal(vp_done(w, ops[i])->status, DQ_OK);
		end(w);
	}
}

static void test_same_tag_is_first_in_first_out(void **state)
{
	struct vp *w = pair(1, 100000, 100000);
	uint32_t b, a = vp_connect(w, 0, 1, 2, &b), s[50], r[50];
	(void)state;
	for (uint32_t i = 0; i < 50; i++) {
		r[i] = vp_recv(w, 1, b, 9, 10000);
		s[i] = vp_send(w, 0, a, 9, 100 * (i + 1));
	}
	vp_settle(w);
	for (uint32_t i = 0; i < 50; i++) {
		assert_int_equal(vp_done(w, s[i])->status, DQ_OK);
		assert_int_equal(vp_done(w, r[i])->done_bytes, 100 * (i + 1));
	}
	end(w);
}

static void test_too_long(void **state)
{
	struct vp *w = pair(1, 0, 50000);
	uint32_t b, a = vp_connect(w, 0, 1, 2, &b), s, r;
	(void)state;
	for (int first = 0; first < 2; first++) {
		if (first)
			s = vp_send(w, 0, a, 1, 4097);
		r = vp_recv(w, 1, b, 1, 4096);
		vp_settle(w);
		if (!first)
			s = vp_send(w, 0, a, 1, 4097);
		vp_settle(w);
		assert_int_equal(vp_done(w, s)->status, DQ_ERR_TOO_LONG);
		assert_int_equal(vp_done(w, r)->status, DQ_ERR_TOO_LONG);
	}
	/* longer than segments can be numbered: refused at once, whoever would receive it */
	w->check_content = false;
	s = vp_send(w, 0, a, 1, 32768ull * 4096 + 1);
	assert_int_equal(vp_done(w, s)->status, DQ_ERR_LIMIT);
	s = vp_send(w, 0, a, 2, 32768ull * 4096);
	r = vp_recv(w, 1, b, 2, 1ull << 30);
	vp_settle(w);
	assert_int_equal(vp_done(w, r)->done_bytes, 32768ull * 4096);
	end(w);
}

static void test_thousands_both_ways(void **state)
{
	struct vp *w = pair(5, 20000, 20000);
	uint64_t prng = 5;
	uint32_t b, a = vp_connect(w, 0, 1, 2, &b);
	(void)state;
	for (int i = 0; i < 5000; i++) {
		uint64_t n = prng_below(&prng, 9000);
		vp_recv(w, 1, b, i % 7, 9000);
		vp_send(w, 0, a, i % 7, n);
		vp_recv(w, 0, a, i % 5, 9000);
		vp_send(w, 1, b, i % 5, n);
		if (prng_below(&prng, 4) == 0)
			vp_run_until(w, w->now_ns + prng_below(&prng, 100000));
	}
	vp_settle(w);
	for (uint32_t i = 0; i < w->op_count; i++)
		assert_int_equal(vp_done(w, i)->status, DQ_OK);
	assert_int_equal(w->ends[0]->vc.counters.tx_messages, 5000);
	assert_int_equal(w->ends[0]->vc.counters.rx_messages, 5000);
	assert_int_equal(w->ends[0]->vc.tracker.duplicates, 0);
	end(w);
}

/* --- puts ------------------------------------------------------------------------------------------------------- */

static uint32_t region(struct vp *w, uint32_t e, uint32_t flow, uint64_t bytes)
{
	uint32_t x = vp_export(w, e, flow, bytes);
	while (!w->ops[x].done && vp_step(w))
		;
	assert_int_equal(vp_done(w, x)->status, DQ_OK);
	assert_int_equal(w->ops[x].done_bytes, bytes);
	w->put_target = x;
	return w->ops[x].region;
}

/* The PUT is slow, so its segments are there before it; or fast, so it is there before them. */
static void test_puts_before_and_after_their_put(void **state)
{
	(void)state;
	for (int slow = 0; slow < 2; slow++) {
		struct vp *w = pair(3, 20000, 1000);
		uint32_t b, a = vp_connect(w, 0, 1, 2, &b), id = region(w, 1, b, 1 << 20), n[64], p[64];
		w->ends[0]->link.control_ns = slow ? 3000000 : 1;
		for (uint32_t i = 0; i < 64; i++) {
			if (i % 2)
				n[i] = vp_notify(w, 1, b);
			p[i] = vp_put(w, 0, a, id, i * 16384, i ? i * 256 : 0);
			if (i % 2 == 0)
				n[i] = vp_notify(w, 1, b);
		}
		vp_settle(w);
		for (uint32_t i = 0; i < 64; i++) {
			assert_int_equal(vp_done(w, p[i])->status, DQ_OK);
			assert_int_equal(vp_done(w, n[i])->status, DQ_OK);
			assert_true(w->ops[p[i]].delivered);
		}
		end(w);
	}
}

static void test_region_errors(void **state)
{
	struct vp *w = pair(3, 0, 0);
	uint32_t b, a = vp_connect(w, 0, 1, 2, &b), d, c = vp_connect(w, 0, 1, 2, &d), id = region(w, 1, b, 4096), x;
	(void)state;
	assert_int_equal(vp_done(w, vp_put(w, 0, a, id + 1, 0, 1))->status, DQ_ERR_REGION);
	assert_int_equal(vp_done(w, vp_put(w, 0, c, id, 0, 1))->status, DQ_ERR_REGION); /* another flow's */
	assert_int_equal(vp_done(w, vp_put(w, 0, a, id, 0, 4097))->status, DQ_ERR_REGION);
	assert_int_equal(vp_done(w, vp_put(w, 0, a, id, 4096, 1))->status, DQ_ERR_REGION);
	assert_int_equal(vp_done(w, vp_put(w, 0, a, id, UINT64_MAX, 2))->status, DQ_ERR_REGION);
	assert_int_equal(vp_done(w, vp_unexport(w, 1, d, id))->status, DQ_ERR_REGION);
	assert_int_equal(vp_done(w, vp_unexport(w, 0, a, id))->status, DQ_ERR_REGION);
	x = vp_put(w, 0, a, id, 4096, 0);
	vp_settle(w);
	assert_int_equal(vp_done(w, x)->status, DQ_OK);
	x = vp_unexport(w, 1, b, id);
	assert_int_equal(vp_done(w, vp_unexport(w, 1, b, id))->status, DQ_ERR_REGION); /* twice */
	vp_settle(w);
	assert_int_equal(vp_done(w, x)->status, DQ_OK);
	assert_int_equal(vp_done(w, vp_put(w, 0, a, id, 0, 1))->status, DQ_ERR_REGION);
	end(w);
}

/* Notifications that nobody takes hold the slots of their puts: the putter waits, others do not. */
static void test_notifications_withheld(void **state)
{
	struct vp_config c = vp_config_default();
	struct vp *w = vp_new(1);
	uint32_t a, b, a2, b2, id, puts[20], s, r;
	(void)state;
	c.slot_share = 4;
	vp_host(w, 0, 0);
	vp_host(w, 0, 0);
	vp_pair(w, 0, 1, &c);
	a = vp_connect(w, 0, 1, 2, &b);
	a2 = vp_connect(w, 0, 3, 4, &b2);
	id = region(w, 1, b, 20 * 4096);
	for (uint32_t i = 0; i < 20; i++)
		puts[i] = vp_put(w, 0, a, id, i * 4096, 4096);
	vp_settle(w);
	for (uint32_t i = 0; i < 20; i++) {
		assert_int_equal(w->ops[puts[i]].done, i < 5); /* the flow's own slot and four shared ones */
		assert_int_equal(w->hosts[0].mems[w->ops[puts[i]].mem].refs, i < 5 ? 0 : 1); /* its memory does not wait for the reader */
	}
	s = vp_send(w, 0, a2, 1, 1 << 20);
	r = vp_recv(w, 1, b2, 1, 1 << 20);
	id = region(w, 1, b2, 4096);
	vp_settle(w);
	assert_int_equal(vp_done(w, s)->status, DQ_OK);
	assert_int_equal(vp_done(w, r)->status, DQ_OK);
	w->put_target = DQ_NONE;
	s = vp_put(w, 0, a2, id, 0, 4096);
	vp_settle(w);
	assert_int_equal(vp_done(w, s)->status, DQ_OK);
	for (uint32_t i = 0; i < 20; i++) {
		assert_int_equal(w->ops[puts[DQ_MIN(i + 4, 19)]].done, true);
		assert_true(i + 5 >= 20 || !w->ops[puts[i + 5]].done);
		r = vp_notify(w, 1, b);
		assert_int_equal(vp_done(w, r)->status, DQ_OK);
		vp_settle(w);
	}
	end(w);
}

static void test_unexport_during_puts(void **state)
{
	(void)state;
	for (uint64_t seed = 0; seed < 200; seed++) {
		struct vp *w = pair(seed, 30000, 30000);
		uint64_t prng = seed;
		uint32_t b, a = vp_connect(w, 0, 1, 2, &b), id = region(w, 1, b, 64 * 16384), target = w->put_target, u, ok = 0;
		for (uint32_t i = 0; i < 64; i++)
			vp_put(w, 0, a, id, i * 16384, prng_below(&prng, 16384));
		vp_run_until(w, w->now_ns + prng_below(&prng, 200000));
		u = vp_unexport(w, 1, b, id);
		while (!w->ops[u].done)
			assert_true(vp_step(w));
		assert_int_equal(w->hosts[1].mems[w->ops[target].mem].refs, 0);
		vp_settle(w); /* nothing writes there any more, else the harness fails */
		for (uint32_t i = 0; i < w->op_count; i++) {
			if (w->ops[i].kind == VP_PUT) {
				assert_true(w->ops[i].status == DQ_OK || w->ops[i].status == DQ_ERR_REGION);
				ok += w->ops[i].status == DQ_OK;
			}
		}
		/* Those that were complete are told, no more. */
		for (uint32_t i = 0; i < ok; i++)
			assert_int_equal(vp_done(w, vp_notify(w, 1, b))->status, DQ_OK);
		u = vp_notify(w, 1, b);
		assert_false(w->ops[u].done);
		end(w);
	}
}

/* --- closing ----------------------------------------------------------------------------------------------------- */

/* What a sender was told is sent arrives, also when it closes in that moment and the receiver's completions are late. */
static void test_close_after_send(void **state)
{
	(void)state;
	for (uint64_t seed = 0; seed < 50; seed++) {
		struct vp *w = pair(seed, 10000, 400000);
		uint32_t b, a = vp_connect(w, 0, 1, 2, &b), r[20], s[20], n[20], id = region(w, 1, b, 20 * 8192), p[20], last, more;
		for (uint32_t i = 0; i < 20; i++) {
			r[i] = vp_recv(w, 1, b, 1, 9000);
			n[i] = vp_notify(w, 1, b);
			s[i] = vp_send(w, 0, a, 1, 200 * i + 8);
			p[i] = vp_put(w, 0, a, id, i * 8192, 300 * i);
		}
		last = vp_recv(w, 1, b, 1, 10);
		more = vp_notify(w, 1, b);
		for (uint32_t i = 0; i < 20; i++)
			while (!w->ops[s[i]].done || !w->ops[p[i]].done)
				assert_true(vp_step(w));
		vp_close(w, 0, a, seed % 2 ? DQ_ERR_CLOSED : DQ_ERR_PEER_GONE);
		vp_settle(w);
		for (uint32_t i = 0; i < 20; i++) {
			assert_int_equal(vp_done(w, s[i])->status, DQ_OK);
			assert_int_equal(vp_done(w, p[i])->status, DQ_OK);
			assert_int_equal(vp_done(w, r[i])->status, DQ_OK);
			assert_int_equal(vp_done(w, n[i])->status, DQ_OK);
		}
		assert_int_equal(vp_done(w, last)->status, seed % 2 ? DQ_ERR_CLOSED : DQ_ERR_PEER_GONE);
		assert_int_equal(vp_done(w, more)->status, seed % 2 ? DQ_ERR_CLOSED : DQ_ERR_PEER_GONE);
		assert_int_equal(vp_done(w, vp_send(w, 1, b, 1, 5))->status, seed % 2 ? DQ_ERR_CLOSED : DQ_ERR_PEER_GONE);
		assert_int_equal(vp_done(w, vp_notify(w, 1, b))->status, seed % 2 ? DQ_ERR_CLOSED : DQ_ERR_PEER_GONE);
		assert_int_equal(vp_flow(w, 0, a)->state, VP_FLOW_GONE);
		assert_int_equal(vp_flow(w, 1, b)->state, VP_FLOW_OPEN); /* until its client closes it, too */
		vp_close(w, 1, b, DQ_ERR_CLOSED);
		assert_int_equal(vp_flow(w, 1, b)->state, VP_FLOW_GONE);
		vp_check_clean(w);
		vp_free(w);
	}
}

/* A receiver that has all it wants may close at once: nobody whose bytes it has is told that they were lost. */
static void test_close_after_receive(void **state)
{
	(void)state;
	for (uint64_t seed = 0; seed < 50; seed++) {
		struct vp *w = pair(seed, 100000, 0);
		uint32_t b, a = vp_connect(w, 0, 1, 2, &b), r[20], s[20], more;
		w->ends[1]->link.control_ns = 100; /* the word that it closed overtakes the acknowledgements */
		for (uint32_t i = 0; i < 20; i++) {
			r[i] = vp_recv(w, 1, b, 1, 90000);
			s[i] = vp_send(w, 0, a, 1, 4000 * i);
		}
		more = vp_send(w, 0, a, 1, 10); /* nobody wants this one */
		for (uint32_t i = 0; i < 20; i++)
			while (!w->ops[r[i]].done)
				assert_true(vp_step(w));
		vp_close(w, 1, b, seed % 2 ? DQ_ERR_CLOSED : DQ_ERR_PEER_GONE);
		vp_settle(w);
		for (uint32_t i = 0; i < 20; i++) {
			assert_int_equal(vp_done(w, r[i])->status, DQ_OK);
			assert_int_equal(vp_done(w, s[i])->status, DQ_OK);
		}
		assert_int_equal(vp_done(w, more)->status, seed % 2 ? DQ_ERR_CLOSED : DQ_ERR_PEER_GONE);
		vp_close(w, 0, a, DQ_ERR_CLOSED);
		end(w);
	}
}

/* Notifications that came before the close stay readable after it. */
static void test_close_with_unread_notifications(void **state)
{
	struct vp *w = pair(1, 0, 0);
	uint32_t b, a = vp_connect(w, 0, 1, 2, &b), id = region(w, 1, b, 8192);
	(void)state;
	vp_put(w, 0, a, id, 0, 100);
	vp_put(w, 0, a, id, 4096, 100);
	vp_settle(w);
	vp_close(w, 0, a, DQ_ERR_CLOSED);
	vp_settle(w);
	assert_int_equal(vp_flow(w, 0, a)->state, VP_FLOW_GONE); /* its slots do not wait for the reader */
	assert_int_equal(vp_done(w, vp_notify(w, 1, b))->status, DQ_OK);
	assert_int_equal(vp_done(w, vp_notify(w, 1, b))->status, DQ_OK);
	assert_int_equal(vp_done(w, vp_notify(w, 1, b))->status, DQ_ERR_CLOSED);
	end(w);
}

/* The receives that a dying sender had half filled are told why. */
static void test_close_in_the_middle(void **state)
{
	(void)state;
	for (uint64_t seed = 0; seed < 100; seed++) {
		struct vp *w = pair(seed, 20000, 200000);
		uint64_t prng = seed;
		uint32_t b, a = vp_connect(w, 0, 1, 2, &b), r = vp_recv(w, 1, b, 1, 1 << 20), s = vp_send(w, 0, a, 1, 1 << 20);
		vp_run_until(w, w->now_ns + 20000 + prng_below(&prng, 50000));
		assert_false(w->ops[s].done);
		vp_close(w, 0, a, DQ_ERR_PEER_GONE);
		assert_int_equal(vp_done(w, s)->status, DQ_ERR_CANCELED);
		vp_settle(w);
		assert_int_equal(vp_done(w, r)->status, DQ_ERR_PEER_GONE);
		assert_int_equal(w->hosts[1].mems[w->ops[r].mem].refs, 0); /* before the receiver closes */
		end(w);
	}
}

static void test_opening(void **state)
{
	struct vp *w = pair(1, 0, 0);
	uint32_t a, b;
	(void)state;
	w->manual_accept = true;
	a = vp_open(w, 0, 1, 2);
	vp_settle(w);
	for (b = 0; vp_flow(w, 1, b)->state != VP_FLOW_INCOMING; b++)
		;
	assert_int_equal(vp_done(w, vp_send(w, 0, a, 1, 1))->status, DQ_ERR_INVALID); /* not open yet */
	dq_vc_flow_refuse(&w->ends[1]->vc, b, DQ_ERR_REFUSED);
	vp_flow(w, 1, b)->state = VP_FLOW_GONE;
	vp_kick(w, 1);
	vp_settle(w);
	assert_int_equal(vp_flow(w, 0, a)->state, VP_FLOW_REFUSED);
	assert_int_equal(vp_flow(w, 0, a)->status, DQ_ERR_REFUSED);
	assert_int_equal(dq_vc_flow_accept(&w->ends[1]->vc, b, 2), DQ_ERR_INVALID);

	a = vp_open(w, 0, 1, 2);
	vp_settle(w);
	for (b = 0; vp_flow(w, 1, b)->state != VP_FLOW_INCOMING; b++)
		;
	vp_close(w, 1, b, DQ_ERR_REFUSED); /* closing an incoming flow refuses it */
	assert_int_equal(vp_flow(w, 1, b)->state, VP_FLOW_GONE);
	vp_settle(w);
	assert_int_equal(vp_flow(w, 0, a)->state, VP_FLOW_REFUSED);
	end(w);
}

/* The one who opened goes away, and the listener never accepts: nothing of the flow may stay, on either side. */
static void test_opener_goes_before_the_answer(void **state)
{
	struct vp *w = pair(1, 0, 0);
	uint32_t a[3], b;
	(void)state;
	w->manual_accept = true;
	for (int i = 0; i < 3; i++)
		a[i] = vp_open(w, 0, 1, 2);
	vp_settle(w);
	assert_int_equal(w->ends[1]->vc.flow_count, 3);
	for (int i = 0; i < 3; i++) {
		uint32_t at = a[(i + 1) % 3];
		vp_close(w, 0, at, DQ_ERR_PEER_GONE);
		vp_settle(w);
		assert_int_equal(vp_flow(w, 0, at)->state, VP_FLOW_GONE);
		assert_int_equal(w->ends[0]->vc.flow_count, 2 - i);
		assert_int_equal(w->ends[1]->vc.flow_count, 2 - i);
		assert_int_equal(w->ends[1]->vc.incoming.used, 2 - i);
	}

	a[0] = vp_open(w, 0, 1, 2); /* it closes while the answer is on its way */
	vp_settle(w);
	for (b = 0; vp_flow(w, 1, b)->state != VP_FLOW_INCOMING; b++)
		;
	assert_int_equal(dq_vc_flow_accept(&w->ends[1]->vc, b, 2), 0);
	vp_flow(w, 1, b)->state = VP_FLOW_OPEN;
	vp_kick(w, 1);
	vp_close(w, 0, a[0], DQ_ERR_PEER_GONE);
	vp_settle(w);
	assert_int_equal(vp_done(w, vp_recv(w, 1, b, 1, 1))->status, DQ_ERR_PEER_GONE);
	vp_close(w, 1, b, DQ_ERR_CLOSED);
	vp_settle(w);
	assert_int_equal(w->ends[0]->vc.flow_count, 0);
	assert_int_equal(w->ends[1]->vc.flow_count, 0);
	end(w);
}

/* --- withdrawing memory ------------------------------------------------------------------------------------------ */

static void test_cancel_half_received(void **state)
{
	(void)state;
	for (uint64_t seed = 0; seed < 100; seed++) {
		struct vp *w = pair(seed, 20000, 100000);
		uint64_t prng = seed;
		uint32_t b, a = vp_connect(w, 0, 1, 2, &b), r = vp_recv(w, 1, b, 1, 1 << 20), s = vp_send(w, 0, a, 1, 1 << 20), q, t;
		uint64_t began;
		bool stalled;
		vp_run_until(w, w->now_ns + 15000 + prng_below(&prng, 60000));
		began = w->now_ns;
		vp_cancel_mem(w, 1, b, w->ops[r].mem);
		assert_int_equal(vp_done(w, r)->status, DQ_ERR_CANCELED);
		q = vp_recv(w, 1, b, 1, 5000);
		t = vp_send(w, 0, a, 1, 5000);
		while (w->hosts[1].mems[w->ops[r].mem].refs)
			assert_true(vp_step(w));
		assert_true(w->now_ns - began < 1000000);
		vp_settle(w);
		assert_int_equal(dq_vc_check(&w->ends[1]->vc, w->now_ns, &stalled), 0);
		assert_int_equal(vp_done(w, s)->status, DQ_ERR_CANCELED);
		assert_int_equal(vp_done(w, q)->status, DQ_OK); /* the next message is not hurt */
		assert_int_equal(vp_done(w, t)->status, DQ_OK);
		end(w);
	}
}

/* A peer that does not answer is found after the deadline, and only then. */
static void test_silent_peer(void **state)
{
	(void)state;
	for (int how = 0; how < 5; how++) {
		struct vp_config c = vp_config_default();
		struct vp *w = vp_new(1);
		uint32_t a, b, r, s, id;
		bool stalled;
		c.cancel_deadline_ns = 500000000;
		c.stall_ns = 200000000;
		vp_host(w, 0, 0);
		vp_host(w, 0, 0);
		vp_pair(w, 0, 1, &c);
		a = vp_connect(w, 0, 1, 2, &b);
		id = region(w, 0, a, 4096);
		r = vp_recv(w, 0, a, 1, 4096);
		vp_settle(w);
		w->ends[1]->silent = true;
		switch (how) {
		case 0: vp_cancel_mem(w, 0, a, w->ops[r].mem); break;
		case 1: vp_close(w, 0, a, DQ_ERR_CLOSED); break;
		case 2: vp_unexport(w, 0, a, id); break;
		case 3: vp_close(w, 0, vp_open(w, 0, 1, 2), DQ_ERR_CLOSED); break;
		default: break;
		}
		vp_run_until(w, w->now_ns + 3000000000); /* a pause of this whole process is not held against the peer */
		for (int ms = 0; ms < 400; ms += 20) {
			assert_int_equal(dq_vc_check(&w->ends[0]->vc, w->now_ns, &stalled), 0);
			vp_run_until(w, w->now_ns + 20000000);
		}
		for (int ms = 0; ms < 100 && dq_vc_check(&w->ends[0]->vc, w->now_ns, &stalled) == 0; ms += 20)
			vp_run_until(w, w->now_ns + 20000000);
		assert_int_equal(dq_vc_check(&w->ends[0]->vc, w->now_ns, &stalled), how < 4 ? DQ_ERR_UNREACHABLE : 0);
		assert_false(stalled);
		if (how < 4)
			assert_non_null(strstr(w->ends[0]->vc.why, "500 ms"));
		w->ends[1]->silent = false;
		vp_fail(w, 0, DQ_ERR_UNREACHABLE);
		vp_settle(w);
		s = vp_flow(w, 0, a)->state == VP_FLOW_OPEN && !vp_flow(w, 0, a)->closed ? vp_send(w, 0, a, 1, 1) : DQ_NONE;
		if (s != DQ_NONE)
			assert_int_equal(vp_done(w, s)->status, DQ_ERR_UNREACHABLE);
		end(w);
	}
}

static void test_stall(void **state)
{
	struct vp_config c = vp_config_default();
	struct vp *w = vp_new(1);
	uint32_t a, b;
	bool stalled;
	(void)state;
	c.stall_ns = 1000000;
	vp_host(w, 0, 0);
	vp_host(w, 0, 0);
	vp_pair(w, 0, 1, &c);
	a = vp_connect(w, 0, 1, 2, &b);
	vp_recv(w, 1, b, 1, 1 << 20);
	vp_settle(w);
	w->ends[0]->link.delay_ns = 5000000; /* a path that holds everything back */
	vp_send(w, 0, a, 1, 1 << 20);
	vp_run_until(w, w->now_ns + 900000);
	assert_int_equal(dq_vc_check(&w->ends[0]->vc, w->now_ns, &stalled), 0);
	assert_false(stalled);
	vp_run_until(w, w->now_ns + 200000);
	assert_int_equal(dq_vc_check(&w->ends[0]->vc, w->now_ns, &stalled), 0);
	assert_true(stalled);
	assert_int_equal(dq_vc_check(&w->ends[0]->vc, w->now_ns, &stalled), 0);
	assert_false(stalled); /* once a stall */
	assert_int_equal(w->ends[0]->vc.counters.stalls, 1);
	end(w);
}

static void test_failure_completes_everything(void **state)
{
	(void)state;
	for (uint64_t seed = 0; seed < 40; seed++) {
		struct vp *w = pair(seed, 20000, 50000);
		uint32_t b, a = vp_connect(w, 0, 1, 2, &b), id = region(w, 1, b, 1 << 20), open = vp_open(w, 0, 1, 2);
		w->manual_accept = true;
		w->put_target = DQ_NONE;
		vp_open(w, 1, 1, 2);
		for (uint32_t i = 0; i < 30; i++) {
			vp_recv(w, 1, b, i % 3, 30000);
			vp_send(w, 0, a, i % 4, i * 1000);
			vp_put(w, 0, a, id, 0, i * 100);
			vp_notify(w, 0, a);
			vp_notify(w, 1, b);
			vp_export(w, 0, a, 100);
		}
		vp_unexport(w, 1, b, id);
		vp_run_until(w, w->now_ns + seed * 5000);
		vp_fail(w, seed % 2, DQ_ERR_DEVICE);
		vp_settle(w);
		assert_int_equal(w->op_open, 0); /* before any client closes anything */
		for (uint32_t h = 0; h < 2; h++)
			for (uint32_t m = 0; m < w->hosts[h].mem_count; m++)
				assert_int_equal(w->hosts[h].mems[m].refs, 0);
		(void)open;
		end(w);
	}
}

/* --- hostile peers ------------------------------------------------------------------------------------------------ */

static uint32_t any_of(uint64_t *prng, uint32_t near)
{
	return prng_below(prng, 3) ? prng_below(prng, near) : (uint32_t)prng_next(prng);
}

/* A well-formed packet with the next number and one or more messages whose fields are random, mostly near what exists. */
static size_t forge(struct vp *w, uint32_t e, uint64_t *prng, uint8_t *packet)
{
	const struct dq_control_channel *c = &w->ends[e]->vc.control;
	struct dq_packet_head h = { .version = DQ_WIRE_VERSION, .first = c->handled, .ack = c->sent_number, .credits = c->peer_posted };
	size_t at = DQ_WIRE_HEAD_BYTES;
	for (uint32_t n = 1 + prng_below(prng, 3); n; n--) {
		struct dq_message m = { .type = (uint8_t)(1 + prng_below(prng, 12)), .flags = (uint8_t)prng_below(prng, 2),
			.slot = (uint16_t)(prng_below(prng, 2) * DQ_SLOT_PUT_BASE + any_of(prng, 8) % DQ_SLOT_PUT_BASE),
			.flow = any_of(prng, 8), .peer_flow = any_of(prng, 8), .client = any_of(prng, 4), .listener = 7,
			.region = any_of(prng, 6), .status = -(int32_t)any_of(prng, 21), .grant_serial = any_of(prng, 9),
			.grant = any_of(prng, 100000), .backlog = prng_next(prng), .serial = any_of(prng, 20), .tag = prng_below(prng, 3),
			.cookie = prng_next(prng), .length = any_of(prng, 20000), .offset = any_of(prng, 20000),
			.addr = prng_next(prng) & ~(uint64_t)(DQ_ALIGN_BYTES - 1), .nkeys = 1, .keys = { prng_next(prng) }, .text = "bye" };
		at += (size_t)dq_message_encode(&m, packet + at, DQ_CONTROL_BYTES - at);
		h.count++;
	}
	h.bytes = (uint16_t)at;
	dq_packet_head_encode(&h, packet);
	return at;
}

static void test_hostile_peer(void **state)
{
	uint64_t broke = 0;
	(void)state;
	for (uint64_t seed = 1; seed <= 1500; seed++) {
		struct vp *w = pair(seed, 20000, 20000);
		uint64_t prng = seed;
		uint32_t b, a = vp_connect(w, 0, 1, 2, &b), id = region(w, 1, b, 20000), back = region(w, 0, a, 20000);
		w->put_target = DQ_NONE;
		w->check_content = false;
		w->expect_broken = true;
		for (uint32_t i = 0; i < 6; i++) {
			vp_recv(w, 1, b, i % 3, 10000);
			vp_send(w, 1, b, i % 2, 9000);
			vp_recv(w, 0, a, i % 3, 10000);
			vp_send(w, 0, a, i % 3, 9000);
			vp_put(w, 0, a, id, 0, 3000);
			vp_put(w, 1, b, back, 0, 3000);
			if (prng_below(&prng, 2))
				vp_notify(w, 1, b);
		}
		vp_open(w, 1, 2, 1);
		for (int i = 0; i < 30 && w->ends[1]->up; i++) {
			uint8_t packet[DQ_CONTROL_BYTES];
			size_t bytes;
			for (uint32_t n = prng_below(&prng, 30); n && vp_step(w); n--)
				;
			if (!w->ends[1]->up)
				break;
			switch (prng_below(&prng, 6)) {
			case 0:
				if (dq_vc_segment_in(&w->ends[1]->vc, dq_imm_encode((uint16_t)(prng_below(&prng, 2) * 0x8000 + any_of(&prng, 6)),
				    prng_below(&prng, 2), (uint16_t)any_of(&prng, 10)), any_of(&prng, 20000), w->now_ns))
					vp_fail(w, 1, DQ_ERR_UNREACHABLE);
				break;
			case 1:
				if (dq_vc_segment_done(&w->ends[1]->vc, any_of(&prng, 40) + 128, w->now_ns, w->now_ns) && prng_below(&prng, 2))
					vp_fail(w, 1, DQ_ERR_UNREACHABLE);
				break;
			case 2:
				bytes = prng_below(&prng, 300);
				for (size_t k = 0; k < bytes; k++)
					packet[k] = (uint8_t)prng_next(&prng);
				vp_control_inject(w, 1, packet, bytes);
				break;
			default:
				bytes = forge(w, 1, &prng, packet);
				for (uint32_t n = prng_below(&prng, 3); n > 1; n--)
					packet[prng_below(&prng, (uint32_t)bytes)] = (uint8_t)prng_next(&prng);
				vp_control_inject(w, 1, packet, bytes);
			}
			if (w->ends[1]->up && prng_below(&prng, 10) == 0 && vp_flow(w, 1, b)->state == VP_FLOW_OPEN && !vp_flow(w, 1, b)->closed)
				vp_close(w, 1, b, DQ_ERR_CLOSED);
		}
		broke += w->ends[1]->broken != 0;
		vp_fail(w, 0, DQ_ERR_UNREACHABLE);
		vp_fail(w, 1, DQ_ERR_UNREACHABLE);
		end(w);
	}
	assert_true(broke > 500);
}

static void inject(struct vp *w, uint32_t e, const struct dq_message *m)
{
	const struct dq_control_channel *c = &w->ends[e]->vc.control;
	uint8_t packet[DQ_CONTROL_BYTES];
	int n = dq_message_encode(m, packet + DQ_WIRE_HEAD_BYTES, sizeof packet - DQ_WIRE_HEAD_BYTES);
	struct dq_packet_head h = { .version = DQ_WIRE_VERSION, .first = c->handled, .ack = c->sent_number, .credits = c->peer_posted,
				    .count = 1, .bytes = (uint16_t)(DQ_WIRE_HEAD_BYTES + (unsigned)n) };
	assert_true(n > 0);
	dq_packet_head_encode(&h, packet);
	vp_control_inject(w, e, packet, h.bytes);
}

/* Each breach of the protocol is refused, and the text names it. */
static void test_wrong_messages(void **state)
{
	/* Flow 0 at each end. End 1: a receive of 1000 bytes in slot 0, serial 1; a region 0 of 4096 bytes; a put of its own in
	 * slot 0x8000, serial 2, that has just begun; a put of the peer of 50 bytes in slot 0x8000, serial 1, not taken. */
	const struct { struct dq_message m; const char *why; } cases[] = {
		{ { .type = DQ_MSG_DONE, .slot = 1, .serial = 1 }, "DONE for slot 1, serial 1, which is not outstanding" },
		{ { .type = DQ_MSG_DONE, .slot = 0, .serial = 2 }, "DONE for slot 0, serial 2, which is not outstanding" },
		{ { .type = DQ_MSG_DONE, .slot = 0, .serial = 1, .length = 1001 }, "DONE says that 1001 bytes were written into the 1000 of slot 0" },
		{ { .type = DQ_MSG_DONE, .slot = 0x8000, .serial = 2 }, "DONE for slot 32768 before all of it was sent" },
		{ { .type = DQ_MSG_DONE, .slot = 0x8001, .serial = 3 }, "which is not outstanding" },
		{ { .type = DQ_MSG_RTR, .slot = 0, .flow = 9, .nkeys = 1 }, "RTR names flow 9, which is not open" },
		{ { .type = DQ_MSG_RTR, .slot = 0x8000, .nkeys = 1 }, "RTR names slot 32768, which is one of the sender's" },
		{ { .type = DQ_MSG_RTR, .slot = 5, .nkeys = 1 }, NULL },
		{ { .type = DQ_MSG_PUT, .flow = 9, .slot = 0x8005 }, "PUT names flow 9, which is not open" },
		{ { .type = DQ_MSG_PUT, .slot = 5 }, "PUT names slot 5, which is one of the receiver's" },
		{ { .type = DQ_MSG_PUT, .slot = 0x8000 }, "PUT names slot 32768, which is in use" },
		{ { .type = DQ_MSG_PUT, .slot = 0x8005, .region = 7 }, "PUT names region 7, which was not exported on flow 0" },
		{ { .type = DQ_MSG_PUT, .slot = 0x8005, .offset = 4096, .length = 1 }, "does not fit into region 0 of 4096 bytes" },
		{ { .type = DQ_MSG_PUT, .slot = 0x8005, .offset = UINT64_MAX, .length = 2 }, "does not fit into region 0 of 4096 bytes" },
		{ { .type = DQ_MSG_CANCEL, .slot = 0x8000, .serial = 1 }, "CANCEL for slot 32768, serial 1 after 0 bytes" }, /* arrived */
		{ { .type = DQ_MSG_CANCEL, .slot = 0x8003, .serial = 1 }, "CANCEL for slot 32771" },
		{ { .type = DQ_MSG_CANCEL, .slot = 77, .serial = 1 }, NULL },
		{ { .type = DQ_MSG_EXPORT, .flow = 9, .nkeys = 1 }, "EXPORT names flow 9" },
		{ { .type = DQ_MSG_UNEXPORT, .region = 123 }, "UNEXPORT names region 123, which is not exported" },
		{ { .type = DQ_MSG_UNEXPORT, .flow = 9 }, "UNEXPORT names flow 9" },
		{ { .type = DQ_MSG_UNEXPORT, .flags = DQ_FLAG_ANSWER }, "UNEXPORT answers for region 0, which was not withdrawn" },
		{ { .type = DQ_MSG_FLOW_CLOSE, .flow = 9 }, "FLOW_CLOSE names flow 9" },
		{ { .type = DQ_MSG_FLOW_ACCEPT, .flow = 0 }, "FLOW_ACCEPT names flow 0, which is not being opened" },
		{ { .type = DQ_MSG_ERROR, .text = "tired" }, "peer gave up: tired" },
		{ { .type = DQ_MSG_BACKLOG, .backlog = UINT64_MAX }, NULL },
	};
	static const struct { uint32_t slot, index, last, bytes, again_index, again_last; const char *why; } segments[] = {
		{ 3, 0, 1, 10, 0, 0, "segment for slot 3, which was not announced" },
		{ 0, 0, 0, 1001, 0, 0, "more than the 1000 bytes of slot 0" },
		{ 0, 2, 1, 10, 3, 0, "segment 3 of slot 0 contradicts its last segment" },
		{ 0, 2, 1, 10, 2, 1, NULL }, /* a duplicate */
	};
	(void)state;
	for (unsigned i = 0; i < sizeof cases / sizeof *cases + sizeof segments / sizeof *segments; i++) {
		const unsigned n = sizeof cases / sizeof *cases;
		struct vp *w = pair(i, 0, 0);
		uint32_t b, a = vp_connect(w, 0, 1, 2, &b), id, back;
		const char *why;
		assert_int_equal(a + b, 0);
		vp_recv(w, 1, b, 1, 1000);
		id = region(w, 1, b, 4096);
		back = region(w, 0, a, 1 << 20);
		assert_int_equal(id, 0);
		w->put_target = DQ_NONE;
		vp_put(w, 0, a, id, 0, 50);
		vp_settle(w);
		w->ends[1]->link.delay_ns = 1000000000;
		vp_put(w, 1, b, back, 0, 1 << 20);
		w->expect_broken = true;
		if (i < n) {
			why = cases[i].why;
			inject(w, 1, &cases[i].m);
		} else {
			int rc = 0;
			why = segments[i - n].why;
			for (int k = 0; k < 2 && !rc; k++)
				rc = dq_vc_segment_in(&w->ends[1]->vc, dq_imm_encode((uint16_t)segments[i - n].slot,
					k ? segments[i - n].again_last : segments[i - n].last,
					(uint16_t)(k ? segments[i - n].again_index : segments[i - n].index)), segments[i - n].bytes, w->now_ns);
			if (rc)
				vp_fail(w, 1, DQ_ERR_UNREACHABLE);
		}
		if (!why)
			assert_true(w->ends[1]->up);
		else if (w->ends[1]->up || !strstr(w->ends[1]->vc.why, why))
			fail_msg("expected: %s, was: %s", why, w->ends[1]->vc.why);
		vp_fail(w, 0, DQ_ERR_UNREACHABLE);
		vp_fail(w, 1, DQ_ERR_UNREACHABLE);
		end(w);
	}
}

/* Bytes of a put that came before its PUT count, too. */
static void test_put_longer_than_it_says(void **state)
{
	(void)state;
	for (int early = 0; early < 2; early++) {
		struct vp *w = pair(1, 0, 0);
		uint32_t b, id;
		vp_connect(w, 0, 1, 2, &b);
		id = region(w, 1, b, 4096);
		w->expect_broken = true;
		for (int step = 0; step < 2; step++) {
			if ((step == 0) == early) {
				int rc = dq_vc_segment_in(&w->ends[1]->vc, dq_imm_encode(0x8001, false, 0), 101, w->now_ns);
				if (rc)
					vp_fail(w, 1, DQ_ERR_UNREACHABLE);
			} else {
				inject(w, 1, &(struct dq_message){ .type = DQ_MSG_PUT, .slot = 0x8001, .flow = b, .region = id, .length = 100 });
			}
		}
		assert_false(w->ends[1]->up);
		assert_non_null(strstr(w->ends[1]->vc.why, "more than the 100 bytes of slot 32769"));
		vp_settle(w);
		end(w);
	}
}

static void test_bad_configuration(void **state)
{
	struct vp_config d = vp_config_default();
	const struct dq_vc_config good = { .qps = 8, .depth = 8, .credits = 8, .segment_bytes = 65536 };
	struct dq_vc_config c[7];
	static struct dq_vc vc;
	struct dq_pools pools;
	(void)state;
	assert_int_equal(dq_pools_init(&pools, 16, 16), 0);
	for (int i = 0; i < 7; i++)
		c[i] = good;
	c[0].qps = 0;
	c[1].qps = DQ_MAX_QPS + 1;
	c[2].depth = 0;
	c[3].depth = UINT32_MAX;
	c[4].segment_bytes = 127;
	c[5].segment_bytes = DQ_MAX_SEGMENT_BYTES + 1;
	c[6].credits = 3;
	for (int i = 0; i < 7; i++)
		assert_int_equal(dq_vc_init(&vc, &c[i], &d.profile, 8, 8, false, &pools, NULL, NULL, NULL, NULL), -EINVAL);
	dq_pools_fini(&pools);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_any_size),
		cmocka_unit_test(test_tags_in_any_order),
		cmocka_unit_test(test_same_tag_is_first_in_first_out),
		cmocka_unit_test(test_too_long),
		cmocka_unit_test(test_thousands_both_ways),
		cmocka_unit_test(test_puts_before_and_after_their_put),
		cmocka_unit_test(test_region_errors),
		cmocka_unit_test(test_notifications_withheld),
		cmocka_unit_test(test_unexport_during_puts),
		cmocka_unit_test(test_close_after_send),
		cmocka_unit_test(test_close_after_receive),
		cmocka_unit_test(test_close_with_unread_notifications),
		cmocka_unit_test(test_close_in_the_middle),
		cmocka_unit_test(test_opening),
		cmocka_unit_test(test_opener_goes_before_the_answer),
		cmocka_unit_test(test_cancel_half_received),
		cmocka_unit_test(test_silent_peer),
		cmocka_unit_test(test_stall),
		cmocka_unit_test(test_failure_completes_everything),
		cmocka_unit_test(test_hostile_peer),
		cmocka_unit_test(test_wrong_messages),
		cmocka_unit_test(test_put_longer_than_it_says),
		cmocka_unit_test(test_bad_configuration),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
