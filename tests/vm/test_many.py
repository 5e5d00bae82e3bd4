# SPDX-License-Identifier: Apache-2.0
"""Sixteen whole daemons over RDMA, in racks, zones and buildings: each finds out where the others are."""

import contextlib
import random
import time

from dqplbd.client import Context
from tests.vm.conftest import MakeCluster, MakeFabric, WaitUntil
from tests.vm.daemons import admin, verbs_devices

TIMES = ("simulated",)  # sixteen daemons on one CPU of real time would measure each other
MEMORY_MB = 2048
TIMEOUT_S = 400
PATIENCE = 120.0
HOSTS = 16
SIZE = 200_000
# Two hosts to a rack, two racks to a zone, two zones to a building.
RTTS_US = {"rack": 8, "zone": 56, "building": 120, "region": 240}


def class_of(one: int, other: int) -> str:
    for name, shift in (("rack", 1), ("zone", 2), ("building", 3)):
        if one >> shift == other >> shift:
            return name
    return "region"


def test_sixteen_hosts(make_fabric: MakeFabric, make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    fabric = make_fabric(HOSTS)
    fabric.set_delays(lambda a, b: RTTS_US[class_of(a, b)] * 500)
    config = {
        "classification": {"method": "rtt", "windows_to_widen": 1},
        "probing": {"interval_s": 1, "window_s": 3, "samples_per_window": 2},
    }
    cluster = make_cluster(fabric, config, devices=verbs_devices(fabric))

    def classified() -> bool:
        time.sleep(0.5)  # which costs nothing here, and asking does
        for host in (0, 6, 15):
            found = {path.peer: path.path_class for path in admin(cluster, host).paths()}
            if any(found.get(f"host{peer}") != class_of(host, peer) for peer in range(HOSTS) if peer != host):
                return False
        return True

    wait_until(classified, "three hosts know the class of each other one")

    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Context(host.client_socket)) for host in cluster]
        listeners = [stack.enter_context(client.listen()) for client in clients]
        accepting = [listener.accept() for listener in listeners]
        # Each to another one, five places on: every class of path carries something.
        to = [(host + 5) % HOSTS for host in range(HOSTS)]
        connecting = [clients[host].connect(listeners[to[host]].handle) for host in range(HOSTS)]
        there = [request.wait(PATIENCE) for request in connecting]
        here = [request.wait(PATIENCE) for request in accepting]
        sources = [client.allocate(SIZE) for client in clients]
        targets = [client.allocate(SIZE) for client in clients]
        for host, memory in enumerate(sources):
            memory.view[:] = random.Random(host).randbytes(SIZE)
        receiving = [flow.recv(memory) for flow, memory in zip(here, targets, strict=True)]
        sending = [flow.send(memory) for flow, memory in zip(there, sources, strict=True)]
        assert [request.wait(PATIENCE) for request in sending] == [SIZE] * HOSTS
        assert [request.wait(PATIENCE).bytes for request in receiving] == [SIZE] * HOSTS
        for host in range(HOSTS):
            assert targets[to[host]].view[:] == sources[host].view[:]
