/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Datagrams with time stamps, over a UD queue pair. The NIC stamps completions where it can. Elsewhere the clock is read.
 *
 * What is sent left between the call and the sight of its completion, for which the queue is looked at a few times at once:
 * the middle is taken. A device that is software sends within the call, carries the packet as far as it can, and completes it
 * at the end: there it is the time of the call. What comes in came when it was seen, less the time that waking up takes
 * (verbs_wake.h), but not before the queue was last seen empty.
 *
 * The completion channel tells only of completions that come after it was armed. So a poll that found nothing arms it and looks
 * once more, and only after such a one may be slept; dgram_fd is readable from the next completion on until that was polled. What
 * was found is told before, since arming takes system calls: an answer need not wait for them.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include "provider/verbs_dgram.h"

#define TAKE 16u                       /* completions of one look */
#define LOOKS_MAX 64u                  /* looks of one poll: a flood of strays must not keep the caller */
#define SENT_LOOKS 64u                 /* for the completion of what was just sent: some microseconds */
#define OWN_LOOKS 2000u                /* for what was sent to oneself: some tens of microseconds */
#define OWN_LOST_NS 20000000u          /* what takes longer is lost */
#define HANDLES 4096u
#define AH_WAIT_NS 2000000u            /* a peer whose address is known has a handle before that */
#define HELD_PER_PEER 8u               /* sends that wait for the same address handle */
#define HELD_NS 3000000000ull
#define REVIVE_NS 10000000ull          /* pause before a failed queue pair is made to work again; doubles while that does not last */
#define REVIVE_MAX_NS 5000000000ull
#define PORT_NS 500000000ull           /* between looks at the port */
#define EVENTS_ACK 64u
#define OWN_BYTES 16u                  /* of a datagram to oneself: cookie, number */

struct seen {                          /* a completion */
	uint64_t wr_id;
	uint64_t raw;                  /* the NIC's time stamp */
	uint32_t status;               /* enum ibv_wc_status */
	uint32_t bytes, src_qp, slid;  /* of what came in */
};

/* ---- completions ---- */

/* One at a time: drivers (rxe of rdma-core 44) have been seen to unlock twice when ibv_next_poll finds nothing more. */
static unsigned take_ex(const struct dq_verbs_dgram *dg, const struct dq_verbs_dgram_cq *q, struct seen *out, unsigned n)
{
	struct ibv_cq_ex *cq = q->ex;
	unsigned taken = 0;

	while (taken < n) {
		struct ibv_poll_cq_attr attr = {0};
		if (ibv_start_poll(cq, &attr) != 0)
			break;
		struct seen *s = &out[taken++];
		*s = (struct seen){.wr_id = cq->wr_id, .status = cq->status};
		if (s->status == IBV_WC_SUCCESS) { /* else nothing but these two is there */
			if (dg->stamped)
				s->raw = ibv_wc_read_completion_ts(cq);
			if (q == &dg->received) {
				s->bytes = ibv_wc_read_byte_len(cq);
				s->src_qp = ibv_wc_read_src_qp(cq);
				s->slid = ibv_wc_read_slid(cq);
			}
		}
		ibv_end_poll(cq);
	}
	return taken;
}

static unsigned take(struct dq_verbs_dgram *dg, const struct dq_verbs_dgram_cq *q, struct seen *out, unsigned n)
{
	struct ibv_wc wc[TAKE];

	if (q->ex)
		return take_ex(dg, q, out, n);
	const int taken = ibv_poll_cq(q->cq, (int)n, wc);
	for (int i = 0; i < taken; i++)
		out[i] = (struct seen){.wr_id = wc[i].wr_id, .status = wc[i].status, .bytes = wc[i].byte_len,
				       .src_qp = wc[i].src_qp, .slid = wc[i].slid};
	if (taken < 0)
		dg->broken = true;
	return taken > 0 ? (unsigned)taken : 0;
}

static unsigned ready_room(const struct dq_verbs_dgram *dg)
{
	return DQ_VERBS_DGRAM_READY - (dg->ready_tail - dg->ready_head);
}

static struct dq_dgram_event *ready_add(struct dq_verbs_dgram *dg, enum dq_dgram_kind kind, uint64_t time_ns)
{
	struct dq_dgram_event *e = &dg->ready[dg->ready_tail++ & (DQ_VERBS_DGRAM_READY - 1)];
	e->kind = (uint8_t)kind;
	e->time_ns = time_ns;
	e->id = 0;
	e->len = 0;
	e->error = 0;
	e->from.len = 0;
	return e;
}

static void send_free(struct dq_verbs_dgram *dg, struct dq_verbs_dgram_send *s)
{
	if (s->ah)
		dq_verbs_ah_give(dg->ahs, s->ah);
	s->ah = NULL;
	s->state = DQ_VERBS_DGRAM_FREE;
	dg->sends_used--;
}

/* Ends without having been sent, as far as is known. The handle is used no more. */
static void send_fail(struct dq_verbs_dgram *dg, struct dq_verbs_dgram_send *s, int error)
{
	if (s->ah)
		dq_verbs_ah_give(dg->ahs, s->ah);
	s->ah = NULL;
	s->state = DQ_VERBS_DGRAM_FAILED;
	s->error = error;
	dg->sends_failed++;
}

/* When it left, without a stamp of the NIC; seen_ns: when the completion was seen, or could be at the earliest. */
static uint64_t left_ns(const struct dq_verbs_dgram *dg, const struct dq_verbs_dgram_send *s, uint64_t seen_ns)
{
	if (dg->dev->software || seen_ns <= s->posted_ns)
		return s->posted_ns;
	return dg->at_once ? s->posted_ns + (seen_ns - s->posted_ns) / 2 : seen_ns;
}

static void on_sent(struct dq_verbs_dgram *dg, const struct seen *c, uint64_t time_ns)
{
	const uint32_t place = (uint32_t)c->wr_id;
	struct dq_verbs_dgram_send *s = &dg->sends[place % DQ_VERBS_DGRAM_SENDS];

	if (place >= DQ_VERBS_DGRAM_SENDS || s->state != DQ_VERBS_DGRAM_POSTED)
		return;
	if (c->status != IBV_WC_SUCCESS)
		dg->broken = true; /* one that fails takes the queue pair along */
	else
		dg->revive_wait_ns = REVIVE_NS;
	if (!dg->stamped)
		time_ns = left_ns(dg, s, time_ns);
	if (!s->own) {
		struct dq_dgram_event *e = ready_add(dg, c->status == IBV_WC_SUCCESS ? DQ_DGRAM_SENT : DQ_DGRAM_SEND_ERROR, time_ns);
		e->id = s->id;
		e->error = c->status == IBV_WC_SUCCESS ? 0 : c->status == IBV_WC_WR_FLUSH_ERR ? -ENETDOWN : -EIO;
	}
	send_free(dg, s);
}

static bool is_own(const struct dq_verbs_dgram *dg, const struct dq_endpoint *from, const uint8_t *data, uint32_t len, uint64_t *number)
{
	uint64_t cookie;

	if (len != OWN_BYTES || memcmp(data, &dg->own_cookie, sizeof cookie) != 0 || from->len != dg->endpoint.len ||
	    memcmp(from->data, dg->endpoint.data, from->len) != 0)
		return false;
	memcpy(number, data + sizeof cookie, sizeof *number);
	return true;
}

static void on_received(struct dq_verbs_dgram *dg, const struct seen *c, uint64_t time_ns, uint64_t seen_ns, bool asleep)
{
	const uint32_t place = (uint32_t)c->wr_id;
	struct dq_verbs_ud_peer peer = {.qpn = c->src_qp, .layer = dg->self.layer};
	struct dq_endpoint from;
	uint64_t number;

	if (place >= DQ_VERBS_DGRAM_RECEIVES)
		return;
	if (c->status != IBV_WC_SUCCESS) {
		dg->broken = true;
		return; /* all receives are posted anew */
	}
	const uint8_t *at = dq_verbs_dgram_recv_place(dg, place);
	if (peer.layer == IBV_LINK_LAYER_INFINIBAND)
		peer.lid = (uint16_t)c->slid;
	if (c->bytes < DQ_VERBS_UD_GRH_BYTES || c->bytes > DQ_VERBS_UD_GRH_BYTES + DQ_VERBS_DGRAM_PAYLOAD ||
	    dq_verbs_ud_source(at, peer.gid) != 0) {
		dg->ignored++;
	} else {
		const uint16_t len = (uint16_t)(c->bytes - DQ_VERBS_UD_GRH_BYTES);
		dq_verbs_ud_endpoint_put(&from, &peer);
		if (is_own(dg, &from, at + DQ_VERBS_UD_GRH_BYTES, len, &number)) {
			if (number == dg->own_number) {
				dg->own_seen_ns = seen_ns;
				dg->own_slept = asleep;
			}
		} else {
			struct dq_dgram_event *e = ready_add(dg, DQ_DGRAM_RECEIVED, time_ns);
			e->len = len;
			e->from = from;
			memcpy(e->data, at + DQ_VERBS_UD_GRH_BYTES, len);
		}
	}
	dq_verbs_dgram_recv_return(dg, place);
}

static uint64_t read_clock(struct dq_verbs_dgram *dg)
{
	dg->now_ns = dq_verbs_now();
	return dg->now_ns;
}

static bool is_of_old(const struct dq_verbs_dgram *dg, const struct seen *c)
{
	return (c->wr_id >> 32 & 0x7fffffffu) != (dg->life & 0x7fffffffu);
}

/* Look once at what was sent: how many have left. The clock is read no oftener than needed: in simulated time its readings are
 * all that takes time. */
static unsigned look_sent(struct dq_verbs_dgram *dg)
{
	struct seen seen[TAKE];
	const unsigned room = DQ_MIN(ready_room(dg), TAKE), taken = room ? take(dg, &dg->sent, seen, room) : 0;

	if (taken == 0)
		return 0;
	dg->sent.event_due |= dg->sent.armed;
	const uint64_t now = dg->dev->software ? dg->now_ns : read_clock(dg);
	for (unsigned i = 0; i < taken; i++)
		if (!is_of_old(dg, &seen[i]))
			on_sent(dg, &seen[i], dg->stamped && seen[i].status == IBV_WC_SUCCESS ? dq_verbs_clock_ns(&dg->clock, seen[i].raw, now) : now);
	return taken;
}

/* Look once at what came in: how many did. asleep: this ends a sleep. Only the first completion can have ended it; those behind
 * may have come while this thread woke up. */
static unsigned look_received(struct dq_verbs_dgram *dg, bool asleep)
{
	struct seen seen[TAKE];
	const unsigned room = DQ_MIN(ready_room(dg), TAKE), taken = room ? take(dg, &dg->received, seen, room) : 0;

	if (taken == 0) {
		if (room)
			dg->empty_ns = dg->now_ns; /* a little earlier: right enough for a lower bound */
		return 0;
	}
	dg->received.event_due |= dg->received.armed;
	const uint64_t now = read_clock(dg);
	for (unsigned i = 0; i < taken; i++) {
		uint64_t time = now;
		if (is_of_old(dg, &seen[i]))
			continue;
		if (dg->stamped && seen[i].status == IBV_WC_SUCCESS)
			time = dq_verbs_clock_ns(&dg->clock, seen[i].raw, now);
		else if (asleep && i == 0)
			time = DQ_MAX(now - DQ_MIN(dg->wake.correction_ns, now), dg->empty_ns);
		on_received(dg, &seen[i], time, now, asleep);
	}
	return taken;
}

static uint32_t sends_posted(const struct dq_verbs_dgram *dg)
{
	return dg->sends_used - dg->sends_held - dg->sends_failed;
}

static unsigned look(struct dq_verbs_dgram *dg, bool asleep)
{
	/* That something left is hardly ever what ended a sleep: it is looked for within the call that sends. */
	const unsigned sent = sends_posted(dg) > 0 ? look_sent(dg) : 0;
	return sent + look_received(dg, asleep);
}

/* ---- sending ---- */

static struct dq_verbs_dgram_send *send_new(struct dq_verbs_dgram *dg)
{
	struct dq_verbs_dgram_send *s = dg->sends;

	if (dg->sends_used == DQ_VERBS_DGRAM_SENDS)
		return NULL;
	while (s->state != DQ_VERBS_DGRAM_FREE)
		s++;
	dg->sends_used++;
	return s;
}

static int post(struct dq_verbs_dgram *dg, struct dq_verbs_dgram_send *s, struct ibv_ah *ah)
{
	s->posted_ns = read_clock(dg);
	s->state = DQ_VERBS_DGRAM_POSTED;
	const int rc = dq_verbs_dgram_post(dg, (uint32_t)(s - dg->sends), ah, s->peer.qpn, s->len);
	if (rc)
		return rc == -ENOMEM ? -EAGAIN : rc;
	dg->at_once = true;
	for (unsigned i = 0; i < SENT_LOOKS && s->state == DQ_VERBS_DGRAM_POSTED; i++)
		look_sent(dg); /* else an interrupt has to tell */
	dg->at_once = false;
	return 0;
}

int dq_verbs_dgram_send(struct dq_dgram *d, const struct dq_endpoint *to, uint32_t flow_label, struct dq_link *link, uint64_t id,
			const void *data, uint16_t len)
{
	struct dq_verbs_dgram *dg = dq_verbs_dgram_of(d);
	struct dq_verbs_ud_peer peer;
	struct dq_verbs_ah *ah = NULL;

	if (link) /* a real fabric needs no emulated one, and a NIC would not wait for it */
		return -EINVAL;
	if (len > DQ_VERBS_DGRAM_PAYLOAD)
		return -EMSGSIZE;
	int rc = dq_verbs_ud_endpoint_get(to, &peer, NULL);
	if (rc)
		return rc;
	if (peer.layer != dg->self.layer)
		return -EAFNOSUPPORT;
	if (dg->broken)
		return -ENETDOWN;
	dg->asleep = false;
	dg->used = true;
	rc = dq_verbs_ah_take(dg->ahs, &peer, flow_label, dg->now_ns, AH_WAIT_NS, &ah);
	if (rc && rc != -EINPROGRESS)
		return rc == -ENOBUFS ? -EAGAIN : rc;
	if (rc) {
		unsigned same = 0;
		for (const struct dq_verbs_dgram_send *s = dg->sends; s < dg->sends + DQ_VERBS_DGRAM_SENDS; s++)
			same += s->state == DQ_VERBS_DGRAM_HELD && memcmp(s->peer.gid, peer.gid, sizeof peer.gid) == 0;
		if (same >= HELD_PER_PEER)
			return -EAGAIN;
	}
	struct dq_verbs_dgram_send *s = send_new(dg);
	if (!s) {
		if (ah)
			dq_verbs_ah_give(dg->ahs, ah);
		return -EAGAIN;
	}
	*s = (struct dq_verbs_dgram_send){.id = id, .peer = peer, .ah = ah, .flow_label = flow_label, .len = len};
	memcpy(dq_verbs_dgram_send_place(dg, (uint32_t)(s - dg->sends)), data, len);
	if (!ah) {
		s->state = DQ_VERBS_DGRAM_HELD;
		s->posted_ns = read_clock(dg);
		dg->sends_held++;
		return 0;
	}
	rc = post(dg, s, ah->handle);
	if (rc)
		send_free(dg, s);
	return rc;
}

/* What waited for its address handle goes out if that is there. */
static void held_release(struct dq_verbs_dgram *dg, uint64_t now)
{
	for (struct dq_verbs_dgram_send *s = dg->sends; dg->sends_held > 0 && s < dg->sends + DQ_VERBS_DGRAM_SENDS; s++) {
		if (s->state != DQ_VERBS_DGRAM_HELD)
			continue;
		int rc = dg->broken ? -ENETDOWN : dq_verbs_ah_take(dg->ahs, &s->peer, s->flow_label, now, 0, &s->ah);
		if (rc == -EINPROGRESS && now - s->posted_ns > HELD_NS)
			rc = -EHOSTUNREACH;
		if (rc == -EINPROGRESS)
			continue;
		dg->sends_held--;
		if (rc == 0)
			rc = post(dg, s, s->ah->handle);
		if (rc)
			send_fail(dg, s, rc);
	}
}

static void failed_tell(struct dq_verbs_dgram *dg)
{
	for (struct dq_verbs_dgram_send *s = dg->sends; dg->sends_failed > 0 && s < dg->sends + DQ_VERBS_DGRAM_SENDS; s++) {
		if (s->state != DQ_VERBS_DGRAM_FAILED || ready_room(dg) == 0)
			continue;
		dg->sends_failed--;
		if (!s->own) {
			struct dq_dgram_event *e = ready_add(dg, DQ_DGRAM_SEND_ERROR, dg->now_ns);
			e->id = s->id;
			e->error = s->error;
		}
		send_free(dg, s);
	}
}

/* ---- recovery, and what changes at the port ---- */

static void revive(struct dq_verbs_dgram *dg, uint64_t now)
{
	if (dg->revive_ns == 0)
		dg->revive_ns = now + dg->revive_wait_ns;
	if (now < dg->revive_ns)
		return;
	dg->revive_wait_ns = DQ_MIN(dg->revive_wait_ns * 2, REVIVE_MAX_NS);
	dg->revive_ns = now + dg->revive_wait_ns;
	while (ready_room(dg) > 0 && look(dg, false) > 0)
		; /* what still came in */
	if (ready_room(dg) == 0)
		return;
	if (dq_verbs_dgram_queues_restart(dg) != 0)
		return;
	dg->broken = false;
	dg->revive_ns = 0;
	/* The driver may have dropped completions whose events lie in the channel. */
	dg->sent.event_due = dg->sent.armed;
	dg->received.event_due = dg->received.armed;
	for (struct dq_verbs_dgram_send *s = dg->sends; s < dg->sends + DQ_VERBS_DGRAM_SENDS; s++)
		if (s->state == DQ_VERBS_DGRAM_POSTED)
			send_fail(dg, s, -ENETDOWN);
}

static void port_check(struct dq_verbs_dgram *dg, uint64_t now)
{
	struct dq_verbs_port port;

	if (now < dg->port_ns)
		return;
	dg->port_ns = now + PORT_NS;
	dq_verbs_port_now(dg->dev, &port);
	if (port.gid_index == dg->port.gid_index && port.up == dg->port.up && port.lid == dg->port.lid &&
	    memcmp(&port.gid, &dg->port.gid, sizeof port.gid) == 0)
		return;
	/* The own endpoint stays what it is, as peers know it; only where its GID stands in the table may change. */
	if (memcmp(&port.gid, dg->self.gid, sizeof port.gid) == 0)
		__atomic_store_n(&dg->own_gid_index, port.gid_index, __ATOMIC_RELAXED);
	dg->port = port;
	dq_verbs_ah_flush(dg->ahs);
}

/* ---- how long waking up takes ---- */

static bool own_send(struct dq_verbs_dgram *dg)
{
	struct dq_verbs_dgram_send *s = send_new(dg);
	if (!s)
		return false;
	*s = (struct dq_verbs_dgram_send){.peer = dg->self, .len = OWN_BYTES, .state = DQ_VERBS_DGRAM_POSTED, .own = true};
	uint8_t *at = dq_verbs_dgram_send_place(dg, (uint32_t)(s - dg->sends));
	dg->own_number++;
	memcpy(at, &dg->own_cookie, sizeof dg->own_cookie);
	memcpy(at + sizeof dg->own_cookie, &dg->own_number, sizeof dg->own_number);
	dg->own_seen_ns = 0;
	dg->own_sent_ns = read_clock(dg);
	if (dq_verbs_dgram_post(dg, (uint32_t)(s - dg->sends), dg->own_ah, dg->self.qpn, OWN_BYTES) != 0) {
		send_free(dg, s);
		return false;
	}
	return true;
}

/* A poll begins, and has looked once. */
static void wake_after(struct dq_verbs_dgram *dg)
{
	if (dg->wake.step != DQ_VERBS_WAKE_SLEEP || dg->own_sent_ns == 0)
		return;
	if (dg->own_seen_ns)
		dq_verbs_wake_slept(&dg->wake, dg->own_slept ? dg->own_seen_ns - dg->own_sent_ns : DQ_NEVER, dg->own_seen_ns);
	else if (read_clock(dg) - dg->own_sent_ns > OWN_LOST_NS)
		dq_verbs_wake_slept(&dg->wake, DQ_NEVER, dg->now_ns);
}

/* A poll found nothing and is about to end. True: look again. A series begins in a poll that there is anyway: an endpoint that
 * nobody uses must not wake up for it. */
static bool wake_before(struct dq_verbs_dgram *dg)
{
	struct dq_verbs_wake *w = &dg->wake;

	if (dg->stamped || !dg->own_ah || dg->broken || dg->sends_used > 0)
		return false;
	if (w->step == DQ_VERBS_WAKE_IDLE && dg->now_ns >= w->due_ns && (dg->used || w->series == 0 || w->round > 0)) {
		if (w->round == 0)
			dg->used = false;
		dq_verbs_wake_begin(w);
	}
	if (w->step == DQ_VERBS_WAKE_POLL) {
		if (own_send(dg))
			for (unsigned i = 0; i < OWN_LOOKS && !dg->own_seen_ns && ready_room(dg) > 0; i++)
				look(dg, false);
		dq_verbs_wake_polled(w, dg->own_seen_ns ? dg->own_seen_ns - dg->own_sent_ns : DQ_NEVER);
		dg->own_sent_ns = 0;
		return true;
	}
	if (w->step == DQ_VERBS_WAKE_SLEEP && dg->own_sent_ns == 0 && !own_send(dg))
		dq_verbs_wake_slept(w, DQ_NEVER, dg->now_ns);
	return false;
}

/* ---- polling ---- */

/* Both queues are empty. True: they were armed before, and nothing came since. */
static bool settle(struct dq_verbs_dgram *dg)
{
	struct dq_verbs_dgram_cq *const queues[] = {&dg->received, &dg->sent};
	struct ibv_cq *cq;
	void *context;
	bool quiet = true;

	while ((dg->received.event_due || dg->sent.event_due) && dg->lib->get_cq_event(dg->channel, &cq, &context) == 0) {
		struct dq_verbs_dgram_cq *q = context;
		q->armed = q->event_due = false;
		if (++q->unacked == EVENTS_ACK) {
			dg->lib->ack_cq_events(q->cq, EVENTS_ACK);
			q->unacked = 0;
		}
	}
	for (unsigned i = 0; i < 2; i++) {
		struct dq_verbs_dgram_cq *q = queues[i];
		if (q->armed || (q == &dg->sent && sends_posted(dg) == 0))
			continue;
		if (ibv_req_notify_cq(q->cq, 0) != 0)
			dg->broken = true;
		q->armed = true;
		quiet = false;
	}
	return quiet;
}

static unsigned ready_take(struct dq_verbs_dgram *dg, struct dq_dgram_event *out, unsigned n)
{
	unsigned taken = 0;

	if (dg->sends_failed > 0)
		failed_tell(dg);
	while (taken < n && dg->ready_head != dg->ready_tail)
		out[taken++] = dg->ready[dg->ready_head++ & (DQ_VERBS_DGRAM_READY - 1)];
	return taken;
}

int dq_verbs_dgram_poll(struct dq_dgram *d, struct dq_dgram_event *out, unsigned n)
{
	struct dq_verbs_dgram *dg = dq_verbs_dgram_of(d);
	const bool asleep = dg->asleep;

	dg->asleep = false;
	dg->more = true;
	look(dg, asleep);
	wake_after(dg);
	if (dg->broken)
		revive(dg, read_clock(dg));
	port_check(dg, dg->now_ns); /* in use, the clock is read often enough for that */
	const uint32_t news = dq_verbs_ah_news(dg->ahs);
	if (news != dg->ah_news) {
		uint64_t made;
		ssize_t done = read(dg->notify_fd, &made, sizeof made);
		(void)done;
		dg->ah_news = news;
	}
	if (dg->sends_held > 0)
		held_release(dg, read_clock(dg));
	for (unsigned looks = 0; looks < LOOKS_MAX; looks++) {
		const unsigned taken = ready_take(dg, out, n);
		if (taken > 0 || n == 0)
			return (int)taken;
		if (look(dg, false) > 0 || !settle(dg) || wake_before(dg))
			continue;
		if (dg->ready_head == dg->ready_tail && dg->sends_failed == 0) {
			dg->asleep = true;
			dg->more = false;
			return 0;
		}
	}
	return 0;
}

int dq_verbs_dgram_fd(const struct dq_dgram *d)
{
	return dq_verbs_dgram_of_const(d)->epfd;
}

uint64_t dq_verbs_dgram_next_deadline(const struct dq_dgram *d)
{
	const struct dq_verbs_dgram *dg = dq_verbs_dgram_of_const(d);
	uint64_t next = DQ_NEVER;

	if (dg->more)
		return 0;
	if (dg->broken)
		next = DQ_MIN(next, dg->revive_ns);
	for (const struct dq_verbs_dgram_send *s = dg->sends; dg->sends_held > 0 && s < dg->sends + DQ_VERBS_DGRAM_SENDS; s++)
		if (s->state == DQ_VERBS_DGRAM_HELD)
			next = DQ_MIN(next, s->posted_ns + HELD_NS + 1);
	return next;
}

const char *dq_verbs_dgram_time_source(const struct dq_dgram *d)
{
	return dq_verbs_dgram_of_const(d)->stamped ? "completion" : "software";
}

uint64_t dq_verbs_dgram_correction_ns(const struct dq_dgram *d)
{
	return dq_verbs_dgram_of_const(d)->wake.correction_ns;
}

/* ---- opening and closing ---- */

static int handle_create(void *ctx, const struct dq_verbs_ud_peer *peer, uint32_t flow_label, void **handle)
{
	struct ibv_ah *ah;
	const int rc = dq_verbs_dgram_ah_make(ctx, peer, flow_label, &ah);
	*handle = ah;
	return rc;
}

static void handle_destroy(void *ctx, void *handle)
{
	const struct dq_verbs_dgram *dg = ctx;
	dg->lib->destroy_ah(handle);
}

static int watch(struct dq_verbs_dgram *dg, int fd)
{
	struct epoll_event event = {.events = EPOLLIN};
	return epoll_ctl(dg->epfd, EPOLL_CTL_ADD, fd, &event) == 0 ? 0 : -errno;
}

static int prepare(struct dq_verbs_dgram *dg, struct dq_error *err)
{
	const struct dq_verbs_ah_ops ops = {.create = handle_create, .destroy = handle_destroy, .ctx = dg};
	const char *name = dg->dev->cfg.name;
	int rc = dq_verbs_dgram_queues_make(dg, err);

	if (rc)
		return rc;
	dg->self.qpn = dg->qp->qp_num;
	dq_verbs_ud_endpoint_put(&dg->endpoint, &dg->self);
	dg->epfd = epoll_create1(EPOLL_CLOEXEC);
	dg->notify_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (dg->epfd < 0 || dg->notify_fd < 0 || watch(dg, dg->channel->fd) != 0 || watch(dg, dg->notify_fd) != 0)
		return dq_error_set(err, -errno, "device %s: file descriptors for datagrams: %s", name, strerror(errno));
	rc = dq_verbs_ah_cache_create(HANDLES, &ops, dg->notify_fd, &dg->ahs);
	if (rc)
		return dq_error_set(err, rc, "device %s: address handles for datagrams: %s", name, strerror(-rc));
	if (getrandom(&dg->own_cookie, sizeof dg->own_cookie, 0) != (ssize_t)sizeof dg->own_cookie)
		return dq_error_set(err, -errno, "device %s: no random numbers from the system: %s", name, strerror(errno));
	/* Without it the wake-up is not known, and nothing is taken off. */
	if (!dg->stamped && dq_verbs_dgram_ah_make(dg, &dg->self, 0, &dg->own_ah) != 0)
		dg->own_ah = NULL;
	return 0;
}

int dq_verbs_dgram_open(struct dq_device *dev, struct dq_dgram **out, struct dq_error *err)
{
	return dq_verbs_dgram_open_as(dev, false, out, err);
}

int dq_verbs_dgram_open_as(struct dq_device *device, bool extended, struct dq_dgram **out, struct dq_error *err)
{
	struct dq_verbs_device *dev = dq_verbs_device_of(device);
	struct dq_verbs_dgram *dg = calloc(1, sizeof *dg);

	if (!dg)
		return dq_error_set(err, -ENOMEM, "device %s: no memory for datagrams", dev->cfg.name);
	dg->dev = dev;
	dg->lib = dev->lib;
	dg->extended = extended;
	dg->epfd = dg->notify_fd = -1;
	dg->revive_wait_ns = REVIVE_NS;
	read_clock(dg);
	dq_verbs_wake_init(&dg->wake);
	dq_verbs_port_now(dev, &dg->port);
	dg->own_gid_index = dg->port.gid_index;
	dg->self.layer = dev->infiniband ? IBV_LINK_LAYER_INFINIBAND : IBV_LINK_LAYER_ETHERNET;
	dg->self.lid = dev->infiniband ? dg->port.lid : 0;
	memcpy(dg->self.gid, dg->port.gid.raw, sizeof dg->self.gid);
	const int rc = prepare(dg, err);
	if (rc) {
		dq_verbs_dgram_close((struct dq_dgram *)(void *)dg);
		return rc;
	}
	*out = (struct dq_dgram *)(void *)dg;
	return 0;
}

void dq_verbs_dgram_close(struct dq_dgram *d)
{
	struct dq_verbs_dgram *dg = dq_verbs_dgram_of(d);

	if (!dg)
		return;
	/* The queue pair goes first: from then on nothing uses a handle. */
	if (dg->qp)
		dg->lib->destroy_qp(dg->qp);
	dg->qp = NULL;
	for (struct dq_verbs_dgram_send *s = dg->sends; s < dg->sends + DQ_VERBS_DGRAM_SENDS; s++)
		if (s->state != DQ_VERBS_DGRAM_FREE)
			send_free(dg, s);
	dq_verbs_ah_cache_destroy(dg->ahs);
	if (dg->own_ah)
		dg->lib->destroy_ah(dg->own_ah);
	dq_verbs_dgram_queues_free(dg);
	if (dg->epfd >= 0)
		close(dg->epfd);
	if (dg->notify_fd >= 0)
		close(dg->notify_fd);
	free(dg);
}

void dq_verbs_dgram_endpoint(const struct dq_dgram *d, struct dq_endpoint *out)
{
	*out = dq_verbs_dgram_of_const(d)->endpoint;
}
