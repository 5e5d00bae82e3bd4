/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine: one thread that moves all data of this host between clients (shared-memory rings) and peers (providers).
 * This is its whole control interface, called by the control plane (Python, through cffi).
 *
 * Threads: the engine's own thread runs the loop; every function here may be called from any other thread and is carried out
 * on the engine's thread between two passes of the loop (a call takes tens of microseconds); dq_engine_heartbeat and
 * dq_engine_event_fd only read. Events are queued and fetched with dq_engine_events when the event fd is readable.
 * Errors: 0 or a negative errno with text in *err where there is one. Units: bytes, ns, bits per second.
 */
#ifndef DQ_ENGINE_ENGINE_H
#define DQ_ENGINE_ENGINE_H

#include "core/base.h"
#include "probe/prober.h"

/* cffi: begin */
typedef struct dq_engine dq_engine;

struct dq_text {                    /* same layout as struct dq_error */
	int code;
	char text[252];
};

struct dq_engine_config {
	char host_id[64];
	uint64_t epoch;
	uint32_t spin_us;               /* busy-poll this long after the last work before sleeping; 0 = sleep at once */
	int32_t cpu;                    /* pin to this CPU; -1 = not */
	uint32_t max_clients;
	uint32_t max_flows;
	uint64_t cancel_deadline_ns;    /* a peer that does not answer a cancel for so long has its VC failed; 0 = 500 ms */
	uint64_t stall_ns;              /* outstanding work without progress for so long is a stall; 0 = 1 s */
	uint64_t connect_deadline_ns;   /* for CONNECT of a client; 0 = 30 s */
	uint16_t api_family;            /* address of the host-to-host API, for handles: 4, 6, or 0 = none */
	uint16_t api_port;
	uint8_t api_address[16];
	uint32_t api_scope;
};

struct dq_engine_device_config {
	char name[32];
	char provider[16];
	char address[64];               /* tcp: IP address; verbs: name of the RDMA device */
	char gid[64];                   /* verbs: GID to use, as text */
	char pci_path[160];
	uint64_t rate_bps;              /* 0 = ask the device */
	uint64_t heartbeat_ns;
	uint64_t deadline_ns;
	uint64_t max_registration_bytes; /* verbs: larger registrations are made in pieces; 0 = the device's own limit */
	uint32_t mtu;
	uint16_t port;                  /* tcp: 0 = any; verbs: of the RDMA device, 0 = 1 */
	uint16_t rail;
	int32_t numa_node;
	uint8_t traffic_class;          /* verbs */
	uint8_t service_level;          /* verbs */
	uint8_t reserved[2];
};

struct dq_engine_device {
	char name[32];
	char provider[16];
	char address[64];               /* text: tcp with the real port; verbs: the GID in use */
	uint64_t rate_bps;
	uint64_t max_segment_bytes;
	uint64_t noise_ns;
	uint32_t mtu;
	uint32_t header_bytes;
	uint32_t max_qps;
	uint32_t max_send_depth;
	uint16_t rail;
	uint8_t dmabuf;
	uint8_t up;
	uint32_t vcs;                   /* now */
	uint32_t qps;                   /* now */
	uint32_t memory_regions;        /* now */
	uint64_t grant_budget_bytes;
	uint32_t grant_active;          /* senders with backlog or recent bytes */
	uint32_t reserved;
};

struct dq_link_setting {            /* emulated link; all 0 = none */
	uint64_t delay_ns;
	uint64_t rate_bps;
	uint64_t queue_bytes;
};

struct dq_profile {                 /* as computed by the control plane */
	uint64_t rtt_ns;
	uint64_t rate_bps;
	uint64_t window_bytes;
	uint64_t floor_bytes;
	uint64_t noise_ns;
	uint32_t segment_bytes;
	uint32_t qps;                   /* data QPs used for new segments, at most what the VC has */
	uint32_t outstanding_per_qp;
	uint64_t ack_timeout_ns;        /* of new QPs (verbs): an acknowledgement later than this is asked for again; 0 = default */
	uint32_t retries;               /* of new QPs (verbs): 0..7; after so many the QP fails */
	uint8_t adapt;                  /* window follows the measured delay */
	uint8_t grants;                 /* obey and give grants */
	uint8_t path_class;             /* enum dq_path_class; told to clients of new flows, for their error texts */
	uint8_t reserved;
};

struct dq_vc_limits {               /* negotiated: the smaller of both ends' */
	uint32_t qps;                   /* data QPs */
	uint32_t depth;                 /* segments outstanding per data QP */
	uint32_t credits;               /* control receives */
	uint32_t segment_bytes;         /* largest segment */
};

struct dq_endpoint_blob {
	uint16_t len;
	uint8_t data[96];
};

enum dq_event_type {
	DQ_EV_VC_UP = 1,                /* path, vc */
	DQ_EV_VC_DOWN = 2,              /* path, vc, status, text: failed or closed; it is gone */
	DQ_EV_NEED_VC = 3,              /* need, device, host_id, epoch, rail, address: a client wants to connect there */
	DQ_EV_CLIENT_CUT = 4,           /* client, text: broke the protocol, is being cleaned up; close its socket */
	DQ_EV_CLIENT_GONE = 5,          /* client: everything of it is released */
	DQ_EV_STALL = 6,                /* path, vc, text */
	DQ_EV_DEVICE = 7,               /* device, change, text: something happened to it; status < 0: it cannot be used now */
	DQ_EV_LOG = 8                   /* text; status < 0: error */
};

enum dq_engine_device_change {      /* the same as enum dq_device_change of the provider */
	DQ_CHANGE_UP = 1,
	DQ_CHANGE_DOWN = 2,
	DQ_CHANGE_ADDRESS = 3,          /* the table of GIDs changed: see whether the one in use is still there, and readdress */
	DQ_CHANGE_FATAL = 4,            /* gone for good; its VCs fail */
	DQ_CHANGE_OTHER = 5             /* for the log only */
};

struct dq_engine_event {
	uint32_t type;
	int32_t status;
	uint32_t change;
	uint32_t device;
	uint32_t path;
	uint32_t vc;
	uint32_t client;
	uint32_t need;
	uint16_t rail;
	uint16_t family;                /* 4 or 6, 0 = no address known */
	uint64_t epoch;
	uint16_t port;
	uint8_t address[16];
	uint32_t scope;
	char host_id[64];
	char text[252];
};

struct dq_path_stats {
	uint64_t time_ns;               /* when these were read, CLOCK_MONOTONIC */
	uint64_t tx_bytes, rx_bytes, tx_segments, rx_segments, tx_messages, rx_messages;
	uint64_t duplicates, retransmits, stalls, failures;
	uint64_t inflight_bytes, inflight_peak_bytes;   /* peak since the last dq_engine_path_reset_peaks */
	uint64_t window_bytes;          /* now, after adaptation */
	uint64_t profile_window_bytes;
	uint64_t grant_in_bytes;        /* what the peer lets this host have in flight; UINT64_MAX = not limited */
	uint64_t grant_out_bytes;       /* what this host lets the peer have in flight */
	uint64_t backlog_bytes;         /* waiting to be posted */
	uint64_t queue_delay_ns;        /* smallest of the last round trip */
	uint64_t queue_delay_max_ns;    /* largest such since the last reset */
	uint64_t window_shrinks, window_grows;
	uint64_t window_reroutes;       /* times that a longer path, not a queue, was found behind a longer delay */
	/* Time with backlog when this was what held it back. */
	uint64_t throttled_window_ns, throttled_grant_ns, throttled_qp_ns, throttled_outbound_ns;
	uint64_t control_tx_packets, control_rx_packets;
	uint64_t link_queue_bytes, link_queue_peak_bytes;                  /* of the emulated link */
	uint32_t vcs, qps, flows;
	uint32_t slots_receive, slots_put;                                 /* in use */
	uint32_t receives_waiting;                                         /* posted, but without a slot */
};

struct dq_client_stats {
	char name[64];
	uint32_t flows, listeners, memory_regions, requests;               /* requests: taken and not completed */
	uint32_t slots;
	uint64_t memory_bytes, staging_bytes;
	uint64_t tx_bytes, rx_bytes, tx_messages, rx_messages;
};

struct dq_engine_stats {
	uint64_t loops, sleeps;
	uint64_t clients_cut;           /* clients that broke the protocol */
	uint64_t events_dropped;
	uint32_t clients, flows, vcs, paths;
	uint64_t memory_bytes, staging_bytes;
};

int dq_engine_create(const struct dq_engine_config *cfg, dq_engine **out, struct dq_text *err); /* starts the thread */
void dq_engine_part(dq_engine *e);                    /* cuts clients and peers off, telling them that the daemon stops */
void dq_engine_destroy(dq_engine *e);                 /* cuts clients and peers off, joins the thread, frees everything */
uint64_t dq_engine_heartbeat(dq_engine *e);           /* grows while the loop lives, at least every 500 ms also when idle */
int dq_engine_event_fd(dq_engine *e);
int dq_engine_events(dq_engine *e, struct dq_engine_event *out, uint32_t n);
void dq_engine_get_stats(dq_engine *e, struct dq_engine_stats *out);

int dq_engine_device_add(dq_engine *e, const struct dq_engine_device_config *cfg, uint32_t *device, struct dq_text *err);
int dq_engine_device_get(dq_engine *e, uint32_t device, struct dq_engine_device *out);
/* Use another local address (verbs: GID as text) from now on. The VCs of the device fail with a text that names both; its
 * prober must be started anew by the caller. The address in use: the port is only looked at again, since a change of its MTU
 * is no event. -EOPNOTSUPP: the provider has addresses that cannot change. */
int dq_engine_device_readdress(dq_engine *e, uint32_t device, const char *address, struct dq_text *err);
int dq_engine_device_latency(dq_engine *e, uint32_t device, uint32_t latency_ns); /* smallest RTT measured, for clients */
int dq_engine_prober_start(dq_engine *e, uint32_t device, const struct dq_prober_config *cfg, dq_prober **out, struct dq_text *err);

/* Paths: from a local device to one life (epoch) of a remote host. Needed for probing and for VCs. */
int dq_engine_path_add(dq_engine *e, uint32_t device, const char *host_id, uint64_t epoch,
		       const struct dq_link_setting *link, const struct dq_profile *profile, uint32_t *path, struct dq_text *err);
int dq_engine_path_remove(dq_engine *e, uint32_t path, int32_t status, const char *why); /* fails its VCs; probe targets first */
int dq_engine_path_profile(dq_engine *e, uint32_t path, const struct dq_profile *profile); /* reaches running VCs */
int dq_engine_path_link(dq_engine *e, uint32_t path, const struct dq_link_setting *link);
int dq_engine_path_flow_label(dq_engine *e, uint32_t path, uint32_t *label); /* of its first data QP: for its probes */
void *dq_engine_path_link_handle(dq_engine *e, uint32_t path);  /* for dq_prober_target_set; NULL = none */
int dq_engine_path_stats(dq_engine *e, uint32_t path, struct dq_path_stats *out);
int dq_engine_path_reset_peaks(dq_engine *e, uint32_t path);

/* VCs. Both ends prepare (QPs exist, receives posted), exchange endpoints and limits, then connect; exactly one end dials.
 * endpoints: limits->qps + 1 entries, the control QP first. */
int dq_engine_vc_prepare(dq_engine *e, uint32_t path, const struct dq_vc_limits *limits, uint32_t *vc,
			 struct dq_endpoint_blob *endpoints, struct dq_text *err);
int dq_engine_vc_connect(dq_engine *e, uint32_t vc, const struct dq_vc_limits *negotiated,
			 const struct dq_endpoint_blob *endpoints, uint8_t dial, struct dq_text *err);
int dq_engine_vc_close(dq_engine *e, uint32_t vc, int32_t status, const char *why);
/* The connection a NEED_VC event asked for cannot be made: the waiting clients get status. (Success needs no call.) */
int dq_engine_need_failed(dq_engine *e, uint32_t need, int32_t status);

/* Clients. */
int dq_engine_client_add(dq_engine *e, const char *name, uint32_t ring_entries, uint64_t max_memory_bytes, uint32_t max_flows,
			 uint32_t *client, int *memfd, int *eventfd, uint64_t *memfd_bytes, struct dq_text *err);
int dq_engine_client_remove(dq_engine *e, uint32_t client);     /* begins the clean-up; CLIENT_GONE follows */
int dq_engine_client_handle(dq_engine *e, uint32_t client, uint8_t *handle); /* 128-byte template for the attach reply */
int dq_engine_client_stats(dq_engine *e, uint32_t client, struct dq_client_stats *out);
/* fds returned are the caller's to close (after they were passed on); the engine keeps its own. */
int dq_engine_mem_alloc(dq_engine *e, uint32_t client, uint64_t bytes, uint8_t staging, uint32_t *mem, int *fd,
			uint64_t *mapped_bytes, struct dq_text *err);
int dq_engine_mem_dmabuf(dq_engine *e, uint32_t client, int fd, uint64_t offset, uint64_t bytes, uint32_t *mem, struct dq_text *err);
/* The memory `mem` of client `owner`, made by mem_alloc without staging, for another client, too: a region of its own, that stays
 * when the owner frees its. Whether they may share is the caller's to know. */
int dq_engine_mem_share(dq_engine *e, uint32_t client, uint32_t owner, uint32_t owner_mem, uint32_t *mem, uint64_t *bytes,
			struct dq_text *err);
int dq_engine_mem_free(dq_engine *e, uint32_t client, uint32_t mem);
/* cffi: end */

_Static_assert(sizeof(struct dq_text) == sizeof(struct dq_error), "same layout");

#endif
