/* SPDX-License-Identifier: Apache-2.0 */
#include "provider/verbs_wake.h"

static void series_begin(struct dq_verbs_wake *w)
{
	w->round = 0;
	w->direct = false;
	w->polled_ns = w->slept_ns = w->timer_ns = DQ_NEVER;
}

void dq_verbs_wake_init(struct dq_verbs_wake *w)
{
	*w = (struct dq_verbs_wake){.step = DQ_VERBS_WAKE_IDLE};
	for (unsigned i = 0; i < DQ_VERBS_WAKE_SERIES; i++)
		w->series_ns[i] = DQ_NEVER;
	series_begin(w);
}

void dq_verbs_wake_begin(struct dq_verbs_wake *w)
{
	w->step = DQ_VERBS_WAKE_LOOP;
}

static void series_end(struct dq_verbs_wake *w)
{
	uint64_t ns = 0; /* the device does not send to itself: nothing is known, and nothing taken off */

	if (w->direct)
		ns = w->timer_ns;
	else if (w->slept_ns != DQ_NEVER && w->polled_ns != DQ_NEVER)
		ns = w->slept_ns > w->polled_ns ? w->slept_ns - w->polled_ns : 0;
	if (ns > DQ_VERBS_WAKE_MAX_NS)
		ns = 0;
	w->series_ns[w->series++ % DQ_VERBS_WAKE_SERIES] = ns;
	w->correction_ns = ns;
	for (unsigned i = 0; i < DQ_VERBS_WAKE_SERIES; i++)
		w->correction_ns = DQ_MIN(w->correction_ns, w->series_ns[i]);
	series_begin(w);
}

static void round_end(struct dq_verbs_wake *w, uint64_t now_ns)
{
	w->step = DQ_VERBS_WAKE_IDLE;
	w->due_ns = now_ns;
	if (++w->round == DQ_VERBS_WAKE_ROUNDS) {
		series_end(w);
		w->due_ns = now_ns + DQ_VERBS_WAKE_SERIES_NS;
	}
}

void dq_verbs_wake_looped(struct dq_verbs_wake *w, uint64_t ns, bool direct, uint64_t now_ns)
{
	w->polled_ns = DQ_MIN(w->polled_ns, ns);
	w->direct |= direct;
	w->step = DQ_VERBS_WAKE_TIMER;
	w->due_ns = now_ns + DQ_VERBS_WAKE_SLEEP_NS;
}

void dq_verbs_wake_timed(struct dq_verbs_wake *w, bool undisturbed, uint64_t now_ns)
{
	if (undisturbed && now_ns >= w->due_ns)
		w->timer_ns = DQ_MIN(w->timer_ns, now_ns - w->due_ns);
	if (w->direct) {
		round_end(w, now_ns);
		return;
	}
	w->step = DQ_VERBS_WAKE_SLEEP;
	w->due_ns = now_ns + DQ_VERBS_WAKE_LOST_NS;
}

void dq_verbs_wake_slept(struct dq_verbs_wake *w, uint64_t ns, uint64_t now_ns)
{
	w->slept_ns = DQ_MIN(w->slept_ns, ns);
	round_end(w, now_ns);
}
