/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shim_pingpong: round trip of a small message through the shared-memory library and two daemons.
 *
 *     shim_pingpong --near SOCKET --far SOCKET [--bytes 64] [--rounds 2000] [--warmup 200] [--cpus NEAR,FAR] [--poll]
 *
 * Two processes, one a daemon. With --poll they ask again and again, and yield the CPU between, as the threads of
 * communication libraries do; else they sleep until they are woken. Each posts its next receive before it sends, so that a message always finds one. Prints one
 * JSON object: {"bytes", "rounds", "min_ns", "p50_ns", "p99_ns", "max_ns"}.
 */
#include <errno.h>
#include <getopt.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "dqplb.h"

#define TAG 1
#define AHEAD 4              /* receives posted in advance */
#define PATIENCE_MS 30000    /* a round trip that takes longer means that something is broken */

struct options {
	const char *near, *far;
	size_t bytes;
	long rounds, warmup;
};

static bool poll; /* for completions, rather than wait */

struct end {
	dqplb_context *ctx;
	dqplb_flow *flow;
	dqplb_mem *mem;              /* AHEAD receives, then the message to send */
	dqplb_request *receives[AHEAD];
	unsigned next;
	size_t bytes;
};

static _Noreturn void die(const char *what, int status)
{
	fprintf(stderr, "shim_pingpong: %s: %s: %s\n", what, dqplb_strerror(status), dqplb_last_error());
	exit(1);
}

static void check(const char *what, int status)
{
	if (status != DQPLB_OK)
		die(what, status);
}

static int64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * INT64_C(1000000000) + ts.tv_nsec;
}

static void wait_for(const char *what, dqplb_request *request, dqplb_result *result)
{
	if (poll) {
		const int64_t end = now_ns() + PATIENCE_MS * INT64_C(1000000);
		int done = 0;

		for (;;) {
			check(what, dqplb_test(request, &done, result));
			if (done)
				break;
			if (now_ns() > end)
				die(what, DQPLB_ERR_TIMEOUT);
			sched_yield();
		}
	} else {
		check(what, dqplb_wait(request, PATIENCE_MS, result));
	}
	check(what, result->status);
}

static void post_receive(struct end *e, unsigned i)
{
	int status;

	do
		status = dqplb_recv(e->flow, e->mem, i * e->bytes, e->bytes, TAG, &e->receives[i]);
	while (status == DQPLB_ERR_AGAIN);
	check("recv", status);
}

static void receive(struct end *e)
{
	dqplb_result result;

	wait_for("recv", e->receives[e->next], &result);
	if (result.bytes != e->bytes) {
		fprintf(stderr, "shim_pingpong: received %llu bytes, expected %zu\n", (unsigned long long)result.bytes, e->bytes);
		exit(1);
	}
	post_receive(e, e->next);
	e->next = (e->next + 1) % AHEAD;
}

static dqplb_request *send_one(struct end *e)
{
	dqplb_request *request;
	int status;

	do
		status = dqplb_send(e->flow, e->mem, AHEAD * e->bytes, e->bytes, TAG, &request);
	while (status == DQPLB_ERR_AGAIN);
	check("send", status);
	return request;
}

static void start(struct end *e, const struct options *o)
{
	e->bytes = o->bytes;
	check("mem_alloc", dqplb_mem_alloc(e->ctx, (AHEAD + 1) * o->bytes, &e->mem));
	for (unsigned i = 0; i < AHEAD; i++)
		post_receive(e, i);
}

static void open_context(struct end *e, const char *path, const char *name)
{
	dqplb_options options = {.size = sizeof(options), .socket = path, .name = name};

	check(path, dqplb_open(&options, &e->ctx));
}

/* The far end: gives its handle to the pipe, then answers. */
static void answer(const struct options *o, int pipe_fd)
{
	struct end e = {0};
	dqplb_handle handle;
	dqplb_listener *listener;
	dqplb_request *request;
	dqplb_result result;

	open_context(&e, o->far, "shim_pingpong far");
	check("listen", dqplb_listen(e.ctx, 0, &handle, &listener));
	check("accept", dqplb_accept(listener, &request));
	if (write(pipe_fd, &handle, sizeof(handle)) != (ssize_t)sizeof(handle)) {
		perror("shim_pingpong: pipe");
		exit(1);
	}
	close(pipe_fd);
	wait_for("accept", request, &result);
	e.flow = result.flow;
	start(&e, o);
	for (long i = 0; i < o->rounds + o->warmup; i++) {
		receive(&e);
		wait_for("send", send_one(&e), &result);
	}
	dqplb_close(e.ctx);
}

static int by_value(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return (x > y) - (x < y);
}

static void ask(const struct options *o, int pipe_fd)
{
	struct end e = {0};
	dqplb_handle handle;
	dqplb_request *request;
	dqplb_result result;
	int64_t *times = calloc((size_t)o->rounds, sizeof(*times));

	if (!times) {
		perror("shim_pingpong");
		exit(1);
	}
	open_context(&e, o->near, "shim_pingpong near");
	if (read(pipe_fd, &handle, sizeof(handle)) != (ssize_t)sizeof(handle)) {
		fprintf(stderr, "shim_pingpong: the far end gave no handle\n");
		exit(1);
	}
	check("connect", dqplb_connect(e.ctx, 0, &handle, &request));
	wait_for("connect", request, &result);
	e.flow = result.flow;
	start(&e, o);
	for (long i = -o->warmup; i < o->rounds; i++) {
		int64_t begin = now_ns();
		dqplb_request *sent = send_one(&e);

		receive(&e);
		if (i >= 0)
			times[i] = now_ns() - begin;
		wait_for("send", sent, &result);
	}
	/* The far end closes when its last answer is known to be here. Were this end first, that answer could fail. */
	dqplb_wait(e.receives[e.next], PATIENCE_MS, &result);
	dqplb_close(e.ctx);
	qsort(times, (size_t)o->rounds, sizeof(*times), by_value);
	printf("{\"bytes\": %zu, \"rounds\": %ld, \"min_ns\": %lld, \"p50_ns\": %lld, \"p99_ns\": %lld, \"max_ns\": %lld}\n", o->bytes,
	       o->rounds, (long long)times[0], (long long)times[o->rounds / 2], (long long)times[o->rounds * 99 / 100],
	       (long long)times[o->rounds - 1]);
	free(times);
}

/* As if each end had a host of its own: it stays on its own CPU. */
static void stay_on(int cpu)
{
	cpu_set_t set;

	if (cpu < 0)
		return;
	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof set, &set) != 0) {
		perror("shim_pingpong: --cpus");
		exit(1);
	}
}

static long number(const char *text, long low, long high, const char *what)
{
	char *end;
	long value;

	errno = 0;
	value = strtol(text, &end, 10);
	if (errno || *end || end == text || value < low || value > high) {
		fprintf(stderr, "shim_pingpong: %s is '%s'; expected a number %ld..%ld\n", what, text, low, high);
		exit(2);
	}
	return value;
}

int main(int argc, char **argv)
{
	static const struct option known[] = {{"near", required_argument, NULL, 'n'},   {"far", required_argument, NULL, 'f'},
					      {"bytes", required_argument, NULL, 'b'},  {"rounds", required_argument, NULL, 'r'},
					      {"warmup", required_argument, NULL, 'w'}, {"cpus", required_argument, NULL, 'c'},
					      {"poll", no_argument, NULL, 'p'},
					      {NULL, 0, NULL, 0}};
	struct options o = {.bytes = 64, .rounds = 2000, .warmup = 200};
	int option, fds[2], wstatus, near_cpu = -1, far_cpu = -1;
	pid_t child;

	while ((option = getopt_long(argc, argv, "", known, NULL)) != -1) {
		switch (option) {
		case 'n': o.near = optarg; break;
		case 'f': o.far = optarg; break;
		case 'b': o.bytes = (size_t)number(optarg, 1, 1 << 30, "--bytes"); break;
		case 'r': o.rounds = number(optarg, 1, 100000000, "--rounds"); break;
		case 'w': o.warmup = number(optarg, 0, 100000000, "--warmup"); break;
		case 'c':
			if (sscanf(optarg, "%d,%d", &near_cpu, &far_cpu) != 2) {
				fprintf(stderr, "shim_pingpong: --cpus is '%s'; expected two CPU numbers: NEAR,FAR\n", optarg);
				return 2;
			}
			break;
		case 'p': poll = true; break;
		default: return 2;
		}
	}
	if (!o.near || !o.far || optind != argc) {
		fprintf(stderr, "usage: shim_pingpong --near SOCKET --far SOCKET [--bytes N] [--rounds N] [--warmup N] [--cpus NEAR,FAR] "
				"[--poll]\n");
		return 2;
	}
	if (pipe(fds) < 0 || (child = fork()) < 0) {
		perror("shim_pingpong");
		return 1;
	}
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(fds[0]);
		stay_on(far_cpu);
		answer(&o, fds[1]);
		return 0;
	}
	close(fds[1]);
	stay_on(near_cpu);
	ask(&o, fds[0]);
	if (waitpid(child, &wstatus, 0) < 0 || !WIFEXITED(wstatus) || WEXITSTATUS(wstatus) != 0) {
		fprintf(stderr, "shim_pingpong: the far end failed\n");
		return 1;
	}
	return 0;
}
