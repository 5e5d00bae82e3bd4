# SPDX-License-Identifier: Apache-2.0
"""``dqplb doctor``."""

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dqplbd.cli.common import EXIT_FAILED, EXIT_UNREACHABLE, JsonOption, connect, emit_json

if TYPE_CHECKING:
    from dqplbd.cli.checks import HostFacts, Interface, RdmaDevice

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor", short_help="Check what usually goes wrong.")(doctor)


def doctor(context: typer.Context, as_json: JsonOption = False) -> None:
    """Check what usually goes wrong, and say what to do. Fails when a check fails; warnings do not count."""
    from dqplbd.admin.client import NotReachableError
    from dqplbd.cli.checks import DaemonFacts, Facts, run_checks

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
        facts = Facts(_host_facts(status.client_socket), daemon)
    except NotReachableError as error:
        facts = Facts(_host_facts(None), unreachable=(error.error, error.hint))
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


def _host_facts(client_socket: str | None) -> "HostFacts":
    from dqplbd import __version__
    from dqplbd.cli.checks import HostFacts

    try:
        offered = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text(encoding="ascii").split()
    except OSError:
        offered = []
    return HostFacts(
        rdma=_rdma_devices(),
        interfaces=_interfaces(),
        client_socket_error=_attach_error(client_socket) if client_socket is not None else None,
        congestion_controls=offered,
        version=__version__,
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


def _rdma_devices(
    root: Path = Path("/sys/class/infiniband"), dev: Path = Path("/dev/infiniband")
) -> "list[RdmaDevice]":
    """What is in sysfs, and whether it can be opened: in a container the two often differ."""
    from dqplbd.cli.checks import RdmaDevice

    found = []
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return []
    for name in names:
        error: str | None = None
        try:
            nodes = sorted(os.listdir(root / name / "device" / "infiniband_verbs"))
        except OSError:
            nodes = []
        if not nodes:
            error = "it has no uverbs node: is the module ib_uverbs loaded?"
        else:
            try:
                os.close(os.open(dev / nodes[0], os.O_RDWR | os.O_CLOEXEC))
            except OSError as cause:
                error = f"{dev / nodes[0]}: {cause.strerror}"
        found.append(RdmaDevice(name, error))
    return found


def _interfaces() -> "list[Interface]":
    """IPv4 addresses of interfaces that are up; nothing where netlink is not allowed."""
    import ipaddress

    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    from dqplbd.cli.checks import Interface

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
