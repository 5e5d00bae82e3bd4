# SPDX-License-Identifier: Apache-2.0
"""Several daemons on this machine, as if each had a host of its own.

Every daemon gets its own loopback address (all of 127.0.0.0/8 is local on Linux), so the same ports serve all of them
and no two clusters collide::

    with Cluster([HostSpec("a"), HostSpec("b", overrides={"host": {"location": {"rack": "r2"}}})]) as cluster:
        cluster["a"].client_socket    # for dqplbd.client
        cluster["a"].admin            # for dqplb --socket
        cluster["b"].write_config({"profiles": {"gain": 2.0}}); cluster["b"].reload()

The daemons run as ``python -P -m dqplbd.daemon``.  :meth:`Cluster.start` returns when each said READY=1 to a socket of
its own, as it would to systemd; nothing here waits by sleeping.  They are always ended: on leaving the ``with``, and by
the kernel when this process dies.  Their files lie in a folder of their own below the system's temporary folder.
"""

import contextlib
import ctypes
import ipaddress
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

__all__ = ["Cluster", "ClusterError", "Host", "HostSpec", "merge"]

API_PORT: Final = 7471
METRICS_PORT: Final = 9471
_PR_SET_PDEATHSIG: Final = 1
_LOG_TAIL: Final = 4000


class ClusterError(RuntimeError):
    """A daemon that did not do what was asked; the text has the end of its log."""


@dataclass(frozen=True, slots=True)
class HostSpec:
    """One host of a cluster.

    :ivar host_id: its name.
    :ivar overrides: configuration, as nested mappings, that goes over the cluster's.
    :ivar address: an address of this machine that is its own; by default a free one of loopback.  Others are for a
        machine that holds several hosts' networks: the daemons then talk plain HTTP over them.
    """

    host_id: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    address: str | None = None


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with what ``over`` says; mappings are merged, everything else is replaced."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    """In the child: have the kernel end it when its parent dies, however that happens."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Host:
    """One daemon of a cluster.

    :ivar host_id: its name.  :ivar address: its address.
    :ivar folder: its files.  :ivar config: what its configuration file says, as nested mappings.
    """

    def __init__(self, host_id: str, address: str, folder: Path, config: Mapping[str, Any], python: str) -> None:
        self.host_id = host_id
        self.address = address
        self.folder = folder
        self.config_file = folder / "dqplbd.yaml"
        self.log_file = folder / "log"
        self.client_socket = str(folder / "client.sock")
        self.admin = str(folder / "admin.sock")
        self.api = f"{address}:{API_PORT}"
        self.metrics_url = f"http://{address}:{METRICS_PORT}/metrics"
        self.process: subprocess.Popen[bytes] | None = None
        self.states: list[str] = []
        """Everything it told the service manager, oldest first."""
        self._python = python
        self._notify: socket.socket | None = None
        folder.mkdir(mode=0o700)
        self._base = {
            "host": {"host_id": host_id},
            "devices": [{"name": "tcp0", "address": address}],
            "peers": {"listen": self.api, "insecure": not ipaddress.ip_address(address).is_loopback},
            "clients": {"socket": self.client_socket},
            "admin": {"socket": self.admin},
            "metrics": {"address": address, "port": METRICS_PORT},
        }
        self.config: dict[str, Any] = {}
        self.write_config(config)

    def write_config(self, over: Mapping[str, Any], *, fresh: bool = False) -> None:
        """Change its configuration file by what ``over`` says; it notices at the next start or reload.

        :param fresh: forget what earlier calls said.
        """
        self.config = merge(self._base if fresh or not self.config else self.config, over)
        # YAML reads JSON, and there is no question of quoting.
        self.config_file.write_text(json.dumps(self.config, indent=2), encoding="utf-8")

    @property
    def pid(self) -> int:
        """Of the running process.  :raises ClusterError: it does not run."""
        if self.process is None or self.process.poll() is not None:
            raise ClusterError(f"{self.host_id} is not running{self.log_tail()}")
        return self.process.pid

    def log(self) -> str:
        """What it logged so far."""
        try:
            return self.log_file.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def log_tail(self) -> str:
        """The end of its log, as the end of an error text."""
        return f"; end of its log:\n{self.log()[-_LOG_TAIL:]}"

    def launch(self, environ: Mapping[str, str] | None = None, *, wrapper: Sequence[str] = ()) -> None:
        """Start the process, without waiting until it is ready.

        The kernel ends it when the thread that calls this ends, so call it from one that lives as long.

        :param wrapper: command before that of the daemon, which it becomes: ``["prlimit", "--memlock=65536"]``.
        :raises ClusterError: it runs already.
        """
        if self.process is not None and self.process.poll() is None:
            raise ClusterError(f"{self.host_id} is running already, as process {self.process.pid}")
        self._close_notify()
        name = str(self.folder / "notify")
        Path(name).unlink(missing_ok=True)
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._notify.bind(name)
        self._notify.setblocking(False)
        self.states.clear()
        env = {**os.environ, "NOTIFY_SOCKET": name, **(environ or {})}
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [*wrapper, self._python, "-P", "-m", "dqplbd.daemon", "--config", str(self.config_file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,  # Ctrl-C is for the parent, which ends them in order
                preexec_fn=_die_with_parent,
            )

    def wait_state(self, line: str, timeout_s: float = 60.0) -> None:
        """Wait until it tells the service manager ``line``, such as ``READY=1``, anew: after what was seen before.

        :raises ClusterError: it ended, or did not say it in time.
        """
        if self._notify is None or self.process is None:
            raise ClusterError(f"{self.host_id} was not started")
        deadline = time.monotonic() + timeout_s
        pidfd = os.pidfd_open(self.process.pid) if self.process.poll() is None else -1
        try:
            while True:
                try:
                    while True:
                        said = self._notify.recv(65536).decode("utf-8", "replace").split("\n")
                        self.states += said
                        if line in said:
                            return
                except BlockingIOError:
                    pass
                if self.process.poll() is not None:
                    raise ClusterError(f"{self.host_id} ended with code {self.process.returncode}{self.log_tail()}")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ClusterError(f"{self.host_id} did not say {line} within {timeout_s} s{self.log_tail()}")
                select.select([self._notify.fileno(), pidfd], [], [], left)
        finally:
            if pidfd >= 0:
                os.close(pidfd)

    def reload(self, timeout_s: float = 30.0) -> None:
        """Send SIGHUP and wait until it says that it is done, whether it took the file or not."""
        os.kill(self.pid, signal.SIGHUP)
        self.wait_state("READY=1", timeout_s)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal.  :raises ClusterError: it does not run."""
        os.kill(self.pid, number)

    def wait_exit(self, timeout_s: float = 30.0) -> int:
        """Wait for the end of the process.  :returns: its exit code.  :raises ClusterError: it still runs."""
        if self.process is None:
            raise ClusterError(f"{self.host_id} was not started")
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{self.host_id} still runs after {timeout_s} s{self.log_tail()}") from None

    def stop(self, timeout_s: float = 15.0) -> int | None:
        """End it: SIGTERM, then SIGKILL when that takes too long.  :returns: its exit code; None if never started."""
        if self.process is None:
            return None
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGTERM)
                os.kill(self.process.pid, signal.SIGCONT)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._close_notify()
        return self.process.returncode

    def _close_notify(self) -> None:
        if self._notify is not None:
            self._notify.close()
            self._notify = None


def _free_network() -> str:
    """The first three bytes of loopback addresses that nobody uses here now."""
    for _ in range(64):
        prefix = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}"
        with socket.socket() as probe:
            try:
                probe.bind((f"{prefix}.1", API_PORT))
            except OSError:
                continue
        return prefix
    raise ClusterError("no free loopback addresses found: is port 7471 taken on all of 127.0.0.0/8?")


class Cluster:
    """Daemons on loopback addresses 127.x.y.1, 127.x.y.2, ... of this machine, or on those that the hosts name; see
    the module's text.

    :param hosts: the hosts, or how many (then named ``h1``, ``h2``, ...); at most 250.
    :param config: configuration of all, as nested mappings.
    :param know: each has all others as static peers; else they learn of each other from workloads.
    :param folder: where their files go, made when missing; by default a temporary folder that is removed at the end.
    :param python: interpreter to run them with.
    """

    def __init__(
        self,
        hosts: int | Sequence[HostSpec | str],
        config: Mapping[str, Any] | None = None,
        *,
        know: bool = True,
        folder: Path | None = None,
        python: str = sys.executable,
    ) -> None:
        given = [f"h{i + 1}" for i in range(hosts)] if isinstance(hosts, int) else hosts
        specs = [HostSpec(spec) if isinstance(spec, str) else spec for spec in given]
        if not 1 <= len(specs) <= 250 or len({spec.host_id for spec in specs}) != len(specs):
            raise ValueError(f"{len(specs)} hosts; expected 1..250 with a name of their own each")
        self._temporary = folder is None
        # A short name: the path of a Unix socket has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="dqplbd-")) if folder is None else folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.prefix = _free_network()
        addresses = {spec.host_id: spec.address or f"{self.prefix}.{i + 1}" for i, spec in enumerate(specs)}
        self.hosts: dict[str, Host] = {}
        for spec in specs:
            others = [
                {"address": f"{address}:{API_PORT}"} for name, address in addresses.items() if name != spec.host_id
            ]
            base: dict[str, Any] = {"peers": {"static": others}} if know else {}
            self.hosts[spec.host_id] = Host(
                spec.host_id,
                addresses[spec.host_id],
                self.folder / spec.host_id,
                merge(merge(base, config or {}), spec.overrides),
                python,
            )

    def __getitem__(self, host_id: str) -> Host:
        return self.hosts[host_id]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts.values())

    def __len__(self) -> int:
        return len(self.hosts)

    def start(self, timeout_s: float = 60.0) -> Self:
        """Start all that do not run, and wait until each is ready.

        :raises ClusterError: one did not get ready; all are stopped then.
        """
        try:
            fresh = [host for host in self if host.process is None or host.process.poll() is not None]
            for host in fresh:
                host.launch()
            for host in fresh:
                host.wait_state("READY=1", timeout_s)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End all and remove the temporary folder.  A second call does nothing."""
        for host in self:
            if host.process is not None and host.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(host.process.pid, signal.SIGTERM)
        for host in self:
            host.stop()
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
