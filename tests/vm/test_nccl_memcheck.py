# SPDX-License-Identifier: Apache-2.0
"""The net plugin over RDMA devices, under valgrind's memcheck: no error, no leak.  See test_nccl.py.

The oldest version of its interface and the newest: those between differ in the form of their arguments only.
"""

from collections.abc import Iterator

import pytest

from tests.vm import native
from tests.vm.fabric import Fabric
from tests.vm.test_memcheck import VALGRIND

TIMES = ("real",)
MEMORY_MB = 1024
TIMEOUT_S = 900


@pytest.fixture(scope="module")
def devices() -> Iterator[list[str]]:
    """Two RDMA devices that reach each other."""
    with Fabric(2) as fabric:
        yield [port.device for port in fabric.ports]


@pytest.mark.parametrize(
    "test",
    [one for one in native.tests("rdma-memcheck") if one.name.startswith("test_nccl")],
    ids=lambda test: str(test.name),
)
def test_over_rdma(devices: list[str], test: native.NativeTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DQ_TEST_NCCL_VERSIONS", "v8 v12")
    done = native.run(test, devices, wrapper=VALGRIND, slower=2)
    assert done.returncode == 0, done.stdout
