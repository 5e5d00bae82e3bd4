# SPDX-License-Identifier: Apache-2.0
"""The parts of the demonstration and of the benchmark that are arithmetic."""

import importlib.util
import json
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from dqplbd import demo
from dqplbd.config import parse_config
from dqplbd.lab.cluster import HostSpec, merge
from dqplbd.topology.location import PathClass

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """tests/bench/run.py, which is a program and no part of a package."""
    spec = importlib.util.spec_from_file_location("bench_run", ROOT / "tests/bench/run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_run"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_the_hosts_cover_every_class_in_two_buildings() -> None:
    assert len(demo.PLACES) >= 8
    assert len({place.building for place in demo.PLACES.values()}) == 2
    assert len({place.zone for place in demo.PLACES.values()}) >= 3
    assert len({place.rack for place in demo.PLACES.values()}) >= 5
    seen = {demo.true_class(demo.SOURCE, other) for other in demo.PLACES if other != demo.SOURCE}
    assert seen == set(demo.RTT_NS)
    assert demo.true_class(demo.SOURCE, demo.TARGETS["near"]) is PathClass.RACK
    assert demo.true_class(demo.SOURCE, demo.TARGETS["far"]) is PathClass.REGION


def test_times_are_in_the_promised_ratio_and_thresholds_lie_between() -> None:
    rtts = list(demo.RTT_NS.values())
    assert [rtt / rtts[0] for rtt in rtts] == [1, 7, 15, 30]
    for (nearer, farther), threshold in zip(pairwise(rtts), demo.THRESHOLDS.values(), strict=True):
        assert threshold / nearer == pytest.approx(farther / threshold, rel=1e-6)


@pytest.mark.parametrize("spec", demo.specs(), ids=lambda spec: spec.host_id)
def test_configurations_are_good_and_tell_no_place(spec: HostSpec) -> None:
    raw = merge(demo.common_config(), spec.overrides)
    config = parse_config(json.dumps({**raw, "host": {"host_id": spec.host_id}}))
    assert not config.host.location.as_location().known
    assert config.classification.topology_file is None
    for other in demo.PLACES:
        if other == spec.host_id:
            continue
        link = config.emulation.link_for(other)
        assert link is not None
        assert 2 * link.delay_ns == demo.RTT_NS[demo.true_class(spec.host_id, other)]
        assert link.rate_bps == demo.RATE_BPS
    pinned = {"profiles": {"classes": {path_class.value: demo.STATIC for path_class in PathClass}}}
    static = parse_config(json.dumps(merge(raw, pinned))).profiles.classes.rack
    assert static is not None
    assert static.qps is not None
    assert static.outstanding_per_qp is not None
    assert static.segment_bytes is not None
    assert static.window_bytes == static.qps * static.outstanding_per_qp * static.segment_bytes == 2**30


def test_the_file_is_of_the_size_and_not_trivial(tmp_path: Path) -> None:
    target = tmp_path / "file"
    demo.make_file(target, 3 * demo.MIB + 17)
    content = target.read_bytes()
    assert len(content) == 3 * demo.MIB + 17
    blocks = {content[i : i + 4096] for i in range(0, len(content), 4096)}
    assert len(blocks) == -(-len(content) // 4096)


def test_rows_are_written_whole(tmp_path: Path) -> None:
    target = tmp_path / "build" / "demo.json"
    demo.write_rows([demo.row("a", 1, "x", 2, 0.5, True)], target)
    assert json.loads(target.read_text()) == [
        {"name": "a", "value": 1, "unit": "x", "reference": 2, "ratio": 0.5, "target": 0.5, "met": True}
    ]
    assert [path.name for path in target.parent.iterdir()] == ["demo.json"]


@pytest.mark.parametrize(
    ("value", "reference", "target", "better", "of", "valid", "ratio", "met"),
    [
        (80, 100, 0.8, "high", "ratio", True, 0.8, True),
        (79, 100, 0.8, "high", "ratio", True, 0.79, False),
        (20, 6, 3.5, "low", "ratio", True, 3.3333, True),
        (22, 6, 3.5, "low", "ratio", True, 3.6667, False),
        (99, None, 100, "low", "value", True, None, True),
        (101, None, 100, "low", "value", True, None, False),
        (79, 100, 0.8, "high", "ratio", False, 0.79, None),
        (5, 10, None, "high", "ratio", True, 0.5, None),
        (None, 10, 0.8, "high", "ratio", True, None, None),
    ],
)
def test_a_bench_row_is_judged_by_its_target(
    bench: ModuleType,
    value: float | None,
    reference: float | None,
    target: float | None,
    better: str,
    of: str,
    valid: bool,
    ratio: float | None,
    met: bool | None,
) -> None:
    row = bench.Row("r", "x", value, reference, target, better, of, valid)
    assert row.as_dict() == {
        "name": "r",
        "value": value,
        "unit": "x",
        "reference": reference,
        "ratio": ratio,
        "target": target,
        "met": met,
    }


def test_flows_of_the_benchmark_are_as_promised(bench: ModuleType) -> None:
    assert len(bench.FLOWS) == 10
    assert sum(bench.FLOWS) == 10_000
    assert min(bench.FLOWS) == 10
    assert max(bench.FLOWS) == 5000
