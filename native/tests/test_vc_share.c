/* SPDX-License-Identifier: Apache-2.0 */
/* How a VC shares what there is: slots, the wire among clients and their flows, a receiver among senders, memory a flow. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "core/vc_private.h"
#include "vc_pair.h"

static struct vp *two_hosts(const struct vp_config *c)
{
	struct vp *w = vp_new(7);
	w->check_content = false;
	vp_host(w, 0, 0);
	vp_host(w, 0, 0);
	vp_pair(w, 0, 1, c);
	return w;
}

static void end(struct vp *w)
{
	vp_close_all(w);
	vp_check_clean(w);
	vp_free(w);
}

/* Time that n messages of `bytes` take on a flow of their own, four receives posted at a time. */
static uint64_t transfer_ns(struct vp *w, uint32_t flow, uint32_t peer_flow, uint32_t n, uint64_t bytes)
{
	uint64_t began = w->now_ns;
	uint32_t r[64], s = DQ_NONE;
	assert_true(n <= 64);
	for (uint32_t i = 0; i < n; i++) {
		if (i >= 4)
			while (!w->ops[r[i - 4]].done)
				assert_true(vp_step(w));
		r[i] = vp_recv(w, 1, peer_flow, 1, bytes);
		s = vp_send(w, 0, flow, 1, bytes);
	}
	while (!w->ops[r[n - 1]].done || !w->ops[s].done)
		assert_true(vp_step(w));
	return w->now_ns - began;
}

/* One client posts 30,000 receives that nobody sends to, on one flow or on 10,000: another goes as fast as alone. */
static void test_idle_receives_starve_nobody(void **state)
{
	static const uint32_t flows[] = { 1, 10000 };
	struct vp_config c = vp_config_default();
	uint64_t alone = 0;
	(void)state;
	for (int i = -1; i < 2; i++) {
		struct vp *w = two_hosts(&c);
		uint32_t a, b, n = i < 0 ? 0 : flows[i], waiting = 0, idle_a[10000], idle_b[10000];
		uint64_t ns;
		for (uint32_t f = 0; f < n; f++)
			idle_a[f] = vp_open(w, 0, 1, 2);
		vp_settle(w);
		for (uint32_t f = 0; f < n; f++)
			idle_b[f] = vp_flow(w, 0, idle_a[f])->peer;
		for (uint32_t r = 0; n && r < 30000; r++)
			vp_recv(w, 1, idle_b[r % n], 5, 4096);
		vp_settle(w);
		if (n) {
			struct dq_vc *vc = &w->ends[1]->vc;
			waiting = vc->counters.receives_waiting;
			assert_int_equal(vc->slots[DQ_DIR_RECV].used, n + DQ_VC_SHARED_SLOTS / 4); /* each flow's own, and the client's cap */
			assert_int_equal(waiting, 30000 - vc->slots[DQ_DIR_RECV].used);
		}
		a = vp_connect(w, 0, 3, 4, &b);
		ns = transfer_ns(w, a, b, 64, 1 << 20);
		if (i < 0)
			alone = ns;
		assert_true(ns <= alone + alone / 100);
		if (n) { /* the idle ones, too, work when somebody sends: in the order of posting */
			uint32_t s = vp_send(w, 0, idle_a[n - 1], 5, 4096);
			vp_settle(w);
			assert_int_equal(vp_done(w, s)->status, DQ_OK);
		}
		end(w);
	}
}

/* Shared slots that come back go to the waiting flows in turn, whoever had them before. */
static void test_waiting_flows_are_served_in_turn(void **state)
{
	struct vp_config c = vp_config_default();
	struct vp *w;
	uint32_t a[4], b[4], done[4] = { 0 }, first[4], total = 0;
	(void)state;
	c.slot_share = 8;
	w = two_hosts(&c);
	for (uint32_t f = 0; f < 4; f++)
		a[f] = vp_connect(w, 0, f / 3 ? 9 : 1, f / 3 ? 8 : 2, &b[f]); /* three flows of one client, one of another */
	for (uint32_t f = 0; f < 4; f++) { /* the first takes all of its client's share */
		first[f] = w->op_count;
		for (uint32_t i = 0; i < 400; i++)
			vp_recv(w, 1, b[f], 1, 4096);
	}
	vp_settle(w);
	assert_int_equal(w->ends[1]->vc.slots[DQ_DIR_RECV].used, 4 + 8 + 8);
	for (uint32_t f = 0; f < 4; f++)
		for (uint32_t i = 0; i < 400; i++)
			vp_send(w, 0, a[f], 1, 4096);
	while (total < 600) {
		assert_true(vp_step(w));
		total = 0;
		for (uint32_t f = 0; f < 4; f++) {
			while (done[f] < 400 && w->ops[first[f] + done[f]].done)
				done[f]++;
			total += done[f];
		}
		assert_true(w->ends[1]->vc.slots[DQ_DIR_RECV].used <= 20);
	}
	/* The three of one client keep step: none is more than its early slots ahead. */
	assert_true(done[0] <= done[1] + 20 && done[1] <= done[0] + 20);
	assert_true(done[0] <= done[2] + 20 && done[2] <= done[0] + 20);
	vp_settle(w);
	end(w);
}

/* All 16,384 shared slots are used up by five clients: those that come back go round among the clients. */
static void test_clients_are_served_in_turn(void **state)
{
	struct vp_config c = vp_config_default();
	struct vp *w;
	uint32_t a[5], b[5], first[5], done[5] = { 0 };
	(void)state;
	w = two_hosts(&c);
	for (uint32_t f = 0; f < 5; f++) {
		a[f] = vp_connect(w, 0, 1 + f, 11 + f, &b[f]);
		first[f] = w->op_count;
		for (uint32_t i = 0; i < 8000; i++)
			vp_recv(w, 1, b[f], 1, 128);
	}
	vp_settle(w);
	assert_int_equal(w->ends[1]->vc.slots[DQ_DIR_RECV].shared, DQ_VC_SHARED_SLOTS);
	for (uint32_t i = 0; i < 3000; i++) { /* only the first client's are used, one at a time */
		vp_send(w, 0, a[0], 1, 128);
		vp_settle(w);
	}
	for (uint32_t f = 0; f < 5; f++)
		while (done[f] < 8000 && w->ops[first[f] + done[f]].done)
			done[f]++;
	assert_int_equal(done[0], 3000);
	/* The last client came too late for shared slots: it got every other one that came back. */
	assert_int_equal(w->ends[1]->vc.slots[DQ_DIR_RECV].shared, DQ_VC_SHARED_SLOTS);
	for (struct dq_vc_client *x = w->ends[1]->vc.clients; x; x = x->next) {
		if (x->client == 15)
			assert_true(x->shared[0] >= 1400 && x->shared[0] <= 1600);
		if (x->client == 11)
			assert_true(x->shared[0] >= 2400 && x->shared[0] <= 2700);
	}
	end(w);
}

/* --- the wire among clients ---------------------------------------------------------------------------------------- */

static double share_error(uint64_t message_bytes, uint64_t jitter_ns)
{
	static const uint32_t counts[3] = { 1, 10, 1000 };
	struct vp_config c = vp_config_default();
	struct vp *w;
	uint64_t before[3], began, sum = 0;
	double worst = 0;

	c.link.jitter_ns = jitter_ns;
	c.link.rate_bps = 25000000000ull;
	w = two_hosts(&c);
	for (uint32_t k = 0; k < 3; k++) {
		for (uint32_t f = 0; f < counts[k]; f++) {
			uint32_t b, a = vp_connect(w, 0, 1 + k, 11 + k, &b);
			uint32_t deep = 4000 / counts[k]; /* so much that none ever has nothing to send */
			for (uint32_t i = 0; i < DQ_MAX(deep, 4u); i++) {
				vp_recv(w, 1, b, 1, message_bytes);
				vp_send(w, 0, a, 1, message_bytes);
			}
		}
	}
	vp_run_until(w, w->now_ns + 2000000);
	for (uint32_t k = 0; k < 3; k++)
		before[k] = w->ends[0]->client_bytes[1 + k];
	began = w->now_ns;
	vp_run_until(w, began + 40000000);
	assert_true(w->ends[0]->vc.sched.active_flows > 900); /* all had something to send all the time */
	for (uint32_t k = 0; k < 3; k++) {
		before[k] = w->ends[0]->client_bytes[1 + k] - before[k];
		sum += before[k];
	}
	for (uint32_t k = 0; k < 3; k++) {
		double e = (double)before[k] * 3 / (double)sum - 1;
		worst = DQ_MAX(worst, e < 0 ? -e : e);
	}
	assert_true((double)sum >= 0.97 * 25e9 / 8 * 0.04); /* and the wire is full */
	vp_settle(w);
	end(w);
	return worst;
}

static void test_clients_share_equally(void **state)
{
	(void)state;
	assert_true(share_error(256 << 10, 0) < 0.01);
	assert_true(share_error(100000, 20000) < 0.01);
}

/* --- a receiver among its senders ------------------------------------------------------------------------------------ */

#define SENDERS 64
#define RATE 100000000000ull

static struct vp *incast(struct vp_config *c, uint32_t a[SENDERS], uint32_t b[SENDERS])
{
	struct vp *w = vp_new(11);
	uint32_t receiver;
	w->check_content = false;
	receiver = vp_host(w, RATE, RATE);
	*c = vp_config_default();
	c->grants = true;
	c->profile.base_rtt_ns = 20000;
	c->link.delay_ns = c->link.control_ns = 8000;
	c->profile.window_bytes = 512 << 10; /* two BDP: 250 KB fill the pipe */
	c->profile.segment_bytes = 16 << 10;
	c->profile.floor_bytes = 16 << 10;
	c->profile.adapt = true;
	for (uint32_t i = 0; i < SENDERS; i++) {
		uint32_t e = vp_pair(w, vp_host(w, RATE, RATE), receiver, c);
		assert_int_equal(e, 2 * i);
		a[i] = vp_connect(w, e, 1, 2, &b[i]);
	}
	return w;
}

/* 64 receives are posted to 64 peers, and one of them sends: it has its whole window in flight at once. */
static void test_one_sender_of_64(void **state)
{
	struct vp_config c;
	uint32_t a[SENDERS], b[SENDERS], s;
	uint64_t began, grant_ns = 0;
	struct vp *w = incast(&c, a, b);
	(void)state;
	for (uint32_t i = 0; i < SENDERS; i++)
		vp_recv(w, 2 * i + 1, b[i], 1, 16 << 20);
	vp_run_until(w, w->now_ns + 5000000000ull); /* all long quiet */
	for (int again = 0; again < 2; again++) {
		began = w->now_ns;
		s = vp_send(w, 0, a[0], 1, 16 << 20);
		while (!w->ops[s].done) {
			assert_true(vp_step(w));
			if (!grant_ns && w->ends[0]->vc.grant_in >= c.profile.window_bytes)
				grant_ns = w->now_ns - began;
		}
		assert_true(grant_ns > 0 || again); /* one control round trip and the way of the first segment */
		assert_true(grant_ns < 4 * c.profile.base_rtt_ns);
		assert_true((double)(16 << 20) * 8 / (double)(w->now_ns - began) >= (again ? 0.95 : 0.9) * RATE / 1e9);
		if (!again)
			vp_recv(w, 1, b[0], 1, 16 << 20);
		vp_run_until(w, w->now_ns + 10000);
	}
	end(w);
}

/* All 64 send: the wire is full, what is in flight is bounded, and each has its part. */
static void test_64_senders(void **state)
{
	struct vp_config c;
	uint32_t a[SENDERS], b[SENDERS];
	uint64_t before[SENDERS], most = 0, pipe = RATE / 8 * 20000 / 1000000000, began;
	double sum = 0, squares = 0;
	struct vp *w = incast(&c, a, b);
	(void)state;
	for (uint32_t i = 0; i < SENDERS; i++) {
		for (int n = 0; n < 8; n++) {
			vp_recv(w, 2 * i + 1, b[i], 1, 4 << 20);
			vp_send(w, 2 * i, a[i], 1, 4 << 20);
		}
	}
	vp_run_until(w, w->now_ns + 5000000);
	for (uint32_t i = 0; i < SENDERS; i++)
		before[i] = w->ends[2 * i]->completed_bytes;
	began = w->now_ns;
	while (w->now_ns < began + 40000000) {
		uint64_t inflight = 0;
		for (int k = 0; k < 100; k++)
			assert_true(vp_step(w));
		for (uint32_t i = 0; i < SENDERS; i++)
			inflight += w->ends[2 * i]->inflight;
		most = DQ_MAX(most, inflight);
	}
	for (uint32_t i = 0; i < SENDERS; i++) {
		double x = (double)(w->ends[2 * i]->completed_bytes - before[i]);
		sum += x;
		squares += x * x;
	}
	/* A pipe in all and a segment each; levels told may be an eighth higher. */
	assert_true(most <= (pipe + SENDERS * (uint64_t)c.profile.segment_bytes) * 9 / 8);
	assert_true(sum * sum / (SENDERS * squares) >= 0.98);
	assert_true(sum * 8 / (double)(w->now_ns - began) >= 0.97 * RATE / 1e9);
	vp_settle(w);
	end(w);
}

/* --- memory ---------------------------------------------------------------------------------------------------------- */

static uint64_t slab_bytes(const struct dq_slab *s)
{
	return (uint64_t)s->capacity * (s->object_bytes + sizeof *s->next_free);
}

/* What 10,000 open flows with an idle receive at each end cost at one end. */
static void test_memory_of_a_flow(void **state)
{
	enum { FLOWS = 10000 };
	struct vp_config c = vp_config_default();
	struct vp *w = two_hosts(&c);
	const struct dq_pools *p = &w->hosts[0].pools;
	const struct dq_vc *vc = &w->ends[0]->vc;
	uint64_t bytes;
	(void)state;
	for (uint32_t f = 0; f < FLOWS; f++)
		vp_open(w, 0, 1 + f % 10, 20 + f % 10);
	vp_settle(w);
	for (uint32_t f = 0; f < FLOWS; f++) {
		vp_recv(w, 0, f, 1, 64);
		vp_recv(w, 1, vp_flow(w, 0, f)->peer, 1, 64);
	}
	vp_settle(w);
	bytes = slab_bytes(&p->flows) + slab_bytes(&p->messages) + slab_bytes(&p->rtrs) + slab_bytes(&p->regions) + slab_bytes(&vc->segs);
	for (int i = 0; i < 256; i++)
		bytes += 256 * sizeof(uint32_t) * ((vc->incoming_pages[i] != NULL) + (vc->outgoing_pages[i] != NULL));
	bytes += (vc->slots[0].free_room + vc->slots[1].free_room) * sizeof(uint16_t) + vc->control.queue_bytes;
	bytes += vc->tracker.live * 32ull + 65536 / 128 * sizeof(void *) + sizeof *vc + 10 * sizeof(struct dq_vc_client);
	assert_true(bytes / FLOWS < 1024); /* the engine's and the shim's share comes on top: 2 KiB in all */
	vp_close_all(w);
	vp_check_clean(w);
	vp_free(w);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_idle_receives_starve_nobody),
		cmocka_unit_test(test_waiting_flows_are_served_in_turn),
		cmocka_unit_test(test_clients_are_served_in_turn),
		cmocka_unit_test(test_clients_share_equally),
		cmocka_unit_test(test_one_sender_of_64),
		cmocka_unit_test(test_64_senders),
		cmocka_unit_test(test_memory_of_a_flow),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
