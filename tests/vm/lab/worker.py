# SPDX-License-Identifier: Apache-2.0
"""The workload of one host: an ordinary client of its daemon, told what to do in lines of JSON.

``worker.py SOCKET NAME``: each line read is a command, each line written its answer, or ``{"error": ...}``:

- ``{"do": "listen"}``: answers ``{"handle": hex}``.
- ``{"do": "accept", "flow": KEY}``: answers when an accept is under way; ``{"do": "accepted"}`` when it is done.
- ``{"do": "connect", "flow": KEY, "handle": hex}``: answers when the flow is open.
- ``{"do": "prepare", "send": {KEY: BYTES}, "receive": {KEY: BYTES}}``: memory for what is to come, filled.
- ``{"do": "run", "start_ns": T, "message_bytes": M, "send": {KEY: BYTES}, "receive": {KEY: BYTES}}``: at the time T of
  CLOCK_MONOTONIC everything is sent at once, in messages of M bytes; receives are posted before.  Answers
  ``{"began_ns": T, "sent_ns": T, "flows": {KEY: {"bytes": B, "done_ns": T, "same": S}}}``: when it began, when the
  last send completed, and for what was received how much, when the last of it came, and whether it is what was sent.

It never polls: between events it sleeps, so that simulated time goes on.
"""

import ctypes
import hashlib
import json
import sys
import time
from typing import Any, Final

from dqplbd.client import Context, Flow, Listener, Memory, Request

PATIENCE_S: Final = 60.0
TAG: Final = 1
_PR_SET_TIMERSLACK: Final = 29


def wake_in_time() -> None:
    """Have sleeps of this thread end when they should, and not up to 50 us later."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)


def content(key: str, size: int) -> bytes:
    """What a flow carries: other bytes for each, without a period that a misplaced piece could hide in."""
    unit = hashlib.shake_128(key.encode()).digest(65521)
    return (unit * (size // len(unit) + 1))[:size]


class Worker:
    """One client."""

    def __init__(self, socket: str, name: str) -> None:
        self._context = Context(socket, name=name, ring_entries=16384)
        self._listener: Listener | None = None
        self._accepting: dict[str, Request[Flow]] = {}
        self._flows: dict[str, Flow] = {}
        self._memory: dict[str, Memory] = {}

    def listen(self) -> dict[str, Any]:
        self._listener = self._context.listen()
        return {"handle": self._listener.handle.hex()}

    def accept(self, flow: str) -> dict[str, Any]:
        if self._listener is None:
            raise ValueError("accept before listen")
        self._accepting[flow] = self._listener.accept()
        return {}

    def accepted(self) -> dict[str, Any]:
        for key, request in self._accepting.items():
            self._flows[key] = request.wait(PATIENCE_S)
        self._accepting.clear()
        return {}

    def connect(self, flow: str, handle: str) -> dict[str, Any]:
        self._flows[flow] = self._context.connect(bytes.fromhex(handle)).wait(PATIENCE_S)
        return {}

    def prepare(self, send: dict[str, int], receive: dict[str, int]) -> dict[str, Any]:
        """Memory for what is to come, its pages touched."""
        for memory in self._memory.values():
            memory.free()
        self._memory = {key: self._context.allocate(size) for key, size in {**send, **receive}.items()}
        for key, size in send.items():
            with self._memory[key].view as view:
                view[:size] = content(key, size)
        for key in receive:
            with self._memory[key].view as view:
                view[::4096] = bytes(len(view[::4096]))
        return {}

    def run(self, start_ns: int, message_bytes: int, send: dict[str, int], receive: dict[str, int]) -> dict[str, Any]:
        waiting: dict[str, list[Request[Any]]] = {}
        for key, size in receive.items():
            waiting[key] = [
                self._flows[key].recv(self._memory[key], at, min(message_bytes, size - at), tag=TAG)
                for at in range(0, size, message_bytes)
            ]
        time.sleep(max(start_ns - time.monotonic_ns(), 0) / 1e9)
        began_ns = time.monotonic_ns()
        sends: list[Request[int]] = []
        for at in range(0, max(send.values(), default=0), message_bytes):
            sends += [
                self._flows[key].send(self._memory[key], at, min(message_bytes, size - at), tag=TAG)
                for key, size in send.items()
                if at < size
            ]
        done_ns: dict[str, int] = {}
        sent_ns = 0
        deadline = time.monotonic() + PATIENCE_S
        while len(done_ns) < len(receive) or (sends and not sent_ns):
            # Messages of a flow complete in order: the last one says it all.
            for key in receive:
                if key not in done_ns and waiting[key][-1].test():
                    done_ns[key] = time.monotonic_ns()
            if sends and not sent_ns and all(request.test() for request in sends):
                sent_ns = time.monotonic_ns()
            if len(done_ns) < len(receive) or (sends and not sent_ns):
                self._context.wait_any(max(deadline - time.monotonic(), 0.0))
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no end after {PATIENCE_S} s; waiting for {set(receive) - set(done_ns)}")
        arrived = {}
        for key in receive:
            count = sum(request.wait(PATIENCE_S).bytes for request in waiting[key])
            with self._memory[key].view as view:
                same = bytes(view[: receive[key]]) == content(key, receive[key])
            arrived[key] = {"bytes": count, "done_ns": done_ns[key], "same": same}
        for request in sends:
            request.wait(PATIENCE_S)
        return {"began_ns": began_ns, "sent_ns": sent_ns, "flows": arrived}


def main() -> int:
    """Obey until the end of the input.  :returns: exit code."""
    wake_in_time()
    worker = Worker(sys.argv[1], sys.argv[2])
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(worker, command.pop("do"))(**command)
        except Exception as error:  # told to the other end of the pipe, which ends it all
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
