# SPDX-License-Identifier: Apache-2.0
"""From the models of the API to tables for people.  Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

from dqplbd.admin.model import (
    BenchReport,
    Client,
    Device,
    Explanation,
    ExplanationStep,
    LeftOutPort,
    Path,
    PathProbe,
    Peer,
    ProbeReport,
    Status,
)
from dqplbd.admin.rdma_hints import events_text, span_text
from dqplbd.cli.render import Column, Table, dash
from dqplbd.units import format_bytes, format_ns, format_rate

__all__ = [
    "bench_tables",
    "client_table",
    "device_table",
    "duration",
    "explanation_tables",
    "path_table",
    "peer_table",
    "place",
    "probe_table",
    "status_pairs",
    "trouble_lines",
    "value_text",
    "wide_device_tables",
]


def _bytes(value: int | None) -> str:
    return dash(None) if value is None else format_bytes(value)


def _rate(value: float | None) -> str:
    return dash(None) if value is None else format_rate(value)


def _ns(value: float | None) -> str:
    return dash(None) if value is None else format_ns(value)


def _percent(ratio: float | None) -> str:
    return dash(None) if ratio is None else f"{ratio * 100:.3g}%"


def duration(seconds: float | None) -> str:
    """A time of a process: ``3d 4h``, ``5m 12s``, ``1.2s``."""
    if seconds is None:
        return dash(None)
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    return f"{hours}h {minutes}m" if hours else f"{minutes}m {rest}s"


def place(region: str | None, building: str | None, zone: str | None, rack: str | None) -> str:
    """Four places with slashes between; ``-`` when none is known."""
    names = (region, building, zone, rack)
    return "/".join(name or "-" for name in names) if any(names) else dash(None)


def value_text(name: str, value: float | str | None) -> str:
    """A value for people, by the unit that its name ends with."""
    if value is None or isinstance(value, str):
        return dash(value)
    if name.endswith("_bytes"):
        return format_bytes(int(value))
    if name.endswith("_bps"):
        return format_rate(value)
    if name.endswith("_ns"):
        return format_ns(value)
    if name.endswith("_ratio"):
        return _percent(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _changes(changes: Mapping[str, int]) -> str:
    """What happened to devices, but for coming up: ``; so far 2 down, 1 address``; empty when nothing did."""
    text = events_text({name: count for name, count in changes.items() if name != "up"})
    return f"; so far {text}" if text != "none" else ""


def trouble_lines(devices: Sequence[Device]) -> list[str]:
    """A line for each device with something to worry about: what it counted lately, what happened to it."""
    lines = []
    for device in devices:
        rdma = device.rdma_counters
        recent = events_text(rdma.recent) if rdma is not None else "none"
        changes = _changes(device.changes)
        if recent != "none" or changes:
            span = f" in the last {span_text(rdma.recent_seconds)}" if rdma is not None else ""
            lines.append(f"{device.name}: {recent}{span}{changes}" if rdma is not None else f"{device.name}{changes}")
    return lines


def status_pairs(status: Status) -> list[tuple[str, str]]:
    """The daemon at a glance."""
    where = status.location
    classes = ", ".join(f"{count} {name}" for name, count in status.paths_by_class.items() if count)
    config = status.config
    pairs = [
        ("host", f"{status.host_id} (epoch {status.epoch}), dqplbd {status.version}, pid {status.process.pid}"),
        ("state", status.state + (f": {'; '.join(status.reasons)}" if status.reasons else "")),
        ("up", duration(status.uptime_seconds)),
        ("location", place(where.region, where.building, where.zone, where.rack)),
        ("devices", f"{status.devices_up} of {status.devices} up" + _changes(status.device_changes)),
        *([("rdma events", f"{events_text(status.rdma_recent)} in the last minutes")] if status.rdma_recent else []),
        ("peers", f"{status.peers_up} of {status.peers} up"),
        (
            "paths",
            f"{sum(status.paths_by_class.values())}"
            + (f" ({classes})" if classes else "")
            + f", {status.engine.vcs} VCs",
        ),
        ("mismatches", f"{status.class_mismatches} paths whose labels and RTT disagree"),
        (
            "clients",
            f"{status.engine.clients} with {status.engine.flows} flows and "
            f"{format_bytes(status.engine.memory_bytes)} memory"
            + (f"; {status.engine.clients_cut} cut off so far" if status.engine.clients_cut else ""),
        ),
        ("stalls", str(status.stalls)),
        (
            "config",
            (config.file or "built-in defaults")
            + ("" if config.last_reload_ok else " (the last reload was REFUSED, the old configuration is in force)"),
        ),
    ]
    pairs += [("", problem.text()) for problem in config.problems]
    if config.restart_needed:
        pairs.append(("restart for", ", ".join(config.restart_needed)))
    pairs += [
        ("client socket", status.client_socket),
        ("host-to-host", dash(status.api_address)),
        ("metrics", f"http://{status.metrics_address}/metrics" if status.metrics_address else "off"),
        (
            "process",
            f"{format_bytes(status.process.rss_bytes)} resident, {status.process.cpu_seconds:.1f}s CPU, "
            f"{status.process.open_fds} of {status.process.nofile_limit} file descriptors",
        ),
    ]
    return pairs


def _state(device: Device) -> str:
    """``up``, ``down for 12s: port error``, or why it cannot be used."""
    if device.error:
        return f"{device.state or 'down'}: {device.error}" + (f"; {device.fix}" if device.fix else "")
    if device.up:
        return "up"
    since = f" for {duration(device.state_seconds)}" if device.state is not None else ""
    return f"down{since}" + (f": {device.last_event}" if device.last_event else "")


def device_table(devices: Sequence[Device]) -> Table:
    """One row a device."""
    columns = [
        Column("device", style="bold"),
        Column("provider"),
        Column("rail", "right"),
        Column("state", fold=True),
        Column("address"),
        Column("rate", "right"),
        Column("mtu", "right"),
        Column("numa", "right"),
        Column("vcs", "right"),
        Column("qps", "right"),
        Column("regions", "right"),
        Column("probes", "right"),
        Column("lost", "right"),
        Column("time stamps"),
    ]
    rows = []
    styles = {}
    for i, device in enumerate(devices):
        prober = device.prober
        if not device.up:
            styles[i] = "red"
        rows.append(
            (
                device.name,
                device.provider,
                str(device.rail),
                _state(device),
                dash(device.address),
                _rate(device.rate_bps),
                dash(device.mtu_bytes),
                dash(device.numa_node),
                str(device.vcs),
                str(device.qps),
                str(device.memory_regions),
                dash(prober.sent if prober else None),
                dash(prober.timeouts if prober else None),
                dash(prober.time_source if prober else None),
            )
        )
    return Table(columns, rows, styles=styles)


def _yes(value: bool | None) -> str:
    return dash(None) if value is None else "yes" if value else "no"


def _port_table(devices: Sequence[Device]) -> Table:
    columns = [
        Column("device", style="bold"),
        Column("rdma device"),
        Column("link layer"),
        Column("port"),
        Column("physical"),
        Column("rate", "right"),
        Column("width"),
        Column("mtu", "right"),
        Column("netdev"),
        Column("netdev mtu", "right"),
        Column("class", "right"),
        Column("level", "right"),
        Column("numa", "right"),
        Column("pci"),
        Column("nearest gpus", fold=True),
    ]
    rows = []
    styles = {}
    for i, device in enumerate(devices):
        rdma = device.rdma
        if not device.up:
            styles[i] = "red"
        netdev = device.netdev
        rows.append(
            (
                device.name,
                f"{rdma.rdma_device}/{rdma.port}" if rdma else dash(None),
                dash(rdma.link_layer if rdma else None),
                dash(rdma.state if rdma else None),
                dash(rdma.physical_state if rdma else None),
                _rate(rdma.rate_bps if rdma else device.rate_bps),
                dash(rdma.width if rdma else None),
                dash(rdma.active_mtu_bytes if rdma else device.mtu_bytes),
                f"{netdev} (down)" if netdev and device.netdev_up is False else dash(netdev),
                dash(device.netdev_mtu_bytes),
                dash(rdma.traffic_class if rdma else None),
                dash(rdma.service_level if rdma else None),
                dash(device.numa_node),
                dash(rdma.pci_address if rdma else None),
                ", ".join(f"{gpu.pci_address} ({gpu.relation})" for gpu in rdma.gpus) or dash(None)
                if rdma
                else dash(None),
            )
        )
    return Table(columns, rows, title="Ports", styles=styles)


def _limit_table(devices: Sequence[Device]) -> Table:
    columns = [
        Column("device", style="bold"),
        Column("driver"),
        Column("firmware"),
        Column("probes timed by"),
        Column("completion stamps"),
        Column("clock", "right"),
        Column("dma-buf"),
        Column("qps", "right"),
        Column("requests/qp", "right"),
        Column("cq entries", "right"),
        Column("shared rqs", "right"),
        Column("regions", "right"),
        Column("largest region", "right"),
        Column("largest message", "right"),
    ]
    rows = []
    for device in devices:
        rdma = device.rdma
        limits = rdma.limits if rdma else None
        counters = device.rdma_counters
        rows.append(
            (
                device.name,
                dash((rdma.driver if rdma else None) or (counters.driver if counters else None)),
                dash(rdma.firmware if rdma else None),
                dash(device.prober.time_source if device.prober else None),
                _yes(rdma.completion_timestamps if rdma else None),
                f"{rdma.clock_khz / 1000:g} MHz" if rdma and rdma.clock_khz else dash(None),
                _yes(device.dmabuf),
                dash(limits.qps if limits else device.max_qps),
                dash(limits.qp_requests if limits else device.max_send_depth),
                dash(limits.cq_entries if limits else None),
                dash(limits.srqs if limits else None),
                dash(limits.memory_regions if limits else None),
                _bytes(limits.memory_region_bytes if limits else None),
                _bytes(rdma.max_message_bytes if rdma else None),
            )
        )
    return Table(columns, rows, title="What they can do")


def _gid_table(devices: Sequence[Device]) -> Table:
    columns = [
        Column("device", style="bold"),
        Column("gid"),
        Column("in use"),
        Column("score", "right"),
        Column("index", "right"),
        Column("kind"),
        Column("netdev"),
        Column("because", fold=True),
    ]
    rows: list[tuple[str, ...]] = []
    styles = {}
    for device in devices:
        for one in device.gids:
            if not one.score:
                styles[len(rows)] = "dim"
            rows.append(
                (
                    device.name,
                    one.gid,
                    "yes" if one.in_use else dash(None),
                    str(one.score),
                    str(one.index),
                    {"roce_v2": "RoCE v2", "roce_v1": "RoCE v1", "ib": "InfiniBand"}.get(one.kind, one.kind),
                    dash(one.netdev),
                    dash(", ".join(one.reasons)),
                )
            )
    return Table(columns, rows, title="GIDs", styles=styles)


def _event_table(devices: Sequence[Device]) -> Table:
    columns = [
        Column("device", style="bold"),
        Column("driver"),
        Column("events since the start", fold=True),
        Column("lately", fold=True),
        Column("read", "right"),
        Column("unreadable", fold=True),
    ]
    rows = []
    for device in devices:
        rdma = device.rdma_counters
        if rdma is not None:
            rows.append(
                (
                    device.name,
                    dash(rdma.driver),
                    events_text(device.rdma_events),
                    events_text(rdma.recent),
                    dash(None) if rdma.age_seconds is None else f"{duration(rdma.age_seconds)} ago",
                    ", ".join(rdma.unreadable) or dash(None),
                )
            )
    return Table(columns, rows, title="Events")


def wide_device_tables(devices: Sequence[Device], left_out: Sequence[LeftOutPort]) -> list[Table]:
    """The devices, their ports, limits, GIDs with scores and events, and RDMA ports that none of them uses."""
    tables = [device_table(devices), _port_table(devices), _limit_table(devices)]
    if any(device.gids for device in devices):
        tables.append(_gid_table(devices))
    if any(device.rdma_counters is not None for device in devices):
        tables.append(_event_table(devices))
    if left_out:
        columns = [Column("rdma port", style="bold"), Column("why it is not used", fold=True)]
        tables.append(Table(columns, [(one.port, one.why) for one in left_out], title="Not used"))
    return tables


def peer_table(peers: Sequence[Peer]) -> Table:
    """One row a peer."""
    columns = [
        Column("peer", style="bold"),
        Column("state"),
        Column("known from"),
        Column("address"),
        Column("location"),
        Column("paths", "right"),
        Column("vcs", "right"),
        Column("flows", "right"),
        Column("since", "right"),
        Column("next try", "right"),
        Column("reason", fold=True),
    ]
    rows = []
    styles = {}
    for i, peer in enumerate(peers):
        if peer.state in ("down", "refused"):
            styles[i] = "red"
        where = peer.location
        rows.append(
            (
                dash(peer.host_id),
                peer.state,
                peer.source,
                dash(peer.address),
                place(where.region, where.building, where.zone, where.rack),
                str(peer.paths),
                str(peer.vcs),
                str(peer.flows),
                duration(peer.since_seconds),
                duration(peer.next_try_seconds),
                dash(peer.reason),
            )
        )
    return Table(columns, rows, styles=styles)


def path_table(paths: Sequence[Path]) -> Table:
    """One row a path: measured, class, profile, live."""
    columns = [
        Column("peer", style="bold"),
        Column("device"),
        Column("class"),
        Column("by"),
        Column("rtt", "right"),
        Column("p99", "right"),
        Column("loss", "right"),
        Column("bdp", "right"),
        Column("window", "right"),
        Column("limit"),
        Column("segment", "right"),
        Column("qps", "right"),
        Column("each", "right"),
        Column("state"),
        Column("send", "right"),
        Column("in flight", "right"),
        Column("peak", "right"),
        Column("delay", "right"),
    ]
    rows = []
    styles = {}
    for i, path in enumerate(paths):
        found, seen, profile, live = path.classification, path.estimate, path.profile, path.live
        if live.state == "failed":
            styles[i] = "red"
        elif found.mismatch:
            styles[i] = "yellow"
        rtt = _ns(seen.rtt_ns) if seen.rtt_ns is not None else f"({_ns(profile.rtt_ns)})"
        # The delay is as of the last round trip of data, which may be long ago.
        delay = _ns(live.queue_delay_ns)
        if live.queue_delay_ns and not live.inflight_bytes and not live.backlog_bytes:
            delay = f"({delay})"
        rows.append(
            (
                path.peer,
                path.device,
                path.path_class + (f" (rtt says {found.rtt_class})" if found.mismatch else ""),
                found.source,
                rtt,
                _ns(seen.rtt_p99_ns),
                _percent(seen.loss_ratio),
                _bytes(profile.bdp_bytes),
                _bytes(profile.window_bytes),
                profile.limited_by,
                _bytes(profile.segment_bytes),
                str(profile.qps),
                str(profile.outstanding_per_qp),
                live.state,
                _rate(live.tx_bps),
                _bytes(live.inflight_bytes),
                _bytes(live.inflight_peak_bytes),
                delay,
            )
        )
    return Table(columns, rows, styles=styles)


_TITLES = {"measured": "1. Measured", "class": "2. Class", "profile": "3. Profile"}


def _step_row(step: ExplanationStep) -> tuple[str, str, str, str]:
    how = step.formula
    if step.substituted and step.substituted != step.formula:
        how = f"{how} = {step.substituted}" if how else step.substituted
    if step.note:
        how = f"{how} ({step.note})" if how else step.note
    return step.name, value_text(step.name, step.value), dash(how), dash(step.limited_by)


def explanation_tables(explanation: Explanation) -> list[Table]:
    """Measured, class, profile: a table each."""
    tables = []
    for topic, title in _TITLES.items():
        steps = [step for step in explanation.steps if step.topic == topic]
        if not steps:
            continue
        columns = [
            Column("number", style="bold"),
            Column("value", "right"),
            Column("how", fold=True),
            Column("decided by" if topic == "class" else "limited by"),
        ]
        tables.append(Table(columns, [_step_row(step) for step in steps], title=title))
    return tables


def client_table(clients: Sequence[Client]) -> Table:
    """One row a client."""
    columns = [
        Column("id", "right"),
        Column("client", style="bold"),
        Column("pid", "right"),
        Column("uid", "right"),
        Column("state"),
        Column("flows", "right"),
        Column("listeners", "right"),
        Column("requests", "right"),
        Column("memory", "right"),
        Column("staging", "right"),
        Column("sent", "right"),
        Column("received", "right"),
        Column("attached", "right"),
    ]
    rows = [
        (
            str(client.client_id),
            client.name,
            dash(client.pid),
            dash(client.uid),
            client.state,
            str(client.flows),
            str(client.listeners),
            str(client.requests),
            _bytes(client.memory_bytes),
            _bytes(client.staging_bytes),
            _bytes(client.tx_bytes),
            _bytes(client.rx_bytes),
            duration(client.attached_seconds),
        )
        for client in clients
    ]
    return Table(columns, rows)


_PROBE_FATES: Final = {"timeout": "without answer", "send_error": "could not be sent", "invalid": "with a bad answer"}


def _lost(path: PathProbe) -> str:
    """What became of the probes that measured nothing."""
    fates = [sample.result for sample in path.samples]
    return dash(", ".join(f"{fates.count(fate)} {words}" for fate, words in _PROBE_FATES.items() if fate in fates))


def probe_table(report: ProbeReport) -> Table:
    """One row a path."""
    columns = [
        Column("peer", style="bold"),
        Column("device"),
        Column("to"),
        Column("class"),
        Column("probes", "right"),
        Column("lost", "right"),
        Column("min", "right"),
        Column("median", "right"),
        Column("max", "right"),
        Column("not measured"),
    ]
    rows = [
        (
            path.peer,
            path.device,
            path.peer_device,
            path.path_class.value,
            str(len(path.samples)),
            str(path.lost),
            _ns(path.rtt_min_ns),
            _ns(path.rtt_p50_ns),
            _ns(path.rtt_max_ns),
            _lost(path),
        )
        for path in report.paths
    ]
    return Table(columns, rows)


def bench_tables(report: BenchReport) -> list[Table]:
    """Throughput and latency, a table each where there is something."""
    tables = []
    if report.throughput:
        columns = [
            Column("memory", style="bold"),
            Column("flows", "right"),
            Column("message", "right"),
            Column("messages", "right"),
            Column("outstanding", "right"),
            Column("seconds", "right"),
            Column("throughput", "right"),
            Column("bytes a second", "right"),
            Column("content"),
        ]
        rows = [
            (
                one.memory,
                str(one.flows),
                format_bytes(one.message_bytes),
                str(one.messages),
                str(one.outstanding),
                f"{one.seconds:.3f}",
                format_rate(one.bytes_per_second * 8),
                f"{format_bytes(round(one.bytes_per_second))}/s",
                "verified" if one.verified else "WRONG",
            )
            for one in report.throughput
        ]
        tables.append(Table(columns, rows))
    if report.latency:
        columns = [
            Column("message", "right", "bold"),
            Column("round trips", "right"),
            Column("min", "right"),
            Column("median", "right"),
            Column("p99", "right"),
            Column("max", "right"),
        ]
        pings = [
            (
                format_bytes(one.message_bytes),
                str(one.rounds),
                format_ns(one.min_ns),
                format_ns(one.p50_ns),
                format_ns(one.p99_ns),
                format_ns(one.max_ns),
            )
            for one in report.latency
        ]
        tables.append(Table(columns, pings))
    return tables
