/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a client and its daemon share: the messages on the attach socket and the layout of the shared memory. Its only home;
 * read by the shim (C), the engine (C) and the control plane (Python, through cffi).
 *
 * The attach socket is a SEQPACKET Unix socket; one struct dq_client_request in, one struct dq_client_reply out, in order.
 * The client is gone when the socket closes; the daemon is gone when it closes or when CONTROL.closed is set.
 *
 * The daemon trusts nothing in the shared memory: sizes are kept privately, indices checked (core/ring.h), entries copied
 * before they are looked at. It never makes a call on a client's object that could block: the client is woken by futex, its
 * eventfd is only watched (edge-triggered), never read.
 */
#ifndef DQ_SHIM_LAYOUT_H
#define DQ_SHIM_LAYOUT_H

#include "core/base.h"
#include "core/ring.h"

/* cffi: begin */
#define DQ_LAYOUT_MAGIC 0x42505144
#define DQ_LAYOUT_VERSION 1
#define DQ_RING_ENTRIES_MIN 64
#define DQ_RING_ENTRIES_MAX 65536
#define DQ_RING_ENTRIES_DEFAULT 4096
#define DQ_HANDLE_MAGIC 0x48505144
#define DQ_HANDLE_VERSION 1

enum dq_request_type {
	DQ_REQ_ATTACH = 1,      /* arg0 = oldest layout version known, arg1 = newest, arg2 = ring entries, arg3 = pid; name */
	DQ_REQ_DEVICES = 2,     /* reply: followed in the same message by struct dq_device_info[], count in arg0; arg1 = flows that a
				 * client may have */
	DQ_REQ_MEM_ALLOC = 3,   /* arg0 = bytes, arg1 = 1 for staging; reply arg0 = mem id, arg1 = bytes mapped; fd: the memfd */
	DQ_REQ_MEM_DMABUF = 4,  /* arg0 = bytes, arg1 = offset; fd: dma-buf; reply arg0 = mem id */
	DQ_REQ_MEM_FREE = 5,    /* arg0 = mem id */
	DQ_REQ_MEM_SHARE = 6,   /* arg0 = client id, arg1 = mem id of it, of MEM_ALLOC without staging; both clients must be of one
				 * process; reply arg0 = mem id for this client, arg1 = bytes usable */
	DQ_REQ_HINT = 7         /* arg0 = peers expected at a time, arg1 = flows a peer; 0 = not known */
};

/* Classes of paths, nearest first. */
enum dq_path_class {
	DQ_CLASS_UNKNOWN = 0,
	DQ_CLASS_HOST = 1,
	DQ_CLASS_RACK = 2,
	DQ_CLASS_ZONE = 3,
	DQ_CLASS_BUILDING = 4,
	DQ_CLASS_REGION = 5
};

struct dq_client_request {
	uint32_t magic;
	uint16_t version;       /* of this message: 1 */
	uint16_t type;
	uint64_t arg0;
	uint64_t arg1;
	uint64_t arg2;
	uint64_t arg3;
	char name[64];          /* ATTACH: NUL-terminated */
};

/* Reply to ATTACH: arg0 = layout version chosen, arg1 = client id, arg2 = ring entries, arg3 = bytes of the memfd;
 * handle = template with host, epoch and address of this daemon; fds: [memfd, eventfd that wakes the engine]. */
struct dq_client_reply {
	uint32_t magic;
	uint16_t version;
	uint16_t type;
	int32_t status;         /* enum dq_status */
	uint32_t reserved;
	uint64_t arg0;
	uint64_t arg1;
	uint64_t arg2;
	uint64_t arg3;
	uint8_t handle[128];
	char text[256];         /* why, when status != 0 */
};

struct dq_device_info {
	char name[32];
	char provider[16];
	char pci_path[160];
	uint64_t speed_bps;
	uint32_t latency_ns;
	int32_t rail;
	int32_t numa_node;
	uint32_t mtu;
	uint8_t dmabuf;
	uint8_t up;
	uint16_t port;          /* of the RDMA device; 0 = none */
	uint8_t reserved[4];
};

/* The 128 bytes a listener gives to its peer. Little-endian. */
struct dq_handle {
	uint32_t magic;
	uint16_t version;
	uint16_t rail;          /* of the listener's device */
	uint64_t epoch;         /* of the listener's daemon */
	uint32_t client;        /* of the listener */
	uint32_t listener;      /* chosen by the client, unique in it */
	uint8_t nonce[16];      /* random; whoever does not know it is refused */
	uint16_t family;        /* 4 or 6; 0 = the daemon has no host-to-host API: this host only */
	uint16_t port;          /* host-to-host API of the listener's daemon */
	uint8_t address[16];
	uint32_t scope;
	char host_id[64];
};
/* cffi: end */

_Static_assert(sizeof(struct dq_client_request) == 104, "attach protocol");
_Static_assert(sizeof(struct dq_client_reply) == 432, "attach protocol");
_Static_assert(sizeof(struct dq_device_info) == 240, "attach protocol");
_Static_assert(sizeof(struct dq_handle) == 128, "a handle is 128 bytes");

/*
 * The memfd of a client, in this order: struct dq_control, submission ring (struct dq_ring_shared, then entries), completion
 * ring (same). Both rings have the same number of entries, a power of two.
 */
struct dq_control {
	uint32_t magic;
	uint32_t version;
	uint32_t entries;
	uint32_t reserved;
	_Alignas(64) _Atomic uint32_t engine_asleep;  /* raised by the engine: 1 = write to the eventfd after submitting; lowered by
						       * either when it wakes */
	_Alignas(64) _Atomic uint32_t client_waiting; /* raised by the client: 1 = futex wake wanted after completions; lowered by
						       * either */
	_Atomic uint32_t wake;                        /* futex word, incremented by the engine before it wakes all who sleep on
						       * it; also by client threads that wake each other */
	_Alignas(64) _Atomic uint32_t closed;         /* written by the engine: this client was cut off (enum dq_status, negated) */
	char closed_text[124];                        /* why */
};
_Static_assert(sizeof(struct dq_control) % 64 == 0, "shared-memory layout");

#define DQ_CONTROL_OFFSET 0u
#define DQ_SQ_OFFSET 1024u
_Static_assert(sizeof(struct dq_control) <= DQ_SQ_OFFSET, "shared-memory layout");

static inline size_t dq_layout_cq_offset(uint32_t entries)
{
	return DQ_SQ_OFFSET + sizeof(struct dq_ring_shared) + (size_t)entries * DQ_RING_ENTRY_BYTES;
}
static inline size_t dq_layout_bytes(uint32_t entries)
{
	size_t n = dq_layout_cq_offset(entries) + sizeof(struct dq_ring_shared) + (size_t)entries * DQ_RING_ENTRY_BYTES;
	return (n + 4095) & ~(size_t)4095;
}

/* Submissions. Each gives exactly one completion with its `request`; an entry is taken only when a place for that is free. */
enum dq_op {
	DQ_OP_SEND = 1,     /* flow, mem, offset, bytes, tag */
	DQ_OP_RECV = 2,     /* flow, mem, offset, bytes, tag */
	DQ_OP_PUT = 3,      /* flow, mem, offset, bytes, region, remote_offset, tag = cookie */
	DQ_OP_NOTIFY = 4,   /* flow; completes with a put of the peer */
	DQ_OP_EXPORT = 5,   /* flow, mem, offset, bytes */
	DQ_OP_UNEXPORT = 6, /* flow, region */
	DQ_OP_LISTEN = 7,   /* flow = listener id chosen by the client; tag, remote_offset = nonce (two little-endian halves); mem = device.
			     * The handle is out before this is taken: whoever finds no such listener looks into that client's
			     * ring before refusing */
	DQ_OP_UNLISTEN = 8, /* flow = listener id */
	DQ_OP_ACCEPT = 9,   /* flow = listener id */
	DQ_OP_CONNECT = 10, /* mem = device; the next two entries are the 128 bytes of the handle */
	DQ_OP_CLOSE = 11,   /* flow */
	DQ_OP_FLUSH = 12    /* flow, mem (of MEM_DMABUF), offset */
};
#define DQ_CONNECT_ENTRIES 3u

struct dq_submission {
	uint16_t op;
	uint16_t flags;     /* 0 */
	uint32_t flow;
	uint64_t request;   /* the client's own; comes back unchanged */
	uint32_t mem;
	uint32_t region;
	uint64_t offset;
	uint64_t bytes;
	uint64_t tag;
	uint64_t remote_offset;
	uint64_t reserved;
};
_Static_assert(sizeof(struct dq_submission) == DQ_RING_ENTRY_BYTES, "ring entry");

struct dq_completion {
	uint64_t request;
	int32_t status;     /* enum dq_status */
	uint32_t flow;      /* CONNECT, ACCEPT: id of the new flow */
	uint64_t bytes;
	uint64_t tag;       /* RECV: tag; NOTIFY: cookie */
	uint64_t offset;    /* NOTIFY */
	uint32_t region;    /* EXPORT, NOTIFY */
	uint32_t reserved0;
	uint64_t reserved[2];
};
_Static_assert(sizeof(struct dq_completion) == DQ_RING_ENTRY_BYTES, "ring entry");

/* The same of CONNECT and ACCEPT: what the new flow is, for error texts. */
#define DQ_OPENED_PEER_BYTES 46u
struct dq_completion_opened {
	uint64_t request;
	int32_t status;
	uint32_t flow;
	uint8_t device;
	uint8_t path_class; /* enum dq_path_class */
	char peer[DQ_OPENED_PEER_BYTES]; /* host_id of the other end, cut if need be, NUL-terminated */
};
_Static_assert(sizeof(struct dq_completion_opened) == DQ_RING_ENTRY_BYTES, "ring entry");
_Static_assert(offsetof(struct dq_completion_opened, flow) == offsetof(struct dq_completion, flow), "same head");

#endif
