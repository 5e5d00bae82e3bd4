# SPDX-License-Identifier: Apache-2.0
"""When a queue pair asks again, and when it gives up: from the profile of a path to time-out and retries.  Pure.

A reliable queue pair waits for an acknowledgement for its *local ACK timeout*, then sends again from the first packet
that is missing, and after ``retries`` such attempts fails.  The InfiniBand Architecture Specification (volume 1, under
"local ACK timeout") gives it as 4.096 us * 2^n with n of 5 bits, 0 meaning for ever, and lets a device take up to four
times as long.

One value for all paths is wrong on most of them.  Shorter than the queueing of a busy path, it sends again what was
only late, and makes the queue longer; the usual default of others, 4.3 s seven times, is half a minute of silence until
anybody learns that a link is gone.  So it follows the path:

- ``timeout = 1024 * RTT``: far above any queue that the window allows, 57 ms on a path of 56 us;
- within ``MIN_NS`` and ``MAX_NS``: below 16 ms, the wake-up of a busy host, or a link that retrains, looks like loss;
- at least ``8 * RTT + window / rate``: an acknowledgement can wait behind a whole window.  This goes before ``MAX_NS``;
- rounded up to the next 4.096 us * 2^n.

With 7 retries, the most there can be, a queue pair gives up after eight timeouts: 0.13 s in a rack, 2.1 s on a path of
240 us.  That is long enough for a port that flaps, or a route that changes, and short enough to fail over.

Units: ns, bytes, bits a second.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from dqplbd.profiles.bdp import Profile
from dqplbd.units import format_ns

if TYPE_CHECKING:
    from dqplbd.config import TransportConfig

__all__ = ["MAX_NS", "MAX_RETRIES", "MIN_NS", "Retry", "RetryPolicy", "compute_retry", "round_up_timeout"]

RTTS: Final = 1024
RTTS_AT_LEAST: Final = 8
MIN_NS: Final = 16_000_000
MAX_NS: Final = 1_000_000_000
MAX_RETRIES: Final = 7
_UNIT_NS: Final = 4096  # of the local ACK timeout
_LARGEST_EXPONENT: Final = 31

TimeoutBy = Literal["rtt", "min", "max", "drain", "pinned"]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What is set by hand.

    :ivar ack_timeout_ns: None where the rule decides.  :ivar retries: 0..7.
    """

    ack_timeout_ns: int | None = None
    retries: int = MAX_RETRIES

    @classmethod
    def from_config(cls, transport: "TransportConfig") -> "RetryPolicy":
        """As configured."""
        seconds = transport.ack_timeout_s
        return cls(None if seconds is None else round(seconds * 1e9), transport.retries)


class Retry(NamedTuple):
    """How patient the queue pairs of a path are.

    :ivar ack_timeout_ns: a value that a queue pair can have: 4.096 us * 2^n.
    :ivar timeout_by: what decided it: ``rtt``, ``min``, ``max``, ``drain`` (of the window) or ``pinned``.
    :ivar formula: how, with the numbers of the path.
    """

    ack_timeout_ns: int
    retries: int
    timeout_by: TimeoutBy
    formula: str

    @property
    def give_up_ns(self) -> int:
        """Silence after which a queue pair fails; a device may take up to four times as long."""
        return self.ack_timeout_ns * (self.retries + 1)


def round_up_timeout(wanted_ns: int) -> int:
    """The shortest timeout that a queue pair can have which is not under ``wanted_ns``; at most 4.096 us * 2^31."""
    exponent = max((-(-max(wanted_ns, 1) // _UNIT_NS) - 1).bit_length(), 1)
    return _UNIT_NS << min(exponent, _LARGEST_EXPONENT)


def compute_retry(profile: Profile, policy: RetryPolicy) -> Retry:
    """Timeout and retries of the queue pairs of a path.

    :param profile: its RTT, rate and window count.
    """
    if policy.ack_timeout_ns is not None:
        timeout = round_up_timeout(policy.ack_timeout_ns)
        return Retry(timeout, policy.retries, "pinned", f"set to {format_ns(policy.ack_timeout_ns)}, rounded up")
    scaled = RTTS * profile.rtt_ns
    least = RTTS_AT_LEAST * profile.rtt_ns + profile.window_bytes * 8 * 10**9 // max(profile.rate_bps, 1)
    by: TimeoutBy = "rtt"
    wanted, text = scaled, f"{RTTS} x {format_ns(profile.rtt_ns)}"
    if scaled < MIN_NS:
        wanted, by, text = MIN_NS, "min", f"{text}, at least {format_ns(MIN_NS)}"
    elif scaled > MAX_NS:
        wanted, by, text = MAX_NS, "max", f"{text}, at most {format_ns(MAX_NS)}"
    if least > wanted:
        wanted, by = least, "drain"
        text = f"{RTTS_AT_LEAST} x {format_ns(profile.rtt_ns)} and the time to drain the window"
    return Retry(round_up_timeout(wanted), policy.retries, by, f"{text}, rounded up to 4.096 us x 2^n")
