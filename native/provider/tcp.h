/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Private to the tcp provider (and its tests): its objects and the functions its files call of each other.
 *
 * A device is one listener, one epoll instance and one completion queue; a QP is one TCP connection. All sockets are
 * non-blocking and watched edge-triggered; a QP whose socket may hold input stays in dev->rx until the socket is empty, one
 * that can send stays in dev->tx, one that waits for the release time of an emulated link stays in dev->timed. So a busy
 * device needs no system call but those that move data.
 */
#ifndef DQ_PROVIDER_TCP_H
#define DQ_PROVIDER_TCP_H

#include <netinet/in.h>
#include <sys/socket.h>
#include <time.h>

#include "provider/link.h"
#include "provider/provider.h"
#include "provider/tcp_frame.h"

#define DQ_TCP_MAX_QPS 4096u
#define DQ_TCP_MAX_DEPTH 4096u
#define DQ_TCP_PENDING_MAX 256u        /* accepted connections that have not said hello; beyond it the oldest is closed */
#define DQ_TCP_RX_BUFFER 8192u         /* headers and small payloads are read together; larger ones go straight into place */
#define DQ_TCP_SILENT_HEARTBEATS 3u    /* unanswered for this many heartbeat times: the peer is taken for dead */

struct dq_tcp_list {
	struct dq_tcp_list *prev, *next;   /* next NULL: in no list */
};

struct dq_tcp_qp;

struct dq_tcp_cqe {
	struct dq_wc wc;
	struct dq_tcp_qp *qp;
};

/* A connection that was accepted and has not (rightly) said which QP it belongs to. */
struct dq_tcp_pending {
	struct dq_tcp_list node;           /* in dev->pending, oldest first */
	uint64_t deadline_ns;
	uint32_t generation;
	uint32_t fill;
	int fd;                            /* -1: free */
	uint8_t hello[DQ_TCP_HELLO_BYTES];
};

struct dq_tcp_stats {
	uint64_t accepted;
	uint64_t refused_hello;            /* wrong magic, version, QP or token */
	uint64_t refused_silent;           /* closed, or said nothing before the deadline */
	uint64_t refused_flood;            /* pushed out by newer ones, or no file descriptor left */
	uint64_t bad_frames;               /* QPs failed because of what the peer sent */
	uint64_t access_violations;
};

struct dq_tcp_device {
	struct dq_device_config cfg;
	struct sockaddr_storage addr;      /* the real one, with the port */
	socklen_t addr_len;
	int epfd;
	int listen_fd;
	bool listener_off;                 /* not watched until the next scan */
	int spare_fd;                      /* given up for a moment to accept and close when descriptors run out */
	bool dmabuf;

	struct dq_tcp_mem **mems;          /* by slot */
	uint32_t mems_cap;
	uint32_t mems_free;                /* first slot that may be free */

	struct dq_tcp_qp **qps;            /* by number */
	uint32_t qps_cap;
	uint32_t qps_used;
	uint32_t generation;

	struct dq_tcp_cqe *cq;             /* ring */
	uint32_t cq_mask, cq_head, cq_tail;
	uint32_t cq_reserve;               /* entries kept for what must never be held back */
	uint32_t cq_segments;              /* entries for segments on top of it */

	struct dq_tcp_list rx, tx, timed, pending;
	struct dq_tcp_pending *pending_slots;
	uint32_t pending_used;

	uint64_t now_ns;                   /* of the poll under way */
	uint64_t scan_ns;                  /* next look at deadlines and heartbeats */
	uint64_t scan_interval_ns;
	uint64_t last_scan_ns;
	uint64_t release_ns;               /* earliest release in timed, or sooner; DQ_NEVER */
	uint32_t ticks;

	struct dq_tcp_stats stats;
};

struct dq_tcp_mem {
	struct dq_tcp_device *dev;
	uint8_t *base;
	uint64_t len;
	uint64_t key;                      /* random, its low bits are the slot */
	unsigned access;
	uint32_t uses;                     /* posted work, and payload being received */
	void *map;                         /* dma-buf only */
	size_t map_len;
	int fd;                            /* dma-buf, else -1 */
};

enum dq_tcp_qp_state {
	DQ_TCP_QP_INIT,
	DQ_TCP_QP_WAIT,                    /* passive: for the peer's connection */
	DQ_TCP_QP_DIAL,                    /* connect() under way */
	DQ_TCP_QP_HELLO,                   /* hello sent, answer awaited */
	DQ_TCP_QP_UP,
	DQ_TCP_QP_ERROR,
};

struct dq_tcp_wr {                     /* a posted write or send; its header as it goes out */
	uint8_t header[DQ_TCP_HEADER_BYTES];
	const uint8_t *data;
	struct dq_tcp_mem *mem;
	uint64_t wr_id;
	uint64_t release_ns;               /* 0 without a link */
	uint32_t len;
	uint8_t op;                        /* enum dq_wc_op */
};

struct dq_tcp_short {                  /* acknowledgement, heartbeat */
	uint8_t header[DQ_TCP_HEADER_BYTES];
	uint64_t release_ns;
	uint8_t type;
};

struct dq_tcp_rq {
	struct dq_tcp_mem *mem;
	uint8_t *data;
	uint64_t wr_id;
	uint32_t len;
};

enum dq_tcp_source { DQ_TCP_FROM_NONE, DQ_TCP_FROM_SHORT, DQ_TCP_FROM_SQ };

struct dq_tcp_qp {
	struct dq_tcp_list rx_node, tx_node, timed_node;
	struct dq_tcp_device *dev;
	struct dq_qp_attr attr;
	uint32_t number;
	uint32_t generation;
	int fd;
	uint8_t state;
	bool tx_blocked;                   /* until EPOLLOUT */
	bool tx_broken;                    /* sending failed: what the peer said last is still to be read */
	bool rx_hangup;                    /* the end of the stream is known to be there */

	uint8_t token[DQ_TCP_TOKEN_BYTES];
	uint8_t peer_token[DQ_TCP_TOKEN_BYTES];
	uint32_t peer_qp;
	uint64_t connect_deadline_ns;

	/* Send queue: done <= sent <= posted, free-running. */
	struct dq_tcp_wr *sq;
	uint32_t sq_mask, sq_done, sq_sent, sq_posted;
	uint32_t sq_unpolled;              /* completions not yet polled keep their place in the send depth */
	struct dq_tcp_short *shorts;
	uint32_t shorts_mask, shorts_head, shorts_tail;
	uint8_t current;                   /* enum dq_tcp_source: whose first frame is partly on the wire */
	uint32_t current_off;

	struct dq_tcp_rq *rq;
	uint32_t rq_mask, rq_head, rq_tail;
	uint32_t rq_unpolled;

	struct dq_tcp_frame frame;         /* whose payload is being received */
	uint8_t *place;
	uint32_t place_left;
	struct dq_tcp_mem *place_mem;
	bool in_payload;
	uint32_t taken;                    /* WRITE and SEND frames taken */
	uint32_t acked;                    /* of them, acknowledged (queued to be) */

	uint64_t progress_ns;              /* last acknowledgement, or when work became outstanding */
	uint64_t rx_ns;                    /* last sign of life */
	uint64_t asked_ns;                 /* first unanswered heartbeat, 0 = none */
	uint64_t heartbeat_ns;             /* last heartbeat sent */

	uint32_t rx_head, rx_tail;
	uint8_t rx_buffer[DQ_TCP_RX_BUFFER];
};

/* ---- small helpers ---- */

static inline uint64_t dq_tcp_now(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static inline void dq_tcp_list_init(struct dq_tcp_list *l) { l->prev = l->next = l; }
static inline bool dq_tcp_list_empty(const struct dq_tcp_list *l) { return l->next == l; }
static inline bool dq_tcp_list_in(const struct dq_tcp_list *n) { return n->next != NULL; }

static inline void dq_tcp_list_add(struct dq_tcp_list *l, struct dq_tcp_list *n)
{
	if (n->next)
		return;
	n->prev = l->prev;
	n->next = l;
	l->prev->next = n;
	l->prev = n;
}

static inline void dq_tcp_list_remove(struct dq_tcp_list *n)
{
	if (!n->next)
		return;
	n->prev->next = n->next;
	n->next->prev = n->prev;
	n->prev = n->next = NULL;
}

#define DQ_TCP_QP_OF(node, member) ((struct dq_tcp_qp *)(void *)((char *)(node) - offsetof(struct dq_tcp_qp, member)))

static inline struct dq_tcp_device *dq_tcp_device_of(struct dq_device *d) { return (struct dq_tcp_device *)(void *)d; }
static inline const struct dq_tcp_device *dq_tcp_device_of_const(const struct dq_device *d)
{
	return (const struct dq_tcp_device *)(const void *)d;
}
static inline struct dq_tcp_qp *dq_tcp_qp_of(struct dq_qp *q) { return (struct dq_tcp_qp *)(void *)q; }
static inline struct dq_tcp_mem *dq_tcp_mem_of(struct dq_mem *m) { return (struct dq_tcp_mem *)(void *)m; }

/* ---- tcp_addr.c: addresses and endpoints ---- */

enum dq_tcp_endpoint_kind { DQ_TCP_ENDPOINT_QP = 1, DQ_TCP_ENDPOINT_DGRAM = 2 };

struct dq_tcp_peer {
	struct sockaddr_storage addr;
	socklen_t addr_len;
	uint32_t qp;
	uint8_t token[DQ_TCP_TOKEN_BYTES];
};

int dq_tcp_addr_parse(const char *text, uint16_t port, struct sockaddr_storage *out, socklen_t *len, struct dq_error *err);
void dq_tcp_addr_format(const struct sockaddr_storage *addr, char *out, size_t size);
void dq_tcp_endpoint_put(struct dq_endpoint *out, enum dq_tcp_endpoint_kind kind, const struct sockaddr_storage *addr,
			 uint32_t qp, const uint8_t token[DQ_TCP_TOKEN_BYTES]);
/* `local` gives the scope of link-local addresses. */
int dq_tcp_endpoint_get(const struct dq_endpoint *in, enum dq_tcp_endpoint_kind kind, const struct sockaddr_storage *local,
			struct dq_tcp_peer *out, struct dq_error *err);

/* ---- tcp_device.c ---- */

int dq_tcp_device_open(const struct dq_device_config *cfg, struct dq_device **out, struct dq_error *err);
void dq_tcp_device_close(struct dq_device *dev);
void dq_tcp_device_query(struct dq_device *dev, struct dq_device_attr *out);
int dq_tcp_device_poll(struct dq_device *dev, struct dq_wc *out, unsigned n);
int dq_tcp_device_arm(struct dq_device *dev);
int dq_tcp_device_event_fd(const struct dq_device *dev);
uint64_t dq_tcp_device_next_deadline(const struct dq_device *dev);

/* Options of a TCP socket, before connect or listen; accepted ones inherit those of the listener. */
void dq_tcp_socket_tune(int fd);
/* Watch fd for the QP; modify: it is already in the epoll set as something else. */
int dq_tcp_device_watch(struct dq_tcp_device *dev, struct dq_tcp_qp *qp, bool modify);
/* A connection that already said hello to this QP, taken from the pending ones: its fd, or -1. */
int dq_tcp_device_claim(struct dq_tcp_device *dev, const struct dq_tcp_qp *qp);
/* Room in the completion queue for one more QP / give it back. */
int dq_tcp_cq_reserve(struct dq_tcp_device *dev, const struct dq_qp_attr *attr);
void dq_tcp_cq_release(struct dq_tcp_device *dev, const struct dq_tcp_qp *qp);
void dq_tcp_device_timer(struct dq_tcp_device *dev);

static inline bool dq_tcp_cq_has_room(const struct dq_tcp_device *dev)
{
	return dev->cq_tail - dev->cq_head < dev->cq_segments;
}

static inline void dq_tcp_cq_push(struct dq_tcp_qp *qp, const struct dq_wc *wc)
{
	struct dq_tcp_device *dev = qp->dev;
	struct dq_tcp_cqe *e = &dev->cq[dev->cq_tail++ & dev->cq_mask];
	e->wc = *wc;
	e->wc.ctx = qp->attr.ctx;
	e->qp = qp;
}

/* ---- tcp_mem.c ---- */

int dq_tcp_mem_register(struct dq_device *dev, const struct dq_mem_desc *desc, struct dq_mem **out, struct dq_error *err);
void dq_tcp_mem_deregister(struct dq_mem *mem);
int dq_tcp_mem_key(const struct dq_mem *mem, uint64_t offset, uint64_t len, struct dq_mem_key *out);
int dq_tcp_mem_flush(struct dq_mem *mem, uint64_t offset);
bool dq_tcp_mem_probe_dmabuf(struct dq_tcp_device *dev);

/* Memory that a peer may write `len` bytes to, or NULL. addr counts from the start of the registration. */
static inline struct dq_tcp_mem *dq_tcp_mem_find(const struct dq_tcp_device *dev, uint64_t key, uint64_t addr, uint32_t len)
{
	uint32_t slot = (uint32_t)key & 0xfffffu;
	struct dq_tcp_mem *mem = slot < dev->mems_cap ? dev->mems[slot] : NULL;
	if (!mem || mem->key != key || !(mem->access & DQ_ACCESS_REMOTE_WRITE) || addr > mem->len || len > mem->len - addr)
		return NULL;
	return mem;
}

/* One user of the memory less. */
static inline void dq_tcp_mem_drop(struct dq_tcp_mem **mem)
{
	if (*mem)
		(*mem)->uses--;
	*mem = NULL;
}

/* ---- tcp_qp.c ---- */

static inline bool dq_tcp_same_token(const uint8_t *a, const uint8_t *b)
{
	uint8_t diff = 0;
	for (unsigned i = 0; i < DQ_TCP_TOKEN_BYTES; i++) /* in constant time: the other side may be guessing */
		diff |= a[i] ^ b[i];
	return diff == 0;
}

int dq_tcp_qp_create(struct dq_device *dev, const struct dq_qp_attr *attr, struct dq_qp **out, struct dq_error *err);
void dq_tcp_qp_endpoint(const struct dq_qp *qp, struct dq_endpoint *out);
int dq_tcp_qp_connect(struct dq_qp *qp, const struct dq_endpoint *peer, bool dial, struct dq_error *err);
void dq_tcp_qp_fence(struct dq_qp *qp);
void dq_tcp_qp_destroy(struct dq_qp *qp);

/* A connection whose hello named this QP, rightly: answer it and go UP. Takes the fd, which is already in the epoll set. */
void dq_tcp_qp_accept(struct dq_tcp_qp *qp, int fd);
bool dq_tcp_qp_matches(const struct dq_tcp_qp *qp, const struct dq_tcp_hello *hello);
void dq_tcp_qp_event(struct dq_tcp_qp *qp, uint32_t events);
void dq_tcp_qp_scan(struct dq_tcp_qp *qp, uint64_t now);
void dq_tcp_qp_fail(struct dq_tcp_qp *qp, enum dq_wc_status status, uint32_t vendor);
/* The memory is about to go: fail the QP if it still needs it. */
void dq_tcp_qp_forget(struct dq_tcp_qp *qp, struct dq_tcp_mem *mem);

/* Both hellos were right. */
void dq_tcp_qp_up(struct dq_tcp_qp *qp);
/* The peer sent what it may not: tell it why, as far as the socket takes it, and end the connection. */
void dq_tcp_qp_refuse(struct dq_tcp_qp *qp, enum dq_wc_status status);

/* ---- tcp_send.c ---- */

int dq_tcp_qp_post_write(struct dq_qp *qp, const struct dq_write *wr, unsigned n);
int dq_tcp_qp_post_send(struct dq_qp *qp, const struct dq_send *wr, unsigned n);
/* When the first frame that is not yet on the wire may go out, DQ_NEVER = there is none. */
uint64_t dq_tcp_qp_release(const struct dq_tcp_qp *qp);
/* Put the QP in the list it belongs to: dev->tx, dev->timed or none. */
void dq_tcp_qp_schedule(struct dq_tcp_qp *qp);
/* Send what may go out now. */
void dq_tcp_qp_transmit(struct dq_tcp_qp *qp);
/* Queue an acknowledgement of all that was taken. time_ns: its departure; on a link the virtual time of what it answers. */
void dq_tcp_qp_ack(struct dq_tcp_qp *qp, uint64_t time_ns);
void dq_tcp_qp_heartbeat(struct dq_tcp_qp *qp, uint8_t flags, uint64_t now);

/* ---- tcp_receive.c ---- */

int dq_tcp_qp_post_recv(struct dq_qp *qp, const struct dq_recv *wr, unsigned n);
/* Read what the socket has, up to a turn's worth, act on it, and acknowledge. */
void dq_tcp_qp_receive(struct dq_tcp_qp *qp);

/* ---- tcp_dgram.c ---- */

int dq_tcp_dgram_open(struct dq_device *dev, struct dq_dgram **out, struct dq_error *err);
void dq_tcp_dgram_close(struct dq_dgram *dg);
void dq_tcp_dgram_endpoint(const struct dq_dgram *dg, struct dq_endpoint *out);
int dq_tcp_dgram_send(struct dq_dgram *dg, const struct dq_endpoint *to, uint32_t flow_label, struct dq_link *link, uint64_t id, const void *data,
		      uint16_t len);
int dq_tcp_dgram_poll(struct dq_dgram *dg, struct dq_dgram_event *out, unsigned n);
int dq_tcp_dgram_fd(const struct dq_dgram *dg);
uint64_t dq_tcp_dgram_next_deadline(const struct dq_dgram *dg);
const char *dq_tcp_dgram_time_source(const struct dq_dgram *dg);

extern const struct dq_provider dq_provider_tcp;

#endif
