/* SPDX-License-Identifier: Apache-2.0 */
/* Pure parts of the verbs provider: endpoints, GIDs as text, and the codes of the InfiniBand specification. */
#include <arpa/inet.h>
#include <errno.h>

#include "provider/verbs.h"

/* ---- endpoints ----
 *
 * 0 magic "dqvb", 4 version, 5 kind, 6 link layer, 7 path MTU (enum ibv_mtu), 8 LID (2), 10 zero (2), 12 QP number (4),
 * 16 packet number (4), 20 Q_Key (4), 24 zero (4), 28 GID (16). Little endian but for the GID. */

#define MAGIC "dqvb"
#define VERSION 1u

static void put16(uint8_t *p, uint32_t v)
{
	p[0] = (uint8_t)v;
	p[1] = (uint8_t)(v >> 8);
}

static void put32(uint8_t *p, uint32_t v)
{
	put16(p, v);
	put16(p + 2, v >> 16);
}

static uint32_t get16(const uint8_t *p) { return (uint32_t)p[0] | (uint32_t)p[1] << 8; }
static uint32_t get32(const uint8_t *p) { return get16(p) | get16(p + 2) << 16; }

void dq_verbs_endpoint_put(struct dq_endpoint *out, enum dq_verbs_endpoint_kind kind, const struct dq_verbs_peer *peer)
{
	memset(out, 0, sizeof *out);
	out->len = DQ_VERBS_ENDPOINT_BYTES;
	memcpy(out->data, MAGIC, 4);
	out->data[4] = VERSION;
	out->data[5] = (uint8_t)kind;
	out->data[6] = peer->link_layer;
	out->data[7] = peer->mtu;
	put16(out->data + 8, peer->lid);
	put32(out->data + 12, peer->qpn);
	put32(out->data + 16, peer->psn);
	put32(out->data + 20, peer->qkey);
	memcpy(out->data + 28, peer->gid.raw, sizeof peer->gid.raw);
}

int dq_verbs_endpoint_get(const struct dq_endpoint *in, enum dq_verbs_endpoint_kind kind, struct dq_verbs_peer *out,
			  struct dq_error *err)
{
	const uint8_t *d = in->data;

	if (in->len < 6 || in->len > sizeof in->data || memcmp(d, MAGIC, 4) != 0)
		return dq_error_set(err, -EPROTO, "endpoint of %u bytes is not one of provider verbs: both ends of a path need the same provider",
				    in->len);
	if (d[4] != VERSION)
		return dq_error_set(err, -EPROTO, "endpoint of verbs has version %u, this end speaks %u", d[4], VERSION);
	if (in->len != DQ_VERBS_ENDPOINT_BYTES || d[5] != (uint8_t)kind)
		return dq_error_set(err, -EPROTO, "endpoint of verbs has kind %u and %u bytes, expected kind %u and %u bytes", d[5], in->len,
				    (unsigned)kind, DQ_VERBS_ENDPOINT_BYTES);
	*out = (struct dq_verbs_peer){.link_layer = d[6], .mtu = d[7], .lid = (uint16_t)get16(d + 8), .qpn = get32(d + 12),
				      .psn = get32(d + 16), .qkey = get32(d + 20)};
	memcpy(out->gid.raw, d + 28, sizeof out->gid.raw);
	if (out->link_layer != IBV_LINK_LAYER_INFINIBAND && out->link_layer != IBV_LINK_LAYER_ETHERNET)
		return dq_error_set(err, -EPROTO, "endpoint of verbs has link layer %u; expected %u (InfiniBand) or %u (Ethernet)",
				    out->link_layer, IBV_LINK_LAYER_INFINIBAND, IBV_LINK_LAYER_ETHERNET);
	if (dq_verbs_mtu_bytes(out->mtu) == 0)
		return dq_error_set(err, -EPROTO, "endpoint of verbs has MTU code %u; expected 1 (256 bytes) to 5 (4096)", out->mtu);
	/* 0 and 1 are the management QPs, 0xffffff multicast. */
	if (out->qpn < 2 || out->qpn >= 0xffffff || out->psn > 0xffffff)
		return dq_error_set(err, -EPROTO, "endpoint of verbs has QP number 0x%x and packet number 0x%x; both have 24 bits, and QPs 0, 1 "
				    "and 0xffffff are reserved", out->qpn, out->psn);
	return 0;
}

/* ---- GIDs ---- */

int dq_verbs_gid_parse(const char *text, union ibv_gid *out)
{
	struct in_addr v4;

	if (inet_pton(AF_INET6, text, out->raw) == 1)
		return 0;
	if (inet_pton(AF_INET, text, &v4) != 1)
		return -EINVAL;
	memset(out->raw, 0, 10);
	out->raw[10] = out->raw[11] = 0xff;
	memcpy(out->raw + 12, &v4, 4);
	return 0;
}

void dq_verbs_gid_format(const union ibv_gid *gid, char *out, size_t size)
{
	if (!inet_ntop(AF_INET6, gid->raw, out, (socklen_t)size))
		snprintf(out, size, "?");
}

static bool gid_zero(const union ibv_gid *gid)
{
	static const union ibv_gid zero;
	return memcmp(gid, &zero, sizeof zero) == 0;
}

static bool gid_link_local(const union ibv_gid *gid)
{
	return gid->raw[0] == 0xfe && (gid->raw[1] & 0xc0) == 0x80;
}

static bool gid_ipv4(const union ibv_gid *gid)
{
	static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
	return memcmp(gid->raw, mapped, sizeof mapped) == 0;
}

bool dq_verbs_gids_alike(const union ibv_gid *a, const union ibv_gid *b)
{
	return gid_ipv4(a) == gid_ipv4(b) && gid_link_local(a) == gid_link_local(b);
}

int dq_verbs_gid_choose(const struct ibv_gid_entry *entries, unsigned n, uint8_t port, bool infiniband, const union ibv_gid *want)
{
	int best = -1;
	unsigned best_rank = 0;

	for (unsigned i = 0; i < n; i++) {
		const struct ibv_gid_entry *e = &entries[i];
		const bool v2 = e->gid_type == IBV_GID_TYPE_ROCE_V2;
		unsigned rank;

		if (e->port_num != port || gid_zero(&e->gid) || e->gid_index > UINT8_MAX) /* the interface has 8 bits for it */
			continue;
		if (want)
			rank = memcmp(&e->gid, want, sizeof *want) != 0 ? 0 : v2 ? 2 : 1;
		else if (infiniband)
			rank = e->gid_index == 0;
		else
			rank = !v2 ? 0 : gid_link_local(&e->gid) ? 1 : 2;
		if (rank > best_rank) {
			best_rank = rank;
			best = (int)i;
		}
	}
	return best;
}

/* ---- codes ---- */

uint32_t dq_verbs_mtu_bytes(uint8_t mtu)
{
	return mtu >= IBV_MTU_256 && mtu <= IBV_MTU_4096 ? 128u << mtu : 0;
}

uint8_t dq_verbs_mtu_enum(uint32_t bytes)
{
	uint8_t mtu = 0;
	while (mtu < IBV_MTU_4096 && dq_verbs_mtu_bytes((uint8_t)(mtu + 1)) <= bytes)
		mtu++;
	return mtu;
}

uint8_t dq_verbs_timeout_exponent(uint64_t ns)
{
	uint8_t n = 1;

	if (ns == 0)
		return 14;
	while (n < 31 && (UINT64_C(4096) << n) < ns)
		n++;
	return n;
}

uint64_t dq_verbs_rate_bps(uint32_t speed, uint8_t width)
{
	/* Nominal, as the kernel tells them: a RoCE port reports the pair whose product is its Ethernet rate. */
	static const struct { uint32_t code; uint64_t mbit; } speeds[] = {
		{1, 2500}, {2, 5000}, {4, 10000}, {8, 10000}, {16, 14000}, {32, 25000}, {64, 50000}, {128, 100000}, {256, 200000},
	};
	static const struct { uint8_t code, lanes; } widths[] = {{1, 1}, {2, 4}, {4, 8}, {8, 12}, {16, 2}};
	uint64_t mbit = 0, lanes = 0;

	for (size_t i = 0; i < sizeof speeds / sizeof *speeds; i++)
		if (speeds[i].code == speed)
			mbit = speeds[i].mbit;
	for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
		if (widths[i].code == width)
			lanes = widths[i].lanes;
	return mbit * lanes * 1000000u;
}
