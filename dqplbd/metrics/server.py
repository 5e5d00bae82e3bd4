# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of the metrics: ``/metrics``, ``/healthz``, ``/readyz``.

``/healthz`` answers 200 while the process and the engine's loop live, else 503: restart it.  ``/readyz`` answers 200
while clients can attach and connect (states ``ready`` and ``degraded``), else 503: send no work there.  The body says
why.
"""

import asyncio
import contextlib
import logging
import time
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from dqplbd.admin.model import DaemonView, PathClass
from dqplbd.config.models import MetricsConfig
from dqplbd.metrics.collector import MetricsCollector

__all__ = ["MetricsServer"]

log = logging.getLogger(__name__)

INTERVAL_S: Final = 2.0
# Pictures take at most this share of the time, however many paths there are.
SHARE: Final = 0.02
# The engine moves its heartbeat at least every 0.5 s, also when idle.
HEARTBEAT_LIMIT_S: Final = 5.0
_CLOSE_S: Final = 1.0


class MetricsServer:
    """Takes pictures of the daemon on a timer and serves the last one.  Belongs to the event loop that starts it.

    :param view: the daemon.
    :param config: where to listen.
    """

    def __init__(self, view: DaemonView, config: MetricsConfig) -> None:
        self._config = config
        self.collector = MetricsCollector(view, config.top_k)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self.collector)
        self._timer: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self._rendered: dict[str, tuple[float, bytes]] = {}
        self.address: str | None = None
        """host:port with the real port, while it serves."""

    def observe_rtt(self, path_class: PathClass, rtt_ns: int) -> None:
        """Count one good probe in the histogram of RTTs."""
        self.collector.observe_rtt(path_class, rtt_ns)

    async def start(self) -> None:
        """Take the first picture and listen.

        :raises OSError: the address cannot be listened on; the text names it.
        """
        self.collector.update()
        self._timer = asyncio.create_task(self._run(), name="metrics")
        app = web.Application()
        app.add_routes(
            [web.get("/metrics", self._metrics), web.get("/healthz", self._healthz), web.get("/readyz", self._readyz)]
        )
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=_CLOSE_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._config.address, self._config.port)
        try:
            await site.start()
        except OSError as error:
            await self.stop()
            where = f"{self._config.address}:{self._config.port}"
            raise OSError(
                error.errno, f"metrics cannot listen on {where}: {error.strerror}; set metrics.address and metrics.port"
            ) from None
        host, port = self._runner.addresses[0][:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def stop(self) -> None:
        """Stop listening and taking pictures."""
        if self._timer is not None:
            self._timer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._timer
            self._timer = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self.address = None

    async def _run(self) -> None:
        failed = False
        while True:
            begin = time.perf_counter()
            try:
                self.collector.update()
                failed = False
            except Exception:
                # The daemon carries traffic whether or not it can be watched; the age of the picture shows it.
                if not failed:
                    log.exception("taking the numbers of the metrics failed; the old ones stay")
                failed = True
            await asyncio.sleep(max(INTERVAL_S, (time.perf_counter() - begin) / SHARE))

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        snapshot = self.collector.snapshot
        taken = snapshot.time if snapshot is not None else 0.0
        cached = self._rendered.get(content_type)
        if cached is None or cached[0] != taken:
            cached = (taken, encode(self._registry))
            self._rendered[content_type] = cached
        return web.Response(body=cached[1], headers={"Content-Type": content_type})

    async def _healthz(self, request: web.Request) -> web.Response:
        snapshot = self.collector.snapshot
        if snapshot is None:
            return web.Response(status=503, text="no numbers yet\n")
        age = snapshot.status.engine.heartbeat_age_seconds
        if age > HEARTBEAT_LIMIT_S:
            return web.Response(status=503, text=f"the engine's loop has not moved for {age:.1f} s: restart dqplbd\n")
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        snapshot = self.collector.snapshot
        state = snapshot.status.state if snapshot is not None else "starting"
        reasons = snapshot.status.reasons if snapshot is not None else []
        text = "".join(f"{line}\n" for line in [state, *reasons])
        return web.Response(status=200 if state in ("ready", "degraded") else 503, text=text)
