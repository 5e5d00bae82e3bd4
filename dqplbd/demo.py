# SPDX-License-Identifier: Apache-2.0
"""The whole thing on one machine: ``python -m dqplbd.demo [--file FILE] [--keep]``.

Eight daemons on loopback stand for eight hosts in two buildings, with several zones and racks.  Emulated links give
their paths RTTs in the ratio 1 : 7 : 15 : 30 and a rate.  Times are 1000 times those of a fabric of 400 Gbit/s with
RTTs of 8, 56, 120 and 240 us, and the rate is a 1000th, so bandwidth-delay products, windows and segments are those of
such a fabric, while it does not matter when this machine wakes a process late.  Nobody tells the hosts where they are.
It shows that

1. RTT alone gives every path the right class,
2. a file that is moved with one static setting for all paths fills the queue of the switch, near and far,
3. the same file moved with the computed profiles is as fast, with next to no queue.

``build/demo.json`` has the numbers: a list of {"name", "value", "unit", "reference", "ratio", "target", "met"}.
"""

import argparse
import hashlib
import json
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from dqplbd.admin.client import AdminClient, NotReachableError
from dqplbd.admin.model import AdminError, Live
from dqplbd.admin.model import Path as PathView
from dqplbd.cli.render import Column, Table, fancy, print_table
from dqplbd.lab.cluster import Cluster, ClusterError, HostSpec, merge
from dqplbd.lab.mover import Moved, move_file
from dqplbd.topology.location import Location, PathClass, class_from_labels
from dqplbd.units import format_bytes, format_ns, format_rate

__all__ = ["main"]

MIB: Final = 2**20

SLOWDOWN: Final = 1000
RATE_BPS: Final = 400 * 10**9 // SLOWDOWN
RTT_NS: Final = {
    PathClass.RACK: 8_000 * SLOWDOWN,
    PathClass.ZONE: 56_000 * SLOWDOWN,
    PathClass.BUILDING: 120_000 * SLOWDOWN,
    PathClass.REGION: 240_000 * SLOWDOWN,
}
# Between two classes: the geometric mean of their RTTs.
THRESHOLDS: Final = {
    key: round((RTT_NS[nearer] * RTT_NS[farther]) ** 0.5)
    for key, nearer, farther in (
        ("rack_ns", PathClass.RACK, PathClass.ZONE),
        ("zone_ns", PathClass.ZONE, PathClass.BUILDING),
        ("building_ns", PathClass.BUILDING, PathClass.REGION),
    )
}

PLACES: Final = {
    "h1": Location("demo", "b1", "z1", "r1"),
    "h2": Location("demo", "b1", "z1", "r1"),
    "h3": Location("demo", "b1", "z1", "r2"),
    "h4": Location("demo", "b1", "z2", "r3"),
    "h5": Location("demo", "b2", "z3", "r4"),
    "h6": Location("demo", "b2", "z3", "r4"),
    "h7": Location("demo", "b2", "z3", "r5"),
    "h8": Location("demo", "b2", "z4", "r6"),
}
SOURCE: Final = "h1"
TARGETS: Final = {"near": "h2", "far": "h8"}

# What the reference ships: 16 queue pairs, 128 segments of 512 KiB each, whatever the path.
STATIC: Final = {
    "qps": 16,
    "segment_bytes": "512KiB",
    "outstanding_per_qp": 128,
    "window_bytes": "1GiB",
    "adapt": False,
}
FILE_BYTES: Final = 256 * MIB
LIBRARY_BYTES: Final = 32 * MIB
CLASSIFY_S: Final = 40.0


class DemoError(RuntimeError):
    """The demonstration did not show what it should; the text says what."""


# ----------------------------------------------------------------------------------------------------------- progress


class Progress:
    """Tells what is going on, with the time since the start."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._open = False

    def _stamp(self) -> str:
        return f"[{time.monotonic() - self._begin:5.1f}s]"

    def say(self, text: str = "") -> None:
        """A line that stays."""
        self._close()
        print(f"{self._stamp()} {text}" if text else "", flush=True)

    def show(self, text: str) -> None:
        """A line that the next one replaces; only on a terminal."""
        if fancy():
            sys.stdout.write(f"\r\x1b[K{self._stamp()} {text}")
            sys.stdout.flush()
            self._open = True

    def _close(self) -> None:
        if self._open:
            sys.stdout.write("\r\x1b[K")
            self._open = False


# -------------------------------------------------------------------------------------------------------- the cluster


def true_class(a: str, b: str) -> PathClass:
    """Class of the path between two hosts, from where they really are."""
    return class_from_labels(PLACES[a], PLACES[b])


def specs() -> list[HostSpec]:
    """The eight hosts: only their links tell them apart."""
    found = []
    for host in PLACES:
        links = [
            {"peer": other, "delay_ns": RTT_NS[true_class(host, other)] // 2, "rate_bps": RATE_BPS}
            for other in PLACES
            if other != host
        ]
        found.append(HostSpec(host, {"emulation": {"links": links}}))
    return found


def common_config() -> dict[str, Any]:
    """The configuration of all: laboratory time scales, no labels."""
    rtts = {path_class.value: rtt for path_class, rtt in RTT_NS.items()}
    return {
        "probing": {"interval_s": 0.15, "window_s": 0.9, "samples_per_window": 4, "timeout_s": 2},
        "classification": {"method": "labels_then_rtt", "rule": "thresholds", "thresholds": THRESHOLDS},
        "profiles": {"class_rtt_ns": {**rtts, "unknown": RTT_NS[PathClass.ZONE]}},
    }


def reconfigure(cluster: Cluster, base: dict[str, dict[str, Any]], over: dict[str, Any]) -> None:
    """Give every host its first configuration with ``over`` over it, and have it reload.

    :raises DemoError: a host refused it.
    """
    for host in cluster:
        host.write_config(merge(base[host.host_id], over), fresh=True)
        report = AdminClient(host.admin).reload()
        if not report.ok or report.restart_needed:
            problems = [f"{one.key}: {one.problem}" for one in report.problems] or report.restart_needed
            raise DemoError(f"{host.host_id} did not take the new configuration: {', '.join(problems)}")


def all_paths(cluster: Cluster) -> Iterator[tuple[str, PathView]]:
    """Every path between two hosts, with the host it begins at."""
    for host in cluster:
        for path in AdminClient(host.admin).paths():
            if path.peer != host.host_id:
                yield host.host_id, path


def wait_classified(
    cluster: Cluster, progress: Progress, settled: Callable[[str, PathView], bool], what: str
) -> tuple[int, int]:
    """Wait until every path is as it should be.

    :returns: how many are, and how many there are.
    """
    wanted = len(PLACES) * (len(PLACES) - 1)
    deadline = time.monotonic() + CLASSIFY_S
    while True:
        good = sum(settled(host, path) for host, path in all_paths(cluster))
        if good == wanted or time.monotonic() > deadline:
            return good, wanted
        progress.show(f"{good} of {wanted} paths {what}")
        time.sleep(0.25)


def path_table(host: str, paths: Sequence[PathView]) -> Table:
    """The paths of one host, with where their ends really are."""
    columns = [
        Column("peer", style="bold"),
        Column("really in"),
        Column("class by RTT"),
        Column("RTT", "right"),
        Column("rate", "right"),
        Column("BDP", "right"),
        Column("window", "right"),
        Column("limited by"),
        Column("segment", "right"),
        Column("QPs", "right"),
        Column("each", "right"),
    ]
    rows = []
    for path in sorted(paths, key=lambda one: (one.path_class.distance, one.peer)):
        real = "the same rack" if true_class(host, path.peer) is PathClass.RACK else f"{PLACES[path.peer]}"
        profile = path.profile
        rows.append(
            (
                path.peer,
                real,
                path.path_class.value,
                format_ns(path.estimate.rtt_ns) if path.estimate.rtt_ns is not None else "-",
                format_rate(profile.rate_bps),
                format_bytes(profile.bdp_bytes),
                format_bytes(profile.window_bytes),
                profile.limited_by,
                format_bytes(profile.segment_bytes),
                str(profile.qps),
                str(profile.outstanding_per_qp),
            )
        )
    return Table(columns, rows)


# ----------------------------------------------------------------------------------------------------------- the file


def make_file(target: Path, size: int) -> None:
    """A file of ``size`` bytes from this machine's Python library, over and over with a counter between."""
    pieces: list[bytes] = []
    read = 0
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        pieces.append(source.read_bytes())
        read += len(pieces[-1])
        if read >= LIBRARY_BYTES:
            break
    written = number = 0
    with target.open("wb") as out:
        while written < size:
            piece = f"\n# {number}\n".encode() + pieces[number % len(pieces)]
            written += out.write(piece[: size - written])
            number += 1


def sha256(path: Path) -> str:
    """Checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------------------------------------------ the transfers


@dataclass(frozen=True, slots=True)
class Transfer:
    """One move of the file, and what the path looked like.

    :ivar path: before the transfer.
    :ivar window_bytes: largest window of the profile; what is measured meanwhile may change it.
    :ivar live: peaks of the transfer; ``window_bytes`` and ``link_queue_bytes`` are medians over it.
    """

    setting: str
    distance: str
    path: PathView
    window_bytes: int
    live: Live
    moved: Moved
    same: bool

    @property
    def queue_delay_ns(self) -> int:
        """How long a byte waits in the queue of the link, in the median: its length at the link's rate."""
        return self.live.link_queue_bytes * 8 * 10**9 // RATE_BPS

    @property
    def queue_delay_max_ns(self) -> int:
        """The same for the longest queue; with a computed profile that is the first window, which is sent at once."""
        return self.live.link_queue_peak_bytes * 8 * 10**9 // RATE_BPS


class _Sampler(threading.Thread):
    """Looks at a path every now and then: window and queue are levels, so a look after the transfer is too late."""

    def __init__(self, admin: AdminClient, peer: str) -> None:
        super().__init__(name="sampler", daemon=True)
        self._admin = admin
        self._peer = peer
        self._ended = threading.Event()
        self.windows: list[int] = []
        self.queues: list[int] = []

    def run(self) -> None:
        while not self._ended.wait(0.1):
            try:
                paths = self._admin.paths(peer=self._peer)
            except (AdminError, NotReachableError):
                return  # the daemons are being ended, as after Ctrl-C; whoever needs them says so
            for path in paths:
                if path.live.inflight_bytes:
                    self.windows.append(path.live.window_bytes)
                    self.queues.append(path.live.link_queue_bytes)

    def stop(self) -> None:
        self._ended.set()
        self.join(5)


def transfer(cluster: Cluster, progress: Progress, setting: str, distance: str, file: Path, digest: str) -> Transfer:
    """Move the file over one path and look at it.

    :raises DemoError: what arrived is not what was sent.
    """
    source, target = cluster[SOURCE], cluster[TARGETS[distance]]
    admin = AdminClient(source.admin)
    arrived = target.folder / "arrived"
    size = file.stat().st_size

    def show(done: int) -> None:
        progress.show(f"{setting}, {distance}: {format_bytes(done)} of {format_bytes(size)}")

    admin.reset_peaks()
    [path] = admin.paths(peer=target.host_id)
    sampler = _Sampler(admin, target.host_id)
    sampler.start()
    try:
        moved = move_file(file, arrived, source.client_socket, target.client_socket, show)
    finally:
        sampler.stop()
    [after] = admin.paths(peer=target.host_id)
    live = after.live
    if sampler.windows:
        middle = len(sampler.windows) // 2
        medians = {
            "window_bytes": sorted(sampler.windows)[middle],
            "link_queue_bytes": sorted(sampler.queues)[middle],
        }
        live = live.model_copy(update=medians)
    same = sha256(arrived) == digest
    arrived.unlink()
    progress.say(
        f"{setting}, {distance} ({source.host_id} to {target.host_id}, {path.path_class}): "
        f"{format_bytes(moved.bytes)} in {moved.seconds:.2f} s = {format_rate(moved.bytes_per_second * 8)}, "
        f"checksum {'equal' if same else 'DIFFERENT'}"
    )
    if not same:
        raise DemoError(f"the file that {target.host_id} received is not the one that {source.host_id} sent")
    window = max(path.profile.window_bytes, after.profile.window_bytes)
    return Transfer(setting, distance, path, window, live, moved, same)


def transfer_table(transfers: Sequence[Transfer]) -> Table:
    """Side by side: static and computed."""
    columns = [
        Column("path", style="bold"),
        Column("setting"),
        Column("throughput", "right"),
        Column("in flight, peak", "right"),
        Column("window", "right"),
        Column("QPs x each x segment", "right"),
        Column("queueing delay", "right"),
        Column("at most", "right"),
        Column("switch queue, peak", "right"),
        Column("checksum"),
    ]
    rows = []
    for one in sorted(transfers, key=lambda one: (one.distance != "near", one.setting != "static")):
        profile = one.path.profile
        rows.append(
            (
                f"{one.distance}, {format_ns(RTT_NS[true_class(SOURCE, TARGETS[one.distance])])}",
                one.setting,
                format_rate(one.moved.bytes_per_second * 8),
                format_bytes(one.live.inflight_peak_bytes),
                format_bytes(one.live.window_bytes),
                f"{profile.qps} x {profile.outstanding_per_qp} x {format_bytes(profile.segment_bytes)}",
                format_ns(one.queue_delay_ns),
                format_ns(one.queue_delay_max_ns),
                format_bytes(one.live.link_queue_peak_bytes),
                "equal" if one.same else "DIFFERENT",
            )
        )
    return Table(columns, rows)


# ---------------------------------------------------------------------------------------------------------- the result


def row(
    name: str, value: float, unit: str, reference: float | None, target: float | None, met: bool | None
) -> dict[str, Any]:
    """One row of the JSON; ``ratio`` is value to reference."""
    ratio = round(value / reference, 4) if reference else None
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "reference": reference,
        "ratio": ratio,
        "target": target,
        "met": met,
    }


def result_rows(good: int, wanted: int, transfers: Sequence[Transfer]) -> list[dict[str, Any]]:
    """The numbers of the demonstration.

    References: all paths; the link's rate for the static setting, and that for the computed one; the window in force.
    """
    rows = [row("classes_right", good, "paths", wanted, 1.0, good == wanted)]
    static = {one.distance: one for one in transfers if one.setting == "static"}
    for one in transfers:
        prefix = f"{one.setting}_{one.distance}"
        computed = one.setting == "computed"
        rate = round(one.moved.bytes_per_second)
        if computed:
            reference = round(static[one.distance].moved.bytes_per_second)
            rows.append(row(f"{prefix}_throughput", rate, "bytes/s", reference, 0.85, rate >= 0.85 * reference))
        else:
            rows.append(row(f"{prefix}_throughput", rate, "bytes/s", RATE_BPS // 8, None, None))
        peak, window = one.live.inflight_peak_bytes, one.window_bytes
        rows.append(row(f"{prefix}_inflight_peak", peak, "bytes", window, 1.0, peak <= window))
        before = static[one.distance] if computed else None
        for name, value, unit, old in (
            ("queue_delay", one.queue_delay_ns, "ns", before.queue_delay_ns if before else None),
            ("queue_delay_max", one.queue_delay_max_ns, "ns", before.queue_delay_max_ns if before else None),
            (
                "link_queue_peak",
                one.live.link_queue_peak_bytes,
                "bytes",
                before.live.link_queue_peak_bytes if before else None,
            ),
        ):
            met = value <= 0.1 * old if old else None
            rows.append(row(f"{prefix}_{name}", value, unit, old, 0.1 if old else None, met))
    return rows


def write_rows(rows: list[dict[str, Any]], target: Path) -> None:
    """Write the JSON file, whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    part.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    part.rename(target)


# -------------------------------------------------------------------------------------------------------------- the run


def run(cluster: Cluster, progress: Progress, given: Path | None, output: Path) -> bool:
    """Everything, on a cluster that runs.  :returns: whether every target was met."""
    base = {host.host_id: dict(host.config) for host in cluster}
    progress.say(f"{len(cluster)} daemons run; they know each other's addresses and nothing of where they are")
    good, wanted = wait_classified(
        cluster,
        progress,
        lambda host, path: path.path_class is true_class(host, path.peer) and path.classification.source == "rtt",
        "have the right class",
    )
    progress.say(f"{good} of {wanted} paths have the right class, from RTT alone. Those of {SOURCE}:")
    admin = AdminClient(cluster[SOURCE].admin)
    print_table(path_table(SOURCE, [path for path in admin.paths() if path.peer != SOURCE]))
    if good != wanted:
        wrong = [
            f"{host} to {path.peer}: {path.path_class}, really {true_class(host, path.peer)}, "
            f"RTT {path.estimate.rtt_ns} ns"
            for host, path in all_paths(cluster)
            if path.path_class is not true_class(host, path.peer)
        ]
        raise DemoError("wrong classes: " + "; ".join(wrong[:5]))
    for explanation in admin.explain(TARGETS["far"]):
        progress.say(f"why, for {TARGETS['far']}: {explanation.summary}")

    if given is not None:
        file = given
    else:
        file = cluster.folder / "file"
        progress.show("making a file")
        make_file(file, FILE_BYTES)
    digest = sha256(file)
    progress.say(f"the file: {file}, {format_bytes(file.stat().st_size)}, sha256 {digest[:16]}...")

    transfers = []
    pinned = {"profiles": {"classes": {path_class.value: STATIC for path_class in PathClass}}}
    for setting, over in (("static", merge(pinned, {"transport": {"grants": False}})), ("computed", {})):
        reconfigure(cluster, base, over)
        if setting == "static":
            progress.say(
                "static: 16 queue pairs x 128 segments x 512 KiB = 1 GiB in flight on every path, no adaptation"
            )
        else:
            progress.say("computed: each path its own profile, window adapted to delay")
        transfers += [transfer(cluster, progress, setting, distance, file, digest) for distance in TARGETS]

    progress.say(f"side by side, on links of {format_rate(RATE_BPS)}; queueing delay is switch queue by rate:")
    print_table(transfer_table(transfers))
    for distance in TARGETS:
        old, new = (
            next(one for one in transfers if (one.setting, one.distance) == (setting, distance))
            for setting in ("static", "computed")
        )
        share = new.moved.bytes_per_second / old.moved.bytes_per_second
        progress.say(
            f"{distance}: {share:.0%} of the throughput, with {format_bytes(new.live.inflight_peak_bytes)} in flight "
            f"and not {format_bytes(old.live.inflight_peak_bytes)}; whoever shares the switch waits "
            f"{format_ns(new.queue_delay_ns)} and not {format_ns(old.queue_delay_ns)}"
        )

    topology = cluster.folder / "topology.yaml"
    topology.write_text(json.dumps({"hosts": {host: place.as_dict() for host, place in PLACES.items()}}))
    reconfigure(cluster, base, {"classification": {"topology_file": str(topology)}})
    agreed, _ = wait_classified(
        cluster,
        progress,
        lambda host, path: path.classification.source == "labels" and not path.classification.mismatch,
        "have labels that agree with their RTT",
    )
    progress.say(f"with labels from a topology file: {agreed} of {wanted} agree with what the RTT said")

    rows = result_rows(good, wanted, transfers)
    rows.append(row("labels_agree_with_rtt", agreed, "paths", wanted, 1.0, agreed == wanted))
    write_rows(rows, output)
    missed = [f"{one['name']} ({one['ratio']}, target {one['target']})" for one in rows if one["met"] is False]
    progress.say(f"numbers in {output}" + (f"; not met: {', '.join(missed)}" if missed else "; every target met"))
    return not missed


def keep(cluster: Cluster, progress: Progress) -> None:
    """Leave the cluster up until Ctrl-C."""
    # Blocked before anybody can know that it is time for one: a signal just before a pause would be slept over.
    ends = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    folder = Path(sys.executable).parent
    dqplb = folder / "dqplb" if (folder / "dqplb").exists() else Path("dqplb")
    one, other = cluster[SOURCE], cluster[TARGETS["far"]]
    progress.say("the cluster stays up. In another terminal:")
    print(
        f"""
  export DQPLB_ADMIN_SOCKET={one.admin}
  {dqplb} status
  {dqplb} paths
  {dqplb} path explain {other.host_id}
  {dqplb} top
  {dqplb} doctor
  {dqplb} bench run --client-socket {one.client_socket} --peer-socket {other.client_socket}
  curl {one.metrics_url}

The other hosts: --socket {cluster.folder}/h2/admin.sock and so on. Their logs: {cluster.folder}/*/log

Ctrl-C here stops all and removes {cluster.folder}.
""",
        flush=True,
    )
    signal.sigwait(ends)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)


def _terminate(number: int, frame: FrameType | None) -> None:
    """SIGTERM and SIGHUP end it like Ctrl-C: with everything cleaned up."""
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """The command.  :returns: 0, or 1 when something failed or a target was missed, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m dqplbd.demo", description="Show it all on this machine.")
    parser.add_argument("--file", type=Path, help="file to move; by default 256 MiB made of the Python library")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up until Ctrl-C")
    parser.add_argument("--output", type=Path, default=Path("build/demo.json"), help="where the numbers go")
    options = parser.parse_args(arguments)
    if options.file is not None and (not options.file.is_file() or options.file.stat().st_size == 0):
        parser.error(f"--file {options.file} is no file with content")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminate)
    progress = Progress()
    progress.say(f"starting {len(PLACES)} daemons on loopback")
    cluster: Cluster | None = None
    try:
        cluster = Cluster(specs(), common_config())
        cluster.start()
        met = run(cluster, progress, options.file, options.output)
        if options.keep:
            keep(cluster, progress)
        return 0 if met else 1
    except KeyboardInterrupt:
        progress.say("interrupted")
        return 130
    except (DemoError, ClusterError, OSError) as error:
        progress.say(f"failed: {error}")
        if cluster is not None:
            for host in cluster:
                tail = [line for line in host.log().splitlines() if " ERROR " in line or " WARNING " in line][-3:]
                for line in tail:
                    print(f"  {host.host_id}: {line}", file=sys.stderr)
        return 1
    finally:
        if cluster is not None:
            progress.show("stopping the daemons")
            cluster.stop()
            progress.say("all daemons stopped, their files removed")


if __name__ == "__main__":
    sys.exit(main())
