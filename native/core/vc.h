/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One end of a virtual connection: flows, messages, slots, the sending of segments and the control protocol. Pure: no clock
 * (now_ns is an argument), no socket, no thread; what it wants done it asks of its owner through struct dq_vc_ops. The
 * engine, the tests and the simulator are such owners.
 *
 * Life of a message (send and receive):
 *   the receiver posts a receive: it gets a slot when one is free, and an RTR goes to the peer; until then it waits, in the
 *   order of its flow;
 *   the sender matches a send with the oldest RTR of its tag and puts it into the scheduler: one segment a turn on the QP
 *   with the fewest outstanding bytes, while window, grant, QP depth admit;
 *   the receiver's tracker collects segments: the receive is done when the bitmap is full;
 *   when the last segment completed, the sender is done and says DONE; the slot is free when the receiver has both.
 * A put is the same with the slot named by the sender: PUT explains it, the receiver says DONE when the notification was
 * taken by its client, and only that frees the slot.
 * A message that is aborted half-way: the DONE of a send and the CANCEL of a put say how many bytes were written. All of
 * them have completed, but the receiver may still have to see its completions: it keeps the slot until it has counted so
 * many. So nothing depends on the order of completions between QPs.
 *
 * Closing a flow: an end first stops posting, waits for what is outstanding, then says FLOW_CLOSE: "I will never write
 * again on this flow". An end that heard it releases its exports and the receives that nobody began to fill; those that
 * were begun follow as soon as all that was written is seen, and so do sends of which everything was posted: a receiver may
 * close as soon as it has what it wants. When an end has said and heard it, and no slot of the flow is
 * under way, the flow is gone. So a client that dies hurts no QP.
 *
 * Memory references: each operation holds its memory (an opaque 64-bit value of the owner) until mem_release; that may be
 * later than its completion.
 *
 * Callbacks must not call into the VC, with two exceptions: flow_incoming, and flow_opened with DQ_OK, are the last thing
 * that is done for their message, and may call anything but dq_vc_fail and dq_vc_fini.
 */
#ifndef DQ_CORE_VC_H
#define DQ_CORE_VC_H

#include "core/base.h"
#include "core/control.h"
#include "core/grant.h"
#include "core/map.h"
#include "core/sched.h"
#include "core/slab.h"
#include "core/tracker.h"
#include "core/window.h"
#include "core/wire.h"

struct dq_vc;

/* Objects of all VCs of one engine thread, so that an idle VC costs little. Their indices are the ids on the wire. */
struct dq_pools {
	struct dq_slab flows;    /* struct dq_flow */
	struct dq_slab messages; /* struct dq_msg: outgoing and incoming, waiting notify requests */
	struct dq_slab rtrs;     /* struct dq_rtr: announced by peers, not matched yet */
	struct dq_slab regions;  /* struct dq_region: exported here, or by a peer */
	uint32_t max_messages;   /* of clients here; peers' puts come on top of it */
};
/* max_messages: requests of clients that may be open at a time. What peers may add (RTRs, puts) has its own room. */
int dq_pools_init(struct dq_pools *p, uint32_t max_flows, uint32_t max_messages);
void dq_pools_fini(struct dq_pools *p);

/* One segment for the owner to post as WRITE WITH IMMEDIATE. */
struct dq_segment {
	uint32_t id;             /* for dq_vc_segment_done */
	uint32_t qp;             /* data QP, 0.. */
	uint64_t mem;            /* opaque local memory */
	uint64_t offset;
	uint64_t remote_addr;
	uint64_t remote_key;
	uint32_t bytes;
	uint32_t imm;
};

enum dq_completion_kind { DQ_DONE_SEND, DQ_DONE_RECV, DQ_DONE_PUT, DQ_DONE_NOTIFY, DQ_DONE_EXPORT, DQ_DONE_UNEXPORT };

struct dq_done {                 /* an operation of a client is complete */
	enum dq_completion_kind kind;
	int32_t status;          /* enum dq_status */
	uint32_t client;
	uint32_t flow;
	uint64_t request;
	uint64_t bytes;
	uint64_t tag;            /* RECV: tag; NOTIFY: cookie */
	uint64_t offset;         /* NOTIFY */
	uint32_t region;         /* EXPORT, NOTIFY */
};

struct dq_vc_ops {
	void (*post_segment)(void *user, struct dq_vc *vc, const struct dq_segment *s);
	void *(*control_buffer)(void *user, struct dq_vc *vc); /* DQ_CONTROL_BYTES to fill, NULL: none free now */
	void (*post_control)(void *user, struct dq_vc *vc, void *buffer, uint32_t bytes);
	void (*done)(void *user, struct dq_vc *vc, const struct dq_done *d);
	void (*mem_release)(void *user, uint64_t mem);
	/* Of [offset, offset + bytes), which the caller has found to be covered by one key when it gave the operation in. */
	void (*mem_key)(void *user, struct dq_vc *vc, uint64_t mem, uint64_t offset, uint64_t bytes, uint64_t *addr, uint64_t *key);
	/* A peer client wants a flow (state INCOMING): answer now or later with dq_vc_flow_accept or dq_vc_flow_refuse. */
	void (*flow_incoming)(void *user, struct dq_vc *vc, uint32_t flow, const struct dq_message *open);
	void (*flow_opened)(void *user, struct dq_vc *vc, uint32_t flow, int32_t status); /* answer to dq_vc_flow_open; on error the flow is gone */
	/* All released; the id is free after this call. Also for an INCOMING flow that was closed here, that its opener withdrew,
	 * or whose VC failed: nothing is to be answered then. */
	void (*flow_gone)(void *user, struct dq_vc *vc, uint32_t flow);
};

enum dq_flow_state {
	DQ_FLOW_OPENING,         /* FLOW_OPEN sent */
	DQ_FLOW_INCOMING,        /* FLOW_OPEN received, not answered */
	DQ_FLOW_OPEN,
	DQ_FLOW_FAILED,          /* VC failed: kept until its client closes it */
};

struct dq_node { uint32_t next, prev; };  /* links of a pool object; the first member of each */
struct dq_list { uint32_t head, tail; };  /* doubly linked list of pool indices */

struct dq_vc_client {            /* one client on this VC */
	struct dq_sched_client sched;
	struct dq_vc_client *next;
	uint32_t client;         /* the owner's id */
	uint32_t flows;
	uint32_t shared[2];      /* shared slots held: [0] receive, [1] put */
	struct dq_list waiting[2]; /* flows that want a shared slot */
};

struct dq_flow {
	struct dq_sched_flow sched;
	struct dq_vc *vc;        /* NULL when failed */
	struct dq_vc_client *vc_client;
	struct dq_node wait[2];  /* in vc_client->waiting */
	bool is_waiting[2];
	uint8_t state;
	bool local_closed, close_sent, peer_closed;
	bool busy;               /* being torn down: its end comes afterwards */
	int32_t close_reason;    /* told to the peer */
	int32_t peer_reason;     /* told by the peer */
	uint32_t peer_flow;
	uint32_t client;
	uint32_t outstanding;    /* messages with segments posted and not completed */
	uint32_t slots[2];       /* held: [0] receive, [1] put; one of each is the flow's own */
	uint32_t prev, next;     /* flows of the VC */
	struct dq_list ready;    /* outgoing, in the scheduler */
	struct dq_list unmatched;/* sends without an RTR */
	struct dq_list puts;     /* puts without a slot */
	struct dq_list sending;  /* fully posted or aborted; completions, or the DONE of a put, outstanding */
	struct dq_list rtrs;     /* announced by the peer, not matched */
	struct dq_list receives; /* posted, without a slot */
	struct dq_list announced;/* with a slot; also those already done that wait for the peer's DONE */
	struct dq_list incoming; /* puts of the peer under way */
	struct dq_list arrived;  /* puts of the peer complete, not taken by a NOTIFY */
	struct dq_list notifies; /* NOTIFY requests without a put */
	struct dq_list exports;  /* regions exported here */
	struct dq_list imports;  /* regions exported by the peer */
	uint64_t backlog;        /* bytes in ready */
	/* for the owner */
	uint32_t user_next, user_prev;
	uint64_t user;
};

struct dq_vc_config {
	uint32_t id;             /* the owner's */
	uint32_t qps;            /* data QPs */
	uint32_t depth;          /* segments outstanding per QP, negotiated */
	uint32_t credits;
	uint32_t segment_bytes;  /* largest, negotiated */
	uint32_t slot_share;     /* most shared slots of one client, a direction; 0 = a quarter */
	uint64_t cancel_deadline_ns;
	uint64_t stall_ns;
};

/* What held backlog back. */
enum dq_throttle { DQ_THROTTLE_WINDOW, DQ_THROTTLE_GRANT, DQ_THROTTLE_QP, DQ_THROTTLE_OUTBOUND };

struct dq_vc_counters {
	uint64_t tx_bytes, rx_bytes, tx_segments, rx_segments, tx_messages, rx_messages;
	uint64_t retransmits, control_tx, control_rx, stalls;
	uint64_t throttled_ns[4];       /* by enum dq_throttle */
	uint64_t delay_max_ns;
	uint32_t receives_waiting;
};

struct dq_vc_slots {                    /* the slots this end names, of one direction */
	uint16_t *free_ids;             /* stack */
	uint32_t free_count;
	uint32_t free_room;
	uint32_t fresh;                 /* ids from here on were never used */
	uint32_t used;
	uint32_t shared;                /* of used: beyond each flow's own */
	uint32_t waiting;               /* flows that want a shared one */
	bool freed;                     /* a shared slot came back: somebody may be waiting for it */
};

struct dq_vc {
	struct dq_vc_config config;
	const struct dq_vc_ops *ops;
	void *user;
	struct dq_pools *pools;
	struct dq_departure *departure; /* of the device */
	struct dq_grants *grants;       /* of the device */
	struct dq_outbound_member outbound; /* of departure->outbound */
	struct dq_grant_member grant_out;
	uint64_t grant_in;              /* bytes; UINT64_MAX = not limited */
	uint32_t grant_in_serial;
	bool grants_on;
	struct dq_control_channel control;
	struct dq_sched sched;
	struct dq_qps qps;
	struct dq_window window;
	struct dq_tracker tracker;
	struct dq_slab segs;
	struct dq_vc_slots slots[2];
	uint32_t *incoming_pages[256];  /* slot -> message: receives of this end, puts of the peer; pages made when used */
	struct dq_map incoming;         /* the opener's id -> flow, of flows that were opened by the peer and not yet answered */
	uint32_t *outgoing_pages[256];  /* slot -> message or RTR: puts of this end, receives of the peer */
	struct dq_vc_client *clients;
	struct dq_vc_client *serve_next[2]; /* whose turn it is for a shared slot */
	struct dq_list flow_list;
	uint32_t flow_count;
	uint32_t imports;               /* regions that the peer exported to us */
	uint32_t exporting_head, exporting_tail; /* exports waiting for the acknowledgement of their EXPORT */
	uint64_t serial;
	uint64_t backlog;               /* bytes ready to be posted */
	uint64_t backlog_told;
	uint64_t last_heard_ns;         /* anything from the peer */
	uint64_t last_progress_ns;      /* of posted segments */
	uint32_t awaiting;              /* the peer owes: answers to CANCEL, UNEXPORT, FLOW_CLOSE, a withdrawn FLOW_OPEN; segments that it said were written */
	uint64_t checked_ns;            /* last dq_vc_check */
	uint64_t waited_ns;             /* in silence, while something was owed */
	uint64_t waited_heard_ns;       /* last_heard_ns then */
	uint64_t throttle_since_ns;
	int throttle_reason;            /* -1 none */
	bool stalled;
	bool lost;                      /* no memory for a control message: cannot go on */
	int failed;                     /* enum dq_status, 0 = alive */
	char why[128];                  /* when failed: what broke */
	struct dq_vc_counters counters;
};

/* --- life --- */
int dq_vc_init(struct dq_vc *vc, const struct dq_vc_config *config, const struct dq_window_profile *profile,
	       uint32_t outstanding_per_qp, uint32_t active_qps, bool grants, struct dq_pools *pools,
	       struct dq_departure *departure, struct dq_grants *device_grants, const struct dq_vc_ops *ops, void *user);
/* Fail everything: QPs must be fenced (nothing is written or read through them any more). Completes all operations with
 * status; flows that a client has not closed stay as FAILED. After it, only dq_vc_fini; what still comes in is ignored. */
void dq_vc_fail(struct dq_vc *vc, int32_t status, uint64_t now_ns);
void dq_vc_fini(struct dq_vc *vc); /* after dq_vc_fail, or a failed dq_vc_init */
void dq_vc_profile(struct dq_vc *vc, const struct dq_window_profile *profile, uint32_t outstanding_per_qp, uint32_t active_qps,
		   bool grants);
bool dq_vc_has_room(const struct dq_vc *vc); /* for one more flow with a slot of its own in each direction */

/* --- flows. ids are indices of pools->flows --- */
/* 0 or a dq_status. open: client, listener, nonce. */
int dq_vc_flow_open(struct dq_vc *vc, uint32_t client, const struct dq_message *open, uint32_t *flow);
int dq_vc_flow_accept(struct dq_vc *vc, uint32_t flow, uint32_t client);
void dq_vc_flow_refuse(struct dq_vc *vc, uint32_t flow, int32_t status);
/* Close: every pending request completes with DQ_ERR_CANCELED now; flow_gone follows (also for a failed flow: vc NULL). */
void dq_flow_close(struct dq_pools *pools, const struct dq_vc_ops *ops, void *user, uint32_t flow, int32_t reason, uint64_t now_ns);

/* --- operations of a client; return 0, or a dq_status and nothing was taken (the owner completes it, releases mem).
 * A send or put is at most 32,768 of the largest negotiated segments long: else DQ_ERR_LIMIT --- */
struct dq_operation {
	uint32_t flow;
	uint64_t request;
	uint64_t mem, offset, bytes;
	uint64_t tag;            /* PUT: cookie */
	uint32_t region;
	uint64_t remote_offset;
};
int dq_vc_send(struct dq_vc *vc, const struct dq_operation *op, uint64_t now_ns);
int dq_vc_recv(struct dq_vc *vc, const struct dq_operation *op, uint64_t now_ns);
int dq_vc_put(struct dq_vc *vc, const struct dq_operation *op, uint64_t now_ns);
int dq_vc_notify(struct dq_vc *vc, const struct dq_operation *op, uint64_t now_ns);
int dq_vc_export(struct dq_vc *vc, const struct dq_operation *op, uint64_t now_ns);
int dq_vc_unexport(struct dq_vc *vc, const struct dq_operation *op, uint64_t now_ns);
/* Nothing of this flow may use mem any more: requests complete CANCELED, the peer is told, mem_release follows. */
void dq_vc_cancel_mem(struct dq_vc *vc, uint32_t flow, uint64_t mem, uint64_t now_ns);

/* --- what came from the provider. 0, or a negative errno: the peer broke the protocol (text in vc->why): fail the VC --- */
int dq_vc_segment_in(struct dq_vc *vc, uint32_t imm, uint32_t bytes, uint64_t now_ns);
int dq_vc_segment_done(struct dq_vc *vc, uint32_t id, uint64_t completion_ns, uint64_t now_ns);
int dq_vc_control_in(struct dq_vc *vc, const void *packet, size_t bytes, uint64_t now_ns); /* its receive is posted again by the caller */
static inline void dq_vc_control_posted(struct dq_vc *vc) { dq_control_posted(&vc->control, 1); }

/* Post what can be posted: at most `budget` segments, and control packets. true = there may be more to post right now. */
bool dq_vc_run(struct dq_vc *vc, uint32_t budget, uint64_t now_ns);
/* Deadlines: 0, or DQ_ERR_* when the VC must be failed (text in vc->why): the peer owes an answer and was silent for the
 * cancel deadline, or there is no memory for a control message. Sets *stalled once per stall. Call it often: from one call
 * to the next at most a quarter of the deadline counts, so that a pause of this whole process is not held against the peer. */
int dq_vc_check(struct dq_vc *vc, uint64_t now_ns, bool *stalled);
static inline struct dq_flow *dq_flow_at(const struct dq_pools *p, uint32_t flow) { return dq_slab_at(&p->flows, flow); }
static inline uint32_t dq_vc_outstanding(const struct dq_vc *vc) { return vc->segs.used; }

#endif
