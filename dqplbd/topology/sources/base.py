# SPDX-License-Identifier: Apache-2.0
"""What every reader of a topology file gives: locations by host; and how it says what is wrong with the file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from dqplbd.config.loader import ConfigError, Problem
from dqplbd.topology.location import UNKNOWN_LOCATION, Location

__all__ = ["HostLocations", "topology_error"]


@dataclass(slots=True)
class HostLocations:
    """Locations of hosts.

    :ivar hosts: by exact host_id.
    :ivar patterns: by shell pattern (``gpu-*``), in the order of the file; asked when there is no exact entry.
    """

    hosts: dict[str, Location] = field(default_factory=dict)
    patterns: list[tuple[str, Location]] = field(default_factory=list)

    def locate(self, host_id: str) -> Location:
        """Where a host is; everything unknown when the file does not say.

        Asked in this order: the exact name; the name without its domain, if it has one; the first pattern that fits.
        """
        found = self.hosts.get(host_id)
        if found is None and "." in host_id:
            found = self.hosts.get(host_id.split(".", 1)[0])
        if found is not None:
            return found
        for pattern, location in self.patterns:
            if fnmatchcase(host_id, pattern):
                return location
        return UNKNOWN_LOCATION

    def locate_all(self, host_ids: Mapping[str, object] | list[str]) -> dict[str, Location]:
        """:meth:`locate` for many hosts."""
        return {host_id: self.locate(host_id) for host_id in host_ids}


def topology_error(
    file: str, line: int | None, what: str, expected: str, action: str = "", *, key: str = "", value: str | None = None
) -> ConfigError:
    """The exception for one problem of a topology file."""
    return ConfigError([Problem(file, line, key, value, what, expected, action)])
