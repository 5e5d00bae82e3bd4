/* SPDX-License-Identifier: Apache-2.0 */
#include "fabric.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

static bool before(const struct event *a, const struct event *b)
{
	return a->time_ns != b->time_ns ? a->time_ns < b->time_ns : a->order < b->order;
}

void sim_at(struct sim *s, struct event e)
{
	uint32_t i = s->events++;

	assert_true(s->events <= MAX_EVENTS);
	e.order = s->orders++;
	for (; i > 0 && before(&e, &s->heap[(i - 1) / 2]); i = (i - 1) / 2)
		s->heap[i] = s->heap[(i - 1) / 2];
	s->heap[i] = e;
}

static struct event sim_pop(struct sim *s)
{
	struct event top = s->heap[0], last = s->heap[--s->events];
	uint32_t i = 0;

	for (;;) {
		uint32_t child = 2 * i + 1;

		if (child >= s->events)
			break;
		if (child + 1 < s->events && before(&s->heap[child + 1], &s->heap[child]))
			child++;
		if (!before(&s->heap[child], &last))
			break;
		s->heap[i] = s->heap[child];
		i = child;
	}
	s->heap[i] = last;
	return top;
}

struct sim *sim_new(uint64_t nic_bps, uint64_t bottleneck_bps)
{
	struct sim *s = calloc(1, sizeof *s);

	assert_non_null(s);
	s->now = 1 * MS;
	for (unsigned h = 0; h < MAX_HOSTS; h++) {
		dq_queue_init(&s->nic[h], nic_bps, 0);
		s->departure[h].rate_bps = nic_bps;
	}
	dq_queue_init(&s->bottleneck, bottleneck_bps, 0);
	dq_grants_init(&s->grants);
	dq_grants_device(&s->grants, bottleneck_bps, 0);
	return s;
}

void vc_post(struct sim *s, struct vc *v)
{
	while (v->active && dq_window_admits(&v->window, v->grant, v->segment)) {
		uint64_t departure = dq_departure_next(&s->departure[v->host], s->now, v->segment);
		uint64_t left = dq_queue_push(&s->nic[v->host], s->now, v->segment);

		dq_window_post(&v->window, v->segment);
		sim_at(s, (struct event){ .time_ns = left + (v->direct ? v->base_ns : v->base_ns * 3 / 8),
					  .kind = v->direct ? EVENT_COMPLETE : EVENT_ARRIVE, .vc = (uint32_t)(v - s->vc),
					  .bytes = v->segment, .departure_ns = departure });
	}
}

static void grants_split(struct sim *s);

static void grants_due(struct sim *s, uint64_t ns)
{
	if (s->split_ns > s->now && s->split_ns <= ns)
		return;
	s->split_ns = ns;
	sim_at(s, (struct event){ .time_ns = ns, .kind = EVENT_CALL, .call = grants_split });
}

/* As an engine does: once for all news of a turn of its loop, and when somebody will have been quiet for long enough. */
static void grants_split(struct sim *s)
{
	uint64_t wake = dq_grants_split(&s->grants, s->now);

	for (uint32_t i = 0; i < s->vcs; i++) {
		struct vc *v = &s->vc[i];

		if (!v->member.changed)
			continue;
		v->member.changed = false;
		sim_at(s, (struct event){ .time_ns = s->now + v->base_ns / 2, .kind = EVENT_GRANT, .vc = i, .bytes = v->member.serial,
					  .level = v->member.level_bytes });
	}
	if (wake != DQ_NEVER)
		grants_due(s, wake);
}

void sim_run(struct sim *s, uint64_t until_ns)
{
	s->queue_sum = s->queue_samples = s->queue_peak = 0;
	while (s->events && s->heap[0].time_ns <= until_ns) {
		struct event e = sim_pop(s);
		struct vc *v = &s->vc[e.vc];
		uint64_t queue;

		s->now = e.time_ns;
		switch (e.kind) {
		case EVENT_RECEIVE:
			dq_grants_bytes(&s->grants, &v->member, e.bytes, s->now);
			grants_due(s, s->now + US);
			break;
		case EVENT_BACKLOG:
			dq_grants_backlog(&s->grants, &v->member, e.level);
			grants_due(s, s->now + US);
			break;
		case EVENT_GRANT:
			if ((int32_t)(e.bytes - v->grant_serial) > 0) {
				v->grant = e.level;
				v->grant_serial = e.bytes;
				vc_post(s, v);
			}
			break;
		case EVENT_ARRIVE:
			queue = dq_queue_backlog(&s->bottleneck, s->now);
			s->queue_sum += queue;
			s->queue_samples++;
			s->queue_peak = DQ_MAX(s->queue_peak, queue);
			e.time_ns = dq_queue_push(&s->bottleneck, s->now, e.bytes);
			if (s->grants_on)
				sim_at(s, (struct event){ .time_ns = e.time_ns, .kind = EVENT_RECEIVE, .vc = e.vc, .bytes = e.bytes });
			e.time_ns += v->base_ns - v->base_ns * 3 / 8;
			if (v->wake_ns)
				e.time_ns = (e.time_ns + v->wake_ns - 1) / v->wake_ns * v->wake_ns;
			e.kind = EVENT_COMPLETE;
			sim_at(s, e);
			break;
		case EVENT_COMPLETE:
			dq_window_done(&v->window, e.bytes, e.departure_ns, s->now, true);
			v->delivered += e.bytes;
			vc_post(s, v);
			break;
		case EVENT_CALL:
			e.call(s);
			break;
		}
	}
	s->now = until_ns;
}

struct vc *vc_add(struct sim *s, uint32_t host, uint64_t base_ns, const struct dq_window_profile *p)
{
	struct vc *v = &s->vc[s->vcs++];

	v->host = host;
	v->base_ns = base_ns;
	v->segment = p->segment_bytes;
	v->grant = UINT64_MAX;
	dq_window_init(&v->window, p);
	if (s->grants_on) {
		dq_grants_add(&s->grants, &v->member, p->window_bytes, p->segment_bytes, p->base_rtt_ns);
		v->grant = v->member.level_bytes;
		v->grant_serial = v->member.serial;
		v->member.changed = false;
	}
	return v;
}

static void tell_backlog(struct sim *s, const struct vc *v, uint64_t bytes)
{
	if (s->grants_on)
		sim_at(s, (struct event){ .time_ns = s->now + v->base_ns / 2, .kind = EVENT_BACKLOG, .vc = (uint32_t)(v - s->vc),
					  .level = bytes });
}

void vc_start(struct sim *s, struct vc *v)
{
	v->active = true;
	tell_backlog(s, v, UINT64_MAX / 2);
	vc_post(s, v);
}

void vc_stop(struct sim *s, struct vc *v)
{
	v->active = false;
	tell_backlog(s, v, 0);
}

struct dq_window_profile profile_of(uint64_t base_ns, uint64_t rate_bps, uint32_t segment, double gain)
{
	uint64_t bytes = (uint64_t)(gain * (double)base_ns * (double)rate_bps / 8e9) + segment;

	return (struct dq_window_profile){
		.window_bytes = (bytes + segment - 1) / segment * segment,
		.floor_bytes = segment,
		.segment_bytes = segment,
		.base_rtt_ns = base_ns,
		.rate_bps = rate_bps,
		.adapt = true,
	};
}

static uint64_t delivered(const struct sim *s)
{
	uint64_t sum = 0;

	for (uint32_t i = 0; i < s->vcs; i++)
		sum += s->vc[i].delivered;
	return sum;
}

double measure(struct sim *s, uint64_t ns)
{
	uint64_t from = delivered(s);

	sim_run(s, s->now + ns);
	return (double)(delivered(s) - from) * 8e9 / ((double)s->bottleneck.rate_bps * (double)ns);
}

double mean_queue(const struct sim *s)
{
	return s->queue_samples ? (double)s->queue_sum / (double)s->queue_samples : 0;
}

/* Numbers of a run, for whoever changes the rule: DQ_SHOW=1. */
void show(const char *what, double used, const struct sim *s, const struct vc *v)
{
	if (!getenv("DQ_SHOW"))
		return;
	printf("    %-20s path %3llu us: used %.4f, queue %.2f mean %.2f peak segments, limit %.1f of %.1f, base %llu ns, shrinks %llu\n",
	       what, (unsigned long long)(v->base_ns / US), used, mean_queue(s) / v->segment,
	       (double)s->queue_peak / v->segment, (double)v->window.limit / v->segment,
	       (double)v->window.profile.window_bytes / v->segment, (unsigned long long)v->window.base_ns,
	       (unsigned long long)v->window.shrinks);
}
