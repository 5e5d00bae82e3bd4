/* SPDX-License-Identifier: Apache-2.0 */
/* The life of a QP of the verbs provider: create, connect and prove the connection, time-outs, fail, fence, destroy. */
#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>

#include "provider/verbs.h"

/* A peer that found no receive waits so long (codes of the specification) and tries again so often. Data may meet a receiver
 * that is late, or stopped for a while: it comes again soon and without end, and the deadline of the operation is the end.
 * Control messages have credits and always find a receive: where one does not, the peer is broken, which is soon told. */
#define DATA_RNR_TIMER 7u      /* 0.12 ms */
#define DATA_RNR_RETRY 7u      /* without end */
#define CONTROL_RNR_TIMER 20u  /* 10.24 ms */
#define CONTROL_RNR_RETRY 6u
#define HOP_LIMIT 64u
#define SPARE_RECEIVES 4u      /* of an own queue, for one that the peer may use; as in verbs_poll.c */

/* ---- the tables of QPs ---- */

static uint32_t hash(const struct dq_verbs_device *dev, uint32_t qpn)
{
	return (qpn * 0x9e3779b1u >> 7) & dev->by_qpn_mask;
}

static struct dq_verbs_qp *cell(const struct dq_verbs_device *dev, uint32_t i)
{
	return atomic_load_explicit(&dev->by_qpn[i], memory_order_acquire);
}

/* Without a lock: a maker only fills empty cells, and what moves or empties one is the calling thread itself. */
struct dq_verbs_qp *dq_verbs_qp_by_number(const struct dq_verbs_device *dev, uint32_t qpn)
{
	struct dq_verbs_qp *qp;
	for (uint32_t i = hash(dev, qpn); (qp = cell(dev, i)); i = (i + 1) & dev->by_qpn_mask)
		if (qp->qpn == qpn)
			return qp;
	return NULL;
}

static void number_remove(struct dq_verbs_device *dev, const struct dq_verbs_qp *qp)
{
	const uint32_t mask = dev->by_qpn_mask;
	uint32_t hole = hash(dev, qp->qpn);
	struct dq_verbs_qp *other;

	while ((other = cell(dev, hole)) && other != qp)
		hole = (hole + 1) & mask;
	if (!other)
		return;
	/* Whoever stands behind the hole and could stand in it moves there, so that no search ends too early. */
	for (uint32_t i = (hole + 1) & mask; (other = cell(dev, i)); i = (i + 1) & mask) {
		if (((i - hash(dev, other->qpn)) & mask) >= ((i - hole) & mask)) {
			atomic_store_explicit(&dev->by_qpn[hole], other, memory_order_release);
			hole = i;
		}
	}
	atomic_store_explicit(&dev->by_qpn[hole], NULL, memory_order_release);
}

/* A slot and a generation for the QP, which is not yet to be found there: it may still fail to be made. */
static int take_slot(struct dq_verbs_device *dev, struct dq_verbs_qp *qp)
{
	uint32_t i = 0;

	pthread_mutex_lock(&dev->table_lock);
	while (i < dev->qps_cap && dev->taken[i])
		i++;
	if (i < dev->qps_cap) {
		dev->taken[i] = true;
		qp->slot = i;
		qp->generation = dev->generation++;
	}
	pthread_mutex_unlock(&dev->table_lock);
	return i < dev->qps_cap ? 0 : -ENOSPC;
}

static void give_slot(struct dq_verbs_device *dev, const struct dq_verbs_qp *qp)
{
	pthread_mutex_lock(&dev->table_lock);
	dev->taken[qp->slot] = false;
	pthread_mutex_unlock(&dev->table_lock);
}

/* From here on completions find it, by slot and by number. */
static void tables_add(struct dq_verbs_device *dev, struct dq_verbs_qp *qp)
{
	pthread_mutex_lock(&dev->table_lock);
	uint32_t i = hash(dev, qp->qpn);
	while (cell(dev, i))
		i = (i + 1) & dev->by_qpn_mask;
	atomic_store_explicit(&dev->by_qpn[i], qp, memory_order_release);
	atomic_store_explicit(&dev->qps[qp->slot], qp, memory_order_release);
	if (qp->slot >= dev->qps_high)
		atomic_store(&dev->qps_high, qp->slot + 1);
	dev->qps_used++;
	pthread_mutex_unlock(&dev->table_lock);
}

static void tables_remove(struct dq_verbs_device *dev, const struct dq_verbs_qp *qp)
{
	pthread_mutex_lock(&dev->table_lock);
	atomic_store_explicit(&dev->qps[qp->slot], NULL, memory_order_release);
	dev->qps_used--;
	pthread_mutex_unlock(&dev->table_lock);
	give_slot(dev, qp);
}

/* ---- create ---- */

static int make_pair(struct dq_verbs_qp *qp, struct dq_error *err)
{
	struct dq_verbs_device *dev = qp->dev;
	struct ibv_qp_init_attr init = {.qp_context = qp, .send_cq = qp->pool->cq, .recv_cq = qp->pool->cq, .qp_type = IBV_QPT_RC,
					.srq = qp->shared ? qp->pool->srq : NULL};
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = (uint8_t)dev->cfg.port, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
	const struct ibv_qp_cap cap = {.max_send_wr = qp->attr.send_depth + DQ_VERBS_OWN_WRS, .max_send_sge = dev->max_sge,
				       .max_recv_wr = qp->shared ? 0 : qp->receives ? qp->receives : qp->attr.recv_depth + DQ_VERBS_OWN_RECVS,
				       .max_recv_sge = 1, .max_inline_data = DQ_VERBS_INLINE_BYTES};

	init.cap = cap;
	qp->ib = dev->lib->create_qp(dev->pd, &init);
	if (!qp->ib && errno == EINVAL) {
		init.cap = cap;
		init.cap.max_inline_data = 0;
		qp->ib = dev->lib->create_qp(dev->pd, &init);
	}
	if (!qp->ib)
		return dq_error_set(err, errno ? -errno : -EIO, "device %s: %s gives no QP with send depth %u and receive depth %u beside %u "
				    "others: %s%s", dev->cfg.name, dev->cfg.address, cap.max_send_wr, cap.max_recv_wr,
				    atomic_load(&dev->qps_used),
				    strerror(errno), errno == ENOMEM ? "; the limit of locked memory or of QPs is reached: LimitMEMLOCK=infinity, "
				    "or fewer QPs and a smaller depth" : "");
	qp->inline_bytes = init.cap.max_inline_data;
	qp->qpn = qp->ib->qp_num;
	int rc = dev->lib->modify_qp(qp->ib, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
	if (!rc)
		rc = qp->attr.kind == DQ_QP_CONTROL ? -dq_verbs_post_own_recvs(qp) : qp->shared ? 0 : -dq_verbs_post_blanks(qp);
	if (rc)
		return dq_error_set(err, -rc, "device %s: QP 0x%x of %s cannot be prepared: %s", dev->cfg.name, qp->qpn, dev->cfg.address,
				    strerror(rc));
	return 0;
}

static void qp_free(struct dq_verbs_qp *qp)
{
	if (qp->pool)
		dq_verbs_pool_release(qp->dev, qp->pool, qp->send_reserved, qp->receive_reserved);
	free(qp->sq);
	free(qp->rq);
	free(qp);
}

/* An own receive queue holds more than the peer may use, as far as the completion queue has room for it. */
static void reserve_spare(struct dq_verbs_qp *qp)
{
	struct dq_verbs_device *dev = qp->dev;
	const uint32_t wanted = DQ_MIN(SPARE_RECEIVES * qp->receive_reserved, dev->told.max_send_depth);
	uint32_t more = wanted > qp->receive_reserved ? wanted - qp->receive_reserved : 0;

	pthread_mutex_lock(&dev->table_lock);
	more = DQ_MIN(more, qp->pool->receive_room - qp->pool->receive_used);
	qp->pool->receive_used += more;
	pthread_mutex_unlock(&dev->table_lock);
	qp->receive_reserved += more;
	qp->receives = qp->receive_reserved;
}

int dq_verbs_qp_create(struct dq_device *device, const struct dq_qp_attr *attr, struct dq_qp **out, struct dq_error *err)
{
	struct dq_verbs_device *dev = dq_verbs_device_of(device);
	const uint32_t max = dev->told.max_send_depth;
	const bool control = attr->kind == DQ_QP_CONTROL;

	if (attr->send_depth == 0 || attr->send_depth > max || attr->recv_depth > max)
		return dq_error_set(err, -EINVAL, "device %s: QP with send depth %u and receive depth %u; expected 1 to %u and 0 to %u",
				    dev->cfg.name, attr->send_depth, attr->recv_depth, max, max);
	struct dq_verbs_qp *qp = calloc(1, sizeof *qp);
	if (!qp)
		return dq_error_set(err, -ENOMEM, "device %s: no memory for a QP", dev->cfg.name);
	qp->dev = dev;
	qp->attr = *attr;
	qp->sq_mask = dq_verbs_pow2_at_least(attr->send_depth + DQ_VERBS_OWN_WRS) - 1;
	qp->rq_mask = dq_verbs_pow2_at_least(attr->recv_depth + DQ_VERBS_OWN_RECVS) - 1;
	qp->sq = calloc(qp->sq_mask + 1, sizeof *qp->sq);
	qp->rq = control ? calloc(qp->rq_mask + 1, sizeof *qp->rq) : NULL;
	qp->send_reserved = attr->send_depth + DQ_VERBS_OWN_WRS + (control ? attr->recv_depth + DQ_VERBS_OWN_RECVS : 0);
	qp->receive_reserved = control ? 0 : attr->recv_depth + 1; /* one for the hello */
	dq_verbs_port_now(dev, &qp->port);
	int rc = qp->sq && (qp->rq || !control) ? 0 : -ENOMEM;
	if (!rc && getrandom(&qp->psn, sizeof qp->psn, 0) != (ssize_t)sizeof qp->psn)
		rc = -EIO;
	if (!rc)
		rc = take_slot(dev, qp);
	if (rc) {
		qp_free(qp);
		return dq_error_set(err, rc, "device %s: no room for a QP beside %u others: %s", dev->cfg.name, atomic_load(&dev->qps_used),
				    strerror(-rc));
	}
	qp->psn &= 0xffffffu;
	rc = dq_verbs_pool_reserve(dev, qp->send_reserved, qp->receive_reserved, &qp->pool, err);
	if (!rc) {
		qp->shared = !control && qp->pool->srq;
		if (!control && !qp->shared)
			reserve_spare(qp);
		rc = make_pair(qp, err);
	}
	if (rc) {
		if (qp->ib)
			dev->lib->destroy_qp(qp->ib);
		give_slot(dev, qp);
		qp_free(qp);
		return rc;
	}
	tables_add(dev, qp);
	*out = (struct dq_qp *)(void *)qp;
	return 0;
}

void dq_verbs_qp_endpoint(const struct dq_qp *q, struct dq_endpoint *out)
{
	const struct dq_verbs_qp *qp = (const struct dq_verbs_qp *)(const void *)q;
	const struct dq_verbs_peer own = {.gid = qp->port.gid, .qpn = qp->qpn, .psn = qp->psn, .lid = qp->port.lid, .mtu = qp->port.mtu,
					  .link_layer = qp->dev->infiniband ? IBV_LINK_LAYER_INFINIBAND : IBV_LINK_LAYER_ETHERNET};
	dq_verbs_endpoint_put(out, DQ_VERBS_ENDPOINT_QP, &own);
}

/* ---- connect ---- */

/* What may be the cause of an error of connecting, for people. */
static const char *hint(const struct dq_verbs_qp *qp, const struct dq_verbs_peer *peer, int code)
{
	if (code == ETIMEDOUT || code == EHOSTUNREACH || code == ENETUNREACH || code == ENETDOWN)
		return "; no route or neighbour: is the peer up, and are both GIDs of networks that reach each other?";
	if (code != EINVAL && code != ENODEV && code != ENODATA)
		return "";
	if (!qp->dev->infiniband && !dq_verbs_gids_alike(&peer->gid, &qp->port.gid))
		return "; GIDs of different kinds (IPv4, IPv6, link-local) do not reach each other: both interfaces need addresses of one kind";
	return "; the own GID may be gone";
}

static int to_ready(struct dq_verbs_qp *qp, const struct dq_verbs_peer *peer, struct dq_error *err)
{
	struct dq_verbs_device *dev = qp->dev;
	const uint8_t mtu = DQ_MIN(qp->port.mtu, peer->mtu);
	char gid[64];
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR, .path_mtu = (enum ibv_mtu)mtu, .dest_qp_num = peer->qpn, .rq_psn = peer->psn,
		.max_dest_rd_atomic = 1, .min_rnr_timer = qp->attr.kind == DQ_QP_DATA ? DATA_RNR_TIMER : CONTROL_RNR_TIMER,
		.ah_attr = {.dlid = peer->lid, .sl = dev->cfg.service_level, .port_num = (uint8_t)dev->cfg.port,
			    /* On RoCE always; on InfiniBand only through a router. */
			    .is_global = !dev->infiniband || memcmp(peer->gid.raw, qp->port.gid.raw, 8) != 0,
			    .grh = {.dgid = peer->gid, .sgid_index = (uint8_t)qp->port.gid_index, .hop_limit = HOP_LIMIT,
				    .flow_label = qp->attr.flow_label & 0xfffffu,
				    .traffic_class = qp->attr.traffic_class ? qp->attr.traffic_class : dev->cfg.traffic_class}}};

	int rc = dev->lib->modify_qp(qp->ib, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	if (!rc) {
		memset(&attr, 0, sizeof attr);
		attr.qp_state = IBV_QPS_RTS;
		attr.sq_psn = qp->psn;
		attr.timeout = dq_verbs_timeout_exponent(qp->attr.ack_timeout_ns);
		attr.retry_cnt = (uint8_t)DQ_MIN(qp->attr.retries, 7u);
		if (dev->software && attr.retry_cnt == 7)
			attr.retry_cnt = 6; /* rxe takes 7 for endless, where the specification says seven times */
		attr.rnr_retry = qp->attr.kind == DQ_QP_DATA ? DATA_RNR_RETRY : CONTROL_RNR_RETRY;
		attr.max_rd_atomic = 1;
		rc = dev->lib->modify_qp(qp->ib, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					 IBV_QP_MAX_QP_RD_ATOMIC);
	}
	qp->path_mtu = dq_verbs_mtu_bytes(mtu);
	if (!rc)
		return 0;
	dq_verbs_gid_format(&peer->gid, gid, sizeof gid);
	return dq_error_set(err, -rc, "device %s: QP 0x%x cannot be connected from GID %s to %s, QP 0x%x: %s%s", dev->cfg.name, qp->qpn,
			    qp->port.gid_text, gid, peer->qpn, strerror(rc), hint(qp, peer, rc));
}

int dq_verbs_qp_connect(struct dq_qp *q, const struct dq_endpoint *endpoint, bool dial, struct dq_error *err)
{
	struct dq_verbs_qp *qp = dq_verbs_qp_of(q);
	struct dq_verbs_device *dev = qp->dev;
	struct dq_verbs_peer peer;

	if (qp->state != DQ_VERBS_QP_INIT)
		return dq_error_set(err, -EISCONN, "device %s: QP 0x%x was connected before", dev->cfg.name, qp->qpn);
	int rc = dq_verbs_endpoint_get(endpoint, DQ_VERBS_ENDPOINT_QP, &peer, err);
	if (rc)
		return rc;
	if ((peer.link_layer == IBV_LINK_LAYER_INFINIBAND) != dev->infiniband)
		return dq_error_set(err, -EPROTO, "device %s: its link layer is %s, the peer's %s: they cannot reach each other", dev->cfg.name,
				    dev->infiniband ? "InfiniBand" : "Ethernet", dev->infiniband ? "Ethernet" : "InfiniBand");
	rc = to_ready(qp, &peer, err);
	if (rc)
		return rc;
	qp->dial = dial;
	qp->hello_sent = dial;
	qp->connect_ns = dq_verbs_now();
	qp->state = DQ_VERBS_QP_CONNECTING;
	/* From here on it is the polling thread's: its answer may come before the call that posts has returned. */
	if (!dial) {
		atomic_store_explicit(&qp->ready, true, memory_order_release);
		return 0;
	}
	return dq_verbs_post_first(qp, err);
}

void dq_verbs_qp_handshake(struct dq_verbs_qp *qp)
{
	bool connected;

	if (qp->state != DQ_VERBS_QP_CONNECTING)
		return;
	if (qp->attr.kind == DQ_QP_DATA) {
		connected = qp->dial ? qp->hello_done : qp->hello_in;
	} else {
		if (qp->hello_in && !qp->hello_sent) {
			qp->hello_sent = true;
			if (dq_verbs_post_own(qp, DQ_VERBS_HELLO))
				return;
		}
		if (qp->hello_done && !qp->probe_sent) {
			qp->probe_sent = true;
			if (dq_verbs_post_own(qp, DQ_VERBS_PROBE))
				return;
		}
		connected = qp->probe_done && qp->probe_in;
	}
	if (!connected)
		return;
	const struct dq_wc wc = {.time_ns = qp->dev->now_ns, .op = DQ_WC_CONNECTED};
	qp->state = DQ_VERBS_QP_UP;
	dq_verbs_emit(qp, &wc);
}

/* ---- the end ---- */

static bool was_connected(const struct dq_verbs_qp *qp)
{
	return qp->state == DQ_VERBS_QP_CONNECTING || qp->state == DQ_VERBS_QP_UP;
}

/* The device takes and sends nothing more; what it did before stays to be polled. */
static void stop(struct dq_verbs_qp *qp)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};

	if (qp->ib && was_connected(qp))
		(void)qp->dev->lib->modify_qp(qp->ib, &attr, IBV_QP_STATE); /* refused only where it is there already */
}

/* Tell the peer, as far as that is possible without waiting: it would notice by itself only after a heartbeat. */
static void farewell(struct dq_verbs_qp *qp)
{
	if (qp->state == DQ_VERBS_QP_UP && qp->attr.kind == DQ_QP_CONTROL)
		(void)dq_verbs_post_own(qp, DQ_VERBS_FAREWELL);
}

static void end_begin(struct dq_verbs_qp *qp, enum dq_wc_status status, uint32_t vendor)
{
	struct dq_verbs_device *dev = qp->dev;

	stop(qp);
	qp->end_status = (uint8_t)status;
	qp->end_vendor = vendor;
	qp->end_ns = dev->now_ns = dq_verbs_now();
	if (qp->shared && dev->last_wqe_event && !qp->last_wqe && was_connected(qp))
		qp->end_ns += DQ_VERBS_FENCE_NS;
	qp->state = DQ_VERBS_QP_ENDING;
	dq_verbs_list_add(&dev->ending, &qp->ending_node);
}

static bool ended(const struct dq_verbs_qp *qp)
{
	return qp->state == DQ_VERBS_QP_ENDING || qp->state == DQ_VERBS_QP_ERROR;
}

void dq_verbs_qp_fail(struct dq_verbs_qp *qp, enum dq_wc_status status, uint32_t vendor)
{
	if (!atomic_load_explicit(&qp->ready, memory_order_acquire)) {
		if (!qp->broken) { /* the maker still works on it: the next scan after it goes on */
			qp->broken = true;
			qp->end_status = (uint8_t)status;
			qp->end_vendor = vendor;
		}
		return;
	}
	if (!ended(qp))
		end_begin(qp, status, vendor);
}

void dq_verbs_qp_fence(struct dq_qp *q)
{
	struct dq_verbs_qp *qp = dq_verbs_qp_of(q);

	if (ended(qp))
		return;
	farewell(qp);
	end_begin(qp, DQ_WC_FLUSHED, 0);
}

/* Take in what came, and destroy the queue pair. Whoever gets its number next starts with an empty completion queue. */
static void tear_down(struct dq_verbs_qp *qp)
{
	struct dq_verbs_device *dev = qp->dev;

	if (!qp->ib)
		return;
	dq_verbs_drain(dev, qp->pool);
	dev->lib->destroy_qp(qp->ib);
	dq_verbs_drain(dev, qp->pool);
	pthread_mutex_lock(&dev->table_lock);
	number_remove(dev, qp);
	pthread_mutex_unlock(&dev->table_lock);
	qp->ib = NULL;
	if (qp->shared && !dev->software) {
		/* Receives that it had taken and not filled are lost; counted too high, they are found again when the queue is full. */
		qp->pool->srq_posted -= qp->last_wqe ? 1 : (int64_t)qp->receive_reserved;
	}
}

static void end(struct dq_verbs_qp *qp)
{
	struct dq_wc wc = {.status = DQ_WC_FLUSHED};

	dq_verbs_list_remove(&qp->ending_node);
	tear_down(qp);
	wc.time_ns = dq_verbs_now();
	qp->state = DQ_VERBS_QP_ERROR;
	for (; qp->sq_done != qp->sq_posted; qp->sq_done++) {
		const struct dq_verbs_sqe *s = &qp->sq[qp->sq_done & qp->sq_mask];
		if (s->op > DQ_VERBS_SEND)
			continue;
		wc.op = s->op == DQ_VERBS_WRITE ? DQ_WC_WRITE : DQ_WC_SEND;
		wc.wr_id = s->wr_id;
		wc.len = s->len;
		dq_verbs_emit(qp, &wc);
	}
	qp->sq_own = 0;
	for (; qp->rq && qp->rq_done != qp->rq_posted; qp->rq_done++) {
		if (!qp->probe_in && qp->rq_done < DQ_VERBS_OWN_RECVS)
			continue;
		wc.op = DQ_WC_RECV;
		wc.wr_id = qp->rq[qp->rq_done & qp->rq_mask];
		wc.len = 0;
		dq_verbs_emit(qp, &wc);
	}
	wc.op = DQ_WC_FAILED;
	wc.wr_id = 0;
	wc.len = 0;
	wc.status = qp->end_status;
	wc.vendor = qp->end_vendor;
	dq_verbs_emit(qp, &wc);
}

void dq_verbs_qp_end_due(struct dq_verbs_device *dev)
{
	struct dq_verbs_list *next;

	for (struct dq_verbs_list *i = dev->ending.next; i != &dev->ending; i = next) {
		struct dq_verbs_qp *qp = (struct dq_verbs_qp *)(void *)((char *)i - offsetof(struct dq_verbs_qp, ending_node));
		if (qp->last_wqe || dev->now_ns >= qp->end_ns) {
			end(qp);
			next = dev->ending.next; /* draining may have put others into the list, and none in front */
		} else {
			next = i->next;
		}
	}
}

void dq_verbs_qp_destroy(struct dq_qp *q)
{
	struct dq_verbs_qp *qp = dq_verbs_qp_of(q);
	if (!qp)
		return;
	struct dq_verbs_device *dev = qp->dev;

	farewell(qp);
	stop(qp);
	qp->state = DQ_VERBS_QP_ERROR; /* what is drained now is only counted */
	dq_verbs_list_remove(&qp->ending_node);
	tear_down(qp);
	dq_verbs_forget(qp);
	tables_remove(dev, qp);
	qp_free(qp);
}

/* ---- time ---- */

void dq_verbs_qp_scan(struct dq_verbs_qp *qp, uint64_t now)
{
	const struct dq_verbs_device *dev = qp->dev;

	if (qp->broken) {
		qp->broken = false;
		dq_verbs_qp_fail(qp, (enum dq_wc_status)qp->end_status, qp->end_vendor);
		return;
	}
	if (qp->state == DQ_VERBS_QP_CONNECTING) {
		dq_verbs_qp_handshake(qp); /* a packet may have come before the maker was done */
		/* The maker may have begun after the clock was read here. */
		if (now > qp->connect_ns && now - qp->connect_ns >= dev->cfg.deadline_ns)
			dq_verbs_qp_fail(qp, qp->hello_done && qp->probe_sent && !qp->probe_done ? DQ_WC_PATH_MTU :
					 dev->port.up ? DQ_WC_TIMEOUT : DQ_WC_DEVICE, ETIMEDOUT);
		return;
	}
	if (qp->state != DQ_VERBS_QP_UP)
		return;
	if (!qp->progress_ns) { /* work became outstanding since the last look */
		qp->progress_ns = now;
		return;
	}
	if (qp->sq_done != qp->sq_posted) {
		if ((now > qp->progress_ns && now - qp->progress_ns >= dev->cfg.deadline_ns) ||
		    (qp->heartbeat_ns && now - qp->heartbeat_ns >= DQ_VERBS_SILENT_HEARTBEATS * dev->cfg.heartbeat_ns))
			dq_verbs_qp_fail(qp, dev->port.up ? DQ_WC_TIMEOUT : DQ_WC_DEVICE, ETIMEDOUT);
	} else if (qp->attr.kind == DQ_QP_CONTROL && now > qp->progress_ns && now - qp->progress_ns >= dev->cfg.heartbeat_ns) {
		qp->heartbeat_ns = now;
		qp->progress_ns = now;
		dq_verbs_post_own(qp, DQ_VERBS_HEARTBEAT);
	}
}
