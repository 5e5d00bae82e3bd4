/* SPDX-License-Identifier: Apache-2.0 */
/* From a status of the shim to what the library sees, and to a line in its log. */
#include <stdio.h>
#include <string.h>

#include "nccl/net.h"

static const struct {
	dq_nccl_result result;
	const char *advice;
} table[] = {
	[-DQPLB_OK] = {DQ_NCCL_SUCCESS, ""},
	[-DQPLB_ERR_AGAIN] = {DQ_NCCL_SYSTEM_ERROR, "the daemon does not keep up: see `dqplb status`"},
	[-DQPLB_ERR_INVALID] = {DQ_NCCL_INTERNAL_ERROR, "please report this"},
	[-DQPLB_ERR_NOMEM] = {DQ_NCCL_SYSTEM_ERROR, "raise clients.max_memory_bytes in the daemon's configuration, or give the host more "
						    "memory"},
	[-DQPLB_ERR_CLOSED] = {DQ_NCCL_REMOTE_ERROR, "the rank at the other end ended this connection: look at its log"},
	[-DQPLB_ERR_CANCELED] = {DQ_NCCL_INTERNAL_ERROR, "its connection was closed, or its memory deregistered, before it was done"},
	[-DQPLB_ERR_PEER_GONE] = {DQ_NCCL_REMOTE_ERROR, "the process at the other end died: look at that host"},
	[-DQPLB_ERR_UNREACHABLE] = {DQ_NCCL_REMOTE_ERROR, "see `dqplb peers` and `dqplb paths` on this host, and whether dqplbd runs on the "
							  "other"},
	[-DQPLB_ERR_REFUSED] = {DQ_NCCL_REMOTE_ERROR, "the rank at the other end stopped listening before this one connected: look at its log"},
	[-DQPLB_ERR_TIMEOUT] = {DQ_NCCL_REMOTE_ERROR, "the rank at the other end did not answer: is it there yet, is it stuck? "
						      "DQPLB_NCCL_CONNECT_TIMEOUT_S says how long to wait"},
	[-DQPLB_ERR_TOO_LONG] = {DQ_NCCL_INVALID_USAGE, "the two ranks do not agree on a size: do both call the same collective with the same "
							"count and type?"},
	[-DQPLB_ERR_REGION] = {DQ_NCCL_INTERNAL_ERROR, "please report this"},
	[-DQPLB_ERR_STALE] = {DQ_NCCL_REMOTE_ERROR, "the daemon of the other host was restarted meanwhile: start the job again"},
	[-DQPLB_ERR_DAEMON] = {DQ_NCCL_SYSTEM_ERROR, "is dqplbd running on this host? `systemctl start dqplbd`, `journalctl -u dqplbd`"},
	[-DQPLB_ERR_VERSION] = {DQ_NCCL_REMOTE_ERROR, "install the same version of dqplbd on both hosts, and in the container"},
	[-DQPLB_ERR_PERMISSION] = {DQ_NCCL_SYSTEM_ERROR, "let this user open the daemon's socket: clients.group, clients.mode"},
	[-DQPLB_ERR_DEVICE] = {DQ_NCCL_SYSTEM_ERROR, "see `dqplb devices` and the daemon's log"},
	[-DQPLB_ERR_LIMIT] = {DQ_NCCL_SYSTEM_ERROR, "raise the limit that is named, in the section `clients` of the daemon's configuration"},
	[-DQPLB_ERR_FORKED] = {DQ_NCCL_INVALID_USAGE, "communicators do not survive a fork: make them in the process that uses them"},
	[-DQPLB_ERR_INTERNAL] = {DQ_NCCL_INTERNAL_ERROR, "please report this, with the daemon's log"},
};
#define KNOWN(status) ((status) <= 0 && (status) > -(int)(sizeof table / sizeof table[0]))

dq_nccl_result dq_nccl_result_of(int status)
{
	return KNOWN(status) ? table[-status].result : DQ_NCCL_INTERNAL_ERROR;
}

const char *dq_nccl_advice(int status)
{
	return KNOWN(status) ? table[-status].advice : "";
}

/* WARN the first time, INFO afterwards: a broken path fails a thousand requests, and one line says it. */
static void tell(const char *cause, const char *text)
{
	if (dq_nccl_log_first(cause))
		DQ_NCCL_WARN("%s", text);
	else
		DQ_NCCL_INFO("%s", text);
}

dq_nccl_result dq_nccl_fail(int status, const char *what, int device)
{
	char cause[128], text[1024], on[64] = "";

	if (device >= 0)
		snprintf(on, sizeof on, " on device %s", dq_nccl_device_name(device));
	snprintf(cause, sizeof cause, "%d %s %d", status, what, device);
	snprintf(text, sizeof text, "%s%s: %s (%s)%s%s", what, on, dqplb_last_error(), dqplb_strerror(status),
		 dq_nccl_advice(status)[0] ? ": " : "", dq_nccl_advice(status));
	tell(cause, text);
	return dq_nccl_result_of(status);
}

dq_nccl_result dq_nccl_fail_comm(int status, const struct dq_nccl_comm *comm, const char *what, size_t bytes)
{
	dqplb_flow_info flow = {.size = sizeof flow};
	char cause[192], text[1024];

	/* Before anything else of the shim is called: its text is of the last failed call. */
	char detail[512];
	snprintf(detail, sizeof detail, "%s", dqplb_last_error());
	if (dqplb_flow_query(comm->flow, &flow) != DQPLB_OK)
		flow.peer[0] = flow.path_class[0] = 0;
	snprintf(cause, sizeof cause, "%d %s %s %d", status, what, flow.peer, comm->device);
	snprintf(text, sizeof text, "%s of %zu bytes, peer %s, device %s, path class %s: %s%s%s%s", what, bytes,
		 flow.peer[0] ? flow.peer : "unknown", dq_nccl_device_name(comm->device), flow.path_class[0] ? flow.path_class : "unknown",
		 dqplb_strerror(status), dq_nccl_advice(status)[0] ? ": " : "", dq_nccl_advice(status), "");
	if (detail[0] && status != DQPLB_ERR_CLOSED && status != DQPLB_ERR_PEER_GONE)
		snprintf(text + strlen(text), sizeof text - strlen(text), " (%s)", detail);
	tell(cause, text);
	return dq_nccl_result_of(status);
}
