# SPDX-License-Identifier: Apache-2.0
"""The kinds of value that the configuration is made of: quantities with units, names, addresses, file modes."""

import ipaddress
import re
from collections.abc import Callable
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from dqplbd.units import UnitError, parse_bytes, parse_ns, parse_rate, parse_seconds

__all__ = [
    "DNS_NAME",
    "PATTERN_MEANINGS",
    "BitRate",
    "DeviceAddress",
    "FileMode",
    "GidText",
    "HostId",
    "HostPort",
    "IpAddress",
    "ListenHostPort",
    "Name",
    "Nanoseconds",
    "PeerName",
    "Place",
    "RdmaMtu",
    "RdmaName",
    "RdmaPattern",
    "Seconds",
    "Size",
    "Subnet",
    "Unit",
    "gid_text",
    "is_loopback",
    "problem",
    "split_host_port",
]


def problem(what: str, expected: str, action: str = "") -> PydanticCustomError:
    """The exception a validator raises: what is wrong, what was expected, and what to do about it."""
    return PydanticCustomError(
        "dqplbd", "{what}; expected {expected}", {"what": what, "expected": expected, "action": action}
    )


class Unit:
    """Annotation that carries the base unit of a quantity for the generated reference."""

    def __init__(self, name: str) -> None:
        self.name = name


def _quantity(parse: Callable[[object], Any]) -> BeforeValidator:
    def check(value: object) -> Any:
        try:
            return parse(value)
        except UnitError as error:
            raise problem(error.problem, error.expected) from None

    return BeforeValidator(check, json_schema_input_type=int | str)


Size = Annotated[int, _quantity(parse_bytes), Unit("bytes")]
BitRate = Annotated[int, _quantity(parse_rate), Unit("bit/s")]
Nanoseconds = Annotated[int, _quantity(parse_ns), Unit("ns")]
Seconds = Annotated[float, _quantity(parse_seconds), Unit("s")]


def _text(value: object) -> object:
    """A name that looks like a whole number (``rack: 12``) is taken as the text that was written."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise problem(f"{value!r} is {type(value).__name__}", "a text", "put it in quotes")
    return value


def _printable(value: object) -> object:
    text = _text(value)
    if isinstance(text, str):
        text = text.strip()
        if not text.isprintable():
            raise problem(f"{text!r} has a character that cannot be printed", "printable text", "remove it")
    return text


_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,30}$"
_HOST_ID: Final = r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,62}$"
_RDMA_NAME: Final = r"^[!-$&-.0-~]{1,63}$"  # what the kernel has room for: anything but % and what ends a path
_RDMA_PATTERN: Final = r"^[!-$&-.0-~]{1,63}(/[0-9*?]{1,3})?$"
_PEER: Final = r"^(\*|[A-Za-z0-9][A-Za-z0-9_.:-]{0,62})$"
DNS_NAME: Final = r"^[A-Za-z0-9_][A-Za-z0-9_-]{0,62}(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?$"

# What the patterns mean, for error messages.
PATTERN_MEANINGS: Final[dict[str, str]] = {
    _NAME: "1 to 31 letters, digits, '_', '.' and '-', the first a letter or digit",
    _HOST_ID: "1 to 63 letters, digits, '_', '.', ':' and '-', the first a letter or digit",
    _PEER: "a host_id, or '*'",
    _RDMA_NAME: "the name of an RDMA device such as mlx5_0",
    _RDMA_PATTERN: "the name of an RDMA device such as mlx5_0 or mlx5_bond_*, or of a port such as mlx5_0/1",
    DNS_NAME: "a DNS name such as dqplbd.cluster.example",
}

Name = Annotated[str, BeforeValidator(_text), Field(pattern=_NAME)]
HostId = Annotated[str, BeforeValidator(_text), Field(pattern=_HOST_ID)]
PeerName = Annotated[str, BeforeValidator(_text), Field(pattern=_PEER)]
RdmaName = Annotated[str, BeforeValidator(_text), Field(pattern=_RDMA_NAME)]
RdmaPattern = Annotated[str, BeforeValidator(_text), Field(pattern=_RDMA_PATTERN)]
Place = Annotated[str, BeforeValidator(_printable), Field(max_length=128)]


def _ip_address(value: object) -> object:
    try:
        return str(ipaddress.ip_address(str(_text(value))))
    except ValueError:
        raise problem(f"{value!r} is no IP address", "an IPv4 or IPv6 address such as 127.0.0.1 or ::1") from None


def _device_address(value: object) -> object:
    """An address that peers can connect to: they are told it as it stands."""
    text = str(_ip_address(value))
    address = ipaddress.ip_address(text)
    if address.is_unspecified or address.is_multicast:
        raise problem(f"{text!r} is no address of one interface", "the address of an interface", "see `ip address`")
    return text


def gid_text(gid: ipaddress.IPv6Address) -> str:
    """A GID as text: an IPv6 address, one made of an IPv4 address as ``::ffff:10.0.0.1``, as inet_ntop(3) has it."""
    mapped = gid.ipv4_mapped
    return f"::ffff:{mapped}" if mapped is not None else str(gid)


def _gid(value: object) -> object:
    """A GID in the text form of :func:`gid_text`; an IPv4 address stands for the GID that is made of it."""
    text = _text(value)
    try:
        address = ipaddress.ip_address(str(text))
    except ValueError:
        raise problem(f"{value!r} is no GID", "an IPv6 address such as fe80::1, or an IPv4 address") from None
    if isinstance(address, ipaddress.IPv4Address):
        address = ipaddress.IPv6Address(b"\0" * 10 + b"\xff\xff" + address.packed)
    inner = address.ipv4_mapped or address
    if address.scope_id is not None or inner.is_unspecified or inner.is_multicast:
        raise problem(f"{text!r} is no GID of a port", "a GID as `dqplb devices -o wide` lists them")
    return gid_text(address)


def _subnet(value: object) -> object:
    try:
        return str(ipaddress.ip_network(str(_text(value)), strict=False))
    except ValueError:
        raise problem(f"{value!r} is no subnet", "a subnet such as 10.0.0.0/8 or fd00::/8") from None


_RDMA_MTUS: Final = (256, 512, 1024, 2048, 4096)


def _rdma_mtu(value: object) -> object:
    try:
        mtu = parse_bytes(value)
    except UnitError as error:
        raise problem(error.problem, error.expected) from None
    if mtu not in _RDMA_MTUS:
        smaller = [one for one in _RDMA_MTUS if one < mtu]
        raise problem(
            f"{value!r} is no MTU of RDMA",
            f"one of {', '.join(map(str, _RDMA_MTUS))}",
            f"use {smaller[-1]}; headers are not counted" if smaller else "",
        )
    return mtu


GidText = Annotated[str, BeforeValidator(_gid)]
Subnet = Annotated[str, BeforeValidator(_subnet)]
RdmaMtu = Annotated[int, BeforeValidator(_rdma_mtu, json_schema_input_type=int | str), Unit("bytes")]
IpAddress = Annotated[str, BeforeValidator(_ip_address)]
DeviceAddress = Annotated[str, BeforeValidator(_device_address)]

_HOST_PORT: Final = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<name>[^\s:\[\]]+)):(?P<port>\d{1,5})", re.ASCII
)
_DNS_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?", re.ASCII)
_HOST_PORT_EXPECTED: Final = '"address:port" such as 10.0.0.7:7471, [fd00::7]:7471 or node7.example:7471'


def split_host_port(text: str) -> tuple[str, int]:
    """``"10.0.0.7:7471"`` or ``"[::1]:7471"`` as (address or name, port); brackets are removed.

    :raises ValueError: not of that form, or a port beyond 65535.
    """
    match = _HOST_PORT.fullmatch(text) if len(text) <= 300 else None
    if match is None:
        raise ValueError(f"{text[:300]!r} is not of the form {_HOST_PORT_EXPECTED}")
    host, port = match["v6"] or match["name"], int(match["port"])
    if port > 65535:
        raise ValueError(f"{text!r} has port {port}; expected 0..65535")
    if match["v6"]:
        ipaddress.IPv6Address(host)
    elif re.fullmatch(r"[\d.]+", host):
        ipaddress.IPv4Address(host)
    elif len(host) > 254 or not _DNS_NAME.fullmatch(host):
        raise ValueError(f"{host!r} is neither an IP address nor a DNS name")
    return host, port


def is_loopback(host: str) -> bool:
    """Whether an address or name is certain to stay on this machine: 127.0.0.0/8, ::1 or ``localhost``."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False


def _host_port(smallest: int) -> BeforeValidator:
    def check(value: object) -> object:
        text = value.strip() if isinstance(value, str) else value
        if not isinstance(text, str):
            raise problem(f"{value!r} is {type(value).__name__}", _HOST_PORT_EXPECTED, "put it in quotes")
        try:
            _, port = split_host_port(text)
        except ValueError as error:
            raise problem(str(error), _HOST_PORT_EXPECTED) from None
        if port < smallest:
            raise problem(f"{text!r} has port {port}", f"a port of {smallest}..65535")
        return text

    return BeforeValidator(check)


HostPort = Annotated[str, _host_port(1)]
ListenHostPort = Annotated[str, _host_port(0)]


def _file_mode(value: object) -> object:
    """An octal text; a plain number would leave it open whether 660 or 0o660 was meant."""
    if isinstance(value, str) and re.fullmatch(r"(0o?)?[0-7]{3}", value):
        return value[-3:].rjust(4, "0")
    raise problem(f"{value!r} is no file mode", 'three octal digits after a zero, such as "0660"', "write it in quotes")


FileMode = Annotated[str, BeforeValidator(_file_mode)]
