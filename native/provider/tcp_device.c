/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tcp device: listener, connections that have not said hello, completion queue, timers, and the poll loop.
 */
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "provider/tcp.h"

#define EVENTS_PER_CALL 64
#define ACCEPTS_PER_POLL 64
#define BUSY_POLLS_PER_LOOK 8 /* while sockets are known to hold input, the others are looked at every so many polls */
#define IP_TCP_HEADERS 52u    /* IPv4 20, TCP 20, time stamps 12 */
#define ETHERNET_BYTES 38u    /* preamble 8, header 14, checksum 4, gap 12 */

enum watch_kind { WATCH_LISTENER = 0, WATCH_PENDING = 1, WATCH_QP = 2 };

/* kind 2 bits, generation 30 bits, index 32 bits: an event that outlived its object is recognised and dropped. */
static uint64_t watch_tag(enum watch_kind kind, uint32_t generation, uint32_t index)
{
	return (uint64_t)kind << 62 | (uint64_t)(generation & 0x3fffffffu) << 32 | index;
}

void dq_tcp_socket_tune(int fd)
{
	const int one = 1;

	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	/* Reno is always allowed, and on a local path three times as fast as the default of some machines. Not needed to work. */
	setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
}

/* ---- the network device behind an address ---- */

static bool same_address(const struct sockaddr *a, const struct sockaddr_storage *b)
{
	if (!a || a->sa_family != b->ss_family)
		return false;
	if (a->sa_family == AF_INET)
		return ((const struct sockaddr_in *)(const void *)a)->sin_addr.s_addr ==
		       ((const struct sockaddr_in *)b)->sin_addr.s_addr;
	return IN6_ARE_ADDR_EQUAL(&((const struct sockaddr_in6 *)(const void *)a)->sin6_addr,
				  &((const struct sockaddr_in6 *)b)->sin6_addr);
}

/* Name, MTU and flags of the interface that has the address; addresses of 127.0.0.0/8 belong to loopback without being listed. */
static bool interface_of(const struct sockaddr_storage *addr, char name[IFNAMSIZ], uint32_t *mtu, bool *up)
{
	struct ifaddrs *all = NULL;
	bool found = false;
	const bool loopback = addr->ss_family == AF_INET && ntohl(((const struct sockaddr_in *)addr)->sin_addr.s_addr) >> 24 == 127;

	if (getifaddrs(&all) != 0)
		return false;
	for (const struct ifaddrs *i = all; i && !found; i = i->ifa_next) {
		const bool v4 = i->ifa_addr && i->ifa_addr->sa_family == AF_INET;
		if (same_address(i->ifa_addr, addr) || (loopback && v4 && (i->ifa_flags & IFF_LOOPBACK))) {
			snprintf(name, IFNAMSIZ, "%s", i->ifa_name);
			*up = (i->ifa_flags & IFF_UP) && (i->ifa_flags & IFF_RUNNING);
			found = true;
		}
	}
	freeifaddrs(all);
	if (!found)
		return false;
	struct ifreq req = {0};
	memcpy(req.ifr_name, name, IFNAMSIZ);
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	*mtu = fd >= 0 && ioctl(fd, SIOCGIFMTU, &req) == 0 && req.ifr_mtu > 0 ? (uint32_t)req.ifr_mtu : 1500;
	if (fd >= 0)
		close(fd);
	return true;
}

/* Bits per second as the driver tells it, 0 = unknown (loopback, virtual devices). */
static uint64_t interface_rate(const char *name)
{
	char path[64 + IFNAMSIZ];
	long mbit = 0;

	snprintf(path, sizeof path, "/sys/class/net/%s/speed", name);
	FILE *f = fopen(path, "re");
	if (!f)
		return 0;
	if (fscanf(f, "%ld", &mbit) != 1 || mbit < 0)
		mbit = 0;
	fclose(f);
	return (uint64_t)mbit * 1000000u;
}

void dq_tcp_device_query(struct dq_device *device, struct dq_device_attr *out)
{
	const struct dq_tcp_device *dev = dq_tcp_device_of(device);
	char name[IFNAMSIZ];
	uint32_t mtu = 1500;
	bool up = false;
	struct rlimit files = {.rlim_cur = 1024};

	memset(out, 0, sizeof *out);
	if (interface_of(&dev->addr, name, &mtu, &up))
		out->rate_bps = interface_rate(name);
	if (dev->cfg.rate_bps)
		out->rate_bps = dev->cfg.rate_bps;
	if (dev->cfg.mtu)
		mtu = dev->cfg.mtu;
	out->mtu = mtu > IP_TCP_HEADERS ? mtu - IP_TCP_HEADERS : mtu;
	out->header_bytes = IP_TCP_HEADERS + ETHERNET_BYTES;
	getrlimit(RLIMIT_NOFILE, &files);
	out->max_qps = (uint32_t)DQ_MIN(DQ_TCP_MAX_QPS, files.rlim_cur > 64 ? files.rlim_cur - 64 : 1);
	out->max_send_depth = DQ_TCP_MAX_DEPTH;
	out->max_segment_bytes = DQ_MAX_SEGMENT_BYTES;
	out->dmabuf = dev->dmabuf;
	out->up = up;
	/* Completion times are taken when two threads of two processes got the CPU: on a shared machine that is off by several
	 * scheduler quanta, and a delay below says nothing about the path. An emulated link has exact times: there the caller
	 * may put 0. */
	out->noise_ns = 20000000;
	dq_tcp_addr_format(&dev->addr, out->address, sizeof out->address);
}

/* ---- open and close ---- */

static int open_listener(struct dq_tcp_device *dev, struct dq_error *err)
{
	const int one = 1;

	dev->listen_fd = socket(dev->addr.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (dev->listen_fd < 0)
		return dq_error_set(err, -errno, "device %s: socket: %s", dev->cfg.name, strerror(errno));
	setsockopt(dev->listen_fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	if (dev->addr.ss_family == AF_INET6)
		setsockopt(dev->listen_fd, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one);
	dq_tcp_socket_tune(dev->listen_fd);
	if (bind(dev->listen_fd, (const struct sockaddr *)&dev->addr, dev->addr_len) != 0 || listen(dev->listen_fd, 1024) != 0) {
		int code = -errno;
		char text[80];
		dq_tcp_addr_format(&dev->addr, text, sizeof text);
		return dq_error_set(err, code, "device %s: cannot listen on %s: %s; %s", dev->cfg.name, text, strerror(-code),
				    code == -EADDRNOTAVAIL ? "the address must be one of this host" :
				    code == -EADDRINUSE ? "another process has the port, choose another or 0 for any" :
				    "check address and port of the device");
	}
	if (getsockname(dev->listen_fd, (struct sockaddr *)&dev->addr, &dev->addr_len) != 0)
		return dq_error_set(err, -errno, "device %s: getsockname: %s", dev->cfg.name, strerror(errno));
	struct epoll_event ev = {.events = EPOLLIN, .data.u64 = watch_tag(WATCH_LISTENER, 0, 0)};
	if (epoll_ctl(dev->epfd, EPOLL_CTL_ADD, dev->listen_fd, &ev) != 0)
		return dq_error_set(err, -errno, "device %s: epoll_ctl: %s", dev->cfg.name, strerror(errno));
	return 0;
}

static void device_free(struct dq_tcp_device *dev)
{
	if (dev->pending_slots)
		for (uint32_t i = 0; i < DQ_TCP_PENDING_MAX; i++)
			if (dev->pending_slots[i].fd >= 0)
				close(dev->pending_slots[i].fd);
	if (dev->listen_fd >= 0)
		close(dev->listen_fd);
	if (dev->epfd >= 0)
		close(dev->epfd);
	if (dev->spare_fd >= 0)
		close(dev->spare_fd);
	free(dev->pending_slots);
	free(dev->mems);
	free(dev->qps);
	free(dev->cq);
	free(dev);
}

int dq_tcp_device_open(const struct dq_device_config *cfg, struct dq_device **out, struct dq_error *err)
{
	struct dq_tcp_device *dev = calloc(1, sizeof *dev);
	if (!dev)
		return dq_error_set(err, -ENOMEM, "device %.31s: no memory", cfg->name);
	dev->cfg = *cfg;
	dev->cfg.name[sizeof dev->cfg.name - 1] = 0;
	dev->cfg.address[sizeof dev->cfg.address - 1] = 0;
	if (!dev->cfg.heartbeat_ns)
		dev->cfg.heartbeat_ns = 1000000000u;
	if (!dev->cfg.deadline_ns)
		dev->cfg.deadline_ns = 10000000000u;
	dev->listen_fd = dev->spare_fd = -1;
	dev->scan_ns = dev->release_ns = DQ_NEVER;
	dev->scan_interval_ns = DQ_MAX(DQ_MIN(dev->cfg.heartbeat_ns, dev->cfg.deadline_ns) / 2, 1000000u);
	dq_tcp_list_init(&dev->rx);
	dq_tcp_list_init(&dev->tx);
	dq_tcp_list_init(&dev->timed);
	dq_tcp_list_init(&dev->pending);
	dev->now_ns = dq_tcp_now();

	int rc = 0;
	dev->epfd = epoll_create1(EPOLL_CLOEXEC);
	dev->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	dev->pending_slots = calloc(DQ_TCP_PENDING_MAX, sizeof *dev->pending_slots);
	dev->cq = calloc(64, sizeof *dev->cq);
	dev->cq_mask = 63;
	if (dev->pending_slots)
		for (uint32_t i = 0; i < DQ_TCP_PENDING_MAX; i++)
			dev->pending_slots[i].fd = -1;
	if (dev->epfd < 0 || dev->spare_fd < 0)
		rc = dq_error_set(err, -errno, "device %s: no file descriptors: %s; raise LimitNOFILE", dev->cfg.name, strerror(errno));
	else if (!dev->pending_slots || !dev->cq)
		rc = dq_error_set(err, -ENOMEM, "device %s: no memory", dev->cfg.name);
	if (!rc)
		rc = dq_tcp_addr_parse(dev->cfg.address, cfg->port, &dev->addr, &dev->addr_len, err);
	if (!rc)
		rc = open_listener(dev, err);
	if (rc) {
		device_free(dev);
		return rc;
	}
	dev->dmabuf = dq_tcp_mem_probe_dmabuf(dev);
	*out = (struct dq_device *)(void *)dev;
	return 0;
}

void dq_tcp_device_close(struct dq_device *device)
{
	if (!device)
		return;
	struct dq_tcp_device *dev = dq_tcp_device_of(device);
	/* Both must be gone by contract; what a caller left is taken along rather than leaked. */
	for (uint32_t i = 0; i < dev->qps_cap; i++)
		if (dev->qps[i])
			dq_tcp_qp_destroy((struct dq_qp *)(void *)dev->qps[i]);
	for (uint32_t i = 0; i < dev->mems_cap; i++)
		if (dev->mems[i])
			dq_tcp_mem_deregister((struct dq_mem *)(void *)dev->mems[i]);
	device_free(dev);
}

/* ---- completion queue ---- */

static uint32_t always(const struct dq_qp_attr *attr)
{
	return attr->send_depth + (attr->kind == DQ_QP_CONTROL ? attr->recv_depth : 0) + 4u; /* connected, failed, one payload under way */
}

static uint32_t segments(const struct dq_qp_attr *attr)
{
	return DQ_MAX(attr->recv_depth, 16u);
}

int dq_tcp_cq_reserve(struct dq_tcp_device *dev, const struct dq_qp_attr *attr)
{
	uint32_t need = dev->cq_reserve + always(attr) + dev->cq_segments + segments(attr);
	uint32_t cap = dev->cq_mask + 1;

	while (cap < need)
		cap *= 2;
	if (cap != dev->cq_mask + 1) {
		struct dq_tcp_cqe *cq = calloc(cap, sizeof *cq);
		if (!cq)
			return -ENOMEM;
		uint32_t n = 0;
		for (uint32_t i = dev->cq_head; i != dev->cq_tail; i++)
			cq[n++] = dev->cq[i & dev->cq_mask];
		free(dev->cq);
		dev->cq = cq;
		dev->cq_mask = cap - 1;
		dev->cq_head = 0;
		dev->cq_tail = n;
	}
	dev->cq_reserve += always(attr);
	dev->cq_segments += segments(attr);
	return 0;
}

void dq_tcp_cq_release(struct dq_tcp_device *dev, const struct dq_tcp_qp *qp)
{
	/* Dropped entries go at once: they would take room that is no longer there for them. */
	uint32_t to = dev->cq_head;
	for (uint32_t i = dev->cq_head; i != dev->cq_tail; i++) {
		const struct dq_tcp_cqe *e = &dev->cq[i & dev->cq_mask];
		if (e->qp != qp)
			dev->cq[to++ & dev->cq_mask] = *e;
	}
	dev->cq_tail = to;
	dev->cq_reserve -= always(&qp->attr);
	dev->cq_segments -= segments(&qp->attr);
}

static unsigned cq_take(struct dq_tcp_device *dev, struct dq_wc *out, unsigned n)
{
	unsigned taken = 0;

	while (taken < n && dev->cq_head != dev->cq_tail) {
		struct dq_tcp_cqe *e = &dev->cq[dev->cq_head++ & dev->cq_mask];
		if (e->wc.op == DQ_WC_WRITE || e->wc.op == DQ_WC_SEND)
			e->qp->sq_unpolled--;
		else if (e->wc.op == DQ_WC_RECV)
			e->qp->rq_unpolled--;
		out[taken++] = e->wc;
	}
	return taken;
}

/* ---- connections before their hello ---- */

static void pending_drop(struct dq_tcp_device *dev, struct dq_tcp_pending *p)
{
	close(p->fd);
	p->fd = -1;
	p->generation++;
	dq_tcp_list_remove(&p->node);
	dev->pending_used--;
}

/* The connection becomes a QP's; the slot is free, the fd stays open. */
static int pending_give(struct dq_tcp_device *dev, struct dq_tcp_pending *p)
{
	int fd = p->fd;
	p->fd = -1;
	p->generation++;
	dq_tcp_list_remove(&p->node);
	dev->pending_used--;
	return fd;
}

static struct dq_tcp_pending *pending_of(struct dq_tcp_list *node)
{
	return (struct dq_tcp_pending *)(void *)((char *)node - offsetof(struct dq_tcp_pending, node));
}

static void pending_judge(struct dq_tcp_device *dev, struct dq_tcp_pending *p)
{
	struct dq_tcp_hello hello;

	if (dq_tcp_hello_get(p->hello, &hello) != 0) {
		dev->stats.refused_hello++;
		pending_drop(dev, p);
		return;
	}
	if (hello.version != DQ_TCP_VERSION) {
		/* Told before it is closed, so that the other end can name both versions. Nothing else is told to strangers. */
		uint8_t answer[DQ_TCP_HELLO_BYTES];
		struct dq_tcp_hello no = {.version = DQ_TCP_VERSION, .status = DQ_TCP_HELLO_VERSION, .to_qp = hello.from_qp};
		memcpy(no.to_token, hello.from_token, DQ_TCP_TOKEN_BYTES);
		dq_tcp_hello_put(answer, &no);
		if (send(p->fd, answer, sizeof answer, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
			dev->stats.refused_silent++;
		dev->stats.refused_hello++;
		pending_drop(dev, p);
		return;
	}
	struct dq_tcp_qp *qp = hello.to_qp < dev->qps_cap ? dev->qps[hello.to_qp] : NULL;
	if (qp && qp->state == DQ_TCP_QP_WAIT && dq_tcp_qp_matches(qp, &hello)) {
		dq_tcp_qp_accept(qp, pending_give(dev, p));
		return;
	}
	/* The right token for a QP that was not yet told its peer: qp_connect will claim the connection. */
	if (qp && qp->state == DQ_TCP_QP_INIT && memcmp(qp->token, hello.to_token, DQ_TCP_TOKEN_BYTES) == 0)
		return;
	dev->stats.refused_hello++;
	pending_drop(dev, p);
}

static void pending_read(struct dq_tcp_device *dev, struct dq_tcp_pending *p)
{
	while (p->fill < DQ_TCP_HELLO_BYTES) {
		/* No byte beyond the hello: what follows belongs to the QP. */
		ssize_t n = recv(p->fd, p->hello + p->fill, DQ_TCP_HELLO_BYTES - p->fill, MSG_DONTWAIT);
		if (n < 0 && (errno == EAGAIN || errno == EINTR))
			return;
		if (n <= 0) {
			dev->stats.refused_silent++;
			pending_drop(dev, p);
			return;
		}
		p->fill += (uint32_t)n;
		if (memcmp(p->hello, DQ_TCP_MAGIC, DQ_MIN(p->fill, 8u)) != 0) {
			dev->stats.refused_hello++;
			pending_drop(dev, p);
			return;
		}
	}
	pending_judge(dev, p);
}

int dq_tcp_device_claim(struct dq_tcp_device *dev, const struct dq_tcp_qp *qp)
{
	struct dq_tcp_list *next;

	for (struct dq_tcp_list *i = dev->pending.next; i != &dev->pending; i = next) {
		struct dq_tcp_pending *p = pending_of(i);
		struct dq_tcp_hello hello;
		next = i->next;
		if (p->fill < DQ_TCP_HELLO_BYTES || dq_tcp_hello_get(p->hello, &hello) != 0 || hello.to_qp != qp->number)
			continue;
		if (dq_tcp_qp_matches(qp, &hello))
			return pending_give(dev, p);
		dev->stats.refused_hello++;
		pending_drop(dev, p);
	}
	return -1;
}

/* An accept that cannot succeed now leaves the listener readable: look away from it until the next scan. */
static void listener_watch(struct dq_tcp_device *dev, bool on)
{
	struct epoll_event ev = {.events = on ? EPOLLIN : 0, .data.u64 = watch_tag(WATCH_LISTENER, 0, 0)};
	epoll_ctl(dev->epfd, EPOLL_CTL_MOD, dev->listen_fd, &ev);
	dev->listener_off = !on;
	if (!on)
		dq_tcp_device_timer(dev);
}

static void device_accept(struct dq_tcp_device *dev)
{
	for (int i = 0; i < ACCEPTS_PER_POLL; i++) {
		int fd = accept4(dev->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
		if (fd < 0 && (errno == EMFILE || errno == ENFILE) && dev->spare_fd >= 0) {
			/* Out of descriptors: take the connection off the queue and close it, or the listener stays readable for ever. */
			close(dev->spare_fd);
			fd = accept4(dev->listen_fd, NULL, NULL, SOCK_CLOEXEC);
			if (fd >= 0)
				close(fd);
			dev->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
			dev->stats.refused_flood++;
			return;
		}
		if (fd < 0) {
			if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
				listener_watch(dev, false);
			return;
		}
		dev->stats.accepted++;
		if (dev->pending_used == DQ_TCP_PENDING_MAX) {
			dev->stats.refused_flood++;
			pending_drop(dev, pending_of(dev->pending.next));
		}
		uint32_t slot = 0;
		while (dev->pending_slots[slot].fd >= 0)
			slot++;
		struct dq_tcp_pending *p = &dev->pending_slots[slot];
		struct epoll_event ev = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET, .data.u64 = watch_tag(WATCH_PENDING, p->generation, slot)};
		if (epoll_ctl(dev->epfd, EPOLL_CTL_ADD, fd, &ev) != 0) {
			close(fd);
			continue;
		}
		p->fd = fd;
		p->fill = 0;
		p->deadline_ns = dev->now_ns + dev->cfg.deadline_ns;
		dq_tcp_list_add(&dev->pending, &p->node);
		dev->pending_used++;
		dq_tcp_device_timer(dev);
		pending_read(dev, p);
	}
}

/* ---- poll ---- */

int dq_tcp_device_watch(struct dq_tcp_device *dev, struct dq_tcp_qp *qp, bool modify)
{
	struct epoll_event ev = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
				 .data.u64 = watch_tag(WATCH_QP, qp->generation, qp->number)};
	return epoll_ctl(dev->epfd, modify ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, qp->fd, &ev) == 0 ? 0 : -errno;
}

void dq_tcp_device_timer(struct dq_tcp_device *dev)
{
	if (dev->scan_ns == DQ_NEVER) {
		dev->last_scan_ns = dq_tcp_now();
		dev->scan_ns = dev->last_scan_ns + dev->scan_interval_ns;
	}
}

static void device_events(struct dq_tcp_device *dev)
{
	struct epoll_event ev[EVENTS_PER_CALL];
	int n = epoll_wait(dev->epfd, ev, EVENTS_PER_CALL, 0);

	for (int i = 0; i < n; i++) {
		const uint64_t tag = ev[i].data.u64;
		const uint32_t index = (uint32_t)tag;
		const uint32_t generation = (uint32_t)(tag >> 32) & 0x3fffffffu;

		switch ((enum watch_kind)(tag >> 62)) {
		case WATCH_LISTENER:
			device_accept(dev);
			break;
		case WATCH_PENDING: {
			struct dq_tcp_pending *p = &dev->pending_slots[index];
			if (p->fd < 0 || (p->generation & 0x3fffffffu) != generation)
				break;
			if (p->fill < DQ_TCP_HELLO_BYTES) {
				pending_read(dev, p);
			} else if (ev[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) { /* left before its QP was told */
				dev->stats.refused_silent++;
				pending_drop(dev, p);
			}
			break;
		}
		case WATCH_QP: {
			struct dq_tcp_qp *qp = index < dev->qps_cap ? dev->qps[index] : NULL;
			if (qp && (qp->generation & 0x3fffffffu) == generation)
				dq_tcp_qp_event(qp, ev[i].events);
			break;
		}
		}
	}
}

static void device_scan(struct dq_tcp_device *dev)
{
	/* After a long sleep of this process (suspended, stopped) silence is its own; the peers get their time anew. */
	const bool slept = dev->now_ns - dev->last_scan_ns > 4 * dev->scan_interval_ns;

	while (!dq_tcp_list_empty(&dev->pending) && !slept) {
		struct dq_tcp_pending *p = pending_of(dev->pending.next);
		if (p->deadline_ns > dev->now_ns)
			break;
		dev->stats.refused_silent++;
		pending_drop(dev, p);
	}
	if (dev->listener_off) {
		if (dev->spare_fd < 0)
			dev->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
		listener_watch(dev, true);
	}
	for (uint32_t i = 0; i < dev->qps_cap; i++) {
		struct dq_tcp_qp *qp = dev->qps[i];
		if (!qp)
			continue;
		if (slept) {
			qp->progress_ns = qp->rx_ns = dev->now_ns;
			qp->asked_ns = 0;
		}
		dq_tcp_qp_scan(qp, dev->now_ns);
	}
	dev->last_scan_ns = dev->now_ns;
	dev->scan_ns = dev->qps_used || dev->pending_used ? dev->now_ns + dev->scan_interval_ns : DQ_NEVER;
}

static void device_release(struct dq_tcp_device *dev)
{
	uint64_t earliest = DQ_NEVER;
	struct dq_tcp_list *next;

	for (struct dq_tcp_list *i = dev->timed.next; i != &dev->timed; i = next) {
		struct dq_tcp_qp *qp = DQ_TCP_QP_OF(i, timed_node);
		uint64_t release = dq_tcp_qp_release(qp);
		next = i->next;
		if (release <= dev->now_ns || release == DQ_NEVER) {
			dq_tcp_list_remove(&qp->timed_node);
			if (release != DQ_NEVER)
				dq_tcp_list_add(&dev->tx, &qp->tx_node);
		} else {
			earliest = DQ_MIN(earliest, release);
		}
	}
	dev->release_ns = earliest;
}

/* Only those that are in the list now: a QP that stays busy must not keep the others from their turn. */
static void device_each(struct dq_tcp_list *list, size_t node_offset, void (*serve)(struct dq_tcp_qp *qp))
{
	struct dq_tcp_list turn;

	if (dq_tcp_list_empty(list))
		return;
	turn = *list;
	turn.next->prev = turn.prev->next = &turn;
	dq_tcp_list_init(list);
	while (!dq_tcp_list_empty(&turn)) {
		struct dq_tcp_list *node = turn.next;
		dq_tcp_list_remove(node);
		serve((struct dq_tcp_qp *)(void *)((char *)node - node_offset));
	}
}

static void device_progress(struct dq_tcp_device *dev)
{
	dev->now_ns = dq_tcp_now();
	const bool scan = dev->now_ns >= dev->scan_ns;

	if (dev->now_ns >= dev->release_ns)
		device_release(dev);
	device_each(&dev->tx, offsetof(struct dq_tcp_qp, tx_node), dq_tcp_qp_transmit);
	if (scan || dq_tcp_list_empty(&dev->rx) || ++dev->ticks % BUSY_POLLS_PER_LOOK == 0)
		device_events(dev);
	device_each(&dev->rx, offsetof(struct dq_tcp_qp, rx_node), dq_tcp_qp_receive);
	if (scan)
		device_scan(dev);
}

int dq_tcp_device_poll(struct dq_device *device, struct dq_wc *out, unsigned n)
{
	struct dq_tcp_device *dev = dq_tcp_device_of(device);

	if (n == 0 || dev->cq_tail - dev->cq_head < n)
		device_progress(dev);
	else if (!dq_tcp_list_empty(&dev->tx)) /* acknowledgements do not wait for all completions to be taken */
		device_each(&dev->tx, offsetof(struct dq_tcp_qp, tx_node), dq_tcp_qp_transmit);
	return (int)cq_take(dev, out, n);
}

int dq_tcp_device_arm(struct dq_device *device)
{
	const struct dq_tcp_device *dev = dq_tcp_device_of(device);

	if (dev->cq_head != dev->cq_tail || !dq_tcp_list_empty(&dev->rx) || !dq_tcp_list_empty(&dev->tx))
		return 1;
	const uint64_t deadline = DQ_MIN(dev->scan_ns, dev->release_ns);
	return deadline != DQ_NEVER && deadline <= dq_tcp_now();
}

int dq_tcp_device_event_fd(const struct dq_device *device)
{
	return dq_tcp_device_of_const(device)->epfd;
}

uint64_t dq_tcp_device_next_deadline(const struct dq_device *device)
{
	const struct dq_tcp_device *dev = dq_tcp_device_of_const(device);
	return DQ_MIN(dev->scan_ns, dev->release_ns);
}
