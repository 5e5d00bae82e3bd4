/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libibverbs, loaded when the first device is opened: a machine without RDMA needs no library, and one build serves all.
 *
 * The table has the library's exported functions under their names without "ibv_". The header's own inline functions are
 * safe where they only go through a pointer of the object (ibv_poll_cq, ibv_post_send, ibv_post_recv, ibv_post_srq_recv,
 * ibv_req_notify_cq, ibv_create_cq_ex, ...); every other call goes through the table, or the program would need the library
 * to start.
 */
#ifndef DQ_PROVIDER_VERBS_LOAD_H
#define DQ_PROVIDER_VERBS_LOAD_H

#include <infiniband/verbs.h>

#include "core/base.h"

#define DQ_VERBS_LIBRARY "libibverbs.so.1"

struct dq_verbs_lib {
	__typeof__(ibv_get_device_list) *get_device_list;
	__typeof__(ibv_free_device_list) *free_device_list;
	__typeof__(ibv_get_device_name) *get_device_name;
	__typeof__(ibv_open_device) *open_device;
	__typeof__(ibv_close_device) *close_device;
	__typeof__(ibv_query_device) *query_device;
	__typeof__(ibv_query_port) *query_port_compat;   /* use dq_verbs_query_port */
	__typeof__(ibv_query_gid) *query_gid;
	__typeof__(ibv_alloc_pd) *alloc_pd;
	__typeof__(ibv_dealloc_pd) *dealloc_pd;
	__typeof__(ibv_reg_mr) *reg_mr;
	__typeof__(ibv_dereg_mr) *dereg_mr;
	__typeof__(ibv_create_comp_channel) *create_comp_channel;
	__typeof__(ibv_destroy_comp_channel) *destroy_comp_channel;
	__typeof__(ibv_create_cq) *create_cq;
	__typeof__(ibv_destroy_cq) *destroy_cq;
	__typeof__(ibv_get_cq_event) *get_cq_event;
	__typeof__(ibv_ack_cq_events) *ack_cq_events;
	__typeof__(ibv_create_srq) *create_srq;
	__typeof__(ibv_destroy_srq) *destroy_srq;
	__typeof__(ibv_create_qp) *create_qp;
	__typeof__(ibv_modify_qp) *modify_qp;
	__typeof__(ibv_query_qp) *query_qp;
	__typeof__(ibv_destroy_qp) *destroy_qp;
	__typeof__(ibv_create_ah) *create_ah;
	__typeof__(ibv_destroy_ah) *destroy_ah;
	__typeof__(ibv_get_async_event) *get_async_event;
	__typeof__(ibv_ack_async_event) *ack_async_event;
	__typeof__(ibv_event_type_str) *event_type_str;
	__typeof__(ibv_wc_status_str) *wc_status_str;

	/* NULL where the library is older than these. */
	__typeof__(ibv_fork_init) *fork_init;
	__typeof__(ibv_reg_mr_iova2) *reg_mr_iova2;      /* 1.8: flags of the optional range, such as relaxed ordering */
	__typeof__(ibv_reg_dmabuf_mr) *reg_dmabuf_mr;    /* 1.12 */
	__typeof__(_ibv_query_gid_table) *query_gid_table; /* 1.11 */
};

/* The library, loaded once for the life of the process; any thread. NULL: err says what is missing and how to get it. */
const struct dq_verbs_lib *dq_verbs_load(struct dq_error *err);

/* As ibv_query_port of the header. 0 or a negative errno. */
int dq_verbs_query_port(const struct dq_verbs_lib *lib, struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *out);

#endif
