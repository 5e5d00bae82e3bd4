# SPDX-License-Identifier: Apache-2.0
"""What the checks of ``dqplb doctor`` look at, and what they give.  Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from dqplbd.admin.model import Client, Device, Path, Peer, Status

__all__ = [
    "DaemonCheck",
    "DaemonFacts",
    "Facts",
    "Findings",
    "HostCheck",
    "HostFacts",
    "Interface",
    "Level",
    "RdmaDevice",
    "RouteFact",
    "some",
]

Level = Literal["ok", "warn", "fail", "skip"]

_SHOWN: Final = 4


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """An RDMA device of this host.

    :ivar error: why its uverbs node cannot be opened; None when it can.
    """

    name: str
    error: str | None


@dataclass(frozen=True, slots=True)
class Interface:
    """An address of a network interface.

    :ivar arp_ignore: sysctl net.ipv4.conf.<name>.arp_ignore; None when it could not be read.
    """

    name: str
    network: str
    arp_ignore: int | None


@dataclass(frozen=True, slots=True)
class RouteFact:
    """How the kernel would send from a device to that of a peer.

    :ivar netdev: interface that it would leave by; empty when there is no route, ``error`` then says why.
    """

    device: str
    peer: str
    source: str
    to: str
    netdev: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What the command line sees of this host by itself.

    :ivar rdma: RDMA devices in sysfs.
    :ivar interfaces: IPv4 addresses of interfaces that are up, loopback left out.
    :ivar client_socket_error: why this user cannot attach at the client socket; None when it can.
    :ivar congestion_controls: what the kernel offers; empty when it could not be read.
    :ivar version: of this command line.
    :ivar pyverbs: why this interpreter cannot use pyverbs, and what to do; None when it can.
    :ivar libibverbs: why the library cannot be loaded; None when it can.
    :ivar routes: from devices to those of peers.
    """

    rdma: Sequence[RdmaDevice] = ()
    interfaces: Sequence[Interface] = ()
    client_socket_error: str | None = None
    congestion_controls: Sequence[str] = ()
    version: str = ""
    pyverbs: tuple[str, str] | None = None
    libibverbs: str | None = None
    routes: Sequence[RouteFact] = ()


@dataclass(frozen=True, slots=True)
class DaemonFacts:
    """What the daemon tells."""

    status: Status
    devices: Sequence[Device]
    peers: Sequence[Peer]
    paths: Sequence[Path]
    clients: Sequence[Client] = ()
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the checks look at.

    :ivar daemon: None when it cannot be reached.
    :ivar unreachable: then, why.
    """

    host: HostFacts
    daemon: DaemonFacts | None = None
    unreachable: tuple[str, str] | None = None


Findings = Iterator[tuple[Level, str, str]]
DaemonCheck = Callable[[DaemonFacts, HostFacts], Findings]
HostCheck = Callable[[HostFacts], Findings]


def some(names: Sequence[str]) -> str:
    """The first few of many names."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
