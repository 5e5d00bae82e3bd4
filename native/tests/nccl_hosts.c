/* SPDX-License-Identifier: Apache-2.0 */
#include "nccl_hosts.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "engine_pair.h"
#include "transport_env.h"

#define CONNECTIONS 64
#define PATHS 2          /* of a host: to each host of the test, by its number */
#define VCS 16
#define NEEDS 16

struct connection {
	int fd;              /* -1: free */
	bool attached;
	uint32_t client;
};

struct need {
	bool open;
	uint32_t number;
	uint64_t epoch;
	char host_id[64];
};

static struct nccl_host {
	struct host host;
	bool alive;
	int listener;
	char path[108];
	char name[64];
	struct connection connections[CONNECTIONS];
	bool clients[1024];  /* by the engine's number: not all of it is released yet */
	_Atomic unsigned client_count;
	struct need needs[NEEDS];
	_Atomic uint32_t hinted_peers, hinted_flows;
	uint32_t vcs[VCS];   /* to the other host: those that nccl_hosts_cut() closes */
	unsigned vc_count;
} hosts[NCCL_HOSTS_MAX];

static unsigned host_count;
static char folder[64];
static int wake_fd = -1;
static pthread_t thread;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of everything above; the thread lets it go while it sleeps */
static bool stopping, held;
static uint64_t max_memory = 4ull << 30;
static uint32_t max_flows = 16384;

static _Noreturn void hosts_die(const char *what, const char *why)
{
	fprintf(stderr, "hosts: %s: %s\n", what, why);
	abort();
}

/* --- connections between hosts ----------------------------------------------------------------------------------- */

static struct nccl_host *host_named(const char *name)
{
	for (unsigned i = 0; i < host_count; i++)
		if (strcmp(hosts[i].name, name) == 0)
			return &hosts[i];
	return NULL;
}

static uint32_t path_to(struct nccl_host *from, struct nccl_host *to)
{
	const unsigned slot = (unsigned)(to - hosts);
	struct dq_text err = {0};

	if (from->host.path[slot] == DQ_NONE &&
	    dq_engine_path_add(from->host.engine, from->host.device, to->host.host_id, to->host.epoch, NULL, &test_profile,
			       &from->host.path[slot], &err))
		hosts_die("path", err.text);
	return from->host.path[slot];
}

/* 0, or the status that those who wait for the VC get. */
static int32_t connect_hosts(struct nccl_host *a, struct nccl_host *b)
{
	const struct dq_vc_limits limits = {.qps = 4, .depth = 32, .credits = 16, .segment_bytes = 1u << 20};
	struct dq_endpoint_blob ea[5], eb[5];
	struct dq_text err = {0};
	uint32_t va, vb;

	memset(ea, 0, sizeof ea);
	memset(eb, 0, sizeof eb);
	if (dq_engine_vc_prepare(a->host.engine, path_to(a, b), &limits, &va, ea, &err))
		return DQ_ERR_UNREACHABLE;
	if (dq_engine_vc_prepare(b->host.engine, path_to(b, a), &limits, &vb, eb, &err)) {
		dq_engine_vc_close(a->host.engine, va, DQ_ERR_UNREACHABLE, "the other end cannot be made");
		return DQ_ERR_UNREACHABLE;
	}
	if (dq_engine_vc_connect(b->host.engine, vb, &limits, ea, 0, &err) || dq_engine_vc_connect(a->host.engine, va, &limits, eb, 1, &err))
		hosts_die("connect", err.text);
	if (a != b && a->vc_count < VCS && b->vc_count < VCS) {
		a->vcs[a->vc_count++] = va;
		b->vcs[b->vc_count++] = vb;
	}
	return 0;
}

static void meet_needs(struct nccl_host *h)
{
	for (unsigned i = 0; i < NEEDS && !held; i++) {
		struct need *n = &h->needs[i];
		struct nccl_host *to = n->open ? host_named(n->host_id) : NULL;
		int32_t status;

		if (!n->open)
			continue;
		n->open = false;
		if (!to || !to->alive)
			status = DQ_ERR_UNREACHABLE;
		else if (to->host.epoch != n->epoch)
			status = DQ_ERR_STALE;
		else
			status = connect_hosts(h, to);
		if (status)
			dq_engine_need_failed(h->host.engine, n->number, status);
	}
}

static void drop_connection(struct nccl_host *h, struct connection *c, bool removed)
{
	if (c->attached && !removed)
		dq_engine_client_remove(h->host.engine, c->client);
	close(c->fd);
	c->fd = -1;
	c->attached = false;
}

static void take_events(struct nccl_host *h)
{
	struct dq_engine_event ev[32];
	int n;

	while ((n = dq_engine_events(h->host.engine, ev, 32)) > 0)
		for (int i = 0; i < n; i++) {
			unsigned k = 0;

			switch (ev[i].type) {
			case DQ_EV_NEED_VC:
				while (k < NEEDS && h->needs[k].open)
					k++;
				if (k == NEEDS)
					hosts_die("needs", "more than there is a place for");
				h->needs[k] = (struct need){.open = true, .number = ev[i].need, .epoch = ev[i].epoch};
				memcpy(h->needs[k].host_id, ev[i].host_id, sizeof h->needs[k].host_id);
				break;
			case DQ_EV_CLIENT_CUT:
				fprintf(stderr, "hosts: %s: client cut: %s\n", h->name, ev[i].text);
				for (; k < CONNECTIONS; k++)
					if (h->connections[k].fd >= 0 && h->connections[k].attached && h->connections[k].client == ev[i].client)
						drop_connection(h, &h->connections[k], true);
				break;
			case DQ_EV_CLIENT_GONE:
				if (ev[i].client < sizeof h->clients && h->clients[ev[i].client]) {
					h->clients[ev[i].client] = false;
					h->client_count--;
				}
				break;
			case DQ_EV_VC_DOWN:
				for (k = 0; k < h->vc_count; k++)
					if (h->vcs[k] == ev[i].vc)
						h->vcs[k--] = h->vcs[--h->vc_count];
				break;
			default:
				break;
			}
		}
	meet_needs(h);
}

/* --- the attach socket -------------------------------------------------------------------------------------------- */

static void reply_send(int socket, struct dq_client_reply *reply, uint16_t type, const void *after, size_t after_bytes, const int *fds,
		       size_t fd_count)
{
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(2 * sizeof(int))];
	} control = {0};
	struct iovec parts[2] = {{reply, sizeof *reply}, {(void *)(uintptr_t)after, after_bytes}};
	struct msghdr msg = {.msg_iov = parts, .msg_iovlen = after_bytes ? 2 : 1};

	reply->magic = DQ_LAYOUT_MAGIC;
	reply->version = 1;
	reply->type = type;
	if (fd_count) {
		msg.msg_control = &control;
		msg.msg_controllen = CMSG_SPACE(fd_count * sizeof(int));
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		control.header.cmsg_len = CMSG_LEN(fd_count * sizeof(int));
		memcpy(CMSG_DATA(&control.header), fds, fd_count * sizeof(int));
	}
	sendmsg(socket, &msg, MSG_NOSIGNAL); /* whoever left is noticed by its socket */
	for (size_t i = 0; i < fd_count; i++)
		close(fds[i]);
}

static int32_t status_of(int error)
{
	return error == -ENOMEM || error == -ENOSPC || error == -EDQUOT ? DQ_ERR_NOMEM : error == -EINVAL ? DQ_ERR_INVALID : DQ_ERR_DEVICE;
}

static void serve_attach(struct nccl_host *h, struct connection *c, const struct dq_client_request *q)
{
	struct dq_client_reply reply = {0};
	struct dq_text err = {0};
	int fds[2];
	const uint32_t entries = q->arg2 ? (uint32_t)q->arg2 : DQ_RING_ENTRIES_DEFAULT;
	int rc = dq_engine_client_add(h->host.engine, q->name, entries, max_memory, max_flows, &c->client, &fds[0], &fds[1], &reply.arg3, &err);

	if (rc) {
		reply.status = status_of(rc);
		snprintf(reply.text, sizeof reply.text, "%s", err.text);
		reply_send(c->fd, &reply, DQ_REQ_ATTACH, NULL, 0, NULL, 0);
		return;
	}
	take_events(h); /* numbers are used again: what was told of the last one of this number comes first */
	c->attached = true;
	if (c->client >= sizeof h->clients)
		hosts_die("clients", "too many");
	h->clients[c->client] = true;
	h->client_count++;
	reply.arg0 = DQ_LAYOUT_VERSION;
	reply.arg1 = c->client;
	reply.arg2 = entries;
	if (dq_engine_client_handle(h->host.engine, c->client, reply.handle))
		hosts_die("attach", "no handle");
	reply_send(c->fd, &reply, DQ_REQ_ATTACH, NULL, 0, fds, 2);
}

static void serve_devices(struct nccl_host *h, struct connection *c)
{
	struct dq_client_reply reply = {.arg0 = 1, .arg1 = max_flows};
	struct dq_engine_device d;
	struct dq_device_info info = {.numa_node = -1, .latency_ns = 12345};

	if (dq_engine_device_get(h->host.engine, h->host.device, &d))
		hosts_die("devices", "the device is gone");
	memcpy(info.name, d.name, sizeof info.name);
	memcpy(info.provider, d.provider, sizeof info.provider);
	info.speed_bps = d.rate_bps;
	info.rail = d.rail;
	info.mtu = d.mtu;
	info.dmabuf = d.dmabuf;
	info.up = d.up;
	reply_send(c->fd, &reply, DQ_REQ_DEVICES, &info, sizeof info, NULL, 0);
}

static void serve_memory(struct nccl_host *h, struct connection *c, const struct dq_client_request *q, int fd_in)
{
	struct dq_client_reply reply = {0};
	struct dq_text err = {0};
	uint32_t mem = 0;
	int rc, fd = -1;

	if (q->type == DQ_REQ_MEM_SHARE)
		rc = dq_engine_mem_share(h->host.engine, c->client, (uint32_t)q->arg0, (uint32_t)q->arg1, &mem, &reply.arg1, &err);
	else if (q->type == DQ_REQ_MEM_ALLOC)
		rc = dq_engine_mem_alloc(h->host.engine, c->client, q->arg0, q->arg1 == 1, &mem, &fd, &reply.arg1, &err);
	else
		rc = dq_engine_mem_dmabuf(h->host.engine, c->client, fd_in, q->arg1, q->arg0, &mem, &err);
	reply.arg0 = mem;
	if (rc) {
		reply.status = status_of(rc);
		snprintf(reply.text, sizeof reply.text, "%s", err.text);
	}
	reply_send(c->fd, &reply, q->type, NULL, 0, &fd, fd >= 0);
}

static void serve(struct nccl_host *h, struct connection *c)
{
	struct dq_client_request q;
	struct dq_client_reply reply = {0};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec part = {&q, sizeof q};
	struct msghdr msg = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
	ssize_t n = recvmsg(c->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	int fd = -1;

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n > 0 && CMSG_FIRSTHDR(&msg))
		memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof fd);
	if (n <= 0) {
		drop_connection(h, c, false);
	} else if (n != sizeof q || q.magic != DQ_LAYOUT_MAGIC || q.version != 1 || (q.type != DQ_REQ_ATTACH) != c->attached) {
		hosts_die(h->name, "a request that is none, or not at this time");
	} else if (q.type == DQ_REQ_ATTACH) {
		serve_attach(h, c, &q);
	} else if (q.type == DQ_REQ_DEVICES) {
		serve_devices(h, c);
	} else if (q.type == DQ_REQ_MEM_ALLOC || q.type == DQ_REQ_MEM_DMABUF || q.type == DQ_REQ_MEM_SHARE) {
		serve_memory(h, c, &q, fd);
	} else if (q.type == DQ_REQ_HINT) {
		h->hinted_peers = (uint32_t)q.arg0;
		h->hinted_flows = (uint32_t)q.arg1;
		reply_send(c->fd, &reply, q.type, NULL, 0, NULL, 0);
	} else {
		reply.status = dq_engine_mem_free(h->host.engine, c->client, (uint32_t)q.arg0) ? DQ_ERR_INVALID : 0;
		reply_send(c->fd, &reply, q.type, NULL, 0, NULL, 0);
	}
	if (fd >= 0)
		close(fd);
}

static void adopt(struct nccl_host *h)
{
	int fd = accept4(h->listener, NULL, NULL, SOCK_CLOEXEC);

	for (unsigned i = 0; fd >= 0 && i < CONNECTIONS; i++)
		if (h->connections[i].fd < 0) {
			h->connections[i] = (struct connection){.fd = fd};
			return;
		}
	if (fd >= 0)
		hosts_die("connections", "too many");
}

static void *serve_all(void *unused)
{
	pthread_mutex_lock(&lock);
	while (!stopping) {
		struct pollfd p[1 + NCCL_HOSTS_MAX * (2 + CONNECTIONS)];
		uint64_t ignored;
		unsigned n = 0;

		p[n++] = (struct pollfd){.fd = wake_fd, .events = POLLIN};
		for (unsigned i = 0; i < host_count; i++) {
			struct nccl_host *h = &hosts[i];

			if (h->alive)
				take_events(h);
			p[n++] = (struct pollfd){.fd = h->alive ? h->listener : -1, .events = POLLIN};
			p[n++] = (struct pollfd){.fd = h->alive ? dq_engine_event_fd(h->host.engine) : -1, .events = POLLIN};
			for (unsigned k = 0; k < CONNECTIONS; k++)
				p[n++] = (struct pollfd){.fd = h->connections[k].fd, .events = POLLIN};
		}
		pthread_mutex_unlock(&lock);
		if (poll(p, n, -1) < 0 && errno != EINTR)
			hosts_die("poll", strerror(errno));
		if (p[0].revents && read(wake_fd, &ignored, sizeof ignored) < 0 && errno != EAGAIN)
			hosts_die("read", strerror(errno));
		pthread_mutex_lock(&lock);
		/* A host may be another one by now: what is asked below is asked without waiting. */
		for (unsigned i = 0; i < host_count; i++) {
			struct nccl_host *h = &hosts[i];
			const struct pollfd *q = &p[1 + i * (2 + CONNECTIONS)];

			for (unsigned k = 0; h->alive && k < CONNECTIONS; k++)
				if (q[2 + k].revents && h->connections[k].fd == q[2 + k].fd)
					serve(h, &h->connections[k]);
			if (h->alive && q[0].revents && q[0].fd == h->listener)
				adopt(h);
		}
	}
	pthread_mutex_unlock(&lock);
	return unused;
}

static void wake_thread(void)
{
	const uint64_t one = 1;

	if (write(wake_fd, &one, sizeof one) < 0)
		hosts_die("write", strerror(errno));
}

/* --- for tests ---------------------------------------------------------------------------------------------------- */

static void host_begin(unsigned i)
{
	struct nccl_host *h = &hosts[i];
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	const char *name = i ? "beta" : "alpha";

	memset(h, 0, sizeof *h);
	for (unsigned k = 0; k < CONNECTIONS; k++)
		h->connections[k].fd = -1;
	snprintf(h->name, sizeof h->name, "%s", name);
	snprintf(h->path, sizeof h->path, "%s/%s.sock", folder, name);
	host_start(&h->host, (int)i, h->name, 0);
	snprintf(address.sun_path, sizeof address.sun_path, "%s", h->path);
	h->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (h->listener < 0 || bind(h->listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(h->listener, 16) != 0)
		hosts_die(h->path, strerror(errno));
	h->alive = true;
}

static void host_end(struct nccl_host *h)
{
	if (!h->alive)
		return;
	h->alive = false;
	for (unsigned k = 0; k < CONNECTIONS; k++)
		if (h->connections[k].fd >= 0)
			drop_connection(h, &h->connections[k], true);
	close(h->listener);
	unlink(h->path);
	host_stop(&h->host);
	h->client_count = 0;
}

void nccl_hosts_start(unsigned count)
{
	snprintf(folder, sizeof folder, "/tmp/dqplb-nccl-XXXXXX");
	if (!mkdtemp(folder))
		hosts_die("mkdtemp", strerror(errno));
	wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	stopping = held = false;
	max_memory = 4ull << 30;
	max_flows = 16384;
	for (unsigned i = 0; i < count; i++)
		host_begin(i);
	host_count = count;
	if (pthread_create(&thread, NULL, serve_all, NULL))
		hosts_die("thread", "cannot be made");
}

void nccl_hosts_stop(void)
{
	pthread_mutex_lock(&lock);
	stopping = true;
	pthread_mutex_unlock(&lock);
	wake_thread();
	pthread_join(thread, NULL);
	for (unsigned i = 0; i < host_count; i++)
		host_end(&hosts[i]);
	host_count = 0;
	close(wake_fd);
	rmdir(folder);
}

const char *nccl_host_socket(unsigned host)
{
	return hosts[host].path;
}

const char *nccl_host_device(unsigned host)
{
	(void)host;
	return "dev0"; /* as host_start() names it */
}

void nccl_host_kill(unsigned host)
{
	pthread_mutex_lock(&lock);
	host_end(&hosts[host]);
	pthread_mutex_unlock(&lock);
	wake_thread();
}

void nccl_host_revive(unsigned host)
{
	pthread_mutex_lock(&lock);
	host_end(&hosts[host]);
	host_begin(host);
	for (unsigned i = 0; i < host_count; i++)
		if (i != host && hosts[i].alive && hosts[i].host.path[host] != DQ_NONE) {
			dq_engine_path_remove(hosts[i].host.engine, hosts[i].host.path[host], DQ_ERR_PEER_GONE, "the host restarted");
			hosts[i].host.path[host] = DQ_NONE;
		}
	pthread_mutex_unlock(&lock);
	wake_thread();
}

void nccl_hosts_cut(void)
{
	pthread_mutex_lock(&lock);
	for (unsigned i = 0; i < host_count; i++)
		while (hosts[i].alive && hosts[i].vc_count)
			dq_engine_vc_close(hosts[i].host.engine, hosts[i].vcs[--hosts[i].vc_count], DQ_ERR_UNREACHABLE, "cut by the test");
	pthread_mutex_unlock(&lock);
	wake_thread();
}

void nccl_hosts_hold(bool hold)
{
	pthread_mutex_lock(&lock);
	held = hold;
	pthread_mutex_unlock(&lock);
	wake_thread();
}

unsigned nccl_host_clients(unsigned host)
{
	return hosts[host].client_count;
}

bool nccl_host_clients_wait(unsigned host, unsigned count, int timeout_s)
{
	const struct timespec pause = {0, 1000000}; /* between looks; the number decides */

	for (int i = 0; i < timeout_s * 1000; i++) {
		if (nccl_host_clients(host) == count)
			return true;
		nanosleep(&pause, NULL);
	}
	return nccl_host_clients(host) == count;
}

unsigned nccl_host_memory(unsigned host)
{
	unsigned sum = 0;

	pthread_mutex_lock(&lock);
	for (uint32_t i = 0; hosts[host].alive && i < sizeof hosts[host].clients; i++) {
		struct dq_client_stats s;

		if (hosts[host].clients[i] && dq_engine_client_stats(hosts[host].host.engine, i, &s) == 0)
			sum += s.memory_regions;
	}
	pthread_mutex_unlock(&lock);
	return sum;
}

void nccl_host_hint(unsigned host, uint32_t *peers, uint32_t *flows)
{
	*peers = hosts[host].hinted_peers;
	*flows = hosts[host].hinted_flows;
}

void nccl_host_limits(uint64_t max_memory_bytes, uint32_t flows)
{
	pthread_mutex_lock(&lock);
	max_memory = max_memory_bytes;
	max_flows = flows;
	pthread_mutex_unlock(&lock);
}
