/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of the VC: its objects, and what its files call of each other. Only tests include it besides.
 *
 * What can cross, and why it does no harm. A and B are the two ends. Control messages of one direction stay in order;
 * against segments, and against the other direction, nothing is ordered.
 *  DONE / segments           The receiver may handle DONE before completions of segments that were written before it. DONE
 *                            says how many bytes were written; the slot stays until they are seen (receive_done). The
 *                            same for the CANCEL of a put (put_withdrawn) and for PUT, which may come after its segments.
 *  CANCEL / DONE             The receiver's CANCEL finds nothing at the sender, or a message with another serial: its DONE is
 *                            on the way and answers. DONE / DONE of a put cannot cross: only its receiver says it.
 *  RTR / FLOW_CLOSE          The closing end ignores RTRs and forgets those it had: nothing was written for them, its
 *                            FLOW_CLOSE answers them all (also their CANCELs). Each send that had found its RTR has said
 *                            DONE before. So who hears FLOW_CLOSE frees receives without a DONE at once, and waits for
 *                            those with one.
 *  PUT / FLOW_CLOSE          A put's slot is freed by DONE alone, whoever closes. The end that hears of the close, or closes,
 *                            says DONE for each put as soon as it is complete; the flow of the putter lives until then.
 *                            PUTs that cross our FLOW_CLOSE are tracked like others: their exports are there until the
 *                            putter's FLOW_CLOSE.
 *  UNEXPORT / PUT            The putter answers after the last completion of its puts into the region, so each PUT that
 *                            names the region precedes the answer. Puts begun and stopped get a CANCEL as well.
 *  UNEXPORT, CANCEL / CLOSE  What was asked before the other end's FLOW_CLOSE came is answered by it. An end that has said
 *                            FLOW_CLOSE asks and answers nothing more on that flow but DONE and CANCEL of puts.
 *  FLOW_CLOSE / FLOW_CLOSE   Each waits for its own posted segments only, never for the other: no circle.
 *  FLOW_ACCEPT / close       An opener that closes before the answer does not know the other end's id: it withdraws by its
 *                            own, and waits for the answer, which no longer waits for the other client. If that accepted in
 *                            the same moment, a FLOW_CLOSE follows. The acceptor's first messages follow its FLOW_ACCEPT.
 *  Reuse of slots            The namer frees a slot when the message is through at both ends; its next RTR or PUT follows
 *                            on its own direction everything it said of the old one, and serials tell them apart.
 *  Reuse of flow ids         An end says nothing that names the other's flow id after its FLOW_CLOSE; the id is free after
 *                            that was heard.
 */
#ifndef DQ_CORE_VC_PRIVATE_H
#define DQ_CORE_VC_PRIVATE_H

#include "core/vc.h"

#define DQ_VC_MAX_FLOWS 16384u  /* half of the slots of a direction are the flows' own, the other half is shared by need */
#define DQ_VC_SHARED_SLOTS 16384u
#define DQ_VC_MAX_IMPORTS 65536u /* regions that one peer may export to us */
enum { DQ_DIR_RECV = 0, DQ_DIR_PUT = 1 };

enum dq_msg_kind { DQ_KIND_SEND, DQ_KIND_PUT, DQ_KIND_RECV, DQ_KIND_PUT_IN, DQ_KIND_NOTIFY };

/* A message: an outgoing one (SEND, PUT), an incoming one (RECV, PUT_IN), or a NOTIFY request. */
struct dq_msg {
	struct dq_node node;
	uint32_t flow;
	uint8_t kind;
	bool has_slot;
	bool completed;          /* its client was told */
	bool holds_mem;
	bool arrived;            /* incoming: every segment is here */
	bool done_heard;         /* the peer's DONE came */
	bool canceled;           /* receive: CANCEL was sent; put of the peer: CANCEL came; outgoing: nothing more is posted */
	bool counted;            /* outgoing: in flow->outstanding */
	bool owed;               /* in vc->awaiting */
	uint16_t slot;
	int32_t status;          /* outgoing: what its client is told at the end; receive: of the peer's DONE */
	uint64_t expect;         /* incoming, after DONE or CANCEL: bytes that the peer wrote */
	uint64_t serial;
	uint64_t request;
	uint64_t mem, offset, bytes;
	uint64_t tag;            /* or cookie */
	uint64_t remote_addr, remote_key;
	uint64_t remote_offset;
	uint32_t region;         /* id at the exporter */
	uint32_t import;         /* outgoing put: index of the import it writes into */
	uint32_t seg_bytes, seg_count, seg_next, seg_done;
};

/* A receive of the peer, announced and not matched. */
struct dq_rtr {
	struct dq_node node;
	uint32_t flow;
	uint16_t slot;
	uint64_t serial, addr, key, bytes, tag;
};

/* A region: exported here (mem is ours) or by the peer (addr, key). */
struct dq_region {
	struct dq_node node;
	uint32_t flow;
	uint32_t id;             /* export: its own index; import: the id the peer gave */
	uint32_t next_exporting;
	bool mine;               /* exported here */
	bool exporting;          /* in vc->exporting */
	bool withdrawn;          /* UNEXPORT sent (and its answer owed) or received */
	bool has_unexport;       /* a client's request waits for the answer */
	uint32_t users;          /* import: puts under way into it */
	uint64_t mem, addr, key, bytes;
	uint64_t request;
	uint64_t number;         /* control message that carried the EXPORT */
	uint64_t unexport_request;
};

struct dq_vc_seg {
	uint32_t msg;
	uint32_t bytes;
	uint64_t departure_ns;
	uint64_t wait_ns;        /* from the post to the departure */
	uint32_t qp;
};

/* Lists over a slab whose objects begin with struct dq_node. */
static inline struct dq_node *dq_node_at(const struct dq_slab *s, uint32_t i) { return dq_slab_at(s, i); }
static inline void dq_list_init(struct dq_list *l) { l->head = l->tail = DQ_NONE; }
static inline bool dq_list_empty(const struct dq_list *l) { return l->head == DQ_NONE; }
static inline void dq_list_push(const struct dq_slab *s, struct dq_list *l, uint32_t i)
{
	struct dq_node *n = dq_node_at(s, i);
	n->next = DQ_NONE;
	n->prev = l->tail;
	if (l->tail == DQ_NONE)
		l->head = i;
	else
		dq_node_at(s, l->tail)->next = i;
	l->tail = i;
}
static inline void dq_list_remove(const struct dq_slab *s, struct dq_list *l, uint32_t i)
{
	struct dq_node *n = dq_node_at(s, i);
	if (n->prev == DQ_NONE)
		l->head = n->next;
	else
		dq_node_at(s, n->prev)->next = n->next;
	if (n->next == DQ_NONE)
		l->tail = n->prev;
	else
		dq_node_at(s, n->next)->prev = n->prev;
}

static inline struct dq_msg *dq_msg_at(const struct dq_vc *vc, uint32_t i) { return dq_slab_at(&vc->pools->messages, i); }
static inline struct dq_rtr *dq_rtr_at(const struct dq_vc *vc, uint32_t i) { return dq_slab_at(&vc->pools->rtrs, i); }
static inline struct dq_region *dq_region_at(const struct dq_vc *vc, uint32_t i) { return dq_slab_at(&vc->pools->regions, i); }

/* vc.c */
int dq_vc_broken(struct dq_vc *vc, const char *fmt, ...) __attribute__((format(printf, 2, 3))); /* notes why; returns -EPROTO */
bool dq_vc_tell(struct dq_vc *vc, const struct dq_message *m, uint64_t *number); /* queue a control message; false: VC is to fail */
void dq_vc_owes(struct dq_vc *vc, uint64_t now_ns);      /* the peer owes one more answer */
void dq_vc_answered(struct dq_vc *vc, uint64_t now_ns);

/* vc_slot.c: the maps from slots to messages (DQ_NONE: nobody), and the allocator of the slots this end names */
#define DQ_OUT_IS_RTR 0x80000000u
uint32_t dq_slot_get(uint32_t *const pages[256], uint16_t slot);
bool dq_slot_set(uint32_t *pages[256], uint16_t slot, uint32_t value); /* false: no memory */
bool dq_slot_take(struct dq_vc *vc, struct dq_flow *f, int dir, uint16_t *slot);
void dq_slot_give(struct dq_vc *vc, struct dq_flow *f, int dir, uint16_t slot);
void dq_slot_want(struct dq_vc *vc, uint32_t flow, struct dq_flow *f, int dir);   /* queue the flow for a shared slot */
void dq_slot_unwant(struct dq_vc *vc, uint32_t flow, struct dq_flow *f, int dir);
void dq_slot_serve(struct dq_vc *vc);                     /* give freed shared slots to those who wait, clients in turn */

/* vc_message.c */
uint32_t dq_msg_serve(struct dq_vc *vc, uint32_t flow, int dir, uint32_t most); /* announce receives / start puts while slots are there; how many */
void dq_msg_owes(struct dq_vc *vc, struct dq_msg *m, uint64_t now_ns);     /* the peer owes something for m, see vc->awaiting */
void dq_msg_answered(struct dq_vc *vc, struct dq_msg *m, uint64_t now_ns);
void dq_msg_detach_put(struct dq_vc *vc, struct dq_msg *put);              /* an arrived put: say DONE, forget its slot */
void dq_msg_end_notifies(struct dq_vc *vc, struct dq_flow *f);             /* the peer closed: end those that no put will answer */
void dq_msg_settle(struct dq_vc *vc, uint32_t index, uint64_t now_ns);   /* outgoing: act on all posted segments being complete */
void dq_msg_stop(struct dq_vc *vc, uint32_t index, int32_t status, uint64_t now_ns); /* outgoing in ready: post no more of it */
void dq_msg_finish(struct dq_vc *vc, struct dq_msg *m, int32_t status, uint64_t bytes); /* tell its client, once */
void dq_msg_free(struct dq_vc *vc, struct dq_list *list, uint32_t index); /* off its list, memory released */
void dq_msg_drop_incoming(struct dq_vc *vc, struct dq_flow *f, struct dq_list *list, uint32_t index); /* with slot and bitmap */
void dq_msg_unqueue(struct dq_vc *vc, struct dq_flow *f, uint32_t index);  /* outgoing: out of ready */
void dq_region_free(struct dq_vc *vc, struct dq_list *list, uint32_t index);
void dq_region_drop_user(struct dq_vc *vc, struct dq_flow *f, struct dq_msg *m); /* a put into an import is over */
void dq_region_finish(struct dq_vc *vc, struct dq_region *r, int32_t status);  /* tell clients that wait for it */
void dq_region_exported(struct dq_vc *vc);               /* complete exports that the peer acknowledged */
int dq_msg_on_rtr(struct dq_vc *vc, const struct dq_message *m);
int dq_msg_on_put(struct dq_vc *vc, const struct dq_message *m, uint64_t now_ns);
int dq_msg_on_done(struct dq_vc *vc, const struct dq_message *m, uint64_t now_ns);
int dq_msg_on_cancel(struct dq_vc *vc, const struct dq_message *m, uint64_t now_ns);
int dq_msg_on_export(struct dq_vc *vc, const struct dq_message *m);
int dq_msg_on_unexport(struct dq_vc *vc, const struct dq_message *m, uint64_t now_ns);

/* vc_flow.c */
int dq_flow_on_open(struct dq_vc *vc, const struct dq_message *m);
int dq_flow_on_accept(struct dq_vc *vc, const struct dq_message *m, uint64_t now_ns);
int dq_flow_on_close(struct dq_vc *vc, const struct dq_message *m, uint64_t now_ns);
void dq_flow_advance_close(struct dq_vc *vc, uint32_t flow, uint64_t now_ns);
void dq_flow_fail(struct dq_vc *vc, uint32_t flow, int32_t status, uint64_t now_ns); /* the VC failed */
int dq_flow_usable(const struct dq_vc *vc, const struct dq_flow *f); /* may its client start something? 0 or a dq_status */
struct dq_flow *dq_flow_of_peer(struct dq_vc *vc, uint32_t flow); /* for a message: NULL unless it is of this VC and accepted */

#endif
