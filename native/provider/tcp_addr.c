/* SPDX-License-Identifier: Apache-2.0 */
/* Addresses and endpoints of the tcp provider. An endpoint: version, kind, family, port, address, QP number, token. */
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>

#include "provider/tcp.h"

int dq_tcp_addr_parse(const char *text, uint16_t port, struct sockaddr_storage *out, socklen_t *len, struct dq_error *err)
{
	const struct addrinfo hints = {.ai_flags = AI_NUMERICHOST, .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
	struct addrinfo *found = NULL;
	int rc = getaddrinfo(text, NULL, &hints, &found);
	if (rc)
		return dq_error_set(err, -EINVAL, "address \"%.63s\": %s; expected a numeric IPv4 or IPv6 address of this host",
				    text, gai_strerror(rc));
	bool any = false;
	memset(out, 0, sizeof *out);
	memcpy(out, found->ai_addr, found->ai_addrlen);
	*len = found->ai_addrlen;
	if (found->ai_family == AF_INET) {
		struct sockaddr_in *in = (struct sockaddr_in *)out;
		in->sin_port = htons(port);
		any = in->sin_addr.s_addr == htonl(INADDR_ANY);
	} else {
		struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)out;
		in6->sin6_port = htons(port);
		any = IN6_IS_ADDR_UNSPECIFIED(&in6->sin6_addr);
	}
	freeaddrinfo(found);
	if (any)
		return dq_error_set(err, -EINVAL, "address \"%.63s\": a wildcard cannot be told to peers; name one address of "
				    "this host", text);
	return 0;
}

void dq_tcp_addr_format(const struct sockaddr_storage *addr, char *out, size_t size)
{
	char host[INET6_ADDRSTRLEN];

	if (addr->ss_family == AF_INET) {
		const struct sockaddr_in *in = (const struct sockaddr_in *)addr;
		inet_ntop(AF_INET, &in->sin_addr, host, sizeof host);
		snprintf(out, size, "%s:%u", host, ntohs(in->sin_port));
	} else if (addr->ss_family == AF_INET6) {
		const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)addr;
		inet_ntop(AF_INET6, &in6->sin6_addr, host, sizeof host);
		snprintf(out, size, "[%s]:%u", host, ntohs(in6->sin6_port));
	} else {
		snprintf(out, size, "?");
	}
}

void dq_tcp_endpoint_put(struct dq_endpoint *out, enum dq_tcp_endpoint_kind kind, const struct sockaddr_storage *addr,
			 uint32_t qp, const uint8_t token[DQ_TCP_TOKEN_BYTES])
{
	uint8_t *p = out->data;

	memset(out, 0, sizeof *out);
	out->len = DQ_TCP_ENDPOINT_BYTES;
	p[0] = DQ_TCP_VERSION;
	p[1] = (uint8_t)kind;
	if (addr->ss_family == AF_INET) {
		const struct sockaddr_in *in = (const struct sockaddr_in *)addr;
		p[2] = 4;
		dq_le16_put(p + 4, ntohs(in->sin_port));
		memcpy(p + 8, &in->sin_addr, 4);
	} else {
		const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)addr;
		p[2] = 6;
		dq_le16_put(p + 4, ntohs(in6->sin6_port));
		memcpy(p + 8, &in6->sin6_addr, 16);
	}
	dq_le32_put(p + 24, qp);
	if (token)
		memcpy(p + 28, token, DQ_TCP_TOKEN_BYTES);
}

int dq_tcp_endpoint_get(const struct dq_endpoint *in, enum dq_tcp_endpoint_kind kind, const struct sockaddr_storage *local,
			struct dq_tcp_peer *out, struct dq_error *err)
{
	const uint8_t *p = in->data;

	memset(out, 0, sizeof *out);
	if (in->len != DQ_TCP_ENDPOINT_BYTES)
		return dq_error_set(err, -EINVAL, "peer endpoint of %u bytes, expected %u: not an endpoint of the tcp provider",
				    in->len, DQ_TCP_ENDPOINT_BYTES);
	if (p[0] != DQ_TCP_VERSION)
		return dq_error_set(err, -EPROTO, "peer endpoint has tcp version %u, this end has %u: run the same release on "
				    "both hosts", p[0], DQ_TCP_VERSION);
	if (p[1] != kind)
		return dq_error_set(err, -EINVAL, "peer endpoint of kind %u, expected %u (1 = queue pair, 2 = datagram)", p[1], kind);
	if ((p[2] == 4 ? AF_INET : p[2] == 6 ? AF_INET6 : AF_UNSPEC) != local->ss_family)
		return dq_error_set(err, -EAFNOSUPPORT, "peer endpoint is of address family IPv%u, this device has an IPv%u address: "
				    "give both devices addresses of one family", p[2], local->ss_family == AF_INET ? 4u : 6u);
	uint16_t port = dq_le16_get(p + 4);
	if (port == 0)
		return dq_error_set(err, -EINVAL, "peer endpoint names port 0, expected 1 to 65535");
	if (p[2] == 4) {
		struct sockaddr_in *sin = (struct sockaddr_in *)&out->addr;
		sin->sin_family = AF_INET;
		sin->sin_port = htons(port);
		memcpy(&sin->sin_addr, p + 8, 4);
		out->addr_len = sizeof *sin;
	} else {
		struct sockaddr_in6 *sin6 = (struct sockaddr_in6 *)&out->addr;
		sin6->sin6_family = AF_INET6;
		sin6->sin6_port = htons(port);
		memcpy(&sin6->sin6_addr, p + 8, 16);
		if (IN6_IS_ADDR_LINKLOCAL(&sin6->sin6_addr))
			sin6->sin6_scope_id = ((const struct sockaddr_in6 *)local)->sin6_scope_id;
		out->addr_len = sizeof *sin6;
	}
	out->qp = dq_le32_get(p + 24);
	memcpy(out->token, p + 28, DQ_TCP_TOKEN_BYTES);
	return 0;
}
