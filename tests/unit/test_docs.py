# SPDX-License-Identifier: Apache-2.0
"""The documentation names only what there is: files, keys, status codes, metrics, commands, checks."""

import re
from pathlib import Path

import pytest

from dqplbd.cli.main import app
from dqplbd.config.loader import field_at
from dqplbd.config.models import Config
from dqplbd.metrics.catalogue import CATALOGUE

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = ("dqplbd/", "native/", "configs/", "docs/", "systemd/", "tests/", "scripts/")


def commands() -> set[str]:
    """Every command, groups as "group command"."""
    found = {command.name or "" for command in app.registered_commands}
    for group in app.registered_groups:
        assert group.typer_instance is not None
        found |= {f"{group.name} {command.name}" for command in group.typer_instance.registered_commands}
    return found


def code_of(text: str) -> list[str]:
    """What stands in backquotes, and the lines of code blocks."""
    return re.findall(r"`([^`\n]+)`", text) + re.findall(r"^(?: {4,})(\S.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page: Path) -> None:
    for code in code_of(page.read_text()):
        for word in re.findall(rf"(?<![\w./-])((?:{'|'.join(SOURCES)})[\w./-]*)", code):
            assert (ROOT / word.rstrip(".")).exists(), word


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_status_codes_exist(page: Path) -> None:
    header = (ROOT / "native/include/dqplb.h").read_text()
    for name in set(re.findall(r"\b(?:DQPLB_ERR_\w+|DQPLB_OK|dqplb_\w+(?=\())", page.read_text())):
        assert re.search(rf"\b{name}\b", header), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_configuration_keys_exist(page: Path) -> None:
    sections = "|".join(Config.model_fields)
    for code in re.findall(r"`([^`\n]+)`", page.read_text()):
        match = re.fullmatch(rf"((?:{sections})(?:\[\])?(?:\.\w+)+)(?::.*)?", code)
        if match is None or code.endswith((".py", ".yaml", ".md", ".json")):
            continue
        path = tuple(match[1].replace("[]", ".0").split("."))
        _, field = field_at(tuple(int(step) if step.isdigit() else step for step in path))
        assert field is not None, code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metrics_exist(page: Path) -> None:
    names = {one.name for one in CATALOGUE}
    for name in set(re.findall(r"\bdqplbd_[a-z_]+(?:\*)?", page.read_text())):
        prefix = name.removesuffix("*").removesuffix("_")
        known = name in names or (prefix != name and any(one.startswith(prefix) for one in names))
        assert known, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    known = commands()
    words = {command.split()[0] for command in known} | {group.name for group in app.registered_groups}
    for code in code_of(page.read_text()):
        for used in re.findall(r"(?<![\w/.-])dqplb ((?:[a-z-]+ ?\|? ?)+)", code):
            first, _, rest = used.strip().partition(" ")
            if first.startswith("-"):
                continue
            assert first in words, code
            following = rest.split()
            if following[:1] == ["|"]:  # "devices | peers"
                assert set(following) - {"|"} <= words, code
            elif first in {group.name for group in app.registered_groups} and following:
                assert f"{first} {following[0].split('|')[0]}" in known, code


def test_exit_codes_are_told_alike() -> None:
    from dqplbd.cli import common

    text = (ROOT / "docs/operations.md").read_text()
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert told == {getattr(common, name) for name in common.__all__ if name.startswith("EXIT_")}


def test_every_page_of_the_documentation_is_reachable() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for page in (ROOT / "docs").glob("*.md"):
        assert re.search(rf"(?:\(|docs/){re.escape(page.name)}", text), f"nothing leads to {page.name}"
