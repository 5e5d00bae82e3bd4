# SPDX-License-Identifier: Apache-2.0
"""``dqplb bench``."""

import typer

group = typer.Typer(help="Measure throughput and latency between two hosts, through the daemons.", no_args_is_help=True)
