# SPDX-License-Identifier: Apache-2.0
"""CPUs, NUMA nodes, and what sits near on PCI: what the kernel says, within what this process may use.

A failure to learn or to use any of it is never more than a warning: in containers much of it is hidden.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

__all__ = [
    "SPIN_CPUS",
    "Gpu",
    "PciRelation",
    "choose_cpu",
    "device_numa_node",
    "device_pci_path",
    "nearest_gpus",
    "netdev_numa_node",
    "netdev_pci_path",
    "node_cpus",
    "parse_cpu_list",
    "pci_address",
    "spin_us",
]

_SYS: Final = Path("/sys")
SPIN_CPUS: Final = 4
"""With fewer CPUs the engine does not spin: engine, client and kernel would take turns by whole time slices."""


def parse_cpu_list(text: str) -> set[int]:
    """``0-3,8,10-11`` as numbers; the format of cpuset(7).

    :raises ValueError: not of that form, or a number beyond 65535.
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if not part:
            continue
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip())
        if match is None:
            raise ValueError(f"{part!r} is no range of CPU numbers")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last > 65535:
            raise ValueError(f"{part!r} is no range of CPU numbers of 0..65535")
        cpus.update(range(first, last + 1))
    return cpus


def node_cpus(node: int, root: Path = _SYS) -> set[int]:
    """The CPUs of a NUMA node; empty when the kernel does not say."""
    try:
        return parse_cpu_list((root / f"devices/system/node/node{node}/cpulist").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return set()


def device_numa_node(sysfs: Path) -> int | None:
    """The NUMA node of the card behind a class device such as ``/sys/class/infiniband/mlx5_0``.

    :returns: None for a virtual one, or when it is not said.
    """
    try:
        node = int((sysfs / "device/numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def device_pci_path(sysfs: Path) -> str:
    """The sysfs path of the card behind a class device; empty for a virtual one."""
    try:
        return str((sysfs / "device").resolve(strict=True))
    except OSError:
        return ""


def netdev_numa_node(name: str, root: Path = _SYS) -> int | None:
    """The NUMA node that an interface's card is attached to; None for a virtual one, or when it is not said."""
    return device_numa_node(root / "class/net" / name)


def netdev_pci_path(name: str, root: Path = _SYS) -> str:
    """The sysfs path of an interface's card; empty for a virtual one."""
    return device_pci_path(root / "class/net" / name)


# -- PCI

_PCI_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_GPU_VENDORS: Final = {0x10DE: "nvidia", 0x1002: "amd"}
_GPU_CLASSES: Final = {0x0300, 0x0302, 0x0380, 0x1200}  # VGA, 3D, other display controller; processing accelerator


class PciRelation(StrEnum):
    """The nearest thing that two cards have in common, the nearest first."""

    SWITCH = "switch"  # a PCI bridge: their traffic need not reach the CPU
    HOST_BRIDGE = "host bridge"
    NUMA_NODE = "numa node"
    SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as seen from another card.

    :ivar address: on PCI, such as ``0000:3b:00.0``.
    """

    address: str
    vendor: str
    relation: PciRelation


def pci_address(path: str) -> str:
    """The PCI address that a sysfs path of a card ends with; empty when it does not."""
    last = path.rpartition("/")[2]
    return last if _PCI_ADDRESS.fullmatch(last) else ""


def _pci_steps(path: str) -> list[str]:
    """Host bridge, bridges and the card itself, as a sysfs path names them."""
    parts = path.split("/")
    begin = next((i for i, part in enumerate(parts) if part.startswith("pci")), len(parts))
    return parts[begin:]


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"), 0)
    except (OSError, ValueError):
        return None


def _relation(path: str, other: str) -> tuple[PciRelation, int]:
    """How near two cards are, and how many steps from the host bridge they share."""
    common = 0
    for mine, theirs in zip(_pci_steps(path)[:-1], _pci_steps(other)[:-1], strict=False):
        if mine != theirs:
            break
        common += 1
    if common > 1:
        return PciRelation.SWITCH, common
    if common == 1:
        return PciRelation.HOST_BRIDGE, common
    nodes = {_number(Path(one) / "numa_node") for one in (path, other)}
    return (PciRelation.NUMA_NODE if len(nodes) == 1 and nodes != {None} and nodes != {-1} else PciRelation.SYSTEM), 0


def nearest_gpus(path: str, root: Path = _SYS) -> list[Gpu]:
    """The GPUs nearest to a card, by the PCI bridges that they share; all that are equally near.

    :param path: sysfs path of the card; empty gives none.
    :returns: in the order of their PCI addresses; empty also where PCI cannot be seen.
    """
    if not path:
        return []
    found: list[tuple[tuple[int, int], Gpu]] = []
    order = list(PciRelation)
    try:
        cards = sorted((root / "bus/pci/devices").iterdir())
    except OSError:
        return []
    for card in cards:
        vendor = _GPU_VENDORS.get(_number(card / "vendor") or 0)
        kind = _number(card / "class")
        if vendor is None or kind is None or kind >> 8 not in _GPU_CLASSES:
            continue
        try:
            other = str(card.resolve(strict=True))
        except OSError:
            continue
        relation, common = _relation(path, other)
        found.append(((order.index(relation), -common), Gpu(card.name, vendor, relation)))
    nearest = min((rank for rank, _ in found), default=None)
    return [gpu for rank, gpu in found if rank == nearest]


# -- CPUs of the engine


def choose_cpu(wanted: Sequence[int] | None, allowed: set[int] | None = None) -> tuple[int, str]:
    """The CPU to pin the engine to.

    It is pinned only where the configuration says so: several daemons, or a daemon and its clients, pinned to one CPU
    by the same rule would be worse than none pinned.

    :param wanted: ``engine.cpus``.
    :param allowed: CPUs of this process; by default asked for.
    :returns: (CPU or -1 for any, a warning or an empty text).
    """
    if not wanted:
        return -1, ""
    mine = os.sched_getaffinity(0) if allowed is None else allowed
    for cpu in wanted:
        if cpu in mine:
            return cpu, ""
    return (
        -1,
        f"engine.cpus {list(wanted)} has no CPU that this process may use ({sorted(mine)}): the engine is not pinned",
    )


def spin_us(spin_ns: int, cpus: int) -> int:
    """How long the engine may spin, in microseconds: as configured, but not at all on a small machine."""
    return -(-spin_ns // 1000) if cpus >= SPIN_CPUS else 0
