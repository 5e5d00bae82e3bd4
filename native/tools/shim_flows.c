/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shim_flows: many flows of several clients between two daemons, all with data at once.
 *
 *     shim_flows --near SOCKET --far SOCKET --flows 10,40,100 [--bytes 65536] [--outstanding 512] [--warmup-ms 500]
 *                [--buffers 32] [--seconds 3] [--nap-us 1000] [--hold]
 *
 * --flows has one number a client: so many flows it opens. Each client is a process at the near daemon that sends, with a
 * process at the far daemon that receives. Every flow always has at least one message outstanding; a client with few flows
 * has several on each, --outstanding together, so that it never runs dry for want of CPU. The messages of a client lie in the
 * same few buffers (--buffers at each end): compare runs with the same number of them in all, or caches decide.
 *
 * Prints one JSON object a line:
 *     {"event": "opened", "flows": N, "seconds": S}
 *     {"event": "done", "flows": N, "seconds": S, "bytes": B, "bytes_per_second": R, "jain": J, "clients": [bytes, ...]}
 * A client with nothing to do naps for --nap-us and then looks for completions, since it has plenty outstanding; with 0 it has
 * itself woken for each, and twenty processes of one machine then spend their time waking each other.
 *
 * With --hold it waits for a line on standard input after "attached" (no flow open yet) and after "opened".
 */
#include <errno.h>
#include <getopt.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
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

#define TAG 7
#define MAX_CLIENTS 64
#define RING 16384u
#define OPENING 1024u        /* connects or accepts under way at a time, a client */
#define LOOK_PAST 64u        /* requests end nearly in order: look so far past one that has not ended */
#define PATIENCE_NS INT64_C(60000000000)

struct options {
	const char *near, *far;
	unsigned flows[MAX_CLIENTS], clients;
	size_t bytes;
	unsigned outstanding, buffers;
	long warmup_ms, nap_us;
	double seconds;
	bool hold;
};

/* Shared by all processes. */
struct shared {
	pthread_barrier_t barrier;                  /* everybody, and the parent */
	pthread_barrier_t measured;                 /* the senders, and the parent */
	dqplb_handle handles[MAX_CLIENTS];
	int64_t begin_ns, end_ns;                   /* of the measured time */
	_Atomic uint64_t bytes[MAX_CLIENTS];        /* completed in it */
};

struct peer {
	dqplb_context *ctx;
	dqplb_mem *mem;
	dqplb_flow **flows;
	unsigned n;
	const struct options *o;
	struct shared *shared;
	unsigned id;
	unsigned turn;               /* of the buffers */
	bool napping;                /* enough is outstanding */
};

/* Requests in the order in which they were made, with their flow. */
struct queue {
	struct pending {
		dqplb_request *request;
		unsigned flow;
	} *items;
	unsigned size, head, count;
};

static _Noreturn void die(const char *what, int status)
{
	fprintf(stderr, "shim_flows: %s: %s: %s\n", what, dqplb_strerror(status), dqplb_last_error());
	exit(1);
}

static void check(const char *what, int status)
{
	if (status != DQPLB_OK)
		die(what, status);
}

static void *need(void *memory)
{
	if (!memory) {
		perror("shim_flows");
		exit(1);
	}
	return memory;
}

static int64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * INT64_C(1000000000) + ts.tv_nsec;
}

static void queue_init(struct queue *q, unsigned size)
{
	q->items = need(calloc(size, sizeof(*q->items)));
	q->size = size;
	q->head = q->count = 0;
}

static void queue_push(struct queue *q, dqplb_request *request, unsigned flow)
{
	q->items[(q->head + q->count++) % q->size] = (struct pending){request, flow};
}

/* Take out one request that has ended: near the front. 1 = got one. */
static int queue_ended(struct queue *q, unsigned *flow, dqplb_result *result)
{
	unsigned look = q->count < LOOK_PAST ? q->count : LOOK_PAST;

	for (unsigned i = 0; i < look; i++) {
		struct pending *item = &q->items[(q->head + i) % q->size];
		int done = 0, status = dqplb_test(item->request, &done, result);

		if (status != DQPLB_OK && !done)
			die("test", status);
		if (!done)
			continue;
		*flow = item->flow;
		*item = q->items[q->head];
		q->head = (q->head + 1) % q->size;
		q->count--;
		return 1;
	}
	return 0;
}

/* Sleep until something may have ended. The front is looked at again after a while in any case: what ended may lie behind. */
static void idle(struct peer *p)
{
	int status = dqplb_wait_any(p->ctx, p->napping ? 0 : 20);

	if (status == DQPLB_ERR_TIMEOUT && p->napping)
		usleep((useconds_t)p->o->nap_us);
	if (status != DQPLB_OK && status != DQPLB_ERR_TIMEOUT)
		die("wait_any", status);
}

static void attach(struct peer *p, const char *path, const char *side)
{
	char name[64];
	dqplb_options options = {.size = sizeof(options), .socket = path, .name = name, .ring_entries = RING};

	snprintf(name, sizeof(name), "shim_flows %s %u", side, p->id);
	check(path, dqplb_open(&options, &p->ctx));
	check("mem_alloc", dqplb_mem_alloc(p->ctx, p->o->buffers * p->o->bytes, &p->mem));
	p->n = p->o->flows[p->id];
	p->flows = need(calloc(p->n, sizeof(*p->flows)));
}

/* Connect or accept all flows of a client. */
static void open_flows(struct peer *p, dqplb_listener *listener)
{
	struct queue q;
	unsigned begun = 0, opened = 0, flow;
	int64_t deadline = now_ns() + PATIENCE_NS;

	queue_init(&q, OPENING);
	while (opened < p->n) {
		dqplb_result result;
		bool moved = false;

		while (begun < p->n && q.count < OPENING) {
			dqplb_request *request;
			int status = listener ? dqplb_accept(listener, &request)
					      : dqplb_connect(p->ctx, 0, &p->shared->handles[p->id], &request);

			if (status == DQPLB_ERR_AGAIN)
				break;
			check(listener ? "accept" : "connect", status);
			queue_push(&q, request, begun++);
			moved = true;
		}
		while (queue_ended(&q, &flow, &result)) {
			check(listener ? "accept" : "connect", result.status);
			p->flows[opened++] = result.flow;
			moved = true;
		}
		if (!moved)
			idle(p);
		if (now_ns() > deadline) {
			fprintf(stderr, "shim_flows: client %u opened %u of %u flows in %lld s\n", p->id, opened, p->n,
				(long long)(PATIENCE_NS / 1000000000));
			exit(1);
		}
	}
	free(q.items);
}

static unsigned each(const struct peer *p)
{
	unsigned n = (p->o->outstanding + p->n - 1) / p->n;

	return n ? n : 1;
}

static int post(struct peer *p, struct queue *q, unsigned flow, bool receive)
{
	size_t offset = p->turn++ % p->o->buffers * p->o->bytes;
	dqplb_request *request;
	int status = receive ? dqplb_recv(p->flows[flow], p->mem, offset, p->o->bytes, TAG, &request)
			     : dqplb_send(p->flows[flow], p->mem, offset, p->o->bytes, TAG, &request);

	if (status == DQPLB_OK)
		queue_push(q, request, flow);
	return status;
}

/* The first messages of every flow. */
static void post_all(struct peer *p, struct queue *q, bool receive)
{
	for (unsigned round = 0, n = each(p); round < n; round++) {
		for (unsigned flow = 0; flow < p->n; flow++) {
			int status;

			while ((status = post(p, q, flow, receive)) == DQPLB_ERR_AGAIN)
				idle(p);
			check(receive ? "recv" : "send", status);
		}
	}
}

static void rendezvous(pthread_barrier_t *barrier)
{
	int status = pthread_barrier_wait(barrier);

	if (status != 0 && status != PTHREAD_BARRIER_SERIAL_THREAD) {
		fprintf(stderr, "shim_flows: barrier: %s\n", strerror(status));
		exit(1);
	}
}

static void receiver(struct peer *p)
{
	struct shared *s = p->shared;
	dqplb_listener *listener;
	struct queue q;

	attach(p, p->o->far, "far");
	check("listen", dqplb_listen(p->ctx, 0, &s->handles[p->id], &listener));
	rendezvous(&s->barrier);                       /* attached */
	rendezvous(&s->barrier);                       /* go */
	open_flows(p, listener);
	rendezvous(&s->barrier);                       /* opened */
	queue_init(&q, p->n * each(p));
	post_all(p, &q, true);
	p->napping = p->o->nap_us > 0;
	rendezvous(&s->barrier);                       /* go */
	for (;;) {
		dqplb_result result;
		unsigned flow;

		if (!queue_ended(&q, &flow, &result)) {
			idle(p);
			continue;
		}
		if (result.status == DQPLB_ERR_CLOSED || result.status == DQPLB_ERR_PEER_GONE)
			break; /* the sender has finished and closes all its flows */
		check("recv", result.status);
		if (result.bytes != p->o->bytes) {
			fprintf(stderr, "shim_flows: received %llu bytes, expected %zu\n", (unsigned long long)result.bytes,
				p->o->bytes);
			exit(1);
		}
		int status;
		while ((status = post(p, &q, flow, true)) == DQPLB_ERR_AGAIN)
			idle(p);
		if (status == DQPLB_ERR_CLOSED || status == DQPLB_ERR_PEER_GONE)
			break;
		check("recv", status);
	}
	dqplb_close(p->ctx);
}

static void sender(struct peer *p)
{
	struct shared *s = p->shared;
	uint64_t bytes = 0;
	struct queue q;

	attach(p, p->o->near, "near");
	memset(dqplb_mem_address(p->mem), 0x5a, p->o->buffers * p->o->bytes);
	rendezvous(&s->barrier);                       /* attached: the handles are there */
	rendezvous(&s->barrier);                       /* go */
	open_flows(p, NULL);
	rendezvous(&s->barrier);                       /* opened */
	queue_init(&q, p->n * each(p));
	rendezvous(&s->barrier);                       /* go: begin_ns and end_ns are set */
	post_all(p, &q, false);
	p->napping = p->o->nap_us > 0;
	for (;;) {
		dqplb_result result;
		unsigned flow;
		int64_t now = now_ns();
		int status;

		if (now >= s->end_ns)
			break;
		if (!queue_ended(&q, &flow, &result)) {
			idle(p);
			continue;
		}
		check("send", result.status);
		if (now >= s->begin_ns)
			bytes += result.bytes ? result.bytes : p->o->bytes;
		while ((status = post(p, &q, flow, false)) == DQPLB_ERR_AGAIN)
			idle(p);
		check("send", status);
	}
	atomic_store(&s->bytes[p->id], bytes);
	rendezvous(&s->measured);            /* nobody closes before all have stopped counting */
	dqplb_close(p->ctx);
}

static void hold(const struct options *o, const char *event)
{
	if (!o->hold)
		return;
	printf("{\"event\": \"%s\"}\n", event);
	fflush(stdout);
	for (int c; (c = getchar()) != '\n';)
		if (c == EOF) {
			fprintf(stderr, "shim_flows: standard input ended while held\n");
			exit(1);
		}
}

static pid_t spawn(struct shared *s, const struct options *o, unsigned id, bool receive)
{
	pid_t child = fork();
	struct peer p = {.o = o, .shared = s, .id = id};

	if (child < 0) {
		perror("shim_flows: fork");
		exit(1);
	}
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (receive)
			receiver(&p);
		else
			sender(&p);
		exit(0);
	}
	return child;
}

static long number(const char *text, long low, long high, const char *what)
{
	char *end;
	long value;

	errno = 0;
	value = strtol(text, &end, 10);
	if (errno || *end || end == text || value < low || value > high) {
		fprintf(stderr, "shim_flows: %s is '%s'; expected a number %ld..%ld\n", what, text, low, high);
		exit(2);
	}
	return value;
}

static void parse_flows(struct options *o, char *text)
{
	for (char *save = NULL, *word = strtok_r(text, ",", &save); word; word = strtok_r(NULL, ",", &save)) {
		if (o->clients == MAX_CLIENTS) {
			fprintf(stderr, "shim_flows: --flows names more than %d clients\n", MAX_CLIENTS);
			exit(2);
		}
		o->flows[o->clients++] = (unsigned)number(word, 1, RING / 2, "--flows");
	}
}

/* A child that fails ends everything: the others would wait for it at the barrier for ever. */
static void on_child(int signal_number)
{
	int saved = errno, wstatus;

	(void)signal_number;
	while (waitpid(-1, &wstatus, WNOHANG) > 0) {
		if (!WIFEXITED(wstatus) || WEXITSTATUS(wstatus) != 0)
			_exit(1); /* the others have PR_SET_PDEATHSIG */
	}
	errno = saved;
}

int main(int argc, char **argv)
{
	static const struct option known[] = {
		{"near", required_argument, NULL, 'n'},      {"far", required_argument, NULL, 'f'},
		{"flows", required_argument, NULL, 'F'},     {"bytes", required_argument, NULL, 'b'},
		{"outstanding", required_argument, NULL, 'o'}, {"warmup-ms", required_argument, NULL, 'w'},
		{"seconds", required_argument, NULL, 's'},   {"buffers", required_argument, NULL, 'B'},
		{"nap-us", required_argument, NULL, 'N'},    {"hold", no_argument, NULL, 'h'},
		{NULL, 0, NULL, 0},
	};
	struct options o = {.bytes = 65536, .outstanding = 512, .buffers = 32, .warmup_ms = 500, .nap_us = 1000, .seconds = 3};
	struct sigaction action = {.sa_handler = on_child, .sa_flags = SA_RESTART};
	pthread_barrierattr_t attributes;
	struct shared *s;
	unsigned flows = 0;
	double sum = 0, squares = 0;
	int option, wstatus;
	int64_t begin;

	while ((option = getopt_long(argc, argv, "", known, NULL)) != -1) {
		switch (option) {
		case 'n': o.near = optarg; break;
		case 'f': o.far = optarg; break;
		case 'F': parse_flows(&o, optarg); break;
		case 'b': o.bytes = (size_t)number(optarg, 1, 1 << 26, "--bytes"); break;
		case 'o': o.outstanding = (unsigned)number(optarg, 1, RING / 2, "--outstanding"); break;
		case 'w': o.warmup_ms = number(optarg, 0, 60000, "--warmup-ms"); break;
		case 's': o.seconds = (double)number(optarg, 1, 600, "--seconds"); break;
		case 'B': o.buffers = (unsigned)number(optarg, 1, 65536, "--buffers"); break;
		case 'N': o.nap_us = number(optarg, 0, 100000, "--nap-us"); break;
		case 'h': o.hold = true; break;
		default: return 2;
		}
	}
	if (!o.near || !o.far || !o.clients || optind != argc) {
		fprintf(stderr, "usage: shim_flows --near SOCKET --far SOCKET --flows N,N,... [--bytes N] [--outstanding N] "
				"[--warmup-ms N] [--buffers N] [--seconds N] [--nap-us N] [--hold]\n");
		return 2;
	}
	s = mmap(NULL, sizeof(*s), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (s == MAP_FAILED) {
		perror("shim_flows: mmap");
		return 1;
	}
	pthread_barrierattr_init(&attributes);
	pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
	pthread_barrier_init(&s->barrier, &attributes, 2 * o.clients + 1);
	pthread_barrier_init(&s->measured, &attributes, o.clients + 1);
	sigaction(SIGCHLD, &action, NULL);
	for (unsigned i = 0; i < o.clients; i++) {
		flows += o.flows[i];
		spawn(s, &o, i, true);
		spawn(s, &o, i, false);
	}
	rendezvous(&s->barrier); /* attached */
	hold(&o, "attached");
	begin = now_ns();
	rendezvous(&s->barrier); /* go */
	rendezvous(&s->barrier); /* opened */
	printf("{\"event\": \"opened\", \"flows\": %u, \"seconds\": %.6f}\n", flows, (double)(now_ns() - begin) / 1e9);
	fflush(stdout);
	hold(&o, "held");
	s->begin_ns = now_ns() + o.warmup_ms * 1000000;
	s->end_ns = s->begin_ns + (int64_t)(o.seconds * 1e9);
	rendezvous(&s->barrier); /* go */
	rendezvous(&s->measured);
	/* The senders close their flows, which ends the receivers. */
	action.sa_handler = SIG_DFL;
	sigaction(SIGCHLD, &action, NULL);
	while (waitpid(-1, &wstatus, 0) > 0) {
		if (!WIFEXITED(wstatus) || WEXITSTATUS(wstatus) != 0)
			return 1;
	}
	printf("{\"event\": \"done\", \"flows\": %u, \"seconds\": %.3f, \"clients\": [", flows, o.seconds);
	for (unsigned i = 0; i < o.clients; i++) {
		uint64_t bytes = atomic_load(&s->bytes[i]);

		sum += (double)bytes;
		squares += (double)bytes * (double)bytes;
		printf("%s%llu", i ? ", " : "", (unsigned long long)bytes);
	}
	printf("], \"bytes\": %.0f, \"bytes_per_second\": %.0f, \"jain\": %.4f}\n", sum, sum / o.seconds,
	       squares > 0 ? sum * sum / (o.clients * squares) : 0.0);
	return 0;
}
