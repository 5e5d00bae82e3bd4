# SPDX-License-Identifier: Apache-2.0
"""Places: what is unknown is never equal, and names within different places are different."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqplbd.topology.location import Location, PathClass, class_from_labels, merge_locations

NAMES = st.sampled_from([None, "", "a", "b", "c"])
LOCATIONS = st.builds(Location, NAMES, NAMES, NAMES, NAMES)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (Location("r", "b", "z", "k"), Location("r", "b", "z", "k"), PathClass.RACK),
        (Location("r", "b", "z", "k"), Location("r", "b", "z", "l"), PathClass.ZONE),
        (Location("r", "b", "z", "k"), Location("r", "b", "y", "k"), PathClass.BUILDING),
        (Location("r", "b", "z", "k"), Location("r", "c", "z", "k"), PathClass.REGION),
        (Location("r", "b", "z", "k"), Location("s", "b", "z", "k"), PathClass.UNKNOWN),
        (Location(rack="k"), Location(rack="k"), PathClass.RACK),
        (Location(rack="k"), Location(rack="l"), PathClass.UNKNOWN),
        (Location(zone="z"), Location(zone="z"), PathClass.ZONE),
        (Location(zone="z", rack="k"), Location(zone="y", rack="k"), PathClass.UNKNOWN),
        (Location(region="r", zone="z"), Location(region="r", zone="y"), PathClass.REGION),
        (Location(building="b"), Location(building="c"), PathClass.REGION),
        (Location(region="r", building="b"), Location(building="c"), PathClass.REGION),
        (Location(region="r", building="b"), Location(region="s", building="c"), PathClass.UNKNOWN),
        (Location(), Location(), PathClass.UNKNOWN),
        (Location("", "", "", ""), Location("", "", "", ""), PathClass.UNKNOWN),
        (Location("r", "b", "z", ""), Location("r", "b", "z", ""), PathClass.ZONE),
        (Location("r", "b", "", "k"), Location("r", "b", "", "k"), PathClass.RACK),
    ],
)
def test_the_nearest_shared_place(a: Location, b: Location, expected: PathClass) -> None:
    assert class_from_labels(a, b) is expected


@given(LOCATIONS, LOCATIONS)
def test_both_ends_see_the_same_class(a: Location, b: Location) -> None:
    assert class_from_labels(a, b) is class_from_labels(b, a)


@given(LOCATIONS, LOCATIONS)
def test_a_class_says_that_its_place_is_shared(a: Location, b: Location) -> None:
    found = class_from_labels(a, b)
    assert found is not PathClass.HOST
    if found in (PathClass.RACK, PathClass.ZONE, PathClass.BUILDING):
        name = getattr(a, found.value)
        assert name
        assert name == getattr(b, found.value)


@given(LOCATIONS, LOCATIONS, st.sampled_from(["region", "building", "zone", "rack"]))
def test_forgetting_a_name_never_makes_hosts_nearer(a: Location, b: Location, level: str) -> None:
    less = Location(**(a.as_dict() | {level: ""}))
    before, after = class_from_labels(a, b), class_from_labels(less, b)
    if getattr(a, level) == getattr(b, level):
        assert after.distance >= before.distance


def test_blanks_and_empty_names() -> None:
    assert Location(rack="  k ").rack == "k"
    assert Location(rack="  ").rack is None
    assert not Location("", " ").known
    assert str(Location("r", None, "z")) == "r/-/z/-"
    assert Location("r", None, "z").as_dict() == {"region": "r", "zone": "z"}


@pytest.mark.parametrize("name", ["x" * 129, "a\nb", "a\x00", 12])
def test_names_that_are_refused(name: object) -> None:
    with pytest.raises(ValueError, match="rack"):
        Location(rack=name)  # type: ignore[arg-type]


@given(LOCATIONS, LOCATIONS)
def test_merging_keeps_the_first(a: Location, b: Location) -> None:
    merged = merge_locations(a, b)
    for level in ("region", "building", "zone", "rack"):
        first, second = getattr(a, level), getattr(b, level)
        assert getattr(merged, level) == (first if first is not None else second)
    assert merge_locations(Location(), a) == merge_locations(a, Location()) == a


def test_distances_rise() -> None:
    assert [path_class.distance for path_class in PathClass] == [0, 1, 2, 3, 4, 5]
