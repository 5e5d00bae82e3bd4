/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Round trip of datagrams between two RDMA devices of one machine, both ends polled by one thread without a pause: what a round
 * trip takes when nobody has to be woken. The reference for the prober. Uses libibverbs alone, and nothing of dqplbd.
 *
 *     verbs_ping DEVICE_A DEVICE_B ROUNDS [GID_INDEX]      prints {"min_ns": N, "p50_ns": N, "p99_ns": N}
 */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PORT 1
#define QKEY 0x11110000u
#define GRH_BYTES 40u
#define BYTES 32u          /* as a probe */
#define BUFFER_BYTES 4096u
#define SENT_AT 2048u
#define PATIENCE_NS 10000000000ull

struct end {
	const char *name;
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_cq *sent, *received;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	struct ibv_ah *ah;         /* of the other end */
	union ibv_gid gid;
	uint8_t buffer[BUFFER_BYTES];
};

static struct end ends[2];

static void __attribute__((noreturn, format(printf, 1, 2))) die(const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	fprintf(stderr, "verbs_ping: ");
	vfprintf(stderr, fmt, ap);
	fprintf(stderr, "\n");
	va_end(ap);
	exit(1);
}

static uint64_t now_ns(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void open_device(struct end *e)
{
	int n = 0;
	struct ibv_device **list = ibv_get_device_list(&n);
	for (int i = 0; list && i < n; i++)
		if (!strcmp(ibv_get_device_name(list[i]), e->name))
			e->ctx = ibv_open_device(list[i]);
	if (list)
		ibv_free_device_list(list);
	if (!e->ctx)
		die("%s: no such RDMA device, or it cannot be opened", e->name);
}

static void make(struct end *e, int gid_index)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_UD, .sq_sig_all = 1,
					 .cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1,
						  .max_inline_data = BYTES } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = PORT, .qkey = QKEY };
	open_device(e);
	e->pd = ibv_alloc_pd(e->ctx);
	e->sent = init.send_cq = ibv_create_cq(e->ctx, 16, NULL, NULL, 0);
	e->received = init.recv_cq = ibv_create_cq(e->ctx, 16, NULL, NULL, 0);
	e->mr = e->pd ? ibv_reg_mr(e->pd, e->buffer, sizeof e->buffer, IBV_ACCESS_LOCAL_WRITE) : NULL;
	e->qp = e->mr && e->sent && e->received ? ibv_create_qp(e->pd, &init) : NULL;
	if (!e->qp || ibv_query_gid(e->ctx, PORT, gid_index, &e->gid))
		die("%s: no queue pair, or no GID with index %d: %s", e->name, gid_index, strerror(errno));
	int rc = ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
	attr.qp_state = IBV_QPS_RTR;
	rc = rc ? rc : ibv_modify_qp(e->qp, &attr, IBV_QP_STATE);
	attr.qp_state = IBV_QPS_RTS;
	rc = rc ? rc : ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
	if (rc)
		die("%s: the queue pair cannot be made ready: %s", e->name, strerror(rc));
}

static void meet(struct end *e, const struct end *other, int gid_index)
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = PORT,
				    .grh = { .dgid = other->gid, .sgid_index = (uint8_t)gid_index, .hop_limit = 64 } };
	e->ah = ibv_create_ah(e->pd, &attr);
	if (!e->ah)
		die("%s: no way to %s: %s", e->name, other->name, strerror(errno));
}

static void receive(struct end *e)
{
	struct ibv_sge sge = { (uintptr_t)e->buffer, GRH_BYTES + BYTES, e->mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
	if (ibv_post_recv(e->qp, &wr, &bad))
		die("%s: a receive was refused", e->name);
}

static void send_to(struct end *e, const struct end *other)
{
	struct ibv_sge sge = { (uintptr_t)e->buffer + SENT_AT, BYTES, e->mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_INLINE,
				  .wr.ud = { .ah = e->ah, .remote_qpn = other->qp->qp_num, .remote_qkey = QKEY } }, *bad;
	if (ibv_post_send(e->qp, &wr, &bad))
		die("%s: a send was refused", e->name);
}

static void wait_for(struct end *e, struct ibv_cq *cq, const char *what)
{
	const uint64_t limit = now_ns() + PATIENCE_NS;
	struct ibv_wc wc;
	int n;
	while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
		if (now_ns() > limit)
			die("%s: %s did not complete within 10 s", e->name, what);
	if (n < 0 || wc.status != IBV_WC_SUCCESS)
		die("%s: %s failed: %s", e->name, what, n < 0 ? "poll" : ibv_wc_status_str(wc.status));
}

static int ascending(const void *a, const void *b)
{
	const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
	if (argc < 4 || argc > 5)
		die("usage: verbs_ping DEVICE_A DEVICE_B ROUNDS [GID_INDEX]");
	const unsigned long rounds = strtoul(argv[3], NULL, 10);
	const int gid_index = argc > 4 ? atoi(argv[4]) : 1;
	if (rounds < 1 || rounds > 1000000)
		die("%s rounds; expected 1 to 1000000", argv[3]);
	uint64_t *times = calloc(rounds, sizeof *times);
	if (!times)
		die("no memory for %lu rounds", rounds);
	for (int i = 0; i < 2; i++) {
		ends[i].name = argv[1 + i];
		make(&ends[i], gid_index);
	}
	meet(&ends[0], &ends[1], gid_index);
	meet(&ends[1], &ends[0], gid_index);
	for (unsigned long i = 0; i < rounds; i++) {
		receive(&ends[0]);
		receive(&ends[1]);
		const uint64_t begin = now_ns();
		send_to(&ends[0], &ends[1]);
		wait_for(&ends[1], ends[1].received, "a receive");
		send_to(&ends[1], &ends[0]);
		wait_for(&ends[0], ends[0].received, "a receive");
		times[i] = now_ns() - begin;
		wait_for(&ends[0], ends[0].sent, "a send");
		wait_for(&ends[1], ends[1].sent, "a send");
	}
	qsort(times, rounds, sizeof *times, ascending);
	printf("{\"min_ns\": %llu, \"p50_ns\": %llu, \"p99_ns\": %llu}\n", (unsigned long long)times[0],
	       (unsigned long long)times[rounds / 2], (unsigned long long)times[rounds * 99 / 100]);
	free(times);
	return 0; /* the kernel takes the rest back */
}
