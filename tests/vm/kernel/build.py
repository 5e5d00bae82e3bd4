# SPDX-License-Identifier: Apache-2.0
"""Builds the guest's kernel, once: User-Mode Linux with ``rdma_rxe``, from the distribution's source package.

::

    python tests/vm/kernel/build.py          prints the path of the kernel, after building it where it is not there yet
    python tests/vm/kernel/build.py --key    prints the name that it has, and builds nothing

The result lies in ``${XDG_CACHE_HOME:-~/.cache}/dqplbd/`` under a name that follows from everything it is made of: the
version of the source, the configuration, and this program.  So a change of any of them makes another kernel, and all
checkouts of one user share one.  Takes 2 to 5 minutes, 140 MB of download, and 1.7 GB of scratch space that is given
back.  Needs no root.  ``DQPLBD_KERNEL_SOURCE`` names another source: a package (``linux-source-6.12``), or a tarball.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["KernelError", "cache_folder", "kernel"]

HERE: Final = Path(__file__).resolve().parent
CONFIG: Final = HERE / "uml.config"
META_PACKAGE: Final = "linux-source"
"""Depends on the source of the distribution's own kernel: what it supports, rather than the newest that it has."""
OBJECTS: Final = 1000
"""How many lines a build prints, about; only the percentage shown depends on it."""
KEPT: Final = 3
"""Kernels in the cache; older ones are removed after a build."""
SCRATCH_BYTES: Final = 2 * 10**9


class KernelError(RuntimeError):
    """There is no kernel, and why; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the kernel comes from.

    :ivar package: name of the distribution's package; empty for a tarball.
    :ivar version: of the package, or a hash of the tarball.
    :ivar tarball: file, when it is here already.
    """

    package: str
    version: str
    tarball: Path | None


def cache_folder() -> Path:
    """Where kernels are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "dqplbd"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _output(command: Sequence[str]) -> str:
    """What a command prints; empty when it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def _policy(package: str) -> str:
    """Version of a package that apt would install; empty when it knows none."""
    found = re.search(r"Candidate: (\S+)", _output(["apt-cache", "policy", package]))
    return "" if found is None or found[1] == "(none)" else found[1]


def find_source() -> Source:
    """Which source to build: what ``DQPLBD_KERNEL_SOURCE`` names, else that of the distribution's kernel.

    :raises KernelError: there is none.
    """
    named = os.environ.get("DQPLBD_KERNEL_SOURCE", "")
    if "/" in named:
        tarball = Path(named)
        if not tarball.is_file():
            raise KernelError(f"DQPLBD_KERNEL_SOURCE={named}: no such file; expected a kernel's tarball or a package")
        with tarball.open("rb") as file:
            return Source("", hashlib.file_digest(file, "sha256").hexdigest()[:16], tarball)
    package = named
    if not package:
        depends = re.search(r"^Depends: (linux-source-[\w.]+)", _output(["apt-cache", "show", META_PACKAGE]), re.M)
        package = depends[1] if depends else ""
    version = _policy(package) if package else ""
    if not version:
        raise KernelError(
            f"no source of a kernel: apt knows no package {package or META_PACKAGE}. Run `apt-get update` as root "
            "where it has no lists yet; elsewhere name a tarball of Linux 6.1 or later: DQPLBD_KERNEL_SOURCE=/path"
        )
    installed = [Path(f"/usr/src/{package}.tar.{kind}") for kind in ("xz", "bz2", "gz")]
    same = version == _output(["dpkg-query", "-W", "-f=${Version}", package])
    return Source(package, version, next((path for path in installed if same and path.is_file()), None))


def recipe() -> str:
    """Hash of all that makes the kernel but its source."""
    return hashlib.sha256(CONFIG.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:12]


def name_of(source: Source) -> str:
    """Name of the kernel in the cache."""
    version = re.sub(r"[^\w.+-]", "_", source.version)
    return f"linux-rxe-{version}-{recipe()}"


class _Progress:
    """One line a step: rewritten on a terminal, a line each tenth elsewhere."""

    def __init__(self, step: str) -> None:
        self._step = step
        self._begin = time.monotonic()
        self._shown = -1
        self._terminal = sys.stderr.isatty()

    def at(self, done: float) -> None:
        percent = min(int(100 * done), 99)
        if percent == self._shown or (not self._terminal and percent < self._shown + 10):
            return
        self._shown = percent
        line = f"kernel: {self._step} {percent} % after {time.monotonic() - self._begin:.0f} s"
        print(f"\r{line}" if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        line = f"kernel: {self._step} done in {time.monotonic() - self._begin:.0f} s"
        print(f"\r{line:<60}" if self._terminal else line, file=sys.stderr, flush=True)


def _run(command: Sequence[str], cwd: Path, log: Path, progress: _Progress | None = None, total: int = 1) -> None:
    """Run a step; what it prints goes to the log, and shows how far it is.  :raises KernelError: it failed."""
    environ = {**os.environ, "ARCH": "um", "LC_ALL": "C", "KBUILD_BUILD_TIMESTAMP": "@0", "MAKEFLAGS": ""}
    with (
        log.open("ab") as out,
        subprocess.Popen(
            command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for number, line in enumerate(process.stdout):
                out.write(line)
                if progress is not None:
                    progress.at(number / total)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        tail = log.read_text(errors="replace")[-2000:]
        raise KernelError(f"building the kernel failed: {' '.join(command)} ended with {process.returncode}\n{tail}")


def _download(source: Source, scratch: Path, log: Path) -> Path:
    """The source's tarball, from its package, which need not be installed."""
    progress = _Progress(f"downloading {source.package} {source.version}")
    _run(["apt-get", "download", "-q", f"{source.package}={source.version}"], scratch, log)
    packages = list(scratch.glob("*.deb"))
    if len(packages) != 1:
        raise KernelError(f"apt-get download left {len(packages)} packages in {scratch}; expected one")
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", packages[0]], stdout=subprocess.PIPE) as unpacked:
        assert unpacked.stdout is not None
        with tarfile.open(fileobj=unpacked.stdout, mode="r|") as archive:
            for member in archive:
                found = re.search(r"/linux-source-[\w.]+\.tar\.(xz|bz2|gz)$", member.name)
                content = archive.extractfile(member) if found and member.isfile() else None
                if found and content is not None:
                    tarball = scratch / f"source.tar.{found[1]}"
                    with content, tarball.open("wb") as file:
                        shutil.copyfileobj(content, file)
                    break
            else:
                raise KernelError(f"{packages[0].name} has no usr/src/linux-source-*.tar.*")
        unpacked.kill()  # the rest of the package is of no interest
    packages[0].unlink()
    progress.end()
    return tarball


def _configure(tree: Path, log: Path) -> None:
    """Write the configuration.  :raises KernelError: an option did not come out as asked."""
    # The tick is fixed at 100 Hz there; processes that poll would starve each other for 10 ms at a time.
    # In simulated time a look at the clock costs 256 ns, and a system call that fails 1 us, of the one CPU that all
    # hosts share: eight daemons at 100 Gbit/s would all be late. 1 ns does for loops that wait for time to go on.
    for file, pattern, new in (
        ("arch/um/Kconfig", r"(^config HZ\n(?:\t.*\n)*?\tdefault )100$", r"\g<1>1000"),
        ("arch/um/include/linux/time-internal.h", r"(#define TIMER_MULTIPLIER\s+)256\b", r"\g<1>1"),
        ("arch/um/kernel/skas/syscall.c", r"\bum_udelay\(1\);", "um_ndelay(1);"),
    ):
        text = (tree / file).read_text()
        (tree / file).write_text(re.sub(pattern, new, text, flags=re.M))
    _run(["make", "-s", "ARCH=um", "x86_64_defconfig"], tree, log)
    _run(["scripts/kconfig/merge_config.sh", "-m", ".config", str(CONFIG)], tree, log)
    _run(["make", "-s", "ARCH=um", "olddefconfig"], tree, log)
    got = dict(re.findall(r"^(CONFIG_\w+)=(.*)$", (tree / ".config").read_text(), re.M))
    wanted = re.findall(r"^(CONFIG_\w+)=(.*)$", CONFIG.read_text(), re.M)
    wrong = [
        f"{name}={got.get(name, 'n')} ({value} was asked for)" for name, value in wanted if got.get(name, "n") != value
    ]
    if wrong:
        raise KernelError(f"this kernel cannot be configured as {CONFIG} asks: {', '.join(wrong)}")


def _build(source: Source, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as folder:
        scratch = Path(folder)
        log = scratch / "log"
        free = shutil.disk_usage(scratch).free
        if free < SCRATCH_BYTES:
            raise KernelError(f"{target.parent} has {free >> 20} MiB free; building takes {SCRATCH_BYTES >> 20} MiB")
        tarball = source.tarball or _download(source, scratch, log)
        progress = _Progress("unpacking")
        tree = scratch / "src"
        tree.mkdir()
        _run(["tar", "-C", str(tree), "--strip-components=1", "-xf", str(tarball)], scratch, log)
        if tarball.parent == scratch:
            tarball.unlink()
        progress.end()
        progress = _Progress("configuring")
        _configure(tree, log)
        progress.end()
        progress = _Progress("compiling")
        jobs = os.environ.get("DQPLBD_KERNEL_JOBS") or str(len(os.sched_getaffinity(0)))
        _run(["make", "ARCH=um", f"-j{jobs}", "linux"], tree, log, progress, OBJECTS)
        progress.end()
        _run(["strip", "-g", "-o", str(scratch / "stripped"), str(tree / "linux")], scratch, log)
        (scratch / "stripped").rename(target)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One builder at a time; the second finds what the first made."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("kernel: somebody else is building; waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _prune(folder: Path, keep: Path) -> None:
    """Remove what a killed builder left, and all but the newest kernels."""
    for left in folder.glob("build-*"):
        shutil.rmtree(left, ignore_errors=True)
    kernels = sorted(folder.glob("linux-rxe-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in [path for path in kernels if path != keep][KEPT - 1 :]:
        old.unlink(missing_ok=True)


def kernel() -> Path:
    """The kernel, built where it is not there yet.  :raises KernelError: it cannot be."""
    if platform.machine() != "x86_64":
        raise KernelError(f"User-Mode Linux runs on x86_64 only; this machine is {platform.machine()}")
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        source = find_source()
    except KernelError:
        # No lists of packages, but a kernel of this recipe: good.
        made = sorted(folder.glob(f"linux-rxe-*-{recipe()}"), key=lambda path: path.stat().st_mtime)
        if made:
            return made[-1]
        raise
    target = folder / name_of(source)
    if target.is_file():
        return target
    with _alone(folder):
        if not target.is_file():
            _prune(folder, target)
            _say(f"kernel: building {target}, once; this takes some minutes")
            _build(source, target)
            _prune(folder, target)
    return target


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's text.  :returns: exit code."""
    parser = argparse.ArgumentParser(description="Build the guest's kernel where it is not there yet; print its path.")
    parser.add_argument("--key", action="store_true", help="print its name and build nothing")
    options = parser.parse_args(argv)
    try:
        print(name_of(find_source()) if options.key else kernel())
    except KernelError as error:
        _say(f"kernel: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
