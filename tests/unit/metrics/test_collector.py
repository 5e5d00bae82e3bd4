# SPDX-License-Identifier: Apache-2.0
"""The collector: values, growth of counters, names and the number of series."""

import random
import re
from itertools import product
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dqplbd.admin.model import Live, PathClass, ProberStats, RdmaCounters, RdmaView
from dqplbd.inventory.rdma_drivers import Kind
from dqplbd.metrics.catalogue import CATALOGUE, RTT_BUCKETS_NS
from dqplbd.metrics.collector import MetricsCollector

if TYPE_CHECKING:
    from tests.unit.conftest import SampleView

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(collector: MetricsCollector) -> Series:
    """What Prometheus would store: each series by name and labels."""
    registry = CollectorRegistry()
    registry.register(collector)
    found: Series = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, frozenset(labels.items())]


def updated(collector: MetricsCollector) -> Series:
    collector.update()
    return scrape(collector)


def test_nothing_before_the_first_picture(view: "SampleView") -> None:
    assert scrape(MetricsCollector(view)) == {}


def test_values_are_in_base_units(view: "SampleView") -> None:
    live = Live(
        tx_bytes=7,
        inflight_bytes=11,
        inflight_peak_bytes=13,
        window_bytes=17,
        vcs=1,
        queue_delay_ns=1_500_000,
        throttled_grant_ns=2_000_000_000,
        throttled_outbound_ns=3_000_000_000,
        slots_put=3,
        receives_waiting=2,
    )
    view.path_list = [view.path("a", "tcp0", PathClass.RACK, number=1, live=live, probes_ok=5)]
    series = updated(MetricsCollector(view, clock=lambda: 123.0))
    here = {"device": "tcp0", "class": "rack"}
    assert value(series, "dqplbd_transmit_bytes_total", **here) == 7
    assert value(series, "dqplbd_inflight_bytes", **here) == 11
    assert value(series, "dqplbd_inflight_peak_bytes", **here) == 13
    assert value(series, "dqplbd_window_bytes", **here) == 17
    assert value(series, "dqplbd_queue_delay_max_seconds", **here) == pytest.approx(0.0015)
    assert value(series, "dqplbd_throttled_seconds_total", reason="grant", **here) == pytest.approx(2)
    assert value(series, "dqplbd_throttled_seconds_total", reason="outbound", **here) == pytest.approx(3)
    assert value(series, "dqplbd_probes_total", result="ok", **here) == 5
    assert value(series, "dqplbd_path_rtt_seconds", stat="median", **here) == pytest.approx(8e-6)
    assert value(series, "dqplbd_slots", device="tcp0", kind="put") == 3
    assert value(series, "dqplbd_receives_waiting", device="tcp0") == 2
    assert value(series, "dqplbd_device_rate_bytes_per_second", device="tcp0") == 10**10 / 8
    assert value(series, "dqplbd_snapshot_timestamp_seconds") == 123
    assert value(series, "dqplbd_state", state="ready") == 1
    assert value(series, "dqplbd_state", state="degraded") == 0


def test_a_scrape_asks_the_daemon_nothing(view: "SampleView") -> None:
    collector = MetricsCollector(view)
    before = updated(collector)
    view.path_list = []
    view.device_list = []
    assert scrape(collector) == before


def test_gauges_of_several_paths_add_up_or_take_the_worst(view: "SampleView") -> None:
    view.path_list = [
        view.path(
            f"p{i}",
            "tcp0",
            PathClass.ZONE,
            number=i,
            live=Live(inflight_bytes=10 * i, inflight_peak_bytes=100 * i, queue_delay_ns=1000 * i),
            rtt_ns=50_000 + i,
        )
        for i in range(5)
    ]
    series = updated(MetricsCollector(view))
    here = {"device": "tcp0", "class": "zone"}
    assert value(series, "dqplbd_paths", **here) == 5
    assert value(series, "dqplbd_inflight_bytes", **here) == 100
    assert value(series, "dqplbd_inflight_peak_bytes", **here) == 400
    assert value(series, "dqplbd_queue_delay_max_seconds", **here) == pytest.approx(4e-6)
    assert [
        value(series, "dqplbd_path_rtt_seconds", stat=stat, **here) for stat in ("min", "median", "max")
    ] == pytest.approx([50_000e-9, 50_002e-9, 50_004e-9])


def test_counters_only_grow_whatever_paths_do(view: "SampleView") -> None:
    """Paths come, go, change their class, and begin anew under the same name."""
    rng = random.Random(7)
    view.path_list = []
    collector = MetricsCollector(view)
    sent: dict[int, int] = {}
    classes: dict[int, PathClass] = {}
    earned = changes = 0
    last: Series = {}
    for _ in range(200):
        for number in range(8):
            act = rng.random()
            if number not in sent:
                if act < 0.3:
                    sent[number], classes[number] = 0, rng.choice(list(PathClass))
            elif act < 0.1:
                del sent[number]
            elif act < 0.2:
                new = rng.choice(list(PathClass))
                changes += new is not classes[number]
                classes[number] = new
            elif act < 0.25:
                # A new life under the same name, with less than before.
                gain = rng.randrange(max(sent[number], 1))
                earned += gain if gain < sent[number] else 0
                sent[number] = gain
            else:
                gain = rng.randrange(1000)
                sent[number] += gain
                earned += gain
        view.path_list = [
            view.path(f"p{n}", "tcp0", classes[n], number=n, live=Live(tx_bytes=total)) for n, total in sent.items()
        ]
        series = updated(collector)
        for key, new_value in series.items():
            if key[0].endswith("_total"):
                assert new_value >= last.get(key, 0), key
        assert all(key in series for key in last if key[0].endswith("_total")), "a counter went away"
        last = series
    total = sum(v for (name, _), v in last.items() if name == "dqplbd_transmit_bytes_total")
    assert total == earned
    counted = sum(v for (name, _), v in last.items() if name == "dqplbd_path_class_changes_total")
    assert 0 < counted <= changes


def test_a_reused_path_number_in_a_new_epoch_counts_from_zero(view: "SampleView") -> None:
    old = view.path("a", "tcp0", PathClass.RACK, number=1, live=Live(tx_bytes=100))
    view.path_list = [old]
    collector = MetricsCollector(view)
    collector.update()
    view.path_list = [old.model_copy(update={"peer_epoch": "0" * 16, "live": Live(tx_bytes=150)})]
    series = updated(collector)
    assert value(series, "dqplbd_transmit_bytes_total", device="tcp0", **{"class": "rack"}) == 250


def test_rtt_histogram(view: "SampleView") -> None:
    collector = MetricsCollector(view)
    for rtt_ns in (1_000, 1_001, 8_000, 10**9):
        collector.observe_rtt(PathClass.RACK, rtt_ns)
    series = updated(collector)
    name = "dqplbd_probe_rtt_seconds"
    buckets = {
        float(dict(labels)["le"]): count
        for (found, labels), count in series.items()
        if found == f"{name}_bucket" and dict(labels)["class"] == "rack"
    }
    assert len(buckets) == len(RTT_BUCKETS_NS) + 1
    assert buckets[1e-6] == 1
    assert buckets[2e-6] == 2
    assert buckets[4e-6] == 2
    assert buckets[8e-6] == 3
    assert buckets[float("inf")] == 4
    assert value(series, f"{name}_count", **{"class": "rack"}) == 4
    assert value(series, f"{name}_sum", **{"class": "rack"}) == pytest.approx(1.000010001)


def test_series_stay_under_two_thousand_on_the_fullest_host(sample_view: "type[SampleView]") -> None:
    """Eight devices, all classes on each, ten thousand peers, every counter moving, all top paths."""
    view = sample_view(peers=0, devices=8)
    view.device_list = [
        view.device(
            f"mlx5_{i}",
            i,
            prober=ProberStats(time_source="completion", refused_rate=1),
            rdma_events=dict.fromkeys(Kind, 1),
            rdma_counters=RdmaCounters(age_seconds=1),
        )
        for i in range(8)
    ]
    combinations = list(product(view.device_list, PathClass))
    template = {
        (device.name, path_class): view.path("x", device.name, path_class) for device, path_class in combinations
    }
    view.path_list = []
    for number in range(10_000):
        device, path_class = combinations[number % len(combinations)]
        view.path_list.append(
            template[device.name, path_class].model_copy(update={"peer": f"peer{number}", "path_id": number})
        )
    collector = MetricsCollector(view, top_k=20)
    for path_class in PathClass:
        collector.observe_rtt(path_class, 5000)
    collector.update()
    # Every path changes its class, in every way there is.
    view.path_list = [
        path.model_copy(update={"path_class": list(PathClass)[number // 48 % 6]})
        for number, path in enumerate(view.path_list)
    ]
    series = updated(collector)
    assert len({name for name, _ in series}) > 60
    assert 1000 < len(series) <= 2000
    assert value(series, "dqplbd_top_paths_left_out") == 10_000 - 20


def test_no_series_names_a_peer_or_client_unless_asked(view: "SampleView") -> None:
    for top_k, expected in ((0, 0), (2, 2)):
        series = updated(MetricsCollector(view, top_k=top_k))
        named = [key for key in series if re.search(r"peer\d|worker", str(dict(key[1])))]
        assert len({dict(labels)["peer"] for _, labels in named}) == expected
        assert all(name.startswith("dqplbd_top_path_") for name, _ in named)


def test_events_of_rdma_devices(view: "SampleView") -> None:
    view.device_list = [
        view.device("tcp0", 0),
        view.device(
            "mlx5_0",
            1,
            provider="verbs",
            changes={"down": 2, "address": 1},
            prober=ProberStats(time_source="software", correction_ns=4500),
            rdma_events={"retransmit": 5, "ecn_marked": 0, "xmit_wait_ticks": 9},
            rdma=RdmaView(rdma_device="mlx5_0", port=1, driver="mlx5_core", firmware="28.39"),
            rdma_counters=RdmaCounters(driver="mlx5", age_seconds=3.5, unreadable={"x": "no count"}),
        ),
    ]
    series = updated(MetricsCollector(view))
    events = {
        dict(labels)["kind"]: count
        for (name, labels), count in series.items()
        if name == "dqplbd_device_rdma_events_total"
    }
    assert events == {"retransmit": 5, "ecn_marked": 0}, "ticks are left to others, what is not counted is absent"
    assert value(series, "dqplbd_device_rdma_counters_age_seconds", device="mlx5_0") == 3.5
    assert value(series, "dqplbd_probe_correction_seconds", device="mlx5_0") == pytest.approx(4.5e-6)
    assert value(series, "dqplbd_device_rdma_counters_unreadable", device="mlx5_0") == 1
    assert value(series, "dqplbd_async_events_total", device="mlx5_0", event="down") == 2
    assert value(series, "dqplbd_async_events_total", device="mlx5_0", event="fatal") == 0
    infos = [dict(labels) for name, labels in series if name == "dqplbd_device_info"]
    assert {"device": "mlx5_0", "provider": "verbs", "rail": "1"}.items() <= infos[1].items()
    assert (infos[1]["driver"], infos[1]["firmware"], infos[1]["time_source"]) == ("mlx5", "28.39", "software")
    assert (infos[0]["driver"], infos[0]["firmware"], infos[0]["time_source"]) == ("", "", "kernel")


def test_names_follow_the_conventions() -> None:
    units = ("_seconds", "_bytes", "_ratio", "_per_second")
    for one in CATALOGUE:
        assert re.fullmatch(r"(dqplbd|process)(_[a-z0-9]+)+", one.name), one.name
        assert one.name.endswith("_total") == (one.kind == "counter"), one.name
        assert not re.search(r"_(ns|ms|us|bps|kib|mib|percent|bits)(_|$)", one.name), one.name
        assert one.help.endswith("."), one.name
        assert not set(one.labels) & {"le", "instance", "job", "client", "pid"}, one.name
        if re.search("time|delay|duration|age|rtt", one.name) and not one.name.endswith("_info"):
            assert any(unit in one.name for unit in units), one.name
    assert len({one.name for one in CATALOGUE}) == len(CATALOGUE)


def test_every_metric_of_the_catalogue_is_exported(view: "SampleView") -> None:
    collector = MetricsCollector(view, top_k=1)
    collector.observe_rtt(PathClass.RACK, 1)
    collector.update()
    view.path_list = [path.model_copy(update={"path_class": PathClass.HOST}) for path in view.path_list]
    view.device_list += [
        view.device("mlx5_0", 1, rdma_events={"discard": 0}, rdma_counters=RdmaCounters(age_seconds=1))
    ]
    names = {re.sub(r"_(bucket|count|sum)$", "", name) for name, _ in updated(collector)}
    assert names == {one.name for one in CATALOGUE}
