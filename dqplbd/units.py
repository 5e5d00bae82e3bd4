# SPDX-License-Identifier: Apache-2.0
"""Sizes, rates and times: parsing what people write and formatting what people read.  Pure.

Base units, the same everywhere in the project, with the unit in the name:

=================  ==========  ==========================  ===================================
quantity           name ends   value                       text accepted
=================  ==========  ==========================  ===================================
size               ``_bytes``  int, bytes                  ``65536``, ``64KiB``, ``1.5 MB``
rate               ``_bps``    int, **bits** a second      ``100Gbit/s``, ``25Gbps``, ``3GB/s``
time of a path     ``_ns``     int, nanoseconds            ``250us``, ``1.2ms``
time of a process  ``_s``      float, seconds              ``30s``, ``5min``, ``250ms``
=================  ==========  ==========================  ===================================

Prefixes: ``k M G T`` are powers of 1000, ``Ki Mi Gi Ti`` powers of 1024 (IEC 80000-13).  Upper and lower case matter
where they change the meaning (``B`` is a byte, ``b`` and ``bit`` a bit); ``K`` is taken as ``k`` and ``µs`` as ``us``.
Arithmetic is decimal, so ``0.1`` times a prefix is exact.
"""

import re
from decimal import Decimal
from typing import Final

__all__ = [
    "UnitError",
    "format_bytes",
    "format_ns",
    "format_rate",
    "parse_bytes",
    "parse_ns",
    "parse_rate",
    "parse_seconds",
]

_MAX_TEXT: Final = 64
_QUANTITY: Final = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?P<unit>[A-Za-zµμ/]*)\s*", re.ASCII)
_LIMIT: Final = 2**63 - 1

_PREFIXES: Final[dict[str, int]] = {
    "": 1,
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_BYTE_UNITS: Final[dict[str, Decimal]] = {"": Decimal(1)} | {p + "B": Decimal(f) for p, f in _PREFIXES.items()}
_RATE_UNITS: Final[dict[str, Decimal]] = (
    {"": Decimal(1)}
    | {p + u: Decimal(f) for p, f in _PREFIXES.items() for u in ("bit/s", "bps", "b/s")}
    | {p + u: Decimal(8 * f) for p, f in _PREFIXES.items() for u in ("B/s",)}
)
_NS_PER: Final[dict[str, Decimal]] = {
    "ns": Decimal(1),
    "us": Decimal(10**3),
    "µs": Decimal(10**3),
    "μs": Decimal(10**3),
    "ms": Decimal(10**6),
    "s": Decimal(10**9),
    "min": Decimal(60 * 10**9),
    "h": Decimal(3600 * 10**9),
    "d": Decimal(86400 * 10**9),
}


class UnitError(ValueError):
    """A text that is no size, rate or time.

    :ivar expected: what would have been accepted, as a phrase ("a size such as 64KiB ...").
    """

    def __init__(self, problem: str, expected: str) -> None:
        super().__init__(f"{problem}; expected {expected}")
        self.problem = problem
        self.expected = expected


def _parse(value: object, units: dict[str, Decimal], expected: str) -> Decimal:
    """:returns: the value in base units, >= 0.  :raises UnitError: on anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UnitError(f"{value!r} is {type(value).__name__}, not a number or a text", expected)
    if isinstance(value, int | float):
        if not 0 <= value <= _LIMIT:  # false for NaN as well
            raise UnitError(f"{value!r} is out of range 0..{_LIMIT}", expected)
        return Decimal(value) if isinstance(value, int) else Decimal(repr(value))
    match = _QUANTITY.fullmatch(value) if len(value) <= _MAX_TEXT else None
    if match is None:
        raise UnitError(f"{value[:_MAX_TEXT]!r} is not a number with a unit", expected)
    factor = units.get(match["unit"])
    if factor is None:
        raise UnitError(f"{value!r} has the unknown unit {match['unit']!r}", expected)
    result = Decimal(match["number"]) * factor
    if result > _LIMIT:
        raise UnitError(f"{value!r} is out of range", expected)
    return result


def _whole(result: Decimal, value: object, expected: str, unit: str) -> int:
    if result != result.to_integral_value():
        raise UnitError(f"{value!r} is not a whole number of {unit}", expected)
    return int(result)


_BYTES_EXPECTED: Final = "a size in bytes, or with a unit: B, kB, MB, GB, KiB, MiB, GiB (such as 512KiB)"
_RATE_EXPECTED: Final = "a rate in bit/s, or with a unit: Mbit/s, Gbit/s, Gbps, GB/s (such as 100Gbit/s)"
_NS_EXPECTED: Final = "a time in nanoseconds, or with a unit: ns, us, ms, s (such as 250us)"
_S_EXPECTED: Final = "a time in seconds, or with a unit: us, ms, s, min, h (such as 30s)"


def parse_bytes(value: object) -> int:
    """Size in bytes from a number of bytes or a text such as ``512KiB``.

    :raises UnitError: not a size, negative, not whole, or beyond 2**63-1.
    """
    return _whole(_parse(value, _BYTE_UNITS, _BYTES_EXPECTED), value, _BYTES_EXPECTED, "bytes")


def parse_rate(value: object) -> int:
    """Rate in bits a second from a number of bit/s or a text such as ``100Gbit/s`` or ``12.5GB/s``.

    :raises UnitError: not a rate, negative, not whole, or beyond 2**63-1.
    """
    return _whole(_parse(value, _RATE_UNITS, _RATE_EXPECTED), value, _RATE_EXPECTED, "bit/s")


def parse_ns(value: object) -> int:
    """Time in nanoseconds from a number of nanoseconds or a text such as ``250us``; a fraction is rounded.

    :raises UnitError: not a time, negative, or beyond 2**63-1 ns.
    """
    return int(_parse(value, {"": Decimal(1)} | _NS_PER, _NS_EXPECTED).to_integral_value())


def parse_seconds(value: object) -> float:
    """Time in seconds from a number of seconds or a text such as ``250ms``.

    :raises UnitError: not a time, negative, or out of range.
    """
    units = {"": Decimal(1)} | {unit: factor / Decimal(10**9) for unit, factor in _NS_PER.items()}
    return float(_parse(value, units, _S_EXPECTED))


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    for size, unit in steps:
        if abs(value) >= size or size == steps[-1][0]:
            # From 9999.5 on four digits would be 1e+04.
            return f"{value / size:.4g}{unit}" if abs(value / size) < 9999.5 else f"{value / size:.0f}{unit}"
    raise AssertionError("steps is never empty")


def format_bytes(value: int) -> str:
    """Size for people, to four digits: ``512KiB``, ``14.5MiB``."""
    return _scaled(value, ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")))


def format_rate(bps: float) -> str:
    """Rate for people from bits a second: ``392.2Gbit/s``."""
    return _scaled(bps, ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1, "bit/s")))


def format_ns(ns: float) -> str:
    """Time for people from nanoseconds: ``8us``, ``1.25ms``."""
    return _scaled(ns, ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1, "ns")))
