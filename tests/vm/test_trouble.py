# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with RDMA in the field: each has its clear error, and what can go on goes on."""

import re

import pytest

from dqplbd.lab.cluster import Cluster
from tests.vm.conftest import MakeCluster, MakeFabric, WaitUntil
from tests.vm.daemons import Stream, admin, paths, verbs_devices

TIMEOUT_S = 300


def wait_peers(cluster: Cluster, wait_until: WaitUntil) -> None:
    wait_until(lambda: paths(cluster, 0, 1) and paths(cluster, 1, 0), "the hosts know each other")


def test_different_mtus_meet_at_the_smaller(
    make_fabric: MakeFabric, make_cluster: MakeCluster, wait_until: WaitUntil
) -> None:
    fabric = make_fabric(2, mtu=[9000, 1500])
    cluster = make_cluster(fabric, devices=verbs_devices(fabric))
    wait_peers(cluster, wait_until)
    assert [admin(cluster, host).devices()[0].mtu_bytes for host in range(2)] == [4096, 1024]
    with Stream(cluster, 0, 1, size=300_000, count=4) as stream:
        stream.check()
    assert "4096 here, 1024 there; the smaller one counts" in cluster["host0"].log()


def test_a_switch_that_swallows_large_packets_is_named(
    make_fabric: MakeFabric, make_cluster: MakeCluster, wait_until: WaitUntil
) -> None:
    fabric = make_fabric(2)
    cluster = make_cluster(fabric, devices=verbs_devices(fabric), loopback=True)
    wait_peers(cluster, wait_until)
    fabric.set_switch_mtu(1, 1500)
    with Stream(cluster, 0, 1, size=300_000, count=4) as stream:
        assert "UNREACHABLE" in stream.sent()
    said = cluster["host0"].log()
    assert "small packets pass, packets of the path MTU do not" in said
    assert "lower mtu_bytes" in said
    fabric.set_switch_mtu(1, 9000)
    with Stream(cluster, 0, 1, size=300_000, count=4) as stream:
        stream.check()


def test_a_gid_that_the_port_has_not(make_fabric: MakeFabric, make_cluster: MakeCluster) -> None:
    fabric = make_fabric(2, rails=2)
    cluster = make_cluster(
        fabric,
        devices=lambda host: [
            {**one, **({"gid": "10.9.0.99"} if one["rail"] == 1 else {})} for one in verbs_devices(fabric)(host)
        ],
    )
    for host in range(2):
        good, bad = sorted(admin(cluster, host).devices(), key=lambda device: device.rail)
        assert (good.state, bad.state) == ("up", "failed")
        assert re.search(r"rxe\dr1 port 1.*no usable GID ::ffff:10\.9\.0\.99", bad.error or ""), bad.error
    # The other rail carries on.
    with Stream(cluster, 0, 1, size=300_000, count=4) as stream:
        stream.check()


@pytest.mark.parametrize("limit", [65_536, 4 << 20])
def test_too_little_memory_may_be_locked(make_fabric: MakeFabric, make_cluster: MakeCluster, limit: int) -> None:
    fabric = make_fabric(2)
    cluster = make_cluster(fabric, devices=verbs_devices(fabric), start=False)
    # As a service has it that was given neither the limit nor the capability.
    poor = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "prlimit", f"--memlock={limit}:{limit}"]
    cluster["host0"].launch(wrapper=poor)
    cluster["host1"].launch()
    for host in cluster:
        host.wait_state("READY=1")
    with Stream(cluster, 0, 1, size=4 << 20, count=4) as stream:
        error = stream.sent()
    said = error + cluster["host0"].log()
    assert error.startswith("error:"), error
    assert re.search(r"RLIMIT_MEMLOCK|LimitMEMLOCK", said), said
    assert admin(cluster, 0).status().process.memlock_limit_bytes == limit
    # The other daemon is none the worse for it.
    with Stream(cluster, 1, 1, size=300_000, count=4) as stream:
        stream.check()


@pytest.mark.parametrize("end", ["switch", "host"])
def test_a_link_that_goes_down_under_a_transfer(
    make_fabric: MakeFabric, make_cluster: MakeCluster, wait_until: WaitUntil, end: str
) -> None:
    fabric = make_fabric(2)
    cluster = make_cluster(fabric, devices=verbs_devices(fabric), loopback=True)
    wait_peers(cluster, wait_until)
    with Stream(cluster, 0, 1, size=1 << 20, count=2000) as stream:
        stream.wait_begun()
        fabric.link(1, "down", end=end)
        sent, received = stream.sent(), stream.received()
    assert "UNREACHABLE" in sent
    assert re.search("DEVICE|UNREACHABLE|PEER_GONE", received), received
    assert paths(cluster, 0, 1)[0].live.state == "failed"
    assert paths(cluster, 0, 1)[0].live.reason
    assert wait_until(lambda: admin(cluster, 1).devices()[0].state == "down", "the device is down")
    fabric.link(1, "up", end=end)
    wait_until(lambda: admin(cluster, 1).devices()[0].state == "up", "the device is up")
    with Stream(cluster, 0, 1, size=1 << 20, count=8) as stream:
        stream.check()
    assert [paths(cluster, host, 1 - host)[0].live.state for host in range(2)] == ["up", "up"]
