# SPDX-License-Identifier: Apache-2.0
"""From the inventory's RDMA devices to those of the API.  Pure."""

from typing import Final

from dqplbd.admin.model import GidCandidate, LeftOutPort, NearGpu, RdmaLimits, RdmaView
from dqplbd.inventory.affinity import pci_address
from dqplbd.inventory.discover import LeftOut
from dqplbd.inventory.open import LocalDevice

__all__ = ["gid_views", "left_out_views", "rdma_view"]

_NO_LIMIT: Final = 2**62  # drivers say 2^64-1 or so where they have none


def rdma_view(device: LocalDevice) -> RdmaView | None:
    """The RDMA device and port behind a device; None for one of tcp, or when there is no such RDMA device."""
    found, port = device.rdma, device.port
    if found is None:
        return None
    limits = found.limits
    return RdmaView(
        rdma_device=found.name,
        port=port.number if port is not None else device.spec.port,
        transport=found.transport or None,
        driver=found.driver or None,
        firmware=found.firmware or None,
        guid=found.guid or None,
        pci_address=pci_address(found.pci_path) or None,
        gpus=[NearGpu(pci_address=gpu.address, vendor=gpu.vendor, relation=gpu.relation.value) for gpu in found.gpus],
        state=port.state if port is not None else None,
        physical_state=port.physical or None if port is not None else None,
        link_layer=port.link_layer if port is not None else None,
        rate_bps=port.rate_bps if port is not None else None,
        width=port.width or None if port is not None else None,
        active_mtu_bytes=port.mtu_bytes or None if port is not None else None,
        max_mtu_bytes=port.max_mtu_bytes or None if port is not None else None,
        max_message_bytes=port.max_message_bytes or None if port is not None else None,
        completion_timestamps=found.timestamp_mask != 0 if limits is not None else None,
        clock_khz=found.clock_khz or None,
        traffic_class=device.spec.traffic_class,
        service_level=device.spec.service_level,
        limits=RdmaLimits(
            qps=limits.qps,
            qp_requests=limits.qp_requests,
            cqs=limits.cqs,
            cq_entries=limits.cq_entries,
            memory_regions=limits.memory_regions,
            memory_region_bytes=limits.memory_region_bytes if limits.memory_region_bytes < _NO_LIMIT else None,
            srqs=limits.srqs,
            srq_requests=limits.srq_requests,
            reads=limits.reads,
        )
        if limits is not None
        else None,
    )


def gid_views(device: LocalDevice) -> list[GidCandidate]:
    """The GIDs of a device's port with their scores, the best first."""
    if device.gids is None:
        return []
    in_use = device.spec.gid if device.number is not None else ""
    views, used = [], False
    for one in device.gids.table:
        mine = not used and one.usable and str(one.gid) == in_use
        used = used or mine
        views.append(
            GidCandidate(
                gid=str(one.gid),
                index=one.gid.index,
                kind=one.gid.kind.value,
                netdev=one.gid.netdev or None,
                score=one.score,
                in_use=mine,
                reasons=list(one.reasons),
            )
        )
    return views


def left_out_views(left_out: tuple[LeftOut, ...]) -> list[LeftOutPort]:
    """RDMA ports that no device uses."""
    return [LeftOutPort(port=one.port, why=one.why) for one in left_out]
