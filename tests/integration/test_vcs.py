# SPDX-License-Identifier: Apache-2.0
"""Virtual connections: made when a workload connects, one exchange for all rails, whoever begins."""

import threading
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest

from dqplbd.admin.client import AdminClient
from dqplbd.admin.model import Path
from dqplbd.client import Context, DqplbError, Flow, Status
from dqplbd.lab.cluster import Cluster, HostSpec

MakeCluster = Callable[..., Cluster]
WaitUntil = Callable[[Callable[[], Any], str], Any]
PATIENCE = 30.0


def admin(cluster: Cluster, host_id: str) -> AdminClient:
    return AdminClient(cluster[host_id].admin)


def paths(cluster: Cluster, host_id: str, peer: str) -> list[Path]:
    return [path for path in admin(cluster, host_id).paths() if path.peer == peer]


def connect(near: Context, far: Context, device: int = 0) -> tuple[Flow, Flow]:
    with far.listen(device) as listener:
        accepting = listener.accept()
        connecting = near.connect(listener.handle, device)
        return connecting.wait(PATIENCE), accepting.wait(PATIENCE)


def exchange(near: Context, far: Context, there: Flow, here: Flow, size: int = 300_000) -> None:
    source, target = near.allocate(size), far.allocate(size)
    source.view[:] = bytes(range(256)) * (size // 256) + bytes(size % 256)
    receiving = here.recv(target)
    assert there.send(source).wait(PATIENCE) == size
    assert receiving.wait(PATIENCE).bytes == size
    assert target.view[:] == source.view[:]


def test_hosts_that_know_nothing_of_each_other_learn_from_the_handle(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a", "b"], know=False)
    assert [peer.source for peer in admin(cluster, "a").peers()] == ["self"]
    with Context(cluster["a"].client_socket) as near, Context(cluster["b"].client_socket) as far:
        exchange(near, far, *connect(near, far))
        for one, other in (("a", "b"), ("b", "a")):
            peer = next(peer for peer in admin(cluster, one).peers() if peer.host_id == other)
            assert (peer.source, peer.state, peer.vcs) == ("learned", "up", 1)


def test_a_host_reaches_itself(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a"])
    with Context(cluster["a"].client_socket) as one, Context(cluster["a"].client_socket) as two:
        exchange(one, two, *connect(one, two))
        path = paths(cluster, "a", "a")[0]
        assert (path.live.state, path.path_class) == ("up", "host")


def test_one_exchange_covers_all_rails(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a", "b"], start=False)
    for host in cluster:
        rails = [{"name": f"rail{i}", "address": host.address, "rail": i} for i in range(3)]
        host.write_config({"devices": rails})
    cluster["b"].write_config({"devices": cluster["b"].config["devices"][:2]})
    cluster.start()
    with Context(cluster["a"].client_socket) as near, Context(cluster["b"].client_socket) as far:
        exchange(near, far, *connect(near, far, 1))

        def up() -> Any:
            found = paths(cluster, "a", "b")
            return all(path.live.state == "up" for path in found) and found

        assert sorted(path.rail for path in wait_until(up, "both common rails have a VC")) == [0, 1]
        assert cluster["a"].log().count("VC up") == 2
        exchange(near, far, *connect(near, far, 0))
        assert cluster["a"].log().count("VC up") == 2


def test_hosts_without_a_common_rail_are_told_so(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a", "b"], start=False)
    for rail, host in enumerate(cluster):
        host.write_config({"devices": [{"name": "tcp0", "address": host.address, "rail": rail}]})
    cluster.start()
    with Context(cluster["a"].client_socket) as near, Context(cluster["b"].client_socket) as far:
        with far.listen() as listener, pytest.raises(DqplbError) as caught:
            near.connect(listener.handle).wait(PATIENCE)
        assert caught.value.status is Status.UNREACHABLE
        assert "no device on the rail" in cluster["a"].log()


def test_both_ends_begin_at_the_same_time(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    names = ["a", "b", "c", "d"]
    cluster = make_cluster(names)
    contexts = {name: Context(cluster[name].client_socket) for name in names}
    listeners = {name: contexts[name].listen() for name in names}
    requests = []
    for one, other in combinations(names, 2):
        for near, far in ((one, other), (other, one)):
            requests.append(listeners[far].accept())
            requests.append(contexts[near].connect(listeners[far].handle))
    flows = [request.wait(PATIENCE) for request in requests]
    assert len(flows) == 24
    for one, other in combinations(names, 2):
        for near, far in ((one, other), (other, one)):

            def quiet(near: str = near, far: str = far) -> Any:
                return [path for path in paths(cluster, near, far) if path.live.state == "up"]

            assert wait_until(quiet, f"{near} to {far}")[0].live.vcs == 1
    for context in contexts.values():
        context.close()


def test_many_connects_at_once_share_one_exchange(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a", "b"])
    with Context(cluster["a"].client_socket) as near, Context(cluster["b"].client_socket) as far:
        with far.listen() as listener:
            accepts = [listener.accept() for _ in range(50)]
            connects = [near.connect(listener.handle) for _ in range(50)]
            for request in [*connects, *accepts]:
                request.wait(PATIENCE)
        assert paths(cluster, "a", "b")[0].live.vcs == 1
        assert paths(cluster, "a", "b")[0].live.flows == 50


def test_the_smaller_limits_hold_on_both_ends(make_cluster: MakeCluster) -> None:
    small = {"transport": {"max_qps": 3}, "profiles": {"entropy_target": {"unknown": 8, "rack": 8}}}
    large = {"transport": {"max_qps": 12}, "profiles": {"entropy_target": {"unknown": 8, "rack": 8}}}
    cluster = make_cluster([HostSpec("a", small), HostSpec("b", large)])
    with Context(cluster["b"].client_socket) as near, Context(cluster["a"].client_socket) as far:
        exchange(near, far, *connect(near, far))
        profile = paths(cluster, "b", "a")[0].profile
        assert (profile.qps, profile.limits["qps"]) == (3, "negotiated")
        assert paths(cluster, "a", "b")[0].profile.qps == 3


def test_a_profile_changes_under_a_running_flow(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(["a", "b"])
    with Context(cluster["a"].client_socket) as near, Context(cluster["b"].client_socket) as far:
        there, here = connect(near, far)
        stop = threading.Event()
        failures: list[BaseException] = []

        def talk() -> None:
            try:
                while not stop.is_set():
                    exchange(near, far, there, here, 500_000)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=talk)
        thread.start()
        try:
            for window, qps in ((2**20, 16), (2**17, 1), (2**24, 5)):
                pinned = {"window_bytes": window, "qps": qps}
                cluster["a"].write_config({"profiles": {"peers": {"b": pinned}}})
                cluster["a"].reload()
                live = paths(cluster, "a", "b")[0].live
                assert live.profile_window_bytes == window
        finally:
            stop.set()
            thread.join()
        assert not failures
        live = paths(cluster, "a", "b")[0].live
        assert (live.failures, live.vcs) == (0, 1)


def test_a_peer_that_is_gone_fails_connects_and_flows(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a", "b"])
    with Context(cluster["a"].client_socket) as near, Context(cluster["b"].client_socket) as far:
        there, _ = connect(near, far)
        handle = far.listen().handle
        receiving = there.recv(near.allocate(100))
        cluster["b"].kill()
        cluster["b"].wait_exit()
        with pytest.raises(DqplbError) as caught:
            receiving.wait(PATIENCE)
        assert caught.value.status in (Status.UNREACHABLE, Status.STALE)
        with pytest.raises(DqplbError) as caught:
            near.connect(handle).wait(PATIENCE)
        assert caught.value.status is Status.UNREACHABLE
        peer = wait_until(
            lambda: [peer for peer in admin(cluster, "a").peers() if peer.state == "down"], "a sees that b is down"
        )[0]
        assert "Connection refused" in (peer.reason or "")
        # The daemon comes back in another life: old handles say so, new ones work.
        cluster["b"].launch()
        cluster["b"].wait_state("READY=1")
        with pytest.raises(DqplbError) as caught:
            near.connect(handle).wait(PATIENCE)
        assert caught.value.status is Status.STALE
    with Context(cluster["a"].client_socket) as near, Context(cluster["b"].client_socket) as far:
        exchange(near, far, *connect(near, far))


def test_a_frozen_peer_fails_flows_within_its_deadline(make_cluster: MakeCluster) -> None:
    import signal

    config = {"transport": {"heartbeat_s": 0.1, "op_deadline_s": 0.5, "connect_timeout_s": 3}}
    cluster = make_cluster(["a", "b"], config)
    with Context(cluster["a"].client_socket) as near, Context(cluster["b"].client_socket) as far:
        there, _ = connect(near, far)
        receiving = there.recv(near.allocate(100))
        cluster["b"].kill(signal.SIGSTOP)
        try:
            with pytest.raises(DqplbError) as caught:
                receiving.wait(PATIENCE)
            assert caught.value.status is Status.UNREACHABLE
        finally:
            cluster["b"].kill(signal.SIGCONT)


def test_a_draining_daemon_lets_a_receive_end(make_cluster: MakeCluster) -> None:
    import os
    import signal

    cluster = make_cluster(["a", "b"], {"clients": {"drain_s": 20}})
    with Context(cluster["a"].client_socket) as near, Context(cluster["b"].client_socket) as far:
        there, here = connect(near, far)
        target = far.allocate(1000)
        receiving = here.recv(target)
        os.kill(cluster["b"].pid, signal.SIGTERM)
        cluster["b"].wait_state("STOPPING=1")
        with pytest.raises(DqplbError):
            Context(cluster["b"].client_socket)
        assert admin(cluster, "b").status().state == "draining"
        assert there.send(near.allocate(1000)).wait(PATIENCE) == 1000
        assert receiving.wait(PATIENCE).bytes == 1000
        assert cluster["b"].wait_exit() == 0


def test_peers_of_many_lives_leave_nothing_behind(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    cluster = make_cluster(["a", "b"])

    def connected() -> None:
        with Context(cluster["a"].client_socket) as near, Context(cluster["b"].client_socket) as far:
            exchange(near, far, *connect(near, far))

    def fds() -> int:
        return admin(cluster, "a").status().process.open_fds

    def settled() -> Any:
        status = admin(cluster, "a").status()
        return status.engine.clients == 0 and status.engine.vcs == 0

    counts = []
    for _ in range(3):
        connected()
        cluster["b"].stop()
        wait_until(settled, "a has cleaned up")
        counts.append(fds())
        cluster["b"].launch()
        cluster["b"].wait_state("READY=1")
    # Connections of the API come and go; a leak of a VC would be dozens.
    assert counts[-1] <= counts[0] + 4
    assert len(admin(cluster, "a").peers()) == 2


def test_expected_peers_share_the_queue_pairs(make_cluster: MakeCluster, wait_until: WaitUntil) -> None:
    classes = ("host", "rack", "zone", "building", "region", "unknown")
    profiles = {"qp_budget": 16, "entropy_target": dict.fromkeys(classes, 16)}
    cluster = make_cluster(["a", "b", "c", "d"], {"profiles": profiles})

    def qps(number: int) -> Any:
        return lambda: [path.profile.qps for path in paths(cluster, "a", "b")] == [number]

    wait_until(qps(16), "one peer has all queue pairs")
    with Context(cluster["a"].client_socket) as more, Context(cluster["a"].client_socket) as fewer:
        assert more.hint(3)
        assert fewer.hint(2, 8)
        wait_until(qps(4), "the larger hint counts: 16 / 3, as a power of two")
        assert wait_until(lambda: more.hint(10**6), "answered")
        wait_until(qps(4), "no more than the four hosts that there are")
        assert wait_until(lambda: more.hint(0), "answered")
        wait_until(qps(8), "the other hint is left")
        with pytest.raises(DqplbError, match="peers is -1"):
            more.hint(-1)
    wait_until(qps(16), "hints go with who gave them")
