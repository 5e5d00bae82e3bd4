/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The net plugin in the order in which NCCL calls it: loading, communicators, devices, connections, registration. For every
 * version; over the provider that the environment names (transport_env.h).
 */
#include "nccl_harness.h"

#include <dirent.h>
#include <dlfcn.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <ucontext.h>
#include <unistd.h>

#include "nccl_hosts.h"
#include "transport_env.h"

#define RATE_MBITS 10000 /* of the devices of nccl_hosts_start() */

#define MANY_COMMS 160   /* more than places in the first tables of plugin, library and daemon */

static int fds_open(void)
{
	DIR *d = opendir("/proc/self/fd");
	int n = 0;

	assert_non_null(d);
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

/* Hosts, and no plugin yet. */
static int hosts_only(void **state)
{
	(void)state;
	net_log_clear();
	nccl_hosts_start(2);
	return 0;
}

static int hosts_stop(void **state)
{
	(void)state;
	nccl_hosts_stop();
	return 0;
}

static void exchange(struct job_pair *p, uint32_t seed)
{
	char out[700], in[1000];
	void *mo = job_reg(p->from, p->send, out, sizeof out), *mi = job_reg(p->to, p->recv, in, sizeof in), *send, *recv;
	int bytes = -1;

	job_fill(out, sizeof out, seed);
	memset(in, 0, sizeof in);
	recv = job_irecv(p, in, sizeof in, 0, mi);
	send = job_isend(p, out, sizeof out, 0, mo);
	job_wait(p->to, recv, &bytes);
	assert_int_equal(bytes, sizeof out);
	job_wait(p->from, send, NULL);
	job_check(in, sizeof out, seed);
	job_ok(net_dereg(p->from, p->send, mo));
	job_ok(net_dereg(p->to, p->recv, mi));
}

/* As ncclNetInit() does it: load, look for the newest version, init a communicator, devices, properties of the first. */
static void a_communicator_begins_and_ends(void **state)
{
	const int version = *(const int *)*state, threads = job_threads();
	struct net n;
	struct net_properties first, again;
	struct job_pair self;
	int devices = -1, files;
	bool vdevice, attributes;

	/* The daemon, which is in this process, keeps the connection to itself that the first job makes. */
	job_load(&n, 0, 0, version);
	job_connect(&n, &n, &self);
	job_close(&self);
	job_ok(net_finalize(&n));
	net_unload(&n);
	assert_true(nccl_host_clients_wait(0, 0, JOB_PATIENCE_S));
	files = fds_open();

	assert_true(net_load(&n, net_plugin_path(), version));
	assert_string_equal(net_name(&n), "dqplb"); /* what NCCL_NET selects by */
	assert_true(net_may_be_null(&n, &vdevice, &attributes));
	assert_false(vdevice);                      /* one device a NIC: NCCL must not merge them */
	assert_true(version < 11 || attributes);
	setenv("DQPLB_SOCKET", nccl_host_socket(0), 1);
	job_ok(net_init(&n, 1));
	job_ok(net_devices(&n, &devices));
	assert_int_equal(devices, 1);
	job_ok(net_get_properties(&n, 0, &first));
	assert_int_equal(first.device_type, DQ_NCCL_DEVICE_TYPE_HOST);
	assert_int_equal(first.device_version, DQ_NCCL_DEVICE_VERSION_NONE);
	assert_true(nccl_host_clients_wait(0, 1, JOB_PATIENCE_S));

	/* What NCCL does to see whether GPU memory can be registered: a connection to itself. */
	job_connect(&n, &n, &self);
	exchange(&self, 3);
	job_close(&self);
	job_ok(net_get_properties(&n, 0, &again));
	assert_ptr_equal(first.name, again.name);
	job_ok(net_finalize(&n));
	net_unload(&n);

	/* Nothing of it is left: no thread, no file, no client. */
	assert_true(nccl_host_clients_wait(0, 0, JOB_PATIENCE_S));
	assert_int_equal(job_threads(), threads);
	assert_int_equal(fds_open(), files);
	assert_string_equal(net_log_text(), "");
}

static void all_versions_are_found(void **state)
{
	struct net n;

	(void)state;
	for (int version = NET_VERSION_NEWEST; version >= NET_VERSION_OLDEST; version--) {
		assert_true(net_load(&n, net_plugin_path(), version));
		assert_string_equal(net_name(&n), "dqplb");
		net_unload(&n);
	}
	/* Nothing that a reader of symbols could take for a version of collectives in the network. */
	assert_true(net_load(&n, net_plugin_path(), 12));
	assert_null(dlsym(n.library, "ncclCollNetPlugin_v12"));
	net_unload(&n);
}

static void properties_are_those_of_the_device(void **state)
{
	struct job *job = *state;
	struct net *n = &job->ranks[0];
	struct net_properties p;

	job_ok(net_get_properties(n, 0, &p));
	assert_string_equal(p.name, nccl_host_device(0));
	assert_int_equal(p.speed, RATE_MBITS);
	assert_true(p.latency > 6.1f && p.latency < 6.3f); /* us: half of the round trip, 12,345 ns */
	assert_true(p.ptr_support & DQ_NCCL_PTR_HOST);
	/* There is no device memory here that could have been registered: GPU memory is not promised. */
	assert_false(p.ptr_support & DQ_NCCL_PTR_CUDA);
	assert_false(p.ptr_support & DQ_NCCL_PTR_DMABUF);
	assert_true(p.max_comms > 0);
	assert_true(p.pci_path == NULL || p.pci_path[0] == '/');
	if (job->version < 9) {
		assert_int_equal(p.max_recvs, 1);
	} else {
		assert_int_equal(p.max_recvs, DQ_NCCL_RECVS_MAX);
		assert_int_equal(p.vdevices, 1);
		assert_int_equal(p.vdevice0, 0);
		assert_true(p.max_p2p_bytes > 0 && p.max_p2p_bytes <= DQ_NCCL_MESSAGE_BYTES_MAX);
		assert_true(p.max_coll_bytes > 0 && p.max_coll_bytes <= DQ_NCCL_MESSAGE_BYTES_MAX);
		assert_true(p.force_flush == 0 || p.force_flush == 1);
	}
	if (job->version >= 11)
		assert_int_equal(p.max_multi_request, 1);
	if (job->version >= 12)
		assert_int_equal(p.rail, 0);
	assert_int_not_equal(net_get_properties(n, 1, &p), DQ_NCCL_SUCCESS);
	assert_int_not_equal(net_get_properties(n, -1, &p), DQ_NCCL_SUCCESS);
}

/* NCCL initialises for each communicator; contexts come and go in any order, and are not each a client of the daemon. */
static void communicators_share_few_clients(void **state)
{
	struct job *job = *state;
	struct net first = job->ranks[0], second = job->ranks[0], more[20];
	struct job_pair p;

	job_ok(net_init(&second, 77));
	if (job->version >= 11)
		assert_ptr_not_equal(first.ctx, second.ctx);
	for (uint64_t i = 0; i < 20; i++) {
		more[i] = job->ranks[0];
		job_ok(net_init(&more[i], i));
	}
	assert_in_range(nccl_host_clients(0), 1, 4);
	for (int i = 19; i >= 0; i--)
		job_ok(net_finalize(&more[i]));
	job_connect(&second, &job->ranks[1], &p);
	exchange(&p, 1);
	job_close(&p);
	job_ok(net_finalize(&second));

	/* Once more, of what is no more, and of nothing: nobody else loses by it. */
	net_finalize(&second);
	if (job->version >= 11) {
		second.ctx = NULL;
		net_finalize(&second);
	}

	/* The first one goes on. */
	job_connect(&first, &job->ranks[1], &p);
	exchange(&p, 2);
	job_close(&p);
	if (job->version < 11)
		return;
	/* The last one out closes the door, and a new one opens it again. */
	job_ok(net_finalize(&first));
	assert_true(nccl_host_clients_wait(0, 0, JOB_PATIENCE_S));
	setenv("DQPLB_SOCKET", nccl_host_socket(0), 1);
	job_ok(net_init(&job->ranks[0], 5));
	job_connect(&job->ranks[0], &job->ranks[1], &p);
	exchange(&p, 4);
	job_close(&p);
}

static void no_daemon_no_network(void **state)
{
	const int version = *(const int *)*state, threads = job_threads(), files = fds_open();
	struct net n;

	assert_true(net_load(&n, net_plugin_path(), version));
	setenv("DQPLB_SOCKET", "/tmp/no-such-folder/client.sock", 1);
	for (int i = 0; i < 2; i++) {
		net_log_clear();
		assert_int_equal(net_init(&n, 1), DQ_NCCL_SYSTEM_ERROR);
		if (!net_log_has("/tmp/no-such-folder/client.sock") || !net_log_has("dqplbd.service"))
			job_fail("the warning names not both the socket and the unit to start: %s", net_log_text());
	}
	setenv("DQPLB_SOCKET", "no/absolute/path", 1);
	net_log_clear();
	assert_int_equal(net_init(&n, 1), DQ_NCCL_INVALID_USAGE);
	assert_true(net_log_has("DQPLB_SOCKET"));
	net_unload(&n);

	/* A program that tries again later finds the daemon that was started meanwhile. */
	assert_true(net_load(&n, net_plugin_path(), version));
	setenv("DQPLB_SOCKET", "/tmp/no-such-folder/client.sock", 1);
	assert_int_equal(net_init(&n, 1), DQ_NCCL_SYSTEM_ERROR);
	setenv("DQPLB_SOCKET", nccl_host_socket(0), 1);
	job_ok(net_init(&n, 1));
	job_ok(net_finalize(&n));
	net_unload(&n);
	assert_true(nccl_host_clients_wait(0, 0, JOB_PATIENCE_S));
	assert_int_equal(job_threads(), threads);
	assert_int_equal(fds_open(), files);
}

/* NCCL passes the same bytes to connect() each time, from wherever they lie in its messages. */
static void connecting_is_asked_for_thousands_of_times(void **state)
{
	struct job *job = *state;
	struct {
		char before[3], handle[DQ_NCCL_HANDLE_BYTES], after[5]; /* at an odd address */
	} at = {.before = "<<", .after = ">>>>"};
	char sent[DQ_NCCL_HANDLE_BYTES];
	void *listener = NULL, *send = NULL, *recv = NULL;
	struct job_pair p = {.from = &job->ranks[0], .to = &job->ranks[1]};

	nccl_hosts_hold(true);
	job_ok(net_listen(p.to, 0, sent, &listener));
	assert_non_null(listener);
	memcpy(at.handle, sent, sizeof sent);
	for (int i = 0; i < 5000; i++) {
		job_ok(net_connect(p.from, 0, at.handle, &send));
		assert_null(send);
		job_ok(net_accept(p.to, listener, &recv));
		assert_null(recv);
	}
	assert_string_equal(at.before, "<<");
	assert_string_equal(at.after, ">>>>");
	nccl_hosts_hold(false);
	job_ok(job_connect_outcome(p.from, at.handle, &p.send));
	job_ok(job_accept_outcome(p.to, listener, &p.recv));
	assert_string_equal(at.before, "<<");
	assert_string_equal(at.after, ">>>>");
	job_ok(net_close_listen(p.to, listener));
	exchange(&p, 9);
	job_close(&p);
}

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) /* that sanitizer makes calls of its own */
/* System calls of this thread are handed to a signal's handler (prctl(2), PR_SET_SYSCALL_USER_DISPATCH, Linux 5.11), which counts
 * them and makes them itself. */
#define DISPATCH 59       /* linux/prctl.h of that version, which is not on every build machine */
#define DISPATCH_OFF 0
#define DISPATCH_ON 1
static volatile char calls_blocked; /* the kernel reads it at each call: 0 lets it pass */
static volatile int calls_counted;
static volatile long calls_last;

static long raw_call(const greg_t *r)
{
	register long r10 __asm__("r10") = r[REG_R10], r8 __asm__("r8") = r[REG_R8], r9 __asm__("r9") = r[REG_R9];
	long result;

	__asm__ volatile("syscall" : "=a"(result) : "a"(r[REG_RAX]), "D"(r[REG_RDI]), "S"(r[REG_RSI]), "d"(r[REG_RDX]), "r"(r10), "r"(r8),
			 "r"(r9) : "rcx", "r11", "memory");
	return result;
}

static void on_call(int number, siginfo_t *info, void *context)
{
	ucontext_t *u = context;

	(void)number;
	calls_blocked = 0; /* also for the return from here */
	calls_counted++;
	calls_last = info->si_syscall;
	u->uc_mcontext.gregs[REG_RAX] = info->si_syscall;
	u->uc_mcontext.gregs[REG_RAX] = raw_call(u->uc_mcontext.gregs);
}

static bool count_calls(void)
{
	struct sigaction action = {.sa_sigaction = on_call, .sa_flags = SA_SIGINFO};

	calls_counted = 0;
	calls_blocked = 0;
	return sigaction(SIGSYS, &action, NULL) == 0 && prctl(DISPATCH, DISPATCH_ON, 0, 0, &calls_blocked) == 0;
}

static void count_no_calls(void)
{
	prctl(DISPATCH, DISPATCH_OFF, 0, 0, 0);
	signal(SIGSYS, SIG_DFL);
}
#else
static char calls_blocked;
static int calls_counted;
static long calls_last;
static bool count_calls(void)
{
	return false;
}
static void count_no_calls(void)
{
}
#endif

/* NCCL's threads ask without end while they wait: the answer lies in memory. Each 10 ms the library looks at its socket, for a
 * daemon that died without a word. */
static void asking_makes_no_system_calls(void **state)
{
	enum { ROUNDS = 3000 };
	struct job *job = *state;
	char handle[DQ_NCCL_HANDLE_BYTES], in[64];
	void *listener = NULL, *send = NULL, *recv = NULL, *mhandle, *request;
	struct job_pair p;
	double begin, spent;
	int results = 0, done = 0;
	bool counts;

	job_connect(&job->ranks[0], &job->ranks[0], &p);
	mhandle = job_reg(p.to, p.recv, in, sizeof in);
	request = job_irecv(&p, in, sizeof in, 0, mhandle);
	nccl_hosts_hold(true);
	job_ok(net_listen(&job->ranks[1], 0, handle, &listener));
	job_ok(net_connect(&job->ranks[0], 0, handle, &send));
	job_ok(net_accept(&job->ranks[1], listener, &recv));
	counts = count_calls();
	begin = job_now_s();
	for (int i = 0; i < ROUNDS && counts; i++) {
		calls_blocked = 1;
		results |= net_connect(&job->ranks[0], 0, handle, &send);
		calls_blocked = 1;
		results |= net_accept(&job->ranks[1], listener, &recv);
		calls_blocked = 1;
		results |= net_test(p.to, request, &done, NULL);
		calls_blocked = 0;
	}
	spent = job_now_s() - begin;
	count_no_calls();
	assert_int_equal(results, DQ_NCCL_SUCCESS);
	assert_null(send);
	assert_null(recv);
	if (calls_counted > 10 + (int)(spent * 100 * 4)) /* of each of a few contexts */
		job_fail("%d system calls, the last of them number %ld, in %d calls of the plugin within %.3f s", calls_counted, calls_last,
			 3 * ROUNDS, spent);
	nccl_hosts_hold(false);
	job_ok(net_close_listen(&job->ranks[1], listener));
	job_close(&p);
	job_ok(net_dereg(&job->ranks[0], NULL, mhandle));
	if (!counts)
		skip();
}

/* One listener, several senders: NCCL makes a listener for each, but a handle allows it. */
static void a_listener_accepts_one_after_the_other(void **state)
{
	struct job *job = *state;
	char handle[DQ_NCCL_HANDLE_BYTES], mine[3][DQ_NCCL_HANDLE_BYTES];
	void *listener = NULL;
	struct job_pair p[3];

	job_ok(net_listen(&job->ranks[1], 0, handle, &listener));
	for (int i = 0; i < 3; i++) {
		memcpy(mine[i], handle, sizeof handle);
		p[i] = (struct job_pair){.from = &job->ranks[0], .to = &job->ranks[1]};
		while (!p[i].send || !p[i].recv) {
			if (!p[i].send)
				job_ok(net_connect(p[i].from, 0, mine[i], &p[i].send));
			if (!p[i].recv)
				job_ok(net_accept(p[i].to, listener, &p[i].recv));
			sched_yield();
		}
	}
	job_ok(net_close_listen(&job->ranks[1], listener));
	for (int i = 0; i < 3; i++)
		exchange(&p[i], (uint32_t)i);
	for (int i = 0; i < 3; i++)
		job_close(&p[i]);
}

static void a_connection_that_nobody_takes_is_given_up(void **state)
{
	const int version = *(const int *)*state;
	char handle[DQ_NCCL_HANDLE_BYTES];
	void *listener = NULL, *comm = NULL;
	struct net n[2];

	setenv("DQPLB_NCCL_CONNECT_TIMEOUT_S", "1", 1);
	for (unsigned i = 0; i < 2; i++)
		job_load(&n[i], i, i, version);
	unsetenv("DQPLB_NCCL_CONNECT_TIMEOUT_S");
	nccl_hosts_hold(true);
	job_ok(net_listen(&n[1], 0, handle, &listener));
	net_log_clear();
	assert_int_equal(job_connect_outcome(&n[0], handle, &comm), DQ_NCCL_REMOTE_ERROR);
	if (!net_log_has("beta"))
		job_fail("the warning does not name the peer: %s", net_log_text());
	assert_int_equal(job_accept_outcome(&n[1], listener, &comm), DQ_NCCL_REMOTE_ERROR);
	job_ok(net_close_listen(&n[1], listener));
	nccl_hosts_hold(false);
	for (unsigned i = 0; i < 2; i++) {
		job_ok(net_finalize(&n[i]));
		net_unload(&n[i]);
	}
}

static void a_setting_that_is_none_is_named(void **state)
{
	static const char *const wrong[][2] = {
		{"DQPLB_NCCL_CONNECT_TIMEOUT_S", "soon"}, {"DQPLB_NCCL_CONNECT_TIMEOUT_S", "0"}, {"DQPLB_NCCL_CONTEXTS", "-1"},
		{"DQPLB_NCCL_CONTEXTS", ""},
	};
	const int version = *(const int *)*state;
	struct net n;

	for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
		assert_true(net_load(&n, net_plugin_path(), version));
		setenv("DQPLB_SOCKET", nccl_host_socket(0), 1);
		setenv(wrong[i][0], wrong[i][1], 1);
		net_log_clear();
		assert_int_equal(net_init(&n, 1), DQ_NCCL_INVALID_USAGE);
		unsetenv(wrong[i][0]);
		if (!net_log_has(wrong[i][0]) || !net_log_has(wrong[i][1]))
			job_fail("the warning names not both %s and '%s': %s", wrong[i][0], wrong[i][1], net_log_text());
		net_unload(&n);
	}
}

static void a_bad_handle_is_refused(void **state)
{
	struct job *job = *state;
	struct net *from = &job->ranks[0], *to = &job->ranks[1];
	char handle[DQ_NCCL_HANDLE_BYTES], damaged[DQ_NCCL_HANDLE_BYTES];
	void *listener = NULL, *comm = NULL;
	struct job_pair p;
	int rc;

	/* Of a listener that is closed. */
	job_ok(net_listen(to, 0, handle, &listener));
	job_ok(net_close_listen(to, listener));
	net_log_clear();
	assert_int_equal(job_connect_outcome(from, handle, &comm), DQ_NCCL_REMOTE_ERROR);
	if (!net_log_has("beta"))
		job_fail("the warning does not name the peer: %s", net_log_text());

	/* Of an earlier life of the peer's daemon. */
	job_ok(net_listen(to, 0, handle, &listener));
	job_ok(net_close_listen(to, listener));
	net_finalize(to);
	net_unload(to);
	nccl_host_revive(1);
	net_log_clear();
	assert_int_equal(job_connect_outcome(from, handle, &comm), DQ_NCCL_REMOTE_ERROR);
	assert_string_not_equal(net_log_text(), "");
	job_load(to, 1, 1, job->version);

	/* Bytes of something else. */
	memset(damaged, 0, sizeof damaged);
	net_log_clear();
	assert_int_not_equal(job_connect_outcome(from, damaged, &comm), DQ_NCCL_SUCCESS);
	assert_string_not_equal(net_log_text(), "");
	job_fill(damaged, sizeof damaged, 5);
	assert_int_not_equal(job_connect_outcome(from, damaged, &comm), DQ_NCCL_SUCCESS);

	/* Each byte by itself: it may not matter, but never is it another connection, a crash or an endless wait. */
	for (size_t i = 0; i < sizeof handle; i += 5) {
		job_ok(net_listen(to, 0, handle, &listener));
		memcpy(damaged, handle, sizeof handle);
		damaged[i] = (char)(damaged[i] ^ 0x41);
		rc = job_connect_outcome(from, damaged, &comm);
		if (rc == DQ_NCCL_SUCCESS)
			job_ok(net_close_send(from, comm));
		job_ok(net_close_listen(to, listener));
	}

	/* After all that connections work. */
	job_connect(from, to, &p);
	exchange(&p, 6);
	job_close(&p);
}

static void many_comms_at_once(void **state)
{
	struct job *job = *state;
	static struct job_pair pairs[MANY_COMMS];
	static void *listeners[MANY_COMMS];
	static char handles[MANY_COMMS][DQ_NCCL_HANDLE_BYTES];
	const double end = job_now_s() + JOB_PATIENCE_S;
	unsigned left = MANY_COMMS;

	memset(pairs, 0, sizeof pairs);
	for (int i = 0; i < MANY_COMMS; i++) {
		pairs[i].from = &job->ranks[i % 2];
		pairs[i].to = &job->ranks[i % 3 ? 1 - i % 2 : i % 2]; /* every third one to itself */
		job_ok(net_listen(pairs[i].to, 0, handles[i], &listeners[i]));
	}
	while (left) {
		left = 0;
		for (int i = 0; i < MANY_COMMS; i++) {
			struct job_pair *p = &pairs[i];

			if (!p->send)
				job_ok(net_connect(p->from, 0, handles[i], &p->send));
			if (!p->recv)
				job_ok(net_accept(p->to, listeners[i], &p->recv));
			left += !p->send || !p->recv;
		}
		if (job_now_s() > end)
			job_fail("%u of %u comms are not connected; warnings: %s", left, MANY_COMMS, net_log_text());
		sched_yield();
	}
	for (int i = 0; i < MANY_COMMS; i++)
		job_ok(net_close_listen(pairs[i].to, listeners[i]));
	for (int i = 0; i < MANY_COMMS; i += MANY_COMMS / 16)
		exchange(&pairs[i], (uint32_t)i);
	for (int i = 0; i < MANY_COMMS; i++)
		job_close(&pairs[i]);
}

/* The same buffer for each comm, pieces of it, memory that came to lie where other memory was. */
static void memory_is_registered_and_forgotten(void **state)
{
	struct job *job = *state;
	struct job_pair p;
	void *mhandles[64];
	char *buffer = malloc(1 << 20);
	const unsigned before = nccl_host_memory(0);

	assert_non_null(buffer);
	job_connect(&job->ranks[0], &job->ranks[1], &p);
	for (int i = 0; i < 64; i++) {
		/* Any address and any length; comms of either kind. */
		mhandles[i] = job_reg(p.from, p.send, buffer + i % 4 * 1001, (size_t)(1 + i % 8 * 70001));
		assert_non_null(mhandles[i]);
	}
	for (int i = 63; i >= 0; i -= 2)
		job_ok(net_dereg(p.from, p.send, mhandles[i]));
	for (int i = 0; i < 64; i += 2)
		job_ok(net_dereg(p.from, p.send, mhandles[i]));
	free(buffer);
	for (int round = 0; round < 8; round++) {
		/* Most likely at the same address again, with other bytes in it. */
		char *out = malloc(300000), *in = malloc(300000);
		void *mo, *mi, *send, *recv;

		assert_non_null(out);
		assert_non_null(in);
		mo = job_reg(p.from, p.send, out, 300000);
		mi = job_reg(p.to, p.recv, in, 300000);
		job_fill(out, 300000, (uint32_t)round);
		recv = job_irecv(&p, in, 300000, 0, mi);
		send = job_isend(&p, out, 300000, 0, mo);
		job_wait(p.to, recv, NULL);
		job_wait(p.from, send, NULL);
		job_check(in, 300000, (uint32_t)round);
		job_ok(net_dereg(p.from, p.send, mo));
		job_ok(net_dereg(p.to, p.recv, mi));
		free(out);
		free(in);
	}
	/* What is wrong is told, with what it was. */
	net_log_clear();
	assert_int_not_equal(net_reg(p.from, p.send, mhandles, 0, DQ_NCCL_PTR_HOST, mhandles), DQ_NCCL_SUCCESS);
	assert_int_not_equal(net_reg(p.from, p.send, NULL, 4096, DQ_NCCL_PTR_HOST, mhandles), DQ_NCCL_SUCCESS);
	assert_int_not_equal(net_reg(p.from, p.send, mhandles, 64, DQ_NCCL_PTR_CUDA, mhandles), DQ_NCCL_SUCCESS);
	assert_int_not_equal(net_reg_dmabuf(p.from, p.send, mhandles, 64, DQ_NCCL_PTR_CUDA, 0, STDERR_FILENO, mhandles),
			     DQ_NCCL_SUCCESS);
	assert_string_not_equal(net_log_text(), "");
	job_close(&p);
	/* Staging memory aside, which is kept for the next transfer. */
	assert_true(nccl_host_memory(0) <= before + 1);
}

static void attributes_are_hints(void **state)
{
	struct job *job = *state;
	struct job_pair p;

	uint32_t peers, flows;
	const double end = job_now_s() + JOB_PATIENCE_S;

	job_ok(net_set_attributes(&job->ranks[0], 1, 1));
	do {
		/* For each operation, as NCCL does: one may come while the daemon has not answered the last. */
		job_ok(net_set_attributes(&job->ranks[0], 4096, 32));
		nccl_host_hint(0, &peers, &flows);
		if (job_now_s() > end)
			job_fail("the daemon was told of %u peers and %u flows, expected 4096 and 32", peers, flows);
	} while (job->version >= 11 && (peers != 4096 || flows != 32));
	job_ok(net_set_attributes(&job->ranks[0], DQ_NCCL_UNDEFINED, DQ_NCCL_UNDEFINED));
	job_ok(net_set_attributes(&job->ranks[0], INT32_MAX, INT32_MIN));
	job_connect(&job->ranks[0], &job->ranks[1], &p);
	exchange(&p, 8);
	job_close(&p);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(a_communicator_begins_and_ends, hosts_only, hosts_stop),
		cmocka_unit_test(all_versions_are_found),
		cmocka_unit_test_setup_teardown(properties_are_those_of_the_device, job_start, job_stop),
		cmocka_unit_test_setup_teardown(communicators_share_few_clients, job_start, job_stop),
		cmocka_unit_test_setup_teardown(no_daemon_no_network, hosts_only, hosts_stop),
		cmocka_unit_test_setup_teardown(connecting_is_asked_for_thousands_of_times, job_start, job_stop),
		cmocka_unit_test_setup_teardown(asking_makes_no_system_calls, job_start, job_stop),
		cmocka_unit_test_setup_teardown(a_listener_accepts_one_after_the_other, job_start, job_stop),
		cmocka_unit_test_setup_teardown(a_connection_that_nobody_takes_is_given_up, hosts_only, hosts_stop),
		cmocka_unit_test_setup_teardown(a_setting_that_is_none_is_named, hosts_only, hosts_stop),
		cmocka_unit_test_setup_teardown(a_bad_handle_is_refused, job_start, job_stop),
		cmocka_unit_test_setup_teardown(many_comms_at_once, job_start, job_stop),
		cmocka_unit_test_setup_teardown(memory_is_registered_and_forgotten, job_start, job_stop),
		cmocka_unit_test_setup_teardown(attributes_are_hints, job_start, job_stop),
	};
	const int unfit = transport_env_check();

	return unfit ? unfit : job_run(tests, sizeof tests / sizeof *tests);
}
