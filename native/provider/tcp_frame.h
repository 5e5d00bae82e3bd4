/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the tcp provider puts on the wire; its only home. Everything is little-endian and of fixed size.
 *
 *   connection:  HELLO of the dialing end (64 B), HELLO of the passive end (64 B), then frames in both directions
 *   frame:       header (40 B), then `len` payload bytes for WRITE and SEND
 *   datagram:    header (16 B), then the payload
 *
 * `time` is the virtual arrival time of an emulated link in ns of CLOCK_MONOTONIC (both ends are on one machine then), or
 * 0 where there is no link. A change of any layout raises DQ_TCP_VERSION.
 */
#ifndef DQ_PROVIDER_TCP_FRAME_H
#define DQ_PROVIDER_TCP_FRAME_H

#include <endian.h>
#include <string.h>

#include "core/base.h"

#define DQ_TCP_VERSION 1u
#define DQ_TCP_MAGIC "DQPLBTCP"       /* 8 bytes, without the NUL */
#define DQ_TCP_DGRAM_MAGIC 0x44515550u
#define DQ_TCP_TOKEN_BYTES 16u
#define DQ_TCP_HELLO_BYTES 64u
#define DQ_TCP_HEADER_BYTES 40u
#define DQ_TCP_DGRAM_HEADER_BYTES 16u
#define DQ_TCP_ENDPOINT_BYTES 44u

enum dq_tcp_frame_type {
	DQ_TCP_WRITE = 1,             /* imm, len, addr, key, time; payload */
	DQ_TCP_SEND = 2,              /* len, time; payload */
	DQ_TCP_ACK = 3,               /* count: WRITE and SEND frames taken since the connection began (mod 2^32); time */
	DQ_TCP_NAK = 4,               /* count: frames taken; the next one was refused: status. The connection ends here */
	DQ_TCP_HEARTBEAT = 5,         /* flags: DQ_TCP_REPLY in the answer */
};

#define DQ_TCP_REPLY 1u           /* flag of HEARTBEAT */

enum dq_tcp_hello_status { DQ_TCP_HELLO_OK = 0, DQ_TCP_HELLO_VERSION = 1 };

struct dq_tcp_frame {
	uint8_t type;
	uint8_t flags;
	uint16_t status;              /* NAK: enum dq_wc_status */
	uint32_t len;
	uint32_t imm;
	uint32_t count;
	uint64_t addr;
	uint64_t key;
	uint64_t time;
};

struct dq_tcp_hello {
	uint16_t version;
	uint16_t status;              /* of the answer: enum dq_tcp_hello_status */
	uint32_t to_qp;               /* number and token of the QP that is spoken to */
	uint8_t to_token[DQ_TCP_TOKEN_BYTES];
	uint32_t from_qp;             /* number and token of the speaker's QP */
	uint8_t from_token[DQ_TCP_TOKEN_BYTES];
};

struct dq_tcp_dgram_header {
	uint16_t len;                 /* payload bytes that follow */
	uint64_t time;
};

static inline void dq_le16_put(uint8_t *p, uint16_t v) { v = htole16(v); memcpy(p, &v, sizeof v); }
static inline void dq_le32_put(uint8_t *p, uint32_t v) { v = htole32(v); memcpy(p, &v, sizeof v); }
static inline void dq_le64_put(uint8_t *p, uint64_t v) { v = htole64(v); memcpy(p, &v, sizeof v); }
static inline uint16_t dq_le16_get(const uint8_t *p) { uint16_t v; memcpy(&v, p, sizeof v); return le16toh(v); }
static inline uint32_t dq_le32_get(const uint8_t *p) { uint32_t v; memcpy(&v, p, sizeof v); return le32toh(v); }
static inline uint64_t dq_le64_get(const uint8_t *p) { uint64_t v; memcpy(&v, p, sizeof v); return le64toh(v); }

static inline void dq_tcp_frame_put(uint8_t *p, const struct dq_tcp_frame *f)
{
	p[0] = f->type;
	p[1] = f->flags;
	dq_le16_put(p + 2, f->status);
	dq_le32_put(p + 4, f->len);
	dq_le32_put(p + 8, f->imm);
	dq_le32_put(p + 12, f->count);
	dq_le64_put(p + 16, f->addr);
	dq_le64_put(p + 24, f->key);
	dq_le64_put(p + 32, f->time);
}

static inline void dq_tcp_frame_get(const uint8_t *p, struct dq_tcp_frame *f)
{
	f->type = p[0];
	f->flags = p[1];
	f->status = dq_le16_get(p + 2);
	f->len = dq_le32_get(p + 4);
	f->imm = dq_le32_get(p + 8);
	f->count = dq_le32_get(p + 12);
	f->addr = dq_le64_get(p + 16);
	f->key = dq_le64_get(p + 24);
	f->time = dq_le64_get(p + 32);
}

static inline void dq_tcp_hello_put(uint8_t *p, const struct dq_tcp_hello *h)
{
	memset(p, 0, DQ_TCP_HELLO_BYTES);
	memcpy(p, DQ_TCP_MAGIC, 8);
	dq_le16_put(p + 8, h->version);
	dq_le16_put(p + 10, h->status);
	dq_le32_put(p + 12, h->to_qp);
	memcpy(p + 16, h->to_token, DQ_TCP_TOKEN_BYTES);
	dq_le32_put(p + 32, h->from_qp);
	memcpy(p + 36, h->from_token, DQ_TCP_TOKEN_BYTES);
}

/* 0, or -1 when the magic is wrong. The version is for the caller to judge. */
static inline int dq_tcp_hello_get(const uint8_t *p, struct dq_tcp_hello *h)
{
	if (memcmp(p, DQ_TCP_MAGIC, 8) != 0)
		return -1;
	h->version = dq_le16_get(p + 8);
	h->status = dq_le16_get(p + 10);
	h->to_qp = dq_le32_get(p + 12);
	memcpy(h->to_token, p + 16, DQ_TCP_TOKEN_BYTES);
	h->from_qp = dq_le32_get(p + 32);
	memcpy(h->from_token, p + 36, DQ_TCP_TOKEN_BYTES);
	return 0;
}

static inline void dq_tcp_dgram_put(uint8_t *p, const struct dq_tcp_dgram_header *h)
{
	dq_le32_put(p, DQ_TCP_DGRAM_MAGIC);
	dq_le16_put(p + 4, DQ_TCP_VERSION);
	dq_le16_put(p + 6, h->len);
	dq_le64_put(p + 8, h->time);
}

/* 0, or -1 when it is none of ours, of another version, or its length is wrong. */
static inline int dq_tcp_dgram_get(const uint8_t *p, size_t bytes, struct dq_tcp_dgram_header *h)
{
	if (bytes < DQ_TCP_DGRAM_HEADER_BYTES || dq_le32_get(p) != DQ_TCP_DGRAM_MAGIC || dq_le16_get(p + 4) != DQ_TCP_VERSION)
		return -1;
	h->len = dq_le16_get(p + 6);
	h->time = dq_le64_get(p + 8);
	return h->len == bytes - DQ_TCP_DGRAM_HEADER_BYTES ? 0 : -1;
}

#endif
