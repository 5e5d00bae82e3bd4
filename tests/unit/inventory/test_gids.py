# SPDX-License-Identifier: Apache-2.0
"""The choice of a GID."""

import ipaddress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqplbd.inventory.gids import Gid, GidKind, GidPolicy, choose_gid, gid_ip, rank_gids, score_gid

POLICY = GidPolicy()
V1, V2, IB = GidKind.ROCE_V1, GidKind.ROCE_V2, GidKind.IB


def gid(text: str, kind: GidKind = V2, index: int = 0, netdev: str = "eth0", up: bool = True) -> Gid:
    return Gid(index, ipaddress.IPv6Address(text), kind, netdev, up)


MLX5 = [  # what a port with one IPv4 address has
    gid("fe80::e42:a1ff:fe00:1", V1, 0),
    gid("fe80::e42:a1ff:fe00:1", V2, 1),
    gid("::ffff:10.1.2.3", V1, 2),
    gid("::ffff:10.1.2.3", V2, 3),
]


def test_the_routable_one_of_version_2_is_taken_wherever_it_is() -> None:
    choice = choose_gid(MLX5, POLICY)
    assert choice.gid == MLX5[3]
    assert choice.why == "eth0 is up, RoCE v2, routable, IPv4"
    for i, one in enumerate(reversed(MLX5)):
        moved = [replace(other, index=i) if other is one else other for other in reversed(MLX5)]
        assert str(choose_gid(moved, POLICY).gid) == "::ffff:10.1.2.3"


ORDER = [  # each is better than all after it
    gid("::ffff:10.1.2.3"),
    gid("2001:db8::1"),
    gid("fe80::1"),
    gid("::ffff:10.1.2.3", V1),
    gid("fe80::1", V1),
    gid("::ffff:10.1.2.3", up=False),
    gid("fe80::1", V1, up=False),
]


def test_the_rules_in_their_order() -> None:
    assert [one.gid for one in rank_gids(reversed(ORDER), POLICY)] == ORDER
    assert all(score_gid(one, POLICY).usable for one in ORDER)


def test_preferences_of_the_configuration() -> None:
    table = [gid("::ffff:192.168.0.9"), gid("::ffff:10.1.2.3", index=1), gid("2001:db8::1", index=2)]
    assert choose_gid(table, POLICY).gid == table[0]
    assert choose_gid(table, GidPolicy.of(["10.0.0.0/8"], "ipv4")).gid == table[1]
    assert choose_gid(table, GidPolicy.of(["2001:db8::/32"], "ipv4")).gid == table[2]
    assert choose_gid(table, GidPolicy.of([], "ipv6")).gid == table[2]
    chosen = choose_gid(table, GidPolicy.of(["172.16.0.0/12"], "ipv4"))
    assert chosen.gid == table[0]
    assert "in no preferred subnet" in chosen.why


@pytest.mark.parametrize(
    "one",
    [gid("::"), gid("ff02::1"), gid("::1"), gid("::ffff:127.0.0.1"), gid("::ffff:10.1.2.3", netdev=""), gid("::", IB)],
)
def test_some_are_of_no_use(one: Gid) -> None:
    choice = choose_gid([one], POLICY)
    assert choice.gid is None
    assert choice.table[0].reasons[0] in choice.why


def test_a_port_without_any() -> None:
    assert "address" in choose_gid([], POLICY).why


def test_the_first_of_an_infiniband_port() -> None:
    table = [gid("fe80::2:c903:ef:1", IB, 1, ""), gid("fe80::2:c903:ef:2", IB, 0, ""), gid("fe80::", IB, 2, "")]
    choice = choose_gid(table, POLICY)
    assert choice.gid == table[1]
    assert not choice.table[-1].usable


def test_what_the_configuration_names_is_taken_or_none() -> None:
    pinned = ipaddress.IPv6Address("fe80::e42:a1ff:fe00:1")
    assert choose_gid(MLX5, POLICY, pinned=pinned).gid == MLX5[1]
    choice = choose_gid(MLX5, POLICY, pinned=ipaddress.IPv6Address("::ffff:10.9.9.9"))
    assert choice.gid is None
    assert "::ffff:10.9.9.9" in choice.why


def test_the_one_in_use_stays_until_another_is_clearly_better() -> None:
    v6, v4, local = gid("2001:db8::1"), gid("::ffff:10.1.2.3", index=1), gid("fe80::1", index=2)
    assert choose_gid([v6, v4], POLICY).gid == v4
    assert choose_gid([v6, v4], POLICY, current=v6.address).gid == v6  # only its family is worse
    assert choose_gid([local, v4], POLICY, current=local.address).gid == v4
    assert choose_gid([replace(v6, netdev_up=False), v4], POLICY, current=v6.address).gid == v4
    assert choose_gid([v4], POLICY, current=v6.address).gid == v4  # it is gone


def test_an_index_that_queue_pairs_cannot_name_is_not_used() -> None:
    far, near = gid("::ffff:10.1.2.3", index=256), gid("fe80::1", index=255)
    choice = choose_gid([far, near], GidPolicy(), current=far.address)
    assert choice.gid == near
    assert "256 is beyond 255" in choice.table[1].reasons[0]
    assert "10.1.2.3" in choose_gid([far], GidPolicy(), pinned=far.address).why
    assert "beyond 255" in choose_gid([far], GidPolicy()).why


ADDRESSES = st.sampled_from(
    ["::", "fe80::1", "fe80::2", "2001:db8::1", "::ffff:10.1.2.3", "::ffff:10.1.2.4", "::ffff:169.254.1.1", "ff02::1"]
)
GIDS = st.builds(
    lambda address, kind, netdev, up: Gid(0, ipaddress.IPv6Address(address), kind, netdev, up),
    ADDRESSES,
    st.sampled_from([V1, V2]),
    st.sampled_from(["", "eth0", "eth0.5"]),
    st.booleans(),
)
TABLES = st.lists(GIDS, max_size=8).map(lambda table: [replace(one, index=i) for i, one in enumerate(table)])
POLICIES = st.builds(
    lambda subnets, family: GidPolicy.of(subnets, family),
    st.lists(st.sampled_from(["10.0.0.0/8", "10.1.2.3/32", "2001:db8::/32"]), max_size=2),
    st.sampled_from(["ipv4", "ipv6"]),
)


@given(TABLES, POLICIES)
def test_the_best_is_chosen(table: list[Gid], policy: GidPolicy) -> None:
    choice = choose_gid(table, policy)
    scores = [score_gid(one, policy) for one in table]
    assert (choice.gid is None) == (not any(one.usable for one in scores))
    assert sorted(one.gid.index for one in choice.table) == list(range(len(table)))
    if choice.candidate is not None:
        assert choice.candidate.score == max(one.score for one in scores)


@given(TABLES, POLICIES, st.randoms())
def test_the_order_of_the_table_does_not_matter(table: list[Gid], policy: GidPolicy, random: object) -> None:
    shuffled = list(table)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose_gid(shuffled, policy).gid == choose_gid(table, policy).gid


@given(TABLES, TABLES, POLICIES)
def test_a_choice_is_stable(before: list[Gid], after: list[Gid], policy: GidPolicy) -> None:
    first = choose_gid(before, policy).gid
    current = first.address if first is not None else None
    again = choose_gid(after, policy, current=current)
    # Asked once more about the same table, nothing changes: there is no to and fro.
    settled = again.gid.address if again.gid is not None else None
    assert choose_gid(after, policy, current=settled).gid == again.gid
    if first is not None and first in after:
        best = choose_gid(after, policy).candidate
        assert best is not None
        assert again.gid is not None
        assert again.gid.address == first.address or best.score > score_gid(first, policy).score


@given(ADDRESSES)
def test_the_ip_address_of_a_gid(text: str) -> None:
    address = ipaddress.IPv6Address(text)
    ip = gid_ip(address)
    assert ip == address or (ip.version == 4 and str(ip) == text.removeprefix("::ffff:"))
