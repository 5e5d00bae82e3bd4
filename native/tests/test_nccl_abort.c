/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ends of all kinds under the net plugin: comms closed in every state, a peer's process killed, a path that fails, a daemon that
 * goes and comes back. Nothing hangs, everybody is told, nothing is left. For every version.
 */
#include "nccl_harness.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "nccl_hosts.h"
#include "transport_env.h"

#define OUTSTANDING 8
#define BIG ((size_t)2 << 20) /* takes longer than what comes next */

struct transfer {
	struct job_pair p;
	uint8_t *out, *in;
	void *mo, *mi;
	void *sends[OUTSTANDING], *recvs[OUTSTANDING];
};

static void transfer_open(struct job *job, struct transfer *t)
{
	memset(t, 0, sizeof *t);
	t->out = malloc(BIG);
	t->in = malloc(BIG);
	assert_non_null(t->out);
	assert_non_null(t->in);
	memset(t->out, 1, BIG);
	memset(t->in, 0, BIG);
	job_connect(&job->ranks[0], &job->ranks[1], &t->p);
	t->mo = job_reg(t->p.from, t->p.send, t->out, BIG);
	t->mi = job_reg(t->p.to, t->p.recv, t->in, BIG);
}

/* Post without waiting for room; what finds none is not there. */
static void transfer_post(struct transfer *t, unsigned sends, unsigned recvs, size_t bytes)
{
	for (unsigned i = 0; i < recvs; i++) {
		void *at = t->in;
		size_t room = bytes;
		int tag = 0;

		t->recvs[i] = NULL;
		job_ok(net_irecv(t->p.to, t->p.recv, 1, &at, &room, &tag, &t->mi, &t->recvs[i]));
	}
	for (unsigned i = 0; i < sends; i++) {
		t->sends[i] = NULL;
		job_ok(net_isend(t->p.from, t->p.send, t->out, bytes, 0, t->mo, &t->sends[i]));
	}
}

static void transfer_free(struct transfer *t)
{
	free(t->out);
	free(t->in);
}

/* That of requests under way none stays so; those of a comm that lost its other end fail with this. */
static void outcomes_are(struct net *n, void **requests, unsigned count, int expected)
{
	for (unsigned i = 0; i < count; i++) {
		int rc = requests[i] ? job_outcome(n, requests[i]) : expected;

		if (rc != expected && rc != DQ_NCCL_SUCCESS)
			job_fail("request %u ended with %d, expected %d; warnings: %s", i, rc, expected, net_log_text());
		requests[i] = NULL;
	}
}

static void it_still_works(struct job *job)
{
	struct transfer t;

	transfer_open(job, &t);
	for (unsigned i = 0; i < 3; i++) {
		void *recv = job_irecv(&t.p, t.in, 300000, 0, t.mi), *send;

		job_fill(t.out, 300000, i);
		send = job_isend(&t.p, t.out, 300000, 0, t.mo);
		job_wait(t.p.to, recv, NULL);
		job_wait(t.p.from, send, NULL);
		job_check(t.in, 300000, i);
	}
	job_ok(net_dereg(t.p.from, t.p.send, t.mo));
	job_ok(net_dereg(t.p.to, t.p.recv, t.mi));
	job_close(&t.p);
	transfer_free(&t);
}

/* --- closing ------------------------------------------------------------------------------------------------------ */

static void a_listener_is_closed(void **state)
{
	struct job *job = *state;
	char handle[DQ_NCCL_HANDLE_BYTES];
	void *listener = NULL, *recv = NULL, *send = NULL;

	/* Asked by nobody; asked to accept; with somebody on the way. */
	job_ok(net_listen(&job->ranks[1], 0, handle, &listener));
	job_ok(net_close_listen(&job->ranks[1], listener));
	job_ok(net_listen(&job->ranks[1], 0, handle, &listener));
	for (int i = 0; i < 10; i++)
		job_ok(net_accept(&job->ranks[1], listener, &recv));
	assert_null(recv);
	job_ok(net_close_listen(&job->ranks[1], listener));
	job_ok(net_listen(&job->ranks[1], 0, handle, &listener));
	nccl_hosts_hold(true);
	for (int i = 0; i < 10; i++)
		job_ok(net_connect(&job->ranks[0], 0, handle, &send));
	assert_null(send);
	job_ok(net_close_listen(&job->ranks[1], listener));
	nccl_hosts_hold(false);
	assert_int_equal(job_connect_outcome(&job->ranks[0], handle, &send), DQ_NCCL_REMOTE_ERROR);
	it_still_works(job);
}

/* NCCL has no call that ends a connect which it began: it stops asking. */
static void a_connect_is_given_up(void **state)
{
	struct job *job = *state;
	char handle[DQ_NCCL_HANDLE_BYTES];
	void *listener = NULL, *send = NULL;

	nccl_hosts_hold(true);
	job_ok(net_listen(&job->ranks[1], 0, handle, &listener));
	for (int i = 0; i < 10; i++)
		job_ok(net_connect(&job->ranks[0], 0, handle, &send));
	assert_null(send);
	job_ok(net_close_listen(&job->ranks[1], listener));
	if (job->version < 11) {
		nccl_hosts_hold(false);
		it_still_works(job);
		return;
	}
	job_ok(net_finalize(&job->ranks[0]));
	net_unload(&job->ranks[0]);
	assert_true(nccl_host_clients_wait(0, 0, JOB_PATIENCE_S));
	nccl_hosts_hold(false);
	job_load(&job->ranks[0], 0, 0, job->version);
	it_still_works(job);
}

/* Of the two ends one closes while this many are under way; the other is told. In every order, with the memory before or after. */
static void comms_are_closed_in_every_state(void **state)
{
	static const struct {
		unsigned sends, recvs;
		size_t bytes;
	} states[] = {
		{0, 0, 0}, {OUTSTANDING, 0, 1000}, {0, OUTSTANDING, 1000}, {OUTSTANDING, OUTSTANDING, BIG}, {OUTSTANDING, 1, 1000}, {1, OUTSTANDING, BIG},
	};
	struct job *job = *state;

	for (size_t i = 0; i < sizeof states / sizeof *states; i++)
		for (int order = 0; order < 4; order++) {
			const bool sender_first = order & 1, memory_first = order & 2;
			struct transfer t;

			transfer_open(job, &t);
			transfer_post(&t, states[i].sends, states[i].recvs, states[i].bytes);
			if (memory_first) {
				job_ok(net_dereg(t.p.from, t.p.send, t.mo));
				job_ok(net_dereg(t.p.to, t.p.recv, t.mi));
			}
			if (sender_first) {
				if (!memory_first)
					job_ok(net_dereg(t.p.from, t.p.send, t.mo));
				job_ok(net_close_send(t.p.from, t.p.send));
				if (!memory_first)
					outcomes_are(t.p.to, t.recvs, states[i].recvs, DQ_NCCL_REMOTE_ERROR);
			} else {
				if (!memory_first)
					job_ok(net_dereg(t.p.to, t.p.recv, t.mi));
				job_ok(net_close_recv(t.p.to, t.p.recv));
				if (!memory_first)
					outcomes_are(t.p.from, t.sends, states[i].sends, DQ_NCCL_REMOTE_ERROR);
			}
			if (sender_first) {
				if (!memory_first)
					job_ok(net_dereg(t.p.to, t.p.recv, t.mi));
				job_ok(net_close_recv(t.p.to, t.p.recv));
			} else {
				if (!memory_first)
					job_ok(net_dereg(t.p.from, t.p.send, t.mo));
				job_ok(net_close_send(t.p.from, t.p.send));
			}
			/* It is this process's own again at once: nothing of the closed comm may write there. */
			transfer_free(&t);
		}
	it_still_works(job);
}

/* One side of a connection is there, the other was never taken. */
static void half_a_connection_is_closed(void **state)
{
	struct job *job = *state;
	struct net *from = &job->ranks[0], *to = &job->ranks[1];
	char handle[DQ_NCCL_HANDLE_BYTES];
	void *listener = NULL, *send = NULL, *recv = NULL;

	job_ok(net_listen(to, 0, handle, &listener));
	for (int i = 0; i < 100 && !send; i++) /* may wait for accept() */
		job_ok(net_connect(from, 0, handle, &send));
	job_ok(net_close_listen(to, listener));
	if (send)
		job_ok(net_close_send(from, send));
	job_ok(net_listen(to, 0, handle, &listener));
	send = NULL;
	while (!recv) {
		job_ok(net_accept(to, listener, &recv));
		if (!send)
			job_ok(net_connect(from, 0, handle, &send));
		sched_yield();
	}
	job_ok(net_close_recv(to, recv));
	job_ok(net_close_listen(to, listener));
	if (send)
		job_ok(net_close_send(from, send));
	it_still_works(job);
}

/* NCCL's abort: finalize without closing anything, with requests under way. */
static void everything_ends_at_once(void **state)
{
	struct job *job = *state;
	struct transfer t;

	if (job->version < 11)
		return; /* there is no finalize */
	transfer_open(job, &t);
	transfer_post(&t, OUTSTANDING, OUTSTANDING, BIG);
	job_ok(net_finalize(&job->ranks[0]));
	job_ok(net_dereg(&job->ranks[0], NULL, t.mo)); /* too late, and of a comm that is gone */
	net_unload(&job->ranks[0]);
	assert_true(nccl_host_clients_wait(0, 0, JOB_PATIENCE_S));
	outcomes_are(t.p.to, t.recvs, OUTSTANDING, DQ_NCCL_REMOTE_ERROR);
	job_ok(net_dereg(t.p.to, t.p.recv, t.mi));
	job_ok(net_close_recv(t.p.to, t.p.recv));
	transfer_free(&t);
	job_load(&job->ranks[0], 0, 0, job->version);
	it_still_works(job);
}

/* --- failures ----------------------------------------------------------------------------------------------------- */

static void a_path_fails(void **state)
{
	struct job *job = *state;
	struct transfer t;

	transfer_open(job, &t);
	transfer_post(&t, OUTSTANDING, OUTSTANDING, BIG);
	net_log_clear();
	nccl_hosts_cut();
	outcomes_are(t.p.from, t.sends, OUTSTANDING, DQ_NCCL_REMOTE_ERROR);
	outcomes_are(t.p.to, t.recvs, OUTSTANDING, DQ_NCCL_REMOTE_ERROR);
	if (!net_log_has("alpha") && !net_log_has("beta"))
		job_fail("no warning names the peer: %s", net_log_text());
	/* Of that comm nothing works any more, and it says so each time. */
	for (int i = 0; i < 3; i++) {
		void *request = NULL;
		int rc = net_isend(t.p.from, t.p.send, t.out, 8, 0, t.mo, &request);

		assert_int_equal(rc == DQ_NCCL_SUCCESS && request ? job_outcome(t.p.from, request) : rc, DQ_NCCL_REMOTE_ERROR);
	}
	job_ok(net_dereg(t.p.from, t.p.send, t.mo));
	job_ok(net_dereg(t.p.to, t.p.recv, t.mi));
	job_close(&t.p);
	transfer_free(&t);
	it_still_works(job);
}

static void the_peers_daemon_is_gone(void **state)
{
	struct job *job = *state;
	struct transfer t;

	transfer_open(job, &t);
	transfer_post(&t, OUTSTANDING, OUTSTANDING, BIG);
	net_log_clear();
	nccl_host_kill(1);
	outcomes_are(t.p.from, t.sends, OUTSTANDING, DQ_NCCL_REMOTE_ERROR);
	outcomes_are(t.p.to, t.recvs, OUTSTANDING, DQ_NCCL_SYSTEM_ERROR);
	job_ok(net_dereg(t.p.from, t.p.send, t.mo));
	job_ok(net_dereg(t.p.to, t.p.recv, t.mi));
	job_close(&t.p);
	transfer_free(&t);
	net_finalize(&job->ranks[1]);
	net_unload(&job->ranks[1]);
	nccl_host_revive(1);
	job_load(&job->ranks[1], 1, 1, job->version);
	it_still_works(job);
}

/* Every call on what it had fails at once, or, where it gives something back, succeeds; none waits for the daemon. */
static void the_own_daemon_is_gone(void **state)
{
	struct job *job = *state;
	struct net *n = &job->ranks[0];
	char handle[DQ_NCCL_HANDLE_BYTES];
	struct net_properties properties;
	struct transfer t;
	void *listener = NULL, *comm = NULL, *request = NULL, *mhandle = NULL;
	int devices = 0, rc;
	double begin;

	transfer_open(job, &t);
	job_ok(net_listen(n, 0, handle, &listener));
	transfer_post(&t, OUTSTANDING, OUTSTANDING, BIG);
	net_log_clear();
	nccl_host_kill(0);
	begin = job_now_s();
	outcomes_are(t.p.from, t.sends, OUTSTANDING, DQ_NCCL_SYSTEM_ERROR);
	outcomes_are(t.p.to, t.recvs, OUTSTANDING, DQ_NCCL_REMOTE_ERROR);
	rc = net_isend(n, t.p.send, t.out, 8, 0, t.mo, &request);
	assert_int_equal(rc == DQ_NCCL_SUCCESS && request ? job_outcome(n, request) : rc, DQ_NCCL_SYSTEM_ERROR);
	assert_int_equal(job_accept_outcome(n, listener, &comm), DQ_NCCL_SYSTEM_ERROR);
	assert_int_equal(job_connect_outcome(n, handle, &comm), DQ_NCCL_SYSTEM_ERROR);
	net_reg(n, t.p.send, t.out, 4096, DQ_NCCL_PTR_HOST, &mhandle); /* needs no daemon, so it may */
	if (mhandle)
		job_ok(net_dereg(n, t.p.send, mhandle));
	/* The devices are those that NCCL was told of: it asked once, and counts on them. */
	job_ok(net_devices(n, &devices));
	job_ok(net_get_properties(n, 0, &properties));
	assert_string_equal(properties.name, nccl_host_device(0));
	job_ok(net_dereg(n, t.p.send, t.mo));
	job_ok(net_close_send(n, t.p.send));
	job_ok(net_close_listen(n, listener));
	assert_true(job_now_s() - begin < JOB_PATIENCE_S);
	if (!net_log_has("daemon"))
		job_fail("no warning says that the daemon is gone: %s", net_log_text());
	job_ok(net_dereg(t.p.to, t.p.recv, t.mi));
	job_ok(net_close_recv(t.p.to, t.p.recv));
	transfer_free(&t);
	if (job->version >= 11)
		job_ok(net_finalize(n));
	net_unload(n);
	nccl_host_revive(0);
	job_load(n, 0, 0, job->version);
	it_still_works(job);
}

/* Valgrind preloads a library of its own. */
static bool under_valgrind(void)
{
	const char *preloaded = getenv("LD_PRELOAD");

	return preloaded && strstr(preloaded, "vgpreload");
}

/*
 * What PyTorch's data loaders do: a child that has all this in its memory, and must not touch it. Not under valgrind, where over
 * RDMA the child of a process with threads was seen not to go on.
 */
static void a_child_is_told_to_keep_off(void **state)
{
	struct job *job = *state;
	struct transfer t;
	int status;
	pid_t child;

	if (under_valgrind())
		skip();
	transfer_open(job, &t);
	child = fork();
	assert_true(child >= 0);
	if (child == 0) {
		void *request = NULL, *listener = NULL;
		char handle[DQ_NCCL_HANDLE_BYTES];

		if (net_isend(t.p.from, t.p.send, t.out, 8, 0, t.mo, &request) != DQ_NCCL_INVALID_USAGE)
			_exit(1);
		if (net_listen(t.p.from, 0, handle, &listener) != DQ_NCCL_INVALID_USAGE)
			_exit(2);
		_exit(0); /* as a data loader ends: without a word to the plugin */
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(status, 0);
	job_ok(net_dereg(t.p.from, t.p.send, t.mo));
	job_ok(net_dereg(t.p.to, t.p.recv, t.mi));
	job_close(&t.p);
	transfer_free(&t);
	it_still_works(job);
}

/* --- a peer's process --------------------------------------------------------------------------------------------- */

static char own_program[512];

/* The process that is killed: gives its handle, receives without end, sends as well, and never ends by itself. */
static int peer_main(char **argv)
{
	const int version = atoi(argv[2]);
	char handle[DQ_NCCL_HANDLE_BYTES], other[DQ_NCCL_HANDLE_BYTES];
	struct net n;
	void *listener = NULL, *recv = NULL, *send = NULL, *request = NULL, *data, *mr = NULL, *ms = NULL;
	size_t bytes = BIG;
	int tag = 0;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (!net_load(&n, argv[3], version) || net_init(&n, 9) || net_listen(&n, 0, handle, &listener) ||
	    read(STDIN_FILENO, other, sizeof other) != sizeof other || write(STDOUT_FILENO, handle, sizeof handle) != sizeof handle)
		return 1;
	while (!recv || !send) {
		if ((!recv && net_accept(&n, listener, &recv)) || (!send && net_connect(&n, 0, other, &send)))
			return 2;
		sched_yield();
	}
	data = calloc(1, BIG);
	if (!data || net_reg(&n, recv, data, BIG, DQ_NCCL_PTR_HOST, &mr) || net_reg(&n, send, data, BIG, DQ_NCCL_PTR_HOST, &ms))
		return 3;
	for (int done = 0; write(STDOUT_FILENO, "r", 1) == 1;) {
		if (net_irecv(&n, recv, 1, &data, &bytes, &tag, &mr, &request))
			return 4;
		for (done = 0; request && !done;)
			if (net_test(&n, request, &done, NULL))
				return 5;
	}
	return 6;
}

static void the_peers_process_is_killed(void **state)
{
	struct job *job = *state;
	struct net *n = &job->ranks[0];
	char handle[DQ_NCCL_HANDLE_BYTES], theirs[DQ_NCCL_HANDLE_BYTES], version[8], ready;
	void *listener = NULL, *send = NULL, *recv = NULL, *ms, *mr, *data, *sends[OUTSTANDING] = {NULL}, *recvs[OUTSTANDING] = {NULL};
	int to_child[2], from_child[2], status;
	size_t bytes = BIG;
	pid_t child;

	/* The second host is the child's alone. */
	net_finalize(&job->ranks[1]);
	net_unload(&job->ranks[1]);
	assert_true(nccl_host_clients_wait(1, 0, JOB_PATIENCE_S));
	snprintf(version, sizeof version, "%d", job->version);
	setenv("DQPLB_SOCKET", nccl_host_socket(1), 1);
	assert_int_equal(pipe2(to_child, O_CLOEXEC), 0);
	assert_int_equal(pipe2(from_child, O_CLOEXEC), 0);
	child = fork();
	assert_true(child >= 0);
	if (child == 0) {
		dup2(to_child[0], STDIN_FILENO);
		dup2(from_child[1], STDOUT_FILENO);
		execl(own_program, own_program, "--peer", version, net_plugin_path(), (char *)NULL);
		_exit(127);
	}
	close(to_child[0]);
	close(from_child[1]);
	job_ok(net_listen(n, 0, handle, &listener));
	assert_int_equal(write(to_child[1], handle, sizeof handle), sizeof handle);
	assert_int_equal(read(from_child[0], theirs, sizeof theirs), sizeof theirs);
	while (!send || !recv) {
		if (!send)
			job_ok(net_connect(n, 0, theirs, &send));
		if (!recv)
			job_ok(net_accept(n, listener, &recv));
		sched_yield();
	}
	assert_int_equal(read(from_child[0], &ready, 1), 1);
	data = calloc(1, BIG);
	assert_non_null(data);
	ms = job_reg(n, send, data, BIG);
	mr = job_reg(n, recv, data, BIG);
	for (int i = 0, tag = 0; i < OUTSTANDING; i++) {
		job_ok(net_irecv(n, recv, 1, &data, &bytes, &tag, &mr, &recvs[i]));
		job_ok(net_isend(n, send, data, BIG, 0, ms, &sends[i]));
	}
	net_log_clear();
	kill(child, SIGKILL);
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFSIGNALED(status)); /* it was alive until then */
	outcomes_are(n, sends, OUTSTANDING, DQ_NCCL_REMOTE_ERROR);
	outcomes_are(n, recvs, OUTSTANDING, DQ_NCCL_REMOTE_ERROR);
	if (!net_log_has("beta"))
		job_fail("no warning names the peer: %s", net_log_text());
	/* After its death, as NCCL tears down. */
	job_ok(net_dereg(n, send, ms));
	job_ok(net_dereg(n, recv, mr));
	job_ok(net_close_send(n, send));
	job_ok(net_close_recv(n, recv));
	job_ok(net_close_listen(n, listener));
	free(data);
	close(to_child[1]);
	close(from_child[0]);
	assert_true(nccl_host_clients_wait(1, 0, JOB_PATIENCE_S)); /* its daemon has let go of all that it had */
	job_load(&job->ranks[1], 1, 1, job->version);
	it_still_works(job);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(a_listener_is_closed, job_start, job_stop),
		cmocka_unit_test_setup_teardown(a_connect_is_given_up, job_start, job_stop),
		cmocka_unit_test_setup_teardown(comms_are_closed_in_every_state, job_start, job_stop),
		cmocka_unit_test_setup_teardown(half_a_connection_is_closed, job_start, job_stop),
		cmocka_unit_test_setup_teardown(everything_ends_at_once, job_start, job_stop),
		cmocka_unit_test_setup_teardown(a_path_fails, job_start, job_stop),
		cmocka_unit_test_setup_teardown(the_peers_daemon_is_gone, job_start, job_stop),
		cmocka_unit_test_setup_teardown(the_own_daemon_is_gone, job_start, job_stop),
		cmocka_unit_test_setup_teardown(a_child_is_told_to_keep_off, job_start, job_stop),
		cmocka_unit_test_setup_teardown(the_peers_process_is_killed, job_start, job_stop),
	};
	int unfit;

	if (argc == 4 && strcmp(argv[1], "--peer") == 0)
		return peer_main(argv);
	unfit = transport_env_check();
	if (unfit)
		return unfit;
	/* By its name, not by /proc/self/exe: under valgrind that is valgrind. */
	if (readlink("/proc/self/exe", own_program, sizeof own_program - 1) < 0)
		return 1;
	return job_run(tests, sizeof tests / sizeof *tests);
}
