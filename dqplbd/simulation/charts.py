# SPDX-License-Identifier: Apache-2.0
"""Charts as SVG text: lines, bars, heat maps.  Pure.

Colours are classes (``s0`` to ``s7`` for series), so that the page decides what they look like in light and dark.  Text
that comes from a scenario is escaped here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log2, log10
from typing import Final

__all__ = ["SERIES_COLOURS", "Line", "bar_chart", "heat_map", "legend", "line_chart"]

SERIES_COLOURS: Final = 8
_WIDTH: Final = 860
_HEIGHT: Final = 300
_LEFT: Final = 84
_RIGHT: Final = 16
_TOP: Final = 12
_BOTTOM: Final = 40

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart.

    :ivar xs: ascending; as many as ``ys``.
    :ivar colour: number of the series.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int


def ticks(low: float, high: float, about: int = 6, *, binary: bool = False) -> list[float]:
    """Round numbers from ``low`` to ``high``, about so many; ``binary``: multiples of a power of two."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    if binary:
        step = 2.0 ** ceil(log2(raw))
    else:
        power = 10.0 ** floor(log10(raw))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = ceil(low / step - 1e-9)
    return [i * step for i in range(first, floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, or where there are few also twice and five times those, within the range."""
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    factors = (1,) if len(decades) > 4 else (1, 2, 5)
    return [factor * 10.0**power for power in decades for factor in factors if low <= factor * 10.0**power <= high]


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float
    log: bool = False
    binary: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            part = (log10(max(value, self.low)) - log10(self.low)) / (log10(self.high) - log10(self.low))
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high, binary=self.binary)


def _svg(width: float, height: float, label: str, body: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">'
    return "\n".join([head, *body, "</svg>"])


def _axes(x: _Scale, y: _Scale, x_format: Format, y_format: Format, x_label: str) -> list[str]:
    parts = []
    base = _HEIGHT - _BOTTOM
    for value in y.ticks():
        at = y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="end" x="{_LEFT - 8}" y="{at + 4:.1f}">{escape(y_format(value))}</text>')
    for value in x.ticks():
        at = x(value)
        parts.append(
            f'<line class="tick" x1="{at:.1f}" x2="{at:.1f}" y1="{_HEIGHT - _BOTTOM}" y2="{_HEIGHT - _BOTTOM + 5}"/>'
        )
        parts.append(f'<text class="mid" x="{at:.1f}" y="{base + 19}">{escape(x_format(value))}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>')
    parts.append(
        f'<text class="mid dim" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 4}">{escape(x_label)}</text>'
    )
    return parts


def line_chart(
    lines: Sequence[Line],
    x_format: Format,
    y_format: Format,
    x_label: str,
    label: str,
    *,
    log_x: bool = False,
    binary: bool = False,
) -> str:
    """Lines over a common axis; y begins at 0.

    :param label: what the chart shows, for those who cannot see it.
    :param log_x: x is logarithmic; only positive ones are drawn then.
    :param binary: y is in bytes: marked at multiples of a power of two.
    """
    drawn = [(one, [(x, y) for x, y in zip(one.xs, one.ys, strict=True) if not log_x or x > 0]) for one in lines]
    xs = [x for _, points in drawn for x, _ in points]
    ys = [y for _, points in drawn for _, y in points]
    if not xs:
        return _svg(_WIDTH, _HEIGHT, label, ['<text class="mid" x="430" y="150">nothing was measured</text>'])
    low, high = min(xs), max(xs)
    if high <= low:
        high = low * 1.1 if low > 0 else low + 1
    x = _Scale(low, high, _LEFT, _WIDTH - _RIGHT, log_x)
    y = _Scale(0, max(ys) or 1, _HEIGHT - _BOTTOM, _TOP, binary=binary)
    body = _axes(x, y, x_format, y_format, x_label)
    for one, points in drawn:
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        colour = one.colour % SERIES_COLOURS
        body.append(f'<polyline class="line s{colour}" points="{path}"><title>{escape(one.name)}</title></polyline>')
    return _svg(_WIDTH, _HEIGHT, label, body)


def bar_chart(bars: Sequence[tuple[str, float, int]], text: Format, label: str) -> str:
    """Horizontal bars from 0: name, value, number of the series; the value as text at the end of each."""
    row, left = 26, 210
    most = max((value for _, value, _ in bars), default=0) or 1
    body = []
    for i, (name, value, colour) in enumerate(bars):
        top = i * row + 4
        width = value / most * (_WIDTH - left - 110)
        body.append(f'<text class="end" x="{left - 10}" y="{top + 14}">{escape(name)}</text>')
        body.append(
            f'<rect class="bar s{colour % SERIES_COLOURS}" x="{left}" y="{top}" width="{width:.1f}" height="18"/>'
        )
        body.append(f'<text x="{left + width + 8:.1f}" y="{top + 14}">{escape(text(value))}</text>')
    return _svg(_WIDTH, len(bars) * row + 4, label, body)


def heat_map(
    rows: Sequence[tuple[str, Sequence[float]]], groups: Sequence[tuple[str, int]], text: Format, label: str
) -> str:
    """A row a name, a cell a value; the darker the larger, on one scale.

    :param groups: what the columns are, from the left: a name and how many.
    """
    row, left, top = 26, 210, 22
    columns = sum(count for _, count in groups)
    most = max((value for _, values in rows for value in values), default=0) or 1
    width = (_WIDTH - left - _RIGHT) / max(columns, 1)
    gap = 1 if width > 4 else 0
    body = []
    at = 0
    for name, count in groups:
        middle = left + (at + count / 2) * width
        body.append(f'<text class="mid dim" x="{middle:.1f}" y="14">{escape(name)}</text>')
        if at:
            body.append(
                f'<line class="tick" x1="{left + at * width:.1f}" x2="{left + at * width:.1f}" y1="4" '
                f'y2="{top + len(rows) * row}"/>'
            )
        at += count
    for i, (name, values) in enumerate(rows):
        y = top + i * row
        body.append(f'<text class="end" x="{left - 10}" y="{y + 16}">{escape(name)}</text>')
        for k, value in enumerate(values):
            place = f'x="{left + k * width:.2f}" y="{y}" width="{width - gap:.2f}" height="{row - 2}"'
            title = f"<title>{escape(f'{name}: {text(value)}')}</title>"
            body.append(f'<rect class="heat" {place} fill-opacity="{0.04 + 0.96 * value / most:.3f}">{title}</rect>')
    return _svg(_WIDTH, top + len(rows) * row + 2, label, body)


def legend(names: Sequence[str]) -> str:
    """Names with their colours, in the order of the series."""
    items = "".join(
        '<li><svg viewBox="0 0 12 12" aria-hidden="true">'
        f'<rect class="bar s{i % SERIES_COLOURS}" width="12" height="12"/></svg>{escape(name)}</li>'
        for i, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'
