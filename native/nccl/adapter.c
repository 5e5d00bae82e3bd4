/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The versions of the plugin, each a table of thin functions: they fill in what an older version does not say and leave out what
 * it does not know. What all of them share is written once; what is the same from one version on has that version's name.
 */
#include <string.h>

#include "nccl/net.h"

#define EXPORT __attribute__((visibility("default")))

/* --- the same in all --------------------------------------------------------------------------------------------- */

static dq_nccl_result accept_any(void *listener, void **comm, struct dq_nccl_device_handle **offload)
{
	(void)offload; /* no offload: it stays as it is */
	if (!listener || !comm)
		return DQ_NCCL_INVALID_ARGUMENT;
	return dq_nccl_accept(listener, comm);
}

static dq_nccl_result reg_mr(void *comm, void *address, size_t bytes, int type, void **mr)
{
	if (!comm || !mr)
		return DQ_NCCL_INVALID_ARGUMENT;
	return dq_nccl_reg_mr(comm, address, bytes, type, mr);
}

static dq_nccl_result reg_mr_dmabuf(void *comm, void *address, size_t bytes, int type, uint64_t offset, int fd, void **mr)
{
	if (!comm || !mr)
		return DQ_NCCL_INVALID_ARGUMENT;
	return dq_nccl_reg_dmabuf(comm, address, bytes, type, offset, fd, mr);
}

static dq_nccl_result dereg_mr(void *comm, void *mr)
{
	(void)comm; /* may be gone, or another: memory is of the process */
	return mr ? dq_nccl_dereg_mr(mr) : DQ_NCCL_SUCCESS;
}

static dq_nccl_result iflush(void *comm, int n, void **data, int *bytes, void **mrs, void **request)
{
	if (!comm || !request)
		return DQ_NCCL_INVALID_ARGUMENT;
	return dq_nccl_iflush(comm, n, data, bytes, mrs, request);
}

static dq_nccl_result test(void *request, int *done, int *sizes)
{
	if (!request || !done)
		return DQ_NCCL_INVALID_ARGUMENT;
	return dq_nccl_test(request, done, sizes);
}

static dq_nccl_result close_comm(void *comm)
{
	return comm ? dq_nccl_close_comm(comm) : DQ_NCCL_SUCCESS;
}

static dq_nccl_result close_listen(void *listener)
{
	return listener ? dq_nccl_close_listen(listener) : DQ_NCCL_SUCCESS;
}

/* --- sends and receives: int sizes, size_t sizes, a profiler's parents --------------------------------------------- */

static dq_nccl_result isend_v8(void *comm, void *data, int bytes, int tag, void *mr, void **request)
{
	if (!comm || !request || bytes < 0)
		return DQ_NCCL_INVALID_ARGUMENT;
	return dq_nccl_isend(comm, data, (size_t)bytes, tag, mr, request);
}

static dq_nccl_result irecv_v8(void *comm, int n, void **data, int *bytes, int *tags, void **mrs, void **request)
{
	size_t sizes[DQ_NCCL_RECVS_MAX];

	if (!comm || !request || n < 1 || n > DQ_NCCL_RECVS_MAX || !bytes)
		return DQ_NCCL_INVALID_ARGUMENT;
	for (int i = 0; i < n; i++) {
		if (bytes[i] < 0)
			return DQ_NCCL_INVALID_ARGUMENT;
		sizes[i] = (size_t)bytes[i];
	}
	return dq_nccl_irecv(comm, n, data, sizes, tags, mrs, request);
}

static dq_nccl_result isend_v9(void *comm, void *data, size_t bytes, int tag, void *mr, void **request)
{
	if (!comm || !request)
		return DQ_NCCL_INVALID_ARGUMENT;
	return dq_nccl_isend(comm, data, bytes, tag, mr, request);
}

static dq_nccl_result irecv_v9(void *comm, int n, void **data, size_t *bytes, int *tags, void **mrs, void **request)
{
	if (!comm || !request)
		return DQ_NCCL_INVALID_ARGUMENT;
	return dq_nccl_irecv(comm, n, data, bytes, tags, mrs, request);
}

static dq_nccl_result isend_v10(void *comm, void *data, size_t bytes, int tag, void *mr, void *parent, void **request)
{
	(void)parent;
	return isend_v9(comm, data, bytes, tag, mr, request);
}

static dq_nccl_result irecv_v10(void *comm, int n, void **data, size_t *bytes, int *tags, void **mrs, void **parents, void **request)
{
	(void)parents;
	return irecv_v9(comm, n, data, bytes, tags, mrs, request);
}

/* --- properties: what all have in common is copied in one place ---------------------------------------------------- */

#define COPY_PROPS_V8(to, from)                            \
	do {                                               \
		(to)->name = (from)->name;                 \
		(to)->pci_path = (from)->pci_path;         \
		(to)->guid = (from)->guid;                 \
		(to)->ptr_support = (from)->ptr_support;   \
		(to)->reg_is_global = (from)->reg_is_global; \
		(to)->speed = (from)->speed;               \
		(to)->port = (from)->port;                 \
		(to)->latency = (from)->latency;           \
		(to)->max_comms = (from)->max_comms;       \
		(to)->max_recvs = (from)->max_recvs;       \
		(to)->device_type = (from)->device_type;   \
		(to)->device_version = (from)->device_version; \
	} while (0)

#define COPY_PROPS_V9(to, from)                            \
	do {                                               \
		COPY_PROPS_V8(to, from);                   \
		(to)->force_flush = (from)->force_flush;   \
		(to)->vprops.count = (from)->vprops.count; \
		memcpy((to)->vprops.devices, (from)->vprops.devices, sizeof (to)->vprops.devices); \
		(to)->max_p2p_bytes = (from)->max_p2p_bytes;   \
		(to)->max_coll_bytes = (from)->max_coll_bytes; \
	} while (0)

static dq_nccl_result get_properties_v8(int device, struct dq_nccl_props_v8 *props)
{
	struct dq_nccl_props_v12 all;
	dq_nccl_result rc;

	if (!props)
		return DQ_NCCL_INVALID_ARGUMENT;
	rc = dq_nccl_properties(device, &all);
	if (rc != DQ_NCCL_SUCCESS)
		return rc;
	memset(props, 0, sizeof *props);
	COPY_PROPS_V8(props, &all);
	props->max_recvs = 1; /* grouped receives are of use from v9 on only */
	return rc;
}

static dq_nccl_result get_properties_v9(int device, struct dq_nccl_props_v9 *props)
{
	struct dq_nccl_props_v12 all;
	dq_nccl_result rc;

	if (!props)
		return DQ_NCCL_INVALID_ARGUMENT;
	rc = dq_nccl_properties(device, &all);
	if (rc != DQ_NCCL_SUCCESS)
		return rc;
	memset(props, 0, sizeof *props);
	COPY_PROPS_V9(props, &all);
	return rc;
}

static dq_nccl_result get_properties_v11(int device, struct dq_nccl_props_v11 *props)
{
	struct dq_nccl_props_v12 all;
	dq_nccl_result rc;

	if (!props)
		return DQ_NCCL_INVALID_ARGUMENT;
	rc = dq_nccl_properties(device, &all);
	if (rc != DQ_NCCL_SUCCESS)
		return rc;
	memset(props, 0, sizeof *props);
	COPY_PROPS_V9(props, &all);
	props->max_multi_request = all.max_multi_request;
	return rc;
}

static dq_nccl_result get_properties_v12(int device, struct dq_nccl_props_v12 *props)
{
	return props ? dq_nccl_properties(device, props) : DQ_NCCL_INVALID_ARGUMENT;
}

/* --- before v11: one user for the process -------------------------------------------------------------------------- */

static dq_nccl_result init_v8(dq_nccl_logger logger)
{
	return dq_nccl_init_shared(logger);
}

static dq_nccl_result init_v10(dq_nccl_logger logger, dq_nccl_profiler profiler)
{
	(void)profiler;
	return dq_nccl_init_shared(logger);
}

static dq_nccl_result listen_v8(int device, void *handle, void **listener)
{
	struct dq_nccl_user *user = dq_nccl_shared_user();

	if (!user || !handle || !listener)
		return DQ_NCCL_INVALID_ARGUMENT;
	return dq_nccl_listen(user, device, handle, listener);
}

static dq_nccl_result connect_v8(int device, void *handle, void **comm, struct dq_nccl_device_handle **offload)
{
	struct dq_nccl_user *user = dq_nccl_shared_user();

	(void)offload;
	if (!user || !handle || !comm)
		return DQ_NCCL_INVALID_ARGUMENT;
	return dq_nccl_connect(user, device, handle, comm);
}

static dq_nccl_result connect_v10(int device, struct dq_nccl_config *config, void *handle, void **comm,
				  struct dq_nccl_device_handle **offload)
{
	(void)config; /* the traffic class is the daemon's to choose: its queue pairs are everybody's */
	return connect_v8(device, handle, comm, offload);
}

/* --- from v11 on: a user a communicator ---------------------------------------------------------------------------- */

static dq_nccl_result init_v11(void **context, uint64_t communicator, struct dq_nccl_config *config, dq_nccl_logger logger,
			       dq_nccl_profiler profiler)
{
	(void)config;
	(void)profiler;
	if (!context)
		return DQ_NCCL_INVALID_ARGUMENT;
	return dq_nccl_init(context, communicator, logger);
}

static dq_nccl_result listen_v11(void *context, int device, void *handle, void **listener)
{
	if (!context || !handle || !listener)
		return DQ_NCCL_INVALID_ARGUMENT;
	return dq_nccl_listen(context, device, handle, listener);
}

static dq_nccl_result connect_v11(void *context, int device, void *handle, void **comm, struct dq_nccl_device_handle **offload)
{
	(void)offload;
	if (!context || !handle || !comm)
		return DQ_NCCL_INVALID_ARGUMENT;
	return dq_nccl_connect(context, device, handle, comm);
}

static dq_nccl_result finalize_v11(void *context)
{
	return context ? dq_nccl_finalize(context) : DQ_NCCL_SUCCESS;
}

static dq_nccl_result set_attr_v11(void *context, struct dq_nccl_attr *attr)
{
	return context && attr ? dq_nccl_set_attr(context, attr) : DQ_NCCL_SUCCESS;
}

/* --- the tables ---------------------------------------------------------------------------------------------------- */

/* Entries whose types are the same in every version. Those that may be NULL and are: get_device_mr, recv_consumed (no offload),
 * make_vdevice (the daemon has its own way to use several devices). */
#define COMMON                             \
	.name = DQ_NCCL_NAME,              \
	.devices = dq_nccl_devices,        \
	.accept = accept_any,              \
	.reg_mr = reg_mr,                  \
	.reg_mr_dmabuf = reg_mr_dmabuf,    \
	.dereg_mr = dereg_mr,              \
	.iflush = iflush,                  \
	.test = test,                      \
	.close_send = close_comm,          \
	.close_recv = close_comm,          \
	.close_listen = close_listen

extern const struct dq_nccl_net_v8 ncclNetPlugin_v8;
extern const struct dq_nccl_net_v9 ncclNetPlugin_v9;
extern const struct dq_nccl_net_v10 ncclNetPlugin_v10;
extern const struct dq_nccl_net_v11 ncclNetPlugin_v11;
extern const struct dq_nccl_net_v12 ncclNetPlugin_v12;

EXPORT const struct dq_nccl_net_v8 ncclNetPlugin_v8 = {
	COMMON,
	.init = init_v8,
	.get_properties = get_properties_v8,
	.listen = listen_v8,
	.connect = connect_v8,
	.isend = isend_v8,
	.irecv = irecv_v8,
};

EXPORT const struct dq_nccl_net_v9 ncclNetPlugin_v9 = {
	COMMON,
	.init = init_v8,
	.get_properties = get_properties_v9,
	.listen = listen_v8,
	.connect = connect_v8,
	.isend = isend_v9,
	.irecv = irecv_v9,
};

EXPORT const struct dq_nccl_net_v10 ncclNetPlugin_v10 = {
	COMMON,
	.init = init_v10,
	.get_properties = get_properties_v9,
	.listen = listen_v8,
	.connect = connect_v10,
	.isend = isend_v10,
	.irecv = irecv_v10,
};

EXPORT const struct dq_nccl_net_v11 ncclNetPlugin_v11 = {
	COMMON,
	.init = init_v11,
	.get_properties = get_properties_v11,
	.listen = listen_v11,
	.connect = connect_v11,
	.isend = isend_v10,
	.irecv = irecv_v10,
	.finalize = finalize_v11,
	.set_attr = set_attr_v11,
};

EXPORT const struct dq_nccl_net_v12 ncclNetPlugin_v12 = {
	COMMON,
	.init = init_v11,
	.get_properties = get_properties_v12,
	.listen = listen_v11,
	.connect = connect_v11,
	.isend = isend_v10,
	.irecv = irecv_v10,
	.finalize = finalize_v11,
	.set_attr = set_attr_v11,
};
