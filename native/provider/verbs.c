/* SPDX-License-Identifier: Apache-2.0 */
/* The table of the verbs provider. */
#include "provider/verbs.h"
#include "provider/verbs_table.h"

const struct dq_provider dq_provider_verbs = {
	.name = "verbs",
	.mem_any_thread = true,
	.device_open = dq_verbs_device_open,
	.device_close = dq_verbs_device_close,
	.device_query = dq_verbs_device_query,
	.device_event = dq_verbs_device_event,
	.device_readdress = dq_verbs_device_readdress,
	.mem_register = dq_verbs_mem_register,
	.mem_deregister = dq_verbs_mem_deregister,
	.mem_key = dq_verbs_mem_key,
	.mem_flush = dq_verbs_mem_flush,
	.qp_create = dq_verbs_qp_create,
	.qp_endpoint = dq_verbs_qp_endpoint,
	.qp_connect = dq_verbs_qp_connect,
	.qp_fence = dq_verbs_qp_fence,
	.qp_destroy = dq_verbs_qp_destroy,
	.post_write = dq_verbs_qp_post_write,
	.post_send = dq_verbs_qp_post_send,
	.post_recv = dq_verbs_qp_post_recv,
	.poll = dq_verbs_device_poll,
	.arm = dq_verbs_device_arm,
	.event_fd = dq_verbs_device_event_fd,
	.next_deadline = dq_verbs_device_next_deadline,
	.dgram_open = dq_verbs_dgram_open,
	.dgram_close = dq_verbs_dgram_close,
	.dgram_endpoint = dq_verbs_dgram_endpoint,
	.dgram_send = dq_verbs_dgram_send,
	.dgram_poll = dq_verbs_dgram_poll,
	.dgram_fd = dq_verbs_dgram_fd,
	.dgram_next_deadline = dq_verbs_dgram_next_deadline,
	.dgram_time_source = dq_verbs_dgram_time_source,
};
