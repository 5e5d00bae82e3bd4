# SPDX-License-Identifier: Apache-2.0
"""The C tests over RDMA devices, under valgrind's memcheck: no error, no leak.  See native.py.

Those of the net plugin: test_nccl_memcheck.py.
"""

from collections.abc import Iterator

import pytest

from tests.vm import native
from tests.vm.fabric import Fabric

TIMES = ("real",)
MEMORY_MB = 1024
TIMEOUT_S = 420

ERROR = 99  # exit code of valgrind when it found something; no test has it
VALGRIND = [
    *("valgrind", "--tool=memcheck", "--quiet", "--num-callers=30", "--fair-sched=yes", f"--error-exitcode={ERROR}"),
    *(
        "--leak-check=full",
        "--show-leak-kinds=definite,indirect,possible",
        "--errors-for-leak-kinds=definite,indirect,possible",
    ),
    f"--suppressions={native.ROOT / 'native/tests/valgrind.supp'}",
]


@pytest.fixture(scope="module")
def devices() -> Iterator[list[str]]:
    """Two RDMA devices that reach each other."""
    with Fabric(2) as fabric:
        yield [port.device for port in fabric.ports]


@pytest.mark.parametrize(
    "test",
    [one for one in native.tests("rdma-memcheck") if not one.name.startswith("test_nccl")],
    ids=lambda test: str(test.name),
)
def test_over_rdma(devices: list[str], test: native.NativeTest) -> None:
    done = native.run(test, devices, wrapper=VALGRIND, slower=2)
    assert done.returncode == 0, done.stdout
