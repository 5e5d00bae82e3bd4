/* SPDX-License-Identifier: Apache-2.0 */
/* What a verbs device tells by itself: its port, its addresses, its end, and QPs that it stopped. */
#include <errno.h>

#include "provider/verbs.h"

#define EVENTS_PER_READ 64

static void tell(struct dq_verbs_device *dev, enum dq_device_change change, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static void tell(struct dq_verbs_device *dev, enum dq_device_change change, const char *fmt, ...)
{
	va_list ap;

	if (dev->events_tail - dev->events_head == DQ_VERBS_EVENTS) {
		/* Nobody fetches them. The end of the device must not be lost: it takes the place of the newest. */
		if (change != DQ_DEVICE_FATAL)
			return;
		dev->events_tail--;
	}
	struct dq_device_event *e = &dev->events[dev->events_tail++ % DQ_VERBS_EVENTS];
	*e = (struct dq_device_event){.change = (uint32_t)change, .port = dev->cfg.port};
	va_start(ap, fmt);
	vsnprintf(e->text, sizeof e->text, fmt, ap);
	va_end(ap);
}

int dq_verbs_device_event(struct dq_device *device, struct dq_device_event *out)
{
	struct dq_verbs_device *dev = dq_verbs_device_of(device);

	if (dev->events_head == dev->events_tail)
		return 0;
	*out = dev->events[dev->events_head++ % DQ_VERBS_EVENTS];
	return 1;
}

static void fail_all(struct dq_verbs_device *dev, const struct dq_verbs_pool *pool, uint32_t vendor)
{
	for (uint32_t i = 0; i < atomic_load(&dev->qps_high); i++) {
		struct dq_verbs_qp *qp = atomic_load_explicit(&dev->qps[i], memory_order_acquire);
		if (qp && atomic_load_explicit(&qp->ready, memory_order_acquire) && (!pool || qp->pool == pool))
			dq_verbs_qp_fail(qp, DQ_WC_DEVICE, vendor);
	}
}

/* The pool of a queue that an event names. */
static struct dq_verbs_pool *pool_of(struct dq_verbs_device *dev, const struct ibv_cq *cq, const struct ibv_srq *srq)
{
	struct dq_verbs_pool *pool = atomic_load(&dev->pools);
	while (pool && !(cq && pool->cq == cq) && !(srq && pool->srq == srq))
		pool = pool->next;
	return pool;
}

/* The flush QP and those of datagrams are not in the table. */
static void qp_event(struct dq_verbs_device *dev, const struct ibv_async_event *event)
{
	struct dq_verbs_qp *qp = dq_verbs_qp_by_number(dev, event->element.qp->qp_num);

	if (!qp)
		return;
	switch (event->event_type) {
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		qp->last_wqe = true;
		break;
	case IBV_EVENT_QP_ACCESS_ERR: /* the peer reached for memory that it may not touch */
		dq_verbs_qp_fail(qp, DQ_WC_REMOTE_ACCESS, (uint32_t)event->event_type);
		break;
	case IBV_EVENT_QP_REQ_ERR:
		dq_verbs_qp_fail(qp, DQ_WC_PROTOCOL, (uint32_t)event->event_type);
		break;
	case IBV_EVENT_QP_FATAL:
		dq_verbs_qp_fail(qp, DQ_WC_DEVICE, (uint32_t)event->event_type);
		break;
	default:
		break;
	}
}

/* Port or addresses may have changed: find out how they are now. */
static void look_at_port(struct dq_verbs_device *dev, enum dq_device_change change, const char *name)
{
	struct dq_error err = {0};
	const struct dq_verbs_port before = dev->port;

	if (dq_verbs_port_read(dev, dev->port.gid_text, &err) != 0)
		tell(dev, change, "port %u: %s: the GID in use, %s, is gone", dev->cfg.port, name, before.gid_text);
	else if (change == DQ_DEVICE_ADDRESS && dev->port.gid_index != before.gid_index)
		tell(dev, change, "port %u: %s: GID %s moved from index %u to %u", dev->cfg.port, name, before.gid_text, before.gid_index,
		     dev->port.gid_index);
	else
		tell(dev, change, "port %u: %s", dev->cfg.port, name);
}

static void handle(struct dq_verbs_device *dev, const struct ibv_async_event *event)
{
	const char *name = dev->lib->event_type_str(event->event_type);

	switch (event->event_type) {
	case IBV_EVENT_PORT_ACTIVE:
	case IBV_EVENT_PORT_ERR:
		if (event->element.port_num == (int)dev->cfg.port)
			look_at_port(dev, event->event_type == IBV_EVENT_PORT_ACTIVE ? DQ_DEVICE_UP : DQ_DEVICE_DOWN, name);
		break;
	case IBV_EVENT_GID_CHANGE:
		if (event->element.port_num == (int)dev->cfg.port)
			look_at_port(dev, DQ_DEVICE_ADDRESS, name);
		break;
	case IBV_EVENT_LID_CHANGE:
	case IBV_EVENT_PKEY_CHANGE:
	case IBV_EVENT_SM_CHANGE:
	case IBV_EVENT_CLIENT_REREGISTER:
		if (event->element.port_num == (int)dev->cfg.port)
			look_at_port(dev, DQ_DEVICE_OTHER, name);
		break;
	case IBV_EVENT_DEVICE_FATAL:
		tell(dev, DQ_DEVICE_FATAL, "%s: %s", dev->cfg.address, name);
		pthread_mutex_lock(&dev->port_lock);
		dev->port.up = false;
		pthread_mutex_unlock(&dev->port_lock);
		fail_all(dev, NULL, (uint32_t)event->event_type);
		break;
	case IBV_EVENT_CQ_ERR:
	case IBV_EVENT_SRQ_ERR: {
		const bool cq = event->event_type == IBV_EVENT_CQ_ERR;
		const struct dq_verbs_pool *pool = pool_of(dev, cq ? event->element.cq : NULL, cq ? NULL : event->element.srq);
		tell(dev, DQ_DEVICE_OTHER, "%s: %s", dev->cfg.address, name);
		if (pool)
			fail_all(dev, pool, (uint32_t)event->event_type);
		break;
	}
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		qp_event(dev, event);
		break;
	default: /* established, drained, migrated, low water: nothing that this provider asked for */
		break;
	}
}

void dq_verbs_async_read(struct dq_verbs_device *dev)
{
	struct ibv_async_event event;

	for (int i = 0; i < EVENTS_PER_READ; i++) {
		if (dev->lib->get_async_event(dev->ctx, &event) != 0)
			return; /* EAGAIN: no more */
		/* Acknowledged last: until then the QP or queue that it names cannot be destroyed by a maker's failure. */
		handle(dev, &event);
		dev->lib->ack_async_event(&event);
	}
}
