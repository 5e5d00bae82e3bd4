# SPDX-License-Identifier: Apache-2.0
"""From what the guests brought back to rows and tables.  Pure.

Two runs with one seed differ by at most :data:`TIME_TOLERANCE_NS` or one packet; what is printed is rounded coarser.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dqplbd.cli.render import Column, Table
from dqplbd.topology.location import PathClass
from dqplbd.units import format_bytes, format_ns, format_rate
from tests.bench.rows import Row
from tests.vm.lab.jobs import HEADER_BYTES, LINK_BPS, MTU_BYTES, Job, payload_bps
from tests.vm.lab.places import RTT_NS

__all__ = ["PACKET_BYTES", "TIME_TOLERANCE_NS", "Traffic", "differences", "rows_of", "tables_of", "traffic_of"]

PACKET_BYTES: Final = MTU_BYTES + HEADER_BYTES
TIME_TOLERANCE_NS: Final = 2_000
FIRST_RTTS: Final = 20
RTT_ERROR_NS: Final = 3_000
THROUGHPUT: Final = 0.97
QUEUE: Final = 0.1
LATE_NS: Final = 5_000
"""A client that begins later than that waited for the guest's one CPU: then the laboratory measures itself."""
LOST: Final = ("rcvd_rnr_err", "rcvd_seq_err", "out_of_seq_request")
"""Counters of rxe that tell of something lost or refused: nothing has reason to be."""
TIMED_OUT: Final = ("completer_retry_err", "duplicate_request")
"""Counters of rxe that tell of something sent again after a time-out.

rxe does not start the time anew when there is something new to wait for: what begins just before the time of something
long acknowledged is over, is sent again without need.
"""
QP_PACKETS: Final = 128
"""Packets of one queue pair that rxe lets be unacknowledged."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the traffic of one job came to, with one setting.

    :ivar goodput_bps: payload, over the time that the busiest way out took.
    :ivar bound_bps: payload that this way out carries at most.
    :ivar first_bytes: longest queue of the first 20 RTT, of all queues measured.  :ivar after_bytes: of the time after.
    :ivar inflight_bytes: most that one daemon had posted and not completed on one path.
    :ivar done_ns: from the begin to the end of the last transfer.  :ivar mean_ns: of all transfers.
    :ivar late_ns: how late the last client began.
    """

    goodput_bps: float
    bound_bps: float
    first_bytes: int
    after_bytes: int
    drops: int
    bytes: int
    whole: bool
    inflight_bytes: int
    done_ns: int
    mean_ns: int
    late_ns: int

    @property
    def ratio(self) -> float:
        """Goodput to bound."""
        return self.goodput_bps / self.bound_bps


def traffic_of(job: Job, result: dict[str, Any]) -> Traffic:
    """Work out the numbers of one setting."""
    rates = dict(job.egress_bps)
    flows, queues = result["flows"], result["queues"]
    wanted: dict[int, int] = {}
    done: dict[int, int] = {}
    for transfer in job.transfers:
        wanted[transfer.target] = wanted.get(transfer.target, 0) + transfer.bytes
        done[transfer.target] = max(done.get(transfer.target, 0), flows[transfer.key]["done_ns"])
    bounds = {target: payload_bps(rates.get(target, LINK_BPS)) for target in wanted}
    # The busiest way out is the one that bounds them all.
    busiest = max(wanted, key=lambda target: wanted[target] / bounds[target])
    first = after = 0
    for samples in queues["bytes"].values():
        for at, waiting in zip(queues["times_ns"], samples, strict=True):
            if at <= FIRST_RTTS * job.rtt_ns:
                first = max(first, waiting)
            else:
                after = max(after, waiting)
    return Traffic(
        goodput_bps=wanted[busiest] * 8e9 / max(done.values()),
        bound_bps=bounds[busiest],
        first_bytes=first,
        after_bytes=after,
        drops=sum(queues["drops"].values()),
        bytes=sum(flow["bytes"] for flow in flows.values()),
        whole=all(flows[t.key]["bytes"] == t.bytes and flows[t.key]["same"] for t in job.transfers),
        inflight_bytes=max(path["inflight_peak_bytes"] for path in result["live"]),
        done_ns=max(done.values()),
        mean_ns=sum(flows[t.key]["done_ns"] for t in job.transfers) // len(job.transfers),
        late_ns=result["late_ns"],
    )


@dataclass(frozen=True, slots=True)
class Classes:
    """How well RTT alone told the classes.

    :ivar errors: largest error of the RTT, ns, by class.
    """

    right: int
    wanted: int
    errors: dict[PathClass, int]


def classes_of(job: Job, paths: Sequence[dict[str, Any]]) -> Classes:
    """Compare with where the hosts really stand."""
    layout = job.layout
    right = 0
    errors: dict[PathClass, int] = {}
    for path in paths:
        real = layout.path_class(path["from"], path["to"])
        right += path["class"] == real.value and path["source"] == "rtt"
        error = abs(path["rtt_ns"] - RTT_NS[real]) if path["rtt_ns"] is not None else RTT_NS[real]
        errors[real] = max(errors.get(real, 0), error)
    return Classes(right, len(layout) * (len(layout) - 1), errors)


def rows_of(job: Job, results: dict[str, Any]) -> list[Row]:
    """The rows of one job."""
    prefix = f"lab_{job.name}"
    rows = []
    if job.probing:
        classes = classes_of(job, results["computed"]["paths"])
        head = f"lab_probing_{len(job.places)}"
        rows.append(Row(f"{head}_classes_right", "paths", classes.right, classes.wanted, 1.0))
        for path_class, error in sorted(classes.errors.items(), key=lambda item: RTT_NS[item[0]]):
            name = f"{head}_rtt_error_{path_class}"
            rows.append(Row(name, "ns", error, RTT_NS[path_class], RTT_ERROR_NS, "low", "value"))
    if not job.transfers:
        return rows
    traffic = {setting.name: traffic_of(job, results[setting.name]) for setting in job.settings}
    static = traffic["static"]
    for name, one in traffic.items():
        head = f"{prefix}_{name}"
        computed = name == "computed"
        target = THROUGHPUT if computed and job.strict else None
        rows.append(Row(f"{head}_goodput", "bytes/s", round(one.goodput_bps / 8), round(one.bound_bps / 8), target))
        mean = static.mean_ns if computed else None
        rows.append(Row(f"{head}_mean_transfer", "ns", one.mean_ns, mean))
        whole = sum(transfer.bytes for transfer in job.transfers)
        rows.append(Row(f"{head}_bytes_right", "bytes", one.bytes if one.whole else 0, whole, 1.0))
        rows.append(Row(f"{head}_queue_first", "bytes", one.first_bytes, static.first_bytes if computed else None))
        reference = static.after_bytes if computed else None
        target = QUEUE if computed and job.strict else None
        rows.append(Row(f"{head}_queue_after", "bytes", one.after_bytes, reference, target, "low"))
        rows.append(Row(f"{head}_queue_drops", "packets", one.drops, None, 0, "low", "value"))
        lost = sum(results[name]["counters"].get(counter, 0) for counter in LOST)
        rows.append(Row(f"{head}_lost", "events", lost, None, 0, "low", "value"))
        again = sum(results[name]["counters"].get(counter, 0) for counter in TIMED_OUT)
        rows.append(Row(f"{head}_timed_out", "events", again, note="rxe's timer, without need"))
        rows.append(Row(f"{head}_late", "ns", one.late_ns, None, LATE_NS, "low", "value", note="of the last client"))
    cap = QP_PACKETS * MTU_BYTES * results["static"]["paths"][0]["qps"]
    rows.append(Row(f"{prefix}_static_inflight_rxe", "bytes", min(cap, static.inflight_bytes), static.inflight_bytes))
    return rows


def _coarse(value: int, digits: int = 2) -> int:
    """Rounded to so many digits."""
    scale: int = 10 ** max(len(str(abs(value))) - digits, 0)
    return int(round(value / scale) * scale)


def tables_of(jobs: Iterable[Job], results: dict[str, Any]) -> list[Table]:
    """What is printed: one table for probing, one for traffic."""
    probing = []
    moved = []
    for job in jobs:
        if job.name not in results:
            continue
        if job.probing:
            classes = classes_of(job, results[job.name]["computed"]["paths"])
            errors = [classes.errors.get(path_class) for path_class in RTT_NS]
            probing.append(
                (
                    f"{len(job.places)} hosts",
                    f"{classes.right} of {classes.wanted}",
                    *("-" if error is None else f"{error / 1000:.1f} us" for error in errors),
                )
            )
        for setting in job.settings if job.transfers else ():
            one = traffic_of(job, results[job.name][setting.name])
            path = results[job.name][setting.name]["paths"][0]
            moved.append(
                (
                    job.title,
                    setting.name,
                    format_rate(_coarse(round(one.goodput_bps), 3)),
                    f"{one.ratio:.1%}",
                    format_bytes(_coarse(one.first_bytes)),
                    format_bytes(_coarse(one.after_bytes)),
                    f"{path['qps']} x {path['outstanding']} x {format_bytes(path['segment_bytes'])}",
                    format_ns(_coarse(one.mean_ns, 3)),
                    format_ns(_coarse(one.done_ns, 3)),
                    "equal" if one.whole else "DIFFERENT",
                )
            )
    tables = []
    if probing:
        heads = [Column(f"{path_class}, {format_ns(rtt)}", "right") for path_class, rtt in RTT_NS.items()]
        title = "Classes by RTT alone; largest error of the RTT by class"
        tables.append(Table([Column("fabric", style="bold"), Column("classes right", "right"), *heads], probing, title))
    if moved:
        columns = [
            Column("traffic", style="bold"),
            Column("setting"),
            Column("goodput", "right"),
            Column("of possible", "right"),
            Column("queue, first 20 RTT", "right"),
            Column("queue, later", "right"),
            Column("QPs x each x segment", "right"),
            Column("a transfer", "right"),
            Column("all", "right"),
            Column("content"),
        ]
        tables.append(Table(columns, moved, "Traffic; longest queue of the switch"))
    return tables


def differences(job: Job, one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What differs between two runs with one seed by more than it may; empty when they agree."""
    found = []
    for setting in job.settings:
        a, b = one[setting.name], other[setting.name]
        where = f"{job.name}, {setting.name}"
        classes = [{(p["from"], p["to"]): p["class"] for p in run["paths"]} for run in (a, b)]
        if classes[0] != classes[1]:
            found.append(f"{where}: classes differ")
        rtts = [{(p["from"], p["to"]): p["rtt_ns"] or 0 for p in run["paths"]} for run in (a, b)]
        worst = max((abs(rtts[0][key] - rtts[1].get(key, 0)) for key in rtts[0]), default=0)
        if worst > TIME_TOLERANCE_NS:
            found.append(f"{where}: an RTT differs by {worst} ns")
        if not job.transfers:
            continue
        left, right = traffic_of(job, a), traffic_of(job, b)
        if left.bytes != right.bytes or left.whole != right.whole:
            found.append(f"{where}: {left.bytes} and {right.bytes} bytes arrived")
        for key, flow in a["flows"].items():
            off = abs(flow["done_ns"] - b["flows"][key]["done_ns"])
            if off > TIME_TOLERANCE_NS:
                found.append(f"{where}: flow {key} ends {off} ns apart")
        for what, x, y in (
            ("first 20 RTT", left.first_bytes, right.first_bytes),
            ("time after", left.after_bytes, right.after_bytes),
        ):
            if abs(x - y) > PACKET_BYTES:
                found.append(f"{where}: longest queues of the {what} are {x} and {y} bytes")
    return found
