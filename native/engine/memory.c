/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of clients: made here (memfd, sealed, pages allocated) or taken as dma-buf, registered with every device, and kept
 * until nothing can touch it any more, whatever the client does meanwhile.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "engine/private.h"

#define DMA_BUF_FS_MAGIC 0x444d4142 /* linux/magic.h, DMA_BUF_MAGIC */
#define PAGE 4096u

static void mem_release(struct dq_engine *e, uint32_t i)
{
	struct eng_mem *m = eng_mem_at(e, i);
	struct eng_client *c = eng_client_at(e, m->client);
	for (uint32_t d = 0; d < e->device_count; d++) {
		if (m->on[d]) {
			e->devices[d].provider->mem_deregister(m->on[d]);
			e->devices[d].regions--;
		}
	}
	if (m->addr)
		munmap(m->addr, m->mapped);
	if (m->fd >= 0)
		close(m->fd);
	e->mem_bytes -= m->mapped;
	c->mem_bytes -= m->mapped;
	if (m->staging) {
		e->staging_bytes -= m->mapped;
		c->staging_bytes -= m->mapped;
	}
	if (m->prev == DQ_NONE)
		c->mems_head = m->next;
	else
		eng_mem_at(e, m->prev)->next = m->next;
	if (m->next != DQ_NONE)
		eng_mem_at(e, m->next)->prev = m->prev;
	c->mem_count--;
	dq_slab_free(&e->mems, i);
}

void eng_mem_ref(struct dq_engine *e, uint32_t mem)
{
	eng_mem_at(e, mem)->refs++;
}

void eng_mem_unref(struct dq_engine *e, uint32_t mem)
{
	struct eng_mem *m = eng_mem_at(e, mem);
	struct eng_client *c = eng_client_at(e, m->client);
	if (--m->refs || !m->dead)
		return;
	mem_release(e, mem);
	if (c->dying)
		eng_client_settle(e, c);
}

void eng_mem_kill(struct dq_engine *e, uint32_t mem)
{
	struct eng_mem *m = eng_mem_at(e, mem);
	m->dead = true;
	if (!m->refs)
		mem_release(e, mem);
}

struct mem_add {
	uint32_t client;
	uint64_t bytes, mapped;
	uint8_t *addr;
	int fd;              /* memfd to keep, or -1 */
	int dmabuf_fd;       /* or -1; only looked at during the call */
	uint64_t dmabuf_offset;
	struct dq_mem *on[ENG_MAX_DEVICES]; /* registered so far */
	bool staging;
	uint32_t *mem;
	struct dq_text *err;
	int rc;
};

static void mem_reserve(struct dq_engine *e, void *arg)
{
	struct mem_add *a = arg;
	struct eng_client *c = eng_client_at(e, a->client);
	if (!c || c->dying)
		a->rc = eng_error(a->err, -ENOENT, "memory: no client %u", a->client);
	else if (c->mem_bytes + a->mapped > c->max_mem_bytes)
		a->rc = eng_error(a->err, -EDQUOT, "memory: %llu bytes asked for, client %s has %llu of its quota of %llu bytes: free some, "
				  "or raise clients.max_memory_bytes", (unsigned long long)a->mapped, c->name,
				  (unsigned long long)c->mem_bytes, (unsigned long long)c->max_mem_bytes);
}

/* Registers with the devices that are, or are not, served by any thread. Those that exist do not change once there are clients. */
static int register_on(struct dq_engine *e, struct mem_add *a, bool any_thread)
{
	struct dq_mem_desc desc = { .addr = a->addr, .len = a->bytes, .dmabuf_fd = a->dmabuf_fd, .dmabuf_offset = a->dmabuf_offset,
				    .access = DQ_ACCESS_REMOTE_WRITE };
	for (uint32_t d = 0; d < e->device_count; d++) {
		const struct dq_provider *p = e->devices[d].provider;
		struct dq_error perr = { 0 };
		int rc = p->mem_any_thread == any_thread ? p->mem_register(e->devices[d].dev, &desc, &a->on[d], &perr) : 0;
		if (rc) {
			a->on[d] = NULL;
			return eng_error(a->err, rc, "%s", perr.text);
		}
	}
	return 0;
}

static void deregister_on(struct dq_engine *e, struct mem_add *a, bool any_thread)
{
	for (uint32_t d = 0; d < e->device_count; d++) {
		if (a->on[d] && e->devices[d].provider->mem_any_thread == any_thread) {
			e->devices[d].provider->mem_deregister(a->on[d]);
			a->on[d] = NULL;
		}
	}
}

static void mem_add(struct dq_engine *e, void *arg)
{
	struct mem_add *a = arg;
	struct eng_client *c;
	struct eng_mem *m;
	uint32_t i;
	mem_reserve(e, a); /* again: another thread may have used the quota up meanwhile */
	if (a->rc)
		return;
	c = eng_client_at(e, a->client);
	i = dq_slab_alloc(&e->mems);
	if (i == DQ_NONE) {
		a->rc = eng_error(a->err, -ENOMEM, "memory: too many regions");
		return;
	}
	a->rc = register_on(e, a, false);
	if (a->rc) {
		deregister_on(e, a, false);
		dq_slab_free(&e->mems, i);
		return;
	}
	m = eng_mem_at(e, i);
	m->client = a->client;
	m->addr = a->addr;
	m->bytes = a->bytes;
	m->mapped = a->mapped;
	m->fd = a->fd;
	m->staging = a->staging;
	m->prev = DQ_NONE;
	m->next = c->mems_head;
	if (m->next != DQ_NONE)
		eng_mem_at(e, m->next)->prev = i;
	c->mems_head = i;
	c->mem_count++;
	c->mem_bytes += a->mapped;
	e->mem_bytes += a->mapped;
	if (a->staging) {
		c->staging_bytes += a->mapped;
		e->staging_bytes += a->mapped;
	}
	for (uint32_t d = 0; d < e->device_count; d++) {
		m->on[d] = a->on[d];
		e->devices[d].regions++;
	}
	*a->mem = i;
}

/* On the caller's thread: pinning pages can take long, and the engine must not wait for it. */
static int add(struct dq_engine *e, struct mem_add *a)
{
	int rc = register_on(e, a, true);
	if (!rc) {
		rc = eng_call(e, mem_add, a);
		rc = rc ? rc : a->rc;
	}
	if (rc)
		deregister_on(e, a, true);
	return rc;
}

/* Called on the caller's thread: allocating pages can take long, too. */
int dq_engine_mem_alloc(dq_engine *e, uint32_t client, uint64_t bytes, uint8_t staging, uint32_t *mem, int *fd,
			uint64_t *mapped_bytes, struct dq_text *err)
{
	struct mem_add a = { .client = client, .bytes = bytes, .fd = -1, .dmabuf_fd = -1, .staging = staging, .mem = mem, .err = err };
	int rc, out = -1;

	if (bytes == 0 || bytes > 1ull << 46)
		return eng_error(err, -EINVAL, "memory: %llu bytes asked for; at least 1 and at most 64 TiB", (unsigned long long)bytes);
	a.mapped = (bytes + PAGE - 1) & ~(uint64_t)(PAGE - 1);
	rc = eng_call(e, mem_reserve, &a);
	if (rc || a.rc)
		return rc ? rc : a.rc;
	a.fd = memfd_create(staging ? "dqplb-staging" : "dqplb-memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (a.fd < 0)
		return eng_error(err, -errno, "memory: memfd_create: %s", strerror(errno));
	/* Pages exist from the start: later there is no "out of memory" in the middle of a transfer. */
	rc = ftruncate(a.fd, (off_t)a.mapped) || fallocate(a.fd, 0, 0, (off_t)a.mapped) ||
	     fcntl(a.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) ? -errno : 0;
	if (rc) {
		eng_error(err, rc, "memory: cannot allocate %llu bytes: %s", (unsigned long long)a.mapped, strerror(-rc));
		goto fail;
	}
	a.addr = mmap(NULL, a.mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, a.fd, 0);
	if (a.addr == MAP_FAILED) {
		a.addr = NULL;
		rc = eng_error(err, -errno, "memory: cannot map %llu bytes: %s", (unsigned long long)a.mapped, strerror(errno));
		goto fail;
	}
	(void)madvise(a.addr, a.mapped, MADV_DONTFORK);
	out = fcntl(a.fd, F_DUPFD_CLOEXEC, 0);
	if (out < 0) {
		rc = eng_error(err, -errno, "memory: no file descriptor: %s", strerror(errno));
		goto fail;
	}
	rc = add(e, &a);
	if (rc)
		goto fail;
	*fd = out;
	*mapped_bytes = a.mapped;
	return 0;
fail:
	if (a.addr)
		munmap(a.addr, a.mapped);
	if (out >= 0)
		close(out);
	close(a.fd);
	return rc;
}

struct mem_look {
	uint32_t owner, mem;
	uint64_t bytes, mapped;
	int fd;              /* the caller's */
	int rc;
};

static void mem_look(struct dq_engine *e, void *arg)
{
	struct mem_look *a = arg;
	const struct eng_mem *m = eng_mem_at(e, a->mem);
	a->rc = -ENOENT;
	if (!m || m->client != a->owner || m->dead || m->staging || m->fd < 0)
		return;
	a->bytes = m->bytes;
	a->mapped = m->mapped;
	a->fd = fcntl(m->fd, F_DUPFD_CLOEXEC, 0);
	a->rc = a->fd < 0 ? -errno : 0;
}

int dq_engine_mem_share(dq_engine *e, uint32_t client, uint32_t owner, uint32_t owner_mem, uint32_t *mem, uint64_t *bytes,
			struct dq_text *err)
{
	struct mem_look look = { .owner = owner, .mem = owner_mem, .fd = -1 };
	struct mem_add a = { .client = client, .dmabuf_fd = -1, .mem = mem, .err = err };
	int rc = eng_call(e, mem_look, &look);

	rc = rc ? rc : look.rc;
	if (rc)
		return eng_error(err, rc, "memory: client %u has no memory %u that can be shared: %s", owner, owner_mem, strerror(-rc));
	a.fd = look.fd;
	a.bytes = look.bytes;
	a.mapped = look.mapped;
	rc = eng_call(e, mem_reserve, &a);
	rc = rc ? rc : a.rc;
	if (!rc) {
		a.addr = mmap(NULL, a.mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, a.fd, 0);
		if (a.addr == MAP_FAILED) {
			a.addr = NULL;
			rc = eng_error(err, -errno, "memory: cannot map %llu bytes: %s", (unsigned long long)a.mapped, strerror(errno));
		} else {
			(void)madvise(a.addr, a.mapped, MADV_DONTFORK);
			rc = add(e, &a);
		}
	}
	if (rc) {
		if (a.addr)
			munmap(a.addr, a.mapped);
		close(a.fd);
		return rc;
	}
	*bytes = a.bytes;
	return 0;
}

int dq_engine_mem_dmabuf(dq_engine *e, uint32_t client, int fd, uint64_t offset, uint64_t bytes, uint32_t *mem, struct dq_text *err)
{
	struct mem_add a = { .client = client, .bytes = bytes, .fd = -1, .dmabuf_fd = fd, .dmabuf_offset = offset, .mem = mem, .err = err };
	struct statfs fs;
	int rc;
	/* Any other kind of file could be truncated by its owner while a device writes into it. */
	if (fstatfs(fd, &fs) || fs.f_type != DMA_BUF_FS_MAGIC)
		return eng_error(err, -EINVAL, "dma-buf: the file descriptor is not a dma-buf: use the fd that the GPU driver exports, or "
				 "dqplb_mem_register() for host memory");
	if (bytes == 0 || offset > UINT64_MAX - bytes)
		return eng_error(err, -EINVAL, "dma-buf: offset %llu with %llu bytes is no range", (unsigned long long)offset,
				 (unsigned long long)bytes);
	rc = eng_call(e, mem_reserve, &a);
	return rc ? rc : a.rc ? a.rc : add(e, &a);
}

struct mem_free {
	uint32_t client, mem;
	int rc;
};

static void mem_free(struct dq_engine *e, void *arg)
{
	struct mem_free *a = arg;
	struct eng_client *c = eng_client_at(e, a->client);
	struct eng_mem *m = eng_mem_at(e, a->mem);
	uint32_t next;
	a->rc = -ENOENT;
	if (!c || !m || m->client != a->client || m->dead)
		return;
	a->rc = 0;
	if (!c->dying)
		eng_client_poll(e, c); /* what it submitted before it freed the memory comes first */
	m = eng_mem_at(e, a->mem);
	if (!m || m->dead)
		return; /* the client was cut off by what it submitted */
	m->refs++;      /* hold it over the cancellations */
	for (uint32_t f = c->flows_head; f != DQ_NONE; f = next) {
		struct dq_flow *flow = dq_flow_at(&e->pools, f);
		next = flow->user_next;
		if (flow->vc) {
			dq_vc_cancel_mem(flow->vc, f, (uint64_t)a->mem + 1, e->now_ns);
			eng_vc_touch(e, eng_vc_of(flow->vc));
		}
	}
	m->dead = true;
	eng_mem_unref(e, a->mem);
}

int dq_engine_mem_free(dq_engine *e, uint32_t client, uint32_t mem)
{
	struct mem_free a = { client, mem, 0 };
	int rc = eng_call(e, mem_free, &a);
	return rc ? rc : a.rc;
}
