/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Devices. The library asks for them once and keeps their numbers, so they are kept here as the daemon told them at the first
 * init(), and each later context's own numbers are found by name. Guarded by the state lock while they are loaded; constant for
 * the callers afterwards, as the library asks only between init() and finalize().
 */
#include <string.h>

#include "nccl/net.h"

struct device {
	dqplb_device told; /* its texts are what the library is given: constant until the next load */
	uint64_t guid;
};

static struct device devices[DQ_NCCL_DEVICES_MAX];
static int device_count;

/* FNV-1a, 64 bits. */
static uint64_t hash(uint64_t h, const char *text)
{
	do
		h = (h ^ (unsigned char)*text) * 0x100000001b3u;
	while (*text++);
	return h;
}

void dq_nccl_devices_forget(void)
{
	device_count = 0;
}

/* A port that is down now would be chosen all the same, and stay chosen. */
static dq_nccl_result load(struct dq_nccl_lane *lane, int count)
{
	dqplb_info info = {.size = sizeof info};
	int status = dqplb_query(lane->ctx, &info), n = 0;

	for (int i = 0; i < count && n < (int)DQ_NCCL_DEVICES_MAX && status == DQPLB_OK; i++) {
		struct device *d = &devices[n];

		status = dqplb_device_query(lane->ctx, i, &d->told);
		if (status != DQPLB_OK)
			break;
		if (!d->told.up) {
			DQ_NCCL_WARN("device %s is down and not used: see `dqplb devices`", d->told.name);
			continue;
		}
		/* Of one port of one host: what shares a link must not have two, what does not must not have one. */
		d->guid = hash(hash(0xcbf29ce484222325u, info.host_id), d->told.name);
		DQ_NCCL_INFO("device %d: %s (%s), %llu Mbit/s, rail %d%s%s", n, d->told.name, d->told.provider,
			     (unsigned long long)(d->told.speed_bps / 1000000u), d->told.rail, d->told.dmabuf ? ", dma-buf" : "",
			     d->told.pci_path[0] ? "" : ", no PCI path");
		n++;
	}
	if (status != DQPLB_OK)
		return dq_nccl_fail(status, "asking the daemon for its devices", -1);
	if (n == 0) {
		DQ_NCCL_WARN("no device of this host is up: see `dqplb devices`");
		return DQ_NCCL_SYSTEM_ERROR;
	}
	device_count = n;
	return DQ_NCCL_SUCCESS;
}

dq_nccl_result dq_nccl_devices_load(struct dq_nccl_lane *lane)
{
	const int count = dqplb_device_count(lane->ctx);
	dq_nccl_result rc = DQ_NCCL_SUCCESS;

	if (count < 0)
		return dq_nccl_fail(count, "asking the daemon for its devices", -1);
	if (count == 0) {
		DQ_NCCL_WARN("the daemon of this host has no device: name them in the section `devices` of its configuration, see "
			     "`dqplb devices`");
		return DQ_NCCL_SYSTEM_ERROR;
	}
	if (device_count == 0)
		rc = load(lane, count);
	if (rc == DQ_NCCL_SUCCESS)
		dq_nccl_devices_map(lane);
	return rc;
}

void dq_nccl_devices_map(struct dq_nccl_lane *lane)
{
	const int count = dqplb_device_count(lane->ctx);

	for (int i = 0; i < (int)DQ_NCCL_DEVICES_MAX; i++)
		lane->device[i] = -1;
	for (int i = 0; i < count; i++) {
		dqplb_device d;

		if (dqplb_device_query(lane->ctx, i, &d) != DQPLB_OK)
			continue;
		for (int k = 0; k < device_count; k++)
			if (lane->device[k] < 0 && strcmp(devices[k].told.name, d.name) == 0)
				lane->device[k] = i;
	}
}

const char *dq_nccl_device_name(int device)
{
	return device >= 0 && device < device_count ? devices[device].told.name : "unknown";
}

dq_nccl_result dq_nccl_devices(int *count)
{
	if (!count)
		return DQ_NCCL_INVALID_ARGUMENT;
	*count = device_count;
	return DQ_NCCL_SUCCESS;
}

dq_nccl_result dq_nccl_device_check(const struct dq_nccl_lane *lane, int device, const char *call)
{
	if (device < 0 || device >= device_count) {
		DQ_NCCL_WARN("%s on device %d: expected 0 to %d", call, device, device_count - 1);
		return DQ_NCCL_INVALID_ARGUMENT;
	}
	if (lane->device[device] < 0) {
		DQ_NCCL_WARN("%s on device %s: the daemon was restarted and has no such device any more: see `dqplb devices`", call,
			     devices[device].told.name);
		return DQ_NCCL_SYSTEM_ERROR;
	}
	return DQ_NCCL_SUCCESS;
}

dq_nccl_result dq_nccl_properties(int device, struct dq_nccl_props_v12 *props)
{
	struct device *d;

	if (device < 0 || device >= device_count) {
		DQ_NCCL_WARN("getProperties of device %d: expected 0 to %d", device, device_count - 1);
		return DQ_NCCL_INVALID_ARGUMENT;
	}
	d = &devices[device];
	memset(props, 0, sizeof *props);
	props->name = d->told.name;
	props->pci_path = d->told.pci_path[0] ? d->told.pci_path : NULL;
	props->guid = d->guid;
	props->ptr_support = DQ_NCCL_PTR_HOST;
	/*
	 * CUDA always together with DMABUF: the other way to GPU memory, nvidia-peermem, looks an address up in the process that asks,
	 * and that is the daemon here. Not on tcp, even where its test with host memory passed: the CPU would have to map GPU memory.
	 */
	if (d->told.dmabuf && strcmp(d->told.provider, "tcp") != 0)
		props->ptr_support |= DQ_NCCL_PTR_CUDA | DQ_NCCL_PTR_DMABUF;
	props->reg_is_global = 1; /* memory.c: of the process, whatever the comm */
	props->force_flush = 0;
	/* Zero would be divided by. A port that is down told its own speed or none. */
	props->speed = d->told.speed_bps >= 1000000u ? (int)(d->told.speed_bps / 1000000u) : 1;
	props->port = d->told.port ? d->told.port : 1;
	props->latency = (float)d->told.latency_ns / 2000.0f; /* one way; measured is the round trip */
	props->max_comms = d->told.max_flows ? (int)d->told.max_flows : 1;
	props->max_recvs = DQ_NCCL_RECVS_MAX;
	props->device_type = DQ_NCCL_DEVICE_TYPE_HOST;
	props->device_version = DQ_NCCL_DEVICE_VERSION_NONE;
	props->vprops.count = 1;
	props->vprops.devices[0] = device;
	props->max_p2p_bytes = props->max_coll_bytes = DQ_NCCL_P2P_BYTES_MAX;
	props->max_multi_request = 1;
	props->rail = d->told.rail >= 0 && d->told.rail <= INT16_MAX ? (int16_t)d->told.rail : DQ_NCCL_UNDEFINED;
	props->plane = DQ_NCCL_UNDEFINED; /* the daemon knows rails, not planes */
	return DQ_NCCL_SUCCESS;
}
