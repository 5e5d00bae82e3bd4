/* SPDX-License-Identifier: Apache-2.0 */
#include "provider/verbs_wake.h"

static void series_begin(struct dq_verbs_wake *w)
{
	w->round = 0;
	w->polled_ns = w->slept_ns = DQ_NEVER;
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
	w->step = DQ_VERBS_WAKE_POLL;
}

static void series_end(struct dq_verbs_wake *w)
{
	uint64_t ns = 0;

	if (w->slept_ns != DQ_NEVER && w->polled_ns != DQ_NEVER && w->slept_ns > w->polled_ns)
		ns = w->slept_ns - w->polled_ns;
	if (ns > DQ_VERBS_WAKE_MAX_NS)
		ns = 0;
	w->series_ns[w->series++ % DQ_VERBS_WAKE_SERIES] = ns;
	w->correction_ns = ns;
	for (unsigned i = 0; i < DQ_VERBS_WAKE_SERIES; i++)
		w->correction_ns = DQ_MIN(w->correction_ns, w->series_ns[i]);
	series_begin(w);
}

void dq_verbs_wake_polled(struct dq_verbs_wake *w, uint64_t ns)
{
	w->polled_ns = DQ_MIN(w->polled_ns, ns);
	w->step = DQ_VERBS_WAKE_SLEEP;
}

void dq_verbs_wake_slept(struct dq_verbs_wake *w, uint64_t ns, uint64_t now_ns)
{
	w->slept_ns = DQ_MIN(w->slept_ns, ns);
	w->step = DQ_VERBS_WAKE_IDLE;
	w->due_ns = now_ns;
	/* Some rounds without a datagram: this device sends none to itself, and more would only take time. */
	const bool hopeless = ++w->round >= DQ_VERBS_WAKE_HOPE && w->polled_ns == DQ_NEVER && w->slept_ns == DQ_NEVER;
	if (w->round < DQ_VERBS_WAKE_ROUNDS && !hopeless)
		return;
	series_end(w);
	w->due_ns = now_ns + DQ_VERBS_WAKE_SERIES_NS;
}
