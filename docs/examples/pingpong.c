/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two programs in one: a listener and a connector that send messages to and fro, then put and notify.
 *
 *   cc pingpong.c -o pingpong $(pkg-config --cflags --libs dqplb)
 *   ./pingpong listen  /tmp/pingpong.handle [DEVICE] &
 *   ./pingpong connect /tmp/pingpong.handle [DEVICE]
 *
 * The handle travels in a file here; a socket, a job launcher or a key-value store do as well, also from host to host.
 */
#include <dqplb.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ROUNDS 1000
#define MESSAGE_BYTES 65536
#define TAG_PING 1
#define TAG_PONG 2
#define TAG_REGION 3
#define COOKIE 42

/* Every call says what went wrong, with names, values and what to do about it. */
#define must(call)                                                                                       \
	do {                                                                                             \
		int must_status = (call);                                                                \
		if (must_status != DQPLB_OK)                                                             \
			fail(#call, must_status);                                                        \
	} while (0)

static void fail(const char *call, int status)
{
	fprintf(stderr, "%s: %s (%s)\n", call, dqplb_last_error(), dqplb_strerror(status));
	exit(1);
}

/* Begin an operation; "no room now" means: let something complete, then try again. */
#define begin(ctx, call)                                                                                 \
	do {                                                                                             \
		int begin_status;                                                                        \
		while ((begin_status = (call)) == DQPLB_ERR_AGAIN)                                       \
			dqplb_wait_any((ctx), 10);                                                       \
		if (begin_status != DQPLB_OK)                                                            \
			fail(#call, begin_status);                                                       \
	} while (0)

/* Wait for an operation: the call may fail, and the operation may. */
static dqplb_result finish(dqplb_request *request)
{
	dqplb_result result;

	must(dqplb_wait(request, 30000, &result));
	if (result.status != DQPLB_OK)
		fail("operation", result.status);
	return result;
}

/* Written beside and renamed, so that nobody reads half a handle. */
static void write_handle(const char *path, const dqplb_handle *handle)
{
	char beside[4096];
	FILE *f;

	snprintf(beside, sizeof beside, "%s.new", path);
	f = fopen(beside, "wb");
	if (!f || fwrite(handle->bytes, 1, sizeof handle->bytes, f) != sizeof handle->bytes || fclose(f) != 0 ||
	    rename(beside, path) != 0) {
		perror(path);
		exit(1);
	}
}

static void read_handle(const char *path, dqplb_handle *handle)
{
	struct timespec pause = {0, 10000000};
	FILE *f = NULL;
	int i;

	for (i = 0; i < 3000 && !(f = fopen(path, "rb")); i++)
		nanosleep(&pause, NULL);
	if (!f || fread(handle->bytes, 1, sizeof handle->bytes, f) != sizeof handle->bytes) {
		fprintf(stderr, "%s: no handle there: is the listener running?\n", path);
		exit(1);
	}
	fclose(f);
}

static void expect(const void *bytes, int value, size_t count, const char *what)
{
	const unsigned char *b = bytes;
	size_t i;

	for (i = 0; i < count; i++)
		if (b[i] != (unsigned char)value) {
			fprintf(stderr, "%s: byte %zu is %d, expected %d\n", what, i, b[i], (unsigned char)value);
			exit(1);
		}
}

static void run_listener(dqplb_context *ctx, int device, const char *path)
{
	dqplb_request *accepting, *receiving, *sending, *exporting, *notifying;
	dqplb_listener *listener;
	dqplb_handle handle;
	dqplb_mem *mem, *target;
	dqplb_flow *flow;
	dqplb_result r;
	int i;

	must(dqplb_listen(ctx, device, &handle, &listener));
	begin(ctx, dqplb_accept(listener, &accepting));
	write_handle(path, &handle);
	flow = finish(accepting).flow;
	must(dqplb_listener_close(listener));
	remove(path);

	/* Memory of the daemon: both processes map it, nothing is copied on this host. */
	must(dqplb_mem_alloc(ctx, MESSAGE_BYTES, &mem));
	for (i = 0; i < ROUNDS; i++) {
		begin(ctx, dqplb_recv(flow, mem, 0, MESSAGE_BYTES, TAG_PING, &receiving));
		r = finish(receiving);
		if (i == 0 || i == ROUNDS - 1)
			expect(dqplb_mem_address(mem), i, r.bytes, "ping");
		begin(ctx, dqplb_send(flow, mem, 0, r.bytes, TAG_PONG, &sending));
		finish(sending); /* mem is ours again */
	}

	/* One-sided: the peer writes where we let it, and we are told. */
	must(dqplb_mem_alloc(ctx, MESSAGE_BYTES, &target));
	begin(ctx, dqplb_export(flow, target, 0, MESSAGE_BYTES, &exporting));
	r = finish(exporting);
	memcpy(dqplb_mem_address(mem), &r.region, sizeof r.region);
	begin(ctx, dqplb_notify(flow, &notifying));
	begin(ctx, dqplb_send(flow, mem, 0, sizeof r.region, TAG_REGION, &sending));
	finish(sending);
	r = finish(notifying);
	if (r.cookie != COOKIE || r.offset != 4096 || r.bytes != 1000)
		exit(1);
	expect((char *)dqplb_mem_address(target) + 4096, 'x', r.bytes, "put");
	printf("listener: %d messages and a put of %zu bytes\n", ROUNDS, (size_t)r.bytes);

	/* An empty message says goodbye, so that nobody closes while the other still waits. */
	begin(ctx, dqplb_send(flow, mem, 0, 0, TAG_PONG, &sending));
	finish(sending);
	must(dqplb_flow_close(flow));
}

static void run_connector(dqplb_context *ctx, int device, const char *path)
{
	dqplb_request *connecting, *receiving, *sending, *putting;
	static unsigned char own[MESSAGE_BYTES];
	struct timespec start, end;
	dqplb_handle handle;
	dqplb_mem *mem, *registered;
	dqplb_flow *flow;
	uint32_t region;
	double us;
	int i;

	read_handle(path, &handle);
	begin(ctx, dqplb_connect(ctx, device, &handle, &connecting));
	flow = finish(connecting).flow;

	must(dqplb_mem_alloc(ctx, MESSAGE_BYTES, &mem));
	clock_gettime(CLOCK_MONOTONIC, &start);
	for (i = 0; i < ROUNDS; i++) {
		memset(dqplb_mem_address(mem), i, MESSAGE_BYTES);
		begin(ctx, dqplb_send(flow, mem, 0, MESSAGE_BYTES, TAG_PING, &sending));
		finish(sending);
		begin(ctx, dqplb_recv(flow, mem, 0, MESSAGE_BYTES, TAG_PONG, &receiving));
		finish(receiving);
	}
	clock_gettime(CLOCK_MONOTONIC, &end);
	us = ((double)(end.tv_sec - start.tv_sec) * 1e9 + (double)(end.tv_nsec - start.tv_nsec)) / 1e3 / ROUNDS;

	/* Any memory of the program can be registered; the library copies it through staging memory. */
	must(dqplb_mem_register(ctx, own, sizeof own, &registered));
	begin(ctx, dqplb_recv(flow, registered, 0, sizeof own, TAG_REGION, &receiving));
	finish(receiving);
	memcpy(&region, own, sizeof region);
	memset(own, 'x', sizeof own);
	begin(ctx, dqplb_put(flow, region, 4096, registered, 0, 1000, COOKIE, &putting));
	finish(putting);
	begin(ctx, dqplb_recv(flow, registered, 0, sizeof own, TAG_PONG, &receiving));
	finish(receiving);
	must(dqplb_mem_free(registered));
	must(dqplb_flow_close(flow));
	printf("connector: %.1f us for %d bytes there and back\n", us, MESSAGE_BYTES);
}

int main(int argc, char **argv)
{
	dqplb_context *ctx;
	int device;

	if (argc < 3 || argc > 4 || (strcmp(argv[1], "listen") != 0 && strcmp(argv[1], "connect") != 0)) {
		fprintf(stderr, "usage: %s listen|connect HANDLE_FILE [DEVICE]\n", argv[0]);
		return 2;
	}
	device = argc == 4 ? atoi(argv[3]) : 0;
	must(dqplb_open(NULL, &ctx)); /* the socket is $DQPLB_SOCKET, or the daemon's usual one */
	if (strcmp(argv[1], "listen") == 0)
		run_listener(ctx, device, argv[2]);
	else
		run_connector(ctx, device, argv[2]);
	dqplb_close(ctx);
	return 0;
}
