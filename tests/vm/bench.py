# SPDX-License-Identifier: Apache-2.0
"""``make bench-rdma``: what dqplbd reaches on the kernel's soft-RoCE, beside perftest in the same guest and run.

Throughput: ``dqplb bench`` between two daemons against ``ib_write_bw`` with the same message size, queue pairs and
bytes in flight, in turn and several times; medians count.  RTT: the prober's smallest against that of datagrams polled
by one thread at both ends, over the same fabric with the same delays.

Prints a table and puts the rows into ``build/rdma.json``.  Without ``--inside`` it runs itself in a guest.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from dqplbd.admin.client import AdminClient  # noqa: E402
from dqplbd.cli.render import print_table  # noqa: E402
from dqplbd.lab.cluster import Cluster, HostSpec  # noqa: E402
from tests.bench.rows import Row, merge_rows, table  # noqa: E402
from tests.vm.fabric import Fabric  # noqa: E402
from tests.vm.guest import GuestError, run_guest  # noqa: E402

TOOLS: Final = ROOT / "build/release/native/tools"
KIB: Final = 1024
MIB: Final = 2**20
MESSAGE: Final = 64 * MIB
MESSAGES: Final = 6
# (segment, queue pairs, segments in flight on each): rxe keeps at most 128 packets, half a MiB, in flight on one.
SHAPES: Final = ((64 * KIB, 1, 8), (64 * KIB, 8, 8), (MIB, 1, 2), (MIB, 8, 2))
DELAYS_NS: Final = (100_000, 1_000_000)
PARTS: Final = ("rtt", *map(str, range(len(SHAPES))))
PROBES: Final = 16  # minima of as many samples are compared
ATTEMPTS: Final = 8  # perftest, on a moody clock, sometimes says that everything took 0
_PATIENCE_S: Final = 120.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Perftest:
    """A perftest program between the first two hosts of a fabric; the server end is always ended."""

    def __init__(self, program: str, *options: object) -> None:
        self._command = [program, "-x", "1", "-F", *map(str, options)]

    def run(self, fabric: Fabric) -> str:
        """What the client end prints.  :raises RuntimeError: it failed, or never reached the server."""
        server = subprocess.Popen(
            [*self._command, "-d", fabric.port(0).device], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            client = [*self._command, "-d", fabric.port(1).device, fabric.port(0).address]
            limit = time.monotonic() + _PATIENCE_S
            while True:
                done = subprocess.run(client, capture_output=True, text=True, timeout=_PATIENCE_S)
                if done.returncode == 0:
                    return done.stdout
                # The server may not listen yet; there is nothing to see it by.
                if server.poll() is not None or time.monotonic() > limit:
                    raise RuntimeError(f"{' '.join(client)}: {done.stdout[-500:]}{done.stderr[-500:]}")
                time.sleep(0.02)
        finally:
            server.kill()
            server.wait()


def perftest_rate(fabric: Fabric, size: int, qps: int, depth: int) -> float:
    """Bytes a second of ``ib_write_bw``, average, with messages of ``size`` bytes."""
    rounds = max(MESSAGE * MESSAGES // size // qps // 2, 2 * depth, 5)  # it wants at least 5
    tool = Perftest(
        "ib_write_bw", "-s", size, "-q", qps, "-t", depth, "-n", rounds, "-m", 4096, "--report_gbits", "--noPeak"
    )
    for _ in range(ATTEMPTS):
        printed = tool.run(fabric)
        for line in printed.splitlines():
            numbers = line.split()
            if len(numbers) >= 4 and numbers[0] == str(size) and numbers[1].isdecimal() and float(numbers[3]) > 0:
                return float(numbers[3]) * 1e9 / 8
    raise RuntimeError(f"ib_write_bw printed no result:\n{printed[-800:]}")


@contextlib.contextmanager
def awake() -> Iterator[None]:
    """Keep the CPU from sleeping, without taking time from anybody.

    The delay stands for a wire, which is as long whether CPUs sleep or not.  It is made by timers of the guest's one
    CPU, and when that sleeps, they are late by what its host takes to wake it.
    """
    command = ["chrt", "--idle", "0", sys.executable, "-S", "-c", "while True: pass"]
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def true_rtt_ns(fabric: Fabric) -> float:
    """Smallest round trip of datagrams that one thread polls at both ends, without a pause.

    Not ``ib_send_lat``: its two processes would take turns on the one CPU of the guest by whole time slices.
    """
    command = [str(TOOLS / "verbs_ping"), fabric.port(1).device, fabric.port(0).device, str(PROBES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return float(json.loads(done.stdout)["min_ns"])


def hosts(fabric: Fabric, pinned: dict[str, Any] | None) -> Cluster:
    """Two daemons over rxe that know each other, as configured by default, but for what is pinned."""
    specs = [
        HostSpec(
            f"h{i}",
            {"devices": [{"name": "rdma0", "provider": "verbs", "rdma_device": fabric.port(i).device}]},
        )
        for i in range(2)
    ]
    config: dict[str, Any] = {}
    if pinned is not None:
        classes = ("host", "rack", "zone", "building", "region", "unknown")
        config["profiles"] = {"classes": dict.fromkeys(classes, pinned)}
        config["transport"] = {"grants": False}
    return Cluster(specs, config)


def bench_rate(cluster: Cluster, message: int, count: int, outstanding: int) -> float:
    """Bytes a second of ``dqplb bench`` from one daemon to the other, of memory that is not copied."""
    command = [sys.executable, "-P", "-m", "dqplbd.cli.main", "bench", "run", "--json", "--memory", "shim"]
    command += ["--rounds", "0", "--message", str(message), "--count", str(count), "--outstanding", str(outstanding)]
    command += ["--client-socket", cluster["h1"].client_socket, "--peer-socket", cluster["h0"].client_socket]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    if done.returncode != 0:
        raise RuntimeError(f"dqplb bench: {done.stderr[-2000:]}{cluster['h1'].log_tail()}")
    result = json.loads(done.stdout)["data"]["throughput"][0]
    if not result["verified"]:
        raise RuntimeError("what arrived is not what was sent")
    return float(result["bytes_per_second"])


def in_turn(repetitions: int, *measures: Callable[[], float]) -> list[float]:
    """Measure in turn, several times: the median of each."""
    found = [[measure() for measure in measures] for _ in range(repetitions)]
    return [statistics.median(values) for values in zip(*found, strict=True)]


def throughput(fabric: Fabric, shape: tuple[int, int, int], repetitions: int, rows: list[Row]) -> None:
    """Messages of 64 MiB, against ``ib_write_bw`` that moves as much memory over as many queue pairs.

    A message of 64 MiB comes from memory and goes to memory.  ``ib_write_bw`` with messages of a segment sends one
    buffer again and again, which stays in the CPU's cache: here, where the CPU copies, that is almost twice as fast.
    It is a row beside the other, without a target.  rxe keeps half a MiB of each queue pair in flight at most.
    """
    segment, qps, depth = shape
    name = f"rdma.throughput_{segment // KIB}KiB_{qps}qp"
    say(f"throughput, segments of {segment // KIB} KiB on {qps} queue pairs")
    pinned = {
        "qps": qps,
        "segment_bytes": segment,
        "outstanding_per_qp": depth,
        "window_bytes": qps * depth * segment,
        "adapt": False,
    }
    with hosts(fabric, pinned) as cluster:
        bench_rate(cluster, MESSAGE, 1, 1)  # connects
        ours, same, cached = in_turn(
            repetitions,
            lambda: bench_rate(cluster, MESSAGE, MESSAGES, 2),
            lambda: perftest_rate(fabric, MESSAGE // qps, qps, 2),
            lambda: perftest_rate(fabric, segment, qps, depth),
        )
        rows.append(Row(name, "bytes/s", ours, same, 0.95, note="64 MiB messages; ib_write_bw, as much memory"))
        rows.append(Row(f"{name}_cached", "bytes/s", ours, cached, note="ib_write_bw, one buffer of a segment"))
        if (segment, qps) == (64 * KIB, 8):
            small = bench_rate(cluster, 64 * KIB, MESSAGE * MESSAGES // 2 // (64 * KIB), 64)
            rows.append(Row("rdma.throughput_64KiB_messages", "bytes/s", small, cached, note="a segment each"))


def probed_rtt_ns(cluster: Cluster) -> float:
    """The smallest RTT that the prober of the second daemon sees now."""
    admin = AdminClient(cluster["h1"].admin)
    limit = time.monotonic() + _PATIENCE_S
    while not any(path.peer == "h0" and path.estimate.rtt_ns for path in admin.paths()):  # the first probes are due
        if time.monotonic() > limit:
            raise RuntimeError(f"h0 was not probed within {_PATIENCE_S} s{cluster['h1'].log_tail()}")
        time.sleep(0.05)
    report = admin.probe("h0", PROBES)
    rtts = [sample.rtt_ns for path in report.paths for sample in path.samples if sample.rtt_ns is not None]
    if not rtts:
        raise RuntimeError(f"no probe was answered{cluster['h1'].log_tail()}")
    return float(min(rtts))


def rtt(fabric: Fabric, rows: list[Row]) -> None:
    """Round trips, without delay and with some."""
    with hosts(fabric, None) as cluster, awake():
        for one_way in (0, *DELAYS_NS):
            say(f"round trip with {2 * one_way / 1000:g} us of delay")
            for host in range(2):
                fabric.set_delay(host, one_way)
            true = true_rtt_ns(fabric)
            seen = probed_rtt_ns(cluster)
            rows.append(
                Row(
                    f"rdma.probe_rtt_error_{2 * one_way // 1000}us",
                    "ns",
                    abs(seen - true),
                    true,
                    round(max(0.15 * true, 10_000)),
                    better="low",
                    of="value",
                    note=f"prober {seen / 1000:.1f} us, smallest of {PROBES}; true: verbs_ping",
                )
            )


def inside(part: str, output: Path, repetitions: int) -> int:
    rows: list[Row] = []
    with Fabric(2) as fabric:
        if part == "rtt":
            rtt(fabric, rows)
        else:
            throughput(fabric, SHAPES[int(part)], repetitions, rows)
    merge_rows(output, rows)
    print_table(table(rows))
    return 1 if any(row.met is False for row in rows) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure on soft-RoCE, beside perftest.")
    parser.add_argument("--repetitions", type=int, default=5, help="of each measurement (default: 5)")
    parser.add_argument("--output", type=Path, default=ROOT / "build/rdma.json", help="where the numbers go")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this; several (default: all)")
    parser.add_argument("--inside", action="store_true", help="this machine, or guest, has rdma_rxe: measure here")
    options = parser.parse_args()
    if options.inside:
        return max(inside(part, options.output, options.repetitions) for part in options.part)
    output = options.output.resolve()
    missed = []
    # A guest each: where memory happens to lie makes a quarter of the rate, and a later part would inherit it.
    for part in options.part or PARTS:
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--inside", "--part", part]
        command += ["--repetitions", str(options.repetitions), "--output", str(output)]
        try:
            if run_guest(command, out=output.parent, memory_mb=2048, timeout_s=600, live=True).rc:
                missed.append(part)
        except GuestError as error:
            say(str(error))
            return 1
    say(f"numbers in {output}; {'targets missed in: ' + ', '.join(missed) if missed else 'every target met'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
