# SPDX-License-Identifier: Apache-2.0
"""Readers of Slurm's ``topology.conf`` and ``topology.yaml``.

Formats: https://slurm.schedmd.com/topology.conf.html and https://slurm.schedmd.com/topology.yaml.html.  In the first::

    SwitchName=leaf1 Nodes=n[1-16]              # tree: switches with nodes ...
    SwitchName=spine1 Switches=leaf[1-4]        # ... and switches of switches
    BlockName=block1 Nodes=n[1-18]              # block

A switch with nodes, or a block, is a rack; the switch above it a zone, the one above that a building, then a region.
Levels beyond are passed over, as are other settings (``LinkSpeed``, ``BlockSizes``).  Of several switches above one,
which stand for parallel ways to the same place, the first in the file gives the place its name.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Final

from dqplbd.config.document import DocumentError, parse_document
from dqplbd.topology.hostlist import HostlistError, expand_hostlist
from dqplbd.topology.location import Location
from dqplbd.topology.sources.base import HostLocations, topology_error

__all__ = ["parse_conf", "parse_yaml"]

_SETTING: Final = re.compile(r"(?P<key>[A-Za-z]+)\s*=\s*(?P<value>\"[^\"]*\"|\S+)", re.ASCII)


@dataclass(slots=True)
class _Unit:
    """A switch or a block: what is directly below it."""

    name: str
    line: int | None
    nodes: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)


def _hosts(text: str, file: str, line: int | None) -> list[str]:
    try:
        return expand_hostlist(text)
    except HostlistError as error:
        raise topology_error(file, line, str(error), "a host list such as n[1-16]") from None


def _locate(units: dict[str, _Unit], file: str) -> HostLocations:
    """Locations from units, by walking from each unit that has nodes up to the top."""
    parents: dict[str, str] = {}
    for unit in units.values():
        for child in unit.children:
            if child not in units:
                raise topology_error(
                    file,
                    unit.line,
                    f"switch {unit.name!r} names switch {child!r}, which is not there",
                    "a switch that is",
                )
            parents.setdefault(child, unit.name)
    result = HostLocations()
    for unit in units.values():
        if not unit.nodes:
            continue
        chain = [unit.name]
        while chain[-1] in parents:
            above = parents[chain[-1]]
            if above in chain:
                raise topology_error(file, unit.line, f"switch {above!r} is above itself", "a tree")
            chain.append(above)
        rack, zone, building, region = (chain + [""] * 4)[:4]
        try:
            location = Location(region, building, zone, rack)
        except ValueError as error:
            raise topology_error(file, unit.line, str(error), "short printable names") from None
        for host in unit.nodes:
            other = result.hosts.get(host)
            if other is not None and other != location:
                raise topology_error(
                    file, unit.line, f"node {host!r} is in {other.rack!r} and {unit.name!r}", "each node once"
                )
            result.hosts[host] = location
    if not result.hosts:
        raise topology_error(file, None, "no switch or block has nodes", "lines with Nodes=<host list>")
    return result


def _add(units: dict[str, _Unit], unit: _Unit, file: str) -> None:
    if unit.name in units:
        raise topology_error(file, unit.line, f"{unit.name!r} was described before", "each switch and block once")
    if not unit.nodes and not unit.children:
        raise topology_error(file, unit.line, f"{unit.name!r} has neither nodes nor switches", "one of them")
    units[unit.name] = unit


def parse_conf(text: str, file: str = "<text>") -> HostLocations:
    """Locations from the text of a ``topology.conf``.

    :raises ConfigError: naming the file and line.
    """
    units: dict[str, _Unit] = {}
    joined, start = "", 0
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        line = raw.split("#", 1)[0].rstrip()
        start = start or number
        if line.endswith("\\"):  # goes on in the next line
            joined += line[:-1] + " "
            continue
        line, first = (joined + line).strip(), start
        joined, start = "", 0
        if not line:
            continue
        if _SETTING.sub("", line).strip():
            raise topology_error(file, first, f"{line[:60]!r} is not made of settings", "Key=Value Key=Value ...")
        settings: dict[str, str] = {}
        for match in _SETTING.finditer(line):
            key = match["key"].lower()
            if key in settings:
                raise topology_error(file, first, f"{match['key']} is given twice", "each key once a line")
            settings[key] = match["value"].strip('"')
        name = settings.get("switchname") or settings.get("blockname")
        if name is None:
            if settings.keys() & {"nodes", "switches"}:
                raise topology_error(file, first, "nodes without a name above", "SwitchName= or BlockName= on the line")
            continue
        nodes = _hosts(settings.get("nodes", ""), file, first)
        children = _hosts(settings.get("switches", ""), file, first)
        _add(units, _Unit(name, first, nodes, children), file)
    return _locate(units, file)


def parse_yaml(text: str, file: str = "<text>", name: str | None = None) -> HostLocations:
    """Locations from the text of a ``topology.yaml``.

    :param name: which of its topologies; None takes the one marked ``cluster_default``, else the first.
    :raises ConfigError: naming the file and line.
    """
    try:
        document = parse_document(text)
    except DocumentError as error:
        raise topology_error(file, error.line, error.problem, error.expected, error.action) from None
    data = document.data

    def fault(path: tuple[str | int, ...], what: str, expected: str) -> Exception:
        return topology_error(file, document.line_of(path), what, expected, key=".".join(map(str, path)))

    if not isinstance(data, list) or not data or not all(isinstance(item, dict) for item in data):
        raise fault((), "not a list of topologies", "items such as '- topology: fabric' with tree or block")
    chosen: int | None = None
    for index, item in enumerate(data):
        if name is not None:
            if item.get("topology") == name:
                chosen = index
        elif item.get("cluster_default") is True and chosen is None:
            chosen = index
    if chosen is None:
        if name is not None:
            names = ", ".join(repr(item.get("topology")) for item in data)
            raise fault((), f"there is no topology {name!r}", f"one of {names}")
        chosen = 0
    topology: dict[str, Any] = data[chosen]
    units: dict[str, _Unit] = {}
    for kind, items_key, name_key in (("tree", "switches", "switch"), ("block", "blocks", "block")):
        section = topology.get(kind)
        if section is None:
            continue
        path: tuple[str | int, ...] = (chosen, kind, items_key)
        items = section.get(items_key) if isinstance(section, dict) else None
        if not isinstance(items, list):
            raise fault((chosen, kind), f"no list {items_key!r}", f"{kind}: {{{items_key}: [...]}}")
        for index, item in enumerate(items):
            here = (*path, index)
            if not isinstance(item, dict) or not isinstance(item.get(name_key), str | int):
                raise fault(here, f"no name {name_key!r}", f"{{{name_key}: NAME, nodes: HOSTLIST}}")
            texts = {key: item.get(key, "") for key in ("nodes", "children")}
            for key, value in texts.items():
                if not isinstance(value, str):
                    raise fault((*here, key), f"{value!r} is {type(value).__name__}", "a host list in quotes")
            line = document.line_of(here)
            unit = _Unit(
                str(item[name_key]), line, _hosts(texts["nodes"], file, line), _hosts(texts["children"], file, line)
            )
            _add(units, unit, file)
    if not units:
        raise fault(
            (chosen,), "neither tree nor block with entries", "tree: {switches: [...]} or block: {blocks: [...]}"
        )
    return _locate(units, file)
