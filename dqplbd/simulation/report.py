# SPDX-License-Identifier: Apache-2.0
"""A comparison as one HTML page that needs nothing else: no network, no script.  Pure."""

from collections.abc import Sequence
from html import escape
from typing import Final

from dqplbd.simulation.charts import Line, bar_chart, heat_map, legend, line_chart
from dqplbd.simulation.compare import TIERS, Comparison, Run
from dqplbd.simulation.senders import NO_LIMIT
from dqplbd.units import format_bytes, format_ns, format_rate

__all__ = ["report_html"]

_CDF_POINTS: Final = 400
_MAIN_HEAD: Final = (
    "sender",
    "completion",
    "change",
    "of the limit",
    "bus bandwidth",
    "peak buffer",
    "change",
    "one switch",
    "mean",
    "message p99",
    "fairness",
    "pauses",
    "marks",
)
_QUEUE_HEAD: Final = ("sender", "tier", "p50", "p99", "p99.9", "peak")

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1d2530; --dim: #5d6875; --paper: #ffffff; --rule: #dfe4ea;
  --heat: #b3261e; --s0: #6b7785; --s1: #d1791c; --s2: #1f78b4; --s3: #2f9e62; --s4: #8e44ad; --s5: #b3261e;
  --s6: #00838f; --s7: #a08000; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ed; --dim: #98a3b0; --paper: #14181d; --rule: #2c343d;
  --heat: #ff8a70; --s0: #98a3b0; --s1: #f0a04b; --s2: #5fb0e8; --s3: #5fcf92; --s4: #c58ae0; --s5: #ff8a70;
  --s6: #4dc4cf; --s7: #d8bd4a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1220px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin-bottom: .2rem; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
p.lead, .dim { color: var(--dim); fill: var(--dim); }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
th, td { text-align: right; padding: .3rem .4rem; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--dim); font-weight: 600; }
svg { width: 100%; max-width: 960px; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); } svg text.dim { fill: var(--dim); }
.end { text-anchor: end; } .mid { text-anchor: middle; }
.grid { stroke: var(--rule); } .tick, .axis { stroke: var(--dim); }
.line { fill: none; stroke-width: 1.8; stroke: var(--c); } .bar { fill: var(--c); } .heat { fill: var(--heat); }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; font-size: 13px; }
.legend svg { width: 12px; height: 12px; margin-right: .4rem; vertical-align: -1px; }
""" + "".join(f".s{i} {{ --c: var(--s{i}); }}\n" for i in range(8))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(one)}</th>" for one in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def _bytes(value: float) -> str:
    return format_bytes(round(value))


def _ns(value: float) -> str:
    return format_ns(value)


def _part(value: float) -> str:
    return f"{100 * value:.0f} %"


def _change(value: float, reference: float) -> str:
    return "-" if not reference else f"{100 * (value / reference - 1):+.1f} %"


def _cdf(values: Sequence[int]) -> tuple[list[float], list[float]]:
    """Points of the cumulative distribution of sorted values, as few as a chart can show."""
    n = len(values)
    step = max(n // _CDF_POINTS, 1)
    picked = sorted({*range(0, n, step), n - 1}) if n else []
    return [float(values[i]) for i in picked], [(i + 1) / n for i in picked]


def _summary(result: Comparison) -> str:
    low, high = result.schedule.step_bytes
    sizes = format_bytes(low) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"
    buffer = result.scenario.fabric.buffer_bytes
    bounded = f"switches of {format_bytes(buffer)} that pause" if buffer else "unbounded buffers, no pause"
    return (
        f"{result.gpus} GPUs, {len(result.schedule.messages)} messages of {sizes}, {result.schedule.algorithm}; "
        f"{bounded}; seed {result.scenario.seed}. No schedule of these messages takes less than "
        f"{format_ns(round(result.bound_ns))}."
    )


def _main_table(runs: Sequence[Run]) -> str:
    first = runs[0]
    return _table(
        _MAIN_HEAD,
        [
            [
                run.sender,
                format_ns(run.completion_ns),
                _change(run.completion_ns, first.completion_ns),
                f"{100 * run.bound_ratio:.1f} %",
                "-" if run.bus_bps is None else format_rate(run.bus_bps),
                format_bytes(run.peak_bytes),
                _change(run.peak_bytes, first.peak_bytes),
                format_bytes(run.peak_switch_bytes),
                _bytes(run.mean_bytes),
                _ns(run.message_ns[1]),
                f"{run.jain:.3f}",
                str(run.pauses),
                str(run.marks),
            ]
            for run in runs
        ],
    )


def _profile_table(runs: Sequence[Run]) -> str:
    return _table(
        ["sender", "class", "window", "segment", "queue pairs", "outstanding", "adapts", "grants"],
        [
            [
                run.sender,
                path_class.value,
                "none" if profile.window_bytes == NO_LIMIT else format_bytes(profile.window_bytes),
                format_bytes(profile.segment_bytes),
                str(profile.qps),
                str(profile.outstanding),
                "yes" if profile.adapt else "no",
                "yes" if run.grants else "no",
            ]
            for run in runs
            for path_class, profile in run.profiles.items()
        ],
    )


def report_html(result: Comparison) -> str:
    """The page."""
    runs = result.runs
    names = [run.sender for run in runs]
    title = result.scenario.title or f"{result.scenario.workload.kind} among {result.gpus} GPUs"
    tiers = [one.tier for one in runs[0].switches]
    groups = [(name, tiers.count(tier)) for tier, name in enumerate(TIERS) if tier in tiers]
    over_time = [Line(run.sender, run.series.times_ns, run.series.total_bytes, i) for i, run in enumerate(runs)]
    messages = [Line(run.sender, *_cdf(run.message_times_ns), i) for i, run in enumerate(runs)]
    completions = [(run.sender, float(run.completion_ns), i) for i, run in enumerate(runs)]
    peaks = [(run.sender, float(run.peak_bytes), i) for i, run in enumerate(runs)]
    of_switches = [(run.sender, [float(one.peak_bytes) for one in run.switches]) for run in runs]
    queues = [
        [run.sender, one.tier, *map(format_bytes, (one.p50_bytes, one.p99_bytes, one.p999_bytes, one.peak_bytes))]
        for run in runs
        for one in run.queues
    ]
    sections = [
        ("Result", _main_table(runs)),
        ("Completion", bar_chart(completions, _ns, "completion times")),
        ("Peak buffer", bar_chart(peaks, _bytes, "peak of all switches together")),
        (
            "Bytes in all switches over time",
            legend(names) + line_chart(over_time, _ns, _bytes, "time", "bytes in all switches over time", binary=True),
        ),
        ("Peak of each switch, by tier", heat_map(of_switches, groups, _bytes, "peak of each switch")),
        (
            "Time of messages, from post to arrival: part that took no longer",
            legend(names) + line_chart(messages, _ns, _part, "time", "distribution of message times", log_x=True),
        ),
        ("Queues of ports, as packets found them", _table(_QUEUE_HEAD, queues)),
        ("What each sender works with", _profile_table(runs)),
    ]
    body = "\n".join(f"<section><h2>{escape(head)}</h2>\n{content}</section>" for head, content in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        f'<h1>{escape(title)}</h1>\n<p class="lead">{escape(_summary(result))}</p>\n{body}\n</body></html>\n'
    )
