/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One thread per prober. All state is under one lock, which the thread gives back while it sleeps and after each short pass;
 * so a command of a caller is carried out in the caller, and when dq_prober_target_remove has the lock, nobody uses the link.
 * The waiting room is a second lock: who wants the state queues there, so that a thread busy with a flood of datagrams
 * cannot keep callers out.
 *
 * Probes and answers under way lie in two rings in the order of their start. All have the same time to live, so the oldest
 * is always the next to run out, and no timer structure is needed for them.
 */
#include "probe/prober.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "probe/limiter.h"
#include "probe/packet.h"
#include "probe/samples.h"
#include "probe/schedule.h"
#include "probe/targets.h"

#define MS 1000000ull
#define SECOND (1000 * MS)

#define DEFAULT_TIMEOUT_NS SECOND
#define MIN_TIMEOUT_NS MS
#define MAX_TIMEOUT_NS (60 * SECOND)
#define DEFAULT_ANSWERS 1000u
#define DEFAULT_TARGETS 65536u
#define MAX_TARGETS (1u << 20)
#define DEFAULT_SAMPLES 65536u
#define MAX_SAMPLES (1u << 24)
/* A floor that no configuration can lower: a prober must never become a load generator. */
#define MIN_INTERVAL_NS MS
#define MAX_WAIT_NS (365ull * 24 * 3600 * SECOND) /* of intervals and phases, so that sums cannot overflow */

#define MIN_FLIGHTS 1024u       /* probes under way: a power of two */
#define MAX_FLIGHTS 16384u
#define ANSWERS 4096u           /* answers whose ACK2 is still to be sent: a power of two */
#define EXTRA_MAX 1024u         /* extra probes of one target that wait to be sent */
#define BATCH 32u               /* events handled, and probes sent, in one pass under the lock */
#define FULL_BATCHES_MAX 64u    /* full batches of events before probes run out all the same */
#define BROKEN_NS (100 * MS)    /* pause of reading after the datagram endpoint failed */
#define OFFSET_WINDOW_NS (10 * SECOND)

/* The id of an event in the endpoint: what was sent in the upper, its counter in the lower half. */
enum sent_what { SENT_PROBE = 1, SENT_ACK1 = 2, SENT_ACK2 = 3 };

enum flight_state {
	FLIGHT_FREE,
	FLIGHT_WAITING,
	FLIGHT_DONE,                  /* answered, or of no interest any more */
	FLIGHT_LOST,                  /* timed out; an answer is late */
	FLIGHT_LATE,                  /* timed out, and the late answer was counted */
};

struct flight {                       /* a probe under way; times are named as in prober.h */
	uint64_t t1, t2, t5, t6;
	int64_t delta;
	uint32_t counter, target, generation;
	uint8_t state;                /* enum flight_state */
	bool sent, ack1, ack2;        /* t2; t5 and t6; delta is known */
};

struct answer {                       /* an ACK1 whose T4 is awaited */
	uint64_t posted;              /* CLOCK_MONOTONIC */
	uint64_t t3;
	uint64_t id;                  /* the prober's */
	uint32_t counter, target, generation;
	bool waiting;
};

struct dq_prober {
	const struct dq_provider *provider;
	struct dq_dgram *dgram;
	struct dq_endpoint endpoint;
	uint64_t timeout_ns;
	uint64_t token;
	uint32_t life;                /* random: upper half of this prober's ids */
	struct dq_limiter_rate rate;
	int dgram_fd;
	int wake_fd;                  /* eventfd: look at the state again */
	pthread_t thread;

	pthread_mutex_t waiting_room;
	pthread_mutex_t lock;         /* everything down to stats */
	bool stop;
	struct dq_targets targets;
	struct dq_schedule regular, extra;
	struct flight *flights;
	uint32_t flight_mask, flight_first, flight_next; /* counters, free-running */
	struct answer *answers;
	uint32_t answer_first, answer_next;
	/* Endpoint's clock minus CLOCK_MONOTONIC: the best of this and of the last window, see offset_learn. */
	int64_t offset, offset_last;
	uint64_t offset_until;
	bool offset_known, offset_last_known;
	uint64_t now;                 /* CLOCK_MONOTONIC, of this pass or the last; begin of the next one at the latest */
	uint32_t full_batches;
	uint64_t broken_until;
	struct dq_prober_stats stats;

	struct dq_samples samples;    /* with a lock of its own */
};

static uint64_t now_ns(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * SECOND + (uint64_t)ts.tv_nsec;
}

static void state_lock(struct dq_prober *p)
{
	pthread_mutex_lock(&p->waiting_room);
	pthread_mutex_lock(&p->lock);
	pthread_mutex_unlock(&p->waiting_room);
}

static void state_unlock(struct dq_prober *p)
{
	pthread_mutex_unlock(&p->lock);
}

static void signal_fd(int fd)
{
	uint64_t one = 1;
	/* Can only fail with EAGAIN, when the counter is full: then it is readable, which is all that is wanted. */
	ssize_t done = write(fd, &one, sizeof one);
	(void)done;
}

static void clear_fd(int fd)
{
	uint64_t count;
	ssize_t done = read(fd, &count, sizeof count); /* EAGAIN: was clear */
	(void)done;
}

static int packet_send(struct dq_prober *p, const struct dq_target *t, enum dq_probe_type type, uint64_t id, int64_t delta,
		       enum sent_what what, uint32_t counter)
{
	struct dq_probe_packet packet = { .type = type, .id = id, .token = t->token, .delta_ns = delta };
	uint8_t bytes[DQ_PROBE_PACKET_BYTES];
	dq_probe_packet_encode(&packet, bytes);
	int rc = p->provider->dgram_send(p->dgram, &t->endpoint, t->flow_label, t->link, (uint64_t)what << 32 | counter, bytes, sizeof bytes);
	return rc < 0 ? rc : 0;
}

/*
 * The clock of the endpoint's events is its own; a software time is put into it by what the events teach: an event seen at
 * `now` happened before, so its time minus now is below the true offset, by as much as it took to be seen. The largest of
 * the last 10 to 20 s is nearest; older ones are forgotten because clocks drift and are set.
 */
static void offset_learn(struct dq_prober *p, uint64_t event_ns, uint64_t now)
{
	int64_t offset = (int64_t)(event_ns - now);
	if (now >= p->offset_until) {
		p->offset_last = p->offset;
		p->offset_last_known = p->offset_known && now < p->offset_until + OFFSET_WINDOW_NS;
		p->offset_known = false;
		p->offset_until = now + OFFSET_WINDOW_NS;
	}
	if (!p->offset_known || offset > p->offset)
		p->offset = offset;
	p->offset_known = true;
}

/* A software time in the endpoint's clock. At least one event came before: nothing asks without one. */
static uint64_t to_event_clock(const struct dq_prober *p, uint64_t software_ns)
{
	int64_t best = p->offset;
	if (p->offset_last_known && p->offset_last > best)
		best = p->offset_last;
	return software_ns + (uint64_t)best;
}

/* The prober's side */

static bool flight_end(struct dq_prober *p, struct flight *f, enum dq_probe_result result)
{
	struct dq_probe_sample s = { .target = f->target, .result = result, .time_ns = f->t1 };
	f->state = FLIGHT_DONE;
	switch (result) {
	case DQ_PROBE_OK:
		p->stats.acked++;
		s.rtt_ns = (int64_t)(f->t5 - f->t2) - f->delta;
		s.responder_delay_ns = f->delta;
		/* Two clocks that tick at slightly different rates may turn a very small delay negative. */
		s.prober_delay_ns = DQ_MAX((int64_t)(f->t6 - f->t1) - (int64_t)(f->t5 - f->t2), 0);
		break;
	case DQ_PROBE_TIMEOUT:
		p->stats.timeouts++;
		f->state = FLIGHT_LOST;
		break;
	case DQ_PROBE_SEND_ERROR:
		p->stats.send_errors++;
		break;
	case DQ_PROBE_INVALID:
		p->stats.invalid++;
		break;
	}
	return dq_samples_push(&p->samples, &s);
}

/* Both ACKs and T2 are there. */
static bool flight_finish(struct dq_prober *p, struct flight *f)
{
	int64_t bracket = (int64_t)(f->t5 - f->t2);
	/* The peer is free to tell any delta. */
	if (bracket < 0 || f->delta < 0 || f->delta > bracket)
		return flight_end(p, f, DQ_PROBE_INVALID);
	if ((uint64_t)bracket > p->timeout_ns) {
		/* This thread was held up so long that the answer came in before the timeout was seen. */
		bool pushed = flight_end(p, f, DQ_PROBE_TIMEOUT);
		p->stats.late++;
		f->state = FLIGHT_LATE;
		return pushed;
	}
	return flight_end(p, f, DQ_PROBE_OK);
}

static bool probe_send(struct dq_prober *p, uint32_t id)
{
	const struct dq_target *t = dq_targets_get(&p->targets, id);
	uint64_t now = now_ns();
	if (p->flight_next - p->flight_first > p->flight_mask) {
		struct dq_probe_sample s = { .target = id, .result = DQ_PROBE_SEND_ERROR, .time_ns = now };
		p->stats.send_errors++;
		return dq_samples_push(&p->samples, &s);
	}
	uint32_t counter = p->flight_next++;
	struct flight *f = &p->flights[counter & p->flight_mask];
	*f = (struct flight){ .t1 = now, .counter = counter, .target = id, .generation = t->generation,
			      .state = FLIGHT_WAITING };
	if (packet_send(p, t, DQ_PROBE_PROBE, (uint64_t)p->life << 32 | counter, 0, SENT_PROBE, counter) < 0)
		return flight_end(p, f, DQ_PROBE_SEND_ERROR);
	p->stats.sent++;
	return false;
}

/* The probe with this counter, as far as it is still remembered. */
static struct flight *flight_find(struct dq_prober *p, uint32_t counter)
{
	struct flight *f = &p->flights[counter & p->flight_mask];
	return f->state != FLIGHT_FREE && f->counter == counter ? f : NULL;
}

static bool on_probe_event(struct dq_prober *p, uint32_t counter, const struct dq_dgram_event *ev)
{
	struct flight *f = flight_find(p, counter);
	if (!f || f->state != FLIGHT_WAITING || f->sent || !dq_targets_same(&p->targets, f->target, f->generation))
		return false;
	if (ev->kind == DQ_DGRAM_SEND_ERROR)
		return flight_end(p, f, DQ_PROBE_SEND_ERROR);
	f->t2 = ev->time_ns;
	f->sent = true;
	return f->ack1 && f->ack2 && flight_finish(p, f);
}

static bool on_ack(struct dq_prober *p, const struct dq_probe_packet *packet, const struct dq_dgram_event *ev, uint64_t now)
{
	uint32_t counter = (uint32_t)packet->id;
	/* Counters of the future were never asked. */
	if (packet->id >> 32 != p->life || (int32_t)(counter - p->flight_next) >= 0) {
		p->stats.malformed++;
		return false;
	}
	struct flight *f = flight_find(p, counter);
	if (!f) { /* long ago */
		p->stats.late++;
		return false;
	}
	const struct dq_target *t = dq_targets_same(&p->targets, f->target, f->generation);
	if (!t)
		return false;
	if (!dq_endpoint_same(&t->endpoint, &ev->from)) { /* a peer answers for another */
		p->stats.refused_unknown++;
		return false;
	}
	if (f->state == FLIGHT_LOST) {
		f->state = FLIGHT_LATE;
		p->stats.late++;
	}
	if (f->state != FLIGHT_WAITING)
		return false;
	if (packet->type == DQ_PROBE_ACK1 && !f->ack1) {
		f->t5 = ev->time_ns;
		f->t6 = now;
		f->ack1 = true;
	} else if (packet->type == DQ_PROBE_ACK2 && !f->ack2) {
		f->delta = packet->delta_ns;
		f->ack2 = true;
	}
	/* Without T2 the event of the sending may still come; the timeout ends the wait. */
	return f->sent && f->ack1 && f->ack2 && flight_finish(p, f);
}

/* Let run out what waits too long; retire what is done. */
static bool flights_expire(struct dq_prober *p, uint64_t now)
{
	bool pushed = false;
	for (; p->flight_first != p->flight_next; p->flight_first++) {
		struct flight *f = &p->flights[p->flight_first & p->flight_mask];
		if (f->state != FLIGHT_WAITING)
			continue;
		if (!dq_targets_same(&p->targets, f->target, f->generation)) {
			f->state = FLIGHT_DONE;
		} else if (f->t1 + p->timeout_ns > now) {
			break;
		} else if (f->ack1 && f->ack2) {
			f->t2 = to_event_clock(p, f->t1);
			pushed |= flight_finish(p, f);
		} else {
			pushed |= flight_end(p, f, DQ_PROBE_TIMEOUT);
		}
	}
	return pushed;
}

static bool probes_send_due(struct dq_prober *p, uint64_t now, bool *more)
{
	bool pushed = false;
	uint64_t due;
	for (unsigned n = 0; n < BATCH; n++) {
		uint32_t id = dq_schedule_pop(&p->extra, now, &due);
		if (id != DQ_NONE) {
			if (--dq_targets_get(&p->targets, id)->extra > 0)
				dq_schedule_set(&p->extra, id, due);
		} else {
			id = dq_schedule_pop(&p->regular, now, &due);
			if (id == DQ_NONE)
				return pushed;
			uint64_t interval = dq_targets_get(&p->targets, id)->interval_ns;
			dq_schedule_set(&p->regular, id, dq_schedule_following(due, interval, now));
		}
		pushed |= probe_send(p, id);
		/* An endpoint without stamps by the system knows the time of sending at once: fetch it. */
		*more = true;
	}
	return pushed;
}

/* The responder's side */

/* Returns whether ACK1 was sent. */
static bool on_probe(struct dq_prober *p, struct dq_target *t, const struct dq_probe_packet *packet, uint64_t t3, uint64_t now)
{
	uint32_t counter = p->answer_next;
	if (!dq_limiter_take(&t->limiter, &p->rate, now) || counter - p->answer_first >= ANSWERS) {
		p->stats.refused_rate++;
		return false;
	}
	uint64_t posted = now_ns();
	if (packet_send(p, t, DQ_PROBE_ACK1, packet->id, 0, SENT_ACK1, counter) < 0)
		return false; /* the peer sees a loss, and that is what it is */
	p->stats.answered++;
	p->answer_next++;
	p->answers[counter & (ANSWERS - 1)] = (struct answer){
		.posted = posted, .t3 = t3, .id = packet->id, .counter = counter, .target = dq_targets_id(&p->targets, t),
		.generation = t->generation, .waiting = true,
	};
	return true;
}

static void answer_finish(struct dq_prober *p, struct answer *a, int64_t delta)
{
	const struct dq_target *t = dq_targets_same(&p->targets, a->target, a->generation);
	a->waiting = false;
	if (t)
		packet_send(p, t, DQ_PROBE_ACK2, a->id, delta, SENT_ACK2, a->counter);
}

static void on_ack1_event(struct dq_prober *p, uint32_t counter, const struct dq_dgram_event *ev)
{
	struct answer *a = &p->answers[counter & (ANSWERS - 1)];
	if (!a->waiting || a->counter != counter)
		return;
	if (ev->kind == DQ_DGRAM_SEND_ERROR)
		a->waiting = false;
	else
		answer_finish(p, a, (int64_t)(ev->time_ns - a->t3));
}

/* The prober waits timeout_ns for an answer, presumably about as long as we would; half of that must be left for ACK2. */
static uint64_t answer_patience(const struct dq_prober *p)
{
	return p->timeout_ns / 4;
}

static void answers_expire(struct dq_prober *p, uint64_t now)
{
	for (; p->answer_first != p->answer_next; p->answer_first++) {
		struct answer *a = &p->answers[p->answer_first & (ANSWERS - 1)];
		if (!a->waiting)
			continue;
		if (a->posted + answer_patience(p) > now)
			break;
		/* T4 was never told: the time of posting stands in. The offset errs low; an answer never leaves before its probe. */
		int64_t delta = (int64_t)(to_event_clock(p, a->posted) - a->t3);
		answer_finish(p, a, DQ_MAX(delta, 0));
	}
}

static bool on_received(struct dq_prober *p, const struct dq_dgram_event *ev, uint64_t now, bool *more)
{
	struct dq_probe_packet packet;
	if (ev->len > sizeof ev->data || dq_probe_packet_decode(ev->data, ev->len, &packet) < 0) {
		p->stats.malformed++;
		return false;
	}
	struct dq_target *t = dq_targets_find(&p->targets, &ev->from);
	if (!t) {
		p->stats.refused_unknown++;
		return false;
	}
	if (packet.token != p->token) {
		p->stats.refused_token++;
		return false;
	}
	if (packet.type != DQ_PROBE_PROBE)
		return on_ack(p, &packet, ev, now);
	*more |= on_probe(p, t, &packet, ev->time_ns, now); /* perhaps T4 is known at once */
	return false;
}

static bool on_event(struct dq_prober *p, const struct dq_dgram_event *ev, uint64_t now, bool *more)
{
	uint32_t counter = (uint32_t)ev->id;
	if (ev->kind != DQ_DGRAM_SEND_ERROR)
		offset_learn(p, ev->time_ns, now);
	if (ev->kind == DQ_DGRAM_RECEIVED)
		return on_received(p, ev, now, more);
	switch ((enum sent_what)(ev->id >> 32)) {
	case SENT_PROBE:
		return on_probe_event(p, counter, ev);
	case SENT_ACK1:
		on_ack1_event(p, counter, ev);
		return false;
	case SENT_ACK2: /* nobody waits for it: a lost ACK2 is a lost probe */
		break;
	}
	return false;
}

/*
 * One round under the lock; woken: the first one after a sleep. *more: go round again without sleeping. Returns whether samples
 * were made. The clock is read only where time can have passed, since in virtual machines that may take longer than the rest.
 */
static bool pass(struct dq_prober *p, bool woken, bool *more)
{
	struct dq_dgram_event events[BATCH];
	bool pushed = false;
	*more = false;

	int n = 0;
	uint64_t begun = p->now;
	if (p->broken_until <= begun) {
		n = p->provider->dgram_poll(p->dgram, events, BATCH);
		p->broken_until = n < 0 && n != -EAGAIN ? begun + BROKEN_NS : 0;
	}
	if (woken || n > 0)
		p->now = now_ns();
	uint64_t now = p->now;
	for (int i = 0; i < n; i++)
		pushed |= on_event(p, &events[i], now, more);

	pushed |= probes_send_due(p, now, more);

	/* An answer that lies in the socket when this thread comes late is in time: first read all that came before this
	 * pass began, but not for ever. */
	p->full_batches = n == (int)BATCH ? p->full_batches + 1 : 0;
	if (p->full_batches == 0 || p->full_batches > FULL_BATCHES_MAX) {
		pushed |= flights_expire(p, begun);
		answers_expire(p, begun);
	}
	*more |= n == (int)BATCH;
	return pushed;
}

static uint64_t next_deadline(struct dq_prober *p)
{
	uint64_t at = DQ_MIN(dq_schedule_next(&p->regular), dq_schedule_next(&p->extra));
	if (p->broken_until == 0)
		at = DQ_MIN(at, p->provider->dgram_next_deadline(p->dgram));
	else
		at = DQ_MIN(at, p->broken_until);
	if (p->flight_first != p->flight_next)
		at = DQ_MIN(at, p->flights[p->flight_first & p->flight_mask].t1 + p->timeout_ns);
	if (p->answer_first != p->answer_next)
		at = DQ_MIN(at, p->answers[p->answer_first & (ANSWERS - 1)].posted + answer_patience(p));
	return at;
}

static void *run(void *arg)
{
	struct dq_prober *p = arg;
	pthread_setname_np(pthread_self(), "dq-prober");
	/* The default of 50 us is more than the round trip in a rack. */
	prctl(PR_SET_TIMERSLACK, 1ul, 0ul, 0ul, 0ul);

	for (bool woken = true;; ) {
		bool more;
		state_lock(p);
		if (p->stop) {
			state_unlock(p);
			return NULL;
		}
		uint64_t answered = p->stats.answered;
		bool pushed = pass(p, woken, &more);
		uint64_t deadline = more ? 0 : next_deadline(p), now = p->now;
		bool broken = p->broken_until != 0;
		answered = p->stats.answered - answered;
		state_unlock(p);

		if (pushed)
			dq_samples_notify(&p->samples);
		/* Who asked may wait for this very CPU, and reads the clock when it has got it: ACK2 is in no hurry. */
		if (answered)
			sched_yield();
		woken = deadline > now;
		if (deadline == 0)
			continue;

		struct pollfd fds[2] = {
			{ .fd = p->wake_fd, .events = POLLIN },
			{ .fd = broken ? -1 : p->dgram_fd, .events = POLLIN },
		};
		struct timespec wait = { 0 };
		if (deadline != DQ_NEVER) {
			uint64_t left = deadline > now ? DQ_MIN(deadline - now, MAX_WAIT_NS) : 0;
			wait.tv_sec = (time_t)(left / SECOND);
			wait.tv_nsec = (long)(left % SECOND);
		}
		if (ppoll(fds, 2, deadline == DQ_NEVER ? NULL : &wait, NULL) > 0 && fds[0].revents)
			clear_fd(p->wake_fd);
	}
}

/* Commands */

int dq_prober_target_set(dq_prober *p, uint32_t id, const uint8_t *endpoint, uint32_t endpoint_bytes, uint64_t token,
			 uint32_t flow_label, void *link, uint64_t interval_ns, uint64_t phase_ns)
{
	if (id >= p->targets.max || endpoint_bytes == 0 || endpoint_bytes > DQ_ENDPOINT_MAX)
		return -EINVAL;
	if ((interval_ns != 0 && interval_ns < MIN_INTERVAL_NS) || interval_ns > MAX_WAIT_NS || phase_ns > MAX_WAIT_NS)
		return -ERANGE;
	struct dq_endpoint e = { .len = (uint16_t)endpoint_bytes };
	memcpy(e.data, endpoint, endpoint_bytes);

	state_lock(p);
	struct dq_target *t = dq_targets_set(&p->targets, id, &e);
	t->token = token;
	t->flow_label = flow_label;
	t->link = link;
	t->interval_ns = interval_ns;
	if (t->extra == 0)
		dq_schedule_remove(&p->extra, id); /* of another peer that had the id */
	if (interval_ns)
		dq_schedule_set(&p->regular, id, now_ns() + phase_ns);
	else
		dq_schedule_remove(&p->regular, id);
	state_unlock(p);
	signal_fd(p->wake_fd);
	return 0;
}

int dq_prober_target_remove(dq_prober *p, uint32_t id)
{
	if (id >= p->targets.max)
		return -EINVAL;
	state_lock(p);
	int rc = dq_targets_get(&p->targets, id) ? 0 : -ENOENT;
	if (rc == 0) {
		dq_schedule_remove(&p->regular, id);
		dq_schedule_remove(&p->extra, id);
		dq_targets_remove(&p->targets, id);
	}
	state_unlock(p);
	return rc;
}

int dq_prober_once(dq_prober *p, uint32_t id)
{
	if (id >= p->targets.max)
		return -EINVAL;
	state_lock(p);
	struct dq_target *t = dq_targets_get(&p->targets, id);
	int rc = !t ? -ENOENT : t->extra >= EXTRA_MAX ? -EAGAIN : 0;
	if (rc == 0 && t->extra++ == 0)
		dq_schedule_set(&p->extra, id, now_ns());
	state_unlock(p);
	if (rc == 0)
		signal_fd(p->wake_fd);
	return rc;
}

int dq_prober_event_fd(dq_prober *p)
{
	return p->samples.event_fd;
}

int dq_prober_drain(dq_prober *p, struct dq_probe_sample *out, uint32_t n)
{
	return (int)dq_samples_drain(&p->samples, out, DQ_MIN(n, (uint32_t)INT32_MAX));
}

void dq_prober_stats(dq_prober *p, struct dq_prober_stats *out)
{
	state_lock(p);
	*out = p->stats;
	out->targets = p->targets.count;
	out->correction_ns = p->provider->dgram_correction_ns ? p->provider->dgram_correction_ns(p->dgram) : 0;
	state_unlock(p);
	out->samples_dropped = dq_samples_dropped(&p->samples);
}

int dq_prober_endpoint(dq_prober *p, uint8_t *out)
{
	memcpy(out, p->endpoint.data, p->endpoint.len);
	return p->endpoint.len;
}

const char *dq_prober_time_source(dq_prober *p)
{
	state_lock(p);
	const char *source = p->provider->dgram_time_source(p->dgram);
	state_unlock(p);
	return source;
}

/* Start and stop */

static void prober_free(struct dq_prober *p)
{
	if (p->dgram)
		p->provider->dgram_close(p->dgram);
	if (p->wake_fd >= 0)
		close(p->wake_fd);
	if (p->samples.size)
		dq_samples_destroy(&p->samples);
	pthread_mutex_destroy(&p->waiting_room);
	pthread_mutex_destroy(&p->lock);
	dq_schedule_destroy(&p->regular);
	dq_schedule_destroy(&p->extra);
	dq_targets_destroy(&p->targets);
	free(p->flights);
	free(p->answers);
	free(p);
}

static int config_check(const struct dq_provider *provider, const struct dq_prober_config *cfg, struct dq_error *err)
{
	if (!provider->dgram_open || !provider->dgram_send || !provider->dgram_poll)
		return dq_error_set(err, -EOPNOTSUPP, "prober: provider '%s' has no datagram endpoint; use another provider "
				    "for this device or switch probing off", provider->name);
	if (cfg->token == 0)
		return dq_error_set(err, -EINVAL, "prober: token is 0, expected a random 64-bit number: without one anybody "
				    "could use the responder");
	if (cfg->timeout_ns != 0 && (cfg->timeout_ns < MIN_TIMEOUT_NS || cfg->timeout_ns > MAX_TIMEOUT_NS))
		return dq_error_set(err, -ERANGE, "prober: timeout is %llu ns, expected 0 (for 1 s) or %llu to %llu",
				    (unsigned long long)cfg->timeout_ns, MIN_TIMEOUT_NS, MAX_TIMEOUT_NS);
	if (cfg->max_targets > MAX_TARGETS)
		return dq_error_set(err, -ERANGE, "prober: max_targets is %u, expected at most %u", cfg->max_targets, MAX_TARGETS);
	if (cfg->ring_samples > MAX_SAMPLES)
		return dq_error_set(err, -ERANGE, "prober: ring_samples is %u, expected at most %u", cfg->ring_samples,
				    MAX_SAMPLES);
	return 0;
}

static int prober_prepare(struct dq_prober *p, struct dq_device *dev, const struct dq_prober_config *cfg, struct dq_error *err)
{
	p->timeout_ns = cfg->timeout_ns ? cfg->timeout_ns : DEFAULT_TIMEOUT_NS;
	p->token = cfg->token;
	uint32_t targets = cfg->max_targets ? cfg->max_targets : DEFAULT_TARGETS;
	uint32_t samples = cfg->ring_samples ? cfg->ring_samples : DEFAULT_SAMPLES;
	dq_limiter_rate_set(&p->rate, cfg->answers_per_second ? cfg->answers_per_second : DEFAULT_ANSWERS);

	/* The life makes ids of another start of this prober invalid, the seed keeps peers from choosing their hash bucket. */
	struct { uint64_t seed; uint32_t life; uint32_t counter; } random;
	if (getrandom(&random, sizeof random, 0) != (ssize_t)sizeof random)
		return dq_error_set(err, -errno, "prober: no random numbers from the system: %s", strerror(errno));
	p->life = random.life;
	p->flight_first = p->flight_next = random.counter;

	uint32_t flights = MIN_FLIGHTS;
	while (flights < targets && flights < MAX_FLIGHTS)
		flights *= 2;
	p->flights = calloc(flights, sizeof *p->flights);
	p->flight_mask = flights - 1;
	p->answers = calloc(ANSWERS, sizeof *p->answers);
	if (!p->flights || !p->answers || dq_targets_init(&p->targets, targets, random.seed) < 0 ||
	    dq_schedule_init(&p->regular, targets) < 0 || dq_schedule_init(&p->extra, targets) < 0)
		return dq_error_set(err, -ENOMEM, "prober: not enough memory for %u targets; lower max_targets", targets);
	int rc = dq_samples_init(&p->samples, samples);
	if (rc < 0)
		return dq_error_set(err, rc, "prober: cannot make a ring of %u samples: %s", samples, strerror(-rc));

	p->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (p->wake_fd < 0)
		return dq_error_set(err, -errno, "prober: cannot create an eventfd: %s", strerror(errno));

	rc = p->provider->dgram_open(dev, &p->dgram, err);
	if (rc < 0) {
		p->dgram = NULL;
		return rc;
	}
	p->provider->dgram_endpoint(p->dgram, &p->endpoint);
	p->dgram_fd = p->provider->dgram_fd(p->dgram);
	return 0;
}

int dq_prober_start(const struct dq_provider *provider, struct dq_device *dev, const struct dq_prober_config *cfg,
		    dq_prober **out, struct dq_error *err)
{
	int rc = config_check(provider, cfg, err);
	if (rc < 0)
		return rc;
	struct dq_prober *p = calloc(1, sizeof *p);
	if (!p)
		return dq_error_set(err, -ENOMEM, "prober: not enough memory");
	p->provider = provider;
	p->wake_fd = -1;
	pthread_mutex_init(&p->waiting_room, NULL);
	pthread_mutex_init(&p->lock, NULL);
	rc = prober_prepare(p, dev, cfg, err);
	if (rc == 0) {
		/* Signals are the daemon's business: they must not land in this thread. */
		sigset_t all, old;
		sigfillset(&all);
		pthread_sigmask(SIG_SETMASK, &all, &old);
		int failed = pthread_create(&p->thread, NULL, run, p);
		pthread_sigmask(SIG_SETMASK, &old, NULL);
		if (failed)
			rc = dq_error_set(err, -failed, "prober: cannot start a thread: %s", strerror(failed));
	}
	if (rc < 0) {
		prober_free(p);
		return rc;
	}
	*out = p;
	return 0;
}

int dq_prober_stop(dq_prober *p)
{
	state_lock(p);
	p->stop = true;
	state_unlock(p);
	signal_fd(p->wake_fd);
	int rc = pthread_join(p->thread, NULL);
	if (rc)
		return -rc; /* called on this thread itself: nothing may be freed */
	prober_free(p);
	return 0;
}
