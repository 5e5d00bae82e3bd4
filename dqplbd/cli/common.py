# SPDX-License-Identifier: Apache-2.0
"""What the commands share: options, exit codes, where output goes."""

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

if TYPE_CHECKING:
    from dqplbd.admin.client import AdminClient

__all__ = [
    "DEFAULT_SOCKET",
    "EXIT_CONFIG",
    "EXIT_FAILED",
    "EXIT_OK",
    "EXIT_UNREACHABLE",
    "EXIT_USAGE",
    "JsonOption",
    "connect",
    "emit_json",
    "fail",
    "print_error",
    "socket_path",
]

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNREACHABLE: Final = 3
EXIT_CONFIG: Final = 78  # EX_CONFIG of sysexits.h

DEFAULT_SOCKET: Final = "/run/dqplbd/admin.sock"
SOCKET_ENV: Final = "DQPLB_ADMIN_SOCKET"

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON: base units, stable keys, with a schema_version.", show_default=False)
]


def socket_path(context: typer.Context) -> str:
    """The admin socket: of --socket, else of DQPLB_ADMIN_SOCKET, else the usual place."""
    given = (context.find_root().obj or {}).get("socket")
    return str(given or os.environ.get(SOCKET_ENV) or DEFAULT_SOCKET)


def connect(context: typer.Context) -> "AdminClient":
    """The client of the daemon that the options name; nothing is sent yet."""
    from dqplbd.admin.client import AdminClient

    return AdminClient(socket_path(context))


def emit_json(kind: str, data: Any) -> None:
    """Print ``data``, a model, a list of models or a plain value, in the envelope of the API."""
    from pydantic_core import to_json

    from dqplbd.admin.model import SCHEMA_VERSION

    text = to_json({"schema_version": SCHEMA_VERSION, "kind": kind, "data": data}, indent=2).decode()
    sys.stdout.write(text + "\n")


def print_error(error: str, hint: str = "") -> None:
    """Tell on standard error what went wrong and what to do."""
    sys.stderr.write(f"dqplb: {error}\n")
    if hint:
        sys.stderr.write(f"  {hint}\n")


def fail(error: str, hint: str = "", code: int = EXIT_FAILED) -> NoReturn:
    """Tell what went wrong, and end with a code."""
    print_error(error, hint)
    raise typer.Exit(code)
