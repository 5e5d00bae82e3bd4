/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who sent a datagram that came in over verbs, and what its endpoint looks like in bytes. Pure.
 *
 * An endpoint is the provider's (verbs.h) of kind DGRAM with nothing in it that the receiver of a datagram cannot know: MTU and
 * packet number have fixed values. So it has one form in bytes and can be rebuilt from what came in.
 *
 * A datagram arrives behind 40 bytes that tell its source (InfiniBand specification, Global Route Header; RoCE v2 annex):
 *     InfiniBand, RoCE v1, RoCE v2 over IPv6: version 6 in the upper half of byte 0, source GID from byte 8 on
 *     RoCE v2 over IPv4: bytes 0 to 19 are undefined, an IPv4 header without options follows; GID ::ffff:a.b.c.d
 */
#ifndef DQ_PROVIDER_VERBS_UD_H
#define DQ_PROVIDER_VERBS_UD_H

#include "provider/provider.h"

#define DQ_VERBS_UD_GRH_BYTES 40u
#define DQ_VERBS_GID_BYTES 16u

/* Shown by each datagram, else the device drops it; the uppermost bit is for privileged ones. It keeps strays out; who may be
 * answered is decided by the prober's token. */
#define DQ_VERBS_UD_QKEY 0x64717075u

struct dq_verbs_ud_peer {
	uint8_t gid[DQ_VERBS_GID_BYTES];
	uint32_t qpn;
	uint16_t lid;                /* 0 on Ethernet */
	uint8_t layer;               /* IBV_LINK_LAYER_INFINIBAND or _ETHERNET */
};

void dq_verbs_ud_endpoint_put(struct dq_endpoint *out, const struct dq_verbs_ud_peer *peer);
/* -EPROTO: not one of these endpoints, or a value that no host has. err may be NULL. */
int dq_verbs_ud_endpoint_get(const struct dq_endpoint *in, struct dq_verbs_ud_peer *out, struct dq_error *err);

/* The source GID out of the 40 bytes; -EPROTO: they are no header of either kind. Any bytes may be given. */
int dq_verbs_ud_source(const uint8_t grh[DQ_VERBS_UD_GRH_BYTES], uint8_t gid[DQ_VERBS_GID_BYTES]);

#endif
