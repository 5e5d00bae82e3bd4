# SPDX-License-Identifier: Apache-2.0
"""Network interfaces: addresses, state, MTU and speed, routes, and word of their changes; by netlink and sysfs."""

import asyncio
import ipaddress
import logging
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

__all__ = ["Netdev", "NetdevError", "NetdevMonitor", "Netdevs", "Route", "find_route", "read_netdevs"]

log = logging.getLogger(__name__)

_SYS: Final = Path("/sys")
_IFF_UP: Final = 0x1  # netdevice(7)
_IFF_RUNNING: Final = 0x40


class NetdevError(Exception):
    """The kernel cannot be asked; the text says why."""


@dataclass(frozen=True, slots=True)
class Netdev:
    """An interface.

    :ivar name: as in ``ip link``.  :ivar index: its number.
    :ivar mtu: bytes of the largest packet.
    :ivar up: administratively up, and its link works.
    :ivar speed_bps: bits a second of its link; None where there is none, as for loopback.
    :ivar enabled: administratively up.
    """

    name: str
    index: int
    mtu: int
    up: bool
    speed_bps: int | None
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class Netdevs:
    """All interfaces of this host at one time.

    :ivar by_index: the interfaces by their numbers.
    :ivar by_address: the interfaces by each of their addresses, in the canonical text form without a scope.
    """

    by_index: Mapping[int, Netdev] = field(default_factory=dict)
    by_address: Mapping[str, Netdev] = field(default_factory=dict)

    def named(self, name: str) -> Netdev | None:
        """The interface of that name."""
        return next((one for one in self.by_index.values() if one.name == name), None)

    def with_address(self, address: str) -> Netdev | None:
        """The interface that an address belongs to; every address of 127.0.0.0/8 is the loopback interface's.

        :param address: IPv4 or IPv6; what follows a ``%`` names the interface.
        """
        text, _, scope = address.partition("%")
        if scope:
            return self.named(scope)
        ip = ipaddress.ip_address(text)
        device = self.by_address.get(str(ip))
        if device is None and ip.version == 4 and ip.is_loopback:
            device = next(
                (one for other, one in self.by_address.items() if ipaddress.ip_address(other).is_loopback), None
            )
        return device

    def addresses_of(self, name: str) -> list[str]:
        """The addresses of an interface, IPv4 first."""
        found = [text for text, device in self.by_address.items() if device.name == name]
        return sorted(found, key=lambda text: ipaddress.ip_address(text).version)


def _speed_bps(name: str, root: Path) -> int | None:
    try:
        mbps = int((root / "class/net" / name / "speed").read_text(encoding="ascii"))
    except (OSError, ValueError):  # EINVAL when the link is down or has no speed
        return None
    return mbps * 1_000_000 if 0 < mbps < 2**31 else None


def _attr(message: Any, name: str) -> Any:
    return dict(message["attrs"]).get(name)


def read_netdevs(root: Path = _SYS) -> Netdevs:
    """The interfaces now.

    Blocks for as long as the kernel takes; not for an event loop's thread.

    :raises NetdevError: netlink cannot be used.
    """
    try:
        with IPRoute() as route:
            links = list(route.get_links())
            addresses = list(route.get_addr())
    except (OSError, NetlinkError) as error:
        raise NetdevError(f"interfaces cannot be listed: {error}") from None
    by_index: dict[int, Netdev] = {}
    for link in links:
        name = str(_attr(link, "IFLA_IFNAME"))
        flags = int(link["flags"])
        by_index[int(link["index"])] = Netdev(
            name,
            int(link["index"]),
            int(_attr(link, "IFLA_MTU") or 0),
            bool(flags & _IFF_UP and flags & _IFF_RUNNING),
            _speed_bps(name, root),
            bool(flags & _IFF_UP),
        )
    by_address: dict[str, Netdev] = {}
    for address in addresses:
        text = _attr(address, "IFA_LOCAL") or _attr(address, "IFA_ADDRESS")
        device = by_index.get(int(address["index"]))
        if text is None or device is None:
            continue
        by_address.setdefault(str(ipaddress.ip_address(str(text))), device)
    return Netdevs(by_index, by_address)


# --------------------------------------------------------------------------------------------------------------- routes


@dataclass(frozen=True, slots=True)
class Route:
    """How the kernel would send to an address.

    :ivar netdev: interface that it leaves by.  :ivar gateway: next router; empty when the other end is on the link.
    """

    netdev: str
    gateway: str


def find_route(to: str, source: str) -> Route:
    """The route from a local address to another one, by all rules of the kernel.

    Blocks for as long as the kernel takes; not for an event loop's thread.

    :param to, source: addresses of one family, without scopes.
    :raises NetdevError: there is none, or netlink cannot be used.
    """
    try:
        with IPRoute() as route:
            for answer in route.route("get", dst=to, src=source):
                index = _attr(answer, "RTA_OIF")
                if index is None:
                    continue
                links = list(route.get_links(int(index)))
                name = str(_attr(links[0], "IFLA_IFNAME")) if links else str(index)
                return Route(name, str(_attr(answer, "RTA_GATEWAY") or ""))
    except (OSError, NetlinkError) as error:
        raise NetdevError(f"no route from {source} to {to}: {error}") from None
    raise NetdevError(f"no route from {source} to {to}")


# -------------------------------------------------------------------------------------------------------------- changes

_GROUPS: Final = 0x1 | 0x10 | 0x100  # RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR: rtnetlink(7)
_RECEIVE_BYTES: Final = 1 << 20
_HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, sequence, port: netlink(7)
_CHANGES: Final = range(16, 22)  # RTM_NEWLINK .. RTM_DELADDR: rtnetlink(7)


def tells_change(data: bytes) -> bool:
    """Whether a netlink datagram tells of a link or an address; what is cut off or unknown does not."""
    while len(data) >= _HEADER.size:
        length, kind, *_ = _HEADER.unpack_from(data)
        if kind in _CHANGES:
            return True
        if length < _HEADER.size:
            return False
        data = data[(length + 3) & ~3 :]
    return False


class NetdevMonitor:
    """Says that some link or address changed, soon after it did.  What is now, :func:`read_netdevs` tells.

    A burst of changes, such as the start of a hundred containers, is told once.  Belongs to one event loop.

    :param changed: called on the loop.
    :param settle_s: time after a change until it is told.
    """

    def __init__(self, changed: Callable[[], object], settle_s: float = 0.2) -> None:
        self._changed = changed
        self._settle_s = settle_s
        self._socket: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to listen.  :raises NetdevError: netlink cannot be used."""
        kind = socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        try:
            self._socket = socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE)
            self._socket.bind((0, _GROUPS))
        except OSError as error:
            self.stop()
            raise NetdevError(f"changes of interfaces cannot be followed: {error}") from None
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._readable)

    def stop(self) -> None:
        """Listen no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._socket is not None:
            if self._socket.getsockname()[1]:
                asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _readable(self) -> None:
        assert self._socket is not None, "there is no reader without a socket"
        told = False
        while True:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                # ENOBUFS: more happened than there was room for, so something did.
                log.debug("changes of interfaces were lost: %s", error)
                told = True
                continue
            told = told or tells_change(data)
        if told and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._settle_s, self._tell)

    def _tell(self) -> None:
        self._timer = None
        self._changed()
