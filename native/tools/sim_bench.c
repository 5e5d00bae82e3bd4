/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How fast the fabric of the simulator is: packet-hops a second on one core, without hosts. Every GPU sends full packets at
 * line rate; each packet to the next of `spread` destinations (1: a permutation), by a random plane.
 * Usage: sim_bench [buildings zones racks hosts gpus planes [microseconds [spread]]]
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "sim/topology.h"

struct bench {
	struct dq_sim_events events;
	struct dq_sim_fabric fabric;
	struct dq_sim_topology topology;
	uint32_t spread;
	uint32_t *turn;
	uint64_t random;
};

static uint32_t pull(void *user, uint32_t port, bool first_only)
{
	struct bench *b = user;
	uint32_t from = port - b->topology.nic, to, index;
	struct dq_sim_packet *p;

	(void)first_only;
	b->random = b->random * 6364136223846793005ull + 1442695040888963407ull;
	to = (from + b->topology.gpus / 2 + b->turn[from]++ % b->spread * b->topology.region.gpus) % b->topology.gpus;
	if (to / b->topology.region.gpus == from / b->topology.region.gpus)
		to = (to + b->topology.region.gpus) % b->topology.gpus;
	index = dq_sim_packet_new(&b->fabric);
	if (index == DQ_NONE)
		return DQ_NONE;
	p = dq_sim_packet_at(&b->fabric, index);
	p->bytes = b->fabric.config.full_bytes;
	p->class = DQ_SIM_DATA;
	p->hops = (uint8_t)dq_sim_topology_route(&b->topology, from, to, (uint32_t)(b->random >> 33) % b->topology.region.planes, p->route);
	return index;
}

static void deliver(void *user, uint32_t packet)
{
	dq_sim_packet_free(&((struct bench *)user)->fabric, packet);
}

int main(int argc, char **argv)
{
	static const struct dq_sim_fabric_ops ops = { .pull = pull, .deliver = deliver };
	struct dq_sim_region region = { .buildings = 2, .zones = 2, .racks = 4, .hosts = 2, .gpus = 8, .planes = 16, .nic_bps = 400000000000ull,
					.oversubscription = { 1, 1, 1 }, .rtt_ns = { 0, 8000, 56000, 120000, 240000 } };
	struct dq_sim_fabric_config config = { .full_bytes = 4096 + 82, .small_bytes = 86, .seed = 1 };
	static struct bench b;
	struct dq_sim_event e;
	struct dq_error err;
	struct timespec from, to;
	uint64_t us = 300;
	double s;

	if (argc >= 7) {
		region.buildings = (uint32_t)atoi(argv[1]);
		region.zones = (uint32_t)atoi(argv[2]);
		region.racks = (uint32_t)atoi(argv[3]);
		region.hosts = (uint32_t)atoi(argv[4]);
		region.gpus = (uint32_t)atoi(argv[5]);
		region.planes = (uint32_t)atoi(argv[6]);
	}
	us = argc > 7 ? strtoull(argv[7], NULL, 10) : us;
	b.spread = argc > 8 ? (uint32_t)DQ_MAX(1, atoi(argv[8])) : 1;
	dq_sim_events_init(&b.events);
	if (dq_sim_fabric_init(&b.fabric, &b.events, &config, &ops, &b) || dq_sim_topology_build(&b.topology, &region, &b.fabric, &err)) {
		fprintf(stderr, "%s\n", err.text);
		return 1;
	}
	b.turn = calloc(b.topology.gpus, sizeof *b.turn);
	if (!b.turn)
		return 1;
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &from);
	for (uint32_t i = 0; i < b.topology.gpus; i++)
		dq_sim_port_kick(&b.fabric, b.topology.nic + i);
	while (!b.events.lost && dq_sim_events_pop(&b.events, us * 1000000ull, &e))
		dq_sim_fabric_event(&b.fabric, &e);
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &to);
	s = (double)(to.tv_sec - from.tv_sec) + (double)(to.tv_nsec - from.tv_nsec) * 1e-9;
	printf("{\"gpus\": %u, \"ports\": %u, \"spread\": %u, \"simulated_us\": %llu, \"packet_hops\": %llu, \"events\": %llu, \"cpu_s\": %.3f, "
	       "\"packet_hops_per_s\": %.0f, \"peak_buffer_bytes\": %llu, \"packets\": %u}\n", b.topology.gpus, b.fabric.port_count, b.spread,
	       (unsigned long long)us, (unsigned long long)b.fabric.hops, (unsigned long long)b.events.handled, s, (double)b.fabric.hops / s,
	       (unsigned long long)b.fabric.peak_bytes, b.fabric.packets_used);
	free(b.turn);
	dq_sim_fabric_fini(&b.fabric);
	dq_sim_events_fini(&b.events);
	return 0;
}
