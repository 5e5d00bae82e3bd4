# SPDX-License-Identifier: Apache-2.0
"""What other machines may send to the host-to-host API of a running daemon: it answers, and goes on."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from dqplbd.admin.client import AdminClient
from dqplbd.client import Context
from dqplbd.lab.cluster import Cluster
from dqplbd.peers.cards import FEATURES, PROTOCOL, Hello, HelloDevice, Limits, VcOffer, VcRequest
from dqplbd.peers.link import PeerClient, Refused

MakeCluster = Callable[..., Cluster]
WaitUntil = Callable[[Callable[[], Any], str], Any]
EPOCH = "00000000000000aa"
LIMITS = Limits(qps=2, depth=16, credits=8, segment_bytes=65536)


def hello(host_id: str = "stranger", epoch: str = EPOCH, **changes: Any) -> Hello:
    device = HelloDevice(
        name="tcp0", rail=0, provider="tcp", rate_bps=10**9, mtu_bytes=1500, probe_endpoint="00ff", probe_token=EPOCH
    )
    values: dict[str, Any] = {
        "protocol": PROTOCOL,
        "host_id": host_id,
        "epoch": epoch,
        "api_port": 9,
        "devices": (device,),
    }
    return Hello(**{**values, **changes})


def request(to_epoch: str, **changes: Any) -> VcRequest:
    values: dict[str, Any] = {
        "protocol": PROTOCOL.max,
        "from_host_id": "stranger",
        "from_epoch": EPOCH,
        "to_epoch": to_epoch,
        "attempt": "1" * 16,
        "features": FEATURES,
        "required": (),
        "vcs": (offer(),),
    }
    return VcRequest(**{**values, **changes})


def offer(**changes: Any) -> VcOffer:
    values: dict[str, Any] = {
        "rail": 0,
        "device": "tcp0",
        "mtu_bytes": 1500,
        "limits": LIMITS,
        "endpoints": ("00", "11", "22"),
    }
    return VcOffer(**{**values, **changes})


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> Cluster:
    return make_cluster(["a"])


@pytest.fixture
async def client() -> AsyncIterator[PeerClient]:
    one = PeerClient("127.0.0.1", 10.0)
    yield one
    await one.close()


def status(cluster: Cluster) -> Any:
    return AdminClient(cluster["a"].admin).status()


async def test_a_stranger_is_learned_and_does_no_harm(cluster: Cluster, client: PeerClient) -> None:
    own = await client.hello(cluster["a"].api, hello())
    assert own.host_id == "a"
    peer = next(peer for peer in AdminClient(cluster["a"].admin).peers() if peer.host_id == "stranger")
    assert (peer.source, peer.address) == ("learned", "127.0.0.1:9")
    assert status(cluster).state == "ready"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"protocol": 99}, "version"),
        ({"features": ()}, "version"),
        ({"required": ("time-travel",)}, "version"),
        ({"from_host_id": "somebody-else"}, "unknown"),
        ({"from_epoch": "0" * 16}, "unknown"),
        ({"to_epoch": "0" * 16}, "epoch"),
    ],
)
async def test_a_request_that_does_not_fit_is_refused(
    cluster: Cluster, client: PeerClient, changes: dict[str, Any], code: str
) -> None:
    own = await client.hello(cluster["a"].api, hello())
    with pytest.raises(Refused) as caught:
        await client.vcs(cluster["a"].api, request(**{"to_epoch": own.epoch, **changes}))
    assert caught.value.code == code
    if code == "epoch":
        assert caught.value.epoch == own.epoch


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"rail": 7}, "no device on rail 7"),
        ({"endpoints": ("00", "11")}, "2 endpoints for 2 data QPs"),
        ({"endpoints": ("ff" * 96,) * 3}, ""),
        (
            {"limits": Limits(qps=128, depth=65536, credits=65536, segment_bytes=16 << 20), "endpoints": ("ab",) * 129},
            "",
        ),
    ],
)
async def test_an_offer_that_cannot_be_met_says_why(
    cluster: Cluster, client: PeerClient, changes: dict[str, Any], what: str
) -> None:
    own = await client.hello(cluster["a"].api, hello())
    answer = await client.vcs(cluster["a"].api, request(own.epoch, vcs=(offer(**changes),)))
    assert answer.vcs[0].error
    assert what in answer.vcs[0].error
    assert status(cluster).engine.vcs == 0


async def test_vcs_that_nobody_dials_are_bounded(cluster: Cluster, client: PeerClient) -> None:
    own = await client.hello(cluster["a"].api, hello())
    chance = random.Random(1)
    for _ in range(60):
        offers = tuple(
            offer(endpoints=tuple(chance.randbytes(chance.randint(1, 96)).hex() for _ in range(3)), existing=100)
            for _ in range(8)
        )
        try:
            await client.vcs(cluster["a"].api, request(own.epoch, vcs=offers))
        except Refused:
            pass
    assert status(cluster).engine.vcs <= 8
    assert status(cluster).process.open_fds < 300


async def test_any_json_gets_an_answer_and_leaves_the_daemon_well(cluster: Cluster) -> None:
    chance = random.Random(7)
    good = [json.loads(hello().model_dump_json()), json.loads(request(EPOCH).model_dump_json())]

    def spoil(value: Any) -> Any:
        if isinstance(value, dict) and value and chance.random() < 0.8:
            key = chance.choice(sorted(value))
            return {**value, key: spoil(value[key])}
        if isinstance(value, list) and value and chance.random() < 0.8:
            return [spoil(one) for one in value]
        return chance.choice([None, -1, 2**70, 1e300, "", "\ud800", "x" * 5000, [], {}, [[[]]], True, "ff" * 96])

    before = status(cluster)
    async with aiohttp.ClientSession() as session:
        for _ in range(400):
            body = json.dumps(spoil(chance.choice(good)))
            for path in ("hello", "vcs"):
                url = f"http://{cluster['a'].api}/v1/{path}"
                async with session.post(url, data=body) as response:
                    assert response.status != 500
                    await response.read()
    after = status(cluster)
    assert after.state == "ready"
    assert after.engine.vcs == 0
    assert after.process.open_fds <= before.process.open_fds + 8
    assert "Traceback" not in cluster["a"].log()


async def test_two_lives_of_one_name_in_turn_leave_one_path(cluster: Cluster, client: PeerClient) -> None:
    for number in range(50):
        await client.hello(cluster["a"].api, hello(epoch=f"{number + 1:016x}"))
    paths = AdminClient(cluster["a"].admin).paths()
    assert [path.peer_epoch for path in paths if path.peer == "stranger"] == [f"{50:016x}"]
    assert status(cluster).engine.paths == 2


async def test_workloads_do_not_notice(cluster: Cluster, client: PeerClient) -> None:
    own = await client.hello(cluster["a"].api, hello())
    with Context(cluster["a"].client_socket) as one, Context(cluster["a"].client_socket) as two:
        listener = two.listen()
        accepting, connecting = listener.accept(), one.connect(listener.handle)
        there, here = connecting.wait(30), accepting.wait(30)
        for number in range(20):
            await client.hello(cluster["a"].api, hello(f"h{number}", api_port=1000 + number))
            await client.vcs(cluster["a"].api, request(own.epoch, vcs=(offer(rail=5),)))
            source, target = one.allocate(1000), two.allocate(1000)
            receiving = here.recv(target)
            assert there.send(source).wait(30) == 1000
            assert receiving.wait(30).bytes == 1000
    live = next(path.live for path in AdminClient(cluster["a"].admin).paths() if path.peer == "a")
    assert live.failures == 0


async def test_a_learned_host_that_falls_silent_is_noticed(make_cluster: MakeCluster, client: PeerClient) -> None:
    cluster = make_cluster(["a", "b"], {"probing": {"timeout_s": 0.05}}, know=False)
    # It has the prober of b, which does not answer, as the token is not its own; and nobody answers its API.
    prober = (await client.hello(cluster["b"].api, hello())).devices[0].probe_endpoint
    device = hello().devices[0].model_copy(update={"probe_endpoint": prober})
    await client.hello(cluster["a"].api, hello(devices=(device,)))

    def state() -> str:
        return next(peer.state for peer in AdminClient(cluster["a"].admin).peers() if peer.host_id == "stranger")

    async with asyncio.timeout(30):
        while state() != "down":  # noqa: ASYNC110 - another process does not tell this one
            await asyncio.sleep(0.05)
