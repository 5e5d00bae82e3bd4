# SPDX-License-Identifier: Apache-2.0
"""Which changes of a profile are pushed to running virtual connections."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqplbd.config import parse_config
from dqplbd.profiles.bdp import Limiter, PathInputs, ProfilePolicy, compute_profile
from dqplbd.profiles.table import ProfileTable
from dqplbd.topology.location import PathClass


def policy(text: str = "") -> ProfilePolicy:
    config = parse_config(text)
    return ProfilePolicy.from_config(config.profiles, config.transport)


def path(rtt: int | None = 100_000, path_class: PathClass = PathClass.REGION, **more: int) -> PathInputs:
    return PathInputs(path_class, rtt, 400 * 10**9, **more)  # type: ignore[arg-type]


@pytest.fixture
def table() -> ProfileTable[int]:
    table: ProfileTable[int] = ProfileTable(policy())
    table.update(1, path())
    return table


def test_a_new_path_is_pushed() -> None:
    table: ProfileTable[str] = ProfileTable(policy())
    change = table.update("p", path())
    assert change is not None
    assert (change.path_id, change.old) == ("p", None)
    assert change.new == table.profile("p") == compute_profile(path(), policy())
    assert len(table) == 1
    assert "p" in table
    assert list(table) == ["p"]


def test_a_small_change_is_not_pushed_but_remembered(table: ProfileTable[int]) -> None:
    before = table.profile(1)
    assert table.update(1, path(104_000)) is None
    assert table.profile(1) == before
    assert table.inputs(1).rtt_ns == 104_000
    assert table.explain(1).profile.rtt_ns == 104_000


def test_a_slow_drift_is_pushed_when_it_adds_up(table: ProfileTable[int]) -> None:
    pushed = [rtt for rtt in range(100_000, 131_000, 1_000) if table.update(1, path(rtt)) is not None]
    assert 2 <= len(pushed) <= 4
    assert table.profile(1).rtt_ns == pushed[-1] > 118_000


def test_wobbling_around_a_value_is_never_pushed(table: ProfileTable[int]) -> None:
    assert [table.update(1, path(100_000 + (-1) ** i * 4_000)) for i in range(50)] == [None] * 50


@pytest.mark.parametrize(
    "inputs",
    [
        path(100_000, PathClass.BUILDING),
        path(100_000, active_peers=1000),
        path(100_000, max_segment_bytes=32768),
        path(100_000, queue_depth=1, max_qps=4),
        path(90_000),
        path(100_000, peer_rate_bps=100 * 10**9),
        path(None),
    ],
)
def test_a_large_or_hard_change_is_pushed(table: ProfileTable[int], inputs: PathInputs) -> None:
    old = table.profile(1)
    change = table.update(1, inputs)
    assert change is not None
    assert change.old == old
    assert change.new == table.profile(1) == compute_profile(inputs, table.policy)


def test_the_first_measurement_is_pushed_even_where_it_was_guessed_right() -> None:
    table: ProfileTable[int] = ProfileTable(policy())
    table.update(1, path(None))
    change = table.update(1, path(240_000))
    assert change is not None
    assert change.old is not None
    assert (change.old.rtt_by, change.new.rtt_by) == (Limiter.UNMEASURED, Limiter.MEASURED)
    assert change.new.adapt


def test_without_adaptation_the_first_measurement_is_pushed_as_well() -> None:
    table: ProfileTable[int] = ProfileTable(policy("profiles: {adapt: false}"))
    table.update(1, path(None))
    assert table.update(1, path(240_000)) is not None
    assert table.profile(1).rtt_by is Limiter.MEASURED


def test_reload_pushes_every_difference(table: ProfileTable[int]) -> None:
    table.update(2, path(8_000, PathClass.RACK))
    assert table.reload(policy()) == []
    (change,) = table.reload(policy("profiles: {classes: {rack: {qps: 3}}}"))
    assert (change.path_id, change.new.qps, table.profile(2).qps) == (2, 3, 3)
    assert {c.path_id for c in table.reload(policy("profiles: {gain: 1.5}"), push_change=0.5)} == {1, 2}
    assert table.update(1, path(140_000)) is None


def test_many_at_once_and_removal(table: ProfileTable[int]) -> None:
    changes = table.update_all([(1, path(101_000)), (2, path(None)), (3, path(5_000, PathClass.RACK))])
    assert [change.path_id for change in changes] == [2, 3]
    assert table.remove(2)
    assert not table.remove(2)
    with pytest.raises(KeyError):
        table.profile(2)


def test_the_threshold_is_checked() -> None:
    for bad in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="push_change"):
            ProfileTable(policy(), bad)


@given(st.lists(st.integers(1_000, 10**6), min_size=1, max_size=40))
def test_what_is_in_force_is_within_a_tenth_of_what_is_known(rtts: list[int]) -> None:
    table: ProfileTable[int] = ProfileTable(policy())
    for rtt in rtts:
        before = table.profile(0) if 0 in table else None
        change = table.update(0, path(rtt))
        now, wanted = table.profile(0), compute_profile(path(rtt), table.policy)
        assert (change is None) == (now == before)
        assert now.qps == wanted.qps
        assert abs(now.rtt_ns - rtt) < 0.1 * now.rtt_ns or now.rtt_ns == rtt
        assert abs(now.window_bytes - wanted.window_bytes) <= 0.1 * now.window_bytes
