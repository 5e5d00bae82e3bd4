# SPDX-License-Identifier: Apache-2.0
"""Who may know whom: the layers of docs/architecture.md, checked on every include and import."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
PACKAGE = ROOT / "dqplbd"

# What a layer's sources may include, as prefixes of the path below native/.
ALLOWED = {
    "core": ("core/",),
    "provider": ("core/", "provider/"),
    "sim": ("core/", "provider/", "sim/"),
    "probe": ("core/", "provider/", "probe/"),
    "engine": ("core/", "provider/", "probe/", "engine/", "shim/layout.h"),
    "shim": ("core/", "shim/"),
    "nccl": ("nccl/",),
    "include": (),
}
PUBLIC_HEADER_USERS = {"shim", "nccl"}

# The core takes time as an argument and makes no system call, so only these headers of the C library are of use to it.
PURE_C_HEADERS = {
    "assert.h",
    "errno.h",
    "inttypes.h",
    "limits.h",
    "endian.h",
    "math.h",
    "stdalign.h",
    "stdarg.h",
    "stdatomic.h",
    "stdbool.h",
    "stddef.h",
    "stdint.h",
    "stdio.h",  # snprintf into an error text
    "stdlib.h",
    "string.h",
}

PURE_PYTHON = [
    "topology/classify.py",
    "probing/targets.py",
    "probing/estimate.py",
    "probing/bursts.py",
    "profiles/bdp.py",
    "simulation/measures.py",
    "simulation/senders.py",
    "profiles/retry.py",
    "inventory/gids.py",
    "inventory/discover.py",
    "inventory/rdma_drivers.py",
    "admin/rdma_hints.py",
]
IMPURE_MODULES = {"asyncio", "os", "random", "select", "signal", "socket", "subprocess", "threading", "time", "aiohttp"}

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)


def include_errors(layer: str, text: str) -> list[str]:
    """Return what is wrong with the includes of a C source of ``layer``."""
    errors = []
    for kind, name in _INCLUDE.findall(text):
        if kind == '"':
            if not name.startswith(ALLOWED[layer]):
                errors.append(f'{layer} may not include "{name}"')
            elif not (NATIVE / name).is_file():
                errors.append(f'"{name}" is not a file below native/')
        elif name == "dqplb.h":
            if layer not in PUBLIC_HEADER_USERS:
                errors.append(f"{layer} may not include <dqplb.h>")
        elif layer == "core" and name not in PURE_C_HEADERS:
            errors.append(f"core is pure and may not include <{name}>")
    return errors


def native_sources() -> list[Path]:
    return [path for layer in ALLOWED for suffix in ("*.c", "*.h") for path in sorted((NATIVE / layer).rglob(suffix))]


@pytest.mark.parametrize("path", native_sources(), ids=lambda path: str(path.relative_to(NATIVE)))
def test_includes_point_down(path: Path) -> None:
    layer = path.relative_to(NATIVE).parts[0]
    assert include_errors(layer, path.read_text()) == []


def test_every_native_folder_has_a_rule() -> None:
    # tests and tools may include anything, pkg has no C.
    folders = {path.name for path in NATIVE.iterdir() if path.is_dir()} - {"tests", "tools", "pkg"}
    assert folders <= ALLOWED.keys()


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ("core", '#include "provider/provider.h"'),
        ("core", "#include <time.h>"),
        ("core", "#include <sys/socket.h>"),
        ("core", '#include "ring.h"'),
        ("provider", '#include "engine/engine.h"'),
        ("provider", '  # include "shim/layout.h"'),
        ("engine", '#include "shim/context.h"'),
        ("engine", "#include <dqplb.h>"),
        ("shim", '#include "engine/engine.h"'),
    ],
)
def test_a_wrong_include_is_found(layer: str, line: str) -> None:
    assert len(include_errors(layer, f"/* x */\n{line}\n")) == 1


def imported_modules(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Yield the full name of every module or attribute that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                up = node.level - (1 if is_package else 0)
                base = ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imports_of(path: Path) -> set[str]:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    if is_package:
        parts.pop()
    return set(imported_modules(ast.parse(path.read_text(), str(path)), ".".join(parts), is_package))


def python_sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", python_sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_extensions_have_one_importer(path: Path) -> None:
    folder = path.relative_to(PACKAGE).parts[0]
    imports = imports_of(path)
    if folder != "engine":
        assert "dqplbd.engine._native" not in imports
    if folder != "client":
        assert "dqplbd.client._shim" not in imports
    if folder != "simulation":
        assert "dqplbd.simulation._sim" not in imports


def test_there_are_sources_to_check() -> None:
    assert python_sources()
    assert native_sources()


@pytest.mark.parametrize(
    "line",
    [
        "import dqplbd.engine._native",
        "from dqplbd.engine import _native",
        "from dqplbd.engine._native import lib",
        "from ..engine._native import ffi",
        "from ..engine import _native",
        "def f():\n    from dqplbd.engine._native import lib",
    ],
)
def test_a_wrong_import_is_found(line: str) -> None:
    assert "dqplbd.engine._native" in set(imported_modules(ast.parse(line), "dqplbd.probing.prober", False))


@pytest.mark.parametrize("name", PURE_PYTHON)
def test_pure_modules_stay_pure(name: str) -> None:
    roots = {module.split(".")[0] for module in imports_of(PACKAGE / name)}
    assert not roots & IMPURE_MODULES


def test_the_client_does_not_know_the_daemon() -> None:
    # A workload that imports dqplbd.client must not pull the control plane in.
    for path in sorted((PACKAGE / "client").rglob("*.py")):
        own = {module for module in imports_of(path) if module.startswith("dqplbd.")}
        assert {module for module in own if not module.startswith("dqplbd.client")} <= {"dqplbd.client", "dqplbd.units"}
