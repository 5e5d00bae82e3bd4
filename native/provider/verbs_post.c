/* SPDX-License-Identifier: Apache-2.0 */
/* Posting work: the caller's, in chains, and the provider's own packets. */
#include <arpa/inet.h>
#include <errno.h>

#include "provider/verbs.h"

/* Where the bytes are: one entry, or several where they cross pieces of a registration. Returns how many, 0 = none: not memory of
 * this device, out of its bounds, or across more pieces than one work request takes. */
static uint32_t gather(const struct dq_verbs_qp *qp, const struct dq_verbs_mem *mem, uint64_t offset, uint32_t len, uint32_t max,
		       struct ibv_sge *sge)
{
	uint32_t n = 0;

	if (!mem || mem->dev != qp->dev || offset > mem->len || len > mem->len - offset)
		return 0;
	if (DQ_LIKELY(mem->pieces == 1)) {
		*sge = (struct ibv_sge){.addr = mem->base + offset, .length = len, .lkey = mem->mr[0]->lkey};
		return 1;
	}
	while (len > 0) {
		const uint32_t piece = (uint32_t)DQ_MIN(offset / mem->step, mem->pieces - 1u);
		const uint64_t end = DQ_MIN((piece + 2) * mem->step, mem->len);
		const uint32_t part = (uint32_t)DQ_MIN(end - offset, len);
		if (n == max)
			return 0;
		sge[n++] = (struct ibv_sge){.addr = mem->base + offset, .length = part, .lkey = mem->mr[piece]->lkey};
		offset += part;
		len -= part;
	}
	return n;
}

/* How many more work requests of the caller fit. */
static uint32_t room(const struct dq_verbs_qp *qp)
{
	const uint32_t used = qp->sq_posted - qp->sq_done - qp->sq_own + qp->sq_unpolled;
	return qp->attr.send_depth - DQ_MIN(used, qp->attr.send_depth);
}

static void note(struct dq_verbs_qp *qp, enum dq_verbs_op op, uint64_t wr_id, uint32_t len)
{
	if (qp->sq_done == qp->sq_posted)
		qp->progress_ns = 0; /* the time of waiting begins; the next look at the clock sets it */
	qp->sq[qp->sq_posted++ & qp->sq_mask] = (struct dq_verbs_sqe){.wr_id = wr_id, .len = len, .op = (uint8_t)op};
}

/* The depth was checked, so a refusal means that the device gave up, or that the work itself is wrong. */
static int post_failed(struct dq_verbs_qp *qp, int code)
{
	dq_verbs_qp_fail(qp, DQ_WC_LOCAL, (uint32_t)(code > 0 ? code : EIO));
	return -EIO;
}

static int check(const struct dq_verbs_qp *qp)
{
	return qp->state == DQ_VERBS_QP_UP ? 0 : qp->state < DQ_VERBS_QP_UP ? -ENOTCONN : -EIO;
}

int dq_verbs_qp_post_write(struct dq_qp *q, const struct dq_write *wr, unsigned n)
{
	struct dq_verbs_qp *qp = dq_verbs_qp_of(q);
	struct ibv_send_wr chain[DQ_VERBS_BATCH], *bad;
	struct ibv_sge sge[DQ_VERBS_BATCH][DQ_VERBS_MAX_SGE];
	unsigned done = 0;
	bool bad_one = false;

	int rc = check(qp);
	if (rc)
		return rc;
	if (qp->attr.kind != DQ_QP_DATA)
		return -EINVAL;
	n = DQ_MIN(n, room(qp));
	while (done < n) {
		uint32_t k = DQ_MIN(n - done, DQ_VERBS_BATCH);
		/* Writes without a completion of their own wait for the next that has one: not more than half a queue of them. */
		const uint32_t silent_max = qp->attr.send_depth / 2;
		uint32_t silent = 0, silent_bytes = 0;

		for (uint32_t i = 0; i < k; i++) {
			const struct dq_write *w = &wr[done + i];
			struct ibv_send_wr *c = &chain[i];
			int entries = 0;

			if (w->len) {
				entries = (int)gather(qp, dq_verbs_mem_of(w->mem), w->offset, w->len, qp->dev->max_sge, sge[i]);
				if (!entries) { /* those before it are posted, and the caller comes again with it */
					k = i;
					n = done + i;
					bad_one = true;
					break;
				}
			}
			c->wr_id = dq_verbs_wr_id(qp, DQ_VERBS_WR_SEND, qp->sq_posted + i);
			c->next = &chain[i + 1];
			c->sg_list = sge[i];
			c->num_sge = entries;
			c->opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
			c->send_flags = IBV_SEND_SIGNALED;
			c->imm_data = htonl(w->imm);
			c->wr.rdma.remote_addr = w->remote_addr;
			c->wr.rdma.rkey = (uint32_t)w->remote_key;
			if (i > 0) {
				/* The one before may go without, when both together are small. */
				silent_bytes += wr[done + i - 1].len;
				if (silent_bytes + w->len < DQ_VERBS_SHARED_BYTES && silent < silent_max) {
					chain[i - 1].send_flags = 0;
					silent++;
				} else {
					silent = silent_bytes = 0;
				}
			}
		}
		if (!k)
			break;
		chain[k - 1].next = NULL;
		for (uint32_t i = 0; i < k; i++)
			note(qp, DQ_VERBS_WRITE, wr[done + i].wr_id, wr[done + i].len);
		rc = ibv_post_send(qp->ib, chain, &bad);
		if (rc)
			return post_failed(qp, rc);
		done += k;
	}
	return bad_one && !done ? -EINVAL : (int)done;
}

int dq_verbs_qp_post_send(struct dq_qp *q, const struct dq_send *wr, unsigned n)
{
	struct dq_verbs_qp *qp = dq_verbs_qp_of(q);
	struct ibv_send_wr chain[DQ_VERBS_BATCH], *bad;
	struct ibv_sge sge[DQ_VERBS_BATCH][DQ_VERBS_MAX_SGE];
	unsigned done = 0;
	bool bad_one = false;

	int rc = check(qp);
	if (rc)
		return rc;
	if (qp->attr.kind != DQ_QP_CONTROL)
		return -EINVAL;
	n = DQ_MIN(n, room(qp));
	while (done < n) {
		uint32_t k = DQ_MIN(n - done, DQ_VERBS_BATCH);

		for (uint32_t i = 0; i < k; i++) {
			const struct dq_send *s = &wr[done + i];
			int entries = s->len ? (int)gather(qp, dq_verbs_mem_of(s->mem), s->offset, s->len, qp->dev->max_sge, sge[i]) : 0;
			if (s->len && !entries) {
				k = i;
				n = done + i;
				bad_one = true;
				break;
			}
			chain[i] = (struct ibv_send_wr){
				.wr_id = dq_verbs_wr_id(qp, DQ_VERBS_WR_SEND, qp->sq_posted + i), .next = &chain[i + 1],
				.sg_list = sge[i], .num_sge = entries, .opcode = IBV_WR_SEND,
				.send_flags = IBV_SEND_SIGNALED | (s->len && s->len <= qp->inline_bytes ? (unsigned)IBV_SEND_INLINE : 0u)};
		}
		if (!k)
			break;
		chain[k - 1].next = NULL;
		for (uint32_t i = 0; i < k; i++)
			note(qp, DQ_VERBS_SEND, wr[done + i].wr_id, wr[done + i].len);
		rc = ibv_post_send(qp->ib, chain, &bad);
		if (rc)
			return post_failed(qp, rc);
		done += k;
	}
	return bad_one && !done ? -EINVAL : (int)done;
}

int dq_verbs_qp_post_recv(struct dq_qp *q, const struct dq_recv *wr, unsigned n)
{
	struct dq_verbs_qp *qp = dq_verbs_qp_of(q);
	unsigned done = 0;

	if (qp->state >= DQ_VERBS_QP_ENDING)
		return -EIO;
	if (qp->attr.kind != DQ_QP_CONTROL)
		return -EINVAL;
	while (done < n) {
		struct ibv_sge sge[DQ_VERBS_MAX_SGE];
		struct ibv_recv_wr one = {.wr_id = dq_verbs_wr_id(qp, DQ_VERBS_WR_RECV, qp->rq_posted), .sg_list = sge}, *bad;
		const uint32_t own = qp->probe_in ? 0 : qp->rq_done < DQ_VERBS_OWN_RECVS ? DQ_VERBS_OWN_RECVS - qp->rq_done : 0;

		if (qp->rq_posted - qp->rq_done - own + qp->rq_unpolled >= qp->attr.recv_depth)
			break;
		one.num_sge = wr[done].len ? (int)gather(qp, dq_verbs_mem_of(wr[done].mem), wr[done].offset, wr[done].len, 1, sge) : 0;
		if (wr[done].len && !one.num_sge)
			return done ? (int)done : -EINVAL;
		qp->rq[qp->rq_posted & qp->rq_mask] = wr[done].wr_id;
		int rc = ibv_post_recv(qp->ib, &one, &bad);
		if (rc)
			return post_failed(qp, rc);
		qp->rq_posted++;
		done++;
	}
	return (int)done;
}

/* ---- the provider's own ---- */

int dq_verbs_post_own(struct dq_verbs_qp *qp, enum dq_verbs_op op)
{
	const struct dq_verbs_device *dev = qp->dev;
	struct ibv_sge sge = {.addr = (uintptr_t)dev->scratch, .length = DQ_MIN(qp->path_mtu, DQ_CONTROL_BYTES), .lkey = dev->scratch_mr->lkey};
	struct ibv_send_wr wr = {.wr_id = dq_verbs_wr_id(qp, DQ_VERBS_WR_SEND, qp->sq_posted), .opcode = IBV_WR_SEND,
				 .send_flags = IBV_SEND_SIGNALED}, *bad;

	if (qp->sq_own == DQ_VERBS_OWN_WRS)
		return -EBUSY;
	if (op == DQ_VERBS_PROBE) {
		wr.sg_list = &sge;
		wr.num_sge = 1;
	} else if (op == DQ_VERBS_HEARTBEAT) {
		/* Without a byte it needs neither address nor key nor receive, and is acknowledged like any other. */
		wr.opcode = IBV_WR_RDMA_WRITE;
	} else if (op == DQ_VERBS_FAREWELL) {
		wr.opcode = IBV_WR_SEND_WITH_IMM;
	}
	note(qp, op, 0, 0);
	qp->sq_own++;
	int rc = ibv_post_send(qp->ib, &wr, &bad);
	if (!rc)
		return 0;
	if (op == DQ_VERBS_FAREWELL)
		return -rc; /* the QP ends anyway */
	return post_failed(qp, rc);
}

int dq_verbs_post_first(struct dq_verbs_qp *qp, struct dq_error *err)
{
	struct ibv_send_wr wr = {.wr_id = dq_verbs_wr_id(qp, DQ_VERBS_WR_SEND, qp->sq_posted), .opcode = IBV_WR_SEND,
				 .send_flags = IBV_SEND_SIGNALED}, *bad;
	struct ibv_qp *ib = qp->ib;
	const uint32_t qpn = qp->qpn;

	note(qp, DQ_VERBS_HELLO, 0, 0);
	qp->sq_own++;
	atomic_store_explicit(&qp->ready, true, memory_order_release);
	int rc = ibv_post_send(ib, &wr, &bad);
	return rc ? dq_error_set(err, -rc, "QP 0x%x cannot send: %s", qpn, strerror(rc)) : 0;
}

int dq_verbs_post_own_recvs(struct dq_verbs_qp *qp)
{
	const struct dq_verbs_device *dev = qp->dev;

	for (uint32_t i = 0; i < DQ_VERBS_OWN_RECVS; i++) {
		struct ibv_sge sge = {.addr = (uintptr_t)dev->scratch + DQ_CONTROL_BYTES, .length = DQ_CONTROL_BYTES, .lkey = dev->scratch_mr->lkey};
		struct ibv_recv_wr wr = {.wr_id = dq_verbs_wr_id(qp, DQ_VERBS_WR_RECV, qp->rq_posted), .sg_list = &sge, .num_sge = 1}, *bad;
		int rc = ibv_post_recv(qp->ib, &wr, &bad);
		if (rc)
			return -rc;
		qp->rq_posted++;
	}
	return 0;
}

int dq_verbs_post_blanks(struct dq_verbs_qp *qp)
{
	struct ibv_recv_wr wr[DQ_VERBS_BATCH], *bad;

	while (qp->receives_posted < qp->receives) {
		const uint32_t n = DQ_MIN(qp->receives - qp->receives_posted, DQ_VERBS_BATCH);
		for (uint32_t i = 0; i < n; i++)
			wr[i] = (struct ibv_recv_wr){.wr_id = dq_verbs_wr_id(qp, DQ_VERBS_WR_RECV, 0), .next = i + 1 < n ? &wr[i + 1] : NULL};
		int rc = ibv_post_recv(qp->ib, wr, &bad);
		if (rc)
			return -rc;
		qp->receives_posted += n;
	}
	return 0;
}
