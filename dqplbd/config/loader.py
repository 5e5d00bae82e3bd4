# SPDX-License-Identifier: Apache-2.0
"""Reading a configuration file, and saying exactly what is wrong with it.

The file is read whole, parsed whole and validated whole before anything is returned, so that a reload can be one
assignment.  Every problem of a file is reported, not only the first, unless it is not YAML at all.
"""

import difflib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dqplbd.config.document import Document, DocumentError, KeyPath, parse_document
from dqplbd.config.models import Config
from dqplbd.config.types import PATTERN_MEANINGS

__all__ = ["MAX_FILE_BYTES", "ConfigError", "Problem", "load_config", "parse_config", "read_text"]

MAX_FILE_BYTES: Final = 8 * 2**20
_MAX_VALUE_TEXT: Final = 80


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a file.

    :ivar file: name of the file, or another name of the source.
    :ivar line: line from 1; None when it concerns the whole file.
    :ivar key: dotted key path such as ``devices[0].rate_bps``; empty for the whole file.
    :ivar value: what was found, as text; None where nothing was.
    :ivar what: what is wrong with it.
    :ivar expected: what would have been accepted.
    :ivar action: what to do; may be empty where ``expected`` says it all.
    """

    file: str
    line: int | None
    key: str
    value: str | None
    what: str
    expected: str
    action: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        key = f"{self.key}: " if self.key else ""
        value = f" (value {self.value})" if self.value is not None and self.value not in self.what else ""
        action = f". {self.action[0].upper()}{self.action[1:]}" if self.action else ""
        return f"{place}: {key}{self.what}{value}; expected {self.expected}{action}"

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON output."""
        return {
            "file": self.file,
            "line": self.line,
            "key": self.key,
            "value": self.value,
            "problem": self.what,
            "expected": self.expected,
            "action": self.action,
        }


class ConfigError(Exception):
    """A configuration that cannot be used.

    :ivar problems: all that is wrong with it, in the order of the file; never empty.
    """

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def read_text(path: str | Path, *, max_bytes: int = MAX_FILE_BYTES) -> str:
    """The whole of a UTF-8 text file.

    :raises ConfigError: it cannot be read, is no regular file, is larger than ``max_bytes``, or is not UTF-8.
    """
    file = str(path)

    def error(what: str, expected: str, action: str, line: int | None = None) -> ConfigError:
        return ConfigError([Problem(file, line, "", None, what, expected, action)])

    try:
        target = Path(path)
        if target.exists() and not target.is_file():
            raise error("not a regular file", "a text file", "name a file")
        with target.open("rb") as stream:
            raw = stream.read(max_bytes + 1)
    except FileNotFoundError:
        raise error("no such file", "a file", "check the path, or create the file") from None
    except PermissionError:
        raise error(
            "permission denied", "a file this process may read", "check its owner and mode and those of its folders"
        ) from None
    except (OSError, ValueError) as cause:  # ValueError: a NUL in the path
        raise error(f"cannot be read: {cause}", "a file this process may read", "check the path") from None
    if len(raw) > max_bytes:
        raise error(f"larger than {max_bytes} bytes", f"at most {max_bytes} bytes", "check that it is the right file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        line = raw.count(b"\n", 0, cause.start) + 1
        raise error(
            f"byte 0x{raw[cause.start]:02x} at offset {cause.start} is not UTF-8",
            "UTF-8 text",
            "save the file as UTF-8",
            line,
        ) from None


def key_text(path: KeyPath) -> str:
    """``("devices", 0, "name")`` as ``devices[0].name``."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{step}" if text else step
    return text


def _value_text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_TEXT else text[: _MAX_VALUE_TEXT - 3] + "..."


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that an annotation such as ``tuple[DeviceConfig, ...] | None`` mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in typing.get_args(annotation) for model in _models_in(argument)]


def _is_tag(step: int | str) -> bool:
    """Whether a step of a location names the branch of a union: such a tag is in angle brackets."""
    return isinstance(step, str) and step.startswith("<") and step.endswith(">")


def _of_tag(models: list[type[BaseModel]], tag: str) -> list[type[BaseModel]]:
    """Of the models of a union, that which a tag names."""
    return [one for one in models if tag[1:-1] in typing.get_args(one.model_fields["provider"].annotation)]


def field_at(path: KeyPath) -> tuple[type[BaseModel] | None, FieldInfo | None]:
    """The model that owns the last key of a path, and the field, each None where the path leaves the models.

    A tag in the path says which model of a union is meant; without one it is the first that has the key.
    """
    models: list[type[BaseModel]] = [Config]
    field: FieldInfo | None = None
    for step in path:
        if isinstance(step, int):
            continue
        if field is not None:
            models = _models_in(field.annotation)
            is_dict = typing.get_origin(field.annotation) is dict
            field = None
            if is_dict:  # this step is a key of the user's, such as a host_id
                continue
        if _is_tag(step):
            models = _of_tag(models, step)
            continue
        if not models:
            return None, None
        models = [one for one in models if step in one.model_fields] or models
        field = models[0].model_fields.get(step)
        if field is None:
            return models[0], None
    return (models[0] if models else None), field


_EXPECTED: Final[dict[str, str]] = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
}


def _expected(detail: ErrorDetails) -> str:
    kind = detail["type"]
    context: Mapping[str, Any] = detail.get("ctx", {})
    if kind in _EXPECTED:
        return _EXPECTED[kind]
    if kind in ("literal_error", "enum"):
        return f"one of {context['expected']}"
    if kind == "string_pattern_mismatch":
        return PATTERN_MEANINGS.get(context["pattern"], f"a text of the form {context['pattern']}")
    message = detail["msg"]
    for prefix in ("Input should be ", "Value should have ", "String should have ", "Tuple should have "):
        if message.startswith(prefix):
            return message.removeprefix(prefix)
    return message


def _clean(location: tuple[int | str, ...], data: Any) -> KeyPath:
    """A pydantic location without the steps that name untagged branches of a union or the key half of a mapping."""
    path: list[int | str] = []
    absent = False  # what follows was not written, but comes from defaults
    for step in location:
        if _is_tag(step):
            path.append(step)
            continue
        if not absent:
            inside = step < len(data) if isinstance(data, list) and isinstance(step, int) else False
            if inside or (isinstance(data, dict) and step in data):
                data = data[step]
            elif isinstance(data, dict):
                absent = True
            elif isinstance(step, str):
                continue
        if step != "[key]":
            path.append(step)
    return tuple(path)


def _problem(detail: ErrorDetails, file: str, document: Document) -> Problem:
    tagged = _clean(detail["loc"], document.data)
    model, field = field_at(tagged)
    path = tuple(step for step in tagged if not _is_tag(step))
    value: str | None = _value_text(detail["input"])
    kind = detail["type"]
    context: Mapping[str, Any] = detail.get("ctx", {})
    action = ""
    if kind == "extra_forbidden":
        keys = sorted(model.model_fields) if model is not None else []
        near = difflib.get_close_matches(str(path[-1]), keys, 1)
        what, expected = "unknown key", f"one of {', '.join(keys)}"
        action = f"did you mean {near[0]!r}?" if near else "remove it"
    elif kind == "missing":
        what, expected, value = "the key is missing", "a value", None
        action = f"add it: {field.description}" if field is not None and field.description else "add it"
    elif kind == "dqplbd":
        what, expected, action = context["what"], context["expected"], context["action"]
        if isinstance(detail["input"], dict):
            value = None
    else:
        expected = _expected(detail)
        what = "not valid"
        if isinstance(detail["input"], dict | list) and kind in _EXPECTED:
            what, value = f"a {'mapping' if isinstance(detail['input'], dict) else 'list'}", None
        if field is not None and not field.is_required():
            default = field.get_default(call_default_factory=False)
            if isinstance(default, str | int | float):
                action = f"change it, or remove the line for the default {default!r}"
        action = action or "change it"
    return Problem(file, document.line_of(path), key_text(path), value, what, expected, action)


def _merged(problems: list[Problem]) -> list[Problem]:
    """In the order of the file; the branches of a union, each a problem of its own to pydantic, become one."""
    by_place: dict[tuple[Any, ...], Problem] = {}
    for one in problems:
        place = (one.line or 0, one.key, one.what)
        other = by_place.get(place)
        if other is not None and one.expected not in other.expected:
            one = replace(other, expected=f"{other.expected}, or {one.expected}")
        by_place[place] = one
    return [by_place[place] for place in sorted(by_place)]


def parse_config(text: str, file: str = "<text>") -> Config:
    """The configuration that a text holds; an empty text gives all defaults.

    :param text: YAML.
    :param file: what to call the text in problems.
    :raises ConfigError: with every problem of the text.
    """
    try:
        document = parse_document(text)
    except DocumentError as error:
        key = key_text(error.path)
        raise ConfigError([Problem(file, error.line, key, None, error.problem, error.expected, error.action)]) from None
    data = {} if document.data is None else document.data
    if not isinstance(data, dict):
        raise ConfigError(
            [
                Problem(
                    file,
                    document.line_of(()),
                    "",
                    _value_text(data),
                    f"the file is a {'list' if isinstance(data, list) else 'single value'}",
                    "a mapping of sections such as 'peers:'",
                    "see the example configuration",
                )
            ]
        )
    # A section that is named but left empty ("peers:") means its defaults.
    given = {key: value for key, value in data.items() if value is not None or key not in Config.model_fields}
    given.setdefault("host", {})  # so that a host name of the system that cannot be used is found under its key
    try:
        return Config.model_validate(given)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = [_problem(detail, file, document) for detail in details]
        raise ConfigError(_merged(problems)) from None


def load_config(path: str | Path) -> Config:
    """The configuration that a file holds.

    :raises ConfigError: the file cannot be read, or with every problem of its content.
    """
    return parse_config(read_text(path), str(path))
