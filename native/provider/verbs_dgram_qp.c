/* SPDX-License-Identifier: Apache-2.0 */
/* The queue pair of a datagram endpoint, with what belongs to it. */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "provider/verbs_dgram.h"

#define PLACES (DQ_VERBS_DGRAM_RECEIVES + DQ_VERBS_DGRAM_SENDS)
#define HOPS 64u

/* ---- time stamps ---- */

/* Most of libibverbs' devices have no counter, or cannot read it: then the clock is read. */
static bool clock_find(struct dq_verbs_dgram *dg)
{
	struct ibv_context *ctx = dg->dev->ctx;
	struct verbs_context *extended = verbs_get_ctx_op(ctx, query_device_ex);
	struct ibv_device_attr_ex attr;

	memset(&attr, 0, sizeof attr);
	return extended && extended->query_device_ex(ctx, NULL, &attr, sizeof attr) == 0 && attr.completion_timestamp_mask != 0 &&
	       dq_verbs_clock_init(&dg->clock, attr.completion_timestamp_mask, attr.hca_core_clock) == 0;
}

static bool cq_make(struct dq_verbs_dgram *dg, struct dq_verbs_dgram_cq *q, uint32_t entries, bool stamped)
{
	struct ibv_cq_init_attr_ex want = {
		.cqe = entries, .cq_context = q, .channel = dg->channel,
		.wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_SRC_QP | IBV_WC_EX_WITH_SLID |
			    (stamped ? (uint64_t)IBV_WC_EX_WITH_COMPLETION_TIMESTAMP : 0),
	};
	if (stamped || dg->extended) {
		q->ex = ibv_create_cq_ex(dg->dev->ctx, &want);
		q->cq = q->ex ? ibv_cq_ex_to_cq(q->ex) : NULL;
	}
	if (!q->cq && !stamped)
		q->cq = dg->lib->create_cq(dg->dev->ctx, (int)entries, q, dg->channel, 0);
	return q->cq != NULL;
}

static void cq_free(struct dq_verbs_dgram *dg, struct dq_verbs_dgram_cq *q)
{
	if (!q->cq)
		return;
	/* It waits for events that were fetched and not acknowledged. */
	if (q->unacked)
		dg->lib->ack_cq_events(q->cq, q->unacked);
	dg->lib->destroy_cq(q->cq);
	*q = (struct dq_verbs_dgram_cq){0};
}

/* All completions by one clock: both queues carry stamps, or none. */
static int cqs_make(struct dq_verbs_dgram *dg)
{
	dg->stamped = clock_find(dg);
	while (!cq_make(dg, &dg->sent, DQ_VERBS_DGRAM_SENDS, dg->stamped) ||
	       !cq_make(dg, &dg->received, DQ_VERBS_DGRAM_RECEIVES, dg->stamped)) {
		const int code = errno ? -errno : -EIO;
		cq_free(dg, &dg->sent);
		if (!dg->stamped)
			return code;
		dg->stamped = false;
	}
	return 0;
}

/* ---- the queue pair ---- */

static int modify(struct dq_verbs_dgram *dg, struct ibv_qp_attr *attr, int mask)
{
	const int rc = dg->lib->modify_qp(dg->qp, attr, mask);
	return rc > 0 ? -rc : rc;
}

static int receives_post(struct dq_verbs_dgram *dg, const uint16_t *places, uint32_t n)
{
	struct ibv_recv_wr wr[DQ_VERBS_DGRAM_REPOST], *bad;
	struct ibv_sge sge[DQ_VERBS_DGRAM_REPOST][2];

	for (uint32_t i = 0; i < n; i++) {
		sge[i][0] = (struct ibv_sge){.addr = (uintptr_t)dq_verbs_dgram_recv_place(dg, places[i]),
					     .length = DQ_VERBS_UD_GRH_BYTES + DQ_VERBS_DGRAM_PAYLOAD, .lkey = dg->mr->lkey};
		sge[i][1] = (struct ibv_sge){.addr = (uintptr_t)dq_verbs_dgram_rest(dg), .length = DQ_VERBS_DGRAM_REST, .lkey = dg->mr->lkey};
		wr[i] = (struct ibv_recv_wr){.wr_id = dq_verbs_dgram_wr_id(dg, DQ_VERBS_DGRAM_WR_RECV, places[i]),
					     .next = i + 1 < n ? &wr[i + 1] : NULL, .sg_list = sge[i], .num_sge = dg->dev->attr.max_sge > 1 ? 2 : 1};
	}
	return -ibv_post_recv(dg->qp, wr, &bad);
}

void dq_verbs_dgram_recv_return(struct dq_verbs_dgram *dg, uint32_t place)
{
	dg->repost[dg->reposts++] = (uint16_t)place;
	if (dg->reposts < DQ_VERBS_DGRAM_REPOST)
		return;
	dg->reposts = 0;
	if (receives_post(dg, dg->repost, DQ_VERBS_DGRAM_REPOST) != 0)
		dg->broken = true;
}

int dq_verbs_dgram_queues_restart(struct dq_verbs_dgram *dg)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RESET};
	int rc = modify(dg, &attr, IBV_QP_STATE);

	if (rc)
		return rc;
	dg->life++;
	dg->reposts = 0;
	attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_INIT, .port_num = (uint8_t)dg->dev->cfg.port, .qkey = DQ_VERBS_UD_QKEY};
	rc = modify(dg, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
	for (uint32_t i = 0; rc == 0 && i < DQ_VERBS_DGRAM_RECEIVES; i += DQ_VERBS_DGRAM_REPOST) {
		uint16_t places[DQ_VERBS_DGRAM_REPOST];
		for (uint32_t k = 0; k < DQ_VERBS_DGRAM_REPOST; k++)
			places[k] = (uint16_t)(i + k);
		rc = receives_post(dg, places, DQ_VERBS_DGRAM_REPOST);
	}
	if (rc)
		return rc;
	attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR};
	rc = modify(dg, &attr, IBV_QP_STATE);
	if (rc)
		return rc;
	attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS};
	return modify(dg, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
}

static int qp_make(struct dq_verbs_dgram *dg)
{
	/* Inline data spares the device a read of memory; how much a device takes it tells only by refusing. */
	static const uint32_t inline_bytes[] = {DQ_VERBS_DGRAM_PAYLOAD, 64, 0};

	for (size_t i = 0; i < sizeof inline_bytes / sizeof inline_bytes[0] && !dg->qp; i++) {
		struct ibv_qp_init_attr want = {
			.qp_context = dg, .send_cq = dg->sent.cq, .recv_cq = dg->received.cq, .qp_type = IBV_QPT_UD, .sq_sig_all = 1,
			.cap = {.max_send_wr = DQ_VERBS_DGRAM_SENDS, .max_recv_wr = DQ_VERBS_DGRAM_RECEIVES, .max_send_sge = 1,
				.max_recv_sge = dg->dev->attr.max_sge > 1 ? 2 : 1, .max_inline_data = inline_bytes[i]},
		};
		dg->qp = dg->lib->create_qp(dg->dev->pd, &want);
		dg->inline_bytes = dg->qp ? want.cap.max_inline_data : 0;
	}
	return dg->qp ? 0 : -errno;
}

int dq_verbs_dgram_queues_make(struct dq_verbs_dgram *dg, struct dq_error *err)
{
	const char *name = dg->dev->cfg.name;
	int rc;

	dg->channel = dg->lib->create_comp_channel(dg->dev->ctx);
	if (!dg->channel)
		return dq_error_set(err, -errno, "device %s: completion channel for datagrams: %s", name, strerror(errno));
	const int flags = fcntl(dg->channel->fd, F_GETFL);
	if (flags < 0 || fcntl(dg->channel->fd, F_SETFL, flags | O_NONBLOCK) != 0)
		return dq_error_set(err, -errno, "device %s: completion channel for datagrams: %s", name, strerror(errno));
	rc = cqs_make(dg);
	if (rc)
		return dq_error_set(err, rc, "device %s: completion queues of %u and %u for datagrams: %s", name, DQ_VERBS_DGRAM_SENDS,
				    DQ_VERBS_DGRAM_RECEIVES, strerror(-rc));

	dg->memory_bytes = PLACES * DQ_VERBS_DGRAM_PLACE + DQ_VERBS_DGRAM_REST;
	dg->memory = mmap(NULL, dg->memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (dg->memory == MAP_FAILED) {
		dg->memory = NULL;
		return dq_error_set(err, -errno, "device %s: no memory for datagrams", name);
	}
	dg->mr = dg->lib->reg_mr(dg->dev->pd, dg->memory, dg->memory_bytes, IBV_ACCESS_LOCAL_WRITE);
	if (!dg->mr)
		return dq_error_set(err, -errno, "device %s: cannot register %zu bytes for datagrams: %s; is the limit of locked memory "
				    "(ulimit -l, LimitMEMLOCK=) high enough?", name, dg->memory_bytes, strerror(errno));
	rc = qp_make(dg);
	if (rc)
		return dq_error_set(err, rc, "device %s: queue pair of type UD, %u sends, %u receives: %s", name, DQ_VERBS_DGRAM_SENDS,
				    DQ_VERBS_DGRAM_RECEIVES, strerror(-rc));
	rc = dq_verbs_dgram_queues_restart(dg);
	if (rc)
		return dq_error_set(err, rc, "device %s: cannot start its queue pair of type UD on port %u: %s", name, dg->dev->cfg.port,
				    strerror(-rc));
	return 0;
}

void dq_verbs_dgram_queues_free(struct dq_verbs_dgram *dg)
{
	if (dg->qp)
		dg->lib->destroy_qp(dg->qp);
	cq_free(dg, &dg->sent);
	cq_free(dg, &dg->received);
	if (dg->mr)
		dg->lib->dereg_mr(dg->mr);
	if (dg->memory)
		munmap(dg->memory, dg->memory_bytes);
	if (dg->channel)
		dg->lib->destroy_comp_channel(dg->channel);
}

/* ---- what is sent ---- */

int dq_verbs_dgram_post(struct dq_verbs_dgram *dg, uint32_t place, struct ibv_ah *ah, uint32_t qpn, uint16_t len)
{
	struct ibv_send_wr *bad;
	struct ibv_sge sge = {.addr = (uintptr_t)dq_verbs_dgram_send_place(dg, place), .length = len, .lkey = dg->mr->lkey};
	struct ibv_send_wr wr = {
		.wr_id = dq_verbs_dgram_wr_id(dg, DQ_VERBS_DGRAM_WR_SEND, place), .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED | (len <= dg->inline_bytes ? IBV_SEND_INLINE : 0u),
		.wr.ud = {.ah = ah, .remote_qpn = qpn, .remote_qkey = DQ_VERBS_UD_QKEY},
	};
	const int rc = ibv_post_send(dg->qp, &wr, &bad);
	return rc > 0 ? -rc : rc;
}

int dq_verbs_dgram_ah_make(struct dq_verbs_dgram *dg, const struct dq_verbs_ud_peer *peer, uint32_t flow_label, struct ibv_ah **out)
{
	/* With a global route on InfiniBand, too: only that tells the receiver the sender's GID. */
	struct ibv_ah_attr attr = {
		.is_global = 1, .port_num = (uint8_t)dg->dev->cfg.port, .dlid = peer->lid, .sl = dg->dev->cfg.service_level,
		.grh = {.flow_label = flow_label & 0xfffffu, .sgid_index = (uint8_t)__atomic_load_n(&dg->own_gid_index, __ATOMIC_RELAXED),
			.hop_limit = HOPS, .traffic_class = dg->dev->cfg.traffic_class},
	};
	memcpy(attr.grh.dgid.raw, peer->gid, sizeof attr.grh.dgid.raw);
	errno = 0;
	*out = dg->lib->create_ah(dg->dev->pd, &attr);
	if (*out)
		return 0;
	return errno ? -errno : -EHOSTUNREACH;
}
