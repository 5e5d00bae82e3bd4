/* SPDX-License-Identifier: Apache-2.0 */
/* Lines in the library's log. Before init() gave a logger there is none, and nothing is written anywhere else. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "nccl/net.h"

#define CAUSES 64u /* remembered; more than so many different causes are told each time */

static _Atomic(dq_nccl_logger) log_to;
static pthread_mutex_t causes_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t causes[CAUSES];
static unsigned cause_count;

void dq_nccl_log_to(dq_nccl_logger logger)
{
	if (logger)
		atomic_store(&log_to, logger);
}

void dq_nccl_log(int level, const char *file, int line, const char *format, ...)
{
	dq_nccl_logger logger = atomic_load(&log_to);
	const char *name = strrchr(file, '/');
	char text[1024];
	va_list ap;

	if (!logger)
		return;
	va_start(ap, format);
	vsnprintf(text, sizeof text, format, ap);
	va_end(ap);
	logger(level, level == DQ_NCCL_LOG_WARN ? DQ_NCCL_LOG_ALL : DQ_NCCL_LOG_INIT | DQ_NCCL_LOG_NET, name ? name + 1 : file, line,
	       "NET/dqplb : %s", text);
}

/* FNV-1a, 64 bits: http://www.isthe.com/chongo/tech/comp/fnv/ */
static uint64_t hash(const char *text)
{
	uint64_t h = 0xcbf29ce484222325u;

	for (; *text; text++)
		h = (h ^ (unsigned char)*text) * 0x100000001b3u;
	return h;
}

bool dq_nccl_log_first(const char *cause)
{
	const uint64_t h = hash(cause);
	bool first = true;

	pthread_mutex_lock(&causes_lock);
	for (unsigned i = 0; i < cause_count && first; i++)
		first = causes[i] != h;
	if (first && cause_count < CAUSES)
		causes[cause_count++] = h;
	pthread_mutex_unlock(&causes_lock);
	return first;
}

void dq_nccl_log_reset(void)
{
	pthread_mutex_lock(&causes_lock);
	cause_count = 0;
	pthread_mutex_unlock(&causes_lock);
}
