/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What only the datagram endpoint of the verbs provider has, between two RDMA devices: address handles, a queue pair that failed
 * and works again, addresses that come and go, datagrams that no prober sends, and the measurement of wake-ups. What every
 * provider promises is in test_transport_datagram.c. One test needs root and `ip`: it gives the network interface behind the first
 * device another address, and takes it back.
 */
#include "transport_pair.h"

#include "provider/verbs_dgram.h"

#define MS 1000000u

struct ends {
	struct pair pair;
	const struct dq_provider *p;
	struct dq_dgram *a, *b;
	struct dq_endpoint at_a, at_b;
};

static void ends_open_as(struct ends *e, bool extended)
{
	struct dq_error err = {0};
	pair_open(&e->pair);
	e->p = e->pair.a.p;
	if (dq_verbs_dgram_open_as(e->pair.a.dev, extended, &e->a, &err) || dq_verbs_dgram_open_as(e->pair.b.dev, extended, &e->b, &err))
		fail_msg("%s", err.text);
	e->p->dgram_endpoint(e->a, &e->at_a);
	e->p->dgram_endpoint(e->b, &e->at_b);
}

static void ends_open(struct ends *e)
{
	ends_open_as(e, false);
}

static void ends_close(struct ends *e)
{
	e->p->dgram_close(e->a);
	e->p->dgram_close(e->b);
	pair_close(&e->pair);
}

/* Sleep until one of both ends has something to do. */
static void ends_sleep(struct ends *e)
{
	struct pollfd fds[2] = {{.fd = e->p->dgram_fd(e->a), .events = POLLIN}, {.fd = e->p->dgram_fd(e->b), .events = POLLIN}};
	const uint64_t next = DQ_MIN(e->p->dgram_next_deadline(e->a), e->p->dgram_next_deadline(e->b)), now = clock_ns();
	if (next > now)
		poll(fds, 2, (int)DQ_MIN((next - now) / MS + 1, 1000u));
}

/* Poll both until an event of this kind comes at `dg`, and give it; those that come at the other end are dropped. */
static struct dq_dgram_event event_wait(struct ends *e, struct dq_dgram *dg, enum dq_dgram_kind kind)
{
	const uint64_t guard = clock_ns() + PATIENCE_NS;
	struct dq_dgram *other = dg == e->a ? e->b : e->a;
	struct dq_dgram_event ev, drop;
	while (clock_ns() < guard) {
		const int n = e->p->dgram_poll(dg, &ev, 1), m = e->p->dgram_poll(other, &drop, 1);
		assert_true(n >= 0 && m >= 0);
		if (n == 1 && ev.kind == kind)
			return ev;
		if (n == 0 && m == 0)
			ends_sleep(e);
	}
	fail_msg("no event of kind %d", (int)kind);
	return ev;
}

/* A datagram there and one back. */
static void there_and_back(struct ends *e, uint64_t id)
{
	assert_int_equal(e->p->dgram_send(e->a, &e->at_b, 0, NULL, id, &id, sizeof id), 0);
	for (;;) {
		struct dq_dgram_event ev = event_wait(e, e->b, DQ_DGRAM_RECEIVED);
		assert_memory_equal(ev.from.data, e->at_a.data, ev.from.len);
		if (ev.len == sizeof id && memcmp(ev.data, &id, sizeof id) == 0)
			break; /* others were sent before */
	}
	assert_int_equal(e->p->dgram_send(e->b, &e->at_a, 0, NULL, id, &id, sizeof id), 0);
	struct dq_dgram_event ev = event_wait(e, e->a, DQ_DGRAM_RECEIVED);
	assert_memory_equal(ev.data, &id, sizeof id);
}

static void what_does_not_fit_is_refused(void **state)
{
	(void)state;
	struct ends e;
	struct dq_link_config cfg = {.delay_ns = MS};
	struct dq_link *link;
	struct dq_endpoint wrong;
	struct dq_verbs_ud_peer peer;
	ends_open(&e);
	assert_int_equal(dq_link_create(&cfg, &link), 0);
	assert_int_equal(e.p->dgram_send(e.a, &e.at_b, 0, link, 1, "x", 1), -EINVAL);
	dq_link_destroy(link);
	assert_int_equal(dq_verbs_ud_endpoint_get(&e.at_b, &peer, NULL), 0);
	peer.layer = IBV_LINK_LAYER_INFINIBAND + IBV_LINK_LAYER_ETHERNET - peer.layer;
	peer.lid = peer.layer == IBV_LINK_LAYER_INFINIBAND;
	dq_verbs_ud_endpoint_put(&wrong, &peer);
	assert_int_equal(e.p->dgram_send(e.a, &wrong, 0, NULL, 1, "x", 1), -EAFNOSUPPORT);
	there_and_back(&e, 2);
	ends_close(&e);
}

/* The kind of completion queue that stamps need works alike, but for the stamps. */
static void extended_completion_queues_tell_the_same(void **state)
{
	(void)state;
	struct ends e;
	ends_open_as(&e, true);
	if (!dq_verbs_dgram_of(e.a)->received.ex) { /* the driver has none */
		ends_close(&e);
		skip();
	}
	for (uint64_t id = 1; id <= 2 * DQ_VERBS_DGRAM_RECEIVES; id++)
		there_and_back(&e, id);
	for (unsigned round = 0; round < 20; round++) {
		unsigned left = 0, came = 0;
		const uint64_t guard = clock_ns() + PATIENCE_NS;
		for (unsigned i = 0; i < 40; i++)
			assert_int_equal(e.p->dgram_send(e.a, &e.at_b, 0, NULL, i, &i, sizeof i), 0);
		while (left < 40 || came < 40) {
			struct dq_dgram_event ev[8];
			const int n = e.p->dgram_poll(e.a, ev, 8), m = e.p->dgram_poll(e.b, ev, 8);
			for (int i = 0; i < m; i++)
				if (ev[i].kind == DQ_DGRAM_RECEIVED) {
					assert_int_equal(ev[i].len, sizeof came);
					assert_memory_equal(ev[i].data, &came, sizeof came);
					came++;
				}
			left += (unsigned)n;
			assert_true(clock_ns() < guard);
			if (n == 0 && m == 0)
				ends_sleep(&e);
		}
		assert_int_equal(left, 40);
	}
	ends_close(&e);
}

/* Each flow label goes by a handle of its own, the same one each time. */
static void handles_are_made_once_a_label(void **state)
{
	(void)state;
	struct ends e;
	ends_open(&e);
	for (unsigned round = 0; round < 3; round++)
		for (uint32_t label = 0; label < 50; label++) {
			assert_int_equal(e.p->dgram_send(e.a, &e.at_b, label * 20011 & 0xfffff, NULL, label, "x", 1), 0);
			assert_int_equal(event_wait(&e, e.a, DQ_DGRAM_SENT).id, label);
		}
	ends_close(&e);
}

/* A host that is not there: told as an error, in the end, and nobody else waits for it. */
static void an_unreachable_peer_costs_only_itself(void **state)
{
	(void)state;
	enum { N = 4 };
	struct ends e;
	struct dq_verbs_ud_peer peer;
	struct dq_endpoint nobody;
	unsigned taken = 0;
	ends_open(&e);
	if (dq_verbs_device_of(e.pair.a.dev)->infiniband) { /* there handles are made without asking anybody */
		ends_close(&e);
		skip();
	}
	assert_int_equal(dq_verbs_ud_endpoint_get(&e.at_b, &peer, NULL), 0);
	peer.gid[15] ^= 0x60; /* in the same network */
	dq_verbs_ud_endpoint_put(&nobody, &peer);
	there_and_back(&e, 1);
	const struct dq_verbs_dgram *dg = dq_verbs_dgram_of_const(e.a);
	const uint64_t begun = clock_ns();
	for (uint64_t id = 100; id < 100 + N; id++)
		taken += e.p->dgram_send(e.a, &nobody, 0, NULL, id, "x", 1) == 0; /* or told at once */
	for (uint64_t id = 2; id < 20; id++)
		there_and_back(&e, id);
	/* The kernel asks for a second before it gives up: meanwhile all others got through. */
	if (taken > 0 && clock_ns() - begun < 500 * MS)
		assert_int_equal(dg->sends_held, taken);
	unsigned told = 0;
	const uint64_t guard = clock_ns() + PATIENCE_NS;
	while (dg->sends_used > 0 && clock_ns() < guard) {
		struct dq_dgram_event ev, drop;
		const int n = e.p->dgram_poll(e.a, &ev, 1), m = e.p->dgram_poll(e.b, &drop, 1);
		if (n == 1 && ev.kind == DQ_DGRAM_SEND_ERROR) {
			assert_in_range(ev.id, 100, 100 + N - 1);
			assert_true(ev.error < 0);
			told++;
		} else if (n == 0 && m == 0) {
			ends_sleep(&e);
		}
	}
	assert_int_equal(dg->sends_used, 0);
	assert_true(told <= taken);
	there_and_back(&e, 30);
	ends_close(&e);
}

/* More than may be under way: refused for now, and nothing is lost of what was taken. */
static void sends_under_way_are_bounded(void **state)
{
	(void)state;
	enum { MANY = 2 * DQ_VERBS_DGRAM_SENDS };
	struct ends e;
	unsigned taken = 0, left = 0;
	ends_open(&e);
	there_and_back(&e, 1);
	for (unsigned i = 0; i < MANY; i++) { /* without a poll between */
		const int rc = e.p->dgram_send(e.a, &e.at_b, 0, NULL, 1000 + i, "x", 1);
		if (rc) {
			assert_int_equal(rc, -EAGAIN);
			break;
		}
		taken++;
	}
	assert_in_range(taken, 1, MANY - 1);
	while (left < taken)
		assert_int_equal(event_wait(&e, e.a, DQ_DGRAM_SENT).id, 1000 + left++);
	there_and_back(&e, 2);
	ends_close(&e);
}

/* Some device errors stop a queue pair: it is made to work again, the endpoint stays what it was. */
static void a_failed_queue_pair_works_again(void **state)
{
	(void)state;
	struct ends e;
	ends_open(&e);
	for (uint64_t round = 1; round <= 5; round++) {
		struct dq_verbs_dgram *dg = dq_verbs_dgram_of(round % 2 ? e.a : e.b);
		struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
		struct dq_endpoint at_a, at_b;
		const uint64_t guard = clock_ns() + PATIENCE_NS;
		there_and_back(&e, round);
		assert_int_equal(dg->lib->modify_qp(dg->qp, &attr, IBV_QP_STATE), 0);
		const uint32_t life = dg->life;
		while (dg->broken || dg->life == life) { /* its receives complete with errors, or the next send does */
			struct dq_dgram_event ev;
			assert_true(clock_ns() < guard);
			if (dg == dq_verbs_dgram_of(e.a) && dg->life == life)
				e.p->dgram_send(e.a, &e.at_b, 0, NULL, 500, "x", 1);
			const int n = e.p->dgram_poll(e.a, &ev, 1), m = e.p->dgram_poll(e.b, &ev, 1);
			if (n == 0 && m == 0)
				ends_sleep(&e);
		}
		e.p->dgram_endpoint(e.a, &at_a);
		e.p->dgram_endpoint(e.b, &at_b);
		assert_memory_equal(&at_a, &e.at_a, sizeof at_a);
		assert_memory_equal(&at_b, &e.at_b, sizeof at_b);
		there_and_back(&e, 100 + round);
		assert_int_equal(dg->sends_used, 0);
	}
	ends_close(&e);
}

/* Not configured and configured again, for the first device: 0 when it was done. */
static int second_address(bool there)
{
	char path[160], netdev[32], text[160];
	snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/1/gid_attrs/ndevs/0", transport_address(0));
	FILE *f = fopen(path, "re");
	if (!f)
		return -1;
	const int found = fscanf(f, "%31s", netdev);
	fclose(f);
	snprintf(text, sizeof text, "ip addr %s 198.51.100.7/32 dev %s", there ? "add" : "del", netdev);
	return found == 1 ? system(text) : -1;
}

/* The engine's thread sees to the device's address table. */
static void wait_address(struct side *s)
{
	const uint64_t guard = clock_ns() + PATIENCE_NS;
	struct dq_device_event ev = {0};
	while (ev.change != DQ_DEVICE_ADDRESS) {
		assert_true(clock_ns() < guard);
		if (s->p->device_event(s->dev, &ev) == 0 && s->p->poll(s->dev, NULL, 0) == 0 && !s->p->arm(s->dev)) {
			struct pollfd pfd = {.fd = s->p->event_fd(s->dev), .events = POLLIN};
			poll(&pfd, 1, 10);
		}
	}
}

/* An endpoint keeps the address that it was opened with, and works as long as the device has that. */
static void addresses_come_and_go(void **state)
{
	(void)state;
	struct ends e;
	struct dq_error err = {0};
	struct dq_device_attr attr;
	struct dq_endpoint same, at_other;
	struct dq_dgram *other;
	struct dq_verbs_ud_peer peer;
	ends_open(&e);
	struct side *a = &e.pair.a;
	e.p->device_query(a->dev, &attr);
	there_and_back(&e, 1);
	if (dq_verbs_device_of(a->dev)->infiniband || second_address(true) != 0) {
		ends_close(&e);
		skip();
	}
	wait_address(a);
	assert_int_equal(e.p->device_readdress(a->dev, "198.51.100.7", &err), 0);
	assert_int_equal(e.p->dgram_open(a->dev, &other, &err), 0);
	e.p->dgram_endpoint(other, &at_other);
	assert_int_equal(dq_verbs_ud_endpoint_get(&at_other, &peer, NULL), 0);
	assert_int_equal(peer.gid[15], 7);
	dq_verbs_dgram_of(e.a)->port_ns = 0; /* it looks now */
	for (uint64_t id = 2; id < 10; id++)
		there_and_back(&e, id);
	e.p->dgram_endpoint(e.a, &same);
	assert_memory_equal(&same, &e.at_a, sizeof same);

	assert_int_equal(second_address(false), 0);
	wait_address(a);
	/* What cannot be sent any more is told, soon or in the end, and costs nobody else anything. */
	const int rc = e.p->dgram_send(other, &e.at_b, 0, NULL, 77, "x", 1);
	const uint64_t guard = clock_ns() + PATIENCE_NS;
	for (bool told = rc != 0; !told;) {
		struct dq_dgram_event ev;
		assert_true(clock_ns() < guard);
		if (e.p->dgram_poll(other, &ev, 1) == 1) {
			assert_int_equal(ev.id, 77);
			told = true;
		} else {
			struct pollfd pfd = {.fd = e.p->dgram_fd(other), .events = POLLIN};
			poll(&pfd, 1, 10);
		}
	}
	assert_int_equal(e.p->device_readdress(a->dev, attr.address, &err), 0);
	there_and_back(&e, 11);
	e.p->dgram_close(other);
	ends_close(&e);
}

/* Whatever anybody on the network may send to the queue pair, who knows its number: what is right still comes through. */
static void strangers_do_no_harm(void **state)
{
	(void)state;
	enum { ROUNDS = 200, BYTES = 2048 };
	static const uint32_t lengths[] = {0, 1, 127, 128, 129, 200, 1000, BYTES};
	struct ends e;
	uint64_t seed = 99;
	ends_open(&e);
	struct dq_verbs_device *dev = dq_verbs_device_of(e.pair.b.dev);
	const struct dq_verbs_lib *lib = dev->lib;
	struct ibv_cq *cq = lib->create_cq(dev->ctx, 64, NULL, NULL, 0);
	uint8_t *bytes = calloc(1, BYTES);
	assert_true(cq && bytes);
	struct ibv_mr *mr = lib->reg_mr(dev->pd, bytes, BYTES, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_qp_init_attr want = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UD, .sq_sig_all = 1,
					.cap = {.max_send_wr = 16, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
	struct ibv_qp *qp = lib->create_qp(dev->pd, &want);
	assert_true(mr && qp);
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = (uint8_t)dev->cfg.port, .qkey = 0x1234};
	assert_int_equal(lib->modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), 0);
	attr.qp_state = IBV_QPS_RTR;
	assert_int_equal(lib->modify_qp(qp, &attr, IBV_QP_STATE), 0);
	attr.qp_state = IBV_QPS_RTS;
	assert_int_equal(lib->modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), 0);
	struct ibv_ah *ah;
	struct dq_verbs_ud_peer peer;
	assert_int_equal(dq_verbs_ud_endpoint_get(&e.at_a, &peer, NULL), 0);
	assert_int_equal(dq_verbs_dgram_ah_make(dq_verbs_dgram_of(e.b), &peer, 0, &ah), 0);

	for (unsigned i = 0; i < ROUNDS; i++) {
		for (unsigned k = 0; k < BYTES; k++)
			bytes[k] = (uint8_t)prng_next(&seed);
		const uint32_t len = lengths[prng_next(&seed) % (sizeof lengths / sizeof lengths[0])];
		struct ibv_sge sge = {.addr = (uintptr_t)bytes, .length = len, .lkey = mr->lkey};
		struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = i % 3 ? IBV_WR_SEND : IBV_WR_SEND_WITH_IMM,
					 .send_flags = IBV_SEND_SIGNALED,
					 .wr.ud = {.ah = ah, .remote_qpn = peer.qpn, .remote_qkey = i % 7 ? DQ_VERBS_UD_QKEY : 0x4321}}, *bad;
		struct ibv_wc wc;
		struct dq_dgram_event ev;
		assert_int_equal(ibv_post_send(qp, &wr, &bad), 0);
		const uint64_t guard = clock_ns() + PATIENCE_NS;
		while (ibv_poll_cq(cq, 1, &wc) == 0) {
			assert_true(clock_ns() < guard);
			poll(NULL, 0, 1);
		}
		while (e.p->dgram_poll(e.a, &ev, 1) > 0)
			if (ev.kind == DQ_DGRAM_RECEIVED) {
				assert_true(ev.len <= sizeof ev.data);
				assert_memory_not_equal(ev.from.data, e.at_b.data, ev.from.len);
			}
		if (i % 20 == 0)
			there_and_back(&e, i);
	}
	lib->destroy_ah(ah);
	lib->destroy_qp(qp);
	lib->dereg_mr(mr);
	lib->destroy_cq(cq);
	free(bytes);
	ends_close(&e);
}

/* One who polls and sleeps as a prober does gets the wake-up measured, and sees nothing of it; then there is rest. */
static void the_wake_up_is_measured_on_the_way(void **state)
{
	(void)state;
	struct ends e;
	struct dq_dgram_event ev;
	ends_open(&e);
	struct dq_verbs_dgram *dg = dq_verbs_dgram_of(e.a);
	const uint64_t guard = clock_ns() + PATIENCE_NS;
	if (dg->stamped) {
		ends_close(&e);
		skip();
	}
	while (dg->wake.series == 0) {
		assert_true(clock_ns() < guard);
		if (e.p->dgram_poll(e.a, &ev, 1) == 0)
			ends_sleep(&e);
	}
	assert_in_range(e.p->dgram_correction_ns(e.a), 0, DQ_VERBS_WAKE_MAX_NS);
	if (dg->own_ah && dq_verbs_device_of(e.pair.a.dev)->software)
		assert_true(e.p->dgram_correction_ns(e.a) > 0);
	for (unsigned i = 0; i < 10; i++)
		assert_int_equal(e.p->dgram_poll(e.a, &ev, 1), 0);
	assert_int_equal(dg->sends_used, 0);
	assert_true(e.p->dgram_next_deadline(e.a) == DQ_NEVER);
	assert_string_equal(e.p->dgram_time_source(e.a), "software");
	ends_close(&e);
}

/* A datagram that looks like one to oneself, from another, is what it is: a datagram from another. */
static void nobody_can_meddle_with_the_measurement(void **state)
{
	(void)state;
	struct ends e;
	ends_open(&e);
	const struct dq_verbs_dgram *dg = dq_verbs_dgram_of_const(e.a);
	uint64_t forged[2] = {dg->own_cookie, dg->own_number};
	assert_int_equal(e.p->dgram_send(e.b, &e.at_a, 0, NULL, 1, forged, sizeof forged), 0);
	struct dq_dgram_event ev = event_wait(&e, e.a, DQ_DGRAM_RECEIVED);
	assert_int_equal(ev.len, sizeof forged);
	assert_memory_equal(ev.from.data, e.at_b.data, ev.from.len);
	ends_close(&e);
}

/* Closed while work is under way, again and again: everything is taken down in the order that libibverbs wants. */
static void it_closes_whatever_is_under_way(void **state)
{
	(void)state;
	for (unsigned i = 0; i < 30; i++) {
		struct ends e;
		struct dq_dgram_event ev;
		ends_open(&e);
		for (unsigned k = 0; k < i; k++)
			e.p->dgram_send(e.a, k % 2 ? &e.at_b : &e.at_a, k, NULL, k, "x", 1);
		for (unsigned k = 0; k < i % 4; k++)
			e.p->dgram_poll(i % 3 ? e.a : e.b, &ev, 1);
		ends_close(&e);
	}
}

int main(void)
{
	if (!transport_is("verbs")) {
		fprintf(stderr, "skipped: provider \"%s\"; this is about \"verbs\" (DQ_TEST_PROVIDER)\n", transport_provider());
		return TRANSPORT_SKIPPED;
	}
	const int unfit = transport_env_check();
	if (unfit)
		return unfit;
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_does_not_fit_is_refused),
		cmocka_unit_test(extended_completion_queues_tell_the_same),
		cmocka_unit_test(handles_are_made_once_a_label),
		cmocka_unit_test(an_unreachable_peer_costs_only_itself),
		cmocka_unit_test(sends_under_way_are_bounded),
		cmocka_unit_test(a_failed_queue_pair_works_again),
		cmocka_unit_test(addresses_come_and_go),
		cmocka_unit_test(strangers_do_no_harm),
		cmocka_unit_test(the_wake_up_is_measured_on_the_way),
		cmocka_unit_test(nobody_can_meddle_with_the_measurement),
		cmocka_unit_test(it_closes_whatever_is_under_way),
	};
	return cmocka_run_group_tests_name("verbs datagrams", tests, NULL, NULL);
}
