/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/topology.h"

#include <errno.h>
#include <string.h>

#define MAX_GPUS 16384u
#define MIN_RATE_BPS 1000000ull
#define MAX_RATE_BPS 100000000000000ull

enum tier { TIER_RACK, TIER_ZONE, TIER_BUILDING };

/* Rate of one link out of a place with so many GPUs. */
static uint64_t up_rate(const struct dq_sim_region *r, uint32_t gpus, unsigned tier)
{
	return (uint64_t)((double)r->nic_bps * gpus / r->planes / r->oversubscription[tier]);
}

static int check(const struct dq_sim_region *r, struct dq_error *err)
{
	const uint32_t counts[] = { r->buildings, r->zones, r->racks, r->hosts, r->gpus };
	static const char *const names[] = { "buildings", "zones", "racks", "hosts", "gpus" };
	static const char *const tiers[] = { "rack", "zone", "building" };
	uint64_t all = 1;

	for (unsigned i = 0; i < 5; i++) {
		if (counts[i] == 0 || counts[i] > MAX_GPUS)
			return dq_error_set(err, -EINVAL, "%s is %u: expected 1 to %u", names[i], counts[i], MAX_GPUS);
		all *= counts[i];
		if (all > MAX_GPUS)
			return dq_error_set(err, -EINVAL, "the region has %llu GPUs or more: expected %u at most", (unsigned long long)all, MAX_GPUS);
	}
	if (r->planes == 0 || r->planes > 256)
		return dq_error_set(err, -EINVAL, "planes is %u: expected 1 to 256", r->planes);
	if (r->nic_bps < MIN_RATE_BPS || r->nic_bps > MAX_RATE_BPS)
		return dq_error_set(err, -EINVAL, "the NIC's rate is %llu bit/s: expected 1 Mbit/s to 100 Tbit/s", (unsigned long long)r->nic_bps);
	for (unsigned i = 0; i < 3; i++) {
		if (!(r->oversubscription[i] >= 0.01 && r->oversubscription[i] <= 1000))
			return dq_error_set(err, -EINVAL, "oversubscription out of the %s is %g: expected 0.01 to 1000", tiers[i], r->oversubscription[i]);
		if (up_rate(r, r->gpus * r->hosts, i) < MIN_RATE_BPS)
			return dq_error_set(err, -EINVAL, "oversubscription out of the %s leaves links under 1 Mbit/s", tiers[i]);
	}
	for (unsigned i = DQ_SIM_RACK; i < DQ_SIM_PATH_CLASSES; i++) {
		if (r->rtt_ns[i] > 10000000000ull || (i > DQ_SIM_RACK && r->rtt_ns[i] < r->rtt_ns[i - 1]))
			return dq_error_set(err, -EINVAL, "RTT %llu ns of class %u: expected at least that of the class before it, at most 10 s",
					    (unsigned long long)r->rtt_ns[i], i);
	}
	return 0;
}

/* `count` ports of each of the switches from first_sw on; the index of the first port. */
static uint32_t ports(struct dq_sim_fabric *f, uint32_t first_sw, uint32_t switches, uint32_t count, uint64_t rate_bps, uint64_t delay_ps,
		      bool *failed)
{
	uint32_t first = f->port_count;

	for (uint32_t s = 0; s < switches; s++)
		for (uint32_t i = 0; i < count; i++)
			*failed |= dq_sim_port_add(f, first_sw == DQ_NONE ? DQ_NONE : first_sw + s, rate_bps, delay_ps) == DQ_NONE;
	return first;
}

static uint32_t switches(struct dq_sim_fabric *f, uint32_t count, enum tier tier, bool *failed)
{
	uint32_t first = f->switch_count;

	for (uint32_t i = 0; i < count; i++)
		*failed |= dq_sim_switch_add(f, tier) == DQ_NONE;
	return first;
}

int dq_sim_topology_build(struct dq_sim_topology *t, const struct dq_sim_region *region, struct dq_sim_fabric *f, struct dq_error *err)
{
	const struct dq_sim_region *r = &t->region;
	uint64_t d_nic, d_rack, d_zone, d_building;
	uint32_t zones, racks, first;
	bool failed = false;
	int rc = check(region, err);

	memset(t, 0, sizeof *t);
	if (rc)
		return rc;
	t->region = *region;
	t->gpus_rack = r->hosts * r->gpus;
	t->gpus_zone = t->gpus_rack * r->racks;
	t->gpus_building = t->gpus_zone * r->zones;
	t->gpus = t->gpus_building * r->buildings;
	zones = r->buildings * r->zones;
	racks = zones * r->racks;
	/* Both ways, up and down: four times the delay of each tier's link; the link between buildings twice. */
	d_nic = r->rtt_ns[DQ_SIM_RACK] * DQ_SIM_PS_PER_NS / 4;
	d_rack = (r->rtt_ns[DQ_SIM_ZONE] - r->rtt_ns[DQ_SIM_RACK]) * DQ_SIM_PS_PER_NS / 4;
	d_zone = (r->rtt_ns[DQ_SIM_BUILDING] - r->rtt_ns[DQ_SIM_ZONE]) * DQ_SIM_PS_PER_NS / 4;
	d_building = (r->rtt_ns[DQ_SIM_REGION] - r->rtt_ns[DQ_SIM_BUILDING]) * DQ_SIM_PS_PER_NS / 2;

	t->nic = ports(f, DQ_NONE, t->gpus, 1, r->nic_bps, d_nic, &failed);
	first = switches(f, racks, TIER_RACK, &failed);
	t->rack_down = ports(f, first, racks, t->gpus_rack, r->nic_bps, d_nic, &failed);
	if (racks > 1) {
		uint64_t rate = up_rate(r, t->gpus_rack, TIER_RACK);

		t->rack_up = ports(f, first, racks, r->planes, rate, d_rack, &failed);
		first = switches(f, zones * r->planes, TIER_ZONE, &failed);
		t->zone_down = ports(f, first, zones * r->planes, r->racks, rate, d_rack, &failed);
	}
	if (zones > 1) {
		uint64_t rate = up_rate(r, t->gpus_zone, TIER_ZONE);

		t->zone_up = ports(f, first, zones * r->planes, 1, rate, d_zone, &failed);
		first = switches(f, r->buildings * r->planes, TIER_BUILDING, &failed);
		t->building_down = ports(f, first, r->buildings * r->planes, r->zones, rate, d_zone, &failed);
	}
	if (r->buildings > 1) {
		uint64_t rate = up_rate(r, t->gpus_building, TIER_BUILDING) / (r->buildings - 1);

		t->building_across = ports(f, first, r->buildings * r->planes, r->buildings, DQ_MAX(rate, MIN_RATE_BPS), d_building, &failed);
	}
	if (failed)
		return dq_error_set(err, -ENOMEM, "no memory for a fabric of %u GPUs, or more than %u ports", t->gpus, DQ_SIM_MAX_PORTS);
	return 0;
}

enum dq_sim_path_class dq_sim_topology_class(const struct dq_sim_topology *t, uint32_t from, uint32_t to)
{
	if (from / t->region.gpus == to / t->region.gpus)
		return DQ_SIM_HOST;
	if (from / t->gpus_rack == to / t->gpus_rack)
		return DQ_SIM_RACK;
	if (from / t->gpus_zone == to / t->gpus_zone)
		return DQ_SIM_ZONE;
	return from / t->gpus_building == to / t->gpus_building ? DQ_SIM_BUILDING : DQ_SIM_REGION;
}

uint32_t dq_sim_topology_route(const struct dq_sim_topology *t, uint32_t from, uint32_t to, uint32_t plane, uint16_t route[DQ_SIM_MAX_HOPS])
{
	const struct dq_sim_region *r = &t->region;
	enum dq_sim_path_class c = dq_sim_topology_class(t, from, to);
	uint32_t rack[2] = { from / t->gpus_rack, to / t->gpus_rack };
	uint32_t zone[2] = { from / t->gpus_zone, to / t->gpus_zone };
	uint32_t building[2] = { from / t->gpus_building, to / t->gpus_building };
	uint32_t n = 0;

	route[n++] = (uint16_t)(t->nic + from);
	if (c >= DQ_SIM_ZONE)
		route[n++] = (uint16_t)(t->rack_up + rack[0] * r->planes + plane);
	if (c >= DQ_SIM_BUILDING)
		route[n++] = (uint16_t)(t->zone_up + zone[0] * r->planes + plane);
	if (c == DQ_SIM_REGION)
		route[n++] = (uint16_t)(t->building_across + (building[0] * r->planes + plane) * r->buildings + building[1]);
	if (c >= DQ_SIM_BUILDING)
		route[n++] = (uint16_t)(t->building_down + (building[1] * r->planes + plane) * r->zones + zone[1] % r->zones);
	if (c >= DQ_SIM_ZONE)
		route[n++] = (uint16_t)(t->zone_down + (zone[1] * r->planes + plane) * r->racks + rack[1] % r->racks);
	route[n++] = (uint16_t)(t->rack_down + to);
	return n;
}

uint64_t dq_sim_topology_rate(const struct dq_sim_topology *t, enum dq_sim_path_class c)
{
	const struct dq_sim_region *r = &t->region;
	uint64_t rate = r->nic_bps;

	if (c >= DQ_SIM_ZONE)
		rate = DQ_MIN(rate, up_rate(r, t->gpus_rack, TIER_RACK));
	if (c >= DQ_SIM_BUILDING)
		rate = DQ_MIN(rate, up_rate(r, t->gpus_zone, TIER_ZONE));
	if (c == DQ_SIM_REGION)
		rate = DQ_MIN(rate, DQ_MAX(up_rate(r, t->gpus_building, TIER_BUILDING) / (r->buildings - 1), MIN_RATE_BPS));
	return rate;
}
