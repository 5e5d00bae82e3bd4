/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Datagrams with time stamps, over UDP. The kernel stamps what leaves and what comes in where it can (CLOCK_REALTIME), else
 * the clock is read beside the system call; both are told as CLOCK_MONOTONIC. On an emulated link a datagram is held here
 * until its virtual arrival time, carries that time, and the receiver tells it. Nothing mutable is shared with the device.
 */
#include <errno.h>
#include <time.h> /* before errqueue.h, which needs it */

#include <linux/errqueue.h>
#include <linux/net_tstamp.h>
#include <netinet/udp.h>
#include <stdlib.h>
#include <unistd.h>

#include "provider/tcp.h"

#define SENDS 256u                     /* sends whose event was not polled yet */
#define PAYLOAD sizeof(((struct dq_dgram_event *)0)->data)
#define STAMP_WAIT_NS 20000000u        /* a stamp that takes longer than this is not coming: the clock at the system call counts */
#define STEP_NS 10000u                 /* the two clocks moved against each other by more than this: the wall clock was set */

enum send_state { SEND_FREE, SEND_HELD, SEND_STAMP, SEND_DONE };

struct send {
	struct sockaddr_storage to;
	socklen_t to_len;
	uint64_t id;
	uint64_t release_ns;           /* HELD: when it may go out */
	uint64_t time_ns;              /* of the event */
	uint64_t called_ns;            /* STAMP: of the system call, by CLOCK_MONOTONIC */
	uint32_t stamp_key;
	int error;
	uint16_t bytes;
	uint8_t state;
	uint8_t data[DQ_TCP_DGRAM_HEADER_BYTES + PAYLOAD];
};

struct dq_tcp_dgram {
	struct sockaddr_storage addr;
	socklen_t addr_len;
	int fd;
	bool stamps;                   /* the kernel agreed to stamp */
	bool used_link;
	uint32_t stamp_key;            /* of the next datagram */
	uint32_t used;
	uint64_t wall_offset_ns;       /* CLOCK_REALTIME - CLOCK_MONOTONIC */
	uint64_t ignored;              /* datagrams that were none of ours */
	struct send sends[SENDS];
};

static struct dq_tcp_dgram *dgram_of(struct dq_dgram *dg) { return (struct dq_tcp_dgram *)(void *)dg; }
static const struct dq_tcp_dgram *dgram_of_const(const struct dq_dgram *dg)
{
	return (const struct dq_tcp_dgram *)(const void *)dg;
}

/* NTP slews both clocks alike, so their distance is constant until the wall clock is set: measuring it anew each time would
 * only add noise. */
static void measure_offset(struct dq_tcp_dgram *dg)
{
	uint64_t best = DQ_NEVER, offset = 0;

	for (int i = 0; i < 4; i++) {
		struct timespec wall;
		const uint64_t before = dq_tcp_now();
		clock_gettime(CLOCK_REALTIME, &wall);
		const uint64_t after = dq_tcp_now();
		if (after - before < best) {
			best = after - before;
			offset = (uint64_t)wall.tv_sec * 1000000000u + (uint64_t)wall.tv_nsec - (before + best / 2);
		}
		if (best < 500)
			break;
	}
	const uint64_t moved = offset > dg->wall_offset_ns ? offset - dg->wall_offset_ns : dg->wall_offset_ns - offset;
	if (moved > STEP_NS + best)
		dg->wall_offset_ns = offset;
}

static uint64_t from_wall(const struct dq_tcp_dgram *dg, const struct timespec *ts)
{
	return (uint64_t)ts->tv_sec * 1000000000u + (uint64_t)ts->tv_nsec - dg->wall_offset_ns;
}

/* Also starts the kernel's count of datagrams, which names them in its stamps, at 0. */
static void ask_for_stamps(struct dq_tcp_dgram *dg)
{
	const int base = SOF_TIMESTAMPING_RX_SOFTWARE | SOF_TIMESTAMPING_TX_SOFTWARE | SOF_TIMESTAMPING_SOFTWARE |
			 SOF_TIMESTAMPING_OPT_TSONLY;
	const int counted = base | SOF_TIMESTAMPING_OPT_ID;

	dg->stamps = setsockopt(dg->fd, SOL_SOCKET, SO_TIMESTAMPING, &base, sizeof base) == 0 &&
		     setsockopt(dg->fd, SOL_SOCKET, SO_TIMESTAMPING, &counted, sizeof counted) == 0;
	dg->stamp_key = 0;
}

int dq_tcp_dgram_open(struct dq_device *device, struct dq_dgram **out, struct dq_error *err)
{
	const struct dq_tcp_device *dev = dq_tcp_device_of(device);
	struct dq_tcp_dgram *dg = calloc(1, sizeof *dg);
	if (!dg)
		return dq_error_set(err, -ENOMEM, "device %s: no memory for datagrams", dev->cfg.name);
	dg->addr = dev->addr;
	dg->addr_len = dev->addr_len;
	/* A configured port is one that firewalls let pass: the same number here as for connections. */
	if (dg->addr.ss_family == AF_INET)
		((struct sockaddr_in *)&dg->addr)->sin_port = htons(dev->cfg.port);
	else
		((struct sockaddr_in6 *)&dg->addr)->sin6_port = htons(dev->cfg.port);
	dg->fd = socket(dg->addr.ss_family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (dg->fd < 0 || bind(dg->fd, (const struct sockaddr *)&dg->addr, dg->addr_len) != 0 ||
	    getsockname(dg->fd, (struct sockaddr *)&dg->addr, &dg->addr_len) != 0) {
		const int code = -errno;
		if (dg->fd >= 0)
			close(dg->fd);
		free(dg);
		return dq_error_set(err, code, "device %s: datagram socket on %s: %s", dev->cfg.name, dev->cfg.address, strerror(-code));
	}
	ask_for_stamps(dg);
	measure_offset(dg);
	*out = (struct dq_dgram *)(void *)dg;
	return 0;
}

void dq_tcp_dgram_close(struct dq_dgram *d)
{
	if (!d)
		return;
	close(dgram_of(d)->fd);
	free(d);
}

void dq_tcp_dgram_endpoint(const struct dq_dgram *d, struct dq_endpoint *out)
{
	dq_tcp_endpoint_put(out, DQ_TCP_ENDPOINT_DGRAM, &dgram_of_const(d)->addr, 0, NULL);
}

static void read_stamps(struct dq_tcp_dgram *dg)
{
	for (unsigned i = 0; i < SENDS; i++) {
		union { struct cmsghdr align; uint8_t bytes[256]; } control;
		struct msghdr msg = {.msg_control = &control, .msg_controllen = sizeof control};
		const struct scm_timestamping *stamp = NULL;
		const struct sock_extended_err *info = NULL;

		if (recvmsg(dg->fd, &msg, MSG_ERRQUEUE | MSG_DONTWAIT) < 0)
			return;
		for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
			if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_TIMESTAMPING)
				stamp = (const struct scm_timestamping *)(const void *)CMSG_DATA(c);
			else if ((c->cmsg_level == SOL_IP && c->cmsg_type == IP_RECVERR) || (c->cmsg_level == SOL_IPV6 && c->cmsg_type == IPV6_RECVERR))
				info = (const struct sock_extended_err *)(const void *)CMSG_DATA(c);
		}
		if (!stamp || !info || info->ee_origin != SO_EE_ORIGIN_TIMESTAMPING)
			continue;
		for (struct send *s = dg->sends; s < dg->sends + SENDS; s++)
			if (s->state == SEND_STAMP && s->stamp_key == info->ee_data) {
				s->time_ns = from_wall(dg, &stamp->ts[0]);
				s->state = SEND_DONE;
				break;
			}
	}
}

/* The datagram goes to the kernel now. */
static void send_out(struct dq_tcp_dgram *dg, struct send *s)
{
	const uint64_t called = dq_tcp_now();
	const bool virtual = s->release_ns != 0;
	ssize_t n;

	do
		n = sendto(dg->fd, s->data, s->bytes, MSG_DONTWAIT | MSG_NOSIGNAL, (const struct sockaddr *)&s->to, s->to_len);
	while (n < 0 && errno == EINTR);
	if (n < 0) {
		s->error = -errno;
		s->state = SEND_DONE;
		/* The kernel may or may not have counted it. What waits for a stamp keeps the time of its system call. */
		for (struct send *other = dg->sends; dg->stamps && other < dg->sends + SENDS; other++)
			if (other->state == SEND_STAMP)
				other->state = SEND_DONE;
		read_stamps(dg);
		if (dg->stamps)
			ask_for_stamps(dg);
		return;
	}
	s->stamp_key = dg->stamp_key++; /* the kernel counts the datagrams that it took in the same way */
	if (virtual) {
		s->state = SEND_DONE;   /* time_ns is when it was given to the link */
		return;
	}
	s->called_ns = s->time_ns = called;
	s->state = dg->stamps ? SEND_STAMP : SEND_DONE;
}

int dq_tcp_dgram_send(struct dq_dgram *d, const struct dq_endpoint *to, uint32_t flow_label, struct dq_link *link, uint64_t id,
		      const void *data, uint16_t len)
{
	struct dq_tcp_dgram *dg = dgram_of(d);
	struct dq_tcp_peer peer;

	(void)flow_label; /* TCP connections and UDP datagrams have ports of their own: there is no way to share */
	if (len > PAYLOAD)
		return -EMSGSIZE;
	int rc = dq_tcp_endpoint_get(to, DQ_TCP_ENDPOINT_DGRAM, &dg->addr, &peer, NULL);
	if (rc)
		return rc;
	if (dg->used == SENDS)
		return -EAGAIN;
	struct send *s = dg->sends;
	while (s->state != SEND_FREE)
		s++;
	dg->used++;
	*s = (struct send){.to = peer.addr, .to_len = peer.addr_len, .id = id, .bytes = (uint16_t)(DQ_TCP_DGRAM_HEADER_BYTES + len)};
	if (link) {
		s->time_ns = dq_tcp_now();
		s->release_ns = dq_link_send(link, s->time_ns, s->bytes, false);
		dg->used_link = true;
	}
	const struct dq_tcp_dgram_header header = {.len = len, .time = s->release_ns};
	dq_tcp_dgram_put(s->data, &header);
	memcpy(s->data + DQ_TCP_DGRAM_HEADER_BYTES, data, len);
	if (link)
		s->state = SEND_HELD;
	else
		send_out(dg, s);
	return 0;
}

/* One datagram into *out. 1: done, 0: nothing there. */
static int receive(struct dq_tcp_dgram *dg, struct dq_dgram_event *out)
{
	for (unsigned tries = 0; tries < SENDS; tries++) {
		union { struct cmsghdr align; uint8_t bytes[256]; } control;
		uint8_t data[DQ_TCP_DGRAM_HEADER_BYTES + PAYLOAD + 1]; /* one more shows what is too long */
		struct sockaddr_storage from = {0};
		struct iovec iov = {data, sizeof data};
		struct msghdr msg = {.msg_name = &from, .msg_namelen = sizeof from, .msg_iov = &iov, .msg_iovlen = 1,
				     .msg_control = &control, .msg_controllen = sizeof control};
		struct dq_tcp_dgram_header header;

		ssize_t n = recvmsg(dg->fd, &msg, MSG_DONTWAIT);
		if (n < 0 && errno == EAGAIN)
			return 0;
		if (n < 0)
			continue; /* an error of an earlier send, told here */
		const uint64_t now = dq_tcp_now();
		if (dq_tcp_dgram_get(data, (size_t)n, &header) != 0 || header.len > PAYLOAD) {
			dg->ignored++;
			continue;
		}
		uint64_t time = now;
		for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c))
			if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_TIMESTAMPING) {
				const struct scm_timestamping *stamp = (const struct scm_timestamping *)(const void *)CMSG_DATA(c);
				if (stamp->ts[0].tv_sec)
					time = from_wall(dg, &stamp->ts[0]);
			}
		if (header.time)
			time = DQ_MIN(header.time, now);
		out->kind = DQ_DGRAM_RECEIVED;
		out->id = 0;
		out->error = 0;
		out->time_ns = time;
		out->len = header.len;
		memcpy(out->data, data + DQ_TCP_DGRAM_HEADER_BYTES, header.len);
		dq_tcp_endpoint_put(&out->from, DQ_TCP_ENDPOINT_DGRAM, &from, 0, NULL);
		return 1;
	}
	return 0;
}

int dq_tcp_dgram_poll(struct dq_dgram *d, struct dq_dgram_event *out, unsigned n)
{
	struct dq_tcp_dgram *dg = dgram_of(d);
	unsigned taken = 0;

	measure_offset(dg);
	if (dg->stamps)
		read_stamps(dg); /* also those that nobody waits for: an unread one keeps the socket readable */
	if (dg->used) {
		const uint64_t now = dq_tcp_now();
		for (struct send *s = dg->sends; s < dg->sends + SENDS; s++)
			if (s->state == SEND_HELD && s->release_ns <= now)
				send_out(dg, s);
		for (struct send *s = dg->sends; s < dg->sends + SENDS && taken < n; s++) {
			if (s->state == SEND_STAMP && now > s->called_ns && now - s->called_ns > STAMP_WAIT_NS)
				s->state = SEND_DONE;
			if (s->state != SEND_DONE)
				continue;
			struct dq_dgram_event *e = &out[taken++];
			memset(e, 0, sizeof *e);
			e->kind = s->error ? DQ_DGRAM_SEND_ERROR : DQ_DGRAM_SENT;
			e->id = s->id;
			e->time_ns = s->time_ns;
			e->error = s->error;
			s->state = SEND_FREE;
			dg->used--;
		}
	}
	while (taken < n && receive(dg, &out[taken]))
		taken++;
	return (int)taken;
}

int dq_tcp_dgram_fd(const struct dq_dgram *d)
{
	return dgram_of_const(d)->fd;
}

uint64_t dq_tcp_dgram_next_deadline(const struct dq_dgram *d)
{
	const struct dq_tcp_dgram *dg = dgram_of_const(d);
	uint64_t next = DQ_NEVER;

	for (const struct send *s = dg->sends; dg->used && s < dg->sends + SENDS; s++) {
		if (s->state == SEND_HELD)
			next = DQ_MIN(next, s->release_ns);
		else if (s->state == SEND_STAMP)
			next = DQ_MIN(next, s->called_ns + STAMP_WAIT_NS + 1);
		else if (s->state == SEND_DONE)
			next = 0;
	}
	return next;
}

const char *dq_tcp_dgram_time_source(const struct dq_dgram *d)
{
	const struct dq_tcp_dgram *dg = dgram_of_const(d);
	return dg->used_link ? "virtual" : dg->stamps ? "kernel" : "software";
}
