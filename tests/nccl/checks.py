# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the GPU test compute, and what must come out.  Pure, and without PyTorch.

Every element that a rank gives is different, by place and by rank, and every result is a whole number that the type
holds exactly: so one byte in the wrong place is a wrong value, and nothing has to be compared with a tolerance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["SIZES", "Check", "gathered", "given", "split_sizes", "summed"]

SIZES: Final = (1, 1000, 65_537, 1 << 20, (2 << 20) + 3)
"""Elements of 4 bytes a rank: from one flag line of NCCL to many steps of all its channels.

Not more: two ranks that share a GPU take turns on it, some milliseconds each, for every step.
"""
_MODULUS: Final = 65_521  # prime: neighbours and places at round distances differ


@dataclass(frozen=True, slots=True)
class Check:
    """One collective, done and looked at.

    :ivar wrong: elements that are not what they must be.
    :ivar first: the first of them: place, value, expected; empty when all are right.
    """

    operation: str
    elements: int
    wrong: int
    first: str = ""

    @property
    def ok(self) -> bool:
        return self.wrong == 0


def given(rank: int, place: Any) -> Any:
    """The element that a rank gives at a place, or a tensor of them at a tensor of places.

    It is below 2**16, so that a float of 32 bits holds the sum of 256 exactly.
    """
    return (place * 31 + rank * 7919 + 1) % _MODULUS


def summed(world: int, place: Any) -> Any:
    """The element of the sum over all ranks, or a tensor of them."""
    return sum(given(rank, place) for rank in range(world))


def split_sizes(rank: int, world: int, elements: int) -> list[int]:
    """How many elements a rank gives to each: together ``elements``, uneven, and some may be none."""
    weights = [1 + (rank * 3 + to * 5) % 4 for to in range(world)]
    sizes = [elements * weight // sum(weights) for weight in weights]
    sizes[(rank + 1) % world] += elements - sum(sizes)
    return sizes


def gathered(rank: int, world: int, elements: int) -> list[tuple[int, int, int]]:
    """What a rank gets when all give to all: (from, first place at the giver, count), in the order of ranks."""
    parts = []
    for giver in range(world):
        sizes: Sequence[int] = split_sizes(giver, world, elements)
        parts.append((giver, sum(sizes[:rank]), sizes[rank]))
    return parts
