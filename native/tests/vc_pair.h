/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A deterministic world for tests of the VC: hosts with memory, pairs of VC ends between them, links in virtual time. One
 * thread, no clock, no socket. It plays the owner of the VCs and the provider under them, and checks what both promise:
 *  - a control packet never arrives without a posted receive;
 *  - no byte is read from or written to memory that holds no reference, nor outside of it;
 *  - every operation completes exactly once, with the bytes that its partner sent;
 *  - every segment begins at a multiple of 128 bytes of its message; QP depth, window and grant are obeyed.
 * Across QPs nothing is ordered: a segment's data is written, its sender is told, and its receiver sees the completion at
 * three different times, and the last may be later than control messages that were sent afterwards.
 */
#ifndef DQ_TESTS_VC_PAIR_H
#define DQ_TESTS_VC_PAIR_H

#include "core/queue.h"
#include "core/vc.h"

#define VP_MAX_HOSTS 66
#define VP_MAX_ENDS 132

struct vp_link {                 /* one direction */
	uint64_t delay_ns;       /* one way */
	uint64_t jitter_ns;      /* 0..jitter more for each segment, drawn anew; each QP stays in order */
	uint64_t rate_bps;       /* of the path; 0 = infinite */
	uint64_t control_ns;     /* one way for control packets */
	uint64_t poll_ns;        /* 0..poll more until the receiver sees a completion */
};

struct vp_config {
	struct vp_link link;     /* both directions */
	struct dq_window_profile profile;
	uint32_t qps, depth, outstanding, credits;
	uint32_t active;         /* data QPs used; set by vp_pair to all */
	uint32_t control_buffers;/* for sending; 0 = as many as wanted */
	uint32_t slot_share;
	bool grants;
	uint64_t cancel_deadline_ns, stall_ns;
};

enum vp_kind { VP_SEND, VP_RECV, VP_PUT, VP_NOTIFY, VP_EXPORT, VP_UNEXPORT };

struct vp_op {
	enum vp_kind kind;
	uint32_t end, flow, host;
	uint32_t mem;            /* index in the host's memories */
	uint64_t offset, bytes, tag;
	uint32_t region;         /* EXPORT: as completed */
	uint64_t remote_offset;
	uint32_t target;         /* PUT: operation that exported its region, or DQ_NONE */
	bool done, delivered;
	int32_t status;
	uint64_t done_bytes, done_ns;
};

struct vp_mem {
	uint8_t *data;
	uint64_t bytes;
	uint32_t refs;
};

struct vp_host {
	struct dq_pools pools;
	struct dq_departure departure;
	struct dq_grants grants;
	struct dq_queue egress, ingress; /* rate 0 = infinite */
	struct vp_mem *mems;
	uint32_t mem_count;
};

enum vp_flow_state { VP_FLOW_NONE, VP_FLOW_OPENING, VP_FLOW_INCOMING, VP_FLOW_OPEN, VP_FLOW_REFUSED, VP_FLOW_GONE };

struct vp_flow {                 /* what the owner knows of a flow */
	enum vp_flow_state state;
	bool closed;             /* dq_flow_close was called */
	uint32_t client;
	uint32_t peer;           /* flow id at the peer */
	int32_t status;
};

struct vp;
struct vp_end {
	struct vp *world;
	uint32_t index, peer, host;
	struct dq_vc vc;
	struct vp_config config;
	struct vp_link link;     /* towards the peer */
	struct dq_queue path;
	uint64_t qp_last[DQ_MAX_QPS], qp_seen[DQ_MAX_QPS], control_last;
	uint32_t qp_segments[DQ_MAX_QPS];
	uint32_t control_posted; /* receives */
	uint32_t control_out;    /* send buffers in use */
	bool up;                 /* false: fenced */
	bool silent;             /* does nothing: a frozen daemon; its device still takes writes */
	int broken;              /* what the VC returned for bytes of the peer */
	struct vp_flow *flows;   /* by flow id */
	uint32_t flow_room;
	uint64_t inflight, inflight_peak;
	uint64_t completed_bytes;/* segments completed */
	uint64_t packets;
	uint64_t client_bytes[16]; /* posted by client % 16 */
};

struct vp_event;
struct vp {
	uint64_t now_ns, seq, prng;
	struct vp_event *heap;
	uint32_t heap_count, heap_room;
	struct vp_host hosts[VP_MAX_HOSTS];
	uint32_t host_count;
	struct vp_end *ends[VP_MAX_ENDS];
	uint32_t end_count;
	struct vp_op *ops;
	uint32_t op_count, op_room, op_open;
	bool manual_accept;      /* the test answers FLOW_OPENs */
	bool expect_broken;      /* a broken protocol is expected: the VC fails, the test goes on; nothing is said of memory then */
	bool may_lack_memory;    /* a VC may fail with -ENOMEM */
	bool check_content;      /* memories have bytes, which are checked; false: only references and bounds */
	uint32_t put_target;     /* for the next puts: whose memory is checked when they are notified */
	uint32_t next_mem;       /* memory for the next operations; DQ_NONE: each gets a new one */
	void (*on_done)(struct vp *w, struct vp_op *op);
	void *user;
	uint64_t slow_qp_ns;     /* QP 0 of every end takes so much longer */
	uint64_t events;
};

struct vp_config vp_config_default(void);  /* 8 QPs, 64 KiB segments, 10 us, 100 Gbit/s */
struct vp *vp_new(uint64_t seed);
void vp_free(struct vp *w);                /* fails what lives */
uint32_t vp_host(struct vp *w, uint64_t egress_bps, uint64_t ingress_bps);
/* Two ends, indices a and a + 1; returns a. */
uint32_t vp_pair(struct vp *w, uint32_t host_a, uint32_t host_b, const struct vp_config *config);

uint32_t vp_open(struct vp *w, uint32_t end, uint32_t client, uint32_t peer_client); /* flow id */
/* Open and wait for it; *peer_flow is its id at the other end. */
uint32_t vp_connect(struct vp *w, uint32_t end, uint32_t client, uint32_t peer_client, uint32_t *peer_flow);
void vp_close(struct vp *w, uint32_t end, uint32_t flow, int32_t reason);
struct vp_flow *vp_flow(struct vp *w, uint32_t end, uint32_t flow);

uint32_t vp_mem(struct vp *w, uint32_t host, uint64_t bytes);   /* index */
/* Operations: op index. Sends and puts fill their memory with a pattern that names them; every mem is new when NONE. */
uint32_t vp_send(struct vp *w, uint32_t end, uint32_t flow, uint64_t tag, uint64_t bytes);
uint32_t vp_recv(struct vp *w, uint32_t end, uint32_t flow, uint64_t tag, uint64_t bytes);
uint32_t vp_export(struct vp *w, uint32_t end, uint32_t flow, uint64_t bytes);
uint32_t vp_unexport(struct vp *w, uint32_t end, uint32_t flow, uint32_t region);
uint32_t vp_put(struct vp *w, uint32_t end, uint32_t flow, uint32_t region, uint64_t remote_offset, uint64_t bytes);
uint32_t vp_notify(struct vp *w, uint32_t end, uint32_t flow);
void vp_cancel_mem(struct vp *w, uint32_t end, uint32_t flow, uint32_t mem);

bool vp_step(struct vp *w);                       /* one event; false: none left */
void vp_run_until(struct vp *w, uint64_t ns);     /* virtual time */
void vp_settle(struct vp *w);                     /* until nothing happens any more */
void vp_kick(struct vp *w, uint32_t end);         /* dq_vc_run */
void vp_profile(struct vp *w, uint32_t end, const struct dq_window_profile *p, uint32_t outstanding, uint32_t active, bool grants);
void vp_fail(struct vp *w, uint32_t end, int32_t status); /* fences this end; the peer learns it a while later */
void vp_load(struct vp *w, uint32_t end, uint64_t bytes); /* other traffic on the path now */
void vp_control_inject(struct vp *w, uint32_t end, const void *packet, size_t bytes); /* as if the peer had sent it */
/* Every flow is closed at both ends, everything is released, all counts are back. */
void vp_close_all(struct vp *w);
void vp_check_clean(struct vp *w);
const struct vp_op *vp_done(struct vp *w, uint32_t op); /* asserts that it is done */

#endif
