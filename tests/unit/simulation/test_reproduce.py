# SPDX-License-Identifier: Apache-2.0
"""``make reproduce`` in small: every part gives its rows."""

import json
import sys
from pathlib import Path

import pytest

from tests.bench import reproduce

SMALL = {"buildings": 2, "zones": 2, "racks": 1, "hosts": 2, "gpus": 1}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "ALL_TO_ALL", {32: SMALL, 64: {**SMALL, "racks": 3}, 128: SMALL})
    monkeypatch.setattr(reproduce, "ALL_GATHER", SMALL)
    monkeypatch.setattr(reproduce, "MIB", 2**14)
    monkeypatch.setattr(reproduce, "GIB", 2**20)
    monkeypatch.setattr(reproduce, "ALL_TO_ALLV", {**reproduce.ALL_TO_ALLV, "size_bytes": 2**20})


@pytest.mark.usefixtures("small")
def test_every_part_gives_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "reproduce.json"
    monkeypatch.setattr(sys, "argv", ["reproduce", "--output", str(output), "--tools", str(tmp_path)])
    assert reproduce.main() in (0, 1)  # 1: so small a fabric misses targets
    rows = {row["name"]: row for row in json.loads(output.read_text())}
    told = capsys.readouterr().out
    assert "FAILED" not in told
    for name in (
        *(f"all_to_allv_{ranks}_{what}" for ranks in (32, 64, 128) for what in ("peak", "throughput", "pauses")),
        *(f"all_gather_256_{size}_{where}_bus" for size in ("1GiB", "8MiB") for where in ("packed", "shuffled")),
        *(f"all_gather_256_1GiB_{where}_peak" for where in ("packed", "shuffled")),
        "all_gather_256_1GiB_wall",
        "all_gather_256_8MiB_best_static",
        "skewed_64_peak",
        "skewed_64_completion",
        "cell_8_completion",
        "cell_8_peak",
        "job_packet_hops_per_s",
    ):
        assert rows[name]["value"] is not None, name
    assert rows["packet_hops_per_s"]["value"] is None  # its program is not there
    assert "Ablation" in told
    assert "static:32768,1,dqplb,2" in told


@pytest.mark.usefixtures("small")
def test_one_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "reproduce.json"
    monkeypatch.setattr(sys, "argv", ["reproduce", "--only", "skewed", "--output", str(output), "--seed", "3"])
    reproduce.main()
    assert {row["name"] for row in json.loads(output.read_text())} == {"skewed_64_peak", "skewed_64_completion"}
