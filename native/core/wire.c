/* SPDX-License-Identifier: Apache-2.0 */
#include "core/wire.h"

#include <errno.h>
#include <string.h>

/*
 * A cursor over bytes. Running over the end sets `short_of` and reads zeros or writes nothing, so that a body is coded as a
 * plain list of fields and checked once at its end.
 */
struct cursor {
	uint8_t *at;
	const uint8_t *from;
	size_t left;
	bool short_of;
};

static void put(struct cursor *c, uint64_t value, unsigned bytes)
{
	if (c->left < bytes) {
		c->short_of = true;
		return;
	}
	for (unsigned i = 0; i < bytes; i++)
		c->at[i] = (uint8_t)(value >> (8 * i));
	c->at += bytes;
	c->left -= bytes;
}

static uint64_t get(struct cursor *c, unsigned bytes)
{
	uint64_t value = 0;

	if (c->left < bytes) {
		c->short_of = true;
		return 0;
	}
	for (unsigned i = 0; i < bytes; i++)
		value |= (uint64_t)c->from[i] << (8 * i);
	c->from += bytes;
	c->left -= bytes;
	return value;
}

void dq_packet_head_encode(const struct dq_packet_head *h, void *out)
{
	struct cursor c = { .at = out, .left = DQ_WIRE_HEAD_BYTES };

	put(&c, DQ_WIRE_MAGIC, 2);
	put(&c, h->version, 1);
	put(&c, 0, 1);
	put(&c, h->bytes, 2);
	put(&c, h->count, 2);
	put(&c, h->first, 8);
	put(&c, h->ack, 8);
	put(&c, h->credits, 4);
	put(&c, 0, 4);
}

int dq_packet_head_decode(struct dq_packet_head *h, const void *in, size_t bytes)
{
	struct cursor c = { .from = in, .left = bytes };
	uint64_t flags, reserved;

	memset(h, 0, sizeof *h);
	if (get(&c, 2) != DQ_WIRE_MAGIC)
		return -EPROTO;
	h->version = (uint8_t)get(&c, 1);
	if (c.short_of)
		return -EPROTO;
	if (h->version != DQ_WIRE_VERSION)
		return -EPROTONOSUPPORT;
	flags = get(&c, 1);
	h->bytes = (uint16_t)get(&c, 2);
	h->count = (uint16_t)get(&c, 2);
	h->first = get(&c, 8);
	h->ack = get(&c, 8);
	h->credits = (uint32_t)get(&c, 4);
	reserved = get(&c, 4);
	if (c.short_of || flags != 0 || reserved != 0 || h->bytes != bytes || bytes > DQ_CONTROL_BYTES)
		return -EPROTO;
	if (h->count == 0)
		return bytes == DQ_WIRE_HEAD_BYTES ? 0 : -EPROTO;
	if (h->first == 0 || (size_t)h->count * DQ_WIRE_MESSAGE_HEAD_BYTES > bytes - DQ_WIRE_HEAD_BYTES)
		return -EPROTO;
	return 0;
}

static int body_put(const struct dq_message *m, struct cursor *c)
{
	size_t text;

	switch (m->type) {
	case DQ_MSG_FLOW_OPEN:
		put(c, m->flow, 4);
		put(c, m->client, 4);
		put(c, m->listener, 4);
		put(c, m->nonce[0], 8);
		put(c, m->nonce[1], 8);
		return 0;
	case DQ_MSG_FLOW_ACCEPT:
		put(c, m->flow, 4);
		put(c, m->peer_flow, 4);
		put(c, (uint32_t)m->status, 4);
		return 0;
	case DQ_MSG_FLOW_CLOSE:
		put(c, m->flow, 4);
		put(c, (uint32_t)m->status, 4);
		return 0;
	case DQ_MSG_RTR:
		if (m->nkeys == 0 || m->nkeys > DQ_WIRE_MAX_RAILS)
			return -EINVAL;
		put(c, m->slot, 2);
		put(c, m->nkeys, 1);
		put(c, m->flow, 4);
		put(c, m->grant_serial, 4);
		put(c, m->grant, 8);
		put(c, m->serial, 8);
		put(c, m->tag, 8);
		put(c, m->length, 8);
		put(c, m->addr, 8);
		for (unsigned i = 0; i < m->nkeys; i++)
			put(c, m->keys[i], 8);
		return 0;
	case DQ_MSG_EXPORT:
		if (m->nkeys == 0 || m->nkeys > DQ_WIRE_MAX_RAILS)
			return -EINVAL;
		put(c, m->nkeys, 1);
		put(c, m->flow, 4);
		put(c, m->region, 4);
		put(c, m->length, 8);
		put(c, m->addr, 8);
		for (unsigned i = 0; i < m->nkeys; i++)
			put(c, m->keys[i], 8);
		return 0;
	case DQ_MSG_UNEXPORT:
		put(c, m->flow, 4);
		put(c, m->region, 4);
		return 0;
	case DQ_MSG_PUT:
		put(c, m->slot, 2);
		put(c, m->flow, 4);
		put(c, m->region, 4);
		put(c, m->serial, 8);
		put(c, m->cookie, 8);
		put(c, m->length, 8);
		put(c, m->offset, 8);
		return 0;
	case DQ_MSG_DONE:
		put(c, m->slot, 2);
		put(c, (uint32_t)m->status, 4);
		put(c, m->serial, 8);
		put(c, m->length, 8);
		return 0;
	case DQ_MSG_CANCEL:
		put(c, m->slot, 2);
		put(c, m->serial, 8);
		put(c, m->length, 8);
		return 0;
	case DQ_MSG_GRANT:
		put(c, m->grant_serial, 4);
		put(c, m->grant, 8);
		return 0;
	case DQ_MSG_BACKLOG:
		put(c, m->backlog, 8);
		return 0;
	case DQ_MSG_ERROR:
		text = strnlen(m->text, DQ_WIRE_TEXT_MAX);
		put(c, (uint32_t)m->status, 4);
		put(c, text, 1);
		for (size_t i = 0; i < text; i++)
			put(c, (uint8_t)m->text[i], 1);
		return 0;
	default:
		return -EINVAL;
	}
}

int dq_message_encode(const struct dq_message *m, void *out, size_t room)
{
	uint8_t *start = out;
	struct cursor c;
	size_t body;
	int rc;

	if (room < DQ_WIRE_MESSAGE_HEAD_BYTES)
		return -ENOSPC;
	c = (struct cursor){ .at = start + DQ_WIRE_MESSAGE_HEAD_BYTES, .left = room - DQ_WIRE_MESSAGE_HEAD_BYTES };
	rc = body_put(m, &c);
	if (rc)
		return rc;
	if (c.short_of)
		return -ENOSPC;
	body = (size_t)(c.at - start) - DQ_WIRE_MESSAGE_HEAD_BYTES;
	c = (struct cursor){ .at = start, .left = DQ_WIRE_MESSAGE_HEAD_BYTES };
	put(&c, m->type, 1);
	put(&c, m->flags, 1);
	put(&c, body, 2);
	return (int)(DQ_WIRE_MESSAGE_HEAD_BYTES + body);
}

static int body_get(struct dq_message *m, struct cursor *c)
{
	size_t text;

	switch (m->type) {
	case DQ_MSG_FLOW_OPEN:
		m->flow = (uint32_t)get(c, 4);
		m->client = (uint32_t)get(c, 4);
		m->listener = (uint32_t)get(c, 4);
		m->nonce[0] = get(c, 8);
		m->nonce[1] = get(c, 8);
		return 0;
	case DQ_MSG_FLOW_ACCEPT:
		m->flow = (uint32_t)get(c, 4);
		m->peer_flow = (uint32_t)get(c, 4);
		m->status = (int32_t)get(c, 4);
		return 0;
	case DQ_MSG_FLOW_CLOSE:
		m->flow = (uint32_t)get(c, 4);
		m->status = (int32_t)get(c, 4);
		return 0;
	case DQ_MSG_RTR:
		m->slot = (uint16_t)get(c, 2);
		m->nkeys = (uint8_t)get(c, 1);
		m->flow = (uint32_t)get(c, 4);
		m->grant_serial = (uint32_t)get(c, 4);
		m->grant = get(c, 8);
		m->serial = get(c, 8);
		m->tag = get(c, 8);
		m->length = get(c, 8);
		m->addr = get(c, 8);
		break;
	case DQ_MSG_EXPORT:
		m->nkeys = (uint8_t)get(c, 1);
		m->flow = (uint32_t)get(c, 4);
		m->region = (uint32_t)get(c, 4);
		m->length = get(c, 8);
		m->addr = get(c, 8);
		break;
	case DQ_MSG_UNEXPORT:
		m->flow = (uint32_t)get(c, 4);
		m->region = (uint32_t)get(c, 4);
		return 0;
	case DQ_MSG_PUT:
		m->slot = (uint16_t)get(c, 2);
		m->flow = (uint32_t)get(c, 4);
		m->region = (uint32_t)get(c, 4);
		m->serial = get(c, 8);
		m->cookie = get(c, 8);
		m->length = get(c, 8);
		m->offset = get(c, 8);
		return 0;
	case DQ_MSG_DONE:
		m->slot = (uint16_t)get(c, 2);
		m->status = (int32_t)get(c, 4);
		m->serial = get(c, 8);
		m->length = get(c, 8);
		return 0;
	case DQ_MSG_CANCEL:
		m->slot = (uint16_t)get(c, 2);
		m->serial = get(c, 8);
		m->length = get(c, 8);
		return 0;
	case DQ_MSG_GRANT:
		m->grant_serial = (uint32_t)get(c, 4);
		m->grant = get(c, 8);
		return 0;
	case DQ_MSG_BACKLOG:
		m->backlog = get(c, 8);
		return 0;
	case DQ_MSG_ERROR:
		m->status = (int32_t)get(c, 4);
		text = get(c, 1);
		if (text > DQ_WIRE_TEXT_MAX)
			return -EPROTO;
		for (size_t i = 0; i < text; i++) {
			m->text[i] = (char)get(c, 1);
			if (m->text[i] == '\0')
				return -EPROTO;
		}
		return 0;
	default:
		return -EPROTO;
	}
	/* RTR and EXPORT end in keys. */
	if (m->nkeys == 0 || m->nkeys > DQ_WIRE_MAX_RAILS)
		return -EPROTO;
	for (unsigned i = 0; i < m->nkeys; i++)
		m->keys[i] = get(c, 8);
	return 0;
}

int dq_message_decode(struct dq_message *m, const void *in, size_t bytes)
{
	struct cursor c = { .from = in, .left = bytes };
	size_t body;

	memset(m, 0, sizeof *m);
	m->type = (uint8_t)get(&c, 1);
	m->flags = (uint8_t)get(&c, 1);
	body = get(&c, 2);
	if (c.short_of || body > c.left)
		return -EPROTO;
	c.left = body;
	if (body_get(m, &c) != 0 || c.short_of)
		return -EPROTO;
	return (int)(DQ_WIRE_MESSAGE_HEAD_BYTES + body);
}

const char *dq_message_name(uint8_t type)
{
	static const char *const names[] = {
		[DQ_MSG_FLOW_OPEN] = "FLOW_OPEN", [DQ_MSG_FLOW_ACCEPT] = "FLOW_ACCEPT", [DQ_MSG_FLOW_CLOSE] = "FLOW_CLOSE",
		[DQ_MSG_RTR] = "RTR", [DQ_MSG_EXPORT] = "EXPORT", [DQ_MSG_UNEXPORT] = "UNEXPORT", [DQ_MSG_PUT] = "PUT",
		[DQ_MSG_DONE] = "DONE", [DQ_MSG_CANCEL] = "CANCEL", [DQ_MSG_GRANT] = "GRANT", [DQ_MSG_BACKLOG] = "BACKLOG",
		[DQ_MSG_ERROR] = "ERROR", [DQ_MSG_RESUME] = "RESUME", [DQ_MSG_STATE] = "STATE",
	};

	if (type >= sizeof names / sizeof *names || !names[type])
		return "?";
	return names[type];
}
