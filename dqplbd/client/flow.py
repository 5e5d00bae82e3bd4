# SPDX-License-Identifier: Apache-2.0
"""Listeners and flows."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from dqplbd.client._shim import ffi, lib
from dqplbd.client.errors import DqplbError, Status, check
from dqplbd.client.memory import Memory
from dqplbd.client.request import Notification, Received, Request

if TYPE_CHECKING:
    from dqplbd.client.context import Context

T = TypeVar("T")

_U64 = 1 << 64
#: Closing what is no longer, or never was, of this process: its daemon is gone, or it is a child after a fork.
_NOTHING_LEFT = (lib.DQPLB_ERR_DAEMON, lib.DQPLB_ERR_FORKED)


class Flow:
    """One connection to another client.  Made by :meth:`Context.connect` and :meth:`Listener.accept`.

    Every operation returns a :class:`Request` at once.  Where there is no room for it (ring, staging memory) the call
    waits for room; with ``block=False`` it raises :class:`DqplbError` with AGAIN.
    """

    def __init__(self, context: Context, pointer: Any) -> None:
        self._context = context
        self._pointer: Any = pointer

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called here, or the context closed."""
        return self._pointer is None

    def _begin(
        self,
        call: Callable[..., int],
        arguments: tuple[Any, ...],
        keep: tuple[object, ...],
        convert: Callable[[Any], T],
        block: bool,
    ) -> Request[T]:
        def begin(out: Any) -> int:
            if self._pointer is None:
                raise DqplbError(Status.INVALID, "flow: it was closed")
            return call(self._pointer, *arguments, out)

        return self._context.begin(begin, (self, *keep), convert, block)

    def send(
        self, memory: Memory, offset: int = 0, size: int | None = None, *, tag: int = 0, block: bool = True
    ) -> Request[int]:
        """Send ``size`` bytes (None: all from ``offset`` on); the result is that number, once the peer has them.

        :param tag: 64 bits; chooses the receive at the other end.
        :raises DqplbError: INVALID (range, closed flow), DAEMON, AGAIN when not blocking.
        """
        offset, size = _range(memory, offset, size)
        return self._begin(
            lib.dqplb_send, (memory.pointer, offset, size, _u64("tag", tag)), (memory,), _bytes_of, block
        )

    def recv(
        self, memory: Memory, offset: int = 0, size: int | None = None, *, tag: int = 0, block: bool = True
    ) -> Request[Received]:
        """Receive a message with ``tag`` into at most ``size`` bytes (None: all from ``offset`` on).

        :raises DqplbError: INVALID (range, closed flow, read-only memory), DAEMON, AGAIN when not blocking.
        """
        if memory.readonly:
            raise DqplbError(Status.INVALID, "recv: the buffer of this memory is read-only")
        offset, size = _range(memory, offset, size)
        return self._begin(
            lib.dqplb_recv, (memory.pointer, offset, size, _u64("tag", tag)), (memory,), _received, block
        )

    def export(self, memory: Memory, offset: int = 0, size: int | None = None, *, block: bool = True) -> Request[int]:
        """Let the peer of this flow put into this range; the result is the region, to be told to the peer.

        :raises DqplbError: INVALID, also for memory of :meth:`Context.register`; DAEMON; AGAIN when not blocking.
        """
        offset, size = _range(memory, offset, size)
        return self._begin(lib.dqplb_export, (memory.pointer, offset, size), (memory,), _region, block)

    def unexport(self, region: int, *, block: bool = True) -> Request[None]:
        """Withdraw a region; once done nobody will write there any more."""
        return self._begin(lib.dqplb_unexport, (_u32("region", region),), (), _nothing, block)

    def put(
        self,
        region: int,
        remote_offset: int,
        memory: Memory,
        offset: int = 0,
        size: int | None = None,
        *,
        cookie: int = 0,
        block: bool = True,
    ) -> Request[int]:
        """Write ``size`` bytes into a region that the peer exported, and notify it; the result is that number.

        :param remote_offset: bytes from the start of the region.
        :param cookie: 64 bits that arrive with the notification.
        :raises DqplbError: INVALID, DAEMON, AGAIN when not blocking.
        """
        offset, size = _range(memory, offset, size)
        arguments = (
            _u32("region", region),
            _u64("remote_offset", remote_offset),
            memory.pointer,
            offset,
            size,
            _u64("cookie", cookie),
        )
        return self._begin(lib.dqplb_put, arguments, (memory,), _bytes_of, block)

    def notify(self, *, block: bool = True) -> Request[Notification]:
        """Done when a put of the peer has arrived in full."""
        return self._begin(lib.dqplb_notify, (), (), _notification, block)

    def close(self) -> None:
        """Close it: pending requests end with CANCELED, the peer's with CLOSED.  A second call does nothing."""
        if self._pointer is None:
            return
        pointer, self._pointer = self._pointer, None
        if self._context.closed:
            return
        self._context.remove_flow(self)
        status = lib.dqplb_flow_close(pointer)
        if status not in _NOTHING_LEFT:
            check(status)

    def forget(self) -> None:
        """For :class:`Context`: the library's object ended with the context."""
        self._pointer = None

    def __enter__(self) -> Flow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Flow: {'closed' if self.closed else 'open'}>"


class Listener:
    """Accepts flows.  Made by :meth:`Context.listen`.

    :ivar handle: 128 bytes by which any host reaches it.
    """

    def __init__(self, context: Context, pointer: Any, handle: bytes) -> None:
        self._context = context
        self._pointer: Any = pointer
        self.handle = handle

    def accept(self, *, block: bool = True) -> Request[Flow]:
        """Done when somebody connected; the result is the flow.

        :raises DqplbError: INVALID (closed), DAEMON, what the daemon said to listening, AGAIN when not blocking.
        """

        def begin(out: Any) -> int:
            if self._pointer is None:
                raise DqplbError(Status.INVALID, "listener: it was closed")
            return int(lib.dqplb_accept(self._pointer, out))

        return self._context.begin(begin, (self,), self._context.flow_of, block)

    def close(self) -> None:
        """Accept nobody any more: pending accepts end with CANCELED.  A second call does nothing."""
        if self._pointer is None:
            return
        pointer, self._pointer = self._pointer, None
        if self._context.closed:
            return
        self._context.remove_listener(self)
        status = lib.dqplb_listener_close(pointer)
        if status not in _NOTHING_LEFT:
            check(status)

    def forget(self) -> None:
        """For :class:`Context`: the library's object ended with the context."""
        self._pointer = None

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Listener: {'closed' if self._pointer is None else self.handle[:32].hex()}>"


def handle_of(raw: bytes | bytearray | memoryview) -> Any:
    """The library's form of a handle.

    :raises DqplbError: not 128 bytes (INVALID).
    """
    data = bytes(raw)
    handle = ffi.new("dqplb_handle *")
    if len(data) != ffi.sizeof("dqplb_handle"):
        raise DqplbError(Status.INVALID, f"handle: {len(data)} bytes, expected {ffi.sizeof('dqplb_handle')}")
    ffi.memmove(handle, data, len(data))
    return handle


def _range(memory: Memory, offset: int, size: int | None) -> tuple[int, int]:
    if size is None:
        size = memory.size - offset
    if offset < 0 or size < 0 or offset + size > memory.size:
        raise DqplbError(
            Status.INVALID, f"offset {offset} and {size} bytes lie outside of memory of {memory.size} bytes"
        )
    return offset, size


def _u64(what: str, value: int) -> int:
    if not 0 <= value < _U64:
        raise DqplbError(Status.INVALID, f"{what} is {value}, expected 0 to 2**64 - 1")
    return value


def _u32(what: str, value: int) -> int:
    if not 0 <= value < 1 << 32:
        raise DqplbError(Status.INVALID, f"{what} is {value}, expected 0 to 2**32 - 1")
    return value


def _bytes_of(result: Any) -> int:
    return int(result.bytes)


def _received(result: Any) -> Received:
    return Received(bytes=result.bytes, tag=result.tag)


def _region(result: Any) -> int:
    return int(result.region)


def _nothing(result: Any) -> None:
    return None


def _notification(result: Any) -> Notification:
    return Notification(region=result.region, offset=result.offset, bytes=result.bytes, cookie=result.cookie)
