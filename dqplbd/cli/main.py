# SPDX-License-Identifier: Apache-2.0
"""``dqplb``: what the daemon of this host does, and why.

Exit codes: 0 ok, 1 failed, 2 usage, 3 daemon not reachable, 78 bad configuration.
"""

import os
import sys
from typing import Annotated

import typer

from dqplbd.cli import bench, clients, config, devices, doctor, paths, peers, probe, reload, simulate, status, top
from dqplbd.cli.common import DEFAULT_SOCKET, EXIT_FAILED, EXIT_UNREACHABLE, EXIT_USAGE, SOCKET_ENV, print_error

__all__ = ["app", "main"]

app = typer.Typer(
    name="dqplb",
    help="Ask the dqplbd daemon of this host what it does, and why.",
    epilog="Exit codes: 0 ok, 1 failed, 2 usage, 3 daemon not reachable, 78 bad configuration.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        from dqplbd import __version__

        print(f"dqplb {__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    socket: Annotated[
        str | None,
        typer.Option(
            "--socket",
            metavar="PATH",
            help=f"Admin socket of the daemon. [env: {SOCKET_ENV}; default: {DEFAULT_SOCKET}]",
            show_default=False,
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Keep the options that all commands share."""
    context.obj = {"socket": socket}


for module in (status, devices, peers, paths, clients, probe, top, doctor, reload, simulate):
    module.register(app)
app.add_typer(paths.group, name="path")
app.add_typer(config.group, name="config")
app.add_typer(bench.group, name="bench")


def main() -> None:
    """Run, and end with one of the documented codes."""
    try:
        app(prog_name="dqplb")
    except BrokenPipeError:
        # The reader (head, less) has enough. Keep the interpreter from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)
    except Exception as error:
        # Imported only now: it is here when a command used it, and it costs when none did.
        from dqplbd.admin.client import NotReachableError
        from dqplbd.admin.model import AdminError

        if isinstance(error, NotReachableError):
            print_error(error.error, error.hint)
            sys.exit(EXIT_UNREACHABLE)
        if isinstance(error, AdminError):
            print_error(error.error, error.hint)
            # 400 is an option that the daemon does not know, such as an order to sort by.
            sys.exit(EXIT_USAGE if error.status == 400 else EXIT_FAILED)
        raise


if __name__ == "__main__":
    main()
