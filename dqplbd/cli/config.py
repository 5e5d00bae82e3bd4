# SPDX-License-Identifier: Apache-2.0
"""``dqplb config check|show|schema``."""

import json
import sys
from typing import Annotated, Any

import typer

from dqplbd.cli.common import EXIT_CONFIG, JsonOption, connect, emit_json

__all__ = ["group"]

group = typer.Typer(help="Check a configuration, show the one in force.", no_args_is_help=True)

DEFAULT_FILE = "/etc/dqplbd/dqplbd.yaml"

FileArgument = Annotated[str, typer.Argument(help="Configuration file.", metavar="FILE")]


@group.command("check")
def check(file: FileArgument = DEFAULT_FILE, as_json: JsonOption = False) -> None:
    """Check a file without a daemon. Every mistake is named with file, line and key; then the code is 78."""
    from dqplbd.config import ConfigError, load_config

    try:
        load_config(file)
    except ConfigError as error:
        if as_json:
            emit_json("config-check", {"ok": False, "problems": [problem.as_dict() for problem in error.problems]})
        for problem in error.problems:
            sys.stderr.write(f"{problem}\n")
        raise typer.Exit(EXIT_CONFIG) from None
    if as_json:
        emit_json("config-check", {"ok": True, "problems": []})
    else:
        print(f"{file}: ok")


def _print_yaml(config: dict[str, Any]) -> None:
    import yaml

    sys.stdout.write(yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=120))


@group.command("show")
def show(
    context: typer.Context,
    file: Annotated[str | None, typer.Option("--file", help="Of this file, instead of the running daemon.")] = None,
    defaults: Annotated[bool, typer.Option("--defaults", help="The built-in defaults.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the configuration in force, defaults filled in."""
    from dqplbd.admin.model import ConfigView
    from dqplbd.config import ConfigError, load_config, parse_config

    if defaults:
        view = ConfigView(file=None, config=parse_config("").model_dump(mode="json"))
    elif file is not None:
        try:
            view = ConfigView(file=file, config=load_config(file).model_dump(mode="json"))
        except ConfigError as error:
            sys.stderr.write("".join(f"{problem}\n" for problem in error.problems))
            raise typer.Exit(EXIT_CONFIG) from None
    else:
        view = connect(context).config_view()
    if as_json:
        emit_json("config", view)
    else:
        _print_yaml(view.config)


@group.command("schema")
def schema(as_json: JsonOption = False) -> None:
    """Print the JSON Schema of the configuration file, for editors and checks. It is JSON with or without --json."""
    from dqplbd.config import Config

    # Validation mode: what a file may say, not what a dump of it looks like.
    print(json.dumps(Config.model_json_schema(mode="validation"), indent=2))
