# SPDX-License-Identifier: Apache-2.0
"""The checks of ``dqplb doctor`` that are about RDMA devices.  Pure."""

import ipaddress
from collections.abc import Iterator
from typing import Final

from dqplbd.admin.model import Device, GidCandidate, RdmaView
from dqplbd.admin.rdma_hints import diagnose, events_text, span_text
from dqplbd.cli.facts import DaemonCheck, DaemonFacts, Findings, HostCheck, HostFacts, some
from dqplbd.units import format_bytes

__all__ = ["RDMA_CHECKS", "RDMA_HOST_CHECKS", "RDMA_JUMBO_MTU", "RDMA_MTU"]

MEMLOCK_WANTED: Final = 8 * 2**30
COUNTERS_AGE_LIMIT: Final = 120  # seconds; they are read every few
_NO_NODE: Final = "no uverbs node"  # as the inventory says it
RDMA_MTU: Final = 4096  # the largest there is
RDMA_JUMBO_MTU: Final = 4200  # MTU of an interface that is enough for it, with all headers


def _rdma_devices(daemon: DaemonFacts) -> Iterator[tuple[Device, RdmaView]]:
    for device in daemon.devices:
        if device.rdma is not None:
            yield device, device.rdma


def _pyverbs(host: HostFacts) -> Findings:
    if not host.rdma:
        yield "skip", "this host has no RDMA device, so nothing needs pyverbs", ""
    elif host.pyverbs is not None:
        problem, fix = host.pyverbs
        yield "fail", f"RDMA devices cannot be used: {problem}", f"{fix}; then: systemctl restart dqplbd"
    else:
        yield "ok", "pyverbs is there", ""


def _libibverbs(host: HostFacts) -> Findings:
    if not host.rdma:
        yield "skip", "this host has no RDMA device, so nothing needs libibverbs", ""
    elif host.libibverbs is not None:
        yield (
            "fail",
            f"RDMA devices cannot be used: libibverbs cannot be loaded ({host.libibverbs})",
            "install libibverbs1 and ibverbs-providers (Debian, Ubuntu) or libibverbs (Fedora, RHEL)",
        )
    else:
        yield "ok", "libibverbs is there", ""


def _memlock(daemon: DaemonFacts, host: HostFacts) -> Findings:
    limit = daemon.status.process.memlock_limit_bytes
    verbs = [device.name for device in daemon.devices if device.provider == "verbs"]
    if not verbs:
        shown = "unlimited" if limit is None else format_bytes(limit)
        yield "skip", f"memlock limit is {shown}; only RDMA devices need it, and none is in use", ""
    elif limit is not None and limit < MEMLOCK_WANTED:
        yield (
            "fail",
            f"the daemon may lock only {format_bytes(limit)}; {some(verbs)} needs all memory of clients locked "
            f"(now {format_bytes(daemon.status.engine.memory_bytes)}, at most "
            f"{format_bytes(daemon.config.get('clients', {}).get('max_memory_bytes', 0))} each), and its queues",
            "LimitMEMLOCK=infinity in the unit (limits.conf does not apply to services); "
            "in a container: --ulimit memlock=-1",
        )
    else:
        yield "ok", "the daemon may lock the memory it needs", ""


def _devices(daemon: DaemonFacts, host: HostFacts) -> Findings:
    if not host.rdma:
        yield "skip", "this host has no RDMA device; data goes over TCP", ""
        return
    used = {rdma.rdma_device for _, rdma in _rdma_devices(daemon)}
    left_out = {one.port.rpartition("/")[0]: one.why for one in daemon.status.rdma_left_out}
    open_now = {rdma.rdma_device for device, rdma in _rdma_devices(daemon) if device.state != "failed"}
    refused = renamed = False
    for one in daemon.devices:
        if one.provider == "verbs" and one.rdma is None and one.state != "failed":
            renamed = True
            yield (
                "warn",
                f"{one.name} works, but the RDMA device that the configuration names is not there any more",
                "it was renamed, or is going: put the name that `rdma link` lists into devices before the next restart",
            )
    for device in host.rdma:
        if device.error is not None and device.name in open_now:
            # That the user of this command may not open it says nothing; but a node that is gone is gone for all.
            if _NO_NODE in device.error:
                refused = True
                yield (
                    "warn",
                    f"{device.name}, which the daemon has open, is being removed: {device.error}",
                    "the kernel waits until its users let go of it: restart the daemon, and see `rdma link`",
                )
        elif device.error is not None:
            refused = True
            yield (
                "warn",
                f"{device.name} is in sysfs, but cannot be opened: {device.error}",
                "in a container: pass /dev/infiniband and allow its device cgroup; else add the daemon's account to "
                "the group of the node",
            )
        elif not used and not renamed and device.name not in left_out:
            yield (
                "warn",
                f"{device.name} is there, but the daemon does not use it",
                "data goes over other devices meanwhile: list it under devices, or let devices be auto",
            )
    if used and not refused and not renamed:
        rest = [
            f"{one.name} ({left_out.get(one.name, 'not listed under devices')})"
            for one in host.rdma
            if one.name not in used
        ]
        yield "ok", f"{len(used)} RDMA devices are in use" + (f"; not used: {some(rest)}" if rest else ""), ""


def _ports(daemon: DaemonFacts, host: HostFacts) -> Findings:
    said = False
    for device, rdma in _rdma_devices(daemon):
        if rdma.state in (None, "active", "active-defer"):
            continue
        said = True
        physical = f", physically {rdma.physical_state}" if rdma.physical_state else ""
        if rdma.state == "nop":
            fix = "its network interface or its driver is gone (`ip link`, `rdma link`, `dmesg`)"
        elif rdma.link_layer == "ethernet":
            fix = f"`ip link set {device.netdev or 'DEV'} up`; cable, transceiver, switch port"
        elif rdma.state in ("init", "armed"):
            fix = "a subnet manager must make it active: is opensm, or that of the switch, running (`sminfo`)?"
        else:
            fix = "cable, transceiver, switch port (`ibstat`)"
        yield "fail", f"port {rdma.port} of {rdma.rdma_device} ({device.name}) is {rdma.state}{physical}", fix
    if not any(True for _ in _rdma_devices(daemon)):
        yield "skip", "no RDMA device is in use", ""
    elif not said:
        yield "ok", "the ports of all RDMA devices in use are active", ""


def _gid_trouble(device: Device, gid: GidCandidate) -> tuple[str, str] | None:
    """What is wrong with the GID in use, and what to do."""
    interface = gid.netdev or device.netdev or "its interface"
    if gid.kind == "roce_v1":
        return (
            "is one of RoCE v1, which is not routed and which an end of v2 cannot reach",
            f"have the port offer RoCE v2 (`cma_roce_mode`, driver options), or give {interface} an address",
        )
    if device.netdev_up is False:
        return f"belongs to {interface}, which is down", f"ip link set {interface} up"
    if gid.kind != "ib" and ipaddress.IPv6Address(gid.gid).is_link_local:
        return (
            "is link-local: it reaches only hosts behind the same router",
            f"give {interface} an address that is routed in the fabric",
        )
    if "in no preferred subnet" in gid.reasons:
        return (
            "is in none of rdma.gid_subnets",
            f"give {interface} an address of the fabric, or correct rdma.gid_subnets",
        )
    return None


def _gids(daemon: DaemonFacts, host: HostFacts) -> Findings:
    said = False
    looked = 0
    for device, _ in _rdma_devices(daemon):
        if not device.gids or device.state == "failed":  # the reason of that is told as such
            continue
        looked += 1
        used = next((gid for gid in device.gids if gid.in_use), None)
        if used is None:
            said = True
            reasons = [f"{gid.gid}: {', '.join(gid.reasons)}" for gid in device.gids]
            yield (
                "fail",
                f"{device.name}: the GID in use is gone, and none can be used now ({some(reasons)})",
                f"give {device.netdev or 'its interface'} an address; `dqplb devices -o wide` lists them all",
            )
            continue
        trouble = _gid_trouble(device, used)
        if trouble is not None:
            said = True
            yield "warn", f"{device.name}: GID {used.gid} {trouble[0]}", trouble[1]
    if not looked:
        yield "skip", "no RDMA device with GIDs is in use", ""
    elif not said:
        yield "ok", f"the GIDs of {looked} RDMA devices are as they should be", ""


def _mtu(daemon: DaemonFacts, host: HostFacts) -> Findings:
    said = False
    looked = 0
    for device, rdma in _rdma_devices(daemon):
        active = rdma.active_mtu_bytes
        if active is None:
            continue
        looked += 1
        best = min(RDMA_MTU, rdma.max_mtu_bytes or RDMA_MTU)
        if active >= best:
            continue
        said = True
        lost = f"{device.name}: packets carry {active} bytes, not {best}"
        if rdma.link_layer == "ethernet":
            mtu = device.netdev_mtu_bytes
            yield (
                "warn",
                f"{lost}, since {device.netdev or 'the interface'} has MTU {mtu if mtu is not None else 'unknown'}; "
                "headers take more of the rate",
                f"`ip link set {device.netdev or 'DEV'} mtu {RDMA_JUMBO_MTU}` or 9000, on all hosts and switches",
            )
        else:
            yield "warn", lost, "raise the MTU of the partition in the subnet manager"
    if not looked:
        yield "skip", "no RDMA device is in use", ""
    elif not said:
        yield "ok", "RDMA packets are as large as the ports allow", ""


def _traffic_class(daemon: DaemonFacts, host: HostFacts) -> Findings:
    mine = {device.name: rdma.traffic_class for device, rdma in _rdma_devices(daemon)}
    if not mine:
        yield "skip", "no RDMA device is in use", ""
        return
    theirs = {(peer.host_id, one.name): one.traffic_class for peer in daemon.peers for one in peer.devices}
    odd = []
    for path in daemon.paths:
        other = theirs.get((path.peer, path.peer_device))
        if path.device in mine and other is not None and other != mine[path.device]:
            odd.append(f"{path.device} {mine[path.device]} against {path.peer}/{path.peer_device} {other}")
    if odd:
        yield (
            "warn",
            f"the traffic classes of the two ends differ: {some(odd)}",
            "set the same rdma.traffic_class on all hosts: switches treat the two directions differently until then",
        )
    else:
        yield (
            "ok",
            f"all peers use the same traffic class ({', '.join(sorted({str(one) for one in mine.values()}))})",
            "",
        )


def _routes(daemon: DaemonFacts, host: HostFacts) -> Findings:
    devices = {device.name: device for device, _ in _rdma_devices(daemon)}
    looked = [route for route in host.routes if route.device in devices]
    missing = [f"{one.device} ({one.source}) to {one.peer} ({one.to}): {one.error}" for one in looked if one.error]
    if missing:
        yield (
            "fail",
            f"there is no route: {some(missing)}",
            "`ip route get ADDRESS from SOURCE`; is it a network of its own for this rail?",
        )
    astray = [
        f"{one.source} to {one.peer} ({one.to}) by {one.netdev}, not {devices[one.device].netdev}"
        for one in looked
        if one.netdev and devices[one.device].netdev and one.netdev not in (devices[one.device].netdev, "lo")
    ]
    if astray:
        yield (
            "warn",
            f"packets leave by another interface than that of the GID: {some(astray)}",
            "a routing rule an address: ip rule add from SOURCE lookup TABLE, and its routes in that table",
        )
    if not looked:
        yield "skip", "no RDMA device has a path to another host whose address is known", ""
    elif not missing and not astray:
        yield "ok", f"the routes to {len(looked)} devices of peers leave by the right interfaces", ""


def _rdma_events(daemon: DaemonFacts, host: HostFacts) -> Findings:
    said = False
    counting = [device for device in daemon.devices if device.rdma_counters is not None]
    for device in counting:
        rdma = device.rdma_counters
        assert rdma is not None
        for what, fix in diagnose(device):
            said = True
            yield "warn", f"{device.name}, in the last {span_text(rdma.recent_seconds)}: {what}", fix
        if rdma.age_seconds is None or rdma.age_seconds > COUNTERS_AGE_LIMIT:
            said = True
            when = "never read" if rdma.age_seconds is None else f"last read {rdma.age_seconds:.0f} s ago"
            yield (
                "warn",
                f"{device.name}: its counters were {when}" + (f": {rdma.gone}" if rdma.gone else ""),
                "is the card there (`rdma link`), and does it answer (`dmesg`)?",
            )
    if not counting:
        yield "skip", "no RDMA device is in use that counts loss and congestion", ""
    elif not said:
        found = [f"{device.name} {events_text(device.rdma_events)}" for device in counting]
        yield "ok", f"no sign of loss lately; since the start: {some(found)}", ""


RDMA_HOST_CHECKS: Final[dict[str, HostCheck]] = {"pyverbs": _pyverbs, "libibverbs": _libibverbs}
"""Checks that need no daemon: without pyverbs it may not even start."""
RDMA_CHECKS: Final[dict[str, DaemonCheck]] = {
    "memlock": _memlock,
    "rdma-devices": _devices,
    "rdma-ports": _ports,
    "rdma-gids": _gids,
    "rdma-mtu": _mtu,
    "rdma-routes": _routes,
    "traffic-class": _traffic_class,
    "rdma-events": _rdma_events,
}
"""The others."""
