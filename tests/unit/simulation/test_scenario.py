# SPDX-License-Identifier: Apache-2.0
"""Scenarios: defaults, mistakes, and the comparisons that come of them."""

import json
from pathlib import Path

import pytest

from dqplbd.config import ConfigError
from dqplbd.simulation.compare import compare
from dqplbd.simulation.scenario import builtin_names, load_scenario, parse_scenario
from dqplbd.simulation.simulator import SimulationError, Simulator
from dqplbd.simulation.workloads import Message

SMALL = """
region: {buildings: 1, zones: 2, racks: 1, hosts: 2, gpus: 2}
fabric: {planes: 2}
workload: {kind: all_to_all, size_bytes: 4MiB}
"""


def test_an_empty_text_is_a_scenario() -> None:
    scenario = parse_scenario("")
    assert scenario.shape().gpus == 32
    assert len(scenario.schedule().messages) == 32 * 31


def test_those_that_come_with_the_package_are_good() -> None:
    assert "all-to-all-32" in builtin_names()
    for name in builtin_names():
        scenario, folder = load_scenario(name)
        assert scenario.title
        assert scenario.schedule(folder).messages


@pytest.mark.parametrize(
    ("text", "key", "line", "says"),
    [
        ("workloads: {}", "workloads", 1, "Did you mean 'workload'"),
        ("fabric:\n  oversubscription:\n    zon: 2\n", "fabric.oversubscription.zon", 3, "Did you mean 'zone'"),
        ("region: {racks: 0}", "region.racks", 1, "greater than or equal to 1"),
        ("region: {racks: 1, hosts: 1, gpus: 1}", "region", 1, "1 GPUs"),
        ("fabric: {nic_rate_bps: 12 parsecs}", "fabric.nic_rate_bps", 1, "expected"),
        ("fabric: {rtt_ns: {zone: 1us}}", "fabric.rtt_ns", 1, "nearer class"),
        ("fabric:\n  ecn: {min_bytes: 10}", "fabric.ecn", 2, "min_bytes <= max_bytes"),
        ("workload: {kind: trace}", "workload", 1, "a file for a trace"),
        ("workload: {kind: gossip}", "workload.kind", 1, "'all_to_all'"),
        ("senders: [fast]", "", 1, "sender 'fast'"),
        ("workload: {kind: incast, senders: 32}", "", 1, "32 senders"),
        ("region: {racks: 3}\nworkload: {kind: all_gather, algorithm: recursive}", "", 1, "power of two"),
        ("- 1", "", 1, "no mapping"),
        ("a: [", "", 1, "expected"),
    ],
)
def test_mistakes_are_named(text: str, key: str, line: int, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_scenario(text, "f.yaml")
    problem = caught.value.problems[0]
    assert problem.key == key
    assert problem.line == line
    assert says in str(problem)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_scenario(str(tmp_path / "x.yaml"))


def test_a_comparison_has_the_measures_of_each_sender() -> None:
    result = compare(parse_scenario(SMALL))
    assert [run.sender for run in result.runs] == list(result.scenario.senders)
    for run in result.runs:
        assert run.totals.received == len(result.schedule.messages)
        assert 0.3 < run.bound_ratio <= 1
        assert run.completion_ns >= result.bound_ns
        assert run.bus_bps == pytest.approx(4 * 2**20 * 8e9 * 7 / 8 / run.completion_ns)
        assert 0 < run.mean_bytes < run.peak_bytes
        assert run.peak_switch_bytes <= run.peak_bytes
        assert run.pauses == run.over_bytes == run.marks == 0
        assert run.message_ns[0] <= run.message_ns[1] <= run.message_ns[2] <= run.completion_ns
        assert [one.tier for one in run.queues] == ["rack", "zone", "building"]
        assert all(one.p50_bytes <= one.p99_bytes <= one.p999_bytes <= one.peak_bytes for one in run.queues)
        assert max(run.series.total_bytes) <= run.peak_bytes
        assert 0.5 < run.jain <= 1
    json.dumps(result.as_dict())


def test_the_same_seed_gives_the_same_numbers() -> None:
    scenario = parse_scenario(SMALL + "senders: [dqplb+grants+delay]\n")
    first, again = (compare(scenario).runs[0] for _ in range(2))
    other = compare(scenario.model_copy(update={"seed": 2})).runs[0]
    assert first.totals == again.totals
    assert first.message_times_ns == again.message_times_ns
    assert first.message_times_ns != other.message_times_ns


def test_it_is_told_what_held_a_sender_back() -> None:
    large = parse_scenario(SMALL.replace("4MiB", "64MiB"))
    fixed, adapting = (one.totals for one in compare(large, senders=["dqplb", "dqplb+grants+delay"]).runs)
    assert fixed.window_ns > 0
    assert fixed.outbound_ns == fixed.grant_ns == 0
    assert adapting.outbound_ns > 0


def test_real_buffers_pause() -> None:
    text = SMALL.replace("planes: 2", "planes: 2, buffer_bytes: 2MB, ecn: {min_bytes: 100kB, max_bytes: 400kB}")
    run = compare(parse_scenario(text), senders=["unlimited"]).runs[0]
    assert run.pauses > 0
    assert run.paused_ns > 0
    assert run.marks > 0


def test_a_trace_is_read_beside_its_scenario(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("start_ns,from,to,bytes,after\n0,0,2,1000000\n5000,2,4,1000000,0\n")
    (tmp_path / "s.yaml").write_text(
        SMALL.replace("kind: all_to_all, size_bytes: 4MiB", "kind: trace, file: trace.csv") + "senders: [dqplb]\n"
    )
    scenario, folder = load_scenario(str(tmp_path / "s.yaml"))
    result = compare(scenario, folder)
    assert result.runs[0].totals.received == 2
    assert result.runs[0].bus_bps is None
    (tmp_path / "trace.csv").write_text("1\n")
    with pytest.raises(ValueError, match="line 1 has 1 fields"):
        compare(scenario, folder)


def test_progress_is_told() -> None:
    told: list[tuple[str, float]] = []
    text = SMALL.replace("4MiB", "256MiB")
    compare(parse_scenario(text), senders=["static"], progress=lambda name, part: told.append((name, part)))
    assert told
    assert all(name == "static" and 0 <= part <= 1 for name, part in told)


def test_the_simulator_refuses_with_a_text() -> None:
    scenario = parse_scenario(SMALL)
    sender = scenario.sender("dqplb", 7)
    with Simulator(scenario.settings(), sender.profiles, grants=False) as simulator:
        with pytest.raises(SimulationError, match="message 0 goes from GPU 0 to 99"):
            simulator.add([Message(0, 99, 1)])
        simulator.add([Message(0, 4, 1)])
        simulator.run()
        with pytest.raises(SimulationError, match="has begun"):
            simulator.add([Message(0, 4, 1)])
        assert simulator.totals().received == 1
        assert simulator.series().times_ns == []
        assert len(simulator.ports()) == simulator.totals().ports
