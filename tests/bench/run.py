# SPDX-License-Identifier: Apache-2.0
"""``make bench``: each number beside its reference, measured in the same run.

Prints a table and writes ``build/bench.json``, rows as in ``tests/bench/rows.py``.

Machines are shared and moody: a reference and what stands beside it are measured in turn, several times, and the median
counts.  Options: ``--only NAME`` (part of a name; several), ``--quick`` (one repetition, short), ``--tools DIR``.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from dqplbd.admin.client import AdminClient
from dqplbd.cli.render import print_table
from dqplbd.lab.cluster import Cluster, HostSpec
from dqplbd.topology.location import PathClass

ROOT: Final = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from tests.bench.rows import Row, table, write_rows  # noqa: E402

MIB: Final = 2**20
SKIPPED: Final = 77
"""Exit code of a program that cannot run on this machine."""

# What the throughput rows fix, so that both sides of a ratio do the same.
PINNED_SEGMENT: Final = "64KiB"
PINNED: Final = {"qps": 8, "outstanding_per_qp": 16, "window_bytes": "8MiB", "adapt": False}
# A client looks for completions so often: what it has outstanding lasts for 80 ms.
NAP_US: Final = 5000
FLOW_MESSAGE: Final = 256 * 1024  # one segment: that many clients on two CPUs cost their share for each message
FLOWS: Final = (10, 40, 100, 250, 500, 700, 900, 1000, 1500, 5000)


class Unavailable(Exception):
    """Something that a row needs is not on this machine."""


class Skipped(Unavailable):
    """A program says so itself, by its exit code."""


@dataclass(slots=True)
class Bench:
    """What the measurements share."""

    tools: Path
    repetitions: int
    seconds: int
    rows: list[Row] = field(default_factory=list)

    def tool(self, name: str, *arguments: object, timeout: float = 300) -> dict[str, Any]:
        """Run a program that prints one JSON object.

        :raises Unavailable: it was not built.  :raises Skipped: it cannot run here.  :raises RuntimeError: it failed.
        """
        path = self.tools / name
        if not path.exists():
            raise Unavailable(f"{path} was not built")
        done = subprocess.run([str(path), *map(str, arguments)], capture_output=True, text=True, timeout=timeout)
        if done.returncode == SKIPPED:
            raise Skipped(done.stderr.strip())
        if done.returncode != 0:
            raise RuntimeError(f"{name} {' '.join(map(str, arguments))}: {done.stderr.strip() or done.returncode}")
        parsed: dict[str, Any] = json.loads(done.stdout)
        return parsed


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def medians(repetitions: int, measures: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Measure in turn, several times; the median of each."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(repetitions):
        for name, measure in measures.items():
            found[name].append(measure())
    return {name: statistics.median(values) for name, values in found.items()}


@contextlib.contextmanager
def pair(
    engine: dict[str, Any] | None = None,
    cpus: tuple[int, int] | None = None,
    segment: str = PINNED_SEGMENT,
) -> Iterator[tuple[str, str, Cluster]]:
    """Two daemons without an emulated link; their client sockets.

    :param cpus: the CPU that each daemon's engine stays on, as if it had a host of its own.
    :param segment: segment size.
    """
    classes = {path_class.value: {**PINNED, "segment_bytes": segment} for path_class in PathClass}
    config: dict[str, Any] = {"profiles": {"classes": classes}, "logging": {"level": "warning"}}
    if engine:
        config["engine"] = engine
    hosts = [
        HostSpec(name, {"engine": {"cpus": [cpus[i]]}} if cpus is not None else {})
        for i, name in enumerate(("h1", "h2"))
    ]
    with Cluster(hosts, config) as cluster:
        yield cluster["h1"].client_socket, cluster["h2"].client_socket, cluster


# -------------------------------------------------------------------------------------------------------- throughput


def iperf3(seconds: int) -> float:
    """Bytes a second of eight TCP connections on loopback, as iperf3 does it."""
    program = shutil.which("iperf3")
    if program is None:
        raise Unavailable("iperf3 is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [program, "-s", "-B", "127.0.0.1", "-p", str(port), "-1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_listening(server, port)
        done = subprocess.run(
            [program, "-c", "127.0.0.1", "-p", str(port), "-P", "8", "-t", str(seconds), "-C", "reno", "-J"],
            capture_output=True,
            text=True,
            timeout=seconds + 30,
        )
        report = json.loads(done.stdout)
        if "error" in report:
            raise Unavailable(f"iperf3: {report['error']}")
        return float(report["end"]["sum_received"]["bits_per_second"]) / 8
    finally:
        server.kill()
        server.wait()


def _wait_listening(server: subprocess.Popen[bytes], port: int, patience_s: float = 10.0) -> None:
    """Wait until something listens on a TCP port of loopback; looking does not connect, which would count as a test."""
    deadline = time.monotonic() + patience_s
    wanted = f":{port:04X}"
    while time.monotonic() < deadline and server.poll() is None:
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            if words[1].endswith(wanted) and words[3] == "0A":
                return
        time.sleep(0.02)
    raise Unavailable("iperf3 does not listen")


def throughput(bench: Bench) -> None:
    """64 MiB messages through shim, daemon, tcp, daemon, shim, beside eight plain TCP connections."""
    seconds = bench.seconds
    reference = (
        "--connections",
        8,
        "--message",
        64 * MIB,
        "--segment",
        65536,
        "--outstanding",
        16,
        "--seconds",
        seconds,
    )
    with pair() as (near, far, _):
        ends = ("--near", near, "--far", far, "--seconds", seconds)

        def stream(*more: str) -> float:
            return float(bench.tool("shim_stream", *ends, *more)["bytes_per_second"])

        measures = {
            "reference": lambda: float(bench.tool("tcp_reference", *reference)["bytes_per_s"]),
            "shim": stream,
            # Four, so that copying one message overlaps with moving the others.
            "staged": lambda: stream("--staged", "--outstanding", "4"),
        }
        try:
            iperf3(1)
            measures["iperf3"] = lambda: iperf3(seconds)
        except Unavailable as missing:
            bench.rows.append(Row("tcp_reference_validity", "bytes/s", note=f"not measured: {missing}"))
        found = medians(bench.repetitions, measures)
    valid = True
    if "iperf3" in found:
        row = Row("tcp_reference_validity", "bytes/s", found["reference"], found["iperf3"], 0.6, note="of iperf3 -P8")
        valid = bool(row.met)
        bench.rows.append(row)
    note = "of 8 plain TCP connections" if valid else "INVALID: the reference is too slow itself"
    bench.rows.append(Row("shim_throughput", "bytes/s", found["shim"], found["reference"], 0.8, valid=valid, note=note))
    bench.rows.append(
        Row("staged_throughput", "bytes/s", found["staged"], found["reference"], 0.5, valid=valid, note=note)
    )


# ----------------------------------------------------------------------------------------------------------- latency


def latency(bench: Bench) -> None:
    """64 B there and back, beside a plain blocking TCP ping-pong.

    The row with the target keeps each end on a CPU of its own, ours and the reference's, as if it had a host of its
    own.  Where the scheduler is free it puts both ends of the reference on one CPU and switches between them, which no
    two hosts can do; that is shown as well.
    """
    rounds = 500 * bench.seconds
    available = sorted(os.sched_getaffinity(0))

    def measure(cpus: tuple[int, int] | None, engine: dict[str, Any] | None = None) -> dict[str, float]:
        where = ("--cpus", f"{cpus[0]},{cpus[1]}") if cpus is not None else ()
        with pair(engine, cpus) as (near, far, _):
            ends = ("--near", near, "--far", far, "--bytes", 64, "--rounds", rounds, *where)
            plain = ("--pingpong", "--count", rounds, *where)
            return medians(
                bench.repetitions,
                {
                    "reference": lambda: float(bench.tool("tcp_reference", *plain)["median_ns"]),
                    "shim": lambda: float(bench.tool("shim_pingpong", *ends)["p50_ns"]),
                },
            )

    row = Row("round_trip_64B", "ns", None, None, 3.5, "low", note="each end on its CPU; plain blocking TCP")
    bench.rows.append(row)
    if len(available) < 2:
        row.note = "not measured: one CPU, and two ends need one each"
    else:
        found = measure((available[0], available[1]))
        row.value, row.reference = found["shim"], found["reference"]
    found = measure(None)
    bench.rows.append(
        Row("round_trip_64B_any_cpu", "ns", found["shim"], found["reference"], note="wherever the scheduler puts them")
    )
    row = Row("round_trip_64B_spinning", "ns", note="engines spin 1 ms")
    bench.rows.append(row)
    if len(available) < 4:
        row.note = f"not measured: {len(available)} CPUs, spinning needs 4"
    else:
        found = measure(None, {"spin_ns": "1ms"})
        row.value, row.reference = found["shim"], found["reference"]


# -------------------------------------------------------------------------------------------------------------- core


def core(bench: Bench) -> None:
    """Scheduling and tracking of one segment, without any I/O."""
    found = medians(bench.repetitions, {"ns": lambda: float(bench.tool("core_bench")["ns_per_segment"])})
    bench.rows.append(
        Row("core_per_segment", "ns", found["ns"], None, 100, "low", "value", note="16 QPs, 64 flows; send and receive")
    )
    row = Row("core_per_segment_instructions", "instructions", note="callgrind")
    bench.rows.append(row)
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        row.note = "not measured: valgrind is not installed"
        return
    iterations = 100_000
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                valgrind,
                "--tool=callgrind",
                f"--callgrind-out-file={folder}/out",
                "--toggle-collect=bench_segments",
                str(bench.tools / "core_bench"),
                "--iterations",
                str(iterations),
            ],
            capture_output=True,
            text=True,
            timeout=600,
        )
    counted = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode != 0 or counted is None:
        row.note = f"not measured: callgrind failed: {done.stderr.strip().splitlines()[-1:]}"
        return
    row.value = round(int(counted[1]) / iterations, 1)


# -------------------------------------------------------------------------------------------------------------- idle


def cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process, from the scheduler, which counts in nanoseconds."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total


def idle(bench: Bench) -> None:
    """A daemon with eight peers that are probed, and nothing to do."""
    seconds = 5 * bench.seconds
    with Cluster(9, {"logging": {"level": "warning"}}) as cluster:
        host = cluster["h1"]
        admin = AdminClient(host.admin)
        deadline = time.monotonic() + 60
        while admin.status().peers_up < 8 or any(
            path.estimate.rtt_ns is None for path in admin.paths() if path.peer != "h1"
        ):
            if time.monotonic() > deadline:
                raise RuntimeError("not all of eight peers were up and measured within a minute")
            time.sleep(0.5)
        time.sleep(2)  # what follows the start is over
        before, begin = cpu_ns(host.pid), time.monotonic()
        time.sleep(seconds)
        share = (cpu_ns(host.pid) - before) / 1e9 / (time.monotonic() - begin)
        resident = int(Path(f"/proc/{host.pid}/statm").read_text().split()[1]) * resource.getpagesize()
    bench.rows.append(
        Row("idle_cpu", "% of a core", round(share * 100, 3), None, 1, "low", "value", note="8 peers, probing")
    )
    bench.rows.append(
        Row("idle_memory", "MiB", round(resident / MIB, 1), None, 100, "low", "value", note="resident, 8 peers")
    )


# ------------------------------------------------------------------------------------------------------- recomputing


def recompute(bench: Bench) -> None:
    """Class and profile of 100,000 paths, from a new RTT of each."""
    from dqplbd.config import parse_config
    from dqplbd.profiles.bdp import PathInputs, ProfilePolicy
    from dqplbd.profiles.table import ProfileTable
    from dqplbd.topology.classify import ClassificationPolicy, ClassifierState, classify, next_rtt_class
    from dqplbd.topology.location import Location, class_from_labels

    config = parse_config("")
    policy = ProfilePolicy.from_config(config.profiles, config.transport)
    classes = ClassificationPolicy.from_config(config.classification, config.profiles)
    own = Location("r", "b0", "z0", "k0")
    paths = 100_000
    rtts = [(8_000, 56_000, 120_000, 240_000)[i % 4] + i % 977 for i in range(paths)]
    places = [Location("r", f"b{i % 5}", f"z{i % 38}", f"k{i % 1600}") for i in range(paths)]

    table: ProfileTable[int] = ProfileTable(policy)
    states = [ClassifierState() for _ in range(paths)]

    def recomputed(change_ns: int) -> float:
        begin = time.process_time()
        for i in range(paths):
            next_rtt_class(states[i], rtts[i] + change_ns, classes)
            found = classify(classes, states[i], class_from_labels(own, places[i]))
            table.update(i, PathInputs(found.path_class, rtts[i] + change_ns, 400_000_000_000))
        return time.process_time() - begin

    recomputed(0)
    changes = iter(range(1000, 10**9, 1000))
    seconds = medians(bench.repetitions, {"seconds": lambda: recomputed(next(changes))})["seconds"]
    bench.rows.append(
        Row(
            "recompute_100000_paths",
            "s",
            round(seconds, 3),
            None,
            1,
            "low",
            "value",
            note="classes and profiles; CPU time of one thread",
        )
    )


# -------------------------------------------------------------------------------------------------------------- flows


class FlowRun:
    """One run of shim_flows with --hold: it waits where the daemon's memory is looked at."""

    def __init__(self, bench: Bench, near: str, far: str, flows: Sequence[int], seconds: int) -> None:
        program = bench.tools / "shim_flows"
        if not program.exists():
            raise Unavailable(f"{program} was not built")
        # The same memory in all runs, however many clients share it: else caches decide.
        buffers = 8 * len(FLOWS) // len(flows)
        self._process = subprocess.Popen(
            [
                str(program),
                *("--near", near, "--far", far, "--flows", ",".join(map(str, flows)), "--hold"),
                *("--seconds", str(seconds), "--buffers", str(buffers), "--nap-us", str(NAP_US)),
                *("--bytes", str(FLOW_MESSAGE)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def event(self, name: str) -> dict[str, Any]:
        assert self._process.stdout is not None, "it was asked for"
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"shim_flows ended with {self._process.wait()} before it said {name!r}")
        said: dict[str, Any] = json.loads(line)
        if said["event"] != name:
            raise RuntimeError(f"shim_flows said {said['event']!r}, expected {name!r}")
        return said

    def go_on(self) -> None:
        assert self._process.stdin is not None, "it was asked for"
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def private_bytes(pid: int) -> int:
    """Memory of a process that is its own: the rings and buffers that it shares with clients do not count."""
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            total += int(line.split()[1]) * 1024
    return total


def one_flow_run(bench: Bench, near: str, far: str, flows: Sequence[int], pid: int) -> dict[str, float]:
    """Throughput, fairness, time to open and memory a flow of one run."""
    run = FlowRun(bench, near, far, flows, bench.seconds)
    try:
        run.event("attached")
        before = private_bytes(pid)
        run.go_on()
        opened = run.event("opened")
        run.event("held")
        grown = private_bytes(pid) - before
        run.go_on()
        done = run.event("done")
    finally:
        run.close()
    return {
        "rate": float(done["bytes_per_second"]),
        "jain": float(done["jain"]),
        "open_s": float(opened["seconds"]),
        "bytes_per_flow": grown / sum(flows),
    }


def flows(bench: Bench) -> None:
    """10,000 flows of ten clients between two hosts, all with data at once, beside one flow."""
    one: list[dict[str, float]] = []
    many: list[dict[str, float]] = []
    # Twice as often as others, and compared pair by pair: neighbours on the machine do as much to a run as what is
    # measured, and for seconds at a time.
    for _ in range(2 * bench.repetitions - 1):
        # New daemons each time: memory that the first run took would hide what the second needs.
        with pair(segment="256KiB") as (near, far, cluster):
            one.append(one_flow_run(bench, near, far, [1], cluster["h1"].pid))
            many.append(one_flow_run(bench, near, far, FLOWS, cluster["h1"].pid))

    def median(runs: list[dict[str, float]], key: str) -> float:
        return statistics.median(run[key] for run in runs)

    pairs = sorted(zip(one, many, strict=True), key=lambda two: two[1]["rate"] / two[0]["rate"])
    alone, together = pairs[len(pairs) // 2]
    bench.rows += [
        Row("flows_10000_open", "s", round(median(many, "open_s"), 4), None, 2, "low", "value", note="10 clients"),
        Row(
            "flows_10000_memory",
            "bytes a flow",
            round(median(many, "bytes_per_flow")),
            None,
            2048,
            "low",
            "value",
            note="of the sending daemon",
        ),
        Row(
            "flows_10000_throughput",
            "bytes/s",
            together["rate"],
            alone["rate"],
            0.9,
            note="of one flow with as much outstanding; messages of 256 KiB",
        ),
        Row(
            "flows_10000_fairness", "Jain's index", median(many, "jain"), None, 0.95, "high", "value", note="of clients"
        ),
    ]


# --------------------------------------------------------------------------------------------------------------- nccl

NCCL_MESSAGES: Final = {"128KiB": 128 * 1024, "512KiB": 512 * 1024}
NCCL_STREAM: Final = ("--outstanding", 8, "--comms", 8)
NCCL_COMMS: Final = 1000


def nccl_plugin(bench: Bench) -> Path:
    """The net plugin that was built with the tools.  :raises Unavailable: it was not."""
    file = bench.tools.parent / "nccl" / "libnccl-net-dqplb.so"
    if not file.exists():
        raise Unavailable(f"{file} was not built")
    return file


def nccl(bench: Bench) -> None:
    """The NCCL net plugin as NCCL's proxy drives it, beside plain TCP and beside the library that it uses."""
    plugin = ("--plugin", nccl_plugin(bench))
    seconds = bench.seconds
    nccl_stream(bench, plugin, seconds)
    nccl_pingpong(bench, plugin, 500 * seconds)

    with pair() as (near, far, _):
        opened: list[dict[str, Any]] = []
        for _ in range(bench.repetitions):
            ends = ("--near", near, "--far", far)
            opened.append(bench.tool("nccl_bench", "comms", *plugin, *ends, "--comms", NCCL_COMMS))
    seconds_open = statistics.median(one["seconds"] for one in opened)
    heap = statistics.median(max(one["bytes_near"], one["bytes_far"]) for one in opened)
    note = f"{NCCL_COMMS} comms, listened for, connected and accepted"
    bench.rows += [
        Row("nccl.open_1000", "s", round(seconds_open, 4), None, 1, "low", "value", note=note),
        Row("nccl.comm_memory", "bytes a comm", heap, None, 4096, "low", "value", note="heap of the process"),
    ]

    with pair() as (near, _, _):
        for memory in ("shim", "dmabuf"):
            row = Row(f"nccl.register_again_{memory}", "ns", None, None, 5000, "low", "value")
            bench.rows.append(row)
            try:
                arguments = ("--near", near, "--memory", memory, "--rounds", 500)
                found = medians(
                    bench.repetitions,
                    {"ns": lambda: float(bench.tool("nccl_bench", "register", *plugin, *arguments)["ns"])},  # noqa: B023
                )
            except Skipped as missing:
                row.note = f"not measured: {missing}"
            else:
                row.value = found["ns"]
                row.note = "known already, and looked at whether it is the same"


def nccl_stream(bench: Bench, plugin: tuple[object, ...], seconds: int) -> None:
    """Eight comms with eight messages each, from the program's own memory and from the library's."""
    reference = ("--connections", 8, "--message", 64 * MIB, "--segment", 65536, "--outstanding", 16)
    with pair() as (near, far, _):
        ends = ("--near", near, "--far", far, "--seconds", seconds)

        def stream(message: int, memory: str) -> float:
            more = (*NCCL_STREAM, "--message", message, "--memory", memory)
            return float(bench.tool("nccl_bench", "stream", *plugin, *ends, *more)["bytes_per_second"])

        def staged() -> float:
            arguments = (*ends, "--staged", "--outstanding", 4)
            return float(bench.tool("shim_stream", *arguments)["bytes_per_second"])

        def plain() -> float:
            return float(bench.tool("tcp_reference", *reference, "--seconds", seconds)["bytes_per_s"])

        measures: dict[str, Callable[[], float]] = {"reference": plain, "staged": staged}
        for name, message in NCCL_MESSAGES.items():
            for memory in ("malloc", "shim"):
                measures[f"{memory} {name}"] = partial(stream, message, memory)
        found = medians(bench.repetitions, measures)
    what = "8 comms, 8 messages each"
    for name in NCCL_MESSAGES:
        own, zero_copy = found[f"malloc {name}"], found[f"shim {name}"]
        tcp = f"{what}; of 8 plain TCP connections"
        bench.rows += [
            Row(f"nccl.staged_{name}", "bytes/s", own, found["reference"], 0.5, note=tcp),
            Row(
                f"nccl.staged_{name}_of_shim", "bytes/s", own, found["staged"], 0.9, note="of the library's own, staged"
            ),
            Row(f"nccl.shim_{name}", "bytes/s", zero_copy, found["reference"], 0.8, note=tcp),
        ]


def nccl_pingpong(bench: Bench, plugin: tuple[object, ...], rounds: int) -> None:
    """64 B there and back, beside the library's own ping-pong, each end on a CPU of its own.

    NCCL's threads never sleep.  Where an end and its daemon share a CPU that costs, whoever asks; so the row with the
    target compares with a ping-pong that asks in the same way, and the one that sleeps is shown beside it.
    """
    row = Row(
        "nccl.round_trip_64B", "ns", None, None, 1.15, "low", note="each end on its CPU; of the library's, polled"
    )
    waiting = Row("nccl.round_trip_64B_of_waiting", "ns", note="of the library's own that sleeps until it is woken")
    bench.rows += [row, waiting]
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2:
        row.note = waiting.note = "not measured: one CPU, and two ends need one each"
        return
    cpus = (available[0], available[1])
    where = ("--cpus", f"{cpus[0]},{cpus[1]}")
    with pair(None, cpus) as (near, far, _):
        ends = ("--near", near, "--far", far, "--rounds", rounds, *where)
        found = medians(
            bench.repetitions,
            {
                "shim": lambda: float(bench.tool("shim_pingpong", *ends, "--bytes", 64, "--poll")["p50_ns"]),
                "waiting": lambda: float(bench.tool("shim_pingpong", *ends, "--bytes", 64)["p50_ns"]),
                "plugin": lambda: float(
                    bench.tool("nccl_bench", "pingpong", *plugin, *ends, "--message", 64)["p50_ns"]
                ),
            },
        )
    row.value, row.reference = found["plugin"], found["shim"]
    waiting.value, waiting.reference = found["plugin"], found["waiting"]


# --------------------------------------------------------------------------------------------------------------- main

PARTS: Final[dict[str, Callable[[Bench], None]]] = {
    "throughput": throughput,
    "latency": latency,
    "core": core,
    "idle": idle,
    "recompute": recompute,
    "flows": flows,
    "nccl": nccl,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure against the references.")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="only this part; several")
    parser.add_argument("--quick", action="store_true", help="once each, one second")
    parser.add_argument("--tools", type=Path, default=ROOT / "build/release/native/tools", help="the built programs")
    parser.add_argument("--output", type=Path, default=ROOT / "build/bench.json", help="where the numbers go")
    options = parser.parse_args()
    bench = Bench(options.tools, 1 if options.quick else 5, 1 if options.quick else 2)
    load = os.getloadavg()[0]
    cpus = len(os.sched_getaffinity(0))
    others = ": others are at work, expect noise" if load > cpus / 2 else ""
    say(f"{platform.machine()}, {cpus} CPUs, load {load:.1f}{others}")
    failed = False
    for name, part in PARTS.items():
        if options.only and name not in options.only:
            continue
        say(f"measuring {name}: {(part.__doc__ or '').strip().splitlines()[0]}")
        try:
            part(bench)
        except Unavailable as missing:
            bench.rows.append(Row(name, "", note=f"not measured: {missing}"))
        except Exception as error:  # the other rows are worth having all the same
            failed = True
            bench.rows.append(Row(name, "", note=f"FAILED: {error}"))
    write_rows(options.output, bench.rows)
    print_table(table(bench.rows))
    missed = [row.name for row in bench.rows if row.met is False]
    say(f"numbers in {options.output}; {'targets missed: ' + ', '.join(missed) if missed else 'every target met'}")
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
