# SPDX-License-Identifier: Apache-2.0
"""Bandwidth bursts between real daemons: what they find out, and that nothing is sent that is not wanted."""

import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from dqplbd.admin.client import AdminClient
from dqplbd.client import Context
from dqplbd.lab.cluster import Cluster, HostSpec
from dqplbd.peers.cards import PROTOCOL, BurstRequest, Hello, HelloDevice
from dqplbd.peers.link import PeerClient, Refused
from dqplbd.probing.burst_traffic import CLIENT_NAME, BurstError, Endpoint, receive_burst

MakeCluster = Callable[..., Cluster]
WaitUntil = Callable[[Callable[[], Any], str], Any]
MBIT = 10**6
EPOCH = "00000000000000aa"
WINDOWS = 15
"""Measurement windows of 0.2 s, in which a burst would have come."""


def bursts(**over: Any) -> dict[str, Any]:
    # Busy is what tests of other things are about; here a loaded machine or a rate guessed wrong is no reason to wait.
    return {"probing": {"active_bandwidth": {"enabled": True, "interval_s": 1, "max_utilisation": 1.0, **over}}}


def fabric(rate: str, link: dict[str, Any], **over: Any) -> dict[str, Any]:
    """Two hosts whose devices claim ``rate``, with an emulated link between them."""
    return {
        **bursts(**over),
        "devices": [{"name": "tcp0", "address": "127.0.0.1", "rate_bps": rate}],
        "emulation": {"links": [link]},
    }


def start(make_cluster: MakeCluster, config: dict[str, Any], **second: Any) -> Cluster:
    cluster = make_cluster([HostSpec("a"), HostSpec("b", second)], config, start=False)
    for host in cluster:
        device = host.config["devices"][0]
        host.write_config({"devices": [{**device, "address": host.address}]})
    return cluster.start()


def path(cluster: Cluster, one: str = "a", other: str = "b") -> Any:
    found = [p for p in AdminClient(cluster[one].admin).paths() if p.peer == other]
    return found[0] if found else None


def measured(cluster: Cluster) -> Callable[[], Any]:
    def look() -> Any:
        found = path(cluster)
        return found if found is not None and found.estimate.windows else None

    return look


def let_windows_pass(cluster: Cluster, wait_until: WaitUntil) -> None:
    before = path(cluster).estimate.windows
    wait_until(lambda: path(cluster).estimate.windows >= before + WINDOWS, f"{WINDOWS} windows have passed")


def test_a_rate_guessed_too_low_rises_to_that_of_the_link(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    rate = 100 * MBIT
    config = fabric("10Mbit/s", {"delay_ns": "10ms", "rate_bps": rate})
    # Goodput of all traffic is then looked at every half second, of which bursts fill a small part.
    config["probing"]["window_s"] = 2
    cluster = start(make_cluster, config)
    first = wait_until(measured(cluster), "b is measured")
    if not first.estimate.bursts_ok:
        assert first.profile.rate_bps <= 10 * MBIT
    found = wait_until(
        lambda: (seen := path(cluster)).profile.rate_bps >= 0.7 * rate and seen, "the profile has most of the link"
    )
    assert found.profile.limits["rate_bps"] == "goodput"
    assert found.estimate.goodput_source == "burst"
    assert 0.7 * rate <= found.estimate.burst_bps <= rate
    assert found.estimate.goodput_bps == found.estimate.burst_bps
    assert found.estimate.bursts_ok >= 2
    notes = {step.name: step.note for step in AdminClient(cluster["a"].admin).explain("b")[0].steps}
    assert "from a bandwidth burst" in notes["goodput_bps"]


def test_a_rate_guessed_too_high_falls_to_what_gets_through(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = start(make_cluster, fabric("400Gbit/s", {"delay_ns": "500us"}))
    first = wait_until(measured(cluster), "b is measured")
    if first.estimate.bursts_ok < 2:
        assert first.profile.limits["rate_bps"] in ("local", "peer")
    found = wait_until(
        lambda: (seen := path(cluster)).profile.limits["rate_bps"] in ("path", "goodput") and seen,
        "the profile believes the bursts",
    )
    assert found.profile.rate_bps < 300_000 * MBIT  # no loopback of this age carries that
    assert found.estimate.bursts_ok >= 2


def test_nothing_is_sent_to_a_host_that_takes_no_bursts(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    link = {"delay_ns": "1ms", "rate_bps": 100 * MBIT}
    cluster = start(
        make_cluster, fabric("100Mbit/s", link), probing={"active_bandwidth": {"enabled": False, "interval_s": 1}}
    )
    wait_until(lambda: measured(cluster)() and path(cluster).estimate.bursts_refused >= 2, "b refuses twice")
    seen = path(cluster)
    assert (seen.estimate.burst_bytes, seen.estimate.bursts_ok, seen.live.tx_bytes) == (0, 0, 0)
    assert seen.estimate.burst_bps is None
    said = [line for line in cluster["a"].log().splitlines() if "active_bandwidth.enabled is false there" in line]
    assert len(said) == 1, "it is logged once"
    assert AdminClient(cluster["b"].admin).clients() == []
    # A reload lets b take them, and another one makes a send none.
    cluster["b"].write_config(bursts())
    cluster["b"].reload()
    wait_until(lambda: path(cluster).estimate.bursts_ok >= 1, "a burst to b")
    cluster["a"].write_config({"probing": {"active_bandwidth": {"enabled": False}}})
    cluster["a"].reload()
    wait_until(lambda: AdminClient(cluster["a"].admin).clients() == [], "no burst is under way")
    before = path(cluster).estimate
    assert before.rtt_ns is not None, "round trips are not forgotten for that"
    let_windows_pass(cluster, wait_until)
    after = path(cluster).estimate
    assert (after.bursts_ok, after.burst_bytes) == (before.bursts_ok, before.burst_bytes)
    assert after.burst_bps is None, "results are forgotten with the bursts"


def test_bursts_are_off_unless_configured(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a", "b"])
    wait_until(measured(cluster), "b is measured")
    let_windows_pass(cluster, wait_until)
    seen = path(cluster).estimate
    assert seen.bursts_ok + seen.bursts_busy + seen.bursts_refused + seen.bursts_failed + seen.burst_bytes == 0


def test_the_daily_budget_holds(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    budget = 2**20  # four of the shortest bursts
    link = {"delay_ns": "1ms", "rate_bps": 100 * MBIT}
    cluster = start(make_cluster, fabric("100Mbit/s", link, daily_bytes=budget))
    wait_until(lambda: measured(cluster)() and path(cluster).estimate.burst_bytes >= budget, "the budget is spent")
    let_windows_pass(cluster, wait_until)
    seen = path(cluster)
    assert seen.estimate.burst_bytes == budget
    assert budget <= seen.live.tx_bytes <= 1.01 * budget, "beside the bursts there is next to nothing"


# --------------------------------------------------------------------------------------------------------------- leases


def request(to_epoch: str, **changes: Any) -> BurstRequest:
    values: dict[str, Any] = {
        "protocol": PROTOCOL.max,
        "from_host_id": "stranger",
        "from_epoch": EPOCH,
        "to_epoch": to_epoch,
        "rail": 0,
        "messages": 8,
        "message_bytes": 65536,
    }
    return BurstRequest(**{**values, **changes})


def hello() -> Hello:
    device = HelloDevice(name="tcp0", rail=0, provider="tcp", rate_bps=10**9, mtu_bytes=1500)
    return Hello(protocol=PROTOCOL, host_id="stranger", epoch=EPOCH, api_port=9, devices=(device,))


@pytest.fixture
async def client() -> AsyncIterator[PeerClient]:
    one = PeerClient("127.0.0.1", 10.0)
    yield one
    await one.close()


async def refusal(client: PeerClient, address: str, what: BurstRequest) -> tuple[str, str]:
    with pytest.raises(Refused) as caught:
        await client.burst(address, what)
    return caught.value.code, caught.value.text


async def test_one_lease_at_a_time_and_only_to_known_hosts(make_cluster: MakeCluster, client: PeerClient) -> None:
    cluster = make_cluster(["a"], {**bursts(daily_bytes="2MiB"), "clients": {"max_clients": 1}})
    host = cluster["a"]
    admin = AdminClient(host.admin)
    epoch = admin.status().epoch
    assert await refusal(client, host.api, request(EPOCH)) == (
        "epoch",
        f"{host.api} refuses: the request is for epoch {EPOCH} of a, which has {epoch} now",
    )
    assert (await refusal(client, host.api, request(epoch)))[0] == "unknown"
    await client.hello(host.api, hello())
    for wrong, code, text in (
        ({"protocol": 77}, "version", "77"),
        ({"rail": 3}, "forbidden", "rail 3"),
        ({"messages": 64, "message_bytes": 2**24}, "forbidden", "at most"),
        ({"messages": 64}, "busy", "2097152 bytes are left"),
    ):
        found = await refusal(client, host.api, request(epoch, **wrong))
        assert found[0] == code
        assert text in found[1]
    assert admin.clients() == []
    lease = await client.burst(host.api, request(epoch))
    assert len(bytes.fromhex(lease.handle)) == 128
    assert (await refusal(client, host.api, request(epoch)))[0] == "busy"
    # The daemon's own client is shown, and takes nobody's place.
    assert [(one.name, one.pid) for one in admin.clients()] == [(CLIENT_NAME, host.pid)]
    with Context(host.client_socket):
        assert len(admin.clients()) == 2
    # Nobody comes for the lease; the daemon ends as if it were not there.
    assert host.stop() == 0


def test_a_lease_ends_by_itself_and_when_told_to(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    host = make_cluster(["a"])["a"]
    handles: list[bytes] = []
    stop = threading.Event()
    short = Endpoint(host.client_socket, "tcp0", 1, 8, 4096, 0.2)
    with pytest.raises(BurstError, match=r"the sender's connect: not done within 0\.2 s"):
        receive_burst(short, handles.append, stop)
    stop.set()
    with pytest.raises(BurstError, match="stopped"):
        receive_burst(Endpoint(host.client_socket, "tcp0", 1, 8, 4096, 3600), handles.append, stop)
    assert [len(handle) for handle in handles] == [128, 128]
    with pytest.raises(BurstError, match="device eth7 is not open"):
        receive_burst(Endpoint(host.client_socket, "eth7", 1, 8, 4096, 3600), handles.append, stop)
    wait_until(lambda: AdminClient(host.admin).clients() == [], "all are gone")
