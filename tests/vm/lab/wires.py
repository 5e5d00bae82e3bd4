# SPDX-License-Identifier: Apache-2.0
"""What the cables and the switch of the laboratory do to packets: delays, and rates, each in a place of its own.

::

    host ─ tbf, its link's rate ─→ switch, way in: delay by destination ─→ way out: tbf, its rate; the measured queue ─→

The delay lies in the fabric, not in the host, since a kernel's time stamp of a sent packet is taken behind the queueing
discipline of the host.  It is netem without jitter: netem may reorder what it delays by different times, and rxe goes
back N.  Rates are tbf: it lets a packet through at once when the link is free, where netem takes a timer for each.
The shortest timer of the simulated kernel, 500 ns, is longer than a packet of 4 KiB takes at 100 Gbit/s; so tbf may
catch up over ``BURST_BYTES``.  All queues are longer than all windows together: none drops.
"""

import subprocess
from collections.abc import Callable, Iterable
from typing import Final

from tests.vm.fabric import NAMESPACE, Fabric, FabricError

__all__ = ["shape"]

BURST_BYTES: Final = 20_000
QUEUE_BYTES: Final = 2**31
QUEUE_PACKETS: Final = 1_000_000


def _batch(command: list[str], lines: Iterable[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run([*command, "-batch", "-"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FabricError(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()}")


def _rate(device: str, rate_bps: int) -> str:
    return f"qdisc replace dev {device} root handle 1: tbf rate {rate_bps}bit burst {BURST_BYTES} limit {QUEUE_BYTES}"


def shape(fabric: Fabric, one_way_ns: Callable[[int, int], int], link_bps: int, egress_bps: dict[int, int]) -> None:
    """Give every host a link, every pair of hosts a delay, and every way out of the switch a rate.

    :param one_way_ns: delay from one host to another.
    :param link_bps: of all hosts.
    :param egress_bps: of the switch towards these hosts; towards the others it has the link's rate.
    :raises FabricError: refused.
    """
    ports = fabric.rail(0)
    _batch(["tc"], [_rate(port.netdev, link_bps) for port in ports])
    devices = {port.host: f"delay{port.host}" for port in ports}
    links: list[str] = []
    lines: list[str] = []
    for port in ports:
        device = devices[port.host]
        links += [f"link add {device} mtu 9000 type ifb", f"link set {device} up"]
        lines += [
            _rate(port.switch, egress_bps.get(port.host, link_bps)),
            f"qdisc add dev {port.switch} ingress",
            f"filter add dev {port.switch} parent ffff: protocol all matchall "
            f"action mirred egress redirect dev {device}",
        ]
        delays = {other.address: one_way_ns(port.host, other.host) for other in ports if other is not port}
        bands = sorted(set(delays.values())) or [0]
        lines.append(f"qdisc add dev {device} root handle 1: prio bands {max(len(bands), 2)} priomap{' 0' * 16}")
        for band, delay in enumerate(bands, 1):
            lines.append(
                f"qdisc add dev {device} parent 1:{band} handle {band + 1}: netem delay {delay / 1000:g}us "
                f"limit {QUEUE_PACKETS}"
            )
        for address, delay in delays.items():
            band = bands.index(delay) + 1
            lines.append(
                f"filter add dev {device} parent 1: protocol ip prio 1 u32 match ip dst {address}/32 flowid 1:{band}"
            )
    _batch(["ip", "-n", NAMESPACE], links)
    _batch(["tc", "-n", NAMESPACE], lines)
