# SPDX-License-Identifier: Apache-2.0
"""Every metric of the project: name, type, labels, meaning.  The only place where a name is written.

Names follow the conventions of Prometheus: base units (seconds, bytes, ratios of 0 to 1) in the name, ``_total`` for
counters, ``_info`` for constants of 1.  Labels are of closed sets: the devices of this host, the path classes, and the
values listed here.  No label names a peer or a client, since their number has no bound, except in the ``dqplbd_top_``
metrics, which exist only when ``metrics.top_k`` is above 0 and then for at most that many paths.

``docs/metrics.md`` is made of this table (``python -m dqplbd.metrics.reference``).
"""

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["CATALOGUE", "RTT_BUCKETS_NS", "Metric", "metric"]

# 1 us * 2^k: from below a switch's latency to past the farthest of paths; 16 keep a class's factor of two apart.
RTT_BUCKETS_NS: Final = tuple(1000 << k for k in range(16))


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    :ivar name: full name; a counter's ends in ``_total``.
    :ivar kind: its type.
    :ivar labels: names of its labels.
    :ivar help: its meaning.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


_DC: Final = ("device", "class")
_D: Final = ("device",)

CATALOGUE: Final[tuple[Metric, ...]] = (
    # ------------------------------------------------------------------------------------------------------- daemon
    Metric("dqplbd_build_info", "gauge", ("version",), "Version that runs."),
    Metric("dqplbd_start_time_seconds", "gauge", (), "When the daemon started, Unix time."),
    Metric("dqplbd_state", "gauge", ("state",), "1 for the state it is in: starting, ready, degraded, draining."),
    Metric("dqplbd_config_last_reload_successful", "gauge", (), "Whether the last read of the configuration was good."),
    Metric(
        "dqplbd_config_last_reload_success_timestamp_seconds",
        "gauge",
        (),
        "When the configuration in force was read, Unix time.",
    ),
    Metric("dqplbd_config_reloads_total", "counter", ("result",), "Reloads, by result: ok, refused."),
    Metric("dqplbd_snapshot_timestamp_seconds", "gauge", (), "When the numbers of this scrape were taken, Unix time."),
    Metric("dqplbd_snapshot_duration_seconds", "gauge", (), "How long taking them lasted."),
    Metric(
        "dqplbd_dataplane_heartbeat_age_seconds", "gauge", (), "Time since the engine's loop was last seen to move."
    ),
    Metric("dqplbd_engine_loops_total", "counter", (), "Passes of the engine's loop."),
    Metric("dqplbd_engine_sleeps_total", "counter", (), "Times that the engine slept for want of work."),
    Metric("dqplbd_engine_events_dropped_total", "counter", (), "Events that the control plane fetched too late."),
    Metric("process_resident_memory_bytes", "gauge", (), "Resident memory of the daemon."),
    Metric("process_cpu_seconds_total", "counter", (), "User and system CPU time of the daemon."),
    Metric("process_open_fds", "gauge", (), "Open file descriptors of the daemon."),
    Metric("process_max_fds", "gauge", (), "Most file descriptors it may open."),
    # ------------------------------------------------------------------------------------------------------ devices
    Metric(
        "dqplbd_device_info",
        "gauge",
        ("device", "provider", "rail", "time_source", "driver", "firmware"),
        "Constants of a device; time_source: what times its probes; driver and firmware: of an RDMA device.",
    ),
    Metric("dqplbd_device_up", "gauge", _D, "Whether the device can carry data."),
    Metric("dqplbd_device_downs_total", "counter", _D, "Times that the device went down."),
    Metric(
        "dqplbd_async_events_total",
        "counter",
        ("device", "event"),
        "What happened to a device, by event: up, down, address (its GIDs changed), fatal, other.",
    ),
    Metric(
        "dqplbd_device_rdma_events_total",
        "counter",
        ("device", "kind"),
        "Events that an RDMA device counted since the daemon started, named alike over drivers, by kind: retransmit, "
        "out_of_sequence, receiver_not_ready, ack_timeout, retry_exceeded, ecn_marked, cnp_sent, cnp_handled, "
        "cnp_ignored, discard. A kind that the driver does not count is absent.",
    ),
    Metric(
        "dqplbd_device_rdma_counters_age_seconds",
        "gauge",
        _D,
        "Time since the counters of an RDMA device were last read.",
    ),
    Metric(
        "dqplbd_device_rdma_counters_unreadable",
        "gauge",
        _D,
        "Counters of an RDMA device that are there and cannot be read.",
    ),
    Metric("dqplbd_device_rate_bytes_per_second", "gauge", _D, "Link rate."),
    Metric("dqplbd_device_vcs", "gauge", _D, "Virtual connections."),
    Metric("dqplbd_device_qps", "gauge", _D, "Queue pairs."),
    Metric("dqplbd_device_memory_regions", "gauge", _D, "Registered memory regions."),
    Metric(
        "dqplbd_device_grant_budget_bytes", "gauge", _D, "Bytes that all senders together may have in flight to it."
    ),
    Metric("dqplbd_device_grant_active_senders", "gauge", _D, "Senders with backlog or recent bytes."),
    # ------------------------------------------------------------------------------------------------ peers, clients
    Metric("dqplbd_peers", "gauge", ("state",), "Known peers, by state: up, connecting, down, refused."),
    Metric("dqplbd_clients", "gauge", (), "Attached clients."),
    Metric("dqplbd_clients_cut_total", "counter", (), "Clients cut off because they broke the protocol."),
    Metric("dqplbd_client_requests", "gauge", (), "Requests of all clients that were taken and are not completed."),
    Metric("dqplbd_client_memory_bytes", "gauge", (), "Memory of all clients."),
    Metric("dqplbd_client_staging_bytes", "gauge", (), "The part of it that serves staging."),
    Metric("dqplbd_client_memory_regions", "gauge", (), "Memory regions of all clients."),
    # ------------------------------------------------------------------------------------------------------- traffic
    Metric("dqplbd_transmit_bytes_total", "counter", _DC, "Payload sent and acknowledged."),
    Metric("dqplbd_receive_bytes_total", "counter", _DC, "Payload received."),
    Metric("dqplbd_transmit_segments_total", "counter", _DC, "Segments sent and acknowledged."),
    Metric("dqplbd_receive_segments_total", "counter", _DC, "Segments received."),
    Metric("dqplbd_retransmitted_segments_total", "counter", _DC, "Segments posted again after a queue pair failed."),
    Metric("dqplbd_duplicate_segments_total", "counter", _DC, "Segments received a second time and ignored."),
    Metric("dqplbd_stalls_total", "counter", _DC, "Times that outstanding work made no progress for too long."),
    Metric("dqplbd_vc_failures_total", "counter", _DC, "Virtual connections that failed."),
    Metric("dqplbd_window_shrinks_total", "counter", _DC, "Times that a window was made smaller because of delay."),
    Metric(
        "dqplbd_throttled_seconds_total",
        "counter",
        ("device", "class", "reason"),
        "Time with backlog that something held back, by reason: window, grant, qp, outbound. Sums over paths.",
    ),
    Metric("dqplbd_inflight_bytes", "gauge", _DC, "Bytes posted and not yet completed."),
    Metric(
        "dqplbd_inflight_peak_bytes",
        "gauge",
        _DC,
        "Largest number of bytes in flight on one path since its peaks were last reset.",
    ),
    Metric("dqplbd_window_bytes", "gauge", _DC, "Windows in force, after adaptation. Sums over paths in use."),
    Metric("dqplbd_profile_window_bytes", "gauge", _DC, "Windows of the profiles. Sums over paths in use."),
    Metric("dqplbd_backlog_bytes", "gauge", _DC, "Bytes that wait to be posted."),
    Metric(
        "dqplbd_queue_delay_max_seconds", "gauge", _DC, "Largest queueing delay of a path, as of its last round trip."
    ),
    Metric("dqplbd_flows", "gauge", _DC, "Open flows."),
    Metric("dqplbd_slots", "gauge", ("device", "kind"), "Slots in use, by kind: receive, put."),
    Metric("dqplbd_receives_waiting", "gauge", _D, "Receives that wait for a slot."),
    # --------------------------------------------------------------------------------------------------------- paths
    Metric("dqplbd_paths", "gauge", _DC, "Paths."),
    Metric("dqplbd_path_class_mismatches", "gauge", _D, "Paths whose labels and RTT name different classes."),
    Metric("dqplbd_path_class_changes_total", "counter", ("from", "to"), "Changes of the class of a path."),
    Metric(
        "dqplbd_path_rtt_seconds",
        "gauge",
        ("device", "class", "stat"),
        "Base RTT of the measured paths, by stat: min, median, max.",
    ),
    Metric("dqplbd_profile_bdp_bytes", "gauge", ("class", "stat"), "BDP of the profiles, by stat: min, median, max."),
    Metric("dqplbd_profile_qps", "gauge", ("class",), "Queue pairs of a profile, median."),
    Metric("dqplbd_profile_segment_bytes", "gauge", ("class",), "Segment size of a profile, median."),
    # ------------------------------------------------------------------------------------------------------- probing
    Metric(
        "dqplbd_probes_total",
        "counter",
        ("device", "class", "result"),
        "Probes, by result: ok, timeout (lost), send_error, invalid (impossible times; not a loss).",
    ),
    Metric("dqplbd_probe_rtt_seconds", "histogram", ("class",), "RTT of the good probes."),
    Metric(
        "dqplbd_bandwidth_bursts_total",
        "counter",
        ("class", "result"),
        "Bandwidth bursts of this host, by result: ok, busy (the peer has no time), refused (it takes none), failed.",
    ),
    Metric("dqplbd_bandwidth_burst_bytes_total", "counter", ("class",), "Payload that they sent."),
    Metric(
        "dqplbd_probe_correction_seconds",
        "gauge",
        _D,
        "Taken off the times of probes, for the wake-up of the thread that reads the clock; 0 where others stamp.",
    ),
    Metric("dqplbd_probes_answered_total", "counter", _D, "Probes of peers that were answered."),
    Metric(
        "dqplbd_probes_refused_total",
        "counter",
        ("device", "reason"),
        "Probes of others that were not answered, by reason: token, unknown, rate, malformed.",
    ),
    Metric("dqplbd_probes_late_total", "counter", _D, "Answers that came after the time-out."),
    Metric("dqplbd_probe_samples_dropped_total", "counter", _D, "Samples that the control plane fetched too late."),
    # ----------------------------------------------------------------------------------------------------- worst paths
    Metric(
        "dqplbd_top_path_queue_delay_seconds",
        "gauge",
        ("device", "class", "peer"),
        "Queueing delay of the paths with the largest ones. Only with metrics.top_k above 0.",
    ),
    Metric(
        "dqplbd_top_path_rtt_seconds",
        "gauge",
        ("device", "class", "peer"),
        "Base RTT of those paths. Only with metrics.top_k above 0.",
    ),
    Metric("dqplbd_top_paths_left_out", "gauge", (), "Paths that are not among them. Only with metrics.top_k above 0."),
)

_BY_NAME: Final = {one.name: one for one in CATALOGUE}


def metric(name: str) -> Metric:
    """The metric of a name.

    :raises KeyError: there is none; a name is used that is not in the catalogue.
    """
    return _BY_NAME[name]
