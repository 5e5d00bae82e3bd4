/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The provider table: everything the engine asks of a transport. One implementation a file (tcp.c, verbs.c, fault.c), found by
 * dq_provider_find().
 *
 * Threads: a device and all its QPs and memory objects are used by one thread at a time (the engine's). The datagram
 * endpoint of a device (dgram_*) is used by another single thread (the prober's). struct dq_link may be shared by both.
 * Where mem_any_thread is set, mem_register and mem_deregister may be called from any thread: pinning pages takes long. Where
 * qp_any_thread is set, so may qp_create, qp_endpoint, qp_connect and the post_recv before it, by one thread at a time for all
 * QPs of a device, beside the thread that polls; qp_connect touches nothing any more once the QP can have told that it is
 * connected. Everything else of a QP, and its end, is the polling thread's.
 *
 * Who learns of what. tcp has a connection that ends; a reliable connection of RDMA has only acknowledgements, which the peer's
 * device gives without its process. So when a QP was fenced, failed or destroyed at one end, the other
 *   - learns it when it sends: REMOTE_GONE where the transport tells, else TIMEOUT when the retries are used up;
 *   - on a control QP also when idle, by heartbeats;
 *   - as an idle data QP perhaps never (tcp: at once).
 * A write that is refused fails the sender's QP with REMOTE_ACCESS, and nothing is written. The receiver's QP is in error, too: it
 * says so at once (tcp: REMOTE_ACCESS), or when something is posted on it. A peer that is stopped or polls slowly takes, on
 * RDMA, what it has receives for; the sender's further work waits, and ends with TIMEOUT at the deadline.
 * native/tests/test_transport*.c hold every provider to what is said here.
 *
 * Errors: functions return 0 or a negative errno; those that take a struct dq_error also fill its text. Nothing aborts.
 * Units: bytes, nanoseconds of CLOCK_MONOTONIC, bits per second.
 */
#ifndef DQ_PROVIDER_PROVIDER_H
#define DQ_PROVIDER_PROVIDER_H

#include "core/base.h"

#define DQ_ENDPOINT_MAX 96u /* bytes of an endpoint: what the peer needs to reach a QP or a datagram endpoint */

struct dq_device;
struct dq_qp;
struct dq_mem;
struct dq_dgram;
struct dq_link; /* link.h: an emulated link, or NULL */

struct dq_endpoint {
	uint16_t len;
	uint8_t data[DQ_ENDPOINT_MAX];
};

struct dq_device_config {
	char name[32];
	char address[64];            /* tcp: numeric local address, v4 or v6; verbs: name of the RDMA device, such as mlx5_0 */
	char gid[64];                /* verbs: the GID to use, as text; "" = the first usable one of RoCE v2, or of the port */
	uint16_t port;               /* tcp: listen port, 0 = any; verbs: port of the RDMA device, 0 = 1 */
	uint8_t traffic_class;       /* verbs: of data, control and probes */
	uint8_t service_level;       /* verbs */
	uint64_t max_registration_bytes; /* verbs: larger registrations are made in pieces; 0 = what the device allows */
	uint64_t rate_bps;           /* link rate told by the configuration; 0 = ask the device */
	uint32_t mtu;                /* 0 = ask the device */
	uint64_t heartbeat_ns;       /* silence after which a heartbeat is sent on a QP, 0 = 1 s */
	uint64_t deadline_ns;        /* an operation older than this without any progress fails its QP, 0 = 10 s */
};

struct dq_device_attr {
	uint64_t rate_bps;           /* of the port, bits per second, each direction */
	uint64_t line_rate_bps;      /* what its own send queue drains at; 0 = not known (software): segments leave when posted */
	uint32_t mtu;                /* payload bytes of one packet */
	uint32_t header_bytes;       /* wire overhead of one packet */
	uint32_t max_qps;
	uint32_t max_send_depth;     /* work requests of one QP */
	uint64_t max_segment_bytes;
	bool dmabuf;                 /* dma-buf registration was proved to work */
	bool up;
	uint64_t noise_ns;           /* wake-up noise of completion times: a delay below this says nothing about the fabric */
	char address[64];            /* text: "127.0.0.1:40123"; verbs: the GID in use */
};

/* What happened to a device, each change once. */
enum dq_device_change {
	DQ_DEVICE_UP = 1,            /* its port works again */
	DQ_DEVICE_DOWN = 2,          /* its port went down; QPs may survive a short outage */
	DQ_DEVICE_ADDRESS = 3,       /* its table of addresses (GIDs) changed; the one in use may be gone */
	DQ_DEVICE_FATAL = 4,         /* it is gone, or its driver gave up: everything on it fails */
	DQ_DEVICE_OTHER = 5,         /* told for the log only */
};

struct dq_device_event {
	uint32_t change;             /* enum dq_device_change */
	uint32_t port;
	char text[120];              /* the provider's name of it: "port 1: IBV_EVENT_PORT_ERR" */
};

enum dq_access { DQ_ACCESS_REMOTE_WRITE = 1u, DQ_ACCESS_REMOTE_READ = 2u }; /* local access is implied */

/* Memory to register: mapped at addr for len bytes, or the dma-buf fd (fd >= 0; kept by dup) from offset on. */
struct dq_mem_desc {
	void *addr;
	uint64_t len;
	int dmabuf_fd;               /* -1: none */
	uint64_t dmabuf_offset;
	unsigned access;
};

/* What a peer needs to write into registered memory. */
struct dq_mem_key {
	uint64_t addr;               /* remote address of the first byte */
	uint64_t key;
};

enum dq_qp_kind { DQ_QP_CONTROL, DQ_QP_DATA };

struct dq_qp_attr {
	void *ctx;                   /* comes back in each completion */
	enum dq_qp_kind kind;
	uint32_t send_depth;         /* writes or sends posted and not yet completed */
	uint32_t recv_depth;         /* control: receives posted by post_recv; data: incoming writes-with-immediate */
	struct dq_link *link;        /* emulated link for what this QP sends, or NULL; must outlive the QP */
	uint8_t traffic_class;       /* 0 = the device's */
	uint32_t flow_label;         /* 20 bits: entropy for ECMP; tcp ignores it */
	uint32_t retries;            /* verbs: after so many acknowledgement time-outs the QP fails, 0..7 */
	uint64_t ack_timeout_ns;     /* verbs: rounded up to 4.096 us * 2^n; 0 = 67 ms */
};

struct dq_write {                /* RDMA WRITE WITH IMMEDIATE */
	uint64_t wr_id;
	struct dq_mem *mem;          /* local source; may be NULL when len is 0 */
	uint64_t offset;
	uint64_t remote_addr;
	uint64_t remote_key;
	uint32_t len;
	uint32_t imm;
};

struct dq_send {                 /* control QP; the bytes stay unchanged until the completion */
	uint64_t wr_id;
	struct dq_mem *mem;
	uint64_t offset;
	uint32_t len;
};

struct dq_recv {
	uint64_t wr_id;
	struct dq_mem *mem;
	uint64_t offset;
	uint32_t len;
};

enum dq_wc_op {
	DQ_WC_WRITE,                 /* a posted write reached the peer's memory (the peer acknowledged it) */
	DQ_WC_SEND,                  /* a posted send was taken by a receive of the peer */
	DQ_WC_RECV,                  /* a send of the peer filled a posted receive: wr_id, len */
	DQ_WC_SEGMENT,               /* a write-with-immediate of the peer is complete in memory: imm, len */
	DQ_WC_CONNECTED,             /* the QP is usable in both directions */
	DQ_WC_FAILED,                /* the QP went to error; once a QP; its posted work follows or preceded it as DQ_WC_FLUSHED */
};

enum dq_wc_status {
	DQ_WC_SUCCESS,
	DQ_WC_FLUSHED,               /* not carried out as far as this end knows: the QP was fenced or failed */
	DQ_WC_REMOTE_ACCESS,         /* key, bounds or rights of a write: the peer refused it, or it was the peer's, and refused here */
	DQ_WC_REMOTE_GONE,           /* connection closed or reset by the peer */
	DQ_WC_TIMEOUT,               /* no progress before the deadline, or connection not made in time */
	DQ_WC_LOCAL,                 /* local error: memory, length */
	DQ_WC_PROTOCOL,              /* the peer sent what this version does not understand, or a send longer than the receive */
	DQ_WC_NOT_READY,             /* the peer had no receive posted, again and again; verbs asks until the deadline: TIMEOUT */
	DQ_WC_PATH_MTU,              /* small packets reach the peer and come back, packets of the path MTU do not */
	DQ_WC_DEVICE,                /* the local device or its port failed */
};

struct dq_wc {
	uint64_t wr_id;
	void *ctx;                   /* dq_qp_attr.ctx */
	uint64_t time_ns;            /* when it happened; on an emulated link: in its virtual time */
	uint32_t len;
	uint32_t imm;                /* host byte order here */
	uint8_t op;                  /* enum dq_wc_op */
	uint8_t status;              /* enum dq_wc_status */
	uint16_t reserved;
	uint32_t vendor;             /* provider's own detail: errno, vendor error */
};

/* Datagrams, for probes: unreliable, connectionless, time-stamped. */
enum dq_dgram_kind { DQ_DGRAM_SENT, DQ_DGRAM_RECEIVED, DQ_DGRAM_SEND_ERROR };

struct dq_dgram_event {
	uint64_t id;                 /* SENT, SEND_ERROR: the id given to dgram_send */
	uint64_t time_ns;            /* when it left or came in, by the best clock there is; all events of one endpoint use one clock */
	uint8_t kind;
	uint16_t len;                /* RECEIVED */
	int error;                   /* SEND_ERROR: negative errno */
	struct dq_endpoint from;     /* RECEIVED */
	uint8_t data[128];           /* RECEIVED */
};

struct dq_provider {
	const char *name;
	bool mem_any_thread;
	bool qp_any_thread;

	int (*device_open)(const struct dq_device_config *cfg, struct dq_device **out, struct dq_error *err);
	void (*device_close)(struct dq_device *dev);              /* QPs and memory must be gone */
	void (*device_query)(struct dq_device *dev, struct dq_device_attr *out);
	/* The next change, as found by poll: 1, or 0 when there is none. NULL: this provider tells none. */
	int (*device_event)(struct dq_device *dev, struct dq_device_event *out);
	/* Use another local address (verbs: a GID as text) from now on. QPs and datagram endpoints that exist keep the old one.
	 * NULL: cannot be changed. */
	int (*device_readdress)(struct dq_device *dev, const char *address, struct dq_error *err);

	int (*mem_register)(struct dq_device *dev, const struct dq_mem_desc *desc, struct dq_mem **out, struct dq_error *err);
	void (*mem_deregister)(struct dq_mem *mem);               /* no work that uses it may be outstanding */
	/* What a peer needs to write into [offset, offset + len) of it; out->addr is that of offset. -ERANGE: not one key covers
	 * them, as memory registered in pieces has one only for ranges of half a piece. */
	int (*mem_key)(const struct dq_mem *mem, uint64_t offset, uint64_t len, struct dq_mem_key *out);
	int (*mem_flush)(struct dq_mem *mem, uint64_t offset);    /* order earlier incoming writes before reads by a GPU; no-op on tcp */

	int (*qp_create)(struct dq_device *dev, const struct dq_qp_attr *attr, struct dq_qp **out, struct dq_error *err);
	void (*qp_endpoint)(const struct dq_qp *qp, struct dq_endpoint *out);
	/* Begin to connect; DQ_WC_CONNECTED or DQ_WC_FAILED follows. One end has dial true, the other false. A passive end must
	 * be told the peer's endpoint too, and accepts only the connection that carries its own one-time token. It may be told after
	 * the other dialed, but soon: within the retries on verbs. Hostile endpoints are refused, or lead nowhere; verbs may look for
	 * the way to an address for a second. */
	int (*qp_connect)(struct dq_qp *qp, const struct dq_endpoint *peer, bool dial, struct dq_error *err);
	/* To ERROR: nothing more is sent or received, the peer can write no more through it; posted work completes FLUSHED and
	 * DQ_WC_FAILED with status DQ_WC_FLUSHED ends the QP's completions (nothing when it had failed before). At the latest when
	 * that was polled, no memory is written through it any more, and every segment that came whole was polled before. */
	void (*qp_fence)(struct dq_qp *qp);
	void (*qp_destroy)(struct dq_qp *qp);                     /* completions not yet polled are dropped */

	/* Batches; return how many were taken (fewer when the depth is reached), or negative errno: -ENOTCONN, -EIO (the QP failed),
	 * -EINVAL (the first one is wrong: memory, range). Of several, those before a wrong one are taken; the QP is as
	 * good as before. Writes are for data QPs, sends and receives for control QPs. Each has one completion, in order. */
	int (*post_write)(struct dq_qp *qp, const struct dq_write *wr, unsigned n);
	int (*post_send)(struct dq_qp *qp, const struct dq_send *wr, unsigned n);
	int (*post_recv)(struct dq_qp *qp, const struct dq_recv *wr, unsigned n);

	/* Make progress and take up to n completions (0: progress only). Never blocks. Posted work and acknowledgements of what
	 * was taken go out at the beginning of the next poll at the latest, so poll until arm() says that there is nothing to do. */
	int (*poll)(struct dq_device *dev, struct dq_wc *out, unsigned n);
	/* Before sleeping: 0 = the event fd will become readable at the next event; 1 = there is work now, poll again. */
	int (*arm)(struct dq_device *dev);
	int (*event_fd)(const struct dq_device *dev);             /* to be watched level-triggered for reading */
	uint64_t (*next_deadline)(const struct dq_device *dev);   /* poll again by then at the latest, DQ_NEVER if no timer runs */

	int (*dgram_open)(struct dq_device *dev, struct dq_dgram **out, struct dq_error *err);
	void (*dgram_close)(struct dq_dgram *dg);
	void (*dgram_endpoint)(const struct dq_dgram *dg, struct dq_endpoint *out);
	/* flow_label: as of the QP whose way through the fabric it shall take; tcp ignores it. -EMSGSIZE: longer than 128. -EAGAIN: not
	 * now, poll and try again (too many under way, or the way to a new peer is still looked for). Another error: not an endpoint
	 * that can be reached from here. What arrives has in `from` the very bytes of its sender's dgram_endpoint. */
	int (*dgram_send)(struct dq_dgram *dg, const struct dq_endpoint *to, uint32_t flow_label, struct dq_link *link, uint64_t id,
			  const void *data, uint16_t len);
	int (*dgram_poll)(struct dq_dgram *dg, struct dq_dgram_event *out, unsigned n);
	/* To be watched level-triggered for reading, after a poll that took fewer than it could. */
	int (*dgram_fd)(const struct dq_dgram *dg);
	/* Poll again by then at the latest; 0 = before any sleep: the fd need not be readable for what is there. */
	uint64_t (*dgram_next_deadline)(const struct dq_dgram *dg);
	const char *(*dgram_time_source)(const struct dq_dgram *dg); /* "kernel", "completion", "software", "virtual" */
	/* What is taken off the times of what comes in, for the wake-up of the thread that reads the clock: measured, changing, 0
	 * when not known. NULL: nothing is ever taken off. */
	uint64_t (*dgram_correction_ns)(const struct dq_dgram *dg);
};

/* By name: "tcp", "verbs", "fault:tcp" (fault.h), ...; NULL when this build has no such provider. */
const struct dq_provider *dq_provider_find(const char *name);

#endif
