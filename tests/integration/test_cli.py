# SPDX-License-Identifier: Apache-2.0
"""The command line, the admin API and the metrics of real daemons with traffic."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import dqplbd
from dqplbd.admin.client import AdminClient
from dqplbd.lab.cluster import Cluster, HostSpec, merge
from dqplbd.metrics.catalogue import CATALOGUE
from dqplbd.topology.location import PathClass

PLACES = {"a": {"zone": "z1", "rack": "r1"}, "b": {"zone": "z1", "rack": "r1"}, "c": {"zone": "z1", "rack": "r2"}}
CONFIG = {
    "probing": {"interval_s": 0.02, "window_s": 0.2, "samples_per_window": 4},
    "peers": {"retry_min_s": 0.05},
    "classification": {"method": "labels"},
    # A real RTT, so that it is much the same each time.
    "emulation": {"links": [{"peer": "*", "delay_ns": "1ms"}]},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three daemons that know each other and their places; b is in the rack of a, c is not."""
    hosts = [HostSpec(name, {"host": {"location": {"region": "r", **place}}}) for name, place in PLACES.items()]
    with Cluster(hosts, CONFIG) as started:
        yield started


@pytest.fixture
def settled(cluster: Cluster, wait_until: Callable[[Callable[[], Any], str], Any]) -> Cluster:
    """The same, once a has measured the others."""

    def measured() -> bool:
        paths = AdminClient(cluster["a"].admin).paths()
        return len(paths) == 3 and all(path.estimate.windows for path in paths if path.peer != "a")

    wait_until(measured, "a measures b and c")
    return cluster


def dqplb(*arguments: str) -> subprocess.CompletedProcess[str]:
    package = str(Path(dqplbd.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-P", "-m", "dqplbd.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": package},
    )


def ask(cluster: Cluster, *arguments: str, host: str = "a", code: int = 0) -> Any:
    done = dqplb("--socket", cluster[host].admin, *arguments, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)["data"]


def bench(cluster: Cluster, near: str, far: str, *arguments: str) -> Any:
    sockets = ("--client-socket", cluster[near].client_socket, "--peer-socket", cluster[far].client_socket)
    done = dqplb("bench", "run", *sockets, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["data"]


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_status_peers_devices(settled: Cluster) -> None:
    status = ask(settled, "status")
    assert status["host_id"] == "a"
    assert status["state"] == "ready"
    assert re.fullmatch(r"[0-9a-f]{16}", status["epoch"])
    assert status["process"]["pid"] == settled["a"].pid
    assert status["location"]["rack"] == "r1"
    assert {peer["host_id"]: peer["state"] for peer in ask(settled, "peers")} == {"a": "up", "b": "up", "c": "up"}
    [device] = ask(settled, "devices")
    assert device["up"]
    assert device["prober"]["acked"] > 0


def test_paths_have_their_classes_and_an_explanation(settled: Cluster) -> None:
    classes = {path["peer"]: path["path_class"] for path in ask(settled, "paths")}
    assert classes == {"a": "host", "b": "rack", "c": "zone"}
    assert [path["peer"] for path in ask(settled, "paths", "--class", "zone")] == ["c"]
    [explanation] = ask(settled, "path", "explain", "c")
    steps = {(step["topic"], step["name"]): step for step in explanation["steps"]}
    profile = explanation["path"]["profile"]
    for name in ("rtt_ns", "rate_bps", "bdp_bytes", "window_bytes", "segment_bytes", "qps", "outstanding_per_qp"):
        # A profile in force follows what is measured only when that moved by a tenth.
        assert steps["profile", name]["value"] == pytest.approx(profile[name], rel=0.12), name
    assert steps["class", "path_class"] == {**steps["class", "path_class"], "value": "zone", "limited_by": "labels"}
    assert explanation["summary"]


def test_probe_now(settled: Cluster) -> None:
    [path] = ask(settled, "probe", "b", "-c", "4")["paths"]
    assert [sample["result"] for sample in path["samples"]] == ["ok"] * 4
    assert 0 < path["rtt_min_ns"] <= path["rtt_p50_ns"] <= path["rtt_max_ns"]
    assert dqplb("--socket", settled["a"].admin, "probe", "nobody").returncode == 1


def test_doctor_finds_nothing_that_fails(settled: Cluster) -> None:
    findings = ask(settled, "doctor")
    assert len(findings) > 20
    assert [one for one in findings if one["level"] == "fail"] == []


def test_bench_moves_every_byte_and_the_counters_show_it(settled: Cluster) -> None:
    before = {path["peer"]: path["live"]["tx_bytes"] for path in ask(settled, "paths")}
    report = bench(settled, "a", "b", "--message", "1MiB", "--count", "20", "--flows", "3", "--rounds", "50")
    assert [(one["memory"], one["verified"]) for one in report["throughput"]] == [("shim", True), ("staged", True)]
    assert all(one["messages"] == 20 and one["bytes_per_second"] > 0 for one in report["throughput"])
    [ping] = report["latency"]
    assert ping["message_bytes"] == 64
    assert 0 < ping["min_ns"] <= ping["p50_ns"] <= ping["p99_ns"] <= ping["max_ns"]
    after = {path["peer"]: path["live"] for path in ask(settled, "paths")}
    assert after["b"]["tx_bytes"] - before["b"] >= 40 * 2**20
    assert after["c"]["tx_bytes"] == before["c"]
    assert after["b"]["inflight_peak_bytes"] > 0
    assert after["b"]["inflight_bytes"] == 0
    assert ask(settled, "reset-peaks")["paths"] == 3
    assert {path["peer"]: path["live"]["inflight_peak_bytes"] for path in ask(settled, "paths")}["b"] == 0


def test_bench_of_odd_sizes(settled: Cluster) -> None:
    arguments = ("--message", "100003", "--count", "7", "--flows", "5", "--outstanding", "3", "--rounds", "0")
    report = bench(settled, "b", "a", *arguments)
    assert [one["verified"] for one in report["throughput"]] == [True, True]


def test_bench_by_handle_file(settled: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "handle"
    package = str(Path(dqplbd.__file__).parents[1])
    arguments = ["bench", "serve", "--once", "--client-socket", settled["b"].client_socket]
    far = subprocess.Popen(
        [sys.executable, "-P", "-m", "dqplbd.cli.main", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": package},
    )
    try:
        assert far.stdout is not None
        file.write_text(far.stdout.readline())
        done = dqplb(
            *("bench", "run", str(file), "--client-socket", settled["a"].client_socket),
            *("--message", "64KiB", "--count", "3", "--memory", "shim", "--rounds", "3", "--json"),
        )
        assert done.returncode == 0, done.stderr
        assert far.wait(30) == 0
    finally:
        far.kill()
        far.wait()
        far.stdout.close()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["zz"], 2, "neither a handle nor a file"),
        ([], 2, "either HANDLE or --peer-socket"),
        (["ab" * 128], 1, "handle"),
        (["--peer-socket", "/nowhere/x.sock"], 3, "/nowhere/x.sock"),
        (["ab" * 128, "--message", "3parsec"], 2, "parsec"),
        (["ab" * 128, "--message", "4GiB", "--outstanding", "64"], 2, "memory"),
    ],
)
def test_bench_says_what_is_wrong(settled: Cluster, arguments: list[str], code: int, said: str) -> None:
    done = dqplb("bench", "run", *arguments, "--client-socket", settled["a"].client_socket)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_metrics_of_a_daemon_with_traffic(settled: Cluster, wait_until: Callable[..., Any]) -> None:
    bench(settled, "a", "c", "--message", "1MiB", "--count", "4", "--memory", "shim", "--rounds", "0")

    def series() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        code, text = get(settled["a"].metrics_url)
        assert code == 200
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    here = frozenset({"device": "tcp0", "class": "zone"}.items())
    wait_until(lambda: series().get(("dqplbd_transmit_bytes_total", here), 0) >= 4 * 2**20, "the traffic is counted")
    found = series()
    assert found["dqplbd_paths", here] == 1
    assert found["dqplbd_build_info", frozenset({("version", dqplbd.__version__)})] == 1
    assert found["dqplbd_state", frozenset({("state", "ready")})] == 1
    assert found["dqplbd_probes_total", here | {("result", "ok")}] > 0
    assert found["dqplbd_probe_rtt_seconds_count", frozenset({("class", "zone")})] > 0, "the daemon observes probes"
    assert found["dqplbd_device_up", frozenset({("device", "tcp0")})] == 1
    known = {one.name for one in CATALOGUE}
    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name, _ in found} <= known
    assert len(found) <= 2000
    base = settled["a"].metrics_url.removesuffix("/metrics")
    assert get(f"{base}/healthz")[0] == 200
    assert get(f"{base}/readyz") == (200, "ready\n")


def test_reload_from_the_command_line(settled: Cluster) -> None:
    host = settled["b"]
    good = dict(host.config)
    try:
        host.write_config({"profiles": {"classes": {"rack": {"qps": 3}}}})
        report = ask(settled, "reload", host="b")
        assert report["ok"]
        assert report["restart_needed"] == []
        [path] = ask(settled, "paths", "--peer", "a", host="b")
        assert path["profile"]["qps"] == 3
        assert path["profile"]["limits"]["qps"] == "pinned"
        assert ask(settled, "config", "show", host="b")["config"]["profiles"]["classes"]["rack"]["qps"] == 3

        host.write_config({"profiles": {"gain": 99}})
        report = ask(settled, "reload", host="b", code=78)
        assert [problem["key"] for problem in report["problems"]] == ["profiles.gain"]
        assert ask(settled, "status", host="b")["config"]["last_reload_ok"] is False
        assert [p["path_class"] for p in ask(settled, "paths", "--peer", "a", host="b")] == [PathClass.RACK]
        findings = ask(settled, "doctor", host="b")
        assert "profiles.gain" in next(one["summary"] for one in findings if one["check"] == "configuration")
    finally:
        host.write_config(merge(good, {}), fresh=True)
        assert ask(settled, "reload", host="b")["ok"]


def test_clients_are_shown_while_attached(settled: Cluster, wait_until: Callable[..., Any]) -> None:
    from dqplbd.client import Context

    with Context(settled["a"].client_socket, name="somebody") as context:
        memory = context.allocate(2**20)
        [client] = ask(settled, "clients")
        assert client["name"] == "somebody"
        assert client["pid"] == os.getpid()
        assert client["memory_bytes"] >= 2**20
        memory.free()
    wait_until(lambda: ask(settled, "clients") == [], "the client is gone")
