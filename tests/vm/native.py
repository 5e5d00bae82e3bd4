# SPDX-License-Identifier: Apache-2.0
"""The C tests that want RDMA devices: the suite ``rdma`` of ``native/tests``.

Built on the host, since a guest can only read::

    python tests/vm/native.py

and run in a guest by test_native.py, under the undefined sanitizer, and by test_memcheck.py, under valgrind.  User-Mode
Linux has too small an address space for the address and thread sanitizers: those are run over tcp on the host, and by
test_sanitized.py where the tests run on the host itself or in a virtual machine.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.append(str(ROOT))

from tests.vm.guest import place  # noqa: E402

BUILDS: Final[dict[str, tuple[str, ...]]] = {
    "rdma-undefined": ("-Db_sanitize=undefined",),
    "rdma-memcheck": (),
}
"""Folders below build/, and the options of Meson that make them differ."""
WIDE_BUILDS: Final[dict[str, tuple[str, ...]]] = {
    "rdma-address": ("-Db_sanitize=address,undefined",),
    "rdma-thread": ("-Db_sanitize=thread",),
}
"""Likewise; they want more address space than User-Mode Linux has."""
SUITE: Final = "rdma"


@dataclass(frozen=True, slots=True)
class NativeTest:
    """One test as Meson knows it.

    :ivar environment: what it needs beyond that of its caller.  :ivar timeout_s: without valgrind.
    :ivar targets: what must be built for it: its program, and what that loads.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    timeout_s: float
    targets: tuple[str, ...]


def tests(build: str) -> list[NativeTest]:
    """The tests that want RDMA devices, of one build, in Meson's order.

    :param build: key of BUILDS or WIDE_BUILDS.
    :raises FileNotFoundError: it was not built.
    """
    folder = ROOT / "build" / build / "meson-info"
    listing = folder / "intro-tests.json"
    if not listing.is_file():
        raise FileNotFoundError(f"{listing} is not there; build the C tests on the host: python tests/vm/native.py")
    targets = json.loads((folder / "intro-targets.json").read_text(encoding="utf-8"))
    names = {target["id"]: target["name"] for target in targets}
    return [
        NativeTest(
            one["name"],
            tuple(one["cmd"]),
            one["env"],
            float(one["timeout"]),
            tuple(names[target] for target in one["depends"]),
        )
        for one in json.loads(listing.read_text(encoding="utf-8"))
        if SUITE in (suite.rpartition(":")[2] for suite in one["suite"])
    ]


def run(
    test: NativeTest, devices: Sequence[str], *, wrapper: Sequence[str] = (), slower: float = 1.0
) -> subprocess.CompletedProcess[str]:
    """Run a test between two devices.

    :param devices: names of two RDMA devices; that one is not there is a failure.
    :param wrapper: command that runs the test.
    :param slower: factor on the test's time limit.
    :returns: exit code, and stdout and stderr together.
    :raises subprocess.TimeoutExpired: it took longer.
    """
    return subprocess.run(
        [*wrapper, *test.command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        timeout=test.timeout_s * slower,
        env={
            **os.environ,
            **test.environment,
            "DQ_TEST_ADDRESS_A": devices[0],
            "DQ_TEST_ADDRESS_B": devices[1],
            "DQ_TEST_REQUIRE": "1",
            "UBSAN_OPTIONS": "halt_on_error=1:abort_on_error=1:print_stacktrace=1",
            "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
        },
    )


def build_all(jobs: int) -> None:
    """Configure where needed, and compile.

    :param jobs: compilers at a time, 1 or more.
    :raises subprocess.CalledProcessError: Meson or the compiler failed; its output is printed.
    """
    # Next to this interpreter first: the environment's Meson is the one that the project was tried with.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"}

    def meson(*arguments: str) -> None:
        command = [sys.executable, "-m", "mesonbuild.mesonmain", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
            done.check_returncode()

    for name, options in (BUILDS if place() == "uml" else BUILDS | WIDE_BUILDS).items():
        folder = ROOT / "build" / name
        if not (folder / "build.ninja").is_file():
            meson("setup", str(folder), "-Dpython=false", "-Dtests=true", *options)
        built: list[str] = []
        # Compiling also configures anew where that is due, and then there may be other tests.
        while (wanted := sorted({target for test in tests(name) for target in test.targets})) != built:
            meson("compile", "-C", str(folder), "-j", str(jobs), *wanted)
            built = wanted


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's text.  :returns: exit code."""
    parser = argparse.ArgumentParser(description="Build the C tests that want RDMA devices.")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="compilers at a time (default: 1)")
    options = parser.parse_args(argv)
    try:
        build_all(max(1, options.jobs))
    except subprocess.CalledProcessError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
