/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one segment costs the core. 16 queue pairs, 64 flows of 8 clients, messages of 256 segments, completions shuffled
 * among the queue pairs. No memory is moved and no system call made; virtual time. Two measurements:
 *
 *   parts   scheduling at the sender (whose turn, window, queue pair, departure), its completion, tracking at the receiver
 *   vc      both ends of a whole VC: the same, with messages, slots, matching, control packets and grants
 *
 *     core_bench                          JSON: nanoseconds a segment of both, median and best of several rounds
 *     core_bench --iterations N [--vc]    one round of N segments of one of them, for callgrind with
 *                                         --toggle-collect=bench_segments or =vc_segments
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/sched.h"
#include "core/tracker.h"
#include "core/vc.h"
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
	SEGMENTS = 400000,             /* of a round */
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

static const struct dq_window_profile profile = {
	.window_bytes = (uint64_t)INFLIGHT * SEGMENT_BYTES, .floor_bytes = SEGMENT_BYTES, .segment_bytes = SEGMENT_BYTES,
	.base_rtt_ns = RTT_NS, .rate_bps = RATE_BPS, .noise_ns = 1000000, .adapt = true,
};

static int bench_init(struct bench *b)
{
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

/* --- a whole VC, both ends; [0] sends --- */

enum { CONTROL_BUFFERS = 256, CONTROL_CREDITS = 64, TODO = FLOWS * 2 };

struct vc_end {
	struct dq_vc vc;
	struct dq_pools pools;
	struct dq_departure departure;
	struct dq_grants grants;
	struct vc_end *peer;
	uint8_t control[CONTROL_BUFFERS][DQ_CONTROL_BYTES]; /* sent by this end, used in turn */
	uint32_t control_bytes[CONTROL_BUFFERS];
	uint32_t control_next, control_posted, control_taken;
	uint32_t flows[FLOWS];
	uint32_t flow_count;
	uint32_t todo[TODO];           /* flows whose message is done: the next one is due */
	uint32_t todo_count;
};

struct vc_bench {
	struct vc_end ends[2];
	struct dq_segment ring[INFLIGHT * 2];
	uint32_t posted;
	uint32_t completed;
	uint64_t now_ns;
	uint64_t messages;
	bool failed;
};

static struct vc_bench vb;

static void on_segment(void *user, struct dq_vc *vc, const struct dq_segment *s)
{
	(void)user, (void)vc;
	vb.ring[vb.posted++ % (INFLIGHT * 2)] = *s;
}

static void *on_buffer(void *user, struct dq_vc *vc)
{
	struct vc_end *e = user;

	(void)vc;
	return e->control_next - e->control_taken < CONTROL_BUFFERS ? e->control[e->control_next++ % CONTROL_BUFFERS] : NULL;
}

static void on_control(void *user, struct dq_vc *vc, void *buffer, uint32_t bytes)
{
	struct vc_end *e = user;

	(void)vc, (void)buffer; /* buffers are posted in the order in which they are handed out */
	e->control_bytes[e->control_posted++ % CONTROL_BUFFERS] = bytes;
}

static void on_done(void *user, struct dq_vc *vc, const struct dq_done *d)
{
	struct vc_end *e = user;

	(void)vc;
	if (d->status != DQ_OK || e->todo_count == TODO)
		vb.failed = true;
	else
		e->todo[e->todo_count++] = d->flow;
	vb.messages += d->kind == DQ_DONE_RECV;
}

static void on_release(void *user, uint64_t mem)
{
	(void)user, (void)mem;
}

static void on_key(void *user, struct dq_vc *vc, uint64_t mem, uint64_t offset, uint64_t bytes, uint64_t *addr, uint64_t *key)
{
	(void)user, (void)vc, (void)bytes;
	*addr = offset;
	*key = mem;
}

static void on_incoming(void *user, struct dq_vc *vc, uint32_t flow, const struct dq_message *open)
{
	struct vc_end *e = user;

	if (dq_vc_flow_accept(vc, flow, open->client))
		vb.failed = true;
	e->todo[e->todo_count++] = flow;
}

static void on_opened(void *user, struct dq_vc *vc, uint32_t flow, int32_t status)
{
	struct vc_end *e = user;

	(void)vc;
	if (status != DQ_OK)
		vb.failed = true;
	e->todo[e->todo_count++] = flow;
}

static void on_gone(void *user, struct dq_vc *vc, uint32_t flow)
{
	(void)user, (void)vc, (void)flow;
}

static const struct dq_vc_ops vc_ops = {
	.post_segment = on_segment, .control_buffer = on_buffer, .post_control = on_control, .done = on_done,
	.mem_release = on_release, .mem_key = on_key, .flow_incoming = on_incoming, .flow_opened = on_opened, .flow_gone = on_gone,
};

static void vc_deliver(struct vc_end *from)
{
	struct vc_end *to = from->peer;

	while (from->control_taken != from->control_posted) {
		uint32_t i = from->control_taken % CONTROL_BUFFERS;

		if (dq_vc_control_in(&to->vc, from->control[i], from->control_bytes[i], vb.now_ns))
			vb.failed = true;
		dq_vc_control_posted(&to->vc);
		from->control_taken++;
	}
}

static void vc_refill(struct vc_end *e, bool sender)
{
	while (e->todo_count) {
		const struct dq_operation op = { .flow = e->todo[--e->todo_count], .request = 1, .mem = 1,
						 .bytes = (uint64_t)MESSAGE_SEGMENTS * SEGMENT_BYTES };

		if (sender ? dq_vc_send(&e->vc, &op, vb.now_ns) : dq_vc_recv(&e->vc, &op, vb.now_ns))
			vb.failed = true;
	}
}

__attribute__((noipa)) static bool vc_segments(uint64_t segments);
static bool vc_segments(uint64_t segments)
{
	struct vc_end *a = &vb.ends[0], *b = &vb.ends[1];

	for (uint64_t i = 0; i < segments && !vb.failed;) {
		uint32_t n;

		vc_refill(b, false);
		vc_refill(a, true);
		dq_vc_run(&b->vc, INFLIGHT, vb.now_ns);
		vc_deliver(b);
		(void)dq_outbound_next(&a->departure.outbound, vb.now_ns); /* there is but one VC: its turn, or nobody's */
		dq_vc_run(&a->vc, INFLIGHT, vb.now_ns);
		vc_deliver(a);
		n = DQ_MIN(vb.posted - vb.completed, 4u);
		for (uint32_t k = n; k-- > 0;) {
			const struct dq_segment *s = &vb.ring[(vb.completed + k) % (INFLIGHT * 2)];

			vb.now_ns += SEGMENT_NS;
			if (dq_vc_segment_in(&b->vc, s->imm, s->bytes, vb.now_ns) ||
			    dq_vc_segment_done(&a->vc, s->id, vb.now_ns, vb.now_ns))
				vb.failed = true;
		}
		vb.completed += n;
		i += DQ_MAX(n, 1u); /* a turn without segments counts too: it must not go on for ever */
	}
	return !vb.failed;
}

static int vc_init(void)
{
	const struct dq_vc_config config = { .qps = QPS, .depth = DEPTH, .credits = CONTROL_CREDITS, .segment_bytes = SEGMENT_BYTES,
					     .cancel_deadline_ns = 1000000000, .stall_ns = 1000000000 };
	const struct dq_message open = { .listener = 1 };

	vb.now_ns = 1000000;
	for (unsigned i = 0; i < 2; i++) {
		struct vc_end *e = &vb.ends[i];

		e->peer = &vb.ends[1 - i];
		e->departure.rate_bps = RATE_BPS;
		dq_grants_init(&e->grants);
		dq_grants_device(&e->grants, RATE_BPS, 1000000);
		if (dq_pools_init(&e->pools, FLOWS * 2, FLOWS * 4) ||
		    dq_vc_init(&e->vc, &config, &profile, DEPTH, QPS, true, &e->pools, &e->departure, &e->grants, &vc_ops, e))
			return -1;
	}
	for (unsigned i = 0; i < FLOWS; i++) {
		struct dq_message m = open;

		m.client = i % CLIENTS;
		if (dq_vc_flow_open(&vb.ends[0].vc, i % CLIENTS, &m, &vb.ends[0].flows[i]))
			return -1;
	}
	return 0;
}

static void vc_fini(void)
{
	for (unsigned i = 0; i < 2; i++) {
		struct vc_end *e = &vb.ends[i];

		dq_vc_fail(&e->vc, DQ_ERR_CANCELED, vb.now_ns);
		dq_vc_fini(&e->vc);
		dq_pools_fini(&e->pools);
	}
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

struct result {
	double median_ns;
	double best_ns;
};

/* False when something did not go as it must. */
static bool measure(bool vc, struct bench *b, uint64_t segments, unsigned rounds, struct result *out)
{
	double ns[ROUNDS];

	for (unsigned i = 0; i < rounds; i++) {
		double start = seconds();

		if (!(vc ? vc_segments(segments) : bench_segments(b, segments)))
			return false;
		ns[i] = (seconds() - start) * 1e9 / (double)segments;
	}
	qsort(ns, rounds, sizeof *ns, by_value);
	*out = (struct result){ .median_ns = ns[rounds / 2], .best_ns = ns[0] };
	return true;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "iterations", required_argument, NULL, 'i' },
		{ "vc", no_argument, NULL, 'v' },
		{ NULL, 0, NULL, 0 },
	};
	static struct bench b;
	uint64_t iterations = 0;
	bool vc = false;
	struct result parts = { 0 }, whole = { 0 };
	int c;

	while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
		if (c == 'v') {
			vc = true;
		} else if (c != 'i' || !parse_count(optarg, &iterations)) {
			fprintf(stderr, "usage: %s [--iterations N [--vc]]   (N segments, 1 to 10^12; one round, no warm-up)\n", argv[0]);
			return 2;
		}
	}
	if (bench_init(&b) || vc_init()) {
		fprintf(stderr, "core_bench: out of memory\n");
		return 1;
	}
	if (iterations) {
		if (!measure(vc, &b, (iterations + 3) / 4 * 4, 1, vc ? &whole : &parts)) {
			fprintf(stderr, "core_bench: the receiver does not agree with what was sent\n");
			return 1;
		}
	} else if (!measure(false, &b, SEGMENTS, ROUNDS, &parts) || !measure(true, &b, SEGMENTS, ROUNDS, &whole)) {
		fprintf(stderr, "core_bench: the receiver does not agree with what was sent (%s%s)\n", vb.ends[0].vc.why, vb.ends[1].vc.why);
		return 1;
	}
	printf("{\"ns_per_segment\": %.2f, \"ns_per_segment_best\": %.2f, \"vc_ns_per_segment\": %.2f, \"vc_ns_per_segment_best\": %.2f, "
	       "\"segments\": %llu, \"qps\": %d, \"flows\": %d, \"messages\": %llu, \"vc_messages\": %llu}\n",
	       parts.median_ns, parts.best_ns, whole.median_ns, whole.best_ns,
	       (unsigned long long)(iterations ? iterations : (uint64_t)SEGMENTS * ROUNDS), QPS, FLOWS,
	       (unsigned long long)b.messages, (unsigned long long)vb.messages);
	vc_fini();
	dq_tracker_fini(&b.tracker);
	return 0;
}
