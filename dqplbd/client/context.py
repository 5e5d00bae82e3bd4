# SPDX-License-Identifier: Apache-2.0
"""The attachment to the daemon."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from dqplbd.client._shim import ffi, lib
from dqplbd.client.errors import DqplbError, Status, check, last_error
from dqplbd.client.flow import Flow, Listener, handle_of
from dqplbd.client.memory import Memory
from dqplbd.client.request import Request, slice_ms

T = TypeVar("T")

#: How long a blocking operation sleeps before it looks for room again when nothing completes.
_ROOM_MS = 5


@dataclass(frozen=True, slots=True)
class Device:
    """A device of the daemon.

    :ivar provider: ``tcp`` or ``verbs``.
    :ivar pci_path: sysfs path, empty if there is none.
    :ivar speed_bps: bits per second.
    :ivar latency_ns: smallest round trip time measured to any peer; 0: none yet.
    :ivar numa_node: -1: unknown.
    :ivar mtu: bytes.
    :ivar dmabuf: memory of other devices can be registered with it.
    """

    index: int
    name: str
    provider: str
    pci_path: str
    speed_bps: int
    latency_ns: int
    rail: int
    numa_node: int
    mtu: int
    dmabuf: bool
    up: bool


class Context:
    """An attachment to the daemon of this host; everything else is made from it.

    Threads may share one; busy ones are better off with one each.  After a fork the child's calls raise FORKED.

    :param socket: the daemon's client socket; None: ``$DQPLB_SOCKET``, else ``/run/dqplbd/client.sock``.
    :param name: shown by ``dqplb clients``; None: the program's name.
    :param ring_entries: requests that may exist at a time; a power of two of 64..65536, 0: 4096.
    :param spin_us: busy-wait this long before sleeping; at most 1,000,000; 0: chosen from the CPUs there are.
    :raises DqplbError: DAEMON (not running), PERMISSION, VERSION, INVALID (an argument), LIMIT.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        ring_entries: int = 0,
        spin_us: int = 0,
    ) -> None:
        self._pointer: Any = None
        for what, value in (("ring_entries", ring_entries), ("spin_us", spin_us)):
            if not 0 <= value < 1 << 32:
                raise DqplbError(Status.INVALID, f"{what} is {value}, expected 0 to 2**32 - 1")
        options = ffi.new("dqplb_options *")
        path = ffi.NULL if socket is None else ffi.new("char[]", _c_string("socket", os.fsencode(socket)))
        title = ffi.NULL if name is None else ffi.new("char[]", _c_string("name", name.encode()))
        options.size = ffi.sizeof("dqplb_options")
        options.socket = path
        options.name = title
        options.ring_entries = ring_entries
        options.spin_us = spin_us
        out = ffi.new("dqplb_context **")
        check(lib.dqplb_open(options, out))
        self._pointer = out[0]
        self._lock = threading.Lock()
        self._requests: set[Request[Any]] = set()
        self._flows: set[Flow] = set()
        self._listeners: set[Listener] = set()
        self._memories: set[Memory] = set()

    # -- life

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._pointer is None

    def _live(self) -> Any:
        if self._pointer is None:
            raise DqplbError(Status.INVALID, "context: it was closed")
        return self._pointer

    def close(self) -> None:
        """Close every flow and detach; at most about a second.  A second call does nothing.

        No other thread may be in a call on this context.  Views of shared memory stay readable: the memory goes when
        the last of them does.
        """
        if self._pointer is None:
            return
        for listener in list(self._listeners):
            listener.close()
        for flow in list(self._flows):
            flow.close()
        pointer, self._pointer = self._pointer, None
        buffers = [buffer for buffer in (memory.live_buffer() for memory in self._memories) if buffer is not None]
        for memory in self._memories:
            memory.forget()
        self._memories.clear()
        _close_after(pointer, buffers)
        del buffers
        # Only now: they keep alive what the library copies into.
        for request in list(self._requests):
            request.test()

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._pointer is not None:
            self.close()

    def __repr__(self) -> str:
        return f"<Context: {'closed' if self.closed else 'open'}>"

    # -- devices

    @property
    def devices(self) -> list[Device]:
        """The daemon's devices as they are now.

        :raises DqplbError: DAEMON.
        """
        count = lib.dqplb_device_count(self._live())
        if count < 0:
            raise last_error(count)
        devices = []
        out = ffi.new("dqplb_device *")
        for index in range(count):
            check(lib.dqplb_device_query(self._live(), index, out))
            devices.append(
                Device(
                    index=index,
                    name=_text(out.name),
                    provider=_text(out.provider),
                    pci_path=_text(out.pci_path),
                    speed_bps=out.speed_bps,
                    latency_ns=out.latency_ns,
                    rail=out.rail,
                    numa_node=out.numa_node,
                    mtu=out.mtu,
                    dmabuf=bool(out.dmabuf),
                    up=bool(out.up),
                )
            )
        return devices

    # -- memory

    def allocate(self, size: int) -> Memory:
        """Memory shared with the daemon: zero filled, page aligned, never copied.

        :param size: bytes, at least 1.
        :raises DqplbError: NOMEM (memory, quota), INVALID, DAEMON.
        """
        if not 0 < size < 1 << 63:
            raise DqplbError(Status.INVALID, f"allocate: {size} bytes, expected at least 1")
        out = ffi.new("dqplb_mem **")
        check(lib.dqplb_mem_alloc(self._live(), size, out))
        return self._add_memory(Memory(self, out[0], None, readonly=False))

    def register(self, buffer: Any) -> Memory:
        """Memory of the program: any object with a contiguous buffer.  Copied through staging memory.

        The object is kept, and kept from being resized, until the memory is freed.

        :raises DqplbError: NOMEM (staging memory, quota), INVALID (empty), DAEMON.
        :raises TypeError: no buffer.
        """
        readonly = memoryview(buffer).readonly
        owner = ffi.from_buffer("unsigned char[]", buffer, require_writable=not readonly)
        out = ffi.new("dqplb_mem **")
        if len(owner) == 0:
            raise DqplbError(Status.INVALID, "register: the buffer is empty")
        check(lib.dqplb_mem_register(self._live(), owner, len(owner), out))
        return self._add_memory(Memory(self, out[0], owner, readonly=readonly))

    def register_dmabuf(self, fd: int, size: int, offset: int = 0) -> Memory:
        """Memory of a GPU or another device, exported as a dma-buf; ``fd`` may be closed after the call.

        :raises DqplbError: DEVICE (not possible with this device), INVALID, DAEMON.
        """
        if not 0 < size < 1 << 63 or not 0 <= offset < 1 << 63:
            raise DqplbError(
                Status.INVALID, f"register_dmabuf: {size} bytes at {offset}, expected at least 1 at 0 or more"
            )
        out = ffi.new("dqplb_mem **")
        check(lib.dqplb_mem_register_dmabuf(self._live(), fd, offset, size, out))
        return self._add_memory(Memory(self, out[0], None, readonly=False))

    def _add_memory(self, memory: Memory) -> Memory:
        self._memories.add(memory)
        return memory

    # -- connections

    def listen(self, device: int = 0) -> Listener:
        """Accept flows on a device.

        :raises DqplbError: INVALID (no such device), DAEMON, AGAIN.
        """
        handle = ffi.new("dqplb_handle *")
        out = ffi.new("dqplb_listener **")
        check(lib.dqplb_listen(self._live(), device, handle, out))
        listener = Listener(self, out[0], bytes(ffi.buffer(handle)))
        self._listeners.add(listener)
        return listener

    def connect(self, handle: bytes | bytearray | memoryview, device: int = 0, *, block: bool = True) -> Request[Flow]:
        """Connect to a listener; done when it accepted.  The result is the flow.

        :param handle: the 128 bytes of :attr:`Listener.handle`.
        :raises DqplbError: INVALID (handle, device), VERSION, DAEMON, AGAIN when not blocking.
        """
        raw = handle_of(handle)
        return self.begin(lambda out: int(lib.dqplb_connect(self._live(), device, raw, out)), (), self.flow_of, block)

    # -- completion

    def hint(self, peers: int, flows_per_peer: int = 0) -> bool:
        """Tell the daemon how many peers are going to be in use at a time; it gives each path queue pairs accordingly.

        :param peers: 0..2**32 - 1; 0 for no idea.  :param flows_per_peer: likewise.
        :returns: whether it was told; not when the one before is not answered yet: call again.
        :raises DqplbError: INVALID (a number out of range), DAEMON.
        """
        for name, value in (("peers", peers), ("flows_per_peer", flows_per_peer)):
            if not 0 <= value < 1 << 32:
                raise DqplbError(Status.INVALID, f"{name} is {value}, expected 0 to 2**32 - 1")
        status = lib.dqplb_hint(self._live(), peers, flows_per_peer)
        if status == Status.AGAIN:
            return False
        check(status)
        return True

    def wait_any(self, timeout: float | None = None) -> bool:
        """Wait until any request of this context completed since the last call.

        :param timeout: seconds; None: no limit.
        :return: whether one did.
        :raises DqplbError: DAEMON.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            status = lib.dqplb_wait_any(self._live(), slice_ms(deadline))
            if status != lib.DQPLB_ERR_TIMEOUT:
                check(status)
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    # -- for the other classes of this package

    def begin(
        self, call: Callable[[Any], int], keep: tuple[object, ...], convert: Callable[[Any], T], block: bool
    ) -> Request[T]:
        """Begin an operation: ``call`` it with the place for its request; wait for room when there is none."""
        out = ffi.new("dqplb_request **")
        while True:
            self._live()
            status = call(out)
            if status != lib.DQPLB_ERR_AGAIN:
                check(status)
                request = Request(self, out[0], keep, convert)
                with self._lock:
                    self._requests.add(request)
                return request
            error = last_error(status)
            if self._reap():
                continue
            if not block:
                raise error
            status = lib.dqplb_wait_any(self._live(), _ROOM_MS)
            if status != lib.DQPLB_ERR_TIMEOUT:
                check(status)

    def _reap(self) -> bool:
        """Take the results of requests that nobody waits for; whether there were any."""
        with self._lock:
            requests = list(self._requests)
        return sum(request.test() for request in requests) > 0

    def flow_of(self, result: Any) -> Flow:
        """The flow of a finished connect or accept."""
        flow = Flow(self, result.flow)
        self._flows.add(flow)
        return flow

    def remove_request(self, request: Request[Any]) -> None:
        """It is done."""
        with self._lock:
            self._requests.discard(request)

    def remove_flow(self, flow: Flow) -> None:
        """It was closed."""
        self._flows.discard(flow)

    def remove_listener(self, listener: Listener) -> None:
        """It was closed."""
        self._listeners.discard(listener)

    def remove_memory(self, memory: Memory) -> None:
        """It was freed."""
        self._memories.discard(memory)


def _close_after(pointer: Any, buffers: list[Any]) -> None:
    """Close the library's context once the last of ``buffers`` is gone."""
    if not buffers:
        lib.dqplb_close(pointer)
        return
    left = len(buffers)
    lock = threading.Lock()

    def one_gone() -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            lib.dqplb_close(pointer)

    for buffer in buffers:
        # Not at exit: views may be used until the very end, and the end of the process detaches, too.
        weakref.finalize(buffer, one_gone).atexit = False


def _c_string(what: str, raw: bytes) -> bytes:
    if not raw or b"\0" in raw:
        raise DqplbError(Status.INVALID, f"{what} is {raw!r}, expected text without NUL characters")
    return raw


def _text(cdata: Any) -> str:
    raw: bytes = ffi.string(cdata)
    return raw.decode("utf-8", "replace")
