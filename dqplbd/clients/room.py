# SPDX-License-Identifier: Apache-2.0
"""How much memory this machine can still give to clients.

The daemon makes every page of a client's memory exist before it hands it out.  When there are not enough, the kernel
does not refuse: it ends a process, and that may be the daemon.  So what is there is looked at first: ``MemAvailable``
of proc_meminfo(5), and the limits of the control group of this process and of those above it (control group v2,
memory.max, memory.current and memory.stat of the kernel's admin-guide/cgroup-v2).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

__all__ = ["RoomError", "RoomKeeper", "available_bytes"]

_KEEP: Final = 8
"""One part in so many of what is available is left to others."""


class RoomError(Exception):
    """There is not enough memory; the text names both numbers."""


def _meminfo(text: str) -> int | None:
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _group_room(folder: Path) -> int | None:
    """What the control group in ``folder`` can still take; None without a limit."""
    limit = (folder / "memory.max").read_text().strip()
    if limit == "max":
        return None
    used = int((folder / "memory.current").read_text())
    for line in (folder / "memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            used -= int(line.split()[1])  # page cache that goes when it must
    return max(0, int(limit) - used)


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that could be allocated now without anything being ended for it; None when the kernel does not tell."""
    rooms: list[int] = []
    with suppress(OSError, ValueError, IndexError):
        room = _meminfo((proc / "meminfo").read_text())
        if room is not None:
            rooms.append(room)
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            if not line.startswith("0::/"):
                continue
            folder = groups / line[4:].strip("/")
            while folder == groups or groups in folder.parents:
                with suppress(OSError, ValueError, IndexError):
                    room = _group_room(folder)
                    if room is not None:
                        rooms.append(room)
                folder = folder.parent
    return min(rooms) if rooms else None


class RoomKeeper:
    """Lets memory be allocated while there is enough; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0

    @contextmanager
    def take(self, size: int) -> Iterator[None]:
        """Allocate ``size`` bytes within.  :raises RoomError: there are not so many."""
        with self._lock:
            available = available_bytes()
            if available is not None:
                room = max(0, available - self._under_way)
                room -= room // _KEEP
                if size > room:
                    raise RoomError(
                        f"memory: {size} bytes asked for, this machine can give {room} now ({available} are available "
                        "to the daemon, some of them are kept for others): free some, or raise the memory limit of "
                        "its service"
                    )
            self._under_way += size
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= size
