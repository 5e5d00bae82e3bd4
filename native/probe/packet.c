/* SPDX-License-Identifier: Apache-2.0 */
#include "probe/packet.h"

#include <errno.h>

static void put_le(uint8_t *at, uint64_t value, unsigned bytes)
{
	for (unsigned i = 0; i < bytes; i++)
		at[i] = (uint8_t)(value >> (8 * i));
}

static uint64_t get_le(const uint8_t *at, unsigned bytes)
{
	uint64_t value = 0;
	for (unsigned i = 0; i < bytes; i++)
		value |= (uint64_t)at[i] << (8 * i);
	return value;
}

void dq_probe_packet_encode(const struct dq_probe_packet *p, uint8_t out[DQ_PROBE_PACKET_BYTES])
{
	put_le(out, DQ_PROBE_MAGIC, 4);
	put_le(out + 4, DQ_PROBE_VERSION, 1);
	put_le(out + 5, p->type, 1);
	put_le(out + 6, 0, 2);
	put_le(out + 8, p->id, 8);
	put_le(out + 16, p->token, 8);
	put_le(out + 24, (uint64_t)p->delta_ns, 8);
}

int dq_probe_packet_decode(const uint8_t *data, size_t len, struct dq_probe_packet *out)
{
	if (len != DQ_PROBE_PACKET_BYTES)
		return -EMSGSIZE;
	if (get_le(data, 4) != DQ_PROBE_MAGIC)
		return -EPROTO;
	if (data[4] != DQ_PROBE_VERSION)
		return -EPROTONOSUPPORT;
	if (data[5] < DQ_PROBE_PROBE || data[5] > DQ_PROBE_ACK2 || get_le(data + 6, 2) != 0)
		return -EPROTO;
	uint64_t delta = get_le(data + 24, 8);
	if (data[5] != DQ_PROBE_ACK2 && delta != 0)
		return -EPROTO;
	out->type = (enum dq_probe_type)data[5];
	out->id = get_le(data + 8, 8);
	out->token = get_le(data + 16, 8);
	out->delta_ns = (int64_t)delta;
	return 0;
}
