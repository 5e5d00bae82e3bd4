# SPDX-License-Identifier: Apache-2.0
"""What the service manager is told, on a socket that plays its part."""

import os
import socket
import time
from pathlib import Path

import pytest

from dqplbd.notify import Notifier


@pytest.fixture
def manager(tmp_path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(str(tmp_path / "notify"))
    sock.settimeout(5)
    return sock


def test_each_state_is_one_datagram(manager: socket.socket, tmp_path: Path) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    assert notifier.ready("two\nlines")
    assert manager.recv(4096) == b"READY=1\nSTATUS=two lines"
    before = time.monotonic_ns() // 1000
    notifier.reloading()
    lines = manager.recv(4096).decode().split("\n")
    assert lines[0] == "RELOADING=1"
    assert before <= int(lines[1].removeprefix("MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000
    notifier.stopping("bye")
    assert manager.recv(4096) == b"STOPPING=1\nSTATUS=bye"
    notifier.watchdog()
    assert manager.recv(4096) == b"WATCHDOG=1"
    manager.close()


def test_an_abstract_socket_is_found() -> None:
    name = f"dqplbd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + name)
        sock.settimeout(5)
        assert Notifier({"NOTIFY_SOCKET": "@" + name}).watchdog()
        assert sock.recv(100) == b"WATCHDOG=1"


def test_without_a_manager_nothing_is_sent() -> None:
    assert not Notifier({}).ready("x")
    assert not Notifier({"NOTIFY_SOCKET": "/nowhere/at/all"}).ready("x")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_for_this_process_only(environ: dict[str, str], expected: float | None) -> None:
    assert Notifier(environ).watchdog_s == expected
