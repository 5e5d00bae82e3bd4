/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Registered memory, in a table of the process, counted: the library registers the same buffer for one connection after the
 * other. What is the same is decided by what the memory is, not by its address alone: an address may have been given back and
 * taken again meanwhile.
 *
 *   dma-buf        device and inode of the file, and the range in it. An inode is not used again while somebody holds the buffer,
 *                  and the daemon does as long as it is registered.
 *   shim memory    the serial number that the shim gave it, never used again
 *   host memory    the address alone will do: the shim copies from and to whatever is mapped there at that time, and nothing of
 *                  it is known to the daemon
 *
 * Memory is registered with the context of the comm it is registered for. The library may use it for any other comm
 * (reg_is_global): that is the same context for all comms of a communicator; for another one's, host memory is registered there on
 * first use.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include "nccl/net.h"

#define DMA_BUF_FS_MAGIC 0x444d4142 /* linux/magic.h, DMA_BUF_MAGIC */
#define CHAINS 1024u

static pthread_mutex_t mr_lock = PTHREAD_MUTEX_INITIALIZER; /* taken after the state lock */
static struct dq_nccl_mr *chains[CHAINS];

static struct dq_nccl_mr **chain_of(const void *address)
{
	uint64_t h = (uint64_t)(uintptr_t)address * 0x9e3779b97f4a7c15u; /* golden ratio: spreads page-aligned addresses */

	return &chains[h >> 54];
}
_Static_assert(CHAINS == 1u << (64 - 54), "bits of the hash");

static bool same(const struct dq_nccl_mr *a, const struct dq_nccl_mr *b)
{
	return a->kind == b->kind && a->address == b->address && a->bytes == b->bytes && a->offset == b->offset && a->lane == b->lane &&
	       a->identity[0] == b->identity[0] && a->identity[1] == b->identity[1];
}

/* mr_lock held. */
static int make(const struct dq_nccl_mr *wanted, dqplb_context *ctx, int fd, dqplb_mem **out)
{
	switch (wanted->kind) {
	case DQ_NCCL_MR_SHIM:
		return dqplb_mem_share(ctx, wanted->address, wanted->bytes, out);
	case DQ_NCCL_MR_DMABUF:
		return dqplb_mem_register_dmabuf(ctx, fd, wanted->offset, wanted->bytes, out);
	default:
		return dqplb_mem_register(ctx, wanted->address, wanted->bytes, out);
	}
}

/* One that is there already, with one more user, or a new one like `wanted`. */
static dq_nccl_result get(const struct dq_nccl_mr *wanted, int fd, bool cached, int device, void **out)
{
	struct dq_nccl_mr **chain = chain_of(wanted->address), *mr;
	int status;

	pthread_mutex_lock(&mr_lock);
	for (mr = cached ? *chain : NULL; mr; mr = mr->next)
		if (same(mr, wanted))
			break;
	if (mr) {
		mr->refs++;
		pthread_mutex_unlock(&mr_lock);
		*out = mr;
		return DQ_NCCL_SUCCESS;
	}
	mr = malloc(sizeof *mr);
	if (!mr) {
		pthread_mutex_unlock(&mr_lock);
		DQ_NCCL_WARN("registering %zu bytes at %p: no memory", wanted->bytes, (void *)wanted->address);
		return DQ_NCCL_SYSTEM_ERROR;
	}
	*mr = *wanted;
	status = make(mr, mr->lane->ctx, fd, &mr->mem);
	if (status != DQPLB_OK) {
		pthread_mutex_unlock(&mr_lock);
		free(mr);
		return dq_nccl_fail(status, wanted->kind == DQ_NCCL_MR_DMABUF ? "registering GPU memory" : "registering host memory", device);
	}
	mr->refs = 1;
	mr->next = *chain;
	*chain = mr;
	pthread_mutex_unlock(&mr_lock);
	*out = mr;
	return DQ_NCCL_SUCCESS;
}

dq_nccl_result dq_nccl_reg_mr(struct dq_nccl_comm *comm, void *address, size_t bytes, int type, void **out)
{
	struct dq_nccl_mr wanted = {.kind = DQ_NCCL_MR_HOST, .address = address, .bytes = bytes, .lane = comm->lane};

	*out = NULL;
	if (type != DQ_NCCL_PTR_HOST) {
		if (dq_nccl_log_first("CUDA without dma-buf"))
			DQ_NCCL_WARN("registering GPU memory on device %s without a dma-buf: the daemon needs one (CUDA 11.7, a GPU driver with "
				     "open kernel modules, NCCL_DMABUF_ENABLE not 0); nvidia-peermem cannot serve another process",
				     dq_nccl_device_name(comm->device));
		return DQ_NCCL_INVALID_ARGUMENT;
	}
	if (!address || !bytes) {
		DQ_NCCL_WARN("registering %zu bytes at %p: expected memory", bytes, address);
		return DQ_NCCL_INVALID_ARGUMENT;
	}
	if (dqplb_mem_find(address, bytes, &wanted.identity[0], &wanted.shift) == DQPLB_OK)
		wanted.kind = DQ_NCCL_MR_SHIM;
	return get(&wanted, -1, true, comm->device, out);
}

dq_nccl_result dq_nccl_reg_dmabuf(struct dq_nccl_comm *comm, void *address, size_t bytes, int type, uint64_t offset, int fd, void **out)
{
	struct dq_nccl_mr wanted = {.kind = DQ_NCCL_MR_DMABUF, .address = address, .bytes = bytes, .offset = offset, .lane = comm->lane};
	struct statfs fs;
	struct stat st;
	bool cached;

	*out = NULL;
	if ((type != DQ_NCCL_PTR_CUDA && type != DQ_NCCL_PTR_HOST) || !bytes || fd < 0) {
		DQ_NCCL_WARN("registering %zu bytes of a dma-buf, type %d, file descriptor %d: expected memory of a GPU", bytes, type, fd);
		return DQ_NCCL_INVALID_ARGUMENT;
	}
	/* Where dma-bufs have no inodes of their own (before Linux 5.3 all had the same), each is new. */
	cached = fstatfs(fd, &fs) == 0 && fs.f_type == DMA_BUF_FS_MAGIC && fstat(fd, &st) == 0;
	if (cached) {
		wanted.identity[0] = (uint64_t)st.st_dev;
		wanted.identity[1] = (uint64_t)st.st_ino;
	}
	return get(&wanted, fd, cached, comm->device, out);
}

dq_nccl_result dq_nccl_dereg_mr(struct dq_nccl_mr *mr)
{
	struct dq_nccl_mr **at;
	int status = DQPLB_OK;

	pthread_mutex_lock(&mr_lock);
	if (--mr->refs) {
		pthread_mutex_unlock(&mr_lock);
		return DQ_NCCL_SUCCESS;
	}
	for (at = chain_of(mr->address); *at && *at != mr; at = &(*at)->next)
		;
	if (*at)
		*at = mr->next;
	pthread_mutex_unlock(&mr_lock);
	/* What was under way with it is canceled. When the daemon is gone there is nobody to tell, and all is released. */
	if (mr->mem)
		status = dqplb_mem_free(mr->mem);
	while (mr->elsewhere) {
		struct dq_nccl_elsewhere *e = mr->elsewhere;
		mr->elsewhere = e->next;
		dqplb_mem_free(e->mem);
		free(e);
	}
	free(mr);
	if (status != DQPLB_OK)
		DQ_NCCL_INFO("deregistering memory: %s", dqplb_last_error());
	return DQ_NCCL_SUCCESS;
}

void dq_nccl_mr_forget_lane(const struct dq_nccl_lane *lane)
{
	pthread_mutex_lock(&mr_lock);
	for (uint32_t i = 0; i < CHAINS; i++) {
		for (struct dq_nccl_mr *mr = chains[i]; mr; mr = mr->next) {
			if (mr->lane == lane) {
				mr->lane = NULL;
				mr->mem = NULL;
			}
			for (struct dq_nccl_elsewhere **at = &mr->elsewhere; *at;) {
				struct dq_nccl_elsewhere *e = *at;
				if (e->lane != lane) {
					at = &e->next;
					continue;
				}
				*at = e->next;
				free(e);
			}
		}
	}
	pthread_mutex_unlock(&mr_lock);
}

/* The memory is of another communicator, which has another context. */
static dqplb_mem *foreign(struct dq_nccl_mr *mr, struct dq_nccl_lane *lane)
{
	struct dq_nccl_elsewhere *e;
	int status = DQPLB_OK;

	if (mr->kind == DQ_NCCL_MR_DMABUF) {
		if (dq_nccl_log_first("dma-buf of another communicator"))
			DQ_NCCL_WARN("memory of a GPU that was registered for one communicator is used by another: register it there, too, or set "
				     "DQPLB_NCCL_CONTEXTS=1");
		return NULL;
	}
	pthread_mutex_lock(&mr_lock);
	for (e = mr->elsewhere; e && e->lane != lane; e = e->next)
		;
	if (!e && (e = malloc(sizeof *e))) {
		e->lane = lane;
		status = make(mr, lane->ctx, -1, &e->mem);
		if (status == DQPLB_OK) {
			e->next = mr->elsewhere;
			mr->elsewhere = e;
		} else {
			free(e);
			e = NULL;
		}
	}
	dqplb_mem *mem = e ? e->mem : NULL;
	pthread_mutex_unlock(&mr_lock);
	if (!mem)
		dq_nccl_fail(status != DQPLB_OK ? status : DQPLB_ERR_NOMEM, "registering memory of another communicator", -1);
	return mem;
}

/* For a message without bytes and without memory. Made when the first comes: with it comes staging memory, which a job whose data
 * is in GPUs may have no use for. */
static dqplb_mem *nothing(struct dq_nccl_lane *lane)
{
	static unsigned char place[8];
	dqplb_mem *mem = atomic_load_explicit(&lane->nothing, memory_order_acquire);
	int status = DQPLB_OK;

	if (mem)
		return mem;
	pthread_mutex_lock(&mr_lock);
	mem = atomic_load_explicit(&lane->nothing, memory_order_relaxed);
	if (!mem) {
		status = dqplb_mem_register(lane->ctx, place, sizeof place, &mem);
		if (status == DQPLB_OK)
			atomic_store_explicit(&lane->nothing, mem, memory_order_release);
	}
	pthread_mutex_unlock(&mr_lock);
	if (status == DQPLB_OK)
		return mem;
	dq_nccl_fail(status, "making room for an empty message", -1);
	return NULL;
}

dqplb_mem *dq_nccl_mr_at(struct dq_nccl_mr *mr, struct dq_nccl_lane *lane, const void *data, size_t bytes, size_t *offset)
{
	size_t at;

	if (!mr) {
		*offset = 0;
		if (!bytes)
			return nothing(lane);
		DQ_NCCL_WARN("a message of %zu bytes at %p without registered memory", bytes, data);
		return NULL;
	}
	at = (size_t)((uintptr_t)data - (uintptr_t)mr->address);
	if (DQ_NCCL_UNLIKELY(at > mr->bytes || bytes > mr->bytes - at)) {
		DQ_NCCL_WARN("a message of %zu bytes at %p lies outside of the registered %zu bytes at %p", bytes, data, mr->bytes,
			     (void *)mr->address);
		return NULL;
	}
	*offset = at + mr->shift;
	if (DQ_NCCL_UNLIKELY(atomic_load_explicit(&mr->lane, memory_order_relaxed) != lane))
		return foreign(mr, lane);
	return mr->mem;
}
