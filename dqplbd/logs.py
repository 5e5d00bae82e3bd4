# SPDX-License-Identifier: Apache-2.0
"""Logs on standard error: one line a record, as text for people or as JSON for machines.

Modules use :mod:`logging` and attach values with :func:`fields`::

    log.warning("peer does not answer", extra=fields(host_id="node7", address="10.0.0.7:7471", failures=3))

Text ends with ``key=value`` pairs; JSON has them as members beside ``time`` (RFC 3339, UTC), ``level``, ``logger`` and
``message``.  What one place of the source logs is limited, since strangers can cause some of it.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

__all__ = ["JsonFormatter", "RateLimit", "TextFormatter", "fields", "finish", "setup"]

_FIELDS: Final = "dqplbd_fields"
_RESERVED: Final = frozenset({"time", "level", "logger", "message", "error", "suppressed"})


def fields(**values: object) -> dict[str, Any]:
    """Values of a record, for ``extra=``; None is left out."""
    return {_FIELDS: {key: value for key, value in values.items() if value is not None}}


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    values: Mapping[str, object] = getattr(record, _FIELDS, {})
    return values


def _quote(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and not set(' "=') & set(text) else json.dumps(text, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """``12:00:00.123 INFO  peers.link: hello answered host_id=node7``; the date is the reader's to add."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; an exception adds its traceback."""
        stamp = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        name = record.name.removeprefix("dqplbd.")
        message = record.getMessage()
        line = f"{stamp} {record.levelname:<7} {name}: {message}"
        for key, value in _fields_of(record).items():
            line += f" {key}={_quote(value)}"
        suppressed = getattr(record, "suppressed", 0)
        if suppressed:
            line += f" suppressed={suppressed}"
        line = line.replace("\n", "\\n").replace("\r", "\\r")
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, always."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key, value in _fields_of(record).items():
            entry[f"{key}_" if key in _RESERVED else key] = value
        suppressed = getattr(record, "suppressed", 0)
        if suppressed:
            entry["suppressed"] = suppressed
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


class RateLimit(logging.Filter):
    """Lets each place of the source log ``burst`` records at once and ``per_s`` a second in the long run.

    The next record that passes says how many did not.
    """

    def __init__(self, burst: int = 50, per_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._burst, self._per_s, self._clock = burst, per_s, clock
        self._places: dict[tuple[str, int], list[float]] = {}  # tokens, time of the last record, suppressed

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record may pass."""
        now = self._clock()
        place = self._places.setdefault((record.pathname, record.lineno), [float(self._burst), now, 0.0])
        place[0] = min(self._burst, place[0] + (now - place[1]) * self._per_s)
        place[1] = now
        if place[0] < 1:
            place[2] += 1
            return False
        place[0] -= 1
        if place[2]:
            record.suppressed = int(place[2])
            place[2] = 0
        return True


class _Strangers(logging.Filter):
    """Bytes that are no HTTP are the sender's fault, not the daemon's: one short line says so, without a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always true."""
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if error is not None and type(error).__module__ == "aiohttp.http_exceptions":
            text = " ".join(str(error).split())
            record.msg, record.args = f"{record.getMessage()}: {text[:160]}", ()
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


_STRANGERS: Final = _Strangers()


def setup(style: Literal["json", "text"], level: str, stream: TextIO | None = None) -> None:
    """Log all records from ``level`` on; a later call replaces the earlier one.

    :param level: ``debug``, ``info``, ``warning`` or ``error``.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    handler.addFilter(RateLimit())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    # These tell every connection and every lookup at info or debug.
    for name in ("aiohttp", "asyncio", "pyroute2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("aiohttp.server").addFilter(_STRANGERS)


def finish() -> None:
    """Let go of the standard streams, before the process ends.

    What a full disk or a reader that is gone did not take is dropped: else the interpreter would try it once more and
    end with an exit code of its own.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
