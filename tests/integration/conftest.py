# SPDX-License-Identifier: Apache-2.0
"""Real daemons on loopback, and the parts of one in this process."""

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dqplbd.engine.engine import Engine, EngineSettings
from dqplbd.lab.cluster import Cluster, HostSpec, merge

# Short windows and waits; what a test says itself goes over these.
QUICK: dict[str, Any] = {
    "probing": {"interval_s": 0.02, "window_s": 0.2, "samples_per_window": 4},
    "peers": {"retry_min_s": 0.05},
    "clients": {"drain_s": 1},
}

T = TypeVar("T")
MakeCluster = Callable[..., Cluster]
WaitUntil = Callable[[Callable[[], T], str], T]


@pytest.fixture
def make_cluster() -> Iterator[MakeCluster]:
    """Makes and starts clusters: ``make_cluster(2)``, ``make_cluster(["a", "b"], {"peers": ...}, know=False)``.

    ``start=False`` leaves the start to the test.  All are ended after it, whatever became of it.
    """
    made: list[Cluster] = []

    def make(
        hosts: int | Sequence[HostSpec | str],
        config: Mapping[str, Any] | None = None,
        *,
        start: bool = True,
        know: bool = True,
    ) -> Cluster:
        cluster = Cluster(hosts, merge(QUICK, config or {}), know=know)
        made.append(cluster)
        return cluster.start() if start else cluster

    yield make
    for cluster in made:
        cluster.stop()


@pytest.fixture
def wait_until() -> WaitUntil[Any]:
    """Asks a condition again and again until it gives something true, and gives that: ``wait_until(f, "what")``."""

    def wait(condition: Callable[[], Any], what: str) -> Any:
        limit = time.monotonic() + 30
        while not (result := condition()):
            assert time.monotonic() < limit, f"not within 30 s: {what}"
            time.sleep(0.02)
        return result

    return wait


@pytest.fixture
def open_fds() -> Callable[[], int]:
    """Counts the open descriptors of this process."""

    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    return count


@pytest.fixture
def engine() -> Iterator[Engine]:
    """A real engine in this process, without devices."""
    one = Engine(EngineSettings("here", 0x1234, max_clients=64))
    yield one
    one.close()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for the name of a socket."""
    folder = Path(tempfile.mkdtemp(prefix="dq-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
