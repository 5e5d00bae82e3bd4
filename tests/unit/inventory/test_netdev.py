# SPDX-License-Identifier: Apache-2.0
"""Interfaces, from the kernel itself."""

import asyncio
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from dqplbd.inventory.netdev import (
    Netdev,
    NetdevError,
    NetdevMonitor,
    Netdevs,
    Route,
    find_route,
    read_netdevs,
    tells_change,
)


def test_the_loopback_interface_has_the_loopback_address() -> None:
    lo = read_netdevs().by_address["127.0.0.1"]
    assert lo.mtu == int(Path(f"/sys/class/net/{lo.name}/mtu").read_text())
    assert lo.up
    assert lo.enabled
    assert lo.speed_bps is None


def test_every_loopback_address_is_of_the_loopback_interface() -> None:
    lo, eth = Netdev("lo", 1, 65536, True, None), Netdev("eth0", 2, 1500, True, 10**10)
    found = Netdevs({1: lo, 2: eth}, {"127.0.0.1": lo, "fd00::7": eth, "10.0.0.7": eth, "fe80::1": eth})
    assert found.with_address("127.9.9.9") is lo
    assert found.with_address("10.0.0.7") is eth
    assert found.with_address("fd00:0::7") is eth
    assert found.with_address("10.0.0.8") is None
    assert found.with_address("fe80::1%eth0") is eth
    assert found.with_address("fe80::9%eth1") is None
    assert found.named("lo") is lo
    assert found.addresses_of("eth0") == ["10.0.0.7", "fd00::7", "fe80::1"]


def test_the_speed_is_that_of_sysfs(tmp_path: Path) -> None:
    from dqplbd.inventory import netdev

    folder = tmp_path / "class/net/eth0"
    folder.mkdir(parents=True)
    for text, speed in (("100000\n", 10**11), ("-1\n", None), ("x", None), ("4294967295", None)):
        (folder / "speed").write_text(text)
        assert netdev._speed_bps("eth0", tmp_path) == speed
    assert netdev._speed_bps("lo", tmp_path) is None


def test_a_route_to_this_host_itself() -> None:
    assert find_route("127.0.0.1", "127.0.0.1") == Route("lo", "")


def test_no_route_is_an_error() -> None:
    with pytest.raises(NetdevError, match=r"no route from 203\.0\.113\.77 to 127\.0\.0\.1"):
        find_route("127.0.0.1", "203.0.113.77")  # not an address of this host


# -- changes


def message(kind: int, body: bytes = b"") -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def test_links_and_addresses_are_changes() -> None:
    assert tells_change(message(16))  # RTM_NEWLINK
    assert tells_change(message(3) + message(21, b"1234"))  # something else, RTM_DELADDR
    assert not tells_change(message(24))  # RTM_NEWROUTE
    assert not tells_change(message(2, b"12"))


@given(st.binary(max_size=64))
def test_any_datagram_is_read_to_its_end(data: bytes) -> None:
    tells_change(data)


def ask(what: str, *arguments: str, **options: object) -> None:
    """One request to the kernel.  pyroute2's own event loop cannot run in a thread that has one already."""
    with IPRoute() as route:
        getattr(route, what)(*arguments, **options)


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_changes_are_told(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    address = f"127.213.{os.getpid() // 256 % 256}.{os.getpid() % 256}"

    async def follow() -> None:
        told = asyncio.Event()
        monitor = NetdevMonitor(told.set, settle_s=0.001)
        monitor.start()

        async def wait_until(true: Callable[[Netdevs], bool]) -> None:
            while True:
                async with asyncio.timeout(10):
                    await told.wait()
                told.clear()
                if true(await asyncio.to_thread(read_netdevs)):
                    return

        lo = (await asyncio.to_thread(read_netdevs)).by_address["127.0.0.1"]
        try:
            try:
                await asyncio.to_thread(ask, "addr", "add", index=lo.index, address=address, prefixlen=32)
            except NetlinkError as error:
                pytest.skip(f"addresses cannot be changed here: {error}")
            try:
                await wait_until(lambda now: now.by_address.get(address) == lo)
            finally:
                await asyncio.to_thread(ask, "addr", "del", index=lo.index, address=address, prefixlen=32)
            await wait_until(lambda now: address not in now.by_address)
        finally:
            monitor.stop()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(follow())


async def test_a_monitor_that_was_stopped_tells_nothing() -> None:
    told: list[int] = []
    monitor = NetdevMonitor(lambda: told.append(1), settle_s=0)
    monitor.start()
    monitor.stop()
    monitor.stop()
    await asyncio.sleep(0)
    assert not told
