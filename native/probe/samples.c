/* SPDX-License-Identifier: Apache-2.0 */
#include "probe/samples.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

int dq_samples_init(struct dq_samples *s, uint32_t size)
{
	memset(s, 0, sizeof *s);
	s->ring = calloc(size, sizeof *s->ring);
	if (!s->ring)
		return -ENOMEM;
	s->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (s->event_fd < 0) {
		int rc = -errno;
		free(s->ring);
		return rc;
	}
	pthread_mutex_init(&s->lock, NULL);
	s->size = size;
	return 0;
}

void dq_samples_destroy(struct dq_samples *s)
{
	pthread_mutex_destroy(&s->lock);
	close(s->event_fd);
	free(s->ring);
}

bool dq_samples_push(struct dq_samples *s, const struct dq_probe_sample *sample)
{
	pthread_mutex_lock(&s->lock);
	bool room = s->count < s->size;
	if (room)
		s->ring[((uint64_t)s->head + s->count++) % s->size] = *sample;
	else
		s->dropped++;
	pthread_mutex_unlock(&s->lock);
	return room;
}

void dq_samples_notify(struct dq_samples *s)
{
	uint64_t one = 1;
	/* Can only fail with EAGAIN, when the counter is full: then it is readable, which is all that is wanted. */
	ssize_t done = write(s->event_fd, &one, sizeof one);
	(void)done;
}

uint32_t dq_samples_drain(struct dq_samples *s, struct dq_probe_sample *out, uint32_t n)
{
	uint32_t taken = 0;
	pthread_mutex_lock(&s->lock);
	while (taken < n && s->count > 0) {
		uint32_t run = DQ_MIN(DQ_MIN(n - taken, s->count), s->size - s->head);
		memcpy(out + taken, s->ring + s->head, run * sizeof *out);
		s->head = (s->head + run) % s->size;
		s->count -= run;
		taken += run;
	}
	if (s->count == 0) {
		uint64_t events;
		ssize_t done = read(s->event_fd, &events, sizeof events); /* EAGAIN: was clear */
		(void)done;
		s->head = 0; /* keep to the same few pages */
	} else {
		dq_samples_notify(s);
	}
	pthread_mutex_unlock(&s->lock);
	return taken;
}

uint64_t dq_samples_dropped(struct dq_samples *s)
{
	pthread_mutex_lock(&s->lock);
	uint64_t dropped = s->dropped;
	pthread_mutex_unlock(&s->lock);
	return dropped;
}
