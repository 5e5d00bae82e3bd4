# SPDX-License-Identifier: Apache-2.0
"""A fabric in one kernel: hosts with RDMA devices, and a switch between them.

Every host i has one or more ports, one a rail.  A port is one end of a virtual cable, ``h3`` (``h3r1`` on rail 1), in
the initial namespace, where ``rdma_rxe`` works, with the RDMA device ``rxe3`` (``rxe3r1``).  The other end, ``p3``, is
a port of a switch: a bridge in the namespace ``fab``.  Rules of routing force every packet that a host sends from its
address across the switch, although all hosts live in one kernel::

    with Fabric(4, rails=2) as fabric:
        fabric.set_delays(lambda a, b: 60_000 if a // 2 != b // 2 else 4_000)      # one way, in ns
        fabric.set_rate(3, 36_000_000_000)                                         # the switch's egress towards host 3
        with fabric.queue(3) as queue:
            queue.sample().bytes                                                   # what waits there

Delays sit where packets enter the switch, rates where they leave it: so the queue that is measured holds what waits
for the link, and not what travels.  Needs root.  :meth:`Fabric.remove` puts back everything that was changed.
"""

import ctypes
import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

__all__ = ["Fabric", "FabricError", "Port", "Queue", "QueueRecorder", "QueueState"]

NAMESPACE: Final = "fab"
MAX_HOSTS: Final = 250
MAX_RAILS: Final = 8
MAX_DELAYS: Final = 16
"""Different delays from one port: bands of a prio queueing discipline."""
QUEUE_PACKETS: Final = 500_000
"""Length of every queue, so that none drops: rxe goes back N, and N packets cost more than any queue."""
SYSCTLS: Final = {
    "net/ipv4/conf/all/accept_local": "1",
    "net/ipv4/conf/default/accept_local": "1",
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
    "net/ipv4/conf/all/arp_ignore": "1",
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
}


class FabricError(RuntimeError):
    """A tool refused; the text has its words."""


@dataclass(frozen=True, slots=True)
class Port:
    """One port of one host.

    :ivar netdev: the host's end, in the initial namespace.  :ivar switch: the switch's end, in the namespace ``fab``.
    :ivar wire: what delays it, in the namespace ``fab``.
    :ivar device: RDMA device.  :ivar address: IPv4 address; its GID has the index 1.
    """

    host: int
    rail: int
    netdev: str
    switch: str
    wire: str
    device: str
    address: str
    mac: str
    table: int


@dataclass(frozen=True, slots=True)
class QueueState:
    """What a queue of the switch holds, and what became of the rest.

    :ivar bytes: waiting now.  :ivar packets: waiting now.  :ivar drops: packets, since it was made.
    :ivar sent_bytes: since it was made.
    """

    bytes: int
    packets: int
    drops: int
    sent_bytes: int


def _run(command: Sequence[str], lines: Iterable[str] | None = None) -> str:
    """Run a tool, with a batch of commands for it.  :raises FabricError: it failed."""
    text = None if lines is None else "".join(f"{line}\n" for line in lines)
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except OSError as error:
        raise FabricError(f"{command[0]} does not run: {error}; is iproute2 installed?") from error
    if done.returncode:
        raise FabricError(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _ip(lines: Iterable[str]) -> None:
    _run(["ip", "-batch", "-"], lines)


def _ip_switch(lines: Iterable[str]) -> None:
    _run(["ip", "-n", NAMESPACE, "-batch", "-"], lines)


def _tc(lines: Iterable[str]) -> None:
    _run(["tc", "-batch", "-"], lines)


def _tc_switch(lines: Iterable[str]) -> None:
    _run(["tc", "-n", NAMESPACE, "-batch", "-"], lines)


def make_port(host: int, rail: int = 0) -> Port:
    """The names and addresses of a port."""
    end = str(host) if rail == 0 else f"{host}r{rail}"
    return Port(
        host=host,
        rail=rail,
        netdev=f"h{end}",
        switch=f"p{end}",
        wire=f"d{end}",
        device=f"rxe{end}",
        address=f"10.9.{rail}.{host + 1}",
        mac=f"02:00:00:00:{rail:02x}:{host + 1:02x}",
        table=1000 + rail * 256 + host,
    )


def _netem(delay_ns: int) -> str:
    return f"netem delay {delay_ns / 1000}us limit {QUEUE_PACKETS}"


class Fabric:
    """Hosts and a switch; see the module's text.

    :param hosts: 1..250.  :param rails: ports of each host, 1..8; a port reaches those of its rail.
    :param mtu: of all ports, or one value a host.  9000 gives an RDMA path MTU of 4096, 1500 one of 1024.
    :param rdma: add the RDMA devices.
    """

    def __init__(self, hosts: int, rails: int = 1, *, mtu: int | Sequence[int] = 9000, rdma: bool = True) -> None:
        if not 1 <= hosts <= MAX_HOSTS or not 1 <= rails <= MAX_RAILS:
            raise ValueError(f"{hosts} hosts with {rails} rails; expected 1..{MAX_HOSTS} and 1..{MAX_RAILS}")
        mtus = [mtu] * hosts if isinstance(mtu, int) else list(mtu)
        if len(mtus) != hosts:
            raise ValueError(f"{len(mtus)} MTUs for {hosts} hosts; expected one each")
        self.hosts = hosts
        self.rails = rails
        self.ports = [make_port(host, rail) for rail in range(rails) for host in range(hosts)]
        self._mtus = mtus
        self._rdma = rdma
        self._sysctls: dict[str, str] = {}
        self._begun = False
        self._delayed: set[str] = set()
        self._rated: set[str] = set()

    def port(self, host: int, rail: int = 0) -> Port:
        """One port.  :raises ValueError: there is no such host or rail."""
        if not 0 <= host < self.hosts or not 0 <= rail < self.rails:
            raise ValueError(
                f"no port of host {host} on rail {rail}; there are {self.hosts} hosts and {self.rails} rails"
            )
        return self.ports[rail * self.hosts + host]

    def rail(self, rail: int) -> list[Port]:
        """All ports of one rail."""
        return self.ports[rail * self.hosts : (rail + 1) * self.hosts]

    # ------------------------------------------------------------------------------------------------ making, removing

    def make(self) -> Self:
        """Make it all.  :raises FabricError: something is refused; what was made is removed."""
        taken = [port.netdev for port in self.ports if self._exists(port)]
        if taken or Path("/run/netns", NAMESPACE).exists():
            raise FabricError(f"there is a fabric already, or something of its names: {taken or NAMESPACE}")
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def _make(self) -> None:
        self._set_sysctls()
        self._begun = True
        _run(["ip", "netns", "add", NAMESPACE])
        # The table of local addresses would deliver everything without a cable: it comes after the hosts' own tables.
        _ip(["link set lo up", "rule add pref 100 lookup local", "rule del pref 0"])
        lines = []
        for port in self.ports:
            mtu = self._mtus[port.host]
            lines.append(
                f"link add {port.netdev} mtu {mtu} address {port.mac} type veth "
                f"peer name {port.switch} mtu {max(self._mtus)} netns {NAMESPACE}"
            )
            lines.append(f"addr add {port.address}/24 dev {port.netdev} noprefixroute")
            lines.append(f"link set {port.netdev} up")
            lines.append(f"rule add pref 10 iif lo from {port.address} lookup {port.table}")
            lines += self._routes(port)
        _ip(lines)
        switch = ["link set lo up", "link add br0 type bridge mcast_snooping 0", "link set br0 up"]
        switch += [f"link set {port.switch} master br0 up" for port in self.ports]
        _ip_switch(switch)
        if self._rdma:
            _run(["rdma", "-b", "-"], [f"link add {p.device} type rxe netdev {p.netdev}" for p in self.ports])

    def _routes(self, port: Port) -> list[str]:
        """What the kernel forgets when the port goes down."""
        network = f"{port.address.rsplit('.', 1)[0]}.0/24"
        return [
            f"route replace local {port.address} dev {port.netdev} table {port.table}",
            f"route replace {network} dev {port.netdev} src {port.address} table {port.table}",
            *(
                f"neigh replace {other.address} lladdr {other.mac} dev {port.netdev} nud permanent"
                for other in self.rail(port.rail)
                if other is not port
            ),
        ]

    def _set_sysctls(self) -> None:
        # All are read first: setting the one for all interfaces changes the default, too.
        there = {name: Path("/proc/sys") / name for name in SYSCTLS if Path("/proc/sys", name).exists()}
        self._sysctls = {name: path.read_text().strip() for name, path in there.items()}
        for name, path in there.items():
            path.write_text(SYSCTLS[name])

    def remove(self) -> None:
        """Remove all that was made and put back what was changed.  A second call does nothing."""
        if not self._begun:
            return
        self._begun = False
        commands = [
            *(["rdma", "link", "delete", port.device] for port in self.ports if self._exists(port)),
            *(["ip", "link", "delete", port.netdev] for port in self.ports if self._exists(port)),
            ["ip", "netns", "delete", NAMESPACE],
            *(["ip", "rule", "delete", "pref", "10", "from", port.address] for port in self.ports),
        ]
        rules = _run(["ip", "rule", "show"])
        if rules.startswith("100:") or "\n100:" in rules:
            commands += [["ip", "rule", "add", "pref", "0", "lookup", "local"], ["ip", "rule", "delete", "pref", "100"]]
        self._force(commands)
        for name, value in self._sysctls.items():
            (Path("/proc/sys") / name).write_text(value)
        self._sysctls.clear()

    @staticmethod
    def _exists(port: Port) -> bool:
        return Path("/sys/class/net", port.netdev).exists()

    @staticmethod
    def _force(commands: Sequence[Sequence[str]]) -> None:
        """Run them in batches that go on after an error: of something that was made by halves, not all is there."""
        for tool in ("rdma", "ip"):
            lines = [" ".join(command[1:]) for command in commands if command[0] == tool]
            if lines:
                text = "".join(f"{line}\n" for line in lines)
                force = "-f" if tool == "rdma" else "-force"
                subprocess.run([tool, force, "-b", "-"], input=text, text=True, capture_output=True, check=False)

    def __enter__(self) -> Self:
        return self.make()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    # -------------------------------------------------------------------------------------------------- delays, rates

    def set_delays(self, one_way_ns: Callable[[int, int], int], rails: Sequence[int] | None = None) -> None:
        """Delay what travels, by the pair of hosts.

        :param one_way_ns: delay in ns from one host to another, 0..10^10; at most 16 different ones from one host.
        :raises FabricError: refused.  :raises ValueError: a delay out of range, or too many of them.
        """
        wanted = []
        changed = [port for rail in (range(self.rails) if rails is None else rails) for port in self.rail(rail)]
        for port in changed:
            delays = {o.address: one_way_ns(port.host, o.host) for o in self.rail(port.rail) if o is not port}
            if any(not 0 <= delay <= 10**10 for delay in delays.values()):
                raise ValueError(f"delays from host {port.host}: {sorted(set(delays.values()))} ns; expected 0..10^10")
            if len(set(delays.values())) > MAX_DELAYS:
                raise ValueError(f"host {port.host} has more than {MAX_DELAYS} different delays")
            wanted.append((port, delays))
        self._delay(wanted)

    def set_delay(self, host: int, one_way_ns: int, rail: int = 0) -> None:
        """Delay what one host sends, to whatever host."""
        port = self.port(host, rail)
        self._delay([(port, {other.address: one_way_ns for other in self.rail(rail) if other is not port})])

    def _delay(self, wanted: Sequence[tuple[Port, dict[str, int]]]) -> None:
        """Have what comes from a port pass a device of its own, ``d3``, whose queueing discipline delays it.

        Not the host's end: the time at which a packet leaves a queue there is that of its departure, for its kernel.
        """
        fresh = [port for port, _ in wanted if port.switch not in self._delayed]
        _ip_switch(line for port in fresh for line in (f"link add {port.wire} type ifb", f"link set {port.wire} up"))
        lines = []
        for port in fresh:
            lines.append(f"qdisc add dev {port.switch} clsact")
            redirect = f"action mirred egress redirect dev {port.wire}"
            lines.append(f"filter add dev {port.switch} ingress protocol all matchall {redirect}")
        self._delayed |= {port.switch for port in fresh}
        for port, delays in wanted:
            if port not in fresh:
                # "Replace" of a root by the same kind would keep its children.
                lines.append(f"qdisc delete dev {port.wire} root")
            lines += self._delay_lines(port, delays)
        _tc_switch(lines)

    @staticmethod
    def _delay_lines(port: Port, delays: dict[str, int]) -> list[str]:
        """netem; where there are several delays, prio 1: with a band for each, and in each band netem."""
        dev = port.wire
        values = list(delays.values())
        # The most common first: it is what packets get without a filter of their own.
        bands = sorted(set(values), key=lambda delay: (-values.count(delay), delay)) or [0]
        if len(bands) == 1:
            return [f"qdisc add dev {dev} root handle 1: {_netem(bands[0])}"]
        lines = [f"qdisc add dev {dev} root handle 1: prio bands {len(bands)} priomap {' '.join(['0'] * 16)}"]
        for band, delay in enumerate(bands, 1):
            lines.append(f"qdisc add dev {dev} parent 1:{band:x} handle {0x10 + band:x}: {_netem(delay)}")
        # A hash on the last byte of the destination: as fast for 250 hosts as for two.
        u32 = f"filter add dev {dev} parent 1: protocol ip prio 1"
        network = f"{port.address.rsplit('.', 1)[0]}.0/24"
        lines.append(f"{u32} handle 2: u32 divisor 256")
        lines.append(f"{u32} u32 ht 800:: match ip dst {network} hashkey mask 0x000000ff at 16 link 2:")
        for address, delay in delays.items():
            if delay != bands[0]:
                bucket, band = int(address.rsplit(".", 1)[1]), bands.index(delay) + 1
                lines.append(f"{u32} u32 ht 2:{bucket:x}: match ip dst {address}/32 flowid 1:{band:x}")
        return lines

    def set_host_rate(self, host: int, bits_per_second: int | None, rail: int = 0) -> None:
        """Limit what one host sends, to all together; None lifts it."""
        netdev = self.port(host, rail).netdev
        if bits_per_second is not None:
            self._rated.add(netdev)
            _tc([f"qdisc replace dev {netdev} root handle 1: netem rate {bits_per_second}bit limit {QUEUE_PACKETS}"])
        elif netdev in self._rated:
            self._rated.remove(netdev)
            _tc([f"qdisc delete dev {netdev} root"])

    def set_rate(self, host: int, bits_per_second: int | None, rail: int = 0, *, limit: int = QUEUE_PACKETS) -> None:
        """Limit what the switch sends towards a host, and queue what does not fit; None lifts it.

        :param limit: packets that the queue holds; what comes beyond is dropped.
        """
        self.set_rates({host: bits_per_second}, rail, limit=limit)

    def set_rates(self, rates: dict[int, int | None], rail: int = 0, *, limit: int = QUEUE_PACKETS) -> None:
        """:meth:`set_rate` for several hosts, at once."""
        lines = []
        for host, rate in rates.items():
            switch = self.port(host, rail).switch
            if rate is not None:
                lines.append(f"qdisc replace dev {switch} root handle 1: netem rate {rate}bit limit {limit}")
                self._rated.add(switch)
            elif switch in self._rated:
                self._rated.remove(switch)
                lines.append(f"qdisc delete dev {switch} root")
        _tc_switch(lines)

    def set_loss(self, host: int, percent: float, rail: int = 0) -> None:
        """Lose some of what the switch sends towards a host, at random; 0 lifts it, and a rate with it."""
        switch = self.port(host, rail).switch
        loss = f"netem loss {percent}% limit {QUEUE_PACKETS}"
        if percent:
            self._rated.add(switch)
            _tc_switch([f"qdisc replace dev {switch} root handle 1: {loss}"])
        else:
            self.set_rate(host, None, rail)

    # --------------------------------------------------------------------------------------------------- links, MTU

    def link(self, host: int, state: Literal["up", "down"], rail: int = 0, *, end: str = "host") -> None:
        """Take a port down or up.

        :param end: ``host``: as the administrator of the host would; ``switch``: the host sees its carrier go.
        """
        port = self.port(host, rail)
        if end == "switch":
            _ip_switch([f"link set {port.switch} {state}"])
        elif end == "host":
            _ip([f"link set {port.netdev} {state}", *(self._routes(port) if state == "up" else [])])
        else:
            raise ValueError(f"end is {end!r}; expected host or switch")

    def set_mtu(self, host: int, mtu: int, rail: int = 0) -> None:
        """Change the MTU of a host's end; the RDMA device follows."""
        _ip([f"link set {self.port(host, rail).netdev} mtu {mtu}"])

    def set_switch_mtu(self, host: int, mtu: int, rail: int = 0) -> None:
        """Change the MTU of the switch's end: longer packets towards the host are lost, and nobody is told."""
        _ip_switch([f"link set {self.port(host, rail).switch} mtu {mtu}"])

    def sent_bytes(self, host: int, rail: int = 0) -> int:
        """Bytes that the host has sent on the cable since it was made."""
        return int(Path("/sys/class/net", self.port(host, rail).netdev, "statistics/tx_bytes").read_text())

    # ------------------------------------------------------------------------------------------------------- queues

    def queue(self, host: int, rail: int = 0) -> "Queue":
        """The switch's queue towards a host.  :raises FabricError: it has no rate, and so no queue."""
        return Queue(self.port(host, rail).switch)


_CLONE_NEWNET: Final = 0x40000000
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def _netlink_in_switch() -> socket.socket:
    """A socket of the switch's namespace; it stays there whoever uses it."""
    made: list[socket.socket | OSError] = []

    def enter() -> None:
        # A namespace belongs to a thread: this one, which ends here.
        try:
            with open(f"/run/netns/{NAMESPACE}", "rb") as namespace:
                if _LIBC.setns(namespace.fileno(), _CLONE_NEWNET):
                    number = ctypes.get_errno()
                    raise OSError(number, os.strerror(number))
            made.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise FabricError(f"cannot enter the namespace {NAMESPACE}: {made[0]}") from made[0]
    return made[0]


# From linux/rtnetlink.h, linux/netlink.h, linux/pkt_sched.h and linux/gen_stats.h.
_RTM_NEWQDISC: Final = 36
_RTM_GETQDISC: Final = 38
_RTM_GETLINK: Final = 18
_RTM_NEWLINK: Final = 16
_NLMSG_ERROR: Final = 2
_NLM_F_REQUEST: Final = 1
_NLM_F_ECHO: Final = 8  # without it, the answer about a queueing discipline goes to listeners only
_TC_H_ROOT: Final = 0xFFFFFFFF
_TCA_KIND: Final = 1
_TCA_STATS2: Final = 7
_TCA_STATS_BASIC: Final = 1
_TCA_STATS_QUEUE: Final = 3
_IFLA_IFNAME: Final = 3
_HEADER: Final = struct.Struct("IHHII")  # length, type, flags, sequence, port
_TCMSG: Final = struct.Struct("BxxxiIII")  # family, index, handle, parent, info
_IFINFO: Final = struct.Struct("BxHiII")  # family, type, index, flags, change


def _attributes(raw: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(raw):
        length, kind = struct.unpack_from("HH", raw, at)
        if length < 4:
            return
        yield kind & 0x7FFF, raw[at + 4 : at + length]
        at += (length + 3) & ~3


class Queue:
    """The switch's queue towards a host; :meth:`sample` costs some tens of microseconds of work, and no process."""

    def __init__(self, switch: str) -> None:
        self._name = switch
        self._socket = _netlink_in_switch()
        self._socket.settimeout(10)
        try:
            name = switch.encode() + b"\0"
            name = struct.pack("HH", 4 + len(name), _IFLA_IFNAME) + name + bytes(-len(name) % 4)
            found = self._ask(_RTM_GETLINK, _IFINFO.pack(0, 0, 0, 0, 0) + name, _RTM_NEWLINK)
            index = _IFINFO.unpack_from(found)[2]
            self._request = _TCMSG.pack(0, index, 0, _TC_H_ROOT, 0)
            self.sample()
        except BaseException:
            self._socket.close()
            raise

    def _ask(self, kind: int, body: bytes, answer: int) -> bytes:
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), kind, _NLM_F_REQUEST | _NLM_F_ECHO, 0, 0) + body)
        while True:
            raw = self._socket.recv(65536)
            length, got = _HEADER.unpack_from(raw)[:2]
            if got == _NLMSG_ERROR:
                number = -struct.unpack_from("i", raw, _HEADER.size)[0]
                raise FabricError(f"{self._name}: {os.strerror(number)}; is it there, and has it a queue?")
            if got == answer:
                return raw[_HEADER.size : length]

    def sample(self) -> QueueState:
        """What it holds now.  :raises FabricError: it is gone."""
        raw = self._ask(_RTM_GETQDISC, self._request, _RTM_NEWQDISC)
        waiting = drops = packets = sent = 0
        for kind, value in _attributes(raw[_TCMSG.size :]):
            if kind == _TCA_KIND and value == b"noqueue\0":
                raise FabricError(f"{self._name} has no queue; give it a rate first")
            if kind == _TCA_STATS2:
                for inner, data in _attributes(value):
                    if inner == _TCA_STATS_QUEUE:
                        packets, waiting, drops = struct.unpack_from("III", data)
                    elif inner == _TCA_STATS_BASIC:
                        sent = struct.unpack_from("Q", data)[0]
        return QueueState(bytes=waiting, packets=packets, drops=drops, sent_bytes=sent)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class QueueRecorder:
    """Samples a queue in a thread, between entering and leaving.

    :ivar samples: time (CLOCK_MONOTONIC, ns) and state, oldest first.
    """

    def __init__(self, queue: Queue, interval_s: float) -> None:
        self._queue = queue
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._record, name="queue", daemon=True)
        self.samples: list[tuple[int, QueueState]] = []

    def _record(self) -> None:
        while not self._stop.is_set():
            self.samples.append((time.monotonic_ns(), self._queue.sample()))
            time.sleep(self._interval_s)

    @property
    def peak_bytes(self) -> int:
        """The most that was seen waiting."""
        return max((state.bytes for _, state in self.samples), default=0)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.samples.append((time.monotonic_ns(), self._queue.sample()))
