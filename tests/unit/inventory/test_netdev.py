# SPDX-License-Identifier: Apache-2.0
"""Interfaces, from the kernel itself."""

from pathlib import Path

from dqplbd.inventory.netdev import Netdev, find_netdev, netdevs_by_address


def test_the_loopback_interface_has_the_loopback_address() -> None:
    found = netdevs_by_address()
    name = found["127.0.0.1"].name
    assert found["127.0.0.1"].mtu == int(Path(f"/sys/class/net/{name}/mtu").read_text())
    assert found["127.0.0.1"].up
    assert found["127.0.0.1"].speed_bps is None


def test_every_loopback_address_is_of_the_loopback_interface() -> None:
    lo, eth = Netdev("lo", 1, 65536, True, None), Netdev("eth0", 2, 1500, True, 10**10)
    found = {"127.0.0.1": lo, "10.0.0.7": eth, "fd00::7": eth}
    assert find_netdev("127.9.9.9", found) is lo
    assert find_netdev("10.0.0.7", found) is eth
    assert find_netdev("fd00:0::7", found) is eth
    assert find_netdev("10.0.0.8", found) is None
    assert find_netdev("fe80::1%eth0", {"fe80::1": eth}) is eth


def test_the_speed_is_that_of_sysfs(tmp_path: Path) -> None:
    from dqplbd.inventory import netdev

    folder = tmp_path / "class/net/eth0"
    folder.mkdir(parents=True)
    for text, speed in (("100000\n", 10**11), ("-1\n", None), ("x", None), ("4294967295", None)):
        (folder / "speed").write_text(text)
        assert netdev._speed_bps("eth0", tmp_path) == speed
    assert netdev._speed_bps("lo", tmp_path) is None
