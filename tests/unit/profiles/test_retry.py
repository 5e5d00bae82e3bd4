# SPDX-License-Identifier: Apache-2.0
"""Time-outs of queue pairs by path."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqplbd.config import parse_config
from dqplbd.profiles.bdp import PathInputs, Profile, ProfilePolicy, compute_profile
from dqplbd.profiles.retry import MAX_NS, MIN_NS, RetryPolicy, compute_retry, round_up_timeout
from dqplbd.topology.location import PathClass

CONFIG = parse_config("")
POLICY = ProfilePolicy.from_config(CONFIG.profiles, CONFIG.transport)
RULE = RetryPolicy()
MS = 10**6


def profile(rtt_ns: int, rate_bps: int = 400 * 10**9, path_class: PathClass = PathClass.ZONE) -> Profile:
    return compute_profile(PathInputs(path_class, rtt_ns, rate_bps), POLICY)


@pytest.mark.parametrize(
    ("rtt_us", "timeout_ms", "give_up_s", "by"),
    [(8, 16.8, 0.13, "min"), (56, 67.1, 0.54, "rtt"), (120, 134, 1.07, "rtt"), (240, 268, 2.15, "rtt")],
)
def test_the_published_paths(rtt_us: int, timeout_ms: float, give_up_s: float, by: str) -> None:
    retry = compute_retry(profile(rtt_us * 1000), RULE)
    assert retry.ack_timeout_ns / MS == pytest.approx(timeout_ms, rel=0.01)
    assert retry.give_up_ns / 1e9 == pytest.approx(give_up_s, rel=0.05)
    assert (retry.retries, retry.timeout_by) == (7, by)


def test_a_slow_path_has_time_to_drain_its_window() -> None:
    slow = profile(50_000, 10**6)  # 128 KiB at 1 Mbit/s: a second
    retry = compute_retry(slow, RULE)
    assert retry.timeout_by == "drain"
    assert retry.ack_timeout_ns >= slow.window_bytes * 8 * 10**9 // slow.rate_bps


def test_what_is_set_goes_before() -> None:
    config = parse_config("transport: {ack_timeout_s: 1ms, retries: 3}")
    retry = compute_retry(profile(240_000), RetryPolicy.from_config(config.transport))
    assert (retry.ack_timeout_ns, retry.retries, retry.timeout_by) == (4096 * 256, 3, "pinned")
    assert retry.give_up_ns == 4 * 4096 * 256
    assert RetryPolicy.from_config(CONFIG.transport) == RULE


@pytest.mark.parametrize(
    ("wanted", "given"),
    [(0, 8192), (1, 8192), (8192, 8192), (8193, 16384), (16 * MS, 4096 << 12), (10**15, 4096 << 31)],
)
def test_only_what_a_queue_pair_can_have(wanted: int, given: int) -> None:
    assert round_up_timeout(wanted) == given


@given(st.integers(0, 4096 << 31))
def test_rounding_goes_up_and_by_less_than_twice(wanted: int) -> None:
    rounded = round_up_timeout(wanted)
    assert rounded % 4096 == 0
    assert (rounded // 4096).bit_count() == 1
    assert max(wanted, 8192) <= rounded < max(2 * wanted, 8193)


@given(
    st.integers(100, 10**8),
    st.integers(10**6, 10**13),
    st.sampled_from(list(PathClass)),
)
def test_any_path(rtt_ns: int, rate_bps: int, path_class: PathClass) -> None:
    one = profile(rtt_ns, rate_bps, path_class)
    retry = compute_retry(one, RULE)
    drain = one.window_bytes * 8 * 10**9 // one.rate_bps
    assert retry.ack_timeout_ns >= max(MIN_NS, 8 * rtt_ns + drain)
    assert retry.ack_timeout_ns < 2 * max(MAX_NS, 8 * rtt_ns + drain)
    longer = compute_retry(profile(2 * rtt_ns, rate_bps, path_class), RULE)
    assert longer.ack_timeout_ns >= retry.ack_timeout_ns or "drain" in (longer.timeout_by, retry.timeout_by)
