# SPDX-License-Identifier: Apache-2.0
"""The checks of doctor about RDMA devices: silent where all is well, and each finds its trouble."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dqplbd.admin.model import Device, DoctorFinding, GidCandidate, LeftOutPort, PeerDevice, RdmaView
from dqplbd.cli.checks import run_checks
from dqplbd.cli.facts import DaemonFacts, Facts, HostFacts, RdmaDevice, RouteFact
from dqplbd.cli.rdma_checks import RDMA_CHECKS, RDMA_HOST_CHECKS
from dqplbd.inventory.verbs import node_error

if TYPE_CHECKING:
    from tests.unit.conftest import SampleView

VIEW = RdmaView(
    rdma_device="mlx5_0",
    port=1,
    state="active",
    physical_state="link-up",
    link_layer="ethernet",
    rate_bps=400 * 10**9,
    active_mtu_bytes=4096,
    max_mtu_bytes=4096,
    traffic_class=104,
)
GID = GidCandidate(
    gid="::ffff:10.1.2.3", index=3, kind="roce_v2", netdev="eth0", score=217, in_use=True, reasons=["RoCE v2"]
)
HOST = HostFacts(
    rdma=[RdmaDevice("mlx5_0", None)],
    version="1.2.3",
    routes=[RouteFact("rdma0", "peer0", "10.1.2.3", "10.1.2.4", "eth0")],
)
NAMES = ("pyverbs", "libibverbs", "memlock", "rdma-devices", "rdma-ports", "rdma-gids", "rdma-mtu", "rdma-routes")


def device(rdma: RdmaView | None = VIEW, gids: list[GidCandidate] | None = None, **changes: Any) -> Device:
    values: dict[str, Any] = {
        "name": "rdma0",
        "provider": "verbs",
        "address": "::ffff:10.1.2.3",
        "rail": 0,
        "up": True,
        "state": "up",
        "rate_bps": 400 * 10**9,
        "mtu_bytes": 4096,
        "netdev": "eth0",
        "netdev_up": True,
        "netdev_mtu_bytes": 9000,
        "rdma": rdma,
        "gids": [GID] if gids is None else gids,
    }
    return Device(**{**values, **changes})


def facts(view: "SampleView", host: HostFacts = HOST, one: Device | None = None, **changes: Any) -> Facts:
    peers = [
        peer.model_copy(
            update={
                "devices": [
                    PeerDevice(name="rdma0", rail=0, provider="verbs", mtu_bytes=4096, traffic_class=104)
                    for _ in peer.devices
                ]
            }
        )
        for peer in view.peers()
    ]
    paths = [path.model_copy(update={"device": "rdma0", "peer_device": "rdma0"}) for path in view.paths()]
    daemon = DaemonFacts(view.status(), [one or device()], peers, paths, view.clients(), view.config_view().config)
    return Facts(host, replace(daemon, **changes))


def of(findings: list[DoctorFinding], check: str) -> list[DoctorFinding]:
    return [one for one in findings if one.check == check]


def test_all_is_well(view: "SampleView") -> None:
    findings = run_checks(facts(view))
    for name in (*NAMES, "traffic-class", "mtu", "devices"):
        assert [one.level for one in of(findings, name)] == ["ok"], of(findings, name)


def test_without_rdma_nothing_is_said(view: "SampleView") -> None:
    tcp = DaemonFacts(view.status(), view.devices(), view.peers(), view.paths(), view.clients(), {})
    findings = run_checks(Facts(HostFacts(version="1.2.3"), tcp))
    for name in (*NAMES, "traffic-class"):
        assert [one.level for one in of(findings, name)] == ["skip"], of(findings, name)


def test_pyverbs_is_looked_for_also_without_a_daemon() -> None:
    host = replace(HOST, pyverbs=("pyverbs is not there", "install it"))
    (found,) = of(run_checks(Facts(host, unreachable=("no daemon", "start it"))), "pyverbs")
    assert found.level == "fail"
    assert "pyverbs is not there" in found.summary
    assert found.fix.startswith("install it")


def gid(**changes: Any) -> Device:
    return device(gids=[GID.model_copy(update=changes)])


def rdma(netdev_mtu: int = 9000, **changes: Any) -> Device:
    return device(VIEW.model_copy(update=changes), netdev_mtu_bytes=netdev_mtu)


def memlock(view: "SampleView") -> Facts:
    status = view.status()
    process = status.process.model_copy(update={"memlock_limit_bytes": 8 << 20})
    return facts(view, status=status.model_copy(update={"process": process}))


def on_host(**changes: Any) -> Callable[["SampleView"], Facts]:
    return lambda view: facts(view, replace(HOST, **changes))


def with_device(one: Device) -> Callable[["SampleView"], Facts]:
    return lambda view: facts(view, one=one)


def other_class(view: "SampleView") -> Facts:
    good = facts(view)
    assert good.daemon is not None
    peers = [
        peer.model_copy(
            update={"devices": [PeerDevice(name="rdma0", rail=0, provider="verbs", mtu_bytes=4096, traffic_class=0)]}
        )
        for peer in good.daemon.peers
    ]
    return facts(view, peers=peers)


EACCES = replace(HOST, rdma=[RdmaDevice("mlx5_0", "EACCES")])
Trouble = tuple[str, str, str, str, Callable[["SampleView"], Facts]]
TROUBLE: list[Trouble] = [
    (
        "libibverbs",
        "fail",
        "cannot open shared object",
        "libibverbs1",
        on_host(libibverbs="cannot open shared object"),
    ),
    ("memlock", "fail", "8MiB; rdma0 needs", "LimitMEMLOCK=infinity", memlock),
    (
        "rdma-devices",
        "warn",
        "mlx5_0 is in sysfs",
        "group",
        lambda view: facts(view, EACCES, device(up=False, state="failed")),
    ),
    (
        "rdma-devices",
        "warn",
        "mlx5_0, which the daemon has open, is being removed",
        "restart the daemon",
        on_host(rdma=[RdmaDevice("mlx5_0", node_error("mlx5_0", Path("/nowhere")))]),
    ),
    ("rdma-devices", "warn", "mlx5_0 is there, but", "auto", with_device(device(None, [], provider="tcp"))),
    ("rdma-devices", "warn", "rdma0 works, but", "renamed", with_device(device(None, []))),
    ("rdma-ports", "fail", "is nop", "driver is gone", with_device(rdma(state="nop"))),
    (
        "rdma-ports",
        "fail",
        "is down, physically polling",
        "cable",
        with_device(rdma(state="down", physical_state="polling")),
    ),
    ("rdma-ports", "fail", "is init", "opensm", with_device(rdma(state="init", link_layer="infiniband"))),
    ("rdma-gids", "warn", "RoCE v1", "RoCE v2", with_device(gid(kind="roce_v1"))),
    ("rdma-gids", "warn", "eth0, which is down", "ip link set eth0 up", with_device(device(netdev_up=False))),
    ("rdma-gids", "warn", "link-local", "routed", with_device(gid(gid="fe80::1"))),
    ("rdma-gids", "warn", "rdma.gid_subnets", "fabric", with_device(gid(reasons=["in no preferred subnet"]))),
    (
        "rdma-gids",
        "fail",
        "its interface is gone",
        "address",
        with_device(gid(in_use=False, reasons=["its interface is gone"])),
    ),
    (
        "rdma-mtu",
        "warn",
        "carry 1024 bytes, not 4096, since eth0 has MTU 1500",
        "mtu 4200",
        with_device(rdma(1500, active_mtu_bytes=1024)),
    ),
    (
        "rdma-mtu",
        "warn",
        "carry 2048",
        "subnet manager",
        with_device(rdma(active_mtu_bytes=2048, link_layer="infiniband")),
    ),
    (
        "rdma-routes",
        "fail",
        "no route from",
        "ip route get",
        on_host(routes=[RouteFact("rdma0", "p", "a", "b", "", "no route from a to b")]),
    ),
    (
        "rdma-routes",
        "warn",
        "by eth1, not eth0",
        "ip rule",
        on_host(routes=[RouteFact("rdma0", "p", "a", "b", "eth1")]),
    ),
    ("traffic-class", "warn", "rdma0 104 against peer0/rdma0 0", "rdma.traffic_class", other_class),
    (
        "devices",
        "fail",
        "port error",
        "do that",
        with_device(device(up=False, state="down", last_event="port error", fix="do that")),
    ),
]


@pytest.mark.parametrize(("check", "level", "words", "fix", "make"), TROUBLE)
def test_each_finds_its_trouble(
    view: "SampleView", check: str, level: str, words: str, fix: str, make: Callable[["SampleView"], Facts]
) -> None:
    found = [one for one in of(run_checks(make(view)), check) if one.level == level]
    assert found, run_checks(make(view))
    assert words in found[0].summary
    assert fix in found[0].fix


def test_what_only_the_user_of_the_command_may_not_open_is_no_trouble(view: "SampleView") -> None:
    assert [one.level for one in of(run_checks(facts(view, EACCES)), "rdma-devices")] == ["ok"]


def test_every_check_has_a_trouble_here() -> None:
    elsewhere = {"pyverbs", "rdma-events"}  # above, and test_checks.py
    assert {trouble[0] for trouble in TROUBLE} | elsewhere >= {*RDMA_CHECKS, *RDMA_HOST_CHECKS}


def test_ports_that_were_left_out_are_told_and_no_complaint(view: "SampleView") -> None:
    status = view.status().model_copy(update={"rdma_left_out": [LeftOutPort(port="mlx5_1/1", why="excluded")]})
    host = replace(HOST, rdma=[RdmaDevice(f"mlx5_{i}", None) for i in range(3)])
    (found,) = of(run_checks(facts(view, host, status=status)), "rdma-devices")
    assert found.level == "ok"
    assert "not used: mlx5_1 (excluded), mlx5_2 (not listed under devices)" in found.summary


def test_the_host_itself_can_be_looked_at() -> None:
    from dqplbd.cli import doctor

    host = doctor._host_facts()
    assert isinstance(host, HostFacts)
    assert doctor._libibverbs_error() is None or "libibverbs" in str(doctor._libibverbs_error())
