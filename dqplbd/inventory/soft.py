# SPDX-License-Identifier: Apache-2.0
"""Devices that need no hardware of their own: those of the tcp provider, as configured, on this host's interfaces."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from dqplbd.config.models import DeviceConfig, TransportConfig
from dqplbd.engine.engine import DeviceInfo, DeviceSpec, Engine, EngineError
from dqplbd.inventory.affinity import netdev_numa_node, netdev_pci_path
from dqplbd.inventory.netdev import Netdev, find_netdev
from dqplbd.logs import fields

__all__ = ["LocalDevice", "device_spec", "open_device"]

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LocalDevice:
    """A configured device.

    :ivar number: in the engine; None when it could not be opened, ``error`` then says why.
    :ivar spec: as the engine was told.  :ivar info: as it was last seen.
    :ivar latency_ns: smallest RTT measured over it, 0 before.  :ivar downs: times that it went down.
    """

    config: DeviceConfig
    spec: DeviceSpec
    netdev: Netdev | None = None
    number: int | None = None
    info: DeviceInfo | None = None
    error: str = ""
    latency_ns: int = 0
    downs: int = 0

    @property
    def name(self) -> str:
        """Its name."""
        return self.config.name

    @property
    def rail(self) -> int:
        """Its rail."""
        return self.config.rail


def device_spec(config: DeviceConfig, transport: TransportConfig, netdev: Netdev | None) -> DeviceSpec:
    """What the engine is told of a configured device; what the configuration leaves open is taken from ``netdev``."""
    node = config.numa_node
    if node is None and netdev is not None:
        node = netdev_numa_node(netdev.name)
    return DeviceSpec(
        name=config.name,
        provider=config.provider,
        address=config.address,
        port=config.port,
        rate_bps=config.rate_bps,
        mtu=config.mtu_bytes or (min(netdev.mtu, 65536) if netdev is not None else 0),
        rail=config.rail,
        numa_node=-1 if node is None else node,
        pci_path=netdev_pci_path(netdev.name) if netdev is not None else "",
        heartbeat_ns=round(transport.heartbeat_s * 1e9),
        deadline_ns=round(transport.op_deadline_s * 1e9),
    )


def open_device(
    engine: Engine, config: DeviceConfig, transport: TransportConfig, netdevs: Mapping[str, Netdev]
) -> LocalDevice:
    """Open a device.  One that cannot be opened has its reason in ``error`` and stops nobody else."""
    netdev = find_netdev(config.address, dict(netdevs))
    device = LocalDevice(config, device_spec(config, transport, netdev), netdev)
    try:
        device.number = engine.device_add(device.spec)
        device.info = engine.device(device.number)
    except EngineError as error:
        where = f"interface {netdev.name}" if netdev is not None else "no interface of this host has that address"
        device.error = f"device {config.name} ({config.provider} on {config.address}, {where}): {error}"
        log.error("%s", device.error, extra=fields(device=config.name))
        return device
    if netdev is not None and not netdev.up:
        log.warning("interface %s of device %s is down", netdev.name, config.name)
    if netdev is not None and netdev.speed_bps is not None and config.rate_bps > netdev.speed_bps * 1.05:
        log.warning(
            "device %s: rate_bps is above the speed of interface %s; windows will be too large",
            config.name,
            netdev.name,
            extra=fields(rate_bps=config.rate_bps, speed_bps=netdev.speed_bps),
        )
    log.info(
        "device open",
        extra=fields(
            device=config.name,
            provider=config.provider,
            address=device.info.address,
            rail=config.rail,
            netdev=netdev.name if netdev is not None else None,
            rate_bps=device.info.rate_bps,
            mtu=device.info.mtu,
        ),
    )
    return device
