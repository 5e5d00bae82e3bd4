# SPDX-License-Identifier: Apache-2.0
"""Which parts of a configuration can change while the daemon runs, and which cannot.  Pure."""

from typing import Final

from pydantic import BaseModel

from dqplbd.config.models import Config

__all__ = ["RESTART_KEYS", "restart_only"]

RESTART_KEYS: Final = (
    "host.host_id",
    "devices",
    "rdma",
    "peers.listen",
    "probing.timeout_s",
    "probing.answers_per_s",
    "transport.heartbeat_s",
    "transport.op_deadline_s",
    "transport.cancel_deadline_s",
    "transport.stall_s",
    "transport.connect_timeout_s",
    "engine",
    "clients.socket",
    "clients.mode",
    "clients.group",
    "admin",
    "metrics",
)
"""What is given to the engine, its devices and probers, or to sockets, when they are made."""


def restart_only(old: Config, new: Config) -> tuple[Config, list[str]]:
    """``new`` as far as it can be put in force now.

    :returns: the configuration, with the old values of all :data:`RESTART_KEYS`, and those of them that differ.
    """
    differing: list[str] = []
    updates: dict[str, BaseModel | object] = {}
    for key in RESTART_KEYS:
        section, _, name = key.partition(".")
        if not name:
            if getattr(old, section) != getattr(new, section):
                differing.append(key)
                updates[section] = getattr(old, section)
            continue
        before = getattr(getattr(old, section), name)
        if before != getattr(getattr(new, section), name):
            differing.append(key)
            current = updates.get(section, getattr(new, section))
            assert isinstance(current, BaseModel), "sections are models"
            updates[section] = current.model_copy(update={name: before})
    return (new.model_copy(update=updates) if updates else new), differing
