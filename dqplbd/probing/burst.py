# SPDX-License-Identifier: Apache-2.0
"""Sends bursts that measure the bandwidth of paths, and takes those of other hosts.  Does nothing unless configured.

A burst loads the way to its receiver as much as any workload does, and many at once would be the incast that this
project exists to avoid.  So the sender asks the receiver first (``POST /v1/burst``), which grants one lease at a time,
only if its own configuration says so, and only while its device carries little.  A lease ends with its burst, or after
:data:`LEASE_S`.

What is decided is :mod:`dqplbd.probing.bursts`, what is sent :mod:`dqplbd.probing.burst_traffic`.  Whatever goes wrong
is counted, logged once a host, and hurts nobody.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NoReturn

from dqplbd.config import Config
from dqplbd.logs import fields
from dqplbd.paths import Path, Paths
from dqplbd.peers.cards import (
    PROTOCOL,
    BurstLease,
    BurstRequest,
    choose_protocol,
    epoch_text,
    random_u64,
)
from dqplbd.peers.directory import State
from dqplbd.peers.link import PeerClient, Refused, Unreachable
from dqplbd.peers.manager import PeerManager
from dqplbd.probing.burst_traffic import BurstError, Endpoint, receive_burst, send_burst
from dqplbd.probing.bursts import (
    MAX_BURST_BYTES,
    MESSAGES,
    Burst,
    BurstPlanner,
    BurstPolicy,
    BurstResult,
    Candidate,
    DailyBudget,
    burst_place,
    measured_rate,
)

__all__ = ["BURST_CLIENTS", "LEASE_S", "BurstDriver"]

log = logging.getLogger(__name__)

LEASE_S: Final = 10.0
BURST_CLIENTS: Final = 2
"""Clients of its own that a daemon has at most: one that sends and one that receives."""
_LOOK_S: Final = 1.0
_READY_S: Final = 3.0  # for the receiving end to listen
_STOP_S: Final = 3.0


class BurstDriver:
    """See the module's text.  Belongs to one event loop.

    :param client: for asking peers.
    :param chance: a random number of 0..1, 1 not included.
    """

    def __init__(
        self,
        paths: Paths,
        peers: PeerManager,
        client: PeerClient,
        own_epoch: int,
        config: Config,
        chance: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = paths
        self._peers = peers
        self._client = client
        self._own_id = config.host.host_id
        self._own_epoch = own_epoch
        self._config = config
        self._clock = clock
        self._planner = BurstPlanner(self._own_id, self._policy(), chance)
        self._taken = DailyBudget()
        self._executor: ThreadPoolExecutor | None = None
        self._stop = threading.Event()  # ends the threads that are in a burst
        self._stopped = False
        self._wake = asyncio.Event()
        self._main: asyncio.Task[None] | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._sending = False
        self._said: set[tuple[str, str]] = set()

    # -- life

    def _policy(self) -> BurstPolicy:
        """What is configured; there are no bursts without probing, as their length follows from the RTT."""
        probing = self._config.probing
        policy = BurstPolicy.from_config(probing.active_bandwidth)
        return policy if probing.enabled else BurstPolicy(enabled=False, daily_bytes=policy.daily_bytes)

    def start(self) -> None:
        """Begin to measure, if configured."""
        self._main = asyncio.get_running_loop().create_task(self._run(), name="bursts")

    def reload(self, config: Config) -> None:
        """Put another configuration in force; a burst that is no longer wanted ends."""
        self._config = config
        policy = self._policy()
        self._planner.configure(policy)
        if not policy.enabled:
            self._stop.set()
        self._wake.set()

    async def stop(self) -> None:
        """End what is under way, and begin nothing any more.  A second call does nothing."""
        self._stopped = True
        self._stop.set()
        self._wake.set()
        tasks = {task for task in (self._main, self._receiving) if task is not None}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_STOP_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._main = self._receiving = None
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    def _threads(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(BURST_CLIENTS, thread_name_prefix="dqplbd-burst")
        return self._executor

    # -- sending

    async def _run(self) -> None:
        while not self._stopped:
            self._wake.clear()
            policy = self._policy()
            if policy.enabled:
                # A client that a stop or a reload ended is gone by now, unless a lease is still being cleaned up after.
                if self._receiving is None:
                    self._stop.clear()
                await self._look()
            try:
                async with asyncio.timeout(_LOOK_S if policy.enabled else None):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _utilisation(self) -> dict[int, float]:
        return {
            device.number: self._paths.utilisation(device.number)
            for device in self._paths.devices
            if device.number is not None
        }

    def _candidates(self) -> list[Candidate]:
        found = []
        for path in self._paths:
            rtt = path.estimator.rtt_min_ns
            peer = self._peers.directory.by_host(path.host_id)
            if path.host_id == self._own_id or rtt is None or path.target is None:
                continue
            if peer is None or peer.state is not State.UP or peer.epoch != path.epoch:
                continue
            found.append(
                Candidate(
                    path.key,
                    burst_place(path.host_id, path.location),
                    self._paths.profile(path).rate_bps,
                    max(rtt, 1),
                    bool(path.vcs),
                )
            )
        return found

    async def _look(self) -> None:
        """Send a burst if one is due, and nothing of another host is being taken."""
        if self._receiving is not None:
            return
        burst = self._planner.next(self._clock(), self._candidates(), self._utilisation())
        if burst is None:
            return
        path = self._paths.get(*burst.key)
        result, sent, again = BurstResult.FAILED, 0, False
        self._sending = True
        try:
            if path is not None:
                result, sent, again = await self._send(path, burst)
                path.bursts[result] += 1
                path.burst_bytes += sent
                path.dirty = True
        except Exception:
            log.exception("burst to %s failed", burst.key[1])
        finally:
            self._sending = False
            self._planner.done(self._clock(), burst, result, sent, again=again)

    async def _send(self, path: Path, burst: Burst) -> tuple[BurstResult, int, bool]:
        """One burst.  :returns: how it ended, bytes that may have been sent, whether to send another one soon."""
        peer = self._peers.directory.by_host(path.host_id)
        if peer is None or peer.hello is None:
            return self._failed(path, BurstResult.FAILED, f"{path.host_id} is no peer any more"), 0, False
        request = BurstRequest(
            protocol=choose_protocol(PROTOCOL, peer.hello.protocol),
            from_host_id=self._own_id,
            from_epoch=epoch_text(self._own_epoch),
            to_epoch=epoch_text(path.epoch),
            rail=path.device.rail,
            messages=MESSAGES,
            message_bytes=burst.message_bytes,
        )
        try:
            lease = await self._client.burst(peer.address, request)
        except Refused as error:
            kinds = {"busy": BurstResult.BUSY, "forbidden": BurstResult.REFUSED}
            return self._failed(path, kinds.get(error.code, BurstResult.FAILED), error.text), 0, False
        except Unreachable as error:
            return self._failed(path, BurstResult.FAILED, str(error)), 0, False
        end = Endpoint(
            self._config.clients.socket,
            path.device.name,
            int(lease.lease, 16),
            MESSAGES,
            burst.message_bytes,
            LEASE_S,
        )
        loop = asyncio.get_running_loop()
        try:
            elapsed_ns = await loop.run_in_executor(
                self._threads(), send_burst, end, bytes.fromhex(lease.handle), self._stop
            )
        except BurstError as error:
            return self._failed(path, BurstResult.FAILED, str(error)), error.sent_bytes, False
        rate = measured_rate(burst.bytes, elapsed_ns, path.estimator.rtt_min_ns or 0)
        again = False
        if rate is not None and self._paths.get(*burst.key) is path:
            again = self._paths.add_burst(path, rate)
        self._said = {(host_id, what) for host_id, what in self._said if host_id != path.host_id}
        log.info(
            "burst measured %s",
            path,
            extra=fields(
                peer=path.host_id,
                device=path.device.name,
                bytes=burst.bytes,
                elapsed_ns=elapsed_ns,
                measured_bps=rate,
                profile_bps=self._paths.profile(path).rate_bps if self._paths.get(*burst.key) is path else None,
            ),
        )
        return BurstResult.OK, burst.bytes, again

    def _failed(self, path: Path, result: BurstResult, why: str) -> BurstResult:
        """Say it once a host, until a burst to it succeeds."""
        told = (path.host_id, result.value) in self._said
        self._said.add((path.host_id, result.value))
        quiet = told or self._stopped or result is BurstResult.BUSY
        log.log(
            logging.DEBUG if quiet else logging.WARNING,
            "no burst to %s: %s",
            path,
            why,
            extra=fields(peer=path.host_id, device=path.device.name, result=result.value),
        )
        return result

    # -- receiving

    async def on_burst(self, request: BurstRequest) -> BurstLease:
        """A host asks to send a burst.  :raises Refused: not now, or not at all."""
        own = self._own_id
        if request.to_epoch != epoch_text(self._own_epoch):
            raise Refused(
                "epoch",
                f"the request is for epoch {request.to_epoch} of {own}, which has {epoch_text(self._own_epoch)} now",
                epoch_text(self._own_epoch),
            )
        if not PROTOCOL.min <= request.protocol <= PROTOCOL.max:
            raise Refused(
                "version",
                f"request of protocol version {request.protocol}; this host speaks {PROTOCOL.min}..{PROTOCOL.max}",
            )
        peer = self._peers.directory.by_host(request.from_host_id)
        if peer is None or peer.hello is None or peer.hello.epoch != request.from_epoch:
            raise Refused(
                "unknown", f"{request.from_host_id} in epoch {request.from_epoch} is not known here: say hello first"
            )
        policy = self._policy()
        if not policy.enabled:
            raise Refused("forbidden", f"{own} takes no bursts: probing.active_bandwidth.enabled is false there")
        path = next((one for one in self._paths.of_host(request.from_host_id) if one.device.rail == request.rail), None)
        if path is None or path.device.number is None:
            raise Refused("forbidden", f"{own} has no device on rail {request.rail} that {request.from_host_id} is on")
        size = request.messages * request.message_bytes
        if size > MAX_BURST_BYTES:
            raise Refused("forbidden", f"a burst of {size} bytes; {own} takes at most {MAX_BURST_BYTES}")
        self._check_time(policy, path.device.number, size)
        return await self._grant(path, request, size)

    def _check_time(self, policy: BurstPolicy, device: int, size: int) -> None:
        """:raises Refused: this host has no time for a burst now."""

        def busy(why: str) -> NoReturn:
            raise Refused("busy", f"{self._own_id} takes no burst now: {why}")

        if self._stopped:
            busy("it stops")
        if self._receiving is not None:
            busy("it is taking one")
        if self._sending:
            busy("it is sending one")
        used = self._paths.utilisation(device)
        if used > policy.max_utilisation:
            busy(f"its device carries {used:.2f} of its rate, limit {policy.max_utilisation:g}")
        left = self._taken.left(self._clock(), policy.daily_bytes)
        if size > left:
            busy(f"{left} of {policy.daily_bytes} bytes are left of what it takes in 24 hours")

    async def _grant(self, path: Path, request: BurstRequest, size: int) -> BurstLease:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[bytes] = loop.create_future()

        def listening(handle: bytes) -> None:
            if not ready.done():
                ready.set_result(handle)

        def tell(handle: bytes) -> None:
            loop.call_soon_threadsafe(listening, handle)

        lease = random_u64()
        end = Endpoint(
            self._config.clients.socket,
            path.device.name,
            lease,
            request.messages,
            request.message_bytes,
            LEASE_S,
        )
        self._stop.clear()
        self._taken.spend(self._clock(), size)
        work = loop.run_in_executor(self._threads(), receive_burst, end, tell, self._stop)
        receiving = self._receiving = loop.create_task(self._receive(request.from_host_id, work, ready))
        receiving.add_done_callback(self._received)
        try:
            async with asyncio.timeout(_READY_S):
                handle = await ready
        except TimeoutError:
            self._stop.set()
            raise Refused("busy", f"{self._own_id} did not get ready for a burst within {_READY_S} s") from None
        except BurstError as error:
            raise Refused("failed", f"{self._own_id} cannot take a burst: {error}") from None
        return BurstLease(handle=handle.hex(), lease=epoch_text(lease))

    async def _receive(self, host_id: str, work: "asyncio.Future[int]", ready: "asyncio.Future[bytes]") -> None:
        """Wait for the end of a lease."""
        try:
            received = await work
        except BurstError as error:
            if not ready.done():
                ready.set_exception(error)
            told = (host_id, "taken") in self._said
            self._said.add((host_id, "taken"))
            log.log(
                logging.DEBUG if told or self._stopped else logging.WARNING,
                "burst of %s not taken: %s",
                host_id,
                error,
                extra=fields(peer=host_id),
            )
        else:
            log.debug("burst taken", extra=fields(peer=host_id, bytes=received))

    def _received(self, task: "asyncio.Task[None]") -> None:
        self._receiving = None
        if not task.cancelled() and task.exception() is not None:
            log.error("taking a burst failed", exc_info=task.exception())
