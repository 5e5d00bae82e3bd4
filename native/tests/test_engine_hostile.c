/* SPDX-License-Identifier: Apache-2.0 */
/* Clients that break every rule of the shared memory: they are cut off at worst, and nobody else notices. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine_pair.h"
#include "transport_env.h"
#include "prng.h"

struct pair {
	struct host a, b;
	struct client ca, cb;       /* well-behaved */
	struct memory ma, mb;
	uint32_t fa, fb;
	uint64_t tag;
};

static struct pair p;

static int set_up(void **state)
{
	(void)state;
	memset(&p, 0, sizeof p);
	host_start(&p.a, 0, "alpha", 0);
	host_start(&p.b, 1, "beta", 0);
	host_path(&p.a, &p.b, 0, &test_profile);
	host_path(&p.b, &p.a, 0, &test_profile);
	host_connect(&p.a, 0, &p.b, 0);
	client_attach(&p.ca, &p.a, "left", 256, 1u << 26, 100);
	client_attach(&p.cb, &p.b, "right", 256, 1u << 26, 100);
	client_memory(&p.ca, 1u << 20, &p.ma);
	client_memory(&p.cb, 1u << 20, &p.mb);
	client_flow(&p.ca, &p.cb, 1, &p.fa, &p.fb);
	return 0;
}

static int tear_down(void **state)
{
	(void)state;
	client_detach(&p.ca);
	client_detach(&p.cb);
	host_stop(&p.a);
	host_stop(&p.b);
	munmap(p.ma.addr, p.ma.bytes);
	munmap(p.mb.addr, p.mb.bytes);
	return 0;
}

static void fill(uint64_t *r, void *to, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		((uint8_t *)to)[i] = (uint8_t)prng_next(r);
}

/* The others still exchange messages, whole and unchanged. */
static void others_are_well(void)
{
	uint64_t bytes = 100000 + p.tag * 128, recv, send;
	p.tag++;
	for (uint64_t i = 0; i < bytes; i++)
		p.ma.addr[i] = (uint8_t)(i * 7 + p.tag);
	recv = client_submit(&p.cb, (struct dq_submission){ .op = DQ_OP_RECV, .flow = p.fb, .mem = p.mb.id, .bytes = 1u << 20, .tag = p.tag });
	send = client_submit(&p.ca, (struct dq_submission){ .op = DQ_OP_SEND, .flow = p.fa, .mem = p.ma.id, .bytes = bytes, .tag = p.tag });
	assert_int_equal(client_expect(&p.cb, recv).status, DQ_OK);
	assert_int_equal(client_expect(&p.ca, send).status, DQ_OK);
	assert_memory_equal(p.ma.addr, p.mb.addr, bytes);
}

static struct dq_engine_stats wait_clients(uint32_t clients)
{
	struct dq_engine_stats s;
	do
		dq_engine_get_stats(p.a.engine, &s);
	while (s.clients > clients);
	return s;
}

static void any_entries(void **state)
{
	uint64_t r = 1;
	struct dq_engine_stats before, after;
	(void)state;
	dq_engine_get_stats(p.a.engine, &before);
	for (int round = 0; round < 60; round++) {
		struct client bad;
		struct memory m;
		client_attach(&bad, &p.a, "bad", 64, 1u << 26, 20);
		client_memory(&bad, 65536, &m);
		client_listen(&bad, 3);
		for (int i = 0; i < 300; i++) {
			struct dq_submission s;
			struct dq_completion c;
			fill(&r, &s, sizeof s);
			/* Most are nearly right, so that they get past the first check. */
			if (prng_next(&r) % 8)
				s.op = (uint16_t)(1 + prng_next(&r) % 13);
			if (prng_next(&r) % 2)
				s.flow = (uint32_t)(prng_next(&r) % 8);
			if (prng_next(&r) % 2)
				s.mem = (uint32_t)(prng_next(&r) % 6);
			if (prng_next(&r) % 2)
				s.offset = prng_next(&r) % 70000;
			if (prng_next(&r) % 2)
				s.bytes = prng_next(&r) % 70000;
			if (atomic_load(&bad.control->closed))
				break;
			if (dq_ring_space(&bad.sq, 1) < 1)
				break; /* it takes no completions itself, below, when the dice say so */
			dq_ring_write(&bad.sq, 0, &s);
			dq_ring_produce(&bad.sq, 1);
			client_wake_engine(&bad);
			while (prng_next(&r) % 3 && dq_ring_avail(&bad.cq) > 0) {
				dq_ring_read(&bad.cq, 0, &c);
				dq_ring_consume(&bad.cq, 1);
			}
		}
		if (round % 8 == 0)
			others_are_well();
		munmap(m.addr, m.bytes);
		client_detach(&bad);
	}
	after = wait_clients(1);
	assert_int_equal(after.clients, before.clients);
	assert_int_equal(after.flows, before.flows);
	assert_int_equal(after.memory_bytes, before.memory_bytes);
	others_are_well();
	host_events(&p.a);
	host_events(&p.b);
	assert_int_equal(p.a.downs + p.b.downs, 0);
}

static void impossible_indices(void **state)
{
	uint64_t r = 2;
	(void)state;
	for (uint32_t round = 0; round < 40; round++) {
		struct client bad;
		struct dq_submission s = { .op = DQ_OP_NOTIFY, .flow = 12345 };
		uint32_t before = p.a.cut;
		client_attach(&bad, &p.a, "bad", 64, 1u << 20, 20);
		if (round % 2) {
			atomic_store(&bad.sq.shared->tail, 65 + (uint32_t)prng_next(&r) % 1000000);
		} else {
			/* Consumed what was never produced: found when the engine next needs the index, so with the ring full. */
			atomic_store(&bad.cq.shared->head, 1000 + (uint32_t)prng_next(&r) % 1000000);
			for (int i = 0; i < 65; i++) {
				while (dq_ring_space(&bad.sq, 1) < 1)
					client_wake_engine(&bad);
				dq_ring_write(&bad.sq, 0, &s);
				dq_ring_produce(&bad.sq, 1);
			}
		}
		client_wake_engine(&bad);
		assert_true(host_wait(&p.a, &p.a.cut, before + 1, 20));
		assert_non_null(strstr(p.a.cut_text, "index is impossible"));
		assert_int_not_equal(atomic_load(&bad.control->closed), 0u);
		client_detach(&bad);
	}
	others_are_well();
}

static void scribbles_over_everything(void **state)
{
	uint64_t r = 3;
	(void)state;
	for (int round = 0; round < 20; round++) {
		struct client bad;
		client_attach(&bad, &p.a, "bad", 64, 1u << 20, 20);
		for (int i = 0; i < 200; i++) {
			uint64_t at = prng_next(&r) % (bad.bytes - 64), one = 1;
			fill(&r, bad.map + at, 1 + prng_next(&r) % 64);
			if (write(bad.eventfd, &one, sizeof one) < 0)
				assert_int_equal(errno, EAGAIN);
		}
		if (round % 5 == 0)
			others_are_well();
		client_detach(&bad);
	}
	wait_clients(1);
	others_are_well();
}

static void spoils_its_descriptors(void **state)
{
	struct client bad;
	uint64_t full = UINT64_MAX - 1;
	(void)state;
	client_attach(&bad, &p.a, "bad", 64, 1u << 20, 20);
	/* Without O_NONBLOCK a read of the empty counter, or a write to the full one, would block whoever shares it. */
	assert_int_equal(fcntl(bad.eventfd, F_SETFL, 0), 0);
	others_are_well();
	assert_int_equal(write(bad.eventfd, &full, sizeof full), sizeof full);
	others_are_well();
	/* A smaller file would make the engine's next look at it fatal. */
	assert_int_equal(ftruncate(bad.memfd, 0), -1);
	assert_int_equal(errno, EPERM);
	/* It says that it sleeps and never does; it never takes a completion. */
	for (int i = 0; i < 64; i++) { /* without waking the engine: this client's own write would block now */
		struct dq_submission s = { .op = DQ_OP_NOTIFY, .flow = 9 };
		dq_ring_write(&bad.sq, 0, &s);
		dq_ring_produce(&bad.sq, 1);
	}
	atomic_store(&bad.control->client_waiting, 1);
	others_are_well();
	client_detach(&bad);
	wait_clients(1);
	others_are_well();
}

static void floods_its_ring(void **state)
{
	struct client bad;
	(void)state;
	client_attach(&bad, &p.a, "bad", 65536, 16u << 20, 20);
	for (int round = 0; round < 10; round++) {
		struct dq_completion c;
		struct dq_submission s = { .op = DQ_OP_NOTIFY, .flow = 9 };
		while (dq_ring_space(&bad.sq, 1) > 0) {
			dq_ring_write(&bad.sq, 0, &s);
			dq_ring_produce(&bad.sq, 1);
		}
		client_wake_engine(&bad);
		others_are_well();
		while (dq_ring_refresh(&bad.cq) > 0) {
			dq_ring_read(&bad.cq, 0, &c);
			dq_ring_consume(&bad.cq, 1);
		}
	}
	client_detach(&bad);
	wait_clients(1);
}

static void quotas_hold(void **state)
{
	struct client c;
	struct dq_text err = { 0 };
	struct memory m;
	uint32_t mem;
	uint64_t mapped;
	int fd;
	(void)state;
	client_attach(&c, &p.a, "greedy", 64, 1u << 20, 2);
	client_memory(&c, 1u << 19, &m);
	assert_int_equal(dq_engine_mem_alloc(p.a.engine, c.id, (1u << 19) + 1, 0, &mem, &fd, &mapped, &err), -EDQUOT);
	assert_non_null(strstr(err.text, "quota"));
	assert_int_equal(dq_engine_mem_dmabuf(p.a.engine, c.id, c.memfd, 0, 4096, &mem, &err), -EINVAL);
	assert_non_null(strstr(err.text, "not a dma-buf"));
	client_listen(&c, 1);
	client_listen(&c, 2);
	assert_int_equal(client_expect(&c, client_submit(&c, (struct dq_submission){ .op = DQ_OP_LISTEN, .flow = 3 })).status, DQ_ERR_LIMIT);
	munmap(m.addr, m.bytes);
	client_detach(&c);
}

int main(void)
{
	const int unfit = transport_env_check();
	if (unfit)
		return unfit;
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(any_entries, set_up, tear_down),
		cmocka_unit_test_setup_teardown(impossible_indices, set_up, tear_down),
		cmocka_unit_test_setup_teardown(scribbles_over_everything, set_up, tear_down),
		cmocka_unit_test_setup_teardown(spoils_its_descriptors, set_up, tear_down),
		cmocka_unit_test_setup_teardown(floods_its_ring, set_up, tear_down),
		cmocka_unit_test_setup_teardown(quotas_hold, set_up, tear_down),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
