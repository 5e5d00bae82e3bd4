/* SPDX-License-Identifier: Apache-2.0 */
#include "core/tracker.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS 65536u
#define PAGE_SHIFT 7u
#define PAGE_SLOTS (1u << PAGE_SHIFT)
#define PAGES (SLOTS / PAGE_SLOTS)
#define WORD_BITS 64u
#define CLASSES 4u              /* words in a ring: 1 (in the slot), 8, 64, 512 */
#define SPARE_BYTES (64u << 10) /* spares that one pool keeps */
#define SPARE_PAGES 4u

enum slot_state { SLOT_FREE, SLOT_LIVE, SLOT_COMPLETE };

struct dq_track_slot {
	union {
		uint64_t word;      /* class 0 */
		uint64_t *ring;     /* class 1..3; word w of the message is at w & (words - 1) */
	};
	uint64_t bytes;
	uint16_t base;              /* words before this one are full; the ring holds base .. base + words - 1 */
	uint16_t got;               /* segments, 0..32768 */
	uint16_t seen;              /* farthest index seen + 1 */
	uint16_t total;             /* index of the last segment + 1, 0 = not known yet */
	uint16_t mask;              /* words of the ring - 1 */
	uint8_t state;
	uint8_t class;
};
_Static_assert(sizeof(struct dq_track_slot) == 32, "two slots a cache line");

struct spare {
	struct spare *next;
};

struct dq_track_pools {
	struct spare *spares[CLASSES];
	uint32_t count[CLASSES];
	struct spare *spare_pages;
	uint32_t spare_page_count;
	uint16_t page_live[PAGES];
};

static inline uint32_t class_words(unsigned class)
{
	return 1u << (3 * class);
}

static inline struct dq_track_slot *slot_find(const struct dq_tracker *t, uint16_t slot)
{
	struct dq_track_slot *page = t->pages[slot >> PAGE_SHIFT];

	return page ? &page[slot & (PAGE_SLOTS - 1)] : NULL;
}

static uint64_t *ring_alloc(struct dq_tracker *t, unsigned class)
{
	struct dq_track_pools *p = t->pools;
	size_t bytes = class_words(class) * sizeof(uint64_t);
	uint64_t *ring;

	if (t->bitmap_bytes + bytes > t->bitmap_limit)
		return NULL;
	if (p->spares[class]) {
		struct spare *s = p->spares[class];

		p->spares[class] = s->next;
		p->count[class]--;
		ring = (uint64_t *)s;
		memset(ring, 0, bytes);
	} else {
		ring = calloc(1, bytes);
	}
	if (ring)
		t->bitmap_bytes += bytes;
	return ring;
}

static void ring_free(struct dq_tracker *t, unsigned class, uint64_t *ring)
{
	struct dq_track_pools *p = t->pools;
	size_t bytes = class_words(class) * sizeof(uint64_t);

	t->bitmap_bytes -= bytes;
	if ((p->count[class] + 1) * bytes > SPARE_BYTES) {
		free(ring);
	} else {
		struct spare *s = (struct spare *)ring;

		s->next = p->spares[class];
		p->spares[class] = s;
		p->count[class]++;
	}
}

static void slot_drop_ring(struct dq_tracker *t, struct dq_track_slot *s)
{
	if (s->class)
		ring_free(t, s->class, s->ring);
	s->class = 0;
	s->mask = 0;
	s->word = 0;
}

/* A larger ring, so that it reaches `word`. */
static bool slot_grow(struct dq_tracker *t, struct dq_track_slot *s, uint32_t word)
{
	uint32_t words = class_words(s->class);
	unsigned class = s->class;
	uint64_t *ring;

	while (word - s->base >= class_words(class))
		class++;
	ring = ring_alloc(t, class);
	if (!ring)
		return false;
	for (uint32_t w = s->base; w < s->base + words; w++)
		ring[w & (class_words(class) - 1)] = s->class ? s->ring[w & (words - 1)] : s->word;
	slot_drop_ring(t, s);
	s->ring = ring;
	s->class = (uint8_t)class;
	s->mask = (uint16_t)(class_words(class) - 1);
	return true;
}

/* The slot, made live. NULL when there is no memory. */
static struct dq_track_slot *slot_begin(struct dq_tracker *t, uint16_t slot)
{
	struct dq_track_pools *p = t->pools;
	uint32_t page = slot >> PAGE_SHIFT;
	struct dq_track_slot *s;

	if (!t->pages[page]) {
		size_t bytes = PAGE_SLOTS * sizeof(struct dq_track_slot);

		if (p->spare_pages) {
			struct spare *spare = p->spare_pages;

			p->spare_pages = spare->next;
			p->spare_page_count--;
			t->pages[page] = memset(spare, 0, bytes);
		} else {
			t->pages[page] = calloc(1, bytes);
			if (!t->pages[page])
				return NULL;
		}
	}
	s = &t->pages[page][slot & (PAGE_SLOTS - 1)];
	memset(s, 0, sizeof *s);
	s->state = SLOT_LIVE;
	p->page_live[page]++;
	t->live++;
	return s;
}

int dq_tracker_init(struct dq_tracker *t)
{
	memset(t, 0, sizeof *t);
	t->bitmap_limit = DQ_TRACK_BITMAP_LIMIT;
	t->pages = calloc(PAGES, sizeof(*t->pages));
	t->pools = calloc(1, sizeof(*t->pools));
	if (!t->pages || !t->pools) {
		dq_tracker_fini(t);
		return -ENOMEM;
	}
	return 0;
}

static void spares_free(struct spare **list)
{
	while (*list) {
		struct spare *next = (*list)->next;

		free(*list);
		*list = next;
	}
}

void dq_tracker_trim(struct dq_tracker *t)
{
	struct dq_track_pools *p = t->pools;

	for (unsigned class = 1; class < CLASSES; class++) {
		spares_free(&p->spares[class]);
		p->count[class] = 0;
	}
	spares_free(&p->spare_pages);
	p->spare_page_count = 0;
}

void dq_tracker_fini(struct dq_tracker *t)
{
	for (uint32_t page = 0; t->pages && page < PAGES; page++) {
		for (uint32_t i = 0; t->pages[page] && i < PAGE_SLOTS; i++) {
			struct dq_track_slot *s = &t->pages[page][i];

			if (s->state != SLOT_FREE && s->class)
				free(s->ring);
		}
		free(t->pages[page]);
	}
	if (t->pools)
		dq_tracker_trim(t);
	free(t->pages);
	free(t->pools);
	memset(t, 0, sizeof *t);
}

int dq_tracker_arm(struct dq_tracker *t, uint16_t slot)
{
	const struct dq_track_slot *s = slot_find(t, slot);

	if (s && s->state != SLOT_FREE)
		return -EBUSY;
	return slot_begin(t, slot) ? 0 : -ENOMEM;
}

enum dq_track dq_tracker_segment(struct dq_tracker *t, uint16_t slot, uint16_t index, bool last, uint32_t bytes)
{
	struct dq_track_slot *s = slot_find(t, slot);
	uint32_t word = index / WORD_BITS;
	uint64_t bit = 1ull << (index % WORD_BITS);
	bool begun = false;
	uint64_t *at;

	if (DQ_UNLIKELY(index >= DQ_MAX_SEGMENTS))
		return DQ_TRACK_CONFLICT;
	if (DQ_UNLIKELY(!s || s->state == SLOT_FREE)) {
		if (slot < DQ_SLOT_PUT_BASE)
			return DQ_TRACK_UNARMED;
		s = slot_begin(t, slot);
		if (!s)
			return DQ_TRACK_NOMEM;
		begun = true;
	}
	if (s->total ? index >= s->total || last != (index + 1u == s->total) : last && index + 1u < s->seen)
		return DQ_TRACK_CONFLICT;
	if (DQ_UNLIKELY(word < s->base || s->state == SLOT_COMPLETE)) {
		/* A segment that came without `last` cannot come again with it. */
		if (last && !s->total)
			return DQ_TRACK_CONFLICT;
		t->duplicates++;
		return DQ_TRACK_DUPLICATE;
	}
	if (DQ_UNLIKELY(word - s->base > s->mask) && !slot_grow(t, s, word)) {
		if (begun)
			dq_tracker_release(t, slot);
		return DQ_TRACK_NOMEM;
	}

	at = s->class ? &s->ring[word & s->mask] : &s->word;
	if (DQ_UNLIKELY(*at & bit)) {
		if (last && !s->total)
			return DQ_TRACK_CONFLICT;
		t->duplicates++;
		return DQ_TRACK_DUPLICATE;
	}
	*at |= bit;
	if (last)
		s->total = (uint16_t)(index + 1u);
	if (index >= s->seen)
		s->seen = (uint16_t)(index + 1u);
	s->bytes += bytes;
	s->got++;
	t->segments++;
	if (s->got == s->total) {
		s->state = SLOT_COMPLETE;
		slot_drop_ring(t, s);
		return DQ_TRACK_COMPLETE;
	}
	if (DQ_UNLIKELY(*at == UINT64_MAX) && word == s->base) {
		/* Full words leave the ring; their places are the ring's new end. A message has 512 words at most. */
		do {
			*at = 0;
			s->base++;
			at = s->class ? &s->ring[s->base & s->mask] : &s->word;
		} while (*at == UINT64_MAX);
	}
	return DQ_TRACK_NEW;
}

bool dq_tracker_complete(const struct dq_tracker *t, uint16_t slot)
{
	const struct dq_track_slot *s = slot_find(t, slot);

	return s && s->state == SLOT_COMPLETE;
}

uint64_t dq_tracker_bytes(const struct dq_tracker *t, uint16_t slot)
{
	const struct dq_track_slot *s = slot_find(t, slot);

	return s && s->state != SLOT_FREE ? s->bytes : 0;
}

bool dq_tracker_live(const struct dq_tracker *t, uint16_t slot)
{
	const struct dq_track_slot *s = slot_find(t, slot);

	return s && s->state != SLOT_FREE;
}

void dq_tracker_release(struct dq_tracker *t, uint16_t slot)
{
	struct dq_track_slot *s = slot_find(t, slot);
	struct dq_track_pools *p = t->pools;
	uint32_t page = slot >> PAGE_SHIFT;

	if (!s || s->state == SLOT_FREE)
		return;
	slot_drop_ring(t, s);
	s->state = SLOT_FREE;
	t->live--;
	if (--p->page_live[page] > 0)
		return;
	if (p->spare_page_count < SPARE_PAGES) {
		struct spare *spare = (struct spare *)t->pages[page];

		spare->next = p->spare_pages;
		p->spare_pages = spare;
		p->spare_page_count++;
	} else {
		free(t->pages[page]);
	}
	t->pages[page] = NULL;
}

unsigned dq_tracker_bitmap(const struct dq_tracker *t, uint16_t slot, uint64_t *words, unsigned n)
{
	const struct dq_track_slot *s = slot_find(t, slot);
	uint32_t segments, count;

	if (!s || s->state == SLOT_FREE)
		return 0;
	segments = s->total ? s->total : s->seen;
	count = (segments + WORD_BITS - 1) / WORD_BITS;
	for (uint32_t w = 0; w < count && w < n; w++) {
		uint32_t rest = segments - w * WORD_BITS;

		if (s->state == SLOT_COMPLETE)
			words[w] = rest < WORD_BITS ? (1ull << rest) - 1 : UINT64_MAX;
		else if (w < s->base)
			words[w] = UINT64_MAX;
		else if (w - s->base > s->mask)
			words[w] = 0;
		else
			words[w] = s->class ? s->ring[w & s->mask] : s->word;
	}
	return count;
}
