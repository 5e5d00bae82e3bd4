/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The probe packet: the only home of its format. 32 bytes, little-endian:
 *
 *     0 magic:32 | 4 version:8 | 5 type:8 | 6 zero:16 | 8 id:64 | 16 token:64 | 24 delta:64
 *
 * id:    of the probe, chosen by the prober and echoed: life (random, a start of the prober) << 32 | counter
 * token: of the receiving end, whichever way the packet goes. Who cannot show it is not listened to.
 * delta: in ACK2 the responder's T4 - T3, ns, signed; 0 in the others
 *
 * Pure. Every packet has the same size, so an answer is never larger than the question.
 */
#ifndef DQ_PROBE_PACKET_H
#define DQ_PROBE_PACKET_H

#include "core/base.h"

#define DQ_PROBE_PACKET_BYTES 32u
#define DQ_PROBE_MAGIC 0x42505144u /* "DQPB" */
#define DQ_PROBE_VERSION 1u

enum dq_probe_type { DQ_PROBE_PROBE = 1, DQ_PROBE_ACK1 = 2, DQ_PROBE_ACK2 = 3 };

struct dq_probe_packet {
	enum dq_probe_type type;
	uint64_t id;
	uint64_t token;
	int64_t delta_ns;
};

void dq_probe_packet_encode(const struct dq_probe_packet *p, uint8_t out[DQ_PROBE_PACKET_BYTES]);
/* 0; -EMSGSIZE: not len == 32; -EPROTO: not this format; -EPROTONOSUPPORT: another version. *out is written only on 0. */
int dq_probe_packet_decode(const uint8_t *data, size_t len, struct dq_probe_packet *out);

#endif
