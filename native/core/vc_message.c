/* SPDX-License-Identifier: Apache-2.0 */
/* Messages of a VC: receives and their slots, sends and puts and their way through the scheduler. */
#include <errno.h>

#include "core/vc_private.h"

/* --- telling clients, releasing ------------------------------------------------------------------------------- */

static enum dq_completion_kind done_kind(const struct dq_msg *m)
{
	switch ((enum dq_msg_kind)m->kind) {
	case DQ_KIND_SEND: return DQ_DONE_SEND;
	case DQ_KIND_PUT: return DQ_DONE_PUT;
	case DQ_KIND_RECV: return DQ_DONE_RECV;
	default: return DQ_DONE_NOTIFY;
	}
}

void dq_msg_finish(struct dq_vc *vc, struct dq_msg *m, int32_t status, uint64_t bytes)
{
	struct dq_done d;
	if (m->completed)
		return;
	m->completed = true;
	d = (struct dq_done){ .kind = done_kind(m), .status = status, .client = dq_flow_at(vc->pools, m->flow)->client,
			      .flow = m->flow, .request = m->request, .bytes = bytes, .tag = m->tag,
			      .offset = m->remote_offset, .region = m->region };
	vc->ops->done(vc->user, vc, &d);
}

void dq_msg_owes(struct dq_vc *vc, struct dq_msg *m, uint64_t now_ns)
{
	if (!m->owed) {
		m->owed = true;
		dq_vc_owes(vc, now_ns);
	}
}

void dq_msg_answered(struct dq_vc *vc, struct dq_msg *m, uint64_t now_ns)
{
	if (m->owed) {
		m->owed = false;
		dq_vc_answered(vc, now_ns);
	}
}

static void release_mem(struct dq_vc *vc, struct dq_msg *m)
{
	if (m->holds_mem) {
		m->holds_mem = false;
		vc->ops->mem_release(vc->user, m->mem);
	}
}

void dq_msg_free(struct dq_vc *vc, struct dq_list *list, uint32_t index)
{
	struct dq_msg *m = dq_msg_at(vc, index);
	release_mem(vc, m);
	dq_list_remove(&vc->pools->messages, list, index);
	dq_slab_free(&vc->pools->messages, index);
}

void dq_msg_drop_incoming(struct dq_vc *vc, struct dq_flow *f, struct dq_list *list, uint32_t index)
{
	struct dq_msg *m = dq_msg_at(vc, index);
	if (m->has_slot) {
		dq_tracker_release(&vc->tracker, m->slot);
		dq_slot_set(vc->incoming_pages, m->slot, DQ_NONE);
		if (m->kind == DQ_KIND_RECV)
			dq_slot_give(vc, f, DQ_DIR_RECV, m->slot);
	}
	dq_msg_free(vc, list, index);
}

/* A new message object at the end of list, or NULL. */
static struct dq_msg *new_msg(struct dq_vc *vc, struct dq_list *list, const struct dq_operation *op, enum dq_msg_kind kind,
			      uint32_t *index)
{
	struct dq_msg *m;
	/* Above the clients' limit there is room for what peers put, so that a client with many requests fails no VC. */
	if (kind != DQ_KIND_PUT_IN && vc->pools->messages.used >= vc->pools->max_messages)
		return NULL;
	*index = dq_slab_alloc(&vc->pools->messages);
	if (*index == DQ_NONE)
		return NULL;
	m = dq_msg_at(vc, *index);
	m->flow = op->flow;
	m->kind = (uint8_t)kind;
	m->request = op->request;
	m->mem = op->mem;
	m->offset = op->offset;
	m->bytes = op->bytes;
	m->tag = op->tag;
	m->region = op->region;
	m->remote_offset = op->remote_offset;
	m->import = DQ_NONE;
	m->expect = DQ_NEVER;
	m->holds_mem = kind == DQ_KIND_SEND || kind == DQ_KIND_PUT || kind == DQ_KIND_RECV;
	dq_list_push(&vc->pools->messages, list, *index);
	return m;
}

/* Can the segments of a message of so many bytes be numbered? Segments are at most as large as negotiated. */
static bool sendable(const struct dq_vc *vc, uint64_t bytes)
{
	return bytes <= (uint64_t)DQ_MAX_SEGMENTS * (vc->config.segment_bytes & ~(DQ_ALIGN_BYTES - 1));
}

/* What was posted of an outgoing message. */
static uint64_t written(const struct dq_msg *m)
{
	return DQ_MIN(m->bytes, (uint64_t)m->seg_next * m->seg_bytes);
}

/* --- into and out of the scheduler ---------------------------------------------------------------------------- */

static void enqueue(struct dq_vc *vc, uint32_t index, struct dq_list *from)
{
	struct dq_msg *m = dq_msg_at(vc, index);
	struct dq_flow *f = dq_flow_at(vc->pools, m->flow);
	dq_list_remove(&vc->pools->messages, from, index);
	dq_list_push(&vc->pools->messages, &f->ready, index);
	m->seg_bytes = dq_segment_bytes(m->bytes, vc->window.profile.segment_bytes);
	m->seg_count = dq_segment_count(m->bytes, m->seg_bytes);
	f->backlog += m->bytes;
	vc->backlog += m->bytes;
	dq_outbound_active(&vc->departure->outbound, &vc->outbound, true);
	dq_sched_activate(&vc->sched, &f->sched);
}

void dq_msg_unqueue(struct dq_vc *vc, struct dq_flow *f, uint32_t index)
{
	struct dq_msg *m = dq_msg_at(vc, index);
	uint64_t left = m->bytes - written(m);
	f->backlog -= left;
	vc->backlog -= left;
	dq_list_remove(&vc->pools->messages, &f->ready, index);
	dq_list_push(&vc->pools->messages, &f->sending, index);
	if (dq_list_empty(&f->ready))
		dq_sched_deactivate(&vc->sched, &f->sched);
}

void dq_msg_stop(struct dq_vc *vc, uint32_t index, int32_t status, uint64_t now_ns)
{
	struct dq_msg *m = dq_msg_at(vc, index);
	struct dq_flow *f = dq_flow_at(vc->pools, m->flow);
	m->canceled = true;
	m->status = status;
	dq_msg_finish(vc, m, status, 0);
	dq_msg_unqueue(vc, f, index);
	dq_msg_settle(vc, index, now_ns);
}

/* A slot of the flow came back. Its own goes on to its next; a shared one is given to those who wait, in turn (dq_vc_run). */
static void slot_came_back(struct dq_vc *vc, uint32_t flow, struct dq_flow *f, int dir)
{
	if (f->slots[dir] == 0)
		dq_msg_serve(vc, flow, dir, 1);
}

/* An outgoing message is over at this end: off the maps, its slot given back if this end named it. */
static void retire(struct dq_vc *vc, struct dq_flow *f, uint32_t index)
{
	struct dq_msg *m = dq_msg_at(vc, index);
	uint32_t flow = m->flow;
	bool put = m->kind == DQ_KIND_PUT;
	dq_slot_set(vc->outgoing_pages, m->slot, DQ_NONE);
	if (put)
		dq_slot_give(vc, f, DQ_DIR_PUT, m->slot);
	dq_msg_free(vc, &f->sending, index);
	if (put)
		slot_came_back(vc, flow, f, DQ_DIR_PUT);
}

/* Whatever was posted of it has completed, and nothing more will be posted. */
static bool settled(const struct dq_msg *m)
{
	return m->seg_done == m->seg_next && (m->seg_next == m->seg_count || m->canceled);
}

void dq_msg_settle(struct dq_vc *vc, uint32_t index, uint64_t now_ns)
{
	struct dq_msg *m = dq_msg_at(vc, index);
	struct dq_flow *f = dq_flow_at(vc->pools, m->flow);
	uint32_t flow = m->flow;

	if (!settled(m))
		return;
	if (m->counted) {
		m->counted = false;
		f->outstanding--;
	}
	if (!m->completed)
		vc->counters.tx_messages++;
	dq_msg_finish(vc, m, DQ_OK, m->bytes); /* a canceled one has been finished before */
	release_mem(vc, m);
	if (m->kind == DQ_KIND_SEND) {
		/* A receive that ends half-filled because this end closes is told what the flow's end will be. */
		int32_t status = !m->canceled ? DQ_OK : f->local_closed ? f->close_reason : m->status;
		dq_vc_tell(vc, &(struct dq_message){ .type = DQ_MSG_DONE, .slot = m->slot, .serial = m->serial, .status = status,
						     .length = written(m) }, NULL);
		retire(vc, f, index);
	} else {
		dq_region_drop_user(vc, f, m);
		if (m->done_heard) {
			retire(vc, f, index);
		} else if (m->canceled) {
			/* The peer knows this put and may hold half of it. Its DONE, when it has seen that half, frees the slot. */
			dq_vc_tell(vc, &(struct dq_message){ .type = DQ_MSG_CANCEL, .slot = m->slot, .serial = m->serial,
							     .length = written(m) }, NULL);
			dq_msg_owes(vc, m, now_ns);
		}
	}
	dq_flow_advance_close(vc, flow, now_ns);
}

/* --- send ----------------------------------------------------------------------------------------------------- */

/* The send and the receive found each other; `from` is the list the send is on. Takes the RTR's object. */
static void match(struct dq_vc *vc, uint32_t index, struct dq_list *from, uint32_t rtr_index)
{
	struct dq_msg *m = dq_msg_at(vc, index);
	struct dq_flow *f = dq_flow_at(vc->pools, m->flow);
	struct dq_rtr *r = dq_rtr_at(vc, rtr_index);
	uint64_t room = r->bytes;

	m->has_slot = true;
	m->slot = r->slot;
	m->serial = r->serial;
	m->remote_addr = r->addr;
	m->remote_key = r->key;
	dq_list_remove(&vc->pools->rtrs, &f->rtrs, rtr_index);
	dq_slab_free(&vc->pools->rtrs, rtr_index);
	dq_slot_set(vc->outgoing_pages, m->slot, index); /* its page exists: the RTR was there */
	if (m->bytes > room) {
		dq_vc_tell(vc, &(struct dq_message){ .type = DQ_MSG_DONE, .slot = m->slot, .serial = m->serial, .status = DQ_ERR_TOO_LONG }, NULL);
		dq_slot_set(vc->outgoing_pages, m->slot, DQ_NONE);
		dq_msg_finish(vc, m, DQ_ERR_TOO_LONG, 0);
		dq_msg_free(vc, from, index);
		return;
	}
	enqueue(vc, index, from);
}

int dq_vc_send(struct dq_vc *vc, const struct dq_operation *op, uint64_t now_ns)
{
	struct dq_flow *f = dq_flow_at(vc->pools, op->flow);
	uint32_t index;
	int rc = dq_flow_usable(vc, f);
	(void)now_ns;
	if (rc)
		return rc;
	if (!sendable(vc, op->bytes))
		return DQ_ERR_LIMIT;
	if (!new_msg(vc, &f->unmatched, op, DQ_KIND_SEND, &index))
		return DQ_ERR_NOMEM;
	for (uint32_t r = f->rtrs.head; r != DQ_NONE; r = dq_rtr_at(vc, r)->node.next) {
		if (dq_rtr_at(vc, r)->tag == op->tag) {
			match(vc, index, &f->unmatched, r);
			break;
		}
	}
	return 0;
}

int dq_msg_on_rtr(struct dq_vc *vc, const struct dq_message *m)
{
	struct dq_flow *f = dq_flow_of_peer(vc, m->flow);
	struct dq_rtr *r;
	uint32_t index;

	if (!f || f->peer_closed)
		return dq_vc_broken(vc, "RTR names flow %u, which is not open", m->flow);
	if (m->slot >= DQ_SLOT_PUT_BASE || dq_slot_get(vc->outgoing_pages, m->slot) != DQ_NONE)
		return dq_vc_broken(vc, "RTR names slot %u, which is %s", m->slot,
				    m->slot >= DQ_SLOT_PUT_BASE ? "one of the sender's" : "in use");
	if (f->local_closed)
		return 0; /* crossed our close; the FLOW_CLOSE answers it */
	index = dq_slab_alloc(&vc->pools->rtrs);
	if (index == DQ_NONE || !dq_slot_set(vc->outgoing_pages, m->slot, index | DQ_OUT_IS_RTR)) {
		dq_slab_free(&vc->pools->rtrs, index);
		return -ENOMEM;
	}
	r = dq_rtr_at(vc, index);
	*r = (struct dq_rtr){ .flow = m->flow, .slot = m->slot, .serial = m->serial, .addr = m->addr, .key = m->keys[0],
			      .bytes = m->length, .tag = m->tag };
	dq_list_push(&vc->pools->rtrs, &f->rtrs, index);
	for (uint32_t i = f->unmatched.head; i != DQ_NONE; i = dq_msg_at(vc, i)->node.next) {
		if (dq_msg_at(vc, i)->tag == m->tag) {
			match(vc, i, &f->unmatched, index);
			break;
		}
	}
	return 0;
}

/* --- receive -------------------------------------------------------------------------------------------------- */

static bool announce(struct dq_vc *vc, struct dq_flow *f, uint32_t index, uint16_t slot)
{
	struct dq_msg *m = dq_msg_at(vc, index);
	struct dq_message rtr = { .type = DQ_MSG_RTR, .flow = f->peer_flow, .slot = slot, .length = m->bytes, .tag = m->tag, .nkeys = 1 };

	if (!dq_slot_set(vc->incoming_pages, slot, index) || dq_tracker_arm(&vc->tracker, slot)) {
		dq_slot_set(vc->incoming_pages, slot, DQ_NONE);
		dq_slot_give(vc, f, DQ_DIR_RECV, slot);
		vc->lost = true;
		return false;
	}
	m->has_slot = true;
	m->slot = slot;
	m->serial = rtr.serial = ++vc->serial;
	vc->ops->mem_key(vc->user, vc, m->mem, m->offset, m->bytes, &rtr.addr, &rtr.keys[0]);
	dq_list_remove(&vc->pools->messages, &f->receives, index);
	dq_list_push(&vc->pools->messages, &f->announced, index);
	vc->counters.receives_waiting--;
	dq_vc_tell(vc, &rtr, NULL);
	return true;
}

/* A put gets its slot: PUT goes to the peer, the data into the scheduler. */
static bool start_put(struct dq_vc *vc, struct dq_flow *f, uint32_t index, uint16_t slot)
{
	struct dq_msg *m = dq_msg_at(vc, index);
	if (!dq_slot_set(vc->outgoing_pages, slot, index)) {
		dq_slot_give(vc, f, DQ_DIR_PUT, slot);
		vc->lost = true;
		return false;
	}
	m->has_slot = true;
	m->slot = slot;
	m->serial = ++vc->serial;
	dq_vc_tell(vc, &(struct dq_message){ .type = DQ_MSG_PUT, .flow = f->peer_flow, .slot = slot, .serial = m->serial, .cookie = m->tag,
					     .length = m->bytes, .region = m->region, .offset = m->remote_offset }, NULL);
	enqueue(vc, index, &f->puts);
	return true;
}

uint32_t dq_msg_serve(struct dq_vc *vc, uint32_t flow, int dir, uint32_t most)
{
	struct dq_flow *f = dq_flow_at(vc->pools, flow);
	struct dq_list *list;
	uint32_t served = 0;
	if (!f || f->state != DQ_FLOW_OPEN || f->local_closed || f->peer_closed || vc->failed || vc->lost)
		return 0;
	list = dir == DQ_DIR_RECV ? &f->receives : &f->puts;
	while (!dq_list_empty(list) && served < most) {
		uint16_t slot;
		if (!dq_slot_take(vc, f, dir, &slot))
			break;
		if (!(dir == DQ_DIR_RECV ? announce(vc, f, list->head, slot) : start_put(vc, f, list->head, slot)))
			break;
		served++;
	}
	if (dq_list_empty(list))
		dq_slot_unwant(vc, flow, f, dir);
	else
		dq_slot_want(vc, flow, f, dir);
	return served;
}

int dq_vc_recv(struct dq_vc *vc, const struct dq_operation *op, uint64_t now_ns)
{
	struct dq_flow *f = dq_flow_at(vc->pools, op->flow);
	uint32_t index;
	int rc = dq_flow_usable(vc, f);
	(void)now_ns;
	if (rc)
		return rc;
	if (!new_msg(vc, &f->receives, op, DQ_KIND_RECV, &index))
		return DQ_ERR_NOMEM;
	vc->counters.receives_waiting++;
	if (!f->is_waiting[DQ_DIR_RECV]) /* else others of this flow are before it */
		dq_msg_serve(vc, op->flow, DQ_DIR_RECV, UINT32_MAX);
	return 0;
}

/* --- put ------------------------------------------------------------------------------------------------------ */

int dq_vc_put(struct dq_vc *vc, const struct dq_operation *op, uint64_t now_ns)
{
	struct dq_flow *f = dq_flow_at(vc->pools, op->flow);
	struct dq_region *r = NULL;
	struct dq_msg *m;
	uint32_t index, import;
	int rc = dq_flow_usable(vc, f);
	(void)now_ns;
	if (rc)
		return rc;
	if (!sendable(vc, op->bytes))
		return DQ_ERR_LIMIT;
	for (import = f->imports.head; import != DQ_NONE; import = r->node.next) {
		r = dq_region_at(vc, import);
		if (r->id == op->region)
			break;
	}
	if (import == DQ_NONE || r->withdrawn || op->remote_offset > r->bytes || op->bytes > r->bytes - op->remote_offset)
		return DQ_ERR_REGION;
	m = new_msg(vc, &f->puts, op, DQ_KIND_PUT, &index);
	if (!m)
		return DQ_ERR_NOMEM;
	m->import = import;
	m->remote_addr = r->addr + op->remote_offset;
	m->remote_key = r->key;
	r->users++;
	if (!f->is_waiting[DQ_DIR_PUT])
		dq_msg_serve(vc, op->flow, DQ_DIR_PUT, UINT32_MAX);
	return 0;
}

void dq_msg_detach_put(struct dq_vc *vc, struct dq_msg *put)
{
	if (!put->has_slot)
		return;
	dq_vc_tell(vc, &(struct dq_message){ .type = DQ_MSG_DONE, .slot = put->slot, .serial = put->serial }, NULL);
	dq_tracker_release(&vc->tracker, put->slot);
	dq_slot_set(vc->incoming_pages, put->slot, DQ_NONE);
	put->has_slot = false;
}

/* The put is complete here and a NOTIFY is there: tell the client, tell the peer, forget it. */
static void notify(struct dq_vc *vc, struct dq_flow *f, uint32_t put_index, uint32_t request_index)
{
	struct dq_msg *put = dq_msg_at(vc, put_index), *n = dq_msg_at(vc, request_index);
	n->tag = put->tag;
	n->region = put->region;
	n->remote_offset = put->remote_offset;
	dq_msg_finish(vc, n, DQ_OK, put->bytes);
	dq_msg_free(vc, &f->notifies, request_index);
	dq_msg_detach_put(vc, put);
	dq_msg_drop_incoming(vc, f, &f->arrived, put_index);
}

/* Will a put still arrive on this flow? */
static bool put_is_coming(const struct dq_vc *vc, const struct dq_flow *f)
{
	for (uint32_t i = f->incoming.head; i != DQ_NONE; i = dq_msg_at(vc, i)->node.next)
		if (!dq_msg_at(vc, i)->canceled)
			return true;
	return false;
}

void dq_msg_end_notifies(struct dq_vc *vc, struct dq_flow *f)
{
	if (!f->peer_closed || dq_list_empty(&f->notifies) || put_is_coming(vc, f))
		return;
	while (!dq_list_empty(&f->notifies)) {
		dq_msg_finish(vc, dq_msg_at(vc, f->notifies.head), f->peer_reason, 0);
		dq_msg_free(vc, &f->notifies, f->notifies.head);
	}
}

/* All bytes of a put are here. */
static int put_complete(struct dq_vc *vc, uint32_t index, uint64_t now_ns)
{
	struct dq_msg *m = dq_msg_at(vc, index);
	struct dq_flow *f = dq_flow_at(vc->pools, m->flow);
	uint64_t got = dq_tracker_bytes(&vc->tracker, m->slot);
	uint32_t flow = m->flow;
	if (got != m->bytes || m->canceled)
		return dq_vc_broken(vc, "put in slot %u is complete with %llu bytes, %s %llu", m->slot, (unsigned long long)got,
				    m->canceled ? "CANCEL said" : "PUT said",
				    (unsigned long long)(m->canceled ? m->expect : m->bytes));
	m->arrived = true;
	dq_msg_answered(vc, m, now_ns);
	vc->counters.rx_messages++;
	dq_list_remove(&vc->pools->messages, &f->incoming, index);
	dq_list_push(&vc->pools->messages, &f->arrived, index);
	if (f->local_closed) { /* nobody will take it */
		dq_msg_detach_put(vc, m);
		dq_msg_drop_incoming(vc, f, &f->arrived, index);
	} else if (!dq_list_empty(&f->notifies)) {
		notify(vc, f, index, f->notifies.head);
	} else if (f->peer_closed) {
		dq_msg_detach_put(vc, m);
	}
	dq_msg_end_notifies(vc, f);
	dq_flow_advance_close(vc, flow, now_ns);
	return 0;
}

/* A put that the peer withdrew half-way goes when all that was written of it is here. */
static int put_withdrawn(struct dq_vc *vc, uint32_t index, uint64_t now_ns)
{
	struct dq_msg *m = dq_msg_at(vc, index);
	struct dq_flow *f = dq_flow_at(vc->pools, m->flow);
	uint64_t got = dq_tracker_bytes(&vc->tracker, m->slot);
	uint32_t flow = m->flow;
	if (got > m->expect)
		return dq_vc_broken(vc, "put in slot %u has %llu bytes, CANCEL said %llu", m->slot, (unsigned long long)got,
				    (unsigned long long)m->expect);
	if (got < m->expect) {
		dq_msg_owes(vc, m, now_ns);
		return 0;
	}
	dq_msg_answered(vc, m, now_ns);
	dq_msg_detach_put(vc, m);
	dq_msg_drop_incoming(vc, f, &f->incoming, index);
	dq_msg_end_notifies(vc, f);
	dq_flow_advance_close(vc, flow, now_ns);
	return 0;
}

int dq_vc_notify(struct dq_vc *vc, const struct dq_operation *op, uint64_t now_ns)
{
	struct dq_flow *f = dq_flow_at(vc->pools, op->flow);
	uint32_t index;
	int rc = dq_flow_usable(vc, f);
	(void)now_ns;
	/* Puts that were complete when the peer closed are still told. */
	if (rc && !(f && f->vc == vc && f->state == DQ_FLOW_OPEN && !f->local_closed && (!dq_list_empty(&f->arrived) || put_is_coming(vc, f))))
		return rc;
	if (!new_msg(vc, &f->notifies, op, DQ_KIND_NOTIFY, &index))
		return DQ_ERR_NOMEM;
	if (!dq_list_empty(&f->arrived))
		notify(vc, f, f->arrived.head, f->notifies.head);
	return 0;
}

int dq_msg_on_put(struct dq_vc *vc, const struct dq_message *m, uint64_t now_ns)
{
	struct dq_flow *f = dq_flow_of_peer(vc, m->flow);
	struct dq_region *r = NULL;
	struct dq_msg *put;
	uint32_t index;
	struct dq_operation op = { .flow = m->flow, .bytes = m->length, .tag = m->cookie, .region = m->region, .remote_offset = m->offset };

	if (!f || f->peer_closed)
		return dq_vc_broken(vc, "PUT names flow %u, which is not open", m->flow);
	if (m->slot < DQ_SLOT_PUT_BASE || dq_slot_get(vc->incoming_pages, m->slot) != DQ_NONE)
		return dq_vc_broken(vc, "PUT names slot %u, which is %s", m->slot,
				    m->slot < DQ_SLOT_PUT_BASE ? "one of the receiver's" : "in use");
	r = dq_region_at(vc, m->region);
	if (!r || !r->mine || r->flow != m->flow)
		return dq_vc_broken(vc, "PUT names region %u, which was not exported on flow %u", m->region, m->flow);
	if (m->offset > r->bytes || m->length > r->bytes - m->offset)
		return dq_vc_broken(vc, "PUT of %llu bytes at %llu does not fit into region %u of %llu bytes", (unsigned long long)m->length,
				    (unsigned long long)m->offset, m->region, (unsigned long long)r->bytes);
	put = new_msg(vc, &f->incoming, &op, DQ_KIND_PUT_IN, &index);
	if (!put)
		return -ENOMEM;
	put->completed = true; /* nobody asked for it: only a NOTIFY request is told */
	put->has_slot = true;
	put->slot = m->slot;
	put->serial = m->serial;
	if (!dq_slot_set(vc->incoming_pages, m->slot, index))
		return -ENOMEM;
	if (dq_tracker_bytes(&vc->tracker, m->slot) > m->length)
		return dq_vc_broken(vc, "more than the %llu bytes of slot %u were sent", (unsigned long long)m->length, m->slot);
	return dq_tracker_complete(&vc->tracker, m->slot) ? put_complete(vc, index, now_ns) : 0;
}

/* --- segments of the peer ------------------------------------------------------------------------------------- */

/* A receive after the peer's DONE: it goes when everything that was written is seen here. */
static int receive_done(struct dq_vc *vc, uint32_t index, uint64_t now_ns)
{
	struct dq_msg *r = dq_msg_at(vc, index);
	struct dq_flow *f = dq_flow_at(vc->pools, r->flow);
	uint64_t got = dq_tracker_bytes(&vc->tracker, r->slot);
	uint32_t flow = r->flow;

	if (got > r->expect || (r->arrived && (r->status != DQ_OK || got != r->expect)))
		return dq_vc_broken(vc, "slot %u has %llu bytes, DONE said %llu", r->slot, (unsigned long long)got,
				    (unsigned long long)r->expect);
	if (r->status == DQ_OK ? !r->arrived : got < r->expect) {
		dq_msg_owes(vc, r, now_ns);
		return 0;
	}
	dq_msg_answered(vc, r, now_ns);
	dq_msg_drop_incoming(vc, f, &f->announced, index);
	slot_came_back(vc, flow, f, DQ_DIR_RECV);
	dq_flow_advance_close(vc, flow, now_ns);
	return 0;
}

int dq_vc_segment_in(struct dq_vc *vc, uint32_t imm, uint32_t bytes, uint64_t now_ns)
{
	uint16_t slot = dq_imm_slot(imm);
	uint32_t index = dq_slot_get(vc->incoming_pages, slot);
	struct dq_msg *m;
	enum dq_track t;

	if (vc->failed)
		return 0;
	vc->last_heard_ns = now_ns;
	vc->counters.rx_segments++;
	vc->counters.rx_bytes += bytes;
	if (vc->grants_on)
		dq_grants_bytes(vc->grants, &vc->grant_out, bytes, now_ns);
	t = dq_tracker_segment(&vc->tracker, slot, dq_imm_index(imm), dq_imm_last(imm), bytes);
	switch (t) {
	case DQ_TRACK_NEW:
	case DQ_TRACK_COMPLETE:
		break;
	case DQ_TRACK_DUPLICATE:
		return 0;
	case DQ_TRACK_UNARMED:
		return dq_vc_broken(vc, "segment for slot %u, which was not announced", slot);
	case DQ_TRACK_CONFLICT:
		return dq_vc_broken(vc, "segment %u of slot %u contradicts its last segment", dq_imm_index(imm), slot);
	case DQ_TRACK_NOMEM:
		dq_vc_broken(vc, "no memory for the bitmap of slot %u", slot);
		return -ENOMEM;
	}
	if (index == DQ_NONE)
		return 0; /* a put whose PUT is still under way on the control QP */
	m = dq_msg_at(vc, index);
	if (dq_tracker_bytes(&vc->tracker, slot) > m->bytes)
		return dq_vc_broken(vc, "more than the %llu bytes of slot %u were sent", (unsigned long long)m->bytes, slot);
	if (m->kind == DQ_KIND_PUT_IN) {
		if (t == DQ_TRACK_COMPLETE)
			return put_complete(vc, index, now_ns);
		return m->canceled ? put_withdrawn(vc, index, now_ns) : 0;
	}
	if (t == DQ_TRACK_COMPLETE) {
		m->arrived = true;
		if (!m->completed)
			vc->counters.rx_messages++;
		dq_msg_finish(vc, m, DQ_OK, dq_tracker_bytes(&vc->tracker, slot));
	}
	return m->done_heard ? receive_done(vc, index, now_ns) : 0;
}

/* --- DONE, CANCEL --------------------------------------------------------------------------------------------- */

static int done_of_receive(struct dq_vc *vc, const struct dq_message *m, uint64_t now_ns)
{
	uint32_t index = dq_slot_get(vc->incoming_pages, m->slot);
	struct dq_msg *r = index == DQ_NONE ? NULL : dq_msg_at(vc, index);

	if (!r || r->serial != m->serial || r->done_heard)
		return dq_vc_broken(vc, "DONE for slot %u, serial %llu, which is not outstanding", m->slot, (unsigned long long)m->serial);
	if (m->length > r->bytes)
		return dq_vc_broken(vc, "DONE says that %llu bytes were written into the %llu of slot %u", (unsigned long long)m->length,
				    (unsigned long long)r->bytes, m->slot);
	r->done_heard = true;
	r->expect = m->length;
	r->status = m->status == DQ_OK || (m->status < 0 && m->status >= DQ_ERR_INTERNAL) ? m->status : DQ_ERR_INTERNAL;
	if (r->status != DQ_OK)
		dq_msg_finish(vc, r, r->status, 0);
	return receive_done(vc, index, now_ns);
}

static int done_of_put(struct dq_vc *vc, const struct dq_message *m, uint64_t now_ns)
{
	uint32_t index = dq_slot_get(vc->outgoing_pages, m->slot), flow;
	struct dq_msg *put = index == DQ_NONE ? NULL : dq_msg_at(vc, index);

	if (!put || put->serial != m->serial || put->done_heard)
		return dq_vc_broken(vc, "DONE for slot %u, serial %llu, which is not outstanding", m->slot, (unsigned long long)m->serial);
	if (put->seg_next != put->seg_count && !put->owed)
		return dq_vc_broken(vc, "DONE for slot %u before all of it was sent", m->slot);
	put->done_heard = true;
	dq_msg_answered(vc, put, now_ns); /* if it was canceled */
	if (!settled(put))
		return 0; /* its last completions are still in our queue */
	flow = put->flow;
	retire(vc, dq_flow_at(vc->pools, flow), index);
	dq_flow_advance_close(vc, flow, now_ns);
	return 0;
}

int dq_msg_on_done(struct dq_vc *vc, const struct dq_message *m, uint64_t now_ns)
{
	return m->slot < DQ_SLOT_PUT_BASE ? done_of_receive(vc, m, now_ns) : done_of_put(vc, m, now_ns);
}

/* The sender withdraws a put. It was not written whole, so it cannot be done here. */
static int cancel_of_put(struct dq_vc *vc, const struct dq_message *m, uint64_t now_ns)
{
	uint32_t index = dq_slot_get(vc->incoming_pages, m->slot);
	struct dq_msg *put = index == DQ_NONE ? NULL : dq_msg_at(vc, index);

	if (!put || put->serial != m->serial || put->arrived || put->canceled || m->length > put->bytes)
		return dq_vc_broken(vc, "CANCEL for slot %u, serial %llu after %llu bytes, which is not outstanding", m->slot,
				    (unsigned long long)m->serial, (unsigned long long)m->length);
	put->canceled = true;
	put->expect = m->length;
	return put_withdrawn(vc, index, now_ns);
}

/* The receiver withdraws a receive. What was finished before is answered already: then there is nothing to do. */
static int cancel_of_receive(struct dq_vc *vc, const struct dq_message *m, uint64_t now_ns)
{
	uint32_t index = dq_slot_get(vc->outgoing_pages, m->slot);
	struct dq_msg *send;

	if (index == DQ_NONE)
		return 0; /* done, or its flow was closed here: DONE or FLOW_CLOSE is on its way */
	if (index & DQ_OUT_IS_RTR) {
		struct dq_rtr *r = dq_rtr_at(vc, index & ~DQ_OUT_IS_RTR);
		struct dq_flow *f = dq_flow_at(vc->pools, r->flow);
		if (r->serial != m->serial)
			return 0;
		dq_list_remove(&vc->pools->rtrs, &f->rtrs, index & ~DQ_OUT_IS_RTR);
		dq_slab_free(&vc->pools->rtrs, index & ~DQ_OUT_IS_RTR);
		dq_slot_set(vc->outgoing_pages, m->slot, DQ_NONE);
		dq_vc_tell(vc, &(struct dq_message){ .type = DQ_MSG_DONE, .slot = m->slot, .serial = m->serial,
						     .status = DQ_ERR_CANCELED }, NULL);
		return 0;
	}
	send = dq_msg_at(vc, index);
	if (send->serial == m->serial && !send->canceled && send->seg_next != send->seg_count)
		dq_msg_stop(vc, index, DQ_ERR_CANCELED, now_ns);
	return 0; /* else all of it is posted, or it was stopped before: its own DONE answers */
}

int dq_msg_on_cancel(struct dq_vc *vc, const struct dq_message *m, uint64_t now_ns)
{
	return m->slot < DQ_SLOT_PUT_BASE ? cancel_of_receive(vc, m, now_ns) : cancel_of_put(vc, m, now_ns);
}
