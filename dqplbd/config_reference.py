# SPDX-License-Identifier: Apache-2.0
"""The configuration reference, written from the models.

``python -m dqplbd.config_reference > docs/configuration.md``
"""

import enum
import sys
import typing
from types import NoneType, UnionType
from typing import Any, Final

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dqplbd.config.models import Config
from dqplbd.config.types import PATTERN_MEANINGS, Unit
from dqplbd.units import format_bytes, format_ns, format_rate

__all__ = ["reference"]

_INTRODUCTION: Final = """\
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written from dqplbd/config/models.py by `make docs`; changes made here are lost. -->
# Configuration

The daemon reads one YAML file. Every section and every key may be left out, except those marked *required*; an unknown
key is an error, and so is a key given twice. `dqplb config check FILE` says what is wrong with a file, `dqplb config
show` what is in force, `dqplb config schema` gives a JSON schema for editors. SIGHUP (`systemctl reload dqplbd`) reads
the file again; when it has an error the old configuration stays in force.

A **quantity** is a number in the unit that its key ends with, or a text with its own unit:

| key ends with | number is in | texts, for example |
|---|---|---|
| `_bytes` | bytes | `64KiB`, `1.5MB`, `4GiB` |
| `_bps` | bits a second | `100Gbit/s`, `25Gbps`, `3GB/s` |
| `_ns` | nanoseconds | `250us`, `1.2ms` |
| `_s` | seconds | `30s`, `5min`, `250ms` |

`no`, `on` and `0123` are texts, as in YAML 1.2. `[]` after a key stands for an entry of a list, `<host_id>` for a key
of your own.
"""

_TYPES: Final[dict[Any, str]] = {bool: "true or false", int: "whole number", float: "number", str: "text"}
_UNITS: Final = {"bytes": "size", "bit/s": "rate", "ns": "time", "s": "time"}


def _flat(annotation: Any, metadata: list[Any]) -> tuple[list[Any], list[Any]]:
    """The plain types of an annotation without None, and all metadata on the way."""
    if hasattr(annotation, "__metadata__"):
        extra = [
            m for item in annotation.__metadata__ for m in (item.metadata if isinstance(item, FieldInfo) else [item])
        ]
        return _flat(annotation.__origin__, [*metadata, *extra])
    if typing.get_origin(annotation) in (typing.Union, UnionType):
        types: list[Any] = []
        for argument in typing.get_args(annotation):
            if argument is not NoneType:
                inner, metadata = _flat(argument, metadata)
                types.extend(inner)
        return types, metadata
    return [annotation], metadata


def _unit(metadata: list[Any]) -> str:
    return next((item.name for item in metadata if isinstance(item, Unit)), "")


def _number(value: Any, unit: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if unit == "bytes":
        return format_bytes(value)
    if unit == "bit/s":
        return format_rate(value)
    if unit == "ns":
        return format_ns(value)
    if unit == "s":
        for seconds, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
            if value >= seconds and value % seconds == 0:
                return f"{value / seconds:g}{name}"
        return f"{value:g}s" if value >= 1 or value == 0 else f"{value * 1000:g}ms"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _type_text(types: list[Any], unit: str) -> str:
    if unit:
        return _UNITS[unit]
    texts = []
    for one in types:
        if typing.get_origin(one) is typing.Literal:
            texts.append(", ".join(f"`{choice}`" for choice in typing.get_args(one)))
        elif isinstance(one, type) and issubclass(one, enum.Enum):
            texts.append(", ".join(f"`{choice.value}`" for choice in one))
        elif typing.get_origin(one) is tuple:
            inner, metadata = _flat(typing.get_args(one)[0], [])
            texts.append(f"list of {_type_text(inner, _unit(metadata))}s")
        elif typing.get_origin(one) is dict:
            inner, metadata = _flat(typing.get_args(one)[1], [])
            texts.append(f"mapping to {_type_text(inner, _unit(metadata))}")
        else:
            texts.append(_TYPES.get(one, "mapping"))
    return " or ".join(texts)


def _range_text(metadata: list[Any], unit: str) -> str:
    low = high = ""
    others = []
    for item in metadata:
        pattern = getattr(item, "pattern", None)
        if isinstance(item, Ge | Gt):
            low = _number(item.ge if isinstance(item, Ge) else item.gt, unit)
            low = f"over {low}" if isinstance(item, Gt) else low
        elif isinstance(item, Le | Lt):
            high = _number(item.le if isinstance(item, Le) else item.lt, unit)
        elif isinstance(item, MaxLen):
            others.append(f"at most {item.max_length} long")
        elif isinstance(item, MinLen) and item.min_length > 0:
            others.append("not empty")
        elif isinstance(pattern, str):
            others.append(PATTERN_MEANINGS.get(pattern, f"`{pattern}`"))
    if low and high:
        others.insert(0, f"{low} to {high}")
    elif low or high:
        others.insert(0, f"{low} or more" if low else f"up to {high}")
    return "; ".join(others)


def _default_text(field: FieldInfo, unit: str) -> str:
    if field.is_required():
        return "*required*"
    if field.default_factory is not None:
        return "*from the system*"
    value = field.default
    if value is None or value is PydanticUndefined:
        return "*none*"
    if isinstance(value, tuple):
        return "`[]`"
    if isinstance(value, dict):
        return "`{}`"
    if isinstance(value, enum.Enum):
        value = value.value
    return f"`{_number(value, unit)}`"


def _models_of(types: list[Any]) -> tuple[list[type[BaseModel]], str]:
    """The models inside of a field's type, several where a list has entries of several kinds, and what stands between
    its key and the models' keys."""
    models = [one for one in types if isinstance(one, type) and issubclass(one, BaseModel)]
    if models:
        return models, ""
    for one in types:
        origin, arguments = typing.get_origin(one), typing.get_args(one)
        if origin is tuple or origin is dict:
            inner, _ = _flat(arguments[0 if origin is tuple else 1], [])
            models, _ = _models_of(inner)
            if models:
                return models, "[]" if origin is tuple else ".<host_id>"
    return [], ""


def _rows(model: type[BaseModel], prefix: str) -> list[str]:
    rows = []
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        types, metadata = _flat(field.annotation, list(field.metadata))
        models, step = _models_of(types)
        meaning = (field.description or "").replace("|", "\\|")
        if models:
            (inner,) = models
            if inner.__doc__ and not meaning:
                meaning = inner.__doc__.strip()
            rows.append(f"| `{key}` | {'list' if step == '[]' else 'mapping'} | | | {meaning} |")
            rows.extend(_rows(inner, f"{key}{step}."))
            continue
        unit = _unit(metadata)
        constraints = [item for item in metadata if not isinstance(item, BeforeValidator)]
        cells = (_type_text(types, unit), _default_text(field, unit), _range_text(constraints, unit), meaning)
        rows.append(f"| `{key}` | {' | '.join(cells)} |")
    return rows


def reference() -> str:
    """The reference, in Markdown."""
    parts = [_INTRODUCTION]
    header = "| key | type | default | range | meaning |\n|---|---|---|---|---|"
    for name, field in Config.model_fields.items():
        types, _ = _flat(field.annotation, [])
        models, step = _models_of(types)
        if not models:
            raise AssertionError(f"section {name!r} of the configuration has no model")
        texts = [" ".join((model.__doc__ or "").split()) for model in models]
        intro = f"A list, or `auto`. {field.description}" if step == "[]" else texts[0]
        parts.append(f"\n## {name}\n\n{intro}\n")
        for model, text in zip(models, texts, strict=True):
            kind = f"\n{text}\n" if step == "[]" else ""
            parts.append(f"{kind}\n{header}\n" + "\n".join(_rows(model, f"{name}{step}.")) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(reference())
