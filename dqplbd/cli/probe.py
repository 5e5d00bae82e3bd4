# SPDX-License-Identifier: Apache-2.0
"""``dqplb probe``."""

from typing import Annotated

import typer

from dqplbd.cli.common import EXIT_FAILED, JsonOption, connect, emit_json

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("probe", short_help="Measure the RTT to a host now.")(probe)


def probe(
    context: typer.Context,
    peer: Annotated[str, typer.Argument(metavar="PEER", help="host_id of the other end, as in `dqplb peers`.")],
    count: Annotated[int, typer.Option("--count", "-c", min=1, max=1000, help="Probes on each path.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Measure the RTT to a host now, on each path. Fails when all probes of a path are lost."""
    report = connect(context).probe(peer, count)
    if as_json:
        emit_json("probe", report)
    else:
        from dqplbd.cli.render import print_table
        from dqplbd.cli.tables import probe_table

        print_table(probe_table(report))
    if any(path.samples and path.lost == len(path.samples) for path in report.paths):
        raise typer.Exit(EXIT_FAILED)
