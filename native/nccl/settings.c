/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <sched.h>
#include <stdlib.h>

#include "nccl/net.h"

/* Leaves *out alone when the variable is not set. */
static dq_nccl_result read_number(const char *name, uint64_t least, uint64_t most, const char *unit, uint64_t *out)
{
	const char *text = getenv(name);
	char *end;

	if (!text)
		return DQ_NCCL_SUCCESS;
	errno = 0;
	const unsigned long long value = strtoull(text, &end, 10);
	if (text[0] < '0' || text[0] > '9' || *end || errno || value < least || value > most) {
		DQ_NCCL_WARN("the environment variable %s is '%s', expected a whole number from %llu to %llu (%s): correct it, or unset it "
			     "for the default, %llu", name, text, (unsigned long long)least, (unsigned long long)most, unit,
			     (unsigned long long)*out);
		return DQ_NCCL_INVALID_USAGE;
	}
	*out = value;
	return DQ_NCCL_SUCCESS;
}

dq_nccl_result dq_nccl_settings_read(struct dq_nccl_settings *out)
{
	uint64_t seconds = DQ_NCCL_CONNECT_TIMEOUT_S, lanes = DQ_NCCL_LANES_DEFAULT;
	cpu_set_t cpus;
	dq_nccl_result rc = read_number("DQPLB_NCCL_CONNECT_TIMEOUT_S", 1, DQ_NCCL_CONNECT_TIMEOUT_MAX_S, "seconds", &seconds);

	if (rc == DQ_NCCL_SUCCESS)
		rc = read_number("DQPLB_NCCL_CONTEXTS", 1, DQ_NCCL_LANES_MAX, "attachments of a process to the daemon", &lanes);
	if (rc != DQ_NCCL_SUCCESS)
		return rc;
	out->connect_timeout_ns = seconds * 1000000000u;
	out->lanes = (uint32_t)lanes;
	out->few_cpus = sched_getaffinity(0, sizeof cpus, &cpus) == 0 && (unsigned)CPU_COUNT(&cpus) < DQ_NCCL_CPUS_FEW;
	return rc;
}
