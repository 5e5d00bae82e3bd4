/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slots of a VC. Each open flow owns one slot a direction by count (which number it gets does not matter), so that no
 * client's idle receives can keep another flow from having one; the other half is shared by need, with a cap a client.
 */
#include <stdlib.h>
#include <string.h>

#include "core/vc_private.h"

uint32_t dq_slot_get(uint32_t *const pages[256], uint16_t slot)
{
	const uint32_t *page = pages[slot >> 8];
	return page ? page[slot & 255] : DQ_NONE;
}

bool dq_slot_set(uint32_t *pages[256], uint16_t slot, uint32_t value)
{
	uint32_t **page = &pages[slot >> 8];
	if (!*page) {
		if (value == DQ_NONE)
			return true;
		*page = malloc(256 * sizeof **page);
		if (!*page)
			return false;
		memset(*page, 0xff, 256 * sizeof **page); /* DQ_NONE */
	}
	(*page)[slot & 255] = value;
	return true;
}

static uint32_t client_cap(const struct dq_vc *vc)
{
	return vc->config.slot_share ? vc->config.slot_share : DQ_VC_SHARED_SLOTS / 4;
}

static bool may_share(const struct dq_vc *vc, const struct dq_vc_client *c, int dir)
{
	return c->shared[dir] < client_cap(vc) && vc->slots[dir].shared < DQ_VC_SHARED_SLOTS;
}

bool dq_slot_take(struct dq_vc *vc, struct dq_flow *f, int dir, uint16_t *slot)
{
	struct dq_vc_slots *s = &vc->slots[dir];
	bool shared = f->slots[dir] > 0;
	if (shared && !may_share(vc, f->vc_client, dir))
		return false;
	if (s->free_count) {
		*slot = s->free_ids[--s->free_count];
	} else {
		if (s->fresh == s->free_room) { /* room for every slot ever taken, so that giving one back cannot fail */
			uint32_t room = s->free_room ? s->free_room * 2 : 64;
			uint16_t *ids = realloc(s->free_ids, room * sizeof *ids);
			if (!ids)
				return false;
			s->free_ids = ids;
			s->free_room = room;
		}
		*slot = (uint16_t)((dir == DQ_DIR_PUT ? DQ_SLOT_PUT_BASE : 0) + s->fresh++);
	}
	s->used++;
	if (shared) {
		s->shared++;
		f->vc_client->shared[dir]++;
	}
	f->slots[dir]++;
	return true;
}

void dq_slot_give(struct dq_vc *vc, struct dq_flow *f, int dir, uint16_t slot)
{
	struct dq_vc_slots *s = &vc->slots[dir];
	s->free_ids[s->free_count++] = slot;
	s->used--;
	if (--f->slots[dir] > 0) {
		s->shared--;
		f->vc_client->shared[dir]--;
		s->freed = true;
	}
}

void dq_slot_want(struct dq_vc *vc, uint32_t flow, struct dq_flow *f, int dir)
{
	struct dq_list *l = &f->vc_client->waiting[dir];
	if (f->is_waiting[dir])
		return;
	f->is_waiting[dir] = true;
	vc->slots[dir].waiting++;
	f->wait[dir] = (struct dq_node){ DQ_NONE, l->tail };
	if (l->tail == DQ_NONE)
		l->head = flow;
	else
		dq_flow_at(vc->pools, l->tail)->wait[dir].next = flow;
	l->tail = flow;
}

void dq_slot_unwant(struct dq_vc *vc, uint32_t flow, struct dq_flow *f, int dir)
{
	struct dq_list *l = &f->vc_client->waiting[dir];
	struct dq_node *n = &f->wait[dir];
	(void)flow;
	if (!f->is_waiting[dir])
		return;
	f->is_waiting[dir] = false;
	vc->slots[dir].waiting--;
	if (n->prev == DQ_NONE)
		l->head = n->next;
	else
		dq_flow_at(vc->pools, n->prev)->wait[dir].next = n->next;
	if (n->next == DQ_NONE)
		l->tail = n->prev;
	else
		dq_flow_at(vc->pools, n->next)->wait[dir].prev = n->prev;
}

void dq_slot_serve(struct dq_vc *vc)
{
	for (int dir = 0; dir < 2; dir++) {
		bool moved = vc->slots[dir].freed && vc->slots[dir].waiting;
		vc->slots[dir].freed = false;
		while (moved) {
			/* Once round all clients, one slot each; the next time it goes on after the one that got the last. */
			struct dq_vc_client *c = vc->serve_next[dir] ? vc->serve_next[dir] : vc->clients, *first = c;
			moved = false;
			do {
				uint32_t flow = c ? c->waiting[dir].head : DQ_NONE;
				struct dq_vc_client *next = c && c->next ? c->next : vc->clients;
				if (flow != DQ_NONE && may_share(vc, c, dir)) {
					struct dq_flow *f = dq_flow_at(vc->pools, flow);
					dq_slot_unwant(vc, flow, f, dir);
					/* One, then the flow queues again behind the others. */
					if (dq_msg_serve(vc, flow, dir, 1) || !f->is_waiting[dir])
						moved = true;
					vc->serve_next[dir] = next;
				}
				c = next;
			} while (c != first);
		}
	}
}
