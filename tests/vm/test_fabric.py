# SPDX-License-Identifier: Apache-2.0
"""The fabric does what it says: packets cross the switch, delays and rates are true, queues can be seen."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyverbs.device import Context, get_device_list

from tests.vm.conftest import Connect, MakeFabric
from tests.vm.fabric import Fabric, FabricError, QueueRecorder
from tests.vm.verbs import ping_ns

TIMES = ("real", "simulated")
RunTool = Callable[..., str]
# Of what crosses the cable: RDMA, UDP, IP and Ethernet headers go with each 4096 bytes.
PAYLOAD = 4096 / 4170


def system_state() -> str:
    """Everything that a fabric changes."""
    commands = (
        "ip rule",
        "ip -br link",
        "ip route show table all",
        "ip netns",
        "rdma link",
        "sysctl -a --pattern net.ipv",
    )
    return "\n".join(
        subprocess.run(command.split(), capture_output=True, text=True, check=True).stdout for command in commands
    )


def test_devices_are_there_and_go() -> None:
    before = system_state()
    with Fabric(3, 2) as fabric:
        assert sorted(device.name.decode() for device in get_device_list()) == sorted(p.device for p in fabric.ports)
        assert system_state() != before
    assert get_device_list() == []
    assert system_state() == before


def test_a_fabric_made_by_halves_is_removed() -> None:
    before = system_state()
    with pytest.raises(FabricError, match="failed"):
        Fabric(2, mtu=[9000, 100_000]).make()
    assert system_state() == before


def test_what_is_there_already_is_left_alone() -> None:
    subprocess.run(["ip", "link", "add", "h1", "type", "dummy"], check=True)
    try:
        before = system_state()
        with pytest.raises(FabricError, match="h1"):
            Fabric(2).make()
        assert system_state() == before
    finally:
        subprocess.run(["ip", "link", "delete", "h1"], check=True)


def test_packets_cross_the_switch(make_fabric: MakeFabric, connect: Connect) -> None:
    fabric = make_fabric(2)
    lo = Path("/sys/class/net/lo/statistics/tx_bytes")
    before = fabric.sent_bytes(0), int(lo.read_text())
    near, far = connect("rxe0", "rxe1")
    near.write(far, 1 << 20)
    near.sent()
    assert fabric.sent_bytes(0) - before[0] > 1 << 20
    assert int(lo.read_text()) == before[1]


@pytest.mark.parametrize("size", [0, 1, 4096, 65_536, 1 << 20])
def test_data_arrives_with_immediate(make_fabric: MakeFabric, connect: Connect, size: int) -> None:
    make_fabric(2)
    near, far = connect("rxe0", "rxe1")
    content = bytes(i * 7 % 251 for i in range(size))
    if size:
        near.memory.write(content, size)
    far.receive()
    near.write(far, size, immediate=77)
    near.sent()
    done = far.received()[0]
    assert (done.imm_data, done.byte_len) == (77, size)
    assert far.memory.read(size, 0) == content


def test_delays_by_place_are_true(make_fabric: MakeFabric, connect: Connect, simulated: bool) -> None:
    fabric = make_fabric(5)
    unit = 1000 if simulated else 10_000  # of work, the machine adds some 100 us a round trip where time is real
    one_way = {(0, 1): 4 * unit, (0, 2): 28 * unit, (0, 3): 60 * unit, (0, 4): 120 * unit}

    def between(one: int, other: int) -> int:
        return one_way.get((min(one, other), max(one, other)), 7 * unit)

    pairs = {pair: connect(f"rxe{pair[0]}", f"rxe{pair[1]}") for pair in [*one_way, (2, 4)]}
    before = {pair: ping_ns(*ends)[0] for pair, ends in pairs.items()}
    fabric.set_delays(between)
    for pair, ends in pairs.items():
        rtt = ping_ns(*ends)[0]
        added = rtt - before[pair]
        expected = 2 * between(*pair)
        if simulated:
            assert abs(added - expected) <= 3000, f"{pair}: {added} ns were added, not {expected}"
        else:
            assert rtt >= expected, f"{pair}: {rtt} ns, less than {expected}"
            assert added <= expected * 1.5 + 2_000_000, f"{pair}: {added} ns were added, not {expected}"


def test_delays_change_and_go(make_fabric: MakeFabric, connect: Connect) -> None:
    fabric = make_fabric(3)
    near, far = connect("rxe0", "rxe1")
    fabric.set_delays(lambda a, b: 20_000_000 if b == 1 else 1_000_000)
    assert ping_ns(near, far, 3)[0] > 20_000_000
    fabric.set_delays(lambda a, b: 0)
    assert ping_ns(near, far, 3)[0] < 20_000_000


@pytest.mark.parametrize("bits", [100_000_000, 1_000_000_000])
def test_rates_are_true(make_fabric: MakeFabric, connect: Connect, simulated: bool, bits: int) -> None:
    fabric = make_fabric(2)
    fabric.set_rate(1, bits)
    size = bits // 8 // 10  # a tenth of a second
    near, far = connect("rxe0", "rxe1", size=size)
    begin = time.perf_counter()
    near.write(far, size)
    near.sent()
    rate = size * 8 / (time.perf_counter() - begin)
    assert rate < bits
    if simulated:  # a busy machine may be slower in real time
        assert rate > 0.97 * bits * PAYLOAD


@pytest.mark.parametrize("bits", [36_000_000_000, 100_000_000_000])
def test_links_of_a_hundred_gigabits(make_fabric: MakeFabric, connect: Connect, simulated: bool, bits: int) -> None:
    if not simulated:
        pytest.skip("no machine carries that in real time")
    fabric = make_fabric(3)
    fabric.set_delays(lambda a, b: 4_000)
    fabric.set_rates(dict.fromkeys(range(3), bits))
    senders = [connect(f"rxe{host}", "rxe0", size=1 << 24) for host in (1, 2)]
    with fabric.queue(0) as queue, QueueRecorder(queue, 20e-6) as recorder:
        begin = time.perf_counter()
        for near, far in senders:
            near.write(far, 1 << 24)
        for near, _ in senders:
            near.sent()
        seconds = time.perf_counter() - begin
    assert 0.97 * bits * PAYLOAD < 2 * (1 << 24) * 8 / seconds < bits
    # Each sender has at most 128 packets under way, of 4170 bytes on the cable.
    assert 128 * 4170 < recorder.peak_bytes <= 2 * 128 * 4200
    assert recorder.samples[-1][1].drops == 0


def test_a_host_sends_at_its_rate_to_all_together(make_fabric: MakeFabric, connect: Connect, simulated: bool) -> None:
    fabric = make_fabric(3)
    bits = 400_000_000
    fabric.set_host_rate(0, bits)
    fabric.set_delay(0, 1_000_000)
    size = 2 << 20
    pairs = [connect("rxe0", f"rxe{host}", size=size) for host in (1, 2)]
    begin = time.perf_counter()
    for near, far in pairs:
        near.write(far, size)
    for near, _ in pairs:
        near.sent()
    rate = 2 * size * 8 / (time.perf_counter() - begin)
    assert rate < bits
    if simulated:
        assert rate > 0.97 * bits * PAYLOAD


def test_the_queue_of_the_switch_is_seen(make_fabric: MakeFabric, connect: Connect) -> None:
    fabric = make_fabric(2)
    with pytest.raises(FabricError, match="has no queue"):
        fabric.queue(1)
    fabric.set_rate(1, 100_000_000)
    near, far = connect("rxe0", "rxe1")
    with fabric.queue(1) as queue, QueueRecorder(queue, 1e-3) as recorder:
        near.write(far, 1 << 20)
        near.sent()
    assert 100 * 4170 < recorder.peak_bytes <= 128 * 4200
    last = recorder.samples[-1][1]
    assert last.sent_bytes > 1 << 20
    assert (last.bytes, last.drops) == (0, 0)


def test_delays_do_not_show_in_the_queue(make_fabric: MakeFabric, connect: Connect) -> None:
    fabric = make_fabric(2)
    fabric.set_delays(lambda a, b: 5_000_000)
    fabric.set_host_rate(0, 5_000_000_000)
    fabric.set_rate(1, 10_000_000_000)
    near, far = connect("rxe0", "rxe1")
    with fabric.queue(1) as queue, QueueRecorder(queue, 1e-4) as recorder:
        near.write(far, 1 << 20)
        near.sent()
    # Half a megabyte travels at a time, and hardly a packet waits.
    assert recorder.peak_bytes < 20_000


@pytest.mark.parametrize("end", ["host", "switch"])
def test_a_link_goes_down_and_comes_up(make_fabric: MakeFabric, connect: Connect, run: RunTool, end: str) -> None:
    fabric = make_fabric(2)
    fabric.link(1, "down", end=end)
    assert "state DOWN" in run("rdma", "link", "show", "rxe1/1")
    fabric.link(1, "up", end=end)
    deadline = time.monotonic() + 10
    while "state ACTIVE" not in run("rdma", "link", "show", "rxe1/1"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    near, far = connect("rxe0", "rxe1")
    assert ping_ns(near, far, 3)[0] > 0


def test_mtu_of_hosts(make_fabric: MakeFabric) -> None:
    fabric = make_fabric(3, mtu=[9000, 1500, 9000])
    active = {}
    for device in get_device_list():
        name = device.name.decode()
        with Context(name=name) as context:
            active[name] = 128 << context.query_port(1).active_mtu
    assert active == {"rxe0": 4096, "rxe1": 1024, "rxe2": 4096}
    fabric.set_mtu(2, 2500)
    with Context(name="rxe2") as context:
        assert 128 << context.query_port(1).active_mtu == 2048
