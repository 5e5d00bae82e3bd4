/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The control channel of one VC end: numbers messages, coalesces them into packets, keeps them until acknowledged, counts
 * credits so that a packet is only sent into a posted receive (one credit is kept for a packet that only returns credits
 * and acknowledgements). Pure: bytes in, bytes out. One thread. The queue of messages grows by doubling up to a limit.
 */
#ifndef DQ_CORE_CONTROL_H
#define DQ_CORE_CONTROL_H

#include "core/base.h"
#include "core/wire.h"

#define DQ_CONTROL_QUEUE_LIMIT (64u << 20) /* bytes of messages waiting or not acknowledged: beyond it the peer is dead */

struct dq_control_channel {
	uint8_t *queue;            /* encoded messages [head, tail), a power-of-two ring would split them: kept linear */
	size_t queue_bytes;        /* allocated */
	size_t head;               /* first byte not acknowledged */
	size_t sent;               /* first byte not sent */
	size_t tail;
	uint64_t head_number;      /* number of the message at head */
	uint64_t sent_number;      /* number of the message at sent */
	uint64_t sent_most;        /* largest sent_number ever: after a rebuild messages are sent again */
	uint64_t next_number;      /* of the next message queued; the first is 1 */
	uint64_t handled;          /* next number expected from the peer = what we acknowledge */
	uint64_t handled_told;
	uint32_t credits;          /* receives each end posts */
	uint32_t posted;           /* receives posted here so far: what we advertise */
	uint32_t posted_told;
	uint32_t peer_posted;      /* as the peer advertised */
	uint32_t tx_packets;
	bool ack_now;              /* the peer waits for this acknowledgement (EXPORT) */
	uint64_t rx_packets;
	uint64_t duplicates;
};

int dq_control_init(struct dq_control_channel *c, uint32_t credits);
void dq_control_fini(struct dq_control_channel *c);
/* Number of the queued message (>= 1), 0 when memory or DQ_CONTROL_QUEUE_LIMIT is reached. */
uint64_t dq_control_queue(struct dq_control_channel *c, const struct dq_message *m);
/* Is there something to send now that credits allow? */
bool dq_control_ready(const struct dq_control_channel *c);
/* Write the next packet (room >= DQ_CONTROL_BYTES); its size. Call only when dq_control_ready. */
uint32_t dq_control_pack(struct dq_control_channel *c, void *out);
/* Both ends have a new control QP with fresh receives: everything not acknowledged is sent again, in order. */
void dq_control_rebuild(struct dq_control_channel *c);
/* A receive was posted again. */
static inline void dq_control_posted(struct dq_control_channel *c, uint32_t n)
{
	c->posted += n;
}
/* Check a packet from the peer and take its acknowledgement and credits. Calls handle(user, message) for each message not
 * seen before, in order; handle returns 0 or a negative errno which ends it. 0, -EPROTO, -EPROTONOSUPPORT, or handle's. */
int dq_control_unpack(struct dq_control_channel *c, const void *packet, size_t bytes,
		      int (*handle)(void *user, const struct dq_message *m), void *user);
/* Has the peer handled message number n? */
static inline bool dq_control_acked(const struct dq_control_channel *c, uint64_t n)
{
	return n < c->head_number;
}

#endif
