# SPDX-License-Identifier: Apache-2.0
"""What the daemon makes of its devices' events, and whose counters it has read."""

import pytest

from dqplbd.config import parse_config
from dqplbd.daemon import device_change_name, rdma_ports
from dqplbd.engine.engine import DeviceChange
from dqplbd.inventory.open import prepare_devices
from dqplbd.inventory.verbs import RdmaInventory

DEVICES = """
devices:
  - {name: tcp0, provider: tcp, address: 127.0.0.1}
  - {name: rail0, provider: verbs, rdma_device: mlx5_0}
  - {name: rail1, provider: verbs, rdma_device: mlx5_1, port: 2}
"""


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (DeviceChange.UP, "up"),
        (DeviceChange.DOWN, "down"),
        (DeviceChange.ADDRESS, "address"),
        (DeviceChange.FATAL, "fatal"),
        (DeviceChange.OTHER, "other"),
        (0, "other"),
        (12345, "other"),
    ],
)
def test_changes_have_names_also_those_that_are_not_known(change: int, name: str) -> None:
    assert device_change_name(change) == name


def test_counters_are_those_of_rdma_devices_also_of_ones_that_are_not_there_yet() -> None:
    devices = prepare_devices(parse_config(DEVICES), (), RdmaInventory())
    assert rdma_ports(devices) == {"rail0": ("mlx5_0", 1), "rail1": ("mlx5_1", 2)}
