# SPDX-License-Identifier: Apache-2.0
"""Rows of measurements, each beside its reference: the table for people, the file for programs.

A file is a list of {"name", "value", "unit", "reference", "ratio", "target", "met"}.  ``ratio`` is value to reference.
``met`` is null where the row states no target, or could not be measured here (then ``value`` is null as well, and the
table's note says why).
"""

import fcntl
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dqplbd.cli.render import Column, Table

__all__ = ["Row", "merge_rows", "table", "write_rows"]


@dataclass(slots=True)
class Row:
    """One row.

    :ivar better: whether the target is a least or a most; it is for the ratio where ``of`` says so, else the value.
    """

    name: str
    unit: str
    value: float | None = None
    reference: float | None = None
    target: float | None = None
    better: Literal["high", "low"] = "high"
    of: Literal["ratio", "value"] = "ratio"
    valid: bool = True
    note: str = ""

    @property
    def ratio(self) -> float | None:
        if self.value is None or not self.reference:
            return None
        return self.value / self.reference

    @property
    def met(self) -> bool | None:
        measured = self.ratio if self.of == "ratio" else self.value
        if measured is None or self.target is None or not self.valid:
            return None
        return measured >= self.target if self.better == "high" else measured <= self.target

    def as_dict(self) -> dict[str, Any]:
        ratio = self.ratio
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "reference": self.reference,
            "ratio": round(ratio, 4) if ratio is not None else None,
            "target": self.target,
            "met": self.met,
        }


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """Write a file of rows, whole or not at all."""
    _write(file, [row.as_dict() for row in rows])


def merge_rows(file: Path, rows: Sequence[Row]) -> None:
    """Put rows into a file that others write to as well: those of the same name are replaced, others stay."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            found = []
        fresh = {row.name: row.as_dict() for row in rows}
        kept = [old for old in found if isinstance(old, dict) and old.get("name") not in fresh]
        _write(file, kept + list(fresh.values()))


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    part.rename(file)


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes/s":
        return f"{value / 1e9:.3f} GB/s"
    if unit == "ns" and value >= 1000:
        return f"{value / 1000:.1f} us"
    return f"{value:g} {unit}"


def table(rows: Sequence[Row]) -> Table:
    """The rows as a table."""
    columns = [
        Column("row", style="bold"),
        Column("value", "right"),
        Column("reference", "right"),
        Column("ratio", "right"),
        Column("target", "right"),
        Column("met"),
        Column("note"),
    ]
    cells = []
    styles = {}
    for i, row in enumerate(rows):
        sign = ">=" if row.better == "high" else "<="
        target = f"{sign} {row.target:g}{' x' if row.of == 'ratio' else ''}" if row.target is not None else "-"
        met = {True: "yes", False: "NO", None: "-"}[row.met]
        if row.met is False:
            styles[i] = "red"
        ratio = f"{row.ratio:.3f}" if row.ratio is not None else "-"
        cells.append(
            (row.name, _number(row.value, row.unit), _number(row.reference, row.unit), ratio, target, met, row.note)
        )
    return Table(columns, cells, styles=styles)
