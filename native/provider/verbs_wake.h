/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long a sleeping thread takes to see a completion, for devices that do not stamp them: what a time read after a sleep is
 * late by. Measured by the thread itself, in the sleeps that it makes anyway, in series of rounds. A round:
 *     a datagram to the own endpoint, polled for            how long its way is
 *     a sleep that a timer ends                             how late that is
 *     a datagram to the own endpoint, slept for             its way and the wake-up
 * The correction is the least time slept for minus the least polled for. Where the datagram is back before it could be waited
 * for (the device is software, and no sleep ends by it), the least lateness of a timer stands in: the same idle CPU and the same
 * scheduler had to be woken. Minima, of the last few series: more than a wake-up always takes must not be taken off.
 *
 * Pure: when to do what, and what follows; the endpoint does it. In simulated time, where waking takes none, it comes out as
 * the few clock readings on the way. One thread.
 */
#ifndef DQ_PROVIDER_VERBS_WAKE_H
#define DQ_PROVIDER_VERBS_WAKE_H

#include "core/base.h"

#define DQ_VERBS_WAKE_ROUNDS 16u            /* of a series */
#define DQ_VERBS_WAKE_SERIES 4u             /* that count */
#define DQ_VERBS_WAKE_SLEEP_NS 60000u       /* slept for a timer */
#define DQ_VERBS_WAKE_SERIES_NS 10000000000ull /* between series */
#define DQ_VERBS_WAKE_LOST_NS 20000000u     /* a datagram to oneself that takes longer is lost */
#define DQ_VERBS_WAKE_MAX_NS 1000000u       /* more is no wake-up but a busy machine: not corrected for */

enum dq_verbs_wake_step {
	DQ_VERBS_WAKE_IDLE,          /* nothing to do before wake->due_ns: dq_verbs_wake_begin */
	DQ_VERBS_WAKE_LOOP,          /* send a datagram to the own endpoint and poll for it: dq_verbs_wake_looped */
	DQ_VERBS_WAKE_TIMER,         /* sleep until wake->due_ns: dq_verbs_wake_timed */
	DQ_VERBS_WAKE_SLEEP,         /* send a datagram to the own endpoint and sleep: dq_verbs_wake_slept */
};

struct dq_verbs_wake {
	uint8_t step;                /* enum dq_verbs_wake_step */
	uint64_t due_ns;
	uint32_t round;
	bool direct;                 /* the datagram is back before it could be waited for */
	uint64_t polled_ns, slept_ns, timer_ns; /* least of this series; DQ_NEVER: none */
	uint64_t series_ns[DQ_VERBS_WAKE_SERIES]; /* what the last ones came to, in a ring; DQ_NEVER: none yet */
	uint32_t series;             /* finished */
	uint64_t correction_ns;
};

void dq_verbs_wake_init(struct dq_verbs_wake *w);
/* Begin a round. */
void dq_verbs_wake_begin(struct dq_verbs_wake *w);
/* The datagram was back after ns; direct: at the first look. DQ_NEVER: it was not seen. now_ns: the sleep for the timer begins. */
void dq_verbs_wake_looped(struct dq_verbs_wake *w, uint64_t ns, bool direct, uint64_t now_ns);
/* The sleep for the timer is over; true: nothing else ended or delayed it. */
void dq_verbs_wake_timed(struct dq_verbs_wake *w, bool undisturbed, uint64_t now_ns);
/* The datagram was seen after the sleep, ns after it was sent; DQ_NEVER: lost, or something else ended the sleep. */
void dq_verbs_wake_slept(struct dq_verbs_wake *w, uint64_t ns, uint64_t now_ns);

#endif
