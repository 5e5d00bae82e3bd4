/* SPDX-License-Identifier: Apache-2.0 */
#include "engine_pair.h"

#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "transport_env.h"

const struct dq_profile test_profile = { .rtt_ns = 100000, .rate_bps = 10000000000ull, .window_bytes = 4u << 20, .floor_bytes = 128u << 10,
					 .noise_ns = 20000000, .segment_bytes = 64u << 10, .qps = 4, .outstanding_per_qp = 16,
					 .adapt = 1, .grants = 1, .retries = 7 };

static double now_s(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

void host_start(struct host *h, int end, const char *name, uint64_t deadline_ns)
{
	static uint64_t epoch = 0x1000;
	struct dq_engine_config cfg = { .epoch = ++epoch, .spin_us = 0, .cpu = -1, .api_family = 4, .api_port = 7471 };
	struct dq_engine_device_config dev = { .name = "dev0", .rate_bps = 10000000000ull, .deadline_ns = deadline_ns, .numa_node = -1 };
	struct dq_text err = { 0 };
	memset(h, 0, sizeof *h);
	snprintf(dev.provider, sizeof dev.provider, "%s", transport_provider());
	snprintf(dev.address, sizeof dev.address, "%s", transport_address(end));
	snprintf(h->host_id, sizeof h->host_id, "%s", name);
	memcpy(cfg.host_id, h->host_id, sizeof cfg.host_id);
	h->epoch = cfg.epoch;
	for (int i = 0; i < 4; i++)
		h->path[i] = DQ_NONE;
	if (dq_engine_create(&cfg, &h->engine, &err) || dq_engine_device_add(h->engine, &dev, &h->device, &err))
		fail_msg("%s", err.text);
}

void host_stop(struct host *h)
{
	dq_engine_destroy(h->engine);
	h->engine = NULL;
}

void host_path(struct host *from, struct host *to, unsigned slot, const struct dq_profile *profile)
{
	struct dq_text err = { 0 };
	if (dq_engine_path_add(from->engine, from->device, to->host_id, to->epoch, NULL, profile, &from->path[slot], &err))
		fail_msg("%s", err.text);
}

void host_events(struct host *h)
{
	struct dq_engine_event ev[32];
	int n;
	while ((n = dq_engine_events(h->engine, ev, 32)) > 0) {
		for (int i = 0; i < n; i++) {
			if (ev[i].type == DQ_EV_VC_DOWN) {
				memcpy(h->down_text, ev[i].text, sizeof h->down_text);
				h->downs++;
			} else if (ev[i].type == DQ_EV_CLIENT_GONE) {
				h->gone++;
			} else if (ev[i].type == DQ_EV_CLIENT_CUT) {
				memcpy(h->cut_text, ev[i].text, sizeof h->cut_text);
				h->cut++;
			}
		}
	}
}

bool host_wait(struct host *h, const uint32_t *counter, uint32_t value, int timeout_s)
{
	double end = now_s() + timeout_s;
	for (;;) {
		struct pollfd p = { .fd = dq_engine_event_fd(h->engine), .events = POLLIN };
		host_events(h);
		if (*counter >= value)
			return true;
		if (now_s() > end)
			return false;
		poll(&p, 1, 100);
	}
}

void host_connect(struct host *a, unsigned a_slot, struct host *b, unsigned b_slot)
{
	struct dq_vc_limits limits = { .qps = 4, .depth = 32, .credits = 16, .segment_bytes = 1u << 20 };
	struct dq_endpoint_blob ea[5], eb[5];
	struct dq_text err = { 0 };
	struct dq_path_stats s;
	uint32_t va, vb;
	double end = now_s() + 20;
	memset(ea, 0, sizeof ea);
	memset(eb, 0, sizeof eb);
	if (dq_engine_vc_prepare(a->engine, a->path[a_slot], &limits, &va, ea, &err) ||
	    dq_engine_vc_prepare(b->engine, b->path[b_slot], &limits, &vb, eb, &err) ||
	    dq_engine_vc_connect(b->engine, vb, &limits, ea, 0, &err) || dq_engine_vc_connect(a->engine, va, &limits, eb, 1, &err))
		fail_msg("%s", err.text);
	/* Up at both ends: each then has told the other its grant. */
	do {
		assert_true(now_s() < end);
		assert_int_equal(dq_engine_path_stats(a->engine, a->path[a_slot], &s), 0);
		if (s.control_rx_packets == 0)
			continue;
		assert_int_equal(dq_engine_path_stats(b->engine, b->path[b_slot], &s), 0);
	} while (s.control_rx_packets == 0);
}

/* --- clients --- */

void client_attach(struct client *c, struct host *h, const char *name, uint32_t entries, uint64_t max_memory, uint32_t max_flows)
{
	struct dq_text err = { 0 };
	memset(c, 0, sizeof *c);
	c->host = h;
	if (dq_engine_client_add(h->engine, name, entries, max_memory, max_flows, &c->id, &c->memfd, &c->eventfd, &c->bytes, &err))
		fail_msg("%s", err.text);
	c->map = mmap(NULL, c->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, c->memfd, 0);
	assert_true(c->map != MAP_FAILED);
	c->control = (struct dq_control *)(void *)c->map;
	dq_ring_init(&c->sq, (struct dq_ring_shared *)(void *)(c->map + DQ_SQ_OFFSET), c->map + DQ_SQ_OFFSET + sizeof(struct dq_ring_shared), entries);
	dq_ring_init(&c->cq, (struct dq_ring_shared *)(void *)(c->map + dq_layout_cq_offset(entries)),
		     c->map + dq_layout_cq_offset(entries) + sizeof(struct dq_ring_shared), entries);
}

void client_detach(struct client *c)
{
	dq_engine_client_remove(c->host->engine, c->id);
	munmap(c->map, c->bytes);
	close(c->memfd);
	close(c->eventfd);
}

void client_wake_engine(struct client *c)
{
	uint64_t one = 1;
	dq_ring_fence();
	if (atomic_load(&c->control->engine_asleep) && write(c->eventfd, &one, sizeof one) < 0)
		assert_int_equal(errno, EAGAIN);
}

uint64_t client_submit(struct client *c, struct dq_submission s)
{
	s.request = ++c->next_request;
	assert_true(dq_ring_space(&c->sq, 1) >= 1);
	dq_ring_write(&c->sq, 0, &s);
	dq_ring_produce(&c->sq, 1);
	client_wake_engine(c);
	return s.request;
}

uint64_t client_connect(struct client *c, const struct dq_handle *h)
{
	struct dq_submission s = { .op = DQ_OP_CONNECT, .mem = c->host->device, .request = ++c->next_request };
	assert_true(dq_ring_space(&c->sq, 3) >= 3);
	dq_ring_write(&c->sq, 0, &s);
	dq_ring_write(&c->sq, 1, h);
	dq_ring_write(&c->sq, 2, (const uint8_t *)h + 64);
	dq_ring_produce(&c->sq, 3);
	client_wake_engine(c);
	return s.request;
}

bool client_next(struct client *c, struct dq_completion *out, int timeout_s)
{
	double end = now_s() + timeout_s;
	while (dq_ring_avail(&c->cq) <= 0) {
		struct timespec ts = { 0, 100000 };
		if (now_s() > end)
			return false;
		nanosleep(&ts, NULL); /* between looks at the ring; the condition above decides */
	}
	dq_ring_read(&c->cq, 0, out);
	dq_ring_consume(&c->cq, 1);
	return true;
}

struct dq_completion client_expect(struct client *c, uint64_t request)
{
	struct dq_completion cq = { 0 };
	if (!client_next(c, &cq, 20))
		fail_msg("no completion of request %llu", (unsigned long long)request);
	assert_int_equal(cq.request, request);
	return cq;
}

void client_memory(struct client *c, uint64_t bytes, struct memory *m)
{
	struct dq_text err = { 0 };
	int fd;
	if (dq_engine_mem_alloc(c->host->engine, c->id, bytes, 0, &m->id, &fd, &m->bytes, &err))
		fail_msg("%s", err.text);
	m->addr = mmap(NULL, m->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	assert_true(m->addr != MAP_FAILED);
	close(fd);
}

struct dq_handle client_listen(struct client *c, uint32_t listener)
{
	struct dq_handle h;
	uint64_t r;
	assert_int_equal(dq_engine_client_handle(c->host->engine, c->id, (uint8_t *)&h), 0);
	h.listener = listener;
	memset(h.nonce, 0x5a, sizeof h.nonce);
	r = client_submit(c, (struct dq_submission){ .op = DQ_OP_LISTEN, .flow = listener, .mem = c->host->device, .tag = 0x5a5a5a5a5a5a5a5aull,
						     .remote_offset = 0x5a5a5a5a5a5a5a5aull });
	assert_int_equal(client_expect(c, r).status, DQ_OK);
	return h;
}

void client_flow(struct client *a, struct client *b, uint32_t listener, uint32_t *flow_a, uint32_t *flow_b)
{
	struct dq_handle h = client_listen(b, listener);
	uint64_t accept = client_submit(b, (struct dq_submission){ .op = DQ_OP_ACCEPT, .flow = listener });
	uint64_t connect = client_connect(a, &h);
	struct dq_completion ca = client_expect(a, connect), cb = client_expect(b, accept);
	assert_int_equal(ca.status, DQ_OK);
	assert_int_equal(cb.status, DQ_OK);
	*flow_a = ca.flow;
	*flow_b = cb.flow;
}
