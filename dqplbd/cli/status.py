# SPDX-License-Identifier: Apache-2.0
"""``dqplb status``."""

import typer

from dqplbd.cli.common import JsonOption, connect, emit_json

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("status", short_help="The daemon at a glance.")(status)


def status(context: typer.Context, as_json: JsonOption = False) -> None:
    """Show the daemon at a glance."""
    found = connect(context).status()
    if as_json:
        emit_json("status", found)
        return
    from dqplbd.cli.render import print_pairs
    from dqplbd.cli.tables import status_pairs

    print_pairs(status_pairs(found))
