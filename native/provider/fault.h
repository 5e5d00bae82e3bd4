/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A provider that wraps another and breaks things on a script: dq_provider_find("fault:tcp") is tcp with faults. Everything
 * that no rule names goes through unchanged, over the real transport; a QP that is made to fail really hangs up, so that its
 * peer sees it too. For tests; the same threads and rules as provider.h.
 *
 * A script is a list of rules, separated by ';'. Words of a rule are separated by blanks. Numbers are decimal, times have a
 * unit (ns, us, ms, s). A rule with device=NAME is for the device of that name only.
 *
 *   delay TIME [op=OP] [nth=N] [count=K]   completions come TIME later; nothing overtakes them. Their time_ns stays true
 *   lose op=OP [nth=N] [count=K]           completions are dropped
 *   fail-qp qp=N [after=M]                 the N-th QP created on the device (from 0) fails when M writes and sends were
 *                                          posted on it (default 0: as soon as it is connected)
 *   port-down [after=M]                    when M writes and sends were posted on the device (default 0: now) all QPs fail, no
 *                                          new ones connect, no datagram leaves or comes in, dq_device_attr.up is false
 *   port-up                                ends port-down; QPs that failed stay failed
 *   refuse-registration [nth=N] [count=K]  mem_register fails with -ENOMEM
 *
 * OP is write, send, recv, segment or any (default). nth (default 1) is the first occurrence that counts, from the time the
 * script is given; count (default: without end for delay, 1 for the others) how many from there on. Failed and flushed
 * completions, and DQ_WC_CONNECTED, are never delayed or lost.
 *
 * The environment variable DQPLBD_FAULT holds a script that every device begins with.
 */
#ifndef DQ_PROVIDER_FAULT_H
#define DQ_PROVIDER_FAULT_H

#include "provider/provider.h"

#define DQ_FAULT_RULES 32u /* of one device at a time */

/* The wrapped provider of that name ("tcp"), or NULL. dq_provider_find calls it for names that begin with "fault:". */
const struct dq_provider *dq_fault_find(const char *base);

/* Replace the rules of a device of a "fault:" provider; NULL or "" = none. On -EINVAL the old rules stay and err names the word. */
int dq_fault_script(struct dq_device *dev, const char *script, struct dq_error *err);

struct dq_fault_stats {
	uint64_t delayed, lost, failed_qps, refused;
};
void dq_fault_stats(const struct dq_device *dev, struct dq_fault_stats *out);

#endif
