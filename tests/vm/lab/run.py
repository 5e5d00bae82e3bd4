# SPDX-License-Identifier: Apache-2.0
"""``make lab``: whole daemons on a fabric of up to 32 hosts, in simulated time.

Each job runs in a guest of its own (:mod:`tests.vm.guest`), where work costs no time and delays are exact: unchanged
daemons and clients on the kernel's RDMA stack, with the published round trip times and links of 100 Gbit/s.  Prints a
table, puts rows into ``build/rdma.json``, and ends with 1 when a target is missed, with 2 when something did not run.
What the guests brought back lies in ``build/lab/``.  ``--twice`` runs all twice with one seed and compares.
"""

import argparse
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT))

from dqplbd.cli.render import print_table  # noqa: E402
from tests.bench.rows import Row, merge_rows  # noqa: E402
from tests.vm.guest import GuestError, run_guest  # noqa: E402
from tests.vm.kernel.build import KernelError, kernel  # noqa: E402
from tests.vm.lab.jobs import Job, standard_jobs  # noqa: E402
from tests.vm.lab.report import differences, rows_of, tables_of  # noqa: E402

HERE: Final = Path(__file__).resolve().parent
GUESTS: Final = 2
"""At a time, at most: a guest has one CPU, and the daemons of 32 hosts take 3 GiB."""
TIMEOUT_S: Final = 900
_BASE_MB: Final = 700
_HOST_MB: Final = 100


class Progress:
    """Lines with the time since the start; several guests tell at a time."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        """One line."""
        with self._lock:
            print(f"[{time.monotonic() - self._begin:5.1f}s] {text}", flush=True)


def memory_mb(job: Job) -> int:
    """What a job's guest needs: daemons, clients, and what is moved, at both ends."""
    moved = sum(transfer.bytes for transfer in job.transfers) >> 20
    return _BASE_MB + _HOST_MB * len(job.places) * (2 if job.transfers else 1) + 3 * moved


def run_job(job: Job, out: Path, seed: int, provider: str, cpu: int | None) -> dict[str, Any]:
    """Run one job in a guest.  :returns: what it brought back.  :raises GuestError: it did not end well."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "job.json").write_text(json.dumps(job.as_dict()), encoding="utf-8")
    result = out / "result.json"
    result.unlink(missing_ok=True)
    done = run_guest(
        [sys.executable, "-P", str(HERE / "inside.py"), str(out / "job.json"), str(result)],
        out=out,
        simulated=True,
        memory_mb=memory_mb(job),
        timeout_s=TIMEOUT_S,
        env={"DQPLBD_LAB_PROVIDER": provider},
        cpu=cpu,
        seed=str(seed),
    )
    (out / "log").write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.rc != 0:
        raise GuestError(f"{job.name} ended with {done.rc}:\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def run_jobs(jobs: Sequence[Job], folder: Path, seed: int, provider: str, progress: Progress) -> dict[str, Any]:
    """Run jobs, as many guests at a time as there are CPUs for them.

    :returns: results by name; those of jobs that did not end well are missing.
    """
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    results: dict[str, Any] = {}

    def work(cpu: int | None) -> None:
        while True:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            begin = time.monotonic()
            progress.say(f"{job.title}: starts")
            try:
                results[job.name] = run_job(job, folder / job.name, seed, provider, cpu)
                progress.say(f"{job.title}: done in {time.monotonic() - begin:.0f} s")
            except (GuestError, OSError, ValueError) as error:
                progress.say(f"{job.title}: failed: {error}")

    cpus = sorted(os.sched_getaffinity(0))[-GUESTS:]
    threads = [threading.Thread(target=work, args=(cpu,), name=f"guest on {cpu}") for cpu in cpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """The command.  :returns: exit code."""
    parser = argparse.ArgumentParser(description="Whole daemons on a fabric in simulated time.")
    parser.add_argument("--hosts", type=int, default=32, help="of the largest fabric, 8..32 (default: 32)")
    parser.add_argument("--seed", type=int, default=1, help="all randomness follows from it (default: 1)")
    parser.add_argument("--scenario", default="", help="only jobs whose name has this part")
    parser.add_argument("--provider", choices=("verbs", "tcp"), default="verbs", help="what carries (default: verbs)")
    parser.add_argument("--twice", action="store_true", help="run all twice and compare")
    parser.add_argument("--output", type=Path, default=ROOT / "build/rdma.json", help="where the rows go")
    options = parser.parse_args(arguments)
    if not 8 <= options.hosts <= 32:
        parser.error(f"--hosts {options.hosts} is not within 8..32")
    jobs = [job for job in standard_jobs(options.hosts) if options.scenario in job.name]
    if not jobs:
        names = ", ".join(job.name for job in standard_jobs(options.hosts))
        parser.error(f"--scenario {options.scenario} is part of no name; there are {names}")
    progress = Progress()
    try:
        kernel()
    except KernelError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    folder = ROOT / "build/lab"
    # A second run in the same folders: their names are part of what randomness follows from.
    runs = [run_jobs(jobs, folder, options.seed, options.provider, progress) for _ in range(2 if options.twice else 1)]
    results = runs[0]
    rows = [row for job in jobs if job.name in results for row in rows_of(job, results[job.name])]
    apart: list[str] = []
    if options.twice:
        for job in jobs:
            if all(job.name in run for run in runs):
                apart += differences(job, runs[0][job.name], runs[1][job.name])
        rows.append(Row("lab_same_seed_differences", "numbers", len(apart), None, 0, "low", "value"))
    for table in tables_of(jobs, results):
        print()
        print_table(table)
    print()
    for text in apart:
        progress.say(f"two runs differ: {text}")
    merge_rows(options.output, rows)
    missed = [row for row in rows if row.met is False]
    for row in missed:
        reached = row.ratio if row.of == "ratio" and row.ratio is not None else row.value
        progress.say(f"missed: {row.name} is {reached:.4g}, target {row.target:.4g}")
    complete = all(job.name in run for run in runs for job in jobs)
    progress.say(f"rows in {options.output}" + ("" if missed or not complete else "; every target met"))
    return 2 if not complete else 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
