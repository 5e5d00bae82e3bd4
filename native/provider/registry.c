/* SPDX-License-Identifier: Apache-2.0 */
/* Which providers this build has. */
#include <string.h>

#include "provider/fault.h"
#include "provider/tcp.h"
#include "provider/verbs_table.h"

static const struct dq_provider *const providers[] = {
	&dq_provider_tcp,
	&dq_provider_verbs,
};

const struct dq_provider *dq_provider_find(const char *name)
{
	if (strncmp(name, "fault:", 6) == 0)
		return dq_fault_find(name + 6);
	for (size_t i = 0; i < sizeof providers / sizeof providers[0]; i++)
		if (strcmp(providers[i]->name, name) == 0)
			return providers[i];
	return NULL;
}
