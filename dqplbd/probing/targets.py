# SPDX-License-Identifier: Apache-2.0
"""Whom to probe, and how often.  Pure.

All pairs of 100,000 hosts cannot be probed and need not be: paths to one place are alike, so places are probed, not
hosts.  The own rack is probed whole; of every other place a few hosts stand for it.  Which ones depends on who asks,
by rendezvous hashing of (asking host, place, candidate): each host picks others, so that together they cover the place;
the choice needs no agreement, and a host that comes or goes changes no other pick.  Hosts that are in use are always
probed.

The host's probes a second are bounded: with too many targets each is probed less often, but never not at all.

Units: nanoseconds, seconds.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from heapq import nlargest
from typing import TYPE_CHECKING, Final, NamedTuple

from dqplbd.topology.location import Location, PathClass, class_from_labels

if TYPE_CHECKING:
    from dqplbd.config import ProbingConfig

__all__ = ["PRESSURE_SHARES", "Target", "TargetPolicy", "choose_targets", "probe_budget"]

# Share of the configured probe rate at each level of pressure on this host's CPU or memory.  Never nothing: a host that
# stops probing under load goes blind just when there is something to see.
PRESSURE_SHARES: Final = (1.0, 0.5, 0.25, 0.1)


class Target(NamedTuple):
    """A host to probe.

    :ivar host_id: whom.
    :ivar labels_class: its class by labels.
    :ivar interval_ns: time between two probes of one path to it, > 0.
    :ivar phase_ns: time to its first probe, 0 to ``interval_ns``, so that targets do not beat together.
    """

    host_id: str
    labels_class: PathClass
    interval_ns: int
    phase_ns: int


@dataclass(frozen=True, slots=True)
class TargetPolicy:
    """The configuration of target choice; fields are those of the configuration section ``probing``."""

    interval_s: float = 1.0
    jitter: float = 0.2
    min_probes_per_s: float = 1.0
    max_probes_per_s: float = 100.0
    rack_hosts: int = 64
    hosts_per_rack: int = 2
    hosts_per_zone: int = 4
    hosts_per_building: int = 8
    unlabelled_hosts: int = 256

    @classmethod
    def from_config(cls, config: "ProbingConfig") -> "TargetPolicy":
        """The policy that a checked configuration describes."""
        return cls(
            config.interval_s,
            config.jitter,
            config.min_probes_per_s,
            config.max_probes_per_s,
            config.rack_hosts,
            config.hosts_per_rack,
            config.hosts_per_zone,
            config.hosts_per_building,
            config.unlabelled_hosts,
        )


def _hash(*parts: str) -> int:
    """64 bits of the parts, the same on every host and in every run."""
    return int.from_bytes(blake2b("\0".join(parts).encode(), digest_size=8).digest(), "big")


def _unit(*parts: str) -> float:
    """A number in 0..1, 1 not included, that depends on the parts alone."""
    return (_hash(*parts) >> 11) / 2**53


def _place(own: Location, location: Location, policy: TargetPolicy) -> tuple[PathClass, tuple[str, ...], int]:
    """Class by labels of a peer, the place it can stand for, and how many hosts of that place are probed."""
    path_class = class_from_labels(own, location)
    region, building, zone, rack = (
        name or "" for name in (location.region, location.building, location.zone, location.rack)
    )
    if path_class is PathClass.RACK:
        return path_class, ("rack", region, building, zone, rack), policy.rack_hosts
    if path_class is PathClass.ZONE and rack:
        return path_class, ("zone", region, building, zone, rack), policy.hosts_per_rack
    if path_class is PathClass.BUILDING and zone:
        return path_class, ("building", region, building, zone), policy.hosts_per_zone
    if path_class is PathClass.REGION and building:
        return path_class, ("region", region, building), policy.hosts_per_building
    if path_class is PathClass.UNKNOWN and region and own.region and region != own.region:
        return path_class, ("far", region), policy.hosts_per_building
    # The name of the place that would make hosts alike is not known: each of them may be somewhere else.
    return path_class, ("unlabelled",), policy.unlabelled_hosts


def probe_budget(policy: TargetPolicy, pressure: int = 0) -> float:
    """Probes a second that this host may send, > 0.

    :param pressure: level of pressure, 0 (none) to 3; beyond that counts as 3, below 0 as 0.
    """
    share = PRESSURE_SHARES[min(max(pressure, 0), len(PRESSURE_SHARES) - 1)]
    return max(policy.max_probes_per_s * share, policy.min_probes_per_s)


def choose_targets(
    own_id: str,
    own_location: Location,
    peers: Mapping[str, Location] | Iterable[tuple[str, Location]],
    policy: TargetPolicy,
    *,
    in_use: Collection[str] = (),
    paths_per_host: int = 1,
    pressure: int = 0,
) -> list[Target]:
    """The hosts to probe from here, nearest class first, then by name.

    :param own_id: this host; it is never a target.
    :param own_location: where it is.
    :param peers: the other hosts and where they are.
    :param policy: what is configured.
    :param in_use: hosts that carry traffic; always among the targets if they are among the peers.
    :param paths_per_host: paths to each, >= 1, that share the budget.
    :param pressure: level of pressure on this host, see :func:`probe_budget`.
    """
    if paths_per_host < 1:
        raise ValueError(f"paths_per_host is {paths_per_host}; expected >= 1")
    candidates: dict[tuple[str, ...], list[tuple[str, PathClass]]] = {}
    limits: dict[tuple[str, ...], int] = {}
    chosen: dict[str, PathClass] = {}
    known: dict[Location, tuple[PathClass, tuple[str, ...], int]] = {}
    used = frozenset(in_use)
    for host_id, location in peers.items() if isinstance(peers, Mapping) else peers:
        if host_id == own_id:
            continue
        answer = known.get(location)
        if answer is None:
            answer = known[location] = _place(own_location, location, policy)
        path_class, place, limit = answer
        if host_id in used:
            chosen[host_id] = path_class
        candidates.setdefault(place, []).append((host_id, path_class))
        limits[place] = limit
    for place, hosts in candidates.items():
        limit = limits[place]
        if len(hosts) > limit:
            hosts = nlargest(limit, hosts, key=lambda host: (_hash(own_id, *place, host[0]), host[0]))
        chosen.update(hosts)
    if not chosen:
        return []

    # Each target's interval is its own by up to the jitter, so that neither targets nor hosts fall into step.
    stretch = {host_id: 1 + policy.jitter * (2 * _unit("interval", own_id, host_id) - 1) for host_id in chosen}
    rate = paths_per_host * sum(1 / (policy.interval_s * factor) for factor in stretch.values())
    slow_down = max(rate / probe_budget(policy, pressure), 1.0)
    targets = []
    for host_id, path_class in chosen.items():
        interval = max(-int(-policy.interval_s * stretch[host_id] * slow_down * 1e9 // 1), 1)
        targets.append(Target(host_id, path_class, interval, int(interval * _unit("phase", own_id, host_id))))
    targets.sort(key=lambda target: (target.labels_class.distance, target.host_id))
    return targets
