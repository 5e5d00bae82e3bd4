/* SPDX-License-Identifier: Apache-2.0 */
/* Opening and closing a context, its devices, its death, and what a fork does to it. */
#include "shim/shim.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shim/staging.h"

#define SPIN_US_MAX 1000000u
#define SPIN_US_DEFAULT 20u
#define SPIN_CPUS_MIN 4       /* fewer CPUs than this: who spins takes the CPU that the answer needs */

/* --- fork ------------------------------------------------------------------------------------------------------- */

static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
static dqplb_context *contexts;
static dqplb_mem *shared_mems;  /* guarded by contexts_lock, too */
static uint64_t shared_serial;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void before_fork(void)
{
	pthread_mutex_lock(&contexts_lock);
}

static void after_fork_parent(void)
{
	pthread_mutex_unlock(&contexts_lock);
}

/*
 * A child that kept the socket would keep the dead parent alive in the daemon's eyes. The guard pages are zero here already
 * where the kernel wipes them; writing makes it sure.
 */
static void after_fork_child(void)
{
	for (dqplb_context *ctx = contexts; ctx; ctx = ctx->next) {
		*(volatile uint32_t *)(uintptr_t)ctx->guard = 0;
		close(ctx->socket);
		close(ctx->eventfd);
	}
	contexts = NULL;
	shared_mems = NULL; /* not mapped here */
	pthread_mutex_unlock(&contexts_lock);
}

static void install_fork_handlers(void)
{
	pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

int dq_shim_forked(void)
{
	return dq_shim_fail(DQPLB_ERR_FORKED, "this context was opened by the parent process: open one in process %d", (int)getpid());
}

/* --- death ------------------------------------------------------------------------------------------------------ */

void dq_shim_die(dqplb_context *ctx, int status, const char *fmt, ...)
{
	va_list ap;

	if (ctx->dead)
		return;
	va_start(ap, fmt);
	vsnprintf(ctx->dead_text, sizeof ctx->dead_text, fmt, ap);
	va_end(ap);
	atomic_store(&ctx->dead, status);
	if (ctx->control)
		dq_shim_wake_sleepers(ctx);
}

int dq_shim_dead(dqplb_context *ctx)
{
	return dq_shim_fail(ctx->dead, "%s", ctx->dead_text);
}

void dq_shim_liveness(dqplb_context *ctx, bool force)
{
	uint32_t closed = atomic_load_explicit(&ctx->control->closed, memory_order_acquire);
	uint64_t now;
	ssize_t n;
	char c;

	if (ctx->dead)
		return;
	if (closed) {
		char why[sizeof ctx->control->closed_text + 1];

		memcpy(why, ctx->control->closed_text, sizeof ctx->control->closed_text);
		why[sizeof why - 1] = 0;
		dq_shim_die(ctx, DQPLB_ERR_DAEMON, "the daemon cut this process off: %s (%s)", why[0] ? why : "no reason given",
			    dq_shim_status_name(-(int)closed));
		return;
	}
	now = dq_shim_now_coarse();
	if (!force && now < ctx->next_liveness)
		return;
	ctx->next_liveness = now + DQ_SHIM_LIVENESS_NS;
	dq_staging_tick(ctx);
	n = recv(ctx->socket, &c, 1, MSG_PEEK | MSG_DONTWAIT);
	if (n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR))
		dq_shim_die(ctx, DQPLB_ERR_DAEMON, "the daemon at %s is gone (%s): open a new context when it is back", ctx->socket_path,
			    n == 0 ? "it closed the connection" : strerror(errno));
}

/* --- open ------------------------------------------------------------------------------------------------------- */

static int cpus(void)
{
	cpu_set_t set;

	return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : SPIN_CPUS_MIN;
}

static int check_options(const dqplb_options *given, dqplb_options *o)
{
	memset(o, 0, sizeof *o);
	if (given) {
		const unsigned char *bytes = (const unsigned char *)given;

		if (given->size < offsetof(dqplb_options, ring_entries) || given->size > 4096)
			return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_open: options.size is %zu, expected sizeof(struct dqplb_options), %zu",
					    given->size, sizeof *o);
		/* A program built with a later header may have more options; they must be unset. */
		for (size_t i = sizeof *o; i < given->size; i++)
			if (bytes[i])
				return dq_shim_fail(DQPLB_ERR_VERSION, "dqplb_open: an option is set that this library (API version %u) does not "
						    "know: use a later libdqplb.so", DQPLB_API_VERSION);
		memcpy(o, given, DQ_MIN(given->size, sizeof *o));
	}
	if (o->ring_entries == 0)
		o->ring_entries = DQ_RING_ENTRIES_DEFAULT;
	if (o->ring_entries < DQ_RING_ENTRIES_MIN || o->ring_entries > DQ_RING_ENTRIES_MAX || (o->ring_entries & (o->ring_entries - 1)))
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_open: options.ring_entries is %u, expected a power of two from %d to %d",
				    o->ring_entries, DQ_RING_ENTRIES_MIN, DQ_RING_ENTRIES_MAX);
	if (o->spin_us > SPIN_US_MAX)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_open: options.spin_us is %u, expected at most %u", o->spin_us, SPIN_US_MAX);
	return DQPLB_OK;
}

static int choose_socket(const dqplb_options *o, dqplb_context *ctx)
{
	const char *path = o->socket, *origin = "options.socket";

	if (!path) {
		path = secure_getenv("DQPLB_SOCKET");
		origin = "the environment variable DQPLB_SOCKET";
	}
	if (!path) {
		path = DQ_SHIM_SOCKET_DEFAULT;
		origin = "the default";
	}
	if (path[0] != '/')
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_open: %s is '%s', expected the absolute path of the daemon's client socket",
				    origin, path);
	if (strlen(path) >= sizeof ctx->socket_path)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_open: %s has %zu characters, a socket's path can have %zu: %s", origin,
				    strlen(path), sizeof ctx->socket_path - 1, path);
	memcpy(ctx->socket_path, path, strlen(path) + 1);
	return DQPLB_OK;
}

/* The memfd of the attach answer: check everything that later code relies on. */
static int map_rings(dqplb_context *ctx, const struct dq_shim_answer *answer)
{
	uint32_t entries = (uint32_t)answer->reply.arg2;
	size_t cq;
	uint8_t *base;

	if (answer->reply.arg0 != DQ_LAYOUT_VERSION)
		return dq_shim_fail(DQPLB_ERR_VERSION, "the daemon chose layout version %llu, this library knows version %d: install matching "
				    "versions of both", (unsigned long long)answer->reply.arg0, DQ_LAYOUT_VERSION);
	if (answer->reply.arg2 < DQ_RING_ENTRIES_MIN || answer->reply.arg2 > DQ_RING_ENTRIES_MAX || (entries & (entries - 1)) ||
	    answer->reply.arg3 < dq_layout_bytes(entries) || answer->fds[0] < 0 || answer->fds[1] < 0)
		return dq_shim_fail(DQPLB_ERR_DAEMON, "the daemon's answer to attach makes no sense: %llu ring entries in %llu bytes, %s",
				    (unsigned long long)answer->reply.arg2, (unsigned long long)answer->reply.arg3,
				    answer->fds[1] < 0 ? "files missing" : "with its files");
	ctx->map_bytes = dq_layout_bytes(entries);
	base = dq_shim_map(answer->fds[0], ctx->map_bytes);
	if (!base)
		return dq_shim_fail(DQPLB_ERR_NOMEM, "mapping the daemon's rings, %zu bytes: %s", ctx->map_bytes, strerror(errno));
	ctx->control = (struct dq_control *)(void *)(base + DQ_CONTROL_OFFSET);
	if (ctx->control->magic != DQ_LAYOUT_MAGIC || ctx->control->version != DQ_LAYOUT_VERSION || ctx->control->entries != entries)
		return dq_shim_fail(DQPLB_ERR_VERSION, "the daemon's shared memory has magic 0x%08x, version %u, %u entries; expected "
				    "0x%08x, %d, %u", ctx->control->magic, ctx->control->version, ctx->control->entries, DQ_LAYOUT_MAGIC,
				    DQ_LAYOUT_VERSION, entries);
	ctx->entries = entries;
	cq = dq_layout_cq_offset(entries);
	dq_ring_init(&ctx->sq, (struct dq_ring_shared *)(void *)(base + DQ_SQ_OFFSET), base + DQ_SQ_OFFSET + sizeof(struct dq_ring_shared),
		     entries);
	dq_ring_init(&ctx->cq, (struct dq_ring_shared *)(void *)(base + cq), base + cq + sizeof(struct dq_ring_shared), entries);
	return DQPLB_OK;
}

static int attach(dqplb_context *ctx, const dqplb_options *o)
{
	struct dq_client_request request = {
		.type = DQ_REQ_ATTACH,
		.arg0 = DQ_LAYOUT_VERSION,
		.arg1 = DQ_LAYOUT_VERSION,
		.arg2 = o->ring_entries,
		.arg3 = (uint64_t)getpid(),
	};
	struct dq_shim_answer answer;
	int status;

	snprintf(request.name, sizeof request.name, "%s", o->name && o->name[0] ? o->name : program_invocation_short_name);
	status = dq_shim_call(ctx, &request, -1, &answer);
	if (status == DQPLB_ERR_VERSION)
		return dq_shim_fail(status, "the daemon at %s and this library do not match: the library speaks layout version %d; %s",
				    ctx->socket_path, DQ_LAYOUT_VERSION, answer.reply.text);
	if (status != DQPLB_OK)
		return status;
	status = map_rings(ctx, &answer);
	if (status == DQPLB_OK) {
		ctx->client_id = (uint32_t)answer.reply.arg1;
		memcpy(&ctx->template, answer.reply.handle, sizeof ctx->template);
		ctx->eventfd = answer.fds[1];
		answer.fds[1] = -1;
	}
	dq_shim_answer_close(&answer);
	return status;
}

static int load_devices(dqplb_context *ctx)
{
	struct dq_client_request request = {.type = DQ_REQ_DEVICES};
	struct dq_shim_answer answer;
	int status = dq_shim_call(ctx, &request, -1, &answer);

	if (status != DQPLB_OK)
		return status;
	dq_shim_answer_close(&answer);
	if (answer.reply.arg0 != answer.device_count)
		return dq_shim_fail(DQPLB_ERR_DAEMON, "the daemon announced %llu devices and described %u (at most %u are possible)",
				    (unsigned long long)answer.reply.arg0, answer.device_count, DQ_SHIM_DEVICES_MAX);
	pthread_mutex_lock(&ctx->lock);
	ctx->max_flows = (uint32_t)DQ_MIN(answer.reply.arg1, UINT32_MAX);
	/* Numbers once given stay: programs keep them. Devices that came later need a new context. */
	if (!ctx->device_count)
		ctx->device_count = answer.device_count;
	memcpy(ctx->devices, answer.devices, DQ_MIN(answer.device_count, ctx->device_count) * sizeof ctx->devices[0]);
	pthread_mutex_unlock(&ctx->lock);
	return DQPLB_OK;
}

static void release(dqplb_context *ctx)
{
	for (uint32_t i = 0; i < ctx->slab_count; i++)
		free(ctx->slabs[i]);
	free(ctx->slabs);
	if (ctx->control)
		munmap(ctx->control, ctx->map_bytes);
	if (ctx->guard)
		munmap((void *)(uintptr_t)ctx->guard, (size_t)sysconf(_SC_PAGESIZE));
	pthread_mutex_destroy(&ctx->lock);
	pthread_mutex_destroy(&ctx->socket_lock);
	pthread_cond_destroy(&ctx->copied);
	free(ctx);
}

static void close_files(dqplb_context *ctx)
{
	if (ctx->socket >= 0)
		close(ctx->socket);
	if (ctx->eventfd >= 0)
		close(ctx->eventfd);
	ctx->socket = ctx->eventfd = -1;
}

static int make_guard(dqplb_context *ctx)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	uint32_t *guard = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (guard == MAP_FAILED)
		return dq_shim_fail(DQPLB_ERR_NOMEM, "dqplb_open: no memory for a page: %s", strerror(errno));
	/* Also covers a bare clone(). Kernels before 4.14 refuse; the fork handler remains. */
	madvise(guard, page, MADV_WIPEONFORK);
	*guard = 1;
	ctx->guard = guard;
	return DQPLB_OK;
}

int dqplb_open(const dqplb_options *options, dqplb_context **out)
{
	dqplb_context *ctx;
	dqplb_options o;
	int status;

	if (!out)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_open: out is NULL");
	*out = NULL;
	status = check_options(options, &o);
	if (status != DQPLB_OK)
		return status;
	ctx = calloc(1, sizeof *ctx);
	if (!ctx)
		return dq_shim_fail(DQPLB_ERR_NOMEM, "dqplb_open: no memory for a context");
	pthread_mutex_init(&ctx->lock, NULL);
	pthread_mutex_init(&ctx->socket_lock, NULL);
	pthread_cond_init(&ctx->copied, NULL);
	ctx->socket = ctx->eventfd = -1;
	ctx->slice_ns = DQ_SHIM_SLICE_NS;
	ctx->chunk_idle_ns = DQ_SHIM_CHUNK_IDLE_NS;
	ctx->spin_ns = 1000u * (uint64_t)(o.spin_us ? o.spin_us : cpus() < SPIN_CPUS_MIN ? 0 : SPIN_US_DEFAULT);

	status = choose_socket(&o, ctx);
	if (status == DQPLB_OK)
		status = make_guard(ctx);
	if (status == DQPLB_OK)
		status = dq_shim_socket_connect(ctx->socket_path, &ctx->socket);
	if (status == DQPLB_OK)
		status = attach(ctx, &o);
	if (status == DQPLB_OK)
		status = load_devices(ctx);
	if (status == DQPLB_OK) {
		ctx->slabs = calloc((ctx->entries + DQ_SHIM_REQUESTS_PER_SLAB - 1) / DQ_SHIM_REQUESTS_PER_SLAB, sizeof *ctx->slabs);
		if (!ctx->slabs)
			status = dq_shim_fail(DQPLB_ERR_NOMEM, "dqplb_open: no memory for %u requests", ctx->entries);
	}
	if (status != DQPLB_OK) {
		close_files(ctx);
		release(ctx);
		return status;
	}
	pthread_once(&fork_once, install_fork_handlers);
	pthread_mutex_lock(&contexts_lock);
	ctx->next = contexts;
	if (ctx->next)
		ctx->next->prev = ctx;
	contexts = ctx;
	pthread_mutex_unlock(&contexts_lock);
	*out = ctx;
	return DQPLB_OK;
}

/* --- close ------------------------------------------------------------------------------------------------------ */

/* lock held. Close flows in the regular way, so that peers see DQPLB_ERR_CLOSED and not a death; for a second at most. */
static void close_all(dqplb_context *ctx)
{
	uint64_t deadline = dq_shim_now() + DQ_SHIM_CLOSE_NS;

	for (dqplb_flow *flow = ctx->flows, *next; flow && !ctx->dead; flow = next) {
		next = flow->next;
		if (!flow->closing)
			dq_shim_flow_begin_close(flow);
	}
	while (!ctx->dead && dq_shim_now() < deadline) {
		bool open = ctx->deferred_flows != NULL;

		dq_shim_progress(ctx, NULL);
		for (dqplb_flow *flow = ctx->flows; flow && !open; flow = flow->next)
			open = !flow->closed;
		if (!open)
			return;
		dq_shim_sleep(ctx, deadline);
	}
}

static void free_objects(dqplb_context *ctx)
{
	/* Flows that never opened belong to their request. */
	for (uint32_t i = 0; i < ctx->slab_count * DQ_SHIM_REQUESTS_PER_SLAB; i++) {
		struct dq_shim_request *r = dq_shim_request_at(ctx, i);
		uint32_t state = dq_shim_request_state(r);
		if ((state == DQ_SHIM_PENDING || state == DQ_SHIM_ORPHAN) && (r->op == DQ_OP_CONNECT || r->op == DQ_OP_ACCEPT))
			free(r->flow);
	}
	while (ctx->flows) {
		dqplb_flow *flow = ctx->flows;
		ctx->flows = flow->next;
		free(flow);
	}
	while (ctx->listeners) {
		dqplb_listener *listener = ctx->listeners;
		ctx->listeners = listener->next;
		free(listener);
	}
	while (ctx->mems) {
		dqplb_mem *mem = ctx->mems;
		ctx->mems = mem->next;
		if (mem->kind == DQ_SHIM_MEM_SHARED) {
			dq_shim_shared_remove(mem);
			munmap(mem->address, mem->mapped_bytes);
		}
		free(mem);
	}
	dq_staging_destroy(ctx);
}

void dqplb_close(dqplb_context *ctx)
{
	if (!ctx || dq_shim_is_forked(ctx))
		return; /* in a child: the parent's objects may be in the middle of a change; they are left alone */
	pthread_mutex_lock(&ctx->lock);
	close_all(ctx);
	pthread_mutex_unlock(&ctx->lock);

	pthread_mutex_lock(&contexts_lock);
	if (ctx->prev)
		ctx->prev->next = ctx->next;
	else
		contexts = ctx->next;
	if (ctx->next)
		ctx->next->prev = ctx->prev;
	close_files(ctx);
	pthread_mutex_unlock(&contexts_lock);
	free_objects(ctx);
	release(ctx);
}

/* --- memory of the process --------------------------------------------------------------------------------------- */

void dq_shim_shared_add(dqplb_mem *mem)
{
	pthread_mutex_lock(&contexts_lock);
	mem->serial = ++shared_serial;
	mem->next_shared = shared_mems;
	shared_mems = mem;
	pthread_mutex_unlock(&contexts_lock);
}

void dq_shim_shared_remove(dqplb_mem *mem)
{
	pthread_mutex_lock(&contexts_lock);
	for (dqplb_mem **at = &shared_mems; *at; at = &(*at)->next_shared) {
		if (*at == mem) {
			*at = mem->next_shared;
			break;
		}
	}
	pthread_mutex_unlock(&contexts_lock);
}

bool dq_shim_shared_find(const void *address, size_t bytes, struct dq_shim_place *out)
{
	const uint8_t *p = address;
	bool found = false;

	pthread_mutex_lock(&contexts_lock);
	for (const dqplb_mem *mem = shared_mems; mem && !found; mem = mem->next_shared) {
		const size_t offset = (size_t)((uintptr_t)p - (uintptr_t)mem->address);

		if (p < mem->address || offset > mem->bytes || bytes > mem->bytes - offset || mem->ctx->dead)
			continue;
		*out = (struct dq_shim_place){.client = mem->ctx->client_id, .id = mem->id, .serial = mem->serial, .bytes = mem->bytes,
					      .offset = offset};
		found = true;
	}
	pthread_mutex_unlock(&contexts_lock);
	return found;
}

/* --- about itself ----------------------------------------------------------------------------------------------- */

int dqplb_query(dqplb_context *ctx, dqplb_info *out)
{
	dqplb_info info = {.size = sizeof info};

	if (!ctx || !out)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_query: %s is NULL", ctx ? "out" : "context");
	if (dq_shim_is_forked(ctx))
		return dq_shim_forked();
	if (out->size < sizeof out->size || out->size > 4096)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_query: size is %zu, expected sizeof(struct dqplb_info), %zu", out->size,
				    sizeof info);
	memcpy(info.host_id, ctx->template.host_id, sizeof info.host_id - 1);
	memcpy(info.socket, ctx->socket_path, sizeof info.socket - 1);
	info.epoch = ctx->template.epoch;
	info.client = ctx->client_id;
	info.ring_entries = ctx->entries;
	info.size = DQ_MIN(out->size, sizeof info);
	memset(out, 0, out->size);
	memcpy(out, &info, info.size);
	return DQPLB_OK;
}

int dqplb_hint(dqplb_context *ctx, uint32_t peers, uint32_t flows_per_peer)
{
	struct dq_client_request request = {.type = DQ_REQ_HINT, .arg0 = peers, .arg1 = flows_per_peer};
	int status;

	if (!ctx)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_hint: context is NULL");
	if (dq_shim_is_forked(ctx))
		return dq_shim_forked();
	pthread_mutex_lock(&ctx->lock);
	dq_shim_async_poll(ctx); /* the answer about the one before */
	status = ctx->dead ? dq_shim_dead(ctx) : dq_shim_call_async(ctx, &request);
	if (status == DQPLB_ERR_AGAIN)
		dq_shim_fail(status, "dqplb_hint: the daemon has not answered what was asked before: call again");
	pthread_mutex_unlock(&ctx->lock);
	return status;
}

/* --- devices ---------------------------------------------------------------------------------------------------- */

int dqplb_device_count(dqplb_context *ctx)
{
	if (!ctx)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_device_count: context is NULL");
	if (dq_shim_is_forked(ctx))
		return dq_shim_forked();
	return (int)ctx->device_count;
}

int dqplb_device_query(dqplb_context *ctx, int device, dqplb_device *out)
{
	const struct dq_device_info *d;
	int status;

	if (!ctx || !out)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_device_query: %s is NULL", ctx ? "out" : "context");
	if (dq_shim_is_forked(ctx))
		return dq_shim_forked();
	if (device < 0 || (uint32_t)device >= ctx->device_count)
		return dq_shim_fail(DQPLB_ERR_INVALID, "dqplb_device_query: device %d: expected 0 to %d", device, (int)ctx->device_count - 1);
	status = load_devices(ctx); /* the round trip time and the state change */
	if (status != DQPLB_OK)
		return status;
	pthread_mutex_lock(&ctx->lock);
	d = &ctx->devices[device];
	memset(out, 0, sizeof *out);
	memcpy(out->name, d->name, sizeof out->name - 1);
	memcpy(out->provider, d->provider, sizeof out->provider - 1);
	memcpy(out->pci_path, d->pci_path, sizeof out->pci_path - 1);
	out->speed_bps = d->speed_bps;
	out->latency_ns = d->latency_ns;
	out->rail = d->rail;
	out->numa_node = d->numa_node;
	out->mtu = d->mtu;
	out->dmabuf = d->dmabuf;
	out->up = d->up;
	out->port = d->port;
	out->max_flows = ctx->max_flows;
	pthread_mutex_unlock(&ctx->lock);
	return DQPLB_OK;
}
