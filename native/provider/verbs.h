/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Private to the verbs provider (and its tests): its objects and the functions its files call of each other.
 *
 * A device is one context, one protection domain, one completion channel and as many pools as its QPs need. A pool is one
 * completion queue and, where the device has them, one shared receive queue, both of a fixed size; a QP belongs to the pool
 * that had room for all the work it may ever post, so a completion queue never overflows and nothing is ever resized.
 *
 * Data QPs receive nothing but write-with-immediate: their receives have no buffer, so they are all alike and shared.
 * Control QPs have a receive queue of their own.
 *
 * A connection proves itself before it is told as connected. Every end sends an empty packet ("hello"), the passive one in
 * answer; on control QPs a packet of the path MTU ("probe") follows, each way. Small ones that pass where full ones do not
 * mean that something on the way has a smaller MTU than both ends.
 *
 * Threads: as provider.h says. QPs are made and connected by any thread ("the maker") beside the one that polls: what both
 * touch is atomic or under table_lock, and a QP is the maker's alone until `ready` is set, which is the last thing it does
 * before the hello. What the datagram endpoint's thread reads of the device is constant after open, or is read by
 * dq_verbs_port_now().
 */
#ifndef DQ_PROVIDER_VERBS_H
#define DQ_PROVIDER_VERBS_H

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "provider/provider.h"
#include "provider/verbs_load.h"

#define DQ_VERBS_MAX_QPS 16384u
#define DQ_VERBS_MAX_DEPTH 4096u
#define DQ_VERBS_OWN_WRS 4u            /* send queue entries beyond the caller's: hello, probe, heartbeat, farewell */
#define DQ_VERBS_OWN_RECVS 2u          /* receives beyond the caller's: hello, probe */
#define DQ_VERBS_BATCH 32u             /* work requests of one chain, completions of one call */
#define DQ_VERBS_MAX_SGE 4u            /* pieces of memory that one write may cross */
#define DQ_VERBS_INLINE_BYTES 128u
#define DQ_VERBS_SHARED_BYTES 16384u   /* consecutive writes of a chain up to this sum may share a completion */
#define DQ_VERBS_SILENT_HEARTBEATS 3u  /* a heartbeat unanswered for this many heartbeat times: the peer is taken for dead */
#define DQ_VERBS_FENCE_NS 50000000u    /* longest wait for the device to say that no receive follows */
#define DQ_VERBS_MAX_PIECES (1u << 20)
#define DQ_VERBS_EVENTS 32u            /* changes of the device not yet fetched; a power of two */

/* ---- verbs_parts.c: pure functions ---- */

#define DQ_VERBS_ENDPOINT_BYTES 44u
enum dq_verbs_endpoint_kind { DQ_VERBS_ENDPOINT_QP = 1, DQ_VERBS_ENDPOINT_DGRAM = 2 };

/* What an endpoint says. */
struct dq_verbs_peer {
	union ibv_gid gid;
	uint32_t qpn;
	uint32_t psn;                      /* QP: first packet number; 24 bits */
	uint32_t qkey;                     /* datagrams */
	uint16_t lid;                      /* InfiniBand; 0 on RoCE */
	uint8_t mtu;                       /* enum ibv_mtu */
	uint8_t link_layer;                /* IBV_LINK_LAYER_* */
};

void dq_verbs_endpoint_put(struct dq_endpoint *out, enum dq_verbs_endpoint_kind kind, const struct dq_verbs_peer *peer);
/* -EPROTO: not an endpoint of this provider, kind or version, or with values that cannot be. */
int dq_verbs_endpoint_get(const struct dq_endpoint *in, enum dq_verbs_endpoint_kind kind, struct dq_verbs_peer *out,
			  struct dq_error *err);

/* "a.b.c.d", "::ffff:a.b.c.d" or any IPv6 form. 0 or -EINVAL. */
int dq_verbs_gid_parse(const char *text, union ibv_gid *out);
void dq_verbs_gid_format(const union ibv_gid *gid, char *out, size_t size);
/* Index into `entries` of the GID to use, or -1. want: NULL = the first RoCE v2 one that is routable, else link-local;
 * on InfiniBand index 0. Of equal GIDs RoCE v2 comes first. */
int dq_verbs_gid_choose(const struct ibv_gid_entry *entries, unsigned n, uint8_t port, bool infiniband, const union ibv_gid *want);

/* Both of IPv4, both link-local, or neither: others do not reach each other on RoCE. */
bool dq_verbs_gids_alike(const union ibv_gid *a, const union ibv_gid *b);

uint32_t dq_verbs_mtu_bytes(uint8_t mtu);      /* of enum ibv_mtu, 0 = unknown value */
uint8_t dq_verbs_mtu_enum(uint32_t bytes);     /* the largest that fits; below 256: 0 */
/* 4.096 us * 2^n >= ns, n in 1..31; 0 ns = 14, which is 67 ms. */
uint8_t dq_verbs_timeout_exponent(uint64_t ns);
/* Bits per second of a port, 0 = unknown. speed: active_speed_ex, or active_speed where that is 0. */
uint64_t dq_verbs_rate_bps(uint32_t speed, uint8_t width);

/* ---- objects ---- */

struct dq_verbs_list {
	struct dq_verbs_list *prev, *next;     /* next NULL: in no list */
};

struct dq_verbs_qp;
struct dq_verbs_flush;                     /* verbs_flush.c */
struct dq_verbs_reaper;                    /* verbs_mem.c */

/* The port as it is now. */
struct dq_verbs_port {
	union ibv_gid gid;
	char gid_text[64];
	uint32_t gid_index;
	uint32_t gid_type;                     /* enum ibv_gid_type; as in struct ibv_gid_entry */
	uint16_t lid;
	uint8_t mtu;                           /* enum ibv_mtu; of the port and the configuration the smaller */
	bool up;
	uint64_t rate_bps;
};

/* What epfd tells of. */
enum { DQ_VERBS_WATCH_CHANNEL = 0, DQ_VERBS_WATCH_ASYNC = 1 };

struct dq_verbs_cqe {
	struct dq_wc wc;
	struct dq_verbs_qp *qp;
};

struct dq_verbs_pool {
	struct dq_verbs_pool *next;            /* constant: pools are only added, in front */
	struct ibv_cq *cq;
	struct ibv_srq *srq;                   /* NULL: the device has none */
	uint32_t send_room, receive_room;      /* work requests, in all */
	uint32_t send_used;                    /* of them reserved by QPs; under table_lock */
	atomic_uint receive_used;              /* likewise; changed under table_lock */
	atomic_uint srq_added;                 /* receives that a maker put into the shared queue */
	int64_t srq_posted;                    /* with those, at least so many receives are in the shared queue */
	bool armed;                            /* a completion event will come, or came and is not yet taken */

	struct dq_verbs_cqe *ring;             /* completions that had no room in the caller's array; all that may ever be */
	uint32_t ring_mask, ring_head, ring_tail;
};

struct dq_verbs_device {
	struct dq_device_config cfg;           /* port number and times filled in */
	const struct dq_verbs_lib *lib;
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_device_attr attr;
	struct dq_device_attr told;            /* of device_query, but for what `port` has */
	bool infiniband;                       /* link layer; else RoCE */
	bool software;                         /* rxe: the CPU is the device */
	bool last_wqe_event;                   /* it says when a QP in error has taken its last shared receive */
	int epfd;                              /* channel and asynchronous events */

	pthread_mutex_t port_lock;             /* `port` is written by the engine's thread, read by the datagrams' */
	struct dq_verbs_port port;

	uint8_t *scratch;                      /* probes are sent from it and end in it; see verbs_device.c */
	struct ibv_mr *scratch_mr;

	pthread_mutex_t table_lock;            /* for changes of what follows; the thread that polls reads without */
	_Atomic(struct dq_verbs_pool *) pools;
	_Atomic(struct dq_verbs_qp *) *qps;    /* by slot */
	bool *taken;                           /* slots of QPs, also of those in the making */
	uint32_t qps_cap;
	atomic_uint qps_used, qps_high;        /* how many there are, and below which slot all of them are */
	uint32_t generation;
	_Atomic(struct dq_verbs_qp *) *by_qpn; /* hash, open addressing; twice as large as qps_cap */
	uint32_t by_qpn_mask;

	struct dq_wc *out;                     /* of the poll under way */
	unsigned out_left;

	struct dq_verbs_list ending;           /* QPs in error whose last completions are awaited */
	uint64_t now_ns;                       /* of the last time the clock was read */
	uint64_t scan_ns, scan_interval_ns, last_scan_ns;
	uint64_t async_ns;                     /* next look at the asynchronous events */
	uint32_t idle_polls;
	bool look;                             /* the clock is read in the next poll: this thread slept, or will */
	bool happened;                         /* there are asynchronous events */

	struct dq_device_event events[DQ_VERBS_EVENTS];
	uint32_t events_head, events_tail;

	pthread_mutex_t mem_lock;
	struct dq_verbs_list mems;             /* under mem_lock */
	struct dq_verbs_reaper *reaper;
	struct dq_verbs_flush *flush;          /* made when first used */
	uint64_t piece_limit;                  /* largest registration in one piece */
	uint32_t max_sge;
};

struct dq_verbs_mem {
	struct dq_verbs_list node;             /* in dev->mems */
	struct dq_verbs_device *dev;
	uint64_t base;                         /* address of the first byte, as the device sees it */
	uint64_t len;
	uint64_t step;                         /* piece i begins at i * step and is 2 * step long; one piece: len */
	uint32_t pieces;
	struct ibv_mr *mr[];
};

enum dq_verbs_qp_state {
	DQ_VERBS_QP_INIT,
	DQ_VERBS_QP_CONNECTING,
	DQ_VERBS_QP_UP,
	DQ_VERBS_QP_ENDING,                    /* in error; what it received before is still to be taken */
	DQ_VERBS_QP_ERROR,                     /* all told; no queue pair any more */
};

enum dq_verbs_op { DQ_VERBS_WRITE, DQ_VERBS_SEND, DQ_VERBS_HELLO, DQ_VERBS_PROBE, DQ_VERBS_HEARTBEAT, DQ_VERBS_FAREWELL };

struct dq_verbs_sqe {
	uint64_t wr_id;
	uint32_t len;
	uint8_t op;                            /* enum dq_verbs_op */
};

struct dq_verbs_qp {
	struct dq_verbs_list ending_node;
	struct dq_verbs_device *dev;
	struct dq_verbs_pool *pool;
	struct dq_qp_attr attr;
	struct ibv_qp *ib;
	uint32_t slot, generation;
	uint32_t qpn, psn;
	struct dq_verbs_port port;             /* address and MTU at creation */
	uint32_t path_mtu;                     /* bytes, once connecting */
	uint32_t inline_bytes;
	uint32_t send_reserved, receive_reserved; /* of the pool */
	uint32_t receives;                     /* of the own queue, without a buffer: to be kept posted; 0 with a shared one */
	uint32_t receives_posted;
	atomic_bool ready;                     /* the maker is done with it */
	uint8_t state;
	bool dial;
	bool shared;                           /* receives from the pool's shared queue */
	bool hello_sent, hello_done, hello_in, probe_sent, probe_done, probe_in;
	bool last_wqe;                         /* the device said that no receive follows */
	bool broken;                           /* failed while the maker had it; end_status says how */

	struct dq_verbs_sqe *sq;               /* done <= posted, free-running */
	uint32_t sq_mask, sq_done, sq_posted;
	uint32_t sq_own;                       /* of those posted, not the caller's */
	uint32_t sq_unpolled;                  /* completions not yet polled keep their place in the send depth */
	uint64_t *rq;                          /* control: the caller's wr_id, in order */
	uint32_t rq_mask, rq_done, rq_posted, rq_unpolled;

	uint64_t progress_ns;                  /* last completion, or when work became outstanding */
	uint64_t heartbeat_ns;                 /* when the outstanding heartbeat was posted, 0 = none */
	uint64_t connect_ns;                   /* when connecting began */
	uint64_t end_ns;                       /* ENDING: not later than this */
	uint32_t end_vendor;
	uint8_t end_status;                    /* enum dq_wc_status */
};

/* ---- small helpers ---- */

static inline uint32_t dq_verbs_pow2_at_least(uint32_t n)
{
	uint32_t p = 1;
	while (p < n)
		p *= 2;
	return p;
}

static inline uint64_t dq_verbs_now(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static inline void dq_verbs_list_init(struct dq_verbs_list *l) { l->prev = l->next = l; }
static inline bool dq_verbs_list_empty(const struct dq_verbs_list *l) { return l->next == l; }

static inline void dq_verbs_list_add(struct dq_verbs_list *l, struct dq_verbs_list *n)
{
	if (n->next)
		return;
	n->prev = l->prev;
	n->next = l;
	l->prev->next = n;
	l->prev = n;
}

static inline void dq_verbs_list_remove(struct dq_verbs_list *n)
{
	if (!n->next)
		return;
	n->prev->next = n->next;
	n->next->prev = n->prev;
	n->prev = n->next = NULL;
}

static inline struct dq_verbs_device *dq_verbs_device_of(struct dq_device *d) { return (struct dq_verbs_device *)(void *)d; }
static inline const struct dq_verbs_device *dq_verbs_device_of_const(const struct dq_device *d)
{
	return (const struct dq_verbs_device *)(const void *)d;
}
static inline struct dq_verbs_qp *dq_verbs_qp_of(struct dq_qp *q) { return (struct dq_verbs_qp *)(void *)q; }
static inline struct dq_verbs_mem *dq_verbs_mem_of(struct dq_mem *m) { return (struct dq_verbs_mem *)(void *)m; }

/* ---- verbs_device.c ---- */

int dq_verbs_device_open(const struct dq_device_config *cfg, struct dq_device **out, struct dq_error *err);
void dq_verbs_device_close(struct dq_device *dev);
void dq_verbs_device_query(struct dq_device *dev, struct dq_device_attr *out);
/* Port and address as they are now; any thread. */
void dq_verbs_port_now(struct dq_verbs_device *dev, struct dq_verbs_port *out);

/* ---- verbs_gid.c: the address of the port ---- */

/* Read the port anew, and find the GID: want NULL = the configuration's choice. -ENOENT: no such GID, err lists those there are. */
int dq_verbs_port_read(struct dq_verbs_device *dev, const char *want, struct dq_error *err);
/* Read state, rate and MTU of the port anew. One that cannot be asked is down; the rest stays as it was. */
void dq_verbs_port_refresh(struct dq_verbs_device *dev);
int dq_verbs_device_readdress(struct dq_device *dev, const char *address, struct dq_error *err);

/* ---- verbs_event.c: what the device tells by itself ---- */

int dq_verbs_device_event(struct dq_device *dev, struct dq_device_event *out);
/* Take all asynchronous events there are. */
void dq_verbs_async_read(struct dq_verbs_device *dev);

/* ---- verbs_poll.c ---- */

int dq_verbs_device_poll(struct dq_device *dev, struct dq_wc *out, unsigned n);
int dq_verbs_device_arm(struct dq_device *dev);
int dq_verbs_device_event_fd(const struct dq_device *dev);
uint64_t dq_verbs_device_next_deadline(const struct dq_device *dev);
/* The pool for a QP of these depths, made if need be, reserved; its receives are in the shared queue where there is one. Any thread. */
int dq_verbs_pool_reserve(struct dq_verbs_device *dev, uint32_t sends, uint32_t receives, struct dq_verbs_pool **out,
			  struct dq_error *err);
void dq_verbs_pool_release(struct dq_verbs_device *dev, struct dq_verbs_pool *pool, uint32_t sends, uint32_t receives);
void dq_verbs_pools_destroy(struct dq_verbs_device *dev);
/* Take in all that is in the QP's completion queue now. */
void dq_verbs_drain(struct dq_verbs_device *dev, struct dq_verbs_pool *pool);
/* Tell the caller: at once, or when it polls next. */
void dq_verbs_emit(struct dq_verbs_qp *qp, const struct dq_wc *wc);
/* Forget what was not yet polled of the QP. */
void dq_verbs_forget(struct dq_verbs_qp *qp);

/* ---- verbs_qp.c ---- */

int dq_verbs_qp_create(struct dq_device *dev, const struct dq_qp_attr *attr, struct dq_qp **out, struct dq_error *err);
void dq_verbs_qp_endpoint(const struct dq_qp *qp, struct dq_endpoint *out);
int dq_verbs_qp_connect(struct dq_qp *qp, const struct dq_endpoint *peer, bool dial, struct dq_error *err);
void dq_verbs_qp_fence(struct dq_qp *qp);
void dq_verbs_qp_destroy(struct dq_qp *qp);
/* To error: DQ_WC_FAILED with this status follows once all completions are in. Only the first status counts. */
void dq_verbs_qp_fail(struct dq_verbs_qp *qp, enum dq_wc_status status, uint32_t vendor);
/* The QP of a number, or NULL. The thread that polls. */
struct dq_verbs_qp *dq_verbs_qp_by_number(const struct dq_verbs_device *dev, uint32_t qpn);
/* Finish those QPs in error that nothing more can come from. */
void dq_verbs_qp_end_due(struct dq_verbs_device *dev);
/* Deadlines and heartbeats. */
void dq_verbs_qp_scan(struct dq_verbs_qp *qp, uint64_t now);
/* A packet of the handshake was sent or came in: go on, tell when connected. */
void dq_verbs_qp_handshake(struct dq_verbs_qp *qp);

/* ---- verbs_post.c ---- */

int dq_verbs_qp_post_write(struct dq_qp *qp, const struct dq_write *wr, unsigned n);
int dq_verbs_qp_post_send(struct dq_qp *qp, const struct dq_send *wr, unsigned n);
int dq_verbs_qp_post_recv(struct dq_qp *qp, const struct dq_recv *wr, unsigned n);
/* A packet of the provider's own: hello, probe, heartbeat or farewell. 0 or negative errno. */
int dq_verbs_post_own(struct dq_verbs_qp *qp, enum dq_verbs_op op);
/* The hello of the end that dials: the last that its maker does. */
int dq_verbs_post_first(struct dq_verbs_qp *qp, struct dq_error *err);
/* The two receives of a control QP that the handshake ends in; before any of the caller's. */
int dq_verbs_post_own_recvs(struct dq_verbs_qp *qp);
/* Keep the receives of a data QP's own queue posted. */
int dq_verbs_post_blanks(struct dq_verbs_qp *qp);

/* What a work request carries to find its way back: kind 2 bits, slot 20, generation 10, sequence 32. */
enum dq_verbs_wr_kind { DQ_VERBS_WR_SEND = 0, DQ_VERBS_WR_RECV = 1, DQ_VERBS_WR_SHARED = 2 };

static inline uint64_t dq_verbs_wr_id(const struct dq_verbs_qp *qp, enum dq_verbs_wr_kind kind, uint32_t sequence)
{
	return (uint64_t)kind << 62 | (uint64_t)qp->slot << 42 | (uint64_t)(qp->generation & 0x3ffu) << 32 | sequence;
}

/* ---- verbs_mem.c ---- */

int dq_verbs_mem_register(struct dq_device *dev, const struct dq_mem_desc *desc, struct dq_mem **out, struct dq_error *err);
void dq_verbs_mem_deregister(struct dq_mem *mem);
int dq_verbs_mem_key(const struct dq_mem *mem, uint64_t offset, uint64_t len, struct dq_mem_key *out);
int dq_verbs_mem_flush(struct dq_mem *mem, uint64_t offset);
bool dq_verbs_mem_probe_dmabuf(struct dq_verbs_device *dev);
int dq_verbs_mem_start(struct dq_verbs_device *dev, struct dq_error *err);  /* at open */
void dq_verbs_mem_stop(struct dq_verbs_device *dev);                        /* at close: everything deregistered */
/* Registers what the provider itself needs; not in pieces, local access only. */
struct ibv_mr *dq_verbs_mr_make(struct dq_verbs_device *dev, void *addr, size_t len, unsigned access);

/* ---- verbs_flush.c ---- */

/* Read one byte of registered memory by the device. 0 or negative errno. */
int dq_verbs_flush_read(struct dq_verbs_device *dev, uint64_t addr, uint32_t rkey);
void dq_verbs_flush_end(struct dq_verbs_device *dev);

/* ---- verbs_dgram.c: the datagram endpoint ---- */

int dq_verbs_dgram_open(struct dq_device *dev, struct dq_dgram **out, struct dq_error *err);
void dq_verbs_dgram_close(struct dq_dgram *dg);
void dq_verbs_dgram_endpoint(const struct dq_dgram *dg, struct dq_endpoint *out);
int dq_verbs_dgram_send(struct dq_dgram *dg, const struct dq_endpoint *to, uint32_t flow_label, struct dq_link *link, uint64_t id,
			const void *data, uint16_t len);
int dq_verbs_dgram_poll(struct dq_dgram *dg, struct dq_dgram_event *out, unsigned n);
int dq_verbs_dgram_fd(const struct dq_dgram *dg);
uint64_t dq_verbs_dgram_next_deadline(const struct dq_dgram *dg);
const char *dq_verbs_dgram_time_source(const struct dq_dgram *dg);
uint64_t dq_verbs_dgram_correction_ns(const struct dq_dgram *dg);

#endif
