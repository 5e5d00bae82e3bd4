# SPDX-License-Identifier: Apache-2.0
"""The prober of a device, by path: which paths it answers and probes, and what it measured on them.

The prober itself is C (``native/probe``); this keeps its targets in step with the paths, and turns its numbers back
into paths.
"""

from collections.abc import Iterator
from typing import Any, Final, Generic, TypeVar

from dqplbd.engine.engine import Engine, Prober, ProbeResult, ProberStats, ProbeSample
from dqplbd.probing import estimate

__all__ = ["RESULTS", "DeviceProber"]

MAX_TARGETS: Final = 65536

RESULTS: Final = {
    ProbeResult.OK: estimate.ProbeResult.OK,
    ProbeResult.TIMEOUT: estimate.ProbeResult.TIMEOUT,
    ProbeResult.SEND_ERROR: estimate.ProbeResult.SEND_ERROR,
    ProbeResult.INVALID: estimate.ProbeResult.INVALID,
}

P = TypeVar("P")


class _Target(Generic[P]):
    __slots__ = ("setting", "what")

    def __init__(self, what: P, setting: tuple[object, ...]) -> None:
        self.what = what
        self.setting = setting


class DeviceProber(Generic[P]):
    """The targets of one prober, each named by whatever stands for a path with the caller.

    :param token: that peers must show.
    """

    def __init__(self, engine: Engine, device: int, token: int, *, timeout_ns: int, answers_per_s: int) -> None:
        """:raises EngineError: it cannot be started."""
        self.token = token
        self._prober: Prober = engine.prober_start(
            device, token, timeout_ns=timeout_ns, answers_per_s=answers_per_s, max_targets=MAX_TARGETS
        )
        self.endpoint = self._prober.endpoint()
        self.time_source = self._prober.time_source()
        self._targets: dict[int, _Target[P]] = {}
        self._ids: dict[P, int] = {}
        self._free: list[int] = []
        self._resting: list[int] = []  # their samples may still wait in the ring
        self._next = 0

    def stop(self) -> None:
        """End the prober."""
        self._prober.stop()

    def fileno(self) -> int:
        """Readable when samples wait."""
        return self._prober.fileno()

    def stats(self) -> ProberStats:
        """Its counters."""
        return self._prober.stats()

    def __len__(self) -> int:
        return len(self._ids)

    def set(
        self, what: P, endpoint: bytes, token: int, flow_label: int, link: Any, interval_ns: int, phase_ns: int
    ) -> None:
        """Answer a path's probes, and probe it every ``interval_ns``, 0 for not at all; does nothing when it is so.

        :raises EngineError: the prober refuses, or has no room.
        """
        number = self._ids.get(what)
        setting = (endpoint, token, flow_label, link, interval_ns)
        if number is not None and self._targets[number].setting == setting:
            return
        fresh = number is None
        if number is None:
            number = self._free[-1] if self._free else self._next
        self._prober.set_target(number, endpoint, token, link, interval_ns, phase_ns, flow_label)
        if fresh and self._free:
            self._free.pop()
        elif fresh:
            self._next += 1
        self._ids[what] = number
        self._targets[number] = _Target(what, setting)

    def remove(self, what: P) -> None:
        """Forget a path; its link is used no more afterwards.  An unknown one is no error."""
        number = self._ids.pop(what, None)
        if number is not None:
            del self._targets[number]
            self._resting.append(number)
            self._prober.remove_target(number)

    def once(self, what: P) -> None:
        """One extra probe of a path now.  :raises KeyError: unknown.  :raises EngineError: it cannot be sent."""
        self._prober.once(self._ids[what])

    def drain(self) -> Iterator[tuple[P, ProbeSample]]:
        """What was measured since the last call, oldest first."""
        for sample in self._prober.drain():
            target = self._targets.get(sample.target)
            if target is not None:
                yield target.what, sample
        self._free += self._resting
        self._resting.clear()
