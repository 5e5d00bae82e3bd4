# SPDX-License-Identifier: Apache-2.0
"""The alerts, the dashboard and the page of metrics name what there is."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dqplbd.inventory.rdma_drivers import Kind
from dqplbd.metrics.catalogue import CATALOGUE, Metric
from dqplbd.metrics.reference import reference

ROOT = Path(__file__).parents[3]
RULES = ROOT / "configs/prometheus-rules.yaml"
DASHBOARD = ROOT / "configs/grafana-dashboard.json"

NAMES: dict[str, Metric] = {}
for _one in CATALOGUE:
    NAMES[_one.name] = _one
    if _one.kind == "histogram":
        for _suffix in ("bucket", "sum", "count"):
            NAMES[f"{_one.name}_{_suffix}"] = _one


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def dashboard_expressions() -> Iterator[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


EXPRESSIONS = [rule["expr"] for rule in rules()] + list(dashboard_expressions())


def wrong(expression: str) -> list[str]:
    """Metrics and labels in selectors that do not exist."""
    found = []
    for name, selector in re.findall(r"\b((?:dqplbd|process|node)_[a-z_]+)(\{[^}]*\})?", expression):
        if name not in NAMES:
            found.append(name)
            continue
        for label in re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", selector):
            if label not in (*NAMES[name].labels, "instance", "job"):
                found.append(f"{name}{{{label}}}")
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_metrics_and_labels_exist(expression: str) -> None:
    assert re.search(r"dqplbd_|process_", expression)
    assert wrong(expression) == []


def test_the_check_finds_what_does_not_exist() -> None:
    assert wrong("rate(dqplbd_no_such_total[5m])") == ["dqplbd_no_such_total"]
    assert wrong('dqplbd_clients{peer="x"}') == ["dqplbd_clients{peer}"]


def test_counters_are_read_as_rates() -> None:
    for expression in EXPRESSIONS:
        for name in re.findall(r"\b(dqplbd_[a-z_]+_total)\b", expression):
            assert re.search(rf"\b(rate|increase)\({name}\b", expression), expression


def test_every_alert_says_what_to_do() -> None:
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "action"}, rule["alert"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        labels = set(re.findall(r"\$labels\.([a-z_]+)", rule["annotations"]["summary"])) - {"instance"}
        for name in re.findall(r"\b(dqplbd_[a-z_]+)", rule["expr"])[:1]:
            assert labels <= set(NAMES[name].labels), rule["alert"]


def test_values_of_labels_are_those_exported() -> None:
    closed = {
        "state": {"starting", "ready", "degraded", "draining", "up", "connecting", "down", "refused"},
        "result": {"ok", "timeout", "send_error", "invalid", "refused"},
        "reason": {"window", "grant", "qp", "token", "unknown", "rate", "malformed"},
        "class": {"host", "rack", "zone", "building", "region", "unknown"},
        "stat": {"min", "median", "max"},
        "kind": {kind.value for kind in Kind if kind is not Kind.XMIT_WAIT_TICKS},
    }
    for expression in EXPRESSIONS:
        for label, values in re.findall(r'([a-z_]+)=~?"([^"$]*)"', expression):
            assert set(values.split("|")) <= closed[label], expression


def test_promtool_accepts_the_rules() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian, Ubuntu: package prometheus)")
    done = subprocess.run([promtool, "check", "rules", str(RULES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("marks", "loss", "fires"),
    [
        ("0+0x30", "0+600x30", True),  # packets are lost, nobody marks
        ("0+600x30", "0+600x30", False),  # marked, too
        (None, "0+600x30", False),  # whether anybody marks is not counted
        ("0+0x30", "0+6x30", False),  # a packet now and then
    ],
)
def test_loss_without_marks_is_told_from_loss_with(tmp_path: Path, marks: str | None, loss: str, fires: bool) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian, Ubuntu: package prometheus)")
    labels = 'instance="h1", device="mlx5_0", kind'
    counters = {"retransmit": loss} | ({"ecn_marked": marks} if marks is not None else {})
    alert = next(rule for rule in rules() if rule["alert"] == "DqplbdRdmaLossWithoutMarks")
    told = {
        "summary": "h1: mlx5_0 loses packets and no switch marks congestion",
        "action": alert["annotations"]["action"],
    }
    expected = [{"exp_labels": {"severity": "warning", "instance": "h1", "device": "mlx5_0"}, "exp_annotations": told}]
    case = {
        "rule_files": [str(RULES)],
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": f'dqplbd_device_rdma_events_total{{{labels}="{kind}"}}', "values": values}
                    for kind, values in counters.items()
                ],
                "alert_rule_test": [
                    {"eval_time": "25m", "alertname": alert["alert"], "exp_alerts": expected if fires else []}
                ],
            }
        ],
    }
    file = tmp_path / "case.yaml"
    file.write_text(yaml.safe_dump(case))
    done = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs/metrics.md").read_text() == reference(), (
        "run `python -m dqplbd.metrics.reference > docs/metrics.md`"
    )
