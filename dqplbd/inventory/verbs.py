# SPDX-License-Identifier: Apache-2.0
"""RDMA devices: what they are, their ports and GIDs, and what they can do; through pyverbs and sysfs.

pyverbs comes from the distribution (``python3-pyverbs``).  Where it is absent, the devices in sysfs are still listed,
each with the reason why it cannot be used, and nothing else fails.  The same holds for one device that cannot be
opened.

pyverbs holds the interpreter lock in every call, and a call asks the driver, or the firmware: microseconds to
milliseconds.  So all functions here block, and are for a thread beside that of the event loop.  Asynchronous events are
not watched here but by the provider, since pyverbs would stop the whole interpreter until one comes.

pyverbs 44 has its constants in ``pyverbs.enums``, newer ones in classes of ``pyverbs.libibverbs_enums``.  They are the
numbers of ``infiniband/verbs.h``, which is ABI, so those are used.
"""

import errno
import glob
import importlib
import importlib.metadata
import ipaddress
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from dqplbd.inventory.affinity import Gpu, device_numa_node, device_pci_path, nearest_gpus, pci_address
from dqplbd.inventory.gids import Gid, GidKind
from dqplbd.inventory.netdev import Netdevs

__all__ = [
    "PyverbsError",
    "RdmaDevice",
    "RdmaInventory",
    "RdmaLimits",
    "RdmaPort",
    "load_pyverbs",
    "node_error",
    "read_rdma",
]

_SYS: Final = Path("/sys")
_DEV: Final = Path("/dev/infiniband")
_SYSTEM_PACKAGES: Final = (
    "/usr/lib/python3*/dist-packages",
    "/usr/lib64/python3*/site-packages",
    "/usr/lib/python3*/site-packages",
)

# infiniband/verbs.h
_PORT_STATES: Final = {0: "nop", 1: "down", 2: "init", 3: "armed", 4: "active", 5: "active-defer"}
_LINK_LAYERS: Final = {0: "infiniband", 1: "infiniband", 2: "ethernet"}  # IBV_LINK_LAYER_UNSPECIFIED is InfiniBand
_GID_KINDS: Final = {0: GidKind.IB, 1: GidKind.ROCE_V1, 2: GidKind.ROCE_V2}
_TRANSPORTS: Final = {0: "ib", 1: "iwarp", 2: "usnic", 3: "usnic-udp", 4: "unspecified"}
_SMALLEST_MTU: Final = 128  # IBV_MTU_256 is 1, each next one is twice as large
_LARGEST_MTU_CODE: Final = 5
# infiniband/verbs.h: bits a second of one lane, and lanes, by their codes in a port's attributes.
_LANE_BPS: Final = {
    1: 2_500_000_000,
    2: 5_000_000_000,
    4: 10_000_000_000,
    8: 10_312_500_000,
    16: 14_062_500_000,
    32: 25_781_250_000,
    64: 50_000_000_000,
    128: 100_000_000_000,
    256: 200_000_000_000,
}
_LANES: Final = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}
_PHYS_STATES: Final = {  # InfiniBand architecture, PortInfo:PortPhysicalState
    1: "sleep",
    2: "polling",
    3: "disabled",
    4: "training",
    5: "link-up",
    6: "error-recovery",
    7: "phy-test",
}


class PyverbsError(Exception):
    """pyverbs cannot be used by this interpreter.

    :ivar problem: why.  :ivar fix: what to do.
    """

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}: {fix}")
        self.problem = problem
        self.fix = fix


@dataclass(frozen=True, slots=True)
class RdmaLimits:
    """Most of each that a device has; what it advertises, not what it reaches."""

    qps: int
    qp_requests: int
    cqs: int
    cq_entries: int
    memory_regions: int
    memory_region_bytes: int
    srqs: int
    srq_requests: int
    reads: int


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of an RDMA device.

    :ivar state: ``active``, ``down``, ``init``, ``armed``, ``active-defer`` or ``nop``.
    :ivar physical: ``link-up``, ``polling``, ``disabled``, ...; empty when not known.
    :ivar link_layer: ``ethernet`` or ``infiniband``.
    :ivar rate_bps: bits a second; None when not known.  :ivar width: lanes and speed, such as ``4X NDR``.
    :ivar mtu_bytes: active; the payload of one packet.  :ivar max_mtu_bytes: what the port could have.
    :ivar netdev: the network interface of the port; empty on InfiniBand, or when it is not known.
    """

    number: int
    state: str
    physical: str
    link_layer: str
    rate_bps: int | None
    width: str
    mtu_bytes: int
    max_mtu_bytes: int
    max_message_bytes: int
    netdev: str
    gids: tuple[Gid, ...] = ()

    @property
    def up(self) -> bool:
        """Whether it can carry data."""
        return self.state in ("active", "active-defer")


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """An RDMA device of this host.

    :ivar error: why it cannot be used; empty when it can.  Ports and limits are then what sysfs tells, or nothing.
    :ivar transport: ``ib`` (RoCE as well), ``iwarp``, ...; empty when not known.
    :ivar driver: of its card; empty for a virtual one.
    :ivar pci_path: sysfs path of its card; empty for a virtual one.
    :ivar function_of: RDMA device of the same card that this one is a virtual function of; empty for none.
    :ivar timestamp_mask: of completion time stamps; 0 when it has none.  :ivar clock_khz: what they count.
    """

    name: str
    error: str = ""
    transport: str = ""
    driver: str = ""
    firmware: str = ""
    guid: str = ""
    pci_path: str = ""
    numa_node: int | None = None
    gpus: tuple[Gpu, ...] = ()
    function_of: str = ""
    ports: tuple[RdmaPort, ...] = ()
    limits: RdmaLimits | None = None
    timestamp_mask: int = 0
    clock_khz: int = 0

    def port(self, number: int) -> RdmaPort | None:
        """The port of that number."""
        return next((one for one in self.ports if one.number == number), None)


@dataclass(frozen=True, slots=True)
class RdmaInventory:
    """The RDMA devices of this host, those on PCI first, in the order of their addresses there.

    :ivar error: why there is none, or none can be used: no RDMA core, or no pyverbs; empty when they can.
    :ivar fix: what to do about it.
    """

    devices: tuple[RdmaDevice, ...] = ()
    error: str = ""
    fix: str = ""
    netdevs: Netdevs = field(default_factory=Netdevs)

    def named(self, name: str) -> RdmaDevice | None:
        """The device of that name."""
        return next((one for one in self.devices if one.name == name), None)


# -------------------------------------------------------------------------------------------------------------- pyverbs


def _installed(patterns: Sequence[str]) -> tuple[Path | None, str]:
    """Where the distribution has pyverbs for this version of Python; else for which other one, as a text."""
    tag = sys.implementation.cache_tag or ""
    others = ""
    for folder in sorted(folder for pattern in patterns for folder in glob.glob(pattern)):
        for module in sorted((Path(folder) / "pyverbs").glob("device.*so")):
            abi = module.name.split(".")[1]  # cpython-311-x86_64-linux-gnu, or abi3
            if abi == "abi3" or abi.startswith(f"{tag}-"):
                return Path(folder) / "pyverbs", ""
            others = others or "-".join(abi.split("-")[:2])
    return None, others


def _how_to_get(patterns: Sequence[str] = _SYSTEM_PACKAGES) -> str:
    """How this interpreter gets to see pyverbs."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    place, others = _installed(patterns)
    if place is not None:
        return f"it is installed for Python {version}; let this environment see it: ln -s {place} {_site()}/"
    if others:
        return (
            f"it is installed for {others}, and this is Python {version}: make the environment with the system's "
            "Python: /usr/bin/python3 -m venv --system-site-packages"
        )
    here = "" if sys.prefix == sys.base_prefix else f", then: ln -s /usr/lib/python3/dist-packages/pyverbs {_site()}/"
    return f"install the distribution's package python3-pyverbs{here}"


def _site() -> str:
    return sysconfig.get_path("platlib")


def load_pyverbs() -> tuple[ModuleType, str]:
    """``pyverbs.device`` and the version of pyverbs, empty where it is not told.

    :raises PyverbsError: it cannot be imported.
    """
    try:
        module = importlib.import_module("pyverbs.device")
        importlib.import_module("pyverbs.pyverbs_error")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "pyverbs" and "pyverbs" not in sys.modules:
            raise PyverbsError(f"pyverbs is not there for {sys.executable}", _how_to_get()) from None
        raise PyverbsError(f"pyverbs cannot be used by {sys.executable} ({error})", _how_to_get()) from None
    except ImportError as error:
        text = str(error)
        if "libibverbs" in text or "librdmacm" in text:
            fix = "install libibverbs1 and librdmacm1 (Debian, Ubuntu) or libibverbs and librdmacm (Fedora, RHEL)"
            raise PyverbsError(f"pyverbs cannot be used: {text}", fix) from None
        raise PyverbsError(f"pyverbs cannot be used by {sys.executable} ({text})", _how_to_get()) from None
    try:
        version = importlib.metadata.version("pyverbs")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return module, version


# ---------------------------------------------------------------------------------------------------------------- sysfs


def _text(path: Path) -> str:
    """The content of a sysfs file; empty when it is missing or cannot be read, as EINVAL means."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _code(text: str) -> int:
    """``4: ACTIVE`` as 4; 0 for what is not of that form."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match is not None else 0


def parse_rate(text: str) -> tuple[int | None, str]:
    """``400 Gb/sec (4X NDR)`` as bits a second, and what stands in the brackets; None for what is not of that form."""
    match = re.match(r"(\d+(?:\.\d+)?) Gb/sec(?: \(([^)]*)\))?", text)
    if match is None:
        return None, ""
    return round(float(match[1]) * 1e9) or None, match[2] or ""


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sorts ``rxe2`` before ``rxe10``."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.findall(r"\d+|\D+", name)]


def _order(device: RdmaDevice) -> tuple[bool, str, list[tuple[int, int, str]]]:
    return not device.pci_path, pci_address(device.pci_path), natural_key(device.name)


def _sysfs_netdev(sysfs: Path, port: int) -> str:
    """The network interface of a port, by the files of the card; empty when they do not say."""
    parent = _text(sysfs / "parent")  # rxe, siw
    if parent:
        return parent
    names = _names(sysfs / "device/net")
    for name in names:
        if _text(sysfs / "device/net" / name / "dev_port") == str(port - 1):
            return name
    return names[0] if len(names) == 1 else ""


def _sysfs_gids(folder: Path, netdevs: Netdevs) -> Iterator[Gid]:
    """The GID table of a port by its files.  EINVAL on a type is an empty slot, not an error."""
    for name in sorted(_names(folder / "gids"), key=natural_key):
        kind = _text(folder / "gid_attrs/types" / name)
        if not kind or not name.isdecimal():
            continue
        try:
            address = ipaddress.IPv6Address(_text(folder / "gids" / name))
        except ValueError:
            continue
        netdev = netdevs.named(_text(folder / "gid_attrs/ndevs" / name))
        v1 = GidKind.ROCE_V1 if _text(folder / "link_layer") == "Ethernet" else GidKind.IB
        yield Gid(
            int(name),
            address,
            GidKind.ROCE_V2 if "v2" in kind else v1,
            netdev.name if netdev is not None else "",
            netdev is not None and netdev.up,
        )


def _sysfs_port(sysfs: Path, number: int, netdevs: Netdevs, *, gids: bool) -> RdmaPort:
    folder = sysfs / "ports" / str(number)
    rate, width = parse_rate(_text(folder / "rate"))
    return RdmaPort(
        number=number,
        state=_PORT_STATES.get(_code(_text(folder / "state")), "nop"),
        physical=_PHYS_STATES.get(_code(_text(folder / "phys_state")), ""),
        link_layer="ethernet" if _text(folder / "link_layer") == "Ethernet" else "infiniband",
        rate_bps=rate,
        width=width,
        mtu_bytes=0,
        max_mtu_bytes=0,
        max_message_bytes=0,
        netdev=_sysfs_netdev(sysfs, number),
        gids=tuple(_sysfs_gids(folder, netdevs)) if gids else (),
    )


def _sysfs_device(root: Path, name: str, netdevs: Netdevs, *, gids: bool) -> RdmaDevice:
    """What the files of a device tell; its interface's card counts as its own where it has none, as with rxe."""
    sysfs = root / "class/infiniband" / name
    numbers = sorted(int(one) for one in _names(sysfs / "ports") if one.isdecimal())
    ports = tuple(_sysfs_port(sysfs, number, netdevs, gids=gids) for number in numbers)
    pci, node = device_pci_path(sysfs), device_numa_node(sysfs)
    if not pci and ports and ports[0].netdev:
        card = root / "class/net" / ports[0].netdev
        pci, node = device_pci_path(card), device_numa_node(card)
    function_of = next(iter(_names(sysfs / "device/physfn/infiniband")), "")
    driver = sysfs / "device/driver"
    return RdmaDevice(
        name=name,
        driver=driver.resolve().name if driver.exists() else "",
        firmware=_text(sysfs / "fw_ver"),
        guid=_text(sysfs / "node_guid"),
        pci_path=pci,
        numa_node=node,
        gpus=tuple(nearest_gpus(pci, root)),
        function_of=function_of,
        ports=ports,
    )


def _uverbs_node(root: Path, name: str) -> str:
    """The name of the device node of an RDMA device; empty when it has none."""
    for node in _names(root / "class/infiniband_verbs"):
        if _text(root / "class/infiniband_verbs" / node / "ibdev") == name:
            return node
    return ""


def node_error(name: str, root: Path = _SYS, dev: Path = _DEV) -> str:
    """Why the node of an RDMA device cannot be opened by this process; empty when it can."""
    node = _uverbs_node(root, name)
    if not node:
        return "it has no uverbs node: is the module ib_uverbs loaded?"
    try:
        os.close(os.open(dev / node, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        why = f"{dev / node}: {error.strerror}"
        if error.errno == errno.EPERM:
            return f"{why}; a device cgroup forbids it: allow /dev/infiniband to the container or unit"
        if error.errno == errno.EACCES:
            return f"{why}; the daemon's account must be in the group of that node"
        if error.errno == errno.ENOENT:
            return f"{why}; in a container pass /dev/infiniband to it"
        return why
    return ""


# --------------------------------------------------------------------------------------------------- what pyverbs tells


def _mtu(code: int) -> int:
    return _SMALLEST_MTU << code if 1 <= code <= _LARGEST_MTU_CODE else 0


def _gid(entry: Any, netdevs: Netdevs) -> Gid:
    netdev = netdevs.by_index.get(int(entry.ndev_ifindex))
    text = entry.gid_str() if callable(entry.gid_str) else entry.gid_str
    return Gid(
        int(entry.gid_index),
        ipaddress.IPv6Address(str(text)),
        _GID_KINDS.get(int(entry.gid_type), GidKind.IB),
        netdev.name if netdev is not None else "",
        netdev is not None and netdev.up,
    )


def _port(context: Any, seen: RdmaPort, gids: Sequence[Gid]) -> RdmaPort:
    """A port by what the driver tells, and by sysfs for what that does not tell."""
    attr = context.query_port(seen.number)
    lanes, lane = _LANES.get(int(attr.active_width), 0), _LANE_BPS.get(int(attr.active_speed), 0)
    # sysfs knows speeds that are newer than the field of this structure.
    rate = seen.rate_bps or lanes * lane or None
    netdev = next((gid.netdev for gid in gids if gid.netdev), "")
    return replace(
        seen,
        state=_PORT_STATES.get(int(attr.state), "nop"),
        physical=_PHYS_STATES.get(int(attr.phys_state), seen.physical),
        link_layer=_LINK_LAYERS.get(int(attr.link_layer), "infiniband"),
        rate_bps=rate,
        width=seen.width or (f"{lanes}X" if lanes else ""),
        mtu_bytes=_mtu(int(attr.active_mtu)),
        max_mtu_bytes=_mtu(int(attr.max_mtu)),
        max_message_bytes=int(attr.max_msg_sz),
        netdev=seen.netdev or netdev,
        gids=tuple(gids),
    )


def _gid_tables(context: Any, ports: Sequence[RdmaPort], netdevs: Netdevs) -> dict[int, list[Gid]]:
    """The GIDs of all ports, by port."""
    room = sum(int(context.query_port(port.number).gid_tbl_len) for port in ports)
    found: dict[int, list[Gid]] = {}
    for entry in context.query_gid_table(max(room, 1)):
        found.setdefault(int(entry.port_num), []).append(_gid(entry, netdevs))
    return found


def _open(module: Any, seen: RdmaDevice, transport: int, netdevs: Netdevs) -> RdmaDevice:
    """A device by what its driver tells.  :raises PyverbsError: that of pyverbs; it does not."""
    context = module.Context(name=seen.name)
    try:
        extended = context.query_device_ex()
        attr = extended.orig_attr
        gids = _gid_tables(context, seen.ports, netdevs)
        return replace(
            seen,
            transport=_TRANSPORTS.get(transport, ""),
            ports=tuple(_port(context, port, gids.get(port.number, ())) for port in seen.ports),
            limits=RdmaLimits(
                qps=int(attr.max_qp),
                qp_requests=int(attr.max_qp_wr),
                cqs=int(attr.max_cq),
                cq_entries=int(attr.max_cqe),
                memory_regions=int(attr.max_mr),
                memory_region_bytes=int(attr.max_mr_size),
                srqs=int(attr.max_srq),
                srq_requests=int(attr.max_srq_wr),
                reads=int(attr.max_qp_rd_atom),
            ),
            timestamp_mask=int(extended.completion_timestamp_mask),
            clock_khz=int(extended.hca_core_clock),
        )
    finally:
        context.close()


def read_rdma(netdevs: Netdevs, root: Path = _SYS, dev: Path = _DEV) -> RdmaInventory:
    """All RDMA devices of this host, each opened once for a moment.  Never fails as a whole.

    :param netdevs: interfaces, to tell whose GIDs are up.
    """
    names = _names(root / "class/infiniband")
    if not names:
        core = (root / "class/infiniband").is_dir()
        return RdmaInventory(
            error="this host has no RDMA device" if core else "the kernel has no RDMA device, or no RDMA support",
            fix="load the driver of the network card",
            netdevs=netdevs,
        )
    try:
        module, _ = load_pyverbs()
    except PyverbsError as error:
        seen = [replace(_sysfs_device(root, name, netdevs, gids=True), error=str(error)) for name in names]
        return RdmaInventory(tuple(sorted(seen, key=_order)), error.problem, error.fix, netdevs)
    failure: type[Exception] = importlib.import_module("pyverbs.pyverbs_error").PyverbsError
    transports: dict[str, int] = {}
    problem = ""
    try:
        for one in module.get_device_list():
            name = one.name.decode() if isinstance(one.name, bytes) else str(one.name)
            transports[name] = int(one.transport_type)
    except failure as error:  # no RDMA core, no uverbs
        problem = str(error)
    devices = []
    for name in names:
        seen_device = _sysfs_device(root, name, netdevs, gids=False)
        why = node_error(name, root, dev)
        if not why and name not in transports:
            why = problem or "libibverbs does not list it: install the driver library of the card (ibverbs-providers)"
        if not why:
            try:
                devices.append(_open(module, seen_device, transports[name], netdevs))
                continue
            except failure as error:
                why = str(error)
        devices.append(replace(seen_device, error=why))
    return RdmaInventory(tuple(sorted(devices, key=_order)), netdevs=netdevs)
