# SPDX-License-Identifier: Apache-2.0
"""Memory for messages."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dqplbd.client._shim import ffi, lib
from dqplbd.client.errors import DqplbError, Status, check

if TYPE_CHECKING:
    from dqplbd.client.context import Context


class Memory:
    """Memory that messages are sent from and received into; made by the methods of :class:`Context`.

    :ivar size: bytes.
    :ivar readonly: made from a buffer that cannot be written: nothing can be received into it.
    """

    def __init__(self, context: Context, pointer: Any, owner: Any, *, readonly: bool) -> None:
        self._context = context
        self._pointer: Any = pointer
        # For memory of the program: what keeps its buffer alive and in place.
        self._owner: Any = owner
        self.size: int = lib.dqplb_mem_bytes(pointer)
        self.readonly = readonly
        address = lib.dqplb_mem_address(pointer)
        # Views hold this object: it tells whether there are any left.
        self._buffer: Any = None
        if address != ffi.NULL:
            self._buffer = ffi.buffer(address if owner is None else owner, self.size)

    @property
    def view(self) -> memoryview:
        """The bytes, to read and write; not to be touched while a request uses them.

        :raises DqplbError: the memory was freed (INVALID), or is of a device (INVALID).
        """
        if self._pointer is None:
            raise DqplbError(Status.INVALID, "memory: it was freed")
        if self._buffer is None:
            raise DqplbError(Status.INVALID, "memory: a dma-buf has no bytes that a program could see")
        view = memoryview(self._buffer)
        return view.toreadonly() if self.readonly else view

    def __buffer__(self, flags: int, /) -> memoryview:
        # From Python 3.12 on: memoryview(memory), numpy.frombuffer(memory).
        return self.view

    def __len__(self) -> int:
        return self.size

    @property
    def pointer(self) -> Any:
        """For the other classes of this package: the library's object.

        :raises DqplbError: the memory was freed (INVALID).
        """
        if self._pointer is None:
            raise DqplbError(Status.INVALID, "memory: it was freed")
        return self._pointer

    def live_buffer(self) -> Any:
        """For :class:`Context`: what the remaining views hold, or None when there are no views of shared memory."""
        if self._owner is not None or self._buffer is None:
            return None
        reference = weakref.ref(self._buffer)
        self._buffer = None
        # Gone with the last reference, unless views of the program hold it.
        return reference()

    def forget(self) -> None:
        """For :class:`Context`: the library's object ended with the context."""
        self._pointer = self._owner = self._buffer = None

    def free(self) -> None:
        """Give the memory back; outstanding requests on it are canceled.  A second call does nothing.

        :raises BufferError: views of it are still in use, so it stays.
        :raises DqplbError: the daemon is gone (DAEMON); this side is freed all the same.
        """
        if self._pointer is None:
            return
        left = self.live_buffer()
        if left is not None:
            self._buffer = left
            raise BufferError("memory: views of it are in use: release them before free()")
        pointer = self._pointer
        self.forget()
        self._context.remove_memory(self)
        check(lib.dqplb_mem_free(pointer))

    def __enter__(self) -> Memory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()

    def __repr__(self) -> str:
        state = "freed" if self._pointer is None else f"{self.size} bytes"
        return f"<Memory: {state}>"
