# SPDX-License-Identifier: Apache-2.0
"""One owner a socket path, exact rights, nothing left behind."""

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dqplbd.unixsocket import LockError, PathLock, bind_unix, remove_unix


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    lock = PathLock(path)
    with pytest.raises(LockError, match=f"{path} .*process {os.getpid()}"):
        PathLock(path)
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []
    PathLock(path).release()


def test_a_folder_that_is_missing_is_named_with_what_to_do() -> None:
    with pytest.raises(OSError, match=r"/nowhere/s cannot be made: No such file.*clients\.socket"):
        PathLock("/nowhere/s")


def test_a_dead_owner_owns_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    code = f"import os; from dqplbd.unixsocket import PathLock; PathLock({path!r}); os._exit(1)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 1
    assert os.path.exists(path + ".lock")
    PathLock(path).release()


def test_rights_are_exact_whatever_the_mask(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    old = os.umask(0)
    try:
        for mask in (0, 0o077, 0o777):
            os.umask(mask)
            with bind_unix(path, socket.SOCK_SEQPACKET, 0o660, None):
                assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
            assert os.umask(mask) == mask
    finally:
        os.umask(old)
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]
    remove_unix(path)
    remove_unix(path)


def test_errors_name_the_path(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="/nowhere/s"):
        bind_unix("/nowhere/s", socket.SOCK_STREAM, 0o600, None)
    with pytest.raises(OSError, match="exceed"):
        bind_unix(str(tmp_path / ("x" * 100)), socket.SOCK_STREAM, 0o600, None)
    with pytest.raises(OSError, match="no group 'no-such-group'"):
        bind_unix(str(tmp_path / "s"), socket.SOCK_STREAM, 0o600, "no-such-group")
    assert list(tmp_path.iterdir()) == []
