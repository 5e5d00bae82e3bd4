# SPDX-License-Identifier: Apache-2.0
"""The Prometheus collector: counters and gauges of all paths, by device and class.

A scrape never asks the daemon.  :meth:`MetricsCollector.update`, called on a timer, takes one picture of it and turns
it into metric families; a scrape gives out the last ones.

Counters of a path begin at 0 with it and end with it, and a path may change its class.  So that the exported counters
only grow, what a path's counters gained since the last picture is added to the sums of the class that it has now.
"""

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from dqplbd.admin.model import Client, DaemonView, Device, Path, PathClass, Peer, RdmaCounters, Status
from dqplbd.inventory.rdma_drivers import Kind
from dqplbd.metrics.catalogue import CATALOGUE, RTT_BUCKETS_NS, Metric, metric

__all__ = ["MetricsCollector", "Snapshot"]

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Labels = tuple[str, ...]

_NS: Final = 1e-9
_CLASSES: Final = tuple(path_class.value for path_class in PathClass)

# Counters of a path: metric, its last label beside device and class if it has one, and how to read it, in its unit.
_PATH_COUNTERS: Final[tuple[tuple[str, str, Callable[[Path], float]], ...]] = (
    ("dqplbd_transmit_bytes_total", "", lambda p: p.live.tx_bytes),
    ("dqplbd_receive_bytes_total", "", lambda p: p.live.rx_bytes),
    ("dqplbd_transmit_segments_total", "", lambda p: p.live.tx_segments),
    ("dqplbd_receive_segments_total", "", lambda p: p.live.rx_segments),
    ("dqplbd_retransmitted_segments_total", "", lambda p: p.live.retransmits),
    ("dqplbd_duplicate_segments_total", "", lambda p: p.live.duplicates),
    ("dqplbd_stalls_total", "", lambda p: p.live.stalls),
    ("dqplbd_vc_failures_total", "", lambda p: p.live.failures),
    ("dqplbd_window_shrinks_total", "", lambda p: p.live.window_shrinks),
    ("dqplbd_throttled_seconds_total", "window", lambda p: p.live.throttled_window_ns * _NS),
    ("dqplbd_throttled_seconds_total", "grant", lambda p: p.live.throttled_grant_ns * _NS),
    ("dqplbd_throttled_seconds_total", "qp", lambda p: p.live.throttled_qp_ns * _NS),
    ("dqplbd_throttled_seconds_total", "outbound", lambda p: p.live.throttled_outbound_ns * _NS),
    ("dqplbd_probes_total", "ok", lambda p: p.estimate.probes_ok),
    ("dqplbd_probes_total", "timeout", lambda p: p.estimate.probes_timeout),
    ("dqplbd_probes_total", "send_error", lambda p: p.estimate.probes_send_error),
    ("dqplbd_probes_total", "invalid", lambda p: p.estimate.probes_invalid),
    ("dqplbd_bandwidth_bursts_total", "ok", lambda p: p.estimate.bursts_ok),
    ("dqplbd_bandwidth_bursts_total", "busy", lambda p: p.estimate.bursts_busy),
    ("dqplbd_bandwidth_bursts_total", "refused", lambda p: p.estimate.bursts_refused),
    ("dqplbd_bandwidth_bursts_total", "failed", lambda p: p.estimate.bursts_failed),
    ("dqplbd_bandwidth_burst_bytes_total", "", lambda p: p.estimate.burst_bytes),
)

# Gauges of a path that add up.
_PATH_SUMS: Final[tuple[tuple[str, Callable[[Path], float]], ...]] = (
    ("dqplbd_paths", lambda p: 1),
    ("dqplbd_inflight_bytes", lambda p: p.live.inflight_bytes),
    ("dqplbd_window_bytes", lambda p: p.live.window_bytes if p.live.vcs else 0),
    ("dqplbd_profile_window_bytes", lambda p: p.live.profile_window_bytes if p.live.vcs else 0),
    ("dqplbd_backlog_bytes", lambda p: p.live.backlog_bytes),
    ("dqplbd_flows", lambda p: p.live.flows),
)

# Gauges of a path of which the largest counts.
_PATH_MAXIMA: Final[tuple[tuple[str, Callable[[Path], float]], ...]] = (
    ("dqplbd_inflight_peak_bytes", lambda p: p.live.inflight_peak_bytes),
    ("dqplbd_queue_delay_max_seconds", lambda p: p.live.queue_delay_ns * _NS),
)


class Snapshot(NamedTuple):
    """One picture of the daemon.

    :ivar time: when it was taken, ``time.monotonic()``.
    :ivar families: what a scrape gives out.
    """

    time: float
    status: Status
    families: tuple[Family, ...]


class _Values:
    """Values of one picture, by metric and labels."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, float]] = {one.name: {} for one in CATALOGUE}

    def set(self, name: str, labels: Labels, value: float) -> None:
        self._values[name][labels] = value

    def add(self, name: str, labels: Labels, value: float) -> None:
        values = self._values[name]
        values[labels] = values.get(labels, 0) + value

    def maximum(self, name: str, labels: Labels, value: float) -> None:
        values = self._values[name]
        values[labels] = max(values.get(labels, value), value)

    def family(self, one: Metric) -> Family | None:
        values = self._values[one.name]
        if not values:
            return None
        kind = CounterMetricFamily if one.kind == "counter" else GaugeMetricFamily
        family = kind(one.name, one.help, labels=one.labels)
        for labels, value in values.items():
            family.add_metric(labels, value)
        return family


def _stats(sorted_values: Sequence[float]) -> tuple[tuple[str, float], ...]:
    last = len(sorted_values) - 1
    return ("min", sorted_values[0]), ("median", sorted_values[last // 2]), ("max", sorted_values[last])


class MetricsCollector(Collector):
    """The one collector of the daemon.  Belongs to one thread, the daemon's event loop.

    :param view: the daemon.
    :param top_k: paths that get series of their own, 0 for none.
    :param clock: Unix time, for the time stamps that are exported.
    """

    def __init__(self, view: DaemonView, top_k: int = 0, clock: Callable[[], float] = time.time) -> None:
        self._view = view
        self._top_k = top_k
        self._clock = clock
        self._snapshot: Snapshot | None = None
        # Of each path, by (peer, epoch, device, number): its class and counters at the last picture.
        self._seen: dict[tuple[str, str, str, int], tuple[str, tuple[float, ...]]] = {}
        self._counters: defaultdict[tuple[str, Labels], float] = defaultdict(float)
        self._changes: defaultdict[Labels, int] = defaultdict(int)
        self._rtt_counts = {path_class: [0] * (len(RTT_BUCKETS_NS) + 1) for path_class in _CLASSES}
        self._rtt_sums = dict.fromkeys(_CLASSES, 0.0)

    # ------------------------------------------------------------------------------------------------------- inputs

    def observe_rtt(self, path_class: PathClass, rtt_ns: int) -> None:
        """Count one good probe in the histogram.

        :param path_class: class of its path at that time.
        :param rtt_ns: measured RTT, >= 0.
        """
        # In whole nanoseconds: in floating point, 1000 ns would not be within 1 us.
        self._rtt_counts[path_class.value][bisect_left(RTT_BUCKETS_NS, rtt_ns)] += 1
        self._rtt_sums[path_class.value] += rtt_ns * _NS

    def update(self) -> Snapshot:
        """Take a picture of the daemon, for the scrapes to come."""
        begin = time.perf_counter()
        status = self._view.status()
        values = _Values()
        self._daemon(values, status, self._view.peers(), self._view.clients())
        self._devices(values, self._view.devices())
        self._paths(values, self._view.paths())
        values.set("dqplbd_snapshot_timestamp_seconds", (), self._clock())
        values.set("dqplbd_snapshot_duration_seconds", (), time.perf_counter() - begin)
        self._snapshot = Snapshot(time.monotonic(), status, tuple(self._families(values)))
        return self._snapshot

    # ------------------------------------------------------------------------------------------------------ outputs

    @property
    def snapshot(self) -> Snapshot | None:
        """The last picture; None before the first."""
        return self._snapshot

    def describe(self) -> Iterable[Family]:
        """Nothing: registration need not take a picture."""
        return ()

    def collect(self) -> Iterator[Family]:
        """The families of the last picture."""
        if self._snapshot is not None:
            yield from self._snapshot.families

    # -------------------------------------------------------------------------------------------------------- parts

    def _daemon(self, values: _Values, status: Status, peers: Sequence[Peer], clients: Sequence[Client]) -> None:
        one = values.set
        one("dqplbd_build_info", (status.version,), 1)
        one("dqplbd_start_time_seconds", (), status.started_unix_seconds)
        for state in ("starting", "ready", "degraded", "draining"):
            one("dqplbd_state", (state,), status.state == state)
        config = status.config
        one("dqplbd_config_last_reload_successful", (), config.last_reload_ok)
        one("dqplbd_config_last_reload_success_timestamp_seconds", (), config.loaded_unix_seconds)
        one("dqplbd_config_reloads_total", ("ok",), config.reloads)
        one("dqplbd_config_reloads_total", ("refused",), config.reloads_failed)
        engine = status.engine
        one("dqplbd_dataplane_heartbeat_age_seconds", (), engine.heartbeat_age_seconds)
        one("dqplbd_engine_loops_total", (), engine.loops)
        one("dqplbd_engine_sleeps_total", (), engine.sleeps)
        one("dqplbd_engine_events_dropped_total", (), engine.events_dropped)
        one("dqplbd_clients_cut_total", (), engine.clients_cut)
        process = status.process
        one("process_resident_memory_bytes", (), process.rss_bytes)
        one("process_cpu_seconds_total", (), process.cpu_seconds)
        one("process_open_fds", (), process.open_fds)
        one("process_max_fds", (), process.nofile_limit)
        for peer_state in ("up", "connecting", "down", "refused"):
            one("dqplbd_peers", (peer_state,), sum(peer.state == peer_state for peer in peers))
        one("dqplbd_clients", (), len(clients))
        one("dqplbd_client_requests", (), sum(client.requests for client in clients))
        one("dqplbd_client_memory_bytes", (), sum(client.memory_bytes for client in clients))
        one("dqplbd_client_staging_bytes", (), sum(client.staging_bytes for client in clients))
        one("dqplbd_client_memory_regions", (), sum(client.memory_regions for client in clients))

    def _devices(self, values: _Values, devices: Sequence[Device]) -> None:
        one = values.set
        for device in devices:
            label = (device.name,)
            source = device.prober.time_source if device.prober is not None else ""
            rdma = device.rdma_counters
            driver = rdma.driver or "" if rdma is not None else ""
            firmware = device.rdma.firmware or "" if device.rdma is not None else ""
            one("dqplbd_device_info", (device.name, device.provider, str(device.rail), source, driver, firmware), 1)
            one("dqplbd_device_up", label, device.up)
            one("dqplbd_device_downs_total", label, device.downs)
            for event in ("up", "down", "address", "fatal", "other"):
                one("dqplbd_async_events_total", (device.name, event), device.changes.get(event, 0))
            if rdma is not None:
                self._rdma(values, device, rdma)
            if device.rate_bps is not None:
                one("dqplbd_device_rate_bytes_per_second", label, device.rate_bps / 8)
            one("dqplbd_device_vcs", label, device.vcs)
            one("dqplbd_device_qps", label, device.qps)
            one("dqplbd_device_memory_regions", label, device.memory_regions)
            one("dqplbd_device_grant_budget_bytes", label, device.grant_budget_bytes)
            one("dqplbd_device_grant_active_senders", label, device.grant_active)
            one("dqplbd_path_class_mismatches", label, 0)
            one("dqplbd_receives_waiting", label, 0)
            for kind in ("receive", "put"):
                one("dqplbd_slots", (device.name, kind), 0)
            prober = device.prober
            if prober is not None:
                one("dqplbd_probe_correction_seconds", label, prober.correction_ns * _NS)
                one("dqplbd_probes_answered_total", label, prober.answered)
                one("dqplbd_probes_late_total", label, prober.late)
                one("dqplbd_probe_samples_dropped_total", label, prober.samples_dropped)
                for reason, count in (
                    ("token", prober.refused_token),
                    ("unknown", prober.refused_unknown),
                    ("rate", prober.refused_rate),
                    ("malformed", prober.malformed),
                ):
                    one("dqplbd_probes_refused_total", (device.name, reason), count)

    def _rdma(self, values: _Values, device: Device, rdma: RdmaCounters) -> None:
        for kind, count in device.rdma_events.items():
            # Waiting is the one thing that all drivers count under one name, so others export it already.
            if kind != Kind.XMIT_WAIT_TICKS:
                values.set("dqplbd_device_rdma_events_total", (device.name, kind), count)
        if rdma.age_seconds is not None:
            values.set("dqplbd_device_rdma_counters_age_seconds", (device.name,), rdma.age_seconds)
        values.set("dqplbd_device_rdma_counters_unreadable", (device.name,), len(rdma.unreadable))

    def _paths(self, values: _Values, paths: Sequence[Path]) -> None:
        seen: dict[tuple[str, str, str, int], tuple[str, tuple[float, ...]]] = {}
        rtts: defaultdict[Labels, list[float]] = defaultdict(list)
        by_class: defaultdict[str, list[Path]] = defaultdict(list)
        for path in paths:
            path_class = path.path_class.value
            labels = (path.device, path_class)
            identity = (path.peer, path.peer_epoch, path.device, path.path_id)
            now = tuple(read(path) for _, _, read in _PATH_COUNTERS)
            before_class, before = self._seen.get(identity, (path_class, (0.0,) * len(now)))
            for (name, extra, _), new, old in zip(_PATH_COUNTERS, now, before, strict=True):
                # A counter that went back belongs to a new life of the path under the old name.
                where = labels if "device" in metric(name).labels else labels[1:]
                self._counters[name, (*where, extra) if extra else where] += new - old if new >= old else new
            if before_class != path_class:
                self._changes[before_class, path_class] += 1
            seen[identity] = (path_class, now)

            for name, read in _PATH_SUMS:
                values.add(name, labels, read(path))
            for name, read in _PATH_MAXIMA:
                values.maximum(name, labels, read(path))
            values.add("dqplbd_path_class_mismatches", (path.device,), path.classification.mismatch)
            values.add("dqplbd_receives_waiting", (path.device,), path.live.receives_waiting)
            values.add("dqplbd_slots", (path.device, "receive"), path.live.slots_receive)
            values.add("dqplbd_slots", (path.device, "put"), path.live.slots_put)
            if path.estimate.rtt_ns is not None:
                rtts[labels].append(path.estimate.rtt_ns * _NS)
            by_class[path_class].append(path)
        self._seen = seen

        for (name, key), total in self._counters.items():
            values.set(name, key, total)
        for key, count in self._changes.items():
            values.set("dqplbd_path_class_changes_total", key, count)
        for key, measured in rtts.items():
            for stat, seconds in _stats(sorted(measured)):
                values.set("dqplbd_path_rtt_seconds", (*key, stat), seconds)
        for path_class, members in by_class.items():
            profiles = [path.profile for path in members]
            for stat, bdp in _stats(sorted(profile.bdp_bytes for profile in profiles)):
                values.set("dqplbd_profile_bdp_bytes", (path_class, stat), bdp)
            middle = (len(profiles) - 1) // 2
            values.set("dqplbd_profile_qps", (path_class,), sorted(p.qps for p in profiles)[middle])
            values.set("dqplbd_profile_segment_bytes", (path_class,), sorted(p.segment_bytes for p in profiles)[middle])
        if self._top_k > 0:
            self._top(values, paths)

    def _top(self, values: _Values, paths: Sequence[Path]) -> None:
        worst = sorted(paths, key=lambda p: (-p.live.queue_delay_ns, -(p.estimate.rtt_ns or 0), p.peer, p.device))
        for path in worst[: self._top_k]:
            labels = (path.device, path.path_class.value, path.peer)
            values.set("dqplbd_top_path_queue_delay_seconds", labels, path.live.queue_delay_ns * _NS)
            if path.estimate.rtt_ns is not None:
                values.set("dqplbd_top_path_rtt_seconds", labels, path.estimate.rtt_ns * _NS)
        values.set("dqplbd_top_paths_left_out", (), max(len(paths) - self._top_k, 0))

    def _families(self, values: _Values) -> Iterator[Family]:
        for one in CATALOGUE:
            if one.kind == "histogram":
                family = HistogramMetricFamily(one.name, one.help, labels=one.labels)
                for path_class, counts in self._rtt_counts.items():
                    if not any(counts):
                        continue
                    total = 0
                    buckets = []
                    for bound, count in zip((*RTT_BUCKETS_NS, None), counts, strict=True):
                        total += count
                        buckets.append(("+Inf" if bound is None else f"{bound * _NS:.9g}", total))
                    family.add_metric([path_class], buckets, self._rtt_sums[path_class])
                if family.samples:
                    yield family
                continue
            made = values.family(one)
            if made is not None:
                yield made
