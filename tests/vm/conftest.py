# SPDX-License-Identifier: Apache-2.0
"""What tests in the guest share.  They run there only: run.py sets DQPLBD_GUEST to the kind of time."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
# Behind everything else: the installed package, and not the folder of that name, is what is tested.
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from dqplbd.lab.cluster import Cluster, HostSpec, merge  # noqa: E402
from tests.vm.fabric import Fabric  # noqa: E402

TIME: Final = os.environ.get("DQPLBD_GUEST", "")
collect_ignore_glob = [] if TIME in ("real", "simulated") else ["test_*.py"]
if TIME != "host":
    collect_ignore_glob.append("host/*")

# Short windows and waits; what a test says itself goes over these.
QUICK: Final[dict[str, Any]] = {
    "probing": {"interval_s": 0.02, "window_s": 0.2, "samples_per_window": 4},
    "peers": {"retry_min_s": 0.05},
    "clients": {"drain_s": 1},
}

MakeFabric = Callable[..., Fabric]
MakeCluster = Callable[..., Cluster]
Connect = Callable[..., tuple[Any, Any]]
WaitUntil = Callable[[Callable[[], Any], str], Any]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tell of a failure at once: the guest may not live to see the end of the tests."""
    if report.failed:
        print(f"{report.nodeid}, {report.when}:\n{report.longreprtext}\n", file=sys.__stderr__, flush=True)


@pytest.fixture(scope="session")
def simulated() -> bool:
    """Time is simulated."""
    return TIME == "simulated"


@pytest.fixture
def make_fabric() -> Iterator[MakeFabric]:
    """Makes a fabric: ``make_fabric(4, rails=2, mtu=9000)``; it is removed after the test."""
    made: list[Fabric] = []

    def make(hosts: int, rails: int = 1, **options: Any) -> Fabric:
        fabric = Fabric(hosts, rails, **options)
        made.append(fabric)
        return fabric.make()

    yield make
    for fabric in made:
        fabric.remove()


@pytest.fixture
def connect(make_fabric: MakeFabric) -> Iterator[Connect]:
    """Connects queue pairs of two devices: ``near, far = connect("rxe0", "rxe1")``.

    They are closed before the fabric goes: the kernel waits for the last user of a device.
    """
    from tests.vm import verbs  # where there is pyverbs

    ends: list[Any] = []

    def make(near: str, far: str, **options: Any) -> tuple[Any, Any]:
        pair = verbs.connected(near, far, **options)
        ends.extend(pair)
        return pair

    yield make
    for end in ends:
        end.close()


@pytest.fixture
def make_cluster(make_fabric: MakeFabric) -> Iterator[MakeCluster]:
    """Makes and starts daemons on a fabric, one a host, with its address on rail 0; ended after the test.

    ``make_cluster(fabric, config, devices=f)``: ``f(host)`` are the devices of a host, as its configuration has them.
    With ``loopback``, they talk to each other over that, so that a link that goes down takes only data with it.
    """
    made: list[Cluster] = []

    def make(
        fabric: Fabric,
        config: Mapping[str, Any] | None = None,
        *,
        devices: Callable[[int], Sequence[Mapping[str, Any]]] | None = None,
        overrides: Callable[[int], Mapping[str, Any]] = lambda host: {},
        start: bool = True,
        know: bool = True,
        loopback: bool = False,
    ) -> Cluster:
        specs = []
        for host in range(fabric.hosts):
            over: dict[str, Any] = {} if devices is None else {"devices": list(devices(host))}
            address = None if loopback else fabric.port(host).address
            specs.append(HostSpec(f"host{host}", merge(over, overrides(host)), address))
        cluster = Cluster(specs, merge(QUICK, config or {}), know=know)
        made.append(cluster)
        return cluster.start() if start else cluster

    yield make
    for cluster in made:
        cluster.stop()


@pytest.fixture
def wait_until() -> WaitUntil:
    """Asks a condition again and again until it gives something true, and gives that: ``wait_until(f, "what")``."""

    def wait(condition: Callable[[], Any], what: str) -> Any:
        limit = time.monotonic() + 60
        while not (result := condition()):
            assert time.monotonic() < limit, f"not within 60 s: {what}"
            time.sleep(0.02)
        return result

    return wait


@pytest.fixture
def run() -> Callable[..., str]:
    """Runs a program to its end and gives what it printed; fails the test with that when the program fails."""

    def call(*command: str, timeout_s: float = 60) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
        assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    return call
