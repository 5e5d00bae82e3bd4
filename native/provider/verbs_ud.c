/* SPDX-License-Identifier: Apache-2.0 */
#include "provider/verbs_ud.h"

#include <errno.h>

#include "provider/verbs.h"

#define LID_MULTICAST 0xc000u  /* from here on: no host's */
#define IPV4_AT 20u
#define IPV4_BYTES 20u
#define IPV4_SOURCE (IPV4_AT + 12u)
#define GRH_SOURCE 8u

static uint32_t get_be(const uint8_t *at, unsigned bytes)
{
	uint32_t value = 0;
	for (unsigned i = 0; i < bytes; i++)
		value = value << 8 | at[i];
	return value;
}

void dq_verbs_ud_endpoint_put(struct dq_endpoint *out, const struct dq_verbs_ud_peer *peer)
{
	struct dq_verbs_peer p = {.qpn = peer->qpn, .qkey = DQ_VERBS_UD_QKEY, .lid = peer->lid, .mtu = IBV_MTU_256, .link_layer = peer->layer};

	memcpy(p.gid.raw, peer->gid, sizeof p.gid.raw);
	dq_verbs_endpoint_put(out, DQ_VERBS_ENDPOINT_DGRAM, &p);
}

int dq_verbs_ud_endpoint_get(const struct dq_endpoint *in, struct dq_verbs_ud_peer *out, struct dq_error *err)
{
	static const uint8_t no_gid[DQ_VERBS_GID_BYTES];
	struct dq_endpoint again;
	struct dq_verbs_peer p;

	memset(out, 0, sizeof *out);
	const int rc = dq_verbs_endpoint_get(in, DQ_VERBS_ENDPOINT_DGRAM, &p, err);
	if (rc)
		return rc;
	*out = (struct dq_verbs_ud_peer){.qpn = p.qpn, .lid = p.lid, .layer = p.link_layer};
	memcpy(out->gid, p.gid.raw, sizeof out->gid);
	/* GIDs from ff on are multicast groups: not one host, and the answers would be many. */
	if (memcmp(out->gid, no_gid, sizeof no_gid) == 0 || out->gid[0] == 0xff)
		return dq_error_set(err, -EPROTO, "endpoint of datagrams has GID %02x..., expected one host's", out->gid[0]);
	if (out->layer == IBV_LINK_LAYER_ETHERNET ? out->lid != 0 : out->lid == 0 || out->lid >= LID_MULTICAST)
		return dq_error_set(err, -EPROTO, "endpoint of datagrams has LID 0x%x; expected 0 on Ethernet, 1 to 0xbfff on InfiniBand",
				    out->lid);
	dq_verbs_ud_endpoint_put(&again, out);
	if (memcmp(again.data, in->data, again.len) != 0)
		return dq_error_set(err, -EPROTO, "endpoint of datagrams has a Q_Key, MTU, packet number or reserved field other than fixed");
	return 0;
}

/* The sum over a header that carries its own checksum is all ones (RFC 1071). */
static bool ipv4_sum_is_right(const uint8_t *header)
{
	uint32_t sum = 0;
	for (unsigned i = 0; i < IPV4_BYTES; i += 2)
		sum += get_be(header + i, 2);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum == 0xffff;
}

int dq_verbs_ud_source(const uint8_t grh[DQ_VERBS_UD_GRH_BYTES], uint8_t gid[DQ_VERBS_GID_BYTES])
{
	const bool maybe_6 = grh[0] >> 4 == 6;
	const bool maybe_4 = grh[IPV4_AT] == 0x45;

	/* The undefined bytes may look like version 6 by chance, and a GID may look like an IPv4 header: then the checksum, which
	 * does not come right by chance, decides. Alone it is not asked: not all hardware leaves it as it was on the wire. */
	if (maybe_4 && (!maybe_6 || ipv4_sum_is_right(grh + IPV4_AT))) {
		memset(gid, 0, 10);
		gid[10] = gid[11] = 0xff;
		memcpy(gid + 12, grh + IPV4_SOURCE, 4);
		return 0;
	}
	if (maybe_6) {
		memcpy(gid, grh + GRH_SOURCE, DQ_VERBS_GID_BYTES);
		return 0;
	}
	return -EPROTO;
}
