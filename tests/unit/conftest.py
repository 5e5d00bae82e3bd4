# SPDX-License-Identifier: Apache-2.0
"""A daemon's view of itself, made of the models: what the admin API, the command line and the metrics are tested on."""

import asyncio
import copy
import threading
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import pytest

from dqplbd.admin.convert import explanation_view, profile_view
from dqplbd.admin.model import (
    AdminError,
    Classification,
    Client,
    ConfigProblem,
    ConfigState,
    ConfigView,
    Device,
    EngineStats,
    Estimate,
    Explanation,
    Live,
    Path,
    PathClass,
    PathProbe,
    Peer,
    PeerDevice,
    Place,
    ProbeReport,
    ProberStats,
    ProbeSample,
    ProcessStats,
    ReloadReport,
    ResetReport,
    Status,
)
from dqplbd.config import parse_config
from dqplbd.profiles.bdp import PathInputs, ProfilePolicy, compute_profile, explain_profile

RTT_NS = {
    PathClass.HOST: 4_000,
    PathClass.RACK: 8_000,
    PathClass.ZONE: 56_000,
    PathClass.BUILDING: 120_000,
    PathClass.REGION: 240_000,
    PathClass.UNKNOWN: 56_000,
}
EPOCH = "00ff00ff00ff00ff"


class SampleView:
    """Keeps what the daemon would know, open to change by a test."""

    def __init__(self, peers: int = 4, devices: int = 1) -> None:
        config = parse_config("")
        self.configuration = config
        self.policy = ProfilePolicy.from_config(config.profiles, config.transport)
        self.device_list = [self.device(f"tcp{i}", i) for i in range(devices)]
        classes = [PathClass.RACK, PathClass.ZONE, PathClass.BUILDING, PathClass.REGION]
        self.peer_list = [Peer(host_id="self", epoch=EPOCH, source="self", state="up")] + [
            Peer(
                host_id=f"peer{i}",
                epoch=EPOCH,
                source="static",
                address=f"127.0.0.1:{7471 + i}",
                state="up",
                devices=[
                    PeerDevice(name=one.name, rail=one.rail, provider="tcp", mtu_bytes=65536)
                    for one in self.device_list
                ],
            )
            for i in range(peers)
        ]
        self.path_list = [
            self.path(f"peer{i}", one.name, classes[i % 4], number=i * devices + one.rail)
            for i in range(peers)
            for one in self.device_list
        ]
        self.client_list = [
            Client(client_id=1, name="worker", pid=4321, uid=1000, flows=3, memory_bytes=1 << 20, requests=2)
        ]
        self.heartbeat_age_seconds = 0.1
        self.state: Any = "ready"
        self.reasons: list[str] = []
        self.config_state = ConfigState(file="/etc/dqplbd/dqplbd.yaml", loaded_unix_seconds=1.8e9)
        self.reload_problems: list[ConfigProblem] = []
        self.resets = 0
        self.client_socket = "/nowhere/client.sock"
        self.admin_socket = "/nowhere/admin.sock"

    @staticmethod
    def device(name: str, rail: int, **changes: Any) -> Device:
        values: dict[str, Any] = {
            "name": name,
            "provider": "tcp",
            "address": f"127.0.0.1:{9000 + rail}",
            "rail": rail,
            "up": True,
            "rate_bps": 10**10,
            "mtu_bytes": 65536,
            "prober": ProberStats(time_source="kernel", sent=100, acked=99, timeouts=1, answered=50),
        }
        return Device(**{**values, **changes})

    def path(
        self,
        peer: str,
        device: str,
        path_class: PathClass,
        *,
        number: int = 0,
        live: Live | None = None,
        **estimate: Any,
    ) -> Path:
        inputs = PathInputs(path_class, RTT_NS[path_class], 400 * 10**9, host_id=peer)
        seen: dict[str, Any] = {
            "probed": True,
            "rtt_ns": RTT_NS[path_class],
            "rtt_p99_ns": 2 * RTT_NS[path_class],
            "windows": 3,
            "probes_sent": 100,
            "probes_ok": 99,
            "probes_timeout": 1,
            "loss_ratio": 0.01,
        }
        return Path(
            peer=peer,
            peer_epoch=EPOCH,
            device=device,
            peer_device=device,
            rail=0,
            path_id=number,
            path_class=path_class,
            classification=Classification(path_class=path_class, source="rtt", rtt_class=path_class),
            estimate=Estimate(**{**seen, **estimate}),
            profile=profile_view(compute_profile(inputs, self.policy), grants=True),
            live=live or Live(tx_bytes=1000, rx_bytes=2000, tx_segments=10),
        )

    # ------------------------------------------------------------------------------------------------ DaemonView

    def status(self) -> Status:
        counts = dict.fromkeys(PathClass, 0)
        for path in self.path_list:
            counts[path.path_class] += 1
        return Status(
            host_id="self",
            epoch=EPOCH,
            version="1.2.3",
            state=self.state,
            reasons=self.reasons,
            started_unix_seconds=1.8e9,
            uptime_seconds=3700,
            location=Place(zone="z1", rack="r1"),
            admin_socket=self.admin_socket,
            client_socket=self.client_socket,
            api_address="127.0.0.1:7471",
            metrics_address="127.0.0.1:9471",
            config=self.config_state,
            engine=EngineStats(
                heartbeat_age_seconds=self.heartbeat_age_seconds, clients=1, flows=3, paths=len(self.path_list)
            ),
            process=ProcessStats(
                pid=1234,
                rss_bytes=50 << 20,
                cpu_seconds=1.5,
                open_fds=40,
                nofile_limit=65536,
                memlock_limit_bytes=None,
                threads=4,
                cpus=4,
            ),
            devices=len(self.device_list),
            devices_up=sum(device.up for device in self.device_list),
            peers=len(self.peer_list),
            peers_up=sum(peer.state == "up" for peer in self.peer_list),
            paths_by_class=counts,
            class_mismatches=sum(path.classification.mismatch for path in self.path_list),
        )

    def devices(self) -> list[Device]:
        return list(self.device_list)

    def peers(self) -> list[Peer]:
        return list(self.peer_list)

    def paths(self) -> list[Path]:
        return list(self.path_list)

    def explain(self, peer: str) -> list[Explanation]:
        found = [path for path in self.path_list if path.peer == peer]
        if not found:
            raise AdminError(f"there is no peer {peer!r}", "`dqplb peers` lists them", status=404)
        return [
            explanation_view(
                path,
                explain_profile(
                    PathInputs(path.path_class, path.estimate.rtt_ns, 400 * 10**9, host_id=peer), self.policy
                ),
            )
            for path in found
        ]

    def clients(self) -> list[Client]:
        return list(self.client_list)

    def config_view(self) -> ConfigView:
        return ConfigView(file=self.config_state.file, config=self.configuration.model_dump(mode="json"))

    async def probe(self, peer: str, count: int) -> ProbeReport:
        await asyncio.sleep(0)
        paths = [
            PathProbe(
                peer=peer,
                device=path.device,
                peer_device=path.peer_device,
                path_class=path.path_class,
                samples=[ProbeSample(result="ok", rtt_ns=path.estimate.rtt_ns)] * count,
                rtt_min_ns=path.estimate.rtt_ns,
                rtt_p50_ns=path.estimate.rtt_ns,
                rtt_max_ns=path.estimate.rtt_ns,
            )
            for path in self.path_list
            if path.peer == peer
        ]
        if not paths:
            raise AdminError(f"there is no peer {peer!r}", "`dqplb peers` lists them", status=404)
        return ProbeReport(peer=peer, count=count, paths=paths)

    async def reload(self) -> ReloadReport:
        await asyncio.sleep(0)
        problems = copy.copy(self.reload_problems)
        return ReloadReport(ok=not problems, problems=problems, changed=[] if problems else ["profiles"])

    def reset_peaks(self) -> ResetReport:
        self.resets += 1
        return ResetReport(paths=len(self.path_list))


@pytest.fixture
def view() -> SampleView:
    """A daemon with one device and a path of each class from rack to region."""
    return SampleView()


@pytest.fixture
def sample_view() -> type[SampleView]:
    """The class of :func:`view`, for other shapes."""
    return SampleView


@pytest.fixture
def admin_socket(view: SampleView, tmp_path: FilePath) -> Iterator[str]:
    """An admin server over ``view`` on a Unix socket, in a thread of its own as if it were another process."""
    from dqplbd.admin.server import AdminServer
    from dqplbd.config.models import AdminConfig

    path = str(tmp_path / "admin.sock")
    view.admin_socket = path
    loop = asyncio.new_event_loop()
    server = AdminServer(view, AdminConfig(socket=path))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
        yield path
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
