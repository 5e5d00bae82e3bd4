# SPDX-License-Identifier: Apache-2.0
"""``make test-rdma``: runs the tests of this folder in guests, two at a time, and says what came of them.

A group is one file in one kind of time; it has a guest of its own.  A file says at its top which kinds it wants and
what it needs beyond the usual::

    TIMES = ("real", "simulated")
    MEMORY_MB = 1024
    TIMEOUT_S = 240
    EMULATED = False        # too slow where QEMU emulates the processor
    PLACES = ("native", "qemu")  # elsewhere it cannot run

Files in ``host/`` test the guest itself, from the host.  Prints a line a group, and the whole output of those that
failed.  Writes ``build/rdma/junit.xml``.  What is not understood here goes to pytest: ``-k word``, ``-x``.
``DQPLBD_VM`` chooses where the tests run: see guest.py.  Groups that cannot run there are left out, with a line that
says why.
"""

import argparse
import ast
import concurrent.futures
import os
import shutil
import signal
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
if __name__ == "__main__":
    sys.path.append(str(ROOT))

from tests.vm import qemu  # noqa: E402
from tests.vm.guest import GuestError, no_simulated_time, place, prepared_kernel, run_guest, run_here  # noqa: E402
from tests.vm.kernel.build import KernelError  # noqa: E402

OUT: Final = ROOT / "build/rdma"
TIMES: Final = ("real", "simulated")
PLACES: Final = ("native", "uml", "qemu")
DEFAULTS: Final[dict[str, Any]] = {
    "TIMES": ("real",),
    "MEMORY_MB": 768,
    "TIMEOUT_S": 300,
    "EMULATED": True,
    "PLACES": PLACES,
}
HOST: Final = "host"
NO_TESTS: Final = 5
"""What pytest ends with when it was told to run none."""


@dataclass(frozen=True, slots=True)
class Group:
    """Tests that share a guest."""

    file: Path
    time: str
    memory_mb: int
    timeout_s: float
    emulated: bool
    places: tuple[str, ...]

    @property
    def name(self) -> str:
        """For people, and for files."""
        return f"{self.file.stem.removeprefix('test_')}-{self.time}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a group.

    :ivar failure: everything that it printed, when something went wrong; else empty.
    """

    group: Group
    tests: int
    skipped: int
    seconds: float
    failure: str = ""


def wants(file: Path) -> dict[str, Any]:
    """What a file says at its top.  :raises SystemExit: it says something that is not understood."""
    said = dict(DEFAULTS)
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name in DEFAULTS:
                said[name] = ast.literal_eval(statement.value)
    unknown = set(said["TIMES"]) - set(TIMES)
    if unknown or not said["TIMES"]:
        raise SystemExit(f"{file}: TIMES is {said['TIMES']}; expected some of {TIMES}")
    if set(said["PLACES"]) - set(PLACES):
        raise SystemExit(f"{file}: PLACES is {said['PLACES']}; expected some of {PLACES}")
    return said


def groups(files: Sequence[Path]) -> list[Group]:
    """All groups; those that may take longest first, so that none of them is left over at the end."""
    found = []
    for file in files:
        said = wants(file) if file.parent == HERE else {**wants(file), "TIMES": (HOST,)}
        found += [
            Group(file, kind, said["MEMORY_MB"], said["TIMEOUT_S"], said["EMULATED"], said["PLACES"])
            for kind in said["TIMES"]
        ]
    return sorted(found, key=lambda group: (-group.timeout_s, group.name))


def why_left_out(group: Group) -> str:
    """Why a group cannot run here; empty where it can."""
    if group.time == "simulated":
        return no_simulated_time()
    if place() not in group.places:
        return f"it cannot run in {place()}, but in {' or '.join(group.places)}: see DQPLBD_VM"
    if not group.emulated and place() == "qemu" and not qemu.hardware():
        return "it is too slow where QEMU emulates the processor"
    return ""


def run_group(group: Group, arguments: Sequence[str], cpu: int) -> Outcome:
    """Run one group on one CPU."""
    report = OUT / f"{group.name}.xml"
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=200"]
    command += [f"--junitxml={report}", "-o", f"junit_suite_name={group.name}", str(group.file), *arguments]
    begin = time.monotonic()
    env = {"DQPLBD_GUEST": group.time, "PYTHONDONTWRITEBYTECODE": "1"}
    timeout_s = group.timeout_s * (qemu.slowdown() if place() == "qemu" else 1)
    try:
        if group.time == HOST:
            result = run_here(command, timeout_s=timeout_s, env=env, cwd=ROOT)
        else:
            result = run_guest(
                command,
                out=OUT,
                simulated=group.time == "simulated",
                memory_mb=group.memory_mb,
                timeout_s=timeout_s,
                env=env,
                cpu=cpu,
            )
    except GuestError as error:
        return Outcome(group, 0, 0, time.monotonic() - begin, str(error))
    failed = result.rc not in (0, NO_TESTS)
    if not report.is_file():
        return Outcome(group, 0, 0, result.seconds, f"{result.stdout}{result.stderr}\n{report} was not written")
    suite = ET.parse(report).getroot().find("testsuite")
    count = {} if suite is None else suite.attrib
    return Outcome(
        group,
        int(count.get("tests", 0)),
        int(count.get("skipped", 0)),
        result.seconds,
        (result.stdout or result.stderr) if failed else "",
    )


def line(outcome: Outcome) -> str:
    """One line for people."""
    skipped = f", {outcome.skipped} skipped" if outcome.skipped else ""
    word = "FAILED" if outcome.failure else "ok"
    return f"{outcome.group.name:<28} {word:<6} {outcome.seconds:6.1f} s   {outcome.tests} tests{skipped}"


def merge_reports(files: Sequence[Path], target: Path) -> None:
    """Put all test suites into one file."""
    merged = ET.Element("testsuites")
    for file in files:
        if file.is_file():
            merged.extend(ET.parse(file).getroot().findall("testsuite"))
    ET.ElementTree(merged).write(target, encoding="utf-8", xml_declaration=True)


def run_all(todo: Sequence[Group], arguments: Sequence[str]) -> list[Outcome]:
    """Run them, one a CPU at a time."""
    # On this machine itself they would find each other's fabric in the way.
    cpus = sorted(os.sched_getaffinity(0))[: 1 if place() == "native" else 2]
    free = list(cpus)
    outcomes = []

    def one(group: Group) -> Outcome:
        cpu = free.pop()  # as many as there are threads
        try:
            return run_group(group, arguments, cpu)
        finally:
            free.append(cpu)

    with concurrent.futures.ThreadPoolExecutor(len(cpus)) as pool:
        try:
            for done in concurrent.futures.as_completed([pool.submit(one, group) for group in todo]):
                outcomes.append(done.result())
                print(line(outcomes[-1]), flush=True)
                if outcomes[-1].failure:
                    (OUT / f"{outcomes[-1].group.name}.log").write_text(outcomes[-1].failure, encoding="utf-8")
        except (KeyboardInterrupt, SystemExit):
            # The guests' keepers end them; waiting for the threads would wait for the guests.
            os._exit(130)
    return outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's text.  :returns: exit code."""
    parser = argparse.ArgumentParser(description="Run the RDMA tests in guests; further arguments go to pytest.")
    parser.add_argument(
        "--file", action="append", default=[], metavar="NAME", help="only this file, such as test_fabric.py"
    )
    parser.add_argument("--time", choices=TIMES, help="only this kind of time")
    options, arguments = parser.parse_known_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    files = sorted([*HERE.glob("test_*.py"), *HERE.glob("host/test_*.py")])
    if options.file:
        files = [file for file in files if file.name in options.file]
    todo = [group for group in groups(files) if options.time in (None, group.time)]
    left_out = [group for group in todo if why_left_out(group)]
    for group in left_out:
        print(f"{group.name:<28} left out: {why_left_out(group)}", flush=True)
    todo = [group for group in todo if group not in left_out]
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True, exist_ok=True)  # a mount point stays
    try:
        # Once, and not by each of those that run at the same time.
        if place() != "native" or any(group.time == "simulated" for group in todo):
            os.environ["DQPLBD_KERNEL"] = str(prepared_kernel())
    except KernelError as error:
        print(f"no guest: {error}", file=sys.stderr)
        return 1
    begin = time.monotonic()
    outcomes = run_all(todo, arguments)
    merge_reports([OUT / f"{group.name}.xml" for group in todo], OUT / "junit.xml")
    failed = [outcome for outcome in outcomes if outcome.failure]
    for outcome in failed:
        print(f"\n--- {outcome.group.name}\n{outcome.failure}")
    tests = sum(outcome.tests for outcome in outcomes)
    without = f", {len(left_out)} groups left out" if left_out else ""
    took = time.monotonic() - begin
    print(f"{tests} tests in {len(outcomes)} guests, {len(failed)} groups failed{without}, {took:.0f} s")
    if tests == 0 and not failed and not left_out:
        print(f"no test was chosen by {' '.join(arguments)}")
    return 1 if failed or tests == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
