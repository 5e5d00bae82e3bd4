# SPDX-License-Identifier: Apache-2.0
"""The reference names every key, and the copy in docs/ is the one that the models give."""

from pathlib import Path

from pydantic import BaseModel

from dqplbd.config import Config
from dqplbd.config_reference import reference

ROOT = Path(__file__).parents[2]


def test_every_section_and_key_is_there_with_a_meaning() -> None:
    text = reference()
    for name, field in Config.model_fields.items():
        assert f"\n## {name}\n" in text
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            for key, inner in field.annotation.model_fields.items():
                assert inner.description, f"{name}.{key} has no description"
                assert f"| `{name}.{key}` |" in text
    assert "| `devices[].rate_bps` | rate | `10Gbit/s` | 1Mbit/s to 10Tbit/s |" in text
    assert "| `profiles.peers.<host_id>.qps` | whole number | *none* | 1 to 128 |" in text


def test_the_copy_in_docs_is_up_to_date() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference(), "run `make docs`"
