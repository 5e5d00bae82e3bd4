/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes that a NIC has completed may still be on their way through the PCIe tree when a GPU looks. A read by the same NIC
 * pushes them in front of it: one byte over a queue pair that is connected to itself.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>

#include "provider/verbs.h"

#define SPINS 64
#define SLEEP_NS 1000
#define DEADLINE_NS 1000000000u
#define RETRIES 3u

struct dq_verbs_flush {
	struct ibv_cq *cq;
	struct ibv_qp *qp;
};

void dq_verbs_flush_end(struct dq_verbs_device *dev)
{
	struct dq_verbs_flush *f = dev->flush;

	if (!f)
		return;
	if (f->qp)
		dev->lib->destroy_qp(f->qp);
	if (f->cq)
		dev->lib->destroy_cq(f->cq);
	free(f);
	dev->flush = NULL;
}

static int connect_to_itself(struct dq_verbs_device *dev, struct ibv_qp *qp)
{
	struct dq_verbs_port port;
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = (uint8_t)dev->cfg.port, .qp_access_flags = IBV_ACCESS_REMOTE_READ};
	uint32_t psn;

	dq_verbs_port_now(dev, &port);
	if (getrandom(&psn, sizeof psn, 0) != (ssize_t)sizeof psn)
		return EIO;
	psn &= 0xffffffu;
	int rc = dev->lib->modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
	if (rc)
		return rc;
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR, .path_mtu = (enum ibv_mtu)port.mtu, .dest_qp_num = qp->qp_num, .rq_psn = psn, .max_dest_rd_atomic = 1,
		.min_rnr_timer = 1,
		.ah_attr = {.dlid = port.lid, .sl = dev->cfg.service_level, .port_num = (uint8_t)dev->cfg.port, .is_global = !dev->infiniband,
			    .grh = {.dgid = port.gid, .sgid_index = (uint8_t)port.gid_index, .hop_limit = 64}}};
	rc = dev->lib->modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	if (rc)
		return rc;
	attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .sq_psn = psn, .timeout = dq_verbs_timeout_exponent(0), .retry_cnt = RETRIES,
				    .rnr_retry = RETRIES, .max_rd_atomic = 1};
	return dev->lib->modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				   IBV_QP_MAX_QP_RD_ATOMIC);
}

static int flush_make(struct dq_verbs_device *dev)
{
	struct ibv_qp_init_attr init = {.qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
	struct dq_verbs_flush *f = calloc(1, sizeof *f);
	int rc = ENOMEM;

	if (!f)
		return -ENOMEM;
	dev->flush = f;
	f->cq = dev->lib->create_cq(dev->ctx, 4, NULL, NULL, 0);
	if (f->cq) {
		init.send_cq = init.recv_cq = f->cq;
		f->qp = dev->lib->create_qp(dev->pd, &init);
		rc = f->qp ? connect_to_itself(dev, f->qp) : errno;
	}
	if (rc)
		dq_verbs_flush_end(dev);
	return -rc;
}

/* Spins for a moment, since the answer is due within a microsecond; then sleeps, as simulated time goes on only then. */
static int wait_done(struct ibv_cq *cq)
{
	const struct timespec pause = {.tv_nsec = SLEEP_NS};
	const uint64_t begin = dq_verbs_now();
	struct ibv_wc wc;

	for (int i = 0;; i++) {
		const int n = ibv_poll_cq(cq, 1, &wc);
		if (n != 0)
			return n > 0 && wc.status == IBV_WC_SUCCESS ? 0 : -EIO;
		if (i < SPINS)
			continue;
		if (dq_verbs_now() - begin > DEADLINE_NS)
			return -ETIMEDOUT;
		nanosleep(&pause, NULL);
	}
}

int dq_verbs_flush_read(struct dq_verbs_device *dev, uint64_t addr, uint32_t rkey)
{
	struct ibv_sge sge = {.addr = (uintptr_t)dev->scratch + DQ_CONTROL_BYTES, .length = 1, .lkey = dev->scratch_mr->lkey};
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ, .send_flags = IBV_SEND_SIGNALED,
				 .wr.rdma = {.remote_addr = addr, .rkey = rkey}}, *bad;
	int rc = dev->flush ? 0 : flush_make(dev);

	if (rc)
		return rc;
	rc = -ibv_post_send(dev->flush->qp, &wr, &bad);
	if (!rc)
		rc = wait_done(dev->flush->cq);
	if (rc)
		dq_verbs_flush_end(dev); /* made anew by the next one: its address may have changed */
	return rc;
}
