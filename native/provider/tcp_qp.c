/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A QP of the tcp provider: one TCP connection. Sending gathers frames straight from registered memory, receiving puts
 * payload straight into it. What the peer sends is checked before it has any effect.
 */
#include <errno.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

#include "provider/tcp.h"

#define TX_FRAMES 64u                  /* frames of one sendmsg; two iovecs each */
#define TX_BYTES (1u << 20)            /* payload of one sendmsg, about */
#define TX_CALLS 4                     /* sendmsg of one turn, so that other QPs get theirs */
#define RX_BYTES (1u << 20)            /* received in one turn, about */
#define RX_SMALL 2048u                 /* where payloads are up to this, reading many frames at once and copying them costs less */
#define RX_SPARE 1024u                 /* read behind a larger payload: the next header, and little to copy */
#define SHORTS_MIN 16u

enum parse_result { PARSE_MORE, PARSE_PAUSED, PARSE_FAILED };

static uint32_t pow2_at_least(uint32_t n)
{
	uint32_t p = 1;
	while (p < n)
		p *= 2;
	return p;
}

static bool same_token(const uint8_t *a, const uint8_t *b)
{
	uint8_t diff = 0;
	for (unsigned i = 0; i < DQ_TCP_TOKEN_BYTES; i++) /* in constant time: the other side may be guessing */
		diff |= a[i] ^ b[i];
	return diff == 0;
}

/* ---- create, destroy, errors ---- */

static int take_number(struct dq_tcp_device *dev, uint32_t *number)
{
	uint32_t i = 0;
	while (i < dev->qps_cap && dev->qps[i])
		i++;
	if (i == dev->qps_cap) {
		uint32_t cap = dev->qps_cap ? dev->qps_cap * 2 : 32;
		if (cap > DQ_TCP_MAX_QPS)
			return -ENOSPC;
		struct dq_tcp_qp **qps = realloc(dev->qps, cap * sizeof(*qps));
		if (!qps)
			return -ENOMEM;
		memset(qps + dev->qps_cap, 0, (cap - dev->qps_cap) * sizeof(*qps));
		dev->qps = qps;
		dev->qps_cap = cap;
	}
	*number = i;
	return 0;
}

static void qp_free(struct dq_tcp_qp *qp)
{
	free(qp->sq);
	free(qp->rq);
	free(qp->shorts);
	free(qp);
}

int dq_tcp_qp_create(struct dq_device *device, const struct dq_qp_attr *attr, struct dq_qp **out, struct dq_error *err)
{
	struct dq_tcp_device *dev = dq_tcp_device_of(device);

	if (attr->send_depth == 0 || attr->send_depth > DQ_TCP_MAX_DEPTH || attr->recv_depth > DQ_TCP_MAX_DEPTH)
		return dq_error_set(err, -EINVAL, "device %s: QP with send depth %u and receive depth %u; expected 1 to %u and 0 to %u",
				    dev->cfg.name, attr->send_depth, attr->recv_depth, DQ_TCP_MAX_DEPTH, DQ_TCP_MAX_DEPTH);
	struct dq_tcp_qp *qp = calloc(1, sizeof *qp);
	if (!qp)
		return dq_error_set(err, -ENOMEM, "device %s: no memory for a QP", dev->cfg.name);
	qp->dev = dev;
	qp->attr = *attr;
	qp->fd = -1;
	qp->sq_mask = pow2_at_least(attr->send_depth) - 1;
	qp->rq_mask = pow2_at_least(DQ_MAX(attr->recv_depth, 1u)) - 1;
	/* On a link each acknowledgement has its own time, so each may have to wait in line. */
	qp->shorts_mask = pow2_at_least(SHORTS_MIN + (attr->link ? attr->recv_depth : 0)) - 1;
	qp->sq = calloc(qp->sq_mask + 1, sizeof *qp->sq);
	qp->shorts = calloc(qp->shorts_mask + 1, sizeof *qp->shorts);
	qp->rq = calloc(qp->rq_mask + 1, sizeof *qp->rq);
	int rc = qp->sq && qp->shorts && qp->rq ? take_number(dev, &qp->number) : -ENOMEM;
	if (!rc && getrandom(qp->token, sizeof qp->token, 0) != (ssize_t)sizeof qp->token)
		rc = -EIO;
	if (!rc)
		rc = dq_tcp_cq_reserve(dev, attr);
	if (rc) {
		qp_free(qp);
		return dq_error_set(err, rc, "device %s: no room for a QP beside %u others: %s", dev->cfg.name, dev->qps_used, strerror(-rc));
	}
	qp->generation = dev->generation++;
	dev->qps[qp->number] = qp;
	dev->qps_used++;
	dq_tcp_device_timer(dev);
	*out = (struct dq_qp *)(void *)qp;
	return 0;
}

void dq_tcp_qp_endpoint(const struct dq_qp *q, struct dq_endpoint *out)
{
	const struct dq_tcp_qp *qp = (const struct dq_tcp_qp *)(const void *)q;
	dq_tcp_endpoint_put(out, DQ_TCP_ENDPOINT_QP, &qp->dev->addr, qp->number, qp->token);
}

static void drop_mem(struct dq_tcp_mem **mem)
{
	if (*mem)
		(*mem)->uses--;
	*mem = NULL;
}

/* No more traffic; completions are the caller's. */
static void qp_hang_up(struct dq_tcp_qp *qp)
{
	qp->state = DQ_TCP_QP_ERROR;
	dq_tcp_list_remove(&qp->rx_node);
	dq_tcp_list_remove(&qp->tx_node);
	dq_tcp_list_remove(&qp->timed_node);
	if (qp->fd >= 0) {
		shutdown(qp->fd, SHUT_RDWR);
		close(qp->fd);
		qp->fd = -1;
	}
	drop_mem(&qp->place_mem);
}

void dq_tcp_qp_fail(struct dq_tcp_qp *qp, enum dq_wc_status status, uint32_t vendor)
{
	if (qp->state == DQ_TCP_QP_ERROR)
		return;
	qp_hang_up(qp);
	struct dq_wc wc = {.time_ns = dq_tcp_now(), .status = DQ_WC_FLUSHED};
	for (; qp->sq_done != qp->sq_posted; qp->sq_done++) {
		struct dq_tcp_wr *wr = &qp->sq[qp->sq_done & qp->sq_mask];
		wc.op = wr->op;
		wc.wr_id = wr->wr_id;
		wc.len = wr->len;
		drop_mem(&wr->mem);
		qp->sq_unpolled++;
		dq_tcp_cq_push(qp, &wc);
	}
	qp->sq_sent = qp->sq_posted;
	for (; qp->rq_head != qp->rq_tail; qp->rq_head++) {
		struct dq_tcp_rq *rq = &qp->rq[qp->rq_head & qp->rq_mask];
		wc.op = DQ_WC_RECV;
		wc.wr_id = rq->wr_id;
		wc.len = 0;
		drop_mem(&rq->mem);
		qp->rq_unpolled++;
		dq_tcp_cq_push(qp, &wc);
	}
	wc.op = DQ_WC_FAILED;
	wc.wr_id = 0;
	wc.status = (uint8_t)status;
	wc.vendor = vendor;
	dq_tcp_cq_push(qp, &wc);
}

void dq_tcp_qp_fence(struct dq_qp *q)
{
	dq_tcp_qp_fail(dq_tcp_qp_of(q), DQ_WC_FLUSHED, 0);
}

void dq_tcp_qp_destroy(struct dq_qp *q)
{
	if (!q)
		return;
	struct dq_tcp_qp *qp = dq_tcp_qp_of(q);
	struct dq_tcp_device *dev = qp->dev;

	qp_hang_up(qp);
	for (; qp->sq_done != qp->sq_posted; qp->sq_done++)
		drop_mem(&qp->sq[qp->sq_done & qp->sq_mask].mem);
	for (; qp->rq_head != qp->rq_tail; qp->rq_head++)
		drop_mem(&qp->rq[qp->rq_head & qp->rq_mask].mem);
	dq_tcp_cq_release(dev, qp);
	dev->qps[qp->number] = NULL;
	dev->qps_used--;
	qp_free(qp);
}

/* The peer sent what it may not: tell it why, as far as the socket takes it, and end the connection. */
static void qp_refuse(struct dq_tcp_qp *qp, enum dq_wc_status status)
{
	struct dq_tcp_frame nak = {.type = DQ_TCP_NAK, .status = (uint16_t)status, .count = qp->taken};
	uint8_t header[DQ_TCP_HEADER_BYTES];
	struct iovec iov[3];
	int n = 0;

	if (status == DQ_WC_REMOTE_ACCESS)
		qp->dev->stats.access_violations++;
	else
		qp->dev->stats.bad_frames++;
	if (qp->state == DQ_TCP_QP_UP) {
		if (qp->current == DQ_TCP_FROM_SHORT) {
			struct dq_tcp_short *s = &qp->shorts[qp->shorts_head & qp->shorts_mask];
			iov[n++] = (struct iovec){s->header + qp->current_off, DQ_TCP_HEADER_BYTES - qp->current_off};
		} else if (qp->current == DQ_TCP_FROM_SQ) {
			struct dq_tcp_wr *wr = &qp->sq[qp->sq_sent & qp->sq_mask];
			uint32_t off = qp->current_off;
			if (off < DQ_TCP_HEADER_BYTES) {
				iov[n++] = (struct iovec){wr->header + off, DQ_TCP_HEADER_BYTES - off};
				off = DQ_TCP_HEADER_BYTES;
			}
			off -= DQ_TCP_HEADER_BYTES;
			if (wr->len > off)
				iov[n++] = (struct iovec){(void *)(uintptr_t)(wr->data + off), wr->len - off};
		}
		dq_tcp_frame_put(header, &nak);
		iov[n++] = (struct iovec){header, sizeof header};
		struct msghdr msg = {.msg_iov = iov, .msg_iovlen = (size_t)n};
		ssize_t sent = sendmsg(qp->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
		(void)sent; /* where it does not fit, the peer sees the connection end */
	}
	dq_tcp_qp_fail(qp, status, status == DQ_WC_REMOTE_ACCESS ? EACCES : EPROTO);
}

void dq_tcp_qp_forget(struct dq_tcp_qp *qp, struct dq_tcp_mem *mem)
{
	if (qp->state == DQ_TCP_QP_ERROR)
		return;
	for (uint32_t i = qp->rq_head; i != qp->rq_tail; i++)
		if (qp->rq[i & qp->rq_mask].mem == mem) {
			dq_tcp_qp_fail(qp, DQ_WC_LOCAL, EFAULT);
			return;
		}
	for (uint32_t i = qp->sq_sent; i != qp->sq_posted; i++)
		if (qp->sq[i & qp->sq_mask].mem == mem) {
			dq_tcp_qp_fail(qp, DQ_WC_LOCAL, EFAULT);
			return;
		}
	if (qp->place_mem == mem) {
		qp_refuse(qp, DQ_WC_REMOTE_ACCESS);
		return;
	}
	for (uint32_t i = qp->sq_done; i != qp->sq_sent; i++) /* on the wire: its memory is not needed any more */
		if (qp->sq[i & qp->sq_mask].mem == mem)
			drop_mem(&qp->sq[i & qp->sq_mask].mem);
}

/* ---- connect ---- */

static void set_traffic_class(const struct dq_tcp_qp *qp)
{
	const int value = qp->attr.traffic_class;
	if (value == 0)
		return;
	if (qp->dev->addr.ss_family == AF_INET)
		setsockopt(qp->fd, IPPROTO_IP, IP_TOS, &value, sizeof value);
	else
		setsockopt(qp->fd, IPPROTO_IPV6, IPV6_TCLASS, &value, sizeof value);
}

static void qp_up(struct dq_tcp_qp *qp)
{
	const uint64_t now = dq_tcp_now();
	const struct dq_wc wc = {.op = DQ_WC_CONNECTED, .time_ns = now};

	qp->state = DQ_TCP_QP_UP;
	qp->progress_ns = qp->rx_ns = qp->heartbeat_ns = now;
	qp->asked_ns = 0;
	dq_tcp_cq_push(qp, &wc);
}

/* A fresh socket takes 64 bytes whole or is broken. */
static bool say_hello(struct dq_tcp_qp *qp)
{
	uint8_t bytes[DQ_TCP_HELLO_BYTES];
	struct dq_tcp_hello hello = {.version = DQ_TCP_VERSION, .status = DQ_TCP_HELLO_OK, .to_qp = qp->peer_qp, .from_qp = qp->number};

	memcpy(hello.to_token, qp->peer_token, DQ_TCP_TOKEN_BYTES);
	memcpy(hello.from_token, qp->token, DQ_TCP_TOKEN_BYTES);
	dq_tcp_hello_put(bytes, &hello);
	return send(qp->fd, bytes, sizeof bytes, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof bytes;
}

bool dq_tcp_qp_matches(const struct dq_tcp_qp *qp, const struct dq_tcp_hello *hello)
{
	return hello->version == DQ_TCP_VERSION && hello->to_qp == qp->number && same_token(hello->to_token, qp->token) &&
	       hello->from_qp == qp->peer_qp && same_token(hello->from_token, qp->peer_token);
}

void dq_tcp_qp_accept(struct dq_tcp_qp *qp, int fd)
{
	qp->fd = fd;
	int rc = dq_tcp_device_watch(qp->dev, qp, true);
	if (rc) {
		dq_tcp_qp_fail(qp, DQ_WC_LOCAL, (uint32_t)-rc);
		return;
	}
	set_traffic_class(qp);
	if (!say_hello(qp)) {
		dq_tcp_qp_fail(qp, DQ_WC_REMOTE_GONE, (uint32_t)errno);
		return;
	}
	qp_up(qp);
	dq_tcp_list_add(&qp->dev->rx, &qp->rx_node);
}

int dq_tcp_qp_connect(struct dq_qp *q, const struct dq_endpoint *endpoint, bool dial, struct dq_error *err)
{
	struct dq_tcp_qp *qp = dq_tcp_qp_of(q);
	struct dq_tcp_device *dev = qp->dev;
	struct dq_tcp_peer peer;
	const int one = 1;

	if (qp->state != DQ_TCP_QP_INIT)
		return dq_error_set(err, -EISCONN, "device %s: QP %u was connected before; make a new one", dev->cfg.name, qp->number);
	int rc = dq_tcp_endpoint_get(endpoint, DQ_TCP_ENDPOINT_QP, &dev->addr, &peer, err);
	if (rc)
		return rc;
	qp->peer_qp = peer.qp;
	memcpy(qp->peer_token, peer.token, DQ_TCP_TOKEN_BYTES);
	qp->connect_deadline_ns = dq_tcp_now() + dev->cfg.deadline_ns;
	if (!dial) {
		qp->state = DQ_TCP_QP_WAIT;
		int fd = dq_tcp_device_claim(dev, qp);
		if (fd >= 0)
			dq_tcp_qp_accept(qp, fd);
		return 0;
	}

	struct sockaddr_storage from = dev->addr; /* leave by this device's address, any port */
	if (from.ss_family == AF_INET)
		((struct sockaddr_in *)&from)->sin_port = 0;
	else
		((struct sockaddr_in6 *)&from)->sin6_port = 0;
	qp->fd = socket(from.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (qp->fd < 0)
		return dq_error_set(err, -errno, "device %s: socket: %s", dev->cfg.name, strerror(errno));
	dq_tcp_socket_tune(qp->fd);
	set_traffic_class(qp);
	setsockopt(qp->fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof one);
	if (bind(qp->fd, (const struct sockaddr *)&from, dev->addr_len) != 0) {
		rc = -errno;
		close(qp->fd);
		qp->fd = -1;
		return dq_error_set(err, rc, "device %s: cannot send from %s: %s; is the address still of this host?", dev->cfg.name,
				    dev->cfg.address, strerror(-rc));
	}
	qp->state = DQ_TCP_QP_DIAL;
	if (connect(qp->fd, (const struct sockaddr *)&peer.addr, peer.addr_len) != 0 && errno != EINPROGRESS) {
		dq_tcp_qp_fail(qp, DQ_WC_REMOTE_GONE, (uint32_t)errno);
		return 0;
	}
	rc = dq_tcp_device_watch(dev, qp, false);
	if (rc)
		dq_tcp_qp_fail(qp, DQ_WC_LOCAL, (uint32_t)-rc);
	return 0;
}

static void dial_event(struct dq_tcp_qp *qp)
{
	int error = 0;
	socklen_t len = sizeof error;

	if (getsockopt(qp->fd, SOL_SOCKET, SO_ERROR, &error, &len) != 0)
		error = errno;
	if (error) {
		dq_tcp_qp_fail(qp, error == ETIMEDOUT ? DQ_WC_TIMEOUT : DQ_WC_REMOTE_GONE, (uint32_t)error);
		return;
	}
	qp->state = DQ_TCP_QP_HELLO;
	if (!say_hello(qp))
		dq_tcp_qp_fail(qp, DQ_WC_REMOTE_GONE, (uint32_t)errno);
}

/* ---- sending ---- */

uint64_t dq_tcp_qp_release(const struct dq_tcp_qp *qp)
{
	uint64_t release = DQ_NEVER;

	if (qp->current != DQ_TCP_FROM_NONE)
		return 0;
	if (qp->shorts_head != qp->shorts_tail)
		release = qp->shorts[qp->shorts_head & qp->shorts_mask].release_ns;
	if (qp->sq_sent != qp->sq_posted)
		release = DQ_MIN(release, qp->sq[qp->sq_sent & qp->sq_mask].release_ns);
	return release;
}

static void schedule(struct dq_tcp_qp *qp)
{
	struct dq_tcp_device *dev = qp->dev;

	if (qp->state != DQ_TCP_QP_UP || qp->tx_blocked || qp->tx_broken || dq_tcp_list_in(&qp->tx_node))
		return;
	const uint64_t release = dq_tcp_qp_release(qp);
	if (release == DQ_NEVER)
		return;
	if (release <= dev->now_ns) {
		dq_tcp_list_remove(&qp->timed_node);
		dq_tcp_list_add(&dev->tx, &qp->tx_node);
	} else {
		dq_tcp_list_add(&dev->timed, &qp->timed_node);
		dev->release_ns = DQ_MIN(dev->release_ns, release);
	}
}

/* Queue an acknowledgement or heartbeat. Where the line is full an acknowledgement takes over the place of the last one,
 * which it covers, and a heartbeat is dropped: a full line is a sign of life. */
static void put_short(struct dq_tcp_qp *qp, const struct dq_tcp_frame *frame, uint64_t release)
{
	const uint32_t used = qp->shorts_tail - qp->shorts_head;
	const uint32_t first = qp->shorts_head + (qp->current == DQ_TCP_FROM_SHORT);
	struct dq_tcp_short *s = NULL;

	if (frame->type == DQ_TCP_ACK) {
		if (!qp->attr.link || used > qp->shorts_mask)
			for (uint32_t i = qp->shorts_tail; i != first && !s; i--)
				if (qp->shorts[(i - 1) & qp->shorts_mask].type == DQ_TCP_ACK)
					s = &qp->shorts[(i - 1) & qp->shorts_mask];
	} else if (used > qp->shorts_mask / 2) {
		return;
	}
	if (!s)
		s = &qp->shorts[qp->shorts_tail++ & qp->shorts_mask];
	dq_tcp_frame_put(s->header, frame);
	s->type = frame->type;
	s->release_ns = release;
}

/* Departure at time_ns: on a link that is the virtual time of what it answers. */
static void put_ack(struct dq_tcp_qp *qp, uint64_t time_ns)
{
	struct dq_tcp_frame ack = {.type = DQ_TCP_ACK, .count = qp->taken};
	uint64_t release = 0;

	if (qp->attr.link)
		ack.time = release = dq_link_send(qp->attr.link, time_ns, DQ_TCP_HEADER_BYTES, true);
	else
		ack.time = qp->frame.time; /* the peer's direction may have a link where this one has none */
	put_short(qp, &ack, release);
	qp->acked = qp->taken;
}

static void put_heartbeat(struct dq_tcp_qp *qp, uint8_t flags, uint64_t now)
{
	const struct dq_tcp_frame beat = {.type = DQ_TCP_HEARTBEAT, .flags = flags};
	put_short(qp, &beat, qp->attr.link ? dq_link_send(qp->attr.link, now, DQ_TCP_HEADER_BYTES, true) : 0);
}

/* The frames that may go out now, in order of release, acknowledgements first among equals. Returns the iovecs used. */
static unsigned gather(const struct dq_tcp_qp *qp, struct iovec *iov, uint8_t *from, unsigned *frames, uint64_t *bytes)
{
	uint32_t s = qp->shorts_head, w = qp->sq_sent;
	uint32_t skip = qp->current_off;
	uint8_t forced = qp->current;
	unsigned n = 0, f = 0;
	uint64_t total = 0;

	while (f < TX_FRAMES && total < TX_BYTES) {
		const struct dq_tcp_short *sh = s != qp->shorts_tail ? &qp->shorts[s & qp->shorts_mask] : NULL;
		const struct dq_tcp_wr *wr = w != qp->sq_posted ? &qp->sq[w & qp->sq_mask] : NULL;
		uint8_t source = forced;

		if (source == DQ_TCP_FROM_NONE) {
			if (sh && sh->release_ns > qp->dev->now_ns)
				sh = NULL;
			if (wr && wr->release_ns > qp->dev->now_ns)
				wr = NULL;
			if (sh && (!wr || sh->release_ns <= wr->release_ns))
				source = DQ_TCP_FROM_SHORT;
			else if (wr)
				source = DQ_TCP_FROM_SQ;
			else
				break;
		}
		forced = DQ_TCP_FROM_NONE;
		const uint8_t *header = source == DQ_TCP_FROM_SHORT ? qp->shorts[s++ & qp->shorts_mask].header : qp->sq[w & qp->sq_mask].header;
		if (skip < DQ_TCP_HEADER_BYTES) {
			iov[n++] = (struct iovec){(void *)(uintptr_t)(header + skip), DQ_TCP_HEADER_BYTES - skip};
			total += DQ_TCP_HEADER_BYTES - skip;
			skip = 0;
		} else {
			skip -= DQ_TCP_HEADER_BYTES;
		}
		if (source == DQ_TCP_FROM_SQ) {
			const struct dq_tcp_wr *sent = &qp->sq[w++ & qp->sq_mask];
			if (sent->len > skip) {
				iov[n++] = (struct iovec){(void *)(uintptr_t)(sent->data + skip), sent->len - skip};
				total += sent->len - skip;
			}
		}
		skip = 0;
		from[f++] = source;
	}
	*frames = f;
	*bytes = total;
	return n;
}

/* `bytes` of the gathered frames are on the wire. */
static void account(struct dq_tcp_qp *qp, const uint8_t *from, unsigned frames, uint64_t bytes)
{
	for (unsigned f = 0; f < frames; f++) {
		uint64_t size = DQ_TCP_HEADER_BYTES;
		if (from[f] == DQ_TCP_FROM_SQ)
			size += qp->sq[qp->sq_sent & qp->sq_mask].len;
		const uint64_t left = size - qp->current_off;
		if (bytes < left) {
			if (bytes || qp->current_off) {
				qp->current = from[f];
				qp->current_off += (uint32_t)bytes;
			}
			return;
		}
		bytes -= left;
		qp->current = DQ_TCP_FROM_NONE;
		qp->current_off = 0;
		if (from[f] == DQ_TCP_FROM_SQ)
			qp->sq_sent++;
		else
			qp->shorts_head++;
	}
}

void dq_tcp_qp_transmit(struct dq_tcp_qp *qp)
{
	struct iovec iov[2 * TX_FRAMES];
	uint8_t from[TX_FRAMES];

	if (qp->state != DQ_TCP_QP_UP || qp->tx_blocked || qp->tx_broken)
		return;
	for (int call = 0; call < TX_CALLS; call++) {
		unsigned frames;
		uint64_t bytes;
		struct msghdr msg = {.msg_iov = iov, .msg_iovlen = gather(qp, iov, from, &frames, &bytes)};
		if (frames == 0)
			break;
		ssize_t n = sendmsg(qp->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && (errno == EAGAIN || errno == ENOBUFS)) {
			qp->tx_blocked = true;
			return;
		}
		if (n < 0 && errno == EFAULT) {
			dq_tcp_qp_fail(qp, DQ_WC_LOCAL, EFAULT);
			return;
		}
		if (n < 0) { /* the peer may have said why before it hung up: read to the end, fail there */
			qp->tx_broken = qp->rx_hangup = true;
			dq_tcp_list_add(&qp->dev->rx, &qp->rx_node);
			return;
		}
		account(qp, from, frames, (uint64_t)n);
		if ((uint64_t)n < bytes) {
			qp->tx_blocked = true; /* the kernel's buffer is full; EPOLLOUT follows */
			return;
		}
	}
	schedule(qp);
}

static int post(struct dq_tcp_qp *qp, enum dq_wc_op op, uint64_t wr_id, struct dq_tcp_mem *mem, uint64_t offset, uint32_t len,
		struct dq_tcp_frame *frame, uint64_t now)
{
	if (len > DQ_MAX_SEGMENT_BYTES || (len && (!mem || mem->dev != qp->dev || offset > mem->len || len > mem->len - offset)))
		return -EINVAL;
	struct dq_tcp_wr *wr = &qp->sq[qp->sq_posted & qp->sq_mask];
	wr->op = (uint8_t)op;
	wr->wr_id = wr_id;
	wr->len = len;
	wr->mem = len ? mem : NULL;
	wr->data = len ? mem->base + offset : NULL;
	wr->release_ns = 0;
	if (wr->mem)
		mem->uses++;
	/* The link counts payload, as the windows of the caller do; an empty message is worth its header. */
	if (qp->attr.link)
		wr->release_ns = dq_link_send(qp->attr.link, now, len ? len : DQ_TCP_HEADER_BYTES, qp->attr.kind == DQ_QP_CONTROL);
	frame->len = len;
	frame->time = wr->release_ns;
	dq_tcp_frame_put(wr->header, frame);
	qp->sq_posted++;
	return 0;
}

/* How many more fit, or negative errno; *now is read where it is needed. */
static int post_begin(struct dq_tcp_qp *qp, uint64_t *now)
{
	if (qp->state != DQ_TCP_QP_UP)
		return qp->state == DQ_TCP_QP_ERROR ? -EIO : -ENOTCONN;
	if (qp->attr.link || qp->sq_done == qp->sq_posted) {
		*now = dq_tcp_now();
		if (qp->sq_done == qp->sq_posted)
			qp->progress_ns = *now;
	}
	return (int)(qp->attr.send_depth - (qp->sq_posted - qp->sq_done) - qp->sq_unpolled);
}

static int post_end(struct dq_tcp_qp *qp, unsigned posted, unsigned wanted, int rc)
{
	if (posted)
		schedule(qp);
	return posted || !wanted ? (int)posted : rc;
}

int dq_tcp_qp_post_write(struct dq_qp *q, const struct dq_write *wr, unsigned n)
{
	struct dq_tcp_qp *qp = dq_tcp_qp_of(q);
	uint64_t now = 0;
	unsigned i = 0;
	int rc = 0;
	int room = post_begin(qp, &now);

	if (room < 0)
		return room;
	for (; i < n && i < (unsigned)room && !rc; i++) {
		struct dq_tcp_frame frame = {.type = DQ_TCP_WRITE, .imm = wr[i].imm, .addr = wr[i].remote_addr, .key = wr[i].remote_key};
		rc = post(qp, DQ_WC_WRITE, wr[i].wr_id, dq_tcp_mem_of(wr[i].mem), wr[i].offset, wr[i].len, &frame, now);
		if (rc)
			break;
	}
	return post_end(qp, i, n, rc);
}

int dq_tcp_qp_post_send(struct dq_qp *q, const struct dq_send *wr, unsigned n)
{
	struct dq_tcp_qp *qp = dq_tcp_qp_of(q);
	uint64_t now = 0;
	unsigned i = 0;
	int rc = 0;
	int room = post_begin(qp, &now);

	if (room < 0)
		return room;
	for (; i < n && i < (unsigned)room; i++) {
		struct dq_tcp_frame frame = {.type = DQ_TCP_SEND};
		rc = post(qp, DQ_WC_SEND, wr[i].wr_id, dq_tcp_mem_of(wr[i].mem), wr[i].offset, wr[i].len, &frame, now);
		if (rc)
			break;
	}
	return post_end(qp, i, n, rc);
}

int dq_tcp_qp_post_recv(struct dq_qp *q, const struct dq_recv *wr, unsigned n)
{
	struct dq_tcp_qp *qp = dq_tcp_qp_of(q);
	unsigned i = 0;

	if (qp->state == DQ_TCP_QP_ERROR)
		return -EIO;
	if (qp->attr.kind != DQ_QP_CONTROL) /* the receive depth of a data QP is for writes, which need no receive here */
		return -EINVAL;
	for (; i < n && qp->rq_tail - qp->rq_head + qp->rq_unpolled < qp->attr.recv_depth; i++) {
		struct dq_tcp_mem *mem = dq_tcp_mem_of(wr[i].mem);
		if (wr[i].len && (!mem || mem->dev != qp->dev || wr[i].offset > mem->len || wr[i].len > mem->len - wr[i].offset)) {
			if (i == 0)
				return -EINVAL;
			break;
		}
		struct dq_tcp_rq *rq = &qp->rq[qp->rq_tail++ & qp->rq_mask];
		rq->wr_id = wr[i].wr_id;
		rq->len = wr[i].len;
		rq->mem = wr[i].len ? mem : NULL;
		rq->data = wr[i].len ? mem->base + wr[i].offset : NULL;
		if (rq->mem)
			mem->uses++;
	}
	return (int)i;
}

/* ---- receiving ---- */

/* A virtual time told by the peer has come already, or it is none. */
static uint64_t sane_time(struct dq_tcp_device *dev, uint64_t time)
{
	if (time == 0)
		return dev->now_ns;
	if (time > dev->now_ns)
		dev->now_ns = dq_tcp_now();
	return DQ_MIN(time, dev->now_ns);
}

/* The payload of qp->frame is in place. */
static void frame_complete(struct dq_tcp_qp *qp)
{
	struct dq_tcp_device *dev = qp->dev;
	struct dq_wc wc = {.len = qp->frame.len, .time_ns = sane_time(dev, qp->frame.time)};

	if (qp->frame.type == DQ_TCP_WRITE) {
		wc.op = DQ_WC_SEGMENT;
		wc.imm = qp->frame.imm;
	} else {
		struct dq_tcp_rq *rq = &qp->rq[qp->rq_head++ & qp->rq_mask];
		wc.op = DQ_WC_RECV;
		wc.wr_id = rq->wr_id;
		qp->rq_unpolled++;
		drop_mem(&rq->mem);
	}
	drop_mem(&qp->place_mem);
	qp->in_payload = false;
	dq_tcp_cq_push(qp, &wc);
	qp->taken++;
	if (qp->attr.link)
		put_ack(qp, wc.time_ns);
}

/* The first n outstanding pieces of work are done. */
static void complete(struct dq_tcp_qp *qp, uint32_t n, uint64_t ack_time)
{
	struct dq_tcp_device *dev = qp->dev;
	struct dq_wc wc = {.status = DQ_WC_SUCCESS};

	if (n == 0)
		return;
	const uint64_t time = sane_time(dev, ack_time);
	/* One acknowledgement may cover several frames. Each was acknowledged in virtual time when it arrived: as much later
	 * than its own arrival as the last one. */
	const uint64_t last = qp->sq[(qp->sq_done + n - 1) & qp->sq_mask].release_ns;
	const uint64_t back = last && ack_time && time > last ? time - last : 0;
	for (uint32_t i = 0; i < n; i++) {
		struct dq_tcp_wr *wr = &qp->sq[qp->sq_done++ & qp->sq_mask];
		wc.op = wr->op;
		wc.wr_id = wr->wr_id;
		wc.len = wr->len;
		wc.time_ns = last && ack_time ? wr->release_ns + back : time;
		drop_mem(&wr->mem);
		qp->sq_unpolled++;
		dq_tcp_cq_push(qp, &wc);
	}
	qp->progress_ns = dev->now_ns;
}

static enum parse_result refused(struct dq_tcp_qp *qp, enum dq_wc_status status)
{
	qp_refuse(qp, status);
	return PARSE_FAILED;
}

/* A header is complete in `frame`. PARSE_MORE: it was taken. */
static enum parse_result take_header(struct dq_tcp_qp *qp, const struct dq_tcp_frame *frame)
{
	struct dq_tcp_device *dev = qp->dev;

	switch ((enum dq_tcp_frame_type)frame->type) {
	case DQ_TCP_WRITE:
		if (frame->len > DQ_MAX_SEGMENT_BYTES)
			return refused(qp, DQ_WC_PROTOCOL);
		if (!dq_tcp_cq_has_room(dev))
			return PARSE_PAUSED;
		qp->frame = *frame;
		if (frame->len == 0) {
			frame_complete(qp);
			return PARSE_MORE;
		}
		qp->place_mem = dq_tcp_mem_find(dev, frame->key, frame->addr, frame->len);
		if (!qp->place_mem)
			return refused(qp, DQ_WC_REMOTE_ACCESS);
		qp->place_mem->uses++;
		qp->place = qp->place_mem->base + frame->addr;
		break;
	case DQ_TCP_SEND: {
		/* The caller's credits see to it that a receive is posted and large enough. */
		struct dq_tcp_rq *rq = &qp->rq[qp->rq_head & qp->rq_mask];
		if (qp->rq_head == qp->rq_tail || frame->len > rq->len)
			return refused(qp, DQ_WC_PROTOCOL);
		qp->frame = *frame;
		if (frame->len == 0) {
			frame_complete(qp);
			return PARSE_MORE;
		}
		qp->place_mem = rq->mem;
		qp->place_mem->uses++;
		qp->place = rq->data;
		break;
	}
	case DQ_TCP_ACK:
		if (frame->count - qp->sq_done > qp->sq_sent - qp->sq_done)
			return refused(qp, DQ_WC_PROTOCOL);
		complete(qp, frame->count - qp->sq_done, frame->time);
		return PARSE_MORE;
	case DQ_TCP_NAK:
		if (frame->count - qp->sq_done > qp->sq_sent - qp->sq_done)
			return refused(qp, DQ_WC_PROTOCOL);
		complete(qp, frame->count - qp->sq_done, frame->time);
		if (frame->status == DQ_WC_REMOTE_ACCESS && qp->sq_done != qp->sq_posted) {
			struct dq_tcp_wr *wr = &qp->sq[qp->sq_done & qp->sq_mask];
			const struct dq_wc wc = {.op = wr->op, .wr_id = wr->wr_id, .len = wr->len, .status = DQ_WC_REMOTE_ACCESS,
						 .time_ns = dev->now_ns, .vendor = EACCES};
			drop_mem(&wr->mem);
			if (qp->sq_sent == qp->sq_done)
				qp->sq_sent++;
			qp->sq_done++;
			qp->sq_unpolled++;
			dq_tcp_cq_push(qp, &wc);
			dq_tcp_qp_fail(qp, DQ_WC_REMOTE_ACCESS, EACCES);
		} else {
			dq_tcp_qp_fail(qp, DQ_WC_PROTOCOL, EPROTO);
		}
		return PARSE_FAILED;
	case DQ_TCP_HEARTBEAT:
		if (frame->len)
			return refused(qp, DQ_WC_PROTOCOL);
		if (!(frame->flags & DQ_TCP_REPLY))
			put_heartbeat(qp, DQ_TCP_REPLY, dev->now_ns);
		return PARSE_MORE;
	default:
		return refused(qp, DQ_WC_PROTOCOL);
	}
	qp->place_left = frame->len;
	qp->in_payload = true;
	return PARSE_MORE;
}

/* The answer to our hello. */
static enum parse_result take_hello(struct dq_tcp_qp *qp)
{
	struct dq_tcp_hello hello;

	if (qp->rx_tail - qp->rx_head < DQ_TCP_HELLO_BYTES)
		return PARSE_MORE;
	if (dq_tcp_hello_get(qp->rx_buffer + qp->rx_head, &hello) != 0 || hello.to_qp != qp->number || !same_token(hello.to_token, qp->token)) {
		qp->dev->stats.bad_frames++;
		dq_tcp_qp_fail(qp, DQ_WC_PROTOCOL, EPROTO);
		return PARSE_FAILED;
	}
	if (hello.version != DQ_TCP_VERSION || hello.status != DQ_TCP_HELLO_OK) {
		dq_tcp_qp_fail(qp, DQ_WC_PROTOCOL, hello.version); /* the version the peer speaks */
		return PARSE_FAILED;
	}
	qp->rx_head += DQ_TCP_HELLO_BYTES;
	qp_up(qp);
	return PARSE_MORE;
}

/* Everything that the buffer holds. PARSE_MORE: more bytes are needed to go on. */
static enum parse_result parse(struct dq_tcp_qp *qp)
{
	if (qp->state == DQ_TCP_QP_HELLO) {
		enum parse_result r = take_hello(qp);
		if (r != PARSE_MORE || qp->state == DQ_TCP_QP_HELLO)
			return r;
	}
	for (;;) {
		if (qp->in_payload) {
			const uint32_t n = DQ_MIN(qp->rx_tail - qp->rx_head, qp->place_left);
			if (n) {
				memcpy(qp->place, qp->rx_buffer + qp->rx_head, n);
				qp->rx_head += n;
				qp->place += n;
				qp->place_left -= n;
			}
			if (qp->place_left)
				return PARSE_MORE;
			frame_complete(qp);
		}
		if (qp->rx_tail - qp->rx_head < DQ_TCP_HEADER_BYTES)
			return PARSE_MORE;
		struct dq_tcp_frame frame;
		dq_tcp_frame_get(qp->rx_buffer + qp->rx_head, &frame);
		enum parse_result r = take_header(qp, &frame);
		if (r != PARSE_MORE)
			return r;
		qp->rx_head += DQ_TCP_HEADER_BYTES;
	}
}

void dq_tcp_qp_receive(struct dq_tcp_qp *qp)
{
	struct dq_tcp_device *dev = qp->dev;
	int64_t budget = RX_BYTES;
	bool drained = false;

	if (qp->state != DQ_TCP_QP_UP && qp->state != DQ_TCP_QP_HELLO)
		return;
	for (;;) {
		enum parse_result r = parse(qp);
		if (r == PARSE_FAILED)
			return;
		if (r == PARSE_PAUSED || (budget <= 0 && !drained)) {
			dq_tcp_list_add(&dev->rx, &qp->rx_node);
			break;
		}
		if (drained)
			break;

		struct iovec iov[2];
		int n = 0;
		size_t asked = 0;
		if (qp->in_payload) { /* then the buffer is empty */
			const uint32_t spare = qp->frame.len <= RX_SMALL ? DQ_TCP_RX_BUFFER : RX_SPARE;
			qp->rx_head = qp->rx_tail = 0;
			iov[n++] = (struct iovec){qp->place, qp->place_left};
			iov[n++] = (struct iovec){qp->rx_buffer, spare};
			asked = (size_t)qp->place_left + spare;
		} else {
			const uint32_t have = qp->rx_tail - qp->rx_head;
			memmove(qp->rx_buffer, qp->rx_buffer + qp->rx_head, have);
			qp->rx_head = 0;
			qp->rx_tail = have;
			iov[n++] = (struct iovec){qp->rx_buffer + have, DQ_TCP_RX_BUFFER - have};
			asked = DQ_TCP_RX_BUFFER - have;
		}
		ssize_t got = readv(qp->fd, iov, n);
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0 && errno == EAGAIN)
			break;
		if (got <= 0) {
			const int error = got < 0 ? errno : 0;
			dq_tcp_qp_fail(qp, error == EFAULT ? DQ_WC_LOCAL : error == ETIMEDOUT ? DQ_WC_TIMEOUT : DQ_WC_REMOTE_GONE, (uint32_t)error);
			return;
		}
		drained = (size_t)got < asked && !qp->rx_hangup; /* the next byte will be an event */
		budget -= got;
		qp->rx_ns = dev->now_ns = dq_tcp_now();
		qp->asked_ns = 0;
		if (qp->in_payload) {
			const uint32_t direct = (uint32_t)DQ_MIN((size_t)got, (size_t)qp->place_left);
			qp->place += direct;
			qp->place_left -= direct;
			got -= direct;
		}
		qp->rx_tail += (uint32_t)got;
	}
	if (qp->taken != qp->acked)
		put_ack(qp, dev->now_ns);
	if (qp->shorts_head != qp->shorts_tail) {
		if (dq_tcp_qp_release(qp) <= dev->now_ns)
			dq_tcp_qp_transmit(qp);
		else
			schedule(qp);
	}
}

void dq_tcp_qp_event(struct dq_tcp_qp *qp, uint32_t events)
{
	if (qp->state == DQ_TCP_QP_DIAL) {
		dial_event(qp);
		if (qp->state == DQ_TCP_QP_ERROR)
			return;
	}
	if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))
		qp->rx_hangup = true;
	if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR))
		dq_tcp_list_add(&qp->dev->rx, &qp->rx_node);
	if ((events & EPOLLOUT) && qp->tx_blocked) {
		qp->tx_blocked = false;
		schedule(qp);
	}
}

void dq_tcp_qp_scan(struct dq_tcp_qp *qp, uint64_t now)
{
	struct dq_tcp_device *dev = qp->dev;
	uint64_t quiet_since = qp->rx_ns;

	if (qp->state == DQ_TCP_QP_WAIT || qp->state == DQ_TCP_QP_DIAL || qp->state == DQ_TCP_QP_HELLO) {
		if (now >= qp->connect_deadline_ns)
			dq_tcp_qp_fail(qp, DQ_WC_TIMEOUT, ETIMEDOUT);
		return;
	}
	if (qp->state != DQ_TCP_QP_UP || dq_tcp_list_in(&qp->rx_node)) /* unread input: it may hold what is waited for */
		return;
	if (qp->sq_done != qp->sq_posted) {
		/* On a link the clock of an operation runs from the time it goes on the wire. */
		const uint64_t since = DQ_MAX(qp->progress_ns, qp->sq[qp->sq_done & qp->sq_mask].release_ns);
		if (now > since && now - since >= dev->cfg.deadline_ns) {
			dq_tcp_qp_fail(qp, DQ_WC_TIMEOUT, ETIMEDOUT);
			return;
		}
		quiet_since = DQ_MAX(quiet_since, since);
	} else if (qp->attr.kind != DQ_QP_CONTROL) {
		qp->asked_ns = 0;
		return;
	}
	if (now <= quiet_since || now - quiet_since < dev->cfg.heartbeat_ns)
		return;
	if (qp->asked_ns && now - qp->asked_ns >= DQ_TCP_SILENT_HEARTBEATS * dev->cfg.heartbeat_ns) {
		dq_tcp_qp_fail(qp, DQ_WC_TIMEOUT, ETIMEDOUT);
		return;
	}
	if (qp->tx_blocked) { /* what broke the last attempt need not have been a full buffer */
		qp->tx_blocked = false;
		if (!qp->asked_ns)
			qp->asked_ns = now;
	} else if (!qp->asked_ns || now - qp->heartbeat_ns >= dev->cfg.heartbeat_ns) {
		put_heartbeat(qp, 0, now);
		qp->heartbeat_ns = now;
		if (!qp->asked_ns)
			qp->asked_ns = now;
	}
	schedule(qp);
}
