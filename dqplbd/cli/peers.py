# SPDX-License-Identifier: Apache-2.0
"""``dqplb peers``."""

import typer

from dqplbd.cli.common import JsonOption, connect, emit_json

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("peers", short_help="Hosts that this one knows.")(peers)


def peers(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the hosts that this one knows, and why one cannot be reached."""
    found = connect(context).peers()
    if as_json:
        emit_json("peers", found)
        return
    from dqplbd.cli.render import print_table
    from dqplbd.cli.tables import peer_table

    print_table(peer_table(found))
