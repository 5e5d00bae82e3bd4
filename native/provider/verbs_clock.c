/* SPDX-License-Identifier: Apache-2.0 */
#include "provider/verbs_clock.h"

#include <errno.h>

#define MIN_MASK 0xffffffu
#define MAX_KHZ 100000000u
#define NS_PER_MS 1000000

typedef __int128 wide; /* ticks times nanoseconds need more than 64 bits */

int dq_verbs_clock_init(struct dq_verbs_clock *c, uint64_t mask, uint64_t khz)
{
	*c = (struct dq_verbs_clock){.mask = mask, .khz = khz};
	if (mask < MIN_MASK || (mask & (mask + 1)) != 0 || khz == 0 || khz > MAX_KHZ)
		return -EINVAL;
	return 0;
}

uint64_t dq_verbs_clock_ns(struct dq_verbs_clock *c, uint64_t raw, uint64_t now_ns)
{
	const wide turn = (wide)c->mask + 1;

	raw &= c->mask;
	if (!c->begun) {
		c->begun = true;
		c->raw = raw;
		c->read_ns = c->begin_ns = now_ns;
	}
	wide step = (raw - c->raw) & c->mask;
	if (step >= turn / 2)
		step -= turn; /* behind the newest */
	const wide passed = now_ns > c->read_ns ? (wide)(now_ns - c->read_ns) * (wide)c->khz / NS_PER_MS : 0;
	if (passed - step > turn / 2)
		step += (passed - step + turn / 2) / turn * turn;
	const wide ticks = c->ticks + step;
	if (step > 0) {
		c->raw = raw;
		c->ticks = (int64_t)ticks;
		c->read_ns = now_ns;
	}
	/* Rounded down on both sides of 0, so that differences do not depend on where it lies. */
	wide ns = ticks * NS_PER_MS / (wide)c->khz;
	if (ns * (wide)c->khz > ticks * NS_PER_MS)
		ns--;
	return c->begin_ns + (uint64_t)ns;
}
