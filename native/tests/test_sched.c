/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "core/sched.h"
#include "prng.h"

#define QUANTUM 65536u

struct flow {
	struct dq_sched_flow node; /* first: a node is its flow */
	uint32_t client;
	uint32_t segment;          /* bytes of its segments, 0 = any up to the quantum */
	uint64_t bytes;
	uint64_t served;
};

static double jain(const double *x, unsigned n)
{
	double sum = 0, squares = 0;

	for (unsigned i = 0; i < n; i++) {
		sum += x[i];
		squares += x[i] * x[i];
	}
	return sum * sum / (n * squares);
}

static void test_empty_scheduler(void **state)
{
	struct dq_sched_client c;
	struct dq_sched_flow f;
	struct dq_sched s;

	(void)state;
	dq_sched_init(&s, QUANTUM);
	dq_sched_client_init(&c);
	dq_sched_flow_init(&f, &c);
	assert_null(dq_sched_next(&s));
	dq_sched_deactivate(&s, &f);
	assert_int_equal(s.active_flows, 0);
	dq_sched_activate(&s, &f);
	dq_sched_activate(&s, &f);
	assert_int_equal(s.active_flows, 1);
	assert_true(dq_sched_is_active(&f));
	assert_ptr_equal(dq_sched_next(&s), &f);
	assert_ptr_equal(dq_sched_next(&s), &f);
	for (unsigned i = 0; i < 100; i++) {
		dq_sched_charge(&s, &f, QUANTUM);
		assert_ptr_equal(dq_sched_next(&s), &f);
	}
	dq_sched_deactivate(&s, &f);
	assert_null(dq_sched_next(&s));
	assert_false(dq_sched_is_active(&f));
	/* Charged after it went away: harmless. */
	dq_sched_charge(&s, &f, QUANTUM);
	assert_null(dq_sched_next(&s));
	dq_sched_activate(&s, &f);
	assert_ptr_equal(dq_sched_next(&s), &f);
}

/* 10 clients with 10 to 5,000 flows each, segments of any size, one second of a 100 Gbit/s device. */
static void test_fair_across_clients(void **state)
{
	enum { CLIENTS = 10 };
	static const uint32_t counts[CLIENTS] = { 10, 5000, 20, 4000, 50, 100, 300, 1000, 2000, 11 };
	static const uint32_t sizes[CLIENTS] = { 65536, 65536, 4096, 0, 0, 128, 0, 32768, 0, 1024 };
	struct dq_sched_client clients[CLIENTS];
	struct flow *flows[CLIENTS];
	double bytes[CLIENTS] = { 0 };
	uint64_t seed = 41, total = 0;
	struct dq_sched s;

	(void)state;
	dq_sched_init(&s, QUANTUM);
	for (unsigned c = 0; c < CLIENTS; c++) {
		dq_sched_client_init(&clients[c]);
		flows[c] = calloc(counts[c], sizeof **flows);
		assert_non_null(flows[c]);
		for (uint32_t i = 0; i < counts[c]; i++) {
			dq_sched_flow_init(&flows[c][i].node, &clients[c]);
			flows[c][i].client = c;
			flows[c][i].segment = sizes[c];
			dq_sched_activate(&s, &flows[c][i].node);
		}
	}
	while (total < 100000000000ull / 8) {
		struct flow *f = (struct flow *)dq_sched_next(&s);
		/* 128-byte segments count for more than their bytes: their client is compared by cost. */
		uint32_t n = f->segment ? f->segment : prng_below(&seed, QUANTUM + 1);

		dq_sched_charge(&s, &f->node, n);
		n = DQ_MAX(n, DQ_SCHED_MIN_COST);
		f->bytes += n;
		f->served++;
		bytes[f->client] += n;
		total += n;
	}
	assert_true(jain(bytes, CLIENTS) >= 0.9999);
	for (unsigned c = 0; c < CLIENTS; c++) {
		uint64_t least = UINT64_MAX, most = 0;

		for (uint32_t i = 0; i < counts[c]; i++) {
			least = DQ_MIN(least, flows[c][i].bytes);
			most = DQ_MAX(most, flows[c][i].bytes);
		}
		/* Within a client no flow is ever more than two quanta ahead of another. */
		assert_true(most - least <= 2 * QUANTUM);
		free(flows[c]);
	}
}

/* A client of small messages waits for one segment of each other client, not for their whole quanta. */
static void test_turns_are_single_segments(void **state)
{
	enum { CLIENTS = 4 };
	static const uint32_t sizes[CLIENTS] = { 65536, 16384, 1024, 0 };
	struct dq_sched_client clients[CLIENTS];
	struct flow flows[CLIENTS];
	unsigned gap = 0, order[8];
	struct dq_sched s;

	(void)state;
	memset(flows, 0, sizeof flows);
	dq_sched_init(&s, QUANTUM);
	for (unsigned c = 0; c < CLIENTS; c++) {
		dq_sched_client_init(&clients[c]);
		dq_sched_flow_init(&flows[c].node, &clients[c]);
		flows[c].client = c;
		dq_sched_activate(&s, &flows[c].node);
	}
	for (unsigned i = 0; i < 8; i++) {
		order[i] = ((struct flow *)dq_sched_next(&s))->client;
		dq_sched_charge(&s, dq_sched_next(&s), sizes[order[i]]);
	}
	/* First one of each, then those that have something left in this round. */
	assert_memory_equal(order, ((const unsigned[8]){ 0, 1, 2, 3, 1, 2, 3, 1 }), sizeof order);
	for (unsigned i = 0; i < 10000; i++) {
		struct flow *f = (struct flow *)dq_sched_next(&s);

		dq_sched_charge(&s, &f->node, sizes[f->client]);
		gap = f->client == 2 || f->client == 3 ? 0 : gap + 1;
		assert_true(gap <= 4);
	}
}

/* Empty messages cost something: flows and clients that send nothing else take turns, and never keep the turn. */
static void test_empty_messages_take_turns(void **state)
{
	struct dq_sched_client clients[2];
	struct flow flows[4];
	struct dq_sched s;
	uint64_t run = 0;

	(void)state;
	memset(flows, 0, sizeof flows);
	dq_sched_init(&s, QUANTUM);
	for (unsigned i = 0; i < 4; i++) {
		if (i % 2 == 0)
			dq_sched_client_init(&clients[i / 2]);
		dq_sched_flow_init(&flows[i].node, &clients[i / 2]);
		dq_sched_activate(&s, &flows[i].node);
	}
	/* Client 0: empty messages on both flows; client 1: an empty one and a bulk one. */
	for (unsigned i = 0; i < 200000; i++) {
		struct flow *f = (struct flow *)dq_sched_next(&s);
		uint32_t n = f == &flows[3] ? QUANTUM : 0;

		dq_sched_charge(&s, &f->node, n);
		f->served++;
		f->bytes += DQ_MAX(n, DQ_SCHED_MIN_COST);
		run = f == &flows[3] ? 0 : run + 1;
		assert_true(run <= 4 * (QUANTUM / DQ_SCHED_MIN_COST));
	}
	assert_true(flows[0].served - flows[1].served + 1 <= 2);
	assert_in_range(flows[2].bytes * 100 / flows[3].bytes, 98, 102);
	assert_in_range((flows[0].bytes + flows[1].bytes) * 100 / (flows[2].bytes + flows[3].bytes), 98, 102);
}

/* Going away after each message and coming back at once earns nothing, for flows nor for clients, however many do it. */
static void test_coming_back_earns_nothing(void **state)
{
	enum { GREEDY = 3 };
	static const uint32_t sizes[] = { 512, 1000, 30000, 40000, 65535, 65536 };

	(void)state;
	for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		for (unsigned same_client = 0; same_client < 2; same_client++) {
			struct dq_sched_client clients[GREEDY + 1];
			struct flow flows[GREEDY + 1]; /* the last one is always active */
			uint64_t total = 0;
			struct dq_sched s;

			memset(flows, 0, sizeof flows);
			dq_sched_init(&s, QUANTUM);
			for (unsigned k = 0; k <= GREEDY; k++) {
				dq_sched_client_init(&clients[k]);
				dq_sched_flow_init(&flows[k].node, &clients[same_client ? 0 : k]);
				dq_sched_activate(&s, &flows[k].node);
			}
			while (total < 4000ull * QUANTUM) {
				struct flow *f = (struct flow *)dq_sched_next(&s);
				bool greedy = f != &flows[GREEDY];
				uint32_t n = greedy ? sizes[i] : QUANTUM;

				f->bytes += n;
				total += n;
				dq_sched_charge(&s, &f->node, n);
				if (greedy) {
					dq_sched_deactivate(&s, &f->node);
					dq_sched_activate(&s, &f->node);
				}
			}
			/* Less is right: whoever has nothing to send when a round ends loses what is left of it. */
			for (unsigned k = 0; k < GREEDY; k++)
				assert_in_range(flows[k].bytes * 1000 / flows[GREEDY].bytes, 1, 1010);
		}
	}
}

/* Flows come and go at any moment: the set is always right, and nobody who stays active starves. */
static void test_any_moment(void **state)
{
	enum { CLIENTS = 7, FLOWS = 60 };
	struct dq_sched_client clients[CLIENTS];
	static struct flow flows[FLOWS];
	static uint64_t waiting[FLOWS];
	bool active[FLOWS] = { false };
	uint64_t seed = 8;
	uint32_t n_active = 0;
	struct dq_sched s;

	(void)state;
	memset(flows, 0, sizeof flows);
	dq_sched_init(&s, QUANTUM);
	for (unsigned c = 0; c < CLIENTS; c++)
		dq_sched_client_init(&clients[c]);
	for (unsigned i = 0; i < FLOWS; i++)
		dq_sched_flow_init(&flows[i].node, &clients[i % CLIENTS]);
	for (unsigned step = 0; step < 500000; step++) {
		uint32_t i = prng_below(&seed, FLOWS);
		struct flow *f;
		uint32_t n;

		switch (prng_below(&seed, 8)) {
		case 0:
			dq_sched_activate(&s, &flows[i].node);
			n_active += !active[i];
			if (!active[i])
				waiting[i] = 0;
			active[i] = true;
			break;
		case 1:
			dq_sched_deactivate(&s, &flows[i].node);
			n_active -= active[i];
			active[i] = false;
			break;
		case 2: /* any flow may be charged */
			if (prng_below(&seed, 10) == 0)
				dq_sched_charge(&s, &flows[i].node, prng_below(&seed, QUANTUM));
			break;
		case 3:
			if (prng_below(&seed, 100) == 0)
				dq_sched_set_quantum(&s, QUANTUM + prng_below(&seed, QUANTUM));
			break;
		default:
			break;
		}
		assert_int_equal(s.active_flows, n_active);
		f = (struct flow *)dq_sched_next(&s);
		if (n_active == 0) {
			assert_null(f);
			continue;
		}
		assert_non_null(f);
		assert_true(active[f - flows]);
		n = prng_below(&seed, 3) ? prng_below(&seed, QUANTUM + 1) : prng_below(&seed, 2000);
		dq_sched_charge(&s, &f->node, n);
		waiting[f - flows] = 0;
		for (unsigned k = 0; k < FLOWS; k++) {
			waiting[k] += active[k] ? DQ_MAX(n, DQ_SCHED_MIN_COST) : 0;
			/* A round of its flows takes at most as many rounds of clients, of at most two quanta each. */
			assert_true(waiting[k] <= 2ull * 2 * QUANTUM * CLIENTS * FLOWS);
		}
		assert_true(f->node.deficit > 0 && f->node.client->deficit > 0);
	}
}

/* A segment above the quantum (the quantum was lowered while a message was under way) does no lasting harm. */
static void test_oversized_segments(void **state)
{
	struct dq_sched_client clients[2];
	struct flow flows[2];
	struct dq_sched s;

	(void)state;
	memset(flows, 0, sizeof flows);
	dq_sched_init(&s, 1);
	assert_int_equal(s.quantum, DQ_SCHED_MIN_COST);
	for (unsigned i = 0; i < 2; i++) {
		dq_sched_client_init(&clients[i]);
		dq_sched_flow_init(&flows[i].node, &clients[i]);
		dq_sched_activate(&s, &flows[i].node);
	}
	for (unsigned i = 0; i < 1000; i++) {
		struct flow *f = (struct flow *)dq_sched_next(&s);

		f->served++;
		dq_sched_charge(&s, &f->node, f == &flows[0] ? DQ_MAX_SEGMENT_BYTES : DQ_SCHED_MIN_COST);
	}
	assert_in_range(flows[0].served, 499, 501);
}

static void test_pick_fewest_bytes(void **state)
{
	struct dq_qps q;

	(void)state;
	dq_qps_init(&q, 1000, 2);
	assert_int_equal(q.n, DQ_MAX_QPS);
	dq_qps_init(&q, 4, 2);
	q.n = 0;
	assert_int_equal(dq_qps_pick(&q), DQ_NONE);
	q.n = 4;
	for (unsigned i = 0; i < 8; i++) /* ties go round, also when nothing stays outstanding */
		assert_int_equal(dq_qps_pick(&q), i % 4);
	for (unsigned i = 0; i < 8; i++) {
		uint32_t qp = dq_qps_pick(&q);

		assert_int_equal(qp, i % 4);
		dq_qps_post(&q, qp, 100);
	}
	assert_int_equal(dq_qps_pick(&q), DQ_NONE); /* all full */
	dq_qps_done(&q, 2, 100);
	assert_int_equal(dq_qps_pick(&q), 2);
	dq_qps_done(&q, 1, 100);
	dq_qps_done(&q, 1, 100);
	assert_int_equal(dq_qps_pick(&q), 1);
	q.usable[1] = 0;
	assert_int_equal(dq_qps_pick(&q), 2);
	q.active = 2;
	assert_int_equal(dq_qps_pick(&q), DQ_NONE);
	q.usable[1] = 1;
	assert_int_equal(dq_qps_pick(&q), 1);
	q.active = 200; /* cut to n */
	assert_int_equal(dq_qps_pick(&q), 1);
	q.limit = 0;
	assert_int_equal(dq_qps_pick(&q), DQ_NONE);
}

/* Against the definition, over any state. */
static void test_pick_property(void **state)
{
	uint64_t seed = 6;
	struct dq_qps q;

	(void)state;
	for (unsigned i = 0; i < 50000; i++) {
		uint32_t n = 1 + prng_below(&seed, i % 10 ? 16 : DQ_MAX_QPS), picked;
		uint64_t least = UINT64_MAX;

		dq_qps_init(&q, n, 1 + prng_below(&seed, 8));
		q.active = prng_below(&seed, n + 3);
		q.cursor = prng_below(&seed, n + 3);
		for (unsigned k = 0; k < n; k++) {
			q.usable[k] = prng_below(&seed, 4) != 0;
			q.segments[k] = prng_below(&seed, q.limit + 1);
			q.bytes[k] = q.segments[k] * (uint64_t)(1 + prng_below(&seed, 4));
			if (k < q.active && q.usable[k] && q.segments[k] < q.limit)
				least = DQ_MIN(least, q.bytes[k]);
		}
		picked = dq_qps_pick(&q);
		if (least == UINT64_MAX) {
			assert_int_equal(picked, DQ_NONE);
			continue;
		}
		assert_true(picked < n && picked < q.active && q.usable[picked] && q.segments[picked] < q.limit);
		assert_int_equal(q.bytes[picked], least);
	}
}

/* A QP that completes slower gets less: refill is clocked by completions. */
static void test_slow_qp_gets_less(void **state)
{
	enum { QPS = 8 };
	uint64_t busy_until[QPS] = { 0 };
	uint64_t posted[QPS] = { 0 };
	uint32_t queued[QPS] = { 0 };
	struct dq_qps q;

	(void)state;
	dq_qps_init(&q, QPS, 16);
	for (uint64_t now = 0; now < 100000; now++) {
		uint32_t qp;

		for (unsigned i = 0; i < QPS; i++) {
			if (queued[i] && busy_until[i] <= now) {
				dq_qps_done(&q, i, 1000);
				queued[i]--;
				busy_until[i] = now + (i == 3 ? 40 : 10);
			}
		}
		while (q.bytes[0] + q.bytes[1] + q.bytes[2] + q.bytes[3] + q.bytes[4] + q.bytes[5] + q.bytes[6] + q.bytes[7] < 32000 &&
		       (qp = dq_qps_pick(&q)) != DQ_NONE) {
			dq_qps_post(&q, qp, 1000);
			if (!queued[qp]++)
				busy_until[qp] = DQ_MAX(busy_until[qp], now);
			posted[qp]++;
		}
	}
	for (unsigned i = 0; i < QPS; i++) {
		if (i != 3)
			assert_true(posted[i] > 3 * posted[3]);
	}
}

static void check_segments(uint64_t length, uint32_t profile)
{
	uint32_t bytes = dq_segment_bytes(length, profile);
	uint32_t count = dq_segment_count(length, bytes);

	assert_true(bytes >= DQ_MIN_SEGMENT_BYTES && bytes <= DQ_MAX_SEGMENT_BYTES);
	assert_int_equal(bytes % DQ_ALIGN_BYTES, 0);
	assert_in_range(count, 1, DQ_MAX_SEGMENTS);
	assert_true((uint64_t)count * bytes >= length);
	assert_true(length == 0 || (uint64_t)(count - 1) * bytes < length);
	/* Never more than the profile asks for, but where the index or the alignment demands it. */
	if (profile >= DQ_MIN_SEGMENT_BYTES && profile <= DQ_MAX_SEGMENT_BYTES && length <= (uint64_t)profile * DQ_MAX_SEGMENTS)
		assert_true(bytes - profile < DQ_ALIGN_BYTES);
}

static void test_segment_boundaries(void **state)
{
	static const uint32_t profiles[] = { 0, 1, 127, 128, 129, 4096, 5000, 65536, 1u << 20, 16u << 20, UINT32_MAX };
	uint64_t seed = 17;

	(void)state;
	for (unsigned p = 0; p < sizeof profiles / sizeof *profiles; p++) {
		for (uint64_t length = 0; length < 300000; length += length < 70000 ? 1 : 97)
			check_segments(length, profiles[p]);
		for (unsigned bit = 16; bit < 40; bit++) {
			for (int64_t d = -130; d <= 130; d++) {
				uint64_t length = (1ull << bit) + (uint64_t)d;

				if (length <= DQ_MAX_MESSAGE_BYTES)
					check_segments(length, profiles[p]);
			}
		}
	}
	for (unsigned i = 0; i < 200000; i++)
		check_segments(prng_next(&seed) >> (25 + prng_below(&seed, 39)), prng_below(&seed, 1u << (1 + prng_below(&seed, 25))));
	check_segments(DQ_MAX_MESSAGE_BYTES, 65536);
	assert_int_equal(dq_segment_bytes(DQ_MAX_MESSAGE_BYTES, 0), DQ_MAX_SEGMENT_BYTES);
	assert_int_equal(dq_segment_bytes(DQ_MAX_MESSAGE_BYTES + 1, 65536), 0);
	assert_int_equal(dq_segment_bytes(UINT64_MAX, 65536), 0);
	assert_int_equal(dq_segment_count(UINT64_MAX, 0), 0);
	assert_int_equal(dq_segment_count(UINT64_MAX, 1), 0);
	assert_int_equal(dq_segment_count((uint64_t)DQ_MAX_SEGMENTS * 128 + 1, 128), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_empty_scheduler),
		cmocka_unit_test(test_fair_across_clients),
		cmocka_unit_test(test_turns_are_single_segments),
		cmocka_unit_test(test_empty_messages_take_turns),
		cmocka_unit_test(test_coming_back_earns_nothing),
		cmocka_unit_test(test_any_moment),
		cmocka_unit_test(test_oversized_segments),
		cmocka_unit_test(test_pick_fewest_bytes),
		cmocka_unit_test(test_pick_property),
		cmocka_unit_test(test_slow_qp_gets_less),
		cmocka_unit_test(test_segment_boundaries),
	};

	return cmocka_run_group_tests_name("sched", tests, NULL, NULL);
}
