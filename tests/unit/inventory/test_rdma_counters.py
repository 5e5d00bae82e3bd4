# SPDX-License-Identifier: Apache-2.0
"""Counters of RDMA devices, on folders like those of sysfs: several drivers, files that refuse, devices that go."""

import errno
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqplbd.inventory import rdma_counters
from dqplbd.inventory.rdma_counters import PortCounters, RdmaCounters, gained, parse_counter
from dqplbd.inventory.rdma_drivers import DRIVERS, MEANINGS, STANDARD, Kind, driver_name, driver_sources

# What the drivers have beside what is counted here: files that no table knows, with names and texts as they occur.
OTHER_FILES = {"lifespan": "10", "duplicate_request": "7", "rx_write_requests": "99", "VL15_dropped": "N/A (no PMA)"}

# Files of hw_counters by driver of the card, as in the sources of the kernel.
TREES = {
    "mlx5_core": "rx_write_requests out_of_buffer out_of_sequence duplicate_request rnr_nak_retry_err packet_seq_err "
    "implied_nak_seq_err local_ack_timeout_err req_transport_retries_exceeded req_rnr_retries_exceeded "
    "roce_adp_retrans roce_adp_retrans_to roce_slow_restart rp_cnp_ignored rp_cnp_handled np_ecn_marked_roce_packets "
    "np_cnp_sent rx_icrc_encapsulated",
    "mlx4_core": "rq_num_lle sq_num_lle rq_num_rnr sq_num_rnr rq_num_oos sq_num_oos rq_num_dup sq_num_to sq_num_tree "
    "sq_num_rree",
    "ice": "ip4InDiscards ip6InDiscards RetransSegs cnpHandled cnpIgnored cnpSent RxECNMrkd",
    "idpf": "ip4InDiscards ip6InDiscards RetransSegs cnpHandled cnpIgnored cnpSent RxECNMrkd RTO",
    "i40e": "ip4InDiscards ip6InDiscards tcpRetransSegs rxVlanErrors",
    "bnxt_en": "active_qps rx_pkts recoverable_errors rx_roce_errors rx_roce_discards to_retransmits "
    "seq_err_naks_rcvd max_retry_exceeded rnr_naks_rcvd missing_resp oos_drop_count rx_out_of_buffer tx_cnp_pkts "
    "rx_cnp_pkts rx_ecn_marked_pkts",
    "mana": "requester_timeout requester_oos_nak requester_rnr_nak responder_rnr_nak responder_oos "
    "responder_dup_request requester_implicit_nak requester_rnr_nak_retries_exceeded requester_retries_exceeded "
    "received_cnps rate_inc_events current_rate tx_bytes",
    "efa": "tx_bytes rx_drops retrans_bytes retrans_pkts retrans_timeout_events unresponsive_remote_events",
    "hns3": "rx_rc_pkt rx_cnp_pkt tx_cnp_pkt rx_err_pkt",
    "erdma": "tx_reqs_cnt tx_disable_drop_cnt tx_bps_limit_drop_cnt tx_pps_limit_drop_cnt rx_disable_drop_cnt "
    "rx_bps_limit_drop_cnt rx_pps_limit_drop_cnt",
    "ionic": "tx_rdma_retx_pkts tx_rdma_ack_timeout req_rx_rnr_retry_err resp_rx_outof_buf resp_rx_outouf_seq "
    "req_tx_retry_excd_err rx_rdma_ecn_pkts rx_rdma_cnp_pkts tx_rdma_cnp_pkts rx_rdma_mtu_discard_pkts",
    "rdma_rxe": "sent_pkts rcvd_pkts duplicate_request out_of_seq_request rcvd_rnr_err send_rnr_err rcvd_seq_err "
    "ack_deferred retry_exceeded_err retry_rnr_exceeded_err completer_retry_err send_err link_downed rdma_sends",
}

# Kinds that each of them counts.
KINDS = {
    "mlx5_core": set(Kind),
    "mlx4_core": {
        Kind.RETRANSMIT,
        Kind.OUT_OF_SEQUENCE,
        Kind.RECEIVER_NOT_READY,
        Kind.ACK_TIMEOUT,
        Kind.RETRY_EXCEEDED,
    },
    "ice": {Kind.RETRANSMIT, Kind.ECN_MARKED, Kind.CNP_SENT, Kind.CNP_HANDLED, Kind.CNP_IGNORED, Kind.DISCARD},
    "idpf": {
        Kind.RETRANSMIT,
        Kind.ACK_TIMEOUT,
        Kind.ECN_MARKED,
        Kind.CNP_SENT,
        Kind.CNP_HANDLED,
        Kind.CNP_IGNORED,
        Kind.DISCARD,
    },
    "i40e": {Kind.RETRANSMIT, Kind.DISCARD},
    "bnxt_en": set(Kind) - {Kind.CNP_IGNORED, Kind.XMIT_WAIT_TICKS},
    "mana": {
        Kind.RETRANSMIT,
        Kind.OUT_OF_SEQUENCE,
        Kind.RECEIVER_NOT_READY,
        Kind.ACK_TIMEOUT,
        Kind.RETRY_EXCEEDED,
        Kind.CNP_HANDLED,
    },
    "efa": {Kind.RETRANSMIT, Kind.ACK_TIMEOUT, Kind.RETRY_EXCEEDED, Kind.DISCARD},
    "hns3": {Kind.CNP_SENT, Kind.CNP_HANDLED},
    "erdma": {Kind.DISCARD},
    "ionic": set(Kind) - {Kind.CNP_IGNORED, Kind.XMIT_WAIT_TICKS},
    "rdma_rxe": {
        Kind.RETRANSMIT,
        Kind.OUT_OF_SEQUENCE,
        Kind.RECEIVER_NOT_READY,
        Kind.RETRY_EXCEEDED,
        Kind.DISCARD,
    },
}
# These have the standard counters, too.
WITH_STANDARD = {"mlx5_core", "mlx4_core"}
KINDS["mlx4_core"] |= {Kind.DISCARD, Kind.XMIT_WAIT_TICKS}


class Sysfs:
    """A folder like /sys, with RDMA devices."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.devices = root / "class/infiniband"
        self.devices.mkdir(parents=True)
        self._made = 0

    def add(self, name: str, driver: str, *, guid: str | None = None, ports: int = 1, value: int = 100) -> Path:
        """A device with all files of its driver, each with the same value."""
        self._made += 1
        place = self.root / f"devices/{self._made}/infiniband/{name}"
        place.mkdir(parents=True)
        (self.devices / name).symlink_to(place)
        (place / "node_guid").write_text((guid or f"0002:c903:0000:{self._made:04x}") + "\n")
        if driver == "rdma_rxe":
            (place / "parent").write_text("eth0\n")
        else:
            # The link that tells the driver: device -> card, card/driver -> bus/pci/drivers/NAME.
            drivers = self.root / f"bus/pci/drivers/{driver}"
            drivers.mkdir(parents=True, exist_ok=True)
            card = self.root / f"devices/{self._made}"
            (place / "device").symlink_to(card)
            (card / "driver").symlink_to(drivers)
        for port in range(1, ports + 1):
            hw = place / f"ports/{port}/hw_counters"
            hw.mkdir(parents=True)
            for file in TREES.get(driver, "").split():
                (hw / file).write_text(f"{value}\n")
            for file, text in OTHER_FILES.items():
                if not (hw / file).exists():
                    (hw / file).write_text(f"{text}\n")
            if driver in WITH_STANDARD:
                standard = place / f"ports/{port}/counters"
                standard.mkdir()
                for file in ("port_xmit_discards", "port_xmit_wait", "port_xmit_data", "symbol_error"):
                    (standard / file).write_text(f"{value}\n")
        return place

    def hw(self, name: str, port: int = 1) -> Path:
        return self.devices / name / f"ports/{port}/hw_counters"

    def reader(self, name: str, port: int = 1) -> PortCounters:
        return PortCounters(name, port, self.devices)


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path / "sys")


def after(reader: PortCounters, change: Callable[[], object]) -> dict[Kind, int]:
    """What is counted for a change between two readings."""
    reader.read(0)
    change()
    reader.read(100)
    return {kind: count for kind, count in reader.events.total.items() if count}


# ------------------------------------------------------------------------------------------------------------- parsing


@given(st.integers(0, 2**64 - 1), st.sampled_from(["", "\n", " \n", "\0"]))
def test_any_count_is_read(value: int, end: str) -> None:
    assert parse_counter(f"{value}{end}".encode()) == value


@given(st.binary(max_size=80))
def test_whatever_a_file_holds_is_a_count_or_an_error_that_says_so(data: bytes) -> None:
    said = ""
    try:
        value = parse_counter(data)
    except ValueError as error:
        said = str(error)
    if said:
        assert said.isascii()
        assert said.endswith("no count") or said == "is empty"
    else:
        assert 0 <= value < 2**64
        assert str(value).encode() in data


@pytest.mark.parametrize(
    "data",
    [
        b"N/A (no PMA)\n",
        b"",
        b"\n",
        b"-1\n",
        b"0x10\n",
        b"1.5\n",
        b"1 2\n",
        b"18446744073709551616\n",
        b"9" * 64,
        b"\xff\xfe",
    ],
)
def test_what_is_no_count_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"no count|is empty"):
        parse_counter(data)


def test_a_counter_of_32_bits_goes_round() -> None:
    assert gained(2**32 - 10, 5, wraps=True) == 15
    assert gained(2**31 + 5, 4, wraps=True) == 2**31 - 1
    assert gained(2**32 - 10, 5, wraps=False) == 5  # set to 0, then 5


def test_a_counter_that_was_set_to_zero_begins_anew() -> None:
    assert gained(1000, 3, wraps=True) == 3
    assert gained(2**31, 0, wraps=True) == 0


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1))
def test_what_goes_round_is_counted_exactly(old: int, more: int) -> None:
    assert gained(old, (old + more) % 2**32, wraps=True) == more


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.booleans())
def test_no_counter_gains_less_than_nothing(old: int, new: int, wraps: bool) -> None:
    assert 0 <= gained(old, new, wraps) <= max(new, 2**32)


# ------------------------------------------------------------------------------------------------------------- drivers


@pytest.mark.parametrize("driver", TREES)
def test_each_driver_counts_what_it_has(sysfs: Sysfs, driver: str) -> None:
    sysfs.add("rdma0", driver)
    reader = sysfs.reader("rdma0")
    reader.read(0)
    events = reader.events
    assert events.driver == driver_name(driver)
    assert set(events.total) == KINDS[driver]
    assert not any(events.total.values()), "what was counted before is not of this daemon"
    assert events.unreadable == {}
    assert events.read_s == 0


@pytest.mark.parametrize("driver", TREES)
def test_each_file_counts_once(sysfs: Sysfs, driver: str) -> None:
    """Each known file, raised by its own amount, adds that amount to one kind."""
    sysfs.add("rdma0", driver)
    known = {file: source.kind for source in driver_sources(driver_name(driver)) for file in source.files}
    reader = sysfs.reader("rdma0")
    reader.read(0)
    expected: dict[Kind, int] = dict.fromkeys(KINDS[driver], 0)
    for i, file in enumerate(TREES[driver].split()):
        (sysfs.hw("rdma0") / file).write_text(f"{100 + (1 << i)}\n")
        if file in known:
            expected[known[file]] += 1 << i
    reader.read(100)
    assert reader.events.total == expected
    assert any(expected.values())


def test_no_file_is_named_twice_in_a_driver() -> None:
    for driver in {driver_name(name) for name in TREES}:
        files = [file for source in (*driver_sources(driver), *STANDARD) for file in source.files]
        assert len(files) == len(set(files)), driver


def test_every_driver_with_files_has_a_tree_here() -> None:
    assert {driver_name(name) for name in TREES} == set(DRIVERS)
    assert all(DRIVERS.values())


def test_every_kind_has_a_meaning_and_a_driver() -> None:
    assert list(MEANINGS) == list(Kind)
    assert {source.kind for sources in (*DRIVERS.values(), STANDARD) for source in sources} == set(Kind)


def test_the_driver_is_not_what_the_name_says(sysfs: Sysfs) -> None:
    sysfs.add("mlx5_0", "bnxt_en")
    reader = sysfs.reader("mlx5_0")
    reader.read(0)
    assert reader.events.driver == "bnxt_re"


def test_a_sub_function_counts_as_its_card(sysfs: Sysfs) -> None:
    assert driver_name("mlx5_core.sf") == "mlx5"


def test_soft_roce_on_a_card_is_soft_roce(sysfs: Sysfs) -> None:
    # Older kernels link a device of soft-RoCE to the card under it.
    place = sysfs.add("rxe0", "mlx5_core")
    (place / "parent").write_text("eth0\n")
    reader = sysfs.reader("rxe0")
    reader.read(0)
    assert reader.events.driver == "rxe"


def test_an_unknown_driver_has_the_standard_counters(sysfs: Sysfs) -> None:
    place = sysfs.add("new0", "new_core")
    (place / "ports/1/counters").mkdir()
    (place / "ports/1/counters/port_xmit_discards").write_text("4\n")
    discards = place / "ports/1/counters/port_xmit_discards"
    assert after(sysfs.reader("new0"), lambda: discards.write_text("9\n")) == {Kind.DISCARD: 5}


def test_counters_of_the_device_serve_one_port_only(sysfs: Sysfs) -> None:
    for name, ports in (("one", 1), ("two", 2)):
        place = sysfs.add(name, "mlx4_core", ports=ports)
        for port in range(1, ports + 1):
            (place / f"ports/{port}/hw_counters").rename(place / ("hw_counters" if port == 1 else "unused"))
    one, two = sysfs.reader("one"), sysfs.reader("two")
    one.read(0)
    two.read(0)
    assert Kind.OUT_OF_SEQUENCE in one.events.total
    assert Kind.OUT_OF_SEQUENCE not in two.events.total


def test_counters_of_the_device_complete_those_of_its_port(sysfs: Sysfs) -> None:
    place = sysfs.add("mana_0", "mana")
    (place / "hw_counters").mkdir()
    for name in ("sent_cnps", "received_ecns", "responder_oos"):
        (place / "hw_counters" / name).write_text("5\n")
    reader = sysfs.reader("mana_0")

    def happen() -> None:
        (place / "hw_counters/received_ecns").write_text("8\n")
        (place / "hw_counters/responder_oos").write_text("99\n")  # that of the port counts
        (sysfs.hw("mana_0") / "responder_oos").write_text("101\n")

    assert after(reader, happen) == {Kind.ECN_MARKED: 3, Kind.OUT_OF_SEQUENCE: 1}


def test_newer_names_of_a_driver_count_once(sysfs: Sysfs) -> None:
    sysfs.add("bnxt_re0", "bnxt_en")
    hw = sysfs.hw("bnxt_re0")
    for old, new in (("to_retransmits", "local_ack_timeout_err"), ("tx_cnp_pkts", "np_cnp_pkts")):
        (hw / old).rename(hw / new)
    reader = sysfs.reader("bnxt_re0")
    reader.read(0)
    assert set(reader.events.total) == KINDS["bnxt_en"]
    (hw / "local_ack_timeout_err").write_text("103\n")
    (hw / "to_retransmits").write_text("103\n")
    reader.read(100)
    assert reader.events.total[Kind.ACK_TIMEOUT] == 3


def test_ports_are_kept_apart(sysfs: Sysfs) -> None:
    sysfs.add("mlx5_0", "mlx5_core", ports=2)
    readers = [sysfs.reader("mlx5_0", port) for port in (1, 2)]
    for reader in readers:
        reader.read(0)
    (sysfs.hw("mlx5_0", 2) / "out_of_sequence").write_text("103\n")
    for reader in readers:
        reader.read(100)
    assert [reader.events.total[Kind.OUT_OF_SEQUENCE] for reader in readers] == [0, 3]


# -------------------------------------------------------------------------------------------------------- odd files


@pytest.mark.parametrize("text", ["N/A (no PMA)\n", "", "junk", "99999999999999999999\n"])
def test_a_file_with_a_text_costs_only_itself(sysfs: Sysfs, text: str) -> None:
    sysfs.add("mlx5_0", "mlx5_core")
    hw = sysfs.hw("mlx5_0")
    (hw / "out_of_sequence").write_text(text)
    reader = sysfs.reader("mlx5_0")
    assert after(reader, lambda: (hw / "packet_seq_err").write_text("102\n")) == {Kind.RETRANSMIT: 2}
    assert set(reader.events.unreadable) == {"out_of_sequence"}
    assert Kind.OUT_OF_SEQUENCE not in reader.events.total, "not known is not 0"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES, errno.EIO, errno.ENODEV])
def test_a_file_that_refuses_costs_only_itself(sysfs: Sysfs, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary file cannot be made to refuse with any code, so the one call that reads is made to."""
    sysfs.add("bnxt", "bnxt_en")
    hw = sysfs.hw("bnxt")
    really = rdma_counters._read

    def read(path: Path) -> bytes:
        if path.name == "oos_drop_count":
            raise OSError(code, os.strerror(code))
        return really(path)

    monkeypatch.setattr(rdma_counters, "_read", read)
    reader = sysfs.reader("bnxt")
    assert after(reader, lambda: (hw / "to_retransmits").write_text("101\n")) == {Kind.ACK_TIMEOUT: 1}
    assert reader.events.unreadable == {"oos_drop_count": os.strerror(code)}


def test_a_file_without_permission_costs_only_itself(sysfs: Sysfs) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    sysfs.add("mlx5_0", "mlx5_core")
    hw = sysfs.hw("mlx5_0")
    (hw / "out_of_sequence").chmod(0)
    reader = sysfs.reader("mlx5_0")
    reader.read(0)
    assert reader.events.unreadable == {"out_of_sequence": "Permission denied"}


def test_a_folder_in_place_of_a_file_costs_only_itself(sysfs: Sysfs) -> None:
    sysfs.add("mlx5_0", "mlx5_core")
    hw = sysfs.hw("mlx5_0")
    (hw / "out_of_sequence").unlink()
    (hw / "out_of_sequence").mkdir()
    reader = sysfs.reader("mlx5_0")
    reader.read(0)
    assert reader.events.unreadable == {"out_of_sequence": "Is a directory"}
    assert Kind.RETRANSMIT in reader.events.total


def test_names_that_nobody_knows_are_left_alone(sysfs: Sysfs) -> None:
    # As those of hfi1, with commas; a reader that lists the folder would have to cope.
    sysfs.add("hfi1_0", "hfi1")
    for name in ("RxVLDrop,0", "a b", "\u00fc", "-"):
        (sysfs.hw("hfi1_0") / name).write_text("1\n")
    reader = sysfs.reader("hfi1_0")
    reader.read(0)
    assert reader.events.total == {}
    assert reader.events.unreadable == {}
    assert not reader.events.gone


def test_a_file_that_comes_back_is_counted_from_where_it_was(sysfs: Sysfs) -> None:
    sysfs.add("mlx5_0", "mlx5_core")
    file = sysfs.hw("mlx5_0") / "out_of_sequence"
    reader = sysfs.reader("mlx5_0")
    reader.read(0)
    file.write_text("N/A\n")
    reader.read(100)
    assert reader.events.total[Kind.OUT_OF_SEQUENCE] == 0
    file.write_text("111\n")
    reader.read(200)
    assert reader.events.total[Kind.OUT_OF_SEQUENCE] == 11
    assert reader.events.unreadable == {}


def test_of_two_files_for_one_thing_one_counts(sysfs: Sysfs) -> None:
    sysfs.add("mlx5_0", "mlx5_core")
    hw = sysfs.hw("mlx5_0")
    (hw / "cc_rx_ce_pkts").write_text("0\n")

    def mark() -> None:
        (hw / "np_ecn_marked_roce_packets").write_text("105\n")
        (hw / "cc_rx_ce_pkts").write_text("5\n")

    assert after(sysfs.reader("mlx5_0"), mark) == {Kind.ECN_MARKED: 5}
    # A virtual function may have the second one only.
    (hw / "np_ecn_marked_roce_packets").unlink()
    assert after(sysfs.reader("mlx5_0"), lambda: (hw / "cc_rx_ce_pkts").write_text("8\n")) == {Kind.ECN_MARKED: 3}


def test_only_counters_of_32_bits_go_round(sysfs: Sysfs) -> None:
    sysfs.add("mlx5_0", "mlx5_core", value=2**32 - 1)
    hw = sysfs.hw("mlx5_0")

    def fall() -> None:
        (hw / "out_of_sequence").write_text("1\n")
        (hw / "np_cnp_sent").write_text("1\n")

    assert after(sysfs.reader("mlx5_0"), fall) == {Kind.OUT_OF_SEQUENCE: 2, Kind.CNP_SENT: 1}


# ------------------------------------------------------------------------------------------------------ devices that go


def test_a_device_that_is_not_there_is_no_error(sysfs: Sysfs) -> None:
    reader = sysfs.reader("mlx5_0")
    reader.read(0)
    assert reader.events.read_s is None
    assert "mlx5_0" in reader.events.gone
    sysfs.add("mlx5_0", "mlx5_core")
    reader.read(100)
    assert not reader.events.gone
    assert reader.events.total[Kind.RETRANSMIT] == 0


def test_without_any_rdma_there_is_nothing(tmp_path: Path) -> None:
    reader = PortCounters("mlx5_0", 1, tmp_path / "none")
    reader.read(0)
    assert reader.events.gone


def test_a_port_that_is_not_there_is_named(sysfs: Sysfs) -> None:
    sysfs.add("mlx5_0", "mlx5_core")
    reader = sysfs.reader("mlx5_0", 2)
    reader.read(0)
    assert "ports/2" in reader.events.gone


def test_a_renamed_device_is_followed(sysfs: Sysfs) -> None:
    sysfs.add("mlx5_0", "mlx5_core")
    sysfs.add("mlx5_1", "mlx5_core")

    def rename() -> None:
        (sysfs.devices / "mlx5_0").rename(sysfs.devices / "rocep1s0f0")
        (sysfs.hw("rocep1s0f0") / "out_of_sequence").write_text("107\n")

    reader = sysfs.reader("mlx5_0")
    assert after(reader, rename) == {Kind.OUT_OF_SEQUENCE: 7}
    assert reader.events.rdma_device == "rocep1s0f0"


def test_devices_that_change_names_are_not_mixed_up(sysfs: Sysfs) -> None:
    sysfs.add("a", "mlx5_core", value=10)
    sysfs.add("b", "mlx5_core", value=1000)
    devices = sysfs.devices

    def swap() -> None:
        (devices / "a").rename(devices / "c")
        (devices / "b").rename(devices / "a")
        (devices / "c").rename(devices / "b")
        (sysfs.hw("b") / "out_of_sequence").write_text("11\n")

    reader = sysfs.reader("a")
    assert after(reader, swap) == {Kind.OUT_OF_SEQUENCE: 1}
    assert reader.events.rdma_device == "b"


def test_devices_without_guid_are_not_taken_for_each_other(sysfs: Sysfs) -> None:
    zero = "0000:0000:0000:0000"
    sysfs.add("vf0", "mlx5_core", guid=zero)
    sysfs.add("vf1", "mlx5_core", guid=zero)
    reader = sysfs.reader("vf0")
    reader.read(0)
    (sysfs.devices / "vf0").unlink()
    reader.read(100)
    assert reader.events.gone


def test_a_device_that_was_pulled_and_comes_back_keeps_its_sums(sysfs: Sysfs) -> None:
    sysfs.add("mlx5_0", "mlx5_core", guid="1:2:3:4", value=2**32 - 5)
    reader = sysfs.reader("mlx5_0")
    reader.read(0)
    (sysfs.hw("mlx5_0") / "out_of_sequence").write_text(f"{2**32 - 2}\n")
    reader.read(100)
    (sysfs.devices / "mlx5_0").unlink()
    reader.read(200)
    assert reader.events.gone
    assert reader.events.total[Kind.OUT_OF_SEQUENCE] == 3
    assert reader.events.read_s == 100, "the age of the reading grows"
    # The new life begins with what the card kept, which says nothing of what happened meanwhile, and is no wrap.
    sysfs.add("mlx5_0", "mlx5_core", guid="1:2:3:4", value=9)
    reader.read(300)
    assert reader.events.total[Kind.OUT_OF_SEQUENCE] == 3
    (sysfs.hw("mlx5_0") / "out_of_sequence").write_text("10\n")
    reader.read(400)
    assert reader.events.total[Kind.OUT_OF_SEQUENCE] == 4


def test_another_card_of_the_same_name_is_counted_from_then_on(sysfs: Sysfs) -> None:
    sysfs.add("mlx5_0", "mlx5_core", value=10)
    reader = sysfs.reader("mlx5_0")
    reader.read(0)
    (sysfs.devices / "mlx5_0").unlink()
    sysfs.add("mlx5_0", "bnxt_en", value=5000)
    reader.read(100)
    assert reader.events.driver == "bnxt_re"
    assert not any(reader.events.total.values())


# ---------------------------------------------------------------------------------------------------------------- time


def test_counters_are_not_read_more_often_than_the_kernel_asks_the_card(sysfs: Sysfs) -> None:
    sysfs.add("mlx5_0", "mlx5_core")
    (sysfs.hw("mlx5_0") / "lifespan").write_text("8000\n")
    reader = sysfs.reader("mlx5_0")
    reader.read(0)
    reader.read(7.9)
    assert reader.events.read_s == 0
    reader.read(8)
    assert reader.events.read_s == 8


@pytest.mark.parametrize("text", ["junk\n", "-5\n", "99999999999\n", ""])
def test_a_lifespan_that_is_none_does_not_matter(sysfs: Sysfs, text: str) -> None:
    sysfs.add("mlx5_0", "mlx5_core")
    (sysfs.hw("mlx5_0") / "lifespan").write_text(text)
    reader = sysfs.reader("mlx5_0")
    reader.read(0)
    reader.read(1)
    assert reader.events.read_s == 1


def test_recent_events_are_of_the_last_minutes(sysfs: Sysfs) -> None:
    sysfs.add("mlx5_0", "mlx5_core")
    file = sysfs.hw("mlx5_0") / "out_of_sequence"
    reader = sysfs.reader("mlx5_0")
    for i in range(200):
        file.write_text(f"{100 + i}\n")
        reader.read(5.0 * i)
    events = reader.events
    assert events.total[Kind.OUT_OF_SEQUENCE] == 199
    assert 290 <= events.recent_s <= 300
    assert events.recent[Kind.OUT_OF_SEQUENCE] == events.recent_s / 5


# --------------------------------------------------------------------------------------------------------- the thread


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does; a hang is ended by the time limit."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "not within 30 s"
        time.sleep(0.005)


def test_a_thread_reads_what_is_watched(sysfs: Sysfs) -> None:
    sysfs.add("mlx5_0", "mlx5_core")
    sysfs.add("mlx5_1", "mlx5_core")
    counters = RdmaCounters(sysfs.devices, interval_s=0.01)
    try:
        assert counters.events("rail0") is None
        counters.watch({"rail0": ("mlx5_0", 1), "rail1": ("mlx5_1", 1)})
        until(lambda: all((one := counters.events(f"rail{i}")) and one.read_s is not None for i in range(2)))
        (sysfs.hw("mlx5_1") / "out_of_sequence").write_text("104\n")
        until(lambda: (found := counters.events("rail1")) is not None and found.total[Kind.OUT_OF_SEQUENCE] == 4)
        counters.watch({"rail1": ("mlx5_1", 1)})
        until(lambda: counters.events("rail0") is None)
        found = counters.events("rail1")
        assert found is not None
        assert found.total[Kind.OUT_OF_SEQUENCE] == 4, "it is the same reader as before"
    finally:
        counters.stop()
    assert all(thread.name != "rdma-counters" for thread in threading.enumerate())


def test_without_rdma_there_is_no_thread(sysfs: Sysfs) -> None:
    counters = RdmaCounters(sysfs.devices)
    counters.watch({})
    assert all(thread.name != "rdma-counters" for thread in threading.enumerate())
    counters.stop()


def test_a_card_that_does_not_answer_holds_up_nobody(sysfs: Sysfs) -> None:
    """A pipe without a writer is opened by a read that does not return, as that of a file whose card hangs."""
    sysfs.add("mlx5_0", "mlx5_core")
    file = sysfs.hw("mlx5_0") / "out_of_sequence"
    file.unlink()
    os.mkfifo(file)
    assert stat.S_ISFIFO(file.stat().st_mode)
    counters = RdmaCounters(sysfs.devices, interval_s=0.01)
    counters.watch({"rail0": ("mlx5_0", 1)})
    until(lambda: counters.events("rail0") is not None)
    found = counters.events("rail0")
    assert found is not None
    assert found.read_s is None
    counters.stop()
    # Let the thread go.
    with file.open("wb"):
        pass
    until(lambda: all(thread.name != "rdma-counters" for thread in threading.enumerate()))
