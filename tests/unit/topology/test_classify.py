# SPDX-License-Identifier: Apache-2.0
"""Classes from RTT and labels: both rules, hysteresis, and who decides."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqplbd.config import parse_config
from dqplbd.topology.classify import (
    RTT_CLASSES,
    ClassificationPolicy,
    ClassifierState,
    Source,
    classify,
    next_rtt_class,
    rule_from_gaps,
    rule_from_thresholds,
)
from dqplbd.topology.location import PathClass

RACK, ZONE, BUILDING, REGION = RTT_CLASSES
UNKNOWN = PathClass.UNKNOWN
CLASS_RTTS = [8_000, 56_000, 120_000, 240_000]
RULE = rule_from_thresholds(21_200, 82_000, 169_700)
POLICY = ClassificationPolicy("labels_then_rtt", RULE, 0.15, 3, {})


@pytest.mark.parametrize(
    ("rtt", "expected"),
    [
        (1, RACK),
        (8_000, RACK),
        (21_200, RACK),
        (21_201, ZONE),
        (82_000, ZONE),
        (82_001, BUILDING),
        (169_700, BUILDING),
        (169_701, REGION),
        (10**12, REGION),
    ],
)
def test_thresholds(rtt: int, expected: PathClass) -> None:
    assert RULE.class_of(rtt) is expected


@pytest.mark.parametrize("bounds", [(0, 1, 2), (2, 1, 3), (1, 1, 2), (-1, 2, 3)])
def test_thresholds_must_rise(bounds: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="0 < rack < zone < building"):
        rule_from_thresholds(*bounds)


@pytest.mark.parametrize("scale", [0.1, 1, 20, 125, 1000])
@pytest.mark.parametrize(
    "present", [(0, 1, 2, 3), (0, 1, 3), (0, 1), (1, 3), (0, 3), (0, 2, 3), (1, 2, 3), (0, 2), (0, 1, 2)]
)
def test_gaps_name_clusters_by_their_ratios_at_any_scale(scale: float, present: tuple[int, ...]) -> None:
    rng = random.Random(f"{scale}{present}")
    paths = [
        (RTT_CLASSES[i], int(CLASS_RTTS[i] * scale * rng.uniform(1, 1.1)))
        for i in present
        for _ in range(rng.randint(1, 9))
    ]
    rule = rule_from_gaps([rtt for _, rtt in paths], CLASS_RTTS)
    assert rule is not None
    assert [rule.class_of(rtt) for _, rtt in paths] == [path_class for path_class, _ in paths]


@pytest.mark.parametrize("present", [(1, 2), (2, 3)])
def test_ratios_that_are_close_are_told_apart_by_the_absolute_rtt(present: tuple[int, ...]) -> None:
    rtts = [int(CLASS_RTTS[i] * stretch) for i in present for stretch in (1.0, 1.05, 1.1)]
    for noise in (0.9, 1.0, 1.1):
        rule = rule_from_gaps([*rtts[:3], *(int(rtt * noise) for rtt in rtts[3:])], CLASS_RTTS)
        assert rule is not None
        assert [rule.class_of(rtt) for rtt in (rtts[0], rtts[5])] == [RTT_CLASSES[i] for i in present]


def test_one_cluster_has_no_ratio() -> None:
    for rtts in ([], [5], [5, 6, 7, 8], [100, 159]):
        assert rule_from_gaps(rtts, CLASS_RTTS) is None


def test_noise_within_two_classes_makes_no_third() -> None:
    rng = random.Random(7)
    rtts = [int(base * rng.uniform(1, 1.5)) for base in (8_000, 56_000) for _ in range(200)]
    rule = rule_from_gaps(rtts, CLASS_RTTS)
    assert rule is not None
    assert {rule.class_of(rtt) for rtt in rtts} == {RACK, ZONE}


def test_a_single_outlier_is_no_cluster_where_clusters_have_a_size() -> None:
    for outlier in (1_000, 1_000_000):
        rtts = [8_000] * 10 + [56_000] * 10 + [outlier]
        rule = rule_from_gaps(rtts, CLASS_RTTS, min_cluster_size=2)
        assert rule is not None
        assert [rule.class_of(rtt) for rtt in (8_000, 56_000)] == [RACK, ZONE]
        assert rule.class_of(outlier) is (RACK if outlier == 1_000 else ZONE)


@pytest.mark.parametrize(
    ("classes", "ratio", "size", "rtts"),
    [
        ([1, 2, 3], 1.6, 1, []),
        ([1, 1, 2, 3], 1.6, 1, []),
        ([0, 1, 2, 3], 1.6, 1, []),
        (CLASS_RTTS, 1.0, 1, []),
        (CLASS_RTTS, float("nan"), 1, []),
        (CLASS_RTTS, 1.6, 0, []),
        (CLASS_RTTS, 1.6, 1, [0, 5]),
    ],
)
def test_gap_arguments_are_checked(classes: list[int], ratio: float, size: int, rtts: list[int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        rule_from_gaps(rtts, classes, ratio, size)


@given(st.lists(st.integers(1, 10**9), max_size=60), st.floats(1.05, 10), st.integers(1, 5))
def test_gap_rules_are_sound(rtts: list[int], ratio: float, size: int) -> None:
    rule = rule_from_gaps(rtts, CLASS_RTTS, ratio, size)
    if rule is None:
        return
    assert rule.classes == RTT_CLASSES
    assert list(rule.bounds_ns) == sorted(rule.bounds_ns)
    ordered = sorted(rtts)
    classes = [rule.class_of(rtt) for rtt in ordered]
    # Order is kept, and only a gap separates two classes.
    assert [c.distance for c in classes] == sorted(c.distance for c in classes)
    assert len(set(classes)) >= 2
    for a, b, class_a, class_b in zip(ordered, ordered[1:], classes, classes[1:], strict=False):
        if class_a is not class_b:
            assert b >= a * ratio


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=40))
def test_gap_rules_do_not_depend_on_the_order(rtts: list[int]) -> None:
    assert rule_from_gaps(rtts, CLASS_RTTS) == rule_from_gaps(reversed(rtts), CLASS_RTTS)


def feed(state: ClassifierState, *rtts: int, policy: ClassificationPolicy = POLICY) -> list[PathClass]:
    return [next_rtt_class(state, rtt, policy) for rtt in rtts]


def test_nearer_at_once() -> None:
    state = ClassifierState()
    assert feed(state, 240_000, 8_000) == [REGION, RACK]


def test_farther_after_three_windows_in_a_row() -> None:
    state = ClassifierState()
    assert feed(state, 8_000, 56_000, 56_000, 56_000) == [RACK, RACK, RACK, ZONE]


def test_a_window_in_between_starts_the_count_anew() -> None:
    state = ClassifierState()
    assert feed(state, 8_000, 56_000, 56_000, 8_000, 56_000, 56_000, 56_000)[-2:] == [RACK, ZONE]


def test_within_the_guard_band_nothing_changes() -> None:
    state = ClassifierState()
    bound = RULE.bounds_ns[0]
    assert set(feed(state, 8_000, *[int(bound * 1.14)] * 20)) == {RACK}
    assert feed(state, *[int(bound * 1.16)] * 3)[-1] is ZONE


def test_of_several_farther_classes_the_nearest_counts() -> None:
    state = ClassifierState()
    assert feed(state, 8_000, 240_000, 56_000, 240_000) == [RACK, RACK, RACK, ZONE]
    assert feed(state, 240_000, 240_000, 240_000)[-1] is REGION


def test_a_reroute_to_a_longer_path_is_followed_in_the_end() -> None:
    state = ClassifierState()
    assert feed(state, *[56_000] * 5, *[240_000] * 3)[-1] is REGION


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=60), st.integers(1, 5), st.floats(0, 0.5))
def test_hysteresis(rtts: list[int], windows: int, band: float) -> None:
    policy = replace(POLICY, windows_to_widen=windows, guard_band=band)
    state = ClassifierState()
    previous = UNKNOWN
    for i, rtt in enumerate(rtts):
        now = next_rtt_class(state, rtt, policy)
        plain = RULE.class_of(rtt)
        assert now in RTT_CLASSES
        if previous is UNKNOWN:
            assert now is plain
        elif now.distance < previous.distance:
            assert now is plain  # nearer only where this window says so
        elif now.distance > previous.distance:
            # Farther only when the last windows all said at least that.
            recent = rtts[max(0, i - windows + 1) : i + 1]
            assert len(recent) == windows
            assert all(RULE.class_of(r).distance >= now.distance for r in recent)
            assert all(r > RULE.bounds_ns[previous.distance - 1] * (1 + band) for r in recent)
        if plain.distance < previous.distance and previous is not UNKNOWN:
            assert now is plain  # and then at once
        previous = now


def decided(method: str, labels: PathClass, rtt: int | None, **kwargs: object) -> tuple[PathClass, Source, bool]:
    policy = replace(POLICY, method=method, overrides={"h": BUILDING})  # type: ignore[arg-type]
    state = ClassifierState()
    if rtt is not None:
        next_rtt_class(state, rtt, policy)
    found = classify(policy, state, labels, **kwargs)  # type: ignore[arg-type]
    assert found.labels_class is labels
    assert found.rtt_class is state.rtt_class
    return found.path_class, found.source, found.mismatch


def test_labels_decide_and_rtt_verifies() -> None:
    assert decided("labels_then_rtt", RACK, 8_000) == (RACK, Source.LABELS, False)
    assert decided("labels_then_rtt", RACK, 56_000) == (RACK, Source.LABELS, True)
    assert decided("labels_then_rtt", RACK, None) == (RACK, Source.LABELS, False)


def test_rtt_decides_without_labels() -> None:
    assert decided("labels_then_rtt", UNKNOWN, 56_000) == (ZONE, Source.RTT, False)
    assert decided("labels_then_rtt", UNKNOWN, None) == (UNKNOWN, Source.NONE, False)


def test_methods_of_one_source() -> None:
    assert decided("labels", UNKNOWN, 56_000) == (UNKNOWN, Source.NONE, False)
    assert decided("rtt", RACK, None) == (UNKNOWN, Source.NONE, False)
    assert decided("rtt", RACK, 56_000) == (ZONE, Source.RTT, True)
    assert decided("labels", RACK, 56_000) == (RACK, Source.LABELS, True)


def test_an_override_goes_before_everything_but_the_own_host() -> None:
    assert decided("labels_then_rtt", RACK, 8_000, host_id="h") == (BUILDING, Source.OVERRIDE, False)
    assert decided("labels_then_rtt", RACK, 8_000, host_id="other") == (RACK, Source.LABELS, False)
    assert decided("labels_then_rtt", RACK, 56_000, host_id="h", same_host=True) == (PathClass.HOST, Source.HOST, False)


def test_policy_from_configuration() -> None:
    config = parse_config("classification: {rule: largest_gap, method: rtt, windows_to_widen: 2, overrides: {a: zone}}")
    no_rtts = ClassificationPolicy.from_config(config.classification, config.profiles)
    assert no_rtts.rule == RULE  # two clusters are needed for ratios
    scaled = ClassificationPolicy.from_config(config.classification, config.profiles, [rtt * 100 for rtt in CLASS_RTTS])
    assert [scaled.rule.class_of(rtt * 100) for rtt in CLASS_RTTS] == list(RTT_CLASSES)
    assert (scaled.method, scaled.windows_to_widen, scaled.overrides) == ("rtt", 2, {"a": ZONE})


@pytest.mark.parametrize(("base", "queue_ns"), [(8_000, 5_000), (56_000, 20_000), (120_000, 20_000)])
def test_the_minimum_of_many_samples_sees_through_queues(base: int, queue_ns: int) -> None:
    rng = random.Random(base)
    wrong = sum(
        RULE.class_of(min(base + int(rng.expovariate(1 / queue_ns)) for _ in range(16))) is not RULE.class_of(base)
        for _ in range(2_000)
    )
    assert wrong <= 2
