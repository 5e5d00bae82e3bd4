# SPDX-License-Identifier: Apache-2.0
"""Which GID of an RDMA port to send from: scored by what it is, never taken by its index.  Pure.

On RoCE a port has one GID for each address of its network interfaces (its own, those of VLANs on it), and each of them
once for RoCE v1 and once for v2; the order changes with every link flap.  The wrong one connects to nobody ("transport
retry counter exceeded", "status 12"), or only within the rack.  So each is scored, by these rules, the first that
differs decides:

1. its interface is up;
2. RoCE v2 before v1: v1 is not routed, and an end of v1 does not reach one of v2;
3. it lies in a subnet that the configuration prefers (``rdma.gid_subnets``);
4. routable before link-local: link-local ends at the first router;
5. the kind of address that the configuration prefers (``rdma.gid_family``).

The GID in use is kept while it is as good as any by rules 1 to 4, so that a change of the table does not end
connections for nothing.

On InfiniBand there are no such rules: the first GID of the port is its own, and the others are aliases.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from dqplbd.config.types import gid_text

__all__ = ["Candidate", "Choice", "Gid", "GidKind", "GidPolicy", "choose_gid", "gid_ip", "rank_gids", "score_gid"]

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class GidKind(StrEnum):
    """What a GID is for."""

    IB = "ib"
    ROCE_V1 = "roce_v1"
    ROCE_V2 = "roce_v2"


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of the GID table of a port.

    :ivar index: where it is in the table now.
    :ivar netdev: the interface that it belongs to; empty on InfiniBand, or when the interface is gone.
    :ivar netdev_up: whether that interface is up, its link included.
    """

    index: int
    address: ipaddress.IPv6Address
    kind: GidKind
    netdev: str = ""
    netdev_up: bool = False

    def __str__(self) -> str:
        return gid_text(self.address)


@dataclass(frozen=True, slots=True)
class GidPolicy:
    """What the configuration prefers.

    :ivar subnets: of addresses; an IPv4 subnet is of the GIDs made of IPv4 addresses.
    :ivar ipv6: prefer IPv6 addresses to IPv4.
    """

    subnets: tuple[Network, ...] = ()
    ipv6: bool = False

    @classmethod
    def of(cls, subnets: Iterable[str], family: str) -> "GidPolicy":
        """:param subnets: as texts.  :param family: ``ipv4`` or ``ipv6``.  :raises ValueError: no subnet."""
        return cls(tuple(ipaddress.ip_network(one) for one in subnets), family == "ipv6")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A GID with its score.

    :ivar score: larger is better; 0 when it cannot be used.
    :ivar reasons: what speaks for it or against it, for people.
    """

    gid: Gid
    score: int
    reasons: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """Whether it can be used at all."""
        return self.score > 0


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen.

    :ivar candidate: None when no GID can be used; ``why`` says why it is this one, or none.
    :ivar table: all candidates, the best first.
    """

    candidate: Candidate | None
    why: str
    table: tuple[Candidate, ...] = field(default=())

    @property
    def gid(self) -> Gid | None:
        """The GID itself."""
        return self.candidate.gid if self.candidate is not None else None


_UP: Final = 128
_ROCE_V2: Final = 64
_SUBNET: Final = 32
_ROUTABLE: Final = 16
_FAMILY: Final = 8
_USABLE: Final = 1
_MATTERS: Final = _ROUTABLE  # a difference of the score from here on is worth a change of the GID in use
_INDEX_MAX: Final = 255  # struct ibv_global_route has 8 bits for it
_FIRST: Final = 2  # the first GID of an InfiniBand port


def gid_ip(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The IP address that a GID of RoCE is made of."""
    return address.ipv4_mapped or address


def _score_ib(gid: Gid) -> Candidate:
    if gid.address.is_unspecified or not int(gid.address) & (2**64 - 1):
        return Candidate(gid, 0, ("empty",))
    if gid.index == 0:
        return Candidate(gid, _USABLE + _FIRST, ("the port's own",))
    return Candidate(gid, _USABLE, ("an alias of the port",))


def score_gid(gid: Gid, policy: GidPolicy) -> Candidate:
    """Score one GID by the rules of the module's text."""
    if gid.index > _INDEX_MAX:
        return Candidate(gid, 0, (f"index {gid.index} is beyond {_INDEX_MAX}, the last that queue pairs can name",))
    if gid.kind is GidKind.IB:
        return _score_ib(gid)
    address = gid_ip(gid.address)
    if address.is_unspecified or address.is_multicast or address.is_loopback:
        return Candidate(gid, 0, ("no address of one interface",))
    if not gid.netdev:
        return Candidate(gid, 0, ("its interface is gone",))
    score, reasons = _USABLE, []
    if gid.netdev_up:
        score += _UP
        reasons.append(f"{gid.netdev} is up")
    else:
        reasons.append(f"{gid.netdev} is down")
    if gid.kind is GidKind.ROCE_V2:
        score += _ROCE_V2
        reasons.append("RoCE v2")
    else:
        reasons.append("RoCE v1 is not routed")
    network = next((one for one in policy.subnets if one.version == address.version and address in one), None)
    if network is not None:
        score += _SUBNET
        reasons.append(f"in {network}")
    elif policy.subnets:
        reasons.append("in no preferred subnet")
    if address.is_link_local:
        reasons.append("link-local")
    else:
        score += _ROUTABLE
        reasons.append("routable")
    if (address.version == 6) == policy.ipv6:
        score += _FAMILY
    reasons.append("IPv6" if address.version == 6 else "IPv4")
    return Candidate(gid, score, tuple(reasons))


def rank_gids(gids: Iterable[Gid], policy: GidPolicy) -> list[Candidate]:
    """All GIDs with their scores, the best first; of equal ones that with the smaller index."""
    return sorted((score_gid(gid, policy) for gid in gids), key=lambda one: (-one.score, one.gid.index))


def choose_gid(
    gids: Sequence[Gid],
    policy: GidPolicy,
    *,
    current: ipaddress.IPv6Address | None = None,
    pinned: ipaddress.IPv6Address | None = None,
) -> Choice:
    """Choose the GID to send from.

    :param current: the one in use, which is kept unless it is gone or another one is better by more than its family.
    :param pinned: the one that the configuration names; no other is chosen.
    """
    table = tuple(rank_gids(gids, policy))
    usable = [one for one in table if one.usable]
    if pinned is not None:
        found = next((one for one in usable if one.gid.address == pinned), None)
        if found is not None:
            return Choice(found, "named by the configuration", table)
        return Choice(None, f"the port has no usable GID {gid_text(pinned)}, which the configuration names", table)
    if not usable:
        if not table:
            return Choice(None, "the port has no GID: give its network interface an address", table)
        why = "; ".join(f"{one.gid}: {', '.join(one.reasons)}" for one in table[:4])
        return Choice(None, f"none of the port's GIDs can be used ({why})", table)
    best = usable[0]
    kept = next((one for one in usable if one.gid.address == current), None)
    if kept is not None and best.score - kept.score < _MATTERS:
        return Choice(kept, ", ".join(kept.reasons), table)
    return Choice(best, ", ".join(best.reasons), table)
