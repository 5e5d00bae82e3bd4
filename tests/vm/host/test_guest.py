# SPDX-License-Identifier: Apache-2.0
"""The guest, seen from the host: results are true, and nothing stays."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vm import qemu
from tests.vm.guest import GuestError, no_simulated_time, run_guest
from tests.vm.kernel.distribution import BUSYBOX

GUEST = Path(__file__).resolve().parents[1] / "guest.py"


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of temporary files of this test alone: its name is in the command of each of its guests."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setenv("DQPLBD_VM", "qemu" if no_simulated_time() else "uml")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def processes(folder: Path) -> list[int]:
    """Processes that name the folder in their command."""
    found = []
    for one in Path("/proc").iterdir():
        if one.name.isdecimal():
            try:
                if str(folder).encode() in (one / "cmdline").read_bytes():
                    found.append(int(one.name))
            except OSError:  # it ended
                pass
    return found


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_exit_code_and_output_are_those_of_the_command(own_folder: Path, tmp_path: Path) -> None:
    script = 'echo "$WORD"; pwd; echo bad >&2; exit 7'
    result = run_guest(["bash", "-c", script], out=tmp_path / "out", env={"WORD": "a 'b' $c"}, cwd=tmp_path)
    assert (result.rc, result.stdout, result.stderr) == (7, f"a 'b' $c\n{tmp_path}\n", "bad\n")
    assert list(own_folder.iterdir()) == []


def test_only_one_folder_can_be_written(own_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out with 'quotes'"
    script = 'echo x > "$0/file"; echo y > "$1/file" || echo z > /etc/dqplbd-was-here'
    result = run_guest(["bash", "-c", script, str(out), str(GUEST.parent)], out=out)
    assert result.rc != 0
    assert result.stderr.count("Read-only file system") == 2
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("file", "x\n")]


def test_this_interpreter_and_its_packages_run_there(own_folder: Path, tmp_path: Path) -> None:
    program = "import dqplbd.engine.engine, uvloop; print(dqplbd.__file__)"
    result = run_guest([sys.executable, "-P", "-c", program], out=tmp_path / "out")
    assert result.stdout.strip().startswith(sys.prefix), result.stderr


@pytest.mark.skipif(not shutil.which(qemu.PROGRAM) or not BUSYBOX.exists(), reason="the fallback is not installed")
def test_the_fallback_does_the_same(own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ["DQPLBD_VM"] != "qemu":
        monkeypatch.delenv("DQPLBD_KERNEL", raising=False)
        monkeypatch.setenv("DQPLBD_VM", "qemu")
    out = tmp_path / "out, of it"
    script = """
    rdma link add rxe0 type rxe netdev lo && ibv_devinfo -d rxe0 >"$0/info"
    echo z >/etc/dqplbd-was-here
    uname -r; pwd; exit 7"""
    result = run_guest(["bash", "-c", script, str(out)], out=out, cwd=tmp_path)
    assert result.rc == 7, result.stderr
    assert re.fullmatch(rf"\d\S*-(amd64|generic)\n{tmp_path}\n", result.stdout)
    assert result.stderr.count("Read-only file system") == 1, result.stderr
    assert "hca_id:\trxe0" in (out / "info").read_text()
    assert list(own_folder.iterdir()) == []


def test_the_fallback_refuses_simulated_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DQPLBD_VM", "qemu")
    with pytest.raises(GuestError, match="simulated time is User-Mode Linux's alone"):
        run_guest(["true"], out=tmp_path / "out", simulated=True)


@pytest.mark.skipif(bool(no_simulated_time()), reason=no_simulated_time())
def test_simulated_time_jumps(own_folder: Path, tmp_path: Path) -> None:
    result = run_guest(["bash", "-c", "sleep 36000; cat /proc/uptime"], out=tmp_path / "out", simulated=True)
    assert 36_000 <= float(result.stdout.split()[0]) < 36_010
    assert result.seconds < 3600


def test_a_guest_that_panics_is_a_failure(own_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(GuestError, match=r"(?s)ended without a result.*sysrq triggered crash.*this far"):
        run_guest(["bash", "-c", "echo this far; sync; echo c > /proc/sysrq-trigger"], out=tmp_path / "out")
    wait_for(lambda: not processes(own_folder), "a process of the guest is left")
    assert list(own_folder.iterdir()) == []


def test_a_guest_that_hangs_is_ended(own_folder: Path, tmp_path: Path) -> None:
    timeout_s = 5 * (qemu.slowdown() if no_simulated_time() else 1)
    with pytest.raises(GuestError, match=rf"(?s)ended after {timeout_s} s.*this far"):
        run_guest(["bash", "-c", "echo this far; sleep 1000 & sleep 1000"], out=tmp_path / "out", timeout_s=timeout_s)
    wait_for(lambda: not processes(own_folder), "a process of the guest is left")
    assert list(own_folder.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_stays_when_its_runner_is_killed(own_folder: Path, tmp_path: Path, number: int) -> None:
    runner = subprocess.Popen(
        [sys.executable, "-P", str(GUEST), "--out", str(tmp_path / "out"), "--", "bash", "-c", "echo up; sleep 1000"],
        env={**os.environ, "TMPDIR": str(own_folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert runner.stdout is not None
    with runner.stdout:
        assert runner.stdout.readline() == b"up\n"
        assert processes(own_folder)
        runner.send_signal(number)
        runner.wait()
    wait_for(lambda: not processes(own_folder) and not list(own_folder.iterdir()), "something is left")


@pytest.mark.parametrize(("command", "memory_mb"), [([], 512), (["true"], 16)])
def test_what_cannot_be_run_is_refused(tmp_path: Path, command: list[str], memory_mb: int) -> None:
    with pytest.raises(ValueError, match=r"no command|expected 64\.\.65536"):
        run_guest(command, out=tmp_path, memory_mb=memory_mb)
