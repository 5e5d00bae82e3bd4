# SPDX-License-Identifier: Apache-2.0
"""``dqplb reload`` and ``dqplb reset-peaks``."""

import typer

from dqplbd.cli.common import EXIT_CONFIG, JsonOption, connect, emit_json, print_error

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("reload", short_help="Have the configuration read again.")(reload)
    app.command("reset-peaks", short_help="Start the peaks of all paths anew.")(reset_peaks)


def reload(context: typer.Context, as_json: JsonOption = False) -> None:
    """Have the daemon read its configuration again. A bad file changes nothing and ends with code 78."""
    report = connect(context).reload()
    if as_json:
        emit_json("reload", report)
    elif report.ok:
        print(f"in force: {', '.join(report.changed) or 'nothing changed'}")
        if report.restart_needed:
            print(f"not in force before a restart: {', '.join(report.restart_needed)}")
    else:
        for problem in report.problems:
            print_error(problem.text(), problem.action)
        print_error("the old configuration stays in force")
    if not report.ok:
        raise typer.Exit(EXIT_CONFIG)


def reset_peaks(context: typer.Context, as_json: JsonOption = False) -> None:
    """Start the peaks of all paths anew (bytes in flight, delay, queue)."""
    report = connect(context).reset_peaks()
    if as_json:
        emit_json("reset-peaks", report)
    else:
        print(f"peaks start anew on {report.paths} path{'' if report.paths == 1 else 's'}")
