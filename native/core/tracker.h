/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The receiver's slots of one VC: which segments of which incoming message have arrived. Segments come in any order over
 * any QP; a duplicate is counted and ignored; the message is complete when the segment marked `last` and all before it are
 * there. Slots from DQ_SLOT_PUT_BASE on are named by the sender and may see segments before the control message that
 * explains them; slots below must have been armed. One thread.
 *
 * Memory is taken for slots in use only. A slot remembers how far everything has arrived (in words of 64 segments) and
 * the bits beyond that point in a ring of words: one word inside the slot, and 8, 64 or 512 words from pools when segments
 * run further ahead of the first missing one. So a long message whose segments are merely shuffled among its QPs needs no
 * memory besides its slot, and only a peer that leaves holes makes it grow, up to bitmap_limit. A complete message has no
 * ring. Pools and pages keep a few spares, so that the steady state allocates nothing; dq_tracker_trim gives them back.
 */
#ifndef DQ_CORE_TRACKER_H
#define DQ_CORE_TRACKER_H

#include "core/base.h"

enum dq_track {
	DQ_TRACK_NEW,          /* recorded, more to come */
	DQ_TRACK_COMPLETE,     /* recorded, and it was the last one missing */
	DQ_TRACK_DUPLICATE,    /* was here before: ignored */
	DQ_TRACK_UNARMED,      /* nobody announced this slot: the peer breaks the protocol */
	DQ_TRACK_CONFLICT,     /* a second, different `last`, or an index beyond it, or beyond DQ_MAX_SEGMENTS */
	DQ_TRACK_NOMEM,        /* no memory, or bitmap_limit reached; nothing was recorded */
};

#define DQ_TRACK_BITMAP_LIMIT (64u << 20) /* bytes: default of dq_tracker.bitmap_limit */

struct dq_track_slot;
struct dq_track_pools;
struct dq_tracker {
	struct dq_track_slot **pages;  /* 65536 slots in pages, allocated when first used */
	uint64_t duplicates;
	uint64_t segments;
	uint32_t live;                 /* slots armed or with segments */
	uint64_t bitmap_bytes;         /* in rings that slots hold now */
	uint64_t bitmap_limit;         /* most of that; may be changed at any time */
	struct dq_track_pools *pools;  /* private to tracker.c */
};

int dq_tracker_init(struct dq_tracker *t);                   /* 0, -ENOMEM */
void dq_tracker_fini(struct dq_tracker *t);
int dq_tracker_arm(struct dq_tracker *t, uint16_t slot);     /* 0, -EBUSY when it is live, -ENOMEM */
enum dq_track dq_tracker_segment(struct dq_tracker *t, uint16_t slot, uint16_t index, bool last, uint32_t bytes);
bool dq_tracker_complete(const struct dq_tracker *t, uint16_t slot);
uint64_t dq_tracker_bytes(const struct dq_tracker *t, uint16_t slot);  /* received so far, duplicates not counted */
bool dq_tracker_live(const struct dq_tracker *t, uint16_t slot);
void dq_tracker_release(struct dq_tracker *t, uint16_t slot); /* forget it: the slot can be named again; no-op when not live */
/*
 * Bitmap of received segments for STATE, bit i % 64 of word i / 64 for segment i: copies up to n 64-bit words, returns how
 * many the slot has (up to the last segment when that is known, else up to the farthest seen; 0 = none).
 */
unsigned dq_tracker_bitmap(const struct dq_tracker *t, uint16_t slot, uint64_t *words, unsigned n);
void dq_tracker_trim(struct dq_tracker *t);                   /* free all spare memory */

#endif
