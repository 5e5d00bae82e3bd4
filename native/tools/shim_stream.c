/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shim_stream: throughput of large messages one way, through the shared-memory library and two daemons.
 *
 *     shim_stream --near SOCKET --far SOCKET [--message 67108864] [--outstanding 2] [--seconds 3] [--warmup-ms 500] [--staged]
 *
 * Two processes, one a daemon. Each end has --outstanding message buffers of its own, written to before the start, used in
 * turn. With --staged they are the program's own memory, which the library copies; else memory of the library, which nobody
 * copies. The content is a counter a message; the receiver looks at the first and last word of every one.
 *
 * Prints one JSON object: {"memory", "message_bytes", "messages", "seconds", "bytes_per_second"}.
 */
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "dqplb.h"

#define TAG 3
#define MAX_OUTSTANDING 64u
#define PATIENCE_MS 30000

struct options {
	const char *near, *far;
	size_t message;
	unsigned outstanding;
	long seconds, warmup_ms;
	bool staged;
};

struct end {
	dqplb_context *ctx;
	dqplb_flow *flow;
	dqplb_mem *mem;
	unsigned char *bytes;
	dqplb_request *requests[MAX_OUTSTANDING];
	const struct options *o;
};

static _Noreturn void die(const char *what, int status)
{
	fprintf(stderr, "shim_stream: %s: %s: %s\n", what, dqplb_strerror(status), dqplb_last_error());
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

static void open_end(struct end *e, const struct options *o, const char *path, const char *name)
{
	dqplb_options options = {.size = sizeof(options), .socket = path, .name = name};
	size_t bytes = o->outstanding * o->message;

	e->o = o;
	check(path, dqplb_open(&options, &e->ctx));
	if (o->staged) {
		e->bytes = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (e->bytes == MAP_FAILED) {
			perror("shim_stream: mmap");
			exit(1);
		}
		check("mem_register", dqplb_mem_register(e->ctx, e->bytes, bytes, &e->mem));
	} else {
		check("mem_alloc", dqplb_mem_alloc(e->ctx, bytes, &e->mem));
		e->bytes = dqplb_mem_address(e->mem);
	}
	memset(e->bytes, 0x5a, bytes);
}

static void post(struct end *e, unsigned i, bool receive)
{
	size_t size = e->o->message;
	int status;

	do {
		status = receive ? dqplb_recv(e->flow, e->mem, i * size, size, TAG, &e->requests[i])
				 : dqplb_send(e->flow, e->mem, i * size, size, TAG, &e->requests[i]);
		if (status == DQPLB_ERR_AGAIN)
			dqplb_wait_any(e->ctx, 10); /* staging memory comes back when something ends */
	} while (status == DQPLB_ERR_AGAIN);
	check(receive ? "recv" : "send", status);
}

static void mark(struct end *e, unsigned i, uint64_t number)
{
	unsigned char *message = e->bytes + i * e->o->message;

	memcpy(message, &number, sizeof(number));
	memcpy(message + e->o->message - sizeof(number), &number, sizeof(number));
}

static void verify(struct end *e, unsigned i, uint64_t number)
{
	unsigned char *message = e->bytes + i * e->o->message;
	uint64_t first, last;

	memcpy(&first, message, sizeof(first));
	memcpy(&last, message + e->o->message - sizeof(last), sizeof(last));
	if (first != number || last != number) {
		fprintf(stderr, "shim_stream: message %llu begins with %llu and ends with %llu\n", (unsigned long long)number,
			(unsigned long long)first, (unsigned long long)last);
		exit(1);
	}
}

static void receiver(const struct options *o, int pipe_fd)
{
	struct end e = {0};
	dqplb_handle handle;
	dqplb_listener *listener;
	dqplb_request *request;
	dqplb_result result;

	open_end(&e, o, o->far, "shim_stream far");
	check("listen", dqplb_listen(e.ctx, 0, &handle, &listener));
	check("accept", dqplb_accept(listener, &request));
	if (write(pipe_fd, &handle, sizeof(handle)) != (ssize_t)sizeof(handle)) {
		perror("shim_stream: pipe");
		exit(1);
	}
	close(pipe_fd);
	check("accept", dqplb_wait(request, PATIENCE_MS, &result));
	check("accept", result.status);
	e.flow = result.flow;
	for (unsigned i = 0; i < o->outstanding; i++)
		post(&e, i, true);
	for (uint64_t number = 0;; number++) {
		unsigned i = (unsigned)(number % o->outstanding);

		check("recv", dqplb_wait(e.requests[i], PATIENCE_MS, &result));
		if (result.status == DQPLB_ERR_CLOSED || result.status == DQPLB_ERR_PEER_GONE)
			break;
		check("recv", result.status);
		verify(&e, i, number);
		post(&e, i, true);
	}
	dqplb_close(e.ctx);
}

static void sender(const struct options *o, int pipe_fd)
{
	struct end e = {0};
	dqplb_handle handle;
	dqplb_request *request;
	dqplb_result result;
	int64_t start, begin = 0, end = 0;
	uint64_t number, first = 0, last = 0;

	open_end(&e, o, o->near, "shim_stream near");
	if (read(pipe_fd, &handle, sizeof(handle)) != (ssize_t)sizeof(handle)) {
		fprintf(stderr, "shim_stream: the far end gave no handle\n");
		exit(1);
	}
	check("connect", dqplb_connect(e.ctx, 0, &handle, &request));
	check("connect", dqplb_wait(request, PATIENCE_MS, &result));
	check("connect", result.status);
	e.flow = result.flow;
	for (number = 0; number < o->outstanding; number++) {
		mark(&e, (unsigned)number, number);
		post(&e, (unsigned)number, false);
	}
	/* From the end of one message to the end of a later one: neither the start nor the end of the stream counts. */
	start = now_ns();
	for (uint64_t done = 0; done < number; done++) {
		unsigned i = (unsigned)(done % o->outstanding);

		check("send", dqplb_wait(e.requests[i], PATIENCE_MS, &result));
		check("send", result.status);
		end = now_ns();
		last = done;
		if (!begin && end - start >= o->warmup_ms * 1000000) {
			begin = end;
			first = done;
		}
		if (!begin || end - begin < o->seconds * 1000000000) {
			mark(&e, i, number++);
			post(&e, i, false);
		} else {
			break;
		}
	}
	printf("{\"memory\": \"%s\", \"message_bytes\": %zu, \"messages\": %llu, \"seconds\": %.6f, \"bytes_per_second\": %.0f}\n",
	       o->staged ? "staged" : "shim", o->message, (unsigned long long)(last - first), (double)(end - begin) / 1e9,
	       (double)(last - first) * (double)o->message / ((double)(end - begin) / 1e9));
	fflush(stdout);
	dqplb_close(e.ctx);
}

static long number_of(const char *text, long low, long high, const char *what)
{
	char *end;
	long value;

	errno = 0;
	value = strtol(text, &end, 10);
	if (errno || *end || end == text || value < low || value > high) {
		fprintf(stderr, "shim_stream: %s is '%s'; expected a number %ld..%ld\n", what, text, low, high);
		exit(2);
	}
	return value;
}

int main(int argc, char **argv)
{
	static const struct option known[] = {
		{"near", required_argument, NULL, 'n'},        {"far", required_argument, NULL, 'f'},
		{"message", required_argument, NULL, 'm'},     {"outstanding", required_argument, NULL, 'o'},
		{"seconds", required_argument, NULL, 's'},     {"warmup-ms", required_argument, NULL, 'w'},
		{"staged", no_argument, NULL, 'S'},            {NULL, 0, NULL, 0},
	};
	struct options o = {.message = 64u << 20, .outstanding = 2, .seconds = 3, .warmup_ms = 500};
	int option, fds[2], wstatus;
	pid_t child;

	while ((option = getopt_long(argc, argv, "", known, NULL)) != -1) {
		switch (option) {
		case 'n': o.near = optarg; break;
		case 'f': o.far = optarg; break;
		case 'm': o.message = (size_t)number_of(optarg, 16, 1l << 31, "--message"); break;
		case 'o': o.outstanding = (unsigned)number_of(optarg, 1, MAX_OUTSTANDING, "--outstanding"); break;
		case 's': o.seconds = number_of(optarg, 1, 600, "--seconds"); break;
		case 'w': o.warmup_ms = number_of(optarg, 0, 60000, "--warmup-ms"); break;
		case 'S': o.staged = true; break;
		default: return 2;
		}
	}
	if (!o.near || !o.far || optind != argc) {
		fprintf(stderr, "usage: shim_stream --near SOCKET --far SOCKET [--message BYTES] [--outstanding N] [--seconds N] "
				"[--warmup-ms N] [--staged]\n");
		return 2;
	}
	if (pipe(fds) < 0 || (child = fork()) < 0) {
		perror("shim_stream");
		return 1;
	}
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(fds[0]);
		receiver(&o, fds[1]);
		return 0;
	}
	close(fds[1]);
	sender(&o, fds[0]);
	if (waitpid(child, &wstatus, 0) < 0 || !WIFEXITED(wstatus) || WEXITSTATUS(wstatus) != 0) {
		fprintf(stderr, "shim_stream: the far end failed\n");
		return 1;
	}
	return 0;
}
