/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A simulated job: GPUs of a region that send messages to each other through the core's VCs over a simulated fabric, in
 * virtual time. The core (VC, scheduler, window, grants, tracker, control messages in the wire format) is the daemon's, and
 * runs unchanged; this is only its owner, as the engine is elsewhere.
 *
 * The model of a host.
 *  GPU       One NIC with its own VCs, grants and departure model. A pair of GPUs of different hosts that exchange messages
 *            has one VC, and a flow for each direction. GPUs of one host have a link of their own (NVLink), first in, first
 *            out for each sender.
 *  Message   A send here and a receive there, as a collective library posts them. Receives are posted ahead, so many a flow.
 *            A send is posted at its time, or when the message that it depends on has arrived, whichever is later.
 *  NIC       Sends acknowledgements first; then packets of its QPs in turn, one packet a turn. With priority, control QPs go
 *            before data. Segments are cut into packets of the MTU (or a cell of several, which is coarser and faster).
 *  RC        The receiver's NIC acknowledges each segment and control message when its last packet is there. Nothing is lost.
 *  ECMP      Each QP of each end has a flow label, hashed to a plane by the seed, or spread evenly over the planes.
 *  Software  A completion is handled host_ns after it happened; news of grants are told at most once in that time.
 *
 * The job begins when all flows are open and the fabric is empty; counters begin then too.
 * Pure: no clock, no system call but memory. One thread. Deterministic: the same configuration gives the same run.
 * Errors: negative errno with a text.
 */
#ifndef DQ_SIM_SIM_H
#define DQ_SIM_SIM_H

#include "sim/topology.h"

/* cffi: begin */
typedef struct dq_sim dq_sim;

struct dq_sim_text {
	char text[252];
};

/* Of the VCs of a path class; as the profile rule computes it. */
struct dq_sim_profile {
	uint64_t window_bytes;   /* UINT64_MAX: no limit */
	uint64_t floor_bytes;
	uint64_t rtt_ns;
	uint64_t rate_bps;
	uint32_t segment_bytes;
	uint32_t qps;
	uint32_t outstanding;    /* segments a QP */
	uint8_t adapt;
};

struct dq_sim_config {
	struct dq_sim_region region;
	struct dq_sim_profile profiles[5]; /* by class; that of the host is not used */
	uint32_t mtu_bytes;      /* payload of a packet */
	uint32_t header_bytes;   /* what a packet has besides, on the wire */
	uint32_t ack_bytes;      /* on the wire */
	uint32_t cell_packets;   /* packets that are sent as one; 1 = exact */
	uint64_t buffer_bytes;   /* of a switch; 0 = unbounded, no pause */
	double alpha;
	uint64_t ecn_min_bytes;  /* 0 = no marks */
	uint64_t ecn_max_bytes;
	double ecn_probability;
	uint64_t nvlink_bps;
	uint64_t nvlink_ns;
	uint64_t host_ns;
	uint64_t sample_ns;      /* of the series; doubled as often as it gets too long; 0 = none */
	uint64_t seed;
	uint32_t receives_ahead; /* a flow, >= 1 */
	uint32_t queue_depth;    /* segments that a QP can hold */
	uint32_t credits;        /* control receives of a VC */
	uint8_t grants;
	uint8_t priority;        /* acknowledgements and control in a class of their own */
	uint8_t spread_labels;   /* QPs over planes evenly, not by hash */
};

struct dq_sim_message {
	uint64_t bytes;
	uint64_t start_ns;       /* of the job */
	uint32_t from, to;       /* GPUs */
	uint32_t after;          /* earlier message that must have come in at `from`; UINT32_MAX = none */
	uint32_t reserved;
};

struct dq_sim_message_times {    /* ns of the job; UINT64_MAX: not yet */
	uint64_t posted_ns;
	uint64_t received_ns;
};

struct dq_sim_totals {
	uint64_t now_ns;         /* of the job */
	uint64_t done_ns;        /* when the last message came in so far */
	uint64_t messages, received;
	uint64_t bytes;          /* received */
	uint64_t fabric_bytes;   /* of them not by NVLink */
	uint64_t peak_bytes;     /* in all switches together */
	uint64_t packet_hops, events;
	uint64_t segments, control_packets;
	uint64_t shrinks;        /* of windows */
	uint64_t window_ns, grant_ns, depth_ns, outbound_ns; /* time that VCs with backlog were held back, by what */
	uint32_t switches, ports, vcs, samples;
};

struct dq_sim_switch_stats {
	uint32_t tier;           /* 0 rack, 1 zone, 2 building */
	uint32_t reserved;
	uint64_t peak_bytes;
	double mean_bytes;       /* over the time of the job so far */
	uint64_t over_bytes;     /* most beyond the buffer */
	uint64_t pauses;         /* sent */
};

struct dq_sim_port_stats {
	uint32_t sw;             /* UINT32_MAX: a NIC */
	uint32_t reserved;
	uint64_t peak_bytes, sent_bytes, sent_packets, marks, pauses, paused_ns;
	double mean_bytes;
};

int dq_sim_create(const struct dq_sim_config *config, dq_sim **out, struct dq_sim_text *err);
void dq_sim_destroy(dq_sim *s);
/* Before the first dq_sim_run. `after` counts from the first message ever added. */
int dq_sim_add(dq_sim *s, const struct dq_sim_message *messages, uint32_t count, struct dq_sim_text *err);
/* Carry out up to so many events. 1: there are more; 0: every message has come in and the fabric is empty; negative: it broke. */
int dq_sim_run(dq_sim *s, uint64_t events, struct dq_sim_text *err);
void dq_sim_get_totals(const dq_sim *s, struct dq_sim_totals *out);
void dq_sim_get_times(const dq_sim *s, struct dq_sim_message_times *out); /* room for all messages; likewise below */
void dq_sim_get_switches(const dq_sim *s, struct dq_sim_switch_stats *out);
void dq_sim_get_ports(const dq_sim *s, struct dq_sim_port_stats *out);
/* Data packets of a switch's tier by the bytes that they found in their queue; 256 bins; the lower bound of each in bounds. */
void dq_sim_get_found(const dq_sim *s, uint32_t tier, uint64_t counts[256], uint64_t bounds[256]);
/* The series: times, bytes in all switches, and in each switch (samples x switches; may be NULL). */
void dq_sim_get_series(const dq_sim *s, uint64_t *ns, uint64_t *bytes, uint64_t *of_switch);
/* cffi: end */

#endif
