# SPDX-License-Identifier: Apache-2.0
"""Sizes, rates and times: what is read, what is refused, what is shown."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqplbd.units import (
    UnitError,
    format_bytes,
    format_ns,
    format_rate,
    parse_bytes,
    parse_ns,
    parse_rate,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [("65536", 65536), ("64KiB", 65536), ("64 KiB", 65536), ("1.5MB", 1_500_000), ("0", 0), (".5KiB", 512), (7, 7)],
)
def test_sizes(text: object, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("100Gbit/s", 100 * 10**9),
        ("25Gbps", 25 * 10**9),
        ("3GB/s", 24 * 10**9),
        ("1 MiB/s", 8 * 2**20),
        ("9600", 9600),
        ("2.5Gb/s", 2_500_000_000),
    ],
)
def test_rates_are_bits(text: object, value: int) -> None:
    assert parse_rate(text) == value


@pytest.mark.parametrize(
    ("text", "ns", "seconds"),
    [
        ("250us", 250_000, 0.00025),
        ("250µs", 250_000, 0.00025),
        ("1.2ms", 1_200_000, 0.0012),
        ("2min", 120 * 10**9, 120),
    ],
)
def test_times(text: str, ns: int, seconds: float) -> None:
    assert parse_ns(text) == ns
    assert parse_seconds(text) == pytest.approx(seconds)


def test_a_plain_number_is_in_the_base_unit() -> None:
    assert parse_ns(250) == 250
    assert parse_seconds(250) == 250.0
    assert parse_seconds("0.5") == 0.5


@pytest.mark.parametrize("parse", [parse_bytes, parse_rate, parse_ns, parse_seconds])
@pytest.mark.parametrize(
    "value",
    ["", "-1", "1 2", "KiB", "1XB", "1e3", "٣", True, None, [], {}, float("nan"), float("inf"), -1, 10**30, "9" * 70],
)
def test_what_is_refused(parse: Callable[[object], float], value: object) -> None:
    with pytest.raises(UnitError) as caught:
        parse(value)
    assert caught.value.expected


def test_a_bit_is_no_byte() -> None:
    with pytest.raises(UnitError, match="unknown unit"):
        parse_bytes("1Kb")


def test_part_of_a_byte_is_refused() -> None:
    with pytest.raises(UnitError, match="whole number"):
        parse_bytes("0.3KiB")


@given(st.one_of(st.text(max_size=80), st.integers(), st.floats(), st.none(), st.booleans()))
def test_anything_gives_a_number_in_range_or_a_unit_error(value: object) -> None:
    for parse in (parse_bytes, parse_rate, parse_ns):
        try:
            assert 0 <= parse(value) <= 2**63 - 1
        except UnitError:
            pass


@given(st.integers(0, 10**15))
def test_what_is_shown_can_be_read_and_is_near(value: int) -> None:
    for show, read in ((format_bytes, parse_bytes), (format_rate, parse_rate)):
        text = show(value)
        try:
            back = read(text)
        except UnitError as error:
            # Four digits of a binary unit need not be a whole number of bytes.
            assert "whole number" in str(error)  # noqa: PT017
        else:
            assert back == pytest.approx(value, rel=6e-4)
    assert parse_ns(format_ns(value)) == pytest.approx(value, rel=6e-4)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (format_bytes(512 * 1024), "512KiB"),
        (format_ns(9_999_500_000_000), "10000s"),
        (format_ns(9_999_499_000_000), "9999s"),
        (format_bytes(int(14.5 * 2**20)), "14.5MiB"),
        (format_bytes(0), "0B"),
        (format_rate(392_149_353_757), "392.1Gbit/s"),
        (format_ns(21_200), "21.2us"),
        (format_ns(0), "0ns"),
    ],
)
def test_what_is_shown(text: str, shown: str) -> None:
    assert text == shown
