/* SPDX-License-Identifier: Apache-2.0 */
#include "shim/copy.h"

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

/* The sanitizer must see every store as atomic. */
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
#include <emmintrin.h>
#define VECTORS 1
#else
#define VECTORS 0
#endif

#define LINE_BYTES 128u
#define LINE_WORDS (LINE_BYTES / 8)

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

/*
 * d is aligned to 8. On machines that reorder stores these words have no order among each other: each is complete in itself,
 * and the last one releases all.
 */
static inline void copy_words(unsigned char *d, const unsigned char *s, unsigned first)
{
	_Atomic uint64_t *w = (_Atomic uint64_t *)(void *)d;

	for (unsigned i = first; i < LINE_WORDS - 1; i++)
		atomic_store_explicit(w + i, load(s + 8 * (size_t)i), memory_order_relaxed);
	atomic_store_explicit(w + LINE_WORDS - 1, load(s + 8 * (LINE_WORDS - 1)), memory_order_release);
}

#if VECTORS
/*
 * d is aligned to 16. x86 keeps stores in order, and an aligned vector store is never torn within 8 bytes: twice the speed of
 * words, and the same for their readers. The last two words go alone: a reader takes the last for the flag on the one before.
 */
static inline void copy_vectors(unsigned char *d, const unsigned char *s)
{
	for (unsigned i = 0; i < LINE_WORDS - 2; i += 2) {
		__m128i v = _mm_loadu_si128((const __m128i *)(const void *)(s + 8 * (size_t)i));
		_mm_store_si128((__m128i *)(void *)(d + 8 * (size_t)i), v);
		atomic_signal_fence(memory_order_release); /* the compiler keeps the order, too */
	}
	copy_words(d, s, LINE_WORDS - 2);
}
#endif

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

#if VECTORS
	if (((uintptr_t)d & 15) == 0)
		for (; bytes >= LINE_BYTES; bytes -= LINE_BYTES, d += LINE_BYTES, s += LINE_BYTES)
			copy_vectors(d, s);
#endif
	for (; bytes >= LINE_BYTES; bytes -= LINE_BYTES, d += LINE_BYTES, s += LINE_BYTES)
		copy_words(d, s, 0);
	for (; bytes >= 8; bytes -= 8, s += 8, d += 8)
		atomic_store_explicit((_Atomic uint64_t *)(void *)d, load(s), memory_order_release);
	copy_bytes(d, s, bytes);
}
