# SPDX-License-Identifier: Apache-2.0
"""Whole daemons in the guest over TCP: engine, event loop and shim work there, in real and in simulated time."""

import random
import time

from dqplbd.admin.client import AdminClient
from dqplbd.client import Context
from tests.vm.conftest import MakeCluster, MakeFabric, WaitUntil

TIMES = ("real", "simulated")
PATIENCE = 60.0


def test_a_pair_measures_its_path_and_moves_data(
    make_fabric: MakeFabric, make_cluster: MakeCluster, wait_until: WaitUntil, simulated: bool
) -> None:
    fabric = make_fabric(2, rdma=False)
    one_way = 60_000 if simulated else 3_000_000
    fabric.set_delays(lambda a, b: one_way)
    cluster = make_cluster(fabric)

    def measured() -> int | None:
        paths = [path for path in AdminClient(cluster["host0"].admin).paths() if path.peer == "host1"]
        return paths[0].estimate.rtt_ns if paths else None

    rtt = wait_until(measured, "the path is measured")
    # Simulated time is exact; software and its wake-ups take their part of real time.
    slack = 1_000  # of the clock of simulated time
    assert 2 * one_way - slack <= rtt <= 2 * one_way + (3_000 if simulated else 20_000_000)

    content = random.Random(5).randbytes(1 << 20)
    with (
        Context(cluster["host0"].client_socket) as near,
        Context(cluster["host1"].client_socket) as far,
        far.listen() as listener,
    ):
        accepting = listener.accept()
        there, here = near.connect(listener.handle).wait(PATIENCE), accepting.wait(PATIENCE)
        source, target = near.allocate(len(content)), far.allocate(len(content))
        source.view[:] = content
        begin = time.monotonic_ns()
        receiving = here.recv(target)
        assert there.send(source).wait(PATIENCE) == len(content)
        assert receiving.wait(PATIENCE).bytes == len(content)
        assert time.monotonic_ns() - begin >= 2 * one_way, "it went another way than across the switch"
        assert target.view[:] == content
