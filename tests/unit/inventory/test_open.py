# SPDX-License-Identifier: Apache-2.0
"""From configuration and inventory to a device that can be opened."""

import ipaddress
from dataclasses import replace

import pytest

from dqplbd.config import parse_config
from dqplbd.inventory.gids import Gid, GidKind
from dqplbd.inventory.netdev import Netdev, Netdevs
from dqplbd.inventory.open import LocalDevice, prepare_devices, reachable_address, see_again
from dqplbd.inventory.verbs import RdmaDevice, RdmaInventory, RdmaPort

ETH = Netdev("eth0", 2, 9000, True, 400 * 10**9)
IB = Netdev("ib0", 3, 4096, True, None)
NETDEVS = Netdevs({2: ETH, 3: IB}, {"10.1.2.3": ETH, "fe80::1": ETH, "172.16.0.9": IB})


def gid(text: str, index: int, kind: GidKind = GidKind.ROCE_V2, netdev: str = "eth0") -> Gid:
    return Gid(index, ipaddress.IPv6Address(text), kind, netdev, True)


LOCAL, ROUTABLE = gid("fe80::1", 0), gid("::ffff:10.1.2.3", 1)
PORT = RdmaPort(1, "active", "link-up", "ethernet", 400 * 10**9, "4X NDR", 4096, 4096, 2**30, "eth0", (LOCAL, ROUTABLE))
CARD = RdmaDevice("mlx5_0", transport="ib", pci_path="/sys/devices/pci0000:17/0000:18:00.0", numa_node=1, ports=(PORT,))
INVENTORY = RdmaInventory((CARD,), netdevs=NETDEVS)


def prepare(text: str, inventory: RdmaInventory = INVENTORY) -> list[LocalDevice]:
    return prepare_devices(parse_config(text), (), inventory)


def verbs(keys: str = "", inventory: RdmaInventory = INVENTORY) -> LocalDevice:
    more = f", {keys}" if keys else ""
    (device,) = prepare(f"devices: [{{name: rdma0, provider: verbs, rdma_device: mlx5_0{more}}}]", inventory)
    return device


def test_an_rdma_device() -> None:
    device = verbs("traffic_class: 104, mtu_bytes: 2048, rail: 3")
    spec = device.spec
    assert not device.error
    assert (spec.address, spec.port, spec.gid, spec.mtu, spec.rail) == ("mlx5_0", 1, "::ffff:10.1.2.3", 2048, 3)
    assert (spec.traffic_class, spec.numa_node, spec.pci_path) == (104, 1, CARD.pci_path)
    assert spec.rate_bps == 0
    assert device.rate_bps == 400 * 10**9
    assert device.netdev is ETH
    assert device.address == "mlx5_0/1"


def test_what_all_rdma_devices_have_in_common() -> None:
    entry = "{name: rdma0, provider: verbs, rdma_device: mlx5_0"
    text = f"rdma: {{traffic_class: 96, service_level: 3, gid_subnets: ['fe80::/10']}}\ndevices: [{entry}}}]"
    (device,) = prepare(text)
    assert (device.spec.traffic_class, device.spec.service_level, device.spec.gid) == (96, 3, "fe80::1")
    (device,) = prepare(text.replace("mlx5_0}", "mlx5_0, traffic_class: 0}"))
    assert device.spec.traffic_class == 0


@pytest.mark.parametrize(
    ("keys", "inventory", "words", "fix"),
    [
        ("port: 2", INVENTORY, "no such port; its ports are: 1", "correct port"),
        ("gid: 10.9.9.9", INVENTORY, "no usable GID ::ffff:10.9.9.9", "give eth0 that address again, or correct"),
        ("", RdmaInventory((replace(CARD, name="mlx5_7"),), netdevs=NETDEVS), "this host has mlx5_7", "rdma_device"),
        (
            "",
            RdmaInventory(error="there is no RDMA device", fix="load the driver"),
            "no RDMA device",
            "load the driver",
        ),
        ("", RdmaInventory((replace(CARD, error="EPERM"),), netdevs=NETDEVS), "EPERM", ""),
        ("", RdmaInventory((replace(CARD, error="x"),), "pyverbs is not there", "get it"), "is not there", "get it"),
        ("", RdmaInventory((replace(CARD, ports=(replace(PORT, gids=()),)),)), "an address", "give eth0 an address"),
    ],
)
def test_why_a_device_cannot_be_used(keys: str, inventory: RdmaInventory, words: str, fix: str) -> None:
    device = verbs(keys, inventory)
    assert words in device.error
    assert device.error.startswith("device rdma0 (mlx5_0 port ")
    assert fix in device.fix
    assert bool(device.fix) == bool(fix)


def test_a_gid_is_chosen_again_and_the_one_in_use_is_kept() -> None:
    device = verbs()
    device.number = 0

    def with_gids(*gids: Gid) -> RdmaInventory:
        return replace(INVENTORY, devices=(replace(CARD, ports=(replace(PORT, gids=gids),)),))

    def chosen(*gids: Gid) -> str:
        see_again(device, parse_config("").rdma, with_gids(*gids))
        assert device.gids is not None
        return str(device.gids.gid)

    other = gid("::ffff:10.1.2.4", 0)
    assert chosen(other, replace(ROUTABLE, index=5)) == "::ffff:10.1.2.3"
    assert chosen(other) == "::ffff:10.1.2.4"
    assert device.spec.gid == "::ffff:10.1.2.3"  # as the engine still has it
    assert not device.trouble
    assert chosen() == "None"
    assert not device.error  # it is open, and fails by its own events
    assert "address" in device.trouble
    assert "eth0" in device.fix
    assert chosen(other) == "::ffff:10.1.2.4"
    assert not device.trouble
    assert not device.fix


def test_the_reason_of_a_failure_is_kept_with_its_remedy() -> None:
    device = verbs()
    device.number, device.error, device.fix = 0, "its driver gave it up", "dmesg"
    see_again(device, parse_config("").rdma, INVENTORY)
    assert (device.error, device.fix) == ("its driver gave it up", "dmesg")


def test_one_that_was_not_there_comes() -> None:
    device = verbs("", RdmaInventory(error="the kernel has no RDMA device"))
    assert device.error
    see_again(device, parse_config("").rdma, INVENTORY)
    assert not device.error
    assert device.spec.numa_node == 1


TCP = "devices: [{name: tcp0, address: 10.1.2.3, rate_bps: 1Gbit/s}]"


def test_a_tcp_device() -> None:
    (device,) = prepare(TCP)
    assert (device.spec.address, device.spec.mtu, device.rate_bps) == ("10.1.2.3", 9000, 10**9)
    assert device.netdev is ETH


def test_the_address_that_peers_are_told() -> None:
    assert reachable_address(prepare(TCP), NETDEVS) == "10.1.2.3"
    assert reachable_address([verbs()], NETDEVS) == "10.1.2.3"
    # Of a link-local GID: another address of its interface.
    assert reachable_address([verbs("gid: 'fe80::1'")], NETDEVS) == "10.1.2.3"
    assert reachable_address([verbs("gid: 'fe80::1'")], Netdevs({2: ETH}, {"fe80::1": ETH})) is None
    own = gid("fe80::e42:a103:65:1", 0, GidKind.IB, "")
    port = replace(PORT, link_layer="infiniband", netdev="ib0", gids=(own,))
    device = verbs("", RdmaInventory((replace(CARD, ports=(port,)),), netdevs=NETDEVS))
    assert device.spec.gid == "fe80::e42:a103:65:1"
    assert reachable_address([device], NETDEVS) == "172.16.0.9"
    assert reachable_address([verbs("port: 2"), verbs()], NETDEVS) == "10.1.2.3"
