# SPDX-License-Identifier: Apache-2.0
"""Which path to measure the bandwidth of next, with how many bytes, and what a burst says.  Pure: time is an argument.

A burst is a train of messages over the ordinary data path, some bandwidth-delay products long.  It costs the fabric
what it measures, so there is never more than one under way, one to a place (a rack, or a host whose rack is not known)
in each interval, none while the device is busy, and no more bytes in any 24 hours than configured.  Intervals are
stretched at random, so that hosts that started together do not burst together.

The paths of a place that are in use take turns.  Where none is, it is always the same one, as the first burst on a path
makes a VC, and that stays.

One burst says little where the rate was guessed wrong: a window made for too low a rate lets only a little more through
than that, and one low result may be the doing of a busy CPU.  So a place's measurement may take several bursts to the
same host, a second apart, while each changes what is known (:meth:`BurstPlanner.done` with ``again``).

**Length.**  ``burst_bdp`` BDPs, but at least 1 ms of the rate and 256 KiB, since in less the time that a process takes
to wake up would be a large part of what is measured; at most 2 s of the rate and 128 MiB.

**Result.**  ``bytes / (time from the first byte sent to the last one acknowledged - base RTT)``.  Whatever disturbs the
sender makes the time longer, so a result can be too low and hardly too high; the largest of the last few counts.

Units: seconds, nanoseconds, bytes, bits a second.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from dqplbd.topology.location import Location

if TYPE_CHECKING:
    from dqplbd.config import ActiveBandwidthConfig

__all__ = [
    "MAX_BURST_BYTES",
    "MESSAGES",
    "Burst",
    "BurstPlanner",
    "BurstPolicy",
    "BurstResult",
    "Candidate",
    "DailyBudget",
    "burst_bytes",
    "burst_place",
    "measured_rate",
]

MESSAGES: Final = 8
"""Messages of a burst."""
MIN_BURST_BYTES: Final = 256 * 1024
MAX_BURST_BYTES: Final = 128 * 1024 * 1024
_MIN_S: Final = 1e-3
_MAX_S: Final = 2.0
_ALIGN: Final = MESSAGES * 4096
_MIN_NET_NS: Final = 200_000
_JITTER: Final = 0.2  # of an interval, which it may be longer by
_RETRY: Final = 0.1  # of an interval, after a burst that could not be
_MIN_RETRY_S: Final = 1.0
_AGAIN_S: Final = 1.0
_MOST_IN_A_ROW: Final = 16
_DAY_S: Final = 86400
_BUCKET_S: Final = 3600
_BITS_NS: Final = 8 * 10**9

Key = tuple[int, str]
"""Number of the local device, host_id of the other end."""
Place = tuple[str, ...]


class BurstResult(StrEnum):
    """How a burst ended."""

    OK = "ok"
    BUSY = "busy"  # the peer has no time for it now
    REFUSED = "refused"  # the peer does not take bursts
    FAILED = "failed"  # everything else


@dataclass(frozen=True, slots=True)
class BurstPolicy:
    """What is configured; fields are those of the configuration section ``probing.active_bandwidth``."""

    enabled: bool = False
    interval_s: float = 3600.0
    burst_bdp: float = 4.0
    max_utilisation: float = 0.2
    daily_bytes: int = 10 * 2**30

    @classmethod
    def from_config(cls, config: "ActiveBandwidthConfig") -> "BurstPolicy":
        """The policy that a checked configuration describes."""
        return cls(config.enabled, config.interval_s, config.burst_bdp, config.max_utilisation, config.daily_bytes)


class Candidate(NamedTuple):
    """A path that can be measured.

    :ivar key: device and host.
    :ivar place: what stands for where the host is, see :func:`burst_place`.
    :ivar rate_bps: assumed rate, > 0.  :ivar rtt_ns: base RTT, > 0.
    :ivar in_use: it has a VC.
    """

    key: Key
    place: Place
    rate_bps: int
    rtt_ns: int
    in_use: bool = False


class Burst(NamedTuple):
    """A burst to send: ``MESSAGES`` messages of ``message_bytes`` on the path ``key``."""

    key: Key
    place: Place
    message_bytes: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.message_bytes * MESSAGES


def burst_place(host_id: str, location: Location) -> Place:
    """What a host shares its turn with: the hosts of its rack, or nobody when the rack is not known."""
    if location.rack is None:
        return ("host", host_id)
    return ("rack", location.region or "", location.building or "", location.zone or "", location.rack)


def burst_bytes(rate_bps: int, rtt_ns: int, burst_bdp: float) -> int:
    """Length of a burst by the rule of this module: a multiple of 32 KiB, 256 KiB to 128 MiB."""
    wanted = max(burst_bdp * rate_bps * rtt_ns / _BITS_NS, rate_bps / 8 * _MIN_S)
    wanted = max(min(wanted, rate_bps / 8 * _MAX_S, MAX_BURST_BYTES), MIN_BURST_BYTES)
    return min(-(-int(wanted) // _ALIGN) * _ALIGN, MAX_BURST_BYTES)


def measured_rate(size: int, elapsed_ns: int, rtt_ns: int) -> int | None:
    """Bits a second of a burst of ``size`` bytes; None when it was too short to say.

    :param elapsed_ns: from the first byte sent to the last one acknowledged.
    :param rtt_ns: base RTT of the path.
    """
    net = elapsed_ns - rtt_ns
    if size <= 0 or net < _MIN_NET_NS:
        return None
    return size * _BITS_NS // net


class DailyBudget:
    """Bytes spent in the last 24 hours, to the hour: what was spent counts for 24 to 25 hours."""

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, int]] = deque()

    def spend(self, now_s: float, size: int) -> None:
        """Count ``size`` bytes; ``now_s`` never goes back."""
        bucket = int(now_s // _BUCKET_S)
        if self._buckets and self._buckets[-1][0] >= bucket:
            last, spent = self._buckets.pop()
            self._buckets.append((last, spent + size))
        else:
            self._buckets.append((bucket, size))

    def left(self, now_s: float, daily_bytes: int) -> int:
        """What may still be spent now, >= 0."""
        while self._buckets and (self._buckets[0][0] + 1) * _BUCKET_S + _DAY_S <= now_s:
            self._buckets.popleft()
        return max(daily_bytes - sum(spent for _, spent in self._buckets), 0)


@dataclass(slots=True)
class _Turn:
    """A place's turn: when it is due, and to whom when its measurement is not finished."""

    due_s: float
    key: Key | None = None
    begun_s: float = 0.0
    count: int = 0


def _rank(*parts: str) -> int:
    return int.from_bytes(blake2b("\0".join(parts).encode(), digest_size=8).digest(), "big")


class BurstPlanner:
    """See the module's text.  Not thread safe.

    :param own_id: this host; hosts of one place are taken in an order that differs from host to host.
    :param chance: a random number of 0..1, 1 not included.
    """

    def __init__(self, own_id: str, policy: BurstPolicy, chance: Callable[[], float]) -> None:
        self._own_id = own_id
        self._policy = policy
        self._chance = chance
        self._budget = DailyBudget()
        self._turns: dict[tuple[int, Place], _Turn] = {}
        self._last_s: dict[Key, float] = {}  # when a path was tried
        self._barred_s: dict[Key, float] = {}  # until when it is not
        self._running: Burst | None = None

    def configure(self, policy: BurstPolicy) -> None:
        """Another policy; what was spent stays spent, turns are drawn anew where the interval changed."""
        if policy.interval_s != self._policy.interval_s or policy.enabled != self._policy.enabled:
            self._turns.clear()
            self._barred_s.clear()
        self._policy = policy

    @property
    def running(self) -> Burst | None:
        """The burst that is under way."""
        return self._running

    def budget_left(self, now_s: float) -> int:
        """Bytes that may still be sent now."""
        return self._budget.left(now_s, self._policy.daily_bytes)

    def next(self, now_s: float, candidates: Collection[Candidate], utilisation: Mapping[int, float]) -> Burst | None:
        """The burst to send now; it counts as under way until :meth:`done`.  None: none now.

        :param candidates: the paths that can be measured now.
        :param utilisation: by device: share of its rate that it carries; a device that is missing carries nothing.
        """
        policy = self._policy
        if not policy.enabled or self._running is not None:
            return None
        by_turn: dict[tuple[int, Place], list[Candidate]] = {}
        for one in candidates:
            by_turn.setdefault((one.key[0], one.place), []).append(one)
        for name in by_turn:
            if name not in self._turns:
                self._turns[name] = _Turn(now_s + policy.interval_s * self._chance())
        self._forget(now_s, by_turn.keys())
        left = self.budget_left(now_s)
        due = sorted(
            (turn.due_s, name) for name, turn in self._turns.items() if turn.due_s <= now_s and name in by_turn
        )
        for _, name in due:
            if utilisation.get(name[0], 0.0) > policy.max_utilisation:
                continue
            turn = self._turns[name]
            chosen = self._choose(now_s, turn, by_turn[name])
            if chosen is None:
                continue
            size = burst_bytes(chosen.rate_bps, chosen.rtt_ns, policy.burst_bdp)
            if size > left:
                continue
            if turn.count == 0:
                turn.begun_s = now_s
            turn.key = chosen.key
            self._running = Burst(chosen.key, chosen.place, size // MESSAGES)
            return self._running
        return None

    def _choose(self, now_s: float, turn: _Turn, candidates: list[Candidate]) -> Candidate | None:
        if turn.count:
            same = next((one for one in candidates if one.key == turn.key), None)
            if same is not None:
                return same
            self._finish(now_s, turn)  # it is gone: the rest of its measurement with it
            return None
        allowed = [one for one in candidates if self._barred_s.get(one.key, now_s) <= now_s]
        return min(
            allowed,
            key=lambda one: (
                not one.in_use,
                self._last_s.get(one.key, float("-inf")) if one.in_use else 0.0,
                _rank(self._own_id, one.key[1]),
                one.key,
            ),
            default=None,
        )

    def _forget(self, now_s: float, present: Collection[tuple[int, Place]]) -> None:
        for name, turn in list(self._turns.items()):
            if name not in present and turn.due_s <= now_s:
                del self._turns[name]
        for times in (self._barred_s, self._last_s):
            for key, then in list(times.items()):
                if then + self._policy.interval_s < now_s and len(times) > 2 * len(self._turns):
                    del times[key]

    def _finish(self, now_s: float, turn: _Turn) -> None:
        turn.due_s = max(turn.begun_s + self._policy.interval_s * (1 + _JITTER * self._chance()), now_s)
        turn.count, turn.key = 0, None

    def done(self, now_s: float, burst: Burst, result: BurstResult, sent_bytes: int, *, again: bool = False) -> None:
        """The burst that was under way ended.

        :param sent_bytes: what of it was, or may have been, sent.
        :param again: it changed what is known of the path, and another one may change it further.
        """
        self._running = None
        self._budget.spend(now_s, sent_bytes)
        self._last_s[burst.key] = now_s
        turn = self._turns.get((burst.key[0], burst.place))
        if turn is None:
            return
        retry = max(self._policy.interval_s * _RETRY * (1 + self._chance()), _MIN_RETRY_S)
        if result is BurstResult.OK and again and turn.count + 1 < _MOST_IN_A_ROW:
            turn.count += 1
            turn.due_s = now_s + _AGAIN_S
            return
        if result in (BurstResult.REFUSED, BurstResult.FAILED):
            self._barred_s[burst.key] = now_s + max(self._policy.interval_s, _MIN_RETRY_S)
        if result is BurstResult.OK or sent_bytes or turn.count:
            self._finish(now_s, turn)
        else:
            turn.due_s = now_s + retry
            turn.key = None
