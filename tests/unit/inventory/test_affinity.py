# SPDX-License-Identifier: Apache-2.0
"""CPUs, NUMA nodes, and GPUs near a card."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqplbd.inventory.affinity import (
    SPIN_CPUS,
    Gpu,
    PciRelation,
    choose_cpu,
    nearest_gpus,
    netdev_numa_node,
    netdev_pci_path,
    node_cpus,
    parse_cpu_list,
    pci_address,
    spin_us,
)


def test_lists_of_cpus() -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpu_list("") == set()


@pytest.mark.parametrize("text", ["3-1", "a", "1-", "99999999", "0-70000", "1;2"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="CPU numbers"):
        parse_cpu_list(text)


@given(st.sets(st.integers(0, 65535), max_size=50))
def test_any_set_comes_back(cpus: set[int]) -> None:
    assert parse_cpu_list(",".join(map(str, sorted(cpus)))) == cpus


def test_sysfs_is_believed_where_it_speaks(tmp_path: Path) -> None:
    card = tmp_path / "devices/pci0000:00/0000:00:1f.0"
    card.mkdir(parents=True)
    (card / "numa_node").write_text("1\n")
    (tmp_path / "class/net/eth0").mkdir(parents=True)
    (tmp_path / "class/net/eth0/device").symlink_to(card)
    (tmp_path / "devices/system/node/node1").mkdir(parents=True)
    (tmp_path / "devices/system/node/node1/cpulist").write_text("4-5\n")
    assert netdev_numa_node("eth0", tmp_path) == 1
    assert netdev_pci_path("eth0", tmp_path) == str(card.resolve())
    assert node_cpus(1, tmp_path) == {4, 5}
    (card / "numa_node").write_text("-1\n")
    assert netdev_numa_node("eth0", tmp_path) is None
    assert netdev_numa_node("lo", tmp_path) is None
    assert netdev_pci_path("lo", tmp_path) == ""
    assert node_cpus(7, tmp_path) == set()


def test_a_cpu_is_chosen_only_when_asked_for() -> None:
    assert choose_cpu(None, {0, 1}) == (-1, "")
    assert choose_cpu([9, 1], {0, 1}) == (1, "")
    cpu, warning = choose_cpu([9], {0, 1})
    assert cpu == -1
    assert "[9]" in warning
    assert "[0, 1]" in warning


def test_small_machines_do_not_spin() -> None:
    assert spin_us(50_000, SPIN_CPUS) == 50
    assert spin_us(50_000, SPIN_CPUS - 1) == 0
    assert spin_us(1, SPIN_CPUS) == 1


def card(root: Path, path: str, vendor: int, kind: int, node: int = 0) -> str:
    """A card in a fixture sysfs tree; its path there."""
    folder = root / "devices" / path
    folder.mkdir(parents=True)
    for name, value in (("vendor", f"0x{vendor:04x}"), ("class", f"0x{kind:06x}"), ("numa_node", str(node))):
        (folder / name).write_text(f"{value}\n")
    bus = root / "bus/pci/devices"
    bus.mkdir(parents=True, exist_ok=True)
    (bus / folder.name).symlink_to(folder)
    return str(folder)


def test_the_nearest_gpus_share_a_pci_switch(tmp_path: Path) -> None:
    nic = card(tmp_path, "pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:00.0/0000:1a:00.0", 0x15B3, 0x020700)
    card(tmp_path, "pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:01.0/0000:1b:00.0", 0x10DE, 0x030200)
    card(tmp_path, "pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:02.0/0000:1c:00.0", 0x10DE, 0x030200)
    card(tmp_path, "pci0000:17/0000:17:03.0/0000:20:00.0", 0x10DE, 0x030200)
    card(tmp_path, "pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:03.0/0000:1d:00.0", 0x10DE, 0x068000)  # an NVSwitch
    card(tmp_path, "pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:04.0/0000:1e:00.0", 0x1A03, 0x030000)  # a console
    assert nearest_gpus(nic, tmp_path) == [
        Gpu("0000:1b:00.0", "nvidia", PciRelation.SWITCH),
        Gpu("0000:1c:00.0", "nvidia", PciRelation.SWITCH),
    ]
    assert pci_address(nic) == "0000:1a:00.0"


def test_farther_gpus_by_host_bridge_and_numa_node(tmp_path: Path) -> None:
    nic = card(tmp_path, "pci0000:17/0000:17:01.0/0000:1a:00.0", 0x15B3, 0x020000, 1)
    assert nearest_gpus(nic, tmp_path) == []
    card(tmp_path, "pci0000:c0/0000:c0:01.0/0000:c1:00.0", 0x1002, 0x038000, 0)
    assert [one.relation for one in nearest_gpus(nic, tmp_path)] == [PciRelation.SYSTEM]
    card(tmp_path, "pci0000:80/0000:80:01.0/0000:81:00.0", 0x1002, 0x120000, 1)
    assert [str(one.relation) for one in nearest_gpus(nic, tmp_path)] == ["numa node"]
    card(tmp_path, "pci0000:17/0000:17:02.0/0000:1b:00.0", 0x1002, 0x030000, 1)
    assert nearest_gpus(nic, tmp_path) == [Gpu("0000:1b:00.0", "amd", PciRelation.HOST_BRIDGE)]


def test_without_pci_there_are_no_gpus(tmp_path: Path) -> None:
    assert nearest_gpus("", tmp_path) == []
    assert nearest_gpus(str(tmp_path), tmp_path) == []
    assert pci_address("/sys/devices/virtual/infiniband/rxe0") == ""
