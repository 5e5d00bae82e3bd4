# SPDX-License-Identifier: Apache-2.0
"""/metrics, /healthz and /readyz over HTTP."""

import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import aiohttp
import pytest

from dqplbd.config.models import MetricsConfig
from dqplbd.metrics.server import MetricsServer

if TYPE_CHECKING:
    from tests.unit.conftest import SampleView


@pytest.fixture
async def server(view: "SampleView") -> AsyncIterator[MetricsServer]:
    started = MetricsServer(view, MetricsConfig(port=0))
    await started.start()
    yield started
    await started.stop()


async def get(server: MetricsServer, path: str, accept: str = "*/*") -> tuple[int, str, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{server.address}{path}", headers={"Accept": accept}) as answer,
    ):
        return answer.status, await answer.text(), answer.headers["Content-Type"]


async def test_it_serves_both_formats(server: MetricsServer) -> None:
    code, text, kind = await get(server, "/metrics")
    assert code == 200
    assert kind.startswith("text/plain")
    assert 'dqplbd_build_info{version="1.2.3"} 1.0' in text
    _, text, kind = await get(server, "/metrics", "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")
    assert (await get(server, "/metrics"))[1].endswith("# EOF\n") is False


async def test_promtool_has_no_complaint(server: MetricsServer) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian, Ubuntu: package prometheus)")
    _, text, _ = await get(server, "/metrics")
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True)  # noqa: ASYNC221
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


async def test_a_new_picture_is_served(server: MetricsServer, view: "SampleView") -> None:
    assert 'dqplbd_paths{class="rack",device="tcp0"} 1.0' in (await get(server, "/metrics"))[1]
    view.path_list = view.path_list + view.path_list
    server.collector.update()
    assert 'dqplbd_paths{class="rack",device="tcp0"} 2.0' in (await get(server, "/metrics"))[1]


async def test_health_is_the_engine_heartbeat(server: MetricsServer, view: "SampleView") -> None:
    assert (await get(server, "/healthz"))[0] == 200
    view.heartbeat_age_seconds = 9.5
    server.collector.update()
    code, text, _ = await get(server, "/healthz")
    assert code == 503
    assert "9.5 s" in text


@pytest.mark.parametrize(("state", "code"), [("starting", 503), ("ready", 200), ("degraded", 200), ("draining", 503)])
async def test_readiness_is_the_state(server: MetricsServer, view: "SampleView", state: str, code: int) -> None:
    view.state = state
    view.reasons = ["tcp0 is down"]
    server.collector.update()
    found, text, _ = await get(server, "/readyz")
    assert found == code
    assert text == f"{state}\ntcp0 is down\n"


async def test_a_taken_port_is_named(view: "SampleView") -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = MetricsServer(view, MetricsConfig(port=port))
        with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port}.*metrics\.port"):
            await server.start()
        assert server.address is None


async def test_a_failing_daemon_keeps_the_old_numbers(server: MetricsServer, view: "SampleView") -> None:
    before = (await get(server, "/metrics"))[1]
    view.path_list = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        server.collector.update()
    assert (await get(server, "/metrics"))[1] == before
