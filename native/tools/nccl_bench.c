/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nccl_bench: the net plugin as NCCL's proxy thread drives it, between two daemons.
 *
 *     nccl_bench stream   --plugin FILE --near SOCKET --far SOCKET [--message 131072] [--outstanding 8] [--comms 8]
 *                         [--seconds 3] [--warmup-ms 500] [--memory malloc]
 *     nccl_bench pingpong --plugin FILE --near SOCKET --far SOCKET [--message 64] [--rounds 2000] [--warmup 200] [--cpus NEAR,FAR]
 *     nccl_bench comms    --plugin FILE --near SOCKET --far SOCKET [--comms 1000]
 *     nccl_bench register --plugin FILE --near SOCKET [--rounds 2000] [--memory malloc]
 *
 * Two processes, one a daemon; `register` is one. Each is one thread that asks every comm in turn and yields the CPU when none
 * moved, which is what NCCL's proxy thread does. Memory is the program's own (malloc), which is staged, or the library's (shim),
 * which nobody copies; `register` also knows a dma-buf, made by /dev/udmabuf, and ends with 77 where there is none. Of stream
 * messages the receiver looks at the first and last word.
 *
 * Prints one JSON object:
 *     stream    {"memory", "message_bytes", "messages", "seconds", "bytes_per_second"}
 *     pingpong  {"bytes", "rounds", "min_ns", "p50_ns", "p99_ns", "max_ns"}
 *     comms     {"comms", "seconds", "bytes_near", "bytes_far"}: seconds from the first listen to the last accept; bytes of the
 *               heap a comm, of the process that connects and of the one that accepts
 *     register  {"memory", "rounds", "ns"}: median time of registering what is registered already
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <malloc.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "dqplb.h"
#include "nccl/abi.h"

#define AHEAD 4              /* receives posted in advance, in pingpong */
#define COMMS_MAX 4096
#define PATIENCE_NS 60000000000ll
#define SKIPPED 77

struct options {
	const char *plugin, *near, *far;
	size_t message;
	unsigned outstanding, comms;
	long seconds, warmup_ms, rounds, warmup;
	const char *memory;
};

static const struct dq_nccl_net_v12 *net;
static struct dq_nccl_device_handle *offload; /* NCCL offers a place for it; the plugin leaves it alone */
static dqplb_context *library_context;        /* of this program, for memory of the library */
static void *net_context;
static int64_t last_move; /* when something moved: nothing for PATIENCE_NS means that something is broken */

static int64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * INT64_C(1000000000) + ts.tv_nsec;
}

static _Noreturn void die(const char *what)
{
	fprintf(stderr, "nccl_bench: %s\n", what);
	exit(1);
}

static void check(const char *what, dq_nccl_result result)
{
	if (result != DQ_NCCL_SUCCESS) {
		fprintf(stderr, "nccl_bench: %s: result %d\n", what, (int)result);
		exit(1);
	}
}

static __attribute__((format(printf, 5, 6))) void logger(int level, unsigned long flags, const char *file, int line,
							 const char *format, ...)
{
	va_list args;

	(void)flags, (void)file, (void)line;
	if (level > DQ_NCCL_LOG_WARN)
		return;
	va_start(args, format);
	fprintf(stderr, "nccl_bench: ");
	vfprintf(stderr, format, args);
	fputc('\n', stderr);
	va_end(args);
}

static void start(const struct options *o, const char *socket)
{
	void *library = dlopen(o->plugin, RTLD_NOW | RTLD_LOCAL);
	struct dq_nccl_config config = {.traffic_class = DQ_NCCL_UNDEFINED};
	struct dq_nccl_props_v12 props;
	int devices = 0;

	if (!library)
		die(dlerror());
	net = dlsym(library, "ncclNetPlugin_v12");
	if (!net)
		die(dlerror());
	setenv("DQPLB_SOCKET", socket, 1);
	check("init", net->init(&net_context, 1, &config, logger, NULL));
	check("devices", net->devices(&devices));
	if (devices < 1)
		die("the daemon has no device");
	check("getProperties", net->get_properties(0, &props));
	last_move = now_ns();
}

/* After a pass in which nothing moved. */
static void idle(void)
{
	if (now_ns() - last_move > PATIENCE_NS)
		die("nothing moves any more");
	sched_yield();
}

static void moved(void)
{
	last_move = now_ns();
}

static void write_all(int fd, const void *data, size_t bytes)
{
	for (const char *p = data; bytes;) {
		ssize_t n = write(fd, p, bytes);

		if (n < 0)
			die("the other end is gone");
		p += n;
		bytes -= (size_t)n;
	}
}

static void read_all(int fd, void *data, size_t bytes)
{
	for (char *p = data; bytes;) {
		ssize_t n = read(fd, p, bytes);

		if (n <= 0)
			die("the other end is gone");
		p += n;
		bytes -= (size_t)n;
	}
}

/* Memory that exists before it is measured. Freed by the end of the program. */
static unsigned char *memory(const struct options *o, size_t bytes)
{
	unsigned char *p;
	dqplb_mem *mem;

	if (strcmp(o->memory, "shim") == 0) {
		/* The socket is the one of the plugin, in the environment. */
		if ((!library_context && dqplb_open(NULL, &library_context) != DQPLB_OK) ||
		    dqplb_mem_alloc(library_context, bytes, &mem) != DQPLB_OK)
			die(dqplb_last_error());
		p = dqplb_mem_address(mem);
	} else {
		p = aligned_alloc(4096, (bytes + 4095) & ~(size_t)4095);
	}
	if (!p)
		die("no memory");
	memset(p, 1, bytes);
	return p;
}

/* --- connections -------------------------------------------------------------------------------------------------- */

typedef unsigned char handle_bytes[DQ_NCCL_HANDLE_BYTES];

static void listen_all(void **listeners, unsigned count, int fd)
{
	for (unsigned i = 0; i < count; i++) {
		handle_bytes handle;

		check("listen", net->listen(net_context, 0, handle, &listeners[i]));
		write_all(fd, handle, sizeof handle);
	}
}

static void accept_all(void **listeners, void **comms, unsigned count)
{
	for (unsigned left = count; left;) {
		const unsigned before = left;

		left = 0;
		for (unsigned i = 0; i < count; i++) {
			if (comms[i])
				continue;
			check("accept", net->accept(listeners[i], &comms[i], &offload));
			left += !comms[i];
		}
		if (left == before)
			idle();
		else
			moved();
	}
	for (unsigned i = 0; i < count; i++)
		check("closeListen", net->close_listen(listeners[i]));
}

static void connect_all(void **comms, unsigned count, int fd)
{
	handle_bytes *handles = calloc(count, sizeof *handles);

	if (!handles)
		die("no memory");
	read_all(fd, handles, count * sizeof *handles);
	for (unsigned left = count; left;) {
		const unsigned before = left;

		left = 0;
		for (unsigned i = 0; i < count; i++) {
			if (comms[i])
				continue;
			check("connect", net->connect(net_context, 0, handles[i], &comms[i], &offload));
			left += !comms[i];
		}
		if (left == before)
			idle();
		else
			moved();
	}
	free(handles);
}

/* --- stream ------------------------------------------------------------------------------------------------------- */

struct comm {
	void *comm, *mr;
	unsigned char *bytes;
	void *requests[DQ_NCCL_REQUESTS_MAX];
	uint64_t posted, done;
	bool ended;
};

static void comms_start(struct comm *comms, void *const *opened, const struct options *o)
{
	const size_t bytes = o->message * o->outstanding;

	for (unsigned i = 0; i < o->comms; i++) {
		comms[i].comm = opened[i];
		comms[i].bytes = memory(o, bytes);
		check("regMr", net->reg_mr(opened[i], comms[i].bytes, bytes, DQ_NCCL_PTR_HOST, &comms[i].mr));
	}
}

static void mark(unsigned char *message, size_t bytes, uint64_t number)
{
	memcpy(message, &number, sizeof number);
	memcpy(message + bytes - sizeof number, &number, sizeof number);
}

static void verify(const unsigned char *message, size_t bytes, uint64_t number)
{
	uint64_t first, last;

	memcpy(&first, message, sizeof first);
	memcpy(&last, message + bytes - sizeof last, sizeof last);
	if (first != number || last != number)
		die("a message is not what was sent");
}

static void stream_far(const struct options *o, int fd)
{
	struct comm *comms = calloc(o->comms, sizeof *comms);
	void *listeners[COMMS_MAX], *opened[COMMS_MAX] = {NULL};
	unsigned left = o->comms;

	if (!comms)
		die("no memory");
	listen_all(listeners, o->comms, fd);
	accept_all(listeners, opened, o->comms);
	comms_start(comms, opened, o);
	while (left) {
		bool any = false;

		for (unsigned i = 0; i < o->comms; i++) {
			struct comm *c = &comms[i];
			int done = 0, bytes = 0, tag = 0;

			while (!c->ended && c->posted < c->done + o->outstanding) {
				void *at = c->bytes + c->posted % o->outstanding * o->message, *request = NULL;
				size_t room = o->message;

				check("irecv", net->irecv(c->comm, 1, &at, &room, &tag, &c->mr, NULL, &request));
				if (!request)
					break;
				c->requests[c->posted++ % o->outstanding] = request;
				any = true;
			}
			if (c->ended || c->done == c->posted)
				continue;
			check("test", net->test(c->requests[c->done % o->outstanding], &done, &bytes));
			if (!done)
				continue;
			any = true;
			if (bytes == 0) {
				c->ended = true;
				left--;
			} else {
				verify(c->bytes + c->done % o->outstanding * o->message, o->message, c->done);
			}
			c->done++;
		}
		if (any)
			moved();
		else
			idle();
	}
	for (unsigned i = 0; i < o->comms; i++)
		check("closeRecv", net->close_recv(comms[i].comm));
	check("finalize", net->finalize(net_context));
}

static void stream_near(const struct options *o, int fd)
{
	struct comm *comms = calloc(o->comms, sizeof *comms);
	void *opened[COMMS_MAX] = {NULL};
	int64_t begin = 0, end = 0, first_look;
	uint64_t messages = 0;
	unsigned left = o->comms;
	bool over = false;

	if (!comms)
		die("no memory");
	connect_all(opened, o->comms, fd);
	comms_start(comms, opened, o);
	first_look = now_ns();
	while (left) {
		bool any = false;

		for (unsigned i = 0; i < o->comms; i++) {
			struct comm *c = &comms[i];
			int done = 0;

			while (!c->ended && c->posted < c->done + o->outstanding) {
				unsigned char *at = c->bytes + c->posted % o->outstanding * o->message;
				void *request = NULL;

				mark(at, o->message, c->posted);
				check("isend", net->isend(c->comm, at, over ? 0 : o->message, 0, c->mr, NULL, &request));
				if (!request)
					break;
				c->requests[c->posted++ % o->outstanding] = request;
				c->ended = over;
				any = true;
			}
			if (c->done == c->posted)
				continue;
			check("test", net->test(c->requests[c->done % o->outstanding], &done, NULL));
			if (!done)
				continue;
			any = true;
			c->done++;
			if (c->ended && c->done == c->posted)
				left--;
			if (over)
				continue;
			/* From the end of one message to the end of a later one: neither the start nor the end counts. */
			end = now_ns();
			if (begin)
				messages++;
			else if (end - first_look >= o->warmup_ms * 1000000)
				begin = end;
			over = begin && end - begin >= o->seconds * 1000000000;
		}
		if (any)
			moved();
		else
			idle();
	}
	printf("{\"memory\": \"%s\", \"message_bytes\": %zu, \"messages\": %llu, \"seconds\": %.6f, \"bytes_per_second\": %.0f}\n",
	       o->memory, o->message, (unsigned long long)messages, (double)(end - begin) / 1e9,
	       (double)messages * (double)o->message / ((double)(end - begin) / 1e9));
	fflush(stdout);
	for (unsigned i = 0; i < o->comms; i++)
		check("closeSend", net->close_send(comms[i].comm));
	check("finalize", net->finalize(net_context));
}

/* --- pingpong ----------------------------------------------------------------------------------------------------- */

struct end {
	void *send, *recv, *send_mr, *recv_mr;
	unsigned char *out, *in;
	void *receives[AHEAD];
	unsigned next;
	size_t bytes;
};

static void post_receive(struct end *e, unsigned i)
{
	void *at = e->in + i * e->bytes;
	int tag = 0;

	e->receives[i] = NULL;
	for (;;) {
		check("irecv", net->irecv(e->recv, 1, &at, &e->bytes, &tag, &e->recv_mr, NULL, &e->receives[i]));
		if (e->receives[i])
			return;
		idle();
	}
}

static void await(void *request, size_t bytes)
{
	int done = 0, size = 0;

	for (;;) {
		check("test", net->test(request, &done, &size));
		if (done)
			break;
		idle();
	}
	moved();
	if ((size_t)size != bytes)
		die("a message has another length");
}

static void receive(struct end *e)
{
	await(e->receives[e->next], e->bytes);
	post_receive(e, e->next);
	e->next = (e->next + 1) % AHEAD;
}

static void *send_one(struct end *e)
{
	void *request = NULL;

	for (;;) {
		check("isend", net->isend(e->send, e->out, e->bytes, 0, e->send_mr, NULL, &request));
		if (request)
			return request;
		idle();
	}
}

/* A comm has one direction: two of them. */
static void ends_start(struct end *e, const struct options *o, int in_fd, int out_fd)
{
	void *listener;
	handle_bytes mine, theirs;

	e->bytes = o->message;
	check("listen", net->listen(net_context, 0, mine, &listener));
	write_all(out_fd, mine, sizeof mine);
	read_all(in_fd, theirs, sizeof theirs);
	while (!e->send || !e->recv) {
		if (!e->send)
			check("connect", net->connect(net_context, 0, theirs, &e->send, &offload));
		if (!e->recv)
			check("accept", net->accept(listener, &e->recv, &offload));
		idle();
	}
	check("closeListen", net->close_listen(listener));
	e->out = memory(o, e->bytes);
	e->in = memory(o, AHEAD * e->bytes);
	check("regMr", net->reg_mr(e->send, e->out, e->bytes, DQ_NCCL_PTR_HOST, &e->send_mr));
	check("regMr", net->reg_mr(e->recv, e->in, AHEAD * e->bytes, DQ_NCCL_PTR_HOST, &e->recv_mr));
	for (unsigned i = 0; i < AHEAD; i++)
		post_receive(e, i);
}

static int by_value(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return (x > y) - (x < y);
}

static void pingpong_far(const struct options *o, int in_fd, int out_fd)
{
	struct end e = {0};

	ends_start(&e, o, in_fd, out_fd);
	for (long i = 0; i < o->rounds + o->warmup; i++) {
		receive(&e);
		await(send_one(&e), e.bytes);
	}
	read_all(in_fd, &(char){0}, 1); /* the other end has seen the last answer */
	check("closeSend", net->close_send(e.send));
	check("closeRecv", net->close_recv(e.recv));
	check("finalize", net->finalize(net_context));
}

static void pingpong_near(const struct options *o, int in_fd, int out_fd)
{
	struct end e = {0};
	int64_t *times = calloc((size_t)o->rounds, sizeof *times);

	if (!times)
		die("no memory");
	ends_start(&e, o, in_fd, out_fd);
	for (long i = -o->warmup; i < o->rounds; i++) {
		const int64_t begin = now_ns();
		void *sent = send_one(&e);

		receive(&e);
		if (i >= 0)
			times[i] = now_ns() - begin;
		await(sent, e.bytes);
	}
	write_all(out_fd, "", 1);
	check("closeSend", net->close_send(e.send));
	check("closeRecv", net->close_recv(e.recv));
	check("finalize", net->finalize(net_context));
	qsort(times, (size_t)o->rounds, sizeof *times, by_value);
	printf("{\"bytes\": %zu, \"rounds\": %ld, \"min_ns\": %lld, \"p50_ns\": %lld, \"p99_ns\": %lld, \"max_ns\": %lld}\n", o->message,
	       o->rounds, (long long)times[0], (long long)times[o->rounds / 2], (long long)times[o->rounds * 99 / 100],
	       (long long)times[o->rounds - 1]);
	free(times);
}

/* --- comms -------------------------------------------------------------------------------------------------------- */

static size_t heap(void)
{
	const struct mallinfo2 m = mallinfo2();

	return m.uordblks + m.hblkhd;
}

static void comms_far(const struct options *o, int in_fd, int out_fd)
{
	static void *listeners[COMMS_MAX], *opened[COMMS_MAX];
	size_t before, grown;

	read_all(in_fd, &(char){0}, 1);
	before = heap();
	listen_all(listeners, o->comms, out_fd);
	accept_all(listeners, opened, o->comms);
	grown = heap() - before;
	write_all(out_fd, &grown, sizeof grown);
	read_all(in_fd, &(char){0}, 1);
	for (unsigned i = 0; i < o->comms; i++)
		check("closeRecv", net->close_recv(opened[i]));
	check("finalize", net->finalize(net_context));
}

static void comms_near(const struct options *o, int in_fd, int out_fd)
{
	static void *opened[COMMS_MAX];
	const size_t before = heap();
	size_t near_bytes, far_bytes;
	int64_t begin = now_ns(), end;

	write_all(out_fd, "", 1);
	connect_all(opened, o->comms, in_fd);
	near_bytes = heap() - before;
	read_all(in_fd, &far_bytes, sizeof far_bytes);
	end = now_ns();
	printf("{\"comms\": %u, \"seconds\": %.6f, \"bytes_near\": %zu, \"bytes_far\": %zu}\n", o->comms, (double)(end - begin) / 1e9,
	       near_bytes / o->comms, far_bytes / o->comms);
	fflush(stdout);
	write_all(out_fd, "", 1);
	for (unsigned i = 0; i < o->comms; i++)
		check("closeSend", net->close_send(opened[i]));
	check("finalize", net->finalize(net_context));
}

/* --- register ----------------------------------------------------------------------------------------------------- */

/* The interface of /dev/udmabuf, stable; its header is not on every build machine. */
struct udmabuf_request {
	uint32_t memfd, flags;
	uint64_t offset, size;
};

/* A dma-buf of ordinary memory, as the kernel makes one. */
static int dmabuf(size_t bytes)
{
	int device = open("/dev/udmabuf", O_RDWR | O_CLOEXEC), memfd = memfd_create("nccl_bench", MFD_CLOEXEC | MFD_ALLOW_SEALING), fd;
	struct udmabuf_request request = {.memfd = (uint32_t)memfd, .flags = 1 /* close on exec */, .size = bytes};

	if (device < 0) {
		fprintf(stderr, "nccl_bench: /dev/udmabuf: %s\n", strerror(errno));
		exit(SKIPPED);
	}
	if (memfd < 0 || ftruncate(memfd, (off_t)bytes) != 0 || fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK) != 0)
		die("no memfd");
	fd = ioctl(device, _IOW('u', 0x42, struct udmabuf_request), &request);
	if (fd < 0)
		die("/dev/udmabuf makes no dma-buf");
	close(device);
	close(memfd);
	return fd;
}

static void reg(void *comm, unsigned char *bytes, size_t size, int fd, void **mr)
{
	check("regMr", fd < 0 ? net->reg_mr(comm, bytes, size, DQ_NCCL_PTR_HOST, mr)
			      : net->reg_mr_dmabuf(comm, bytes, size, DQ_NCCL_PTR_CUDA, 0, fd, mr));
}

static void register_again(const struct options *o)
{
	enum { BATCH = 64, BYTES = 4 << 20 };
	int fd = -1;
	void *listener, *send = NULL, *recv = NULL, *first, *mrs[BATCH];
	int64_t *times = calloc((size_t)o->rounds, sizeof *times);
	handle_bytes handle;
	unsigned char *bytes;

	if (!times)
		die("no memory");
	check("listen", net->listen(net_context, 0, handle, &listener));
	while (!send || !recv) {
		if (!send)
			check("connect", net->connect(net_context, 0, handle, &send, &offload));
		if (!recv)
			check("accept", net->accept(listener, &recv, &offload));
		idle();
	}
	if (strcmp(o->memory, "dmabuf") == 0)
		fd = dmabuf(BYTES);
	bytes = fd < 0 ? memory(o, BYTES) : (unsigned char *)(uintptr_t)0x7f0000000000; /* a GPU's address: nobody follows it */
	reg(recv, bytes, BYTES, fd, &first);
	for (long i = 0; i < o->rounds; i++) {
		int64_t begin = now_ns();

		for (int k = 0; k < BATCH; k++)
			reg(recv, bytes, BYTES, fd, &mrs[k]);
		times[i] = (now_ns() - begin) / BATCH;
		for (int k = 0; k < BATCH; k++)
			check("deregMr", net->dereg_mr(recv, mrs[k]));
	}
	qsort(times, (size_t)o->rounds, sizeof *times, by_value);
	printf("{\"memory\": \"%s\", \"rounds\": %ld, \"ns\": %lld}\n", o->memory, o->rounds, (long long)times[o->rounds / 2]);
	check("deregMr", net->dereg_mr(recv, first));
	check("closeSend", net->close_send(send));
	check("closeRecv", net->close_recv(recv));
	check("closeListen", net->close_listen(listener));
	check("finalize", net->finalize(net_context));
	free(times);
}

/* --- main --------------------------------------------------------------------------------------------------------- */

/* As if each end had a host of its own: it stays on its own CPU. */
static void stay_on(int cpu)
{
	cpu_set_t set;

	if (cpu < 0)
		return;
	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof set, &set) != 0) {
		perror("nccl_bench: --cpus");
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
		fprintf(stderr, "nccl_bench: %s is '%s'; expected a number %ld..%ld\n", what, text, low, high);
		exit(2);
	}
	return value;
}

int main(int argc, char **argv)
{
	static const struct option known[] = {
		{"plugin", required_argument, NULL, 'p'},      {"near", required_argument, NULL, 'n'},
		{"far", required_argument, NULL, 'f'},         {"message", required_argument, NULL, 'm'},
		{"outstanding", required_argument, NULL, 'o'}, {"comms", required_argument, NULL, 'C'},
		{"seconds", required_argument, NULL, 's'},     {"warmup-ms", required_argument, NULL, 'W'},
		{"rounds", required_argument, NULL, 'r'},      {"warmup", required_argument, NULL, 'w'},
		{"cpus", required_argument, NULL, 'c'},        {"memory", required_argument, NULL, 'M'},
		{NULL, 0, NULL, 0},
	};
	struct options o = {.memory = "malloc", .outstanding = 8, .seconds = 3, .warmup_ms = 500, .rounds = 2000, .warmup = 200};
	int option, to_far[2], to_near[2], wstatus, near_cpu = -1, far_cpu = -1;
	const char *mode = argc > 1 ? argv[1] : "";
	const bool stream = strcmp(mode, "stream") == 0, pingpong = strcmp(mode, "pingpong") == 0, comms = strcmp(mode, "comms") == 0;
	const bool alone = strcmp(mode, "register") == 0;
	pid_t child;

	o.message = pingpong ? 64 : 131072;
	o.comms = comms ? 1000 : 8;
	optind = 2;
	while (argc > 1 && (option = getopt_long(argc, argv, "", known, NULL)) != -1) {
		switch (option) {
		case 'p': o.plugin = optarg; break;
		case 'n': o.near = optarg; break;
		case 'f': o.far = optarg; break;
		case 'm': o.message = (size_t)number(optarg, 16, 1 << 30, "--message"); break;
		case 'o': o.outstanding = (unsigned)number(optarg, 1, DQ_NCCL_REQUESTS_MAX, "--outstanding"); break;
		case 'C': o.comms = (unsigned)number(optarg, 1, COMMS_MAX, "--comms"); break;
		case 's': o.seconds = number(optarg, 1, 600, "--seconds"); break;
		case 'W': o.warmup_ms = number(optarg, 0, 60000, "--warmup-ms"); break;
		case 'r': o.rounds = number(optarg, 1, 100000000, "--rounds"); break;
		case 'w': o.warmup = number(optarg, 0, 100000000, "--warmup"); break;
		case 'M':
			o.memory = optarg;
			if (strcmp(optarg, "malloc") != 0 && strcmp(optarg, "shim") != 0 && (!alone || strcmp(optarg, "dmabuf") != 0)) {
				fprintf(stderr, "nccl_bench: --memory is '%s'; expected malloc or shim%s\n", optarg, alone ? ", or dmabuf" : "");
				return 2;
			}
			break;
		case 'c':
			if (sscanf(optarg, "%d,%d", &near_cpu, &far_cpu) != 2) {
				fprintf(stderr, "nccl_bench: --cpus is '%s'; expected two CPU numbers: NEAR,FAR\n", optarg);
				return 2;
			}
			break;
		default: return 2;
		}
	}
	if (!(stream || pingpong || comms || alone) || !o.plugin || !o.near || (!alone && !o.far) || optind != argc) {
		fprintf(stderr, "usage: nccl_bench stream|pingpong|comms|register --plugin FILE --near SOCKET --far SOCKET [--message BYTES] "
				"[--outstanding N] [--comms N] [--seconds N] [--warmup-ms N] [--rounds N] [--warmup N] [--cpus NEAR,FAR] "
				"[--memory malloc|shim|dmabuf]\n");
		return 2;
	}
	if (alone) {
		start(&o, o.near);
		register_again(&o);
		return 0;
	}
	if (pipe(to_far) < 0 || pipe(to_near) < 0 || (child = fork()) < 0) {
		perror("nccl_bench");
		return 1;
	}
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(to_far[1]);
		close(to_near[0]);
		stay_on(far_cpu);
		start(&o, o.far);
		if (stream)
			stream_far(&o, to_near[1]);
		else if (pingpong)
			pingpong_far(&o, to_far[0], to_near[1]);
		else
			comms_far(&o, to_far[0], to_near[1]);
		return 0;
	}
	close(to_far[0]);
	close(to_near[1]);
	stay_on(near_cpu);
	start(&o, o.near);
	if (stream)
		stream_near(&o, to_near[0]);
	else if (pingpong)
		pingpong_near(&o, to_near[0], to_far[1]);
	else
		comms_near(&o, to_near[0], to_far[1]);
	if (waitpid(child, &wstatus, 0) < 0 || !WIFEXITED(wstatus) || WEXITSTATUS(wstatus) != 0) {
		fprintf(stderr, "nccl_bench: the far end failed\n");
		return 1;
	}
	return 0;
}
