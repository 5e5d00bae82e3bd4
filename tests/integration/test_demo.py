# SPDX-License-Identifier: Apache-2.0
"""The demonstration, with a small file; and that it leaves nothing behind, however it ends."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dqplbd
from dqplbd.admin.client import AdminClient

pytestmark = pytest.mark.slow


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    """The demonstration in a process group of its own, with its temporary files below ``tmp_path``."""
    temporary = tmp_path / "t"
    temporary.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "dqplbd.demo", "--output", str(tmp_path / "demo.json"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(dqplbd.__file__).parents[1]), "TMPDIR": str(temporary)},
    )


def daemons(tmp_path: Path) -> list[int]:
    """Processes that were started with a configuration below ``tmp_path``."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if process.name.isdigit() and b"dqplbd.daemon" in command and str(tmp_path).encode() in command:
            found.append(int(process.name))
    return found


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short name: sockets lie below it."""
    return tmp_path_factory.mktemp("d")


def test_it_shows_what_it_claims(folder: Path) -> None:
    file = folder / "file"
    file.write_bytes(os.urandom(24 * 2**20 + 12345))
    demo = start(folder, "--file", str(file))
    output, _ = demo.communicate(timeout=240)
    assert "56 of 56 paths have the right class" in output
    assert output.count("checksum equal") == 4
    rows = {row["name"]: row for row in json.loads((folder / "demo.json").read_text())}
    assert all(set(row) == {"name", "value", "unit", "reference", "ratio", "target", "met"} for row in rows.values())
    assert rows["classes_right"] == {**rows["classes_right"], "value": 56, "met": True}
    for distance in ("near", "far"):
        assert rows[f"static_{distance}_inflight_peak"]["value"] >= 24 * 2**20, "the static setting holds nothing back"
        assert rows[f"computed_{distance}_inflight_peak"]["met"] is True
    assert rows["computed_near_link_queue_peak"]["met"] is True
    assert demo.returncode in (0, 1), output  # 1: a rate that a busy machine did not reach
    assert daemons(folder) == []
    assert os.listdir(folder / "t") == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_behind(
    folder: Path, number: signal.Signals, wait_until: Callable[[Callable[[], Any], str], Any]
) -> None:
    demo = start(folder)
    try:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "static: 16 queue pairs" in line:
                break
        assert len(daemons(folder)) == 8
        demo.send_signal(number)
        output, _ = demo.communicate(timeout=60)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 130, output
    assert "Traceback" not in output
    assert daemons(folder) == []
    assert os.listdir(folder / "t") == []


def test_a_killed_demonstration_takes_its_daemons_along(
    folder: Path, wait_until: Callable[[Callable[[], Any], str], Any]
) -> None:
    demo = start(folder)
    assert demo.stdout is not None
    for line in demo.stdout:
        if "8 daemons run" in line:
            break
    assert len(daemons(folder)) == 8
    demo.kill()
    demo.communicate(timeout=60)
    wait_until(lambda: daemons(folder) == [], "the daemons end with it")


def test_kept_it_can_be_looked_at_until_it_is_interrupted(folder: Path) -> None:
    file = folder / "file"
    file.write_bytes(os.urandom(2**20))
    demo = start(folder, "--file", str(file), "--keep")
    said: list[str] = []
    try:
        assert demo.stdout is not None
        for line in demo.stdout:
            said.append(line)
            if line.startswith("Ctrl-C here stops all"):
                break
        [setting] = [line for line in said if "export DQPLB_ADMIN_SOCKET=" in line]
        status = AdminClient(setting.strip().partition("=")[2]).status()
        assert status.peers_up == 7
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=60)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode in (0, 1), "".join(said)
    assert daemons(folder) == []
    assert os.listdir(folder / "t") == []


def test_a_missing_file_is_named(folder: Path) -> None:
    demo = start(folder, "--file", str(folder / "none"))
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 2
    assert str(folder / "none") in output
