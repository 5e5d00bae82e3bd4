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

static dq_nccl_result make(uint32_t number, struct dq_nccl_lane **out)
{
	char name[64];
	dqplb_options options = {.size = sizeof options, .name = name, .ring_entries = DQ_NCCL_RING_ENTRIES};
	dqplb_info info = {.size = sizeof info};
	struct dq_nccl_lane *lane = calloc(1, sizeof *lane);
	int status;

	if (!lane) {
		DQ_NCCL_WARN("no memory for an attachment to the daemon (%zu bytes)", sizeof *lane);
		return DQ_NCCL_SYSTEM_ERROR;
	}
	/* What `dqplb clients` shows. */
	snprintf(name, sizeof name, "nccl:%.40s/%u", program_invocation_short_name, number);
	status = dqplb_open(&options, &lane->ctx);
	if (status != DQPLB_OK) {
		DQ_NCCL_WARN("cannot attach to the daemon of this host: %s. %s; nothing else is tried instead", dqplb_last_error(),
			     status == DQPLB_ERR_DAEMON ? "The unit to start is dqplbd.service; in a container, mount its socket"
							: dq_nccl_advice(status));
		free(lane);
		return status == DQPLB_ERR_VERSION || status == DQPLB_ERR_INVALID ? DQ_NCCL_INVALID_USAGE : DQ_NCCL_SYSTEM_ERROR;
	}
	lane->number = number;
	status = dqplb_query(lane->ctx, &info);
	if (status != DQPLB_OK) {
		const dq_nccl_result rc = dq_nccl_fail(status, "attaching to the daemon", -1);
		dqplb_close(lane->ctx);
		free(lane);
		return rc;
	}
	lane->room = info.ring_entries > 2 * ROOM_KEPT ? info.ring_entries - ROOM_KEPT : info.ring_entries / 2;
	*out = lane;
	return DQ_NCCL_SUCCESS;
}

dq_nccl_result dq_nccl_lane_join(struct dq_nccl_lane **out)
{
	uint32_t best = 0;
	dq_nccl_result rc;

	for (uint32_t i = 0; i < dq_nccl_state.settings.lanes; i++) {
		/* One whose daemon is gone takes nobody in; who is in it keeps it until the end. */
		if (lanes[i] && !alive(lanes[i]))
			lanes[i] = NULL;
	}
	for (uint32_t i = 1; i < dq_nccl_state.settings.lanes; i++) {
		const uint32_t users = lanes[i] ? lanes[i]->users : 0, least = lanes[best] ? lanes[best]->users : 0;
		if (users < least)
			best = i;
	}
	if (!lanes[best]) {
		rc = make(best, &lanes[best]);
		if (rc != DQ_NCCL_SUCCESS)
			return rc;
		rc = dq_nccl_devices_load(lanes[best]);
		if (rc != DQ_NCCL_SUCCESS) {
			destroy(lanes[best]);
			lanes[best] = NULL;
			return rc;
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
