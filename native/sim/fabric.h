/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A fabric, packet by packet: ports with a rate and a link behind them, output-queued switches that share a buffer among
 * their ports, host ports (NICs) that ask their owner for the next packet whenever they are free to send one.
 *
 * The model.
 *  Switch    Stores a packet whole, then queues it at its output port; first in, first out, in two classes if priority is
 *            on (acknowledgements and control first), else in one. The packet takes its bytes in the buffer until its last
 *            one has left. Switching itself takes no time: it belongs to the delay of the links.
 *  Link      The port sends bytes at its rate; the last one arrives a fixed delay later.
 *  Route     A packet carries the ports that it goes through; who sends it has chosen them (ECMP is topology.h).
 *  Unbounded buffer_bytes 0: no limit, no pause; what a sender's window is worth shows as peak.
 *  Bounded   Buffers never drop: priority flow control pauses. A switch counts what came in by each link; over the dynamic
 *            threshold, alpha * (buffer - used), it pauses the port at the other end of that link, and lets it go on when
 *            the count is two full packets under the threshold, or at zero. The pause frame takes the link's delay and no
 *            time to send. What comes in after that is headroom; bytes beyond buffer_bytes are counted: a real switch
 *            would need them as reserve, or drop.
 *  Marks     A data packet that finds more than ecn_min_bytes in its queue is marked with a probability that grows to
 *            ecn_probability at ecn_max_bytes, 1 above. Marks are counted; no sender here reacts to them.
 *
 * Pure: no clock, no system call but memory. One thread. Picoseconds, bytes, bits a second.
 */
#ifndef DQ_SIM_FABRIC_H
#define DQ_SIM_FABRIC_H

#include "core/base.h"
#include "sim/events.h"

#define DQ_SIM_MAX_HOPS 8u
#define DQ_SIM_MAX_PORTS 65535u
#define DQ_SIM_HISTOGRAM 256u

/* What an event is for: its kind in the upper bits of `what`, a port or the owner's number in the lower. */
enum dq_sim_kind { DQ_SIM_SENT, DQ_SIM_ARRIVE, DQ_SIM_PAUSE, DQ_SIM_OWNER };
#define DQ_SIM_WHAT(kind, number) ((uint32_t)(kind) << 28 | (number))
#define DQ_SIM_KIND(what) ((what) >> 28)
#define DQ_SIM_NUMBER(what) ((what) & 0x0fffffffu)

enum dq_sim_class { DQ_SIM_FIRST, DQ_SIM_DATA, DQ_SIM_CLASSES };
#define DQ_SIM_LAST 1u           /* packet flag: its arrival is of interest; others vanish at the end of the last port */
#define DQ_SIM_MARKED 2u

struct dq_sim_packet {
	uint64_t queued_ps;
	uint32_t next;
	uint32_t bytes;          /* on the wire */
	uint32_t owner[2];       /* the owner's */
	uint16_t ingress;        /* port whose link it came by */
	uint16_t route[DQ_SIM_MAX_HOPS];
	uint8_t hop;             /* route[hop] is where it is */
	uint8_t hops;
	uint8_t class;           /* enum dq_sim_class */
	uint8_t flags;
	uint8_t kind;            /* the owner's */
} __attribute__((aligned(64)));
_Static_assert(sizeof(struct dq_sim_packet) == 64, "a cache line");

struct dq_sim_port {
	uint32_t head[DQ_SIM_CLASSES], tail[DQ_SIM_CLASSES]; /* packets that wait */
	uint32_t sending;        /* packet, DQ_NONE = idle */
	uint32_t sw;             /* switch it belongs to, DQ_NONE: a host */
	uint64_t bytes;          /* waiting and being sent */
	uint64_t ps_per_byte;    /* << 16 */
	uint64_t full_ps;        /* to send a full packet */
	uint64_t small_ps;
	uint64_t delay_ps;
	uint32_t lane_full, lane_small, lane_link;
	bool paused;             /* data only, when priority is on */
	bool pausing;            /* the switch behind the link has paused this port */
	uint64_t ingress_bytes;  /* in that switch, come by this link */
	/* counters */
	uint64_t peak_bytes;
	uint64_t sent_bytes;
	uint64_t sent_packets;
	uint64_t marks;
	uint64_t pauses;
	uint64_t paused_ps;
	uint64_t paused_since_ps;
	double byte_ps;          /* bytes times the time they stayed */
} __attribute__((aligned(64)));

struct dq_sim_switch {
	uint64_t bytes;
	uint64_t peak_bytes;
	uint64_t over_bytes;     /* most that it held beyond buffer_bytes */
	uint64_t pauses_sent;
	double byte_ps;
	uint32_t tier;           /* the owner's */
	uint64_t found[DQ_SIM_HISTOGRAM]; /* data packets by the bytes that they found in their queue: dq_sim_bin */
};

struct dq_sim_fabric_config {
	uint32_t full_bytes;     /* of a full packet on the wire, > 0 */
	uint32_t small_bytes;    /* of an acknowledgement on the wire, > 0 */
	uint64_t buffer_bytes;   /* of each switch; 0 = unbounded */
	double alpha;            /* of the dynamic threshold */
	uint64_t ecn_min_bytes;  /* 0 = no marks */
	uint64_t ecn_max_bytes;
	double ecn_probability;
	bool priority;           /* acknowledgements and control overtake data */
	uint64_t seed;           /* of the marks */
};

struct dq_sim_fabric_ops {
	/* The host port may send: its next packet with route, hops, bytes, class; DQ_NONE: nothing. first_only: data is paused. */
	uint32_t (*pull)(void *user, uint32_t port, bool first_only);
	/* A packet with DQ_SIM_LAST arrived behind its last port. The callee frees it or sends it again. */
	void (*deliver)(void *user, uint32_t packet);
};

struct dq_sim_fabric {
	struct dq_sim_events *events;
	struct dq_sim_port *ports;
	struct dq_sim_switch *switches;
	struct dq_sim_packet *packets;
	uint32_t port_count, port_room, switch_count, switch_room, packet_room, packet_free;
	uint32_t packets_used;
	struct dq_sim_fabric_config config;
	const struct dq_sim_fabric_ops *ops;
	void *user;
	uint64_t random;
	uint64_t bytes;          /* in all switches */
	uint64_t peak_bytes;
	uint64_t counted_ps;     /* since when counters count */
	uint64_t hops;           /* packets sent by ports, in all */
};

int dq_sim_fabric_init(struct dq_sim_fabric *f, struct dq_sim_events *events, const struct dq_sim_fabric_config *config,
		       const struct dq_sim_fabric_ops *ops, void *user); /* 0, -EINVAL */
void dq_sim_fabric_fini(struct dq_sim_fabric *f);
/* DQ_NONE: no memory, or too many. rate_bps > 0. */
uint32_t dq_sim_switch_add(struct dq_sim_fabric *f, uint32_t tier);
uint32_t dq_sim_port_add(struct dq_sim_fabric *f, uint32_t sw, uint64_t rate_bps, uint64_t delay_ps);
/* A packet, not cleared but for flags, hop and kind; DQ_NONE when there is no memory. Pointers to packets are good until the next one is made. */
uint32_t dq_sim_packet_new(struct dq_sim_fabric *f);
void dq_sim_packet_free(struct dq_sim_fabric *f, uint32_t packet);
/* A host port may have something to send. */
void dq_sim_port_kick(struct dq_sim_fabric *f, uint32_t port);
/* Carry out an event; false when it is not the fabric's. */
bool dq_sim_fabric_event(struct dq_sim_fabric *f, const struct dq_sim_event *e);
/* Begin to count anew: peaks are what there is now. */
void dq_sim_fabric_reset(struct dq_sim_fabric *f);
/* Time that a port has been paused since the reset, until now. */
uint64_t dq_sim_port_paused(const struct dq_sim_fabric *f, uint32_t port);

static inline struct dq_sim_packet *dq_sim_packet_at(const struct dq_sim_fabric *f, uint32_t packet) { return &f->packets[packet]; }
/* Bin of a number of bytes: exact in units of 64 up to 512, then eight bins an octave. */
static inline uint32_t dq_sim_bin(uint64_t bytes)
{
	uint64_t v = bytes >> 6;
	uint32_t e;

	if (v < 8)
		return (uint32_t)v;
	e = 63 - (uint32_t)__builtin_clzll(v);
	e = 8 * (e - 2) + (uint32_t)(v >> (e - 3) & 7);
	return DQ_MIN(e, DQ_SIM_HISTOGRAM - 1);
}
/* Smallest number of bytes in a bin. */
static inline uint64_t dq_sim_bin_bytes(uint32_t bin)
{
	return bin < 8 ? (uint64_t)bin << 6 : (uint64_t)(8 + bin % 8) << (bin / 8 - 1) << 6;
}

#endif
