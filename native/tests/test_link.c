/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The emulated link. Its times are virtual and exact: what is checked here to the nanosecond does not depend on how late
 * the machine woke anyone up.
 */
#include "transport_pair.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

#include "core/queue.h"
#include "provider/tcp.h"

#define MS 1000000u

/* ---- the link itself ---- */

static void test_arithmetic(void **state)
{
	struct dq_link *link;
	struct dq_link_stats st;
	struct dq_link_config cfg = {.delay_ns = 500000, .rate_bps = 1000000000};

	(void)state;
	assert_int_equal(dq_link_create(&cfg, &link), 0);
	const uint64_t t = clock_ns();
	uint64_t last = 0;
	for (int i = 0; i < 32; i++)
		last = dq_link_send(link, t, 65536, false);
	assert_int_equal(last, t + 500000 + 32ull * 65536 * 8); /* 2 MiB at 1 Gbit/s */
	dq_link_stats(link, t, &st);
	assert_int_equal(st.bytes, 32 * 65536);
	assert_int_equal(st.queue_bytes, 32 * 65536);
	assert_int_equal(st.queue_peak_bytes, 32 * 65536);
	assert_int_equal(dq_link_send(link, t, 40, true), t + 500000);       /* passes the queue */
	dq_link_stats(link, t + 8 * 65536, &st);
	assert_int_equal(st.queue_bytes, 31 * 65536);
	dq_link_reset_peak(link);
	dq_link_stats(link, last, &st);
	assert_int_equal(st.queue_bytes, 0);
	assert_int_equal(st.queue_peak_bytes, 0);

	/* A clock of the other thread that is behind does not go back in the queue. */
	const uint64_t late = last + 10 * MS;
	assert_int_equal(dq_link_send(link, late, 125, false), late + 1000 + 500000);
	assert_int_equal(dq_link_send(link, late - 5000, 125, false), late + 2000 + 500000);

	/* A shorter delay must not let later bytes overtake. */
	const uint64_t before = dq_link_send(link, late, 1250000, false);
	cfg.delay_ns = 1000;
	cfg.rate_bps = 0;
	dq_link_configure(link, &cfg);
	assert_true(dq_link_send(link, late, 10, false) >= before);
	dq_link_destroy(link);
	dq_link_destroy(NULL);
}

/* The same bytes at the same times through the queue of core and through the link give the same times. */
static void test_same_as_queue(void **state)
{
	struct dq_link *link;
	struct dq_queue queue;
	const struct dq_link_config cfg = {.delay_ns = 12345, .rate_bps = 777777777, .queue_bytes = 100000};
	uint64_t t = clock_ns(), x = 88172645463325252ull;

	(void)state;
	assert_int_equal(dq_link_create(&cfg, &link), 0);
	dq_queue_init(&queue, cfg.rate_bps, cfg.queue_bytes);
	for (int i = 0; i < 20000; i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		t += x % 5000;
		const uint32_t bytes = (uint32_t)(x >> 40) % 3000;
		assert_int_equal(dq_link_send(link, t, bytes, false), dq_queue_push(&queue, t, bytes) + 12345);
	}
	dq_link_destroy(link);
}

/* ---- tcp over it ---- */

static struct dq_link *link_make(uint64_t delay_ns, uint64_t rate_bps)
{
	struct dq_link *link;
	const struct dq_link_config cfg = {.delay_ns = delay_ns, .rate_bps = rate_bps};
	assert_int_equal(dq_link_create(&cfg, &link), 0);
	return link;
}

/* Writes one after the other: each round trip is twice the delay, to the nanosecond, and no completion is seen before its time. */
static void test_round_trip(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;
	struct dq_link *ab = link_make(300000, 0), *ba = link_make(200000, 0);

	(void)state;
	pair_open_tcp(&t, 0, 0);
	qp_pair(&t, DQ_QP_DATA, 4, ab, ba, &qa, &qb);
	for (uint64_t i = 0; i < 50; i++) {
		t.a.logged = t.b.logged = 0;
		const struct dq_write wr = write_of(&t.a, &t.b, i, 0, (uint32_t)(i * 1001));
		const uint64_t low = clock_ns();
		assert_int_equal(t.a.p->post_write(qa, &wr, 1), 1);
		const uint64_t high = clock_ns();
		while (t.b.logged == 0) {
			side_poll(&t.a);
			side_poll(&t.b);
		}
		const uint64_t arrival = t.b.log[0].time_ns;
		assert_true(clock_ns() >= arrival);
		assert_in_range(arrival, low + 300000, high + 300000);
		PUMP_UNTIL(&t, count(&t.a, DQ_WC_WRITE, NULL) == 1);
		assert_int_equal(t.a.log[0].time_ns, arrival + 200000);
		assert_true(clock_ns() >= t.a.log[0].time_ns);
	}
	t.a.p->qp_destroy(qa);
	t.b.p->qp_destroy(qb);
	pair_close(&t);
	dq_link_destroy(ab);
	dq_link_destroy(ba);
}

/* Both directions of one QP at once, data and acknowledgements in between: every time is exact all the same. */
static void test_both_directions(void **state)
{
	enum { WRITES = 300 };
	const uint64_t delay[2] = {300000, 700000};
	struct pair t;
	struct dq_qp *qp[2];
	struct dq_link *link[2] = {link_make(delay[0], 0), link_make(delay[1], 0)};
	unsigned posted[2] = {0};
	uint64_t x = 88172645463325252ull;

	(void)state;
	pair_open_tcp(&t, 0, 0);
	qp_pair(&t, DQ_QP_DATA, 32, link[0], link[1], &qp[0], &qp[1]);
	struct side *sides[2] = {&t.a, &t.b};
	t.a.logged = t.b.logged = 0;
	const uint64_t guard = clock_ns() + 60000000000u;
	while (t.a.logged < 2 * WRITES || t.b.logged < 2 * WRITES) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		const unsigned s = x & 1;
		const struct dq_write wr = write_of(sides[s], sides[!s], posted[s], 0, (uint32_t)(x >> 8) % 5000);
		if (posted[s] < WRITES && (x & 0x30) == 0)
			posted[s] += (unsigned)sides[s]->p->post_write(qp[s], &wr, 1);
		pair_poll(&t);
		assert_true(clock_ns() < guard);
	}
	for (unsigned s = 0; s < 2; s++)
		for (unsigned i = 0; i < WRITES; i++) {
			assert_int_equal(find(sides[s], DQ_WC_WRITE, i)->wr_id, i);
			assert_int_equal(find(sides[!s], DQ_WC_SEGMENT, i)->imm, i);
			assert_int_equal(find(sides[s], DQ_WC_WRITE, i)->time_ns - find(sides[!s], DQ_WC_SEGMENT, i)->time_ns, delay[!s]);
		}
	for (unsigned s = 0; s < 2; s++)
		sides[s]->p->qp_destroy(qp[s]);
	pair_close(&t);
	dq_link_destroy(link[0]);
	dq_link_destroy(link[1]);
}

/* Back to back over several QPs of one path: they share its rate, and the last byte arrives exactly when the rate says. */
static void test_throughput(void **state)
{
	enum { QPS = 4, EACH = 8, SEGMENT = 65536 };
	struct pair t;
	struct dq_qp *qa[QPS], *qb[QPS];
	struct dq_link *ab = link_make(500000, 100000000), *ba = link_make(500000, 100000000);

	(void)state;
	pair_open_tcp(&t, 0, 0);
	for (int q = 0; q < QPS; q++)
		qp_pair(&t, DQ_QP_DATA, EACH, ab, ba, &qa[q], &qb[q]);
	t.a.logged = t.b.logged = 0;
	for (unsigned q = 0; q < QPS; q++) { /* each batch is 42 ms for the link: it never runs dry between them */
		struct dq_write wr[EACH];
		for (unsigned i = 0; i < EACH; i++)
			wr[i] = write_of(&t.a, &t.b, q * EACH + i, 0, SEGMENT);
		assert_int_equal(t.a.p->post_write(qa[q], wr, EACH), EACH);
	}
	PUMP_UNTIL(&t, count(&t.a, DQ_WC_WRITE, NULL) == QPS * EACH);
	assert_int_equal(count(&t.b, DQ_WC_SEGMENT, NULL), QPS * EACH);
	/* Whatever the order they were processed in, the segments are a segment's time apart in virtual time. */
	uint64_t arrival[QPS * EACH], completion[QPS * EACH];
	for (unsigned i = 0; i < QPS * EACH; i++) {
		arrival[find(&t.b, DQ_WC_SEGMENT, i)->imm] = find(&t.b, DQ_WC_SEGMENT, i)->time_ns;
		completion[find(&t.a, DQ_WC_WRITE, i)->wr_id] = find(&t.a, DQ_WC_WRITE, i)->time_ns;
	}
	for (unsigned i = 0; i < QPS * EACH; i++) {
		if (i)
			assert_int_equal(arrival[i] - arrival[i - 1], SEGMENT * 80); /* 8 bits at 100 Mbit/s */
		assert_int_equal(completion[i] - arrival[i], 500000);
	}
	for (int q = 0; q < QPS; q++) {
		t.a.p->qp_destroy(qa[q]);
		t.b.p->qp_destroy(qb[q]);
	}
	pair_close(&t);
	dq_link_destroy(ab);
	dq_link_destroy(ba);
}

/* One acknowledgement covers many writes: each completes at its own time all the same. */
static void test_coalesced_acknowledgement(void **state)
{
	enum { N = 16 };
	struct pair t;
	struct dq_qp *qa, *qb;
	struct dq_link *ab = link_make(100000, 1000000000);

	(void)state;
	pair_open_tcp(&t, 0, 0);
	qp_pair(&t, DQ_QP_DATA, N, ab, NULL, &qa, &qb);
	t.a.logged = t.b.logged = 0;
	struct dq_write wr[N];
	for (unsigned i = 0; i < N; i++)
		wr[i] = write_of(&t.a, &t.b, i, 0, 1000);
	assert_int_equal(t.a.p->post_write(qa, wr, N), N); /* at one time */
	while (dq_tcp_qp_of(qa)->sq_sent != dq_tcp_qp_of(qa)->sq_posted) /* b sleeps until all have left */
		side_poll(&t.a);
	PUMP_UNTIL(&t, t.a.logged == N && t.b.logged == N);
	for (unsigned i = 0; i < N; i++) {
		assert_int_equal(t.a.log[i].time_ns, t.b.log[i].time_ns); /* b has no link: its answer takes no virtual time */
		if (i)
			assert_int_equal(t.a.log[i].time_ns - t.a.log[i - 1].time_ns, 8000);
	}
	t.a.p->qp_destroy(qa);
	t.b.p->qp_destroy(qb);
	pair_close(&t);
	dq_link_destroy(ab);
}

/* A control message passes data that waits in the emulated queue. */
static void test_control_passes_data(void **state)
{
	struct pair t;
	struct dq_qp *da, *db, *ca, *cb;
	struct dq_link *ab = link_make(200000, 10000000), *ba = link_make(200000, 10000000);

	(void)state;
	pair_open_tcp(&t, 0, 0);
	qp_pair(&t, DQ_QP_DATA, 4, ab, ba, &da, &db);
	qp_pair(&t, DQ_QP_CONTROL, 4, ab, ba, &ca, &cb);
	t.a.logged = t.b.logged = 0;
	const struct dq_recv rv = {.wr_id = 1, .mem = t.b.mem, .offset = 0, .len = 256};
	assert_int_equal(t.b.p->post_recv(cb, &rv, 1), 1);
	const struct dq_write wr = write_of(&t.a, &t.b, 1, 4096, 250000); /* 200 ms */
	assert_int_equal(t.a.p->post_write(da, &wr, 1), 1);
	const struct dq_send sd = {.wr_id = 2, .mem = t.a.mem, .len = 200};
	assert_int_equal(t.a.p->post_send(ca, &sd, 1), 1);
	PUMP_UNTIL(&t, t.a.logged == 2 && t.b.logged == 2);
	assert_int_equal(t.b.log[0].op, DQ_WC_RECV);
	assert_int_equal(t.b.log[1].op, DQ_WC_SEGMENT);
	assert_true(t.b.log[1].time_ns > t.b.log[0].time_ns);
	assert_int_equal(find(&t.a, DQ_WC_SEND, 0)->time_ns - t.b.log[0].time_ns, 200000);
	t.a.p->qp_destroy(da);
	t.b.p->qp_destroy(db);
	t.a.p->qp_destroy(ca);
	t.b.p->qp_destroy(cb);
	pair_close(&t);
	dq_link_destroy(ab);
	dq_link_destroy(ba);
}

/* Asleep until next_deadline() or an event, as the engine is: everything gets through and nothing spins. */
static void test_sleeping(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;
	struct dq_link *ab = link_make(2 * MS, 0), *ba = link_make(2 * MS, 0);
	unsigned rounds = 0;

	(void)state;
	pair_open_tcp(&t, 0, 0);
	qp_pair(&t, DQ_QP_DATA, 4, ab, ba, &qa, &qb);
	for (uint64_t i = 0; i < 10; i++) {
		t.a.logged = t.b.logged = 0;
		const struct dq_write wr = write_of(&t.a, &t.b, i, 0, 1000);
		assert_int_equal(t.a.p->post_write(qa, &wr, 1), 1);
		while (t.a.logged == 0 || t.b.logged == 0) {
			struct pollfd fds[2] = {{.fd = t.a.p->event_fd(t.a.dev), .events = POLLIN}, {.fd = t.b.p->event_fd(t.b.dev), .events = POLLIN}};
			const uint64_t due = DQ_MIN(t.a.p->next_deadline(t.a.dev), t.b.p->next_deadline(t.b.dev)), now = clock_ns();
			if (!t.a.p->arm(t.a.dev) && !t.b.p->arm(t.b.dev)) {
				const uint64_t left = due > now ? due - now : 0;
				const struct timespec ts = {.tv_sec = (time_t)(left / 1000000000u), .tv_nsec = (long)(left % 1000000000u)};
				ppoll(fds, 2, &ts, NULL);
			}
			pair_poll(&t);
			rounds++;
		}
	}
	assert_true(rounds < 200); /* some 4 a write; a spin of 4 ms has thousands */
	t.a.p->qp_destroy(qa);
	t.b.p->qp_destroy(qb);
	pair_close(&t);
	dq_link_destroy(ab);
	dq_link_destroy(ba);
}

/* More in the emulated queue than the deadline's time: that is the path's length, not a dead peer. */
static void test_long_queue_is_no_timeout(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;
	struct dq_link *ab = link_make(MS, 10000000), *ba = link_make(MS, 0);

	(void)state;
	pair_open_tcp(&t, 20 * MS, 60 * MS);
	qp_pair(&t, DQ_QP_DATA, 4, ab, ba, &qa, &qb);
	t.a.logged = t.b.logged = 0;
	const struct dq_write wr[2] = {write_of(&t.a, &t.b, 1, 0, 250000), write_of(&t.a, &t.b, 2, 0, 125000)}; /* 200 ms, 100 ms */
	assert_int_equal(t.a.p->post_write(qa, wr, 2), 2);
	PUMP_UNTIL(&t, t.a.logged == 2);
	assert_int_equal(t.a.log[0].status, DQ_WC_SUCCESS);
	assert_int_equal(t.a.log[1].status, DQ_WC_SUCCESS);
	assert_int_equal(t.a.log[1].op, DQ_WC_WRITE);
	t.a.p->qp_destroy(qa);
	t.b.p->qp_destroy(qb);
	pair_close(&t);
	dq_link_destroy(ab);
	dq_link_destroy(ba);
}

/* Data held for its release when the QP is fenced never leaves. */
static void test_fence_while_held(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;
	struct dq_link *ab = link_make(60000u * (uint64_t)MS, 0);

	(void)state;
	pair_open_tcp(&t, 0, 0);
	qp_pair(&t, DQ_QP_DATA, 4, ab, NULL, &qa, &qb);
	t.a.logged = t.b.logged = 0;
	const struct dq_write wr = write_of(&t.a, &t.b, 1, 0, 1000);
	assert_int_equal(t.a.p->post_write(qa, &wr, 1), 1);
	assert_int_equal(t.a.p->arm(t.a.dev), 0);
	t.a.p->qp_fence(qa);
	PUMP_UNTIL(&t, t.a.logged == 2 && t.b.logged == 1);
	assert_int_equal(t.a.log[0].status, DQ_WC_FLUSHED);
	assert_int_equal(t.b.log[0].status, DQ_WC_REMOTE_GONE);
	t.a.p->qp_destroy(qa);
	t.b.p->qp_destroy(qb);
	pair_close(&t);
	dq_link_destroy(ab);
}

/* ---- datagrams over it, from another thread, beside data ---- */

struct prober {
	const struct dq_provider *p;
	struct dq_dgram *near, *far;
	struct dq_link *there, *back;
	uint64_t delay_ns;
	int probes;
	int wrong;                     /* round trips that were not exact */
	int done;
	uint64_t queued_ns;            /* largest round trip beyond the two delays */
	atomic_bool finished;
};

static void probe_all(struct prober *pr)
{
	struct dq_endpoint to;
	const uint64_t guard = clock_ns() + 60000000000u;

	pr->p->dgram_endpoint(pr->far, &to);
	for (int i = 0; i < pr->probes; i++) {
		uint64_t sent = 0, arrived = 0, answered = 0, back = 0;
		if (pr->p->dgram_send(pr->near, &to, 0, pr->there, (uint64_t)i, "ping", 4) != 0)
			return;
		while (!sent || !arrived || !answered || !back) {
			struct dq_dgram_event ev[4];
			int n = pr->p->dgram_poll(pr->near, ev, 4);
			for (int k = 0; k < n; k++)
				*(ev[k].kind == DQ_DGRAM_SENT ? &sent : &back) = ev[k].time_ns;
			n = pr->p->dgram_poll(pr->far, ev, 4);
			for (int k = 0; k < n; k++) {
				if (ev[k].kind == DQ_DGRAM_RECEIVED) {
					arrived = ev[k].time_ns;
					if (pr->p->dgram_send(pr->far, &ev[k].from, 0, pr->back, 9, "pong", 4) != 0)
						return;
				} else {
					answered = ev[k].time_ns;
				}
			}
			if (clock_ns() > guard)
				return;
		}
		const uint64_t rtt = (back - sent) - (answered - arrived); /* the responder's time taken out */
		if (rtt < 2 * pr->delay_ns || back <= sent)
			pr->wrong++;
		pr->queued_ns = DQ_MAX(pr->queued_ns, rtt - 2 * pr->delay_ns);
		pr->done++;
	}
}

static void *probe(void *arg)
{
	struct prober *pr = arg;
	probe_all(pr);
	atomic_store(&pr->finished, true);
	return NULL;
}

static void test_datagram_round_trip(void **state)
{
	struct pair t;
	struct dq_error err = {0};
	struct prober pr = {.delay_ns = 400000, .probes = 30};

	(void)state;
	pair_open_tcp(&t, 0, 0);
	pr.p = t.a.p;
	pr.there = link_make(pr.delay_ns, 0);
	pr.back = link_make(pr.delay_ns, 0);
	assert_int_equal(t.a.p->dgram_open(t.a.dev, &pr.near, &err), 0);
	assert_int_equal(t.b.p->dgram_open(t.b.dev, &pr.far, &err), 0);
	probe_all(&pr);
	assert_int_equal(pr.done, pr.probes);
	assert_int_equal(pr.wrong, 0);
	assert_int_equal(pr.queued_ns, 0); /* exactly twice the delay, each time */
	assert_string_equal(t.a.p->dgram_time_source(pr.near), "virtual");
	t.a.p->dgram_close(pr.near);
	t.b.p->dgram_close(pr.far);
	pair_close(&t);
	dq_link_destroy(pr.there);
	dq_link_destroy(pr.back);
}

/* A probe stands in the queue that the data makes: it arrives its own bytes' time after the last segment. */
static void test_datagram_sees_queue(void **state)
{
	struct pair t;
	struct dq_error err = {0};
	struct dq_qp *qa, *qb;
	struct dq_dgram *da, *db;
	struct dq_endpoint to;
	struct dq_link *ab = link_make(100000, 20000000);
	struct dq_dgram_event ev[4];
	uint64_t arrived = 0;

	(void)state;
	pair_open_tcp(&t, 0, 0);
	qp_pair(&t, DQ_QP_DATA, 16, ab, NULL, &qa, &qb);
	assert_int_equal(t.a.p->dgram_open(t.a.dev, &da, &err), 0);
	assert_int_equal(t.b.p->dgram_open(t.b.dev, &db, &err), 0);
	t.b.p->dgram_endpoint(db, &to);
	t.a.logged = t.b.logged = 0;
	const struct dq_write wr = write_of(&t.a, &t.b, 1, 0, 1000000); /* 400 ms: the next line is reached before */
	assert_int_equal(t.a.p->post_write(qa, &wr, 1), 1);
	assert_int_equal(t.a.p->dgram_send(da, &to, 0, ab, 1, "0123456789", 10), 0);
	const uint64_t guard = clock_ns() + 60000000000u;
	while (!arrived || t.a.logged == 0) {
		pair_poll(&t);
		t.a.p->dgram_poll(da, ev, 4);
		if (t.b.p->dgram_poll(db, ev, 4) == 1)
			arrived = ev[0].time_ns;
		assert_true(clock_ns() < guard);
	}
	assert_int_equal(arrived - t.b.log[0].time_ns, (DQ_TCP_DGRAM_HEADER_BYTES + 10) * 400); /* 8 bits at 20 Mbit/s */
	t.a.p->qp_destroy(qa);
	t.b.p->qp_destroy(qb);
	t.a.p->dgram_close(da);
	t.b.p->dgram_close(db);
	pair_close(&t);
	dq_link_destroy(ab);
}

/* The prober's thread and the engine's share the link and nothing else. */
static void test_two_threads_share_a_link(void **state)
{
	struct pair t;
	struct dq_error err = {0};
	struct prober pr = {.delay_ns = 300000, .probes = 40};
	struct dq_qp *qa, *qb;
	pthread_t thread;

	(void)state;
	pair_open_tcp(&t, 0, 0);
	pr.p = t.a.p;
	pr.there = link_make(pr.delay_ns, 2000000000);
	pr.back = link_make(pr.delay_ns, 0);
	assert_int_equal(t.a.p->dgram_open(t.a.dev, &pr.near, &err), 0);
	assert_int_equal(t.b.p->dgram_open(t.b.dev, &pr.far, &err), 0);
	qp_pair(&t, DQ_QP_DATA, 16, pr.there, pr.back, &qa, &qb);
	assert_int_equal(pthread_create(&thread, NULL, probe, &pr), 0);
	unsigned posted = 0, done = 0;
	enum { WRITES = 200 };
	while (done < posted || posted < WRITES || !atomic_load(&pr.finished)) {
		struct dq_wc wc[16];
		struct dq_link_stats st;
		const struct dq_write wr = write_of(&t.a, &t.b, posted, 0, 65536);
		if ((posted < WRITES || !atomic_load(&pr.finished)) && t.a.p->post_write(qa, &wr, 1) == 1)
			posted++;
		int n = t.a.p->poll(t.a.dev, wc, 16);
		for (int i = 0; i < n; i++)
			done += wc[i].status == DQ_WC_SUCCESS;
		t.b.p->poll(t.b.dev, wc, 16);
		dq_link_stats(pr.there, clock_ns(), &st);
	}
	assert_int_equal(pthread_join(thread, NULL), 0);
	assert_int_equal(pr.done, pr.probes);
	assert_int_equal(pr.wrong, 0);
	t.a.p->qp_destroy(qa);
	t.b.p->qp_destroy(qb);
	t.a.p->dgram_close(pr.near);
	t.b.p->dgram_close(pr.far);
	pair_close(&t);
	dq_link_destroy(pr.there);
	dq_link_destroy(pr.back);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_arithmetic),
		cmocka_unit_test(test_same_as_queue),
		cmocka_unit_test(test_round_trip),
		cmocka_unit_test(test_both_directions),
		cmocka_unit_test(test_throughput),
		cmocka_unit_test(test_coalesced_acknowledgement),
		cmocka_unit_test(test_control_passes_data),
		cmocka_unit_test(test_sleeping),
		cmocka_unit_test(test_long_queue_is_no_timeout),
		cmocka_unit_test(test_fence_while_held),
		cmocka_unit_test(test_datagram_round_trip),
		cmocka_unit_test(test_datagram_sees_queue),
		cmocka_unit_test(test_two_threads_share_a_link),
	};
	return cmocka_run_group_tests_name("emulated link", tests, NULL, NULL);
}
