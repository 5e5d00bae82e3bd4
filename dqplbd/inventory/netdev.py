# SPDX-License-Identifier: Apache-2.0
"""Network interfaces: which one has an address, whether it is up, its MTU and speed; by netlink and sysfs."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

__all__ = ["Netdev", "NetdevError", "find_netdev", "netdevs_by_address"]

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
    """

    name: str
    index: int
    mtu: int
    up: bool
    speed_bps: int | None


def _speed_bps(name: str, root: Path) -> int | None:
    try:
        mbps = int((root / "class/net" / name / "speed").read_text(encoding="ascii"))
    except (OSError, ValueError):  # EINVAL when the link is down or has no speed
        return None
    return mbps * 1_000_000 if 0 < mbps < 2**31 else None


def _attr(message: Any, name: str) -> Any:
    return dict(message["attrs"]).get(name)


def netdevs_by_address(root: Path = _SYS) -> dict[str, Netdev]:
    """The interfaces by each of their addresses, in the canonical text form without a scope.

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
        )
    result: dict[str, Netdev] = {}
    for address in addresses:
        text = _attr(address, "IFA_LOCAL") or _attr(address, "IFA_ADDRESS")
        device = by_index.get(int(address["index"]))
        if text is None or device is None:
            continue
        result.setdefault(str(ipaddress.ip_address(str(text))), device)
    return result


def find_netdev(address: str, found: dict[str, Netdev]) -> Netdev | None:
    """The interface that an address belongs to; every address of 127.0.0.0/8 is the loopback interface's."""
    ip = ipaddress.ip_address(address.split("%")[0])
    device = found.get(str(ip))
    if device is None and ip.version == 4 and ip.is_loopback:
        device = next((one for text, one in found.items() if ipaddress.ip_address(text).is_loopback), None)
    return device
