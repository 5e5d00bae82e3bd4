/* SPDX-License-Identifier: Apache-2.0 */
/* Memory for messages: allocated by the daemon, registered here (staged), or a dma-buf. */
#include "shim/shim.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "shim/staging.h"

void *dq_shim_map(int fd, size_t bytes)
{
	struct stat st;
	void *p;

	/* A file shorter than what was promised would end in SIGBUS, far from its cause. */
	if (fstat(fd, &st) != 0)
		return NULL;
	if ((uint64_t)st.st_size < bytes) {
		errno = EPROTO;
		return NULL;
	}
	/* The pages exist already; populating saves a fault a page on first use. */
	p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
	if (p == MAP_FAILED)
		return NULL;
	if (madvise(p, bytes, MADV_DONTFORK) != 0) {
		int saved = errno;
		munmap(p, bytes);
		errno = saved;
		return NULL;
	}
	return p;
}

static int enter(const char *call, dqplb_context *ctx, size_t bytes, dqplb_mem **out, dqplb_mem **mem)
{
	if (!ctx || !out)
		return dq_shim_fail(DQPLB_ERR_INVALID, "%s: %s is NULL", call, ctx ? "out" : "context");
	if (dq_shim_is_forked(ctx))
		return dq_shim_forked();
	if (bytes == 0 || bytes > SIZE_MAX / 2)
		return dq_shim_fail(DQPLB_ERR_INVALID, "%s: %zu bytes: expected 1 to %zu", call, bytes, SIZE_MAX / 2);
	*mem = calloc(1, sizeof **mem);
	if (!*mem)
		return dq_shim_fail(DQPLB_ERR_NOMEM, "%s: no memory for its own record", call);
	(*mem)->ctx = ctx;
	(*mem)->bytes = bytes;
	return DQPLB_OK;
}

static void link_mem(dqplb_mem *mem)
{
	dqplb_context *ctx = mem->ctx;

	pthread_mutex_lock(&ctx->lock);
	mem->next = ctx->mems;
	if (mem->next)
		mem->next->prev = mem;
	ctx->mems = mem;
	pthread_mutex_unlock(&ctx->lock);
}

static int free_call(dqplb_context *ctx, uint32_t id)
{
	struct dq_client_request request = {.type = DQ_REQ_MEM_FREE, .arg0 = id};
	struct dq_shim_answer answer;
	int status = dq_shim_call(ctx, &request, -1, &answer);

	if (status == DQPLB_OK)
		dq_shim_answer_close(&answer);
	return status;
}

int dqplb_mem_alloc(dqplb_context *ctx, size_t bytes, dqplb_mem **out)
{
	struct dq_client_request request = {.type = DQ_REQ_MEM_ALLOC, .arg0 = bytes};
	struct dq_shim_answer answer;
	dqplb_mem *mem;
	int status = enter("dqplb_mem_alloc", ctx, bytes, out, &mem);

	if (status != DQPLB_OK)
		return status;
	status = dq_shim_call(ctx, &request, -1, &answer);
	if (status != DQPLB_OK) {
		free(mem);
		return status;
	}
	mem->kind = DQ_SHIM_MEM_SHARED;
	mem->id = (uint32_t)answer.reply.arg0;
	mem->mapped_bytes = answer.reply.arg1;
	if (answer.fds[0] < 0 || answer.reply.arg1 < bytes || answer.reply.arg1 > SIZE_MAX / 2) {
		status = dq_shim_fail(DQPLB_ERR_INTERNAL, "dqplb_mem_alloc: the daemon answered with %llu bytes and %s, expected %zu and one",
				      (unsigned long long)answer.reply.arg1, answer.fds[0] < 0 ? "no file" : "a file", bytes);
	} else {
		mem->address = dq_shim_map(answer.fds[0], mem->mapped_bytes);
		if (!mem->address)
			status = dq_shim_fail(DQPLB_ERR_NOMEM, "dqplb_mem_alloc: mapping %llu bytes: %s",
					      (unsigned long long)mem->mapped_bytes, strerror(errno));
	}
	dq_shim_answer_close(&answer);
	if (status != DQPLB_OK) {
		char why[256];
		snprintf(why, sizeof why, "%s", dqplb_last_error());
		free_call(ctx, mem->id);
		dq_shim_fail(status, "%s", why);
		free(mem);
		return status;
	}
	link_mem(mem);
	dq_shim_shared_add(mem);
	*out = mem;
	return DQPLB_OK;
}

int dqplb_mem_register(dqplb_context *ctx, void *address, size_t bytes, dqplb_mem **out)
{
	dqplb_mem *mem;
	int status;

	if (!address || (uintptr_t)address > UINTPTR_MAX - bytes)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_mem_register: %zu bytes at address %p: not a range of memory", bytes, address);
	status = enter("dqplb_mem_register", ctx, bytes, out, &mem);
	if (status != DQPLB_OK)
		return status;
	mem->kind = DQ_SHIM_MEM_STAGED;
	mem->address = address;
	status = dq_staging_prepare(ctx);
	if (status != DQPLB_OK) {
		free(mem);
		return status;
	}
	link_mem(mem);
	*out = mem;
	return DQPLB_OK;
}

int dqplb_mem_register_dmabuf(dqplb_context *ctx, int fd, uint64_t offset, size_t bytes, dqplb_mem **out)
{
	struct dq_client_request request = {.type = DQ_REQ_MEM_DMABUF, .arg0 = bytes, .arg1 = offset};
	struct dq_shim_answer answer;
	dqplb_mem *mem;
	int status = enter("dqplb_mem_register_dmabuf", ctx, bytes, out, &mem);

	if (status != DQPLB_OK)
		return status;
	if (fd < 0)
		status = dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_mem_register_dmabuf: fd %d: expected the file descriptor of a dma-buf", fd);
	else
		status = dq_shim_call(ctx, &request, fd, &answer);
	if (status != DQPLB_OK) {
		free(mem);
		return status;
	}
	mem->kind = DQ_SHIM_MEM_DMABUF;
	mem->id = (uint32_t)answer.reply.arg0;
	dq_shim_answer_close(&answer);
	link_mem(mem);
	*out = mem;
	return DQPLB_OK;
}

static int find(const char *call, const void *address, size_t bytes, struct dq_shim_place *place)
{
	if (!address || !dq_shim_shared_find(address, bytes, place))
		return dq_shim_fail(DQPLB_ERR_REGION, "%s: %zu bytes at address %p do not lie in memory of dqplb_mem_alloc() of this process", call,
				    bytes, address);
	return DQPLB_OK;
}

int dqplb_mem_find(const void *address, size_t bytes, uint64_t *serial, size_t *offset)
{
	struct dq_shim_place place;
	int status = find("dqplb_mem_find", address, bytes, &place);

	if (status != DQPLB_OK)
		return status;
	if (serial)
		*serial = place.serial;
	if (offset)
		*offset = place.offset;
	return DQPLB_OK;
}

int dqplb_mem_share(dqplb_context *ctx, const void *address, size_t bytes, dqplb_mem **out)
{
	struct dq_client_request request = {.type = DQ_REQ_MEM_SHARE};
	struct dq_shim_answer answer;
	struct dq_shim_place place;
	dqplb_mem *mem;
	int status = find("dqplb_mem_share", address, bytes, &place);

	if (status != DQPLB_OK)
		return status;
	status = enter("dqplb_mem_share", ctx, place.bytes, out, &mem);
	if (status != DQPLB_OK)
		return status;
	request.arg0 = place.client;
	request.arg1 = place.id;
	status = dq_shim_call(ctx, &request, -1, &answer);
	if (status == DQPLB_OK && answer.reply.arg1 < place.bytes) {
		status = dq_shim_fail(DQPLB_ERR_INTERNAL, "dqplb_mem_share: the daemon answered with %llu bytes, expected %llu",
				      (unsigned long long)answer.reply.arg1, (unsigned long long)place.bytes);
		dq_shim_answer_close(&answer);
	}
	if (status != DQPLB_OK) {
		free(mem);
		return status;
	}
	mem->kind = DQ_SHIM_MEM_ALIAS;
	mem->id = (uint32_t)answer.reply.arg0;
	dq_shim_answer_close(&answer);
	link_mem(mem);
	*out = mem;
	return DQPLB_OK;
}

void *dqplb_mem_address(dqplb_mem *mem)
{
	return mem ? mem->address : NULL;
}

size_t dqplb_mem_bytes(dqplb_mem *mem)
{
	return mem ? mem->bytes : 0;
}

/* lock held. Does a thread copy from or to this memory now, or is a copy due? */
static bool copying(dqplb_context *ctx, const dqplb_mem *mem)
{
	for (uint32_t i = 0; i < ctx->slab_count * DQ_SHIM_REQUESTS_PER_SLAB; i++) {
		const struct dq_shim_request *r = dq_shim_request_at(ctx, i);
		uint32_t state = dq_shim_request_state(r);

		if ((state == DQ_SHIM_COPYING || state == DQ_SHIM_RESERVED) && r->mem == mem)
			return true;
	}
	return false;
}

/* lock held. Nothing may touch the memory after this. */
static void cancel_requests(dqplb_context *ctx, const dqplb_mem *mem)
{
	bool any = false;

	dq_shim_progress(ctx, NULL);
	while (copying(ctx, mem)) {
		pthread_cond_wait(&ctx->copied, &ctx->lock);
		dq_shim_progress(ctx, NULL);
	}
	for (uint32_t i = 0; i < ctx->slab_count * DQ_SHIM_REQUESTS_PER_SLAB; i++) {
		struct dq_shim_request *r = dq_shim_request_at(ctx, i);

		if (dq_shim_request_state(r) != DQ_SHIM_PENDING || r->mem != mem)
			continue;
		r->mem = NULL;
		r->mem_freed = true;
		if (!r->piece.chunk)
			continue; /* the daemon cancels it */
		/* The daemon knows only the staging memory: it goes on with that, and what it says is dropped. */
		r->orphan = true;
		r->copy_to = NULL;
		r->result.status = DQPLB_ERR_CANCELED;
		ctx->completed++;
		dq_shim_request_enter(r, DQ_SHIM_DONE);
		any = true;
	}
	if (any)
		dq_shim_wake_sleepers(ctx);
}

int dqplb_mem_free(dqplb_mem *mem)
{
	dqplb_context *ctx;
	int status = DQPLB_OK;

	if (!mem)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_mem_free: mem is NULL");
	ctx = mem->ctx;
	if (dq_shim_is_forked(ctx))
		return dq_shim_forked();
	if (mem->kind == DQ_SHIM_MEM_SHARED)
		dq_shim_shared_remove(mem);
	pthread_mutex_lock(&ctx->lock);
	cancel_requests(ctx, mem);
	if (mem->prev)
		mem->prev->next = mem->next;
	else
		ctx->mems = mem->next;
	if (mem->next)
		mem->next->prev = mem->prev;
	pthread_mutex_unlock(&ctx->lock);

	if (mem->kind != DQ_SHIM_MEM_STAGED)
		status = free_call(ctx, mem->id);
	if (mem->kind == DQ_SHIM_MEM_SHARED)
		munmap(mem->address, mem->mapped_bytes);
	free(mem);
	return status;
}
