# SPDX-License-Identifier: Apache-2.0
"""Runs the command line as users do: as a process."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import dqplbd

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def dqplb(tmp_path: Path) -> Run:
    """``dqplb(arguments..., env={...})``: run it outside the source tree, with the package that the tests use."""
    package = str(Path(dqplbd.__file__).parents[1])

    def run(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        clean = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "DQPLB_ADMIN_SOCKET")}
        return subprocess.run(
            [sys.executable, "-P", "-m", "dqplbd.cli.main", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            env={**clean, "PYTHONPATH": package, "COLUMNS": "60", **(env or {})},
        )

    return run


@pytest.fixture
def ask(dqplb: Run, admin_socket: str) -> Run:
    """The same, with the socket of the daemon of the tests."""

    def run(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return dqplb("--socket", admin_socket, *arguments, env=env)

    return run


@pytest.fixture
def ask_json(ask: Run) -> Callable[..., Any]:
    """The ``data`` of what a command prints with --json."""

    def run(kind: str, *arguments: str, code: int = 0) -> Any:
        done = ask(*arguments, "--json")
        assert done.returncode == code, done.stderr
        answer = json.loads(done.stdout)
        assert set(answer) == {"schema_version", "kind", "data"}
        assert answer["schema_version"] == 1
        assert answer["kind"] == kind
        return answer["data"]

    return run
