# SPDX-License-Identifier: Apache-2.0
"""A client of a daemon, in a process of its own: sends, or receives, a stream of messages and prints its checksum.

::

    python -P tests/vm/client.py receive SOCKET DEVICE SIZE COUNT          prints a handle, then the checksum
    python -P tests/vm/client.py send SOCKET DEVICE SIZE COUNT SEED        reads a handle, then prints the checksum

An error of the transport is printed in its own words, after ``error:``, and ends with 3.
"""

import hashlib
import random
import sys
from typing import Final

from dqplbd.client import Context, DqplbError, Request

DEPTH: Final = 4
"""Messages under way at a time."""
_PATIENCE_S: Final = 120.0


def receive(socket: str, device: int, size: int, count: int) -> str:
    """:returns: checksum of what came."""
    digest = hashlib.sha256()
    with Context(socket, name="receiver") as context, context.listen(device) as listener:
        memory = context.allocate(size * DEPTH)
        accepting = listener.accept()
        print(listener.handle.hex(), flush=True)
        flow = accepting.wait(_PATIENCE_S)
        pending = [flow.recv(memory, place * size, size) for place in range(min(DEPTH, count))]
        for number in range(count):
            place = number % DEPTH
            received = pending[place].wait(_PATIENCE_S).bytes
            with memory.view as view:
                digest.update(view[place * size : place * size + received])
            if number + DEPTH < count:
                pending[place] = flow.recv(memory, place * size, size)
        flow.recv(memory, 0, 1, tag=1).wait(_PATIENCE_S)  # the other end closes when it knows that all is here
    return digest.hexdigest()


def send(socket: str, device: int, size: int, count: int, seed: int) -> str:
    """:returns: checksum of what went."""
    digest = hashlib.sha256()
    source = random.Random(seed)
    handle = bytes.fromhex(sys.stdin.readline())
    with Context(socket, name="sender") as context:
        memory = context.allocate(size * DEPTH)
        flow = context.connect(handle, device).wait(_PATIENCE_S)
        pending: list[Request[int]] = []
        for number in range(count):
            place = number % DEPTH
            if number >= DEPTH:
                pending[place].wait(_PATIENCE_S)
            content = source.randbytes(size - number % 7)
            digest.update(content)
            with memory.view as view:
                view[place * size : place * size + len(content)] = content
            sending = flow.send(memory, place * size, len(content))
            if number < DEPTH:
                pending.append(sending)
            else:
                pending[place] = sending
            if number == 0:
                print("begun", flush=True)
        for request in pending:
            request.wait(_PATIENCE_S)
        flow.send(memory, 0, 1, tag=1).wait(_PATIENCE_S)
    return digest.hexdigest()


def main(argv: list[str]) -> int:
    """See the module's text.  :returns: exit code."""
    role, socket, *numbers = argv
    try:
        print((receive if role == "receive" else send)(socket, *map(int, numbers)), flush=True)
    except DqplbError as error:
        print(f"error: {error}", flush=True)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
