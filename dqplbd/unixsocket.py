# SPDX-License-Identifier: Apache-2.0
"""Unix sockets of a daemon: one owner a path, exact rights from the first moment, nothing left behind."""

import contextlib
import errno
import fcntl
import grp
import os
import secrets
import socket
from typing import Final

__all__ = ["LockError", "PathLock", "bind_unix", "remove_unix"]

_MAX_PATH: Final = 107  # sun_path, unix(7)


class LockError(Exception):
    """Another process owns a path; the text names both."""


class PathLock:
    """The right to serve one socket path: a lock on the file ``PATH.lock`` beside it.

    The kernel drops it with the process, so a crash leaves no lock behind, only a socket file that the next owner
    replaces.
    """

    def __init__(self, path: str) -> None:
        """Take it.  :raises LockError: another process has it.  :raises OSError: the file cannot be made."""
        self.path = f"{path}.lock"
        while True:
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"socket {path} cannot be made: {error.strerror}; expected a folder that this process may write to "
                    "(systemd's RuntimeDirectory= makes one): create it, or change clients.socket and admin.socket",
                ) from None
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _same_file(fd, self.path):
                    os.ftruncate(fd, 0)
                    os.write(fd, f"{os.getpid()}\n".encode())
                    self._fd = fd
                    return
            except BlockingIOError:
                owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                os.close(fd)
                raise LockError(
                    f"{path} is served by another daemon (process {owner}); stop that one, or give this one sockets of "
                    "its own in clients.socket and admin.socket"
                ) from None
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # its owner removed the file between open and lock: once more

    def release(self) -> None:
        """Give it up and remove the file; a second call does nothing."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                if _same_file(self._fd, self.path):
                    os.unlink(self.path)
            os.close(self._fd)
            self._fd = -1


def _same_file(fd: int, path: str) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def bind_unix(path: str, kind: int, mode: int, group: str | None) -> socket.socket:
    """A non-blocking socket bound at ``path`` that never exists there with other rights than ``mode``.

    It is bound under a name that nobody knows, given its rights, and moved into place, which also replaces the socket
    of a dead process.  That no other process serves ``path`` is for the caller to know: see :class:`PathLock`.

    :param kind: ``socket.SOCK_SEQPACKET`` or another type.
    :raises OSError: with path and cause.
    """
    private = f"{path}.{secrets.token_hex(4)}"
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        if len(private.encode()) > _MAX_PATH:
            raise OSError(errno.ENAMETOOLONG, f"the path and 9 characters more exceed {_MAX_PATH} bytes")
        mask = os.umask(0o177)
        try:
            sock.bind(private)
        finally:
            os.umask(mask)
        try:
            if group is not None:
                os.chown(private, -1, _group_id(group))
            os.chmod(private, mode)
            os.rename(private, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(private)
            raise
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"socket {path}: {error.strerror or error}") from error
    return sock


def _group_id(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise OSError(errno.ENOENT, f"there is no group {name!r} on this host") from None


def remove_unix(path: str) -> None:
    """Remove a socket file; one that is gone is no error."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
