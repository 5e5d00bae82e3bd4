/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Data through the net plugin as NCCL moves it: sizes, tags, groups, back-pressure, the flags of the protocols LL and LL128, and
 * the patterns of collectives with a thread a rank. For every version; over the provider that the environment names.
 */
#include "nccl_harness.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <dqplb.h>

#include "nccl_hosts.h"
#include "transport_env.h"

#define STEPS 8 /* that NCCL keeps under way on a comm */

static void *bytes_alloc(size_t bytes)
{
	void *p = aligned_alloc(128, (bytes + 255) & ~(size_t)127);

	assert_non_null(p);
	return p;
}

/* --- messages ----------------------------------------------------------------------------------------------------- */

static void messages_of_all_sizes(void **state)
{
	static const size_t sizes[] = {0, 1, 7, 8, 64, 127, 128, 129, 4096, 65535, 65536, 65537, 131072, 524288, 1000003, 5u << 20};
	const size_t most = 5u << 20;
	struct job *job = *state;
	struct job_pair p;
	uint8_t *out = bytes_alloc(most), *in = bytes_alloc(most + 1);
	void *mo, *mi;

	job_connect(&job->ranks[0], &job->ranks[1], &p);
	mo = job_reg(p.from, p.send, out, most);
	mi = job_reg(p.to, p.recv, in, most + 1);
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		void *recv, *send;
		int bytes = -1;

		job_fill(out, sizes[i], (uint32_t)i);
		memset(in, 0xee, sizes[i] + 1);
		/* As NCCL does, with what there is room for, not with what comes. */
		recv = job_irecv(&p, in, most, 0, mi);
		send = job_isend(&p, out, sizes[i], 0, mo);
		job_wait(p.to, recv, &bytes);
		assert_int_equal(bytes, sizes[i]);
		job_check(in, sizes[i], (uint32_t)i);
		assert_int_equal(in[sizes[i]], 0xee);
		bytes = -1;
		job_wait(p.from, send, &bytes);
		assert_int_equal(bytes, sizes[i]);
	}
	/* The send first; the receive from the middle of what is registered. */
	job_fill(out + 4001, 70000, 99);
	memset(in, 0xee, 80000);
	void *send = job_isend(&p, out + 4001, 70000, 0, mo);
	void *recv = job_irecv(&p, in + 333, 70000, 0, mi);
	job_wait(p.from, send, NULL);
	job_wait(p.to, recv, NULL);
	job_check(in + 333, 70000, 99);
	assert_int_equal(in[332], 0xee);
	assert_int_equal(in[70333], 0xee);
	job_ok(net_dereg(p.from, p.send, mo));
	job_ok(net_dereg(p.to, p.recv, mi));
	job_close(&p);
	free(out);
	free(in);
}

/* NCCL's rank is the tag, the same for all messages of a comm: order alone tells them apart. */
static void messages_of_a_comm_keep_their_order(void **state)
{
	enum { COUNT = 200, MOST = 200000 };
	struct job *job = *state;
	struct job_pair p;
	uint8_t *out = bytes_alloc(STEPS * MOST), *in = bytes_alloc(STEPS * MOST);
	void *mo, *mi, *sends[STEPS] = {NULL}, *recvs[STEPS] = {NULL};
	size_t sizes[STEPS] = {0};
	unsigned sent = 0, posted = 0, done_sends = 0, done_recvs = 0;
	const double end = job_now_s() + JOB_PATIENCE_S;

	job_connect(&job->ranks[0], &job->ranks[1], &p);
	mo = job_reg(p.from, p.send, out, STEPS * MOST);
	mi = job_reg(p.to, p.recv, in, STEPS * MOST);
	while (done_sends < COUNT || done_recvs < COUNT) {
		int done = 0, bytes = -1;

		if (posted < COUNT && posted < done_recvs + STEPS) {
			void *at = in + posted % STEPS * MOST;
			size_t room = MOST;
			int tag = 3;

			memset(at, 0, MOST);
			job_ok(net_irecv(p.to, p.recv, 1, &at, &room, &tag, &mi, &recvs[posted % STEPS]));
			posted += recvs[posted % STEPS] != NULL;
		}
		if (sent < COUNT && sent < done_sends + STEPS) {
			uint8_t *at = out + sent % STEPS * MOST;

			sizes[sent % STEPS] = (sent * 7919u + 1) % MOST;
			job_fill(at, sizes[sent % STEPS], sent);
			job_ok(net_isend(p.from, p.send, at, sizes[sent % STEPS], 3, mo, &sends[sent % STEPS]));
			sent += sends[sent % STEPS] != NULL;
		}
		if (done_recvs < posted) {
			job_ok(net_test(p.to, recvs[done_recvs % STEPS], &done, &bytes));
			if (done) {
				assert_int_equal(bytes, (done_recvs * 7919u + 1) % MOST);
				job_check(in + done_recvs % STEPS * MOST, (size_t)bytes, done_recvs);
				recvs[done_recvs++ % STEPS] = NULL;
			}
		}
		if (done_sends < sent) {
			job_ok(net_test(p.from, sends[done_sends % STEPS], &done, &bytes));
			if (done) {
				assert_int_equal(bytes, (done_sends * 7919u + 1) % MOST);
				sends[done_sends++ % STEPS] = NULL;
			}
		}
		if (job_now_s() > end)
			job_fail("%u of %u messages arrived; warnings: %s", done_recvs, COUNT, net_log_text());
	}
	job_ok(net_dereg(p.from, p.send, mo));
	job_ok(net_dereg(p.to, p.recv, mi));
	job_close(&p);
	free(out);
	free(in);
}

static void a_send_longer_than_its_receive_fails(void **state)
{
	struct job *job = *state;
	struct job_pair p;
	char out[2000], in[2000];
	void *mo, *mi, *recv, *send;

	job_connect(&job->ranks[0], &job->ranks[1], &p);
	mo = job_reg(p.from, p.send, out, sizeof out);
	mi = job_reg(p.to, p.recv, in, sizeof in);
	memset(out, 7, sizeof out);
	memset(in, 1, sizeof in);
	net_log_clear();
	recv = job_irecv(&p, in, 1000, 0, mi);
	send = job_isend(&p, out, 1001, 0, mo);
	assert_int_not_equal(job_outcome(p.to, recv), DQ_NCCL_SUCCESS);
	assert_int_not_equal(job_outcome(p.from, send), DQ_NCCL_SUCCESS);
	for (size_t i = 1000; i < sizeof in; i++)
		assert_int_equal(in[i], 1);
	if (!net_log_has("1001"))
		job_fail("the warning does not tell the length: %s", net_log_text());
	job_ok(net_dereg(p.from, p.send, mo));
	job_ok(net_dereg(p.to, p.recv, mi));
	job_close(&p);
}

/* NCCL ends a receiving comm when it has all it wanted; the other end's last send has arrived then, and must say so. */
static void a_receiver_that_has_all_may_close(void **state)
{
	struct job *job = *state;
	char out[1000], in[1000];

	job_fill(out, sizeof out, 1);
	for (int i = 0; i < 50; i++) {
		struct job_pair p;
		void *mo, *mi, *recv, *send;

		job_connect(&job->ranks[0], &job->ranks[1], &p);
		mo = job_reg(p.from, p.send, out, sizeof out);
		mi = job_reg(p.to, p.recv, in, sizeof in);
		recv = job_irecv(&p, in, sizeof in, 0, mi);
		send = job_isend(&p, out, i % 2 ? sizeof out : 0, 0, mo);
		job_wait(p.to, recv, NULL);
		job_ok(net_dereg(p.to, p.recv, mi));
		job_ok(net_close_recv(p.to, p.recv));
		p.recv = NULL;
		job_wait(p.from, send, NULL);
		job_ok(net_dereg(p.from, p.send, mo));
		job_close(&p);
	}
}

/* One request for several receives; tags say which send goes where, in whatever order they are sent. */
static void receives_are_grouped(void **state)
{
	enum { SIZE = 150000 };
	struct job *job = *state;
	struct job_pair p;
	struct net_properties properties;
	uint8_t *out = bytes_alloc(DQ_NCCL_RECVS_MAX * SIZE), *in = bytes_alloc(DQ_NCCL_RECVS_MAX * SIZE);
	void *mo, *mi;

	job_ok(net_get_properties(&job->ranks[1], 0, &properties));
	job_connect(&job->ranks[0], &job->ranks[1], &p);
	mo = job_reg(p.from, p.send, out, DQ_NCCL_RECVS_MAX * SIZE);
	mi = job_reg(p.to, p.recv, in, DQ_NCCL_RECVS_MAX * SIZE);
	for (int n = 1; n <= properties.max_recvs; n++) {
		void *data[DQ_NCCL_RECVS_MAX], *mhandles[DQ_NCCL_RECVS_MAX], *sends[2 * DQ_NCCL_RECVS_MAX], *groups[2];
		size_t room[DQ_NCCL_RECVS_MAX];
		int tags[DQ_NCCL_RECVS_MAX], bytes[DQ_NCCL_RECVS_MAX];

		job_fill(out, DQ_NCCL_RECVS_MAX * SIZE, (uint32_t)n);
		memset(in, 0, DQ_NCCL_RECVS_MAX * SIZE);
		/* Two groups one after the other with the same tags: the first group takes the first sends. */
		for (int g = 0; g < 2; g++) {
			for (int i = 0; i < n; i++) {
				data[i] = in + i * SIZE + g * (SIZE / 2);
				room[i] = SIZE / 2;
				tags[i] = 1000 + i * 3;
				mhandles[i] = mi;
			}
			groups[g] = NULL;
			while (!groups[g])
				job_ok(net_irecv(p.to, p.recv, n, data, room, tags, mhandles, &groups[g]));
		}
		for (int g = 0; g < 2; g++)
			for (int k = 0; k < n; k++) {
				const int i = g == 0 ? n - 1 - k : (k + n / 2) % n; /* another order in each group */

				sends[g * n + k] = job_isend(&p, out + i * SIZE + g * (SIZE / 2), (size_t)(SIZE / 2 - i * 11 - g), 1000 + i * 3, mo);
			}
		for (int g = 0; g < 2; g++) {
			job_wait(p.to, groups[g], bytes);
			for (int i = 0; i < n; i++) {
				assert_int_equal(bytes[i], SIZE / 2 - i * 11 - g);
				assert_memory_equal(in + i * SIZE + g * (SIZE / 2), out + i * SIZE + g * (SIZE / 2), (size_t)bytes[i]);
			}
		}
		for (int i = 0; i < 2 * n; i++)
			job_wait(p.from, sends[i], NULL);
	}
	job_ok(net_dereg(p.from, p.send, mo));
	job_ok(net_dereg(p.to, p.recv, mi));
	job_close(&p);
	free(out);
	free(in);
}

/* Ranks that share a comm go at their own pace. Those that are far ahead may not take the place of the one that everybody waits for. */
static void who_is_ahead_keeps_nobody_back(void **state)
{
	enum { RANKS = DQ_NCCL_RECVS_MAX, SIZE = 64 };
	struct job *job = *state;
	struct job_pair p;
	uint8_t *out, *in;
	void *sends[RANKS][DQ_NCCL_REQUESTS_MAX], *mo, *mi;

	if (job->version < 9)
		return; /* no groups, so nobody shares */
	out = bytes_alloc(SIZE);
	in = bytes_alloc(RANKS * SIZE);
	job_connect(&job->ranks[0], &job->ranks[1], &p);
	mo = job_reg(p.from, p.send, out, SIZE);
	mi = job_reg(p.to, p.recv, in, RANKS * SIZE);
	job_fill(out, SIZE, 5);
	/* The last rank has not begun. */
	for (int rank = 0; rank < RANKS - 1; rank++) {
		for (int i = 0; i < DQ_NCCL_REQUESTS_MAX; i++) {
			sends[rank][i] = NULL;
			job_ok(net_isend(p.from, p.send, out, SIZE, rank, mo, &sends[rank][i]));
			assert_non_null(sends[rank][i]);
		}
	}
	for (int i = 0; i < DQ_NCCL_REQUESTS_MAX; i++) {
		void *data[RANKS], *mrs[RANKS], *request = NULL;
		size_t sizes[RANKS];
		int tags[RANKS], got[RANKS], done = 0;

		for (int rank = 0; rank < RANKS; rank++) {
			data[rank] = in + rank * SIZE;
			mrs[rank] = mi;
			sizes[rank] = SIZE;
			tags[rank] = rank;
		}
		job_ok(net_irecv(p.to, p.recv, RANKS, data, sizes, tags, mrs, &request));
		assert_non_null(request);
		job_ok(net_test(p.to, request, &done, got));
		assert_int_equal(done, 0);
		sends[RANKS - 1][i] = job_isend(&p, out, SIZE, RANKS - 1, mo);
		job_wait(p.to, request, got);
		for (int rank = 0; rank < RANKS; rank++) {
			assert_int_equal(got[rank], SIZE);
			job_check(in + rank * SIZE, SIZE, 5);
			job_wait(p.from, sends[rank][i], NULL);
		}
		memset(in, 0, RANKS * SIZE);
	}
	job_ok(net_dereg(p.from, p.send, mo));
	job_ok(net_dereg(p.to, p.recv, mi));
	job_close(&p);
	free(out);
	free(in);
}

/* A request that is not there is how the plugin says "later"; it says so at last when nothing is taken off. */
static void no_request_is_back_pressure(void **state)
{
	enum { TRIES = 2000, SIZE = 1000 };
	struct job *job = *state;
	struct job_pair p;
	uint8_t *out = bytes_alloc(DQ_NCCL_REQUESTS_MAX * SIZE), *in = bytes_alloc(DQ_NCCL_REQUESTS_MAX * SIZE);
	void *mo, *mi, *sends[TRIES], *recvs[TRIES];
	int sent = 0, posted = 0;

	job_connect(&job->ranks[0], &job->ranks[1], &p);
	mo = job_reg(p.from, p.send, out, DQ_NCCL_REQUESTS_MAX * SIZE);
	mi = job_reg(p.to, p.recv, in, DQ_NCCL_REQUESTS_MAX * SIZE);
	job_fill(out, DQ_NCCL_REQUESTS_MAX * SIZE, 1);
	/* No receive is posted: sends are kept, or put off, but not without end. */
	for (; sent < TRIES; sent++) {
		sends[sent] = (void *)1;
		job_ok(net_isend(p.from, p.send, out + sent % DQ_NCCL_REQUESTS_MAX * SIZE, SIZE, 0, mo, &sends[sent]));
		if (!sends[sent])
			break;
	}
	assert_in_range(sent, 0, DQ_NCCL_REQUESTS_MAX * DQ_NCCL_RECVS_MAX);
	for (; posted < TRIES; posted++) {
		void *at = in + posted % DQ_NCCL_REQUESTS_MAX * SIZE;
		size_t room = SIZE;
		int tag = 0;

		recvs[posted] = DQ_NCCL_OPTIONAL_RECV_COMPLETION;
		job_ok(net_irecv(p.to, p.recv, 1, &at, &room, &tag, &mi, &recvs[posted]));
		if (!recvs[posted])
			break;
	}
	assert_in_range(posted, STEPS, DQ_NCCL_REQUESTS_MAX);
	/* Everything taken ends, in order. */
	for (int i = 0; i < posted; i++) {
		if (i >= sent)
			sends[sent++] = job_isend(&p, out + i % DQ_NCCL_REQUESTS_MAX * SIZE, SIZE, 0, mo);
		job_wait(p.to, recvs[i], NULL);
		job_wait(p.from, sends[i], NULL);
		assert_memory_equal(in + i % DQ_NCCL_REQUESTS_MAX * SIZE, out + i % DQ_NCCL_REQUESTS_MAX * SIZE, SIZE);
	}
	for (int i = posted; i < sent; i++) {
		void *recv = job_irecv(&p, in, SIZE, 0, mi);

		job_wait(p.to, recv, NULL);
		job_wait(p.from, sends[i], NULL);
	}
	job_ok(net_dereg(p.from, p.send, mo));
	job_ok(net_dereg(p.to, p.recv, mi));
	job_close(&p);
	free(out);
	free(in);
}

/* Of host memory there is nothing to flush: no request, or one that ends. */
static void a_flush_ends(void **state)
{
	struct job *job = *state;
	struct job_pair p;
	char out[100], in[100];
	void *mo, *mi, *recv, *send, *data = in, *request = (void *)1;
	int bytes = sizeof in;

	job_connect(&job->ranks[0], &job->ranks[1], &p);
	mo = job_reg(p.from, p.send, out, sizeof out);
	mi = job_reg(p.to, p.recv, in, sizeof in);
	job_fill(out, sizeof out, 1);
	recv = job_irecv(&p, in, sizeof in, 0, mi);
	send = job_isend(&p, out, sizeof out, 0, mo);
	job_wait(p.to, recv, NULL);
	job_ok(net_iflush(p.to, p.recv, 1, &data, &bytes, &mi, &request));
	if (request)
		job_wait(p.to, request, NULL);
	job_check(in, sizeof in, 1);
	job_wait(p.from, send, NULL);
	job_ok(net_dereg(p.from, p.send, mo));
	job_ok(net_dereg(p.to, p.recv, mi));
	job_close(&p);
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* What a program allocates from the library, in a context of its own, the plugin finds, and the bytes go from there. */
static void memory_of_the_library_is_not_copied(void **state)
{
	enum { SIZE = 3 << 20 };
	struct job *job = *state;
	struct job_pair p;
	dqplb_context *ctx[2];
	dqplb_mem *mem[2];
	uint8_t *at[2];
	void *mo, *mi, *send, *recv;

	for (unsigned i = 0; i < 2; i++) {
		dqplb_options o = {.size = sizeof o, .socket = nccl_host_socket(i)};

		if (dqplb_open(&o, &ctx[i]) != DQPLB_OK || dqplb_mem_alloc(ctx[i], SIZE, &mem[i]) != DQPLB_OK)
			job_fail("%s", dqplb_last_error());
		at[i] = dqplb_mem_address(mem[i]);
	}
	job_connect(&job->ranks[0], &job->ranks[1], &p);
	mo = job_reg(p.from, p.send, at[0], SIZE);
	mi = job_reg(p.to, p.recv, at[1] + 4096, SIZE - 4096); /* a part of it */
	for (uint32_t i = 0; i < 10; i++) {
		int bytes;

		recv = job_irecv(&p, at[1] + 4096 + 128 * i, SIZE - 8192, 0, mi);
		job_fill(at[0] + 1000, 1000000 * (i % 3), i);
		send = job_isend(&p, at[0] + 1000, 1000000 * (i % 3), 0, mo);
		job_wait(p.to, recv, &bytes);
		job_wait(p.from, send, NULL);
		assert_int_equal(bytes, 1000000 * (i % 3));
		job_check(at[1] + 4096 + 128 * i, (size_t)bytes, i);
	}
	/* A copy would have been taken when the send was posted; and one of what came would want a call at this end. */
	memset(at[0], 1, 1000);
	memset(at[1] + 4096, 0, 1000);
	send = job_isend(&p, at[0], 1000, 0, mo);
	memset(at[0], 2, 1000);
	recv = job_irecv(&p, at[1] + 4096, 1000, 0, mi);
	job_wait(p.from, send, NULL);
	for (size_t i = 0; i < 1000; i++)
		assert_int_equal(at[1][4096 + i], 2);
	job_wait(p.to, recv, NULL);
	/* The program may free it first: the plugin has its own hold on the pages. What was registered is forgotten with it. */
	dqplb_mem_free(mem[0]);
	dqplb_close(ctx[1]);
	job_ok(net_dereg(p.from, p.send, mo));
	job_ok(net_dereg(p.to, p.recv, mi));
	dqplb_close(ctx[0]);
	job_close(&p);
}

static int start_with_little_memory(void **state)
{
	return job_start_with(state, 80u << 20); /* rings, and one chunk of staging memory */
}

/* Both ways on several comms, with more under way than staging memory holds: some wait, none for ever. */
static void little_memory_is_enough(void **state)
{
	enum { PAIRS = 6, SIZE = 3 << 20, COUNT = 12 };
	struct job *job = *state;
	struct lane {
		struct job_pair p;
		uint8_t *out, *in;
		void *mo, *mi, *sends[STEPS], *recvs[STEPS];
		unsigned sent, posted, done_sends, done_recvs;
	} *lanes = calloc(PAIRS, sizeof *lanes);
	const double end = job_now_s() + 2 * JOB_PATIENCE_S;
	unsigned left = PAIRS, put_off = 0;

	assert_non_null(lanes);
	for (unsigned i = 0; i < PAIRS; i++) {
		struct lane *l = &lanes[i];

		job_connect(&job->ranks[i % 2], &job->ranks[1 - i % 2], &l->p);
		l->out = bytes_alloc(SIZE);
		l->in = bytes_alloc(STEPS * SIZE);
		job_fill(l->out, SIZE, i);
		l->mo = job_reg(l->p.from, l->p.send, l->out, SIZE);
		l->mi = job_reg(l->p.to, l->p.recv, l->in, STEPS * SIZE);
	}
	for (unsigned pass = 0; left; pass++) {
		left = 0;
		for (unsigned i = 0; i < PAIRS; i++) {
			struct lane *l = &lanes[i];
			int done = 0, bytes = 0, tag = 0;

			if (l->posted < COUNT && l->posted < l->done_recvs + STEPS) {
				void *at = l->in + (size_t)(l->posted % STEPS) * SIZE, **r = &l->recvs[l->posted % STEPS];
				size_t room = SIZE;

				job_ok(net_irecv(l->p.to, l->p.recv, 1, &at, &room, &tag, &l->mi, r));
				l->posted += *r != NULL;
				put_off += !*r;
			}
			/* When as many receives wait as there can be. */
			if (pass > STEPS && l->sent < COUNT && l->sent < l->done_sends + STEPS) {
				void **r = &l->sends[l->sent % STEPS];

				job_ok(net_isend(l->p.from, l->p.send, l->out, SIZE - l->sent, tag, l->mo, r));
				l->sent += *r != NULL;
				put_off += !*r;
			}
			if (l->done_recvs < l->posted) {
				job_ok(net_test(l->p.to, l->recvs[l->done_recvs % STEPS], &done, &bytes));
				if (done) {
					assert_int_equal(bytes, SIZE - l->done_recvs);
					assert_memory_equal(l->in + (size_t)(l->done_recvs % STEPS) * SIZE, l->out, (size_t)bytes);
					l->done_recvs++;
				}
			}
			if (l->done_sends < l->sent) {
				job_ok(net_test(l->p.from, l->sends[l->done_sends % STEPS], &done, NULL));
				l->done_sends += done != 0;
			}
			left += l->done_sends < COUNT || l->done_recvs < COUNT;
		}
		if (left && job_now_s() > end)
			job_fail("%u of %u comms are stuck; warnings: %s", left, PAIRS, net_log_text());
	}
	assert_true(put_off > 0); /* else memory was not little */
	for (unsigned i = 0; i < PAIRS; i++) {
		struct lane *l = &lanes[i];

		job_ok(net_dereg(l->p.from, l->p.send, l->mo));
		job_ok(net_dereg(l->p.to, l->p.recv, l->mi));
		job_close(&l->p);
		free(l->out);
		free(l->in);
	}
	free(lanes);
}

/* Registered once, used by another comm, and by a comm of another communicator: the properties say that it may be. */
static void memory_of_one_comm_serves_others(void **state)
{
	enum { SIZE = 100000 };
	struct job *job = *state;
	struct net other = job->ranks[0];
	struct net_properties properties;
	struct job_pair first, second, third;
	uint8_t *out = bytes_alloc(SIZE), *in = bytes_alloc(SIZE);
	void *mo, *mi;

	job_ok(net_get_properties(&job->ranks[0], 0, &properties));
	assert_int_equal(properties.reg_is_global, 1);
	job_ok(net_init(&other, 4711));
	job_connect(&job->ranks[0], &job->ranks[1], &first);
	job_connect(&job->ranks[0], &job->ranks[1], &second);
	job_connect(&other, &job->ranks[1], &third);
	mo = job_reg(first.from, first.send, out, SIZE);
	mi = job_reg(first.to, first.recv, in, SIZE);
	for (uint32_t i = 0; i < 9; i++) {
		struct job_pair *p = i % 3 == 0 ? &first : i % 3 == 1 ? &second : &third;
		void *recv = job_irecv(p, in, SIZE, 0, mi), *send;

		job_fill(out, SIZE, i);
		send = job_isend(p, out, SIZE, 0, mo);
		job_wait(p->to, recv, NULL);
		job_wait(p->from, send, NULL);
		job_check(in, SIZE, i);
	}
	job_close(&first); /* before the memory that was registered with it */
	void *recv = job_irecv(&third, in, SIZE, 0, mi), *send = job_isend(&third, out, SIZE, 0, mo);
	job_wait(third.to, recv, NULL);
	job_wait(third.from, send, NULL);
	job_close(&third);
	job_ok(net_finalize(&other));
	job_ok(net_dereg(second.from, second.send, mo));
	job_ok(net_dereg(second.to, second.recv, mi));
	job_close(&second);
	free(out);
	free(in);
}

/* --- flags in the data -------------------------------------------------------------------------------------------- */

/*
 * The GPU polls the receive buffer and takes a line as soon as its flag has the step's number, before and whatever test() says.
 * Here a thread does so with the loads that a GPU makes, 8 bytes at a time. LL: each 8 bytes have 4 of data and the flag. LL128:
 * of 128 bytes the last 8 are the flag, and must be the last to be seen.
 */
struct poller {
	bool ll128;
	_Atomic uint64_t *slots[STEPS];
	size_t words;             /* of a slot */
	unsigned steps;
	_Atomic unsigned seen;    /* steps taken */
	_Atomic bool wrong, stop;
	char what[160];
};

static uint64_t line_word(const struct poller *q, unsigned step, size_t i)
{
	const uint64_t value = (uint64_t)step * 1000003u + i * 7u;

	if (q->ll128)
		return i % 16 == 15 ? step + 1 : value | 1ull << 63;
	return (uint64_t)(step + 1) << 32 | (uint32_t)value;
}

static bool await_flag(struct poller *q, _Atomic uint64_t *slot, unsigned step, size_t i)
{
	for (;;) {
		const uint64_t word = atomic_load_explicit(&slot[i], memory_order_acquire);

		if ((q->ll128 ? word : word >> 32) == step + 1)
			return true;
		if (atomic_load(&q->stop))
			return false;
		sched_yield();
	}
}

static void *poll_flags(void *arg)
{
	struct poller *q = arg;

	for (unsigned step = 0; step < q->steps; step++) {
		_Atomic uint64_t *slot = q->slots[step % STEPS];
		const size_t line = q->ll128 ? 16 : 1;

		for (size_t i = 0; i < q->words; i += line) {
			if (!await_flag(q, slot, step, i + line - 1))
				return NULL;
			for (size_t k = i; k < i + line; k++) {
				const uint64_t word = atomic_load_explicit(&slot[k], memory_order_relaxed);

				if (word != line_word(q, step, k) && !atomic_load(&q->wrong)) {
					snprintf(q->what, sizeof q->what, "step %u: word %zu is 0x%llx behind its flag, expected 0x%llx", step, k,
						 (unsigned long long)word, (unsigned long long)line_word(q, step, k));
					atomic_store(&q->wrong, true);
				}
			}
		}
		atomic_store(&q->seen, step + 1);
	}
	return NULL;
}

static void flags_follow_their_data(struct job *job, bool ll128, size_t bytes, unsigned steps)
{
	struct poller q = {.ll128 = ll128, .words = bytes / 8, .steps = steps};
	uint64_t *out = bytes_alloc(STEPS * bytes);
	uint8_t *in = bytes_alloc(STEPS * bytes);
	void *mo, *mi, *sends[STEPS] = {NULL}, *recvs[STEPS] = {NULL};
	unsigned sent = 0, posted = 0, done_sends = 0, done_recvs = 0;
	const double end = job_now_s() + JOB_PATIENCE_S;
	struct job_pair p;
	pthread_t thread;

	memset(in, 0, STEPS * bytes);
	for (int i = 0; i < STEPS; i++)
		q.slots[i] = (_Atomic uint64_t *)(void *)(in + (size_t)i * bytes);
	job_connect(&job->ranks[0], &job->ranks[1], &p);
	mo = job_reg(p.from, p.send, out, STEPS * bytes);
	mi = job_reg(p.to, p.recv, in, STEPS * bytes);
	assert_int_equal(pthread_create(&thread, NULL, poll_flags, &q), 0);
	while (done_sends < steps || done_recvs < steps || atomic_load(&q.seen) < steps) {
		int done = 0;

		/* A slot is given back when its step was taken and NCCL was told that the receive is done. */
		if (posted < steps && posted < done_recvs + STEPS && posted < atomic_load(&q.seen) + STEPS) {
			void *at = in + posted % STEPS * bytes;
			size_t room = bytes;
			int tag = 0;

			recvs[posted % STEPS] = DQ_NCCL_OPTIONAL_RECV_COMPLETION;
			job_ok(net_irecv(p.to, p.recv, 1, &at, &room, &tag, &mi, &recvs[posted % STEPS]));
			posted += recvs[posted % STEPS] != NULL;
		}
		if (sent < steps && sent < done_sends + STEPS) {
			uint64_t *at = out + sent % STEPS * q.words;

			for (size_t i = 0; i < q.words; i++)
				at[i] = line_word(&q, sent, i);
			job_ok(net_isend(p.from, p.send, at, bytes, 0, mo, &sends[sent % STEPS]));
			sent += sends[sent % STEPS] != NULL;
		}
		if (done_recvs < posted) {
			job_ok(net_test(p.to, recvs[done_recvs % STEPS], &done, NULL));
			done_recvs += done != 0;
		}
		done = 0;
		if (done_sends < sent) {
			job_ok(net_test(p.from, sends[done_sends % STEPS], &done, NULL));
			done_sends += done != 0;
		}
		if (atomic_load(&q.wrong) || job_now_s() > end) {
			atomic_store(&q.stop, true);
			pthread_join(thread, NULL);
			job_fail("%u sent, %u received, %u seen by the poller; %s; warnings: %s", done_sends, done_recvs, atomic_load(&q.seen),
				 q.what, net_log_text());
		}
	}
	pthread_join(thread, NULL);
	assert_false(atomic_load(&q.wrong));
	job_ok(net_dereg(p.from, p.send, mo));
	job_ok(net_dereg(p.to, p.recv, mi));
	job_close(&p);
	free(out);
	free(in);
}

static void flags_of_ll(void **state)
{
	flags_follow_their_data(*state, false, 32768, 100);
}

static void flags_of_ll_in_one_line(void **state)
{
	flags_follow_their_data(*state, false, 16, 100);
}

static void flags_of_ll128(void **state)
{
	flags_follow_their_data(*state, true, 128 * 2400, 40);
}

static void flags_of_ll128_in_one_line(void **state)
{
	flags_follow_their_data(*state, true, 128, 100);
}

/* --- collectives -------------------------------------------------------------------------------------------------- */

#define RANKS 4 /* two a host: 0 and 1, 2 and 3 */

struct rank {
	struct group *group;
	unsigned number;
	uint32_t *data, *scratch;
	pthread_t thread;
};

struct group {
	struct job *job;
	struct job_pair pairs[RANKS][RANKS]; /* [from][to] */
	void *out[RANKS][RANKS], *in[RANKS][RANKS];
	struct rank ranks[RANKS];
	size_t words;                        /* of a rank's data */
};

static struct net *net_of(struct group *g, unsigned rank)
{
	return &g->job->ranks[rank / (RANKS / 2)];
}

/* Progress of one send and one receive, as a proxy thread makes it. */
static void send_and_receive(struct rank *r, unsigned to, unsigned from, void *out, size_t out_bytes, void *in, size_t in_bytes)
{
	struct group *g = r->group;
	struct job_pair *sending = &g->pairs[r->number][to], *receiving = &g->pairs[from][r->number];
	void *send = NULL, *recv = NULL;
	bool sent = false, received = false;
	const double end = job_now_s() + JOB_PATIENCE_S;
	int tag = 0;

	while (!sent || !received) {
		int done = 0;

		if (!received && !recv)
			job_ok(net_irecv(receiving->to, receiving->recv, 1, &in, &in_bytes, &tag, &g->in[from][r->number], &recv));
		if (!sent && !send)
			job_ok(net_isend(sending->from, sending->send, out, out_bytes, tag, g->out[r->number][to], &send));
		if (!received && recv) {
			job_ok(net_test(receiving->to, recv, &done, NULL));
			received = done;
		}
		done = 0;
		if (!sent && send) {
			job_ok(net_test(sending->from, send, &done, NULL));
			sent = done;
		}
		if (job_now_s() > end)
			job_fail("rank %u: neither sent to %u nor received from %u; warnings: %s", r->number, to, from, net_log_text());
		if (!done)
			sched_yield();
	}
}

/* Sum over all ranks: each part goes round once to be added up and once more to be told. */
static void *ring(void *arg)
{
	struct rank *r = arg;
	const unsigned next = (r->number + 1) % RANKS, previous = (r->number + RANKS - 1) % RANKS;
	const size_t part = r->group->words / RANKS;

	for (unsigned round = 0; round < 2 * (RANKS - 1); round++) {
		const bool adding = round < RANKS - 1;
		const unsigned step = adding ? round : round - (RANKS - 1);
		const unsigned mine = (r->number + (adding ? 0 : 1) + RANKS - step) % RANKS, theirs = (mine + RANKS - 1) % RANKS;

		send_and_receive(r, next, previous, r->data + mine * part, part * 4, r->scratch, part * 4);
		for (size_t i = 0; i < part; i++)
			r->data[theirs * part + i] = r->scratch[i] + (adding ? r->data[theirs * part + i] : 0);
	}
	return NULL;
}

/* Every rank gives every other one a part. */
static void *all_to_all(void *arg)
{
	struct rank *r = arg;
	const size_t part = r->group->words / RANKS;

	memcpy(r->scratch + r->number * part, r->data + r->number * part, part * 4);
	for (unsigned shift = 1; shift < RANKS; shift++) {
		const unsigned to = (r->number + shift) % RANKS, from = (r->number + RANKS - shift) % RANKS;

		send_and_receive(r, to, from, r->data + to * part, part * 4, r->scratch + from * part, part * 4);
	}
	return NULL;
}

static void group_start(struct group *g, struct job *job, size_t words)
{
	memset(g, 0, sizeof *g);
	g->job = job;
	g->words = words;
	for (unsigned r = 0; r < RANKS; r++) {
		g->ranks[r].group = g;
		g->ranks[r].number = r;
		g->ranks[r].data = bytes_alloc(words * 4);
		g->ranks[r].scratch = bytes_alloc(words * 4);
	}
	for (unsigned from = 0; from < RANKS; from++)
		for (unsigned to = 0; to < RANKS; to++) {
			struct job_pair *p = &g->pairs[from][to];

			if (from == to)
				continue;
			job_connect(net_of(g, from), net_of(g, to), p);
			g->out[from][to] = job_reg(p->from, p->send, g->ranks[from].data, words * 4);
			g->in[from][to] = job_reg(p->to, p->recv, g->ranks[to].scratch, words * 4);
		}
}

static void group_run(struct group *g, void *(*work)(void *))
{
	for (unsigned r = 0; r < RANKS; r++)
		assert_int_equal(pthread_create(&g->ranks[r].thread, NULL, work, &g->ranks[r]), 0);
	for (unsigned r = 0; r < RANKS; r++)
		pthread_join(g->ranks[r].thread, NULL);
}

static void group_stop(struct group *g)
{
	for (unsigned from = 0; from < RANKS; from++)
		for (unsigned to = 0; to < RANKS; to++) {
			struct job_pair *p = &g->pairs[from][to];

			if (from == to)
				continue;
			job_ok(net_dereg(p->from, p->send, g->out[from][to]));
			job_ok(net_dereg(p->to, p->recv, g->in[from][to]));
			job_close(p);
		}
	for (unsigned r = 0; r < RANKS; r++) {
		free(g->ranks[r].data);
		free(g->ranks[r].scratch);
	}
}

static void a_ring_adds_up(void **state)
{
	static const size_t words[] = {RANKS, 4096, 200 * 1024};
	struct group g;

	for (size_t k = 0; k < sizeof words / sizeof *words; k++) {
		group_start(&g, *state, words[k]);
		for (unsigned r = 0; r < RANKS; r++)
			for (size_t i = 0; i < words[k]; i++)
				g.ranks[r].data[i] = (uint32_t)(i * (r + 1) + r);
		group_run(&g, ring);
		for (unsigned r = 0; r < RANKS; r++)
			for (size_t i = 0; i < words[k]; i++)
				if (g.ranks[r].data[i] != (uint32_t)(i * 10 + 6))
					job_fail("rank %u: sum %zu of %zu is %u, expected %u", r, i, words[k], g.ranks[r].data[i], (uint32_t)(i * 10 + 6));
		group_stop(&g);
	}
}

static void everyone_tells_everyone(void **state)
{
	static const size_t words[] = {RANKS, 4096, 200 * 1024};
	struct group g;

	for (size_t k = 0; k < sizeof words / sizeof *words; k++) {
		const size_t part = words[k] / RANKS;

		group_start(&g, *state, words[k]);
		for (unsigned r = 0; r < RANKS; r++)
			for (size_t i = 0; i < words[k]; i++)
				g.ranks[r].data[i] = (uint32_t)(r << 28 | i);
		group_run(&g, all_to_all);
		for (unsigned r = 0; r < RANKS; r++)
			for (size_t i = 0; i < words[k]; i++) {
				const uint32_t expected = (uint32_t)((i / part) << 28 | (r * part + i % part));

				if (g.ranks[r].scratch[i] != expected)
					job_fail("rank %u: word %zu is 0x%x, expected 0x%x", r, i, g.ranks[r].scratch[i], expected);
			}
		group_stop(&g);
	}
}

/* --- threads ------------------------------------------------------------------------------------------------------ */

struct worker {
	struct job *job;
	uint32_t seed;
	pthread_t thread;
};

/* What NCCL's threads do at the same time on one plugin: connect, register, transfer, close. */
static void *work(void *arg)
{
	struct worker *w = arg;

	for (uint32_t round = 0; round < 6; round++) {
		struct job_pair p;
		char *out = malloc(100000), *in = malloc(100000);
		void *mo, *mi;

		if (!out || !in)
			job_fail("no memory");
		job_connect(&w->job->ranks[w->seed % 2], &w->job->ranks[round % 2], &p);
		mo = job_reg(p.from, p.send, out, 100000);
		mi = job_reg(p.to, p.recv, in, 100000);
		for (uint32_t i = 0; i < 10; i++) {
			void *recv = job_irecv(&p, in, 100000, 0, mi), *send;

			job_fill(out, 100000 - i, w->seed * 1000 + round * 10 + i);
			send = job_isend(&p, out, 100000 - i, 0, mo);
			job_wait(p.to, recv, NULL);
			job_wait(p.from, send, NULL);
			job_check(in, 100000 - i, w->seed * 1000 + round * 10 + i);
		}
		job_ok(net_dereg(p.from, p.send, mo));
		job_ok(net_dereg(p.to, p.recv, mi));
		job_close(&p);
		free(out);
		free(in);
	}
	return NULL;
}

static void threads_do_as_they_please(void **state)
{
	struct worker workers[4];

	for (uint32_t i = 0; i < 4; i++) {
		workers[i] = (struct worker){.job = *state, .seed = i};
		assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
	}
	for (int i = 0; i < 4; i++)
		pthread_join(workers[i].thread, NULL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(messages_of_all_sizes, job_start, job_stop),
		cmocka_unit_test_setup_teardown(messages_of_a_comm_keep_their_order, job_start, job_stop),
		cmocka_unit_test_setup_teardown(a_send_longer_than_its_receive_fails, job_start, job_stop),
		cmocka_unit_test_setup_teardown(a_receiver_that_has_all_may_close, job_start, job_stop),
		cmocka_unit_test_setup_teardown(receives_are_grouped, job_start, job_stop),
		cmocka_unit_test_setup_teardown(who_is_ahead_keeps_nobody_back, job_start, job_stop),
		cmocka_unit_test_setup_teardown(no_request_is_back_pressure, job_start, job_stop),
		cmocka_unit_test_setup_teardown(a_flush_ends, job_start, job_stop),
		cmocka_unit_test_setup_teardown(memory_of_the_library_is_not_copied, job_start, job_stop),
		cmocka_unit_test_setup_teardown(little_memory_is_enough, start_with_little_memory, job_stop),
		cmocka_unit_test_setup_teardown(memory_of_one_comm_serves_others, job_start, job_stop),
		cmocka_unit_test_setup_teardown(flags_of_ll, job_start, job_stop),
		cmocka_unit_test_setup_teardown(flags_of_ll_in_one_line, job_start, job_stop),
		cmocka_unit_test_setup_teardown(flags_of_ll128, job_start, job_stop),
		cmocka_unit_test_setup_teardown(flags_of_ll128_in_one_line, job_start, job_stop),
		cmocka_unit_test_setup_teardown(a_ring_adds_up, job_start, job_stop),
		cmocka_unit_test_setup_teardown(everyone_tells_everyone, job_start, job_stop),
		cmocka_unit_test_setup_teardown(threads_do_as_they_please, job_start, job_stop),
	};
	const int unfit = transport_env_check();

	return unfit ? unfit : job_run(tests, sizeof tests / sizeof *tests);
}
