/* SPDX-License-Identifier: Apache-2.0 */
/* Inside of the engine: its objects, and what its files call of each other. Everything here runs on the engine's thread,
 * except where said otherwise. */
#ifndef DQ_ENGINE_PRIVATE_H
#define DQ_ENGINE_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "core/map.h"
#include "core/vc.h"
#include "engine/engine.h"
#include "provider/link.h"
#include "provider/provider.h"
#include "shim/layout.h"

#define ENG_MAX_DEVICES 32u
#define ENG_BATCH 16u           /* writes given to the provider at a time, per QP */
#define ENG_WC_BATCH 64
#define ENG_SQ_BUDGET 256u      /* submissions of one client in one pass */
#define ENG_RUN_BUDGET 64u      /* segments of one VC in one pass */
#define ENG_TICK_NS 20000000ull /* deadlines are looked at so often while something may expire */
#define ENG_IDLE_NS 400000000ull
#define ENG_WAKE_NS 25000ull    /* while there is work, a client is woken at most so often */
#define ENG_LISTEN_BACKLOG 16384u

struct eng_device {
	char name[32];
	char pci_path[160];
	const struct dq_provider *provider;
	struct dq_device *dev;
	struct dq_device_attr attr;
	struct dq_departure departure;
	struct dq_grants grants;
	uint64_t grants_due_ns;
	uint32_t latency_ns;
	uint16_t rail;
	int32_t numa_node;
	uint32_t vcs, qps, regions;
};

struct eng_path {
	uint32_t device;
	char host_id[DQ_HOST_ID_MAX];
	uint64_t epoch;
	struct dq_link *link;
	struct dq_link_setting setting;
	struct dq_profile profile;
	uint32_t label_seed;            /* eng_flow_label */
	uint32_t vcs;                   /* list of struct eng_vc, through next_in_path */
	struct dq_path_stats past;      /* of VCs that are gone */
};

struct eng_vc;
struct eng_qp {                         /* ctx of a QP */
	struct eng_vc *vc;
	struct dq_qp *qp;
	uint32_t pending;               /* in batch */
	struct dq_write *batch;         /* ENG_BATCH, data QPs only */
};

enum eng_vc_state { ENG_VC_PREPARED, ENG_VC_CONNECTING, ENG_VC_UP };

struct eng_vc {
	struct dq_vc core;              /* valid from CONNECTING on */
	struct dq_engine *engine;
	uint32_t id, path, device, next_in_path;
	enum eng_vc_state state;
	struct dq_vc_limits limits;
	uint32_t nqps;                  /* with the control QP */
	uint32_t connected;
	struct eng_qp *qps;             /* [0] control */
	uint64_t deadline_ns;           /* of connecting */
	uint8_t *buffers;               /* credits receive buffers, then credits send buffers */
	size_t buffers_bytes;
	struct dq_mem *buffers_mem;
	uint16_t *free_sends;           /* stack of free send buffers */
	uint32_t free_send_count;
	bool running;                   /* on the run list */
	uint32_t next_run;
	bool held;                      /* another thread works on its QPs: it is not freed meanwhile */
	bool failing;                   /* on the fail list, or will be when it is no more held */
	uint32_t next_failing;
	int32_t fail_status;
	char why[200];
};

struct eng_mem {
	uint32_t client;
	uint32_t prev, next;            /* of the client */
	uint8_t *addr;
	uint64_t bytes;                 /* usable */
	uint64_t mapped;
	int fd;                         /* memfd, -1 for dma-buf */
	struct dq_mem *on[ENG_MAX_DEVICES];
	uint32_t refs;                  /* operations and exports */
	bool dead;                      /* the client freed it; goes when refs is 0 */
	bool staging;
};

struct eng_client {
	uint32_t id;
	char name[64];
	bool dying;
	int memfd, eventfd;
	uint8_t *map;
	size_t map_bytes;
	struct dq_control *control;     /* in the map: hostile */
	struct dq_ring sq, cq;
	uint32_t entries;
	uint32_t inflight;              /* taken, not completed */
	bool wake;                      /* completions were produced since it was woken */
	uint64_t woken_ns;
	uint32_t flows_head, flow_count, max_flows;
	uint32_t mems_head, mem_count;
	uint32_t listeners_head, listener_count;
	uint64_t mem_bytes, staging_bytes, max_mem_bytes;
	uint64_t tx_bytes, rx_bytes, tx_messages, rx_messages;
};

struct eng_listener {
	uint32_t client, id, device;
	uint32_t prev, next;            /* of the client */
	uint64_t nonce[2];
	uint32_t incoming_head, incoming_tail, incoming_count; /* flows, through user_next/user_prev */
	uint32_t accepts_head, accepts_tail;                   /* struct eng_accept */
};

struct eng_accept {
	uint32_t next;
	uint64_t request;
};

struct eng_connect {                    /* a client's CONNECT under way */
	uint32_t client;
	uint64_t request;
	uint64_t deadline_ns;
	uint32_t device;
	uint32_t need;                  /* waits for a VC, or DQ_NONE */
	uint32_t flow;                  /* waits for the peer's answer, or DQ_NONE */
	struct dq_handle handle;
};

struct eng_need {                       /* a VC is asked of the control plane */
	uint32_t device;
	uint64_t epoch;
	char host_id[DQ_HOST_ID_MAX];
};

struct eng_call {                       /* a function to run on the engine's thread; lives on the caller's stack */
	void (*fn)(struct dq_engine *e, void *arg);
	void *arg;
	bool done;
	struct eng_call *next;
};

struct dq_engine {
	struct dq_engine_config config;
	pthread_t thread;
	_Atomic uint64_t heartbeat;

	pthread_mutex_t making;         /* held over vc_prepare, vc_connect and path_remove; before lock */
	pthread_mutex_t lock;           /* calls, events */
	pthread_cond_t answered;
	struct eng_call *calls_head, **calls_tail;
	_Atomic bool calls_pending;
	bool stopped;                   /* under lock: no more calls */
	int wake_fd, epoll_fd;

	struct dq_engine_event *events; /* ring, under lock */
	uint32_t events_head, events_count;
	int events_fd;
	uint64_t events_dropped;

	bool stop;
	bool parted;                    /* dq_engine_part: clients are cut off for no fault of theirs */
	uint64_t now_ns;                /* of this pass */
	uint64_t tick_ns;
	uint64_t spin_until_ns;
	uint64_t loops, sleeps, clients_cut;
	bool no_pwait2;

	struct eng_device devices[ENG_MAX_DEVICES];
	uint32_t device_count;
	struct dq_pools pools;
	struct dq_slab paths, vcs, clients, mems, listeners, accepts, connects, needs;
	struct dq_map listener_map;     /* client << 32 | id */
	uint32_t run_head, run_tail;
	uint32_t fail_head;
	uint64_t mem_bytes, staging_bytes;
};

static inline struct eng_client *eng_client_at(struct dq_engine *e, uint32_t i) { return dq_slab_at(&e->clients, i); }
static inline struct eng_vc *eng_vc_at(struct dq_engine *e, uint32_t i)
{
	struct eng_vc **p = dq_slab_at(&e->vcs, i);
	return p ? *p : NULL;
}
static inline struct eng_path *eng_path_at(struct dq_engine *e, uint32_t i) { return dq_slab_at(&e->paths, i); }
static inline struct eng_mem *eng_mem_at(struct dq_engine *e, uint32_t i) { return dq_slab_at(&e->mems, i); }

/* engine.c */
uint64_t eng_clock_ns(void);
int eng_call(struct dq_engine *e, void (*fn)(struct dq_engine *, void *), void *arg); /* any other thread; 0 or -ESHUTDOWN */
void eng_event(struct dq_engine *e, const struct dq_engine_event *ev);
int eng_error(struct dq_text *err, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* vcs.c */
extern const struct dq_vc_ops eng_vc_ops;
void eng_vc_touch(struct dq_engine *e, struct eng_vc *vc);              /* run it in this pass */
void eng_vc_fail(struct dq_engine *e, struct eng_vc *vc, int32_t status, const char *fmt, ...)
	__attribute__((format(printf, 4, 5)));                          /* soon: after the batch of completions at hand */
void eng_vc_reap(struct dq_engine *e);                                  /* carry out what eng_vc_fail noted */
void eng_vc_run_all(struct dq_engine *e);
void eng_vc_completions(struct dq_engine *e, const struct dq_wc *wc, int n);
void eng_vc_tick(struct dq_engine *e);
void eng_vc_profile_of(const struct dq_profile *p, struct dq_window_profile *out);
struct eng_vc *eng_vc_of(struct dq_vc *core);

/* paths.c */
uint32_t eng_flow_label(uint32_t seed, uint32_t qp);                    /* of a QP of a path, control is 0: distinct ones */
uint32_t eng_path_find(struct dq_engine *e, uint32_t device, const char *host_id, uint64_t epoch);
void eng_path_account(struct dq_engine *e, struct eng_vc *vc);          /* keep the counters of a VC that goes */

/* memory.c */
void eng_mem_ref(struct dq_engine *e, uint32_t mem);
void eng_mem_unref(struct dq_engine *e, uint32_t mem);
void eng_mem_kill(struct dq_engine *e, uint32_t mem);                   /* the client has freed it, or is gone */

/* clients.c */
void eng_client_complete(struct dq_engine *e, struct eng_client *c, const struct dq_completion *cq);
void eng_client_fail_request(struct dq_engine *e, struct eng_client *c, uint64_t request, int32_t status);
bool eng_client_poll(struct dq_engine *e, struct eng_client *c);        /* take submissions; true when there were some */
bool eng_client_poll_all(struct dq_engine *e);
void eng_client_wake_all(struct dq_engine *e, bool idle); /* who has completions: all when idle, else those not woken lately */
void eng_client_cut(struct dq_engine *e, struct eng_client *c, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
void eng_client_leave(struct dq_engine *e, struct eng_client *c);       /* begin the clean-up */
void eng_client_settle(struct dq_engine *e, struct eng_client *c);      /* finish it when nothing of it is left */
void eng_client_add_flow(struct dq_engine *e, struct eng_client *c, uint32_t flow);
void eng_flow_close(struct dq_engine *e, uint32_t flow, int32_t reason); /* of a client, in any state but INCOMING */
void eng_client_asleep(struct dq_engine *e, bool asleep);
bool eng_client_pending(struct dq_engine *e);                           /* is any submission waiting? (before sleeping) */

/* connections.c */
void eng_listen(struct dq_engine *e, struct eng_client *c, const struct dq_submission *s);
void eng_unlisten(struct dq_engine *e, struct eng_client *c, const struct dq_submission *s);
void eng_accept(struct dq_engine *e, struct eng_client *c, const struct dq_submission *s);
void eng_connect(struct dq_engine *e, struct eng_client *c, const struct dq_submission *s, const struct dq_handle *h);
void eng_connections_of_client_gone(struct dq_engine *e, struct eng_client *c);
void eng_flow_incoming(struct dq_engine *e, struct eng_vc *vc, uint32_t flow, const struct dq_message *open);
void eng_flow_opened(struct dq_engine *e, uint32_t flow, int32_t status);
void eng_flow_gone(struct dq_engine *e, uint32_t flow);
void eng_connections_vc_up(struct dq_engine *e, struct eng_vc *vc);
void eng_connections_tick(struct dq_engine *e);

#endif
