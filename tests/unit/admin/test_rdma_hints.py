# SPDX-License-Identifier: Apache-2.0
"""What events of RDMA devices are taken for, and where an operator sees them."""

from typing import TYPE_CHECKING

import pytest

from dqplbd.admin.convert import explanation_view
from dqplbd.admin.model import Device, PathClass, RdmaCounters, RdmaView
from dqplbd.admin.rdma_hints import EVENTS_LIMIT, diagnose, events_text, lost, span_text
from dqplbd.cli.tables import status_pairs, trouble_lines, wide_device_tables
from dqplbd.inventory.rdma_drivers import Kind
from dqplbd.profiles.bdp import PathInputs, explain_profile

if TYPE_CHECKING:
    from tests.unit.conftest import SampleView

ECN = {"ecn_marked": 0, "cnp_sent": 0, "cnp_handled": 0, "cnp_ignored": 0}


def device(recent: dict[str, int], name: str = "mlx5_0") -> Device:
    return Device(
        name=name,
        provider="verbs",
        rail=0,
        up=True,
        rdma_events={**recent},
        rdma_counters=RdmaCounters(driver="mlx5", age_seconds=1, recent=recent, recent_seconds=300),
    )


@pytest.mark.parametrize(
    ("recent", "said", "to_do"),
    [
        ({"retry_exceeded": 1}, "1 times a queue pair gave up", "dqplb probe"),
        ({"retransmit": 8, "out_of_sequence": 2, **ECN}, "8 retransmit, 2 out_of_sequence) and no switch", "ECN on"),
        (
            {"ack_timeout": 10, **ECN, "cnp_handled": 3},
            "although switches mark congestion (3 cnp_handled)",
            "thresholds",
        ),
        ({"retransmit": 10}, "this driver does not count", "discards"),
        ({"cnp_ignored": 1}, "slow down 1 times", "off in the adapter"),
        ({"receiver_not_ready": 10}, "10 times no receive", "another program"),
        ({"discard": 10}, "dropped 10", "cables"),
    ],
)
def test_each_trouble_has_its_advice(recent: dict[str, int], said: str, to_do: str) -> None:
    [(what, fix)] = diagnose(device(recent))
    assert said in what
    assert to_do in fix


def test_on_infiniband_loss_is_damage_whatever_is_marked() -> None:
    lossy = device({"retransmit": 20, **ECN})
    port = RdmaView(rdma_device="mlx5_0", port=1, link_layer="infiniband")
    [(what, fix)] = diagnose(lossy.model_copy(update={"rdma": port}))
    assert "InfiniBand" in what
    assert "symbol errors" in fix
    roce = port.model_copy(update={"link_layer": "ethernet"})
    assert "no switch marks" in next(diagnose(lossy.model_copy(update={"rdma": roce})))[0]


def test_a_few_losses_are_nothing_to_speak_of() -> None:
    few = dict.fromkeys(("receiver_not_ready", "discard"), EVENTS_LIMIT - 1)
    assert list(diagnose(device({**few, "retransmit": EVENTS_LIMIT - 1, "xmit_wait_ticks": 10**9}))) == []


def test_congestion_that_is_handled_is_no_trouble() -> None:
    assert list(diagnose(device({"ecn_marked": 10**6, "cnp_sent": 10**5, "cnp_handled": 10**5}))) == []


def test_a_device_without_counters_says_nothing() -> None:
    assert list(diagnose(Device(name="tcp0", provider="tcp", rail=0, up=True))) == []


def test_loss_is_what_shows_on_either_end() -> None:
    assert lost({"retransmit": 1, "ack_timeout": 2, "out_of_sequence": 4, "discard": 8, "ecn_marked": 16}) == 7
    assert set(Kind) >= {"retransmit", "ack_timeout", "out_of_sequence"}


def test_events_for_people_leave_out_what_did_not_happen_and_ticks() -> None:
    assert (
        events_text({"retransmit": 3, "discard": 0, "ecn_marked": 1, "xmit_wait_ticks": 5})
        == "3 retransmit, 1 ecn_marked"
    )
    assert events_text({"xmit_wait_ticks": 5}) == "none"


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0 s"), (12.4, "12 s"), (99.0, "99 s"), (300.0, "5 minutes")])
def test_spans_for_people(seconds: float, text: str) -> None:
    assert span_text(seconds) == text


def test_status_shows_events_and_changes_when_there_are_some(view: "SampleView") -> None:
    quiet = dict(status_pairs(view.status()))
    assert "rdma events" not in quiet
    assert quiet["devices"] == "1 of 1 up"
    status = view.status().model_copy(
        update={"rdma_recent": {"retransmit": 4}, "device_changes": {"up": 3, "down": 2, "address": 1}}
    )
    told = dict(status_pairs(status))
    assert told["rdma events"] == "4 retransmit in the last minutes"
    assert told["devices"] == "1 of 1 up; so far 2 down, 1 address"


def test_top_has_a_line_for_each_device_in_trouble() -> None:
    changed = device({"retransmit": 0}, "b").model_copy(update={"changes": {"down": 2, "up": 2}})
    flapping = Device(name="tcp0", provider="tcp", rail=0, up=True, changes={"down": 1})
    quiet = device({"retransmit": 0, "xmit_wait_ticks": 7}, "c").model_copy(update={"changes": {"up": 1}})
    assert trouble_lines([device({"retransmit": 4}, "a"), changed, flapping, quiet]) == [
        "a: 4 retransmit in the last 5 minutes",
        "b: none in the last 5 minutes; so far 2 down",
        "tcp0; so far 1 down",
    ]


def test_the_wide_list_of_devices_has_their_events() -> None:
    lossy = device({"retransmit": 4, "cnp_sent": 0})
    assert lossy.rdma_counters is not None
    counters = lossy.rdma_counters.model_copy(update={"unreadable": {"port_xmit_wait": "no count"}})
    table = wide_device_tables([lossy.model_copy(update={"rdma_counters": counters})], [])[-1]
    assert table.title == "Events"
    assert table.rows == [("mlx5_0", "mlx5", "4 retransmit", "4 retransmit", "1.0s ago", "port_xmit_wait")]
    without = wide_device_tables([Device(name="tcp0", provider="tcp", rail=0, up=True)], [])
    assert "Events" not in {table.title for table in without}


def test_explain_tells_what_the_device_of_the_path_counted(view: "SampleView") -> None:
    path = view.path("peer0", "mlx5_0", PathClass.RACK)
    explained = explain_profile(PathInputs(PathClass.RACK, 8000, 400 * 10**9, host_id="peer0"), view.policy)
    steps = {s.name: s for s in explanation_view(path, explained, device({"retransmit": 20, **ECN})).steps}
    step = steps["rdma_events"]
    assert step.value == "20 retransmit"
    assert "all its paths" in step.formula
    assert "no switch marks congestion" in step.note
    without = explanation_view(path, explained, Device(name="tcp0", provider="tcp", rail=0, up=True))
    assert "rdma_events" not in {s.name for s in without.steps}
