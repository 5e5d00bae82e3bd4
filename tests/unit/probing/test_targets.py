# SPDX-License-Identifier: Apache-2.0
"""Whom a host probes and how often: places instead of hosts, within a budget, never not at all."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqplbd.config import parse_config
from dqplbd.probing.targets import PRESSURE_SHARES, TargetPolicy, choose_targets, probe_budget
from dqplbd.topology.location import Location, PathClass

POLICY = TargetPolicy()


def fleet(buildings: int = 3, zones: int = 4, racks: int = 5, hosts: int = 16) -> dict[str, Location]:
    return {
        f"b{b}z{z}k{k}h{h}": Location("r", f"b{b}", f"b{b}z{z}", f"k{k}")
        for b in range(buildings)
        for z in range(zones)
        for k in range(racks)
        for h in range(hosts)
    }


FLEET = fleet()
OWN = "b0z0k0h0"


def test_whole_rack_and_representatives_beyond() -> None:
    targets = choose_targets(OWN, FLEET[OWN], FLEET, POLICY)
    by_class = Counter(target.labels_class for target in targets)
    assert by_class == {
        PathClass.RACK: 15,
        PathClass.ZONE: 4 * 2,
        PathClass.BUILDING: 3 * 4,
        PathClass.REGION: 2 * 8,
    }
    per_rack = Counter(FLEET[t.host_id].rack for t in targets if t.labels_class is PathClass.ZONE)
    assert set(per_rack.values()) == {2}
    per_zone = Counter(FLEET[t.host_id].zone for t in targets if t.labels_class is PathClass.BUILDING)
    assert set(per_zone.values()) == {4}
    assert OWN not in {target.host_id for target in targets}


def test_the_choice_is_the_same_every_time_and_in_any_order() -> None:
    first = choose_targets(OWN, FLEET[OWN], FLEET, POLICY)
    again = choose_targets(OWN, FLEET[OWN], list(reversed(FLEET.items())), POLICY)
    assert [t.host_id for t in first] == [t.host_id for t in again]
    assert sum(abs(a.interval_ns - b.interval_ns) for a, b in zip(first, again, strict=True)) <= len(first)


def test_together_the_hosts_of_a_rack_cover_another_place() -> None:
    small = TargetPolicy(hosts_per_building=2)
    seen = Counter(
        target.host_id
        for own in (f"b0z0k{k}h{h}" for k in range(5) for h in range(16))
        for target in choose_targets(own, FLEET[own], FLEET, small)
        if FLEET[target.host_id].building == "b1"
    )
    # 80 hosts ask two each of 320: nearly all picks differ.
    assert len(seen) > 100
    assert max(seen.values()) <= 6


def test_a_host_that_goes_changes_no_other_pick() -> None:
    before = {t.host_id for t in choose_targets(OWN, FLEET[OWN], FLEET, POLICY)}
    gone = next(host for host in sorted(before) if FLEET[host].building == "b1")
    after = {t.host_id for t in choose_targets(OWN, FLEET[OWN], {h: p for h, p in FLEET.items() if h != gone}, POLICY)}
    assert before - {gone} <= after
    assert len(after) == len(before)


def test_hosts_in_use_are_always_probed() -> None:
    used = [host for host in FLEET if FLEET[host].building == "b2"][:50]
    targets = {t.host_id for t in choose_targets(OWN, FLEET[OWN], FLEET, POLICY, in_use=[*used, "stranger", OWN])}
    assert set(used) <= targets
    assert "stranger" not in targets
    assert OWN not in targets


def test_hosts_without_labels_are_all_probed_up_to_a_cap() -> None:
    peers = {f"h{i}": Location() for i in range(1000)}
    targets = choose_targets("h0", Location(), peers, TargetPolicy(unlabelled_hosts=100))
    assert len(targets) == 100
    few = choose_targets("h0", Location(), {f"h{i}": Location() for i in range(8)}, POLICY)
    assert {t.host_id for t in few} == {f"h{i}" for i in range(1, 8)}
    assert {t.labels_class for t in few} == {PathClass.UNKNOWN}


def test_a_zone_without_racks_is_not_taken_for_one_rack() -> None:
    peers = {f"h{i}": Location(zone="z") for i in range(20)}
    assert len(choose_targets("h0", peers["h0"], peers, POLICY)) == 19


def test_other_regions_have_representatives() -> None:
    peers = {f"{r}{i}": Location(r, "b", "z", "k") for r in ("s", "t") for i in range(50)}
    targets = choose_targets("me", Location("r", "b", "z", "k"), peers, POLICY)
    assert Counter(t.host_id[0] for t in targets) == {"s": 8, "t": 8}


def rate(targets: list[int]) -> float:
    return sum(1e9 / interval for interval in targets)


def test_few_targets_are_probed_at_the_interval() -> None:
    targets = choose_targets("h0", Location(), {f"h{i}": Location() for i in range(8)}, POLICY)
    assert all(0.8e9 <= t.interval_ns <= 1.2e9 for t in targets)
    assert len({t.interval_ns for t in targets}) == len(targets)


def test_no_jitter_means_none() -> None:
    targets = choose_targets("a", Location(), {"b": Location(), "c": Location()}, TargetPolicy(jitter=0.0))
    assert [t.interval_ns for t in targets] == [10**9, 10**9]


def test_pressure_slows_down_but_never_stops() -> None:
    rates = [
        rate([t.interval_ns for t in choose_targets(OWN, FLEET[OWN], FLEET, TargetPolicy(interval_s=0.1), pressure=p)])
        for p in range(4)
    ]
    assert rates == pytest.approx([100 * share for share in PRESSURE_SHARES], rel=1e-6)
    assert probe_budget(POLICY, 99) == probe_budget(POLICY, 3) == 10
    assert probe_budget(POLICY, -1) == 100
    assert probe_budget(TargetPolicy(max_probes_per_s=2.0, min_probes_per_s=1.5), 3) == 1.5


def test_paths_to_a_host_share_the_budget() -> None:
    targets = choose_targets(OWN, FLEET[OWN], FLEET, TargetPolicy(interval_s=0.1), paths_per_host=4)
    assert 4 * rate([t.interval_ns for t in targets]) == pytest.approx(100, rel=1e-6)
    with pytest.raises(ValueError, match="paths_per_host"):
        choose_targets(OWN, FLEET[OWN], FLEET, POLICY, paths_per_host=0)


def test_a_large_fleet_costs_few_targets() -> None:
    peers = fleet(5, 8, 40, 16)
    targets = choose_targets("b0z0k0h0", peers["b0z0k0h0"], peers, POLICY)
    assert len(peers) == 25_600
    assert len(targets) == 15 + 39 * 2 + 7 * 4 + 4 * 8


def test_policy_from_configuration() -> None:
    assert TargetPolicy.from_config(parse_config("").probing) == POLICY
    assert TargetPolicy.from_config(parse_config("probing: {interval_s: 250ms, jitter: 0}").probing).interval_s == 0.25


NAMES = st.sampled_from(["", "a", "b"])
PEERS = st.dictionaries(
    st.integers(0, 60).map(lambda i: f"h{i}"), st.builds(Location, NAMES, NAMES, NAMES, NAMES), max_size=40
)
POLICIES = st.builds(
    TargetPolicy,
    st.floats(0.01, 600),
    st.floats(0, 0.5),
    st.floats(0.1, 5),
    st.floats(5, 10_000),
    *[st.integers(1, 8) for _ in range(5)],
)


@given(PEERS, POLICIES, st.builds(Location, NAMES, NAMES, NAMES, NAMES), st.integers(0, 3), st.integers(1, 4))
def test_any_fleet(
    peers: dict[str, Location], policy: TargetPolicy, own: Location, pressure: int, paths_per_host: int
) -> None:
    targets = choose_targets("h0", own, peers, policy, pressure=pressure, paths_per_host=paths_per_host)
    names = [target.host_id for target in targets]
    assert len(set(names)) == len(names)
    assert set(names) <= peers.keys() - {"h0"}
    assert bool(names) == bool(peers.keys() - {"h0"})
    assert paths_per_host * rate([t.interval_ns for t in targets]) <= probe_budget(policy, pressure) * (1 + 1e-9)
    for target in targets:
        assert target.interval_ns >= policy.interval_s * (1 - policy.jitter) * 1e9 - 1
        assert 0 <= target.phase_ns <= target.interval_ns
    distances = [target.labels_class.distance for target in targets]
    assert distances == sorted(distances)
