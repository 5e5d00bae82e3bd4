/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The clock of a NIC that stamps completions: a counter of `mask + 1` values at some kHz, as nanoseconds that do not wrap.
 * They begin near CLOCK_MONOTONIC and go by the NIC's rate from there on. Pure. One thread.
 */
#ifndef DQ_PROVIDER_VERBS_CLOCK_H
#define DQ_PROVIDER_VERBS_CLOCK_H

#include "core/base.h"

struct dq_verbs_clock {
	uint64_t mask;
	uint64_t khz;
	uint64_t raw;                /* newest reading */
	int64_t ticks;               /* from the first reading to it */
	uint64_t read_ns;            /* software time when it was read */
	uint64_t begin_ns;           /* software time of the first */
	bool begun;
};

/* -EINVAL: mask is not 2^n - 1 of at least 24 bits, or the rate is not between 1 kHz and 100 GHz. */
int dq_verbs_clock_init(struct dq_verbs_clock *c, uint64_t mask, uint64_t khz);
/*
 * A reading in nanoseconds. Readings need not come in order: one less than half a turn behind the newest is before it.
 * now_ns: software time of reading it, by which whole turns that passed unseen are counted; half a turn off is right enough.
 */
uint64_t dq_verbs_clock_ns(struct dq_verbs_clock *c, uint64_t raw, uint64_t now_ns);

#endif
