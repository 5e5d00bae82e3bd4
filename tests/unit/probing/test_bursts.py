# SPDX-License-Identifier: Apache-2.0
"""Who is sent a burst, when and how long; never more than configured, whatever happens."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqplbd.probing.bursts import (
    MAX_BURST_BYTES,
    MESSAGES,
    MIN_BURST_BYTES,
    Burst,
    BurstPlanner,
    BurstPolicy,
    BurstResult,
    Candidate,
    DailyBudget,
    burst_bytes,
    burst_place,
    measured_rate,
)
from dqplbd.topology.location import Location

GBIT = 10**9
US = 1000
DAY = 86400
ON = BurstPolicy(enabled=True, interval_s=100.0)
RACK_A, RACK_B = ("rack", "", "", "z", "a"), ("rack", "", "", "z", "b")


def path(host: str, place: tuple[str, ...] = RACK_A, *, device: int = 0, in_use: bool = False) -> Candidate:
    return Candidate((device, host), place, 10 * GBIT, 100 * US, in_use)


def planner(policy: BurstPolicy = ON, chance: float = 0.0) -> BurstPlanner:
    return BurstPlanner("here", policy, lambda: chance)


def expect(burst: Burst | None) -> Burst:
    assert burst is not None
    return burst


# ------------------------------------------------------------------------------------------------------- length, result


@pytest.mark.parametrize(
    ("rate", "rtt", "bdp", "size"),
    [
        (400 * GBIT, 240 * US, 5.0, 60_000_000),  # 5 BDP
        (400 * GBIT, 8 * US, 4.0, 50_000_000),  # 1 ms of the rate
        (GBIT, 1_000_000, 4.0, 500_000),
        (10_000_000, 100 * US, 4.0, MIN_BURST_BYTES),
        (800 * GBIT, 10_000_000, 4.0, MAX_BURST_BYTES),
        (10_000_000, 10**10, 16.0, 2_500_000),  # 2 s of the rate
    ],
)
def test_the_length_of_a_burst(rate: int, rtt: int, bdp: float, size: int) -> None:
    found = burst_bytes(rate, rtt, bdp)
    assert size <= found < size + MESSAGES * 4096
    assert found % (MESSAGES * 4096) == 0


@given(st.integers(1_000_000, 10**13), st.integers(1, 10**10), st.floats(1, 16))
def test_no_burst_is_shorter_or_longer_than_the_bounds(rate: int, rtt: int, bdp: float) -> None:
    size = burst_bytes(rate, rtt, bdp)
    assert MIN_BURST_BYTES <= size <= MAX_BURST_BYTES
    assert size // MESSAGES * MESSAGES == size


@given(st.integers(1, MAX_BURST_BYTES), st.integers(1_000_000, 10**13), st.integers(1, 10**10), st.integers(0, 10**10))
def test_a_result_is_never_above_what_the_path_carries(size: int, rate: int, rtt: int, disturbance: int) -> None:
    elapsed = rtt + -(-size * 8 * 10**9 // rate) + disturbance
    found = measured_rate(size, elapsed, rtt)
    assert found is None or found <= rate


def test_a_result_of_an_undisturbed_burst_is_the_rate() -> None:
    assert measured_rate(1_250_000, 1_100_000, 100_000) == 10 * GBIT
    assert measured_rate(1_250_000, 100_000, 100_000) is None
    assert measured_rate(0, 10**9, 100_000) is None


# -------------------------------------------------------------------------------------------------------------- budget


@given(st.lists(st.tuples(st.floats(0, DAY / 3), st.integers(1, 10**6)), max_size=60), st.integers(10**6, 10**7))
def test_no_24_hours_see_more_than_the_budget(steps: list[tuple[float, int]], limit: int) -> None:
    budget = DailyBudget()
    now = 0.0
    spent: list[tuple[float, int]] = []
    for wait, size in steps:
        now += wait
        if size <= budget.left(now, limit):
            budget.spend(now, size)
            spent.append((now, size))
        assert sum(amount for when, amount in spent if now - when < DAY) <= limit


def test_the_budget_comes_back_after_a_day() -> None:
    budget = DailyBudget()
    budget.spend(10.0, 900)
    assert budget.left(20.0, 1000) == 100
    assert budget.left(10.0 + DAY, 1000) == 100
    assert budget.left(3600.0 + DAY, 1000) == 1000
    assert budget.left(3600.0 + DAY, 0) == 0


# ------------------------------------------------------------------------------------------------------------- planner


def test_nothing_unless_enabled() -> None:
    assert planner(BurstPolicy()).next(10**6, [path("b")], {}) is None


def test_one_at_a_time_and_one_a_rack_in_an_interval() -> None:
    one = planner()
    hosts = [path("a1", in_use=True), path("a2", in_use=True), path("b1", RACK_B)]
    first = expect(one.next(0, hosts, {}))
    assert one.next(1, hosts, {}) is None
    one.done(2, first, BurstResult.OK, first.bytes)
    second = expect(one.next(2, hosts, {}))
    assert {first.place, second.place} == {RACK_A, RACK_B}
    one.done(3, second, BurstResult.OK, second.bytes)
    assert one.next(99.9, hosts, {}) is None
    third = expect(one.next(100, hosts, {}))
    assert third.place == first.place
    one.done(101, third, BurstResult.OK, third.bytes)
    assert {burst.key[1] for burst in (first, second, third)} == {"a1", "a2", "b1"}, (
        "hosts of a rack that are in use take turns"
    )


def test_the_first_one_and_the_next_are_put_off_at_random() -> None:
    one = planner(chance=0.5)
    assert one.next(0, [path("b")], {}) is None
    assert one.next(49.9, [path("b")], {}) is None
    burst = expect(one.next(50, [path("b")], {}))
    one.done(50, burst, BurstResult.OK, burst.bytes)
    assert one.next(50 + 109.9, [path("b")], {}) is None
    assert one.next(50 + 110, [path("b")], {}) is not None


def test_none_while_the_device_is_busy() -> None:
    one = planner()
    hosts = [path("b"), path("c", RACK_B, device=1)]
    burst = expect(one.next(0, hosts, {0: 0.21, 1: 0.2}))
    assert burst.key == (1, "c")
    one.done(0, burst, BurstResult.OK, burst.bytes)
    assert one.next(50, hosts, {0: 0.21}) is None
    assert expect(one.next(50, hosts, {0: 0.2})).key == (0, "b")


def test_hosts_in_use_go_first() -> None:
    assert expect(planner().next(0, [path("a"), path("b", in_use=True), path("c")], {})).key == (0, "b")


def test_of_a_rack_that_is_not_in_use_it_is_always_the_same_host() -> None:
    one = planner()
    keys = set()
    for now in range(0, 1000, 100):
        burst = expect(one.next(now, [path("a1"), path("a2"), path("a3")], {}))
        one.done(now, burst, BurstResult.OK, burst.bytes)
        keys.add(burst.key)
    assert len(keys) == 1, "each other one would get a VC of its own"


def test_a_result_that_tells_more_is_followed_up_on_the_same_path() -> None:
    one = planner()
    hosts = [path("a1", in_use=True), path("a2", in_use=True)]
    now = 0.0
    burst = expect(one.next(now, hosts, {}))
    keys = [burst.key]
    while True:
        one.done(now, burst, BurstResult.OK, burst.bytes, again=True)
        assert one.next(now + 0.9, hosts, {}) is None
        following = one.next(now + 1, hosts, {})
        if following is None:
            break
        now, burst = now + 1, following
        keys.append(burst.key)
    assert len(set(keys)) == 1
    assert len(keys) == 16, "not without end"
    assert one.next(99.9, hosts, {}) is None
    assert expect(one.next(100, hosts, {})).key != keys[0], "the interval counts from the first of them"


def test_a_follow_up_to_a_path_that_is_gone_is_dropped() -> None:
    one = planner()
    burst = expect(one.next(0, [path("a1")], {}))
    one.done(0, burst, BurstResult.OK, burst.bytes, again=True)
    assert one.next(5, [path("a2")], {}) is None
    assert one.next(99, [path("a2")], {}) is None
    assert one.next(100, [path("a2")], {}) is not None


def test_after_a_refusal_another_host_of_the_rack_has_its_turn() -> None:
    one = planner()
    hosts = [path("a1"), path("a2")]
    first = expect(one.next(0, hosts, {}))
    one.done(0, first, BurstResult.REFUSED, 0)
    assert one.next(9.9, hosts, {}) is None
    second = expect(one.next(10, hosts, {}))
    assert second.key != first.key
    one.done(10, second, BurstResult.REFUSED, 0)
    assert one.next(99, hosts, {}) is None
    assert expect(one.next(100, hosts, {})).key == first.key, "a refusal holds for an interval"


def test_a_busy_host_is_asked_again_soon() -> None:
    one = planner()
    first = expect(one.next(0, [path("a")], {}))
    one.done(0, first, BurstResult.BUSY, 0)
    assert one.next(9.9, [path("a")], {}) is None
    assert one.next(10, [path("a")], {}) is not None


def test_what_a_failed_burst_sent_counts() -> None:
    one = planner(BurstPolicy(enabled=True, interval_s=100.0, daily_bytes=2_000_000))
    burst = expect(one.next(0, [path("a")], {}))
    one.done(0, burst, BurstResult.FAILED, burst.bytes)
    assert one.budget_left(0) == 2_000_000 - burst.bytes
    assert one.next(100, [path("a")], {}) is None, "the rest of the budget is too small"
    assert one.next(DAY + 3600, [path("a")], {}) is not None


def test_switching_off_and_on() -> None:
    one = planner()
    one.configure(BurstPolicy(enabled=False, interval_s=100.0))
    assert one.next(0, [path("a")], {}) is None
    one.configure(BurstPolicy(enabled=True, interval_s=10.0))
    burst = expect(one.next(0, [path("a")], {}))
    one.done(0, burst, BurstResult.OK, burst.bytes)
    assert one.next(10, [path("a")], {}) is not None


def test_places() -> None:
    assert burst_place("h", Location(zone="z", rack="a")) == RACK_A == burst_place("g", Location(zone="z", rack="a"))
    assert burst_place("h", Location(zone="y", rack="a")) != RACK_A
    assert burst_place("h", Location(zone="z")) != burst_place("g", Location(zone="z"))


@given(
    st.lists(
        st.tuples(
            st.floats(0, 200),  # time that passes
            st.sets(st.integers(0, 11), max_size=12),  # hosts that are there
            st.floats(0, 0.4),  # utilisation
            st.sampled_from(BurstResult),
            st.booleans(),  # again
            st.floats(0, 5),  # how long it lasts
        ),
        max_size=80,
    ),
    st.floats(0, 0.999),
)
def test_whatever_happens_the_limits_hold(
    steps: list[tuple[float, set[int], float, BurstResult, bool, float]], chance: float
) -> None:
    policy = BurstPolicy(enabled=True, interval_s=100.0, daily_bytes=8_000_000)
    one = planner(policy, chance)
    now = 0.0
    begun: dict[tuple[str, ...], float] = {}
    row: dict[tuple[str, ...], int] = defaultdict(int)
    following: dict[tuple[str, ...], Burst] = {}
    spent: list[tuple[float, int]] = []
    for wait, present, used, result, again, lasts in steps:
        now += wait
        hosts = [path(f"h{number}", ("rack", "", "", "", str(number % 3))) for number in sorted(present)]
        burst = one.next(now, hosts, {0: used})
        if burst is None:
            continue
        assert used <= policy.max_utilisation
        assert burst.key in {host.key for host in hosts}
        assert one.next(now, hosts, {}) is None
        before = following.pop(burst.place, None)
        if before is not None and now < begun[burst.place] + policy.interval_s:
            assert burst.key == before.key
            row[burst.place] += 1
            assert row[burst.place] < 16
        else:
            same_turn = before is not None and burst.key == before.key
            assert same_turn or now >= begun.get(burst.place, -1e9) + policy.interval_s
            begun[burst.place], row[burst.place] = now, 0
        sent = burst.bytes if result in (BurstResult.OK, BurstResult.FAILED) else 0
        if not sent:
            del begun[burst.place]  # nothing was sent: the turn is not used up
        now += lasts
        one.done(now, burst, result, sent, again=again)
        if result is BurstResult.OK and again:
            following[burst.place] = burst
        spent.append((now, sent))
        assert sum(size for when, size in spent if now - when < DAY) <= policy.daily_bytes
