# SPDX-License-Identifier: Apache-2.0
"""``dqplb clients``."""

import typer

from dqplbd.cli.common import JsonOption, connect, emit_json

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("clients", short_help="Attached processes.")(clients)


def clients(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the processes that are attached."""
    found = connect(context).clients()
    if as_json:
        emit_json("clients", found)
        return
    from dqplbd.cli.render import print_table
    from dqplbd.cli.tables import client_table

    print_table(client_table(found))
