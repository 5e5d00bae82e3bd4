# SPDX-License-Identifier: Apache-2.0
"""The installed net plugin on whole daemons, driven by native/tools/nccl_bench.c as NCCL's proxy thread drives it.

What the plugin does call by call is tested in C (native/tests/test_nccl_*.c); here is what needs a real control plane:
attaching, quotas, connections made on demand, what `dqplb clients` shows, daemons that are killed.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dqplbd.admin.client import AdminClient
from dqplbd.lab.cluster import Cluster

MakeCluster = Callable[..., Cluster]
WaitUntil = Callable[[Callable[[], Any], str], Any]

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = Path(sys.prefix) / "lib"
PLUGIN = LIBRARIES / "libnccl-net-dqplb.so"
PATIENCE = 60.0


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, compiled against what is installed."""
    file = tmp_path_factory.mktemp("nccl") / "nccl_bench"
    done = subprocess.run(
        [
            *("gcc", "-std=gnu11", "-O1", "-D_GNU_SOURCE", f"-I{ROOT / 'native'}", f"-I{Path(sys.prefix) / 'include'}"),
            *(str(ROOT / "native/tools/nccl_bench.c"), "-o", str(file)),
            *(f"-L{LIBRARIES}", f"-Wl,-rpath,{LIBRARIES}", "-ldqplb"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return file


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """For tests that leave the daemons as they were."""
    with Cluster(["a", "b"], {"clients": {"drain_s": 1}}) as one:
        yield one


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(program: Path) -> Iterator[Start]:
    """Starts the program; it is ended after the test."""
    running: list[subprocess.Popen[str]] = []

    def launch(mode: str, *arguments: object, plugin: Path = PLUGIN) -> subprocess.Popen[str]:
        command = [str(program), mode, "--plugin", str(plugin), *map(str, arguments)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return running[-1]

    yield launch
    for process in running:
        process.kill()
        process.communicate()


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    said, complained = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, complained
    found: dict[str, Any] = json.loads(said)
    return found


@pytest.mark.parametrize("memory", ["malloc", "shim"])
@pytest.mark.parametrize("far", ["a", "b"], ids=["one host", "two hosts"])
def test_messages_arrive(cluster: Cluster, start: Start, far: str, memory: str) -> None:
    ends = ("--near", cluster["a"].client_socket, "--far", cluster[far].client_socket)
    # It looks at the first and last word of each message.
    found = result(start("stream", *ends, "--seconds", 1, "--warmup-ms", 0, "--comms", 3, "--memory", memory))
    assert found["messages"] > 0
    assert found["memory"] == memory
    assert result(start("pingpong", *ends, "--rounds", 50, "--warmup", 0))["rounds"] == 50


def test_hundreds_of_comms(cluster: Cluster, start: Start) -> None:
    ends = ("--near", cluster["a"].client_socket, "--far", cluster["b"].client_socket)
    found = result(start("comms", *ends, "--comms", 600))
    assert found["comms"] == 600
    # Nothing of them is left when the program ends.
    assert AdminClient(cluster["a"].admin).status().engine.flows == 0


@pytest.mark.parametrize("memory", ["malloc", "shim"])
def test_what_is_registered_is_registered_once(cluster: Cluster, start: Start, memory: str) -> None:
    near = cluster["a"].client_socket
    assert result(start("register", "--near", near, "--rounds", 20, "--memory", memory))["memory"] == memory


def test_a_job_is_seen_among_the_clients(cluster: Cluster, start: Start, wait_until: WaitUntil) -> None:
    admin = AdminClient(cluster["a"].admin)
    ends = ("--near", cluster["a"].client_socket, "--far", cluster["b"].client_socket)
    before = sum(path.live.tx_bytes for path in admin.paths(peer="b"))
    process = start("stream", *ends, "--seconds", 600)
    try:
        (client,) = wait_until(
            lambda: [one for one in admin.clients() if one.flows == 8 and one.tx_bytes > 10**6], "a client with 8 flows"
        )
    finally:
        process.kill()
    assert re.fullmatch(r"nccl:nccl_bench/\d+", client.name)
    assert client.pid == process.pid
    assert sum(path.live.tx_bytes for path in admin.paths(peer="b")) > before
    wait_until(lambda: not admin.clients(), "the dead client's end")


def test_without_a_daemon_it_says_which_unit_to_start(start: Start, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "client.sock")
    process = start("register", "--near", nowhere)
    _, complained = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert nowhere in complained
    assert "dqplbd.service" in complained


@pytest.mark.parametrize("victim", ["a", "b"], ids=["own daemon", "peer's daemon"])
def test_a_killed_daemon_ends_the_job(
    make_cluster: MakeCluster, start: Start, wait_until: WaitUntil, victim: str
) -> None:
    mortal = make_cluster(["a", "b"])
    admin = AdminClient(mortal["a"].admin)
    process = start("stream", "--near", mortal["a"].client_socket, "--far", mortal["b"].client_socket, "--seconds", 600)
    wait_until(lambda: any(one.tx_bytes > 10**6 for one in admin.clients()), "data")
    mortal[victim].kill()
    _, complained = process.communicate(timeout=PATIENCE)  # both ends; the near one is waited for
    assert process.returncode == 1
    # This host's own daemon, or the peer and what became of it.
    assert ("result 2" if victim == "a" else "result 6") in complained
    assert ("systemctl start dqplbd" if victim == "a" else "peer b") in complained


def test_a_quota_is_named(make_cluster: MakeCluster, start: Start) -> None:
    small = make_cluster(["a", "b"], {"clients": {"max_flows": 10}})
    ends = ("--near", small["a"].client_socket, "--far", small["b"].client_socket)
    process = start("comms", *ends, "--comms", 20)
    _, complained = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "limit" in complained
