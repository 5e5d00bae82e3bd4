/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Queue pairs that are made, used, fenced and destroyed in any order, held against a model of what provider.h promises. Over
 * whichever provider and devices the environment names (transport_env.h), from a seed that is printed.
 */
#include "transport_pair.h"

#define PAIRS 4u
#define CELLS 32u                      /* writes of one QP that are not yet told at both ends */
#define CELL (HALF / PAIRS / CELLS)
#define LIVES 8192u

/* One QP from its making on. Kept when it is destroyed, so that what comes late is known for what it is. */
struct life {
	struct side *side;
	struct dq_qp *qp;              /* NULL: destroyed */
	struct life *peer;
	uint32_t place;                /* which of PAIRS, so which cells it writes to */
	uint32_t depth;
	uint32_t posted, done, good;   /* writes; told; told as done */
	uint32_t segments;             /* told */
	bool connected, fenced, failed, flushed;
	struct { uint32_t from, len; } flight[CELLS];
};

struct world {
	struct pair t;
	struct life *lives;
	uint32_t used;
	struct life *now[PAIRS][2];
	uint64_t seed;
	struct { unsigned made, writes, segments, fenced, lost, destroyed; } seen;
};

static bool disturbed(const struct life *l)
{
	return l->fenced || !l->qp;
}

static void life_begin(struct world *w, uint32_t place)
{
	struct life *ends[2];
	const uint32_t depth = 1 + prng_below(&w->seed, CELLS / 2);

	assert_true(w->used + 2 <= LIVES);
	for (int end = 0; end < 2; end++) {
		struct life *l = ends[end] = w->now[place][end] = &w->lives[w->used++];
		l->side = side_of(&w->t, end);
		l->place = place;
		l->depth = depth;
		l->qp = qp_make(l->side, DQ_QP_DATA, depth, NULL, l);
	}
	ends[0]->peer = ends[1];
	ends[1]->peer = ends[0];
	const int dial = (int)prng_below(&w->seed, 2);
	qp_join(ends[dial]->side, ends[dial]->qp, ends[!dial]->side, ends[!dial]->qp);
	w->seen.made += 2;
}

static void life_write(struct world *w, struct life *l)
{
	struct dq_write wr[6];
	unsigned n = 0;
	const unsigned wanted = 1 + prng_below(&w->seed, 6);
	const struct side *to = l->peer->side;

	/* A cell is written again when both ends have told of the write before. */
	for (; n < wanted && l->posted + n - DQ_MIN(l->done, l->peer->segments) < CELLS; n++) {
		const uint32_t seq = l->posted + n, cell = seq % CELLS;
		const uint32_t len = prng_below(&w->seed, 4) ? prng_below(&w->seed, CELL + 1) : 0, from = prng_below(&w->seed, HALF - CELL);
		l->flight[cell].from = from;
		l->flight[cell].len = len;
		wr[n] = (struct dq_write){.wr_id = seq, .mem = l->side->mem, .offset = from, .len = len, .imm = seq, .remote_key = to->key.key,
					  .remote_addr = to->key.addr + HALF + (l->place * CELLS + cell) * CELL};
	}
	const int rc = l->side->p->post_write(l->qp, wr, n);
	if (l->failed || l->fenced) {
		assert_int_equal(rc, -EIO);
	} else if (!l->connected) {
		assert_true(rc == -ENOTCONN || rc >= 0 || rc == -EIO); /* connected, and not yet polled */
	} else if (rc == -EIO) {
		assert_true(disturbed(l->peer)); /* failed, and not yet polled */
	} else {
		assert_true(rc >= 0 && (unsigned)rc <= n);
		/* The fault provider has taken completions before it tells them. */
		assert_true(l->posted + (uint32_t)rc - l->done <= l->depth || strncmp(transport_provider(), "fault:", 6) == 0);
	}
	if (rc > 0) {
		l->posted += (uint32_t)rc;
		w->seen.writes += (unsigned)rc;
	}
}

static void life_end(struct world *w, struct life *l)
{
	l->side->p->qp_destroy(l->qp);
	l->qp = NULL;
	w->seen.destroyed++;
}

static void told_write(struct life *l, const struct dq_wc *wc)
{
	assert_int_equal(wc->wr_id, l->done);
	assert_true(l->done < l->posted);
	assert_int_equal(wc->len, l->flight[l->done % CELLS].len);
	l->done++;
	if (wc->status != DQ_WC_SUCCESS) {
		assert_true(l->fenced || disturbed(l->peer));
		l->flushed = true;
		return;
	}
	assert_false(l->flushed);
	l->good++;
	/* Who was told that its QP ended was told of all that came before. */
	if (l->peer->failed)
		assert_true(l->good <= l->peer->segments);
}

static void told_segment(struct life *l, const struct dq_wc *wc)
{
	const struct life *from = l->peer;
	const uint32_t cell = l->segments % CELLS;

	assert_int_equal(wc->status, DQ_WC_SUCCESS);
	assert_int_equal(wc->imm, l->segments);
	assert_true(l->segments < from->posted);
	assert_int_equal(wc->len, from->flight[cell].len);
	assert_memory_equal(l->side->bytes + HALF + (l->place * CELLS + cell) * CELL, from->side->bytes + from->flight[cell].from, wc->len);
	l->segments++;
}

static void told(struct world *w, struct side *s, const struct dq_wc *wc)
{
	struct life *l = wc->ctx;

	assert_true(l >= w->lives && l < w->lives + w->used);
	assert_ptr_equal(l->side, s);
	assert_non_null(l->qp);                /* nothing of a QP that is destroyed */
	assert_false(l->failed);               /* nothing after its end */
	assert_true(wc->time_ns <= clock_ns());
	switch ((enum dq_wc_op)wc->op) {
	case DQ_WC_CONNECTED:
		assert_false(l->connected);
		assert_int_equal(wc->status, DQ_WC_SUCCESS);
		l->connected = true;
		break;
	case DQ_WC_WRITE:
		assert_true(l->connected);
		told_write(l, wc);
		break;
	case DQ_WC_SEGMENT:
		assert_true(l->connected);
		told_segment(l, wc);
		w->seen.segments++;
		break;
	case DQ_WC_FAILED:
		assert_int_equal(l->done, l->posted); /* first of all its work */
		if (!l->fenced) { /* never for no reason */
			assert_true(disturbed(l->peer));
			assert_true(wc->status == DQ_WC_REMOTE_GONE || wc->status == DQ_WC_TIMEOUT);
			w->seen.lost++;
		}
		assert_true(l->peer->good <= l->segments);
		l->failed = true;
		break;
	default:
		fail_msg("a completion of kind %u", wc->op);
	}
}

static unsigned world_poll(struct world *w)
{
	unsigned total = 0;

	for (int end = 0; end < 2; end++) {
		struct side *s = side_of(&w->t, end);
		struct dq_wc wc[16];
		const int n = s->p->poll(s->dev, wc, prng_below(&w->seed, 17));
		assert_true(n >= 0 && n <= 16);
		for (int i = 0; i < n; i++)
			told(w, s, &wc[i]);
		total += (unsigned)n;
	}
	return total;
}

static void step(struct world *w)
{
	const uint32_t place = prng_below(&w->seed, PAIRS), what = prng_below(&w->seed, 100);
	struct life *l = w->now[place][prng_below(&w->seed, 2)];

	if (!l || (!l->qp && !l->peer->qp)) {
		life_begin(w, place);
	} else if (what < 70) {
		if (l->qp)
			life_write(w, l);
	} else if (what < 74) {
		if (l->qp) {
			w->seen.fenced += !l->failed && !l->fenced;
			l->side->p->qp_fence(l->qp);
			l->fenced = true;
		}
	} else if (what < 78) {
		if (l->qp)
			life_end(w, l);
	} else if (what < 80) {
		if (l->qp && (l->failed || disturbed(l->peer)))
			life_end(w, l);
	} else {
		for (uint32_t rounds = prng_below(&w->seed, 12); rounds; rounds--)
			if (world_poll(w) == 0 && prng_below(&w->seed, 8) == 0)
				pair_rest(&w->t);
	}
	world_poll(w);
}

static void test_lives(void **state)
{
	enum { STEPS = 6000 };
	static struct world w;

	(void)state;
	memset(&w, 0, sizeof w);
	w.seed = transport_seed();
	w.lives = calloc(LIVES, sizeof *w.lives);
	assert_non_null(w.lives);
	pair_open(&w.t);
	fill(w.t.a.bytes, HALF, w.seed);
	fill(w.t.b.bytes, HALF, ~w.seed);
	for (int i = 0; i < STEPS && w.used + 2 <= LIVES; i++)
		step(&w);
	/* The end: all are fenced, all are told. */
	const uint64_t guard = clock_ns() + PATIENCE_NS;
	for (uint32_t i = 0; i < w.used; i++) {
		struct life *l = &w.lives[i];
		if (!l->qp)
			continue;
		l->side->p->qp_fence(l->qp);
		l->fenced = true;
		while (!l->failed) {
			if (world_poll(&w) == 0)
				pair_rest(&w.t);
			assert_true(clock_ns() < guard);
		}
		life_end(&w, l);
	}
	for (int i = 0; i < 50; i++)
		world_poll(&w);
	print_message("%u QPs, %u writes, %u segments, %u fenced, %u whose peer was lost\n", w.seen.made, w.seen.writes, w.seen.segments,
		      w.seen.fenced, w.seen.lost);
	assert_true(w.seen.made > 50 && w.seen.segments > 200 && w.seen.fenced > 10);
	assert_true(!transport_is("tcp") || w.seen.lost > 10); /* elsewhere it takes a while */
	pair_close(&w.t);
	free(w.lives);
}

int main(void)
{
	const int unfit = transport_env_check();
	if (unfit)
		return unfit;
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_lives),
	};
	return cmocka_run_group_tests_name("transport random", tests, NULL, NULL);
}
