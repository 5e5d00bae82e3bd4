# SPDX-License-Identifier: Apache-2.0
"""CPUs and NUMA nodes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqplbd.inventory.affinity import (
    SPIN_CPUS,
    choose_cpu,
    netdev_numa_node,
    netdev_pci_path,
    node_cpus,
    parse_cpu_list,
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
