# SPDX-License-Identifier: Apache-2.0
"""Status codes and the exception that carries them."""

from enum import IntEnum

from dqplbd.client._shim import ffi, lib


class Status(IntEnum):
    """Why an operation ended; the numbers and texts of ``enum dqplb_status``."""

    OK = lib.DQPLB_OK
    AGAIN = lib.DQPLB_ERR_AGAIN
    INVALID = lib.DQPLB_ERR_INVALID
    NOMEM = lib.DQPLB_ERR_NOMEM
    CLOSED = lib.DQPLB_ERR_CLOSED
    CANCELED = lib.DQPLB_ERR_CANCELED
    PEER_GONE = lib.DQPLB_ERR_PEER_GONE
    UNREACHABLE = lib.DQPLB_ERR_UNREACHABLE
    REFUSED = lib.DQPLB_ERR_REFUSED
    TIMEOUT = lib.DQPLB_ERR_TIMEOUT
    TOO_LONG = lib.DQPLB_ERR_TOO_LONG
    REGION = lib.DQPLB_ERR_REGION
    STALE = lib.DQPLB_ERR_STALE
    DAEMON = lib.DQPLB_ERR_DAEMON
    VERSION = lib.DQPLB_ERR_VERSION
    PERMISSION = lib.DQPLB_ERR_PERMISSION
    DEVICE = lib.DQPLB_ERR_DEVICE
    LIMIT = lib.DQPLB_ERR_LIMIT
    FORKED = lib.DQPLB_ERR_FORKED
    INTERNAL = lib.DQPLB_ERR_INTERNAL

    @property
    def text(self) -> str:
        """What the status means, in a few words."""
        return _text(lib.dqplb_strerror(self.value))


def _text(cdata: object) -> str:
    raw: bytes = ffi.string(cdata)
    return raw.decode("utf-8", "replace")


class DqplbError(Exception):
    """A call or an operation failed.

    :ivar status: the :class:`Status`.
    :ivar text: what exactly: names, values, what to do.
    """

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text

    def __str__(self) -> str:
        return f"{self.status.name}: {self.text}"


def last_error(status: int) -> DqplbError:
    """The exception for a call of this thread that just returned ``status``."""
    try:
        known = Status(status)
    except ValueError:
        return DqplbError(Status.INTERNAL, f"the library returned {status}, which is no status")
    return DqplbError(known, _text(lib.dqplb_last_error()) or known.text)


def check(status: int) -> None:
    """Raise unless a call of this thread succeeded.

    :raises DqplbError: ``status`` is not OK.
    """
    if status != lib.DQPLB_OK:
        raise last_error(status)
