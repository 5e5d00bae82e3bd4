/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hosts for tests of the net plugin: real engines with devices of the provider that the environment names (transport_env.h),
 * and a real attach socket each, so that the plugin and the shared-memory library below it run as they do in a job. Of the
 * control plane there is what makes connections: VCs are made when an engine asks for one, also from a host to itself.
 *
 * One thread serves all sockets and all events. Functions are called from the test's thread; they return when the thread has
 * carried them out.
 */
#ifndef DQ_TESTS_NCCL_HOSTS_H
#define DQ_TESTS_NCCL_HOSTS_H

#include <stdbool.h>
#include <stdint.h>

#define NCCL_HOSTS_MAX 2

void nccl_hosts_start(unsigned count);          /* hosts 0..count-1, each on its own device of the environment */
void nccl_hosts_stop(void);                     /* engines, sockets, files: nothing is left */

const char *nccl_host_socket(unsigned host);    /* path of its attach socket, to be told in DQPLB_SOCKET */
const char *nccl_host_device(unsigned host);    /* name of its device */
void nccl_host_kill(unsigned host);             /* its daemon is gone: sockets closed, engine ended, nobody listens there */
void nccl_host_revive(unsigned host);           /* a new daemon of that name, with another epoch */
void nccl_hosts_cut(void);                      /* every VC between hosts fails; new ones are made when asked for */
/* While held, a need for a VC is not met and not refused: what waits for a connection waits. */
void nccl_hosts_hold(bool hold);
unsigned nccl_host_clients(unsigned host);      /* attached now, until all of a client is released */
/* Wait until it has that many. False: not within timeout_s. */
bool nccl_host_clients_wait(unsigned host, unsigned count, int timeout_s);
unsigned nccl_host_memory(unsigned host);       /* memory regions that its clients have registered now */
void nccl_host_hint(unsigned host, uint32_t *peers, uint32_t *flows); /* the last one of a client */
void nccl_host_limits(uint64_t max_memory_bytes, uint32_t max_flows); /* of clients that attach from now on */

#endif
