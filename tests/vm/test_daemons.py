# SPDX-License-Identifier: Apache-2.0
"""Whole daemons over RDMA: what they find out about their paths, and what they carry."""

import contextlib
from typing import Any

from tests.vm.conftest import MakeCluster, MakeFabric, WaitUntil
from tests.vm.daemons import Stream, admin, paths, verbs_devices

TIMES = ("real", "simulated")
EMULATED = False  # four daemons on one such CPU are not ready within a minute
TIMEOUT_S = 300

# Round trip times of the published classes, in us; 400 times as long in real time: software is small beside that.
RTTS_US = {1: 8, 2: 56, 3: 120, 4: 240}
CLASSES = {1: "rack", 2: "zone", 3: "building", 4: "region"}


def pinned(**numbers: Any) -> dict[str, Any]:
    """Configuration that fixes numbers of the profile, whatever the class."""
    classes = ("host", "rack", "zone", "building", "region", "unknown")
    return {"profiles": {"classes": dict.fromkeys(classes, numbers)}}


def test_paths_are_measured_and_classified_by_their_rtt_alone(
    make_fabric: MakeFabric, make_cluster: MakeCluster, wait_until: WaitUntil, simulated: bool
) -> None:
    fabric = make_fabric(5)
    scale = 1 if simulated else 400
    fabric.set_delays(lambda a, b: RTTS_US[max(a, b)] * 1000 * scale // 2)
    thresholds = {"rack_ns": 21_200, "zone_ns": 82_000, "building_ns": 169_700}
    config = {
        "classification": {
            "method": "rtt",
            "thresholds": {key: value * scale for key, value in thresholds.items()},
            "windows_to_widen": 1,
        },
        # Host 0 asks all, the others nobody: five daemons on one CPU would measure each other's work.
        "probing": {"interval_s": 0.05},
    }
    cluster = make_cluster(fabric, config, devices=verbs_devices(fabric))

    def classified() -> dict[int, Any] | None:
        found = {peer: paths(cluster, 0, peer) for peer in CLASSES}
        if not all(path and path[0].estimate.windows >= 2 for path in found.values()):
            return None
        if any(path[0].path_class != CLASSES[peer] for peer, path in found.items()):
            return None
        return {peer: path[0] for peer, path in found.items()}

    found = wait_until(classified, "all paths have their class")
    for peer, path in found.items():
        true = RTTS_US[peer] * 1000 * scale
        # Reading the simulated clock moves it a little.  What a busy machine adds in real time, only the class bounds.
        assert path.estimate.rtt_ns >= true - 1000, CLASSES[peer]
        assert not simulated or path.estimate.rtt_ns <= true + 3000, CLASSES[peer]
        assert path.profile.window_bytes > 0
    windows = [found[peer].profile.window_bytes for peer in CLASSES]
    assert windows == sorted(windows), "a farther path needs no smaller window"


def test_data_over_many_queue_pairs_in_both_directions(make_fabric: MakeFabric, make_cluster: MakeCluster) -> None:
    fabric = make_fabric(2)
    config = pinned(qps=16, segment_bytes="64KiB", outstanding_per_qp=2)
    cluster = make_cluster(fabric, config, devices=verbs_devices(fabric))
    before = [fabric.sent_bytes(host) for host in range(2)]
    size, count = 1 << 20, 16
    with contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(Stream(cluster, near, 1 - near, size=size, count=count, seed=10 * near + number))
            for near in range(2)
            for number in range(2)
        ]
        for stream in streams:
            stream.check()
    for near in range(2):
        [path] = paths(cluster, near, 1 - near)
        assert path.profile.qps == 16
        assert path.live.tx_segments > 2 * count * 16
        assert path.live.duplicates == path.live.failures == 0
        assert fabric.sent_bytes(near) - before[near] > 2 * (size - 8) * count, "it went another way"


def test_two_rails_carry_their_own_traffic(make_fabric: MakeFabric, make_cluster: MakeCluster) -> None:
    fabric = make_fabric(2, rails=2)
    cluster = make_cluster(fabric, devices=verbs_devices(fabric))
    size, count = 256 * 1024, 8
    for rail in range(2):
        before = [fabric.sent_bytes(0, one) for one in range(2)]
        with Stream(cluster, 0, 1, size=size, count=count, device=rail) as stream:
            stream.check()
        sent = [fabric.sent_bytes(0, one) - before[one] for one in range(2)]
        assert sent[rail] > count * (size - 8)
        assert sent[1 - rail] < count * size // 4, "only control and probes"
    assert sorted((path.rail, path.live.state) for path in paths(cluster, 0, 1)) == [(0, "up"), (1, "up")]


def test_four_hosts_each_to_each(make_fabric: MakeFabric, make_cluster: MakeCluster) -> None:
    fabric = make_fabric(4)
    cluster = make_cluster(fabric, pinned(qps=2), devices=verbs_devices(fabric))
    with contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(Stream(cluster, near, far, size=100_000, count=6, seed=4 * near + far))
            for near in range(4)
            for far in range(near)
        ]
        for stream in streams:
            stream.check()
    for near in range(4):
        assert admin(cluster, near).devices()[0].provider == "verbs"
        for far in range(near):
            [there], [back] = paths(cluster, near, far), paths(cluster, far, near)
            assert (there.live.tx_messages, back.live.rx_messages) == (7, 7)
            assert (there.live.rx_messages, back.live.tx_messages) == (0, 0)
