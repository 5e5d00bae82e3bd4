# SPDX-License-Identifier: Apache-2.0
"""The client of the admin API: blocking HTTP over the Unix socket, with the standard library only.

It is used by a command line that should start in an instant, hence no aiohttp.
"""

import errno
import http.client
import json
import os
import socket
import stat
from collections.abc import Mapping
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

from pydantic import TypeAdapter, ValidationError

from dqplbd.admin.model import (
    SCHEMA_VERSION,
    AdminError,
    Client,
    ConfigView,
    Device,
    Explanation,
    Path,
    Peer,
    ProbeReport,
    ReloadReport,
    ResetReport,
    Status,
)

__all__ = ["AdminClient", "NotReachableError"]

MAX_ANSWER_BYTES: Final = 1 << 30

T = TypeVar("T")


class NotReachableError(Exception):
    """No daemon answers on the admin socket.

    :ivar error: names the socket and what happened.
    :ivar hint: what to do about it.
    """

    def __init__(self, error: str, hint: str) -> None:
        super().__init__(error)
        self.error = error
        self.hint = hint


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(self._path)
        except BaseException:
            self.sock.close()
            self.sock = None
            raise


class AdminClient:
    """Requests to one daemon, a connection each.

    :param path: the admin socket.
    :param timeout_s: longest wait for an answer to a reading request.
    """

    def __init__(self, path: str, timeout_s: float = 10.0) -> None:
        self.path = path
        self.timeout_s = timeout_s

    # ----------------------------------------------------------------------------------------------------- requests

    def _unreachable(self, cause: Exception) -> NotReachableError:
        hint = (
            "is it running? `systemctl status dqplbd` says; another socket is named by --socket or DQPLB_ADMIN_SOCKET"
        )
        if isinstance(cause, FileNotFoundError):
            what = "there is no such socket"
        elif isinstance(cause, ConnectionRefusedError):
            # connect() refuses in the same way what is no socket at all, such as a folder.
            what = "nobody listens on it" if _is_socket(self.path) else "that is not a socket"
        elif isinstance(cause, OSError) and cause.errno == errno.EPROTOTYPE:
            what = "that is a socket of another kind"
            hint = "name the admin socket (admin.socket in the configuration); clients attach at another one"
        elif isinstance(cause, PermissionError):
            what = "permission denied"
            hint = (
                "run as root or as a member of the socket's group (admin.group, admin.mode in the configuration); "
                "`systemctl status dqplbd` tells whether it runs"
            )
        elif isinstance(cause, TimeoutError):
            what = f"no answer within {self.timeout_s:g} s"
            hint = "the daemon hangs or the machine is overloaded: see `systemctl status dqplbd` and its log"
        else:
            what = (isinstance(cause, OSError) and cause.strerror) or str(cause) or type(cause).__name__
        return NotReachableError(f"the daemon cannot be reached at {self.path}: {what}", hint)

    def request(self, method: str, target: str, body: object = None, *, extra_s: float = 0.0) -> dict[str, Any]:
        """Carry out one request.

        :returns: the envelope as it came.
        :raises NotReachableError: no daemon there, or no sound answer.
        :raises AdminError: the daemon refused it.
        """
        connection = _UnixConnection(self.path, self.timeout_s + extra_s)
        try:
            if len(os.fsencode(self.path)) > 107:
                raise OSError("the path is longer than the 107 bytes that a Unix socket can have")
            payload = None if body is None else json.dumps(body)
            connection.request(method, target, payload, {"Content-Type": "application/json"} if payload else {})
            response = connection.getresponse()
            raw = response.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as cause:
            raise self._unreachable(cause) from cause
        finally:
            connection.close()
        try:
            answer = json.loads(raw)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise NotReachableError(
                f"{self.path} answered something that is no JSON object (HTTP {response.status})",
                "is it the admin socket of dqplbd? `dqplb config show` of the running daemon names it as admin.socket",
            )
        if response.status >= 400:
            raise AdminError(
                str(answer.get("error", f"HTTP {response.status}")),
                str(answer.get("hint", "")),
                status=response.status,
            )
        version = answer.get("schema_version")
        if version != SCHEMA_VERSION:
            raise AdminError(
                f"the daemon speaks schema version {version!r}, this program {SCHEMA_VERSION}",
                "use the dqplb that was installed with the running daemon, or restart the daemon after an update",
                status=502,
            )
        return answer

    def _get(self, target: str, kind: type[T]) -> T:
        return _parse(self.request("GET", target), kind)

    # ------------------------------------------------------------------------------------------------------ the API

    def status(self) -> Status:
        """The daemon at a glance."""
        return self._get("/v1/status", Status)

    def devices(self) -> list[Device]:
        """Its devices."""
        return self._get("/v1/devices", list[Device])

    def peers(self) -> list[Peer]:
        """Its peers."""
        return self._get("/v1/peers", list[Peer])

    def paths(
        self,
        *,
        path_class: str | None = None,
        peer: str | None = None,
        device: str | None = None,
        sort: str | None = None,
        top: int | None = None,
    ) -> list[Path]:
        """Its paths; for the arguments see :func:`dqplbd.admin.select.select_paths`."""
        query: Mapping[str, object] = {"class": path_class, "peer": peer, "device": device, "sort": sort, "top": top}
        text = urlencode({key: value for key, value in query.items() if value is not None})
        return self._get(f"/v1/paths{'?' if text else ''}{text}", list[Path])

    def explain(self, peer: str) -> list[Explanation]:
        """How the numbers of each path to a host came about."""
        return self._get(f"/v1/paths/{quote(peer, safe='')}/explain", list[Explanation])

    def clients(self) -> list[Client]:
        """Its clients."""
        return self._get("/v1/clients", list[Client])

    def config_view(self) -> ConfigView:
        """The configuration in force."""
        return self._get("/v1/config", ConfigView)

    def probe(self, peer: str, count: int) -> ProbeReport:
        """Extra probes; waits for them."""
        # Each probe may take up to its time-out; the daemon bounds it, this only must not give up earlier.
        answer = self.request("POST", "/v1/probe", {"peer": peer, "count": count}, extra_s=count * 30.0)
        return _parse(answer, ProbeReport)

    def reload(self) -> ReloadReport:
        """Read the configuration file again."""
        return _parse(self.request("POST", "/v1/reload", extra_s=60.0), ReloadReport)

    def reset_peaks(self) -> ResetReport:
        """Start the peaks of all paths anew."""
        return _parse(self.request("POST", "/v1/reset-peaks"), ResetReport)


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def _parse(answer: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return TypeAdapter(kind).validate_python(answer.get("data"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise AdminError(
            f"the daemon's answer is not as expected: {place}: {first['msg']}",
            "use the dqplb that was installed with the running daemon, or restart the daemon after an update",
            status=502,
        ) from None
