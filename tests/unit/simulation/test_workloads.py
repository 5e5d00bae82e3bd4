# SPDX-License-Identifier: Apache-2.0
"""Schedules: everybody ends with what the collective promises, and nothing is sent before it is there."""

from collections import Counter

import pytest

from dqplbd.simulation.workloads import (
    NO_MESSAGE,
    Message,
    Schedule,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_skewed,
    incast,
    parse_trace,
    permutation,
    reduce_scatter,
    shuffled,
)

KIB, MIB = 2**10, 2**20


def sent(schedule: Schedule) -> Counter[int]:
    sums: Counter[int] = Counter()
    for message in schedule.messages:
        sums[message.sender] += message.size_bytes
    return sums


def received(schedule: Schedule) -> Counter[int]:
    sums: Counter[int] = Counter()
    for message in schedule.messages:
        sums[message.receiver] += message.size_bytes
    return sums


def check_order(schedule: Schedule) -> None:
    for i, message in enumerate(schedule.messages):
        assert message.sender != message.receiver
        if message.after != NO_MESSAGE:
            assert message.after < i
            assert schedule.messages[message.after].receiver == message.sender


@pytest.mark.parametrize("ranks", [2, 3, 8, 33])
def test_all_to_all_sends_each_part_once(ranks: int) -> None:
    size = 1_000_003
    schedule = all_to_all(ranks, size)
    assert len({(one.sender, one.receiver) for one in schedule.messages}) == ranks * (ranks - 1)
    check_order(schedule)
    for rank in range(ranks):
        own = size * (rank + 1) // ranks - size * rank // ranks
        assert sent(schedule)[rank] == size - own
    assert schedule.bus_factor == (ranks - 1) / ranks


def test_the_skewed_one_has_one_hot_receiver() -> None:
    schedule = all_to_all_skewed(64, 64 * MIB, 8, 0.5, seed=1)
    got = received(schedule)
    mean = 64 * MIB
    # The hot one does not send to itself.
    assert got[32] == pytest.approx(8 * mean * 63 / 64, rel=0.001)
    others = [got[rank] for rank in range(64) if rank != 32]
    assert max(others) < 2 * mean
    assert all(total <= 64 * MIB for total in sent(schedule).values())
    assert all(one.size_bytes % 128 == 0 for one in schedule.messages)
    assert schedule == all_to_all_skewed(64, 64 * MIB, 8, 0.5, seed=1)
    assert schedule != all_to_all_skewed(64, 64 * MIB, 8, 0.5, seed=2)
    even = all_to_all_skewed(64, 64 * MIB, 1, 0, seed=1)
    assert max(received(even).values()) - min(received(even).values()) < 128 * 64


@pytest.mark.parametrize(("ranks", "channels"), [(2, 1), (5, 1), (8, 3)])
def test_a_ring_hands_every_part_round(ranks: int, channels: int) -> None:
    size = 100_003
    schedule = all_gather(ranks, size, channels=channels)
    check_order(schedule)
    assert len(schedule.messages) == ranks * (ranks - 1) * channels
    parts = [size * (rank + 1) // ranks - size * rank // ranks for rank in range(ranks)]
    for rank in range(ranks):
        assert received(schedule)[rank] == size - parts[rank]
    # A part stays the same size on its way.
    for message in schedule.messages:
        if message.after != NO_MESSAGE:
            assert schedule.messages[message.after].size_bytes == message.size_bytes
    assert sent(reduce_scatter(ranks, size, channels=channels)).total() == sent(schedule).total()
    twice = all_reduce(ranks, size, channels=channels)
    check_order(twice)
    assert len(twice.messages) == 2 * len(schedule.messages)
    assert twice.bus_factor == 2 * schedule.bus_factor


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_the_recursive_ones_take_few_steps(ranks: int) -> None:
    size = 64 * MIB
    steps = ranks.bit_length() - 1
    gather, scatter, both = (make(ranks, size, "recursive") for make in (all_gather, reduce_scatter, all_reduce))
    for schedule, times in ((gather, 1), (scatter, 1), (both, 2)):
        check_order(schedule)
        assert len(schedule.messages) == ranks * steps * times
        assert set(received(schedule).values()) == {times * size * (ranks - 1) // ranks}
    assert gather.messages[0].size_bytes == size // ranks
    assert scatter.messages[0].size_bytes == size // 2
    assert gather.messages[-1].size_bytes == size // 2


def test_what_each_rank_has_grows_as_it_should() -> None:
    """Run the all-gathers on sets: who sends a part has it, and all have all in the end."""
    for schedule, per_step in ((all_gather(8, 8 * KIB), 1), (all_gather(8, 8 * KIB, "recursive"), 0)):
        have = [{rank} for rank in range(8)]
        steps: dict[int, list[Message]] = {}
        for i, message in enumerate(schedule.messages):
            steps.setdefault(i // 8, []).append(message)
        for step, messages in steps.items():
            moved = [
                (one.receiver, {(one.sender - step) % 8} if per_step else set(have[one.sender])) for one in messages
            ]
            for message, (_, parts) in zip(messages, moved, strict=True):
                assert parts <= have[message.sender]
                assert message.size_bytes == KIB * len(parts)
            for receiver, parts in moved:
                have[receiver] |= parts
        assert have == [set(range(8))] * 8


def test_shuffling_moves_ranks_and_nothing_else() -> None:
    packed = all_gather(16, 16 * KIB)
    moved = shuffled(packed, 16, seed=1)
    assert moved == shuffled(packed, 16, seed=1)
    assert moved != shuffled(packed, 16, seed=2)
    check_order(moved)
    place = {old.sender: new.sender for old, new in zip(packed.messages, moved.messages, strict=True)}
    assert sorted(place.values()) == list(range(16))
    for old, new in zip(packed.messages, moved.messages, strict=True):
        assert new == old._replace(sender=place[old.sender], receiver=place[old.receiver])


def test_incast_and_permutation() -> None:
    assert received(incast(32, MIB)) == {0: 31 * MIB}
    few = incast(32, MIB, senders=4, receiver=5)
    assert received(few) == {5: 4 * MIB}
    assert len(sent(few)) == 4
    cycle = permutation(17, MIB, seed=3)
    assert sent(cycle) == received(cycle) == Counter(dict.fromkeys(range(17), MIB))
    assert cycle == permutation(17, MIB, seed=3)
    assert cycle != permutation(17, MIB, seed=4)


def test_a_trace_is_what_its_lines_say() -> None:
    text = "start_ns,from,to,bytes,after\n0,0,1,100\n\n50, 2, 3, 200,   # comment\n0,1,2,300,0\n"
    assert parse_trace(text, 4).messages == [
        Message(0, 1, 100, NO_MESSAGE, 0),
        Message(2, 3, 200, NO_MESSAGE, 50),
        Message(1, 2, 300, 0, 0),
    ]
    assert parse_trace("", 4).step_bytes == (0, 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0,1,2", "line 1 has 3 fields"),
        ("0,1,2,3\n0,a,2,3", "line 2 is '0,a,2,3'"),
        ("0,1,1,3", "from rank 1 to 1"),
        ("0,1,4,3", "from rank 1 to 4"),
        ("-1,1,2,3", "starts at -1"),
        ("0,1,2,3\n0,3,2,3,0", "line 2 waits for message 0"),
        ("0,1,2,3,0", "waits for message 0"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_trace(text, 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: all_to_all(1, MIB),
        lambda: all_to_all_skewed(8, MIB, 8, 0, 1),
        lambda: all_to_all_skewed(8, MIB, 2, -1, 1),
        lambda: all_gather(6, MIB, "recursive"),
        lambda: all_gather(8, MIB, "recursive", 2),
        lambda: all_gather(8, MIB, "tree"),
        lambda: all_reduce(8, MIB, channels=0),
        lambda: incast(8, MIB, 8),
        lambda: incast(8, MIB, receiver=8),
        lambda: permutation(1, MIB, 1),
    ],
)
def test_parameters_out_of_range_are_refused(make: "object") -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=r"expected|power of two|has one"):
        make()
