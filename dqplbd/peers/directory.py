# SPDX-License-Identifier: Apache-2.0
"""The peers that this host knows, and when to ask each.  Pure: time and chance are arguments.

A peer is configured by address (static list, DNS) and has no name until it answers, or it is learned: from a hello that
it sent, or from the handle that a workload connects to.  Once it answered, its ``host_id`` is what names it.  Two
addresses that answer with one host_id and one epoch are one host; with two epochs, one of them is wrong or outdated.

Units: seconds of a monotonic clock.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from itertools import count
from typing import Final

from dqplbd.peers.cards import Hello, epoch_text
from dqplbd.topology.location import UNKNOWN_LOCATION, Location

__all__ = ["Answer", "Conflict", "Directory", "DirectoryFull", "Peer", "Source", "State", "Timing"]

_SPREAD: Final = 0.2  # random share by which an interval is longer or shorter


class Source(StrEnum):
    """How a peer came to be known."""

    STATIC = "static"
    DNS = "dns"
    LEARNED = "learned"


class State(StrEnum):
    """How a peer is."""

    CONNECTING = "connecting"  # never answered, and not yet given up
    UP = "up"
    DOWN = "down"  # does not answer
    REFUSED = "refused"  # answers, but will not or must not be talked to


class Answer(StrEnum):
    """What a hello changed."""

    NEW = "new"  # first answer
    SAME = "same"
    CHANGED = "changed"  # location or devices
    RESTARTED = "restarted"  # another epoch


class Conflict(Exception):
    """Two hosts that claim one host_id; the text names both."""


class DirectoryFull(Exception):
    """More peers were learned than there is room for."""


@dataclass(frozen=True, slots=True)
class Timing:
    """When to ask.

    :ivar retry_min_s: first wait after a failure.  :ivar retry_max_s: longest wait; it doubles up to here.
    :ivar in_use_s: between two hellos to a peer in use.  :ivar idle_s: to another one of the lists.
    :ivar hellos_per_s: most of the latter a second, all peers together; the interval grows with their number.
    :ivar forget_s: a learned peer that was neither used nor heard of for so long is forgotten.
    """

    retry_min_s: float = 0.5
    retry_max_s: float = 60.0
    in_use_s: float = 5.0
    idle_s: float = 30.0
    hellos_per_s: float = 50.0
    forget_s: float = 600.0


@dataclass(slots=True, eq=False)
class Peer:
    """A peer.

    :ivar host_id: its name; None while it never answered and nobody told it.
    :ivar address: where its host-to-host API is, as ``address:port``.
    :ivar sources: how it is known.
    :ivar expected: host_id that the configuration expects there.
    :ivar hello: what it last told; None before that.
    :ivar state: how it is; ``reason`` says why when it is not up.
    :ivar since_s: when the state began.  :ivar heard_s: when it last answered or asked.  :ivar used_s: last in use.
    :ivar next_s: when to ask it; None for never.
    """

    address: str
    host_id: str | None = None
    sources: set[Source] = field(default_factory=set)
    expected: str | None = None
    hello: Hello | None = None
    location: Location = UNKNOWN_LOCATION
    state: State = State.CONNECTING
    reason: str = ""
    since_s: float = 0.0
    heard_s: float | None = None
    used_s: float | None = None
    next_s: float | None = None
    failures: int = 0
    in_use: bool = False
    asking: bool = False

    @property
    def listed(self) -> bool:
        """Whether the configuration names it; such a peer is never given up."""
        return bool(self.sources - {Source.LEARNED})

    @property
    def epoch(self) -> int | None:
        """Its life; None before it answered."""
        return int(self.hello.epoch, 16) if self.hello is not None else None

    def __str__(self) -> str:
        return f"{self.host_id} at {self.address}" if self.host_id else self.address

    def become(self, state: State, reason: str, now_s: float) -> bool:
        """Change the state; whether it is another one."""
        self.reason = reason
        if state is self.state:
            return False
        self.state, self.since_s = state, now_s
        return True


class Directory:
    """All peers of this host, itself not among them.

    :param own_id: its host_id.  :param own_epoch: its epoch.
    :param max_learned: most peers that are known from others alone; what strangers can make this host remember.
    :param chance: gives numbers of 0..1.
    """

    def __init__(
        self, own_id: str, own_epoch: int, timing: Timing, chance: Callable[[], float], max_learned: int = 4096
    ) -> None:
        self.own_id = own_id
        self.own_epoch = own_epoch
        self.timing = timing
        self.max_learned = max_learned
        self._chance = chance
        self._by_address: dict[str, Peer] = {}
        self._by_host: dict[str, Peer] = {}
        self._queue: list[tuple[float, int, Peer]] = []  # when to ask; an entry counts only while next_s is the same
        self._order = count()
        self.own_addresses: set[str] = set()
        """Configured addresses at which this very host answers."""

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers()))

    def _peers(self) -> Iterator[Peer]:
        yield from self._by_host.values()
        yield from (peer for peer in self._by_address.values() if peer.host_id is None)

    def __len__(self) -> int:
        return sum(1 for _ in self._peers())

    def by_host(self, host_id: str) -> Peer | None:
        """The peer of that name."""
        return self._by_host.get(host_id)

    def by_address(self, address: str) -> Peer | None:
        """The peer at that address."""
        return self._by_address.get(address)

    # -- who is known

    def add(self, address: str, source: Source, now_s: float, expected: str | None = None) -> Peer:
        """Note that the configuration names a peer at an address."""
        peer = self._by_address.get(address)
        if peer is None:
            peer = self._by_address[address] = Peer(address, since_s=now_s)
        peer.sources.add(source)
        peer.expected = expected or peer.expected
        if peer.next_s is None and address not in self.own_addresses:
            self._schedule(peer, now_s)
        return peer

    def learn(self, address: str, host_id: str, now_s: float) -> Peer:
        """Note a peer that a handle names.  It is not asked on its own account: that is for the caller to do.

        :raises DirectoryFull: too many are known this way.
        """
        peer = self._by_host.get(host_id)
        if peer is not None:
            return peer
        peer = self._by_address.get(address)
        if peer is None:
            if sum(1 for one in self._peers() if not one.listed) >= self.max_learned:
                raise DirectoryFull(f"{self.max_learned} peers are known from others alone: no room for one more")
            peer = self._by_address[address] = Peer(address, since_s=now_s)
            peer.sources.add(Source.LEARNED)
        return peer

    def drop_source(self, address: str, source: Source) -> Peer | None:
        """Note that the configuration names an address no more; the peer, if nobody knows it now and it is gone."""
        peer = self._by_address.get(address)
        if peer is None:
            return None
        peer.sources.discard(source)
        if not peer.sources:
            if peer.in_use:
                peer.sources.add(Source.LEARNED)
            else:
                self.remove(peer)
                return peer
        return None

    def remove(self, peer: Peer) -> None:
        """Forget a peer."""
        peer.next_s = None
        for address in [address for address, one in self._by_address.items() if one is peer]:
            del self._by_address[address]
        if peer.host_id is not None and self._by_host.get(peer.host_id) is peer:
            del self._by_host[peer.host_id]

    def addresses_of(self, source: Source) -> set[str]:
        """The addresses that are known from a source."""
        return {address for address, peer in self._by_address.items() if source in peer.sources}

    # -- what they say

    def check_claim(self, hello: Hello, address: str) -> Peer | None:
        """Whether a host at ``address`` may go by the name that it tells.

        :returns: None when it may; else the peer of that name and another epoch, known at another address and up: the
            claim is good only if that one is gone, which is for the caller to find out.
        :raises Conflict: it claims the name of this host, or another than the configuration expects.
        """
        if hello.host_id == self.own_id:
            if hello.epoch == epoch_text(self.own_epoch):
                return None
            raise Conflict(
                f"the host at {address} (epoch {hello.epoch}) claims host_id {hello.host_id}, which is this host's own "
                f"(epoch {epoch_text(self.own_epoch)}); give one of the two another host.host_id"
            )
        at = self._by_address.get(address)
        if at is not None and at.expected is not None and at.expected != hello.host_id:
            raise Conflict(
                f"the host at {address} says that it is {hello.host_id}; the configuration expects {at.expected} there"
            )
        known = self._by_host.get(hello.host_id)
        if known is None or known.hello is None or known.hello.epoch == hello.epoch or known.state is State.DOWN:
            return None
        return None if known.address == address else known

    def conflict(self, hello: Hello, address: str, other: Peer) -> Conflict:
        """The error for a claim that turned out wrong."""
        told = other.hello.epoch if other.hello is not None else "unknown"
        return Conflict(
            f"two live hosts claim host_id {hello.host_id}: {address} (epoch {hello.epoch}) and {other.address} "
            f"(epoch {told}); give one of them another host.host_id"
        )

    def accept(self, hello: Hello, location: Location, address: str, now_s: float) -> tuple[Peer, Answer]:
        """Take in what a host at ``address`` told; its claim was checked, and nobody else is :meth:`displaced` by it.

        :raises DirectoryFull: it is a stranger, and too many of them are known.
        """
        peer = self._by_host.get(hello.host_id)
        at = self._by_address.get(address)
        if peer is None:
            peer = at if at is not None else self.learn(address, hello.host_id, now_s)
        elif at is not None and at is not peer:
            peer = self._unite(peer, at, address)
        elif at is None and peer.address != address and peer.hello is not None and peer.hello.epoch != hello.epoch:
            self._move(peer, address)
        old = peer.hello
        if peer.host_id is None:
            peer.host_id = hello.host_id
            self._by_host[hello.host_id] = peer
        peer.hello, peer.location = hello, location
        peer.heard_s, peer.failures = now_s, 0
        peer.become(State.UP, "", now_s)
        self._schedule(peer, self._next(peer, now_s))
        if old is None:
            return peer, Answer.NEW
        if old.epoch != hello.epoch:
            return peer, Answer.RESTARTED
        return peer, Answer.SAME if old == hello else Answer.CHANGED

    def _unite(self, peer: Peer, at: Peer, address: str) -> Peer:
        """Another known address turns out to be the same host."""
        at.next_s = None
        peer.sources |= at.sources
        peer.expected = peer.expected or at.expected
        for one in [one for one, other in self._by_address.items() if other is at]:
            self._by_address[one] = peer
        if at.sources - {Source.LEARNED}:
            peer.address = address  # what the configuration says goes before what was learned
        return peer

    def _move(self, peer: Peer, address: str) -> None:
        """A host that came back at another address."""
        if Source.LEARNED in peer.sources and not peer.listed:
            self._by_address.pop(peer.address, None)
        peer.address = address
        self._by_address[address] = peer

    def displaced(self, hello: Hello, address: str) -> Peer | None:
        """The peer of another name that was at an address until now, or None."""
        at = self._by_address.get(address)
        return at if at is not None and at.host_id not in (None, hello.host_id) else None

    def vacate(self, peer: Peer, now_s: float) -> None:
        """Forget who a peer was; what the configuration says of its addresses stays."""
        addresses = [address for address, one in self._by_address.items() if one is peer]
        self.remove(peer)
        if peer.listed:
            for address in addresses:
                fresh = Peer(address, sources=peer.sources - {Source.LEARNED}, expected=peer.expected, since_s=now_s)
                self._by_address[address] = fresh
                self._schedule(fresh, now_s)

    def is_self(self, peer: Peer) -> None:
        """A configured address turned out to be this host's own: it is no peer."""
        self.own_addresses.add(peer.address)
        self.remove(peer)

    def failed(self, peer: Peer, reason: str, now_s: float, *, refused: bool = False) -> bool:
        """A peer did not answer (or, ``refused``, must not be talked to); whether its state is another one now."""
        peer.failures += 1
        nobody_asks_for_it = not peer.listed and not peer.in_use and peer.hello is None
        self._schedule(peer, None if nobody_asks_for_it else now_s + self._backoff(peer.failures))
        return peer.become(State.REFUSED if refused else State.DOWN, reason, now_s)

    def use(self, peer: Peer, in_use: bool, now_s: float) -> None:
        """Note whether traffic goes to a peer."""
        if in_use or peer.in_use:
            peer.used_s = now_s
        if in_use and not peer.in_use:
            soon = now_s + self.timing.in_use_s
            self._schedule(peer, soon if peer.next_s is None else min(peer.next_s, soon))
        peer.in_use = in_use

    # -- when to ask

    def _schedule(self, peer: Peer, when_s: float | None) -> None:
        """Say when to ask a peer; never, when it was forgotten while it was asked."""
        peer.next_s = when_s if self._by_address.get(peer.address) is peer else None
        if peer.next_s is not None and when_s is not None:
            heappush(self._queue, (when_s, next(self._order), peer))

    def _backoff(self, failures: int) -> float:
        """Exponential with full jitter in its upper half, so that many hosts do not ask one at the same instant."""
        timing = self.timing
        longest = min(timing.retry_max_s, timing.retry_min_s * 2.0 ** min(failures - 1, 32))
        return longest * (0.5 + 0.5 * self._chance())

    def _next(self, peer: Peer, now_s: float) -> float | None:
        timing = self.timing
        if peer.in_use:
            interval = timing.in_use_s
        elif peer.listed:
            interval = max(timing.idle_s, len(self._by_address) / timing.hellos_per_s)
        else:
            return None  # it asks this host, as long as it cares
        return now_s + interval * (1 + _SPREAD * (2 * self._chance() - 1))

    def due(self, now_s: float) -> tuple[list[Peer], float | None]:
        """The peers to ask now, and when the next one is due.

        Each is told once: what comes of asking it says when it is due again.
        """
        now: list[Peer] = []
        while self._queue:
            when_s, _, peer = self._queue[0]
            if when_s == peer.next_s and not peer.asking:
                if when_s > now_s:
                    return now, when_s
                peer.next_s = None
                now.append(peer)
            heappop(self._queue)
        return now, None

    def idle(self, now_s: float) -> list[Peer]:
        """Learned peers to forget: not in use, and for long neither used nor heard of."""
        limit = now_s - self.timing.forget_s
        return [
            peer
            for peer in self._peers()
            if not peer.listed
            and not peer.in_use
            and not peer.asking
            and max(peer.used_s or peer.since_s, peer.heard_s or peer.since_s) <= limit
        ]
