# SPDX-License-Identifier: Apache-2.0
"""A peer on the RDMA fabric that does not keep the rules harms nobody but its own virtual connection."""

import json
import random
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import pyverbs.enums as e

from dqplbd.client import Context
from dqplbd.lab.cluster import Cluster, HostSpec, merge
from tests.vm.conftest import QUICK, WaitUntil
from tests.vm.daemons import admin, verbs_devices
from tests.vm.fabric import Fabric
from tests.vm.hostile import CONTROL_BYTES, HostilePeer, control_packet

TIMES = ("simulated",)
PATIENCE_S = 60.0

SLOT = 0x00050000  # of immediate data: a slot that nobody named


@pytest.fixture(scope="module")
def fabric() -> Iterator[Fabric]:
    with Fabric(3) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(fabric: Fabric) -> Iterator[Cluster]:
    """Two daemons; the third host is the hostile one's."""
    devices = verbs_devices(fabric)
    specs = [HostSpec(f"host{host}", {"devices": list(devices(host))}) for host in range(2)]
    with Cluster(specs, merge(QUICK, {"transport": {"op_deadline_s": 2}})) as made:
        yield made


@pytest.fixture(scope="module")
def stranger(fabric: Fabric, cluster: Cluster) -> Iterator[HostilePeer]:
    with HostilePeer(fabric.port(2).device, f"{cluster.prefix}.99", cluster["host0"].api) as peer:
        yield peer


@pytest.fixture
def hostile(stranger: HostilePeer) -> Iterator[HostilePeer]:
    yield stranger
    stranger.drop()


def kernel_queue_pairs(device: str) -> int:
    said = subprocess.run(["rdma", "-j", "resource", "show", device], capture_output=True, text=True, check=True).stdout
    return int(next(one["qp"] for one in json.loads(said) if one["ifname"] == device))


Attack = Callable[[HostilePeer, list[Any]], None]
ATTACKS: dict[str, tuple[Attack, str]] = {
    "writes where it may not": (
        lambda peer, qps: peer.send(qps[1], bytes(4096), e.IBV_WR_RDMA_WRITE_WITH_IMM, immediate=0, address=1, key=77),
        "a write was refused, here or by the peer",
    ),
    "names a slot that nobody gave it": (
        lambda peer, qps: peer.send(qps[1], b"", e.IBV_WR_RDMA_WRITE_WITH_IMM, immediate=SLOT),
        "which was not announced",
    ),
    "sends a control message that is too long": (
        lambda peer, qps: peer.send(qps[0], bytes(CONTROL_BYTES + 1)),
        "control QP 0 failed: the peer sent what it may not",
    ),
    "sends where segments belong": (
        lambda peer, qps: peer.send(qps[1], bytes(4096)),
        "data QP 1 failed: the peer sent what it may not",
    ),
    "writes a segment where messages belong": (
        lambda peer, qps: peer.send(qps[0], b"", e.IBV_WR_RDMA_WRITE_WITH_IMM, immediate=5),
        "control QP 0 failed: the peer sent what it may not",
    ),
    "sends noise": (
        lambda peer, qps: peer.send(qps[0], random.Random(1).randbytes(CONTROL_BYTES)),
        "control packet of 4096 bytes is malformed",
    ),
    "sends a byte": (lambda peer, qps: peer.send(qps[0], b"x"), "control packet of 1 bytes is malformed"),
    "sends nothing": (lambda peer, qps: peer.send(qps[0]), "control packet of 0 bytes is malformed"),
    "lies about the length": (
        lambda peer, qps: peer.send(qps[0], control_packet(size=4000)),
        "control packet of 32 bytes is malformed",
    ),
    "acknowledges what was never sent": (
        lambda peer, qps: peer.send(qps[0], control_packet(ack=1 << 63)),
        "control packet of 32 bytes is malformed",
    ),
    "gives endless credits": (
        lambda peer, qps: peer.send(qps[0], control_packet(credits=(1 << 32) - 1)),
        "control packet of 32 bytes is malformed",
    ),
    "speaks of a flow that is not there": (
        lambda peer, qps: peer.send(qps[0], control_packet(bytes([3, 0, 8, 0]) + bytes(8), 1)),
        "FLOW_CLOSE names flow 0, which is not open",
    ),
    "goes without a word": (lambda peer, qps: peer.drop(), "no answer before the deadline"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_peer_that(cluster: Cluster, hostile: HostilePeer, wait_until: WaitUntil, attack: str) -> None:
    act, reason = ATTACKS[attack]
    near = admin(cluster, 0)
    before = kernel_queue_pairs("rxe0")
    qps = hostile.connect()
    wait_until(lambda: near.paths(peer=hostile.host_id)[0].live.state == "up", "the VC is up")
    act(hostile, qps)
    failed = wait_until(
        lambda: (live := near.paths(peer=hostile.host_id)[0].live).state == "failed" and live, "the VC failed"
    )
    assert reason in failed.reason
    wait_until(lambda: kernel_queue_pairs("rxe0") == before, "its queue pairs are gone")
    check_others(cluster)


@pytest.mark.parametrize("joined", [False, True])
def test_a_peer_that_never_says_hello(
    cluster: Cluster, hostile: HostilePeer, wait_until: WaitUntil, joined: bool
) -> None:
    near = admin(cluster, 0)
    before = kernel_queue_pairs("rxe0")
    hostile.connect(join=joined, greet=False)
    assert kernel_queue_pairs("rxe0") > before
    wait_until(lambda: kernel_queue_pairs("rxe0") == before, "its queue pairs are gone")
    live = near.paths(peer=hostile.host_id)[0].live
    assert live.state == "failed"
    assert "no answer before the deadline" in (live.reason or "")
    check_others(cluster)


def check_others(cluster: Cluster) -> None:
    """The daemon lives and serves others as before."""
    content = random.Random(2).randbytes(100_000)
    with Context(cluster["host1"].client_socket) as far, Context(cluster["host0"].client_socket) as near:
        listener = near.listen()
        accepting = listener.accept()
        sender, receiver = far.connect(listener.handle).wait(PATIENCE_S), accepting.wait(PATIENCE_S)
        source, target = far.allocate(len(content)), near.allocate(len(content))
        source.view[:] = content
        receiving = receiver.recv(target)
        sender.send(source).wait(PATIENCE_S)
        assert receiving.wait(PATIENCE_S).bytes == len(content)
        assert bytes(target.view) == content
    assert "Traceback" not in cluster["host0"].log()
