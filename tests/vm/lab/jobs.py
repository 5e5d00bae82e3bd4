# SPDX-License-Identifier: Apache-2.0
"""What the laboratory does: one job a guest.  Pure, and made to be sent as JSON."""

from dataclasses import asdict, dataclass
from typing import Any, Final

from dqplbd.topology.location import Location, PathClass
from tests.vm.lab.places import RTT_NS, Layout

__all__ = [
    "LINK_BPS",
    "MIB",
    "OVERSUBSCRIBED_BPS",
    "STATIC",
    "Job",
    "Setting",
    "Transfer",
    "payload_bps",
    "standard_jobs",
]

MIB: Final = 2**20
LINK_BPS: Final = 100_000_000_000
OVERSUBSCRIBED_BPS: Final = 36_000_000_000
"""100 Gbit/s, and 2.8 times as many hosts as the way out carries."""

MTU_BYTES: Final = 4096
HEADER_BYTES: Final = 58
"""Of a packet in the middle of a write, as queueing disciplines count: Ethernet 14, IPv4 20, UDP 8, BTH 12, ICRC 4."""

STATIC: Final = {
    "qps": 16,
    "segment_bytes": "512KiB",
    "outstanding_per_qp": 128,
    "window_bytes": "1GiB",
    "adapt": False,
}
"""What the reference ships: 16 queue pairs, 128 segments of 512 KiB each, whatever the path."""


def payload_bps(rate_bps: int) -> float:
    """What of a rate is payload, in full packets."""
    return rate_bps * MTU_BYTES / (MTU_BYTES + HEADER_BYTES)


@dataclass(frozen=True, slots=True)
class Setting:
    """How the daemons are configured.

    :ivar static: the reference's numbers for every path; else computed profiles.  :ivar grants: receivers grant.
    """

    name: str
    static: bool
    grants: bool


STATIC_SETTING: Final = Setting("static", static=True, grants=False)
COMPUTED: Final = Setting("computed", static=False, grants=True)


@dataclass(frozen=True, slots=True)
class Transfer:
    """So many bytes from one host to another, offered at once."""

    source: int
    target: int
    bytes: int

    @property
    def key(self) -> str:
        """Its name."""
        return f"{self.source}-{self.target}"


@dataclass(frozen=True, slots=True)
class Job:
    """One guest: a fabric, and the same traffic with each setting on daemons of their own.

    :ivar places: where the hosts stand.
    :ivar egress_bps: rate of the switch towards hosts, by number, where it is not the link's.
    :ivar measured: hosts whose queue at the switch is sampled.
    :ivar interval_ns: between two samples.
    :ivar rtt_ns: of the paths with traffic; the first 20 of them are the begin.
    :ivar strict: goodput and queue have targets.
    :ivar probing: the classes of the paths count, too.
    """

    name: str
    title: str
    places: tuple[Location, ...]
    settings: tuple[Setting, ...]
    transfers: tuple[Transfer, ...] = ()
    egress_bps: tuple[tuple[int, int], ...] = ()
    measured: tuple[int, ...] = ()
    interval_ns: int = 20_000
    rtt_ns: int = 0
    message_bytes: int = 4 * MIB
    strict: bool = True
    probing: bool = False

    @property
    def layout(self) -> Layout:
        return Layout(self.places)

    def as_dict(self) -> dict[str, Any]:
        """As JSON can say it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "Job":
        """The inverse of :meth:`as_dict`, after JSON."""
        return cls(
            name=raw["name"],
            title=raw["title"],
            places=tuple(Location(**place) for place in raw["places"]),
            settings=tuple(Setting(**setting) for setting in raw["settings"]),
            transfers=tuple(Transfer(**transfer) for transfer in raw["transfers"]),
            egress_bps=tuple((host, rate) for host, rate in raw["egress_bps"]),
            measured=tuple(raw["measured"]),
            interval_ns=raw["interval_ns"],
            rtt_ns=raw["rtt_ns"],
            message_bytes=raw["message_bytes"],
            strict=raw["strict"],
            probing=raw["probing"],
        )


def _incast(path_class: PathClass, senders: int, each_bytes: int) -> Job:
    return Job(
        name=f"incast_{path_class}",
        title=f"{senders} to 1, {path_class}",
        places=Layout.apart(senders, path_class).places,
        settings=(STATIC_SETTING, COMPUTED),
        transfers=tuple(Transfer(sender, 0, each_bytes) for sender in range(1, senders + 1)),
        measured=(0,),
        rtt_ns=RTT_NS[path_class],
    )


def standard_jobs(hosts: int = 32) -> list[Job]:
    """All there is to do.

    :param hosts: of the largest fabric, 8..32.
    """
    single = Job(
        name="single",
        title="1 to 1, region, 36 Gbit/s",
        places=Layout.apart(1, PathClass.REGION).places,
        settings=(STATIC_SETTING, COMPUTED),
        transfers=(Transfer(0, 1, 128 * MIB),),
        egress_bps=((1, OVERSUBSCRIBED_BPS),),
        measured=(1,),
        rtt_ns=RTT_NS[PathClass.REGION],
    )
    members = 8
    all_to_all = Job(
        name="all_to_allv",
        title=f"All-to-Allv, {members} hosts",
        places=Layout.even(members).places,
        settings=(STATIC_SETTING, COMPUTED),
        transfers=tuple(
            # Sizes vary by a factor of four, by a fixed pattern, as those of All-to-Allv do.
            Transfer(a, b, (1 + (a * 7 + b * 5) % 4) * MIB)
            for a in range(members)
            for b in range(members)
            if a != b
        ),
        measured=tuple(range(members)),
        # Most paths are longer; but then it would be over before the begin is.
        rtt_ns=RTT_NS[PathClass.ZONE],
        message_bytes=MIB,
        strict=False,
    )
    probing = [
        Job(f"probing_{count}", f"probing, {count} hosts", Layout.even(count).places, (COMPUTED,), probing=True)
        for count in sorted({hosts, min(hosts, 16)}, reverse=True)
    ]
    incasts = [_incast(path_class, 8, 16 * MIB) for path_class in (PathClass.RACK, PathClass.BUILDING)]
    # The longest first: with two guests at a time, the short ones fill the gap.
    return [*probing, *incasts, all_to_all, single]
