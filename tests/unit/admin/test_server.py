# SPDX-License-Identifier: Apache-2.0
"""The admin API over a real Unix socket."""

import asyncio
import json
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dqplbd.admin.client import AdminClient, NotReachableError
from dqplbd.admin.model import AdminError, ConfigProblem
from dqplbd.admin.server import AdminServer
from dqplbd.config.models import AdminConfig

if TYPE_CHECKING:
    from tests.unit.conftest import SampleView


PIECES = [
    b"GET ",
    b"POST ",
    b"/v1/status",
    b"/v1/probe",
    b"/v1/paths?top=",
    b" HTTP/1.1\r\n",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"\r\n",
    b'{"peer": "peer1"}',
]


def _containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    keys = st.text() | st.sampled_from(["peer", "count"])
    return st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)


def raw(path: str, request: bytes) -> tuple[int, dict[str, object]]:
    """Status and body of the answer to bytes, whatever they are."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(path)
        connection.sendall(request)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body.startswith(b"{") else {}


def test_everything_that_is_told_arrives(admin_socket: str, view: "SampleView") -> None:
    client = AdminClient(admin_socket)
    assert client.status() == view.status()
    assert client.devices() == view.devices()
    assert client.peers() == view.peers()
    assert client.paths() == view.paths()
    assert client.explain("peer2") == view.explain("peer2")
    assert client.clients() == view.clients()
    assert client.config_view() == view.config_view()


def test_paths_are_chosen_and_ordered_by_the_server(admin_socket: str) -> None:
    client = AdminClient(admin_socket)
    assert [path.peer for path in client.paths(path_class="zone")] == ["peer1"]
    assert [path.peer for path in client.paths(sort="rtt", top=2)] == ["peer3", "peer2"]
    assert client.paths(peer="nobody") == []


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ({"sort": "colour"}, "colour"),
        ({"path_class": "planet"}, "planet"),
        ({"top": 0}, "0"),
    ],
)
def test_a_wrong_choice_is_named(admin_socket: str, query: dict[str, object], named: str) -> None:
    with pytest.raises(AdminError) as caught:
        AdminClient(admin_socket).paths(**query)  # type: ignore[arg-type]
    assert caught.value.status == 400
    assert named in caught.value.error
    assert caught.value.hint


def test_probe_reload_reset(admin_socket: str, view: "SampleView") -> None:
    client = AdminClient(admin_socket)
    report = client.probe("peer1", 3)
    assert [len(path.samples) for path in report.paths] == [3]
    assert client.reload().ok
    view.reload_problems = [ConfigProblem(file="x.yaml", line=3, key="profiles.gain", problem="bad", expected="1..8")]
    refused = client.reload()
    assert not refused.ok
    assert refused.problems == view.reload_problems
    assert client.reset_peaks().paths == 4
    assert view.resets == 1


def test_an_unknown_peer_is_404_with_a_hint(admin_socket: str) -> None:
    client = AdminClient(admin_socket)
    for call in (lambda: client.explain("no/such peer?"), lambda: client.probe("nobody", 1)):
        with pytest.raises(AdminError) as caught:
            call()
        assert caught.value.status == 404
        assert "dqplb peers" in caught.value.hint


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[1]",
        b"\xff\xfe",
        b"[" * 10000,
        b'{"peer": 5}',
        b'{"peer": ""}',
        b'{"peer": "peer1", "count": 0}',
        b'{"peer": "peer1", "count": 1001}',
        b'{"peer": "peer1", "count": true}',
        b'{"peer": "peer1", "count": 1e3}',
        b'{"peer": "peer1", "colour": 1}',
        b"",
    ],
)
def test_a_bad_body_is_refused(admin_socket: str, body: bytes) -> None:
    head = f"POST /v1/probe HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    code, answer = raw(admin_socket, head.encode() + body)
    assert code == 400
    assert answer["error"]
    assert answer["hint"]


def test_what_is_not_served_is_json_too(admin_socket: str) -> None:
    assert raw(admin_socket, b"GET /v2/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")[0] == 404
    code, answer = raw(admin_socket, b"DELETE /v1/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert code == 405
    assert "GET" in str(answer["hint"])
    big = b"POST /v1/reload HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100000
    assert raw(admin_socket, big)[0] == 413
    assert raw(admin_socket, b"\x16\x03\x01 nonsense\r\n\r\n")[0] == 400
    assert AdminClient(admin_socket).status().host_id == "self"


@given(st.lists(st.one_of(st.binary(max_size=300), st.sampled_from(PIECES)), max_size=12).map(b"".join))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_any_bytes_leave_it_unharmed(admin_socket: str, request_bytes: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(admin_socket)
        try:
            connection.sendall(request_bytes)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert AdminClient(admin_socket).status().host_id == "self"


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), _containers, max_leaves=8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
def test_any_json_is_answered_or_refused(admin_socket: str, body: object) -> None:
    refusals = []
    for target in ("/v1/probe", "/v1/reload", "/v1/reset-peaks"):
        try:
            AdminClient(admin_socket).request("POST", target, body)
        except AdminError as error:
            refusals.append(error)
    assert all(error.status in (400, 404) and error.hint for error in refusals)


def test_a_failure_of_the_daemon_is_told_and_survived(admin_socket: str, view: "SampleView") -> None:
    view.peer_list = None  # type: ignore[assignment]
    with pytest.raises(AdminError) as caught:
        AdminClient(admin_socket).peers()
    assert caught.value.status == 500
    assert "TypeError" in caught.value.error
    assert AdminClient(admin_socket).devices() == view.devices()


def test_the_socket_has_exactly_its_rights(admin_socket: str) -> None:
    assert stat.S_IMODE(os.stat(admin_socket).st_mode) == 0o660


def test_a_dead_socket_is_replaced_and_nothing_is_left(view: "SampleView", tmp_path: Path) -> None:
    path = str(tmp_path / "admin.sock")
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(path)
    stale.close()

    async def run() -> None:
        server = AdminServer(view, AdminConfig(socket=path, mode="0600"))
        await server.start()
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert (await asyncio.to_thread(AdminClient(path).status)).host_id == "self"
        await server.stop()
        await server.stop()

    asyncio.run(run())
    assert os.listdir(tmp_path) == []


def test_a_socket_of_a_successor_is_left_alone(view: "SampleView", tmp_path: Path) -> None:
    path = str(tmp_path / "admin.sock")

    async def run() -> None:
        first, second = (AdminServer(view, AdminConfig(socket=path)) for _ in range(2))
        await first.start()
        await second.start()
        await first.stop()
        assert (await asyncio.to_thread(AdminClient(path).status)).host_id == "self"
        await second.stop()

    asyncio.run(run())


def test_it_runs_on_uvloop(view: "SampleView", tmp_path: Path) -> None:
    path = str(tmp_path / "admin.sock")

    async def run() -> None:
        server = AdminServer(view, AdminConfig(socket=path))
        await server.start()
        assert await asyncio.to_thread(AdminClient(path).paths) == view.paths()
        await server.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_a_missing_daemon_is_named_with_what_to_do(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.sock")
    with pytest.raises(NotReachableError) as caught:
        AdminClient(missing).status()
    assert missing in caught.value.error
    assert "systemctl status dqplbd" in caught.value.hint

    dead = str(tmp_path / "dead.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(dead)
    listener.close()
    with pytest.raises(NotReachableError, match="nobody listens"):
        AdminClient(dead).status()
    with pytest.raises(NotReachableError, match="107"):
        AdminClient("/" + "y" * 200).status()


def test_a_silent_or_strange_daemon_is_told_apart(tmp_path: Path) -> None:
    path = str(tmp_path / "odd.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with pytest.raises(NotReachableError, match=r"no answer within 0\.05 s"):
            AdminClient(path, timeout_s=0.05).status()
    os.unlink(path)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = next(answers)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    answers = iter([b"hello", b'{"schema_version": 99, "data": {}}', b'{"schema_version": 1, "data": {}}'])

    async def run() -> None:
        server = await asyncio.start_unix_server(answer, path)
        client = AdminClient(path)
        with pytest.raises(NotReachableError, match="no JSON object"):
            await asyncio.to_thread(client.status)
        with pytest.raises(AdminError, match="schema version 99"):
            await asyncio.to_thread(client.status)
        with pytest.raises(AdminError, match="not as expected"):
            await asyncio.to_thread(client.status)
        server.close()
        await server.wait_closed()

    asyncio.run(run())
