# SPDX-License-Identifier: Apache-2.0
"""The net plugin over RDMA devices, called as NCCL calls it: native/tests/test_nccl_*.c, see native.py.

Every version, under the undefined sanitizer.
"""

from collections.abc import Iterator

import pytest

from tests.vm import native
from tests.vm.fabric import Fabric

TIMES = ("real",)
TIMEOUT_S = 900


@pytest.fixture(scope="module")
def devices() -> Iterator[list[str]]:
    """Two RDMA devices that reach each other."""
    with Fabric(2) as fabric:
        yield [port.device for port in fabric.ports]


@pytest.mark.parametrize(
    "test",
    [one for one in native.tests("rdma-undefined") if one.name.startswith("test_nccl")],
    ids=lambda test: str(test.name),
)
def test_over_rdma(devices: list[str], test: native.NativeTest) -> None:
    done = native.run(test, devices)
    assert done.returncode == 0, done.stdout
