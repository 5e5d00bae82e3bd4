/* SPDX-License-Identifier: Apache-2.0 */
/* Flows of a VC: opening, closing, and what becomes of them when the VC fails. */
#include <stdlib.h>

#include "core/vc_private.h"

/* --- the clients of a VC -------------------------------------------------------------------------------------- */

static struct dq_vc_client *client_get(struct dq_vc *vc, uint32_t client)
{
	struct dq_vc_client *c;
	for (c = vc->clients; c; c = c->next)
		if (c->client == client)
			break;
	if (!c) {
		c = calloc(1, sizeof *c);
		if (!c)
			return NULL;
		dq_sched_client_init(&c->sched);
		c->client = client;
		dq_list_init(&c->waiting[0]);
		dq_list_init(&c->waiting[1]);
		c->next = vc->clients;
		vc->clients = c;
	}
	c->flows++;
	return c;
}

static void client_put(struct dq_vc *vc, struct dq_vc_client *c)
{
	if (--c->flows)
		return;
	for (int dir = 0; dir < 2; dir++)
		if (vc->serve_next[dir] == c)
			vc->serve_next[dir] = c->next;
	for (struct dq_vc_client **at = &vc->clients; *at; at = &(*at)->next) {
		if (*at == c) {
			*at = c->next;
			break;
		}
	}
	free(c);
}

/* --- making and freeing ---------------------------------------------------------------------------------------- */

static struct dq_flow *flow_new(struct dq_vc *vc, enum dq_flow_state state, uint32_t *index)
{
	struct dq_flow *f;
	struct dq_list *lists[12];
	*index = dq_slab_alloc(&vc->pools->flows);
	if (*index == DQ_NONE)
		return NULL;
	f = dq_flow_at(vc->pools, *index);
	f->vc = vc;
	f->state = (uint8_t)state;
	f->client = DQ_NONE;
	f->peer_flow = DQ_NONE;
	f->user_next = f->user_prev = DQ_NONE;
	lists[0] = &f->ready, lists[1] = &f->unmatched, lists[2] = &f->puts, lists[3] = &f->sending;
	lists[4] = &f->rtrs, lists[5] = &f->receives, lists[6] = &f->announced, lists[7] = &f->incoming;
	lists[8] = &f->arrived, lists[9] = &f->notifies, lists[10] = &f->exports, lists[11] = &f->imports;
	for (unsigned i = 0; i < 12; i++)
		dq_list_init(lists[i]);
	f->next = DQ_NONE;
	f->prev = vc->flow_list.tail;
	if (f->prev == DQ_NONE)
		vc->flow_list.head = *index;
	else
		dq_flow_at(vc->pools, f->prev)->next = *index;
	vc->flow_list.tail = *index;
	vc->flow_count++;
	return f;
}

static bool bind_client(struct dq_vc *vc, struct dq_flow *f, uint32_t client)
{
	f->vc_client = client_get(vc, client);
	if (!f->vc_client)
		return false;
	f->client = client;
	dq_sched_flow_init(&f->sched, &f->vc_client->sched);
	return true;
}

/* Off the VC; the object stays. */
static void detach(struct dq_vc *vc, uint32_t flow)
{
	struct dq_flow *f = dq_flow_at(vc->pools, flow);
	if (f->vc_client) {
		dq_sched_deactivate(&vc->sched, &f->sched);
		dq_slot_unwant(vc, flow, f, DQ_DIR_RECV);
		dq_slot_unwant(vc, flow, f, DQ_DIR_PUT);
		client_put(vc, f->vc_client);
		f->vc_client = NULL;
	}
	if (f->prev == DQ_NONE)
		vc->flow_list.head = f->next;
	else
		dq_flow_at(vc->pools, f->prev)->next = f->next;
	if (f->next == DQ_NONE)
		vc->flow_list.tail = f->prev;
	else
		dq_flow_at(vc->pools, f->next)->prev = f->prev;
	vc->flow_count--;
	f->vc = NULL;
}

static void flow_free(struct dq_vc *vc, uint32_t flow, bool tell)
{
	detach(vc, flow);
	if (dq_flow_at(vc->pools, flow)->state == DQ_FLOW_INCOMING)
		dq_map_remove(&vc->incoming, dq_flow_at(vc->pools, flow)->peer_flow);
	if (tell)
		vc->ops->flow_gone(vc->user, vc, flow);
	dq_slab_free(&vc->pools->flows, flow);
}

struct dq_flow *dq_flow_of_peer(struct dq_vc *vc, uint32_t flow)
{
	struct dq_flow *f = dq_flow_at(vc->pools, flow);
	return f && f->vc == vc && f->state == DQ_FLOW_OPEN ? f : NULL;
}

int dq_flow_usable(const struct dq_vc *vc, const struct dq_flow *f)
{
	if (!f || f->local_closed)
		return DQ_ERR_INVALID;
	if (vc->failed)
		return vc->failed;
	if (f->vc != vc || f->state != DQ_FLOW_OPEN)
		return DQ_ERR_INVALID;
	return f->peer_closed ? f->peer_reason : 0;
}

bool dq_vc_has_room(const struct dq_vc *vc)
{
	return !vc->failed && vc->flow_count < DQ_VC_MAX_FLOWS;
}

/* --- opening --------------------------------------------------------------------------------------------------- */

int dq_vc_flow_open(struct dq_vc *vc, uint32_t client, const struct dq_message *open, uint32_t *flow)
{
	struct dq_message m = *open;
	struct dq_flow *f;
	if (vc->failed)
		return vc->failed;
	if (!dq_vc_has_room(vc))
		return DQ_ERR_LIMIT;
	f = flow_new(vc, DQ_FLOW_OPENING, flow);
	if (!f)
		return DQ_ERR_LIMIT;
	m.type = DQ_MSG_FLOW_OPEN;
	m.flags = 0;
	m.flow = *flow;
	if (!bind_client(vc, f, client) || !dq_vc_tell(vc, &m, NULL)) {
		flow_free(vc, *flow, false);
		return DQ_ERR_NOMEM;
	}
	return 0;
}

static void answer_open(struct dq_vc *vc, uint32_t opener_flow, uint32_t flow, int32_t status)
{
	dq_vc_tell(vc, &(struct dq_message){ .type = DQ_MSG_FLOW_ACCEPT, .flow = opener_flow, .peer_flow = flow, .status = status }, NULL);
}

int dq_flow_on_open(struct dq_vc *vc, const struct dq_message *m)
{
	struct dq_flow *f;
	uint32_t flow;
	if (dq_map_get(&vc->incoming, m->flow) != DQ_NONE)
		return dq_vc_broken(vc, "FLOW_OPEN names flow %u, which is being opened already", m->flow);
	if (!dq_vc_has_room(vc) || !(f = flow_new(vc, DQ_FLOW_INCOMING, &flow))) {
		answer_open(vc, m->flow, DQ_NONE, DQ_ERR_LIMIT);
		return 0;
	}
	f->peer_flow = m->flow;
	if (dq_map_set(&vc->incoming, m->flow, flow)) {
		dq_vc_flow_refuse(vc, flow, DQ_ERR_NOMEM);
		return 0;
	}
	vc->ops->flow_incoming(vc->user, vc, flow, m);
	return 0;
}

int dq_vc_flow_accept(struct dq_vc *vc, uint32_t flow, uint32_t client)
{
	struct dq_flow *f = dq_flow_at(vc->pools, flow);
	if (!f || f->vc != vc || f->state != DQ_FLOW_INCOMING)
		return DQ_ERR_INVALID;
	if (!bind_client(vc, f, client)) {
		dq_vc_flow_refuse(vc, flow, DQ_ERR_NOMEM);
		return DQ_ERR_NOMEM;
	}
	dq_map_remove(&vc->incoming, f->peer_flow);
	f->state = DQ_FLOW_OPEN;
	answer_open(vc, f->peer_flow, flow, DQ_OK);
	return 0;
}

void dq_vc_flow_refuse(struct dq_vc *vc, uint32_t flow, int32_t status)
{
	struct dq_flow *f = dq_flow_at(vc->pools, flow);
	if (!f || f->vc != vc || f->state != DQ_FLOW_INCOMING)
		return;
	answer_open(vc, f->peer_flow, DQ_NONE, status);
	flow_free(vc, flow, false);
}

int dq_flow_on_accept(struct dq_vc *vc, const struct dq_message *m, uint64_t now_ns)
{
	struct dq_flow *f = dq_flow_at(vc->pools, m->flow);
	if (!f || f->vc != vc || f->state != DQ_FLOW_OPENING)
		return dq_vc_broken(vc, "FLOW_ACCEPT names flow %u, which is not being opened", m->flow);
	if (f->local_closed)
		dq_vc_answered(vc, now_ns);
	if (m->status != DQ_OK) {
		int32_t status = m->status < 0 && m->status >= DQ_ERR_INTERNAL ? m->status : DQ_ERR_REFUSED;
		if (!f->local_closed)
			vc->ops->flow_opened(vc->user, vc, m->flow, status);
		flow_free(vc, m->flow, f->local_closed);
		return 0;
	}
	f->peer_flow = m->peer_flow;
	f->state = DQ_FLOW_OPEN;
	if (f->local_closed)
		dq_flow_advance_close(vc, m->flow, now_ns);
	else
		vc->ops->flow_opened(vc->user, vc, m->flow, DQ_OK);
	return 0;
}

/* --- closing --------------------------------------------------------------------------------------------------- */

static void drop_imports(struct dq_vc *vc, struct dq_flow *f)
{
	while (!dq_list_empty(&f->imports))
		dq_region_free(vc, &f->imports, f->imports.head);
}

static void drop_rtrs(struct dq_vc *vc, struct dq_flow *f)
{
	while (!dq_list_empty(&f->rtrs)) {
		uint32_t r = f->rtrs.head;
		dq_slot_set(vc->outgoing_pages, dq_rtr_at(vc, r)->slot, DQ_NONE);
		dq_list_remove(&vc->pools->rtrs, &f->rtrs, r);
		dq_slab_free(&vc->pools->rtrs, r);
	}
}

static void finish_all(struct dq_vc *vc, struct dq_list *list, int32_t status)
{
	for (uint32_t i = list->head; i != DQ_NONE; i = dq_msg_at(vc, i)->node.next)
		dq_msg_finish(vc, dq_msg_at(vc, i), status, 0);
}

static void free_all(struct dq_vc *vc, struct dq_list *list, int32_t status)
{
	finish_all(vc, list, status);
	while (!dq_list_empty(list))
		dq_msg_free(vc, list, list->head);
}

/* Nothing new happens on the flow: requests complete with status, posting stops. What is posted or announced stays; what is in
 * f->sending, and not half-way, is the caller's to finish. */
static void stop_all(struct dq_vc *vc, struct dq_flow *f, int32_t status, uint64_t now_ns)
{
	for (uint32_t i = f->receives.head; i != DQ_NONE; i = dq_msg_at(vc, i)->node.next)
		vc->counters.receives_waiting--;
	free_all(vc, &f->unmatched, status);
	for (uint32_t i = f->puts.head; i != DQ_NONE; i = dq_msg_at(vc, i)->node.next) {
		/* A put that waits for a slot: its region is not withdrawn, else it would have ended then. */
		struct dq_region *r = dq_region_at(vc, dq_msg_at(vc, i)->import);
		if (r)
			r->users--;
	}
	free_all(vc, &f->puts, status);
	free_all(vc, &f->receives, status);
	while (!dq_list_empty(&f->ready))
		dq_msg_stop(vc, f->ready.head, status, now_ns);
}

void dq_flow_advance_close(struct dq_vc *vc, uint32_t flow, uint64_t now_ns)
{
	struct dq_flow *f = dq_flow_at(vc->pools, flow);
	if (!f || f->busy || f->state != DQ_FLOW_OPEN || !(f->local_closed || f->peer_closed))
		return;
	if (!f->close_sent) {
		if (f->outstanding)
			return;
		f->close_sent = true;
		dq_vc_tell(vc, &(struct dq_message){ .type = DQ_MSG_FLOW_CLOSE, .flow = f->peer_flow,
						     .status = f->local_closed ? f->close_reason : DQ_ERR_CLOSED }, NULL);
		if (!f->peer_closed)
			dq_vc_owes(vc, now_ns);
	}
	if (!f->peer_closed)
		return;
	drop_imports(vc, f); /* no put is outstanding, none will follow */
	/* Slots are under way: of our puts (the peer's DONE is due), or of what the peer sent and we have not seen all of. A
	 * flow that its own client has not closed stays too: its arrived puts can still be read. */
	if (!f->local_closed || !dq_list_empty(&f->sending) || !dq_list_empty(&f->announced) || !dq_list_empty(&f->incoming))
		return;
	flow_free(vc, flow, true);
}

void dq_flow_close(struct dq_pools *pools, const struct dq_vc_ops *ops, void *user, uint32_t flow, int32_t reason, uint64_t now_ns)
{
	struct dq_flow *f = dq_flow_at(pools, flow);
	struct dq_vc *vc;
	if (!f || f->local_closed)
		return;
	f->local_closed = true;
	f->close_reason = reason < 0 ? reason : DQ_ERR_CLOSED;
	vc = f->vc;
	if (!vc) { /* its VC failed before */
		ops->flow_gone(user, NULL, flow);
		dq_slab_free(&pools->flows, flow);
		return;
	}
	if (f->state == DQ_FLOW_INCOMING) {
		answer_open(vc, f->peer_flow, DQ_NONE, f->close_reason);
		flow_free(vc, flow, true);
		return;
	}
	if (f->state != DQ_FLOW_OPEN) {
		/* The listener may not accept for a long time, or ever. The answer to FLOW_OPEN goes on with it. */
		dq_vc_tell(vc, &(struct dq_message){ .type = DQ_MSG_FLOW_CLOSE, .flags = DQ_FLAG_OPENER, .flow = flow,
						     .status = f->close_reason }, NULL);
		dq_vc_owes(vc, now_ns);
		return;
	}
	f->busy = true;
	stop_all(vc, f, DQ_ERR_CANCELED, now_ns);
	finish_all(vc, &f->sending, DQ_ERR_CANCELED);
	finish_all(vc, &f->announced, DQ_ERR_CANCELED);
	free_all(vc, &f->notifies, DQ_ERR_CANCELED);
	drop_rtrs(vc, f); /* our FLOW_CLOSE answers them, and the peer may then name their slots anew */
	for (uint32_t i = f->exports.head; i != DQ_NONE; i = dq_region_at(vc, i)->node.next)
		dq_region_finish(vc, dq_region_at(vc, i), DQ_ERR_CANCELED);
	while (!dq_list_empty(&f->arrived)) { /* nobody will take them */
		dq_msg_detach_put(vc, dq_msg_at(vc, f->arrived.head));
		dq_msg_drop_incoming(vc, f, &f->arrived, f->arrived.head);
	}
	f->busy = false;
	dq_flow_advance_close(vc, flow, now_ns);
}

/* The opener does not want the flow any more. Without effect when our answer is on its way already. */
static int on_withdrawn(struct dq_vc *vc, const struct dq_message *m)
{
	uint32_t flow = dq_map_get(&vc->incoming, m->flow);
	if (flow != DQ_NONE) {
		answer_open(vc, m->flow, DQ_NONE, DQ_ERR_CANCELED);
		flow_free(vc, flow, true);
	}
	return 0;
}

int dq_flow_on_close(struct dq_vc *vc, const struct dq_message *m, uint64_t now_ns)
{
	struct dq_flow *f = dq_flow_of_peer(vc, m->flow);
	uint32_t next;
	if (m->flags & DQ_FLAG_OPENER)
		return on_withdrawn(vc, m);
	if (!f || f->peer_closed)
		return dq_vc_broken(vc, "FLOW_CLOSE names flow %u, which is not open", m->flow);
	f->peer_closed = true;
	f->peer_reason = m->status < 0 && m->status >= DQ_ERR_INTERNAL ? m->status : DQ_ERR_CLOSED;
	if (f->close_sent)
		dq_vc_answered(vc, now_ns);
	f->busy = true;
	/* What was posted whole gets there and ends as it would have: the peer may have closed since it has it, and its word can
	 * be here before the last completion. */
	stop_all(vc, f, f->peer_reason, now_ns);
	for (uint32_t i = f->announced.head; i != DQ_NONE; i = next) {
		struct dq_msg *r = dq_msg_at(vc, i);
		next = r->node.next;
		if (r->done_heard)
			continue; /* its last completions are still to be seen */
		dq_msg_finish(vc, r, f->peer_reason, 0);
		dq_msg_answered(vc, r, now_ns);
		dq_msg_drop_incoming(vc, f, &f->announced, i);
	}
	for (uint32_t i = f->incoming.head; i != DQ_NONE; i = dq_msg_at(vc, i)->node.next)
		dq_msg_owes(vc, dq_msg_at(vc, i), now_ns); /* everything was written: it must be seen now */
	for (uint32_t i = f->arrived.head; i != DQ_NONE; i = dq_msg_at(vc, i)->node.next)
		dq_msg_detach_put(vc, dq_msg_at(vc, i)); /* the notification stays readable */
	dq_msg_end_notifies(vc, f);
	while (!dq_list_empty(&f->exports)) {
		struct dq_region *r = dq_region_at(vc, f->exports.head);
		if (r->withdrawn)
			dq_vc_answered(vc, now_ns);
		dq_region_finish(vc, r, r->has_unexport ? DQ_OK : f->peer_reason);
		dq_region_free(vc, &f->exports, f->exports.head);
	}
	drop_rtrs(vc, f);
	f->busy = false;
	dq_flow_advance_close(vc, m->flow, now_ns);
	return 0;
}

/* --- the VC failed --------------------------------------------------------------------------------------------- */

void dq_flow_fail(struct dq_vc *vc, uint32_t flow, int32_t status, uint64_t now_ns)
{
	struct dq_flow *f = dq_flow_at(vc->pools, flow);
	struct dq_list *all[] = { &f->unmatched, &f->puts, &f->receives, &f->notifies, &f->announced, &f->incoming,
				  &f->arrived, &f->sending, &f->ready };
	(void)now_ns;
	f->busy = true;
	if (f->state == DQ_FLOW_OPENING && !f->local_closed)
		vc->ops->flow_opened(vc->user, vc, flow, status);
	/* QPs are fenced: whatever was posted or announced can touch no memory any more. */
	for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
		free_all(vc, all[i], status);
	while (!dq_list_empty(&f->exports)) {
		dq_region_finish(vc, dq_region_at(vc, f->exports.head), status);
		dq_region_free(vc, &f->exports, f->exports.head);
	}
	drop_imports(vc, f);
	drop_rtrs(vc, f);
	if (f->state != DQ_FLOW_OPEN || f->local_closed) {
		bool opening = f->state == DQ_FLOW_OPENING && !f->local_closed;
		flow_free(vc, flow, !opening);
		return;
	}
	f->state = DQ_FLOW_FAILED;
	f->peer_reason = status;
	detach(vc, flow);
}
