/* SPDX-License-Identifier: Apache-2.0 */
/* The fabric of the simulator without hosts: events, topology, and queues against closed forms. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "prng.h"
#include "sim/topology.h"

#define FULL 4178u
#define SMALL 86u
#define GBIT 1000000000ull
#define US 1000000ull /* ps */

/* --- events ------------------------------------------------------------------------------------------------------- */

static void test_events_come_in_order_of_time(void **state)
{
	struct dq_sim_events q;
	struct dq_sim_event e;
	uint64_t seed = 1, made = 0, last = 0, seen = 0;
	uint32_t lanes[4];

	(void)state;
	dq_sim_events_init(&q);
	for (uint32_t i = 0; i < 4; i++)
		lanes[i] = dq_sim_events_lane(&q, (i + 1) * 1000);
	assert_int_equal(dq_sim_events_lane(&q, 2000), lanes[1]);
	dq_sim_events_at(&q, 5, 0, 0);
	for (made = 1; dq_sim_events_pop(&q, DQ_NEVER, &e); seen++) {
		assert_true(e.ps >= last && e.ps == q.now_ps);
		last = e.ps;
		while (made < 20000 && q.heap_count + seen + 100 > made) {
			uint32_t lane = prng_below(&seed, 5);

			if (lane < 4)
				dq_sim_events_after(&q, lanes[lane], (lane + 1) * 1000, 0, 0);
			else
				dq_sim_events_at(&q, q.now_ps + prng_below(&seed, 5000), 0, 0);
			made++;
		}
	}
	assert_int_equal(seen, made);
	assert_int_equal(made, 20000);
	assert_false(q.lost);
	dq_sim_events_fini(&q);
}

static void test_equal_times_keep_their_order(void **state)
{
	struct dq_sim_events q;
	struct dq_sim_event e;
	uint32_t lane;

	(void)state;
	dq_sim_events_init(&q);
	lane = dq_sim_events_lane(&q, 100);
	for (uint32_t i = 0; i < 1000; i++) {
		dq_sim_events_after(&q, lane, 100, 1, i);
		dq_sim_events_at(&q, 100, 2, i);
	}
	for (uint32_t i = 0; i < 2000; i++) {
		assert_true(dq_sim_events_pop(&q, 100, &e));
		assert_int_equal(e.what, i < 1000 ? 1 : 2);
		assert_int_equal(e.arg, i % 1000);
	}
	assert_false(dq_sim_events_pop(&q, DQ_NEVER, &e));
	dq_sim_events_fini(&q);
}

static void test_more_delays_than_lanes(void **state)
{
	struct dq_sim_events q;
	struct dq_sim_event e;

	(void)state;
	dq_sim_events_init(&q);
	for (uint32_t i = 0; i < 2 * DQ_SIM_LANES; i++) {
		uint32_t lane = dq_sim_events_lane(&q, 1000 - i);

		assert_true(lane < DQ_SIM_LANES || i >= DQ_SIM_LANES);
		dq_sim_events_after(&q, lane, 1000 - i, 0, i);
	}
	for (uint32_t i = 2 * DQ_SIM_LANES; i-- > 0;) {
		assert_true(dq_sim_events_pop(&q, DQ_NEVER, &e));
		assert_int_equal(e.arg, i);
	}
	dq_sim_events_fini(&q);
}

static void test_nothing_happens_after_the_end(void **state)
{
	struct dq_sim_events q;
	struct dq_sim_event e;

	(void)state;
	dq_sim_events_init(&q);
	dq_sim_events_at(&q, 10, 0, 0);
	assert_false(dq_sim_events_pop(&q, 9, &e));
	assert_true(dq_sim_events_pop(&q, 10, &e));
	dq_sim_events_at(&q, 3, 0, 0); /* the past is now */
	assert_true(dq_sim_events_pop(&q, DQ_NEVER, &e));
	assert_int_equal(e.ps, 10);
	dq_sim_events_fini(&q);
}

/* --- a fabric with senders that are told what to send -------------------------------------------------------------- */

struct source {
	uint32_t left, to, plane, bytes;
	uint8_t class;
	uint64_t arrived, last_ps, first_ps, marked;
};

struct world {
	struct dq_sim_events events;
	struct dq_sim_fabric fabric;
	struct dq_sim_topology topology;
	struct source sources[256];
};

static uint32_t pull(void *user, uint32_t port, bool first_only)
{
	struct world *w = user;
	uint32_t from = port - w->topology.nic, index;
	struct source *s = &w->sources[from];
	struct dq_sim_packet *p;

	if (s->left == 0 || (first_only && s->class != DQ_SIM_FIRST))
		return DQ_NONE;
	s->left--;
	index = dq_sim_packet_new(&w->fabric);
	assert_int_not_equal(index, DQ_NONE);
	p = dq_sim_packet_at(&w->fabric, index);
	p->owner[0] = from;
	p->bytes = s->bytes ? s->bytes : FULL;
	p->class = s->class;
	p->flags = DQ_SIM_LAST;
	p->hops = (uint8_t)dq_sim_topology_route(&w->topology, from, s->to, s->plane, p->route);
	return index;
}

static void deliver(void *user, uint32_t packet)
{
	struct world *w = user;
	const struct dq_sim_packet *p = dq_sim_packet_at(&w->fabric, packet);
	struct source *s = &w->sources[p->owner[0]];

	if (s->arrived++ == 0)
		s->first_ps = w->events.now_ps;
	s->last_ps = w->events.now_ps;
	s->marked += p->flags & DQ_SIM_MARKED ? 1 : 0;
	dq_sim_packet_free(&w->fabric, packet);
}

static const struct dq_sim_region one_rack = { .buildings = 1, .zones = 1, .racks = 1, .hosts = 64, .gpus = 1, .planes = 1,
					       .nic_bps = 400 * GBIT, .oversubscription = { 1, 1, 1 },
					       .rtt_ns = { 0, 8000, 56000, 120000, 240000 } };
static const struct dq_sim_region all_classes = { .buildings = 2, .zones = 2, .racks = 2, .hosts = 2, .gpus = 2, .planes = 4,
						  .nic_bps = 400 * GBIT, .oversubscription = { 1, 2.8, 2.8 },
						  .rtt_ns = { 0, 8000, 56000, 120000, 240000 } };

static struct world *world_new(const struct dq_sim_region *region, struct dq_sim_fabric_config config)
{
	static const struct dq_sim_fabric_ops ops = { .pull = pull, .deliver = deliver };
	struct world *w = calloc(1, sizeof *w);
	struct dq_error err;

	assert_non_null(w);
	config.full_bytes = FULL;
	config.small_bytes = SMALL;
	dq_sim_events_init(&w->events);
	assert_int_equal(dq_sim_fabric_init(&w->fabric, &w->events, &config, &ops, w), 0);
	assert_int_equal(dq_sim_topology_build(&w->topology, region, &w->fabric, &err), 0);
	return w;
}

static void run(struct world *w, uint64_t until_ps)
{
	struct dq_sim_event e;

	for (uint32_t i = 0; i < w->topology.gpus; i++)
		dq_sim_port_kick(&w->fabric, w->topology.nic + i);
	while (dq_sim_events_pop(&w->events, until_ps, &e))
		assert_true(dq_sim_fabric_event(&w->fabric, &e));
	assert_false(w->events.lost);
}

static void world_free(struct world *w)
{
	dq_sim_fabric_fini(&w->fabric);
	dq_sim_events_fini(&w->events);
	free(w);
}

static void check_empty(const struct world *w)
{
	assert_int_equal(w->fabric.bytes, 0);
	assert_int_equal(w->fabric.packets_used, 0);
	for (uint32_t i = 0; i < w->fabric.switch_count; i++)
		assert_int_equal(w->fabric.switches[i].bytes, 0);
	for (uint32_t i = 0; i < w->fabric.port_count; i++) {
		assert_int_equal(w->fabric.ports[i].bytes, 0);
		assert_int_equal(w->fabric.ports[i].ingress_bytes, 0);
	}
}

static void test_routes_join_the_ends(void **state)
{
	struct world *w = world_new(&all_classes, (struct dq_sim_fabric_config){ 0 });
	static const uint32_t hops[] = { 2, 2, 4, 6, 7 };

	(void)state;
	for (uint32_t from = 0; from < w->topology.gpus; from++) {
		for (uint32_t to = 0; to < w->topology.gpus; to++) {
			enum dq_sim_path_class c = dq_sim_topology_class(&w->topology, from, to);
			uint16_t there[DQ_SIM_MAX_HOPS], other[DQ_SIM_MAX_HOPS];
			uint64_t delay = 0;
			uint32_t n;

			if (c == DQ_SIM_HOST)
				continue;
			n = dq_sim_topology_route(&w->topology, from, to, 1, there);
			assert_int_equal(n, hops[c]);
			assert_int_equal(there[0], w->topology.nic + from);
			assert_int_equal(there[n - 1], w->topology.rack_down + to);
			for (uint32_t i = 0; i < n; i++) {
				assert_true(there[i] < w->fabric.port_count);
				assert_true((w->fabric.ports[there[i]].sw == DQ_NONE) == (i == 0));
				delay += w->fabric.ports[there[i]].delay_ps;
			}
			assert_int_equal(2 * delay, all_classes.rtt_ns[c] * DQ_SIM_PS_PER_NS);
			/* Planes share nothing but the ends. */
			assert_int_equal(dq_sim_topology_route(&w->topology, from, to, 2, other), n);
			for (uint32_t i = 1; i + 1 < n; i++)
				assert_int_not_equal(there[i], other[i]);
		}
	}
	world_free(w);
}

static void test_oversubscription_sets_the_rates(void **state)
{
	struct world *w = world_new(&all_classes, (struct dq_sim_fabric_config){ 0 });

	(void)state;
	assert_int_equal(dq_sim_topology_rate(&w->topology, DQ_SIM_RACK), 400 * GBIT);
	assert_int_equal(dq_sim_topology_rate(&w->topology, DQ_SIM_ZONE), 400 * GBIT); /* 4 GPUs, 4 planes */
	/* 8 GPUs of a zone share 4 links, at 1 : 2.8; 16 of a building the same; so each link has 5/7 and 10/7 of a NIC's rate. */
	assert_int_equal(dq_sim_topology_rate(&w->topology, DQ_SIM_BUILDING), 400 * GBIT * 5 / 7);
	assert_int_equal(dq_sim_topology_rate(&w->topology, DQ_SIM_REGION), 400 * GBIT * 5 / 7);
	assert_int_equal(w->fabric.ports[w->topology.building_across].full_ps, FULL * 20 * 7 / 10);
	world_free(w);
}

static void refused(struct dq_sim_region region, const char *text)
{
	struct dq_sim_topology t;
	struct dq_sim_fabric f;
	struct dq_sim_events q;
	struct dq_sim_fabric_config c = { .full_bytes = FULL, .small_bytes = SMALL };
	struct dq_error err = { 0 };

	dq_sim_events_init(&q);
	assert_int_equal(dq_sim_fabric_init(&f, &q, &c, NULL, NULL), 0);
	assert_int_equal(dq_sim_topology_build(&t, &region, &f, &err), -EINVAL);
	if (!strstr(err.text, text))
		fail_msg("\"%s\" does not say \"%s\"", err.text, text);
	assert_int_equal(f.port_count, 0);
	dq_sim_fabric_fini(&f);
}

static void test_a_wrong_region_is_refused(void **state)
{
	struct dq_sim_region r;

	(void)state;
	r = all_classes, r.racks = 0, refused(r, "racks is 0");
	r = all_classes, r.gpus = 20000, refused(r, "gpus is 20000");
	r = all_classes, r.racks = 16000, refused(r, "GPUs or more");
	r = all_classes, r.planes = 257, refused(r, "planes");
	r = all_classes, r.nic_bps = 1, refused(r, "rate");
	r = all_classes, r.oversubscription[1] = 0, refused(r, "out of the zone");
	r = all_classes, r.nic_bps = 1000000, r.oversubscription[2] = 1000, refused(r, "under 1 Mbit/s");
	r = all_classes, r.rtt_ns[DQ_SIM_ZONE] = 7999, refused(r, "class 2");
}

static void test_one_packet_takes_delays_and_a_transmission_a_hop(void **state)
{
	static const uint32_t to[] = { 2, 4, 8, 16 }; /* rack, zone, building, region */

	(void)state;
	for (unsigned i = 0; i < 4; i++) {
		struct world *w = world_new(&all_classes, (struct dq_sim_fabric_config){ 0 });
		uint16_t route[DQ_SIM_MAX_HOPS];
		uint64_t expected = 0;
		uint32_t n = dq_sim_topology_route(&w->topology, 0, to[i], 3, route);

		for (uint32_t h = 0; h < n; h++)
			expected += w->fabric.ports[route[h]].delay_ps + w->fabric.ports[route[h]].full_ps;
		w->sources[0] = (struct source){ .left = 1, .to = to[i], .plane = 3, .class = DQ_SIM_DATA };
		run(w, DQ_NEVER - 1);
		assert_int_equal(w->sources[0].last_ps, expected);
		assert_int_equal(w->fabric.hops, n);
		check_empty(w);
		world_free(w);
	}
}

static void test_packets_keep_the_line_busy(void **state)
{
	struct world *w = world_new(&one_rack, (struct dq_sim_fabric_config){ 0 });

	(void)state;
	w->sources[0] = (struct source){ .left = 1000, .to = 1, .class = DQ_SIM_DATA };
	run(w, DQ_NEVER - 1);
	/* 4,178 bytes at 400 Gbit/s are 83,560 ps; two transmissions and two links of 2 us for the first, one more each other. */
	assert_int_equal(w->sources[0].last_ps, 4 * US + 1001 * 83560);
	/* One packet at a time is stored in the switch. */
	assert_int_equal(w->fabric.peak_bytes, FULL);
	check_empty(w);
	world_free(w);
}

/* n senders of m packets each to one port: it needs n m transmissions, and at worst all but what left meanwhile is queued. */
static void incast(uint32_t n, uint32_t m)
{
	struct world *w = world_new(&one_rack, (struct dq_sim_fabric_config){ 0 });
	const struct dq_sim_port *port = &w->fabric.ports[w->topology.rack_down];
	uint64_t last = 0;

	for (uint32_t i = 1; i <= n; i++)
		w->sources[i] = (struct source){ .left = m, .to = 0, .class = DQ_SIM_DATA };
	run(w, DQ_NEVER - 1);
	for (uint32_t i = 1; i <= n; i++)
		last = DQ_MAX(last, w->sources[i].last_ps);
	assert_int_equal(last, 4 * US + 83560ull * (1 + n * m));
	/* When the last of each sender came in, the port had been busy for m - 1 transmissions. */
	assert_int_equal(port->peak_bytes, (uint64_t)FULL * (n * m - (m - 1)));
	assert_int_equal(w->fabric.peak_bytes, port->peak_bytes);
	assert_int_equal(w->fabric.switches[0].peak_bytes, port->peak_bytes);
	/* Packet k of all leaves at its turn; i of n come in at once every transmission. */
	{
		double stay = 0;

		for (uint32_t k = 0; k < n * m; k++)
			stay += (double)(k + 1 - k / n) * 83560;
		assert_true(port->byte_ps > stay * FULL * 0.999999 && port->byte_ps < stay * FULL * 1.000001);
	}
	check_empty(w);
	world_free(w);
}

static void test_incast(void **state)
{
	(void)state;
	incast(2, 100);
	incast(8, 50);
	incast(63, 200);
}

static void test_priority_overtakes(void **state)
{
	uint64_t last[2];

	(void)state;
	for (unsigned on = 0; on < 2; on++) {
		struct world *w = world_new(&one_rack, (struct dq_sim_fabric_config){ .priority = on });

		for (uint32_t i = 1; i <= 8; i++)
			w->sources[i] = (struct source){ .left = 100, .to = 0, .class = DQ_SIM_DATA };
		w->sources[9] = (struct source){ .left = 100, .to = 0, .class = DQ_SIM_FIRST };
		run(w, DQ_NEVER - 1);
		last[on] = w->sources[9].last_ps;
		check_empty(w);
		world_free(w);
	}
	assert_true(last[0] > 4 * US + 900 * 83560ull / 2);
	assert_true(last[1] <= 4 * US + 103 * 83560ull);
}

static void test_pause_bounds_the_buffer(void **state)
{
	struct dq_sim_fabric_config c = { .buffer_bytes = 2000000, .alpha = 0.125 };
	struct world *w = world_new(&one_rack, c);
	uint64_t pauses = 0, last = 0, headroom;

	(void)state;
	for (uint32_t i = 1; i <= 8; i++)
		w->sources[i] = (struct source){ .left = 2000, .to = 0, .class = DQ_SIM_DATA };
	run(w, DQ_NEVER - 1);
	for (uint32_t i = 1; i <= 8; i++) {
		const struct dq_sim_port *p = &w->fabric.ports[w->topology.nic + i];

		assert_int_equal(w->sources[i].arrived, 2000);
		last = DQ_MAX(last, w->sources[i].last_ps);
		pauses += p->pauses;
		assert_true(p->pauses > 0);
		assert_false(p->paused);
		/* Eight share one port: each stands still for about 7/8 of the time. */
		assert_true(dq_sim_port_paused(&w->fabric, w->topology.nic + i) > last * 3 / 4);
	}
	assert_int_equal(w->fabric.switches[0].pauses_sent, pauses);
	assert_int_equal(w->sources[9].arrived, 0);
	/* No transmission of the bottleneck was lost. */
	assert_int_equal(last, 4 * US + 83560ull * 16001);
	/* With 8 senders at the threshold t = (B - 8 t) / 8: B / 16 each, and a round trip of the link in headroom. */
	headroom = 8 * (2 * 2 * 50000ull + 3 * FULL);
	assert_true(w->fabric.peak_bytes > c.buffer_bytes / 2);
	assert_true(w->fabric.peak_bytes < c.buffer_bytes / 2 + headroom);
	check_empty(w);
	world_free(w);
}

static void test_a_paused_port_stops_all_behind_it(void **state)
{
	/* Head of line: a third party is slowed down by the pause of a link that it shares. */
	struct dq_sim_region r = all_classes;
	struct dq_sim_fabric_config c = { .buffer_bytes = 200000, .alpha = 0.125 };
	uint64_t last[2];

	(void)state;
	r.planes = 1;
	for (unsigned bounded = 0; bounded < 2; bounded++) {
		struct world *w = world_new(&r, bounded ? c : (struct dq_sim_fabric_config){ 0 });

		w->sources[0] = (struct source){ .left = 2000, .to = 4, .class = DQ_SIM_DATA };
		w->sources[1] = (struct source){ .left = 2000, .to = 6, .class = DQ_SIM_DATA }; /* the victim */
		w->sources[5] = (struct source){ .left = 2000, .to = 4, .class = DQ_SIM_DATA };
		w->sources[8] = (struct source){ .left = 2000, .to = 4, .class = DQ_SIM_DATA };
		run(w, DQ_NEVER - 1);
		last[bounded] = w->sources[1].last_ps;
		check_empty(w);
		world_free(w);
	}
	assert_true(last[1] > last[0] * 3 / 2);
}

static void test_marks_grow_with_the_queue(void **state)
{
	struct dq_sim_fabric_config c = { .ecn_min_bytes = 100 * FULL, .ecn_max_bytes = 300 * FULL, .ecn_probability = 0.2, .seed = 7 };
	struct world *w = world_new(&one_rack, c);
	uint64_t marked = 0;

	(void)state;
	for (uint32_t i = 1; i <= 2; i++)
		w->sources[i] = (struct source){ .left = 400, .to = 0, .class = DQ_SIM_DATA };
	run(w, DQ_NEVER - 1);
	for (uint32_t i = 1; i <= 2; i++)
		marked += w->sources[i].marked;
	assert_int_equal(marked, w->fabric.ports[w->topology.rack_down].marks);
	/* The queue grows by one every two packets to 400: of 800, 200 find under 100, 400 are marked with 10 % on average, 200 always. */
	assert_in_range(marked, 200 + 15, 200 + 65);
	world_free(w);
}

static void test_bins(void **state)
{
	uint32_t last = 0;

	(void)state;
	for (uint64_t bytes = 0; bytes < 1ull << 36; bytes += bytes / 16 + 1) {
		uint32_t bin = dq_sim_bin(bytes);

		assert_true(bin >= last && bin < DQ_SIM_HISTOGRAM);
		last = bin;
		assert_true(dq_sim_bin_bytes(bin) <= bytes);
		assert_true(dq_sim_bin_bytes(bin + 1) > bytes);
	}
}

static void test_the_same_seed_gives_the_same_run(void **state)
{
	uint64_t hops[2], peak[2], marks[2];

	(void)state;
	for (unsigned i = 0; i < 2; i++) {
		struct dq_sim_fabric_config c = { .ecn_min_bytes = 10 * FULL, .ecn_max_bytes = 100 * FULL, .ecn_probability = 1, .seed = 3 };
		struct world *w = world_new(&all_classes, c);
		uint64_t seed = 11;

		for (uint32_t s = 0; s < w->topology.gpus; s++)
			w->sources[s] = (struct source){ .left = 200, .to = (s + 2 + prng_below(&seed, 20)) % 30, .plane = prng_below(&seed, 4),
							 .class = DQ_SIM_DATA, .bytes = 1000 + prng_below(&seed, 3000) };
		for (uint32_t s = 0; s < w->topology.gpus; s++)
			if (dq_sim_topology_class(&w->topology, s, w->sources[s].to) == DQ_SIM_HOST)
				w->sources[s].left = 0;
		run(w, DQ_NEVER - 1);
		hops[i] = w->fabric.hops;
		peak[i] = w->fabric.peak_bytes;
		marks[i] = 0;
		for (uint32_t p = 0; p < w->fabric.port_count; p++)
			marks[i] += w->fabric.ports[p].marks;
		assert_true(marks[i] > 0);
		check_empty(w);
		world_free(w);
	}
	assert_int_equal(hops[0], hops[1]);
	assert_int_equal(peak[0], peak[1]);
	assert_int_equal(marks[0], marks[1]);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_events_come_in_order_of_time),
		cmocka_unit_test(test_equal_times_keep_their_order),
		cmocka_unit_test(test_more_delays_than_lanes),
		cmocka_unit_test(test_nothing_happens_after_the_end),
		cmocka_unit_test(test_routes_join_the_ends),
		cmocka_unit_test(test_oversubscription_sets_the_rates),
		cmocka_unit_test(test_a_wrong_region_is_refused),
		cmocka_unit_test(test_one_packet_takes_delays_and_a_transmission_a_hop),
		cmocka_unit_test(test_packets_keep_the_line_busy),
		cmocka_unit_test(test_incast),
		cmocka_unit_test(test_priority_overtakes),
		cmocka_unit_test(test_pause_bounds_the_buffer),
		cmocka_unit_test(test_a_paused_port_stops_all_behind_it),
		cmocka_unit_test(test_marks_grow_with_the_queue),
		cmocka_unit_test(test_bins),
		cmocka_unit_test(test_the_same_seed_gives_the_same_run),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
