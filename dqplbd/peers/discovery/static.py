# SPDX-License-Identifier: Apache-2.0
"""Peers that the configuration lists by address.  Pure."""

from collections.abc import Mapping

from dqplbd.config.models import PeersConfig

__all__ = ["static_peers"]


def static_peers(config: PeersConfig) -> Mapping[str, str | None]:
    """The host_id that is expected at each listed ``address:port``; None where any is."""
    return {peer.address: peer.host_id for peer in config.static}
