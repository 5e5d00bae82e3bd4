/* SPDX-License-Identifier: Apache-2.0 */
/* The table of the tcp provider. */
#include "provider/tcp.h"

const struct dq_provider dq_provider_tcp = {
	.name = "tcp",
	.device_open = dq_tcp_device_open,
	.device_close = dq_tcp_device_close,
	.device_query = dq_tcp_device_query,
	.mem_register = dq_tcp_mem_register,
	.mem_deregister = dq_tcp_mem_deregister,
	.mem_key = dq_tcp_mem_key,
	.mem_flush = dq_tcp_mem_flush,
	.qp_create = dq_tcp_qp_create,
	.qp_endpoint = dq_tcp_qp_endpoint,
	.qp_connect = dq_tcp_qp_connect,
	.qp_fence = dq_tcp_qp_fence,
	.qp_destroy = dq_tcp_qp_destroy,
	.post_write = dq_tcp_qp_post_write,
	.post_send = dq_tcp_qp_post_send,
	.post_recv = dq_tcp_qp_post_recv,
	.poll = dq_tcp_device_poll,
	.arm = dq_tcp_device_arm,
	.event_fd = dq_tcp_device_event_fd,
	.next_deadline = dq_tcp_device_next_deadline,
	.dgram_open = dq_tcp_dgram_open,
	.dgram_close = dq_tcp_dgram_close,
	.dgram_endpoint = dq_tcp_dgram_endpoint,
	.dgram_send = dq_tcp_dgram_send,
	.dgram_poll = dq_tcp_dgram_poll,
	.dgram_fd = dq_tcp_dgram_fd,
	.dgram_next_deadline = dq_tcp_dgram_next_deadline,
	.dgram_time_source = dq_tcp_dgram_time_source,
};
