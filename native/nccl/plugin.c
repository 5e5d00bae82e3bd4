/* SPDX-License-Identifier: Apache-2.0 */
/* init() and finalize(): users, and the state of the process. */
#include <stdlib.h>

#include "nccl/net.h"

struct dq_nccl_state dq_nccl_state = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* State lock held. */
static dq_nccl_result user_new(uint64_t communicator, struct dq_nccl_user **out)
{
	struct dq_nccl_user *user;
	dq_nccl_result rc = DQ_NCCL_SUCCESS;

	if (dq_nccl_state.inits == 0) {
		dq_nccl_log_reset();
		rc = dq_nccl_settings_read(&dq_nccl_state.settings);
		if (rc != DQ_NCCL_SUCCESS)
			return rc;
	}
	user = calloc(1, sizeof *user);
	if (!user) {
		DQ_NCCL_WARN("no memory for a communicator (%zu bytes)", sizeof *user);
		return DQ_NCCL_SYSTEM_ERROR;
	}
	rc = dq_nccl_lane_join(&user->lane);
	if (rc != DQ_NCCL_SUCCESS) {
		free(user);
		return rc;
	}
	user->communicator = communicator;
	user->next = dq_nccl_state.users;
	dq_nccl_state.users = user;
	if (dq_nccl_state.inits++ == 0) {
		dqplb_info info = {.size = sizeof info};
		if (dqplb_query(user->lane->ctx, &info) == DQPLB_OK)
			DQ_NCCL_INFO("attached to the daemon of host %s at %s", info.host_id, info.socket);
	}
	*out = user;
	return rc;
}

/* State lock held. */
static void user_free(struct dq_nccl_user *user)
{
	struct dq_nccl_user **at = &dq_nccl_state.users;

	while (*at != user)
		at = &(*at)->next;
	*at = user->next;
	dq_nccl_lane_leave(user->lane);
	free(user->pending);
	free(user);
	if (--dq_nccl_state.inits == 0)
		dq_nccl_devices_forget();
}

dq_nccl_result dq_nccl_init(void **out, uint64_t communicator, dq_nccl_logger logger)
{
	struct dq_nccl_user *user = NULL;
	dq_nccl_result rc;

	*out = NULL;
	dq_nccl_log_to(logger);
	pthread_mutex_lock(&dq_nccl_state.lock);
	rc = user_new(communicator, &user);
	pthread_mutex_unlock(&dq_nccl_state.lock);
	*out = user;
	return rc;
}

dq_nccl_result dq_nccl_init_shared(dq_nccl_logger logger)
{
	dq_nccl_result rc = DQ_NCCL_SUCCESS;

	dq_nccl_log_to(logger);
	pthread_mutex_lock(&dq_nccl_state.lock);
	if (!dq_nccl_state.shared)
		rc = user_new(0, &dq_nccl_state.shared);
	pthread_mutex_unlock(&dq_nccl_state.lock);
	return rc;
}

struct dq_nccl_user *dq_nccl_shared_user(void)
{
	struct dq_nccl_user *user;

	pthread_mutex_lock(&dq_nccl_state.lock);
	user = dq_nccl_state.shared;
	pthread_mutex_unlock(&dq_nccl_state.lock);
	return user;
}

/* State lock held. */
static bool known(const struct dq_nccl_user *user)
{
	for (const struct dq_nccl_user *u = dq_nccl_state.users; u; u = u->next)
		if (u == user)
			return true;
	return false;
}

dq_nccl_result dq_nccl_finalize(struct dq_nccl_user *user)
{
	pthread_mutex_lock(&dq_nccl_state.lock);
	if (known(user)) { /* else it was finalized before */
		dq_nccl_drop_pending(user);
		if (user == dq_nccl_state.shared)
			dq_nccl_state.shared = NULL;
		user_free(user);
	}
	pthread_mutex_unlock(&dq_nccl_state.lock);
	return DQ_NCCL_SUCCESS;
}

/*
 * The library may be about to be unmapped. Versions before v11 know no finalize(), so their user ends here. But it may be the end
 * of the process, too, whose other threads go on: those that connect see `ended` under the state lock; those that drive a comm take
 * no lock, so with a comm open everything is left to the kernel.
 */
__attribute__((destructor)) static void end(void)
{
	if (pthread_mutex_trylock(&dq_nccl_state.lock) != 0)
		return;
	dq_nccl_state.ended = true;
	if (dq_nccl_state.shared && !dq_nccl_state.shared->comms) {
		dq_nccl_drop_pending(dq_nccl_state.shared);
		user_free(dq_nccl_state.shared);
		dq_nccl_state.shared = NULL;
	}
	pthread_mutex_unlock(&dq_nccl_state.lock);
}

static int32_t most(int32_t a, int32_t b)
{
	return a > b ? a : b;
}

/*
 * A hint only rises: what the library says changes with each operation, sends and receives in turn, and the daemon asks how many
 * peers may be in use at a time. It falls when the communicator ends.
 */
dq_nccl_result dq_nccl_set_attr(struct dq_nccl_user *user, const struct dq_nccl_attr *attr)
{
	const int32_t peers = most(attr->send.max_peers, attr->recv.max_peers), flows = most(attr->send.max_flows, attr->recv.max_flows);

	if (peers <= atomic_load_explicit(&user->peers, memory_order_relaxed) &&
	    flows <= atomic_load_explicit(&user->flows, memory_order_relaxed) &&
	    !atomic_load_explicit(&user->lane->hint_owed, memory_order_relaxed))
		return DQ_NCCL_SUCCESS;
	pthread_mutex_lock(&dq_nccl_state.lock);
	if (known(user)) {
		user->peers = most(user->peers, peers);
		user->flows = most(user->flows, flows);
		dq_nccl_lane_hint(user->lane);
	}
	pthread_mutex_unlock(&dq_nccl_state.lock);
	return DQ_NCCL_SUCCESS;
}
