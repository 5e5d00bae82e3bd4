/* SPDX-License-Identifier: Apache-2.0 */
#include "provider/link.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "core/queue.h"

struct dq_link {
	pthread_mutex_t lock;
	struct dq_link_config cfg;
	struct dq_queue queue;
	uint64_t last_ns;         /* the queue wants non-decreasing times, and two threads read the clock */
	uint64_t last_arrival_ns; /* a shorter delay set while bytes are under way must not let later ones overtake */
	uint64_t bytes;
};

int dq_link_create(const struct dq_link_config *cfg, struct dq_link **out)
{
	struct dq_link *link = calloc(1, sizeof *link);
	if (!link)
		return -ENOMEM;
	int rc = pthread_mutex_init(&link->lock, NULL);
	if (rc) {
		free(link);
		return -rc;
	}
	link->cfg = *cfg;
	dq_queue_init(&link->queue, cfg->rate_bps, cfg->queue_bytes);
	*out = link;
	return 0;
}

void dq_link_destroy(struct dq_link *link)
{
	if (!link)
		return;
	pthread_mutex_destroy(&link->lock);
	free(link);
}

void dq_link_configure(struct dq_link *link, const struct dq_link_config *cfg)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	uint64_t now = (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;

	pthread_mutex_lock(&link->lock);
	link->last_ns = DQ_MAX(link->last_ns, now);
	link->cfg = *cfg;
	dq_queue_set_rate(&link->queue, link->last_ns, cfg->rate_bps, cfg->queue_bytes);
	pthread_mutex_unlock(&link->lock);
}

uint64_t dq_link_send(struct dq_link *link, uint64_t now_ns, uint32_t bytes, bool priority)
{
	uint64_t arrival;

	pthread_mutex_lock(&link->lock);
	link->bytes += bytes;
	if (priority) {
		arrival = now_ns + link->cfg.delay_ns;
	} else {
		link->last_ns = DQ_MAX(link->last_ns, now_ns);
		arrival = dq_queue_push(&link->queue, link->last_ns, bytes) + link->cfg.delay_ns;
		arrival = DQ_MAX(arrival, link->last_arrival_ns);
		link->last_arrival_ns = arrival;
	}
	pthread_mutex_unlock(&link->lock);
	return arrival;
}

void dq_link_stats(struct dq_link *link, uint64_t now_ns, struct dq_link_stats *out)
{
	pthread_mutex_lock(&link->lock);
	out->bytes = link->bytes;
	out->queue_bytes = dq_queue_backlog(&link->queue, now_ns);
	out->queue_peak_bytes = link->queue.peak_bytes;
	pthread_mutex_unlock(&link->lock);
}

void dq_link_reset_peak(struct dq_link *link)
{
	pthread_mutex_lock(&link->lock);
	link->queue.peak_bytes = 0;
	pthread_mutex_unlock(&link->lock);
}
