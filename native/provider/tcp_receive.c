/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a QP of the tcp provider receives. Payload goes straight into the memory it is for; everything the peer sends is
 * checked before it has any effect.
 */
#include <errno.h>
#include <sys/uio.h>

#include "provider/tcp.h"

#define RX_BYTES (1u << 20)            /* received in one turn, about, so that other QPs get theirs */
#define RX_SMALL 2048u                 /* where payloads are up to this, reading many frames at once and copying them costs less */
#define RX_SPARE 1024u                 /* read behind a larger payload: the next header, and little to copy */

enum parse_result { PARSE_MORE, PARSE_PAUSED, PARSE_FAILED };

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
		dq_tcp_mem_drop(&rq->mem);
	}
	dq_tcp_mem_drop(&qp->place_mem);
	qp->in_payload = false;
	dq_tcp_cq_push(qp, &wc);
	qp->taken++;
	if (qp->attr.link)
		dq_tcp_qp_ack(qp, wc.time_ns);
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
		dq_tcp_mem_drop(&wr->mem);
		qp->sq_unpolled++;
		dq_tcp_cq_push(qp, &wc);
	}
	qp->progress_ns = dev->now_ns;
}

static enum parse_result refused(struct dq_tcp_qp *qp, enum dq_wc_status status)
{
	dq_tcp_qp_refuse(qp, status);
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
			dq_tcp_mem_drop(&wr->mem);
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
			dq_tcp_qp_heartbeat(qp, DQ_TCP_REPLY, dev->now_ns);
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
	if (dq_tcp_hello_get(qp->rx_buffer + qp->rx_head, &hello) != 0 || hello.to_qp != qp->number || !dq_tcp_same_token(hello.to_token, qp->token)) {
		qp->dev->stats.bad_frames++;
		dq_tcp_qp_fail(qp, DQ_WC_PROTOCOL, EPROTO);
		return PARSE_FAILED;
	}
	if (hello.version != DQ_TCP_VERSION || hello.status != DQ_TCP_HELLO_OK) {
		dq_tcp_qp_fail(qp, DQ_WC_PROTOCOL, hello.version); /* the version the peer speaks */
		return PARSE_FAILED;
	}
	qp->rx_head += DQ_TCP_HELLO_BYTES;
	dq_tcp_qp_up(qp);
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
			dq_tcp_qp_fail(qp, error == EFAULT ? DQ_WC_LOCAL : error == ETIMEDOUT ? DQ_WC_TIMEOUT : DQ_WC_REMOTE_GONE,
				       (uint32_t)error);
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
		dq_tcp_qp_ack(qp, dev->now_ns);
	/* Sent at the beginning of the next poll: what the caller posts because of these completions goes out in the same call. */
	if (qp->shorts_head != qp->shorts_tail)
		dq_tcp_qp_schedule(qp);
}
