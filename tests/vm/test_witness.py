# SPDX-License-Identifier: Apache-2.0
"""Programs of others over the fabric: what they say of it must agree with what we rely on."""

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vm.conftest import MakeFabric

TIMES = ("real",)  # perftest polls, which would stop simulated time
RunTool = Callable[..., str]
PORT = 18600


def listening(port: int) -> bool:
    """Whether somebody accepts TCP connections at this port."""
    tables = [Path(f"/proc/net/{table}") for table in ("tcp", "tcp6")]
    rows = [row.split() for table in tables if table.exists() for row in table.read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


def perftest(tool: str, near: int, far: int, *options: str) -> str:
    """Run a client of perftest against a server.  :returns: what the client printed."""
    common = [tool, "-F", "-x", "1", *options]
    server = subprocess.Popen(
        [*common, "-d", f"rxe{far}", "-p", str(PORT)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not listening(PORT):
            assert server.poll() is None, f"{tool} ended with {server.returncode} before it listened"
            time.sleep(0.01)
        client = subprocess.run(
            [*common, "-d", f"rxe{near}", "-p", str(PORT), "127.0.0.1"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert client.returncode == 0, client.stdout + client.stderr
        assert server.wait(60) == 0
        return client.stdout
    finally:
        server.kill()
        server.wait()


def row(printed: str, size: int) -> list[float]:
    """The numbers that perftest prints for a size."""
    found = re.search(rf"^\s*{size}\s+(\d.*)$", printed, re.M)
    assert found, printed
    return [float(word) for word in found[1].split()]


def test_ibv_devinfo_sees_the_ports(make_fabric: MakeFabric, run: RunTool) -> None:
    make_fabric(2)
    printed = run("ibv_devinfo", "-v", "-d", "rxe0")
    assert "PORT_ACTIVE" in printed
    assert re.search(r"active_mtu:\s+4096", printed)
    assert re.search(r"GID\[\s*1\]:\s+::ffff:10\.9\.0\.1", printed)


@pytest.mark.parametrize("size", [65_536, 1 << 20])
def test_ib_write_bw(make_fabric: MakeFabric, size: int) -> None:
    fabric = make_fabric(2)
    before = fabric.sent_bytes(0)
    printed = perftest("ib_write_bw", 0, 1, "-s", str(size), "-n", "100")
    assert row(printed, size)[0] == 100, printed
    # What it says of bandwidth depends on its idea of the clock of a CPU; what crossed the cable does not.
    assert fabric.sent_bytes(0) - before > 100 * size


def test_ib_send_lat_feels_the_delay(make_fabric: MakeFabric) -> None:
    fabric = make_fabric(2)
    fabric.set_delays(lambda a, b: 2_000_000)
    printed = perftest("ib_send_lat", 0, 1, "-s", "64", "-n", "50")
    # iterations, then the least, the most and the typical, of one way, in microseconds
    assert row(printed, 64)[1] >= 2000
