/* SPDX-License-Identifier: Apache-2.0 */
/* The core on the simulated fabric, against closed forms: throughput, queues, serialisation, incast; and what depends on what. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "sim/private.h"

#define KIB 1024u
#define MIB (1024u * 1024u)
#define GBIT 1000000000ull
#define MTU 4096u
#define HEADER 82u
#define WIRE(payload) ((double)(payload) * (MTU + HEADER) / MTU)
#define FULL_NS 83.56            /* a full packet at 400 Gbit/s */
#define ACK_NS 1.72

/* 2 buildings x 2 zones x 2 racks x 2 hosts x 2 GPUs; nothing limits what one window does. */
static struct dq_sim_config config_new(uint64_t window, uint32_t segment, uint32_t qps)
{
	struct dq_sim_config c = {
		.region = { .buildings = 2, .zones = 2, .racks = 2, .hosts = 2, .gpus = 2, .planes = 4, .nic_bps = 400 * GBIT,
			    .oversubscription = { 1, 1, 1 }, .rtt_ns = { 0, 8000, 56000, 120000, 240000 } },
		.mtu_bytes = MTU, .header_bytes = HEADER, .ack_bytes = 86, .cell_packets = 1, .alpha = 1, .nvlink_bps = 3600 * GBIT,
		.nvlink_ns = 1000, .seed = 1, .receives_ahead = 16, .queue_depth = 256, .credits = 64 };

	for (unsigned i = DQ_SIM_RACK; i < DQ_SIM_PATH_CLASSES; i++)
		c.profiles[i] = (struct dq_sim_profile){ .window_bytes = window, .floor_bytes = segment, .rtt_ns = c.region.rtt_ns[i],
							 .rate_bps = 392 * GBIT, .segment_bytes = segment, .qps = qps, .outstanding = 256 };
	return c;
}

static dq_sim *job_new(const struct dq_sim_config *c, const struct dq_sim_message *messages, uint32_t count)
{
	struct dq_sim_text err = { "" };
	dq_sim *s;

	if (dq_sim_create(c, &s, &err) || dq_sim_add(s, messages, count, &err))
		fail_msg("%s", err.text);
	return s;
}

static void run(dq_sim *s)
{
	struct dq_sim_text err = { "" };
	int rc;

	while ((rc = dq_sim_run(s, 1000000, &err)) > 0)
		;
	if (rc)
		fail_msg("%s", err.text);
	/* Everything that was made is gone again. */
	assert_int_equal(s->received, s->message_count);
	assert_int_equal(s->segments.used, 0);
	assert_int_equal(s->controls.used, 0);
	assert_int_equal(s->fabric.packets_used, 0);
	assert_int_equal(s->fabric.bytes, 0);
	for (uint32_t i = 0; i < s->end_count; i++) {
		assert_int_equal(s->ends[i]->vc.segs.used, 0);
		assert_int_equal(s->ends[i]->vc.window.inflight, 0);
		assert_int_equal(s->ends[i]->vc.window.skewed, 0);
		assert_int_equal(s->ends[i]->vc.tracker.duplicates, 0);
	}
}

static struct dq_sim_message message(uint32_t from, uint32_t to, uint64_t bytes)
{
	return (struct dq_sim_message){ .from = from, .to = to, .bytes = bytes, .after = UINT32_MAX };
}

static void near(double value, double expected, double part, const char *what)
{
	if (value < expected * (1 - part) || value > expected * (1 + part))
		fail_msg("%s is %.6g, expected %.6g within %g %%", what, value, expected, part * 100);
}

static uint64_t done_ns(const dq_sim *s)
{
	struct dq_sim_totals t;

	dq_sim_get_totals(s, &t);
	return t.done_ns;
}

static const uint32_t peer_of_class[] = { 1, 2, 4, 8, 16 };
static const uint32_t hops_of_class[] = { 0, 2, 4, 6, 7 };

/* Time from the post of a segment on an idle NIC to its acknowledgement. */
static double segment_ns(enum dq_sim_path_class c, const struct dq_sim_config *config, uint64_t segment)
{
	return WIRE(segment) * 0.02 + (hops_of_class[c] - 1) * FULL_NS + (double)config->region.rtt_ns[c] + hops_of_class[c] * ACK_NS +
	       (double)config->host_ns;
}

/* --- closed forms -------------------------------------------------------------------------------------------------- */

static void test_throughput_is_window_over_rtt_or_the_rate(void **state)
{
	static const uint64_t windows[] = { 1, 2, 4, 8, 16, 32, 64, 128, 256 }; /* segments of 64 KiB */

	(void)state;
	for (unsigned c = DQ_SIM_RACK; c < DQ_SIM_PATH_CLASSES; c++) {
		for (unsigned i = 0; i < sizeof windows / sizeof *windows; i++) {
			struct dq_sim_config config = config_new(windows[i] * 64 * KIB, 64 * KIB, 1);
			struct dq_sim_message m = message(0, peer_of_class[c], 32 * MIB);
			double window = (double)windows[i] * 64 * KIB;
			double rtt = segment_ns((enum dq_sim_path_class)c, &config, 64 * KIB);
			double line = 50.0 * MTU / (MTU + HEADER); /* bytes a ns */
			dq_sim *s = job_new(&config, &m, 1);
			double took;

			run(s);
			/* The announcement takes half an RTT to the sender. Then one window an RTT; the last one only the way there. */
			took = (double)done_ns(s) - (double)config.region.rtt_ns[c] - window / line;
			near((32.0 * MIB - window) / took, DQ_MIN(window / rtt, line), 0.005, "throughput, bytes a ns,");
			/* Nothing but single packets waits anywhere: the NIC is the bottleneck. */
			assert_true(s->fabric.peak_bytes <= (MTU + HEADER) * 7);
			dq_sim_destroy(s);
		}
	}
}

/*
 * A NIC takes its QPs in turn, packet by packet: k segments end together, so the rounds of a message last as long as if they
 * were one. (The first of them leads by a packet more each round; a long message overcomes it after some thirty rounds.)
 */
static void test_more_qps_make_a_round_longer(void **state)
{
	static const uint32_t qps[] = { 1, 2, 4 };

	(void)state;
	for (unsigned i = 0; i < 3; i++) {
		struct dq_sim_config config = config_new(512 * KIB, 128 * KIB, qps[i]);
		struct dq_sim_message m = message(0, 2, 2 * MIB);
		double round = segment_ns(DQ_SIM_RACK, &config, (uint64_t)qps[i] * 128 * KIB), line = 50.0 * MTU / (MTU + HEADER);
		dq_sim *s;

		config.profiles[DQ_SIM_RACK].outstanding = 4 / qps[i];
		s = job_new(&config, &m, 1);
		run(s);
		near((2.0 * MIB - 512 * KIB) / ((double)done_ns(s) - 8000 - 512 * KIB / line), DQ_MIN(512 * KIB / round, line), 0.03 * i + 0.02,
		     "throughput, bytes a ns,");
		dq_sim_destroy(s);
	}
}

static void test_software_takes_its_time(void **state)
{
	struct dq_sim_config config = config_new(64 * KIB, 64 * KIB, 1);
	struct dq_sim_message m = message(0, 2, 8 * MIB);
	uint64_t without;
	dq_sim *s = job_new(&config, &m, 1);

	(void)state;
	run(s);
	without = done_ns(s);
	dq_sim_destroy(s);
	config.host_ns = 1500;
	s = job_new(&config, &m, 1);
	run(s);
	/* Once for the announcement, once for the arrival, and for each of 128 segments but the last before the next is posted. */
	near((double)(done_ns(s) - without), 1500 * (2 + 127), 0.001, "what the software adds, ns,");
	dq_sim_destroy(s);
}

/* One flow through a link of a quarter of the NIC's rate: what is in flight beyond the BDP waits before that link. */
static void test_queue_is_window_less_bdp(void **state)
{
	static const uint64_t windows[] = { 1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB };

	(void)state;
	for (unsigned i = 0; i < 4; i++) {
		struct dq_sim_config config = config_new(windows[i], 8 * KIB, 1);
		struct dq_sim_message m = message(0, 4, 64 * MIB);
		double rate = 12.5, bdp, queue, mean = 0;
		struct dq_sim_totals t;
		uint64_t ns[512], bytes[512];
		uint32_t samples = 0;
		dq_sim *s;

		config.region.oversubscription[0] = 4;
		config.queue_depth = config.profiles[DQ_SIM_ZONE].outstanding = 1024;
		config.sample_ns = 1000;
		s = job_new(&config, &m, 1);
		run(s);
		/* The way without the queue: delays, a packet stored at each port but the one with the queue, the acknowledgement. */
		bdp = rate * (56000 + 2 * FULL_NS + 2 * FULL_NS * 4 + 4 * ACK_NS);
		queue = WIRE(windows[i]) - bdp;
		dq_sim_get_totals(s, &t);
		dq_sim_get_series(s, ns, bytes, NULL);
		for (uint32_t k = 0; k < t.samples; k++) {
			if (ns[k] < t.done_ns / 4 || ns[k] > t.done_ns * 3 / 4)
				continue;
			mean += (double)bytes[k];
			samples++;
		}
		/* A segment is acknowledged whole: some of the window has arrived already. */
		mean /= samples;
		if (mean > queue + 2 * (MTU + HEADER) || mean < queue - WIRE(8 * KIB) - 2 * (MTU + HEADER))
			fail_msg("mean queue is %.0f, expected %.0f", mean, queue);
		/* At first the window came at four times the rate at which it left. */
		near((double)t.peak_bytes, DQ_MAX(queue, WIRE(windows[i]) * 3 / 4), 0.03, "peak of the queue, bytes,");
		near(64.0 * MIB / ((double)t.done_ns - 56000), rate * MTU / (MTU + HEADER), 0.005, "throughput, bytes a ns,");
		dq_sim_destroy(s);
	}
}

/* n windows to one receiver: all of them in flight, and what does not fit the way waits at the last port. */
static void test_incast_queues_all_windows(void **state)
{
	static const uint32_t senders[] = { 2, 6, 12 };

	(void)state;
	for (unsigned i = 0; i < 3; i++) {
		struct dq_sim_config config = config_new(1 * MIB, 8 * KIB, 1);
		struct dq_sim_message m[12];
		uint32_t n = senders[i];
		double bdp = 50 * (8000 + 2 * FULL_NS), queue;
		dq_sim *s;

		config.region.zones = config.region.racks = config.region.buildings = 1;
		config.region.hosts = 16;
		config.region.gpus = 1;
		for (uint32_t k = 0; k < n; k++)
			m[k] = message(k + 1, 0, 16 * MIB);
		s = job_new(&config, m, n);
		run(s);
		queue = n * WIRE(1 * MIB) - bdp;
		near((double)s->fabric.ports[s->topology.rack_down].peak_bytes, queue, 0.02, "peak of the queue, bytes,");
		near((double)done_ns(s), n * WIRE(16 * MIB) * 0.02 + 8000, 0.005, "completion, ns,");
		dq_sim_destroy(s);
	}
}

static void test_a_message_takes_its_serialisation(void **state)
{
	static const uint64_t sizes[] = { 0, 1, 4096, 4097, 1000000, 64 * MIB };

	(void)state;
	for (unsigned c = DQ_SIM_RACK; c < DQ_SIM_PATH_CLASSES; c++) {
		for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
			struct dq_sim_config config = config_new(UINT64_MAX, 16 * MIB, 1);
			struct dq_sim_message m = message(0, peer_of_class[c], sizes[i]);
			uint64_t packets = DQ_MAX((sizes[i] + MTU - 1) / MTU, 1);
			double wire = (double)(sizes[i] + packets * HEADER), last = packets > 1 ? FULL_NS : wire * 0.02;
			/* The RTR: head, its message, one packet; over all hops. Then the data: the last packet may be shorter than the one
			 * that it follows closely. */
			double rtr = (32 + 4 + 51 + 8 + HEADER) * 0.02 * hops_of_class[c] + (double)config.region.rtt_ns[c] / 2;
			double data = wire * 0.02 + (hops_of_class[c] - 1) * last + (double)config.region.rtt_ns[c] / 2;
			dq_sim *s = job_new(&config, &m, 1);

			run(s);
			if ((double)done_ns(s) > rtr + data + 2 || (double)done_ns(s) < rtr + data - 7 * FULL_NS)
				fail_msg("class %u, %llu bytes: done after %llu ns, expected %.1f", c, (unsigned long long)sizes[i],
					 (unsigned long long)done_ns(s), rtr + data);
			dq_sim_destroy(s);
		}
	}
}

static void test_two_qps_take_turns(void **state)
{
	struct dq_sim_config config = config_new(UINT64_MAX, 16 * MIB, 1);
	struct dq_sim_message m[] = { message(0, 2, 8 * MIB), message(0, 3, 8 * MIB), message(0, 4, 1 * MIB) };
	struct dq_sim_message_times t[3];
	dq_sim *s = job_new(&config, m, 3);

	(void)state;
	run(s);
	dq_sim_get_times(s, t);
	/* The two long ones end together, when both have been sent; the short one after three times its own time. */
	near((double)t[0].received_ns, (double)t[1].received_ns, 0.001, "end of the first long one, ns,");
	near((double)t[0].received_ns, WIRE(17 * MIB) * 0.02 + 8000, 0.01, "end of the long ones, ns,");
	near((double)t[2].received_ns, WIRE(3 * MIB) * 0.02 + 56000, 0.25, "end of the short one, ns,");
	dq_sim_destroy(s);
}

static void test_nvlink_has_its_own_rate(void **state)
{
	struct dq_sim_config config = config_new(UINT64_MAX, 16 * MIB, 1);
	struct dq_sim_message m[] = { message(0, 1, 45000000), message(0, 1, 45000000) };
	struct dq_sim_message_times t[2];
	struct dq_sim_totals all;
	dq_sim *s = job_new(&config, m, 2);

	(void)state;
	run(s);
	dq_sim_get_times(s, t);
	assert_int_equal(t[0].received_ns, 101000);
	assert_int_equal(t[1].received_ns, 201000);
	dq_sim_get_totals(s, &all);
	assert_int_equal(all.packet_hops, 0);
	assert_int_equal(all.bytes, 90000000);
	assert_int_equal(all.fabric_bytes, 0);
	assert_int_equal(all.vcs, 0);
	dq_sim_destroy(s);
}

/* --- what depends on what ------------------------------------------------------------------------------------------ */

static void test_messages_wait_for_their_time_and_for_others(void **state)
{
	struct dq_sim_config config = config_new(UINT64_MAX, 16 * MIB, 1);
	struct dq_sim_message m[4] = { message(0, 2, 1 * MIB), message(2, 4, 1 * MIB), message(4, 5, 1 * MIB), message(8, 9, 1) };
	struct dq_sim_message_times t[4];
	dq_sim *s;

	(void)state;
	m[0].start_ns = 5000;
	m[1].after = 0;
	m[2].after = 1;
	m[2].start_ns = 500000;
	m[3].start_ns = 77;
	s = job_new(&config, m, 4);
	run(s);
	dq_sim_get_times(s, t);
	assert_int_equal(t[0].posted_ns, 5000);
	assert_int_equal(t[1].posted_ns, t[0].received_ns);
	assert_true(t[1].received_ns < 500000);
	assert_int_equal(t[2].posted_ns, 500000);
	assert_int_equal(t[3].posted_ns, 77);
	dq_sim_destroy(s);
}

static void test_many_messages_need_few_receives(void **state)
{
	struct dq_sim_config config = config_new(MIB, 64 * KIB, 4);
	static struct dq_sim_message m[3000];
	dq_sim *s;

	(void)state;
	config.receives_ahead = 3;
	config.grants = 1;
	for (unsigned i = 0; i < 3000; i++)
		m[i] = message(i % 5, 16 + i % 7, (i * 7919) % 100000);
	s = job_new(&config, m, 3000);
	run(s);
	dq_sim_destroy(s);
}

/* --- the rules on the fabric ---------------------------------------------------------------------------------------- */

struct outcome {
	uint64_t done, peak, shrinks;
};

static struct outcome all_to_one(bool grants, bool adapt, uint64_t buffer, uint64_t seed)
{
	struct dq_sim_config config = config_new(7 * MIB / 2, 256 * KIB, 4);
	struct dq_sim_message m[31];
	struct outcome o;
	struct dq_sim_totals t;
	dq_sim *s;
	uint32_t n = 0;

	config.grants = grants;
	config.buffer_bytes = buffer;
	config.seed = seed;
	config.host_ns = 1000;
	config.alpha = 0.125;
	if (buffer) { /* what is under way on a link between buildings alone would fill it */
		config.region.buildings = 1;
		config.region.zones = 4;
	}
	for (unsigned i = DQ_SIM_RACK; i < DQ_SIM_PATH_CLASSES; i++)
		config.profiles[i].adapt = adapt;
	for (uint32_t k = 2; k < 32; k++)
		m[n++] = message(k, 0, 8 * MIB);
	s = job_new(&config, m, n);
	run(s);
	dq_sim_get_totals(s, &t);
	o = (struct outcome){ t.done_ns, t.peak_bytes, t.shrinks };
	for (uint32_t i = 0; i < s->fabric.switch_count; i++)
		assert_int_equal(s->fabric.switches[i].over_bytes, 0);
	dq_sim_destroy(s);
	return o;
}

static void test_grants_keep_an_incast_short(void **state)
{
	struct outcome free = all_to_one(false, false, 0, 1), delay = all_to_one(false, true, 0, 1), grants = all_to_one(true, false, 0, 1);
	double fill = 30 * WIRE(8 * MIB) * 0.02;

	(void)state;
	/* Without anything all windows are in flight. */
	assert_true(free.peak > 30 * 7 * MIB / 2 * 0.8);
	assert_true(grants.peak * 5 < free.peak);
	assert_true(delay.shrinks > 0);
	assert_int_equal(grants.shrinks, 0);
	assert_true((double)free.done < fill * 1.05 + 240000);
	assert_true((double)grants.done < fill * 1.05 + 240000);
	assert_true((double)delay.done < fill * 1.10 + 240000);
}

static void test_real_buffers_pause_and_lose_nothing(void **state)
{
	struct outcome o = all_to_one(false, false, 16 * MIB, 1);

	(void)state;
	assert_true((double)o.done < 30 * WIRE(8 * MIB) * 0.02 * 1.25);
}

static void test_the_same_configuration_gives_the_same_run(void **state)
{
	struct outcome a = all_to_one(true, true, 0, 5), b = all_to_one(true, true, 0, 5), c = all_to_one(true, true, 0, 6);

	(void)state;
	assert_int_equal(a.done, b.done);
	assert_int_equal(a.peak, b.peak);
	assert_int_equal(a.shrinks, b.shrinks);
	assert_true(a.done != c.done || a.peak != c.peak);
}

static void test_cells_are_coarser_but_near(void **state)
{
	struct dq_sim_message m[8];
	uint64_t done[2], hops[2];

	(void)state;
	for (unsigned coarse = 0; coarse < 2; coarse++) {
		struct dq_sim_config config = config_new(4 * MIB, 256 * KIB, 4);
		struct dq_sim_totals t;
		dq_sim *s;

		config.cell_packets = coarse ? 8 : 1;
		for (uint32_t k = 0; k < 8; k++)
			m[k] = message(2 * k, (2 * k + 14) % 32, 16 * MIB);
		s = job_new(&config, m, 8);
		run(s);
		dq_sim_get_totals(s, &t);
		done[coarse] = t.done_ns;
		hops[coarse] = t.packet_hops;
		dq_sim_destroy(s);
	}
	near((double)done[1], (double)done[0], 0.03, "completion with cells of 8 packets, ns,");
	assert_true(hops[1] * 6 < hops[0]);
}

static void test_the_series_follows_the_buffer(void **state)
{
	struct dq_sim_config config = config_new(4 * MIB, 256 * KIB, 2);
	struct dq_sim_message m[6];
	struct dq_sim_totals t;
	uint64_t *ns, *bytes, *each, most = 0;
	dq_sim *s;

	(void)state;
	config.sample_ns = 100;
	for (uint32_t k = 0; k < 6; k++)
		m[k] = message(2 * k + 4, 0, 16 * MIB);
	s = job_new(&config, m, 6);
	run(s);
	dq_sim_get_totals(s, &t);
	assert_in_range(t.samples, 256, 512);
	ns = malloc(t.samples * sizeof *ns);
	bytes = malloc(t.samples * sizeof *bytes);
	each = malloc((size_t)t.samples * t.switches * sizeof *each);
	dq_sim_get_series(s, ns, bytes, each);
	for (uint32_t i = 0; i < t.samples; i++) {
		uint64_t sum = 0;

		assert_true(i == 0 || ns[i] > ns[i - 1]);
		for (uint32_t k = 0; k < t.switches; k++)
			sum += each[(size_t)i * t.switches + k];
		assert_int_equal(sum, bytes[i]);
		most = DQ_MAX(most, bytes[i]);
	}
	assert_int_equal(ns[0], 0);
	assert_true(ns[t.samples - 1] > t.done_ns * 9 / 10);
	assert_true(most <= t.peak_bytes && most > t.peak_bytes * 9 / 10);
	free(ns);
	free(bytes);
	free(each);
	dq_sim_destroy(s);
}

static void test_statistics_agree(void **state)
{
	struct dq_sim_config config = config_new(2 * MIB, 128 * KIB, 4);
	struct dq_sim_message m[16];
	struct dq_sim_totals t;
	struct dq_sim_switch_stats *sw;
	struct dq_sim_port_stats *ports;
	uint64_t counts[256], bounds[256], found = 0, hops = 0, peak = 0;
	double mean = 0, of_ports = 0;
	dq_sim *s;

	(void)state;
	config.ecn_min_bytes = 100000;
	config.ecn_max_bytes = 200000;
	config.ecn_probability = 0.5;
	for (uint32_t k = 0; k < 16; k++)
		m[k] = message(k, (k * 5 + 17) % 32 / 2 * 2 + 1 - k % 2, 4 * MIB);
	s = job_new(&config, m, 16);
	run(s);
	dq_sim_get_totals(s, &t);
	sw = calloc(t.switches, sizeof *sw);
	ports = calloc(t.ports, sizeof *ports);
	dq_sim_get_switches(s, sw);
	dq_sim_get_ports(s, ports);
	for (uint32_t i = 0; i < t.switches; i++) {
		mean += sw[i].mean_bytes;
		peak += sw[i].peak_bytes;
		assert_int_equal(sw[i].pauses, 0);
	}
	for (uint32_t i = 0; i < t.ports; i++) {
		hops += ports[i].sent_packets;
		of_ports += ports[i].mean_bytes;
		if (ports[i].sw != UINT32_MAX)
			assert_true(ports[i].peak_bytes <= sw[ports[i].sw].peak_bytes);
	}
	assert_int_equal(hops, t.packet_hops);
	assert_true(peak >= t.peak_bytes);
	near(of_ports, mean, 1e-9, "mean of all ports, bytes,");
	for (uint32_t tier = 0; tier < 3; tier++) {
		dq_sim_get_found(s, tier, counts, bounds);
		for (uint32_t b = 0; b < 256; b++)
			found += counts[b];
		assert_true(bounds[1] == 64 && bounds[255] > 1ull << 36);
	}
	assert_true(found > 0 && found < hops);
	assert_int_equal(t.bytes, 16 * 4 * MIB);
	assert_true(t.fabric_bytes > 0 && t.fabric_bytes < t.bytes);
	assert_int_equal(t.segments, t.fabric_bytes / (128 * KIB));
	assert_true(t.control_packets > 0);
	free(sw);
	free(ports);
	dq_sim_destroy(s);
}

/* --- errors -------------------------------------------------------------------------------------------------------- */

static void refused(struct dq_sim_config c, const char *says)
{
	struct dq_sim_text err = { "" };
	dq_sim *s;

	assert_int_equal(dq_sim_create(&c, &s, &err), -EINVAL);
	assert_null(s);
	if (!strstr(err.text, says))
		fail_msg("\"%s\" does not say \"%s\"", err.text, says);
}

static void test_wrong_configurations_are_refused(void **state)
{
	const struct dq_sim_config good = config_new(MIB, 64 * KIB, 1);
	struct dq_sim_config c;

	(void)state;
	c = good, c.mtu_bytes = 100, refused(c, "MTU is 100");
	c = good, c.cell_packets = 0, refused(c, "cell has 0");
	c = good, c.ack_bytes = 0, refused(c, "acknowledgements of 0");
	c = good, c.nvlink_bps = 0, refused(c, "NVLink");
	c = good, c.receives_ahead = 0, refused(c, "0 receives");
	c = good, c.queue_depth = 1u << 20, refused(c, "queue depth");
	c = good, c.credits = 1, refused(c, "credits");
	c = good, c.alpha = -1, refused(c, "alpha");
	c = good, c.ecn_min_bytes = 10, refused(c, "ECN");
	c = good, c.host_ns = UINT64_MAX, refused(c, "1 s");
	c = good, c.profiles[2].segment_bytes = 1000, refused(c, "class zone");
	c = good, c.profiles[4].qps = 0, refused(c, "class region: 0 QPs");
	c = good, c.region.gpus = 0, refused(c, "gpus is 0");
}

static void test_wrong_messages_are_refused(void **state)
{
	struct dq_sim_config c = config_new(MIB, 64 * KIB, 1);
	struct dq_sim_message bad[] = { message(0, 0, 1), message(0, 32, 1), message(0, 2, 1ull << 41), message(0, 2, 1ull << 32), message(2, 0, 1),
					message(2, 0, 1) };
	static const char *const says[] = { "from GPU 0 to 0", "from GPU 0 to 32", "at most 1 TiB", "2147483648 at most", "waits for message 7",
					    "waits for message 0" };
	struct dq_sim_message good = message(0, 4, 1);
	struct dq_sim_text err = { "" };
	dq_sim *s = job_new(&c, &good, 1);

	(void)state;
	bad[4].after = 7;
	bad[5].after = 0; /* that one goes to GPU 4 */
	for (unsigned i = 0; i < 6; i++) {
		assert_int_equal(dq_sim_add(s, &bad[i], 1, &err), -EINVAL);
		if (!strstr(err.text, says[i]))
			fail_msg("\"%s\" does not say \"%s\"", err.text, says[i]);
	}
	run(s);
	assert_int_equal(dq_sim_add(s, &good, 1, &err), -EBUSY);
	dq_sim_destroy(s);
	s = job_new(&c, NULL, 0);
	run(s);
	dq_sim_destroy(s);
	s = job_new(&c, &good, 1);
	assert_int_equal(dq_sim_run(s, 3, &err), 1);
	dq_sim_destroy(s); /* in the middle of it */
	dq_sim_destroy(NULL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_throughput_is_window_over_rtt_or_the_rate),
		cmocka_unit_test(test_more_qps_make_a_round_longer),
		cmocka_unit_test(test_software_takes_its_time),
		cmocka_unit_test(test_queue_is_window_less_bdp),
		cmocka_unit_test(test_incast_queues_all_windows),
		cmocka_unit_test(test_a_message_takes_its_serialisation),
		cmocka_unit_test(test_two_qps_take_turns),
		cmocka_unit_test(test_nvlink_has_its_own_rate),
		cmocka_unit_test(test_messages_wait_for_their_time_and_for_others),
		cmocka_unit_test(test_many_messages_need_few_receives),
		cmocka_unit_test(test_grants_keep_an_incast_short),
		cmocka_unit_test(test_real_buffers_pause_and_lose_nothing),
		cmocka_unit_test(test_the_same_configuration_gives_the_same_run),
		cmocka_unit_test(test_cells_are_coarser_but_near),
		cmocka_unit_test(test_the_series_follows_the_buffer),
		cmocka_unit_test(test_statistics_agree),
		cmocka_unit_test(test_wrong_configurations_are_refused),
		cmocka_unit_test(test_wrong_messages_are_refused),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
