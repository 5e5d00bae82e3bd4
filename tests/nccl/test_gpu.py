# SPDX-License-Identifier: Apache-2.0
"""Two NCCL ranks on GPUs, through two daemons.  Asked for with DQPLBD_TEST_GPU=1 (``make test-gpu`` sets it)."""

import os
import sys
from collections.abc import Iterator

import pytest

from dqplbd.lab.cluster import Cluster
from tests.nccl import job

PYTHON = os.environ.get("DQPLBD_TEST_GPU_PYTHON", sys.executable)


@pytest.fixture(scope="module")
def machine() -> job.Machine:
    """PyTorch and its GPUs; skips what is below where there are none."""
    if os.environ.get("DQPLBD_TEST_GPU") != "1":
        pytest.skip("not asked for: DQPLBD_TEST_GPU=1, or make test-gpu")
    found = job.gpus(PYTHON)
    if not found.gpus:
        pytest.skip(found.why)
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with job.two_daemons() as one:
        yield one


@pytest.mark.parametrize("protocol", job.PROTOCOLS, ids=lambda protocol: protocol or "unset")
def test_collectives_are_right_and_carried(machine: job.Machine, cluster: Cluster, protocol: str) -> None:
    outcome = job.run(cluster, machine, protocol, python=PYTHON)  # compares every value, and what the daemons carried
    assert any(name.startswith("nccl:") for name in outcome.clients)


def test_without_its_daemon_a_rank_fails(machine: job.Machine) -> None:
    """NCCL_NET is set, so there is nothing to fall back to."""
    with job.two_daemons() as gone:
        gone["gpu2"].stop()
        with pytest.raises(job.JobError, match=r"dqplbd\.service"):
            job.run(gone, machine, python=PYTHON)
