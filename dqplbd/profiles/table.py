# SPDX-License-Identifier: Apache-2.0
"""The profiles in force, and which changes are worth pushing to running virtual connections.

Measurements wander; a connection that is reshaped at every wobble never settles.  So a new profile replaces the one in
force only when something moved for good: the class, the number of queue pairs, what is pinned, the first measurement,
or the rate, RTT or window by at least ``push_change`` (10 % by default) against the profile in force, so that a slow
drift adds up and is pushed in the end.  A change of policy is always pushed where it makes any difference.

Not thread safe; no I/O.
"""

from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from dqplbd.profiles.bdp import (
    Explanation,
    Limiter,
    PathInputs,
    Profile,
    ProfilePolicy,
    compute_profile,
    explain_profile,
)

__all__ = ["Change", "PathId", "ProfileTable"]

# Limits that hold at once, however little a number moves: what a peer agreed to, a queue pair can hold, the user set.
_HARD = frozenset({Limiter.NEGOTIATED, Limiter.DEPTH, Limiter.PINNED})

PathId = TypeVar("PathId", bound=int | str | tuple[object, ...])


class Change(NamedTuple, Generic[PathId]):
    """A profile to push to the virtual connections of a path.

    :ivar path_id: the path.
    :ivar old: what was in force; None for a new path.
    :ivar new: what is in force now.
    """

    path_id: PathId
    old: Profile | None
    new: Profile


class _Entry:
    """A path: what is known of it, and the profile in force."""

    __slots__ = ("inputs", "profile")

    def __init__(self, inputs: PathInputs, profile: Profile) -> None:
        self.inputs = inputs
        self.profile = profile


def _moved(old: float, new: float, share: float) -> bool:
    return abs(new - old) > share * old or (new != old and abs(new - old) >= share * old)


class ProfileTable(Generic[PathId]):
    """Current profiles by path.

    A path is named by anything hashable that the caller chooses.  Every method that may change a profile returns what
    has to be pushed, and holds it to be pushed.
    """

    def __init__(self, policy: ProfilePolicy, push_change: float = 0.10) -> None:
        """:param policy: of the rule.  :param push_change: share, 0 or more, below which a change is not pushed."""
        if not push_change >= 0:
            raise ValueError(f"push_change is {push_change}; expected 0 or more")
        self._policy = policy
        self._push_change = push_change
        self._entries: dict[PathId, _Entry] = {}

    @property
    def policy(self) -> ProfilePolicy:
        """The policy in force."""
        return self._policy

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, path_id: PathId) -> bool:
        return path_id in self._entries

    def __iter__(self) -> Iterator[PathId]:
        return iter(self._entries)

    def profile(self, path_id: PathId) -> Profile:
        """The profile in force.  :raises KeyError: no such path."""
        return self._entries[path_id].profile

    def inputs(self, path_id: PathId) -> PathInputs:
        """What was last said of a path.  :raises KeyError: no such path."""
        return self._entries[path_id].inputs

    def explain(self, path_id: PathId) -> Explanation:
        """Why a path has its numbers, from what is known now.

        The numbers can differ from those in force by less than ``push_change``.  :raises KeyError: no such path.
        """
        return explain_profile(self._entries[path_id].inputs, self._policy)

    def update(self, path_id: PathId, inputs: PathInputs) -> Change[PathId] | None:
        """Take in what is known of a path now; a path not seen before is added.

        :returns: the change to push, or None when the profile in force stays.
        """
        entry = self._entries.get(path_id)
        new = compute_profile(inputs, self._policy)
        if entry is None:
            self._entries[path_id] = _Entry(inputs, new)
            return Change(path_id, None, new)
        entry.inputs = inputs
        old = entry.profile
        if new == old or not self._worth_pushing(old, new):
            return None
        entry.profile = new
        return Change(path_id, old, new)

    def update_all(self, items: Iterable[tuple[PathId, PathInputs]]) -> list[Change[PathId]]:
        """:meth:`update` for many paths; the changes to push, in the same order."""
        return [change for path_id, inputs in items if (change := self.update(path_id, inputs)) is not None]

    def remove(self, path_id: PathId) -> bool:
        """Forget a path; whether there was one."""
        return self._entries.pop(path_id, None) is not None

    def reload(self, policy: ProfilePolicy, push_change: float | None = None) -> list[Change[PathId]]:
        """Change the policy and recompute every path.

        :param push_change: the new threshold; None keeps it.
        :returns: every profile that differs now, also where it differs by little.
        """
        self._policy = policy
        if push_change is not None:
            self._push_change = push_change
        changes = []
        for path_id, entry in self._entries.items():
            old, new = entry.profile, compute_profile(entry.inputs, policy)
            if new != old:
                entry.profile = new
                changes.append(Change(path_id, old, new))
        return changes

    def _worth_pushing(self, old: Profile, new: Profile) -> bool:
        share = self._push_change
        return (
            new.path_class is not old.path_class
            or new.qps != old.qps
            or new.adapt != old.adapt
            or new.rtt_by is not old.rtt_by
            or (new.limited_by is Limiter.PINNED) != (old.limited_by is Limiter.PINNED)
            or (new.segment_bytes != old.segment_bytes and new.segment_by in _HARD)
            or (new.outstanding_per_qp != old.outstanding_per_qp and new.outstanding_by in _HARD)
            or _moved(old.window_bytes, new.window_bytes, share)
            or _moved(old.rtt_ns, new.rtt_ns, share)
            or _moved(old.rate_bps, new.rate_bps, share)
        )
