# SPDX-License-Identifier: Apache-2.0
"""The two ends of a burst: ordinary clients of this host's daemon, each in a thread of its own.

They use the data path as any workload does, so what they measure is what workloads get.  The receiver opens a listener
for one burst, and closes it afterwards; its messages carry the lease as their tag, so that nobody else's are taken for
them.  When all receives are posted it says so with a message of its own; the clock of the sender starts with that.

Both heed ``stop`` within a tenth of a second, and end after ``limit_s`` whatever happens.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from dqplbd.client import Context, Request

__all__ = ["CLIENT_NAME", "BurstError", "Endpoint", "receive_burst", "send_burst"]

CLIENT_NAME: Final = "dqplbd-bandwidth"
_RING_ENTRIES: Final = 64
_GO_BYTES: Final = 8
_LOOK_S: Final = 0.1

T = TypeVar("T")


class BurstError(Exception):
    """A burst came to nothing; the text says why.

    :ivar sent_bytes: what may have been sent before.
    """

    def __init__(self, text: str, sent_bytes: int = 0) -> None:
        super().__init__(text)
        self.sent_bytes = sent_bytes


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One end of a burst.

    :ivar socket: of the daemon, for clients.  :ivar device: name of its device.
    :ivar lease: tag of the messages.  :ivar messages: how many.  :ivar message_bytes: length of each.
    :ivar limit_s: longest time for all of it.
    """

    socket: str
    device: str
    lease: int
    messages: int
    message_bytes: int
    limit_s: float


class _Guard:
    """Waits for requests, but not for ever."""

    def __init__(self, limit_s: float, stop: threading.Event) -> None:
        self._end_s = time.monotonic() + limit_s
        self._limit_s = limit_s
        self._stop = stop

    def wait(self, request: "Request[T]", what: str) -> T:
        """:raises BurstError: stopped, or not done in time.  :raises DqplbError: it failed."""
        while True:
            try:
                return request.wait(_LOOK_S)
            except TimeoutError:
                if self._stop.is_set():
                    raise BurstError("stopped") from None
                if time.monotonic() >= self._end_s:
                    raise BurstError(f"{what}: not done within {self._limit_s:g} s") from None


def _device(context: "Context", name: str) -> int:
    for device in context.devices:
        if device.name == name:
            return device.index
    raise BurstError(f"device {name} is not open")


def send_burst(end: Endpoint, handle: bytes, stop: threading.Event) -> int:
    """Send a burst to a listener.

    :returns: ns from the first byte to the last acknowledgement.
    :raises BurstError: it came to nothing.
    """
    from dqplbd.client import Context, DqplbError  # only who sends bursts needs the library in the daemon

    guard = _Guard(end.limit_s, stop)
    sent = 0
    try:
        with Context(end.socket, name=CLIENT_NAME, ring_entries=_RING_ENTRIES) as context:
            device = _device(context, end.device)
            flow = guard.wait(context.connect(handle, device), "connect")
            memory = context.allocate(end.message_bytes)
            go = context.allocate(_GO_BYTES)
            guard.wait(flow.recv(go, tag=end.lease), "the receiver's word that it is ready")
            begin = time.monotonic_ns()
            sent = end.messages * end.message_bytes
            requests = [flow.send(memory, tag=end.lease) for _ in range(end.messages)]
            for request in requests:
                guard.wait(request, f"{sent} bytes")
            return time.monotonic_ns() - begin
    except DqplbError as error:
        raise BurstError(str(error), sent) from None
    except BurstError as error:
        raise BurstError(str(error), sent) from None


def receive_burst(end: Endpoint, ready: Callable[[bytes], None], stop: threading.Event) -> int:
    """Receive one burst.

    :param ready: told the handle of the listener, from this thread.
    :returns: bytes received.
    :raises BurstError: it came to nothing, or not all of it came.
    """
    from dqplbd.client import Context, DqplbError

    guard = _Guard(end.limit_s, stop)
    try:
        with Context(end.socket, name=CLIENT_NAME, ring_entries=_RING_ENTRIES) as context:
            listener = context.listen(_device(context, end.device))
            # All messages go to one place: nobody reads them.
            memory = context.allocate(end.message_bytes)
            go = context.allocate(_GO_BYTES)
            accept = listener.accept()
            ready(listener.handle)
            flow = guard.wait(accept, "the sender's connect")
            listener.close()
            requests = [flow.recv(memory, tag=end.lease) for _ in range(end.messages)]
            parting = flow.recv(memory, tag=end.lease)
            guard.wait(flow.send(go, tag=end.lease), "the word that all is ready")
            received = sum(guard.wait(request, "the sender's messages").bytes for request in requests)
            # Were this end to close first, the sender could hear of that before it hears of its last message.
            with contextlib.suppress(DqplbError):
                guard.wait(parting, "the sender's close")
            return received
    except DqplbError as error:
        raise BurstError(str(error)) from None
