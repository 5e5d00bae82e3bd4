/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What NCCL and RCCL expect of a net plugin, versions 8 to 12: constants, structures and tables of functions, in our own words,
 * with the layouts pinned. Nothing of ours stands here: the plugin fills the tables, the tests read them.
 *
 * A plugin exports one table a version as a data symbol, ncclNetPlugin_v8 to ncclNetPlugin_v12; the library takes the newest it
 * knows. Versions differ in the arguments named at each table. All functions return enum dq_nccl_result and may be called from
 * several threads; those of one comm are not called at the same time, but for the registration of memory.
 */
#ifndef DQ_NCCL_ABI_H
#define DQ_NCCL_ABI_H

#include <stddef.h>
#include <stdint.h>

enum dq_nccl_result {
	DQ_NCCL_SUCCESS = 0,
	DQ_NCCL_UNHANDLED_CUDA_ERROR = 1,
	DQ_NCCL_SYSTEM_ERROR = 2,      /* this host: device, daemon, memory */
	DQ_NCCL_INTERNAL_ERROR = 3,    /* an invariant does not hold */
	DQ_NCCL_INVALID_ARGUMENT = 4,
	DQ_NCCL_INVALID_USAGE = 5,     /* what the user set */
	DQ_NCCL_REMOTE_ERROR = 6,      /* the other end, or the way to it */
	DQ_NCCL_IN_PROGRESS = 7
};

enum dq_nccl_log_level {
	DQ_NCCL_LOG_WARN = 2,
	DQ_NCCL_LOG_INFO = 3,
	DQ_NCCL_LOG_TRACE = 5
};

/* Sub-systems of a log line, or-ed. */
#define DQ_NCCL_LOG_INIT 0x1ul
#define DQ_NCCL_LOG_NET 0x10ul
#define DQ_NCCL_LOG_ENV 0x80ul
#define DQ_NCCL_LOG_ALL (~0ul)

#define DQ_NCCL_HANDLE_BYTES 128          /* of listen(), given to connect() at the other end */
#define DQ_NCCL_REQUESTS_MAX 32           /* isend or irecv requests of one comm at a time */
#define DQ_NCCL_RECVS_MAX 8               /* receives in one irecv() of this plugin; NCCL itself would go further */
#define DQ_NCCL_MESSAGE_BYTES_MAX (1ull << 40) /* the library's limit for max_p2p_bytes and max_coll_bytes */
#define DQ_NCCL_V8_BYTES_MAX (1 << 30)    /* what the library sends at most through v8 */

#define DQ_NCCL_PTR_HOST 1
#define DQ_NCCL_PTR_CUDA 2
#define DQ_NCCL_PTR_DMABUF 4

/* *request before irecv(): the receiver watches the bytes themselves (LL, LL128); what test() says is of less weight to it. */
#define DQ_NCCL_OPTIONAL_RECV_COMPLETION ((void *)(uintptr_t)0x1)

#define DQ_NCCL_DEVICE_TYPE_HOST 0        /* no offload of the network to the GPU */
#define DQ_NCCL_DEVICE_VERSION_NONE 0
#define DQ_NCCL_UNDEFINED (-1)            /* rail, plane, traffic class, attributes */

/* The library's printf into its log. `flags`: sub-systems. Lines of level WARN are shown always, INFO with NCCL_DEBUG=INFO. */
typedef void (*dq_nccl_logger)(int level, unsigned long flags, const char *file, int line, const char *format, ...)
	__attribute__((format(printf, 5, 6)));
/* The profiler's callback, which this plugin does not call. */
typedef int (*dq_nccl_profiler)(void **event, int type, void *parent, int64_t plugin, void *data);

/* --- properties of a device ------------------------------------------------------------------------------------- */

#define DQ_NCCL_VDEVS_MAX_V9 4
#define DQ_NCCL_VDEVS_MAX_V12 8

struct dq_nccl_vprops_v9 {       /* to v11 */
	int count;
	int devices[DQ_NCCL_VDEVS_MAX_V9];
};
struct dq_nccl_vprops_v12 {
	int count;
	int devices[DQ_NCCL_VDEVS_MAX_V12];
};

struct dq_nccl_props_v8 {
	char *name;              /* the strings stay the plugin's, and valid */
	char *pci_path;          /* in sysfs; NULL: none */
	uint64_t guid;           /* of the chip */
	int ptr_support;         /* DQ_NCCL_PTR_*, or-ed */
	int reg_is_global;       /* what one comm registered another of the device may use */
	int speed;               /* Mbit/s */
	int port;
	float latency;           /* us */
	int max_comms;
	int max_recvs;
	int device_type;         /* DQ_NCCL_DEVICE_TYPE_HOST */
	int device_version;
};

struct dq_nccl_props_v9 {        /* and v10 */
	char *name;
	char *pci_path;
	uint64_t guid;
	int ptr_support;
	int reg_is_global;
	int force_flush;         /* call iflush() after each receive, whatever the machine */
	int speed;
	int port;
	float latency;
	int max_comms;
	int max_recvs;
	int device_type;
	int device_version;
	struct dq_nccl_vprops_v9 vprops; /* of which devices it consists */
	size_t max_p2p_bytes;
	size_t max_coll_bytes;
};

struct dq_nccl_props_v11 {
	char *name;
	char *pci_path;
	uint64_t guid;
	int ptr_support;
	int reg_is_global;
	int force_flush;
	int speed;
	int port;
	float latency;
	int max_comms;
	int max_recvs;
	int device_type;
	int device_version;
	struct dq_nccl_vprops_v9 vprops;
	size_t max_p2p_bytes;
	size_t max_coll_bytes;
	int max_multi_request;   /* 1 */
};

struct dq_nccl_props_v12 {
	char *name;
	char *pci_path;
	uint64_t guid;
	int ptr_support;
	int reg_is_global;
	int force_flush;
	int speed;
	int port;
	float latency;
	int max_comms;
	int max_recvs;
	int device_type;
	int device_version;
	struct dq_nccl_vprops_v12 vprops;
	size_t max_p2p_bytes;
	size_t max_coll_bytes;
	int max_multi_request;
	int16_t rail;            /* DQ_NCCL_UNDEFINED where unknown */
	int16_t plane;
};

#define DQ_NCCL_PIN(type, member, offset) _Static_assert(offsetof(struct type, member) == (offset), #type "." #member)
#define DQ_NCCL_PIN_SIZE(type, bytes) _Static_assert(sizeof(struct type) == (bytes), #type)

/* Layouts are those of 64-bit machines, the only ones with GPUs. */
_Static_assert(sizeof(void *) == 8 && sizeof(size_t) == 8 && sizeof(int) == 4 && sizeof(float) == 4, "an LP64 machine");

DQ_NCCL_PIN_SIZE(dq_nccl_vprops_v9, 20);
DQ_NCCL_PIN_SIZE(dq_nccl_vprops_v12, 36);

DQ_NCCL_PIN(dq_nccl_props_v8, pci_path, 8);
DQ_NCCL_PIN(dq_nccl_props_v8, guid, 16);
DQ_NCCL_PIN(dq_nccl_props_v8, ptr_support, 24);
DQ_NCCL_PIN(dq_nccl_props_v8, reg_is_global, 28);
DQ_NCCL_PIN(dq_nccl_props_v8, speed, 32);
DQ_NCCL_PIN(dq_nccl_props_v8, port, 36);
DQ_NCCL_PIN(dq_nccl_props_v8, latency, 40);
DQ_NCCL_PIN(dq_nccl_props_v8, max_comms, 44);
DQ_NCCL_PIN(dq_nccl_props_v8, max_recvs, 48);
DQ_NCCL_PIN(dq_nccl_props_v8, device_type, 52);
DQ_NCCL_PIN(dq_nccl_props_v8, device_version, 56);
DQ_NCCL_PIN_SIZE(dq_nccl_props_v8, 64);

#define DQ_NCCL_PIN_PROPS(type)                    \
	DQ_NCCL_PIN(type, pci_path, 8);            \
	DQ_NCCL_PIN(type, guid, 16);               \
	DQ_NCCL_PIN(type, ptr_support, 24);        \
	DQ_NCCL_PIN(type, reg_is_global, 28);      \
	DQ_NCCL_PIN(type, force_flush, 32);        \
	DQ_NCCL_PIN(type, speed, 36);              \
	DQ_NCCL_PIN(type, port, 40);               \
	DQ_NCCL_PIN(type, latency, 44);            \
	DQ_NCCL_PIN(type, max_comms, 48);          \
	DQ_NCCL_PIN(type, max_recvs, 52);          \
	DQ_NCCL_PIN(type, device_type, 56);        \
	DQ_NCCL_PIN(type, device_version, 60);     \
	DQ_NCCL_PIN(type, vprops, 64)

DQ_NCCL_PIN_PROPS(dq_nccl_props_v9);
DQ_NCCL_PIN(dq_nccl_props_v9, max_p2p_bytes, 88);
DQ_NCCL_PIN(dq_nccl_props_v9, max_coll_bytes, 96);
DQ_NCCL_PIN_SIZE(dq_nccl_props_v9, 104);

DQ_NCCL_PIN_PROPS(dq_nccl_props_v11);
DQ_NCCL_PIN(dq_nccl_props_v11, max_p2p_bytes, 88);
DQ_NCCL_PIN(dq_nccl_props_v11, max_coll_bytes, 96);
DQ_NCCL_PIN(dq_nccl_props_v11, max_multi_request, 104);
DQ_NCCL_PIN_SIZE(dq_nccl_props_v11, 112);

DQ_NCCL_PIN_PROPS(dq_nccl_props_v12);
DQ_NCCL_PIN(dq_nccl_props_v12, max_p2p_bytes, 104);
DQ_NCCL_PIN(dq_nccl_props_v12, max_coll_bytes, 112);
DQ_NCCL_PIN(dq_nccl_props_v12, max_multi_request, 120);
DQ_NCCL_PIN(dq_nccl_props_v12, rail, 124);
DQ_NCCL_PIN(dq_nccl_props_v12, plane, 126);
DQ_NCCL_PIN_SIZE(dq_nccl_props_v12, 128);

/* --- what else is passed ---------------------------------------------------------------------------------------- */

/* v10: at connect(); from v11 on at init(). */
struct dq_nccl_config {
	int traffic_class;       /* DQ_NCCL_UNDEFINED: the user set none */
};

/* What the communicator is about to do, from v11 on. DQ_NCCL_UNDEFINED where not known. */
struct dq_nccl_comm_attr {
	int32_t max_peers;       /* at a time */
	int32_t min_peers;
	int32_t max_flows;       /* a peer */
	int32_t min_flows;
};
struct dq_nccl_attr {
	struct dq_nccl_comm_attr send;
	struct dq_nccl_comm_attr recv;
	uint32_t ops;            /* bit masks */
	uint32_t algorithms;
	uint32_t protocols;
};

/* For devices that the GPU drives itself. This plugin leaves it alone. */
struct dq_nccl_device_handle {
	int type;
	int version;
	void *handle;
	size_t bytes;
	int needs_proxy;
};

DQ_NCCL_PIN_SIZE(dq_nccl_config, 4);
DQ_NCCL_PIN_SIZE(dq_nccl_comm_attr, 16);
DQ_NCCL_PIN(dq_nccl_attr, recv, 16);
DQ_NCCL_PIN(dq_nccl_attr, ops, 32);
DQ_NCCL_PIN(dq_nccl_attr, algorithms, 36);
DQ_NCCL_PIN(dq_nccl_attr, protocols, 40);
DQ_NCCL_PIN_SIZE(dq_nccl_attr, 44);
DQ_NCCL_PIN(dq_nccl_device_handle, handle, 8);
DQ_NCCL_PIN_SIZE(dq_nccl_device_handle, 32);

/* --- the tables ------------------------------------------------------------------------------------------------- */

/*
 * Common to all versions:
 *   connect(), accept() never block: success and *comm == NULL says "call again". connect() is called again with the very same
 *     handle buffer, which the plugin may write to.
 *   isend(), irecv(), iflush(): success and *request == NULL says "no room, call again"; for iflush(), "nothing to do".
 *   isend()'s tag selects among the receives of the group that the peer posted with one irecv().
 *   test(): *done = 1 frees the request; sizes: one int for a send, one a receive of the group for irecv(). May be NULL.
 *   get_device_mr, recv_consumed, make_vdevice and set_attr may be NULL, the others may not.
 */
typedef enum dq_nccl_result dq_nccl_result;

struct dq_nccl_net_v8 {
	const char *name;
	dq_nccl_result (*init)(dq_nccl_logger logger); /* once a process; there is no finalize() before v11 */
	dq_nccl_result (*devices)(int *count);
	dq_nccl_result (*get_properties)(int device, struct dq_nccl_props_v8 *props);
	dq_nccl_result (*listen)(int device, void *handle, void **listener);
	dq_nccl_result (*connect)(int device, void *handle, void **comm, struct dq_nccl_device_handle **offload);
	dq_nccl_result (*accept)(void *listener, void **comm, struct dq_nccl_device_handle **offload);
	dq_nccl_result (*reg_mr)(void *comm, void *address, size_t bytes, int type, void **mr);
	dq_nccl_result (*reg_mr_dmabuf)(void *comm, void *address, size_t bytes, int type, uint64_t offset, int fd, void **mr);
	dq_nccl_result (*dereg_mr)(void *comm, void *mr);
	dq_nccl_result (*isend)(void *comm, void *data, int bytes, int tag, void *mr, void **request);
	dq_nccl_result (*irecv)(void *comm, int n, void **data, int *bytes, int *tags, void **mrs, void **request);
	dq_nccl_result (*iflush)(void *comm, int n, void **data, int *bytes, void **mrs, void **request);
	dq_nccl_result (*test)(void *request, int *done, int *sizes);
	dq_nccl_result (*close_send)(void *comm);
	dq_nccl_result (*close_recv)(void *comm);
	dq_nccl_result (*close_listen)(void *listener);
	dq_nccl_result (*get_device_mr)(void *comm, void *mr, void **device_mr);
	dq_nccl_result (*recv_consumed)(void *comm, int n, void *request);
};

/* Sizes of messages become size_t; make_vdevice. */
struct dq_nccl_net_v9 {
	const char *name;
	dq_nccl_result (*init)(dq_nccl_logger logger);
	dq_nccl_result (*devices)(int *count);
	dq_nccl_result (*get_properties)(int device, struct dq_nccl_props_v9 *props);
	dq_nccl_result (*listen)(int device, void *handle, void **listener);
	dq_nccl_result (*connect)(int device, void *handle, void **comm, struct dq_nccl_device_handle **offload);
	dq_nccl_result (*accept)(void *listener, void **comm, struct dq_nccl_device_handle **offload);
	dq_nccl_result (*reg_mr)(void *comm, void *address, size_t bytes, int type, void **mr);
	dq_nccl_result (*reg_mr_dmabuf)(void *comm, void *address, size_t bytes, int type, uint64_t offset, int fd, void **mr);
	dq_nccl_result (*dereg_mr)(void *comm, void *mr);
	dq_nccl_result (*isend)(void *comm, void *data, size_t bytes, int tag, void *mr, void **request);
	dq_nccl_result (*irecv)(void *comm, int n, void **data, size_t *bytes, int *tags, void **mrs, void **request);
	dq_nccl_result (*iflush)(void *comm, int n, void **data, int *bytes, void **mrs, void **request);
	dq_nccl_result (*test)(void *request, int *done, int *sizes);
	dq_nccl_result (*close_send)(void *comm);
	dq_nccl_result (*close_recv)(void *comm);
	dq_nccl_result (*close_listen)(void *listener);
	dq_nccl_result (*get_device_mr)(void *comm, void *mr, void **device_mr);
	dq_nccl_result (*recv_consumed)(void *comm, int n, void *request);
	dq_nccl_result (*make_vdevice)(int *device, struct dq_nccl_vprops_v9 *vprops);
};

/* A profiler; a configuration at connect(). */
struct dq_nccl_net_v10 {
	const char *name;
	dq_nccl_result (*init)(dq_nccl_logger logger, dq_nccl_profiler profiler);
	dq_nccl_result (*devices)(int *count);
	dq_nccl_result (*get_properties)(int device, struct dq_nccl_props_v9 *props);
	dq_nccl_result (*listen)(int device, void *handle, void **listener);
	dq_nccl_result (*connect)(int device, struct dq_nccl_config *config, void *handle, void **comm,
				  struct dq_nccl_device_handle **offload);
	dq_nccl_result (*accept)(void *listener, void **comm, struct dq_nccl_device_handle **offload);
	dq_nccl_result (*reg_mr)(void *comm, void *address, size_t bytes, int type, void **mr);
	dq_nccl_result (*reg_mr_dmabuf)(void *comm, void *address, size_t bytes, int type, uint64_t offset, int fd, void **mr);
	dq_nccl_result (*dereg_mr)(void *comm, void *mr);
	dq_nccl_result (*isend)(void *comm, void *data, size_t bytes, int tag, void *mr, void *parent, void **request);
	dq_nccl_result (*irecv)(void *comm, int n, void **data, size_t *bytes, int *tags, void **mrs, void **parents,
				void **request);
	dq_nccl_result (*iflush)(void *comm, int n, void **data, int *bytes, void **mrs, void **request);
	dq_nccl_result (*test)(void *request, int *done, int *sizes);
	dq_nccl_result (*close_send)(void *comm);
	dq_nccl_result (*close_recv)(void *comm);
	dq_nccl_result (*close_listen)(void *listener);
	dq_nccl_result (*get_device_mr)(void *comm, void *mr, void **device_mr);
	dq_nccl_result (*recv_consumed)(void *comm, int n, void *request);
	dq_nccl_result (*make_vdevice)(int *device, struct dq_nccl_vprops_v9 *vprops);
};

/* init() and finalize() a communicator, with a context of the plugin's; set_attr. */
struct dq_nccl_net_v11 {
	const char *name;
	dq_nccl_result (*init)(void **context, uint64_t communicator, struct dq_nccl_config *config, dq_nccl_logger logger,
			       dq_nccl_profiler profiler);
	dq_nccl_result (*devices)(int *count);
	dq_nccl_result (*get_properties)(int device, struct dq_nccl_props_v11 *props);
	dq_nccl_result (*listen)(void *context, int device, void *handle, void **listener);
	dq_nccl_result (*connect)(void *context, int device, void *handle, void **comm, struct dq_nccl_device_handle **offload);
	dq_nccl_result (*accept)(void *listener, void **comm, struct dq_nccl_device_handle **offload);
	dq_nccl_result (*reg_mr)(void *comm, void *address, size_t bytes, int type, void **mr);
	dq_nccl_result (*reg_mr_dmabuf)(void *comm, void *address, size_t bytes, int type, uint64_t offset, int fd, void **mr);
	dq_nccl_result (*dereg_mr)(void *comm, void *mr);
	dq_nccl_result (*isend)(void *comm, void *data, size_t bytes, int tag, void *mr, void *parent, void **request);
	dq_nccl_result (*irecv)(void *comm, int n, void **data, size_t *bytes, int *tags, void **mrs, void **parents,
				void **request);
	dq_nccl_result (*iflush)(void *comm, int n, void **data, int *bytes, void **mrs, void **request);
	dq_nccl_result (*test)(void *request, int *done, int *sizes);
	dq_nccl_result (*close_send)(void *comm);
	dq_nccl_result (*close_recv)(void *comm);
	dq_nccl_result (*close_listen)(void *listener);
	dq_nccl_result (*get_device_mr)(void *comm, void *mr, void **device_mr);
	dq_nccl_result (*recv_consumed)(void *comm, int n, void *request);
	dq_nccl_result (*make_vdevice)(int *device, struct dq_nccl_vprops_v9 *vprops);
	dq_nccl_result (*finalize)(void *context);
	dq_nccl_result (*set_attr)(void *context, struct dq_nccl_attr *attr);
};

/* Properties of up to 8 devices in one, with rail and plane. */
struct dq_nccl_net_v12 {
	const char *name;
	dq_nccl_result (*init)(void **context, uint64_t communicator, struct dq_nccl_config *config, dq_nccl_logger logger,
			       dq_nccl_profiler profiler);
	dq_nccl_result (*devices)(int *count);
	dq_nccl_result (*get_properties)(int device, struct dq_nccl_props_v12 *props);
	dq_nccl_result (*listen)(void *context, int device, void *handle, void **listener);
	dq_nccl_result (*connect)(void *context, int device, void *handle, void **comm, struct dq_nccl_device_handle **offload);
	dq_nccl_result (*accept)(void *listener, void **comm, struct dq_nccl_device_handle **offload);
	dq_nccl_result (*reg_mr)(void *comm, void *address, size_t bytes, int type, void **mr);
	dq_nccl_result (*reg_mr_dmabuf)(void *comm, void *address, size_t bytes, int type, uint64_t offset, int fd, void **mr);
	dq_nccl_result (*dereg_mr)(void *comm, void *mr);
	dq_nccl_result (*isend)(void *comm, void *data, size_t bytes, int tag, void *mr, void *parent, void **request);
	dq_nccl_result (*irecv)(void *comm, int n, void **data, size_t *bytes, int *tags, void **mrs, void **parents,
				void **request);
	dq_nccl_result (*iflush)(void *comm, int n, void **data, int *bytes, void **mrs, void **request);
	dq_nccl_result (*test)(void *request, int *done, int *sizes);
	dq_nccl_result (*close_send)(void *comm);
	dq_nccl_result (*close_recv)(void *comm);
	dq_nccl_result (*close_listen)(void *listener);
	dq_nccl_result (*get_device_mr)(void *comm, void *mr, void **device_mr);
	dq_nccl_result (*recv_consumed)(void *comm, int n, void *request);
	dq_nccl_result (*make_vdevice)(int *device, struct dq_nccl_vprops_v12 *vprops);
	dq_nccl_result (*finalize)(void *context);
	dq_nccl_result (*set_attr)(void *context, struct dq_nccl_attr *attr);
};

#define DQ_NCCL_PIN_NET(type)                  \
	DQ_NCCL_PIN(type, init, 8);            \
	DQ_NCCL_PIN(type, devices, 16);        \
	DQ_NCCL_PIN(type, get_properties, 24); \
	DQ_NCCL_PIN(type, listen, 32);         \
	DQ_NCCL_PIN(type, connect, 40);        \
	DQ_NCCL_PIN(type, accept, 48);         \
	DQ_NCCL_PIN(type, reg_mr, 56);         \
	DQ_NCCL_PIN(type, reg_mr_dmabuf, 64);  \
	DQ_NCCL_PIN(type, dereg_mr, 72);       \
	DQ_NCCL_PIN(type, isend, 80);          \
	DQ_NCCL_PIN(type, irecv, 88);          \
	DQ_NCCL_PIN(type, iflush, 96);         \
	DQ_NCCL_PIN(type, test, 104);          \
	DQ_NCCL_PIN(type, close_send, 112);    \
	DQ_NCCL_PIN(type, close_recv, 120);    \
	DQ_NCCL_PIN(type, close_listen, 128);  \
	DQ_NCCL_PIN(type, get_device_mr, 136); \
	DQ_NCCL_PIN(type, recv_consumed, 144)

DQ_NCCL_PIN_NET(dq_nccl_net_v8);
DQ_NCCL_PIN_SIZE(dq_nccl_net_v8, 152);
DQ_NCCL_PIN_NET(dq_nccl_net_v9);
DQ_NCCL_PIN(dq_nccl_net_v9, make_vdevice, 152);
DQ_NCCL_PIN_SIZE(dq_nccl_net_v9, 160);
DQ_NCCL_PIN_NET(dq_nccl_net_v10);
DQ_NCCL_PIN(dq_nccl_net_v10, make_vdevice, 152);
DQ_NCCL_PIN_SIZE(dq_nccl_net_v10, 160);
DQ_NCCL_PIN_NET(dq_nccl_net_v11);
DQ_NCCL_PIN(dq_nccl_net_v11, make_vdevice, 152);
DQ_NCCL_PIN(dq_nccl_net_v11, finalize, 160);
DQ_NCCL_PIN(dq_nccl_net_v11, set_attr, 168);
DQ_NCCL_PIN_SIZE(dq_nccl_net_v11, 176);
DQ_NCCL_PIN_NET(dq_nccl_net_v12);
DQ_NCCL_PIN(dq_nccl_net_v12, make_vdevice, 152);
DQ_NCCL_PIN(dq_nccl_net_v12, finalize, 160);
DQ_NCCL_PIN(dq_nccl_net_v12, set_attr, 168);
DQ_NCCL_PIN_SIZE(dq_nccl_net_v12, 176);

#endif
