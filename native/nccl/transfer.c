/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sends and receives.
 *
 * Tags. The library's rule: sends and receives of a comm match in order, group by group (a group is what one irecv() posts), and
 * the tag selects the receive within the group; a send whose tag no receive of the oldest open group has must wait. The shim's
 * rule: a send takes the oldest announced receive of the flow with its tag, and receives are announced in the order in which they
 * were posted. Under both the k-th send with tag t meets the k-th receive with tag t. For the library's rule: groups are
 * filled one after the other, and within a group equal tags are taken in their order, so the receives with tag t are taken in the
 * order in which they were posted, one by each send with tag t. For the shim's it is what it says. So the pairs are the same;
 * the only difference is that a send of a later group need not wait for an earlier group to be full, and that neither end can
 * see: it would have met that very receive, and its bytes arrive where nobody looks before test() says so. What deadlocks under
 * the library's rule may not under this one; never the other way round. Neither end needs to know of groups, so nothing but the
 * tag is sent.
 *
 * Order of posting. A group is posted as a whole or not at all, as far as others can see: when the shim takes only a part of
 * it, the rest is kept here and goes first at the next call on the comm, before any later group.
 *
 * Room. All comms of a lane share its ring. Receives wait for messages, sends for receives: were one kind to take all room, both
 * ends could wait for each other. So each kind has its part, and the last of it is for comms that have nothing under way, so that
 * no comm keeps another from its first. What is left is for connecting, closing and flushing.
 *
 * Completion. A receive that its owner watches for flags in the data (DQ_NCCL_OPTIONAL_RECV_COMPLETION) is received like any
 * other: the shim writes staged messages in the order that LL and LL128 rely on, and done means that all is there.
 */
#include <limits.h>
#include <stdlib.h>

#include "nccl/net.h"

_Static_assert(DQ_NCCL_P2P_BYTES_MAX <= INT_MAX, "test() tells sizes as int");
_Static_assert(DQ_NCCL_REQUESTS_MAX == 32 && DQ_NCCL_RECVS_MAX == 8, "bit masks");

static union dq_nccl_part *parts_of(const struct dq_nccl_request *r)
{
	struct dq_nccl_block *block = r->comm->blocks[r->block];

	return &block->parts[(size_t)(r - block->requests) * r->comm->parts_a_request];
}

static uint8_t all(unsigned n)
{
	return (uint8_t)((1u << n) - 1);
}

static bool grow(struct dq_nccl_comm *comm)
{
	struct dq_nccl_block *block;

	if (comm->block_count == DQ_NCCL_BLOCKS_MAX)
		return false;
	block = calloc(1, sizeof *block + (size_t)DQ_NCCL_REQUESTS_MAX * comm->parts_a_request * sizeof block->parts[0]);
	if (!block)
		return false;
	block->free = UINT32_MAX;
	for (uint32_t i = 0; i < DQ_NCCL_REQUESTS_MAX; i++) {
		block->requests[i].comm = comm;
		block->requests[i].block = comm->block_count;
	}
	comm->blocks[comm->block_count++] = block;
	return true;
}

struct dq_nccl_comm *dq_nccl_comm_new(struct dq_nccl_user *user, int device, dqplb_flow *flow, bool receives)
{
	const size_t n = receives ? DQ_NCCL_RECVS_MAX : 0;
	struct dq_nccl_comm *comm = calloc(1, sizeof *comm + n * sizeof comm->deferred[0]);

	if (!comm)
		return NULL;
	comm->user = user;
	comm->lane = user->lane;
	comm->flow = flow;
	comm->device = device;
	comm->receives = receives;
	comm->parts_a_request = receives ? DQ_NCCL_RECVS_MAX : 1;
	if (!grow(comm)) {
		free(comm);
		return NULL;
	}
	return comm;
}

static void count(const struct dq_nccl_comm *comm, uint8_t op, uint32_t n)
{
	if (op == DQ_NCCL_SEND)
		atomic_fetch_sub_explicit(&comm->lane->sends, n, memory_order_relaxed);
	else if (op == DQ_NCCL_RECV)
		atomic_fetch_sub_explicit(&comm->lane->recvs, n, memory_order_relaxed);
}

/* Room for n more messages of a kind on the lane; counts them when there is. */
static bool admit(struct dq_nccl_comm *comm, _Atomic uint32_t *counter, uint32_t n)
{
	const uint32_t most = comm->lane->room / 16 * (comm->taken == 0 ? 7 : 6);

	if (atomic_fetch_add_explicit(counter, n, memory_order_relaxed) + n <= most)
		return true;
	atomic_fetch_sub_explicit(counter, n, memory_order_relaxed);
	return false;
}

/* NULL: no place. */
static struct dq_nccl_request *take(struct dq_nccl_comm *comm, enum dq_nccl_op op, unsigned n)
{
	const unsigned blocks = op == DQ_NCCL_RECV ? 1 : DQ_NCCL_BLOCKS_MAX;
	struct dq_nccl_request *r;
	unsigned i, b = 0;

	while (b < comm->block_count && !comm->blocks[b]->free)
		b++;
	if (b >= blocks || (b == comm->block_count && !grow(comm)))
		return NULL;
	i = (unsigned)__builtin_ctz(comm->blocks[b]->free);
	comm->blocks[b]->free &= ~(1u << i);
	comm->taken++;
	r = &comm->blocks[b]->requests[i];
	r->op = (uint8_t)op;
	r->n = (uint8_t)n;
	r->posted = r->done = 0;
	r->large = false;
	return r;
}

static void give(struct dq_nccl_request *r)
{
	struct dq_nccl_block *block = r->comm->blocks[r->block];

	r->op = DQ_NCCL_FREE;
	block->free |= 1u << (r - block->requests);
	r->comm->taken--;
}

/* Nothing more will come of this comm. */
static dq_nccl_result fail(struct dq_nccl_comm *comm, int status, const char *what, size_t bytes)
{
	const dq_nccl_result rc = dq_nccl_fail_comm(status, comm, what, bytes);

	if (comm->failed == DQ_NCCL_SUCCESS)
		comm->failed = rc;
	return rc;
}

/* Post what is left of the group that the shim did not take whole. */
static int post_deferred(struct dq_nccl_comm *comm)
{
	struct dq_nccl_request *r = comm->waiting;
	union dq_nccl_part *parts = parts_of(r);

	for (unsigned i = 0; i < r->n; i++) {
		const struct dq_nccl_deferred *d = &comm->deferred[i];
		int status;

		if (r->posted & 1u << i)
			continue;
		status = dqplb_recv(comm->flow, d->mem, d->offset, d->bytes, d->tag, &parts[i].request);
		if (status != DQPLB_OK)
			return status;
		r->posted |= (uint8_t)(1u << i);
	}
	comm->waiting = NULL;
	return DQPLB_OK;
}

dq_nccl_result dq_nccl_isend(struct dq_nccl_comm *comm, void *data, size_t bytes, int tag, struct dq_nccl_mr *mr, void **out)
{
	struct dq_nccl_request *r;
	dqplb_mem *mem;
	size_t offset;
	int status;

	*out = NULL;
	if (comm->failed != DQ_NCCL_SUCCESS)
		return comm->failed;
	if (comm->receives || bytes > DQ_NCCL_P2P_BYTES_MAX) {
		DQ_NCCL_WARN("isend of %zu bytes%s: at most %llu are possible", bytes, comm->receives ? " on a receiving comm" : "",
			     DQ_NCCL_P2P_BYTES_MAX);
		return DQ_NCCL_INVALID_ARGUMENT;
	}
	mem = dq_nccl_mr_at(mr, comm->lane, data, bytes, &offset);
	if (!mem)
		return DQ_NCCL_INVALID_ARGUMENT;
	if (!admit(comm, &comm->lane->sends, 1))
		return DQ_NCCL_SUCCESS;
	r = take(comm, DQ_NCCL_SEND, 1);
	if (!r) {
		count(comm, DQ_NCCL_SEND, 1);
		return DQ_NCCL_SUCCESS;
	}
	status = dqplb_send(comm->flow, mem, offset, bytes, (uint32_t)tag, &parts_of(r)->request);
	if (status != DQPLB_OK) {
		count(comm, DQ_NCCL_SEND, 1);
		give(r);
		return status == DQPLB_ERR_AGAIN ? DQ_NCCL_SUCCESS : fail(comm, status, "send", bytes);
	}
	r->posted = 1;
	r->large = bytes >= DQ_NCCL_LARGE;
	*out = r;
	return DQ_NCCL_SUCCESS;
}

dq_nccl_result dq_nccl_irecv(struct dq_nccl_comm *comm, int n, void *const *data, const size_t *bytes, const int *tags,
			     void *const *mrs, void **out)
{
	struct dq_nccl_request *r;
	int status;

	*out = NULL; /* it may have been DQ_NCCL_OPTIONAL_RECV_COMPLETION */
	if (comm->failed != DQ_NCCL_SUCCESS)
		return comm->failed;
	if (!comm->receives || n < 1 || n > DQ_NCCL_RECVS_MAX || !data || !bytes || !tags) {
		DQ_NCCL_WARN("irecv of %d messages%s: 1 to %d are possible", n, comm->receives ? "" : " on a sending comm", DQ_NCCL_RECVS_MAX);
		return DQ_NCCL_INVALID_ARGUMENT;
	}
	if (comm->waiting) {
		status = post_deferred(comm);
		if (status != DQPLB_OK)
			return status == DQPLB_ERR_AGAIN ? DQ_NCCL_SUCCESS : fail(comm, status, "receive", bytes[0]);
	}
	for (int i = 0; i < n; i++) {
		struct dq_nccl_deferred *d = &comm->deferred[i];

		if (bytes[i] > DQ_NCCL_P2P_BYTES_MAX) {
			DQ_NCCL_WARN("irecv of %zu bytes: at most %llu are possible", bytes[i], DQ_NCCL_P2P_BYTES_MAX);
			return DQ_NCCL_INVALID_ARGUMENT;
		}
		d->mem = dq_nccl_mr_at(mrs ? mrs[i] : NULL, comm->lane, data[i], bytes[i], &d->offset);
		if (!d->mem)
			return DQ_NCCL_INVALID_ARGUMENT;
		d->bytes = bytes[i];
		d->tag = (uint32_t)tags[i];
	}
	if (!admit(comm, &comm->lane->recvs, (uint32_t)n))
		return DQ_NCCL_SUCCESS;
	r = take(comm, DQ_NCCL_RECV, (unsigned)n);
	if (!r) {
		count(comm, DQ_NCCL_RECV, (uint32_t)n);
		return DQ_NCCL_SUCCESS;
	}
	r->large = bytes[0] >= DQ_NCCL_LARGE;
	comm->waiting = r;
	status = post_deferred(comm);
	if (status == DQPLB_ERR_AGAIN && !r->posted) {
		comm->waiting = NULL;
		count(comm, DQ_NCCL_RECV, (uint32_t)n);
		give(r);
		return DQ_NCCL_SUCCESS;
	}
	if (status != DQPLB_OK && status != DQPLB_ERR_AGAIN)
		return fail(comm, status, "receive", bytes[0]); /* what was posted ends with the comm */
	*out = r;
	return DQ_NCCL_SUCCESS;
}

/* A flush that the shim has no room for may not be left out: its memory is kept, and test() posts it. Where in that memory the
 * read goes does not matter: it is of one GPU, and the read pushes all that the device wrote there before. */
static int post_flush(struct dq_nccl_request *r, unsigned i, size_t offset)
{
	union dq_nccl_part *part = &parts_of(r)[i];
	dqplb_request *request;
	const int status = dqplb_flush(r->comm->flow, part->mem, offset, &request);

	if (status == DQPLB_OK) {
		part->request = request;
		r->posted |= (uint8_t)(1u << i);
	}
	return status;
}

dq_nccl_result dq_nccl_iflush(struct dq_nccl_comm *comm, int n, void *const *data, const int *bytes, void *const *mrs, void **out)
{
	struct dq_nccl_request *r = NULL;

	*out = NULL;
	if (comm->failed != DQ_NCCL_SUCCESS)
		return comm->failed;
	if (!comm->receives || n < 1 || n > DQ_NCCL_RECVS_MAX || !data || !bytes || !mrs) {
		DQ_NCCL_WARN("iflush of %d messages%s: 1 to %d are possible", n, comm->receives ? "" : " on a sending comm", DQ_NCCL_RECVS_MAX);
		return DQ_NCCL_INVALID_ARGUMENT;
	}
	for (int i = 0; i < n; i++) {
		struct dq_nccl_mr *mr = mrs[i];
		size_t offset;
		dqplb_mem *mem;
		int status;

		/* The CPU, or a write that the CPU has seen completed, has put host memory in order. */
		if (!mr || mr->kind != DQ_NCCL_MR_DMABUF || bytes[i] <= 0)
			continue;
		mem = dq_nccl_mr_at(mr, comm->lane, data[i], 0, &offset);
		if (!mem)
			return DQ_NCCL_INVALID_ARGUMENT;
		if (!r) {
			r = take(comm, DQ_NCCL_FLUSH, 0);
			if (!r) {
				DQ_NCCL_WARN("iflush with %d requests under way: expected fewer", DQ_NCCL_REQUESTS_MAX);
				return DQ_NCCL_INTERNAL_ERROR;
			}
		}
		parts_of(r)[r->n].mem = mem;
		r->n++;
		status = post_flush(r, r->n - 1u, offset);
		if (status != DQPLB_OK && status != DQPLB_ERR_AGAIN)
			return fail(comm, status, "flush", (size_t)bytes[i]);
	}
	*out = r;
	return DQ_NCCL_SUCCESS;
}

static const char *op_name(uint8_t op)
{
	return op == DQ_NCCL_SEND ? "send" : op == DQ_NCCL_RECV ? "receive" : "flush";
}

/*
 * A thread that asks and asks, and the daemon that is to do what it asks for, share a CPU where there are but a few: yielding
 * it is not enough, since the scheduler gives both the same. There it sleeps for a moment now and then, while all that it asks
 * for takes longer anyway.
 */
#define IN_VAIN_MAX 64u
#define PAUSE_NS 20000

static _Thread_local uint32_t in_vain; /* tests since the last that found something, or was of something short */

static void pause_if_in_vain(const struct dq_nccl_request *r)
{
	const struct timespec pause = {.tv_nsec = PAUSE_NS};

	in_vain = r->large ? in_vain + 1 : 0;
	if (in_vain < IN_VAIN_MAX || !dq_nccl_state.settings.few_cpus)
		return;
	in_vain = 0;
	nanosleep(&pause, NULL);
}

dq_nccl_result dq_nccl_test(struct dq_nccl_request *r, int *done, int *sizes)
{
	struct dq_nccl_comm *comm = r->comm;
	union dq_nccl_part *parts = parts_of(r);
	const uint8_t every = all(r->n);
	int status;

	*done = 0;
	if (DQ_NCCL_UNLIKELY(comm->failed != DQ_NCCL_SUCCESS))
		return comm->failed;
	if (DQ_NCCL_UNLIKELY(r->op == DQ_NCCL_FREE)) {
		DQ_NCCL_WARN("test of a request that was reported done before");
		return DQ_NCCL_INTERNAL_ERROR;
	}
	if (comm->waiting) {
		status = post_deferred(comm);
		if (status != DQPLB_OK && status != DQPLB_ERR_AGAIN)
			return fail(comm, status, "receive", 0);
	}
	for (unsigned i = 0; i < r->n; i++) {
		const uint8_t bit = (uint8_t)(1u << i);
		dqplb_result result;
		int ended;

		if (r->done & bit)
			continue;
		if (!(r->posted & bit)) {
			if (r->op == DQ_NCCL_RECV)
				break; /* nor are those after it */
			status = post_flush(r, i, 0);
			if (status == DQPLB_ERR_AGAIN)
				continue;
			if (status != DQPLB_OK)
				return fail(comm, status, "flush", 0);
		}
		status = dqplb_test(parts[i].request, &ended, &result);
		if (!ended) {
			if (DQ_NCCL_UNLIKELY(status != DQPLB_OK))
				return fail(comm, status, op_name(r->op), 0);
			continue;
		}
		r->done |= bit;
		count(comm, r->op, 1);
		if (DQ_NCCL_UNLIKELY(result.status != DQPLB_OK))
			return fail(comm, result.status, op_name(r->op), result.bytes);
		parts[i].bytes = result.bytes;
	}
	if (r->done != every) {
		pause_if_in_vain(r);
		return DQ_NCCL_SUCCESS;
	}
	in_vain = 0;
	if (sizes && r->op != DQ_NCCL_FLUSH)
		for (unsigned i = 0; i < r->n; i++)
			sizes[i] = (int)parts[i].bytes;
	give(r);
	*done = 1;
	return DQ_NCCL_SUCCESS;
}

static void abandon(struct dq_nccl_request *r)
{
	for (unsigned i = 0; i < r->n; i++) {
		if ((r->posted & ~r->done) & 1u << i)
			dqplb_abandon(parts_of(r)[i].request);
		if (!(r->done & 1u << i))
			count(r->comm, r->op, 1);
	}
}

void dq_nccl_comm_free(struct dq_nccl_comm *comm)
{
	for (unsigned b = 0; b < comm->block_count; b++) {
		for (uint32_t k = 0; k < DQ_NCCL_REQUESTS_MAX; k++)
			if (comm->blocks[b]->requests[k].op != DQ_NCCL_FREE)
				abandon(&comm->blocks[b]->requests[k]);
		free(comm->blocks[b]);
	}
	free(comm);
}
