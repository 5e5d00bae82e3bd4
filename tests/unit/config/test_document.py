# SPDX-License-Identifier: Apache-2.0
"""YAML to plain data: meaning of scalars, line numbers, and every limit."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dqplbd.config.document import DocumentError, parse_document


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("0123", "0123"),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("true", True),
        ("12", 12),
        ("-3", -3),
        ("0x1f", 31),
        ("0o17", 15),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("~", None),
        ("", None),
        ("'12'", "12"),
        ('"true"', "true"),
        ("!!str 12", "12"),
        ("|\n  12\n", "12\n"),
    ],
)
def test_scalars(text: str, value: object) -> None:
    found = parse_document(text).data
    assert found == value
    assert type(found) is type(value)


def test_lines_are_those_of_the_keys() -> None:
    document = parse_document("a:\n  b: 1\n\n  c:\n    - x\n    - y: 2\n")
    assert document.data == {"a": {"b": 1, "c": ["x", {"y": 2}]}}
    assert document.line_of(("a",)) == 1
    assert document.line_of(("a", "b")) == 2
    assert document.line_of(("a", "c", 1)) == 6
    assert document.line_of(("a", "c", 1, "y")) == 6
    assert document.line_of(("a", "c", 0, "nothing", "here")) == 5
    assert document.line_of(("z",)) == 1


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "given before, on line 1"),
        ("a: {b: 1, b: 2}", 1, "given before"),
        ("a: 1\n---\nb: 2\n", 2, "second document"),
        ("a: !!python/object:os.system x", 1, "tag"),
        ("a: !!binary AAAA", 1, "tag"),
        ("a: !x {}", 1, "tag"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", 3, "merge key"),
        ("[1]: 2", 1, "key"),
        ("{a: 1}: 2", 1, "key"),
        ("~: 2", 1, "key"),
        ("a: *x", 1, "alias"),
        ("a: &x [*x]", 1, "alias"),
        ("a: &x {b: {c: *x}}", 1, "alias"),
        ("a: 'open\n", None, "not YAML"),
        ("a: b: c", 1, "not YAML"),
        ("a:\n\t- b", 2, "not YAML"),
        ("a: \x00", 1, "forbids"),
        ("a: 1\nb: \x07", 2, "forbids"),
        ("a: " + "9" * 100, 1, "digits"),
    ],
)
def test_what_is_refused(text: str, line: int | None, words: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_document(text)
    assert words in str(caught.value)
    if line is not None:
        assert caught.value.line == line
    assert caught.value.expected


def test_deep_nesting_is_refused_without_recursion() -> None:
    for text in ("[" * 200_000, "a: " + "{x: " * 50_000, "- " * 100_000):
        with pytest.raises(DocumentError):
            parse_document(text)


def test_the_limit_of_depth_is_exact() -> None:
    assert parse_document("[" * 4 + "]" * 4, max_depth=4).data == [[[[]]]]
    with pytest.raises(DocumentError, match="more than 4 levels"):
        parse_document("[" * 5 + "]" * 5, max_depth=4)


def test_aliases_are_allowed_but_counted() -> None:
    assert parse_document("a: &x {b: 1}\nc: *x\n").data == {"a": {"b": 1}, "c": {"b": 1}}
    bomb = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 12):
        bomb.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]")
    with pytest.raises(DocumentError, match="more than 500000 values"):
        parse_document("\n".join(bomb))


@given(st.text(max_size=200))
def test_any_text_gives_data_or_a_document_error(text: str) -> None:
    try:
        parse_document(text)
    except DocumentError as error:
        said = str(error)
    else:
        said = "accepted"
    assert said


@given(st.text("ab:-{}[],&*!|>'\"#%@` \n\t<0~", max_size=60))
def test_any_text_of_yaml_signs_gives_data_or_a_document_error(text: str) -> None:
    try:
        parse_document(text)
    except DocumentError as error:
        said = str(error)
    else:
        said = "accepted"
    assert said


_NAMES = st.text("abcxyz_", min_size=1, max_size=6)
_DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=20,
)


@given(_DATA)
def test_what_a_yaml_writer_writes_is_read_back(data: object) -> None:
    text = yaml.safe_dump(data)
    assert parse_document(text).data == data
