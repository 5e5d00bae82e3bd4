/* SPDX-License-Identifier: Apache-2.0 */
/* The engine over a real transport (transport_env.h), its clients played by the test through the shared rings. */
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine_pair.h"
#include "transport_env.h"

struct pair {
	struct host a, b;
	struct client ca, cb;
};

static int set_up(void **state)
{
	static struct pair p;
	host_start(&p.a, 0, "alpha", 0);
	host_start(&p.b, 1, "beta", 0);
	host_path(&p.a, &p.b, 0, &test_profile);
	host_path(&p.b, &p.a, 0, &test_profile);
	host_connect(&p.a, 0, &p.b, 0);
	client_attach(&p.ca, &p.a, "left", 1024, 1u << 30, 1000);
	client_attach(&p.cb, &p.b, "right", 1024, 1u << 30, 1000);
	*state = &p;
	return 0;
}

static int tear_down(void **state)
{
	struct pair *p = *state;
	host_stop(&p->a);
	host_stop(&p->b);
	munmap(p->ca.map, p->ca.bytes);
	munmap(p->cb.map, p->cb.bytes);
	close(p->ca.memfd);
	close(p->ca.eventfd);
	close(p->cb.memfd);
	close(p->cb.eventfd);
	return 0;
}

static void fill(uint8_t *p, uint64_t n, unsigned seed)
{
	for (uint64_t i = 0; i < n; i++)
		p[i] = (uint8_t)(i * 31 + (i >> 8) * 7 + seed);
}

static void carries_messages_of_all_sizes(void **state)
{
	static const uint64_t sizes[] = { 0, 1, 64, 127, 128, 4096, 65535, 65536, 65537, 1000000, 16u << 20 };
	struct pair *p = *state;
	struct memory ma, mb;
	uint32_t fa, fb;
	client_memory(&p->ca, 16u << 20, &ma);
	client_memory(&p->cb, 16u << 20, &mb);
	client_flow(&p->ca, &p->cb, 1, &fa, &fb);
	for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		uint64_t recv, send;
		struct dq_completion c;
		fill(ma.addr, sizes[i], i);
		memset(mb.addr, 0xee, sizes[i] + (sizes[i] < mb.bytes));
		recv = client_submit(&p->cb, (struct dq_submission){ .op = DQ_OP_RECV, .flow = fb, .mem = mb.id, .bytes = mb.bytes, .tag = i });
		send = client_submit(&p->ca, (struct dq_submission){ .op = DQ_OP_SEND, .flow = fa, .mem = ma.id, .bytes = sizes[i], .tag = i });
		c = client_expect(&p->cb, recv);
		assert_int_equal(c.status, DQ_OK);
		assert_int_equal(c.bytes, sizes[i]);
		assert_int_equal(client_expect(&p->ca, send).status, DQ_OK);
		assert_memory_equal(ma.addr, mb.addr, sizes[i]);
		if (sizes[i] < mb.bytes)
			assert_int_equal(mb.addr[sizes[i]], 0xee);
	}
	munmap(ma.addr, ma.bytes);
	munmap(mb.addr, mb.bytes);
}

static void puts_and_notifies(void **state)
{
	struct pair *p = *state;
	struct memory ma, mb;
	struct dq_completion c;
	uint32_t fa, fb;
	uint64_t exp, put, note;
	client_memory(&p->ca, 1u << 20, &ma);
	client_memory(&p->cb, 1u << 20, &mb);
	client_flow(&p->ca, &p->cb, 1, &fa, &fb);
	exp = client_submit(&p->cb, (struct dq_submission){ .op = DQ_OP_EXPORT, .flow = fb, .mem = mb.id, .offset = 4096, .bytes = 500000 });
	c = client_expect(&p->cb, exp);
	assert_int_equal(c.status, DQ_OK);
	fill(ma.addr, ma.bytes, 9);
	note = client_submit(&p->cb, (struct dq_submission){ .op = DQ_OP_NOTIFY, .flow = fb });
	put = client_submit(&p->ca, (struct dq_submission){ .op = DQ_OP_PUT, .flow = fa, .mem = ma.id, .offset = 128, .bytes = 300000,
							     .region = c.region, .remote_offset = 1000, .tag = 77 });
	assert_int_equal(client_expect(&p->ca, put).status, DQ_OK);
	c = client_expect(&p->cb, note);
	assert_int_equal(c.status, DQ_OK);
	assert_int_equal(c.tag, 77);
	assert_int_equal(c.bytes, 300000);
	assert_int_equal(c.offset, 1000);
	assert_memory_equal(mb.addr + 4096 + 1000, ma.addr + 128, 300000);
	put = client_submit(&p->ca, (struct dq_submission){ .op = DQ_OP_PUT, .flow = fa, .mem = ma.id, .bytes = 2, .region = c.region,
							     .remote_offset = 499999 });
	assert_int_equal(client_expect(&p->ca, put).status, DQ_ERR_REGION);
	put = client_submit(&p->cb, (struct dq_submission){ .op = DQ_OP_UNEXPORT, .flow = fb, .region = c.region });
	assert_int_equal(client_expect(&p->cb, put).status, DQ_OK);
	put = client_submit(&p->ca, (struct dq_submission){ .op = DQ_OP_PUT, .flow = fa, .mem = ma.id, .bytes = 2, .region = c.region });
	assert_int_equal(client_expect(&p->ca, put).status, DQ_ERR_REGION);
	munmap(ma.addr, ma.bytes);
	munmap(mb.addr, mb.bytes);
}

static void a_dead_client_hurts_nobody(void **state)
{
	struct pair *p = *state;
	struct client other_a, other_b;
	struct memory ma, mb, oa, ob;
	struct dq_path_stats s;
	uint32_t fa, fb, ga, gb;
	uint64_t send, recv;
	client_attach(&other_a, &p->a, "other", 1024, 1u << 30, 10);
	client_attach(&other_b, &p->b, "other", 1024, 1u << 30, 10);
	client_memory(&p->ca, 64u << 20, &ma);
	client_memory(&p->cb, 64u << 20, &mb);
	client_memory(&other_a, 1u << 20, &oa);
	client_memory(&other_b, 1u << 20, &ob);
	client_flow(&p->ca, &p->cb, 1, &fa, &fb);
	client_flow(&other_a, &other_b, 1, &ga, &gb);
	for (int i = 0; i < 8; i++)
		client_submit(&p->cb, (struct dq_submission){ .op = DQ_OP_RECV, .flow = fb, .mem = mb.id, .bytes = 64u << 20 });
	send = client_submit(&p->ca, (struct dq_submission){ .op = DQ_OP_SEND, .flow = fa, .mem = ma.id, .bytes = 64u << 20 });
	client_detach(&p->cb); /* in the middle of it */
	assert_true(host_wait(&p->b, &p->b.gone, 1, 20));
	{
		struct dq_completion c = client_expect(&p->ca, send);
		assert_true(c.status == DQ_ERR_PEER_GONE || c.status == DQ_OK);
	}
	/* The other flow on the same VC goes on. */
	recv = client_submit(&other_b, (struct dq_submission){ .op = DQ_OP_RECV, .flow = gb, .mem = ob.id, .bytes = 1u << 20 });
	send = client_submit(&other_a, (struct dq_submission){ .op = DQ_OP_SEND, .flow = ga, .mem = oa.id, .bytes = 1u << 20 });
	assert_int_equal(client_expect(&other_b, recv).status, DQ_OK);
	assert_int_equal(client_expect(&other_a, send).status, DQ_OK);
	assert_int_equal(dq_engine_path_stats(p->b.engine, p->b.path[0], &s), 0);
	assert_int_equal(s.flows, 1);
	assert_int_equal(s.failures, 0);
	host_events(&p->a);
	host_events(&p->b);
	assert_int_equal(p->a.downs + p->b.downs, 0);
	munmap(ma.addr, ma.bytes);
	munmap(mb.addr, mb.bytes);
	munmap(oa.addr, oa.bytes);
	munmap(ob.addr, ob.bytes);
	client_detach(&other_a);
	client_detach(&other_b);
	/* for tear_down */
	client_attach(&p->cb, &p->b, "right", 64, 1u << 20, 1);
}

static void a_dead_peer_ends_requests(void **state)
{
	struct pair *p = *state;
	struct memory ma;
	uint32_t fa, fb;
	uint64_t recv;
	client_memory(&p->ca, 1u << 20, &ma);
	client_flow(&p->ca, &p->cb, 1, &fa, &fb);
	recv = client_submit(&p->ca, (struct dq_submission){ .op = DQ_OP_RECV, .flow = fa, .mem = ma.id, .bytes = 1u << 20 });
	host_stop(&p->b);
	assert_int_equal(client_expect(&p->ca, recv).status, DQ_ERR_UNREACHABLE);
	recv = client_submit(&p->ca, (struct dq_submission){ .op = DQ_OP_RECV, .flow = fa, .mem = ma.id, .bytes = 1u << 20 });
	assert_int_equal(client_expect(&p->ca, recv).status, DQ_ERR_UNREACHABLE);
	recv = client_submit(&p->ca, (struct dq_submission){ .op = DQ_OP_CLOSE, .flow = fa });
	assert_int_equal(client_expect(&p->ca, recv).status, DQ_OK);
	assert_true(host_wait(&p->a, &p->a.downs, 1, 20));
	munmap(ma.addr, ma.bytes);
	host_start(&p->b, 1, "beta", 0); /* for tear_down */
}

static void freed_memory_cancels(void **state)
{
	struct pair *p = *state;
	struct memory ma, mb;
	uint32_t fa, fb;
	uint64_t recv;
	struct dq_engine_stats before, s;
	dq_engine_get_stats(p->b.engine, &before);
	client_memory(&p->ca, 1u << 20, &ma);
	client_memory(&p->cb, 1u << 20, &mb);
	client_flow(&p->ca, &p->cb, 1, &fa, &fb);
	recv = client_submit(&p->cb, (struct dq_submission){ .op = DQ_OP_RECV, .flow = fb, .mem = mb.id, .bytes = 1u << 20 });
	assert_int_equal(dq_engine_mem_free(p->b.engine, p->cb.id, mb.id), 0);
	assert_int_equal(client_expect(&p->cb, recv).status, DQ_ERR_CANCELED);
	do /* the peer answers the CANCEL, then the memory goes */
		dq_engine_get_stats(p->b.engine, &s);
	while (s.memory_bytes != before.memory_bytes);
	recv = client_submit(&p->cb, (struct dq_submission){ .op = DQ_OP_RECV, .flow = fb, .mem = mb.id, .bytes = 1u << 20 });
	assert_int_equal(client_expect(&p->cb, recv).status, DQ_ERR_INVALID);
	munmap(ma.addr, ma.bytes);
	munmap(mb.addr, mb.bytes);
}

/* Memory of a client for another one: as good as its own, and it outlives the owner's. */
static void shares_memory(void **state)
{
	struct pair *p = *state;
	struct client other;
	struct memory ma, mb;
	struct dq_text err;
	uint32_t fa, fb, shared, again;
	uint64_t bytes = 0, recv, send;
	client_attach(&other, &p->a, "other", 64, 1u << 20, 10);
	client_memory(&p->ca, 100000, &ma);
	client_memory(&p->cb, 100000, &mb);
	assert_int_equal(dq_engine_mem_share(p->a.engine, other.id, p->ca.id, ma.id, &shared, &bytes, &err), 0);
	assert_int_equal(bytes, 100000);
	/* Not somebody else's, not what is not there, not beyond the quota. */
	assert_int_equal(dq_engine_mem_share(p->a.engine, other.id, other.id, ma.id, &again, &bytes, &err), -2);
	assert_non_null(strstr(err.text, "can be shared"));
	assert_int_equal(dq_engine_mem_share(p->a.engine, other.id, p->ca.id, 12345, &again, &bytes, &err), -2);
	for (int i = 0; i < 20; i++)
		if (dq_engine_mem_share(p->a.engine, other.id, p->ca.id, ma.id, &again, &bytes, &err))
			break;
	assert_non_null(strstr(err.text, "quota"));

	client_flow(&other, &p->cb, 1, &fa, &fb);
	fill(ma.addr, bytes, 9);
	for (int owner_there = 1; owner_there >= 0; owner_there--) {
		memset(mb.addr, 0, bytes);
		recv = client_submit(&p->cb, (struct dq_submission){ .op = DQ_OP_RECV, .flow = fb, .mem = mb.id, .bytes = bytes });
		send = client_submit(&other, (struct dq_submission){ .op = DQ_OP_SEND, .flow = fa, .mem = shared, .bytes = bytes });
		assert_int_equal(client_expect(&p->cb, recv).status, DQ_OK);
		assert_int_equal(client_expect(&other, send).status, DQ_OK);
		assert_memory_equal(ma.addr, mb.addr, bytes);
		if (owner_there)
			assert_int_equal(dq_engine_mem_free(p->a.engine, p->ca.id, ma.id), 0);
	}
	munmap(ma.addr, ma.bytes);
	munmap(mb.addr, mb.bytes);
	client_detach(&other);
}

static void flushes(void **state)
{
	struct pair *p = *state;
	struct memory ma, mb;
	uint32_t fa, fb;
	client_memory(&p->ca, 4096, &ma);
	client_memory(&p->cb, 4096, &mb);
	client_flow(&p->ca, &p->cb, 1, &fa, &fb);
	const struct {
		struct dq_submission s;
		int32_t status;
	} cases[] = {
		{ { .op = DQ_OP_FLUSH, .flow = fb, .mem = mb.id, .offset = 4095 }, DQ_OK },
		{ { .op = DQ_OP_FLUSH, .flow = fb, .mem = mb.id, .offset = 4096 }, DQ_ERR_INVALID },
		{ { .op = DQ_OP_FLUSH, .flow = fb, .mem = mb.id, .offset = UINT64_MAX }, DQ_ERR_INVALID },
		{ { .op = DQ_OP_FLUSH, .flow = fb, .mem = 54321 }, DQ_ERR_INVALID },
		{ { .op = DQ_OP_FLUSH, .flow = fb + 1000, .mem = mb.id }, DQ_ERR_INVALID },
	};
	for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++)
		assert_int_equal(client_expect(&p->cb, client_submit(&p->cb, cases[i].s)).status, cases[i].status);
	munmap(ma.addr, ma.bytes);
	munmap(mb.addr, mb.bytes);
}

/* Both ends learn with whom, over which device and what kind of path. */
static void a_new_flow_is_described(void **state)
{
	struct pair *p = *state;
	struct dq_profile profile = test_profile;
	struct dq_completion_opened opened;
	profile.path_class = DQ_CLASS_BUILDING;
	assert_int_equal(dq_engine_path_profile(p->a.engine, p->a.path[0], &profile), 0);
	struct dq_handle h = client_listen(&p->cb, 1);
	uint64_t accept = client_submit(&p->cb, (struct dq_submission){ .op = DQ_OP_ACCEPT, .flow = 1 });
	uint64_t connect = client_connect(&p->ca, &h);
	struct dq_completion c = client_expect(&p->ca, connect);
	memcpy(&opened, &c, sizeof opened);
	assert_int_equal(opened.status, DQ_OK);
	assert_string_equal(opened.peer, "beta");
	assert_int_equal(opened.device, p->a.device);
	assert_int_equal(opened.path_class, DQ_CLASS_BUILDING);
	c = client_expect(&p->cb, accept);
	memcpy(&opened, &c, sizeof opened);
	assert_string_equal(opened.peer, "alpha");
	assert_int_equal(opened.device, p->b.device);
	assert_int_equal(opened.path_class, DQ_CLASS_UNKNOWN);
}

static void many_flows(void **state)
{
	enum { N = 900 };
	struct pair *p = *state;
	struct memory ma, mb;
	static uint32_t fa[N], fb[N];
	struct dq_completion c;
	struct dq_handle h = client_listen(&p->cb, 7);
	client_memory(&p->ca, 4096, &ma);
	client_memory(&p->cb, 4096, &mb);
	for (int i = 0; i < N; i++)
		client_submit(&p->cb, (struct dq_submission){ .op = DQ_OP_ACCEPT, .flow = 7 });
	for (int i = 0; i < N / 3; i++)
		client_connect(&p->ca, &h);
	for (int i = 0; i < N / 3; i++) {
		assert_true(client_next(&p->ca, &c, 20));
		assert_int_equal(c.status, DQ_OK);
		fa[i] = c.flow;
		assert_true(client_next(&p->cb, &c, 20));
		assert_int_equal(c.status, DQ_OK);
		fb[i] = c.flow;
	}
	for (int i = 0; i < N / 3; i++) {
		client_submit(&p->cb, (struct dq_submission){ .op = DQ_OP_RECV, .flow = fb[i], .mem = mb.id, .bytes = 64 });
		client_submit(&p->ca, (struct dq_submission){ .op = DQ_OP_SEND, .flow = fa[i], .mem = ma.id, .bytes = 64 });
	}
	for (int i = 0; i < N / 3; i++) {
		assert_true(client_next(&p->ca, &c, 20));
		assert_int_equal(c.status, DQ_OK);
		assert_true(client_next(&p->cb, &c, 20));
		assert_int_equal(c.status, DQ_OK);
	}
	munmap(ma.addr, ma.bytes);
	munmap(mb.addr, mb.bytes);
}

int main(void)
{
	const int unfit = transport_env_check();
	if (unfit)
		return unfit;
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(carries_messages_of_all_sizes, set_up, tear_down),
		cmocka_unit_test_setup_teardown(puts_and_notifies, set_up, tear_down),
		cmocka_unit_test_setup_teardown(freed_memory_cancels, set_up, tear_down),
		cmocka_unit_test_setup_teardown(shares_memory, set_up, tear_down),
		cmocka_unit_test_setup_teardown(flushes, set_up, tear_down),
		cmocka_unit_test_setup_teardown(a_new_flow_is_described, set_up, tear_down),
		cmocka_unit_test_setup_teardown(many_flows, set_up, tear_down),
		cmocka_unit_test_setup_teardown(a_dead_client_hurts_nobody, set_up, tear_down),
		cmocka_unit_test_setup_teardown(a_dead_peer_ends_requests, set_up, tear_down),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
