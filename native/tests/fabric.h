/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A deterministic model of a fabric for tests of windows and grants: hosts with a NIC of some rate, one bottleneck queue (a
 * switch port, or the way into a receiver), paths with a base RTT. Everything in virtual time; no random numbers. Segments
 * are stored and forwarded whole. With `grants` the receiver behind the bottleneck splits its budget, and levels and backlog
 * take half an RTT to arrive.
 */
#ifndef DQ_TESTS_FABRIC_H
#define DQ_TESTS_FABRIC_H

#include "core/grant.h"
#include "core/queue.h"
#include "core/window.h"

#define US 1000ull
#define MS 1000000ull
#define GBIT 1000000000ull
#define KIB 1024u

enum { MAX_VCS = 64, MAX_HOSTS = 64, MAX_EVENTS = 1 << 16 };

enum event_kind { EVENT_ARRIVE, EVENT_RECEIVE, EVENT_COMPLETE, EVENT_GRANT, EVENT_BACKLOG, EVENT_CALL };

struct sim;
struct event {
	uint64_t time_ns;
	uint64_t order;          /* ties in order of creation */
	enum event_kind kind;
	uint32_t vc;
	uint32_t bytes;
	uint64_t departure_ns;
	uint64_t level;          /* GRANT, BACKLOG */
	void (*call)(struct sim *s);
};

struct vc {
	struct dq_window window;
	struct dq_grant_member member; /* at the receiver */
	uint32_t host;
	uint32_t segment;
	uint64_t base_ns;        /* of the real path now */
	uint64_t grant;          /* as the sender knows it */
	uint32_t grant_serial;
	bool active;
	bool direct;             /* no bottleneck but the host's NIC */
	uint64_t wake_ns;        /* completions are seen at multiples of this only, 0 = at once */
	uint64_t delivered;
};

struct sim {
	uint64_t now;
	uint64_t orders;
	uint32_t vcs;
	struct vc vc[MAX_VCS];
	struct dq_departure departure[MAX_HOSTS];
	struct dq_queue nic[MAX_HOSTS];
	struct dq_queue bottleneck;
	bool grants_on;
	struct dq_grants grants;
	uint64_t split_ns;       /* when the split is asked again */
	uint64_t queue_sum;      /* bottleneck backlog seen by arrivals, for its mean */
	uint64_t queue_samples;
	uint64_t queue_peak;
	uint32_t events;
	struct event heap[MAX_EVENTS];
};

struct sim *sim_new(uint64_t nic_bps, uint64_t bottleneck_bps); /* free() it */
void sim_at(struct sim *s, struct event e);
void sim_run(struct sim *s, uint64_t until_ns);                 /* begins queue statistics anew */
double measure(struct sim *s, uint64_t ns);                     /* runs; share of the bottleneck's rate that was used */
double mean_queue(const struct sim *s);                         /* bytes, as arrivals of the last run saw it */
/* Numbers of a run, for whoever changes the rules: DQ_SHOW=1. */
void show(const char *what, double used, const struct sim *s, const struct vc *v);

struct vc *vc_add(struct sim *s, uint32_t host, uint64_t base_ns, const struct dq_window_profile *p);
void vc_start(struct sim *s, struct vc *v);                     /* has an endless message from now on */
void vc_stop(struct sim *s, struct vc *v);
void vc_post(struct sim *s, struct vc *v);
/* A profile as the rule makes it: gain x BDP + a segment, in whole segments, rounded up. */
struct dq_window_profile profile_of(uint64_t base_ns, uint64_t rate_bps, uint32_t segment, double gain);

#endif
