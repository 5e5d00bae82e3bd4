# SPDX-License-Identifier: Apache-2.0
"""Devices while the daemon runs, over the real engine.  RDMA devices: tests/vm/test_devices.py."""

import asyncio
import ipaddress
import os
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dqplbd.config import Config, parse_config
from dqplbd.devices import Devices, NoDevicesError, _read_if_changed
from dqplbd.engine.engine import DeviceChange, Engine, EngineSettings, Event, EventType
from dqplbd.inventory.gids import Choice, Gid, GidKind
from dqplbd.inventory.netdev import Netdev, Netdevs, read_netdevs
from dqplbd.inventory.open import LocalDevice
from dqplbd.inventory.verbs import RdmaInventory

CONFIG = parse_config("devices: [{name: tcp0, address: 127.0.0.1}, {name: tcp1, address: 127.0.0.1}]")


class Told:
    """What the daemon was told."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def device_opened(self, device: LocalDevice) -> None:
        self.calls.append(f"opened {device.name}")

    def device_readdressed(self, device: LocalDevice) -> None:
        self.calls.append(f"readdressed {device.name}")

    def device_changed(self, device: LocalDevice) -> None:
        self.calls.append(f"changed {device.name}")

    def device_lost(self, device: LocalDevice, why: str) -> None:
        self.calls.append(f"lost {device.name}")


@pytest.fixture
def engine() -> Iterator[Engine]:
    one = Engine(EngineSettings("here", 1))
    yield one
    one.close()


async def opened(engine: Engine, config: Config = CONFIG) -> tuple[Devices, Told]:
    told = Told()
    devices = Devices(config, told)
    await devices.find()
    devices.open(engine)
    return devices, told


def event(device: LocalDevice, change: int, text: str = "") -> Event:
    assert device.number is not None
    return Event(EventType.DEVICE, change=change, device=device.number, text=text)


async def test_devices_are_opened_and_told_to_peers(engine: Engine) -> None:
    devices, told = await opened(engine)
    assert [one.error for one in devices.all] == ["", ""]
    hello = devices.hello()
    assert [(one.name, one.rail, one.provider, one.address) for one in hello] == [
        ("tcp0", 0, "tcp", "127.0.0.1"),
        ("tcp1", 1, "tcp", "127.0.0.1"),
    ]
    assert all(one.probe_endpoint for one in hello)
    assert all(one.traffic_class is None for one in hello)
    assert devices.reachable_address() == "127.0.0.1"
    assert not told.calls
    devices.stop_probers()
    assert not devices.probers


async def test_a_device_that_failed_is_taken_out_and_the_others_go_on(engine: Engine) -> None:
    devices, told = await opened(engine)
    first, second = devices.all
    endpoint = devices.hello()[1].probe_endpoint
    devices.on_event(event(first, DeviceChange.FATAL, "driver gave up"))
    assert told.calls == ["lost tcp0"]
    assert "driver gave up" in first.error
    assert "dmesg" in first.fix
    assert [(one.name, one.probe_endpoint) for one in devices.hello()] == [("tcp1", endpoint)]
    assert list(devices.probers) == [second.number]
    devices.stop_probers()


@pytest.mark.parametrize(
    ("change", "looks_again"),
    [
        (DeviceChange.UP, True),
        (DeviceChange.DOWN, True),
        (DeviceChange.ADDRESS, True),
        (DeviceChange.OTHER, False),
        (99, False),
    ],
)
async def test_what_happens_is_kept_for_people(
    engine: Engine, change: int, looks_again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    devices, told = await opened(engine)
    with caplog.at_level("INFO"):
        devices.on_event(event(devices.all[0], change, "port 1: something"))
    assert devices.all[0].last_event == "port 1: something"
    assert "tcp0" in caplog.text
    assert devices._wanted.is_set() == looks_again
    assert not told.calls
    assert len(devices.probers) == 2
    devices.stop_probers()


async def test_a_port_that_is_up_again_is_told_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    devices, _ = await opened(engine)
    with caplog.at_level("INFO"):
        for change in (DeviceChange.DOWN, DeviceChange.UP, DeviceChange.UP):
            devices.on_event(event(devices.all[0], change, "port 1: something"))
    assert caplog.text.count("is up again after") == 1
    devices.stop_probers()


async def test_an_event_of_an_unknown_device_changes_nothing(engine: Engine) -> None:
    devices, told = await opened(engine)
    devices.on_event(Event(EventType.DEVICE, change=DeviceChange.FATAL, device=7))
    assert not told.calls
    devices.stop_probers()


async def test_a_device_whose_address_comes_later_is_opened_then(engine: Engine) -> None:
    """An address of loopback is always there, so the first look is one that found none."""
    busy = f"127.213.{os.getpid() // 256 % 256}.{os.getpid() % 256}"
    config = parse_config(f"devices: [{{name: tcp0, address: {busy}}}]")
    devices, told = await opened(engine, config)
    (device,) = devices.all
    devices.stop_probers()
    # As if it had not been there at the start.
    device.number, device.error = None, "no such address"
    devices._take(RdmaInventory(netdevs=Netdevs()))
    assert device.number is None
    assert not told.calls
    fresh = Devices(config, told)
    await fresh.find()
    devices._take(fresh.inventory)
    assert told.calls == ["opened tcp0"]
    assert not device.error
    assert [one.name for one in devices.hello()] == ["tcp0"]
    devices.stop_probers()


async def test_a_provider_that_cannot_change_its_address_keeps_it(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    devices, told = await opened(engine)
    device = devices.all[0]
    device.spec = replace(device.spec, gid="::ffff:10.0.0.1")
    device.gids = Choice(None, "none is left")
    with caplog.at_level("WARNING"):
        devices._choose_gid(device)
    assert "none is left" in caplog.text
    assert not told.calls
    devices.stop_probers()


async def test_changes_are_followed_until_the_end(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, _ = await opened(engine)
    taken: asyncio.Queue[RdmaInventory] = asyncio.Queue()
    monkeypatch.setattr(devices, "_take", taken.put_nowait)
    devices.watch()
    devices.look_again()
    async with asyncio.timeout(20):
        assert (await taken.get()).netdevs.by_address
    await devices.stop()
    await devices.stop()
    devices.stop_probers()


async def test_a_gid_that_is_gone_is_waited_for_before_a_lesser_one_is_taken(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, _ = await opened(engine)
    device = devices.all[0]
    device.spec = replace(device.spec, gid="::ffff:10.0.0.1")
    local = Gid(0, ipaddress.IPv6Address("fe80::1"), GidKind.ROCE_V2, "eth0", True)
    equal = replace(local, address=ipaddress.IPv6Address("::ffff:10.0.0.2"))
    assert devices._may_come_back(device, local)
    assert not devices._may_come_back(device, equal)
    assert devices._may_come_back(device, local)
    begin_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: begin_s + 60)
    assert not devices._may_come_back(device, local)
    devices.stop_probers()


def test_only_interfaces_that_matter_are_a_reason_to_look_at_everything() -> None:
    """On a host where containers come and go, other interfaces change all the time."""
    now = read_netdevs()
    lo = now.by_address["127.0.0.1"]
    own = {"127.0.0.1"}
    assert _read_if_changed(RdmaInventory(netdevs=now), own) is None
    other = Netdev("veth77", 9977, 1500, True, None)
    more = Netdevs({**now.by_index, 9977: other}, {**now.by_address, "172.30.0.77": other})
    assert _read_if_changed(RdmaInventory(netdevs=more), own) is None
    assert _read_if_changed(RdmaInventory(netdevs=Netdevs()), own) is not None
    slower = replace(lo, mtu=1280)
    changed = {text: slower if one == lo else one for text, one in now.by_address.items()}
    assert _read_if_changed(RdmaInventory(netdevs=Netdevs(now.by_index, changed)), own) is not None


@pytest.mark.skipif(os.path.isdir("/sys/class/infiniband"), reason="this host has RDMA devices")
async def test_without_rdma_automatic_devices_are_an_error_that_says_what_to_do() -> None:
    with pytest.raises(NoDevicesError) as caught:
        await Devices(parse_config("devices: auto"), Told()).find()
    assert "provider: tcp" in str(caught.value)
    assert "RDMA" in str(caught.value)
