# SPDX-License-Identifier: Apache-2.0
"""How many clients there may be, in all and of one user, and how much each may have.  Pure."""

from collections import Counter

from dqplbd.config.models import ClientsConfig

__all__ = ["Quota", "QuotaError"]


class QuotaError(Exception):
    """A limit is reached; the text names it, its value, and the key that sets it."""


class Quota:
    """The limits of the configuration section ``clients``, and what counts against them."""

    def __init__(self, config: ClientsConfig) -> None:
        self._config = config
        self._by_uid: Counter[int] = Counter()

    def configure(self, config: ClientsConfig) -> None:
        """New limits; who is in stays in."""
        self._config = config

    def __len__(self) -> int:
        return self._by_uid.total()

    def enter(self, uid: int) -> None:
        """Count one more client of a user.  :raises QuotaError: there is no room for it."""
        limit = self._config.max_clients
        if len(self) >= limit:
            raise QuotaError(f"{len(self)} clients are attached; clients.max_clients is {limit}")
        per_user = self._config.max_clients_per_user
        if per_user is not None and self._by_uid[uid] >= per_user:
            raise QuotaError(
                f"user {uid} has {self._by_uid[uid]} clients attached; clients.max_clients_per_user is {per_user}"
            )
        self._by_uid[uid] += 1

    def leave(self, uid: int) -> None:
        """Count one less."""
        self._by_uid[uid] -= 1
        if self._by_uid[uid] <= 0:
            del self._by_uid[uid]

    def check_regions(self, regions: int) -> None:
        """Whether a client that has so many memory regions may have one more.  :raises QuotaError: it may not."""
        if regions >= self._config.max_regions:
            raise QuotaError(
                f"{regions} memory regions are registered; clients.max_regions is {self._config.max_regions}"
            )
