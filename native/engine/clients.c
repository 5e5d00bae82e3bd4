/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clients: their rings, what they submit, their end. Everything in a client's shared memory is hostile: sizes are kept here,
 * indices are checked, entries are copied first. A client that breaks the rules is cut off; nobody else notices.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "engine/private.h"

#define WATCH_CLIENT 2

/* --- completions --------------------------------------------------------------------------------------------------- */

void eng_client_complete(struct dq_engine *e, struct eng_client *c, const struct dq_completion *cq)
{
	(void)e;
	c->inflight--;
	if (c->dying)
		return;
	/* There is room: a submission is only taken when its completion has a place. */
	dq_ring_write(&c->cq, 0, cq);
	dq_ring_produce(&c->cq, 1);
	c->wake = true;
}

void eng_client_fail_request(struct dq_engine *e, struct eng_client *c, uint64_t request, int32_t status)
{
	struct dq_completion cq = { .request = request, .status = status };
	eng_client_complete(e, c, &cq);
}

static void wake(struct eng_client *c)
{
	dq_ring_fence(); /* against the shim's fence between its flag and its last look at the ring */
	if (!atomic_exchange_explicit(&c->control->client_waiting, 0, memory_order_relaxed))
		return;
	atomic_fetch_add_explicit(&c->control->wake, 1, memory_order_release);
	syscall(SYS_futex, &c->control->wake, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void eng_client_wake_all(struct dq_engine *e, bool idle)
{
	for (uint32_t i = 0; i < e->clients.capacity; i++) {
		struct eng_client *c = eng_client_at(e, i);
		/* A wake-up costs more than what it tells: one that was woken just now learns more the next time. */
		if (c && c->wake && (idle || e->now_ns - c->woken_ns >= ENG_WAKE_NS)) {
			c->wake = false;
			c->woken_ns = e->now_ns;
			wake(c);
		}
	}
}

/* --- submissions --------------------------------------------------------------------------------------------------- */

/* The flow of a data operation, or a status. */
static int32_t flow_of(struct dq_engine *e, struct eng_client *c, uint32_t id, struct dq_flow **out)
{
	struct dq_flow *f = dq_flow_at(&e->pools, id);
	if (!f || f->client != c->id || f->local_closed || (f->state != DQ_FLOW_OPEN && f->state != DQ_FLOW_FAILED))
		return DQ_ERR_INVALID;
	*out = f;
	return f->vc ? DQ_OK : f->peer_reason;
}

static int32_t operate(struct dq_engine *e, struct eng_client *c, const struct dq_submission *s)
{
	struct dq_operation op = { .flow = s->flow, .request = s->request, .offset = s->offset, .bytes = s->bytes, .tag = s->tag,
				   .region = s->region, .remote_offset = s->remote_offset };
	struct dq_flow *f;
	struct eng_mem *m;
	int32_t rc = flow_of(e, c, s->flow, &f);
	bool needs_mem = s->op == DQ_OP_SEND || s->op == DQ_OP_RECV || s->op == DQ_OP_PUT || s->op == DQ_OP_EXPORT;

	if (rc)
		return rc;
	if (needs_mem) {
		m = eng_mem_at(e, s->mem);
		if (!m || m->client != c->id || m->dead || s->offset > m->bytes || s->bytes > m->bytes - s->offset)
			return DQ_ERR_INVALID;
		if (s->op == DQ_OP_EXPORT && m->staging)
			return DQ_ERR_INVALID;
		if (s->op == DQ_OP_RECV || s->op == DQ_OP_EXPORT) {
			/* What a peer writes into must have one key: memory registered in pieces has none for all of it. */
			const struct eng_vc *vc = eng_vc_of(f->vc);
			struct dq_mem_key key;
			if (e->devices[vc->device].provider->mem_key(m->on[vc->device], s->offset, s->bytes, &key))
				return DQ_ERR_TOO_LONG;
		}
		op.mem = (uint64_t)s->mem + 1;
		eng_mem_ref(e, s->mem);
	}
	eng_vc_touch(e, eng_vc_of(f->vc));
	switch (s->op) {
	case DQ_OP_SEND: rc = dq_vc_send(f->vc, &op, e->now_ns); break;
	case DQ_OP_RECV: rc = dq_vc_recv(f->vc, &op, e->now_ns); break;
	case DQ_OP_PUT: rc = dq_vc_put(f->vc, &op, e->now_ns); break;
	case DQ_OP_NOTIFY: rc = dq_vc_notify(f->vc, &op, e->now_ns); break;
	case DQ_OP_EXPORT: rc = dq_vc_export(f->vc, &op, e->now_ns); break;
	default: rc = dq_vc_unexport(f->vc, &op, e->now_ns); break;
	}
	if (rc && needs_mem)
		eng_mem_unref(e, s->mem);
	return rc;
}

/*
 * What was received on the flow before is pushed in front of what a GPU reads next, by a read of the device that wrote it: the one
 * of its VC. The read is waited for; it is answered by this host's own bus, within a microsecond or two.
 */
static int32_t flush(struct dq_engine *e, struct eng_client *c, const struct dq_submission *s)
{
	struct dq_flow *f;
	int32_t rc = flow_of(e, c, s->flow, &f);
	const struct eng_mem *m = eng_mem_at(e, s->mem);
	const struct eng_device *d;
	int error;

	if (rc)
		return rc;
	if (!m || m->client != c->id || m->dead || m->staging || s->offset >= m->bytes)
		return DQ_ERR_INVALID;
	d = &e->devices[eng_vc_of(f->vc)->device];
	error = d->provider->mem_flush(m->on[eng_vc_of(f->vc)->device], s->offset);
	if (error) {
		struct dq_engine_event ev = { .type = DQ_EV_LOG, .status = DQ_ERR_DEVICE, .client = c->id };
		snprintf(ev.text, sizeof ev.text, "device %s: the read that orders what it wrote for client %s before the reads of a GPU failed: "
			 "%s", d->name, c->name, strerror(-error));
		eng_event(e, &ev);
		return DQ_ERR_DEVICE;
	}
	return DQ_OK;
}

void eng_flow_close(struct dq_engine *e, uint32_t flow, int32_t reason)
{
	struct dq_flow *f = dq_flow_at(&e->pools, flow);
	struct eng_vc *vc = f->vc ? eng_vc_of(f->vc) : NULL;
	if (vc) {
		eng_vc_touch(e, vc);
		dq_flow_close(&e->pools, &eng_vc_ops, vc, flow, reason, e->now_ns);
	} else { /* its VC failed before: only the id was kept for its client */
		eng_flow_gone(e, flow);
		dq_slab_free(&e->pools.flows, flow);
	}
}

static void close_flow(struct dq_engine *e, struct eng_client *c, const struct dq_submission *s)
{
	struct dq_flow *f = dq_flow_at(&e->pools, s->flow);
	bool ok = f && f->client == c->id && !f->local_closed && (f->state == DQ_FLOW_OPEN || f->state == DQ_FLOW_FAILED);
	if (ok)
		eng_flow_close(e, s->flow, DQ_ERR_CLOSED);
	eng_client_fail_request(e, c, s->request, ok ? DQ_OK : DQ_ERR_INVALID);
}

static void submission(struct dq_engine *e, struct eng_client *c, const struct dq_submission *s, const struct dq_handle *h)
{
	int32_t rc;
	c->inflight++;
	switch (s->op) {
	case DQ_OP_SEND:
	case DQ_OP_RECV:
	case DQ_OP_PUT:
	case DQ_OP_NOTIFY:
	case DQ_OP_EXPORT:
	case DQ_OP_UNEXPORT:
		rc = operate(e, c, s);
		if (rc)
			eng_client_fail_request(e, c, s->request, rc);
		return;
	case DQ_OP_FLUSH: eng_client_fail_request(e, c, s->request, flush(e, c, s)); return;
	case DQ_OP_LISTEN: eng_listen(e, c, s); return;
	case DQ_OP_UNLISTEN: eng_unlisten(e, c, s); return;
	case DQ_OP_ACCEPT: eng_accept(e, c, s); return;
	case DQ_OP_CONNECT: eng_connect(e, c, s, h); return;
	case DQ_OP_CLOSE: close_flow(e, c, s); return;
	default:
		eng_client_cut(e, c, "operation %u is not one of layout version %u", s->op, DQ_LAYOUT_VERSION);
	}
}

bool eng_client_poll(struct dq_engine *e, struct eng_client *c)
{
	uint32_t budget = ENG_SQ_BUDGET;
	int64_t avail = dq_ring_avail(&c->sq);
	bool work = false;

	while (budget-- && !c->dying) {
		struct dq_submission s;
		struct dq_handle h;
		uint32_t used = 1;
		int64_t room;
		if (avail < 0) {
			eng_client_cut(e, c, "its submission index is impossible");
			return true;
		}
		if (avail == 0 && (avail = dq_ring_avail(&c->sq)) <= 0) {
			if (avail < 0)
				continue; /* to the check above */
			return work;
		}
		/* Completions already produced and not consumed, plus those owed, must fit. */
		room = dq_ring_space(&c->cq, c->inflight + 1);
		if (room < 0) {
			eng_client_cut(e, c, "its completion index is impossible");
			return true;
		}
		if (room < (int64_t)c->inflight + 1)
			return work; /* until the client takes completions; it has been told of them */
		dq_ring_read(&c->sq, 0, &s);
		if (s.op == DQ_OP_CONNECT) {
			used = DQ_CONNECT_ENTRIES;
			if (dq_ring_refresh(&c->sq) < (int64_t)used) {
				eng_client_cut(e, c, "CONNECT without its handle");
				return true;
			}
			dq_ring_read(&c->sq, 1, &h);
			dq_ring_read(&c->sq, 2, (uint8_t *)&h + DQ_RING_ENTRY_BYTES);
		}
		dq_ring_consume(&c->sq, used);
		work = true;
		submission(e, c, &s, &h);
		avail = c->dying ? 0 : dq_ring_avail(&c->sq);
	}
	return work;
}

bool eng_client_poll_all(struct dq_engine *e)
{
	bool work = false;
	for (uint32_t i = 0; i < e->clients.capacity; i++) {
		struct eng_client *c = eng_client_at(e, i);
		if (c && !c->dying)
			work |= eng_client_poll(e, c);
	}
	return work;
}

void eng_client_asleep(struct dq_engine *e, bool asleep)
{
	for (uint32_t i = 0; i < e->clients.capacity; i++) {
		struct eng_client *c = eng_client_at(e, i);
		if (c && !c->dying)
			atomic_store_explicit(&c->control->engine_asleep, asleep, memory_order_relaxed);
	}
}

bool eng_client_pending(struct dq_engine *e)
{
	for (uint32_t i = 0; i < e->clients.capacity; i++) {
		struct eng_client *c = eng_client_at(e, i);
		/* Submissions that wait for room in the completion ring are no work: the client's next submission wakes us. */
		if (c && !c->dying && dq_ring_refresh(&c->sq) != 0 && dq_ring_space(&c->cq, c->inflight + 1) >= (int64_t)c->inflight + 1)
			return true;
	}
	return false;
}

/* --- the end of a client --------------------------------------------------------------------------------------------- */

void eng_client_cut(struct dq_engine *e, struct eng_client *c, const char *fmt, ...)
{
	struct dq_engine_event ev = { .type = DQ_EV_CLIENT_CUT, .client = c->id };
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(ev.text, sizeof ev.text, fmt, ap);
	va_end(ap);
	memcpy(c->control->closed_text, ev.text, sizeof c->control->closed_text - 1);
	c->control->closed_text[sizeof c->control->closed_text - 1] = 0;
	atomic_store_explicit(&c->control->closed, (uint32_t)-DQ_ERR_DAEMON, memory_order_release);
	atomic_store_explicit(&c->control->client_waiting, 1, memory_order_relaxed); /* it may be asleep: wake it in any case */
	wake(c);
	e->clients_cut += !e->parted;
	eng_event(e, &ev);
	eng_client_leave(e, c);
}

void eng_client_leave(struct dq_engine *e, struct eng_client *c)
{
	uint32_t next;
	if (c->dying)
		return;
	c->dying = true;
	c->flow_count++; /* keeps it alive over the loops below */
	eng_connections_of_client_gone(e, c);
	for (uint32_t f = c->flows_head; f != DQ_NONE; f = next) {
		next = dq_flow_at(&e->pools, f)->user_next;
		eng_flow_close(e, f, DQ_ERR_PEER_GONE);
	}
	for (uint32_t m = c->mems_head; m != DQ_NONE; m = next) {
		next = eng_mem_at(e, m)->next;
		eng_mem_kill(e, m);
	}
	c->flow_count--;
	eng_client_settle(e, c);
}

void eng_client_settle(struct dq_engine *e, struct eng_client *c)
{
	struct dq_engine_event ev = { .type = DQ_EV_CLIENT_GONE, .client = c->id };
	uint32_t id = c->id;
	if (!c->dying || c->flow_count || c->mem_count)
		return;
	epoll_ctl(e->epoll_fd, EPOLL_CTL_DEL, c->eventfd, NULL);
	munmap(c->map, c->map_bytes);
	e->mem_bytes -= c->map_bytes;
	close(c->memfd);
	close(c->eventfd);
	dq_slab_free(&e->clients, id);
	eng_event(e, &ev);
}

void eng_client_add_flow(struct dq_engine *e, struct eng_client *c, uint32_t flow)
{
	struct dq_flow *f = dq_flow_at(&e->pools, flow);
	f->user_prev = DQ_NONE;
	f->user_next = c->flows_head;
	if (f->user_next != DQ_NONE)
		dq_flow_at(&e->pools, f->user_next)->user_prev = flow;
	c->flows_head = flow;
	c->flow_count++;
}

/* --- from the control plane ------------------------------------------------------------------------------------------ */

struct client_args {
	const char *name;
	uint32_t entries;
	uint64_t max_mem;
	uint32_t max_flows;
	uint32_t client, *id;
	int memfd, eventfd;     /* the engine's own */
	uint8_t *map;
	size_t bytes;
	uint8_t *handle;
	struct dq_client_stats *stats;
	struct dq_text *err;
	int rc;
};

static void client_add(struct dq_engine *e, void *arg)
{
	struct client_args *a = arg;
	struct epoll_event ev = { .events = EPOLLIN | EPOLLET };
	struct eng_client *c;
	uint32_t id;
	if (a->bytes > a->max_mem) {
		a->rc = eng_error(a->err, -EDQUOT, "client %s: rings of %u entries take %zu bytes, its quota is %llu: ask for a smaller "
				  "ring, or raise clients.max_memory_bytes", a->name, a->entries, a->bytes, (unsigned long long)a->max_mem);
		return;
	}
	id = dq_slab_alloc(&e->clients);
	if (id == DQ_NONE) {
		a->rc = eng_error(a->err, -EUSERS, "client %s: %u clients are attached already: raise clients.max_clients", a->name, e->clients.limit);
		return;
	}
	c = eng_client_at(e, id);
	c->id = id;
	snprintf(c->name, sizeof c->name, "%s", a->name);
	c->memfd = a->memfd;
	c->eventfd = a->eventfd;
	c->map = a->map;
	c->map_bytes = a->bytes;
	c->entries = a->entries;
	c->max_mem_bytes = a->max_mem;
	c->max_flows = a->max_flows;
	c->flows_head = c->mems_head = c->listeners_head = DQ_NONE;
	c->control = (struct dq_control *)(void *)(a->map + DQ_CONTROL_OFFSET);
	dq_ring_init(&c->sq, (struct dq_ring_shared *)(void *)(a->map + DQ_SQ_OFFSET), a->map + DQ_SQ_OFFSET + sizeof(struct dq_ring_shared),
		     a->entries);
	dq_ring_init(&c->cq, (struct dq_ring_shared *)(void *)(a->map + dq_layout_cq_offset(a->entries)),
		     a->map + dq_layout_cq_offset(a->entries) + sizeof(struct dq_ring_shared), a->entries);
	c->control->magic = DQ_LAYOUT_MAGIC;
	c->control->version = DQ_LAYOUT_VERSION;
	c->control->entries = a->entries;
	ev.data.u64 = (uint64_t)WATCH_CLIENT << 32 | id;
	if (epoll_ctl(e->epoll_fd, EPOLL_CTL_ADD, a->eventfd, &ev)) {
		a->rc = eng_error(a->err, -errno, "client %s: cannot watch its eventfd: %s", a->name, strerror(errno));
		dq_slab_free(&e->clients, id);
		return;
	}
	c->mem_bytes = a->bytes;
	e->mem_bytes += a->bytes;
	*a->id = id;
}

int dq_engine_client_add(dq_engine *e, const char *name, uint32_t ring_entries, uint64_t max_memory_bytes, uint32_t max_flows,
			 uint32_t *client, int *memfd, int *event_fd, uint64_t *memfd_bytes, struct dq_text *err)
{
	struct client_args a = { .name = name, .entries = ring_entries ? ring_entries : DQ_RING_ENTRIES_DEFAULT, .max_mem = max_memory_bytes,
				 .max_flows = max_flows, .id = client, .memfd = -1, .eventfd = -1, .err = err };
	int out_mem = -1, out_event = -1, rc = 0;

	if (a.entries < DQ_RING_ENTRIES_MIN || a.entries > DQ_RING_ENTRIES_MAX || (a.entries & (a.entries - 1)))
		return eng_error(err, -EINVAL, "client %s: ring of %u entries asked for; a power of two from %u to %u is expected", name, a.entries,
				 DQ_RING_ENTRIES_MIN, DQ_RING_ENTRIES_MAX);
	a.bytes = dq_layout_bytes(a.entries);
	a.memfd = memfd_create("dqplb-rings", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	a.eventfd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	if (a.memfd < 0 || a.eventfd < 0 || ftruncate(a.memfd, (off_t)a.bytes) || fallocate(a.memfd, 0, 0, (off_t)a.bytes) ||
	    fcntl(a.memfd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
		rc = -errno;
	if (!rc) {
		a.map = mmap(NULL, a.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, a.memfd, 0);
		if (a.map == MAP_FAILED) {
			a.map = NULL;
			rc = -errno;
		} else {
			(void)madvise(a.map, a.bytes, MADV_DONTFORK);
		}
	}
	if (!rc && ((out_mem = fcntl(a.memfd, F_DUPFD_CLOEXEC, 0)) < 0 || (out_event = fcntl(a.eventfd, F_DUPFD_CLOEXEC, 0)) < 0))
		rc = -errno;
	if (rc)
		eng_error(err, rc, "client %s: cannot make its rings: %s", name, strerror(-rc));
	else if (!(rc = eng_call(e, client_add, &a)))
		rc = a.rc;
	if (rc) {
		if (a.map)
			munmap(a.map, a.bytes);
		int fds[] = { a.memfd, a.eventfd, out_mem, out_event };
		for (unsigned i = 0; i < 4; i++)
			if (fds[i] >= 0)
				close(fds[i]);
		return rc;
	}
	*memfd = out_mem;
	*event_fd = out_event;
	*memfd_bytes = a.bytes;
	return 0;
}

static void client_remove(struct dq_engine *e, void *arg)
{
	struct client_args *a = arg;
	struct eng_client *c = eng_client_at(e, a->client);
	a->rc = c ? 0 : -ENOENT;
	if (c)
		eng_client_leave(e, c);
}

int dq_engine_client_remove(dq_engine *e, uint32_t client)
{
	struct client_args a = { .client = client };
	int rc = eng_call(e, client_remove, &a);
	return rc ? rc : a.rc;
}

static void client_handle(struct dq_engine *e, void *arg)
{
	struct client_args *a = arg;
	struct dq_handle h = { .magic = DQ_HANDLE_MAGIC, .version = DQ_HANDLE_VERSION, .epoch = e->config.epoch, .client = a->client,
			       .family = e->config.api_family, .port = e->config.api_port, .scope = e->config.api_scope };
	a->rc = eng_client_at(e, a->client) ? 0 : -ENOENT;
	memcpy(h.address, e->config.api_address, sizeof h.address);
	memcpy(h.host_id, e->config.host_id, sizeof h.host_id);
	memcpy(a->handle, &h, sizeof h);
}

int dq_engine_client_handle(dq_engine *e, uint32_t client, uint8_t *handle)
{
	struct client_args a = { .client = client, .handle = handle };
	int rc = eng_call(e, client_handle, &a);
	return rc ? rc : a.rc;
}

static void client_stats(struct dq_engine *e, void *arg)
{
	struct client_args *a = arg;
	struct eng_client *c = eng_client_at(e, a->client);
	a->rc = c ? 0 : -ENOENT;
	if (!c)
		return;
	*a->stats = (struct dq_client_stats){ .flows = c->flow_count, .listeners = c->listener_count, .memory_regions = c->mem_count,
		.requests = c->inflight, .memory_bytes = c->mem_bytes, .staging_bytes = c->staging_bytes, .tx_bytes = c->tx_bytes,
		.rx_bytes = c->rx_bytes, .tx_messages = c->tx_messages, .rx_messages = c->rx_messages };
	memcpy(a->stats->name, c->name, sizeof c->name);
	for (uint32_t f = c->flows_head; f != DQ_NONE; f = dq_flow_at(&e->pools, f)->user_next)
		a->stats->slots += dq_flow_at(&e->pools, f)->slots[0] + dq_flow_at(&e->pools, f)->slots[1];
}

int dq_engine_client_stats(dq_engine *e, uint32_t client, struct dq_client_stats *out)
{
	struct client_args a = { .client = client, .stats = out };
	int rc;
	memset(out, 0, sizeof *out);
	rc = eng_call(e, client_stats, &a);
	return rc ? rc : a.rc;
}
