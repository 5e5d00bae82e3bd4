/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz entry of the wire format, in the form that libFuzzer calls:
 *     clang -g -fsanitize=fuzzer,address,undefined -I native native/core/wire.c -x c native/tests/fuzz_wire.h
 * test_wire.c drives the same entry with a seeded generator, so that it runs with any compiler.
 */
#ifndef DQ_TESTS_FUZZ_WIRE_H
#define DQ_TESTS_FUZZ_WIRE_H

#include <stdlib.h>
#include <string.h>

#include "core/wire.h"

/* Reads a packet as a receiver does. Returns the messages in it, or -1 where a receiver would drop the VC. Aborts when what
 * was accepted cannot be written again with the same meaning. */
static inline int fuzz_wire_messages(const uint8_t *in, size_t bytes)
{
	struct dq_packet_head head;
	size_t at = DQ_WIRE_HEAD_BYTES;

	if (dq_packet_head_decode(&head, in, bytes) != 0)
		return -1;
	for (unsigned i = 0; i < head.count; i++) {
		struct dq_message m, again;
		uint8_t out[DQ_CONTROL_BYTES];
		int used, n;

		used = dq_message_decode(&m, in + at, bytes - at);
		if (used < 0)
			return -1;
		at += (size_t)used;
		if (at > bytes || m.text[DQ_WIRE_TEXT_MAX] != '\0' || m.nkeys > DQ_WIRE_MAX_RAILS)
			abort();
		n = dq_message_encode(&m, out, sizeof out);
		if (n < 0 || n > used || dq_message_decode(&again, out, (size_t)n) != n || memcmp(&m, &again, sizeof m) != 0)
			abort();
	}
	return at == bytes ? head.count : -1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct dq_message m;

	(void)fuzz_wire_messages(data, size);
	/* A packet must pass many checks before its messages are looked at: so also as a bare message. */
	(void)dq_message_decode(&m, data, size);
	return 0;
}

#endif
