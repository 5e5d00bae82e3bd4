# SPDX-License-Identifier: Apache-2.0
"""Host lists in brackets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqplbd.topology.hostlist import HostlistError, expand_hostlist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("  ", []),
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[1-3,07-09]", ["n1", "n2", "n3", "n07", "n08", "n09"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]n[01-02]x", ["r1n01x", "r1n02x", "r2n01x", "r2n02x"]),
        ("a, n[1,3] ,b", ["a", "n1", "n3", "b"]),
        ("n[5-5]", ["n5"]),
    ],
)
def test_lists(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "n[",
        "n]",
        "n[1",
        "n[1-]",
        "n[a]",
        "n[]",
        "n[2-1]",
        "n[[1]]",
        "a,,b",
        ",",
        "a b",
        "n[1-3",
        "n1-3]",
        "n[1][",
        "n[٣]",
    ],
)
def test_what_is_refused(text: str) -> None:
    with pytest.raises(HostlistError):
        expand_hostlist(text)


@pytest.mark.parametrize("text", ["n[1-999999999999]", "a[1-1000]b[1-1000]c[1-1000]", "n[1-150000],m[1-150000]"])
def test_a_list_that_names_too_many_is_refused_before_it_is_made(text: str) -> None:
    with pytest.raises(HostlistError, match="more than"):
        expand_hostlist(text)


@given(st.text("n[]-,0123456789x ", max_size=40))
def test_any_text_gives_hosts_or_an_error(text: str) -> None:
    try:
        hosts = expand_hostlist(text, 1000)
    except HostlistError:
        return
    assert len(hosts) <= 1000
    assert all(host and not set(host) & set("[], ") for host in hosts)


@given(st.integers(0, 500), st.integers(0, 100), st.integers(1, 6))
def test_a_range_is_its_numbers(first: int, count: int, width: int) -> None:
    text = f"n[{first:0{width}}-{first + count:0{width}}]"
    assert expand_hostlist(text) == [f"n{number:0{width}}" for number in range(first, first + count + 1)]
