/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What only the tcp provider has, over real sockets on loopback: frames, hellos, strangers, heartbeats. Whatever a peer sends,
 * this end stays whole. What every provider promises is in test_transport*.c.
 */
#include "transport_pair.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "prng.h"
#include "provider/tcp.h"

#define MS 1000000u

static const struct dq_tcp_stats *stats_of(const struct side *s)
{
	return &dq_tcp_device_of_const(s->dev)->stats;
}

/* ---- the peer as a bare socket ---- */

static int raw_connect(const struct side *to)
{
	const struct dq_tcp_device *dev = dq_tcp_device_of_const(to->dev);
	int fd = socket(dev->addr.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	assert_true(fd >= 0);
	assert_int_equal(connect(fd, (const struct sockaddr *)&dev->addr, dev->addr_len), 0);
	return fd;
}

static void raw_send(int fd, const void *bytes, size_t n)
{
	assert_int_equal(send(fd, bytes, n, MSG_NOSIGNAL), (ssize_t)n);
}

/* An endpoint nobody listens on: of a peer that a test plays itself. */
static struct dq_endpoint raw_endpoint(const struct side *like, uint32_t number, const uint8_t token[DQ_TCP_TOKEN_BYTES])
{
	struct dq_endpoint e;
	dq_tcp_endpoint_put(&e, DQ_TCP_ENDPOINT_QP, &dq_tcp_device_of_const(like->dev)->addr, number, token);
	return e;
}

static void raw_hello_bytes(uint8_t out[DQ_TCP_HELLO_BYTES], const struct dq_endpoint *to, uint32_t number, const uint8_t token[DQ_TCP_TOKEN_BYTES])
{
	struct dq_tcp_hello hello = {.version = DQ_TCP_VERSION, .to_qp = dq_le32_get(to->data + 24), .from_qp = number};
	memcpy(hello.to_token, to->data + 28, DQ_TCP_TOKEN_BYTES);
	memcpy(hello.from_token, token, DQ_TCP_TOKEN_BYTES);
	dq_tcp_hello_put(out, &hello);
}

static const uint8_t raw_token[DQ_TCP_TOKEN_BYTES] = "raw peer token!";

/* A QP of b that is connected to a bare socket. */
static int raw_qp(struct pair *t, enum dq_qp_kind kind, struct dq_qp **qp)
{
	struct dq_error err = {0};
	struct dq_endpoint own, peer = raw_endpoint(&t->a, 77, raw_token);
	uint8_t hello[DQ_TCP_HELLO_BYTES];
	const unsigned before = count(&t->b, DQ_WC_CONNECTED, NULL);

	*qp = qp_make(&t->b, kind, 16, NULL, NULL);
	t->b.p->qp_endpoint(*qp, &own);
	assert_int_equal(t->b.p->qp_connect(*qp, &peer, false, &err), 0);
	int fd = raw_connect(&t->b);
	raw_hello_bytes(hello, &own, 77, raw_token);
	raw_send(fd, hello, sizeof hello);
	PUMP_UNTIL(t, count(&t->b, DQ_WC_CONNECTED, NULL) == before + 1);
	assert_int_equal(recv(fd, hello, sizeof hello, MSG_WAITALL), sizeof hello);
	return fd;
}

static void raw_frame(int fd, const struct dq_tcp_frame *f)
{
	uint8_t header[DQ_TCP_HEADER_BYTES];
	dq_tcp_frame_put(header, f);
	raw_send(fd, header, sizeof header);
}

/* The peer closed the connection (reading to the end). */
static bool raw_closed(int fd)
{
	uint8_t sink[4096];
	for (;;) {
		ssize_t n = recv(fd, sink, sizeof sink, MSG_DONTWAIT);
		if (n == 0 || (n < 0 && errno != EAGAIN))
			return true;
		if (n < 0)
			return false;
	}
}

/* ---- access ---- */

/* Both ends are told at once, and each violation is counted. */
static void test_access_violations(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;

	(void)state;
	pair_open_tcp(&t, 0, 0);
	for (unsigned bit = 0; bit < 64; bit += 9) { /* of the slot and of the random part */
		qp_pair(&t, DQ_QP_DATA, 8, NULL, NULL, &qa, &qb);
		forget_log(&t);
		struct dq_write bad = write_of(&t.a, &t.b, 1, 0, 64);
		bad.remote_key ^= 1ull << bit;
		assert_int_equal(t.a.p->post_write(qa, &bad, 1), 1);
		PUMP_UNTIL(&t, count(&t.a, DQ_WC_FAILED, NULL) == 1 && count(&t.b, DQ_WC_FAILED, NULL) == 1);
		assert_int_equal(find(&t.a, DQ_WC_FAILED, 0)->status, DQ_WC_REMOTE_ACCESS);
		assert_int_equal(find(&t.b, DQ_WC_FAILED, 0)->status, DQ_WC_REMOTE_ACCESS);
		assert_int_equal(stats_of(&t.b)->access_violations, bit / 9 + 1);
		qp_pair_destroy(&t, qa, qb);
	}
	pair_close(&t);
}

/* A registration goes while a peer is in the middle of a write to it. */
static void test_deregister_under_write(void **state)
{
	struct pair t;
	struct dq_qp *qp;
	struct dq_mem *mem;
	struct dq_mem_key key;
	struct dq_error err = {0};
	uint8_t *bytes = calloc(1, 8192);
	const struct dq_mem_desc desc = {.addr = bytes, .len = 8192, .dmabuf_fd = -1, .access = DQ_ACCESS_REMOTE_WRITE};

	(void)state;
	pair_open_tcp(&t, 0, 0);
	assert_int_equal(t.b.p->mem_register(t.b.dev, &desc, &mem, &err), 0);
	t.b.p->mem_key(mem, 0, 1, &key);
	int fd = raw_qp(&t, DQ_QP_DATA, &qp);
	raw_frame(fd, &(struct dq_tcp_frame){.type = DQ_TCP_WRITE, .len = 8192, .addr = key.addr, .key = key.key});
	static uint8_t payload[8192];
	memset(payload, 0x77, sizeof payload);
	raw_send(fd, payload, 5000);
	PUMP_UNTIL(&t, bytes[4999] == 0x77);
	t.b.p->mem_deregister(mem);
	free(bytes); /* a later write to it would be caught by the sanitizer */
	(void)!send(fd, payload, 3192, MSG_NOSIGNAL);
	PUMP_UNTIL(&t, count(&t.b, DQ_WC_FAILED, NULL) == 1);
	assert_int_equal(find(&t.b, DQ_WC_FAILED, 0)->status, DQ_WC_REMOTE_ACCESS);
	assert_int_equal(count(&t.b, DQ_WC_SEGMENT, NULL), 0);
	close(fd);
	t.b.p->qp_destroy(qp);
	pair_close(&t);
}

/* Deregistering what this end's own posted work still needs fails that QP and touches nothing freed. */
static void test_deregister_posted(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;
	struct dq_mem *mem;
	struct dq_error err = {0};
	uint8_t *bytes = calloc(1, 65536);
	const struct dq_mem_desc desc = {.addr = bytes, .len = 65536, .dmabuf_fd = -1};

	(void)state;
	pair_open_tcp(&t, 0, 0);
	assert_int_equal(t.a.p->mem_register(t.a.dev, &desc, &mem, &err), 0);
	qp_pair(&t, DQ_QP_DATA, 8, NULL, NULL, &qa, &qb);
	struct dq_write wr = write_of(&t.a, &t.b, 5, 0, 65536);
	wr.mem = mem;
	assert_int_equal(t.a.p->post_write(qa, &wr, 1), 1);
	t.a.p->mem_deregister(mem);
	free(bytes);
	PUMP_UNTIL(&t, count(&t.a, DQ_WC_FAILED, NULL) == 1 && count(&t.b, DQ_WC_FAILED, NULL) == 1);
	assert_int_equal(find(&t.a, DQ_WC_FAILED, 0)->status, DQ_WC_LOCAL);
	assert_int_equal(find(&t.a, DQ_WC_WRITE, 0)->status, DQ_WC_FLUSHED);
	assert_int_equal(find(&t.b, DQ_WC_FAILED, 0)->status, DQ_WC_REMOTE_GONE);
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

static void test_send_without_receive(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;
	const struct dq_send sd = {.wr_id = 3, .len = 0};

	(void)state;
	pair_open_tcp(&t, 0, 0);
	for (int round = 0; round < 2; round++) {
		forget_log(&t);
		qp_pair(&t, DQ_QP_CONTROL, 4, NULL, NULL, &qa, &qb);
		forget_log(&t);
		if (round == 0) {
			assert_int_equal(t.a.p->post_send(qa, &sd, 1), 1);
		} else { /* too long for the receive */
			const struct dq_recv rv = {.wr_id = 1, .mem = t.b.mem, .len = 99};
			const struct dq_send big = {.wr_id = 3, .mem = t.a.mem, .len = 100};
			assert_int_equal(t.b.p->post_recv(qb, &rv, 1), 1);
			assert_int_equal(t.a.p->post_send(qa, &big, 1), 1);
		}
		PUMP_UNTIL(&t, count(&t.a, DQ_WC_FAILED, NULL) == 1 && count(&t.b, DQ_WC_FAILED, NULL) == 1);
		assert_int_equal(find(&t.a, DQ_WC_FAILED, 0)->status, DQ_WC_PROTOCOL);
		assert_int_equal(find(&t.a, DQ_WC_SEND, 0)->status, DQ_WC_FLUSHED);
		assert_int_equal(find(&t.b, DQ_WC_FAILED, 0)->status, DQ_WC_PROTOCOL);
		assert_int_equal(count(&t.b, DQ_WC_RECV, NULL), round); /* flushed */
		qp_pair_destroy(&t, qa, qb);
	}
	pair_close(&t);
}

/* ---- strangers ---- */

/* The pair still works after whatever a test did to b. */
static void still_works(struct pair *t)
{
	struct dq_qp *qa, *qb;

	qp_pair(t, DQ_QP_DATA, 4, NULL, NULL, &qa, &qb);
	forget_log(t);
	memset(t->a.bytes, 0x3c, 9000);
	const struct dq_write wr = write_of(&t->a, &t->b, 1, 0, 9000);
	assert_int_equal(t->a.p->post_write(qa, &wr, 1), 1);
	PUMP_UNTIL(t, count(&t->a, DQ_WC_WRITE, NULL) == 1 && count(&t->b, DQ_WC_SEGMENT, NULL) == 1);
	assert_memory_equal(t->a.bytes, t->b.bytes, 9000);
	t->a.p->qp_destroy(qa);
	t->b.p->qp_destroy(qb);
}

static void test_garbage_on_listener(void **state)
{
	struct pair t;
	uint64_t seed = 42;

	(void)state;
	pair_open_tcp(&t, 0, 0);
	for (int i = 0; i < 300; i++) {
		uint8_t bytes[512];
		const uint32_t n = prng_below(&seed, sizeof bytes + 1);
		for (uint32_t k = 0; k < n; k++)
			bytes[k] = (uint8_t)prng_next(&seed);
		if (prng_below(&seed, 3) == 0 && n >= 8) /* the right magic, then noise */
			memcpy(bytes, DQ_TCP_MAGIC, 8);
		int fd = raw_connect(&t.b);
		if (n)
			raw_send(fd, bytes, n);
		shutdown(fd, SHUT_WR);
		PUMP_UNTIL(&t, raw_closed(fd));
		close(fd);
	}
	const struct dq_tcp_stats *st = stats_of(&t.b);
	assert_int_equal(st->accepted, 300);
	assert_int_equal(st->refused_hello + st->refused_silent, 300);
	assert_int_equal(count(&t.b, DQ_WC_CONNECTED, NULL), 0);
	still_works(&t);
	pair_close(&t);
}

static void test_token(void **state)
{
	struct pair t;
	struct dq_qp *qp;
	struct dq_endpoint own, peer;
	struct dq_error err = {0};
	uint8_t hello[DQ_TCP_HELLO_BYTES], bad[DQ_TCP_HELLO_BYTES];

	(void)state;
	pair_open_tcp(&t, 0, 0);
	peer = raw_endpoint(&t.a, 77, raw_token);
	qp = qp_make(&t.b, DQ_QP_DATA, 4, NULL, NULL);
	t.b.p->qp_endpoint(qp, &own);
	assert_int_equal(t.b.p->qp_connect(qp, &peer, false, &err), 0);
	raw_hello_bytes(hello, &own, 77, raw_token);
	static const int spoiled[] = {12, 13, 16, 31, 32, 36, 51}; /* QP number, token, peer's number, peer's token */
	for (unsigned i = 0; i < sizeof spoiled / sizeof *spoiled; i++) {
		memcpy(bad, hello, sizeof bad);
		bad[spoiled[i]] ^= 0x80;
		int fd = raw_connect(&t.b);
		raw_send(fd, bad, sizeof bad);
		PUMP_UNTIL(&t, raw_closed(fd));
		close(fd);
		assert_int_equal(stats_of(&t.b)->refused_hello, i + 1);
	}
	assert_int_equal(t.b.logged, 0);
	/* The right one, byte by byte. */
	int fd = raw_connect(&t.b);
	for (unsigned i = 0; i < sizeof hello; i++) {
		raw_send(fd, hello + i, 1);
		pair_poll(&t);
	}
	PUMP_UNTIL(&t, count(&t.b, DQ_WC_CONNECTED, NULL) == 1);
	/* The same again: a token is good once. */
	const uint64_t refused = stats_of(&t.b)->refused_hello;
	int again = raw_connect(&t.b);
	raw_send(again, hello, sizeof hello);
	PUMP_UNTIL(&t, raw_closed(again));
	close(again);
	assert_int_equal(stats_of(&t.b)->refused_hello, refused + 1);
	assert_int_equal(count(&t.b, DQ_WC_FAILED, NULL), 0);
	/* Also not after the QP has failed. */
	close(fd);
	PUMP_UNTIL(&t, count(&t.b, DQ_WC_FAILED, NULL) == 1);
	again = raw_connect(&t.b);
	raw_send(again, hello, sizeof hello);
	PUMP_UNTIL(&t, raw_closed(again));
	close(again);
	t.b.p->qp_destroy(qp);
	still_works(&t);
	pair_close(&t);
}

static void test_version_is_told(void **state)
{
	struct pair t;
	uint8_t hello[DQ_TCP_HELLO_BYTES];
	struct dq_tcp_hello answer = {0};

	(void)state;
	pair_open_tcp(&t, 0, 0);
	/* This end as the passive one. */
	struct dq_endpoint nobody = raw_endpoint(&t.b, 5, raw_token);
	raw_hello_bytes(hello, &nobody, 77, raw_token);
	dq_le16_put(hello + 8, DQ_TCP_VERSION + 1);
	int fd = raw_connect(&t.b);
	raw_send(fd, hello, sizeof hello);
	PUMP_UNTIL(&t, recv(fd, hello, sizeof hello, MSG_DONTWAIT) == (ssize_t)sizeof hello);
	assert_int_equal(dq_tcp_hello_get(hello, &answer), 0);
	assert_int_equal(answer.version, DQ_TCP_VERSION);
	assert_int_equal(answer.status, DQ_TCP_HELLO_VERSION);
	close(fd);

	/* And as the dialing one: the peer's version is in the completion. */
	struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof addr;
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	assert_int_equal(bind(listener, (struct sockaddr *)&addr, sizeof addr), 0);
	assert_int_equal(listen(listener, 4), 0);
	assert_int_equal(getsockname(listener, (struct sockaddr *)&addr, &len), 0);
	struct sockaddr_storage at = {0};
	struct dq_endpoint peer;
	struct dq_error err = {0};
	memcpy(&at, &addr, sizeof addr);
	dq_tcp_endpoint_put(&peer, DQ_TCP_ENDPOINT_QP, &at, 9, raw_token);
	struct dq_qp *qp = qp_make(&t.a, DQ_QP_DATA, 4, NULL, NULL);
	assert_int_equal(t.a.p->qp_connect(qp, &peer, true, &err), 0);
	fd = accept(listener, NULL, NULL);
	assert_true(fd >= 0);
	PUMP_UNTIL(&t, recv(fd, hello, sizeof hello, MSG_DONTWAIT) == (ssize_t)sizeof hello);
	struct dq_tcp_hello theirs = {0};
	assert_int_equal(dq_tcp_hello_get(hello, &theirs), 0);
	assert_int_equal(theirs.to_qp, 9);
	struct dq_tcp_hello no = {.version = 31, .status = DQ_TCP_HELLO_VERSION, .to_qp = theirs.from_qp};
	memcpy(no.to_token, theirs.from_token, DQ_TCP_TOKEN_BYTES);
	dq_tcp_hello_put(hello, &no);
	raw_send(fd, hello, sizeof hello);
	PUMP_UNTIL(&t, count(&t.a, DQ_WC_FAILED, NULL) == 1);
	assert_int_equal(find(&t.a, DQ_WC_FAILED, 0)->status, DQ_WC_PROTOCOL);
	assert_int_equal(find(&t.a, DQ_WC_FAILED, 0)->vendor, 31);
	close(fd);
	close(listener);
	t.a.p->qp_destroy(qp);
	pair_close(&t);
}

/* Connections that say nothing: bounded in number, closed after the deadline, and in nobody's way. */
static void test_silent_connections(void **state)
{
	enum { MANY = DQ_TCP_PENDING_MAX + 40 };
	struct pair t;
	static int fds[MANY];

	(void)state;
	pair_open_tcp(&t, 1000 * MS, 300 * MS);
	for (int i = 0; i < MANY; i++) {
		fds[i] = raw_connect(&t.b);
		if (i % 3 == 0)
			raw_send(fds[i], DQ_TCP_MAGIC, 8);
		pair_poll(&t);
		assert_true(dq_tcp_device_of(t.b.dev)->pending_used <= DQ_TCP_PENDING_MAX);
	}
	still_works(&t);
	PUMP_UNTIL(&t, dq_tcp_device_of(t.b.dev)->pending_used == 0);
	for (int i = 0; i < MANY; i++) {
		PUMP_UNTIL(&t, raw_closed(fds[i]));
		close(fds[i]);
	}
	assert_true(stats_of(&t.b)->refused_flood >= MANY - DQ_TCP_PENDING_MAX);
	assert_true(stats_of(&t.b)->refused_silent > 0);
	pair_close(&t);
}

/* No descriptor left: who dials is turned away at once, and the device neither spins nor forgets its listener. */
static void test_out_of_descriptors(void **state)
{
	struct pair t;
	struct rlimit before, none;
	int fds[4];

	(void)state;
	pair_open_tcp(&t, 20 * MS, 200 * MS);
	const struct dq_tcp_device *dev = dq_tcp_device_of_const(t.b.dev);
	for (int i = 0; i < 4; i++)
		fds[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
	none = before;
	int lowest = dup(0);
	assert_true(lowest > 0);
	close(lowest);
	none.rlim_cur = (rlim_t)lowest;
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
	for (int i = 0; i < 3; i++) {
		if (i == 2) { /* someone took the spare one */
			close(dev->spare_fd);
			dq_tcp_device_of(t.b.dev)->spare_fd = -1;
			none.rlim_cur = (rlim_t)0;
			assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
		}
		assert_int_equal(connect(fds[i], (const struct sockaddr *)&dev->addr, dev->addr_len), 0);
		if (i < 2)
			PUMP_UNTIL(&t, raw_closed(fds[i]));
	}
	PUMP_UNTIL(&t, dev->listener_off);
	struct pollfd fd = {.fd = t.b.p->event_fd(t.b.dev), .events = POLLIN};
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0); /* poll() itself wants room for its one fd */
	assert_int_equal(poll(&fd, 1, 0), 0);
	assert_true(stats_of(&t.b)->refused_flood >= 2);
	assert_int_equal(send(fds[2], "x", 1, MSG_NOSIGNAL), 1);
	PUMP_UNTIL(&t, raw_closed(fds[2])); /* accepted after all, and it said no hello */
	for (int i = 0; i < 4; i++)
		close(fds[i]);
	still_works(&t);
	pair_close(&t);
}

/* Frames of a peer that holds a valid token, spoiled in every way: its QP may fail, nothing else may happen. */
static void test_frame_fuzz(void **state)
{
	struct pair t;
	struct dq_qp *qp;
	uint64_t seed = 2026;
	static uint8_t stream[64 * 1024];

	(void)state;
	pair_open_tcp(&t, 0, 0);
	struct dq_mem_desc desc = {.addr = t.b.bytes, .len = 65536, .dmabuf_fd = -1, .access = DQ_ACCESS_REMOTE_WRITE};
	struct dq_error err = {0};
	struct dq_mem *mem;
	struct dq_mem_key key;
	assert_int_equal(t.b.p->mem_register(t.b.dev, &desc, &mem, &err), 0);
	t.b.p->mem_key(mem, 0, 1, &key);
	for (int round = 0; round < 1500; round++) {
		forget_log(&t);
		int fd = raw_qp(&t, round % 2 ? DQ_QP_CONTROL : DQ_QP_DATA, &qp);
		size_t n = 0;
		if (round % 2) {
			const struct dq_recv rv = {.wr_id = 1, .mem = t.b.mem, .offset = 65536, .len = 4096};
			assert_int_equal(t.b.p->post_recv(qp, &rv, 1), 1);
		}
		const struct dq_write own = {.mem = t.b.mem, .len = 64};
		assert_int_equal(t.b.p->post_write(qp, &own, 1), 1);
		const int frames = 1 + (int)prng_below(&seed, 8);
		for (int f = 0; f < frames; f++) {
			struct dq_tcp_frame frame = {.type = (uint8_t)(1 + prng_below(&seed, 6)), .len = prng_below(&seed, 3) ? prng_below(&seed, 3000) : 0,
						     .addr = prng_below(&seed, 65536), .key = key.key, .count = prng_below(&seed, 3), .imm = 5};
			if (prng_below(&seed, 8) == 0)
				frame.time = prng_next(&seed);
			if (frame.type >= DQ_TCP_ACK)
				frame.len = 0;
			dq_tcp_frame_put(stream + n, &frame);
			if (prng_below(&seed, 5) == 0)
				stream[n + prng_below(&seed, DQ_TCP_HEADER_BYTES)] ^= (uint8_t)(1u << prng_below(&seed, 8));
			n += DQ_TCP_HEADER_BYTES;
			for (uint32_t k = 0; k < frame.len; k++)
				stream[n++] = (uint8_t)prng_next(&seed);
		}
		for (size_t sent = 0; sent < n;) { /* in pieces, so that frames are cut anywhere */
			const size_t piece = DQ_MIN(n - sent, (size_t)1 + prng_below(&seed, 2000));
			if (send(fd, stream + sent, piece, MSG_NOSIGNAL) < 0)
				break;
			sent += piece;
			pair_poll(&t);
		}
		shutdown(fd, SHUT_WR);
		PUMP_UNTIL(&t, count(&t.b, DQ_WC_FAILED, NULL) == 1); /* at the latest because the stream ended */
		assert_int_equal(t.b.log[t.b.logged - 1].op, DQ_WC_FAILED);
		for (uint32_t i = 0; i < t.b.logged; i++)
			assert_true(t.b.log[i].time_ns <= clock_ns());
		close(fd);
		t.b.p->qp_destroy(qp);
	}
	t.b.p->mem_deregister(mem);
	still_works(&t);
	pair_close(&t);
}

/* A peer that does not care what was acknowledged: its connection waits for this end's polls, nothing is lost or overrun. */
static void test_flood(void **state)
{
	enum { FRAMES = 40000 };
	struct pair t;
	struct dq_qp *qp;
	static uint8_t stream[FRAMES * DQ_TCP_HEADER_BYTES];
	unsigned seen = 0;

	(void)state;
	pair_open_tcp(&t, 0, 0);
	int fd = raw_qp(&t, DQ_QP_DATA, &qp);
	for (uint32_t i = 0; i < FRAMES; i++)
		dq_tcp_frame_put(stream + i * DQ_TCP_HEADER_BYTES, &(struct dq_tcp_frame){.type = DQ_TCP_WRITE, .imm = i});
	const struct dq_tcp_device *dev = dq_tcp_device_of(t.b.dev);
	size_t sent = 0;
	while (seen < FRAMES) {
		struct dq_wc wc[8];
		uint8_t sink[4096];
		if (sent < sizeof stream) {
			ssize_t n = send(fd, stream + sent, sizeof stream - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
			sent += n > 0 ? (size_t)n : 0;
		}
		while (recv(fd, sink, sizeof sink, MSG_DONTWAIT) > 0)
			;
		int n = t.b.p->poll(t.b.dev, wc, 8);
		assert_true(dev->cq_tail - dev->cq_head <= dev->cq_segments + dev->cq_reserve);
		for (int i = 0; i < n; i++) {
			assert_int_equal(wc[i].op, DQ_WC_SEGMENT);
			assert_int_equal(wc[i].imm, seen++);
		}
	}
	close(fd);
	t.b.p->qp_destroy(qp);
	pair_close(&t);
}

/* Longer than any segment may be, although the memory would take it. */
static void test_segment_limit(void **state)
{
	struct pair t;
	struct dq_qp *qp;
	struct dq_mem *mem;
	struct dq_mem_key key;
	struct dq_error err = {0};
	const size_t size = 2 * (size_t)DQ_MAX_SEGMENT_BYTES;
	void *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	const struct dq_mem_desc desc = {.addr = bytes, .len = size, .dmabuf_fd = -1, .access = DQ_ACCESS_REMOTE_WRITE};

	(void)state;
	assert_ptr_not_equal(bytes, MAP_FAILED);
	pair_open_tcp(&t, 0, 0);
	assert_int_equal(t.b.p->mem_register(t.b.dev, &desc, &mem, &err), 0);
	t.b.p->mem_key(mem, 0, 1, &key);
	int fd = raw_qp(&t, DQ_QP_DATA, &qp);
	const struct dq_write own = {.mem = mem, .len = DQ_MAX_SEGMENT_BYTES + 1};
	assert_int_equal(t.b.p->post_write(qp, &own, 1), -EINVAL);
	raw_frame(fd, &(struct dq_tcp_frame){.type = DQ_TCP_WRITE, .len = DQ_MAX_SEGMENT_BYTES + 1, .addr = key.addr, .key = key.key});
	PUMP_UNTIL(&t, count(&t.b, DQ_WC_FAILED, NULL) == 1);
	assert_int_equal(find(&t.b, DQ_WC_FAILED, 0)->status, DQ_WC_PROTOCOL);
	close(fd);
	t.b.p->qp_destroy(qp);
	t.b.p->mem_deregister(mem);
	munmap(bytes, size);
	pair_close(&t);
}

static void test_peer_closes_inside_payload(void **state)
{
	struct pair t;
	struct dq_qp *qp;
	static uint8_t half[30000];

	(void)state;
	pair_open_tcp(&t, 0, 0);
	int fd = raw_qp(&t, DQ_QP_DATA, &qp);
	raw_frame(fd, &(struct dq_tcp_frame){.type = DQ_TCP_WRITE, .len = 60000, .addr = t.b.key.addr, .key = t.b.key.key});
	raw_send(fd, half, sizeof half);
	close(fd);
	PUMP_UNTIL(&t, count(&t.b, DQ_WC_FAILED, NULL) == 1);
	assert_int_equal(find(&t.b, DQ_WC_FAILED, 0)->status, DQ_WC_REMOTE_GONE);
	assert_int_equal(count(&t.b, DQ_WC_SEGMENT, NULL), 0);
	t.b.p->qp_destroy(qp);
	pair_close(&t);
}

/* ---- connecting ---- */

static void test_dial_before_passive_end_is_told(void **state)
{
	struct pair t;
	struct dq_endpoint ea, eb;
	struct dq_error err = {0};

	(void)state;
	pair_open_tcp(&t, 0, 0);
	struct dq_qp *qa = qp_make(&t.a, DQ_QP_DATA, 4, NULL, NULL), *qb = qp_make(&t.b, DQ_QP_DATA, 4, NULL, NULL);
	t.a.p->qp_endpoint(qa, &ea);
	t.b.p->qp_endpoint(qb, &eb);
	assert_int_equal(t.a.p->qp_connect(qa, &eb, true, &err), 0);
	PUMP_UNTIL(&t, dq_tcp_device_of(t.b.dev)->pending_used == 1 && dq_tcp_qp_of(qa)->state == DQ_TCP_QP_HELLO);
	for (int i = 0; i < 100; i++)
		pair_poll(&t);
	assert_int_equal(t.a.logged + t.b.logged, 0);
	assert_int_equal(t.b.p->qp_connect(qb, &ea, false, &err), 0);
	PUMP_UNTIL(&t, count(&t.a, DQ_WC_CONNECTED, NULL) == 1 && count(&t.b, DQ_WC_CONNECTED, NULL) == 1);
	assert_int_equal(dq_tcp_device_of(t.b.dev)->pending_used, 0);
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

static void test_nobody_there(void **state)
{
	struct pair t;
	struct side gone;
	struct dq_endpoint e;
	struct dq_error err = {0};

	(void)state;
	pair_open_tcp(&t, 20 * MS, 100 * MS);
	side_open(&gone, "tcp", "gone", "127.0.0.1", 0, 0);
	struct dq_qp *there = qp_make(&gone, DQ_QP_DATA, 4, NULL, NULL);
	gone.p->qp_endpoint(there, &e);
	gone.p->qp_destroy(there);
	side_close(&gone);
	struct dq_qp *dialing = qp_make(&t.a, DQ_QP_DATA, 4, NULL, NULL), *waiting = qp_make(&t.b, DQ_QP_CONTROL, 4, NULL, NULL);
	const struct dq_recv rv = {.wr_id = 8, .mem = t.b.mem, .len = 64};
	assert_int_equal(t.a.p->post_write(dialing, &(struct dq_write){.wr_id = 1}, 1), -ENOTCONN);
	assert_int_equal(t.b.p->post_recv(waiting, &rv, 1), 1);
	assert_int_equal(t.a.p->qp_connect(dialing, &e, true, &err), 0);
	assert_int_equal(t.b.p->qp_connect(waiting, &e, false, &err), 0);
	PUMP_UNTIL(&t, count(&t.a, DQ_WC_FAILED, NULL) == 1 && count(&t.b, DQ_WC_FAILED, NULL) == 1);
	assert_int_equal(t.a.log[0].status, DQ_WC_REMOTE_GONE);
	assert_int_equal(t.a.log[0].vendor, ECONNREFUSED);
	assert_int_equal(t.b.log[0].op, DQ_WC_RECV);
	assert_int_equal(t.b.log[0].status, DQ_WC_FLUSHED);
	assert_int_equal(t.b.log[0].wr_id, 8);
	assert_int_equal(t.b.log[1].status, DQ_WC_TIMEOUT);
	t.a.p->qp_destroy(dialing);
	t.b.p->qp_destroy(waiting);
	pair_close(&t);
}

static void test_bad_arguments(void **state)
{
	struct pair t;
	struct dq_error err = {0};
	struct dq_device *dev;
	struct dq_qp *qp, *qa, *qb;
	struct dq_mem *mem;
	struct dq_endpoint e;

	(void)state;
	pair_open_tcp(&t, 0, 0);
	const struct dq_provider *p = t.a.p;
	struct dq_device_config cfg = {.name = "x", .address = "example.org"};
	assert_int_equal(p->device_open(&cfg, &dev, &err), -EINVAL);
	assert_non_null(strstr(err.text, "example.org"));
	strcpy(cfg.address, "0.0.0.0");
	assert_int_equal(p->device_open(&cfg, &dev, &err), -EINVAL);
	strcpy(cfg.address, "192.0.2.1"); /* documentation range: of no host */
	assert_int_equal(p->device_open(&cfg, &dev, &err), -EADDRNOTAVAIL);
	assert_non_null(strstr(err.text, "192.0.2.1"));
	struct dq_device_attr attr;
	p->device_query(t.a.dev, &attr);
	strcpy(cfg.address, "127.0.0.1");
	cfg.port = (uint16_t)atoi(strchr(attr.address, ':') + 1);
	assert_int_equal(p->device_open(&cfg, &dev, &err), -EADDRINUSE);

	struct dq_qp_attr qattr = {.kind = DQ_QP_DATA, .send_depth = DQ_TCP_MAX_DEPTH + 1};
	assert_int_equal(p->qp_create(t.a.dev, &qattr, &qp, &err), -EINVAL);

	qp = qp_make(&t.a, DQ_QP_DATA, 4, NULL, NULL);
	p->qp_endpoint(qp, &e);
	struct dq_endpoint bad = e;
	bad.len = 3;
	assert_int_equal(p->qp_connect(qp, &bad, true, &err), -EINVAL);
	bad = e;
	bad.data[0] = 9;
	assert_int_equal(p->qp_connect(qp, &bad, true, &err), -EPROTO);
	bad = e;
	bad.data[1] = DQ_TCP_ENDPOINT_DGRAM;
	assert_int_equal(p->qp_connect(qp, &bad, true, &err), -EINVAL);
	bad = e;
	bad.data[2] = 6;
	assert_int_equal(p->qp_connect(qp, &bad, true, &err), -EAFNOSUPPORT);
	p->qp_destroy(qp);

	int memfd = memfd_create("not-a-dma-buf", MFD_CLOEXEC);
	const struct dq_mem_desc desc = {.len = 4096, .dmabuf_fd = memfd};
	assert_int_equal(p->mem_register(t.a.dev, &desc, &mem, &err), -EINVAL);
	assert_non_null(strstr(err.text, "not a dma-buf"));
	close(memfd);

	qp_pair(&t, DQ_QP_DATA, 2, NULL, NULL, &qa, &qb);
	struct dq_write wr[3] = {write_of(&t.a, &t.b, 0, 0, 8), write_of(&t.a, &t.b, 1, 0, 8), write_of(&t.a, &t.b, 2, 0, 8)};
	assert_int_equal(p->post_write(qa, wr, 3), 2); /* send depth */
	assert_int_equal(p->post_write(qa, wr + 2, 1), 0);
	const struct dq_tcp_device *a = dq_tcp_device_of(t.a.dev);
	t.a.logged = 0;
	const uint64_t guard = clock_ns() + 60000000000u;
	while (a->cq_tail - a->cq_head < 2) { /* done, and not yet polled: they keep their places, or completions could pile up */
		assert_int_equal(p->poll(t.a.dev, NULL, 0), 0);
		side_poll(&t.b);
		assert_true(clock_ns() < guard);
	}
	assert_int_equal(p->post_write(qa, wr + 2, 1), 0);
	PUMP_UNTIL(&t, count(&t.a, DQ_WC_WRITE, NULL) == 2 && count(&t.b, DQ_WC_SEGMENT, NULL) == 2);
	assert_int_equal(p->post_write(qa, wr + 2, 1), 1);
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

static void test_ipv6(void **state)
{
	struct dq_error err = {0};
	struct dq_device_config cfg = {.name = "six", .address = "::1"};
	struct pair t;
	struct dq_device *six;

	(void)state;
	const struct dq_provider *p = dq_provider_find("tcp");
	if (p->device_open(&cfg, &six, &err) == -EADDRNOTAVAIL || err.code == -EAFNOSUPPORT)
		skip(); /* a machine without IPv6 */
	pair_open_tcp(&t, 0, 0);
	p->mem_deregister(t.a.mem);
	p->device_close(t.a.dev);
	p->mem_deregister(t.b.mem);
	p->device_close(t.b.dev);
	t.a.dev = six;
	assert_int_equal(p->device_open(&cfg, &t.b.dev, &err), 0);
	struct side *sides[2] = {&t.a, &t.b};
	for (int s = 0; s < 2; s++) {
		const struct dq_mem_desc desc = {.addr = sides[s]->bytes, .len = MEMORY_BYTES, .dmabuf_fd = -1, .access = DQ_ACCESS_REMOTE_WRITE};
		assert_int_equal(p->mem_register(sides[s]->dev, &desc, &sides[s]->mem, &err), 0);
		p->mem_key(sides[s]->mem, 0, 1, &sides[s]->key);
	}
	struct dq_device_attr attr;
	p->device_query(six, &attr);
	assert_int_equal(strncmp(attr.address, "[::1]:", 6), 0);
	assert_true(attr.up);
	still_works(&t);
	pair_close(&t);
}

/* ---- fence, destroy ---- */

/* The receiving end fences: no byte of its memory changes any more from that very call on, and the peer is told at once. */
static void test_fence_stops_incoming(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;

	(void)state;
	pair_open_tcp(&t, 0, 0);
	for (int turns = 0; turns < 8; turns++) {
		qp_pair(&t, DQ_QP_DATA, 16, NULL, NULL, &qa, &qb);
		forget_log(&t);
		memset(t.a.bytes, 0x5a, MEMORY_BYTES);
		memset(t.b.bytes, 0, MEMORY_BYTES);
		struct dq_write wr[16];
		for (unsigned i = 0; i < 16; i++)
			wr[i] = write_of(&t.a, &t.b, i, i * 65536, 65536);
		assert_int_equal(t.a.p->post_write(qa, wr, 16), 16);
		for (int i = 0; i < turns; i++)
			pair_poll(&t);
		t.b.p->qp_fence(qb);
		memset(t.b.bytes, 0xc3, MEMORY_BYTES);
		PUMP_UNTIL(&t, count(&t.a, DQ_WC_FAILED, NULL) == 1 && count(&t.b, DQ_WC_FAILED, NULL) == 1);
		assert_int_equal(find(&t.a, DQ_WC_FAILED, 0)->status, DQ_WC_REMOTE_GONE);
		for (uint32_t i = 0; i < MEMORY_BYTES; i++)
			if (t.b.bytes[i] != 0xc3)
				fail_msg("byte %u was written after the fence", i);
		qp_pair_destroy(&t, qa, qb);
	}
	pair_close(&t);
}

/* Progress of b without taking its completions. */
#define PUMP_A_ONLY(t, condition)                                                                                             \
	do {                                                                                                                  \
		const uint64_t guard_ = clock_ns() + 60000000000u;                                                            \
		while (!(condition)) {                                                                                        \
			side_poll(&(t)->a);                                                                                   \
			assert_int_equal((t)->b.p->poll((t)->b.dev, NULL, 0), 0);                                             \
			assert_true(clock_ns() < guard_);                                                                     \
		}                                                                                                             \
	} while (0)

/* Completions of a destroyed QP are dropped, those of others stay, in order. */
static void test_destroy_drops_completions(void **state)
{
	struct pair t;
	struct dq_qp *qa[2], *qb[2];
	int mark[2];

	(void)state;
	pair_open_tcp(&t, 0, 0);
	for (int q = 0; q < 2; q++)
		qp_pair_marked(&t, DQ_QP_DATA, 8, &mark[q], &qa[q], &qb[q]);
	forget_log(&t);
	for (uint64_t i = 0; i < 8; i++)
		for (int q = 0; q < 2; q++) {
			const struct dq_write wr = write_of(&t.a, &t.b, i, i * 64, 64);
			assert_int_equal(t.a.p->post_write(qa[q], &wr, 1), 1);
		}
	const struct dq_tcp_device *b = dq_tcp_device_of(t.b.dev);
	PUMP_A_ONLY(&t, b->cq_tail - b->cq_head == 16);
	assert_int_equal(t.b.p->poll(t.b.dev, t.b.log, 1), 1); /* one is taken, of the others some go and some stay */
	t.b.logged = 1;
	t.b.p->qp_destroy(qb[0]);
	PUMP_UNTIL(&t, count(&t.b, DQ_WC_SEGMENT, &mark[1]) == 8);
	unsigned next = 0;
	for (uint32_t i = 0; i < t.b.logged; i++)
		if (t.b.log[i].ctx == &mark[1])
			assert_int_equal(t.b.log[i].imm, next++);
	assert_true(count(&t.b, DQ_WC_SEGMENT, &mark[0]) <= 1);
	t.a.p->qp_destroy(qa[0]);
	t.a.p->qp_destroy(qa[1]);
	t.b.p->qp_destroy(qb[1]);
	pair_close(&t);
}

/* ---- time ---- */

/* The peer's process is there and does nothing: only b's silence tells. */
static void test_frozen_peer_with_work(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;

	(void)state;
	pair_open_tcp(&t, 20 * MS, 200 * MS);
	qp_pair(&t, DQ_QP_DATA, 4, NULL, NULL, &qa, &qb);
	t.a.logged = 0;
	const struct dq_write wr[2] = {write_of(&t.a, &t.b, 1, 0, 64), write_of(&t.a, &t.b, 2, 0, 64)};
	const uint64_t start = clock_ns();
	assert_int_equal(t.a.p->post_write(qa, wr, 2), 2);
	while (count(&t.a, DQ_WC_FAILED, NULL) == 0) {
		side_poll(&t.a);
		assert_true(clock_ns() - start < 60000000000u);
	}
	assert_int_equal(t.a.logged, 3);
	assert_int_equal(t.a.log[0].status, DQ_WC_FLUSHED);
	assert_int_equal(t.a.log[1].status, DQ_WC_FLUSHED);
	assert_int_equal(t.a.log[2].status, DQ_WC_TIMEOUT);
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

/* Nothing is under way, and the control QP still finds the frozen peer; an idle data QP leaves it to that one. */
static void test_frozen_peer_idle(void **state)
{
	struct pair t;
	struct dq_qp *ca, *cb, *da, *db;
	int control;

	(void)state;
	pair_open_tcp(&t, 20 * MS, 5000 * MS);
	qp_pair(&t, DQ_QP_DATA, 4, NULL, NULL, &da, &db);
	qp_pair_marked(&t, DQ_QP_CONTROL, 4, &control, &ca, &cb);
	t.a.logged = 0;
	const uint64_t guard = clock_ns() + 60000000000u;
	while (count(&t.a, DQ_WC_FAILED, NULL) == 0) {
		side_poll(&t.a);
		assert_true(clock_ns() < guard);
	}
	assert_int_equal(t.a.logged, 1);
	assert_int_equal(t.a.log[0].status, DQ_WC_TIMEOUT);
	assert_ptr_equal(t.a.log[0].ctx, &control);
	t.a.p->qp_destroy(ca);
	t.b.p->qp_destroy(cb);
	t.a.p->qp_destroy(da);
	t.b.p->qp_destroy(db);
	pair_close(&t);
}

/* Both ends alive and idle over many heartbeats: nothing fails, and work goes on afterwards. */
static void test_idle_stays_up(void **state)
{
	struct pair t;
	struct dq_qp *ca, *cb, *da, *db;

	(void)state;
	pair_open_tcp(&t, 40 * MS, 400 * MS);
	qp_pair(&t, DQ_QP_DATA, 4, NULL, NULL, &da, &db);
	qp_pair(&t, DQ_QP_CONTROL, 4, NULL, NULL, &ca, &cb);
	forget_log(&t);
	const uint64_t end = clock_ns() + 1000 * MS;
	while (clock_ns() < end) {
		const uint64_t due = DQ_MIN(t.a.p->next_deadline(t.a.dev), t.b.p->next_deadline(t.b.dev));
		struct pollfd fds[2] = {{.fd = t.a.p->event_fd(t.a.dev), .events = POLLIN}, {.fd = t.b.p->event_fd(t.b.dev), .events = POLLIN}};
		if (!t.a.p->arm(t.a.dev) && !t.b.p->arm(t.b.dev))
			poll(fds, 2, due > clock_ns() ? (int)((due - clock_ns()) / MS) + 1 : 0);
		pair_poll(&t);
	}
	assert_int_equal(t.a.logged, 0);
	assert_int_equal(t.b.logged, 0);
	const struct dq_write wr = write_of(&t.a, &t.b, 1, 0, 64);
	assert_int_equal(t.a.p->post_write(da, &wr, 1), 1);
	PUMP_UNTIL(&t, count(&t.a, DQ_WC_WRITE, NULL) == 1 && count(&t.b, DQ_WC_SEGMENT, NULL) == 1);
	t.a.p->qp_destroy(ca);
	t.b.p->qp_destroy(cb);
	t.a.p->qp_destroy(da);
	t.b.p->qp_destroy(db);
	pair_close(&t);
}

/* A heartbeat is answered, also on a data QP that has nothing to say itself; an answer is not. */
static void test_heartbeat_is_answered(void **state)
{
	struct pair t;
	struct dq_qp *qp;
	uint8_t header[DQ_TCP_HEADER_BYTES];
	struct dq_tcp_frame answer = {0};

	(void)state;
	pair_open_tcp(&t, 0, 0);
	int fd = raw_qp(&t, DQ_QP_DATA, &qp);
	raw_frame(fd, &(struct dq_tcp_frame){.type = DQ_TCP_HEARTBEAT, .flags = DQ_TCP_REPLY});
	raw_frame(fd, &(struct dq_tcp_frame){.type = DQ_TCP_HEARTBEAT});
	PUMP_UNTIL(&t, recv(fd, header, sizeof header, MSG_DONTWAIT) == (ssize_t)sizeof header);
	dq_tcp_frame_get(header, &answer);
	assert_int_equal(answer.type, DQ_TCP_HEARTBEAT);
	assert_int_equal(answer.flags, DQ_TCP_REPLY);
	for (int i = 0; i < 100; i++)
		pair_poll(&t);
	assert_true(recv(fd, header, sizeof header, MSG_DONTWAIT) < 0 && errno == EAGAIN);
	close(fd);
	t.b.p->qp_destroy(qp);
	pair_close(&t);
}

/* A peer that answers heartbeats and never acknowledges: the operation's own deadline finds it. */
static void test_operation_deadline(void **state)
{
	struct pair t;
	struct dq_qp *qp;

	(void)state;
	pair_open_tcp(&t, 20 * MS, 300 * MS);
	int fd = raw_qp(&t, DQ_QP_DATA, &qp);
	const struct dq_write wr = {.wr_id = 4, .mem = t.b.mem, .len = 64};
	assert_int_equal(t.b.p->post_write(qp, &wr, 1), 1);
	t.b.logged = 0;
	unsigned answered = 0;
	uint8_t buffer[4096];
	size_t have = 0, skip = 0;
	const uint64_t guard = clock_ns() + 60000000000u;
	while (count(&t.b, DQ_WC_FAILED, NULL) == 0) {
		side_poll(&t.b);
		ssize_t n = recv(fd, buffer + have, sizeof buffer - have, MSG_DONTWAIT);
		if (n > 0)
			have += (size_t)n;
		while (have >= DQ_TCP_HEADER_BYTES) {
			struct dq_tcp_frame f;
			dq_tcp_frame_get(buffer, &f);
			skip = DQ_TCP_HEADER_BYTES + f.len;
			if (have < skip)
				break;
			if (f.type == DQ_TCP_HEARTBEAT) {
				raw_frame(fd, &(struct dq_tcp_frame){.type = DQ_TCP_HEARTBEAT, .flags = DQ_TCP_REPLY});
				answered++;
			}
			memmove(buffer, buffer + skip, have - skip);
			have -= skip;
		}
		assert_true(clock_ns() < guard);
	}
	assert_int_equal(find(&t.b, DQ_WC_FAILED, 0)->status, DQ_WC_TIMEOUT);
	assert_true(answered > 0);
	close(fd);
	t.b.p->qp_destroy(qp);
	pair_close(&t);
}

/* ---- datagrams ---- */

/* Noise from strangers is dropped. */
static void test_datagram_noise(void **state)
{
	struct pair t;
	struct dq_dgram *da, *db;
	struct dq_error err = {0};
	struct dq_endpoint to;
	const char *text = "probe";

	(void)state;
	pair_open_tcp(&t, 0, 0);
	const struct dq_provider *p = t.a.p;
	assert_int_equal(p->dgram_open(t.a.dev, &da, &err), 0);
	assert_int_equal(p->dgram_open(t.b.dev, &db, &err), 0);
	p->dgram_endpoint(db, &to);
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	struct sockaddr_in addr = {.sin_family = AF_INET, .sin_port = htons(dq_le16_get(to.data + 4))};
	memcpy(&addr.sin_addr, to.data + 8, 4);
	uint64_t seed = 5;
	for (int i = 0; i < 100; i++) {
		uint8_t noise[200];
		for (unsigned k = 0; k < sizeof noise; k++)
			noise[k] = (uint8_t)prng_next(&seed);
		const size_t len = prng_below(&seed, sizeof noise + 1);
		if (i % 2) {
			const struct dq_tcp_dgram_header h = {.len = (uint16_t)prng_below(&seed, 300)};
			dq_tcp_dgram_put(noise, &h);
		}
		assert_true(sendto(fd, noise, len, 0, (struct sockaddr *)&addr, sizeof addr) >= 0);
	}
	close(fd);
	assert_int_equal(p->dgram_send(da, &to, 0, NULL, 7, text, 5), 0);
	for (bool got = false; !got;) {
		struct dq_dgram_event ev[8];
		int n = p->dgram_poll(db, ev, 8);
		for (int i = 0; i < n; i++) {
			if (ev[i].len == 5 && memcmp(ev[i].data, text, 5) == 0)
				got = true;
			assert_true(ev[i].len <= 128);
		}
		n = p->dgram_poll(da, ev, 8);
	}
	to.data[1] = DQ_TCP_ENDPOINT_QP;
	assert_int_equal(p->dgram_send(da, &to, 0, NULL, 1, text, 5), -EINVAL);
	p->dgram_close(da);
	p->dgram_close(db);
	pair_close(&t);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_access_violations),
		cmocka_unit_test(test_deregister_under_write),
		cmocka_unit_test(test_deregister_posted),
		cmocka_unit_test(test_send_without_receive),
		cmocka_unit_test(test_garbage_on_listener),
		cmocka_unit_test(test_token),
		cmocka_unit_test(test_version_is_told),
		cmocka_unit_test(test_silent_connections),
		cmocka_unit_test(test_out_of_descriptors),
		cmocka_unit_test(test_frame_fuzz),
		cmocka_unit_test(test_flood),
		cmocka_unit_test(test_segment_limit),
		cmocka_unit_test(test_peer_closes_inside_payload),
		cmocka_unit_test(test_dial_before_passive_end_is_told),
		cmocka_unit_test(test_nobody_there),
		cmocka_unit_test(test_bad_arguments),
		cmocka_unit_test(test_ipv6),
		cmocka_unit_test(test_fence_stops_incoming),
		cmocka_unit_test(test_destroy_drops_completions),
		cmocka_unit_test(test_frozen_peer_with_work),
		cmocka_unit_test(test_frozen_peer_idle),
		cmocka_unit_test(test_idle_stays_up),
		cmocka_unit_test(test_heartbeat_is_answered),
		cmocka_unit_test(test_operation_deadline),
		cmocka_unit_test(test_datagram_noise),
	};
	return cmocka_run_group_tests_name("tcp provider", tests, NULL, NULL);
}
