/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/fabric.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define PACKETS_FIRST 1024u
#define PREFETCH 8u

static inline uint64_t random_next(uint64_t *state)
{
	uint64_t z = *state += 0x9e3779b97f4a7c15ull; /* splitmix64 */

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

/* --- making ------------------------------------------------------------------------------------------------------ */

int dq_sim_fabric_init(struct dq_sim_fabric *f, struct dq_sim_events *events, const struct dq_sim_fabric_config *config,
		       const struct dq_sim_fabric_ops *ops, void *user)
{
	memset(f, 0, sizeof *f);
	if (config->full_bytes == 0 || config->small_bytes == 0 || config->alpha < 0 ||
	    (config->ecn_min_bytes && config->ecn_max_bytes < config->ecn_min_bytes))
		return -EINVAL;
	f->events = events;
	f->config = *config;
	f->ops = ops;
	f->user = user;
	f->random = config->seed;
	f->packet_free = DQ_NONE;
	return 0;
}

void dq_sim_fabric_fini(struct dq_sim_fabric *f)
{
	free(f->ports);
	free(f->switches);
	free(f->packets);
	memset(f, 0, sizeof *f);
}

/* Room for one more of `used` objects; alignment of a cache line, which realloc does not keep. */
static void *grow(void *old, uint32_t used, uint32_t *room, size_t bytes, uint32_t first)
{
	uint32_t more = *room ? *room * 2 : first;
	void *new = more ? aligned_alloc(64, (size_t)more * bytes) : NULL;

	if (!new)
		return NULL;
	if (used)
		memcpy(new, old, (size_t)used * bytes);
	free(old);
	*room = more;
	return new;
}

uint32_t dq_sim_switch_add(struct dq_sim_fabric *f, uint32_t tier)
{
	if (f->switch_count == f->switch_room) {
		uint32_t room = f->switch_room ? f->switch_room * 2 : 64;
		struct dq_sim_switch *switches = realloc(f->switches, room * sizeof *switches);

		if (!switches)
			return DQ_NONE;
		f->switches = switches;
		f->switch_room = room;
	}
	memset(&f->switches[f->switch_count], 0, sizeof *f->switches);
	f->switches[f->switch_count].tier = tier;
	return f->switch_count++;
}

uint32_t dq_sim_port_add(struct dq_sim_fabric *f, uint32_t sw, uint64_t rate_bps, uint64_t delay_ps)
{
	struct dq_sim_port *p;

	if (f->port_count == DQ_SIM_MAX_PORTS || rate_bps == 0)
		return DQ_NONE;
	if (f->port_count == f->port_room) {
		p = grow(f->ports, f->port_count, &f->port_room, sizeof *p, 256);
		if (!p)
			return DQ_NONE;
		f->ports = p;
	}
	p = &f->ports[f->port_count];
	memset(p, 0, sizeof *p);
	for (uint32_t c = 0; c < DQ_SIM_CLASSES; c++)
		p->head[c] = p->tail[c] = DQ_NONE;
	p->sending = DQ_NONE;
	p->sw = sw;
	p->ps_per_byte = (uint64_t)(((unsigned __int128)8000000000000ull << 16) / rate_bps);
	p->full_ps = (p->ps_per_byte * f->config.full_bytes) >> 16;
	p->small_ps = (p->ps_per_byte * f->config.small_bytes) >> 16;
	p->delay_ps = delay_ps;
	p->lane_full = dq_sim_events_lane(f->events, p->full_ps);
	p->lane_small = dq_sim_events_lane(f->events, p->small_ps);
	p->lane_link = dq_sim_events_lane(f->events, delay_ps);
	return f->port_count++;
}

uint32_t dq_sim_packet_new(struct dq_sim_fabric *f)
{
	struct dq_sim_packet *p;
	uint32_t index = f->packet_free;

	if (DQ_UNLIKELY(index == DQ_NONE)) {
		uint32_t old = f->packet_room;

		p = old < 1u << 30 ? grow(f->packets, old, &f->packet_room, sizeof *p, PACKETS_FIRST) : NULL;
		if (!p)
			return DQ_NONE;
		f->packets = p;
		for (uint32_t i = f->packet_room; i-- > old;) {
			p[i].next = f->packet_free;
			f->packet_free = i;
		}
		index = f->packet_free;
	}
	p = &f->packets[index];
	f->packet_free = p->next;
	p->hop = p->flags = p->kind = 0;
	f->packets_used++;
	return index;
}

void dq_sim_packet_free(struct dq_sim_fabric *f, uint32_t packet)
{
	f->packets[packet].next = f->packet_free;
	f->packet_free = packet;
	f->packets_used--;
}

/* --- pause -------------------------------------------------------------------------------------------------------- */

static uint64_t threshold(const struct dq_sim_fabric *f, const struct dq_sim_switch *s)
{
	uint64_t left = f->config.buffer_bytes - DQ_MIN(f->config.buffer_bytes, s->bytes);

	return (uint64_t)(f->config.alpha * (double)left);
}

static void pause_check(struct dq_sim_fabric *f, struct dq_sim_switch *s, uint32_t from)
{
	struct dq_sim_port *p = &f->ports[from];
	uint64_t most = threshold(f, s);

	if (!p->pausing) {
		if (p->ingress_bytes <= most)
			return;
		s->pauses_sent++;
	} else if (p->ingress_bytes && p->ingress_bytes + 2ull * f->config.full_bytes > most) {
		return;
	}
	p->pausing = !p->pausing;
	dq_sim_events_after(f->events, p->lane_link, p->delay_ps, DQ_SIM_WHAT(DQ_SIM_PAUSE, from), p->pausing);
}

static bool marked(struct dq_sim_fabric *f, uint64_t queue)
{
	const struct dq_sim_fabric_config *c = &f->config;
	double p;

	if (queue <= c->ecn_min_bytes)
		return false;
	if (queue > c->ecn_max_bytes)
		return true;
	p = c->ecn_probability * (double)(queue - c->ecn_min_bytes) / (double)(c->ecn_max_bytes - c->ecn_min_bytes);
	return (double)(random_next(&f->random) >> 11) * 0x1p-53 < p;
}

/* --- sending ------------------------------------------------------------------------------------------------------ */

static void begin(struct dq_sim_fabric *f, uint32_t port, uint32_t packet, uint32_t bytes)
{
	struct dq_sim_port *p = &f->ports[port];

	p->sending = packet;
	if (DQ_LIKELY(bytes == f->config.full_bytes))
		dq_sim_events_after(f->events, p->lane_full, p->full_ps, DQ_SIM_WHAT(DQ_SIM_SENT, port), 0);
	else if (bytes == f->config.small_bytes)
		dq_sim_events_after(f->events, p->lane_small, p->small_ps, DQ_SIM_WHAT(DQ_SIM_SENT, port), 0);
	else
		dq_sim_events_at(f->events, f->events->now_ps + ((p->ps_per_byte * bytes) >> 16), DQ_SIM_WHAT(DQ_SIM_SENT, port), 0);
}

/* The port is idle: the next packet, if there is one that may go. */
static void send_next(struct dq_sim_fabric *f, uint32_t port)
{
	struct dq_sim_port *p = &f->ports[port];
	struct dq_sim_packet *packet;
	uint32_t class, index;

	if (p->sw == DQ_NONE) {
		if (p->paused && !f->config.priority)
			return;
		index = f->ops->pull(f->user, port, p->paused);
		if (index == DQ_NONE)
			return;
		packet = &f->packets[index];
		p = &f->ports[port];
		p->bytes = packet->bytes;
		packet->queued_ps = f->events->now_ps;
		begin(f, port, index, packet->bytes);
		return;
	}
	class = p->head[DQ_SIM_FIRST] != DQ_NONE ? DQ_SIM_FIRST : DQ_SIM_DATA;
	index = p->head[class];
	if (index == DQ_NONE || (class == DQ_SIM_DATA && p->paused))
		return;
	packet = &f->packets[index];
	p->head[class] = packet->next;
	if (packet->next == DQ_NONE)
		p->tail[class] = DQ_NONE;
	else
		__builtin_prefetch(&f->packets[packet->next]);
	begin(f, port, index, packet->bytes);
}

/* A packet has come to a switch: into the queue of its output. */
static void queue(struct dq_sim_fabric *f, uint32_t index)
{
	struct dq_sim_packet *packet = &f->packets[index];
	uint32_t port = packet->route[packet->hop];
	struct dq_sim_port *p = &f->ports[port];
	struct dq_sim_switch *s = &f->switches[p->sw];
	uint32_t class = f->config.priority ? packet->class : (uint32_t)DQ_SIM_DATA;
	uint32_t bytes = packet->bytes;

	packet->queued_ps = f->events->now_ps;
	packet->ingress = packet->route[packet->hop - 1];
	packet->next = DQ_NONE;
	if (packet->class == DQ_SIM_DATA) {
		s->found[dq_sim_bin(p->bytes)]++;
		if (f->config.ecn_min_bytes && marked(f, p->bytes)) {
			packet->flags |= DQ_SIM_MARKED;
			p->marks++;
		}
	}
	p->bytes += bytes;
	s->bytes += bytes;
	f->bytes += bytes;
	p->peak_bytes = DQ_MAX(p->peak_bytes, p->bytes);
	s->peak_bytes = DQ_MAX(s->peak_bytes, s->bytes);
	f->peak_bytes = DQ_MAX(f->peak_bytes, f->bytes);
	if (f->config.buffer_bytes) {
		if (s->bytes > f->config.buffer_bytes)
			s->over_bytes = DQ_MAX(s->over_bytes, s->bytes - f->config.buffer_bytes);
		f->ports[packet->ingress].ingress_bytes += bytes;
		pause_check(f, s, packet->ingress);
	}
	if (p->tail[class] == DQ_NONE)
		p->head[class] = index;
	else
		f->packets[p->tail[class]].next = index;
	p->tail[class] = index;
	if (p->sending == DQ_NONE)
		send_next(f, port);
}

/* The last byte of a packet has left its port. */
static void sent(struct dq_sim_fabric *f, uint32_t port)
{
	struct dq_sim_port *p = &f->ports[port];
	uint32_t index = p->sending;
	struct dq_sim_packet *packet = &f->packets[index];
	uint32_t bytes = packet->bytes;

	p->sending = DQ_NONE;
	p->bytes -= bytes;
	p->sent_bytes += bytes;
	p->sent_packets++;
	f->hops++;
	if (p->sw != DQ_NONE) {
		struct dq_sim_switch *s = &f->switches[p->sw];
		double byte_ps = (double)bytes * (double)(f->events->now_ps - packet->queued_ps);

		p->byte_ps += byte_ps;
		s->byte_ps += byte_ps;
		s->bytes -= bytes;
		f->bytes -= bytes;
		if (f->config.buffer_bytes) {
			f->ports[packet->ingress].ingress_bytes -= bytes;
			pause_check(f, s, packet->ingress);
		}
	}
	if (packet->hop + 1u < packet->hops || packet->flags & DQ_SIM_LAST)
		dq_sim_events_after(f->events, p->lane_link, p->delay_ps, DQ_SIM_WHAT(DQ_SIM_ARRIVE, 0), index);
	else
		dq_sim_packet_free(f, index);
	send_next(f, port);
}

void dq_sim_port_kick(struct dq_sim_fabric *f, uint32_t port)
{
	if (f->ports[port].sending == DQ_NONE)
		send_next(f, port);
}

static void set_paused(struct dq_sim_fabric *f, uint32_t port, bool paused)
{
	struct dq_sim_port *p = &f->ports[port];

	if (paused == p->paused)
		return;
	p->paused = paused;
	if (paused) {
		p->pauses++;
		p->paused_since_ps = f->events->now_ps;
		return;
	}
	p->paused_ps += f->events->now_ps - DQ_MAX(p->paused_since_ps, f->counted_ps);
	dq_sim_port_kick(f, port);
}

bool dq_sim_fabric_event(struct dq_sim_fabric *f, const struct dq_sim_event *e)
{
	switch (DQ_SIM_KIND(e->what)) {
	case DQ_SIM_SENT:
		sent(f, DQ_SIM_NUMBER(e->what));
		return true;
	case DQ_SIM_ARRIVE:
		/* Packets spend their delays and queues out of the cache; who comes next on links of this delay is known. */
		__builtin_prefetch(&f->packets[dq_sim_events_ahead(f->events, PREFETCH, e->arg)]);
		if (f->packets[e->arg].hop + 1u == f->packets[e->arg].hops) {
			f->ops->deliver(f->user, e->arg);
		} else {
			f->packets[e->arg].hop++;
			queue(f, e->arg);
		}
		return true;
	case DQ_SIM_PAUSE:
		set_paused(f, DQ_SIM_NUMBER(e->what), e->arg);
		return true;
	default:
		return false;
	}
}

/* --- counters ----------------------------------------------------------------------------------------------------- */

void dq_sim_fabric_reset(struct dq_sim_fabric *f)
{
	for (uint32_t i = 0; i < f->port_count; i++) {
		struct dq_sim_port *p = &f->ports[i];

		p->peak_bytes = p->bytes;
		p->sent_bytes = p->sent_packets = p->marks = p->pauses = p->paused_ps = 0;
		p->byte_ps = 0;
	}
	for (uint32_t i = 0; i < f->switch_count; i++) {
		struct dq_sim_switch *s = &f->switches[i];

		s->peak_bytes = s->bytes;
		s->over_bytes = s->pauses_sent = 0;
		s->byte_ps = 0;
		memset(s->found, 0, sizeof s->found);
	}
	f->peak_bytes = f->bytes;
	f->counted_ps = f->events->now_ps;
}

uint64_t dq_sim_port_paused(const struct dq_sim_fabric *f, uint32_t port)
{
	const struct dq_sim_port *p = &f->ports[port];

	return p->paused_ps + (p->paused ? f->events->now_ps - DQ_MAX(p->paused_since_ps, f->counted_ps) : 0);
}
