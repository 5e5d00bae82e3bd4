# SPDX-License-Identifier: Apache-2.0
"""Host lists in brackets, as Slurm writes them: ``gpu[001-016,020],login1``.  Pure.

Grammar: names separated by commas; a name is text with any number of ``[...]``, each a list of numbers and ranges; the
width of a range's first number is kept (``[08-10]`` is ``08 09 10``).  Several brackets multiply.
"""

import re
from itertools import product
from typing import Final

__all__ = ["MAX_HOSTS", "HostlistError", "expand_hostlist"]

MAX_HOSTS: Final = 200_000

_PART: Final = re.compile(r"\[(?P<ranges>[^\[\]]*)\]|(?P<text>[^\[\],]+)")
_RANGE: Final = re.compile(r"(?P<first>\d{1,18})(?:-(?P<last>\d{1,18}))?", re.ASCII)


class HostlistError(ValueError):
    """A text that is no host list, or one that names too many hosts."""


def _expand_ranges(ranges: str, whole: str, limit: int) -> list[str]:
    result: list[str] = []
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise HostlistError(f"{item!r} in {whole!r} is no number or range; expected such as 1 or 07-12")
        first, last = match["first"], match["last"] or match["first"]
        low, high = int(first), int(last)
        if high < low:
            raise HostlistError(f"range {item!r} in {whole!r} runs backwards; expected the smaller number first")
        if len(result) + high - low + 1 > limit:
            raise HostlistError(f"{whole!r} names more than {limit} hosts; split it")
        result.extend(str(number).zfill(len(first)) for number in range(low, high + 1))
    return result


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    names, depth, start = [], 0, 0
    for index, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        if depth not in (0, 1):
            raise HostlistError(f"{text[:80]!r} has brackets that do not match; expected such as n[1-3]")
        if char == "," and depth == 0:
            names.append(text[start:index])
            start = index + 1
    if depth:
        raise HostlistError(f"{text[:80]!r} has brackets that do not match; expected such as n[1-3]")
    names.append(text[start:])
    return names


def expand_hostlist(text: str, limit: int = MAX_HOSTS) -> list[str]:
    """The hosts that a list names, in its order; an empty text names none.

    :param text: such as ``r[1-2]n[01-16],login1``.
    :param limit: most hosts.
    :raises HostlistError: not a host list, or more hosts than that.
    """
    if not text.strip():
        return []
    hosts: list[str] = []
    for name in _split(text):
        name = name.strip()
        if not name or any(char.isspace() for char in name):
            raise HostlistError(f"{text[:80]!r} has an empty name or one with a blank; expected names between commas")
        parts: list[list[str]] = []
        count = 1
        for match in _PART.finditer(name):
            if match["text"] is not None:
                parts.append([match["text"]])
            else:
                parts.append(_expand_ranges(match["ranges"], name, limit))
                count *= len(parts[-1])
                if len(hosts) + count > limit:
                    raise HostlistError(f"{text[:80]!r} names more than {limit} hosts; split it")
        if len(hosts) + count > limit:
            raise HostlistError(f"{text[:80]!r} names more than {limit} hosts; split it")
        hosts.extend(map("".join, product(*parts)))
    return hosts
