# SPDX-License-Identifier: Apache-2.0
"""``dqplb bench``."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from dqplbd.cli.common import EXIT_FAILED, EXIT_UNREACHABLE, EXIT_USAGE, JsonOption, emit_json, fail

__all__ = ["group"]

group = typer.Typer(
    help="Throughput and latency between two hosts.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

HANDLE_BYTES = 128
# What is measured unless the options say otherwise: so much, but no longer than that.
_MESSAGES = 32
_THROUGHPUT_S = 10.0
_ROUNDS = 1000
_LATENCY_S = 5.0

SocketOption = Annotated[
    str | None,
    typer.Option(
        "--client-socket",
        metavar="PATH",
        help="Client socket of the daemon. [env: DQPLB_SOCKET; default: /run/dqplbd/client.sock]",
    ),
]
DeviceOption = Annotated[
    int, typer.Option("--device", min=0, max=7, help="Number of the device, in the order of `dqplb devices`.")
]


def _absolute(path: str | None) -> str | None:
    """A socket as the library wants it: named so that it is the same wherever it is opened from."""
    return None if path is None else os.path.abspath(path)


def _transport_failed(error: Exception) -> None:
    """End with the right code.  The client library is imported by now."""
    from dqplbd.client import DqplbError, Status

    if isinstance(error, DqplbError) and error.status is Status.DAEMON:
        fail(error.text, "another client socket is named by --client-socket", EXIT_UNREACHABLE)
    broken = isinstance(error, DqplbError) and error.status in (Status.UNREACHABLE, Status.TIMEOUT, Status.PEER_GONE)
    fail(str(error), "`dqplb peers` and `dqplb doctor` may tell why" if broken else "")


@group.command("serve", short_help="Be the far end.")
def serve(
    client_socket: SocketOption = None,
    device: DeviceOption = 0,
    file: Annotated[str | None, typer.Option("--file", help="Write the handle to this file.")] = None,
    once: Annotated[bool, typer.Option("--once", help="End after one run.")] = False,
) -> None:
    """Be the far end: print a handle for `dqplb bench run HANDLE` on another host, and serve until Ctrl-C."""
    from dqplbd.client import DqplbError
    from dqplbd.lab import bench

    def publish(handle: bytes) -> None:
        if file is not None:
            part = Path(f"{file}.part")
            part.write_text(handle.hex() + "\n", encoding="ascii")
            part.rename(file)
        else:
            print(handle.hex(), flush=True)

    try:
        bench.serve(_absolute(client_socket), publish, once=once, device=device)
    except KeyboardInterrupt:
        pass
    except (DqplbError, bench.BenchError, TimeoutError, OSError) as error:
        _transport_failed(error)


def _handle_of(text: str) -> bytes:
    """The handle in a text, or in the file that it names."""
    candidate = text.strip()
    if len(candidate) != 2 * HANDLE_BYTES:
        try:
            candidate = Path(text).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            fail(
                f"{text[:80]!r} is neither a handle nor a file with one",
                f"what `dqplb bench serve` prints: {2 * HANDLE_BYTES} hexadecimal digits",
                EXIT_USAGE,
            )
    try:
        handle = bytes.fromhex(candidate)
    except ValueError:
        handle = b""
    if len(handle) != HANDLE_BYTES:
        fail(
            f"the handle has {len(candidate)} characters",
            f"expected {2 * HANDLE_BYTES} hexadecimal digits, as `dqplb bench serve` prints",
            EXIT_USAGE,
        )
    return handle


@group.command("run", short_help="Measure against the far end.")
def run(
    handle: Annotated[
        str | None,
        typer.Argument(help="Handle that `dqplb bench serve` printed, or the file with it.", metavar="HANDLE"),
    ] = None,
    client_socket: SocketOption = None,
    peer_socket: Annotated[
        str | None,
        typer.Option(
            "--peer-socket", metavar="PATH", help="Run the far end too, at the client socket of a daemon here."
        ),
    ] = None,
    device: DeviceOption = 0,
    message: Annotated[str, typer.Option("--message", help="Size of a message.")] = "64MiB",
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, help="Messages. By default up to 32, as many as take about 10 s."),
    ] = None,
    outstanding: Annotated[int, typer.Option("--outstanding", min=1, help="Messages of a flow under way.")] = 2,
    flows: Annotated[int, typer.Option("--flows", min=1, help="Flows.")] = 1,
    memory: Annotated[str, typer.Option("--memory", help="shim (not copied), staged (copied), or both.")] = "both",
    latency_bytes: Annotated[int, typer.Option("--latency-bytes", min=1, help="Size of a ping-pong message.")] = 64,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds", min=0, help="Ping-pongs; 0 for none. By default up to 1000, as many as take about 5 s."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure throughput and latency against the far end."""
    from dqplbd.client import DqplbError
    from dqplbd.lab import bench
    from dqplbd.units import UnitError, parse_bytes

    if (handle is None) == (peer_socket is None):
        fail("give either HANDLE or --peer-socket", "HANDLE is what `dqplb bench serve` prints", EXIT_USAGE)
    if memory not in ("shim", "staged", "both"):
        fail(f"--memory is {memory!r}", "shim, staged or both", EXIT_USAGE)
    try:
        size = parse_bytes(message)
    except UnitError as error:
        fail(f"--message: {error.problem}", error.expected, EXIT_USAGE)
    tests = []
    messages = max(_MESSAGES if count is None else count, flows)
    if memory in ("shim", "both"):
        tests.append(bench.ThroughputTest(size, messages, outstanding, flows, "shim"))
    if memory in ("staged", "both"):
        tests.append(bench.ThroughputTest(size, messages, outstanding, flows, "staged"))
    pings = [bench.LatencyTest(latency_bytes, _ROUNDS if rounds is None else rounds)] if rounds != 0 else []
    try:
        for test in tests:
            bench.check_throughput(test)
        for ping in pings:
            bench.check_latency(ping)
    except bench.BenchError as error:
        fail(str(error), "", EXIT_USAGE)

    far: subprocess.Popen[str] | None = None
    try:
        if peer_socket is not None:
            command = [sys.executable, "-P", "-m", "dqplbd.cli.main", "bench", "serve", "--once"]
            far = subprocess.Popen([*command, "--client-socket", peer_socket], stdout=subprocess.PIPE, text=True)
            assert far.stdout is not None, "it was asked for"
            line = far.stdout.readline()
            if not line:
                raise typer.Exit(far.wait() or EXIT_FAILED)  # it has said why
            raw = _handle_of(line)
        else:
            raw = _handle_of(handle or "")
        report = bench.run(
            _absolute(client_socket),
            raw,
            peer_socket or (handle or "")[:16],
            tests,
            pings,
            device=device,
            throughput_s=_THROUGHPUT_S if count is None else None,
            latency_s=_LATENCY_S if rounds is None else None,
            progress=lambda text: print(text, file=sys.stderr) if sys.stderr.isatty() else None,
        )
        if far is not None:
            far.wait(10)
    except (DqplbError, bench.BenchError, TimeoutError, OSError) as error:
        _transport_failed(error)
    except subprocess.TimeoutExpired:
        pass  # the numbers are there; it is ended below
    finally:
        if far is not None and far.poll() is None:
            far.kill()
            far.wait()
    if as_json:
        emit_json("bench", report)
    else:
        from dqplbd.cli.render import print_table
        from dqplbd.cli.tables import bench_tables

        for table in bench_tables(report):
            print_table(table)
    if not all(one.verified for one in report.throughput):
        fail("what arrived is not what was sent", "report this, with the versions of both daemons")
