/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long a sleeping thread takes to see what ends its sleep, for devices that do not stamp completions: what a time read after
 * a sleep is late by. Measured by the thread itself, in series of rounds: a datagram to the own endpoint is polled for, in a
 * bounded loop, and another one slept for. The correction is the least time that it took when slept for, minus the least when
 * polled for. The least of the last few series counts: more than waking up always takes must not be taken off.
 *
 * Where the device does not send to itself, nothing is known, and the correction is 0. Where it is software, the datagram is there
 * before the sleep begins: what is measured is the way through the system calls, without the scheduler; less than the truth. In
 * simulated time, where waking takes none, a few readings of the clock are left.
 *
 * Pure: what to do next, and what follows from it; the endpoint does it. One thread.
 */
#ifndef DQ_PROVIDER_VERBS_WAKE_H
#define DQ_PROVIDER_VERBS_WAKE_H

#include "core/base.h"

#define DQ_VERBS_WAKE_ROUNDS 16u            /* of a series */
#define DQ_VERBS_WAKE_HOPE 3u               /* rounds without any datagram that end a series */
#define DQ_VERBS_WAKE_SERIES 4u             /* that count */
#define DQ_VERBS_WAKE_SERIES_NS 10000000000ull /* between series */
#define DQ_VERBS_WAKE_MAX_NS 1000000u       /* more is no wake-up but a busy machine: not corrected for */

enum dq_verbs_wake_step {
	DQ_VERBS_WAKE_IDLE,          /* nothing to do before wake->due_ns: dq_verbs_wake_begin */
	DQ_VERBS_WAKE_POLL,          /* poll for it: dq_verbs_wake_polled */
	DQ_VERBS_WAKE_SLEEP,         /* sleep for it: dq_verbs_wake_slept */
};

struct dq_verbs_wake {
	uint8_t step;                /* enum dq_verbs_wake_step */
	uint32_t round;
	uint64_t due_ns;
	uint64_t polled_ns, slept_ns; /* least of this series; DQ_NEVER: none */
	uint64_t series_ns[DQ_VERBS_WAKE_SERIES]; /* what the last ones came to, in a ring; DQ_NEVER: none yet */
	uint32_t series;             /* finished */
	uint64_t correction_ns;
};

void dq_verbs_wake_init(struct dq_verbs_wake *w);
void dq_verbs_wake_begin(struct dq_verbs_wake *w);
/* It came after ns; DQ_NEVER: it was not seen. */
void dq_verbs_wake_polled(struct dq_verbs_wake *w, uint64_t ns);
/* It came and ended the sleep after ns; DQ_NEVER: it did not come, or something else ended or delayed the sleep. */
void dq_verbs_wake_slept(struct dq_verbs_wake *w, uint64_t ns, uint64_t now_ns);

#endif
