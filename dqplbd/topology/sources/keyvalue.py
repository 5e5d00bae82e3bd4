# SPDX-License-Identifier: Apache-2.0
"""Reader of ``KEY=VALUE`` topology files, as collective libraries of Meta's stack read them (``/etc/fbwhoami``).

Format (torchcomms, ``comms/ctran/commstate/Topology.cc``): one setting a line; these count, others are passed over::

    DEVICE_NAME=host17                                                  # else this host
    DEVICE_BACKEND_NETWORK_TOPOLOGY=dc/zone/scaling_unit/tor            # exactly four parts, zone not empty
    DEVICE_RACK_SERIAL=C1507842765072                                   # a text, also where it looks like a number

``dc`` becomes the building, ``zone`` the zone, and the rack is the top-of-rack switch ``tor``, or the rack serial where
the fabric has none (rail-based).  An empty ``dc`` is the part of the zone before the first dot.  The format describes
one host; a file may describe several, each beginning with its ``DEVICE_NAME``.
"""

import re
from typing import Final

from dqplbd.topology.location import Location
from dqplbd.topology.sources.base import HostLocations, topology_error

__all__ = ["parse"]

_LINE: Final = re.compile(r"(?:export\s+)?(?P<key>[A-Za-z_][A-Za-z0-9_]*)\s*=\s*(?P<value>.*)", re.ASCII)
_NAME: Final = "DEVICE_NAME"
_TOPOLOGY: Final = "DEVICE_BACKEND_NETWORK_TOPOLOGY"
_RACK: Final = "DEVICE_RACK_SERIAL"


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
        return value[1:-1]
    return value


def _location(record: dict[str, tuple[str, int]], file: str) -> Location:
    topology, line = record.get(_TOPOLOGY, ("", 0))
    serial, serial_line = record.get(_RACK, ("", 0))
    building = zone = rack = ""
    if topology:
        parts = [part.strip() for part in topology.split("/")]
        if len(parts) != 4:
            raise topology_error(
                file, line, f"{topology!r} has {len(parts)} parts", "four: dc/zone/scaling_unit/tor", key=_TOPOLOGY
            )
        building, zone, _, rack = parts
        if not zone:
            raise topology_error(file, line, f"{topology!r} has an empty zone", "a zone as second part", key=_TOPOLOGY)
        if not building and "." in zone:
            building = zone.split(".", 1)[0]
    try:
        return Location(None, building, zone, rack or serial)
    except ValueError as error:
        raise topology_error(file, line or serial_line, str(error), "short printable names") from None


def parse(text: str, file: str = "<text>", own_host_id: str = "") -> HostLocations:
    """Locations from the text of a file.

    :param own_host_id: the host that a record without DEVICE_NAME describes.
    :raises ConfigError: naming the file and line.
    """
    records: list[dict[str, tuple[str, int]]] = [{}]
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise topology_error(
                file, number, f"{line[:60]!r} is no setting", "KEY=VALUE", "correct or remove the line"
            )
        key, value = match["key"], _unquoted(match["value"].strip())
        if key not in (_NAME, _TOPOLOGY, _RACK):
            continue
        if key == _NAME and _NAME in records[-1]:
            records.append({})
        if key in records[-1]:
            raise topology_error(
                file, number, f"{key} was given before, on line {records[-1][key][1]}", "each key once a host", key=key
            )
        records[-1][key] = (value, number)

    result = HostLocations()
    for record in records:
        if not record.keys() & {_TOPOLOGY, _RACK}:
            continue
        name, at = record.get(_NAME, ("", min(place[1] for place in record.values())))
        host = name or own_host_id
        if not host:
            raise topology_error(file, at, f"there is no {_NAME}", f"{_NAME}=<host_id>", "add the line")
        if host in result.hosts:
            raise topology_error(file, at, f"host {host!r} was described before", "each host once", "remove one")
        result.hosts[host] = _location(record, file)
    if not result.hosts:
        raise topology_error(
            file, None, f"neither {_TOPOLOGY} nor {_RACK} is set", f"{_TOPOLOGY}=dc/zone/scaling_unit/tor"
        )
    return result
