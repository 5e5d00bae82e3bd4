# SPDX-License-Identifier: Apache-2.0
"""The senders that are compared, each as the profiles of its path classes.  Pure.

All run through the same core over the same protocol; only the numbers differ:

``unlimited``
    Zero copy as a NIC does it on its own: whole messages (in pieces of 16 MiB, the largest a segment may be) on one
    queue pair, nothing bounds what is in flight.
``static:SEGMENT,QPS,MODE,OUTSTANDING``
    Fixed numbers for all classes, in the notation of the collective library that DQPLB comes from; ``MODE`` is
    ``dqplb`` (each segment is notified; the only sound one, and what the core does).  ``static`` alone has the defaults
    of that library: 524288,16,dqplb,128 within a zone, and segments of 1048576 beyond.  ``untuned`` is one queue pair
    and segments of 1 MiB: 1048576,1,dqplb,128.
``dqplb``
    The profile rule for each class, windows fixed.
``dqplb+grants``
    And receivers grant what each sender may have in flight.
``dqplb+grants+delay``
    And windows shrink when the delay grows.  This is what the daemon does by default.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dqplbd.profiles.bdp import PathInputs, ProfilePolicy, compute_profile
from dqplbd.topology.location import PathClass

__all__ = ["CLASSES", "DEFAULT_SENDERS", "NO_LIMIT", "Sender", "SenderProfile", "make_sender"]

NO_LIMIT: Final = 2**64 - 1
CLASSES: Final = (PathClass.RACK, PathClass.ZONE, PathClass.BUILDING, PathClass.REGION)
DEFAULT_SENDERS: Final = ("unlimited", "static", "dqplb", "dqplb+grants", "dqplb+grants+delay")
_WHOLE: Final = 16 * 2**20
_REFERENCE_NEAR: Final = "524288,16,dqplb,128"
_REFERENCE_FAR: Final = "1048576,16,dqplb,128"
_UNTUNED: Final = "1048576,1,dqplb,128"


@dataclass(frozen=True, slots=True)
class SenderProfile:
    """The numbers of one path class.

    :ivar window_bytes: :data:`NO_LIMIT` for none.
    :ivar outstanding: segments in flight on one queue pair.
    """

    window_bytes: int
    floor_bytes: int
    rtt_ns: int
    rate_bps: int
    segment_bytes: int
    qps: int
    outstanding: int
    adapt: bool


@dataclass(frozen=True, slots=True)
class Sender:
    """One way to send.

    :ivar name: as it was asked for.
    :ivar profiles: for each of :data:`CLASSES`.
    :ivar grants: whether receivers grant.
    """

    name: str
    profiles: Mapping[PathClass, SenderProfile]
    grants: bool


def _static(text: str) -> tuple[int, int, int]:
    """Segment, queue pairs, outstanding of ``SEGMENT,QPS,MODE,OUTSTANDING``."""
    fields = [field.strip() for field in text.split(",")]
    expected = "SEGMENT,QPS,dqplb,OUTSTANDING such as 524288,16,dqplb,128"
    if len(fields) != 4:
        raise ValueError(f"{text!r} has {len(fields)} fields: expected {expected}")
    if fields[2] != "dqplb":
        raise ValueError(f"{text!r} has mode {fields[2]!r}: expected dqplb, the only one that is simulated")
    try:
        segment, qps, outstanding = int(fields[0]), int(fields[1]), int(fields[3])
    except ValueError:
        raise ValueError(f"{text!r} has a field that is no whole number: expected {expected}") from None
    if segment % 128 or not 128 <= segment <= _WHOLE or not 1 <= qps <= 128 or not 1 <= outstanding <= 4096:
        raise ValueError(
            f"{text!r}: expected a segment of 128 bytes to 16 MiB, a multiple of 128; 1 to 128 queue pairs; 1 to 4096 "
            "outstanding"
        )
    return segment, qps, outstanding


def _fixed(
    rtts: Mapping[PathClass, int], rate_bps: int, text: Mapping[PathClass, str]
) -> dict[PathClass, SenderProfile]:
    profiles = {}
    for path_class in CLASSES:
        segment, qps, outstanding = _static(text[path_class])
        profiles[path_class] = SenderProfile(
            NO_LIMIT, segment, rtts[path_class], rate_bps, segment, qps, outstanding, adapt=False
        )
    return profiles


def make_sender(
    name: str,
    policy: ProfilePolicy,
    rtts: Mapping[PathClass, int],
    rate_bps: int,
    mtu_bytes: int,
    header_bytes: int,
    peers: int,
    queue_depth: int,
    host_ns: int = 0,
) -> Sender:
    """The sender of a name.

    :param policy: of the profile rule.
    :param rtts: base RTT by class: what a prober would measure on this fabric.
    :param rate_bps: link rate of the NICs.
    :param peers: that one GPU has in the job.
    :param queue_depth: segments that a queue pair can hold.
    :param host_ns: until a host reacts to a completion: part of the round trip of a segment.
    :raises ValueError: there is no such sender.
    """
    if name == "unlimited":
        text = f"{_WHOLE},1,dqplb,{queue_depth}"
        return Sender(name, _fixed(rtts, rate_bps, dict.fromkeys(CLASSES, text)), grants=False)
    if name == "static":
        far = dict.fromkeys((PathClass.BUILDING, PathClass.REGION), _REFERENCE_FAR)
        return Sender(name, _fixed(rtts, rate_bps, dict.fromkeys(CLASSES, _REFERENCE_NEAR) | far), grants=False)
    if name == "untuned":
        return Sender(name, _fixed(rtts, rate_bps, dict.fromkeys(CLASSES, _UNTUNED)), grants=False)
    if name.startswith("static:"):
        text = name.removeprefix("static:")
        return Sender(name, _fixed(rtts, rate_bps, dict.fromkeys(CLASSES, text)), grants=False)
    parts = name.split("+")
    if parts[0] != "dqplb" or len(set(parts)) != len(parts) or not set(parts[1:]) <= {"grants", "delay"}:
        raise ValueError(
            f"sender {name!r}: expected unlimited, static, static:SEGMENT,QPS,dqplb,OUTSTANDING, untuned, dqplb, "
            "dqplb+grants, dqplb+delay or dqplb+grants+delay"
        )
    profiles = {}
    for path_class in CLASSES:
        inputs = PathInputs(
            path_class,
            rtts[path_class],
            rate_bps,
            rate_bps,
            mtu_bytes,
            header_bytes,
            active_peers=max(peers, 1),
            queue_depth=queue_depth,
            host_delay_ns=host_ns,
        )
        profile = compute_profile(inputs, policy)
        profiles[path_class] = SenderProfile(
            profile.window_bytes,
            profile.min_window_bytes,
            profile.rtt_ns,
            profile.rate_bps,
            profile.segment_bytes,
            profile.qps,
            profile.outstanding_per_qp,
            adapt=profile.adapt and "delay" in parts,
        )
    return Sender(name, profiles, grants="grants" in parts)
