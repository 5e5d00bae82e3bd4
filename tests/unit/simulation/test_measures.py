# SPDX-License-Identifier: Apache-2.0
"""Bounds, bandwidths, percentiles, fairness."""

import pytest

from dqplbd.simulation.measures import (
    Shape,
    bus_bandwidth,
    histogram_percentile,
    jain,
    lower_bound_ns,
    percentile,
    rank_rates,
)
from dqplbd.simulation.workloads import Message, all_gather, all_to_all

GBIT = 10**9
SHAPE = Shape((2, 2, 2, 2, 2), 400 * GBIT, (1, 2, 4), 3600 * GBIT, 1.0)


@pytest.mark.parametrize(
    ("receiver", "gbit"),
    [
        (1, 3600),  # the same host
        (2, 400),  # the same rack: the NIC
        (4, 400),  # the same zone: a rack's 4 GPUs have 1600
        (8, 400),  # the same building: a zone's 8 GPUs have 1600
        (16, 400),  # another building: 16 GPUs have 1600
    ],
)
def test_one_message_is_bound_by_its_nic(receiver: int, gbit: float) -> None:
    assert lower_bound_ns([Message(0, receiver, 10**6)], SHAPE) == pytest.approx(8e6 / gbit)


def test_the_way_out_of_a_place_binds_many() -> None:
    out_of_zone = [Message(i, i + 8, 10**6) for i in range(8)]
    assert lower_bound_ns(out_of_zone, SHAPE) == pytest.approx(8 * 8e6 / 1600)
    out_of_building = [Message(i, i + 16, 10**6) for i in range(16)]
    assert lower_bound_ns(out_of_building, SHAPE) == pytest.approx(16 * 8e6 / 1600)
    # And the way into one.
    into_zone = [Message(i, 0, 10**6) for i in range(16, 32)]
    assert lower_bound_ns(into_zone, SHAPE) == pytest.approx(16 * 8e6 / 400)


def test_headers_take_their_part_but_not_in_a_host() -> None:
    shape = Shape(SHAPE.counts, SHAPE.nic_bps, SHAPE.oversubscription, SHAPE.nvlink_bps, 0.5)
    assert lower_bound_ns([Message(0, 2, 10**6)], shape) == pytest.approx(2 * 8e6 / 400)
    assert lower_bound_ns([Message(0, 1, 10**6)], shape) == pytest.approx(8e6 / 3600)
    assert lower_bound_ns([], shape) == 0


def test_places() -> None:
    assert SHAPE.gpus == 32
    assert SHAPE.places() == (2, 4, 8, 16)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    # 8 ranks, 1 GB in 1 s: algorithm bandwidth 1 GB/s, times 7/8 or twice that.
    gather = all_gather(8, 10**9)
    assert bus_bandwidth(gather.size_bytes, gather.bus_factor, 1e9) == pytest.approx(8e9 * 7 / 8)
    assert bus_bandwidth(10**9, all_to_all(8, 10**9).bus_factor, 1e9) == pytest.approx(8e9 * 7 / 8)
    assert bus_bandwidth(10**9, 1.0, 0) == 0


def test_percentiles_are_nearest_rank() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, part) for part in (0.2, 0.21, 0.5, 0.99, 1.0)] == [1, 2, 3, 5, 5]
    assert percentile([], 0.5) == 0
    assert histogram_percentile([0, 3, 0, 1], [0, 10, 20, 30], 0.75) == 10
    assert histogram_percentile([0, 3, 0, 1], [0, 10, 20, 30], 0.76) == 30
    assert histogram_percentile([0, 0], [0, 10], 0.5) == 0


def test_jain() -> None:
    assert jain([3, 3, 3]) == pytest.approx(1)
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)
    assert jain([]) == 1


def test_rates_are_bytes_over_the_last_arrival() -> None:
    messages = [Message(0, 1, 1000), Message(2, 1, 1000), Message(0, 2, 500)]
    assert rank_rates(messages, [10, 20, 5]) == {1: 2000 * 8e9 / 20, 2: 500 * 8e9 / 5}
