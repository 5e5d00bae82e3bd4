# SPDX-License-Identifier: Apache-2.0
"""The files under systemd/ are accepted by systemd itself and keep what operations rely on."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SYSTEMD = Path(__file__).parents[2] / "systemd"
UNIT = SYSTEMD / "dqplbd.service"


@pytest.fixture(scope="module")
def analyze() -> str:
    """Path of systemd-analyze, which `make setup` installs."""
    path = shutil.which("systemd-analyze")
    assert path, "systemd-analyze is missing: run `make setup` (Debian, Ubuntu: package systemd)"
    return path


@pytest.fixture
def runnable_unit(tmp_path: Path) -> Path:
    """Copy of the unit whose executable exists here, as the installed one does on a real host."""
    text, count = re.subn(r"^ExecStart=/usr/bin/dqplbd\b", "ExecStart=/bin/true", UNIT.read_text(), flags=re.MULTILINE)
    assert count == 1
    copy = tmp_path / UNIT.name
    copy.write_text(text)
    return copy


def settings(text: str) -> dict[str, list[str]]:
    """Return every `Key=value` of a unit file, in order, by key."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith(("#", ";")):
            key, _, value = line.partition("=")
            found.setdefault(key.strip(), []).append(value.strip())
    return found


def test_verify_is_silent(analyze: str, runnable_unit: Path) -> None:
    # Unknown keys and values are only warnings to systemd, which then runs without the protection: none is tolerated.
    done = subprocess.run([analyze, "verify", "--man=no", str(runnable_unit)], capture_output=True, text=True)
    complaints = [line for line in done.stderr.splitlines() if "dqplbd.service" in line]
    assert not complaints
    assert done.returncode == 0, done.stderr


def test_verify_would_complain(analyze: str, runnable_unit: Path) -> None:
    runnable_unit.write_text(runnable_unit.read_text().replace("Type=notify\n", "Type=no-such-type\n"))
    done = subprocess.run([analyze, "verify", "--man=no", str(runnable_unit)], capture_output=True, text=True)
    assert "no-such-type" in done.stderr


def test_exposure_is_under_three(analyze: str, runnable_unit: Path) -> None:
    version = subprocess.run([analyze, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.split()[1]) < 250:
        pytest.skip(f"systemd-analyze security knows --offline from 250 on, this is {version.splitlines()[0]}")
    done = subprocess.run(
        [analyze, "security", "--offline=true", "--no-pager", str(runnable_unit)], capture_output=True, text=True
    )
    level = re.search(r"Overall exposure level for dqplbd\.service: ([\d.]+)", done.stdout)
    assert level, done.stdout + done.stderr
    assert float(level[1]) < 3.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("Type", "notify"),
        ("LimitMEMLOCK", "infinity"),
        ("RestartPreventExitStatus", "78"),
        ("ExecReload", "/bin/kill -HUP $MAINPID"),
        ("RuntimeDirectory", "dqplbd"),
        ("ConfigurationDirectory", "dqplbd"),
        ("ExecStart", "/usr/bin/dqplbd --config /etc/dqplbd/dqplbd.yaml"),
        ("CapabilityBoundingSet", "CAP_IPC_LOCK"),
    ],
)
def test_operations_rely_on(key: str, value: str) -> None:
    assert settings(UNIT.read_text())[key] == [value]


def test_watchdog_is_on() -> None:
    (seconds,) = settings(UNIT.read_text())["WatchdogSec"]
    assert int(seconds) > 0


@pytest.mark.parametrize("key", ["PrivateDevices", "PrivateNetwork", "PrivateUsers", "DynamicUser", "RemoveIPC"])
def test_what_would_break_rdma_is_not_set(key: str) -> None:
    assert key not in settings(UNIT.read_text())


def test_every_account_of_the_unit_is_created() -> None:
    unit = settings(UNIT.read_text())
    lines = [line.split() for line in (SYSTEMD / "sysusers.d/dqplbd.conf").read_text().splitlines()]
    users = {fields[1] for fields in lines if fields[0] == "u"}
    # A `u` line makes the group of the same name too.
    groups = users | {fields[1] for fields in lines if fields[0] == "g"}
    assert set(unit["User"]) <= users
    assert {*unit["Group"], *unit["SupplementaryGroups"]} <= groups


def test_accounts_and_folders_are_accepted(tmp_path: Path) -> None:
    sysusers = shutil.which("systemd-sysusers")
    tmpfiles = shutil.which("systemd-tmpfiles")
    assert sysusers
    assert tmpfiles
    (tmp_path / "etc").mkdir()
    root = f"--root={tmp_path}"
    done = subprocess.run([sysusers, root, str(SYSTEMD / "sysusers.d/dqplbd.conf")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "dqplbd" in (tmp_path / "etc/passwd").read_text()
    assert re.search(r"^rdma:.*\bdqplbd\b", (tmp_path / "etc/group").read_text(), re.MULTILINE)
    # systemd-tmpfiles resolves the user in the same root; giving folders away needs root, so only the syntax is checked
    # where this is run by someone else.
    done = subprocess.run(
        [tmpfiles, root, "--create", str(SYSTEMD / "tmpfiles.d/dqplbd.conf")], capture_output=True, text=True
    )
    assert "tmpfiles.d/dqplbd.conf:" not in done.stderr, done.stderr
