/* SPDX-License-Identifier: Apache-2.0 */
/* Datagram endpoints as provider.h promises them, over whichever provider and devices the environment names (transport_env.h). */
#include "transport_pair.h"

static uint64_t random_seed; /* of the tests that draw another seed each time */

/* ---- datagrams ---- */

/* Clocks of the two ends of a datagram are the same here; what software reads late is late by its noise. */
static uint64_t clock_slack(const struct side *s)
{
	struct dq_device_attr attr;
	s->p->device_query(s->dev, &attr);
	return DQ_MAX(attr.noise_ns, 20000u);
}

static bool known_source(const char *source)
{
	return strcmp(source, "kernel") == 0 || strcmp(source, "completion") == 0 || strcmp(source, "software") == 0;
}

static void dgram_rest(const struct dq_provider *p, struct dq_dgram *da, struct dq_dgram *db)
{
	struct pollfd fds[2] = {{.fd = p->dgram_fd(da), .events = POLLIN}, {.fd = p->dgram_fd(db), .events = POLLIN}};
	poll(fds, 2, 1);
}

static void test_datagrams(void **state)
{
	struct pair t;
	struct dq_dgram *da, *db;
	struct dq_error err = {0};
	struct dq_endpoint at_a, at_b;

	(void)state;
	pair_open(&t);
	const struct dq_provider *p = t.a.p;
	const uint64_t slack = clock_slack(&t.a);
	assert_int_equal(p->dgram_open(t.a.dev, &da, &err), 0);
	assert_int_equal(p->dgram_open(t.b.dev, &db, &err), 0);
	p->dgram_endpoint(da, &at_a);
	p->dgram_endpoint(db, &at_b);
	uint64_t last = 0;
	for (uint64_t id = 1; id <= 200; id++) {
		struct dq_dgram_event ev[8];
		uint64_t sent = 0, received = 0, echoed = 0, back = 0;
		uint8_t text[128], answer[128];
		const uint16_t len = id <= 128 ? (uint16_t)(129 - id) : 1 + (uint16_t)(id % 128); /* all lengths */
		const uint64_t before = clock_ns(), guard = before + PATIENCE_NS;
		fill(text, sizeof text, id);
		fill(answer, sizeof answer, ~id);
		assert_int_equal(p->dgram_send(da, &at_b, (uint32_t)id, NULL, id, text, len), 0);
		while (!sent || !received || !echoed || !back) {
			int n = p->dgram_poll(da, ev, 8);
			for (int i = 0; i < n; i++) {
				if (ev[i].kind == DQ_DGRAM_SENT) {
					assert_int_equal(ev[i].id, id);
					assert_true(sent == 0);
					sent = ev[i].time_ns;
				} else {
					assert_int_equal(ev[i].kind, DQ_DGRAM_RECEIVED);
					assert_int_equal(ev[i].len, sizeof answer);
					assert_memory_equal(ev[i].data, answer, sizeof answer);
					assert_int_equal(ev[i].from.len, at_b.len);
					assert_memory_equal(ev[i].from.data, at_b.data, at_b.len);
					back = ev[i].time_ns;
				}
			}
			int m = p->dgram_poll(db, ev, 8);
			for (int i = 0; i < m; i++) {
				if (ev[i].kind == DQ_DGRAM_RECEIVED) {
					assert_int_equal(ev[i].len, len);
					assert_memory_equal(ev[i].data, text, len);
					/* Its source is known by the very bytes that its owner tells. */
					assert_int_equal(ev[i].from.len, at_a.len);
					assert_memory_equal(ev[i].from.data, at_a.data, at_a.len);
					received = ev[i].time_ns;
					const struct dq_endpoint from = ev[i].from;
					assert_int_equal(p->dgram_send(db, &from, 0, NULL, 1000 + id, answer, sizeof answer), 0);
				} else {
					assert_int_equal(ev[i].kind, DQ_DGRAM_SENT);
					assert_int_equal(ev[i].id, 1000 + id);
					echoed = ev[i].time_ns;
				}
			}
			if (n == 0 && m == 0)
				dgram_rest(p, da, db);
			assert_true(clock_ns() < guard);
		}
		if (strcmp(p->dgram_time_source(da), "completion") != 0) { /* that one is the NIC's own */
			/* One clock, in the order of things. */
			assert_true(before <= sent + slack && sent <= received + slack && received <= echoed + slack && echoed <= back + slack);
			assert_true(back <= clock_ns() + slack);
		}
		assert_true(last <= sent + slack && sent <= back + slack);
		last = back;
	}
	assert_true(known_source(p->dgram_time_source(da)));
	assert_int_equal(p->dgram_send(da, &at_b, 0, NULL, 1, at_b.data, 129), -EMSGSIZE);
	assert_int_equal(p->dgram_send(da, &at_b, 0, NULL, 1, at_b.data, UINT16_MAX), -EMSGSIZE);
	p->dgram_close(da);
	p->dgram_close(db);
	p->dgram_close(NULL);
	pair_close(&t);
}

/* Three that talk at once: each datagram reaches the one it was sent to, from the one that sent it. */
static void test_datagram_identity(void **state)
{
	enum { ROUNDS = 60 };
	struct pair t;
	struct side third;
	struct dq_dgram *dg[3];
	struct dq_endpoint at[3];
	struct dq_error err = {0};
	unsigned got[3] = {0};

	(void)state;
	pair_open(&t);
	side_open(&third, transport_provider(), "c", transport_address(0), 0, 0); /* on the same device as a */
	struct side *sides[3] = {&t.a, &t.b, &third};
	const struct dq_provider *p = t.a.p;
	for (int i = 0; i < 3; i++) {
		assert_int_equal(p->dgram_open(sides[i]->dev, &dg[i], &err), 0);
		p->dgram_endpoint(dg[i], &at[i]);
		for (int k = 0; k < i; k++)
			assert_true(at[i].len != at[k].len || memcmp(at[i].data, at[k].data, at[i].len) != 0);
	}
	for (int round = 0; round < ROUNDS; round++) {
		unsigned wanted = 0;
		for (uint8_t from = 0; from < 3; from++)
			for (uint8_t to = 0; to < 3; to++) {
				const uint8_t data[3] = {from, to, (uint8_t)round};
				if (from != to)
					assert_int_equal(p->dgram_send(dg[from], &at[to], 0, NULL, 1, data, sizeof data), 0);
				wanted += from != to;
			}
		const uint64_t guard = clock_ns() + PATIENCE_NS;
		while (wanted) {
			unsigned polled = 0;
			for (int i = 0; i < 3; i++) {
				struct dq_dgram_event ev[4];
				const int n = p->dgram_poll(dg[i], ev, 4);
				polled += (unsigned)n;
				for (int k = 0; k < n; k++) {
					if (ev[k].kind != DQ_DGRAM_RECEIVED)
						continue;
					assert_int_equal(ev[k].len, 3);
					assert_int_equal(ev[k].data[1], i);
					assert_int_equal(ev[k].data[2], round);
					assert_in_range(ev[k].data[0], 0, 2);
					assert_memory_equal(ev[k].from.data, at[ev[k].data[0]].data, at[0].len);
					got[i]++;
					wanted--;
				}
			}
			if (polled == 0)
				dgram_rest(p, dg[0], dg[1]);
			assert_true(clock_ns() < guard);
		}
	}
	for (int i = 0; i < 3; i++) {
		assert_int_equal(got[i], 2 * ROUNDS);
		p->dgram_close(dg[i]);
	}
	side_close(&third);
	pair_close(&t);
}

/* To nowhere, to what is no datagram endpoint, to noise: refused, told as an error, or lost; what else is sent arrives. */
static void test_datagram_hostile(void **state)
{
	struct pair t;
	struct dq_dgram *da, *db, *gone;
	struct dq_error err = {0};
	struct dq_endpoint at_b, e;
	struct dq_dgram_event ev[8];
	uint64_t seed = random_seed, ended = 0, sent = 0;

	(void)state;
	pair_open(&t);
	const struct dq_provider *p = t.a.p;
	assert_int_equal(p->dgram_open(t.a.dev, &da, &err), 0);
	assert_int_equal(p->dgram_open(t.b.dev, &gone, &err), 0);
	p->dgram_endpoint(gone, &e);
	p->dgram_close(gone);
	assert_int_equal(p->dgram_open(t.b.dev, &db, &err), 0);
	p->dgram_endpoint(db, &at_b);
	if (memcmp(e.data, at_b.data, at_b.len) != 0) {
		assert_int_equal(p->dgram_send(da, &e, 0, NULL, 1, "to nobody", 9), 0);
		sent++;
	}
	struct dq_qp *qp = qp_make(&t.b, DQ_QP_DATA, 4, NULL, NULL);
	p->qp_endpoint(qp, &e);
	assert_true(p->dgram_send(da, &e, 0, NULL, 2, "x", 1) < 0);
	p->qp_destroy(qp);
	for (unsigned len = 0; len <= DQ_ENDPOINT_MAX + 1; len++) {
		e = at_b;
		e.len = len > DQ_ENDPOINT_MAX ? UINT16_MAX : (uint16_t)len;
		if (len != at_b.len)
			assert_true(p->dgram_send(da, &e, 0, NULL, 2, "x", 1) < 0);
	}
	for (int i = 0; i < 300; i++) { /* noise is no endpoint; what it might hit by chance is this machine's own */
		e = at_b;
		for (unsigned k = 0; k < 8; k++)
			e.data[k] = (uint8_t)prng_next(&seed);
		const int rc = p->dgram_send(da, &e, 0, NULL, 3, "x", 1);
		assert_true(rc <= 0);
		sent += rc == 0;
	}
	bool got = false, last = false;
	const uint64_t guard = clock_ns() + PATIENCE_NS;
	while (ended < sent || !got) {
		if (!last) {
			const int rc = p->dgram_send(da, &at_b, 0, NULL, 4, "still", 5);
			assert_true(rc == 0 || rc == -EAGAIN);
			last = rc == 0;
			sent += last;
		}
		const int n = p->dgram_poll(da, ev, 8), m = p->dgram_poll(db, ev + n, (unsigned)(8 - n));
		for (int i = 0; i < n; i++) {
			assert_true(ev[i].kind == DQ_DGRAM_SENT || (ev[i].kind == DQ_DGRAM_SEND_ERROR && ev[i].error < 0));
			ended++;
		}
		for (int i = n; i < n + m; i++)
			got |= ev[i].len == 5 && memcmp(ev[i].data, "still", 5) == 0;
		if (n + m == 0)
			dgram_rest(p, da, db);
		assert_true(clock_ns() < guard);
	}
	p->dgram_close(da);
	p->dgram_close(db);
	pair_close(&t);
}

/* With nothing to do the fd is quiet: a prober that sleeps on it stays asleep, and a datagram wakes it. */
static void test_datagram_sleep(void **state)
{
	struct pair t;
	struct dq_dgram *da, *db;
	struct dq_error err = {0};
	struct dq_endpoint to;
	struct dq_dgram_event ev[8];

	(void)state;
	pair_open(&t);
	const struct dq_provider *p = t.a.p;
	assert_int_equal(p->dgram_open(t.a.dev, &da, &err), 0);
	assert_int_equal(p->dgram_open(t.b.dev, &db, &err), 0);
	p->dgram_endpoint(db, &to);
	struct pollfd fd_a = {.fd = p->dgram_fd(da), .events = POLLIN}, fd_b = {.fd = p->dgram_fd(db), .events = POLLIN};
	for (int round = 0; round < 20; round++) {
		const uint64_t guard = clock_ns() + PATIENCE_NS;
		unsigned sent = 0, received = 0;
		for (int i = 0; i < 10;) { /* what cannot be taken now is taken after a while of polling */
			const int rc = p->dgram_send(da, &to, 0, NULL, 1, "x", 1);
			assert_true(rc == 0 || rc == -EAGAIN);
			i += rc == 0;
			if (rc)
				sent += (unsigned)p->dgram_poll(da, ev, 8);
			assert_true(clock_ns() < guard);
		}
		while (sent < 10) {
			sent += (unsigned)p->dgram_poll(da, ev, 8);
			assert_true(clock_ns() < guard);
		}
		while (received < 10) { /* asleep whenever there is nothing */
			const int n = p->dgram_poll(db, ev, 8);
			received += (unsigned)n;
			if (n == 0)
				assert_int_equal(poll(&fd_b, 1, 30000), 1);
		}
		for (int quiet = 0; quiet < 3;) {
			assert_int_equal(p->dgram_poll(da, ev, 8), 0);
			assert_int_equal(p->dgram_poll(db, ev, 8), 0);
			quiet = poll(&fd_a, 1, 0) == 0 && poll(&fd_b, 1, 0) == 0 ? quiet + 1 : 0;
			assert_true(clock_ns() < guard);
		}
	}
	/* A timer may run, to measure its own clock say, but not out at once and again and again. */
	const uint64_t due = p->dgram_next_deadline(da);
	assert_true(due == DQ_NEVER || due > clock_ns());
	p->dgram_close(da);
	p->dgram_close(db);
	pair_close(&t);
}

int main(void)
{
	const int unfit = transport_env_check();
	if (unfit)
		return unfit;
	random_seed = transport_seed();
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_datagrams),
		cmocka_unit_test(test_datagram_identity),
		cmocka_unit_test(test_datagram_hostile),
		cmocka_unit_test(test_datagram_sleep),
	};
	return cmocka_run_group_tests_name("transport datagrams", tests, NULL, NULL);
}
