# SPDX-License-Identifier: Apache-2.0
"""The attach socket with a real engine behind it: whatever a client does, it alone pays."""

import array
import asyncio
import errno
import mmap
import os
import random
import socket
import stat
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dqplbd.clients import server as server_module
from dqplbd.clients.server import ClientServer
from dqplbd.config.models import ClientsConfig
from dqplbd.engine.engine import (
    DEVICE_INFO_BYTES,
    LAYOUT_VERSION,
    REPLY_BYTES,
    REQUEST_BYTES,
    ClientReply,
    DeviceInfo,
    DeviceSpec,
    Engine,
    EngineSettings,
    EventType,
    RequestType,
    Status,
    pack_request,
    parse_reply,
)

ATTACH, DEVICES = RequestType.ATTACH, RequestType.DEVICES
ALLOC, DMABUF, FREE = RequestType.MEM_ALLOC, RequestType.MEM_DMABUF, RequestType.MEM_FREE
SHARE, HINT = RequestType.MEM_SHARE, RequestType.HINT
PATIENCE = 20.0


class Daemon:
    """The part of the daemon that clients see."""

    def __init__(self, folder: Path, **limits: object) -> None:
        self.config = ClientsConfig.model_validate({"socket": str(folder / "s"), **limits})
        self.engine = Engine(EngineSettings("here", 0x1234, max_clients=self.config.max_clients))
        self.spec = DeviceSpec("tcp0", "tcp", "127.0.0.1", rate_bps=10**9)
        self.device = self.engine.device_add(self.spec)
        self.expected_peers: list[int] = []
        self.server = ClientServer(
            self.engine, self.config, self.devices, self.take_events, expect_peers=self.expected_peers.append
        )
        asyncio.get_running_loop().add_reader(self.engine.fileno(), self.take_events)
        self.server.start()

    def devices(self) -> list[tuple[DeviceInfo, DeviceSpec, int]]:
        return [(self.engine.device(self.device), self.spec, 777)]

    def take_events(self) -> None:
        for event in self.engine.events():
            if event.type == EventType.CLIENT_CUT:
                self.server.on_cut(event.client, event.text)
            elif event.type == EventType.CLIENT_GONE:
                self.server.on_gone(event.client)

    async def stop(self) -> None:
        await self.server.stop(PATIENCE)
        assert len(self.server) == 0
        asyncio.get_running_loop().remove_reader(self.engine.fileno())
        self.engine.close()


class Peer:
    """A client that sends whatever it is told to."""

    def __init__(self, daemon: Daemon) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.setblocking(False)
        self.sock.connect(daemon.config.socket)
        self.fds: list[int] = []

    def send(self, data: bytes, fds: list[int] | None = None) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([data], rights)

    async def receive(self) -> bytes:
        """The next datagram; empty when the daemon hung up.  Descriptors go to ``fds``."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE):
            ready = asyncio.Event()
            loop.add_reader(self.sock.fileno(), ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(self.sock.fileno())
        try:
            data, ancillary, _, _ = self.sock.recvmsg(65536, socket.CMSG_SPACE(64))
        except ConnectionResetError:
            return b""
        for _, _, content in ancillary:
            fds = array.array("i")
            fds.frombytes(content)
            self.fds.extend(fds)
        return data

    async def ask(self, kind: int, *args: int, name: str = "", fds: list[int] | None = None) -> ClientReply:
        numbers = [*args, 0, 0, 0, 0][:4]
        self.send(pack_request(kind, numbers[0], numbers[1], numbers[2], numbers[3], name), fds)
        return parse_reply(await self.receive())

    async def attach(self, name: str = "test", entries: int = 64) -> ClientReply:
        return await self.ask(ATTACH, LAYOUT_VERSION, LAYOUT_VERSION, entries, os.getpid(), name=name)

    async def cut(self) -> bool:
        """Whether the daemon has hung up."""
        return await self.receive() == b""

    def close(self) -> None:
        self.sock.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


async def settle(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - descriptors and the engine's counters announce no change
            await asyncio.sleep(0.005)


@pytest.fixture
async def daemon(short_folder: Path) -> AsyncIterator[Daemon]:
    one = Daemon(short_folder, max_clients=8, max_memory_bytes=64 << 20, max_regions=16)
    yield one
    await one.stop()


@pytest.fixture
async def peer(daemon: Daemon) -> AsyncIterator[Peer]:
    one = Peer(daemon)
    yield one
    one.close()


async def test_a_client_gets_its_rings_and_a_handle(daemon: Daemon, peer: Peer) -> None:
    reply = await peer.attach("trainer")
    assert (reply.status, reply.args[0], reply.args[2]) == (Status.OK, LAYOUT_VERSION, 64)
    memfd, eventfd = peer.fds
    assert os.fstat(memfd).st_size == reply.args[3]
    assert reply.handle[16:].find(b"here\0") > 0
    with mmap.mmap(memfd, reply.args[3]) as shared:
        assert shared[:4] != bytes(4)
    with pytest.raises(OSError, match=r"."):
        os.ftruncate(memfd, 0)
    assert os.write(eventfd, (1).to_bytes(8, "little")) == 8
    record = daemon.server.records()[0]
    assert (record.name, record.pid, record.uid) == ("trainer", os.getpid(), os.getuid())
    peer.close()
    await settle(lambda: len(daemon.server) == 0)


async def test_the_socket_has_the_configured_mode(daemon: Daemon) -> None:
    assert stat.S_IMODE(os.stat(daemon.config.socket).st_mode) == 0o660


async def test_devices_are_told(daemon: Daemon, peer: Peer) -> None:
    await peer.attach()
    peer.send(pack_request(DEVICES))
    data = await peer.receive()
    assert parse_reply(data).args[:2] == (1, daemon.config.max_flows)
    assert len(data) == REPLY_BYTES + DEVICE_INFO_BYTES
    assert data[REPLY_BYTES:].startswith(b"tcp0\0")


async def test_memory_comes_and_goes(daemon: Daemon, peer: Peer) -> None:
    await peer.attach()
    start = daemon.engine.stats().memory_bytes
    small = await peer.ask(ALLOC, 100, 0)
    large = await peer.ask(ALLOC, 32 << 20, 1)  # off the event loop
    assert (small.status, large.status) == (Status.OK, Status.OK)
    assert os.fstat(peer.fds[3]).st_size == large.args[1] >= 32 << 20
    assert daemon.engine.stats().memory_bytes > start + (32 << 20)
    for reply in (small, large):
        assert (await peer.ask(FREE, reply.args[0])).status is Status.OK
    assert (await peer.ask(FREE, small.args[0])).status is Status.INVALID
    await settle(lambda: daemon.engine.stats().memory_bytes == start)


async def test_memory_beyond_the_quota_is_refused_with_a_reason(daemon: Daemon, peer: Peer) -> None:
    await peer.attach()
    for size in (65 << 20, 2**63, 2**64 - 1):
        reply = await peer.ask(ALLOC, size, 0)
        assert reply.status is Status.NOMEM or reply.status is Status.INVALID
        assert reply.text
    assert (await peer.ask(ALLOC, 0, 0)).status is Status.INVALID
    assert (await peer.ask(ALLOC, 4096, 2)).status is Status.INVALID
    assert (await peer.ask(ALLOC, 4096, 0)).status is Status.OK


async def test_regions_are_bounded(daemon: Daemon, peer: Peer) -> None:
    await peer.attach()
    replies = [await peer.ask(ALLOC, 4096, 0) for _ in range(17)]
    assert [reply.status for reply in replies] == [Status.OK] * 16 + [Status.LIMIT]
    assert "max_regions is 16" in replies[-1].text
    await peer.ask(FREE, replies[0].args[0])
    assert (await peer.ask(ALLOC, 4096, 0)).status is Status.OK


async def test_memory_of_another_client_cannot_be_freed(daemon: Daemon, peer: Peer) -> None:
    other = Peer(daemon)
    await peer.attach()
    await other.attach()
    mine = (await peer.ask(ALLOC, 4096, 0)).args[0]
    for number in (mine, 2**32, 2**64 - 1):
        assert (await other.ask(FREE, number)).status is Status.INVALID
    assert (await peer.ask(FREE, mine)).status is Status.OK
    other.close()


async def test_a_process_shares_memory_between_its_clients(daemon: Daemon, peer: Peer) -> None:
    other = Peer(daemon)
    owner = (await peer.attach()).args[1]
    await other.attach()
    start = daemon.engine.stats().memory_bytes
    mine = (await peer.ask(ALLOC, 8 << 20, 0)).args[0]
    reply = await other.ask(SHARE, owner, mine)
    assert (reply.status, reply.args[1]) == (Status.OK, 8 << 20)
    assert daemon.engine.stats().memory_bytes == start + (16 << 20)  # against the quota of both
    assert (await peer.ask(FREE, mine)).status is Status.OK
    assert daemon.engine.stats().memory_bytes == start + (8 << 20)
    assert (await other.ask(SHARE, owner, mine)).status is Status.PERMISSION
    assert (await other.ask(FREE, reply.args[0])).status is Status.OK
    await settle(lambda: daemon.engine.stats().memory_bytes == start)
    other.close()


STRANGER = """
import os, socket, sys
from dqplbd.engine.engine import LAYOUT_VERSION, RequestType, pack_request, parse_reply
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
def ask(kind, *args):
    sock.send(pack_request(kind, *args))
    return parse_reply(sock.recv(65536))
ask(RequestType.ATTACH, LAYOUT_VERSION, LAYOUT_VERSION, 64, int(sys.argv[4]), "stranger")
reply = ask(RequestType.MEM_SHARE, int(sys.argv[2]), int(sys.argv[3]))
print(reply.status.name)
"""


async def test_memory_is_shared_with_nobody_else(daemon: Daemon, peer: Peer) -> None:
    owner = (await peer.attach()).args[1]
    mine = (await peer.ask(ALLOC, 4096, 0)).args[0]
    staging = (await peer.ask(ALLOC, 4096, 1)).args[0]
    other = Peer(daemon)
    await other.attach()
    for number, memory in ((owner, mine + 100), (owner + 100, mine), (2**64 - 1, 2**64 - 1)):
        reply = await other.ask(SHARE, number, memory)
        assert reply.status is Status.PERMISSION
        assert "only a process itself" in reply.text
    assert (await other.ask(SHARE, owner, staging)).status is not Status.OK
    other.close()
    # Another process of the same user, which says that it is this one.
    arguments = [daemon.config.socket, str(owner), str(mine), str(os.getpid())]
    stranger = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", STRANGER, *arguments, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await asyncio.wait_for(stranger.communicate(), PATIENCE)
    assert said.decode().strip() == "PERMISSION"


async def test_hints_of_all_clients_are_one(daemon: Daemon, peer: Peer) -> None:
    other = Peer(daemon)
    await peer.attach()
    await other.attach()
    for client, peers in ((peer, 5), (other, 3), (other, 9), (peer, 0), (peer, 2**64 - 1), (peer, 0)):
        assert (await client.ask(HINT, peers, 4)).status is Status.OK
    assert daemon.expected_peers == [5, 9, 2**32 - 1, 9]
    other.close()
    await settle(lambda: daemon.expected_peers[-1] == 0)


async def test_a_file_is_no_dma_buf(daemon: Daemon, peer: Peer, open_fds: Callable[[], int]) -> None:
    await peer.attach()
    before = open_fds()
    for fd in [os.open("/proc/self/maps", os.O_RDONLY), *os.pipe(), os.memfd_create("x")]:
        reply = await peer.ask(DMABUF, 4096, 0, fds=[fd])
        os.close(fd)
        assert reply.status is not Status.OK
        assert reply.text
    assert open_fds() == before


@pytest.mark.parametrize(
    "fds",
    [0, 2, 16, 17, 100, 253],
)
async def test_another_number_of_descriptors_than_expected_cuts_off(
    daemon: Daemon, open_fds: Callable[[], int], fds: int
) -> None:
    before = open_fds()
    peer = Peer(daemon)
    await peer.attach()
    zero = os.open("/dev/zero", os.O_RDONLY)
    peer.send(pack_request(DMABUF, 4096), [zero] * fds)
    assert await peer.cut()
    os.close(zero)
    peer.close()
    await settle(lambda: len(daemon.server) == 0)
    assert open_fds() == before


@pytest.mark.parametrize("kind", [ATTACH, DEVICES, ALLOC, FREE])
async def test_a_descriptor_that_nobody_asked_for_cuts_off(
    daemon: Daemon, peer: Peer, open_fds: Callable[[], int], kind: RequestType
) -> None:
    before = open_fds()
    zero = os.open("/dev/zero", os.O_RDONLY)
    peer.send(pack_request(kind, LAYOUT_VERSION, LAYOUT_VERSION), [zero])
    os.close(zero)
    assert await peer.cut()
    await settle(lambda: open_fds() == before - 1)  # the daemon's end of the connection is closed, too


async def test_attach_comes_first_and_once(daemon: Daemon, peer: Peer) -> None:
    early = Peer(daemon)
    early.send(pack_request(DEVICES))
    assert await early.cut()
    early.close()
    await peer.attach()
    peer.send(pack_request(ATTACH, LAYOUT_VERSION, LAYOUT_VERSION, 64))
    assert await peer.cut()
    await settle(lambda: len(daemon.server) == 0)


async def test_versions_that_do_not_meet_are_both_named(daemon: Daemon, peer: Peer) -> None:
    reply = await peer.ask(ATTACH, LAYOUT_VERSION + 1, LAYOUT_VERSION + 7, 64)
    assert reply.status is Status.VERSION
    assert f"version {LAYOUT_VERSION}," in reply.text
    assert f"{LAYOUT_VERSION + 1}..{LAYOUT_VERSION + 7}" in reply.text
    assert await peer.cut()


@pytest.mark.parametrize("entries", [1, 63, 65, 100, 2**17, 2**32, 2**64 - 1])
async def test_rings_of_another_size_than_possible_are_refused(daemon: Daemon, peer: Peer, entries: int) -> None:
    reply = await peer.attach(entries=entries)
    assert reply.status is Status.INVALID
    assert str(entries) in reply.text


async def test_a_ring_may_be_shorter_than_asked_for(short_folder: Path) -> None:
    daemon = Daemon(short_folder, max_ring_entries=128)
    peer = Peer(daemon)
    assert (await peer.attach(entries=65536)).args[2] == 128
    peer.close()
    await daemon.stop()


async def test_one_client_too_many_is_told_why(daemon: Daemon) -> None:
    peers = [Peer(daemon) for _ in range(9)]
    statuses = [(await peer.attach()).status for peer in peers]
    assert statuses == [Status.OK] * 8 + [Status.LIMIT]
    assert await peers[8].cut()
    peers[0].close()
    await settle(lambda: len(daemon.server) == 7)
    late = Peer(daemon)
    assert (await late.attach()).status is Status.OK
    for peer in [*peers, late]:
        peer.close()


async def test_users_have_limits_of_their_own(short_folder: Path) -> None:
    daemon = Daemon(short_folder, max_clients_per_user=1)
    one, two = Peer(daemon), Peer(daemon)
    assert (await one.attach()).status is Status.OK
    reply = await two.attach()
    assert reply.status is Status.LIMIT
    assert f"user {os.getuid()}" in reply.text
    one.close()
    two.close()
    await daemon.stop()


async def test_who_does_not_attach_is_put_out(daemon: Daemon, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "ATTACH_TIMEOUT_S", 0.05)
    quiet = Peer(daemon)
    assert await quiet.cut()
    quiet.close()


async def test_who_does_not_read_is_put_out_and_holds_nobody_up(daemon: Daemon, peer: Peer) -> None:
    flood = Peer(daemon)
    await flood.attach()
    await peer.attach()
    hung_up = False
    for _ in range(200_000):
        try:
            flood.send(pack_request(DEVICES))
        except BlockingIOError:
            await asyncio.sleep(0)
        except OSError as error:
            hung_up = error.errno in (errno.EPIPE, errno.ECONNRESET)
            break
        await asyncio.sleep(0)
    assert hung_up
    assert (await peer.ask(DEVICES)).status is Status.OK
    flood.close()
    await settle(lambda: len(daemon.server) == 1)


async def test_a_client_that_leaves_during_an_allocation_leaves_nothing(
    daemon: Daemon, open_fds: Callable[[], int]
) -> None:
    start, before = daemon.engine.stats().memory_bytes, open_fds()
    for _ in range(5):
        peer = Peer(daemon)
        await peer.attach()
        peer.send(pack_request(ALLOC, 48 << 20))
        peer.close()
        await settle(lambda: len(daemon.server) == 0)
    await settle(lambda: daemon.engine.stats().memory_bytes == start)
    await settle(lambda: open_fds() == before)


async def test_requests_wait_their_turn(daemon: Daemon, peer: Peer) -> None:
    await peer.attach()
    peer.send(pack_request(ALLOC, 48 << 20))
    peer.send(pack_request(DEVICES))
    peer.send(pack_request(ALLOC, 4096))
    assert [parse_reply(await peer.receive()).type for _ in range(3)] == [ALLOC, DEVICES, ALLOC]


async def test_a_thousand_clients_leave_nothing_behind(daemon: Daemon, open_fds: Callable[[], int]) -> None:
    chance = random.Random(1)
    before = open_fds()
    start = daemon.engine.stats().memory_bytes
    for _ in range(1000):
        peer = Peer(daemon)
        end = chance.randrange(4)
        if end > 0:
            peer.send(pack_request(ATTACH, LAYOUT_VERSION, LAYOUT_VERSION, 64))
        if end > 1:
            assert parse_reply(await peer.receive()).status is Status.OK
        if end > 2:
            peer.send(pack_request(ALLOC, 4096))
        peer.close()
        await settle(lambda: len(daemon.server) == 0)
    await settle(lambda: open_fds() == before)
    assert daemon.engine.stats().memory_bytes == start
    assert daemon.engine.stats().clients == 0
    assert daemon.server.attached_total >= 250


@given(
    st.lists(
        st.one_of(
            st.binary(min_size=1, max_size=REQUEST_BYTES + 50),
            st.builds(
                pack_request,
                st.integers(0, 65535),
                st.integers(0, 2**64 - 1),
                st.integers(0, 2**64 - 1),
                st.integers(0, 2**64 - 1),
                st.integers(0, 2**64 - 1),
            ),
            st.builds(
                pack_request,
                st.sampled_from(RequestType),
                st.sampled_from([0, 1, 4096, 5 << 20, 2**32, 2**63]),
                st.sampled_from([0, 1, 2]),
                st.sampled_from([0, 64, 100]),
            ),
        ),
        max_size=6,
    ),
    st.integers(0, 3),
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_datagrams_hurt_nobody_else(short_folder: Path, datagrams: list[bytes], fds: int) -> None:
    async def go() -> None:
        daemon = Daemon(short_folder, max_memory_bytes=64 << 20)
        good, bad = Peer(daemon), Peer(daemon)
        await good.attach()
        for attach in (False, True):
            bad = Peer(daemon)
            if attach:
                await bad.attach()
            for datagram in datagrams:
                try:
                    bad.send(datagram, [0] * fds)
                except (BrokenPipeError, ConnectionResetError):
                    break
            assert (await good.ask(DEVICES)).status is Status.OK
            bad.close()
        await settle(lambda: len(daemon.server) == 1)
        assert (await good.ask(ALLOC, 4096, 0)).status is Status.OK
        good.close()
        await daemon.stop()

    asyncio.run(go())
