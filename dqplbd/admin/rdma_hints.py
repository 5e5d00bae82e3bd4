# SPDX-License-Identifier: Apache-2.0
"""What the events that an RDMA device counts say about the network, and what to do.  Pure."""

from collections.abc import Iterator, Mapping
from typing import Final

from dqplbd.admin.model import Device
from dqplbd.inventory.rdma_drivers import Kind

__all__ = ["EVENTS_LIMIT", "diagnose", "events_text", "lost", "span_text"]

EVENTS_LIMIT: Final = 10
"""So many within the last minutes are worth a word: a lossy network loses a packet now and then, and none is lost."""

_LOST: Final = (Kind.RETRANSMIT, Kind.ACK_TIMEOUT, Kind.OUT_OF_SEQUENCE)
_MARKED: Final = (Kind.ECN_MARKED, Kind.CNP_SENT, Kind.CNP_HANDLED, Kind.CNP_IGNORED)


def events_text(events: Mapping[str, int]) -> str:
    """Events for people: ``12 retransmit, 3 ack_timeout``, or ``none``.

    Those that did not happen are left out, and ticks, which are no events and of which there are always some.
    """
    return (
        ", ".join(f"{count} {kind}" for kind, count in events.items() if count and kind != Kind.XMIT_WAIT_TICKS)
        or "none"
    )


def span_text(seconds: float) -> str:
    """How long "lately" is, for people: ``40 s``, ``5 minutes``."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def lost(events: Mapping[str, int]) -> int:
    """Signs of lost packets among events: sent again, not acknowledged in time, arrived out of order."""
    return sum(events.get(kind, 0) for kind in _LOST)


def diagnose(device: Device) -> Iterator[tuple[str, str]]:
    """What the last minutes' events of a device say.

    :returns: (what was found, what to do); none when nothing is to be said.
    """
    if device.rdma_counters is None:
        return
    recent = device.rdma_counters.recent
    if recent.get(Kind.RETRY_EXCEEDED):
        yield (
            f"{recent[Kind.RETRY_EXCEEDED]} times a queue pair gave up after its last retry",
            "the way to a peer is broken or nearly so: `dqplb probe PEER`; errors and discards of the ports on it",
        )
    if lost(recent) >= EVENTS_LIMIT:
        signs = events_text({kind.value: recent.get(kind, 0) for kind in _LOST})
        marks = {kind.value: recent[kind] for kind in _MARKED if kind in recent}
        if device.rdma is not None and device.rdma.link_layer == "infiniband":
            # Its switches wait for room and drop nothing, so marks say nothing about loss.
            yield (
                f"packets are lost ({signs}) on InfiniBand, which drops none for want of room",
                "damage: symbol errors and link errors of the ports on the way (perfquery, ibdiagnet), cables; with "
                "adaptive routing packets overtake each other",
            )
        elif sum(marks.values()):
            yield (
                f"packets are lost ({signs}) although switches mark congestion ({events_text(marks)})",
                "queues overflow before senders slow down: look where ports of switches discard, at their ECN "
                "thresholds, and at PFC for this priority at every hop",
            )
        elif marks:
            yield (
                f"packets are lost ({signs}) and no switch marks congestion",
                "switch ECN on, in the switches for this traffic class and in the adapter, or PFC for its priority at "
                "every hop; where there is no congestion, look for damage: symbol errors of the ports, cables",
            )
        else:
            yield (
                f"packets are lost ({signs}); whether switches mark congestion this driver does not count",
                "errors and discards of the ports on the way; ECN and PFC settings of the switches; cables",
            )
    if recent.get(Kind.CNP_IGNORED):
        yield (
            f"it was asked to slow down {recent[Kind.CNP_IGNORED]} times and did not",
            "congestion control is off in the adapter: switch it on for the priority of this traffic",
        )
    if recent.get(Kind.RECEIVER_NOT_READY, 0) >= EVENTS_LIMIT:
        yield (
            f"{recent[Kind.RECEIVER_NOT_READY]} times no receive was posted, here or at a peer",
            "dqplbd posts receives before they are needed: look for another program on this device; if there is none, "
            "report this",
        )
    if recent.get(Kind.DISCARD, 0) >= EVENTS_LIMIT:
        yield (
            f"the adapter dropped {recent[Kind.DISCARD]} packets",
            "damaged packets: cables; no room for them: PFC for this priority, or fewer senders at a time",
        )
