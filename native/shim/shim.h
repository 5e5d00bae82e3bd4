/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the sources of the shim share: the context and its objects. Private.
 *
 * Locks: `lock` guards everything of a context but what is marked otherwise; `socket_lock` guards the attach socket, over which
 * calls go one at a time. socket_lock is taken before lock; whoever holds lock may only try socket_lock. Functions say which
 * lock they expect. Time is CLOCK_MONOTONIC in ns. Functions that can fail return an enum dqplb_status and leave a text for
 * dqplb_last_error() of the calling thread.
 */
#ifndef DQ_SHIM_SHIM_H
#define DQ_SHIM_SHIM_H

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include <dqplb.h>

#include "shim/arena.h"
#include "shim/layout.h"

#define DQ_SHIM_SOCKET_DEFAULT "/run/dqplbd/client.sock"
#define DQ_SHIM_DEVICES_MAX 64u
#define DQ_SHIM_INTERNAL_RESERVE 16u      /* ring entries kept for closing flows and listeners */
#define DQ_SHIM_INLINE_COPY_BYTES 65536u  /* staged data up to this is copied with the lock held */
#define DQ_SHIM_STAGING_BYTES (64ull << 20) /* usual size of a staging chunk */
#define DQ_SHIM_CHUNK_IDLE_NS 10000000000ull /* a staging chunk unused for so long goes back to the daemon, but the last one */
#define DQ_SHIM_LIVENESS_NS 10000000ull   /* a busy context looks at its socket this often */
#define DQ_SHIM_SLICE_NS 200000000ull     /* longest sleep without a look at the socket */
#define DQ_SHIM_CLOSE_NS 1000000000ull    /* longest wait for the daemon in dqplb_close() */
#define DQ_SHIM_CALL_NS 30000000000ull    /* longest wait for an answer on the socket */
#define DQ_SHIM_REQUESTS_PER_SLAB 64u
#define DQ_SHIM_REQUEST_ALIGN 256u

enum dq_shim_mem_kind {
	DQ_SHIM_MEM_SHARED = 1, /* memfd of the daemon: zero copy */
	DQ_SHIM_MEM_STAGED = 2, /* any memory of the process: copied */
	DQ_SHIM_MEM_DMABUF = 3,
	DQ_SHIM_MEM_ALIAS = 4   /* SHARED memory of another context of this process: no mapping of its own */
};

struct dqplb_mem {
	dqplb_context *ctx;
	enum dq_shim_mem_kind kind;
	uint32_t id;            /* the daemon's; unused for staged memory */
	uint8_t *address;
	uint64_t bytes;
	uint64_t mapped_bytes;
	uint64_t serial;        /* SHARED: of the process, never used again */
	dqplb_mem *prev, *next; /* of the context */
	dqplb_mem *next_shared; /* SHARED: of the process */
};

/* A memfd of the daemon from which pieces for staged memory are cut. */
struct dq_shim_chunk {
	struct dq_shim_chunk *prev, *next;
	uint32_t id;
	uint8_t *base;
	uint64_t bytes;
	uint64_t idle_since;    /* valid while nothing is taken */
	struct dq_arena arena;
};

enum dq_shim_direction { DQ_SHIM_OUT = 0, DQ_SHIM_IN = 1 };

struct dq_shim_piece {
	struct dq_shim_chunk *chunk; /* NULL: none */
	uint32_t granule;
	uint32_t direction;     /* enum dq_shim_direction */
	uint64_t bytes;         /* taken */
};

enum dq_shim_state {
	DQ_SHIM_FREE = 0,
	DQ_SHIM_RESERVED,  /* a thread copies what it sends */
	DQ_SHIM_PENDING,   /* the daemon has it */
	DQ_SHIM_COPYING,   /* received, to be copied into place */
	DQ_SHIM_DONE,      /* result is valid, waits for test or wait */
	DQ_SHIM_ORPHAN     /* forgotten by the program; the daemon still has it */
};

/*
 * The program's dqplb_request pointer is the address of this plus the low bits of generation, so that a pointer to a request
 * that was freed is told from the next user of its place.
 */
struct dq_shim_request {
	_Alignas(DQ_SHIM_REQUEST_ALIGN) dqplb_context *ctx;
	uint32_t index;
	uint32_t generation;
	_Atomic uint32_t state; /* enum dq_shim_state; written with the lock held, read by spinning waiters without */
	uint16_t op;            /* enum dq_op */
	bool internal;          /* nobody tests it: freed at completion */
	bool mem_freed;         /* its memory was freed while it was pending */
	bool orphan;            /* DONE here, completion of the daemon still to come */
	uint32_t flow_id;       /* for messages */
	struct dq_shim_piece piece;
	dqplb_flow *flow;       /* valid while the daemon has the operation */
	dqplb_listener *listener;
	dqplb_mem *mem;
	uint8_t *copy_to;       /* staged receive: where the bytes belong */
	uint64_t bytes;         /* asked for */
	struct dq_shim_request *next; /* free list or copy queue */
	dqplb_result result;
};

struct dqplb_flow {
	dqplb_context *ctx;
	uint32_t id;
	uint32_t pending;       /* operations the daemon has */
	bool closing, closed;   /* dqplb_flow_close() was called; the daemon confirmed */
	bool deferred;          /* CLOSE waits for room in the ring */
	uint8_t device, path_class; /* as the daemon told when it opened */
	char peer[DQ_OPENED_PEER_BYTES];
	dqplb_flow *prev, *next;
	dqplb_flow *next_deferred;
};

struct dqplb_listener {
	dqplb_context *ctx;
	uint32_t id;
	uint32_t device;
	int status;             /* DQPLB_OK until the daemon refused to listen */
	uint32_t pending;       /* LISTEN, ACCEPT and UNLISTEN that the daemon has */
	bool closing, closed;
	bool deferred;
	dqplb_listener *prev, *next;
	dqplb_listener *next_deferred;
};

/* A call on the socket whose answer nobody waits for; guarded by socket_lock. */
struct dq_shim_async {
	uint16_t type;          /* enum dq_request_type, 0 = none */
	uint64_t bytes;
};

struct dqplb_context {
	pthread_mutex_t lock;
	const volatile uint32_t *guard; /* 1; a page that fork() fills with zeros in the child */
	struct dq_control *control;
	struct dq_ring sq, cq;
	int eventfd;
	uint32_t entries;
	uint32_t live;                  /* requests not free */
	struct dq_shim_request *free_requests;
	struct dq_shim_request **slabs;
	uint32_t slab_count;
	struct dq_shim_request *copy_head, *copy_tail;
	pthread_cond_t copied;          /* a copy without the lock ended, or the first staging chunk is there */
	uint32_t sleepers;              /* threads that sleep on control->wake */
	bool woke_needed;               /* something completed: sleepers must look */
	uint64_t completed;             /* requests done, ever */
	uint64_t wait_any_seen;
	uint64_t unknown_completions;
	_Atomic uint64_t next_liveness; /* written with the lock held */
	uint64_t spin_ns;
	uint64_t slice_ns;              /* DQ_SHIM_SLICE_NS, more in tests, where it must not hide a wake that was lost */
	_Atomic int dead;               /* DQPLB_OK, or why nothing works any more */
	char dead_text[320];
	dqplb_flow *flows, *deferred_flows;
	dqplb_listener *listeners, *deferred_listeners;
	dqplb_mem *mems;
	uint32_t next_listener;
	uint8_t nonces[256];            /* random, taken from the end: one system call for some listeners */
	uint32_t nonce_bytes;           /* left */
	uint32_t max_flows;             /* of a client, as the daemon told; 0: not told */

	struct dq_shim_chunk *chunks;   /* staging, see staging.h */
	uint64_t staging_bytes;         /* of all of them */
	uint64_t staged[2];             /* taken of that, by direction */
	uint64_t next_trim;
	uint64_t chunk_idle_ns;         /* DQ_SHIM_CHUNK_IDLE_NS, less in tests */
	bool preparing;                 /* a thread gets the first one */
	bool growing;                   /* an answer about a new chunk is awaited */
	int grow_status;                /* of the last answer */
	uint64_t grow_bytes;            /* asked for, last time */
	uint64_t grow_retry;            /* not before */
	char grow_text[256];

	pthread_mutex_t socket_lock;
	int socket;
	struct dq_shim_async async;     /* guarded by socket_lock */

	uint32_t client_id;             /* constant from here on, but devices: guarded by lock */
	struct dq_handle template;
	char socket_path[108];
	size_t map_bytes;
	uint32_t device_count;
	struct dq_device_info devices[DQ_SHIM_DEVICES_MAX];
	dqplb_context *prev, *next;     /* of the process: fork handling */
};

/* --- error.c --- */
int dq_shim_fail(int status, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
const char *dq_shim_status_name(int status);

/* --- context.c --- */
/* lock held. The context is of no more use: remember why, wake everybody. The first reason stays. */
void dq_shim_die(dqplb_context *ctx, int status, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
int dq_shim_dead(dqplb_context *ctx);   /* returns the status, with its text for this thread */
int dq_shim_forked(void);
/* lock held. Is the daemon there? Looks at the socket when last done DQ_SHIM_LIVENESS_NS ago; always when forced. */
void dq_shim_liveness(dqplb_context *ctx, bool force);

/* --- socket.c --- */
struct dq_shim_answer {
	struct dq_client_reply reply;
	struct dq_device_info devices[DQ_SHIM_DEVICES_MAX];
	uint32_t device_count;
	int fds[2];                     /* owned by the receiver of the answer; -1: none */
};
int dq_shim_socket_connect(const char *path, int *out);
/* No lock held, or a context nobody else knows. One round trip; a status other than OK in the reply is returned with its text. */
int dq_shim_call(dqplb_context *ctx, struct dq_client_request *request, int fd, struct dq_shim_answer *answer);
/* lock held. Send without waiting for the answer. DQPLB_ERR_AGAIN: the socket is in use. */
int dq_shim_call_async(dqplb_context *ctx, struct dq_client_request *request);
/* lock held. Take the answer to an asynchronous call, if there is one. */
void dq_shim_async_poll(dqplb_context *ctx);
void dq_shim_answer_close(struct dq_shim_answer *answer); /* closes what is left in fds */
const char *dq_shim_request_name(uint16_t type);

/* SHARED memory of all contexts of this process. No lock held. */
struct dq_shim_place {                  /* what a range of memory lies in */
	uint32_t client, id;
	uint64_t serial, bytes;
	size_t offset;
};
void dq_shim_shared_add(dqplb_mem *mem);  /* gives it its serial */
void dq_shim_shared_remove(dqplb_mem *mem);
bool dq_shim_shared_find(const void *address, size_t bytes, struct dq_shim_place *out);

/* --- memory.c --- */
/* Map what the daemon allocated: shared, present, not inherited by fork. NULL: errno. */
void *dq_shim_map(int fd, size_t bytes);

/* --- request.c: all with lock held --- */
struct dq_shim_request *dq_shim_request_take(dqplb_context *ctx, uint16_t op, bool internal); /* NULL: no room */
void dq_shim_request_free(struct dq_shim_request *r);
struct dq_shim_request *dq_shim_request_find(dqplb_context *ctx, uint64_t cookie); /* NULL: none such */
static inline dqplb_request *dq_shim_request_handle(struct dq_shim_request *r)
{
	return (dqplb_request *)((unsigned char *)r + (r->generation & (DQ_SHIM_REQUEST_ALIGN - 1)));
}
static inline uint64_t dq_shim_request_cookie(const struct dq_shim_request *r)
{
	return (uint64_t)r->generation << 32 | r->index;
}
static inline uint32_t dq_shim_request_state(const struct dq_shim_request *r)
{
	return atomic_load_explicit(&r->state, memory_order_acquire);
}
static inline void dq_shim_request_enter(struct dq_shim_request *r, enum dq_shim_state state)
{
	atomic_store_explicit(&r->state, (uint32_t)state, memory_order_release);
}
struct dq_shim_request *dq_shim_request_at(dqplb_context *ctx, uint32_t index); /* index < slab_count * per slab */

/* --- progress.c: all with lock held --- */
/* Take completions out of the ring; copy small staged receives; give deferred closes to the daemon. */
void dq_shim_drain(dqplb_context *ctx);
/* As drain, and copy large staged receives, for which the lock is dropped; ends early when `want` is done (NULL: never). */
void dq_shim_progress(dqplb_context *ctx, const struct dq_shim_request *want);
bool dq_shim_ring_idle(dqplb_context *ctx); /* without the lock, too: no completion to take */
void dq_shim_wake_sleepers(dqplb_context *ctx);
/* Sleep until a completion may be there, or until deadline or the next look at the socket. Drops the lock meanwhile. */
void dq_shim_sleep(dqplb_context *ctx, uint64_t deadline);

/* --- transfer.c: with lock held --- */
/* Hand n entries to the daemon and wake it if it sleeps; the caller has checked for room. */
void dq_shim_submit(dqplb_context *ctx, const void *entries, uint32_t n);
bool dq_shim_room(dqplb_context *ctx, uint32_t n);
/* First part of each operation: dead, room in ring and table. On success *out is a request in state RESERVED. */
int dq_shim_begin(dqplb_context *ctx, uint16_t op, uint32_t entries, struct dq_shim_request **out);

/* --- flow.c: with lock held --- */
void dq_shim_flow_settle(dqplb_flow *flow);             /* frees it when closed and nothing is pending */
void dq_shim_listener_settle(dqplb_listener *listener);
void dq_shim_flow_link(dqplb_flow *flow);               /* it is open now */
void dq_shim_submit_deferred(dqplb_context *ctx);
void dq_shim_flow_begin_close(dqplb_flow *flow);

static inline uint64_t dq_shim_now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* A few ms coarse, and cheaper: good enough to say when to look at the socket again. */
static inline uint64_t dq_shim_now_coarse(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline bool dq_shim_is_forked(const dqplb_context *ctx)
{
	return DQ_UNLIKELY(*ctx->guard == 0);
}

#endif
