# SPDX-License-Identifier: Apache-2.0
"""``dqplb devices``."""

from typing import Annotated, Literal

import typer

from dqplbd.cli.common import JsonOption, connect, emit_json

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("devices", short_help="Devices of this host.")(devices)


def devices(
    context: typer.Context,
    output: Annotated[
        Literal["table", "wide", "json"] | None,
        typer.Option("-o", "--output", help="table; wide: with ports, limits and GIDs; json: as --json."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the devices of this host, also those that cannot be used, with the reason."""
    client = connect(context)
    found = client.devices()
    if as_json or output == "json":
        emit_json("devices", found)
        return
    from dqplbd.cli.render import print_table, print_tables
    from dqplbd.cli.tables import device_table, wide_device_tables

    if output == "wide":
        print_tables(wide_device_tables(found, client.status().rdma_left_out))
    else:
        print_table(device_table(found))
