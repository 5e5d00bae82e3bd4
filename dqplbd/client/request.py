# SPDX-License-Identifier: Apache-2.0
"""Operations under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dqplbd.client._shim import ffi, lib
from dqplbd.client.errors import DqplbError, Status, last_error

if TYPE_CHECKING:
    from dqplbd.client.context import Context

T = TypeVar("T")

#: Longest stay in the library, so that Ctrl-C and other signals are heeded.
SLICE_MS = 100


def slice_ms(deadline: float | None) -> int:
    """How long to stay in the library, in ms: until ``deadline`` (``time.monotonic()``; None: no limit) or a slice."""
    if deadline is None:
        return SLICE_MS
    return min(SLICE_MS, max(0, round((deadline - time.monotonic()) * 1000)))


@dataclass(frozen=True, slots=True)
class Received:
    """A message that arrived: its length in bytes, and its tag."""

    bytes: int
    tag: int


@dataclass(frozen=True, slots=True)
class Notification:
    """A put of the peer that arrived: where, how many bytes, and the cookie that the peer gave to it."""

    region: int
    offset: int
    bytes: int
    cookie: int


class Request(Generic[T]):
    """An operation that was begun.  Keeps its memory and flow alive until it is done.

    A request that nobody waits for is cleaned up by later operations of its context.
    """

    def __init__(self, context: Context, pointer: Any, keep: tuple[object, ...], convert: Callable[[Any], T]) -> None:
        self._context = context
        self._pointer = pointer
        self._keep: tuple[object, ...] = keep
        self._convert = convert
        self._lock = threading.Lock()
        self._done = False
        self._value: T
        self._error: DqplbError | None = None

    def _finish(self, status: int, result: Any) -> None:
        """``lock`` held, the library has freed its request."""
        try:
            if status != lib.DQPLB_OK:
                self._error = last_error(status)
            elif result.status != lib.DQPLB_OK:
                self._error = last_error(result.status)
            else:
                self._value = self._convert(result)
        finally:
            self._keep = ()
            self._done = True
            self._context.remove_request(self)

    def _closed(self) -> None:
        """``lock`` held: the context was closed under it."""
        self._error = DqplbError(Status.CANCELED, "the context was closed")
        self._keep = ()
        self._done = True
        self._context.remove_request(self)

    def test(self) -> bool:
        """Is it done?  Never waits.  :meth:`wait` then returns, or raises, at once."""
        if self._is_done():
            return True
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits for it at this moment
        try:
            if self._is_done():
                return True
            if self._context.closed:
                self._closed()
                return True
            done, result = ffi.new("int *"), ffi.new("dqplb_result *")
            status = lib.dqplb_test(self._pointer, done, result)
            if done[0]:
                self._finish(status, result)
            elif status != lib.DQPLB_OK:
                raise last_error(status)
            return bool(done[0])
        finally:
            self._lock.release()

    def wait(self, timeout: float | None = None) -> T:
        """Wait until it is done and return its result; any number of times.

        :param timeout: seconds; None: no limit.
        :raises TimeoutError: not done by then; the operation goes on.
        :raises DqplbError: the operation failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._done:
            left_ms = slice_ms(deadline)
            if not self._lock.acquire(timeout=left_ms / 1000):
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"request: not done within {timeout} s")
                continue
            try:
                self._wait_slice(left_ms)
            finally:
                self._lock.release()
            if not self._done and deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"request: not done within {timeout} s")
        if self._error is not None:
            raise self._error
        return self._value

    def _wait_slice(self, left_ms: int) -> None:
        if self._done:
            return
        if self._context.closed:
            self._closed()
            return
        result = ffi.new("dqplb_result *")
        status = lib.dqplb_wait(self._pointer, left_ms, result)
        if status == lib.DQPLB_OK or result.status == lib.DQPLB_ERR_DAEMON:
            self._finish(status, result)
        elif status != lib.DQPLB_ERR_TIMEOUT:
            raise last_error(status)

    def _is_done(self) -> bool:
        return self._done

    @property
    def done(self) -> bool:
        """Whether the outcome is known already; asks nobody (see :meth:`test`)."""
        return self._done

    def __repr__(self) -> str:
        if not self._done:
            return "<Request: pending>"
        return f"<Request: {'done' if self._error is None else self._error.status.name}>"
