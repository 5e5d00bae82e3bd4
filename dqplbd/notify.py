# SPDX-License-Identifier: Apache-2.0
"""Telling the service manager how the daemon is: the protocol of sd_notify(3), without a library.

A state is one datagram of ``KEY=value`` lines to the Unix socket that ``$NOTIFY_SOCKET`` names; a first character
``@`` stands for the NUL of an abstract name.  Without that variable nothing is sent.
"""

import os
import socket
import time
from typing import Final

__all__ = ["Notifier"]

_MAX_STATUS: Final = 1024


class Notifier:
    """The connection to the service manager of this process; every method does nothing when there is none."""

    def __init__(self, environ: dict[str, str] | None = None) -> None:
        """:param environ: the environment to look at; by default this process's."""
        env = os.environ if environ is None else environ
        self._address = env.get("NOTIFY_SOCKET", "")
        self.watchdog_s = _watchdog_s(env.get("WATCHDOG_USEC", ""), env.get("WATCHDOG_PID", ""))
        """Time within which the watchdog wants a sign of life, in seconds; None when there is no watchdog."""

    def send(self, *lines: str) -> bool:
        """Send ``KEY=value`` lines; whether the manager took them.  Never raises and never blocks."""
        if not self._address:
            return False
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sock:
                sock.sendto("\n".join(lines).encode(), address)
        except OSError:
            return False  # the manager is gone or too busy: none of the daemon's business
        return True

    def ready(self, status: str) -> bool:
        """The start, or a reload, is done."""
        return self.send("READY=1", f"STATUS={_one_line(status)}")

    def status(self, status: str) -> bool:
        """One line for ``systemctl status``."""
        return self.send(f"STATUS={_one_line(status)}")

    def reloading(self) -> bool:
        """A reload begins; :meth:`ready` follows."""
        return self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> bool:
        """The daemon begins to stop."""
        return self.send("STOPPING=1", f"STATUS={_one_line(status)}")

    def watchdog(self) -> bool:
        """The daemon is alive."""
        return self.send("WATCHDOG=1")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_STATUS]


def _watchdog_s(usec: str, pid: str) -> float | None:
    """The interval, when it is meant for this process (sd_watchdog_enabled(3))."""
    if not usec.isdecimal() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 1e6
