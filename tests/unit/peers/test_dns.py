# SPDX-License-Identifier: Apache-2.0
"""Peers by DNS name; ``localhost`` and names below ``.invalid`` need no name server (RFC 6761)."""

import asyncio

import pytest

from dqplbd.config.models import DnsPeersConfig
from dqplbd.peers.discovery.dns import DnsSource, lookup


async def test_every_address_of_a_name_is_a_peer() -> None:
    found = await lookup("localhost", 7471)
    assert "127.0.0.1:7471" in found
    assert found <= {"127.0.0.1:7471", "[::1]:7471"}


async def test_a_name_that_is_none_is_an_error() -> None:
    with pytest.raises((OSError, TimeoutError)):
        await lookup("no-such-host.invalid", 1)


async def test_the_source_tells_what_it_found() -> None:
    told: asyncio.Queue[set[str]] = asyncio.Queue()
    source = DnsSource(DnsPeersConfig(name="localhost", port=7), told.put_nowait)
    task = asyncio.create_task(source.run())
    async with asyncio.timeout(30):
        assert "127.0.0.1:7" in await told.get()
    assert source.error == ""
    task.cancel()


async def test_a_failed_lookup_takes_nobody_away() -> None:
    told: list[set[str]] = []
    source = DnsSource(DnsPeersConfig(name="no-such-host.invalid"), told.append)
    task = asyncio.create_task(source.run())
    async with asyncio.timeout(60):
        while not source.error:  # noqa: ASYNC110 - the source announces no failure
            await asyncio.sleep(0.01)
    assert "no-such-host.invalid" in source.error
    assert told == []
    task.cancel()
