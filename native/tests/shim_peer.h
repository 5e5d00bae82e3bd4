/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The other side of the shim, for its tests: listens on a real SEQPACKET socket, hands out real memfds, and serves the rings in
 * one thread, matching sends and receives of its clients in memory. It knows the layout and nothing of the shim's sources.
 *
 * Knobs are atomics that the test sets, with peer_poke() after; what happened is in counters. One header, included by one test.
 */
#ifndef DQ_TESTS_SHIM_PEER_H
#define DQ_TESTS_SHIM_PEER_H

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "shim/layout.h"

#define PEER_CLIENTS 8
#define PEER_MEMS 64
#define PEER_FLOWS 1024
#define PEER_LISTENERS 8
#define PEER_REGIONS 16
#define PEER_PUTS 8
#define PEER_OPS 4096
#define PEER_EPOCH 0x1122334455667788u

struct peer_flow {
	bool open;
	int client;
	struct peer_flow *other;
	struct dq_completion puts[PEER_PUTS]; /* arrived, not yet notified */
	int put_count;
};

struct peer_mem {
	uint8_t *base; /* NULL: unused */
	uint64_t bytes;
	bool staging;
	bool alias;    /* of another client's: not to be unmapped here */
};

struct peer_client {
	bool used, dead;
	int sock, eventfd;
	uint8_t *base;
	struct dq_control *control;
	size_t map_bytes;
	struct dq_ring sq, cq;
	struct peer_mem mems[PEER_MEMS];
	struct {
		uint32_t id; /* 0: unused */
		uint64_t nonce[2];
	} listeners[PEER_LISTENERS];
	struct {
		struct peer_flow *flow; /* of the exporter; NULL: unused */
		uint32_t mem;
		uint64_t offset, bytes;
	} regions[PEER_REGIONS];
	struct dq_submission ops[PEER_OPS]; /* what waits for something, oldest first */
	uint32_t op_count;
	bool produced;
	char name[64];
};

struct peer {
	char dir[64], path[108];
	int listener, wake;
	pthread_t thread;
	pthread_mutex_t lock;

	_Atomic bool stop;
	_Atomic bool kill;            /* close every socket without a word */
	_Atomic bool hold;            /* take nothing from the rings */
	_Atomic bool hold_staging;    /* do not answer requests for staging memory */
	_Atomic bool refuse_version;
	_Atomic bool lower_flag;      /* lower client_waiting when waking, and wake one thread only, as an engine may */
	_Atomic int refuse_listen;    /* status for LISTEN */
	_Atomic uint64_t quota;       /* bytes of memory; 0: no limit */

	_Atomic uint32_t flushes, hint_peers, hint_flows;
	_Atomic uint32_t wakes, event_wakes, gone, staging_chunks, mems, flows_open, closes, taken, mem_frees;
	_Atomic uint32_t pokes_seen, pokes;
	uint64_t used_bytes;
	uint16_t held_type;           /* a staging request that waits for hold_staging to end */
	int held_client;
	struct dq_client_request held;
	struct peer_client clients[PEER_CLIENTS];
	struct peer_flow flows[PEER_FLOWS];
};

static void peer_die(const char *what)
{
	fprintf(stderr, "peer: %s: %s\n", what, strerror(errno));
	abort();
}

/* --- completions --- */

static void peer_complete(struct peer_client *c, const struct dq_completion *done)
{
	if (dq_ring_space(&c->cq, 1) < 1)
		peer_die("no place for a completion: the client has more outstanding than its ring holds");
	dq_ring_write(&c->cq, 0, done);
	dq_ring_produce(&c->cq, 1);
	c->produced = true;
}

static void peer_status(struct peer_client *c, const struct dq_submission *s, int status)
{
	struct dq_completion done = {.request = s->request, .status = status};

	peer_complete(c, &done);
}

static void peer_remove_op(struct peer_client *c, uint32_t i)
{
	memmove(&c->ops[i], &c->ops[i + 1], (c->op_count - i - 1) * sizeof c->ops[0]);
	c->op_count--;
}

static void peer_keep_op(struct peer_client *c, const struct dq_submission *s)
{
	if (c->op_count == PEER_OPS)
		peer_die("too many operations");
	c->ops[c->op_count++] = *s;
}

/* --- operations --- */

static uint32_t peer_flow_id(struct peer *p, const struct peer_flow *f)
{
	return (uint32_t)(f - p->flows) + 1;
}

static struct peer_flow *peer_flow_of(struct peer *p, int client, uint32_t id)
{
	struct peer_flow *f = id >= 1 && id <= PEER_FLOWS ? &p->flows[id - 1] : NULL;

	return f && f->open && f->client == client ? f : NULL;
}

static uint8_t *peer_range(struct peer_client *c, uint32_t mem, uint64_t offset, uint64_t bytes)
{
	struct peer_mem *m = mem < PEER_MEMS ? &c->mems[mem] : NULL;

	return m && m->base && offset <= m->bytes && bytes <= m->bytes - offset ? m->base + offset : NULL;
}

static struct peer_flow *peer_new_flow(struct peer *p, int client)
{
	for (int i = 0; i < PEER_FLOWS; i++)
		if (!p->flows[i].open) {
			memset(&p->flows[i], 0, sizeof p->flows[i]);
			p->flows[i].open = true;
			p->flows[i].client = client;
			p->flows_open++;
			return &p->flows[i];
		}
	peer_die("too many flows");
	return NULL;
}

static int peer_find_op(struct peer_client *c, uint16_t op, uint32_t flow, const uint64_t *tag)
{
	for (uint32_t i = 0; i < c->op_count; i++)
		if (c->ops[i].op == op && c->ops[i].flow == flow && (!tag || c->ops[i].tag == *tag))
			return (int)i;
	return -1;
}

static void peer_deliver(struct peer_client *from, const struct dq_submission *send, struct peer_client *to,
			 const struct dq_submission *recv)
{
	struct dq_completion sent = {.request = send->request};
	struct dq_completion got = {.request = recv->request, .bytes = send->bytes, .tag = recv->tag};
	uint8_t *s = peer_range(from, send->mem, send->offset, send->bytes);
	uint8_t *d = peer_range(to, recv->mem, recv->offset, recv->bytes);

	if (!s || !d)
		sent.status = got.status = DQ_ERR_INVALID;
	else if (send->bytes > recv->bytes)
		sent.status = got.status = DQ_ERR_TOO_LONG;
	else
		memcpy(d, s, send->bytes);
	peer_complete(from, &sent);
	peer_complete(to, &got);
}

static void peer_notify(struct peer *p, struct peer_flow *f)
{
	struct peer_client *c = &p->clients[f->client];
	int i;

	while (f->put_count && (i = peer_find_op(c, DQ_OP_NOTIFY, peer_flow_id(p, f), NULL)) >= 0) {
		f->puts[0].request = c->ops[i].request;
		peer_complete(c, &f->puts[0]);
		memmove(&f->puts[0], &f->puts[1], sizeof f->puts[0] * (size_t)--f->put_count);
		peer_remove_op(c, (uint32_t)i);
	}
}

static void peer_put(struct peer *p, struct peer_client *c, struct peer_flow *f, const struct dq_submission *s)
{
	struct peer_client *to = &p->clients[f->other->client];
	uint8_t *from = peer_range(c, s->mem, s->offset, s->bytes), *at = NULL;

	if (s->region < PEER_REGIONS && to->regions[s->region].flow == f->other &&
	    s->remote_offset <= to->regions[s->region].bytes && s->bytes <= to->regions[s->region].bytes - s->remote_offset)
		at = peer_range(to, to->regions[s->region].mem, to->regions[s->region].offset + s->remote_offset, s->bytes);
	if (!from || !at || f->other->put_count == PEER_PUTS) {
		peer_status(c, s, DQ_ERR_REGION);
		return;
	}
	memcpy(at, from, s->bytes);
	f->other->puts[f->other->put_count++] = (struct dq_completion){
		.bytes = s->bytes, .tag = s->tag, .offset = s->remote_offset, .region = s->region,
	};
	peer_status(c, s, DQ_OK);
	peer_notify(p, f->other);
}

static void peer_close_flow(struct peer *p, struct peer_flow *f, int status_other)
{
	struct peer_client *c = &p->clients[f->client];
	uint32_t id = peer_flow_id(p, f);

	for (uint32_t i = 0; i < c->op_count;) {
		if (c->ops[i].op != DQ_OP_ACCEPT && c->ops[i].flow == id) {
			if (!c->dead)
				peer_status(c, &c->ops[i], DQ_ERR_CANCELED);
			peer_remove_op(c, i);
		} else {
			i++;
		}
	}
	if (f->other) {
		struct peer_client *o = &p->clients[f->other->client];
		uint32_t other = peer_flow_id(p, f->other);

		for (uint32_t i = 0; i < o->op_count;) {
			if (o->ops[i].op != DQ_OP_ACCEPT && o->ops[i].flow == other) {
				peer_status(o, &o->ops[i], status_other);
				peer_remove_op(o, i);
			} else {
				i++;
			}
		}
		f->other->other = NULL;
	}
	f->open = false;
	p->flows_open--;
}

static void peer_opened(struct peer_client *c, uint64_t request, uint32_t flow)
{
	struct dq_completion_opened opened = {.request = request, .flow = flow, .device = 1, .path_class = DQ_CLASS_ZONE};
	struct dq_completion done;

	/* As long as it can be, and as a daemon that forgets the end would send it. */
	memset(opened.peer, 'h', sizeof opened.peer);
	memcpy(&done, &opened, sizeof done);
	peer_complete(c, &done);
}

static bool peer_client_ring(struct peer *p, int client);

static void peer_connect(struct peer *p, int client, const struct dq_submission *s, const struct dq_handle *h)
{
	struct peer_client *c = &p->clients[client], *to = h->client < PEER_CLIENTS ? &p->clients[h->client] : NULL;
	uint64_t nonce[2];
	int status = DQ_ERR_REFUSED;

	memcpy(nonce, h->nonce, sizeof nonce);
	if (h->epoch != PEER_EPOCH)
		status = DQ_ERR_STALE;
	/* The handle can be here before its LISTEN was taken: look before refusing. */
	if (to && to->control && to != c)
		peer_client_ring(p, (int)h->client);
	for (int i = 0; to && to->used && status == DQ_ERR_REFUSED && i < PEER_LISTENERS; i++)
		if (to->listeners[i].id == h->listener && !memcmp(to->listeners[i].nonce, nonce, sizeof nonce))
			status = DQ_OK;
	if (status == DQ_OK) {
		int i = peer_find_op(to, DQ_OP_ACCEPT, h->listener, NULL);
		if (i < 0) { /* waits for an accept: found again when one comes */
			struct dq_submission kept = *s;
			kept.flow = h->listener;
			kept.region = h->client;
			peer_keep_op(c, &kept);
			return;
		}
		struct peer_flow *a = peer_new_flow(p, client), *b = peer_new_flow(p, (int)h->client);
		a->other = b;
		b->other = a;
		peer_opened(c, s->request, peer_flow_id(p, a));
		peer_opened(to, to->ops[i].request, peer_flow_id(p, b));
		peer_remove_op(to, (uint32_t)i);
		return;
	}
	peer_status(c, s, status);
}

static void peer_accept(struct peer *p, int client, const struct dq_submission *s)
{
	struct peer_client *c = &p->clients[client];

	for (int k = 0; k < PEER_CLIENTS; k++) {
		struct peer_client *from = &p->clients[k];
		for (uint32_t i = 0; from->used && !from->dead && i < from->op_count; i++) {
			if (from->ops[i].op != DQ_OP_CONNECT || from->ops[i].flow != s->flow || from->ops[i].region != (uint32_t)client)
				continue;
			struct peer_flow *a = peer_new_flow(p, k), *b = peer_new_flow(p, client);
			a->other = b;
			b->other = a;
			peer_opened(from, from->ops[i].request, peer_flow_id(p, a));
			peer_opened(c, s->request, peer_flow_id(p, b));
			peer_remove_op(from, i);
			return;
		}
	}
	peer_keep_op(c, s);
}

static void peer_operation(struct peer *p, int client, const struct dq_submission *s, const struct dq_handle *h)
{
	struct peer_client *c = &p->clients[client];
	struct peer_flow *f = NULL;
	int i;

	p->taken++;
	switch (s->op) {
	case DQ_OP_LISTEN:
		if (p->refuse_listen) {
			peer_status(c, s, p->refuse_listen);
			return;
		}
		for (i = 0; i < PEER_LISTENERS && c->listeners[i].id; i++)
			;
		if (i == PEER_LISTENERS)
			peer_die("too many listeners");
		c->listeners[i].id = s->flow;
		c->listeners[i].nonce[0] = s->tag;
		c->listeners[i].nonce[1] = s->remote_offset;
		peer_status(c, s, DQ_OK);
		return;
	case DQ_OP_UNLISTEN:
		for (i = 0; i < PEER_LISTENERS; i++)
			if (c->listeners[i].id == s->flow)
				c->listeners[i].id = 0;
		while ((i = peer_find_op(c, DQ_OP_ACCEPT, s->flow, NULL)) >= 0) {
			peer_status(c, &c->ops[i], DQ_ERR_CANCELED);
			peer_remove_op(c, (uint32_t)i);
		}
		peer_status(c, s, DQ_OK);
		return;
	case DQ_OP_ACCEPT:
		for (i = 0; i < PEER_LISTENERS && c->listeners[i].id != s->flow; i++)
			;
		if (i == PEER_LISTENERS)
			peer_status(c, s, DQ_ERR_REFUSED);
		else
			peer_accept(p, client, s);
		return;
	case DQ_OP_CONNECT:
		peer_connect(p, client, s, h);
		return;
	default:
		break;
	}

	f = peer_flow_of(p, client, s->flow);
	if (!f) {
		peer_status(c, s, DQ_ERR_INVALID);
		return;
	}
	if (s->op == DQ_OP_CLOSE) {
		peer_close_flow(p, f, DQ_ERR_CLOSED);
		p->closes++;
		peer_status(c, s, DQ_OK);
		return;
	}
	if (!f->other) {
		peer_status(c, s, DQ_ERR_CLOSED);
		return;
	}
	struct peer_client *o = &p->clients[f->other->client];
	uint32_t other = peer_flow_id(p, f->other);
	switch (s->op) {
	case DQ_OP_SEND:
		i = peer_find_op(o, DQ_OP_RECV, other, &s->tag);
		if (i < 0) {
			peer_keep_op(c, s);
			break;
		}
		peer_deliver(c, s, o, &o->ops[i]);
		peer_remove_op(o, (uint32_t)i);
		break;
	case DQ_OP_RECV:
		i = peer_find_op(o, DQ_OP_SEND, other, &s->tag);
		if (i < 0) {
			peer_keep_op(c, s);
			break;
		}
		peer_deliver(o, &o->ops[i], c, s);
		peer_remove_op(o, (uint32_t)i);
		break;
	case DQ_OP_PUT:
		peer_put(p, c, f, s);
		break;
	case DQ_OP_NOTIFY:
		peer_keep_op(c, s);
		peer_notify(p, f);
		break;
	case DQ_OP_FLUSH:
		peer_status(c, s, peer_range(c, s->mem, s->offset, 1) ? DQ_OK : DQ_ERR_INVALID);
		p->flushes++;
		break;
	case DQ_OP_EXPORT:
		for (i = 1; i < PEER_REGIONS && c->regions[i].flow; i++)
			;
		if (i == PEER_REGIONS || !peer_range(c, s->mem, s->offset, s->bytes)) {
			peer_status(c, s, DQ_ERR_INVALID);
			break;
		}
		c->regions[i].flow = f;
		c->regions[i].mem = s->mem;
		c->regions[i].offset = s->offset;
		c->regions[i].bytes = s->bytes;
		peer_complete(c, &(struct dq_completion){.request = s->request, .region = (uint32_t)i});
		break;
	case DQ_OP_UNEXPORT:
		if (s->region >= PEER_REGIONS || c->regions[s->region].flow != f) {
			peer_status(c, s, DQ_ERR_REGION);
			break;
		}
		c->regions[s->region].flow = NULL;
		peer_status(c, s, DQ_OK);
		break;
	default:
		peer_die("an operation that does not exist");
	}
}

/* --- the attach socket --- */

static int peer_memfd(uint64_t bytes, uint8_t **base)
{
	int fd = memfd_create("peer", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
		peer_die("memfd");
	*base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (*base == MAP_FAILED || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
		peer_die("mmap");
	return fd;
}

static void peer_reply(struct peer_client *c, struct dq_client_reply *reply, uint16_t type, const void *extra, size_t extra_bytes,
		       const int *fds, int fd_count)
{
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(2 * sizeof(int))];
	} control;
	struct iovec iov[2] = {{reply, sizeof *reply}, {(void *)(uintptr_t)extra, extra_bytes}};
	struct msghdr msg = {.msg_iov = iov, .msg_iovlen = extra_bytes ? 2 : 1};

	reply->magic = DQ_LAYOUT_MAGIC;
	reply->version = 1;
	reply->type = type;
	if (fd_count) {
		memset(&control, 0, sizeof control);
		msg.msg_control = &control;
		msg.msg_controllen = CMSG_SPACE((size_t)fd_count * sizeof(int));
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		control.header.cmsg_len = CMSG_LEN((size_t)fd_count * sizeof(int));
		memcpy(CMSG_DATA(&control.header), fds, (size_t)fd_count * sizeof(int));
	}
	sendmsg(c->sock, &msg, MSG_NOSIGNAL); /* a client that left is noticed by its socket */
}

static void peer_attach(struct peer *p, int client, const struct dq_client_request *q)
{
	struct peer_client *c = &p->clients[client];
	struct dq_client_reply reply = {0};
	struct dq_handle h = {.epoch = PEER_EPOCH, .host_id = "peer"};
	uint32_t entries = (uint32_t)q->arg2;
	int fds[2];

	if (p->refuse_version) {
		reply.status = DQ_ERR_VERSION;
		snprintf(reply.text, sizeof reply.text, "this daemon speaks layout versions 7 to 9");
		peer_reply(c, &reply, DQ_REQ_ATTACH, NULL, 0, NULL, 0);
		return;
	}
	c->map_bytes = dq_layout_bytes(entries);
	fds[0] = peer_memfd(c->map_bytes, &c->base);
	c->eventfd = fds[1] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	c->control = (struct dq_control *)(void *)c->base;
	c->control->magic = DQ_LAYOUT_MAGIC;
	c->control->version = DQ_LAYOUT_VERSION;
	c->control->entries = entries;
	size_t cq = dq_layout_cq_offset(entries);
	dq_ring_init(&c->sq, (struct dq_ring_shared *)(void *)(c->base + DQ_SQ_OFFSET),
		     c->base + DQ_SQ_OFFSET + sizeof(struct dq_ring_shared), entries);
	dq_ring_init(&c->cq, (struct dq_ring_shared *)(void *)(c->base + cq), c->base + cq + sizeof(struct dq_ring_shared), entries);
	memcpy(c->name, q->name, sizeof c->name);
	reply.arg0 = DQ_LAYOUT_VERSION;
	reply.arg1 = (uint64_t)client;
	reply.arg2 = entries;
	reply.arg3 = c->map_bytes;
	memcpy(reply.handle, &h, sizeof h);
	peer_reply(c, &reply, DQ_REQ_ATTACH, NULL, 0, fds, 2);
	close(fds[0]);
}

static void peer_alloc(struct peer *p, int client, const struct dq_client_request *q)
{
	struct peer_client *c = &p->clients[client];
	struct dq_client_reply reply = {0};
	uint64_t bytes = (q->arg0 + 4095) & ~(uint64_t)4095;
	uint32_t id = 0;
	int fd;

	while (id < PEER_MEMS && c->mems[id].base)
		id++;
	if (id == PEER_MEMS || (p->quota && p->used_bytes + bytes > p->quota)) {
		reply.status = DQ_ERR_NOMEM;
		snprintf(reply.text, sizeof reply.text, "%llu bytes exceed the quota of %llu", (unsigned long long)bytes,
			 (unsigned long long)p->quota);
		peer_reply(c, &reply, DQ_REQ_MEM_ALLOC, NULL, 0, NULL, 0);
		return;
	}
	fd = peer_memfd(bytes, &c->mems[id].base);
	c->mems[id].bytes = bytes;
	c->mems[id].staging = q->arg1 == 1;
	p->used_bytes += bytes;
	p->mems++;
	p->staging_chunks += c->mems[id].staging;
	reply.arg0 = id;
	reply.arg1 = bytes;
	peer_reply(c, &reply, DQ_REQ_MEM_ALLOC, NULL, 0, &fd, 1);
	close(fd);
}

/* The owner must outlive it: nothing is mapped a second time. */
static void peer_share(struct peer *p, int client, const struct dq_client_request *q)
{
	struct peer_client *c = &p->clients[client];
	const struct peer_mem *m = q->arg0 < PEER_CLIENTS && q->arg1 < PEER_MEMS ? &p->clients[q->arg0].mems[q->arg1] : NULL;
	struct dq_client_reply reply = {0};
	uint32_t id = 0;

	while (id < PEER_MEMS && c->mems[id].base)
		id++;
	if (!m || !m->base || m->staging || id == PEER_MEMS) {
		reply.status = DQ_ERR_PERMISSION;
		snprintf(reply.text, sizeof reply.text, "no such memory");
	} else {
		c->mems[id] = (struct peer_mem){.base = m->base, .bytes = m->bytes, .alias = true};
		p->mems++;
		reply.arg0 = id;
		reply.arg1 = m->bytes;
	}
	peer_reply(c, &reply, DQ_REQ_MEM_SHARE, NULL, 0, NULL, 0);
}

static void peer_drop_mem(struct peer *p, struct peer_mem *m)
{
	if (!m->alias) {
		munmap(m->base, m->bytes);
		p->used_bytes -= m->bytes;
	}
	p->staging_chunks -= m->staging;
	p->mems--;
	memset(m, 0, sizeof *m);
}

static void peer_free(struct peer *p, int client, const struct dq_client_request *q)
{
	struct peer_client *c = &p->clients[client];
	struct dq_client_reply reply = {0};

	if (q->arg0 >= PEER_MEMS || !c->mems[q->arg0].base) {
		reply.status = DQ_ERR_INVALID;
		snprintf(reply.text, sizeof reply.text, "no memory with id %llu", (unsigned long long)q->arg0);
	} else {
		for (uint32_t i = 0; i < c->op_count;) {
			struct dq_submission *s = &c->ops[i];
			if ((s->op == DQ_OP_SEND || s->op == DQ_OP_RECV) && s->mem == q->arg0) {
				peer_status(c, s, DQ_ERR_CANCELED);
				peer_remove_op(c, i);
			} else {
				i++;
			}
		}
		peer_drop_mem(p, &c->mems[q->arg0]);
		p->mem_frees++;
	}
	peer_reply(c, &reply, DQ_REQ_MEM_FREE, NULL, 0, NULL, 0);
}

static void peer_leave(struct peer *p, int client)
{
	struct peer_client *c = &p->clients[client];

	close(c->sock);
	c->sock = -1;
	c->dead = true;
	for (int i = 0; i < PEER_FLOWS; i++)
		if (p->flows[i].open && p->flows[i].client == client)
			peer_close_flow(p, &p->flows[i], DQ_ERR_PEER_GONE);
	for (int i = 0; i < PEER_MEMS; i++)
		if (c->mems[i].base)
			peer_drop_mem(p, &c->mems[i]);
	memset(c->listeners, 0, sizeof c->listeners);
	p->gone++; /* last: the test waits for it, then looks */
}

static void peer_request(struct peer *p, int client)
{
	static const struct dq_device_info devices[2] = {
		{.name = "peer0", .provider = "tcp", .speed_bps = 10000000000u, .latency_ns = 1234, .rail = 3, .numa_node = -1, .mtu = 1500, .up = 1,
		 .port = 2},
		{.name = "peer1", .provider = "tcp", .speed_bps = 25000000000u, .rail = 4, .numa_node = 0, .mtu = 9000, .up = 0},
	};
	struct peer_client *c = &p->clients[client];
	struct dq_client_reply reply = {0};
	struct dq_client_request q;
	ssize_t n = recv(c->sock, &q, sizeof q, MSG_DONTWAIT);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		peer_leave(p, client);
		return;
	}
	if (n != sizeof q || q.magic != DQ_LAYOUT_MAGIC || q.version != 1)
		peer_die("a request that is none");
	switch (q.type) {
	case DQ_REQ_ATTACH:
		peer_attach(p, client, &q);
		break;
	case DQ_REQ_DEVICES:
		reply.arg0 = 2;
		reply.arg1 = PEER_FLOWS;
		peer_reply(c, &reply, DQ_REQ_DEVICES, devices, sizeof devices, NULL, 0);
		break;
	case DQ_REQ_MEM_ALLOC:
		if (q.arg1 == 1 && p->hold_staging) {
			p->held = q;
			p->held_type = q.type;
			p->held_client = client;
			break;
		}
		peer_alloc(p, client, &q);
		break;
	case DQ_REQ_MEM_FREE:
		peer_free(p, client, &q);
		break;
	case DQ_REQ_MEM_SHARE:
		peer_share(p, client, &q);
		break;
	case DQ_REQ_HINT:
		p->hint_flows = (uint32_t)q.arg1;
		p->hint_peers = (uint32_t)q.arg0;
		peer_reply(c, &reply, DQ_REQ_HINT, NULL, 0, NULL, 0);
		break;
	default:
		reply.status = DQ_ERR_DEVICE;
		snprintf(reply.text, sizeof reply.text, "no device here can do that");
		peer_reply(c, &reply, q.type, NULL, 0, NULL, 0);
	}
}

/* --- the thread --- */

static bool peer_client_ring(struct peer *p, int client)
{
	struct peer_client *c = &p->clients[client];
	bool worked = false;
	int64_t n;

	while (c->control && !c->dead && (n = dq_ring_refresh(&c->sq)) > 0) {
		struct dq_submission s;
		struct dq_handle h;
		uint32_t used = 1;

		dq_ring_read(&c->sq, 0, &s);
		if (s.op == DQ_OP_CONNECT) {
			used = DQ_CONNECT_ENTRIES;
			if (n < (int64_t)used)
				peer_die("a connect without its handle");
			dq_ring_read(&c->sq, 1, &h);
			dq_ring_read(&c->sq, 2, (uint8_t *)&h + DQ_RING_ENTRY_BYTES);
		}
		dq_ring_consume(&c->sq, used);
		peer_operation(p, client, &s, &h);
		worked = true;
	}
	return worked;
}

static bool peer_rings(struct peer *p)
{
	bool worked = false;

	for (int k = 0; k < PEER_CLIENTS && !p->hold && !p->kill; k++)
		worked |= peer_client_ring(p, k);
	return worked;
}

static void peer_wake_clients(struct peer *p)
{
	for (int k = 0; k < PEER_CLIENTS; k++) {
		struct peer_client *c = &p->clients[k];

		if (!c->produced || !c->control)
			continue;
		c->produced = false;
		dq_ring_fence();
		if (!atomic_load(&c->control->client_waiting))
			continue;
		if (p->lower_flag)
			atomic_store(&c->control->client_waiting, 0);
		atomic_fetch_add(&c->control->wake, 1);
		p->wakes++;
		syscall(SYS_futex, &c->control->wake, FUTEX_WAKE, p->lower_flag ? 1 : INT_MAX, NULL, NULL, 0);
	}
}

static void peer_asleep(struct peer *p, uint32_t value)
{
	for (int k = 0; k < PEER_CLIENTS; k++)
		if (p->clients[k].control)
			atomic_store(&p->clients[k].control->engine_asleep, value);
	dq_ring_fence();
}

static void peer_adopt(struct peer *p)
{
	int fd = accept4(p->listener, NULL, NULL, SOCK_CLOEXEC);

	if (fd < 0)
		return;
	for (int k = 0; k < PEER_CLIENTS; k++)
		if (!p->clients[k].used) {
			p->clients[k].used = true;
			p->clients[k].sock = fd;
			p->clients[k].eventfd = -1;
			return;
		}
	peer_die("too many clients");
}

static void *peer_run(void *arg)
{
	struct peer *p = arg;

	pthread_mutex_lock(&p->lock); /* free while it sleeps: then the test may look and inject */
	while (!p->stop) {
		struct pollfd fds[2 + 2 * PEER_CLIENTS];
		uint64_t ignored;
		bool worked;
		int ready;

		p->pokes_seen = p->pokes;
		if (p->kill) {
			for (int k = 0; k < PEER_CLIENTS; k++)
				if (p->clients[k].used && p->clients[k].sock >= 0) {
					close(p->clients[k].sock);
					p->clients[k].sock = -1;
				}
		}
		if (p->held_type && !p->hold_staging) {
			p->held_type = 0;
			peer_alloc(p, p->held_client, &p->held);
		}
		worked = peer_rings(p);
		peer_wake_clients(p);
		if (!worked) {
			peer_asleep(p, 1);
			if (peer_rings(p)) {
				peer_asleep(p, 0);
				peer_wake_clients(p);
				continue;
			}
		}
		fds[0] = (struct pollfd){.fd = p->listener, .events = POLLIN};
		fds[1] = (struct pollfd){.fd = p->wake, .events = POLLIN};
		for (int k = 0; k < PEER_CLIENTS; k++) {
			bool used = p->clients[k].used && p->clients[k].sock >= 0;
			fds[2 + 2 * k] = (struct pollfd){.fd = used ? p->clients[k].sock : -1, .events = POLLIN};
			fds[3 + 2 * k] = (struct pollfd){.fd = used ? p->clients[k].eventfd : -1, .events = POLLIN};
		}
		pthread_mutex_unlock(&p->lock);
		ready = poll(fds, 2 + 2 * PEER_CLIENTS, worked ? 0 : -1);
		pthread_mutex_lock(&p->lock);
		if (ready < 0 && errno != EINTR)
			peer_die("poll");
		peer_asleep(p, 0);
		if (fds[1].revents && read(p->wake, &ignored, sizeof ignored) < 0 && errno != EAGAIN)
			peer_die("read");
		for (int k = 0; k < PEER_CLIENTS; k++) {
			if (fds[3 + 2 * k].revents && read(p->clients[k].eventfd, &ignored, sizeof ignored) > 0)
				p->event_wakes++;
			if (fds[2 + 2 * k].revents)
				peer_request(p, k);
		}
		if (fds[0].revents)
			peer_adopt(p);
	}
	pthread_mutex_unlock(&p->lock);
	return NULL;
}

static struct peer *peer_start(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	struct peer *p = calloc(1, sizeof *p);

	if (!p)
		peer_die("calloc");
	snprintf(p->dir, sizeof p->dir, "/tmp/dqplb-shim-XXXXXX");
	if (!mkdtemp(p->dir))
		peer_die("mkdtemp");
	snprintf(p->path, sizeof p->path, "%s/client.sock", p->dir);
	snprintf(address.sun_path, sizeof address.sun_path, "%s", p->path);
	p->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	p->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	if (bind(p->listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(p->listener, 16) != 0)
		peer_die("listen");
	pthread_mutex_init(&p->lock, NULL);
	if (pthread_create(&p->thread, NULL, peer_run, p) != 0)
		peer_die("thread");
	return p;
}

/* After a knob was set: returns when the thread has seen it. */
static void peer_poke(struct peer *p)
{
	uint32_t mine = ++p->pokes;
	uint64_t one = 1;

	if (write(p->wake, &one, sizeof one) < 0 && errno != EAGAIN)
		peer_die("write");
	while ((int32_t)(p->pokes_seen - mine) < 0)
		sched_yield();
}

static void peer_stop(struct peer *p)
{
	uint64_t one = 1;

	p->stop = true;
	if (write(p->wake, &one, sizeof one) < 0)
		peer_die("write");
	pthread_join(p->thread, NULL);
	for (int k = 0; k < PEER_CLIENTS; k++) {
		struct peer_client *c = &p->clients[k];

		if (!c->used)
			continue;
		if (c->sock >= 0)
			close(c->sock);
		if (c->eventfd >= 0)
			close(c->eventfd);
		if (c->base)
			munmap(c->base, c->map_bytes);
		for (int i = 0; i < PEER_MEMS; i++)
			if (c->mems[i].base && !c->mems[i].alias)
				munmap(c->mems[i].base, c->mems[i].bytes);
	}
	close(p->listener);
	close(p->wake);
	unlink(p->path);
	rmdir(p->dir);
	pthread_mutex_destroy(&p->lock);
	free(p);
}

/* Put a completion of the test's making into a client's ring, and wake it. */
static void peer_inject(struct peer *p, int client, const struct dq_completion *done)
{
	pthread_mutex_lock(&p->lock);
	peer_complete(&p->clients[client], done);
	peer_wake_clients(p);
	pthread_mutex_unlock(&p->lock);
}

/* The control page of a client, for the test to look at and to damage. */
static struct dq_control *peer_control(struct peer *p, int client)
{
	struct dq_control *control;

	pthread_mutex_lock(&p->lock);
	control = p->clients[client].control;
	pthread_mutex_unlock(&p->lock);
	return control;
}

#endif
