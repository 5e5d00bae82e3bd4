# SPDX-License-Identifier: Apache-2.0
"""Topology files: one reader a format, all with the same result.

=============  ==========================================================================
format         file
=============  ==========================================================================
``yaml``       the project's own, see :mod:`dqplbd.topology.sources.yaml_map`
``keyvalue``   ``KEY=VALUE``, see :mod:`dqplbd.topology.sources.keyvalue`
``slurm_conf`` Slurm's ``topology.conf``, see :mod:`dqplbd.topology.sources.slurm`
``slurm_yaml`` Slurm's ``topology.yaml``, likewise
=============  ==========================================================================
"""

from pathlib import Path
from typing import Literal

from dqplbd.config.loader import read_text
from dqplbd.topology.sources import keyvalue, slurm, yaml_map
from dqplbd.topology.sources.base import HostLocations, topology_error

__all__ = ["Format", "HostLocations", "detect_format", "parse_topology", "read_topology"]

Format = Literal["auto", "yaml", "keyvalue", "slurm_conf", "slurm_yaml"]


def detect_format(text: str, file: str) -> Format:
    """The format of a file, by its first line with content.

    :raises ConfigError: when it fits none.
    """
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line.startswith(("#", "---", "%")):
            continue
        lowered = line.lower().replace(" ", "")
        if lowered.startswith(("switchname=", "blockname=", "blocksizes=")):
            return "slurm_conf"
        if line.startswith(("-", "[")):
            return "slurm_yaml"
        if "=" in line and ":" not in line.split("=", 1)[0]:
            return "keyvalue"
        if ":" in line or line.startswith("{"):
            return "yaml"
        break
    raise topology_error(
        file,
        None,
        "the format of the file cannot be told",
        "one of yaml, keyvalue, slurm_conf, slurm_yaml",
        "set classification.topology_format",
    )


def parse_topology(text: str, file: str = "<text>", format: Format = "auto", own_host_id: str = "") -> HostLocations:
    """Locations from the text of a topology file.

    :param file: what to call it in problems.
    :param format: how to read it; ``auto`` tells by the first line.
    :param own_host_id: the host that a ``keyvalue`` file without a name describes.
    :raises ConfigError: with what is wrong, naming file and line.
    """
    if format == "auto":
        format = detect_format(text, file)
    if format == "keyvalue":
        return keyvalue.parse(text, file, own_host_id)
    if format == "slurm_conf":
        return slurm.parse_conf(text, file)
    if format == "slurm_yaml":
        return slurm.parse_yaml(text, file)
    return yaml_map.parse(text, file)


def read_topology(path: str | Path, format: Format = "auto", own_host_id: str = "") -> HostLocations:
    """Locations from a topology file.  :raises ConfigError: it cannot be read, or with what is wrong in it."""
    return parse_topology(read_text(path), str(path), format, own_host_id)
