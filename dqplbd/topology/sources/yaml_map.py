# SPDX-License-Identifier: Apache-2.0
"""Reader of the project's own topology format, YAML.

::

    defaults: {region: eu-1, building: b1}     # for hosts that do not say otherwise; may be left out
    hosts:
      node[001-016]: {zone: z1, rack: r01}     # a host list in brackets
      login1: {zone: z1}
      gpu-*: {zone: z2}                        # a shell pattern, asked when no name or list has the host

A host that is named twice is an error.
"""

from typing import Any, Final

from dqplbd.config.document import Document, DocumentError, KeyPath, parse_document
from dqplbd.config.loader import ConfigError, Problem
from dqplbd.topology.hostlist import HostlistError, expand_hostlist
from dqplbd.topology.location import LEVELS, Location, merge_locations
from dqplbd.topology.sources.base import HostLocations

__all__ = ["parse"]

# Each host written out, with four places, for the largest fleets.
MAX_VALUES: Final = 4_000_000


class _Reader:
    """One file being read; problems are gathered, so that all are reported at once."""

    def __init__(self, document: Document, file: str) -> None:
        self._document = document
        self._file = file
        self.problems: list[Problem] = []

    def fault(self, path: KeyPath, what: str, expected: str, action: str = "") -> None:
        key = ".".join(map(str, path))
        self.problems.append(Problem(self._file, self._document.line_of(path), key, None, what, expected, action))

    def location(self, data: Any, path: KeyPath) -> Location:
        if not isinstance(data, dict):
            self.fault(path, f"{data!r} is no mapping", "places such as {zone: z1, rack: r01}")
            return Location()
        places: dict[str, str] = {}
        for key, value in data.items():
            if key not in LEVELS:
                self.fault((*path, key), "unknown place", f"one of {', '.join(LEVELS)}", "correct or remove it")
            elif isinstance(value, int) and not isinstance(value, bool):
                places[key] = str(value)
            elif value is None or isinstance(value, str):
                places[key] = value or ""
            else:
                self.fault((*path, key), f"{value!r} is {type(value).__name__}", "a text", "put it in quotes")
        try:
            return Location(**places)
        except ValueError as error:
            self.fault(path, str(error), "short printable names")
            return Location()


def parse(text: str, file: str = "<text>") -> HostLocations:
    """Locations from the text of a file.

    :raises ConfigError: with every problem of the text.
    """
    try:
        document = parse_document(text, max_values=MAX_VALUES)
    except DocumentError as error:
        key = ".".join(map(str, error.path))
        raise ConfigError([Problem(file, error.line, key, None, error.problem, error.expected, error.action)]) from None
    reader = _Reader(document, file)
    data = document.data
    result = HostLocations()
    if not isinstance(data, dict) or not isinstance(data.get("hosts"), dict):
        reader.fault((), "there is no mapping 'hosts'", "hosts: {name: {zone: ..., rack: ...}}", "see the example file")
        raise ConfigError(reader.problems)
    for key in data:
        if key not in ("defaults", "hosts"):
            reader.fault((key,), "unknown key", "defaults or hosts", "correct or remove it")
    given = data.get("defaults")
    defaults = Location() if given is None else reader.location(given, ("defaults",))
    named_by: dict[str, str] = {}
    for name, places in data["hosts"].items():
        path = ("hosts", name)
        location = merge_locations(reader.location(places, path), defaults)
        if any(char in name for char in "*?"):
            result.patterns.append((name, location))
            continue
        try:
            hosts = expand_hostlist(name)
        except HostlistError as error:
            reader.fault(path, str(error), "a host name, a list such as node[001-016], or a pattern such as gpu-*")
            continue
        if not hosts:
            reader.fault(path, "an empty name", "a host name, a list or a pattern")
        for host in hosts:
            if host in named_by:
                reader.fault(path, f"host {host!r} is also in {named_by[host]!r}", "each host once", "remove one")
                break
            named_by[host] = name
            result.hosts[host] = location
    if reader.problems:
        raise ConfigError(reader.problems)
    return result
