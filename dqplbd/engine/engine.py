# SPDX-License-Identifier: Apache-2.0
"""The only wrapper of the compiled module ``dqplbd.engine._native``: typed values in, typed values out.

Everything that Python may ask of the data plane is here: the engine (``native/engine/engine.h``), the probers
(``native/probe/prober.h``) and the messages of the attach socket (``native/shim/layout.h``).  Sizes, constants and
layouts come from those headers; none is repeated here.  Nothing outside this folder imports the compiled module.

Calls are short (they are carried out by the engine's thread between two passes of its loop, tens of microseconds) and
release the interpreter lock, with one exception: :meth:`Engine.mem_alloc` touches every page it gives out.  All methods
may be called from any thread; a :class:`Prober` from one thread at a time.  Units: bytes, ns, bits a second.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Final, Self

from dqplbd.engine._native import ffi, lib

__all__ = [
    "DEFAULT_RING_ENTRIES",
    "DEVICE_INFO_BYTES",
    "HOST_ID_MAX",
    "LAYOUT_VERSION",
    "MAX_ENDPOINT_BYTES",
    "MAX_RING_ENTRIES",
    "MIN_RING_ENTRIES",
    "REPLY_BYTES",
    "REQUEST_BYTES",
    "Attached",
    "ClientReply",
    "ClientRequest",
    "ClientStats",
    "DeviceChange",
    "DeviceInfo",
    "DeviceSpec",
    "Engine",
    "EngineError",
    "EnginePathClass",
    "EngineProfile",
    "EngineSettings",
    "EngineStats",
    "Event",
    "EventType",
    "LinkSetting",
    "PathStats",
    "ProbeResult",
    "ProbeSample",
    "Prober",
    "ProberStats",
    "RequestError",
    "RequestType",
    "Status",
    "VcLimits",
    "pack_device_infos",
    "pack_reply",
    "pack_request",
    "parse_reply",
    "parse_request",
]


def _field_bytes(struct: str, field: str) -> int:
    """Length of an array member of a struct."""
    return int(dict(ffi.typeof(struct).fields)[field].type.length)


HOST_ID_MAX: Final = _field_bytes("struct dq_engine_config", "host_id") - 1
"""Longest host_id in bytes."""
MAX_ENDPOINT_BYTES: Final = _field_bytes("struct dq_endpoint_blob", "data")
"""Longest endpoint of a QP or a prober."""
REQUEST_BYTES: Final[int] = ffi.sizeof("struct dq_client_request")
REPLY_BYTES: Final[int] = ffi.sizeof("struct dq_client_reply")
DEVICE_INFO_BYTES: Final[int] = ffi.sizeof("struct dq_device_info")
LAYOUT_VERSION: Final[int] = lib.DQ_LAYOUT_VERSION
MIN_RING_ENTRIES: Final[int] = lib.DQ_RING_ENTRIES_MIN
MAX_RING_ENTRIES: Final[int] = lib.DQ_RING_ENTRIES_MAX
DEFAULT_RING_ENTRIES: Final[int] = lib.DQ_RING_ENTRIES_DEFAULT
_MESSAGE_VERSION: Final = 1
_EVENT_BATCH: Final = 64
_SAMPLE_BATCH: Final = 512


class Status(IntEnum):
    """Why an operation of a client, a flow or a VC ended (``enum dq_status``)."""

    OK = lib.DQ_OK
    AGAIN = lib.DQ_ERR_AGAIN
    INVALID = lib.DQ_ERR_INVALID
    NOMEM = lib.DQ_ERR_NOMEM
    CLOSED = lib.DQ_ERR_CLOSED
    CANCELED = lib.DQ_ERR_CANCELED
    PEER_GONE = lib.DQ_ERR_PEER_GONE
    UNREACHABLE = lib.DQ_ERR_UNREACHABLE
    REFUSED = lib.DQ_ERR_REFUSED
    TIMEOUT = lib.DQ_ERR_TIMEOUT
    TOO_LONG = lib.DQ_ERR_TOO_LONG
    REGION = lib.DQ_ERR_REGION
    STALE = lib.DQ_ERR_STALE
    DAEMON = lib.DQ_ERR_DAEMON
    VERSION = lib.DQ_ERR_VERSION
    PERMISSION = lib.DQ_ERR_PERMISSION
    DEVICE = lib.DQ_ERR_DEVICE
    LIMIT = lib.DQ_ERR_LIMIT
    FORKED = lib.DQ_ERR_FORKED
    INTERNAL = lib.DQ_ERR_INTERNAL


class EventType(IntEnum):
    """What an event of the engine says (``enum dq_event_type``)."""

    VC_UP = lib.DQ_EV_VC_UP
    VC_DOWN = lib.DQ_EV_VC_DOWN
    NEED_VC = lib.DQ_EV_NEED_VC
    CLIENT_CUT = lib.DQ_EV_CLIENT_CUT
    CLIENT_GONE = lib.DQ_EV_CLIENT_GONE
    STALL = lib.DQ_EV_STALL
    DEVICE = lib.DQ_EV_DEVICE
    LOG = lib.DQ_EV_LOG


class DeviceChange(IntEnum):
    """What happened to a device (``enum dq_engine_device_change``)."""

    UP = lib.DQ_CHANGE_UP
    DOWN = lib.DQ_CHANGE_DOWN
    ADDRESS = lib.DQ_CHANGE_ADDRESS
    FATAL = lib.DQ_CHANGE_FATAL
    OTHER = lib.DQ_CHANGE_OTHER


class RequestType(IntEnum):
    """What a client asks on its attach socket (``enum dq_request_type``)."""

    ATTACH = lib.DQ_REQ_ATTACH
    DEVICES = lib.DQ_REQ_DEVICES
    MEM_ALLOC = lib.DQ_REQ_MEM_ALLOC
    MEM_DMABUF = lib.DQ_REQ_MEM_DMABUF
    MEM_FREE = lib.DQ_REQ_MEM_FREE
    MEM_SHARE = lib.DQ_REQ_MEM_SHARE
    HINT = lib.DQ_REQ_HINT


class EnginePathClass(IntEnum):
    """Class of a path as clients are told it (``enum dq_path_class``)."""

    UNKNOWN = lib.DQ_CLASS_UNKNOWN
    HOST = lib.DQ_CLASS_HOST
    RACK = lib.DQ_CLASS_RACK
    ZONE = lib.DQ_CLASS_ZONE
    BUILDING = lib.DQ_CLASS_BUILDING
    REGION = lib.DQ_CLASS_REGION


class ProbeResult(IntEnum):
    """How a probe ended (``enum dq_probe_result``); only ``TIMEOUT`` is a loss."""

    OK = lib.DQ_PROBE_OK
    TIMEOUT = lib.DQ_PROBE_TIMEOUT
    SEND_ERROR = lib.DQ_PROBE_SEND_ERROR
    INVALID = lib.DQ_PROBE_INVALID


_STATUS_OF_ERRNO: Final = {
    errno.ENOMEM: Status.NOMEM,
    errno.EDQUOT: Status.NOMEM,
    errno.ENOSPC: Status.LIMIT,
    errno.EMFILE: Status.LIMIT,
    errno.ENFILE: Status.LIMIT,
    errno.EBUSY: Status.LIMIT,
    errno.EPERM: Status.PERMISSION,
    errno.EACCES: Status.PERMISSION,
    errno.ENODEV: Status.DEVICE,
    errno.ETIMEDOUT: Status.TIMEOUT,
    errno.EINVAL: Status.INVALID,
    errno.ENOENT: Status.INVALID,
    errno.EBADF: Status.INVALID,
    errno.ERANGE: Status.INVALID,
    errno.EOVERFLOW: Status.INVALID,
    errno.EOPNOTSUPP: Status.INVALID,
}


class EngineError(Exception):
    """A call that the engine refused.

    :ivar code: positive errno.
    :ivar text: what, which value, what was expected, as the engine says it.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({errno.errorcode.get(code, code)})")
        self.code = code
        self.text = text

    @property
    def status(self) -> Status:
        """The same as a client is told it."""
        return _STATUS_OF_ERRNO.get(self.code, Status.INTERNAL)


class RequestError(ValueError):
    """A datagram of a client that is no request of this version of the attach protocol."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine starts with (``struct dq_engine_config``).

    :ivar host_id: at most 63 bytes.  :ivar epoch: random 64 bit, of this start.
    :ivar cpu: CPU to run on, -1 for any.
    :ivar api_address: packed address of the host-to-host API, 4 or 16 bytes; empty for none.
    :ivar api_scope: scope id of a link-local IPv6 address, else 0.
    """

    host_id: str
    epoch: int
    spin_us: int = 0
    cpu: int = -1
    max_clients: int = 64
    max_flows: int = 65_536
    cancel_deadline_ns: int = 0
    stall_ns: int = 0
    connect_deadline_ns: int = 0
    api_address: bytes = b""
    api_port: int = 0
    api_scope: int = 0


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device to open (``struct dq_engine_device_config``); 0 for rate and MTU asks the device.

    :ivar address: IP address of a tcp device; name of the RDMA device of a verbs device.
    :ivar port: TCP port, 0 for any; port of the RDMA device, 0 for 1.
    :ivar gid: GID that a verbs device uses, as text; empty for the first that can be used.
    :ivar traffic_class: 0..255, :ivar service_level: 0..15, of a verbs device.
    :ivar max_registration_bytes: larger registrations are made in pieces; 0 for the device's own limit.
    """

    name: str
    provider: str
    address: str
    port: int = 0
    rate_bps: int = 0
    mtu: int = 0
    rail: int = 0
    numa_node: int = -1
    pci_path: str = ""
    heartbeat_ns: int = 0
    deadline_ns: int = 0
    gid: str = ""
    traffic_class: int = 0
    service_level: int = 0
    max_registration_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device as it is now (``struct dq_engine_device``)."""

    name: str
    provider: str
    address: str
    rate_bps: int
    max_segment_bytes: int
    noise_ns: int
    mtu: int
    header_bytes: int
    max_qps: int
    max_send_depth: int
    rail: int
    dmabuf: bool
    up: bool
    vcs: int
    qps: int
    memory_regions: int
    grant_budget_bytes: int
    grant_active: int


@dataclass(frozen=True, slots=True)
class LinkSetting:
    """An emulated link; all 0 is none."""

    delay_ns: int = 0
    rate_bps: int = 0
    queue_bytes: int = 0

    @property
    def none(self) -> bool:
        """Whether nothing is emulated."""
        return not (self.delay_ns or self.rate_bps or self.queue_bytes)


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """The numbers that a path runs on (``struct dq_profile``).

    :ivar path_class: an :class:`EnginePathClass`: clients are told of it.
    """

    rtt_ns: int
    rate_bps: int
    window_bytes: int
    floor_bytes: int
    noise_ns: int
    segment_bytes: int
    qps: int
    outstanding_per_qp: int
    adapt: bool
    grants: bool
    ack_timeout_ns: int = 0
    retries: int = 7
    path_class: int = lib.DQ_CLASS_UNKNOWN


@dataclass(frozen=True, slots=True)
class VcLimits:
    """What both ends of a VC agree on (``struct dq_vc_limits``)."""

    qps: int
    depth: int
    credits: int
    segment_bytes: int

    def smaller(self, other: Self) -> "VcLimits":
        """The smaller of each."""
        return VcLimits(*(min(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Event:
    """Something that the engine tells (``struct dq_engine_event``).

    :ivar type: an :class:`EventType`, or a number that this version does not know.
    :ivar change: of a device: a :class:`DeviceChange`, or a number that this version does not know.
    :ivar address: packed address of the peer's host-to-host API; empty when none is known.
    """

    type: int
    status: int = 0
    change: int = 0
    device: int = 0
    path: int = 0
    vc: int = 0
    client: int = 0
    need: int = 0
    rail: int = 0
    epoch: int = 0
    port: int = 0
    address: bytes = b""
    scope: int = 0
    host_id: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class PathStats:
    """Counters and levels of a path (``struct dq_path_stats``); bytes, ns."""

    time_ns: int = 0
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
    inflight_peak_bytes: int = 0
    window_bytes: int = 0
    profile_window_bytes: int = 0
    grant_in_bytes: int = 0
    grant_out_bytes: int = 0
    backlog_bytes: int = 0
    queue_delay_ns: int = 0
    queue_delay_max_ns: int = 0
    window_shrinks: int = 0
    window_grows: int = 0
    window_reroutes: int = 0
    throttled_window_ns: int = 0
    throttled_grant_ns: int = 0
    throttled_qp_ns: int = 0
    throttled_outbound_ns: int = 0
    control_tx_packets: int = 0
    control_rx_packets: int = 0
    link_queue_bytes: int = 0
    link_queue_peak_bytes: int = 0
    vcs: int = 0
    qps: int = 0
    flows: int = 0
    slots_receive: int = 0
    slots_put: int = 0
    receives_waiting: int = 0


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Counters and levels of a client (``struct dq_client_stats``)."""

    name: str = ""
    flows: int = 0
    listeners: int = 0
    memory_regions: int = 0
    requests: int = 0
    slots: int = 0
    memory_bytes: int = 0
    staging_bytes: int = 0
    tx_bytes: int = 0
    rx_bytes: int = 0
    tx_messages: int = 0
    rx_messages: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and levels of the whole engine (``struct dq_engine_stats``)."""

    loops: int = 0
    sleeps: int = 0
    clients_cut: int = 0
    events_dropped: int = 0
    clients: int = 0
    flows: int = 0
    vcs: int = 0
    paths: int = 0
    memory_bytes: int = 0
    staging_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ProbeSample:
    """One probe (``struct dq_probe_sample``); ``time_ns`` is of CLOCK_MONOTONIC."""

    target: int
    result: ProbeResult
    time_ns: int
    rtt_ns: int
    responder_delay_ns: int
    prober_delay_ns: int


@dataclass(frozen=True, slots=True)
class ProberStats:
    """Counters of a prober (``struct dq_prober_stats``).

    ``correction_ns`` is no counter: what is taken off times at present because the thread that reads the clock has to
    wake up first; 0 where the system or the NIC stamps, or where it is not known.
    """

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
    correction_ns: int = 0
    targets: int = 0


@dataclass(frozen=True, slots=True)
class Attached:
    """A client that was added: its id and what its reply carries.  The descriptors are the caller's to close."""

    client: int
    memfd: int
    eventfd: int
    memfd_bytes: int


# ---------------------------------------------------------------------------------------------------------- conversions


def _text(value: Any) -> str:
    return ffi.string(value).decode("utf-8", "replace") if len(value) else ""


def _put_text(struct: Any, field: str, value: str) -> None:
    """:raises EngineError: EINVAL when the text does not fit, as a shortened name could become another's."""
    raw = value.encode()
    room = len(getattr(struct, field))
    if len(raw) >= room or b"\0" in raw:
        raise EngineError(
            errno.EINVAL, f"{field} {value!r} has {len(raw)} bytes; expected at most {room - 1} and no NUL: shorten it"
        )
    ffi.memmove(getattr(struct, field), raw + b"\0", len(raw) + 1)


def _numbers(cls: Any, struct: Any, **given: Any) -> Any:
    """A dataclass from the members of the same names."""
    return cls(**given, **{f.name: getattr(struct, f.name) for f in fields(cls) if f.name not in given})


def _check(code: int, error: Any, what: str) -> None:
    """:raises EngineError: when ``code`` is negative; with the engine's own text where it gave one."""
    if code < 0:
        text = _text(error.text) if error is not None else ""
        raise EngineError(-code, text or f"{what}: {os.strerror(-code)}")


def _profile(profile: EngineProfile) -> Any:
    c = ffi.new("struct dq_profile *")
    for f in fields(profile):
        setattr(c, f.name, int(getattr(profile, f.name)))
    return c


def _link(link: LinkSetting) -> Any:
    return ffi.new("struct dq_link_setting *", [link.delay_ns, link.rate_bps, link.queue_bytes])


def _limits(limits: VcLimits) -> Any:
    return ffi.new("struct dq_vc_limits *", [limits.qps, limits.depth, limits.credits, limits.segment_bytes])


# ------------------------------------------------------------------------------------------------------ attach messages


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request of a client; the numbers mean what ``enum dq_request_type`` says."""

    type: RequestType
    arg0: int
    arg1: int
    arg2: int
    arg3: int
    name: str


def parse_request(data: bytes) -> ClientRequest:
    """A datagram of the attach socket as a request.  What the numbers mean is not checked here.

    :raises RequestError: wrong length, magic, version or type.
    """
    if len(data) != REQUEST_BYTES:
        raise RequestError(f"request has {len(data)} bytes; expected {REQUEST_BYTES}")
    c = ffi.new("struct dq_client_request *")
    ffi.memmove(c, data, REQUEST_BYTES)
    if c.magic != lib.DQ_LAYOUT_MAGIC:
        raise RequestError(f"request has magic {c.magic:#010x}; expected {lib.DQ_LAYOUT_MAGIC:#010x}")
    if c.version != _MESSAGE_VERSION:
        raise RequestError(f"request has message version {c.version}; expected {_MESSAGE_VERSION}")
    try:
        kind = RequestType(c.type)
    except ValueError:
        raise RequestError(f"request has type {c.type}; expected one of {[int(t) for t in RequestType]}") from None
    return ClientRequest(kind, c.arg0, c.arg1, c.arg2, c.arg3, _text(c.name))


def pack_request(kind: int, arg0: int = 0, arg1: int = 0, arg2: int = 0, arg3: int = 0, name: str = "") -> bytes:
    """A request as a client sends it."""
    c = ffi.new("struct dq_client_request *")
    c.magic, c.version, c.type = lib.DQ_LAYOUT_MAGIC, _MESSAGE_VERSION, kind
    c.arg0, c.arg1, c.arg2, c.arg3 = arg0, arg1, arg2, arg3
    _put_text(c, "name", name)
    return bytes(ffi.buffer(c))


@dataclass(frozen=True, slots=True)
class ClientReply:
    """One reply of the daemon."""

    type: int
    status: Status
    args: tuple[int, int, int, int]
    handle: bytes
    text: str


def pack_reply(
    kind: int,
    status: Status = Status.OK,
    args: Sequence[int] = (),
    *,
    handle: bytes = b"",
    text: str = "",
) -> bytes:
    """A reply to a client.

    :param args: up to four numbers; their meaning depends on ``kind``.
    :param handle: at most 128 bytes.
    :param text: why, when ``status`` is not OK; shortened to what fits.
    """
    c = ffi.new("struct dq_client_reply *")
    c.magic, c.version, c.type, c.status = lib.DQ_LAYOUT_MAGIC, _MESSAGE_VERSION, kind, int(status)
    for name, value in zip(("arg0", "arg1", "arg2", "arg3"), args, strict=False):
        setattr(c, name, value)
    ffi.memmove(c.handle, handle, len(handle))
    raw = text.encode()[: len(c.text) - 1].decode("utf-8", "ignore").encode()
    ffi.memmove(c.text, raw, len(raw))
    return bytes(ffi.buffer(c))


def parse_reply(data: bytes) -> ClientReply:
    """What :func:`pack_reply` made; bytes after it are ignored.

    :raises RequestError: too short, or of another magic or version.
    """
    if len(data) < REPLY_BYTES:
        raise RequestError(f"reply has {len(data)} bytes; expected at least {REPLY_BYTES}")
    c = ffi.new("struct dq_client_reply *")
    ffi.memmove(c, data[:REPLY_BYTES], REPLY_BYTES)
    if c.magic != lib.DQ_LAYOUT_MAGIC or c.version != _MESSAGE_VERSION:
        raise RequestError(f"reply has magic {c.magic:#010x} and version {c.version}")
    args = (c.arg0, c.arg1, c.arg2, c.arg3)
    return ClientReply(c.type, Status(c.status), args, bytes(ffi.buffer(c.handle)), _text(c.text))


def pack_device_infos(devices: Sequence[tuple[DeviceInfo, DeviceSpec, int]]) -> bytes:
    """The list of devices as it follows a reply to DEVICES: (device now, as configured, smallest RTT in ns)."""
    infos = ffi.new("struct dq_device_info[]", len(devices))
    for c, (device, spec, latency_ns) in zip(infos, devices, strict=True):
        _put_text(c, "name", device.name)
        _put_text(c, "provider", device.provider)
        _put_text(c, "pci_path", spec.pci_path)
        c.speed_bps, c.latency_ns, c.rail, c.numa_node = device.rate_bps, latency_ns, device.rail, spec.numa_node
        c.mtu, c.dmabuf, c.up = device.mtu, device.dmabuf, device.up
        c.port = (spec.port or 1) if device.provider.endswith("verbs") else 0
    return bytes(ffi.buffer(infos))


# --------------------------------------------------------------------------------------------------------------- prober


class Prober:
    """The prober of one device (``native/probe/prober.h``): its own thread measures round-trip times.

    Results wait in a ring until :meth:`drain`; :meth:`fileno` is readable when there are some.
    """

    def __init__(self, handle: Any) -> None:
        self._p = handle
        self._out = ffi.new("struct dq_probe_sample[]", _SAMPLE_BATCH)

    def _live(self) -> Any:
        if self._p is None:
            raise EngineError(errno.EBADF, "the prober was stopped")
        return self._p

    def stop(self) -> None:
        """End its thread and free it; a second call does nothing."""
        if self._p is not None:
            handle, self._p = self._p, None
            lib.dq_prober_stop(handle)

    def fileno(self) -> int:
        """An eventfd that is readable when samples wait."""
        return int(lib.dq_prober_event_fd(self._live()))

    def endpoint(self) -> bytes:
        """Where peers send their probes; told to them in hello.

        :raises EngineError: it has none.
        """
        out = ffi.new("uint8_t[]", MAX_ENDPOINT_BYTES)
        size = lib.dq_prober_endpoint(self._live(), out)
        _check(size, None, "endpoint of the prober")
        return bytes(ffi.buffer(out, size))

    def set_target(
        self,
        target: int,
        endpoint: bytes,
        token: int,
        link: Any,
        interval_ns: int,
        phase_ns: int = 0,
        flow_label: int = 0,
    ) -> None:
        """Answer a peer's probes from now on, and probe it every ``interval_ns`` (0: only answer).

        :param target: the caller's id of it.
        :param link: of :meth:`Engine.path_link_handle`, or None.
        :param flow_label: of :meth:`Engine.path_flow_label`, so that probes take the way of data.
        :raises EngineError: id or endpoint out of range.
        """
        code = lib.dq_prober_target_set(
            self._live(),
            target,
            endpoint,
            len(endpoint),
            token,
            flow_label,
            ffi.NULL if link is None else link,
            interval_ns,
            phase_ns,
        )
        _check(code, None, f"probe target {target}")

    def remove_target(self, target: int) -> None:
        """Forget a target; when it returns its link is used no more.  An unknown one is no error."""
        code = lib.dq_prober_target_remove(self._live(), target)
        if code not in (-errno.ENOENT, -errno.EINVAL):
            _check(code, None, f"probe target {target}")

    def once(self, target: int) -> None:
        """One extra probe now.

        :raises EngineError: unknown target.
        """
        _check(lib.dq_prober_once(self._live(), target), None, f"probe target {target}")

    def drain(self) -> Iterator[ProbeSample]:
        """The samples that wait, oldest first, each once."""
        while True:
            n = lib.dq_prober_drain(self._live(), self._out, _SAMPLE_BATCH)
            for i in range(max(n, 0)):
                c = self._out[i]
                yield ProbeSample(
                    c.target, ProbeResult(c.result), c.time_ns, c.rtt_ns, c.responder_delay_ns, c.prober_delay_ns
                )
            if n < _SAMPLE_BATCH:
                return

    def stats(self) -> ProberStats:
        """Its counters."""
        c = ffi.new("struct dq_prober_stats *")
        lib.dq_prober_stats(self._live(), c)
        return _numbers(ProberStats, c)  # type: ignore[no-any-return]

    def time_source(self) -> str:
        """What dates its probes: ``completion``, ``kernel``, ``software`` or ``virtual``."""
        return _text_of_pointer(lib.dq_prober_time_source(self._live()))


def _text_of_pointer(pointer: Any) -> str:
    return "" if pointer == ffi.NULL else str(ffi.string(pointer).decode("utf-8", "replace"))


# --------------------------------------------------------------------------------------------------------------- engine


class Engine:
    """The engine of this host.  One a process; :meth:`close` ends its thread and frees everything.

    :raises EngineError: it cannot start.
    """

    def __init__(self, settings: EngineSettings) -> None:
        c = ffi.new("struct dq_engine_config *")
        _put_text(c, "host_id", settings.host_id)
        for name in (
            "epoch",
            "spin_us",
            "cpu",
            "max_clients",
            "max_flows",
            "cancel_deadline_ns",
            "stall_ns",
            "connect_deadline_ns",
            "api_port",
            "api_scope",
        ):
            setattr(c, name, getattr(settings, name))
        c.api_family = {0: 0, 4: 4, 16: 6}[len(settings.api_address)]
        ffi.memmove(c.api_address, settings.api_address, len(settings.api_address))
        out, error = ffi.new("dq_engine **"), ffi.new("struct dq_text *")
        _check(lib.dq_engine_create(c, out, error), error, "engine")
        self._e: Any = out[0]
        self._events = ffi.new("struct dq_engine_event[]", _EVENT_BATCH)

    def _live(self) -> Any:
        if self._e is None:
            raise EngineError(errno.EBADF, "the engine was closed")
        return self._e

    def part(self) -> None:
        """Cut off clients and peers, telling them that the daemon stops."""
        lib.dq_engine_part(self._live())

    def close(self) -> None:
        """Cut off clients and peers and free everything; probers must be stopped.  A second call does nothing."""
        if self._e is not None:
            handle, self._e = self._e, None
            lib.dq_engine_destroy(handle)

    def heartbeat(self) -> int:
        """A number that grows while the engine's loop lives, at least every 500 ms."""
        return int(lib.dq_engine_heartbeat(self._live()))

    def fileno(self) -> int:
        """A descriptor that is readable when events wait."""
        return int(lib.dq_engine_event_fd(self._live()))

    def events(self) -> list[Event]:
        """The events that wait, oldest first, each once."""
        result: list[Event] = []
        while True:
            n = lib.dq_engine_events(self._live(), self._events, _EVENT_BATCH)
            for i in range(max(n, 0)):
                c = self._events[i]
                size = {4: 4, 6: 16}.get(c.family, 0)
                result.append(
                    Event(
                        c.type,
                        c.status,
                        c.change,
                        c.device,
                        c.path,
                        c.vc,
                        c.client,
                        c.need,
                        c.rail,
                        c.epoch,
                        c.port,
                        bytes(ffi.buffer(c.address, size)),
                        c.scope,
                        _text(c.host_id),
                        _text(c.text),
                    )
                )
            if n < _EVENT_BATCH:
                return result

    def stats(self) -> EngineStats:
        """Counters and levels of the engine."""
        c = ffi.new("struct dq_engine_stats *")
        lib.dq_engine_get_stats(self._live(), c)
        return _numbers(EngineStats, c)  # type: ignore[no-any-return]

    # -- devices

    def device_add(self, spec: DeviceSpec) -> int:
        """Open a device.  :returns: its number.  :raises EngineError: with what is wrong with it."""
        c = ffi.new("struct dq_engine_device_config *")
        texts = ("name", "provider", "address", "gid", "pci_path")
        for f in fields(spec):
            if f.name in texts:
                _put_text(c, f.name, getattr(spec, f.name))
            else:
                setattr(c, f.name, getattr(spec, f.name))
        out, error = ffi.new("uint32_t *"), ffi.new("struct dq_text *")
        _check(lib.dq_engine_device_add(self._live(), c, out, error), error, f"device {spec.name}")
        return int(out[0])

    def device(self, device: int) -> DeviceInfo:
        """A device as it is now.  :raises EngineError: unknown."""
        c = ffi.new("struct dq_engine_device *")
        _check(lib.dq_engine_device_get(self._live(), device, c), None, f"device {device}")
        return _numbers(  # type: ignore[no-any-return]
            DeviceInfo,
            c,
            name=_text(c.name),
            provider=_text(c.provider),
            address=_text(c.address),
            dmabuf=bool(c.dmabuf),
            up=bool(c.up),
        )

    def device_readdress(self, device: int, address: str) -> None:
        """Have a device use another local address from now on: a GID, as text.  Its VCs fail, with both in the text.

        With the address in use nothing fails: the port is looked at again, as a change of its MTU is no event.

        :raises EngineError: unknown, no such address, or one that cannot change while the device is open.
        """
        error = ffi.new("struct dq_text *")
        _check(lib.dq_engine_device_readdress(self._live(), device, address.encode(), error), error, f"device {device}")

    def device_latency(self, device: int, latency_ns: int) -> None:
        """Tell clients the smallest RTT that was measured over a device, in ns."""
        code = lib.dq_engine_device_latency(self._live(), device, min(latency_ns, 2**32 - 1))
        _check(code, None, f"device {device}")

    def prober_start(
        self, device: int, token: int, *, timeout_ns: int = 0, answers_per_s: int = 0, max_targets: int = 0
    ) -> Prober:
        """Start the prober of a device.

        :param token: 64 bit that peers must show; told to them in hello.
        :raises EngineError: the device has no datagram endpoint, or it cannot be opened.
        """
        c = ffi.new("struct dq_prober_config *")
        c.token, c.timeout_ns, c.answers_per_second, c.max_targets = token, timeout_ns, answers_per_s, max_targets
        out, error = ffi.new("dq_prober **"), ffi.new("struct dq_text *")
        _check(lib.dq_engine_prober_start(self._live(), device, c, out, error), error, f"prober of device {device}")
        return Prober(out[0])

    # -- paths

    def path_add(self, device: int, host_id: str, epoch: int, link: LinkSetting, profile: EngineProfile) -> int:
        """Make the path from a device to one life of a host.  :returns: its number.  :raises EngineError: refused."""
        out, error = ffi.new("uint32_t *"), ffi.new("struct dq_text *")
        code = lib.dq_engine_path_add(
            self._live(), device, host_id.encode(), epoch, _link(link), _profile(profile), out, error
        )
        _check(code, error, f"path of device {device} to {host_id}")
        return int(out[0])

    def path_remove(self, path: int, status: Status, why: str) -> None:
        """End a path and fail its VCs with a status; its probe target must be gone.  :raises EngineError: unknown."""
        _check(lib.dq_engine_path_remove(self._live(), path, status, why.encode()), None, f"path {path}")

    def path_profile(self, path: int, profile: EngineProfile) -> None:
        """Give a path other numbers; they reach its running VCs.  :raises EngineError: unknown."""
        _check(lib.dq_engine_path_profile(self._live(), path, _profile(profile)), None, f"path {path}")

    def path_link(self, path: int, link: LinkSetting) -> None:
        """Change the emulated link of a path.  :raises EngineError: unknown, or the provider cannot."""
        _check(lib.dq_engine_path_link(self._live(), path, _link(link)), None, f"emulated link of path {path}")

    def path_flow_label(self, path: int) -> int:
        """The flow label of a path's first data QP, 20 bits, for its probes.  :raises EngineError: unknown."""
        label = ffi.new("uint32_t *")
        _check(lib.dq_engine_path_flow_label(self._live(), path, label), None, f"path {path}")
        return int(label[0])

    def path_link_handle(self, path: int) -> Any:
        """The emulated link for :meth:`Prober.set_target`; None when there is none."""
        handle = lib.dq_engine_path_link_handle(self._live(), path)
        return None if handle == ffi.NULL else handle

    def path_stats(self, path: int) -> PathStats:
        """Counters and levels of a path.  :raises EngineError: unknown."""
        c = ffi.new("struct dq_path_stats *")
        _check(lib.dq_engine_path_stats(self._live(), path, c), None, f"path {path}")
        return _numbers(PathStats, c)  # type: ignore[no-any-return]

    def path_reset_peaks(self, path: int) -> None:
        """Start the peaks of a path anew.  :raises EngineError: unknown."""
        _check(lib.dq_engine_path_reset_peaks(self._live(), path), None, f"path {path}")

    # -- VCs

    def vc_prepare(self, path: int, limits: VcLimits) -> tuple[int, list[bytes]]:
        """Create the queue pairs of a VC, ready to receive.

        :returns: its number, and its ``limits.qps + 1`` endpoints, the control QP's first.
        :raises EngineError: a limit or a resource is missing; nothing is left behind.
        """
        out, error = ffi.new("uint32_t *"), ffi.new("struct dq_text *")
        blobs = ffi.new("struct dq_endpoint_blob[]", limits.qps + 1)
        code = lib.dq_engine_vc_prepare(self._live(), path, _limits(limits), out, blobs, error)
        _check(code, error, f"VC of path {path}")
        return int(out[0]), [bytes(ffi.buffer(blob.data, blob.len)) for blob in blobs]

    def vc_connect(self, vc: int, negotiated: VcLimits, endpoints: Sequence[bytes], *, dial: bool) -> None:
        """Connect a prepared VC to the peer's endpoints; VC_UP or VC_DOWN follows.  Exactly one end dials.

        :raises EngineError: an endpoint that the provider cannot use; the VC is still prepared then.
        """
        if len(endpoints) != negotiated.qps + 1:
            raise EngineError(
                errno.EINVAL, f"{len(endpoints)} endpoints for {negotiated.qps} data QPs; expected {negotiated.qps + 1}"
            )
        blobs = ffi.new("struct dq_endpoint_blob[]", len(endpoints))
        for blob, endpoint in zip(blobs, endpoints, strict=True):
            if len(endpoint) > MAX_ENDPOINT_BYTES:
                raise EngineError(
                    errno.EINVAL, f"endpoint of {len(endpoint)} bytes; expected at most {MAX_ENDPOINT_BYTES}"
                )
            blob.len = len(endpoint)
            ffi.memmove(blob.data, endpoint, len(endpoint))
        error = ffi.new("struct dq_text *")
        _check(lib.dq_engine_vc_connect(self._live(), vc, _limits(negotiated), blobs, dial, error), error, f"VC {vc}")

    def vc_close(self, vc: int, status: Status, why: str) -> None:
        """End a VC; its flows get the status.  :raises EngineError: unknown."""
        _check(lib.dq_engine_vc_close(self._live(), vc, status, why.encode()), None, f"VC {vc}")

    def need_failed(self, need: int, status: Status) -> None:
        """Tell the clients that wait for a connection that it cannot be made.  One that is gone is no error."""
        lib.dq_engine_need_failed(self._live(), need, status)

    # -- clients

    def client_add(self, name: str, ring_entries: int, max_memory_bytes: int, max_flows: int) -> Attached:
        """Add a client.  :raises EngineError: a limit or a resource is missing."""
        client, memfd, eventfd = ffi.new("uint32_t *"), ffi.new("int *", -1), ffi.new("int *", -1)
        size, error = ffi.new("uint64_t *"), ffi.new("struct dq_text *")
        code = lib.dq_engine_client_add(
            self._live(), name.encode(), ring_entries, max_memory_bytes, max_flows, client, memfd, eventfd, size, error
        )
        _check(code, error, f"client {name}")
        return Attached(client[0], memfd[0], eventfd[0], size[0])

    def client_remove(self, client: int) -> None:
        """Begin to clean up after a client; CLIENT_GONE follows.  :raises EngineError: unknown."""
        _check(lib.dq_engine_client_remove(self._live(), client), None, f"client {client}")

    def client_handle(self, client: int) -> bytes:
        """The template of its listeners' handles, 128 bytes.  :raises EngineError: unknown."""
        out = ffi.new("uint8_t[]", ffi.sizeof("struct dq_handle"))
        _check(lib.dq_engine_client_handle(self._live(), client, out), None, f"client {client}")
        return bytes(ffi.buffer(out))

    def client_stats(self, client: int) -> ClientStats:
        """Counters and levels of a client.  :raises EngineError: unknown."""
        c = ffi.new("struct dq_client_stats *")
        _check(lib.dq_engine_client_stats(self._live(), client, c), None, f"client {client}")
        return _numbers(ClientStats, c, name=_text(c.name))  # type: ignore[no-any-return]

    def mem_alloc(self, client: int, size: int, *, staging: bool) -> tuple[int, int, int]:
        """Memory for a client.  Touches every page: call it off the event loop when ``size`` is large.

        :returns: (memory id, memfd that is the caller's to close, bytes mapped).
        :raises EngineError: quota or memory is used up.
        """
        mem, fd, mapped = ffi.new("uint32_t *"), ffi.new("int *", -1), ffi.new("uint64_t *")
        error = ffi.new("struct dq_text *")
        code = lib.dq_engine_mem_alloc(self._live(), client, size, staging, mem, fd, mapped, error)
        _check(code, error, f"{size} bytes for client {client}")
        return int(mem[0]), int(fd[0]), int(mapped[0])

    def mem_dmabuf(self, client: int, fd: int, offset: int, size: int) -> int:
        """Register a client's dma-buf; ``fd`` may be closed afterwards.  :returns: memory id.  :raises EngineError:"""
        mem, error = ffi.new("uint32_t *"), ffi.new("struct dq_text *")
        code = lib.dq_engine_mem_dmabuf(self._live(), client, fd, offset, size, mem, error)
        _check(code, error, f"dma-buf of {size} bytes for client {client}")
        return int(mem[0])

    def mem_share(self, client: int, owner: int, owner_mem: int) -> tuple[int, int]:
        """Give a client memory that another client has, too.  Whether they may share is the caller's to know.

        :returns: (memory id of ``client``, usable bytes).
        :raises EngineError: ``owner`` has no such memory that can be shared; quota or memory is used up.
        """
        mem, size, error = ffi.new("uint32_t *"), ffi.new("uint64_t *"), ffi.new("struct dq_text *")
        code = lib.dq_engine_mem_share(self._live(), client, owner, owner_mem, mem, size, error)
        _check(code, error, f"memory {owner_mem} of client {owner} for client {client}")
        return int(mem[0]), int(size[0])

    def mem_free(self, client: int, mem: int) -> None:
        """Release memory of a client; outstanding requests on it are canceled.  :raises EngineError: not its own."""
        _check(lib.dq_engine_mem_free(self._live(), client, mem), None, f"memory {mem} of client {client}")
