/* SPDX-License-Identifier: Apache-2.0 */
/* The VC between two hosts: messages, puts, closing, canceling, failing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "core/vc_private.h"
#include "prng.h"
#include "vc_pair.h"

/* Two hosts, one pair, ends 0 and 1. The completions are seen late, so that they cross control messages. */
static struct vp *pair(uint64_t seed, uint64_t jitter_ns, uint64_t poll_ns)
{
	struct vp_config c = vp_config_default();
	struct vp *w = vp_new(seed);
	c.link.jitter_ns = jitter_ns;
	c.link.poll_ns = poll_ns;
	c.profile.segment_bytes = 4096;
	c.profile.window_bytes = 128 << 10;
	vp_host(w, 0, 0);
	vp_host(w, 0, 0);
	vp_pair(w, 0, 1, &c);
	return w;
}

static void end(struct vp *w)
{
	vp_settle(w);
	vp_close_all(w);
	vp_check_clean(w);
	vp_free(w);
}

static void test_any_size(void **state)
{
	static const uint64_t sizes[] = { 0, 1, 7, 8, 127, 128, 129, 4095, 4096, 4097, 65536, 100001, 1 << 20, (8 << 20) - 1, 8 << 20 };
	(void)state;
	for (unsigned late = 0; late < 3; late++) {
		struct vp *w = pair(late, late * 50000, late * 70000);
		uint32_t b, a = vp_connect(w, 0, 1, 2, &b);
		for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
			uint32_t s, r;
			if (i & 1)
				r = vp_recv(w, 1, b, i, sizes[i] + (i % 3) * 1000), s = vp_send(w, 0, a, i, sizes[i]);
			else
				s = vp_send(w, 0, a, i, sizes[i]), r = vp_recv(w, 1, b, i, sizes[i] + (i % 3) * 1000);
			vp_settle(w);
			assert_int_equal(vp_done(w, s)->status, DQ_OK);
			assert_int_equal(vp_done(w, r)->status, DQ_OK);
			assert_int_equal(vp_done(w, r)->done_bytes, sizes[i]);
		}
		end(w);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_any_size),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
