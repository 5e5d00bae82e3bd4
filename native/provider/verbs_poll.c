/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Completions of a verbs device: pools of completion queues and shared receive queues, routing to QPs, and the poll loop.
 *
 * A completion carries the slot, the generation and the sequence of what was posted (verbs.h), or, for a shared receive, the
 * number of the QP. The numbers of destroyed QPs are used again by the device: so a QP is destroyed only after its queue was
 * emptied, and the queue is emptied once more before a new one can get the number.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>

#include "provider/verbs.h"

#define POOL_ENTRIES 16384        /* of a completion queue: half for sends, half for receives */
#define SPARE_FACTOR 4u           /* receives posted for one that the peer may use: this process may be late to post anew */
#define LOOK_NS 1000000u          /* asynchronous events are looked at so often while the device is busy */
#define POLLS_PER_LOOK 64u        /* empty polls between two readings of the clock */

/* ---- pools ---- */

static void pool_destroy(struct dq_verbs_device *dev, struct dq_verbs_pool *pool)
{
	if (pool->srq)
		dev->lib->destroy_srq(pool->srq);
	if (pool->cq)
		dev->lib->destroy_cq(pool->cq);
	free(pool->ring);
	free(pool);
}

/* For diagnosis: behave as on a device without shared receive queues. */
static bool srq_wanted(void)
{
	const char *text = getenv("DQPLBD_VERBS_SRQ");
	return !text || strcmp(text, "0") != 0;
}

/* Devices round sizes up, to a power of two less one; what they made of it is what can be in the queue at most. */
static struct ibv_srq *srq_make(struct dq_verbs_device *dev, uint32_t *room)
{
	for (uint32_t wanted = *room; wanted >= 64; wanted = wanted / 2) {
		struct ibv_srq_init_attr init = {.attr = {.max_wr = (uint32_t)DQ_MIN((int)wanted, dev->attr.max_srq_wr), .max_sge = 1}};
		struct ibv_srq *srq = dev->lib->create_srq(dev->pd, &init);
		if (!srq)
			return NULL;
		if (init.attr.max_wr <= *room) {
			*room = init.attr.max_wr;
			return srq;
		}
		dev->lib->destroy_srq(srq);
	}
	return NULL;
}

static struct dq_verbs_pool *pool_make(struct dq_verbs_device *dev, struct dq_error *err)
{
	const int entries = DQ_MIN(POOL_ENTRIES, dev->attr.max_cqe);
	struct dq_verbs_pool *pool = calloc(1, sizeof *pool);

	if (pool) {
		pool->ring_mask = dq_verbs_pow2_at_least((uint32_t)entries) - 1;
		pool->ring = calloc(pool->ring_mask + 1, sizeof *pool->ring);
	}
	if (!pool || !pool->ring) {
		free(pool);
		dq_error_set(err, -ENOMEM, "device %s: no memory for a completion queue", dev->cfg.name);
		return NULL;
	}
	pool->cq = dev->lib->create_cq(dev->ctx, entries, pool, dev->channel, 0);
	if (!pool->cq) {
		const int code = errno ? errno : EIO;
		dq_error_set(err, -code, "device %s: %s gives no completion queue of %d entries: %s; it has %d for all its users%s", dev->cfg.name,
			     dev->cfg.address, entries, strerror(code), dev->attr.max_cq, code == ENOMEM ? ", and the limit of locked memory counts "
			     "their memory: LimitMEMLOCK=infinity" : "");
		pool_destroy(dev, pool);
		return NULL;
	}
	pool->receive_room = (uint32_t)entries / 2 - 1;
	pool->send_room = (uint32_t)entries - pool->receive_room;
	if (dev->attr.max_srq > 0 && srq_wanted())
		pool->srq = srq_make(dev, &pool->receive_room); /* where it fails, QPs have receives of their own */
	pool->next = atomic_load(&dev->pools);
	atomic_store(&dev->pools, pool);
	return pool;
}

static struct dq_verbs_pool *pools_of(const struct dq_verbs_device *dev)
{
	return atomic_load_explicit(&dev->pools, memory_order_acquire);
}

/* Receives without a buffer into the shared queue, as many as it takes of n; how many. */
static uint32_t srq_post(struct dq_verbs_pool *pool, uint32_t n)
{
	struct ibv_recv_wr wr[DQ_VERBS_BATCH], *bad;
	uint32_t done = 0;

	for (uint32_t i = 0; i < DQ_MIN(n, DQ_VERBS_BATCH); i++)
		wr[i] = (struct ibv_recv_wr){.wr_id = (uint64_t)DQ_VERBS_WR_SHARED << 62, .next = &wr[i + 1]};
	while (done < n) {
		const uint32_t k = DQ_MIN(n - done, DQ_VERBS_BATCH);
		wr[k - 1].next = NULL;
		if (ibv_post_srq_recv(pool->srq, wr, &bad) != 0)
			return done + (uint32_t)(bad >= wr && bad < wr + k ? bad - wr : 0);
		done += k;
	}
	return done;
}

int dq_verbs_pool_reserve(struct dq_verbs_device *dev, uint32_t sends, uint32_t receives, struct dq_verbs_pool **out,
			  struct dq_error *err)
{
	pthread_mutex_lock(&dev->table_lock);
	struct dq_verbs_pool *pool = pools_of(dev);
	while (pool && (sends > pool->send_room - pool->send_used || receives > pool->receive_room - pool->receive_used))
		pool = pool->next;
	if (!pool) {
		pool = pool_make(dev, err);
		if (pool && (sends > pool->send_room || receives > pool->receive_room)) {
			dq_error_set(err, -EINVAL, "device %s: a QP with %u sends and %u receives does not fit the completion queues of %s, which hold "
				     "%u and %u: lower the queue depth", dev->cfg.name, sends, receives, dev->cfg.address, pool->send_room,
				     pool->receive_room);
			pool = NULL;
		}
	}
	if (pool) {
		pool->send_used += sends;
		pool->receive_used += receives;
	}
	pthread_mutex_unlock(&dev->table_lock);
	if (!pool)
		return err && err->code ? err->code : -ENOMEM;
	/* Before the peer can use them. Where the queue takes no more, it already holds more than its QPs may use. */
	if (receives && pool->srq)
		atomic_fetch_add(&pool->srq_added, srq_post(pool, DQ_MIN(SPARE_FACTOR * receives, pool->receive_room)));
	*out = pool;
	return 0;
}

void dq_verbs_pool_release(struct dq_verbs_device *dev, struct dq_verbs_pool *pool, uint32_t sends, uint32_t receives)
{
	pthread_mutex_lock(&dev->table_lock);
	pool->send_used -= sends;
	pool->receive_used -= receives;
	pthread_mutex_unlock(&dev->table_lock);
}

void dq_verbs_pools_destroy(struct dq_verbs_device *dev)
{
	struct dq_verbs_pool *pool = atomic_exchange(&dev->pools, NULL);

	while (pool) {
		struct dq_verbs_pool *next = pool->next;
		pool_destroy(dev, pool);
		pool = next;
	}
}

/* What was taken is posted anew in batches, or all of it. */
static void refill(struct dq_verbs_device *dev, bool all)
{
	for (struct dq_verbs_pool *p = pools_of(dev); p; p = p->next) {
		if (!p->srq)
			continue;
		if (atomic_load_explicit(&p->srq_added, memory_order_relaxed))
			p->srq_posted += atomic_exchange(&p->srq_added, 0);
		const uint32_t used = atomic_load_explicit(&p->receive_used, memory_order_relaxed);
		const int64_t target = DQ_MIN(p->receive_room, SPARE_FACTOR * used), missing = target - p->srq_posted;
		if (missing <= 0 || (!all && missing < DQ_MIN(target / 4, 2 * (int64_t)DQ_VERBS_BATCH)))
			continue;
		const uint32_t posted = srq_post(p, (uint32_t)missing);
		/* Full: QPs that are gone had left more than was counted on. */
		p->srq_posted = posted < (uint32_t)missing ? p->receive_room : p->srq_posted + posted;
	}
}

/* ---- telling the caller ---- */

static void taken(struct dq_verbs_qp *qp, uint8_t op)
{
	if (op != DQ_WC_SEGMENT)
		return;
	if (qp->shared) {
		qp->pool->srq_posted--;
	} else if (qp->receives_posted) {
		qp->receives_posted--;
		if (qp->state == DQ_VERBS_QP_UP && qp->receives - qp->receives_posted >= DQ_MIN(qp->receives / 4, DQ_VERBS_BATCH))
			dq_verbs_post_blanks(qp);
	}
}

void dq_verbs_emit(struct dq_verbs_qp *qp, const struct dq_wc *wc)
{
	struct dq_verbs_device *dev = qp->dev;
	struct dq_verbs_pool *pool = qp->pool;

	if (dev->out_left && pool->ring_head == pool->ring_tail) {
		*dev->out = *wc;
		dev->out->ctx = qp->attr.ctx;
		dev->out++;
		dev->out_left--;
		taken(qp, wc->op);
		return;
	}
	struct dq_verbs_cqe *e = &pool->ring[pool->ring_tail++ & pool->ring_mask];
	e->wc = *wc;
	e->wc.ctx = qp->attr.ctx;
	e->qp = qp;
	if (wc->op == DQ_WC_WRITE || wc->op == DQ_WC_SEND)
		qp->sq_unpolled++;
	else if (wc->op == DQ_WC_RECV)
		qp->rq_unpolled++;
}

static void rings_take(struct dq_verbs_device *dev)
{
	for (struct dq_verbs_pool *p = pools_of(dev); p; p = p->next) {
		while (dev->out_left && p->ring_head != p->ring_tail) {
			const struct dq_verbs_cqe *e = &p->ring[p->ring_head++ & p->ring_mask];
			if (e->wc.op == DQ_WC_WRITE || e->wc.op == DQ_WC_SEND)
				e->qp->sq_unpolled--;
			else if (e->wc.op == DQ_WC_RECV)
				e->qp->rq_unpolled--;
			*dev->out++ = e->wc;
			dev->out_left--;
			taken(e->qp, e->wc.op);
		}
	}
}

static bool rings_empty(const struct dq_verbs_device *dev)
{
	for (const struct dq_verbs_pool *p = pools_of(dev); p; p = p->next)
		if (p->ring_head != p->ring_tail)
			return false;
	return true;
}

void dq_verbs_forget(struct dq_verbs_qp *qp)
{
	struct dq_verbs_pool *pool = qp->pool;
	uint32_t to = pool->ring_head;

	for (uint32_t i = pool->ring_head; i != pool->ring_tail; i++) {
		const struct dq_verbs_cqe *e = &pool->ring[i & pool->ring_mask];
		if (e->qp != qp)
			pool->ring[to++ & pool->ring_mask] = *e;
		else
			taken(qp, e->wc.op);
	}
	pool->ring_tail = to;
}

/* ---- from the device ---- */

static enum dq_wc_status status_of(const struct dq_verbs_qp *qp, const struct ibv_wc *c, bool send)
{
	const struct dq_verbs_sqe *work = &qp->sq[(uint32_t)c->wr_id & qp->sq_mask];

	switch (c->status) {
	case IBV_WC_RETRY_EXC_ERR:
		if (qp->state == DQ_VERBS_QP_CONNECTING && qp->hello_done && work->op == DQ_VERBS_PROBE)
			return DQ_WC_PATH_MTU;
		return qp->dev->port.up ? DQ_WC_TIMEOUT : DQ_WC_DEVICE;
	case IBV_WC_RNR_RETRY_EXC_ERR:
		return DQ_WC_NOT_READY;
	case IBV_WC_REM_ACCESS_ERR:
		return DQ_WC_REMOTE_ACCESS;
	case IBV_WC_REM_INV_REQ_ERR: /* a send that is longer than the receive, or memory that may not be written so */
		return send && work->op != DQ_VERBS_WRITE ? DQ_WC_PROTOCOL : DQ_WC_REMOTE_ACCESS;
	case IBV_WC_REM_OP_ERR: /* the peer cannot go on; some devices say so of a send that is too long */
		return send && work->op != DQ_VERBS_WRITE ? DQ_WC_PROTOCOL : DQ_WC_REMOTE_GONE;
	case IBV_WC_REM_ABORT_ERR:
		return DQ_WC_REMOTE_GONE;
	case IBV_WC_LOC_LEN_ERR:
		return send ? DQ_WC_LOCAL : DQ_WC_PROTOCOL;
	case IBV_WC_LOC_QP_OP_ERR: /* rxe says so of a receive that was too short for what came */
		if (!send && qp->dev->software)
			return DQ_WC_PROTOCOL;
		return qp->dev->port.up ? DQ_WC_LOCAL : DQ_WC_DEVICE;
	case IBV_WC_WR_FLUSH_ERR: /* and nothing else before: the device stopped because of what the peer sent */
	case IBV_WC_BAD_RESP_ERR:
		return DQ_WC_PROTOCOL;
	case IBV_WC_FATAL_ERR:
		return DQ_WC_DEVICE;
	default: /* some devices call it a local error that nothing leaves the port */
		return qp->dev->port.up ? DQ_WC_LOCAL : DQ_WC_DEVICE;
	}
}

static uint32_t vendor_of(const struct ibv_wc *c)
{
	return c->vendor_err ? c->vendor_err : (uint32_t)c->status;
}

static void failed(struct dq_verbs_qp *qp, const struct ibv_wc *c, bool send)
{
	if (qp->state == DQ_VERBS_QP_ENDING || qp->state == DQ_VERBS_QP_ERROR)
		return; /* told when the QP ends */
	dq_verbs_qp_fail(qp, status_of(qp, c, send), vendor_of(c));
}

static void own_done(struct dq_verbs_qp *qp, uint8_t op, bool good)
{
	qp->sq_own--;
	if (!good)
		return;
	if (op == DQ_VERBS_HELLO)
		qp->hello_done = true;
	else if (op == DQ_VERBS_PROBE)
		qp->probe_done = true;
	else if (op == DQ_VERBS_HEARTBEAT)
		qp->heartbeat_ns = 0;
	if (qp->state == DQ_VERBS_QP_CONNECTING)
		dq_verbs_qp_handshake(qp);
}

/* One that was posted is through. */
static void send_done(struct dq_verbs_qp *qp, enum dq_wc_status status, uint32_t vendor)
{
	const struct dq_verbs_sqe *s = &qp->sq[qp->sq_done++ & qp->sq_mask];

	if (s->op > DQ_VERBS_SEND) {
		own_done(qp, s->op, status == DQ_WC_SUCCESS);
		return;
	}
	const struct dq_wc wc = {.wr_id = s->wr_id, .time_ns = qp->dev->now_ns, .len = s->len, .status = (uint8_t)status, .vendor = vendor,
				 .op = s->op == DQ_VERBS_WRITE ? DQ_WC_WRITE : DQ_WC_SEND};
	dq_verbs_emit(qp, &wc);
}

static void sends_done(struct dq_verbs_qp *qp, const struct ibv_wc *c)
{
	const uint32_t upto = (uint32_t)c->wr_id;
	const bool good = c->status == IBV_WC_SUCCESS;

	if (qp->state == DQ_VERBS_QP_ERROR || (!good && c->status == IBV_WC_WR_FLUSH_ERR)) {
		failed(qp, c, true);
		return;
	}
	/* Work is carried out in order: what was posted before the one that is told, good or bad, is done. */
	while (qp->sq_done != qp->sq_posted && (int32_t)(upto - qp->sq_done) > 0)
		send_done(qp, DQ_WC_SUCCESS, 0);
	if (qp->sq_done == qp->sq_posted || upto != qp->sq_done)
		return;
	qp->progress_ns = qp->dev->now_ns;
	if (good) {
		send_done(qp, DQ_WC_SUCCESS, 0);
		return;
	}
	const enum dq_wc_status status = status_of(qp, c, true);
	failed(qp, c, true);
	send_done(qp, status, vendor_of(c));
}

/* Something came while the maker still connects this passive end: the peer should have waited for the answer. A hello is
 * kept for the next look at the QP; the rest is not what a peer of ours sends. */
static void came_early(struct dq_verbs_qp *qp, const struct ibv_wc *c)
{
	if (c->status == IBV_WC_SUCCESS && c->opcode == IBV_WC_RECV && c->byte_len == 0 && !qp->hello_in)
		qp->hello_in = true;
	else
		dq_verbs_qp_fail(qp, DQ_WC_PROTOCOL, 0);
}

/* A receive of a data QP was used up without a segment. */
static void blank_used(struct dq_verbs_qp *qp)
{
	taken(qp, DQ_WC_SEGMENT);
}

static void data_in(struct dq_verbs_qp *qp, const struct ibv_wc *c)
{
	if (DQ_UNLIKELY(!atomic_load_explicit(&qp->ready, memory_order_acquire))) {
		blank_used(qp);
		came_early(qp, c);
		return;
	}
	if (c->status != IBV_WC_SUCCESS) {
		blank_used(qp);
		failed(qp, c, false);
		return;
	}
	if (qp->state == DQ_VERBS_QP_ERROR) {
		blank_used(qp);
		return;
	}
	qp->progress_ns = qp->dev->now_ns;
	if (qp->state == DQ_VERBS_QP_CONNECTING) {
		/* A peer that dials says hello first; one that writes already has seen ours arrive. */
		qp->hello_in = true;
		qp->hello_done |= qp->dial;
		dq_verbs_qp_handshake(qp);
	}
	if (c->opcode != IBV_WC_RECV_RDMA_WITH_IMM) {
		blank_used(qp);
		return;
	}
	const struct dq_wc wc = {.time_ns = qp->dev->now_ns, .len = c->byte_len, .imm = ntohl(c->imm_data), .op = DQ_WC_SEGMENT};
	dq_verbs_emit(qp, &wc);
}

static void control_in(struct dq_verbs_qp *qp, const struct ibv_wc *c)
{
	const uint32_t sequence = (uint32_t)c->wr_id;

	if (DQ_UNLIKELY(!atomic_load_explicit(&qp->ready, memory_order_acquire))) {
		qp->rq_done++;
		came_early(qp, c);
		return;
	}
	if (c->status != IBV_WC_SUCCESS) {
		failed(qp, c, false);
		return;
	}
	if (qp->state == DQ_VERBS_QP_ERROR || c->opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
		if (qp->state != DQ_VERBS_QP_ERROR)
			dq_verbs_qp_fail(qp, DQ_WC_PROTOCOL, 0); /* writes with immediate belong on data QPs */
		return;
	}
	qp->progress_ns = qp->dev->now_ns;
	if (c->wc_flags & IBV_WC_WITH_IMM) { /* the peer's farewell */
		dq_verbs_qp_fail(qp, DQ_WC_REMOTE_GONE, 0);
		return;
	}
	if (!qp->probe_in && sequence < DQ_VERBS_OWN_RECVS) {
		if (c->byte_len != (sequence == 0 ? 0 : DQ_MIN(qp->path_mtu, DQ_CONTROL_BYTES))) {
			dq_verbs_qp_fail(qp, DQ_WC_PROTOCOL, c->byte_len);
			return;
		}
		qp->rq_done++;
		qp->hello_in = true;
		qp->probe_in |= sequence == 1;
		dq_verbs_qp_handshake(qp);
		return;
	}
	if (qp->state == DQ_VERBS_QP_CONNECTING) {
		/* The peer sends once it knows of our probe: its message overtook the acknowledgement. */
		qp->hello_done = qp->probe_done = true;
		dq_verbs_qp_handshake(qp);
	}
	const struct dq_wc wc = {.wr_id = qp->rq[sequence & qp->rq_mask], .time_ns = qp->dev->now_ns, .len = c->byte_len, .op = DQ_WC_RECV};
	qp->rq_done++;
	dq_verbs_emit(qp, &wc);
}

static void route(struct dq_verbs_device *dev, struct dq_verbs_pool *pool, const struct ibv_wc *c)
{
	const enum dq_verbs_wr_kind kind = (enum dq_verbs_wr_kind)(c->wr_id >> 62);

	if (kind == DQ_VERBS_WR_SHARED) {
		struct dq_verbs_qp *qp = dq_verbs_qp_by_number(dev, c->qp_num);
		if (qp)
			data_in(qp, c);
		else
			pool->srq_posted--;
		return;
	}
	const uint32_t slot = (uint32_t)(c->wr_id >> 42) & 0xfffffu;
	struct dq_verbs_qp *qp = slot < dev->qps_cap ? atomic_load_explicit(&dev->qps[slot], memory_order_acquire) : NULL;
	if (!qp || (qp->generation & 0x3ffu) != ((uint32_t)(c->wr_id >> 32) & 0x3ffu))
		return; /* of a QP that is gone */
	if (kind == DQ_VERBS_WR_SEND) {
		/* Always ready: the maker of the QP said so before it posted the first. Asked to see what it wrote before. */
		if (DQ_LIKELY(atomic_load_explicit(&qp->ready, memory_order_acquire)))
			sends_done(qp, c);
		return;
	}
	if (qp->attr.kind == DQ_QP_CONTROL)
		control_in(qp, c);
	else
		data_in(qp, c);
}

/* One batch; how many it was. */
static int pool_batch(struct dq_verbs_device *dev, struct dq_verbs_pool *pool)
{
	struct ibv_wc wc[DQ_VERBS_BATCH];
	int n = ibv_poll_cq(pool->cq, DQ_VERBS_BATCH, wc);

	if (n > 0)
		dev->now_ns = dq_verbs_now();
	for (int i = 0; i < n; i++)
		route(dev, pool, &wc[i]);
	return n;
}

void dq_verbs_drain(struct dq_verbs_device *dev, struct dq_verbs_pool *pool)
{
	int left = (int)(pool->send_room + pool->receive_room);

	/* What other QPs add meanwhile may stay: only what was there at the call matters. */
	while (left > 0) {
		const int n = pool_batch(dev, pool);
		if (n <= 0)
			return;
		left -= n;
	}
}

static bool pools_poll(struct dq_verbs_device *dev)
{
	bool work = false;

	for (struct dq_verbs_pool *p = pools_of(dev); p; p = p->next) {
		int n;
		do {
			n = pool_batch(dev, p);
			work |= n > 0;
		} while (n == (int)DQ_VERBS_BATCH && dev->out_left);
	}
	return work;
}

static void scan(struct dq_verbs_device *dev)
{
	/* After a long sleep of this process (suspended, stopped) silence is its own; the peers get their time anew. */
	const bool slept = dev->now_ns - dev->last_scan_ns > 4 * dev->scan_interval_ns;

	for (uint32_t i = 0; i < atomic_load(&dev->qps_high); i++) {
		struct dq_verbs_qp *qp = atomic_load_explicit(&dev->qps[i], memory_order_acquire);
		if (!qp || !atomic_load_explicit(&qp->ready, memory_order_acquire))
			continue;
		if (slept) {
			qp->progress_ns = qp->connect_ns = dev->now_ns;
			if (qp->heartbeat_ns)
				qp->heartbeat_ns = dev->now_ns;
		}
		dq_verbs_qp_scan(qp, dev->now_ns);
	}
	dev->last_scan_ns = dev->now_ns;
	dev->scan_ns = atomic_load(&dev->qps_used) ? dev->now_ns + dev->scan_interval_ns : DQ_NEVER;
}

/* The first QP was made since the last look at the clock. */
static bool scan_begins(const struct dq_verbs_device *dev)
{
	return dev->scan_ns == DQ_NEVER && atomic_load_explicit(&dev->qps_used, memory_order_relaxed);
}

static void progress(struct dq_verbs_device *dev)
{
	bool work = pools_poll(dev);

	dev->look |= scan_begins(dev);
	if (!work && (dev->look || ++dev->idle_polls >= POLLS_PER_LOOK || !dq_verbs_list_empty(&dev->ending))) {
		dev->now_ns = dq_verbs_now();
		work = true;
	}
	if (!work)
		return;
	dev->idle_polls = 0;
	if (dev->happened || dev->now_ns >= dev->async_ns || !dq_verbs_list_empty(&dev->ending)) {
		dev->happened = false;
		dq_verbs_async_read(dev);
		dev->async_ns = dev->now_ns + LOOK_NS;
	}
	dev->look = false;
	if (scan_begins(dev)) {
		dev->last_scan_ns = dev->now_ns;
		dev->scan_ns = dev->now_ns + dev->scan_interval_ns;
	} else if (dev->now_ns >= dev->scan_ns) {
		scan(dev);
	}
	if (!dq_verbs_list_empty(&dev->ending))
		dq_verbs_qp_end_due(dev);
}

int dq_verbs_device_poll(struct dq_device *device, struct dq_wc *out, unsigned n)
{
	struct dq_verbs_device *dev = dq_verbs_device_of(device);

	dev->out = out;
	dev->out_left = n;
	rings_take(dev);
	if (n == 0 || dev->out_left)
		progress(dev);
	const unsigned got = n - dev->out_left;
	dev->out = NULL;
	dev->out_left = 0;
	if (got)
		refill(dev, false);
	return (int)got;
}

/* ---- sleeping ---- */

/* Take the completion events, so that the channel is readable only for new ones; whether there was one. A queue that is armed
 * makes one. */
static bool channel_read(struct dq_verbs_device *dev)
{
	struct ibv_cq *cq;
	void *context;
	unsigned due = 0, got = 0;

	for (const struct dq_verbs_pool *p = pools_of(dev); p; p = p->next)
		due += p->armed;
	for (; got < due && dev->lib->get_cq_event(dev->channel, &cq, &context) == 0; got++) {
		((struct dq_verbs_pool *)context)->armed = false;
		dev->lib->ack_cq_events(cq, 1);
	}
	return got > 0;
}

int dq_verbs_device_arm(struct dq_device *device)
{
	struct dq_verbs_device *dev = dq_verbs_device_of(device);
	struct epoll_event ev[2];

	if (!rings_empty(dev) || dev->events_head != dev->events_tail || scan_begins(dev))
		return 1;
	refill(dev, true);
	/* The usual reason to be here anew is a completion event. Where it is not, or after a while, see what else there is. */
	if (!channel_read(dev) || dev->now_ns >= dev->async_ns) {
		const int n = epoll_wait(dev->epfd, ev, 2, 0);
		for (int i = 0; i < n; i++) {
			if (ev[i].data.u32 == DQ_VERBS_WATCH_ASYNC)
				dev->happened = dev->look = true;
		}
		if (dev->happened)
			return 1; /* poll finds out what */
		dev->async_ns = dev->now_ns + LOOK_NS;
	}
	for (struct dq_verbs_pool *p = pools_of(dev); p; p = p->next)
		if (!p->armed && ibv_req_notify_cq(p->cq, 0) == 0)
			p->armed = true;
	/* What came before the queues were armed makes no event: it is taken in now, and told by the next poll. */
	for (struct dq_verbs_pool *p = pools_of(dev); p; p = p->next)
		while (pool_batch(dev, p) > 0)
			continue;
	dev->look = true;
	return !rings_empty(dev) || dq_verbs_device_next_deadline(device) <= dev->now_ns;
}

int dq_verbs_device_event_fd(const struct dq_device *device)
{
	return dq_verbs_device_of_const(device)->epfd;
}

uint64_t dq_verbs_device_next_deadline(const struct dq_device *device)
{
	const struct dq_verbs_device *dev = dq_verbs_device_of_const(device);
	uint64_t deadline = dev->scan_ns;

	for (const struct dq_verbs_list *i = dev->ending.next; i != &dev->ending; i = i->next) {
		const struct dq_verbs_qp *qp = (const struct dq_verbs_qp *)(const void *)((const char *)i - offsetof(struct dq_verbs_qp, ending_node));
		deadline = DQ_MIN(deadline, qp->end_ns);
	}
	return deadline;
}
