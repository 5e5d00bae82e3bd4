/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dqplb.h - send and receive through the dqplbd daemon of this host.
 *
 * A process opens a context, which attaches to the daemon over a Unix socket and maps shared memory. From then on data
 * operations are entries in shared rings: no system call unless a side sleeps. Payload in memory from dqplb_mem_alloc() is
 * never copied; any other host memory is registered with dqplb_mem_register() and copied through staging memory, in the
 * caller's thread.
 *
 * Model
 *   listen() fills a 128-byte handle, which the program gives to its peer by any means. connect() with that handle and
 *   accept() give one flow each: a bidirectional, reliable connection, multiplexed by the daemons on the queue pairs of
 *   their path. On a flow, send() matches recv() by tag; put() writes into memory that the peer exported, and notifies it.
 *
 * Rules
 *   - No call blocks but dqplb_open(), the dqplb_mem_*() calls and dqplb_device_query() (one round trip to the daemon),
 *     dqplb_wait*(), and dqplb_close() (a second at most). dqplb_mem_address(), _bytes() and _find() do not.
 *   - An operation gives a request; dqplb_test() or dqplb_wait() says when it is done and frees it. A buffer belongs to the
 *     daemon from the call until then. Requests of a closed flow or freed memory complete with DQPLB_ERR_CANCELED.
 *   - DQPLB_ERR_AGAIN from an operation means "no room now": call test/wait on something, then try again.
 *   - A send matches the oldest receive with its tag among those the peer has announced. Receives of a flow are announced
 *     in the order in which they were posted; each flow can always have one announced, more while slots are free.
 *   - A receive may be larger than the send (result.bytes tells the length); the opposite fails both with
 *     DQPLB_ERR_TOO_LONG. An empty message is a message.
 *   - Done means done: a finished send is in the peer's memory; a finished receive has every byte in place.
 *   - All functions are thread safe on one context (one lock a context: give busy threads a context each).
 *   - After fork() the child's calls fail with DQPLB_ERR_FORKED; it opens its own context.
 *   - When the daemon ends, every pending and later call fails with DQPLB_ERR_DAEMON within a second. Open a new context.
 */
#ifndef DQPLB_H
#define DQPLB_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DQPLB_API_VERSION 1   /* raised when this header changes in a way that old programs notice */

#ifdef __GNUC__
#pragma GCC visibility push(default) /* the library is built with everything else hidden */
#endif

/* cffi: begin */
enum dqplb_status {
	DQPLB_OK = 0,
	DQPLB_ERR_AGAIN = -1,        /* no room now: call again */
	DQPLB_ERR_INVALID = -2,      /* an argument is wrong */
	DQPLB_ERR_NOMEM = -3,        /* memory or this client's quota is used up */
	DQPLB_ERR_CLOSED = -4,       /* the flow was closed by the other end */
	DQPLB_ERR_CANCELED = -5,     /* canceled here: flow closed or memory freed */
	DQPLB_ERR_PEER_GONE = -6,    /* the other client died */
	DQPLB_ERR_UNREACHABLE = -7,  /* the peer's daemon cannot be reached, or the path failed */
	DQPLB_ERR_REFUSED = -8,      /* nobody listens there (any more) */
	DQPLB_ERR_TIMEOUT = -9,      /* deadline passed */
	DQPLB_ERR_TOO_LONG = -10,    /* message longer than the receive that matches it */
	DQPLB_ERR_REGION = -11,      /* region unknown or withdrawn, or offset and length outside of it */
	DQPLB_ERR_STALE = -12,       /* the handle is of an earlier life of that daemon */
	DQPLB_ERR_DAEMON = -13,      /* the local daemon is not running, or gone */
	DQPLB_ERR_VERSION = -14,     /* versions do not match */
	DQPLB_ERR_PERMISSION = -15,  /* access rights or policy forbid it */
	DQPLB_ERR_DEVICE = -16,      /* the local device failed */
	DQPLB_ERR_LIMIT = -17,       /* a configured limit (flows, slots, clients) is reached */
	DQPLB_ERR_FORKED = -18,      /* context of the parent process */
	DQPLB_ERR_INTERNAL = -19     /* the daemon broke an invariant of its own */
};

typedef struct dqplb_context dqplb_context;
typedef struct dqplb_mem dqplb_mem;
typedef struct dqplb_listener dqplb_listener;
typedef struct dqplb_flow dqplb_flow;
typedef struct dqplb_request dqplb_request;

/* How to reach a listener, from any host. Opaque bytes; copy and send as they are. */
typedef struct dqplb_handle {
	unsigned char bytes[128];
} dqplb_handle;

/* Set size to sizeof(struct dqplb_options) and everything else to 0 for defaults. */
typedef struct dqplb_options {
	size_t size;
	const char *socket;          /* daemon's client socket; NULL: $DQPLB_SOCKET, else /run/dqplbd/client.sock */
	const char *name;            /* shown by `dqplb clients`; NULL: the program's name */
	uint32_t ring_entries;       /* requests that may exist at a time, and 16 kept for closing; power of two 64..65536; 0: 4096 */
	uint32_t spin_us;            /* busy-wait this long in dqplb_wait() before sleeping; 0: chosen from the CPUs there are */
} dqplb_options;

typedef struct dqplb_device {
	char name[32];
	char provider[16];           /* "tcp", "verbs" */
	char pci_path[160];          /* sysfs path, "" if there is none */
	uint64_t speed_bps;          /* bits per second */
	uint32_t latency_ns;         /* smallest round trip time measured to any peer, 0 = not yet */
	int32_t rail;
	int32_t numa_node;           /* -1 unknown */
	uint32_t mtu;
	uint8_t dmabuf;              /* dma-buf registration was proved to work */
	uint8_t up;
	uint16_t port;               /* of the RDMA device, 1..; 0: it has no such number */
	uint32_t max_flows;          /* that the daemon lets a client have; 0: it did not say */
} dqplb_device;

/* Set size to sizeof(struct dqplb_info) before the call; a later library may know more. */
typedef struct dqplb_info {
	size_t size;
	char host_id[64];            /* of this host's daemon */
	uint64_t epoch;              /* of this life of it */
	char socket[108];
	uint32_t client;             /* number of this context, as `dqplb clients` shows it */
	uint32_t ring_entries;       /* what the daemon gave */
} dqplb_info;

/* As above. */
typedef struct dqplb_flow_info {
	size_t size;
	char peer[64];               /* host_id of the other end; what is longer than 45 characters is cut */
	char path_class[16];         /* of the path when the flow opened; "unknown" */
	int32_t device;              /* that carries it */
	uint32_t reserved;
} dqplb_flow_info;

typedef struct dqplb_result {
	int32_t status;              /* enum dqplb_status */
	uint32_t region;             /* export: the id to tell the peer; notify: the region that was written */
	uint64_t bytes;              /* recv: length of the message; notify: bytes put */
	uint64_t tag;                /* recv */
	uint64_t cookie;             /* notify: as given to put */
	uint64_t offset;             /* notify: where in the region */
	dqplb_flow *flow;            /* connect, accept */
} dqplb_result;

/* --- context ---------------------------------------------------------------------------------------------------- */
int dqplb_open(const dqplb_options *options, dqplb_context **out); /* options may be NULL */
void dqplb_close(dqplb_context *ctx);   /* closes every flow; requests, flows and memory of it are gone afterwards */
const char *dqplb_strerror(int status); /* static text for a status */
/* What exactly went wrong in the last failed call of this thread: names, values, what to do. Never NULL. */
const char *dqplb_last_error(void);
uint32_t dqplb_version(void);           /* DQPLB_API_VERSION of the library */
int dqplb_query(dqplb_context *ctx, dqplb_info *out);
/* How many peers this context expects to exchange data with at a time, and over how many flows each; 0: no idea. The daemon gives
 * each path queue pairs accordingly. Sent without waiting; DQPLB_ERR_AGAIN: not now. */
int dqplb_hint(dqplb_context *ctx, uint32_t peers, uint32_t flows_per_peer);

/* --- devices ---------------------------------------------------------------------------------------------------- */
int dqplb_device_count(dqplb_context *ctx);                               /* or a negative status */
int dqplb_device_query(dqplb_context *ctx, int device, dqplb_device *out);

/* --- memory ----------------------------------------------------------------------------------------------------- */
int dqplb_mem_alloc(dqplb_context *ctx, size_t bytes, dqplb_mem **out);   /* zero copy, zero filled, page aligned */
int dqplb_mem_register(dqplb_context *ctx, void *address, size_t bytes, dqplb_mem **out); /* any host memory: staged */
/* GPU or other device memory. The fd may be closed after the call. */
int dqplb_mem_register_dmabuf(dqplb_context *ctx, int fd, uint64_t offset, size_t bytes, dqplb_mem **out);
/*
 * Is [address, address + bytes) memory of dqplb_mem_alloc(), of whatever context of this process? DQPLB_OK, or
 * DQPLB_ERR_REGION. *serial: a number that no other allocation of the process had or will have; *offset: where in it. May be NULL.
 */
int dqplb_mem_find(const void *address, size_t bytes, uint64_t *serial, size_t *offset);
/* The same memory for another context: all of the allocation that [address, address + bytes) lies in, zero copy. It stays when
 * the other context frees it, but has no address of its own; its pages count against both quotas. DQPLB_ERR_REGION: none such. */
int dqplb_mem_share(dqplb_context *ctx, const void *address, size_t bytes, dqplb_mem **out);
void *dqplb_mem_address(dqplb_mem *mem); /* NULL for dma-buf, and for what dqplb_mem_share() gave */
size_t dqplb_mem_bytes(dqplb_mem *mem);
int dqplb_mem_free(dqplb_mem *mem);      /* outstanding requests on it are canceled */

/* --- connections ------------------------------------------------------------------------------------------------ */
int dqplb_listen(dqplb_context *ctx, int device, dqplb_handle *handle, dqplb_listener **out);
int dqplb_listener_close(dqplb_listener *listener); /* pending accepts are canceled */
int dqplb_connect(dqplb_context *ctx, int device, const dqplb_handle *handle, dqplb_request **out);
int dqplb_accept(dqplb_listener *listener, dqplb_request **out);
int dqplb_flow_close(dqplb_flow *flow);  /* pending requests of it complete with DQPLB_ERR_CANCELED */

int dqplb_flow_query(dqplb_flow *flow, dqplb_flow_info *out);
/* The host_id of the listener that a handle is of, for messages. DQPLB_ERR_INVALID: it is not one, or was damaged. */
int dqplb_handle_host(const dqplb_handle *handle, char *out, size_t bytes);

/* --- messages --------------------------------------------------------------------------------------------------- */
int dqplb_send(dqplb_flow *flow, dqplb_mem *mem, size_t offset, size_t bytes, uint64_t tag, dqplb_request **out);
int dqplb_recv(dqplb_flow *flow, dqplb_mem *mem, size_t offset, size_t bytes, uint64_t tag, dqplb_request **out);
/* Memory of a dma-buf only: when it is done, a GPU that reads sees what had been received on this flow before. The read that
 * pushes the writes in front of it is made at offset, by each device through which the flow received. */
int dqplb_flush(dqplb_flow *flow, dqplb_mem *mem, size_t offset, dqplb_request **out);

/* --- one-sided -------------------------------------------------------------------------------------------------- */
/* Let the peer of this flow put into [offset, offset+bytes) of mem; done when the peer's daemon knows: then tell the peer
 * result.region. Not possible for memory of dqplb_mem_register(): the daemon cannot write into it. */
int dqplb_export(dqplb_flow *flow, dqplb_mem *mem, size_t offset, size_t bytes, dqplb_request **out);
int dqplb_unexport(dqplb_flow *flow, uint32_t region, dqplb_request **out); /* done: nobody will write there any more */
int dqplb_put(dqplb_flow *flow, uint32_t region, uint64_t remote_offset, dqplb_mem *mem, size_t offset, size_t bytes,
	      uint64_t cookie, dqplb_request **out);
int dqplb_notify(dqplb_flow *flow, dqplb_request **out); /* done when a put of the peer has arrived in full */

/* --- completion ------------------------------------------------------------------------------------------------- */
/* *done = 1: *result is filled and the request is freed. Returns a status of the call itself (DQPLB_OK, or
 * DQPLB_ERR_DAEMON, which also frees it with done = 1 and that status in result). result may be NULL. */
int dqplb_test(dqplb_request *request, int *done, dqplb_result *result);
/* Nobody will test or wait for it: freed when it ends, and a flow that it opens is closed. It is not canceled: the buffer of a
 * message is the daemon's until its flow was closed or its memory freed, but staged memory is not written to any more. */
int dqplb_abandon(dqplb_request *request);
/* Wait at most timeout_ms (-1: no limit). DQPLB_OK: as done above. DQPLB_ERR_TIMEOUT: still pending. */
int dqplb_wait(dqplb_request *request, int timeout_ms, dqplb_result *result);
/* Until any request of this context completed since the last call, at most timeout_ms. */
int dqplb_wait_any(dqplb_context *ctx, int timeout_ms);
/* cffi: end */

#ifdef __GNUC__
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
#endif
