/* SPDX-License-Identifier: Apache-2.0 */
/* The attach socket: connecting with helpful errors, one call at a time, file descriptors. */
#include "shim/shim.h"

#include <errno.h>
#include <grp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "shim/staging.h"

#define REQUEST_VERSION 1

const char *dq_shim_request_name(uint16_t type)
{
	switch (type) {
	case DQ_REQ_ATTACH:
		return "attach";
	case DQ_REQ_DEVICES:
		return "device list";
	case DQ_REQ_MEM_ALLOC:
		return "memory allocation";
	case DQ_REQ_MEM_DMABUF:
		return "dma-buf registration";
	case DQ_REQ_MEM_FREE:
		return "memory release";
	case DQ_REQ_MEM_SHARE:
		return "sharing of memory";
	case DQ_REQ_HINT:
		return "hint";
	default:
		return "request";
	}
}

static int permission_text(const char *path)
{
	char buffer[1024];
	struct group group, *found = NULL;
	struct stat st;

	if (stat(path, &st) != 0)
		return dq_shim_fail(DQPLB_ERR_PERMISSION, "%s: no permission to enter its folder (user %u): ask the administrator for "
				    "access to the daemon's client socket", path, (unsigned)geteuid());
	if (getgrgid_r(st.st_gid, &group, buffer, sizeof buffer, &found) != 0)
		found = NULL;
	return dq_shim_fail(DQPLB_ERR_PERMISSION,
			    "%s: no permission to connect: its mode is %04o, its owner user %u, its group %s (%u), and this process is "
			    "user %u: become a member of that group", path, (unsigned)(st.st_mode & 07777), (unsigned)st.st_uid,
			    found ? found->gr_name : "unnamed", (unsigned)st.st_gid, (unsigned)geteuid());
}

int dq_shim_socket_connect(const char *path, int *out)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	struct timeval patience = {.tv_sec = DQ_SHIM_CALL_NS / 1000000000u};
	int fd, status;

	memcpy(address.sun_path, path, strlen(path) + 1); /* length was checked */
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return dq_shim_fail(DQPLB_ERR_NOMEM, "a socket for %s: %s", path, strerror(errno));
	/* The daemon may be frozen: neither connect nor a call waits without end. */
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
	while (connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
		if (errno == EINTR)
			continue;
		if (errno == EACCES || errno == EPERM)
			status = permission_text(path);
		else if (errno == ENOENT || errno == ECONNREFUSED || errno == ENOTDIR)
			status = dq_shim_fail(DQPLB_ERR_DAEMON,
					      "no daemon listens on %s (%s): start it (`systemctl start dqplbd`), or name its client "
					      "socket in the environment variable DQPLB_SOCKET", path, strerror(errno));
		else if (errno == EPROTOTYPE)
			status = dq_shim_fail(DQPLB_ERR_DAEMON, "%s is another kind of socket, not the daemon's client socket: check DQPLB_SOCKET",
					      path);
		else
			status = dq_shim_fail(DQPLB_ERR_DAEMON, "connecting to %s: %s", path, strerror(errno));
		close(fd);
		return status;
	}
	*out = fd;
	return DQPLB_OK;
}

void dq_shim_answer_close(struct dq_shim_answer *answer)
{
	for (int i = 0; i < 2; i++)
		if (answer->fds[i] >= 0)
			close(answer->fds[i]);
	answer->fds[0] = answer->fds[1] = -1;
}

static int send_request(dqplb_context *ctx, struct dq_client_request *request, int fd, int flags)
{
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec iov = {request, sizeof *request};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
	ssize_t n;

	request->magic = DQ_LAYOUT_MAGIC;
	request->version = REQUEST_VERSION;
	if (fd >= 0) {
		memset(&control, 0, sizeof control);
		msg.msg_control = &control;
		msg.msg_controllen = sizeof control.space;
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		control.header.cmsg_len = CMSG_LEN(sizeof fd);
		memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
	}
	do
		n = sendmsg(ctx->socket, &msg, flags | MSG_NOSIGNAL);
	while (n < 0 && errno == EINTR);
	return n < 0 ? -errno : 0;
}

/* The fds of a message; more than two are closed. */
static void take_fds(struct msghdr *msg, struct dq_shim_answer *answer)
{
	int have = 0;

	for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c; c = CMSG_NXTHDR(msg, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (size_t i = 0; i < count; i++) {
			int fd;
			memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
			if (have < 2)
				answer->fds[have++] = fd;
			else
				close(fd);
		}
	}
}

/* 0, or a negative errno: -EPIPE the daemon is gone, -EAGAIN nothing there (yet), -EPROTO not an answer to this type. */
static int receive_answer(dqplb_context *ctx, uint16_t type, int flags, struct dq_shim_answer *answer)
{
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(8 * sizeof(int))];
	} control;
	struct iovec iov[2] = {{&answer->reply, sizeof answer->reply}, {answer->devices, sizeof answer->devices}};
	struct msghdr msg = {.msg_iov = iov, .msg_iovlen = 2, .msg_control = &control, .msg_controllen = sizeof control.space};
	ssize_t n;

	answer->fds[0] = answer->fds[1] = -1;
	do
		n = recvmsg(ctx->socket, &msg, flags | MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	if (n < 0)
		return errno == ECONNRESET ? -EPIPE : -errno;
	if (n == 0)
		return -EPIPE;
	take_fds(&msg, answer);
	answer->reply.text[sizeof answer->reply.text - 1] = 0;
	answer->device_count = (uint32_t)(((size_t)n - DQ_MIN((size_t)n, sizeof answer->reply)) / sizeof answer->devices[0]);
	if ((size_t)n < sizeof answer->reply || answer->reply.magic != DQ_LAYOUT_MAGIC || answer->reply.version != REQUEST_VERSION ||
	    answer->reply.type != type || answer->reply.status > 0 || (msg.msg_flags & (MSG_TRUNC | MSG_CTRUNC))) {
		dq_shim_answer_close(answer);
		return -EPROTO;
	}
	return 0;
}

/* lock held. After a failed call the order of answers is lost: nothing more can be asked. */
static int broken(dqplb_context *ctx, uint16_t type, int error)
{
	if (error == -EPIPE || error == -ECONNRESET)
		dq_shim_die(ctx, DQPLB_ERR_DAEMON, "the daemon at %s closed the connection: it ended, or cut this process off (its log says)",
			    ctx->socket_path);
	else if (error == -EAGAIN || error == -EWOULDBLOCK)
		dq_shim_die(ctx, DQPLB_ERR_DAEMON, "the daemon at %s did not answer a %s within %u s", ctx->socket_path,
			    dq_shim_request_name(type), (unsigned)(DQ_SHIM_CALL_NS / 1000000000u));
	else if (error == -EPROTO)
		dq_shim_die(ctx, DQPLB_ERR_DAEMON, "%s answered a %s with something else: is it the daemon's client socket?",
			    ctx->socket_path, dq_shim_request_name(type));
	else
		dq_shim_die(ctx, DQPLB_ERR_DAEMON, "%s for the daemon at %s: %s", dq_shim_request_name(type), ctx->socket_path,
			    strerror(-error));
	return dq_shim_dead(ctx);
}

static int broken_unlocked(dqplb_context *ctx, uint16_t type, int error)
{
	int status;

	pthread_mutex_lock(&ctx->lock);
	status = broken(ctx, type, error);
	pthread_mutex_unlock(&ctx->lock);
	return status;
}

/* socket_lock and lock held. */
static void async_done(dqplb_context *ctx, struct dq_shim_answer *answer)
{
	uint16_t type = ctx->async.type;

	ctx->async.type = 0;
	if (type == DQ_REQ_MEM_ALLOC)
		dq_staging_answer(ctx, ctx->async.bytes, answer);
	dq_shim_answer_close(answer);
}

int dq_shim_call(dqplb_context *ctx, struct dq_client_request *request, int fd, struct dq_shim_answer *answer)
{
	int status = DQPLB_OK, error = 0;

	pthread_mutex_lock(&ctx->socket_lock);
	if (atomic_load(&ctx->dead)) {
		pthread_mutex_lock(&ctx->lock);
		status = dq_shim_dead(ctx);
		pthread_mutex_unlock(&ctx->lock);
	}
	if (status == DQPLB_OK && ctx->async.type) { /* answers come in order: first the one that is due */
		error = receive_answer(ctx, ctx->async.type, 0, answer);
		if (error) {
			status = broken_unlocked(ctx, ctx->async.type, error);
		} else {
			pthread_mutex_lock(&ctx->lock);
			async_done(ctx, answer);
			pthread_mutex_unlock(&ctx->lock);
		}
	}
	if (status == DQPLB_OK) {
		error = send_request(ctx, request, fd, 0);
		if (error == -EBADF && fd >= 0)
			status = dq_shim_fail(DQPLB_ERR_INVALID, "%s: file descriptor %d is not open", dq_shim_request_name(request->type), fd);
		else if (!error)
			error = receive_answer(ctx, request->type, 0, answer);
		if (status == DQPLB_OK && error)
			status = broken_unlocked(ctx, request->type, error);
	}
	pthread_mutex_unlock(&ctx->socket_lock);
	if (status != DQPLB_OK)
		return status;
	if (answer->reply.status != DQPLB_OK) {
		dq_shim_answer_close(answer);
		return dq_shim_fail(answer->reply.status, "%s: %s", dq_shim_request_name(request->type),
				    answer->reply.text[0] ? answer->reply.text : dqplb_strerror(answer->reply.status));
	}
	return DQPLB_OK;
}

int dq_shim_call_async(dqplb_context *ctx, struct dq_client_request *request)
{
	int error = -EAGAIN;

	if (ctx->dead)
		return dq_shim_dead(ctx);
	if (pthread_mutex_trylock(&ctx->socket_lock) != 0)
		return DQPLB_ERR_AGAIN;
	if (!ctx->async.type) {
		error = send_request(ctx, request, -1, MSG_DONTWAIT);
		if (!error) {
			ctx->async.type = request->type;
			ctx->async.bytes = request->arg0;
		}
	}
	pthread_mutex_unlock(&ctx->socket_lock);
	if (error && error != -EAGAIN && error != -EWOULDBLOCK)
		return broken(ctx, request->type, error);
	return error ? DQPLB_ERR_AGAIN : DQPLB_OK;
}

void dq_shim_async_poll(dqplb_context *ctx)
{
	struct dq_shim_answer answer;
	int error;

	if (ctx->dead || pthread_mutex_trylock(&ctx->socket_lock) != 0)
		return;
	if (ctx->async.type) {
		error = receive_answer(ctx, ctx->async.type, MSG_DONTWAIT, &answer);
		if (!error)
			async_done(ctx, &answer);
		else if (error != -EAGAIN && error != -EWOULDBLOCK)
			broken(ctx, ctx->async.type, error);
	}
	pthread_mutex_unlock(&ctx->socket_lock);
}
