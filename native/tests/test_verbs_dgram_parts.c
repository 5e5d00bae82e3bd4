/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the datagram endpoint of the verbs provider is made of, without a device: endpoints and routes as bytes, right or
 * hostile; the NIC's counter against wide arithmetic; the measurement of wake-ups; address handles made by functions of the
 * test, which say what is made, used and destroyed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "provider/verbs_ah.h"
#include "provider/verbs_clock.h"
#include "provider/verbs_ud.h"
#include "provider/verbs_wake.h"

#define SECOND 1000000000ull
#define PATIENCE_MS 60000

static uint64_t random_state;

static uint64_t random_next(void) /* splitmix64 */
{
	uint64_t z = random_state += 0x9e3779b97f4a7c15ull;
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ z >> 27) * 0x94d049bb133111ebull;
	return z ^ z >> 31;
}

static void random_bytes(uint8_t *out, size_t n)
{
	for (size_t i = 0; i < n; i++)
		out[i] = (uint8_t)random_next();
}

/* ---- endpoints ---- */

static struct dq_verbs_ud_peer random_peer(void)
{
	struct dq_verbs_ud_peer p = {.qpn = 2 + (uint32_t)(random_next() % 0xfffffd), .layer = IBV_LINK_LAYER_ETHERNET};
	random_bytes(p.gid, sizeof p.gid);
	p.gid[0] &= 0x7f;
	p.gid[1] |= 1;
	if (random_next() % 2) {
		p.layer = IBV_LINK_LAYER_INFINIBAND;
		p.lid = (uint16_t)(1 + random_next() % 0xbfff);
	}
	return p;
}

static void an_endpoint_says_what_was_put_in(void **state)
{
	(void)state;
	random_state = 1;
	for (unsigned i = 0; i < 2000; i++) {
		const struct dq_verbs_ud_peer in = random_peer();
		struct dq_verbs_ud_peer out;
		struct dq_endpoint e, again;
		dq_verbs_ud_endpoint_put(&e, &in);
		assert_in_range(e.len, 1, DQ_ENDPOINT_MAX);
		assert_int_equal(dq_verbs_ud_endpoint_get(&e, &out, NULL), 0);
		assert_memory_equal(out.gid, in.gid, sizeof in.gid);
		assert_int_equal(out.qpn, in.qpn);
		assert_int_equal(out.lid, in.lid);
		assert_int_equal(out.layer, in.layer);
		dq_verbs_ud_endpoint_put(&again, &out);
		assert_memory_equal(&again, &e, sizeof e);
	}
}

/* Endpoints are compared as bytes: what is taken has to be what would be put. */
static void an_endpoint_has_one_form(void **state)
{
	(void)state;
	unsigned taken = 0, refused = 0;
	random_state = 2;
	for (unsigned i = 0; i < 20000; i++) {
		const struct dq_verbs_ud_peer in = random_peer();
		struct dq_verbs_ud_peer out;
		struct dq_endpoint e, again;
		struct dq_error err = {0};
		dq_verbs_ud_endpoint_put(&e, &in);
		for (unsigned k = 1 + random_next() % 3; k > 0; k--)
			e.data[random_next() % e.len] = (uint8_t)random_next();
		if (random_next() % 16 == 0)
			e.len = (uint16_t)(random_next() % (DQ_ENDPOINT_MAX + 1));
		const int rc = dq_verbs_ud_endpoint_get(&e, &out, &err);
		if (rc) {
			refused++;
			assert_int_equal(rc, err.code);
			assert_true(strlen(err.text) > 0);
			continue;
		}
		taken++;
		dq_verbs_ud_endpoint_put(&again, &out);
		assert_int_equal(again.len, e.len);
		assert_memory_equal(again.data, e.data, e.len);
	}
	assert_true(taken > 1000 && refused > 1000);
}

static void an_endpoint_that_no_host_has_is_refused(void **state)
{
	(void)state;
	random_state = 3;
	for (unsigned how = 0; how < 7; how++) {
		struct dq_verbs_ud_peer p = random_peer(), out;
		struct dq_endpoint e;
		p.layer = IBV_LINK_LAYER_ETHERNET;
		p.lid = 0;
		switch (how) {
		case 0:
			p.gid[0] = 0xff; /* multicast */
			break;
		case 1:
			memset(p.gid, 0, sizeof p.gid);
			break;
		case 2:
			p.lid = 1; /* Ethernet has none */
			break;
		case 3:
			p.layer = IBV_LINK_LAYER_INFINIBAND;
			break;
		case 4:
			p.layer = IBV_LINK_LAYER_INFINIBAND;
			p.lid = 0xc000; /* multicast */
			break;
		case 5:
			p.qpn = 1; /* of the subnet management */
			break;
		default:
			p.qpn = 0xffffff; /* multicast */
		}
		dq_verbs_ud_endpoint_put(&e, &p);
		assert_int_equal(dq_verbs_ud_endpoint_get(&e, &out, NULL), -EPROTO);
	}
}

/* ---- routes ---- */

static void ipv4_header(uint8_t h[20], const uint8_t source[4])
{
	uint32_t sum = 0;
	random_bytes(h, 20);
	h[0] = 0x45;
	h[10] = h[11] = 0;
	memcpy(h + 12, source, 4);
	for (unsigned i = 0; i < 20; i += 2)
		sum += (uint32_t)h[i] << 8 | h[i + 1];
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	h[10] = (uint8_t)(~sum >> 8);
	h[11] = (uint8_t)~sum;
}

/* The bytes before it are whatever was in memory, and may look like a header of version 6. */
static void the_source_of_roce_over_ipv4_is_found_behind_any_bytes(void **state)
{
	(void)state;
	static const uint8_t prefix[12] = {[10] = 0xff, [11] = 0xff};
	random_state = 4;
	for (unsigned i = 0; i < 5000; i++) {
		uint8_t grh[40], gid[16], source[4];
		random_bytes(grh, 20);
		if (i % 2)
			grh[0] = (uint8_t)(0x60 | (grh[0] & 0xf));
		random_bytes(source, 4);
		ipv4_header(grh + 20, source);
		assert_int_equal(dq_verbs_ud_source(grh, gid), 0);
		assert_memory_equal(gid, prefix, 12);
		assert_memory_equal(gid + 12, source, 4);
	}
}

static void a_wrong_checksum_matters_only_where_both_are_possible(void **state)
{
	(void)state;
	static const uint8_t source[4] = {10, 9, 0, 7};
	uint8_t grh[40] = {0}, gid[16];
	random_state = 5;
	ipv4_header(grh + 20, source);
	grh[30] ^= 1;
	assert_int_equal(dq_verbs_ud_source(grh, gid), 0);
	assert_memory_equal(gid + 12, source, 4);
	grh[0] = 0x60;
	random_bytes(grh + 8, 12);
	grh[8] = 0xfe;
	assert_int_equal(dq_verbs_ud_source(grh, gid), 0);
	assert_memory_equal(gid, grh + 8, 16);
}

static void the_source_of_a_global_route_is_its_gid(void **state)
{
	(void)state;
	random_state = 6;
	for (unsigned i = 0; i < 5000; i++) {
		uint8_t grh[40], gid[16];
		random_bytes(grh, sizeof grh);
		grh[0] = (uint8_t)(0x60 | (grh[0] & 0xf));
		if (i % 2)
			grh[20] = 0x45; /* within the GID: no header of version 4, as its sum says */
		grh[30] = 0;
		grh[31] = 0;
		assert_int_equal(dq_verbs_ud_source(grh, gid), 0);
		assert_memory_equal(gid, grh + 8, 16);
	}
}

static void other_bytes_are_no_route(void **state)
{
	(void)state;
	random_state = 7;
	for (unsigned i = 0; i < 20000; i++) {
		uint8_t grh[40], gid[16];
		random_bytes(grh, sizeof grh);
		const bool possible = grh[0] >> 4 == 6 || grh[20] == 0x45;
		assert_int_equal(dq_verbs_ud_source(grh, gid), possible ? 0 : -EPROTO);
	}
}

/* ---- the NIC's counter ---- */

typedef __int128 wide;

static uint64_t ns_of(wide ticks, uint64_t khz)
{
	return (uint64_t)(ticks * 1000000 / (wide)khz);
}

/* Any counter, any pauses, readings a little out of order: the times are those of a counter without an end. */
static void readings_become_times_that_do_not_wrap(void **state)
{
	(void)state;
	static const struct { uint64_t mask, khz; } nics[] = {
		{0x7fffffffffffffff, 156250}, {0xffffffffffff, 1000000}, {0xffffffffffffffff, 800000},
		{0xffffffff, 1000000}, {0xffffffff, 156250}, {0xffffff, 78125}, {0xffffffff, 1},
	};
	random_state = 8;
	for (unsigned n = 0; n < sizeof nics / sizeof nics[0]; n++) {
		struct dq_verbs_clock c;
		const uint64_t mask = nics[n].mask, khz = nics[n].khz;
		const uint64_t turn_ns = mask >> 40 ? 3600 * SECOND : ns_of((wide)mask + 1, khz);
		const uint64_t begin = random_next() % SECOND;
		const wide start = mask - random_next() % 1000; /* about to wrap */
		wide newest = start;
		uint64_t now = begin, first = 0;
		assert_int_equal(dq_verbs_clock_init(&c, mask, khz), 0);
		for (unsigned i = 0; i < 20000; i++) {
			/* Mostly short, sometimes several turns; then it was read soon after. */
			uint64_t pause = random_next() % 100000;
			if (i % 50 == 0)
				pause = random_next() % (3 * turn_ns);
			now += i ? pause : 0;
			const wide at = start + (wide)(now - begin) * (wide)khz / 1000000;
			wide ticks = at > newest ? at : newest;
			newest = ticks;
			if (i % 3 == 2 && ticks - start > 1000)
				ticks -= (wide)(random_next() % 1000); /* an older one */
			const uint64_t late = random_next() % (DQ_MIN(turn_ns / 8, 1000000u));
			const uint64_t ns = dq_verbs_clock_ns(&c, (uint64_t)ticks & mask, now + late);
			if (i == 0)
				first = ns;
			const uint64_t expected = ns_of(ticks - start, khz);
			assert_in_range(ns - first, expected ? expected - 1 : 0, expected + 1);
		}
	}
}

static void a_reading_before_the_first_is_before_it(void **state)
{
	(void)state;
	struct dq_verbs_clock c;
	assert_int_equal(dq_verbs_clock_init(&c, 0xffffffffffff, 1000000), 0);
	const uint64_t first = dq_verbs_clock_ns(&c, 5, SECOND);
	assert_int_equal(first, SECOND);
	assert_int_equal(dq_verbs_clock_ns(&c, 0xffffffffffff - 4, SECOND), SECOND - 10);
	assert_int_equal(dq_verbs_clock_ns(&c, 15, SECOND), SECOND + 10);
}

static void counters_that_cannot_be_are_refused(void **state)
{
	(void)state;
	static const struct { uint64_t mask, khz; } wrong[] = {
		{0, 1000}, {0xffff, 1000}, {0x7ffffffffffffff1, 1000}, {0xffffffff00000000, 1000}, {0xffffffff, 0}, {0xffffffff, UINT64_MAX},
	};
	struct dq_verbs_clock c;
	for (unsigned i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
		assert_int_equal(dq_verbs_clock_init(&c, wrong[i].mask, wrong[i].khz), -EINVAL);
}

/* ---- how long waking up takes ---- */

/* One series on a machine where what comes takes `way` and waking up takes `wake`, and noise now and then. */
static void series_run(struct dq_verbs_wake *w, uint64_t *now, uint64_t way, uint64_t wake)
{
	const uint32_t before = w->series;
	while (w->series == before) {
		const uint64_t noise = w->round == 3 ? 0 : random_next() % 50000;
		assert_int_equal(w->step, DQ_VERBS_WAKE_IDLE);
		*now = DQ_MAX(*now, w->due_ns);
		dq_verbs_wake_begin(w);
		assert_int_equal(w->step, DQ_VERBS_WAKE_POLL);
		dq_verbs_wake_polled(w, way == DQ_NEVER ? way : way + noise / 8);
		assert_int_equal(w->step, DQ_VERBS_WAKE_SLEEP);
		*now += 50000;
		dq_verbs_wake_slept(w, way == DQ_NEVER ? way : way + wake + noise, *now);
	}
	assert_true(w->due_ns >= *now + DQ_VERBS_WAKE_SERIES_NS);
}

static void the_least_that_waking_up_takes_is_taken_off(void **state)
{
	(void)state;
	struct dq_verbs_wake w;
	uint64_t now = 1000;
	random_state = 9;
	dq_verbs_wake_init(&w);
	assert_int_equal(w.correction_ns, 0);
	series_run(&w, &now, 3000, 4000);
	assert_int_equal(w.correction_ns, 4000);
	series_run(&w, &now, 3000, 20000);
	assert_int_equal(w.correction_ns, 4000); /* a busy time does not raise it */
	series_run(&w, &now, 3000, 2500);
	assert_int_equal(w.correction_ns, 2500);
	for (unsigned i = 0; i < DQ_VERBS_WAKE_SERIES; i++)
		series_run(&w, &now, 3000, 20000);
	assert_int_equal(w.correction_ns, 20000); /* but it is not kept for ever */
}

static void a_device_that_does_not_send_to_itself_is_not_corrected(void **state)
{
	(void)state;
	struct dq_verbs_wake w;
	uint64_t now = 1000;
	random_state = 11;
	dq_verbs_wake_init(&w);
	series_run(&w, &now, DQ_NEVER, 7000);
	assert_int_equal(w.correction_ns, 0);
	assert_int_equal(w.series, 1);
	series_run(&w, &now, 3000, 7000);
	assert_int_equal(w.correction_ns, 0);
}

/* A machine so busy that it always wakes late says nothing; nor does one that is never left to sleep. */
static void what_is_no_wake_up_is_not_taken_off(void **state)
{
	(void)state;
	struct dq_verbs_wake w;
	uint64_t now = 1000;
	random_state = 12;
	dq_verbs_wake_init(&w);
	series_run(&w, &now, 0, 5000000);
	assert_int_equal(w.correction_ns, 0);
	dq_verbs_wake_init(&w);
	while (w.series == 0) {
		dq_verbs_wake_begin(&w);
		dq_verbs_wake_polled(&w, 1000);
		dq_verbs_wake_slept(&w, DQ_NEVER, now += 100);
	}
	assert_int_equal(w.correction_ns, 0);
}

/* ---- address handles ---- */

enum { LABELS = 64 };

struct maker {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	int notify_fd;
	unsigned made, destroyed;    /* handles */
	unsigned asked[LABELS];      /* by flow label */
	uint32_t order[1024];        /* labels in the order of asking */
	unsigned orders;
	int error;                   /* of the next ones */
	bool stuck;                  /* the next one waits until this is taken back */
	bool waiting;
	bool alive[4096];
};

static int make(void *ctx, const struct dq_verbs_ud_peer *peer, uint32_t flow_label, void **handle)
{
	struct maker *m = ctx;
	(void)peer;
	pthread_mutex_lock(&m->lock);
	m->asked[flow_label % LABELS]++;
	if (m->orders < 1024)
		m->order[m->orders++] = flow_label;
	while (m->stuck) {
		m->waiting = true;
		pthread_cond_broadcast(&m->changed);
		pthread_cond_wait(&m->changed, &m->lock);
	}
	m->waiting = false;
	const int rc = m->error;
	if (rc == 0) {
		m->alive[m->made] = true;
		*handle = &m->alive[m->made++];
	}
	pthread_mutex_unlock(&m->lock);
	return rc;
}

static void unmake(void *ctx, void *handle)
{
	struct maker *m = ctx;
	bool *alive = handle;
	pthread_mutex_lock(&m->lock);
	if (*alive)
		m->destroyed++;
	else
		m->destroyed += 1000000; /* twice */
	*alive = false;
	pthread_mutex_unlock(&m->lock);
}

static struct dq_verbs_ah_cache *maker_start(struct maker *m, unsigned size)
{
	struct dq_verbs_ah_cache *c;
	memset(m, 0, sizeof *m);
	pthread_mutex_init(&m->lock, NULL);
	pthread_cond_init(&m->changed, NULL);
	m->notify_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	assert_true(m->notify_fd >= 0);
	const struct dq_verbs_ah_ops ops = {.create = make, .destroy = unmake, .ctx = m};
	assert_int_equal(dq_verbs_ah_cache_create(size, &ops, m->notify_fd, &c), 0);
	return c;
}

/* Whatever happened, each handle was destroyed once. */
static void maker_stop(struct maker *m, struct dq_verbs_ah_cache *c)
{
	dq_verbs_ah_cache_destroy(c);
	assert_int_equal(m->destroyed, m->made);
	close(m->notify_fd);
	pthread_cond_destroy(&m->changed);
	pthread_mutex_destroy(&m->lock);
}

static void maker_tell(struct maker *m, int error, bool stuck)
{
	pthread_mutex_lock(&m->lock);
	m->error = error;
	m->stuck = stuck;
	pthread_cond_broadcast(&m->changed);
	pthread_mutex_unlock(&m->lock);
}

static void maker_wait_stuck(struct maker *m)
{
	pthread_mutex_lock(&m->lock);
	while (!m->waiting)
		pthread_cond_wait(&m->changed, &m->lock);
	pthread_mutex_unlock(&m->lock);
}

static unsigned maker_count(struct maker *m, const unsigned *count)
{
	pthread_mutex_lock(&m->lock);
	const unsigned n = *count;
	pthread_mutex_unlock(&m->lock);
	return n;
}

static struct dq_verbs_ud_peer one_peer(void)
{
	return (struct dq_verbs_ud_peer){.gid = {0xfe, 0x80, [15] = 1}, .qpn = 100, .layer = IBV_LINK_LAYER_ETHERNET};
}

/* Ask until there is an answer. */
static int take_wait(struct maker *m, struct dq_verbs_ah_cache *c, uint32_t label, uint64_t now, struct dq_verbs_ah **out)
{
	const struct dq_verbs_ud_peer peer = one_peer();
	for (;;) {
		uint64_t n;
		const int rc = dq_verbs_ah_take(c, &peer, label, now, 0, out);
		if (rc != -EINPROGRESS)
			return rc;
		struct pollfd pfd = {.fd = m->notify_fd, .events = POLLIN};
		assert_int_equal(poll(&pfd, 1, PATIENCE_MS), 1);
		assert_int_equal(read(m->notify_fd, &n, sizeof n), sizeof n);
	}
}

static void a_handle_is_made_once_and_shared(void **state)
{
	(void)state;
	struct maker m;
	struct dq_verbs_ah *a, *b;
	struct dq_verbs_ah_cache *c = maker_start(&m, 8);
	struct dq_verbs_ud_peer peer = one_peer();
	assert_int_equal(take_wait(&m, c, 1, SECOND, &a), 0);
	peer.qpn = 200; /* another endpoint of the same host goes the same way */
	assert_int_equal(dq_verbs_ah_take(c, &peer, 1, SECOND, 0, &b), 0);
	assert_ptr_equal(a, b);
	dq_verbs_ah_give(c, a);
	dq_verbs_ah_give(c, b);
	assert_int_equal(take_wait(&m, c, 2, SECOND, &b), 0); /* another way */
	assert_ptr_not_equal(a->handle, b->handle);
	dq_verbs_ah_give(c, b);
	assert_int_equal(m.made, 2);
	assert_int_equal(m.destroyed, 0);
	maker_stop(&m, c);
}

static void the_least_recently_used_goes_and_none_in_use(void **state)
{
	(void)state;
	enum { SIZE = 4 };
	struct maker m;
	struct dq_verbs_ah *held[SIZE], *ah;
	struct dq_verbs_ah_cache *c = maker_start(&m, SIZE);
	for (uint32_t i = 0; i < SIZE; i++) {
		assert_int_equal(take_wait(&m, c, i, SECOND + i, &held[i]), 0);
		if (i != 0)
			dq_verbs_ah_give(c, held[i]);
	}
	/* 0 is the oldest but in use; 1 is the next, and is used again; so 2 goes. */
	assert_int_equal(take_wait(&m, c, 1, 2 * SECOND, &ah), 0);
	dq_verbs_ah_give(c, ah);
	assert_int_equal(take_wait(&m, c, 10, 2 * SECOND, &ah), 0);
	dq_verbs_ah_give(c, ah);
	assert_int_equal(maker_count(&m, &m.destroyed), 1);
	assert_true(*(bool *)held[0]->handle);
	for (uint32_t i = 0; i < SIZE; i++) {
		if (i == 2)
			continue;
		assert_int_equal(take_wait(&m, c, i, 3 * SECOND, &ah), 0);
		dq_verbs_ah_give(c, ah);
		assert_int_equal(m.asked[i], 1);
	}
	dq_verbs_ah_give(c, held[0]);
	assert_int_equal(take_wait(&m, c, 2, 4 * SECOND, &ah), 0);
	dq_verbs_ah_give(c, ah);
	assert_int_equal(m.asked[2], 2);
	maker_stop(&m, c);
}

static void when_all_are_in_use_there_is_no_room(void **state)
{
	(void)state;
	struct maker m;
	struct dq_verbs_ah *a, *b, *other;
	struct dq_verbs_ah_cache *c = maker_start(&m, 2);
	assert_int_equal(take_wait(&m, c, 0, SECOND, &a), 0);
	assert_int_equal(take_wait(&m, c, 1, SECOND, &b), 0);
	assert_int_equal(take_wait(&m, c, 2, SECOND, &other), -ENOBUFS);
	dq_verbs_ah_give(c, a);
	assert_int_equal(take_wait(&m, c, 2, SECOND, &other), 0);
	dq_verbs_ah_give(c, b);
	dq_verbs_ah_give(c, other);
	maker_stop(&m, c);
}

/* Who asks first waits for it, if not for long; others are not kept. */
static void one_may_wait_for_a_new_handle(void **state)
{
	(void)state;
	struct maker m;
	struct dq_verbs_ah *a;
	const struct dq_verbs_ud_peer peer = one_peer();
	struct dq_verbs_ah_cache *c = maker_start(&m, 8);
	assert_int_equal(dq_verbs_ah_take(c, &peer, 0, SECOND, 60 * SECOND, &a), 0);
	dq_verbs_ah_give(c, a);
	maker_tell(&m, -EHOSTUNREACH, false);
	assert_int_equal(dq_verbs_ah_take(c, &peer, 1, SECOND, 60 * SECOND, &a), -EHOSTUNREACH);
	maker_tell(&m, 0, true);
	assert_int_equal(dq_verbs_ah_take(c, &peer, 2, SECOND, 1000, &a), -EINPROGRESS);
	assert_int_equal(dq_verbs_ah_take(c, &peer, 2, SECOND, 60 * SECOND, &a), -EINPROGRESS);
	maker_tell(&m, 0, false);
	assert_int_equal(take_wait(&m, c, 2, SECOND, &a), 0);
	dq_verbs_ah_give(c, a);
	maker_stop(&m, c);
}

/* A changed address: all are made anew; what is in use is destroyed with its last use, not before. */
static void a_flush_forgets_all_and_destroys_none_in_use(void **state)
{
	(void)state;
	struct maker m;
	struct dq_verbs_ah *a, *b;
	struct dq_verbs_ah_cache *c = maker_start(&m, 8);
	assert_int_equal(take_wait(&m, c, 0, SECOND, &a), 0);
	assert_int_equal(take_wait(&m, c, 1, SECOND, &b), 0);
	dq_verbs_ah_give(c, b);
	dq_verbs_ah_flush(c);
	assert_int_equal(maker_count(&m, &m.destroyed), 1);
	assert_true(*(bool *)a->handle);
	assert_int_equal(take_wait(&m, c, 0, SECOND, &b), 0);
	assert_ptr_not_equal(a, b);
	dq_verbs_ah_give(c, a);
	assert_int_equal(maker_count(&m, &m.destroyed), 2);
	dq_verbs_ah_give(c, b);
	maker_stop(&m, c);
}

/* What is being made when all are forgotten is for nobody. */
static void a_flush_while_one_is_made_drops_it(void **state)
{
	(void)state;
	struct maker m;
	struct dq_verbs_ah *a;
	const struct dq_verbs_ud_peer peer = one_peer();
	struct dq_verbs_ah_cache *c = maker_start(&m, 8);
	maker_tell(&m, 0, true);
	assert_int_equal(dq_verbs_ah_take(c, &peer, 0, SECOND, 0, &a), -EINPROGRESS);
	maker_wait_stuck(&m);
	dq_verbs_ah_flush(c);
	maker_tell(&m, 0, false);
	assert_int_equal(take_wait(&m, c, 0, SECOND, &a), 0);
	assert_int_equal(maker_count(&m, &m.made), 2);
	assert_int_equal(maker_count(&m, &m.destroyed), 1);
	dq_verbs_ah_give(c, a);
	maker_stop(&m, c);
}

static void a_failure_is_told_and_tried_again_more_and_more_rarely(void **state)
{
	(void)state;
	struct maker m;
	struct dq_verbs_ah *a;
	uint64_t now = SECOND, pause = DQ_VERBS_AH_RETRY_NS;
	struct dq_verbs_ah_cache *c = maker_start(&m, 8);
	maker_tell(&m, -EHOSTUNREACH, false);
	for (unsigned i = 1; i < 12; i++) {
		assert_int_equal(take_wait(&m, c, 0, now, &a), -EHOSTUNREACH);
		assert_int_equal(maker_count(&m, &m.asked[0]), i);
		assert_int_equal(take_wait(&m, c, 0, now + pause - 1, &a), -EHOSTUNREACH);
		assert_int_equal(maker_count(&m, &m.asked[0]), i);
		now += pause;
		pause = DQ_MIN(pause * 2, DQ_VERBS_AH_RETRY_MAX_NS);
	}
	maker_tell(&m, 0, false);
	assert_int_equal(take_wait(&m, c, 0, now, &a), 0);
	dq_verbs_ah_give(c, a);
	maker_stop(&m, c);
}

/* Meanwhile the old one serves, also when the new one cannot be made. */
static void an_old_handle_is_made_anew_behind_the_users_back(void **state)
{
	(void)state;
	struct maker m;
	struct dq_verbs_ah *a, *b;
	const struct dq_verbs_ud_peer peer = one_peer();
	struct dq_verbs_ah_cache *c = maker_start(&m, 8);
	uint64_t now = SECOND, n;
	struct pollfd pfd = {.fd = m.notify_fd, .events = POLLIN};
	assert_int_equal(take_wait(&m, c, 0, now, &a), 0);
	dq_verbs_ah_give(c, a);
	(void)!read(m.notify_fd, &n, sizeof n);
	for (unsigned fails = 0; fails < 2; fails++) {
		maker_tell(&m, fails ? -EHOSTUNREACH : 0, true);
		now += DQ_VERBS_AH_FRESH_NS;
		assert_int_equal(dq_verbs_ah_take(c, &peer, 0, now, 0, &a), 0); /* and asks for a new one */
		maker_wait_stuck(&m);
		assert_int_equal(dq_verbs_ah_take(c, &peer, 0, now, 0, &b), 0);
		assert_ptr_equal(a, b);
		maker_tell(&m, fails ? -EHOSTUNREACH : 0, false);
		assert_int_equal(poll(&pfd, 1, PATIENCE_MS), 1);
		assert_int_equal(read(m.notify_fd, &n, sizeof n), sizeof n);
		dq_verbs_ah_give(c, b);
		assert_true(*(bool *)a->handle); /* one use is left */
		assert_int_equal(dq_verbs_ah_take(c, &peer, 0, now, 0, &b), 0);
		if (fails)
			assert_ptr_equal(a, b);
		else
			assert_ptr_not_equal(a, b);
		dq_verbs_ah_give(c, a);
		dq_verbs_ah_give(c, b);
		assert_int_equal(maker_count(&m, &m.destroyed), 1);
	}
	maker_stop(&m, c);
}

/* Peers that do not answer must not keep those that do. */
static void new_ones_are_made_before_those_that_failed(void **state)
{
	(void)state;
	struct maker m;
	struct dq_verbs_ah *a;
	const struct dq_verbs_ud_peer peer = one_peer();
	struct dq_verbs_ah_cache *c = maker_start(&m, 32);
	maker_tell(&m, -EHOSTUNREACH, false);
	for (uint32_t i = 0; i < 10; i++)
		assert_int_equal(take_wait(&m, c, i, SECOND, &a), -EHOSTUNREACH);
	maker_tell(&m, -EHOSTUNREACH, true);
	assert_int_equal(take_wait(&m, c, 0, SECOND, &a), -EHOSTUNREACH); /* the time to try again begins here */
	for (uint32_t i = 0; i < 10; i++)
		assert_int_equal(dq_verbs_ah_take(c, &peer, i, SECOND + 2 * DQ_VERBS_AH_RETRY_NS, 0, &a), -EINPROGRESS);
	maker_wait_stuck(&m);
	assert_int_equal(dq_verbs_ah_take(c, &peer, 20, SECOND, 0, &a), -EINPROGRESS);
	assert_int_equal(dq_verbs_ah_take(c, &peer, 21, SECOND, 0, &a), -EINPROGRESS);
	maker_tell(&m, 0, false);
	assert_int_equal(take_wait(&m, c, 21, SECOND, &a), 0);
	dq_verbs_ah_give(c, a);
	/* After the ten failures: one of them again, during which both new ones were asked for. */
	pthread_mutex_lock(&m.lock);
	assert_int_equal(m.order[11], 20);
	assert_int_equal(m.order[12], 21);
	pthread_mutex_unlock(&m.lock);
	maker_stop(&m, c);
}

/* Any sequence of what a user may do, with a thread that makes handles meanwhile: the sanitizers and the count of handles judge. */
static void any_sequence_leaves_nothing_behind(void **state)
{
	(void)state;
	enum { SIZE = 8, USES = 6 };
	struct maker m;
	struct dq_verbs_ah *used[USES] = {0};
	struct dq_verbs_ah_cache *c = maker_start(&m, SIZE);
	uint64_t now = SECOND;
	random_state = 13;
	for (unsigned i = 0; i < 3000; i++) {
		struct dq_verbs_ud_peer peer = one_peer();
		const unsigned k = (unsigned)(random_next() % USES);
		peer.gid[15] = (uint8_t)(random_next() % 4);
		now += random_next() % SECOND;
		if (used[k]) {
			assert_true(*(bool *)used[k]->handle);
			dq_verbs_ah_give(c, used[k]);
			used[k] = NULL;
		} else {
			const uint32_t label = (uint32_t)(random_next() % 5);
			const int rc = random_next() % 4 ? dq_verbs_ah_take(c, &peer, label, now, 0, &used[k]) : take_wait(&m, c, label, now, &used[k]);
			if (rc != 0)
				used[k] = NULL;
		}
		if (random_next() % 200 == 0)
			dq_verbs_ah_flush(c);
		if (random_next() % 50 == 0)
			maker_tell(&m, random_next() % 2 ? -EIO : 0, false);
	}
	for (unsigned k = 0; k < USES; k++)
		if (used[k])
			dq_verbs_ah_give(c, used[k]);
	assert_true(maker_count(&m, &m.made) > 10);
	maker_stop(&m, c);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(an_endpoint_says_what_was_put_in),
		cmocka_unit_test(an_endpoint_has_one_form),
		cmocka_unit_test(an_endpoint_that_no_host_has_is_refused),
		cmocka_unit_test(the_source_of_roce_over_ipv4_is_found_behind_any_bytes),
		cmocka_unit_test(a_wrong_checksum_matters_only_where_both_are_possible),
		cmocka_unit_test(the_source_of_a_global_route_is_its_gid),
		cmocka_unit_test(other_bytes_are_no_route),
		cmocka_unit_test(readings_become_times_that_do_not_wrap),
		cmocka_unit_test(a_reading_before_the_first_is_before_it),
		cmocka_unit_test(counters_that_cannot_be_are_refused),
		cmocka_unit_test(the_least_that_waking_up_takes_is_taken_off),
		cmocka_unit_test(a_device_that_does_not_send_to_itself_is_not_corrected),
		cmocka_unit_test(what_is_no_wake_up_is_not_taken_off),
		cmocka_unit_test(a_handle_is_made_once_and_shared),
		cmocka_unit_test(the_least_recently_used_goes_and_none_in_use),
		cmocka_unit_test(when_all_are_in_use_there_is_no_room),
		cmocka_unit_test(one_may_wait_for_a_new_handle),
		cmocka_unit_test(a_flush_forgets_all_and_destroys_none_in_use),
		cmocka_unit_test(a_flush_while_one_is_made_drops_it),
		cmocka_unit_test(a_failure_is_told_and_tried_again_more_and_more_rarely),
		cmocka_unit_test(an_old_handle_is_made_anew_behind_the_users_back),
		cmocka_unit_test(new_ones_are_made_before_those_that_failed),
		cmocka_unit_test(any_sequence_leaves_nothing_behind),
	};
	return cmocka_run_group_tests_name("verbs datagram parts", tests, NULL, NULL);
}
