# SPDX-License-Identifier: Apache-2.0
"""Moves a file from a client of one daemon to a client of another, both on this machine."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dqplbd.client import Context, DqplbError, Flow, Memory, Request

__all__ = ["Moved", "move_file"]

CHUNK_BYTES: Final = 4 * 2**20
# Messages under way at a time: 256 MiB, so that a file of that size is offered to the daemon as a whole.
CHUNKS: Final = 64
_PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Moved:
    """What came of it.

    :ivar seconds: from the first send to the completion of the last.
    """

    bytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Throughput."""
        return self.bytes / self.seconds


class _Receiver(threading.Thread):
    """The far end: writes what comes into a file, in order."""

    def __init__(self, socket: str, target: Path, size: int) -> None:
        super().__init__(name="receiver", daemon=True)
        self._socket = socket
        self._target = target
        self._size = size
        self.handle = b""
        self.listening = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._receive()
        except BaseException as error:  # handed to the thread that waits for this one
            self.error = error
        finally:
            self.listening.set()

    def _receive(self) -> None:
        with Context(self._socket, name="file receiver") as context:
            count = -(-self._size // CHUNK_BYTES)
            memory = context.allocate(min(count, CHUNKS) * CHUNK_BYTES)
            listener = context.listen()
            self.handle = listener.handle
            accepted = listener.accept()
            self.listening.set()
            flow = accepted.wait(_PATIENCE_S)
            pending = [flow.recv(memory, i * CHUNK_BYTES, CHUNK_BYTES) for i in range(min(count, CHUNKS))]
            view = memory.view
            with self._target.open("wb") as file:
                for number in range(count):
                    place = number % CHUNKS
                    received = pending[place].wait(_PATIENCE_S)
                    start = place * CHUNK_BYTES
                    file.write(view[start : start + received.bytes])
                    if number + CHUNKS < count:
                        pending[place] = flow.recv(memory, start, CHUNK_BYTES)
            del view
            # The sender closes when it knows that everything is here; until then its last completion may be on its way.
            try:
                flow.recv(memory, 0, 1, tag=1).wait(_PATIENCE_S)
            except DqplbError:
                pass


def _fill(file: int, memory: Memory, place: int) -> int:
    """Read the next chunk of the file into the memory.  :returns: bytes, 0 at the end."""
    start = place * CHUNK_BYTES
    filled = 0
    with memory.view as view:
        while filled < CHUNK_BYTES:
            got = os.readv(file, [view[start + filled : start + CHUNK_BYTES]])
            if got == 0:
                break
            filled += got
    return filled


def _send(flow: Flow, memory: Memory, file: int, size: int, progress: Callable[[int], None]) -> Moved:
    pending: list[tuple[Request[int], int]] = []
    count = -(-size // CHUNK_BYTES)
    ready = [_fill(file, memory, place) for place in range(min(count, CHUNKS))]
    begin = time.monotonic()
    pending = [(flow.send(memory, place * CHUNK_BYTES, length), length) for place, length in enumerate(ready)]
    done = 0
    for number in range(count):
        place = number % CHUNKS
        request, length = pending[place]
        request.wait(_PATIENCE_S)
        done += length
        progress(done)
        if number + CHUNKS < count:
            length = _fill(file, memory, place)
            pending[place] = flow.send(memory, place * CHUNK_BYTES, length), length
    seconds = time.monotonic() - begin
    if done != size:
        raise OSError(f"the file had {size} bytes at first and {done} in the end; do not change it meanwhile")
    return Moved(size, seconds)


def move_file(
    source: Path, target: Path, near: str, far: str, progress: Callable[[int], None] = lambda done: None
) -> Moved:
    """Read ``source``, send it from a client at ``near`` to one at ``far``, and write it to ``target``.

    :param near: client socket of the sending daemon.
    :param far: client socket of the receiving one.
    :param progress: called with the bytes that have arrived.
    :raises DqplbError: the transport failed.  :raises OSError: a file failed, or is empty.
    :raises TimeoutError: nothing moved for a minute.
    """
    size = source.stat().st_size
    if size == 0:
        raise OSError(f"{source} is empty; there is nothing to move")
    receiver = _Receiver(far, target, size)
    receiver.start()
    receiver.listening.wait(_PATIENCE_S)
    if receiver.error is not None:
        raise receiver.error
    file = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with Context(near, name="file sender") as context:
            flow = context.connect(receiver.handle).wait(_PATIENCE_S)
            memory = context.allocate(min(-(-size // CHUNK_BYTES), CHUNKS) * CHUNK_BYTES)
            moved = _send(flow, memory, file, size, progress)
    except DqplbError:
        receiver.join(1)
        if receiver.error is not None:  # the cause, where there is one
            raise receiver.error from None
        raise
    finally:
        os.close(file)
    receiver.join(_PATIENCE_S)
    if receiver.error is not None:
        raise receiver.error
    if receiver.is_alive():
        raise TimeoutError("the receiving end did not finish")
    return moved
