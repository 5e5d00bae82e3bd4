# SPDX-License-Identifier: Apache-2.0
"""The devices of this host: from what is configured and found to what the engine has open.

A device is prepared, which asks nobody, then opened, which asks the engine.  One that cannot be either has its reason
in ``error``, and stops nobody else.
"""

import ipaddress
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from dqplbd.config.models import Config, DeviceConfig, RdmaConfig, TcpDeviceConfig, TransportConfig, VerbsDeviceConfig
from dqplbd.engine.engine import DeviceInfo, DeviceSpec, Engine, EngineError
from dqplbd.inventory.gids import Choice, GidKind, GidPolicy, choose_gid, gid_ip
from dqplbd.inventory.netdev import Netdev, Netdevs
from dqplbd.inventory.soft import tcp_spec
from dqplbd.inventory.verbs import RdmaDevice, RdmaInventory, RdmaPort
from dqplbd.logs import fields

__all__ = [
    "LocalDevice",
    "gid_policy",
    "open_device",
    "prepare_device",
    "prepare_devices",
    "reachable_address",
    "see_again",
]

log = logging.getLogger(__name__)

_PCI_PATH_MAX: Final = 159  # bytes that the engine has for it


@dataclass(slots=True, eq=False)
class LocalDevice:
    """A device of this host.

    :ivar number: in the engine; None when it is not open, ``error`` then says why.
    :ivar spec: as the engine was told.  :ivar info: as it was last seen.
    :ivar netdev: the interface that has its address; None when there is none.
    :ivar rdma: the RDMA device, and ``port`` its port, as last seen; None for tcp, and when there is no such one.
    :ivar gids: the GIDs of the port with their scores, and the one in use.
    :ivar trouble: why an open device can reach nobody now; empty when it can.
    :ivar fix: what to do about ``error`` or ``trouble``; empty where that says it, or nobody knows.
    :ivar latency_ns: smallest RTT measured over it, 0 before.
    :ivar downs: times that it went down.  :ivar since_s: when it last went up or down, of the monotonic clock.
    :ivar last_event: what the provider said of the last one.
    """

    config: TcpDeviceConfig | VerbsDeviceConfig
    spec: DeviceSpec
    netdev: Netdev | None = None
    rdma: RdmaDevice | None = None
    port: RdmaPort | None = None
    gids: Choice | None = None
    number: int | None = None
    info: DeviceInfo | None = None
    error: str = ""
    trouble: str = ""
    fix: str = ""
    latency_ns: int = 0
    downs: int = 0
    since_s: float = field(default_factory=time.monotonic)
    last_event: str = ""

    @property
    def name(self) -> str:
        """Its name."""
        return self.config.name

    @property
    def rail(self) -> int:
        """Its rail."""
        return self.config.rail

    @property
    def works(self) -> bool:
        """Whether it can carry data now."""
        return self.info is not None and self.info.up and not self.error and not self.trouble

    @property
    def rate_bps(self) -> int:
        """Link rate: what the open device says, else what is configured or the port says; at least 1."""
        asked = self.info.rate_bps if self.info is not None else 0
        port = self.port.rate_bps if self.port is not None else None
        return asked or self.config.rate_bps or port or 1

    def take_info(self, info: DeviceInfo) -> bool:
        """Take in what the engine says of it now.  :returns: whether it went up or down."""
        was_up = self.info is not None and self.info.up
        self.info = info
        if info.up == was_up:
            return False
        self.since_s = time.monotonic()
        self.downs += was_up
        return True

    @property
    def address(self) -> str:
        """What it is on, for people: the IP address, or the RDMA device and port."""
        if isinstance(self.config, TcpDeviceConfig):
            return self.config.address
        return f"{self.config.rdma_device}/{self.config.port}"


# -------------------------------------------------------------------------------------------------------------- prepare


def gid_policy(rdma: RdmaConfig) -> GidPolicy:
    """What the configuration says of GIDs."""
    return GidPolicy.of(rdma.gid_subnets, rdma.gid_family)


def _verbs_spec(config: VerbsDeviceConfig, rdma: RdmaConfig, transport: TransportConfig) -> DeviceSpec:
    return DeviceSpec(
        name=config.name,
        provider=config.provider,
        address=config.rdma_device,
        port=config.port,
        rate_bps=config.rate_bps or 0,
        mtu=config.mtu_bytes or 0,
        rail=config.rail,
        numa_node=-1 if config.numa_node is None else config.numa_node,
        heartbeat_ns=round(transport.heartbeat_s * 1e9),
        deadline_ns=round(transport.op_deadline_s * 1e9),
        traffic_class=rdma.traffic_class if config.traffic_class is None else config.traffic_class,
        service_level=rdma.service_level if config.service_level is None else config.service_level,
        max_registration_bytes=config.max_registration_bytes or 0,
    )


def _see(device: LocalDevice, config: VerbsDeviceConfig, rdma: RdmaConfig, inventory: RdmaInventory) -> None:
    """Take in what the inventory knows of a verbs device, and choose its GID.

    Sets ``error`` when it cannot be used, and clears it otherwise.
    """
    found = inventory.named(config.rdma_device)
    device.rdma, device.port, device.gids = found, None, None
    what = f"device {config.name} ({config.rdma_device} port {config.port})"
    device.fix = ""
    if found is None:
        names = ", ".join(one.name for one in inventory.devices)
        known = f"this host has {names}" if names else inventory.error
        device.error = f"{what}: there is no such RDMA device; {known}"
        device.fix = inventory.fix or "correct rdma_device (`rdma link` lists them), or load the driver of the card"
        return
    device.port = found.port(config.port)
    if config.numa_node is None and found.numa_node is not None:
        device.spec = replace(device.spec, numa_node=found.numa_node)
    if len(found.pci_path) <= _PCI_PATH_MAX:
        device.spec = replace(device.spec, pci_path=found.pci_path)
    if device.port is not None:
        device.netdev = inventory.netdevs.named(device.port.netdev)
    if found.error:
        device.error = f"{what}: {inventory.error or found.error}"
        device.fix = inventory.fix
        return
    if device.port is None:
        numbers = ", ".join(str(one.number) for one in found.ports) or "none"
        device.error = f"{what}: it has no such port; its ports are: {numbers}"
        device.fix = "correct port"
        return
    pinned = ipaddress.IPv6Address(config.gid) if config.gid is not None else None
    current = ipaddress.IPv6Address(device.spec.gid) if device.spec.gid else None
    device.gids = choose_gid(device.port.gids, gid_policy(rdma), current=current, pinned=pinned)
    chosen = device.gids.gid
    if chosen is None:
        device.error = f"{what}: {device.gids.why}"
        interface = device.port.netdev or "its interface"
        device.fix = (
            f"give {interface} an address"
            if pinned is None
            else f"give {interface} that address again, or correct or leave out gid"
        ) + " (`dqplb devices -o wide`)"
        return
    device.error = ""
    if chosen.netdev:
        device.netdev = inventory.netdevs.named(chosen.netdev)


def see_again(device: LocalDevice, rdma: RdmaConfig, inventory: RdmaInventory) -> None:
    """Take in a newer inventory for a device that is open or not; its GID is chosen again, and is in ``gids``.

    What the engine was told (``spec.gid``) stays as it is: to change that is for the caller.
    """
    config = device.config
    if isinstance(config, TcpDeviceConfig):
        device.netdev = inventory.netdevs.with_address(config.address)
        return
    error, fix, had_trouble = device.error, device.fix, bool(device.trouble)
    _see(device, config, rdma, inventory)
    if device.number is None:
        return
    # An open device fails by its own events; but without an address it reaches nobody.
    device.trouble = device.error if device.gids is not None and device.gids.gid is None else ""
    if bool(device.trouble) != had_trouble:
        device.since_s = time.monotonic()
    device.error = error
    if error or not device.trouble:
        device.fix = fix if error else ""


def prepare_device(
    config: TcpDeviceConfig | VerbsDeviceConfig, rdma: RdmaConfig, transport: TransportConfig, inventory: RdmaInventory
) -> LocalDevice:
    """A device ready to be opened; with ``error`` set where that makes no sense."""
    if isinstance(config, TcpDeviceConfig):
        netdev = inventory.netdevs.with_address(config.address)
        return LocalDevice(config, tcp_spec(config, transport, netdev), netdev)
    device = LocalDevice(config, _verbs_spec(config, rdma, transport))
    _see(device, config, rdma, inventory)
    if device.gids is not None and device.gids.gid is not None:
        device.spec = replace(device.spec, gid=str(device.gids.gid))
    return device


def prepare_devices(config: Config, found: Iterable[DeviceConfig], inventory: RdmaInventory) -> list[LocalDevice]:
    """The configured devices, or those ``found`` where the configuration leaves it to that."""
    return [prepare_device(one, config.rdma, config.transport, inventory) for one in (config.devices or tuple(found))]


def reachable_address(devices: Iterable[LocalDevice], netdevs: Netdevs) -> str | None:
    """An IP address of this host that peers can reach: that of its first device which has one.

    :returns: without a scope; None when no device has any but link-local ones.
    """
    for device in devices:
        if isinstance(device.config, TcpDeviceConfig):
            return str(ipaddress.ip_address(device.config.address))
        chosen = device.gids.gid if device.gids is not None else None
        if chosen is not None and chosen.kind is not GidKind.IB:
            address = gid_ip(chosen.address)
            if not address.is_link_local:
                return str(address)
        netdev = device.netdev
        for text in netdevs.addresses_of(netdev.name) if netdev is not None else ():
            other = ipaddress.ip_address(text)
            if not other.is_link_local and not other.is_loopback:
                return text
    return None


# ----------------------------------------------------------------------------------------------------------------- open


def _warn(device: LocalDevice) -> None:
    """Log what is odd about an open device."""
    netdev, config = device.netdev, device.config
    if netdev is not None and not netdev.up:
        log.warning("interface %s of device %s is down", netdev.name, device.name)
    configured = config.rate_bps or 0
    speed = netdev.speed_bps if netdev is not None else None
    if isinstance(config, VerbsDeviceConfig) and device.port is not None:
        speed = device.port.rate_bps
    if speed is not None and configured > speed * 1.05:
        log.warning(
            "device %s: rate_bps is above the speed of its link; windows will be too large",
            device.name,
            extra=fields(rate_bps=configured, speed_bps=speed, netdev=netdev.name if netdev is not None else None),
        )


def open_device(engine: Engine, device: LocalDevice, quiet: str = "") -> bool:
    """Open a prepared device; one that has an error is left alone.

    :param quiet: an error that was logged before, and need not be again.
    :returns: whether it is open.
    """
    if device.error:
        log.error("%s", device.error, extra=fields(device=device.name, fix=device.fix or None))
        return False
    netdev = device.netdev
    try:
        device.number = engine.device_add(device.spec)
        device.info = engine.device(device.number)
    except EngineError as error:
        where = f"interface {netdev.name}" if netdev is not None else "no interface of this host has that address"
        device.error = f"device {device.name} ({device.config.provider} on {device.address}, {where}): {error}"
        if device.error != quiet:
            log.error("%s", device.error, extra=fields(device=device.name))
        return False
    device.since_s = time.monotonic()
    _warn(device)
    log.info(
        "device open",
        extra=fields(
            device=device.name,
            provider=device.config.provider,
            rdma_device=device.address if device.rdma is not None else None,
            address=device.info.address,
            gid_because=device.gids.why if device.gids is not None else None,
            rail=device.rail,
            netdev=netdev.name if netdev is not None else None,
            rate_bps=device.info.rate_bps,
            mtu=device.info.mtu,
        ),
    )
    return True
