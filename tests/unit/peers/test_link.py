# SPDX-License-Identifier: Apache-2.0
"""The host-to-host API over real sockets: what it answers, and what it does with what is no request."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dqplbd.peers import link
from dqplbd.peers.cards import (
    MAX_BODY_BYTES,
    BurstLease,
    BurstRequest,
    Hello,
    Protocol,
    Refusal,
    VcAnswer,
    VcRequest,
    parse_card,
)
from dqplbd.peers.link import ApiServer, PeerClient, Refused, Unreachable, join_host_port

HELLO = Hello(protocol=Protocol(min=1, max=1), host_id="here", epoch="0" * 16, api_port=7471)


class Handler:
    """Answers as it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.raises: Exception | None = None

    async def on_hello(self, address: str, hello: Hello) -> Hello:
        self.asked.append(address)
        if self.raises is not None:
            raise self.raises
        return HELLO

    async def on_burst(self, remote: str, request: BurstRequest) -> BurstLease:
        raise Refused("forbidden", f"no bursts of {request.from_host_id}")

    async def on_vcs(self, remote: str, request: VcRequest) -> VcAnswer:
        return VcAnswer(attempt=request.attempt, vcs=())


@pytest.fixture
async def handler() -> Handler:
    return Handler()


@pytest.fixture
async def address(handler: Handler) -> AsyncIterator[str]:
    server = ApiServer(handler)
    host, port = await server.start("127.0.0.1:0")
    yield join_host_port(host, port)
    await server.stop()


@pytest.fixture
async def client() -> AsyncIterator[PeerClient]:
    one = PeerClient("127.0.0.1", 5.0)
    yield one
    await one.close()


async def test_an_address_is_the_source_with_the_told_port(address: str, handler: Handler, client: PeerClient) -> None:
    assert await client.hello(address, HELLO) == HELLO
    assert handler.asked == ["127.0.0.1:7471"]


@pytest.mark.parametrize(
    ("code", "status"),
    [("forbidden", 403), ("version", 409), ("yield", 409), ("conflict", 409), ("epoch", 410), ("busy", 429)],
)
async def test_a_refusal_is_told_with_its_code(
    address: str, handler: Handler, client: PeerClient, code: str, status: int
) -> None:
    handler.raises = Refused(code, "because of 7", "1" * 16)  # type: ignore[arg-type]
    with pytest.raises(Refused, match="because of 7") as caught:
        await client.hello(address, HELLO)
    assert (caught.value.code, caught.value.epoch) == (code, "1" * 16)
    async with aiohttp.ClientSession() as session:
        body = HELLO.model_dump_json()
        async with session.post(f"http://{address}/v1/hello", data=body) as response:
            assert response.status == status


async def test_a_failure_inside_is_not_told_outside(address: str, handler: Handler, client: PeerClient) -> None:
    handler.raises = RuntimeError("secret detail")
    with pytest.raises(Refused) as caught:
        await client.hello(address, HELLO)
    assert caught.value.code == "failed"
    assert "secret" not in caught.value.text


@given(body=st.binary(max_size=300))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_body_gets_an_answer(body: bytes) -> None:
    async def go() -> None:
        server = ApiServer(Handler())
        host, port = await server.start("127.0.0.1:0")
        try:
            async with aiohttp.ClientSession() as session:
                for path in ("hello", "vcs"):
                    async with session.post(f"http://{host}:{port}/v1/{path}", data=body) as response:
                        assert response.status == 400
                        assert parse_card(Refusal, await response.read()).code == "malformed"
        finally:
            await server.stop()

    asyncio.run(go())


async def test_too_large_a_body_is_refused(address: str) -> None:
    async with aiohttp.ClientSession() as session:
        data = b"x" * (MAX_BODY_BYTES + 1)
        async with session.post(f"http://{address}/v1/hello", data=data) as response:
            assert response.status == 400


async def test_a_body_that_does_not_come_is_given_up(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "BODY_TIMEOUT_S", 0.1)
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/hello HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert b" 400 " in await reader.readline()
    writer.close()


async def test_connections_are_bounded(address: str, client: PeerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_CONNECTIONS", 3)
    host, port = address.split(":")
    held = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
    reader, writer = await asyncio.open_connection(host, int(port))
    assert await reader.read() == b""
    writer.close()
    for _, one in held:
        one.close()
        await one.wait_closed()
    for _ in range(200):  # the server notices the ends in its own time
        try:
            await client.hello(address, HELLO)
            break
        except Unreachable:
            await asyncio.sleep(0.01)
    else:
        pytest.fail("nobody is let in after the others left")


async def test_nobody_there_is_said_with_the_reason(client: PeerClient) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = join_host_port(*unused.getsockname())
        with pytest.raises(Unreachable, match=rf"{address}.*Connection refused"):
            await client.hello(address, HELLO)


async def test_a_peer_that_does_not_answer_is_given_up() -> None:
    client = PeerClient(None, 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(Unreachable, match=r"no answer within 0\.1 s"):
            await client.hello(join_host_port(*silent.getsockname()), HELLO)
    await client.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00" * 64,
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\nhtml",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + b"x" * (MAX_BODY_BYTES + 100_000),
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
    ],
)
async def test_any_answer_of_a_peer_is_an_error_at_worst(client: PeerClient, answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        try:
            await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        with pytest.raises(Unreachable):
            await client.hello(join_host_port(*server.sockets[0].getsockname()), HELLO)
    finally:
        server.close()


async def test_a_taken_address_is_named(address: str, handler: Handler) -> None:
    with pytest.raises(OSError, match=address):
        await ApiServer(handler).start(address)


def test_ipv6_addresses_get_brackets() -> None:
    assert join_host_port("::1", 7) == "[::1]:7"
    assert join_host_port("10.0.0.1", 7) == "10.0.0.1:7"


async def test_only_what_the_api_has_is_answered(address: str) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://{address}/v1/hello") as response:
            assert response.status == 405
        async with session.post(f"http://{address}/v2/hello", data=json.dumps({})) as response:
            assert response.status == 404
