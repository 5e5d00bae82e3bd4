# SPDX-License-Identifier: Apache-2.0
"""From the RDMA devices that were found to the devices of ``devices: auto``.  Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from dqplbd.config.models import VerbsDeviceConfig
from dqplbd.inventory.netdev import Netdevs
from dqplbd.inventory.verbs import RdmaDevice, RdmaInventory, RdmaPort

__all__ = ["Discovery", "LeftOut", "discover"]

MAX_DEVICES: Final = 8
_NAME_LENGTH: Final = 31


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A port that is there and not used.

    :ivar port: its name, ``mlx5_0/1``.  :ivar why: the reason.
    """

    port: str
    why: str


@dataclass(frozen=True, slots=True)
class Discovery:
    """The devices of ``devices: auto``, by rail, and what was left out."""

    devices: tuple[VerbsDeviceConfig, ...]
    left_out: tuple[LeftOut, ...]


def _why_not(device: RdmaDevice, port: RdmaPort, patterns: Sequence[str], netdevs: Netdevs, names: set[str]) -> str:
    """Why a port is not used; empty when it is."""
    label = f"{device.name}/{port.number}"
    pattern = next((one for one in patterns if fnmatchcase(label if "/" in one else device.name, one)), None)
    if pattern is not None:
        return f"rdma.exclude has {pattern}"
    if device.function_of in names:
        return f"a virtual function of {device.function_of}: list it under devices to use it"
    if device.transport not in ("", "ib"):
        return f"its transport is {device.transport}, and probes need the datagrams of InfiniBand or RoCE"
    if port.physical == "disabled":
        netdev = netdevs.named(port.netdev)
        if port.link_layer == "infiniband" or netdev is None or not netdev.enabled:
            return "the port is disabled"
    return ""


def _name(device: RdmaDevice, port: RdmaPort, taken: set[str]) -> str:
    """A device name that the configuration could have, and no other port has."""
    suffix = f".{port.number}" if len(device.ports) > 1 else ""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", device.name).lstrip("_.-") or "rdma"
    base = plain[: _NAME_LENGTH - len(suffix) - 2]
    name, again = f"{base}{suffix}", 2
    while name in taken:
        name, again = f"{base}{suffix}-{again}", again + 1
    return name


def discover(inventory: RdmaInventory, exclude: Sequence[str]) -> Discovery:
    """Every RDMA port of this host as a device, its rail being its place among them.

    A port that is down is a device all the same: rails must not depend on which cable was plugged in when the daemon
    started, and it may come up.  Left out is what ``rdma.exclude`` names, what an operator has disabled, virtual
    functions beside their card, and what comes after the eighth.

    :param exclude: patterns of ``rdma.exclude``.
    """
    devices: list[VerbsDeviceConfig] = []
    left_out: list[LeftOut] = []
    names = {one.name for one in inventory.devices}
    taken: set[str] = set()
    for device in inventory.devices:
        for port in device.ports:
            why = _why_not(device, port, exclude, inventory.netdevs, names)
            if not why and len(devices) == MAX_DEVICES:
                why = f"there are more than {MAX_DEVICES} ports: rdma.exclude says which are not wanted"
            if why:
                left_out.append(LeftOut(f"{device.name}/{port.number}", why))
                continue
            name = _name(device, port, taken)
            taken.add(name)
            devices.append(
                VerbsDeviceConfig(
                    name=name, provider="verbs", rdma_device=device.name, port=port.number, rail=len(devices)
                )
            )
    return Discovery(tuple(devices), tuple(left_out))
