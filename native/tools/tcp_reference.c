/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plain C program that our own throughput and latency stand beside: a sender and a receiver process, TCP over loopback,
 * nothing of this project linked.
 *
 *   tcp_reference [--connections N] [--message BYTES] [--segment BYTES] [--outstanding N] [--seconds S] [--spin]
 *       Messages are cut into segments with a 64-byte header, spread over the connections in turn, received straight into
 *       place and acknowledged cumulatively; at most --outstanding segments a connection are unacknowledged. Two message
 *       buffers at either end are used in turn, so the bytes come from and go to memory and not to one warm buffer.
 *       --spin polls instead of sleeping in epoll_wait.
 *   tcp_reference --pingpong [--count N]
 *       64 bytes there and back over one blocking connection: median round trip.
 *   --cpus SENDER,RECEIVER keeps each end on a CPU of its own, as if it had a host of its own.
 *
 * Prints one JSON object. Exit code 0; 1 with the reason on stderr; 2 for wrong usage.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define HEADER 64u
#define BUFFERS 2u
#define MAX_CONNECTIONS 64u
#define MAX_OUTSTANDING 1024u
#define BATCH 16u

struct options {
	uint32_t connections, segment, outstanding, count;
	uint64_t message;
	double seconds;
	bool spin, pingpong;
	int cpus[2];                   /* of the two ends, -1: any */
};

struct header {                        /* HEADER bytes on the wire, both ends are one machine */
	uint64_t offset;               /* in the receiver's buffers */
	uint32_t len;
	uint32_t taken;                /* acknowledgement: segments taken on this connection */
	uint8_t rest[HEADER - 16];
};

struct conn {
	int fd;
	struct header in;              /* header that is coming in */
	uint32_t in_off;
	/* sender */
	struct header *ring;           /* headers of segments queued and not acknowledged */
	uint32_t queued, sent, acked;  /* free-running */
	uint32_t off;                  /* bytes of segment `sent` that are on the wire */
	bool blocked;
	/* receiver */
	uint8_t *place;
	uint32_t left;
	uint32_t taken, told;
};

static double now_s(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static _Noreturn void die(const char *what)
{
	fprintf(stderr, "tcp_reference: %s: %s\n", what, errno ? strerror(errno) : "connection closed");
	exit(1);
}

/* What the tcp provider sets. */
static void tune(int fd)
{
	const int one = 1;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
}

static uint8_t *touched(uint64_t bytes)
{
	uint8_t *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED)
		die("mmap");
	for (uint64_t i = 0; i + 8 <= bytes; i += 8) {
		const uint64_t v = i * 0x9e3779b97f4a7c15u;
		memcpy(p + i, &v, 8);
	}
	return p;
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
		perror("tcp_reference: --cpus");
		exit(1);
	}
}

static int open_listener(struct sockaddr_in *addr)
{
	socklen_t len = sizeof *addr;
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	if (fd < 0)
		die("socket");
	tune(fd);
	*addr = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	if (bind(fd, (struct sockaddr *)addr, sizeof *addr) != 0 || listen(fd, MAX_CONNECTIONS) != 0 ||
	    getsockname(fd, (struct sockaddr *)addr, &len) != 0)
		die("listen");
	return fd;
}

static int dial(const struct sockaddr_in *addr)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	if (fd < 0)
		die("socket");
	tune(fd);
	if (connect(fd, (const struct sockaddr *)addr, sizeof *addr) != 0)
		die("connect");
	return fd;
}

static int watch(struct conn *conns, uint32_t n)
{
	int ep = epoll_create1(0);
	if (ep < 0)
		die("epoll_create1");
	for (uint32_t i = 0; i < n; i++) {
		struct epoll_event ev = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.u32 = i};
		if (fcntl(conns[i].fd, F_SETFL, O_NONBLOCK) != 0 || epoll_ctl(ep, EPOLL_CTL_ADD, conns[i].fd, &ev) != 0)
			die("epoll_ctl");
	}
	return ep;
}

/* ---- receiver ---- */

/* Returns false when the sender is through. */
static bool receive(struct conn *c, uint8_t *memory, uint64_t size)
{
	for (;;) {
		struct iovec iov[2];
		int n = 0;
		size_t asked = 0;
		if (c->left) {
			iov[n++] = (struct iovec){c->place, c->left};
			asked += c->left;
		}
		iov[n++] = (struct iovec){(uint8_t *)&c->in + c->in_off, HEADER - c->in_off};
		asked += HEADER - c->in_off;
		ssize_t got = readv(c->fd, iov, n);
		if (got < 0 && errno == EAGAIN)
			return true;
		if (got < 0)
			die("receive");
		if (got == 0)
			return false;
		const bool drained = (size_t)got < asked;
		if (c->left) {
			const uint32_t direct = (size_t)got < c->left ? (uint32_t)got : c->left;
			c->place += direct;
			c->left -= direct;
			got -= direct;
			if (c->left)
				return true;
			c->taken++;
		}
		c->in_off += (uint32_t)got;
		if (c->in_off == HEADER) {
			if (c->in.offset > size || c->in.len > size - c->in.offset)
				die("segment outside of the buffer");
			c->place = memory + c->in.offset;
			c->left = c->in.len;
			c->in_off = 0;
		}
		if (drained)
			return true;
	}
}

static void acknowledge(struct conn *c)
{
	if (c->taken == c->told)
		return;
	const struct header ack = {.taken = c->taken};
	if (send(c->fd, &ack, HEADER, MSG_NOSIGNAL) == HEADER) /* else its place is full of others, and this one covers them later */
		c->told = c->taken;
	else if (errno != EAGAIN && errno != EPIPE && errno != ECONNRESET)
		die("acknowledge");
}

static void run_receiver(int listener, const struct options *o)
{
	static struct conn conns[MAX_CONNECTIONS];
	struct epoll_event ev[MAX_CONNECTIONS];
	uint32_t open = o->connections;
	const uint64_t size = BUFFERS * o->message;
	uint8_t *memory = touched(size);

	for (uint32_t i = 0; i < o->connections; i++) {
		conns[i].fd = accept(listener, NULL, NULL);
		if (conns[i].fd < 0)
			die("accept");
	}
	int ep = watch(conns, o->connections);
	while (open) {
		int n = epoll_wait(ep, ev, MAX_CONNECTIONS, o->spin ? 0 : -1);
		for (int i = 0; i < n; i++) {
			struct conn *c = &conns[ev[i].data.u32];
			if (c->fd < 0)
				continue;
			const bool more = receive(c, memory, size);
			acknowledge(c);
			if (!more) {
				close(c->fd);
				c->fd = -1;
				open--;
			}
		}
	}
}

/* ---- sender ---- */

static void transmit(struct conn *c, uint8_t *memory, uint32_t mask)
{
	while (!c->blocked && c->sent != c->queued) {
		struct iovec iov[2 * BATCH];
		int n = 0;
		size_t total = 0;
		uint32_t skip = c->off;
		for (uint32_t s = c->sent; s != c->queued && n < (int)(2 * BATCH); s++) {
			struct header *h = &c->ring[s & mask];
			if (skip < HEADER) {
				iov[n++] = (struct iovec){(uint8_t *)h + skip, HEADER - skip};
				iov[n++] = (struct iovec){memory + h->offset, h->len};
			} else {
				iov[n++] = (struct iovec){memory + h->offset + (skip - HEADER), h->len - (skip - HEADER)};
			}
			total += HEADER + h->len - skip;
			skip = 0;
		}
		struct msghdr msg = {.msg_iov = iov, .msg_iovlen = (size_t)n};
		ssize_t put = sendmsg(c->fd, &msg, MSG_NOSIGNAL);
		if (put < 0 && errno != EAGAIN)
			die("send");
		if (put < 0 || (size_t)put < total)
			c->blocked = true;
		for (size_t left = put < 0 ? 0 : (size_t)put; left;) {
			const size_t rest = HEADER + c->ring[c->sent & mask].len - c->off;
			if (left < rest) {
				c->off += (uint32_t)left;
				break;
			}
			left -= rest;
			c->off = 0;
			c->sent++;
		}
	}
}

static void take_acks(struct conn *c)
{
	struct header acks[8];

	for (;;) {
		memcpy(acks, &c->in, c->in_off); /* the part of one that came before */
		ssize_t n = recv(c->fd, (uint8_t *)acks + c->in_off, sizeof acks - c->in_off, 0);
		if (n < 0 && errno == EAGAIN)
			return;
		if (n <= 0)
			die("receive acknowledgement");
		const size_t have = (size_t)n + c->in_off, whole = have / HEADER;
		if (whole)
			c->acked = acks[whole - 1].taken;
		c->in_off = (uint32_t)(have % HEADER);
		memcpy(&c->in, (uint8_t *)acks + whole * HEADER, c->in_off);
		if (have < sizeof acks)
			return;
	}
}

static void run_sender(const struct sockaddr_in *addr, const struct options *o)
{
	static struct conn conns[MAX_CONNECTIONS];
	struct epoll_event ev[MAX_CONNECTIONS];
	uint32_t mask = 1;
	uint8_t *memory = touched(BUFFERS * o->message);
	uint64_t offset = 0, message_left = o->message, bytes = 0, outstanding = 0, messages = 0;
	bool stop = false;

	while (mask < o->outstanding)
		mask *= 2;
	for (uint32_t i = 0; i < o->connections; i++) {
		conns[i].fd = dial(addr);
		conns[i].ring = calloc(mask, sizeof *conns[i].ring);
		if (!conns[i].ring)
			die("calloc");
	}
	mask--;
	int ep = watch(conns, o->connections);
	const double start = now_s();
	double end = start;
	for (uint32_t turn = 0; !stop || outstanding;) {
		/* fill the windows in turn */
		for (uint32_t full = 0; !stop && full < o->connections; turn = (turn + 1) % o->connections) {
			struct conn *c = &conns[turn];
			if (c->queued - c->acked >= o->outstanding) {
				full++;
				continue;
			}
			full = 0;
			struct header *h = &c->ring[c->queued++ & mask];
			h->offset = offset;
			h->len = message_left < o->segment ? (uint32_t)message_left : o->segment;
			offset += h->len;
			bytes += h->len;
			message_left -= h->len;
			outstanding++;
			if (message_left == 0) {
				messages++;
				offset = (messages % BUFFERS) * o->message;
				message_left = o->message;
				stop = now_s() - start >= o->seconds;
			}
		}
		for (uint32_t i = 0; i < o->connections; i++)
			transmit(&conns[i], memory, mask);
		int n = epoll_wait(ep, ev, MAX_CONNECTIONS, o->spin ? 0 : -1);
		for (int i = 0; i < n; i++) {
			struct conn *c = &conns[ev[i].data.u32];
			const uint32_t before = c->acked;
			if (ev[i].events & EPOLLOUT)
				c->blocked = false;
			if (ev[i].events & EPOLLIN)
				take_acks(c);
			outstanding -= c->acked - before;
		}
		end = now_s();
	}
	for (uint32_t i = 0; i < o->connections; i++)
		close(conns[i].fd);
	printf("{\"bytes_per_s\": %.0f, \"seconds\": %.6f, \"bytes\": %llu, \"messages\": %llu, \"connections\": %u, "
	       "\"segment_bytes\": %u, \"outstanding\": %u}\n", (double)bytes / (end - start), end - start, (unsigned long long)bytes,
	       (unsigned long long)messages, o->connections, o->segment, o->outstanding);
}

/* ---- round trip ---- */

static void exactly(int fd, void *buf, size_t n)
{
	for (size_t got = 0; got < n;) {
		ssize_t r = recv(fd, (uint8_t *)buf + got, n - got, 0);
		if (r <= 0)
			die("receive");
		got += (size_t)r;
	}
}

static int by_value(const void *a, const void *b)
{
	const double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static void run_pong(int listener, const struct options *o)
{
	uint8_t buf[64];
	int fd = accept(listener, NULL, NULL);
	if (fd < 0)
		die("accept");
	for (uint32_t i = 0; i < o->count; i++) {
		exactly(fd, buf, sizeof buf);
		if (send(fd, buf, sizeof buf, MSG_NOSIGNAL) != (ssize_t)sizeof buf)
			die("send");
	}
	close(fd);
}

static void run_ping(const struct sockaddr_in *addr, const struct options *o)
{
	uint8_t buf[64] = {1};
	int fd = dial(addr);
	double *took = calloc(o->count, sizeof *took);
	if (!took)
		die("calloc");
	for (uint32_t i = 0; i < o->count; i++) {
		const double t = now_s();
		if (send(fd, buf, sizeof buf, MSG_NOSIGNAL) != (ssize_t)sizeof buf)
			die("send");
		exactly(fd, buf, sizeof buf);
		took[i] = now_s() - t;
	}
	close(fd);
	qsort(took, o->count, sizeof *took, by_value);
	printf("{\"median_ns\": %.0f, \"p99_ns\": %.0f, \"count\": %u, \"bytes\": %zu}\n", took[o->count / 2] * 1e9,
	       took[(uint32_t)((uint64_t)o->count * 99 / 100)] * 1e9, o->count, sizeof buf);
	free(took);
}

static uint64_t number(const char *name, const char *text, uint64_t low, uint64_t high)
{
	char *end;
	errno = 0;
	const unsigned long long v = strtoull(text, &end, 10);
	if (errno || *end || end == text || v < low || v > high) {
		fprintf(stderr, "tcp_reference: %s %s: expected a number from %llu to %llu\n", name, text, (unsigned long long)low,
			(unsigned long long)high);
		exit(2);
	}
	return v;
}

int main(int argc, char **argv)
{
	struct options o = {.connections = 8, .segment = 65536, .outstanding = 16, .count = 20000, .message = 64u << 20, .seconds = 3, .cpus = {-1, -1}};

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
		if (strcmp(name, "--connections") == 0)
			o.connections = (uint32_t)number(name, value, 1, MAX_CONNECTIONS);
		else if (strcmp(name, "--message") == 0)
			o.message = number(name, value, 1, 1u << 30);
		else if (strcmp(name, "--segment") == 0)
			o.segment = (uint32_t)number(name, value, 1, 16u << 20);
		else if (strcmp(name, "--outstanding") == 0)
			o.outstanding = (uint32_t)number(name, value, 1, MAX_OUTSTANDING);
		else if (strcmp(name, "--seconds") == 0)
			o.seconds = (double)number(name, value, 0, 3600);
		else if (strcmp(name, "--cpus") == 0) {
			if (sscanf(value, "%d,%d", &o.cpus[0], &o.cpus[1]) != 2) {
				fprintf(stderr, "tcp_reference: --cpus is '%s'; expected two CPU numbers: SENDER,RECEIVER\n", value);
				return 2;
			}
		} else if (strcmp(name, "--count") == 0)
			o.count = (uint32_t)number(name, value, 1, 100000000);
		else {
			fprintf(stderr, "tcp_reference: unknown option %s\n", name);
			return 2;
		}
		i++;
	}

	struct sockaddr_in addr;
	int listener = open_listener(&addr);
	const pid_t parent = getpid();
	pid_t pid = fork();
	if (pid < 0)
		die("fork");
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != parent)
			_exit(1);
		stay_on(o.cpus[1]);
		if (o.pingpong)
			run_pong(listener, &o);
		else
			run_receiver(listener, &o);
		_exit(0);
	}
	close(listener);
	stay_on(o.cpus[0]);
	if (o.pingpong)
		run_ping(&addr, &o);
	else
		run_sender(&addr, &o);
	int status = 0;
	if (waitpid(pid, &status, 0) != pid || status != 0) {
		fprintf(stderr, "tcp_reference: the receiver failed (status %d)\n", status);
		return 1;
	}
	return 0;
}
