# SPDX-License-Identifier: Apache-2.0
"""The checks of doctor: each is silent on a healthy host, and each finds its trouble."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dqplbd.admin.model import (
    Client,
    ConfigProblem,
    ConfigState,
    Device,
    Live,
    PathClass,
    Peer,
    PeerDevice,
    ProberStats,
    RdmaCounters,
)
from dqplbd.cli.checks import CHECKS, DaemonFacts, Facts, HostFacts, Interface, RdmaDevice, run_checks
from dqplbd.cli.rdma_checks import RDMA_CHECKS, RDMA_HOST_CHECKS

if TYPE_CHECKING:
    from tests.unit.conftest import SampleView

HEALTHY = HostFacts(
    interfaces=[Interface("eth0", "10.0.0.0/24", 0), Interface("eth1", "10.0.1.0/24", 0)],
    congestion_controls=["reno", "cubic"],
    version="1.2.3",
)


def facts(view: "SampleView", host: HostFacts = HEALTHY, **changes: Any) -> Facts:
    daemon = DaemonFacts(
        view.status(), view.devices(), view.peers(), view.paths(), view.clients(), view.config_view().config
    )
    return Facts(host, replace(daemon, **changes))


def test_a_healthy_host_has_no_complaint(view: "SampleView") -> None:
    findings = run_checks(facts(view))
    assert {one.level for one in findings} == {"ok", "skip"}
    assert [one.check for one in findings] == list(CHECKS)
    assert not any(one.fix for one in findings)


def test_without_a_daemon_the_host_is_checked_all_the_same() -> None:
    findings = run_checks(Facts(HEALTHY, unreachable=("no daemon at /x", "start it")))
    assert [(one.check, one.level) for one in findings] == [
        ("reachable", "fail"),
        ("pyverbs", "skip"),
        ("libibverbs", "skip"),
        ("subnets", "ok"),
        ("congestion-control", "ok"),
    ]
    assert findings[0].fix == "start it"


def status(**changes: Any) -> Callable[["SampleView"], Facts]:
    return lambda view: facts(view, status=view.status().model_copy(update=changes))


def process(**changes: Any) -> Callable[["SampleView"], Facts]:
    return lambda view: status(process=view.status().process.model_copy(update=changes))(view)


def engine(**changes: Any) -> Callable[["SampleView"], Facts]:
    return lambda view: status(engine=view.status().engine.model_copy(update=changes))(view)


def paths(*more: Callable[["SampleView"], Any]) -> Callable[["SampleView"], Facts]:
    return lambda view: facts(view, paths=[*view.paths(), *(make(view) for make in more)])


def mismatched(view: "SampleView") -> Any:
    path = view.path("odd1", "tcp0", PathClass.RACK)
    found = path.classification.model_copy(
        update={"mismatch": True, "labels_class": PathClass.RACK, "rtt_class": PathClass.ZONE}
    )
    return path.model_copy(update={"classification": found})


def bound(view: "SampleView") -> Any:
    path = view.path("odd1", "tcp0", PathClass.REGION)
    return path.model_copy(
        update={"profile": path.profile.model_copy(update={"window_bytes": 131072, "limited_by": "pinned"})}
    )


def rdma(view: "SampleView", **counters: Any) -> Device:
    return view.device("mlx5_0", 0, provider="verbs", mtu_bytes=9000, rdma_counters=RdmaCounters(**counters))


def peer(**values: Any) -> Callable[["SampleView"], Facts]:
    return lambda view: facts(view, peers=[*view.peers(), Peer(**{"source": "static", **values})])


TROUBLE: list[tuple[str, str, str, Callable[["SampleView"], Facts]]] = [
    ("state", "warn", "tcp1 is down", status(state="degraded", reasons=["tcp1 is down"])),
    ("state", "warn", "draining", status(state="draining")),
    ("heartbeat", "fail", "7.0 s", engine(heartbeat_age_seconds=7.0)),
    ("version", "warn", "9.9", status(version="9.9")),
    (
        "configuration",
        "warn",
        "x.yaml:3: profiles.gain",
        status(
            config=ConfigState(
                file="x.yaml",
                loaded_unix_seconds=0,
                last_reload_ok=False,
                problems=[ConfigProblem(file="x.yaml", line=3, key="profiles.gain", problem="bad", expected="good")],
            )
        ),
    ),
    (
        "configuration",
        "warn",
        "devices",
        status(config=ConfigState(loaded_unix_seconds=0, restart_needed=["devices"])),
    ),
    ("exposure", "warn", "0.0.0.0:9471", lambda v: facts(v, config={"metrics": {"address": "0.0.0.0", "port": 9471}})),
    ("exposure", "warn", "insecure", lambda v: facts(v, config={"peers": {"insecure": True}})),
    ("file-descriptors", "fail", "900 of 1000", process(open_fds=900, nofile_limit=1000)),
    ("file-descriptors", "warn", "1024", process(nofile_limit=1024)),
    (
        "memlock",
        "fail",
        "64KiB",
        lambda v: facts(
            v,
            devices=[v.device("mlx5_0", 0, provider="verbs")],
            status=process(memlock_limit_bytes=65536)(v).daemon.status,  # type: ignore[union-attr]
        ),
    ),
    ("cpus", "warn", "one CPU", process(cpus=1)),
    ("devices", "fail", "no carrier", lambda v: facts(v, devices=[v.device("tcp0", 0, up=False, error="no carrier")])),
    ("devices", "warn", "tcp0 (5 times)", lambda v: facts(v, devices=[v.device("tcp0", 0, downs=5)])),
    ("devices", "fail", "no device", lambda v: facts(v, devices=[])),
    (
        "addresses",
        "warn",
        "other machines cannot reach tcp0 (127.0.0.1:4000), yet far1 is one",
        lambda v: facts(
            v,
            devices=[v.device("tcp0", 0, address="127.0.0.1:4000")],
            status=v.status().model_copy(update={"api_address": "10.0.0.5:7471"}),
            peers=[Peer(host_id="far1", source="static", state="up", address="10.0.0.7:7471")],
        ),
    ),
    (
        "addresses",
        "warn",
        "the host-to-host API (127.0.0.1:7471)",
        lambda v: facts(
            v,
            devices=[v.device("tcp0", 0, address="10.0.0.5:4000")],
            status=v.status().model_copy(update={"api_address": "127.0.0.1:7471"}),
            peers=[Peer(host_id="far1", source="learned", state="up", address="10.0.0.7:7471")],
        ),
    ),
    (
        "rdma-devices",
        "warn",
        "mlx5_0 is in sysfs, but cannot be opened: EPERM",
        lambda v: facts(v, replace(HEALTHY, rdma=[RdmaDevice("mlx5_0", "EPERM")])),
    ),
    (
        "rdma-devices",
        "warn",
        "mlx5_0 is there, but",
        lambda v: facts(v, replace(HEALTHY, rdma=[RdmaDevice("mlx5_0", None)])),
    ),
    (
        "mtu",
        "warn",
        "tcp0 9000 against peer0/tcp0 65536",
        lambda v: facts(v, devices=[v.device("tcp0", 0, mtu_bytes=9000)]),
    ),
    (
        "mtu",
        "warn",
        "small MTU: tcp0 (1500)",
        lambda v: facts(v, devices=[v.device("tcp0", 0, mtu_bytes=1500, address="10.1.2.3:4000")], paths=[]),
    ),
    ("peers", "warn", "far is down: timed out", peer(host_id="far", state="down", reason="timed out", failures=4)),
    (
        "peers",
        "fail",
        "odd is refused: version 3 against 1",
        peer(host_id="odd", state="refused", reason="version 3 against 1"),
    ),
    (
        "rails",
        "warn",
        "odd has rails [0, 1]",
        peer(
            host_id="odd",
            state="up",
            devices=[PeerDevice(name="a", rail=0, provider="tcp"), PeerDevice(name="b", rail=1, provider="tcp")],
        ),
    ),
    ("class-mismatch", "warn", "odd1 (labels rack, RTT zone)", paths(mismatched)),
    ("class-unknown", "warn", "odd1", paths(lambda v: v.path("odd1", "tcp0", PathClass.UNKNOWN))),
    ("probe-loss", "warn", "by tcp0 100%", paths(lambda v: v.path("odd1", "tcp0", PathClass.RACK, loss_ratio=0.9999))),
    ("probe-loss", "warn", "odd1 by tcp0 5%", paths(lambda v: v.path("odd1", "tcp0", PathClass.RACK, loss_ratio=0.05))),
    (
        "probe-silence",
        "fail",
        "odd1",
        paths(lambda v: v.path("odd1", "tcp0", PathClass.RACK, probes_ok=0, probes_timeout=10, rtt_ns=None)),
    ),
    (
        "probe-silence",
        "fail",
        "no probe could be sent to odd1 by tcp0",
        paths(lambda v: v.path("odd1", "tcp0", PathClass.RACK, probes_ok=0, probes_send_error=10, rtt_ns=None)),
    ),
    ("prober", "fail", "tcp0 has no prober", lambda v: facts(v, devices=[v.device("tcp0", 0, prober=None)])),
    (
        "prober",
        "warn",
        "12 samples",
        lambda v: facts(v, devices=[v.device("tcp0", 0, prober=ProberStats(time_source="x", samples_dropped=12))]),
    ),
    (
        "prober",
        "warn",
        "wrong token",
        lambda v: facts(v, devices=[v.device("tcp0", 0, prober=ProberStats(time_source="x", refused_token=3))]),
    ),
    (
        "time-stamps",
        "warn",
        "probes of tcp0",
        lambda v: facts(v, devices=[v.device("tcp0", 0, prober=ProberStats(time_source="software"))]),
    ),
    ("emulation", "warn", "1 emulated link", lambda v: facts(v, config={"emulation": {"links": [{"peer": "*"}]}})),
    (
        "client-limits",
        "warn",
        "big has 95MiB of 100MiB memory",
        lambda v: facts(
            v,
            clients=[Client(client_id=1, name="big", memory_bytes=95 << 20, max_memory_bytes=100 << 20)],
        ),
    ),
    (
        "client-limits",
        "warn",
        "many has 99 of 100 flows",
        lambda v: facts(v, clients=[Client(client_id=1, name="many", flows=99, max_flows=100)]),
    ),
    (
        "rdma-events",
        "warn",
        "mlx5_0, in the last 5 minutes: packets are lost (40 retransmit)",
        lambda v: facts(
            v,
            devices=[
                rdma(v, recent={"retransmit": 40, "ecn_marked": 0}, recent_seconds=300, age_seconds=2),
            ],
        ),
    ),
    (
        "rdma-events",
        "warn",
        "last read 500 s ago: /sys/class/infiniband/mlx5_0",
        lambda v: facts(v, devices=[rdma(v, age_seconds=500, gone="/sys/class/infiniband/mlx5_0: no such file")]),
    ),
    ("rdma-events", "warn", "counters were never read", lambda v: facts(v, devices=[rdma(v)])),
    ("latency-bound", "warn", "128KiB each 240us is at most 4.369Gbit/s", paths(bound)),
    (
        "vc-failures",
        "fail",
        "odd1 by tcp0 failed: reset",
        paths(lambda v: v.path("odd1", "tcp0", PathClass.RACK, live=Live(state="failed", reason="reset"))),
    ),
    ("stalls", "warn", "odd1 (2)", paths(lambda v: v.path("odd1", "tcp0", PathClass.RACK, live=Live(stalls=2)))),
    (
        "receive-slots",
        "warn",
        "odd1 (9)",
        paths(lambda v: v.path("odd1", "tcp0", PathClass.RACK, live=Live(receives_waiting=9))),
    ),
    ("client-socket", "warn", "EACCES", lambda v: facts(v, replace(HEALTHY, client_socket_error="EACCES"))),
    ("clients-cut", "warn", "3 clients", engine(clients_cut=3)),
    (
        "subnets",
        "warn",
        "eth0, eth1 are in one subnet",
        lambda v: facts(
            v, replace(HEALTHY, interfaces=[Interface("eth0", "10.0.0.0/24", 0), Interface("eth1", "10.0.0.0/24", 1)])
        ),
    ),
    ("congestion-control", "warn", "bbr", lambda v: facts(v, replace(HEALTHY, congestion_controls=["bbr"]))),
]


@pytest.mark.parametrize(("check", "level", "text", "make"), TROUBLE, ids=[f"{t[0]}-{t[2][:20]}" for t in TROUBLE])
def test_trouble_is_found_and_nothing_else(
    view: "SampleView", check: str, level: str, text: str, make: Callable[["SampleView"], Facts]
) -> None:
    complaints = [one for one in run_checks(make(view)) if one.level in ("warn", "fail")]
    assert [(one.check, one.level) for one in complaints] == [(check, level)]
    assert text in complaints[0].summary
    assert complaints[0].fix


def test_every_check_has_a_trouble_here() -> None:
    elsewhere = {*RDMA_CHECKS, *RDMA_HOST_CHECKS}  # test_rdma_checks.py
    assert {trouble[0] for trouble in TROUBLE} | elsewhere == set(CHECKS) - {"reachable"}


def test_what_rdma_devices_counted_is_told_when_all_is_well(view: "SampleView") -> None:
    device = rdma(view, age_seconds=1, recent={"retransmit": 1}).model_copy(update={"rdma_events": {"retransmit": 7}})
    found = {one.check: one for one in run_checks(facts(view, devices=[device]))}
    assert found["rdma-events"].level == "ok"
    assert "mlx5_0 7 retransmit" in found["rdma-events"].summary


def test_guarded_subnets_are_no_trouble(view: "SampleView") -> None:
    guarded = [Interface("eth0", "10.0.0.0/24", 1), Interface("eth1", "10.0.0.0/24", 1)]
    findings = {one.check: one.level for one in run_checks(facts(view, replace(HEALTHY, interfaces=guarded)))}
    assert findings["subnets"] == "ok"


def test_many_troubles_of_a_kind_are_summed_up(view: "SampleView") -> None:
    down = [Peer(host_id=f"down{i}", source="static", state="down") for i in range(100)]
    found = [one for one in run_checks(facts(view, peers=[*view.peers(), *down])) if one.level == "warn"]
    assert len(found) == 5
    assert "96 more" in found[-1].summary
