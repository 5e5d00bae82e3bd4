# SPDX-License-Identifier: Apache-2.0
"""What is made of a run's numbers: bounds, bandwidths, percentiles, fairness.  Pure.

Units: bytes, ns, bits a second.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from dqplbd.simulation.workloads import Message

__all__ = ["Shape", "bus_bandwidth", "histogram_percentile", "jain", "lower_bound_ns", "percentile", "rank_rates"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Where GPUs are, and what leads out of each place.

    :ivar counts: buildings, zones of each, racks of each, hosts of each, GPUs of each.
    :ivar nic_bps: rate of a NIC.
    :ivar oversubscription: out of a rack, a zone, a building.
    :ivar nvlink_bps: rate within a host.
    :ivar efficiency: payload of a packet to its bytes on the wire.
    """

    counts: tuple[int, int, int, int, int]
    nic_bps: int
    oversubscription: tuple[float, float, float]
    nvlink_bps: int
    efficiency: float

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        product = 1
        for count in self.counts:
            product *= count
        return product

    def places(self) -> tuple[int, int, int, int]:
        """GPUs of a host, a rack, a zone, a building."""
        _, zones, racks, hosts, gpus = self.counts
        return gpus, gpus * hosts, gpus * hosts * racks, gpus * hosts * racks * zones


def lower_bound_ns(messages: Sequence[Message], shape: Shape) -> float:
    """The time that no schedule of these messages can beat: the busiest NIC or way out of a place, at its full rate."""
    host, rack, zone, building = shape.places()
    ways = (
        (1, host, shape.nic_bps * shape.efficiency),
        (rack, rack, shape.nic_bps * rack / shape.oversubscription[0] * shape.efficiency),
        (zone, zone, shape.nic_bps * zone / shape.oversubscription[1] * shape.efficiency),
        (building, building, shape.nic_bps * building / shape.oversubscription[2] * shape.efficiency),
        (1, 0, float(shape.nvlink_bps)),
    )
    bound = 0.0
    for unit, place, rate_bps in ways:
        out: dict[int, int] = {}
        into: dict[int, int] = {}
        for message in messages:
            inside = message.sender // place == message.receiver // place if place else None
            if inside is None and message.sender // host != message.receiver // host:
                continue  # not by NVLink
            if inside:
                continue
            out[message.sender // unit] = out.get(message.sender // unit, 0) + message.size_bytes
            into[message.receiver // unit] = into.get(message.receiver // unit, 0) + message.size_bytes
        busiest = max((*out.values(), *(into.values() if place else ())), default=0)
        bound = max(bound, busiest * 8e9 / rate_bps)
    return bound


def bus_bandwidth(size_bytes: int, bus_factor: float, duration_ns: float) -> float:
    """Bus bandwidth in bits a second by nccl-tests' definition; 0 when no time passed."""
    return size_bytes * 8e9 * bus_factor / duration_ns if duration_ns > 0 else 0.0


def percentile(values: Sequence[float], part: float) -> float:
    """Nearest rank: the smallest value that at least ``part`` (over 0, up to 1) of all are not above; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(ceil(part * len(ordered)) - 1, 0)]


def histogram_percentile(counts: Sequence[int], bounds: Sequence[int], part: float) -> int:
    """The same of a histogram: the lower bound of the bin that the value is in; 0 of an empty one."""
    rank = ceil(part * sum(counts))
    seen = 0
    for count, bound in zip(counts, bounds, strict=True):
        seen += count
        if seen >= rank and count:
            return bound
    return 0


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 when all are equal, 1/n when one has everything; 1 of none."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def rank_rates(messages: Sequence[Message], received_ns: Sequence[int]) -> Mapping[int, float]:
    """For each rank that receives: its bytes over the time of its last message, in bits a second."""
    size: dict[int, int] = {}
    last: dict[int, int] = {}
    for message, done in zip(messages, received_ns, strict=True):
        size[message.receiver] = size.get(message.receiver, 0) + message.size_bytes
        last[message.receiver] = max(last.get(message.receiver, 0), done)
    return {rank: size[rank] * 8e9 / last[rank] for rank in size if last[rank]}
