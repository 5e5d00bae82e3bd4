/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of the verbs provider that need no device: endpoints, GIDs, codes, and what is said where there is no RDMA. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>

#include "prng.h"
#include "provider/verbs.h"

/* ---- endpoints ---- */

static struct dq_verbs_peer some_peer(void)
{
	struct dq_verbs_peer p = {.qpn = 0xabcdef, .psn = 0x123456, .qkey = 0x89abcdef, .lid = 0xfedc, .mtu = IBV_MTU_4096,
				  .link_layer = IBV_LINK_LAYER_ETHERNET};
	for (unsigned i = 0; i < 16; i++)
		p.gid.raw[i] = (uint8_t)(0x10 + i);
	return p;
}

static void test_endpoint_round(void **state)
{
	const struct dq_verbs_peer in = some_peer();
	struct dq_verbs_peer out;
	struct dq_endpoint e;
	struct dq_error err = {0};

	(void)state;
	assert_true(DQ_VERBS_ENDPOINT_BYTES <= DQ_ENDPOINT_MAX);
	for (int kind = DQ_VERBS_ENDPOINT_QP; kind <= DQ_VERBS_ENDPOINT_DGRAM; kind++) {
		dq_verbs_endpoint_put(&e, (enum dq_verbs_endpoint_kind)kind, &in);
		assert_int_equal(e.len, DQ_VERBS_ENDPOINT_BYTES);
		assert_int_equal(dq_verbs_endpoint_get(&e, (enum dq_verbs_endpoint_kind)kind, &out, &err), 0);
		assert_memory_equal(out.gid.raw, in.gid.raw, 16);
		assert_int_equal(out.qpn, in.qpn);
		assert_int_equal(out.psn, in.psn);
		assert_int_equal(out.qkey, in.qkey);
		assert_int_equal(out.lid, in.lid);
		assert_int_equal(out.mtu, in.mtu);
		assert_int_equal(out.link_layer, in.link_layer);
		/* Not the other kind. */
		assert_int_equal(dq_verbs_endpoint_get(&e, (enum dq_verbs_endpoint_kind)(3 - kind), &out, &err), -EPROTO);
		assert_non_null(strstr(err.text, "kind"));
	}
	/* Where each field stands on the wire is fixed. */
	dq_verbs_endpoint_put(&e, DQ_VERBS_ENDPOINT_QP, &in);
	static const uint8_t wire[28] = {'d', 'q', 'v', 'b', 1, 1, 2, 5, 0xdc, 0xfe, 0, 0, 0xef, 0xcd, 0xab, 0, 0x56, 0x34, 0x12, 0,
					 0xef, 0xcd, 0xab, 0x89, 0, 0, 0, 0};
	assert_memory_equal(e.data, wire, sizeof wire);
	assert_memory_equal(e.data + 28, in.gid.raw, 16);
}

static void refused(const struct dq_endpoint *e, const char *word)
{
	struct dq_verbs_peer out;
	struct dq_error err = {0};

	assert_int_equal(dq_verbs_endpoint_get(e, DQ_VERBS_ENDPOINT_QP, &out, &err), -EPROTO);
	if (!strstr(err.text, word))
		fail_msg("\"%s\" does not say \"%s\"", err.text, word);
}

static void test_endpoint_refused(void **state)
{
	struct dq_verbs_peer p = some_peer();
	struct dq_endpoint good, e;

	(void)state;
	dq_verbs_endpoint_put(&good, DQ_VERBS_ENDPOINT_QP, &p);
	e = (struct dq_endpoint){0};
	refused(&e, "same provider");
	e = good;
	e.data[0] ^= 1;
	refused(&e, "same provider");
	e = good;
	e.len = DQ_ENDPOINT_MAX + 1;
	refused(&e, "same provider");
	e = good;
	e.data[4] = 2;
	refused(&e, "version 2");
	e = good;
	e.len--;
	refused(&e, "bytes");
	e = good;
	e.len++;
	refused(&e, "bytes");
	e = good;
	e.data[6] = 7;
	refused(&e, "link layer 7");
	e = good;
	e.data[7] = 6;
	refused(&e, "MTU");
	e = good;
	e.data[7] = 0;
	refused(&e, "MTU");
	static const uint32_t bad_qpns[] = {0, 1, 0xffffff, 0x1000000, UINT32_MAX};
	for (unsigned i = 0; i < sizeof bad_qpns / sizeof *bad_qpns; i++) {
		p.qpn = bad_qpns[i];
		dq_verbs_endpoint_put(&e, DQ_VERBS_ENDPOINT_QP, &p);
		refused(&e, "QP number");
	}
	p = some_peer();
	p.psn = 0x1000000;
	dq_verbs_endpoint_put(&e, DQ_VERBS_ENDPOINT_QP, &p);
	refused(&e, "packet number");
}

/* Whatever comes from a peer is taken or refused, and what is taken is in its bounds. */
static void test_endpoint_fuzz(void **state)
{
	struct dq_verbs_peer p = some_peer(), out;
	struct dq_endpoint good, e;
	uint64_t seed = 0xfeed;
	unsigned taken = 0;

	(void)state;
	dq_verbs_endpoint_put(&good, DQ_VERBS_ENDPOINT_QP, &p);
	for (int round = 0; round < 20000; round++) {
		e = good;
		for (uint32_t n = prng_below(&seed, 4); n > 0; n--)
			e.data[prng_below(&seed, DQ_ENDPOINT_MAX)] = (uint8_t)prng_next(&seed);
		if (prng_below(&seed, 4) == 0)
			e.len = (uint16_t)prng_next(&seed);
		if (dq_verbs_endpoint_get(&e, DQ_VERBS_ENDPOINT_QP, &out, NULL) != 0)
			continue;
		taken++;
		assert_true(out.qpn >= 2 && out.qpn < 0xffffff && out.psn <= 0xffffff);
		assert_true(dq_verbs_mtu_bytes(out.mtu) >= 256 && dq_verbs_mtu_bytes(out.mtu) <= 4096);
	}
	assert_true(taken > 0);
}

/* ---- GIDs ---- */

static union ibv_gid gid_of(const char *text)
{
	union ibv_gid gid;
	if (dq_verbs_gid_parse(text, &gid) != 0)
		fail_msg("%s", text);
	return gid;
}

static void test_gid_text(void **state)
{
	static const struct { const char *in, *out; } good[] = {
		{"10.9.0.1", "::ffff:10.9.0.1"},
		{"::ffff:10.9.0.1", "::ffff:10.9.0.1"},
		{"0000:0000:0000:0000:0000:ffff:0a09:0001", "::ffff:10.9.0.1"},
		{"fe80::1", "fe80::1"},
		{"FE80:0000:0000:0000:0202:00FF:FE00:0001", "fe80::202:ff:fe00:1"},
		{"2001:db8::5", "2001:db8::5"},
	};
	static const char *const bad[] = {"", "10.9.0", "10.9.0.256", "fe80:::1", "fe80::1%eth0", "mlx5_0", "10.9.0.1/24", " 10.9.0.1", "1:2:3:4:5:6:7:8:9"};
	char text[64];

	(void)state;
	for (unsigned i = 0; i < sizeof good / sizeof *good; i++) {
		const union ibv_gid gid = gid_of(good[i].in);
		dq_verbs_gid_format(&gid, text, sizeof text);
		assert_string_equal(text, good[i].out);
	}
	for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++) {
		union ibv_gid gid;
		assert_int_equal(dq_verbs_gid_parse(bad[i], &gid), -EINVAL);
	}
	const union ibv_gid gid = gid_of("::ffff:10.9.0.1");
	assert_int_equal(gid.raw[10], 0xff);
	assert_int_equal(gid.raw[11], 0xff);
	assert_int_equal(gid.raw[12], 10);
	assert_int_equal(gid.raw[15], 1);
}

static struct ibv_gid_entry entry(const char *text, uint32_t index, uint32_t port, uint32_t type)
{
	return (struct ibv_gid_entry){.gid = gid_of(text), .gid_index = index, .port_num = port, .gid_type = type};
}

static void test_gids_alike(void **state)
{
	static const char *const kinds[3][2] = {{"10.9.0.1", "::ffff:192.0.2.1"}, {"fe80::1", "fe80::ff:fe00:2"}, {"2001:db8::5", "fd00::1"}};

	(void)state;
	for (unsigned i = 0; i < 6; i++)
		for (unsigned k = 0; k < 6; k++) {
			const union ibv_gid a = gid_of(kinds[i / 2][i % 2]), b = gid_of(kinds[k / 2][k % 2]);
			assert_int_equal(dq_verbs_gids_alike(&a, &b), i / 2 == k / 2);
		}
}

static void test_gid_choice(void **state)
{
	const struct ibv_gid_entry table[] = {
		entry("::", 7, 1, IBV_GID_TYPE_ROCE_V2),
		entry("fe80::1", 0, 1, IBV_GID_TYPE_ROCE_V1),
		entry("fe80::1", 1, 1, IBV_GID_TYPE_ROCE_V2),
		entry("10.9.0.1", 2, 1, IBV_GID_TYPE_ROCE_V1),
		entry("10.9.9.9", 0, 2, IBV_GID_TYPE_ROCE_V2),
		entry("10.9.0.1", 3, 1, IBV_GID_TYPE_ROCE_V2),
		entry("2001:db8::5", 4, 1, IBV_GID_TYPE_ROCE_V2),
	};
	const unsigned n = sizeof table / sizeof *table;
	union ibv_gid want;

	(void)state;
	assert_int_equal(dq_verbs_gid_choose(table, n, 1, false, NULL), 5);    /* routable, v2, of this port: the first */
	assert_int_equal(dq_verbs_gid_choose(table, 5, 1, false, NULL), 2);    /* else link-local, v2 */
	assert_int_equal(dq_verbs_gid_choose(table, 2, 1, false, NULL), -1);   /* v1 is chosen for nobody */
	assert_int_equal(dq_verbs_gid_choose(table, n, 2, false, NULL), 4);
	assert_int_equal(dq_verbs_gid_choose(table, n, 3, false, NULL), -1);
	assert_int_equal(dq_verbs_gid_choose(table, 0, 1, false, NULL), -1);
	want = gid_of("10.9.0.1");
	assert_int_equal(dq_verbs_gid_choose(table, n, 1, false, &want), 5);   /* v2 before v1 */
	assert_int_equal(dq_verbs_gid_choose(table, 5, 1, false, &want), 3);   /* v1 for whoever names it */
	assert_int_equal(dq_verbs_gid_choose(table, n, 2, false, &want), -1);
	want = gid_of("10.9.9.9");
	assert_int_equal(dq_verbs_gid_choose(table, n, 1, false, &want), -1);
	want = gid_of("::");
	assert_int_equal(dq_verbs_gid_choose(table, n, 1, false, &want), -1);  /* an empty entry is none */
	const struct ibv_gid_entry far[] = {entry("10.9.0.1", 256, 1, IBV_GID_TYPE_ROCE_V2)};
	assert_int_equal(dq_verbs_gid_choose(far, 1, 1, false, NULL), -1);     /* cannot be named to the device */
	const struct ibv_gid_entry ib[] = {entry("fe80::2", 1, 1, IBV_GID_TYPE_IB), entry("fe80::1", 0, 1, IBV_GID_TYPE_IB)};
	assert_int_equal(dq_verbs_gid_choose(ib, 2, 1, true, NULL), 1);
	want = gid_of("fe80::2");
	assert_int_equal(dq_verbs_gid_choose(ib, 2, 1, true, &want), 0);
}

/* ---- codes ---- */

static void test_mtu(void **state)
{
	(void)state;
	assert_int_equal(dq_verbs_mtu_bytes(0), 0);
	assert_int_equal(dq_verbs_mtu_bytes(IBV_MTU_256), 256);
	assert_int_equal(dq_verbs_mtu_bytes(IBV_MTU_4096), 4096);
	assert_int_equal(dq_verbs_mtu_bytes(6), 0);
	assert_int_equal(dq_verbs_mtu_bytes(255), 0);
	assert_int_equal(dq_verbs_mtu_enum(255), 0);
	assert_int_equal(dq_verbs_mtu_enum(256), IBV_MTU_256);
	assert_int_equal(dq_verbs_mtu_enum(1500), IBV_MTU_1024);
	assert_int_equal(dq_verbs_mtu_enum(4095), IBV_MTU_2048);
	assert_int_equal(dq_verbs_mtu_enum(4096), IBV_MTU_4096);
	assert_int_equal(dq_verbs_mtu_enum(UINT32_MAX), IBV_MTU_4096);
}

static void test_timeout(void **state)
{
	(void)state;
	assert_int_equal(dq_verbs_timeout_exponent(0), 14);
	assert_int_equal(dq_verbs_timeout_exponent(1), 1);       /* 0 would mean: wait for ever */
	assert_int_equal(dq_verbs_timeout_exponent(8192), 1);
	assert_int_equal(dq_verbs_timeout_exponent(8193), 2);
	assert_int_equal(dq_verbs_timeout_exponent(67108864), 14);
	assert_int_equal(dq_verbs_timeout_exponent(67108865), 15);
	assert_int_equal(dq_verbs_timeout_exponent(UINT64_MAX), 31);
	for (uint8_t n = 1; n < 31; n++) {
		assert_int_equal(dq_verbs_timeout_exponent(UINT64_C(4096) << n), n);
		assert_int_equal(dq_verbs_timeout_exponent((UINT64_C(4096) << n) + 1), n + 1);
	}
}

static void test_rates(void **state)
{
	const uint64_t g = 1000000000u;
	static const struct { uint32_t speed; uint8_t width; uint64_t gbit; } known[] = {
		{4, 1, 10}, {8, 1, 10}, {32, 1, 25}, {4, 2, 40}, {32, 2, 100}, {64, 2, 200}, {128, 2, 400}, {128, 4, 800}, {256, 2, 800},
		{16, 2, 56}, {64, 16, 100}, {2, 8, 60},
	};

	(void)state;
	for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
		assert_int_equal(dq_verbs_rate_bps(known[i].speed, known[i].width), known[i].gbit * g);
	assert_int_equal(dq_verbs_rate_bps(0, 2), 0);
	assert_int_equal(dq_verbs_rate_bps(32, 0), 0);
	assert_int_equal(dq_verbs_rate_bps(3, 1), 0);
	assert_int_equal(dq_verbs_rate_bps(512, 2), 0);
}

/* ---- without a device ---- */

static void test_open_refused(void **state)
{
	const struct dq_provider *p = dq_provider_find("verbs");
	const struct dq_device_config cfg = {.name = "rail0", .address = "no-such-device"};
	struct dq_device *dev = NULL;
	struct dq_error err = {0};

	(void)state;
	assert_non_null(p);
	assert_non_null(dq_provider_find("fault:verbs"));
	const int rc = p->device_open(&cfg, &dev, &err);
	/* No library, no RDMA in the kernel, or devices of which none has this name: each says so, and what to do or what there is. */
	assert_true(rc == -ENOSYS || rc == -ENODEV);
	assert_int_equal(err.code, rc);
	assert_true(strstr(err.text, "install") || strstr(err.text, "load the module") || strstr(err.text, "there are"));
	assert_null(dev);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_endpoint_round),
		cmocka_unit_test(test_endpoint_refused),
		cmocka_unit_test(test_endpoint_fuzz),
		cmocka_unit_test(test_gid_text),
		cmocka_unit_test(test_gids_alike),
		cmocka_unit_test(test_gid_choice),
		cmocka_unit_test(test_mtu),
		cmocka_unit_test(test_timeout),
		cmocka_unit_test(test_rates),
		cmocka_unit_test(test_open_refused),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
