/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a QP of the tcp provider sends: frames of posted work, gathered straight from registered memory, and between them
 * acknowledgements and heartbeats. On an emulated link a frame waits for its release time.
 */
#include <errno.h>
#include <sys/uio.h>

#include "provider/tcp.h"

#define TX_FRAMES 64u                  /* frames of one sendmsg; two iovecs each */
#define TX_BYTES (1u << 20)            /* payload of one sendmsg, about */
#define TX_CALLS 4                     /* sendmsg of one turn, so that other QPs get theirs */

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

void dq_tcp_qp_schedule(struct dq_tcp_qp *qp)
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
void dq_tcp_qp_ack(struct dq_tcp_qp *qp, uint64_t time_ns)
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

void dq_tcp_qp_heartbeat(struct dq_tcp_qp *qp, uint8_t flags, uint64_t now)
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
	dq_tcp_qp_schedule(qp);
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
		dq_tcp_qp_schedule(qp);
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
