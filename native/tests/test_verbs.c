/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What only the verbs provider does, on two RDMA devices: addresses, the proof of the path MTU, what the device tells by
 * itself, a peer that is killed, memory that may not be locked, queues that fill up. Needs root, and `ip`; changes the network
 * interfaces behind the two devices and puts them back.
 */
#include "transport_pair.h"

#include <linux/capability.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "provider/verbs.h"

#define MS 1000000u

static struct dq_verbs_device *inside(const struct side *s) { return dq_verbs_device_of(s->dev); }

static int command(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static int command(const char *fmt, ...)
{
	char text[256];
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(text, sizeof text, fmt, ap);
	va_end(ap);
	return system(text);
}

/* The network interface behind the address of an end. */
static void netdev_of(int end, char out[32])
{
	char path[160];

	snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/1/gid_attrs/ndevs/0", transport_address(end));
	FILE *f = fopen(path, "re");
	assert_non_null(f);
	assert_int_equal(fscanf(f, "%31s", out), 1);
	fclose(f);
}

/* The fabric of tests/vm: interface hN of a host ends in port pN of the switch, in the namespace fab. False without it. */
static bool switch_port(int end, const char *settings)
{
	char netdev[32];

	netdev_of(end, netdev);
	return netdev[0] == 'h' && command("ip -n fab link set p%s %s 2>/dev/null", netdev + 1, settings) == 0;
}

static int open_with(const struct dq_device_config *cfg, struct dq_error *err)
{
	struct dq_device *dev = NULL;
	const int rc = dq_provider_find("verbs")->device_open(cfg, &dev, err);
	if (!rc)
		dq_provider_find("verbs")->device_close(dev);
	else
		assert_null(dev);
	return rc;
}

/* ---- open ---- */

static void test_open_errors(void **state)
{
	struct dq_device_config cfg = {.name = "rail0"};
	struct dq_error err = {0};
	struct side s;
	struct dq_device_attr attr;

	(void)state;
	side_open(&s, "verbs", "a", transport_address(0), 0, 0);
	s.p->device_query(s.dev, &attr);
	assert_true(attr.up);
	assert_true(attr.mtu >= 256 && attr.mtu <= 4096);
	assert_true(attr.header_bytes == 82 || attr.header_bytes == 102);
	assert_true(attr.noise_ns >= 1000 && attr.noise_ns <= 20000000);
	assert_true(attr.max_qps >= 64 && attr.max_send_depth >= 128);
	assert_int_equal(attr.dmabuf, false); /* rxe of these kernels cannot, and must not be believed to */
	assert_true(attr.line_rate_bps == 0 || attr.rate_bps == attr.line_rate_bps);

	snprintf(cfg.address, sizeof cfg.address, "%s", transport_address(0));
	snprintf(cfg.gid, sizeof cfg.gid, "%s", attr.address);
	assert_int_equal(open_with(&cfg, &err), 0);
	snprintf(cfg.gid, sizeof cfg.gid, "198.51.100.7");
	assert_int_equal(open_with(&cfg, &err), -ENOENT);
	assert_non_null(strstr(err.text, "198.51.100.7"));
	assert_non_null(strstr(err.text, attr.address));      /* what there is */
	snprintf(cfg.gid, sizeof cfg.gid, "mlx5_0");
	assert_int_equal(open_with(&cfg, &err), -EINVAL);
	cfg.gid[0] = 0;
	cfg.port = 2;
	assert_int_equal(open_with(&cfg, &err), -ENODEV);
	assert_non_null(strstr(err.text, "port 2"));
	cfg.port = 1;
	cfg.mtu = 200;
	assert_int_equal(open_with(&cfg, &err), -EINVAL);
	cfg.mtu = 0;
	snprintf(cfg.address, sizeof cfg.address, "no-such-device");
	assert_int_equal(open_with(&cfg, &err), -ENODEV);
	assert_non_null(strstr(err.text, transport_address(1)));
	side_close(&s);
}

/* A smaller MTU of either end, or told by the configuration, is what both use. */
static void test_mtu_is_the_smaller(void **state)
{
	struct dq_device_config cfg = {.name = "small", .mtu = 1100};
	struct pair t;
	struct dq_qp *qa, *qb;
	struct dq_error err = {0};
	struct dq_device_attr attr;

	(void)state;
	pair_open(&t);
	t.b.p->mem_deregister(t.b.mem);
	t.b.p->device_close(t.b.dev);
	snprintf(cfg.address, sizeof cfg.address, "%s", transport_address(1));
	assert_int_equal(t.b.p->device_open(&cfg, &t.b.dev, &err), 0);
	const struct dq_mem_desc desc = {.addr = t.b.bytes, .len = MEMORY_BYTES, .dmabuf_fd = -1, .access = DQ_ACCESS_REMOTE_WRITE};
	assert_int_equal(t.b.p->mem_register(t.b.dev, &desc, &t.b.mem, &err), 0);
	assert_int_equal(t.b.p->mem_key(t.b.mem, 0, MEMORY_BYTES, &t.b.key), 0);
	t.b.p->device_query(t.b.dev, &attr);
	assert_int_equal(attr.mtu, 1024);
	qp_pair(&t, DQ_QP_CONTROL, 4, NULL, NULL, &qa, &qb);
	assert_int_equal(dq_verbs_qp_of(qa)->path_mtu, 1024);
	assert_int_equal(dq_verbs_qp_of(qb)->path_mtu, 1024);
	qp_pair_destroy(&t, qa, qb);
	qp_pair(&t, DQ_QP_DATA, 4, NULL, NULL, &qa, &qb);
	exchange(&t, qa, qb, 100001, 0);
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

/* Another MTU of the network interface makes no event, and is seen all the same. */
static void test_mtu_changes(void **state)
{
	struct side s;
	struct dq_device_attr attr;
	char netdev[32], path[80];
	unsigned bytes;

	(void)state;
	netdev_of(0, netdev);
	snprintf(path, sizeof path, "/sys/class/net/%s/mtu", netdev);
	FILE *f = fopen(path, "re");
	assert_non_null(f);
	assert_int_equal(fscanf(f, "%u", &bytes), 1);
	fclose(f);
	side_open(&s, "verbs", "a", transport_address(0), 0, 0);
	s.p->device_query(s.dev, &attr);
	const uint32_t before = attr.mtu;
	assert_true(before > 1024);
	assert_int_equal(command("echo 1500 > %s", path), 0);
	s.p->device_query(s.dev, &attr);
	assert_int_equal(attr.mtu, 1024);
	assert_int_equal(command("echo %u > %s", bytes, path), 0);
	s.p->device_query(s.dev, &attr);
	assert_int_equal(attr.mtu, before);
	side_close(&s);
}

/* ---- path ---- */

/* The switch between carries less than both ends think: small packets pass, and what is wrong is said. */
static void test_path_mtu(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;

	(void)state;
	if (!switch_port(1, "mtu 1500"))
		skip();
	pair_open(&t);
	qa = qp_make(&t.a, DQ_QP_CONTROL, 4, NULL, NULL);
	qb = qp_make(&t.b, DQ_QP_CONTROL, 4, NULL, NULL);
	qp_join(&t.a, qa, &t.b, qb);
	PUMP_UNTIL(&t, count(&t.a, DQ_WC_FAILED, NULL) == 1);
	assert_true(switch_port(1, "mtu 9000"));
	assert_int_equal(find(&t.a, DQ_WC_FAILED, 0)->status, DQ_WC_PATH_MTU);
	assert_int_equal(count(&t.a, DQ_WC_CONNECTED, NULL), 0);
	assert_int_equal(count(&t.b, DQ_WC_CONNECTED, NULL), 0);
	qp_pair_destroy(&t, qa, qb);
	qp_pair(&t, DQ_QP_CONTROL, 4, NULL, NULL, &qa, &qb); /* all is well again */
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

/* ---- what the device tells ---- */

static struct dq_device_event next_event(struct side *s)
{
	struct dq_device_event ev = {0};
	const uint64_t guard = clock_ns() + PATIENCE_NS;

	while (!s->p->device_event(s->dev, &ev)) {
		struct pollfd fd = {.fd = s->p->event_fd(s->dev), .events = POLLIN};
		assert_true(clock_ns() < guard);
		side_poll(s);
		if (s->p->device_event(s->dev, &ev))
			break;
		if (!s->p->arm(s->dev))
			poll(&fd, 1, 1000); /* it wakes whoever sleeps */
	}
	return ev;
}

static struct dq_device_event wait_event(struct side *s, uint32_t change)
{
	struct dq_device_event ev;
	do
		ev = next_event(s);
	while (ev.change != change);
	return ev;
}

/* An outage shorter than the retries of a QP costs time and nothing else. */
static void test_port_down_and_up(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;
	struct dq_device_attr attr;
	struct dq_device_event ev;

	(void)state;
	if (!switch_port(0, "up"))
		skip();
	pair_open(&t);
	qp_pair(&t, DQ_QP_DATA, 8, NULL, NULL, &qa, &qb);
	assert_int_equal(t.a.p->device_event(t.a.dev, &ev), 0);
	assert_true(switch_port(0, "down"));
	ev = wait_event(&t.a, DQ_DEVICE_DOWN);
	assert_int_equal(ev.port, 1);
	assert_non_null(strstr(ev.text, "port 1"));
	t.a.p->device_query(t.a.dev, &attr);
	assert_false(attr.up);
	assert_true(switch_port(0, "up"));
	wait_event(&t.a, DQ_DEVICE_UP);
	t.a.p->device_query(t.a.dev, &attr);
	assert_true(attr.up);
	exchange(&t, qa, qb, 50000, 0);
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

/* With its port down a QP that has work fails, and says that it is the device. */
static void test_work_on_a_port_that_is_down(void **state)
{
	struct pair t;
	struct dq_qp *qa, *qb;

	(void)state;
	if (!switch_port(0, "up"))
		skip();
	pair_open(&t);
	qp_pair(&t, DQ_QP_DATA, 8, NULL, NULL, &qa, &qb);
	forget_log(&t);
	assert_true(switch_port(0, "down"));
	wait_event(&t.a, DQ_DEVICE_DOWN);
	const struct dq_write wr = write_of(&t.a, &t.b, 1, 0, 4096);
	assert_int_equal(t.a.p->post_write(qa, &wr, 1), 1);
	PUMP_UNTIL(&t, count(&t.a, DQ_WC_FAILED, NULL) == 1);
	assert_int_equal(find(&t.a, DQ_WC_FAILED, 0)->status, DQ_WC_DEVICE);
	assert_true(switch_port(0, "up"));
	wait_event(&t.a, DQ_DEVICE_UP);
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

static void test_addresses(void **state)
{
	struct pair t;
	struct dq_qp *qp;
	struct dq_error err = {0};
	struct dq_endpoint e;
	struct dq_verbs_peer peer;
	struct dq_device_attr attr;
	struct dq_device_event ev;
	union ibv_gid gid;
	char netdev[32], before[64];

	(void)state;
	netdev_of(0, netdev);
	pair_open(&t);
	t.a.p->device_query(t.a.dev, &attr);
	snprintf(before, sizeof before, "%s", attr.address);
	assert_int_equal(command("ip addr add 198.51.100.1/32 dev %s", netdev), 0);
	wait_event(&t.a, DQ_DEVICE_ADDRESS);
	t.a.p->device_query(t.a.dev, &attr);
	assert_string_equal(attr.address, before); /* the choice is the caller's */
	assert_int_equal(t.a.p->device_readdress(t.a.dev, "198.51.100.1", &err), 0);
	t.a.p->device_query(t.a.dev, &attr);
	assert_string_equal(attr.address, "::ffff:198.51.100.1");
	qp = qp_make(&t.a, DQ_QP_DATA, 4, NULL, NULL);
	t.a.p->qp_endpoint(qp, &e);
	assert_int_equal(dq_verbs_endpoint_get(&e, DQ_VERBS_ENDPOINT_QP, &peer, &err), 0);
	assert_int_equal(dq_verbs_gid_parse("198.51.100.1", &gid), 0);
	assert_memory_equal(peer.gid.raw, gid.raw, 16);
	t.a.p->qp_destroy(qp);
	assert_int_equal(command("ip addr del 198.51.100.1/32 dev %s", netdev), 0);
	do
		ev = wait_event(&t.a, DQ_DEVICE_ADDRESS);
	while (!strstr(ev.text, "gone"));
	assert_non_null(strstr(ev.text, "198.51.100.1"));
	assert_int_equal(t.a.p->device_readdress(t.a.dev, "198.51.100.1", &err), -ENOENT);
	assert_non_null(strstr(err.text, before));
	assert_int_equal(t.a.p->device_readdress(t.a.dev, before, &err), 0);
	struct dq_qp *qa, *qb;
	qp_pair(&t, DQ_QP_DATA, 4, NULL, NULL, &qa, &qb);
	exchange(&t, qa, qb, 5000, 0);
	qp_pair_destroy(&t, qa, qb);
	pair_close(&t);
}

/* ---- peers ---- */

/* A peer that is killed says nothing: an idle control QP finds out within some heartbeats. */
static void test_killed_peer(void **state)
{
	struct pair t;
	int to_child[2], to_parent[2];
	struct dq_endpoint mine, other;
	struct dq_error err = {0};

	(void)state;
	assert_int_equal(pipe(to_child), 0);
	assert_int_equal(pipe(to_parent), 0);
	const pid_t child = fork();
	assert_true(child >= 0);
	if (child == 0) { /* before this process opened any device */
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		side_open(&t.b, "verbs", "b", transport_address(1), 50 * MS, 0);
		struct dq_qp *qp = qp_make(&t.b, DQ_QP_CONTROL, 4, NULL, NULL);
		t.b.p->qp_endpoint(qp, &mine);
		if (write(to_parent[1], &mine, sizeof mine) != (ssize_t)sizeof mine || read(to_child[0], &other, sizeof other) != (ssize_t)sizeof other ||
		    t.b.p->qp_connect(qp, &other, false, &err) || write(to_parent[1], "", 1) != 1)
			_exit(1);
		for (;;) {
			struct pollfd fd = {.fd = t.b.p->event_fd(t.b.dev), .events = POLLIN};
			t.b.logged = 0;
			side_poll(&t.b);
			if (!t.b.p->arm(t.b.dev))
				poll(&fd, 1, 10);
		}
	}
	char byte;
	side_open(&t.a, "verbs", "a", transport_address(0), 50 * MS, 0);
	struct dq_qp *qp = qp_make(&t.a, DQ_QP_CONTROL, 4, NULL, NULL);
	t.a.p->qp_endpoint(qp, &mine);
	assert_int_equal(write(to_child[1], &mine, sizeof mine), sizeof mine);
	assert_int_equal(read(to_parent[0], &other, sizeof other), sizeof other);
	assert_int_equal(read(to_parent[0], &byte, 1), 1);
	assert_int_equal(t.a.p->qp_connect(qp, &other, true, &err), 0);
	const uint64_t guard = clock_ns() + PATIENCE_NS;
	bool killed = false;
	uint64_t up_ns = 0;
	while (count(&t.a, DQ_WC_FAILED, NULL) == 0) {
		struct pollfd fd = {.fd = t.a.p->event_fd(t.a.dev), .events = POLLIN};
		assert_true(clock_ns() < guard);
		side_poll(&t.a);
		if (!up_ns && count(&t.a, DQ_WC_CONNECTED, NULL) == 1)
			up_ns = clock_ns();
		if (up_ns && !killed && clock_ns() - up_ns > 1000 * MS) { /* idle, it stays up for twenty heartbeats */
			assert_int_equal(kill(child, SIGKILL), 0);
			assert_int_equal(waitpid(child, NULL, 0), child);
			killed = true;
		}
		if (!t.a.p->arm(t.a.dev))
			poll(&fd, 1, 10);
	}
	assert_true(killed);
	assert_int_equal(t.a.logged, 2);
	assert_int_equal(find(&t.a, DQ_WC_FAILED, 0)->status, DQ_WC_TIMEOUT);
	t.a.p->qp_destroy(qp);
	side_close(&t.a);
	for (int i = 0; i < 2; i++) {
		close(to_child[i]);
		close(to_parent[i]);
	}
}

/* ---- memory ---- */

static int register_as_user(void)
{
	const struct rlimit limit = {65536, 65536};
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct none[2] = {{0}};
	struct side s;
	struct dq_mem *mem;
	struct dq_error err = {0};
	static uint8_t big[8 << 20];
	const struct dq_mem_desc desc = {.addr = big, .len = sizeof big, .dmabuf_fd = -1, .access = DQ_ACCESS_REMOTE_WRITE};

	side_open(&s, "verbs", "a", transport_address(0), 0, 0);
	if (setrlimit(RLIMIT_MEMLOCK, &limit) || syscall(SYS_capset, &header, none))
		return 2;
	const int rc = s.p->mem_register(s.dev, &desc, &mem, &err);
	fprintf(stderr, "%s\n", err.text);
	if (rc != -ENOMEM || !strstr(err.text, "8388608") || !strstr(err.text, "65536") || !strstr(err.text, "LimitMEMLOCK=infinity") ||
	    !strstr(err.text, "CAP_IPC_LOCK"))
		return 3;
	side_close(&s);
	return 0;
}

static void test_memlock(void **state)
{
	int status;

	(void)state;
	fflush(NULL);
	const pid_t child = fork();
	assert_true(child >= 0);
	if (child == 0)
		exit(register_as_user()); /* also takes down the libraries that it loaded */
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), 0);
}

static void test_flush(void **state)
{
	struct pair t;

	(void)state;
	pair_open(&t);
	for (int round = 0; round < 3; round++) {
		assert_int_equal(t.a.p->mem_flush(t.a.mem, 0), 0);
		assert_int_equal(t.a.p->mem_flush(t.a.mem, MEMORY_BYTES), 0);
		assert_int_equal(t.b.p->mem_flush(t.b.mem, 12345), 0);
	}
	assert_int_equal(t.a.p->mem_flush(t.a.mem, MEMORY_BYTES + 1), -EINVAL);
	/* Memory that the device may not read fails it, and the next one works again. */
	struct dq_mem *local;
	struct dq_error err = {0};
	const struct dq_mem_desc desc = {.addr = t.a.bytes, .len = 4096, .dmabuf_fd = -1};
	assert_int_equal(t.a.p->mem_register(t.a.dev, &desc, &local, &err), 0);
	assert_true(t.a.p->mem_flush(local, 0) < 0);
	assert_int_equal(t.a.p->mem_flush(t.a.mem, 1), 0);
	t.a.p->mem_deregister(local);
	pair_close(&t);
}

static void test_dmabuf_refused(void **state)
{
	struct side s;
	struct dq_mem *mem;
	struct dq_error err = {0};

	(void)state;
	side_open(&s, "verbs", "a", transport_address(0), 0, 0);
	const int fd = memfd_create("no-dmabuf", MFD_CLOEXEC);
	const struct dq_mem_desc desc = {.len = 4096, .dmabuf_fd = fd, .access = DQ_ACCESS_REMOTE_WRITE};
	assert_true(s.p->mem_register(s.dev, &desc, &mem, &err) < 0);
	assert_non_null(strstr(err.text, "dma-buf"));
	close(fd);
	side_close(&s);
}

/* ---- queues ---- */

static unsigned pools(const struct side *s)
{
	unsigned n = 0;
	for (const struct dq_verbs_pool *p = atomic_load(&inside(s)->pools); p; p = p->next)
		n++;
	return n;
}

/* More QPs than one completion queue has room for: others are made, all work, and their room is used again. */
static void test_pools(void **state)
{
	enum { QPS = 6, DEPTH = 3000 };
	struct pair t;
	struct dq_qp *qa[QPS], *qb[QPS];

	(void)state;
	pair_open(&t);
	for (int round = 0; round < 2; round++) {
		for (int q = 0; q < QPS; q++)
			qp_pair(&t, DQ_QP_DATA, DEPTH, NULL, NULL, &qa[q], &qb[q]);
		assert_int_equal(pools(&t.a), 3);
		assert_int_equal(pools(&t.b), 3);
		for (int q = 0; q < QPS; q++)
			exchange(&t, qa[q], qb[q], 10000 + (uint32_t)q, 0);
		for (int q = 0; q < QPS; q++)
			qp_pair_destroy(&t, qa[q], qb[q]);
	}
	for (const struct dq_verbs_pool *p = atomic_load(&inside(&t.a)->pools); p; p = p->next) {
		assert_int_equal(p->send_used, 0);
		assert_int_equal(p->receive_used, 0);
	}
	pair_close(&t);
}

/* Receives are neither lost nor without bound while QPs come and go under load. */
static void test_shared_receives(void **state)
{
	enum { ROUNDS = 40, DEPTH = 64 };
	struct pair t;

	(void)state;
	pair_open(&t);
	for (int round = 0; round < ROUNDS; round++) {
		struct dq_qp *qa, *qb;
		struct dq_write wr[DEPTH];
		qp_pair(&t, DQ_QP_DATA, DEPTH, NULL, NULL, &qa, &qb);
		forget_log(&t);
		for (unsigned i = 0; i < DEPTH; i++)
			wr[i] = write_of(&t.a, &t.b, i, 0, 3000);
		for (int turn = 0; turn < 4; turn++) {
			assert_int_equal(t.a.p->post_write(qa, wr, DEPTH), DEPTH);
			if (turn == 3 && round % 2)
				break; /* destroyed with all of it under way */
			forget_log(&t);
			PUMP_UNTIL(&t, t.a.logged == DEPTH && t.b.logged == DEPTH);
		}
		qp_pair_destroy(&t, qa, qb);
	}
	pump_rounds(&t, 10);
	const struct dq_verbs_pool *pool = atomic_load(&inside(&t.b)->pools);
	if (pool->srq) {
		assert_int_equal(pool->receive_used, 0);
		assert_true(pool->srq_posted >= 0 && pool->srq_posted <= pool->receive_room);
	}
	pair_close(&t);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_killed_peer), /* forks: before anything else has opened a device */
		cmocka_unit_test(test_memlock),
		cmocka_unit_test(test_open_errors),
		cmocka_unit_test(test_mtu_is_the_smaller),
		cmocka_unit_test(test_mtu_changes),
		cmocka_unit_test(test_path_mtu),
		cmocka_unit_test(test_port_down_and_up),
		cmocka_unit_test(test_work_on_a_port_that_is_down),
		cmocka_unit_test(test_addresses),
		cmocka_unit_test(test_flush),
		cmocka_unit_test(test_dmabuf_refused),
		cmocka_unit_test(test_pools),
		cmocka_unit_test(test_shared_receives),
	};
	if (!transport_is("verbs")) {
		fprintf(stderr, "skipped: this test is of provider verbs: DQ_TEST_PROVIDER=verbs\n");
		return TRANSPORT_SKIPPED;
	}
	const int rc = transport_env_check();
	return rc ? rc : cmocka_run_group_tests(tests, NULL, NULL);
}
