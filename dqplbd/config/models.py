# SPDX-License-Identifier: Apache-2.0
"""The configuration as pydantic models: every key, its type, default, range and meaning.

Rules that hold throughout: an unknown key is an error; models are frozen, so that a reload swaps the whole object and
nothing changes under a reader; a quantity is a number in the unit its key ends with (``_bytes``, ``_bps`` bits a
second, ``_ns``, ``_s``) or a text with its own unit (``512KiB``, ``100Gbit/s``, ``250us``).  Nothing here opens a file
or a socket.

``docs/configuration.md`` is generated from these models by ``python -m dqplbd.config_reference``.
"""

import socket
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    field_serializer,
    field_validator,
    model_validator,
)

from dqplbd.config.types import (
    DNS_NAME,
    BitRate,
    DeviceAddress,
    FileMode,
    GidText,
    HostId,
    HostPort,
    IpAddress,
    ListenHostPort,
    Name,
    Nanoseconds,
    PeerName,
    Place,
    RdmaMtu,
    RdmaName,
    RdmaPattern,
    Seconds,
    Size,
    Subnet,
    is_loopback,
    problem,
    split_host_port,
)
from dqplbd.topology.location import Location, PathClass

__all__ = [
    "ActiveBandwidthConfig",
    "AdminConfig",
    "ClassificationConfig",
    "ClientsConfig",
    "Config",
    "DeviceConfig",
    "DnsPeersConfig",
    "EmulatedLinkConfig",
    "EmulationConfig",
    "EngineConfig",
    "HostConfig",
    "LocationConfig",
    "LoggingConfig",
    "MetricsConfig",
    "PeersConfig",
    "PinnedProfile",
    "ProbingConfig",
    "ProfilesConfig",
    "RdmaConfig",
    "StaticPeerConfig",
    "TcpDeviceConfig",
    "ThresholdsConfig",
    "TransportConfig",
    "VerbsDeviceConfig",
]

KIB = 2**10
MIB = 2**20
GIB = 2**30
US = 10**3
GBIT = 10**9


class Section(BaseModel):
    """A mapping of the file: frozen, no key but those declared."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def _not_above(low: tuple[str, float], high: tuple[str, float]) -> None:
    """:raises PydanticCustomError: when ``low`` (key, value) is larger than ``high``."""
    if low[1] > high[1]:
        raise problem(
            f"{low[0]} is {low[1]}, above {high[0]} of {high[1]}",
            f"{low[0]} <= {high[0]}",
            f"lower {low[0]} or raise {high[0]}",
        )


# -------------------------------------------------------------------------------------------------------- host, devices


class LocationConfig(Section):
    """Where this host is. A place that is left out is unknown, and unknown is never equal to anything."""

    region: Place | None = Field(None, description="Outermost place.")
    building: Place | None = Field(None, description="Building or data centre of the region.")
    zone: Place | None = Field(None, description="Network or failure zone of the building.")
    rack: Place | None = Field(None, description="Rack, or the hosts behind one first-tier switch.")

    def as_location(self) -> Location:
        """The same as the value type that the rest of the program uses."""
        return Location(self.region, self.building, self.zone, self.rack)


class HostConfig(Section):
    """Who and where this host is."""

    host_id: HostId = Field(
        default_factory=lambda: socket.gethostname(),
        description="Stable name of this host among its peers; by default the host name of the system.",
    )
    location: LocationConfig = Field(LocationConfig(), description="Where this host is; goes before a topology file.")


class _Device(Section):
    """What devices of all providers have."""

    name: Name = Field(description="Name of the device, unique on this host.")
    rail: int = Field(
        0,
        ge=0,
        le=7,
        description="Number of the rail; devices of one rail reach each other. By default the place in the list.",
    )
    numa_node: int | None = Field(None, ge=0, le=1023, description="NUMA node near the device; by default asked for.")

    @field_validator("provider", mode="before", check_fields=False)
    @classmethod
    def _known_provider(cls, value: object) -> object:
        if value not in ("tcp", "verbs"):
            raise problem(
                f"{value!r} is no provider",
                "one of 'tcp', 'verbs'",
                "verbs for RDMA devices, tcp for machines without; without the key it is tcp",
            )
        return value


class TcpDeviceConfig(_Device):
    """A device of provider tcp: an address of this host; a queue pair is one TCP connection."""

    provider: Literal["tcp"] = Field("tcp", description="What drives it: tcp, one TCP connection a queue pair.")
    address: DeviceAddress = Field(description="Local IP address that the device listens on and sends from.")
    port: int = Field(
        0, ge=0, le=65535, description="TCP port of incoming queue pairs and UDP port of probes; 0 takes free ones."
    )
    rate_bps: BitRate = Field(
        10 * GBIT, ge=1_000_000, le=10_000 * GBIT, description="Link rate, in bits a second, that profiles start from."
    )
    mtu_bytes: Size | None = Field(
        None, ge=576, le=65536, description="Payload of one packet; by default what the interface allows."
    )


class VerbsDeviceConfig(_Device):
    """A device of provider verbs: one port of an RDMA device, as `ibv_devices` and `rdma link` list them."""

    provider: Literal["verbs"] = Field(description="What drives it: verbs, RDMA by libibverbs.")
    rdma_device: RdmaName = Field(description="Name of the RDMA device, such as mlx5_0.")
    port: int = Field(1, ge=1, le=255, description="Port of the RDMA device.")
    gid: GidText | None = Field(
        None,
        description="GID that the device sends from, as an IPv6 address, or the IPv4 address it is made of. By default "
        "the best one of the port; `dqplb devices -o wide` tells which and why.",
    )
    rate_bps: BitRate | None = Field(
        None, ge=1_000_000, le=10_000 * GBIT, description="Link rate, in bits a second; by default asked of the port."
    )
    mtu_bytes: RdmaMtu | None = Field(
        None,
        description="Payload of one packet: 256, 512, 1024, 2048 or 4096; by default what the port has active. "
        "The smaller value of both ends counts.",
    )
    traffic_class: int | None = Field(
        None,
        ge=0,
        le=255,
        description="Traffic class of data, control and probes; on RoCE the DSCP times four, so 104 is DSCP 26. "
        "By default rdma.traffic_class.",
    )
    service_level: int | None = Field(
        None, ge=0, le=15, description="InfiniBand service level. By default rdma.service_level."
    )
    max_registration_bytes: Size | None = Field(
        None,
        ge=MIB,
        le=2**50,
        description="Memory is registered in pieces of at most this size; by default what the device allows.",
    )


def _device_kind(value: Any) -> str:
    """Which kind of device a mapping, or a model, describes; what is none of them is told by the model."""
    if isinstance(value, dict):
        provider = value.get("provider", "verbs" if "rdma_device" in value else "tcp")
    else:
        provider = getattr(value, "provider", "tcp")
    return "<verbs>" if provider == "verbs" else "<tcp>"


# A tag in angle brackets can be told from a key where an error is located; see dqplbd.config.loader.
DeviceConfig = Annotated[
    Annotated[TcpDeviceConfig, Tag("<tcp>")] | Annotated[VerbsDeviceConfig, Tag("<verbs>")],
    Discriminator(_device_kind),
]


class RdmaConfig(Section):
    """How RDMA devices are found, and how GIDs are chosen. A device under devices can say otherwise for itself."""

    exclude: tuple[RdmaPattern, ...] = Field(
        (),
        max_length=256,
        description='RDMA devices, or ports of them as "device/port", that devices: auto leaves out; * and ? are '
        "wildcards.",
    )
    gid_subnets: tuple[Subnet, ...] = Field(
        (),
        max_length=256,
        description="Subnets that GIDs are preferred from, such as those of the fabric's addresses: 10.0.0.0/8.",
    )
    gid_family: Literal["ipv4", "ipv6"] = Field(
        "ipv4", description="Kind of address that a GID is preferred from, all else being equal."
    )
    traffic_class: int = Field(
        0,
        ge=0,
        le=255,
        description="Traffic class of all RDMA devices; on RoCE the DSCP times four. Switches choose queue, PFC and "
        "ECN by it: it must be what they and all hosts of the fabric expect.",
    )
    service_level: int = Field(0, ge=0, le=15, description="InfiniBand service level of all RDMA devices.")


# ---------------------------------------------------------------------------------------------------------------- peers


class StaticPeerConfig(Section):
    """A peer that is known by its address."""

    host_id: HostId | None = Field(None, description="Expected name; another one at this address is refused.")
    address: HostPort = Field(description='Where its host-to-host API listens, as "address:port".')


class DnsPeersConfig(Section):
    """Peers found as the addresses of one DNS name."""

    name: str = Field(
        pattern=DNS_NAME,
        max_length=253,
        description="DNS name whose A and AAAA records are the peers.",
    )
    port: int = Field(7471, ge=1, le=65535, description="Port of their host-to-host API.")
    interval_s: Seconds = Field(30.0, ge=1, le=86400, description="Time between look-ups.")


class PeersConfig(Section):
    """Which other hosts there are, and how this one talks to them. One that a workload connects to needs no entry."""

    listen: ListenHostPort = Field(
        "127.0.0.1:7471", description="Where the host-to-host API of this host listens; port 0 takes a free one."
    )
    insecure: bool = Field(
        False,
        description="Allow plain, unauthenticated HTTP to and from other machines. Only for a network where every "
        "machine may be trusted; without it, all addresses here must be loopback.",
    )
    static: tuple[StaticPeerConfig, ...] = Field((), max_length=100_000, description="Peers known by address.")
    dns: DnsPeersConfig | None = Field(None, description="Peers known by a DNS name.")
    accept: Literal["any", "listed"] = Field(
        "any",
        description="Who may introduce itself to this host: any host that reaches it, or only the peers listed here.",
    )
    forget_s: Seconds = Field(
        600.0,
        ge=1,
        le=7 * 86400,
        description="A peer that is not listed, not used and not heard of so long is forgotten.",
    )
    request_timeout_s: Seconds = Field(5.0, ge=0.1, le=60, description="Longest wait for an answer of a peer.")
    retry_min_s: Seconds = Field(0.5, ge=0.05, le=60, description="First wait before a peer is asked again.")
    retry_max_s: Seconds = Field(60.0, ge=0.5, le=3600, description="Longest such wait; it doubles up to here.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        _not_above(("retry_min_s", self.retry_min_s), ("retry_max_s", self.retry_max_s))
        seen: dict[str, int] = {}
        for index, peer in enumerate(self.static):
            if peer.address in seen:
                raise problem(
                    f"static[{index}].address {peer.address!r} is also static[{seen[peer.address]}]",
                    "each address once",
                    "remove one of them",
                )
            seen[peer.address] = index
        if not self.insecure:
            addresses = [("listen", self.listen)] + [
                (f"static[{i}].address", p.address) for i, p in enumerate(self.static)
            ]
            for key, address in addresses:
                if not is_loopback(split_host_port(address)[0]):
                    raise problem(
                        f"{key} {address!r} is not a loopback address, and requests between hosts are plain HTTP",
                        "a loopback address (127.0.0.0/8, [::1], localhost), or insecure: true",
                        "set peers.insecure: true if every machine of that network may be trusted",
                    )
            if self.dns is not None and not is_loopback(self.dns.name):
                raise problem(
                    f"dns.name {self.dns.name!r} can name other machines, and requests between hosts are plain HTTP",
                    "no dns, or insecure: true",
                    "set peers.insecure: true if every machine of that network may be trusted",
                )
        return self


# -------------------------------------------------------------------------------------------------------------- probing


class ActiveBandwidthConfig(Section):
    """Bursts that measure the bandwidth of a path. They load the fabric; passive measurement needs none."""

    enabled: bool = Field(
        False, description="Send bursts, and take those of peers; a path is measured only where both ends do."
    )
    interval_s: Seconds = Field(
        3600.0,
        ge=1,
        le=7 * 86400,
        description="Time between two measurements of one place (a rack, or a host whose rack is not known).",
    )
    burst_bdp: float = Field(
        4.0,
        ge=1,
        le=16,
        description="Length of a burst in bandwidth-delay products; at least 256 KiB and 1 ms of the rate, "
        "at most 128 MiB.",
    )
    max_utilisation: float = Field(
        0.2, ge=0, le=1, description="Send and take none while the device carries more than this share of its rate."
    )
    daily_bytes: Size = Field(
        10 * GIB,
        ge=MIB,
        le=2**50,
        description="Most bytes of bursts sent in 24 hours, all paths together; and as many taken.",
    )


class ProbingConfig(Section):
    """Round-trip measurement: whom, how often, over which windows."""

    enabled: bool = Field(True, description="Probe. Without it, every path has the profile of its class.")
    interval_s: Seconds = Field(
        1.0, ge=0.01, le=600, description="Time between two probes of one path; longer where the rate limit demands it."
    )
    jitter: float = Field(0.2, ge=0, le=0.5, description="Random share by which each interval is longer or shorter.")
    answers_per_s: int = Field(
        1000, ge=1, le=1_000_000, description="Most probes of one peer that are answered a second."
    )
    timeout_s: Seconds = Field(0.5, ge=0.001, le=30, description="A probe without answer after this time is lost.")
    window_s: Seconds = Field(10.0, ge=0.05, le=3600, description="Length of one measurement window.")
    samples_per_window: int = Field(
        8, ge=1, le=1000, description="Samples that a window needs before its minimum counts for a class change."
    )
    rtt_windows: int = Field(
        3, ge=1, le=100, description="Windows over which the RTT is the minimum; a longer route shows after as many."
    )
    min_probes_per_s: float = Field(
        1.0, ge=0.1, le=1000, description="Probes a second of the host that no pressure on CPU or memory goes below."
    )
    max_probes_per_s: float = Field(100.0, ge=0.1, le=10_000, description="Most probes a second of the host.")
    rack_hosts: int = Field(64, ge=1, le=4096, description="Most hosts probed in the own rack; normally all of it.")
    hosts_per_rack: int = Field(2, ge=1, le=64, description="Hosts probed in each other rack of the own zone.")
    hosts_per_zone: int = Field(4, ge=1, le=64, description="Hosts probed in each other zone of the own building.")
    hosts_per_building: int = Field(8, ge=1, le=64, description="Hosts probed in each other building.")
    unlabelled_hosts: int = Field(256, ge=1, le=4096, description="Most hosts probed whose location is not known.")
    active_bandwidth: ActiveBandwidthConfig = Field(ActiveBandwidthConfig(), description="Bandwidth bursts.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        _not_above(("min_probes_per_s", self.min_probes_per_s), ("max_probes_per_s", self.max_probes_per_s))
        return self


# ------------------------------------------------------------------------------------------------------- classification


class ThresholdsConfig(Section):
    """RTT up to which a path has a class; beyond the last one it is ``region``.

    The defaults are the geometric means of neighbouring classes of a fabric with 8, 56, 120 and 240 us.
    """

    rack_ns: Nanoseconds = Field(21_200, ge=100, le=10**10, description="Longest RTT of class rack.")
    zone_ns: Nanoseconds = Field(82_000, ge=100, le=10**10, description="Longest RTT of class zone.")
    building_ns: Nanoseconds = Field(169_700, ge=100, le=10**10, description="Longest RTT of class building.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.rack_ns < self.zone_ns < self.building_ns:
            raise problem(
                f"rack_ns {self.rack_ns}, zone_ns {self.zone_ns}, building_ns {self.building_ns} do not rise",
                "rack_ns < zone_ns < building_ns",
                "a key that is left out has its default; set all three",
            )
        return self


class ClassificationConfig(Section):
    """How the class of a path is found."""

    method: Literal["labels_then_rtt", "labels", "rtt"] = Field(
        "labels_then_rtt",
        description="labels_then_rtt: labels decide, RTT where they say nothing; labels: labels only; rtt: RTT only.",
    )
    rule: Literal["thresholds", "largest_gap"] = Field(
        "thresholds",
        description="How RTT becomes a class: thresholds, or cuts at the largest gaps between the RTTs of this host.",
    )
    thresholds: ThresholdsConfig = Field(ThresholdsConfig(), description="For rule thresholds.")
    min_gap_ratio: float = Field(1.6, ge=1.05, le=100, description="Ratio of two RTTs that counts as a gap.")
    min_cluster_size: int = Field(1, ge=1, le=10_000, description="Fewer paths than this are no class of their own.")
    guard_band: float = Field(
        0.15, ge=0, le=1, description="Share by which an RTT must exceed a threshold to count for a farther class."
    )
    windows_to_widen: int = Field(
        3, ge=1, le=100, description="Windows in a row that must say so before a class gets farther; nearer is at once."
    )
    topology_file: str | None = Field(None, min_length=1, max_length=4096, description="File with host locations.")
    topology_format: Literal["auto", "yaml", "keyvalue", "slurm_conf", "slurm_yaml"] = Field(
        "auto", description="Format of the topology file; auto tells by its first line."
    )
    overrides: dict[HostId, PathClass] = Field(
        {}, max_length=100_000, description="Class of the paths to a host, whatever labels and RTT say."
    )


# ------------------------------------------------------------------------------------------------------------- profiles


class _PerClass(Section):
    """One value a path class; those left out keep their defaults."""

    def of(self, path_class: PathClass) -> Any:
        """The value for a class."""
        return getattr(self, path_class.value)


class ClassRtts(_PerClass):
    """RTT assumed for a path that has not been measured."""

    host: Nanoseconds = Field(4 * US, ge=100, le=10**10, description="Path to the own host.")
    rack: Nanoseconds = Field(8 * US, ge=100, le=10**10, description="Path within a rack.")
    zone: Nanoseconds = Field(56 * US, ge=100, le=10**10, description="Path between racks of a zone.")
    building: Nanoseconds = Field(120 * US, ge=100, le=10**10, description="Path between zones of a building.")
    region: Nanoseconds = Field(240 * US, ge=100, le=10**10, description="Path between buildings of a region.")
    unknown: Nanoseconds = Field(
        56 * US, ge=100, le=10**10, description="Path of no known class: short, since too large a window does harm."
    )


class ClassEntropy(_PerClass):
    """QPs that a path needs for its segments to be spread over the parallel links of the fabric."""

    host: int = Field(1, ge=1, le=128, description="Path to the own host.")
    rack: int = Field(2, ge=1, le=128, description="Path within a rack: one switch, no parallel links.")
    zone: int = Field(4, ge=1, le=128, description="Path between racks of a zone.")
    building: int = Field(8, ge=1, le=128, description="Path between zones of a building.")
    region: int = Field(16, ge=1, le=128, description="Path between buildings of a region.")
    unknown: int = Field(4, ge=1, le=128, description="Path of no known class.")


class ClassIncast(_PerClass):
    """Senders that are expected to fill one switch queue at the same time; they share its buffer."""

    host: int = Field(1, ge=1, le=4096, description="Path to the own host.")
    rack: int = Field(1, ge=1, le=4096, description="Path within a rack.")
    zone: int = Field(1, ge=1, le=4096, description="Path between racks of a zone.")
    building: int = Field(1, ge=1, le=4096, description="Path between zones of a building.")
    region: int = Field(1, ge=1, le=4096, description="Path between buildings of a region.")
    unknown: int = Field(1, ge=1, le=4096, description="Path of no known class.")


class ClassRateCaps(_PerClass):
    """Rate that one path of a class may count on, such as its share of an oversubscribed uplink; none by default."""

    host: BitRate | None = Field(None, ge=1_000_000, description="Path to the own host.")
    rack: BitRate | None = Field(None, ge=1_000_000, description="Path within a rack.")
    zone: BitRate | None = Field(None, ge=1_000_000, description="Path between racks of a zone.")
    building: BitRate | None = Field(None, ge=1_000_000, description="Path between zones of a building.")
    region: BitRate | None = Field(None, ge=1_000_000, description="Path between buildings of a region.")
    unknown: BitRate | None = Field(None, ge=1_000_000, description="Path of no known class.")


class PinnedProfile(Section):
    """Profile numbers that are set by hand. Any of them may be left out and is then computed around the others."""

    qps: int | None = Field(None, ge=1, le=128, description="Data queue pairs.")
    segment_bytes: Size | None = Field(None, ge=4 * KIB, le=16 * MIB, description="Segment size; a multiple of 128.")
    window_bytes: Size | None = Field(None, ge=4 * KIB, le=2**40, description="Bytes in flight.")
    outstanding_per_qp: int | None = Field(None, ge=1, le=4096, description="Segments in flight on one queue pair.")
    adapt: bool | None = Field(
        None, description="Whether window and outbound budget shrink when the path's delay grows."
    )

    @field_validator("segment_bytes")
    @classmethod
    def _aligned(cls, value: int | None) -> int | None:
        if value is not None and value % 128:
            raise problem(f"{value} is no multiple of 128", "a multiple of 128 bytes", f"use {value // 128 * 128}")
        return value


class PinnedClasses(Section):
    """Pinned profile numbers by path class."""

    host: PinnedProfile | None = Field(None, description="Paths to the own host.")
    rack: PinnedProfile | None = Field(None, description="Paths within a rack.")
    zone: PinnedProfile | None = Field(None, description="Paths between racks of a zone.")
    building: PinnedProfile | None = Field(None, description="Paths between zones of a building.")
    region: PinnedProfile | None = Field(None, description="Paths between buildings of a region.")
    unknown: PinnedProfile | None = Field(None, description="Paths of no known class.")

    def of(self, path_class: PathClass) -> PinnedProfile | None:
        """What is pinned for a class, or None."""
        pinned: PinnedProfile | None = getattr(self, path_class.value)
        return pinned


class ProfilesConfig(Section):
    """How a path becomes a profile: window, segment size, queue pairs, outstanding per queue pair."""

    gain: float = Field(1.25, ge=1, le=8, description="Window as a multiple of the bandwidth-delay product.")
    window_min_bytes: Size = Field(128 * KIB, ge=4 * KIB, le=2**40, description="No computed window is smaller.")
    window_max_bytes: Size = Field(64 * MIB, ge=64 * KIB, le=2**40, description="No computed window is larger.")
    segment_min_bytes: Size = Field(64 * KIB, ge=4 * KIB, le=16 * MIB, description="Smallest segment; a power of two.")
    segment_max_bytes: Size = Field(MIB, ge=4 * KIB, le=16 * MIB, description="Largest segment; a power of two.")
    per_qp_rate_bps: BitRate = Field(
        200 * GBIT, ge=1_000_000, le=10_000 * GBIT, description="Rate that one queue pair is trusted to carry."
    )
    qp_budget: int = Field(
        4096, ge=1, le=1_000_000, description="Data queue pairs of one device, shared by the peers in use."
    )
    entropy_target: ClassEntropy = Field(ClassEntropy(), description="Queue pairs for spreading, by class.")
    class_rtt_ns: ClassRtts = Field(ClassRtts(), description="RTT of an unmeasured path, by class.")
    class_rate_cap_bps: ClassRateCaps = Field(ClassRateCaps(), description="Rate of one path, by class.")
    buffer_bytes: Size = Field(64_000_000, ge=64 * KIB, le=2**40, description="Shared buffer of a switch.")
    buffer_alpha: float = Field(
        0.5, ge=0.01, le=64, description="Dynamic threshold: one queue gets alpha/(1+alpha) of the buffer."
    )
    incast: ClassIncast = Field(ClassIncast(), description="Senders that share one queue, by class.")
    adapt: bool | Literal["auto"] = Field(
        "auto",
        description="Shrink windows, and the outbound budget that a device's paths share, when the delay grows; "
        "auto: yes, unless the window is pinned.",
    )
    push_change: float = Field(
        0.10, ge=0, le=1, description="Relative change below which a running path keeps its numbers."
    )
    classes: PinnedClasses = Field(PinnedClasses(), description="Numbers set by hand for a class.")
    peers: dict[HostId, PinnedProfile] = Field(
        {}, max_length=100_000, description="Numbers set by hand for a host; go before those of its class."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key in ("segment_min_bytes", "segment_max_bytes"):
            value: int = getattr(self, key)
            if value & (value - 1):
                raise problem(
                    f"{key} is {value}",
                    "a power of two",
                    f"use {1 << value.bit_length() - 1} or {1 << value.bit_length()}",
                )
        _not_above(("segment_min_bytes", self.segment_min_bytes), ("segment_max_bytes", self.segment_max_bytes))
        _not_above(("window_min_bytes", self.window_min_bytes), ("window_max_bytes", self.window_max_bytes))
        _not_above(("segment_min_bytes", self.segment_min_bytes), ("window_min_bytes", self.window_min_bytes))
        return self


# ----------------------------------------------------------------------------------------- transport, emulation, engine


class TransportConfig(Section):
    """Limits of virtual connections. Peers agree on the smaller of their two values."""

    max_segment_bytes: Size = Field(16 * MIB, ge=64 * KIB, le=16 * MIB, description="Largest segment accepted.")
    max_qps: int = Field(64, ge=1, le=128, description="Most data queue pairs of one virtual connection.")
    queue_depth: int = Field(256, ge=16, le=4096, description="Segments that one queue pair can hold.")
    control_credits: int = Field(
        64, ge=4, le=1024, description="Control messages a peer may have under way to this host."
    )
    heartbeat_s: Seconds = Field(0.25, ge=0.01, le=60, description="Idle time after which a sign of life is sent.")
    op_deadline_s: Seconds = Field(
        5.0, ge=0.1, le=600, description="A segment not completed after this time means a failed queue pair."
    )

    ack_timeout_s: Seconds | None = Field(
        None,
        ge=0.0001,
        le=60,
        description="RDMA: wait for an acknowledgement before sending again; by default from the RTT of the path, "
        "16 ms to 1 s. Rounded up to 4.096 us times a power of two. For queue pairs made afterwards.",
    )
    retries: int = Field(
        7, ge=0, le=7, description="RDMA: times that a queue pair sends again before it fails, likewise."
    )
    cancel_deadline_s: Seconds = Field(
        0.5, ge=0.05, le=60, description="A peer that does not answer a cancel for so long has its queue pairs fenced."
    )
    stall_s: Seconds = Field(1.0, ge=0.05, le=600, description="Work that makes no progress for so long is a stall.")
    connect_timeout_s: Seconds = Field(30.0, ge=0.1, le=600, description="Longest time to connect a flow.")
    grants: bool = Field(True, description="Give senders grants, and obey those of receivers.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.op_deadline_s < 2 * self.heartbeat_s:
            raise problem(
                f"op_deadline_s {self.op_deadline_s} is under two heartbeats of {self.heartbeat_s} s",
                "op_deadline_s >= 2 * heartbeat_s",
                "raise op_deadline_s or lower heartbeat_s",
            )
        return self


class EmulatedLinkConfig(Section):
    """A tcp path that is made to look like a far one."""

    peer: PeerName = Field("*", description='host_id of the other end, or "*" for all without their own.')
    delay_ns: Nanoseconds = Field(0, ge=0, le=10**10, description="One-way delay that is added, in each direction.")
    rate_bps: BitRate | None = Field(None, ge=1_000_000, le=10_000 * GBIT, description="Rate of the link.")
    queue_bytes: Size | None = Field(
        None,
        ge=4 * KIB,
        le=2**40,
        description="Queue at the link; what does not fit waits at the sender. Default: endless.",
    )


class EmulationConfig(Section):
    """Emulated links: for laboratories and demonstrations, on tcp devices only. Leave it out in production."""

    links: tuple[EmulatedLinkConfig, ...] = Field((), max_length=10_000, description="One entry a peer.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        seen: set[str] = set()
        for index, link in enumerate(self.links):
            if link.peer in seen:
                raise problem(
                    f"links[{index}].peer {link.peer!r} was given before", "each peer once", "remove one of them"
                )
            seen.add(link.peer)
        return self

    def link_for(self, host_id: str) -> EmulatedLinkConfig | None:
        """The link to a host: its own, else that of ``*``, else None."""
        wildcard = None
        for link in self.links:
            if link.peer == host_id:
                return link
            if link.peer == "*":
                wildcard = link
        return wildcard


class EngineConfig(Section):
    """The threads that move data."""

    spin_ns: Nanoseconds = Field(
        50 * US, ge=0, le=10 * 10**6, description="Longest busy wait for more work before sleeping; 0 never spins."
    )
    cpus: tuple[int, ...] | None = Field(
        None, max_length=4096, description="CPUs that engine threads may use; by default those near their devices."
    )

    max_flows: int = Field(65_536, ge=1, le=1_000_000, description="Flows of all clients together.")

    @field_validator("cpus")
    @classmethod
    def _check_cpus(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None:
            if not value:
                raise problem("the list is empty", "at least one CPU number", "remove the key for the default")
            if any(not 0 <= cpu < 65536 for cpu in value) or len(set(value)) != len(value):
                raise problem(f"{list(value)!r}", "CPU numbers of 0..65535, each once")
        return value


# ---------------------------------------------------------------------------------------- clients, admin, metrics, logs


class ClientsConfig(Section):
    """Processes that attach to the daemon, and what each of them may use."""

    socket: str = Field(
        "/run/dqplbd/client.sock", min_length=1, max_length=107, description="Unix socket that clients attach on."
    )
    mode: FileMode = Field("0660", description="Permissions of the socket, octal.")
    group: Name | None = Field(None, description="Group of the socket; by default that of the daemon.")
    max_clients: int = Field(64, ge=1, le=4096, description="Clients attached at the same time.")
    max_clients_per_user: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Clients of one user attached at the same time; by default no limit of its own.",
    )
    max_memory_bytes: Size = Field(4 * GIB, ge=MIB, le=2**44, description="Memory of one client, rings included.")
    max_flows: int = Field(8192, ge=1, le=32768, description="Flows of one client.")
    max_regions: int = Field(4096, ge=1, le=1_000_000, description="Memory regions of one client.")
    max_ring_entries: int = Field(16384, ge=64, le=65536, description="Longest ring a client gets; a power of two.")
    drain_s: Seconds = Field(
        5.0, ge=0, le=3600, description="Longest wait at the end of the daemon for what clients have under way."
    )

    @field_validator("max_ring_entries")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise problem(f"{value} is no power of two", "a power of two", f"use {1 << value.bit_length() - 1}")
        return value

    @field_validator("socket")
    @classmethod
    def _absolute(cls, value: str) -> str:
        return _absolute_path(value)


def _absolute_path(value: str) -> str:
    if not value.startswith("/") or "\0" in value or len(value.encode()) > 107:
        raise problem(f"{value!r} is no usable socket path", "an absolute path of at most 107 bytes")
    return value


class AdminConfig(Section):
    """The socket that the command line tool talks to."""

    socket: str = Field(
        "/run/dqplbd/admin.sock", min_length=1, max_length=107, description="Unix socket of the admin API."
    )
    mode: FileMode = Field("0660", description="Permissions of the socket, octal.")
    group: Name | None = Field(None, description="Group of the socket; by default that of the daemon.")

    @field_validator("socket")
    @classmethod
    def _absolute(cls, value: str) -> str:
        return _absolute_path(value)


class MetricsConfig(Section):
    """Prometheus metrics, /healthz and /readyz over HTTP."""

    enabled: bool = Field(True, description="Serve them.")
    address: IpAddress = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(9471, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    top_k: int = Field(0, ge=0, le=20, description="Worst paths that get series of their own; 0 for none.")


class LoggingConfig(Section):
    """Logs on standard error."""

    format: Literal["json", "text"] = Field("text", description="One JSON object a line, or text for people.")
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severity that is logged.")


# ------------------------------------------------------------------------------------------------------------- the file

DEVICES_EXPECTED = "auto, or a list of devices"


def _listed_devices(value: Any) -> Any:
    """``auto`` is kept as no device at all; a device without a rail takes its place in the list."""
    if value is None or value == "auto":
        return ()
    if isinstance(value, list | tuple):
        return [{"rail": min(i, 7), **item} if isinstance(item, dict) else item for i, item in enumerate(value)]
    raise problem(f"{value!r} is no list", DEVICES_EXPECTED, "write devices: auto, or an entry a device")


Devices = Annotated[
    tuple[DeviceConfig, ...],
    BeforeValidator(_listed_devices, json_schema_input_type=Literal["auto"] | tuple[DeviceConfig, ...]),
]


class Config(Section):
    """The whole configuration file. Every section may be left out."""

    host: HostConfig = Field(default_factory=HostConfig, description="Who and where this host is.")
    devices: Devices = Field(
        (),
        max_length=8,
        description="Devices of this host; auto, or none, takes every RDMA port found, with rails in PCI order.",
    )
    rdma: RdmaConfig = Field(RdmaConfig(), description="How RDMA devices are found, and GIDs chosen.")
    peers: PeersConfig = Field(PeersConfig(), description="Which other hosts there are.")
    probing: ProbingConfig = Field(ProbingConfig(), description="Round-trip measurement.")
    classification: ClassificationConfig = Field(ClassificationConfig(), description="How a path gets its class.")
    profiles: ProfilesConfig = Field(ProfilesConfig(), description="How a path gets its profile.")
    transport: TransportConfig = Field(TransportConfig(), description="Limits of virtual connections.")
    emulation: EmulationConfig = Field(EmulationConfig(), description="Emulated links, for laboratories.")
    engine: EngineConfig = Field(EngineConfig(), description="The threads that move data.")
    clients: ClientsConfig = Field(ClientsConfig(), description="Attached processes and their limits.")
    admin: AdminConfig = Field(AdminConfig(), description="The socket of the command line tool.")
    metrics: MetricsConfig = Field(MetricsConfig(), description="Prometheus metrics.")
    logging: LoggingConfig = Field(LoggingConfig(), description="Logs.")

    @field_serializer("devices", mode="wrap")
    def _devices_as_written(self, value: tuple[DeviceConfig, ...], handler: SerializerFunctionWrapHandler) -> Any:
        return handler(value) if value else "auto"

    @field_validator("devices")
    @classmethod
    def _unique_devices(cls, value: tuple[DeviceConfig, ...]) -> tuple[DeviceConfig, ...]:
        seen: dict[str, int] = {}
        for index, device in enumerate(value):
            if device.name in seen:
                raise problem(
                    f"[{index}].name {device.name!r} is also [{seen[device.name]}].name",
                    "a name of its own for each device",
                    "rename one of them",
                )
            seen[device.name] = index
        ports: dict[tuple[str, int], int] = {}
        for index, device in enumerate(value):
            if isinstance(device, VerbsDeviceConfig):
                port = (device.rdma_device, device.port)
                if port in ports:
                    raise problem(
                        f"[{index}].rdma_device {port[0]!r} port {port[1]} is also [{ports[port]}]",
                        "each port of an RDMA device once",
                        "remove one of them, or correct its rdma_device or port",
                    )
                ports[port] = index
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.clients.socket == self.admin.socket:
            raise problem(
                f"clients.socket and admin.socket are both {self.admin.socket!r}",
                "two different paths",
                "change one of them",
            )
        if self.profiles.segment_max_bytes > self.transport.max_segment_bytes:
            raise problem(
                f"profiles.segment_max_bytes {self.profiles.segment_max_bytes} is above transport.max_segment_bytes "
                f"{self.transport.max_segment_bytes}",
                "profiles.segment_max_bytes <= transport.max_segment_bytes",
                "lower the first or raise the second",
            )
        return self
