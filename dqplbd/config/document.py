# SPDX-License-Identifier: Apache-2.0
"""YAML text to plain data with line numbers, within fixed limits.  Pure.

The text is hostile until proven otherwise, so the document is built from the parser's events with a stack of its own:
no recursion, no object construction, a bound on depth and on the number of values after aliases are expanded.  What a
scalar means follows the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema): ``no`` and ``on`` are
texts, ``0123`` is a text, there are no dates, no base 60 and no infinities.  Custom tags, merge keys, a second document
and a key that occurs twice in one mapping are errors.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

__all__ = ["MAX_DEPTH", "MAX_VALUES", "Document", "DocumentError", "KeyPath", "parse_document"]

MAX_DEPTH: Final = 32
MAX_VALUES: Final = 500_000

KeyPath = tuple[str | int, ...]

_INT: Final = re.compile(r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+|0o[0-7]+", re.ASCII)
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_TAG: Final = "tag:yaml.org,2002:"
_MAX_DIGITS: Final = 40

# The C parser is an order of magnitude faster; it is absent where PyYAML was built without libyaml.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class DocumentError(ValueError):
    """A text that is not one acceptable YAML document.

    :ivar line: line of the trouble, from 1; None when it concerns the whole text.
    :ivar path: keys down to the trouble, as far as known.
    :ivar problem: what is wrong.  :ivar expected: what was expected.  :ivar action: what to do, or empty.
    """

    def __init__(self, line: int | None, path: KeyPath, problem: str, expected: str, action: str = "") -> None:
        super().__init__(f"line {line}: {problem}; expected {expected}" if line else f"{problem}; expected {expected}")
        self.line = line
        self.path = path
        self.problem = problem
        self.expected = expected
        self.action = action


@dataclass(slots=True)
class Document:
    """A parsed document.

    :ivar data: dicts with text keys, lists, str, int, float, bool, None; None for an empty text.
    :ivar lines: line, from 1, of each value by its key path; for a member of a mapping the line of its key.
    """

    data: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def line_of(self, path: KeyPath) -> int | None:
        """Line of a value, or of the nearest enclosing value that has one."""
        for length in range(len(path), -1, -1):
            line = self.lines.get(path[:length])
            if line is not None:
                return line
        return None


@dataclass(slots=True)
class _Frame:
    """A collection under construction."""

    value: dict[str, Any] | list[Any]
    path: KeyPath
    anchor: str | None
    values_before: int
    key: str | None = None
    key_lines: dict[str, int] = field(default_factory=dict)


def _scalar(event: Any, line: int, path: KeyPath) -> Any:
    text: str = event.value
    tag: str | None = event.tag
    if tag is not None and tag != "!":
        if tag == _TAG + "str":
            return text
        raise DocumentError(line, path, f"the tag {tag!r} is not allowed", "a plain value", "remove the tag")
    if not event.implicit[0]:  # quoted, literal or folded
        return text
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    if _INT.fullmatch(text):
        if len(text) > _MAX_DIGITS:
            raise DocumentError(line, path, f"a number of {len(text)} digits", f"at most {_MAX_DIGITS} digits")
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def _line(event: yaml.Event) -> int:
    return 1 if event.start_mark is None else event.start_mark.line + 1


def _mark(error: yaml.YAMLError, text: str) -> int | None:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    # The end of the text is marked as the line after the last.
    return None if mark is None else min(int(mark.line) + 1, text.rstrip("\n").count("\n") + 1)


def parse_document(text: str, *, max_depth: int = MAX_DEPTH, max_values: int = MAX_VALUES) -> Document:
    """Parse one YAML document.

    :param text: the whole text; its size is for the caller to bound.
    :param max_depth: most collections inside one another.
    :param max_values: most values, each expansion of an alias counted again.
    :raises DocumentError: not YAML, or beyond what this module allows.
    """
    document = Document(None)
    stack: list[_Frame] = []
    anchors: dict[str, tuple[Any, int]] = {}
    count = 0
    documents = 0

    def here() -> KeyPath:
        """Path of the value that comes next."""
        if not stack:
            return ()
        frame = stack[-1]
        step: str | int = len(frame.value) if isinstance(frame.value, list) else (frame.key or "")
        return (*frame.path, step)

    def place(value: Any, line: int) -> None:
        """Put a finished value where it belongs."""
        if not stack:
            document.data = value
            return
        frame = stack[-1]
        if isinstance(frame.value, list):
            frame.value.append(value)
        elif frame.key is None:
            raise DocumentError(line, frame.path, "a key that is a list or a mapping", "a text as key")
        else:
            frame.value[frame.key] = value
            frame.key = None

    def is_key() -> bool:
        return bool(stack) and isinstance(stack[-1].value, dict) and stack[-1].key is None

    def take(amount: int, line: int, path: KeyPath) -> None:
        nonlocal count
        count += amount
        if count > max_values:
            raise DocumentError(line, path, f"more than {max_values} values", f"at most {max_values}, aliases expanded")

    try:
        for event in yaml.parse(text, Loader=_Loader):
            line = _line(event)
            if isinstance(event, yaml.ScalarEvent):
                if is_key():
                    frame = stack[-1]
                    key = _scalar(event, line, frame.path)
                    if isinstance(key, int) and not isinstance(key, bool):
                        key = event.value
                    if not isinstance(key, str):
                        what = f"the key {event.value!r}"
                        raise DocumentError(line, frame.path, what, "a text as key", "put it in quotes")
                    if key == "<<":
                        what = "the merge key '<<'"
                        raise DocumentError(line, frame.path, what, "keys written out", "copy the keys here")
                    if key in frame.key_lines:
                        raise DocumentError(
                            line,
                            (*frame.path, key),
                            f"the key {key!r} was given before, on line {frame.key_lines[key]}",
                            "each key once",
                            "remove one of them",
                        )
                    take(1, line, frame.path)
                    if event.anchor is not None:
                        anchors[event.anchor] = (key, 1)
                    frame.key = key
                    frame.key_lines[key] = document.lines[(*frame.path, key)] = line
                    continue
                path = here()
                document.lines.setdefault(path, line)
                value = _scalar(event, line, path)
                take(1, line, path)
                if event.anchor is not None:
                    anchors[event.anchor] = (value, 1)
                place(value, line)
            elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                if is_key():
                    raise DocumentError(line, stack[-1].path, "a key that is a list or a mapping", "a text as key")
                path = here()
                if event.tag not in (None, "!"):
                    raise DocumentError(line, path, f"the tag {event.tag!r} is not allowed", "a plain value")
                if len(stack) >= max_depth:
                    raise DocumentError(line, path[:8], f"more than {max_depth} levels", f"at most {max_depth} levels")
                document.lines.setdefault(path, line)
                take(1, line, path)
                empty: dict[str, Any] | list[Any] = {} if isinstance(event, yaml.MappingStartEvent) else []
                stack.append(_Frame(empty, path, event.anchor, count - 1))
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                done = stack.pop()
                if done.anchor is not None:  # known only from here on: an alias to an enclosing value is refused
                    anchors[done.anchor] = (done.value, count - done.values_before)
                place(done.value, line)
            elif isinstance(event, yaml.AliasEvent):
                path = stack[-1].path if stack else ()
                if event.anchor not in anchors:
                    what = f"the alias *{event.anchor}"
                    raise DocumentError(line, path, what, "an anchor that is complete before it")
                if is_key():
                    raise DocumentError(line, path, f"the alias *{event.anchor} as key", "a text as key")
                value, size = anchors[event.anchor]
                path = here()
                document.lines.setdefault(path, line)
                take(size, line, path)
                place(value, line)
            elif isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise DocumentError(line, (), "a second document", "one document", "remove the line '---'")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1 if isinstance(error.position, int) else 1
        raise DocumentError(line, (), f"a character that YAML forbids ({error.reason})", "printable text") from None
    except yaml.YAMLError as error:
        what = getattr(error, "problem", None) or str(error)
        context = getattr(error, "context", None)
        raise DocumentError(
            _mark(error, text),
            (),
            f"not YAML: {context + ', ' if context else ''}{what}",
            "YAML",
            "look at indentation, colons and quotes on this line and the one before",
        ) from None
    return document
