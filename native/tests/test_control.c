/* SPDX-License-Identifier: Apache-2.0 */
/* The control channel: numbering, packing, credits, acknowledgements, what is sent again after a rebuild, hostile packets. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/control.h"
#include "prng.h"

#define WIRE 64u

/* Two channels and the packets between them, like a QP pair: in order, and a packet needs a posted receive. */
struct side {
	struct dq_control_channel c;
	uint8_t packets[WIRE][DQ_CONTROL_BYTES]; /* on their way to this side */
	uint32_t bytes[WIRE], first, count;
	uint32_t receives;       /* posted */
	uint32_t owed;           /* receives consumed and not posted again */
	uint64_t queued, heard;  /* messages: serial numbers from 1 on */
	uint64_t received;       /* packets */
};

static int hear(void *user, const struct dq_message *m)
{
	struct side *s = user;
	assert_int_equal(m->serial, s->heard + 1); /* each once, in order */
	s->heard++;
	return 0;
}

static void side_init(struct side *s, uint32_t credits)
{
	memset(s, 0, sizeof *s);
	assert_int_equal(dq_control_init(&s->c, credits), 0);
	s->receives = credits;
}

static void say(struct side *s, uint64_t *prng)
{
	struct dq_message m = { .type = DQ_MSG_DONE, .slot = 1, .serial = ++s->queued, .length = 5 };
	if (prng_below(prng, 3) == 0) {
		m.type = DQ_MSG_RTR;
		m.nkeys = (uint8_t)(1 + prng_below(prng, DQ_WIRE_MAX_RAILS));
	} else if (prng_below(prng, 20) == 0) {
		m.type = DQ_MSG_PUT;
	}
	assert_int_not_equal(dq_control_queue(&s->c, &m), 0);
}

/* These three tell how much they moved. */
static unsigned pump(struct side *from, struct side *to)
{
	uint8_t *p = to->packets[(to->first + to->count) % WIRE];
	if (to->count == WIRE || !dq_control_ready(&from->c))
		return 0;
	to->bytes[(to->first + to->count++) % WIRE] = dq_control_pack(&from->c, p);
	return 1;
}

static unsigned take(struct side *s)
{
	if (!s->count)
		return 0;
	assert_int_not_equal(s->receives, 0); /* receiver not ready */
	s->receives--;
	s->owed++;
	s->received++;
	assert_int_equal(dq_control_unpack(&s->c, s->packets[s->first], s->bytes[s->first], hear, s), 0);
	s->first = (s->first + 1) % WIRE;
	s->count--;
	return 1;
}

static unsigned repost(struct side *s, uint32_t n)
{
	n = DQ_MIN(n, s->owed);
	s->owed -= n;
	s->receives += n;
	dq_control_posted(&s->c, n);
	return n;
}

static void drain(struct side *a, struct side *b)
{
	unsigned moved = 1;
	while (moved) {
		moved = pump(a, b) | pump(b, a);
		moved |= take(a) | take(b);
		moved |= repost(a, UINT32_MAX) | repost(b, UINT32_MAX);
	}
	assert_int_equal(a->heard, b->queued);
	assert_int_equal(b->heard, a->queued);
	assert_int_equal(a->count + b->count, 0);
}

static void test_random_traffic(void **state)
{
	static struct side a, b;
	(void)state;
	for (uint64_t seed = 1; seed <= 400; seed++) {
		uint64_t prng = seed;
		uint32_t credits = 4 + prng_below(&prng, 13), rebuilds = prng_below(&prng, 2);
		side_init(&a, credits);
		side_init(&b, credits);
		for (int i = 0; i < 2000; i++) {
			struct side *s = prng_below(&prng, 2) ? &a : &b, *t = s == &a ? &b : &a;
			switch (prng_below(&prng, 8)) {
			case 0: for (uint32_t n = prng_below(&prng, 200); n; n--) say(s, &prng); break;
			case 1: case 2: pump(s, t); break;
			case 3: case 4: take(s); break;
			case 5: repost(s, 1 + prng_below(&prng, 4)); break;
			case 6: while (pump(s, t)) ; break;
			default:
				if (!rebuilds || prng_below(&prng, 100))
					break;
				/* What is on the wire is lost; both ends begin with new QPs. */
				a.count = b.count = a.first = b.first = 0;
				a.owed = b.owed = 0;
				a.receives = b.receives = credits;
				dq_control_rebuild(&a.c);
				dq_control_rebuild(&b.c);
			}
		}
		drain(&a, &b);
		if (!rebuilds)
			assert_int_equal(a.c.duplicates + b.c.duplicates, 0);
		dq_control_fini(&a.c);
		dq_control_fini(&b.c);
	}
}

/* Both ends have much to say and nobody reads: nobody sends more than the other can take; then it goes on. */
static void test_both_full(void **state)
{
	static struct side a, b;
	(void)state;
	for (uint32_t credits = 4; credits <= 64; credits *= 2) {
		uint64_t prng = credits;
		uint32_t sent = 0;
		side_init(&a, credits);
		side_init(&b, credits);
		for (int i = 0; i < 20000; i++)
			say(&a, &prng), say(&b, &prng);
		while (pump(&a, &b) | pump(&b, &a))
			sent++;
		assert_int_equal(sent, credits - 1); /* one is kept */
		assert_int_equal(a.count, credits - 1);
		/* Everything is read, but posted again only after both have tried to answer. */
		while (take(&a) | take(&b))
			;
		assert_false(pump(&a, &b) | pump(&b, &a));
		repost(&a, UINT32_MAX);
		repost(&b, UINT32_MAX);
		assert_true(pump(&a, &b)); /* the kept one brings the credits back */
		assert_true(pump(&b, &a));
		drain(&a, &b);
		dq_control_fini(&a.c);
		dq_control_fini(&b.c);
	}
}

/* The kept credit is not spent on acknowledgements: a peer that waits for one gets it with the credits. */
static void test_kept_credit_is_for_credits(void **state)
{
	static struct side a, b;
	uint64_t prng = 1;
	uint8_t out[DQ_CONTROL_BYTES];
	(void)state;
	side_init(&a, 4);
	side_init(&b, 4);
	for (int i = 0; i < 3; i++) {
		say(&a, &prng);
		assert_true(pump(&a, &b));
	}
	assert_int_not_equal(dq_control_queue(&b.c, &(struct dq_message){ .type = DQ_MSG_EXPORT, .nkeys = 1 }), 0);
	assert_true(dq_control_ready(&b.c));
	assert_int_equal(dq_control_unpack(&a.c, out, dq_control_pack(&b.c, out), hear, &(struct side){ .heard = UINT64_MAX }), 0);
	assert_true(a.c.ack_now);
	assert_false(dq_control_ready(&a.c)); /* one credit left, none to return */
	while (take(&b))
		;
	repost(&b, UINT32_MAX);
	assert_true(pump(&b, &a));
	assert_int_equal(dq_control_unpack(&a.c, a.packets[0], a.bytes[0], hear, &a), 0);
	assert_true(dq_control_ready(&a.c)); /* now the acknowledgement goes */
	dq_control_fini(&a.c);
	dq_control_fini(&b.c);
}

static void test_idle_is_silent(void **state)
{
	static struct side a, b;
	uint64_t prng = 3;
	(void)state;
	side_init(&a, 8);
	side_init(&b, 8);
	say(&a, &prng);
	drain(&a, &b);
	assert_int_equal(b.received, 1);
	assert_int_equal(a.received, 0); /* no acknowledgement of one message: it goes along with the next packet */
	for (int i = 0; i < 1000; i++) {
		say(&a, &prng);
		drain(&a, &b);
	}
	assert_true(a.received <= 1000 / 4 + 1); /* credits come back by halves */
	assert_true(a.c.tail - a.c.head < 20000); /* and what is kept stays short */
	dq_control_fini(&a.c);
	dq_control_fini(&b.c);
}

/* Packets are filled: coalescing makes few of many. */
static void test_coalescing(void **state)
{
	static struct side a, b;
	uint64_t prng = 3;
	(void)state;
	side_init(&a, 64);
	side_init(&b, 64);
	for (int i = 0; i < 1000; i++)
		say(&a, &prng);
	drain(&a, &b);
	assert_true(b.received < 1000 / 30);
	dq_control_fini(&a.c);
	dq_control_fini(&b.c);
}

static void test_queue_has_a_limit(void **state)
{
	struct dq_control_channel c;
	uint64_t n = 0;
	(void)state;
	assert_int_equal(dq_control_init(&c, 8), 0);
	while (dq_control_queue(&c, &(struct dq_message){ .type = DQ_MSG_RTR, .nkeys = DQ_WIRE_MAX_RAILS }))
		n++;
	assert_true(c.tail <= DQ_CONTROL_QUEUE_LIMIT && c.tail > DQ_CONTROL_QUEUE_LIMIT - 2 * DQ_CONTROL_BYTES);
	assert_int_equal(n, c.next_number - 1);
	assert_int_equal(dq_control_queue(&c, &(struct dq_message){ .type = 99 }), 0);
	dq_control_fini(&c);
	assert_int_equal(dq_control_init(&c, 3), -EINVAL);
}

static int accept_any(void *user, const struct dq_message *m)
{
	(void)user;
	(void)m;
	return 0;
}

static int refuse(void *user, const struct dq_message *m)
{
	(void)user;
	(void)m;
	return -ENOMEM;
}

static void test_wrong_packets(void **state)
{
	struct dq_control_channel c;
	uint8_t p[DQ_CONTROL_BYTES] = { 0 };
	struct dq_packet_head h = { .version = DQ_WIRE_VERSION, .first = 1, .ack = 1, .credits = 8, .bytes = DQ_WIRE_HEAD_BYTES };
	const struct { uint64_t first, ack; uint32_t credits; uint16_t count; int rc; } cases[] = {
		{ 1, 1, 8, 0, 0 },
		{ 1, 0, 8, 0, -EPROTO },         /* acknowledges less than the first */
		{ 1, 2, 8, 0, -EPROTO },         /* acknowledges what was never sent */
		{ 1, 1, 9, 0, -EPROTO },         /* more credits than receives */
		{ 1, 1, UINT32_MAX, 0, -EPROTO },
		{ 2, 1, 8, 1, -EPROTO },         /* a gap */
		{ 1, 1, 8, 1, 0 },
		{ 2, 1, 8, 2, -EPROTO },         /* fewer messages than said: the one there is is taken before that is seen */
		{ 1, 1, 8, 1, 0 },               /* again: a duplicate */
		{ 0, 1, 8, 1, -EPROTO },
		{ UINT64_MAX, 1, 8, 1, -EPROTO },
	};
	int n = dq_message_encode(&(struct dq_message){ .type = DQ_MSG_GRANT }, p + DQ_WIRE_HEAD_BYTES, sizeof p - DQ_WIRE_HEAD_BYTES);
	(void)state;
	assert_true(n > 0);
	assert_int_equal(dq_control_init(&c, 8), 0);
	for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
		h.first = cases[i].first;
		h.ack = cases[i].ack;
		h.credits = cases[i].credits;
		h.count = cases[i].count;
		h.bytes = (uint16_t)(DQ_WIRE_HEAD_BYTES + (h.count ? (unsigned)n : 0));
		dq_packet_head_encode(&h, p);
		assert_int_equal(dq_control_unpack(&c, p, h.bytes, accept_any, NULL), cases[i].rc);
	}
	assert_int_equal(c.duplicates, 1);
	h = (struct dq_packet_head){ .version = DQ_WIRE_VERSION + 1, .first = 1, .ack = 1, .credits = 8, .bytes = DQ_WIRE_HEAD_BYTES };
	dq_packet_head_encode(&h, p);
	assert_int_equal(dq_control_unpack(&c, p, h.bytes, accept_any, NULL), -EPROTONOSUPPORT);
	h = (struct dq_packet_head){ .version = DQ_WIRE_VERSION, .first = 3, .ack = 1, .credits = 8, .count = 1,
				     .bytes = (uint16_t)(DQ_WIRE_HEAD_BYTES + n) };
	dq_packet_head_encode(&h, p);
	assert_int_equal(dq_control_unpack(&c, p, h.bytes, refuse, NULL), -ENOMEM); /* what the handler says */
	dq_control_fini(&c);
}

/* Any bytes, and valid packets with some bytes changed: an error or accepted, never a crash. */
static void test_any_bytes(void **state)
{
	uint64_t prng = 99;
	(void)state;
	for (int round = 0; round < 30000; round++) {
		struct dq_control_channel from, to;
		uint8_t packet[DQ_CONTROL_BYTES], *copy;
		size_t bytes;
		assert_int_equal(dq_control_init(&from, 8), 0);
		assert_int_equal(dq_control_init(&to, 8), 0);
		for (uint32_t n = prng_below(&prng, 6); n; n--)
			assert_int_not_equal(dq_control_queue(&from, &(struct dq_message){ .type = (uint8_t)(1 + prng_below(&prng, 12)),
				.nkeys = 1, .text = "gone" }), 0);
		bytes = dq_control_pack(&from, packet);
		if (round % 3 == 0) {
			bytes = prng_below(&prng, 200);
			for (size_t i = 0; i < bytes; i++)
				packet[i] = (uint8_t)prng_next(&prng);
		} else {
			for (uint32_t n = 1 + prng_below(&prng, 4); n; n--)
				packet[prng_below(&prng, (uint32_t)bytes)] = (uint8_t)prng_next(&prng);
			if (prng_below(&prng, 4) == 0)
				bytes = prng_below(&prng, (uint32_t)bytes + 1);
		}
		copy = malloc(bytes ? bytes : 1); /* the sanitizer sees a read beyond */
		assert_non_null(copy);
		memcpy(copy, packet, bytes);
		assert_true(dq_control_unpack(&to, copy, bytes, accept_any, NULL) <= 0);
		free(copy);
		dq_control_fini(&from);
		dq_control_fini(&to);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_random_traffic),
		cmocka_unit_test(test_both_full),
		cmocka_unit_test(test_kept_credit_is_for_credits),
		cmocka_unit_test(test_idle_is_silent),
		cmocka_unit_test(test_coalescing),
		cmocka_unit_test(test_queue_has_a_limit),
		cmocka_unit_test(test_wrong_packets),
		cmocka_unit_test(test_any_bytes),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
