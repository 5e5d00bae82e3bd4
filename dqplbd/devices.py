# SPDX-License-Identifier: Apache-2.0
"""The devices of this host while the daemon runs: opened at the start, watched, given another GID, tried again.

What happens to a device comes from two sides: its provider tells of its port, and the kernel of the network interfaces.
Either way the inventory is read again, off the event loop, soon afterwards; then

- a device whose GID is gone, or much worse than another one now, is given that one.  Its virtual connections fail with
  a clear error and are made anew, its prober starts again, and the peers are told the new address at once;
- a device that could not be opened is tried again.

A port that goes down fails nothing by itself: queue pairs survive a short outage.  A device that its driver gave up is
taken out; the others go on.
"""

import asyncio
import ipaddress
import logging
import time
from collections.abc import Set
from dataclasses import replace
from typing import Final, Protocol

from dqplbd.admin.process import memlock_limit
from dqplbd.config.models import Config, VerbsDeviceConfig
from dqplbd.engine.engine import DeviceChange, Engine, EngineError, Event
from dqplbd.inventory.discover import LeftOut, discover
from dqplbd.inventory.gids import Gid, score_gid
from dqplbd.inventory.netdev import NetdevError, NetdevMonitor, Netdevs, read_netdevs
from dqplbd.inventory.open import (
    LocalDevice,
    gid_policy,
    open_device,
    prepare_devices,
    reachable_address,
    see_again,
)
from dqplbd.inventory.verbs import RdmaInventory, read_rdma
from dqplbd.logs import fields
from dqplbd.paths import Path
from dqplbd.peers.cards import HelloDevice, epoch_text, random_u64
from dqplbd.probing.prober import DeviceProber
from dqplbd.units import format_bytes

__all__ = ["DeviceHooks", "Devices", "NoDevicesError"]

log = logging.getLogger(__name__)

_RETRY_S: Final = 10.0  # between attempts to open a device that is not open
_SETTLE_S: Final = 0.2  # changes come in bursts
_PAUSE_S: Final = 1.0  # between two looks at the interfaces, where containers come and go all the time
_PATIENCE_S: Final = 2.0  # an address that is gone often comes back, or another one with it
_KINDS: Final = {
    DeviceChange.UP: "up",
    DeviceChange.DOWN: "down",
    DeviceChange.ADDRESS: "address",
    DeviceChange.FATAL: "fatal",
}


class NoDevicesError(Exception):
    """``devices: auto`` found none; the text says what to do."""


class DeviceHooks(Protocol):
    """What the rest of the daemon is told of devices, on the event loop."""

    def device_opened(self, device: LocalDevice) -> None:
        """A device that was not open at the start is now."""

    def device_readdressed(self, device: LocalDevice) -> None:
        """A device has another address, and another prober; both must be told to the peers."""

    def device_changed(self, device: LocalDevice) -> None:
        """Rate or MTU of a device are others now."""

    def device_lost(self, device: LocalDevice, why: str) -> None:
        """A device will not work again."""


def _read_netdevs() -> Netdevs:
    try:
        return read_netdevs()
    except NetdevError as error:
        log.warning("%s", error)
        return Netdevs()


def _read_inventory() -> RdmaInventory:
    """What there is; off the event loop."""
    return read_rdma(_read_netdevs())


def _read_if_changed(before: RdmaInventory, addresses: Set[str]) -> RdmaInventory | None:
    """What there is, where an interface that matters to devices has changed; off the event loop.

    To read the inventory opens each RDMA device; that is too much for each container that comes or goes.

    :param addresses: of tcp devices.
    """
    names = {port.netdev for device in before.devices for port in device.ports}
    names |= {gid.netdev for device in before.devices for port in device.ports for gid in port.gids}

    def what_matters(netdevs: Netdevs) -> tuple[object, ...]:
        return (
            {one for one in netdevs.by_index.values() if one.name in names},
            {text: one for text, one in netdevs.by_address.items() if one.name in names or text in addresses},
        )

    now = _read_netdevs()
    return read_rdma(now) if what_matters(now) != what_matters(before.netdevs) else None


class Devices:
    """See the module's text.  Belongs to one event loop.

    :ivar all: every device, also those that are not open.
    :ivar probers: by the device's number in the engine.
    :ivar left_out: RDMA ports that ``devices: auto`` does not use.
    """

    def __init__(self, config: Config, hooks: DeviceHooks) -> None:
        self.all: list[LocalDevice] = []
        self.probers: dict[int, DeviceProber[Path]] = {}
        self.left_out: tuple[LeftOut, ...] = ()
        self.inventory = RdmaInventory()
        self._config = config
        self._hooks = hooks
        self._engine: Engine | None = None
        self._monitor = NetdevMonitor(self._interfaces_changed, settle_s=0)
        self._whole = False  # look at everything, whether interfaces changed or not
        self._missed_s: dict[int, float] = {}  # since when the GID of a device is gone
        self._down_s: dict[int, float] = {}  # when a port was told to be down
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # -- start

    async def find(self) -> None:
        """Find out which devices there are.  :raises NoDevicesError: none is configured and none was found."""
        self.inventory = await asyncio.get_running_loop().run_in_executor(None, _read_inventory)
        found = discover(self.inventory, self._config.rdma.exclude)
        if not self._config.devices:
            self.left_out = found.left_out
            for one in found.left_out:
                log.info("RDMA port %s is not used: %s", one.port, one.why)
            if not found.devices or self.inventory.error:
                raise NoDevicesError(self._why_none())
        self.all = prepare_devices(self._config, found.devices, self.inventory)

    def _why_none(self) -> str:
        inventory = self.inventory
        if self.left_out and not inventory.error:
            why = "; ".join(f"{one.port}: {one.why}" for one in self.left_out)
            return f"devices is auto, and no RDMA port can be used ({why}): list devices, or correct the section rdma"
        return (
            f"devices is auto, and {inventory.error}: {inventory.fix}. To do without RDMA, list a tcp device: "
            "devices: [{name: tcp0, provider: tcp, address: 127.0.0.1}]"
        )

    def reachable_address(self) -> str | None:
        """An IP address of this host that peers can reach; None when its devices have none."""
        return reachable_address(self.all, self.inventory.netdevs)

    def open(self, engine: Engine) -> None:
        """Open all devices and start their probers."""
        self._engine = engine
        for device in self.all:
            if open_device(engine, device):
                self._start_prober(device)
        self._warn_of_memlock()

    def _warn_of_memlock(self) -> None:
        limit, wanted = memlock_limit(), self._config.clients.max_memory_bytes
        rdma = [one.name for one in self.all if one.number is not None and one.rdma is not None]
        if rdma and limit is not None and limit < wanted:
            log.warning(
                "only %s can be locked, less than the %s that one client may have: registrations with %s will fail; "
                "LimitMEMLOCK=infinity in the unit, `ulimit -l unlimited` by hand, --ulimit memlock=-1 in a container",
                format_bytes(limit),
                format_bytes(wanted),
                ", ".join(rdma),
            )

    def watch(self) -> None:
        """Follow changes from now on."""
        try:
            self._monitor.start()
        except NetdevError as error:
            log.warning("%s", error)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Watch no more."""
        self._monitor.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def stop_probers(self) -> None:
        """End all probers; before the engine is closed."""
        for number in list(self.probers):
            self._stop_prober(number)

    # -- probers

    def _start_prober(self, device: LocalDevice) -> None:
        assert device.number is not None, "only an open device has a prober"
        assert self._engine is not None, "devices are open"
        probing = self._config.probing
        try:
            self.probers[device.number] = DeviceProber(
                self._engine,
                device.number,
                random_u64(),
                timeout_ns=round(probing.timeout_s * 1e9),
                answers_per_s=probing.answers_per_s,
            )
        except EngineError as error:
            log.error("device %s has no prober: %s", device.name, error, extra=fields(device=device.name))

    def _stop_prober(self, number: int) -> None:
        prober = self.probers.pop(number, None)
        if prober is not None:
            asyncio.get_running_loop().remove_reader(prober.fileno())
            prober.stop()

    # -- for others

    def by_number(self, number: int) -> LocalDevice | None:
        """The device of that number in the engine."""
        return next((one for one in self.all if one.number == number), None)

    def hello(self) -> tuple[HelloDevice, ...]:
        """What peers are told of the devices that work."""
        result = []
        for device in self.all:
            if device.number is None or device.info is None or device.error:
                continue
            prober = self.probers.get(device.number)
            result.append(
                HelloDevice(
                    name=device.name,
                    rail=device.rail,
                    provider=device.info.provider,
                    rate_bps=device.rate_bps,
                    mtu_bytes=device.info.mtu or 1500,
                    address=(device.spec.gid or device.spec.address).partition("%")[0],
                    traffic_class=device.spec.traffic_class if device.rdma is not None else None,
                    probe_endpoint=prober.endpoint.hex() if prober is not None else None,
                    probe_token=epoch_text(prober.token) if prober is not None else None,
                )
            )
        return tuple(result)

    # -- what happens

    def on_event(self, event: Event) -> None:
        """Take in what a provider told of a device."""
        device = self.by_number(event.device)
        if device is None or self._engine is None:
            return
        kind = _KINDS.get(DeviceChange(event.change), "other") if event.change in list(DeviceChange) else "other"
        device.last_event = event.text
        before_s, now_s = device.since_s, time.monotonic()
        turned = device.take_info(self._engine.device(event.device))
        extra = fields(device=device.name, event=kind, text=event.text or None)
        if kind == "fatal":
            self._fatal(device, event.text)
            return
        if kind == "down":
            self._down_s[event.device] = now_s
            log.warning(
                "device %s is down: what is under way waits, and fails when its queue pairs give up; check the cable, "
                "the switch port, and `ip link`",
                device.name,
                extra=extra,
            )
        elif kind == "up":
            down_s = self._down_s.pop(event.device, None)
            if turned or down_s is not None:  # some drivers say it twice
                since_s = before_s if down_s is None else down_s
                log.warning("device %s is up again after %.1f s", device.name, now_s - since_s, extra=extra)
            else:
                log.info("device %s is still up", device.name, extra=extra)
        elif kind == "address":
            log.info("addresses of device %s changed: its GID is chosen again", device.name, extra=extra)
        else:
            log.info("device %s: %s", device.name, event.text or "something happened", extra=fields(device=device.name))
        if kind != "other":
            self.look_again()

    def _fatal(self, device: LocalDevice, text: str) -> None:
        assert device.number is not None, "only open devices have events"
        device.error = f"device {device.name} failed ({text or 'its driver gave it up'}): its VCs failed with it"
        device.fix = "see the kernel's log (`dmesg`) for the reason, then: systemctl restart dqplbd"
        log.error("%s", device.error, extra=fields(device=device.name, event="fatal", fix=device.fix))
        self._stop_prober(device.number)
        self._hooks.device_lost(device, device.error)

    def look_again(self) -> None:
        """Read the inventory again, soon."""
        self._whole = True
        self._wanted.set()

    def _interfaces_changed(self) -> None:
        self._wanted.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        last_s = 0.0
        while True:
            wait = _RETRY_S if any(one.number is None for one in self.all) else None
            try:
                async with asyncio.timeout(wait):
                    await self._wanted.wait()
            except TimeoutError:
                self._whole = True  # one more attempt
            else:
                await asyncio.sleep(_SETTLE_S if self._whole else max(_SETTLE_S, last_s + _PAUSE_S - loop.time()))
            self._wanted.clear()
            whole, self._whole = self._whole, False
            last_s = loop.time()
            try:
                if whole:
                    inventory: RdmaInventory | None = await loop.run_in_executor(None, _read_inventory)
                else:
                    addresses = {
                        one.config.address for one in self.all if not isinstance(one.config, VerbsDeviceConfig)
                    }
                    inventory = await loop.run_in_executor(None, _read_if_changed, self.inventory, addresses)
                if inventory is not None:
                    self._take(inventory)
            except Exception:
                # The devices that work go on; the next change is another chance.
                log.exception("the devices of this host cannot be looked at again")

    def _take(self, inventory: RdmaInventory) -> None:
        """Put a newer inventory to use."""
        self.inventory = inventory
        for device in self.all:
            before = device.netdev
            error = device.error
            see_again(device, self._config.rdma, inventory)
            if before is not None and device.netdev is not None and before != device.netdev:
                self._netdev_changed(device, before.up)
            if device.number is None:
                self._try_open(device, error)
            elif not device.error:
                self._ask_engine(device)
                self._choose_gid(device)

    def _netdev_changed(self, device: LocalDevice, was_up: bool) -> None:
        netdev = device.netdev
        assert netdev is not None, "checked by the caller"
        log.log(
            logging.INFO if netdev.up or not was_up else logging.WARNING,
            "interface %s of device %s is %s",
            netdev.name,
            device.name,
            "up" if netdev.up else "down",
            extra=fields(device=device.name, mtu=netdev.mtu),
        )

    def _ask_engine(self, device: LocalDevice) -> None:
        """Notice what changed without an event, as the MTU does."""
        assert self._engine is not None, "devices were opened"
        assert device.number is not None, "it is open"
        before = device.info
        now = self._engine.device(device.number)
        if device.take_info(now) and not now.up:
            log.warning(
                "device %s is down, without an event: its interface or its driver is gone (`ip link`, `dmesg`)",
                device.name,
                extra=fields(device=device.name),
            )
        if device.port is not None and device.port.mtu_bytes:
            mtu = min(device.port.mtu_bytes, device.config.mtu_bytes or device.port.mtu_bytes)
            in_use = device.gids is not None and any(str(one.gid) == device.spec.gid for one in device.gids.table)
            if mtu != now.mtu and in_use:
                try:
                    self._engine.device_readdress(device.number, device.spec.gid)
                except EngineError as error:
                    log.warning("device %s keeps its MTU of %d: %s", device.name, now.mtu, error)
                now = device.info = self._engine.device(device.number)
        if before is not None and (before.mtu, before.rate_bps) != (now.mtu, now.rate_bps):
            log.info(
                "device %s has changed: new connections have the new MTU, those there are keep theirs",
                device.name,
                extra=fields(device=device.name, mtu=now.mtu, rate_bps=now.rate_bps),
            )
            self._hooks.device_changed(device)

    def _try_open(self, device: LocalDevice, before: str) -> None:
        """Open a device that is not open, if there is a chance."""
        assert self._engine is not None, "devices were opened"
        if isinstance(device.config, VerbsDeviceConfig):
            if device.error:
                if device.error != before:
                    log.error("%s", device.error, extra=fields(device=device.name, fix=device.fix or None))
                return
            chosen = device.gids.gid if device.gids is not None else None
            device.spec = replace(device.spec, gid=str(chosen) if chosen is not None else "")
        elif device.netdev is None:
            return
        device.error = ""
        if open_device(self._engine, device, quiet=before):
            self._start_prober(device)
            self._hooks.device_opened(device)

    def _may_come_back(self, device: LocalDevice, other: Gid) -> bool:
        """Whether to wait a moment for the GID in use: it is gone, and the other one is of a lesser kind.

        A device must not flee to a link-local address, which few peers can reach, while DHCP renews its own.
        """
        assert device.number is not None, "only an open device has a GID in use"
        policy = gid_policy(self._config.rdma)
        current = ipaddress.IPv6Address(device.spec.gid)
        before = Gid(0, current, other.kind, other.netdev, other.netdev_up)
        if score_gid(other, policy).score >= score_gid(before, policy).score:
            return False
        now_s = time.monotonic()
        since_s = self._missed_s.setdefault(device.number, now_s)
        if now_s - since_s >= _PATIENCE_S:
            return False
        asyncio.get_running_loop().call_later(_PATIENCE_S - (now_s - since_s), self.look_again)
        return True

    def _choose_gid(self, device: LocalDevice) -> None:
        """Give an open device another GID where the one in use is gone or no good any more."""
        choice = device.gids
        if choice is None or device.number is None or self._engine is None:
            return
        chosen = choice.gid
        if chosen is None:
            log.warning(
                "device %s: its GID %s cannot be used now: %s",
                device.name,
                device.spec.gid,
                choice.why,
                extra=fields(device=device.name),
            )
            return
        if str(chosen) == device.spec.gid:
            self._missed_s.pop(device.number, None)
            return
        if self._may_come_back(device, chosen):
            return
        try:
            self._engine.device_readdress(device.number, str(chosen))
        except EngineError as error:
            log.error("device %s keeps GID %s: %s", device.name, device.spec.gid, error)
            return
        log.warning(
            "device %s has GID %s now, was %s",
            device.name,
            chosen,
            device.spec.gid,
            extra=fields(device=device.name, because=choice.why),
        )
        device.spec = replace(device.spec, gid=str(chosen))
        self._missed_s.pop(device.number, None)
        device.info = self._engine.device(device.number)
        self._stop_prober(device.number)
        self._start_prober(device)
        self._hooks.device_readdressed(device)
