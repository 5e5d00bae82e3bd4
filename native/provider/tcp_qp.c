/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of a QP of the tcp provider, which is one TCP connection: create, connect, time-outs, fail, destroy. What it sends
 * is in tcp_send.c, what it receives in tcp_receive.c.
 */
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

#include "provider/tcp.h"

#define SHORTS_MIN 16u                 /* acknowledgements and heartbeats that wait to be sent */

static uint32_t pow2_at_least(uint32_t n)
{
	uint32_t p = 1;
	while (p < n)
		p *= 2;
	return p;
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
	dq_tcp_mem_drop(&qp->place_mem);
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
		dq_tcp_mem_drop(&wr->mem);
		qp->sq_unpolled++;
		dq_tcp_cq_push(qp, &wc);
	}
	qp->sq_sent = qp->sq_posted;
	for (; qp->rq_head != qp->rq_tail; qp->rq_head++) {
		struct dq_tcp_rq *rq = &qp->rq[qp->rq_head & qp->rq_mask];
		wc.op = DQ_WC_RECV;
		wc.wr_id = rq->wr_id;
		wc.len = 0;
		dq_tcp_mem_drop(&rq->mem);
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
		dq_tcp_mem_drop(&qp->sq[qp->sq_done & qp->sq_mask].mem);
	for (; qp->rq_head != qp->rq_tail; qp->rq_head++)
		dq_tcp_mem_drop(&qp->rq[qp->rq_head & qp->rq_mask].mem);
	dq_tcp_cq_release(dev, qp);
	dev->qps[qp->number] = NULL;
	dev->qps_used--;
	qp_free(qp);
}

/* The peer sent what it may not: tell it why, as far as the socket takes it, and end the connection. */
void dq_tcp_qp_refuse(struct dq_tcp_qp *qp, enum dq_wc_status status)
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
		dq_tcp_qp_refuse(qp, DQ_WC_REMOTE_ACCESS);
		return;
	}
	for (uint32_t i = qp->sq_done; i != qp->sq_sent; i++) /* on the wire: its memory is not needed any more */
		if (qp->sq[i & qp->sq_mask].mem == mem)
			dq_tcp_mem_drop(&qp->sq[i & qp->sq_mask].mem);
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

void dq_tcp_qp_up(struct dq_tcp_qp *qp)
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
	return hello->version == DQ_TCP_VERSION && hello->to_qp == qp->number && dq_tcp_same_token(hello->to_token, qp->token) &&
	       hello->from_qp == qp->peer_qp && dq_tcp_same_token(hello->from_token, qp->peer_token);
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
	dq_tcp_qp_up(qp);
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

/* ---- events and time ---- */

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
		dq_tcp_qp_schedule(qp);
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
		dq_tcp_qp_heartbeat(qp, 0, now);
		qp->heartbeat_ns = now;
		if (!qp->asked_ns)
			qp->asked_ns = now;
	}
	dq_tcp_qp_schedule(qp);
}
