# SPDX-License-Identifier: Apache-2.0
"""``dqplb doctor``."""

import os
import socket
from ipaddress import IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from dqplbd.cli.common import EXIT_FAILED, EXIT_UNREACHABLE, JsonOption, connect, emit_json

if TYPE_CHECKING:
    from dqplbd.cli.facts import DaemonFacts, HostFacts, Interface, RdmaDevice, RouteFact

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor", short_help="Check what usually goes wrong.")(doctor)


def doctor(context: typer.Context, as_json: JsonOption = False) -> None:
    """Check what usually goes wrong, and say what to do. Fails when a check fails; warnings do not count."""
    from dqplbd.admin.client import NotReachableError
    from dqplbd.cli.checks import run_checks
    from dqplbd.cli.facts import DaemonFacts, Facts

    client = connect(context)
    try:
        status = client.status()
        daemon = DaemonFacts(
            status,
            client.devices(),
            client.peers(),
            client.paths(),
            client.clients(),
            client.config_view().config,
        )
        facts = Facts(_host_facts(status.client_socket, daemon), daemon)
    except NotReachableError as error:
        facts = Facts(_host_facts(), unreachable=(error.error, error.hint))
    findings = run_checks(facts)
    if as_json:
        emit_json("doctor", findings)
    else:
        from dqplbd.cli.render import Column, Table, print_table

        columns = [
            Column("check", style="bold"),
            Column("result"),
            Column("found", fold=True),
            Column("what to do", fold=True),
        ]
        colours = {"warn": "yellow", "fail": "red", "skip": "dim"}
        print_table(
            Table(
                columns,
                [(one.check, one.level, one.summary, one.fix or "-") for one in findings],
                styles={i: colours[one.level] for i, one in enumerate(findings) if one.level in colours},
            )
        )
    if facts.daemon is None:
        raise typer.Exit(EXIT_UNREACHABLE)
    if any(one.level == "fail" for one in findings):
        raise typer.Exit(EXIT_FAILED)


def _host_facts(client_socket: str | None = None, daemon: "DaemonFacts | None" = None) -> "HostFacts":
    from dqplbd import __version__
    from dqplbd.cli.facts import HostFacts

    try:
        offered = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text(encoding="ascii").split()
    except OSError:
        offered = []
    rdma = _rdma_devices()
    return HostFacts(
        rdma=rdma,
        interfaces=_interfaces(),
        client_socket_error=_attach_error(client_socket) if client_socket is not None else None,
        congestion_controls=offered,
        version=__version__,
        pyverbs=_pyverbs_problem() if rdma else None,
        libibverbs=_libibverbs_error() if rdma else None,
        routes=_routes(daemon) if daemon is not None else (),
    )


def _attach_error(path: str) -> str | None:
    """Why this user cannot connect at the client socket; the connection is closed at once."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as attempt:
        attempt.settimeout(2)
        try:
            attempt.connect(path)
        except OSError as error:
            return error.strerror or str(error)
    return None


def _rdma_devices(root: Path = Path("/sys"), dev: Path = Path("/dev/infiniband")) -> "list[RdmaDevice]":
    """What is in sysfs, and whether it can be opened: in a container the two often differ."""
    from dqplbd.cli.facts import RdmaDevice
    from dqplbd.inventory.verbs import node_error

    try:
        names = sorted(os.listdir(root / "class/infiniband"))
    except OSError:
        return []
    return [RdmaDevice(name, node_error(name, root, dev) or None) for name in names]


def _pyverbs_problem() -> tuple[str, str] | None:
    """Why this interpreter, normally that of the daemon, cannot use pyverbs, and what to do."""
    from dqplbd.inventory.verbs import PyverbsError, load_pyverbs

    try:
        load_pyverbs()
    except PyverbsError as error:
        return error.problem, error.fix
    return None


def _libibverbs_error() -> str | None:
    """Why the library that the daemon loads at run time cannot be loaded."""
    import ctypes

    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        return str(error)
    return None


_MOST_ROUTES: Final = 64


def _routes(daemon: "DaemonFacts") -> "list[RouteFact]":
    """How the kernel would send from RDMA devices to those of peers, for the first of them."""
    from dqplbd.cli.facts import RouteFact
    from dqplbd.inventory.gids import gid_ip
    from dqplbd.inventory.netdev import NetdevError, find_route

    theirs = {(peer.host_id, one.name): one.address for peer in daemon.peers for one in peer.devices}
    mine = {device.name: gid.gid for device in daemon.devices for gid in device.gids if gid.in_use and gid.kind != "ib"}
    found = []
    for path in daemon.paths:
        to = theirs.get((path.peer, path.peer_device))
        if path.device not in mine or to is None or path.peer == daemon.status.host_id:
            continue
        try:
            ours, other = gid_ip(IPv6Address(mine[path.device])), gid_ip(IPv6Address(to))
        except ValueError:  # what a peer says of itself is not believed
            continue
        if ours.version != other.version or other.is_link_local:
            continue
        try:
            route = find_route(str(other), str(ours))
            found.append(RouteFact(path.device, path.peer, str(ours), str(other), route.netdev))
        except NetdevError as error:
            found.append(RouteFact(path.device, path.peer, str(ours), str(other), "", str(error)))
        if len(found) == _MOST_ROUTES:
            break
    return found


def _interfaces() -> "list[Interface]":
    """IPv4 addresses of interfaces that are up; nothing where netlink is not allowed."""
    import ipaddress

    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    from dqplbd.cli.facts import Interface

    found = []
    try:
        with IPRoute() as route:
            names = {
                link["index"]: link.get_attr("IFLA_IFNAME")
                for link in route.get_links()
                if link.get_attr("IFLA_OPERSTATE") in ("UP", "UNKNOWN")
            }
            for entry in route.get_addr(family=socket.AF_INET):
                name, address = names.get(entry["index"]), entry.get_attr("IFA_ADDRESS")
                if name is None or name == "lo" or address is None:
                    continue
                network = ipaddress.ip_network(f"{address}/{entry['prefixlen']}", strict=False)
                if network.prefixlen < 31:
                    found.append(Interface(name, str(network), _arp_ignore(name)))
    except (OSError, NetlinkError):
        return []
    return found


def _arp_ignore(name: str) -> int | None:
    """The stricter of the interface's own setting and that of all, as the kernel applies it (ip-sysctl)."""
    values = []
    for place in ("all", name):
        try:
            values.append(int(Path(f"/proc/sys/net/ipv4/conf/{place}/arp_ignore").read_text(encoding="ascii")))
        except (OSError, ValueError):
            pass
    return max(values, default=None)
