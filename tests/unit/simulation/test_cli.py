# SPDX-License-Identifier: Apache-2.0
"""``dqplb simulate``."""

import json
from pathlib import Path

from typer.testing import CliRunner

from dqplbd.cli.main import app

RUNNER = CliRunner()
SMALL = """
region: {racks: 1, hosts: 2, gpus: 2}
workload: {kind: all_to_all, size_bytes: 1MiB}
senders: [unlimited, dqplb+grants]
"""


def test_a_table_with_a_line_a_sender(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(SMALL)
    done = RUNNER.invoke(app, ["simulate", str(file)])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert "4 GPUs" in lines[0]
    assert lines[1].split()[0] == "SENDER"
    assert [line.split()[0] for line in lines[2:4]] == ["unlimited", "dqplb+grants"]


def test_json_and_options(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(SMALL)
    done = RUNNER.invoke(app, ["simulate", str(file), "--json", "--sender", "static", "--seed", "5", "--cell", "4"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert report["kind"] == "simulation"
    data = report["data"]
    assert [run["sender"] for run in data["runs"]] == ["static"]
    assert data["scenario"]["seed"] == 5
    assert data["scenario"]["fabric"]["cell_packets"] == 4
    assert data["runs"][0]["totals"]["received"] == data["messages"] == 12


def test_the_list() -> None:
    assert "all-gather-256" in RUNNER.invoke(app, ["simulate", "--list"]).output.splitlines()
    assert "incast-31" in json.loads(RUNNER.invoke(app, ["simulate", "--list", "--json"]).output)["data"]


def test_mistakes_have_their_exit_codes(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("region: {rack: 1}\n")
    done = RUNNER.invoke(app, ["simulate", str(file)])
    assert done.exit_code == 78
    assert "Did you mean 'racks'" in done.stderr
    file.write_text(SMALL)
    done = RUNNER.invoke(app, ["simulate", str(file), "--sender", "fast"])
    assert done.exit_code == 2
    assert "sender 'fast'" in done.stderr
    assert RUNNER.invoke(app, ["simulate", str(tmp_path / "none.yaml")]).exit_code == 78
