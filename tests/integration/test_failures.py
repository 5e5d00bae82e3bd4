# SPDX-License-Identifier: Apache-2.0
"""Clients and daemons that end, freeze and come back: who notices, how soon, and that nobody else does."""

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from dqplbd.admin.client import AdminClient
from dqplbd.admin.model import Path
from dqplbd.client import Context, DqplbError, Flow, Request, Status
from dqplbd.lab.cluster import Cluster

MakeCluster = Callable[..., Cluster]
WaitUntil = Callable[[Callable[[], Any], str], Any]

#: Seconds: far more than anything here takes, so that a hang is a failure and a slow machine is not.
PATIENCE = 30.0
#: Seconds: what is promised for an end that the kernel tells of.
PROMISED = 1.0
MIB = 1 << 20


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


def holdings(cluster: Cluster) -> dict[str, Any]:
    """What clients hold of the daemons: all of it must come back when they go."""
    held: dict[str, Any] = {}
    for host in cluster:
        view = AdminClient(host.admin)
        status = view.status()
        engine = status.engine
        held[host.host_id] = {
            "clients": engine.clients,
            "flows": engine.flows,
            "vcs": engine.vcs,
            "memory_bytes": engine.memory_bytes,
            "staging_bytes": engine.staging_bytes,
            "open_fds": status.process.open_fds,
            "regions": [device.memory_regions for device in view.devices()],
            "qps": [device.qps for device in view.devices()],
            "paths": sorted(
                (
                    path.peer,
                    path.live.state,
                    path.live.flows,
                    path.live.slots_receive,
                    path.live.slots_put,
                    path.live.receives_waiting,
                    path.live.backlog_bytes,
                    path.live.inflight_bytes,
                    path.live.failures,
                    path.live.vcs,
                )
                for path in view.paths()
            ),
        }
    return held


# A client in a process of its own.  It connects to the handle on its standard input, and sends or receives until it is
# killed; "ready" says that the first message is through.
CLIENT = """
import sys
from dqplbd.client import Context
socket, role, kind, size, deep = *sys.argv[1:4], *map(int, sys.argv[4:])
context = Context(socket, name="victim")
flow = context.connect(bytes.fromhex(sys.stdin.readline())).wait()
make = context.allocate if kind == "shared" else lambda n: context.register(bytearray(n))
memories = [make(size) for _ in range(deep)]
begin = flow.recv if role == "receive" else flow.send
requests = [begin(memory) for memory in memories]
first = True
while True:
    for i, memory in enumerate(memories):
        requests[i].wait()
        requests[i] = begin(memory)
        if first:
            print("ready", flush=True)
            first = False
"""


@contextmanager
def client(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A client in a process of its own; killed at the end, if it is still there."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == line + "\n"


class Bystander(threading.Thread):
    """Moves messages between two clients, and checks each, until it is told to stop."""

    def __init__(self, near: Context, far: Context, size: int = MIB) -> None:
        super().__init__(daemon=True)
        self._there, self._here = connect(near, far)
        self._source, self._target = near.allocate(size), far.allocate(size)
        self._end = threading.Event()
        self.rounds = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        own = random.Random(4)
        size = len(self._source)
        try:
            while not self._end.is_set():
                content = own.randbytes(size)
                self._source.view[:] = content
                receiving, sending = self._here.recv(self._target), self._there.send(self._source)
                assert receiving.wait(PATIENCE).bytes == size
                assert sending.wait(PATIENCE) == size
                assert self._target.view == content
                self.rounds += 1
        except BaseException as error:  # told to the thread that joins
            self.error = error

    def gets_on(self, wait_until: WaitUntil, rounds: int = 1) -> None:
        """Wait until it has moved more."""
        goal = self.rounds + rounds
        wait_until(lambda: self.rounds >= goal or self.error is not None, "the bystander gets on")
        assert self.error is None, self.error

    def __enter__(self) -> "Bystander":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join(PATIENCE)
        assert self.error is None, self.error
        assert not self.is_alive()
        self._there.close()
        self._here.close()
        self._source.free()
        self._target.free()


# -- clients


@pytest.mark.parametrize("kind", ["shared", "staged"])
@pytest.mark.parametrize("role", ["receive", "send"])
def test_a_client_killed_in_the_middle(make_cluster: MakeCluster, wait_until: WaitUntil, role: str, kind: str) -> None:
    cluster = make_cluster(["a", "b"])
    size, deep = 16 * MIB, 4
    with (
        Context(cluster["a"].client_socket, name="near") as near,
        Context(cluster["b"].client_socket, name="far") as far,
        Context(cluster["b"].client_socket, name="peer") as context,
        Bystander(near, far) as bystander,
    ):
        memories = [context.allocate(size) for _ in range(deep)]
        start = holdings_without_traffic(cluster)
        for _ in range(3):
            with (
                context.listen() as listener,
                client(CLIENT, cluster["a"].client_socket, role, kind, size, deep) as victim,
            ):
                accepting = listener.accept()
                tell(victim, listener.handle.hex())
                flow = accepting.wait(PATIENCE)
                begin = flow.send if role == "receive" else flow.recv
                requests = [begin(memory) for memory in memories]
                ended = threading.Event()
                seen: list[tuple[float, Status]] = []

                def pump(
                    requests: list[Request[Any]] = requests,
                    begin: Callable[..., Request[Any]] = begin,
                    seen: list[tuple[float, Status]] = seen,
                    ended: threading.Event = ended,
                ) -> None:
                    try:
                        while True:
                            for i, memory in enumerate(memories):
                                requests[i].wait(PATIENCE)
                                requests[i] = begin(memory)
                    except DqplbError as error:
                        seen.append((time.monotonic(), error.status))
                    ended.set()

                pumping = threading.Thread(target=pump, daemon=True)
                pumping.start()
                hear(victim, "ready")
                bystander.gets_on(wait_until)
                killed = time.monotonic()
                victim.kill()
                assert ended.wait(PATIENCE)
                assert seen[0][1] is Status.PEER_GONE
                assert seen[0][0] - killed < PROMISED
                pumping.join(PATIENCE)
                for request in requests:  # the others, too
                    if not request.done:
                        assert status_of(request) is Status.PEER_GONE
                with pytest.raises(DqplbError) as caught:
                    begin(memories[0]).wait(PATIENCE)
                assert caught.value.status is Status.PEER_GONE
                flow.close()
            wait_until(lambda: holdings_without_traffic(cluster) == start, f"all is as at the start: {start}")
            bystander.gets_on(wait_until)
    for one, other in (("a", "b"), ("b", "a")):
        live = path_to(cluster, one, other).live
        assert (live.failures, live.duplicates, live.stalls) == (0, 0, 0)


def holdings_without_traffic(cluster: Cluster) -> dict[str, Any]:
    """As :func:`holdings`, without what comes and goes with the traffic of others."""
    held = holdings(cluster)
    for one in held.values():
        one["paths"] = [(path[0], path[1], path[2], path[8], path[9]) for path in one["paths"]]
    return held


def test_a_client_that_never_takes_its_completions_stops_nobody(
    make_cluster: MakeCluster, wait_until: WaitUntil
) -> None:
    cluster = make_cluster(["a", "b"])
    start = holdings(cluster)
    with (
        Context(cluster["a"].client_socket, name="near") as near,
        Context(cluster["b"].client_socket, name="far") as far,
        Context(cluster["a"].client_socket, name="lazy", ring_entries=64) as lazy,
        Bystander(near, far) as bystander,
    ):
        there, here = connect(lazy, far)
        small, target = lazy.allocate(64), far.allocate(64)
        # Its rings fill up, and stay full; requests are kept, so that nothing takes their results.
        sending: list[Request[int]] = []

        def fill() -> None:
            while True:
                sending.append(there.send(small, block=False))

        with pytest.raises(DqplbError) as caught:
            fill()
        assert caught.value.status is Status.AGAIN
        for _ in sending:
            here.recv(target).wait(PATIENCE)
        bystander.gets_on(wait_until, 20)
        # It can still be served.
        assert [request.wait(PATIENCE) for request in sending] == [64] * len(sending)
    wait_until(
        lambda: all(one["clients"] == 0 and one["flows"] == 0 for one in holdings(cluster).values()), "all are gone"
    )
    for host_id, one in holdings(cluster).items():
        assert one["memory_bytes"] == start[host_id]["memory_bytes"] == 0


# -- daemons


@pytest.mark.parametrize("how", ["wait", "test", "wait_any"])
def test_clients_of_a_killed_daemon_know_within_a_second(make_cluster: MakeCluster, how: str) -> None:
    cluster = make_cluster(["a", "b"])
    with Context(cluster["a"].client_socket) as near, Context(cluster["b"].client_socket) as far:
        there, here = connect(near, far)
        memory = near.allocate(1)
        pending = there.recv(memory)
        theirs = here.recv(far.allocate(1))
        started = threading.Event()
        seen: list[tuple[float, Status]] = []

        def watch() -> None:
            try:
                started.set()
                if how == "wait":
                    pending.wait(PATIENCE)
                elif how == "wait_any":
                    while True:
                        near.wait_any(PATIENCE)
                else:
                    while not pending.test():
                        pass
                    pending.wait(0)
            except DqplbError as error:
                seen.append((time.monotonic(), error.status))

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        started.wait(PATIENCE)
        killed = time.monotonic()
        cluster["a"].kill()
        watching.join(PATIENCE)
        assert [status for _, status in seen] == [Status.DAEMON]
        assert seen[0][0] - killed < PROMISED
        assert status_of(theirs) is Status.UNREACHABLE
        assert time.monotonic() - killed < PROMISED


def test_a_frozen_daemon_is_found_by_its_silence(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    quick = {"transport": {"heartbeat_s": 0.05, "op_deadline_s": 0.5}}
    cluster = make_cluster(["a", "b", "c"], quick)
    with (
        Context(cluster["a"].client_socket) as near,
        Context(cluster["b"].client_socket) as far,
        Context(cluster["c"].client_socket) as third,
        Bystander(near, third) as bystander,
    ):
        there, here = connect(near, far)
        receiving, sending = there.recv(near.allocate(1)), there.send(near.allocate(1))
        cluster["b"].kill(signal.SIGSTOP)
        try:
            assert status_of(receiving) is Status.UNREACHABLE
            assert status_of(sending) is Status.UNREACHABLE
            assert status_of(there.send(near.allocate(1))) is Status.UNREACHABLE
            bystander.gets_on(wait_until)
            wait_until(lambda: "VC down" in cluster["a"].log(), "it is logged")
        finally:
            cluster["b"].kill(signal.SIGCONT)
        # It learns that it was given up, and both find each other again.
        assert status_of(here.recv(far.allocate(1))) is Status.UNREACHABLE
        again, back = connect(near, far)
        receiving = back.recv(far.allocate(1))
        again.send(near.allocate(1)).wait(PATIENCE)
        receiving.wait(PATIENCE)


def test_a_terminated_daemon_lets_work_end(make_cluster: MakeCluster) -> None:
    # A link slow enough that SIGTERM comes in the middle: 8 MiB take about half a second.
    slow = {
        "emulation": {"links": [{"peer": "*", "delay_ns": "1ms", "rate_bps": "128Mbit/s"}]},
        "clients": {"drain_s": 20},
    }
    cluster = make_cluster(["a", "b"], slow)
    with Context(cluster["a"].client_socket) as near, Context(cluster["b"].client_socket) as far:
        there, here = connect(near, far)
        source, target = near.allocate(8 * MIB), far.allocate(8 * MIB)
        source.view[:] = random.Random(5).randbytes(8 * MIB)
        receiving, sending, waiting = (
            here.recv(target, tag=1),
            there.send(source, tag=1),
            here.recv(target, 0, 1, tag=2),
        )
        cluster["a"].kill(signal.SIGTERM)
        cluster["a"].wait_state("STOPPING=1")
        with pytest.raises(DqplbError) as caught:
            Context(cluster["a"].client_socket)
        assert caught.value.status is Status.DAEMON
        assert sending.wait(PATIENCE) == 8 * MIB
        assert receiving.wait(PATIENCE).bytes == 8 * MIB
        assert target.view == source.view
        assert cluster["a"].wait_exit() == 0
        assert status_of(waiting) is Status.UNREACHABLE
        assert status_of(here.recv(target)) is Status.UNREACHABLE
        with pytest.raises(DqplbError) as caught:
            there.send(source).wait(PATIENCE)
        assert caught.value.status is Status.DAEMON
        assert "the daemon is stopping" in caught.value.text


def test_a_daemon_that_is_terminated_ends_though_a_client_never_does(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a"], {"clients": {"drain_s": 0.2}})
    with Context(cluster["a"].client_socket) as one, Context(cluster["a"].client_socket) as two:
        there, _here = connect(one, two)
        pending = there.recv(one.allocate(1))  # never matched
        cluster["a"].kill(signal.SIGTERM)
        assert status_of(pending) is Status.DAEMON
        assert cluster["a"].wait_exit() == 0


def test_a_daemon_restarted_on_the_same_host(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a", "b"])
    near = Context(cluster["a"].client_socket)
    far = Context(cluster["b"].client_socket)
    there, here = connect(near, far)
    old = far.listen().handle
    first = path_to(cluster, "a", "b").peer_epoch
    pending = there.recv(near.allocate(1))
    for round_ in range(2):
        killed = time.monotonic()
        cluster["b"].kill()
        assert status_of(pending) is Status.UNREACHABLE
        assert time.monotonic() - killed < PROMISED
        cluster["b"].wait_exit()
        cluster["b"].launch()
        cluster["b"].wait_state("READY=1")
        assert status_of(near.connect(old)) is Status.STALE
        with pytest.raises(DqplbError) as caught:
            here.recv(far.allocate(1))
        assert caught.value.status is Status.DAEMON
        far.close()
        far = Context(cluster["b"].client_socket)
        there, here = connect(near, far)
        receiving = here.recv(far.allocate(1))
        there.send(near.allocate(1)).wait(PATIENCE)
        receiving.wait(PATIENCE)
        pending = there.recv(near.allocate(1))
        paths = [path for path in admin(cluster, "a").paths() if path.peer == "b"]
        assert len(paths) == 1, round_
        assert paths[0].peer_epoch == admin(cluster, "b").status().epoch != first
        first = paths[0].peer_epoch
    near.close()
    far.close()
    # Nothing of the earlier lives is left.
    wait_until(lambda: admin(cluster, "a").status().engine.flows == 0, "flows are gone")
    assert admin(cluster, "a").status().engine.vcs == 1


def test_both_daemons_are_killed_under_load_again_and_again(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a", "b"])
    for turn in range(2):
        victim, other = ("a", "b") if turn % 2 else ("b", "a")
        with Context(cluster[victim].client_socket) as one, Context(cluster[other].client_socket) as two:
            there, here = connect(one, two)
            sources, targets = [one.allocate(4 * MIB) for _ in range(4)], [two.allocate(4 * MIB) for _ in range(4)]
            receiving = [here.recv(target, tag=i) for i, target in enumerate(targets)]
            sending = [there.send(source, tag=i) for i, source in enumerate(sources)]
            receiving.append(here.recv(targets[0], tag=99))
            receiving[0].wait(PATIENCE)
            killed = time.monotonic()
            cluster[victim].kill()
            assert status_of(receiving[-1]) is Status.UNREACHABLE
            assert time.monotonic() - killed < PROMISED
            requests: list[Request[Any]] = [*sending, *receiving]
            for request in requests:
                try:
                    request.wait(PATIENCE)
                except DqplbError as error:
                    assert error.status in (Status.DAEMON, Status.UNREACHABLE)  # noqa: PT017
        cluster[victim].wait_exit()
        cluster[victim].launch()
        cluster[victim].wait_state("READY=1")


# -- configuration in force


def test_profiles_change_while_a_transfer_runs(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    slow = {"emulation": {"links": [{"peer": "*", "delay_ns": "1ms", "rate_bps": "2Gbit/s"}]}}
    cluster = make_cluster(["a", "b"], slow)
    size, deep, total = 16 * MIB, 4, 256 * MIB
    block = random.Random(6).randbytes(size)
    with Context(cluster["a"].client_socket) as near, Context(cluster["b"].client_socket) as far:
        there, here = connect(near, far)
        sources, targets = [near.allocate(size) for _ in range(deep)], [far.allocate(size) for _ in range(deep)]
        problems: list[BaseException] = []

        def receive() -> None:
            try:
                requests = [here.recv(target) for target in targets]
                for i in range(total // size):
                    at = i % deep
                    assert requests[at].wait(PATIENCE).bytes == size
                    assert targets[at].view[:8] == i.to_bytes(8, "little")
                    assert targets[at].view[8:] == block[8:]
                    targets[at].view[:] = bytes(size)
                    requests[at] = here.recv(targets[at])
            except BaseException as error:
                problems.append(error)

        def send() -> None:
            try:
                requests: list[Request[int] | None] = [None] * deep
                for i in range(total // size):
                    at = i % deep
                    request = requests[at]
                    if request is not None:
                        request.wait(PATIENCE)
                    sources[at].view[:] = block
                    sources[at].view[:8] = i.to_bytes(8, "little")
                    requests[at] = there.send(sources[at])
                for request in requests:
                    assert request is not None
                    request.wait(PATIENCE)
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work, daemon=True) for work in (receive, send)]
        for thread in threads:
            thread.start()
        classes = ("host", "rack", "zone", "building", "region", "unknown")
        pins = [
            {"qps": 2, "segment_bytes": 65536, "window_bytes": 262144, "outstanding_per_qp": 2},
            {"qps": 16, "segment_bytes": 524288, "window_bytes": 32 * MIB, "outstanding_per_qp": 32},
            {"qps": 1, "segment_bytes": 4096, "window_bytes": 65536, "outstanding_per_qp": 16},
            {"qps": 4, "segment_bytes": 131072, "window_bytes": 2 * MIB, "outstanding_per_qp": 8},
        ]
        in_the_middle = 0
        for pin in pins:
            done = path_to(cluster, "a", "b").live.tx_bytes
            cluster["a"].write_config({"profiles": {"classes": dict.fromkeys(classes, pin)}})
            cluster["a"].reload()
            path = path_to(cluster, "a", "b")
            assert path.profile.window_bytes == path.live.profile_window_bytes == pin["window_bytes"]
            assert path.profile.segment_bytes == pin["segment_bytes"]
            in_the_middle += any(thread.is_alive() for thread in threads)
            if any(thread.is_alive() for thread in threads):

                def more(done: int = done) -> bool:
                    return path_to(cluster, "a", "b").live.tx_bytes > done or not threads[1].is_alive()

                wait_until(more, "the transfer gets on")
                admin(cluster, "a").reset_peaks()
        for thread in threads:
            thread.join(4 * PATIENCE)
        assert not problems, problems
        assert not any(thread.is_alive() for thread in threads)
        assert in_the_middle >= 2
        live = path_to(cluster, "a", "b").live
        assert live.tx_bytes >= total
        assert (live.failures, live.duplicates) == (0, 0)
        # The last pin holds: never more than its window was in flight since, a segment above at most.
        assert live.inflight_peak_bytes <= 2 * MIB + 524288


def test_a_bad_reload_shows_everywhere(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a"])
    host = cluster["a"]

    def get(page: str) -> tuple[int, str]:
        try:
            with urlopen(host.metrics_url.removesuffix("/metrics") + page) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    def good() -> bool:
        return "dqplbd_config_last_reload_successful 1.0\n" in get("/metrics")[1]

    wait_until(good, "the first picture")
    wait_until(lambda: get("/readyz") == (200, "ready\n"), "it is ready")
    host.config_file.write_text("transport:\n  heartbeat_s: 5\n  op_deadline_s: 1\nclients: [1]\n")
    host.reload()
    status = admin(cluster, "a").status()
    assert not status.config.last_reload_ok
    assert {problem.line for problem in status.config.problems} == {1, 4}
    wait_until(lambda: not good(), "the metrics say so")
    # It works on with the old configuration: ready, and saying what is wrong.
    code, text = get("/readyz")
    assert code == 200
    assert text.startswith("degraded\n")
    assert "reload" in text
    assert str(host.config_file) in text
    host.write_config({})
    host.reload()
    wait_until(good, "the metrics say that it is good again")
    assert get("/readyz") == (200, "ready\n")
