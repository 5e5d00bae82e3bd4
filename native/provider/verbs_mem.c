/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Registered memory of a verbs device. Registering pins pages and is done by the caller's thread; giving them back takes as
 * long and is done by a thread of the device, so that nobody waits for it. Until it has, a peer that knows the key can still
 * write there; the pages are pinned so long, and nobody else's.
 *
 * What is larger than one registration may be is registered in pieces that overlap by half: piece i covers [i*S, i*S + 2S),
 * so every range up to S lies in one piece and has one key.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "provider/verbs.h"

#define SMALL_BYTES 65536u /* unpinned at once: that takes no longer than waking a thread */

struct dq_verbs_reaper {
	pthread_t thread;
	pthread_cond_t changed;                /* with dev->mem_lock */
	struct dq_verbs_list dead;             /* to be deregistered */
	uint32_t busy;                         /* being deregistered */
	bool stop;
};

static struct dq_verbs_mem *mem_of_node(struct dq_verbs_list *node)
{
	return (struct dq_verbs_mem *)(void *)((char *)node - offsetof(struct dq_verbs_mem, node));
}

static const struct dq_verbs_mem *mem_const(const struct dq_mem *m)
{
	return (const struct dq_verbs_mem *)(const void *)m;
}

/* ---- the thread that gives memory back ---- */

static void mem_free(struct dq_verbs_mem *mem)
{
	for (uint32_t i = 0; i < mem->pieces; i++)
		if (mem->mr[i])
			mem->dev->lib->dereg_mr(mem->mr[i]);
	free(mem);
}

static void *reap(void *arg)
{
	struct dq_verbs_device *dev = arg;
	struct dq_verbs_reaper *r = dev->reaper;

	pthread_setname_np(pthread_self(), "dq-unpin");
	pthread_mutex_lock(&dev->mem_lock);
	for (;;) {
		while (dq_verbs_list_empty(&r->dead) && !r->stop)
			pthread_cond_wait(&r->changed, &dev->mem_lock);
		if (dq_verbs_list_empty(&r->dead))
			break;
		struct dq_verbs_mem *mem = mem_of_node(r->dead.next);
		dq_verbs_list_remove(&mem->node);
		r->busy++;
		pthread_mutex_unlock(&dev->mem_lock);
		mem_free(mem);
		pthread_mutex_lock(&dev->mem_lock);
		r->busy--;
		pthread_cond_broadcast(&r->changed);
	}
	pthread_mutex_unlock(&dev->mem_lock);
	return NULL;
}

int dq_verbs_mem_start(struct dq_verbs_device *dev, struct dq_error *err)
{
	struct dq_verbs_reaper *r = calloc(1, sizeof *r);
	sigset_t all, before;

	if (!r)
		return dq_error_set(err, -ENOMEM, "device %s: no memory", dev->cfg.name);
	pthread_cond_init(&r->changed, NULL);
	dq_verbs_list_init(&r->dead);
	dev->reaper = r;
	sigfillset(&all); /* signals are for the threads of the program */
	pthread_sigmask(SIG_SETMASK, &all, &before);
	int rc = pthread_create(&r->thread, NULL, reap, dev);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (rc) {
		pthread_cond_destroy(&r->changed);
		free(r);
		dev->reaper = NULL;
		return dq_error_set(err, -rc, "device %s: no thread for releasing memory: %s", dev->cfg.name, strerror(rc));
	}
	return 0;
}

void dq_verbs_mem_stop(struct dq_verbs_device *dev)
{
	struct dq_verbs_reaper *r = dev->reaper;

	dq_verbs_flush_end(dev);
	if (!r)
		return;
	pthread_mutex_lock(&dev->mem_lock);
	while (!dq_verbs_list_empty(&dev->mems)) { /* gone by contract */
		struct dq_verbs_list *node = dev->mems.next;
		dq_verbs_list_remove(node);
		dq_verbs_list_add(&r->dead, node);
	}
	r->stop = true;
	pthread_cond_broadcast(&r->changed);
	pthread_mutex_unlock(&dev->mem_lock);
	pthread_join(r->thread, NULL);
	pthread_cond_destroy(&r->changed);
	free(r);
	dev->reaper = NULL;
}

/* What is being given back counts against the limit of locked memory until it is. False: there was nothing to wait for. */
static bool wait_for_reaper(struct dq_verbs_device *dev)
{
	struct dq_verbs_reaper *r = dev->reaper;
	bool waited = false;

	pthread_mutex_lock(&dev->mem_lock);
	while (!dq_verbs_list_empty(&r->dead) || r->busy) {
		waited = true;
		pthread_cond_wait(&r->changed, &dev->mem_lock);
	}
	pthread_mutex_unlock(&dev->mem_lock);
	return waited;
}

/* ---- registering ---- */

struct ibv_mr *dq_verbs_mr_make(struct dq_verbs_device *dev, void *addr, size_t len, unsigned access)
{
	return dev->lib->reg_mr(dev->pd, addr, len, (int)access);
}

/* Bulk memory is that which peers write to. There the order of writes on the way to memory is free until the completion, which
 * is never relaxed; control messages are read as they come, and stay strictly ordered. A kernel that does not know the flag
 * ignores it. */
static unsigned access_of(unsigned wanted)
{
	unsigned access = IBV_ACCESS_LOCAL_WRITE;

	if (wanted & DQ_ACCESS_REMOTE_WRITE) /* read also, by the device itself: see dq_verbs_mem_flush. Data QPs refuse reads. */
		access |= IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING;
	if (wanted & DQ_ACCESS_REMOTE_READ)
		access |= IBV_ACCESS_REMOTE_READ;
	return access;
}

static struct ibv_mr *register_piece(struct dq_verbs_device *dev, const struct dq_mem_desc *desc, uint64_t offset, uint64_t len,
				     unsigned access)
{
	const unsigned plain = access & ~(unsigned)IBV_ACCESS_RELAXED_ORDERING;
	struct ibv_mr *mr = NULL;

	errno = 0;
	if (desc->dmabuf_fd >= 0) {
		const uint64_t at = desc->dmabuf_offset + offset;
		mr = dev->lib->reg_dmabuf_mr(dev->pd, at, len, at, desc->dmabuf_fd, (int)access);
		if (!mr && (errno == EINVAL || errno == EOPNOTSUPP) && access != plain)
			mr = dev->lib->reg_dmabuf_mr(dev->pd, at, len, at, desc->dmabuf_fd, (int)plain);
		return mr;
	}
	uint8_t *addr = (uint8_t *)desc->addr + offset;
	if (access != plain && dev->lib->reg_mr_iova2)
		mr = dev->lib->reg_mr_iova2(dev->pd, addr, len, (uintptr_t)addr, access);
	if (!mr && (errno == 0 || errno == EINVAL || errno == EOPNOTSUPP))
		mr = dev->lib->reg_mr(dev->pd, addr, len, (int)plain);
	return mr;
}

static int register_all(struct dq_verbs_mem *mem, const struct dq_mem_desc *desc)
{
	const unsigned access = access_of(desc->access);

	for (uint32_t i = 0; i < mem->pieces; i++) {
		const uint64_t begin = i * mem->step, len = mem->pieces == 1 ? mem->len : DQ_MIN(2 * mem->step, mem->len - begin);
		mem->mr[i] = register_piece(mem->dev, desc, begin, len, access);
		if (!mem->mr[i]) {
			const int code = errno ? -errno : -EIO;
			while (i-- > 0) {
				mem->dev->lib->dereg_mr(mem->mr[i]);
				mem->mr[i] = NULL;
			}
			return code;
		}
	}
	return 0;
}

static int refused(const struct dq_verbs_device *dev, const struct dq_mem_desc *desc, int code, struct dq_error *err)
{
	struct rlimit limit = {.rlim_cur = RLIM_INFINITY};

	getrlimit(RLIMIT_MEMLOCK, &limit);
	if (desc->dmabuf_fd >= 0)
		return dq_error_set(err, code, "device %s: %s cannot register %llu bytes of dma-buf fd %d: %s; %s", dev->cfg.name, dev->cfg.address,
				    (unsigned long long)desc->len, desc->dmabuf_fd, strerror(-code),
				    code == -EOPNOTSUPP || code == -EPROTONOSUPPORT ? "its driver does not take dma-buf: use host memory on this device" :
				    "expected a dma-buf that holds so many bytes, of a device that this one can reach");
	if ((code == -ENOMEM || code == -EAGAIN || code == -EPERM) && limit.rlim_cur != RLIM_INFINITY)
		return dq_error_set(err, code, "device %s: %llu bytes cannot be registered: %s; this process may lock %llu bytes of memory "
				    "(RLIMIT_MEMLOCK): set LimitMEMLOCK=infinity for its service, or give it CAP_IPC_LOCK", dev->cfg.name,
				    (unsigned long long)desc->len, strerror(-code), (unsigned long long)limit.rlim_cur);
	return dq_error_set(err, code, "device %s: %s cannot register %llu bytes at %p: %s", dev->cfg.name, dev->cfg.address,
			    (unsigned long long)desc->len, desc->addr, strerror(-code));
}

int dq_verbs_mem_register(struct dq_device *device, const struct dq_mem_desc *desc, struct dq_mem **out, struct dq_error *err)
{
	struct dq_verbs_device *dev = dq_verbs_device_of(device);
	const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

	if (desc->len == 0 || (desc->dmabuf_fd < 0 && (!desc->addr || (uintptr_t)desc->addr + desc->len < desc->len)) ||
	    (desc->dmabuf_fd >= 0 && desc->dmabuf_offset > UINT64_MAX - desc->len))
		return dq_error_set(err, -EINVAL, "memory at %p of %llu bytes: expected an address and a length above 0", desc->addr,
				    (unsigned long long)desc->len);
	if (desc->dmabuf_fd >= 0 && !dev->lib->reg_dmabuf_mr)
		return dq_error_set(err, -EOPNOTSUPP, "device %s: this libibverbs is too old for dma-buf: use host memory, or rdma-core 34 or newer",
				    dev->cfg.name);
	uint64_t step = desc->len, pieces = 1;
	if (desc->len > dev->piece_limit) {
		step = DQ_MAX(dev->piece_limit / 2 / page * page, page);
		pieces = DQ_MAX((desc->len + step - 1) / step - 1, 1u);
	}
	if (pieces > DQ_VERBS_MAX_PIECES)
		return dq_error_set(err, -E2BIG, "device %s: %llu bytes would take %llu registrations of %llu bytes; at most %u are made: raise the "
				    "largest registration of the device", dev->cfg.name, (unsigned long long)desc->len, (unsigned long long)pieces,
				    (unsigned long long)dev->piece_limit, DQ_VERBS_MAX_PIECES);
	struct dq_verbs_mem *mem = calloc(1, sizeof *mem + (size_t)pieces * sizeof mem->mr[0]);
	if (!mem)
		return dq_error_set(err, -ENOMEM, "no memory for a registration");
	mem->dev = dev;
	mem->base = desc->dmabuf_fd >= 0 ? desc->dmabuf_offset : (uintptr_t)desc->addr;
	mem->len = desc->len;
	mem->step = step;
	mem->pieces = (uint32_t)pieces;
	int rc = register_all(mem, desc);
	if ((rc == -ENOMEM || rc == -EAGAIN) && wait_for_reaper(dev))
		rc = register_all(mem, desc);
	if (rc) {
		free(mem);
		return refused(dev, desc, rc, err);
	}
	pthread_mutex_lock(&dev->mem_lock);
	dq_verbs_list_add(&dev->mems, &mem->node);
	pthread_mutex_unlock(&dev->mem_lock);
	*out = (struct dq_mem *)(void *)mem;
	return 0;
}

void dq_verbs_mem_deregister(struct dq_mem *m)
{
	struct dq_verbs_mem *mem = dq_verbs_mem_of(m);
	if (!mem)
		return;
	struct dq_verbs_device *dev = mem->dev;
	const bool small = mem->len <= SMALL_BYTES;

	pthread_mutex_lock(&dev->mem_lock);
	dq_verbs_list_remove(&mem->node);
	if (!small) {
		dq_verbs_list_add(&dev->reaper->dead, &mem->node);
		pthread_cond_broadcast(&dev->reaper->changed);
	}
	pthread_mutex_unlock(&dev->mem_lock);
	if (small)
		mem_free(mem);
}

int dq_verbs_mem_key(const struct dq_mem *m, uint64_t offset, uint64_t len, struct dq_mem_key *out)
{
	const struct dq_verbs_mem *mem = mem_const(m);

	if (offset > mem->len || len > mem->len - offset)
		return -ERANGE;
	const uint32_t piece = (uint32_t)DQ_MIN(offset / mem->step, mem->pieces - 1u);
	if (mem->pieces > 1 && offset + len > (piece + 2u) * mem->step)
		return -ERANGE;
	out->addr = mem->base + offset;
	out->key = mem->mr[piece]->rkey;
	return 0;
}

int dq_verbs_mem_flush(struct dq_mem *m, uint64_t offset)
{
	const struct dq_verbs_mem *mem = dq_verbs_mem_of(m);
	struct dq_mem_key key;

	/* One byte anywhere in it is enough; behind the last one it is the last. */
	if (offset > mem->len || dq_verbs_mem_key(m, DQ_MIN(offset, mem->len - 1), 1, &key) != 0)
		return -EINVAL;
	return dq_verbs_flush_read(mem->dev, key.addr, (uint32_t)key.key);
}

/* ---- does the device take dma-buf? ---- */

/* The interface of /dev/udmabuf, stable; its header is not on every build machine. */
struct udmabuf_request {
	uint32_t memfd;
	uint32_t flags;
	uint64_t offset;
	uint64_t size;
};

/* A real dma-buf of host pages, registered with the device itself. */
static bool probe_udmabuf(struct dq_verbs_device *dev, bool *tried)
{
	const long page = sysconf(_SC_PAGESIZE);
	bool works = false;
	int udmabuf = open("/dev/udmabuf", O_RDWR | O_CLOEXEC);
	int memfd = udmabuf < 0 ? -1 : memfd_create("dqplbd-probe", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (memfd >= 0 && ftruncate(memfd, page) == 0 && fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK) == 0) {
		struct udmabuf_request req = {.memfd = (uint32_t)memfd, .flags = 1 /* close on exec */, .size = (uint64_t)page};
		int fd = ioctl(udmabuf, _IOW('u', 0x42, struct udmabuf_request), &req);
		if (fd >= 0) {
			struct ibv_mr *mr = dev->lib->reg_dmabuf_mr(dev->pd, 0, (size_t)page, 0, fd, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
			*tried = true;
			works = mr != NULL;
			if (mr)
				dev->lib->dereg_mr(mr);
			close(fd);
		}
	}
	if (memfd >= 0)
		close(memfd);
	if (udmabuf >= 0)
		close(udmabuf);
	return works;
}

bool dq_verbs_mem_probe_dmabuf(struct dq_verbs_device *dev)
{
	bool tried = false;

	if (!dev->lib->reg_dmabuf_mr)
		return false;
	const bool works = probe_udmabuf(dev, &tried);
	if (tried)
		return works;
	/* No dma-buf can be made here to try it with: a descriptor that is none is refused as bad by a driver that knows them
	 * (EBADF, EINVAL), and as not supported by one that does not. */
	errno = 0;
	struct ibv_mr *mr = dev->lib->reg_dmabuf_mr(dev->pd, 0, 4096, 0, -1, IBV_ACCESS_LOCAL_WRITE);
	if (mr)
		dev->lib->dereg_mr(mr);
	return mr || errno == EBADF;
}
