# SPDX-License-Identifier: Apache-2.0
"""The messages of collectives, in the order in which a library posts them.  Pure.

A message is sent when its time has come and the one message that it depends on has arrived at its sender.  Sizes follow
the conventions of nccl-tests: ``size_bytes`` is what its table has in the column *size*, and ``bus_factor`` turns size
over time into the bus bandwidth of its table.

=====================  ==========================  ==========================================================
collective             size                        bus factor
=====================  ==========================  ==========================================================
all-to-all             what each rank sends        (n-1)/n
all-gather             what each rank ends with    (n-1)/n
reduce-scatter         what each rank begins with  (n-1)/n
all-reduce             what each rank has          2(n-1)/n
incast, permutation    what each sender sends      1
=====================  ==========================  ==========================================================

Adding up what arrives takes no time: only the network is simulated.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

__all__ = [
    "NO_MESSAGE",
    "Message",
    "Schedule",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_skewed",
    "incast",
    "parse_trace",
    "permutation",
    "reduce_scatter",
    "shuffled",
]

NO_MESSAGE: Final = 2**32 - 1
_ALIGN: Final = 128


class Message(NamedTuple):
    """One message.

    :ivar sender: rank, from 0.
    :ivar receiver: another rank.
    :ivar size_bytes: its length, >= 0.
    :ivar after: index of an earlier message to ``sender`` that must have arrived; :data:`NO_MESSAGE` for none.
    :ivar start_ns: not before this time of the job.
    """

    sender: int
    receiver: int
    size_bytes: int
    after: int = NO_MESSAGE
    start_ns: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a collective posts.

    :ivar algorithm: how it goes about it, for people.
    :ivar messages: in the order in which they are posted.
    :ivar size_bytes: by the conventions of nccl-tests; 0 where there are none.
    :ivar bus_factor: bus bandwidth = ``size_bytes`` / time * this; 0 where there is none.
    :ivar step_bytes: of the smallest and the largest message.
    """

    algorithm: str
    messages: list[Message]
    size_bytes: int
    bus_factor: float

    @property
    def step_bytes(self) -> tuple[int, int]:
        """Sizes of the smallest and the largest message; 0 where there is none."""
        sizes = [message.size_bytes for message in self.messages]
        return (min(sizes), max(sizes)) if sizes else (0, 0)


def _need_ranks(ranks: int) -> None:
    if ranks < 2:
        raise ValueError(f"{ranks} ranks: expected at least 2")


def _share(total: int, parts: int, index: int) -> int:
    """Part ``index`` of ``parts`` even ones, in whole bytes that sum up."""
    return total * (index + 1) // parts - total * index // parts


def all_to_all(ranks: int, size_bytes: int) -> Schedule:
    """Every rank sends an even part of its ``size_bytes`` to each rank; all at once, the next rank first.

    :raises ValueError: fewer than two ranks.
    """
    _need_ranks(ranks)
    messages = [
        Message(rank, (rank + step) % ranks, _share(size_bytes, ranks, (rank + step) % ranks))
        for step in range(1, ranks)
        for rank in range(ranks)
    ]
    return Schedule("direct, all peers at once", messages, size_bytes, (ranks - 1) / ranks)


def all_to_all_skewed(ranks: int, size_bytes: int, skew: float, spread: float, seed: int) -> Schedule:
    """All-to-allv as the routing of a mixture of experts makes it: every rank sends ``size_bytes`` in all, but one
    receiver draws ``skew`` times the mean, and the others differ by a log-normal factor of their own for each sender.

    :param skew: of the hot receiver (the rank in the middle); over 0, under ``ranks``.
    :param spread: standard deviation of the factor's logarithm, >= 0.
    :param seed: of the factors.
    :raises ValueError: a parameter is out of its range.
    """
    _need_ranks(ranks)
    if not 0 < skew < ranks or spread < 0:
        raise ValueError(f"skew {skew} and spread {spread}: expected over 0 and under {ranks}, and at least 0")
    generator = random.Random(seed)
    hot = ranks // 2
    hot_bytes = round(size_bytes * skew / ranks / _ALIGN) * _ALIGN
    sizes: list[list[int]] = []
    for _ in range(ranks):
        weights = [generator.lognormvariate(0, spread) for _ in range(ranks)]
        total = sum(weights) - weights[hot]
        row = [int((size_bytes - hot_bytes) * weight / total) // _ALIGN * _ALIGN for weight in weights]
        row[hot] = hot_bytes
        sizes.append(row)
    messages = [
        Message(rank, (rank + step) % ranks, sizes[rank][(rank + step) % ranks])
        for step in range(1, ranks)
        for rank in range(ranks)
    ]
    return Schedule(f"direct, rank {hot} draws {skew:g} times the mean", messages, size_bytes, (ranks - 1) / ranks)


def _ring(ranks: int, size_bytes: int, steps: int, channels: int) -> list[Message]:
    """``steps`` steps of a ring of even parts, each cut into ``channels`` that run side by side."""
    messages: list[Message] = []
    for step in range(steps):
        for rank in range(ranks):
            # Which part it is that this rank hands on: it came from the rank before.
            part = _share(size_bytes, ranks, (rank - step) % ranks)
            before = ((step - 1) * ranks + (rank - 1) % ranks) * channels
            messages += [
                Message(
                    rank, (rank + 1) % ranks, _share(part, channels, channel), before + channel if step else NO_MESSAGE
                )
                for channel in range(channels)
            ]
    return messages


def _exchange(ranks: int, sizes: Sequence[int], distances: Sequence[int]) -> list[Message]:
    """Each rank swaps ``sizes[k]`` with the rank ``distances[k]`` away, step by step."""
    messages: list[Message] = []
    for step, (size, distance) in enumerate(zip(sizes, distances, strict=True)):
        for rank in range(ranks):
            after = NO_MESSAGE if step == 0 else (step - 1) * ranks + (rank ^ distances[step - 1])
            messages.append(Message(rank, rank ^ distance, size, after))
    return messages


def _doubling(ranks: int, size_bytes: int) -> list[tuple[int, int]]:
    """Size and distance of each step of recursive doubling: near and small first."""
    if ranks & (ranks - 1):
        raise ValueError(f"{ranks} ranks: a recursive algorithm needs a power of two")
    return [(size_bytes * distance // ranks, distance) for distance in (1 << k for k in range(ranks.bit_length() - 1))]


def _reduced(name: str, ranks: int, size_bytes: int, algorithm: str, channels: int) -> list[Message]:
    _need_ranks(ranks)
    if not 1 <= channels <= 64:
        raise ValueError(f"{channels} channels: expected 1 to 64")
    if algorithm == "ring":
        return _ring(ranks, size_bytes, 2 * (ranks - 1) if name == "all_reduce" else ranks - 1, channels)
    if algorithm != "recursive":
        raise ValueError(f"algorithm {algorithm!r}: expected ring or recursive")
    if channels != 1:
        raise ValueError(f"{channels} channels: a recursive algorithm has one")
    doubling = _doubling(ranks, size_bytes)
    steps = {
        "all_gather": doubling,
        "reduce_scatter": doubling[::-1],
        "all_reduce": doubling[::-1] + doubling,
    }[name]
    return _exchange(ranks, [size for size, _ in steps], [distance for _, distance in steps])


def _name(algorithm: str, channels: int) -> str:
    text = {"ring": "ring", "recursive": "recursive doubling or halving"}[algorithm]
    return f"{text}, {channels} channels" if channels > 1 else text


def all_gather(ranks: int, size_bytes: int, algorithm: str = "ring", channels: int = 1) -> Schedule:
    """Every rank ends with all parts of ``size_bytes``.

    :param algorithm: ``ring``: n-1 steps of a part to the next rank; ``recursive``: log2(n) exchanges of all there is.
    :param channels: rings side by side, each with its share of every part.
    :raises ValueError: a parameter is out of its range.
    """
    messages = _reduced("all_gather", ranks, size_bytes, algorithm, channels)
    return Schedule(_name(algorithm, channels), messages, size_bytes, (ranks - 1) / ranks)


def reduce_scatter(ranks: int, size_bytes: int, algorithm: str = "ring", channels: int = 1) -> Schedule:
    """Every rank begins with ``size_bytes`` and ends with the sum of one part; parameters as for :func:`all_gather`.

    :raises ValueError: a parameter is out of its range.
    """
    messages = _reduced("reduce_scatter", ranks, size_bytes, algorithm, channels)
    return Schedule(_name(algorithm, channels), messages, size_bytes, (ranks - 1) / ranks)


def all_reduce(ranks: int, size_bytes: int, algorithm: str = "ring", channels: int = 1) -> Schedule:
    """A reduce-scatter and an all-gather; parameters as for :func:`all_gather`.

    :raises ValueError: a parameter is out of its range.
    """
    messages = _reduced("all_reduce", ranks, size_bytes, algorithm, channels)
    return Schedule(_name(algorithm, channels), messages, size_bytes, 2 * (ranks - 1) / ranks)


def incast(ranks: int, size_bytes: int, senders: int | None = None, receiver: int = 0) -> Schedule:
    """``senders`` ranks (by default all others), evenly spaced, send ``size_bytes`` each to one.

    :raises ValueError: a parameter is out of its range.
    """
    _need_ranks(ranks)
    count = ranks - 1 if senders is None else senders
    if not 1 <= count < ranks or not 0 <= receiver < ranks:
        raise ValueError(f"{count} senders to rank {receiver}: expected 1 to {ranks - 1}, to a rank under {ranks}")
    others = [rank for rank in range(ranks) if rank != receiver]
    messages = [Message(others[i * len(others) // count], receiver, size_bytes) for i in range(count)]
    return Schedule(f"{count} to one", messages, size_bytes, 1.0)


def permutation(ranks: int, size_bytes: int, seed: int) -> Schedule:
    """Every rank sends ``size_bytes`` to one other, and gets as much from one: a random cycle through all.

    :raises ValueError: fewer than two ranks.
    """
    _need_ranks(ranks)
    order = list(range(ranks))
    random.Random(seed).shuffle(order)
    messages = [Message(order[i], order[(i + 1) % ranks], size_bytes) for i in range(ranks)]
    return Schedule("random cycle", messages, size_bytes, 1.0)


def shuffled(schedule: Schedule, ranks: int, seed: int) -> Schedule:
    """The same with the ranks in random places."""
    place = list(range(ranks))
    random.Random(seed).shuffle(place)
    messages = [one._replace(sender=place[one.sender], receiver=place[one.receiver]) for one in schedule.messages]
    return replace(schedule, algorithm=f"{schedule.algorithm}, ranks in random places", messages=messages)


def _trace_rows(text: str) -> Iterator[tuple[int, list[int]]]:
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content or (number == 1 and content.startswith("start_ns")):
            continue
        cells = [cell.strip() for cell in content.split(",")]
        if len(cells) not in (4, 5):
            raise ValueError(f"line {number} has {len(cells)} fields: expected start_ns,from,to,bytes[,after]")
        try:
            yield number, [int(cell) if cell else NO_MESSAGE for cell in cells]
        except ValueError:
            raise ValueError(f"line {number} is {content[:80]!r}: expected whole numbers") from None


def parse_trace(text: str, ranks: int) -> Schedule:
    """The messages of a trace: lines of ``start_ns,from,to,bytes[,after]``.

    ``after`` is the number of an earlier message, from 0, that must have arrived at ``from``; empty or left out for
    none.  A first line of names, empty lines, and what follows ``#`` are skipped.

    :raises ValueError: a line is wrong; it is named.
    """
    messages: list[Message] = []
    for number, row in _trace_rows(text):
        start, sender, receiver, size, after = row if len(row) == 5 else [*row, NO_MESSAGE]
        if not (0 <= sender < ranks and 0 <= receiver < ranks and sender != receiver):
            raise ValueError(
                f"line {number} sends from rank {sender} to {receiver}: expected two different ones under {ranks}"
            )
        if not (0 <= start <= 10**12 and 0 <= size <= 2**40):
            raise ValueError(
                f"line {number} starts at {start} ns with {size} bytes: expected at most 10^12 ns and 2^40 bytes"
            )
        if after != NO_MESSAGE and (not 0 <= after < len(messages) or messages[after].receiver != sender):
            raise ValueError(f"line {number} waits for message {after}: expected an earlier one to rank {sender}")
        messages.append(Message(sender, receiver, size, after, start))
    return Schedule("trace", messages, 0, 0.0)
