# SPDX-License-Identifier: Apache-2.0
"""The configuration of the daemon: models of the YAML file, and the loader.

``load_config(path)`` gives a frozen :class:`Config` or raises :class:`ConfigError` with every problem of the file.
"""

from dqplbd.config.loader import ConfigError, Problem, load_config, parse_config
from dqplbd.config.models import *  # noqa: F403
from dqplbd.config.models import Config
from dqplbd.config.types import is_loopback, split_host_port

__all__ = ["Config", "ConfigError", "Problem", "is_loopback", "load_config", "parse_config", "split_host_port"]
