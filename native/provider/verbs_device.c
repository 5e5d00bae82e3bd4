/* SPDX-License-Identifier: Apache-2.0 */
/* A verbs device: find, open, measure, query and close it. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

#include "provider/verbs.h"

#define SCRATCH_BYTES 8192u /* the probe that is sent, and where probes end: what comes in is never read */
#define PROBE_PATTERN 0xd5
#define NOISE_WAITS 24
#define NOISE_WAIT_NS 100000u
#define VENDOR_RXE 0xffffffu
#define VENDOR_SIW 0x626d74u

/* Wire bytes beside the payload of a packet that is neither the first nor the last of its message. */
#define ETHERNET_BYTES 38u   /* preamble 8, header 14, checksum 4, gap 12 */
#define UDP_BYTES 8u
#define BTH_ICRC_BYTES 16u   /* base transport header 12, invariant checksum 4 */
#define GRH_BYTES 40u        /* also the size of an IPv6 header */
#define IPV4_BYTES 20u
#define LRH_VCRC_BYTES 10u   /* InfiniBand: local route header 8, variant checksum 2 */

static uint32_t header_bytes(const struct dq_verbs_device *dev, const struct dq_verbs_port *port)
{
	static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};

	if (dev->infiniband)
		return LRH_VCRC_BYTES + BTH_ICRC_BYTES;
	if (port->gid_type != IBV_GID_TYPE_ROCE_V2)
		return ETHERNET_BYTES + GRH_BYTES + BTH_ICRC_BYTES;
	return ETHERNET_BYTES + UDP_BYTES + BTH_ICRC_BYTES + (memcmp(port->gid.raw, mapped, sizeof mapped) == 0 ? IPV4_BYTES : GRH_BYTES);
}

void dq_verbs_device_query(struct dq_device *device, struct dq_device_attr *out)
{
	struct dq_verbs_device *dev = dq_verbs_device_of(device);
	struct dq_verbs_port port;

	dq_verbs_port_refresh(dev); /* no event tells of another MTU */
	dq_verbs_port_now(dev, &port);
	*out = dev->told;
	out->rate_bps = port.rate_bps;
	/* Software sends when the CPU gets to it: its rate is known only where somebody tells it. */
	out->line_rate_bps = dev->software && !dev->cfg.rate_bps ? 0 : port.rate_bps;
	out->mtu = dq_verbs_mtu_bytes(port.mtu);
	out->header_bytes = header_bytes(dev, &port);
	out->up = port.up;
	snprintf(out->address, sizeof out->address, "%s", port.gid_text);
}

static int ascending(const void *a, const void *b)
{
	const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return (x > y) - (x < y);
}

/*
 * How late this machine wakes a thread, with a margin: four times the median of some waits. Nothing in simulated time. Not the
 * worst: the host may be starting everything at once, and this value stays; and the window looks at the least delay of a whole
 * round trip, which one late wake-up does not touch.
 */
static uint64_t measure_noise(void)
{
	uint64_t late[NOISE_WAITS];

	for (int i = 0; i < NOISE_WAITS; i++) {
		const struct timespec wait = {.tv_nsec = NOISE_WAIT_NS};
		const uint64_t before = dq_verbs_now();
		ppoll(NULL, 0, &wait, NULL);
		const uint64_t took = dq_verbs_now() - before;
		late[i] = took > NOISE_WAIT_NS ? took - NOISE_WAIT_NS : 0;
	}
	qsort(late, NOISE_WAITS, sizeof *late, ascending);
	return DQ_MIN(DQ_MAX(late[NOISE_WAITS / 2] * 4, 1000u), 20000000u);
}

/* ---- open ---- */

static int open_failed(const struct dq_verbs_device *dev, struct ibv_device *ibdev, int code, struct dq_error *err)
{
	if (code == -EACCES || code == -EPERM)
		return dq_error_set(err, code, "device %s: %s may not be opened: no permission on /dev/infiniband/%s; run as root, or put this "
				    "user into the group that owns it", dev->cfg.name, dev->cfg.address, ibdev->dev_name);
	if (code == -ENOENT || code == -ENODEV || code == -ENXIO)
		return dq_error_set(err, code, "device %s: %s is there but /dev/infiniband/%s is not (%s): load the module ib_uverbs, and in a "
				    "container pass the device in", dev->cfg.name, dev->cfg.address, ibdev->dev_name, strerror(-code));
	return dq_error_set(err, code, "device %s: %s cannot be opened: %s", dev->cfg.name, dev->cfg.address, strerror(-code));
}

static int open_by_name(struct dq_verbs_device *dev, struct dq_error *err)
{
	int n = 0, rc = 0;
	size_t used = 0;
	char names[128] = "none";
	struct ibv_device *found = NULL;

	errno = 0;
	struct ibv_device **list = dev->lib->get_device_list(&n);
	if (!list) {
		int code = errno ? -errno : -ENODEV;
		if (code == -ENOSYS)
			return dq_error_set(err, code, "device %s: the kernel has no RDMA core: load the module ib_uverbs and the driver of the "
					    "device", dev->cfg.name);
		return dq_error_set(err, code, "device %s: RDMA devices cannot be listed: %s", dev->cfg.name, strerror(-code));
	}
	for (int i = 0; i < n; i++) {
		const char *name = dev->lib->get_device_name(list[i]);
		if (strcmp(name, dev->cfg.address) == 0)
			found = list[i];
		int len = snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", name);
		if (len > 0)
			used = DQ_MIN(used + (size_t)len, sizeof names - 1);
	}
	if (!found) {
		rc = dq_error_set(err, -ENODEV, "device %s: no RDMA device \"%s\"; there are: %s", dev->cfg.name, dev->cfg.address, names);
	} else if (found->transport_type == IBV_TRANSPORT_IWARP) {
		rc = dq_error_set(err, -EPROTONOSUPPORT, "device %s: %s is an iWARP device; expected RoCE or InfiniBand", dev->cfg.name,
				  dev->cfg.address);
	} else {
		errno = 0;
		dev->ctx = dev->lib->open_device(found);
		if (!dev->ctx)
			rc = open_failed(dev, found, errno ? -errno : -EIO, err);
	}
	dev->lib->free_device_list(list);
	return rc;
}

static int set_nonblocking(int fd)
{
	int flags = fcntl(fd, F_GETFL);
	return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ? -errno : 0;
}

static int open_watch(struct dq_verbs_device *dev, struct dq_error *err)
{
	dev->epfd = epoll_create1(EPOLL_CLOEXEC);
	dev->channel = dev->epfd < 0 ? NULL : dev->lib->create_comp_channel(dev->ctx);
	int rc = dev->epfd < 0 || !dev->channel ? -errno : set_nonblocking(dev->channel->fd);
	if (!rc)
		rc = set_nonblocking(dev->ctx->async_fd);
	struct epoll_event ev = {.events = EPOLLIN, .data.u32 = DQ_VERBS_WATCH_CHANNEL};
	if (!rc && epoll_ctl(dev->epfd, EPOLL_CTL_ADD, dev->channel->fd, &ev) != 0)
		rc = -errno;
	ev.data.u32 = DQ_VERBS_WATCH_ASYNC;
	if (!rc && epoll_ctl(dev->epfd, EPOLL_CTL_ADD, dev->ctx->async_fd, &ev) != 0)
		rc = -errno;
	return rc ? dq_error_set(err, rc, "device %s: no completion channel: %s; raise LimitNOFILE if file descriptors are used up",
				 dev->cfg.name, strerror(-rc)) : 0;
}

static int open_scratch(struct dq_verbs_device *dev, struct dq_error *err)
{
	void *p = mmap(NULL, SCRATCH_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED)
		return dq_error_set(err, -ENOMEM, "device %s: no memory", dev->cfg.name);
	dev->scratch = p;
	memset(dev->scratch, PROBE_PATTERN, SCRATCH_BYTES / 2);
	(void)madvise(p, SCRATCH_BYTES, MADV_DONTFORK);
	dev->scratch_mr = dq_verbs_mr_make(dev, p, SCRATCH_BYTES, IBV_ACCESS_LOCAL_WRITE);
	if (!dev->scratch_mr)
		return dq_error_set(err, -errno, "device %s: %s cannot register memory: %s%s", dev->cfg.name, dev->cfg.address, strerror(errno),
				    errno == ENOMEM || errno == EPERM ? /* EPERM: the limit is 0 */
				    "; the limit of locked memory may be too low: LimitMEMLOCK=infinity, or CAP_IPC_LOCK" : "");
	return 0;
}

static int open_port(struct dq_verbs_device *dev, struct dq_error *err)
{
	int rc = dev->lib->query_device(dev->ctx, &dev->attr);
	struct ibv_port_attr port;

	if (rc)
		return dq_error_set(err, -rc, "device %s: %s cannot be queried: %s", dev->cfg.name, dev->cfg.address, strerror(rc));
	if (dev->cfg.port > dev->attr.phys_port_cnt)
		return dq_error_set(err, -ENODEV, "device %s: %s has no port %u; it has %u, counted from 1", dev->cfg.name, dev->cfg.address,
				    dev->cfg.port, dev->attr.phys_port_cnt);
	dev->software = dev->attr.vendor_id == VENDOR_RXE || dev->attr.vendor_id == VENDOR_SIW;
	/* rxe never says it, and needs not: its receive queue is at rest when the change to error returns. */
	dev->last_wqe_event = !dev->software;
	rc = dq_verbs_query_port(dev->lib, dev->ctx, (uint8_t)dev->cfg.port, &port);
	if (rc)
		return dq_error_set(err, rc, "device %s: port %u of %s cannot be queried: %s", dev->cfg.name, dev->cfg.port, dev->cfg.address,
				    strerror(-rc));
	dev->infiniband = port.link_layer == IBV_LINK_LAYER_INFINIBAND;
	rc = dq_verbs_port_read(dev, NULL, err);
	if (rc)
		return rc;
	dev->told.max_segment_bytes = DQ_MIN(port.max_msg_sz ? port.max_msg_sz : DQ_MAX_SEGMENT_BYTES, DQ_MAX_SEGMENT_BYTES);
	return 0;
}

static void set_limits(struct dq_verbs_device *dev)
{
	const uint32_t wrs = (uint32_t)DQ_MAX(dev->attr.max_qp_wr, (int)(2 * DQ_VERBS_OWN_WRS));

	/* Devices announce more QPs than they can run: other users, firmware profiles and the cache of the NIC set the real
	 * limit. A quarter of the number is left to others. */
	dev->told.max_qps = (uint32_t)DQ_MIN(DQ_MAX(dev->attr.max_qp / 4 * 3, 1), (int)DQ_VERBS_MAX_QPS);
	dev->told.max_send_depth = DQ_MIN(wrs - DQ_VERBS_OWN_WRS, DQ_VERBS_MAX_DEPTH);
	dev->piece_limit = dev->attr.max_mr_size ? dev->attr.max_mr_size : UINT64_MAX;
	if (dev->cfg.max_registration_bytes)
		dev->piece_limit = DQ_MIN(dev->piece_limit, dev->cfg.max_registration_bytes);
	/* Where memory comes in small pieces, a write may lie across several. */
	dev->max_sge = dev->piece_limit / 2 >= DQ_MAX_SEGMENT_BYTES ? 1 : (uint32_t)DQ_MIN(DQ_VERBS_MAX_SGE, DQ_MAX(dev->attr.max_sge, 1));
}

static int make_tables(struct dq_verbs_device *dev, struct dq_error *err)
{
	dev->qps_cap = dq_verbs_pow2_at_least(dev->told.max_qps);
	dev->by_qpn_mask = 2 * dev->qps_cap - 1;
	dev->qps = calloc(dev->qps_cap, sizeof *dev->qps);
	dev->by_qpn = calloc(2 * (size_t)dev->qps_cap, sizeof *dev->by_qpn);
	dev->taken = calloc(dev->qps_cap, sizeof *dev->taken);
	return dev->qps && dev->by_qpn && dev->taken ? 0 : dq_error_set(err, -ENOMEM, "device %s: no memory for the table of QPs", dev->cfg.name);
}

/* Takes down whatever was made, in the order that the objects need. */
static void device_free(struct dq_verbs_device *dev)
{
	dq_verbs_mem_stop(dev);
	dq_verbs_pools_destroy(dev);
	if (dev->channel)
		dev->lib->destroy_comp_channel(dev->channel);
	if (dev->scratch_mr)
		dev->lib->dereg_mr(dev->scratch_mr);
	if (dev->scratch)
		munmap(dev->scratch, SCRATCH_BYTES);
	if (dev->pd)
		dev->lib->dealloc_pd(dev->pd);
	if (dev->epfd >= 0)
		close(dev->epfd);
	if (dev->ctx)
		dev->lib->close_device(dev->ctx);
	pthread_mutex_destroy(&dev->port_lock);
	pthread_mutex_destroy(&dev->table_lock);
	pthread_mutex_destroy(&dev->mem_lock);
	free(dev->qps);
	free(dev->by_qpn);
	free(dev->taken);
	free(dev);
}

int dq_verbs_device_open(const struct dq_device_config *cfg, struct dq_device **out, struct dq_error *err)
{
	const struct dq_verbs_lib *lib = dq_verbs_load(err);
	if (!lib)
		return -ENOSYS;
	struct dq_verbs_device *dev = calloc(1, sizeof *dev);
	if (!dev)
		return dq_error_set(err, -ENOMEM, "device %.31s: no memory", cfg->name);
	dev->lib = lib;
	dev->cfg = *cfg;
	dev->cfg.name[sizeof dev->cfg.name - 1] = 0;
	dev->cfg.address[sizeof dev->cfg.address - 1] = 0;
	dev->cfg.gid[sizeof dev->cfg.gid - 1] = 0;
	if (!dev->cfg.port)
		dev->cfg.port = 1;
	if (!dev->cfg.heartbeat_ns)
		dev->cfg.heartbeat_ns = 1000000000u;
	if (!dev->cfg.deadline_ns)
		dev->cfg.deadline_ns = 10000000000u;
	dev->epfd = -1;
	dev->scan_ns = DQ_NEVER;
	dev->scan_interval_ns = DQ_MAX(DQ_MIN(dev->cfg.heartbeat_ns, dev->cfg.deadline_ns) / 2, 1000000u);
	dev->look = true;
	dev->now_ns = dq_verbs_now();
	dq_verbs_list_init(&dev->ending);
	dq_verbs_list_init(&dev->mems);
	pthread_mutex_init(&dev->port_lock, NULL);
	pthread_mutex_init(&dev->table_lock, NULL);
	pthread_mutex_init(&dev->mem_lock, NULL);

	int rc = open_by_name(dev, err);
	if (!rc)
		rc = open_port(dev, err);
	if (!rc)
		rc = open_watch(dev, err);
	if (!rc) {
		set_limits(dev);
		rc = make_tables(dev, err);
	}
	if (!rc) {
		dev->pd = lib->alloc_pd(dev->ctx);
		if (!dev->pd)
			rc = dq_error_set(err, -errno, "device %s: %s gives no protection domain: %s", dev->cfg.name, dev->cfg.address,
					  strerror(errno));
	}
	if (!rc)
		rc = open_scratch(dev, err);
	if (!rc)
		rc = dq_verbs_mem_start(dev, err);
	if (rc) {
		device_free(dev);
		return rc;
	}
	dev->told.dmabuf = dq_verbs_mem_probe_dmabuf(dev);
	dev->told.noise_ns = measure_noise();
	*out = (struct dq_device *)(void *)dev;
	return 0;
}

void dq_verbs_device_close(struct dq_device *device)
{
	if (!device)
		return;
	struct dq_verbs_device *dev = dq_verbs_device_of(device);
	/* Gone by contract; what a caller left is taken along rather than leaked. */
	for (uint32_t i = 0; i < atomic_load(&dev->qps_high); i++) {
		struct dq_verbs_qp *qp = atomic_load(&dev->qps[i]);
		if (qp)
			dq_verbs_qp_destroy((struct dq_qp *)(void *)qp);
	}
	device_free(dev);
}
