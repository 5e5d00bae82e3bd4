# SPDX-License-Identifier: Apache-2.0
"""Devices that need no hardware of their own: those of the tcp provider, as configured, on this host's interfaces."""

from dqplbd.config.models import TcpDeviceConfig, TransportConfig
from dqplbd.engine.engine import DeviceSpec
from dqplbd.inventory.affinity import netdev_numa_node, netdev_pci_path
from dqplbd.inventory.netdev import Netdev

__all__ = ["tcp_spec"]


def tcp_spec(config: TcpDeviceConfig, transport: TransportConfig, netdev: Netdev | None) -> DeviceSpec:
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
