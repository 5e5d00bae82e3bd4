# SPDX-License-Identifier: Apache-2.0
"""What is available, from files as the kernel writes them."""

import threading
from pathlib import Path

import pytest

from dqplbd.clients import room
from dqplbd.clients.room import RoomError, RoomKeeper, available_bytes

MIB = 2**20


def machine(folder: Path, group: str, available_kib: int = 4096) -> tuple[Path, Path]:
    proc, groups = folder / "proc", folder / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal:  999 kB\nMemFree:  1 kB\nMemAvailable:   {available_kib} kB\n")
    (proc / "self" / "cgroup").write_text(f"5:devices:/x\n0::{group}\n")
    groups.mkdir()
    return proc, groups


def limit(folder: Path, most: str, current: int, inactive: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


def test_the_tightest_limit_counts(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "/system.slice/dqplbd.service")
    assert available_bytes(proc, groups) == 4 * MIB
    limit(groups / "system.slice" / "dqplbd.service", "max", 1, 0)
    assert available_bytes(proc, groups) == 4 * MIB
    limit(groups / "system.slice", str(3 * MIB), 2 * MIB, MIB)
    assert available_bytes(proc, groups) == 2 * MIB
    limit(groups / "system.slice" / "dqplbd.service", str(MIB), 2 * MIB, 0)
    assert available_bytes(proc, groups) == 0


def test_the_group_of_a_container_is_the_root(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "/")
    limit(groups, str(MIB), 0, 0)
    assert available_bytes(proc, groups) == MIB


def test_files_that_are_odd_or_not_there_are_passed_over(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "no", tmp_path / "where") is None
    proc, groups = machine(tmp_path, "/../../etc")
    limit(groups, "lots", 0, 0)
    assert available_bytes(proc, groups) == 4 * MIB
    (proc / "meminfo").write_text("MemAvailable:\n")
    assert available_bytes(proc, groups) is None


def test_this_machine_tells() -> None:
    available = available_bytes()
    assert available is not None
    assert available > 0


def test_what_is_under_way_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "available_bytes", lambda: 800)
    keeper = RoomKeeper()
    with pytest.raises(RoomError, match="701 bytes asked for, this machine can give 700 now"), keeper.take(701):
        pass
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with keeper.take(400):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(10)
    with pytest.raises(RoomError, match="can give 350"), keeper.take(351):
        pass
    leave.set()
    thread.join()
    with keeper.take(700):
        pass
    monkeypatch.setattr(room, "available_bytes", lambda: None)
    with keeper.take(2**60):
        pass
