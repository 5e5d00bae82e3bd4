/* SPDX-License-Identifier: Apache-2.0 */
#include "shim/copy.h"

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#define WORDS_PER_LINE 16u

static inline uint64_t load(const unsigned char *p)
{
	uint64_t v;

	memcpy(&v, p, sizeof v); /* the source may have any alignment */
	return v;
}

static unsigned char *copy_bytes(unsigned char *d, const unsigned char *s, size_t n)
{
	for (size_t i = 0; i < n; i++)
		atomic_store_explicit((_Atomic unsigned char *)(d + i), s[i], memory_order_release);
	return d + n;
}

void dq_copy_ordered(void *destination, const void *source, size_t bytes)
{
	unsigned char *d = destination;
	const unsigned char *s = source;
	size_t head = -(uintptr_t)d & 7u;

	if (head > bytes)
		head = bytes;
	d = copy_bytes(d, s, head);
	s += head;
	bytes -= head;

	_Atomic uint64_t *w = (_Atomic uint64_t *)(void *)d;
	while (bytes >= WORDS_PER_LINE * 8) {
		/* Unordered stores within the line would be wrong on a weakly ordered machine only for readers of single
		 * words; those use 8-byte flag-and-data units, each complete in itself. */
		for (unsigned i = 0; i < WORDS_PER_LINE - 1; i++)
			atomic_store_explicit(w + i, load(s + 8 * (size_t)i), memory_order_relaxed);
		atomic_store_explicit(w + WORDS_PER_LINE - 1, load(s + 8 * (WORDS_PER_LINE - 1)), memory_order_release);
		w += WORDS_PER_LINE;
		s += WORDS_PER_LINE * 8;
		bytes -= WORDS_PER_LINE * 8;
	}
	for (; bytes >= 8; bytes -= 8, s += 8)
		atomic_store_explicit(w++, load(s), memory_order_release);
	copy_bytes((unsigned char *)w, s, bytes);
}
