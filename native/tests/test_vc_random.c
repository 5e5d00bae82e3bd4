/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random operations of clients at both ends of a VC, over links whose delays are drawn anew for each seed: flows are opened
 * and closed, memory is withdrawn, VCs fail, all at any moment. Whatever happens, every request completes exactly once, in
 * the end everything is released, and no memory without a reference is ever touched (vc_pair.c checks that).
 * VC_SEEDS=n runs n seeds, VC_SEED=n only that one.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/vc_private.h"
#include "prng.h"
#include "vc_pair.h"

#define CELL 4096u
#define CELLS 8u
#define MAX_REGIONS 64

struct region {
	uint32_t op;             /* of the export */
	uint32_t end, flow;      /* of the exporter */
	uint32_t busy;           /* cells a put was sent to and not notified of: never twice, so that contents can be checked */
};

struct walk {
	struct vp *w;
	uint64_t prng;
	bool may_fail, may_cancel, may_close, short_of_memory;
	struct dq_slab *hogged[64]; /* objects that nobody else can have */
	uint32_t hogged_from[64];
	unsigned hogs;
	struct region regions[MAX_REGIONS];
	unsigned region_count;
	uint32_t mems[64], mem_end[64], mem_flow[64];
	unsigned mem_count;
};

static uint32_t below(struct walk *k, uint32_t n) { return prng_below(&k->prng, n); }

/* A random flow of a random end in the wanted state, not closed. */
static bool pick(struct walk *k, uint32_t *end, uint32_t *flow)
{
	uint32_t n = 0, want;
	for (int count = 1; count >= 0; count--) {
		if (!count) {
			if (n == 0)
				return false;
			want = below(k, n) + 1;
		} else {
			want = UINT32_MAX;
		}
		n = 0;
		for (uint32_t e = 0; e < k->w->end_count; e++) {
			for (uint32_t f = 0; f < k->w->ends[e]->flow_room; f++) {
				struct vp_flow *x = &k->w->ends[e]->flows[f];
				if (x->state == VP_FLOW_OPEN && !x->closed && ++n == want) {
					*end = e;
					*flow = f;
					return true;
				}
			}
		}
	}
	return false;
}

static uint64_t size(struct walk *k)
{
	switch (below(k, 4)) {
	case 0: return below(k, 300);
	case 1: return below(k, 4000);
	case 2: return below(k, 20000);
	default: return 8 + below(k, 60000);
	}
}

/* Memory for the next operation: mostly new, sometimes shared with earlier ones of the flow, so that a cancel hits several. */
static void memory(struct walk *k, uint32_t end, uint32_t flow, bool receive)
{
	uint32_t host = k->w->ends[end]->host;
	k->w->next_mem = DQ_NONE;
	if (receive || below(k, 3))
		return;
	for (unsigned i = 0; i < k->mem_count; i++) {
		if (k->mem_end[i] == end && k->mem_flow[i] == flow && k->w->hosts[host].mems[k->mems[i]].refs) {
			k->w->next_mem = k->mems[i];
			return;
		}
	}
}

static void remember(struct walk *k, uint32_t op)
{
	unsigned i = k->mem_count < 64 ? k->mem_count++ : below(k, 64);
	k->mems[i] = k->w->ops[op].mem;
	k->mem_end[i] = k->w->ops[op].end;
	k->mem_flow[i] = k->w->ops[op].flow;
	k->w->next_mem = DQ_NONE;
}

static void on_done(struct vp *w, struct vp_op *op)
{
	struct walk *k = w->user;
	(void)k;
	/* Data of a flow is told in the order of its tag: what is received is checked by contents; see vc_pair.c. */
	if (op->status != DQ_OK)
		assert_true(op->status < 0 && op->status >= DQ_ERR_INTERNAL && op->status != DQ_ERR_INTERNAL);
}

/* Takes objects until only `leave` more can be had. */
static void hog(struct walk *k, struct dq_slab *s, uint32_t leave)
{
	uint32_t first = DQ_NONE;
	s->limit = s->capacity;
	while (s->capacity - s->used > leave) {
		uint32_t i = dq_slab_alloc(s);
		memcpy(dq_slab_at(s, i), &first, sizeof first); /* a chain */
		first = i;
	}
	k->hogged[k->hogs] = s;
	k->hogged_from[k->hogs++] = first;
}

static void unhog(struct walk *k)
{
	for (unsigned h = 0; h < k->hogs; h++) {
		for (uint32_t i = k->hogged_from[h], next; i != DQ_NONE; i = next) {
			memcpy(&next, dq_slab_at(k->hogged[h], i), sizeof next);
			dq_slab_free(k->hogged[h], i);
		}
	}
}

static void act(struct walk *k)
{
	struct vp *w = k->w;
	uint32_t end, flow, op;
	switch (below(k, 24)) {
	case 0: {
		uint32_t e = below(k, w->end_count);
		if (w->ends[e]->up)
			vp_open(w, e, 1 + below(k, 3), 10 + below(k, 3));
		return;
	}
	case 1:
		if (k->may_close && below(k, 3) == 0 && pick(k, &end, &flow))
			vp_close(w, end, flow, below(k, 2) ? DQ_ERR_CLOSED : DQ_ERR_PEER_GONE);
		return;
	case 2:
		if (k->may_close && below(k, 4) == 0) { /* one that is being opened, or has not been answered */
			uint32_t e = below(k, w->end_count);
			for (uint32_t f = 0; f < w->ends[e]->flow_room; f++) {
				struct vp_flow *x = &w->ends[e]->flows[f];
				if ((x->state == VP_FLOW_OPENING || x->state == VP_FLOW_INCOMING) && !x->closed) {
					vp_close(w, e, f, DQ_ERR_CLOSED);
					return;
				}
			}
		}
		return;
	case 3: /* answer a FLOW_OPEN */
		for (uint32_t e = 0; e < w->end_count; e++) {
			for (uint32_t f = 0; f < w->ends[e]->flow_room; f++) {
				struct vp_flow *x = &w->ends[e]->flows[f];
				if (x->state != VP_FLOW_INCOMING || x->closed || below(k, 2))
					continue;
				if (below(k, 4)) {
					assert_int_equal(dq_vc_flow_accept(&w->ends[e]->vc, f, x->client), 0);
					x->state = VP_FLOW_OPEN;
				} else {
					dq_vc_flow_refuse(&w->ends[e]->vc, f, DQ_ERR_REFUSED);
					x->state = VP_FLOW_GONE;
				}
				vp_kick(w, e);
				return;
			}
		}
		return;
	case 4: case 5: case 6:
		if (pick(k, &end, &flow)) {
			memory(k, end, flow, false);
			if (w->next_mem != DQ_NONE) /* shared: the bytes would be overwritten, so they are sent as nobody's */
				w->next_mem = DQ_NONE;
			remember(k, vp_send(w, end, flow, below(k, 3), size(k)));
		}
		return;
	case 7: case 8: case 9: case 10:
		if (pick(k, &end, &flow))
			remember(k, vp_recv(w, end, flow, below(k, 3), size(k)));
		return;
	case 11:
		if (k->region_count < MAX_REGIONS && pick(k, &end, &flow)) {
			op = vp_export(w, end, flow, CELL * CELLS);
			remember(k, op);
			k->regions[k->region_count++] = (struct region){ .op = op, .end = end, .flow = flow };
		}
		return;
	case 12:
		if (k->region_count && below(k, 3) == 0) {
			struct region *r = &k->regions[below(k, k->region_count)];
			struct vp_flow *x = vp_flow(w, r->end, r->flow);
			if (w->ops[r->op].done && w->ops[r->op].status == DQ_OK && x->state == VP_FLOW_OPEN && !x->closed)
				vp_unexport(w, r->end, r->flow, w->ops[r->op].region);
		}
		return;
	case 13: case 14: case 15:
		if (k->region_count) {
			struct region *r = &k->regions[below(k, k->region_count)];
			uint32_t peer = w->ends[r->end]->peer, cell = below(k, CELLS), bytes = below(k, CELL + 1);
			struct vp_flow *x = vp_flow(w, r->end, r->flow);
			if (!w->ops[r->op].done || w->ops[r->op].status != DQ_OK || x->state != VP_FLOW_OPEN)
				return;
			x = vp_flow(w, peer, x->peer);
			/* The ids may belong to somebody else by now; then this is a put of that one, maybe into nothing. */
			if (x->state != VP_FLOW_OPEN || x->closed || x->peer != r->flow || (r->busy >> cell & 1))
				return;
			if (!w->hosts[w->ops[r->op].host].mems[w->ops[r->op].mem].refs) {
				/* Withdrawn. If another region has its number now, that one's cells would be used twice. */
				for (unsigned i = 0; i < k->region_count; i++) {
					struct vp_op *other = &w->ops[k->regions[i].op];
					if (&k->regions[i] != r && k->regions[i].end == r->end && other->region == w->ops[r->op].region)
						return;
				}
			}
			r->busy |= 1u << cell;
			w->put_target = DQ_NONE;
			if (w->hosts[w->ops[r->op].host].mems[w->ops[r->op].mem].refs)
				w->put_target = r->op;
			remember(k, vp_put(w, peer, vp_flow(w, r->end, r->flow)->peer, w->ops[r->op].region, cell * CELL, bytes));
			w->put_target = DQ_NONE;
		}
		return;
	case 16: case 17:
		if (pick(k, &end, &flow))
			vp_notify(w, end, flow);
		return;
	case 18:
		if (k->may_cancel && k->mem_count && below(k, 2)) {
			unsigned i = below(k, k->mem_count);
			struct vp_flow *x = vp_flow(w, k->mem_end[i], k->mem_flow[i]);
			if (x->state == VP_FLOW_OPEN && w->ends[k->mem_end[i]]->up)
				vp_cancel_mem(w, k->mem_end[i], k->mem_flow[i], k->mems[i]);
		}
		return;
	case 19:
		if (k->may_fail && below(k, 60) == 0)
			vp_fail(w, below(k, w->end_count), DQ_ERR_UNREACHABLE);
		return;
	case 20: { /* a profile changes */
		uint32_t e = below(k, w->end_count);
		struct dq_window_profile p = w->ends[e]->config.profile;
		bool stalled;
		if (!w->ends[e]->up || below(k, 4))
			return;
		p.segment_bytes >>= below(k, 3);
		p.window_bytes = p.segment_bytes * (1ull + below(k, 32));
		vp_profile(w, e, &p, 1 + below(k, 8), 1 + below(k, 8), below(k, 2));
		if (w->ends[e]->up)
			assert_int_equal(dq_vc_check(&w->ends[e]->vc, w->now_ns, &stalled), 0);
		return;
	}
	case 21: /* a slab has no more than a few objects left */
		if (k->short_of_memory && k->hogs < 64 && below(k, 10) == 0) {
			struct dq_pools *p = &w->hosts[below(k, 2)].pools;
			struct dq_slab *all[] = { &p->flows, &p->messages, &p->rtrs, &p->regions }, *s = all[below(k, 4)];
			hog(k, s, below(k, 20));
		}
		return;
	default:
		for (uint32_t n = below(k, 60); n && vp_step(w); n--)
			;
	}
}

static void walk(uint64_t seed, bool may_close, bool may_cancel, bool may_fail, bool short_of_memory)
{
	struct walk k = { .prng = seed * 2654435761u + may_close + 2 * may_cancel + 4 * may_fail, .may_fail = may_fail,
			  .may_cancel = may_cancel, .may_close = may_close, .short_of_memory = short_of_memory };
	struct vp_config c = vp_config_default();
	uint32_t pairs = 1 + below(&k, 2), steps = 200 + below(&k, 1200);
	uint64_t scale = 1ull << below(&k, 18);

	c.link = (struct vp_link){ .delay_ns = 1 + below(&k, 3000) * scale / 64, .jitter_ns = below(&k, 3000) * scale / 64,
				   .rate_bps = below(&k, 2) ? 0 : 10000000000ull, .control_ns = 1 + below(&k, 3000) * scale / 64,
				   .poll_ns = below(&k, 3000) * scale / 64 };
	c.qps = 1 + below(&k, 8);
	c.depth = 1 + below(&k, 6);
	c.outstanding = 1 + below(&k, 6);
	c.credits = 4 + below(&k, 12);
	c.control_buffers = below(&k, 2) * (1 + below(&k, 3));
	c.slot_share = 1 + below(&k, 6);
	c.grants = below(&k, 2);
	c.profile.segment_bytes = 128u << below(&k, 6);
	c.profile.floor_bytes = c.profile.segment_bytes;
	c.profile.window_bytes = c.profile.segment_bytes * (1 + below(&k, 40));
	c.profile.base_rtt_ns = 2 * c.link.delay_ns;
	c.profile.adapt = below(&k, 2);
	c.cancel_deadline_ns = 4 * (c.link.delay_ns + c.link.jitter_ns + c.link.control_ns + c.link.poll_ns) + 100000000;
	k.w = vp_new(seed);
	k.w->user = &k;
	k.w->on_done = on_done;
	k.w->may_lack_memory = short_of_memory;
	vp_host(k.w, 0, 0);
	vp_host(k.w, 0, 0);
	for (uint32_t i = 0; i < pairs; i++)
		vp_pair(k.w, 0, 1, &c);
	k.w->manual_accept = below(&k, 4) == 0;
	for (uint32_t i = 0; i < steps; i++)
		act(&k);
	k.w->manual_accept = false;
	if (below(&k, 2))
		vp_settle(k.w);
	vp_close_all(k.w);
	unhog(&k);
	vp_check_clean(k.w);
	vp_free(k.w);
}

static void seeds(bool may_close, bool may_cancel, bool may_fail, bool short_of_memory)
{
	const char *one = getenv("VC_SEED"), *many = getenv("VC_SEEDS");
	uint64_t n = many ? strtoull(many, NULL, 10) : 200;
	if (one) {
		walk(strtoull(one, NULL, 10), may_close, may_cancel, may_fail, short_of_memory);
		return;
	}
	for (uint64_t s = 1; s <= n; s++) {
		if (getenv("VC_VERBOSE"))
			print_message("seed %llu\n", (unsigned long long)s);
		walk(s, may_close, may_cancel, may_fail, short_of_memory);
	}
}

static void test_messages(void **state) { (void)state; seeds(false, false, false, false); }
static void test_closing(void **state) { (void)state; seeds(true, false, false, false); }
static void test_canceling(void **state) { (void)state; seeds(false, true, false, false); }
static void test_closing_and_canceling(void **state) { (void)state; seeds(true, true, false, false); }
static void test_failing(void **state) { (void)state; seeds(true, true, true, false); }
static void test_short_of_memory(void **state) { (void)state; seeds(true, true, false, true); }

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_messages),
		cmocka_unit_test(test_closing),
		cmocka_unit_test(test_canceling),
		cmocka_unit_test(test_closing_and_canceling),
		cmocka_unit_test(test_failing),
		cmocka_unit_test(test_short_of_memory),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
