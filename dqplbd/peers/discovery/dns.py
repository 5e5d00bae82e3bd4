# SPDX-License-Identifier: Apache-2.0
"""Peers that are the addresses of a DNS name."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

from dqplbd.config.models import DnsPeersConfig
from dqplbd.logs import fields
from dqplbd.peers.link import join_host_port

__all__ = ["DnsSource", "lookup"]

log = logging.getLogger(__name__)

MAX_ADDRESSES: Final = 100_000
_LOOKUP_TIMEOUT_S: Final = 30.0


async def lookup(name: str, port: int) -> set[str]:
    """The ``address:port`` of each A and AAAA record of a name.

    :raises OSError: it cannot be resolved.  :raises TimeoutError: not in 30 s.
    """
    async with asyncio.timeout(_LOOKUP_TIMEOUT_S):
        found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    addresses = {str(sockaddr[0]) for family, _, _, _, sockaddr in found if family in (socket.AF_INET, socket.AF_INET6)}
    return {join_host_port(address, port) for address in sorted(addresses)[:MAX_ADDRESSES]}


class DnsSource:
    """Looks a name up again and again, and tells which addresses it has now.

    A failed look-up changes nothing: a name server that is down takes no peer away.

    :param found: called with all addresses after each look-up that worked.
    """

    def __init__(self, config: DnsPeersConfig, found: Callable[[set[str]], None]) -> None:
        self.config = config
        self.error = ""
        """Why the last look-up failed; empty when it worked."""
        self._found = found

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                addresses = await lookup(self.config.name, self.config.port)
            except (OSError, TimeoutError) as error:
                text = f"{self.config.name} cannot be resolved: {error or 'no answer'}"
                if text != self.error:
                    log.warning("peers.dns: %s", text, extra=fields(name=self.config.name))
                self.error = text
            else:
                self.error = ""
                self._found(addresses)
            await asyncio.sleep(self.config.interval_s)
