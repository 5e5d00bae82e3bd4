# SPDX-License-Identifier: Apache-2.0
"""An RDMA device as the API and the tables show it."""

import ipaddress

from dqplbd.admin.model import Device, LeftOutPort
from dqplbd.admin.rdma_view import gid_views, left_out_views, rdma_view
from dqplbd.cli.render import lines
from dqplbd.cli.tables import wide_device_tables
from dqplbd.config import parse_config
from dqplbd.inventory.affinity import Gpu, PciRelation
from dqplbd.inventory.discover import LeftOut
from dqplbd.inventory.gids import Gid, GidKind
from dqplbd.inventory.netdev import Netdev, Netdevs
from dqplbd.inventory.open import LocalDevice, prepare_devices
from dqplbd.inventory.verbs import RdmaDevice, RdmaInventory, RdmaLimits, RdmaPort

ETH = Netdev("eth0", 2, 9000, True, None)
ADDRESS = ipaddress.IPv6Address("::ffff:10.1.2.3")
GIDS = (
    Gid(0, ipaddress.IPv6Address("fe80::1"), GidKind.ROCE_V1, "eth0", True),
    Gid(2, ADDRESS, GidKind.ROCE_V1, "eth0", True),
    Gid(3, ADDRESS, GidKind.ROCE_V2, "eth0", True),
    Gid(4, ipaddress.IPv6Address("::ffff:10.9.9.9"), GidKind.ROCE_V2),
)
CARD = RdmaDevice(
    "mlx5_0",
    transport="ib",
    driver="mlx5_core",
    firmware="28.39.1002",
    guid="0c42:a103:0065:0001",
    pci_path="/sys/devices/pci0000:17/0000:17:01.0/0000:18:00.0",
    numa_node=1,
    gpus=(Gpu("0000:1b:00.0", "nvidia", PciRelation.SWITCH),),
    ports=(RdmaPort(1, "active", "link-up", "ethernet", 400 * 10**9, "4X NDR", 4096, 4096, 2**30, "eth0", GIDS),),
    limits=RdmaLimits(131072, 32768, 16777216, 4194303, 16777216, 2**64 - 1, 8388608, 32767, 16),
    timestamp_mask=0x7FFFFFFFFFFFFFFF,
    clock_khz=1_000_000,
)


def device(inventory: RdmaInventory) -> LocalDevice:
    text = "devices: [{name: rdma0, provider: verbs, rdma_device: mlx5_0}]\nrdma: {traffic_class: 104}"
    (one,) = prepare_devices(parse_config(text), (), inventory)
    return one


INVENTORY = RdmaInventory((CARD,), netdevs=Netdevs({2: ETH}, {"10.1.2.3": ETH}))


def test_all_that_is_known_is_told() -> None:
    one = device(INVENTORY)
    view = rdma_view(one)
    assert view is not None
    assert (view.rdma_device, view.port, view.state, view.link_layer) == ("mlx5_0", 1, "active", "ethernet")
    assert (view.pci_address, view.gpus[0].relation, view.traffic_class) == ("0000:18:00.0", "switch", 104)
    assert view.completion_timestamps is True
    assert view.limits is not None
    assert view.limits.reads == 16
    assert not any(gid.in_use for gid in gid_views(one))  # it is not open
    one.number = 0
    found = gid_views(one)
    assert [(gid.gid, gid.index, gid.in_use) for gid in found[:2]] == [
        ("::ffff:10.1.2.3", 3, True),
        ("::ffff:10.1.2.3", 2, False),
    ]
    assert [gid.score for gid in found] == sorted((gid.score for gid in found), reverse=True)
    assert found[-1].score == 0
    assert found[-1].reasons == ["its interface is gone"]


def test_what_cannot_be_opened_has_no_limits() -> None:
    one = device(RdmaInventory((RdmaDevice("mlx5_0", error="EPERM", ports=CARD.ports),)))
    view = rdma_view(one)
    assert view is not None
    assert view.limits is None
    assert view.completion_timestamps is None
    assert gid_views(one) == []
    assert rdma_view(device(RdmaInventory())) is None


def test_the_wide_tables() -> None:
    one = device(INVENTORY)
    one.number = 0
    shown = Device(
        name="rdma0",
        provider="verbs",
        rail=0,
        up=False,
        state="down",
        state_seconds=12,
        last_event="port 1: IBV_EVENT_PORT_ERR",
        netdev="eth0",
        netdev_up=False,
        rdma=rdma_view(one),
        gids=gid_views(one),
    )
    failed = Device(
        name="rdma1", provider="verbs", rail=1, up=False, state="failed", error="no such device", fix="load it"
    )
    tables = wide_device_tables([shown, failed], left_out_views((LeftOut("mlx5_9/1", "the port is disabled"),)))
    assert [table.title for table in tables] == ["", "Ports", "What they can do", "GIDs", "Not used"]
    text = "\n".join(line for table in tables for line in lines(table))
    for words in (
        "down for 12.0s: port 1: IBV_EVENT_PORT_ERR",
        "failed: no such device; load it",
        "mlx5_0/1",
        "eth0 (down)",
        "0000:1b:00.0 (switch)",
        "1000 MHz",
        "RoCE v2",
        "its interface is gone",
        "mlx5_9/1",
    ):
        assert words in text


def test_without_rdma_there_are_no_gids() -> None:
    tcp = Device(name="tcp0", provider="tcp", rail=0, up=True)
    assert [table.title for table in wide_device_tables([tcp], [])] == ["", "Ports", "What they can do"]
    assert LeftOutPort(port="a/1", why="x").why == "x"
