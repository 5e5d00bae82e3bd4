# SPDX-License-Identifier: Apache-2.0
"""The profile rule: the suggested defaults, every limiter, and what holds for any input."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dqplbd.config import parse_config
from dqplbd.profiles.bdp import Limiter, PathInputs, Pin, Profile, ProfilePolicy, compute_profile, explain_profile
from dqplbd.topology.location import PathClass
from dqplbd.units import format_bytes

KIB, MIB, GBIT, US = 2**10, 2**20, 10**9, 1000


def policy(text: str = "") -> ProfilePolicy:
    config = parse_config(text)
    return ProfilePolicy.from_config(config.profiles, config.transport)


DEFAULT = policy()


def path(path_class: str = "zone", rtt_us: float | None = 56, gbit: float = 400, **more: Any) -> PathInputs:
    rtt = None if rtt_us is None else int(rtt_us * US)
    return PathInputs(PathClass(path_class), rtt, int(gbit * GBIT), **more)


@pytest.mark.parametrize(
    ("path_class", "rtt_us", "qps", "segment", "window", "outstanding"),
    [
        ("rack", 8, 2, 64 * KIB, MIB // 2, 4),
        ("zone", 56, 4, 128 * KIB, 27 * MIB // 8, 7),
        ("building", 120, 8, 128 * KIB, 57 * MIB // 8, 8),
        ("region", 240, 16, 128 * KIB, 113 * MIB // 8, 8),
    ],
)
def test_the_suggested_defaults_at_400_gbit(
    path_class: str, rtt_us: int, qps: int, segment: int, window: int, outstanding: int
) -> None:
    profile = compute_profile(path(path_class, rtt_us), DEFAULT)
    assert (profile.qps, profile.segment_bytes, profile.window_bytes, profile.outstanding_per_qp) == (
        qps,
        segment,
        window,
        outstanding,
    )
    assert profile.limited_by is Limiter.BDP
    # An unmeasured path of that class has the same numbers at once, but nothing to measure a delay against.
    guess = compute_profile(path(path_class, None), DEFAULT)
    assert guess[:9] == profile[:9]
    assert (guess.limited_by, guess.rtt_by, guess.adapt) == (Limiter.UNMEASURED, Limiter.UNMEASURED, False)


@pytest.mark.parametrize(
    ("gbit", "rtt_us", "megabytes"), [(100, 8, 0.1), (100, 240, 3.0), (200, 56, 1.4), (400, 120, 6.0), (800, 240, 24)]
)
def test_bandwidth_delay_products(gbit: int, rtt_us: int, megabytes: float) -> None:
    profile = compute_profile(path("region", rtt_us, gbit, header_bytes=0), DEFAULT)
    assert profile.bdp_bytes == pytest.approx(megabytes * 1e6, rel=0.01)


@pytest.mark.parametrize(("mtu", "percent"), [(4096, 98.0), (2048, 96.2), (1024, 92.6)])
def test_the_rate_is_what_payload_can_get(mtu: int, percent: float) -> None:
    profile = compute_profile(path(mtu_bytes=mtu), DEFAULT)
    assert profile.rate_bps / (400 * GBIT) * 100 == pytest.approx(percent, abs=0.05)


@pytest.mark.parametrize(
    ("more", "text", "by", "gbit"),
    [
        ({}, "", Limiter.LOCAL, 400),
        ({"peer_rate_bps": 400 * GBIT}, "", Limiter.LOCAL, 400),
        ({"peer_rate_bps": 100 * GBIT}, "", Limiter.PEER, 100),
        ({"path_rate_bps": GBIT, "peer_rate_bps": 100 * GBIT}, "", Limiter.PATH, 1),
        ({}, "profiles: {class_rate_cap_bps: {zone: 140Gbit/s}}", Limiter.CLASS, 140),
        ({"goodput_bps": 399 * GBIT}, "", Limiter.LOCAL, 400),
        ({"goodput_bps": 401 * GBIT}, "", Limiter.GOODPUT, 401),
        ({"goodput_bps": 2 * GBIT, "path_rate_bps": GBIT}, "", Limiter.GOODPUT, 2),
        ({"goodput_bps": 500 * GBIT}, "profiles: {class_rate_cap_bps: {zone: 450Gbit/s}}", Limiter.CLASS, 450),
    ],
)
def test_the_slowest_part_gives_the_rate(more: dict[str, Any], text: str, by: Limiter, gbit: int) -> None:
    profile = compute_profile(path(header_bytes=0, **more), policy(text))
    assert (profile.rate_bps, profile.rate_by) == (gbit * GBIT, by)


def test_a_rate_guessed_too_low_rises_until_the_path_is_full() -> None:
    true_rate, rtt_ns, goodput = 40 * GBIT, 100 * US, None
    rates = []
    for _ in range(20):
        profile = compute_profile(path("zone", 100, 10, goodput_bps=goodput), DEFAULT)
        goodput = min(true_rate, profile.window_bytes * 8 * 10**9 // rtt_ns)
        rates.append(profile.rate_bps)
    assert rates == sorted(rates)
    assert rates[0] < 10 * GBIT
    assert rates[-1] == true_rate


def test_a_short_slow_path_gets_the_minimum() -> None:
    profile = compute_profile(path("rack", 8, 10), policy("profiles: {window_min_bytes: 300KiB}"))
    assert profile.window_bytes == 320 * KIB  # in whole segments
    assert profile.limited_by is Limiter.MINIMUM


@pytest.mark.parametrize(("gbit", "rtt_us"), [(10, 8), (25, 8), (100, 8), (10, 120), (10, 240), (400, 8), (400, 240)])
def test_a_window_of_few_segments_leaves_no_pauses(gbit: int, rtt_us: int) -> None:
    """A segment is acknowledged an RTT after its last byte left: less than a BDP and a segment cannot fill the path."""
    profile = compute_profile(path("rack", rtt_us, gbit), DEFAULT)
    assert profile.window_bytes >= profile.bdp_bytes + profile.segment_bytes


@pytest.mark.parametrize(("path_class", "rtt_us"), [("rack", 8), ("zone", 56), ("building", 120), ("region", 240)])
def test_a_round_over_all_queue_pairs_leaves_no_pauses(path_class: str, rtt_us: int) -> None:
    """A NIC takes its queue pairs in turn, so a segment on each ends together with the others."""
    profile = compute_profile(path(path_class, rtt_us), DEFAULT)
    assert profile.window_bytes >= profile.bdp_bytes + profile.qps * profile.segment_bytes
    assert (profile.qps - 1) * profile.segment_bytes <= 0.25 * profile.bdp_bytes * 1.01


@pytest.mark.parametrize(("peers", "segment"), [(1, 128), (7, 128), (24, 64), (120, 64), (4000, 64)])
def test_many_peers_get_small_segments(peers: int, segment: int) -> None:
    assert compute_profile(path("region", 240, active_peers=peers), DEFAULT).segment_bytes == segment * KIB


def test_a_slow_path_has_no_window_for_the_sake_of_its_queue_pairs() -> None:
    profile = compute_profile(path("zone", 20_000, 0.01), DEFAULT)
    assert (profile.qps, profile.segment_bytes, profile.window_bytes) == (4, 64 * KIB, 128 * KIB)


def test_the_window_covers_the_wake_up_of_software() -> None:
    network = compute_profile(path("host", 1, 10), DEFAULT)
    software = compute_profile(path("host", 1, 10, host_delay_ns=499 * US), DEFAULT)
    assert software.rtt_ns == network.rtt_ns == 1 * US
    assert software.bdp_bytes == compute_profile(path("host", 500, 10), DEFAULT).bdp_bytes
    assert software.window_bytes > network.window_bytes
    formula = explain_profile(path("host", 1, 10, host_delay_ns=499 * US), DEFAULT).why["bdp_bytes"].formula
    assert "499us until the hosts" in formula


def test_incast_bounds_the_window_by_the_buffer() -> None:
    # 64 MB, alpha 1/2, 16 senders: 1.33 MB each, under the BDP at 56 us.
    profile = compute_profile(path("zone", 56), policy("profiles: {incast: {zone: 16}}"))
    assert profile.limited_by is Limiter.BUFFER
    assert 1_200_000 <= profile.window_bytes <= 64_000_000 / 3 / 16
    assert profile.window_bytes < profile.bdp_bytes
    assert profile.ceiling_bps < profile.rate_bps


def test_the_configured_maximum() -> None:
    profile = compute_profile(path("region", 240), policy("profiles: {window_max_bytes: 4MiB}"))
    assert (profile.limited_by, profile.window_bytes) == (Limiter.MAXIMUM, 4 * MIB)


def test_a_buffer_share_under_one_segment_still_sends() -> None:
    profile = compute_profile(path("zone", 56), policy("profiles: {incast: {zone: 4096}}"))
    assert profile.window_bytes == profile.segment_bytes == 64 * KIB


def test_queue_pairs_follow_rate_entropy_and_budget() -> None:
    assert compute_profile(path("rack", 8, 800), DEFAULT)[5] == 4  # 784 Gbit/s over 200 a queue pair
    many = compute_profile(path("region", 240, active_peers=300), DEFAULT)
    assert (many.qps, many.qps_by) == (8, Limiter.BUDGET)  # 4096 / 300 = 13
    assert compute_profile(path("region", 240, active_peers=100_000), DEFAULT).qps == 1
    agreed = compute_profile(path("region", 240, max_qps=3), DEFAULT)
    assert (agreed.qps, agreed.qps_by) == (3, Limiter.NEGOTIATED)
    assert compute_profile(path("rack", 8, nics=3), DEFAULT).qps == 3
    assert compute_profile(path("zone", 56, nics=3), DEFAULT).qps == 6
    assert compute_profile(path("zone", 56, nics=3, max_qps=5), DEFAULT).qps == 3


def test_what_the_queue_pairs_cannot_hold_is_not_in_the_window() -> None:
    profile = compute_profile(path("region", 240, queue_depth=1, max_qps=2), DEFAULT)
    assert (profile.limited_by, profile.outstanding_by) == (Limiter.QP, Limiter.DEPTH)
    assert profile.window_bytes == 2 * profile.segment_bytes


def test_the_references_shipped_defaults_can_be_pinned() -> None:
    text = "{qps: 16, segment_bytes: 512KiB, window_bytes: 1GiB, outstanding_per_qp: 128}"
    profile = compute_profile(path("rack", 8), policy(f"profiles: {{classes: {{rack: {text}}}}}"))
    assert (profile.qps, profile.segment_bytes, profile.window_bytes, profile.outstanding_per_qp) == (
        16,
        512 * KIB,
        1024 * MIB,
        128,
    )
    assert (profile.limited_by, profile.adapt) == (Limiter.PINNED, False)
    assert profile.window_bytes / profile.bdp_bytes > 2600


def test_a_pinned_number_leaves_the_others_to_the_rule() -> None:
    text = "profiles: {classes: {zone: {segment_bytes: 64KiB}}, peers: {h: {qps: 1, adapt: false}}}"
    profile = compute_profile(path("zone", 56, host_id="h"), policy(text))
    assert (profile.qps, profile.qps_by, profile.segment_bytes, profile.adapt) == (1, Limiter.PINNED, 64 * KIB, False)
    assert profile.window_bytes >= profile.bdp_bytes * 1.25
    assert profile.limited_by is Limiter.BDP
    assert profile.outstanding_per_qp == -(-profile.window_bytes // (64 * KIB))
    other = compute_profile(path("zone", 56, host_id="g"), policy(text))
    assert (other.qps, other.segment_by, other.adapt) == (4, Limiter.PINNED, True)


def test_pins_of_a_host_go_before_those_of_its_class() -> None:
    assert Pin(qps=1).over(Pin(2, 128, adapt=True)) == Pin(1, 128, None, None, True)
    assert Pin(adapt=False).over(Pin(adapt=True)).adapt is False


def test_adaptation() -> None:
    assert compute_profile(path(), policy("profiles: {adapt: false}")).adapt is False
    assert (
        compute_profile(path(), policy("profiles: {adapt: true, classes: {zone: {window_bytes: 1MiB}}}")).adapt is True
    )
    assert compute_profile(path(), policy("profiles: {classes: {zone: {window_bytes: 1MiB}}}")).adapt is False
    assert compute_profile(path(), policy("profiles: {classes: {zone: {qps: 2}}}")).adapt is True
    assert compute_profile(path(rtt_us=None), policy("profiles: {adapt: true}")).adapt is False


PINS = st.builds(
    Pin,
    st.none() | st.integers(1, 128),
    st.none() | st.integers(32, 2**17).map(lambda n: n * 128),
    st.none() | st.integers(4 * KIB, 2**40),
    st.none() | st.integers(1, 4096),
    st.none() | st.booleans(),
)
INPUTS = st.builds(
    PathInputs,
    st.sampled_from(PathClass),
    st.none() | st.integers(1, 10**10),
    st.integers(1, 10**13),
    st.none() | st.integers(1, 10**13),
    st.integers(1, 65536),
    st.integers(0, 200),
    st.none() | st.integers(1, 10**13),
    st.sampled_from(["", "h"]),
    st.integers(1, 200_000),
    st.integers(1, 8),
    st.none() | st.integers(1, 128),
    st.none() | st.integers(1, 4096),
    st.none() | st.integers(64 * KIB, 16 * MIB),
    st.none() | st.integers(1, 10**13),
    st.integers(0, 10**8),
)
POWERS = st.integers(12, 24).map(lambda e: 1 << e)


@st.composite
def policies(draw: st.DrawFn) -> ProfilePolicy:
    low, high = sorted((draw(POWERS), draw(POWERS)))
    window_min, window_max = sorted((draw(st.integers(low, 2**40)), draw(st.integers(low, 2**40))))
    text = (
        f"profiles: {{gain: {draw(st.floats(1, 8)):.6f}, segment_min_bytes: {low}, segment_max_bytes: {high},"
        f" window_min_bytes: {window_min}, window_max_bytes: {max(window_max, 64 * KIB)},"
        f" qp_budget: {draw(st.integers(1, 10**6))}, incast: {{zone: {draw(st.integers(1, 4096))}}},"
        f" per_qp_rate_bps: {draw(st.integers(10**6, 10**12))}}}"
    )
    made = policy(text)
    classes = {c: replace(p, pin=draw(PINS)) for c, p in made.classes.items()} if draw(st.booleans()) else made.classes
    return replace(made, classes=classes, peers={"h": draw(PINS)})


@settings(max_examples=400)
@given(INPUTS, policies())
def test_any_path_gets_a_profile_that_works(inputs: PathInputs, chosen: ProfilePolicy) -> None:
    profile = compute_profile(inputs, chosen)
    pin = chosen.pin_for(inputs.path_class, inputs.host_id)
    klass = chosen.classes[inputs.path_class]
    assert 128 <= profile.segment_bytes <= 16 * MIB
    assert profile.segment_bytes % 128 == 0
    assert profile.segment_bytes <= profile.window_bytes
    assert profile.window_bytes <= profile.qps * profile.outstanding_per_qp * profile.segment_bytes
    assert 1 <= profile.qps <= (chosen.max_qps if inputs.max_qps is None else inputs.max_qps)
    assert 1 <= profile.outstanding_per_qp <= (inputs.queue_depth or chosen.queue_depth)
    assert 1 <= profile.min_window_bytes <= profile.window_bytes
    assert profile.min_window_bytes >= profile.segment_bytes
    assert profile.rate_bps >= 1
    assert profile.bdp_bytes >= 1
    if inputs.max_segment_bytes is not None:
        assert profile.segment_bytes <= inputs.max_segment_bytes
    if pin.segment_bytes is None and pin.window_bytes is None:
        assert profile.segment_bytes & (profile.segment_bytes - 1) == 0
        assert profile.segment_bytes <= chosen.segment_max_bytes
        assert profile.window_bytes <= max(klass.window_max_bytes, profile.segment_bytes)
    if profile.limited_by is Limiter.BDP:
        assert profile.window_bytes >= chosen.gain * profile.bdp_bytes - 1
        reserve = max(int(chosen.gain * profile.bdp_bytes) - profile.bdp_bytes, 0) // profile.segment_bytes
        least = profile.bdp_bytes + profile.segment_bytes
        most = profile.bdp_bytes + (1 + reserve) * profile.segment_bytes
        assert profile.window_bytes >= least
        assert (
            profile.window_bytes
            < max(chosen.gain * profile.bdp_bytes + profile.segment_bytes, most) + profile.segment_bytes
        )
    if pin.qps is None and profile.qps_by is Limiter.BUDGET:
        assert profile.qps <= max(chosen.qp_budget // inputs.active_peers, 1)
    assert profile.adapt is False or inputs.rtt_ns is not None


@settings(max_examples=400)
@given(INPUTS, policies())
def test_the_explanation_is_of_the_same_numbers(inputs: PathInputs, chosen: ProfilePolicy) -> None:
    explanation = explain_profile(inputs, chosen)
    profile = compute_profile(inputs, chosen)
    assert explanation.profile == profile
    assert set(explanation.why) == set(Profile._fields[1:10])
    for name, limit in explanation.why.items():
        assert limit.name == name
        assert limit.value == getattr(profile, name)
        assert limit.formula
        assert limit.text
    assert explanation.why["window_bytes"].limiter is profile.limited_by


@given(st.integers(1, 10**8), st.integers(1, 10**8))
def test_a_longer_path_never_gets_a_smaller_window(first: int, second: int) -> None:
    near, far = sorted((first, second))
    a, b = (compute_profile(PathInputs(PathClass.REGION, rtt, 400 * GBIT), DEFAULT) for rtt in (near, far))
    assert a.bdp_bytes <= b.bdp_bytes
    # Rounding down to larger segments can take back less than one of them.
    assert a.window_bytes <= b.window_bytes + b.segment_bytes


def test_the_explanation_says_what_bounds_the_throughput() -> None:
    bound = explain_profile(path("zone", 56), policy("profiles: {incast: {zone: 16}}"))
    assert "latency bound: window 1.25MiB < BDP 2.618MiB, so at most 1.25MiB / 56us = 187.2Gbit/s" in bound.summary
    assert "limited by buffer" in bound.summary
    assert "/ 16 senders" in bound.why["window_bytes"].formula
    free = explain_profile(path("zone", 56, peer_rate_bps=200 * GBIT), DEFAULT)
    assert free.summary.startswith("rate bound")
    assert "min(local 400Gbit/s, peer 200Gbit/s) x 4096/4178" in free.why["rate_bps"].formula
    assert free.why["window_bytes"].formula.startswith(f"1.25 x {format_bytes(free.profile.bdp_bytes)} + ")
    seen = explain_profile(path("zone", 56, goodput_bps=500 * GBIT), DEFAULT).why["rate_bps"]
    assert seen.formula == "500Gbit/s were seen to get through, more than min(local 400Gbit/s) x 4096/4178"
    assert "not measured" in explain_profile(path(rtt_us=None), DEFAULT).why["rtt_ns"].formula
    pinned = explain_profile(path(), policy("profiles: {classes: {zone: {qps: 3, window_bytes: 1MiB}}}"))
    assert [pinned.why[name].formula for name in ("qps", "window_bytes")] == ["set by hand"] * 2
