# SPDX-License-Identifier: Apache-2.0
"""CPUs and NUMA nodes: what the kernel says, within what this process may use.

A failure to learn or to use any of it is never more than a warning: in containers much of it is hidden.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["SPIN_CPUS", "choose_cpu", "netdev_numa_node", "netdev_pci_path", "node_cpus", "parse_cpu_list", "spin_us"]

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


def netdev_numa_node(name: str, root: Path = _SYS) -> int | None:
    """The NUMA node that an interface's card is attached to; None for a virtual one, or when it is not said."""
    try:
        node = int((root / "class/net" / name / "device/numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def netdev_pci_path(name: str, root: Path = _SYS) -> str:
    """The sysfs path of an interface's card; empty for a virtual one."""
    try:
        return str((root / "class/net" / name / "device").resolve(strict=True))
    except OSError:
        return ""


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
