# SPDX-License-Identifier: Apache-2.0
"""One line a record, for people and for machines."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqplbd import logs
from dqplbd.logs import JsonFormatter, RateLimit, TextFormatter, fields


@pytest.fixture(autouse=True)
def keep_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def record(message: str, values: dict[str, object]) -> logging.LogRecord:
    return logging.getLogger("dqplbd.x").makeRecord(
        "dqplbd.x", logging.INFO, __file__, 1, message, (), None, extra=fields(**values)
    )


def test_text_ends_with_the_values() -> None:
    line = TextFormatter().format(record("peer up", {"peer": "node7", "address": "a b", "epoch": None, "n": 3}))
    assert line.endswith('INFO    x: peer up peer=node7 address="a b" n=3')


def test_json_has_the_values_as_members() -> None:
    entry = json.loads(JsonFormatter().format(record("peer up", {"peer": "node7", "level": "mine", "n": 3})))
    assert (entry["message"], entry["peer"], entry["n"]) == ("peer up", "node7", 3)
    assert (entry["level"], entry["level_"], entry["logger"]) == ("info", "mine", "dqplbd.x")
    assert entry["time"].endswith("+00:00")


@given(st.text(), st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.text() | st.integers(), max_size=4))
def test_a_record_is_one_line_whatever_it_says(message: str, values: dict[str, object]) -> None:
    one = record(message.replace("%", ""), values)
    for formatter in (TextFormatter(), JsonFormatter()):
        text = formatter.format(one)
        assert "\n" not in text
        assert "\r" not in text


def test_setup_replaces_what_was_before() -> None:
    stream = io.StringIO()
    logs.setup("text", "info", io.StringIO())
    logs.setup("json", "warning", stream)
    logging.getLogger("dqplbd.a").info("quiet")
    try:
        raise ValueError("inner")
    except ValueError:
        logging.getLogger("dqplbd.a").exception("loud")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert "ValueError: inner" in json.loads(lines[0])["error"]


def test_one_place_cannot_flood_the_log() -> None:
    now = 0.0
    limit = RateLimit(burst=3, per_s=1.0, clock=lambda: now)
    one, other = record("a", {}), record("b", {})
    other.lineno = 2
    assert [limit.filter(one) for _ in range(5)] == [True, True, True, False, False]
    assert limit.filter(other)
    now = 1.0
    assert limit.filter(one)
    assert TextFormatter().format(one).endswith("suppressed=2")
