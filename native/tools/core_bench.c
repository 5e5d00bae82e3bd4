/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one segment costs the core: scheduling at the sender (whose turn, window, queue pair, departure), its completion, and
 * tracking at the receiver. 16 queue pairs, 64 flows of 8 clients, messages of 256 segments, completions shuffled among the
 * queue pairs. No memory is moved and no system call made; virtual time.
 *
 *     core_bench                     JSON: nanoseconds a segment, median and best of several rounds
 *     core_bench --iterations N      one round of N segments, for callgrind --toggle-collect=bench_segments
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/sched.h"
#include "core/tracker.h"
#include "core/window.h"
#include "core/wire.h"

enum {
	QPS = 16,
	CLIENTS = 8,
	FLOWS = 64,
	DEPTH = 8,                     /* segments on one QP */
	MESSAGE_SEGMENTS = 256,
	INFLIGHT = 64,                 /* segments in the window */
	ROUNDS = 15,
};

#define SEGMENT_BYTES 65536u
#define RATE_BPS 400000000000ull
#define RTT_NS 56000u
#define SEGMENT_NS (SEGMENT_BYTES * 8000000000ull / RATE_BPS)

struct bench_flow {
	struct dq_sched_flow node;     /* first: a node is its flow */
	uint16_t slot;
	uint16_t index;                /* of its message's next segment */
};

struct bench_segment {
	uint64_t departure_ns;
	uint32_t bytes;
	uint32_t imm;
	uint32_t qp;
};

struct bench {
	struct dq_sched sched;
	struct dq_sched_client clients[CLIENTS];
	struct bench_flow flows[FLOWS];
	struct dq_qps qps;
	struct dq_window window;
	struct dq_departure departure;
	struct dq_tracker tracker;
	struct bench_segment ring[INFLIGHT * 2];
	uint32_t posted;
	uint32_t completed;
	uint64_t now_ns;
	uint64_t messages;
};

static int bench_init(struct bench *b)
{
	const struct dq_window_profile profile = {
		.window_bytes = (uint64_t)INFLIGHT * SEGMENT_BYTES, .floor_bytes = SEGMENT_BYTES, .segment_bytes = SEGMENT_BYTES,
		.base_rtt_ns = RTT_NS, .rate_bps = RATE_BPS, .noise_ns = 1000000, .adapt = true,
	};

	memset(b, 0, sizeof *b);
	dq_sched_init(&b->sched, SEGMENT_BYTES);
	dq_qps_init(&b->qps, QPS, DEPTH);
	dq_window_init(&b->window, &profile);
	b->departure.rate_bps = RATE_BPS;
	b->now_ns = 1000000;
	if (dq_tracker_init(&b->tracker))
		return -1;
	for (unsigned i = 0; i < CLIENTS; i++)
		dq_sched_client_init(&b->clients[i]);
	for (unsigned i = 0; i < FLOWS; i++) {
		b->flows[i].slot = (uint16_t)i;
		dq_sched_flow_init(&b->flows[i].node, &b->clients[i % CLIENTS]);
		dq_sched_activate(&b->sched, &b->flows[i].node);
		if (dq_tracker_arm(&b->tracker, (uint16_t)i))
			return -1;
	}
	return 0;
}

/* Sender: posts what the window admits. */
static inline void bench_post(struct bench *b)
{
	struct dq_sched_flow *next;

	while ((next = dq_sched_next(&b->sched)) && dq_window_admits(&b->window, UINT64_MAX, SEGMENT_BYTES)) {
		struct bench_flow *f = (struct bench_flow *)next;
		struct bench_segment *s = &b->ring[b->posted % (INFLIGHT * 2)];
		uint32_t qp = dq_qps_pick(&b->qps);

		if (qp == DQ_NONE)
			return;
		s->qp = qp;
		s->bytes = SEGMENT_BYTES;
		s->imm = dq_imm_encode(f->slot, f->index == MESSAGE_SEGMENTS - 1, f->index);
		s->departure_ns = dq_departure_next(&b->departure, b->now_ns, SEGMENT_BYTES);
		f->index = (uint16_t)((f->index + 1) % MESSAGE_SEGMENTS);
		dq_qps_post(&b->qps, qp, SEGMENT_BYTES);
		dq_window_post(&b->window, SEGMENT_BYTES);
		dq_sched_charge(&b->sched, next, SEGMENT_BYTES);
		b->posted++;
	}
}

/* Both ends: the segment is complete. Returns false when the tracker does not agree. */
static inline bool bench_complete(struct bench *b, const struct bench_segment *s)
{
	uint16_t slot = dq_imm_slot(s->imm);

	dq_qps_done(&b->qps, s->qp, s->bytes);
	dq_window_done(&b->window, s->bytes, s->departure_ns, b->now_ns, true);
	switch (dq_tracker_segment(&b->tracker, slot, dq_imm_index(s->imm), dq_imm_last(s->imm), s->bytes)) {
	case DQ_TRACK_NEW:
		return true;
	case DQ_TRACK_COMPLETE:
		b->messages++;
		dq_tracker_release(&b->tracker, slot);
		return dq_tracker_arm(&b->tracker, slot) == 0;
	default:
		return false;
	}
}

__attribute__((noipa)) static bool bench_segments(struct bench *b, uint64_t segments);
static bool bench_segments(struct bench *b, uint64_t segments)
{
	bool good = true;

	for (uint64_t i = 0; i < segments; i += 4) {
		bench_post(b);
		/* Four at a time, the last first: as when several queue pairs are polled at once. */
		for (uint32_t k = 4; k-- > 0;) {
			b->now_ns += SEGMENT_NS;
			good &= bench_complete(b, &b->ring[(b->completed + k) % (INFLIGHT * 2)]);
		}
		b->completed += 4;
	}
	return good;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static double seconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static bool parse_count(const char *text, uint64_t *out)
{
	char *end;
	unsigned long long value = strtoull(text, &end, 10);

	if (*text < '0' || *text > '9' || *end || value == 0 || value > 1000000000000ull)
		return false;
	*out = value;
	return true;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "iterations", required_argument, NULL, 'i' },
		{ NULL, 0, NULL, 0 },
	};
	static struct bench b;
	uint64_t iterations = 0, segments = 400000;
	double ns[ROUNDS];
	unsigned rounds = 0;
	int c;

	while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
		if (c != 'i' || !parse_count(optarg, &iterations)) {
			fprintf(stderr, "usage: %s [--iterations N]   (N segments, 1 to 10^12; one round, no warm-up)\n", argv[0]);
			return 2;
		}
	}
	if (bench_init(&b)) {
		fprintf(stderr, "core_bench: out of memory\n");
		return 1;
	}
	if (iterations)
		segments = (iterations + 3) / 4 * 4;
	do {
		double start = seconds();

		if (!bench_segments(&b, segments)) {
			fprintf(stderr, "core_bench: the tracker does not agree with what was sent\n");
			return 1;
		}
		ns[rounds++] = (seconds() - start) * 1e9 / (double)segments;
	} while (!iterations && rounds < ROUNDS);
	qsort(ns, rounds, sizeof *ns, by_value);
	printf("{\"ns_per_segment\": %.2f, \"ns_per_segment_best\": %.2f, \"segments\": %llu, \"rounds\": %u, \"qps\": %d, \"flows\": %d, "
	       "\"messages\": %llu}\n",
	       ns[rounds / 2], ns[0], (unsigned long long)(segments * rounds), rounds, QPS, FLOWS, (unsigned long long)b.messages);
	dq_tracker_fini(&b.tracker);
	return 0;
}
