/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's thread: its loop, how it sleeps, calls from other threads, events to them, devices. */
#include "engine/engine.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "engine/private.h"

#define EVENTS_ROOM 4096u
#define MAX_MESSAGES (4u << 20) /* operations of all clients under way at a time */

/* What an epoll event is about: kind << 32 | index. */
enum { WATCH_CALLS = 0, WATCH_DEVICE = 1, WATCH_CLIENT = 2 };

uint64_t eng_clock_ns(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

int eng_error(struct dq_text *err, int code, const char *fmt, ...)
{
	if (err) {
		va_list ap;
		err->code = code;
		va_start(ap, fmt);
		vsnprintf(err->text, sizeof err->text, fmt, ap);
		va_end(ap);
	}
	return code;
}

/* --- calls and events ------------------------------------------------------------------------------------------ */

int eng_call(struct dq_engine *e, void (*fn)(struct dq_engine *, void *), void *arg)
{
	struct eng_call call = { .fn = fn, .arg = arg };
	uint64_t one = 1;
	pthread_mutex_lock(&e->lock);
	if (e->stopped) {
		pthread_mutex_unlock(&e->lock);
		return -ESHUTDOWN;
	}
	*e->calls_tail = &call;
	e->calls_tail = &call.next;
	atomic_store_explicit(&e->calls_pending, true, memory_order_release);
	if (write(e->wake_fd, &one, sizeof one) < 0) {
		/* EAGAIN: the counter is full, so the fd is readable anyway */
	}
	while (!call.done)
		pthread_cond_wait(&e->answered, &e->lock);
	pthread_mutex_unlock(&e->lock);
	return 0;
}

static bool run_calls(struct dq_engine *e)
{
	uint64_t drain;
	if (!atomic_load_explicit(&e->calls_pending, memory_order_acquire))
		return false;
	if (read(e->wake_fd, &drain, sizeof drain) < 0) {
		/* EAGAIN: nothing to drain */
	}
	pthread_mutex_lock(&e->lock);
	while (e->calls_head) {
		struct eng_call *call = e->calls_head;
		e->calls_head = call->next;
		if (!e->calls_head)
			e->calls_tail = &e->calls_head;
		pthread_mutex_unlock(&e->lock);
		call->fn(e, call->arg);
		eng_vc_reap(e);
		pthread_mutex_lock(&e->lock);
		call->done = true; /* the caller's stack may be gone once the lock is free */
		pthread_cond_broadcast(&e->answered);
	}
	atomic_store_explicit(&e->calls_pending, false, memory_order_relaxed);
	pthread_mutex_unlock(&e->lock);
	return true;
}

void eng_event(struct dq_engine *e, const struct dq_engine_event *ev)
{
	uint64_t one = 1;
	pthread_mutex_lock(&e->lock);
	if (e->events_count == EVENTS_ROOM) {
		e->events_dropped++;
	} else {
		e->events[(e->events_head + e->events_count++) % EVENTS_ROOM] = *ev;
		if (e->events_count == 1 && write(e->events_fd, &one, sizeof one) < 0) {
			/* EAGAIN: it is readable already */
		}
	}
	pthread_mutex_unlock(&e->lock);
}

int dq_engine_events(dq_engine *e, struct dq_engine_event *out, uint32_t n)
{
	uint32_t i = 0;
	uint64_t drain;
	pthread_mutex_lock(&e->lock);
	while (i < n && e->events_count) {
		out[i++] = e->events[e->events_head];
		e->events_head = (e->events_head + 1) % EVENTS_ROOM;
		e->events_count--;
	}
	if (!e->events_count && read(e->events_fd, &drain, sizeof drain) < 0) {
		/* EAGAIN: nothing to drain */
	}
	pthread_mutex_unlock(&e->lock);
	return (int)i;
}

int dq_engine_event_fd(dq_engine *e)
{
	return e->events_fd;
}

uint64_t dq_engine_heartbeat(dq_engine *e)
{
	return atomic_load_explicit(&e->heartbeat, memory_order_relaxed);
}

static void get_stats(struct dq_engine *e, void *arg)
{
	struct dq_engine_stats *s = arg;
	*s = (struct dq_engine_stats){ .loops = e->loops, .sleeps = e->sleeps, .clients_cut = e->clients_cut,
				       .clients = e->clients.used, .flows = e->pools.flows.used, .vcs = e->vcs.used,
				       .paths = e->paths.used, .memory_bytes = e->mem_bytes, .staging_bytes = e->staging_bytes };
}

void dq_engine_get_stats(dq_engine *e, struct dq_engine_stats *out)
{
	memset(out, 0, sizeof *out);
	eng_call(e, get_stats, out);
	pthread_mutex_lock(&e->lock);
	out->events_dropped = e->events_dropped;
	pthread_mutex_unlock(&e->lock);
}

/* --- the loop -------------------------------------------------------------------------------------------------- */

_Static_assert((int)DQ_CHANGE_UP == DQ_DEVICE_UP && (int)DQ_CHANGE_DOWN == DQ_DEVICE_DOWN && (int)DQ_CHANGE_ADDRESS == DQ_DEVICE_ADDRESS &&
	       (int)DQ_CHANGE_FATAL == DQ_DEVICE_FATAL && (int)DQ_CHANGE_OTHER == DQ_DEVICE_OTHER, "same numbers");

static void fail_vcs_of(struct dq_engine *e, uint32_t device, int32_t status, const char *why)
{
	for (uint32_t i = 0; i < e->vcs.capacity; i++) {
		struct eng_vc *vc = eng_vc_at(e, i);
		if (vc && vc->device == device)
			eng_vc_fail(e, vc, status, "device %s: %s", e->devices[device].name, why);
	}
}

/* A port that went down fails nothing by itself: the QPs try again, and a short outage costs only time. When they give up,
 * their VCs fail. A device that is gone fails all at once. */
static void device_changed(struct dq_engine *e, uint32_t device, const struct dq_device_event *change)
{
	struct eng_device *d = &e->devices[device];
	struct dq_engine_event ev = { .type = DQ_EV_DEVICE, .device = device, .change = change->change };
	d->provider->device_query(d->dev, &d->attr);
	if (change->change == DQ_DEVICE_DOWN || change->change == DQ_DEVICE_FATAL)
		ev.status = DQ_ERR_DEVICE;
	memcpy(ev.text, change->text, sizeof change->text);
	eng_event(e, &ev);
	if (change->change == DQ_DEVICE_FATAL)
		fail_vcs_of(e, device, DQ_ERR_DEVICE, change->text);
}

static bool poll_devices(struct dq_engine *e)
{
	struct dq_wc wc[ENG_WC_BATCH];
	bool work = false;
	for (uint32_t i = 0; i < e->device_count; i++) {
		struct eng_device *d = &e->devices[i];
		struct dq_device_event change;
		int n = d->provider->poll(d->dev, wc, ENG_WC_BATCH);
		if (n > 0) {
			work = true;
			eng_vc_completions(e, wc, n);
		}
		while (d->provider->device_event && d->provider->device_event(d->dev, &change))
			device_changed(e, i, &change);
	}
	return work;
}

static uint64_t split_grants(struct dq_engine *e)
{
	uint64_t next = DQ_NEVER;
	for (uint32_t i = 0; i < e->device_count; i++) {
		struct eng_device *d = &e->devices[i];
		if (d->grants.dirty || e->now_ns >= d->grants_due_ns) {
			d->grants_due_ns = dq_grants_split(&d->grants, e->now_ns);
			for (struct dq_grant_member *m = d->grants.head; m; m = m->next) {
				if (m->changed)
					eng_vc_touch(e, eng_vc_of((struct dq_vc *)((char *)m - offsetof(struct dq_vc, grant_out))));
			}
		}
		next = DQ_MIN(next, d->grants_due_ns);
	}
	return next;
}

/* Turns of VCs that waited for their device's outbound budget. Returns when the next one may be due. */
static uint64_t give_turns(struct dq_engine *e)
{
	uint64_t next = DQ_NEVER;
	for (uint32_t i = 0; i < e->device_count; i++) {
		struct dq_outbound *o = &e->devices[i].departure.outbound;
		struct dq_outbound_member *m;
		while ((m = dq_outbound_next(o, e->now_ns)))
			eng_vc_touch(e, eng_vc_of((struct dq_vc *)((char *)m - offsetof(struct dq_vc, outbound))));
		next = DQ_MIN(next, dq_outbound_due(o, e->now_ns));
	}
	return next;
}

/* Is there anything that eng_vc_tick or eng_connections_tick may find expired? Otherwise an idle daemon sleeps long. */
static bool expires(struct dq_engine *e)
{
	if (e->connects.used)
		return true;
	for (uint32_t i = 0; i < e->vcs.capacity; i++) {
		struct eng_vc *vc = eng_vc_at(e, i);
		if (vc && (vc->state != ENG_VC_UP || vc->core.awaiting || dq_vc_outstanding(&vc->core)))
			return true;
	}
	return false;
}

static void sleep_until(struct dq_engine *e, uint64_t until_ns)
{
	struct epoll_event ev[16];
	uint64_t ns = until_ns > e->now_ns ? until_ns - e->now_ns : 0;
	int n = -1;
	if (!e->no_pwait2) {
		struct timespec ts = { (time_t)(ns / 1000000000u), (long)(ns % 1000000000u) };
		n = epoll_pwait2(e->epoll_fd, ev, 16, &ts, NULL);
		if (n < 0 && errno != EINTR)
			e->no_pwait2 = true; /* a kernel before 5.11, or a filter: milliseconds then */
	}
	if (e->no_pwait2)
		n = epoll_wait(e->epoll_fd, ev, 16, (int)((ns + 999999) / 1000000));
	(void)n; /* whatever it was is found by the next pass */
	e->sleeps++;
}

/* Nothing to do in this pass: sleep until something comes or is due. */
static void rest(struct dq_engine *e, uint64_t due_ns)
{
	uint64_t until = DQ_MIN(due_ns, e->now_ns + ENG_IDLE_NS);
	if (expires(e))
		until = DQ_MIN(until, DQ_MAX(e->tick_ns, e->now_ns));
	for (uint32_t i = 0; i < e->device_count; i++)
		until = DQ_MIN(until, e->devices[i].provider->next_deadline(e->devices[i].dev));
	if (until <= e->now_ns)
		return;
	eng_client_asleep(e, true);
	dq_ring_fence(); /* against the shim's fence between submitting and looking at the flag */
	if (!eng_client_pending(e)) {
		bool armed = true;
		for (uint32_t i = 0; i < e->device_count; i++)
			armed &= e->devices[i].provider->arm(e->devices[i].dev) == 0;
		if (armed && !atomic_load_explicit(&e->calls_pending, memory_order_acquire))
			sleep_until(e, until);
	}
	eng_client_asleep(e, false);
}

static void relax(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

static void shut_down(struct dq_engine *e);

static void *loop(void *arg)
{
	struct dq_engine *e = arg;
	pthread_setname_np(pthread_self(), "dq-engine");
	prctl(PR_SET_TIMERSLACK, 1); /* emulated links and deadlines mean what they say */
	if (e->config.cpu >= 0) {
		cpu_set_t set;
		CPU_ZERO(&set);
		CPU_SET(e->config.cpu, &set);
		if (pthread_setaffinity_np(pthread_self(), sizeof set, &set)) {
			struct dq_engine_event ev = { .type = DQ_EV_LOG, .status = DQ_ERR_INVALID };
			snprintf(ev.text, sizeof ev.text, "engine: cannot run on cpu %d alone; running on any: check engine.cpu against "
				 "the CPUs this service may use", e->config.cpu);
			eng_event(e, &ev);
		}
	}
	while (!e->stop) {
		bool work;
		uint64_t due;
		e->loops++;
		atomic_fetch_add_explicit(&e->heartbeat, 1, memory_order_relaxed);
		e->now_ns = eng_clock_ns();
		work = run_calls(e);
		work |= eng_client_poll_all(e);
		due = split_grants(e);
		give_turns(e);
		work |= e->run_head != DQ_NONE;
		eng_vc_run_all(e);
		due = DQ_MIN(due, give_turns(e));
		work |= poll_devices(e); /* last: what was posted above goes out in the same pass */
		if (e->now_ns >= e->tick_ns) {
			e->tick_ns = e->now_ns + ENG_TICK_NS;
			eng_vc_tick(e);
			eng_connections_tick(e);
		}
		eng_vc_reap(e);
		eng_client_wake_all(e, !work);
		if (work) {
			e->spin_until_ns = e->now_ns + (uint64_t)e->config.spin_us * 1000u;
		} else if (e->now_ns < e->spin_until_ns) {
			relax();
		} else {
			rest(e, due);
		}
	}
	shut_down(e);
	return NULL;
}

/* --- life ------------------------------------------------------------------------------------------------------ */

static void release(struct dq_engine *e)
{
	dq_pools_fini(&e->pools);
	dq_slab_fini(&e->paths);
	dq_slab_fini(&e->vcs);
	dq_slab_fini(&e->clients);
	dq_slab_fini(&e->mems);
	dq_slab_fini(&e->listeners);
	dq_slab_fini(&e->accepts);
	dq_slab_fini(&e->connects);
	dq_slab_fini(&e->needs);
	dq_map_fini(&e->listener_map);
	if (e->epoll_fd >= 0)
		close(e->epoll_fd);
	if (e->wake_fd >= 0)
		close(e->wake_fd);
	if (e->events_fd >= 0)
		close(e->events_fd);
	free(e->events);
	pthread_mutex_destroy(&e->making);
	pthread_mutex_destroy(&e->lock);
	pthread_cond_destroy(&e->answered);
	free(e);
}

int dq_engine_create(const struct dq_engine_config *cfg, dq_engine **out, struct dq_text *err)
{
	struct dq_engine *e;
	struct epoll_event ev = { .events = EPOLLIN, .data.u64 = (uint64_t)WATCH_CALLS << 32 };
	uint32_t flows = cfg->max_flows ? cfg->max_flows : 65536, clients = cfg->max_clients ? cfg->max_clients : 1024;
	int rc = 0;

	*out = NULL;
	if (!memchr(cfg->host_id, 0, sizeof cfg->host_id) || !cfg->host_id[0])
		return eng_error(err, -EINVAL, "engine: host_id must be a text of 1 to %zu bytes", sizeof cfg->host_id - 1);
	e = calloc(1, sizeof *e);
	if (!e)
		return eng_error(err, -ENOMEM, "engine: no memory");
	e->config = *cfg;
	if (!e->config.cancel_deadline_ns)
		e->config.cancel_deadline_ns = 500000000u;
	if (!e->config.stall_ns)
		e->config.stall_ns = 1000000000u;
	if (!e->config.connect_deadline_ns)
		e->config.connect_deadline_ns = 30000000000ull;
	e->calls_tail = &e->calls_head;
	e->run_head = e->run_tail = e->fail_head = DQ_NONE;
	pthread_mutex_init(&e->making, NULL);
	pthread_mutex_init(&e->lock, NULL);
	pthread_cond_init(&e->answered, NULL);
	e->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	e->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	e->events_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	e->events = calloc(EVENTS_ROOM, sizeof *e->events);
	if (e->epoll_fd < 0 || e->wake_fd < 0 || e->events_fd < 0)
		rc = -errno;
	else if (!e->events)
		rc = -ENOMEM;
	rc = rc ? rc : dq_pools_init(&e->pools, flows, MAX_MESSAGES);
	rc = rc ? rc : dq_slab_init(&e->paths, sizeof(struct eng_path), 64, 1u << 20);
	rc = rc ? rc : dq_slab_init(&e->vcs, sizeof(struct eng_vc *), 64, 1u << 20);
	rc = rc ? rc : dq_slab_init(&e->clients, sizeof(struct eng_client), 16, clients);
	rc = rc ? rc : dq_slab_init(&e->mems, sizeof(struct eng_mem), 64, 1u << 20);
	rc = rc ? rc : dq_slab_init(&e->listeners, sizeof(struct eng_listener), 64, 1u << 20);
	rc = rc ? rc : dq_slab_init(&e->accepts, sizeof(struct eng_accept), 64, 1u << 20);
	rc = rc ? rc : dq_slab_init(&e->connects, sizeof(struct eng_connect), 64, flows);
	rc = rc ? rc : dq_slab_init(&e->needs, sizeof(struct eng_need), 16, 65536);
	if (!rc && epoll_ctl(e->epoll_fd, EPOLL_CTL_ADD, e->wake_fd, &ev))
		rc = -errno;
	if (!rc)
		rc = -pthread_create(&e->thread, NULL, loop, e);
	if (rc) {
		release(e);
		return eng_error(err, rc, "engine: cannot start: %s", strerror(-rc));
	}
	*out = e;
	return 0;
}

static void request_stop(struct dq_engine *e, void *arg)
{
	(void)arg;
	e->stop = true;
}

/* Clients and peers learn at once that this daemon is gone; in this order, so that no peer is told that a client died. */
static void part(struct dq_engine *e, void *arg)
{
	(void)arg;
	e->parted = true;
	for (uint32_t i = 0; i < e->clients.capacity; i++) {
		struct eng_client *c = eng_client_at(e, i);
		if (c && !c->dying)
			eng_client_cut(e, c, "the daemon is stopping");
	}
	for (uint32_t i = 0; i < e->vcs.capacity; i++) {
		struct eng_vc *vc = eng_vc_at(e, i);
		if (vc)
			eng_vc_fail(e, vc, DQ_ERR_UNREACHABLE, "the daemon is stopping");
	}
	eng_vc_reap(e);
}

void dq_engine_part(dq_engine *e)
{
	eng_call(e, part, NULL);
}

/* On the engine's thread, as its last act. */
static void shut_down(struct dq_engine *e)
{
	pthread_mutex_lock(&e->lock);
	e->stopped = true;
	pthread_mutex_unlock(&e->lock);
	run_calls(e); /* those that came after the last look; there will be no more */
	part(e, NULL);
	for (uint32_t i = 0; i < e->paths.capacity; i++) {
		struct eng_path *p = eng_path_at(e, i);
		if (p)
			dq_link_destroy(p->link);
	}
	for (uint32_t i = 0; i < e->device_count; i++)
		e->devices[i].provider->device_close(e->devices[i].dev);
}

void dq_engine_destroy(dq_engine *e)
{
	if (!e)
		return;
	pthread_mutex_lock(&e->making); /* a VC being made is finished first */
	eng_call(e, request_stop, NULL);
	pthread_mutex_unlock(&e->making);
	pthread_join(e->thread, NULL);
	release(e);
}

/* --- devices --------------------------------------------------------------------------------------------------- */

struct device_add {
	const struct dq_engine_device_config *cfg;
	uint32_t *device;
	struct dq_text *err;
	int rc;
};

static void device_add(struct dq_engine *e, void *arg)
{
	struct device_add *a = arg;
	const struct dq_engine_device_config *cfg = a->cfg;
	struct dq_device_config pc = { .port = cfg->port, .rate_bps = cfg->rate_bps, .mtu = cfg->mtu, .heartbeat_ns = cfg->heartbeat_ns,
				       .deadline_ns = cfg->deadline_ns, .traffic_class = cfg->traffic_class,
				       .service_level = cfg->service_level, .max_registration_bytes = cfg->max_registration_bytes };
	struct epoll_event ev = { .events = EPOLLIN };
	struct eng_device *d = &e->devices[e->device_count];
	struct dq_error perr = { 0 };

	if (e->device_count == ENG_MAX_DEVICES || e->clients.used) {
		a->rc = eng_error(a->err, -EBUSY, "device %s: %s", cfg->name, e->clients.used ?
				  "devices are added before clients attach" : "more than 32 devices");
		return;
	}
	memset(d, 0, sizeof *d);
	d->provider = dq_provider_find(cfg->provider);
	if (!d->provider) {
		a->rc = eng_error(a->err, -ENOENT, "device %s: no provider \"%s\" in this build", cfg->name, cfg->provider);
		return;
	}
	memcpy(pc.name, cfg->name, sizeof pc.name);
	memcpy(pc.address, cfg->address, sizeof pc.address);
	memcpy(pc.gid, cfg->gid, sizeof pc.gid);
	pc.name[sizeof pc.name - 1] = pc.address[sizeof pc.address - 1] = pc.gid[sizeof pc.gid - 1] = 0;
	a->rc = d->provider->device_open(&pc, &d->dev, &perr);
	if (a->rc) {
		eng_error(a->err, a->rc, "%s", perr.text);
		return;
	}
	d->provider->device_query(d->dev, &d->attr);
	memcpy(d->name, pc.name, sizeof d->name);
	memcpy(d->pci_path, cfg->pci_path, sizeof d->pci_path);
	d->pci_path[sizeof d->pci_path - 1] = 0;
	d->rail = cfg->rail;
	d->numa_node = cfg->numa_node;
	d->departure.rate_bps = d->attr.line_rate_bps;
	dq_grants_init(&d->grants);
	dq_grants_device(&d->grants, d->attr.rate_bps, d->attr.noise_ns);
	ev.data.u64 = (uint64_t)WATCH_DEVICE << 32 | e->device_count;
	if (epoll_ctl(e->epoll_fd, EPOLL_CTL_ADD, d->provider->event_fd(d->dev), &ev)) {
		a->rc = eng_error(a->err, -errno, "device %s: cannot watch its event fd: %s", cfg->name, strerror(errno));
		d->provider->device_close(d->dev);
		return;
	}
	*a->device = e->device_count++;
}

int dq_engine_device_add(dq_engine *e, const struct dq_engine_device_config *cfg, uint32_t *device, struct dq_text *err)
{
	struct device_add a = { cfg, device, err, 0 };
	int rc = eng_call(e, device_add, &a);
	return rc ? rc : a.rc;
}

struct device_get {
	uint32_t device;
	struct dq_engine_device *out;
	int rc;
};

static void device_get(struct dq_engine *e, void *arg)
{
	struct device_get *a = arg;
	struct eng_device *d = &e->devices[a->device];
	if (a->device >= e->device_count) {
		a->rc = -ENOENT;
		return;
	}
	d->provider->device_query(d->dev, &d->attr);
	*a->out = (struct dq_engine_device){ .rate_bps = d->attr.rate_bps, .max_segment_bytes = d->attr.max_segment_bytes,
		.noise_ns = d->attr.noise_ns, .mtu = d->attr.mtu, .header_bytes = d->attr.header_bytes, .max_qps = d->attr.max_qps,
		.max_send_depth = d->attr.max_send_depth, .rail = d->rail, .dmabuf = d->attr.dmabuf, .up = d->attr.up, .vcs = d->vcs,
		.qps = d->qps, .memory_regions = d->regions, .grant_budget_bytes = d->grants.budget_bytes,
		.grant_active = d->grants.active };
	memcpy(a->out->name, d->name, sizeof a->out->name);
	snprintf(a->out->provider, sizeof a->out->provider, "%s", d->provider->name);
	memcpy(a->out->address, d->attr.address, sizeof a->out->address);
}

int dq_engine_device_get(dq_engine *e, uint32_t device, struct dq_engine_device *out)
{
	struct device_get a = { device, out, 0 };
	int rc = eng_call(e, device_get, &a);
	return rc ? rc : a.rc;
}

struct device_readdress {
	uint32_t device;
	const char *address;
	struct dq_text *err;
	int rc;
};

static void device_readdress(struct dq_engine *e, void *arg)
{
	struct device_readdress *a = arg;
	struct eng_device *d = &e->devices[a->device];
	struct dq_error perr = { 0 };
	char why[200], before[sizeof d->attr.address];
	if (a->device >= e->device_count) {
		a->rc = eng_error(a->err, -ENOENT, "no device %u", a->device);
		return;
	}
	if (!d->provider->device_readdress) {
		a->rc = eng_error(a->err, -EOPNOTSUPP, "device %s: the address of a %s device cannot change while it is open", d->name,
				  d->provider->name);
		return;
	}
	memcpy(before, d->attr.address, sizeof before);
	a->rc = d->provider->device_readdress(d->dev, a->address, &perr);
	if (a->rc) {
		eng_error(a->err, a->rc, "%s", perr.text);
		return;
	}
	d->provider->device_query(d->dev, &d->attr);
	if (strcmp(before, d->attr.address) == 0)
		return;         /* only its port was looked at again */
	snprintf(why, sizeof why, "its address changed from %.63s to %.63s", before, d->attr.address);
	fail_vcs_of(e, a->device, DQ_ERR_UNREACHABLE, why);
}

int dq_engine_device_readdress(dq_engine *e, uint32_t device, const char *address, struct dq_text *err)
{
	struct device_readdress a = { device, address, err, 0 };
	int rc = eng_call(e, device_readdress, &a);
	return rc ? rc : a.rc;
}

struct device_latency {
	uint32_t device, latency_ns;
	int rc;
};

static void device_latency(struct dq_engine *e, void *arg)
{
	struct device_latency *a = arg;
	if (a->device >= e->device_count)
		a->rc = -ENOENT;
	else
		e->devices[a->device].latency_ns = a->latency_ns;
}

int dq_engine_device_latency(dq_engine *e, uint32_t device, uint32_t latency_ns)
{
	struct device_latency a = { device, latency_ns, 0 };
	int rc = eng_call(e, device_latency, &a);
	return rc ? rc : a.rc;
}

struct prober_start {
	uint32_t device;
	const struct dq_prober_config *cfg;
	dq_prober **out;
	struct dq_text *err;
	int rc;
};

static void prober_start(struct dq_engine *e, void *arg)
{
	struct prober_start *a = arg;
	struct dq_error perr = { 0 };
	if (a->device >= e->device_count) {
		a->rc = eng_error(a->err, -ENOENT, "prober: no device %u", a->device);
		return;
	}
	a->rc = dq_prober_start(e->devices[a->device].provider, e->devices[a->device].dev, a->cfg, a->out, &perr);
	if (a->rc)
		eng_error(a->err, a->rc, "%s", perr.text);
}

int dq_engine_prober_start(dq_engine *e, uint32_t device, const struct dq_prober_config *cfg, dq_prober **out, struct dq_text *err)
{
	struct prober_start a = { device, cfg, out, err, 0 };
	int rc = eng_call(e, prober_start, &a);
	return rc ? rc : a.rc;
}
