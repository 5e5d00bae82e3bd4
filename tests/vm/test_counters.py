# SPDX-License-Identifier: Apache-2.0
"""Counters of real RDMA devices while real traffic loses packets, beside what ``rdma statistic`` says."""

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pyverbs.enums import IBV_MTU_4096

from dqplbd.admin.client import AdminClient
from dqplbd.client import Context
from dqplbd.inventory.rdma_counters import PortCounters, RdmaCounters
from dqplbd.inventory.rdma_drivers import Kind
from tests.vm.conftest import MakeCluster, MakeFabric, WaitUntil
from tests.vm.fabric import Fabric
from tests.vm.verbs import End

TIMES = ("simulated",)  # the same stack, and nobody waits for the next reading
SIZE = 1 << 20
PATIENCE_S = 60.0
LATER_S = 3600.0
"""Far enough that the kernel would be asked again, whatever its lifespan."""


@pytest.fixture
def fabric(make_fabric: MakeFabric) -> Fabric:
    return make_fabric(2)


def joined(near: str, far: str) -> tuple[End, End]:
    """Two ends that are connected with each other, by the names of their devices."""
    one, two = End(near, SIZE), End(far, SIZE)
    one.connect(two, IBV_MTU_4096)
    two.connect(one, IBV_MTU_4096)
    return one, two


@pytest.fixture
def pair(fabric: Fabric) -> Iterator[tuple[End, End]]:
    near, far = joined("rxe0", "rxe1")
    yield near, far
    near.close()
    far.close()


class Watched:
    """A device's counters from now on, as read here and as the kernel tells a tool of its own."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._now_s = 0.0
        self.reader = PortCounters(device, 1)
        self.reader.read(0)
        assert self.reader.events.driver == "rxe", self.reader.events
        self._begin = self._witness()

    def _witness(self) -> dict[str, int]:
        command = ["rdma", "-j", "statistic", "show", "link", f"{self._device}/1"]
        # The kernel answers from memory for a while: for longer than `rdma` takes to start.
        time.sleep(0.02)
        [found] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        return {name: int(value) for name, value in found.items() if isinstance(value, int)}

    def total(self) -> dict[Kind, int]:
        """Events so far."""
        time.sleep(0.02)
        self._now_s += LATER_S
        self.reader.read(self._now_s)
        assert not self.reader.events.unreadable
        return dict(self.reader.events.total)

    def witness(self, *names: str) -> int:
        """The same of the tool, over some counters of the driver."""
        now = self._witness()
        return sum(now[name] - self._begin[name] for name in names)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what the kernel does; a hang is ended by the time limit."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "not within 30 s"
        time.sleep(0.01)


def write(near: End, far: End, count: int) -> None:
    for _ in range(count):
        near.write(far, SIZE)
        near.sent()


def test_lost_packets_show_at_both_ends_and_only_while_they_are_lost(fabric: Fabric, pair: tuple[End, End]) -> None:
    near, far = pair
    sender, receiver = Watched("rxe0"), Watched("rxe1")
    write(near, far, 4)
    assert not any(sender.total().values())
    assert not any(receiver.total().values())

    fabric.set_loss(1, 2)
    write(near, far, 4)
    fabric.set_loss(1, 0)
    lossy = sender.total()
    assert lossy[Kind.RETRANSMIT] > 0
    assert lossy[Kind.RETRANSMIT] == sender.witness("completer_retry_err")
    assert lossy[Kind.OUT_OF_SEQUENCE] == 0, "what was lost was not on the way here"
    assert receiver.total()[Kind.OUT_OF_SEQUENCE] == receiver.witness("out_of_seq_request") > 0
    assert receiver.total()[Kind.RETRANSMIT] == 0
    assert lossy[Kind.RETRY_EXCEEDED] == 0
    assert Kind.ECN_MARKED not in lossy, "rxe does not count marks, which is not the same as none"

    write(near, far, 4)
    assert sender.total() == lossy


def test_a_missing_receive_shows_at_both_ends(pair: tuple[End, End]) -> None:
    near, far = pair
    sender, receiver = Watched("rxe0"), Watched("rxe1")
    near.send(64)
    until(lambda: sender.witness("rcvd_rnr_err") > 0)
    far.receive()
    near.sent()
    far.received()
    assert sender.total()[Kind.RECEIVER_NOT_READY] == sender.witness("rcvd_rnr_err", "send_rnr_err") > 0
    assert receiver.total()[Kind.RECEIVER_NOT_READY] == receiver.witness("rcvd_rnr_err", "send_rnr_err") > 0


def test_a_renamed_device_is_followed(fabric: Fabric) -> None:
    watched = Watched("rxe0")
    subprocess.run(["rdma", "dev", "set", "rxe0", "name", "cable0"], check=True)
    try:
        # Traffic after the renaming: counting goes on where it was.
        near, far = joined("cable0", "rxe1")
        fabric.set_loss(1, 5)
        write(near, far, 2)
        fabric.set_loss(1, 0)
        assert watched.total()[Kind.RETRANSMIT] > 0
        assert watched.reader.events.rdma_device == "cable0"
        assert not watched.reader.events.gone
        near.close()
        far.close()
    finally:
        subprocess.run(["rdma", "dev", "set", "cable0", "name", "rxe0"], check=True)


def test_a_device_that_goes_and_comes_back_keeps_its_sums(fabric: Fabric, pair: tuple[End, End]) -> None:
    near, far = pair
    watched = Watched("rxe1")
    fabric.set_loss(1, 5)
    write(near, far, 2)
    fabric.set_loss(1, 0)
    before = watched.total()
    assert before[Kind.OUT_OF_SEQUENCE] > 0
    near.close()
    far.close()
    subprocess.run(["rdma", "link", "delete", "rxe1"], check=True)
    assert watched.total() == before
    assert "rxe1" in watched.reader.events.gone
    subprocess.run(["rdma", "link", "add", "rxe1", "type", "rxe", "netdev", fabric.port(1).netdev], check=True)
    assert watched.total() == before
    assert not watched.reader.events.gone


def test_the_thread_sees_traffic(fabric: Fabric, pair: tuple[End, End]) -> None:
    near, far = pair
    counters = RdmaCounters(interval_s=0.02)
    counters.watch({"rail0": ("rxe0", 1)})
    try:
        until(lambda: (found := counters.events("rail0")) is not None and found.read_s is not None)
        fabric.set_loss(1, 5)
        write(near, far, 2)
        fabric.set_loss(1, 0)
        until(lambda: (found := counters.events("rail0")) is not None and found.recent[Kind.RETRANSMIT] > 0)
    finally:
        counters.stop()


def test_a_daemon_exports_what_its_device_counts(
    fabric: Fabric, make_cluster: MakeCluster, wait_until: WaitUntil
) -> None:
    def devices(host: int) -> list[dict[str, str]]:
        return [{"name": "rail0", "provider": "verbs", "rdma_device": fabric.port(host).device}]

    cluster = make_cluster(fabric, devices=devices)
    admins = [AdminClient(host.admin) for host in cluster]

    def events(host: int) -> dict[str, int]:
        [device] = admins[host].devices()
        return device.rdma_events

    wait_until(lambda: events(0) and events(1), "the counters were read")
    assert not any(events(0).values())
    with Context(cluster["host0"].client_socket) as near, Context(cluster["host1"].client_socket) as far:
        listener = far.listen()
        accepting = listener.accept()
        there, here = near.connect(listener.handle).wait(PATIENCE_S), accepting.wait(PATIENCE_S)
        source, target = near.allocate(SIZE), far.allocate(SIZE)
        fabric.set_loss(1, 1)

        def counted() -> bool:
            """Sends once more: which packets are lost is chance, and so is what the device calls it."""
            receiving = here.recv(target)
            there.send(source).wait(PATIENCE_S)
            assert receiving.wait(PATIENCE_S).bytes == SIZE
            time.sleep(0.5)  # not to send all the time until the counters are read again
            return bool(events(0)["retransmit"] and events(1)["out_of_sequence"])

        wait_until(counted, "the loss is counted")
        fabric.set_loss(1, 0)

    def exported(host: str) -> dict[str, float]:
        with urllib.request.urlopen(cluster[host].metrics_url) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            return {
                sample.labels["kind"]: sample.value
                for family in families
                for sample in family.samples
                if sample.name == "dqplbd_device_rdma_events_total"
            }

    wait_until(lambda: exported("host0").get("retransmit"), "the loss is exported")
    assert set(exported("host0")) == {
        "retransmit",
        "out_of_sequence",
        "receiver_not_ready",
        "retry_exceeded",
        "discard",
    }
    assert exported("host0")["receiver_not_ready"] == exported("host1")["receiver_not_ready"] == 0
    [device] = admins[0].devices()
    assert device.rdma_counters is not None
    assert device.rdma_counters.driver == "rxe"
    assert device.rdma_counters.recent["retransmit"] == device.rdma_events["retransmit"] > 0
    assert admins[0].status().rdma_recent["retransmit"] > 0

    fabric.link(0, "down")
    fabric.link(0, "up")
    wait_until(lambda: {"down", "up"} <= admins[0].devices()[0].changes.keys(), "the port's events are counted")
    assert admins[0].status().device_changes["down"] >= 1
