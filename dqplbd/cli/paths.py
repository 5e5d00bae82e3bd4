# SPDX-License-Identifier: Apache-2.0
"""``dqplb paths`` and ``dqplb path explain``."""

import sys
from typing import Annotated

import typer

from dqplbd.cli.common import JsonOption, connect, emit_json, print_error

__all__ = ["group", "register"]

group = typer.Typer(help="Explain the numbers of one path.", no_args_is_help=True, rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("paths", short_help="Paths: measured, class, profile, load.")(paths)


def paths(
    context: typer.Context,
    path_class: Annotated[
        str | None, typer.Option("--class", help="Only this class: host, rack, zone, building, region, unknown.")
    ] = None,
    peer: Annotated[str | None, typer.Option("--peer", help="Only paths to this host.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="Only paths of this device.")] = None,
    sort: Annotated[
        str,
        typer.Option(
            "--sort", help="Order: class, peer, device, rtt, loss, tx, rx, inflight, delay, window; numbers downwards."
        ),
    ] = "class",
    top: Annotated[int | None, typer.Option("--top", min=1, help="Only the first so many.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List paths: what was measured, the class, the profile, what they carry.

    An RTT in parentheses is not measured but assumed for the class, a delay in parentheses is that of the last data,
    and none is under way now. "each" is outstanding segments a queue pair.
    """
    found = connect(context).paths(path_class=path_class, peer=peer, device=device, sort=sort, top=top)
    if as_json:
        emit_json("paths", found)
        return
    if not found and (path_class or peer or device):
        print_error("no path is of that class, peer and device", "`dqplb paths` without options lists all")
    from dqplbd.cli.render import print_table
    from dqplbd.cli.tables import path_table

    print_table(path_table(found))


@group.command("explain")
def explain(
    context: typer.Context,
    peer: Annotated[str, typer.Argument(metavar="PEER", help="host_id of the other end, as in `dqplb peers`.")],
    as_json: JsonOption = False,
) -> None:
    """Tell how the numbers of the paths to a host came about: measured, class, each number with formula and limit."""
    found = connect(context).explain(peer)
    if as_json:
        emit_json("explanations", found)
        return
    from dqplbd.cli.render import console, fancy, lines, renderable
    from dqplbd.cli.tables import explanation_tables

    rich = console() if fancy() else None
    for i, explanation in enumerate(found):
        path = explanation.path
        head = f"{path.device} -> {path.peer}/{path.peer_device} (rail {path.rail}): {path.path_class}"
        tables = explanation_tables(explanation)
        if rich is not None:
            rich.print(head, style="bold", markup=False)
            for table in tables:
                rich.print(renderable(table, rich.width))
            rich.print(explanation.summary, markup=False)
        else:
            parts = [head, *("\n".join([table.title, *lines(table)]) for table in tables), explanation.summary]
            sys.stdout.write(("\n" if i else "") + "\n\n".join(part for part in parts if part) + "\n")
