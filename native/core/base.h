/* SPDX-License-Identifier: Apache-2.0 */
/* Small definitions that every part of the data plane shares: limits, status codes, error text. No state. */
#ifndef DQ_CORE_BASE_H
#define DQ_CORE_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define DQ_NONE UINT32_MAX         /* "no index" in every index-based structure */
#define DQ_NEVER UINT64_MAX        /* "no deadline", ns */
#define DQ_ALIGN_BYTES 128u        /* every segment boundary is a multiple of this from the start of its message */
#define DQ_MAX_QPS 128u            /* data QPs of a VC */
#define DQ_MAX_SEGMENTS 32768u     /* segments of a message: 15-bit index */
#define DQ_SLOT_PUT_BASE 0x8000u   /* slots below are named by the receiver, from here on by the sender */
#define DQ_MAX_SEGMENT_BYTES (16u << 20)
#define DQ_MIN_SEGMENT_BYTES 128u
#define DQ_CONTROL_BYTES 4096u     /* largest control packet */
#define DQ_HOST_ID_MAX 64u         /* with the terminating NUL */

#define DQ_LIKELY(x) __builtin_expect(!!(x), 1)
#define DQ_UNLIKELY(x) __builtin_expect(!!(x), 0)
#define DQ_MIN(a, b) ((a) < (b) ? (a) : (b))
#define DQ_MAX(a, b) ((a) > (b) ? (a) : (b))

/* cffi: begin */
/* Why an operation of a client, a message or a flow ended. The shim's public codes (dqplb.h) have the same numbers. */
enum dq_status {
	DQ_OK = 0,
	DQ_ERR_AGAIN = -1,         /* no room now: call again */
	DQ_ERR_INVALID = -2,       /* an argument is wrong */
	DQ_ERR_NOMEM = -3,         /* memory or quota is used up */
	DQ_ERR_CLOSED = -4,        /* the flow was closed by the other end in the regular way */
	DQ_ERR_CANCELED = -5,      /* canceled by this client: memory freed, flow closed */
	DQ_ERR_PEER_GONE = -6,     /* the other client died */
	DQ_ERR_UNREACHABLE = -7,   /* the peer's daemon cannot be reached, or its VC failed */
	DQ_ERR_REFUSED = -8,       /* nobody listens there (any more) */
	DQ_ERR_TIMEOUT = -9,       /* deadline passed */
	DQ_ERR_TOO_LONG = -10,     /* the message is longer than the receive that matches it */
	DQ_ERR_REGION = -11,       /* region unknown, withdrawn, or offset and length outside of it */
	DQ_ERR_STALE = -12,        /* the handle is of an earlier life of that daemon: its epoch changed */
	DQ_ERR_DAEMON = -13,       /* the local daemon is gone */
	DQ_ERR_VERSION = -14,      /* versions do not match */
	DQ_ERR_PERMISSION = -15,   /* access rights or policy forbid it */
	DQ_ERR_DEVICE = -16,       /* the local device failed */
	DQ_ERR_LIMIT = -17,        /* a configured limit (flows, slots, clients) is reached */
	DQ_ERR_FORKED = -18,       /* context of a parent process */
	DQ_ERR_INTERNAL = -19      /* an invariant of the daemon broke; please report */
};
/* cffi: end */

/* An error with its text: what, which value, what was expected, what to do. Filled by slow-path functions only. */
struct dq_error {
	int code;          /* negative errno */
	char text[252];
};

static inline int dq_error_set(struct dq_error *err, int code, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
static inline int dq_error_set(struct dq_error *err, int code, const char *fmt, ...)
{
	if (err) {
		va_list ap;
		err->code = code;
		va_start(ap, fmt);
		vsnprintf(err->text, sizeof err->text, fmt, ap);
		va_end(ap);
	}
	return code;
}

#endif
