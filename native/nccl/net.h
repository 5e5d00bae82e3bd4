/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The one implementation behind all versions of the plugin, with the meaning of the newest. adapter.c makes the versions of it.
 *
 * Objects and who owns them:
 *   user      what init() made: a communicator from v11 on; one for the whole process before
 *   lane      one context of the shim. Its lock is the only one on the way of a message, so busy threads want one each; but each
 *             is a client of the daemon, of which it lets in some dozens, and a process may have a hundred communicators. So there
 *             are a few lanes (DQPLB_NCCL_CONTEXTS), a user stays with one, and new users get the lane with the fewest.
 *             A lane whose daemon ended serves nobody new: the next user gets another, which attaches anew.
 *   listener, pending connect, comm, request: of a user
 *   mr        registered memory: of the process, counted
 *
 * Threads: calls come from several threads of the library. The state of the process and of users is guarded by one mutex, which
 * isend, irecv and test do not take: a comm and its requests belong to the thread that drives it, as the library promises.
 * Errors: each function returns what the library is to see, after it has logged why, once a cause.
 */
#ifndef DQ_NCCL_NET_H
#define DQ_NCCL_NET_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include <dqplb.h>

#include "nccl/abi.h"

#define DQ_NCCL_UNLIKELY(x) __builtin_expect(!!(x), 0)
#define DQ_NCCL_NAME "dqplb"
#define DQ_NCCL_LANES_MAX 16u
#define DQ_NCCL_LANES_DEFAULT 4u
#define DQ_NCCL_DEVICES_MAX 64u
#define DQ_NCCL_RING_ENTRIES 16384u      /* asked for; the daemon may give less */
#define DQ_NCCL_P2P_BYTES_MAX (1ull << 30) /* one message; 32,768 segments of 32 KiB, which every path can */
#define DQ_NCCL_LARGE 65536u             /* bytes: so much takes longer than the sleep of a test in vain */
#define DQ_NCCL_CPUS_FEW 4u               /* two ends that ask without end, and a daemon for each */
#define DQ_NCCL_CONNECT_TIMEOUT_S 600u
#define DQ_NCCL_CONNECT_TIMEOUT_MAX_S 86400u

/* --- settings.c: the environment, read at the first init() --- */
struct dq_nccl_settings {
	uint64_t connect_timeout_ns;     /* DQPLB_NCCL_CONNECT_TIMEOUT_S */
	uint32_t lanes;                  /* DQPLB_NCCL_CONTEXTS */
	bool few_cpus;                   /* this process may use less than DQ_NCCL_CPUS_FEW */
};
dq_nccl_result dq_nccl_settings_read(struct dq_nccl_settings *out);

/* --- log.c --- */
void dq_nccl_log_to(dq_nccl_logger logger); /* the newest stays; NULL is ignored */
void dq_nccl_log(int level, const char *file, int line, const char *format, ...) __attribute__((format(printf, 4, 5)));
/* Has this cause been told before? Remembers it. The text names the cause. */
bool dq_nccl_log_first(const char *cause);
/* Forget what was told. */
void dq_nccl_log_reset(void);
#define DQ_NCCL_WARN(...) dq_nccl_log(DQ_NCCL_LOG_WARN, __FILE__, __LINE__, __VA_ARGS__)
#define DQ_NCCL_INFO(...) dq_nccl_log(DQ_NCCL_LOG_INFO, __FILE__, __LINE__, __VA_ARGS__)

/* --- error.c --- */
dq_nccl_result dq_nccl_result_of(int status);  /* of a status of the shim */
const char *dq_nccl_advice(int status);        /* what to do; "" when there is nothing to say */
struct dq_nccl_comm;
/* A call of the shim failed: log, with the detail of the shim, what was tried. Returns the result. */
dq_nccl_result dq_nccl_fail(int status, const char *what, int device);
/* The same of an operation on a comm, which names peer, device and path class. */
dq_nccl_result dq_nccl_fail_comm(int status, const struct dq_nccl_comm *comm, const char *what, size_t bytes);

/* --- lane.c --- */
struct dq_nccl_lane {
	dqplb_context *ctx;
	uint32_t number;                 /* 0.. */
	uint32_t users;
	int device[DQ_NCCL_DEVICES_MAX]; /* number here of each device of the process; -1: it is not there any more */
	uint32_t room;                   /* requests that may be outstanding */
	_Atomic uint32_t sends, recvs;   /* outstanding */
	int32_t peers, flows;            /* hint that the daemon has */
	_Atomic bool hint_owed;          /* a newer one could not be told yet */
	dqplb_mem *_Atomic nothing;      /* for empty messages without memory; NULL: none came yet */
};
/* State lock held for all. */
dq_nccl_result dq_nccl_lane_join(struct dq_nccl_lane **out);
void dq_nccl_lane_leave(struct dq_nccl_lane *lane);
void dq_nccl_lane_hint(struct dq_nccl_lane *lane); /* the hints of its users have changed: tell the daemon */

/* --- device.c: the devices as they were at the first init() --- */
dq_nccl_result dq_nccl_devices_load(struct dq_nccl_lane *lane);
void dq_nccl_devices_forget(void);
/* Numbers of this context's devices for those of the process, by name. */
void dq_nccl_devices_map(struct dq_nccl_lane *lane);
const char *dq_nccl_device_name(int device); /* never NULL */
dq_nccl_result dq_nccl_devices(int *count);
dq_nccl_result dq_nccl_properties(int device, struct dq_nccl_props_v12 *props);
dq_nccl_result dq_nccl_device_check(const struct dq_nccl_lane *lane, int device, const char *call);

/* --- plugin.c --- */
struct dq_nccl_user {
	struct dq_nccl_lane *lane;
	struct dq_nccl_user *next;       /* of the process */
	uint64_t communicator;
	struct dq_nccl_pending **pending; /* connects under way, by number */
	uint32_t pending_room;
	uint32_t pending_hint;           /* no free place before this one */
	uint64_t pending_cookie;
	struct dq_nccl_comm *comms;      /* open */
	struct dq_nccl_listener *listeners;
	_Atomic int32_t peers, flows;    /* the largest hint; 0: none */
};
struct dq_nccl_state {
	pthread_mutex_t lock;
	uint32_t inits;                  /* users */
	struct dq_nccl_settings settings;
	struct dq_nccl_user *users;
	struct dq_nccl_user *shared;     /* of the versions before v11, whose init() has no context */
	bool ended;                      /* the process ends: listen, connect, accept and close do nothing any more */
};
extern struct dq_nccl_state dq_nccl_state;
dq_nccl_result dq_nccl_init(void **out, uint64_t communicator, dq_nccl_logger logger);
dq_nccl_result dq_nccl_init_shared(dq_nccl_logger logger); /* for versions without finalize(): may be called again */
struct dq_nccl_user *dq_nccl_shared_user(void);
dq_nccl_result dq_nccl_finalize(struct dq_nccl_user *user);
dq_nccl_result dq_nccl_set_attr(struct dq_nccl_user *user, const struct dq_nccl_attr *attr);

/* --- connect.c --- */
struct dq_nccl_listener {
	struct dq_nccl_user *user;
	struct dq_nccl_listener *prev, *next;
	dqplb_listener *listener;
	dqplb_request *accept;           /* NULL: to be posted by the next accept() */
	uint64_t deadline;               /* ns, 0: accept() was not called yet */
	int device;
};
/* A connect() that was not answered. It outlives the call in a table of the user; the library's handle buffer names its place. */
struct dq_nccl_pending {
	unsigned char handle[DQ_NCCL_HANDLE_BYTES]; /* as it was given */
	dqplb_request *request;
	uint64_t deadline;
	uint64_t cookie;
	uint32_t place;                  /* in user->pending */
	int device;
};
dq_nccl_result dq_nccl_listen(struct dq_nccl_user *user, int device, void *handle, void **out);
dq_nccl_result dq_nccl_connect(struct dq_nccl_user *user, int device, void *handle, void **out);
dq_nccl_result dq_nccl_accept(struct dq_nccl_listener *listener, void **out);
dq_nccl_result dq_nccl_close_listen(struct dq_nccl_listener *listener);
dq_nccl_result dq_nccl_close_comm(struct dq_nccl_comm *comm);
/* State lock held: close and free what a user left behind. */
void dq_nccl_drop_pending(struct dq_nccl_user *user);

/* --- memory.c --- */
enum dq_nccl_mr_kind {
	DQ_NCCL_MR_HOST,                 /* any memory of the process: copied by the shim */
	DQ_NCCL_MR_SHIM,                 /* of dqplb_mem_alloc() in this process: nothing is copied */
	DQ_NCCL_MR_DMABUF
};
struct dq_nccl_elsewhere {               /* host memory on another lane than the one that it was registered for */
	struct dq_nccl_elsewhere *next;
	struct dq_nccl_lane *lane;
	dqplb_mem *mem;
};
struct dq_nccl_mr {
	enum dq_nccl_mr_kind kind;
	uint32_t refs;
	struct dq_nccl_mr *next;         /* in its chain of the table */
	unsigned char *address;          /* as the library knows it */
	size_t bytes;
	uint64_t identity[2];            /* dma-buf: device and inode; shim memory: its serial number */
	uint64_t offset;                 /* dma-buf: in the file */
	size_t shift;                    /* shim memory: where address lies in it */
	struct dq_nccl_lane *_Atomic lane; /* NULL: closed, and mem with it */
	dqplb_mem *mem;
	struct dq_nccl_elsewhere *elsewhere;
};
dq_nccl_result dq_nccl_reg_mr(struct dq_nccl_comm *comm, void *address, size_t bytes, int type, void **out);
dq_nccl_result dq_nccl_reg_dmabuf(struct dq_nccl_comm *comm, void *address, size_t bytes, int type, uint64_t offset, int fd, void **out);
dq_nccl_result dq_nccl_dereg_mr(struct dq_nccl_mr *mr);
/* The memory for [data, data + bytes) on this lane, and where in it. NULL: logged. mr may be NULL where bytes is 0. */
dqplb_mem *dq_nccl_mr_at(struct dq_nccl_mr *mr, struct dq_nccl_lane *lane, const void *data, size_t bytes, size_t *offset);
/* A lane is about to be closed, and its memory with it. */
void dq_nccl_mr_forget_lane(const struct dq_nccl_lane *lane);

/* --- transfer.c --- */
enum dq_nccl_op { DQ_NCCL_FREE, DQ_NCCL_SEND, DQ_NCCL_RECV, DQ_NCCL_FLUSH };

/* What the library holds for an isend, irecv or iflush. */
struct dq_nccl_request {
	struct dq_nccl_comm *comm;
	uint8_t op;                      /* enum dq_nccl_op */
	uint8_t n;                       /* parts */
	uint8_t posted;                  /* bit i: part i was given to the shim */
	uint8_t done;                    /* bit i: part i is done, and its size known */
	uint8_t block;                   /* in which it lies */
	bool large;                      /* DQ_NCCL_LARGE or more: SEND by what is sent, RECV by the room of its first part */
};
/* One message of a request. */
union dq_nccl_part {
	dqplb_request *request;          /* posted */
	uint64_t bytes;                  /* done: the length that it had */
	dqplb_mem *mem;                  /* FLUSH, not posted */
};
/* A receive of a group for which the shim had no room yet. */
struct dq_nccl_deferred {
	dqplb_mem *mem;
	size_t offset, bytes;
	uint64_t tag;
};
/* Places for requests. A receiving comm has one block of them, and another when there are flushes besides. A sending one gets more as
 * it needs them: its peer may post 32 groups of 8, and whoever sends the last message of a group must find a place, however far
 * those of the others are ahead. */
#define DQ_NCCL_BLOCKS_MAX DQ_NCCL_RECVS_MAX
struct dq_nccl_block {
	uint32_t free;                   /* bit i: request i is free */
	struct dq_nccl_request requests[DQ_NCCL_REQUESTS_MAX];
	union dq_nccl_part parts[];      /* parts_a_request for each request */
};
struct dq_nccl_comm {
	struct dq_nccl_user *user;
	struct dq_nccl_comm *prev, *next;
	struct dq_nccl_lane *lane;
	dqplb_flow *flow;
	int device;
	dq_nccl_result failed;           /* not SUCCESS: what everything on it gives from now on */
	bool receives;
	uint8_t parts_a_request;         /* 1, or DQ_NCCL_RECVS_MAX */
	uint8_t block_count;
	uint16_t taken;                  /* requests that are not free */
	struct dq_nccl_request *waiting; /* the one whose parts are in deferred[] */
	struct dq_nccl_block *blocks[DQ_NCCL_BLOCKS_MAX];
	struct dq_nccl_deferred deferred[]; /* receiving: DQ_NCCL_RECVS_MAX of them */
};
struct dq_nccl_comm *dq_nccl_comm_new(struct dq_nccl_user *user, int device, dqplb_flow *flow, bool receives);
void dq_nccl_comm_free(struct dq_nccl_comm *comm); /* nobody will test its requests any more; the flow is left alone */
dq_nccl_result dq_nccl_isend(struct dq_nccl_comm *comm, void *data, size_t bytes, int tag, struct dq_nccl_mr *mr,
			     void **out);
dq_nccl_result dq_nccl_irecv(struct dq_nccl_comm *comm, int n, void *const *data, const size_t *bytes, const int *tags,
			     void *const *mrs, void **out);
dq_nccl_result dq_nccl_iflush(struct dq_nccl_comm *comm, int n, void *const *data, const int *bytes, void *const *mrs,
			      void **out);
dq_nccl_result dq_nccl_test(struct dq_nccl_request *request, int *done, int *sizes);

#endif
