# SPDX-License-Identifier: Apache-2.0
"""Estimates of a path: windowed minimum, percentiles, what is loss and what is not, goodput."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqplbd.probing.estimate import GoodputFilter, PathEstimator, ProbeResult, Window, quantile

OK, LOST, ERROR, INVALID = ProbeResult.OK, ProbeResult.TIMEOUT, ProbeResult.SEND_ERROR, ProbeResult.INVALID
MS = 1_000_000


def steady(estimator: PathEstimator, start_ms: int, end_ms: int, rtt: int, step_ms: int = 10) -> list[Window]:
    """A sample every ``step_ms``; the windows that closed."""
    found = (estimator.add(OK, at * MS, rtt) for at in range(start_ms, end_ms, step_ms))
    return [window for window in found if window is not None]


def test_before_the_first_sample_nothing_is_known() -> None:
    estimator = PathEstimator(100 * MS)
    estimate = estimator.estimate()
    assert estimate[:4] == (None, None, None, None)
    assert (estimate.samples, estimate.loss_ratio, estimate.goodput_bps, estimate.updated_ns) == (0, None, None, None)
    assert estimator.advance(10**12) is None


def test_the_first_sample_is_a_warm_up() -> None:
    estimator = PathEstimator(100 * MS)
    estimator.add(OK, 0, 1)
    assert estimator.estimate().rtt_min_ns is None
    estimator.add(OK, MS, 500)
    assert estimator.rtt_min_ns == 500
    assert estimator.estimate().samples == 1


def test_the_first_window_closes_with_its_samples() -> None:
    estimator = PathEstimator(1000 * MS, samples_per_window=3)
    windows = [estimator.add(OK, at * MS, 700 + at) for at in range(4)]
    assert windows[:3] == [None, None, None]
    assert windows[3] is not None
    assert windows[3].complete
    assert (windows[3].rtt_min_ns, windows[3].samples) == (701, 3)


def test_a_window_lasts_as_long_as_configured() -> None:
    estimator = PathEstimator(100 * MS, samples_per_window=4)
    windows = steady(estimator, 0, 1000, 500)
    assert all(window.complete for window in windows)
    assert {round((w.end_ns - w.start_ns) / MS) for w in windows[1:]} == {100}


def test_slow_probing_makes_windows_longer() -> None:
    estimator = PathEstimator(100 * MS, samples_per_window=4)
    windows = steady(estimator, 0, 3000, 500, step_ms=60)
    assert all(window.complete for window in windows)
    assert all(w.end_ns - w.start_ns >= 200 * MS for w in windows[1:])


def test_a_window_without_samples_closes_in_the_end_and_is_not_complete() -> None:
    estimator = PathEstimator(100 * MS, samples_per_window=4)
    steady(estimator, 0, 300, 500)
    windows = [estimator.add(LOST, at * MS) for at in range(300, 3000, 50)]
    closed = [window for window in windows if window is not None]
    assert closed
    assert not closed[-1].complete
    assert closed[-1].samples == 0
    assert closed[-1].rtt_min_ns is None
    assert closed[-1].end_ns - closed[-1].start_ns >= 1000 * MS


def test_samples_of_one_instant_do_not_make_a_window_complete() -> None:
    estimator = PathEstimator(100 * MS, samples_per_window=4)
    steady(estimator, 0, 300, 500)
    start = 300
    while estimator.advance(start * MS) is None:
        start += 1
    for i in range(8):  # all within a microsecond: one queue seen eight times
        assert estimator.add(OK, start * MS + i, 900) is None
    assert estimator.advance((start + 150) * MS) is None
    window = estimator.add(OK, (start + 160) * MS, 900)
    assert window is None
    window = estimator.advance((start + 161) * MS)
    assert window is not None
    assert window.complete


def test_a_queue_does_not_move_the_base_rtt_but_a_longer_path_does() -> None:
    estimator = PathEstimator(100 * MS, windows=3, samples_per_window=4)
    steady(estimator, 0, 300, 500)
    for at in range(300, 600, 10):
        estimator.add(OK, at * MS, 500 if at % 50 == 0 else 900)
    assert estimator.rtt_min_ns == 500
    assert estimator.estimate().rtt_p99_ns == 900
    steady(estimator, 600, 1200, 2000)
    assert estimator.rtt_min_ns == 2000


def test_a_shorter_path_shows_at_once() -> None:
    estimator = PathEstimator(100 * MS, samples_per_window=4)
    steady(estimator, 0, 300, 500)
    estimator.add(OK, 300 * MS, 200)
    assert estimator.rtt_min_ns == 200


def test_loss_invalid_and_send_errors_are_apart() -> None:
    estimator = PathEstimator(1000 * MS, samples_per_window=100, warm_up=0)
    for at, result in enumerate([OK, LOST, LOST, INVALID, ERROR, OK]):
        estimator.add(result, at * MS, 500)
    estimator.add(OK, 7 * MS, 0)  # an impossible time that calls itself good
    estimator.add(OK, 8 * MS, -5)
    estimate = estimator.estimate()
    assert (estimate.samples, estimate.lost, estimate.invalid, estimate.send_errors) == (2, 2, 3, 1)
    assert estimate.loss_ratio == pytest.approx(2 / 7)
    assert estimate.rtt_min_ns == 500
    assert estimate.updated_ns == 8 * MS


def test_a_loss_that_is_known_late_does_not_turn_time_back() -> None:
    estimator = PathEstimator(100 * MS, samples_per_window=4)
    steady(estimator, 0, 300, 500)
    before = estimator.estimate()
    assert estimator.add(LOST, 5 * MS) is None
    after = estimator.estimate()
    assert after.updated_ns == before.updated_ns
    assert after.lost == 1


def test_jitter_is_the_mean_step() -> None:
    estimator = PathEstimator(1000 * MS, samples_per_window=100, warm_up=0)
    estimator.add(OK, 0, 500)
    assert estimator.estimate().jitter_ns == 0
    for at, rtt in enumerate([600, 500, 700], 1):
        estimator.add(OK, at * MS, rtt)
    assert estimator.estimate().jitter_ns == (100 + 100 + 200) // 3


def test_reset_forgets_round_trips() -> None:
    estimator = PathEstimator(100 * MS, samples_per_window=2)
    steady(estimator, 0, 500, 500)
    estimator.reset()
    assert estimator.rtt_min_ns is None
    steady(estimator, 1000, 1500, 2000)
    assert estimator.rtt_min_ns == 2000


@pytest.mark.parametrize("numbers", [(0, 1, 1, 0), (1, 0, 1, 0), (1, 1, 0, 0), (1, 1, 1, -1)])
def test_numbers_are_checked(numbers: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        PathEstimator(*numbers)


@pytest.mark.parametrize(
    ("n", "q", "rank"),
    [(1, 0.5, 1), (2, 0.5, 1), (3, 0.5, 2), (151, 0.99, 150), (100, 0.07, 7), (100, 0, 1), (100, 1, 100)],
)
def test_nearest_rank(n: int, q: float, rank: int) -> None:
    assert quantile(range(1, n + 1), q) == rank


@given(st.lists(st.integers(0, 100), min_size=1), st.floats(0, 1))
def test_a_quantile_splits_the_values(values: list[int], q: float) -> None:
    ordered = sorted(values)
    found = quantile(ordered, q)
    assert found in ordered
    assert sum(value <= found for value in ordered) >= math.floor(q * len(ordered))


def test_quantiles_that_do_not_exist() -> None:
    for ordered, q in (([], 0.5), ([1], 1.5), ([1], float("nan"))):
        with pytest.raises(ValueError, match="quantile"):
            quantile(ordered, q)


SAMPLES = st.lists(
    st.tuples(st.sampled_from(ProbeResult), st.integers(0, 50 * MS), st.integers(-10, 10**6)), min_size=1, max_size=200
)


@given(SAMPLES, st.integers(1, 200 * MS), st.integers(1, 5), st.integers(1, 10), st.integers(0, 2))
def test_any_samples(
    samples: list[tuple[ProbeResult, int, int]], window: int, windows: int, needed: int, warm_up: int
) -> None:
    estimator = PathEstimator(window, windows, needed, warm_up)
    now, good, closed, counts = 0, [], [], 0
    for result, step, rtt in samples:
        now += step
        if result is OK and rtt > 0:
            good.append(rtt)
        done = estimator.add(result, now, rtt)
        if done is not None:
            closed.append(done)
        estimate = estimator.estimate()
        assert estimate.updated_ns == now
        # The base RTT is one of the samples, and no sample still kept is smaller than it or missing from the count.
        if estimate.rtt_min_ns is not None:
            assert estimate.rtt_min_ns in good
            assert estimate.rtt_p50_ns is not None
            assert estimate.rtt_p99_ns is not None
            assert estimate.rtt_p50_ns <= estimate.rtt_p99_ns
        assert (estimate.rtt_min_ns is None) == (estimate.samples == 0)
    for done in closed:
        assert done.start_ns <= done.end_ns
        assert not done.complete or done.samples >= needed
        if done.rtt_min_ns is not None:
            assert done.rtt_p50_ns is not None
            assert done.rtt_min_ns <= done.rtt_p50_ns
        counts += done.samples + done.lost + done.invalid + done.send_errors
    for a, b in pairwise(closed):
        assert a.end_ns == b.start_ns
    # Each probe is in exactly one window, but for the warm-up.
    flush = estimator.advance(now + 20 * window)
    counts += 0 if flush is None else flush.samples + flush.lost + flush.invalid + flush.send_errors
    assert len(samples) - counts == min(warm_up, len(good))


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10**6)), min_size=20, max_size=100))
def test_the_base_rtt_is_the_minimum_of_the_kept_windows(steps: list[tuple[int, int]]) -> None:
    estimator = PathEstimator(50 * MS, windows=2, samples_per_window=1, warm_up=0)
    now, history, starts = 0, [], [0]
    for step, rtt in steps:
        now += step * MS
        done = estimator.add(OK, now, rtt)
        if done is not None:
            starts.append(done.start_ns)
            history.append(done.rtt_min_ns)
        kept = [value for value in history[-2:] if value is not None]
        if estimator.rtt_min_ns is not None and done is None:
            assert all(estimator.rtt_min_ns <= value for value in kept)


def test_goodput_is_the_highest_of_the_windows_with_data() -> None:
    goodput = GoodputFilter(windows=3, min_interval_ns=MS)
    total = 0
    for at, step in enumerate([0, 1000, 5000, 0, 0, 0, 0, 0, 2000]):
        total += step
        goodput.add(at * MS, total)
    assert goodput.goodput_bps == 5000 * 8 * 1000
    for at in range(10, 13):
        total += 100
        goodput.add(at * MS, total)
    assert goodput.goodput_bps == 100 * 8 * 1000


def test_a_counter_that_starts_anew_gives_no_goodput() -> None:
    goodput = GoodputFilter()
    seen = []
    for at, total in ((0, 10**9), (10, 5), (20, 5 + 1000)):
        goodput.add(at * MS, total)
        seen.append(goodput.goodput_bps)
    assert seen == [None, None, 1000 * 8 * 100]


def test_readings_close_together_are_put_off() -> None:
    goodput = GoodputFilter(min_interval_ns=MS)
    seen = []
    for at, total in ((0, 0), (10, 10**6), (MS, 10**6)):
        goodput.add(at, total)
        seen.append(goodput.goodput_bps)
    assert seen == [None, None, 8 * 10**9]


def test_goodput_through_the_estimator() -> None:
    estimator = PathEstimator(100 * MS)
    estimator.add_goodput(0, 0)
    estimator.add_goodput(10 * MS, 1000)
    assert estimator.estimate().goodput_bps == 800_000
    for bad in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="expected"):
            GoodputFilter(*bad)


def test_the_own_queue_never_raises_the_base_rtt() -> None:
    estimator = PathEstimator(1000, windows=2, samples_per_window=2, warm_up=0)
    for time_ns in range(0, 3000, 100):
        estimator.add(ProbeResult.OK, time_ns, 100)
    for time_ns in range(3000, 20000, 100):
        estimator.add(ProbeResult.OK, time_ns, 150, loaded=True)
    assert estimator.rtt_min_ns == 100
    estimator.add(ProbeResult.OK, 20000, 90, loaded=True)  # but what is shorter is shorter
    assert estimator.rtt_min_ns == 90
    for time_ns in range(20100, 30000, 100):
        estimator.add(ProbeResult.OK, time_ns, 150)  # the path is idle now, and still that long
    assert estimator.rtt_min_ns == 150


def test_a_path_found_to_be_longer_is_believed_under_load() -> None:
    estimator = PathEstimator(1000, windows=2, samples_per_window=2, warm_up=0)
    for time_ns in range(0, 3000, 100):
        estimator.add(ProbeResult.OK, time_ns, 100)
    for time_ns in range(3000, 9000, 100):
        estimator.add(ProbeResult.OK, time_ns, 240, loaded=True)
    assert estimator.rtt_min_ns == 100
    estimator.rerouted()
    for time_ns in range(9000, 13000, 100):
        estimator.add(ProbeResult.OK, time_ns, 240, loaded=True)
    assert estimator.rtt_min_ns == 240
    for time_ns in range(13000, 20000, 100):
        estimator.add(ProbeResult.OK, time_ns, 300, loaded=True)  # and that is all that was learned
    assert estimator.rtt_min_ns == 240


def test_the_best_of_the_last_bursts_is_a_goodput() -> None:
    estimator = PathEstimator(100 * MS)
    estimator.add_burst(700)
    assert [estimator.goodput_bps, estimator.burst_bps] == [700, 700]
    assert estimator.estimate().burst_bps == 700
    alone = estimator.path_rate_bps
    assert alone is None, "one result alone may be low because this host was busy"
    estimator.add_burst(500)
    assert [estimator.goodput_bps, estimator.path_rate_bps] == [700, 700]
    estimator.add_burst(600)
    estimator.add_burst(400)
    assert estimator.path_rate_bps == 600, "old results are forgotten"
    estimator.add_goodput(0, 0)
    estimator.add_goodput(10 * MS, 1000)
    estimate = estimator.estimate()
    assert (estimate.goodput_bps, estimate.burst_bps) == (800_000, 600)
    estimator.forget_bursts()
    assert estimator.estimate().burst_bps is None
    assert estimator.goodput_bps == 800_000
    estimator.add_burst(10**6)
    estimator.reset()
    assert estimator.goodput_bps == 800_000, "the path is another one now"
