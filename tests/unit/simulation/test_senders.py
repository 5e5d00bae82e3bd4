# SPDX-License-Identifier: Apache-2.0
"""The senders that are compared."""

import pytest

from dqplbd.config import parse_config
from dqplbd.profiles.bdp import ProfilePolicy
from dqplbd.simulation.senders import CLASSES, DEFAULT_SENDERS, NO_LIMIT, Sender, make_sender
from dqplbd.topology.location import PathClass

KIB, MIB, GBIT = 2**10, 2**20, 10**9
CONFIG = parse_config("")
POLICY = ProfilePolicy.from_config(CONFIG.profiles, CONFIG.transport)
RTTS = dict(zip(CLASSES, (8000, 56_000, 120_000, 240_000), strict=True))


def make(name: str) -> Sender:
    return make_sender(name, POLICY, RTTS, 400 * GBIT, 4096, 82, 1, 256)


@pytest.mark.parametrize("name", [*DEFAULT_SENDERS, "untuned", "static:65536,2,dqplb,4", "dqplb+delay"])
def test_each_has_a_profile_of_each_class(name: str) -> None:
    sender = make(name)
    assert sender.name == name
    assert list(sender.profiles) == list(CLASSES)
    assert sender.grants == ("grants" in name)
    for path_class, profile in sender.profiles.items():
        assert profile.adapt == ("delay" in name)
        assert profile.rtt_ns == RTTS[path_class]
        assert (profile.window_bytes == NO_LIMIT) == (not name.startswith("dqplb"))


def test_dqplb_has_the_numbers_of_the_rule() -> None:
    windows = [profile.window_bytes for profile in make("dqplb").profiles.values()]
    assert windows == [MIB // 2, 27 * MIB // 8, 57 * MIB // 8, 113 * MIB // 8]


def test_static_has_those_of_the_reference() -> None:
    profiles = make("static").profiles
    assert [profiles[one].segment_bytes for one in CLASSES] == [512 * KIB, 512 * KIB, MIB, MIB]
    assert {(one.qps, one.outstanding) for one in profiles.values()} == {(16, 128)}
    given = make("static:65536,2,dqplb,4").profiles[PathClass.REGION]
    assert (given.segment_bytes, given.qps, given.outstanding) == (64 * KIB, 2, 4)
    untuned = make("untuned").profiles[PathClass.RACK]
    assert (untuned.segment_bytes, untuned.qps) == (MIB, 1)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fast", "sender 'fast'"),
        ("dqplb+speed", "sender 'dqplb\\+speed'"),
        ("dqplb+grants+grants", "sender"),
        ("static:1,2,3", "3 fields"),
        ("static:65536,2,spray,4", "mode 'spray'"),
        ("static:65536,x,dqplb,4", "no whole number"),
        ("static:65537,1,dqplb,4", "multiple of 128"),
        ("static:65536,0,dqplb,4", "1 to 128 queue pairs"),
    ],
)
def test_others_are_refused(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make(name)
