/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The switches and links of a region: buildings of zones of racks of hosts of GPUs, one NIC a GPU.
 *
 *  Tier 0  one switch a rack: a port to each GPU, and one to each plane
 *  Tier 1  `planes` switches a zone: a port to each rack, and one up
 *  Tier 2  `planes` switches a building: a port to each zone, and one to the same plane of each other building
 *
 * A plane is one way through all tiers, so a flow label chooses a plane and with it the whole route (a tier that is not
 * needed is left out). What a tier's links carry in all is what its GPUs' NICs do, divided by the oversubscription of
 * the tier; all links of a tier have the same rate. Delays come from base RTTs: that of a class is twice the sum of the
 * delays of the links on the way, without the time to send a packet.
 */
#ifndef DQ_SIM_TOPOLOGY_H
#define DQ_SIM_TOPOLOGY_H

#include "sim/fabric.h"

/* cffi: begin */
enum dq_sim_path_class { DQ_SIM_HOST, DQ_SIM_RACK, DQ_SIM_ZONE, DQ_SIM_BUILDING, DQ_SIM_REGION, DQ_SIM_PATH_CLASSES };

struct dq_sim_region {
	uint32_t buildings, zones, racks, hosts, gpus; /* of each: zones of a building, and so on; all >= 1 */
	uint32_t planes;
	uint64_t nic_bps;
	double oversubscription[3];  /* [0] out of the rack, [1] out of the zone, [2] out of the building; >= 0.01 */
	uint64_t rtt_ns[5];          /* by class; that of the host is not used. Non-decreasing */
};
/* cffi: end */

struct dq_sim_topology {
	struct dq_sim_region region;
	uint32_t gpus;               /* in all */
	uint32_t gpus_rack, gpus_zone, gpus_building;
	uint32_t nic;                /* first port of each kind; indices as in port_*() of topology.c */
	uint32_t rack_down, rack_up, zone_down, zone_up, building_down, building_across;
};

/* Adds switches and ports to a fabric that has none. 0, or a negative errno with text in err. */
int dq_sim_topology_build(struct dq_sim_topology *t, const struct dq_sim_region *region, struct dq_sim_fabric *f, struct dq_error *err);
enum dq_sim_path_class dq_sim_topology_class(const struct dq_sim_topology *t, uint32_t from, uint32_t to);
/* Port of a GPU's NIC. */
static inline uint32_t dq_sim_topology_nic(const struct dq_sim_topology *t, uint32_t gpu) { return t->nic + gpu; }
/* The ports from one GPU to another of another host, by way of a plane; how many. */
uint32_t dq_sim_topology_route(const struct dq_sim_topology *t, uint32_t from, uint32_t to, uint32_t plane, uint16_t route[DQ_SIM_MAX_HOPS]);
/* Rate of the slowest link between two GPUs, one plane. */
uint64_t dq_sim_topology_rate(const struct dq_sim_topology *t, enum dq_sim_path_class c);

#endif
