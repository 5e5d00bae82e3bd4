/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Results on their way to the control plane: a bounded ring between two threads, with an event fd that is readable while
 * samples wait. When it is full the new sample is dropped and counted.
 */
#ifndef DQ_PROBE_SAMPLES_H
#define DQ_PROBE_SAMPLES_H

#include <pthread.h>

#include "probe/prober.h"

struct dq_samples {
	pthread_mutex_t lock;
	struct dq_probe_sample *ring;
	uint32_t size, head, count;
	uint64_t dropped;
	int event_fd;
};

int dq_samples_init(struct dq_samples *s, uint32_t size);  /* 0, or negative errno: size stays 0, nothing is to be destroyed */
void dq_samples_destroy(struct dq_samples *s);
/* Whether there was room. The reader is woken only by dq_samples_notify, so that one wake-up serves many. */
bool dq_samples_push(struct dq_samples *s, const struct dq_probe_sample *sample);
void dq_samples_notify(struct dq_samples *s);
/* Oldest first, at most n; how many. The event fd stays readable when some are left, also if the caller has read it. */
uint32_t dq_samples_drain(struct dq_samples *s, struct dq_probe_sample *out, uint32_t n);
uint64_t dq_samples_dropped(struct dq_samples *s);

#endif
