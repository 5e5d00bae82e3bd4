/* SPDX-License-Identifier: Apache-2.0 */
#include "provider/verbs_load.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>

static struct dq_verbs_lib table;
static struct dq_error failure;
static pthread_once_t once = PTHREAD_ONCE_INIT;

struct symbol {
	const char *name;
	size_t at;         /* of the pointer in the table */
	bool optional;
};

#define SYMBOL(field) {"ibv_" #field, offsetof(struct dq_verbs_lib, field), false}
#define OPTIONAL(field) {"ibv_" #field, offsetof(struct dq_verbs_lib, field), true}

static const struct symbol symbols[] = {
	SYMBOL(get_device_list), SYMBOL(free_device_list), SYMBOL(get_device_name), SYMBOL(open_device), SYMBOL(close_device),
	SYMBOL(query_device), {"ibv_query_port", offsetof(struct dq_verbs_lib, query_port_compat), false}, SYMBOL(query_gid),
	SYMBOL(alloc_pd), SYMBOL(dealloc_pd), SYMBOL(reg_mr), SYMBOL(dereg_mr), SYMBOL(create_comp_channel),
	SYMBOL(destroy_comp_channel), SYMBOL(create_cq), SYMBOL(destroy_cq), SYMBOL(get_cq_event), SYMBOL(ack_cq_events),
	SYMBOL(create_srq), SYMBOL(destroy_srq), SYMBOL(create_qp), SYMBOL(modify_qp), SYMBOL(query_qp), SYMBOL(destroy_qp),
	SYMBOL(create_ah), SYMBOL(destroy_ah), SYMBOL(get_async_event), SYMBOL(ack_async_event), SYMBOL(event_type_str),
	SYMBOL(wc_status_str), OPTIONAL(fork_init), OPTIONAL(reg_mr_iova2), OPTIONAL(reg_dmabuf_mr),
	{"_ibv_query_gid_table", offsetof(struct dq_verbs_lib, query_gid_table), true},
};

static void load(void)
{
	void *library = dlopen(DQ_VERBS_LIBRARY, RTLD_NOW | RTLD_LOCAL);

	if (!library) {
		dq_error_set(&failure, -ENOSYS, "RDMA devices need libibverbs, which cannot be loaded: %s; install the package libibverbs1 and "
			     "ibverbs-providers, or rdma-core", dlerror());
		return;
	}
	for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
		void *address = dlsym(library, symbols[i].name);
		if (!address && !symbols[i].optional) {
			dq_error_set(&failure, -ENOSYS, "%s has no %s: it is too old or not the real one; install libibverbs of rdma-core",
				     DQ_VERBS_LIBRARY, symbols[i].name);
			dlclose(library);
			return;
		}
		memcpy((char *)&table + symbols[i].at, &address, sizeof address);
	}
	/* Memory that a child shares until one of both writes to it would part from what the device sees. From Linux 5.12 on the
	 * kernel takes care of that, and this call only finds it out; before, it keeps registered pages out of children. An error
	 * means that somebody registered memory already: then it is too late, and no worse than without. */
	if (table.fork_init)
		(void)table.fork_init();
}

const struct dq_verbs_lib *dq_verbs_load(struct dq_error *err)
{
	pthread_once(&once, load);
	if (!failure.code)
		return &table;
	if (err)
		*err = failure;
	return NULL;
}

int dq_verbs_query_port(const struct dq_verbs_lib *lib, struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *out)
{
	struct verbs_context *extended = verbs_get_ctx_op(ctx, query_port);
	int rc;

	memset(out, 0, sizeof *out);
	/* The exported function fills the older, shorter structure only. */
	rc = extended ? extended->query_port(ctx, port, out, sizeof *out) :
			lib->query_port_compat(ctx, port, (struct _compat_ibv_port_attr *)(void *)out);
	return rc > 0 ? -rc : rc;
}
