# SPDX-License-Identifier: Apache-2.0
"""Runs a scenario for each of its senders, on one fabric with one seed, and puts what came out together."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from dqplbd.simulation.measures import (
    bus_bandwidth,
    histogram_percentile,
    jain,
    lower_bound_ns,
    percentile,
    rank_rates,
)
from dqplbd.simulation.scenario import Scenario
from dqplbd.simulation.senders import Sender, SenderProfile
from dqplbd.simulation.simulator import Series, Simulator, SwitchStats, Totals
from dqplbd.simulation.workloads import Schedule
from dqplbd.topology.location import PathClass

__all__ = ["TIERS", "Comparison", "Run", "TierQueues", "compare", "run_sender"]

TIERS: Final = ("rack", "zone", "building")
_SAMPLES_AHEAD: Final = 2000


@dataclass(frozen=True, slots=True)
class TierQueues:
    """Queues of a tier's ports, as data packets found them.

    :ivar p50_bytes: median; likewise the others.
    :ivar peak_bytes: longest queue of any port.
    """

    tier: str
    p50_bytes: int
    p99_bytes: int
    p999_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """What one sender did.

    :ivar completion_ns: when the last message had come in.
    :ivar bound_ratio: time that no schedule can beat, over ``completion_ns``: throughput against the fabric's limit.
    :ivar bus_bps: bus bandwidth by nccl-tests; None where the workload has none.
    :ivar throughput_bps: all bytes over ``completion_ns``.
    :ivar peak_bytes: most in all switches together.
    :ivar peak_switch_bytes: most in one switch.
    :ivar mean_bytes: in all switches, over the time of the job.
    :ivar message_ns: from post to arrival: median, 99th percentile, longest.
    :ivar jain: fairness among receivers, of their rates.
    :ivar pauses: pause frames; ``paused_ns`` summed over ports.
    :ivar over_bytes: most that a switch held beyond its buffer.
    :ivar cpu_s: what the run took.
    """

    sender: str
    completion_ns: int
    bound_ratio: float
    bus_bps: float | None
    throughput_bps: float
    peak_bytes: int
    peak_switch_bytes: int
    mean_bytes: float
    queues: tuple[TierQueues, ...]
    message_ns: tuple[float, float, float]
    jain: float
    pauses: int
    paused_ns: int
    over_bytes: int
    marks: int
    totals: Totals
    profiles: Mapping[PathClass, SenderProfile]
    grants: bool
    switches: tuple[SwitchStats, ...]
    series: Series
    message_times_ns: tuple[int, ...]
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A scenario and what came out.

    :ivar bound_ns: time that no schedule can beat.
    """

    scenario: Scenario
    schedule: Schedule
    gpus: int
    bound_ns: float
    runs: tuple[Run, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: all but the times of single messages."""
        low, high = self.schedule.step_bytes
        return {
            "scenario": self.scenario.model_dump(mode="json"),
            "gpus": self.gpus,
            "algorithm": self.schedule.algorithm,
            "messages": len(self.schedule.messages),
            "message_bytes": {"min": low, "max": high},
            "bound_ns": round(self.bound_ns),
            "runs": [_run_dict(run) for run in self.runs],
        }


def _run_dict(run: Run) -> dict[str, Any]:
    plain = (
        "sender",
        "grants",
        "completion_ns",
        "bound_ratio",
        "bus_bps",
        "throughput_bps",
        "peak_bytes",
        "peak_switch_bytes",
        "mean_bytes",
        "jain",
        "pauses",
        "paused_ns",
        "over_bytes",
        "marks",
        "cpu_s",
    )
    return {
        **{name: getattr(run, name) for name in plain},
        "message_ns": dict(zip(("p50", "p99", "max"), run.message_ns, strict=True)),
        "queues": [asdict(one) for one in run.queues],
        "profiles": {path_class.value: asdict(profile) for path_class, profile in run.profiles.items()},
        "totals": asdict(run.totals),
        "switches": [asdict(one) for one in run.switches],
        "series": {"times_ns": run.series.times_ns, "total_bytes": run.series.total_bytes},
    }


def _peers(schedule: Schedule, gpus_of_host: int) -> int:
    """Most peers that a rank has on other hosts."""
    peers: dict[int, set[int]] = {}
    for message in schedule.messages:
        if message.sender // gpus_of_host != message.receiver // gpus_of_host:
            peers.setdefault(message.sender, set()).add(message.receiver)
            peers.setdefault(message.receiver, set()).add(message.sender)
    return max(map(len, peers.values()), default=1)


def run_sender(
    scenario: Scenario,
    schedule: Schedule,
    sender: Sender,
    bound_ns: float,
    progress: Callable[[float], None] | None = None,
) -> Run:
    """Run one sender.

    :raises SimulationError: the simulator refused the scenario, or the run broke.
    """
    begin = time.process_time()
    # The series begins fine enough for the shortest job there can be; the simulator makes it coarser as it gets longer.
    sample_ns = max(int(bound_ns / _SAMPLES_AHEAD), 100)
    with Simulator(
        scenario.settings(), sender.profiles, grants=sender.grants, seed=scenario.seed, sample_ns=sample_ns
    ) as simulator:
        simulator.add(schedule.messages)
        simulator.run(progress)
        totals = simulator.totals()
        times = simulator.times()
        switches = simulator.switches()
        ports = simulator.ports()
        queues = []
        for tier, name in enumerate(TIERS):
            counts, bounds = simulator.found(tier)
            if sum(counts):
                p50, p99, p999 = (histogram_percentile(counts, bounds, part) for part in (0.5, 0.99, 0.999))
                peak = max(p.peak_bytes for p in ports if p.switch is not None and switches[p.switch].tier == tier)
                queues.append(TierQueues(name, p50, p99, p999, peak))
        series = simulator.series()
    took = [done - posted for posted, done in zip(times.posted_ns, times.received_ns, strict=True)]
    completion = totals.done_ns
    bus = bus_bandwidth(schedule.size_bytes, schedule.bus_factor, completion) if schedule.bus_factor else None
    return Run(
        sender.name,
        completion,
        bound_ns / completion if completion else 1.0,
        bus,
        totals.bytes * 8e9 / completion if completion else 0.0,
        totals.peak_bytes,
        max((one.peak_bytes for one in switches), default=0),
        sum(one.mean_bytes for one in switches),
        tuple(queues),
        (percentile(took, 0.5), percentile(took, 0.99), max(took, default=0)),
        jain(list(rank_rates(schedule.messages, times.received_ns).values())),
        sum(one.pauses for one in switches),
        sum(one.paused_ns for one in ports),
        max((one.over_bytes for one in switches), default=0),
        sum(one.marks for one in ports),
        totals,
        sender.profiles,
        sender.grants,
        tuple(switches),
        series,
        tuple(sorted(took)),
        time.process_time() - begin,
    )


def compare(
    scenario: Scenario,
    folder: Path | None = None,
    senders: Sequence[str] | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Comparison:
    """Run a scenario for its senders, one after the other.

    :param folder: that names of files in the scenario are relative to.
    :param senders: instead of the scenario's.
    :param progress: told the sender and what part of its messages has come in.
    :raises ValueError: a sender or the trace is wrong.
    :raises ConfigError: the trace cannot be read.
    :raises SimulationError: the simulator refused the scenario, or a run broke.
    """
    schedule = scenario.schedule(folder)
    shape = scenario.shape()
    bound = lower_bound_ns(schedule.messages, shape)
    peers = _peers(schedule, scenario.region.gpus)
    chosen = [scenario.sender(name, peers) for name in (senders or scenario.senders)]
    runs = []
    for sender in chosen:
        name = sender.name
        told = (lambda part, name=name: progress(name, part)) if progress is not None else None
        runs.append(run_sender(scenario, schedule, sender, bound, told))
    return Comparison(scenario, schedule, shape.gpus, bound, tuple(runs))
