/* SPDX-License-Identifier: Apache-2.0 */
#include "nccl_harness.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "nccl_hosts.h"

/* --- log ---------------------------------------------------------------------------------------------------------- */

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static char log_warnings[16384];
static size_t log_used;

/* NCCL's logger; what is a warning is kept. */
static __attribute__((format(printf, 5, 6))) void net_logger(int level, unsigned long flags, const char *file, int line,
							     const char *format, ...)
{
	char text[2048];
	va_list args;
	int n;

	(void)flags;
	va_start(args, format);
	n = vsnprintf(text, sizeof text, format, args);
	va_end(args);
	if (n < 0 || !file || line < 0)
		abort();
	if (level != DQ_NCCL_LOG_WARN)
		return;
	pthread_mutex_lock(&log_lock);
	n = snprintf(log_warnings + log_used, sizeof log_warnings - log_used, "%s\n", text);
	log_used = (size_t)n < sizeof log_warnings - log_used ? log_used + (size_t)n : sizeof log_warnings - 1;
	pthread_mutex_unlock(&log_lock);
}

void net_log_clear(void)
{
	pthread_mutex_lock(&log_lock);
	log_used = 0;
	log_warnings[0] = 0;
	pthread_mutex_unlock(&log_lock);
}

bool net_log_has(const char *words)
{
	bool has;

	pthread_mutex_lock(&log_lock);
	has = strstr(log_warnings, words) != NULL;
	pthread_mutex_unlock(&log_lock);
	return has;
}

const char *net_log_text(void)
{
	static _Thread_local char copy[sizeof log_warnings];

	pthread_mutex_lock(&log_lock);
	memcpy(copy, log_warnings, log_used + 1);
	pthread_mutex_unlock(&log_lock);
	return copy;
}

/* --- the table of versions ---------------------------------------------------------------------------------------- */

/* Only what differs between versions is here; what does not is called through v8's table, whose first members all have. */
struct net_table {
	int version;
	int (*init)(struct net *n, uint64_t comm_id);
	int (*finalize)(struct net *n);
	int (*properties)(struct net *n, int device, struct net_properties *out);
	int (*listen)(struct net *n, int device, void *handle, void **comm);
	int (*connect)(struct net *n, int device, void *handle, void **comm, struct dq_nccl_device_handle **offload);
	int (*isend)(struct net *n, void *comm, void *data, size_t bytes, int tag, void *mr, void **request);
	int (*irecv)(struct net *n, void *comm, int count, void **data, size_t *bytes, int *tags, void **mrs, void **request);
	int (*set_attributes)(struct net *n, struct dq_nccl_attr *attr);
	bool (*complete)(const struct net *n, bool *make_vdevice, bool *set_attr);
};

#define AT(n, v) ((const struct dq_nccl_net_v##v *)(n)->symbol)

static int profiler(void **event, int type, void *parent, int64_t plugin, void *data)
{
	(void)event, (void)type, (void)parent, (void)plugin, (void)data;
	return DQ_NCCL_SUCCESS;
}

static void lift_common(struct net_properties *out, const char *name, const char *pci_path, uint64_t guid, int ptr_support,
			int reg_is_global, int speed, int port, float latency, int max_comms, int max_recvs, int type, int type_version)
{
	*out = (struct net_properties){
		.name = name, .pci_path = pci_path, .guid = guid, .ptr_support = ptr_support, .reg_is_global = reg_is_global,
		.force_flush = -1, .speed = speed, .port = port, .latency = latency, .max_comms = max_comms, .max_recvs = max_recvs,
		.device_type = type, .device_version = type_version, .vdevices = -1, .vdevice0 = -1, .max_multi_request = -1,
		.rail = -2, .plane = -2,
	};
}

#define LIFT_COMMON(out, p)                                                                                                        \
	lift_common(out, (p).name, (p).pci_path, (p).guid, (p).ptr_support, (p).reg_is_global, (p).speed, (p).port, (p).latency,   \
		    (p).max_comms, (p).max_recvs, (p).device_type, (p).device_version)
#define LIFT_V9(out, p)                                                                                                            \
	do {                                                                                                                       \
		(out)->force_flush = (p).force_flush;                                                                              \
		(out)->vdevices = (p).vprops.count;                                                                                \
		(out)->vdevice0 = (p).vprops.devices[0];                                                                           \
		(out)->max_p2p_bytes = (p).max_p2p_bytes;                                                                          \
		(out)->max_coll_bytes = (p).max_coll_bytes;                                                                        \
	} while (0)

static int v8_init(struct net *n, uint64_t comm_id)
{
	(void)comm_id;
	return AT(n, 8)->init(net_logger);
}

static int v8_finalize(struct net *n)
{
	(void)n;
	return DQ_NCCL_SUCCESS;
}

static int v8_properties(struct net *n, int device, struct net_properties *out)
{
	struct dq_nccl_props_v8 p;
	int rc;

	memset(&p, 0xa5, sizeof p); /* as on NCCL's stack */
	rc = AT(n, 8)->get_properties(device, &p);
	if (rc == DQ_NCCL_SUCCESS)
		LIFT_COMMON(out, p);
	return rc;
}

static int v8_listen(struct net *n, int device, void *handle, void **comm)
{
	return AT(n, 8)->listen(device, handle, comm);
}

static int v8_connect(struct net *n, int device, void *handle, void **comm, struct dq_nccl_device_handle **offload)
{
	return AT(n, 8)->connect(device, handle, comm, offload);
}

static int v8_isend(struct net *n, void *comm, void *data, size_t bytes, int tag, void *mr, void **request)
{
	return AT(n, 8)->isend(comm, data, (int)bytes, tag, mr, request);
}

static int v8_irecv(struct net *n, void *comm, int count, void **data, size_t *bytes, int *tags, void **mrs, void **request)
{
	int sizes[DQ_NCCL_RECVS_MAX];

	for (int i = 0; i < count; i++)
		sizes[i] = (int)bytes[i];
	return AT(n, 8)->irecv(comm, count, data, sizes, tags, mrs, request);
}

static int v8_set_attributes(struct net *n, struct dq_nccl_attr *attr)
{
	(void)n, (void)attr;
	return DQ_NCCL_SUCCESS;
}

/* The members of v8 that NCCL calls without looking; later versions have them too. */
static bool v8_complete(const struct net *n, bool *make_vdevice, bool *set_attr)
{
	const struct dq_nccl_net_v8 *t = AT(n, 8);

	*make_vdevice = *set_attr = false;
	return t->name && t->init && t->devices && t->get_properties && t->listen && t->connect && t->accept && t->reg_mr &&
	       t->reg_mr_dmabuf && t->dereg_mr && t->isend && t->irecv && t->iflush && t->test && t->close_send && t->close_recv &&
	       t->close_listen;
}

static int v9_properties(struct net *n, int device, struct net_properties *out)
{
	struct dq_nccl_props_v9 p;
	int rc;

	memset(&p, 0xa5, sizeof p);
	rc = AT(n, 9)->get_properties(device, &p);
	if (rc == DQ_NCCL_SUCCESS) {
		LIFT_COMMON(out, p);
		LIFT_V9(out, p);
	}
	return rc;
}

static int v9_isend(struct net *n, void *comm, void *data, size_t bytes, int tag, void *mr, void **request)
{
	return AT(n, 9)->isend(comm, data, bytes, tag, mr, request);
}

static int v9_irecv(struct net *n, void *comm, int count, void **data, size_t *bytes, int *tags, void **mrs, void **request)
{
	return AT(n, 9)->irecv(comm, count, data, bytes, tags, mrs, request);
}

static bool v9_complete(const struct net *n, bool *make_vdevice, bool *set_attr)
{
	bool whole = v8_complete(n, make_vdevice, set_attr);

	*make_vdevice = AT(n, 9)->make_vdevice != NULL;
	return whole;
}

static int v10_init(struct net *n, uint64_t comm_id)
{
	(void)comm_id;
	return AT(n, 10)->init(net_logger, profiler);
}

static int v10_connect(struct net *n, int device, void *handle, void **comm, struct dq_nccl_device_handle **offload)
{
	struct dq_nccl_config config = {.traffic_class = DQ_NCCL_UNDEFINED};

	return AT(n, 10)->connect(device, &config, handle, comm, offload);
}

static int v10_isend(struct net *n, void *comm, void *data, size_t bytes, int tag, void *mr, void **request)
{
	return AT(n, 10)->isend(comm, data, bytes, tag, mr, NULL, request);
}

static int v10_irecv(struct net *n, void *comm, int count, void **data, size_t *bytes, int *tags, void **mrs, void **request)
{
	void *parents[DQ_NCCL_RECVS_MAX] = {NULL};

	return AT(n, 10)->irecv(comm, count, data, bytes, tags, mrs, parents, request);
}

static int v11_init(struct net *n, uint64_t comm_id)
{
	struct dq_nccl_config config = {.traffic_class = DQ_NCCL_UNDEFINED};

	return AT(n, 11)->init(&n->ctx, comm_id, &config, net_logger, profiler);
}

static int v11_finalize(struct net *n)
{
	return AT(n, 11)->finalize(n->ctx);
}

static int v11_properties(struct net *n, int device, struct net_properties *out)
{
	struct dq_nccl_props_v11 p;
	int rc;

	memset(&p, 0xa5, sizeof p);
	rc = AT(n, 11)->get_properties(device, &p);
	if (rc == DQ_NCCL_SUCCESS) {
		LIFT_COMMON(out, p);
		LIFT_V9(out, p);
		out->max_multi_request = p.max_multi_request;
	}
	return rc;
}

static int v11_listen(struct net *n, int device, void *handle, void **comm)
{
	return AT(n, 11)->listen(n->ctx, device, handle, comm);
}

static int v11_connect(struct net *n, int device, void *handle, void **comm, struct dq_nccl_device_handle **offload)
{
	return AT(n, 11)->connect(n->ctx, device, handle, comm, offload);
}

static int v11_isend(struct net *n, void *comm, void *data, size_t bytes, int tag, void *mr, void **request)
{
	return AT(n, 11)->isend(comm, data, bytes, tag, mr, NULL, request);
}

/* NULL for all parents, as NCCL passes where no profiler is loaded. */
static int v11_irecv(struct net *n, void *comm, int count, void **data, size_t *bytes, int *tags, void **mrs, void **request)
{
	return AT(n, 11)->irecv(comm, count, data, bytes, tags, mrs, NULL, request);
}

static int v11_set_attributes(struct net *n, struct dq_nccl_attr *attr)
{
	return AT(n, 11)->set_attr ? AT(n, 11)->set_attr(n->ctx, attr) : DQ_NCCL_SUCCESS;
}

static bool v11_complete(const struct net *n, bool *make_vdevice, bool *set_attr)
{
	bool whole = v9_complete(n, make_vdevice, set_attr);

	*set_attr = AT(n, 11)->set_attr != NULL;
	return whole && AT(n, 11)->finalize;
}

static int v12_properties(struct net *n, int device, struct net_properties *out)
{
	struct dq_nccl_props_v12 p;
	int rc;

	memset(&p, 0xa5, sizeof p);
	rc = AT(n, 12)->get_properties(device, &p);
	if (rc == DQ_NCCL_SUCCESS) {
		LIFT_COMMON(out, p);
		LIFT_V9(out, p);
		out->max_multi_request = p.max_multi_request;
		out->rail = p.rail;
		out->plane = p.plane;
	}
	return rc;
}

static const struct net_table tables[] = {
	{8, v8_init, v8_finalize, v8_properties, v8_listen, v8_connect, v8_isend, v8_irecv, v8_set_attributes, v8_complete},
	{9, v8_init, v8_finalize, v9_properties, v8_listen, v8_connect, v9_isend, v9_irecv, v8_set_attributes, v9_complete},
	{10, v10_init, v8_finalize, v9_properties, v8_listen, v10_connect, v10_isend, v10_irecv, v8_set_attributes, v9_complete},
	{11, v11_init, v11_finalize, v11_properties, v11_listen, v11_connect, v11_isend, v11_irecv, v11_set_attributes, v11_complete},
	{12, v11_init, v11_finalize, v12_properties, v11_listen, v11_connect, v11_isend, v11_irecv, v11_set_attributes, v11_complete},
};

/* --- loading ------------------------------------------------------------------------------------------------------ */

const char *net_plugin_path(void)
{
	const char *path = getenv("DQ_TEST_NCCL_PLUGIN");

	if (!path || !*path)
		fail_msg("DQ_TEST_NCCL_PLUGIN does not name the plugin's file; `meson test` sets it");
	return path;
}

bool net_load(struct net *n, const char *path, int version)
{
	char symbol[32];

	memset(n, 0, sizeof *n);
	for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
		if (tables[i].version == version)
			n->table = &tables[i];
	if (!n->table)
		fail_msg("no table for version %d", version);
	n->version = version;
	n->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!n->library)
		fail_msg("%s", dlerror());
	snprintf(n->path, sizeof n->path, "%s", path);
	snprintf(symbol, sizeof symbol, "ncclNetPlugin_v%d", version);
	n->symbol = dlsym(n->library, symbol);
	if (!n->symbol) {
		net_unload(n);
		return false;
	}
	return true;
}

void net_unload(struct net *n)
{
	if (n->library && dlclose(n->library) != 0)
		fail_msg("%s", dlerror());
	n->library = NULL;
	n->symbol = NULL;
}

const char *net_name(const struct net *n)
{
	return AT(n, 8)->name;
}

bool net_may_be_null(const struct net *n, bool *make_vdevice, bool *set_net_attr)
{
	return n->table->complete(n, make_vdevice, set_net_attr);
}

/* --- calls -------------------------------------------------------------------------------------------------------- */

int net_init(struct net *n, uint64_t comm_id)
{
	return n->table->init(n, comm_id);
}

int net_finalize(struct net *n)
{
	return n->table->finalize(n);
}

int net_devices(struct net *n, int *count)
{
	return AT(n, 8)->devices(count);
}

int net_get_properties(struct net *n, int device, struct net_properties *out)
{
	return n->table->properties(n, device, out);
}

int net_listen(struct net *n, int device, void *handle, void **listen_comm)
{
	return n->table->listen(n, device, handle, listen_comm);
}

/* NCCL points *offload to a place of its own where it would take an offloaded connection, and to nothing where not. */
int net_connect(struct net *n, int device, void *handle, void **send_comm)
{
	struct dq_nccl_device_handle *offload = NULL;
	int rc = n->table->connect(n, device, handle, send_comm, &offload);

	assert_null(offload);
	return rc;
}

/* accept() and all that follow have the same arguments and the same place in every version; abi.h pins the layouts. */
int net_accept(struct net *n, void *listen_comm, void **recv_comm)
{
	struct dq_nccl_device_handle *offload = NULL;
	int rc = AT(n, 8)->accept(listen_comm, recv_comm, &offload);

	assert_null(offload);
	return rc;
}

int net_reg(struct net *n, void *comm, void *data, size_t bytes, int type, void **mhandle)
{
	return AT(n, 8)->reg_mr(comm, data, bytes, type, mhandle);
}

int net_reg_dmabuf(struct net *n, void *comm, void *data, size_t bytes, int type, uint64_t offset, int fd, void **mhandle)
{
	return AT(n, 8)->reg_mr_dmabuf(comm, data, bytes, type, offset, fd, mhandle);
}

int net_dereg(struct net *n, void *comm, void *mhandle)
{
	return AT(n, 8)->dereg_mr(comm, mhandle);
}

int net_isend(struct net *n, void *comm, void *data, size_t bytes, int tag, void *mhandle, void **request)
{
	return n->table->isend(n, comm, data, bytes, tag, mhandle, request);
}

int net_irecv(struct net *n, void *comm, int count, void **data, size_t *bytes, int *tags, void **mhandles, void **request)
{
	return n->table->irecv(n, comm, count, data, bytes, tags, mhandles, request);
}

int net_iflush(struct net *n, void *comm, int count, void **data, int *bytes, void **mhandles, void **request)
{
	return AT(n, 8)->iflush(comm, count, data, bytes, mhandles, request);
}

int net_test(struct net *n, void *request, int *done, int *bytes)
{
	return AT(n, 8)->test(request, done, bytes);
}

int net_close_send(struct net *n, void *comm)
{
	return AT(n, 8)->close_send(comm);
}

int net_close_recv(struct net *n, void *comm)
{
	return AT(n, 8)->close_recv(comm);
}

int net_close_listen(struct net *n, void *comm)
{
	return AT(n, 8)->close_listen(comm);
}

int net_set_attributes(struct net *n, int peers, int flows)
{
	struct dq_nccl_attr attr = {.send = {peers, peers, flows, flows}, .recv = {peers, peers, flows, flows},
				    .ops = 1, .algorithms = 1, .protocols = 7};

	return n->table->set_attributes(n, &attr);
}

/* --- a job -------------------------------------------------------------------------------------------------------- */

void job_fail(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	fail();
	abort(); /* not reached */
}

double job_now_s(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

int job_threads(void)
{
	DIR *d = opendir("/proc/self/task");
	struct dirent *e;
	int n = 0;

	if (!d)
		job_fail("/proc/self/task: %s", strerror(errno));
	while ((e = readdir(d)))
		n += e->d_name[0] != '.';
	closedir(d);
	return n;
}

void job_ok_at(int result, const char *call, const char *file, int line)
{
	if (result != DQ_NCCL_SUCCESS)
		job_fail("%s:%d: %s: result %d; the plugin's warnings: %s", file, line, call, result, net_log_text());
}

void job_fill(void *p, size_t bytes, uint32_t seed)
{
	uint8_t *b = p;

	for (size_t i = 0; i < bytes; i++)
		b[i] = (uint8_t)((seed = seed * 1664525u + 1013904223u) >> 24);
}

void job_check(const void *p, size_t bytes, uint32_t seed)
{
	const uint8_t *b = p;

	for (size_t i = 0; i < bytes; i++) {
		const uint8_t expected = (uint8_t)((seed = seed * 1664525u + 1013904223u) >> 24);

		if (b[i] != expected)
			job_fail("byte %zu of %zu is 0x%02x, expected 0x%02x", i, bytes, b[i], expected);
	}
}

/* A file of its own for the loader, with the same bytes. */
static void copy_plugin(const char *from, const char *to)
{
	struct stat st;
	off_t done = 0;
	int in = open(from, O_RDONLY | O_CLOEXEC), out = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0700);

	if (in < 0 || out < 0 || fstat(in, &st) != 0)
		job_fail("copy of %s to %s: %s", from, to, strerror(errno));
	while (done < st.st_size)
		if (sendfile(out, in, &done, (size_t)(st.st_size - done)) <= 0)
			job_fail("copy of %s to %s: %s", from, to, strerror(errno));
	close(in);
	close(out);
}

void job_load(struct net *n, unsigned copy, unsigned host, int version)
{
	const char *original = net_plugin_path();

	if (copy == 0) {
		assert_true(net_load(n, original, version));
	} else {
		/* What the copy needs lies beside the original; the loader has it by name when the original is loaded. */
		void *needed = dlopen(original, RTLD_NOW | RTLD_LOCAL);
		char path[256];

		if (!needed)
			job_fail("%s", dlerror());
		snprintf(path, sizeof path, "/tmp/dqplb-nccl-copy-%d-%u.so", getpid(), copy);
		copy_plugin(original, path);
		assert_true(net_load(n, path, version));
		unlink(path);
		dlclose(needed);
	}
	setenv("DQPLB_SOCKET", nccl_host_socket(host), 1);
	job_ok(net_init(n, 0x1234567800u + host));
}

int job_start(void **state)
{
	return job_start_with(state, 4ull << 30);
}

int job_start_with(void **state, uint64_t max_memory_bytes)
{
	static struct job job;
	const int version = *(const int *)*state;

	memset(&job, 0, sizeof job);
	job.version = version;
	net_log_clear();
	nccl_hosts_start(2);
	nccl_host_limits(max_memory_bytes, 16384);
	for (unsigned i = 0; i < 2; i++)
		job_load(&job.ranks[i], i, i, version);
	*state = &job;
	return 0;
}

int job_stop(void **state)
{
	struct job *job = *state;

	for (int i = 1; i >= 0; i--)
		if (job->ranks[i].library) {
			net_finalize(&job->ranks[i]);
			net_unload(&job->ranks[i]);
		}
	nccl_hosts_stop();
	return 0;
}

int job_connect_outcome(struct net *n, void *handle, void **comm)
{
	const double end = job_now_s() + JOB_PATIENCE_S;
	int rc;

	*comm = NULL;
	while ((rc = net_connect(n, 0, handle, comm)) == DQ_NCCL_SUCCESS && !*comm) {
		if (job_now_s() > end)
			job_fail("connect() neither connects nor fails; warnings: %s", net_log_text());
		sched_yield();
	}
	return rc;
}

int job_accept_outcome(struct net *n, void *listen_comm, void **comm)
{
	const double end = job_now_s() + JOB_PATIENCE_S;
	int rc;

	*comm = NULL;
	while ((rc = net_accept(n, listen_comm, comm)) == DQ_NCCL_SUCCESS && !*comm) {
		if (job_now_s() > end)
			job_fail("accept() neither accepts nor fails; warnings: %s", net_log_text());
		sched_yield();
	}
	return rc;
}

void job_connect(struct net *from, struct net *to, struct job_pair *p)
{
	const double end = job_now_s() + JOB_PATIENCE_S;
	char handle[DQ_NCCL_HANDLE_BYTES];
	void *listener = NULL;

	memset(p, 0, sizeof *p);
	p->from = from;
	p->to = to;
	job_ok(net_listen(to, 0, handle, &listener));
	assert_non_null(listener);
	while (!p->send || !p->recv) {
		if (!p->send)
			job_ok(net_connect(from, 0, handle, &p->send));
		if (!p->recv)
			job_ok(net_accept(to, listener, &p->recv));
		if (job_now_s() > end)
			job_fail("no connection; warnings: %s", net_log_text());
		sched_yield();
	}
	job_ok(net_close_listen(to, listener));
}

void job_close(struct job_pair *p)
{
	if (p->send)
		job_ok(net_close_send(p->from, p->send));
	if (p->recv)
		job_ok(net_close_recv(p->to, p->recv));
	p->send = p->recv = NULL;
}

void *job_reg(struct net *n, void *comm, void *data, size_t bytes)
{
	void *mhandle = NULL;

	job_ok(net_reg(n, comm, data, bytes, DQ_NCCL_PTR_HOST, &mhandle));
	return mhandle;
}

void *job_isend(struct job_pair *p, void *data, size_t bytes, int tag, void *mhandle)
{
	const double end = job_now_s() + JOB_PATIENCE_S;
	void *request = NULL;

	for (;;) {
		job_ok(net_isend(p->from, p->send, data, bytes, tag, mhandle, &request));
		if (request)
			return request;
		if (job_now_s() > end)
			job_fail("isend() of %zu bytes has no room; warnings: %s", bytes, net_log_text());
		sched_yield();
	}
}

void *job_irecv(struct job_pair *p, void *data, size_t bytes, int tag, void *mhandle)
{
	const double end = job_now_s() + JOB_PATIENCE_S;
	void *request = NULL;

	for (;;) {
		job_ok(net_irecv(p->to, p->recv, 1, &data, &bytes, &tag, &mhandle, &request));
		if (request)
			return request;
		if (job_now_s() > end)
			job_fail("irecv() of %zu bytes has no room; warnings: %s", bytes, net_log_text());
		sched_yield();
	}
}

int job_outcome(struct net *n, void *request)
{
	const double end = job_now_s() + JOB_PATIENCE_S;
	int done = 0, rc;

	while ((rc = net_test(n, request, &done, NULL)) == DQ_NCCL_SUCCESS && !done) {
		if (job_now_s() > end)
			job_fail("a request neither ends nor fails; warnings: %s", net_log_text());
		sched_yield();
	}
	return rc;
}

void job_wait(struct net *n, void *request, int *bytes)
{
	const double end = job_now_s() + JOB_PATIENCE_S;

	for (int done = 0; !done;) {
		job_ok(net_test(n, request, &done, bytes));
		if (!done && job_now_s() > end)
			job_fail("a request is not done; warnings: %s", net_log_text());
		if (!done)
			sched_yield();
	}
}

/* --- running ------------------------------------------------------------------------------------------------------ */

int job_run(const struct CMUnitTest *tests, size_t count)
{
	static int versions[NET_VERSION_NEWEST - NET_VERSION_OLDEST + 1];
	const char *only = getenv("DQ_TEST_NCCL_VERSIONS");
	size_t version_count = 0;
	struct CMUnitTest *all;
	char(*names)[128];
	int failed;

	for (size_t v = 0; v < sizeof versions / sizeof *versions; v++) {
		char number[8];

		snprintf(number, sizeof number, "v%d", NET_VERSION_OLDEST + (int)v);
		if (only && !strstr(only, number))
			continue;
		versions[version_count++] = NET_VERSION_OLDEST + (int)v;
	}
	if (!version_count) {
		fprintf(stderr, "failed: DQ_TEST_NCCL_VERSIONS is \"%s\"; expected versions v%d to v%d, such as \"v8 v12\"\n", only,
			NET_VERSION_OLDEST, NET_VERSION_NEWEST);
		return 1;
	}
	all = calloc(count * version_count, sizeof *all);
	names = calloc(count * version_count, sizeof *names);
	if (!all || !names)
		abort();
	for (size_t v = 0; v < version_count; v++) {
		for (size_t i = 0; i < count; i++) {
			const size_t at = v * count + i;

			all[at] = tests[i];
			all[at].initial_state = &versions[v];
			snprintf(names[at], sizeof names[at], "v%d %s", versions[v], tests[i].name);
			all[at].name = names[at];
		}
	}
	failed = _cmocka_run_group_tests("nccl", all, count * version_count, NULL, NULL);
	free(all);
	free(names);
	return failed;
}
