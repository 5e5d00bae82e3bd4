# SPDX-License-Identifier: Apache-2.0
"""Runs a command in a guest whose kernel has ``rdma_rxe``: the RDMA stack, without RDMA hardware.

::

    python tests/vm/guest.py -- rdma link                    # in real time
    python tests/vm/guest.py --simulated -- sleep 3600       # in simulated time: ends at once

The guest sees the host's files at their paths, read-only, and may write to one folder.  It is no prison: its root has
the rights of the user that runs it, no less.  It has one CPU of the host to itself; a guest that wanders between CPUs
is ten times slower.  Two guests at a time do not disturb each other.  Whatever becomes of a guest or of this process,
no process and no file of it stays.

``DQPLBD_VM=native`` runs the command on this machine instead, whose kernel must have ``rdma_rxe``; that is also what is
done for root where it has.  ``DQPLBD_VM=uml`` forbids it.  Simulated time is the guest's alone.  ``DQPLBD_VM=qemu``
runs the command in a virtual machine with the distribution's kernel, as is done where User-Mode Linux cannot run; that
is slow, unless the hardware helps, and has no simulated time.

In simulated time work costs nothing and sleeping moves the clock, so delays of microseconds and links of 100 Gbit/s are
exact.  A process that polls without ever sleeping stops the clock.
"""

import argparse
import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

ROOT: Final = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.append(str(ROOT))

from tests.vm import qemu  # noqa: E402
from tests.vm.kernel.build import KernelError, kernel  # noqa: E402
from tests.vm.kernel.distribution import distribution_kernel  # noqa: E402

__all__ = ["GuestError", "Result", "no_simulated_time", "place", "prepared_kernel", "run_guest", "run_here"]

HERE: Final = Path(__file__).resolve().parent
SEED_LIBRARY: Final = ROOT / "build/release/native/tools/libdqplb_seeded_random.so"
_SEEDED_START_NS: Final = 1_700_000_000_000_000_000
_TAIL: Final = 3000
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG: Final = 1


class GuestError(RuntimeError):
    """The guest did not run the command to its end; the text has the end of its console and output."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a command.

    :ivar rc: its exit code.
    :ivar seconds: wall time of the host, from the start of the guest to its end.
    """

    rc: int
    stdout: str
    stderr: str
    seconds: float


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _busy(seconds: float = 0.05) -> dict[int, int]:
    """How long each CPU was busy in the next moment, in ticks."""

    def ticks() -> dict[int, int]:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
        # user, nice, system, idle, iowait, irq, softirq, steal
        return {int(one[0][3:]): sum(map(int, one[1:4])) + sum(map(int, one[6:9])) for one in lines if one[0] != "cpu"}

    before = ticks()
    time.sleep(seconds)
    return {cpu: now - before.get(cpu, 0) for cpu, now in ticks().items()}


def quiet_cpu() -> int:
    """The CPU, of those this process may use, that has the least to do now."""
    allowed = sorted(os.sched_getaffinity(0))
    busy = _busy()
    return min(allowed, key=lambda cpu: busy.get(cpu, 0))


def _memory_folder(memory_mb: int) -> Path:
    """Where the guest's memory lies: in the host's memory where that has room and may be executed from."""
    shm = Path("/dev/shm")
    if shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > memory_mb << 20:
        noexec = os.statvfs(shm).f_flag & os.ST_NOEXEC
        if not noexec:
            return shm
    return Path(tempfile.gettempdir())


def _prepare(
    control: Path, command: Sequence[str], out: Path, env: Mapping[str, str], cwd: Path, visible: Sequence[Path]
) -> None:
    """Write what init.sh reads."""
    shutil.copyfile(HERE / "init.sh", control / "init")
    (control / "init").chmod(0o755)
    shutil.copyfile("/proc/cpuinfo", control / "cpuinfo")
    folders = " ".join(shlex.quote(str(path)) for path in visible)
    (control / "settings").write_text(f"OUT={shlex.quote(str(out))}\nVISIBLE=({folders})\n", encoding="utf-8")
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
    (control / "command").write_text(f"cd {shlex.quote(str(cwd))} || exit\n{exports}exec {shlex.join(command)}\n")


class _Follower:
    """Copies what is added to a file to a stream of this process."""

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self._path = path
        self._stream = stream
        self._at = 0

    def copy(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                added = file.read()
        except FileNotFoundError:
            return
        if added:
            self._at += len(added)
            self._stream.write(added)
            self._stream.flush()


@contextlib.contextmanager
def _control_folder(out: Path, seed: str | None) -> Iterator[Path]:
    """Where the guest finds what it needs before anything else.

    Its name is on the kernel's command line, from which the kernel draws randomness, too: with a seed it is always the
    same.  Not below /dev: the kernel has mounted its own there before it looks for its first process.
    """
    if seed is None:
        with tempfile.TemporaryDirectory(prefix="dqplbd-guest-") as folder:
            yield Path(folder)
        return
    control = out.with_name(f"{out.name}.control")
    shutil.rmtree(control, ignore_errors=True)
    control.mkdir()
    try:
        yield control
    finally:
        shutil.rmtree(control, ignore_errors=True)


def _start(
    command: Sequence[str], console: Path, cpu: int, memory: Path, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    def child() -> None:
        os.sched_setaffinity(0, {cpu})
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    with console.open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"PATH": os.environ.get("PATH", os.defpath), "TMPDIR": str(memory), "HOME": str(memory), **env},
            start_new_session=True,  # so that all processes of the guest can be ended together
            preexec_fn=child,
        )


# Ends the guest's processes and removes its folder when the process that holds the other end of the pipe is gone.
_KEEPER: Final = 'read -r done || { kill -s KILL -- "-$1"; rm -rf -- "$2"; }'


def _keep(process: subprocess.Popen[bytes], control: Path) -> subprocess.Popen[bytes]:
    """Have somebody clean up when this process is killed: helpers of the guest outlive its main process."""
    return subprocess.Popen(
        ["/bin/sh", "-c", _KEEPER, "keeper", str(process.pid), str(control)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End all processes of the guest."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def place() -> str:
    """Where tests run in real time: ``native``, ``uml`` or ``qemu``.

    What ``DQPLBD_VM`` says, else on this machine where its kernel has, or loads, soft-RoCE and this is root, else in
    User-Mode Linux where that can run.

    :raises ValueError: DQPLBD_VM is something else.
    """
    said = os.environ.get("DQPLBD_VM", "")
    if said:
        if said not in ("native", "uml", "qemu"):
            raise ValueError(f"DQPLBD_VM is {said!r}; expected native, uml or qemu")
        return said
    if os.geteuid() == 0:
        if not Path("/sys/module/rdma_rxe").exists() and shutil.which("modprobe"):
            subprocess.run(["modprobe", "--quiet", "rdma_rxe"], capture_output=True, check=False)
        if Path("/sys/module/rdma_rxe").exists():
            return "native"
    return "qemu" if qemu.no_uml() else "uml"


def no_simulated_time() -> str:
    """Why there is no simulated time here; empty where there is."""
    if os.environ.get("DQPLBD_VM", "") == "qemu":
        return "DQPLBD_VM is qemu, and simulated time is User-Mode Linux's alone"
    missing = qemu.no_uml()
    return missing and f"simulated time is User-Mode Linux's alone: {missing}"


def prepared_kernel() -> Path:
    """What guests boot here, made where it is not there yet: what ``DQPLBD_KERNEL`` names, else that of :func:`place`.

    :raises KernelError: it cannot be made.
    """
    if os.environ.get("DQPLBD_KERNEL"):
        return Path(os.environ["DQPLBD_KERNEL"])
    return distribution_kernel() if place() == "qemu" else kernel()


def run_here(
    command: Sequence[str], *, timeout_s: float, env: Mapping[str, str], cwd: Path, live: bool = False
) -> Result:
    """Run a command on this machine: what :func:`run_guest` does, without the guest."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dqplbd-guest-") as folder:
        paths = [Path(folder, name) for name in ("stdout", "stderr")]
        with paths[0].open("wb") as stdout, paths[1].open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=cwd,
                env={**os.environ, **env},
                start_new_session=True,
            )
        followers = [_Follower(paths[0], sys.stdout.buffer), _Follower(paths[1], sys.stderr.buffer)]
        try:
            timely = _wait(process, begin + timeout_s, followers if live else [])
        finally:
            _end(process)
        if live:
            for follower in followers:
                follower.copy()
        stdout_text, stderr_text = _read(paths[0]), _read(paths[1])
    if not timely:
        tail = f"{stdout_text[-_TAIL:]}{stderr_text[-_TAIL:]}"
        raise GuestError(f"{shlex.join(command)} was ended after {timeout_s:g} s; end of its output:\n{tail}")
    return Result(process.returncode, stdout_text, stderr_text, time.monotonic() - begin)


def run_guest(
    command: Sequence[str],
    *,
    out: Path,
    simulated: bool = False,
    memory_mb: int = 512,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
    cpu: int | None = None,
    cwd: Path = ROOT,
    live: bool = False,
    seed: str | None = None,
) -> Result:
    """Run a command in a guest of its own.

    :param command: program and arguments, by their paths on the host.
    :param out: folder that the command may write to, at the same path as on the host; made where missing.
    :param simulated: simulated time; see the module's text.
    :param memory_mb: memory of the guest, 64..65536; the host gives only what is used.
    :param timeout_s: wall time after which the guest is ended.
    :param env: environment beside PATH, HOME and LANG.
    :param cpu: CPU of the host; by default one with little to do.
    :param cwd: folder that the command starts in.
    :param live: copy the command's output to that of this process meanwhile.
    :param seed: in simulated time, two runs with the same seed, command, memory and ``out`` are the same run: the
        guest's kernel draws its randomness from this text, and begins at the same date.
    :returns: the command's exit code and output, whatever they are.
    :raises GuestError: the guest ended, or was ended, before the command, or there is no simulated time here.
    :raises KernelError: there is no kernel for it.
    :raises ValueError: no command, no such memory, or a seed in real time.
    """
    if not command:
        raise ValueError("no command to run in the guest")
    if not 64 <= memory_mb <= 65536:
        raise ValueError(f"memory_mb is {memory_mb}; expected 64..65536")
    if simulated and no_simulated_time():
        raise GuestError(f"no guest for {shlex.join(command)}: {no_simulated_time()}")
    where = place()
    if not simulated and where == "native":
        out.mkdir(parents=True, exist_ok=True)
        return run_here(command, timeout_s=timeout_s, env=env or {}, cwd=cwd, live=live)
    if seed is not None and not simulated:
        raise ValueError("a seed makes no two runs equal in real time; expected simulated")
    if seed is not None and not SEED_LIBRARY.exists():
        raise GuestError(f"{SEED_LIBRARY} was not built; `make install` builds it")
    image = prepared_kernel()
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    memory = _memory_folder(memory_mb)
    host_env = {} if seed is None else {"LD_PRELOAD": str(SEED_LIBRARY), "DQPLBD_SEED": seed}
    with _control_folder(out, seed) as control:
        visible = [ROOT, cwd, Path(sys.prefix), Path(sys.base_prefix)]
        _prepare(control, command, out, env or {}, cwd, visible)
        if where == "qemu":
            start = qemu.command(image, control, out, memory_mb)
        else:
            append = ["time-travel=inf-cpu"] if simulated else []
            append += [f"time-travel-start={_SEEDED_START_NS}"] if seed is not None else []
            start = [
                str(image),
                f"mem={memory_mb}M",
                *("root=none", "rootfstype=hostfs", "rootflags=/", "ro", "quiet", "panic=-1"),
                *("con=null", "con0=null,fd:1"),
                f"uml_dir={control}",
                f"init={control}/init",
                f"dqplbd.control={control}",
                *append,
            ]
        begin = time.monotonic()
        process = _start(
            start,
            control / "console",
            quiet_cpu() if cpu is None else cpu,
            memory,
            host_env,
        )
        keeper = _keep(process, control)
        followers = [_Follower(control / "stdout", sys.stdout.buffer), _Follower(control / "stderr", sys.stderr.buffer)]
        try:
            timely = _wait(process, begin + timeout_s, followers if live else [])
        finally:
            _end(process)
            keeper.communicate(b"done\n")
        seconds = time.monotonic() - begin
        if live:
            for follower in followers:
                follower.copy()
        rc = _read(control / "rc").strip()
        stdout, stderr = _read(control / "stdout"), _read(control / "stderr")
        if not rc.isdecimal():
            why = "ended without a result" if timely else f"was ended after {timeout_s:g} s"
            raise GuestError(
                f"the guest {why}: {shlex.join(command)}\nend of its console:\n{_read(control / 'console')[-_TAIL:]}\n"
                f"end of its output:\n{stdout[-_TAIL:]}{stderr[-_TAIL:]}"
            )
        return Result(int(rc), stdout, stderr, seconds)


def _wait(process: subprocess.Popen[bytes], deadline: float, followers: Sequence[_Follower]) -> bool:
    """Wait for the guest's end.  :returns: False when the deadline came first."""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        try:
            process.wait(min(left, 0.1) if followers else left)
            return True
        except subprocess.TimeoutExpired:
            for follower in followers:
                follower.copy()


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's text.  :returns: exit code."""
    parser = argparse.ArgumentParser(
        description="Run a command in a guest whose kernel has rdma_rxe.", usage="guest.py [options] -- command ..."
    )
    parser.add_argument("--simulated", action="store_true", help="in simulated time")
    parser.add_argument("--memory", type=int, default=512, metavar="MB", help="memory of the guest (default: 512)")
    parser.add_argument("--timeout", type=float, default=120, metavar="S", help="seconds until it is ended (120)")
    parser.add_argument("--out", type=Path, default=ROOT / "build/guest", help="folder it may write to (build/guest)")
    parser.add_argument("--cpu", type=int, help="CPU of the host (default: one with little to do)")
    parser.add_argument("--place", action="store_true", help="only print where commands run: native, uml or qemu")
    parser.add_argument("command", nargs="*", help="program and arguments")
    options = parser.parse_args(argv)
    try:
        if options.place:
            print(place())
            return 0
        result = run_guest(
            options.command,
            out=options.out,
            simulated=options.simulated,
            memory_mb=options.memory,
            timeout_s=options.timeout,
            cpu=options.cpu,
            cwd=Path.cwd(),
            live=True,
        )
    except (GuestError, KernelError, ValueError) as error:
        print(f"guest: {error}", file=sys.stderr)
        return 125
    return result.rc


if __name__ == "__main__":
    sys.exit(main())
