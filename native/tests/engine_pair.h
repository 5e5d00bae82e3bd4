/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For tests of the engine: engines in one process with devices of the provider that the environment names (transport_env.h;
 * tcp on loopback by default), the part of the control plane reduced to what makes VCs, and clients that speak the ring layout
 * directly (so that they can also break it).
 */
#ifndef DQ_TESTS_ENGINE_PAIR_H
#define DQ_TESTS_ENGINE_PAIR_H

#include "engine/engine.h"
#include "shim/layout.h"

struct host {
	dq_engine *engine;
	uint32_t device;
	uint32_t path[4];          /* to each other host of the test, DQ_NONE when there is none */
	char host_id[64];
	uint64_t epoch;
	uint32_t downs;            /* DQ_EV_VC_DOWN seen */
	char down_text[252];
	uint32_t gone;             /* DQ_EV_CLIENT_GONE seen */
	uint32_t cut;              /* DQ_EV_CLIENT_CUT seen */
	char cut_text[252];
};

struct client {
	struct host *host;
	uint32_t id;
	int memfd, eventfd;
	uint64_t bytes;
	uint8_t *map;
	struct dq_control *control;
	struct dq_ring sq, cq;
	uint64_t next_request;
};

struct memory {
	uint32_t id;
	uint8_t *addr;
	uint64_t bytes;
};

void host_start(struct host *h, int end, const char *name, uint64_t deadline_ns); /* end: 0 or 1, of transport_address() */
void host_stop(struct host *h);
/* Add the path from `from` to `to` (and nothing else). */
void host_path(struct host *from, struct host *to, unsigned slot, const struct dq_profile *profile);
void host_connect(struct host *a, unsigned a_slot, struct host *b, unsigned b_slot); /* a VC between them, up when it returns */
void host_events(struct host *h);                         /* take what is there */
bool host_wait(struct host *h, const uint32_t *counter, uint32_t value, int timeout_s); /* until *counter >= value */

void client_attach(struct client *c, struct host *h, const char *name, uint32_t entries, uint64_t max_memory, uint32_t max_flows);
void client_detach(struct client *c);                     /* as when its process ends */
void client_wake_engine(struct client *c);
uint64_t client_submit(struct client *c, struct dq_submission s);       /* its request number */
uint64_t client_connect(struct client *c, const struct dq_handle *h);
/* Next completion; false after timeout_s. */
bool client_next(struct client *c, struct dq_completion *out, int timeout_s);
/* The completion of this request; others before it must not come. */
struct dq_completion client_expect(struct client *c, uint64_t request);
void client_memory(struct client *c, uint64_t bytes, struct memory *m);
struct dq_handle client_listen(struct client *c, uint32_t listener);
/* A flow from a to b: listener, connect, accept. */
void client_flow(struct client *a, struct client *b, uint32_t listener, uint32_t *flow_a, uint32_t *flow_b);

extern const struct dq_profile test_profile;

#endif
