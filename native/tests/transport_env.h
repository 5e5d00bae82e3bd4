/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which provider a test of transports runs over, and between which two devices: told by the environment.
 *
 *   DQ_TEST_PROVIDER    "tcp" (default), "fault:tcp", "verbs", "fault:verbs"
 *   DQ_TEST_ADDRESS_A   device of the first end: an address for tcp (default 127.0.0.1), the name of an RDMA device for verbs
 *   DQ_TEST_ADDRESS_B   of the second end
 *   DQ_TEST_REQUIRE     1: a device that is not there is a failure, not a reason to skip
 *   DQ_TEST_ONLY        run the tests whose names match this, such as "test_fence*"
 *   DQ_TEST_SEED        seed of tests that draw at random; otherwise another one each time, and printed
 */
#ifndef DQ_TESTS_TRANSPORT_ENV_H
#define DQ_TESTS_TRANSPORT_ENV_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "provider/provider.h"

#define TRANSPORT_SKIPPED 77 /* exit code that Meson shows as a skipped test */

static inline const char *transport_env_or(const char *name, const char *otherwise)
{
	const char *value = getenv(name);
	return value && *value ? value : otherwise;
}

static inline const char *transport_provider(void)
{
	return transport_env_or("DQ_TEST_PROVIDER", "tcp");
}

/* Of end 0 (A) or 1 (B). */
static inline const char *transport_address(int end)
{
	return transport_env_or(end ? "DQ_TEST_ADDRESS_B" : "DQ_TEST_ADDRESS_A", "127.0.0.1");
}

/* The provider at the bottom, also where faults are put on top of it. */
static inline bool transport_is(const char *base)
{
	const char *name = transport_provider();
	return strcmp(strncmp(name, "fault:", 6) == 0 ? name + 6 : name, base) == 0;
}

static inline uint64_t transport_seed(void)
{
	struct timespec ts;
	const char *given = getenv("DQ_TEST_SEED");
	uint64_t seed;

	clock_gettime(CLOCK_REALTIME, &ts);
	seed = given && *given ? strtoull(given, NULL, 0) : (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
	fprintf(stderr, "DQ_TEST_SEED=0x%llx\n", (unsigned long long)seed);
	return seed;
}

/*
 * To be asked by main() first: 0 when both devices can be opened; otherwise the exit code, with the reason on stderr. Only
 * RDMA devices can be missing for a good reason.
 */
static inline int transport_env_check(void)
{
	const char *name = transport_provider(), *required = getenv("DQ_TEST_REQUIRE");
	const struct dq_provider *p = dq_provider_find(name);
	const int missing = transport_is("verbs") && !(required && strcmp(required, "1") == 0) ? TRANSPORT_SKIPPED : 1;

	if (!p) {
		fprintf(stderr, "%s: this build has no provider \"%s\"\n", missing == TRANSPORT_SKIPPED ? "skipped" : "failed", name);
		return missing;
	}
	if (getenv("DQ_TEST_ONLY"))
		cmocka_set_test_filter(getenv("DQ_TEST_ONLY"));
	for (int end = 0; end < 2; end++) {
		struct dq_device_config cfg = {.name = "check"};
		struct dq_device *dev;
		struct dq_error err = {0};

		snprintf(cfg.address, sizeof cfg.address, "%s", transport_address(end));
		if (p->device_open(&cfg, &dev, &err)) {
			fprintf(stderr, "%s: device \"%s\" of provider \"%s\": %s; DQ_TEST_ADDRESS_%c names it\n",
				missing == TRANSPORT_SKIPPED ? "skipped" : "failed", cfg.address, name, err.text, 'A' + end);
			return missing;
		}
		p->device_close(dev);
	}
	return 0;
}

#endif
