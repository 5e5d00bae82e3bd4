# SPDX-License-Identifier: Apache-2.0
"""Events that RDMA devices count by themselves: retransmissions, congestion marks, missing receives; from sysfs.

The kernel has a file a counter, ``/sys/class/infiniband/<device>/ports/<port>/{hw_counters,counters}/<name>``.  Any of
them can be missing, refuse, or hold a text.  So each is read by itself, and one that cannot be read is named and costs
nothing but itself.

Reading one may ask the firmware of the card, which may take long.  So a thread of its own reads them on a timer, no
more often than the kernel asks the card (``hw_counters/lifespan``); whoever wants the numbers gets the last ones.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dqplbd.inventory.rdma_drivers import STANDARD, Kind, Source, driver_name, driver_sources
from dqplbd.logs import fields

__all__ = ["PortCounters", "PortEvents", "RdmaCounters", "gained", "parse_counter"]

log = logging.getLogger(__name__)

ROOT: Final = Path("/sys/class/infiniband")
INTERVAL_S: Final = 5.0
RECENT_S: Final = 300.0
"""What "lately" means for events: long enough for what comes in bursts, short enough to be about now."""
_KEEP_S: Final = 10.0
_STOP_S: Final = 1.0
_DIGITS: Final = 20  # of 2^64 - 1
_MOST: Final = 64  # bytes of a file that are looked at
_NO_GUID: Final = frozenset(("", "0000:0000:0000:0000"))


def parse_counter(data: bytes) -> int:
    """The number in a counter file.

    :returns: 0..2^64-1.
    :raises ValueError: it is no such number, as in ``N/A (no PMA)``; the text shows it.
    """
    text = data.strip(b" \t\r\n\0")
    if text.isdigit() and len(text) <= _DIGITS:
        value = int(text)
        if value < 2**64:
            return value
    shown = text[:_DIGITS].decode("ascii", "backslashreplace")
    raise ValueError(f"holds {shown!r} and no count" if text else "is empty")


def gained(old: int, new: int, wraps: bool) -> int:
    """What a counter gained between two readings.

    A 32-bit counter that fell by more than 2^31 went round; any other that fell was set to 0 in between.

    :param wraps: it is 32 bits wide in the device.
    """
    if new >= old:
        return new - old
    if wraps and 2**31 < old - new <= 2**32:
        return 2**32 - (old - new)
    return new


def _read(path: Path) -> bytes:
    """The begin of a file.  :raises OSError: it cannot be read."""
    # Unbuffered: a buffered reader would ask the driver a second time to see the end.
    with path.open("rb", buffering=0) as file:
        return file.read(_MOST) or b""


def _text(path: Path) -> str:
    """The text of a file, empty when there is none."""
    try:
        return _read(path).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _driver(device: Path) -> str:
    """The name of a device's driver, which its own name does not tell: it may have been given any."""
    # Soft-RoCE tells by this file which interface it is on.  Older kernels give it the driver of that interface's card.
    if (device / "parent").is_file():
        return driver_name("rdma_rxe")
    try:
        return driver_name((device / "device/driver").resolve(strict=True).name)
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class PortEvents:
    """What is known of a port's events.

    :ivar rdma_device: its name now; :ivar driver: as in :data:`DRIVERS`, empty when not known.
    :ivar total: events since the port was first looked at, by kind; kinds that the device does not count are left out.
    :ivar recent: those of the last ``recent_s`` seconds, at most :data:`RECENT_S`.
    :ivar read_s: when they were last read, ``time.monotonic()``; None when they never were.
    :ivar unreadable: files that are there and cannot be read, with the reason.
    :ivar gone: why there is nothing to read any more; empty when there is.
    """

    rdma_device: str
    driver: str = ""
    total: Mapping[Kind, int] = field(default_factory=dict)
    recent: Mapping[Kind, int] = field(default_factory=dict)
    recent_s: float = 0.0
    read_s: float | None = None
    unreadable: Mapping[str, str] = field(default_factory=dict)
    gone: str = ""


class PortCounters:
    """The counters of one port.  Belongs to one thread.

    :param rdma_device: name of the RDMA device, such as ``mlx5_0``; it is followed when the device is renamed.
    :param port: its port, from 1.
    """

    def __init__(self, rdma_device: str, port: int, root: Path = ROOT) -> None:
        self._root = root
        self._name = rdma_device
        self._port = port
        self._guid = ""
        self._driver = ""
        self._life = 0
        self._lifespan_s = 0.0
        self._next_s = 0.0
        self._read_s: float | None = None
        # Folders are below that of the device, which may be renamed.
        self._sources: tuple[tuple[tuple[str, ...], Source], ...] = ()
        self._chosen: dict[Source, str] = {}
        self._last: dict[Source, int] = {}
        self._total: dict[Kind, int] = {}
        self._history: deque[tuple[float, dict[Kind, int]]] = deque()
        self.events = PortEvents(rdma_device)
        """As last read; replaced, never changed."""

    def read(self, now_s: float) -> None:
        """Read all counters, unless the kernel would only repeat its last answer.

        :param now_s: ``time.monotonic()``.
        """
        if now_s < self._next_s:
            return
        device = self._find()
        port = f"ports/{self._port}"
        try:
            life = (device / port).stat().st_ino
            if life != self._life:
                self._begin(device, port, life)
        except OSError as error:
            gone = f"{device / port}: {error.strerror}"
            if gone != self.events.gone:
                log.warning("RDMA device %s has no counters: %s", self._name, gone)
            self._life = 0
            self._publish(now_s, {}, gone)
            return
        unreadable: dict[str, str] = {}
        for folders, source in self._sources:
            self._count(device, folders, source, unreadable)
        if unreadable.keys() - self.events.unreadable.keys():
            log.info("some counters of RDMA device %s cannot be read: %s", self._name, unreadable)
        self._read_s = now_s
        self._next_s = now_s + self._lifespan_s
        self._publish(now_s, unreadable, "")

    def _find(self) -> Path:
        """The folder of the device, which is the one with its GUID when there is another one of its name, or none."""
        device = self._root / self._name
        guid = _text(device / "node_guid")
        if guid == self._guid:
            return device
        if self._guid not in _NO_GUID:
            try:
                others = sorted(os.listdir(self._root))
            except OSError:
                others = []
            for name in others:
                if _text(self._root / name / "node_guid") == self._guid:
                    log.info("RDMA device %s is now named %s", self._name, name)
                    self._name = name
                    return self._root / name
        if guid:
            self._guid = guid
        return device

    def _begin(self, device: Path, port: str, life: int) -> None:
        """Look at a device that was not there before, also when one of its name was.

        Its counters may or may not have been set to 0, so what they hold is where counting starts.

        :raises OSError: it goes away meanwhile.
        """
        self._driver = _driver(device)
        folders = [f"{port}/hw_counters"]
        if len(os.listdir(device / "ports")) == 1:
            folders.append("hw_counters")  # of the whole device: as good where it has one port
        lifespans = [_text(device / folder / "lifespan") for folder in folders]
        self._lifespan_s = max(int(ms) / 1000 if ms.isdecimal() and len(ms) < 6 else 0.0 for ms in lifespans)
        special = [(tuple(folders), source) for source in driver_sources(self._driver)]
        self._sources = (*special, *(((f"{port}/counters",), source) for source in STANDARD))
        self._chosen.clear()
        self._last.clear()
        self._life = life

    def _count(self, device: Path, folders: tuple[str, ...], source: Source, unreadable: dict[str, str]) -> None:
        """Take in what a counter gained."""
        chosen = self._chosen.get(source)
        files = [f"{folder}/{name}" for name in source.files for folder in folders] if chosen is None else [chosen]
        for file in files:
            name = file.rsplit("/", 1)[1]
            try:
                value = parse_counter(_read(device / file))
            except FileNotFoundError:
                continue
            except OSError as error:
                unreadable[name] = error.strerror or str(error)
                continue
            except ValueError as error:
                unreadable[name] = str(error)
                continue
            self._chosen[source] = file
            more = gained(self._last.get(source, value), value, source.wraps)
            self._last[source] = value
            self._total[source.kind] = self._total.get(source.kind, 0) + more
            return

    def _publish(self, now_s: float, unreadable: dict[str, str], gone: str) -> None:
        history = self._history
        if not history or now_s - history[-1][0] >= _KEEP_S:
            history.append((now_s, self._total.copy()))
        while len(history) > 1 and now_s - history[0][0] > RECENT_S:
            history.popleft()
        since_s, then = history[0]
        self.events = PortEvents(
            self._name,
            self._driver,
            self._total.copy(),
            {kind: count - then.get(kind, 0) for kind, count in self._total.items()},
            now_s - since_s,
            self._read_s,
            unreadable,
            gone,
        )


class RdmaCounters:
    """Reads the counters of all RDMA devices that are in use, in a thread of its own.

    The thread begins with the first device.  It holds up nobody who ends: where a card does not answer, a thread can
    wait for it for a minute.

    :param root: folder of the kernel with all RDMA devices.
    :param interval_s: time between two readings.
    """

    def __init__(self, root: Path = ROOT, interval_s: float = INTERVAL_S) -> None:
        self._root = root
        self._interval_s = interval_s
        self._wanted: dict[str, tuple[str, int]] = {}
        self._ports: dict[str, tuple[tuple[str, int], PortCounters]] = {}
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def watch(self, wanted: Mapping[str, tuple[str, int]]) -> None:
        """Read the counters of these ports from now on, and of no others.

        :param wanted: (name of the RDMA device, port) by name of the device.
        """
        if wanted == self._wanted or self._stopping:
            return
        self._wanted = dict(wanted)
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rdma-counters", daemon=True)
            self._thread.start()

    def events(self, device: str) -> PortEvents | None:
        """What was last read; None for a device that is not watched, or not yet.  From any thread, at once."""
        found = self._ports.get(device)
        return found[1].events if found is not None else None

    def stop(self) -> None:
        """End the thread, or leave it alone where it waits for a card."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        failed = False
        while not self._stopping:
            self._wake.clear()
            wanted = self._wanted
            kept = {name: one for name, one in self._ports.items() if wanted.get(name) == one[0]}
            made = {
                name: (place, PortCounters(*place, root=self._root))
                for name, place in wanted.items()
                if name not in kept
            }
            self._ports = kept | made
            for name, (_, port) in self._ports.items():
                try:
                    port.read(time.monotonic())
                except Exception:
                    # Data goes on whether or not its events can be counted; the age of the reading shows it.
                    if not failed:
                        log.exception("counters of a device cannot be read", extra=fields(device=name))
                    failed = True
            self._wake.wait(self._interval_s)
