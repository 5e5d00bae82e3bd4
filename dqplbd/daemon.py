# SPDX-License-Identifier: Apache-2.0
"""``dqplbd``: the daemon.  Puts the parts together, starts them in order, reloads, and stops.

Exit codes: 0 ended as asked, 1 failed, 2 wrong usage, 78 the configuration cannot be used.

Signals: SIGHUP reads the configuration again; SIGTERM and SIGINT end the daemon after what clients have under way, at
most ``clients.drain_s``; a second one ends it at once.
"""

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any, Final

import uvloop

from dqplbd import __version__, logs
from dqplbd.admin.model import ConfigProblem, ReloadReport
from dqplbd.admin.server import AdminServer
from dqplbd.clients.server import ClientServer
from dqplbd.config import Config, ConfigError, load_config, parse_config, split_host_port
from dqplbd.devices import Devices, NoDevicesError
from dqplbd.engine.engine import (
    DeviceChange,
    DeviceInfo,
    DeviceSpec,
    Engine,
    EngineError,
    EngineSettings,
    Event,
    EventType,
    Status,
)
from dqplbd.inventory.affinity import choose_cpu, spin_us
from dqplbd.inventory.open import LocalDevice
from dqplbd.inventory.rdma_counters import RdmaCounters
from dqplbd.logs import fields
from dqplbd.metrics.server import MetricsServer
from dqplbd.notify import Notifier
from dqplbd.overview import Overview
from dqplbd.paths import Paths
from dqplbd.peers.cards import (
    PROTOCOL,
    BurstLease,
    BurstRequest,
    Hello,
    HelloLocation,
    VcAnswer,
    VcRequest,
    epoch_text,
    random_u64,
)
from dqplbd.peers.directory import Answer, Directory, Peer, State
from dqplbd.peers.exchange import VcBroker
from dqplbd.peers.link import ApiServer, PeerClient, Refused, join_host_port
from dqplbd.peers.manager import PeerManager, peer_timing
from dqplbd.probing.burst import BurstDriver
from dqplbd.probing.burst_traffic import CLIENT_NAME
from dqplbd.reload import restart_only
from dqplbd.topology.location import Location, PathClass
from dqplbd.topology.sources import HostLocations, read_topology
from dqplbd.unixsocket import LockError, PathLock

__all__ = ["DEFAULT_CONFIG", "Daemon", "StartError", "main"]

log = logging.getLogger("dqplbd.daemon")

DEFAULT_CONFIG: Final = FilePath("/etc/dqplbd/dqplbd.yaml")
EX_CONFIG: Final = 78  # sysexits(3)
_ENGINE_CLIENTS: Final = 4096  # the most that clients.max_clients may be
_DRAIN_LOOK_S: Final = 0.02
_HEARTBEAT_LOOK_S: Final = 1.0
_WILDCARDS: Final = ("0.0.0.0", "::")


class StartError(Exception):
    """The daemon cannot start; the text says why and what to do."""


def load_locations(config: Config) -> HostLocations:
    """What the configured topology file says; nothing without one.  :raises ConfigError: with what is wrong in it."""
    section = config.classification
    if section.topology_file is None:
        return HostLocations()
    return read_topology(section.topology_file, section.topology_format, config.host.host_id)


def rdma_ports(devices: Sequence[LocalDevice]) -> dict[str, tuple[str, int]]:
    """(name of the RDMA device, port) by name of the device, of those that are RDMA devices."""
    return {
        device.name: (device.spec.address, device.spec.port or 1)
        for device in devices
        if device.spec.provider.split(":")[-1] == "verbs" and device.spec.address
    }


def device_change_name(change: int) -> str:
    """``up``, ``down``, ``address``, ``fatal``, or ``other``, which is also what this version does not know."""
    try:
        return DeviceChange(change).name.lower()
    except ValueError:
        return DeviceChange.OTHER.name.lower()


def raise_nofile() -> int:
    """Allow this process as many open files as it may have; a queue pair of the tcp provider is a connection.

    :returns: the limit that holds now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return soft
    return hard


class Daemon:
    """One daemon: its parts, and what happens between them.  Belongs to the event loop that runs it."""

    def __init__(self, config: Config, config_file: FilePath | None, locations: HostLocations) -> None:
        self.config = config
        self.config_file = config_file
        self.epoch = random_u64()
        self.started_unix_s = self.loaded_unix_s = time.time()
        self.started_s = time.monotonic()
        self.ready = False
        self.stopping = False
        self.reloads = self.reloads_failed = self.stalls = 0
        self.fault = ""
        """What keeps the control plane from its work; empty when nothing does."""
        self.reload_problems: list[ConfigProblem] = []
        self.restart_needed: list[str] = []
        self.api_address = ""
        self.inventory = Devices(config, self)
        self.rdma = RdmaCounters()
        self.device_changes: dict[int, dict[str, int]] = {}
        """How often what happened to each device, by its number."""
        self.engine: Engine
        self.paths: Paths
        self.directory: Directory
        self.peers: PeerManager | None = None
        self.broker: VcBroker | None = None
        self.bursts: BurstDriver | None = None
        self.clients: ClientServer | None = None
        self.metrics: MetricsServer | None = None
        self._admin: AdminServer | None = None
        self._api: ApiServer | None = None
        self._client: PeerClient | None = None
        self._locations = locations
        self._locks: list[PathLock] = []
        self._notifier = Notifier()
        self._events: deque[Event] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._reloading = asyncio.Lock()
        self._beat = 0
        self._beat_s = time.monotonic()
        self._cleanup = contextlib.AsyncExitStack()

    # -- start

    def handle_signals(self) -> None:
        """Obey signals; from before the start on, since without a handler SIGHUP would end the process."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self._on_hup)

    def _on_hup(self) -> None:
        if self.ready and not self.stopping:
            self._spawn(self._hup())
        else:
            log.info("SIGHUP ignored: not %s", "running any more" if self.stopping else "started yet")

    async def start(self) -> None:
        """Start all parts in order.

        :raises StartError: one of them cannot be; those that were started are stopped again.
        """
        try:
            await self._start()
        except (OSError, LockError, EngineError, NoDevicesError) as error:
            await self._cleanup.aclose()
            text = str(error)
            if isinstance(error, OSError) and error.strerror is not None and error.filename is None:
                text = error.strerror  # without "[Errno 2]", which helps nobody beside the text
            raise StartError(text) from error
        except BaseException:
            await self._cleanup.aclose()
            raise

    async def _start(self) -> None:
        config = self.config
        loop = asyncio.get_running_loop()
        nofile = raise_nofile()
        log.info(
            "starting",
            extra=fields(
                version=__version__,
                host_id=config.host.host_id,
                epoch=epoch_text(self.epoch),
                config=self.config_file,
                nofile=nofile,
            ),
        )
        for path in (config.clients.socket, config.admin.socket):
            lock = PathLock(path)
            self._locks.append(lock)
            self._cleanup.callback(lock.release)

        await self.inventory.find()
        self._api = ApiServer(self)
        host, port = await self._api.start(config.peers.listen)
        self._cleanup.push_async_callback(self._api.stop)
        wildcard = host.split("%")[0] in _WILDCARDS
        reachable = self.inventory.reachable_address() if wildcard else host
        if reachable is None:
            raise StartError(
                f"peers.listen is {config.peers.listen}, and no device has an IP address that could be told to peers: "
                "set peers.listen to an address of this host that they can reach"
            )
        self.api_address = join_host_port(reachable, port)

        self._start_engine(reachable, port)
        self._cleanup.callback(self._close_engine)
        self.inventory.open(self.engine)
        self.rdma.watch(rdma_ports(self.devices))
        self._cleanup.callback(self.rdma.stop)
        self.paths = Paths(
            self.engine,
            self.devices,
            self.epoch,
            config,
            self._locations,
            self.inventory.probers,
            on_rtt=self._on_rtt,
            on_silent=self._on_silent,
        )

        self._client = PeerClient(None if wildcard else reachable, config.peers.request_timeout_s)
        self._cleanup.push_async_callback(self._client.close)
        self.directory = Directory(config.host.host_id, self.epoch, peer_timing(config.peers), _chance)
        self.peers = PeerManager(self.directory, self._client, config.peers, self.own_hello, self)
        self.broker = VcBroker(
            self.engine,
            self.paths,
            self.peers,
            self._client,
            config.host.host_id,
            self.epoch,
            config.transport,
            self._drain_events,
        )
        self._cleanup.push_async_callback(self.broker.stop)
        # A path to this host itself, so that its own processes reach each other.
        self.paths.set_host(self.own_hello(), self.paths.own_location)
        loop.add_reader(self.engine.fileno(), self._drain_events)
        self._cleanup.callback(loop.remove_reader, self.engine.fileno())
        self.peers.start()
        self._cleanup.push_async_callback(self.peers.stop)
        self.inventory.watch()
        self._cleanup.push_async_callback(self.inventory.stop)

        self.clients = ClientServer(
            self.engine,
            config.clients,
            self._device_list,
            self._drain_events,
            internal=CLIENT_NAME,
            expect_peers=self.paths.expect_peers,
        )
        self.clients.start()
        self._cleanup.push_async_callback(self.clients.stop)
        self.bursts = BurstDriver(self.paths, self.peers, self._client, self.epoch, config, _chance)
        self.bursts.start()
        self._cleanup.push_async_callback(self.bursts.stop)
        view = Overview(self)
        self._admin = AdminServer(view, config.admin)
        await self._admin.start()
        self._cleanup.push_async_callback(self._admin.stop)
        if config.metrics.enabled:
            self.metrics = MetricsServer(view, config.metrics)
            await self.metrics.start()
            self._cleanup.push_async_callback(self.metrics.stop)
        self._spawn(self._tick())
        self._spawn(self._watch())
        self.ready = True
        log.info(
            "ready",
            extra=fields(
                api=self.api_address,
                clients=config.clients.socket,
                admin=config.admin.socket,
                metrics=self.metrics.address if self.metrics is not None else None,
                devices=len([device for device in self.devices if not device.error]),
            ),
        )
        self._notifier.ready(self._status_line())

    def _start_engine(self, address: str, port: int) -> None:
        config = self.config
        cpu, warning = choose_cpu(config.engine.cpus)
        if warning:
            log.warning("%s", warning)
        ip = ipaddress.ip_address(address)
        scope = getattr(ip, "scope_id", None)
        transport = config.transport
        settings = EngineSettings(
            host_id=config.host.host_id,
            epoch=self.epoch,
            spin_us=spin_us(config.engine.spin_ns, len(os.sched_getaffinity(0))),
            cpu=cpu,
            max_clients=_ENGINE_CLIENTS,  # the limit in force is that of the attach socket, which a reload can change
            max_flows=config.engine.max_flows,
            cancel_deadline_ns=round(transport.cancel_deadline_s * 1e9),
            stall_ns=round(transport.stall_s * 1e9),
            connect_deadline_ns=round(transport.connect_timeout_s * 1e9),
            api_address=ip.packed,
            api_port=port,
            api_scope=int(scope) if isinstance(scope, str) and scope.isdecimal() else 0,
        )
        self.engine = Engine(settings)

    def _close_engine(self) -> None:
        self.inventory.stop_probers()
        self.engine.close()

    def _on_rtt(self, path_class: PathClass, rtt_ns: int) -> None:
        if self.metrics is not None:
            self.metrics.observe_rtt(path_class, rtt_ns)

    def _on_silent(self, host_id: str) -> None:
        if self.peers is not None:
            self.peers.suspect(host_id)

    def own_hello(self) -> Hello:
        """What this host tells others."""
        return Hello(
            protocol=PROTOCOL,
            host_id=self.config.host.host_id,
            epoch=epoch_text(self.epoch),
            version=__version__,
            api_port=split_host_port(self.api_address)[1],
            location=HelloLocation(**self.paths.own_location.as_dict()),
            devices=self.inventory.hello(),
        )

    def _device_list(self) -> Sequence[tuple[DeviceInfo, DeviceSpec, int]]:
        """The open devices by their numbers in the engine, which are those that clients know."""
        result = []
        opened = [(device.number, device) for device in self.devices if device.number is not None]
        for number, device in sorted(opened, key=lambda one: one[0]):
            device.info = self.engine.device(number)
            result.append((device.info, device.spec, device.latency_ns))
        return result

    # -- while it runs

    async def run(self) -> None:
        """Until it is asked to stop; then stop."""
        try:
            await self._stop.wait()
        finally:
            await self._shut_down()

    def stop(self) -> None:
        """End the daemon; a second call ends it without waiting for anybody."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _shut_down(self) -> None:
        self.stopping = True
        if self.clients is not None:
            self.clients.stop_accepting()
        self._notifier.stopping("draining")
        log.info("stopping")
        try:
            if self.bursts is not None:
                await self.bursts.stop()
            if self.clients is not None:
                await self._drain_clients()
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._cleanup.aclose()
        log.info("stopped")

    async def _drain_clients(self) -> None:
        """Give clients time for what they have under way."""
        limit = time.monotonic() + self.config.clients.drain_s
        while not self._hurry.is_set() and time.monotonic() < limit:
            busy = 0
            for record in self.clients.records() if self.clients is not None else []:
                with contextlib.suppress(EngineError):
                    busy += self.engine.client_stats(record.client).requests
            if not busy:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_LOOK_S):
                    await self._hurry.wait()

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.critical("a part of the daemon failed; it ends", exc_info=task.exception())
            self.failed = True
            self.stop()

    failed = False

    async def _tick(self) -> None:
        """Measurements in, profiles out."""
        while True:
            try:
                self.paths.tick()
                self.fault = ""
            except Exception as error:
                # What carries data goes on with the profiles that it has; that is better than to end.
                self.fault = f"measurements are not taken in: {type(error).__name__}: {error}"
                log.exception("measurements are not taken in")
            await asyncio.sleep(self.paths.tick_s)

    async def _watch(self) -> None:
        """Watch the engine's heartbeat, and feed the watchdog while it moves."""
        watchdog_s = self._notifier.watchdog_s
        interval = min(watchdog_s / 2, _HEARTBEAT_LOOK_S) if watchdog_s is not None else _HEARTBEAT_LOOK_S
        fed_s = 0.0
        while True:
            beat = self.engine.heartbeat()
            now = time.monotonic()
            if beat != self._beat:
                self._beat, self._beat_s = beat, now
                if watchdog_s is not None and now - fed_s >= watchdog_s / 2 - interval / 2:
                    self._notifier.watchdog()
                    fed_s = now
            self.rdma.watch(rdma_ports(self.devices))  # devices come, go, and change their names
            await asyncio.sleep(interval)

    def heartbeat_age_s(self) -> float:
        """Time since the engine's loop was last seen to move."""
        beat = self.engine.heartbeat()
        now = time.monotonic()
        if beat != self._beat:
            self._beat, self._beat_s = beat, now
        return now - self._beat_s

    def _status_line(self) -> str:
        up = sum(peer.state == "up" for peer in self.directory)
        return f"{up} of {len(self.directory)} peers up, {len(self.clients or ())} clients"

    # -- events of the engine

    def _drain_events(self) -> None:
        """Take in what the engine tells; in order, also when a handler asks for it in between."""
        self._events.extend(self.engine.events())
        while self._events:
            event = self._events.popleft()
            try:
                self._dispatch(event)
            except EngineError as error:
                log.error("event of the engine: %s", error, extra=fields(event=event.type))

    def _dispatch(self, event: Event) -> None:
        kind = event.type
        broker, clients = self.broker, self.clients
        if kind == EventType.NEED_VC and broker is not None:
            broker.on_need(event)
        elif kind == EventType.VC_UP and broker is not None:
            broker.on_up(event)
        elif kind == EventType.VC_DOWN and broker is not None:
            broker.on_down(event)
        elif kind == EventType.CLIENT_CUT and clients is not None:
            clients.on_cut(event.client, event.text)
        elif kind == EventType.CLIENT_GONE and clients is not None:
            clients.on_gone(event.client)
        elif kind == EventType.STALL:
            self.stalls += 1
            path = self.paths.by_number(event.path)
            log.warning("stall: %s", event.text, extra=fields(path=path, vc=event.vc))
        elif kind == EventType.DEVICE:
            changes = self.device_changes.setdefault(event.device, {})
            change = device_change_name(event.change)
            changes[change] = changes.get(change, 0) + 1
            self.inventory.on_event(event)
        elif kind == EventType.LOG:
            log.log(logging.ERROR if event.status < 0 else logging.INFO, "engine: %s", event.text)

    # -- devices (DeviceHooks)

    @property
    def devices(self) -> list[LocalDevice]:
        """All devices, also those that are not open."""
        return self.inventory.all

    def device_opened(self, device: LocalDevice) -> None:
        """A device is there now: make its paths, and tell the peers."""
        self.paths.add_device(device)
        for peer in self.directory:
            if peer.hello is not None and peer.state is State.UP:
                self.paths.set_host(peer.hello, peer.location)
        self._devices_changed()

    def device_readdressed(self, device: LocalDevice) -> None:
        """A device has another address: its own probes go on from there, and peers must learn it."""
        self.paths.prober_changed()
        self._devices_changed()

    def device_changed(self, device: LocalDevice) -> None:
        """Rate or MTU of a device are others now: profiles follow, here and at the peers."""
        self.paths.device_changed(device)
        self._devices_changed()

    def device_lost(self, device: LocalDevice, why: str) -> None:
        """A device is gone for good, and its paths with it."""
        self.paths.remove_device(device, Status.DEVICE, why)
        self._devices_changed()

    def _devices_changed(self) -> None:
        self.paths.set_host(self.own_hello(), self.paths.own_location)
        if self.peers is not None:
            self.peers.announce()

    # -- peers (PeerHooks, ApiHandler)

    def peer_answered(self, peer: Peer, location: Location, answer: Answer) -> None:
        """A peer told of itself."""
        hello = peer.hello
        if hello is None or answer is Answer.SAME:
            return
        if answer is Answer.RESTARTED:
            self.paths.remove_host(hello.host_id, Status.STALE, f"{hello.host_id} restarted: epoch {hello.epoch} now")
        self.paths.set_host(hello, location)

    def peer_forgotten(self, host_id: str, why: str) -> None:
        """A host is no peer any more."""
        self.paths.remove_host(host_id, Status.UNREACHABLE, why)

    async def on_hello(self, address: str, hello: Hello) -> Hello:
        """A host introduces itself."""
        if self.peers is None:
            raise Refused("busy", f"{self.config.host.host_id} is starting")
        return await self.peers.on_hello(address, hello)

    async def on_vcs(self, remote: str, request: VcRequest) -> VcAnswer:
        """A host wants VCs."""
        if self.broker is None:
            raise Refused("busy", f"{self.config.host.host_id} is starting")
        return await self.broker.on_vcs(remote, request)

    async def on_burst(self, remote: str, request: BurstRequest) -> BurstLease:
        """A host wants to measure the bandwidth to here."""
        if self.bursts is None:
            raise Refused("busy", f"{self.config.host.host_id} is starting")
        return await self.bursts.on_burst(request)

    # -- reload

    async def _hup(self) -> None:
        await self.reload()

    async def reload(self) -> ReloadReport:
        """Read the configuration again; on any error the old one stays in force."""
        async with self._reloading:
            self._notifier.reloading()
            try:
                return await self._reload()
            finally:
                self._notifier.ready(self._status_line())

    async def _reload(self) -> ReloadReport:
        def read() -> tuple[Config, HostLocations]:
            config = load_config(self.config_file) if self.config_file is not None else parse_config("")
            return config, load_locations(config)

        try:
            given, locations = await asyncio.get_running_loop().run_in_executor(None, read)
        except ConfigError as error:
            self.reloads_failed += 1
            self.reload_problems = [ConfigProblem(**problem.as_dict()) for problem in error.problems]
            for problem in error.problems:
                log.error("reload refused, the old configuration stays: %s", problem)
            return ReloadReport(ok=False, problems=self.reload_problems, restart_needed=self.restart_needed)
        new, self.restart_needed = restart_only(self.config, given)
        for key in self.restart_needed:
            log.warning("%s changed in the file, but keeps its value until a restart", key)
        old, self.config = self.config, new
        changed = [name for name in type(new).model_fields if getattr(old, name) != getattr(new, name)]
        logs.setup(new.logging.format, new.logging.level)
        self._locations = locations
        self.paths.reload(new, locations)
        if self.peers is not None and old.peers != new.peers:
            self.peers.reload(new.peers)
        if self.broker is not None:
            self.broker.reload(new.transport)
        if self.clients is not None:
            self.clients.configure(new.clients)
        if self.bursts is not None:
            self.bursts.reload(new)
        self.reloads += 1
        self.reload_problems = []
        self.loaded_unix_s = time.time()
        log.info("configuration reloaded", extra=fields(changed=",".join(changed) or "nothing"))
        return ReloadReport(ok=True, changed=changed, restart_needed=self.restart_needed)


def _chance() -> float:
    return int.from_bytes(os.urandom(4), "big") / 2**32


# ------------------------------------------------------------------------------------------------------------- process


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dqplbd",
        description="Measures the paths to other hosts, sizes queue pairs and windows for each, and carries the "
        "traffic of this host's processes.",
        epilog="Exit codes: 0 ended as asked, 1 failed, 2 wrong usage, 78 the configuration cannot be used.",
    )
    parser.add_argument(
        "--config",
        type=FilePath,
        metavar="FILE",
        help=f"configuration; by default {DEFAULT_CONFIG} if it exists, else built-in defaults",
    )
    parser.add_argument("--check", action="store_true", help="only check the configuration")
    parser.add_argument("--version", action="version", version=f"dqplbd {__version__}")
    return parser


async def _main(config: Config, file: FilePath | None, locations: HostLocations) -> int:
    daemon = Daemon(config, file, locations)
    daemon.handle_signals()
    try:
        await daemon.start()
    except StartError as error:
        log.critical("cannot start: %s", error)
        return 1
    await daemon.run()
    return 1 if daemon.failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the daemon until it is told to end.  :returns: the exit code."""
    args = _parser().parse_args(arguments)
    file: FilePath | None = args.config
    if file is None and DEFAULT_CONFIG.exists():
        file = DEFAULT_CONFIG
    try:
        config = load_config(file) if file is not None else parse_config("")
        locations = load_locations(config)
    except ConfigError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        return EX_CONFIG
    if args.check:
        print(f"{file or 'built-in defaults'}: ok")
        return 0
    logs.setup(config.logging.format, config.logging.level)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_main(config, file, locations))
    finally:
        logs.finish()


if __name__ == "__main__":
    sys.exit(main())
