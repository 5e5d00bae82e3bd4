/* SPDX-License-Identifier: Apache-2.0 */
/* What the engine does when devices change or refuse: scripted faults on a real tcp device. */
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine_pair.h"

/* A host whose only device begins with this fault script. */
static void start(struct host *h, const char *script)
{
	struct dq_engine_config cfg = { .host_id = "alpha", .epoch = 0x77, .cpu = -1 };
	struct dq_engine_device_config dev = { .name = "tcp0", .provider = "fault:tcp", .address = "127.0.0.1", .rate_bps = 10000000000ull,
					       .numa_node = -1 };
	struct dq_text err = { 0 };
	memset(h, 0, sizeof *h);
	memcpy(h->host_id, cfg.host_id, sizeof h->host_id);
	h->epoch = cfg.epoch;
	assert_int_equal(setenv("DQPLBD_FAULT", script, 1), 0);
	if (dq_engine_create(&cfg, &h->engine, &err) || dq_engine_device_add(h->engine, &dev, &h->device, &err))
		fail_msg("%s", err.text);
	assert_int_equal(unsetenv("DQPLBD_FAULT"), 0);
}

/* The next event of this type; others are passed over. */
static struct dq_engine_event wait_event(struct host *h, uint32_t type)
{
	struct dq_engine_event ev;
	for (int turns = 0; turns < 600; turns++) {
		struct pollfd p = { .fd = dq_engine_event_fd(h->engine), .events = POLLIN };
		while (dq_engine_events(h->engine, &ev, 1) == 1)
			if (ev.type == type)
				return ev;
		poll(&p, 1, 100);
	}
	fail_msg("no event of type %u within a minute", type);
	return ev;
}

static void a_port_that_goes_down_is_told(void **state)
{
	struct host h;
	struct dq_engine_device d;
	struct dq_engine_event ev;
	(void)state;
	start(&h, "port-down");
	ev = wait_event(&h, DQ_EV_DEVICE);
	assert_int_equal(ev.device, h.device);
	assert_int_equal(ev.change, DQ_CHANGE_DOWN);
	assert_int_equal(ev.status, DQ_ERR_DEVICE);
	assert_non_null(strstr(ev.text, "port-down"));
	assert_int_equal(dq_engine_device_get(h.engine, h.device, &d), 0);
	assert_false(d.up);
	host_stop(&h);
}

static void the_address_of_a_tcp_device_cannot_change(void **state)
{
	struct host h;
	struct dq_text err = { 0 };
	(void)state;
	start(&h, "");
	assert_int_equal(dq_engine_device_readdress(h.engine, h.device, "fe80::1", &err), -EOPNOTSUPP);
	assert_non_null(strstr(err.text, "tcp0"));
	assert_int_equal(dq_engine_device_readdress(h.engine, 9, "fe80::1", &err), -ENOENT);
	host_stop(&h);
}

/* Registration happens outside of the engine's thread where the provider allows it, and inside elsewhere: what fails leaves
 * nothing behind in either. */
static void a_refused_registration_leaves_nothing_behind(void **state)
{
	const uint64_t bytes = 1u << 20;
	struct host h;
	struct client c;
	struct memory m;
	struct dq_client_stats before, s;
	struct dq_engine_device d;
	struct dq_text err = { 0 };
	uint64_t mapped;
	uint32_t mem;
	int fd = -1;
	(void)state;
	start(&h, "refuse-registration nth=1 count=1");
	client_attach(&c, &h, "c", 64, 2 * bytes, 10); /* its rings count too: there is room for one region, not for two */
	assert_int_equal(dq_engine_client_stats(h.engine, c.id, &before), 0);
	assert_int_equal(dq_engine_mem_alloc(h.engine, c.id, bytes, 0, &mem, &fd, &mapped, &err), -ENOMEM);
	assert_int_equal(fd, -1);
	assert_int_equal(dq_engine_client_stats(h.engine, c.id, &s), 0);
	assert_int_equal(s.memory_bytes, before.memory_bytes);
	assert_int_equal(s.memory_regions, before.memory_regions);
	assert_int_equal(dq_engine_device_get(h.engine, h.device, &d), 0);
	assert_int_equal(d.memory_regions, 0);
	client_memory(&c, bytes, &m); /* the whole quota is still there */
	assert_int_equal(dq_engine_client_stats(h.engine, c.id, &s), 0);
	assert_int_equal(s.memory_bytes, before.memory_bytes + m.bytes);
	client_detach(&c);
	assert_true(host_wait(&h, &h.gone, 1, 20));
	assert_int_equal(dq_engine_device_get(h.engine, h.device, &d), 0);
	assert_int_equal(d.memory_regions, 0);
	host_stop(&h);
}

static void paths_have_flow_labels_of_their_own(void **state)
{
	enum { PATHS = 64 };
	uint32_t label[PATHS], same = 0;
	struct host h;
	struct dq_text err = { 0 };
	(void)state;
	start(&h, "");
	for (uint32_t i = 0; i < PATHS; i++) {
		uint32_t path, again;
		assert_int_equal(dq_engine_path_add(h.engine, h.device, "peer", 1000 + i, NULL, &test_profile, &path, &err), 0);
		assert_int_equal(dq_engine_path_flow_label(h.engine, path, &label[i]), 0);
		assert_true(label[i] > 0 && label[i] < 1u << 20);
		assert_int_equal(dq_engine_path_flow_label(h.engine, path, &again), 0);
		assert_int_equal(again, label[i]);
		for (uint32_t k = 0; k < i; k++)
			same += label[k] == label[i];
	}
	/* 64 random ones of 16384 hardly ever meet four times; all equal would mean that the seed is not random. */
	assert_true(same < 4);
	assert_int_equal(dq_engine_path_flow_label(h.engine, 100000, &label[0]), -ENOENT);
	host_stop(&h);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_port_that_goes_down_is_told),
		cmocka_unit_test(the_address_of_a_tcp_device_cannot_change),
		cmocka_unit_test(a_refused_registration_leaves_nothing_behind),
		cmocka_unit_test(paths_have_flow_labels_of_their_own),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
