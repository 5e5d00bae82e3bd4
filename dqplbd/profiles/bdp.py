# SPDX-License-Identifier: Apache-2.0
"""The profile rule: from what is known of a path to window, segment size, queue pairs.  Pure.

For a path with round trip time *RTT* and a gain *g* (1.25 by default):

1. ``rate = min(local device, peer's device, path) * mtu / (mtu + header)``: what payload can get through; the last
   factor is 98.0 % for RoCEv2 at 4096 bytes a packet, 92.6 % at 1024.  A goodput that was seen to be higher goes before
   it: link rates of software devices are guesses, and what got through can get through.  Since a window of ``g * BDP``
   lets a little more through than the rate it was made for, a rate guessed too low rises until the path is full.
   The cap of the class, if there is one, holds in any case.
2. ``BDP = rate * RTT``: bytes under way when the path is just full.  Where software acknowledges (tcp), what it takes
   the hosts to wake up belongs to that round trip, though not to the network's.
3. Segment ``S``: the power of two nearest to ``sqrt(g * BDP * 32 KiB)``, within the configured limits.  What a
   segment costs is paid W/S times; burst, granularity of the window and tail latency grow with S; the sum of a term in
   W/S and one in S is smallest where S goes with the square root of W.  But not so large that ``k`` queue pairs, which
   a NIC takes in turn, have more than the window's reserve in segments that all end together: ``(k - 1) * S <=
   (g - 1) * BDP``; nor that the peers in use, each with one segment under way, fill more than an eighth of the pipe:
   ``8 * peers * S <= g * BDP``.
4. Window ``W = g * BDP + S``, rounded down to whole segments, but never under ``BDP + k * S``, rounded up: a segment is
   acknowledged an RTT after its last byte has left, and leaves together with those of the other queue pairs, so with
   less in flight the path has pauses (with few large segments long ones: a fifth of the time at 100 Gbit/s and 8 us).
   Where the smallest segment makes ``(k - 1) * S`` larger than the reserve ``(g - 1) * BDP``, only that is added.
   Not under the configured minimum, not over the class's maximum: ``buffer * alpha / (1 + alpha) / incast``, the part
   of one switch queue that one of ``incast`` senders may fill, and not over the configured maximum.
5. Queue pairs ``k = max(rate / rate of one queue pair, entropy target of the class)``, not over the part of the
   device's queue-pair budget that a peer in use gets (then a power of two, so that one peer more does not reshape every
   connection), a multiple of the NICs where that fits.
6. Outstanding per queue pair ``m = ceil(W / (S * k))``: rounded up so that the queue pairs can fill the window; the
   window itself, in bytes, bounds their sum.  Not over the queue depth; where that makes ``k * m * S`` smaller than the
   window, the window is lowered to it.

A path that has not been measured has the RTT of its class.  Any number can be pinned; the others follow.

At 400 Gbit/s, 4096 bytes a packet and 8, 56, 120, 240 us this gives windows of 0.5, 3.4, 7.1 and 14.1 MiB with 2, 4, 8
and 16 queue pairs; segments of 64 KiB in the first, of 128 KiB in the others with up to 7 peers in use.

Units: bytes, bits a second, nanoseconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from dqplbd.topology.location import PathClass
from dqplbd.units import format_bytes, format_ns, format_rate

if TYPE_CHECKING:
    from dqplbd.config import PinnedProfile, ProfilesConfig, TransportConfig

__all__ = [
    "ClassPolicy",
    "Explanation",
    "Limit",
    "Limiter",
    "PathInputs",
    "Pin",
    "Profile",
    "ProfilePolicy",
    "compute_profile",
    "explain_profile",
]

SEGMENT_CONSTANT: Final = 32 * 1024
_SEGMENT_SHIFT: Final = SEGMENT_CONSTANT.bit_length() - 1
_SEGMENT_ALIGN: Final = 128
_BITS_NS: Final = 8 * 10**9  # bits a second times nanoseconds, in bytes


class Limiter(StrEnum):
    """What decided a number of a profile."""

    BDP = "bdp"  # window: the bandwidth-delay product of the measured path
    UNMEASURED = "unmeasured"  # window, RTT: the class's assumption, for want of a measurement
    BUFFER = "buffer"  # window: the share of a switch buffer
    MAXIMUM = "maximum"  # window, segment: the configured maximum
    MINIMUM = "minimum"  # window, segment: the configured minimum
    PINNED = "pinned"  # any: set by hand
    QP = "qp"  # window: queue pairs times outstanding times segment
    MEASURED = "measured"  # RTT
    LOCAL = "local"  # rate: this host's device
    PEER = "peer"  # rate: the peer's device
    CLASS = "class"  # rate: the cap of the class
    GOODPUT = "goodput"  # rate: what was seen to get through
    PATH = "path"  # rate: the path itself, measured by a burst or emulated
    WINDOW = "window"  # segment, outstanding: follow from the window
    RATE = "rate"  # queue pairs: rate over the rate of one
    ENTROPY = "entropy"  # queue pairs: spreading over the fabric
    BUDGET = "budget"  # queue pairs: budget of the device
    NEGOTIATED = "negotiated"  # segment, queue pairs: limit agreed with the peer
    DEPTH = "depth"  # outstanding: depth of the queue pairs


class PathInputs(NamedTuple):
    """What is known of a path.

    :ivar path_class: its class.
    :ivar rtt_ns: measured RTT, > 0; None when it was never measured.
    :ivar local_rate_bps: link rate of the local device, > 0.
    :ivar peer_rate_bps: link rate of the peer's device, > 0; None when the peer did not say.
    :ivar mtu_bytes: payload of one packet, the smaller of both ends', > 0.
    :ivar header_bytes: what a packet adds to it on the wire, >= 0 (RoCEv2 over IPv4: 82).
    :ivar path_rate_bps: rate known to limit the path itself: an emulated link, or the result of a burst; else None.
    :ivar host_id: the peer, for numbers pinned by host.
    :ivar active_peers: peers in use that share the device's queue-pair budget, this one included.
    :ivar nics: NICs that the queue pairs are spread over.
    :ivar max_qps: data queue pairs agreed with the peer; None before that.
    :ivar queue_depth: segments a queue pair can hold, agreed with the peer; None before that.
    :ivar max_segment_bytes: segment size agreed with the peer; None before that.
    :ivar goodput_bps: highest payload rate that the path was seen to carry lately; None when it carried nothing.
    :ivar host_delay_ns: what the hosts at both ends add to the round trip of a segment, >= 0: where software and not a
        NIC acknowledges, its wake-ups; 0 for hardware.
    """

    path_class: PathClass
    rtt_ns: int | None
    local_rate_bps: int
    peer_rate_bps: int | None = None
    mtu_bytes: int = 4096
    header_bytes: int = 82
    path_rate_bps: int | None = None
    host_id: str = ""
    active_peers: int = 1
    nics: int = 1
    max_qps: int | None = None
    queue_depth: int | None = None
    max_segment_bytes: int | None = None
    goodput_bps: int | None = None
    host_delay_ns: int = 0


class Pin(NamedTuple):
    """Numbers set by hand; None where the rule decides."""

    qps: int | None = None
    segment_bytes: int | None = None
    window_bytes: int | None = None
    outstanding_per_qp: int | None = None
    adapt: bool | None = None

    def over(self, other: "Pin") -> "Pin":
        """These numbers, completed by those of ``other``."""
        return Pin(
            other.qps if self.qps is None else self.qps,
            other.segment_bytes if self.segment_bytes is None else self.segment_bytes,
            other.window_bytes if self.window_bytes is None else self.window_bytes,
            other.outstanding_per_qp if self.outstanding_per_qp is None else self.outstanding_per_qp,
            other.adapt if self.adapt is None else self.adapt,
        )


NO_PIN: Final = Pin()


class Profile(NamedTuple):
    """What a virtual connection works with, and what decided each number.

    :ivar path_class: class of the path.
    :ivar rtt_ns: round trip time, measured or assumed.
    :ivar rate_bps: payload rate.
    :ivar bdp_bytes: bandwidth-delay product.
    :ivar window_bytes: most bytes in flight.
    :ivar qps: data queue pairs.
    :ivar segment_bytes: segment size, a multiple of 128.
    :ivar outstanding_per_qp: most segments in flight on one queue pair.
    :ivar min_window_bytes: what the window may shrink to when the delay grows; at least one segment, or the window.
    :ivar adapt: whether it may.
    :ivar limited_by: what bounds the window.
    :ivar rtt_by: what decided the RTT; the other ``*_by`` likewise.
    """

    path_class: PathClass
    rtt_ns: int
    rate_bps: int
    bdp_bytes: int
    window_bytes: int
    qps: int
    segment_bytes: int
    outstanding_per_qp: int
    min_window_bytes: int
    adapt: bool
    limited_by: Limiter
    rtt_by: Limiter
    rate_by: Limiter
    segment_by: Limiter
    qps_by: Limiter
    outstanding_by: Limiter

    @property
    def ceiling_bps(self) -> int:
        """Most payload that this profile lets through: a window each RTT, or the rate, whichever is less."""
        return min(self.rate_bps, self.window_bytes * _BITS_NS // self.rtt_ns)


@dataclass(frozen=True, slots=True)
class ClassPolicy:
    """The part of the policy that depends on the path class.

    :ivar rtt_ns: RTT of an unmeasured path.
    :ivar entropy_target: queue pairs for spreading.
    :ivar rate_cap_bps: rate of one path, or None.
    :ivar incast: senders that share a switch queue.
    :ivar buffer_share_bytes: what one of them may fill.
    :ivar window_max_bytes: the smaller of that and the configured maximum.
    :ivar window_max_by: which of the two.
    :ivar pin: numbers set by hand.
    """

    rtt_ns: int
    entropy_target: int
    rate_cap_bps: int | None
    incast: int
    buffer_share_bytes: int
    window_max_bytes: int
    window_max_by: Limiter
    pin: Pin


@dataclass(frozen=True, slots=True)
class ProfilePolicy:
    """The configuration of the rule, prepared for many paths.

    Fields are those of the configuration section ``profiles`` and of ``transport`` with the same names.
    """

    gain: float
    window_min_bytes: int
    window_max_bytes: int
    segment_min_bytes: int
    segment_max_bytes: int
    per_qp_rate_bps: int
    qp_budget: int
    buffer_bytes: int
    buffer_alpha: float
    adapt: bool | Literal["auto"]
    max_qps: int
    queue_depth: int
    classes: Mapping[PathClass, ClassPolicy]
    peers: Mapping[str, Pin]

    @classmethod
    def from_config(cls, profiles: "ProfilesConfig", transport: "TransportConfig") -> "ProfilePolicy":
        """The policy that a checked configuration describes."""
        classes = {}
        for path_class in PathClass:
            incast: int = profiles.incast.of(path_class)
            alpha = profiles.buffer_alpha
            share = int(profiles.buffer_bytes * alpha / (1 + alpha) / incast)
            buffer_binds = share < profiles.window_max_bytes
            classes[path_class] = ClassPolicy(
                rtt_ns=profiles.class_rtt_ns.of(path_class),
                entropy_target=profiles.entropy_target.of(path_class),
                rate_cap_bps=profiles.class_rate_cap_bps.of(path_class),
                incast=incast,
                buffer_share_bytes=share,
                window_max_bytes=share if buffer_binds else profiles.window_max_bytes,
                window_max_by=Limiter.BUFFER if buffer_binds else Limiter.MAXIMUM,
                pin=_pin(profiles.classes.of(path_class)),
            )
        return cls(
            gain=profiles.gain,
            window_min_bytes=profiles.window_min_bytes,
            window_max_bytes=profiles.window_max_bytes,
            segment_min_bytes=profiles.segment_min_bytes,
            segment_max_bytes=profiles.segment_max_bytes,
            per_qp_rate_bps=profiles.per_qp_rate_bps,
            qp_budget=profiles.qp_budget,
            buffer_bytes=profiles.buffer_bytes,
            buffer_alpha=profiles.buffer_alpha,
            adapt=profiles.adapt,
            max_qps=transport.max_qps,
            queue_depth=transport.queue_depth,
            classes=classes,
            peers={host_id: _pin(pinned) for host_id, pinned in profiles.peers.items()},
        )

    def pin_for(self, path_class: PathClass, host_id: str) -> Pin:
        """Numbers set by hand for a path: those of its host before those of its class."""
        pin = self.classes[path_class].pin
        peer = self.peers.get(host_id)
        return pin if peer is None else peer.over(pin)


def _pin(pinned: "PinnedProfile | None") -> Pin:
    if pinned is None:
        return NO_PIN
    return Pin(pinned.qps, pinned.segment_bytes, pinned.window_bytes, pinned.outstanding_per_qp, pinned.adapt)


@lru_cache(maxsize=4096)
def _queue_pairs(
    rate_bps: int, per_qp_rate_bps: int, entropy: int, budget: int, agreed: int, nics: int
) -> tuple[int, Limiter]:
    """Step 5 of the rule.  Few paths differ in all six, so the answers are kept."""
    qps = -(-rate_bps // per_qp_rate_bps)
    by = Limiter.RATE
    if entropy >= qps:
        qps, by = entropy, Limiter.ENTROPY
    if budget < qps:
        qps, by = 1 << max(budget, 1).bit_length() - 1, Limiter.BUDGET
    if agreed < qps:
        qps, by = agreed, Limiter.NEGOTIATED
    rest = qps % nics
    if rest:
        qps = qps + nics - rest if qps + nics - rest <= min(budget, agreed) else max(qps - rest, min(qps, nics))
    return qps, by


def _segment(
    base: int, qps: int, active: int, gain: float, low: int, high: int, agreed: int | None
) -> tuple[int, Limiter]:
    """Step 3 of the rule, from ``base``, the window it is for, and ``active`` peers."""
    # The power of two nearest to a square root, on a logarithmic scale: half the bits.
    segment = 1 << ((base << _SEGMENT_SHIFT).bit_length() >> 1)
    most = base // (8 * active)
    if qps > 1:
        most = min(most, int(base * (1 - 1 / gain)) // (qps - 1))
    by = Limiter.WINDOW
    if segment > most:
        segment = 1 << max(most, 1).bit_length() - 1
    if segment < low:
        segment, by = low, Limiter.MINIMUM
    elif segment > high:
        segment, by = high, Limiter.MAXIMUM
    if agreed is not None and segment > agreed:
        segment, by = 1 << agreed.bit_length() - 1, Limiter.NEGOTIATED
    return segment, by


# Looking a member up in an enum costs more than most steps of the rule; so it is done once.
_BDP: Final = Limiter.BDP
_CLASS: Final = Limiter.CLASS
_DEPTH: Final = Limiter.DEPTH
_GOODPUT: Final = Limiter.GOODPUT
_LOCAL: Final = Limiter.LOCAL
_MEASURED: Final = Limiter.MEASURED
_MINIMUM: Final = Limiter.MINIMUM
_NEGOTIATED: Final = Limiter.NEGOTIATED
_PATH: Final = Limiter.PATH
_PEER: Final = Limiter.PEER
_PINNED: Final = Limiter.PINNED
_QP: Final = Limiter.QP
_UNMEASURED: Final = Limiter.UNMEASURED
_WINDOW: Final = Limiter.WINDOW


def compute_profile(inputs: PathInputs, policy: ProfilePolicy) -> Profile:
    """The profile of a path, by the rule of this module.

    :param inputs: what is known of the path.
    :param policy: what is configured.
    :returns: numbers for which hold: ``segment_bytes >= 128``; ``segment_bytes <= window_bytes`` and ``window_bytes <=
        qps * outstanding_per_qp * segment_bytes`` whatever is pinned; every number that is not pinned within the
        policy's limits, except that a window is never under one segment.
    """
    (
        path_class,
        rtt,
        local,
        peer,
        mtu,
        header,
        path_rate,
        host_id,
        active,
        nics,
        max_qps,
        depth,
        max_segment,
        goodput,
        host_delay,
    ) = inputs
    klass = policy.classes[path_class]
    pin = klass.pin
    if policy.peers:
        pin = policy.pin_for(path_class, host_id)

    if rtt is None:
        measured, rtt, rtt_by = False, klass.rtt_ns, _UNMEASURED
    else:
        measured, rtt_by = True, _MEASURED
    rate, rate_by = local, _LOCAL
    if peer is not None and peer < rate:
        rate, rate_by = peer, _PEER
    if path_rate is not None and path_rate < rate:
        rate, rate_by = path_rate, _PATH
    rate = rate * mtu // (mtu + header) or 1
    if goodput is not None and goodput > rate:
        rate, rate_by = goodput, _GOODPUT
    cap = klass.rate_cap_bps
    if cap is not None:
        cap = cap * mtu // (mtu + header) or 1
        if cap < rate:
            rate, rate_by = cap, _CLASS
    bdp = -(-rate * (rtt + host_delay) // _BITS_NS)

    agreed_qps = policy.max_qps if max_qps is None else max_qps
    qps = pin[0]
    if qps is None:
        budget = policy.qp_budget // active if active > 1 else policy.qp_budget
        qps, qps_by = _queue_pairs(rate, policy.per_qp_rate_bps, klass.entropy_target, budget, agreed_qps, nics)
    elif qps > agreed_qps:
        qps, qps_by = agreed_qps, _NEGOTIATED
    else:
        qps_by = _PINNED

    low, high = policy.window_min_bytes, klass.window_max_bytes
    target = int(policy.gain * bdp)
    window = pin[2]
    segment = pin[1]
    if segment is None:
        base = window
        if base is None:
            base = low if target < low else target
            base = high if base > high else base
        segment, segment_by = _segment(
            base, qps, active, policy.gain, policy.segment_min_bytes, policy.segment_max_bytes, max_segment
        )
        if window is not None and segment > window:  # a small pinned window holds at least one segment
            segment, segment_by = max(1 << window.bit_length() - 1, _SEGMENT_ALIGN), _PINNED
    else:
        segment_by = _PINNED
        if max_segment is not None and segment > max_segment:
            segment, segment_by = (
                max(max_segment // _SEGMENT_ALIGN * _SEGMENT_ALIGN, _SEGMENT_ALIGN),
                _NEGOTIATED,
            )

    if window is None:
        # A segment on each queue pair, as far as the reserve goes: a slow path has fewer in flight than queue pairs.
        together = min(qps - 1, (target - bdp) // segment) if target > bdp else 0
        window = (max(target // segment, -(-bdp // segment) + together) + 1) * segment
        limited_by = _BDP if measured else _UNMEASURED
        if window < low:
            window, limited_by = -(-low // segment) * segment, _MINIMUM
        if window > high:
            window, limited_by = high // segment * segment, klass.window_max_by
            if window < segment:  # never under one segment
                window, limited_by = segment, _MINIMUM
    else:
        limited_by = _PINNED
        if window < segment:  # both pinned, or the segment only: the larger wins, as nothing could be sent otherwise
            window = segment

    if depth is None:
        depth = policy.queue_depth
    outstanding = pin[3]
    if outstanding is None:
        outstanding, outstanding_by = -(-window // (segment * qps)), _WINDOW
    else:
        outstanding_by = _PINNED
    if outstanding > depth:
        outstanding, outstanding_by = depth, _DEPTH
    most = qps * outstanding * segment
    if most < window:
        window, limited_by = most, _QP

    floor = low if low > segment else segment
    if floor > window:
        floor = window
    adapt = pin[4]
    if adapt is None:
        adapt = policy.adapt if policy.adapt != "auto" else pin[2] is None
    numbers = (
        path_class,
        rtt,
        rate,
        bdp,
        window,
        qps,
        segment,
        outstanding,
        floor,
        adapt and measured,  # without a base RTT there is nothing to tell a queue from a distance
        limited_by,
        rtt_by,
        rate_by,
        segment_by,
        qps_by,
        outstanding_by,
    )
    return tuple.__new__(Profile, numbers)


class Limit(NamedTuple):
    """Why a number of a profile is what it is.

    :ivar name: field of :class:`Profile`.
    :ivar value: its value, in base units.
    :ivar text: its value for people.
    :ivar formula: how it came about, with the numbers of this path put in.
    :ivar limiter: what decided it.
    """

    name: str
    value: int | bool
    text: str
    formula: str
    limiter: Limiter | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """A profile with its reasons.

    :ivar profile: the same as :func:`compute_profile` gives.
    :ivar why: a :class:`Limit` for each number, by its name, in the order in which they are derived.
    :ivar summary: one sentence on what bounds the throughput of this path.
    """

    profile: Profile
    why: dict[str, Limit]
    summary: str


def explain_profile(inputs: PathInputs, policy: ProfilePolicy) -> Explanation:
    """The profile of a path together with the formula and the limiter of each number."""
    profile = compute_profile(inputs, policy)
    klass = policy.classes[inputs.path_class]
    pin = policy.pin_for(inputs.path_class, inputs.host_id)
    segment, window, rtt = profile.segment_bytes, profile.window_bytes, profile.rtt_ns
    why: dict[str, Limit] = {}

    def add(name: str, text: str, formula: str, limiter: Limiter | None) -> None:
        why[name] = Limit(name, getattr(profile, name), text, formula, limiter)

    if profile.rtt_by is Limiter.MEASURED:
        add("rtt_ns", format_ns(rtt), "smallest round trip of the last windows", profile.rtt_by)
    else:
        add("rtt_ns", format_ns(rtt), f"not measured yet: RTT assumed for class {inputs.path_class}", profile.rtt_by)

    rates = [f"local {format_rate(inputs.local_rate_bps)}"]
    if inputs.peer_rate_bps is not None:
        rates.append(f"peer {format_rate(inputs.peer_rate_bps)}")
    if inputs.path_rate_bps is not None:
        rates.append(f"path {format_rate(inputs.path_rate_bps)}")
    wire = f"{inputs.mtu_bytes}/{inputs.mtu_bytes + inputs.header_bytes}"
    rate_text = f"min({', '.join(rates)}) x {wire}"
    if profile.rate_by is Limiter.GOODPUT:
        rate_text = f"{format_rate(profile.rate_bps)} were seen to get through, more than {rate_text}"
    elif profile.rate_by is Limiter.CLASS:
        rate_text += f", at most the class's {format_rate(klass.rate_cap_bps or 0)} x {wire}"
    add("rate_bps", format_rate(profile.rate_bps), rate_text, profile.rate_by)
    trip = format_ns(rtt)
    if inputs.host_delay_ns:
        trip = f"({trip} + {format_ns(inputs.host_delay_ns)} until the hosts at both ends wake up)"
    add("bdp_bytes", format_bytes(profile.bdp_bytes), f"{format_rate(profile.rate_bps)} x {trip} / 8", None)

    target = int(policy.gain * profile.bdp_bytes)
    base = pin.window_bytes
    if base is None:
        base = min(max(target, policy.window_min_bytes), klass.window_max_bytes)
    limits = f"within {format_bytes(policy.segment_min_bytes)}..{format_bytes(policy.segment_max_bytes)}"
    segment_text = f"power of two nearest to sqrt({format_bytes(base)} x {format_bytes(SEGMENT_CONSTANT)})"
    segment_text += f", at most {format_bytes(base)} / (8 x {inputs.active_peers} peers in use)"
    if profile.qps > 1:
        reserve = int(base * (1 - 1 / policy.gain))
        segment_text += f" and {format_bytes(reserve)} / {profile.qps - 1}, {limits}"
    else:
        segment_text += f", {limits}"
    if profile.segment_by is Limiter.NEGOTIATED:
        segment_text += f", at most the {format_bytes(inputs.max_segment_bytes or 0)} agreed with the peer"
    elif profile.segment_by is Limiter.PINNED:
        segment_text = "set by hand" if pin.segment_bytes is not None else "largest that fits the window set by hand"
    add("segment_bytes", format_bytes(segment), segment_text, profile.segment_by)

    wanted = f"{policy.gain:g} x {format_bytes(profile.bdp_bytes)} + {format_bytes(segment)}"
    together = 1 + min(profile.qps - 1, max(target - profile.bdp_bytes, 0) // segment)
    wanted += f", in whole segments, at least BDP + {together}"
    qp_product = f"{profile.qps} queue pairs x {profile.outstanding_per_qp} x {format_bytes(segment)}"
    queue_share = (
        f"{format_bytes(policy.buffer_bytes)} buffer x {policy.buffer_alpha:g}/(1+{policy.buffer_alpha:g})"
        f" / {klass.incast} senders = {format_bytes(klass.buffer_share_bytes)}"
    )
    window_text = {
        Limiter.BDP: wanted,
        Limiter.UNMEASURED: wanted,
        Limiter.BUFFER: f"{wanted}, at most {queue_share}",
        Limiter.MAXIMUM: f"{wanted}, at most window_max_bytes {format_bytes(policy.window_max_bytes)}",
        Limiter.MINIMUM: f"{wanted}, at least window_min_bytes {format_bytes(policy.window_min_bytes)} and one segment",
        Limiter.PINNED: "set by hand",
        Limiter.QP: f"no more than {qp_product} fit",
    }[profile.limited_by]
    add("window_bytes", format_bytes(window), window_text, profile.limited_by)

    by_rate = f"{format_rate(profile.rate_bps)} / {format_rate(policy.per_qp_rate_bps)} a queue pair"
    qps_text = f"max({by_rate}, {klass.entropy_target} for spreading in class {inputs.path_class})"
    if profile.qps_by is Limiter.PINNED:
        qps_text = "set by hand"
    elif profile.qps_by is Limiter.BUDGET:
        qps_text += f", at most budget {policy.qp_budget} / {inputs.active_peers} peers in use, as a power of two"
    elif profile.qps_by is Limiter.NEGOTIATED:
        agreed = policy.max_qps if inputs.max_qps is None else inputs.max_qps
        qps_text += f", at most the {agreed} of the virtual connection"
    if inputs.nics > 1 and pin.qps is None:
        qps_text += f", a multiple of {inputs.nics} NICs where it fits"
    add("qps", str(profile.qps), qps_text, profile.qps_by)

    outstanding_text = f"ceil({format_bytes(window)} / ({format_bytes(segment)} x {profile.qps}))"
    if profile.outstanding_by is Limiter.PINNED:
        outstanding_text = "set by hand"
    elif profile.outstanding_by is Limiter.DEPTH:
        outstanding_text = "as many as a queue pair can hold"
    add("outstanding_per_qp", str(profile.outstanding_per_qp), outstanding_text, profile.outstanding_by)
    add(
        "min_window_bytes",
        format_bytes(profile.min_window_bytes),
        f"max(window_min_bytes {format_bytes(policy.window_min_bytes)}, one segment), at most the window",
        None,
    )
    if profile.rtt_by is Limiter.UNMEASURED:
        adapt_text = "no: without a measured RTT a queue cannot be told from a distance"
    elif pin.adapt is not None:
        adapt_text = "set by hand"
    elif policy.adapt == "auto":
        adapt_text = "auto: yes, unless the window is set by hand"
    else:
        adapt_text = "as configured in profiles.adapt"
    add("adapt", "yes" if profile.adapt else "no", adapt_text, Limiter.PINNED if pin.adapt is not None else None)
    return Explanation(profile, why, _summary(profile))


def _summary(profile: Profile) -> str:
    window, bdp = format_bytes(profile.window_bytes), format_bytes(profile.bdp_bytes)
    if profile.window_bytes < profile.bdp_bytes:
        return (
            f"latency bound: window {window} < BDP {bdp}, so at most {window} / {format_ns(profile.rtt_ns)} = "
            f"{format_rate(profile.ceiling_bps)} of {format_rate(profile.rate_bps)}; the window is limited by "
            f"{profile.limited_by}"
        )
    over = profile.window_bytes - profile.bdp_bytes
    return (
        f"rate bound: window {window} >= BDP {bdp} fills {format_rate(profile.rate_bps)} ({profile.rate_by}); "
        f"at most {format_bytes(over)} can wait in queues"
    )
