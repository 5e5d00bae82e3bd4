# SPDX-License-Identifier: Apache-2.0
"""The admin API: HTTP on a Unix socket.

Who may open the socket may do everything here; its mode and group decide who that is.

=======  ==========================  =========================================  =========================
method   path                        query or body                              ``data`` of the answer
=======  ==========================  =========================================  =========================
GET      /v1/status                                                             Status
GET      /v1/devices                                                            list of Device
GET      /v1/peers                                                              list of Peer
GET      /v1/paths                   class, peer, device, sort, top             list of Path
GET      /v1/paths/{peer}/explain                                               list of Explanation
GET      /v1/clients                                                            list of Client
GET      /v1/config                                                             ConfigView
POST     /v1/probe                   {"peer": text, "count": 1..1000}           ProbeReport
POST     /v1/reload                                                             ReloadReport
POST     /v1/reset-peaks                                                        ResetReport
=======  ==========================  =========================================  =========================

An error is a status of 400 or above with ``{"error": text, "hint": text}``.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web

from dqplbd.admin.model import (
    AdminError,
    Client,
    ConfigView,
    DaemonView,
    Device,
    Envelope,
    ErrorBody,
    Explanation,
    Path,
    Peer,
    ProbeReport,
    ReloadReport,
    ResetReport,
    Status,
)
from dqplbd.admin.select import select_paths
from dqplbd.config.models import AdminConfig
from dqplbd.unixsocket import bind_unix

__all__ = ["AdminServer", "admin_app"]

log = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 16 * 1024
MAX_PROBES: Final = 1000
_BACKLOG: Final = 64
_CLOSE_S: Final = 2.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _answer(kind: str, model: type[Envelope[Any]], data: object) -> web.Response:
    return web.Response(text=model(kind=kind, data=data).model_dump_json(), content_type="application/json")


def _error(status: int, error: str, hint: str = "") -> web.Response:
    return web.Response(
        status=status, text=ErrorBody(error=error, hint=hint).model_dump_json(), content_type="application/json"
    )


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as JSON; one that nobody foresaw is logged and does not end the daemon."""
    try:
        return await handler(request)
    except AdminError as error:
        return _error(error.status, error.error, error.hint)
    except web.HTTPException as error:
        hint = {404: "see the table of paths in docs/operations.md", 405: "GET to read, POST to act"}.get(
            error.status, ""
        )
        return _error(error.status, f"{request.method} {request.path[:200]}: {error.reason}", hint)
    except asyncio.CancelledError:
        raise
    except Exception as error:
        log.exception("admin request %s %s failed", request.method, request.path)
        return _error(
            500, f"the daemon failed to answer: {type(error).__name__}: {error}", "its log has the details; report this"
        )


async def _body(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request; an empty body is an empty one."""
    raw = await request.read()
    if not raw:
        return {}
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise AdminError(f"the body is not JSON: {error}", "send a JSON object, or nothing") from None
    if not isinstance(body, dict):
        raise AdminError(f"the body is a {type(body).__name__}", "send a JSON object, or nothing")
    return body


def _known(given: set[str], known: set[str], what: str) -> None:
    unknown = sorted(given - known)
    if unknown:
        raise AdminError(f"unknown {what} {unknown[0][:100]!r}", f"one of {', '.join(sorted(known)) or 'none'}")


def admin_app(view: DaemonView) -> web.Application:
    """The API over what a daemon tells of itself."""

    async def status(request: web.Request) -> web.Response:
        return _answer("status", Envelope[Status], view.status())

    async def devices(request: web.Request) -> web.Response:
        return _answer("devices", Envelope[list[Device]], view.devices())

    async def peers(request: web.Request) -> web.Response:
        return _answer("peers", Envelope[list[Peer]], view.peers())

    async def paths(request: web.Request) -> web.Response:
        query = request.query
        _known(set(query), {"class", "peer", "device", "sort", "top"}, "query key")
        top = query.get("top")
        if top is not None and not (top.isascii() and top.isdigit() and len(top) <= 9):
            raise AdminError(f"top {top[:100]!r} is no number", "a number of paths to show, from 1 on")
        chosen = select_paths(
            view.paths(),
            path_class=query.get("class"),
            peer=query.get("peer"),
            device=query.get("device"),
            sort=query.get("sort", "class"),
            top=int(top) if top is not None else None,
        )
        return _answer("paths", Envelope[list[Path]], chosen)

    async def explain(request: web.Request) -> web.Response:
        return _answer("explanations", Envelope[list[Explanation]], view.explain(request.match_info["peer"]))

    async def clients(request: web.Request) -> web.Response:
        return _answer("clients", Envelope[list[Client]], view.clients())

    async def config(request: web.Request) -> web.Response:
        return _answer("config", Envelope[ConfigView], view.config_view())

    async def probe(request: web.Request) -> web.Response:
        body = await _body(request)
        _known(set(body), {"peer", "count"}, "key")
        peer, count = body.get("peer"), body.get("count", 5)
        if not isinstance(peer, str) or not peer:
            raise AdminError(f"peer is {peer!r}", "the host_id of a peer, as in `dqplb peers`")
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_PROBES:
            raise AdminError(f"count is {count!r}", f"a number of probes, 1..{MAX_PROBES}")
        return _answer("probe", Envelope[ProbeReport], await view.probe(peer, count))

    async def reload(request: web.Request) -> web.Response:
        _known(set(await _body(request)), set(), "key")
        return _answer("reload", Envelope[ReloadReport], await view.reload())

    async def reset_peaks(request: web.Request) -> web.Response:
        _known(set(await _body(request)), set(), "key")
        return _answer("reset-peaks", Envelope[ResetReport], view.reset_peaks())

    app = web.Application(middlewares=[_errors], client_max_size=MAX_BODY_BYTES)
    app.add_routes(
        [
            web.get("/v1/status", status),
            web.get("/v1/devices", devices),
            web.get("/v1/peers", peers),
            web.get("/v1/paths", paths),
            web.get("/v1/paths/{peer}/explain", explain),
            web.get("/v1/clients", clients),
            web.get("/v1/config", config),
            web.post("/v1/probe", probe),
            web.post("/v1/reload", reload),
            web.post("/v1/reset-peaks", reset_peaks),
        ]
    )
    return app


class AdminServer:
    """The server of the admin API.  Belongs to the event loop that starts it."""

    def __init__(self, view: DaemonView, config: AdminConfig) -> None:
        self._view = view
        self._config = config
        self._runner: web.AppRunner | None = None
        self._server: asyncio.AbstractServer | None = None
        self._inode: tuple[int, int] | None = None

    async def start(self) -> None:
        """Listen.

        :raises OSError: the socket cannot be made; the text names it.
        """
        sock = bind_unix(self._config.socket, socket.SOCK_STREAM, int(self._config.mode, 8), self._config.group)
        self._inode = _identity(self._config.socket)
        self._runner = web.AppRunner(
            admin_app(self._view), access_log=None, handle_signals=False, shutdown_timeout=_CLOSE_S
        )
        await self._runner.setup()
        # Through the loop and not a SockSite of aiohttp, which takes every socket for a TCP one under uvloop.
        protocol = self._runner.server
        assert protocol is not None, "setup() makes it"
        self._server = await asyncio.get_running_loop().create_unix_server(protocol, sock=sock, backlog=_BACKLOG)

    async def stop(self) -> None:
        """Stop listening, end what is under way, and remove the socket if it is still this server's."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._inode is not None and _identity(self._config.socket) == self._inode:
            with contextlib.suppress(OSError):
                os.unlink(self._config.socket)
        self._inode = None


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
