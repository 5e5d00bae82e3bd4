/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The prober over the datagram endpoints of whichever provider and devices the environment names (transport_env.h): prober
 * against prober, over tcp also with links in virtual time, and prober against a peer that the test itself plays, packet by
 * packet, right or hostile. Where the endpoint must misbehave, its function table is wrapped.
 */
#include <setjmp.h>
#include <sched.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "probe/packet.h"
#include "probe/prober.h"
#include "provider/link.h"
#include "transport_env.h"

#define MS 1000000ull
#define SECOND (1000 * MS)
#define PATIENCE_MS 60000 /* a test that waits longer for what must come has failed */
#define SILENCE (250 * MS) /* probes that nobody answers: long enough that, on a busy machine, they have been sent by then */

static const struct dq_provider *real;
static uint64_t random_state;

static uint64_t random_next(void) /* splitmix64 */
{
	uint64_t z = random_state += 0x9e3779b97f4a7c15ull;
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ z >> 27) * 0x94d049bb133111ebull;
	return z ^ z >> 31;
}

static uint64_t now_ns(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * SECOND + (uint64_t)ts.tv_nsec;
}

static void wait_until(uint64_t time_ns)
{
	while (now_ns() < time_ns) {
		struct timespec rest = { .tv_nsec = MS };
		nanosleep(&rest, NULL);
	}
}

/* Of end 0, the prober under test, or 1, its peers. */
static struct dq_device *device_open(int end)
{
	struct dq_device_config cfg = { .name = "lo0" };
	struct dq_device *dev;
	snprintf(cfg.address, sizeof cfg.address, "%s", transport_address(end));
	struct dq_error err;
	assert_int_equal(real->device_open(&cfg, &dev, &err), 0);
	return dev;
}

/* A device with a prober. */

struct host {
	struct dq_device *dev;
	dq_prober *prober;
	uint64_t token;
	uint8_t endpoint[DQ_ENDPOINT_MAX];
	uint32_t endpoint_bytes;
};

static void host_start_with(struct host *h, int end, const struct dq_provider *provider, struct dq_prober_config cfg)
{
	struct dq_error err;
	h->dev = device_open(end);
	if (cfg.token == 0)
		cfg.token = random_next() | 1;
	h->token = cfg.token;
	assert_int_equal(dq_prober_start(provider, h->dev, &cfg, &h->prober, &err), 0);
	int n = dq_prober_endpoint(h->prober, h->endpoint);
	assert_in_range(n, 1, DQ_ENDPOINT_MAX);
	h->endpoint_bytes = (uint32_t)n;
}

/* With a timeout that no load of the machine reaches. */
static void host_start(struct host *h, int end)
{
	host_start_with(h, end, real, (struct dq_prober_config){ .timeout_ns = 60 * SECOND });
}

static void host_stop(struct host *h)
{
	assert_int_equal(dq_prober_stop(h->prober), 0);
	real->device_close(h->dev);
}

static void host_knows(struct host *h, uint32_t id, const struct host *peer, struct dq_link *link, uint64_t interval_ns)
{
	assert_int_equal(dq_prober_target_set(h->prober, id, peer->endpoint, peer->endpoint_bytes, peer->token, 0, link,
					      interval_ns, 0), 0);
}

static struct dq_prober_stats stats_of(struct host *h)
{
	struct dq_prober_stats s;
	dq_prober_stats(h->prober, &s);
	return s;
}

/* Wait until n samples have come. */
static void samples_take(struct host *h, struct dq_probe_sample *out, uint32_t n)
{
	uint32_t got = 0;
	for (;;) {
		int k = dq_prober_drain(h->prober, out + got, n - got);
		assert_true(k >= 0 && (uint32_t)k <= n - got);
		got += (uint32_t)k;
		if (got == n)
			return;
		struct pollfd pfd = { .fd = dq_prober_event_fd(h->prober), .events = POLLIN };
		assert_int_equal(poll(&pfd, 1, PATIENCE_MS), 1);
	}
}

static void no_sample_waits(struct host *h)
{
	struct dq_probe_sample s;
	struct pollfd pfd = { .fd = dq_prober_event_fd(h->prober), .events = POLLIN };
	assert_int_equal(dq_prober_drain(h->prober, &s, 1), 0);
	assert_int_equal(poll(&pfd, 1, 0), 0);
}

/* Only tcp has emulated links. */
static struct dq_link *link_make(uint64_t delay_ns)
{
	if (!transport_is("tcp"))
		return NULL;
	struct dq_link_config cfg = { .delay_ns = delay_ns };
	struct dq_link *link;
	assert_int_equal(dq_link_create(&cfg, &link), 0);
	return link;
}

/* A peer that the test plays: a datagram endpoint without a prober. */

enum { PEER_QUEUE = 1024 };

struct peer {
	struct dq_device *dev;
	struct dq_dgram *dgram;
	struct dq_endpoint endpoint;
	uint64_t token;
	struct dq_endpoint prober;
	uint64_t sends;
	struct dq_probe_packet queue[PEER_QUEUE]; /* came in while something was sent: a ring */
	unsigned queue_head, queue_tail;
};

static void peer_start(struct peer *peer, const struct host *h)
{
	struct dq_error err;
	peer->dev = device_open(1);
	assert_int_equal(real->dgram_open(peer->dev, &peer->dgram, &err), 0);
	real->dgram_endpoint(peer->dgram, &peer->endpoint);
	peer->token = random_next();
	peer->sends = peer->queue_head = peer->queue_tail = 0;
	peer->prober.len = (uint16_t)h->endpoint_bytes;
	memcpy(peer->prober.data, h->endpoint, h->endpoint_bytes);
}

static void peer_stop(struct peer *peer)
{
	real->dgram_close(peer->dgram);
	real->device_close(peer->dev);
}

static void host_knows_peer(struct host *h, uint32_t id, const struct peer *peer, uint64_t interval_ns)
{
	assert_int_equal(dq_prober_target_set(h->prober, id, peer->endpoint.data, peer->endpoint.len, peer->token, 0, NULL,
					      interval_ns, 0), 0);
}

static struct dq_probe_packet peer_packet(const struct peer *peer, const struct dq_dgram_event *ev)
{
	struct dq_probe_packet p;
	assert_int_equal(dq_probe_packet_decode(ev->data, ev->len, &p), 0);
	assert_int_equal(ev->from.len, peer->prober.len);
	assert_memory_equal(ev->from.data, peer->prober.data, ev->from.len);
	return p;
}

static void peer_sleep(struct peer *peer)
{
	uint64_t next = real->dgram_next_deadline(peer->dgram), now = now_ns();
	uint64_t wait_ms = next == DQ_NEVER ? PATIENCE_MS : next > now ? (next - now) / MS + 1 : 0;
	struct pollfd pfd = { .fd = real->dgram_fd(peer->dgram), .events = POLLIN };
	assert_true(poll(&pfd, 1, (int)DQ_MIN(wait_ms, PATIENCE_MS)) == 1 || wait_ms < PATIENCE_MS);
}

/* When it returns, the datagram has left. */
static void peer_send_bytes(struct peer *peer, const void *bytes, size_t len)
{
	const uint64_t id = ++peer->sends;
	assert_true(real->dgram_send(peer->dgram, &peer->prober, 0, NULL, id, bytes, (uint16_t)len) >= 0);
	for (bool left = false; !left;) {
		struct dq_dgram_event ev;
		int n = real->dgram_poll(peer->dgram, &ev, 1);
		assert_true(n >= 0);
		if (n == 1 && ev.kind == DQ_DGRAM_RECEIVED) {
			assert_true(peer->queue_tail - peer->queue_head < PEER_QUEUE);
			peer->queue[peer->queue_tail++ % PEER_QUEUE] = peer_packet(peer, &ev);
		} else if (n == 1) {
			assert_int_equal(ev.kind, DQ_DGRAM_SENT);
			left = ev.id == id;
		} else {
			peer_sleep(peer);
		}
	}
}

static void peer_send(struct peer *peer, enum dq_probe_type type, uint64_t id, uint64_t token, int64_t delta)
{
	struct dq_probe_packet p = { .type = type, .id = id, .token = token, .delta_ns = delta };
	uint8_t bytes[DQ_PROBE_PACKET_BYTES];
	dq_probe_packet_encode(&p, bytes);
	peer_send_bytes(peer, bytes, sizeof bytes);
}

/* Wait for the next packet from the prober. */
static struct dq_probe_packet peer_receive(struct peer *peer)
{
	if (peer->queue_head != peer->queue_tail)
		return peer->queue[peer->queue_head++ % PEER_QUEUE];
	for (;;) {
		struct dq_dgram_event ev;
		int n = real->dgram_poll(peer->dgram, &ev, 1);
		assert_true(n >= 0);
		if (n == 1 && ev.kind == DQ_DGRAM_RECEIVED)
			return peer_packet(peer, &ev);
		if (n == 0)
			peer_sleep(peer);
	}
}

/* Wait until the prober has dealt with everything sent before: it answers one probe more. The id must be new. */
static void peer_settle(struct peer *peer, const struct host *h, uint64_t id)
{
	peer_send(peer, DQ_PROBE_PROBE, id, h->token, 0);
	for (;;) {
		struct dq_probe_packet p = peer_receive(peer);
		if (p.id == id && p.type == DQ_PROBE_ACK2)
			return;
	}
}

#define assert_stat(h, field, value) assert_int_equal(stats_of(h).field, value)

/* Round trips */

static void two_probers_measure_the_links_between_them_exactly(void **state)
{
	(void)state;
	enum { N = 40 };
	if (!transport_is("tcp"))
		skip();
	static const uint64_t delays[][2] = { { 2 * MS, 2 * MS }, { MS, 3 * MS + 17 }, { 0, 5 * MS } };
	for (unsigned i = 0; i < sizeof delays / sizeof delays[0]; i++) {
		struct host a, b;
		struct dq_link *there = link_make(delays[i][0]), *back = link_make(delays[i][1]);
		host_start(&a, 0);
		host_start(&b, 1);
		host_knows(&a, 3, &b, there, 5 * MS);
		host_knows(&b, 9, &a, back, 5 * MS);

		struct dq_probe_sample s[2][N];
		samples_take(&a, s[0], N);
		samples_take(&b, s[1], N);
		for (unsigned k = 0; k < 2; k++) {
			for (unsigned j = 0; j < N; j++) {
				assert_int_equal(s[k][j].target, k == 0 ? 3 : 9);
				assert_int_equal(s[k][j].result, DQ_PROBE_OK);
				assert_int_equal(s[k][j].rtt_ns, delays[i][0] + delays[i][1]);
				assert_true(s[k][j].responder_delay_ns >= 0);
				assert_true(s[k][j].prober_delay_ns >= 0);
			}
		}
		assert_string_equal(dq_prober_time_source(a.prober), "virtual");

		assert_int_equal(dq_prober_target_remove(a.prober, 3), 0);
		dq_link_destroy(there);
		assert_int_equal(dq_prober_target_remove(b.prober, 9), 0);
		dq_link_destroy(back);
		assert_stat(&a, targets, 0);
		assert_stat(&a, invalid, 0);
		assert_stat(&a, malformed, 0);
		assert_stat(&a, refused_token, 0);
		host_stop(&a);
		host_stop(&b);
	}
}

static void loopback_without_a_link_is_measured(void **state)
{
	(void)state;
	enum { N = 50 };
	struct host a, b;
	struct dq_probe_sample s[N];
	host_start(&a, 0);
	host_start(&b, 1);
	host_knows(&b, 0, &a, NULL, 0);
	host_knows(&a, 0, &b, NULL, 2 * MS);
	samples_take(&a, s, N);
	uint64_t seen = now_ns();
	int64_t prober_delay = 0;
	for (unsigned i = 0; i < N; i++) {
		assert_int_equal(s[i].result, DQ_PROBE_OK);
		assert_true(s[i].rtt_ns >= 0 && s[i].responder_delay_ns >= 0 && s[i].prober_delay_ns >= 0);
		assert_true((uint64_t)(s[i].rtt_ns + s[i].responder_delay_ns) <= seen - s[i].time_ns);
		prober_delay = DQ_MAX(prober_delay, s[i].prober_delay_ns);
	}
	assert_true(prober_delay > 0);
	assert_true(stats_of(&a).acked >= N);
	assert_true(stats_of(&b).answered >= N);
	assert_stat(&b, sent, 0); /* interval 0: only answered */
	assert_true(strlen(dq_prober_time_source(a.prober)) > 0);
	host_stop(&a);
	host_stop(&b);
}

/* However late the host's scheduler lets some be, none comes before its time. */
static void probes_start_after_the_phase_and_keep_the_interval(void **state)
{
	(void)state;
	enum { N = 100 };
	const uint64_t interval = 3 * MS, phase = 20 * MS;
	struct host a, b;
	struct dq_probe_sample s[N];
	host_start(&a, 0);
	host_start(&b, 1);
	host_knows(&b, 0, &a, NULL, 0);
	uint64_t before = now_ns();
	assert_int_equal(dq_prober_target_set(a.prober, 0, b.endpoint, b.endpoint_bytes, b.token, 0, NULL, interval, phase), 0);
	samples_take(&a, s, N);
	for (unsigned i = 0; i < N; i++)
		assert_true(s[i].time_ns >= before + phase + i * interval);
	host_stop(&a);
	host_stop(&b);
}

static void an_extra_probe_is_sent_for_each_call(void **state)
{
	(void)state;
	enum { N = 25 };
	struct host a, b;
	struct dq_probe_sample s[N];
	host_start(&a, 0);
	host_start(&b, 1);
	host_knows(&b, 0, &a, NULL, 0);
	host_knows(&a, 0, &b, NULL, 0);
	/* The first alone: until the way to a new peer is found, a transport keeps only a few datagrams for it. */
	assert_int_equal(dq_prober_once(a.prober, 0), 0);
	samples_take(&a, s, 1);
	assert_int_equal(s[0].result, DQ_PROBE_OK);
	for (unsigned i = 0; i < N; i++)
		assert_int_equal(dq_prober_once(a.prober, 0), 0);
	samples_take(&a, s, N);
	for (unsigned i = 0; i < N; i++)
		assert_int_equal(s[i].result, DQ_PROBE_OK);
	no_sample_waits(&a);
	assert_stat(&a, sent, N + 1);
	host_stop(&a);
	host_stop(&b);
}

/* The prober's side against a peer that the test plays */

static void silence_is_one_timeout_a_probe(void **state)
{
	(void)state;
	enum { N = 10 };
	struct host a;
	struct peer peer;
	struct dq_probe_sample s[N];
	host_start_with(&a, 0, real, (struct dq_prober_config){ .timeout_ns = SILENCE });
	peer_start(&peer, &a);
	host_knows_peer(&a, 7, &peer, 0);
	for (unsigned i = 0; i < N; i++)
		assert_int_equal(dq_prober_once(a.prober, 7), 0);
	samples_take(&a, s, N);
	for (unsigned i = 0; i < N; i++) {
		assert_int_equal(s[i].result, DQ_PROBE_TIMEOUT);
		assert_int_equal(s[i].target, 7);
	}
	/* One later probe goes the same way; only it makes another sample. */
	assert_int_equal(dq_prober_once(a.prober, 7), 0);
	samples_take(&a, s, 1);
	no_sample_waits(&a);
	assert_stat(&a, timeouts, N + 1);
	assert_stat(&a, sent, N + 1);
	assert_stat(&a, acked, 0);
	host_stop(&a);
	peer_stop(&peer);
}

/* Half an answer is none: without ACK2 the responder's delay is not known. */
static void one_ack_alone_is_a_timeout(void **state)
{
	(void)state;
	struct host a;
	struct peer peer;
	struct dq_probe_sample s[2];
	host_start_with(&a, 0, real, (struct dq_prober_config){ .timeout_ns = SILENCE });
	peer_start(&peer, &a);
	host_knows_peer(&a, 0, &peer, 0);
	for (unsigned i = 0; i < 2; i++) {
		assert_int_equal(dq_prober_once(a.prober, 0), 0);
		struct dq_probe_packet p = peer_receive(&peer);
		assert_int_equal(p.type, DQ_PROBE_PROBE);
		assert_true(p.token == peer.token);
		peer_send(&peer, i == 0 ? DQ_PROBE_ACK1 : DQ_PROBE_ACK2, p.id, a.token, 0);
		samples_take(&a, s, 1);
		assert_int_equal(s[0].result, DQ_PROBE_TIMEOUT);
	}
	host_stop(&a);
	peer_stop(&peer);
}

static void acks_in_any_order_and_twice_make_one_sample(void **state)
{
	(void)state;
	struct host a;
	struct peer peer;
	struct dq_probe_sample s;
	host_start(&a, 0);
	peer_start(&peer, &a);
	host_knows_peer(&a, 0, &peer, 0);
	for (unsigned i = 0; i < 4; i++) {
		enum dq_probe_type first = i & 1 ? DQ_PROBE_ACK2 : DQ_PROBE_ACK1;
		enum dq_probe_type second = i & 1 ? DQ_PROBE_ACK1 : DQ_PROBE_ACK2;
		assert_int_equal(dq_prober_once(a.prober, 0), 0);
		struct dq_probe_packet p = peer_receive(&peer);
		peer_send(&peer, first, p.id, a.token, 0);
		peer_send(&peer, first, p.id, a.token, 0);
		peer_send(&peer, second, p.id, a.token, 0);
		peer_send(&peer, second, p.id, a.token, 0);
		peer_send(&peer, first, p.id, a.token, 0);
		samples_take(&a, &s, 1);
		assert_int_equal(s.result, DQ_PROBE_OK);
		peer_settle(&peer, &a, 1000 + i);
		no_sample_waits(&a);
	}
	assert_stat(&a, acked, 4);
	assert_stat(&a, late, 0);
	assert_stat(&a, malformed, 0);
	host_stop(&a);
	peer_stop(&peer);
}

/* The first ACK1 counts; its copy, sent later, must not make the way longer. */
static void a_repeated_ack_does_not_change_the_time(void **state)
{
	(void)state;
	struct host a;
	struct peer peer;
	struct dq_probe_sample s;
	host_start(&a, 0);
	peer_start(&peer, &a);
	host_knows_peer(&a, 0, &peer, 0);
	assert_int_equal(dq_prober_once(a.prober, 0), 0);
	struct dq_probe_packet p = peer_receive(&peer);
	peer_send(&peer, DQ_PROBE_ACK1, p.id, a.token, 0);
	peer_settle(&peer, &a, 1);
	uint64_t between = now_ns();
	wait_until(between + 5 * MS);
	peer_send(&peer, DQ_PROBE_ACK1, p.id, a.token, 0);
	peer_send(&peer, DQ_PROBE_ACK2, p.id, a.token, 0);
	samples_take(&a, &s, 1);
	assert_int_equal(s.result, DQ_PROBE_OK);
	assert_true((uint64_t)s.rtt_ns <= between - s.time_ns);
	host_stop(&a);
	peer_stop(&peer);
}

static void the_responders_delay_is_taken_off(void **state)
{
	(void)state;
	struct host a;
	struct peer peer;
	struct dq_probe_sample s;
	host_start(&a, 0);
	peer_start(&peer, &a);
	host_knows_peer(&a, 0, &peer, 0);

	assert_int_equal(dq_prober_once(a.prober, 0), 0);
	struct dq_probe_packet p = peer_receive(&peer);
	uint64_t got = now_ns();
	wait_until(got + 3 * MS); /* a responder that is slow, by as much as it tells */
	uint64_t posted = now_ns();
	peer_send(&peer, DQ_PROBE_ACK1, p.id, a.token, 0);
	peer_send(&peer, DQ_PROBE_ACK2, p.id, a.token, (int64_t)(posted - got));
	samples_take(&a, &s, 1);
	uint64_t seen = now_ns();
	assert_int_equal(s.result, DQ_PROBE_OK);
	assert_int_equal(s.responder_delay_ns, posted - got);
	assert_true((uint64_t)s.rtt_ns <= seen - s.time_ns - (posted - got));
	host_stop(&a);
	peer_stop(&peer);
}

static void impossible_times_are_invalid_and_no_loss(void **state)
{
	(void)state;
	static const int64_t deltas[] = { -1, INT64_MIN, INT64_MAX, INT64_MIN + 1, 3600 * (int64_t)SECOND };
	enum { N = sizeof deltas / sizeof deltas[0] };
	struct host a;
	struct peer peer;
	struct dq_probe_sample s;
	host_start(&a, 0);
	peer_start(&peer, &a);
	host_knows_peer(&a, 0, &peer, 0);
	for (unsigned i = 0; i < N; i++) {
		assert_int_equal(dq_prober_once(a.prober, 0), 0);
		struct dq_probe_packet p = peer_receive(&peer);
		peer_send(&peer, DQ_PROBE_ACK1, p.id, a.token, 0);
		peer_send(&peer, DQ_PROBE_ACK2, p.id, a.token, deltas[i]);
		samples_take(&a, &s, 1);
		assert_int_equal(s.result, DQ_PROBE_INVALID);
	}
	assert_stat(&a, invalid, N);
	assert_stat(&a, timeouts, 0);
	host_stop(&a);
	peer_stop(&peer);
}

static void a_late_answer_is_counted_once_and_makes_no_sample(void **state)
{
	(void)state;
	struct host a;
	struct peer peer;
	struct dq_probe_sample s;
	host_start_with(&a, 0, real, (struct dq_prober_config){ .timeout_ns = SILENCE });
	peer_start(&peer, &a);
	host_knows_peer(&a, 0, &peer, 0);
	assert_int_equal(dq_prober_once(a.prober, 0), 0);
	struct dq_probe_packet p = peer_receive(&peer);
	samples_take(&a, &s, 1);
	assert_int_equal(s.result, DQ_PROBE_TIMEOUT);
	peer_send(&peer, DQ_PROBE_ACK1, p.id, a.token, 0);
	peer_send(&peer, DQ_PROBE_ACK2, p.id, a.token, 0);
	peer_settle(&peer, &a, 1);
	no_sample_waits(&a);
	assert_stat(&a, late, 1);
	assert_stat(&a, timeouts, 1);
	assert_stat(&a, acked, 0);
	host_stop(&a);
	peer_stop(&peer);
}

static void wrong_tokens_and_ids_are_refused(void **state)
{
	(void)state;
	struct host a;
	struct peer peer;
	struct dq_probe_sample s;
	host_start(&a, 0);
	peer_start(&peer, &a);
	host_knows_peer(&a, 0, &peer, 0);

	peer_send(&peer, DQ_PROBE_PROBE, 1, a.token + 1, 0);
	peer_send(&peer, DQ_PROBE_PROBE, 1, peer.token, 0);
	peer_settle(&peer, &a, 2);
	assert_stat(&a, refused_token, 2);
	assert_stat(&a, answered, 1);

	assert_int_equal(dq_prober_once(a.prober, 0), 0);
	struct dq_probe_packet p = peer_receive(&peer);
	uint64_t other_life = p.id ^ 1ull << 40, other_counter = (p.id & ~0xffffffffull) | (uint32_t)(p.id + 1);
	peer_send(&peer, DQ_PROBE_ACK1, p.id, a.token ^ 1, 0);
	peer_send(&peer, DQ_PROBE_ACK2, p.id, a.token ^ 1, 0);
	peer_send(&peer, DQ_PROBE_ACK1, other_life, a.token, 0);
	peer_send(&peer, DQ_PROBE_ACK2, other_life, a.token, 0);
	peer_send(&peer, DQ_PROBE_ACK1, other_counter, a.token, 0);
	peer_send(&peer, DQ_PROBE_ACK2, other_counter, a.token, 0);
	peer_settle(&peer, &a, 3);
	no_sample_waits(&a);
	assert_stat(&a, refused_token, 4);
	assert_stat(&a, malformed, 4);

	peer_send(&peer, DQ_PROBE_ACK1, p.id, a.token, 0);
	peer_send(&peer, DQ_PROBE_ACK2, p.id, a.token, 0);
	samples_take(&a, &s, 1);
	assert_int_equal(s.result, DQ_PROBE_OK);
	host_stop(&a);
	peer_stop(&peer);
}

static void a_peer_cannot_answer_for_another(void **state)
{
	(void)state;
	struct host a;
	struct peer asked, other;
	struct dq_probe_sample s;
	host_start(&a, 0);
	peer_start(&asked, &a);
	peer_start(&other, &a);
	host_knows_peer(&a, 0, &asked, 0);
	host_knows_peer(&a, 1, &other, 0);
	assert_int_equal(dq_prober_once(a.prober, 0), 0);
	struct dq_probe_packet p = peer_receive(&asked);
	peer_send(&other, DQ_PROBE_ACK1, p.id, a.token, 0);
	peer_send(&other, DQ_PROBE_ACK2, p.id, a.token, 0);
	peer_settle(&other, &a, 1);
	no_sample_waits(&a);
	assert_stat(&a, refused_unknown, 2);
	peer_send(&asked, DQ_PROBE_ACK1, p.id, a.token, 0);
	peer_send(&asked, DQ_PROBE_ACK2, p.id, a.token, 0);
	samples_take(&a, &s, 1);
	assert_int_equal(s.result, DQ_PROBE_OK);
	assert_int_equal(s.target, 0);
	host_stop(&a);
	peer_stop(&asked);
	peer_stop(&other);
}

/* The responder's side */

static void an_unknown_source_gets_no_answer(void **state)
{
	(void)state;
	struct host a;
	struct peer known, unknown;
	host_start(&a, 0);
	peer_start(&known, &a);
	peer_start(&unknown, &a);
	host_knows_peer(&a, 0, &known, 0);
	host_knows_peer(&a, 1, &unknown, 0);
	peer_settle(&unknown, &a, 1);
	assert_int_equal(dq_prober_target_remove(a.prober, 1), 0);

	peer_send(&unknown, DQ_PROBE_PROBE, 2, a.token, 0);
	peer_send(&unknown, DQ_PROBE_ACK1, 2, a.token, 0);
	peer_settle(&known, &a, 3);
	assert_stat(&a, refused_unknown, 2);
	assert_stat(&a, answered, 2);
	/* Known again, the next packet that comes is of the next probe: nothing came of the one in between. */
	host_knows_peer(&a, 1, &unknown, 0);
	peer_send(&unknown, DQ_PROBE_PROBE, 4, a.token, 0);
	assert_int_equal(peer_receive(&unknown).id, 4);
	host_stop(&a);
	peer_stop(&known);
	peer_stop(&unknown);
}

static void answers_carry_the_askers_token_and_its_id(void **state)
{
	(void)state;
	struct host a;
	struct peer peer;
	host_start(&a, 0);
	peer_start(&peer, &a);
	host_knows_peer(&a, 0, &peer, 0);
	for (unsigned i = 0; i < 20; i++) {
		uint64_t id = random_next();
		peer_send(&peer, DQ_PROBE_PROBE, id, a.token, 0);
		unsigned seen = 0;
		for (unsigned k = 0; k < 2; k++) {
			struct dq_probe_packet p = peer_receive(&peer);
			assert_true(p.id == id && p.token == peer.token);
			assert_true(p.type == DQ_PROBE_ACK1 || p.type == DQ_PROBE_ACK2);
			seen |= 1u << p.type;
			assert_true(p.delta_ns >= 0);
		}
		assert_int_equal(seen, 1u << DQ_PROBE_ACK1 | 1u << DQ_PROBE_ACK2);
	}
	assert_stat(&a, answered, 20);
	host_stop(&a);
	peer_stop(&peer);
}

static void a_source_is_answered_at_its_rate_only(void **state)
{
	(void)state;
	enum { RATE = 8, DEPTH = 4, SENT = 64 };
	struct host a;
	struct peer greedy, modest;
	host_start_with(&a, 0, real, (struct dq_prober_config){ .answers_per_second = RATE, .timeout_ns = 60 * SECOND });
	peer_start(&greedy, &a);
	peer_start(&modest, &a);
	host_knows_peer(&a, 0, &greedy, 0);
	host_knows_peer(&a, 1, &modest, 0);
	uint64_t begun = now_ns();
	for (unsigned i = 0; i < SENT; i++)
		peer_send(&greedy, DQ_PROBE_PROBE, i, a.token, 0);
	peer_settle(&modest, &a, 1); /* another source is not hurt */
	uint64_t most = DEPTH + (now_ns() - begun) * RATE / SECOND + 1;
	struct dq_prober_stats s = stats_of(&a);
	assert_int_equal(s.answered - 1 + s.refused_rate, SENT);
	assert_in_range(s.answered - 1, DEPTH, most);
	host_stop(&a);
	peer_stop(&greedy);
	peer_stop(&modest);
}

/* Whatever comes, each datagram is counted as what it is, nothing is disturbed, and the prober goes on. */
static void garbage_does_no_harm(void **state)
{
	(void)state;
	enum { ROUNDS = 60, EACH = 50 };
	struct host a;
	struct peer peer;
	struct dq_probe_sample s;
	uint64_t malformed = 0;
	host_start(&a, 0);
	peer_start(&peer, &a);
	host_knows_peer(&a, 0, &peer, 0);
	random_state = 42;
	for (unsigned round = 0; round < ROUNDS; round++) {
		for (unsigned i = 0; i < EACH; i++) {
			uint8_t bytes[128];
			struct dq_probe_packet p = { .type = (enum dq_probe_type)(1 + random_next() % 3), .id = random_next(),
						     .token = random_next() }, out;
			size_t len = DQ_PROBE_PACKET_BYTES;
			for (unsigned k = 0; k < sizeof bytes; k++)
				bytes[k] = (uint8_t)random_next();
			switch (random_next() % 3) {
			case 0: /* any bytes of any size */
				len = 1 + random_next() % sizeof bytes;
				break;
			case 1: /* a good packet with a few bytes wrong */
				dq_probe_packet_encode(&p, bytes);
				for (unsigned k = random_next() % 4; k > 0; k--)
					bytes[random_next() % len] = (uint8_t)random_next();
				break;
			default: /* a good packet with more behind or less */
				dq_probe_packet_encode(&p, bytes);
				len = random_next() % (DQ_PROBE_PACKET_BYTES + 4) + 1;
			}
			malformed += dq_probe_packet_decode(bytes, len, &out) < 0;
			peer_send_bytes(&peer, bytes, len);
		}
		peer_settle(&peer, &a, round + 1);
	}
	assert_stat(&a, malformed, malformed);
	assert_stat(&a, refused_token, ROUNDS * EACH - malformed); /* well-formed, but 64 random bits are not the token */
	assert_stat(&a, answered, ROUNDS);
	no_sample_waits(&a);
	assert_int_equal(dq_prober_once(a.prober, 0), 0);
	struct dq_probe_packet p = peer_receive(&peer);
	peer_send(&peer, DQ_PROBE_ACK1, p.id, a.token, 0);
	peer_send(&peer, DQ_PROBE_ACK2, p.id, a.token, 0);
	samples_take(&a, &s, 1);
	assert_int_equal(s.result, DQ_PROBE_OK);
	host_stop(&a);
	peer_stop(&peer);
}

/* Commands while work is under way */

/* The link is destroyed right after; the sanitizers see a use of it. */
static void a_target_can_be_removed_while_probes_are_under_way(void **state)
{
	(void)state;
	enum { N = 20 };
	struct host a, b;
	struct peer silent;
	struct dq_probe_sample s[N];
	host_start_with(&a, 0, real, (struct dq_prober_config){ .timeout_ns = 30 * MS });
	host_start(&b, 1);
	peer_start(&silent, &a);
	for (unsigned round = 0; round < 5; round++) {
		struct dq_link *link = link_make(MS);
		assert_int_equal(dq_prober_target_set(a.prober, 0, silent.endpoint.data, silent.endpoint.len, silent.token, 0, link,
						      MS, 0), 0);
		while (peer_receive(&silent).type != DQ_PROBE_PROBE)
			;
		assert_int_equal(dq_prober_target_remove(a.prober, 0), 0);
		if (link)
			dq_link_destroy(link);
		assert_int_equal(dq_prober_target_remove(a.prober, 0), -ENOENT);
		assert_int_equal(dq_prober_once(a.prober, 0), -ENOENT);
		while (dq_prober_drain(a.prober, s, N) > 0)
			;
		/* Its number goes to another: no timeout of the old one is laid to the charge of the new. */
		host_knows(&b, 0, &a, NULL, 0);
		uint64_t set = now_ns();
		host_knows(&a, 0, &b, NULL, 2 * MS);
		samples_take(&a, s, N);
		for (unsigned i = 0; i < N; i++)
			assert_true(s[i].time_ns >= set);
		/* And so when the number is given to another without a removal between. */
		host_knows_peer(&a, 0, &silent, MS);
		while (peer_receive(&silent).type != DQ_PROBE_PROBE)
			;
		set = now_ns();
		host_knows(&a, 0, &b, NULL, 2 * MS);
		while (dq_prober_drain(a.prober, s, N) > 0)
			;
		samples_take(&a, s, N);
		for (unsigned i = 0; i < N; i++)
			assert_true(s[i].time_ns >= set);
		assert_int_equal(dq_prober_target_remove(a.prober, 0), 0);
		while (dq_prober_drain(a.prober, s, N) > 0)
			;
	}
	host_stop(&a);
	host_stop(&b);
	peer_stop(&silent);
}

/* However targets come and go, those that are there are found by their endpoint, and only those. */
static void the_known_are_found_after_many_changes(void **state)
{
	(void)state;
	enum { IDS = 40, KNOWN = IDS, UNKNOWN = IDS + 1, ROUNDS = 50, CHANGES = 100 };
	struct host a;
	struct peer known, unknown;
	bool there[IDS] = { false };
	uint32_t count = 0;
	host_start_with(&a, 0, real, (struct dq_prober_config){ .max_targets = IDS + 2, .timeout_ns = 60 * SECOND });
	peer_start(&known, &a);
	peer_start(&unknown, &a);
	random_state = 7;
	host_knows_peer(&a, UNKNOWN, &unknown, 0);
	for (unsigned round = 0; round < ROUNDS; round++) {
		for (unsigned i = 0; i < CHANGES; i++) {
			uint32_t id = (uint32_t)(random_next() % IDS);
			uint8_t endpoint[] = { 1, 2, (uint8_t)(random_next() % 60) }; /* some twice */
			if (random_next() % 3 == 0) {
				assert_int_equal(dq_prober_target_remove(a.prober, id), there[id] ? 0 : -ENOENT);
				count -= there[id];
				there[id] = false;
			} else {
				assert_int_equal(dq_prober_target_set(a.prober, id, endpoint, sizeof endpoint, 1, 0, NULL, 0, 0), 0);
				count += !there[id];
				there[id] = true;
			}
			if (i == CHANGES / 2) {
				if (round)
					assert_int_equal(dq_prober_target_remove(a.prober, KNOWN), 0);
				host_knows_peer(&a, KNOWN, &known, 0);
				if (round == 0)
					assert_int_equal(dq_prober_target_remove(a.prober, UNKNOWN), 0);
			}
		}
		peer_send(&unknown, DQ_PROBE_PROBE, round, a.token, 0);
		peer_settle(&known, &a, round);
		assert_stat(&a, refused_unknown, round + 1);
		assert_stat(&a, answered, round + 1);
		assert_stat(&a, targets, count + 1);
	}
	host_stop(&a);
	peer_stop(&known);
	peer_stop(&unknown);
}

struct flood {
	struct peer peer;
	uint64_t token;
	atomic_bool stop;
};

static void *flood_run(void *arg)
{
	struct flood *f = arg;
	struct dq_dgram_event events[32];
	for (uint64_t id = 0; !atomic_load(&f->stop); id++) {
		struct dq_probe_packet p = { .type = DQ_PROBE_PROBE, .id = id, .token = f->token + id % 2 };
		uint8_t bytes[DQ_PROBE_PACKET_BYTES];
		dq_probe_packet_encode(&p, bytes);
		real->dgram_send(f->peer.dgram, &f->peer.prober, 0, NULL, id, bytes, sizeof bytes);
		real->dgram_poll(f->peer.dgram, events, 32);
	}
	return NULL;
}

/* A flood of datagrams, many targets, a short interval: commands are carried out and the prober stops when told to. */
static void a_busy_prober_obeys_and_stops(void **state)
{
	(void)state;
	enum { TARGETS = 200 };
	struct host a, b;
	struct flood f = { 0 };
	pthread_t thread;
	struct dq_probe_sample s[64];
	struct dq_link *link = link_make(100000);
	host_start_with(&a, 0, real, (struct dq_prober_config){ .timeout_ns = 20 * MS, .max_targets = TARGETS + 1 });
	host_start(&b, 1);
	peer_start(&f.peer, &a);
	f.token = a.token;
	host_knows_peer(&a, TARGETS, &f.peer, 0);
	host_knows(&b, 0, &a, link, 0);
	assert_int_equal(pthread_create(&thread, NULL, flood_run, &f), 0);
	for (unsigned round = 0; round < 3; round++) {
		for (uint32_t i = 0; i < TARGETS; i++)
			host_knows(&a, i, &b, i % 2 ? link : NULL, MS + i * 1000);
		samples_take(&a, s, 64);
		for (uint32_t i = 0; i < TARGETS; i += 3)
			assert_int_equal(dq_prober_target_remove(a.prober, i), 0);
		stats_of(&a);
	}
	/* On one CPU the flood may not have had its turn yet. */
	while (stats_of(&a).refused_token == 0)
		sched_yield();
	host_stop(&a);
	atomic_store(&f.stop, true);
	pthread_join(thread, NULL);
	host_stop(&b);
	peer_stop(&f.peer);
	if (link)
		dq_link_destroy(link);
}

static void a_full_ring_drops_and_counts(void **state)
{
	(void)state;
	enum { ROOM = 4, N = 20 };
	struct host a;
	struct peer peer;
	struct dq_probe_sample s[N];
	struct dq_prober_stats stats;
	host_start_with(&a, 0, real, (struct dq_prober_config){ .timeout_ns = SILENCE, .ring_samples = ROOM });
	peer_start(&peer, &a);
	host_knows_peer(&a, 0, &peer, 0);
	for (unsigned i = 0; i < N; i++)
		assert_int_equal(dq_prober_once(a.prober, 0), 0);
	do {
		struct pollfd none = { .fd = -1 };
		poll(&none, 1, 1); /* not to hold the state for itself */
		stats = stats_of(&a);
	} while (stats.timeouts < N);
	assert_int_equal(stats_of(&a).samples_dropped, N - ROOM);
	/* Taken one by one, the fd stays readable while some wait, also when the caller reads it. */
	for (unsigned i = 0; i < ROOM; i++) {
		struct pollfd pfd = { .fd = dq_prober_event_fd(a.prober), .events = POLLIN };
		uint64_t events;
		assert_int_equal(poll(&pfd, 1, PATIENCE_MS), 1);
		assert_int_equal(read(pfd.fd, &events, sizeof events), sizeof events);
		assert_int_equal(dq_prober_drain(a.prober, s, 1), 1);
	}
	no_sample_waits(&a);
	/* There is room again. */
	assert_int_equal(dq_prober_once(a.prober, 0), 0);
	samples_take(&a, s, 1);
	host_stop(&a);
	peer_stop(&peer);
}

/* Endpoints that misbehave: the real one, with one function wrapped. The wrappers are used by one prober at a time. */

static int poll_without_sent_events(struct dq_dgram *dg, struct dq_dgram_event *out, unsigned n)
{
	int got = real->dgram_poll(dg, out, n), kept = 0;
	for (int i = 0; i < got; i++) {
		out[i].time_ns += 123456789 * SECOND;
		if (out[i].kind != DQ_DGRAM_SENT)
			out[kept++] = out[i];
	}
	return got < 0 ? got : kept;
}

/* The event of the sending never comes: its software time stands in, on both sides, in whatever clock the events are. */
static void a_missing_send_event_is_made_up_for(void **state)
{
	(void)state;
	enum { N = 5 };
	static struct dq_provider deaf;
	struct host a, b;
	struct dq_probe_sample s[N];
	deaf = *real;
	deaf.dgram_poll = poll_without_sent_events;
	for (unsigned who = 0; who < 3; who++) {
		host_start_with(&a, 0, who != 1 ? &deaf : real, (struct dq_prober_config){ .timeout_ns = SECOND + SECOND / 2 });
		host_start_with(&b, 1, who != 0 ? &deaf : real, (struct dq_prober_config){ .timeout_ns = SECOND / 5 });
		host_knows(&b, 0, &a, NULL, 0);
		host_knows(&a, 0, &b, NULL, 0);
		for (unsigned i = 0; i < N; i++)
			assert_int_equal(dq_prober_once(a.prober, 0), 0);
		samples_take(&a, s, N);
		uint64_t seen = now_ns();
		unsigned ok = 0;
		int64_t responder_delay = 0;
		for (unsigned i = 0; i < N; i++) {
			/* A software time may turn out later than the truth: then the sample is invalid, and never a loss. */
			assert_true(s[i].result == DQ_PROBE_OK || s[i].result == DQ_PROBE_INVALID);
			if (s[i].result == DQ_PROBE_OK) {
				ok++;
				assert_true(s[i].rtt_ns >= 0 && (uint64_t)s[i].rtt_ns <= seen - s[i].time_ns);
				responder_delay = DQ_MAX(responder_delay, s[i].responder_delay_ns);
			}
		}
		assert_true(ok > 0);
		assert_true(responder_delay > 0);
		host_stop(&a);
		host_stop(&b);
	}
}

static int send_refused(struct dq_dgram *dg, const struct dq_endpoint *to, uint32_t flow_label, struct dq_link *link, uint64_t id,
			const void *data, uint16_t len)
{
	(void)dg, (void)to, (void)flow_label, (void)link, (void)id, (void)data, (void)len;
	return -ENETUNREACH;
}

static int poll_with_send_errors(struct dq_dgram *dg, struct dq_dgram_event *out, unsigned n)
{
	int got = real->dgram_poll(dg, out, n);
	for (int i = 0; i < got; i++)
		if (out[i].kind == DQ_DGRAM_SENT) {
			out[i].kind = DQ_DGRAM_SEND_ERROR;
			out[i].error = -ENETUNREACH;
		}
	return got;
}

static void what_cannot_be_sent_is_a_send_error(void **state)
{
	(void)state;
	enum { N = 5 };
	struct dq_probe_sample s[N];
	for (unsigned how = 0; how < 2; how++) {
		static struct dq_provider cut_off;
		struct host a;
		struct peer peer;
		cut_off = *real;
		if (how == 0)
			cut_off.dgram_send = send_refused;
		else
			cut_off.dgram_poll = poll_with_send_errors;
		host_start_with(&a, 0, &cut_off, (struct dq_prober_config){ .timeout_ns = 60 * SECOND });
		peer_start(&peer, &a);
		host_knows_peer(&a, 0, &peer, 0);
		for (unsigned i = 0; i < N; i++)
			assert_int_equal(dq_prober_once(a.prober, 0), 0);
		samples_take(&a, s, N);
		for (unsigned i = 0; i < N; i++)
			assert_int_equal(s[i].result, DQ_PROBE_SEND_ERROR);
		assert_stat(&a, send_errors, N);
		assert_stat(&a, timeouts, 0);
		/* An ACK1 that did not leave is not followed by an ACK2, which would tell a delay that never was. */
		for (uint64_t id = 1; how == 1 && id <= N; id++) {
			struct dq_probe_packet p;
			peer_send(&peer, DQ_PROBE_PROBE, id, a.token, 0);
			do
				p = peer_receive(&peer);
			while (p.type == DQ_PROBE_PROBE);
			assert_int_equal(p.type, DQ_PROBE_ACK1);
			assert_int_equal(p.id, id);
		}
		host_stop(&a);
		peer_stop(&peer);
	}
}

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;

static int poll_behind_the_gate(struct dq_dgram *dg, struct dq_dgram_event *out, unsigned n)
{
	pthread_mutex_lock(&gate);
	pthread_mutex_unlock(&gate);
	return real->dgram_poll(dg, out, n);
}

/* What counts is when an answer came in, not when a busy host found the time to look. */
static void a_held_up_prober_judges_by_the_stamps(void **state)
{
	(void)state;
	const uint64_t timeout = 300 * MS;
	static struct dq_provider gated;
	struct host a;
	struct peer peer;
	struct dq_probe_sample s;
	gated = *real;
	gated.dgram_poll = poll_behind_the_gate;
	host_start_with(&a, 0, &gated, (struct dq_prober_config){ .timeout_ns = timeout });
	peer_start(&peer, &a);
	host_knows_peer(&a, 0, &peer, 0);
	const bool stamped = strcmp(dq_prober_time_source(a.prober), "software") != 0;
	for (unsigned in_time = 0; in_time < 2; in_time++) {
		assert_int_equal(dq_prober_once(a.prober, 0), 0);
		struct dq_probe_packet p = peer_receive(&peer);
		uint64_t received = now_ns();
		pthread_mutex_lock(&gate);
		if (in_time) {
			uint8_t nothing = 0;
			for (unsigned i = 0; i < 150; i++)
				peer_send_bytes(&peer, &nothing, 1); /* more than is read at once */
			peer_send(&peer, DQ_PROBE_ACK1, p.id, a.token, 0);
			peer_send(&peer, DQ_PROBE_ACK2, p.id, a.token, 0);
		}
		uint64_t sent = now_ns();
		wait_until(received + timeout + MS);
		if (!in_time) {
			peer_send(&peer, DQ_PROBE_ACK1, p.id, a.token, 0);
			peer_send(&peer, DQ_PROBE_ACK2, p.id, a.token, 0);
		}
		pthread_mutex_unlock(&gate);
		samples_take(&a, &s, 1);
		if (!in_time)
			assert_int_equal(s.result, DQ_PROBE_TIMEOUT);
		else if (stamped && sent < s.time_ns + timeout) /* else this test was held up itself, or nobody stamps */
			assert_int_equal(s.result, DQ_PROBE_OK);
		peer_settle(&peer, &a, in_time + 1);
		no_sample_waits(&a);
		if (!in_time)
			assert_stat(&a, late, 1);
	}
	host_stop(&a);
	peer_stop(&peer);
}

static atomic_uint failures_left;

static int poll_that_fails_for_a_while(struct dq_dgram *dg, struct dq_dgram_event *out, unsigned n)
{
	unsigned left = atomic_load(&failures_left);
	if (left > 0) {
		atomic_store(&failures_left, left - 1);
		return -EIO;
	}
	return real->dgram_poll(dg, out, n);
}

static void a_failing_endpoint_is_tried_again(void **state)
{
	(void)state;
	static struct dq_provider flaky;
	struct host a, b;
	struct dq_probe_sample s;
	flaky = *real;
	flaky.dgram_poll = poll_that_fails_for_a_while;
	atomic_store(&failures_left, 3);
	host_start_with(&a, 0, &flaky, (struct dq_prober_config){ .timeout_ns = 10 * MS });
	host_start(&b, 1);
	host_knows(&b, 0, &a, NULL, 0);
	host_knows(&a, 0, &b, NULL, 5 * MS);
	do
		samples_take(&a, &s, 1);
	while (s.result != DQ_PROBE_OK);
	assert_int_equal(atomic_load(&failures_left), 0);
	host_stop(&a);
	host_stop(&b);
}

static void wrong_arguments_are_refused(void **state)
{
	(void)state;
	struct dq_device *dev = device_open(0);
	struct dq_provider mute = *real;
	dq_prober *p = NULL;
	struct dq_error err;
	struct host a;
	static const uint8_t endpoint[DQ_ENDPOINT_MAX + 1] = { 1 };

	mute.dgram_open = NULL;
	assert_int_equal(dq_prober_start(&mute, dev, &(struct dq_prober_config){ .token = 1 }, &p, &err), -EOPNOTSUPP);
	assert_int_equal(dq_prober_start(real, dev, &(struct dq_prober_config){ .token = 0 }, &p, &err), -EINVAL);
	assert_non_null(strstr(err.text, "token"));
	assert_int_equal(dq_prober_start(real, dev, &(struct dq_prober_config){ .token = 1, .timeout_ns = 5 }, &p, &err), -ERANGE);
	assert_int_equal(dq_prober_start(real, dev, &(struct dq_prober_config){ .token = 1, .max_targets = UINT32_MAX }, &p, &err),
			 -ERANGE);
	assert_int_equal(dq_prober_start(real, dev, &(struct dq_prober_config){ .token = 1, .ring_samples = UINT32_MAX }, &p, &err),
			 -ERANGE);
	assert_null(p);
	real->device_close(dev);

	host_start_with(&a, 0, real, (struct dq_prober_config){ .max_targets = 10 });
	assert_int_equal(dq_prober_target_set(a.prober, 10, endpoint, 6, 1, 0, NULL, 0, 0), -EINVAL);
	assert_int_equal(dq_prober_target_set(a.prober, 0, endpoint, 0, 1, 0, NULL, 0, 0), -EINVAL);
	assert_int_equal(dq_prober_target_set(a.prober, 0, endpoint, sizeof endpoint, 1, 0, NULL, 0, 0), -EINVAL);
	assert_int_equal(dq_prober_target_set(a.prober, 0, endpoint, 6, 1, 0, NULL, MS - 1, 0), -ERANGE);
	assert_int_equal(dq_prober_target_set(a.prober, 0, endpoint, 6, 1, 0, NULL, UINT64_MAX, 0), -ERANGE);
	assert_int_equal(dq_prober_target_set(a.prober, 0, endpoint, 6, 1, 0, NULL, SECOND, UINT64_MAX), -ERANGE);
	assert_int_equal(dq_prober_target_remove(a.prober, 10), -EINVAL);
	assert_int_equal(dq_prober_target_remove(a.prober, 9), -ENOENT);
	assert_int_equal(dq_prober_once(a.prober, 10), -EINVAL);
	assert_int_equal(dq_prober_once(a.prober, 9), -ENOENT);
	assert_stat(&a, targets, 0);
	host_stop(&a);
}

static int group_setup(void **state)
{
	(void)state;
	random_state = 2026;
	real = dq_provider_find(transport_provider());
	return real ? 0 : -1;
}

int main(void)
{
	const int unfit = transport_env_check();
	if (unfit)
		return unfit;
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(two_probers_measure_the_links_between_them_exactly),
		cmocka_unit_test(loopback_without_a_link_is_measured),
		cmocka_unit_test(probes_start_after_the_phase_and_keep_the_interval),
		cmocka_unit_test(an_extra_probe_is_sent_for_each_call),
		cmocka_unit_test(silence_is_one_timeout_a_probe),
		cmocka_unit_test(one_ack_alone_is_a_timeout),
		cmocka_unit_test(acks_in_any_order_and_twice_make_one_sample),
		cmocka_unit_test(a_repeated_ack_does_not_change_the_time),
		cmocka_unit_test(the_responders_delay_is_taken_off),
		cmocka_unit_test(impossible_times_are_invalid_and_no_loss),
		cmocka_unit_test(a_late_answer_is_counted_once_and_makes_no_sample),
		cmocka_unit_test(wrong_tokens_and_ids_are_refused),
		cmocka_unit_test(a_peer_cannot_answer_for_another),
		cmocka_unit_test(an_unknown_source_gets_no_answer),
		cmocka_unit_test(answers_carry_the_askers_token_and_its_id),
		cmocka_unit_test(a_source_is_answered_at_its_rate_only),
		cmocka_unit_test(garbage_does_no_harm),
		cmocka_unit_test(a_target_can_be_removed_while_probes_are_under_way),
		cmocka_unit_test(the_known_are_found_after_many_changes),
		cmocka_unit_test(a_busy_prober_obeys_and_stops),
		cmocka_unit_test(a_full_ring_drops_and_counts),
		cmocka_unit_test(a_missing_send_event_is_made_up_for),
		cmocka_unit_test(what_cannot_be_sent_is_a_send_error),
		cmocka_unit_test(a_held_up_prober_judges_by_the_stamps),
		cmocka_unit_test(a_failing_endpoint_is_tried_again),
		cmocka_unit_test(wrong_arguments_are_refused),
	};
	return cmocka_run_group_tests_name("prober", tests, group_setup, NULL);
}
