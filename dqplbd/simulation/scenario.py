# SPDX-License-Identifier: Apache-2.0
"""Models of a scenario's YAML file, and its loader.

A scenario says where the GPUs are, how they are joined, what they send, and which senders are compared.  Every key has
a default, so an empty file is one: all-to-all among 32 GPUs.  Some scenarios come with the package, by name.
"""

import difflib
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, ValidationError, model_validator

from dqplbd.config.document import DocumentError, parse_document
from dqplbd.config.loader import ConfigError, Problem, key_text, read_text
from dqplbd.config.models import ProfilesConfig, Section
from dqplbd.config.types import BitRate, Nanoseconds, Size, problem
from dqplbd.simulation.measures import Shape
from dqplbd.simulation.senders import DEFAULT_SENDERS, Sender, make_sender
from dqplbd.simulation.simulator import FabricSettings
from dqplbd.simulation.workloads import (
    Schedule,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_skewed,
    incast,
    parse_trace,
    permutation,
    reduce_scatter,
    shuffled,
)
from dqplbd.topology.location import PathClass

__all__ = ["Scenario", "builtin_names", "load_scenario", "parse_scenario"]

KIB: Final = 2**10
MIB: Final = 2**20
GBIT: Final = 10**9
US: Final = 1000
_BUILTIN: Final = Path(__file__).parent / "scenarios"


class RegionModel(Section):
    """Where the GPUs are. Each number is of one of the place above it."""

    buildings: int = Field(1, ge=1, le=64, description="Buildings of the region.")
    zones: int = Field(1, ge=1, le=256, description="Zones of a building.")
    racks: int = Field(2, ge=1, le=1024, description="Racks of a zone.")
    hosts: int = Field(2, ge=1, le=256, description="Hosts of a rack.")
    gpus: int = Field(8, ge=1, le=64, description="GPUs of a host, one NIC each.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        total = self.buildings * self.zones * self.racks * self.hosts * self.gpus
        if not 2 <= total <= 16384:
            raise problem(f"the region has {total} GPUs", "2 to 16384", "change one of the five numbers")
        return self


class Oversubscription(Section):
    """What GPUs can send to what the links out of a place carry."""

    rack: float = Field(1.0, ge=0.01, le=1000, description="Out of a rack.")
    zone: float = Field(2.8, ge=0.01, le=1000, description="Out of a zone.")
    building: float = Field(2.8, ge=0.01, le=1000, description="Out of a building.")


class Rtts(Section):
    """Base RTT between GPUs whose nearest common place is this one."""

    rack: Nanoseconds = Field(8 * US, ge=0, le=10**10, description="Within a rack.")
    zone: Nanoseconds = Field(56 * US, ge=0, le=10**10, description="Between racks of a zone.")
    building: Nanoseconds = Field(120 * US, ge=0, le=10**10, description="Between zones of a building.")
    region: Nanoseconds = Field(240 * US, ge=0, le=10**10, description="Between buildings of the region.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.rack <= self.zone <= self.building <= self.region:
            raise problem(
                f"RTTs are {self.rack}, {self.zone}, {self.building} and {self.region} ns",
                "none shorter than that of a nearer class",
            )
        return self


class Ecn(Section):
    """Marks of packets by the queue that they find; counted, since no sender here reacts to them."""

    min_bytes: Size = Field(0, ge=0, le=2**40, description="No marks up to this queue; 0: no marks at all.")
    max_bytes: Size = Field(0, ge=0, le=2**40, description="Every packet is marked above this queue.")
    probability: float = Field(0.1, ge=0, le=1, description="Of a mark just below max_bytes; 0 at min_bytes.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_bytes < self.min_bytes:
            raise problem(f"max_bytes {self.max_bytes} is under min_bytes {self.min_bytes}", "min_bytes <= max_bytes")
        return self


class FabricModel(Section):
    """Switches, links and hosts."""

    planes: int = Field(16, ge=1, le=256, description="Switches of a zone, and of a building: ways through the fabric.")
    nic_rate_bps: BitRate = Field(400 * GBIT, ge=1_000_000, le=10**14, description="Rate of a NIC.")
    oversubscription: Oversubscription = Field(Oversubscription(), description="Of each tier.")
    rtt_ns: Rtts = Field(Rtts(), description="Base RTTs, which give the delays of the links.")
    mtu_bytes: int = Field(4096, ge=256, le=65536, description="Payload of a packet.")
    header_bytes: int = Field(82, ge=0, le=4096, description="What a packet has besides, on the wire.")
    ack_bytes: int = Field(86, ge=1, le=4096, description="An acknowledgement, on the wire.")
    cell_packets: int = Field(
        1, ge=1, le=256, description="Packets that are sent as one: coarser and faster. 1 is exact."
    )
    buffer_bytes: Size = Field(
        0, ge=0, le=2**40, description="Shared buffer of a switch, with pause; 0: unbounded, no pause."
    )
    buffer_alpha: float = Field(0.125, ge=0, le=1024, description="Dynamic threshold of the pause, by ingress link.")
    ecn: Ecn = Field(Ecn(), description="ECN marks.")
    priority: bool = Field(False, description="Acknowledgements and control overtake data in NICs and switches.")
    labels: Literal["hash", "spread"] = Field("hash", description="Queue pairs over planes: by hash, or evenly.")
    nvlink_rate_bps: BitRate = Field(3600 * GBIT, ge=1_000_000, le=10**14, description="Rate of a GPU within its host.")
    nvlink_ns: Nanoseconds = Field(2 * US, ge=0, le=10**9, description="Delay within a host.")
    host_ns: Nanoseconds = Field(1 * US, ge=0, le=10**9, description="Time until software handles a completion.")


class WorkloadModel(Section):
    """What the GPUs send."""

    kind: Literal[
        "all_to_all",
        "all_to_all_skewed",
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "incast",
        "permutation",
        "trace",
    ] = Field("all_to_all", description="The collective.")
    size_bytes: Size = Field(64 * MIB, ge=1, le=2**40, description="Its size, by the conventions of nccl-tests.")
    algorithm: Literal["ring", "recursive"] = Field("ring", description="Of all_gather, reduce_scatter, all_reduce.")
    channels: int = Field(1, ge=1, le=64, description="Rings side by side.")
    skew: float = Field(8.0, gt=0, description="all_to_all_skewed: what the hot receiver draws, times the mean.")
    spread: float = Field(0.5, ge=0, le=4, description="all_to_all_skewed: how unequal the others are.")
    senders: int | None = Field(None, ge=1, description="incast: how many send; by default all others.")
    placement: Literal["packed", "shuffled"] = Field(
        "packed", description="Ranks to GPUs: in order, neighbours side by side; or at random."
    )
    file: str | None = Field(None, min_length=1, description="trace: lines of start_ns,from,to,bytes[,after].")
    receives_ahead: int = Field(16, ge=1, le=4096, description="Receives that are posted ahead, a pair of GPUs.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.kind == "trace") != (self.file is not None):
            raise problem(f"kind is {self.kind}, file is {self.file!r}", "a file for a trace, and for nothing else")
        return self


class Scenario(Section):
    """One comparison."""

    title: str = Field("", max_length=200, description="For people.")
    region: RegionModel = Field(RegionModel(), description="Where the GPUs are.")
    fabric: FabricModel = Field(FabricModel(), description="How they are joined.")
    workload: WorkloadModel = Field(WorkloadModel(), description="What they send.")
    senders: tuple[str, ...] = Field(DEFAULT_SENDERS, min_length=1, max_length=64, description="What is compared.")
    profiles: ProfilesConfig = Field(
        ProfilesConfig(), description="The profile rule, as in the daemon's configuration."
    )
    queue_depth: int = Field(256, ge=16, le=4096, description="Segments that one queue pair can hold.")
    max_qps: int = Field(64, ge=1, le=128, description="Most data queue pairs of one virtual connection.")
    control_credits: int = Field(64, ge=4, le=1024, description="Control packets under way to one end.")
    seed: int = Field(1, ge=0, le=2**63 - 1, description="Of flow labels and of everything random in the workload.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in self.senders:
            try:
                self.sender(name, 1)
            except ValueError as error:
                text = str(error)
                what, _, expected = text.partition(": expected ")
                raise problem(what, expected or "a sender") from None
        if self.workload.kind != "trace":
            try:
                self.schedule()
            except ValueError as error:
                what, _, expected = str(error).partition(": expected ")
                raise problem(
                    f"workload: {what}", expected or "another one", "change the workload or the region"
                ) from None
        return self

    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        """Buildings, zones of each, racks of each, hosts of each, GPUs of each."""
        region = self.region
        return region.buildings, region.zones, region.racks, region.hosts, region.gpus

    @property
    def rtts(self) -> dict[PathClass, int]:
        """Base RTT by class."""
        rtt = self.fabric.rtt_ns
        return {
            PathClass.RACK: rtt.rack,
            PathClass.ZONE: rtt.zone,
            PathClass.BUILDING: rtt.building,
            PathClass.REGION: rtt.region,
        }

    def shape(self) -> Shape:
        """What the fabric could carry."""
        fabric, over = self.fabric, self.fabric.oversubscription
        efficiency = fabric.mtu_bytes / (fabric.mtu_bytes + fabric.header_bytes)
        return Shape(
            self.counts, fabric.nic_rate_bps, (over.rack, over.zone, over.building), fabric.nvlink_rate_bps, efficiency
        )

    def settings(self) -> FabricSettings:
        """The fabric for the simulator."""
        fabric, over = self.fabric, self.fabric.oversubscription
        return FabricSettings(
            self.counts,
            fabric.planes,
            fabric.nic_rate_bps,
            (over.rack, over.zone, over.building),
            self.rtts,
            fabric.mtu_bytes,
            fabric.header_bytes,
            fabric.ack_bytes,
            fabric.cell_packets,
            fabric.buffer_bytes,
            fabric.buffer_alpha,
            fabric.ecn.min_bytes,
            fabric.ecn.max_bytes,
            fabric.ecn.probability,
            fabric.nvlink_rate_bps,
            fabric.nvlink_ns,
            fabric.host_ns,
            fabric.priority,
            fabric.labels == "spread",
            self.workload.receives_ahead,
            self.queue_depth,
            self.control_credits,
        )

    def schedule(self, folder: Path | None = None) -> Schedule:
        """The messages of the workload, from GPU to GPU.

        :param folder: that the name of a trace file is relative to.
        :raises ValueError: parameters do not fit the region, or the trace is wrong.
        :raises ConfigError: the trace cannot be read.
        """
        by_rank = self._by_rank(folder)
        return by_rank if self.workload.placement == "packed" else shuffled(by_rank, self.shape().gpus, self.seed)

    def _by_rank(self, folder: Path | None) -> Schedule:
        """The messages of the workload, from rank to rank."""
        work, ranks = self.workload, self.shape().gpus
        size = work.size_bytes
        match work.kind:
            case "all_to_all":
                return all_to_all(ranks, size)
            case "all_to_all_skewed":
                return all_to_all_skewed(ranks, size, work.skew, work.spread, self.seed)
            case "all_gather":
                return all_gather(ranks, size, work.algorithm, work.channels)
            case "reduce_scatter":
                return reduce_scatter(ranks, size, work.algorithm, work.channels)
            case "all_reduce":
                return all_reduce(ranks, size, work.algorithm, work.channels)
            case "incast":
                return incast(ranks, size, work.senders)
            case "permutation":
                return permutation(ranks, size, self.seed)
            case "trace":
                return parse_trace(read_text((folder or Path()) / (work.file or "")), ranks)

    def sender(self, name: str, peers: int) -> Sender:
        """The sender of a name; see :func:`make_sender`."""
        from dqplbd.config.models import TransportConfig
        from dqplbd.profiles.bdp import ProfilePolicy

        fabric = self.fabric
        policy = ProfilePolicy.from_config(
            self.profiles, TransportConfig(max_qps=self.max_qps, queue_depth=self.queue_depth)
        )
        return make_sender(
            name,
            policy,
            self.rtts,
            fabric.nic_rate_bps,
            fabric.mtu_bytes,
            fabric.header_bytes,
            peers,
            self.queue_depth,
            fabric.host_ns,
        )


def builtin_names() -> list[str]:
    """Names of the scenarios that come with the package."""
    return sorted(path.stem for path in _BUILTIN.glob("*.yaml"))


def _keys(path: tuple[int | str, ...]) -> list[str]:
    """Keys of the section that the last step of a path is in."""
    model: Any = Scenario
    for step in path[:-1]:
        known = isinstance(model, type) and issubclass(model, Section)
        field = model.model_fields.get(str(step)) if known else None
        model = field.annotation if field is not None else None
    return sorted(model.model_fields) if isinstance(model, type) and issubclass(model, Section) else []


def parse_scenario(text: str, file: str = "<text>") -> Scenario:
    """The scenario that a text holds; an empty text gives all defaults.

    :param text: YAML.
    :param file: what to call the text in problems.
    :raises ConfigError: with every problem of the text.
    """
    try:
        document = parse_document(text)
    except DocumentError as error:
        key = key_text(error.path)
        raise ConfigError([Problem(file, error.line, key, None, error.problem, error.expected, error.action)]) from None
    data = {} if document.data is None else document.data
    if not isinstance(data, dict):
        raise ConfigError([Problem(file, 1, "", None, "no mapping", "sections such as 'workload:'", "")])
    try:
        return Scenario.model_validate({key: value for key, value in data.items() if value is not None})
    except ValidationError as error:
        problems = []
        for detail in error.errors(include_url=False):
            path = tuple(step for step in detail["loc"] if step != "[key]")
            context: dict[str, Any] = detail.get("ctx", {})
            value = None if isinstance(detail["input"], dict | list | Section) else repr(detail["input"])[:80]
            what, expected, action = "not valid", detail["msg"].removeprefix("Input should be "), "change it"
            if detail["type"] == "dqplbd":
                what, expected, action = context["what"], context["expected"], context["action"]
            elif detail["type"] == "extra_forbidden":
                keys = _keys(path)
                near = difflib.get_close_matches(str(path[-1]), keys, 1)
                what, expected = "unknown key", f"one of {', '.join(keys)}"
                action = f"did you mean {near[0]!r}?" if near else "remove it"
            problems.append(Problem(file, document.line_of(path), key_text(path), value, what, expected, action))
        raise ConfigError(problems) from None


def load_scenario(name: str) -> tuple[Scenario, Path]:
    """The scenario of a file, or one that comes with the package; and the folder it is in.

    :raises ConfigError: the file cannot be read, or with every problem of its content.
    """
    path = Path(name)
    if name in builtin_names() and not path.exists():
        path = _BUILTIN / f"{name}.yaml"
    elif not path.exists():
        near = ", ".join(builtin_names())
        raise ConfigError(
            [Problem(name, None, "", None, "no such file", f"a file, or one of {near}", "check the path")]
        )
    return parse_scenario(read_text(path), str(path)), path.parent
