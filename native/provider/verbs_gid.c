/* SPDX-License-Identifier: Apache-2.0 */
/* State of the port, its table of GIDs, and which of them this device uses. */
#include <errno.h>
#include <stdlib.h>

#include "provider/verbs.h"

#define GIDS_MAX 1024u /* of a port; the largest table of any known driver is smaller */

/* RoCE version of an entry, where the library has no call for it. */
static uint32_t type_from_sysfs(const struct dq_verbs_device *dev, unsigned index)
{
	char path[160], text[32] = "";

	snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/%u/gid_attrs/types/%u", dev->cfg.address, dev->cfg.port, index);
	FILE *f = fopen(path, "re");
	if (!f)
		return IBV_GID_TYPE_IB;
	const bool v2 = fgets(text, sizeof text, f) && strstr(text, "RoCE v2");
	fclose(f);
	return v2 ? IBV_GID_TYPE_ROCE_V2 : dev->infiniband ? IBV_GID_TYPE_IB : IBV_GID_TYPE_ROCE_V1;
}

/* The entries of all ports; negative errno on failure. */
static int gids_read(const struct dq_verbs_device *dev, int table_len, struct ibv_gid_entry *entries)
{
	unsigned n = 0;

	if (dev->lib->query_gid_table) {
		ssize_t found = dev->lib->query_gid_table(dev->ctx, entries, GIDS_MAX, 0, sizeof *entries);
		/* Refused by kernels before 5.9 and when there are more than fit: then one by one. */
		if (found >= 0)
			return (int)found;
	}
	for (int i = 0; i < table_len && n < GIDS_MAX; i++) {
		union ibv_gid gid;
		if (dev->lib->query_gid(dev->ctx, (uint8_t)dev->cfg.port, i, &gid) != 0)
			continue;
		entries[n++] = (struct ibv_gid_entry){.gid = gid, .gid_index = (uint32_t)i, .port_num = dev->cfg.port,
						      .gid_type = type_from_sysfs(dev, (unsigned)i)};
	}
	return (int)n;
}

/* "GID (type), ..." of the port, as far as it fits. */
static void gids_list(const struct dq_verbs_device *dev, const struct ibv_gid_entry *entries, unsigned n, char *out, size_t size)
{
	size_t used = 0;

	snprintf(out, size, "none");
	for (unsigned i = 0; i < n; i++) {
		char text[64];
		const uint32_t type = entries[i].gid_type;
		if (entries[i].port_num != dev->cfg.port)
			continue;
		dq_verbs_gid_format(&entries[i].gid, text, sizeof text);
		int len = snprintf(out + used, size - used, "%s%s%s", used ? ", " : "", text,
				   type == IBV_GID_TYPE_ROCE_V2 ? "" : type == IBV_GID_TYPE_ROCE_V1 ? " (RoCE v1)" : " (InfiniBand)");
		if (len < 0 || (size_t)len >= size - used) {
			memcpy(out + (size > 4 ? size - 4 : 0), "...", DQ_MIN(size, 4u));
			return;
		}
		used += (size_t)len;
	}
}

static uint64_t port_rate(const struct dq_verbs_device *dev, const struct ibv_port_attr *attr)
{
	uint32_t speed = attr->active_speed;

	if (dev->cfg.rate_bps)
		return dev->cfg.rate_bps;
#ifdef DQ_HAVE_ACTIVE_SPEED_EX
	if (attr->active_speed_ex) /* what does not fit into 8 bits: XDR and above */
		speed = attr->active_speed_ex;
#endif
	return dq_verbs_rate_bps(speed, attr->active_width);
}

/* What of the port has nothing to do with its address. */
static void port_take(const struct dq_verbs_device *dev, const struct ibv_port_attr *attr, struct dq_verbs_port *port)
{
	port->up = attr->state == IBV_PORT_ACTIVE;
	port->lid = attr->lid;
	port->rate_bps = port_rate(dev, attr);
	port->mtu = (uint8_t)attr->active_mtu;
	if (dev->cfg.mtu)
		port->mtu = (uint8_t)DQ_MIN(port->mtu, dq_verbs_mtu_enum(dev->cfg.mtu));
}

/* A port that does not even answer works no more: its interface is gone, or its driver is. */
static int port_ask(struct dq_verbs_device *dev, struct ibv_port_attr *attr)
{
	int rc = dq_verbs_query_port(dev->lib, dev->ctx, (uint8_t)dev->cfg.port, attr);

	if (rc) {
		pthread_mutex_lock(&dev->port_lock);
		dev->port.up = false;
		pthread_mutex_unlock(&dev->port_lock);
	}
	return rc;
}

void dq_verbs_port_refresh(struct dq_verbs_device *dev)
{
	struct ibv_port_attr attr;

	if (port_ask(dev, &attr) != 0)
		return;
	pthread_mutex_lock(&dev->port_lock);
	port_take(dev, &attr, &dev->port);
	pthread_mutex_unlock(&dev->port_lock);
}

int dq_verbs_port_read(struct dq_verbs_device *dev, const char *want, struct dq_error *err)
{
	struct ibv_port_attr attr;
	struct dq_verbs_port port = {0};
	union ibv_gid gid;
	const char *text = want ? want : dev->cfg.gid;

	if (text[0] && dq_verbs_gid_parse(text, &gid) != 0)
		return dq_error_set(err, -EINVAL, "device %s: GID \"%s\" is not valid: expected an IPv6 form such as fe80::1, or an IPv4 address",
				    dev->cfg.name, text);
	int rc = port_ask(dev, &attr);
	if (rc)
		return dq_error_set(err, rc, "device %s: port %u of %s cannot be queried: %s", dev->cfg.name, dev->cfg.port, dev->cfg.address,
				    strerror(-rc));
	port_take(dev, &attr, &port);
	if (dq_verbs_mtu_bytes(port.mtu) == 0)
		return dq_error_set(err, -EINVAL, "device %s: an MTU of %u bytes on port %u of %s (its own: %u): expected at least 256",
				    dev->cfg.name, dev->cfg.mtu, dev->cfg.port, dev->cfg.address,
				    dq_verbs_mtu_bytes((uint8_t)attr.active_mtu));

	struct ibv_gid_entry *entries = calloc(GIDS_MAX, sizeof *entries);
	if (!entries)
		return dq_error_set(err, -ENOMEM, "device %s: no memory for the table of GIDs", dev->cfg.name);
	int n = gids_read(dev, attr.gid_tbl_len, entries);
	int chosen = n < 0 ? -1 : dq_verbs_gid_choose(entries, (unsigned)n, (uint8_t)dev->cfg.port, dev->infiniband, text[0] ? &gid : NULL);
	if (chosen < 0) {
		char list[160];
		gids_list(dev, entries, n < 0 ? 0 : (unsigned)n, list, sizeof list);
		rc = text[0] ? dq_error_set(err, -ENOENT, "device %s: port %u of %s has no GID %s; there are: %s", dev->cfg.name, dev->cfg.port,
					    dev->cfg.address, text, list)
			     : dq_error_set(err, -ENOENT, "device %s: port %u of %s has no GID of RoCE v2 (is its network interface up?); there are: %s",
					    dev->cfg.name, dev->cfg.port, dev->cfg.address, list);
	} else {
		port.gid = entries[chosen].gid;
		port.gid_index = entries[chosen].gid_index;
		port.gid_type = entries[chosen].gid_type;
		dq_verbs_gid_format(&port.gid, port.gid_text, sizeof port.gid_text);
	}
	free(entries);
	/* What is known of the port is kept also without an address: the one in use stays until another is chosen. */
	pthread_mutex_lock(&dev->port_lock);
	if (chosen < 0) {
		port_take(dev, &attr, &dev->port);
	} else {
		dev->port = port;
	}
	pthread_mutex_unlock(&dev->port_lock);
	return rc;
}

void dq_verbs_port_now(struct dq_verbs_device *dev, struct dq_verbs_port *out)
{
	pthread_mutex_lock(&dev->port_lock);
	*out = dev->port;
	pthread_mutex_unlock(&dev->port_lock);
}

int dq_verbs_device_readdress(struct dq_device *device, const char *address, struct dq_error *err)
{
	struct dq_verbs_device *dev = dq_verbs_device_of(device);

	int rc = dq_verbs_port_read(dev, address, err);
	if (!rc)
		snprintf(dev->cfg.gid, sizeof dev->cfg.gid, "%.63s", address);
	return rc;
}
