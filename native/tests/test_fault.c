/* SPDX-License-Identifier: Apache-2.0 */
/* The fault provider over a real one (transport_env.h): each rule does what it says, exactly, and nothing else. */
#include "transport_pair.h"

#include <errno.h>
#include <poll.h>

#include "provider/fault.h"

#define MS 1000000u

static const char *faulty(void)
{
	static char name[64];
	snprintf(name, sizeof name, "fault:%s", transport_provider());
	return name;
}

static void fault_pair(struct pair *t)
{
	side_open(&t->a, faulty(), "a", transport_address(0), 0, 0);
	side_open(&t->b, transport_provider(), "b", transport_address(1), 0, 0);
}

static void script(struct side *s, const char *text)
{
	struct dq_error err = {0};
	if (dq_fault_script(s->dev, text, &err))
		fail_msg("%s", err.text);
}

static void write_some(struct pair *t, struct dq_qp *qp, unsigned n)
{
	for (unsigned i = 0; i < n; i++) {
		const struct dq_write wr = write_of(&t->a, &t->b, i, i * 1000, 1000);
		assert_int_equal(t->a.p->post_write(qp, &wr, 1), 1);
	}
}

static void test_no_rules(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;
	int mark;

	(void)state;
	assert_null(dq_provider_find("fault:nothing"));
	fault_pair(&t);
	assert_string_equal(t.a.p->name, faulty());
	struct dq_qp *own = qp_make(&t.a, DQ_QP_DATA, 4, NULL, &mark);
	t.a.p->qp_destroy(own);
	qp_pair(&t, DQ_QP_DATA, 16, NULL, NULL, &qa, &qb);
	forget_log(&t);
	memset(t.a.bytes, 0x42, 16000);
	write_some(&t, qa, 16);
	PUMP_UNTIL(&t, t.a.logged == 16 && t.b.logged == 16);
	for (unsigned i = 0; i < 16; i++) {
		assert_int_equal(t.a.log[i].wr_id, i);
		assert_int_equal(t.a.log[i].status, DQ_WC_SUCCESS);
		assert_null(t.a.log[i].ctx);
	}
	assert_memory_equal(t.a.bytes, t.b.bytes, 16000);
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

static void test_scripts(void **state)
{
	static const char *const bad[] = {"explode", "delay", "delay 5", "delay 5m", "delay ms", "delay -5ms", "lose", "lose op=read", "lose op=write nth=0",
					  "lose op=write count=0", "fail-qp", "fail-qp qp=x", "fail-qp qp=1 after=", "port-down nth=2", "port-up after=1",
					  "refuse-registration op=write", "lose op=write; delay 5ms; bang", "delay 99999999999999999999s",
					  "fail-qp qp=1 later=3"};
	static const char *const good[] = {"", ";;", " ; delay 5ms ;", "delay 1us op=segment nth=3 count=2", "lose op=any", "fail-qp qp=0 after=9999",
					   "port-down after=5000; refuse-registration nth=2 count=3; lose op=recv", "delay 10s device=other"};
	struct pair t;
	struct dq_error err;

	(void)state;
	fault_pair(&t);
	for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++) {
		err.text[0] = 0;
		assert_int_equal(dq_fault_script(t.a.dev, bad[i], &err), -EINVAL);
		assert_non_null(strstr(err.text, "fault script"));
	}
	for (unsigned i = 0; i < sizeof good / sizeof *good; i++)
		script(&t.a, good[i]);
	char many[1024] = "";
	for (unsigned i = 0; i <= DQ_FAULT_RULES; i++)
		strcat(many, "port-up;");
	assert_int_equal(dq_fault_script(t.a.dev, many, &err), -EINVAL);
	assert_int_equal(dq_fault_script(t.a.dev, NULL, &err), 0);
	pair_close(&t);
}

static void test_lose(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;
	struct dq_fault_stats st;

	(void)state;
	fault_pair(&t);
	qp_pair(&t, DQ_QP_DATA, 16, NULL, NULL, &qa, &qb);
	forget_log(&t);
	script(&t.a, "lose op=write nth=3 count=2");
	write_some(&t, qa, 8);
	PUMP_UNTIL(&t, t.a.logged == 6 && t.b.logged == 8);
	static const uint64_t left[] = {0, 1, 4, 5, 6, 7};
	for (unsigned i = 0; i < 6; i++)
		assert_int_equal(t.a.log[i].wr_id, left[i]);
	dq_fault_stats(t.a.dev, &st);
	assert_int_equal(st.lost, 2);
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

static void test_delay(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;

	(void)state;
	fault_pair(&t);
	qp_pair(&t, DQ_QP_DATA, 16, NULL, NULL, &qa, &qb);
	forget_log(&t);
	script(&t.a, "delay 30ms op=write nth=2 count=1");
	write_some(&t, qa, 4);
	PUMP_UNTIL(&t, t.a.logged >= 1);
	assert_int_equal(t.a.logged, 1);
	/* Sleeping until next_deadline is enough to get it. */
	while (t.a.logged < 4) {
		struct pollfd fd = {.fd = t.a.p->event_fd(t.a.dev), .events = POLLIN};
		const uint64_t due = t.a.p->next_deadline(t.a.dev), now = clock_ns();
		if (!t.a.p->arm(t.a.dev))
			poll(&fd, 1, due > now ? (int)((due - now) / MS) + 1 : 0);
		pair_poll(&t);
	}
	for (unsigned i = 0; i < 4; i++)
		assert_int_equal(t.a.log[i].wr_id, i); /* nothing overtook it */
	assert_true(clock_ns() - t.a.log[1].time_ns >= 30 * MS);
	/* A QP that goes takes its delayed completions along. */
	script(&t.a, "delay 60s");
	forget_log(&t);
	write_some(&t, qa, 4);
	PUMP_UNTIL(&t, t.b.logged == 4);
	for (int i = 0; i < 100; i++)
		pair_poll(&t);
	assert_int_equal(t.a.logged, 0);
	qp_pair_destroy(&t, qa, qb);
	assert_int_equal(side_poll(&t.a), 0);
	pair_close(&t);
}

static void test_fail_qp(void **state)
{
	struct pair t;
	struct dq_qp *qa[2], *qb[2];
	int marks[2];

	(void)state;
	fault_pair(&t);
	for (int q = 0; q < 2; q++)
		qp_pair_marked(&t, DQ_QP_DATA, 16, &marks[q], &qa[q], &qb[q]);
	write_some(&t, qa[1], 2);
	PUMP_UNTIL(&t, count(&t.a, DQ_WC_WRITE, NULL) == 2);
	script(&t.a, "fail-qp qp=1 after=3");
	forget_log(&t);
	struct dq_write wr[8];
	for (unsigned i = 0; i < 8; i++)
		wr[i] = write_of(&t.a, &t.b, i, 0, 1000);
	assert_int_equal(t.a.p->post_write(qa[1], wr, 8), 3); /* exact within a batch too */
	assert_int_equal(t.a.p->post_write(qa[1], wr, 8), -EIO);
	assert_int_equal(t.a.p->post_write(qa[0], wr, 8), 8);
	PUMP_UNTIL(&t, count(&t.a, DQ_WC_WRITE, NULL) == 11 && count(&t.a, DQ_WC_FAILED, NULL) == 1);
	assert_int_equal(find(&t.a, DQ_WC_FAILED, 0)->status, DQ_WC_REMOTE_GONE);
	expect_peer_lost(&t, &t.b, DQ_QP_DATA, qb[1], &marks[1]);
	unsigned good = 0;
	for (uint32_t i = 0; i < t.a.logged; i++)
		good += t.a.log[i].op == DQ_WC_WRITE && t.a.log[i].status == DQ_WC_SUCCESS && t.a.log[i].ctx == &marks[0];
	assert_int_equal(good, 8);
	for (int q = 0; q < 2; q++)
		qp_pair_destroy(&t, qa[q], qb[q]);
	pair_close(&t);
}

static void test_fail_qp_at_once(void **state)
{
	struct pair t;

	(void)state;
	fault_pair(&t);
	script(&t.a, "fail-qp qp=0");
	struct dq_qp *qa = qp_make(&t.a, DQ_QP_DATA, 4, NULL, NULL), *qb = qp_make(&t.b, DQ_QP_DATA, 4, NULL, NULL);
	qp_join(&t.a, qa, &t.b, qb);
	PUMP_UNTIL(&t, count(&t.a, DQ_WC_FAILED, NULL) == 1 && count(&t.b, DQ_WC_CONNECTED, NULL) == 1);
	assert_int_equal(t.a.log[0].op, DQ_WC_CONNECTED);
	expect_peer_lost(&t, &t.b, DQ_QP_DATA, qb, NULL);
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

static void test_port_down(void **state)
{
	struct pair t;
	struct dq_qp *qa[2], *qb[2], *late, *peer;
	struct dq_device_attr attr;
	struct dq_dgram *da, *db;
	struct dq_error err = {0};
	struct dq_endpoint to_a, to_b;
	struct dq_dgram_event ev[8];
	int marks[2];

	(void)state;
	fault_pair(&t);
	for (int q = 0; q < 2; q++)
		qp_pair_marked(&t, DQ_QP_DATA, 16, &marks[q], &qa[q], &qb[q]);
	assert_int_equal(t.a.p->dgram_open(t.a.dev, &da, &err), 0);
	assert_int_equal(t.b.p->dgram_open(t.b.dev, &db, &err), 0);
	t.a.p->dgram_endpoint(da, &to_a);
	t.b.p->dgram_endpoint(db, &to_b);
	forget_log(&t);
	script(&t.a, "port-down after=5");
	write_some(&t, qa[0], 3);
	write_some(&t, qa[1], 2);
	PUMP_UNTIL(&t, count(&t.a, DQ_WC_FAILED, NULL) == 2);
	assert_int_equal(count(&t.a, DQ_WC_WRITE, NULL), 5);
	for (int q = 0; q < 2; q++)
		expect_peer_lost(&t, &t.b, DQ_QP_DATA, qb[q], &marks[q]);
	t.a.p->device_query(t.a.dev, &attr);
	assert_false(attr.up);
	assert_int_equal(t.a.p->dgram_send(da, &to_b, 0, NULL, 1, "x", 1), -ENETDOWN);
	assert_int_equal(t.a.p->dgram_poll(da, ev, 8), 0); /* from now on its fd tells */
	assert_int_equal(t.b.p->dgram_send(db, &to_a, 0, NULL, 1, "x", 1), 0);
	struct pollfd fd = {.fd = t.a.p->dgram_fd(da), .events = POLLIN};
	const uint64_t guard = clock_ns() + PATIENCE_NS;
	while (poll(&fd, 1, 1) == 0) { /* it comes in, and is not told */
		t.b.p->dgram_poll(db, ev, 8);
		assert_true(clock_ns() < guard);
	}
	assert_int_equal(t.a.p->dgram_poll(da, ev, 8), 0);
	late = qp_make(&t.a, DQ_QP_DATA, 4, NULL, NULL);
	peer = qp_make(&t.b, DQ_QP_DATA, 4, NULL, NULL);
	qp_join(&t.a, late, &t.b, peer);
	PUMP_UNTIL(&t, count(&t.a, DQ_WC_FAILED, NULL) == 3);
	qp_pair_destroy(&t, late, peer);
	for (int q = 0; q < 2; q++)
		qp_pair_destroy(&t, qa[q], qb[q]);

	script(&t.a, "port-up");
	t.a.p->device_query(t.a.dev, &attr);
	assert_true(attr.up);
	qp_pair(&t, DQ_QP_DATA, 16, NULL, NULL, &qa[0], &qb[0]);
	forget_log(&t);
	write_some(&t, qa[0], 16);
	PUMP_UNTIL(&t, t.a.logged == 16 && t.b.logged == 16);
	assert_int_equal(t.a.p->dgram_send(da, &to_b, 0, NULL, 1, "x", 1), 0);
	qp_pair_destroy(&t, qa[0], qb[0]);
	t.a.p->dgram_close(da);
	t.b.p->dgram_close(db);
	pair_close(&t);
}

static void test_refuse_registration(void **state)
{
	struct pair t;
	struct dq_error err = {0};
	struct dq_mem *mem;
	static uint8_t bytes[4096];
	const struct dq_mem_desc desc = {.addr = bytes, .len = sizeof bytes, .dmabuf_fd = -1};

	(void)state;
	fault_pair(&t);
	script(&t.a, "refuse-registration nth=2");
	for (int i = 1; i <= 3; i++) {
		const int rc = t.a.p->mem_register(t.a.dev, &desc, &mem, &err);
		assert_int_equal(rc, i == 2 ? -ENOMEM : 0);
		if (!rc)
			t.a.p->mem_deregister(mem);
	}
	pair_close(&t);
}

static void test_environment(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;
	struct dq_device *dev;
	struct dq_error err = {0};
	struct dq_device_config cfg = {.name = "x"};

	(void)state;
	snprintf(cfg.address, sizeof cfg.address, "%s", transport_address(0));
	setenv("DQPLBD_FAULT", "lose op=write nth=1 device=a; lose op=write nth=2 device=z", 1);
	fault_pair(&t);
	qp_pair(&t, DQ_QP_DATA, 16, NULL, NULL, &qa, &qb);
	forget_log(&t);
	write_some(&t, qa, 3);
	PUMP_UNTIL(&t, t.a.logged == 2 && t.b.logged == 3);
	assert_int_equal(t.a.log[0].wr_id, 1);
	assert_int_equal(t.a.log[1].wr_id, 2);
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
	setenv("DQPLBD_FAULT", "nonsense", 1);
	assert_int_equal(dq_provider_find(faulty())->device_open(&cfg, &dev, &err), -EINVAL);
	assert_non_null(strstr(err.text, "nonsense"));
	unsetenv("DQPLBD_FAULT");
}

int main(void)
{
	const int unfit = transport_env_check();
	if (unfit)
		return unfit;
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_no_rules),
		cmocka_unit_test(test_scripts),
		cmocka_unit_test(test_lose),
		cmocka_unit_test(test_delay),
		cmocka_unit_test(test_fail_qp),
		cmocka_unit_test(test_fail_qp_at_once),
		cmocka_unit_test(test_port_down),
		cmocka_unit_test(test_refuse_registration),
		cmocka_unit_test(test_environment),
	};
	return cmocka_run_group_tests_name("fault provider", tests, NULL, NULL);
}
