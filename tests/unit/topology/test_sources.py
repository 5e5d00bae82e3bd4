# SPDX-License-Identifier: Apache-2.0
"""Topology files: each format read right, and each mistake named with file and line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqplbd.config import ConfigError
from dqplbd.topology.location import Location, PathClass, class_from_labels
from dqplbd.topology.sources import HostLocations, detect_format, parse_topology, read_topology

ROOT = Path(__file__).parents[3]

YAML = """\
defaults: {region: eu, building: b1}
hosts:
  node[01-03]: {zone: z1, rack: 7}
  login: {zone: z2, building: b2}
  gpu-*: {zone: z3}
  gpu-1?: {zone: z4}
"""


def test_own_format() -> None:
    found = parse_topology(YAML)
    assert found.locate("node02") == Location("eu", "b1", "z1", "7")
    assert found.locate("login") == Location("eu", "b2", "z2")
    assert found.locate("gpu-17") == Location("eu", "b1", "z3")
    assert found.locate("node02.cluster.example") == found.locate("node02")
    assert found.locate("node04") == Location()
    assert found.locate_all(["node01", "x"]) == {"node01": Location("eu", "b1", "z1", "7"), "x": Location()}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("hosts: {a: {rak: 1}}", 1, "unknown place"),
        ("hosts:\n  a: {rack: [1]}\n", 2, "list"),
        ("hosts:\n  a: 5\n", 2, "no mapping"),
        ("hosts:\n  a: {rack: 1}\n  'n[1': {}\n", 3, "brackets"),
        ("hosts:\n  n[1-2]: {}\n  n2: {}\n", 3, "also in"),
        ("hosts:\n  a: {}\n  a: {}\n", 3, "given before"),
        ("hosts: {}\nhost: {}\n", 2, "unknown key"),
        ("defaults: {}\n", 1, "hosts"),
        ('hosts: {a: {rack: "x\\ny"}}', 1, "cannot be printed"),
        ("hosts: [a", 1, "not YAML"),
    ],
)
def test_mistakes_in_the_own_format(text: str, line: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_topology(text, "t.yaml", "yaml")
    problem = caught.value.problems[0]
    assert (problem.file, problem.line) == ("t.yaml", line)
    assert words in str(problem)
    assert problem.expected


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_topology("hosts:\n  a: {rak: 1}\n  b: 5\n  'c]': {}\n", "t", "yaml")
    assert [problem.line for problem in caught.value.problems] == [2, 3, 4]


KEYVALUE = """\
# made by the provisioning
DEVICE_NAME=host17
DEVICE_BACKEND_NETWORK_TOPOLOGY=pci5/pci5.5D.z088//rtsw191.c088.f00.pci5
DEVICE_RACK_SERIAL=1507842765072
OTHER = "thing"
"""


def test_key_value() -> None:
    found = parse_topology(KEYVALUE)
    assert found.hosts == {"host17": Location(None, "pci5", "pci5.5D.z088", "rtsw191.c088.f00.pci5")}


@pytest.mark.parametrize(
    ("topology", "location"),
    [
        ("/snb1.z081/snb1.z081.u015/", Location(None, "snb1", "snb1.z081", "C15")),
        ("uco1/uco1.z086//", Location(None, "uco1", "uco1.z086", "C15")),
        ("a/z//t", Location(None, "a", "z", "t")),
        ("/z//t", Location(None, None, "z", "t")),
    ],
)
def test_key_value_parts(topology: str, location: Location) -> None:
    text = f"DEVICE_BACKEND_NETWORK_TOPOLOGY='{topology}'\nDEVICE_RACK_SERIAL=C15\n"
    assert parse_topology(text, own_host_id="me").locate("me") == location


def test_key_value_of_several_hosts_and_empty_racks() -> None:
    text = "\n".join(
        f"DEVICE_NAME=h{i}\nDEVICE_BACKEND_NETWORK_TOPOLOGY=d/z//\nDEVICE_RACK_SERIAL=\n" for i in range(2)
    )
    found = parse_topology(text)
    assert set(found.hosts) == {"h0", "h1"}
    # Two empty rack names are not the same rack.
    assert class_from_labels(found.locate("h0"), found.locate("h1")) is PathClass.ZONE


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("DEVICE_NAME=a\nDEVICE_BACKEND_NETWORK_TOPOLOGY=a/b/c\n", 2, "3 parts"),
        ("DEVICE_NAME=a\nDEVICE_BACKEND_NETWORK_TOPOLOGY=a///\n", 2, "empty zone"),
        ("DEVICE_BACKEND_NETWORK_TOPOLOGY=a/b//\n", 1, "no DEVICE_NAME"),
        ("DEVICE_NAME=a\nnonsense\n", 2, "no setting"),
        ("DEVICE_NAME=a\nDEVICE_RACK_SERIAL=1\nDEVICE_RACK_SERIAL=2\n", 3, "given before"),
        ("DEVICE_NAME=a\nDEVICE_RACK_SERIAL=1\nDEVICE_NAME=a\nDEVICE_RACK_SERIAL=1\n", 3, "described before"),
        ("DEVICE_NAME=a\n", None, "neither"),
        ("DEVICE_NAME=a\nDEVICE_RACK_SERIAL=" + "x" * 200, 2, "128"),
    ],
)
def test_mistakes_in_key_value(text: str, line: int | None, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_topology(text, "who", "keyvalue")
    problem = caught.value.problems[0]
    assert (problem.file, problem.line) == ("who", line)
    assert words in str(problem)


TREE = """\
# leaves
SwitchName=leaf1 Nodes=n[1-2] LinkSpeed=100
SwitchName=leaf2 Nodes=n[3-4]
switchname=leaf3 \\
    nodes=n[05-06]
SwitchName=spine1 Switches=leaf[1-2]
SwitchName=spine2 Switches=leaf3   # another zone
SwitchName=core Switches=spine[1-2]
SwitchName=core2 Switches=spine[1-2]
"""


def test_slurm_tree() -> None:
    found = parse_topology(TREE)
    assert found.locate("n1") == Location(None, "core", "spine1", "leaf1")
    classes = [class_from_labels(found.locate("n1"), found.locate(host)) for host in ("n2", "n3", "n05")]
    assert classes == [PathClass.RACK, PathClass.ZONE, PathClass.BUILDING]


def test_slurm_blocks() -> None:
    found = parse_topology("BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n3\nBlockSizes=18,36\n")
    assert found.locate("n2") == Location(rack="b1")
    assert class_from_labels(found.locate("n1"), found.locate("n3")) is PathClass.UNKNOWN


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("SwitchName=a Nodes=n[1\n", 1, "brackets"),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2\n", 2, "described before"),
        ("SwitchName=a\n", 1, "neither nodes nor switches"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Switches=x\n", 2, "not there"),
        ("Nodes=n1\n", 1, "without a name"),
        ("SwitchName=a Nodes=n1 what\n", 1, "not made of settings"),
        ("SwitchName=a Nodes=n1 Nodes=n2\n", 1, "twice"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\n", 2, "each node once"),
        ("SwitchName=a Nodes=n1 Switches=b\nSwitchName=b Switches=a\n", 1, "above itself"),
        ("BlockSizes=18\n", None, "no switch or block"),
    ],
)
def test_mistakes_in_slurm_conf(text: str, line: int | None, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_topology(text, "topology.conf", "slurm_conf")
    problem = caught.value.problems[0]
    assert (problem.file, problem.line) == ("topology.conf", line)
    assert words in str(problem)


SLURM_YAML = """\
---
- topology: first
  tree:
    switches:
      - {switch: s1, nodes: n1}
- topology: second
  cluster_default: true
  tree:
    switches:
      - switch: sw_root
        children: s[1-2]
      - switch: s1
        nodes: n[1-2]
      - switch: s2
        nodes: n[3-4]
- topology: third
  block:
    block_sizes: [2]
    blocks:
      - {block: b1, nodes: "n[1-4]"}
"""


def test_slurm_yaml_takes_the_default_topology() -> None:
    found = parse_topology(SLURM_YAML)
    assert found.locate("n3") == Location(None, None, "sw_root", "s2")
    without = parse_topology(SLURM_YAML.replace("cluster_default: true", "cluster_default: false"))
    assert set(without.hosts) == {"n1"}


def test_slurm_yaml_by_name() -> None:
    from dqplbd.topology.sources.slurm import parse_yaml

    assert parse_yaml(SLURM_YAML, name="third").locate("n4") == Location(rack="b1")
    with pytest.raises(ConfigError, match="'first', 'second', 'third'"):
        parse_yaml(SLURM_YAML, name="fourth")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\n", 1, "list of topologies"),
        ("- topology: x\n", 1, "neither tree nor block"),
        ("- topology: x\n  tree: 5\n", 2, "no list 'switches'"),
        ("- topology: x\n  tree:\n    switches:\n      - {nodes: a}\n", 4, "no name 'switch'"),
        ("- topology: x\n  tree:\n    switches:\n      - {switch: s, nodes: 'a['}\n", 4, "brackets"),
        ("- topology: x\n  tree:\n    switches:\n      - {switch: s, nodes: [a]}\n", 4, "host list"),
    ],
)
def test_mistakes_in_slurm_yaml(text: str, line: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_topology(text, "topology.yaml", "slurm_yaml")
    problem = caught.value.problems[0]
    assert (problem.file, problem.line) == ("topology.yaml", line)
    assert words in str(problem)


@pytest.mark.parametrize(
    ("text", "expected"), [(YAML, "yaml"), (KEYVALUE, "keyvalue"), (TREE, "slurm_conf"), (SLURM_YAML, "slurm_yaml")]
)
def test_formats_are_told_apart(text: str, expected: str) -> None:
    assert detect_format(text, "f") == expected


@pytest.mark.parametrize("text", ["", "# only a remark\n", "word\n"])
def test_a_file_of_no_known_format(text: str) -> None:
    with pytest.raises(ConfigError, match="topology_format"):
        parse_topology(text, "f")


def test_the_example_file() -> None:
    found = read_topology(ROOT / "configs" / "topology.yaml")
    assert class_from_labels(found.locate("node001"), found.locate("node016")) is PathClass.RACK
    assert class_from_labels(found.locate("node001"), found.locate("archive1")) is PathClass.REGION


@given(st.text(max_size=150), st.sampled_from(["auto", "yaml", "keyvalue", "slurm_conf", "slurm_yaml"]))
def test_any_text_gives_locations_or_a_config_error(text: str, kind: str) -> None:
    try:
        found = parse_topology(text, "f", kind, "me")  # type: ignore[arg-type]
    except ConfigError:
        return
    assert isinstance(found, HostLocations)


@given(
    st.lists(
        st.sampled_from(["SwitchName=", "a", "b", " Nodes=", "n[1-2]", " Switches=", "\n", "#", "BlockName=", "\\\n"])
    ),
)
def test_any_slurm_words_give_locations_or_a_config_error(words: list[str]) -> None:
    try:
        found = parse_topology("".join(words), "f", "slurm_conf")
    except ConfigError:
        return
    assert found.hosts
