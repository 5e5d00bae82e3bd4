/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Private to the datagram endpoint of the verbs provider: its object, and what its two files call of each other.
 *
 * The endpoint is one UD queue pair with completion queues and a completion channel of its own, so the engine's thread and this
 * one share nothing but the device, which libibverbs lets them. What is sent and what comes in have a completion queue each:
 * nobody needs to be woken for what has left within the call, as most does.
 *
 * Memory is one block: places for datagrams that come in, each behind the 40 bytes of its route; places for those that go out; and
 * one that takes the rest of any that is longer than it may be, as one that does not fit would stop the queue pair.
 */
#ifndef DQ_PROVIDER_VERBS_DGRAM_H
#define DQ_PROVIDER_VERBS_DGRAM_H

#include "provider/verbs.h"
#include "provider/verbs_ah.h"
#include "provider/verbs_clock.h"
#include "provider/verbs_ud.h"
#include "provider/verbs_wake.h"

#define DQ_VERBS_DGRAM_SENDS 256u      /* under way, or waiting for an address handle */
#define DQ_VERBS_DGRAM_RECEIVES 512u
#define DQ_VERBS_DGRAM_REPOST 32u      /* receives posted at once */
#define DQ_VERBS_DGRAM_READY 64u       /* events not yet polled; a power of two */
#define DQ_VERBS_DGRAM_PAYLOAD 128u    /* as in struct dq_dgram_event */
#define DQ_VERBS_DGRAM_REST 4096u      /* the longest datagram: the largest MTU */
#define DQ_VERBS_DGRAM_PLACE 192u      /* of one datagram in memory: route, payload, a multiple of the cache line */

enum dq_verbs_dgram_send_state {
	DQ_VERBS_DGRAM_FREE,
	DQ_VERBS_DGRAM_HELD,               /* waits for its address handle */
	DQ_VERBS_DGRAM_POSTED,
	DQ_VERBS_DGRAM_FAILED,             /* to be told */
};

struct dq_verbs_dgram_send {
	uint64_t id;
	uint64_t posted_ns;                /* HELD: since when */
	struct dq_verbs_ud_peer peer;
	struct dq_verbs_ah *ah;            /* POSTED: in use; NULL: to oneself */
	uint32_t flow_label;
	int error;                         /* FAILED */
	uint16_t len;
	uint8_t state;
	bool own;                          /* to oneself, for dq_verbs_wake: nobody is told */
};

struct dq_verbs_dgram_cq {
	struct ibv_cq *cq;
	struct ibv_cq_ex *ex;              /* the same one, if it is of the extended kind, which may carry stamps */
	bool armed;                        /* the channel will tell of the next completion, or has */
	bool event_due;                    /* a completion came while armed: so an event lies in the channel, or will soon */
	uint32_t unacked;                  /* events */
};

struct dq_verbs_dgram {
	struct dq_verbs_device *dev;
	const struct dq_verbs_lib *lib;
	struct dq_verbs_port port;         /* as last looked at */
	uint32_t own_gid_index;            /* atomic: the thread of the address handles reads it */
	uint64_t port_ns;                  /* next look at the device's port */
	struct dq_verbs_ud_peer self;
	struct dq_endpoint endpoint;

	struct ibv_comp_channel *channel;
	struct dq_verbs_dgram_cq sent, received;
	bool stamped;                      /* by the NIC, both of them */
	bool extended;                     /* of the extended kind also without stamps */
	struct ibv_qp *qp;
	uint32_t inline_bytes;
	uint32_t life;                     /* of the QP: completions of an earlier one are none */
	bool broken;
	uint64_t revive_ns;                /* broken: not before this */
	uint64_t revive_wait_ns;
	uint8_t *memory;
	size_t memory_bytes;
	struct ibv_mr *mr;
	uint16_t repost[DQ_VERBS_DGRAM_REPOST];
	uint32_t reposts;

	int epfd;                          /* the one below, and the channel's */
	int notify_fd;                     /* eventfd: an address handle was made, or could not be */

	struct dq_verbs_ah_cache *ahs;
	uint32_t ah_news;                  /* of them, seen */
	struct ibv_ah *own_ah;             /* to oneself; NULL: cannot be made */
	uint32_t sends_used, sends_held, sends_failed;
	struct dq_verbs_dgram_send sends[DQ_VERBS_DGRAM_SENDS];

	struct dq_dgram_event ready[DQ_VERBS_DGRAM_READY]; /* ring */
	uint32_t ready_head, ready_tail;

	struct dq_verbs_clock clock;
	uint64_t now_ns;                   /* when the clock was last read */
	uint64_t empty_ns;                 /* when nothing had come in, or a little before */
	bool asleep;                       /* it was left empty and armed, and nothing was asked of it since */
	bool more;                         /* left without a look at the end: to be polled again before a sleep */
	bool at_once;                      /* looking for what was sent just now */
	struct dq_verbs_wake wake;
	uint64_t own_cookie;               /* what datagrams to oneself show */
	uint64_t own_number;               /* of the latest */
	uint64_t own_sent_ns, own_seen_ns; /* of the latest; 0: not yet */
	bool own_slept;                    /* it ended a sleep */
	bool used;                         /* since the last series of the wake-up measurement */
	uint64_t ignored;                  /* datagrams that were none of ours */
};

/* What a work request carries: kind and life in the upper half, place in the lower. */
enum dq_verbs_dgram_wr { DQ_VERBS_DGRAM_WR_RECV = 0, DQ_VERBS_DGRAM_WR_SEND = 1 };

static inline uint64_t dq_verbs_dgram_wr_id(const struct dq_verbs_dgram *dg, enum dq_verbs_dgram_wr kind, uint32_t place)
{
	return (uint64_t)kind << 63 | (uint64_t)(dg->life & 0x7fffffffu) << 32 | place;
}

static inline uint8_t *dq_verbs_dgram_recv_place(const struct dq_verbs_dgram *dg, uint32_t i)
{
	return dg->memory + (size_t)i * DQ_VERBS_DGRAM_PLACE;
}

static inline uint8_t *dq_verbs_dgram_send_place(const struct dq_verbs_dgram *dg, uint32_t i)
{
	return dq_verbs_dgram_recv_place(dg, DQ_VERBS_DGRAM_RECEIVES + i);
}

static inline uint8_t *dq_verbs_dgram_rest(const struct dq_verbs_dgram *dg)
{
	return dq_verbs_dgram_send_place(dg, DQ_VERBS_DGRAM_SENDS);
}

static inline struct dq_verbs_dgram *dq_verbs_dgram_of(struct dq_dgram *d) { return (struct dq_verbs_dgram *)(void *)d; }
static inline const struct dq_verbs_dgram *dq_verbs_dgram_of_const(const struct dq_dgram *d)
{
	return (const struct dq_verbs_dgram *)(const void *)d;
}

/* ---- verbs_dgram.c ---- */

/* As dq_verbs_dgram_open; extended: with the kind of completion queue that stamps need, also on a device that has none, so that
 * tests reach that way. */
int dq_verbs_dgram_open_as(struct dq_device *dev, bool extended, struct dq_dgram **out, struct dq_error *err);

/* ---- verbs_dgram_qp.c: queue pair, completion queue, memory ---- */

int dq_verbs_dgram_queues_make(struct dq_verbs_dgram *dg, struct dq_error *err);
void dq_verbs_dgram_queues_free(struct dq_verbs_dgram *dg);
/* Through RESET to RTS with all receives posted; nothing posted before completes any more. 0 or negative errno. */
int dq_verbs_dgram_queues_restart(struct dq_verbs_dgram *dg);
/* The place can take the next datagram; posted in batches. */
void dq_verbs_dgram_recv_return(struct dq_verbs_dgram *dg, uint32_t place);
int dq_verbs_dgram_post(struct dq_verbs_dgram *dg, uint32_t place, struct ibv_ah *ah, uint32_t qpn, uint16_t len);
int dq_verbs_dgram_ah_make(struct dq_verbs_dgram *dg, const struct dq_verbs_ud_peer *peer, uint32_t flow_label, struct ibv_ah **out);

#endif
