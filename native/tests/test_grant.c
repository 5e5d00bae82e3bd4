/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "core/grant.h"
#include "prng.h"

#define US 1000ull
#define MS 1000000ull
#define GBIT 1000000000ull
#define KIB 1024u

enum { PEERS = 64 };

static const uint64_t RATE = 400 * GBIT;

static uint64_t pipe(uint64_t rtt_ns)
{
	return RATE / GBIT * rtt_ns / 8;
}

/* The profile's window: a quarter more than the pipe, and a segment. */
static uint64_t window(uint64_t rtt_ns, uint32_t segment)
{
	return pipe(rtt_ns) * 5 / 4 + segment;
}

/* Most that levels told sum up to where the split does to `bytes`: steps under an eighth are not told. */
static uint64_t told(uint64_t bytes)
{
	return bytes + bytes / 8;
}

/* What a level has above share x pipe, of `n` that share. */
static uint64_t extra(uint32_t segment, unsigned n)
{
	return segment + (uint64_t)segment * DQ_GRANT_MARGIN / DQ_MAX(n, DQ_GRANT_MARGIN);
}

static struct dq_grant_member members[PEERS];

static void group_init(struct dq_grants *g, unsigned n, uint64_t rtt_ns, uint32_t segment)
{
	dq_grants_init(g);
	dq_grants_device(g, RATE, 0);
	for (unsigned i = 0; i < n; i++)
		dq_grants_add(g, &members[i], window(rtt_ns, segment), segment, rtt_ns);
}

static uint64_t level_sum(const struct dq_grants *g, bool active)
{
	uint64_t sum = 0;

	for (const struct dq_grant_member *m = g->head; m; m = m->next)
		sum += m->active == active ? m->level_bytes : 0;
	return sum;
}

/* 64 receives posted to 64 peers, one sends: it has its whole window. */
static void test_one_of_many_active(void **state)
{
	const uint64_t rtt = 56 * US;
	struct dq_grants g;

	(void)state;
	group_init(&g, PEERS, rtt, 128 * KIB);
	dq_grants_split(&g, 1 * MS);
	assert_int_equal(g.active, 0);
	dq_grants_backlog(&g, &members[17], 100 << 20);
	dq_grants_split(&g, 1 * MS);
	assert_int_equal(g.active, 1);
	assert_int_equal(members[17].level_bytes, members[17].window_bytes);
	assert_true(members[17].changed);
	/* The same when the first news are its bytes. */
	group_init(&g, PEERS, rtt, 128 * KIB);
	dq_grants_split(&g, 1 * MS);
	dq_grants_bytes(&g, &members[3], 128 * KIB, 1 * MS);
	dq_grants_split(&g, 1 * MS);
	assert_int_equal(members[3].level_bytes, members[3].window_bytes);
	/* The idle ones keep something to start with, together no more than the budget and a segment each. */
	for (unsigned i = 0; i < PEERS; i++)
		assert_true(members[i].level_bytes >= members[i].segment_bytes);
	assert_true(level_sum(&g, false) <= pipe(rtt) + (PEERS - 1 + DQ_GRANT_MARGIN) * 128ull * KIB);
}

static void test_all_active(void **state)
{
	static const uint64_t rtts[] = { 8 * US, 56 * US, 240 * US };

	(void)state;
	for (unsigned r = 0; r < 3; r++) {
		for (unsigned active = 2; active <= PEERS; active++) {
			struct dq_grants g;
			uint64_t least = UINT64_MAX, most = 0;

			group_init(&g, PEERS, rtts[r], 128 * KIB);
			for (unsigned i = 0; i < active; i++)
				dq_grants_backlog(&g, &members[i], 1 << 30);
			dq_grants_split(&g, 1 * MS);
			assert_int_equal(g.active, active);
			assert_true(g.budget_bytes <= pipe(rtts[r]) + DQ_GRANT_MARGIN * 128 * KIB);
			assert_true(g.budget_bytes + active >= DQ_MIN(pipe(rtts[r]), active * members[0].window_bytes));
			assert_true(level_sum(&g, true) <= g.budget_bytes + active * 128ull * KIB);
			for (unsigned i = 0; i < active; i++) {
				least = DQ_MIN(least, members[i].level_bytes);
				most = DQ_MAX(most, members[i].level_bytes);
			}
			assert_true(least >= 128 * KIB);
			assert_true(most - least <= 1);
		}
	}
}

/* A quiet sender's share goes to the others after two of its RTTs, not before. */
static void test_quiet_share_returns(void **state)
{
	const uint64_t rtt = 120 * US;
	struct dq_grants g;
	uint64_t now = 5 * MS, shared, wake;

	(void)state;
	group_init(&g, 2, rtt, 256 * KIB);
	dq_grants_bytes(&g, &members[0], 256 * KIB, now);
	dq_grants_bytes(&g, &members[1], 256 * KIB, now);
	wake = dq_grants_split(&g, now);
	assert_int_equal(wake, now + 2 * rtt);
	shared = members[0].level_bytes;
	assert_true(shared < members[0].window_bytes);
	assert_int_equal(members[1].level_bytes, shared);

	dq_grants_bytes(&g, &members[0], 256 * KIB, now + 2 * rtt - 1);
	members[0].changed = false;
	dq_grants_split(&g, now + 2 * rtt - 1);
	assert_true(members[0].level_bytes >= shared && members[0].level_bytes < members[0].window_bytes); /* or boosted */
	assert_int_equal(g.active, 2);
	wake = dq_grants_split(&g, now + 2 * rtt);
	assert_int_equal(g.active, 1);
	assert_int_equal(members[0].level_bytes, members[0].window_bytes);
	assert_true(members[0].changed);
	assert_int_equal(wake, now + 4 * rtt - 1);

	/* Backlog keeps a sender active without bytes; after the last of it has come in it goes quiet like any other. */
	dq_grants_backlog(&g, &members[1], 512 * KIB);
	dq_grants_split(&g, now + 3 * rtt);
	assert_int_equal(g.active, 2);
	for (unsigned i = 0; i < 100; i++) {
		dq_grants_bytes(&g, &members[0], 256 * KIB, now + (4 + i) * rtt);
		dq_grants_split(&g, now + (4 + i) * rtt);
		assert_int_equal(g.active, 2);
	}
	dq_grants_bytes(&g, &members[1], 256 * KIB, now + 104 * rtt);
	dq_grants_bytes(&g, &members[1], 256 * KIB, now + 104 * rtt);
	dq_grants_bytes(&g, &members[0], 256 * KIB, now + 106 * rtt);
	dq_grants_split(&g, now + 106 * rtt);
	assert_int_equal(g.active, 1);
	assert_int_equal(members[0].level_bytes, members[0].window_bytes);
}

/* A caller that splits only when something changed, or when the last split said, as the engine does. */
static void test_a_finished_sender_leaves_its_share_in_time(void **state)
{
	const uint64_t rtt = 240 * US;
	const uint32_t segment = 512 * KIB;
	uint64_t now = 1 * MS, due;
	struct dq_grants g;

	(void)state;
	for (unsigned by_message = 0; by_message < 2; by_message++) {
		group_init(&g, 2, rtt, segment);
		dq_grants_backlog(&g, &members[0], 1 << 20);
		dq_grants_backlog(&g, &members[1], 1u << 30);
		due = dq_grants_split(&g, now);
		assert_true(members[1].level_bytes < members[1].window_bytes);
		/* Member 0 has sent everything: its last bytes, or its word for it. */
		dq_grants_bytes(&g, &members[0], by_message ? segment : 1 << 20, now);
		if (by_message)
			dq_grants_backlog(&g, &members[0], 0);
		if (g.dirty || due <= now)
			due = dq_grants_split(&g, now);
		if (!by_message) {
			assert_true(due <= now + 2 * rtt);
			now = due;
			dq_grants_split(&g, now);
		}
		assert_int_equal(g.active, 1);
		assert_int_equal(members[1].level_bytes, members[1].window_bytes);
	}
}

/* While less comes in than the device could take, shares grow, to twice at most; when it is full they sink back. */
static void test_boost(void **state)
{
	const uint64_t rtt = 240 * US;
	const uint32_t full = (uint32_t)(RATE / 8 * 240 / 1000000 / 10); /* of a tenth of an RTT */
	struct dq_grants g;
	uint64_t now = MS, even;

	(void)state;
	group_init(&g, 8, rtt, 64 * KIB);
	for (unsigned i = 0; i < 8; i++)
		dq_grants_backlog(&g, &members[i], 1u << 30);
	dq_grants_split(&g, now);
	even = members[0].level_bytes;
	for (unsigned round = 0; round < 5; round++) { /* half of the rate */
		for (unsigned i = 0; i < 10; i++)
			dq_grants_bytes(&g, &members[i % 8], full / 2, now += rtt / 10);
		dq_grants_split(&g, now);
	}
	assert_in_range(members[0].level_bytes, even * 3 / 2, even * 2);
	for (unsigned round = 0; round < 40; round++) {
		for (unsigned i = 0; i < 10; i++)
			dq_grants_bytes(&g, &members[i % 8], full, now += rtt / 10);
		dq_grants_split(&g, now);
	}
	assert_in_range(members[0].level_bytes, even, even * 9 / 8);
	/* A pause says nothing about who used what. */
	dq_grants_bytes(&g, &members[0], 4096, now += 100 * rtt);
	assert_true(g.boost == 1.0);
}

/* The host's noise counts: bytes late for reasons of its own do not make a sender quiet. */
static void test_noise(void **state)
{
	struct dq_grants g;

	(void)state;
	group_init(&g, 2, 8 * US, 64 * KIB);
	dq_grants_device(&g, RATE, MS);
	dq_grants_bytes(&g, &members[0], 1, 5 * MS);
	dq_grants_bytes(&g, &members[1], 1, 5 * MS);
	assert_int_equal(dq_grants_split(&g, 5 * MS), 6 * MS + 16 * US);
	dq_grants_split(&g, 6 * MS + 16 * US - 1);
	assert_int_equal(g.active, 2);
	dq_grants_split(&g, 6 * MS + 16 * US);
	assert_int_equal(g.active, 0);
}

/* Backlog of a sender that never sends holds its share for a second, not for ever. */
static void test_stale_backlog(void **state)
{
	struct dq_grants g;
	uint64_t now = 5 * MS, wake;

	(void)state;
	group_init(&g, 2, 56 * US, 64 * KIB);
	dq_grants_backlog(&g, &members[0], 1 << 20);
	wake = dq_grants_split(&g, now);
	assert_int_equal(wake, now + DQ_GRANT_STALE_NS);
	dq_grants_split(&g, wake - 1);
	assert_int_equal(g.active, 1);
	dq_grants_split(&g, wake);
	assert_int_equal(g.active, 0);
	/* Told again, it counts again. */
	dq_grants_backlog(&g, &members[0], 1 << 20);
	dq_grants_split(&g, wake + MS);
	assert_int_equal(g.active, 1);
}

/* A member with a small window leaves the rest to the others. */
static void test_water_filling(void **state)
{
	const uint64_t rtt = 240 * US;
	struct dq_grants g;
	uint64_t fair;

	(void)state;
	group_init(&g, 4, rtt, 64 * KIB);
	/* Two senders whose windows are 1/16 of the pipe. */
	dq_grants_profile(&g, &members[0], pipe(rtt) / 16, 64 * KIB, rtt);
	dq_grants_profile(&g, &members[1], pipe(rtt) / 16, 64 * KIB, rtt);
	for (unsigned i = 0; i < 4; i++)
		dq_grants_backlog(&g, &members[i], 1 << 30);
	dq_grants_split(&g, MS);
	fair = pipe(rtt) * 7 / 16 + extra(64 * KIB, 4);
	assert_int_equal(members[0].level_bytes, pipe(rtt) / 16);
	assert_int_equal(members[1].level_bytes, pipe(rtt) / 16);
	assert_in_range(members[2].level_bytes, fair - 8, fair);
	assert_in_range(members[3].level_bytes, fair - 8, fair);
	assert_in_range(g.budget_bytes, pipe(rtt) - 8, pipe(rtt) + DQ_GRANT_MARGIN * 64 * KIB);
	/* All small: each has its window, and the budget is not used up. */
	dq_grants_profile(&g, &members[2], pipe(rtt) / 16, 64 * KIB, rtt);
	dq_grants_profile(&g, &members[3], pipe(rtt) / 16, 64 * KIB, rtt);
	dq_grants_split(&g, MS);
	for (unsigned i = 0; i < 4; i++)
		assert_int_equal(members[i].level_bytes, pipe(rtt) / 16);
}

/*
 * Near and far together: each gets the same share of the device, in bytes of its own RTT. Then in the fixed point of a shared
 * queue, level = rate x (RTT + wait), both rates are about the same and the wait is short.
 */
static void test_near_and_far(void **state)
{
	const uint64_t near = 8 * US, far = 240 * US;
	struct dq_grants g;
	double wait, near_rate = 0, far_rate = 0, line = (double)RATE / 8e9;

	(void)state;
	dq_grants_init(&g);
	dq_grants_device(&g, RATE, 0);
	dq_grants_add(&g, &members[0], window(near, 32 * KIB), 32 * KIB, near);
	dq_grants_add(&g, &members[1], window(far, 512 * KIB), 512 * KIB, far);
	dq_grants_backlog(&g, &members[0], 1 << 30);
	dq_grants_backlog(&g, &members[1], 1 << 30);
	dq_grants_split(&g, MS);
	assert_in_range(members[0].level_bytes, pipe(near) / 2 + extra(32 * KIB, 2) - 8, pipe(near) / 2 + extra(32 * KIB, 2));
	assert_in_range(members[1].level_bytes, pipe(far) / 2 + extra(512 * KIB, 2) - 8, pipe(far) / 2 + extra(512 * KIB, 2));
	for (wait = 0; wait < 1e6; wait += 10) {
		near_rate = (double)members[0].level_bytes / ((double)near + wait);
		far_rate = (double)members[1].level_bytes / ((double)far + wait);
		if (near_rate + far_rate <= line)
			break;
	}
	assert_true(near_rate > 0.35 * line && far_rate > 0.35 * line);
	assert_true(wait < 8 * US);
	/* Far ones do not lose to many near ones either. */
	for (unsigned i = 2; i < 10; i++) {
		dq_grants_add(&g, &members[i], window(near, 32 * KIB), 32 * KIB, near);
		dq_grants_backlog(&g, &members[i], 1 << 30);
	}
	dq_grants_split(&g, MS);
	assert_in_range(members[1].level_bytes, pipe(far) / 10 + extra(512 * KIB, 10) - 8, pipe(far) / 10 + extra(512 * KIB, 10));
}

/* Rate of the device unknown: shares of the windows. */
static void test_unknown_rate(void **state)
{
	struct dq_grants g;

	(void)state;
	group_init(&g, 4, 56 * US, 64 * KIB);
	dq_grants_device(&g, 0, 0);
	for (unsigned i = 0; i < 4; i++)
		dq_grants_backlog(&g, &members[i], 1 << 30);
	dq_grants_split(&g, MS);
	for (unsigned i = 0; i < 4; i++)
		assert_int_equal(members[i].level_bytes, members[i].window_bytes / 4 + extra(64 * KIB, 4));
	dq_grants_profile(&g, &members[0], 0, 0, 0); /* nothing known at all */
	dq_grants_split(&g, MS);
	assert_int_equal(members[0].level_bytes, 0);
}

static void test_initial(void **state)
{
	struct dq_grants g;

	(void)state;
	dq_grants_init(&g);
	assert_int_equal(dq_grants_initial(&g, 1 << 20, 64 * KIB), 1 << 20);
	assert_int_equal(dq_grants_initial(&g, 1 << 10, 64 * KIB), 64 * KIB);
	group_init(&g, 7, 56 * US, 64 * KIB);
	assert_int_equal(dq_grants_initial(&g, 1 << 20, 64 * KIB), (1 << 17) + 64 * KIB);
	/* The first alone, the second with what is left to it; both are to be told. */
	assert_int_equal(members[0].level_bytes, members[0].window_bytes);
	assert_int_equal(members[1].level_bytes, members[1].window_bytes / 2 + 64 * KIB);
	assert_true(members[0].changed && members[1].changed);
	assert_int_equal(members[1].serial, 1);
}

/* A lone partner of questions and answers keeps its whole window between the questions; a crowd starts with its shares. */
static void test_warm(void **state)
{
	const uint64_t rtt = 56 * US;
	struct dq_grants g;
	uint64_t now = MS, wake;

	(void)state;
	group_init(&g, PEERS, rtt, 64 * KIB);
	for (unsigned i = 0; i < 20; i++, now += 10 * MS) {
		dq_grants_bytes(&g, &members[5], 4096, now);
		dq_grants_split(&g, now);
		assert_int_equal(members[5].level_bytes, members[5].window_bytes);
		if (i > 0)
			assert_false(members[5].changed); /* nothing to tell it any more */
		members[5].changed = false;
		dq_grants_split(&g, now + 5 * MS);
		assert_int_equal(g.active, 0);
		assert_int_equal(members[5].level_bytes, members[5].window_bytes);
	}
	/* After a second of silence it is one of many. */
	now += DQ_GRANT_WARM_NS;
	dq_grants_split(&g, now);
	assert_int_equal(g.warm, 0);
	assert_in_range(members[5].level_bytes, pipe(rtt) / PEERS, told(pipe(rtt) / PEERS + extra(64 * KIB, PEERS)));
	for (unsigned i = 0; i < PEERS; i++)
		dq_grants_bytes(&g, &members[i], 4096, now);
	dq_grants_split(&g, now);
	assert_int_equal(g.active, PEERS);
	wake = dq_grants_split(&g, now + 10 * MS);
	assert_int_equal(g.active, 0);
	assert_int_equal(g.warm, PEERS);
	assert_true(level_sum(&g, false) <= told(pipe(rtt) + (PEERS + DQ_GRANT_MARGIN) * 64ull * KIB));
	assert_int_equal(wake, now + DQ_GRANT_WARM_NS);
	assert_int_equal(dq_grants_split(&g, wake), DQ_NEVER);
	assert_int_equal(g.warm, 0);
}

/* What a sender is told: each change has a new serial, no change has none, nothing trickles. */
static void test_serials(void **state)
{
	struct dq_grants g;
	uint64_t seed = 12, now = MS, changes = 0;
	uint32_t serials[PEERS];
	uint64_t levels[PEERS];

	(void)state;
	group_init(&g, PEERS, 56 * US, 64 * KIB);
	for (unsigned i = 0; i < PEERS; i++) {
		serials[i] = members[i].serial;
		levels[i] = members[i].level_bytes;
		members[i].changed = false;
	}
	for (unsigned step = 0; step < 20000; step++) {
		uint32_t i = prng_below(&seed, PEERS);

		now += prng_below(&seed, 20 * US);
		if (prng_below(&seed, 4))
			dq_grants_bytes(&g, &members[i], 64 * KIB, now);
		else
			dq_grants_backlog(&g, &members[i], prng_below(&seed, 2) ? 0 : prng_below(&seed, 1 << 22));
		dq_grants_split(&g, now);
		for (i = 0; i < PEERS; i++) {
			struct dq_grant_member *m = &members[i];

			assert_int_equal(m->changed, m->serial != serials[i]);
			assert_int_equal(m->changed, m->level_bytes != levels[i]);
			assert_true(m->level_bytes >= m->segment_bytes && m->level_bytes <= m->window_bytes);
			if (!m->changed)
				continue;
			assert_int_equal(m->serial, serials[i] + 1);
			assert_true(llabs((long long)m->level_bytes - (long long)levels[i]) >= (long long)DQ_MIN(levels[i] / 8, 64 * KIB) ||
				    m->level_bytes == m->window_bytes);
			serials[i] = m->serial;
			levels[i] = m->level_bytes;
			m->changed = false;
			changes++;
		}
		if (g.active > 1)
			assert_true(level_sum(&g, true) <= told(g.budget_bytes + g.active * 64ull * KIB));
	}
	assert_true(changes > 0);
	/* Without news a split says nothing, whatever the time. */
	for (unsigned i = 0; i < PEERS; i++)
		dq_grants_backlog(&g, &members[i], 0);
	dq_grants_split(&g, now + 10 * DQ_GRANT_WARM_NS);
	for (unsigned i = 0; i < PEERS; i++)
		members[i].changed = false;
	assert_int_equal(dq_grants_split(&g, now + 20 * DQ_GRANT_WARM_NS), DQ_NEVER);
	for (unsigned i = 0; i < PEERS; i++)
		assert_false(members[i].changed);
}

/* Members of any kind come and go: the counts and the list are always right, and the split is never over the budget. */
static void test_come_and_go(void **state)
{
	struct dq_grants g;
	bool in[PEERS] = { false };
	uint64_t seed = 44, now = MS;
	uint32_t n = 0;

	(void)state;
	dq_grants_init(&g);
	dq_grants_device(&g, RATE, 0);
	for (unsigned step = 0; step < 60000; step++) {
		uint32_t i = prng_below(&seed, PEERS), seen = 0, active = 0, warm = 0;
		uint64_t rtt = 1 + prng_below(&seed, 300 * US);
		uint32_t segment = 128 * (1 + prng_below(&seed, 4096));
		bool cold = false;
		uint64_t wake;

		now += prng_below(&seed, 10) ? prng_below(&seed, 50 * US) : prng_below(&seed, 200 * MS);
		switch (prng_below(&seed, 8)) {
		case 0:
			if (in[i]) {
				dq_grants_remove(&g, &members[i]);
				n--;
			} else {
				dq_grants_add(&g, &members[i], window(rtt, segment) >> prng_below(&seed, 6), segment, rtt);
				n++;
			}
			in[i] = !in[i];
			break;
		case 1:
			if (in[i])
				dq_grants_profile(&g, &members[i], window(rtt, segment) >> prng_below(&seed, 6), segment, rtt);
			break;
		case 2:
			if (in[i])
				dq_grants_backlog(&g, &members[i], prng_next(&seed) >> prng_below(&seed, 64));
			break;
		default:
			if (in[i])
				dq_grants_bytes(&g, &members[i], segment, now);
			break;
		}
		wake = dq_grants_split(&g, now);
		assert_true(wake > now);
		assert_int_equal(g.members, n);
		for (struct dq_grant_member *m = g.head; m; m = m->next) {
			assert_true(in[m - members]);
			assert_ptr_equal(m->next ? m->next->prev : g.tail, m);
			assert_true(m->warm || !m->active);
			assert_false(m->warm && cold);
			cold |= !m->warm;
			assert_true(m->level_bytes >= m->segment_bytes && m->level_bytes <= m->window_bytes);
			seen++;
			active += m->active;
			warm += m->warm;
		}
		assert_int_equal(seen, n);
		assert_int_equal(g.active, active);
		assert_int_equal(g.warm, warm);
		if (active > 1) {
			double share = 0;

			for (struct dq_grant_member *m = g.head; m; m = m->next)
				share += m->active ? m->share : 0;
			assert_true(share <= 1.000001);
		}
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_one_of_many_active),
		cmocka_unit_test(test_all_active),
		cmocka_unit_test(test_quiet_share_returns),
		cmocka_unit_test(test_a_finished_sender_leaves_its_share_in_time),
		cmocka_unit_test(test_boost),
		cmocka_unit_test(test_noise),
		cmocka_unit_test(test_stale_backlog),
		cmocka_unit_test(test_water_filling),
		cmocka_unit_test(test_near_and_far),
		cmocka_unit_test(test_unknown_rate),
		cmocka_unit_test(test_initial),
		cmocka_unit_test(test_warm),
		cmocka_unit_test(test_serials),
		cmocka_unit_test(test_come_and_go),
	};

	return cmocka_run_group_tests_name("grant", tests, NULL, NULL);
}
