# SPDX-License-Identifier: Apache-2.0
"""The parts of the laboratory that are arithmetic."""

import json
from typing import Any

import pytest

from dqplbd.topology.location import PathClass
from tests.vm.lab.jobs import LINK_BPS, MIB, Job, payload_bps, standard_jobs
from tests.vm.lab.places import RTT_NS, Layout, one_way_ns
from tests.vm.lab.report import PACKET_BYTES, TIME_TOLERANCE_NS, differences, rows_of, tables_of, traffic_of


def job(name: str, hosts: int = 32) -> Job:
    [found] = [one for one in standard_jobs(hosts) if one.name == name]
    return found


def traffic(job: Job, done_ns: int, first: int, after: int) -> dict[str, Any]:
    """A result as a guest brings it back."""
    late = 20 * job.rtt_ns + 1
    return {
        "paths": [
            {"from": a, "to": b, "class": str(job.layout.path_class(a, b)), "source": "rtt", "rtt_ns": 1, "qps": 16}
            | {"outstanding": 128, "segment_bytes": 524288}
            for a in range(len(job.places))
            for b in range(len(job.places))
            if a != b
        ],
        "flows": {t.key: {"bytes": t.bytes, "done_ns": done_ns, "same": True} for t in job.transfers},
        "queues": {
            "times_ns": [1000, late],
            "bytes": {str(host): [first, after] for host in job.measured},
            "drops": {str(host): 0 for host in job.measured},
        },
        "live": [{"inflight_peak_bytes": 1}],
        "counters": {"sent_pkts": 7},
        "late_ns": 0,
    }


@pytest.mark.parametrize("hosts", [8, 9, 12, 15, 16, 24, 32])
def test_an_even_layout_has_paths_of_every_class(hosts: int) -> None:
    layout = Layout.even(hosts)
    classes = {layout.path_class(a, b) for a in range(hosts) for b in range(hosts) if a != b}
    assert len(layout) == hosts
    assert classes == set(RTT_NS)


@pytest.mark.parametrize("path_class", list(RTT_NS))
def test_the_stage_of_an_incast_is_as_far_as_asked(path_class: PathClass) -> None:
    layout = Layout.apart(8, path_class)
    assert {layout.path_class(sender, 0) for sender in range(1, 9)} == {path_class}
    assert 2 * one_way_ns(layout, 3, 0) == RTT_NS[path_class]


def test_jobs_survive_json() -> None:
    for one in standard_jobs(32):
        assert Job.from_dict(json.loads(json.dumps(one.as_dict()))) == one


def test_every_job_measures_where_its_traffic_goes() -> None:
    for one in standard_jobs(32):
        assert {transfer.target for transfer in one.transfers} == set(one.measured)
        assert all(transfer.bytes % MIB == 0 and transfer.source != transfer.target for transfer in one.transfers)


def test_goodput_is_that_of_the_busiest_way_out() -> None:
    incast = job("incast_rack")
    whole = sum(transfer.bytes for transfer in incast.transfers)
    least_ns = round(whole * 8e9 / payload_bps(LINK_BPS))
    found = traffic_of(incast, traffic(incast, least_ns * 2, 10, 20))
    assert found.ratio == pytest.approx(0.5, rel=1e-6)
    assert (found.first_bytes, found.after_bytes) == (10, 20)
    assert found.whole


def test_targets_are_met_and_missed_where_they_should() -> None:
    single = job("single")
    [transfer] = single.transfers
    [(_, rate)] = single.egress_bps
    fast = round(transfer.bytes * 8e9 / payload_bps(rate) * 1.01)
    static = traffic(single, fast, 7_000_000, 7_000_000)
    good = rows_of(single, {"static": static, "computed": traffic(single, fast, 3_000_000, 600_000)})
    assert [row.name for row in good if row.met is False] == []
    bad = rows_of(single, {"static": static, "computed": traffic(single, fast * 2, 3_000_000, 800_000)})
    missed = [row.name for row in bad if row.met is False]
    assert missed == ["lab_single_computed_goodput", "lab_single_computed_queue_after"]


def test_lost_content_is_a_missed_target() -> None:
    single = job("single")
    broken = traffic(single, 1000, 0, 0)
    broken["flows"]["0-1"]["same"] = False
    rows = rows_of(single, {"static": traffic(single, 1000, 1, 1), "computed": broken})
    assert "lab_single_computed_bytes_right" in [row.name for row in rows if row.met is False]


def test_what_is_lost_is_a_missed_target() -> None:
    single = job("single")
    retried = traffic(single, 1000, 0, 0)
    retried["counters"]["rcvd_rnr_err"] = 1
    rows = rows_of(single, {"static": traffic(single, 1000, 1, 1), "computed": retried})
    assert [row.name for row in rows if row.met is False] == ["lab_single_computed_lost"]


def test_a_timer_of_rxe_that_ran_on_is_no_missed_target() -> None:
    single = job("single")
    retried = traffic(single, 1000, 0, 0)
    retried["counters"]["completer_retry_err"] = 1
    rows = rows_of(single, {"static": traffic(single, 1000, 1, 1), "computed": retried})
    assert not [row.name for row in rows if row.met is False]


def test_classes_by_anything_but_rtt_do_not_count() -> None:
    probing = job("probing_32")
    result = traffic(probing, 0, 0, 0)
    rows = {row.name: row for row in rows_of(probing, {"computed": result})}
    assert rows["lab_probing_32_classes_right"].met
    assert rows["lab_probing_32_rtt_error_region"].value == RTT_NS[PathClass.REGION] - 1
    result["paths"][0]["source"] = "labels"
    rows = {row.name: row for row in rows_of(probing, {"computed": result})}
    assert rows["lab_probing_32_classes_right"].met is False


def test_two_runs_agree_within_a_packet_and_two_microseconds_only() -> None:
    single = job("single")

    def run(done_ns: int, first: int) -> dict[str, Any]:
        return {name: traffic(single, done_ns, first, 0) for name in ("static", "computed")}

    one = run(10_000_000, 7_000_000)
    assert differences(single, one, run(10_000_000 + TIME_TOLERANCE_NS, 7_000_000 + PACKET_BYTES)) == []
    assert len(differences(single, one, run(10_000_001 + TIME_TOLERANCE_NS, 7_000_000))) == 2
    assert len(differences(single, one, run(10_000_000, 7_000_001 + PACKET_BYTES))) == 2
    other = run(10_000_000, 7_000_000)
    other["static"]["paths"][0]["class"] = "rack"
    assert len(differences(single, one, other)) == 1


def test_tables_have_a_row_for_each_result() -> None:
    jobs = standard_jobs(32)
    results = {one.name: {setting.name: traffic(one, 1_000_000, 5, 5) for setting in one.settings} for one in jobs}
    probing, moved = tables_of(jobs, results)
    assert len(probing.rows) == 2
    assert len(moved.rows) == 2 * sum(1 for one in jobs if one.transfers)
