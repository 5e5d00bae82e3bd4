/* SPDX-License-Identifier: Apache-2.0 */
/* Inside of a simulated job: hosts (host.c) and the messages that they exchange (sim.c). Only tests include it besides. */
#ifndef DQ_SIM_PRIVATE_H
#define DQ_SIM_PRIVATE_H

#include "core/map.h"
#include "core/queue.h"
#include "core/slab.h"
#include "core/vc.h"
#include "sim/sim.h"

/* What the owner's events are; their argument is an index. */
enum sim_timer { SIM_SEGMENT_IN, SIM_SEGMENT_DONE, SIM_GRANTS, SIM_START, SIM_NVLINK, SIM_RECEIVED, SIM_SAMPLE, SIM_RUN, SIM_OUTBOUND };

enum sim_packet_kind { SIM_PACKET_SEGMENT, SIM_PACKET_ACK };

struct sim_segment {             /* a work request of a QP: a segment of data, or a control packet */
	uint32_t next;           /* in its QP */
	uint32_t qp;
	uint32_t bytes;
	uint32_t id;             /* of the core's segment */
	uint32_t imm;
	uint8_t *control;        /* DQ_CONTROL_BYTES, NULL: data */
	uint64_t time_ns;        /* of the acknowledgement */
};

struct sim_qp {
	uint16_t route[DQ_SIM_MAX_HOPS];
	uint32_t end, gpu;
	uint32_t peer;           /* QP of the other end: acknowledgements come back by its route */
	uint32_t head, tail;     /* segments not wholly sent */
	uint32_t sent;           /* bytes of head */
	uint32_t next;           /* QP whose turn is after this one's */
	uint8_t hops;
	bool control;
	bool active;             /* in the ring of its NIC */
};

struct sim_end {                 /* one end of a VC */
	struct dq_vc vc;
	struct dq_sim *sim;
	uint32_t index, peer, gpu;
	uint32_t first_qp;       /* the control QP; data QPs follow */
	uint32_t control_out;    /* control packets under way */
	bool touched;            /* runs when everything of this instant has happened */
};

struct sim_ring { uint32_t head, tail; };

struct sim_gpu {
	struct dq_pools pools;
	struct dq_grants grants;
	struct dq_departure departure;
	struct dq_queue nvlink;
	struct sim_ring acks;    /* packets */
	struct sim_ring qps[DQ_SIM_CLASSES]; /* with something to send */
	uint64_t outbound_ns;    /* when the outbound budget is looked at next, DQ_NEVER */
	uint64_t split_ns;       /* when grants are split next, DQ_NEVER */
};

enum sim_flow_state { SIM_FLOW_NEW, SIM_FLOW_OPENING, SIM_FLOW_OPEN };

struct sim_flow {                /* messages from one GPU to another */
	uint32_t from, to;
	uint32_t end, peer;      /* of the sender, of the receiver */
	uint32_t id, peer_id;    /* of the flow at each */
	uint32_t head, tail;     /* messages, in order */
	uint32_t receive;        /* next to be received */
	uint32_t receives;       /* posted and not done */
	uint8_t state;
};

struct sim_message {
	struct dq_sim_message m;
	struct dq_sim_message_times times;
	uint32_t flow;           /* DQ_NONE: by NVLink */
	uint32_t next;           /* of the flow */
	uint32_t dependents, next_dependent;
};

struct dq_sim {
	struct dq_sim_config config;
	struct dq_sim_events events;
	struct dq_sim_fabric fabric;
	struct dq_sim_topology topology;
	struct sim_gpu *gpus;
	struct sim_end **ends;
	uint32_t end_count, end_room;
	struct sim_qp *qps;
	uint32_t qp_count, qp_room;
	struct dq_slab segments;
	struct dq_slab controls; /* DQ_CONTROL_BYTES each */
	struct sim_flow *flows;
	uint32_t flow_count, flow_room;
	struct dq_map pairs;     /* from << 32 | to -> flow */
	struct sim_message *messages;
	uint32_t message_count, message_room, received, sends_done;
	uint32_t flows_open;
	uint32_t payload;        /* of a full packet, or cell */
	uint32_t lane_host;
	uint64_t host_ps;
	enum { SIM_ADDING, SIM_OPENING, SIM_RUNNING, SIM_OVER } state;
	uint64_t begin_ps;       /* of the job */
	uint64_t done_ps;
	uint64_t bytes, fabric_bytes;
	uint64_t begin_hops, begin_events;
	uint64_t segments_posted, control_packets;
	uint64_t *series;        /* a row a sample: ns, bytes, then of each switch */
	uint32_t samples;
	uint64_t sample_ps;
	int failed;              /* negative errno */
	char why[200];
};

#define SIM_WHAT(timer) DQ_SIM_WHAT(DQ_SIM_OWNER, (uint32_t)(timer))

static inline uint64_t sim_now_ns(const struct dq_sim *s) { return s->events.now_ps / DQ_SIM_PS_PER_NS; }
void sim_fail(struct dq_sim *s, int rc, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* host.c */
int sim_hosts_init(struct dq_sim *s);
void sim_hosts_fini(struct dq_sim *s);
uint32_t sim_pair(struct dq_sim *s, uint32_t from, uint32_t to); /* a VC; the end at `from` (the peer is the next one), DQ_NONE */
void sim_touch(struct dq_sim *s, struct sim_end *e);            /* the same, after everything else of this instant */
void sim_kick(struct dq_sim *s, struct sim_end *e);             /* let the VC post what it can */
bool sim_host_event(struct dq_sim *s, uint32_t timer, uint32_t index);
extern const struct dq_sim_fabric_ops sim_fabric_ops;

/* sim.c: what the core tells */
void sim_on_incoming(struct dq_sim *s, struct sim_end *e, uint32_t flow, const struct dq_message *open);
void sim_on_opened(struct dq_sim *s, struct sim_end *e, uint32_t flow, int32_t status);
void sim_on_done(struct dq_sim *s, struct sim_end *e, const struct dq_done *d);

#endif
