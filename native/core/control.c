/* SPDX-License-Identifier: Apache-2.0 */
#include "core/control.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Acknowledge at the latest after so many messages, so that the peer's queue of kept messages stays short. */
#define ACK_EVERY 256u
#define QUEUE_FIRST_BYTES 4096u

int dq_control_init(struct dq_control_channel *c, uint32_t credits)
{
	memset(c, 0, sizeof *c);
	if (credits < 4)
		return -EINVAL; /* fewer could not keep one for the return of credits and still move */
	c->queue = malloc(QUEUE_FIRST_BYTES);
	if (!c->queue)
		return -ENOMEM;
	c->queue_bytes = QUEUE_FIRST_BYTES;
	c->head_number = c->sent_number = c->sent_most = c->next_number = 1;
	c->handled = c->handled_told = 1;
	c->credits = credits;
	c->posted = c->posted_told = credits; /* both ends post theirs before they connect */
	c->peer_posted = credits;
	return 0;
}

void dq_control_fini(struct dq_control_channel *c)
{
	free(c->queue);
	c->queue = NULL;
}

void dq_control_rebuild(struct dq_control_channel *c)
{
	c->sent = c->head;
	c->sent_number = c->head_number;
	c->posted = c->posted_told = c->peer_posted = c->credits;
	c->tx_packets = 0;
}

/* Room for one more message of the largest size at the tail: move what is left to the front, or grow. */
static bool make_room(struct dq_control_channel *c)
{
	size_t live = c->tail - c->head;
	if (c->queue_bytes - c->tail >= DQ_CONTROL_BYTES)
		return true;
	if (live * 2 <= c->queue_bytes && c->queue_bytes - live >= DQ_CONTROL_BYTES) {
		memmove(c->queue, c->queue + c->head, live);
	} else {
		size_t bytes = c->queue_bytes * 2;
		uint8_t *queue;
		if (live + DQ_CONTROL_BYTES > DQ_CONTROL_QUEUE_LIMIT)
			return false;
		queue = malloc(bytes);
		if (!queue)
			return false;
		memcpy(queue, c->queue + c->head, live);
		free(c->queue);
		c->queue = queue;
		c->queue_bytes = bytes;
	}
	c->sent -= c->head;
	c->tail -= c->head;
	c->head = 0;
	return true;
}

uint64_t dq_control_queue(struct dq_control_channel *c, const struct dq_message *m)
{
	int n;
	if (!make_room(c))
		return 0;
	n = dq_message_encode(m, c->queue + c->tail, c->queue_bytes - c->tail);
	if (n < 0)
		return 0;
	c->tail += (size_t)n;
	return c->next_number++;
}

bool dq_control_ready(const struct dq_control_channel *c)
{
	uint32_t room = c->peer_posted - c->tx_packets;
	/* The last credit is for the return of credits only: two ends that both used theirs otherwise would wait forever. */
	if (c->posted - c->posted_told > c->credits / 2)
		return room > 0;
	/* Nothing to say: acknowledge, and not so often that two idle ends keep each other awake. */
	return room > 1 && (c->sent < c->tail || c->handled - c->handled_told >= ACK_EVERY || c->ack_now);
}

static size_t message_bytes(const uint8_t *p)
{
	return DQ_WIRE_MESSAGE_HEAD_BYTES + (size_t)(p[2] | p[3] << 8);
}

uint32_t dq_control_pack(struct dq_control_channel *c, void *out)
{
	struct dq_packet_head h = { .version = DQ_WIRE_VERSION, .first = c->sent_number, .ack = c->handled, .credits = c->posted };
	size_t bytes = DQ_WIRE_HEAD_BYTES, end = c->sent;

	if (c->peer_posted - c->tx_packets > 1) {
		while (end < c->tail) {
			size_t n = message_bytes(c->queue + end);
			if (bytes + n > DQ_CONTROL_BYTES)
				break;
			bytes += n;
			end += n;
			h.count++;
		}
	}
	h.bytes = (uint16_t)bytes;
	dq_packet_head_encode(&h, out);
	memcpy((uint8_t *)out + DQ_WIRE_HEAD_BYTES, c->queue + c->sent, end - c->sent);
	c->sent = end;
	c->sent_number += h.count;
	c->sent_most = DQ_MAX(c->sent_most, c->sent_number);
	c->handled_told = c->handled;
	c->posted_told = c->posted;
	c->ack_now = false;
	c->tx_packets++;
	return (uint32_t)bytes;
}

int dq_control_unpack(struct dq_control_channel *c, const void *packet, size_t bytes,
		      int (*handle)(void *user, const struct dq_message *m), void *user)
{
	struct dq_packet_head h;
	const uint8_t *p = packet;
	size_t at = DQ_WIRE_HEAD_BYTES;
	int rc = dq_packet_head_decode(&h, packet, bytes);
	if (rc)
		return rc;
	if (h.bytes != bytes || h.ack > c->sent_most || h.ack == 0)
		return -EPROTO; /* acknowledges what was never sent */
	/* Credits only grow, and never beyond what can be posted at a time. */
	if (h.credits - c->tx_packets > c->credits)
		return -EPROTO;
	if ((int32_t)(h.credits - c->peer_posted) > 0)
		c->peer_posted = h.credits;
	while (c->head_number < h.ack) {
		c->head += message_bytes(c->queue + c->head);
		c->head_number++;
	}
	if (c->sent_number < c->head_number) { /* it had them before the rebuild */
		c->sent = c->head;
		c->sent_number = c->head_number;
	}
	if (h.count && h.first > c->handled)
		return -EPROTO; /* a gap: something of this direction was lost, which a reliable QP never does */
	for (uint32_t i = 0; i < h.count; i++) {
		struct dq_message m;
		int n = dq_message_decode(&m, p + at, bytes - at);
		if (n < 0)
			return n;
		at += (size_t)n;
		if (h.first + i < c->handled) {
			c->duplicates++;
			continue;
		}
		c->handled = h.first + i + 1;
		rc = handle(user, &m);
		if (rc)
			return rc;
		if (m.type == DQ_MSG_EXPORT)
			c->ack_now = true;
	}
	c->rx_packets++;
	return at == bytes ? 0 : -EPROTO;
}
