/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What provider.h promises of devices, memory and queue pairs, over whichever provider and devices the environment names
 * (transport_env.h). What only one provider has is in its own test. Where transports may differ, provider.h says so, and so does
 * the test.
 */
#include "transport_pair.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

static uint64_t random_seed; /* of the tests that draw another seed each time */

static uint32_t checksum(const uint8_t *at, uint32_t n) /* FNV-1a */
{
	uint32_t h = 2166136261u;
	for (uint32_t i = 0; i < n; i++)
		h = (h ^ at[i]) * 16777619u;
	return h;
}

/* ---- device ---- */

static void test_device(void **state)
{
	struct pair t;
	struct dq_device_attr attr;
	struct dq_device_event event;
	struct dq_error err = {0};

	(void)state;
	pair_open(&t);
	const struct dq_provider *p = t.a.p;
	assert_string_equal(p->name, transport_provider());
	for (int end = 0; end < 2; end++) {
		struct side *s = side_of(&t, end);
		memset(&attr, 0xff, sizeof attr);
		p->device_query(s->dev, &attr);
		assert_true(attr.up);
		assert_in_range(attr.mtu, 256, 65536);
		assert_in_range(attr.header_bytes, 1, 256);
		assert_true(attr.rate_bps == 0 ? transport_is("tcp") : attr.rate_bps >= 1000000u && attr.rate_bps <= 10000000000000u);
		assert_true(attr.line_rate_bps == 0 || attr.line_rate_bps >= 1000000u);
		assert_true(attr.max_qps >= 64);
		assert_true(attr.max_send_depth >= 256);
		assert_true(attr.max_segment_bytes >= 1u << 20);
		assert_true(attr.noise_ns < 1000000000u);
		assert_true(attr.address[0] != 0 && memchr(attr.address, 0, sizeof attr.address));
		assert_true(p->event_fd(s->dev) >= 0);
		if (p->device_event)
			assert_int_equal(p->device_event(s->dev, &event), 0);
	}
	/* What the configuration says about the link is not asked of the device. */
	struct dq_device_config cfg = {.name = "told", .rate_bps = 123456789, .mtu = 1024};
	struct dq_device *told;
	snprintf(cfg.address, sizeof cfg.address, "%s", transport_address(0));
	assert_int_equal(p->device_open(&cfg, &told, &err), 0);
	p->device_query(told, &attr);
	assert_int_equal(attr.rate_bps, 123456789);
	p->device_close(told);
	pair_close(&t);
}

static void test_device_that_is_not_there(void **state)
{
	static const char *const names[] = {"no-such-device", "", "mlx5_99", "a name that is much longer than any device has, of 63 bytes at most"};
	const struct dq_provider *p = dq_provider_find(transport_provider());

	(void)state;
	assert_null(dq_provider_find("carrier-pigeon"));
	assert_null(dq_provider_find(""));
	for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
		struct dq_device_config cfg = {.name = "x"};
		struct dq_device *dev = NULL;
		struct dq_error err = {0};
		snprintf(cfg.address, sizeof cfg.address, "%s", names[i]);
		assert_true(p->device_open(&cfg, &dev, &err) < 0);
		assert_null(dev);
		assert_true(err.code < 0);
		assert_non_null(strstr(err.text, cfg.address));
	}
}

static void test_readdress(void **state)
{
	struct pair t;
	struct dq_device_attr attr;
	struct dq_qp *qa, *qb, *na, *nb;
	struct dq_error err = {0};

	(void)state;
	pair_open(&t);
	if (!t.a.p->device_readdress) { /* this provider has one address for life */
		pair_close(&t);
		skip();
	}
	t.a.p->device_query(t.a.dev, &attr);
	qp_pair(&t, DQ_QP_DATA, 4, NULL, NULL, &qa, &qb);
	assert_true(t.a.p->device_readdress(t.a.dev, "of nowhere", &err) < 0);
	assert_non_null(strstr(err.text, "of nowhere"));
	assert_true(t.a.p->device_readdress(t.a.dev, "2001:db8::1234", &err) < 0); /* well formed, and not here */
	assert_int_equal(t.a.p->device_readdress(t.a.dev, attr.address, &err), 0);
	exchange(&t, qa, qb, 10000, 0); /* what exists stays */
	qp_pair(&t, DQ_QP_DATA, 4, NULL, NULL, &na, &nb);
	exchange(&t, na, nb, 10000, 0);
	qp_pair_destroy(&t, qa, qb);
	qp_pair_destroy(&t, na, nb);
	pair_close(&t);
}

/* ---- connecting ---- */

/* Either end may dial, either may be told of the other first, and then both send. */
static void test_connect(void **state)
{
	struct pair t;

	(void)state;
	pair_open(&t);
	for (int variant = 0; variant < 8; variant++) {
		const int dialing = variant & 1, first = variant >> 1 & 1;
		const enum dq_qp_kind kind = variant & 4 ? DQ_QP_CONTROL : DQ_QP_DATA;
		struct dq_qp *qps[2];
		struct dq_endpoint ends[2];
		struct dq_error err = {0};
		int marks[2];
		forget_log(&t);
		for (int end = 0; end < 2; end++) {
			struct side *s = side_of(&t, end);
			qps[end] = qp_make(s, kind, 4, NULL, &marks[end]);
			s->p->qp_endpoint(qps[end], &ends[end]);
			assert_in_range(ends[end].len, 1, DQ_ENDPOINT_MAX);
			assert_int_equal(post_nothing(s, kind, qps[end]), -ENOTCONN);
		}
		for (int step = 0; step < 2; step++) {
			const int end = step ? !first : first;
			struct side *s = side_of(&t, end);
			if (s->p->qp_connect(qps[end], &ends[!end], end == dialing, &err))
				fail_msg("%s", err.text);
			assert_int_equal(s->p->qp_connect(qps[end], &ends[!end], end == dialing, &err), -EISCONN);
			pump_rounds(&t, 5);
			if (step == 0)
				assert_int_equal(side_of(&t, !first)->logged, 0);
		}
		PUMP_UNTIL(&t, count(&t.a, DQ_WC_CONNECTED, &marks[0]) == 1 && count(&t.b, DQ_WC_CONNECTED, &marks[1]) == 1);
		assert_int_equal(t.a.logged + t.b.logged, 2);
		assert_int_equal(t.a.log[0].status, DQ_WC_SUCCESS);
		assert_int_equal(t.b.log[0].status, DQ_WC_SUCCESS);
		if (kind == DQ_QP_DATA)
			exchange(&t, qps[0], qps[1], 5000, 0);
		qp_pair_destroy(&t, qps[0], qps[1]);
	}
	pair_close(&t);
}

/* QPs are made and connected by a thread of their own, where the provider says so, while another polls and carries data. */
struct maker {
	struct pair *pair;
	struct dq_qp *qps[2];          /* the maker's while `made` is false */
	atomic_bool made, stop;
	bool failed;
};

static void *maker_run(void *arg)
{
	struct maker *m = arg;

	for (unsigned round = 0; !m->failed && !atomic_load(&m->stop);) {
		const struct timespec rest = {.tv_nsec = 20000}; /* for the other thread, where there is one CPU */
		if (atomic_load(&m->made)) {
			nanosleep(&rest, NULL);
			continue;
		}
		struct dq_endpoint at[2];
		const struct dq_qp_attr attr = {.ctx = m, .kind = DQ_QP_DATA, .send_depth = 4, .recv_depth = 4, .retries = 7};
		for (int end = 0; end < 2 && !m->failed; end++) {
			struct side *s = side_of(m->pair, end);
			m->failed |= s->p->qp_create(s->dev, &attr, &m->qps[end], NULL) != 0;
			if (!m->failed)
				s->p->qp_endpoint(m->qps[end], &at[end]);
		}
		const int dial = (int)(round++ % 2);
		for (int step = 0; step < 2 && !m->failed; step++) { /* the one that waits is told first */
			const int end = step ? dial : !dial;
			struct side *s = side_of(m->pair, end);
			m->failed |= s->p->qp_connect(m->qps[end], &at[!end], end == dial, NULL) != 0;
		}
		atomic_store(&m->made, true);
	}
	return NULL;
}

static void test_connect_from_another_thread(void **state)
{
	enum { ROUNDS = 60 };
	/* Should a check fail, the thread goes on: what it uses stays. */
	static struct pair t;
	static struct maker m = {.pair = &t};
	struct dq_qp *qa, *qb;
	pthread_t thread;
	int busy;
	unsigned rounds = 0, connected = 0, carried = 0, posted = 0, done = 0, seen = 0;

	(void)state;
	/* Short heartbeats: the poller looks at the QPs in the making again and again. */
	side_open(&t.a, transport_provider(), "a", transport_address(0), 1000000, 0);
	side_open(&t.b, transport_provider(), "b", transport_address(1), 1000000, 0);
	if (!t.a.p->qp_any_thread) {
		pair_close(&t);
		skip();
	}
	qp_pair_marked(&t, DQ_QP_DATA, 4, &busy, &qa, &qb);
	assert_int_equal(pthread_create(&thread, NULL, maker_run, &m), 0);
	const uint64_t guard = clock_ns() + PATIENCE_NS;
	while (rounds < ROUNDS || done < posted || seen < posted) {
		if (rounds < ROUNDS && posted == done && posted == seen) {
			const struct dq_write wr = write_of(&t.a, &t.b, posted, 0, 2000);
			assert_int_equal(t.a.p->post_write(qa, &wr, 1), 1);
			posted++;
		}
		unsigned polled = 0;
		for (int end = 0; end < 2; end++) {
			struct dq_wc wc[8];
			const int n = side_of(&t, end)->p->poll(side_of(&t, end)->dev, wc, 8);
			polled += (unsigned)n;
			for (int i = 0; i < n; i++) {
				assert_int_equal(wc[i].status, DQ_WC_SUCCESS);
				if (wc[i].ctx == &busy) {
					done += wc[i].op == DQ_WC_WRITE;
					seen += wc[i].op == DQ_WC_SEGMENT;
				} else {
					assert_ptr_equal(wc[i].ctx, &m);
					connected += wc[i].op == DQ_WC_CONNECTED;
					carried += wc[i].op != DQ_WC_CONNECTED;
				}
			}
		}
		if (connected == 2 && atomic_load(&m.made)) { /* both ends write at once */
			connected = 0;
			for (int end = 0; end < 2; end++) {
				const struct dq_write wr = write_of(side_of(&t, end), side_of(&t, !end), 1, 8192, 3000);
				assert_int_equal(side_of(&t, end)->p->post_write(m.qps[end], &wr, 1), 1);
			}
		}
		if (carried == 4) {
			carried = 0;
			rounds++;
			qp_pair_destroy(&t, m.qps[0], m.qps[1]);
			if (rounds == ROUNDS)
				atomic_store(&m.stop, true);
			else
				atomic_store(&m.made, false);
		}
		if (polled == 0)
			pair_rest(&t);
		assert_true(clock_ns() < guard);
	}
	pthread_join(thread, NULL);
	assert_false(m.failed);
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

/* ---- memory ---- */

static void test_registration(void **state)
{
	enum { MANY = 200 };
	struct pair t;
	struct dq_mem *mem, *many[MANY];
	struct dq_mem_key key, keys[MANY];
	struct dq_error err = {0};
	struct dq_device_attr attr;
	static uint8_t page[4096 * 2];

	(void)state;
	pair_open(&t);
	const struct dq_provider *p = t.a.p;
	struct dq_mem_desc desc = {.addr = page, .len = 0, .dmabuf_fd = -1};
	assert_int_equal(p->mem_register(t.a.dev, &desc, &mem, &err), -EINVAL);
	assert_non_null(strstr(err.text, "0 bytes"));
	desc = (struct dq_mem_desc){.addr = NULL, .len = 5, .dmabuf_fd = -1};
	assert_int_equal(p->mem_register(t.a.dev, &desc, &mem, &err), -EINVAL);
	desc = (struct dq_mem_desc){.addr = page, .len = UINT64_MAX - 5, .dmabuf_fd = -1};
	assert_int_equal(p->mem_register(t.a.dev, &desc, &mem, &err), -EINVAL); /* wraps around */
	err.text[0] = 0;
	const int memfd = memfd_create("not-a-dma-buf", MFD_CLOEXEC);
	assert_true(memfd >= 0);
	desc = (struct dq_mem_desc){.len = 4096, .dmabuf_fd = memfd};
	assert_true(p->mem_register(t.a.dev, &desc, &mem, &err) < 0);
	assert_true(err.text[0] != 0);
	close(memfd);
	p->device_query(t.a.dev, &attr);
	desc = (struct dq_mem_desc){.len = 4096, .dmabuf_fd = memfd};
	assert_true(p->mem_register(t.a.dev, &desc, &mem, &err) < 0); /* closed */

	/* Keys: inside, at the edges, outside. */
	assert_int_equal(p->mem_key(t.a.mem, 0, MEMORY_BYTES, &key), 0);
	assert_int_equal(p->mem_key(t.a.mem, MEMORY_BYTES - 1, 1, &key), 0);
	assert_int_equal(key.addr, t.a.key.addr + MEMORY_BYTES - 1);
	assert_int_equal(p->mem_key(t.a.mem, 0, MEMORY_BYTES + 1, &key), -ERANGE);
	assert_int_equal(p->mem_key(t.a.mem, MEMORY_BYTES, 1, &key), -ERANGE);
	assert_int_equal(p->mem_key(t.a.mem, UINT64_MAX, 2, &key), -ERANGE);
	assert_int_equal(p->mem_key(t.a.mem, 1, UINT64_MAX, &key), -ERANGE);
	assert_int_equal(p->mem_flush(t.a.mem, 0), 0);
	assert_int_equal(p->mem_flush(t.a.mem, MEMORY_BYTES - 1), 0);

	/* Also the same bytes many times over, at odd addresses; each has a key of its own. */
	for (int i = 0; i < MANY; i++) {
		desc = (struct dq_mem_desc){.addr = page + i, .len = 4096 - (uint64_t)i, .dmabuf_fd = -1, .access = DQ_ACCESS_REMOTE_WRITE};
		if (p->mem_register(t.a.dev, &desc, &many[i], &err))
			fail_msg("%s", err.text);
		assert_int_equal(p->mem_key(many[i], 0, 1, &keys[i]), 0);
		for (int k = 0; k < i; k++)
			assert_true(keys[k].key != keys[i].key);
	}
	for (int i = 0; i < MANY; i++)
		p->mem_deregister(many[i]);
	pair_close(&t);
}

/* Memory registered in pieces: any range of half a piece has one key, and is a source. */
static void test_registration_in_pieces(void **state)
{
	enum { PIECE = 64 * 1024, RANGE = PIECE / 2 };
	struct pair t;
	struct dq_mem *mem[2];
	struct dq_qp *qa, *qb;
	struct dq_error err = {0};
	uint64_t seed = random_seed;

	(void)state;
	pair_open(&t);
	for (int end = 0; end < 2; end++) { /* other devices, of the same name and address, that register in pieces */
		struct side *s = side_of(&t, end);
		struct dq_device_config cfg = {.name = "pieces", .max_registration_bytes = PIECE};
		snprintf(cfg.address, sizeof cfg.address, "%s", transport_address(end));
		s->p->mem_deregister(s->mem);
		s->p->device_close(s->dev);
		if (s->p->device_open(&cfg, &s->dev, &err))
			fail_msg("%s", err.text);
		const struct dq_mem_desc desc = {.addr = s->bytes, .len = MEMORY_BYTES, .dmabuf_fd = -1, .access = DQ_ACCESS_REMOTE_WRITE};
		if (s->p->mem_register(s->dev, &desc, &s->mem, &err))
			fail_msg("%s", err.text);
		mem[end] = s->mem;
	}
	qp_pair(&t, DQ_QP_DATA, 4, NULL, NULL, &qa, &qb);
	fill(t.a.bytes, MEMORY_BYTES, seed);
	for (int i = 0; i < 300; i++) {
		const uint32_t len = i < 4 ? RANGE : 1 + prng_below(&seed, RANGE);
		const uint64_t from = i < 32 ? (uint64_t)i * RANGE : prng_below(&seed, MEMORY_BYTES - len + 1);
		const uint64_t to = i % 2 ? prng_below(&seed, MEMORY_BYTES - len + 1) : (uint64_t)prng_below(&seed, MEMORY_BYTES / PIECE) * PIECE + PIECE - len;
		struct dq_mem_key key;
		if (from + len > MEMORY_BYTES)
			continue;
		assert_int_equal(t.b.p->mem_key(mem[1], to, len, &key), 0);
		memset(t.b.bytes, 0, MEMORY_BYTES);
		forget_log(&t);
		const struct dq_write wr = {.wr_id = 1, .mem = mem[0], .offset = from, .len = len, .remote_addr = key.addr, .remote_key = key.key};
		assert_int_equal(t.a.p->post_write(qa, &wr, 1), 1);
		PUMP_UNTIL(&t, t.a.logged == 1 && t.b.logged == 1);
		assert_int_equal(t.a.log[0].status, DQ_WC_SUCCESS);
		assert_memory_equal(t.a.bytes + from, t.b.bytes + to, len);
		for (uint64_t k = to < 64 ? 0 : to - 64; k < to; k++)
			assert_int_equal(t.b.bytes[k], 0);
		for (uint64_t k = to + len; k < DQ_MIN(to + len + 64, MEMORY_BYTES); k++)
			assert_int_equal(t.b.bytes[k], 0);
	}
	/* A longer range has one key or none, never a wrong one. */
	struct dq_mem_key key;
	const int rc = t.b.p->mem_key(mem[1], 100, 3 * PIECE, &key);
	assert_true(rc == 0 || rc == -ERANGE);
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

/* Registering takes long where pages are pinned, so it may be done from any thread where the provider says so. */
struct registering {
	struct side *side;
	atomic_bool stop;
	unsigned rounds;
	int rc;
};

static void *registering_run(void *arg)
{
	struct registering *r = arg;
	static uint8_t bytes[256 * 1024];
	const struct dq_mem_desc desc = {.addr = bytes, .len = sizeof bytes, .dmabuf_fd = -1, .access = DQ_ACCESS_REMOTE_WRITE};

	while (!r->rc && !atomic_load(&r->stop)) {
		struct dq_mem *mem;
		struct dq_mem_key key;
		r->rc = r->side->p->mem_register(r->side->dev, &desc, &mem, NULL);
		if (r->rc)
			break;
		r->rc = r->side->p->mem_key(mem, 0, sizeof bytes, &key);
		r->side->p->mem_deregister(mem);
		r->rounds++;
		const struct timespec rest = {.tv_nsec = 20000}; /* for the other thread, where there is one CPU */
		nanosleep(&rest, NULL);
	}
	return NULL;
}

static void test_registration_from_another_thread(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;
	pthread_t thread;

	(void)state;
	pair_open(&t);
	struct registering r = {.side = &t.a};
	if (!t.a.p->mem_any_thread) {
		pair_close(&t);
		skip();
	}
	qp_pair(&t, DQ_QP_DATA, 4, NULL, NULL, &qa, &qb);
	assert_int_equal(pthread_create(&thread, NULL, registering_run, &r), 0);
	for (int i = 0; i < 200; i++)
		exchange(&t, qa, qb, 4096, 0);
	atomic_store(&r.stop, true);
	pthread_join(thread, NULL);
	assert_int_equal(r.rc, 0);
	assert_true(r.rounds > 0);
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

/* ---- data ---- */

/* Writes of 0 bytes to half a MiB, whole, from and to odd addresses, both ways at once. */
static void test_sizes(void **state)
{
	static const uint32_t sizes[] = {0, 1, 2, 3, 39, 40, 41, 64, 127, 128, 983, 984, 1023, 1024, 1025, 2047, 2049, 4055, 4056, 4057, 4095, 4096, 4097,
					 8192, 8193, 65535, 65536, 65537, 524287 - 6, HALF - 6};
	struct pair t;
	struct dq_qp *qa, *qb;

	(void)state;
	pair_open(&t);
	qp_pair(&t, DQ_QP_DATA, 4, NULL, NULL, &qa, &qb);
	for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++)
		for (uint32_t skew = 0; skew < 4; skew += 3)
			exchange(&t, qa, qb, sizes[i], skew);
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

/* A whole MiB in one segment, and nothing of memory in a segment of none. */
static void test_whole_memory(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;

	(void)state;
	pair_open(&t);
	qp_pair(&t, DQ_QP_DATA, 4, NULL, NULL, &qa, &qb);
	forget_log(&t);
	fill(t.a.bytes, MEMORY_BYTES, 77);
	const struct dq_write wr[2] = {{.wr_id = 5, .imm = 6}, write_of(&t.a, &t.b, 7, 0, MEMORY_BYTES)};
	assert_int_equal(t.a.p->post_write(qa, wr, 2), 2);
	PUMP_UNTIL(&t, t.a.logged == 2 && t.b.logged == 2);
	assert_int_equal(t.b.log[0].len, 0);
	assert_int_equal(t.b.log[0].imm, 6);
	assert_int_equal(t.b.log[1].len, MEMORY_BYTES);
	assert_memory_equal(t.a.bytes, t.b.bytes, MEMORY_BYTES);
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

static void test_immediate_data(void **state)
{
	static const uint32_t values[] = {0, 1, 0xff, 0x100, 0x8000, 0x12345678, 0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff};
	struct pair t;
	struct dq_qp *qa, *qb;

	(void)state;
	pair_open(&t);
	qp_pair(&t, DQ_QP_DATA, 16, NULL, NULL, &qa, &qb);
	forget_log(&t);
	for (unsigned i = 0; i < sizeof values / sizeof *values; i++) {
		struct dq_write wr = write_of(&t.a, &t.b, UINT64_MAX - i, i * 64, i % 2 * 64);
		wr.imm = values[i];
		assert_int_equal(t.a.p->post_write(qa, &wr, 1), 1);
	}
	PUMP_UNTIL(&t, t.a.logged == 10 && t.b.logged == 10);
	for (unsigned i = 0; i < 10; i++) {
		assert_int_equal(t.b.log[i].imm, values[i]);
		assert_true(t.a.log[i].wr_id == UINT64_MAX - i);
	}
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

/*
 * Batches of every size, each waited for, so that there is a last one: each work request has its one completion, in order, and
 * each write its one segment.
 */
static void test_one_completion_each(void **state)
{
	enum { DEPTH = 70 };
	struct pair t;
	struct dq_qp *qa, *qb;
	int mark;

	(void)state;
	pair_open(&t);
	qp_pair_marked(&t, DQ_QP_DATA, DEPTH, &mark, &qa, &qb);
	for (unsigned n = 1; n <= DEPTH; n++) {
		struct dq_write wr[DEPTH];
		forget_log(&t);
		for (unsigned i = 0; i < n; i++)
			wr[i] = write_of(&t.a, &t.b, 1000 * n + i, i * 256, i * 3);
		assert_int_equal(t.a.p->post_write(qa, wr, n), n);
		PUMP_UNTIL(&t, t.a.logged >= n && t.b.logged >= n);
		assert_int_equal(pair_poll(&t), 0);
		assert_int_equal(t.a.logged, n);
		assert_int_equal(t.b.logged, n);
		for (unsigned i = 0; i < n; i++) {
			assert_int_equal(t.a.log[i].op, DQ_WC_WRITE);
			assert_int_equal(t.a.log[i].status, DQ_WC_SUCCESS);
			assert_int_equal(t.a.log[i].wr_id, 1000 * n + i);
			assert_ptr_equal(t.a.log[i].ctx, &mark);
			assert_int_equal(t.b.log[i].op, DQ_WC_SEGMENT);
			assert_int_equal(t.b.log[i].imm, 1000 * n + i);
			assert_int_equal(t.b.log[i].len, i * 3);
			assert_ptr_equal(t.b.log[i].ctx, &mark);
			assert_true(t.a.log[i].time_ns <= clock_ns() && t.b.log[i].time_ns <= clock_ns());
			assert_true(i == 0 || t.a.log[i].time_ns >= t.a.log[i - 1].time_ns);
		}
	}
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

/* No more than the depth is taken, and room comes back with completions that were polled. */
static void test_send_depth(void **state)
{
	static const uint32_t depths[] = {1, 2, 3, 7, 16, 33, 64, 255};
	struct pair t;
	struct dq_error err = {0};
	struct dq_device_attr attr;
	struct dq_qp *qa, *qb;
	struct dq_write wr[300];

	(void)state;
	pair_open(&t);
	for (unsigned i = 0; i < sizeof depths / sizeof *depths; i++) {
		const uint32_t depth = depths[i];
		qp_pair(&t, DQ_QP_DATA, depth, NULL, NULL, &qa, &qb);
		for (uint32_t k = 0; k < 300; k++)
			wr[k] = write_of(&t.a, &t.b, k, k * 64, 64);
		assert_int_equal(t.a.p->post_write(qa, wr, 0), 0);
		for (int round = 0; round < 3; round++) {
			forget_log(&t);
			assert_int_equal(t.a.p->post_write(qa, wr, depth + 5), depth);
			assert_int_equal(t.a.p->post_write(qa, wr, 1), 0);
			PUMP_UNTIL(&t, count(&t.a, DQ_WC_WRITE, NULL) == depth && count(&t.b, DQ_WC_SEGMENT, NULL) == depth);
		}
		/* One at a time, so that the places are used in turn. */
		unsigned posted = 0, done = 0;
		forget_log(&t);
		while (done < 3 * depth) {
			while (posted < 3 * depth && t.a.p->post_write(qa, wr, 1) == 1)
				posted++;
			assert_true(posted - done <= depth);
			done += side_poll(&t.a);
			side_poll(&t.b);
		}
		qp_pair_destroy(&t, qa, qb);
	}
	t.a.p->device_query(t.a.dev, &attr);
	struct dq_qp_attr qattr = {.kind = DQ_QP_DATA, .send_depth = 0, .recv_depth = 1};
	assert_int_equal(t.a.p->qp_create(t.a.dev, &qattr, &qa, &err), -EINVAL);
	qattr.send_depth = attr.max_send_depth + 1;
	assert_int_equal(t.a.p->qp_create(t.a.dev, &qattr, &qa, &err), -EINVAL);
	assert_true(err.text[0] != 0);
	qattr.send_depth = attr.max_send_depth;
	if (t.a.p->qp_create(t.a.dev, &qattr, &qa, &err))
		fail_msg("%s", err.text);
	t.a.p->qp_destroy(qa);
	pair_close(&t);
}

static void test_bad_work_requests(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb, *ca, *cb;

	(void)state;
	pair_open(&t);
	qp_pair(&t, DQ_QP_DATA, 4, NULL, NULL, &qa, &qb);
	qp_pair(&t, DQ_QP_CONTROL, 4, NULL, NULL, &ca, &cb);
	const struct dq_write good = write_of(&t.a, &t.b, 1, 0, 8);
	struct dq_write bad[] = {good, good, good, good, good};
	bad[0].offset = MEMORY_BYTES;
	bad[0].len = 1;
	bad[1].offset = UINT64_MAX;
	bad[2].mem = NULL;
	bad[3].mem = t.b.mem; /* of another device */
	bad[4].offset = MEMORY_BYTES - 7;
	forget_log(&t);
	for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++) {
		const struct dq_write both[2] = {good, bad[i]};
		assert_int_equal(t.a.p->post_write(qa, &bad[i], 1), -EINVAL);
		assert_int_equal(t.a.p->post_write(qa, both, 2), 1); /* what comes before the bad one was taken */
		PUMP_UNTIL(&t, t.a.logged == i + 1 && t.b.logged == i + 1);
	}
	const struct dq_send past = {.wr_id = 1, .mem = t.a.mem, .offset = MEMORY_BYTES - 3, .len = 4};
	const struct dq_recv short_of = {.wr_id = 1, .mem = t.a.mem, .offset = MEMORY_BYTES - 3, .len = 4}, of_data = {.wr_id = 1};
	assert_int_equal(t.a.p->post_send(ca, &past, 1), -EINVAL);
	assert_int_equal(t.a.p->post_recv(ca, &short_of, 1), -EINVAL);
	assert_int_equal(t.a.p->post_recv(qa, &of_data, 1), -EINVAL); /* a data QP posts its own */
	forget_log(&t);
	exchange(&t, qa, qb, 100, 0); /* they are as good as before */
	qp_pair_destroy(&t, qa, qb);
	qp_pair_destroy(&t, ca, cb);
	pair_close(&t);
}

/* Random sizes over QPs in both directions at once; every write lands where it was sent to, once, in the order of its QP. */
static void test_random_traffic(void **state)
{
	enum { QPS = 6, DEPTH = 12, WRITES = 3000, CELLS = 64, CELL = HALF / CELLS };
	uint32_t sent_imm[2][QPS] = {0}, seen_imm[2][QPS] = {0}, done[2][QPS] = {0}, outstanding[2][QPS] = {0};
	bool cell_busy[2][CELLS] = {0};
	struct pair t;
	struct dq_qp *qps[2][QPS];
	uint64_t seed = random_seed;
	unsigned posted = 0, landed = 0, acked = 0, empty = 0;
	struct { uint32_t len, cell; } flight[2][QPS][256];

	(void)state;
	pair_open(&t);
	struct side *sides[2] = {&t.a, &t.b};
	for (int q = 0; q < QPS; q++) {
		for (int s = 0; s < 2; s++)
			qps[s][q] = qp_make(sides[s], DQ_QP_DATA, DEPTH, NULL, &done[s][q]);
		pair_join(&t, qps[0][q], qps[1][q]);
	}
	/* The first half of each memory is source, filled once; the second half is written by the peer. */
	for (int s = 0; s < 2; s++)
		fill(sides[s]->bytes, HALF, prng_next(&seed));
	const uint64_t guard = clock_ns() + PATIENCE_NS;
	while (acked < WRITES || landed < WRITES) {
		struct dq_write batch[4];
		for (int k = 0; k < 8 && posted < WRITES; k++) {
			const int s = (int)prng_below(&seed, 2);
			const uint32_t q = prng_below(&seed, QPS);
			unsigned n = 1 + prng_below(&seed, 4), made = 0;
			for (; made < n && posted + made < WRITES && outstanding[s][q] + made < DEPTH; made++) {
				const uint32_t cell = prng_below(&seed, CELLS), shape = prng_below(&seed, 4), imm = sent_imm[s][q] + made;
				const uint32_t len = shape == 0 ? 0 : shape == 1 ? prng_below(&seed, 200) : prng_below(&seed, CELL + 1);
				if (cell_busy[s][cell])
					break;
				cell_busy[s][cell] = true;
				batch[made] = (struct dq_write){.wr_id = imm, .mem = sides[s]->mem, .offset = cell * CELL, .len = len,
								.remote_addr = sides[!s]->key.addr + HALF + cell * CELL,
								.remote_key = sides[!s]->key.key, .imm = imm};
				flight[s][q][imm % 256].len = len;
				flight[s][q][imm % 256].cell = cell;
			}
			assert_int_equal(sides[s]->p->post_write(qps[s][q], batch, made), made);
			sent_imm[s][q] += made;
			outstanding[s][q] += made;
			posted += made;
		}
		unsigned polled = 0;
		for (int s = 0; s < 2; s++) {
			struct dq_wc wc[7];
			const int n = sides[s]->p->poll(sides[s]->dev, wc, 1 + prng_below(&seed, 7));
			assert_true(n >= 0 && n <= 7);
			polled += (unsigned)n;
			for (int i = 0; i < n; i++) {
				const uint32_t q = (uint32_t)((uint32_t *)wc[i].ctx - done[s]);
				assert_int_equal(wc[i].status, DQ_WC_SUCCESS);
				assert_true(q < QPS);
				if (wc[i].op == DQ_WC_SEGMENT) {
					const uint32_t cell = flight[!s][q][wc[i].imm % 256].cell;
					assert_int_equal(wc[i].imm, seen_imm[s][q]);
					assert_int_equal(wc[i].len, flight[!s][q][wc[i].imm % 256].len);
					assert_memory_equal(sides[s]->bytes + HALF + cell * CELL, sides[!s]->bytes + cell * CELL, wc[i].len);
					memset(sides[s]->bytes + HALF + cell * CELL, 0xee, CELL);
					seen_imm[s][q]++;
					landed++;
				} else {
					assert_int_equal(wc[i].op, DQ_WC_WRITE);
					assert_int_equal(wc[i].wr_id, done[s][q]);
					done[s][q]++;
					outstanding[s][q]--;
					acked++;
				}
			}
		}
		empty = polled ? 0 : empty + 1;
		if (empty > 16)
			pair_rest(&t);
		assert_true(clock_ns() < guard);
		/* A cell is free when its write completed here and its segment was checked there, in whichever order. */
		for (int s = 0; s < 2; s++) {
			bool busy[CELLS] = {false};
			for (uint32_t q = 0; q < QPS; q++)
				for (uint32_t i = DQ_MIN(done[s][q], seen_imm[!s][q]); i != sent_imm[s][q]; i++)
					busy[flight[s][q][i % 256].cell] = true;
			memcpy(cell_busy[s], busy, sizeof busy);
		}
	}
	assert_int_equal(posted, WRITES);
	for (int q = 0; q < QPS; q++)
		qp_pair_destroy(&t, qps[0][q], qps[1][q]);
	pair_close(&t);
}

/* As many QPs as a busy host has, each with data of its own in both directions, told by the checksum in the immediate data. */
static void test_many_qps(void **state)
{
	enum { QPS = 64, ROUNDS = 12, CELL = HALF / QPS };
	struct many_qp { struct dq_qp *qp; uint32_t sent, done, seen, lens[ROUNDS]; } many[2][QPS];
	struct pair t;
	uint64_t seed = random_seed;
	unsigned finished = 0, empty = 0;

	(void)state;
	memset(many, 0, sizeof many);
	pair_open(&t);
	for (int q = 0; q < QPS; q++) {
		for (int s = 0; s < 2; s++)
			many[s][q].qp = qp_make(side_of(&t, s), DQ_QP_DATA, 4, NULL, &many[s][q]);
		qp_join(&t.a, many[0][q].qp, &t.b, many[1][q].qp);
	}
	PUMP_UNTIL(&t, count(&t.a, DQ_WC_CONNECTED, NULL) == QPS && count(&t.b, DQ_WC_CONNECTED, NULL) == QPS);
	const uint64_t guard = clock_ns() + PATIENCE_NS;
	while (finished < 2 * QPS) {
		for (int s = 0; s < 2; s++)
			for (int q = 0; q < QPS; q++) {
				struct many_qp *m = &many[s][q];
				if (m->sent == ROUNDS || m->sent != m->done || m->sent != many[!s][q].seen)
					continue; /* the cells are in use */
				struct side *from = side_of(&t, s), *to = side_of(&t, !s);
				const uint32_t len = m->lens[m->sent] = prng_below(&seed, CELL + 1), at = (uint32_t)q * CELL;
				fill(from->bytes + at, len, prng_next(&seed));
				const struct dq_write wr = {.wr_id = m->sent++, .mem = from->mem, .offset = at, .len = len, .remote_addr = to->key.addr + HALF + at,
							    .remote_key = to->key.key, .imm = checksum(from->bytes + at, len)};
				assert_int_equal(from->p->post_write(m->qp, &wr, 1), 1);
			}
		unsigned polled = 0;
		for (int s = 0; s < 2; s++) {
			struct dq_wc wc[64];
			const int n = side_of(&t, s)->p->poll(side_of(&t, s)->dev, wc, 64);
			assert_true(n >= 0 && n <= 64);
			polled += (unsigned)n;
			for (int i = 0; i < n; i++) {
				struct many_qp *m = wc[i].ctx;
				const uint32_t q = (uint32_t)(m - many[s]);
				assert_int_equal(wc[i].status, DQ_WC_SUCCESS);
				if (wc[i].op == DQ_WC_WRITE) {
					assert_int_equal(wc[i].wr_id, m->done);
					finished += ++m->done == ROUNDS;
				} else {
					assert_int_equal(wc[i].op, DQ_WC_SEGMENT);
					assert_int_equal(wc[i].len, many[!s][q].lens[m->seen]);
					assert_int_equal(wc[i].imm, checksum(side_of(&t, s)->bytes + HALF + q * CELL, wc[i].len));
					m->seen++;
				}
			}
		}
		empty = polled ? 0 : empty + 1;
		if (empty > 16)
			pair_rest(&t);
		assert_true(clock_ns() < guard);
	}
	pump_rounds(&t, 50);
	for (int q = 0; q < QPS; q++) {
		PUMP_UNTIL(&t, many[0][q].seen + count(&t.a, DQ_WC_SEGMENT, &many[0][q]) == ROUNDS);
		PUMP_UNTIL(&t, many[1][q].seen + count(&t.b, DQ_WC_SEGMENT, &many[1][q]) == ROUNDS);
		qp_pair_destroy(&t, many[0][q].qp, many[1][q].qp);
	}
	pair_close(&t);
}

/* A receiver that polls slowly slows the sender and loses nothing. */
static void test_backpressure(void **state)
{
	enum { WRITES = 5000 };
	struct pair t;
	struct dq_qp *qa, *qb;
	unsigned posted = 0, done = 0, seen = 0;

	(void)state;
	pair_open(&t);
	qp_pair(&t, DQ_QP_DATA, 256, NULL, NULL, &qa, &qb);
	const uint64_t guard = clock_ns() + PATIENCE_NS;
	while (done < WRITES || seen < WRITES) {
		struct dq_wc wc[64];
		struct dq_write wr = write_of(&t.a, &t.b, posted, 0, 8);
		while (posted < WRITES && t.a.p->post_write(qa, &wr, 1) == 1) {
			posted++;
			wr.wr_id = wr.imm = posted;
		}
		int n = t.a.p->poll(t.a.dev, wc, 64);
		for (int i = 0; i < n; i++) {
			assert_int_equal(wc[i].status, DQ_WC_SUCCESS);
			assert_int_equal(wc[i].wr_id, done++);
		}
		const int m = t.b.p->poll(t.b.dev, wc, 3);
		for (int i = 0; i < m; i++) {
			assert_int_equal(wc[i].op, DQ_WC_SEGMENT);
			assert_int_equal(wc[i].imm, seen++);
		}
		if (n == 0 && m == 0)
			pair_rest(&t);
		assert_true(clock_ns() < guard);
	}
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

/* ---- control ---- */

/* Sends and receives of all lengths in batches, both ways, in order; receives may be longer, and posted before connecting. */
static void test_control(void **state)
{
	enum { DEPTH = 16, ROUNDS = 60, CELL = DQ_CONTROL_BYTES };
	struct pair t;
	struct dq_qp *qps[2];
	uint64_t seed = random_seed, next[2] = {0, 0};
	int marks[2];

	(void)state;
	pair_open(&t);
	for (int s = 0; s < 2; s++) {
		struct side *side = side_of(&t, s);
		struct dq_recv rv[DEPTH + 1];
		qps[s] = qp_make(side, DQ_QP_CONTROL, DEPTH, NULL, &marks[s]);
		for (unsigned i = 0; i <= DEPTH; i++)
			rv[i] = (struct dq_recv){.wr_id = i, .mem = side->mem, .offset = HALF + i * CELL, .len = CELL};
		assert_int_equal(side->p->post_recv(qps[s], rv, 5), 5);
		assert_int_equal(side->p->post_recv(qps[s], rv + 5, DEPTH + 1 - 5), DEPTH - 5); /* the receive depth */
		assert_int_equal(side->p->post_recv(qps[s], rv, 1), 0);
	}
	pair_join(&t, qps[0], qps[1]);
	for (int round = 0; round < ROUNDS; round++) {
		unsigned n[2];
		uint32_t lens[2][DEPTH];
		forget_log(&t);
		for (int s = 0; s < 2; s++) {
			struct side *side = side_of(&t, s);
			struct dq_send sd[DEPTH];
			n[s] = 1 + prng_below(&seed, DEPTH);
			for (unsigned i = 0; i < n[s]; i++) {
				lens[s][i] = i == 0 ? 0 : i == 1 ? CELL : prng_below(&seed, CELL + 1);
				sd[i] = (struct dq_send){.wr_id = (uint64_t)round << 32 | i, .mem = side->mem, .offset = i * CELL, .len = lens[s][i]};
				fill(side->bytes + i * CELL, lens[s][i], prng_next(&seed));
			}
			assert_int_equal(side->p->post_send(qps[s], sd, n[s]), n[s]);
		}
		PUMP_UNTIL(&t, t.a.logged >= n[0] + n[1] && t.b.logged >= n[0] + n[1]);
		for (int s = 0; s < 2; s++) {
			struct side *side = side_of(&t, s), *peer = side_of(&t, !s);
			assert_int_equal(side->logged, n[0] + n[1]);
			assert_int_equal(count(side, DQ_WC_SEND, &marks[s]), n[s]);
			assert_int_equal(count(side, DQ_WC_RECV, &marks[s]), n[!s]);
			for (unsigned i = 0; i < n[s]; i++) {
				assert_int_equal(find(side, DQ_WC_SEND, i)->status, DQ_WC_SUCCESS);
				assert_int_equal(find(side, DQ_WC_SEND, i)->wr_id, (uint64_t)round << 32 | i);
			}
			for (unsigned i = 0; i < n[!s]; i++) { /* receives are used in the order they were posted, and posted again */
				const struct dq_wc *wc = find(side, DQ_WC_RECV, i);
				const uint64_t place = next[s]++ % DEPTH;
				const struct dq_recv again = {.wr_id = place, .mem = side->mem, .offset = HALF + place * CELL, .len = CELL};
				assert_int_equal(wc->status, DQ_WC_SUCCESS);
				assert_int_equal(wc->wr_id, place);
				assert_int_equal(wc->len, lens[!s][i]);
				assert_memory_equal(side->bytes + HALF + place * CELL, peer->bytes + i * CELL, wc->len);
				assert_int_equal(side->p->post_recv(qps[s], &again, 1), 1);
			}
		}
	}
	qp_pair_destroy(&t, qps[0], qps[1]);
	pair_close(&t);
}

/* A message that the sender posts after it saw its write completed is polled after that write's segment. */
static void test_control_follows_segment(void **state)
{
	struct pair t;
	struct dq_qp *da, *db, *ca, *cb;

	(void)state;
	pair_open(&t);
	qp_pair(&t, DQ_QP_DATA, 4, NULL, NULL, &da, &db);
	qp_pair(&t, DQ_QP_CONTROL, 4, NULL, NULL, &ca, &cb);
	for (uint64_t i = 0; i < 200; i++) {
		const struct dq_recv rv = {.wr_id = i, .mem = t.b.mem, .offset = HALF, .len = 4096};
		const struct dq_write wr = write_of(&t.a, &t.b, i, 0, 70000);
		const struct dq_send sd = {.wr_id = i, .mem = t.a.mem, .offset = 4096, .len = 100};
		forget_log(&t);
		assert_int_equal(t.b.p->post_recv(cb, &rv, 1), 1);
		assert_int_equal(t.a.p->post_write(da, &wr, 1), 1);
		PUMP_UNTIL(&t, count(&t.a, DQ_WC_WRITE, NULL) == 1);
		assert_int_equal(t.a.p->post_send(ca, &sd, 1), 1);
		PUMP_UNTIL(&t, count(&t.a, DQ_WC_SEND, NULL) == 1 && count(&t.b, DQ_WC_RECV, NULL) == 1);
		assert_int_equal(t.b.logged, 2);
		assert_int_equal(t.b.log[0].op, DQ_WC_SEGMENT);
		assert_int_equal(t.b.log[1].op, DQ_WC_RECV);
		assert_int_equal(t.b.log[1].len, 100);
		assert_int_equal(t.b.log[1].wr_id, i);
	}
	qp_pair_destroy(&t, da, db);
	qp_pair_destroy(&t, ca, cb);
	pair_close(&t);
}

/* ---- sleeping ---- */

/* With nothing to do a device stays asleep: arm() has nothing against it, and the fd is quiet. */
static void expect_quiet(struct pair *t, struct side *s)
{
	struct pollfd fd = {.fd = s->p->event_fd(s->dev), .events = POLLIN};
	const uint64_t guard = clock_ns() + PATIENCE_NS;

	for (int quiet = 0; quiet < 5;) { /* stale events of earlier work may wake it a few times, not for ever */
		pair_poll(t);
		quiet = !s->p->arm(s->dev) && poll(&fd, 1, 0) == 0 ? quiet + 1 : 0;
		assert_true(clock_ns() < guard);
	}
}

/* Sleeping on the event fd after arm() misses nothing, whichever end and however often. */
static void test_arm_and_sleep(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;

	(void)state;
	pair_open(&t);
	qp_pair(&t, DQ_QP_DATA, 8, NULL, NULL, &qa, &qb);
	struct pollfd fds[2] = {{.fd = t.a.p->event_fd(t.a.dev), .events = POLLIN}, {.fd = t.b.p->event_fd(t.b.dev), .events = POLLIN}};
	expect_quiet(&t, &t.a);
	expect_quiet(&t, &t.b);
	for (unsigned i = 0; i < 300; i++) {
		const struct dq_write wr = write_of(&t.a, &t.b, i, 0, i * 997 % MEMORY_BYTES);
		forget_log(&t);
		if (i % 3 == 0) { /* asleep before it is posted */
			expect_quiet(&t, &t.a);
			expect_quiet(&t, &t.b);
		}
		assert_int_equal(t.a.p->post_write(qa, &wr, 1), 1);
		while (count(&t.a, DQ_WC_WRITE, NULL) == 0 || count(&t.b, DQ_WC_SEGMENT, NULL) == 0) {
			pair_poll(&t);
			if (!t.a.p->arm(t.a.dev) && !t.b.p->arm(t.b.dev) &&
			    (count(&t.a, DQ_WC_WRITE, NULL) == 0 || count(&t.b, DQ_WC_SEGMENT, NULL) == 0))
				assert_true(poll(fds, 2, 30000) > 0);
		}
	}
	expect_quiet(&t, &t.a);
	expect_quiet(&t, &t.b);
	qp_pair_destroy(&t, qa, qb);
	expect_quiet(&t, &t.a);
	pair_close(&t);
}

/* A consumer in a thread of its own that sleeps whenever it may: it answers each write with one. */
struct sleeper {
	struct side *side;
	struct dq_qp *qp;
	struct dq_write answer;
	unsigned answers, slept;
	const char *wrong;             /* what went wrong; cmocka's checks are for the main thread */
};

static void sleeper_rest(struct sleeper *s)
{
	const struct dq_provider *p = s->side->p;
	struct pollfd fd = {.fd = p->event_fd(s->side->dev), .events = POLLIN};

	if (p->arm(s->side->dev))
		return;
	const uint64_t due = p->next_deadline(s->side->dev), now = clock_ns();
	const bool timed = due != DQ_NEVER && due < now + 30000000000u;
	s->slept++;
	if (poll(&fd, 1, timed ? (due > now ? (int)((due - now) / 1000000u) + 1 : 0) : 30000) == 0 && !timed)
		s->wrong = "slept for 30 s";
}

static void *sleeper_run(void *arg)
{
	struct sleeper *s = arg;
	const unsigned wanted = s->answers;
	unsigned answered = 0, done = 0;

	while (done < wanted && !s->wrong) {
		struct dq_wc wc[4];
		const int n = s->side->p->poll(s->side->dev, wc, 4);
		for (int i = 0; i < n; i++) {
			if (wc[i].status != DQ_WC_SUCCESS || (wc[i].op != DQ_WC_SEGMENT && wc[i].op != DQ_WC_WRITE))
				s->wrong = "a completion that is no success";
			else if (wc[i].op == DQ_WC_WRITE)
				done++;
			else if (wc[i].imm != answered++)
				s->wrong = "out of order";
			else if (s->answer.imm = wc[i].imm, s->side->p->post_write(s->qp, &s->answer, 1) != 1)
				s->wrong = "cannot post";
		}
		if (n == 0)
			sleeper_rest(s);
	}
	return NULL;
}

static void test_sleeping_consumers(void **state)
{
	enum { ROUNDS = 1000 };
	struct pair t;
	struct dq_qp *qa, *qb;
	pthread_t thread;

	(void)state;
	pair_open(&t);
	qp_pair(&t, DQ_QP_DATA, 8, NULL, NULL, &qa, &qb);
	forget_log(&t);
	struct sleeper far = {.side = &t.b, .qp = qb, .answer = {.mem = t.b.mem, .len = 3000, .remote_addr = t.a.key.addr, .remote_key = t.a.key.key},
			      .answers = ROUNDS};
	struct sleeper near = {.side = &t.a, .qp = qa};
	assert_int_equal(pthread_create(&thread, NULL, sleeper_run, &far), 0);
	unsigned seen = 0, done = 0, posted = 0;
	while ((seen < ROUNDS || done < ROUNDS) && !near.wrong) {
		struct dq_wc wc[4];
		if (posted == seen && posted < ROUNDS) {
			const struct dq_write wr = {.mem = t.a.mem, .offset = HALF, .len = 3000, .remote_addr = t.b.key.addr + HALF, .remote_key = t.b.key.key,
						    .imm = posted};
			posted += t.a.p->post_write(qa, &wr, 1) == 1;
		}
		const int n = t.a.p->poll(t.a.dev, wc, 4);
		for (int i = 0; i < n; i++) {
			if (wc[i].status != DQ_WC_SUCCESS)
				near.wrong = "a completion that is no success";
			else if (wc[i].op == DQ_WC_SEGMENT)
				seen++;
			else
				done++;
		}
		if (n == 0)
			sleeper_rest(&near);
	}
	while (t.a.p->arm(t.a.dev)) /* what it took is acknowledged */
		t.a.p->poll(t.a.dev, NULL, 0);
	if (near.wrong)
		fail_msg("%s", near.wrong); /* the other thread uses the device: nothing can be closed */
	pthread_join(thread, NULL);
	if (far.wrong)
		fail_msg("%s", far.wrong);
	assert_true(far.slept + near.slept > 0);
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

int main(void)
{
	const int unfit = transport_env_check();
	if (unfit)
		return unfit;
	random_seed = transport_seed();
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_device),
		cmocka_unit_test(test_device_that_is_not_there),
		cmocka_unit_test(test_readdress),
		cmocka_unit_test(test_connect),
		cmocka_unit_test(test_connect_from_another_thread),
		cmocka_unit_test(test_registration),
		cmocka_unit_test(test_registration_in_pieces),
		cmocka_unit_test(test_registration_from_another_thread),
		cmocka_unit_test(test_sizes),
		cmocka_unit_test(test_whole_memory),
		cmocka_unit_test(test_immediate_data),
		cmocka_unit_test(test_one_completion_each),
		cmocka_unit_test(test_send_depth),
		cmocka_unit_test(test_bad_work_requests),
		cmocka_unit_test(test_random_traffic),
		cmocka_unit_test(test_many_qps),
		cmocka_unit_test(test_backpressure),
		cmocka_unit_test(test_control),
		cmocka_unit_test(test_control_follows_segment),
		cmocka_unit_test(test_arm_and_sleep),
		cmocka_unit_test(test_sleeping_consumers),
	};
	return cmocka_run_group_tests_name("transport", tests, NULL, NULL);
}
