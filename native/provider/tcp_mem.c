/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Registered memory of a tcp device. A peer names it by a random key and an offset: no address of this process leaves it.
 * The low 20 bits of the key are the slot of the table, the other 44 are random; a wrong guess costs the peer its QP.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "provider/tcp.h"

#define SLOT_BITS 20u
#define SLOT_MASK ((1u << SLOT_BITS) - 1u)
#define DMA_BUF_FS_MAGIC 0x444d4142 /* "DMAB", the file system every dma-buf lives in */

static int map_dmabuf(struct dq_tcp_mem *mem, const struct dq_mem_desc *desc, struct dq_error *err)
{
	struct statfs fs;
	const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	const uint64_t skip = desc->dmabuf_offset % page;

	if (fstatfs(desc->dmabuf_fd, &fs) != 0)
		return dq_error_set(err, -errno, "dma-buf fd %d: %s", desc->dmabuf_fd, strerror(errno));
	if ((uint32_t)fs.f_type != (uint32_t)DMA_BUF_FS_MAGIC)
		return dq_error_set(err, -EINVAL, "fd %d is not a dma-buf (file system 0x%lx, expected 0x%x)", desc->dmabuf_fd,
				    (unsigned long)fs.f_type, DMA_BUF_FS_MAGIC);
	off_t size = lseek(desc->dmabuf_fd, 0, SEEK_END);
	if (size < 0 || desc->dmabuf_offset > (uint64_t)size || desc->len > (uint64_t)size - desc->dmabuf_offset)
		return dq_error_set(err, -EINVAL, "dma-buf fd %d holds %lld bytes, registration wants %llu from offset %llu",
				    desc->dmabuf_fd, (long long)size, (unsigned long long)desc->len,
				    (unsigned long long)desc->dmabuf_offset);
	mem->fd = fcntl(desc->dmabuf_fd, F_DUPFD_CLOEXEC, 3);
	if (mem->fd < 0)
		return dq_error_set(err, -errno, "dup of dma-buf fd %d: %s", desc->dmabuf_fd, strerror(errno));
	mem->map_len = (size_t)(desc->len + skip);
	mem->map = mmap(NULL, mem->map_len, PROT_READ | PROT_WRITE, MAP_SHARED, mem->fd, (off_t)(desc->dmabuf_offset - skip));
	if (mem->map == MAP_FAILED) {
		int code = -errno;
		mem->map = NULL;
		close(mem->fd);
		return dq_error_set(err, code, "dma-buf fd %d cannot be mapped by the CPU: %s; its exporter does not offer it, "
				    "use host memory on this device", desc->dmabuf_fd, strerror(-code));
	}
	mem->base = (uint8_t *)mem->map + skip;
	return 0;
}

static int take_slot(struct dq_tcp_device *dev, uint32_t *slot)
{
	uint32_t i = dev->mems_free;
	while (i < dev->mems_cap && dev->mems[i])
		i++;
	if (i == dev->mems_cap) {
		uint32_t cap = dev->mems_cap ? dev->mems_cap * 2 : 64;
		if (cap > SLOT_MASK + 1)
			return -ENOSPC;
		struct dq_tcp_mem **mems = realloc(dev->mems, cap * sizeof(*mems));
		if (!mems)
			return -ENOMEM;
		memset(mems + dev->mems_cap, 0, (cap - dev->mems_cap) * sizeof(*mems));
		dev->mems = mems;
		dev->mems_cap = cap;
	}
	*slot = i;
	dev->mems_free = i + 1;
	return 0;
}

int dq_tcp_mem_register(struct dq_device *device, const struct dq_mem_desc *desc, struct dq_mem **out, struct dq_error *err)
{
	struct dq_tcp_device *dev = dq_tcp_device_of(device);
	uint32_t slot;
	uint64_t random;

	if (desc->len == 0 || (desc->dmabuf_fd < 0 && (!desc->addr || (uintptr_t)desc->addr + desc->len < desc->len)))
		return dq_error_set(err, -EINVAL, "memory at %p of %llu bytes: expected an address and a length above 0", desc->addr,
				    (unsigned long long)desc->len);
	struct dq_tcp_mem *mem = calloc(1, sizeof *mem);
	if (!mem)
		return dq_error_set(err, -ENOMEM, "no memory for a registration");
	mem->dev = dev;
	mem->len = desc->len;
	mem->access = desc->access;
	mem->fd = -1;
	mem->base = desc->addr;
	if (getrandom(&random, sizeof random, 0) != (ssize_t)sizeof random) {
		free(mem);
		return dq_error_set(err, -EIO, "getrandom for a memory key failed: %s", strerror(errno));
	}
	int rc = desc->dmabuf_fd >= 0 ? map_dmabuf(mem, desc, err) : 0;
	if (rc) {
		free(mem);
		return rc;
	}
	rc = take_slot(dev, &slot);
	if (rc) {
		if (mem->map)
			munmap(mem->map, mem->map_len);
		if (mem->fd >= 0)
			close(mem->fd);
		free(mem);
		return dq_error_set(err, rc, "device %s: %u registrations are in use, no more fit", dev->cfg.name, dev->mems_cap);
	}
	mem->key = (random & ~(uint64_t)SLOT_MASK) | slot;
	dev->mems[slot] = mem;
	*out = (struct dq_mem *)(void *)mem;
	return 0;
}

void dq_tcp_mem_deregister(struct dq_mem *m)
{
	struct dq_tcp_mem *mem = dq_tcp_mem_of(m);
	if (!mem)
		return;
	struct dq_tcp_device *dev = mem->dev;
	uint32_t slot = (uint32_t)mem->key & SLOT_MASK;

	/* The caller promises that nothing uses it; a peer promised nothing and may be in the middle of a write. */
	for (uint32_t i = 0; mem->uses && i < dev->qps_cap; i++)
		if (dev->qps[i])
			dq_tcp_qp_forget(dev->qps[i], mem);
	dev->mems[slot] = NULL;
	dev->mems_free = DQ_MIN(dev->mems_free, slot);
	if (mem->map)
		munmap(mem->map, mem->map_len);
	if (mem->fd >= 0)
		close(mem->fd);
	free(mem);
}

int dq_tcp_mem_key(const struct dq_mem *m, uint64_t offset, uint64_t len, struct dq_mem_key *out)
{
	const struct dq_tcp_mem *mem = (const struct dq_tcp_mem *)(const void *)m;
	if (offset > mem->len || len > mem->len - offset)
		return -ERANGE;
	out->addr = offset;
	out->key = mem->key;
	return 0;
}

int dq_tcp_mem_flush(struct dq_mem *m, uint64_t offset)
{
	return offset <= dq_tcp_mem_of(m)->len ? 0 : -EINVAL; /* the CPU wrote it: it is there when its completion is */
}

/* The interface of /dev/udmabuf, stable; its header is not on every build machine. */
struct udmabuf_request {
	uint32_t memfd;
	uint32_t flags;
	uint64_t offset;
	uint64_t size;
};

bool dq_tcp_mem_probe_dmabuf(struct dq_tcp_device *dev)
{
	bool works = false;
	const long page = sysconf(_SC_PAGESIZE);
	int udmabuf = open("/dev/udmabuf", O_RDWR | O_CLOEXEC);
	int memfd = udmabuf < 0 ? -1 : memfd_create("dqplbd-probe", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (memfd >= 0 && ftruncate(memfd, page) == 0 && fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK) == 0) {
		struct udmabuf_request req = {.memfd = (uint32_t)memfd, .flags = 1 /* close on exec */, .size = (uint64_t)page};
		int fd = ioctl(udmabuf, _IOW('u', 0x42, struct udmabuf_request), &req);
		if (fd >= 0) {
			const struct dq_mem_desc desc = {.len = (uint64_t)page, .dmabuf_fd = fd, .access = DQ_ACCESS_REMOTE_WRITE};
			struct dq_mem *mem;
			if (dq_tcp_mem_register((struct dq_device *)(void *)dev, &desc, &mem, NULL) == 0) {
				volatile uint8_t *p = dq_tcp_mem_of(mem)->base;
				uint8_t seen = 0;
				*p = 0x5a;
				works = pread(memfd, &seen, 1, 0) == 1 && seen == 0x5a;
				dq_tcp_mem_deregister(mem);
			}
			close(fd);
		}
	}
	if (memfd >= 0)
		close(memfd);
	if (udmabuf >= 0)
		close(udmabuf);
	return works;
}
