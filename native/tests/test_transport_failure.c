/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What provider.h promises when things go wrong, over whichever provider and devices the environment names (transport_env.h):
 * nobody there, hostile endpoints, what a peer may not do, fences, and QPs that end with work under way.
 */
#include "transport_pair.h"

static uint64_t random_seed; /* of the tests that draw another seed each time */

/* ---- connecting ---- */

/* Nobody is there, or nobody who was told: it fails in the end, and what was posted comes back. */
static void test_nobody_there(void **state)
{
	struct pair t;
	struct dq_endpoint e;
	struct dq_error err = {0};

	(void)state;
	pair_open(&t);
	struct dq_qp *there = qp_make(&t.b, DQ_QP_CONTROL, 4, NULL, NULL), *dialing = qp_make(&t.a, DQ_QP_CONTROL, 4, NULL, NULL);
	t.b.p->qp_endpoint(there, &e);
	t.b.p->qp_destroy(there);
	const struct dq_recv rv[3] = {{.wr_id = 7, .mem = t.a.mem, .len = 64}, {.wr_id = 8, .mem = t.a.mem, .len = 64}, {.wr_id = 9, .len = 0}};
	assert_int_equal(t.a.p->post_recv(dialing, rv, 3), 3);
	assert_int_equal(t.a.p->qp_connect(dialing, &e, true, &err), 0);
	/* Where connecting needs no answer, the first send finds out. */
	PUMP_UNTIL(&t, t.a.logged > 0);
	if (count(&t.a, DQ_WC_CONNECTED, NULL) == 1) {
		assert_int_equal(t.a.logged, 1);
		forget_log(&t);
		expect_peer_lost(&t, &t.a, DQ_QP_CONTROL, dialing, NULL);
		assert_int_equal(count(&t.a, DQ_WC_SEND, NULL), 1);
		assert_int_not_equal(find(&t.a, DQ_WC_SEND, 0)->status, DQ_WC_SUCCESS);
	}
	PUMP_UNTIL(&t, count(&t.a, DQ_WC_FAILED, NULL) == 1);
	assert_int_equal(count(&t.a, DQ_WC_RECV, NULL), 3);
	for (unsigned i = 0; i < 3; i++) {
		assert_int_equal(find(&t.a, DQ_WC_RECV, i)->wr_id, 7 + i);
		assert_int_equal(find(&t.a, DQ_WC_RECV, i)->status, DQ_WC_FLUSHED);
	}
	assert_int_equal(t.a.log[t.a.logged - 1].op, DQ_WC_FAILED);
	t.a.p->qp_destroy(dialing);
	pair_close(&t);
}

/* A QP that was given a hostile endpoint may fail, or wait for ever; nothing else may happen, and it can be ended. */
static void connect_hostile(struct pair *t, const struct dq_endpoint *e, bool dial)
{
	struct dq_error err = {0};
	struct dq_qp *qp = qp_make(&t->a, DQ_QP_DATA, 4, NULL, NULL);

	forget_log(t);
	const int rc = t->a.p->qp_connect(qp, e, dial, &err);
	assert_true(rc <= 0);
	if (rc) {
		assert_int_equal(err.code, rc);
		assert_true(err.text[0] != 0 && memchr(err.text, 0, sizeof err.text));
		assert_int_equal(side_poll(&t->a), 0);
		assert_int_equal(t->a.p->post_write(qp, &(struct dq_write){.wr_id = 1}, 1), -ENOTCONN); /* as it was before */
	} else {
		pair_poll(t);
		t->a.p->qp_fence(qp);
		PUMP_UNTIL(t, count(&t->a, DQ_WC_FAILED, NULL) == 1);
		assert_int_equal(t->a.log[t->a.logged - 1].op, DQ_WC_FAILED);
	}
	t->a.p->qp_destroy(qp);
	assert_int_equal(side_poll(&t->a), 0);
}

static void test_hostile_endpoints(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb, *there;
	struct dq_endpoint valid, e;
	uint64_t seed = random_seed;

	(void)state;
	pair_open(&t);
	there = qp_make(&t.b, DQ_QP_DATA, 4, NULL, NULL);
	t.b.p->qp_endpoint(there, &valid);
	/* Every wrong length, also one that claims more than there is. */
	for (unsigned len = 0; len <= DQ_ENDPOINT_MAX + 2; len++) {
		e = valid;
		e.len = (uint16_t)len;
		if (len != valid.len)
			connect_hostile(&t, &e, len % 2);
	}
	e.len = UINT16_MAX;
	connect_hostile(&t, &e, true);
	/* Noise of the right length, and of any. */
	for (int i = 0; i < 200; i++) {
		e.len = i % 2 ? valid.len : (uint16_t)prng_below(&seed, DQ_ENDPOINT_MAX + 1);
		for (unsigned k = 0; k < DQ_ENDPOINT_MAX; k++)
			e.data[k] = (uint8_t)prng_next(&seed);
		connect_hostile(&t, &e, i % 3 == 0);
	}
	/* Valid but for a few bits: the end that waits only compares, so most are accepted and lead nowhere. */
	const int mutants = transport_is("tcp") ? 200 : 40; /* each address that is of nobody costs the kernel a second to look for */
	for (int i = 0; i < mutants; i++) {
		e = valid;
		for (unsigned k = 1 + prng_below(&seed, 3); k; k--)
			e.data[prng_below(&seed, valid.len)] ^= (uint8_t)(1u << prng_below(&seed, 8));
		connect_hostile(&t, &e, false);
	}
	/* A datagram endpoint is no QP. */
	struct dq_dgram *dg;
	struct dq_error err = {0};
	assert_int_equal(t.b.p->dgram_open(t.b.dev, &dg, &err), 0);
	t.b.p->dgram_endpoint(dg, &e);
	qa = qp_make(&t.a, DQ_QP_DATA, 4, NULL, NULL);
	assert_true(t.a.p->qp_connect(qa, &e, true, &err) < 0);
	assert_true(t.a.p->qp_connect(qa, &e, false, &err) < 0);
	t.b.p->dgram_close(dg);
	/* After all that it still connects, and so does everything else. */
	pair_join(&t, qa, there);
	exchange(&t, qa, there, 3000, 0);
	qp_pair_destroy(&t, qa, there);
	qp_pair(&t, DQ_QP_DATA, 4, NULL, NULL, &qa, &qb);
	exchange(&t, qa, qb, 3000, 0);
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

/* ---- control ---- */

/* A control QP with nothing to do finds out by itself that its peer is gone, some heartbeats later. */
static void test_idle_control_finds_lost_peer(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;
	int mark;

	(void)state;
	for (int destroyed = 0; destroyed < 2; destroyed++) {
		side_open(&t.a, transport_provider(), "a", transport_address(0), 50000000, 0);
		side_open(&t.b, transport_provider(), "b", transport_address(1), 50000000, 0);
		qp_pair_marked(&t, DQ_QP_CONTROL, 4, &mark, &qa, &qb);
		forget_log(&t);
		if (destroyed)
			t.b.p->qp_destroy(qb);
		else
			t.b.p->qp_fence(qb);
		PUMP_UNTIL(&t, count(&t.a, DQ_WC_FAILED, &mark) == 1);
		assert_int_equal(t.a.logged, 1);
		assert_true(t.a.log[0].status == DQ_WC_REMOTE_GONE || t.a.log[0].status == DQ_WC_TIMEOUT);
		t.a.p->qp_destroy(qa);
		if (!destroyed)
			t.b.p->qp_destroy(qb);
		pair_close(&t);
	}
}

/* No receive is there, or none that is long enough: the sender's QP fails and says so, nothing is written past a receive. */
static void test_send_without_receive(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;
	const struct dq_send sd = {.wr_id = 3, .len = 0};

	(void)state;
	/* Where a receiver may be late, it is the deadline that ends the waiting. */
	side_open(&t.a, transport_provider(), "a", transport_address(0), 0, 1000000000);
	side_open(&t.b, transport_provider(), "b", transport_address(1), 0, 1000000000);
	for (int round = 0; round < 2; round++) {
		qp_pair(&t, DQ_QP_CONTROL, 4, NULL, NULL, &qa, &qb);
		forget_log(&t);
		memset(t.a.bytes, 0x77, 4096);
		memset(t.b.bytes, 0, 4096);
		if (round == 0) {
			assert_int_equal(t.a.p->post_send(qa, &sd, 1), 1);
		} else {
			const struct dq_recv rv = {.wr_id = 1, .mem = t.b.mem, .len = 99};
			const struct dq_send big = {.wr_id = 3, .mem = t.a.mem, .len = 100};
			assert_int_equal(t.b.p->post_recv(qb, &rv, 1), 1);
			assert_int_equal(t.a.p->post_send(qa, &big, 1), 1);
		}
		PUMP_UNTIL(&t, count(&t.a, DQ_WC_FAILED, NULL) == 1);
		const uint8_t status = find(&t.a, DQ_WC_FAILED, 0)->status;
		if (round == 0)
			assert_true(status == DQ_WC_PROTOCOL || status == DQ_WC_NOT_READY || status == DQ_WC_TIMEOUT);
		else
			assert_int_equal(status, DQ_WC_PROTOCOL);
		assert_int_not_equal(find(&t.a, DQ_WC_SEND, 0)->status, DQ_WC_SUCCESS);
		assert_int_equal(t.a.logged, 2);
		pump_rounds(&t, 20);
		for (uint32_t i = 0; i < t.b.logged; i++)
			assert_int_not_equal(t.b.log[i].status, DQ_WC_SUCCESS);
		if (round == 1) { /* the other end knows as well whose fault it was */
			PUMP_UNTIL(&t, count(&t.b, DQ_WC_FAILED, NULL) == 1);
			assert_int_equal(find(&t.b, DQ_WC_FAILED, 0)->status, DQ_WC_PROTOCOL);
		}
		for (unsigned k = 99; k < 4096; k++)
			assert_int_equal(t.b.bytes[k], 0);
		qp_pair_destroy(&t, qa, qb);
	}
	pair_close(&t);
}

/* ---- access ---- */

/* A write the peer may not do: it fails as such, those before it succeed, those after it are flushed, no byte is written. */
static void refuse_write(struct pair *t, struct dq_write bad)
{
	struct dq_qp *qa, *qb;
	int mark;

	qp_pair_marked(t, DQ_QP_DATA, 8, &mark, &qa, &qb);
	forget_log(t);
	memset(t->a.bytes, 0x11, MEMORY_BYTES);
	memset(t->b.bytes, 0x22, MEMORY_BYTES);
	struct dq_write wr[4] = {write_of(&t->a, &t->b, 0, 512, 64), bad, write_of(&t->a, &t->b, 2, 1024, 64), write_of(&t->a, &t->b, 3, 2048, 64)};
	wr[1].wr_id = 1;
	assert_int_equal(t->a.p->post_write(qa, wr, 4), 4);
	PUMP_UNTIL(t, count(&t->a, DQ_WC_FAILED, &mark) == 1);
	assert_int_equal(t->a.logged, 5);
	static const uint8_t expected[5] = {DQ_WC_SUCCESS, DQ_WC_REMOTE_ACCESS, DQ_WC_FLUSHED, DQ_WC_FLUSHED, DQ_WC_REMOTE_ACCESS};
	for (unsigned i = 0; i < 5; i++) {
		assert_int_equal(t->a.log[i].status, expected[i]);
		assert_int_equal(t->a.log[i].op, i == 4 ? DQ_WC_FAILED : DQ_WC_WRITE);
		if (i < 4)
			assert_int_equal(t->a.log[i].wr_id, i);
	}
	assert_int_equal(t->a.p->post_write(qa, wr, 1), -EIO);
	/* The QP at the other end is of no use either; it says why where the transport tells it. */
	pump_rounds(t, 20);
	if (count(&t->b, DQ_WC_FAILED, &mark) == 0) {
		const int rc = post_nothing(&t->b, DQ_QP_DATA, qb);
		assert_true(rc == 1 || rc == -EIO);
	}
	PUMP_UNTIL(t, count(&t->b, DQ_WC_FAILED, &mark) == 1);
	if (transport_is("tcp"))
		assert_int_equal(find(&t->b, DQ_WC_FAILED, 0)->status, DQ_WC_REMOTE_ACCESS);
	unsigned segments = 0;
	for (uint32_t i = 0; i < t->b.logged; i++)
		segments += t->b.log[i].op == DQ_WC_SEGMENT && t->b.log[i].status == DQ_WC_SUCCESS;
	assert_int_equal(segments, 1);
	for (uint32_t i = 0; i < MEMORY_BYTES; i++)
		if (t->b.bytes[i] != (i >= 512 && i < 576 ? 0x11 : 0x22))
			fail_msg("byte %u was written", i);
	qp_pair_destroy(t, qa, qb);
}

static void test_access_violations(void **state)
{
	struct pair t;
	struct dq_mem *other;
	struct dq_mem_key key;
	struct dq_error err = {0};
	static uint8_t small[4096];
	struct dq_mem_desc desc = {.addr = small, .len = sizeof small, .dmabuf_fd = -1};

	(void)state;
	pair_open(&t);
	for (uint32_t len = 64; len <= 65536; len *= 1024) { /* of one packet and of many */
		struct dq_write bad = write_of(&t.a, &t.b, 1, 0, len);
		bad.remote_key ^= 1;
		refuse_write(&t, bad);                           /* wrong key */
		bad.remote_key = UINT64_MAX;
		refuse_write(&t, bad);
		bad.remote_key = 0;
		refuse_write(&t, bad);
		bad = write_of(&t.a, &t.b, 1, 0, len + 1);
		bad.remote_addr = t.b.key.addr + MEMORY_BYTES - len;
		refuse_write(&t, bad);                           /* one byte too far */
		bad.remote_addr = t.b.key.addr + MEMORY_BYTES + 1;
		bad.len = len;
		refuse_write(&t, bad);                           /* behind the end */
		bad.remote_addr = t.b.key.addr - 1;
		refuse_write(&t, bad);                           /* before the beginning */
		bad.remote_addr = UINT64_MAX - 10;
		refuse_write(&t, bad);                           /* sum wraps */
	}
	assert_int_equal(t.b.p->mem_register(t.b.dev, &desc, &other, &err), 0);
	assert_int_equal(t.b.p->mem_key(other, 0, 64, &key), 0);
	struct dq_write bad = write_of(&t.a, &t.b, 1, 0, 64);
	bad.remote_addr = key.addr;
	bad.remote_key = key.key;
	refuse_write(&t, bad);                                   /* no remote write */
	t.b.p->mem_deregister(other);
	desc.access = DQ_ACCESS_REMOTE_WRITE;
	assert_int_equal(t.b.p->mem_register(t.b.dev, &desc, &other, &err), 0);
	assert_int_equal(t.b.p->mem_key(other, 0, 64, &key), 0);
	bad.remote_addr = key.addr;
	bad.remote_key = key.key;
	t.b.p->mem_deregister(other);
	refuse_write(&t, bad);                                   /* deregistered */
	for (unsigned i = 0; i < sizeof small; i++)
		assert_int_equal(small[i], 0);
	pair_close(&t);
}

/* ---- fence, destroy ---- */

/* Fenced at any stage of the work: all of it completes, in order, first what was done, then what was not, then the end. */
static void test_fence(void **state)
{
	enum { N = 16 };
	struct pair t;
	struct dq_qp *qa, *qb;
	int mark;

	(void)state;
	pair_open(&t);
	for (int turns = 0; turns < 12; turns++) {
		struct dq_write wr[N];
		qp_pair_marked(&t, DQ_QP_DATA, N, &mark, &qa, &qb);
		forget_log(&t);
		for (unsigned i = 0; i < N; i++)
			wr[i] = write_of(&t.a, &t.b, i, i * 65536, 65536);
		assert_int_equal(t.a.p->post_write(qa, wr, N), N);
		for (int i = 0; i < turns; i++)
			pair_poll(&t);
		t.a.p->qp_fence(qa);
		t.a.p->qp_fence(qa); /* again: nothing */
		assert_int_equal(t.a.p->post_write(qa, wr, 1), -EIO);
		PUMP_UNTIL(&t, count(&t.a, DQ_WC_FAILED, &mark) == 1);
		pump_rounds(&t, 50);
		assert_int_equal(t.a.logged, N + 1);
		unsigned done = 0;
		for (unsigned i = 0; i < N; i++) {
			assert_int_equal(t.a.log[i].op, DQ_WC_WRITE);
			assert_int_equal(t.a.log[i].wr_id, i);
			assert_int_equal(t.a.log[i].status, done == i && t.a.log[i].status == DQ_WC_SUCCESS ? DQ_WC_SUCCESS : DQ_WC_FLUSHED);
			done += t.a.log[i].status == DQ_WC_SUCCESS;
		}
		assert_int_equal(t.a.log[N].op, DQ_WC_FAILED);
		assert_int_equal(t.a.log[N].status, DQ_WC_FLUSHED);
		/* What completed at the sender is complete at the receiver. */
		assert_true(count(&t.b, DQ_WC_SEGMENT, &mark) >= done);
		expect_peer_lost(&t, &t.b, DQ_QP_DATA, qb, &mark);
		qp_pair_destroy(&t, qa, qb);
	}
	pair_close(&t);
}

/* The receiving end fences: once it was told that the QP has ended, no byte of its memory changes and no segment is told any more. */
static void test_fence_stops_incoming(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;
	int mark;

	(void)state;
	pair_open(&t);
	for (int turns = 0; turns < 8; turns++) {
		struct dq_write wr[16];
		qp_pair_marked(&t, DQ_QP_DATA, 16, &mark, &qa, &qb);
		forget_log(&t);
		memset(t.a.bytes, 0x5a, MEMORY_BYTES);
		memset(t.b.bytes, 0, MEMORY_BYTES);
		for (unsigned i = 0; i < 16; i++)
			wr[i] = write_of(&t.a, &t.b, i, i * 65536, 65536);
		assert_int_equal(t.a.p->post_write(qa, wr, 16), 16);
		for (int i = 0; i < turns; i++)
			pair_poll(&t);
		t.b.p->qp_fence(qb);
		const uint64_t guard = clock_ns() + PATIENCE_NS;
		while (count(&t.b, DQ_WC_FAILED, &mark) == 0) {
			side_poll(&t.b);
			assert_true(clock_ns() < guard);
		}
		assert_int_equal(t.b.log[t.b.logged - 1].op, DQ_WC_FAILED);
		const uint32_t told = t.b.logged;
		for (uint32_t i = 0; i + 1 < told; i++) { /* what was told is whole */
			assert_int_equal(t.b.log[i].op, DQ_WC_SEGMENT);
			assert_int_equal(t.b.log[i].imm, i);
			for (uint32_t k = 0; k < 65536; k++)
				assert_int_equal(t.b.bytes[i * 65536 + k], 0x5a);
		}
		memset(t.b.bytes, 0xc3, MEMORY_BYTES);
		expect_peer_lost(&t, &t.a, DQ_QP_DATA, qa, &mark);
		assert_int_equal(t.b.logged, told);
		for (uint32_t i = 0; i < MEMORY_BYTES; i++)
			if (t.b.bytes[i] != 0xc3)
				fail_msg("byte %u was written after the fence", i);
		/* What the receiver was never told of did not complete at the sender, or its segment was among those told. */
		unsigned done = 0;
		for (uint32_t i = 0; i < t.a.logged; i++)
			done += t.a.log[i].op == DQ_WC_WRITE && t.a.log[i].status == DQ_WC_SUCCESS;
		assert_true(done <= told - 1);
		qp_pair_destroy(&t, qa, qb);
	}
	pair_close(&t);
}

/* Fences of QPs in all states: new, with receives, idle, failed already. */
static void test_fence_states(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;
	int mark;

	(void)state;
	pair_open(&t);
	for (int connected = 0; connected < 2; connected++) {
		qa = qp_make(&t.a, DQ_QP_CONTROL, 8, NULL, &mark);
		qb = qp_make(&t.b, DQ_QP_CONTROL, 8, NULL, &mark);
		if (connected)
			pair_join(&t, qa, qb);
		forget_log(&t);
		for (uint64_t i = 0; i < 5; i++) {
			const struct dq_recv rv = {.wr_id = 40 + i, .mem = t.a.mem, .offset = i * 64, .len = 64};
			assert_int_equal(t.a.p->post_recv(qa, &rv, 1), 1);
		}
		t.a.p->qp_fence(qa);
		PUMP_UNTIL(&t, count(&t.a, DQ_WC_FAILED, &mark) == 1);
		assert_int_equal(t.a.logged, 6);
		for (unsigned i = 0; i < 5; i++) {
			assert_int_equal(t.a.log[i].op, DQ_WC_RECV);
			assert_int_equal(t.a.log[i].wr_id, 40 + i);
			assert_int_equal(t.a.log[i].status, DQ_WC_FLUSHED);
		}
		assert_int_equal(t.a.log[5].status, DQ_WC_FLUSHED);
		assert_ptr_equal(t.a.log[5].ctx, &mark);
		t.a.p->qp_fence(qa);
		pump_rounds(&t, 20);
		assert_int_equal(t.a.logged, 6);
		const struct dq_send sd = {.wr_id = 1};
		assert_int_equal(t.a.p->post_send(qa, &sd, 1), -EIO);
		struct dq_endpoint e;
		struct dq_error err = {0};
		t.b.p->qp_endpoint(qb, &e);
		assert_true(t.a.p->qp_connect(qa, &e, true, &err) < 0); /* no second life */
		if (connected) { /* the peer finds out, and a fence of what has failed tells nothing more */
			expect_peer_lost(&t, &t.b, DQ_QP_CONTROL, qb, &mark);
			const uint32_t logged = t.b.logged;
			t.b.p->qp_fence(qb);
			pump_rounds(&t, 20);
			assert_int_equal(t.b.logged, logged);
		}
		qp_pair_destroy(&t, qa, qb);
	}
	pair_close(&t);
}

/* Whether a QP whose peer was destroyed has learned it, or had nothing left to learn it by. */
static bool ended_or_done(const struct side *s, const void *mark, unsigned writes)
{
	unsigned done = 0;

	for (uint32_t i = 0; i < s->logged; i++) {
		const struct dq_wc *wc = &s->log[i];
		if (wc->ctx != mark)
			continue;
		if (wc->op == DQ_WC_FAILED) {
			assert_true(wc->status == DQ_WC_REMOTE_GONE || wc->status == DQ_WC_TIMEOUT);
			return true;
		}
		done += wc->op == DQ_WC_WRITE && wc->status == DQ_WC_SUCCESS;
	}
	return done == writes;
}

/*
 * Destroyed with work under way, at one end, the other, or both, and replaced at once, also by a QP of the same number: nothing
 * of the old ones is told or written any more, and the new ones are not disturbed.
 */
static void test_destroy_under_work(void **state)
{
	enum { N = 8, OLD = 3, ROUNDS = 24 };
	struct pair t;
	int marks[OLD], fresh;

	(void)state;
	pair_open(&t);
	for (int round = 0; round < ROUNDS; round++) {
		const bool at_a = round % 3 != 1, at_b = round % 3 != 0;
		struct dq_qp *old[2][OLD], *qa, *qb;
		struct dq_write wr[N];
		forget_log(&t);
		for (unsigned i = 0; i < N; i++)
			wr[i] = write_of(&t.a, &t.b, i, i * 32768, 32768);
		for (int q = 0; q < OLD; q++) {
			qp_pair_marked(&t, DQ_QP_DATA, N, &marks[q], &old[0][q], &old[1][q]);
			assert_int_equal(t.a.p->post_write(old[0][q], wr, N), N);
		}
		for (int i = 0; i < round / 3; i++)
			pair_poll(&t);
		const uint32_t told[2] = {t.a.logged, t.b.logged};
		for (int q = 0; q < OLD; q++) {
			if (at_a)
				t.a.p->qp_destroy(old[0][q]);
			if (at_b)
				t.b.p->qp_destroy(old[1][q]);
		}
		if (!at_a)
			for (int q = 0; q < OLD; q++)
				PUMP_UNTIL(&t, ended_or_done(&t.a, &marks[q], N));
		memset(t.b.bytes, 0, MEMORY_BYTES);
		qp_pair_marked(&t, DQ_QP_DATA, N, &fresh, &qa, &qb);
		for (int end = 0; end < 2; end++) { /* of a QP that is gone nothing comes */
			const struct side *s = side_of(&t, end);
			for (uint32_t i = told[end]; i < s->logged; i++)
				assert_true(s->log[i].ctx == &fresh || !(end ? at_b : at_a));
		}
		/* What still comes for the peers of those is no business of the new ones. */
		for (int q = 0; q < OLD; q++) {
			if (!at_a)
				t.a.p->qp_destroy(old[0][q]);
			if (!at_b)
				t.b.p->qp_destroy(old[1][q]);
		}
		exchange(&t, qa, qb, 20000, 0);
		qp_pair_destroy(&t, qa, qb);
	}
	pair_close(&t);
}

/* Completions of a destroyed QP are dropped, those of others stay, in order. */
static void test_destroy_drops_completions(void **state)
{
	struct pair t;
	struct dq_qp *qa[2], *qb[2];
	int marks[2];

	(void)state;
	pair_open(&t);
	for (int q = 0; q < 2; q++)
		qp_pair_marked(&t, DQ_QP_DATA, 8, &marks[q], &qa[q], &qb[q]);
	forget_log(&t);
	for (uint64_t i = 0; i < 8; i++)
		for (int q = 0; q < 2; q++) {
			const struct dq_write wr = write_of(&t.a, &t.b, i, i * 64, 64);
			assert_int_equal(t.a.p->post_write(qa[q], &wr, 1), 1);
		}
	for (int i = 0; i < 300; i++) { /* progress of b without taking its completions */
		side_poll(&t.a);
		assert_int_equal(t.b.p->poll(t.b.dev, NULL, 0), 0);
	}
	while (side_poll(&t.b) == 0) /* some are taken, of the others some go and some stay */
		side_poll(&t.a);
	const unsigned before = count(&t.b, DQ_WC_SEGMENT, &marks[0]);
	t.b.p->qp_destroy(qb[0]);
	PUMP_UNTIL(&t, count(&t.b, DQ_WC_SEGMENT, &marks[1]) == 8);
	unsigned next = 0;
	for (uint32_t i = 0; i < t.b.logged; i++)
		if (t.b.log[i].ctx == &marks[1])
			assert_int_equal(t.b.log[i].imm, next++);
	assert_int_equal(count(&t.b, DQ_WC_SEGMENT, &marks[0]), before);
	t.b.p->qp_destroy(NULL); /* nothing */
	t.a.p->qp_destroy(qa[0]);
	qp_pair_destroy(&t, qa[1], qb[1]);
	pair_close(&t);
}

/* QPs come and go, and leave nothing behind that would be used up. */
static void test_churn(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;

	(void)state;
	pair_open(&t);
	for (int i = 0; i < 300; i++) {
		qp_pair(&t, i % 3 ? DQ_QP_DATA : DQ_QP_CONTROL, 16, NULL, NULL, &qa, &qb);
		if (i % 3 == 1)
			exchange(&t, qa, qb, 100, 0);
		qp_pair_destroy(&t, qa, qb);
		forget_log(&t);
	}
	for (int i = 0; i < 300; i++) /* never connected */
		t.a.p->qp_destroy(qp_make(&t.a, DQ_QP_DATA, 16, NULL, NULL));
	pair_close(&t);
}

int main(void)
{
	const int unfit = transport_env_check();
	if (unfit)
		return unfit;
	random_seed = transport_seed();
	qp_ack_timeout_ns = 33000000; /* peers are lost again and again */
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_nobody_there),
		cmocka_unit_test(test_hostile_endpoints),
		cmocka_unit_test(test_idle_control_finds_lost_peer),
		cmocka_unit_test(test_send_without_receive),
		cmocka_unit_test(test_access_violations),
		cmocka_unit_test(test_fence),
		cmocka_unit_test(test_fence_stops_incoming),
		cmocka_unit_test(test_fence_states),
		cmocka_unit_test(test_destroy_under_work),
		cmocka_unit_test(test_destroy_drops_completions),
		cmocka_unit_test(test_churn),
	};
	return cmocka_run_group_tests_name("transport failure", tests, NULL, NULL);
}
