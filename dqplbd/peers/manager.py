# SPDX-License-Identifier: Apache-2.0
"""Keeps in touch with the peers: asks those that are listed or in use, answers those that ask, notices restarts.

One loop asks whoever is due, a bounded number at a time; see :mod:`dqplbd.peers.directory` for who is due when.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

from dqplbd.config.models import PeersConfig
from dqplbd.config.types import is_loopback, split_host_port
from dqplbd.logs import fields
from dqplbd.peers.cards import PROTOCOL, CardError, Hello, choose_protocol
from dqplbd.peers.directory import Answer, Conflict, Directory, DirectoryFull, Peer, Source, State, Timing
from dqplbd.peers.discovery.dns import DnsSource
from dqplbd.peers.discovery.static import static_peers
from dqplbd.peers.link import PeerClient, Refused, Unreachable
from dqplbd.topology.location import Location

__all__ = ["PeerHooks", "PeerManager", "peer_timing"]

log = logging.getLogger(__name__)

_AT_ONCE: Final = 32  # hellos under way
_LONGEST_WAIT_S: Final = 5.0  # between two looks for peers to forget
_CLAIM_TIMEOUT_S: Final = 1.0  # for the question whether the other holder of a name is still there


class PeerHooks(Protocol):
    """What the rest of the daemon is told of peers."""

    def peer_answered(self, peer: Peer, location: Location, answer: Answer) -> None:
        """A peer told of itself; ``answer`` says what that changed."""

    def peer_forgotten(self, host_id: str, why: str) -> None:
        """A host is no peer any more, or another one now."""


def peer_timing(config: PeersConfig) -> Timing:
    """When to ask, as configured."""
    return Timing(config.retry_min_s, config.retry_max_s, forget_s=config.forget_s)


class PeerManager:
    """See the module's text.  Belongs to one event loop.

    :param own: gives this host's hello.
    """

    def __init__(
        self,
        directory: Directory,
        client: PeerClient,
        config: PeersConfig,
        own: Callable[[], Hello],
        hooks: PeerHooks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self._client = client
        self._config = config
        self._own = own
        self._hooks = hooks
        self._clock = clock
        self._wake = asyncio.Event()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._asking: dict[int, asyncio.Task[bool]] = {}
        self._main: asyncio.Task[None] | None = None
        self._dns: DnsSource | None = None
        self._dns_task: asyncio.Task[None] | None = None

    # -- life

    def start(self) -> None:
        """Begin to ask."""
        self._apply(None)
        self._main = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Ask no more."""
        tasks = [task for task in (self._main, self._dns_task, *self._asking.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._main = self._dns_task = None

    def reload(self, config: PeersConfig) -> None:
        """Put another configuration in force."""
        old, self._config = self._config, config
        self.directory.timing = peer_timing(config)
        self._client.set_timeout(config.request_timeout_s)
        self._apply(old)
        self._wake.set()

    def _apply(self, old: PeersConfig | None) -> None:
        self._listed(Source.STATIC, dict(static_peers(self._config)))
        if old is None or old.dns != self._config.dns:
            if self._dns_task is not None:
                self._dns_task.cancel()
                self._dns_task = None
            self._dns = None
            if self._config.dns is None:
                self._listed(Source.DNS, {})
            else:
                self._dns = DnsSource(self._config.dns, lambda found: self._listed(Source.DNS, dict.fromkeys(found)))
                self._dns_task = asyncio.get_running_loop().create_task(self._dns.run())

    @property
    def dns_error(self) -> str:
        """Why the last DNS look-up failed; empty when it did not."""
        return self._dns.error if self._dns is not None else ""

    def _listed(self, source: Source, now: dict[str, str | None]) -> None:
        """What a source lists now."""
        for address in self.directory.addresses_of(source) - set(now):
            gone = self.directory.drop_source(address, source)
            if gone is not None and gone.host_id is not None:
                log.info("peer no longer listed", extra=fields(peer=gone.host_id, address=gone.address))
                self._hooks.peer_forgotten(gone.host_id, f"{gone.host_id} is no longer listed as a peer")
        for address, expected in now.items():
            if not self._allowed(address):
                log.error("peer %s not asked: not a loopback address, and peers.insecure is not set", address)
                continue
            self.directory.add(address, source, self._clock(), expected)
        self._wake.set()

    def _allowed(self, address: str) -> bool:
        """Whether plain HTTP may go there."""
        return self._config.insecure or is_loopback(split_host_port(address)[0])

    async def _run(self) -> None:
        look_s = 0.0
        while True:
            self._wake.clear()
            now = self._clock()
            due, later = self.directory.due(now)
            for peer in due:
                self._ask(peer)
            if now >= look_s:
                look_s = now + _LONGEST_WAIT_S
                for peer in self.directory.idle(now):
                    self._forget(peer, "neither used nor heard of for long")
            wait = _LONGEST_WAIT_S if later is None else min(max(later - self._clock(), 0.0), _LONGEST_WAIT_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._wake.wait()

    def _forget(self, peer: Peer, why: str) -> None:
        self.directory.remove(peer)
        log.info("peer forgotten: %s", why, extra=fields(peer=peer.host_id, address=peer.address))
        if peer.host_id is not None:
            self._hooks.peer_forgotten(peer.host_id, why)

    # -- asking

    def _ask(self, peer: Peer) -> "asyncio.Task[bool]":
        """Say hello to a peer in the background; an attempt that is under way is joined."""
        task = self._asking.get(id(peer))
        if task is None:
            peer.asking = True
            task = asyncio.get_running_loop().create_task(self._ask_now(peer))
            self._asking[id(peer)] = task
            task.add_done_callback(lambda _: self._asked(peer))
        return task

    def _asked(self, peer: Peer) -> None:
        peer.asking = False
        self._asking.pop(id(peer), None)
        self._wake.set()

    async def _ask_now(self, peer: Peer) -> bool:
        """Whether it answered as it should."""
        async with self._slots:
            try:
                hello = await self._client.hello(peer.address, self._own())
                await self._take(hello, peer.address)
            except Unreachable as error:
                self._failed(peer, str(error))
            except Refused as error:
                self._failed(peer, error.text, refused=error.code != "busy")
            except (CardError, Conflict, DirectoryFull) as error:
                self._failed(peer, str(error), refused=True)
            except Exception as error:
                log.exception("asking a peer failed", extra=fields(peer=peer.host_id, address=peer.address))
                self._failed(peer, f"this host failed to ask it: {type(error).__name__}: {error}")
            else:
                return True
            return False

    def _failed(self, peer: Peer, reason: str, *, refused: bool = False) -> None:
        said_before = peer.reason
        changed = self.directory.failed(peer, reason, self._clock(), refused=refused)
        if changed or reason != said_before:
            log.warning(
                "peer %s: %s",
                "refused" if refused else "down",
                reason,
                extra=fields(peer=peer.host_id, address=peer.address),
            )

    async def _take(self, hello: Hello, address: str) -> Peer | None:
        """Take in what a host at ``address`` told; None when it is this host itself.

        :raises CardError, Conflict, DirectoryFull: why it cannot be a peer.
        """
        choose_protocol(PROTOCOL, hello.protocol)
        location = hello.location.as_location()
        directory = self.directory
        other = directory.check_claim(hello, address)
        if hello.host_id == directory.own_id:
            at = directory.by_address(address)
            if at is not None:
                log.info("listed peer %s is this host itself", address)
                directory.is_self(at)
            return None
        if other is not None and await self._still_there(other):
            raise directory.conflict(hello, address, other)
        displaced = directory.displaced(hello, address)
        if displaced is not None:
            why = f"{address} is {hello.host_id} now, no longer {displaced.host_id}"
            directory.vacate(displaced, self._clock())
            self._hooks.peer_forgotten(displaced.host_id or "", why)
        before = directory.by_host(hello.host_id)
        state = before.state if before is not None else None
        old_epoch = before.hello.epoch if before is not None and before.hello is not None else None
        peer, answer = directory.accept(hello, location, address, self._clock())
        if answer is Answer.RESTARTED:
            log.warning(
                "peer restarted",
                extra=fields(peer=peer.host_id, address=peer.address, old=old_epoch, epoch=hello.epoch),
            )
        elif state is not State.UP or answer is Answer.NEW:
            log.info(
                "peer up",
                extra=fields(peer=peer.host_id, address=peer.address, epoch=hello.epoch, location=str(location)),
            )
        self._hooks.peer_answered(peer, location, answer)
        self._wake.set()
        return peer

    async def _still_there(self, other: Peer) -> bool:
        """Whether the other holder of a name is alive in the epoch that it told."""
        try:
            async with asyncio.timeout(_CLAIM_TIMEOUT_S):
                hello = await self._client.hello(other.address, self._own())
        except (Unreachable, Refused, TimeoutError):
            return False
        return other.hello is not None and hello.epoch == other.hello.epoch and hello.host_id == other.host_id

    # -- being asked

    async def on_hello(self, address: str, hello: Hello) -> Hello:
        """A host introduces itself.  :raises Refused: it may not."""
        directory = self.directory
        try:
            choose_protocol(PROTOCOL, hello.protocol)
        except CardError as error:
            raise Refused("version", str(error)) from None
        own = self._own()
        if hello.host_id == own.host_id and hello.epoch == own.epoch:
            return own
        if self._config.accept == "listed":
            known = directory.by_address(address)
            named = directory.by_host(hello.host_id)
            if not (known is not None and known.listed) and not (named is not None and named.listed):
                raise Refused(
                    "forbidden",
                    f"{hello.host_id} at {address} is not listed as a peer, and peers.accept is 'listed' here",
                )
        try:
            await self._take(hello, address)
        except CardError as error:
            raise Refused("malformed", str(error)) from None
        except Conflict as error:
            log.warning("hello refused: %s", error, extra=fields(peer=hello.host_id, address=address))
            raise Refused("conflict", str(error)) from None
        except DirectoryFull as error:
            raise Refused("busy", str(error)) from None
        return own

    # -- for others

    def hurry(self, host_id: str) -> None:
        """Ask a peer now: something happened that it may explain."""
        peer = self.directory.by_host(host_id)
        if peer is not None and not peer.asking:
            self._ask(peer)

    def announce(self) -> None:
        """Say hello to all peers that are up: this host has changed, and they must know soon."""
        for peer in self.directory:
            if peer.state is State.UP:
                self._ask_anew(peer)

    def _ask_anew(self, peer: Peer) -> None:
        """Ask a peer with what this host says of itself now, also when it is being asked already."""
        task = self._asking.get(id(peer))
        if task is None:
            self._ask(peer)
        else:
            task.add_done_callback(lambda _: self._ask(peer) if peer.state is State.UP else None)

    def suspect(self, host_id: str) -> None:
        """Ask a peer that is thought to be up, as it seems not to be."""
        peer = self.directory.by_host(host_id)
        if peer is not None and peer.state is State.UP and not peer.asking:
            self._ask(peer)

    def use(self, host_id: str, in_use: bool) -> None:
        """Note whether traffic goes to a peer."""
        peer = self.directory.by_host(host_id)
        if peer is not None:
            self.directory.use(peer, in_use, self._clock())
            self._wake.set()

    async def refresh(self, peer: Peer) -> Peer:
        """Ask a peer anew, and give what it is now.  :raises Unreachable: it does not answer."""
        await asyncio.shield(self._ask(peer))
        found = self.directory.by_host(peer.host_id or "")
        if found is None or found.state is not State.UP:
            raise Unreachable(peer.reason or f"{peer} does not answer")
        return found

    async def ensure(self, host_id: str, epoch: int, address: str | None) -> Peer:
        """The peer that a handle names, asked first when it is not known in that epoch.

        Its epoch may be another one than the handle's: then the handle is old.

        :param address: of its API, as the handle says; None when it says nothing.
        :raises Unreachable: it does not answer, or another host does.
        :raises Refused: it, or this host's configuration, forbids it.
        """
        peer = self.directory.by_host(host_id)
        if peer is not None and peer.epoch == epoch and peer.state is State.UP:
            return peer
        if peer is None:
            if address is None:
                raise Unreachable(f"{host_id} is no known peer, and the handle has no address of its API")
            if not self._allowed(address):
                raise Refused(
                    "forbidden",
                    f"{host_id} at {address} is not on loopback, and peers.insecure is not set on this host",
                )
            try:
                peer = self.directory.learn(address, host_id, self._clock())
            except DirectoryFull as error:
                raise Refused("busy", str(error)) from None
        await asyncio.shield(self._ask(peer))
        found = self.directory.by_host(host_id)
        if found is None and peer.state is State.UP:
            raise Unreachable(f"{address} is {peer.host_id}, not {host_id}: the handle is old")
        if found is None or found.state is not State.UP:
            if peer.reason and peer.state is State.REFUSED:
                raise Refused("forbidden", peer.reason)
            raise Unreachable(peer.reason or f"{host_id} does not answer")
        return found
