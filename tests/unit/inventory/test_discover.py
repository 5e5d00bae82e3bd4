# SPDX-License-Identifier: Apache-2.0
"""Which RDMA ports become devices."""

from dataclasses import replace

from dqplbd.inventory.discover import discover
from dqplbd.inventory.netdev import Netdev, Netdevs
from dqplbd.inventory.verbs import RdmaDevice, RdmaInventory, RdmaPort

PORT = RdmaPort(1, "active", "link-up", "ethernet", 400 * 10**9, "4X NDR", 4096, 4096, 2**30, "eth0")


def card(name: str, *ports: RdmaPort, **changes: object) -> RdmaDevice:
    return RdmaDevice(name, transport="ib", ports=ports or (PORT,), **changes)  # type: ignore[arg-type]


def names(inventory: RdmaInventory, *exclude: str) -> list[str]:
    return [f"{one.name}={one.rdma_device}/{one.port}@{one.rail}" for one in discover(inventory, exclude).devices]


def test_every_port_is_a_device_with_a_rail_of_its_own() -> None:
    inventory = RdmaInventory((card("mlx5_0"), card("mlx5_1", PORT, replace(PORT, number=2)), card("mlx5_2")))
    assert names(inventory) == [
        "mlx5_0=mlx5_0/1@0",
        "mlx5_1.1=mlx5_1/1@1",
        "mlx5_1.2=mlx5_1/2@2",
        "mlx5_2=mlx5_2/1@3",
    ]


def test_what_is_excluded_takes_no_rail() -> None:
    inventory = RdmaInventory((card("mlx5_bond_0"), card("mlx5_1", PORT, replace(PORT, number=2)), card("rxe0")))
    assert names(inventory, "mlx5_bond_*", "*/2") == ["mlx5_1.1=mlx5_1/1@0", "rxe0=rxe0/1@1"]
    found = discover(inventory, ["mlx5_bond_*", "mlx5_1/2"]).left_out
    assert [(one.port, one.why) for one in found] == [
        ("mlx5_bond_0/1", "rdma.exclude has mlx5_bond_*"),
        ("mlx5_1/2", "rdma.exclude has mlx5_1/2"),
    ]


def test_a_port_without_a_cable_keeps_its_rail_and_a_disabled_one_does_not() -> None:
    down = replace(PORT, state="down", physical="disabled")
    enabled, disabled = Netdev("eth0", 2, 9000, False, None, True), Netdev("eth0", 2, 9000, False, None, False)
    devices = (card("mlx5_0", down), card("mlx5_1"))
    assert len(names(RdmaInventory(devices, netdevs=Netdevs({2: enabled})))) == 2
    assert names(RdmaInventory(devices, netdevs=Netdevs({2: disabled}))) == ["mlx5_1=mlx5_1/1@0"]
    polling = replace(PORT, state="down", physical="polling", link_layer="infiniband", netdev="")
    assert len(names(RdmaInventory((card("mlx5_0", polling),)))) == 1
    assert not names(RdmaInventory((card("mlx5_0", replace(polling, physical="disabled")),)))


def test_no_virtual_functions_beside_their_card_and_no_iwarp() -> None:
    devices = (card("mlx5_0"), card("mlx5_4", function_of="mlx5_0"), replace(card("siw0"), transport="iwarp"))
    found = discover(RdmaInventory(devices), ())
    assert [one.name for one in found.devices] == ["mlx5_0"]
    assert "virtual function of mlx5_0" in found.left_out[0].why
    assert "iwarp" in found.left_out[1].why
    assert names(RdmaInventory(devices[1:2])) == ["mlx5_4=mlx5_4/1@0"]  # in a container there is only the function


def test_one_that_cannot_be_opened_is_a_device_all_the_same() -> None:
    assert names(RdmaInventory((replace(card("mlx5_0"), transport="", error="EPERM"),))) == ["mlx5_0=mlx5_0/1@0"]


def test_at_most_eight() -> None:
    found = discover(RdmaInventory(tuple(card(f"mlx5_{i}") for i in range(10))), ())
    assert [one.rail for one in found.devices] == list(range(8))
    assert [one.port for one in found.left_out] == ["mlx5_8/1", "mlx5_9/1"]
    assert "rdma.exclude" in found.left_out[0].why


def test_names_are_those_of_devices() -> None:
    long = "a" * 40
    inventory = RdmaInventory((card("ib:0"), card("ib@0"), card(long), card(long + "b"), card("@")))
    found = [one.name for one in discover(inventory, ()).devices]
    assert found[:2] == ["ib_0", "ib_0-2"]
    assert len(set(found)) == 5
    assert all(len(name) <= 31 for name in found)
