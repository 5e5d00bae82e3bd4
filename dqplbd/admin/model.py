# SPDX-License-Identifier: Apache-2.0
"""Everything that the admin API and ``dqplb --json`` tell, as pydantic models.  Pure: nothing here reads or sends.

Conventions, the same in all models and in the JSON made of them:

- base units, named by the end of the key: ``_bytes``; ``_bps`` is bits a second; ``_ns`` for times of a path;
  ``_seconds`` for times of a process (ages, waits); ``_ratio`` is 0..1; a key without such an end is a count or a text;
- a value that is not known is ``null``, never 0 or an empty text;
- 64-bit identities (epochs) are texts of 16 hexadecimal digits, since JSON readers may keep only 53 bits of a number;
- counters (``tx_bytes``, ``timeouts``, ...) count from the begin of the object they stand in and only grow;
- a reader ignores keys that it does not know; a key keeps its meaning within one ``schema_version``.

An answer is an :class:`Envelope`: ``{"schema_version": 1, "kind": "paths", "data": [...]}``.

:class:`DaemonView` is what the daemon offers to the server of this API and to the metrics.
"""

from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from dqplbd.topology.location import PathClass

__all__ = [
    "SCHEMA_VERSION",
    "AdminError",
    "BenchLatency",
    "BenchReport",
    "BenchThroughput",
    "Classification",
    "Client",
    "ConfigProblem",
    "ConfigState",
    "ConfigView",
    "DaemonView",
    "Device",
    "DoctorFinding",
    "EngineStats",
    "Envelope",
    "ErrorBody",
    "Estimate",
    "Explanation",
    "ExplanationStep",
    "GidCandidate",
    "LeftOutPort",
    "Live",
    "NearGpu",
    "Path",
    "PathClass",
    "PathProbe",
    "Peer",
    "PeerDevice",
    "Place",
    "ProbeReport",
    "ProbeSample",
    "ProberStats",
    "ProcessStats",
    "Profile",
    "RdmaCounters",
    "RdmaLimits",
    "RdmaView",
    "ReloadReport",
    "ResetReport",
    "Status",
]

SCHEMA_VERSION: Final = 1
"""Raised when a key changes its meaning or goes away; added keys do not raise it."""


class Model(BaseModel):
    """A value of the API: frozen, and open to keys that a newer daemon may add."""

    model_config = ConfigDict(extra="ignore", frozen=True)


T = TypeVar("T")


class Envelope(Model, Generic[T]):
    """What every answer is wrapped in."""

    schema_version: int = SCHEMA_VERSION
    kind: str
    data: T


class ErrorBody(Model):
    """Body of every answer with an HTTP status of 400 or above."""

    error: str = Field(description="What went wrong: names the thing and its value.")
    hint: str = Field("", description="What to do about it.")


class AdminError(Exception):
    """A request that cannot be carried out; raised by the methods of :class:`DaemonView`.

    :ivar status: HTTP status: 400 bad argument, 404 no such peer, 409 not possible in this state, 502 an
        answer that this program does not understand, 503 not now.
    :ivar error: names the thing, its value and what was expected.
    :ivar hint: what to do about it.
    """

    def __init__(self, error: str, hint: str = "", *, status: int = 400) -> None:
        super().__init__(error)
        self.status = status
        self.error = error
        self.hint = hint


# --------------------------------------------------------------------------------------------------------------- status


class Place(Model):
    """Where a host is; null for a place that is not known."""

    region: str | None = None
    building: str | None = None
    zone: str | None = None
    rack: str | None = None


class ConfigProblem(Model):
    """One mistake of a configuration file, as ``dqplbd.config.loader.Problem.as_dict()`` gives it."""

    file: str
    line: int | None = None
    key: str = ""
    value: str | None = None
    problem: str
    expected: str
    action: str = ""

    def text(self) -> str:
        """All of it but what to do, in one line."""
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        key = f"{self.key}: " if self.key else ""
        value = f" (value {self.value})" if self.value is not None and self.value not in self.problem else ""
        return f"{place}: {key}{self.problem}{value}; expected {self.expected}"


class ConfigState(Model):
    """Which configuration is in force."""

    file: str | None = Field(None, description="Null: built-in defaults.")
    loaded_unix_seconds: float = Field(description="When the configuration in force was read.")
    reloads: int = Field(0, description="Reloads that succeeded.")
    reloads_failed: int = Field(0, description="Reloads that were refused; the old configuration stayed.")
    last_reload_ok: bool = True
    problems: list[ConfigProblem] = Field([], description="Of the last reload, when it was refused.")
    restart_needed: list[str] = Field([], description="Keys that changed in the file but need a restart.")


class ProcessStats(Model):
    """The daemon process as the kernel sees it."""

    pid: int
    rss_bytes: int
    cpu_seconds: float = Field(description="User and system time of all threads since the start.")
    open_fds: int
    nofile_limit: int = Field(description="RLIMIT_NOFILE, the soft one.")
    memlock_limit_bytes: int | None = Field(
        description="RLIMIT_MEMLOCK, the soft one; null: no limit, or CAP_IPC_LOCK, for which there is none."
    )
    threads: int
    cpus: int = Field(description="CPUs that the process may run on.")


class EngineStats(Model):
    """The data plane as a whole (dq_engine_stats)."""

    heartbeat_age_seconds: float = Field(description="Since the engine's loop was last seen to move.")
    loops: int = 0
    sleeps: int = 0
    clients_cut: int = Field(0, description="Clients cut off because they broke the protocol.")
    events_dropped: int = 0
    clients: int = 0
    flows: int = 0
    vcs: int = 0
    paths: int = 0
    memory_bytes: int = Field(0, description="Memory of all clients.")
    staging_bytes: int = Field(0, description="The part of it that serves staging.")


State = Literal["starting", "ready", "degraded", "draining"]


class Status(Model):
    """One daemon at a glance."""

    host_id: str
    epoch: str = Field(description="16 hexadecimal digits; new at each start.")
    version: str
    state: State
    reasons: list[str] = Field([], description="Why it is not `ready`; each names the thing and what to do.")
    started_unix_seconds: float
    uptime_seconds: float
    location: Place = Place()
    admin_socket: str
    client_socket: str
    api_address: str | None = Field(None, description="host:port of the host-to-host API, with the real port.")
    metrics_address: str | None = Field(None, description="host:port of the metrics, with the real port.")
    config: ConfigState
    engine: EngineStats
    process: ProcessStats
    devices: int = 0
    devices_up: int = 0
    peers: int = 0
    peers_up: int = 0
    paths_by_class: dict[PathClass, int] = {}
    class_mismatches: int = Field(0, description="Paths whose labels and RTT name different classes.")
    stalls: int = Field(0, description="Stalls of all paths since the start.")
    device_changes: dict[str, int] = Field({}, description="`changes` of all devices.")
    rdma_left_out: list["LeftOutPort"] = Field([], description="RDMA ports that `devices: auto` does not use.")
    rdma_recent: dict[str, int] = Field({}, description="`recent` of the RDMA counters of all devices; empty without.")


# -------------------------------------------------------------------------------------------------------------- devices


class ProberStats(Model):
    """The prober of one device (dq_prober_stats)."""

    time_source: str = Field(description="completion, kernel, software or virtual")
    correction_ns: int = Field(
        0, description="Taken off its times now, for the wake-up of the thread that reads the clock; 0 where none is."
    )
    targets: int = 0
    sent: int = 0
    acked: int = 0
    timeouts: int = 0
    send_errors: int = 0
    invalid: int = 0
    late: int = 0
    answered: int = 0
    refused_token: int = 0
    refused_unknown: int = 0
    refused_rate: int = 0
    malformed: int = 0
    samples_dropped: int = 0


class RdmaCounters(Model):
    """What is known of the counters of an RDMA device; the numbers themselves are in ``rdma_events``."""

    driver: str | None = Field(
        None, description="Whose names its counters have: mlx5, bnxt_re, rxe, ...; null: unknown."
    )
    age_seconds: float | None = Field(None, description="Since they were last read; null: they never were.")
    recent: dict[str, int] = Field({}, description="Events of the last `recent_seconds`, by kind.")
    recent_seconds: float = 0.0
    unreadable: dict[str, str] = Field({}, description="Counters that cannot be read, with the reason.")
    gone: str | None = Field(None, description="Why there is nothing to read any more.")


class LeftOutPort(Model):
    """An RDMA port that is there and not used."""

    port: str = Field(description="RDMA device and port, such as mlx5_0/1.")
    why: str


class NearGpu(Model):
    """A GPU near the card of a device."""

    pci_address: str
    vendor: str
    relation: str = Field(description="The nearest thing both are under: switch, host bridge, numa node or system.")


class RdmaLimits(Model):
    """Most of each that an RDMA device has, as it says; what it reaches can be less."""

    qps: int
    qp_requests: int = Field(description="Work requests of one queue pair.")
    cqs: int
    cq_entries: int
    memory_regions: int
    memory_region_bytes: int | None = Field(None, description="Null: no limit.")
    srqs: int
    srq_requests: int
    reads: int = Field(description="RDMA reads under way of one queue pair.")


class RdmaView(Model):
    """The RDMA device and port behind a device, as last looked at."""

    rdma_device: str
    port: int
    transport: str | None = Field(None, description="ib (RoCE as well), iwarp, ...")
    driver: str | None = None
    firmware: str | None = None
    guid: str | None = None
    pci_address: str | None = None
    gpus: list[NearGpu] = Field([], description="The nearest GPUs.")
    state: str | None = Field(None, description="active, down, init, armed, active-defer or nop.")
    physical_state: str | None = Field(None, description="link-up, polling, disabled, ...")
    link_layer: str | None = Field(None, description="ethernet or infiniband")
    rate_bps: int | None = None
    width: str | None = Field(None, description="Lanes and speed, such as 4X NDR.")
    active_mtu_bytes: int | None = None
    max_mtu_bytes: int | None = None
    max_message_bytes: int | None = None
    completion_timestamps: bool | None = Field(None, description="Whether the NIC stamps completions; null: unknown.")
    clock_khz: int | None = Field(None, description="What those stamps count.")
    traffic_class: int = 0
    service_level: int = 0
    limits: RdmaLimits | None = None


class GidCandidate(Model):
    """A GID of a device's port."""

    gid: str
    index: int = Field(description="In the table of the port, now.")
    kind: str = Field(description="roce_v2, roce_v1 or ib")
    netdev: str | None = None
    score: int = Field(description="The larger the better; 0: cannot be used.")
    in_use: bool = False
    reasons: list[str] = []


DeviceState = Literal["up", "down", "failed"]


class Device(Model):
    """A device that data travels over (dq_engine_device), or one that could not be opened."""

    name: str
    provider: str
    address: str | None = Field(None, description="With the real port.")
    rail: int
    up: bool
    state: DeviceState | None = Field(None, description="failed: not open, or given up by its driver; see `error`.")
    state_seconds: float = Field(0.0, description="Time in this state.")
    error: str | None = Field(None, description="Why it is not usable.")
    fix: str | None = Field(None, description="What to do about it, where that is known.")
    last_event: str | None = Field(None, description="What its provider last told of it.")
    netdev: str | None = Field(None, description="Network interface that has the address.")
    netdev_up: bool | None = None
    netdev_mtu_bytes: int | None = None
    numa_node: int | None = None
    rate_bps: int | None = None
    mtu_bytes: int | None = None
    header_bytes: int | None = Field(None, description="Overhead of a packet.")
    max_segment_bytes: int | None = None
    max_qps: int | None = None
    max_send_depth: int | None = None
    noise_ns: int | None = Field(None, description="Error of completion times that is not the path's doing.")
    dmabuf: bool = False
    vcs: int = 0
    qps: int = 0
    memory_regions: int = 0
    grant_budget_bytes: int = 0
    grant_active: int = Field(0, description="Senders with backlog or recent bytes.")
    downs: int = Field(0, description="Times that it went down since the start.")
    changes: dict[str, int] = Field(
        {}, description="What happened to it since the start: up, down, address, fatal, other; none left out."
    )
    rdma_events: dict[str, int] = Field(
        {},
        description="Events that an RDMA device counted since the start, by kind: retransmit, out_of_sequence, ...; "
        "a kind that its driver does not count is left out.",
    )
    rdma_counters: RdmaCounters | None = Field(None, description="Null: no RDMA device.")
    rdma: RdmaView | None = Field(None, description="Null: no RDMA device.")
    gids: list[GidCandidate] = Field([], description="GIDs of its port, the best first.")
    prober: ProberStats | None = None


# ---------------------------------------------------------------------------------------------------------------- peers


class PeerDevice(Model):
    """A device of a peer, as its hello told."""

    name: str
    rail: int
    provider: str
    rate_bps: int | None = None
    mtu_bytes: int | None = None
    address: str | None = Field(None, description="IP address or GID.")
    traffic_class: int | None = None


PeerSource = Literal["self", "static", "dns", "learned"]
PeerState = Literal["up", "connecting", "down", "refused"]


class Peer(Model):
    """Another host, or this one itself."""

    host_id: str | None = Field(None, description="Null: configured by address and never reached.")
    epoch: str | None = None
    source: PeerSource
    address: str | None = Field(None, description="host:port of its host-to-host API.")
    state: PeerState
    reason: str | None = Field(None, description="Why it is not `up`.")
    since_seconds: float = Field(0.0, description="Time in this state.")
    last_hello_seconds: float | None = Field(None, description="Age of its last good answer.")
    next_try_seconds: float | None = Field(None, description="Until it is asked again.")
    failures: int = Field(0, description="Failed attempts in a row.")
    version: str | None = None
    location: Place = Place()
    devices: list[PeerDevice] = []
    paths: int = 0
    vcs: int = 0
    flows: int = 0


# ---------------------------------------------------------------------------------------------------------------- paths


class Classification(Model):
    """How the class of a path was found."""

    path_class: PathClass
    source: str = Field(description="override, topology_file, labels, rtt or none")
    labels_class: PathClass | None = Field(None, description="What labels say.")
    rtt_class: PathClass | None = Field(None, description="What the RTT says.")
    mismatch: bool = Field(False, description="Labels and RTT name different classes.")
    pending_class: PathClass | None = Field(None, description="Farther class that waits for more windows.")
    pending_windows: int = 0
    changes: int = Field(0, description="Changes of the class since the path began.")
    location: Place = Field(Place(), description="Where the peer is.")
    location_source: str | None = None


class Estimate(Model):
    """What was measured on a path."""

    probed: bool = Field(description="Whether this host probes the path; else a representative's numbers are used.")
    interval_seconds: float | None = None
    rtt_ns: int | None = Field(None, description="Base RTT: windowed minimum.")
    rtt_p50_ns: int | None = None
    rtt_p99_ns: int | None = None
    rtt_last_ns: int | None = None
    responder_delay_p50_ns: int | None = None
    prober_delay_p99_ns: int | None = None
    windows: int = Field(0, description="Full measurement windows that the minimum is over.")
    probes_sent: int = 0
    probes_ok: int = 0
    probes_timeout: int = 0
    probes_send_error: int = 0
    probes_invalid: int = Field(0, description="Answered with impossible times; not a loss.")
    loss_ratio: float | None = Field(None, description="Of the last windows; invalid samples are not losses.")
    last_sample_age_seconds: float | None = None
    goodput_bps: int | None = Field(None, description="Best rate that acknowledged data had lately.")
    goodput_source: Literal["traffic", "burst"] | None = Field(
        None, description="Whether that was traffic of clients or a bandwidth burst."
    )
    burst_bps: int | None = Field(None, description="Best rate of the last bandwidth bursts.")
    bursts_ok: int = Field(0, description="Bandwidth bursts of this host since the path began.")
    bursts_busy: int = Field(0, description="Those that the peer had no time for.")
    bursts_refused: int = Field(0, description="Those that the peer does not take.")
    bursts_failed: int = 0
    burst_bytes: int = Field(0, description="Bytes that they sent.")


class Profile(Model):
    """What was computed for a path."""

    rtt_ns: int
    rtt_source: str = Field(description="measured, class or representative")
    rate_bps: int
    bdp_bytes: int
    window_bytes: int
    segment_bytes: int
    qps: int
    outstanding_per_qp: int
    adapt: bool = True
    grants: bool = True
    limited_by: str = Field(description="What bound the window: bdp, buffer, min, max, pinned, ...")
    limits: dict[str, str] = Field({}, description="The same for each number, by its key here.")
    ack_timeout_ns: int | None = Field(
        None, description="Wait of a new queue pair for an acknowledgement; null: the provider's own."
    )
    retries: int | None = Field(None, description="Times that it sends again before it fails.")


PathState = Literal["idle", "connecting", "up", "failed"]


class Live(Model):
    """What a path carries (dq_path_stats). Counters are those of the path since it began."""

    state: PathState = Field("idle", description="idle: no VC is needed; failed: the last one broke and is made anew.")
    reason: str | None = None
    tx_bps: int | None = Field(None, description="Rate of the last interval, bits a second.")
    rx_bps: int | None = None
    tx_bytes: int = 0
    rx_bytes: int = 0
    tx_segments: int = 0
    rx_segments: int = 0
    tx_messages: int = 0
    rx_messages: int = 0
    duplicates: int = 0
    retransmits: int = 0
    stalls: int = 0
    failures: int = 0
    inflight_bytes: int = 0
    inflight_peak_bytes: int = Field(0, description="Since the peaks were last reset.")
    window_bytes: int = Field(0, description="Now, after adaptation.")
    profile_window_bytes: int = 0
    grant_in_bytes: int | None = Field(None, description="What the peer lets this host have in flight; null: no limit.")
    grant_out_bytes: int | None = Field(None, description="What this host lets the peer have in flight.")
    backlog_bytes: int = Field(0, description="Waiting to be posted.")
    queue_delay_ns: int = Field(0, description="Smallest of the last round trip.")
    queue_delay_max_ns: int = Field(0, description="Largest such since the peaks were last reset.")
    window_shrinks: int = 0
    window_grows: int = 0
    window_reroutes: int = Field(0, description="Times that a longer path, not a queue, was found behind a delay.")
    throttled_window_ns: int = Field(0, description="Time with backlog that the window held back.")
    throttled_grant_ns: int = Field(0, description="The same of the grant.")
    throttled_qp_ns: int = Field(0, description="Of the depth of the queue pairs.")
    throttled_outbound_ns: int = Field(0, description="Of the device's outbound budget.")
    control_tx_packets: int = 0
    control_rx_packets: int = 0
    link_queue_bytes: int = Field(0, description="Queue of the emulated link.")
    link_queue_peak_bytes: int = 0
    vcs: int = 0
    qps: int = 0
    flows: int = 0
    slots_receive: int = 0
    slots_put: int = 0
    receives_waiting: int = Field(0, description="Receives without a slot.")


class Path(Model):
    """From a local device to a device of another host."""

    peer: str = Field(description="host_id of the other end.")
    peer_epoch: str
    device: str
    peer_device: str
    rail: int
    path_id: int = Field(description="Number in the engine; not used again within one epoch of this host.")
    path_class: PathClass
    classification: Classification
    estimate: Estimate
    profile: Profile
    live: Live


class ExplanationStep(Model):
    """One number, or one decision, and how it came about."""

    topic: Literal["measured", "class", "profile"]
    name: str = Field(description="Key of the number, such as window_bytes.")
    value: bool | int | float | str | None = Field(description="In base units.")
    formula: str = Field("", description="In the words of the keys: min(local, peer) * efficiency.")
    substituted: str = Field("", description="The formula with its numbers.")
    limited_by: str = Field("", description="What bound it.")
    note: str = ""


class Explanation(Model):
    """Measured, then class, then every number of the profile, for one path."""

    path: Path
    steps: list[ExplanationStep]
    summary: str = Field("", description="One sentence for people.")


# -------------------------------------------------------------------------------------------------------------- clients


class Client(Model):
    """An attached process (dq_client_stats)."""

    client_id: int
    name: str
    pid: int | None = None
    uid: int | None = None
    gid: int | None = None
    attached_seconds: float = 0.0
    state: Literal["attached", "leaving"] = "attached"
    flows: int = 0
    max_flows: int = 0
    listeners: int = 0
    memory_regions: int = 0
    requests: int = Field(0, description="Taken and not completed.")
    slots: int = 0
    memory_bytes: int = 0
    max_memory_bytes: int = 0
    staging_bytes: int = 0
    tx_bytes: int = 0
    rx_bytes: int = 0
    tx_messages: int = 0
    rx_messages: int = 0


# -------------------------------------------------------------------------------------------------------------- actions


class ProbeSample(Model):
    """One probe."""

    result: Literal["ok", "timeout", "send_error", "invalid"]
    rtt_ns: int | None = None
    responder_delay_ns: int | None = None
    prober_delay_ns: int | None = None


class PathProbe(Model):
    """Extra probes of one path."""

    peer: str
    device: str
    peer_device: str
    path_class: PathClass
    samples: list[ProbeSample]
    rtt_min_ns: int | None = None
    rtt_p50_ns: int | None = None
    rtt_max_ns: int | None = None
    lost: int = Field(0, description="Time-outs and send errors.")


class ProbeReport(Model):
    """What `dqplb probe PEER` tells: one entry a path to that peer."""

    peer: str
    count: int
    paths: list[PathProbe]


class ReloadReport(Model):
    """What came of a reload. When it was refused, the old configuration is still in force."""

    ok: bool
    problems: list[ConfigProblem] = []
    changed: list[str] = Field([], description="Sections that changed and are in force.")
    restart_needed: list[str] = Field([], description="Keys that changed but keep their old value until a restart.")


class ResetReport(Model):
    """What came of a reset of the peaks."""

    paths: int


class ConfigView(Model):
    """The configuration in force, defaults filled in."""

    file: str | None
    config: dict[str, Any]


class DoctorFinding(Model):
    """One check of `dqplb doctor`."""

    check: str = Field(description="Stable name, such as memlock-limit.")
    level: Literal["ok", "warn", "fail", "skip"]
    summary: str = Field(description="What was found, with the values.")
    fix: str = Field("", description="What to do; empty when level is ok.")


# ---------------------------------------------------------------------------------------------------------------- bench


class BenchThroughput(Model):
    """Messages one way, as many outstanding as asked for."""

    memory: Literal["shim", "staged"]
    flows: int
    message_bytes: int
    messages: int
    outstanding: int
    seconds: float
    bytes_per_second: float
    verified: bool = Field(description="The content of the last message of each flow was compared.")


class BenchLatency(Model):
    """Ping-pong of one message."""

    message_bytes: int
    rounds: int
    min_ns: int
    p50_ns: int
    p99_ns: int
    max_ns: int


class BenchReport(Model):
    """What `dqplb bench run` tells."""

    peer: str = Field(description="host_id of the other end, or the socket of its daemon.")
    throughput: list[BenchThroughput] = []
    latency: list[BenchLatency] = []


# ----------------------------------------------------------------------------------------------------------- the daemon


class DaemonView(Protocol):
    """What the daemon offers to the admin API and to the metrics.

    All methods are called on the daemon's event loop, return at once (``probe`` and ``reload`` are awaited) and raise
    :class:`AdminError` for a request that cannot be carried out.  Each returns one consistent picture; none keeps a
    reference to what it returned.
    """

    def status(self) -> Status:
        """The daemon at a glance."""

    def devices(self) -> list[Device]:
        """All configured devices, also those that could not be opened."""

    def peers(self) -> list[Peer]:
        """All known peers, this host included (source ``self``)."""

    def paths(self) -> list[Path]:
        """All paths."""

    def explain(self, peer: str) -> list[Explanation]:
        """One explanation a path to a host.

        :raises AdminError: 404, no such peer, or no path to it yet; the hint names near matches.
        """

    def clients(self) -> list[Client]:
        """All attached processes."""

    def config_view(self) -> ConfigView:
        """The configuration in force."""

    async def probe(self, peer: str, count: int) -> ProbeReport:
        """``count`` (1..1000) extra probes on each path to a host, one after the other.

        :raises AdminError: 404 as for :meth:`explain`; 409 when probing is switched off.
        """

    async def reload(self) -> ReloadReport:
        """Read the file again, as SIGHUP does; a refusal is told in the report, not raised."""

    def reset_peaks(self) -> ResetReport:
        """Start the peaks of all paths anew."""
