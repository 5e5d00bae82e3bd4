# SPDX-License-Identifier: Apache-2.0
"""Daemons as the service manager and the administrator see them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from dqplbd.admin.client import AdminClient
from dqplbd.client import Context
from dqplbd.lab.cluster import Cluster, ClusterError, HostSpec
from dqplbd.topology.location import PathClass

MakeCluster = Callable[..., Cluster]
WaitUntil = Callable[[Callable[[], Any], str], Any]


def admin(cluster: Cluster, host_id: str) -> AdminClient:
    return AdminClient(cluster[host_id].admin)


def peer_states(cluster: Cluster, host_id: str) -> dict[str | None, str]:
    return {peer.host_id: peer.state for peer in admin(cluster, host_id).peers()}


def test_two_daemons_find_each_other_measure_and_classify(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a", "b"])
    for one, other in (("a", "b"), ("b", "a")):

        def known(one: str = one, other: str = other) -> bool:
            return peer_states(cluster, one).get(other) == "up"

        def measured(one: str = one, other: str = other) -> Any:
            return [p for p in admin(cluster, one).paths() if p.peer == other and p.estimate.windows]

        wait_until(known, f"{one} knows {other}")

        path = wait_until(measured, f"{one} measures {other}")[0]
        assert path.classification.source == "rtt"
        assert path.estimate.rtt_ns is not None
        assert path.estimate.rtt_ns > 0
        assert path.profile.rtt_source == "measured"
    own = next(path for path in admin(cluster, "a").paths() if path.peer == "a")
    assert own.path_class is PathClass.HOST
    assert not own.estimate.probed


def test_labels_decide_and_a_mismatch_is_shown(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    def at(building: str) -> dict[str, Any]:
        return {"host": {"location": {"region": "r", "building": building, "zone": "z"}}}

    cluster = make_cluster([HostSpec("a", at("b1")), HostSpec("b", at("b2"))])

    def found() -> Any:
        paths = [p for p in admin(cluster, "a").paths() if p.peer == "b"]
        return paths and paths[0].path_class is PathClass.REGION and paths[0]

    assert wait_until(found, "labels say region").classification.source == "labels"
    # Loopback is nearer than another building: RTT says rack.
    wait_until(lambda: admin(cluster, "a").status().class_mismatches == 1, "the mismatch is counted")


def test_an_emulated_link_makes_a_path_far(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    link = {"emulation": {"links": [{"peer": "*", "delay_ns": "2ms", "rate_bps": "1Gbit/s"}]}}
    cluster = make_cluster(["a", "b"], link)

    def found() -> Any:
        return [p for p in admin(cluster, "a").paths() if p.peer == "b" and p.estimate.windows]

    path = wait_until(found, "b is measured")[0]
    assert path.estimate.rtt_ns >= 4_000_000
    assert path.path_class is PathClass.REGION
    assert path.profile.rate_bps <= 10**9
    assert path.profile.limits["rate_bps"] == "path"
    # Other links by a reload: it is measured anew.
    for delay, path_class in ((0, PathClass.RACK), (50_000, PathClass.BUILDING), (30_000, PathClass.ZONE)):
        use_link(cluster, delay)
        assert wait_until(classified(cluster, path_class), f"b is {path_class}")[0].estimate.rtt_ns >= 2 * delay


def use_link(cluster: Cluster, delay_ns: int) -> None:
    for host in cluster:
        host.write_config({"emulation": {"links": [{"peer": "*", "delay_ns": delay_ns}] if delay_ns else []}})
        host.reload()


def classified(cluster: Cluster, path_class: PathClass) -> Callable[[], Any]:
    return lambda: [p for p in admin(cluster, "a").paths() if p.peer == "b" and p.path_class is path_class]


def test_a_path_without_an_emulated_link_gets_one_by_a_reload(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a", "b"])
    wait_until(classified(cluster, PathClass.RACK), "b is near")
    use_link(cluster, 30_000)
    wait_until(classified(cluster, PathClass.ZONE), "b is in another rack")


def test_a_probe_on_demand_is_answered(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a", "b"])
    wait_until(lambda: peer_states(cluster, "a").get("b") == "up", "a knows b")
    wait_until(lambda: [p for p in admin(cluster, "a").paths() if p.estimate.probes_ok], "a probes b")
    report = admin(cluster, "a").probe("b", 5)
    assert [sample.result for sample in report.paths[0].samples] == ["ok"] * 5
    assert report.paths[0].rtt_min_ns is not None


def test_the_service_manager_is_told(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a"], start=False)
    host = cluster["a"]
    host.launch({"WATCHDOG_USEC": "400000"})
    host.wait_state("READY=1")
    host.wait_state("WATCHDOG=1")
    host.wait_state("WATCHDOG=1")
    os.kill(host.pid, signal.SIGHUP)
    host.wait_state("RELOADING=1")
    assert any(line.startswith("MONOTONIC_USEC=") for line in host.states)
    host.wait_state("READY=1")
    os.kill(host.pid, signal.SIGTERM)
    host.wait_state("STOPPING=1")
    assert host.wait_exit() == 0
    assert not os.path.exists(host.client_socket)
    assert not os.path.exists(host.admin)
    assert sorted(path.name for path in host.folder.iterdir()) == ["dqplbd.yaml", "log", "notify"]


def test_a_reload_takes_what_can_change_and_tells_what_cannot(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a"])
    host = cluster["a"]
    before = admin(cluster, "a").status()
    host.write_config(
        {
            "host": {"location": {"rack": "r9"}},
            "profiles": {"gain": 2.0},
            "metrics": {"port": 1},
            "engine": {"max_flows": 9},
        }
    )
    host.reload()
    after = admin(cluster, "a").status()
    assert after.config.reloads == before.config.reloads + 1
    assert sorted(after.config.restart_needed) == ["engine", "metrics"]
    assert after.location.rack == "r9"
    view = admin(cluster, "a").config_view().config
    assert view["profiles"]["gain"] == 2.0
    assert view["metrics"]["port"] == 9471
    assert view["engine"]["max_flows"] != 9


def test_a_reload_of_nonsense_keeps_the_old_configuration(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a"])
    host = cluster["a"]
    host.config_file.write_text("profiles:\n  gain: lots\nnonsense: 1\n")
    host.reload()
    status = admin(cluster, "a").status()
    assert (status.config.reloads, status.config.reloads_failed, status.config.last_reload_ok) == (0, 1, False)
    assert {problem.key for problem in status.config.problems} == {"profiles.gain", "nonsense"}
    assert status.state == "degraded"
    assert admin(cluster, "a").config_view().config["profiles"]["gain"] == 1.25
    assert f"{host.config_file}:2: profiles.gain" in host.log()
    report = admin(cluster, "a").reload()
    assert not report.ok
    host.write_config({})
    assert admin(cluster, "a").reload().ok
    assert admin(cluster, "a").status().state == "ready"


def test_a_profile_pinned_by_a_reload_is_in_force_at_once(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a", "b"])
    wait_until(lambda: [p for p in admin(cluster, "a").paths() if p.peer == "b"], "a path to b")
    pinned = {"qps": 16, "segment_bytes": 524288, "window_bytes": 2**30, "outstanding_per_qp": 128, "adapt": False}
    classes = dict.fromkeys(("host", "rack", "zone", "building", "region", "unknown"), pinned)
    cluster["a"].write_config({"profiles": {"window_max_bytes": 2**31, "classes": classes}})
    cluster["a"].reload()
    profile = next(p.profile for p in admin(cluster, "a").paths() if p.peer == "b")
    assert (profile.qps, profile.segment_bytes, profile.window_bytes) == (16, 524288, 2**30)
    assert not profile.adapt


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "dqplbd.daemon", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_bad_configuration_ends_with_78_and_all_its_problems(short_folder: Any) -> None:
    file = short_folder / "bad.yaml"
    file.write_text("devices:\n  - name: x\npeers:\n  listen: 10.0.0.1:7471\n")
    done = run("--config", str(file))
    assert done.returncode == 78
    assert f"{file}:2: devices[0].address" in done.stderr
    assert f"{file}:4: peers" in done.stderr or f"{file}:3: peers" in done.stderr
    file.write_text("classification:\n  topology_file: /nowhere/topology.yaml\n")
    done = run("--config", str(file))
    assert done.returncode == 78
    assert "/nowhere/topology.yaml" in done.stderr


def test_check_says_good_or_bad_and_starts_nothing(short_folder: Any) -> None:
    file = short_folder / "c.yaml"
    file.write_text("peers:\n  listen: 127.0.0.1:0\n")
    done = run("--config", str(file), "--check")
    assert (done.returncode, done.stderr) == (0, "")
    assert run("--config", str(short_folder / "missing.yaml"), "--check").returncode == 78
    assert run("--nonsense").returncode == 2


def test_a_second_daemon_on_the_same_sockets_is_refused(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a"])
    host = cluster["a"]
    done = run("--config", str(host.config_file))
    assert done.returncode == 1
    assert f"process {host.pid}" in done.stderr
    assert host.client_socket in done.stderr
    assert admin(cluster, "a").status().state == "ready"


def test_after_a_crash_the_sockets_are_taken_over(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a"])
    host = cluster["a"]
    first = admin(cluster, "a").status().epoch
    host.kill(signal.SIGKILL)
    host.wait_exit()
    assert os.path.exists(host.client_socket)
    host.launch()
    host.wait_state("READY=1")
    assert admin(cluster, "a").status().epoch != first


def test_an_address_in_use_is_named(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a"], start=False)
    host = cluster["a"]
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind((host.address, 7471))
        squatter.listen()
        host.launch()
        assert host.wait_exit() == 1
    assert host.api in host.log()
    assert not os.path.exists(host.admin)


def test_a_device_that_cannot_be_opened_stops_nobody(make_cluster: MakeCluster) -> None:
    bad = {"name": "far", "address": "192.0.2.1", "rail": 1}
    cluster = make_cluster(["a"], start=False)
    host = cluster["a"]
    host.write_config({"devices": [host.config["devices"][0], bad]})
    cluster.start()
    status = admin(cluster, "a").status()
    assert (status.state, status.devices, status.devices_up) == ("degraded", 2, 1)
    broken = next(device for device in admin(cluster, "a").devices() if device.name == "far")
    assert "192.0.2.1" in (broken.error or "")
    assert "192.0.2.1" in status.reasons[0]


def test_a_restarted_peer_is_noticed(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a", "b"])

    def epoch() -> str | None:
        return next((peer.epoch for peer in admin(cluster, "a").peers() if peer.host_id == "b"), None)

    first = wait_until(epoch, "a knows b")
    cluster["b"].kill()
    cluster["b"].wait_exit()
    cluster["b"].launch()
    cluster["b"].wait_state("READY=1")
    wait_until(lambda: epoch() not in (None, first), "a knows b's new epoch")
    second = epoch()
    assert [p.peer_epoch for p in admin(cluster, "a").paths() if p.peer == "b"] == [second]
    wait_until(
        lambda: [p for p in admin(cluster, "a").paths() if p.peer == "b" and p.estimate.windows], "b is measured anew"
    )


def test_two_hosts_of_one_name_are_told_apart(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a", "b", "c"], start=False)
    cluster["c"].write_config({"host": {"host_id": "b"}})
    cluster.start()

    def refused() -> Any:
        return [peer for peer in admin(cluster, "a").peers() if peer.state == "refused"]

    peer = wait_until(refused, "a refuses one of the two")[0]
    assert cluster["b"].api in peer.reason
    assert cluster["c"].api in peer.reason


def test_a_list_that_names_this_host_itself_does_no_harm(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a"], start=False)
    cluster["a"].write_config({"peers": {"static": [{"address": cluster["a"].api}]}})
    cluster.start()
    wait_until(lambda: "is this host itself" in cluster["a"].log(), "it notices")
    assert [peer.source for peer in admin(cluster, "a").peers()] == ["self"]


def test_only_listed_hosts_are_accepted_where_configured(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a", "b"], start=False)
    cluster["a"].write_config({"peers": {"static": [], "accept": "listed"}})
    cluster.start()

    def refused() -> Any:
        return [peer for peer in admin(cluster, "b").peers() if peer.state == "refused"]

    assert "peers.accept" in wait_until(refused, "b is refused by a")[0].reason
    assert len(admin(cluster, "a").peers()) == 1


def test_the_list_of_peers_changes_by_a_reload(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a", "b"], {"peers": {"accept": "listed"}}, know=False)
    for one, other in (("a", "b"), ("b", "a")):
        cluster[one].write_config({"peers": {"static": [{"address": cluster[other].api}]}})
        cluster[one].reload()
    wait_until(lambda: peer_states(cluster, "a").get("b") == "up", "a knows b")
    wait_until(lambda: [path for path in admin(cluster, "a").paths() if path.peer == "b"], "a path to b")
    for one in ("a", "b"):
        cluster[one].write_config({"peers": {"static": []}})
        cluster[one].reload()
    assert [peer.source for peer in admin(cluster, "a").peers()] == ["self"]
    assert [path.peer for path in admin(cluster, "a").paths()] == ["a"]


def test_everything_works_over_ipv6(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    ports = {}
    with contextlib.ExitStack() as held:
        for name in ("a", "b"):
            sock = held.enter_context(socket.socket(socket.AF_INET6))
            try:
                sock.bind(("::1", 0))
            except OSError:
                pytest.skip("this machine has no IPv6")
            ports[name] = sock.getsockname()[1]
    cluster = make_cluster(["a", "b"], start=False)
    for name, other in (("a", "b"), ("b", "a")):
        cluster[name].write_config(
            {
                "devices": [{"name": "tcp0", "address": "::1"}],
                "peers": {"listen": f"[::1]:{ports[name]}", "static": [{"address": f"[::1]:{ports[other]}"}]},
            }
        )
    cluster.start()
    wait_until(lambda: peer_states(cluster, "a").get("b") == "up", "a knows b")
    wait_until(lambda: [path for path in admin(cluster, "a").paths() if path.estimate.windows], "a measures b")
    with Context(cluster["a"].client_socket) as near, Context(cluster["b"].client_socket) as far:
        with far.listen() as listener:
            accepting, connecting = listener.accept(), near.connect(listener.handle)
            there, here = connecting.wait(30), accepting.wait(30)
        receiving = here.recv(far.allocate(1000))
        assert there.send(near.allocate(1000)).wait(30) == 1000
        assert receiving.wait(30).bytes == 1000


def test_a_cluster_reports_a_daemon_that_ends(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a"], {"nonsense": 1}, start=False)
    with pytest.raises(ClusterError, match="ended with code 78"):
        cluster.start()
