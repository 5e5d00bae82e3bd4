/* SPDX-License-Identifier: Apache-2.0 */
/* Listeners, accepts and connects of clients, and the wait for a VC that the control plane makes. */
#include <stdio.h>
#include <string.h>

#include "engine/private.h"

static struct eng_listener *listener_at(struct dq_engine *e, uint32_t i) { return dq_slab_at(&e->listeners, i); }
static struct eng_connect *connect_at(struct dq_engine *e, uint32_t i) { return dq_slab_at(&e->connects, i); }
static uint64_t listener_key(uint32_t client, uint32_t id) { return (uint64_t)client << 32 | id; }

static void complete_flow(struct dq_engine *e, struct eng_client *c, uint64_t request, uint32_t flow)
{
	const struct eng_vc *vc = eng_vc_of(dq_flow_at(&e->pools, flow)->vc);
	const struct eng_path *p = eng_path_at(e, vc->path);
	struct dq_completion_opened opened = { .request = request, .status = DQ_OK, .flow = flow, .device = (uint8_t)vc->device,
					       .path_class = p->profile.path_class };
	struct dq_completion cq;
	_Static_assert(ENG_MAX_DEVICES <= UINT8_MAX, "number of a device in a completion");
	snprintf(opened.peer, sizeof opened.peer, "%.*s", (int)sizeof opened.peer - 1, p->host_id);
	memcpy(&cq, &opened, sizeof cq);
	eng_client_complete(e, c, &cq);
}

/* --- listeners --------------------------------------------------------------------------------------------------- */

void eng_listen(struct dq_engine *e, struct eng_client *c, const struct dq_submission *s)
{
	struct eng_listener *l;
	uint32_t i;
	if (s->mem >= e->device_count || dq_map_get(&e->listener_map, listener_key(c->id, s->flow)) != DQ_NONE) {
		eng_client_fail_request(e, c, s->request, DQ_ERR_INVALID);
		return;
	}
	if (c->listener_count >= c->max_flows) {
		eng_client_fail_request(e, c, s->request, DQ_ERR_LIMIT);
		return;
	}
	i = dq_slab_alloc(&e->listeners);
	if (i == DQ_NONE || dq_map_set(&e->listener_map, listener_key(c->id, s->flow), i)) {
		if (i != DQ_NONE)
			dq_slab_free(&e->listeners, i);
		eng_client_fail_request(e, c, s->request, DQ_ERR_NOMEM);
		return;
	}
	l = listener_at(e, i);
	l->client = c->id;
	l->id = s->flow;
	l->device = s->mem;
	l->nonce[0] = s->tag;
	l->nonce[1] = s->remote_offset;
	l->incoming_head = l->incoming_tail = l->accepts_head = l->accepts_tail = DQ_NONE;
	l->prev = DQ_NONE;
	l->next = c->listeners_head;
	if (l->next != DQ_NONE)
		listener_at(e, l->next)->prev = i;
	c->listeners_head = i;
	c->listener_count++;
	eng_client_fail_request(e, c, s->request, DQ_OK);
}

static uint32_t pop_incoming(struct dq_engine *e, struct eng_listener *l)
{
	uint32_t flow = l->incoming_head;
	struct dq_flow *f = dq_flow_at(&e->pools, flow);
	l->incoming_head = f->user_next;
	if (l->incoming_head == DQ_NONE)
		l->incoming_tail = DQ_NONE;
	else
		dq_flow_at(&e->pools, l->incoming_head)->user_prev = DQ_NONE;
	l->incoming_count--;
	f->user = 0;
	return flow;
}

static void remove_listener(struct dq_engine *e, struct eng_client *c, uint32_t i)
{
	struct eng_listener *l = listener_at(e, i);
	while (l->incoming_head != DQ_NONE) {
		uint32_t flow = pop_incoming(e, l);
		struct dq_vc *vc = dq_flow_at(&e->pools, flow)->vc;
		dq_vc_flow_refuse(vc, flow, DQ_ERR_REFUSED);
		eng_vc_touch(e, eng_vc_of(vc));
	}
	while (l->accepts_head != DQ_NONE) {
		uint32_t a = l->accepts_head;
		struct eng_accept *accept = dq_slab_at(&e->accepts, a);
		l->accepts_head = accept->next;
		eng_client_fail_request(e, c, accept->request, DQ_ERR_CANCELED);
		dq_slab_free(&e->accepts, a);
	}
	dq_map_remove(&e->listener_map, listener_key(c->id, l->id));
	if (l->prev == DQ_NONE)
		c->listeners_head = l->next;
	else
		listener_at(e, l->prev)->next = l->next;
	if (l->next != DQ_NONE)
		listener_at(e, l->next)->prev = l->prev;
	c->listener_count--;
	dq_slab_free(&e->listeners, i);
}

void eng_unlisten(struct dq_engine *e, struct eng_client *c, const struct dq_submission *s)
{
	uint32_t i = dq_map_get(&e->listener_map, listener_key(c->id, s->flow));
	if (i != DQ_NONE)
		remove_listener(e, c, i);
	eng_client_fail_request(e, c, s->request, i != DQ_NONE ? DQ_OK : DQ_ERR_INVALID);
}

/* --- accepting ----------------------------------------------------------------------------------------------------- */

/* Give an incoming flow to the client's ACCEPT. */
static void accept_flow(struct dq_engine *e, struct eng_client *c, uint64_t request, uint32_t flow)
{
	struct dq_vc *vc = dq_flow_at(&e->pools, flow)->vc;
	int32_t rc;
	eng_vc_touch(e, eng_vc_of(vc));
	if (c->flow_count >= c->max_flows) {
		dq_vc_flow_refuse(vc, flow, DQ_ERR_LIMIT);
		eng_client_fail_request(e, c, request, DQ_ERR_LIMIT);
		return;
	}
	rc = dq_vc_flow_accept(vc, flow, c->id);
	if (rc) {
		eng_client_fail_request(e, c, request, rc);
		return;
	}
	eng_client_add_flow(e, c, flow);
	complete_flow(e, c, request, flow);
}

void eng_accept(struct dq_engine *e, struct eng_client *c, const struct dq_submission *s)
{
	uint32_t i = dq_map_get(&e->listener_map, listener_key(c->id, s->flow)), a;
	struct eng_listener *l;
	struct eng_accept *accept;
	if (i == DQ_NONE) {
		eng_client_fail_request(e, c, s->request, DQ_ERR_INVALID);
		return;
	}
	l = listener_at(e, i);
	if (l->incoming_head != DQ_NONE) {
		accept_flow(e, c, s->request, pop_incoming(e, l));
		return;
	}
	a = dq_slab_alloc(&e->accepts);
	if (a == DQ_NONE) {
		eng_client_fail_request(e, c, s->request, DQ_ERR_NOMEM);
		return;
	}
	accept = dq_slab_at(&e->accepts, a);
	accept->request = s->request;
	accept->next = DQ_NONE;
	if (l->accepts_tail == DQ_NONE || l->accepts_head == DQ_NONE)
		l->accepts_head = a;
	else
		((struct eng_accept *)dq_slab_at(&e->accepts, l->accepts_tail))->next = a;
	l->accepts_tail = a;
}

void eng_flow_incoming(struct dq_engine *e, struct eng_vc *vc, uint32_t flow, const struct dq_message *open)
{
	struct eng_client *c = eng_client_at(e, open->client);
	uint32_t i = dq_map_get(&e->listener_map, listener_key(open->client, open->listener));
	struct eng_listener *l;
	struct dq_flow *f;

	if (i == DQ_NONE && c && !c->dying) {
		/* The client gave its handle away before we took its LISTEN: that lies in its ring. */
		eng_client_poll(e, c);
		i = dq_map_get(&e->listener_map, listener_key(open->client, open->listener));
	}
	l = i == DQ_NONE ? NULL : listener_at(e, i);
	if (!l || ((l->nonce[0] ^ open->nonce[0]) | (l->nonce[1] ^ open->nonce[1]))) {
		dq_vc_flow_refuse(&vc->core, flow, DQ_ERR_REFUSED);
		return;
	}
	c = eng_client_at(e, l->client);
	if (l->accepts_head != DQ_NONE) {
		uint32_t a = l->accepts_head;
		struct eng_accept *accept = dq_slab_at(&e->accepts, a);
		uint64_t request = accept->request;
		l->accepts_head = accept->next;
		dq_slab_free(&e->accepts, a);
		accept_flow(e, c, request, flow);
		return;
	}
	if (l->incoming_count >= ENG_LISTEN_BACKLOG) {
		dq_vc_flow_refuse(&vc->core, flow, DQ_ERR_LIMIT);
		return;
	}
	f = dq_flow_at(&e->pools, flow);
	f->user = (uint64_t)i + 1;
	f->user_next = DQ_NONE;
	f->user_prev = l->incoming_tail;
	if (l->incoming_tail == DQ_NONE)
		l->incoming_head = flow;
	else
		dq_flow_at(&e->pools, l->incoming_tail)->user_next = flow;
	l->incoming_tail = flow;
	l->incoming_count++;
}

/* --- connecting ---------------------------------------------------------------------------------------------------- */

static void connect_end(struct dq_engine *e, uint32_t i, int32_t status)
{
	struct eng_connect *cn = connect_at(e, i);
	struct eng_client *c = eng_client_at(e, cn->client);
	uint64_t request = cn->request;
	uint32_t flow = cn->flow;
	dq_slab_free(&e->connects, i);
	if (status)
		eng_client_fail_request(e, c, request, status);
	else
		complete_flow(e, c, request, flow);
}

/* An up VC with room to that life of the host, or NULL. */
static struct eng_vc *usable_vc(struct dq_engine *e, uint32_t device, const char *host_id, uint64_t epoch)
{
	uint32_t p = eng_path_find(e, device, host_id, epoch);
	if (p == DQ_NONE)
		return NULL;
	for (uint32_t v = eng_path_at(e, p)->vcs; v != DQ_NONE; v = eng_vc_at(e, v)->next_in_path) {
		struct eng_vc *vc = eng_vc_at(e, v);
		if (vc->state == ENG_VC_UP && !vc->failing && dq_vc_has_room(&vc->core))
			return vc;
	}
	return NULL;
}

static void start_connect(struct dq_engine *e, uint32_t i, struct eng_vc *vc)
{
	struct eng_connect *cn = connect_at(e, i);
	struct dq_message open = { .client = cn->handle.client, .listener = cn->handle.listener };
	uint32_t flow;
	int32_t rc;
	memcpy(open.nonce, cn->handle.nonce, sizeof open.nonce);
	cn->need = DQ_NONE;
	rc = dq_vc_flow_open(&vc->core, cn->client, &open, &flow);
	eng_vc_touch(e, vc);
	if (rc) {
		connect_end(e, i, rc);
		return;
	}
	cn->flow = flow;
	dq_flow_at(&e->pools, flow)->user = (uint64_t)i + 1;
}

static uint32_t device_for(const struct dq_engine *e, uint32_t device, uint16_t rail)
{
	if (e->devices[device].rail == rail)
		return device;
	for (uint32_t i = 0; i < e->device_count; i++)
		if (e->devices[i].rail == rail)
			return i;
	return device;
}

void eng_connect(struct dq_engine *e, struct eng_client *c, const struct dq_submission *s, const struct dq_handle *h)
{
	struct eng_connect *cn;
	struct eng_need *need = NULL;
	struct eng_vc *vc;
	struct dq_engine_event ev = { .type = DQ_EV_NEED_VC, .client = c->id };
	uint32_t i, n;

	if (s->mem >= e->device_count || h->magic != DQ_HANDLE_MAGIC || !memchr(h->host_id, 0, sizeof h->host_id) || !h->host_id[0]) {
		eng_client_fail_request(e, c, s->request, DQ_ERR_INVALID);
		return;
	}
	if (h->version != DQ_HANDLE_VERSION) {
		eng_client_fail_request(e, c, s->request, DQ_ERR_VERSION);
		return;
	}
	if (c->flow_count >= c->max_flows || (i = dq_slab_alloc(&e->connects)) == DQ_NONE) {
		eng_client_fail_request(e, c, s->request, DQ_ERR_LIMIT);
		return;
	}
	cn = connect_at(e, i);
	cn->client = c->id;
	cn->request = s->request;
	cn->deadline_ns = e->now_ns + e->config.connect_deadline_ns;
	cn->device = device_for(e, s->mem, h->rail);
	cn->need = cn->flow = DQ_NONE;
	cn->handle = *h;
	vc = usable_vc(e, cn->device, h->host_id, h->epoch);
	if (vc) {
		start_connect(e, i, vc);
		return;
	}
	for (n = 0; n < e->needs.capacity; n++) {
		need = dq_slab_at(&e->needs, n);
		if (need && need->device == cn->device && need->epoch == h->epoch && !strcmp(need->host_id, h->host_id))
			break;
		need = NULL;
	}
	if (need) {
		cn->need = n;
		return; /* the control plane is at it already */
	}
	n = dq_slab_alloc(&e->needs);
	if (n == DQ_NONE) {
		connect_end(e, i, DQ_ERR_NOMEM);
		return;
	}
	need = dq_slab_at(&e->needs, n);
	need->device = cn->device;
	need->epoch = h->epoch;
	memcpy(need->host_id, h->host_id, sizeof need->host_id);
	cn->need = n;
	ev.need = n;
	ev.device = cn->device;
	ev.rail = h->rail;
	ev.epoch = h->epoch;
	ev.family = h->family;
	ev.port = h->port;
	ev.scope = h->scope;
	memcpy(ev.address, h->address, sizeof ev.address);
	memcpy(ev.host_id, h->host_id, sizeof ev.host_id);
	eng_event(e, &ev);
}

void eng_flow_opened(struct dq_engine *e, uint32_t flow, int32_t status)
{
	struct dq_flow *f = dq_flow_at(&e->pools, flow);
	uint32_t i = (uint32_t)(f->user - 1);
	struct eng_connect *cn = connect_at(e, i);
	struct eng_client *c = eng_client_at(e, cn->client);
	f->user = 0;
	if (!status)
		eng_client_add_flow(e, c, flow);
	connect_end(e, i, status);
}

void eng_flow_gone(struct dq_engine *e, uint32_t flow)
{
	struct dq_flow *f = dq_flow_at(&e->pools, flow);
	struct eng_client *c;
	if (f->state == DQ_FLOW_INCOMING) {
		/* Its VC failed while it waited for an ACCEPT. */
		if (f->user) {
			struct eng_listener *l = listener_at(e, (uint32_t)(f->user - 1));
			if (f->user_prev == DQ_NONE)
				l->incoming_head = f->user_next;
			else
				dq_flow_at(&e->pools, f->user_prev)->user_next = f->user_next;
			if (f->user_next == DQ_NONE)
				l->incoming_tail = f->user_prev;
			else
				dq_flow_at(&e->pools, f->user_next)->user_prev = f->user_prev;
			l->incoming_count--;
		}
		return;
	}
	c = eng_client_at(e, f->client);
	if (!c)
		return;
	if (f->user_prev == DQ_NONE)
		c->flows_head = f->user_next;
	else
		dq_flow_at(&e->pools, f->user_prev)->user_next = f->user_next;
	if (f->user_next != DQ_NONE)
		dq_flow_at(&e->pools, f->user_next)->user_prev = f->user_prev;
	c->flow_count--;
	eng_client_settle(e, c);
}

/* Nobody waits for this FLOW_OPEN any more. Its answer is still to come; until then the flow belongs to the client. */
static void abandon(struct dq_engine *e, struct eng_client *c, uint32_t flow, int32_t reason)
{
	dq_flow_at(&e->pools, flow)->user = 0;
	eng_client_add_flow(e, c, flow);
	eng_flow_close(e, flow, reason);
}

void eng_connections_of_client_gone(struct dq_engine *e, struct eng_client *c)
{
	while (c->listeners_head != DQ_NONE)
		remove_listener(e, c, c->listeners_head);
	for (uint32_t i = 0; i < e->connects.capacity; i++) {
		struct eng_connect *cn = connect_at(e, i);
		uint32_t flow;
		if (!cn || cn->client != c->id)
			continue;
		flow = cn->flow;
		dq_slab_free(&e->connects, i);
		c->inflight--;
		if (flow != DQ_NONE)
			abandon(e, c, flow, DQ_ERR_PEER_GONE);
	}
}

static void end_need(struct dq_engine *e, uint32_t n, struct eng_vc *vc, int32_t status)
{
	for (uint32_t i = 0; i < e->connects.capacity; i++) {
		struct eng_connect *cn = connect_at(e, i);
		if (!cn || cn->need != n)
			continue;
		if (vc)
			start_connect(e, i, vc);
		else
			connect_end(e, i, status);
	}
	dq_slab_free(&e->needs, n);
}

void eng_connections_vc_up(struct dq_engine *e, struct eng_vc *vc)
{
	struct eng_path *p = eng_path_at(e, vc->path);
	for (uint32_t n = 0; n < e->needs.capacity; n++) {
		struct eng_need *need = dq_slab_at(&e->needs, n);
		if (need && need->device == p->device && need->epoch == p->epoch && !strcmp(need->host_id, p->host_id))
			end_need(e, n, vc, 0);
	}
}

void eng_connections_tick(struct dq_engine *e)
{
	for (uint32_t i = 0; i < e->connects.capacity; i++) {
		struct eng_connect *cn = connect_at(e, i);
		if (!cn || e->now_ns < cn->deadline_ns)
			continue;
		if (cn->flow != DQ_NONE)
			abandon(e, eng_client_at(e, cn->client), cn->flow, DQ_ERR_TIMEOUT);
		connect_end(e, i, DQ_ERR_TIMEOUT);
	}
}

struct need_failed {
	uint32_t need;
	int32_t status;
	int rc;
};

static void need_failed(struct dq_engine *e, void *arg)
{
	struct need_failed *a = arg;
	a->rc = dq_slab_at(&e->needs, a->need) ? 0 : -2; /* -ENOENT: satisfied or expired meanwhile */
	if (!a->rc)
		end_need(e, a->need, NULL, a->status ? a->status : DQ_ERR_UNREACHABLE);
}

int dq_engine_need_failed(dq_engine *e, uint32_t need, int32_t status)
{
	struct need_failed a = { need, status, 0 };
	int rc = eng_call(e, need_failed, &a);
	return rc ? rc : a.rc;
}
