# SPDX-License-Identifier: Apache-2.0
"""The checks of ``dqplb doctor``, each about something that users of such systems stumble over.  Pure.

A check is a function from :class:`Facts` to findings.  It returns at least one, ``ok`` or ``skip`` when there is
nothing to complain about, so that a reader sees what was looked at.  Any other finding says what to do.
"""

import ipaddress
from typing import Final

from dqplbd.admin.model import Device, DoctorFinding, PathClass
from dqplbd.cli.facts import (
    DaemonCheck,
    DaemonFacts,
    Facts,
    Findings,
    HostCheck,
    HostFacts,
    Interface,
    RdmaDevice,
    some,
)
from dqplbd.cli.rdma_checks import RDMA_CHECKS, RDMA_HOST_CHECKS
from dqplbd.config.types import is_loopback, split_host_port
from dqplbd.units import format_bytes, format_ns, format_rate

__all__ = ["CHECKS", "DaemonFacts", "Facts", "HostFacts", "Interface", "RdmaDevice", "run_checks"]

_SHOWN: Final = 4  # of a kind that are named one by one
LOSS_LIMIT: Final = 0.01
FD_LIMIT: Final = 0.8
QUOTA_LIMIT: Final = 0.9
JUMBO_MTU: Final = 4200  # headers are then 2 % of the rate


# --------------------------------------------------------------------------------------------------------- the daemon


def _state(daemon: DaemonFacts, host: HostFacts) -> Findings:
    status = daemon.status
    if status.state == "ready":
        yield "ok", f"ready since {status.uptime_seconds:.0f} s", ""
    elif status.state == "degraded":
        yield "warn", f"degraded: {some(status.reasons) or 'no reason given'}", "mend what the reasons name"
    else:
        yield "warn", f"{status.state}", "wait, and look again; `journalctl -u dqplbd` tells what it is doing"


def _heartbeat(daemon: DaemonFacts, host: HostFacts) -> Findings:
    age = daemon.status.engine.heartbeat_age_seconds
    if age > 5:
        yield "fail", f"the loop that moves data has not moved for {age:.1f} s", "systemctl restart dqplbd; report this"
    else:
        yield "ok", f"the loop that moves data moved {age:.1f} s ago", ""


def _version(daemon: DaemonFacts, host: HostFacts) -> Findings:
    if host.version and daemon.status.version != host.version:
        yield (
            "warn",
            f"the daemon is version {daemon.status.version}, this command line {host.version}",
            "restart the daemon after an update, or use the dqplb that belongs to it",
        )
    else:
        yield "ok", f"daemon and command line are both {daemon.status.version}", ""


def _reload(daemon: DaemonFacts, host: HostFacts) -> Findings:
    config = daemon.status.config
    if not config.last_reload_ok:
        what = f": {config.problems[0].text()}" if config.problems else ""
        yield (
            "warn",
            f"the last reload was refused, the old configuration is in force{what}",
            f"dqplb config check {config.file or 'FILE'}",
        )
    elif config.restart_needed:
        yield "warn", f"changed but not in force: {some(config.restart_needed)}", "systemctl restart dqplbd"
    else:
        yield "ok", f"the configuration in force is that of {config.file or 'the built-in defaults'}", ""


def _exposure(daemon: DaemonFacts, host: HostFacts) -> Findings:
    metrics, peers = daemon.config.get("metrics", {}), daemon.config.get("peers", {})
    said = False
    address = metrics.get("address", "127.0.0.1")
    if metrics.get("enabled", True) and not ipaddress.ip_address(address).is_loopback:
        said = True
        yield (
            "warn",
            f"the metrics are open to whoever reaches {address}:{metrics.get('port')}",
            "set metrics.address to 127.0.0.1, or let a firewall admit only the Prometheus server",
        )
    if peers.get("insecure"):
        said = True
        yield (
            "warn",
            "peers.insecure is true: any machine of the network can pose as a peer",
            "keep it only on a network where every machine may be trusted",
        )
    if not said:
        yield "ok", "neither metrics nor plain host-to-host requests are open to other machines", ""


# ------------------------------------------------------------------------------------------------------------- limits


def _files(daemon: DaemonFacts, host: HostFacts) -> Findings:
    process = daemon.status.process
    fix = "LimitNOFILE=1048576 in the unit (systemctl edit dqplbd), or `ulimit -n` where it is started by hand"
    if process.open_fds > FD_LIMIT * process.nofile_limit:
        yield "fail", f"{process.open_fds} of {process.nofile_limit} file descriptors are open", fix
    elif process.nofile_limit < 4096:
        yield "warn", f"the daemon may open only {process.nofile_limit} file descriptors; each tcp QP takes one", fix
    else:
        yield "ok", f"{process.open_fds} of {process.nofile_limit} file descriptors are open", ""


def _cpus(daemon: DaemonFacts, host: HostFacts) -> Findings:
    cpus = daemon.status.process.cpus
    if cpus < 2:
        yield (
            "warn",
            "the daemon has one CPU: data and control take turns on it",
            "give it two or more: AllowedCPUs= of the unit, or the CPU set of its container",
        )
    else:
        yield "ok", f"the daemon may use {cpus} CPUs", ""


# ------------------------------------------------------------------------------------------------------------ devices


def _devices(daemon: DaemonFacts, host: HostFacts) -> Findings:
    bad = [device for device in daemon.devices if not device.up]
    for device in bad:
        yield (
            "fail",
            f"{device.name} ({device.provider} {device.address or 'without address'}) is down: "
            f"{device.error or device.last_event or 'no reason given'}",
            device.fix or _mend(device),
        )
    flapped = [f"{device.name} ({device.downs} times)" for device in daemon.devices if device.downs and device.up]
    if flapped:
        yield "warn", f"went down since the start: {some(flapped)}", "check cable, transceiver and switch port"
    if not daemon.devices:
        yield "fail", "there is no device", "list at least one under devices"
    elif not bad and not flapped:
        yield "ok", f"{len(daemon.devices)} of {len(daemon.devices)} devices are up", ""


def _mend(device: Device) -> str:
    """What to do about a device that is down, where nobody knows better."""
    if device.state == "failed":
        return "mend what the reason names, or correct devices in the configuration; it is tried again by itself"
    return (
        f"bring its network interface up (`ip link set {device.netdev or 'DEV'} up`); check cable and switch port, or "
        "correct devices in the configuration"
    )


def _addresses(daemon: DaemonFacts, host: HostFacts) -> Findings:
    beyond = [
        peer.host_id or peer.address
        for peer in daemon.peers
        if peer.source != "self" and peer.address is not None and not is_loopback(split_host_port(peer.address)[0])
    ]
    inside = [f"{device.name} ({device.address})" for device in daemon.devices if _loopback(device.address)]
    api = daemon.status.api_address
    if api is not None and is_loopback(split_host_port(api)[0]):
        inside.append(f"the host-to-host API ({api})")
    if beyond and inside:
        yield (
            "warn",
            f"other machines cannot reach {some(inside)}, yet {some(beyond)} is one",
            "set devices[].address and peers.listen to addresses of this host that its peers can reach",
        )
    else:
        yield "ok", "devices and host-to-host API listen where the peers can reach them", ""


def _mtu(daemon: DaemonFacts, host: HostFacts) -> Findings:
    said = False
    mtus = {(peer.host_id, device.name): device.mtu_bytes for peer in daemon.peers for device in peer.devices}
    local = {device.name: device for device in daemon.devices}
    unequal = []
    for path in daemon.paths:
        mine = local[path.device].mtu_bytes if path.device in local else None
        theirs = mtus.get((path.peer, path.peer_device))
        if mine is not None and theirs is not None and mine != theirs:
            unequal.append(f"{path.device} {mine} against {path.peer}/{path.peer_device} {theirs}")
    if unequal:
        said = True
        yield (
            "warn",
            f"MTU of the two ends differ: {some(unequal)}",
            "set the same MTU on both hosts and on all switches between them; until then the smaller one is used",
        )
    small = [
        f"{device.name} ({device.mtu_bytes})"
        for device in daemon.devices
        if device.rdma is None
        and device.mtu_bytes is not None
        and (device.netdev_mtu_bytes or device.mtu_bytes) < JUMBO_MTU
        and not _loopback(device.address)
    ]
    if small:
        said = True
        yield (
            "warn",
            f"small MTU: {some(small)}; headers take about 6 % of the rate",
            f"an MTU of {JUMBO_MTU} or 9000 on hosts and switches",
        )
    if not said:
        yield "ok", "MTUs are large enough and equal at both ends", ""


def _loopback(address: str | None) -> bool:
    if address is None:
        return False
    text = address.rsplit(":", 1)[0].strip("[]")
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False


def _subnets(host: HostFacts) -> Findings:
    by_network: dict[str, list[Interface]] = {}
    for interface in host.interfaces:
        by_network.setdefault(interface.network, []).append(interface)
    said = False
    for network, interfaces in sorted(by_network.items()):
        names = sorted({interface.name for interface in interfaces})
        if len(names) < 2 or all(interface.arp_ignore in (1, 2) for interface in interfaces):
            continue
        said = True
        yield (
            "warn",
            f"{some(names)} are in one subnet {network}: packets can leave and be answered by the wrong one",
            "a subnet of its own for each, or: sysctl -w net.ipv4.conf.all.arp_ignore=1 "
            "net.ipv4.conf.all.arp_announce=2, and a routing rule an address",
        )
    if not said:
        yield "ok", "no two network interfaces share a subnet unguarded", ""


def _reno(host: HostFacts) -> Findings:
    if not host.congestion_controls:
        yield "skip", "the kernel does not say which TCP congestion controls it has", ""
    elif "reno" in host.congestion_controls:
        yield "ok", "TCP congestion control reno is there for the tcp devices", ""
    else:
        yield (
            "warn",
            f"the kernel offers {', '.join(host.congestion_controls)} and not reno, which tcp devices ask for",
            "nothing is broken; bbr on a local network costs up to two thirds of the rate",
        )


# -------------------------------------------------------------------------------------------------------------- peers


def _peers(daemon: DaemonFacts, host: HostFacts) -> Findings:
    bad = [peer for peer in daemon.peers if peer.state in ("down", "refused")]
    for peer in bad[:_SHOWN]:
        refused = peer.state == "refused"
        yield (
            "fail" if refused else "warn",
            f"{peer.host_id or peer.address} is {peer.state}: {peer.reason or 'no reason given'}"
            + (f"; asked {peer.failures} times" if peer.failures > 1 else ""),
            "make the two configurations or versions agree as the reason says"
            if refused
            else f"does dqplbd run there, and can this host reach {peer.address}? It is asked again by itself",
        )
    if len(bad) > _SHOWN:
        yield "warn", f"{len(bad) - _SHOWN} more peers are not reachable", "dqplb peers"
    if not bad:
        yield "ok", f"{daemon.status.peers_up} of {daemon.status.peers} peers are up", ""


def _rails(daemon: DaemonFacts, host: HostFacts) -> Findings:
    mine = {device.rail for device in daemon.devices}
    odd = []
    for peer in daemon.peers:
        theirs = {device.rail for device in peer.devices}
        if mine and peer.host_id != daemon.status.host_id and peer.state == "up" and theirs and theirs != mine:
            odd.append(f"{peer.host_id} has rails {sorted(theirs)}")
    if odd:
        yield (
            "warn",
            f"this host has rails {sorted(mine)}; {some(odd)}",
            "only rails that both have carry data: number them alike (devices[].rail) or mend the missing device",
        )
    else:
        yield "ok", "all reachable peers have the rails of this host", ""


# -------------------------------------------------------------------------------------------------------------- paths


def _mismatch(daemon: DaemonFacts, host: HostFacts) -> Findings:
    odd = [path for path in daemon.paths if path.classification.mismatch]
    if odd:
        named = [
            f"{path.peer} (labels {path.classification.labels_class}, RTT {path.classification.rtt_class})"
            for path in odd
        ]
        yield (
            "warn",
            f"labels and RTT disagree on {len(odd)} paths: {some(named)}",
            "wrong labels, a detour of the route, a standing queue, or the wrong port: dqplb path explain PEER",
        )
    else:
        yield "ok", "labels and RTT nowhere contradict each other", ""


def _unknown(daemon: DaemonFacts, host: HostFacts) -> Findings:
    unknown = [path.peer for path in daemon.paths if path.path_class is PathClass.UNKNOWN]
    if unknown:
        yield (
            "warn",
            f"{len(unknown)} paths have no class: {some(unknown)}",
            "wait for the first measurements, or give hosts a location (host.location, classification.topology_file)",
        )
    else:
        yield "ok", "every path has a class", ""


def _loss(daemon: DaemonFacts, host: HostFacts) -> Findings:
    lossy = [path for path in daemon.paths if (path.estimate.loss_ratio or 0) > LOSS_LIMIT]
    if lossy:
        named = [f"{path.peer} by {path.device} {(path.estimate.loss_ratio or 0) * 100:.3g}%" for path in lossy]
        yield (
            "warn",
            f"probes are lost on {len(lossy)} paths: {some(named)}",
            "look at the port counters (link errors, discards) at both ends, and at the peer's load",
        )
    else:
        yield "ok", f"no path loses more than {LOSS_LIMIT * 100:g}% of its probes", ""


def _silent(daemon: DaemonFacts, host: HostFacts) -> Findings:
    silent = [
        path.peer
        for path in daemon.paths
        if path.estimate.probed and path.estimate.probes_ok == 0 and path.estimate.probes_timeout > 3
    ]
    if silent:
        yield (
            "fail",
            f"no probe was ever answered by {some(silent)}, though the host can be asked",
            "UDP between the devices is filtered: let it pass as TCP does; until then the class's RTT is assumed",
        )
    unsent = [
        f"{path.peer} by {path.device}"
        for path in daemon.paths
        if path.estimate.probed and path.estimate.probes_ok == 0 and path.estimate.probes_send_error > 3
    ]
    if unsent:
        yield (
            "fail",
            f"no probe could be sent to {some(unsent)}",
            "have both devices addresses of one kind and network (`dqplb devices -o wide`, there and here)? is there a "
            "route (`ip route get ADDRESS from OWN`) and a neighbour (`ip neigh`)?",
        )
    if not silent and not unsent:
        yield "ok", "every probed path has answered", ""


def _prober(daemon: DaemonFacts, host: HostFacts) -> Findings:
    said = False
    for device in daemon.devices:
        prober = device.prober
        if prober is None:
            if device.up:
                said = True
                yield (
                    "fail",
                    f"{device.name} has no prober: its paths are not measured, nor those of its peers to it",
                    "the daemon's log says why; on RDMA usually the limit of locked memory; then restart it",
                )
            continue
        if prober.samples_dropped:
            said = True
            yield (
                "warn",
                f"{device.name}: {prober.samples_dropped} samples came faster than they were read",
                "the control plane is short of CPU, or probing.max_probes_per_s is too high for it",
            )
        if prober.refused_token or prober.refused_unknown:
            said = True
            yield (
                "warn",
                f"{device.name}: {prober.refused_token} probes with a wrong token and {prober.refused_unknown} of "
                "unknown senders were not answered",
                "peers that were restarted do that for a moment; if it goes on, find who sends them",
            )
    if not said:
        yield "ok", "probes are answered and read as they should", ""


def _time_stamps(daemon: DaemonFacts, host: HostFacts) -> Findings:
    coarse = [one.name for one in daemon.devices if one.prober is not None and one.prober.time_source == "software"]
    by_rtt = any(path.classification.source == "rtt" for path in daemon.paths)
    if coarse and by_rtt:
        yield (
            "warn",
            f"probes of {some(coarse)} are timed by the program, which adds 2 to 10 us, and RTT decides classes",
            "labels (host.location, classification.topology_file), or classification.thresholds raised by as much",
        )
    else:
        yield "ok", "the time stamps of probes are good enough for the classes", ""


def _emulation(daemon: DaemonFacts, host: HostFacts) -> Findings:
    links = daemon.config.get("emulation", {}).get("links", [])
    if links:
        yield (
            "warn",
            f"{len(links)} emulated links are configured: those paths are slower than they need be, on purpose",
            "in production remove the section emulation",
        )
    else:
        yield "ok", "no path is emulated", ""


def _latency_bound(daemon: DaemonFacts, host: HostFacts) -> Findings:
    bound = [path for path in daemon.paths if path.profile.window_bytes < path.profile.bdp_bytes]
    if bound:
        named = [
            f"{path.peer}: {format_bytes(path.profile.window_bytes)} each {format_ns(path.profile.rtt_ns)} is at most "
            f"{format_rate(min(path.profile.window_bytes * 8e9 / path.profile.rtt_ns, path.profile.rate_bps))} of "
            f"{format_rate(path.profile.rate_bps)} (limited by {path.profile.limited_by})"
            for path in bound
        ]
        yield (
            "warn",
            f"{len(bound)} paths cannot be filled, their window is below the BDP: {some(named)}",
            "buffer: fewer senders at a time, or profiles.incast; pinned or maximum: raise it; see dqplb path explain",
        )
    else:
        yield "ok", "every window covers the BDP of its path", ""


def _stalls(daemon: DaemonFacts, host: HostFacts) -> Findings:
    stalled = [f"{path.peer} ({path.live.stalls})" for path in daemon.paths if path.live.stalls]
    if stalled:
        yield (
            "warn",
            f"outstanding work stood still: {some(stalled)}",
            "the log has the state at the time; compare with the peer's log and the port counters",
        )
    else:
        yield "ok", "no stall since the start", ""


def _failures(daemon: DaemonFacts, host: HostFacts) -> Findings:
    failed = [path for path in daemon.paths if path.live.state == "failed"]
    for path in failed[:_SHOWN]:
        yield (
            "fail",
            f"the VC to {path.peer} by {path.device} failed: {path.live.reason or 'no reason given'}",
            "it is made anew by itself; if that does not help, `dqplb peers` and `dqplb devices` tell what is down",
        )
    if not failed:
        yield "ok", "no VC is broken", ""


def _starved(daemon: DaemonFacts, host: HostFacts) -> Findings:
    waiting = [f"{path.peer} ({path.live.receives_waiting})" for path in daemon.paths if path.live.receives_waiting]
    if waiting:
        yield (
            "warn",
            f"receives wait for a slot: {some(waiting)}",
            "clients post more receives than they need at a time; they go on as earlier ones finish",
        )
    else:
        yield "ok", "no receive waits for a slot", ""


# ------------------------------------------------------------------------------------------------------------ clients


def _client_socket(daemon: DaemonFacts, host: HostFacts) -> Findings:
    if host.client_socket_error is not None:
        yield (
            "warn",
            f"this user cannot attach at {daemon.status.client_socket}: {host.client_socket_error}",
            "add the user to the group of the socket (clients.group), or set clients.mode",
        )
    else:
        yield "ok", f"clients attach at {daemon.status.client_socket}", ""


def _cut(daemon: DaemonFacts, host: HostFacts) -> Findings:
    cut = daemon.status.engine.clients_cut
    if cut:
        yield (
            "warn",
            f"{cut} clients broke the protocol and were cut off",
            "the log names them; is their libdqplb.so of the daemon's version?",
        )
    else:
        yield "ok", "no client was cut off", ""


def _quotas(daemon: DaemonFacts, host: HostFacts) -> Findings:
    full = []
    for client in daemon.clients:
        if client.max_memory_bytes and client.memory_bytes > QUOTA_LIMIT * client.max_memory_bytes:
            used = f"{format_bytes(client.memory_bytes)} of {format_bytes(client.max_memory_bytes)}"
            full.append(f"{client.name} has {used} memory")
        if client.max_flows and client.flows > QUOTA_LIMIT * client.max_flows:
            full.append(f"{client.name} has {client.flows} of {client.max_flows} flows")
    if full:
        yield (
            "warn",
            f"near their limits: {some(full)}",
            "raise clients.max_memory_bytes or clients.max_flows, or have the program free what it does not use",
        )
    else:
        yield "ok", "no client is near its limits", ""


_HOST_CHECKS: Final[dict[str, HostCheck]] = {**RDMA_HOST_CHECKS, "subnets": _subnets, "congestion-control": _reno}
_DAEMON_CHECKS: Final[dict[str, DaemonCheck]] = {
    "state": _state,
    "heartbeat": _heartbeat,
    "version": _version,
    "configuration": _reload,
    "exposure": _exposure,
    "file-descriptors": _files,
    "cpus": _cpus,
    "devices": _devices,
    "addresses": _addresses,
    **RDMA_CHECKS,
    "mtu": _mtu,
    "peers": _peers,
    "rails": _rails,
    "class-mismatch": _mismatch,
    "class-unknown": _unknown,
    "probe-loss": _loss,
    "probe-silence": _silent,
    "prober": _prober,
    "time-stamps": _time_stamps,
    "emulation": _emulation,
    "latency-bound": _latency_bound,
    "vc-failures": _failures,
    "stalls": _stalls,
    "receive-slots": _starved,
    "client-socket": _client_socket,
    "clients-cut": _cut,
    "client-limits": _quotas,
}
CHECKS: Final = ("reachable", *_DAEMON_CHECKS, *_HOST_CHECKS)
"""Names of all checks."""


def run_checks(facts: Facts) -> list[DoctorFinding]:
    """All findings, in the order of :data:`CHECKS`; those that need the daemon are left out when it does not answer."""
    findings: list[DoctorFinding] = []

    def add(check: str, found: Findings) -> None:
        findings.extend(DoctorFinding(check=check, level=level, summary=text, fix=fix) for level, text, fix in found)

    if facts.daemon is None:
        what, fix = facts.unreachable or ("the daemon was not asked", "")
        add("reachable", iter([("fail", what, fix)]))
    else:
        add("reachable", iter([("ok", f"the daemon answers at {facts.daemon.status.admin_socket}", "")]))
        for name, daemon_check in _DAEMON_CHECKS.items():
            add(name, daemon_check(facts.daemon, facts.host))
    for name, host_check in _HOST_CHECKS.items():
        add(name, host_check(facts.host))
    return findings
