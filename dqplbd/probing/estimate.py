# SPDX-License-Identifier: Apache-2.0
"""What the samples of one path say: base RTT, spread, loss, goodput.  Pure: time comes with the samples.

The base RTT is a windowed minimum, as BBR has it (https://datatracker.ietf.org/doc/draft-ietf-ccwg-bbr/): queues only
ever add to a round trip, so the smallest of many is nearest to the path itself, and forgetting old windows lets a path
that became longer show.  One minimum of samples taken in one instant would be the minimum of one queue, so the samples
of a window have to be spread over it.

A host that sends all the time sees its own standing queue in every sample.  Were that taken for the path, the window
computed from it would be larger, and with it the queue, and so on without end.  So samples taken under this host's own
load may lower the base RTT and never raise it, until :meth:`PathEstimator.rerouted` says that the path did get longer
(the delay-adapted windows of the data plane find that out).  Median and 99th percentile against that minimum show
congestion; there is no mean.

A window closes when it is as long as configured and has its samples; one that is short of them stays open, up to ten
times as long, so that slow probing makes windows longer rather than worthless.  The very first window closes as soon as
it has its samples.

Loss, invalid samples (times that cannot be) and send errors are three different things and are counted apart: the first
is the fabric's or the peer's, the second the clocks', the third this host's.

Units: nanoseconds, bytes, bits a second.
"""

from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple

__all__ = ["GoodputFilter", "PathEstimate", "PathEstimator", "ProbeResult", "Window", "quantile"]

_LONGEST: Final = 10  # a window short of samples stays open for so many times its length
_MAX_KEPT: Final = 4096  # samples of one window kept for percentiles; the minimum sees all
_BITS_NS: Final = 8 * 10**9
_BURSTS: Final = 3  # results that are kept; the largest of them counts


class ProbeResult(StrEnum):
    """How a probe ended."""

    OK = "ok"
    TIMEOUT = "timeout"
    SEND_ERROR = "send_error"
    INVALID = "invalid"


class Window(NamedTuple):
    """One closed measurement window.

    :ivar start_ns: when it opened.  :ivar end_ns: when it closed.
    :ivar rtt_min_ns: smallest RTT; None without a good sample.  The percentiles and jitter likewise.
    :ivar rtt_p50_ns: median.  :ivar rtt_p99_ns: 99th percentile; both by nearest rank.
    :ivar jitter_ns: mean difference of an RTT to the one before.
    :ivar samples: good samples.  :ivar lost: probes without answer.
    :ivar invalid: answers with impossible times.  :ivar send_errors: probes that could not be sent.
    :ivar complete: enough good samples, spread over the window, for its minimum to change a class.
    :ivar base_ns: base RTT when it closed; None before the first good sample.
    """

    start_ns: int
    end_ns: int
    rtt_min_ns: int | None
    rtt_p50_ns: int | None
    rtt_p99_ns: int | None
    jitter_ns: int | None
    samples: int
    lost: int
    invalid: int
    send_errors: int
    complete: bool
    base_ns: int | None


class PathEstimate(NamedTuple):
    """What is known of a path now.

    :ivar rtt_min_ns: base RTT: smallest over the kept windows and the open one, and no larger than it was while all of
        their samples were taken under load; None when there was no good sample.
    :ivar rtt_p50_ns: median of the last window that had samples, else of the open one; None likewise.
    :ivar rtt_p99_ns: its 99th percentile.
    :ivar jitter_ns: its mean difference of an RTT to the one before.
    :ivar samples: good samples of the kept windows and the open one; the three below likewise.
    :ivar lost: probes without answer.
    :ivar invalid: answers with impossible times; they are not lost.
    :ivar send_errors: probes that could not be sent; they are not lost either.
    :ivar goodput_bps: highest goodput of the last windows that carried data, or of the last bursts; None when there
        were neither.
    :ivar updated_ns: time of the newest sample of any kind; None before the first.
    :ivar burst_bps: highest result of the last bursts; None when there were none.
    """

    rtt_min_ns: int | None
    rtt_p50_ns: int | None
    rtt_p99_ns: int | None
    jitter_ns: int | None
    samples: int
    lost: int
    invalid: int
    send_errors: int
    goodput_bps: int | None
    updated_ns: int | None
    burst_bps: int | None = None

    @property
    def loss_ratio(self) -> float | None:
        """Lost probes of those that an answer was due for, 0 to 1; None when there were none."""
        due = self.samples + self.lost + self.invalid
        return self.lost / due if due else None


def quantile(ordered: Sequence[int], q: float) -> int:
    """Nearest-rank quantile of a sorted sequence: element number ``ceil(q * n)``, counted from 1.

    Rounding half up instead would hide a tail of two in 151.  :raises ValueError: empty, or q not in 0..1.
    """
    if not ordered or not 0 <= q <= 1:
        raise ValueError(f"quantile {q} of {len(ordered)} values; expected 0..1 of at least one")
    exact = q * len(ordered)
    rank = int(exact)
    if exact - rank > 1e-9:  # 0.07 * 100 is a little over 7 in binary
        rank += 1
    return ordered[max(rank, 1) - 1]


class GoodputFilter:
    """Highest goodput over the last windows that carried data, from a counter of delivered bytes.

    Windows without data say nothing of the path and push nothing out.  The maximum is a lower bound of what the path
    can carry: the workload may have wanted no more.
    """

    __slots__ = ("_bytes", "_kept", "_min_ns", "_time_ns")

    def __init__(self, windows: int = 10, min_interval_ns: int = 1_000_000) -> None:
        """:param windows: how many to keep, >= 1.  :param min_interval_ns: readings closer together are put off, since
        what was in flight at their ends would count for more than what was delivered between them."""
        if windows < 1 or min_interval_ns < 1:
            raise ValueError(f"windows {windows}, min_interval_ns {min_interval_ns}; expected both >= 1")
        self._kept: deque[int] = deque(maxlen=windows)
        self._min_ns = min_interval_ns
        self._time_ns: int | None = None
        self._bytes = 0

    def add(self, time_ns: int, total_bytes: int) -> None:
        """A reading of the counter; one that went back (a new connection) only starts anew."""
        if self._time_ns is None or total_bytes < self._bytes or time_ns < self._time_ns:
            self._time_ns, self._bytes = time_ns, total_bytes
            return
        elapsed = time_ns - self._time_ns
        if elapsed < self._min_ns:
            return
        delivered = total_bytes - self._bytes
        self._time_ns, self._bytes = time_ns, total_bytes
        if delivered:
            self._kept.append(delivered * _BITS_NS // elapsed)

    @property
    def goodput_bps(self) -> int | None:
        """The maximum, or None while no window carried data."""
        return max(self._kept, default=None)


class PathEstimator:
    """Estimates of one path.  Not thread safe."""

    __slots__ = (
        "_base",
        "_believed_windows",
        "_bursts",
        "_closed",
        "_first_ns",
        "_goodput",
        "_invalid",
        "_jitter_sum",
        "_last_ns",
        "_last_rtt",
        "_lost",
        "_min",
        "_needed",
        "_opened_any",
        "_rtts",
        "_samples",
        "_send_errors",
        "_start_ns",
        "_unloaded",
        "_unloaded_windows",
        "_updated_ns",
        "_warm_up",
        "_window_ns",
    )

    def __init__(
        self, window_ns: int, windows: int = 3, samples_per_window: int = 8, warm_up: int = 1, goodput_windows: int = 10
    ) -> None:
        """Start without any knowledge.

        :param window_ns: length of a window, >= 1.
        :param windows: closed windows that the base RTT is the minimum of, >= 1.
        :param samples_per_window: good samples that make a window complete, >= 1.
        :param warm_up: good samples dropped at the start, >= 0: address resolution and cold caches make them slow.
        :param goodput_windows: windows with data that the goodput is the maximum of, >= 1.
        :raises ValueError: a number out of its range.
        """
        if window_ns < 1 or windows < 1 or samples_per_window < 1 or warm_up < 0:
            raise ValueError(
                f"window_ns {window_ns}, windows {windows}, samples_per_window {samples_per_window}, warm_up {warm_up};"
                " expected >= 1, >= 1, >= 1, >= 0"
            )
        self._window_ns = window_ns
        self._needed = samples_per_window
        self._warm_up = warm_up
        self._closed: deque[Window] = deque(maxlen=windows)
        self._unloaded_windows: deque[bool] = deque(maxlen=windows)
        self._base: int | None = None
        self._believed_windows = 0  # so many more windows count as unloaded
        self._opened_any = False
        self._goodput = GoodputFilter(goodput_windows)
        self._bursts: deque[int] = deque(maxlen=_BURSTS)
        self._updated_ns: int | None = None
        self._start_ns = 0
        self._clear(0)

    def _clear(self, start_ns: int) -> None:
        self._start_ns = start_ns
        self._rtts: list[int] = []
        self._min: int | None = None
        self._unloaded = False
        self._samples = self._lost = self._invalid = self._send_errors = 0
        self._first_ns = self._last_ns = start_ns
        self._last_rtt: int | None = None
        self._jitter_sum = 0

    def add(self, result: ProbeResult, time_ns: int, rtt_ns: int = 0, *, loaded: bool = False) -> Window | None:
        """Take in one probe.

        :param result: how it ended.  ``ok`` with an RTT that is not positive counts as ``invalid``.
        :param time_ns: when it was posted; may be before earlier calls', as a loss is known late.
        :param rtt_ns: its RTT, for ``ok``.
        :param loaded: this host itself carried data on the path at the time, so the RTT may be its own queue.
        :returns: the window that closed, if one did: the one that this sample came too late for, or the very first one,
            which it completed.
        """
        closed = self.advance(time_ns)
        if not self._opened_any:
            self._opened_any = True
            self._clear(time_ns)
        if self._updated_ns is None or time_ns > self._updated_ns:
            self._updated_ns = time_ns
        if result is ProbeResult.OK and rtt_ns > 0:
            if self._warm_up:
                self._warm_up -= 1
            else:
                self._take(time_ns, rtt_ns, loaded)
        elif result is ProbeResult.TIMEOUT:
            self._lost += 1
        elif result is ProbeResult.SEND_ERROR:
            self._send_errors += 1
        else:
            self._invalid += 1
        if closed is None and not self._closed and self._is_complete():
            return self._close(max(time_ns, self._start_ns))
        return closed

    def _take(self, time_ns: int, rtt_ns: int, loaded: bool) -> None:
        if self._samples == 0:
            self._first_ns = time_ns
        self._samples += 1
        self._last_ns = max(self._last_ns, time_ns)
        if self._min is None or rtt_ns < self._min:
            self._min = rtt_ns
        if self._last_rtt is not None:
            self._jitter_sum += abs(rtt_ns - self._last_rtt)
        self._last_rtt = rtt_ns
        if len(self._rtts) < _MAX_KEPT:
            self._rtts.append(rtt_ns)
        self._unloaded = self._unloaded or not loaded or self._believed_windows > 0
        self._update_base()

    def _update_base(self) -> None:
        best = self._min
        for window in self._closed:
            if window.rtt_min_ns is not None and (best is None or window.rtt_min_ns < best):
                best = window.rtt_min_ns
        if best is None or self._base is None or best < self._base or self._unloaded or any(self._unloaded_windows):
            self._base = best

    def _is_complete(self) -> bool:
        """Whether the open window has its samples; for all but the first window also spread over it."""
        if self._samples < self._needed:
            return False
        return self._needed == 1 or not self._closed or 2 * (self._last_ns - self._first_ns) >= self._window_ns

    def advance(self, now_ns: int) -> Window | None:
        """Let time pass without a sample; the window that this closes, or None."""
        if not self._opened_any:
            return None
        age = now_ns - self._start_ns
        if age < self._window_ns or (age < _LONGEST * self._window_ns and not self._is_complete()):
            return None
        return self._close(now_ns)

    def _close(self, now_ns: int) -> Window:
        ordered = sorted(self._rtts)
        window = Window(
            self._start_ns,
            now_ns,
            self._min,
            quantile(ordered, 0.5) if ordered else None,
            quantile(ordered, 0.99) if ordered else None,
            self._jitter(),
            self._samples,
            self._lost,
            self._invalid,
            self._send_errors,
            self._is_complete(),
            self._base,
        )
        self._closed.append(window)
        self._unloaded_windows.append(self._unloaded)
        self._believed_windows = max(self._believed_windows - 1, 0)
        self._clear(now_ns)
        self._update_base()
        return window

    def _jitter(self) -> int | None:
        if self._samples == 0:
            return None
        return self._jitter_sum // (self._samples - 1) if self._samples > 1 else 0

    def add_goodput(self, time_ns: int, total_bytes: int) -> None:
        """A reading of the path's counter of delivered bytes."""
        self._goodput.add(time_ns, total_bytes)

    def add_burst(self, rate_bps: int) -> None:
        """The result of a bandwidth burst, bits of payload a second, > 0."""
        self._bursts.append(rate_bps)

    def forget_bursts(self) -> None:
        """Bursts are no longer wanted: what they found counts no more."""
        self._bursts.clear()

    @property
    def burst_bps(self) -> int | None:
        """Highest result of the last bursts; None while there were none."""
        return max(self._bursts, default=None)

    @property
    def path_rate_bps(self) -> int | None:
        """What the path itself lets through, as bursts found; None until two of them say so.

        One low result may be the doing of a busy host.
        """
        return self.burst_bps if len(self._bursts) > 1 else None

    @property
    def goodput_bps(self) -> int | None:
        """Highest goodput of the last windows that carried data, or of the last bursts; None without either."""
        seen, burst = self._goodput.goodput_bps, self.burst_bps
        return seen if burst is None or (seen is not None and seen > burst) else burst

    def reset(self) -> None:
        """Forget round trips and bursts, for a path that is known to have changed; warm-up is not repeated."""
        self.forget_bursts()
        self._closed.clear()
        self._unloaded_windows.clear()
        self._base = None
        self._opened_any = False
        self._clear(0)

    def rerouted(self) -> None:
        """The path got longer, as the data plane found out.

        For as many windows as are kept, what is sampled is the path, loaded or not, and so the base RTT follows when
        the older windows are forgotten.
        """
        self._believed_windows = (self._closed.maxlen or 1) + 1

    @property
    def rtt_min_ns(self) -> int | None:
        """Base RTT, or None without a good sample."""
        return self._base

    def estimate(self) -> PathEstimate:
        """What is known now."""
        closed = self._closed
        p50 = p99 = jitter = None
        for window in reversed(closed):
            if window.samples:
                p50, p99, jitter = window.rtt_p50_ns, window.rtt_p99_ns, window.jitter_ns
                break
        else:
            if self._rtts:
                ordered = sorted(self._rtts)
                p50, p99, jitter = quantile(ordered, 0.5), quantile(ordered, 0.99), self._jitter()
        return PathEstimate(
            self.rtt_min_ns,
            p50,
            p99,
            jitter,
            self._samples + sum(window.samples for window in closed),
            self._lost + sum(window.lost for window in closed),
            self._invalid + sum(window.invalid for window in closed),
            self._send_errors + sum(window.send_errors for window in closed),
            self.goodput_bps,
            self._updated_ns,
            self.burst_bps,
        )
