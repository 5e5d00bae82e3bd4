/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The prober of one device: measures round trip times with the two-ACK exchange over the device's datagram endpoint, and
 * answers the probes of known peers. One thread of its own; it sleeps until the next probe is due or a datagram comes.
 *
 * Exchange (six time stamps, no common clock):
 *     T1 software post, T2 PROBE left, T3 PROBE came in at the responder, T4 ACK1 left there, T5 ACK1 came in, T6 software
 *     ACK2 carries T4 - T3.       network RTT = (T5 - T2) - (T4 - T3)      responder delay = T4 - T3
 *                                 prober delay = (T6 - T1) - (T5 - T2)
 * ACK1 and ACK2 are accepted in either order, within the timeout, once.
 *
 * Tokens: every packet shows the token of the host that receives it, acknowledgements too. So a peer is measured only when
 * it has been told this host's token as well (both learn in hello); what does not show it, or comes from an endpoint that is
 * no target, is counted and not answered.
 *
 * Threads: functions may be called from any one thread at a time; results are handed over in a ring with an event fd.
 * Errors: negative errno; -EINVAL: id or endpoint size out of range, -ERANGE: interval (0 or at least 1 ms) or phase out of
 * range, -ENOENT: no such target, -EAGAIN: too many extra probes wait.
 */
#ifndef DQ_PROBE_PROBER_H
#define DQ_PROBE_PROBER_H

#include "core/base.h"
#include "provider/provider.h"

/* cffi: begin */
typedef struct dq_prober dq_prober;

enum dq_probe_result {
	DQ_PROBE_OK = 0,
	DQ_PROBE_TIMEOUT = 1,     /* no ACK in time: loss */
	DQ_PROBE_SEND_ERROR = 2,  /* could not be sent */
	DQ_PROBE_INVALID = 3      /* answered, but the times are impossible (negative): not a loss */
};

struct dq_prober_config {
	uint64_t timeout_ns;          /* 0 = 1 s */
	uint64_t token;               /* of this host for this device, random, not 0: peers must show it; told to them in hello */
	uint32_t answers_per_second;  /* most answers to one source; 0 = 1000 */
	uint32_t max_targets;         /* 0 = 65536 */
	uint32_t ring_samples;        /* results kept until drained; 0 = 65536; more are dropped and counted */
	uint32_t reserved;
};

struct dq_probe_sample {
	uint32_t target;
	uint32_t result;              /* enum dq_probe_result */
	uint64_t time_ns;             /* CLOCK_MONOTONIC when the probe was posted */
	int64_t rtt_ns;
	int64_t responder_delay_ns;
	int64_t prober_delay_ns;
};

struct dq_prober_stats {
	uint64_t sent, acked, timeouts, send_errors, invalid;
	uint64_t late;                /* probes answered after they had timed out */
	uint64_t answered;            /* probes of peers */
	uint64_t refused_token, refused_unknown, refused_rate;
	uint64_t malformed;           /* datagrams: not a probe packet, or an answer to what was not asked */
	uint64_t samples_dropped;
	uint64_t correction_ns;       /* taken off the times of what comes in, for waking up; 0 where the system or NIC stamps */
	uint32_t targets;
	uint32_t reserved;
};

/* Start. dev belongs to the engine and must outlive the prober. */
int dq_prober_stop(dq_prober *p);   /* joins the thread and frees it */
/* Endpoint of this prober, to be told in hello: bytes written to out (at most 96), or negative errno. */
int dq_prober_endpoint(dq_prober *p, uint8_t *out);
/* Add or change a peer: answered from now on; probed every interval_ns (0 = only answered), the first time after phase_ns.
 * flow_label: of the data QP whose way probes and answers shall take, 20 bits. link: emulated link towards it (of its path) or NULL; must stay until the target is removed. id: the caller's, < max_targets. */
int dq_prober_target_set(dq_prober *p, uint32_t id, const uint8_t *endpoint, uint32_t endpoint_bytes, uint64_t token,
			 uint32_t flow_label, void *link, uint64_t interval_ns, uint64_t phase_ns);
/* When it returns, link is used no more, and no sample is made for id until it is set again; those made before may still
 * wait in the ring: drain them before the id is used for another peer. */
int dq_prober_target_remove(dq_prober *p, uint32_t id);
int dq_prober_once(dq_prober *p, uint32_t id);            /* one extra probe now */
int dq_prober_event_fd(dq_prober *p);                     /* readable (eventfd) while samples wait; dq_prober_drain clears it */
int dq_prober_drain(dq_prober *p, struct dq_probe_sample *out, uint32_t n); /* how many */
void dq_prober_stats(dq_prober *p, struct dq_prober_stats *out);
const char *dq_prober_time_source(dq_prober *p);          /* "completion", "kernel", "software", "virtual" */
/* cffi: end */

int dq_prober_start(const struct dq_provider *provider, struct dq_device *dev, const struct dq_prober_config *cfg,
		    dq_prober **out, struct dq_error *err);

#endif
