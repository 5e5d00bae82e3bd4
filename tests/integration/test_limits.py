# SPDX-License-Identifier: Apache-2.0
"""Limits: what a client may have, what it is told when it wants more, and that all of it is usable again afterwards."""

import json
import os
import random
import resource
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dqplbd.admin.client import AdminClient
from dqplbd.client import Context, DqplbError, Flow, Listener, Memory, Status
from dqplbd.lab.cluster import Cluster

MakeCluster = Callable[..., Cluster]
WaitUntil = Callable[[Callable[[], Any], str], Any]
PATIENCE = 60.0
MIB = 1 << 20
QUIET: dict[str, Any] = {"probing": {"interval_s": 5}}


def admin(cluster: Cluster, host_id: str) -> AdminClient:
    return AdminClient(cluster[host_id].admin)


def connect(near: Context, far: Context) -> tuple[Flow, Flow]:
    with far.listen() as listener:
        accepting = listener.accept()
        connecting = near.connect(listener.handle)
        return connecting.wait(PATIENCE), accepting.wait(PATIENCE)


def error_of(call: Callable[[], object]) -> DqplbError:
    with pytest.raises(DqplbError) as caught:
        call()
    return caught.value


def exchange(there: Flow, here: Flow, source: Memory, target: Memory, tag: int = 0) -> None:
    source.view[:] = random.Random(tag).randbytes(len(source))
    receiving = here.recv(target, tag=tag)
    assert there.send(source, tag=tag).wait(PATIENCE) == len(source)
    assert receiving.wait(PATIENCE).bytes == len(source)
    assert source.view == target.view


# -- quotas


@pytest.mark.parametrize("kind", ["shared", "staged"])
def test_the_memory_quota_of_a_client(make_cluster: MakeCluster, wait_until: WaitUntil, kind: str) -> None:
    quota = 32 * MIB
    cluster = make_cluster(["a"], QUIET | {"clients": {"max_memory_bytes": quota}})
    with (
        Context(cluster["a"].client_socket, name="greedy") as greedy,
        Context(cluster["a"].client_socket, name="modest") as modest,
    ):
        held: list[Memory] = []

        def take() -> Memory:
            return greedy.allocate(4 * MIB) if kind == "shared" else greedy.register(bytearray(4 * MIB))

        if kind == "shared":

            def fill() -> None:
                while True:
                    held.append(take())

            error = error_of(fill)
            assert error.status in (Status.LIMIT, Status.NOMEM)
            assert str(quota) in error.text
            assert "max_memory_bytes" in error.text
            assert 0 < len(held) <= quota // (4 * MIB)
            assert admin(cluster, "a").status().engine.memory_bytes <= quota
        else:
            # Staging memory is taken for what is under way, not for what is registered: more than the quota registers,
            # and moves through what there is.
            held = [take() for _ in range(12)]
            there, here = connect(greedy, modest)
            targets = [modest.allocate(4 * MIB) for _ in range(4)]
            for first in range(0, 12, 4):
                receiving = [here.recv(target, tag=i) for i, target in enumerate(targets)]
                for i in range(4):
                    there.send(held[first + i], tag=i)
                assert [request.wait(PATIENCE).bytes for request in receiving] == [4 * MIB] * 4
            for target in targets:
                target.free()
            assert admin(cluster, "a").status().engine.staging_bytes <= quota
            there.close()
        # The other client has its own.
        modest.allocate(16 * MIB).free()
        held[0].free()
        held[0] = take()
        for memory in held:
            memory.free()
        if kind == "shared":  # of staging memory the last piece stays, for the next message

            def back() -> bool:
                return {client.name: client.memory_bytes for client in admin(cluster, "a").clients()}["greedy"] < MIB

            wait_until(back, "the memory comes back")
            again = [take() for _ in range(len(held))]
            assert len(again) == len(held)


def test_memory_that_the_machine_does_not_have(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a"], QUIET | {"clients": {"max_memory_bytes": 2**44}})
    with Context(cluster["a"].client_socket) as context:
        error = error_of(lambda: context.allocate(2**43))
        assert error.status is Status.NOMEM
        assert str(2**43) in error.text
        context.allocate(MIB)
    assert admin(cluster, "a").status().state == "ready"


def test_the_number_of_regions(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a"], QUIET | {"clients": {"max_regions": 20}})
    with Context(cluster["a"].client_socket) as context:
        held = [context.allocate(1) for _ in range(20)]
        error = error_of(lambda: context.allocate(1))
        assert error.status is Status.LIMIT
        assert "clients.max_regions is 20" in error.text
        held.pop().free()
        context.allocate(1)


def test_the_number_of_clients(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a"], QUIET | {"clients": {"max_clients": 3}})
    path = cluster["a"].client_socket
    for _ in range(2):
        held = [Context(path) for _ in range(3)]
        error = error_of(lambda: Context(path))
        assert error.status is Status.LIMIT
        assert "clients.max_clients is 3" in error.text
        held.pop().close()
        wait_until(lambda: admin(cluster, "a").status().engine.clients == 2, "its place is free")
        held.append(Context(path))
        connect(held[0], held[2])
        for context in held:
            context.close()
        wait_until(lambda: admin(cluster, "a").status().engine.clients == 0, "all are gone")
    # A limit raised by a reload holds at once.
    cluster["a"].write_config({"clients": {"max_clients": 2}})
    cluster["a"].reload()
    held = [Context(path) for _ in range(2)]
    assert "clients.max_clients is 2" in error_of(lambda: Context(path)).text
    for context in held:
        context.close()


def test_the_number_of_clients_of_one_user(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a"], QUIET | {"clients": {"max_clients_per_user": 1}})
    with Context(cluster["a"].client_socket):
        error = error_of(lambda: Context(cluster["a"].client_socket))
    assert error.status is Status.LIMIT
    assert f"user {os.getuid()}" in error.text


@pytest.mark.parametrize("side", ["connecting", "accepting"])
def test_the_number_of_flows_of_a_client(make_cluster: MakeCluster, wait_until: WaitUntil, side: str) -> None:
    cluster = make_cluster(["a", "b"], QUIET, start=False)
    cluster["a" if side == "connecting" else "b"].write_config({"clients": {"max_flows": 10}})
    cluster.start()
    with Context(cluster["a"].client_socket) as near, Context(cluster["b"].client_socket) as far:
        for _ in range(2):
            flows = [connect(near, far) for _ in range(10)]
            with far.listen() as listener:
                accepting = listener.accept()
                connecting = near.connect(listener.handle)
                assert error_of(partial(connecting.wait, PATIENCE)).status is Status.LIMIT
                if side == "accepting":
                    assert error_of(partial(accepting.wait, PATIENCE)).status is Status.LIMIT
            exchange(*flows[9], near.allocate(100), far.allocate(100))
            for pair in flows:
                for flow in pair:
                    flow.close()
            wait_until(
                lambda: all(admin(cluster, host).status().engine.flows == 0 for host in ("a", "b")), "flows come back"
            )


def test_a_thousand_listeners(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a", "b"], QUIET)
    with Context(cluster["a"].client_socket) as near, Context(cluster["b"].client_socket) as far:
        listeners: list[Listener] = [far.listen() for _ in range(1000)]
        assert len({listener.handle for listener in listeners}) == 1000
        for i in (0, 500, 999):
            accepting = listeners[i].accept()
            there = near.connect(listeners[i].handle).wait(PATIENCE)
            exchange(there, accepting.wait(PATIENCE), near.allocate(10), far.allocate(10))
        assert admin(cluster, "b").clients()[0].listeners == 1000
        for listener in listeners:
            listener.close()
        assert error_of(lambda: near.connect(listeners[0].handle).wait(PATIENCE)).status is Status.REFUSED
        connect(near, far)
        assert admin(cluster, "b").clients()[0].listeners <= 1


# -- one client in the way of others


def test_thirty_thousand_idle_receives_starve_nobody(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a", "b"], QUIET | {"clients": {"max_ring_entries": 65536}})
    with (
        Context(cluster["a"].client_socket, name="near") as near,
        Context(cluster["b"].client_socket, name="far") as far,
        Context(cluster["b"].client_socket, name="hog", ring_entries=65536) as hog,
    ):
        _there, idle = connect(near, hog)
        there, here = connect(near, far)
        place = hog.allocate(4096)
        waiting = [idle.recv(place, 0, 8, tag=i) for i in range(30_000)]
        exchange(there, here, near.allocate(MIB), far.allocate(MIB))
        live = next(path for path in admin(cluster, "b").paths() if path.peer == "a").live
        assert live.receives_waiting + live.slots_receive >= 30_000
        # Far more messages than there could be slots left.
        source, target = near.allocate(100), far.allocate(100)
        for i in range(300):
            exchange(there, here, source, target, tag=i)
        # New flows work too, and so does a receive of the hog's, in order.
        exchange(*connect(near, far), source, target)
        _there.send(source, 0, 8, tag=0).wait(PATIENCE)
        assert waiting[0].wait(PATIENCE).bytes == 8
        idle.close()
        with pytest.raises(DqplbError) as caught:
            waiting[-1].wait(PATIENCE)
        assert caught.value.status is Status.CANCELED


def test_many_threads_with_contexts_of_their_own(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a", "b"], QUIET)
    problems: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with Context(cluster["a"].client_socket) as near, Context(cluster["b"].client_socket) as far:
                there, here = connect(near, far)
                source, target = near.register(bytearray(70_000)), far.allocate(70_000)
                for i in range(20):
                    exchange(there, here, source, target, tag=number * 100 + i)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not problems
    assert not any(thread.is_alive() for thread in threads)


FORKING = """
import os, sys
from dqplbd.client import Context, DqplbError, Status
context = Context(sys.argv[1])
listener = context.listen()
accepting, connecting = listener.accept(), context.connect(listener.handle)
there, here = connecting.wait(), accepting.wait()
memory = context.allocate(4096)
receiving = here.recv(memory)
children = []
for i in range(10):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            there.send(memory)
        except DqplbError as error:
            code = 0 if error.status is Status.FORKED else 2
        # Half of them run their destructors, half do not.
        if i % 2:
            os._exit(code)
        sys.exit(code)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
there.send(memory, 0, 4).wait()
assert receiving.wait().bytes == 4
print(codes)
"""


def test_children_of_a_client_do_it_no_harm(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a"], QUIET)
    done = subprocess.run(
        [sys.executable, "-P", "-c", FORKING, cluster["a"].client_socket], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    assert json.loads(done.stdout) == [0] * 10
    wait_until(lambda: admin(cluster, "a").status().engine.clients == 0, "it is gone")


# -- where the daemon lives


def started(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "dqplbd.daemon", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def config_in(folder: Path, **over: Any) -> str:
    file = folder / "dqplbd.yaml"
    config: dict[str, Any] = {
        "host": {"host_id": "x"},
        "devices": [{"name": "tcp0", "address": "127.77.1.1"}],
        "peers": {"listen": "127.77.1.1:0"},
        "clients": {"socket": str(folder / "client.sock")},
        "admin": {"socket": str(folder / "admin.sock")},
        "metrics": {"address": "127.77.1.1", "port": 0},
    }
    for section, keys in over.items():
        config[section] = config.get(section, {}) | keys
    file.write_text(json.dumps(config))
    return str(file)


def test_a_socket_path_that_is_too_long(short_folder: Path) -> None:
    long = str(short_folder / ("x" * 90) / "client.sock")[:107]
    done = started("--config", config_in(short_folder, clients={"socket": long}))
    assert done.returncode == 1
    assert long in done.stderr
    assert "107 bytes" in done.stderr or "No such file" in done.stderr
    done = started("--config", config_in(short_folder, admin={"socket": "/" + "x" * 108}))
    assert done.returncode == 78
    assert "admin.socket" in done.stderr


def test_a_folder_of_sockets_that_is_not_there_or_cannot_be_written(short_folder: Path) -> None:
    missing = str(short_folder / "nowhere" / "client.sock")
    done = started("--config", config_in(short_folder, clients={"socket": missing}))
    assert done.returncode == 1
    assert missing in done.stderr
    assert "Traceback" not in done.stderr
    # /proc cannot be written by anybody, root included.
    done = started("--config", config_in(short_folder, admin={"socket": "/proc/admin.sock"}))
    assert done.returncode == 1
    assert "/proc/admin.sock" in done.stderr
    assert "Traceback" not in done.stderr
    # A folder in the place of the socket, and a file that is none.
    (short_folder / "client.sock").mkdir()
    done = started("--config", config_in(short_folder))
    assert done.returncode == 1
    assert str(short_folder / "client.sock") in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(short_folder.glob("*.lock"))
    assert not list(short_folder.glob("client.sock.*"))


def test_a_group_that_does_not_exist(short_folder: Path) -> None:
    for section in ("clients", "admin"):
        done = started("--config", config_in(short_folder, **{section: {"group": "no-such-group-here"}}))
        assert done.returncode == 1
        assert "no-such-group-here" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("sink", ["full", "pipe"])
def test_logs_that_cannot_be_written_stop_nobody(make_cluster: MakeCluster, sink: str) -> None:
    cluster = make_cluster(["a"], QUIET | {"logging": {"level": "debug"}}, start=False)
    host = cluster["a"]
    reader = None
    if sink == "pipe":
        os.mkfifo(host.log_file)
        reader = os.open(host.log_file, os.O_RDONLY | os.O_NONBLOCK)
    else:
        host.log_file.symlink_to("/dev/full")
    host.launch()
    host.wait_state("READY=1")
    if reader is not None:
        os.close(reader)  # from now on, writing is EPIPE
    with Context(host.client_socket) as one, Context(host.client_socket) as two:
        exchange(*connect(one, two), one.allocate(1000), two.allocate(1000))
        host.reload()
        exchange(*connect(one, two), one.allocate(1000), two.allocate(1000))
    assert admin(cluster, "a").status().state == "ready"
    host.kill(15)
    assert host.wait_exit() == 0
    host.log_file.unlink()


def test_a_client_socket_has_its_rights_from_the_start(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a"], QUIET | {"clients": {"mode": "0600"}, "admin": {"mode": "0640"}})
    assert stat.S_IMODE(os.stat(cluster["a"].client_socket).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(cluster["a"].admin).st_mode) == 0o640


def test_ports_in_use_are_named(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a"], start=False)
    host = cluster["a"]
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind((host.address, 9471))
        squatter.listen()
        host.launch()
        assert host.wait_exit() == 1
    assert f"{host.address}:9471" in host.log()
    assert "metrics.port" in host.log()
    assert "Traceback" not in host.log()
    assert sorted(path.name for path in host.folder.iterdir()) == ["dqplbd.yaml", "log", "notify"]
    host.launch()
    host.wait_state("READY=1")


def test_few_descriptors_make_clear_errors(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a"], QUIET)
    path = cluster["a"].client_socket
    pid = cluster["a"].pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (80, before[1]))
    held: list[Context] = []

    def fill() -> None:
        while True:
            context = Context(path)
            held.append(context)
            context.allocate(4096)
            assert len(held) < 100

    error = error_of(fill)
    assert error.status in (Status.LIMIT, Status.NOMEM, Status.DAEMON), error.text
    assert admin_answers(cluster)
    for context in held:
        context.close()
    wait_until(lambda: admin_answers(cluster) and admin(cluster, "a").status().engine.clients == 0, "all are gone")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    with Context(path) as one, Context(path) as two:
        connect(one, two)


def admin_answers(cluster: Cluster) -> bool:
    """At the limit there may be no descriptor for it, either."""
    try:
        admin(cluster, "a").status()
    except Exception:
        return False
    return True


# -- at rest


@pytest.fixture(scope="module")
def nine() -> Iterator[Cluster]:
    with Cluster(9) as cluster:  # the defaults, as shipped
        yield cluster


def test_an_idle_daemon_with_eight_peers_uses_next_to_nothing(nine: Cluster, wait_until: WaitUntil) -> None:
    view = admin(nine, "h1")
    wait_until(lambda: view.status().peers_up >= 8, "all know each other")
    wait_until(
        lambda: sum(path.estimate.probes_ok > 0 for path in view.paths()) >= 8,
        "all are measured",
    )
    before, begin = view.status().process, time.monotonic()
    time.sleep(5.0)  # a measurement over time, not a wait for something
    after, end = view.status().process, time.monotonic()
    share = (after.cpu_seconds - before.cpu_seconds) / (end - begin)
    print(f"idle with 8 peers: {share:.2%} of a core, {after.rss_bytes / MIB:.0f} MiB resident")
    if "libasan" not in os.environ.get("LD_PRELOAD", ""):
        assert after.rss_bytes < 100 * MIB
    # The target is 1 %; the machine may be busy with other things, and the questions above cost something too.
    assert share < 0.05
