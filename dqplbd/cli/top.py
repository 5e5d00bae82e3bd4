# SPDX-License-Identifier: Apache-2.0
"""``dqplb top``."""

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from dqplbd.cli.common import JsonOption, connect, emit_json

if TYPE_CHECKING:
    from dqplbd.admin.client import AdminClient
    from dqplbd.cli.render import Table

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("top", short_help="Watch the busiest paths.")(top)


def top(
    context: typer.Context,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    interval: Annotated[float, typer.Option("--interval", "-d", min=0.2, max=60, help="Seconds between pictures.")] = 1,
    rows: Annotated[int, typer.Option("--rows", min=1, max=200, help="Most paths shown.")] = 20,
    sort: Annotated[str, typer.Option("--sort", help="Order of the paths, as of `dqplb paths`.")] = "tx",
    as_json: JsonOption = False,
) -> None:
    """Watch the busiest paths, the devices and the clients, until Ctrl-C. Prints once where there is no terminal."""
    client = connect(context)
    if as_json:
        emit_json(
            "top",
            {
                "status": client.status(),
                "devices": client.devices(),
                "paths": client.paths(sort=sort, top=rows),
                "clients": client.clients(),
            },
        )
        return
    from dqplbd.cli.render import console, fancy, lines, renderable

    head, tables = _picture(client, rows, sort)
    if once or not fancy():
        parts = [head, *("\n".join(lines(table)) for table in tables if table.rows)]
        sys.stdout.write("\n\n".join(parts) + "\n")
        return
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    screen = console()
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        try:
            while True:
                drawn = [renderable(table, screen.width) for table in tables if table.rows]
                live.update(Group(Text(head, "bold"), *drawn), refresh=True)
                time.sleep(interval)
                head, tables = _picture(client, rows, sort)
        except KeyboardInterrupt:
            pass


def _picture(client: "AdminClient", rows: int, sort: str) -> "tuple[str, list[Table]]":
    from dqplbd.cli.tables import client_table, device_table, duration, path_table, trouble_lines
    from dqplbd.units import format_bytes, format_rate

    status = client.status()
    paths = client.paths(sort=sort, top=rows)
    sent = sum(path.live.tx_bps or 0 for path in paths)
    received = sum(path.live.rx_bps or 0 for path in paths)
    head = (
        f"{status.host_id}  {status.state}  up {duration(status.uptime_seconds)}  "
        f"send {format_rate(sent)}  receive {format_rate(received)}  "
        f"{status.engine.vcs} VCs  {status.engine.flows} flows  {status.engine.clients} clients  "
        f"{format_bytes(status.process.rss_bytes)} resident"
    )
    devices = client.devices()
    head = "\n".join([head, *trouble_lines(devices)])
    return head, [device_table(devices), path_table(paths), client_table(client.clients())]
