# SPDX-License-Identifier: Apache-2.0
"""What two daemons tell each other, as pydantic models.  Pure.

``POST /v1/hello`` carries a :class:`Hello` each way.  ``POST /v1/vcs`` carries a :class:`VcRequest` and is answered by
a :class:`VcAnswer`, ``POST /v1/burst`` a :class:`BurstRequest` and is answered by a :class:`BurstLease`.  An error is
an HTTP status of 400 or above with a :class:`Refusal`.  Everything here comes from other machines: lengths, ranges and
patterns are checked before a value is looked at.

64-bit numbers are texts of 16 hexadecimal digits, bytes are hexadecimal.  A key that is not known is ignored, so that
one may be added; a change of meaning raises the protocol version.

**Probe tokens.**  A hello tells the token that the sender's probers want to see.  It keeps strangers from having a
prober answer them; it is no secret of the wire, since probes carry it in the clear, and one token serves all peers of a
device.  It is told to accepted peers alone, never shown, logged or passed on, and changes with each start.
"""

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from dqplbd.topology.location import Location

__all__ = [
    "FEATURES",
    "MAX_BODY_BYTES",
    "PROTOCOL",
    "REQUIRED_FEATURES",
    "BurstLease",
    "BurstRequest",
    "CardError",
    "Hello",
    "HelloDevice",
    "HelloLocation",
    "Limits",
    "Protocol",
    "Refusal",
    "VcAnswer",
    "VcOffer",
    "VcReply",
    "VcRequest",
    "choose_protocol",
    "choose_smaller",
    "epoch_text",
    "missing_features",
    "parse_card",
    "random_u64",
]

MAX_DEVICES: Final = 8
MAX_QPS: Final = 128
MAX_BODY_BYTES: Final = 512 * 1024
"""Largest body: eight rails of 129 endpoints, each 96 bytes in hexadecimal, and room for the rest."""

Hex64 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Endpoint = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2}){1,96}$")]
HostId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,62}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,30}$")]
Feature = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,31}$")]
PlaceName = Annotated[str, StringConstraints(max_length=128)]

FEATURES: Final[tuple[str, ...]] = ("write-imm-16-1-15", "flows", "puts", "grants")
"""What this version can do on a VC.  The first names the split of the immediate data: slot, last, index."""
REQUIRED_FEATURES: Final[tuple[str, ...]] = ("write-imm-16-1-15", "flows")
"""What a peer must be able to do as well."""


class CardError(ValueError):
    """A message that cannot be used; the text names the key, what was found and what was expected."""


class Card(BaseModel):
    """A message, or a part of one."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class Protocol(Card):
    """The versions of this protocol that a host speaks."""

    min: int = Field(ge=1, le=65535)
    max: int = Field(ge=1, le=65535)


PROTOCOL: Final = Protocol(min=1, max=1)


class HelloLocation(Card):
    """Where a host is; places that are not known are left out."""

    region: PlaceName | None = None
    building: PlaceName | None = None
    zone: PlaceName | None = None
    rack: PlaceName | None = None

    def as_location(self) -> Location:
        """The same as a value type.  :raises CardError: a name that is none."""
        try:
            return Location(self.region, self.building, self.zone, self.rack)
        except ValueError as error:
            raise CardError(f"location: {error}") from None


class HelloDevice(Card):
    """A device of the sender.

    :ivar address: its IP address or GID, for people and checks alone.
    :ivar traffic_class: that it sends with; None where it has none.
    :ivar probe_endpoint: where its prober listens; None when it has none.
    :ivar probe_token: what that prober wants to see.
    """

    name: Name
    rail: int = Field(ge=0, le=7)
    provider: Name
    rate_bps: int = Field(ge=1, lt=2**63)
    mtu_bytes: int = Field(ge=1, le=2**20)
    address: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F:.]{2,64}$")] | None = None
    traffic_class: int | None = Field(None, ge=0, le=255)
    probe_endpoint: Endpoint | None = None
    probe_token: Hex64 | None = None


class Hello(Card):
    """Who the sender is.  Its address is where the request came from, with ``api_port``."""

    protocol: Protocol
    host_id: HostId
    epoch: Hex64
    version: Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z.+-]{1,32}$")] = "0"
    api_port: int = Field(ge=1, le=65535)
    location: HelloLocation = HelloLocation()
    devices: Annotated[tuple[HelloDevice, ...], Field(max_length=MAX_DEVICES, strict=False)] = ()


class Limits(Card):
    """Limits of a VC: data QPs, segments outstanding on each, control receives, largest segment."""

    qps: int = Field(ge=1, le=MAX_QPS)
    depth: int = Field(ge=1, le=65536)
    credits: int = Field(ge=1, le=65536)
    segment_bytes: int = Field(ge=128, le=16 * 2**20)


class VcOffer(Card):
    """One VC that the sender has prepared: its device, its limits, and where its QPs are, the control QP's first.

    :ivar existing: VCs on this path that the sender knew when it began, working or being connected.
    """

    rail: int = Field(ge=0, le=7)
    device: Name
    mtu_bytes: int = Field(ge=1, le=2**20)
    existing: int = Field(0, ge=0, le=65535)
    limits: Limits
    endpoints: Annotated[tuple[Endpoint, ...], Field(min_length=2, max_length=MAX_QPS + 1, strict=False)]


class VcRequest(Card):
    """VCs for one host pair, at most one a rail.

    :ivar to_epoch: the life of the receiver that the sender means.
    :ivar attempt: names this exchange in the logs of both.
    """

    protocol: int = Field(ge=1, le=65535)
    from_host_id: HostId
    from_epoch: Hex64
    to_epoch: Hex64
    attempt: Hex64
    features: Annotated[tuple[Feature, ...], Field(max_length=64, strict=False)] = ()
    required: Annotated[tuple[Feature, ...], Field(max_length=64, strict=False)] = ()
    vcs: Annotated[tuple[VcOffer, ...], Field(min_length=1, max_length=MAX_DEVICES, strict=False)]


class VcReply(Card):
    """What the receiver made of one offer: negotiated limits and its own endpoints, or why there is no VC."""

    rail: int = Field(ge=0, le=7)
    error: Annotated[str, StringConstraints(max_length=1024)] | None = None
    device: Name | None = None
    mtu_bytes: int | None = Field(None, ge=1, le=2**20)
    limits: Limits | None = None
    endpoints: Annotated[tuple[Endpoint, ...], Field(max_length=MAX_QPS + 1, strict=False)] = ()


class VcAnswer(Card):
    """The answer to a :class:`VcRequest`: one reply an offer."""

    attempt: Hex64
    vcs: Annotated[tuple[VcReply, ...], Field(max_length=MAX_DEVICES, strict=False)]


class BurstRequest(Card):
    """A host wants to measure the bandwidth to the receiver, with messages to a listener that it opens for that.

    :ivar rail: of the devices between which.
    :ivar messages: how many, of ``message_bytes`` bytes each.
    """

    protocol: int = Field(ge=1, le=65535)
    from_host_id: HostId
    from_epoch: Hex64
    to_epoch: Hex64
    rail: int = Field(ge=0, le=7)
    messages: int = Field(ge=1, le=64)
    message_bytes: int = Field(ge=4096, le=16 * 2**20)


class BurstLease(Card):
    """The receiver is ready for one burst.

    :ivar handle: of its listener.
    :ivar lease: tag of the messages.
    """

    handle: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{256}$")]
    lease: Hex64


RefusalCode = Literal[
    "malformed",  # 400: not such a message
    "forbidden",  # 403: this host does not accept that one, or that request
    "version",  # 409: no common protocol version, or a feature is missing
    "yield",  # 409: this host's own exchange goes first; wait for it
    "conflict",  # 409: another live host has this host_id
    "epoch",  # 410: the receiver has another epoch, which `epoch` tells
    "unknown",  # 412: say hello first
    "busy",  # 429: too many peers or VCs; or no time for a burst now
    "failed",  # 500: the receiver's own trouble
]


class Refusal(Card):
    """Why a request was refused."""

    code: RefusalCode
    error: Annotated[str, StringConstraints(max_length=2048)]
    epoch: Hex64 | None = None


M = TypeVar("M", bound=Card)


def parse_card(model: type[M], body: bytes) -> M:
    """A body as a message.

    :raises CardError: too long, not JSON, or not such a message; names at most three wrong keys.
    """
    if len(body) > MAX_BODY_BYTES:
        raise CardError(f"body of more than {MAX_BODY_BYTES} bytes")
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        details: Sequence[Any] = error.errors(include_url=False, include_context=False)
        texts = []
        for detail in details[:3]:
            key = ".".join(str(step)[:40] for step in detail["loc"][:8]) or "body"
            texts.append(f"{key}: {detail['msg'][:200]}")
        more = f" (and {len(details) - 3} more)" if len(details) > 3 else ""
        raise CardError("; ".join(texts) + more) from None


def choose_protocol(ours: Protocol, theirs: Protocol) -> int:
    """The newest version that both speak.

    :raises CardError: there is none; names both ranges.
    """
    version = min(ours.max, theirs.max)
    if version < max(ours.min, theirs.min):
        raise CardError(
            f"no common protocol version: this host speaks {ours.min}..{ours.max}, the peer "
            f"{theirs.min}..{theirs.max}; bring the older of the two up to date"
        )
    return version


def missing_features(request: VcRequest) -> str:
    """What keeps both ends from working together, as a text that names both lists; empty when nothing does."""
    lacking = [name for name in request.required if name not in FEATURES]
    if lacking:
        return f"the peer requires {', '.join(lacking)}; this host offers {', '.join(FEATURES)}"
    lacking = [name for name in REQUIRED_FEATURES if name not in request.features]
    if lacking:
        return f"this host requires {', '.join(lacking)}; the peer offers {', '.join(request.features) or 'nothing'}"
    return ""


def choose_smaller(ours: Limits, theirs: Limits) -> Limits:
    """Limits that both can keep."""
    return Limits(
        qps=min(ours.qps, theirs.qps),
        depth=min(ours.depth, theirs.depth),
        credits=min(ours.credits, theirs.credits),
        segment_bytes=min(ours.segment_bytes, theirs.segment_bytes),
    )


def epoch_text(epoch: int) -> str:
    """A 64-bit number as 16 hexadecimal digits."""
    return f"{epoch:016x}"


def random_u64() -> int:
    """A random 64-bit number that is not 0."""
    return secrets.randbits(64) or 1
