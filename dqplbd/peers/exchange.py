# SPDX-License-Identifier: Apache-2.0
"""Virtual connections: who asks whom, what both agree on, and which end dials.

A workload's connect makes the engine say that it needs a VC.  This asks the peer once for all rails of the host pair:

1. the initiator prepares its ends (queue pairs exist, receives are posted) and sends their endpoints and its limits;
2. the responder takes the smaller limits, prepares its ends, begins to accept, and only then answers;
3. the initiator dials.

Needs that come up meanwhile join the exchange that is under way.  When both hosts ask at the same time, the exchange of
the lower host_id goes on; the other one is told to yield, drops what it prepared, and waits for the winner's.

The own host is a peer too: both ends are then prepared here and connected to each other.
"""

import asyncio
import ipaddress
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from dqplbd.config.models import TransportConfig
from dqplbd.engine.engine import Engine, EngineError, Event, Status, VcLimits
from dqplbd.logs import fields
from dqplbd.paths import Path, Paths
from dqplbd.peers.cards import (
    FEATURES,
    PROTOCOL,
    REQUIRED_FEATURES,
    Limits,
    VcAnswer,
    VcOffer,
    VcReply,
    VcRequest,
    choose_protocol,
    choose_smaller,
    epoch_text,
    missing_features,
    random_u64,
)
from dqplbd.peers.directory import Peer
from dqplbd.peers.link import PeerClient, Refused, Unreachable, join_host_port
from dqplbd.peers.manager import PeerManager

__all__ = ["VcBroker"]

log = logging.getLogger(__name__)

MAX_VCS_PER_PATH: Final = 8
ATTEMPTS: Final = 4
_RETRY_S: Final = 0.1  # before the second attempt; doubles
_YIELD_S: Final = 2.0  # longest wait for the exchange that this host yielded to

_STATUS_OF_REFUSAL: Final = {
    "version": Status.VERSION,
    "forbidden": Status.PERMISSION,
    "conflict": Status.PERMISSION,
    "busy": Status.LIMIT,
    "epoch": Status.STALE,
}


class _NeedFailed(Exception):
    """A connection cannot be made."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(slots=True, eq=False)
class _Need:
    """What the engine asked for.  ``path`` is set once a VC of that path is being made for it."""

    number: int
    device: int
    host_id: str
    epoch: int
    address: str | None
    taken: bool = False
    path: Path | None = None


@dataclass(slots=True, eq=False)
class _Vc:
    """A VC of this host."""

    number: int
    path: Path
    limits: VcLimits
    dial: bool
    connecting: bool = False
    up: bool = False


@dataclass(slots=True, eq=False)
class _Host:
    """What goes on with one host."""

    needs: dict[int, _Need] = field(default_factory=dict)
    task: "asyncio.Task[None] | None" = None
    attempt: str | None = None  # own exchange that is under way
    inbound: asyncio.Event = field(default_factory=asyncio.Event)  # the other side's exchange was answered


class VcBroker:
    """See the module's text.  Belongs to one event loop.

    :param drain_events: makes the daemon take in all events that the engine has told until now.
    """

    def __init__(
        self,
        engine: Engine,
        paths: Paths,
        peers: PeerManager,
        client: PeerClient,
        own_id: str,
        own_epoch: int,
        transport: TransportConfig,
        drain_events: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._paths = paths
        self._peers = peers
        self._client = client
        self._own_id = own_id
        self._own_epoch = own_epoch
        self._transport = transport
        self._drain_events = drain_events
        self._hosts: dict[str, _Host] = {}
        self._vcs: dict[int, _Vc] = {}
        self.needs_total = 0
        self.needs_failed_total = 0

    def reload(self, transport: TransportConfig) -> None:
        """Other limits, for VCs to come."""
        self._transport = transport

    async def stop(self) -> None:
        """End what is under way; VCs are the engine's to end."""
        tasks = [host.task for host in self._hosts.values() if host.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- events of the engine

    def on_need(self, event: Event) -> None:
        """A client wants to connect to a host that there is no VC to."""
        self.needs_total += 1
        address = None
        if event.address and event.port:
            ip = ipaddress.ip_address(event.address)
            text = f"{ip}%{event.scope}" if ip.version == 6 and event.scope else str(ip)
            address = join_host_port(text, event.port)
        need = _Need(event.need, event.device, event.host_id, event.epoch, address)
        host = self._hosts.setdefault(need.host_id, _Host())
        host.needs[need.number] = need
        if host.task is None:
            host.task = asyncio.get_running_loop().create_task(self._serve(need.host_id, host))

    def on_up(self, event: Event) -> None:
        """A VC works now."""
        vc = self._vcs.get(event.vc)
        if vc is None:
            return
        vc.connecting, vc.up = False, True
        self._paths.vc_up(vc.path, vc.number, vc.limits)
        self._peers.use(vc.path.host_id, True)
        log.info("VC up", extra=fields(path=vc.path, vc=vc.number, qps=vc.limits.qps, dialed=vc.dial))
        host = self._hosts.get(vc.path.host_id)
        if host is not None:
            # All that were told before this event; the engine has met them with this VC.
            for need in [need for need in host.needs.values() if need.device == vc.path.key[0]]:
                if need.epoch == vc.path.epoch:
                    del host.needs[need.number]
                else:  # of another life of that host: no VC will ever meet it
                    text = f"the handle is of epoch {epoch_text(need.epoch)} of {need.host_id}, which restarted"
                    self._fail(host, need, Status.STALE, text)
            self._tidy(vc.path.host_id, host)

    def on_down(self, event: Event) -> None:
        """A VC is gone, or was never made."""
        vc = self._vcs.pop(event.vc, None)
        if vc is None:
            return
        path, host_id = vc.path, vc.path.host_id
        text = event.text or Status.UNREACHABLE.name
        log.warning("VC down: %s", text, extra=fields(path=path, vc=vc.number, was_up=vc.up))
        self._paths.vc_down(path, vc.number, text)
        if not any(other.up for other in self._vcs.values() if other.path.host_id == host_id):
            self._peers.use(host_id, False)
        host = self._hosts.get(host_id)
        if host is not None and not any(other.path is path for other in self._vcs.values()):
            for need in [need for need in host.needs.values() if need.path is path]:
                self._fail(host, need, Status.UNREACHABLE, text)
            self._tidy(host_id, host)
        if host_id != self._own_id:
            self._peers.hurry(host_id)

    def _tidy(self, host_id: str, host: _Host) -> None:
        if not host.needs and host.task is None and host.attempt is None:
            self._hosts.pop(host_id, None)

    @staticmethod
    def _open(host: _Host, need: _Need) -> bool:
        """Whether a need is still to be met; the engine uses numbers again."""
        return host.needs.get(need.number) is need

    def _fail(self, host: _Host, need: _Need, status: Status, text: str) -> None:
        if not self._open(host, need):
            return
        del host.needs[need.number]
        self.needs_failed_total += 1
        log.warning(
            "connection to %s failed: %s", need.host_id, text, extra=fields(peer=need.host_id, status=status.name)
        )
        self._engine.need_failed(need.number, status)

    # -- needs

    async def _serve(self, host_id: str, host: _Host) -> None:
        """Serve the needs for one host until there are none."""
        try:
            while todo := [need for need in host.needs.values() if not need.taken]:
                for need in todo:
                    need.taken = True
                try:
                    await self._connect(host_id, host, todo)
                except _NeedFailed as error:
                    self._fail_all(host, todo, error.status, str(error))
                except EngineError as error:
                    self._fail_all(host, todo, error.status, error.text)
                except Exception:
                    log.exception("connecting to %s failed", host_id)
                    self._fail_all(host, todo, Status.INTERNAL, "the daemon failed; its log has the details")
        finally:
            host.task = None
            self._tidy(host_id, host)

    def _fail_all(self, host: _Host, needs: Iterable[_Need], status: Status, text: str) -> None:
        for need in needs:
            if need.path is None:
                self._fail(host, need, status, text)

    async def _connect(self, host_id: str, host: _Host, needs: list[_Need]) -> None:
        """Make VCs for needs of one host.  :raises _NeedFailed: none of them can be met."""
        current = await self._find(host_id, needs)
        for need in needs:
            if need.epoch != current:
                text = (
                    f"the handle is of epoch {epoch_text(need.epoch)} of {host_id}, which has {epoch_text(current)} now"
                )
                self._fail(host, need, Status.STALE, text)
        wanted: list[Path] = []
        for need in [need for need in needs if self._open(host, need)]:
            path = self._paths.get(need.device, host_id)
            if path is None:
                self._fail(
                    host, need, Status.UNREACHABLE, f"{host_id} has no device on the rail of device {need.device}"
                )
            elif self.connecting(path):
                need.path = path
            elif path not in wanted:
                wanted.append(path)
        if not wanted:
            return
        if host_id == self._own_id:
            for path in wanted:
                self._connect_self(path)
        else:
            await self._exchange(host_id, host, needs, wanted)
        for need in [need for need in needs if self._open(host, need)]:
            path = self._paths.get(need.device, host_id)
            if path is not None and self.connecting(path):
                need.path = path
            else:
                self._fail(host, need, Status.UNREACHABLE, f"the path to {host_id} is gone")

    async def _find(self, host_id: str, needs: list[_Need]) -> int:
        """The epoch that a host has now.  :raises _NeedFailed: it cannot be reached."""
        if host_id == self._own_id:
            return self._own_epoch
        need = needs[-1]
        try:
            peer = await self._peers.ensure(host_id, need.epoch, need.address)
        except Unreachable as error:
            raise _NeedFailed(Status.UNREACHABLE, str(error)) from None
        except Refused as error:
            raise _NeedFailed(_STATUS_OF_REFUSAL.get(error.code, Status.UNREACHABLE), error.text) from None
        return peer.epoch or 0

    def connecting(self, path: Path) -> bool:
        """Whether a VC of a path is being connected."""
        return any(vc.connecting and vc.path is path for vc in self._vcs.values())

    def _existing(self, path: Path) -> int:
        return sum(vc.path is path and (vc.up or vc.connecting) for vc in self._vcs.values())

    def _any(self, path: Path) -> bool:
        return any(vc.path is path for vc in self._vcs.values())

    # -- VCs

    def _limits(self, path: Path) -> Limits:
        """What this end offers for a VC: with all queue pairs that the path may need in whatever class it gets."""
        info = path.device.info
        assert info is not None, "only open devices have paths"
        transport = self._transport
        qps = max(self._paths.profile(path).qps, self._paths.qps_headroom(path))
        return Limits(
            qps=max(1, min(qps, transport.max_qps, (info.max_qps or transport.max_qps + 1) - 1)),
            depth=max(1, min(transport.queue_depth, info.max_send_depth or transport.queue_depth)),
            credits=transport.control_credits,
            segment_bytes=max(128, min(transport.max_segment_bytes, info.max_segment_bytes or 2**31)),
        )

    def _prepare(self, path: Path, limits: Limits, *, dial: bool) -> tuple[_Vc, list[bytes]]:
        """:raises EngineError: a resource is missing."""
        engine_limits = VcLimits(limits.qps, limits.depth, limits.credits, limits.segment_bytes)
        number, endpoints = self._engine.vc_prepare(path.number, engine_limits)
        # Numbers are used again: what the engine has told of an older VC of this number must be taken in first.
        self._drain_events()
        vc = self._vcs[number] = _Vc(number, path, engine_limits, dial)
        return vc, endpoints

    def _start(self, vc: _Vc, limits: Limits, endpoints: list[bytes]) -> None:
        """:raises EngineError: the endpoints cannot be used; the VC is closed then."""
        vc.limits = VcLimits(limits.qps, limits.depth, limits.credits, limits.segment_bytes)
        vc.connecting = True
        try:
            self._engine.vc_connect(vc.number, vc.limits, endpoints, dial=vc.dial)
        except EngineError as error:
            self._close(vc, Status.UNREACHABLE, error.text)
            raise

    def _close(self, vc: _Vc, status: Status, why: str) -> None:
        if self._vcs.get(vc.number) is not vc:
            return
        del self._vcs[vc.number]
        try:
            self._engine.vc_close(vc.number, status, why)
        except EngineError as error:
            log.debug("VC cannot be closed: %s", error, extra=fields(vc=vc.number))

    def _connect_self(self, path: Path) -> None:
        """A VC from this host to itself: both ends are here.  :raises EngineError: it cannot be made."""
        limits = self._limits(path)
        near, near_endpoints = self._prepare(path, limits, dial=True)
        try:
            far, far_endpoints = self._prepare(path, limits, dial=False)
        except EngineError as error:
            self._close(near, Status.UNREACHABLE, error.text)
            raise
        try:
            self._start(far, limits, near_endpoints)
            self._start(near, limits, far_endpoints)
        except EngineError as error:
            self._close(near, Status.UNREACHABLE, error.text)
            self._close(far, Status.UNREACHABLE, error.text)
            raise

    async def _exchange(self, host_id: str, host: _Host, needs: list[_Need], wanted: list[Path]) -> None:
        """Ask the peer for VCs on the wanted paths, and on its other rails that have none.

        :raises _NeedFailed: there will be none.
        """
        error = _NeedFailed(Status.UNREACHABLE, f"{host_id} cannot be reached")
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(_RETRY_S * 2 ** (attempt - 1) * random.uniform(0.5, 1))
            peer = self._peers.directory.by_host(host_id)
            if peer is None or peer.hello is None:
                raise _NeedFailed(Status.UNREACHABLE, f"{host_id} is no peer any more")
            # By the other side's exchange some may be met by now; by a restart of it the paths may be others.
            devices = {need.device for need in needs if self._open(host, need)}
            wanted = [
                path for path in self._paths.of_host(host_id) if path.key[0] in devices and not self.connecting(path)
            ]
            if not wanted:
                return
            try:
                await self._attempt(peer, host, wanted)
                return
            except Refused as refused:
                status = _STATUS_OF_REFUSAL.get(refused.code, Status.UNREACHABLE)
                error = _NeedFailed(status, refused.text)
                if refused.code == "yield":
                    await self._wait_inbound(host)
                elif refused.code == "busy":
                    continue
                elif refused.code in ("epoch", "unknown"):
                    known = peer.epoch
                    try:
                        found = await self._peers.refresh(peer)
                    except Unreachable as unreachable:
                        raise _NeedFailed(Status.UNREACHABLE, str(unreachable)) from None
                    if found.epoch != known:
                        raise _NeedFailed(Status.STALE, f"{host_id} restarted: {refused.text}") from None
                else:
                    raise error from None
            except Unreachable as unreachable:
                error = _NeedFailed(Status.UNREACHABLE, str(unreachable))
                self._peers.hurry(host_id)
        raise error

    async def _wait_inbound(self, host: _Host) -> None:
        try:
            async with asyncio.timeout(_YIELD_S):
                await host.inbound.wait()
        except TimeoutError:
            pass  # the winner failed: try again

    async def _attempt(self, peer: Peer, host: _Host, wanted: list[Path]) -> None:
        """One exchange.

        :raises Refused, Unreachable: the peer's answer.  :raises _NeedFailed: no rail came through.
        """
        host_id = peer.host_id or ""
        rails = wanted + [path for path in self._paths.of_host(host_id) if path not in wanted and not self._any(path)]
        prepared: dict[int, tuple[_Vc, Limits]] = {}
        offers: list[VcOffer] = []
        attempt = epoch_text(random_u64())
        host.inbound.clear()
        host.attempt = attempt
        problems: list[str] = []
        try:
            for path in rails:
                limits = self._limits(path)
                try:
                    vc, endpoints = self._prepare(path, limits, dial=True)
                except EngineError as error:
                    problems.append(f"{path}: {error.text}")
                    continue
                prepared[path.device.rail] = (vc, limits)
                offers.append(
                    VcOffer(
                        rail=path.device.rail,
                        device=path.device.name,
                        mtu_bytes=self._mtu(path),
                        existing=self._existing(path),
                        limits=limits,
                        endpoints=tuple(endpoint.hex() for endpoint in endpoints),
                    )
                )
            if not offers:
                raise _NeedFailed(Status.LIMIT, "; ".join(problems))
            request = VcRequest(
                protocol=choose_protocol(PROTOCOL, peer.hello.protocol) if peer.hello is not None else PROTOCOL.max,
                from_host_id=self._own_id,
                from_epoch=epoch_text(self._own_epoch),
                to_epoch=epoch_text(peer.epoch or 0),
                attempt=attempt,
                features=FEATURES,
                required=REQUIRED_FEATURES,
                vcs=tuple(offers),
            )
            answer = await self._client.vcs(peer.address, request)
            for reply in answer.vcs:
                problem = self._take_reply(reply, prepared)
                if problem:
                    problems.append(problem)
        finally:
            host.attempt = None
            for vc, _ in prepared.values():
                if not vc.connecting:
                    self._close(vc, Status.CANCELED, "not used")
        if problems:
            log.warning("VCs to %s: %s", host_id, "; ".join(problems), extra=fields(peer=host_id, attempt=attempt))
        if not any(self.connecting(path) or self._any(path) for path in wanted):
            raise _NeedFailed(Status.UNREACHABLE, "; ".join(problems) or f"{host_id} answered for none of the rails")

    def _take_reply(self, reply: VcReply, prepared: dict[int, tuple[_Vc, Limits]]) -> str:
        """Dial a VC that the peer has ready.  :returns: what is wrong, empty when nothing is."""
        mine = prepared.get(reply.rail)
        if mine is None:
            return f"rail {reply.rail}: answered, but not asked for"
        vc, offered = mine
        if self._vcs.get(vc.number) is not vc or vc.connecting:
            return f"rail {reply.rail}: gone meanwhile"
        if reply.error is not None or reply.limits is None:
            return f"rail {reply.rail}: {vc.path.host_id} answers: {reply.error or 'no limits'}"
        limits = reply.limits
        for name in ("qps", "depth", "credits", "segment_bytes"):
            if getattr(limits, name) > getattr(offered, name):
                return (
                    f"rail {reply.rail}: peer answers {name} {getattr(limits, name)}, offered {getattr(offered, name)}"
                )
        if len(reply.endpoints) != limits.qps + 1:
            return f"rail {reply.rail}: {len(reply.endpoints)} endpoints for {limits.qps} data QPs"
        self._compare_mtu(vc.path, reply.mtu_bytes)
        try:
            self._start(vc, limits, [bytes.fromhex(endpoint) for endpoint in reply.endpoints])
        except EngineError as error:
            return f"rail {reply.rail}: {error.text}"
        return ""

    def _mtu(self, path: Path) -> int:
        return path.device.info.mtu if path.device.info is not None and path.device.info.mtu else 1500

    def _compare_mtu(self, path: Path, theirs: int | None) -> None:
        if theirs is not None and theirs != self._mtu(path):
            log.warning(
                "MTU differs on %s: %d here, %d there; the smaller one counts",
                path,
                self._mtu(path),
                theirs,
                extra=fields(peer=path.host_id),
            )

    # -- the other side asks

    async def on_vcs(self, remote: str, request: VcRequest) -> VcAnswer:
        """A host wants VCs.  :raises Refused: not so."""
        if request.to_epoch != epoch_text(self._own_epoch):
            raise Refused(
                "epoch",
                f"the request is for epoch {request.to_epoch} of {self._own_id}, which has "
                f"{epoch_text(self._own_epoch)} now",
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
        problem = missing_features(request)
        if problem:
            raise Refused("version", problem)
        host = self._hosts.setdefault(request.from_host_id, _Host())
        if host.attempt is not None and self._own_id < request.from_host_id:
            raise Refused("yield", f"exchange {host.attempt} of {self._own_id} goes before {request.attempt}")
        for offer in request.vcs:
            path = self._path_of(request.from_host_id, offer.rail)
            if path is None:
                continue
            for vc in [vc for vc in self._vcs.values() if vc.path is path and vc.connecting and not vc.dial]:
                if self._existing(path) > offer.existing:
                    self._close(vc, Status.CANCELED, f"the peer gave it up and began anew with {request.attempt}")
            if self._existing(path) > offer.existing:
                # It began before it knew of the VC that an exchange of this host has made since.
                raise Refused(
                    "yield", f"there is a VC on rail {offer.rail} that exchange {request.attempt} did not know of"
                )
        replies = [self._reply(request, offer) for offer in request.vcs]
        host.inbound.set()
        self._tidy(request.from_host_id, host)
        return VcAnswer(attempt=request.attempt, vcs=tuple(replies))

    def _path_of(self, host_id: str, rail: int) -> Path | None:
        return next((path for path in self._paths.of_host(host_id) if path.device.rail == rail), None)

    def _reply(self, request: VcRequest, offer: VcOffer) -> VcReply:
        """Prepare this end of one VC, ready to receive."""

        def refuse(text: str) -> VcReply:
            log.warning(
                "VC for %s refused: %s",
                request.from_host_id,
                text,
                extra=fields(rail=offer.rail, attempt=request.attempt),
            )
            return VcReply(rail=offer.rail, error=text[:1024])

        path = self._path_of(request.from_host_id, offer.rail)
        if path is None:
            mine = sorted({device.rail for device in self._paths.devices})
            return refuse(f"{self._own_id} has no device on rail {offer.rail} that reaches it; its rails are {mine}")
        if len(offer.endpoints) != offer.limits.qps + 1:
            return refuse(
                f"{len(offer.endpoints)} endpoints for {offer.limits.qps} data QPs; expected one more than these"
            )
        if sum(vc.path is path for vc in self._vcs.values()) >= MAX_VCS_PER_PATH:
            return refuse(f"there are {MAX_VCS_PER_PATH} VCs on this path already")
        ours = self._limits(path)
        limits = choose_smaller(ours, offer.limits)
        try:
            vc, endpoints = self._prepare(path, limits, dial=False)
            peer_endpoints = [bytes.fromhex(endpoint) for endpoint in offer.endpoints[: limits.qps + 1]]
            self._start(vc, limits, peer_endpoints)
        except EngineError as error:
            return refuse(error.text)
        self._compare_mtu(path, offer.mtu_bytes)
        return VcReply(
            rail=offer.rail,
            device=path.device.name,
            mtu_bytes=self._mtu(path),
            limits=limits,
            endpoints=tuple(endpoint.hex() for endpoint in endpoints),
        )
