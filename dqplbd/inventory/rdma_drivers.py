# SPDX-License-Identifier: Apache-2.0
"""What the counter files of RDMA drivers mean: a table from (driver, file) to a kind of event.  Pure.

A file gives to one kind only, and of files that count the same event twice one is taken, so that nothing is counted
double.  What one event is differs with the driver: a packet sent again (efa, ionic, irdma), a NAK that made the sender
go back (mlx5, mlx4, bnxt_re), or a retry of a queue pair (rxe).  So a device can be compared with itself and with
others of its driver, not with those of another.

Names are those of the kernel, ``drivers/infiniband/hw/*/`` and ``drivers/infiniband/sw/rxe/``, and of the firmware of
ionic; what those of mlx5 mean is in its vendor's "Understanding mlx5 Linux counters", those of ``counters/`` in the
InfiniBand specification (PortCounters).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = ["DRIVERS", "MEANINGS", "STANDARD", "Kind", "Source", "driver_name", "driver_sources"]


class Kind(StrEnum):
    """What happened; :data:`MEANINGS` says it in words."""

    RETRANSMIT = "retransmit"
    OUT_OF_SEQUENCE = "out_of_sequence"
    RECEIVER_NOT_READY = "receiver_not_ready"
    ACK_TIMEOUT = "ack_timeout"
    RETRY_EXCEEDED = "retry_exceeded"
    ECN_MARKED = "ecn_marked"
    CNP_SENT = "cnp_sent"
    CNP_HANDLED = "cnp_handled"
    CNP_IGNORED = "cnp_ignored"
    DISCARD = "discard"
    XMIT_WAIT_TICKS = "xmit_wait_ticks"


MEANINGS: Final[Mapping[Kind, str]] = {
    Kind.RETRANSMIT: "this host sent something again",
    Kind.OUT_OF_SEQUENCE: "something arrived here out of order: what came before it was lost, or took another way",
    Kind.RECEIVER_NOT_READY: "no receive was posted, here or at the peer",
    Kind.ACK_TIMEOUT: "no acknowledgement came in time, and this host asked or sent again",
    Kind.RETRY_EXCEEDED: "a queue pair failed after its last retry",
    Kind.ECN_MARKED: "a packet arrived that a switch had marked: there is congestion on the way here",
    Kind.CNP_SENT: "this host asked a sender to slow down",
    Kind.CNP_HANDLED: "this host was asked to slow down, and did where its congestion control is on",
    Kind.CNP_IGNORED: "this host was asked to slow down and did not: congestion control is off in the adapter",
    Kind.DISCARD: "the adapter dropped a packet: damaged, no room, or no leave to send it",
    Kind.XMIT_WAIT_TICKS: "ticks, of a length that only the device knows, with something to send and no leave to",
}


@dataclass(frozen=True, slots=True)
class Source:
    """Where events of one kind are counted.

    :ivar files: names of files that count the same; the first that there is and that can be read is taken.
    :ivar wraps: it is 32 bits wide in the device and starts over at 0.
    """

    kind: Kind
    files: tuple[str, ...]
    wraps: bool = False


def _sources(wrapping: Mapping[Kind, tuple[str, ...]], wide: Mapping[Kind, tuple[str, ...]]) -> tuple[Source, ...]:
    """A source a name; names with bars between are alternatives."""
    return tuple(
        Source(kind, tuple(name.split("|")), wraps)
        for table, wraps in ((wrapping, True), (wide, False))
        for kind, names in table.items()
        for name in names
    )


# What is behind `device/driver` of an RDMA device.  It is the driver of the card, not always that of the RDMA device.
_NAMES: Final = {
    "mlx5_core": "mlx5",
    "mlx4_core": "mlx4",
    "ice": "irdma",
    "i40e": "irdma",
    "idpf": "irdma",
    "bnxt_en": "bnxt_re",
    "mana": "mana",
    "efa": "efa",
    "hns3": "hns",
    "erdma": "erdma",
    "ionic": "ionic",
    "rdma_rxe": "rxe",
}

DRIVERS: Final[Mapping[str, tuple[Source, ...]]] = {
    "mlx5": _sources(
        {
            Kind.RETRANSMIT: ("packet_seq_err", "implied_nak_seq_err", "roce_adp_retrans"),
            Kind.OUT_OF_SEQUENCE: ("out_of_sequence",),
            Kind.RECEIVER_NOT_READY: ("rnr_nak_retry_err", "out_of_buffer"),
            Kind.ACK_TIMEOUT: ("local_ack_timeout_err", "roce_adp_retrans_to"),
            Kind.RETRY_EXCEEDED: ("req_transport_retries_exceeded", "req_rnr_retries_exceeded"),
        },
        {
            # cc_*: the same by flow steering, off unless somebody switched them on.
            Kind.ECN_MARKED: ("np_ecn_marked_roce_packets|cc_rx_ce_pkts",),
            Kind.CNP_SENT: ("np_cnp_sent|cc_tx_cnp_pkts",),
            Kind.CNP_HANDLED: ("rp_cnp_handled|cc_rx_cnp_pkts",),
            Kind.CNP_IGNORED: ("rp_cnp_ignored",),
            Kind.DISCARD: ("rx_icrc_encapsulated",),
        },
    ),
    "mlx4": _sources(
        {
            Kind.RETRANSMIT: ("sq_num_oos",),  # NAKs for a sequence error, received
            Kind.OUT_OF_SEQUENCE: ("rq_num_oos",),
            Kind.RECEIVER_NOT_READY: ("rq_num_rnr", "sq_num_rnr"),
            Kind.ACK_TIMEOUT: ("sq_num_to",),
            Kind.RETRY_EXCEEDED: ("sq_num_tree", "sq_num_rree"),
        },
        {},
    ),
    # The third generation names its files in plain words, with spaces.
    "irdma": _sources(
        {},
        {
            Kind.RETRANSMIT: ("RetransSegs|tcpRetransSegs",),
            Kind.OUT_OF_SEQUENCE: ("Rcvd Out of order packets",),
            Kind.RECEIVER_NOT_READY: ("RNR sent", "RNR received"),
            Kind.ACK_TIMEOUT: ("RTO",),
            Kind.ECN_MARKED: ("RxECNMrkd",),
            Kind.CNP_SENT: ("cnpSent",),
            Kind.CNP_HANDLED: ("cnpHandled",),
            Kind.CNP_IGNORED: ("cnpIgnored",),
            Kind.DISCARD: ("ip4InDiscards", "ip6InDiscards", "CRC errors"),
        },
    ),
    # Lately it names files as mlx5 does; the older names come second.
    "bnxt_re": _sources(
        {},
        {
            Kind.RETRANSMIT: (
                "packet_seq_err|seq_err_naks_rcvd",
                "implied_nak_seq_err|missing_resp",
                "roce_adp_retrans",
            ),
            Kind.OUT_OF_SEQUENCE: ("out_of_sequence|oos_drop_count",),
            Kind.RECEIVER_NOT_READY: ("rnr_nak_retry_err|rnr_naks_rcvd", "out_of_buffer|rx_out_of_buffer"),
            Kind.ACK_TIMEOUT: ("local_ack_timeout_err|to_retransmits", "roce_adp_retrans_to"),
            Kind.RETRY_EXCEEDED: ("max_retry_exceeded",),
            Kind.ECN_MARKED: ("np_ecn_marked_roce_packets|rx_ecn_marked_pkts",),
            Kind.CNP_SENT: ("np_cnp_sent|np_cnp_pkts|tx_cnp_pkts",),
            Kind.CNP_HANDLED: ("rp_cnp_handled|rx_cnp_pkts",),
            Kind.CNP_IGNORED: ("rp_cnp_ignored",),
            Kind.DISCARD: ("rx_roce_discards", "tx_roce_discards", "rx_icrc_encapsulated"),
        },
    ),
    # CNPs sent and marks are counted for the device, not for its port.
    "mana": _sources(
        {},
        {
            Kind.RETRANSMIT: ("requester_oos_nak", "requester_implicit_nak"),
            Kind.OUT_OF_SEQUENCE: ("responder_oos",),
            Kind.RECEIVER_NOT_READY: ("requester_rnr_nak", "responder_rnr_nak"),
            Kind.ACK_TIMEOUT: ("requester_timeout",),
            Kind.RETRY_EXCEEDED: ("requester_retries_exceeded", "requester_rnr_nak_retries_exceeded"),
            Kind.ECN_MARKED: ("received_ecns",),
            Kind.CNP_SENT: ("sent_cnps",),
            Kind.CNP_HANDLED: ("received_cnps",),
        },
    ),
    "efa": _sources(
        {},
        {
            Kind.RETRANSMIT: ("retrans_pkts",),
            Kind.ACK_TIMEOUT: ("retrans_timeout_events",),
            Kind.RETRY_EXCEEDED: ("unresponsive_remote_events",),
            Kind.DISCARD: ("rx_drops",),
        },
    ),
    "hns": _sources({}, {Kind.CNP_SENT: ("tx_cnp_pkt",), Kind.CNP_HANDLED: ("rx_cnp_pkt",)}),
    "erdma": _sources(
        {},
        {
            Kind.DISCARD: tuple(
                f"{way}_{why}_drop_cnt" for way in ("tx", "rx") for why in ("disable", "bps_limit", "pps_limit")
            )
        },
    ),
    "ionic": _sources(
        {},
        {
            Kind.RETRANSMIT: ("tx_rdma_retx_pkts",),
            Kind.OUT_OF_SEQUENCE: ("resp_rx_outouf_seq",),
            Kind.RECEIVER_NOT_READY: ("req_rx_rnr_retry_err", "resp_rx_outof_buf"),
            Kind.ACK_TIMEOUT: ("tx_rdma_ack_timeout",),
            Kind.RETRY_EXCEEDED: ("req_tx_retry_excd_err",),
            Kind.ECN_MARKED: ("rx_rdma_ecn_pkts",),
            Kind.CNP_SENT: ("tx_rdma_cnp_pkts",),
            Kind.CNP_HANDLED: ("rx_rdma_cnp_pkts",),
            Kind.DISCARD: ("rx_rdma_mtu_discard_pkts",),
        },
    ),
    # rcvd_seq_err is followed by completer_retry_err, and a time-out too; time-outs alone are not counted.
    "rxe": _sources(
        {},
        {
            Kind.RETRANSMIT: ("completer_retry_err",),
            Kind.OUT_OF_SEQUENCE: ("out_of_seq_request",),
            Kind.RECEIVER_NOT_READY: ("rcvd_rnr_err", "send_rnr_err"),
            Kind.RETRY_EXCEEDED: ("retry_exceeded_err", "retry_rnr_exceeded_err"),
            Kind.DISCARD: ("send_err",),
        },
    ),
}

"""Files of ``hw_counters/`` that mean something, by :func:`driver_name`."""

STANDARD: Final = (
    Source(Kind.DISCARD, ("port_xmit_discards",)),
    Source(Kind.XMIT_WAIT_TICKS, ("port_xmit_wait",)),
)
"""Files of ``counters/``, the same for every driver that has them; they stand still at their largest value."""


def driver_name(name: str) -> str:
    """The name of an RDMA driver by that of its card's driver, as behind ``device/driver``; an unknown one stays.

    A sub-function has a driver of its own, ``mlx5_core.sf``, and the counters of the card.
    """
    card = name.split(".")[0]
    return _NAMES.get(card, card)


def driver_sources(driver: str) -> tuple[Source, ...]:
    """Files of ``hw_counters/`` that mean something, by :func:`driver_name`; none for a driver that is not known."""
    return DRIVERS.get(driver, ())
