# SPDX-License-Identifier: Apache-2.0
"""The C tests over RDMA devices, under the address and thread sanitizers.  See native.py.

Not those of the net plugin, which are run so over tcp.
"""

from collections.abc import Iterator

import pytest

from tests.vm import native
from tests.vm.fabric import Fabric

TIMES = ("real",)
PLACES = ("native", "qemu")
MEMORY_MB = 2048
TIMEOUT_S = 600


def _chosen(build: str) -> list[native.NativeTest]:
    """Those of provider, prober and engine."""
    return [one for one in native.tests(build) if not one.name.startswith("test_nccl")]


@pytest.fixture(scope="module")
def devices() -> Iterator[list[str]]:
    """Two RDMA devices that reach each other."""
    with Fabric(2) as fabric:
        yield [port.device for port in fabric.ports]


@pytest.mark.parametrize("test", _chosen("rdma-address"), ids=lambda test: str(test.name))
def test_over_rdma_with_the_address_sanitizer(devices: list[str], test: native.NativeTest) -> None:
    done = native.run(test, devices, slower=10)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("test", _chosen("rdma-thread"), ids=lambda test: str(test.name))
def test_over_rdma_with_the_thread_sanitizer(devices: list[str], test: native.NativeTest) -> None:
    # It wants a memory layout that the kernel's widest randomisation does not keep.
    done = native.run(test, devices, wrapper=["setarch", "-R"], slower=20)
    assert done.returncode == 0, done.stdout
