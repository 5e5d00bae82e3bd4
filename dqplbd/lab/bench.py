# SPDX-License-Identifier: Apache-2.0
"""Throughput and latency between two clients, through their daemons: what ``dqplb bench`` runs.

One end serves (:func:`serve`): it prints nothing but its handle.  The other runs (:func:`run`).  The first flow between
them carries requests and answers as JSON; each measurement then has flows of its own.  For messages of megabytes Python
costs nothing that could be seen; the latency includes a few microseconds of it at either end.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from dqplbd.admin.model import BenchLatency, BenchReport, BenchThroughput
from dqplbd.client import Context, DqplbError, Flow, Listener, Memory, Request, Status

__all__ = ["BenchError", "LatencyTest", "ThroughputTest", "fitting", "run", "serve"]

PATIENCE_S: Final = 60.0
MAX_BYTES: Final = 2**36
_CONTROL_BYTES: Final = 64 * 1024
_TAG: Final = 1
_VERSION: Final = 1


class BenchError(RuntimeError):
    """The two ends do not understand each other, or a number is out of its range."""


@dataclass(frozen=True, slots=True)
class ThroughputTest:
    """Messages one way.

    :ivar outstanding: messages of one flow under way at a time.
    :ivar messages: of all flows together.
    """

    message_bytes: int
    messages: int
    outstanding: int
    flows: int
    memory: Literal["shim", "staged"]


@dataclass(frozen=True, slots=True)
class LatencyTest:
    """Ping-pong."""

    message_bytes: int
    rounds: int


def _within(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BenchError(f"{name} is {value!r}; expected a number {low}..{high}")
    return value


def check_throughput(test: ThroughputTest) -> None:
    """:raises BenchError: a number is out of its range."""
    _within("message size", test.message_bytes, 1, 2**32)
    _within("flows", test.flows, 1, 4096)
    _within("outstanding messages", test.outstanding, 1, 4096)
    _within("messages", test.messages, test.flows, 10**9)
    if test.memory not in ("shim", "staged"):
        raise BenchError(f"memory is {test.memory!r}; expected shim or staged")
    _within("memory (size x outstanding x flows)", test.message_bytes * test.outstanding * test.flows, 1, MAX_BYTES)
    _within("requests (outstanding x flows)", test.outstanding * test.flows, 1, 16384)


def check_latency(test: LatencyTest) -> None:
    """:raises BenchError: a number is out of its range."""
    _within("message size", test.message_bytes, 1, 2**28)
    _within("rounds", test.rounds, 1, 10**7)


@contextmanager
def _memory(context: Context, kind: str, size: int) -> Iterator[Memory]:
    if kind == "shim":
        memory = context.allocate(size)
    else:
        memory = context.register(bytearray(size))
    with memory:
        yield memory


class _Control:
    """Requests and answers over the first flow."""

    def __init__(self, context: Context, flow: Flow) -> None:
        self._flow = flow
        self._memory = context.allocate(2 * _CONTROL_BYTES)

    def say(self, what: dict[str, Any]) -> None:
        raw = json.dumps(what).encode()
        with self._memory.view as view:
            view[: len(raw)] = raw
        self._flow.send(self._memory, 0, len(raw), tag=_TAG).wait(PATIENCE_S)

    def hear(self, timeout: float | None = PATIENCE_S) -> dict[str, Any]:
        request = self._flow.recv(self._memory, _CONTROL_BYTES, _CONTROL_BYTES, tag=_TAG)
        received = request.wait(timeout)
        with self._memory.view as view:
            raw = bytes(view[_CONTROL_BYTES : _CONTROL_BYTES + received.bytes])
        try:
            heard = json.loads(raw)
        except (ValueError, RecursionError):
            heard = None
        if not isinstance(heard, dict):
            raise BenchError("the other end sent something that is no request or answer of a bench")
        if "error" in heard:
            raise BenchError(f"the other end says: {heard['error']}")
        return heard


# ------------------------------------------------------------------------------------------------------- the far end


def _serve_throughput(context: Context, listener: Listener, control: _Control, asked: dict[str, Any]) -> None:
    test = ThroughputTest(**asked)
    check_throughput(test)
    size, depth = test.message_bytes, test.outstanding
    with _memory(context, test.memory, size * depth * test.flows) as memory:
        accepting = [listener.accept() for _ in range(test.flows)]
        control.say({"ready": True})
        flows = [request.wait(PATIENCE_S) for request in accepting]
        # Places turn round within each flow, so that messages end in the order of their places.
        shares = [len(range(i, test.messages, test.flows)) for i in range(test.flows)]
        pending: list[list[Request[Any]]] = []
        for i, flow in enumerate(flows):
            pending.append(
                [flow.recv(memory, (i * depth + j) * size, size, tag=_TAG) for j in range(min(depth, shares[i]))]
            )
        received = 0
        for turn in range(max(shares)):
            for i, flow in enumerate(flows):
                if turn >= shares[i]:
                    continue
                place = turn % depth
                received += pending[i][place].wait(PATIENCE_S).bytes
                if turn + depth < shares[i]:
                    pending[i][place] = flow.recv(memory, (i * depth + place) * size, size, tag=_TAG)
        verified = True
        with memory.view as view:
            for i in range(test.flows):
                last = (i * depth + (shares[i] - 1) % depth) * size
                verified = verified and view[last : last + size] == _pattern(size)
        control.say({"bytes": received, "verified": verified})
        for flow in flows:
            flow.close()


def _serve_latency(context: Context, listener: Listener, control: _Control, asked: dict[str, Any]) -> None:
    test = LatencyTest(**asked)
    check_latency(test)
    with context.allocate(4 * test.message_bytes) as memory:
        accepting = listener.accept()
        control.say({"ready": True})
        flow = accepting.wait(PATIENCE_S)
        _answer(flow, memory, test)
        control.hear()
        flow.close()


def _answer(flow: Flow, memory: Memory, test: LatencyTest) -> None:
    size = test.message_bytes
    pending = [flow.recv(memory, i * size, size, tag=_TAG) for i in range(2)]
    for number in range(test.rounds):
        pending[number % 2].wait(PATIENCE_S)
        sent = flow.send(memory, 2 * size, size, tag=_TAG)
        if number + 2 < test.rounds:
            pending[number % 2] = flow.recv(memory, number % 2 * size, size, tag=_TAG)
        sent.wait(PATIENCE_S)


_SERVICES: Final[dict[str, Callable[[Context, Listener, _Control, dict[str, Any]], None]]] = {
    "throughput": _serve_throughput,
    "latency": _serve_latency,
}


def serve(socket: str | None, publish: Callable[[bytes], None], *, once: bool, device: int = 0) -> None:
    """Serve runs, one after the other, until interrupted.

    :param socket: client socket of the daemon.
    :param publish: gets the handle.
    :param once: end after one run.
    :raises DqplbError: the daemon is gone.  :raises BenchError: with ``once``, what went wrong with that run.
    """
    with Context(socket, name="dqplb bench serve") as context, context.listen(device) as listener:
        publish(listener.handle)
        while True:
            flow = listener.accept().wait()
            try:
                _serve_run(context, listener, flow)
            except (BenchError, DqplbError, TimeoutError) as error:
                if once or (isinstance(error, DqplbError) and error.status is Status.DAEMON):
                    raise
            finally:
                flow.close()
            if once:
                return


def _serve_run(context: Context, listener: Listener, flow: Flow) -> None:
    """All tests of one run; ends when the other end closes."""
    control = _Control(context, flow)
    while True:
        try:
            asked = control.hear(timeout=None)
        except DqplbError as error:
            if error.status in (Status.CLOSED, Status.PEER_GONE):
                return
            raise
        kind = asked.pop("test", None)
        if asked.pop("version", None) != _VERSION or kind not in _SERVICES:
            control.say({"error": f"unknown test {kind!r}; this end knows version {_VERSION}"})
            continue
        try:
            _SERVICES[kind](context, listener, control, asked)
        except (BenchError, TypeError) as error:
            control.say({"error": str(error)})


# ------------------------------------------------------------------------------------------------------ the near end


def fitting(budget_s: float, each_s: float, least: int, most: int) -> int:
    """How many things of ``each_s`` seconds fit in ``budget_s``; at least ``least``, but never more than ``most``."""
    return min(max(int(budget_s / max(each_s, 1e-9)), least), most)


def _pattern(size: int) -> bytes:
    """What messages contain: no period of a power of two, so that a piece in a wrong place shows."""
    unit = bytes(range(251))
    return (unit * (size // len(unit) + 1))[:size]


def _run_throughput(
    context: Context, handle: bytes, device: int, control: _Control, test: ThroughputTest
) -> BenchThroughput:
    check_throughput(test)
    size, depth = test.message_bytes, test.outstanding
    with _memory(context, test.memory, size * depth * test.flows) as memory:
        with memory.view as view:
            content = _pattern(size)
            for place in range(depth * test.flows):
                view[place * size : (place + 1) * size] = content
        control.say({"version": _VERSION, "test": "throughput", **asdict(test)})
        control.hear()
        flows = [request.wait(PATIENCE_S) for request in [context.connect(handle, device) for _ in range(test.flows)]]
        shares = [len(range(i, test.messages, test.flows)) for i in range(test.flows)]
        begin = time.perf_counter()
        pending = [
            [flow.send(memory, (i * depth + j) * size, size, tag=_TAG) for j in range(min(depth, shares[i]))]
            for i, flow in enumerate(flows)
        ]
        for turn in range(max(shares)):
            for i, flow in enumerate(flows):
                if turn >= shares[i]:
                    continue
                place = turn % depth
                pending[i][place].wait(PATIENCE_S)
                if turn + depth < shares[i]:
                    pending[i][place] = flow.send(memory, (i * depth + place) * size, size, tag=_TAG)
        seconds = time.perf_counter() - begin
        result = control.hear()
        if result.get("bytes") != size * test.messages:
            raise BenchError(f"{size * test.messages} bytes were sent and {result.get('bytes')!r} arrived")
        for flow in flows:
            flow.close()
    return BenchThroughput(
        memory=test.memory,
        flows=test.flows,
        message_bytes=size,
        messages=test.messages,
        outstanding=depth,
        seconds=seconds,
        bytes_per_second=size * test.messages / seconds,
        verified=result.get("verified") is True,
    )


def _run_latency(context: Context, handle: bytes, device: int, control: _Control, test: LatencyTest) -> BenchLatency:
    check_latency(test)
    size = test.message_bytes
    with context.allocate(4 * size) as memory:
        control.say({"version": _VERSION, "test": "latency", **asdict(test)})
        control.hear()
        flow = context.connect(handle, device).wait(PATIENCE_S)
        times = []
        pending = [flow.recv(memory, i * size, size, tag=_TAG) for i in range(2)]
        for number in range(test.rounds):
            begin = time.perf_counter_ns()
            sent = flow.send(memory, 2 * size, size, tag=_TAG)
            pending[number % 2].wait(PATIENCE_S)
            times.append(time.perf_counter_ns() - begin)
            if number + 2 < test.rounds:
                pending[number % 2] = flow.recv(memory, number % 2 * size, size, tag=_TAG)
            sent.wait(PATIENCE_S)
        control.say({"done": True})
        flow.close()
    times.sort()
    return BenchLatency(
        message_bytes=size,
        rounds=test.rounds,
        min_ns=times[0],
        p50_ns=times[len(times) // 2],
        p99_ns=times[len(times) * 99 // 100],
        max_ns=times[-1],
    )


def run(
    socket: str | None,
    handle: bytes,
    peer: str,
    throughput: list[ThroughputTest],
    latency: list[LatencyTest],
    *,
    device: int = 0,
    throughput_s: float | None = None,
    latency_s: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """Run tests against an end that serves.

    :param socket: client socket of the daemon.
    :param handle: of the end that serves.
    :param peer: its name, for the report.
    :param throughput_s: as many messages as take about so long, at most those of the test; None sends all.
    :param latency_s: the same for the rounds of a ping-pong.
    :raises DqplbError: the transport failed.  :raises BenchError: the other end refused.
    :raises TimeoutError: nothing moved for a minute.
    """
    for one in throughput:
        check_throughput(one)
    for two in latency:
        check_latency(two)
    with Context(socket, name="dqplb bench run", ring_entries=32768) as context:
        flow = context.connect(handle, device).wait(PATIENCE_S)
        control = _Control(context, flow)
        report = BenchReport(peer=peer)
        for one in throughput:
            progress(f"throughput, {one.memory} memory, {one.flows} flows")
            if throughput_s is not None:
                trial = _run_throughput(context, handle, device, control, replace(one, messages=one.flows))
                turns = fitting(throughput_s, trial.seconds, 1, one.messages)
                one = replace(one, messages=min(turns * one.flows, one.messages))
            done = _run_throughput(context, handle, device, control, one)
            report = report.model_copy(update={"throughput": [*report.throughput, done]})
        for two in latency:
            progress(f"latency, {two.message_bytes} bytes")
            if latency_s is not None:
                first = _run_latency(context, handle, device, control, replace(two, rounds=min(3, two.rounds)))
                two = replace(two, rounds=fitting(latency_s, first.p50_ns / 1e9, 3, two.rounds))
            measured = _run_latency(context, handle, device, control, two)
            report = report.model_copy(update={"latency": [*report.latency, measured]})
        flow.close()
    return report
