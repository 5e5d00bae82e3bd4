/* SPDX-License-Identifier: Apache-2.0 */
/* Two devices of one provider in one thread, and what was polled from each. For tests; see transport_env.h. */
#ifndef DQ_TESTS_TRANSPORT_PAIR_H
#define DQ_TESTS_TRANSPORT_PAIR_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "provider/link.h"
#include "prng.h"
#include "provider/provider.h"
#include "transport_env.h"

#define LOG_MAX 65536u
#define MEMORY_BYTES (1u << 20)
#define HALF (MEMORY_BYTES / 2)
#define PATIENCE_NS 60000000000u /* a test that waits longer for what must come has failed */

struct side {
	const struct dq_provider *p;
	struct dq_device *dev;
	uint8_t *bytes;                /* MEMORY_BYTES, registered with remote write */
	struct dq_mem *mem;
	struct dq_mem_key key;
	struct dq_wc *log;             /* everything polled, in order */
	uint32_t logged;
};

struct pair {
	struct side a, b;
};

static inline uint64_t clock_ns(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static inline void side_open(struct side *s, const char *provider, const char *name, const char *address, uint64_t heartbeat_ns,
			     uint64_t deadline_ns)
{
	struct dq_error err = {0};
	struct dq_device_config cfg = {.heartbeat_ns = heartbeat_ns, .deadline_ns = deadline_ns};

	memset(s, 0, sizeof *s);
	snprintf(cfg.name, sizeof cfg.name, "%s", name);
	snprintf(cfg.address, sizeof cfg.address, "%s", address);
	s->p = dq_provider_find(provider);
	assert_non_null(s->p);
	if (s->p->device_open(&cfg, &s->dev, &err))
		fail_msg("%s", err.text);
	s->bytes = calloc(1, MEMORY_BYTES);
	s->log = calloc(LOG_MAX, sizeof *s->log);
	assert_true(s->bytes && s->log);
	const struct dq_mem_desc desc = {.addr = s->bytes, .len = MEMORY_BYTES, .dmabuf_fd = -1, .access = DQ_ACCESS_REMOTE_WRITE};
	if (s->p->mem_register(s->dev, &desc, &s->mem, &err))
		fail_msg("%s", err.text);
	assert_int_equal(s->p->mem_key(s->mem, 0, MEMORY_BYTES, &s->key), 0);
}

static inline void side_close(struct side *s)
{
	s->p->mem_deregister(s->mem);
	s->p->device_close(s->dev);
	free(s->bytes);
	free(s->log);
}

/* On the devices that the environment names. */
static inline void pair_open(struct pair *t)
{
	side_open(&t->a, transport_provider(), "a", transport_address(0), 0, 0);
	side_open(&t->b, transport_provider(), "b", transport_address(1), 0, 0);
}

/* Of the tcp provider on loopback, whatever the environment says: for tests of what only tcp has. */
static inline void pair_open_tcp(struct pair *t, uint64_t heartbeat_ns, uint64_t deadline_ns)
{
	side_open(&t->a, "tcp", "a", "127.0.0.1", heartbeat_ns, deadline_ns);
	side_open(&t->b, "tcp", "b", "127.0.0.1", heartbeat_ns, deadline_ns);
}

static inline void pair_close(struct pair *t)
{
	side_close(&t->a);
	side_close(&t->b);
}

static inline unsigned side_poll(struct side *s)
{
	assert_true(s->logged + 64 <= LOG_MAX);
	int n = s->p->poll(s->dev, s->log + s->logged, 64);
	assert_true(n >= 0 && n <= 64);
	s->logged += (unsigned)n;
	return (unsigned)n;
}

static inline unsigned pair_poll(struct pair *t)
{
	const unsigned n = side_poll(&t->a);
	return n + side_poll(&t->b);
}

/* Nothing came for a while: leave the CPU to whoever shall do the work. Where time is simulated, nothing else moves the clock. */
static inline void pair_rest(struct pair *t)
{
	struct pollfd fds[2] = {{.fd = t->a.p->event_fd(t->a.dev), .events = POLLIN}, {.fd = t->b.p->event_fd(t->b.dev), .events = POLLIN}};
	if (!t->a.p->arm(t->a.dev) && !t->b.p->arm(t->b.dev))
		poll(fds, 2, 1);
}

/* How many completions of an operation were polled, of a QP's ctx (NULL: any). */
static inline unsigned count(const struct side *s, enum dq_wc_op op, const void *ctx)
{
	unsigned n = 0;
	for (uint32_t i = 0; i < s->logged; i++)
		n += s->log[i].op == op && (!ctx || s->log[i].ctx == ctx);
	return n;
}

static inline const struct dq_wc *find(const struct side *s, enum dq_wc_op op, unsigned nth)
{
	for (uint32_t i = 0; i < s->logged; i++)
		if (s->log[i].op == op && nth-- == 0)
			return &s->log[i];
	fail_msg("no such completion: op %d", (int)op);
	return NULL;
}

/* Poll both until the condition holds; a test that would hang fails after a minute. */
#define PUMP_UNTIL(t, condition)                                                                                              \
	do {                                                                                                                  \
		const uint64_t guard_ = clock_ns() + PATIENCE_NS;                                                            \
		unsigned empty_ = 0;                                                                                          \
		while (!(condition)) {                                                                                        \
			if (pair_poll(t))                                                                                     \
				empty_ = 0;                                                                                   \
			else if (++empty_ % 64 == 0)                                                                          \
				pair_rest(t);                                                                                 \
			if (clock_ns() > guard_)                                                                              \
				fail_msg("not reached: %s", #condition);                                                      \
		}                                                                                                             \
	} while (0)

/* Of the QPs that are made: where it is short a peer that is gone is noticed soon, where it is long one that is late is not taken
 * for gone. 0: the provider's. */
static uint64_t qp_ack_timeout_ns __attribute__((unused));

static inline struct dq_qp *qp_make(struct side *s, enum dq_qp_kind kind, uint32_t depth, struct dq_link *link, void *ctx)
{
	struct dq_error err = {0};
	struct dq_qp *qp = NULL;
	const struct dq_qp_attr attr = {.ctx = ctx, .kind = kind, .send_depth = depth, .recv_depth = depth, .link = link,
					 .retries = 7, .ack_timeout_ns = qp_ack_timeout_ns};
	if (s->p->qp_create(s->dev, &attr, &qp, &err))
		fail_msg("%s", err.text);
	return qp;
}

static inline void qp_join(struct side *from, struct dq_qp *dialing, struct side *to, struct dq_qp *passive)
{
	struct dq_error err = {0};
	struct dq_endpoint ea, eb;
	from->p->qp_endpoint(dialing, &ea);
	to->p->qp_endpoint(passive, &eb);
	if (to->p->qp_connect(passive, &ea, false, &err) || from->p->qp_connect(dialing, &eb, true, &err))
		fail_msg("%s", err.text);
}

/* Connect two QPs of a pair; both CONNECTED are polled. */
static inline void pair_join(struct pair *t, struct dq_qp *qa, struct dq_qp *qb)
{
	const unsigned before = count(&t->a, DQ_WC_CONNECTED, NULL) + count(&t->b, DQ_WC_CONNECTED, NULL);
	qp_join(&t->a, qa, &t->b, qb);
	PUMP_UNTIL(t, count(&t->a, DQ_WC_CONNECTED, NULL) + count(&t->b, DQ_WC_CONNECTED, NULL) == before + 2);
}

/* A connected pair of QPs. */
static inline void qp_pair(struct pair *t, enum dq_qp_kind kind, uint32_t depth, struct dq_link *ab, struct dq_link *ba, struct dq_qp **qa,
			   struct dq_qp **qb)
{
	*qa = qp_make(&t->a, kind, depth, ab, NULL);
	*qb = qp_make(&t->b, kind, depth, ba, NULL);
	pair_join(t, *qa, *qb);
}

/* The same, with a mark in the completions of both. */
static inline void qp_pair_marked(struct pair *t, enum dq_qp_kind kind, uint32_t depth, void *mark, struct dq_qp **qa, struct dq_qp **qb)
{
	*qa = qp_make(&t->a, kind, depth, NULL, mark);
	*qb = qp_make(&t->b, kind, depth, NULL, mark);
	pair_join(t, *qa, *qb);
}

static inline void qp_pair_destroy(struct pair *t, struct dq_qp *qa, struct dq_qp *qb)
{
	t->a.p->qp_destroy(qa);
	t->b.p->qp_destroy(qb);
}

/* One write of a's memory into b's, same offset at both. */
static inline struct dq_write write_of(const struct side *from, const struct side *to, uint64_t id, uint64_t offset, uint32_t len)
{
	return (struct dq_write){.wr_id = id, .mem = from->mem, .offset = offset, .remote_addr = to->key.addr + offset,
				 .remote_key = to->key.key, .len = len, .imm = (uint32_t)id};
}

static inline void fill(uint8_t *at, uint32_t n, uint64_t seed)
{
	for (; n >= 8; at += 8, n -= 8) {
		const uint64_t v = prng_next(&seed);
		memcpy(at, &v, 8);
	}
	for (; n; n--)
		*at++ = (uint8_t)prng_next(&seed);
}

static inline struct side *side_of(struct pair *t, int end)
{
	return end ? &t->b : &t->a;
}

static inline void forget_log(struct pair *t)
{
	t->a.logged = t->b.logged = 0;
}

/* A while in which nothing is expected to come. */
static inline void pump_rounds(struct pair *t, int rounds)
{
	for (int i = 0; i < rounds; i++)
		if (pair_poll(t) == 0)
			pair_rest(t);
}

/* Something to send that needs no memory. */
static inline int post_nothing(struct side *s, enum dq_qp_kind kind, struct dq_qp *qp)
{
	const struct dq_write wr = {.wr_id = 0xdead};
	const struct dq_send sd = {.wr_id = 0xdead};
	return kind == DQ_QP_DATA ? s->p->post_write(qp, &wr, 1) : s->p->post_send(qp, &sd, 1);
}

/* The peer's QP is gone or in error. Who only waits may never learn it; who sends does. */
static inline void expect_peer_lost(struct pair *t, struct side *s, enum dq_qp_kind kind, struct dq_qp *qp, const void *mark)
{
	side_poll(s);
	if (count(s, DQ_WC_FAILED, mark) == 0) {
		const int rc = post_nothing(s, kind, qp);
		assert_true(rc == 1 || rc == -EIO);
	}
	PUMP_UNTIL(t, count(s, DQ_WC_FAILED, mark) == 1);
	for (uint32_t i = 0; i < s->logged; i++)
		if (s->log[i].op == DQ_WC_FAILED && (!mark || s->log[i].ctx == mark))
			assert_true(s->log[i].status == DQ_WC_REMOTE_GONE || s->log[i].status == DQ_WC_TIMEOUT);
	assert_int_equal(post_nothing(s, kind, qp), -EIO);
}

/* One write each way of len bytes from and to offset, and nothing else. Each side sends its lower half to the peer's upper. */
static inline void exchange(struct pair *t, struct dq_qp *qa, struct dq_qp *qb, uint32_t len, uint32_t skew)
{
	struct dq_qp *qps[2] = {qa, qb};

	forget_log(t);
	for (int end = 0; end < 2; end++) {
		struct side *from = side_of(t, end), *to = side_of(t, !end);
		fill(from->bytes + skew, len, len + (uint64_t)end);
		memset(to->bytes + HALF, 0, HALF);
		const struct dq_write wr = {.wr_id = len, .mem = from->mem, .offset = skew, .len = len, .imm = ~len,
					    .remote_addr = to->key.addr + HALF + 2 * skew, .remote_key = to->key.key};
		assert_int_equal(from->p->post_write(qps[end], &wr, 1), 1);
	}
	PUMP_UNTIL(t, t->a.logged == 2 && t->b.logged == 2);
	for (int end = 0; end < 2; end++) {
		const struct side *from = side_of(t, !end), *to = side_of(t, end);
		const struct dq_wc *segment = find(to, DQ_WC_SEGMENT, 0), *done = find(to, DQ_WC_WRITE, 0);
		assert_int_equal(segment->status, DQ_WC_SUCCESS);
		assert_int_equal(segment->len, len);
		assert_int_equal(segment->imm, ~len);
		assert_int_equal(done->status, DQ_WC_SUCCESS);
		assert_int_equal(done->wr_id, len);
		assert_memory_equal(from->bytes + skew, to->bytes + HALF + 2 * skew, len);
		for (uint32_t k = 0; k < 2 * skew; k++)
			assert_int_equal(to->bytes[HALF + k], 0);
		for (uint32_t k = 2 * skew + len; k < DQ_MIN(2 * skew + len + 64, HALF); k++)
			assert_int_equal(to->bytes[HALF + k], 0);
	}
}

#endif
