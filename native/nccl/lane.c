/* SPDX-License-Identifier: Apache-2.0 */
/* Lanes: the few contexts of the shim that all communicators of the process share. Guarded by the state lock. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "nccl/net.h"

#define ROOM_KEPT 32u /* ring entries for connecting and closing */

static struct dq_nccl_lane *lanes[DQ_NCCL_LANES_MAX];

static bool alive(struct dq_nccl_lane *lane)
{
	const int status = dqplb_wait_any(lane->ctx, 0);

	return status == DQPLB_OK || status == DQPLB_ERR_TIMEOUT;
}

static void destroy(struct dq_nccl_lane *lane)
{
	dq_nccl_mr_forget_lane(lane);
	dqplb_close(lane->ctx);
	free(lane);
}

/* *status: of the shim, when that is what failed, and not told yet. */
static dq_nccl_result make(uint32_t number, struct dq_nccl_lane **out, int *status)
{
	char name[64];
	dqplb_options options = {.size = sizeof options, .name = name, .ring_entries = DQ_NCCL_RING_ENTRIES};
	dqplb_info info = {.size = sizeof info};
	struct dq_nccl_lane *lane = calloc(1, sizeof *lane);
	dq_nccl_result rc = DQ_NCCL_SUCCESS;

	*status = DQPLB_OK;
	if (!lane) {
		DQ_NCCL_WARN("no memory for an attachment to the daemon (%zu bytes)", sizeof *lane);
		return DQ_NCCL_SYSTEM_ERROR;
	}
	/* What `dqplb clients` shows. */
	snprintf(name, sizeof name, "nccl:%.40s/%u", program_invocation_short_name, number);
	*status = dqplb_open(&options, &lane->ctx);
	if (*status != DQPLB_OK) {
		free(lane);
		return DQ_NCCL_SYSTEM_ERROR;
	}
	lane->number = number;
	*status = dqplb_query(lane->ctx, &info);
	if (*status == DQPLB_OK) {
		lane->room = info.ring_entries > 2 * ROOM_KEPT ? info.ring_entries - ROOM_KEPT : info.ring_entries / 2;
		rc = dq_nccl_devices_load(lane);
	}
	if (*status != DQPLB_OK || rc != DQ_NCCL_SUCCESS) {
		dqplb_close(lane->ctx);
		free(lane);
		return rc != DQ_NCCL_SUCCESS ? rc : DQ_NCCL_SYSTEM_ERROR;
	}
	*out = lane;
	return rc;
}

static dq_nccl_result cannot_attach(int status)
{
	DQ_NCCL_WARN("cannot attach to the daemon of this host: %s. %s; nothing else is tried instead", dqplb_last_error(),
		     status == DQPLB_ERR_DAEMON ? "The unit to start is dqplbd.service; in a container, mount its socket"
						: dq_nccl_advice(status));
	return status == DQPLB_ERR_VERSION || status == DQPLB_ERR_INVALID ? DQ_NCCL_INVALID_USAGE : DQ_NCCL_SYSTEM_ERROR;
}

/* The number of the lane with the fewest users, one that does not exist among them; `existing`: of those that do, or -1. */
static int fewest(bool existing)
{
	int best = -1;

	for (uint32_t i = 0; i < dq_nccl_state.settings.lanes; i++) {
		if (existing && !lanes[i])
			continue;
		if (best < 0 || (lanes[i] ? lanes[i]->users : 0) < (lanes[best] ? lanes[best]->users : 0))
			best = (int)i;
	}
	return best;
}

dq_nccl_result dq_nccl_lane_join(struct dq_nccl_lane **out)
{
	dq_nccl_result rc;
	int best, status;

	for (uint32_t i = 0; i < dq_nccl_state.settings.lanes; i++) {
		/* One whose daemon is gone takes nobody in; who is in it keeps it until the end. */
		if (lanes[i] && !alive(lanes[i]))
			lanes[i] = NULL;
	}
	best = fewest(false);
	if (!lanes[best]) {
		rc = make((uint32_t)best, &lanes[best], &status);
		if (rc != DQ_NCCL_SUCCESS) {
			/* The daemon lets no more clients in: those that are there will do. */
			const int other = status == DQPLB_ERR_LIMIT ? fewest(true) : -1;

			if (other < 0)
				return status == DQPLB_OK ? rc : cannot_attach(status);
			DQ_NCCL_INFO("sharing attachment %d with another communicator: %s", other, dqplb_last_error());
			best = other;
		}
	}
	lanes[best]->users++;
	*out = lanes[best];
	return DQ_NCCL_SUCCESS;
}

void dq_nccl_lane_leave(struct dq_nccl_lane *lane)
{
	if (--lane->users) {
		dq_nccl_lane_hint(lane);
		return;
	}
	if (lanes[lane->number] == lane)
		lanes[lane->number] = NULL;
	destroy(lane);
}

/* Users of a lane may be active at the same time or not: the largest of their hints, since a sum would often be far too high. */
void dq_nccl_lane_hint(struct dq_nccl_lane *lane)
{
	int32_t peers = 0, flows = 0;

	for (const struct dq_nccl_user *u = dq_nccl_state.users; u; u = u->next) {
		if (u->lane != lane)
			continue;
		peers = u->peers > peers ? u->peers : peers;
		flows = u->flows > flows ? u->flows : flows;
	}
	if (peers == lane->peers && flows == lane->flows) {
		atomic_store_explicit(&lane->hint_owed, false, memory_order_relaxed);
		return;
	}
	/* Not now, when the socket is in use: the library's next word tries again, whatever it says. */
	const int status = dqplb_hint(lane->ctx, (uint32_t)peers, (uint32_t)flows);
	if (status == DQPLB_OK) {
		lane->peers = peers;
		lane->flows = flows;
	}
	atomic_store_explicit(&lane->hint_owed, status == DQPLB_ERR_AGAIN, memory_order_relaxed);
}
