# SPDX-License-Identifier: Apache-2.0
"""``dqplb devices``."""

import typer

from dqplbd.cli.common import JsonOption, connect, emit_json

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("devices", short_help="Devices of this host.")(devices)


def devices(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the devices of this host, also those that cannot be used, with the reason."""
    found = connect(context).devices()
    if as_json:
        emit_json("devices", found)
        return
    from dqplbd.cli.render import print_table
    from dqplbd.cli.tables import device_table

    print_table(device_table(found))
