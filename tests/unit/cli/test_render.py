# SPDX-License-Identifier: Apache-2.0
"""Plain tables and the texts in their cells."""

import io

import pytest
from rich.console import Console

from dqplbd.cli.render import Column, Table, blocks, lines, renderable
from dqplbd.cli.tables import duration, place, value_text


def test_columns_are_as_wide_as_they_need() -> None:
    table = Table(
        [Column("name"), Column("count", "right"), Column("note")], [("a", "1", ""), ("long-name", "1000", "x")]
    )
    assert lines(table) == [
        "NAME       COUNT  NOTE",
        "a              1",
        "long-name   1000  x",
    ]


def test_an_empty_table_has_its_head() -> None:
    assert lines(Table([Column("name")], [])) == ["NAME"]


def drawn(table: Table, width: int) -> list[str]:
    """What a terminal of that many characters shows, without colours."""
    screen = Console(width=width, file=io.StringIO(), highlight=False)
    screen.print(renderable(table, width))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue().splitlines()


WIDE = Table(
    [Column(head, "right") for head in ("peer", "round trip", "window", "queue pairs", "in flight")],
    [("h1", "8us", "512KiB", "2", "384KiB"), ("h2", "240us", "16MiB", "16", "0B")],
    styles={1: "red"},
)


def test_a_table_that_fits_a_terminal_is_one_row_a_line() -> None:
    shown = drawn(WIDE, 80)
    assert [line.split() for line in shown if line.split()[:1] == ["h2"]] == [["h2", "240us", "16MiB", "16", "0B"]]


@pytest.mark.parametrize("width", [20, 30, 45])
def test_no_number_folds_on_a_narrow_terminal(width: int) -> None:
    shown = drawn(WIDE, width)
    assert all(len(line) <= width for line in shown)
    text = "\n".join(shown)
    for row in WIDE.rows:
        for column, cell in zip(WIDE.columns[1:], row[1:], strict=True):
            assert f"{column.head} {cell}" in text


def test_running_text_folds_beside_whole_numbers() -> None:
    table = Table(
        [Column("peer"), Column("state"), Column("reason", fold=True)],
        [("h1", "refused", "versions 1 and 2 do not agree, nor do the limits of segments, which are 64KiB and 1MiB")],
    )
    shown = drawn(table, 50)
    assert all(len(line) <= 50 for line in shown)
    assert sum("refused" in line for line in shown) == 1
    assert " ".join(" ".join(line[16:].split()) for line in shown[3:]).split() == table.rows[0][2].split()


def test_blocks_keep_what_is_longer_than_a_line_whole() -> None:
    table = Table([Column("id"), Column("name")], [("1", "a-name-that-is-long\n")])
    assert blocks(table, 10) == [["1", "  name a-name-that-is-long?"]]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.04, "0.0s"), (59.94, "59.9s"), (61, "1m 1s"), (3600, "1h 0m"), (200_000, "2d 7h")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_places() -> None:
    assert place(None, None, None, None) == "-"
    assert place(None, "b1", None, "r2") == "-/b1/-/r2"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("window_bytes", 524288, "512KiB"),
        ("rate_bps", 10**10, "10Gbit/s"),
        ("rtt_ns", 56_000, "56us"),
        ("loss_ratio", 0.015, "1.5%"),
        ("adapt", True, "yes"),
        ("qps", 4, "4"),
        ("rtt_ns", None, "-"),
        ("path_class", "rack", "rack"),
    ],
)
def test_values_follow_the_unit_in_their_name(name: str, value: float | str | None, text: str) -> None:
    assert value_text(name, value) == text
