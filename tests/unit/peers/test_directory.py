# SPDX-License-Identifier: Apache-2.0
"""Who is known, who is asked when, and who may go by which name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqplbd.peers.cards import Hello, HelloLocation, Protocol, epoch_text
from dqplbd.peers.directory import Answer, Conflict, Directory, DirectoryFull, Peer, Source, State, Timing
from dqplbd.topology.location import UNKNOWN_LOCATION

TIMING = Timing(retry_min_s=1, retry_max_s=60, in_use_s=5, idle_s=30, forget_s=600)
A, B = "10.0.0.1:7471", "10.0.0.2:7471"


def directory(chance: float = 0.5, max_learned: int = 100) -> Directory:
    return Directory("me", 1, TIMING, lambda: chance, max_learned)


def hello(host_id: str, epoch: int = 7, rack: str | None = None) -> Hello:
    return Hello(
        protocol=Protocol(min=1, max=1),
        host_id=host_id,
        epoch=epoch_text(epoch),
        api_port=7471,
        location=HelloLocation(rack=rack),
    )


def accept(d: Directory, card: Hello, address: str, now: float = 0.0) -> tuple[Peer, Answer]:
    displaced = d.displaced(card, address)
    if displaced is not None:
        d.vacate(displaced, now)
    return d.accept(card, UNKNOWN_LOCATION, address, now)


def test_a_listed_peer_is_asked_at_once_and_then_at_its_pace() -> None:
    d = directory()
    peer = d.add(A, Source.STATIC, 0.0)
    assert d.due(0.0) == ([peer], None)
    accept(d, hello("a"), A)
    assert peer.host_id == "a"
    assert peer.state is State.UP
    assert d.due(0.0) == ([], 30.0)
    d.use(peer, True, 1.0)
    assert d.due(1.0) == ([], 6.0)


def test_waits_double_up_to_the_longest_and_a_listed_peer_is_never_given_up() -> None:
    d = directory(chance=1.0)
    peer = d.add(A, Source.STATIC, 0.0)
    waits = []
    for _ in range(12):
        d.failed(peer, "no answer", 0.0)
        assert peer.next_s is not None
        waits.append(peer.next_s)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60, 60]
    assert peer.state is State.DOWN
    accept(d, hello("a"), A)
    assert (peer.failures, peer.reason) == (0, "")


@given(st.floats(0, 1), st.integers(1, 10_000))
def test_jitter_stays_in_the_upper_half_of_a_wait(chance: float, failures: int) -> None:
    d = directory(chance)
    peer = d.add(A, Source.STATIC, 0.0)
    for _ in range(min(failures, 40)):
        d.failed(peer, "", 0.0)
    longest = min(60.0, 2.0 ** (min(failures, 40) - 1))
    assert peer.next_s is not None
    assert longest / 2 <= peer.next_s <= longest


def test_many_listed_peers_are_asked_less_often_each() -> None:
    d = directory()
    for i in range(10_000):
        d.add(f"10.1.{i // 250}.{i % 250}:7471", Source.DNS, 0.0)
    peer, _ = accept(d, hello("a"), "10.1.0.0:7471")
    assert peer.next_s == pytest.approx(10_000 / TIMING.hellos_per_s)


def test_a_stranger_that_says_hello_is_learned_but_not_asked() -> None:
    d = directory()
    peer, answer = accept(d, hello("a"), A)
    assert (answer, peer.listed, peer.next_s) == (Answer.NEW, False, None)
    assert accept(d, hello("a"), A)[1] is Answer.SAME
    assert accept(d, hello("a", rack="r"), A)[1] is Answer.CHANGED


def test_a_peer_without_use_or_news_is_forgotten() -> None:
    d = directory()
    peer, _ = accept(d, hello("a"), A)
    d.use(peer, True, 10.0)
    assert d.idle(10_000.0) == []
    d.use(peer, False, 1000.0)
    assert d.idle(1599.0) == []
    assert d.idle(1600.0) == [peer]
    d.remove(peer)
    assert len(d) == 0
    assert d.by_host("a") is None
    listed = d.add(B, Source.STATIC, 0.0)
    assert listed not in d.idle(1e9)


def test_strangers_cannot_fill_the_memory() -> None:
    d = directory(max_learned=3)
    for i in range(3):
        accept(d, hello(f"h{i}"), f"10.0.1.{i}:1")
    with pytest.raises(DirectoryFull, match="3 peers"):
        accept(d, hello("one-more"), "10.0.2.1:1")
    # One that is known may still come from elsewhere, without taking room.
    for port in range(100):
        accept(d, hello("h0"), f"10.0.1.0:{port + 2}")
    assert len(d) == 3
    d.add(B, Source.STATIC, 0.0)
    assert accept(d, hello("listed"), B)[1] is Answer.NEW


def test_a_restart_is_told_from_a_second_host() -> None:
    d = directory()
    accept(d, hello("a", 1), A)
    assert d.check_claim(hello("a", 2), A) is None
    assert accept(d, hello("a", 2), A)[1] is Answer.RESTARTED
    other = d.check_claim(hello("a", 3), B)
    assert other is not None
    assert other.address == A
    text = str(d.conflict(hello("a", 3), B, other))
    assert A in text
    assert B in text
    assert "host_id a" in text
    d.failed(other, "no answer", 0.0)
    assert d.check_claim(hello("a", 3), B) is None
    peer, answer = accept(d, hello("a", 3), B)
    assert (answer, peer.address) == (Answer.RESTARTED, B)
    assert d.by_address(A) is None


def test_one_host_at_two_addresses_is_one_peer() -> None:
    d = directory()
    accept(d, hello("a"), A)
    d.add(B, Source.STATIC, 0.0)
    peer, answer = accept(d, hello("a"), B)
    assert answer is Answer.SAME
    assert len(d) == 1
    assert (peer.address, peer.listed) == (B, True)


def test_another_host_at_a_known_address_takes_its_place() -> None:
    d = directory()
    d.add(A, Source.STATIC, 0.0)
    accept(d, hello("old"), A)
    displaced = d.displaced(hello("new"), A)
    assert displaced is not None
    assert displaced.host_id == "old"
    peer, answer = accept(d, hello("new"), A)
    assert (answer, peer.host_id, peer.listed) == (Answer.NEW, "new", True)
    assert d.by_host("old") is None
    assert len(d) == 1


def test_the_own_name_is_nobody_elses() -> None:
    d = directory()
    with pytest.raises(Conflict, match=r"own.*another host\.host_id"):
        d.check_claim(hello("me", 2), A)
    assert d.check_claim(hello("me", 1), A) is None
    d.is_self(d.add(A, Source.STATIC, 0.0))
    assert len(d) == 0
    d.add(A, Source.STATIC, 1.0)
    assert d.due(1e9)[0] == []


def test_a_name_that_the_configuration_does_not_expect_is_refused() -> None:
    d = directory()
    d.add(A, Source.STATIC, 0.0, expected="right")
    with pytest.raises(Conflict, match=r"wrong.*right"):
        d.check_claim(hello("wrong"), A)


def test_a_peer_no_longer_listed_goes_unless_it_is_in_use() -> None:
    d = directory()
    d.add(A, Source.STATIC, 0.0)
    d.add(A, Source.DNS, 0.0)
    peer, _ = accept(d, hello("a"), A)
    assert d.drop_source(A, Source.STATIC) is None
    d.use(peer, True, 1.0)
    assert d.drop_source(A, Source.DNS) is None
    assert peer.sources == {Source.LEARNED}
    used, _ = accept(d, hello("b"), B)
    d.add(B, Source.STATIC, 0.0)
    used.sources.discard(Source.LEARNED)
    assert d.drop_source(B, Source.STATIC) is used
    assert d.by_host("b") is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["hello", "fail", "add", "drop", "use", "idle"]),
            st.sampled_from(["a", "b", "c", "me"]),
            st.integers(1, 3),
            st.sampled_from([A, B, "h:1"]),
        ),
        max_size=40,
    )
)
def test_whatever_happens_names_and_peers_stay_in_step(steps: list[tuple[str, str, int, str]]) -> None:
    d = directory()
    now = 0.0
    for step, host_id, epoch, address in steps:
        now += 10.0
        at = d.by_address(address)
        if step == "hello":
            card = hello(host_id, epoch)
            try:
                if d.check_claim(card, address) is None and host_id != "me":
                    accept(d, card, address, now)
            except Conflict:
                pass
        elif step == "fail" and at is not None:
            d.failed(at, "x", now)
        elif step == "add":
            d.add(address, Source.STATIC, now)
        elif step == "drop":
            d.drop_source(address, Source.STATIC)
        elif step == "use" and at is not None:
            d.use(at, epoch % 2 == 0, now)
        elif step == "idle":
            for peer in d.idle(now + epoch * 500):
                d.remove(peer)
        peers = list(d)
        assert len({id(peer) for peer in peers}) == len(peers) == len(d)
        for peer in peers:
            assert peer.sources
            if peer.host_id is not None:
                assert d.by_host(peer.host_id) is peer
                assert peer.hello is not None
            assert d.by_address(peer.address) is peer
        due, later = d.due(now)
        assert set(map(id, due)) <= set(map(id, peers))
        assert len(due) == len(set(map(id, due)))
        for peer in due:  # as whoever asks does
            d.failed(peer, "no answer", now)
        assert later is None or later > now


def test_a_peer_that_is_asked_already_is_not_due() -> None:
    d = directory()
    peer = d.add(A, Source.STATIC, 0.0)
    peer.asking = True
    assert d.due(1.0) == ([], None)
    peer.asking = False
    d.failed(peer, "x", 1.0)
    assert d.due(100.0) == ([peer], None)


def test_a_peer_taken_off_the_list_is_asked_no_more() -> None:
    d = directory()
    d.add(A, Source.STATIC, 0.0)
    d.drop_source(A, Source.STATIC)
    assert d.due(1e9) == ([], None)


def test_a_peer_forgotten_while_it_is_asked_stays_forgotten() -> None:
    d = directory()
    peer = d.add(A, Source.STATIC, 0.0)
    d.drop_source(A, Source.STATIC)
    d.failed(peer, "no answer", 1.0)
    assert d.due(1e9) == ([], None)
    accept(d, hello("a"), A)
    other = d.add(B, Source.STATIC, 0.0)
    accept(d, hello("a"), B)  # the same host: one of the two entries is left
    d.failed(other, "no answer", 1.0)
    assert len(d.due(1e9)[0]) == 1
