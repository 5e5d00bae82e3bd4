# SPDX-License-Identifier: Apache-2.0
"""What can change while the daemon runs."""

import pytest

from dqplbd.config import Config, parse_config
from dqplbd.reload import RESTART_KEYS, restart_only


@pytest.mark.parametrize("key", RESTART_KEYS)
def test_every_key_exists(key: str) -> None:
    section, _, name = key.partition(".")
    assert section in Config.model_fields
    if name:
        assert name in type(getattr(parse_config("host: {host_id: a}"), section)).model_fields


def test_what_cannot_change_keeps_its_value_and_is_told() -> None:
    old = parse_config("host: {host_id: a}\nclients: {socket: /run/a, max_clients: 3}\n")
    new = parse_config(
        "host: {host_id: b, location: {rack: r}}\nclients: {socket: /run/b, mode: '0600', max_clients: 4}\n"
        "metrics: {port: 1}\nprofiles: {gain: 2}\n"
    )
    config, differing = restart_only(old, new)
    assert differing == ["host.host_id", "clients.socket", "clients.mode", "metrics"]
    assert (config.host.host_id, config.host.location.rack) == ("a", "r")
    assert (config.clients.socket, config.clients.mode, config.clients.max_clients) == ("/run/a", "0660", 4)
    assert config.metrics == old.metrics
    assert config.profiles.gain == 2


def test_the_same_file_changes_nothing() -> None:
    config = parse_config("host: {host_id: a}")
    assert restart_only(config, parse_config("host: {host_id: a}")) == (config, [])
