# SPDX-License-Identifier: Apache-2.0
"""The class of a path, from labels and from its round trip time.  Pure.

Labels decide, RTT verifies; where there are no labels, RTT decides.  RTT here is the minimum of a measurement window,
never a mean: queues only ever add to it.

Two rules turn an RTT into a class.  *Thresholds* compares it with fixed bounds, by default the geometric means of the
RTTs that neighbouring classes have.  *Largest gap* looks at the RTTs of all paths of this host, cuts them where one is
at least ``min_gap_ratio`` times the one before, and names the clusters so that the ratios between them fit the ratios
between the classes' known RTTs best; so it also works where the whole fabric is faster or slower than assumed, but it
needs at least two clusters to see a ratio.

A class changes to a nearer one at once, since the window of a path that became shorter would be too large from then
on; to a farther one only after several windows in a row beyond the bound by a guard band, since a congested short path
looks like a long one and must not get a larger window for it.

Units: nanoseconds.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations, pairwise
from math import exp, log
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from dqplbd.topology.location import PathClass

if TYPE_CHECKING:
    from dqplbd.config import ClassificationConfig, ProfilesConfig

__all__ = [
    "RTT_CLASSES",
    "Classification",
    "ClassificationPolicy",
    "ClassifierState",
    "RttRule",
    "Source",
    "classify",
    "next_rtt_class",
    "rule_from_gaps",
    "rule_from_thresholds",
]

# The classes that an RTT can tell, nearest first.  The own host is known by its name.
RTT_CLASSES: Final = (PathClass.RACK, PathClass.ZONE, PathClass.BUILDING, PathClass.REGION)

# In the naming of clusters the ratios between them decide; where ratios alone are close (2.0 and 2.1), a naming that
# also fits the absolute RTTs within a factor of two is preferred.  Beyond that, absolute RTTs count for nothing.
_ABSOLUTE_WEIGHT: Final = 0.01
_ABSOLUTE_WIDTH: Final = log(2)


class Source(StrEnum):
    """What decided a class."""

    HOST = "host"  # both ends are this host
    OVERRIDE = "override"  # configuration
    LABELS = "labels"
    RTT = "rtt"
    NONE = "none"  # nothing is known


class RttRule(NamedTuple):
    """Bounds between classes.

    :ivar bounds_ns: never falling; an RTT up to and including the i-th bound, and no bound before, has the i-th class.
    :ivar classes: one more than bounds, nearest first.
    """

    bounds_ns: tuple[int, ...]
    classes: tuple[PathClass, ...]

    def class_of(self, rtt_ns: int) -> PathClass:
        """The class of an RTT."""
        return self.classes[bisect_left(self.bounds_ns, rtt_ns)]


def rule_from_thresholds(rack_ns: int, zone_ns: int, building_ns: int) -> RttRule:
    """The rule of fixed bounds.

    :raises ValueError: they do not rise, or one is not positive.
    """
    if not 0 < rack_ns < zone_ns < building_ns:
        raise ValueError(f"thresholds {rack_ns}, {zone_ns}, {building_ns} ns; expected 0 < rack < zone < building")
    return RttRule((rack_ns, zone_ns, building_ns), RTT_CLASSES)


def _clusters(rtts_ns: list[int], min_gap_ratio: float, min_size: int) -> list[tuple[int, int, float]]:
    """Sorted RTTs cut at the largest gaps: (smallest, largest, logarithm of the median) of each, nearest first."""
    gaps = sorted(
        ((b / a, i) for i, (a, b) in enumerate(pairwise(rtts_ns), 1) if b >= a * min_gap_ratio),
        key=lambda gap: (-gap[0], gap[1]),
    )
    cuts: list[int] = []
    for _, cut in gaps:
        if len(cuts) == len(RTT_CLASSES) - 1:
            break
        left = max((c for c in cuts if c < cut), default=0)
        right = min((c for c in cuts if c > cut), default=len(rtts_ns))
        if cut - left >= min_size and right - cut >= min_size:
            cuts.append(cut)
    edges = [0, *sorted(cuts), len(rtts_ns)]
    result = []
    for start, end in pairwise(edges):
        # The median stands for the cluster: one strange path does not move it.
        result.append((rtts_ns[start], rtts_ns[end - 1], log(rtts_ns[(start + end - 1) // 2])))
    return result


def rule_from_gaps(
    rtts_ns: Iterable[int], class_rtts_ns: Sequence[int], min_gap_ratio: float = 1.6, min_cluster_size: int = 1
) -> RttRule | None:
    """The rule of largest gaps.

    :param rtts_ns: RTT of every measured path of this host, each > 0; the own host left out.
    :param class_rtts_ns: RTTs that the four classes have somewhere, rising; only their ratios count.
    :param min_gap_ratio: ratio of neighbouring RTTs, > 1, from which on there is a gap.
    :param min_cluster_size: a cut that would leave fewer paths than this on a side is not made.
    :returns: the rule, or None when there are not two clusters: a single one has no ratio to name it by.
    :raises ValueError: an argument out of its range.
    """
    expected = list(class_rtts_ns)
    if len(expected) != len(RTT_CLASSES) or expected != sorted(set(expected)) or expected[0] <= 0:
        raise ValueError(f"class RTTs {expected}; expected {len(RTT_CLASSES)} rising positive numbers")
    if not min_gap_ratio > 1 or min_cluster_size < 1:
        raise ValueError(f"gap ratio {min_gap_ratio}, cluster size {min_cluster_size}; expected > 1 and >= 1")
    rtts = sorted(rtts_ns)
    if rtts and rtts[0] <= 0:
        raise ValueError(f"an RTT of {rtts[0]} ns; expected > 0")
    clusters = _clusters(rtts, min_gap_ratio, min_cluster_size) if len(rtts) > 1 else []
    if len(clusters) < 2:
        return None

    known = [log(rtt) for rtt in expected]
    best: tuple[float, tuple[int, ...], float] | None = None
    for names in combinations(range(len(RTT_CLASSES)), len(clusters)):
        shifts = [cluster[2] - known[name] for cluster, name in zip(clusters, names, strict=True)]
        scale = sum(shifts) / len(shifts)
        cost = sum((shift - scale) ** 2 for shift in shifts) / len(shifts) + _ABSOLUTE_WEIGHT * min(
            (scale / _ABSOLUTE_WIDTH) ** 2, 1.0
        )
        if best is None or cost < best[0]:
            best = (cost, names, scale)
    assert best is not None  # two to four clusters have at least one naming
    _, names, scale = best

    bounds: list[int] = []
    for outer in range(1, len(RTT_CLASSES)):
        nearer = [cluster[1] for cluster, name in zip(clusters, names, strict=True) if name < outer]
        farther = [cluster[0] for cluster, name in zip(clusters, names, strict=True) if name >= outer]
        if nearer and farther and {outer - 1, outer} <= set(names):
            bound = exp((log(nearer[-1]) + log(farther[0])) / 2)
        else:  # a class that this host has no path of: where it would be on this fabric
            bound = exp((known[outer - 1] + known[outer]) / 2 + scale)
        # No bound cuts through a cluster.  Bounds can meet: then the class between them has no room, and no path.
        whole = max([round(bound), *bounds, *nearer])
        bounds.append(min([whole, *(smallest - 1 for smallest in farther)]))
    return RttRule(tuple(bounds), RTT_CLASSES)


class ClassifierState:
    """Memory of one path, for hysteresis.

    :ivar rtt_class: class by RTT, ``unknown`` before the first window.
    :ivar windows_beyond: windows in a row that spoke for a farther class.
    :ivar candidate: the nearest class that those windows spoke for.
    """

    __slots__ = ("candidate", "rtt_class", "windows_beyond")

    def __init__(self) -> None:
        self.rtt_class = PathClass.UNKNOWN
        self.windows_beyond = 0
        self.candidate = PathClass.UNKNOWN


class Classification(NamedTuple):
    """The class of a path and what speaks for it.

    :ivar path_class: the class.
    :ivar source: what decided it.
    :ivar labels_class: class by labels alone; ``unknown`` when they say nothing.
    :ivar rtt_class: class by RTT alone, after hysteresis; ``unknown`` when it was not measured.
    :ivar mismatch: labels and RTT both say something, and not the same.
    """

    path_class: PathClass
    source: Source
    labels_class: PathClass
    rtt_class: PathClass
    mismatch: bool


@dataclass(frozen=True, slots=True)
class ClassificationPolicy:
    """The configuration of classification, prepared for many paths.

    :ivar method: what may decide.
    :ivar rule: how RTTs become classes; replaced by the caller when it is of largest gaps.
    :ivar guard_band: share, >= 0, by which a bound must be exceeded.
    :ivar windows_to_widen: windows in a row, >= 1.
    :ivar overrides: classes set by hand, by host.
    """

    method: Literal["labels_then_rtt", "labels", "rtt"]
    rule: RttRule
    guard_band: float
    windows_to_widen: int
    overrides: dict[str, PathClass]

    @classmethod
    def from_config(
        cls, config: "ClassificationConfig", profiles: "ProfilesConfig", rtts_ns: Iterable[int] = ()
    ) -> "ClassificationPolicy":
        """The policy that a checked configuration describes.

        :param profiles: for the RTTs that classes have.
        :param rtts_ns: RTTs of all measured paths; for the rule of largest gaps, which falls back to thresholds while
            they do not show two clusters.
        """
        rule = None
        if config.rule == "largest_gap":
            known = [profiles.class_rtt_ns.of(path_class) for path_class in RTT_CLASSES]
            if known == sorted(set(known)):
                rule = rule_from_gaps(rtts_ns, known, config.min_gap_ratio, config.min_cluster_size)
        if rule is None:
            bounds = config.thresholds
            rule = rule_from_thresholds(bounds.rack_ns, bounds.zone_ns, bounds.building_ns)
        return cls(config.method, rule, config.guard_band, config.windows_to_widen, dict(config.overrides))


def next_rtt_class(state: ClassifierState, rtt_ns: int, policy: ClassificationPolicy) -> PathClass:
    """Take in the minimum of one more measurement window, and give the class by RTT after it.

    :param state: of the path; changed.
    :param rtt_ns: > 0.  Windows with too few samples are not for here.
    """
    rule = policy.rule
    now = rule.class_of(rtt_ns)
    current = state.rtt_class
    if now is current:
        state.windows_beyond = 0
        return current
    if current is PathClass.UNKNOWN or now.distance < current.distance:
        state.rtt_class = now
        state.windows_beyond = 0
        return now
    bound = rule.bounds_ns[rule.classes.index(current)]
    if rtt_ns <= bound * (1 + policy.guard_band):
        state.windows_beyond = 0
        return current
    # Of what the windows of this run said, the nearest counts.
    if state.windows_beyond == 0 or now.distance < state.candidate.distance:
        state.candidate = now
    state.windows_beyond += 1
    if state.windows_beyond >= policy.windows_to_widen:
        state.rtt_class = state.candidate
        state.windows_beyond = 0
    return state.rtt_class


_LABELS_ONLY: Final = "labels"
_RTT_ONLY: Final = "rtt"


def _decide(method: str, labels_class: PathClass, rtt_class: PathClass) -> Classification:
    unknown = PathClass.UNKNOWN
    mismatch = labels_class is not unknown and rtt_class is not unknown and labels_class is not rtt_class
    if method != _RTT_ONLY and labels_class is not unknown:
        return Classification(labels_class, Source.LABELS, labels_class, rtt_class, mismatch)
    if method != _LABELS_ONLY and rtt_class is not unknown:
        return Classification(rtt_class, Source.RTT, labels_class, rtt_class, mismatch)
    return Classification(unknown, Source.NONE, labels_class, rtt_class, mismatch)


# Every answer that labels and RTT can give, made once: the answers of 100,000 paths then cost a look-up each.
_ANSWERS: Final = {
    method: {labels: {rtt: _decide(method, labels, rtt) for rtt in PathClass} for labels in PathClass}
    for method in ("labels_then_rtt", _LABELS_ONLY, _RTT_ONLY)
}


def classify(
    policy: ClassificationPolicy,
    state: ClassifierState,
    labels_class: PathClass,
    *,
    host_id: str = "",
    same_host: bool = False,
) -> Classification:
    """The class of a path.

    :param state: of the path, after :func:`next_rtt_class` for its newest window.
    :param labels_class: class by labels, of :func:`dqplbd.topology.location.class_from_labels`.
    :param host_id: the peer, for overrides.
    :param same_host: whether both ends are this host; then the class is ``host``, whatever else is said.
    """
    if same_host:
        return Classification(PathClass.HOST, Source.HOST, labels_class, state.rtt_class, False)
    answer = _ANSWERS[policy.method][labels_class][state.rtt_class]
    if policy.overrides:
        override = policy.overrides.get(host_id)
        if override is not None:
            return answer._replace(path_class=override, source=Source.OVERRIDE)
    return answer
