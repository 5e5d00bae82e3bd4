/* SPDX-License-Identifier: Apache-2.0 */
/* Status names, their texts, and the text of the last failed call of each thread. */
#include "shim/shim.h"

static _Thread_local char last_error[512];

static const struct {
	const char *name, *text;
} statuses[] = {
	[-DQPLB_OK] = {"DQPLB_OK", "success"},
	[-DQPLB_ERR_AGAIN] = {"DQPLB_ERR_AGAIN", "no room now: test or wait for something, then call again"},
	[-DQPLB_ERR_INVALID] = {"DQPLB_ERR_INVALID", "an argument is wrong"},
	[-DQPLB_ERR_NOMEM] = {"DQPLB_ERR_NOMEM", "memory or this client's quota is used up"},
	[-DQPLB_ERR_CLOSED] = {"DQPLB_ERR_CLOSED", "the flow was closed by the other end"},
	[-DQPLB_ERR_CANCELED] = {"DQPLB_ERR_CANCELED", "canceled here: the flow was closed or the memory freed"},
	[-DQPLB_ERR_PEER_GONE] = {"DQPLB_ERR_PEER_GONE", "the client at the other end died"},
	[-DQPLB_ERR_UNREACHABLE] = {"DQPLB_ERR_UNREACHABLE", "the peer's daemon cannot be reached, or the path failed"},
	[-DQPLB_ERR_REFUSED] = {"DQPLB_ERR_REFUSED", "nobody listens there (any more)"},
	[-DQPLB_ERR_TIMEOUT] = {"DQPLB_ERR_TIMEOUT", "deadline passed"},
	[-DQPLB_ERR_TOO_LONG] = {"DQPLB_ERR_TOO_LONG", "the message is longer than the receive that matches it"},
	[-DQPLB_ERR_REGION] = {"DQPLB_ERR_REGION", "region unknown or withdrawn, or offset and length outside of it"},
	[-DQPLB_ERR_STALE] = {"DQPLB_ERR_STALE", "the handle is of an earlier life of that daemon: get a new one"},
	[-DQPLB_ERR_DAEMON] = {"DQPLB_ERR_DAEMON", "the local daemon is not running, or gone: open a new context"},
	[-DQPLB_ERR_VERSION] = {"DQPLB_ERR_VERSION", "versions do not match"},
	[-DQPLB_ERR_PERMISSION] = {"DQPLB_ERR_PERMISSION", "access rights or policy forbid it"},
	[-DQPLB_ERR_DEVICE] = {"DQPLB_ERR_DEVICE", "the local device failed"},
	[-DQPLB_ERR_LIMIT] = {"DQPLB_ERR_LIMIT", "a configured limit (flows, slots, clients) is reached"},
	[-DQPLB_ERR_FORKED] = {"DQPLB_ERR_FORKED", "the context belongs to the parent process: open one in this process"},
	[-DQPLB_ERR_INTERNAL] = {"DQPLB_ERR_INTERNAL", "the daemon broke an invariant of its own: please report"},
};

static bool known(int status)
{
	return status <= 0 && status > -(int)(sizeof statuses / sizeof statuses[0]);
}

const char *dqplb_strerror(int status)
{
	return known(status) ? statuses[-status].text : "not a status of this library";
}

const char *dq_shim_status_name(int status)
{
	return known(status) ? statuses[-status].name : "unknown status";
}

const char *dqplb_last_error(void)
{
	return last_error;
}

uint32_t dqplb_version(void)
{
	return DQPLB_API_VERSION;
}

int dq_shim_fail(int status, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(last_error, sizeof last_error, fmt, ap);
	va_end(ap);
	return status;
}
