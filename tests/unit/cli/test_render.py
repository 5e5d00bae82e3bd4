# SPDX-License-Identifier: Apache-2.0
"""Plain tables and the texts in their cells."""

import pytest

from dqplbd.cli.render import Column, Table, lines
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
