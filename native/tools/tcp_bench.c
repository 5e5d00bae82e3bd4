/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tcp provider alone, beside tcp_reference: a sending and a receiving process, each one device and one thread.
 *
 *   tcp_bench [--qps N] [--message BYTES] [--segment BYTES] [--outstanding N] [--seconds S] [--spin]
 *       Writes with immediate of --segment bytes over all QPs, at most --outstanding a QP, out of and into two message
 *       buffers in turn.
 *   tcp_bench --pingpong [--count N] [--spin]
 *       A 64-byte write there and one back: median round trip.
 *
 * Without --spin both ends sleep on the device's event fd. Prints one JSON object. Exit code 0, 1 on failure, 2 on usage.
 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "provider/provider.h"

#define BUFFERS 2u
#define MAX_QPS 64u
#define BATCH 64u

struct options {
	uint32_t qps, segment, outstanding, count;
	uint64_t message;
	double seconds;
	bool spin, pingpong;
};

struct end {
	const struct options *o;
	const struct dq_provider *p;
	struct dq_device *dev;
	struct dq_mem *mem;
	struct dq_mem_key remote;      /* of the other end's memory */
	struct dq_qp *qps[MAX_QPS];
};

/* What one end tells the other before they connect. */
struct card {
	struct dq_mem_key key;
	struct dq_endpoint endpoints[MAX_QPS];
};

static double now_s(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static _Noreturn void die(const char *what, const char *why)
{
	fprintf(stderr, "tcp_bench: %s: %s\n", what, why);
	exit(1);
}

static void wait_for_work(struct end *e)
{
	if (e->o->spin || e->p->arm(e->dev))
		return;
	struct pollfd fd = {.fd = e->p->event_fd(e->dev), .events = POLLIN};
	const uint64_t deadline = e->p->next_deadline(e->dev);
	const double left = deadline == DQ_NEVER ? 1 : (double)deadline * 1e-9 - now_s();
	poll(&fd, 1, left <= 0 ? 0 : (int)(left * 1e3) + 1);
}

static int poll_once(struct end *e, struct dq_wc *wc)
{
	int n = e->p->poll(e->dev, wc, BATCH);
	if (n == 0)
		wait_for_work(e);
	return n;
}

static void set_up(struct end *e, const struct options *o, int sock, bool dial)
{
	struct dq_error err = {0};
	struct dq_device_config cfg = {.name = "bench", .address = "127.0.0.1"};
	const struct dq_qp_attr attr = {.kind = DQ_QP_DATA, .send_depth = o->outstanding, .recv_depth = o->outstanding};
	static struct card mine, other;
	const uint64_t size = BUFFERS * o->message;

	e->o = o;
	e->p = dq_provider_find("tcp");
	if (!e->p)
		die("provider tcp", "not in this build");
	if (e->p->device_open(&cfg, &e->dev, &err))
		die("device_open", err.text);
	uint8_t *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		die("mmap", strerror(errno));
	for (uint64_t i = 0; i + 8 <= size; i += 8) {
		const uint64_t v = i * 0x9e3779b97f4a7c15u;
		memcpy(memory + i, &v, 8);
	}
	const struct dq_mem_desc desc = {.addr = memory, .len = size, .dmabuf_fd = -1, .access = DQ_ACCESS_REMOTE_WRITE};
	if (e->p->mem_register(e->dev, &desc, &e->mem, &err))
		die("mem_register", err.text);
	e->p->mem_key(e->mem, 0, size, &mine.key);
	for (uint32_t i = 0; i < o->qps; i++) {
		if (e->p->qp_create(e->dev, &attr, &e->qps[i], &err))
			die("qp_create", err.text);
		e->p->qp_endpoint(e->qps[i], &mine.endpoints[i]);
	}
	if (send(sock, &mine, sizeof mine, 0) != (ssize_t)sizeof mine || recv(sock, &other, sizeof other, MSG_WAITALL) != (ssize_t)sizeof other)
		die("exchange of endpoints", "the other end is gone");
	e->remote = other.key;
	for (uint32_t i = 0; i < o->qps; i++)
		if (e->p->qp_connect(e->qps[i], &other.endpoints[i], dial, &err))
			die("qp_connect", err.text);
	for (uint32_t up = 0; up < o->qps;) {
		struct dq_wc wc[BATCH];
		int n = poll_once(e, wc);
		for (int i = 0; i < n; i++) {
			if (wc[i].op != DQ_WC_CONNECTED)
				die("connect", "a QP failed");
			up++;
		}
	}
	char byte = 0; /* both are up: nothing of the load is taken for set-up */
	if (send(sock, &byte, 1, 0) != 1 || recv(sock, &byte, 1, 0) != 1)
		die("start", "the other end is gone");
}

static void tear_down(struct end *e)
{
	for (uint32_t i = 0; i < e->o->qps; i++)
		e->p->qp_destroy(e->qps[i]);
	e->p->mem_deregister(e->mem);
	e->p->device_close(e->dev);
}

/* ---- throughput ---- */

static void run_receiver(struct end *e)
{
	struct dq_wc wc[BATCH];

	for (uint32_t open = e->o->qps; open;) {
		int n = poll_once(e, wc);
		for (int i = 0; i < n; i++)
			open -= wc[i].op == DQ_WC_FAILED; /* the sender closed: it is through */
	}
}

static void run_sender(struct end *e)
{
	const struct options *o = e->o;
	uint32_t outstanding[MAX_QPS] = {0};
	uint64_t offset = 0, left = o->message, bytes = 0, total = 0, messages = 0;
	bool stop = false;
	const double start = now_s();
	double end = start;

	while (!stop || total) {
		for (uint32_t q = 0; q < o->qps && !stop; q++) {
			struct dq_write wr[BATCH];
			unsigned n = 0;
			while (n < BATCH && outstanding[q] < o->outstanding && !stop) {
				const uint32_t len = left < o->segment ? (uint32_t)left : o->segment;
				wr[n++] = (struct dq_write){.wr_id = q, .mem = e->mem, .offset = offset, .len = len, .imm = 1,
							    .remote_addr = e->remote.addr + offset, .remote_key = e->remote.key};
				outstanding[q]++;
				total++;
				bytes += len;
				offset += len;
				left -= len;
				if (left == 0) {
					offset = (++messages % BUFFERS) * o->message;
					left = o->message;
					stop = now_s() - start >= o->seconds;
				}
			}
			if (n && e->p->post_write(e->qps[q], wr, n) != (int)n)
				die("post_write", "not all were taken");
		}
		struct dq_wc wc[BATCH];
		int n = poll_once(e, wc);
		for (int i = 0; i < n; i++) {
			if (wc[i].op != DQ_WC_WRITE || wc[i].status != DQ_WC_SUCCESS)
				die("write", "failed");
			outstanding[wc[i].wr_id]--;
			total--;
		}
		end = now_s();
	}
	printf("{\"bytes_per_s\": %.0f, \"seconds\": %.6f, \"bytes\": %llu, \"messages\": %llu, \"connections\": %u, "
	       "\"segment_bytes\": %u, \"outstanding\": %u}\n", (double)bytes / (end - start), end - start, (unsigned long long)bytes,
	       (unsigned long long)messages, o->qps, o->segment, o->outstanding);
}

/* ---- round trip ---- */

static int by_value(const void *a, const void *b)
{
	const double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static void one_way(struct end *e)
{
	const struct dq_write wr = {.mem = e->mem, .len = 64, .remote_addr = e->remote.addr, .remote_key = e->remote.key};
	if (e->p->post_write(e->qps[0], &wr, 1) != 1)
		die("post_write", "not taken");
}

static void await_segment(struct end *e)
{
	for (;;) {
		struct dq_wc wc[BATCH];
		bool seen = false;
		int n = poll_once(e, wc);
		for (int i = 0; i < n; i++) {
			if (wc[i].op == DQ_WC_FAILED)
				die("round trip", "the QP failed");
			seen |= wc[i].op == DQ_WC_SEGMENT;
		}
		if (seen)
			return;
	}
}

static void run_pong(struct end *e)
{
	for (uint32_t i = 0; i < e->o->count; i++) {
		await_segment(e);
		one_way(e);
	}
	for (bool open = true; open;) { /* until the last write is acknowledged and the other end has closed */
		struct dq_wc wc[BATCH];
		int n = poll_once(e, wc);
		for (int i = 0; i < n; i++)
			open &= wc[i].op != DQ_WC_FAILED;
	}
}

static void run_ping(struct end *e)
{
	const uint32_t count = e->o->count;
	double *took = calloc(count, sizeof *took);
	if (!took)
		die("calloc", strerror(errno));
	for (uint32_t i = 0; i < count; i++) {
		const double t = now_s();
		one_way(e);
		await_segment(e);
		took[i] = now_s() - t;
	}
	qsort(took, count, sizeof *took, by_value);
	printf("{\"median_ns\": %.0f, \"p99_ns\": %.0f, \"count\": %u, \"bytes\": 64}\n", took[count / 2] * 1e9,
	       took[(uint32_t)((uint64_t)count * 99 / 100)] * 1e9, count);
	free(took);
}

static uint64_t number(const char *name, const char *text, uint64_t low, uint64_t high)
{
	char *end;
	errno = 0;
	const unsigned long long v = strtoull(text, &end, 10);
	if (errno || *end || end == text || v < low || v > high) {
		fprintf(stderr, "tcp_bench: %s %s: expected a number from %llu to %llu\n", name, text, (unsigned long long)low,
			(unsigned long long)high);
		exit(2);
	}
	return v;
}

int main(int argc, char **argv)
{
	struct options o = {.qps = 8, .segment = 65536, .outstanding = 16, .count = 20000, .message = 64u << 20, .seconds = 3};

	for (int i = 1; i < argc; i++) {
		const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : "";
		if (strcmp(name, "--spin") == 0) {
			o.spin = true;
			continue;
		}
		if (strcmp(name, "--pingpong") == 0) {
			o.pingpong = true;
			continue;
		}
		if (strcmp(name, "--qps") == 0)
			o.qps = (uint32_t)number(name, value, 1, MAX_QPS);
		else if (strcmp(name, "--message") == 0)
			o.message = number(name, value, 64, 1u << 30);
		else if (strcmp(name, "--segment") == 0)
			o.segment = (uint32_t)number(name, value, 1, DQ_MAX_SEGMENT_BYTES);
		else if (strcmp(name, "--outstanding") == 0)
			o.outstanding = (uint32_t)number(name, value, 1, 1024);
		else if (strcmp(name, "--seconds") == 0)
			o.seconds = (double)number(name, value, 0, 3600);
		else if (strcmp(name, "--count") == 0)
			o.count = (uint32_t)number(name, value, 1, 100000000);
		else {
			fprintf(stderr, "tcp_bench: unknown option %s\n", name);
			return 2;
		}
		i++;
	}
	if (o.pingpong)
		o.qps = 1;

	int sock[2];
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, sock) != 0)
		die("socketpair", strerror(errno));
	const pid_t parent = getpid();
	pid_t pid = fork();
	if (pid < 0)
		die("fork", strerror(errno));
	struct end e = {0};
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != parent)
			_exit(1);
		close(sock[0]);
		set_up(&e, &o, sock[1], false);
		if (o.pingpong)
			run_pong(&e);
		else
			run_receiver(&e);
		tear_down(&e);
		_exit(0);
	}
	close(sock[1]);
	set_up(&e, &o, sock[0], true);
	if (o.pingpong)
		run_ping(&e);
	else
		run_sender(&e);
	tear_down(&e);
	int status = 0;
	if (waitpid(pid, &status, 0) != pid || status != 0) {
		fprintf(stderr, "tcp_bench: the receiver failed (status %d)\n", status);
		return 1;
	}
	return 0;
}
