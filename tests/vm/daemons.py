# SPDX-License-Identifier: Apache-2.0
"""Daemons over RDMA, and clients of them in processes of their own."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from dqplbd.admin.client import AdminClient
from dqplbd.admin.model import Path as PathView
from dqplbd.lab.cluster import Cluster
from tests.vm.fabric import Fabric

__all__ = ["Stream", "admin", "paths", "verbs_devices"]

_CLIENT: Final = Path(__file__).resolve().parent / "client.py"


def verbs_devices(fabric: Fabric, **options: Any) -> Callable[[int], Sequence[Mapping[str, Any]]]:
    """The devices of a host, one a rail: ``make_cluster(fabric, devices=verbs_devices(fabric))``.

    :param options: keys of the configuration for each.
    """

    def of(host: int) -> Sequence[Mapping[str, Any]]:
        return [
            {
                "name": f"rdma{rail}",
                "provider": "verbs",
                "rdma_device": fabric.port(host, rail).device,
                "rail": rail,
                **options,
            }
            for rail in range(fabric.rails)
        ]

    return of


def admin(cluster: Cluster, host: int) -> AdminClient:
    """Asks the daemon of a host."""
    return AdminClient(cluster[f"host{host}"].admin)


def paths(cluster: Cluster, host: int, peer: int) -> list[PathView]:
    """The paths from one host to another."""
    return admin(cluster, host).paths(peer=f"host{peer}")


class Stream:
    """Messages from a client at one host to a client at another; both are ended on leaving the ``with``.

    :param size: bytes of a message; some have up to six fewer.  :param count: messages.
    """

    def __init__(
        self, cluster: Cluster, near: int, far: int, *, size: int, count: int, device: int = 0, seed: int = 1
    ) -> None:
        numbers = [str(device), str(size), str(count)]
        self._receiver = self._start("receive", cluster[f"host{far}"].client_socket, *numbers)
        self._sender = self._start("send", cluster[f"host{near}"].client_socket, *numbers, str(seed))
        assert self._receiver.stdout is not None
        assert self._sender.stdin is not None
        handle = self._receiver.stdout.readline()
        try:
            self._sender.stdin.write(handle)
            self._sender.stdin.flush()
        except BrokenPipeError:
            pass  # it says why at the end

    @staticmethod
    def _start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", str(_CLIENT), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_begun(self) -> None:
        """Wait until the first message is on its way."""
        assert self._sender.stdout is not None
        line = self._sender.stdout.readline()
        assert line == "begun\n", line + self._sender.stdout.read()

    def sent(self) -> str:
        """Wait for the sender's end.  :returns: its last line: a checksum, or an error."""
        return self._last_line(self._sender)

    def received(self) -> str:
        """Wait for the receiver's end.  :returns: its last line: a checksum, or an error."""
        return self._last_line(self._receiver)

    @staticmethod
    def _last_line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        said = process.stdout.read()
        process.wait()
        return said.strip().rpartition("\n")[2]

    def check(self) -> None:
        """Wait for both, and see that all arrived as it was sent."""
        sent = self.sent()
        assert len(sent) == 64, sent  # else the receiver may wait for somebody who never comes
        assert self.received() == sent

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (self._sender, self._receiver):
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
