/* SPDX-License-Identifier: Apache-2.0 */
/*
 * listen, connect, accept. None of them waits, and those that are called again and again make no system call: the state of a
 * connection is looked up in shared memory.
 *
 * The 128 bytes of a handle are the shim's, which has magic, version, host, epoch and nonce in them. The library hands connect()
 * the same buffer until it is done, so while a connect is under way its first bytes say where the plugin keeps it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "nccl/net.h"

#define MARK 0x4e4e4f4350424c51u /* no handle of the shim begins like this */

_Static_assert(sizeof(dqplb_handle) == DQ_NCCL_HANDLE_BYTES, "the shim's handle is the library's");

struct mark {
	uint64_t magic;
	uint64_t place;
	uint64_t cookie;
};

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &t); /* some ms are nothing here */
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* --- listening ------------------------------------------------------------------------------------------------------ */

/* State lock held. */
static dq_nccl_result do_listen(struct dq_nccl_user *user, int device, void *handle, void **out)
{
	struct dq_nccl_lane *lane = user->lane;
	dq_nccl_result rc = dq_nccl_device_check(lane, device, "listen");
	struct dq_nccl_listener *l;
	dqplb_handle h;
	int status;

	if (rc != DQ_NCCL_SUCCESS)
		return rc;
	l = calloc(1, sizeof *l);
	if (!l) {
		DQ_NCCL_WARN("listen on device %s: no memory (%zu bytes)", dq_nccl_device_name(device), sizeof *l);
		return DQ_NCCL_SYSTEM_ERROR;
	}
	l->user = user;
	l->device = device;
	status = dqplb_listen(lane->ctx, lane->device[device], &h, &l->listener);
	if (status != DQPLB_OK) {
		free(l);
		return dq_nccl_fail(status, "listen", device);
	}
	/* At once, so that the other end is connected as soon as its request comes, whenever accept() is called. Without room for
	 * it now, accept() does it. */
	if (dqplb_accept(l->listener, &l->accept) != DQPLB_OK)
		l->accept = NULL;
	memcpy(handle, &h, sizeof h);
	l->next = user->listeners;
	if (l->next)
		l->next->prev = l;
	user->listeners = l;
	*out = l;
	return DQ_NCCL_SUCCESS;
}

dq_nccl_result dq_nccl_listen(struct dq_nccl_user *user, int device, void *handle, void **out)
{
	dq_nccl_result rc = DQ_NCCL_SYSTEM_ERROR;

	*out = NULL;
	pthread_mutex_lock(&dq_nccl_state.lock);
	if (!dq_nccl_state.ended)
		rc = do_listen(user, device, handle, out);
	pthread_mutex_unlock(&dq_nccl_state.lock);
	return rc;
}

/* State lock held. */
static void end_listener(struct dq_nccl_listener *l)
{
	if (l->prev)
		l->prev->next = l->next;
	else
		l->user->listeners = l->next;
	if (l->next)
		l->next->prev = l->prev;
	if (l->accept)
		dqplb_abandon(l->accept);
	dqplb_listener_close(l->listener); /* fails only when the daemon is gone, and nothing is left to close then */
	free(l);
}

dq_nccl_result dq_nccl_close_listen(struct dq_nccl_listener *l)
{
	pthread_mutex_lock(&dq_nccl_state.lock);
	if (!dq_nccl_state.ended)
		end_listener(l);
	pthread_mutex_unlock(&dq_nccl_state.lock);
	return DQ_NCCL_SUCCESS;
}

/* --- both ends ------------------------------------------------------------------------------------------------------ */

/* State lock held. The flow is open: make its comm. */
static dq_nccl_result opened(struct dq_nccl_user *user, int device, dqplb_flow *flow, bool receives, void **out)
{
	struct dq_nccl_comm *comm = dq_nccl_comm_new(user, device, flow, receives);

	if (!comm) {
		dqplb_flow_close(flow);
		DQ_NCCL_WARN("%s on device %s: no memory for a connection", receives ? "accept" : "connect", dq_nccl_device_name(device));
		return DQ_NCCL_SYSTEM_ERROR;
	}
	comm->next = user->comms;
	if (comm->next)
		comm->next->prev = comm;
	user->comms = comm;
	*out = comm;
	return DQ_NCCL_SUCCESS;
}

/* State lock held. */
static void end_comm(struct dq_nccl_comm *comm)
{
	if (comm->prev)
		comm->prev->next = comm->next;
	else
		comm->user->comms = comm->next;
	if (comm->next)
		comm->next->prev = comm->prev;
	dqplb_flow *flow = comm->flow;
	dq_nccl_comm_free(comm);
	dqplb_flow_close(flow); /* as above */
}

dq_nccl_result dq_nccl_close_comm(struct dq_nccl_comm *comm)
{
	pthread_mutex_lock(&dq_nccl_state.lock);
	if (!dq_nccl_state.ended)
		end_comm(comm);
	pthread_mutex_unlock(&dq_nccl_state.lock);
	return DQ_NCCL_SUCCESS;
}

/* "connect to host h2", for messages; the handle is as listen() made it. */
static const char *connect_to(const void *handle, char *text, size_t bytes)
{
	char host[64];
	dqplb_handle h;

	memcpy(&h, handle, sizeof h);
	if (dqplb_handle_host(&h, host, sizeof host) != DQPLB_OK)
		return "connect";
	snprintf(text, bytes, "connect to host %s", host);
	return text;
}

static dq_nccl_result late(const char *what, int device)
{
	DQ_NCCL_WARN("%s on device %s: not connected after %llu s (DQPLB_NCCL_CONNECT_TIMEOUT_S): is the other rank there, and does dqplbd "
		     "run on its host? See `dqplb peers`", what, dq_nccl_device_name(device),
		     (unsigned long long)(dq_nccl_state.settings.connect_timeout_ns / 1000000000u));
	return DQ_NCCL_REMOTE_ERROR;
}

/* --- accept --------------------------------------------------------------------------------------------------------- */

/* State lock held. */
static dq_nccl_result do_accept(struct dq_nccl_listener *l, void **out)
{
	dqplb_result result;
	int done, status;

	if (!l->deadline)
		l->deadline = now_ns() + dq_nccl_state.settings.connect_timeout_ns;
	if (!l->accept) {
		status = dqplb_accept(l->listener, &l->accept);
		if (status == DQPLB_ERR_AGAIN)
			return now_ns() < l->deadline ? DQ_NCCL_SUCCESS : late("accept", l->device);
		if (status != DQPLB_OK)
			return dq_nccl_fail(status, "accept", l->device);
	}
	status = dqplb_test(l->accept, &done, &result);
	if (!done) {
		if (status != DQPLB_OK)
			return dq_nccl_fail(status, "accept", l->device);
		return now_ns() < l->deadline ? DQ_NCCL_SUCCESS : late("accept", l->device);
	}
	l->accept = NULL;
	l->deadline = 0; /* of the next one */
	if (result.status != DQPLB_OK)
		return dq_nccl_fail(result.status, "accept", l->device);
	return opened(l->user, l->device, result.flow, true, out);
}

dq_nccl_result dq_nccl_accept(struct dq_nccl_listener *l, void **out)
{
	dq_nccl_result rc = DQ_NCCL_SYSTEM_ERROR;

	*out = NULL;
	pthread_mutex_lock(&dq_nccl_state.lock);
	if (!dq_nccl_state.ended)
		rc = do_accept(l, out);
	pthread_mutex_unlock(&dq_nccl_state.lock);
	return rc;
}

/* --- connect -------------------------------------------------------------------------------------------------------- */

/* State lock held. The connect that this buffer belongs to; NULL: a handle as listen() made it. */
static struct dq_nccl_pending *find(const struct dq_nccl_user *user, const void *handle)
{
	struct mark mark;

	memcpy(&mark, handle, sizeof mark);
	if (mark.magic != MARK || mark.place >= user->pending_room)
		return NULL;
	struct dq_nccl_pending *p = user->pending[mark.place];
	return p && p->cookie == mark.cookie ? p : NULL;
}

/* State lock held. Finds a place for it and marks the buffer. */
static bool keep(struct dq_nccl_user *user, struct dq_nccl_pending *p, void *handle)
{
	struct mark mark = {.magic = MARK};
	uint32_t i = user->pending_hint;

	while (i < user->pending_room && user->pending[i])
		i++;
	if (i == user->pending_room) {
		const uint32_t room = user->pending_room ? 2 * user->pending_room : 16;
		struct dq_nccl_pending **grown = realloc(user->pending, room * sizeof(struct dq_nccl_pending *));

		if (!grown)
			return false;
		memset(grown + user->pending_room, 0, (room - user->pending_room) * sizeof(struct dq_nccl_pending *));
		user->pending = grown;
		user->pending_room = room;
	}
	user->pending[i] = p;
	p->place = i;
	user->pending_hint = i + 1;
	mark.place = i;
	mark.cookie = p->cookie = ++user->pending_cookie;
	memcpy(handle, &mark, sizeof mark);
	return true;
}

/* State lock held. The buffer is a handle again, as it may be used for another connect. */
static void forget(struct dq_nccl_user *user, struct dq_nccl_pending *p, void *handle)
{
	user->pending[p->place] = NULL;
	if (p->place < user->pending_hint)
		user->pending_hint = p->place;
	memcpy(handle, p->handle, sizeof p->handle);
	free(p);
}

static int post(struct dq_nccl_user *user, struct dq_nccl_pending *p)
{
	dqplb_handle h;

	memcpy(&h, p->handle, sizeof h);
	return dqplb_connect(user->lane->ctx, user->lane->device[p->device], &h, &p->request);
}

/* State lock held. */
static dq_nccl_result begin(struct dq_nccl_user *user, int device, void *handle)
{
	dq_nccl_result rc = dq_nccl_device_check(user->lane, device, "connect");
	struct dq_nccl_pending *p;
	int status;

	if (rc != DQ_NCCL_SUCCESS)
		return rc;
	p = calloc(1, sizeof *p);
	if (p) {
		memcpy(p->handle, handle, sizeof p->handle);
		p->device = device;
		p->deadline = now_ns() + dq_nccl_state.settings.connect_timeout_ns;
	}
	if (!p || !keep(user, p, handle)) {
		free(p);
		DQ_NCCL_WARN("connect on device %s: no memory", dq_nccl_device_name(device));
		return DQ_NCCL_SYSTEM_ERROR;
	}
	status = post(user, p);
	if (status == DQPLB_OK || status == DQPLB_ERR_AGAIN)
		return DQ_NCCL_SUCCESS;
	forget(user, p, handle);
	return dq_nccl_fail(status, "connect", device);
}

/* State lock held. */
static dq_nccl_result do_connect(struct dq_nccl_user *user, int device, void *handle, void **out)
{
	struct dq_nccl_pending *p = find(user, handle);
	dqplb_flow *flow = NULL;
	dqplb_result result;
	char what[96];
	int done = 0, status = DQPLB_OK;

	if (!p)
		return begin(user, device, handle);
	device = p->device;
	if (p->request) {
		status = dqplb_test(p->request, &done, &result);
		if (done) {
			p->request = NULL;
			status = result.status;
			flow = status == DQPLB_OK ? result.flow : NULL;
		}
	}
	/* The daemon's own patience with a peer that does not answer is short; how long to wait is decided here. */
	if (done && status == DQPLB_ERR_TIMEOUT)
		status = DQPLB_OK;
	if (flow) {
		forget(user, p, handle);
		return opened(user, device, flow, false, out);
	}
	if (status == DQPLB_OK && now_ns() >= p->deadline) {
		if (p->request)
			dqplb_abandon(p->request);
		forget(user, p, handle);
		return late(connect_to(handle, what, sizeof what), device);
	}
	if (status == DQPLB_OK && !p->request)
		status = post(user, p);
	if (status == DQPLB_OK || status == DQPLB_ERR_AGAIN)
		return DQ_NCCL_SUCCESS;
	if (p->request)
		dqplb_abandon(p->request);
	forget(user, p, handle);
	return dq_nccl_fail(status, connect_to(handle, what, sizeof what), device);
}

dq_nccl_result dq_nccl_connect(struct dq_nccl_user *user, int device, void *handle, void **out)
{
	dq_nccl_result rc = DQ_NCCL_SYSTEM_ERROR;

	*out = NULL;
	pthread_mutex_lock(&dq_nccl_state.lock);
	if (!dq_nccl_state.ended)
		rc = do_connect(user, device, handle, out);
	pthread_mutex_unlock(&dq_nccl_state.lock);
	return rc;
}

void dq_nccl_drop_pending(struct dq_nccl_user *user)
{
	for (uint32_t i = 0; i < user->pending_room; i++) {
		if (!user->pending[i])
			continue;
		if (user->pending[i]->request)
			dqplb_abandon(user->pending[i]->request);
		free(user->pending[i]);
		user->pending[i] = NULL;
	}
	while (user->comms)
		end_comm(user->comms);
	while (user->listeners)
		end_listener(user->listeners);
}
