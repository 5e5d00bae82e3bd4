# SPDX-License-Identifier: Apache-2.0
"""RDMA devices by sysfs, and what is said where pyverbs is not to be had.  With pyverbs: tests/vm."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqplbd.inventory import verbs
from dqplbd.inventory.gids import GidKind
from dqplbd.inventory.netdev import Netdev, Netdevs
from dqplbd.inventory.verbs import (
    PyverbsError,
    RdmaInventory,
    load_pyverbs,
    natural_key,
    node_error,
    parse_rate,
    read_rdma,
)

ETH = Netdev("eth0", 2, 9000, True, None)
NETDEVS = Netdevs({2: ETH}, {"10.1.2.3": ETH})


@pytest.mark.parametrize(
    ("text", "rate", "width"),
    [
        ("400 Gb/sec (4X NDR)", 400 * 10**9, "4X NDR"),
        ("2.5 Gb/sec (1X SDR)", 2_500_000_000, "1X SDR"),
        ("800 Gb/sec", 800 * 10**9, ""),
        ("0 Gb/sec (4X)", None, "4X"),
        ("", None, ""),
        ("fast", None, ""),
    ],
)
def test_rates(text: str, rate: int | None, width: str) -> None:
    assert parse_rate(text) == (rate, width)


@given(st.text(max_size=40))
def test_any_rate_is_a_rate_or_none(text: str) -> None:
    rate, _ = parse_rate(text)
    assert rate is None or rate > 0


def test_names_sort_by_their_numbers() -> None:
    assert sorted(["rxe10", "mlx5_0", "rxe2", "rxe1"], key=natural_key) == ["mlx5_0", "rxe1", "rxe2", "rxe10"]


# -- sysfs


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def card(root: Path, name: str, pci: str, *, ports: int = 1, link_layer: str = "Ethernet") -> Path:
    """An RDMA device in a fixture sysfs tree."""
    folder = root / "devices" / pci
    write(folder / "numa_node", "1")
    (folder / "net/eth0").mkdir(parents=True)
    write(folder / "net/eth0/dev_port", "0")
    (root / "drivers/mlx5_core").mkdir(parents=True, exist_ok=True)
    (folder / "driver").symlink_to(root / "drivers/mlx5_core")
    sysfs = root / "class/infiniband" / name
    sysfs.mkdir(parents=True)
    (sysfs / "device").symlink_to(folder)
    write(sysfs / "fw_ver", "28.39.1002")
    for number in range(1, ports + 1):
        port = sysfs / "ports" / str(number)
        write(port / "state", "4: ACTIVE")
        write(port / "phys_state", "5: LinkUp")
        write(port / "rate", "400 Gb/sec (4X NDR)")
        write(port / "link_layer", link_layer)
        for index, (gid, kind) in enumerate(
            [
                ("fe80:0000:0000:0000:0e42:a1ff:fe00:0001", "IB/RoCE v1"),
                ("0000:0000:0000:0000:0000:ffff:0a01:0203", "RoCE v2"),
                ("0000:0000:0000:0000:0000:0000:0000:0000", ""),  # an empty slot
                ("nonsense", "RoCE v2"),
            ]
        ):
            write(port / "gids" / str(index), gid)
            write(port / "gid_attrs/types" / str(index), kind)
            write(port / "gid_attrs/ndevs" / str(index), "eth0")
    return sysfs


class Blocked:
    """Makes pyverbs impossible to import."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] == "pyverbs":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture
def no_pyverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Blocked(), *sys.meta_path])


@pytest.mark.usefixtures("no_pyverbs")
def test_without_pyverbs_the_devices_are_listed_with_the_reason(tmp_path: Path) -> None:
    card(tmp_path, "mlx5_1", "pci0000:80/0000:80:01.0/0000:81:00.0", link_layer="InfiniBand")
    card(tmp_path, "mlx5_0", "pci0000:17/0000:17:01.0/0000:18:00.0", ports=2)
    write(tmp_path / "class/infiniband/rxe0/parent", "eth0")
    (tmp_path / "class/net/eth0").mkdir(parents=True)
    found = read_rdma(NETDEVS, tmp_path, tmp_path)
    assert [one.name for one in found.devices] == ["mlx5_0", "mlx5_1", "rxe0"]  # by their places on PCI
    assert "pyverbs is not there" in found.error
    assert "python3-pyverbs" in found.fix or "pyverbs" in found.fix
    first, second, _ = found.devices
    assert all("pyverbs is not there" in one.error for one in found.devices)
    assert (first.driver, first.firmware, first.numa_node) == ("mlx5_core", "28.39.1002", 1)
    assert first.pci_path.endswith("0000:18:00.0")
    assert [port.number for port in first.ports] == [1, 2]
    port = first.ports[0]
    assert (port.state, port.physical, port.link_layer, port.width) == ("active", "link-up", "ethernet", "4X NDR")
    assert (port.rate_bps, port.netdev) == (400 * 10**9, "eth0")
    assert [(str(gid), gid.kind, gid.netdev_up) for gid in port.gids] == [
        ("fe80::e42:a1ff:fe00:1", GidKind.ROCE_V1, True),
        ("::ffff:10.1.2.3", GidKind.ROCE_V2, True),
    ]
    assert second.ports[0].gids[0].kind is GidKind.IB
    assert found.named("mlx5_1") is second
    assert found.named("mlx5_9") is None


def test_a_host_without_rdma_is_no_error_of_its_own(tmp_path: Path) -> None:
    found = read_rdma(Netdevs(), tmp_path, tmp_path)
    assert found.devices == ()
    assert "no RDMA" in found.error
    assert "driver" in found.fix
    (tmp_path / "class/infiniband").mkdir(parents=True)
    assert "no RDMA device" in read_rdma(Netdevs(), tmp_path, tmp_path).error


def test_this_host_can_be_asked() -> None:
    assert isinstance(read_rdma(Netdevs()), RdmaInventory)


def test_why_a_node_cannot_be_opened(tmp_path: Path) -> None:
    assert "ib_uverbs" in node_error("mlx5_0", tmp_path, tmp_path)
    write(tmp_path / "class/infiniband_verbs/uverbs3/ibdev", "mlx5_0")
    error = node_error("mlx5_0", tmp_path, tmp_path / "dev")
    assert str(tmp_path / "dev/uverbs3") in error
    assert "pass /dev/infiniband" in error
    write(tmp_path / "dev/uverbs3", "")
    assert node_error("mlx5_0", tmp_path, tmp_path / "dev") == ""


# -- pyverbs


@pytest.mark.usefixtures("no_pyverbs")
def test_how_to_get_pyverbs() -> None:
    with pytest.raises(PyverbsError) as caught:
        load_pyverbs()
    assert sys.executable in caught.value.problem
    assert caught.value.fix


def test_the_advice_fits_what_is_installed(tmp_path: Path) -> None:
    tag, version = sys.implementation.cache_tag, f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert "python3-pyverbs" in verbs._how_to_get([str(tmp_path / "*")])
    write(tmp_path / "a/pyverbs/device.cpython-399-x86_64-linux-gnu.so", "")
    advice = verbs._how_to_get([str(tmp_path / "*")])
    assert "installed for cpython-399" in advice
    assert f"this is Python {version}" in advice
    write(tmp_path / f"b/pyverbs/device.{tag}-x86_64-linux-gnu.so", "")
    advice = verbs._how_to_get([str(tmp_path / "*")])
    assert f"ln -s {tmp_path / 'b/pyverbs'} " in advice


def run_with(package: Path, code: str) -> str:
    """What a fresh interpreter prints that sees another pyverbs."""
    script = f"import sys\nsys.path.insert(0, {str(package)!r})\n{textwrap.dedent(code)}"
    return subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True).stdout


def test_a_pyverbs_without_its_library_is_told_apart(tmp_path: Path) -> None:
    write(tmp_path / "pyverbs/__init__.py", "")
    write(
        tmp_path / "pyverbs/device.py",
        "raise ImportError('libibverbs.so.1: cannot open shared object file: No such file or directory')",
    )
    code = """
        from dqplbd.inventory.verbs import PyverbsError, load_pyverbs
        try:
            load_pyverbs()
        except PyverbsError as error:
            print(error)
    """
    said = run_with(tmp_path, code)
    assert "libibverbs.so.1" in said
    assert "install libibverbs1" in said
    write(tmp_path / "pyverbs/device.py", "raise ImportError('undefined symbol: x, version IBVERBS_PRIVATE_59')")
    assert "IBVERBS_PRIVATE_59" in run_with(tmp_path, code)


def test_the_numbers_are_those_of_verbs_h() -> None:
    """Against the installed pyverbs, whichever of its two forms it has."""
    said = subprocess.run(
        ["/usr/bin/python3", "-c", _PRINT_ENUMS], capture_output=True, text=True, check=False
    ).stdout.split()
    if not said:
        pytest.skip("pyverbs is not installed (Debian, Ubuntu: package python3-pyverbs)")
    values = dict(zip(said[::2], map(int, said[1::2]), strict=True))
    assert {values[f"IBV_PORT_{name}"]: text for name, text in _STATE_NAMES.items()} == verbs._PORT_STATES
    assert {
        values["IBV_GID_TYPE_IB"]: GidKind.IB,
        values["IBV_GID_TYPE_ROCE_V1"]: GidKind.ROCE_V1,
        values["IBV_GID_TYPE_ROCE_V2"]: GidKind.ROCE_V2,
    } == verbs._GID_KINDS
    assert verbs._LINK_LAYERS[values["IBV_LINK_LAYER_ETHERNET"]] == "ethernet"
    assert verbs._LINK_LAYERS[values["IBV_LINK_LAYER_INFINIBAND"]] == "infiniband"
    assert verbs._TRANSPORTS[values["IBV_TRANSPORT_IB"]] == "ib"
    assert verbs._TRANSPORTS[values["IBV_TRANSPORT_IWARP"]] == "iwarp"
    for mtu in (256, 512, 1024, 2048, 4096):
        assert verbs._mtu(values[f"IBV_MTU_{mtu}"]) == mtu
    assert verbs._mtu(0) == verbs._mtu(6) == 0


_STATE_NAMES = {
    "NOP": "nop",
    "DOWN": "down",
    "INIT": "init",
    "ARMED": "armed",
    "ACTIVE": "active",
    "ACTIVE_DEFER": "active-defer",
}
_PRINT_ENUMS = """
try:
    import pyverbs.libibverbs_enums as module
    found = {m.name: int(m) for c in vars(module).values() if hasattr(c, "__members__") for m in c}
except ImportError:
    import pyverbs.enums as module
    found = {n: int(v) for n, v in vars(module).items() if n.startswith("IBV_") and isinstance(v, int)}
for name, value in found.items():
    print(name, value)
"""
