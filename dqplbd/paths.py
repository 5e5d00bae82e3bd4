# SPDX-License-Identifier: Apache-2.0
"""The paths of this host: from what is measured to what the engine runs on.

A path leads from a local device to the device of the same rail of one life (epoch) of another host.  For each of them
this ties together what other modules decide::

    prober samples → estimate → class (labels decide, RTT verifies) → profile → engine

The arithmetic is theirs (``probing.estimate``, ``topology.classify``, ``profiles.bdp``); here is only the order of
things, and what must be told to whom.  Everything runs on the event loop's thread.

Units: bytes, ns, bits a second.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dqplbd.config.models import Config
from dqplbd.engine.engine import (
    DeviceInfo,
    Engine,
    EngineError,
    EnginePathClass,
    EngineProfile,
    LinkSetting,
    PathStats,
    ProbeResult,
    ProbeSample,
    Status,
    VcLimits,
)
from dqplbd.inventory.open import LocalDevice
from dqplbd.logs import fields
from dqplbd.peers.cards import Hello, HelloDevice
from dqplbd.probing.bursts import BurstResult
from dqplbd.probing.estimate import PathEstimator, Window, quantile
from dqplbd.probing.prober import RESULTS, DeviceProber
from dqplbd.probing.targets import Target, TargetPolicy, choose_targets
from dqplbd.profiles.bdp import Explanation, PathInputs, Profile, ProfilePolicy
from dqplbd.profiles.retry import Retry, RetryPolicy, compute_retry
from dqplbd.profiles.table import Change, ProfileTable
from dqplbd.topology.classify import Classification, ClassificationPolicy, ClassifierState, classify, next_rtt_class
from dqplbd.topology.location import Location, PathClass, class_from_labels, merge_locations
from dqplbd.topology.sources import HostLocations

__all__ = ["Path", "PathKey", "Paths", "emulated_link"]

log = logging.getLogger(__name__)

PathKey = tuple[int, str]
"""Number of the local device, host_id of the other end."""

_DELAYS: Final = 256  # probes whose host delays are kept
_NOISE_CHANGE: Final = 1.5  # factor by which measured noise must move before it is pushed
_MIN_NOISE_NS: Final = 10_000
_TICK_S: Final = 1.0
_ROSE: Final = 1.05  # factor by which a burst must raise the rate to be worth another one
_LOADED: Final = 0.05  # part of the rate from which on a path counts as loaded
_MIN_TICK_S: Final = 0.05


@dataclass(slots=True, eq=False)
class Path:
    """A path, and everything that is known of it.

    :ivar number: in the engine.  :ivar remote: the peer's device.
    :ivar labels_class: class by labels alone.  :ivar classification: the class, and what speaks for it.
    :ivar link: its emulated link; ``link_handle`` is the engine's.
    :ivar flow_label: of its first data QP, 20 bits; its probes take the same way.
    :ivar target: how it is probed; None when it is only answered.
    :ivar vcs: the VCs on it that are up, with what was negotiated.
    :ivar results: probes by result, since the path began.  :ivar bursts: bandwidth bursts likewise.
    :ivar burst_bytes: bytes that they sent.
    :ivar loaded: data of this host was on it between the last two times: its RTT may be its own queue.
    :ivar stats: of the engine, when last asked.  :ivar tx_bps: rate between the last two times; ``rx_bps`` likewise.
    """

    number: int
    device: LocalDevice
    host_id: str
    epoch: int
    remote: HelloDevice
    location: Location
    location_source: str | None
    labels_class: PathClass
    estimator: PathEstimator
    link: LinkSetting
    link_handle: Any
    flow_label: int
    classifier: ClassifierState = field(default_factory=ClassifierState)
    classification: Classification | None = None
    class_changes: int = 0
    target: Target | None = None
    vcs: dict[int, VcLimits] = field(default_factory=dict)
    results: dict[ProbeResult, int] = field(default_factory=lambda: dict.fromkeys(ProbeResult, 0))
    last: ProbeSample | None = None
    bursts: dict[BurstResult, int] = field(default_factory=lambda: dict.fromkeys(BurstResult, 0))
    burst_bytes: int = 0
    prober_delays: deque[int] = field(default_factory=lambda: deque(maxlen=_DELAYS))
    responder_delays: deque[int] = field(default_factory=lambda: deque(maxlen=_DELAYS))
    windows: int = 0
    noise_ns: int = 0
    stats: PathStats = field(default_factory=PathStats)
    stats_s: float = 0.0
    tx_bps: int | None = None
    rx_bps: int | None = None
    loaded: bool = False
    failure: str = ""
    dirty: bool = True
    watchers: set[Callable[[ProbeSample], None]] = field(default_factory=set)

    @property
    def key(self) -> PathKey:
        """What names it on this host."""
        assert self.device.number is not None, "a path is only made on an open device"
        return self.device.number, self.host_id

    @property
    def path_class(self) -> PathClass:
        """Its class now."""
        return self.classification.path_class if self.classification is not None else PathClass.UNKNOWN

    def __str__(self) -> str:
        return f"{self.device.name} → {self.host_id}/{self.remote.name}"


def emulated_link(config: Config, host_id: str) -> LinkSetting:
    """The emulated link towards a host; none towards this one itself unless it is named."""
    link = config.emulation.link_for(host_id)
    if link is None or (host_id == config.host.host_id and link.peer != host_id):
        return LinkSetting()
    return LinkSetting(link.delay_ns, link.rate_bps or 0, link.queue_bytes or 0)


class Paths:
    """All paths of this host.

    :param devices: the open ones.
    :param on_rtt: told class and RTT of each good probe.
    :param on_silent: told a host that answered no probe of a whole window.
    """

    def __init__(
        self,
        engine: Engine,
        devices: Iterable[LocalDevice],
        own_epoch: int,
        config: Config,
        locations: HostLocations,
        probers: Mapping[int, "DeviceProber[Path]"],
        clock_ns: Callable[[], int] = time.monotonic_ns,
        on_rtt: Callable[[PathClass, int], object] = lambda path_class, rtt_ns: None,
        on_silent: Callable[[str], object] = lambda host_id: None,
    ) -> None:
        self._engine = engine
        self.devices = [device for device in devices if device.number is not None]
        self.own_epoch = own_epoch
        self.probers = probers
        self._clock_ns = clock_ns
        self._on_rtt = on_rtt
        self._on_silent = on_silent
        self._paths: dict[PathKey, Path] = {}
        self._by_host: dict[str, list[Path]] = {}
        self._by_number: dict[int, Path] = {}
        self._told: dict[str, Location] = {}  # what each peer says of itself
        self._in_use: dict[int, set[str]] = {}  # hosts with VCs, by device
        self._expected_peers = 0
        self._targets_due = False
        self._config = config
        self._locations = locations
        self._policies()
        self._table: ProfileTable[PathKey] = ProfileTable(self._profile_policy, config.profiles.push_change)

    # -- configuration

    def _policies(self) -> None:
        config = self._config
        self.own_location = merge_locations(
            config.host.location.as_location(), self._locations.locate(config.host.host_id)
        )
        self._profile_policy = ProfilePolicy.from_config(config.profiles, config.transport)
        self._retry_policy = RetryPolicy.from_config(config.transport)
        self._target_policy = TargetPolicy.from_config(config.probing)
        self._class_policy = self._current_class_policy()

    def _current_class_policy(self) -> ClassificationPolicy:
        rtts = (
            rtt
            for path in self._paths.values()
            if path.host_id != self._config.host.host_id and (rtt := path.estimator.rtt_min_ns) is not None
        )
        return ClassificationPolicy.from_config(self._config.classification, self._config.profiles, rtts)

    @property
    def tick_s(self) -> float:
        """How often :meth:`tick` is wanted: every second, more often where windows are shorter."""
        return max(_MIN_TICK_S, min(_TICK_S, self._config.probing.window_s / 4))

    def reload(self, config: Config, locations: HostLocations) -> None:
        """Put another configuration in force; running VCs get what changes for them."""
        old, self._config, self._locations = self._config, config, locations
        self._policies()
        bursts = config.probing.active_bandwidth
        no_bursts = old.probing.active_bandwidth.enabled and not bursts.enabled
        probing_changed = old.probing.model_copy(update={"active_bandwidth": bursts}) != config.probing
        for host_id, paths in list(self._by_host.items()):
            location, source = self._locate(host_id)
            link = emulated_link(config, host_id)
            for path in list(paths):
                path.location, path.location_source = location, source
                path.labels_class = class_from_labels(self.own_location, location)
                if link != path.link:
                    self._change_link(path, link)
                if path.key not in self._paths:
                    continue
                if old.classification != config.classification or old.profiles.class_rtt_ns != (
                    config.profiles.class_rtt_ns
                ):
                    # Other bounds are no reason to wait for several windows: ask the rule anew.
                    path.classifier = ClassifierState()
                    rtt = path.estimator.rtt_min_ns
                    if rtt is not None and path.windows and path.host_id != config.host.host_id:
                        next_rtt_class(path.classifier, rtt, self._class_policy)
                if probing_changed:
                    path.estimator = self._estimator()
                elif no_bursts:
                    path.estimator.forget_bursts()
                path.dirty = True
        for change in self._table.reload(self._profile_policy, config.profiles.push_change):
            self._push(change)
        self._targets_due = True
        pushed = ("grants", "ack_timeout_s", "retries")
        if any(getattr(old.transport, key) != getattr(config.transport, key) for key in pushed):
            for path in self._paths.values():
                self._push(Change(path.key, None, self._table.profile(path.key)))
        self.tick()

    def _change_link(self, path: Path, link: LinkSetting) -> None:
        """An emulated link changes: the path is another one now, so what was measured counts no more."""
        prober = self._prober(path)
        if prober is not None:
            prober.remove(path)  # it must let go of the link first
        path.target = None
        try:
            self._engine.path_link(path.number, link)
        except EngineError as error:
            # What exists on a path without a link cannot be given one: the path has to begin anew.
            if path.vcs:
                log.warning(
                    "emulated link of %s is put in force when its VCs have ended", path, extra=fields(peer=path.host_id)
                )
                return
            log.info("path %s begins anew: %s", path, error.text, extra=fields(peer=path.host_id))
            self._remake(path, link)
        else:
            path.link = link
        if path.key not in self._paths:
            return
        path.link_handle = self._engine.path_link_handle(path.number)
        path.flow_label = self._engine.path_flow_label(path.number)
        path.estimator.reset()
        path.classifier = ClassifierState()
        path.windows = 0
        path.prober_delays.clear()

    def _remake(self, path: Path, link: LinkSetting) -> None:
        """Take a path without VCs out of the engine, and make it again there."""
        profile = self._engine_profile(path, self._table.profile(path.key))
        self._engine.path_remove(path.number, Status.CANCELED, "the path begins anew")
        self._by_number.pop(path.number, None)
        try:
            path.number = self._engine.path_add(path.key[0], path.host_id, path.epoch, link, profile)
        except EngineError as error:
            log.error("path %s cannot be made anew: %s", path, error, extra=fields(peer=path.host_id))
            self._drop(path)
            return
        path.link = link
        self._by_number[path.number] = path

    # -- which paths there are

    def __iter__(self) -> Any:
        return iter(list(self._paths.values()))

    def __len__(self) -> int:
        return len(self._paths)

    def get(self, device: int, host_id: str) -> Path | None:
        """The path from a device to a host."""
        return self._paths.get((device, host_id))

    def of_host(self, host_id: str) -> list[Path]:
        """All paths to a host."""
        return list(self._by_host.get(host_id, ()))

    def by_number(self, number: int) -> Path | None:
        """The path of that number in the engine."""
        return self._by_number.get(number)

    def profile(self, path: Path) -> Profile:
        """The profile in force."""
        return self._table.profile(path.key)

    def explain(self, path: Path) -> Explanation:
        """Why a path has its numbers."""
        return self._table.explain(path.key)

    def retry(self, path: Path) -> Retry | None:
        """How patient the queue pairs of a path are; None where its provider has its own time-outs."""
        if path.device.config.provider != "verbs":
            return None
        return compute_retry(self.profile(path), self._retry_policy)

    def _locate(self, host_id: str) -> tuple[Location, str | None]:
        """Where a host is: what it says of itself before what the topology file says of it."""
        told = self._told.get(host_id)
        listed = self._locations.locate(host_id)
        if told is None or not told.known:
            return listed, "topology_file" if listed.known else None
        return merge_locations(told, listed), "hello"

    def _estimator(self) -> PathEstimator:
        probing = self._config.probing
        return PathEstimator(round(probing.window_s * 1e9), probing.rtt_windows, probing.samples_per_window)

    def set_host(self, hello: Hello, location: Location) -> list[Path]:
        """Make or renew the paths to a host, as its hello tells; those to another epoch must be removed before.

        A rail without a device here, or there, has no path.  One that the engine refuses is logged and left out.
        """
        epoch = int(hello.epoch, 16)
        self._told[hello.host_id] = location
        where, source = self._locate(hello.host_id)
        remote_by_rail: dict[int, HelloDevice] = {}
        for remote in hello.devices:
            remote_by_rail.setdefault(remote.rail, remote)
        for device in self.devices:
            remote_device = remote_by_rail.get(device.rail)
            path = self._paths.get((device.number or 0, hello.host_id))
            if remote_device is None or remote_device.provider != device.config.provider:
                if path is not None:
                    self._remove(path, Status.UNREACHABLE, f"{hello.host_id} has no device on rail {device.rail} now")
                continue
            if path is None:
                path = self._add(device, hello.host_id, epoch, remote_device, where, source)
                if path is None:
                    continue
            path.remote, path.location, path.location_source = remote_device, where, source
            path.labels_class = class_from_labels(self.own_location, where)
            path.dirty = True
            self._refresh(path)
        self._targets_due = True
        return self.of_host(hello.host_id)

    def _add(
        self, device: LocalDevice, host_id: str, epoch: int, remote: HelloDevice, where: Location, source: str | None
    ) -> Path | None:
        assert device.number is not None, "only open devices are here"
        link = emulated_link(self._config, host_id)
        labels_class = class_from_labels(self.own_location, where)
        path = Path(-1, device, host_id, epoch, remote, where, source, labels_class, self._estimator(), link, None, 0)
        self._classify(path)
        self._table.update(path.key, self._inputs(path))
        profile = self._engine_profile(path, self._table.profile(path.key))
        try:
            path.number = self._engine.path_add(device.number, host_id, epoch, link, profile)
        except EngineError as error:
            self._table.remove(path.key)
            log.error("path %s cannot be made: %s", path, error, extra=fields(peer=host_id, device=device.name))
            return None
        path.link_handle = self._engine.path_link_handle(path.number)
        path.flow_label = self._engine.path_flow_label(path.number)
        path.stats_s = self._clock_ns() / 1e9
        self._paths[path.key] = path
        self._by_number[path.number] = path
        self._by_host.setdefault(host_id, []).append(path)
        return path

    def add_device(self, device: LocalDevice) -> None:
        """A device was opened; its paths begin with the next :meth:`set_host`."""
        self.devices.append(device)

    def remove_device(self, device: LocalDevice, status: Status, why: str) -> None:
        """End all paths of a device; their VCs fail with a status."""
        if device in self.devices:
            self.devices.remove(device)
        for path in [path for path in self._paths.values() if path.device is device]:
            self._remove(path, status, why)

    def device_changed(self, device: LocalDevice) -> None:
        """Rate or MTU of a device changed: compute the profiles of its paths anew."""
        for path in self._paths.values():
            path.dirty = path.dirty or path.device is device

    def prober_changed(self) -> None:
        """A prober was started anew: it must be told again whom to answer and to probe."""
        self._targets_due = True

    def remove_host(self, host_id: str, status: Status, why: str) -> None:
        """End all paths to a host; their VCs fail with a status."""
        for path in self.of_host(host_id):
            self._remove(path, status, why)
        self._told.pop(host_id, None)

    def _remove(self, path: Path, status: Status, why: str) -> None:
        prober = self._prober(path)
        if prober is not None:
            prober.remove(path)
        try:
            self._engine.path_remove(path.number, status, why)
        except EngineError as error:
            log.error("path %s cannot be removed: %s", path, error, extra=fields(peer=path.host_id))
        self._drop(path)

    def _drop(self, path: Path) -> None:
        """Forget a path that the engine has no more."""
        del self._paths[path.key]
        self._by_number.pop(path.number, None)
        rest = [one for one in self._by_host[path.host_id] if one is not path]
        if rest:
            self._by_host[path.host_id] = rest
        else:
            del self._by_host[path.host_id]
        self._table.remove(path.key)
        self._in_use.get(path.key[0], set()).discard(path.host_id)
        self._targets_due = True

    # -- VCs

    def vc_up(self, path: Path, vc: int, limits: VcLimits) -> None:
        """A VC of a path works."""
        path.vcs[vc] = limits
        path.failure = ""
        self._in_use.setdefault(path.key[0], set()).add(path.host_id)
        path.dirty = True
        self._refresh(path)
        self._targets_due = True

    def vc_down(self, path: Path, vc: int, why: str) -> None:
        """A VC of a path is gone."""
        if path.vcs.pop(vc, None) is not None:
            self._read_stats(path)
        if not path.vcs:
            self._in_use.get(path.key[0], set()).discard(path.host_id)
        path.failure = why
        path.dirty = True
        link = emulated_link(self._config, path.host_id)
        if link != path.link and not path.vcs:
            self._change_link(path, link)
        self._targets_due = True

    # -- probing

    def _prober(self, path: Path) -> "DeviceProber[Path] | None":
        return self.probers.get(path.device.number) if path.device.number is not None else None

    def _set_targets(self) -> None:
        """Choose whom to probe; the others are only answered."""
        self._targets_due = False
        config = self._config
        own = config.host.host_id
        peers = {host_id: paths[0].location for host_id, paths in self._by_host.items() if host_id != own}
        chosen: dict[str, Target] = {}
        if config.probing.enabled:
            in_use = {path.host_id for path in self._paths.values() if path.vcs}
            targets = choose_targets(
                own,
                self.own_location,
                peers,
                self._target_policy,
                in_use=in_use,
                paths_per_host=max(len(self.devices), 1),
            )
            chosen = {target.host_id: target for target in targets}
        for path in self._paths.values():
            prober = self._prober(path)
            if prober is None or path.host_id == own or path.remote.probe_endpoint is None:
                continue
            target = chosen.get(path.host_id)
            token = int(path.remote.probe_token or "0", 16)
            endpoint = bytes.fromhex(path.remote.probe_endpoint)
            interval, phase = (target.interval_ns, target.phase_ns) if target is not None else (0, 0)
            try:
                prober.set(path, endpoint, token, path.flow_label, path.link_handle, interval, phase)
                path.target = target
            except EngineError as error:
                path.target = None
                log.warning("path %s cannot be probed: %s", path, error, extra=fields(peer=path.host_id))

    def _drain(self) -> None:
        for prober in self.probers.values():
            for path, sample in prober.drain():
                path.results[sample.result] += 1
                path.last = sample
                path.dirty = True
                if sample.result is ProbeResult.OK:
                    path.prober_delays.append(max(sample.prober_delay_ns, 0))
                    path.responder_delays.append(max(sample.responder_delay_ns, 0))
                    self._on_rtt(path.path_class, sample.rtt_ns)
                # Over an emulated link without delay times are computed, and the round trip is exactly 0.
                rtt_ns = max(sample.rtt_ns, 1) if sample.result is ProbeResult.OK else 0
                window = path.estimator.add(RESULTS[sample.result], sample.time_ns, rtt_ns, loaded=path.loaded)
                if window is not None:
                    self._window(path, window)
                for watcher in list(path.watchers):
                    watcher(sample)

    def _window(self, path: Path, window: Window) -> None:
        """A window closed: let its RTT speak on the class, but not the queue of this host's own data."""
        if window.lost and not window.samples:
            self._on_silent(path.host_id)
        if not window.complete or window.rtt_min_ns is None or window.base_ns is None:
            return
        path.windows += 1
        next_rtt_class(path.classifier, min(window.rtt_min_ns, window.base_ns), self._class_policy)

    async def probe(self, path: Path, count: int, timeout_s: float) -> list[ProbeSample]:
        """Extra probes of a path, one after the other.

        :param timeout_s: longest wait for one; a prober tells of a loss by itself, within its own time-out.
        :raises EngineError: it cannot be probed.
        """
        prober = self._prober(path)
        if prober is None:
            raise EngineError(95, f"device {path.device.name} has no prober")
        loop = asyncio.get_running_loop()
        samples: list[ProbeSample] = []
        queue: asyncio.Queue[ProbeSample] = asyncio.Queue()
        path.watchers.add(queue.put_nowait)
        descriptor = prober.fileno()
        loop.add_reader(descriptor, self._drain)
        try:
            for _ in range(count):
                try:
                    prober.once(path)
                except KeyError:
                    raise EngineError(2, f"path {path} is not known to the prober") from None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        samples.append(await queue.get())
        finally:
            path.watchers.discard(queue.put_nowait)
            if not any(other.watchers for other in self._paths.values() if other.device is path.device):
                loop.remove_reader(descriptor)
        return samples

    # -- from measurement to profile

    def tick(self) -> None:
        """Take in what was measured, and push what it changes."""
        now_ns = self._clock_ns()
        for path in self._paths.values():  # first: what was sent says how to take what was measured meanwhile
            if path.vcs:
                self._read_stats(path)
                # What was posted may still wait in queues; what is no longer in flight got through.
                path.estimator.add_goodput(path.stats.time_ns, path.stats.tx_bytes - path.stats.inflight_bytes)
            else:
                path.loaded = False
        self._drain()
        regroup = False
        for path in self._paths.values():
            if path.target is not None:
                window = path.estimator.advance(now_ns)
                if window is not None:
                    path.dirty = True
                    self._window(path, window)
            regroup = regroup or path.dirty
        if regroup and self._config.classification.rule == "largest_gap":
            policy = self._current_class_policy()
            if policy.rule != self._class_policy.rule:
                self._class_policy = policy
                for path in self._paths.values():
                    path.dirty = True
        if self._targets_due:
            self._set_targets()
        latency: dict[int, int] = {}
        for path in self._paths.values():
            if path.dirty:
                self._refresh(path)
            rtt = path.estimator.rtt_min_ns
            number = path.device.number
            if rtt is not None and number is not None:
                latency[number] = min(rtt, latency.get(number, rtt))
        for device in self.devices:
            found = latency.get(device.number or 0)
            if found is not None and found != device.latency_ns and device.number is not None:
                device.latency_ns = found
                self._engine.device_latency(device.number, found)

    def _classify(self, path: Path) -> None:
        own = self._config.host.host_id
        new = classify(
            self._class_policy,
            path.classifier,
            path.labels_class,
            host_id=path.host_id,
            same_host=path.host_id == own,
        )
        old, path.classification = path.classification, new
        if old is None or old == new:
            return
        if old.path_class is not new.path_class:
            path.class_changes += 1
            log.info(
                "path %s: class %s, was %s",
                path,
                new.path_class,
                old.path_class,
                extra=fields(peer=path.host_id, source=new.source, rtt_ns=path.estimator.rtt_min_ns),
            )
        if new.mismatch and not old.mismatch:
            log.warning(
                "path %s: labels say %s, RTT says %s: check labels, cabling and route",
                path,
                new.labels_class,
                new.rtt_class,
                extra=fields(peer=path.host_id, rtt_ns=path.estimator.rtt_min_ns),
            )

    def _inputs(self, path: Path) -> PathInputs:
        device = path.device.info
        assert device is not None, "only open devices have paths"
        limits = next(iter(path.vcs.values()), None)
        return PathInputs(
            path_class=path.path_class,
            rtt_ns=path.estimator.rtt_min_ns,
            local_rate_bps=path.device.rate_bps,
            peer_rate_bps=path.remote.rate_bps,
            mtu_bytes=max(min(device.mtu or path.remote.mtu_bytes, path.remote.mtu_bytes), 1),
            header_bytes=device.header_bytes,
            path_rate_bps=self._path_rate(path, device),
            host_id=path.host_id,
            active_peers=self._active_peers(path),
            goodput_bps=path.estimator.goodput_bps,
            host_delay_ns=self._host_delay(path),
            max_qps=limits.qps if limits is not None else None,
            queue_depth=limits.depth if limits is not None else None,
            max_segment_bytes=limits.segment_bytes if limits is not None else None,
        )

    def _active_peers(self, path: Path) -> int:
        """Hosts that share a device's queue-pair budget, that of the path included.

        Those in use, or those that clients say they are going to use, which spares making queue pairs that are soon too
        many.  A client may say what it likes, so no more than the hosts that are known.
        """
        users = self._in_use.get(path.key[0], set())
        return max(len(users) + (path.host_id not in users), min(self._expected_peers, len(self._by_host)))

    def expect_peers(self, peers: int) -> None:
        """How many hosts clients expect to use at a time; 0 when they do not say."""
        if peers == self._expected_peers:
            return
        self._expected_peers = peers
        for path in self._paths.values():
            path.dirty = True

    def _path_rate(self, path: Path, device: DeviceInfo) -> int | None:
        """Rate of the path itself on the wire: of its emulated link, or what bursts found it to be."""
        link, burst = path.link.rate_bps or None, path.estimator.path_rate_bps
        if burst is None:
            return link
        mtu = max(min(device.mtu or path.remote.mtu_bytes, path.remote.mtu_bytes), 1)
        wire = -(-burst * (mtu + device.header_bytes) // mtu)
        return wire if link is None else min(link, wire)

    def add_burst(self, path: Path, rate_bps: int) -> bool:
        """Take in the result of a burst, bits of payload a second.

        :returns: whether another one may change what is known further: it let the window grow, or is the only one.
        """
        before = self.profile(path).rate_bps
        path.estimator.add_burst(rate_bps)
        self._refresh(path)
        return path.estimator.path_rate_bps is None or self.profile(path).rate_bps > before * _ROSE

    def utilisation(self, number: int) -> float:
        """Share of its rate that a device carried in the last interval, the busier direction; 0 when it carries
        nothing, above 1 where the rate was guessed too low."""
        sent = received = 0
        rate = 1
        for path in self._paths.values():
            if path.key[0] != number or path.host_id == self._config.host.host_id:
                continue
            tx_bps, rx_bps = self.rates_now(path)
            sent, received = sent + (tx_bps or 0), received + (rx_bps or 0)
            rate = max(rate, path.device.rate_bps, path.estimator.goodput_bps or 0)
        return max(sent, received) / rate

    def _refresh(self, path: Path) -> None:
        """Class and profile of a path, from what is known now."""
        path.dirty = False
        self._classify(path)
        change = self._table.update(path.key, self._inputs(path))
        noise = self._noise(path)
        if change is not None:
            self._push(change)
        elif not path.noise_ns / _NOISE_CHANGE <= noise <= path.noise_ns * _NOISE_CHANGE:
            self._push(Change(path.key, None, self._table.profile(path.key)))

    def _host_delay(self, path: Path) -> int:
        """What the hosts at both ends add to a round trip of data.

        Where software acknowledges, it has to be woken for it, like the probers; over an emulated link times are
        computed, and a NIC does not sleep.
        """
        told = path.device.info.noise_ns if path.device.info is not None else 0
        if not told or not path.link.none or not path.prober_delays:
            return 0
        own = quantile(sorted(path.prober_delays), 0.5)
        return min(own + quantile(sorted(path.responder_delays), 0.5), told)

    def _noise(self, path: Path) -> int:
        """Error of completion times that is not the path's doing.

        Over an emulated link they are computed, so what is left is how late this host wakes up; that the prober
        measures.  Without one the device says it.
        """
        device = path.device.info
        told = device.noise_ns if device is not None else 0
        if path.link.none or not path.prober_delays:
            return told
        return min(max(quantile(sorted(path.prober_delays), 0.99), _MIN_NOISE_NS), max(told, _MIN_NOISE_NS))

    def _engine_profile(self, path: Path, profile: Profile) -> EngineProfile:
        path.noise_ns = self._noise(path)
        retry = compute_retry(profile, self._retry_policy)
        return EngineProfile(
            rtt_ns=profile.rtt_ns,
            rate_bps=profile.rate_bps,
            window_bytes=profile.window_bytes,
            floor_bytes=profile.min_window_bytes,
            noise_ns=path.noise_ns,
            segment_bytes=profile.segment_bytes,
            qps=profile.qps,
            outstanding_per_qp=profile.outstanding_per_qp,
            adapt=profile.adapt,
            grants=self._config.transport.grants,
            ack_timeout_ns=retry.ack_timeout_ns,
            retries=retry.retries,
            path_class=EnginePathClass[profile.path_class.name],
        )

    def _push(self, change: Change[PathKey]) -> None:
        path = self._paths.get(change.path_id)
        if path is None or path.number < 0:
            return
        profile = change.new
        try:
            self._engine.path_profile(path.number, self._engine_profile(path, profile))
        except EngineError as error:
            log.error("profile of %s not taken: %s", path, error, extra=fields(peer=path.host_id))
            return
        if change.old is not None:
            log.debug(
                "profile of %s changed",
                path,
                extra=fields(
                    peer=path.host_id,
                    path_class=profile.path_class,
                    rtt_ns=profile.rtt_ns,
                    window_bytes=profile.window_bytes,
                    qps=profile.qps,
                    segment_bytes=profile.segment_bytes,
                    limited_by=profile.limited_by,
                ),
            )

    # -- counters

    def _read_stats(self, path: Path) -> None:
        now_s = self._clock_ns() / 1e9
        try:
            stats = self._engine.path_stats(path.number)
        except EngineError as error:
            log.error("counters of %s: %s", path, error, extra=fields(peer=path.host_id))
            return
        elapsed = now_s - path.stats_s
        if elapsed >= _MIN_TICK_S / 2:
            path.tx_bps = max(math.floor((stats.tx_bytes - path.stats.tx_bytes) * 8 / elapsed), 0)
            path.rx_bps = max(math.floor((stats.rx_bytes - path.stats.rx_bytes) * 8 / elapsed), 0)
            path.stats_s = now_s
            if stats.window_reroutes > path.stats.window_reroutes:
                path.estimator.rerouted()
            path.stats = stats
            rate = self._table.profile(path.key).rate_bps
            path.loaded = max(path.tx_bps, path.rx_bps) > _LOADED * rate or stats.inflight_bytes > 0

    def current_stats(self, path: Path) -> PathStats:
        """Counters and levels of a path now; of one without VCs those that it had in the end."""
        if not path.vcs:
            return path.stats
        try:
            return self._engine.path_stats(path.number)
        except EngineError:
            return path.stats

    def qps_headroom(self, path: Path) -> int:
        """Data QPs that a VC is made with beyond what its path uses now, so that a change of class needs no new VC.

        The largest entropy target of any class, but not more than this path's part of the device's budget.
        """
        policy = self._profile_policy
        most = max(one.pin.qps or one.entropy_target for one in policy.classes.values())
        return max(1, min(most, policy.qp_budget // self._active_peers(path)))

    def reset_peaks(self) -> int:
        """Start the peaks of all paths anew; how many paths there are."""
        for path in self._paths.values():
            with contextlib.suppress(EngineError):
                self._engine.path_reset_peaks(path.number)
        return len(self._paths)

    def rates_now(self, path: Path) -> tuple[int | None, int | None]:
        """Bits a second sent and received in the last interval; 0 when nothing can be under way."""
        return (path.tx_bps, path.rx_bps) if path.vcs else (0, 0)
