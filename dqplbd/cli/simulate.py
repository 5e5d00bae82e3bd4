# SPDX-License-Identifier: Apache-2.0
"""``dqplb simulate``."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dqplbd.cli.common import EXIT_CONFIG, EXIT_USAGE, JsonOption, emit_json, fail

if TYPE_CHECKING:
    from dqplbd.cli.render import Table
    from dqplbd.simulation.compare import Comparison

__all__ = ["register"]


def _ratio(value: float, reference: float) -> str:
    return "-" if not reference else f"{value / reference:.2f}"


def _tables(result: "Comparison") -> list["Table"]:
    from dqplbd.cli.render import Column, Table
    from dqplbd.units import format_bytes, format_ns, format_rate

    first = result.runs[0]
    low, high = result.schedule.step_bytes
    sizes = format_bytes(low) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"
    title = result.scenario.title or result.scenario.workload.kind
    bounded = (
        f"{format_bytes(result.scenario.fabric.buffer_bytes)} with pause"
        if result.scenario.fabric.buffer_bytes
        else "unbounded"
    )
    main = Table(
        [
            Column("sender"),
            Column("completion", "right"),
            Column(f"to {first.sender}", "right"),
            Column("of the limit", "right"),
            Column("bus bandwidth", "right"),
            Column("peak buffer", "right"),
            Column(f"to {first.sender}", "right"),
            Column("of a switch", "right"),
            Column("mean", "right"),
            Column("message p99", "right"),
            Column("fairness", "right"),
            Column("pauses", "right"),
            Column("marks", "right"),
        ],
        [
            [
                run.sender,
                format_ns(run.completion_ns),
                _ratio(run.completion_ns, first.completion_ns),
                f"{run.bound_ratio:.3f}",
                "-" if run.bus_bps is None else format_rate(run.bus_bps),
                format_bytes(run.peak_bytes),
                _ratio(run.peak_bytes, first.peak_bytes),
                format_bytes(run.peak_switch_bytes),
                format_bytes(round(run.mean_bytes)),
                format_ns(run.message_ns[1]),
                f"{run.jain:.3f}",
                str(run.pauses),
                str(run.marks),
            ]
            for run in result.runs
        ],
        title=f"{title}: {result.gpus} GPUs, {result.schedule.algorithm}, messages of {sizes}; buffers {bounded}",
    )
    queues = Table(
        [
            Column("sender"),
            Column("tier"),
            Column("queue p50", "right"),
            Column("p99", "right"),
            Column("p99.9", "right"),
            Column("peak", "right"),
        ],
        [
            [run.sender, one.tier, *map(format_bytes, (one.p50_bytes, one.p99_bytes, one.p999_bytes, one.peak_bytes))]
            for run in result.runs
            for one in run.queues
        ],
        title="Queues of ports, as packets found them",
    )
    return [main, queues] if queues.rows else [main]


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("simulate", short_help="What profiles would do to buffers and collectives of a fabric.")
    def simulate(
        scenario: Annotated[
            str, typer.Argument(help="YAML file, or the name of one that comes with the package.", metavar="SCENARIO")
        ] = "all-to-all-32",
        senders: Annotated[
            list[str] | None,
            typer.Option(
                "--sender", metavar="NAME", help="Compare these senders instead of the scenario's; repeatable."
            ),
        ] = None,
        seed: Annotated[int | None, typer.Option("--seed", min=0, help="Instead of the scenario's.")] = None,
        cell: Annotated[
            int | None,
            typer.Option("--cell", min=1, max=256, help="Packets that are sent as one: faster, coarser. 1 is exact."),
        ] = None,
        listed: Annotated[bool, typer.Option("--list", help="Name the scenarios that come with the package.")] = False,
        report: Annotated[
            Path | None,
            typer.Option("--report", metavar="FILE", help="Write the result as a page that needs nothing else."),
        ] = None,
        as_json: JsonOption = False,
    ) -> None:
        """Simulate a fabric packet by packet, with the core of the daemon at its ends, and compare senders.

        Needs no daemon. The first sender is what the others are held against.
        """
        from dqplbd.config import ConfigError
        from dqplbd.simulation.compare import compare
        from dqplbd.simulation.scenario import builtin_names, load_scenario
        from dqplbd.simulation.simulator import SimulationError

        if listed:
            if as_json:
                emit_json("scenarios", builtin_names())
            else:
                print("\n".join(builtin_names()))
            return

        def progress(sender: str, part: float) -> None:
            sys.stderr.write(f"\r{sender}: {part:.0%}\033[K")
            sys.stderr.flush()

        folder = Path()
        try:
            model, folder = load_scenario(scenario)
            if seed is not None:
                model = model.model_copy(update={"seed": seed})
            if cell is not None:
                fabric = model.fabric.model_copy(update={"cell_packets": cell})
                model = model.model_copy(update={"fabric": fabric})
            result = compare(model, folder, senders, progress if sys.stderr.isatty() else None)
        except ConfigError as error:
            sys.stderr.write("".join(f"{problem}\n" for problem in error.problems))
            raise typer.Exit(EXIT_CONFIG) from None
        except SimulationError as error:
            fail(str(error))
        except ValueError as error:  # a sender of the command line, or a line of the trace
            fail(str(error), code=EXIT_USAGE if senders else EXIT_CONFIG)
        finally:
            if sys.stderr.isatty():
                sys.stderr.write("\r\033[K")
        if report is not None:
            from dqplbd.simulation.report import report_html

            try:
                report.write_text(report_html(result), encoding="utf-8")
            except OSError as error:
                fail(f"{report}: {error.strerror}", "name a file that can be written with --report", EXIT_USAGE)
        if as_json:
            emit_json("simulation", result.as_dict())
        else:
            from dqplbd.cli.render import print_tables

            print_tables(_tables(result))
