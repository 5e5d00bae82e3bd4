# SPDX-License-Identifier: Apache-2.0
"""The page: whole, well formed, of its own, and with everything in it that was measured."""

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from dqplbd.cli.main import app
from dqplbd.simulation.charts import Line, bar_chart, heat_map, line_chart, log_ticks, ticks
from dqplbd.simulation.compare import Comparison, compare
from dqplbd.simulation.report import report_html
from dqplbd.simulation.scenario import parse_scenario

SMALL = """
title: 'A <b>pod</b> & more'
region: {zones: 2, racks: 1, hosts: 2, gpus: 2}
fabric: {planes: 2}
workload: {kind: all_to_all, size_bytes: 2MiB}
senders: [unlimited, dqplb+grants]
"""


@pytest.fixture(scope="module")
def result() -> Comparison:
    return compare(parse_scenario(SMALL))


class Balanced(HTMLParser):
    """Every tag that opens closes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.bad: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.bad += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href") or name.startswith("on")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_alone(result: Comparison) -> None:
    page = report_html(result)
    parser = Balanced()
    parser.feed(page)
    assert parser.open == parser.bad == []
    assert not parser.seen & {"script", "link", "img", "iframe", "b"}
    assert not re.search(r"url\(|@import|https?:", page)
    assert "A &lt;b&gt;pod&lt;/b&gt; &amp; more" in page


def test_every_sender_is_in_every_part(result: Comparison) -> None:
    page = report_html(result)
    sections = re.findall(r"<section><h2>(.*?)</h2>(.*?)</section>", page, re.DOTALL)
    assert len(sections) == 8
    for head, content in sections:
        for run in result.runs:
            assert run.sender in content, head
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    for chart in charts:
        ElementTree.fromstring(chart)
    heat = dict(sections)["Peak of each switch, by tier"]
    assert heat.count('class="heat"') == sum(len(run.switches) for run in result.runs)


def test_bars_are_as_long_as_their_values() -> None:
    chart = bar_chart([("a", 10, 0), ("b", 5, 1), ("c", 0, 2)], lambda value: f"{value:g} x", "test")
    widths = [float(width) for width in re.findall(r'<rect class="bar s\d" [^>]*width="([\d.]+)"', chart)]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2)
    assert widths[2] == 0
    assert "10 x" in chart


def test_lines_go_through_their_points() -> None:
    chart = line_chart([Line("a", [0, 5, 10], [0, 4, 2], 0)], str, str, "x", "test")
    points = re.search(r'points="([^"]*)"', chart)
    assert points is not None
    (x0, y0), (x1, y1), (x2, y2) = (map(float, pair.split(",")) for pair in points[1].split())
    assert x1 - x0 == pytest.approx(x2 - x1)
    assert y0 - y1 == pytest.approx(2 * (y0 - y2))
    log = line_chart([Line("a", [0, 1, 10, 100], [0, 1, 2, 3], 0)], str, str, "x", "test", log_x=True)
    shown = re.search(r'points="([^"]*)"', log)
    assert shown is not None
    a, b, c = (float(pair.split(",")[0]) for pair in shown[1].split())
    assert b - a == pytest.approx(c - b, abs=0.2)
    assert "nothing was measured" in line_chart([], str, str, "x", "test")
    assert "polyline" in line_chart([Line("one", [3], [0], 0)], str, str, "x", "test")


def test_heat_is_the_value_over_the_largest() -> None:
    chart = heat_map([("a", [0, 5]), ("b", [10, 0])], [("left", 1), ("right", 1)], str, "test")
    assert re.findall(r'fill-opacity="([\d.]+)"', chart) == ["0.040", "0.520", "1.000", "0.040"]


def test_ticks_are_round_and_within() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(3, 3) == [3]
    assert ticks(0, 1000, binary=True) == [0, 256, 512, 768]
    assert log_ticks(1, 100) == [1, 2, 5, 10, 20, 50, 100]
    assert log_ticks(1, 10**6) == [10.0**power for power in range(7)]


def test_the_command_writes_it(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SMALL)
    done = CliRunner().invoke(app, ["simulate", str(tmp_path / "s.yaml"), "--report", str(tmp_path / "r.html")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    done = CliRunner().invoke(app, ["simulate", str(tmp_path / "s.yaml"), "--report", str(tmp_path / "no" / "r.html")])
    assert done.exit_code == 2
    assert "r.html" in done.stderr
