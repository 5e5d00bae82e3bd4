/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An emulated link in virtual time: one-way delay, rate and queue of the path from this host to one peer, shared by all QPs
 * and probes that go there. The arithmetic is core/queue.h, the same that the simulator uses; here is only the lock that
 * lets the engine's and the prober's thread share it. For laboratories and the demo; real deployments have none.
 */
#ifndef DQ_PROVIDER_LINK_H
#define DQ_PROVIDER_LINK_H

#include "core/base.h"

struct dq_link_config {
	uint64_t delay_ns;           /* one way */
	uint64_t rate_bps;           /* 0 = unlimited */
	uint64_t queue_bytes;        /* what the emulated switch queue holds; beyond it the sender waits (as with PFC); 0 = unlimited */
};

struct dq_link_stats {
	uint64_t bytes;              /* sent through it */
	uint64_t queue_bytes;        /* now */
	uint64_t queue_peak_bytes;   /* since the last dq_link_reset_peak */
};

struct dq_link;

int dq_link_create(const struct dq_link_config *cfg, struct dq_link **out);
void dq_link_destroy(struct dq_link *link);
void dq_link_configure(struct dq_link *link, const struct dq_link_config *cfg); /* what is under way keeps its times */
/* Virtual arrival time at the far end of `bytes` handed to the link at now_ns. priority: delay only, no queue (acknowledgements, control). */
uint64_t dq_link_send(struct dq_link *link, uint64_t now_ns, uint32_t bytes, bool priority);
void dq_link_stats(struct dq_link *link, uint64_t now_ns, struct dq_link_stats *out);
void dq_link_reset_peak(struct dq_link *link);

#endif
