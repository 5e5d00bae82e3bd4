# SPDX-License-Identifier: Apache-2.0
"""What strangers send: to the attach socket, the host-to-host API, the ports of devices and probers.

A hostile one is cut off at worst.  In every test other clients go on, and the daemon ends with as many descriptors,
clients and bytes as it began with.
"""

import array
import http.client
import json
import os
import random
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from dqplbd.admin.client import AdminClient
from dqplbd.admin.model import Path
from dqplbd.client import Context, DqplbError, Flow, Request, Status
from dqplbd.engine.engine import LAYOUT_VERSION, REPLY_BYTES, REQUEST_BYTES
from dqplbd.lab.cluster import API_PORT, Cluster

MakeCluster = Callable[..., Cluster]
WaitUntil = Callable[[Callable[[], Any], str], Any]
PATIENCE = 30.0
MIB = 1 << 20

REQUEST = struct.Struct("<IHHQQQQ64s")  # struct dq_client_request of native/shim/layout.h
MAGIC = 0x42505144
ATTACH, DEVICES, MEM_ALLOC, MEM_DMABUF, MEM_FREE, MEM_SHARE, HINT = range(1, 8)
QUIET: dict[str, Any] = {"probing": {"interval_s": 5}}


def admin(cluster: Cluster, host_id: str) -> AdminClient:
    return AdminClient(cluster[host_id].admin)


def path_to(cluster: Cluster, host_id: str, peer: str) -> Path:
    return next(path for path in admin(cluster, host_id).paths() if path.peer == peer)


def connect(near: Context, far: Context) -> tuple[Flow, Flow]:
    with far.listen() as listener:
        accepting = listener.accept()
        connecting = near.connect(listener.handle)
        return connecting.wait(PATIENCE), accepting.wait(PATIENCE)


def status_of(request: Request[Any]) -> Status:
    with pytest.raises(DqplbError) as caught:
        request.wait(PATIENCE)
    return caught.value.status


class Bystander:
    """Two clients that move messages between themselves, and check each, in a thread."""

    def __init__(self, cluster: Cluster, near: str, far: str) -> None:
        self._stack = ExitStack()
        self._near = self._stack.enter_context(Context(cluster[near].client_socket, name="bystander"))
        self._far = self._stack.enter_context(Context(cluster[far].client_socket, name="bystander"))
        self._there, self._here = connect(self._near, self._far)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.rounds = 0
        self.error: BaseException | None = None

    def _run(self) -> None:
        own = random.Random(4)
        size = 200_000
        source, target = self._near.allocate(size), self._far.allocate(size)
        try:
            while not self._end.is_set():
                content = own.randbytes(size)
                source.view[:] = content
                receiving, sending = self._here.recv(target), self._there.send(source)
                assert receiving.wait(PATIENCE).bytes == size
                assert sending.wait(PATIENCE) == size
                assert target.view == content
                self.rounds += 1
        except BaseException as error:  # told to the thread that joins
            self.error = error

    def gets_on(self, wait_until: WaitUntil, rounds: int = 1) -> None:
        goal = self.rounds + rounds
        wait_until(lambda: self.rounds >= goal or self.error is not None, "the bystander gets on")
        assert self.error is None, self.error

    def __enter__(self) -> "Bystander":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(PATIENCE)
        self._stack.close()
        assert self.error is None, self.error
        assert self.rounds


def attach(**over: Any) -> bytes:
    return request(ATTACH, 1, 99, 64, os.getpid(), name=b"raw", **over)


def request(kind: int, *args: int, name: bytes = b"", magic: int = MAGIC, version: int = 1) -> bytes:
    return REQUEST.pack(magic, version, kind, *(*args, 0, 0, 0, 0)[:4], name)


@contextmanager
def raw(cluster: Cluster, host_id: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(PATIENCE)
        sock.connect(cluster[host_id].client_socket)
        yield sock


def reply(sock: socket.socket) -> tuple[int, str, tuple[int, ...]] | None:
    """Status, text and numbers of a reply, its descriptors closed; None: the daemon closed the connection."""
    try:
        data, fds, _, _ = socket.recv_fds(sock, 65536, 16)
    except ConnectionResetError:
        return None
    for fd in fds:
        os.close(fd)
    if not data:
        return None
    magic, _version, _kind, status, _reserved, *numbers = struct.unpack_from("<IHHiIQQQQ", data)
    assert magic == MAGIC
    text = data[REPLY_BYTES - 256 : REPLY_BYTES].split(b"\0")[0].decode()
    return status, text, tuple(numbers)


def send_fds(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


def fds_and_clients(cluster: Cluster, host_id: str) -> tuple[int, int, int, int]:
    status = admin(cluster, host_id).status()
    return status.process.open_fds, status.engine.clients, status.engine.flows, status.engine.memory_bytes


def settled(cluster: Cluster, bystander: Bystander, wait_until: WaitUntil) -> tuple[int, int, int, int]:
    """What the daemon holds when the bystander works and nothing else does."""
    bystander.gets_on(wait_until)
    return fds_and_clients(cluster, "a")


# -- the attach socket


def test_the_layout_is_the_one_these_tests_speak() -> None:
    assert REQUEST.size == REQUEST_BYTES
    assert LAYOUT_VERSION == 1


def test_wrong_datagrams_at_the_attach_socket(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a"], QUIET)
    own = random.Random(7)
    good = attach()
    wrong = [
        b"\0",
        good[:-1],
        good + b"\0",
        own.randbytes(60_000),
        request(0),
        request(HINT + 1),
        request(65535),
        request(MEM_ALLOC, 4096),
        request(MEM_SHARE, 0, 0),
        request(HINT, 1, 1),
        request(DEVICES),
        attach(magic=0),
        attach(version=2),
        *(own.randbytes(REQUEST_BYTES) for _ in range(50)),
        *(good[:i] + bytes([good[i] ^ 255]) + good[i + 1 :] for i in range(8)),
    ]
    with Bystander(cluster, "a", "a") as bystander:
        start = settled(cluster, bystander, wait_until)
        for data in wrong:
            with raw(cluster, "a") as sock:
                sock.send(data)
                assert reply(sock) is None, data[:16].hex()
        # What is well formed and cannot be granted is answered, with a reason.
        for data, status, word in (
            (request(ATTACH, 2, 3, 64), Status.VERSION, "version"),
            (request(ATTACH, 0, 0, 64), Status.VERSION, "version"),
            (request(ATTACH, 1, 1, 63), Status.INVALID, "power of two"),
            (request(ATTACH, 1, 1, 1 << 40), Status.INVALID, "power of two"),
            (request(ATTACH, 1, 1, 2**64 - 1), Status.INVALID, "power of two"),
        ):
            with raw(cluster, "a") as sock:
                sock.send(data)
                answer = reply(sock)
                assert answer is not None
                assert answer[0] == status
                assert word in answer[1]
                assert reply(sock) is None
        # After the attach, too.
        for data in [*wrong[:4], request(0), request(HINT + 1), good, request(MEM_DMABUF, 4096)]:
            with raw(cluster, "a") as sock:
                sock.send(good)
                answer = reply(sock)
                assert answer is not None
                assert answer[0] == 0
                sock.send(data)
                assert reply(sock) is None
        for data, status in (
            (request(MEM_ALLOC, 0), Status.INVALID),
            (request(MEM_ALLOC, 2**64 - 1), Status.INVALID),
            (request(MEM_ALLOC, 1 << 45), Status.NOMEM),
            (request(MEM_ALLOC, 4096, 2), Status.INVALID),
            (request(MEM_ALLOC, 4096, 2**64 - 1), Status.INVALID),
            (request(MEM_FREE, 12345), Status.INVALID),
            (request(MEM_FREE, 2**64 - 1), Status.INVALID),
            (request(MEM_SHARE, 12345, 0), Status.PERMISSION),
            (request(MEM_SHARE, 2**64 - 1, 2**64 - 1), Status.PERMISSION),
        ):
            with raw(cluster, "a") as sock:
                sock.send(good)
                assert reply(sock) is not None
                sock.send(data)
                answer = reply(sock)
                assert answer is not None
                assert answer[0] == status, answer
                assert answer[1]
        bystander.gets_on(wait_until)
        wait_until(lambda: fds_and_clients(cluster, "a") == start, f"all is as at the start: {start}")


def test_descriptors_sent_to_the_attach_socket_are_closed(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a"], QUIET)
    with Bystander(cluster, "a", "a") as bystander, tempfile.TemporaryFile() as file:
        start = settled(cluster, bystander, wait_until)
        for count in (1, 2, 16, 17, 200):
            for data in (attach(), b"x", request(MEM_DMABUF, 4096), request(MEM_ALLOC, 4096)):
                for attached in (False, True):
                    with raw(cluster, "a") as sock:
                        if attached:
                            sock.send(attach())
                            assert reply(sock) is not None
                        send_fds(sock, data, [file.fileno()] * count)
                        answer = reply(sock)
                        if attached and count == 1 and data == request(MEM_DMABUF, 4096):
                            assert answer is not None
                            assert answer[0] == Status.INVALID
                            assert "dma-buf" in answer[1]
                        else:
                            assert answer is None
        # A descriptor of the very socket that it comes through keeps it open, if it is not closed.
        one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with one, two, raw(cluster, "a") as sock:
            send_fds(sock, attach(), [sock.fileno(), one.fileno()])
            assert reply(sock) is None
        bystander.gets_on(wait_until)
        wait_until(lambda: fds_and_clients(cluster, "a") == start, f"all is as at the start: {start}")


def test_many_connections_that_say_nothing(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a"], QUIET)
    with Bystander(cluster, "a", "a") as bystander, ExitStack() as stack:
        start = settled(cluster, bystander, wait_until)
        for _ in range(1500):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.connect(cluster["a"].client_socket)
        bystander.gets_on(wait_until)
        # Far fewer are held open than there are, and nobody who works is among those turned away.
        assert admin(cluster, "a").status().process.open_fds < start[0] + 300
        bystander.gets_on(wait_until)

        def attaches() -> bool:
            # The waiting room is full of the silent; they are put out after a while.
            try:
                Context(cluster["a"].client_socket).close()
            except DqplbError:
                return False
            return True

        wait_until(attaches, "who speaks gets in, although the silent are still there")
        stack.close()
        wait_until(lambda: fds_and_clients(cluster, "a") == start, f"all is as at the start: {start}")


def test_clients_that_fetch_no_replies(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a"], QUIET)
    with Bystander(cluster, "a", "a") as bystander:
        start = settled(cluster, bystander, wait_until)
        with raw(cluster, "a") as sock:
            sock.send(attach())
            with suppress(OSError):  # cut off at some point
                while True:
                    sock.send(request(DEVICES))
            bystander.gets_on(wait_until)
        with raw(cluster, "a") as sock:
            sock.send(attach())
            with suppress(OSError):
                for _ in range(10_000):
                    sock.send(request(MEM_ALLOC, 4096))
            bystander.gets_on(wait_until)
        wait_until(lambda: fds_and_clients(cluster, "a") == start, f"all is as at the start: {start}")


# -- what well-behaved clients can overdo


def test_a_client_that_connects_to_thousands_of_hosts_that_are_not_there(
    make_cluster: MakeCluster, wait_until: WaitUntil
) -> None:
    cluster = make_cluster(["a", "b"], {"transport": {"connect_timeout_s": 5}, "peers": {"request_timeout_s": 1}})
    start = fds_and_clients(cluster, "a")
    with Bystander(cluster, "a", "b") as bystander:
        with Context(cluster["a"].client_socket, ring_entries=16384) as many, many.listen() as listener:
            handle = bytearray(listener.handle)
            requests = []
            at = handle.index(b"a\0", 64)
            for i in range(5000):
                name = f"nowhere-{i}".encode()
                handle[at : at + len(name) + 1] = name + b"\0"
                handle[8:16] = struct.pack("<Q", i)  # epoch
                handle[38:40] = struct.pack("<H", 1 + i % 7)  # nobody listens at such a port
                requests.append(many.connect(bytes(handle)))
            bystander.gets_on(wait_until, 3)
            statuses = {status_of(one) for one in requests}
            assert statuses <= {Status.UNREACHABLE, Status.TIMEOUT, Status.LIMIT, Status.PERMISSION, Status.STALE}
            bystander.gets_on(wait_until)
            # And whoever comes now is served.
            with Context(cluster["b"].client_socket) as other:
                connect(many, other)
        bystander.gets_on(wait_until)
        log = cluster["a"].log()
        assert "Traceback" not in log
        assert len(log) < 2 * MIB
    assert admin(cluster, "a").status().engine.events_dropped == 0
    wait_until(lambda: fds_and_clients(cluster, "a")[1:] == start[1:], f"all is as at the start: {start}")


def test_a_client_that_dies_while_nobody_accepts_it(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a", "b"], QUIET)
    with Context(cluster["b"].client_socket) as far, far.listen() as listener:
        connect_and_close(cluster, far)  # the VC exists from now on
        wait_until(lambda: admin(cluster, "a").status().engine.clients == 0, "that client is gone")
        start = [fds_and_clients(cluster, host) for host in ("a", "b")]
        for _ in range(3):
            near = Context(cluster["a"].client_socket)
            for _ in range(5):
                near.connect(listener.handle)
            wait_until(lambda: path_to(cluster, "b", "a").live.flows == 5, "they wait to be accepted")
            near.close()
            wait_until(
                lambda: [fds_and_clients(cluster, host) for host in ("a", "b")] == start,
                f"all is as at the start: {start}",
            )
        # Whoever is alive is accepted, not one of the dead.
        with Context(cluster["a"].client_socket) as near:
            connecting = near.connect(listener.handle)
            here = listener.accept().wait(PATIENCE)
            receiving = here.recv(far.allocate(1))
            connecting.wait(PATIENCE).send(near.allocate(1)).wait(PATIENCE)
            receiving.wait(PATIENCE)


def connect_and_close(cluster: Cluster, far: Context) -> None:
    with Context(cluster["a"].client_socket) as near:
        for flow in connect(near, far):
            flow.close()


# -- the host-to-host API


def post(host: str, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    link = http.client.HTTPConnection(host, API_PORT, timeout=PATIENCE)
    try:
        link.request("POST", path, body, headers or {"Content-Type": "application/json"})
        answer = link.getresponse()
        text = answer.read()
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = {"text": text.decode("utf-8", "replace")}
        return answer.status, parsed
    finally:
        link.close()


def hello(**over: Any) -> dict[str, Any]:
    return {
        "protocol": {"min": 1, "max": 1},
        "host_id": "stranger",
        "epoch": "00000000000000aa",
        "version": "0.1",
        "api_port": API_PORT,
        "devices": [],
    } | over


def test_garbage_at_the_host_to_host_api(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a", "b"])
    address = cluster["a"].address
    device = {"name": "tcp0", "rail": 0, "provider": "tcp", "rate_bps": 10**9, "mtu_bytes": 1500}
    offer = {
        "rail": 0,
        "device": "tcp0",
        "mtu_bytes": 1500,
        "limits": {"qps": 1, "depth": 16, "credits": 16, "segment_bytes": 65536},
        "endpoints": ["00" * 44, "00" * 44],
    }
    with Bystander(cluster, "a", "b") as bystander:
        epoch = admin(cluster, "a").status().epoch
        b_epoch = admin(cluster, "b").status().epoch
        vcs = {
            "protocol": 1,
            "from_host_id": "b",
            "from_epoch": b_epoch,
            "to_epoch": epoch,
            "attempt": "0" * 16,
            "features": ["write-imm-16-1-15", "flows", "puts", "grants"],
            "required": [],
            "vcs": [offer],
        }
        start = admin(cluster, "a").status()
        deep = b"[" * 200_000
        bodies: list[bytes] = [
            b"",
            b"{",
            b"null",
            b"[]",
            b"42",
            b"\xff\xfe\x00",
            deep,
            b'{"a":' * 100_000,
            b"9" * 500_000,
            b'{"protocol": 1e999}',
            b'{"protocol": NaN}',
        ]
        for path in ("/v1/hello", "/v1/vcs"):
            for body in bodies:
                code, answer = post(address, path, body)
                assert code == 400, (path, body[:20], code, answer)
                assert answer["code"] == "malformed"
                assert len(answer["error"]) < 2048
        changes: tuple[dict[str, Any], ...] = (
            {"protocol": {"min": 2, "max": 3}},
            {"protocol": {"min": 3, "max": 2}},
            {"protocol": 1},
            {"host_id": ""},
            {"host_id": "x" * 64},
            {"host_id": "a b"},
            {"host_id": 7},
            {"host_id": None},
            {"epoch": "0"},
            {"epoch": -1},
            {"epoch": "g" * 16},
            {"api_port": -1},
            {"api_port": 0},
            {"api_port": 65536},
            {"api_port": 1e300},
            {"api_port": "7471"},
            {"devices": [device] * 9},
            {"devices": [device | {"rail": -1}]},
            {"devices": [device | {"rail": 2**70}]},
            {"devices": [device | {"rate_bps": -(2**63)}]},
            {"devices": [device | {"rate_bps": 2**64}]},
            {"devices": [device | {"mtu_bytes": 0}]},
            {"devices": [device | {"probe_endpoint": "zz"}]},
            {"devices": [device | {"probe_endpoint": "00" * 97}]},
            {"devices": [device | {"name": "../../etc"}]},
            {"location": {"rack": "x" * 100_000}},
            {"location": {"rack": "\x00\x1b[31m\n"}},
            {"location": []},
        )
        for change in changes:
            code, answer = post(address, "/v1/hello", json.dumps(hello() | change).encode())
            assert code in (400, 409), (change, code, answer)
            assert "code" in answer, (change, code, answer)
        for change in (
            {"protocol": 2},
            {"protocol": -1},
            {"from_host_id": "nobody"},
            {"from_host_id": "a"},
            {"from_epoch": "0" * 16},
            {"to_epoch": "0" * 16},
            {"features": []},
            {"required": ["teleportation"]},
            {"features": ["f"] * 65},
            {"vcs": []},
            {"vcs": [offer] * 9},
            {"vcs": [offer | {"rail": 9}]},
            {"vcs": [offer | {"existing": -1}]},
            {"vcs": [offer | {"limits": {}}]},
            {"vcs": [offer | {"limits": offer["limits"] | {"qps": 129}}]},  # type: ignore[operator]
            {"vcs": [offer | {"limits": offer["limits"] | {"depth": -5}}]},  # type: ignore[operator]
            {"vcs": [offer | {"limits": offer["limits"] | {"segment_bytes": 2**40}}]},  # type: ignore[operator]
            {"vcs": [offer | {"endpoints": []}]},
            {"vcs": [offer | {"endpoints": ["00" * 44] * 200}]},
        ):
            code, answer = post(address, "/v1/vcs", json.dumps(vcs | change).encode())
            assert code >= 400, (change, code, answer)
            assert "code" in answer, (change, code, answer)
        # Well formed as a whole, wrong in one rail: the answer says so for that rail.
        for change in (
            {"endpoints": ["00" * 44, "00" * 44]},
            {"endpoints": ["ff" * 96, "ff" * 96]},
            {"endpoints": ["00", "00"]},
            {"rail": 7},
            {"limits": offer["limits"] | {"credits": 1}},  # type: ignore[operator]
            {"limits": offer["limits"] | {"segment_bytes": 128}},  # type: ignore[operator]
            {"limits": offer["limits"] | {"depth": 1}},  # type: ignore[operator]
            {"limits": offer["limits"] | {"qps": 9}},  # type: ignore[operator]
        ):
            code, answer = post(address, "/v1/vcs", json.dumps(vcs | {"vcs": [offer | change]}).encode())
            assert code in (200, 400, 409), (change, code, answer)
            assert code != 200 or len(answer["vcs"]) == 1
        assert post(address, "/v1/hello", b"x" * (600 * 1024))[0] in (400, 413)
        assert post(address, "/v2/hello", b"{}")[0] == 404
        bystander.gets_on(wait_until)
        log = cluster["a"].log()
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:3000]
        assert "\x1b" not in log

        def calm() -> bool:
            now = admin(cluster, "a").status()
            return now.engine.vcs == start.engine.vcs and now.process.open_fds <= start.process.open_fds + 2

        wait_until(calm, f"VCs that nobody dials are given up, and descriptors come back: {start.process.open_fds}")
    assert admin(cluster, "a").status().state in ("ready", "degraded")


def test_hosts_that_lie_about_their_name(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a", "b"])
    address = cluster["a"].address
    with Bystander(cluster, "a", "b") as bystander:
        before = next(peer for peer in admin(cluster, "a").peers() if peer.host_id == "b")
        # Another host with the name of a live peer, and with this host's own name: refused, the peer stays.
        for name in ("a", "b"):
            code, answer = post(address, "/v1/hello", json.dumps(hello(host_id=name, api_port=9)).encode())
            assert (code, answer["code"]) == (409, "conflict"), answer
            assert name in answer["error"]
        bystander.gets_on(wait_until)
        after = next(peer for peer in admin(cluster, "a").peers() if peer.host_id == "b")
        assert (after.epoch, after.address, after.state) == (before.epoch, before.address, "up")
        # Many new names: taken up to a limit, the memory of the daemon is bounded, and nobody is put out for them.
        for i in range(300):
            code, answer = post(address, "/v1/hello", json.dumps(hello(host_id=f"s{i}", api_port=10_000 + i)).encode())
            assert code in (200, 409, 429), answer
        bystander.gets_on(wait_until)
        after = next(peer for peer in admin(cluster, "a").peers() if peer.host_id == "b")
        assert (after.epoch, after.address, after.state) == (before.epoch, before.address, "up")


def test_slow_and_many_connections_at_the_host_to_host_api(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a", "b"])
    address = cluster["a"].address
    with Bystander(cluster, "a", "b") as bystander, ExitStack() as stack:
        start = admin(cluster, "a").status().process.open_fds
        slow = []
        for i in range(200):
            sock = stack.enter_context(socket.create_connection((address, API_PORT), timeout=PATIENCE))
            head = b"POST /v1/hello HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
            sock.send(head[: 10 + i % len(head)] if i % 2 else head + b"\r\n{")
            slow.append(sock)
        # Others are served meanwhile, and those whose body does not come are told so.
        bystander.gets_on(wait_until)
        assert post(address, "/v1/hello", b"{}")[0] in (400, 429)
        assert b" 400 " in slow[0].recv(65536).split(b"\r\n")[0]
        # Headers of megabytes, and things that are no HTTP.
        for garbage in (b"\0" * 100_000, b"GET / HTTP/1.1\r\n" + b"A: " + b"b" * 2_000_000, b"\x16\x03\x01" * 10_000):
            with socket.create_connection((address, API_PORT), timeout=PATIENCE) as sock, suppress(OSError):
                sock.sendall(garbage)
                while sock.recv(65536):
                    pass
        # More connections than it holds open: turned away, and it goes on.
        for _ in range(1200):
            sock = stack.enter_context(socket.socket())
            sock.settimeout(PATIENCE)
            sock.connect((address, API_PORT))
        bystander.gets_on(wait_until)
        assert admin(cluster, "a").status().process.open_fds < start + 1100
        stack.close()
        wait_until(lambda: admin(cluster, "a").status().process.open_fds <= start + 2, "descriptors come back")
        assert post(address, "/v1/hello", b"{}")[0] == 400
        assert "Traceback" not in cluster["a"].log()


# -- devices and probers


def ports_of(pid: int, table: str) -> list[tuple[str, int]]:
    """Local addresses of the sockets of a process: of ``tcp`` those that listen, of ``udp`` all."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            link = os.readlink(f"/proc/{pid}/fd/{fd}")
            if link.startswith("socket:["):
                inodes.add(link[8:-1])
    found = []
    with open(f"/proc/{pid}/net/{table}") as lines:
        next(lines)
        for line in lines:
            words = line.split()
            address, port = words[1].split(":")
            if words[9] in inodes and (table == "udp" or words[3] == "0A"):
                found.append((socket.inet_ntoa(struct.pack("=I", int(address, 16))), int(port, 16)))
    return found


def test_garbage_at_the_port_of_a_device(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a", "b"], QUIET)
    address, port = admin(cluster, "a").devices()[0].address.rsplit(":", 1)  # type: ignore[union-attr]
    at = (address, int(port))
    assert at in ports_of(cluster["a"].pid, "tcp")
    own = random.Random(8)
    hello_frame = b"DQPLBTCP" + struct.pack("<HHI", 1, 0, 0) + bytes(16) + struct.pack("<I", 0) + bytes(16) + bytes(12)
    assert len(hello_frame) == 64
    with Bystander(cluster, "a", "b") as bystander:
        start = admin(cluster, "a").status()
        for data in (
            b"",
            b"\0" * 64,
            own.randbytes(64),
            own.randbytes(100_000),
            hello_frame,
            hello_frame * 1000,
            hello_frame[:8] + b"\xff" * 56,
            hello_frame[:8] + struct.pack("<H", 9) + hello_frame[10:],
            *(hello_frame[:12] + struct.pack("<I", i) + own.randbytes(16) + hello_frame[32:] for i in range(64)),
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        ):
            with socket.create_connection(at, timeout=PATIENCE) as sock, suppress(OSError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass
        bystander.gets_on(wait_until)
        with ExitStack() as stack:
            for i in range(1000):
                sock = stack.enter_context(socket.socket())
                sock.settimeout(PATIENCE)
                sock.connect(at)
                if i % 2:
                    sock.send(hello_frame[: i % 64])
            bystander.gets_on(wait_until)
            # New QPs are made meanwhile.
            with Context(cluster["a"].client_socket) as near, Context(cluster["a"].client_socket) as far:
                connect(near, far)
        fds = start.process.open_fds
        wait_until(lambda: admin(cluster, "a").status().process.open_fds <= fds + 40, "descriptors come back")
    for one, other in (("a", "b"), ("b", "a")):
        live = path_to(cluster, one, other).live
        assert (live.failures, live.duplicates) == (0, 0)


def test_garbage_at_the_port_of_a_prober(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a", "b"])
    wait_until(
        lambda: [p for p in admin(cluster, "a").paths() if p.peer == "b" and p.estimate.windows], "b is measured"
    )
    ports = ports_of(cluster["a"].pid, "udp")
    assert ports
    own = random.Random(9)
    rss = admin(cluster, "a").status().process.rss_bytes
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for address, port in ports:
            for i in range(20_000):
                kind = i % 4
                data = own.randbytes((0, 1, 16, 32, 48, 1400)[i % 6])
                if kind == 1:  # the device's header, random inside
                    data = struct.pack("<IHHQ", 0x44515550, 1, 32, 0) + own.randbytes(32)
                elif kind == 2:  # a probe with a wrong token
                    packet = struct.pack("<IBBHQQq", 0x42505144, 1, 1 + i % 3, 0, own.getrandbits(64), 1, 0)
                    data = struct.pack("<IHHQ", 0x44515550, 1, 32, 0) + packet
                with suppress(OSError):
                    sock.sendto(data, (address, port))
    device = admin(cluster, "a").devices()[0]
    assert device.prober is not None
    assert device.prober.refused_token + device.prober.malformed + device.prober.refused_unknown > 0
    before = path_to(cluster, "a", "b").estimate.probes_ok
    wait_until(lambda: path_to(cluster, "a", "b").estimate.probes_ok > before + 10, "probing goes on")
    assert admin(cluster, "a").status().process.rss_bytes < rss + 8 * MIB
    with Bystander(cluster, "a", "b") as bystander:
        bystander.gets_on(wait_until)


def test_a_hundred_attaches_leave_nothing(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a"], QUIET)
    socket_ = cluster["a"].client_socket

    def turn() -> None:
        with Context(socket_) as one, Context(socket_) as two:
            there, here = connect(one, two)
            receiving = here.recv(two.register(bytearray(100_000)))
            there.send(one.allocate(100_000)).wait(PATIENCE)
            receiving.wait(PATIENCE)

    for _ in range(20):
        turn()
    wait_until(lambda: admin(cluster, "a").status().engine.clients == 0, "all are gone")
    start = admin(cluster, "a").status().process
    for _ in range(100):
        turn()
    wait_until(lambda: admin(cluster, "a").status().engine.clients == 0, "all are gone")
    now = admin(cluster, "a").status().process
    assert now.open_fds == start.open_fds
    # An engine that kept 40 KiB a client would show here. (The address sanitizer keeps what was freed.)
    if "libasan" not in os.environ.get("LD_PRELOAD", ""):
        assert now.rss_bytes < start.rss_bytes + 4 * MIB
