# SPDX-License-Identifier: Apache-2.0
"""Programs on the shim, from memory to memory through real daemons."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dqplbd.client import Context, DqplbError, Flow, Memory, Notification, Received, Request, Status
from dqplbd.lab.cluster import Cluster

MakeCluster = Callable[..., Cluster]

# Probing would only get in the way of a shared machine.
QUICK: dict[str, Any] = {"clients": {"drain_s": 1}}

ROOT = Path(__file__).resolve().parents[2]
#: Seconds; far more than anything here takes, so that a hang is a failure and a slow machine is not.
PATIENCE = 30.0


def connect(near: Context, far: Context) -> tuple[Flow, Flow]:
    with far.listen() as listener:
        accepting = listener.accept()
        connecting = near.connect(listener.handle)
        return connecting.wait(PATIENCE), accepting.wait(PATIENCE)


def status_of(request: Request[Any]) -> Status:
    with pytest.raises(DqplbError) as caught:
        request.wait(PATIENCE)
    return caught.value.status


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """For tests that leave the daemons as they were."""
    with Cluster(["a", "b"], QUICK) as one:
        yield one


@pytest.fixture
def mortal(make_cluster: MakeCluster) -> Cluster:
    """For tests that kill."""
    return make_cluster(["a", "b"])


@pytest.fixture
def pair(cluster: Cluster) -> Iterator[tuple[Context, Context]]:
    with (
        Context(cluster["a"].client_socket, name="near") as near,
        Context(cluster["b"].client_socket, name="far") as far,
    ):
        yield near, far


def memory_of(context: Context, kind: str, size: int) -> Memory:
    return context.allocate(size) if kind == "shared" else context.register(bytearray(size))


@pytest.mark.parametrize("receiver", ["shared", "staged"])
@pytest.mark.parametrize("sender", ["shared", "staged"])
def test_messages_arrive_whole(pair: tuple[Context, Context], sender: str, receiver: str) -> None:
    near, far = pair
    there, here = connect(near, far)
    most = 3_000_017
    source, target = memory_of(near, sender, most), memory_of(far, receiver, most + 100)
    content = random.Random(1).randbytes(most)
    for number, size in enumerate([0, 1, 64, 4095, 65_536, 65_537, 1_000_000, most]):
        source.view[:size] = content[most - size :]
        target.view[:] = bytes(len(target))
        receiving = here.recv(target, 50, size + 50, tag=number)  # larger than the message
        sending = there.send(source, 0, size, tag=number)
        assert receiving.wait(PATIENCE) == Received(bytes=size, tag=number)
        assert sending.wait(PATIENCE) == size
        assert target.view[50 : 50 + size] == content[most - size :]
        assert not any(target.view[:50])
        assert not any(target.view[50 + size :][:50])


def test_clients_of_one_daemon(cluster: Cluster) -> None:
    with Context(cluster["a"].client_socket) as one, Context(cluster["a"].client_socket) as two:
        there, here = connect(one, two)
        source, target = one.allocate(100_000), two.allocate(100_000)
        source.view[:] = random.Random(2).randbytes(100_000)
        receiving, sending = here.recv(target), there.send(source)
        assert receiving.wait(PATIENCE).bytes == sending.wait(PATIENCE) == 100_000
        assert source.view == target.view


def test_a_client_with_itself(cluster: Cluster) -> None:
    # What a collective library does to see whether a transport works.
    with Context(cluster["a"].client_socket) as context:
        there, here = connect(context, context)
        memory = context.register(bytearray(b"abc" + bytes(3)))
        receiving, sending = here.recv(memory, 3, 3), there.send(memory, 0, 3)
        receiving.wait(PATIENCE)
        sending.wait(PATIENCE)
        assert bytes(memory.view) == b"abcabc"


def test_tags_choose_the_receive(pair: tuple[Context, Context]) -> None:
    near, far = pair
    there, here = connect(near, far)
    source, target = near.allocate(3), far.allocate(3)
    source.view[:] = b"xyz"
    receiving = [here.recv(target, i, 1, tag=i) for i in range(3)]
    for i in (2, 0, 1):
        there.send(source, i, 1, tag=i).wait(PATIENCE)
    assert [request.wait(PATIENCE).tag for request in receiving] == [0, 1, 2]
    assert bytes(target.view) == b"xyz"


def test_a_message_longer_than_its_receive_fails_both(pair: tuple[Context, Context]) -> None:
    near, far = pair
    there, here = connect(near, far)
    receiving, sending = here.recv(far.allocate(10)), there.send(near.allocate(11))
    assert status_of(receiving) is Status.TOO_LONG
    assert status_of(sending) is Status.TOO_LONG


def test_export_put_notify(pair: tuple[Context, Context]) -> None:
    near, far = pair
    there, here = connect(near, far)
    target, source = far.allocate(1 << 20), near.register(random.Random(3).randbytes(300_000))
    region = here.export(target, 4096, 500_000).wait(PATIENCE)
    notifying = [here.notify() for _ in range(2)]
    assert there.put(region, 128, source, 7, 200_001, cookie=2**64 - 1).wait(PATIENCE) == 200_001
    assert notifying[0].wait(PATIENCE) == Notification(region=region, offset=128, bytes=200_001, cookie=2**64 - 1)
    assert target.view[4096 + 128 :][:200_001] == source.view[7:200_008]
    assert status_of(there.put(region, 499_999, source, 0, 2)) is Status.REGION
    here.unexport(region).wait(PATIENCE)
    assert status_of(there.put(region, 0, source, 0, 1)) is Status.REGION
    assert not notifying[1].test()
    with pytest.raises(DqplbError, match="dqplb_mem_alloc") as caught:
        there.export(source)
    assert caught.value.status is Status.INVALID


def test_closing_tells_the_peer(pair: tuple[Context, Context]) -> None:
    near, far = pair
    there, here = connect(near, far)
    mine, theirs = there.recv(near.allocate(1)), here.recv(far.allocate(1))
    there.close()
    assert status_of(mine) is Status.CANCELED
    assert status_of(theirs) is Status.CLOSED
    with pytest.raises(DqplbError, match="closed"):
        there.notify()


def test_freeing_memory_cancels(pair: tuple[Context, Context]) -> None:
    near, far = pair
    there, here = connect(near, far)
    for memory in (far.allocate(1 << 20), far.register(bytearray(1 << 20))):
        receiving = here.recv(memory, tag=1)
        memory.free()
        assert status_of(receiving) is Status.CANCELED
        with pytest.raises(DqplbError, match="freed"):
            memory.view  # noqa: B018
    # The flow is as good as before.
    target = far.allocate(1)
    receiving = here.recv(target, tag=2)
    there.send(near.allocate(1), tag=2).wait(PATIENCE)
    assert receiving.wait(PATIENCE).bytes == 1


def test_nobody_listens(pair: tuple[Context, Context]) -> None:
    near, far = pair
    listener = far.listen()
    handle = listener.handle
    listener.close()
    assert status_of(near.connect(handle)) is Status.REFUSED
    with pytest.raises(DqplbError, match="128"):
        near.connect(handle[:-1])


def test_the_daemon_is_killed(mortal: Cluster) -> None:
    near, far = Context(mortal["a"].client_socket), Context(mortal["b"].client_socket)
    there, here = connect(near, far)
    shared, staged = near.allocate(10), near.register(bytearray(10))
    pending = [there.recv(shared, tag=1), there.recv(staged, tag=2)]
    theirs = here.recv(far.allocate(10), tag=1)
    outcome: list[Status] = []
    waiter = threading.Thread(target=lambda: outcome.append(status_of(pending[0])))
    waiter.start()
    mortal["a"].kill()
    waiter.join(PATIENCE)
    assert outcome == [Status.DAEMON]
    assert status_of(pending[1]) is Status.DAEMON
    for call in (there.notify, lambda: near.allocate(1), lambda: near.wait_any(0), lambda: near.devices):
        with pytest.raises(DqplbError) as caught:
            call()
        assert caught.value.status is Status.DAEMON
        assert mortal["a"].client_socket in caught.value.text
    assert status_of(theirs) in (Status.UNREACHABLE, Status.PEER_GONE)
    there.close()  # nothing left to close is no error
    near.close()
    far.close()


def test_a_handle_outlives_no_daemon(mortal: Cluster) -> None:
    with Context(mortal["a"].client_socket) as near:
        with Context(mortal["b"].client_socket) as far:
            handle = far.listen().handle
            mortal["b"].kill()
            mortal["b"].wait_exit()
        mortal["b"].launch()
        mortal["b"].wait_state("READY=1")
        assert status_of(near.connect(handle)) is Status.STALE
        with Context(mortal["b"].client_socket) as again:
            connect(near, again)


PEER = """
import sys
from dqplbd.client import Context
context = Context(sys.argv[1])
flow = context.connect(bytes.fromhex(sys.stdin.readline())).wait()
memory = context.allocate(1 << 20)
receiving = flow.recv(memory, tag=1)
flow.send(memory, 0, 1, tag=2).wait()
print("ready", flush=True)
receiving.wait()
"""


def test_the_other_client_is_killed(cluster: Cluster) -> None:
    with Context(cluster["b"].client_socket) as far, far.listen() as listener:
        accepting = listener.accept()
        with subprocess.Popen(
            [sys.executable, "-P", "-c", PEER, cluster["a"].client_socket],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as peer:
            assert peer.stdin is not None
            assert peer.stdout is not None
            peer.stdin.write(listener.handle.hex() + "\n")
            peer.stdin.flush()
            flow = accepting.wait(PATIENCE)
            memory = far.allocate(1)
            flow.recv(memory, tag=2).wait(PATIENCE)
            assert peer.stdout.readline() == "ready\n"
            pending = flow.recv(memory, tag=3)
            peer.kill()
            assert status_of(pending) is Status.PEER_GONE
            assert status_of(flow.send(memory, tag=1)) is Status.PEER_GONE


def test_fork(cluster: Cluster, pair: tuple[Context, Context]) -> None:
    near, far = pair
    there, here = connect(near, far)
    source, target = near.allocate(4), far.allocate(4)
    receiving = here.recv(target)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for call in (receiving.test, lambda: there.send(source), lambda: near.devices):
                with pytest.raises(DqplbError) as caught:
                    call()
                assert caught.value.status is Status.FORKED
            with Context(cluster["a"].client_socket) as own:
                own.allocate(1)
            code = 0
        finally:
            os._exit(code)
    _, result = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(result) == 0
    there.send(source).wait(PATIENCE)
    assert receiving.wait(PATIENCE).bytes == 4


def test_threads_share_a_context(pair: tuple[Context, Context]) -> None:
    near, far = pair
    flows = [connect(near, far) for _ in range(4)]
    problems: list[object] = []

    def work(number: int, there: Flow, here: Flow) -> None:
        try:
            own = random.Random(number)
            source, target = near.register(bytearray(150_000)), far.allocate(150_000)
            for i in range(40):
                size = own.randrange(150_000)
                content = own.randbytes(size)
                source.view[:size] = content
                receiving, sending = here.recv(target, tag=i), there.send(source, 0, size, tag=i)
                assert receiving.wait(PATIENCE) == Received(bytes=size, tag=i)
                assert sending.wait(PATIENCE) == size
                assert target.view[:size] == content
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(i, *flow)) for i, flow in enumerate(flows)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


# -- the manners of the Python client


def test_open_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(DqplbError, match="systemctl start dqplbd") as caught:
        Context(tmp_path / "client.sock")
    assert caught.value.status is Status.DAEMON
    assert str(tmp_path) in caught.value.text
    with pytest.raises(DqplbError, match="absolute"):
        Context("client.sock")
    with pytest.raises(DqplbError, match="ring_entries"):
        Context(tmp_path / "client.sock", ring_entries=100)
    with pytest.raises(DqplbError, match="spin_us"):
        Context(tmp_path / "client.sock", spin_us=-1)


def test_devices(pair: tuple[Context, Context]) -> None:
    (device,) = pair[0].devices
    assert (device.index, device.name, device.provider, device.up) == (0, "tcp0", "tcp", True)
    assert device.speed_bps > 0


def test_views_keep_shared_memory(cluster: Cluster) -> None:
    context = Context(cluster["a"].client_socket)
    memory = context.allocate(8192)
    view = memory.view
    view[:5] = b"hello"
    with pytest.raises(BufferError, match="views"):
        memory.free()
    slice_of_it = view[3:5]
    view.release()
    context.close()
    assert bytes(slice_of_it) == b"lo"  # would be a fault if the pages were gone
    del slice_of_it
    with pytest.raises(DqplbError, match="freed"):
        memory.view  # noqa: B018
    memory.free()  # nothing left to do
    with pytest.raises(DqplbError, match="closed"):
        context.allocate(1)
    context.close()


def test_read_only_memory_can_be_sent_only(pair: tuple[Context, Context]) -> None:
    near, far = pair
    there, here = connect(near, far)
    source, target = near.register(b"immutable"), far.allocate(9)
    with pytest.raises(DqplbError, match="read-only"):
        there.recv(source)
    with pytest.raises(TypeError):
        source.view[0] = 1
    receiving = here.recv(target)
    there.send(source).wait(PATIENCE)
    receiving.wait(PATIENCE)
    assert bytes(target.view) == b"immutable"
    with pytest.raises(DqplbError, match="empty"):
        near.register(b"")
    with pytest.raises(TypeError):
        near.register("text")
    with pytest.raises(DqplbError, match="outside"):
        there.send(source, 5, 5)
    with pytest.raises(DqplbError, match="outside"):
        there.send(source, -1, 5)


def test_requests_that_nobody_waits_for(cluster: Cluster) -> None:
    with (
        Context(cluster["a"].client_socket, ring_entries=64) as near,
        Context(cluster["b"].client_socket, ring_entries=64) as far,
    ):
        there, here = connect(near, far)
        source, target = near.allocate(8), far.allocate(8)
        for _ in range(500):  # many times the ring: the client takes their results when it needs the room
            here.recv(target)
            there.send(source)
        receiving, sending = here.recv(target, tag=1), there.send(source, tag=1)
        assert receiving.wait(PATIENCE).tag == 1
        sending.wait(PATIENCE)


def test_no_room_without_blocking(cluster: Cluster) -> None:
    with (
        Context(cluster["a"].client_socket, ring_entries=64) as near,
        Context(cluster["b"].client_socket) as far,
    ):
        there, _here = connect(near, far)
        memory = near.allocate(8)
        for tag in range(48):  # 16 of the 64 are kept for closing
            there.recv(memory, tag=tag, block=False)
        with pytest.raises(DqplbError, match="ring_entries") as caught:
            there.recv(memory, tag=48, block=False)
        assert caught.value.status is Status.AGAIN


def test_waiting_ends_in_time(pair: tuple[Context, Context]) -> None:
    near, far = pair
    there, here = connect(near, far)
    receiving = here.recv(far.allocate(1))
    assert not receiving.test()
    for timeout in (0, 0.01, 0.15):
        with pytest.raises(TimeoutError):
            receiving.wait(timeout)
    while far.wait_any(0):
        pass
    assert not far.wait_any(0.01)
    assert not receiving.done
    there.send(near.allocate(1)).wait(PATIENCE)
    assert receiving.wait(PATIENCE) == receiving.wait() == Received(bytes=1, tag=0)
    assert far.wait_any(PATIENCE)


class Interrupted(Exception):
    """Raised by a signal handler."""


def test_waiting_heeds_signals(pair: tuple[Context, Context]) -> None:
    near, far = pair
    _there, here = connect(near, far)

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            here.recv(far.allocate(1)).wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_closing_the_context_ends_its_requests(cluster: Cluster) -> None:
    with Context(cluster["b"].client_socket) as far:
        near = Context(cluster["a"].client_socket)
        there, here = connect(near, far)
        mine, theirs = there.recv(near.allocate(1)), here.recv(far.allocate(1))
        near.close()
        assert status_of(mine) is Status.CANCELED
        assert status_of(theirs) is Status.CLOSED
        there.close()


# -- the complete program of docs/shim-api.md


def pkg_config(*arguments: str) -> list[str]:
    places = [str(Path(sys.prefix) / "lib/pkgconfig"), os.environ.get("PKG_CONFIG_PATH", "")]
    environment = os.environ | {"PKG_CONFIG_PATH": ":".join(filter(None, places))}
    done = subprocess.run(["pkg-config", *arguments, "dqplb"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("far", ["a", "b"], ids=["one host", "two hosts"])
def test_the_complete_program(cluster: Cluster, tmp_path: Path, far: str) -> None:
    program, handle = tmp_path / "pingpong", tmp_path / "handle"
    (libdir,) = pkg_config("--variable=libdir")
    flags = [*pkg_config("--cflags", "--libs"), f"-Wl,-rpath,{libdir}"]
    source = ROOT / "docs" / "examples" / "pingpong.c"
    done = subprocess.run(
        ["gcc", "-Wall", "-Wextra", "-Werror", str(source), "-o", str(program), *flags],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr

    def start(role: str, host: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(program), role, str(handle)],
            env=os.environ | {"DQPLB_SOCKET": cluster[host].client_socket},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    with start("listen", far) as listener, start("connect", "a") as connector:
        try:
            near_said, _ = connector.communicate(timeout=60)
            far_said, _ = listener.communicate(timeout=60)
        finally:
            connector.kill()
            listener.kill()
    assert (connector.returncode, listener.returncode) == (0, 0), near_said + far_said
    assert "there and back" in near_said
    assert "a put of 1000 bytes" in far_said
    assert not handle.exists()


def test_an_idle_client_uses_no_cpu(pair: tuple[Context, Context]) -> None:
    near, far = pair
    there, here = connect(near, far)
    receiving = here.recv(far.allocate(1))
    before, start = time.thread_time(), time.monotonic()
    with pytest.raises(TimeoutError):
        receiving.wait(1.0)
    # Of this thread, against the time it really took: a spinning wait would use nearly all of it.
    assert time.thread_time() - before < 0.3 * (time.monotonic() - start)
    there.send(near.allocate(1)).wait(PATIENCE)
    receiving.wait(PATIENCE)
