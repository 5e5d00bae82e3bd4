/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <errno.h>
#include <cmocka.h>

#include "core/wire.h"
#include "fuzz_wire.h"
#include "prng.h"
#include "vectors/wire.h"

#define TYPES 14u

/* A message with every field that its type has set to a value of its own. */
static struct dq_message message_make(uint8_t type, uint64_t *seed)
{
	struct dq_message m;

	memset(&m, 0, sizeof m);
	m.type = type;
	m.flags = (uint8_t)prng_next(seed);
	switch (type) {
	case DQ_MSG_FLOW_OPEN:
		m.flow = (uint32_t)prng_next(seed);
		m.client = (uint32_t)prng_next(seed);
		m.listener = (uint32_t)prng_next(seed);
		m.nonce[0] = prng_next(seed);
		m.nonce[1] = prng_next(seed);
		break;
	case DQ_MSG_FLOW_ACCEPT:
		m.flow = (uint32_t)prng_next(seed);
		m.peer_flow = (uint32_t)prng_next(seed);
		m.status = (int32_t)prng_next(seed);
		break;
	case DQ_MSG_FLOW_CLOSE:
		m.flow = (uint32_t)prng_next(seed);
		m.status = (int32_t)prng_next(seed);
		break;
	case DQ_MSG_RTR:
		m.slot = (uint16_t)prng_next(seed);
		m.grant_serial = (uint32_t)prng_next(seed);
		m.grant = prng_next(seed);
		m.serial = prng_next(seed);
		m.tag = prng_next(seed);
		/* fall through */
	case DQ_MSG_EXPORT:
		m.flow = (uint32_t)prng_next(seed);
		if (type == DQ_MSG_EXPORT)
			m.region = (uint32_t)prng_next(seed);
		m.length = prng_next(seed);
		m.addr = prng_next(seed);
		m.nkeys = (uint8_t)(1 + prng_below(seed, DQ_WIRE_MAX_RAILS));
		for (unsigned i = 0; i < m.nkeys; i++)
			m.keys[i] = prng_next(seed);
		break;
	case DQ_MSG_UNEXPORT:
		m.flow = (uint32_t)prng_next(seed);
		m.region = (uint32_t)prng_next(seed);
		break;
	case DQ_MSG_PUT:
		m.slot = (uint16_t)prng_next(seed);
		m.flow = (uint32_t)prng_next(seed);
		m.region = (uint32_t)prng_next(seed);
		m.serial = prng_next(seed);
		m.cookie = prng_next(seed);
		m.length = prng_next(seed);
		m.offset = prng_next(seed);
		break;
	case DQ_MSG_DONE:
		m.slot = (uint16_t)prng_next(seed);
		m.status = (int32_t)prng_next(seed);
		m.serial = prng_next(seed);
		m.length = prng_next(seed);
		break;
	case DQ_MSG_CANCEL:
		m.slot = (uint16_t)prng_next(seed);
		m.serial = prng_next(seed);
		m.length = prng_next(seed);
		break;
	case DQ_MSG_GRANT:
		m.grant_serial = (uint32_t)prng_next(seed);
		m.grant = prng_next(seed);
		break;
	case DQ_MSG_BACKLOG:
		m.backlog = prng_next(seed);
		break;
	case DQ_MSG_ERROR: {
		uint32_t text = prng_below(seed, DQ_WIRE_TEXT_MAX + 1);

		m.status = (int32_t)prng_next(seed);
		for (uint32_t i = 0; i < text; i++)
			m.text[i] = (char)(1 + prng_below(seed, 255));
		break;
	}
	default:
		break;
	}
	return m;
}

static void message_equal(const struct dq_message *a, const struct dq_message *b)
{
	assert_int_equal(a->type, b->type);
	assert_int_equal(a->flags, b->flags);
	assert_int_equal(a->slot, b->slot);
	assert_int_equal(a->flow, b->flow);
	assert_int_equal(a->peer_flow, b->peer_flow);
	assert_int_equal(a->client, b->client);
	assert_int_equal(a->listener, b->listener);
	assert_int_equal(a->region, b->region);
	assert_int_equal(a->status, b->status);
	assert_int_equal(a->grant_serial, b->grant_serial);
	assert_int_equal(a->grant, b->grant);
	assert_int_equal(a->backlog, b->backlog);
	assert_memory_equal(a->nonce, b->nonce, sizeof a->nonce);
	assert_int_equal(a->serial, b->serial);
	assert_int_equal(a->tag, b->tag);
	assert_int_equal(a->cookie, b->cookie);
	assert_int_equal(a->length, b->length);
	assert_int_equal(a->offset, b->offset);
	assert_int_equal(a->addr, b->addr);
	assert_int_equal(a->nkeys, b->nkeys);
	assert_memory_equal(a->keys, b->keys, sizeof a->keys);
	assert_string_equal(a->text, b->text);
}

static bool type_known(uint8_t type)
{
	return type >= DQ_MSG_FLOW_OPEN && type <= DQ_MSG_ERROR;
}

static void test_immediate(void **state)
{
	(void)state;
	for (uint32_t slot = 0; slot < 65536; slot += 13) {
		for (uint32_t index = 0; index < 32768; index += 1 + index / 5) {
			for (unsigned last = 0; last < 2; last++) {
				uint32_t imm = dq_imm_encode((uint16_t)slot, last, (uint16_t)index);

				assert_int_equal(dq_imm_slot(imm), slot);
				assert_int_equal(dq_imm_last(imm), last);
				assert_int_equal(dq_imm_index(imm), index);
			}
		}
	}
	/* The layout, pinned: slot:16 | last:1 | index:15. */
	assert_int_equal(dq_imm_encode(0x8001, true, 0x7ffe), 0x8001fffe);
	assert_int_equal(dq_imm_encode(0x1234, false, 0x0567), 0x12340567);
}

static void test_round_trip(void **state)
{
	uint64_t seed = 31;

	(void)state;
	for (unsigned i = 0; i < 2000; i++) {
		for (uint8_t type = DQ_MSG_FLOW_OPEN; type <= DQ_MSG_ERROR; type++) {
			struct dq_message m = message_make(type, &seed), back;
			uint8_t bytes[512];
			int n = dq_message_encode(&m, bytes, sizeof bytes);

			assert_true(n >= (int)DQ_WIRE_MESSAGE_HEAD_BYTES);
			memset(&back, 0xee, sizeof back);
			assert_int_equal(dq_message_decode(&back, bytes, sizeof bytes), n);
			message_equal(&m, &back);
			assert_int_equal(dq_message_encode(&m, bytes, (size_t)n), n);
		}
	}
}

/* Cut off at each byte, on both sides: always an error, and nothing outside of the buffer is touched (sanitizers). */
static void test_truncation(void **state)
{
	uint64_t seed = 32;

	(void)state;
	for (unsigned i = 0; i < 50; i++) {
		for (uint8_t type = DQ_MSG_FLOW_OPEN; type <= DQ_MSG_ERROR; type++) {
			struct dq_message m = message_make(type, &seed), back;
			uint8_t bytes[512];
			int n = dq_message_encode(&m, bytes, sizeof bytes);

			for (int cut = 0; cut < n; cut++) {
				uint8_t *exact = malloc((size_t)cut + 1);

				assert_non_null(exact);
				exact[cut] = 0xcc;
				assert_int_equal(dq_message_encode(&m, exact, (size_t)cut), -ENOSPC);
				assert_int_equal(exact[cut], 0xcc);
				exact = realloc(exact, cut ? (size_t)cut : 1);
				assert_non_null(exact);
				memcpy(exact, bytes, (size_t)cut);
				assert_int_equal(dq_message_decode(&back, exact, (size_t)cut), -EPROTO);
				/* The same with a body length that fits the cut. */
				if (cut >= 4) {
					exact[2] = (uint8_t)(cut - 4);
					exact[3] = (uint8_t)((cut - 4) >> 8);
					assert_int_equal(dq_message_decode(&back, exact, (size_t)cut), -EPROTO);
				}
				free(exact);
			}
		}
	}
}

/* A later version may make a body longer: its tail is skipped. */
static void test_longer_body(void **state)
{
	uint64_t seed = 33;

	(void)state;
	for (uint8_t type = DQ_MSG_FLOW_OPEN; type <= DQ_MSG_ERROR; type++) {
		struct dq_message m = message_make(type, &seed), back;
		uint8_t bytes[1024];
		int n = dq_message_encode(&m, bytes, sizeof bytes);

		for (int tail = 1; tail < 300; tail += 7) {
			int body = n - 4 + tail;

			memset(bytes + n, 0xab, (size_t)tail);
			bytes[2] = (uint8_t)body;
			bytes[3] = (uint8_t)(body >> 8);
			assert_int_equal(dq_message_decode(&back, bytes, (size_t)(n + tail)), n + tail);
			message_equal(&m, &back);
		}
	}
}

static void test_unknown_types(void **state)
{
	uint8_t bytes[512] = { 0 };
	struct dq_message m;

	(void)state;
	for (unsigned type = 0; type < 256; type++) {
		memset(&m, 0, sizeof m);
		m.type = (uint8_t)type;
		m.nkeys = 1;
		if (type_known((uint8_t)type)) {
			assert_true(dq_message_encode(&m, bytes, sizeof bytes) > 0);
			assert_string_not_equal(dq_message_name((uint8_t)type), "?");
			continue;
		}
		assert_int_equal(dq_message_encode(&m, bytes, sizeof bytes), -EINVAL);
		bytes[0] = (uint8_t)type;
		bytes[2] = 200;
		bytes[3] = 0;
		assert_int_equal(dq_message_decode(&m, bytes, sizeof bytes), -EPROTO);
		if (type == 0 || type > TYPES)
			assert_string_equal(dq_message_name((uint8_t)type), "?");
	}
	assert_string_equal(dq_message_name(DQ_MSG_RTR), "RTR");
	assert_string_equal(dq_message_name(DQ_MSG_STATE), "STATE");
}

static void test_form(void **state)
{
	uint64_t seed = 34;
	struct dq_message m, back;
	uint8_t bytes[512];

	(void)state;
	/* Keys: 1 to DQ_WIRE_MAX_RAILS, in both directions. */
	for (unsigned k = 0; k < 256; k++) {
		m = message_make(DQ_MSG_EXPORT, &seed);
		m.nkeys = (uint8_t)k;
		if (k >= 1 && k <= DQ_WIRE_MAX_RAILS) {
			assert_true(dq_message_encode(&m, bytes, sizeof bytes) > 0);
			continue;
		}
		assert_int_equal(dq_message_encode(&m, bytes, sizeof bytes), -EINVAL);
		m.type = DQ_MSG_RTR;
		assert_int_equal(dq_message_encode(&m, bytes, sizeof bytes), -EINVAL);
		m.type = DQ_MSG_EXPORT;
		m.nkeys = 1;
		assert_true(dq_message_encode(&m, bytes, sizeof bytes) > 0);
		bytes[2] = 0;
		bytes[3] = 1; /* 256 bytes of body: long enough for any number of keys that is allowed */
		bytes[4] = (uint8_t)k;
		assert_int_equal(dq_message_decode(&back, bytes, sizeof bytes), -EPROTO);
	}
	/* Text: no NUL inside, no more than DQ_WIRE_TEXT_MAX, terminated here. */
	memset(&m, 0, sizeof m);
	m.type = DQ_MSG_ERROR;
	memset(m.text, 'x', sizeof m.text); /* not even terminated */
	assert_int_equal(dq_message_encode(&m, bytes, sizeof bytes), 4 + 5 + DQ_WIRE_TEXT_MAX);
	assert_true(dq_message_decode(&back, bytes, sizeof bytes) > 0);
	assert_int_equal(strlen(back.text), DQ_WIRE_TEXT_MAX);
	bytes[4 + 5 + 60] = 0;
	assert_int_equal(dq_message_decode(&back, bytes, sizeof bytes), -EPROTO);
	bytes[4 + 5 + 60] = 'x';
	bytes[8] = DQ_WIRE_TEXT_MAX + 1;
	bytes[2] = 200;
	assert_int_equal(dq_message_decode(&back, bytes, sizeof bytes), -EPROTO);
}

static void test_packet_head(void **state)
{
	struct dq_packet_head h, back;
	uint8_t bytes[DQ_CONTROL_BYTES + 8] = { 0 };
	uint64_t seed = 35;

	(void)state;
	for (unsigned i = 0; i < 5000; i++) {
		h.version = DQ_WIRE_VERSION;
		h.bytes = (uint16_t)(DQ_WIRE_HEAD_BYTES + 1 + prng_below(&seed, DQ_CONTROL_BYTES - DQ_WIRE_HEAD_BYTES));
		h.count = (uint16_t)(1 + prng_below(&seed, 1100));
		h.first = prng_next(&seed) | 1;
		h.ack = prng_next(&seed);
		h.credits = (uint32_t)prng_next(&seed);
		dq_packet_head_encode(&h, bytes);
		if (h.count * 4u > h.bytes - DQ_WIRE_HEAD_BYTES) {
			assert_int_equal(dq_packet_head_decode(&back, bytes, h.bytes), -EPROTO);
			continue;
		}
		assert_int_equal(dq_packet_head_decode(&back, bytes, h.bytes), 0);
		assert_int_equal(back.version, h.version);
		assert_int_equal(back.bytes, h.bytes);
		assert_int_equal(back.count, h.count);
		assert_int_equal(back.first, h.first);
		assert_int_equal(back.ack, h.ack);
		assert_int_equal(back.credits, h.credits);
		assert_int_equal(dq_packet_head_decode(&back, bytes, h.bytes - 1u), -EPROTO);
		assert_int_equal(dq_packet_head_decode(&back, bytes, h.bytes + 1u), -EPROTO);
	}
	h = (struct dq_packet_head){ .version = DQ_WIRE_VERSION, .bytes = DQ_WIRE_HEAD_BYTES };
	dq_packet_head_encode(&h, bytes);
	assert_int_equal(dq_packet_head_decode(&back, bytes, DQ_WIRE_HEAD_BYTES), 0);
	for (size_t cut = 0; cut < DQ_WIRE_HEAD_BYTES; cut++)
		assert_int_equal(dq_packet_head_decode(&back, bytes, cut), -EPROTO);
	/* Magic, flags, reserved: one bit is enough. */
	static const uint8_t strict[] = { 0, 1, 3, 28, 29, 30, 31 };
	for (unsigned i = 0; i < sizeof strict; i++) {
		bytes[strict[i]] ^= 0x40;
		assert_int_equal(dq_packet_head_decode(&back, bytes, DQ_WIRE_HEAD_BYTES), -EPROTO);
		bytes[strict[i]] ^= 0x40;
	}
	bytes[2] = 2;
	assert_int_equal(dq_packet_head_decode(&back, bytes, DQ_WIRE_HEAD_BYTES), -EPROTONOSUPPORT);
	assert_int_equal(back.version, 2);
	/* Messages but no number, no messages but bytes, too long at all. */
	h = (struct dq_packet_head){ .version = DQ_WIRE_VERSION, .bytes = 40, .count = 1 };
	dq_packet_head_encode(&h, bytes);
	assert_int_equal(dq_packet_head_decode(&back, bytes, 40), -EPROTO);
	h.first = 1;
	h.count = 0;
	dq_packet_head_encode(&h, bytes);
	assert_int_equal(dq_packet_head_decode(&back, bytes, 40), -EPROTO);
	h.count = 1;
	h.bytes = DQ_CONTROL_BYTES + 8;
	dq_packet_head_encode(&h, bytes);
	assert_int_equal(dq_packet_head_decode(&back, bytes, DQ_CONTROL_BYTES + 8), -EPROTO);
}

/* The bytes of version 1 may never change: these were written down when it was fixed. */
static void test_vectors(void **state)
{
	struct dq_packet_head h = { .version = 1, .bytes = 0x0123, .count = 0x0045, .first = 0x1112131415161718,
				    .ack = 0x2122232425262728, .credits = 0x31323334 };
	uint8_t bytes[512];

	(void)state;
	dq_packet_head_encode(&h, bytes);
	assert_memory_equal(bytes, wire_vector_head, sizeof wire_vector_head);
	for (unsigned i = 0; i < sizeof wire_vectors / sizeof *wire_vectors; i++) {
		const struct wire_vector *v = &wire_vectors[i];
		struct dq_message back;

		assert_int_equal(dq_message_encode(&v->message, bytes, sizeof bytes), v->bytes);
		assert_memory_equal(bytes, v->wire, v->bytes);
		assert_int_equal(dq_message_decode(&back, v->wire, v->bytes), v->bytes);
		message_equal(&back, &v->message);
	}
}

/* Any bytes: random ones, and good packets with some bytes changed. */
static void test_any_bytes(void **state)
{
	uint64_t seed = 36, accepted = 0;

	(void)state;
	for (unsigned i = 0; i < 60000; i++) {
		size_t len = prng_below(&seed, 600);
		uint8_t *bytes = malloc(len + 1);

		assert_non_null(bytes);
		if (i % 3 == 0) {
			for (size_t k = 0; k < len; k++)
				bytes[k] = (uint8_t)prng_next(&seed);
			LLVMFuzzerTestOneInput(bytes, len);
		} else {
			size_t used = DQ_WIRE_HEAD_BYTES;
			struct dq_packet_head h = { .version = 1, .first = 1 + prng_next(&seed) / 2 };
			uint8_t *packet = realloc(bytes, 700);
			int n;

			assert_non_null(packet);
			while (h.count < 10 && (n = (int)prng_below(&seed, 13)) != 0) {
				struct dq_message m = message_make((uint8_t)n, &seed);

				n = dq_message_encode(&m, packet + used, 700 - used);
				if (n < 0)
					break;
				used += (size_t)n;
				h.count++;
			}
			h.bytes = (uint16_t)used;
			dq_packet_head_encode(&h, packet);
			bytes = realloc(packet, used);
			assert_non_null(bytes);
			if (i % 3 == 1) {
				accepted += (uint64_t)fuzz_wire_messages(bytes, used);
			} else {
				for (unsigned k = 1 + prng_below(&seed, 4); k > 0; k--)
					bytes[prng_below(&seed, (uint32_t)used)] ^= (uint8_t)(1u << prng_below(&seed, 8));
				LLVMFuzzerTestOneInput(bytes, used);
			}
		}
		free(bytes);
	}
	assert_true(accepted > 50000);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_immediate),
		cmocka_unit_test(test_round_trip),
		cmocka_unit_test(test_truncation),
		cmocka_unit_test(test_longer_body),
		cmocka_unit_test(test_unknown_types),
		cmocka_unit_test(test_form),
		cmocka_unit_test(test_packet_head),
		cmocka_unit_test(test_vectors),
		cmocka_unit_test(test_any_bytes),
	};

	return cmocka_run_group_tests_name("wire", tests, NULL, NULL);
}
