# SPDX-License-Identifier: Apache-2.0
"""The inventory of real RDMA devices, and daemons whose devices change while they run."""

import ipaddress
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from dqplbd.admin.client import AdminClient
from dqplbd.admin.model import Device
from dqplbd.client import Context
from dqplbd.config import parse_config
from dqplbd.inventory.discover import discover
from dqplbd.inventory.gids import GidKind, GidPolicy, choose_gid
from dqplbd.inventory.netdev import find_route, read_netdevs
from dqplbd.inventory.open import prepare_devices, reachable_address
from dqplbd.inventory.verbs import RdmaDevice, RdmaPort, read_rdma
from dqplbd.lab.cluster import Cluster
from tests.vm.conftest import MakeCluster, MakeFabric, WaitUntil
from tests.vm.fabric import Fabric

TIMES = ("simulated",)  # nobody waits for what is tried again every ten seconds
TIMEOUT_S = 300
PATIENCE_S = 60.0
SIZE = 1 << 20


def device(name: str) -> RdmaDevice:
    found = read_rdma(read_netdevs()).named(name)
    assert found is not None
    return found


def port(name: str) -> RdmaPort:
    return device(name).ports[0]


# -- the inventory


def test_devices_are_as_other_tools_see_them(make_fabric: MakeFabric) -> None:
    fabric = make_fabric(2)
    listed = json.loads(subprocess.run(["rdma", "-j", "link"], capture_output=True, text=True, check=True).stdout)
    inventory = read_rdma(read_netdevs())
    assert {one.name for one in inventory.devices} == {one["ifname"] for one in listed}
    for one in listed:
        seen = port(one["ifname"])
        assert seen.state == one["state"].lower()
        assert seen.netdev == one["netdev"]
        assert seen.physical.replace("-", "_") == one["physical_state"].lower()
    said = subprocess.run(["ibv_devinfo", "-v", "-d", "rxe0"], capture_output=True, text=True, check=True).stdout
    values = dict(line.strip().split(":", 1) for line in said.splitlines() if ":" in line)
    rxe0 = device("rxe0")
    assert rxe0.limits is not None
    assert rxe0.limits.qps == int(values["max_qp"])
    assert rxe0.limits.srqs == int(values["max_srq"])
    assert rxe0.limits.cq_entries == int(values["max_cqe"])
    assert rxe0.transport == "ib"
    assert not rxe0.error
    assert f"{port('rxe0').mtu_bytes}" in values["active_mtu"]
    [gid] = [one for one in port("rxe0").gids if one.address.ipv4_mapped is not None]
    assert str(gid) in said.lower()
    assert (gid.kind, gid.netdev, gid.netdev_up) == (GidKind.ROCE_V2, fabric.port(0).netdev, True)


def test_the_chosen_gid_is_of_the_fabric_and_its_route_leaves_by_its_interface(make_fabric: MakeFabric) -> None:
    fabric = make_fabric(2)
    near, far = fabric.port(0), fabric.port(1)
    choice = choose_gid(port(near.device).gids, GidPolicy())
    assert choice.gid is not None
    assert choice.gid.address.ipv4_mapped == ipaddress.IPv4Address(near.address)
    assert find_route(far.address, near.address).netdev == near.netdev
    inventory = read_rdma(read_netdevs())
    found = discover(inventory, [f"{far.device}/1"])
    assert [one.rdma_device for one in found.devices] == [near.device]
    prepared = prepare_devices(parse_config("devices: auto"), found.devices, inventory)
    assert reachable_address(prepared, inventory.netdevs) == near.address


def test_a_port_that_is_down_and_a_small_mtu(make_fabric: MakeFabric) -> None:
    fabric = make_fabric(2)
    fabric.set_mtu(0, 1500)
    assert port("rxe0").mtu_bytes == 1024
    assert port("rxe0").max_mtu_bytes == 4096
    fabric.link(1, "down")
    assert port("rxe1").state == "down"
    assert not any(gid.netdev_up for gid in port("rxe1").gids)
    assert port("rxe0").state == "active"
    left_out = discover(read_rdma(read_netdevs()), ()).left_out
    assert [(one.port, one.why) for one in left_out] == [("rxe1/1", "the port is disabled")]


def test_one_that_cannot_be_opened_does_not_stop_the_others(make_fabric: MakeFabric) -> None:
    make_fabric(2)
    node = f"/dev/infiniband/{_uverbs('rxe0')}"
    number = os.stat(node).st_rdev
    os.unlink(node)
    try:
        assert node in device("rxe0").error
        assert port("rxe0").state == "active"  # sysfs tells that much
        assert not device("rxe1").error
        assert device("rxe1").limits is not None
    finally:
        os.mknod(node, 0o666 | 0o020000, number)


def _uverbs(name: str) -> str:
    folder = "/sys/class/infiniband_verbs"
    for node in os.listdir(folder):
        path = f"{folder}/{node}/ibdev"
        if os.path.exists(path):
            with open(path, encoding="ascii") as file:
                if file.read().strip() == name:
                    return node
    raise AssertionError(f"{name} has no uverbs node")


# -- daemons


def verbs(fabric: Fabric, rails: int = 1) -> Any:
    """The devices of each host, as its configuration has them."""

    def of(host: int) -> Sequence[Mapping[str, Any]]:
        return [
            {"name": f"rail{rail}", "provider": "verbs", "rdma_device": fabric.port(host, rail).device}
            for rail in range(rails)
        ]

    return of


def admins(cluster: Cluster) -> list[AdminClient]:
    return [AdminClient(host.admin) for host in cluster]


def of_name(admin: AdminClient, name: str) -> Device:
    [found] = [one for one in admin.devices() if one.name == name]
    return found


def answered(admin: AdminClient, peer: str, device: str) -> int:
    """Probes of a path that were answered so far; 0 while there is no such path."""
    return sum(path.estimate.probes_ok for path in admin.paths(peer=peer, device=device))


def answers(admin: AdminClient, peer: str, device: str, count: int) -> bool:
    """Whether so many probes of a path were answered."""
    return answered(admin, peer, device) >= count


def transfer(cluster: Cluster, rail: int = 0) -> None:
    """One message each way over new connections."""
    with Context(cluster["host0"].client_socket) as near, Context(cluster["host1"].client_socket) as far:
        for one, other in ((near, far), (far, near)):
            listener = other.listen(rail)
            accepting = listener.accept()
            there, here = one.connect(listener.handle, rail).wait(PATIENCE_S), accepting.wait(PATIENCE_S)
            source, target = one.allocate(SIZE), other.allocate(SIZE)
            content = os.urandom(4096) * (SIZE // 4096)
            source.view[:] = content
            receiving = here.recv(target)
            there.send(source).wait(PATIENCE_S)
            assert receiving.wait(PATIENCE_S).bytes == SIZE
            assert bytes(target.view) == content


def test_another_address_is_taken_and_the_peers_follow(
    make_fabric: MakeFabric, make_cluster: MakeCluster, wait_until: WaitUntil
) -> None:
    fabric = make_fabric(2, rails=2)
    cluster = make_cluster(fabric, devices=verbs(fabric, 2))
    near, far = admins(cluster)
    wait_until(lambda: answered(far, "host0", "rail1") and answered(near, "host1", "rail1"), "rail 1 is probed")
    transfer(cluster, 1)
    moved, old = fabric.port(0, 1), fabric.port(0, 1).address
    new = old.rsplit(".", 1)[0] + ".77"
    before = of_name(near, "rail0").address

    def ip(*lines: str) -> None:
        subprocess.run(["ip", "-b", "-"], input="\n".join(lines), text=True, check=True)

    ip(
        f"addr add {new}/32 dev {moved.netdev} noprefixroute",
        f"route add local {new} dev {moved.netdev} table {moved.table}",
        f"rule add pref 10 iif lo from {new} lookup {moved.table}",
        f"neigh add {new} lladdr {moved.mac} dev {fabric.port(1, 1).netdev} nud permanent",
    )
    try:
        # Another address of the same kind is no reason to move.
        wait_until(lambda: len(of_name(near, "rail1").gids) > 2, "the new GID is seen")
        assert of_name(near, "rail1").address == f"::ffff:{old}"
        ip(f"addr del {old}/24 dev {moved.netdev}")
        wait_until(lambda: of_name(near, "rail1").address == f"::ffff:{new}", "the new GID is in use")

        def told() -> str | None:
            [peer] = [one for one in far.peers() if one.host_id == "host0"]
            return next(one.address for one in peer.devices if one.name == "rail1")

        wait_until(lambda: told() == f"::ffff:{new}", "the peer knows it")
        for admin, peer in ((far, "host0"), (near, "host1")):
            enough = answered(admin, peer, "rail1") + 4
            wait_until(partial(answers, admin, peer, "rail1", enough), "probes are answered")
        transfer(cluster, 1)
        transfer(cluster, 0)
        [used] = [gid.gid for gid in of_name(near, "rail1").gids if gid.in_use]
        assert used == f"::ffff:{new}"
        assert of_name(near, "rail0").address == before
        assert of_name(near, "rail1").changes["address"] > 0
    finally:
        ip(f"rule del pref 10 from {new}")


def test_an_address_that_is_gone_takes_the_device_down_until_it_is_back(
    make_fabric: MakeFabric, make_cluster: MakeCluster, wait_until: WaitUntil
) -> None:
    """One that the configuration names: no other is taken instead."""
    fabric = make_fabric(2)

    def pinned(host: int) -> Sequence[Mapping[str, Any]]:
        return [{**one, "gid": fabric.port(host).address} for one in verbs(fabric)(host)]

    cluster = make_cluster(fabric, devices=pinned, loopback=True)
    near, far = admins(cluster)
    wait_until(lambda: answered(far, "host0", "rail0") and answered(near, "host1", "rail0"), "it is probed")
    port = fabric.port(0)
    subprocess.run(["ip", "addr", "del", f"{port.address}/24", "dev", port.netdev], check=True)
    gone = wait_until(lambda: (one := of_name(near, "rail0")).state == "down" and one, "the device is down")
    assert f"no usable GID ::ffff:{port.address}, which the configuration names" in gone.error
    assert f"give {port.netdev} that address again" in gone.fix
    status = near.status()
    assert (status.state, status.devices_up) == ("degraded", 0)
    subprocess.run(["ip", "addr", "add", f"{port.address}/24", "dev", port.netdev, "noprefixroute"], check=True)
    fabric.link(0, "up")  # the routes went with the address
    wait_until(lambda: of_name(near, "rail0").state == "up", "the device is up")
    wait_until(lambda: near.status().state == "ready", "the daemon is ready")
    transfer(cluster)


def test_an_interface_that_is_removed_takes_the_device_down(
    make_fabric: MakeFabric, make_cluster: MakeCluster, wait_until: WaitUntil
) -> None:
    fabric = make_fabric(2)
    cluster = make_cluster(fabric, devices=verbs(fabric), loopback=True)
    near, far = admins(cluster)
    wait_until(lambda: answered(far, "host0", "rail0") and answered(near, "host1", "rail0"), "it is probed")
    removal = subprocess.Popen(["ip", "link", "delete", fabric.port(0).netdev])
    try:
        wait_until(lambda: of_name(near, "rail0").state == "down", "the device is down")
        assert near.status().state == "degraded"
        assert of_name(near, "rail0").downs == 1
        assert of_name(far, "rail0").up
    finally:
        cluster["host0"].stop()  # until then the kernel waits
        removal.wait()
    assert removal.returncode == 0


def test_a_port_without_carrier_is_told_and_works_again_afterwards(
    make_fabric: MakeFabric, make_cluster: MakeCluster, wait_until: WaitUntil
) -> None:
    fabric = make_fabric(2)
    cluster = make_cluster(fabric, devices=verbs(fabric))
    near, _ = admins(cluster)
    transfer(cluster)
    fabric.link(0, "down", end="switch")
    down = wait_until(lambda: (one := of_name(near, "rail0")).state == "down" and one, "the device is down")
    assert not down.up
    assert "port" in (down.last_event or "")
    wait_until(lambda: of_name(near, "rail0").netdev_up is False, "the interface is down")
    status = near.status()
    assert (status.state, status.devices_up) == ("degraded", 0)
    assert any("rail0 is down for" in reason for reason in status.reasons)
    fabric.link(0, "up", end="switch")
    wait_until(lambda: of_name(near, "rail0").state == "up", "the device is up")
    wait_until(lambda: near.status().state == "ready", "the daemon is ready")
    assert of_name(near, "rail0").downs == 1
    transfer(cluster)


def test_another_mtu_reaches_the_peer(
    make_fabric: MakeFabric, make_cluster: MakeCluster, wait_until: WaitUntil
) -> None:
    fabric = make_fabric(2)
    cluster = make_cluster(fabric, devices=verbs(fabric))
    near, far = admins(cluster)
    wait_until(lambda: far.paths(peer="host0"), "there is a path")
    rate = far.paths(peer="host0")[0].profile.rate_bps
    fabric.set_mtu(0, 1500)
    wait_until(lambda: (view := of_name(near, "rail0").rdma) and view.active_mtu_bytes == 1024, "the MTU is seen")
    wait_until(lambda: of_name(near, "rail0").mtu_bytes == 1024, "new connections use it")

    def told() -> int | None:
        [peer] = [one for one in far.peers() if one.host_id == "host0"]
        return peer.devices[0].mtu_bytes

    wait_until(lambda: told() == 1024, "the peer knows it")
    wait_until(lambda: far.paths(peer="host0")[0].profile.rate_bps < rate, "its profile allows for more headers")
    transfer(cluster)


def test_a_device_that_is_missing_at_the_start_is_used_when_it_comes(
    make_fabric: MakeFabric, make_cluster: MakeCluster, wait_until: WaitUntil
) -> None:
    fabric = make_fabric(2)
    late = fabric.port(0)
    subprocess.run(["rdma", "link", "delete", late.device], check=True)
    cluster = make_cluster(fabric, devices=verbs(fabric))
    near, far = admins(cluster)
    missing = of_name(near, "rail0")
    assert missing.state == "failed"
    assert f"there is no such RDMA device; this host has {fabric.port(1).device}" in (missing.error or "")
    assert near.status().state == "degraded"
    subprocess.run(["rdma", "link", "add", late.device, "type", "rxe", "netdev", late.netdev], check=True)
    wait_until(lambda: of_name(near, "rail0").state == "up", "the device is open")
    assert near.status().state == "ready"
    wait_until(lambda: answered(far, "host0", "rail0") and answered(near, "host1", "rail0"), "it is probed")
    transfer(cluster)


def test_every_port_is_found_but_those_excluded(
    make_fabric: MakeFabric, make_cluster: MakeCluster, wait_until: WaitUntil
) -> None:
    fabric = make_fabric(2, rails=2)

    def others(host: int) -> Mapping[str, Any]:
        names = [fabric.port(1 - host, rail).device for rail in range(2)]
        return {"devices": "auto", "rdma": {"exclude": names}}

    cluster = make_cluster(fabric, overrides=others)
    for host, admin in enumerate(admins(cluster)):
        mine = [fabric.port(host, rail).device for rail in range(2)]
        assert sorted(one.name for one in admin.devices()) == sorted(mine)
        assert [one.rail for one in admin.devices()] == [0, 1]
        left_out = {one.port: one.why for one in admin.status().rdma_left_out}
        assert left_out == {
            f"{fabric.port(1 - host, rail).device}/1": f"rdma.exclude has {fabric.port(1 - host, rail).device}"
            for rail in range(2)
        }
        wait_until(partial(answers, admin, f"host{1 - host}", mine[1], 1), "both rails have a path")


@pytest.fixture
def without_pyverbs(tmp_path: Any) -> Mapping[str, str]:
    """An environment whose Python does not find pyverbs."""
    (tmp_path / "pyverbs").mkdir()
    (tmp_path / "pyverbs/__init__.py").write_text(
        "import sys\ndel sys.modules['pyverbs']\nraise ModuleNotFoundError('no pyverbs', name='pyverbs')\n"
    )
    return {"PYTHONPATH": str(tmp_path)}


def test_without_pyverbs_rdma_devices_are_told_and_the_others_work(
    make_fabric: MakeFabric, make_cluster: MakeCluster, without_pyverbs: Mapping[str, str], wait_until: WaitUntil
) -> None:
    fabric = make_fabric(2)

    def both(host: int) -> Sequence[Mapping[str, Any]]:
        address = fabric.port(host).address
        return [*verbs(fabric)(host), {"name": "tcp0", "provider": "tcp", "address": address, "rail": 1}]

    cluster = make_cluster(fabric, devices=both, start=False)
    for host in cluster:
        host.launch(without_pyverbs)
        host.wait_state("READY=1")
    near, _ = admins(cluster)
    lost = of_name(near, "rail0")
    assert lost.state == "failed"
    assert "pyverbs is not there" in (lost.error or "")
    assert "pyverbs" in (lost.fix or "")
    assert lost.rdma is not None
    assert lost.rdma.state == "active"  # sysfs tells that much
    assert of_name(near, "tcp0").up
    wait_until(lambda: near.paths(peer="host1", device="tcp0"), "there is a path over tcp")
    transfer(cluster, 0)  # of those that are open, the first


def test_automatic_devices_without_pyverbs_are_an_error_that_says_what_to_do(
    make_fabric: MakeFabric, make_cluster: MakeCluster, without_pyverbs: Mapping[str, str]
) -> None:
    fabric = make_fabric(1)
    cluster = make_cluster(fabric, overrides=lambda host: {"devices": "auto"}, start=False)
    [host] = cluster
    host.launch(without_pyverbs)
    assert host.wait_exit() == 1
    assert "devices is auto, and pyverbs is not there" in host.log()
    assert "provider: tcp" in host.log()
