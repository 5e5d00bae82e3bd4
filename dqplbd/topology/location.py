# SPDX-License-Identifier: Apache-2.0
"""Places and path classes.  Pure.

A location names up to four nested places, from the outside in: region, building, zone, rack.  A name that is not known
is ``None``; unknown is never equal to anything, not even to another unknown, because two hosts whose labels failed to
load must not be taken for neighbours.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = ["LEVELS", "UNKNOWN_LOCATION", "Location", "PathClass", "class_from_labels", "merge_locations"]

MAX_NAME: Final = 128
LEVELS: Final = ("region", "building", "zone", "rack")


class PathClass(StrEnum):
    """The nearest place that both ends of a path share, nearest first; ``unknown`` when that cannot be said."""

    HOST = "host"
    RACK = "rack"
    ZONE = "zone"
    BUILDING = "building"
    REGION = "region"
    UNKNOWN = "unknown"

    @property
    def distance(self) -> int:
        """0 for ``host`` up to 4 for ``region``; 5 for ``unknown``, so that it sorts last."""
        return _DISTANCE[self]


_DISTANCE: Final[dict[PathClass, int]] = {path_class: i for i, path_class in enumerate(PathClass)}


@dataclass(frozen=True, slots=True)
class Location:
    """Where a host is.

    :ivar region: the outermost place; None when unknown, as for all four.
    :ivar building: a building, data centre or campus part of the region.
    :ivar zone: a failure or network zone of the building.
    :ivar rack: a rack, or the hosts behind one first-tier switch.

    Empty text and surrounding blanks become None or are removed.

    :raises ValueError: a name of more than 128 characters or with a control character in it.  Over-long names are
        refused rather than cut, since two cut names could become equal.
    """

    region: str | None = None
    building: str | None = None
    zone: str | None = None
    rack: str | None = None

    def __post_init__(self) -> None:
        for level in LEVELS:
            name = getattr(self, level)
            if name is None:
                continue
            if not isinstance(name, str):
                raise ValueError(f"{level} {name!r} is {type(name).__name__}; expected a text (put it in quotes)")
            stripped = name.strip()
            if len(stripped) > MAX_NAME:
                raise ValueError(f"{level} {stripped[:32]!r}... has {len(stripped)} characters; expected <= {MAX_NAME}")
            if not stripped.isprintable():
                raise ValueError(f"{level} {stripped!r} has a character that cannot be printed; remove it")
            object.__setattr__(self, level, stripped or None)

    @property
    def known(self) -> bool:
        """Whether at least one place is known."""
        return any(getattr(self, level) is not None for level in LEVELS)

    def as_dict(self) -> dict[str, str]:
        """The known places, outermost first."""
        return {level: name for level in LEVELS if (name := getattr(self, level)) is not None}

    def __str__(self) -> str:
        """The four places with slashes between, ``-`` for an unknown one: ``eu-1/b2/z088/r17``."""
        return "/".join(getattr(self, level) or "-" for level in LEVELS)


UNKNOWN_LOCATION: Final = Location()


def merge_locations(first: Location, second: Location) -> Location:
    """Take each place from ``first`` where it is known there, else from ``second``."""
    return Location(*(getattr(first, level) or getattr(second, level) for level in LEVELS))


def class_from_labels(a: Location, b: Location) -> PathClass:
    """The path class of two hosts by their labels alone; never ``host``, since a location does not name a host.

    The places are compared from the outside in.  A place that both name alike is shared.  A place that they name
    differently ends the comparison: what lies within cannot be shared, whatever it is called (rack ``r1`` of zone
    ``z1`` is not rack ``r1`` of zone ``z2``).  A place that one of them does not name says nothing.  The class is the
    innermost place found to be shared.

    Where no place is known to be shared, the class is ``unknown``, with one exception: two different buildings whose
    regions are not known to differ are ``region``, as sites with one region rarely write it down and no class is
    farther.
    """
    shared = PathClass.UNKNOWN
    region_a, region_b = a.region, b.region
    if region_a is not None and region_b is not None:
        if region_a != region_b:
            return shared
        shared = PathClass.REGION
    building_a, building_b = a.building, b.building
    if building_a is not None and building_b is not None:
        if building_a != building_b:
            return PathClass.REGION
        shared = PathClass.BUILDING
    zone_a, zone_b = a.zone, b.zone
    if zone_a is not None and zone_b is not None:
        if zone_a != zone_b:
            return shared
        shared = PathClass.ZONE
    rack_a, rack_b = a.rack, b.rack
    if rack_a is not None and rack_a == rack_b:
        return PathClass.RACK
    return shared
