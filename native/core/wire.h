/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The wire format between two daemons: immediate data of segments, and control packets. Its only home. Pure.
 *
 * Immediate data, 32 bits:   slot:16 | last:1 | index:15      (sent in network byte order by the provider)
 *
 * Control packet (at most DQ_CONTROL_BYTES, on the control QP), all integers little-endian, no padding:
 *     magic u16 = 0x5144 | version u8 | flags u8 (0) | bytes u16 (whole packet) | count u16 (messages in it)
 *     first u64    number of the first message; messages are numbered from 1 on a VC and direction, without gaps
 *     ack u64      every message of the other direction with a number below this has been handled
 *     credits u32  receives posted for the other direction since the VC began (free-running)
 *     reserved u32 (0)
 * then `count` messages: type u8 | flags u8 | body bytes u16 | body. A packet with count 0 carries ack and credits only.
 * A body longer than this version knows is accepted and its tail ignored; a shorter one is an error. So is a type that
 * this version does not know: two ends that speak one version know the same types.
 *
 * Bodies of version 1, fields in this order:
 *     FLOW_OPEN    flow u32 | client u32 | listener u32 | nonce 2 x u64                                            28 bytes
 *     FLOW_ACCEPT  flow u32 | peer_flow u32 | status i32                                                           12
 *     FLOW_CLOSE   flow u32 | status i32                                                                            8
 *     RTR          slot u16 | nkeys u8 | flow u32 | grant_serial u32 | grant u64 | serial u64 | tag u64 |
 *                  length u64 | addr u64 | nkeys x key u64                                                         51 + 8 nkeys
 *     EXPORT       nkeys u8 | flow u32 | region u32 | length u64 | addr u64 | nkeys x key u64                      25 + 8 nkeys
 *     UNEXPORT     flow u32 | region u32                                                                            8
 *     PUT          slot u16 | flow u32 | region u32 | serial u64 | cookie u64 | length u64 | offset u64            42
 *     DONE         slot u16 | status i32 | serial u64 | length u64                                                 22
 *     CANCEL       slot u16 | serial u64 | length u64                                                              18
 *     GRANT        grant_serial u32 | grant u64                                                                    12
 *     BACKLOG      backlog u64                                                                                      8
 *     ERROR        status i32 | text bytes u8 (0..DQ_WIRE_TEXT_MAX) | text, without NUL                             5 + text
 */
#ifndef DQ_CORE_WIRE_H
#define DQ_CORE_WIRE_H

#include "core/base.h"

#define DQ_WIRE_VERSION 1u
#define DQ_WIRE_MAGIC 0x5144u
#define DQ_WIRE_HEAD_BYTES 32u
#define DQ_WIRE_MESSAGE_HEAD_BYTES 4u
#define DQ_WIRE_MAX_RAILS 8u
#define DQ_WIRE_TEXT_MAX 120u

static inline uint32_t dq_imm_encode(uint16_t slot, bool last, uint16_t index)
{
	return (uint32_t)slot << 16 | (uint32_t)last << 15 | (index & 0x7fffu);
}
static inline uint16_t dq_imm_slot(uint32_t imm) { return (uint16_t)(imm >> 16); }
static inline bool dq_imm_last(uint32_t imm) { return imm >> 15 & 1; }
static inline uint16_t dq_imm_index(uint32_t imm) { return imm & 0x7fff; }

enum dq_message_type {
	DQ_MSG_FLOW_OPEN = 1,   /* opener -> listener's daemon */
	DQ_MSG_FLOW_ACCEPT = 2, /* answer; status != 0 refuses */
	DQ_MSG_FLOW_CLOSE = 3,  /* this end will never again write or send on the flow; sent once by each end. With flag
				 * DQ_FLAG_OPENER: withdraws a FLOW_OPEN; FLOW_ACCEPT answers, as it does anyway */
	DQ_MSG_RTR = 4,         /* ready to receive: a posted receive, with its slot */
	DQ_MSG_EXPORT = 5,      /* region that the peer client may put into */
	DQ_MSG_UNEXPORT = 6,    /* withdraw it; answered by UNEXPORT with flag DQ_FLAG_ANSWER after the last put into it */
	DQ_MSG_PUT = 7,         /* explains a slot named by the sender */
	DQ_MSG_DONE = 8,        /* the other end is through with a message: all its segments completed, or all arrived */
	DQ_MSG_CANCEL = 9,      /* withdraw an RTR; answered by DONE with its status */
	DQ_MSG_GRANT = 10,      /* inbound level for this VC */
	DQ_MSG_BACKLOG = 11,    /* bytes waiting at this sender */
	DQ_MSG_ERROR = 12,      /* why the sender of this is about to drop the VC */
	DQ_MSG_RESUME = 13,     /* replay after a QP failure: reserved numbers, refused by version 1 */
	DQ_MSG_STATE = 14,
};

#define DQ_FLAG_ANSWER 1u
#define DQ_FLAG_OPENER 2u         /* FLOW_CLOSE before the answer to FLOW_OPEN: flow is the opener's id */

/* One decoded control message. Which members are set depends on type. */
struct dq_message {
	uint8_t type;
	uint8_t flags;
	uint16_t slot;            /* RTR PUT DONE CANCEL */
	uint32_t flow;            /* OPEN: the opener's flow id; ACCEPT, CLOSE, RTR, EXPORT, UNEXPORT, PUT: the receiver's */
	uint32_t peer_flow;       /* ACCEPT: the acceptor's flow id */
	uint32_t client;          /* OPEN: the listener's client */
	uint32_t listener;        /* OPEN */
	uint32_t region;          /* EXPORT UNEXPORT PUT */
	int32_t status;           /* ACCEPT CLOSE DONE ERROR: enum dq_status */
	uint32_t grant_serial;    /* GRANT, RTR */
	uint64_t grant;           /* GRANT, RTR: bytes; 0 in an RTR = no news */
	uint64_t backlog;         /* BACKLOG: bytes */
	uint64_t nonce[2];        /* OPEN */
	uint64_t serial;          /* RTR PUT DONE CANCEL: of the message, never reused on a VC */
	uint64_t tag;             /* RTR */
	uint64_t cookie;          /* PUT */
	uint64_t length;          /* RTR EXPORT PUT: bytes; DONE of a receive, CANCEL of a put: bytes that were written */
	uint64_t offset;          /* PUT: in the region */
	uint64_t addr;            /* RTR EXPORT */
	uint8_t nkeys;            /* RTR EXPORT: 1..DQ_WIRE_MAX_RAILS, one a shared rail of the host pair */
	uint64_t keys[DQ_WIRE_MAX_RAILS];
	char text[DQ_WIRE_TEXT_MAX + 1]; /* ERROR, NUL-terminated here */
};

struct dq_packet_head {
	uint8_t version;
	uint16_t bytes;
	uint16_t count;
	uint64_t first;
	uint64_t ack;
	uint32_t credits;
};

void dq_packet_head_encode(const struct dq_packet_head *h, void *out); /* DQ_WIRE_HEAD_BYTES */
/*
 * `bytes` is what was received, and the packet must say the same. 0; -EPROTO (magic, lengths, a reserved field that is not
 * 0, a first number of 0); -EPROTONOSUPPORT (another version: only h->version is filled, the rest may be laid out otherwise).
 */
int dq_packet_head_decode(struct dq_packet_head *h, const void *in, size_t bytes);
/* Bytes written; -ENOSPC when `room` is too small; -EINVAL when version 1 has no such type, or nkeys is out of range. */
int dq_message_encode(const struct dq_message *m, void *out, size_t room);
/*
 * Bytes consumed, or -EPROTO. Any bytes are safe. Values are checked for form (counts, NULs), not for meaning. Members that
 * the type does not have are 0. After `count` messages a packet must be used up: the caller checks that.
 */
int dq_message_decode(struct dq_message *m, const void *in, size_t bytes);
const char *dq_message_name(uint8_t type); /* "RTR", ...; "?" when unknown */

#endif
