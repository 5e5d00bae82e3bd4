# SPDX-License-Identifier: Apache-2.0
"""The C tests over RDMA devices, under the undefined sanitizer: see native.py.

Those of the net plugin: test_nccl.py.
"""

from collections.abc import Iterator

import pytest

from tests.vm import native
from tests.vm.fabric import Fabric

TIMES = ("real",)  # they poll and measure against a clock that has to run
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def devices() -> Iterator[list[str]]:
    """Two RDMA devices that reach each other."""
    with Fabric(2) as fabric:
        yield [port.device for port in fabric.ports]


@pytest.mark.parametrize(
    "test",
    [one for one in native.tests("rdma-undefined") if not one.name.startswith("test_nccl")],
    ids=lambda test: str(test.name),
)
def test_over_rdma(devices: list[str], test: native.NativeTest) -> None:
    done = native.run(test, devices)
    assert done.returncode == 0, done.stdout
