/* SPDX-License-Identifier: Apache-2.0 */
/* Regions of a VC: memory exported to the peer and by it, and the withdrawal of memory from everything that uses it. */
#include <errno.h>

#include "core/vc_private.h"

void dq_region_drop_user(struct dq_vc *vc, struct dq_flow *f, struct dq_msg *m)
{
	struct dq_region *r = m->import == DQ_NONE ? NULL : dq_region_at(vc, m->import);
	uint32_t import = m->import;
	m->import = DQ_NONE;
	if (!r || --r->users || !r->withdrawn)
		return;
	dq_vc_tell(vc, &(struct dq_message){ .type = DQ_MSG_UNEXPORT, .flags = DQ_FLAG_ANSWER, .flow = f->peer_flow, .region = r->id }, NULL);
	dq_region_free(vc, &f->imports, import);
}

void dq_region_finish(struct dq_vc *vc, struct dq_region *r, int32_t status)
{
	struct dq_flow *f = dq_flow_at(vc->pools, r->flow);
	struct dq_done d = { .status = status, .client = f->client, .flow = r->flow, .region = r->id };
	if (r->exporting) {
		/* off the queue of those that wait for an acknowledgement */
		uint32_t *at = &vc->exporting_head, last = DQ_NONE;
		while (*at != r->id) {
			last = *at;
			at = &dq_region_at(vc, *at)->next_exporting;
		}
		*at = r->next_exporting;
		if (vc->exporting_tail == r->id)
			vc->exporting_tail = last;
		r->exporting = false;
		d.kind = DQ_DONE_EXPORT;
		d.request = r->request;
		d.bytes = status == DQ_OK ? r->bytes : 0;
		vc->ops->done(vc->user, vc, &d);
	}
	if (r->has_unexport) {
		r->has_unexport = false;
		d.kind = DQ_DONE_UNEXPORT;
		d.bytes = 0;
		d.request = r->unexport_request;
		vc->ops->done(vc->user, vc, &d);
	}
}

void dq_region_free(struct dq_vc *vc, struct dq_list *list, uint32_t index)
{
	struct dq_region *r = dq_region_at(vc, index);
	if (r->mine)
		vc->ops->mem_release(vc->user, r->mem);
	else
		vc->imports--;
	dq_list_remove(&vc->pools->regions, list, index);
	dq_slab_free(&vc->pools->regions, index);
}

void dq_region_exported(struct dq_vc *vc)
{
	while (vc->exporting_head != DQ_NONE) {
		struct dq_region *r = dq_region_at(vc, vc->exporting_head);
		struct dq_flow *f = dq_flow_at(vc->pools, r->flow);
		struct dq_done d;
		if (!dq_control_acked(&vc->control, r->number))
			return;
		vc->exporting_head = r->next_exporting;
		if (vc->exporting_head == DQ_NONE)
			vc->exporting_tail = DQ_NONE;
		r->exporting = false;
		d = (struct dq_done){ .kind = DQ_DONE_EXPORT, .client = f->client, .flow = r->flow, .request = r->request, .region = r->id,
				      .bytes = r->bytes };
		vc->ops->done(vc->user, vc, &d);
	}
}

int dq_vc_export(struct dq_vc *vc, const struct dq_operation *op, uint64_t now_ns)
{
	struct dq_flow *f = dq_flow_at(vc->pools, op->flow);
	struct dq_message e = { .type = DQ_MSG_EXPORT, .length = op->bytes, .nkeys = 1 };
	struct dq_region *r;
	uint32_t index;
	int rc = dq_flow_usable(vc, f);
	(void)now_ns;
	if (rc)
		return rc;
	index = dq_slab_alloc(&vc->pools->regions);
	if (index == DQ_NONE)
		return DQ_ERR_NOMEM;
	r = dq_region_at(vc, index);
	r->flow = op->flow;
	r->id = index;
	r->mine = true;
	r->mem = op->mem;
	r->bytes = op->bytes;
	r->request = op->request;
	e.flow = f->peer_flow;
	e.region = index;
	vc->ops->mem_key(vc->user, vc, op->mem, op->offset, op->bytes, &e.addr, &e.keys[0]);
	if (!dq_vc_tell(vc, &e, &r->number)) {
		dq_slab_free(&vc->pools->regions, index);
		return DQ_ERR_NOMEM;
	}
	dq_list_push(&vc->pools->regions, &f->exports, index);
	r->exporting = true;
	r->next_exporting = DQ_NONE;
	if (vc->exporting_tail == DQ_NONE)
		vc->exporting_head = index;
	else
		dq_region_at(vc, vc->exporting_tail)->next_exporting = index;
	vc->exporting_tail = index;
	return 0;
}

static void withdraw(struct dq_vc *vc, struct dq_flow *f, struct dq_region *r, uint64_t now_ns)
{
	if (r->withdrawn)
		return;
	r->withdrawn = true;
	if (dq_vc_tell(vc, &(struct dq_message){ .type = DQ_MSG_UNEXPORT, .flow = f->peer_flow, .region = r->id }, NULL))
		dq_vc_owes(vc, now_ns);
}

int dq_vc_unexport(struct dq_vc *vc, const struct dq_operation *op, uint64_t now_ns)
{
	struct dq_flow *f = dq_flow_at(vc->pools, op->flow);
	struct dq_region *r = dq_region_at(vc, op->region);
	int rc = dq_flow_usable(vc, f);
	if (rc)
		return rc;
	if (!r || !r->mine || r->flow != op->flow || r->withdrawn)
		return DQ_ERR_REGION;
	r->has_unexport = true;
	r->unexport_request = op->request;
	withdraw(vc, f, r, now_ns);
	return 0;
}

int dq_msg_on_export(struct dq_vc *vc, const struct dq_message *m)
{
	struct dq_flow *f = dq_flow_of_peer(vc, m->flow);
	struct dq_region *r;
	uint32_t index;
	if (!f || f->peer_closed)
		return dq_vc_broken(vc, "EXPORT names flow %u, which is not open", m->flow);
	if (f->local_closed)
		return 0;
	if (vc->imports == DQ_VC_MAX_IMPORTS)
		return dq_vc_broken(vc, "peer exported more than %u regions", DQ_VC_MAX_IMPORTS);
	index = dq_slab_alloc(&vc->pools->regions);
	if (index == DQ_NONE)
		return -ENOMEM;
	vc->imports++;
	r = dq_region_at(vc, index);
	r->flow = m->flow;
	r->id = m->region;
	r->addr = m->addr;
	r->key = m->keys[0];
	r->bytes = m->length;
	dq_list_push(&vc->pools->regions, &f->imports, index);
	return 0;
}

int dq_msg_on_unexport(struct dq_vc *vc, const struct dq_message *m, uint64_t now_ns)
{
	struct dq_flow *f = dq_flow_of_peer(vc, m->flow);
	struct dq_region *r = NULL;
	uint32_t index, next;

	if (!f || f->peer_closed)
		return dq_vc_broken(vc, "UNEXPORT names flow %u, which is not open", m->flow);
	if (m->flags & DQ_FLAG_ANSWER) {
		r = dq_region_at(vc, m->region);
		if (!r || !r->mine || r->flow != m->flow || !r->withdrawn)
			return dq_vc_broken(vc, "UNEXPORT answers for region %u, which was not withdrawn", m->region);
		dq_vc_answered(vc, now_ns);
		dq_region_finish(vc, r, DQ_OK);
		dq_region_free(vc, &f->exports, m->region);
		return 0;
	}
	if (f->close_sent)
		return 0; /* our FLOW_CLOSE has answered */
	for (index = f->imports.head; index != DQ_NONE; index = r->node.next) {
		r = dq_region_at(vc, index);
		if (r->id == m->region && !r->withdrawn)
			break;
	}
	if (index == DQ_NONE) {
		if (f->local_closed)
			return 0; /* its EXPORT was ignored for the same reason */
		return dq_vc_broken(vc, "UNEXPORT names region %u, which is not exported", m->region);
	}
	r->withdrawn = true;
	r->users++; /* hold it while puts into it are stopped */
	for (uint32_t i = f->puts.head; i != DQ_NONE; i = next) {
		struct dq_msg *p = dq_msg_at(vc, i);
		next = p->node.next;
		if (p->import == index) {
			r->users--;
			dq_msg_finish(vc, p, DQ_ERR_REGION, 0);
			dq_msg_free(vc, &f->puts, i);
		}
	}
	for (uint32_t i = f->ready.head; i != DQ_NONE; i = next) {
		next = dq_msg_at(vc, i)->node.next;
		if (dq_msg_at(vc, i)->import == index)
			dq_msg_stop(vc, i, DQ_ERR_REGION, now_ns);
	}
	if (--r->users == 0) {
		dq_vc_tell(vc, &(struct dq_message){ .type = DQ_MSG_UNEXPORT, .flags = DQ_FLAG_ANSWER, .flow = f->peer_flow, .region = r->id }, NULL);
		dq_region_free(vc, &f->imports, index);
	}
	return 0;
}

/* --- memory goes away ----------------------------------------------------------------------------------------- */

void dq_vc_cancel_mem(struct dq_vc *vc, uint32_t flow, uint64_t mem, uint64_t now_ns)
{
	struct dq_flow *f = dq_flow_at(vc->pools, flow);
	struct dq_list *waiting[3];
	uint32_t next;

	if (!f || f->vc != vc || f->state != DQ_FLOW_OPEN || f->local_closed)
		return; /* a flow that is being closed has done all this */
	waiting[0] = &f->unmatched, waiting[1] = &f->puts, waiting[2] = &f->receives;
	for (unsigned l = 0; l < 3; l++) {
		for (uint32_t i = waiting[l]->head; i != DQ_NONE; i = next) {
			struct dq_msg *m = dq_msg_at(vc, i);
			next = m->node.next;
			if (m->mem != mem)
				continue;
			dq_msg_finish(vc, m, DQ_ERR_CANCELED, 0);
			if (m->kind == DQ_KIND_PUT)
				dq_region_drop_user(vc, f, m);
			if (m->kind == DQ_KIND_RECV)
				vc->counters.receives_waiting--;
			dq_msg_free(vc, waiting[l], i);
		}
	}
	if (dq_list_empty(&f->puts))
		dq_slot_unwant(vc, flow, f, DQ_DIR_PUT);
	if (dq_list_empty(&f->receives))
		dq_slot_unwant(vc, flow, f, DQ_DIR_RECV);
	for (uint32_t i = f->ready.head; i != DQ_NONE; i = next) {
		next = dq_msg_at(vc, i)->node.next;
		if (dq_msg_at(vc, i)->mem == mem)
			dq_msg_stop(vc, i, DQ_ERR_CANCELED, now_ns);
	}
	for (uint32_t i = f->announced.head; i != DQ_NONE; i = next) {
		struct dq_msg *m = dq_msg_at(vc, i);
		next = m->node.next;
		if (m->mem != mem || m->canceled || m->done_heard)
			continue;
		dq_msg_finish(vc, m, DQ_ERR_CANCELED, 0);
		m->canceled = true;
		dq_vc_tell(vc, &(struct dq_message){ .type = DQ_MSG_CANCEL, .slot = m->slot, .serial = m->serial }, NULL);
		dq_msg_owes(vc, m, now_ns);
	}
	for (uint32_t i = f->exports.head; i != DQ_NONE; i = next) {
		struct dq_region *r = dq_region_at(vc, i);
		next = r->node.next;
		if (r->mem != mem)
			continue;
		if (r->exporting)
			dq_region_finish(vc, r, DQ_ERR_CANCELED);
		withdraw(vc, f, r, now_ns);
	}
}
