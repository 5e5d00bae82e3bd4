# SPDX-License-Identifier: Apache-2.0
"""Tables and lines for people.

On a terminal they are drawn by rich, unless NO_COLOR is set; nothing is cut.  Columns of running text fold.  Where the
others together are wider than the terminal, a row becomes a block of names and values: a number that is folded over
several lines cannot be read.  Elsewhere tables are plain text in columns of as much width as they need: one row a line,
for grep and awk.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["Column", "Table", "console", "dash", "fancy", "lines", "print_pairs", "print_table", "print_tables"]

NOTHING = "-"
FOLDED_WIDTH: Final = 20
"""Least width, in characters, that a column of running text can be read in."""
_GAP: Final = 3  # blanks that rich leaves beside a column


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its head, how cells are aligned, a rich style, and whether its cells are running text that may fold."""

    head: str
    align: Literal["left", "right"] = "left"
    style: str = ""
    fold: bool = False


Row = Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """Columns, rows of as many cells, and a style for some rows.

    :ivar styles: rich style by row number.
    """

    columns: Sequence[Column]
    rows: Sequence[Row]
    title: str = ""
    styles: dict[int, str] | None = None


def dash(value: object) -> str:
    """A cell: ``-`` for None and the empty text."""
    return NOTHING if value is None or value == "" else str(value)


def fancy() -> bool:
    """Whether standard output is a terminal that wants more than plain text."""
    return sys.stdout.isatty() and os.environ.get("NO_COLOR", "") == "" and os.environ.get("TERM") != "dumb"


def console() -> "Console":
    """The terminal."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def lines(table: Table) -> list[str]:
    """A table as plain text: two blanks between columns, no blanks at the end of a line."""
    cells = [[column.head.upper() for column in table.columns], *[list(map(_one_line, row)) for row in table.rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.columns))]
    out = []
    for row in cells:
        parts = [
            cell.rjust(width) if column.align == "right" else cell.ljust(width)
            for cell, width, column in zip(row, widths, table.columns, strict=True)
        ]
        out.append("  ".join(parts).rstrip())
    return out


def _one_line(text: str) -> str:
    """What a peer or a client chose must not move the cursor or begin a line."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _fits(table: Table, width: int) -> bool:
    """Whether all columns find room in ``width`` characters when only those of running text fold."""
    needed = 1
    for i, column in enumerate(table.columns):
        natural = max(len(column.head), *(len(_one_line(row[i])) for row in table.rows), 0)
        needed += _GAP + (min(natural, FOLDED_WIDTH) if column.fold else natural)
    return needed <= width


def blocks(table: Table, width: int) -> list[list[str]]:
    """A table for narrow places: for each row its first cell, then the others as ``head cell``, in as few lines of at
    most ``width`` characters as they take; what is longer than a line gets one of its own."""
    out = []
    for row in table.rows:
        lines_of_row = [_one_line(row[0])]
        for column, cell in zip(table.columns[1:], row[1:], strict=True):
            piece = f"{column.head} {_one_line(cell)}"
            if len(lines_of_row[-1]) + _GAP + len(piece) > width:
                lines_of_row.append(f"  {piece}")
            else:
                lines_of_row[-1] += " " * _GAP + piece
        out.append(lines_of_row)
    return out


def renderable(table: Table, width: int) -> "RenderableType":
    """A table as rich draws it on a terminal of ``width`` characters."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    styles = table.styles or {}
    if table.rows and not _fits(table, width):
        rows = [Text("\n".join(block), styles.get(i, "")) for i, block in enumerate(blocks(table, width))]
        for row, drawn_row in zip(table.rows, rows, strict=True):
            drawn_row.stylize("bold", 0, len(row[0]))
        return Text("\n").join([Text(table.title, "italic"), *rows] if table.title else rows)
    drawn = RichTable(box=SIMPLE_HEAD, title=table.title or None, title_justify="left", pad_edge=False)
    for column in table.columns:
        drawn.add_column(
            column.head, justify=column.align, style=column.style or None, overflow="fold", no_wrap=not column.fold
        )
    for i, row in enumerate(table.rows):
        drawn.add_row(*(Text(_one_line(cell)) for cell in row), style=styles.get(i))
    return drawn


def print_table(table: Table) -> None:
    """Print a table on standard output."""
    if fancy():
        screen = console()
        screen.print(renderable(table, screen.width))
    else:
        sys.stdout.write("\n".join(lines(table)) + "\n")


def print_tables(tables: Iterable[Table]) -> None:
    """Print tables with their titles on standard output, an empty line between them."""
    if fancy():
        screen = console()
        for table in tables:
            screen.print(renderable(table, screen.width))
    else:
        sys.stdout.write(
            "\n\n".join("\n".join([*([table.title] if table.title else []), *lines(table)]) for table in tables) + "\n"
        )


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print names and values, a line each."""
    listed = [(name, _one_line(value)) for name, value in pairs]
    width = max((len(name) for name, _ in listed), default=0)
    if fancy():
        from rich.text import Text

        screen = console()
        for name, value in listed:
            screen.print(Text.assemble((f"{name:<{width}}  ", "dim"), value))
    else:
        sys.stdout.write("".join(f"{name:<{width}}  {value}".rstrip() + "\n" for name, value in listed))
