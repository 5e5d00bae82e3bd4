# SPDX-License-Identifier: Apache-2.0
"""The attach socket: lets processes of this host in, within limits, and hands them their shared memory.

The messages are those of ``native/shim/layout.h``: one datagram is one request, one datagram is its reply, one request
of a client at a time.  Whoever may open the socket is let in; the kernel says who it is (SO_PEERCRED).  Everything that
a client sends is checked, and what it does wrong ends its own connection at worst: a datagram that is no request, or a
reply that it does not fetch, cuts it off; a request that cannot be carried out gets a status and a text.

A descriptor that comes with a datagram is closed when the request is done, whatever becomes of it.
"""

import array
import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from dqplbd.clients.quota import Quota, QuotaError
from dqplbd.clients.room import RoomError, RoomKeeper
from dqplbd.config.models import ClientsConfig
from dqplbd.engine.engine import (
    DEFAULT_RING_ENTRIES,
    LAYOUT_VERSION,
    MAX_RING_ENTRIES,
    MIN_RING_ENTRIES,
    REQUEST_BYTES,
    ClientRequest,
    DeviceInfo,
    DeviceSpec,
    Engine,
    EngineError,
    RequestError,
    RequestType,
    Status,
    pack_device_infos,
    pack_reply,
    parse_request,
)
from dqplbd.logs import fields
from dqplbd.unixsocket import bind_unix, remove_unix

__all__ = ["ClientRecord", "ClientServer", "clean_name"]

log = logging.getLogger(__name__)

DeviceList = Callable[[], Sequence[tuple[DeviceInfo, DeviceSpec, int]]]

ATTACH_TIMEOUT_S: Final = 5.0
"""A connection that has not attached by then is closed."""
_BACKLOG: Final = 128
_ACCEPTS_AT_ONCE: Final = 16
_WAITING_ROOM: Final = 32  # connections that have not attached, beside the clients
_MAX_FDS: Final = 16  # taken out of a datagram so that they can be closed; the kernel drops what is beyond
_CALM_S: Final = 0.2  # pause in accepting when descriptors run out
_SLOW_BYTES: Final = 4 << 20  # allocating more than this is done off the event loop
_UCRED: Final = struct.Struct("3i")  # pid, uid, gid: struct ucred, unix(7)
_NAME_BYTES: Final = 63
_MAX_U32: Final = 2**32 - 1


def clean_name(name: str, pid: int) -> str:
    """A client's name as it may be shown: printable ASCII, at most 63 characters; ``pid-N`` when nothing is left."""
    text = "".join(c if c.isascii() and c.isprintable() else "_" for c in name.strip())[:_NAME_BYTES]
    return text if text.strip("_ ") else f"pid-{pid}"


@dataclass(frozen=True, slots=True)
class ClientRecord:
    """An attached process.

    :ivar client: its number in the engine.  :ivar attached_s: when it attached, monotonic.
    :ivar leaving: it is gone, and is being cleaned up after.
    """

    client: int
    name: str
    pid: int
    uid: int
    gid: int
    attached_s: float
    leaving: bool


@dataclass(slots=True, eq=False)
class _Connection:
    sock: socket.socket
    pid: int
    uid: int
    gid: int
    internal: bool = False  # the daemon's own, which no limit counts
    peer_pid: int = 0  # as the kernel says; 0: of another PID namespace
    hint: tuple[int, int] = (0, 0)  # peers, and flows to each, that it expects to use at a time
    timer: asyncio.TimerHandle | None = None
    client: int | None = None
    name: str = ""
    attached_s: float = 0.0
    regions: set[int] = field(default_factory=set)
    closed: bool = False

    def __str__(self) -> str:
        return f"client {self.client} {self.name}" if self.client is not None else f"process {self.pid}"


class _Cut(Exception):
    """The connection must be closed; the text says why."""


@dataclass(slots=True)
class _Reply:
    """What to send: the datagram, and descriptors that are closed afterwards; ``close``: end the connection then."""

    data: bytes
    fds: list[int] = field(default_factory=list)
    close: bool = False


class ClientServer:
    """The attach socket and the clients behind it.  Belongs to the event loop that starts it.

    :param devices: gives the devices for a reply to DEVICES.
    :param drain_events: makes the daemon take in all events that the engine has told until now.
    :param clock: monotonic seconds.
    :param internal: name of the clients of this very process that do not count against any limit.
    :param expect_peers: told how many peers clients expect to use at a time, 0 for no idea, when that changes.
    """

    def __init__(
        self,
        engine: Engine,
        config: ClientsConfig,
        devices: DeviceList,
        drain_events: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        internal: str | None = None,
        expect_peers: Callable[[int], None] = lambda peers: None,
    ) -> None:
        self._engine = engine
        self._internal = internal
        self._expect_peers = expect_peers
        self._expected_peers = 0
        self._config = config
        self._quota = Quota(config)
        self._room = RoomKeeper()
        self._devices = devices
        self._drain_events = drain_events
        self._clock = clock
        self._listener: socket.socket | None = None
        self._connections: set[_Connection] = set()
        self._clients: dict[int, _Connection] = {}
        self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="dqplbd-memory")
        self._tasks: set[asyncio.Task[None]] = set()
        self._gone = asyncio.Event()
        self._stopping = False
        self.attached_total = 0
        self.refused_total = 0

    # -- life

    def start(self) -> None:
        """Listen.  :raises OSError: the socket cannot be made; the text names it."""
        sock = bind_unix(self._config.socket, socket.SOCK_SEQPACKET, int(self._config.mode, 8), self._config.group)
        sock.listen(_BACKLOG)
        self._listener = sock
        self._loop.add_reader(sock.fileno(), self._accept)

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def configure(self, config: ClientsConfig) -> None:
        """New limits, for what comes from now on; the socket stays as it is."""
        self._config = config
        self._quota.configure(config)

    def stop_accepting(self) -> None:
        """Let nobody in any more, and remove the socket; those who are in stay."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            remove_unix(self._config.socket)
        for connection in [one for one in self._connections if one.client is None]:
            self._close(connection)

    async def stop(self, timeout_s: float = 2.0) -> None:
        """Let everybody go, and wait until the engine has cleaned up after them, at most ``timeout_s``.

        Clients and peers are told that the daemon stops.
        """
        self.stop_accepting()
        self._stopping = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        self._engine.part()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._clients:
                    self._gone.clear()
                    await self._gone.wait()
        for connection in list(self._connections):
            self._close(connection, removed=True)
        # Its threads call the engine, which is about to go.
        self._executor.shutdown(cancel_futures=True)

    # -- what others ask

    def __len__(self) -> int:
        return len(self._clients)

    def records(self) -> list[ClientRecord]:
        """The attached clients, also those that are being cleaned up after."""
        return [
            ClientRecord(client, one.name, one.pid, one.uid, one.gid, one.attached_s, one.closed)
            for client, one in self._clients.items()
        ]

    def on_cut(self, client: int, text: str) -> None:
        """The engine cut a client off: it broke the protocol."""
        connection = self._clients.get(client)
        if connection is None:
            return
        log.log(
            logging.INFO if self._stopping else logging.WARNING,
            "client cut off: %s",
            text,
            extra=fields(client=client, name=connection.name, pid=connection.pid),
        )
        self._close(connection, removed=True)

    def on_gone(self, client: int) -> None:
        """The engine has released everything of a client."""
        connection = self._clients.pop(client, None)
        if connection is None:
            return
        self._leave(connection)
        self._close(connection, removed=True)
        self._tell_hints()
        self._gone.set()
        log.info("client gone", extra=fields(client=client, name=connection.name, pid=connection.pid))

    # -- connections

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            if self._listener is None:
                return
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors: the listener stays readable, so without a pause this would spin.
                log.error("cannot accept a client: %s", error.strerror or error)
                listener = self._listener
                self._loop.remove_reader(listener.fileno())
                self._loop.call_later(_CALM_S, self._resume, listener)
                return
            self._welcome(sock)

    def _resume(self, listener: socket.socket) -> None:
        if self._listener is listener:
            self._loop.add_reader(listener.fileno(), self._accept)

    def _welcome(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        except OSError:
            sock.close()
            return
        if len(self._connections) >= self._config.max_clients + _WAITING_ROOM:
            self.refused_total += 1
            log.warning("connection refused: %d are open", len(self._connections), extra=fields(pid=pid, uid=uid))
            sock.close()
            return
        connection = _Connection(sock, pid, uid, gid, peer_pid=pid)
        connection.timer = self._loop.call_later(ATTACH_TIMEOUT_S, self._too_late, connection)
        self._connections.add(connection)
        self._loop.add_reader(sock.fileno(), self._readable, connection)

    def _too_late(self, connection: _Connection) -> None:
        if connection.client is None and not connection.closed:
            log.warning("no attach within %s s", ATTACH_TIMEOUT_S, extra=fields(pid=connection.pid))
            self._close(connection)

    def _close(self, connection: _Connection, *, removed: bool = False) -> None:
        """Close a connection and begin to clean up after its client, unless the engine does already (``removed``)."""
        if connection.closed:
            return
        connection.closed = True
        if connection.timer is not None:
            connection.timer.cancel()
        self._loop.remove_reader(connection.sock.fileno())
        connection.sock.close()
        self._connections.discard(connection)
        if connection.client is not None and not removed:
            try:
                self._engine.client_remove(connection.client)
            except EngineError as error:
                log.error("client cannot be removed: %s", error, extra=fields(client=connection.client))
                self.on_gone(connection.client)

    def _readable(self, connection: _Connection) -> None:
        """Serve one request.  Nothing that a client does gets beyond here."""
        fds: list[int] = []
        try:
            request = self._receive(connection, fds)
            if request is None:
                self._close(connection)
                return
            slow = request.type is RequestType.MEM_SHARE or (
                request.type is RequestType.MEM_ALLOC and request.arg0 > _SLOW_BYTES
            )
            if slow and connection.client is not None:
                self._loop.remove_reader(connection.sock.fileno())
                task = self._loop.create_task(self._answer_slowly(connection, request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                return
            self._send(connection, self._answer(connection, request, fds))
        except (BlockingIOError, InterruptedError):
            return
        except _Cut as error:
            log.warning("%s cut off: %s", connection, error, extra=fields(pid=connection.pid, uid=connection.uid))
            self._close(connection)
        except OSError as error:
            log.info("%s: connection lost: %s", connection, error.strerror or error)
            self._close(connection)
        except Exception:
            log.exception("request of %s failed", connection)
            self._close(connection)
        finally:
            for fd in fds:
                os.close(fd)

    def _receive(self, connection: _Connection, fds: list[int]) -> ClientRequest | None:
        """The next request, its descriptors appended to ``fds``; None when the client is gone."""
        data, ancillary, flags, _ = connection.sock.recvmsg(
            REQUEST_BYTES + 1, socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                fds.extend(numbers)
        if not data:
            return None
        if flags & socket.MSG_CTRUNC:
            raise _Cut(f"more than {_MAX_FDS} file descriptors in one request; at most one is expected")
        try:
            request = parse_request(data)
        except RequestError as error:
            raise _Cut(str(error)) from None
        expected = 1 if request.type is RequestType.MEM_DMABUF else 0
        if len(fds) != expected:
            raise _Cut(f"{request.type.name} with {len(fds)} file descriptors; expected {expected}")
        return request

    def _send(self, connection: _Connection, reply: _Reply) -> None:
        """Send a reply and close its descriptors."""
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", reply.fds))] if reply.fds else []
            connection.sock.sendmsg([reply.data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise _Cut("it does not fetch its replies") from None
        finally:
            for fd in reply.fds:
                os.close(fd)
        if reply.close:
            self._close(connection)

    # -- requests

    def _answer(self, connection: _Connection, request: ClientRequest, fds: list[int]) -> _Reply:
        kind = request.type
        if kind is RequestType.ATTACH:
            return self._attach(connection, request)
        client = connection.client
        if client is None:
            raise _Cut(f"{kind.name} before ATTACH")
        try:
            if kind is RequestType.DEVICES:
                devices = self._devices()
                args = [len(devices), self._config.max_flows]
                return _Reply(pack_reply(kind, args=args) + pack_device_infos(devices))
            if kind is RequestType.HINT:
                return self._hint(connection, request)
            if kind is RequestType.MEM_FREE:
                return self._free(connection, client, request.arg0)
            self._quota.check_regions(len(connection.regions))
            if kind is RequestType.MEM_DMABUF:
                memory = self._engine.mem_dmabuf(client, fds[0], request.arg1, request.arg0)
                connection.regions.add(memory)
                return _Reply(pack_reply(kind, args=[memory]))
            return self._allocated(connection, request, self._allocate(client, request))
        except EngineError as error:
            return _Reply(pack_reply(kind, error.status, text=error.text))
        except QuotaError as error:
            return _Reply(pack_reply(kind, Status.LIMIT, text=str(error)))

    def _attach(self, connection: _Connection, request: ClientRequest) -> _Reply:
        if connection.client is not None:
            raise _Cut("ATTACH a second time")

        def refuse(status: Status, text: str) -> _Reply:
            self.refused_total += 1
            log.warning(
                "attach refused: %s", text, extra=fields(pid=connection.pid, uid=connection.uid, status=status.name)
            )
            return _Reply(pack_reply(request.type, status, text=text), close=True)

        if not request.arg0 <= LAYOUT_VERSION <= request.arg1:
            return refuse(
                Status.VERSION,
                f"the daemon speaks layout version {LAYOUT_VERSION}, the client {request.arg0}..{request.arg1}: "
                "use the library that came with the daemon",
            )
        entries = request.arg2 or DEFAULT_RING_ENTRIES
        if not MIN_RING_ENTRIES <= entries <= MAX_RING_ENTRIES or entries & (entries - 1):
            return refuse(
                Status.INVALID,
                f"ring of {entries} entries; expected a power of two of {MIN_RING_ENTRIES}..{MAX_RING_ENTRIES}",
            )
        try:
            self._enter(connection, request.name)
        except QuotaError as error:
            return refuse(Status.LIMIT, str(error))
        # 0: a process of another PID namespace; its own word is better than nothing, and nothing depends on it.
        pid = connection.pid or min(request.arg3, 2**31 - 1)
        name = clean_name(request.name, pid)
        try:
            attached = self._engine.client_add(
                name,
                min(entries, self._config.max_ring_entries),
                self._config.max_memory_bytes,
                self._config.max_flows,
            )
        except EngineError as error:
            self._leave(connection)
            return refuse(error.status, error.text)
        # Numbers are used again: what the engine has told of an older client of this number must be taken in first.
        self._drain_events()
        connection.client, connection.name, connection.attached_s = attached.client, name, self._clock()
        connection.pid = pid
        self._clients[attached.client] = connection
        fds = [attached.memfd, attached.eventfd]
        try:
            handle = self._engine.client_handle(attached.client)
        except EngineError:
            for fd in fds:
                os.close(fd)
            raise
        if connection.timer is not None:
            connection.timer.cancel()
            connection.timer = None
        self.attached_total += 1
        log.info(
            "client attached",
            extra=fields(client=attached.client, name=name, pid=pid, uid=connection.uid, gid=connection.gid),
        )
        args = [LAYOUT_VERSION, attached.client, min(entries, self._config.max_ring_entries), attached.memfd_bytes]
        return _Reply(pack_reply(request.type, args=args, handle=handle), fds)

    def _enter(self, connection: _Connection, name: str) -> None:
        """:raises QuotaError: no room.  The daemon's own clients, which measure, take nobody's place."""
        connection.internal = connection.pid == os.getpid() and name == self._internal
        if not connection.internal:
            self._quota.enter(connection.uid)

    def _leave(self, connection: _Connection) -> None:
        if not connection.internal:
            self._quota.leave(connection.uid)

    def _allocate(self, client: int, request: ClientRequest) -> tuple[int, int, int]:
        if request.arg1 > 1:
            raise EngineError(22, f"MEM_ALLOC with arg1 {request.arg1}; expected 0, or 1 for staging")
        size, staging = request.arg0, request.arg1 == 1
        if size > self._config.max_memory_bytes:
            return self._engine.mem_alloc(client, size, staging=staging)  # it says best why not
        try:
            with self._room.take(size):
                return self._engine.mem_alloc(client, size, staging=staging)
        except RoomError as error:
            raise EngineError(errno.ENOMEM, str(error)) from None

    def _allocated(self, connection: _Connection, request: ClientRequest, result: tuple[int, int, int]) -> _Reply:
        memory, fd, mapped = result
        connection.regions.add(memory)
        return _Reply(pack_reply(request.type, args=[memory, mapped]), [fd])

    async def _answer_slowly(self, connection: _Connection, request: ClientRequest) -> None:
        """What could hold everyone up: touching or mapping many pages.  Meanwhile nothing else of it is read."""
        client = connection.client
        assert client is not None, "checked by the caller"
        reply: _Reply | None = None
        try:
            self._quota.check_regions(len(connection.regions))
            if request.type is RequestType.MEM_SHARE:
                reply = await self._share(connection, client, request)
            else:
                result = await self._loop.run_in_executor(self._executor, self._allocate, client, request)
                reply = self._allocated(connection, request, result)
        except EngineError as error:
            reply = _Reply(pack_reply(request.type, error.status, text=error.text))
        except QuotaError as error:
            reply = _Reply(pack_reply(request.type, Status.LIMIT, text=str(error)))
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("request of %s failed", connection)
            self._close(connection)
            return
        if connection.closed:  # cut off meanwhile; the engine takes the memory back
            for fd in reply.fds:
                os.close(fd)
            return
        try:
            self._send(connection, reply)
        except (_Cut, OSError) as error:
            log.info("%s: reply not delivered: %s", connection, error)
            self._close(connection)
            return
        self._loop.add_reader(connection.sock.fileno(), self._readable, connection)

    async def _share(self, connection: _Connection, client: int, request: ClientRequest) -> _Reply:
        """Memory of another client of the same process: what one may write, the other may anyway."""
        owner, memory = request.arg0, request.arg1
        other = self._clients.get(owner)
        text = f"memory {memory} of client {owner} is not of this process: only a process itself can share its memory"
        refused = _Reply(pack_reply(request.type, Status.PERMISSION, text=text))

        # A process of another PID namespace has the number 0, as all such have: they cannot be told apart.
        process = self._process(connection)
        if other is None or process is None or self._process(other) != process or memory not in other.regions:
            return refused
        shared, size = await self._loop.run_in_executor(self._executor, self._engine.mem_share, client, owner, memory)
        if self._clients.get(owner) is not other or memory not in other.regions:
            # It went meanwhile, and its numbers may be somebody else's by now.
            self._engine.mem_free(client, shared)
            return refused
        connection.regions.add(shared)
        return _Reply(pack_reply(request.type, args=[shared, size]))

    @staticmethod
    def _process(connection: _Connection) -> tuple[int, int, int] | None:
        """Who the kernel says that the other end is; None when it cannot."""
        return None if connection.peer_pid <= 0 else (connection.peer_pid, connection.uid, connection.gid)

    def _hint(self, connection: _Connection, request: ClientRequest) -> _Reply:
        connection.hint = min(request.arg0, _MAX_U32), min(request.arg1, _MAX_U32)
        self._tell_hints()
        return _Reply(pack_reply(request.type))

    def _tell_hints(self) -> None:
        """The largest hint of all clients: processes of a job have the same peers, which a sum would count often."""
        peers = max((one.hint[0] for one in self._clients.values()), default=0)
        if peers != self._expected_peers:
            self._expected_peers = peers
            self._expect_peers(peers)

    def _free(self, connection: _Connection, client: int, memory: int) -> _Reply:
        if memory > _MAX_U32 or memory not in connection.regions:
            text = f"memory {memory} is not registered by this client"
            return _Reply(pack_reply(RequestType.MEM_FREE, Status.INVALID, text=text))
        self._engine.mem_free(client, memory)
        connection.regions.discard(memory)
        return _Reply(pack_reply(RequestType.MEM_FREE))
