/* SPDX-License-Identifier: Apache-2.0 */
/* The shim against a peer of its own protocol: real socket, real memfds, a thread that plays the engine. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include <dqplb.h>

#include <grp.h>
#include <sys/wait.h>

#include "shim/shim.h" /* for its time-outs only */
#include "shim_peer.h"

#define ok(call) ok_at((call), #call, __LINE__)

static void ok_at(int status, const char *call, int line)
{
	if (status != DQPLB_OK)
		fail_msg("line %d: %s: %s (%s)", line, call, dqplb_last_error(), dqplb_strerror(status));
}

static void text_has(const char *word)
{
	if (!strstr(dqplb_last_error(), word))
		fail_msg("last error is '%s', expected '%s' in it", dqplb_last_error(), word);
}

static struct peer *peer;

static dqplb_context *open_with(uint32_t ring_entries, uint32_t spin_us)
{
	dqplb_options o = {.size = sizeof o, .socket = peer->path, .ring_entries = ring_entries, .spin_us = spin_us};
	dqplb_context *ctx = NULL;

	ok(dqplb_open(&o, &ctx));
	return ctx;
}

static int setup(void **state)
{
	(void)state;
	peer = peer_start();
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	peer_stop(peer);
	peer = NULL;
	return 0;
}

static dqplb_result wait_for(dqplb_request *request)
{
	dqplb_result result;

	ok(dqplb_wait(request, 20000, &result));
	return result;
}

static void connect_pair(dqplb_context *a, dqplb_context *b, dqplb_flow **fa, dqplb_flow **fb)
{
	dqplb_request *connecting, *accepting;
	dqplb_listener *listener;
	dqplb_handle handle;
	dqplb_result r;

	ok(dqplb_listen(b, 1, &handle, &listener));
	ok(dqplb_connect(a, 0, &handle, &connecting));
	ok(dqplb_accept(listener, &accepting));
	r = wait_for(connecting);
	assert_int_equal(r.status, DQPLB_OK);
	*fa = r.flow;
	r = wait_for(accepting);
	assert_int_equal(r.status, DQPLB_OK);
	*fb = r.flow;
	assert_non_null(*fa);
	assert_non_null(*fb);
	ok(dqplb_listener_close(listener));
}

static void fill(void *p, size_t bytes, uint32_t seed)
{
	uint8_t *b = p;

	for (size_t i = 0; i < bytes; i++)
		b[i] = (uint8_t)((seed = seed * 1664525u + 1013904223u) >> 24);
}

static void check(const void *p, size_t bytes, uint32_t seed)
{
	const uint8_t *b = p;

	for (size_t i = 0; i < bytes; i++) {
		uint8_t expected = (uint8_t)((seed = seed * 1664525u + 1013904223u) >> 24);
		if (b[i] != expected)
			fail_msg("byte %zu of %zu is 0x%02x, expected 0x%02x", i, bytes, b[i], expected);
	}
}

/* Repeat an operation that answers "no room now". */
#define retry(ctx, status, call)                                                                                                  \
	while (((status) = (call)) == DQPLB_ERR_AGAIN)                                                                            \
	dqplb_wait_any((ctx), 1)

/* --- opening ---------------------------------------------------------------------------------------------------- */

static void test_open_says_what_is_wrong(void **state)
{
	dqplb_options o = {.size = sizeof o, .socket = "/tmp/no-such-folder/client.sock"};
	dqplb_context *ctx = (dqplb_context *)(uintptr_t)1;
	char longer[200];

	(void)state;
	assert_int_equal(dqplb_open(&o, &ctx), DQPLB_ERR_DAEMON);
	assert_null(ctx);
	text_has("/tmp/no-such-folder/client.sock");
	text_has("systemctl start dqplbd");
	o.socket = "client.sock";
	assert_int_equal(dqplb_open(&o, &ctx), DQPLB_ERR_INVALID);
	text_has("absolute");
	memset(longer, 'x', sizeof longer - 1);
	longer[0] = '/';
	longer[sizeof longer - 1] = 0;
	o.socket = longer;
	assert_int_equal(dqplb_open(&o, &ctx), DQPLB_ERR_INVALID);
	text_has("107");
	o.socket = "/dev/null";
	assert_int_equal(dqplb_open(&o, &ctx), DQPLB_ERR_DAEMON);

	o.socket = peer->path;
	o.ring_entries = 100;
	assert_int_equal(dqplb_open(&o, &ctx), DQPLB_ERR_INVALID);
	text_has("power of two");
	o.ring_entries = 0;
	o.spin_us = 2000000;
	assert_int_equal(dqplb_open(&o, &ctx), DQPLB_ERR_INVALID);
	text_has("spin_us");
	o.spin_us = 0;
	o.size = 4;
	assert_int_equal(dqplb_open(&o, &ctx), DQPLB_ERR_INVALID);
	text_has("options.size");
	assert_int_equal(dqplb_open(&o, NULL), DQPLB_ERR_INVALID);
}

static void test_options_of_a_later_header(void **state)
{
	struct {
		dqplb_options o;
		uint64_t later;
	} big = {.o = {.size = sizeof big, .socket = peer->path}};
	dqplb_context *ctx;

	(void)state;
	ok(dqplb_open(&big.o, &ctx));
	dqplb_close(ctx);
	big.later = 1;
	assert_int_equal(dqplb_open(&big.o, &ctx), DQPLB_ERR_VERSION);
	text_has("API version");
}

static void test_environment_names_the_socket(void **state)
{
	dqplb_context *ctx;

	(void)state;
	setenv("DQPLB_SOCKET", "relative/path", 1);
	assert_int_equal(dqplb_open(NULL, &ctx), DQPLB_ERR_INVALID);
	text_has("DQPLB_SOCKET");
	setenv("DQPLB_SOCKET", peer->path, 1);
	ok(dqplb_open(NULL, &ctx));
	unsetenv("DQPLB_SOCKET");
	dqplb_close(ctx);
}

static void test_refused_version_names_both(void **state)
{
	dqplb_options o = {.size = sizeof o, .socket = peer->path};
	dqplb_context *ctx;

	(void)state;
	peer->refuse_version = true;
	assert_int_equal(dqplb_open(&o, &ctx), DQPLB_ERR_VERSION);
	text_has("layout version 1");
	text_has("7 to 9");
}

static void test_no_permission_names_the_group(void **state)
{
	int status;
	pid_t child;

	(void)state;
	if (chmod(peer->dir, 0755) != 0 || chmod(peer->path, 0600) != 0)
		fail();
	child = fork();
	if (child == 0) {
		dqplb_options o = {.size = sizeof o, .socket = peer->path};
		dqplb_context *ctx;

		/* The owner of a socket may connect whatever its mode, and so may root: be somebody else. */
		if (getuid() == 0 && (setgroups(0, NULL) != 0 || setgid(65534) != 0 || setuid(65534) != 0))
			_exit(2);
		if (getuid() != 65534 && chmod(peer->path, 0) != 0)
			_exit(3);
		_exit(dqplb_open(&o, &ctx) == DQPLB_ERR_PERMISSION && strstr(dqplb_last_error(), "group") &&
				      strstr(dqplb_last_error(), "mode")
			      ? 0
			      : 1);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), 0);
}

static void test_devices(void **state)
{
	dqplb_context *ctx = open_with(0, 0);
	dqplb_device d;

	(void)state;
	assert_int_equal(dqplb_device_count(ctx), 2);
	ok(dqplb_device_query(ctx, 0, &d));
	assert_string_equal(d.name, "peer0");
	assert_string_equal(d.provider, "tcp");
	assert_int_equal(d.speed_bps, 10000000000u);
	assert_int_equal(d.latency_ns, 1234);
	assert_int_equal(d.rail, 3);
	assert_int_equal(d.numa_node, -1);
	assert_int_equal(d.up, 1);
	assert_int_equal(d.port, 2);
	assert_int_equal(d.max_flows, PEER_FLOWS);
	assert_int_equal(dqplb_device_query(ctx, 2, &d), DQPLB_ERR_INVALID);
	text_has("0 to 1");
	assert_int_equal(dqplb_device_query(ctx, -1, &d), DQPLB_ERR_INVALID);
	dqplb_close(ctx);
}

/* --- messages --------------------------------------------------------------------------------------------------- */

static void test_messages_match_by_tag(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(64, 50);
	dqplb_request *s1, *s2, *r1, *r2;
	dqplb_mem *ma, *mb;
	dqplb_flow *fa, *fb;
	dqplb_result r;

	(void)state;
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_alloc(a, 100000, &ma));
	ok(dqplb_mem_alloc(b, 100000, &mb));
	assert_int_equal(dqplb_mem_bytes(ma), 100000);
	assert_int_equal((uintptr_t)dqplb_mem_address(ma) % 4096, 0);
	fill(dqplb_mem_address(ma), 100000, 7);

	ok(dqplb_recv(fb, mb, 50000, 50000, 2, &r2));
	ok(dqplb_recv(fb, mb, 0, 50000, 1, &r1));
	ok(dqplb_send(fa, ma, 0, 40000, 1, &s1));
	ok(dqplb_send(fa, ma, 40000, 0, 2, &s2)); /* an empty message is a message */
	r = wait_for(r1);
	assert_int_equal(r.status, DQPLB_OK);
	assert_int_equal(r.bytes, 40000);
	assert_int_equal(r.tag, 1);
	check(dqplb_mem_address(mb), 40000, 7);
	r = wait_for(r2);
	assert_int_equal(r.bytes, 0);
	assert_int_equal(r.tag, 2);
	assert_int_equal(wait_for(s1).bytes, 40000);
	assert_int_equal(wait_for(s2).status, DQPLB_OK);

	/* Longer than the receive: both fail. */
	ok(dqplb_recv(fb, mb, 0, 10, 3, &r1));
	ok(dqplb_send(fa, ma, 0, 11, 3, &s1));
	assert_int_equal(wait_for(r1).status, DQPLB_ERR_TOO_LONG);
	assert_int_equal(wait_for(s1).status, DQPLB_ERR_TOO_LONG);
	text_has("send of 11 bytes");
	dqplb_close(a);
	dqplb_close(b);
}

static void test_arguments_are_checked(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	dqplb_mem *ma, *mb;
	dqplb_flow *fa, *fb;
	dqplb_request *q;
	dqplb_handle h;
	int done;

	(void)state;
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_alloc(a, 4096, &ma));
	ok(dqplb_mem_alloc(b, 4096, &mb));
	assert_int_equal(dqplb_send(fa, ma, 4000, 97, 0, &q), DQPLB_ERR_INVALID);
	text_has("outside of memory of 4096 bytes");
	assert_int_equal(dqplb_recv(fa, ma, SIZE_MAX, 2, 0, &q), DQPLB_ERR_INVALID);
	assert_int_equal(dqplb_send(fa, ma, 2, SIZE_MAX, 0, &q), DQPLB_ERR_INVALID);
	assert_int_equal(dqplb_send(fa, mb, 0, 1, 0, &q), DQPLB_ERR_INVALID);
	text_has("different contexts");
	assert_int_equal(dqplb_send(NULL, ma, 0, 1, 0, &q), DQPLB_ERR_INVALID);
	assert_int_equal(dqplb_send(fa, NULL, 0, 1, 0, &q), DQPLB_ERR_INVALID);
	assert_int_equal(dqplb_send(fa, ma, 0, 1, 0, NULL), DQPLB_ERR_INVALID);
	assert_int_equal(dqplb_export(fa, ma, 0, 0, &q), DQPLB_ERR_INVALID);
	assert_int_equal(dqplb_mem_alloc(a, 0, &ma), DQPLB_ERR_INVALID);
	assert_int_equal(dqplb_mem_register(a, NULL, 5, &ma), DQPLB_ERR_INVALID);
	assert_int_equal(dqplb_mem_register_dmabuf(a, -1, 0, 5, &ma), DQPLB_ERR_INVALID);
	assert_int_equal(dqplb_mem_register_dmabuf(a, 987654, 0, 5, &ma), DQPLB_ERR_INVALID);
	text_has("987654");
	assert_int_equal(dqplb_mem_register_dmabuf(a, STDIN_FILENO, 0, 5, &ma), DQPLB_ERR_DEVICE);
	text_has("no device here can do that");
	memset(&h, 0, sizeof h);
	assert_int_equal(dqplb_connect(a, 0, &h, &q), DQPLB_ERR_INVALID);
	text_has("128 bytes");
	char host[8];
	assert_int_equal(dqplb_handle_host(&h, host, sizeof host), DQPLB_ERR_INVALID);
	assert_int_equal(dqplb_handle_host(&h, host, 0), DQPLB_ERR_INVALID);
	assert_string_equal(host, "");
	struct dq_handle named = {.magic = DQ_HANDLE_MAGIC, .version = DQ_HANDLE_VERSION, .host_id = "h2.rack\n17"};
	memcpy(h.bytes, &named, sizeof named);
	ok(dqplb_handle_host(&h, host, sizeof host));
	assert_string_equal(host, "h2.rack"); /* what can be shown, and what there is room for */
	ok(dqplb_handle_host(&h, host, 3));
	assert_string_equal(host, "h2");
	struct dq_handle other = {.magic = DQ_HANDLE_MAGIC, .version = 9};
	memcpy(h.bytes, &other, sizeof other);
	assert_int_equal(dqplb_connect(a, 0, &h, &q), DQPLB_ERR_VERSION);
	text_has("version 9");
	assert_int_equal(dqplb_connect(a, 2, &h, &q), DQPLB_ERR_VERSION);
	assert_int_equal(dqplb_test(NULL, &done, NULL), DQPLB_ERR_INVALID);
	assert_int_equal(dqplb_wait(NULL, 0, NULL), DQPLB_ERR_INVALID);
	assert_string_equal(dqplb_strerror(DQPLB_ERR_REGION), "region unknown or withdrawn, or offset and length outside of it");
	assert_non_null(dqplb_strerror(12345));
	assert_int_equal(dqplb_version(), DQPLB_API_VERSION);
	dqplb_close(a);
	dqplb_close(b);
	dqplb_close(NULL);
}

static void test_a_request_is_used_once(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	dqplb_request *s, *r, *next;
	dqplb_mem *ma, *mb;
	dqplb_flow *fa, *fb;
	int done;

	(void)state;
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_alloc(a, 64, &ma));
	ok(dqplb_mem_alloc(b, 64, &mb));
	ok(dqplb_send(fa, ma, 0, 64, 0, &s));
	ok(dqplb_recv(fb, mb, 0, 64, 0, &r));
	wait_for(s);
	wait_for(r);
	done = 1;
	assert_int_equal(dqplb_test(s, &done, NULL), DQPLB_ERR_INVALID);
	assert_int_equal(done, 0);
	assert_int_equal(dqplb_wait(s, 0, NULL), DQPLB_ERR_INVALID);
	ok(dqplb_send(fa, ma, 0, 64, 0, &next)); /* takes the same place */
	assert_ptr_not_equal(next, s);
	assert_int_equal(dqplb_wait(s, 0, NULL), DQPLB_ERR_INVALID);
	assert_int_equal(dqplb_wait(next, 0, NULL), DQPLB_ERR_TIMEOUT);
	text_has("send still pending");
	dqplb_close(a);
	dqplb_close(b);
}

static void test_the_ring_bounds_what_is_outstanding(void **state)
{
	dqplb_context *a = open_with(64, 0), *b = open_with(64, 0);
	dqplb_request *requests[64], *more;
	dqplb_mem *ma;
	dqplb_flow *fa, *fb;
	unsigned n = 0;
	int status;

	(void)state;
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_alloc(a, 64, &ma));
	while ((status = dqplb_recv(fa, ma, 0, 64, n, &requests[n])) == DQPLB_OK)
		assert_true(++n < 64);
	assert_int_equal(status, DQPLB_ERR_AGAIN);
	assert_int_equal(n, 48);
	text_has("ring_entries is 64");
	/* Closing still has its place. */
	ok(dqplb_flow_close(fa));
	for (unsigned i = 0; i < n; i++)
		assert_int_equal(wait_for(requests[i]).status, DQPLB_ERR_CANCELED);
	ok(dqplb_recv(fb, NULL, 0, 0, 0, &more) == DQPLB_ERR_INVALID ? DQPLB_OK : DQPLB_ERR_INTERNAL);
	dqplb_close(a);
	dqplb_close(b);
}

static void test_put_and_notify(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	static char foreign[4096];
	dqplb_request *exporting, *notifying, *putting, *taking_back;
	dqplb_mem *ma, *mb, *staged;
	dqplb_flow *fa, *fb;
	uint32_t region;
	dqplb_result r;

	(void)state;
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_alloc(b, 8192, &mb));
	ok(dqplb_mem_alloc(a, 8192, &ma));
	ok(dqplb_mem_register(a, foreign, sizeof foreign, &staged));
	assert_int_equal(dqplb_export(fa, staged, 0, 10, &exporting), DQPLB_ERR_INVALID);
	text_has("dqplb_mem_alloc");
	ok(dqplb_export(fb, mb, 4096, 4096, &exporting));
	r = wait_for(exporting);
	assert_int_equal(r.status, DQPLB_OK);
	region = r.region;
	ok(dqplb_notify(fb, &notifying));
	fill(foreign, sizeof foreign, 3);
	ok(dqplb_put(fa, region, 96, staged, 1000, 2000, 0xabcdef0123456789u, &putting)); /* from staged memory, too */
	assert_int_equal(wait_for(putting).status, DQPLB_OK);
	r = wait_for(notifying);
	assert_int_equal(r.status, DQPLB_OK);
	assert_int_equal(r.bytes, 2000);
	assert_int_equal(r.offset, 96);
	assert_int_equal(r.region, region);
	assert_true(r.cookie == 0xabcdef0123456789u);
	assert_memory_equal((char *)dqplb_mem_address(mb) + 4096 + 96, foreign + 1000, 2000);
	ok(dqplb_put(fa, region, 4000, ma, 0, 97, 0, &putting));
	assert_int_equal(wait_for(putting).status, DQPLB_ERR_REGION);
	ok(dqplb_unexport(fb, region, &taking_back));
	assert_int_equal(wait_for(taking_back).status, DQPLB_OK);
	ok(dqplb_put(fa, region, 0, ma, 0, 1, 0, &putting));
	assert_int_equal(wait_for(putting).status, DQPLB_ERR_REGION);
	dqplb_close(a);
	dqplb_close(b);
}

/* --- staged memory ---------------------------------------------------------------------------------------------- */

static void test_staged_messages(void **state)
{
	static const size_t sizes[] = {0, 1, 7, 4096, 65536, 65537, 1000003};
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	size_t most = 1000003 + 64;
	uint8_t *from = malloc(most), *to = malloc(most);
	dqplb_request *s, *r;
	dqplb_mem *ma, *mb;
	dqplb_flow *fa, *fb;
	dqplb_result result;

	(void)state;
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_register(a, from, most, &ma));
	ok(dqplb_mem_register(b, to, most, &mb));
	assert_ptr_equal(dqplb_mem_address(ma), from);
	for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
		memset(to, 0xee, most);
		fill(from + 3, sizes[i], (uint32_t)i);
		ok(dqplb_recv(fb, mb, 5, sizes[i] + 8, 1, &r)); /* a receive may be larger */
		ok(dqplb_send(fa, ma, 3, sizes[i], 1, &s));
		memset(from, 0, 3); /* the rest belongs to the request; edges do not */
		result = wait_for(r);
		assert_int_equal(result.status, DQPLB_OK);
		assert_int_equal(result.bytes, sizes[i]);
		check(to + 5, sizes[i], (uint32_t)i);
		for (size_t k = 0; k < 5; k++)
			assert_int_equal(to[k], 0xee);
		for (size_t k = sizes[i] + 5; k < sizes[i] + 13; k++)
			assert_int_equal(to[k], 0xee);
		assert_int_equal(wait_for(s).status, DQPLB_OK);
	}
	assert_int_equal(peer->staging_chunks, 2); /* one a context, whatever was sent */
	dqplb_close(a);
	dqplb_close(b);
	free(from);
	free(to);
}

static void test_staging_grows_without_blocking(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	size_t bytes = (64u << 20) + 1;
	uint8_t *from = malloc(bytes);
	dqplb_request *s, *r;
	dqplb_mem *ma, *mb;
	dqplb_flow *fa, *fb;
	int status;

	(void)state;
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_register(a, from, bytes, &ma));
	ok(dqplb_mem_alloc(b, bytes, &mb));
	memset(from, 0x5a, bytes);
	ok(dqplb_recv(fb, mb, 0, bytes, 0, &r));
	peer->hold_staging = true;
	peer_poke(peer);
	/* Larger than a usual chunk; the daemon does not answer: the call returns all the same, any number of times. */
	for (int i = 0; i < 10; i++)
		assert_int_equal(dqplb_send(fa, ma, 0, bytes, 0, &s), DQPLB_ERR_AGAIN);
	text_has("no staging memory");
	/* A small one goes on. */
	ok(dqplb_send(fa, ma, 0, 100, 1, &s));
	peer->hold_staging = false;
	peer_poke(peer);
	/* A call that waits gets its own answer, not the one that was due. */
	dqplb_mem *other;
	ok(dqplb_mem_alloc(a, 12345, &other));
	assert_int_equal(dqplb_mem_bytes(other), 12345);
	ok(dqplb_mem_free(other));
	retry(a, status, dqplb_send(fa, ma, 0, bytes, 0, &s));
	ok(status);
	assert_int_equal(wait_for(s).status, DQPLB_OK);
	assert_int_equal(wait_for(r).bytes, bytes);
	assert_int_equal(((uint8_t *)dqplb_mem_address(mb))[bytes - 1], 0x5a);
	dqplb_close(a);
	dqplb_close(b);
	free(from);
}

static void test_idle_staging_goes_back(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	size_t bytes = (64u << 20) + 1;
	uint8_t *from = malloc(bytes);
	dqplb_request *s, *r;
	dqplb_mem *ma, *mb;
	dqplb_flow *fa, *fb;
	int status;

	(void)state;
	connect_pair(a, b, &fa, &fb);
	a->chunk_idle_ns = 1;
	ok(dqplb_mem_register(a, from, bytes, &ma));
	ok(dqplb_mem_alloc(b, 4096, &mb));
	memset(from, 1, bytes);
	retry(a, status, dqplb_send(fa, ma, 0, bytes, 0, &s)); /* waits for a receive: its chunk is in use */
	ok(status);
	for (int i = 0; i < 20; i++) /* each looks */
		dqplb_wait_any(a, 20);
	assert_int_equal(peer->staging_chunks, 1); /* the first one went, unused */
	ok(dqplb_recv(fb, mb, 0, 4096, 0, &r));
	assert_int_equal(wait_for(s).status, DQPLB_ERR_TOO_LONG);
	wait_for(r);
	for (int i = 0; i < 20; i++)
		dqplb_wait_any(a, 20);
	assert_int_equal(peer->staging_chunks, 1); /* the last one stays */
	ok(dqplb_recv(fb, mb, 0, 4096, 0, &r));
	ok(dqplb_send(fa, ma, 0, 4096, 0, &s));
	assert_int_equal(wait_for(s).status, DQPLB_OK);
	assert_int_equal(wait_for(r).bytes, 4096);
	dqplb_close(a);
	dqplb_close(b);
	free(from);
}

static void test_staging_quota(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	size_t bytes = 80u << 20;
	uint8_t *from = malloc(bytes);
	dqplb_request *s;
	dqplb_mem *ma;
	dqplb_flow *fa, *fb;
	int status;

	(void)state;
	connect_pair(a, b, &fa, &fb);
	peer->quota = 500000;
	assert_int_equal(dqplb_mem_register(a, from, bytes, &ma), DQPLB_ERR_NOMEM);
	text_has("quota of 500000");
	peer->quota = 70u << 20;
	ok(dqplb_mem_register(a, from, bytes, &ma));
	retry(a, status, dqplb_send(fa, ma, 0, bytes, 0, &s));
	assert_int_equal(status, DQPLB_ERR_NOMEM);
	text_has("dqplb_mem_alloc()");
	text_has("quota of 73400320");
	/* What can be had when others are done is not refused for good. */
	ok(dqplb_send(fa, ma, 0, 60u << 20, 0, &s));
	for (int i = 0; i < 100; i++)
		assert_int_equal(dqplb_send(fa, ma, 0, 50u << 20, 0, &s), DQPLB_ERR_AGAIN);
	dqplb_close(a);
	dqplb_close(b);
	free(from);
}

/* Receives that wait may not keep sends from going, nor the other way round; nor one flow another from its first. */
static void test_staging_is_shared(void **state)
{
	const size_t bytes = 4u << 20;
	static const enum { RECEIVES, SENDS } orders[] = {RECEIVES, SENDS};

	(void)state;
	for (unsigned k = 0; k < 2; k++) {
		dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
		uint8_t *memory = malloc(bytes);
		dqplb_request *q, *more;
		dqplb_mem *ma;
		dqplb_flow *fa, *fb, *other, *others;
		unsigned posted = 0;
		int status;

		connect_pair(a, b, &fa, &fb);
		connect_pair(a, b, &other, &others);
		peer->quota = 66u << 20; /* one chunk, and no more */
		ok(dqplb_mem_register(a, memory, bytes, &ma));
#define post(flow, kind, out)                                                                                                    \
	((kind) == RECEIVES ? dqplb_recv(flow, ma, 0, bytes, 1, out) : dqplb_send(flow, ma, 0, bytes, 1, out))
		while ((status = post(fa, orders[k], &q)) == DQPLB_OK)
			posted++;
		assert_int_equal(status, DQPLB_ERR_AGAIN);
		assert_int_equal(posted, 8); /* half of the chunk */
		for (int i = 0; i < 100; i++) /* as much as ever it is asked */
			assert_int_equal(post(fa, orders[k], &q), DQPLB_ERR_AGAIN);
		ok(post(other, orders[k], &q));                                     /* its first */
		assert_int_equal(post(other, orders[k], &q), DQPLB_ERR_AGAIN);      /* its second */
		for (int i = 0; i < 7; i++)
			ok(post(fa, 1 - orders[k], &more)); /* the other direction has the rest */
#undef post
		dqplb_close(a);
		dqplb_close(b);
		free(memory);
		peer->quota = 0;
	}
}

static void test_freed_memory_cancels(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	uint8_t *to = malloc(4096);
	dqplb_request *staged, *shared, *s;
	dqplb_mem *ma, *mb, *mc;
	dqplb_flow *fa, *fb;

	(void)state;
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_alloc(a, 4096, &ma));
	ok(dqplb_mem_register(b, to, 4096, &mb));
	ok(dqplb_mem_alloc(b, 4096, &mc));
	ok(dqplb_recv(fb, mb, 0, 4096, 1, &staged));
	ok(dqplb_recv(fb, mc, 0, 4096, 2, &shared));
	peer_poke(peer);
	ok(dqplb_mem_free(mb));
	free(to); /* a late copy would be found by the address sanitizer */
	ok(dqplb_mem_free(mc));
	assert_int_equal(wait_for(staged).status, DQPLB_ERR_CANCELED);
	assert_int_equal(wait_for(shared).status, DQPLB_ERR_CANCELED);
	/* The daemon still has the staged one: what it says later is dropped. */
	ok(dqplb_send(fa, ma, 0, 4096, 1, &s));
	assert_int_equal(wait_for(s).status, DQPLB_OK);
	assert_int_equal(dqplb_wait_any(b, 0) == DQPLB_ERR_DAEMON, 0);
	dqplb_close(a);
	dqplb_close(b);
}

/* Memory of one context is found by its address, and serves another one. */
static void test_shared_memory(void **state)
{
	dqplb_context *owner = open_with(0, 0), *a = open_with(0, 0), *b = open_with(0, 0);
	uint64_t serial = 0, other = 0;
	dqplb_mem *mo, *second, *ma, *mb;
	dqplb_flow *fa, *fb;
	dqplb_request *s, *r;
	size_t offset = 0;
	uint8_t *p;

	(void)state;
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_alloc(owner, 8192, &mo));
	ok(dqplb_mem_alloc(owner, 4096, &second));
	p = dqplb_mem_address(mo);
	ok(dqplb_mem_find(p, 8192, &serial, &offset));
	assert_int_equal(offset, 0);
	ok(dqplb_mem_find(p + 5000, 10, &other, &offset));
	assert_int_equal(other, serial);
	assert_int_equal(offset, 5000);
	ok(dqplb_mem_find(dqplb_mem_address(second), 1, &other, NULL));
	assert_true(other != serial);
	assert_int_equal(dqplb_mem_find(p + 1, 8192, NULL, NULL), DQPLB_ERR_REGION);
	assert_int_equal(dqplb_mem_find(p - 1, 2, NULL, NULL), DQPLB_ERR_REGION);
	assert_int_equal(dqplb_mem_find(&serial, sizeof serial, NULL, NULL), DQPLB_ERR_REGION);
	text_has("dqplb_mem_alloc()");
	assert_int_equal(dqplb_mem_find(NULL, 0, NULL, NULL), DQPLB_ERR_REGION);
	assert_int_equal(dqplb_mem_share(a, &serial, sizeof serial, &ma), DQPLB_ERR_REGION);

	/* The whole of it, without an address, and no copy is made. */
	ok(dqplb_mem_share(a, p + 5000, 10, &ma));
	assert_null(dqplb_mem_address(ma));
	assert_int_equal(dqplb_mem_bytes(ma), 8192);
	ok(dqplb_mem_alloc(b, 8192, &mb));
	fill(p, 8192, 77);
	ok(dqplb_recv(fb, mb, 0, 8192, 1, &r));
	ok(dqplb_send(fa, ma, 0, 8192, 1, &s));
	assert_int_equal(wait_for(s).status, DQPLB_OK);
	assert_int_equal(wait_for(r).status, DQPLB_OK);
	check(dqplb_mem_address(mb), 8192, 77);
	assert_int_equal(peer->staging_chunks, 0);
	ok(dqplb_mem_free(ma));

	ok(dqplb_mem_free(second));
	assert_int_equal(dqplb_mem_find(p, 1, &other, NULL), DQPLB_OK);
	dqplb_close(owner); /* with mo */
	assert_int_equal(dqplb_mem_find(p, 1, NULL, NULL), DQPLB_ERR_REGION);
	dqplb_close(a);
	dqplb_close(b);
}

/* What is abandoned ends by itself, and nothing of it is left: neither its place nor what it opened. */
static void test_abandoned_requests(void **state)
{
	dqplb_context *a = open_with(64, 0), *b = open_with(0, 0);
	uint8_t *to = malloc(4096);
	dqplb_request *q, *s, *accepting;
	dqplb_listener *listener;
	dqplb_handle handle;
	dqplb_mem *ma, *mb, *staged;
	dqplb_flow *fa, *fb;
	dqplb_result result;
	int done;

	(void)state;
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_alloc(a, 4096, &ma));
	ok(dqplb_mem_alloc(b, 4096, &mb));
	ok(dqplb_mem_register(a, to, 4096, &staged));
	assert_int_equal(dqplb_abandon(NULL), DQPLB_ERR_INVALID);

	/* Many times the places of the ring: each comes back. Half of them staged, and that buffer is not touched any more. */
	memset(to, 0x5a, 4096);
	for (int i = 0; i < 300; i++) {
		ok(dqplb_recv(fa, i % 2 ? staged : ma, 0, 4096, (uint64_t)i, &q));
		ok(dqplb_abandon(q));
		assert_int_equal(dqplb_abandon(q), DQPLB_ERR_INVALID);
		assert_int_equal(dqplb_test(q, &done, NULL), DQPLB_ERR_INVALID);
		ok(dqplb_send(fb, mb, 0, 4096, (uint64_t)i, &s));
		assert_int_equal(wait_for(s).status, DQPLB_OK);
	}
	for (int i = 0; i < 4096; i++)
		assert_int_equal(to[i], 0x5a);

	/* One that is done already. */
	ok(dqplb_recv(fa, staged, 0, 4096, 1, &q));
	ok(dqplb_send(fb, mb, 0, 4096, 1, &s));
	assert_int_equal(wait_for(s).status, DQPLB_OK);
	while (dqplb_wait_any(a, 1000) == DQPLB_ERR_TIMEOUT)
		;
	ok(dqplb_abandon(q));

	/* A connect that succeeds afterwards, and one that has: the other end sees the flow closed. */
	for (int before = 0; before < 2; before++) {
		ok(dqplb_listen(b, 0, &handle, &listener));
		ok(dqplb_connect(a, 0, &handle, &q));
		if (before)
			ok(dqplb_abandon(q));
		ok(dqplb_accept(listener, &accepting));
		result = wait_for(accepting);
		assert_int_equal(result.status, DQPLB_OK);
		if (!before) {
			peer_poke(peer);
			while (dqplb_wait_any(a, 1000) == DQPLB_ERR_TIMEOUT)
				;
			ok(dqplb_abandon(q));
		}
		ok(dqplb_recv(result.flow, mb, 0, 64, 0, &q));
		for (done = 0; !done;) {
			dqplb_wait_any(a, 1); /* its close goes out */
			ok(dqplb_test(q, &done, &result));
		}
		assert_int_equal(result.status, DQPLB_ERR_CLOSED);
		ok(dqplb_listener_close(listener));
	}

	/* And those that nothing ever answers go with the context. */
	ok(dqplb_listen(b, 0, &handle, &listener));
	ok(dqplb_connect(a, 0, &handle, &q));
	ok(dqplb_abandon(q));
	ok(dqplb_recv(fa, staged, 0, 64, 9, &q));
	ok(dqplb_abandon(q));
	ok(dqplb_mem_free(staged));
	free(to);
	dqplb_close(a);
	dqplb_close(b);
}

static void test_questions_and_hints(void **state)
{
	dqplb_context *a = open_with(128, 0), *b = open_with(0, 0);
	dqplb_flow_info flow = {.size = sizeof flow};
	dqplb_info info = {.size = sizeof info};
	struct {
		dqplb_info known;
		uint64_t more;
	} later = {.known.size = sizeof later, .more = 5};
	struct dqplb_info earlier = {.size = offsetof(struct dqplb_info, epoch), .epoch = 7};
	dqplb_mem *shared, *staged;
	dqplb_request *q;
	dqplb_flow *fa, *fb;
	char byte;

	(void)state;
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_query(a, &info));
	assert_string_equal(info.host_id, "peer");
	assert_string_equal(info.socket, peer->path);
	assert_int_equal(info.epoch, PEER_EPOCH);
	assert_int_equal(info.ring_entries, 128);
	/* Programs of earlier and later headers. */
	ok(dqplb_query(a, &later.known));
	assert_string_equal(later.known.host_id, "peer");
	assert_int_equal(later.known.size, sizeof info);
	assert_int_equal(later.more, 0);
	ok(dqplb_query(a, &earlier));
	assert_string_equal(earlier.host_id, "peer");
	assert_int_equal(earlier.epoch, 7);
	info.size = 3;
	assert_int_equal(dqplb_query(a, &info), DQPLB_ERR_INVALID);
	assert_int_equal(dqplb_query(NULL, &info), DQPLB_ERR_INVALID);

	ok(dqplb_flow_query(fa, &flow));
	assert_int_equal(strlen(flow.peer), DQ_OPENED_PEER_BYTES - 1);
	assert_string_equal(flow.path_class, "zone");
	assert_int_equal(flow.device, 1);
	flow.size = 5000;
	assert_int_equal(dqplb_flow_query(fa, &flow), DQPLB_ERR_INVALID);
	assert_int_equal(dqplb_flow_query(NULL, &flow), DQPLB_ERR_INVALID);

	for (uint32_t i = 1; i < 50; i++) {
		int status;

		while ((status = dqplb_hint(a, i, 2 * i)) == DQPLB_ERR_AGAIN)
			sched_yield();
		ok(status);
	}
	while (peer->hint_peers != 49)
		sched_yield();
	assert_int_equal(peer->hint_flows, 98);
	ok(dqplb_mem_alloc(a, 64, &shared)); /* the answers do not get in the way of others */

	/* Only device memory needs it. */
	ok(dqplb_mem_register(a, &byte, 1, &staged));
	assert_int_equal(dqplb_flush(fa, shared, 0, &q), DQPLB_ERR_INVALID);
	text_has("dqplb_mem_register_dmabuf()");
	assert_int_equal(dqplb_flush(fa, staged, 0, &q), DQPLB_ERR_INVALID);
	assert_int_equal(dqplb_flush(fa, NULL, 0, &q), DQPLB_ERR_INVALID);
	assert_int_equal(peer->flushes, 0);
	dqplb_close(a);
	dqplb_close(b);
}

/* --- flows ------------------------------------------------------------------------------------------------------ */

static void test_closing_a_flow(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	dqplb_request *mine, *theirs, *s;
	dqplb_mem *ma, *mb;
	dqplb_flow *fa, *fb;

	(void)state;
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_alloc(a, 64, &ma));
	ok(dqplb_mem_alloc(b, 64, &mb));
	ok(dqplb_recv(fa, ma, 0, 64, 0, &mine));
	ok(dqplb_recv(fb, mb, 0, 64, 0, &theirs));
	ok(dqplb_flow_close(fa));
	assert_int_equal(wait_for(mine).status, DQPLB_ERR_CANCELED);
	assert_int_equal(wait_for(theirs).status, DQPLB_ERR_CLOSED);
	ok(dqplb_send(fb, mb, 0, 1, 0, &s));
	assert_int_equal(wait_for(s).status, DQPLB_ERR_CLOSED);
	dqplb_close(a);
	dqplb_close(b);
}

static void test_closing_the_context_closes_flows_in_the_regular_way(void **state)
{
	dqplb_context *a = open_with(64, 0), *b = open_with(0, 0);
	dqplb_request *theirs[100];
	dqplb_flow *fa[100], *fb[100];
	dqplb_mem *mb;

	(void)state;
	ok(dqplb_mem_alloc(b, 64, &mb));
	for (int i = 0; i < 100; i++) { /* more than the ring of 64 can close at once */
		connect_pair(a, b, &fa[i], &fb[i]);
		ok(dqplb_recv(fb[i], mb, 0, 64, 0, &theirs[i]));
	}
	dqplb_close(a);
	for (int i = 0; i < 100; i++)
		assert_int_equal(wait_for(theirs[i]).status, DQPLB_ERR_CLOSED);
	dqplb_close(b);
}

static void test_closing_many_flows_behind_a_full_ring(void **state)
{
	dqplb_context *a = open_with(64, 0), *b = open_with(0, 0);
	dqplb_flow *fa[64], *fb[64];

	(void)state;
	for (int i = 0; i < 64; i++)
		connect_pair(a, b, &fa[i], &fb[i]);
	assert_int_equal(peer->flows_open, 128);
	peer->hold = true;
	peer_poke(peer);
	for (int i = 0; i < 64; i++)
		ok(dqplb_flow_close(fa[i]));
	peer->hold = false;
	peer_poke(peer);
	while (peer->closes < 64) /* later calls hand over what had no room */
		dqplb_wait_any(a, 1);
	assert_int_equal(peer->flows_open, 64);
	dqplb_close(a);
	dqplb_close(b);
}

static void test_listening(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	dqplb_request *accepting, *connecting;
	dqplb_handle one, two;
	dqplb_listener *l, *m;
	dqplb_result r;
	int status;

	(void)state;
	assert_int_equal(dqplb_listen(b, 7, &one, &l), DQPLB_ERR_INVALID);
	text_has("device 7");
	ok(dqplb_listen(b, 1, &one, &l));
	ok(dqplb_listen(b, 1, &two, &m));
	assert_memory_not_equal(one.bytes, two.bytes, 128);
	const struct dq_handle *h = (const struct dq_handle *)(const void *)one.bytes;
	assert_int_equal(h->rail, 4);
	assert_int_equal(h->epoch, PEER_EPOCH);
	assert_string_equal(h->host_id, "peer");
	ok(dqplb_accept(l, &accepting));
	ok(dqplb_listener_close(l));
	r = wait_for(accepting);
	assert_int_equal(r.status, DQPLB_ERR_CANCELED);
	assert_null(r.flow);
	ok(dqplb_connect(a, 0, &one, &connecting));
	assert_int_equal(wait_for(connecting).status, DQPLB_ERR_REFUSED);
	text_has("connect: nobody listens");
	two.bytes[offsetof(struct dq_handle, nonce)] ^= 1; /* whoever does not know it is refused */
	ok(dqplb_connect(a, 0, &two, &connecting));
	assert_int_equal(wait_for(connecting).status, DQPLB_ERR_REFUSED);
	two.bytes[offsetof(struct dq_handle, epoch)] ^= 1;
	ok(dqplb_connect(a, 0, &two, &connecting));
	assert_int_equal(wait_for(connecting).status, DQPLB_ERR_STALE);
	/* A listener that the daemon refused says so at accept, at once or when the request completes. */
	peer->refuse_listen = DQ_ERR_LIMIT;
	ok(dqplb_listen(b, 0, &one, &l));
	status = dqplb_accept(l, &accepting);
	if (status == DQPLB_OK)
		assert_int_equal(wait_for(accepting).status, DQPLB_ERR_LIMIT);
	else
		assert_int_equal(status, DQPLB_ERR_LIMIT);
	assert_int_equal(dqplb_accept(l, &accepting), DQPLB_ERR_LIMIT);
	text_has("refused to listen on device 0");
	dqplb_close(a);
	dqplb_close(b);
}

/* --- sleeping, dying, garbage ----------------------------------------------------------------------------------- */

struct waiter {
	pthread_t thread;
	dqplb_request *request;
	dqplb_context *ctx; /* for wait_any when there is no request */
	int status;
	dqplb_result result;
};

static void *wait_thread(void *arg)
{
	struct waiter *w = arg;

	w->status = w->request ? dqplb_wait(w->request, -1, &w->result) : dqplb_wait_any(w->ctx, -1);
	return NULL;
}

/* A sleep ends by being woken, or not for a long time. */
static void sleep_long(dqplb_context *ctx)
{
	ctx->slice_ns = 100000000000u;
}

static void wait_until_asleep(int client)
{
	struct dq_control *control = peer_control(peer, client);

	while (!atomic_load(&control->client_waiting))
		sched_yield();
}

static void test_sleeps_and_wakes(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	struct waiter w = {0};
	dqplb_request *s;
	dqplb_mem *ma, *mb;
	dqplb_flow *fa, *fb;

	(void)state;
	sleep_long(a);
	sleep_long(b);
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_alloc(a, 64, &ma));
	ok(dqplb_mem_alloc(b, 64, &mb));
	for (int i = 0; i < 50; i++) {
		uint32_t woken = peer->wakes, events = peer->event_wakes;

		peer->lower_flag = i & 1;
		ok(dqplb_recv(fb, mb, 0, 64, 0, &w.request));
		assert_int_equal(pthread_create(&w.thread, NULL, wait_thread, &w), 0);
		wait_until_asleep(1);
		ok(dqplb_send(fa, ma, 0, 64, 0, &s));
		pthread_join(w.thread, NULL);
		assert_int_equal(w.status, DQPLB_OK);
		assert_int_equal(w.result.bytes, 64);
		assert_int_equal(wait_for(s).status, DQPLB_OK);
		assert_true(peer->wakes > woken);
		(void)events;
	}
	assert_true(peer->event_wakes > 0); /* the engine slept, and was woken */
	dqplb_close(a);
	dqplb_close(b);
}

static void test_all_sleepers_are_woken(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	struct waiter w[6] = {0};
	dqplb_request *s[6];
	dqplb_mem *ma, *mb;
	dqplb_flow *fa, *fb;

	(void)state;
	sleep_long(a);
	sleep_long(b);
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_alloc(a, 64, &ma));
	ok(dqplb_mem_alloc(b, 64, &mb));
	for (int round = 0; round < 20; round++) {
		peer->lower_flag = round & 1; /* also an engine that wakes one thread only */
		for (int i = 0; i < 6; i++) {
			ok(dqplb_recv(fb, mb, 0, 64, (uint64_t)i, &w[i].request));
			assert_int_equal(pthread_create(&w[i].thread, NULL, wait_thread, &w[i]), 0);
		}
		wait_until_asleep(1);
		for (int i = 5; i >= 0; i--)
			ok(dqplb_send(fa, ma, 0, (size_t)i, (uint64_t)i, &s[i]));
		for (int i = 0; i < 6; i++) {
			pthread_join(w[i].thread, NULL);
			assert_int_equal(w[i].status, DQPLB_OK);
			assert_int_equal(w[i].result.tag, i);
			assert_int_equal(w[i].result.bytes, i);
			wait_for(s[i]);
		}
	}
	dqplb_close(a);
	dqplb_close(b);
}

static void test_wait_any(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	dqplb_request *s, *r;
	dqplb_mem *ma, *mb;
	dqplb_flow *fa, *fb;
	int done = 0;

	(void)state;
	sleep_long(a);
	sleep_long(b);
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_alloc(a, 64, &ma));
	ok(dqplb_mem_alloc(b, 64, &mb));
	dqplb_wait_any(b, 0);
	assert_int_equal(dqplb_wait_any(b, 1), DQPLB_ERR_TIMEOUT);
	ok(dqplb_recv(fb, mb, 0, 64, 0, &r));
	ok(dqplb_send(fa, ma, 0, 64, 0, &s));
	ok(dqplb_wait_any(b, -1));
	ok(dqplb_test(r, &done, NULL));
	assert_int_equal(done, 1);
	dqplb_close(a);
	dqplb_close(b);
}

static void test_the_daemon_dies(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	struct waiter w = {0}, any = {.ctx = a};
	dqplb_request *r, *q;
	dqplb_mem *ma, *mb, *staged;
	dqplb_flow *fa, *fb;
	char foreign[100];
	dqplb_result result;
	int done = 0;

	(void)state;
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_alloc(a, 64, &ma));
	ok(dqplb_mem_alloc(b, 64, &mb));
	ok(dqplb_mem_register(b, foreign, sizeof foreign, &staged));
	ok(dqplb_recv(fb, mb, 0, 64, 0, &w.request));
	ok(dqplb_recv(fb, staged, 0, 64, 0, &r));
	dqplb_wait_any(a, 0);
	assert_int_equal(pthread_create(&w.thread, NULL, wait_thread, &w), 0);
	assert_int_equal(pthread_create(&any.thread, NULL, wait_thread, &any), 0);
	wait_until_asleep(0);
	wait_until_asleep(1);
	peer->kill = true;
	peer_poke(peer);
	pthread_join(w.thread, NULL); /* asleep without a limit, and nobody woke it */
	pthread_join(any.thread, NULL);
	assert_int_equal(w.status, DQPLB_ERR_DAEMON);
	assert_int_equal(w.result.status, DQPLB_ERR_DAEMON);
	assert_int_equal(any.status, DQPLB_ERR_DAEMON);
	/* Who only tests learns it, too. */
	while (!done) {
		int status = dqplb_test(r, &done, &result);
		assert_int_equal(status, done ? DQPLB_ERR_DAEMON : DQPLB_OK);
	}
	assert_int_equal(result.status, DQPLB_ERR_DAEMON);
	text_has(peer->path);
	/* And every later call. */
	assert_int_equal(dqplb_send(fb, mb, 0, 1, 0, &q), DQPLB_ERR_DAEMON);
	assert_int_equal(dqplb_flow_close(fb), DQPLB_ERR_DAEMON);
	assert_int_equal(dqplb_mem_alloc(b, 1, &mb), DQPLB_ERR_DAEMON);
	assert_int_equal(dqplb_mem_free(staged), DQPLB_OK); /* nothing of the daemon's */
	assert_int_equal(dqplb_wait_any(b, 0), DQPLB_ERR_DAEMON);
	dqplb_close(a);
	dqplb_close(b);
	peer->kill = false;
}

static void test_sending_without_testing_notices_death(void **state)
{
	dqplb_context *a = open_with(4096, 0), *b = open_with(0, 0);
	dqplb_mem *ma;
	dqplb_flow *fa, *fb;
	dqplb_request *q;
	int status = DQPLB_OK;

	(void)state;
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_alloc(a, 64, &ma));
	peer->kill = true;
	peer_poke(peer);
	while (status == DQPLB_OK || status == DQPLB_ERR_AGAIN)
		status = dqplb_send(fa, ma, 0, 1, 0, &q);
	assert_int_equal(status, DQPLB_ERR_DAEMON);
	dqplb_close(a);
	dqplb_close(b);
}

static void test_cut_off_with_a_reason(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	struct waiter w = {0};
	dqplb_mem *ma;
	dqplb_flow *fa, *fb;
	struct dq_control *control = peer_control(peer, 0);

	(void)state;
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_alloc(a, 64, &ma));
	ok(dqplb_recv(fa, ma, 0, 64, 0, &w.request));
	assert_int_equal(pthread_create(&w.thread, NULL, wait_thread, &w), 0);
	wait_until_asleep(0);
	memset(control->closed_text, 'z', sizeof control->closed_text); /* not even terminated */
	memcpy(control->closed_text, "operation 77 is none", 20);
	atomic_store(&control->closed, 2);
	pthread_join(w.thread, NULL);
	assert_int_equal(w.status, DQPLB_ERR_DAEMON);
	assert_int_equal(dqplb_wait_any(a, 0), DQPLB_ERR_DAEMON);
	text_has("operation 77 is none");
	text_has("DQPLB_ERR_INVALID");
	dqplb_close(a);
	dqplb_close(b);
}

static void test_garbage_completions(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	struct dq_submission last;
	uint8_t foreign[64];
	dqplb_request *r, *s;
	dqplb_mem *ma, *mb, *staged;
	dqplb_flow *fa, *fb;
	dqplb_result result;
	int done = 0;

	(void)state;
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_alloc(a, 64, &ma));
	ok(dqplb_mem_alloc(b, 64, &mb));
	ok(dqplb_mem_register(b, foreign, sizeof foreign, &staged));
	ok(dqplb_recv(fb, mb, 0, 64, 0, &r));
	/* Numbers that name nothing: no place, a wrong generation, a free place. */
	for (uint64_t i = 0; i < 300; i++)
		peer_inject(peer, 1, &(struct dq_completion){.request = i * 0x0101010101010101u});
	peer_inject(peer, 1, &(struct dq_completion){.request = UINT64_MAX});
	ok(dqplb_test(r, &done, NULL));
	assert_int_equal(done, 0);
	ok(dqplb_send(fa, ma, 0, 64, 0, &s));
	assert_int_equal(wait_for(r).status, DQPLB_OK);
	wait_for(s);

	/* More bytes than were asked for must not be copied. */
	memset(foreign, 0x11, sizeof foreign);
	ok(dqplb_recv(fb, staged, 0, 16, 5, &r));
	for (bool found = false; !found; sched_yield()) {
		pthread_mutex_lock(&peer->lock);
		found = peer->clients[1].op_count == 1;
		last = peer->clients[1].ops[0];
		pthread_mutex_unlock(&peer->lock);
	}
	peer_inject(peer, 1, &(struct dq_completion){.request = last.request, .bytes = 17});
	result = wait_for(r);
	assert_int_equal(result.status, DQPLB_ERR_INTERNAL);
	for (size_t i = 0; i < sizeof foreign; i++)
		assert_int_equal(foreign[i], 0x11);
	/* The same once more: it was done already. */
	peer_inject(peer, 1, &(struct dq_completion){.request = last.request, .bytes = 1});
	ok(dqplb_notify(fb, &s));
	assert_int_equal(dqplb_wait(s, 0, NULL), DQPLB_ERR_TIMEOUT);

	/* A status that is none. */
	ok(dqplb_notify(fb, &r));
	for (bool found = false; !found; sched_yield()) {
		pthread_mutex_lock(&peer->lock);
		found = peer->clients[1].op_count == 3;
		last = peer->clients[1].ops[2];
		pthread_mutex_unlock(&peer->lock);
	}
	peer_inject(peer, 1, &(struct dq_completion){.request = last.request, .status = 12345});
	assert_int_equal(wait_for(r).status, DQPLB_ERR_INTERNAL);

	/* An index that cannot be. */
	struct dq_ring_shared *cq = peer->clients[1].cq.shared;
	atomic_fetch_add(&cq->tail, 100000);
	assert_int_equal(dqplb_wait(s, 20000, NULL), DQPLB_ERR_DAEMON);
	text_has("out of range");
	dqplb_close(a);
	dqplb_close(b);
}

static void test_closing_never_hangs(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	dqplb_flow *fa, *fb;

	(void)state;
	connect_pair(a, b, &fa, &fb);
	peer->hold = true;
	peer_poke(peer);
	dqplb_close(a);
	dqplb_close(b);
}

/* --- fork ------------------------------------------------------------------------------------------------------- */

static int child_of_fork(dqplb_context *ctx, dqplb_flow *flow, dqplb_mem *mem, dqplb_request *pending, dqplb_listener *listener)
{
	dqplb_options o = {.size = sizeof o, .socket = peer->path};
	dqplb_request *q;
	dqplb_handle h;
	dqplb_listener *l;
	dqplb_context *own;
	dqplb_device d;
	dqplb_mem *m;
	int done;

	if (dqplb_test(pending, &done, NULL) != DQPLB_ERR_FORKED || dqplb_wait(pending, -1, NULL) != DQPLB_ERR_FORKED ||
	    dqplb_wait_any(ctx, -1) != DQPLB_ERR_FORKED)
		return 1;
	if (dqplb_send(flow, mem, 0, 1, 0, &q) != DQPLB_ERR_FORKED || dqplb_recv(flow, mem, 0, 1, 0, &q) != DQPLB_ERR_FORKED ||
	    dqplb_notify(flow, &q) != DQPLB_ERR_FORKED || dqplb_flow_close(flow) != DQPLB_ERR_FORKED)
		return 2;
	if (dqplb_mem_free(mem) != DQPLB_ERR_FORKED || dqplb_mem_alloc(ctx, 1, &m) != DQPLB_ERR_FORKED ||
	    dqplb_device_query(ctx, 0, &d) != DQPLB_ERR_FORKED || dqplb_device_count(ctx) != DQPLB_ERR_FORKED)
		return 3;
	if (dqplb_listen(ctx, 0, &h, &l) != DQPLB_ERR_FORKED || dqplb_accept(listener, &q) != DQPLB_ERR_FORKED ||
	    dqplb_listener_close(listener) != DQPLB_ERR_FORKED || dqplb_connect(ctx, 0, &h, &q) != DQPLB_ERR_FORKED)
		return 4;
	if (!strstr(dqplb_last_error(), "parent"))
		return 5;
	dqplb_close(ctx);
	if (dqplb_open(&o, &own) != DQPLB_OK)
		return 6;
	if (dqplb_send(flow, mem, 0, 1, 0, &q) != DQPLB_ERR_FORKED) /* still */
		return 7;
	if (dqplb_mem_alloc(own, 4096, &m) != DQPLB_OK)
		return 8;
	dqplb_close(own);
	return 0;
}

static void test_fork(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	dqplb_request *r, *s;
	dqplb_listener *listener;
	dqplb_handle handle;
	dqplb_mem *ma, *mb;
	dqplb_flow *fa, *fb;
	int status, go[2];
	pid_t child;
	char c;

	(void)state;
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_alloc(a, 64, &ma));
	ok(dqplb_mem_alloc(b, 64, &mb));
	ok(dqplb_recv(fb, mb, 0, 64, 0, &r));
	ok(dqplb_listen(b, 0, &handle, &listener));
	child = fork();
	if (child == 0)
		_exit(child_of_fork(b, fb, mb, r, listener));
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), 0);
	/* The parent goes on. */
	ok(dqplb_send(fa, ma, 0, 64, 0, &s));
	assert_int_equal(wait_for(r).bytes, 64);
	wait_for(s);

	/* A child that lives on does not keep its parent's context alive in the daemon's eyes. */
	if (pipe(go) != 0)
		fail();
	child = fork();
	if (child == 0) {
		close(go[1]);
		_exit(read(go[0], &c, 1) == 0 ? 0 : 1);
	}
	close(go[0]);
	uint32_t gone = peer->gone;
	dqplb_close(b);
	while (peer->gone == gone)
		sched_yield();
	close(go[1]);
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(WEXITSTATUS(status), 0);
	dqplb_close(a);
}

/* --- threads ---------------------------------------------------------------------------------------------------- */

#define THREADS 4
#define ROUNDS 60

struct worker {
	pthread_t thread;
	dqplb_context *a, *b;
	dqplb_flow *fa, *fb;
	uint32_t seed;
	int errors;
};

/* Each thread has a flow of its own; all share both contexts. Sizes straddle the bound of copying without the lock. */
#define note(w, what) ((w)->errors++, fprintf(stderr, "%s: %s\n", what, dqplb_last_error()))
static void *worker(void *arg)
{
	struct worker *w = arg;
	size_t most = 200000;
	uint8_t *from = malloc(most), *to = malloc(most);
	dqplb_mem *sm, *rm, *sa, *ra;
	uint32_t x = w->seed;

	if (dqplb_mem_register(w->a, from, most, &sm) || dqplb_mem_register(w->b, to, most, &rm) ||
	    dqplb_mem_alloc(w->a, most, &sa) || dqplb_mem_alloc(w->b, most, &ra)) {
		note(w, "memory");
		return NULL;
	}
	for (int i = 0; i < ROUNDS && !w->errors; i++) {
		size_t bytes = (x = x * 1664525u + 1013904223u) % most;
		bool out = x >> 30 & 1, in = x >> 31;
		uint8_t *source = out ? dqplb_mem_address(sa) : from, *target = in ? dqplb_mem_address(ra) : to;
		dqplb_request *r, *s;
		dqplb_result result;
		int status, done = 0;

		memset(source, (int)(x >> 16), bytes);
		retry(w->b, status, dqplb_recv(w->fb, in ? ra : rm, 0, most, (uint64_t)i, &r));
		if (status != DQPLB_OK)
			note(w, "recv");
		retry(w->a, status, dqplb_send(w->fa, out ? sa : sm, 0, bytes, (uint64_t)i, &s));
		if (status != DQPLB_OK)
			note(w, "send");
		if (w->errors)
			break;
		if (x >> 29 & 1) {
			if (dqplb_wait(r, -1, &result) != DQPLB_OK)
				note(w, "wait");
		} else {
			while (!done && !w->errors) {
				if (dqplb_test(r, &done, &result) != DQPLB_OK)
					note(w, "test");
				sched_yield();
			}
		}
		if (result.status != DQPLB_OK || result.bytes != bytes)
			note(w, "result");
		for (size_t k = 0; k < bytes; k++)
			if (target[k] != (uint8_t)(x >> 16)) {
				note(w, "data");
				break;
			}
		if (dqplb_wait(s, -1, NULL) != DQPLB_OK)
			note(w, "wait for the send");
	}
	if (dqplb_mem_free(sm) || dqplb_mem_free(rm) || dqplb_mem_free(sa) || dqplb_mem_free(ra))
		note(w, "mem_free");
	free(from);
	free(to);
	return NULL;
}

static void test_many_threads(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	struct worker w[THREADS] = {0};

	(void)state;
	sleep_long(a);
	sleep_long(b);
	peer->lower_flag = true;
	for (int i = 0; i < THREADS; i++) {
		w[i].a = a;
		w[i].b = b;
		w[i].seed = (uint32_t)i + 1;
		connect_pair(a, b, &w[i].fa, &w[i].fb);
	}
	for (int i = 0; i < THREADS; i++)
		assert_int_equal(pthread_create(&w[i].thread, NULL, worker, &w[i]), 0);
	for (int i = 0; i < THREADS; i++) {
		pthread_join(w[i].thread, NULL);
		assert_int_equal(w[i].errors, 0);
	}
	assert_int_equal(peer->staging_chunks, 2); /* all registered at once, and shared one a context */
	dqplb_close(a);
	dqplb_close(b);
	while (peer->gone < 2)
		sched_yield();
	assert_int_equal(peer->mems, 0);
}

struct collector {
	pthread_t thread;
	dqplb_context *ctx;
	_Atomic bool stop;
};

/* Takes completions, and copies, for everybody else. */
static void *collect_thread(void *arg)
{
	struct collector *c = arg;

	while (!c->stop)
		dqplb_wait_any(c->ctx, 5);
	return NULL;
}

static void test_freeing_races_with_arrival(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	struct collector collector = {.ctx = b};
	size_t bytes = 3000000; /* copied without the lock, and for long enough */
	unsigned canceled = 0, whole = 0;
	dqplb_request *s, *r;
	dqplb_mem *ma, *mb;
	dqplb_flow *fa, *fb;

	(void)state;
	sleep_long(a);
	sleep_long(b);
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_alloc(a, bytes, &ma));
	assert_int_equal(pthread_create(&collector.thread, NULL, collect_thread, &collector), 0);
	for (int i = 0; i < 60; i++) {
		uint8_t *to = malloc(bytes);
		dqplb_result result;

		ok(dqplb_mem_register(b, to, bytes, &mb));
		ok(dqplb_recv(fb, mb, 0, bytes, (uint64_t)i, &r));
		ok(dqplb_send(fa, ma, 0, bytes, (uint64_t)i, &s));
		for (int k = 0; k < i % 8 * 10; k++)
			sched_yield();
		ok(dqplb_mem_free(mb));
		free(to); /* from here on nobody may write there: the address sanitizer watches */
		result = wait_for(r);
		if (result.status == DQPLB_OK) {
			whole++;
		} else {
			assert_int_equal(result.status, DQPLB_ERR_CANCELED);
			canceled++;
		}
		assert_int_equal(wait_for(s).status, DQPLB_OK);
	}
	assert_int_equal(whole + canceled, 60);
	collector.stop = true;
	pthread_join(collector.thread, NULL);
	dqplb_close(a);
	dqplb_close(b);
}

/* Abandoned while another thread may be copying: the buffer may be freed afterwards. */
static void test_abandoning_races_with_arrival(void **state)
{
	dqplb_context *a = open_with(0, 0), *b = open_with(0, 0);
	struct collector collector = {.ctx = b};
	size_t bytes = 3000000;
	dqplb_request *s, *r;
	dqplb_mem *ma, *mb;
	dqplb_flow *fa, *fb;

	(void)state;
	sleep_long(a);
	sleep_long(b);
	connect_pair(a, b, &fa, &fb);
	ok(dqplb_mem_alloc(a, bytes, &ma));
	assert_int_equal(pthread_create(&collector.thread, NULL, collect_thread, &collector), 0);
	for (int i = 0; i < 40; i++) {
		uint8_t *to = malloc(bytes);

		ok(dqplb_mem_register(b, to, bytes, &mb));
		ok(dqplb_recv(fb, mb, 0, bytes, (uint64_t)i, &r));
		ok(dqplb_send(fa, ma, 0, bytes, (uint64_t)i, &s));
		for (int k = 0; k < i % 8 * 10; k++)
			sched_yield();
		ok(dqplb_abandon(r));
		ok(dqplb_mem_free(mb));
		free(to);
		assert_int_equal(wait_for(s).status, DQPLB_OK);
	}
	collector.stop = true;
	pthread_join(collector.thread, NULL);
	dqplb_close(a);
	dqplb_close(b);
}

int main(void)
{
#define with_peer(test) cmocka_unit_test_setup_teardown(test, setup, teardown)
	const struct CMUnitTest tests[] = {
		with_peer(test_open_says_what_is_wrong),
		with_peer(test_options_of_a_later_header),
		with_peer(test_environment_names_the_socket),
		with_peer(test_refused_version_names_both),
		with_peer(test_no_permission_names_the_group),
		with_peer(test_devices),
		with_peer(test_messages_match_by_tag),
		with_peer(test_arguments_are_checked),
		with_peer(test_a_request_is_used_once),
		with_peer(test_the_ring_bounds_what_is_outstanding),
		with_peer(test_put_and_notify),
		with_peer(test_staged_messages),
		with_peer(test_staging_grows_without_blocking),
		with_peer(test_idle_staging_goes_back),
		with_peer(test_staging_quota),
		with_peer(test_staging_is_shared),
		with_peer(test_freed_memory_cancels),
		with_peer(test_shared_memory),
		with_peer(test_abandoned_requests),
		with_peer(test_questions_and_hints),
		with_peer(test_closing_a_flow),
		with_peer(test_closing_the_context_closes_flows_in_the_regular_way),
		with_peer(test_closing_many_flows_behind_a_full_ring),
		with_peer(test_listening),
		with_peer(test_sleeps_and_wakes),
		with_peer(test_all_sleepers_are_woken),
		with_peer(test_wait_any),
		with_peer(test_the_daemon_dies),
		with_peer(test_sending_without_testing_notices_death),
		with_peer(test_cut_off_with_a_reason),
		with_peer(test_garbage_completions),
		with_peer(test_closing_never_hangs),
		with_peer(test_fork),
		with_peer(test_many_threads),
		with_peer(test_freeing_races_with_arrival),
		with_peer(test_abandoning_races_with_arrival),
	};
	return cmocka_run_group_tests_name("shim", tests, NULL, NULL);
}
