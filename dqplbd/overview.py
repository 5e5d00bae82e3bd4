# SPDX-License-Identifier: Apache-2.0
"""What the daemon tells of itself, in the words of the admin API: :class:`~dqplbd.admin.model.DaemonView`.

Only translation: every number is asked of the part that owns it.
"""

import difflib
import statistics
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, Literal

from dqplbd import __version__
from dqplbd.admin import model
from dqplbd.admin.convert import explanation_view, profile_view
from dqplbd.admin.process import read_process_stats
from dqplbd.admin.rdma_view import gid_views, left_out_views, rdma_view
from dqplbd.engine.engine import ClientStats, EngineError, ProbeResult, ProbeSample
from dqplbd.inventory.open import LocalDevice
from dqplbd.paths import Path
from dqplbd.peers.cards import epoch_text
from dqplbd.peers.directory import Peer, Source
from dqplbd.probing.bursts import BurstResult
from dqplbd.probing.estimate import PathEstimate, quantile
from dqplbd.topology.location import Location, PathClass

if TYPE_CHECKING:
    from dqplbd.daemon import Daemon

__all__ = ["Overview"]

_NO_LIMIT: Final = 2**64 - 1
HEARTBEAT_LIMIT_S: Final = 5.0
"""The engine's loop moves at least every 0.5 s; when it was not seen to for so long, it hangs."""
_PROBE_MARGIN_S: Final = 1.0


def _place(location: Location) -> model.Place:
    return model.Place(**location.as_dict())


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            total[name] = total.get(name, 0) + count
    return total


def _goodput_source(seen: PathEstimate) -> Literal["traffic", "burst"] | None:
    if seen.goodput_bps is None:
        return None
    return "burst" if seen.goodput_bps == seen.burst_bps else "traffic"


def _sample(sample: ProbeSample) -> model.ProbeSample:
    if sample.result is ProbeResult.OK:
        return model.ProbeSample(
            result="ok",
            rtt_ns=sample.rtt_ns,
            responder_delay_ns=sample.responder_delay_ns,
            prober_delay_ns=sample.prober_delay_ns,
        )
    if sample.result is ProbeResult.TIMEOUT:
        return model.ProbeSample(result="timeout")
    return model.ProbeSample(result="send_error" if sample.result is ProbeResult.SEND_ERROR else "invalid")


class Overview:
    """The view of one daemon."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon

    # -- the daemon

    def _reasons(self) -> list[str]:
        daemon = self._daemon
        reasons = [device.error or device.trouble for device in daemon.devices if device.error or device.trouble]
        reasons += [
            f"device {device.name} is down for {time.monotonic() - device.since_s:.0f} s"
            + (f" ({device.last_event})" if device.last_event else "")
            for device in daemon.devices
            if not device.error and not device.trouble and device.info is not None and not device.info.up
        ]
        if not daemon.devices:
            reasons.append("no device is configured")
        if daemon.heartbeat_age_s() > HEARTBEAT_LIMIT_S:
            reasons.append(f"the engine's loop has not moved for {daemon.heartbeat_age_s():.1f} s")
        if daemon.fault:
            reasons.append(daemon.fault)
        if daemon.reload_problems:
            reasons.append(
                f"the last reload was refused, the old configuration is in force: {daemon.reload_problems[0].text()}"
            )
        if daemon.peers is not None and daemon.peers.dns_error:
            reasons.append(daemon.peers.dns_error)
        return reasons

    def _engine(self) -> model.EngineStats:
        daemon = self._daemon
        stats = daemon.engine.stats()
        return model.EngineStats(
            heartbeat_age_seconds=daemon.heartbeat_age_s(),
            loops=stats.loops,
            sleeps=stats.sleeps,
            clients_cut=stats.clients_cut,
            events_dropped=stats.events_dropped,
            clients=stats.clients,
            flows=stats.flows,
            vcs=stats.vcs,
            paths=stats.paths,
            memory_bytes=stats.memory_bytes,
            staging_bytes=stats.staging_bytes,
        )

    def status(self) -> model.Status:
        """The daemon at a glance."""
        daemon = self._daemon
        config = daemon.config
        reasons = self._reasons()
        state: model.State = "ready"
        if daemon.stopping:
            state = "draining"
        elif not daemon.ready:
            state = "starting"
        elif reasons:
            state = "degraded"
        by_class: dict[PathClass, int] = {}
        mismatches = 0
        for path in daemon.paths:
            by_class[path.path_class] = by_class.get(path.path_class, 0) + 1
            mismatches += path.classification is not None and path.classification.mismatch
        peers = list(daemon.directory)
        return model.Status(
            host_id=config.host.host_id,
            epoch=epoch_text(daemon.epoch),
            version=__version__,
            state=state,
            reasons=reasons,
            started_unix_seconds=daemon.started_unix_s,
            uptime_seconds=time.monotonic() - daemon.started_s,
            location=_place(daemon.paths.own_location),
            admin_socket=config.admin.socket,
            client_socket=config.clients.socket,
            api_address=daemon.api_address or None,
            metrics_address=daemon.metrics.address if daemon.metrics is not None else None,
            config=model.ConfigState(
                file=str(daemon.config_file) if daemon.config_file is not None else None,
                loaded_unix_seconds=daemon.loaded_unix_s,
                reloads=daemon.reloads,
                reloads_failed=daemon.reloads_failed,
                last_reload_ok=not daemon.reload_problems,
                problems=daemon.reload_problems,
                restart_needed=daemon.restart_needed,
            ),
            engine=self._engine(),
            process=read_process_stats(),
            devices=len(daemon.devices),
            devices_up=sum(device.works for device in daemon.devices),
            peers=len(peers),
            peers_up=sum(peer.state == "up" for peer in peers),
            paths_by_class=by_class,
            class_mismatches=mismatches,
            stalls=daemon.stalls,
            device_changes=_sum(daemon.device_changes.values()),
            rdma_left_out=left_out_views(daemon.inventory.left_out),
            rdma_recent=_sum(
                {kind.value: count for kind, count in found.recent.items()}
                for found in (daemon.rdma.events(device.name) for device in daemon.devices)
                if found is not None
            ),
        )

    def config_view(self) -> model.ConfigView:
        """The configuration in force."""
        daemon = self._daemon
        file = str(daemon.config_file) if daemon.config_file is not None else None
        return model.ConfigView(file=file, config=daemon.config.model_dump(mode="json"))

    # -- devices

    def devices(self) -> list[model.Device]:
        """All configured devices."""
        return [self._device(device) for device in self._daemon.devices]

    def _device(self, device: LocalDevice) -> model.Device:
        daemon = self._daemon
        info = device.info
        if device.number is not None:
            try:
                device.take_info(daemon.engine.device(device.number))
            except EngineError as error:
                device.error = str(error)
            info = device.info
        rdma_events, rdma_counters = self._rdma(device)
        node, netdev = device.spec.numa_node, device.netdev
        up = device.works
        seen = model.Device(
            name=device.name,
            provider=device.config.provider,
            address=device.address,
            rail=device.rail,
            up=up,
            state="failed" if device.error or info is None else "up" if up else "down",
            state_seconds=max(time.monotonic() - device.since_s, 0.0),
            error=device.error or device.trouble or None,
            fix=device.fix or None,
            last_event=device.last_event or None,
            netdev=netdev.name if netdev is not None else None,
            netdev_up=netdev.up if netdev is not None else None,
            netdev_mtu_bytes=netdev.mtu if netdev is not None else None,
            numa_node=node if node >= 0 else None,
            rate_bps=device.rate_bps if device.rate_bps > 1 else None,
            downs=device.downs,
            changes=self._changes(device),
            rdma_events=rdma_events,
            rdma_counters=rdma_counters,
            rdma=rdma_view(device),
            gids=gid_views(device),
        )
        if info is None:
            return seen
        return seen.model_copy(
            update={
                "provider": info.provider,
                "address": info.address,
                "rate_bps": info.rate_bps,
                "mtu_bytes": info.mtu,
                "header_bytes": info.header_bytes,
                "max_segment_bytes": info.max_segment_bytes,
                "max_qps": info.max_qps,
                "max_send_depth": info.max_send_depth,
                "noise_ns": info.noise_ns,
                "dmabuf": info.dmabuf,
                "vcs": info.vcs,
                "qps": info.qps,
                "memory_regions": info.memory_regions,
                "grant_budget_bytes": info.grant_budget_bytes,
                "grant_active": info.grant_active,
                "prober": self._prober(device),
            }
        )

    def _changes(self, device: LocalDevice) -> dict[str, int]:
        return {} if device.number is None else dict(self._daemon.device_changes.get(device.number, {}))

    def _rdma(self, device: LocalDevice) -> tuple[dict[str, int], model.RdmaCounters | None]:
        found = self._daemon.rdma.events(device.name)
        if found is None:
            return {}, None
        return {kind.value: count for kind, count in found.total.items()}, model.RdmaCounters(
            driver=found.driver or None,
            age_seconds=max(time.monotonic() - found.read_s, 0.0) if found.read_s is not None else None,
            recent={kind.value: count for kind, count in found.recent.items()},
            recent_seconds=found.recent_s,
            unreadable=dict(found.unreadable),
            gone=found.gone or None,
        )

    def _prober(self, device: LocalDevice) -> model.ProberStats | None:
        prober = self._daemon.inventory.probers.get(device.number) if device.number is not None else None
        if prober is None:
            return None
        stats = prober.stats()
        return model.ProberStats(
            time_source=prober.time_source,
            correction_ns=stats.correction_ns,
            targets=stats.targets,
            sent=stats.sent,
            acked=stats.acked,
            timeouts=stats.timeouts,
            send_errors=stats.send_errors,
            invalid=stats.invalid,
            late=stats.late,
            answered=stats.answered,
            refused_token=stats.refused_token,
            refused_unknown=stats.refused_unknown,
            refused_rate=stats.refused_rate,
            malformed=stats.malformed,
            samples_dropped=stats.samples_dropped,
        )

    # -- peers

    def peers(self) -> list[model.Peer]:
        """All known peers by name, this host first, those whose name is not known yet last."""
        daemon = self._daemon
        own = daemon.own_hello()
        mine = daemon.paths.of_host(own.host_id)
        result = [
            model.Peer(
                host_id=own.host_id,
                epoch=own.epoch,
                source="self",
                address=daemon.api_address or None,
                state="up",
                since_seconds=time.monotonic() - daemon.started_s,
                version=__version__,
                location=_place(daemon.paths.own_location),
                devices=[
                    model.PeerDevice(
                        name=one.name,
                        rail=one.rail,
                        provider=one.provider,
                        rate_bps=one.rate_bps,
                        mtu_bytes=one.mtu_bytes,
                        address=one.address,
                        traffic_class=one.traffic_class,
                    )
                    for one in own.devices
                ],
                paths=len(mine),
                vcs=sum(len(path.vcs) for path in mine),
                flows=sum(daemon.paths.current_stats(path).flows for path in mine),
            )
        ]
        now = time.monotonic()
        others = sorted(daemon.directory, key=lambda peer: (peer.host_id is None, peer.host_id or peer.address or ""))
        return result + [self._peer(peer, now) for peer in others]

    def _peer(self, peer: Peer, now: float) -> model.Peer:
        paths = self._daemon.paths.of_host(peer.host_id) if peer.host_id is not None else []
        hello = peer.hello
        source: model.PeerSource = "learned"
        if Source.STATIC in peer.sources:
            source = "static"
        elif Source.DNS in peer.sources:
            source = "dns"
        return model.Peer(
            host_id=peer.host_id,
            epoch=hello.epoch if hello is not None else None,
            source=source,
            address=peer.address,
            state=peer.state.value,
            reason=peer.reason or None,
            since_seconds=max(now - peer.since_s, 0.0),
            last_hello_seconds=max(now - peer.heard_s, 0.0) if peer.heard_s is not None else None,
            next_try_seconds=max(peer.next_s - now, 0.0) if peer.next_s is not None else None,
            failures=peer.failures,
            version=hello.version if hello is not None else None,
            location=_place(peer.location),
            devices=[
                model.PeerDevice(
                    name=one.name,
                    rail=one.rail,
                    provider=one.provider,
                    rate_bps=one.rate_bps,
                    mtu_bytes=one.mtu_bytes,
                    address=one.address,
                    traffic_class=one.traffic_class,
                )
                for one in (hello.devices if hello is not None else ())
            ],
            paths=len(paths),
            vcs=sum(len(path.vcs) for path in paths),
            flows=sum(self._daemon.paths.current_stats(path).flows for path in paths),
        )

    # -- paths

    def paths(self) -> list[model.Path]:
        """All paths."""
        return [self._path(path) for path in self._daemon.paths]

    def _path(self, path: Path) -> model.Path:
        daemon = self._daemon
        return model.Path(
            peer=path.host_id,
            peer_epoch=epoch_text(path.epoch),
            device=path.device.name,
            peer_device=path.remote.name,
            rail=path.device.rail,
            path_id=path.number,
            path_class=path.path_class,
            classification=self._classification(path),
            estimate=self._estimate(path),
            profile=profile_view(
                daemon.paths.profile(path), grants=daemon.config.transport.grants, retry=daemon.paths.retry(path)
            ),
            live=self._live(path),
        )

    def _classification(self, path: Path) -> model.Classification:
        found = path.classification
        state = path.classifier
        pending = state.windows_beyond > 0
        unknown = PathClass.UNKNOWN
        return model.Classification(
            path_class=path.path_class,
            source=found.source.value if found is not None else "none",
            labels_class=found.labels_class if found is not None and found.labels_class is not unknown else None,
            rtt_class=found.rtt_class if found is not None and found.rtt_class is not unknown else None,
            mismatch=found is not None and found.mismatch,
            pending_class=state.candidate if pending else None,
            pending_windows=state.windows_beyond,
            changes=path.class_changes,
            location=_place(path.location),
            location_source=path.location_source,
        )

    def _estimate(self, path: Path) -> model.Estimate:
        seen = path.estimator.estimate()
        age = None
        if seen.updated_ns is not None:
            age = max(time.monotonic_ns() - seen.updated_ns, 0) / 1e9
        results = path.results
        return model.Estimate(
            probed=path.target is not None,
            interval_seconds=path.target.interval_ns / 1e9 if path.target is not None else None,
            rtt_ns=seen.rtt_min_ns,
            rtt_p50_ns=seen.rtt_p50_ns,
            rtt_p99_ns=seen.rtt_p99_ns,
            rtt_last_ns=path.last.rtt_ns if path.last is not None and path.last.result is ProbeResult.OK else None,
            responder_delay_p50_ns=quantile(sorted(path.responder_delays), 0.5) if path.responder_delays else None,
            prober_delay_p99_ns=quantile(sorted(path.prober_delays), 0.99) if path.prober_delays else None,
            windows=path.windows,
            probes_sent=sum(results.values()),
            probes_ok=results[ProbeResult.OK],
            probes_timeout=results[ProbeResult.TIMEOUT],
            probes_send_error=results[ProbeResult.SEND_ERROR],
            probes_invalid=results[ProbeResult.INVALID],
            loss_ratio=seen.loss_ratio,
            last_sample_age_seconds=age,
            goodput_bps=seen.goodput_bps,
            goodput_source=_goodput_source(seen),
            burst_bps=seen.burst_bps,
            bursts_ok=path.bursts[BurstResult.OK],
            bursts_busy=path.bursts[BurstResult.BUSY],
            bursts_refused=path.bursts[BurstResult.REFUSED],
            bursts_failed=path.bursts[BurstResult.FAILED],
            burst_bytes=path.burst_bytes,
        )

    def _live(self, path: Path) -> model.Live:
        daemon = self._daemon
        stats = daemon.paths.current_stats(path)
        state: model.PathState = "idle"
        if path.vcs:
            state = "up"
        elif daemon.broker is not None and daemon.broker.connecting(path):
            state = "connecting"
        elif path.failure:
            state = "failed"
        tx_bps, rx_bps = daemon.paths.rates_now(path)
        return model.Live(
            state=state,
            reason=path.failure or None,
            tx_bps=tx_bps,
            rx_bps=rx_bps,
            tx_bytes=stats.tx_bytes,
            rx_bytes=stats.rx_bytes,
            tx_segments=stats.tx_segments,
            rx_segments=stats.rx_segments,
            tx_messages=stats.tx_messages,
            rx_messages=stats.rx_messages,
            duplicates=stats.duplicates,
            retransmits=stats.retransmits,
            stalls=stats.stalls,
            failures=stats.failures,
            inflight_bytes=stats.inflight_bytes,
            inflight_peak_bytes=stats.inflight_peak_bytes,
            window_bytes=stats.window_bytes,
            profile_window_bytes=stats.profile_window_bytes,
            grant_in_bytes=stats.grant_in_bytes if path.vcs and stats.grant_in_bytes != _NO_LIMIT else None,
            grant_out_bytes=stats.grant_out_bytes if path.vcs and stats.grant_out_bytes != _NO_LIMIT else None,
            backlog_bytes=stats.backlog_bytes,
            queue_delay_ns=stats.queue_delay_ns,
            queue_delay_max_ns=stats.queue_delay_max_ns,
            window_shrinks=stats.window_shrinks,
            window_grows=stats.window_grows,
            throttled_window_ns=stats.throttled_window_ns,
            throttled_grant_ns=stats.throttled_grant_ns,
            throttled_qp_ns=stats.throttled_qp_ns,
            throttled_outbound_ns=stats.throttled_outbound_ns,
            control_tx_packets=stats.control_tx_packets,
            control_rx_packets=stats.control_rx_packets,
            link_queue_bytes=stats.link_queue_bytes,
            link_queue_peak_bytes=stats.link_queue_peak_bytes,
            vcs=stats.vcs,
            qps=stats.qps,
            flows=stats.flows,
            slots_receive=stats.slots_receive,
            slots_put=stats.slots_put,
            receives_waiting=stats.receives_waiting,
        )

    def _paths_to(self, host_id: str) -> list[Path]:
        """:raises AdminError: no such peer, or no path to it."""
        daemon = self._daemon
        paths = daemon.paths.of_host(host_id)
        if paths:
            return paths
        peer = daemon.directory.by_host(host_id) or daemon.directory.by_address(host_id)
        if peer is not None and peer.host_id is not None and peer.host_id != host_id:
            return self._paths_to(peer.host_id)
        if peer is not None:
            raise model.AdminError(
                f"there is no path to {peer} yet",
                peer.reason or "no device of it is on a rail of this host",
                status=404,
            )
        known = sorted({path.host_id for path in daemon.paths})
        near = difflib.get_close_matches(host_id, known, 3) or known[:5]
        hint = f"known peers: {', '.join(near)}" if near else "no peer is known yet: see `dqplb peers`"
        raise model.AdminError(f"there is no peer {host_id[:100]!r}", hint, status=404)

    def explain(self, peer: str) -> list[model.Explanation]:
        """One explanation a path to a host."""
        paths = self._daemon.paths
        return [
            explanation_view(self._path(path), paths.explain(path), self._device(path.device), paths.retry(path))
            for path in self._paths_to(peer)
        ]

    # -- clients

    def clients(self) -> list[model.Client]:
        """All attached processes."""
        daemon = self._daemon
        config = daemon.config.clients
        now = time.monotonic()
        result = []
        for record in daemon.clients.records() if daemon.clients is not None else []:
            try:
                stats = daemon.engine.client_stats(record.client)
            except EngineError:
                stats = ClientStats()
            result.append(
                model.Client(
                    client_id=record.client,
                    name=record.name,
                    pid=record.pid or None,
                    uid=record.uid,
                    gid=record.gid,
                    attached_seconds=max(now - record.attached_s, 0.0),
                    state="leaving" if record.leaving else "attached",
                    flows=stats.flows,
                    max_flows=config.max_flows,
                    listeners=stats.listeners,
                    memory_regions=stats.memory_regions,
                    requests=stats.requests,
                    slots=stats.slots,
                    memory_bytes=stats.memory_bytes,
                    max_memory_bytes=config.max_memory_bytes,
                    staging_bytes=stats.staging_bytes,
                    tx_bytes=stats.tx_bytes,
                    rx_bytes=stats.rx_bytes,
                    tx_messages=stats.tx_messages,
                    rx_messages=stats.rx_messages,
                )
            )
        return result

    # -- actions

    async def probe(self, peer: str, count: int) -> model.ProbeReport:
        """Extra probes on each path to a host, one after the other."""
        daemon = self._daemon
        if not daemon.config.probing.enabled:
            raise model.AdminError("probing is switched off", "set probing.enabled: true", status=409)
        paths = self._paths_to(peer)
        if paths[0].host_id == daemon.config.host.host_id:
            raise model.AdminError(f"{peer} is this host itself, which is not probed", "name another host", status=409)
        reports = []
        for path in paths:
            try:
                samples = await daemon.paths.probe(path, count, daemon.config.probing.timeout_s + _PROBE_MARGIN_S)
            except EngineError as error:
                raise model.AdminError(
                    f"path {path} cannot be probed: {error.text}", "see `dqplb devices`", status=409
                ) from None
            good = sorted(sample.rtt_ns for sample in samples if sample.result is ProbeResult.OK)
            lost = sum(sample.result in (ProbeResult.TIMEOUT, ProbeResult.SEND_ERROR) for sample in samples)
            reports.append(
                model.PathProbe(
                    peer=path.host_id,
                    device=path.device.name,
                    peer_device=path.remote.name,
                    path_class=path.path_class,
                    samples=[_sample(sample) for sample in samples],
                    rtt_min_ns=good[0] if good else None,
                    rtt_p50_ns=statistics.median_low(good) if good else None,
                    rtt_max_ns=good[-1] if good else None,
                    lost=lost,
                )
            )
        return model.ProbeReport(peer=paths[0].host_id, count=count, paths=reports)

    async def reload(self) -> model.ReloadReport:
        """Read the file again."""
        return await self._daemon.reload()

    def reset_peaks(self) -> model.ResetReport:
        """Start the peaks of all paths anew."""
        return model.ResetReport(paths=self._daemon.paths.reset_peaks())
