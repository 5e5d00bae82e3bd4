# SPDX-License-Identifier: Apache-2.0
"""The only wrapper of the compiled module ``dqplbd.simulation._sim``: typed values in, typed values out.

One :class:`Simulator` is one job: make it, add messages, run it, read what was measured.  It runs in the caller's
thread and releases the interpreter lock; between two pieces of a run the interpreter gets a look at signals.  Units:
bytes, ns, bits a second.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from dqplbd.simulation._sim import ffi, lib
from dqplbd.simulation.senders import CLASSES, SenderProfile
from dqplbd.simulation.workloads import Message
from dqplbd.topology.location import PathClass

__all__ = [
    "FabricSettings",
    "MessageTimes",
    "PortStats",
    "Series",
    "SimulationError",
    "Simulator",
    "SwitchStats",
    "Totals",
]

_PIECE: Final = 2_000_000  # events between two looks at signals: about a quarter of a second
_BINS: Final = 256
_SAME_NAME: Final = (
    "mtu_bytes",
    "header_bytes",
    "ack_bytes",
    "cell_packets",
    "buffer_bytes",
    "ecn_min_bytes",
    "ecn_max_bytes",
    "ecn_probability",
    "nvlink_bps",
    "nvlink_ns",
    "host_ns",
    "receives_ahead",
    "queue_depth",
    "priority",
    "spread_labels",
)
_CLASS_INDEX: Final = {path_class: i + 1 for i, path_class in enumerate(CLASSES)}


class SimulationError(Exception):
    """The simulator refused something, or a run broke; the text says what."""


@dataclass(frozen=True, slots=True)
class FabricSettings:
    """The fabric and its hosts.

    :ivar counts: buildings, zones of each, racks of each, hosts of each, GPUs of each.
    :ivar rtts: base RTT by class.
    :ivar buffer_bytes: of a switch; 0: unbounded, nothing pauses.
    :ivar cell_packets: packets that are sent as one; 1 is exact.
    """

    counts: tuple[int, int, int, int, int]
    planes: int
    nic_bps: int
    oversubscription: tuple[float, float, float]
    rtts: Mapping[PathClass, int]
    mtu_bytes: int
    header_bytes: int
    ack_bytes: int
    cell_packets: int
    buffer_bytes: int
    buffer_alpha: float
    ecn_min_bytes: int
    ecn_max_bytes: int
    ecn_probability: float
    nvlink_bps: int
    nvlink_ns: int
    host_ns: int
    priority: bool
    spread_labels: bool
    receives_ahead: int
    queue_depth: int
    control_credits: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Of the job; fields as in ``struct dq_sim_totals``."""

    now_ns: int
    done_ns: int
    messages: int
    received: int
    bytes: int
    fabric_bytes: int
    peak_bytes: int
    packet_hops: int
    events: int
    segments: int
    control_packets: int
    shrinks: int
    window_ns: int
    grant_ns: int
    depth_ns: int
    outbound_ns: int
    switches: int
    ports: int
    vcs: int
    samples: int


@dataclass(frozen=True, slots=True)
class SwitchStats:
    """Of one switch.

    :ivar tier: 0 of a rack, 1 of a zone, 2 of a building.
    :ivar over_bytes: most that it held beyond its buffer.
    :ivar pauses: pause frames that it sent.
    """

    tier: int
    peak_bytes: int
    mean_bytes: float
    over_bytes: int
    pauses: int


@dataclass(frozen=True, slots=True)
class PortStats:
    """Of one port.

    :ivar switch: number of its switch; None of a NIC.
    """

    switch: int | None
    peak_bytes: int
    sent_bytes: int
    sent_packets: int
    marks: int
    pauses: int
    paused_ns: int
    mean_bytes: float


@dataclass(frozen=True, slots=True)
class Series:
    """Buffers over time.

    :ivar times_ns: of the samples.
    :ivar total_bytes: in all switches.
    :ivar switch_bytes: for each sample, in each switch.
    """

    times_ns: list[int]
    total_bytes: list[int]
    switch_bytes: list[list[int]]


@dataclass(frozen=True, slots=True)
class MessageTimes:
    """When messages were posted by their senders and had come in, in the order in which they were added."""

    posted_ns: list[int]
    received_ns: list[int]


class Simulator:
    """One job on one fabric; a context manager.

    :raises SimulationError: a setting is out of its range.
    """

    def __init__(
        self,
        fabric: FabricSettings,
        profiles: Mapping[PathClass, SenderProfile],
        *,
        grants: bool,
        seed: int = 1,
        sample_ns: int = 0,
    ) -> None:
        config = ffi.new("struct dq_sim_config *")
        region = config.region
        region.buildings, region.zones, region.racks, region.hosts, region.gpus = fabric.counts
        region.planes, region.nic_bps = fabric.planes, fabric.nic_bps
        for i, value in enumerate(fabric.oversubscription):
            region.oversubscription[i] = value
        for path_class, index in _CLASS_INDEX.items():
            region.rtt_ns[index] = fabric.rtts[path_class]
            profile, target = profiles[path_class], config.profiles[index]
            target.window_bytes, target.floor_bytes = profile.window_bytes, profile.floor_bytes
            target.rtt_ns, target.rate_bps = profile.rtt_ns, profile.rate_bps
            target.segment_bytes, target.qps = profile.segment_bytes, profile.qps
            target.outstanding, target.adapt = profile.outstanding, profile.adapt
        for name in _SAME_NAME:
            setattr(config, name, getattr(fabric, name))
        config.alpha, config.credits = fabric.buffer_alpha, fabric.control_credits
        config.grants, config.seed, config.sample_ns = grants, seed, sample_ns
        self._error = ffi.new("struct dq_sim_text *")
        out = ffi.new("dq_sim **")
        self._check(lib.dq_sim_create(config, out, self._error))
        self._sim: Any = out[0]
        self._messages = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free everything.  May be called twice; nothing else may be called after it."""
        if self._sim is not None:
            lib.dq_sim_destroy(self._sim)
            self._sim = None

    def _check(self, code: int) -> int:
        if code < 0:
            raise SimulationError(ffi.string(self._error.text).decode(errors="replace"))
        return code

    def add(self, messages: Sequence[Message]) -> None:
        """Add messages to the job, before it runs.

        :raises SimulationError: one of them is wrong, or the job has begun.
        """
        array = ffi.new("struct dq_sim_message[]", len(messages))
        for slot, message in zip(array, messages, strict=True):
            setattr(slot, "from", message.sender)
            slot.to, slot.bytes = message.receiver, message.size_bytes
            slot.after, slot.start_ns = message.after, message.start_ns
        self._check(lib.dq_sim_add(self._sim, array, len(messages), self._error))
        self._messages += len(messages)

    def run(self, progress: Callable[[float], None] | None = None) -> None:
        """Run to the end.

        :param progress: told now and then what part of the messages has come in, 0 to 1.
        :raises SimulationError: the run broke.
        """
        while self._check(lib.dq_sim_run(self._sim, _PIECE, self._error)):
            if progress is not None:
                totals = self.totals()
                progress(totals.received / max(totals.messages, 1))

    def totals(self) -> Totals:
        """Sums over the whole fabric, so far."""
        out = ffi.new("struct dq_sim_totals *")
        lib.dq_sim_get_totals(self._sim, out)
        return Totals(**{name: int(getattr(out, name)) for name in Totals.__dataclass_fields__})

    def times(self) -> MessageTimes:
        """When each message was posted and had come in."""
        out = ffi.new("struct dq_sim_message_times[]", self._messages)
        lib.dq_sim_get_times(self._sim, out)
        return MessageTimes([one.posted_ns for one in out], [one.received_ns for one in out])

    def switches(self) -> list[SwitchStats]:
        """Each switch, tier by tier."""
        out = ffi.new("struct dq_sim_switch_stats[]", self.totals().switches)
        lib.dq_sim_get_switches(self._sim, out)
        return [SwitchStats(one.tier, one.peak_bytes, one.mean_bytes, one.over_bytes, one.pauses) for one in out]

    def ports(self) -> list[PortStats]:
        """Each port, those of NICs first."""
        out = ffi.new("struct dq_sim_port_stats[]", self.totals().ports)
        lib.dq_sim_get_ports(self._sim, out)
        return [
            PortStats(
                None if one.sw == 2**32 - 1 else one.sw,
                one.peak_bytes,
                one.sent_bytes,
                one.sent_packets,
                one.marks,
                one.pauses,
                one.paused_ns,
                one.mean_bytes,
            )
            for one in out
        ]

    def found(self, tier: int) -> tuple[list[int], list[int]]:
        """Data packets of a tier's switches by the bytes that they found in their queue: counts, least bytes."""
        counts, bounds = ffi.new("uint64_t[]", _BINS), ffi.new("uint64_t[]", _BINS)
        lib.dq_sim_get_found(self._sim, tier, counts, bounds)
        return list(counts), list(bounds)

    def series(self) -> Series:
        """Buffers over time; empty when no samples were asked for."""
        totals = self.totals()
        times, total = ffi.new("uint64_t[]", totals.samples), ffi.new("uint64_t[]", totals.samples)
        each = ffi.new("uint64_t[]", totals.samples * totals.switches)
        lib.dq_sim_get_series(self._sim, times, total, each)
        width = totals.switches
        rows = [[int(value) for value in each[i * width : (i + 1) * width]] for i in range(totals.samples)]
        return Series(list(times), list(total), rows)
