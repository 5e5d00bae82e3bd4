# SPDX-License-Identifier: Apache-2.0
"""The host-to-host API: HTTP between two daemons, server and client.

========  =============  =====================================  ==================================
method    path           body                                   answer
========  =============  =====================================  ==================================
POST      /v1/hello      :class:`~dqplbd.peers.cards.Hello`     ``Hello`` of the other side
POST      /v1/vcs        ``VcRequest``                          ``VcAnswer``
POST      /v1/burst      ``BurstRequest``                       ``BurstLease``
========  =============  =====================================  ==================================

It is plain HTTP without authentication, and so bound to loopback unless ``peers.insecure`` says otherwise.  Everything
that comes in is bounded: bodies, the time to read one, connections, requests under way.  A host's address is where its
request comes from, with the port that it tells; hence the client binds its side to the address that the server listens
on.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar

import aiohttp
from aiohttp import web

from dqplbd.config import split_host_port
from dqplbd.logs import fields
from dqplbd.peers.cards import (
    MAX_BODY_BYTES,
    BurstLease,
    BurstRequest,
    Card,
    CardError,
    Hello,
    Refusal,
    RefusalCode,
    VcAnswer,
    VcRequest,
    parse_card,
)

__all__ = ["ApiHandler", "ApiServer", "PeerClient", "Refused", "Unreachable", "join_host_port"]

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 1024
MAX_UNDER_WAY: Final = 128
BODY_TIMEOUT_S: Final = 5.0
_BACKLOG: Final = 256
_CLOSE_S: Final = 1.0
_CLIENT_CONNECTIONS: Final = 64

_HTTP: Final[dict[RefusalCode, int]] = {
    "malformed": 400,
    "forbidden": 403,
    "version": 409,
    "yield": 409,
    "conflict": 409,
    "epoch": 410,
    "unknown": 412,
    "busy": 429,
    "failed": 500,
}

M = TypeVar("M", bound=Card)


class Refused(Exception):
    """One side refuses what the other asks; raised by handlers, and by the client for the answer of one.

    :ivar code: the kind, for the program.  :ivar text: names the values, for people.
    :ivar epoch: the epoch that the refusing host has now, with code ``epoch``.
    """

    def __init__(self, code: RefusalCode, text: str, epoch: str | None = None) -> None:
        super().__init__(text)
        self.code: RefusalCode = code
        self.text = text
        self.epoch = epoch


class Unreachable(Exception):
    """A peer gave no usable answer; the text says why."""


class _Stale(Unreachable):
    """A connection broke while a request was on it."""


class ApiHandler(Protocol):
    """What the server asks of the daemon; each raises :class:`Refused` to refuse."""

    async def on_hello(self, address: str, hello: Hello) -> Hello:
        """A host at ``address`` (``address:port`` of its own API) introduces itself."""

    async def on_vcs(self, remote: str, request: VcRequest) -> VcAnswer:
        """A host, asking from IP address ``remote``, wants VCs."""

    async def on_burst(self, remote: str, request: BurstRequest) -> BurstLease:
        """A host wants to send a burst that measures the bandwidth to here."""


def join_host_port(host: str, port: int) -> str:
    """``address:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _respond(card: Card, status: int = 200) -> web.Response:
    return web.Response(status=status, text=card.model_dump_json(exclude_none=True), content_type="application/json")


def _refusal(error: Refused) -> web.Response:
    return _respond(Refusal(code=error.code, error=error.text[:2048], epoch=error.epoch), _HTTP[error.code])


class ApiServer:
    """The server.  Belongs to the event loop that starts it."""

    def __init__(self, handler: ApiHandler) -> None:
        self._handler = handler
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._under_way = 0
        self._open = 0
        self.refused_connections = 0

    async def start(self, listen: str) -> tuple[str, int]:
        """Listen at ``address:port``; port 0 takes a free one.

        :returns: the numeric address and the port.
        :raises OSError: the text names the address.
        """
        host, port = split_host_port(listen)
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/v1/hello", self._hello),
                web.post("/v1/vcs", self._vcs),
                web.post("/v1/burst", self._burst),
            ]
        )
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=_CLOSE_S, keepalive_timeout=75.0
        )
        await self._runner.setup()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._protocol, host, port, backlog=_BACKLOG, reuse_address=True
            )
        except OSError as error:
            await self._runner.cleanup()
            self._runner = None
            raise OSError(
                error.errno,
                f"host-to-host API cannot listen at {listen}: {error.strerror or error}; expected a free address of "
                "this host: change peers.listen, or stop what listens there",
            ) from error
        name = self._server.sockets[0].getsockname()
        return str(name[0]), int(name[1])

    def _protocol(self) -> asyncio.BaseProtocol:
        """A protocol for a new connection; one too many is closed at once."""
        assert self._runner is not None, "called by the running server only"
        factory = self._runner.server
        assert factory is not None, "setup() makes it"
        if len(factory.connections) >= MAX_CONNECTIONS:
            self.refused_connections += 1
            return _CloseAtOnce()
        return factory()

    async def stop(self) -> None:
        """Stop listening and end what is under way."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _hello(self, request: web.Request) -> web.StreamResponse:
        async def answer(remote: str, hello: Hello) -> Card:
            return await self._handler.on_hello(join_host_port(remote, hello.api_port), hello)

        return await self._serve(request, Hello, answer)

    async def _vcs(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, VcRequest, self._handler.on_vcs)

    async def _burst(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, BurstRequest, self._handler.on_burst)

    async def _serve(
        self, request: web.Request, model: type[M], answer: Callable[[str, M], Awaitable[Card]]
    ) -> web.StreamResponse:
        if self._under_way >= MAX_UNDER_WAY:
            return _refusal(Refused("busy", f"{MAX_UNDER_WAY} requests are under way on this host; try again later"))
        self._under_way += 1
        try:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    body = await request.read()
            except TimeoutError:
                raise Refused("malformed", f"the body did not arrive within {BODY_TIMEOUT_S} s") from None
            except web.HTTPRequestEntityTooLarge:
                raise Refused("malformed", f"body of more than {MAX_BODY_BYTES} bytes") from None
            return _respond(await answer(request.remote or "", parse_card(model, body)))
        except CardError as error:
            return _refusal(Refused("malformed", str(error)))
        except Refused as error:
            return _refusal(error)
        except Exception:
            log.exception("request of another host failed", extra=fields(path=request.path, remote=request.remote))
            return _refusal(Refused("failed", "the daemon failed to answer; its log has the details"))
        finally:
            self._under_way -= 1


class _CloseAtOnce(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class PeerClient:
    """Asks other hosts.  Belongs to the event loop that makes it.

    :param bind: local address to ask from; None leaves it to the system.
    :param timeout_s: longest wait for an answer.
    """

    def __init__(self, bind: str | None, timeout_s: float) -> None:
        connector = aiohttp.TCPConnector(
            limit=_CLIENT_CONNECTIONS,
            limit_per_host=2,
            local_addr=(bind, 0) if bind is not None else None,
            keepalive_timeout=30.0,
            ttl_dns_cache=10,
        )
        self._timeout_s = timeout_s
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            auto_decompress=False,
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
        )

    def set_timeout(self, timeout_s: float) -> None:
        """Change the longest wait for requests to come."""
        self._timeout_s = timeout_s

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def hello(self, address: str, hello: Hello) -> Hello:
        """Introduce this host.  :raises Refused: the peer does.  :raises Unreachable: no usable answer."""
        return await self._post(address, "/v1/hello", hello, Hello)

    async def vcs(self, address: str, request: VcRequest) -> VcAnswer:
        """Ask for VCs.  :raises Refused: the peer does.  :raises Unreachable: no usable answer."""
        return await self._post(address, "/v1/vcs", request, VcAnswer)

    async def burst(self, address: str, request: BurstRequest) -> BurstLease:
        """Ask to send a burst.  :raises Refused: the peer does.  :raises Unreachable: no usable answer."""
        return await self._post(address, "/v1/burst", request, BurstLease)

    async def _post(self, address: str, path: str, card: Card, model: type[M]) -> M:
        try:
            return await self._post_once(address, path, card, model)
        except _Stale:
            # A kept connection that the other end has closed meanwhile, such as that to a daemon which restarted.
            return await self._post_once(address, path, card, model)

    async def _post_once(self, address: str, path: str, card: Card, model: type[M]) -> M:
        url = f"http://{address}{path}"
        try:
            async with self._session.post(
                url,
                data=card.model_dump_json(exclude_none=True).encode(),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            ) as response:
                body = bytearray()
                async for chunk in response.content.iter_chunked(65536):
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        raise Unreachable(f"{url}: answer of more than {MAX_BODY_BYTES} bytes")
                status = response.status
        except TimeoutError:
            raise Unreachable(f"{url}: no answer within {self._timeout_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(f"{url}: {_reason(error)}") from None
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            raise _Stale(f"{url}: {_reason(error)}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unreachable(f"{url}: {_reason(error)}") from None
        try:
            if status == 200:
                return parse_card(model, bytes(body))
            refusal = parse_card(Refusal, bytes(body))
        except CardError as error:
            raise Unreachable(f"{url}: HTTP {status} with an answer that is none of dqplbd: {error}") from None
        raise Refused(refusal.code, f"{address} refuses: {refusal.error}", refusal.epoch)


def _reason(error: Exception) -> str:
    """The plain cause where the library hides it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror):
            return f"the name cannot be resolved: {cause.strerror}"
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno)
        cause = cause.__cause__ or getattr(cause, "os_error", None)
    return str(error) or type(error).__name__
