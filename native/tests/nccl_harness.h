/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The net plugin as NCCL sees it: loaded by dlopen, found by symbol, called through one version of its interface. A thin table
 * for each version v8 to v12 lifts what differs (sizes, contexts, configuration, profiler arguments) to the functions here,
 * which have the newest meaning; a test is written once and run for every version.
 *
 * A plugin attaches to the daemon of its process. For a test to be two hosts in one process, each host has a copy of the file,
 * which the loader takes for another library, with its own variables.
 *
 * Functions named net_* return what the plugin returned (enum dq_nccl_result) and check nothing; those named job_* fail the test.
 */
#ifndef DQ_TESTS_NCCL_HARNESS_H
#define DQ_TESTS_NCCL_HARNESS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "nccl/abi.h"

#define NET_VERSION_OLDEST 8
#define NET_VERSION_NEWEST 12

struct net_properties {              /* those of the newest version; what an older one does not tell has the value in brackets */
	const char *name, *pci_path;
	uint64_t guid;
	int ptr_support, reg_is_global;
	int force_flush;             /* [-1] */
	int speed, port;
	float latency;
	int max_comms, max_recvs, device_type, device_version;
	int vdevices;                /* [-1] */
	int vdevice0;                /* [-1] */
	size_t max_p2p_bytes, max_coll_bytes;   /* [0] */
	int max_multi_request;       /* [-1] */
	int rail, plane;             /* [-2] */
};

struct net {
	const struct net_table *table;
	void *library;               /* NULL: not loaded */
	const void *symbol;          /* ncclNetPlugin_vN */
	void *ctx;                   /* from v11 on */
	int version;
	char path[256];
};

/* --- loading --- */
const char *net_plugin_path(void);                          /* of the built plugin; DQ_TEST_NCCL_PLUGIN names it */
bool net_load(struct net *n, const char *path, int version); /* false: no such symbol */
void net_unload(struct net *n);
const char *net_name(const struct net *n);
bool net_may_be_null(const struct net *n, bool *make_vdevice, bool *set_net_attr); /* false: something else is NULL */

/* --- calls --- */
int net_init(struct net *n, uint64_t comm_id);              /* one of NCCL's communicators; before v11 once a process */
int net_finalize(struct net *n);                            /* nothing before v11 */
int net_devices(struct net *n, int *count);
int net_get_properties(struct net *n, int device, struct net_properties *out);
int net_listen(struct net *n, int device, void *handle, void **listen_comm);
int net_connect(struct net *n, int device, void *handle, void **send_comm);
int net_accept(struct net *n, void *listen_comm, void **recv_comm);
int net_reg(struct net *n, void *comm, void *data, size_t bytes, int type, void **mhandle);
int net_reg_dmabuf(struct net *n, void *comm, void *data, size_t bytes, int type, uint64_t offset, int fd, void **mhandle);
int net_dereg(struct net *n, void *comm, void *mhandle);
int net_isend(struct net *n, void *comm, void *data, size_t bytes, int tag, void *mhandle, void **request);
int net_irecv(struct net *n, void *comm, int count, void **data, size_t *bytes, int *tags, void **mhandles, void **request);
int net_iflush(struct net *n, void *comm, int count, void **data, int *bytes, void **mhandles, void **request);
int net_test(struct net *n, void *request, int *done, int *bytes);
int net_close_send(struct net *n, void *comm);
int net_close_recv(struct net *n, void *comm);
int net_close_listen(struct net *n, void *comm);
/* Concurrent peers and flows a peer of what is to come, as NCCL tells them; nothing before v11. */
int net_set_attributes(struct net *n, int peers, int flows);

/* --- what the plugin logged, at warning level, in this process --- */
void net_log_clear(void);
bool net_log_has(const char *words);
const char *net_log_text(void);                             /* for messages of failed tests */

/* --- a job: one rank on each host --- */
struct job_pair {                    /* one direction between two ranks, as NCCL has it for a channel */
	struct net *from, *to;
	void *send, *recv;
};

struct job {
	struct net ranks[2];
	int version;
};

int job_start(void **state);         /* cmocka: *state is a const int *, the version; becomes a struct job * */
int job_start_with(void **state, uint64_t max_memory_bytes); /* that a process may have of its daemon */
int job_stop(void **state);
/* Load rank's copy of the plugin and attach it to a host's daemon. */
void job_load(struct net *n, unsigned copy, unsigned host, int version);
void job_connect(struct net *from, struct net *to, struct job_pair *p);
void job_close(struct job_pair *p);
void *job_reg(struct net *n, void *comm, void *data, size_t bytes);
/* Call until there is a request; others of the job are let go on meanwhile, since that may be what it waits for. */
void *job_isend(struct job_pair *p, void *data, size_t bytes, int tag, void *mhandle);
void *job_irecv(struct job_pair *p, void *data, size_t bytes, int tag, void *mhandle);
void job_wait(struct net *n, void *request, int *bytes);    /* until it is done */
/* Until test() says something else than "not yet"; its result. */
int job_outcome(struct net *n, void *request);
int job_connect_outcome(struct net *n, void *handle, void **comm);
int job_accept_outcome(struct net *n, void *listen_comm, void **comm);

#define job_ok(call) job_ok_at((call), #call, __FILE__, __LINE__)
void job_ok_at(int result, const char *call, const char *file, int line);

/* Fails the test; also in a thread that is not the test's, where that ends the program with the text on stderr. */
_Noreturn void job_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

void job_fill(void *p, size_t bytes, uint32_t seed);
void job_check(const void *p, size_t bytes, uint32_t seed); /* fails the test where a byte is another */

double job_now_s(void);
int job_threads(void);               /* of this process, now */

#define JOB_PATIENCE_S 30            /* what takes longer is broken */

/* Run every test for every version, v8 first, or for those that DQ_TEST_NCCL_VERSIONS names ("v8 v12"); the names of the tests
 * say which. Returns cmocka's result. */
int job_run(const struct CMUnitTest *tests, size_t count);

#endif
