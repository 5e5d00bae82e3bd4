# SPDX-License-Identifier: Apache-2.0
"""Where the hosts of the laboratory stand, and what follows for the paths between them.  Pure.

The round trip times are those published for the fabric that DQPLB was made for: 8 us within a rack, and 7, 15 and 30
times as much between racks, zones and buildings.
"""

from dataclasses import dataclass
from typing import Final

from dqplbd.topology.location import Location, PathClass, class_from_labels

__all__ = ["RTT_NS", "Layout", "one_way_ns"]

RTT_NS: Final = {
    PathClass.RACK: 8_000,
    PathClass.ZONE: 56_000,
    PathClass.BUILDING: 120_000,
    PathClass.REGION: 240_000,
}

# Building and zone of each rack.
_EVEN: Final = ((1, 1), (1, 1), (1, 2), (1, 2), (2, 3), (2, 3), (2, 4), (2, 4))
_FEW: Final = ((1, 1), (1, 1), (1, 2), (2, 3), (2, 3), (2, 4), (2, 4))


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each host stands, by its number."""

    places: tuple[Location, ...]

    @classmethod
    def even(cls, hosts: int) -> "Layout":
        """Two buildings of two zones of two racks each; with less than 16 hosts less racks, of at least two hosts.

        :param hosts: 8..32, over the racks in order; there are paths of all classes.
        """
        racks = min(8, hosts // 2)
        stands = _EVEN if racks == 8 else _FEW
        places = []
        for host in range(hosts):
            rack = host * racks // hosts
            building, zone = stands[rack]
            places.append(Location("lab", f"b{building}", f"z{zone}", f"r{rack + 1}"))
        return cls(tuple(places))

    @classmethod
    def apart(cls, senders: int, path_class: PathClass) -> "Layout":
        """Host 0, and ``senders`` others in one rack, all in that class from it: the stage of an incast."""
        far = {
            PathClass.RACK: Location("lab", "b1", "z1", "r1"),
            PathClass.ZONE: Location("lab", "b1", "z1", "r2"),
            PathClass.BUILDING: Location("lab", "b1", "z2", "r2"),
            PathClass.REGION: Location("lab", "b2", "z2", "r2"),
        }[path_class]
        return cls((Location("lab", "b1", "z1", "r1"), *[far] * senders))

    def __len__(self) -> int:
        return len(self.places)

    def path_class(self, a: int, b: int) -> PathClass:
        """Class of the path between two hosts."""
        return class_from_labels(self.places[a], self.places[b])


def one_way_ns(layout: Layout, a: int, b: int) -> int:
    """What a packet from one host to another is delayed."""
    return RTT_NS[layout.path_class(a, b)] // 2
