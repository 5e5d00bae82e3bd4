# SPDX-License-Identifier: Apache-2.0
"""The generator of the cffi extensions: what it takes out of the headers, and what it refuses."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import cffi
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "dqplbd/engine/build.py"
MARKED = [path for path in sorted((ROOT / "native").rglob("*.h")) if "/* cffi: begin */" in path.read_text()]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """The script as a module; it is not part of the installed package."""
    spec = importlib.util.spec_from_file_location("cffi_build", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def header(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "x.h"
    path.write_text(text)
    return path


def test_takes_every_block_and_nothing_else(build: ModuleType, tmp_path: Path) -> None:
    text = build.declarations(
        header(
            tmp_path,
            "#include <stdint.h>\n/* cffi: begin */\nint a(void);\n/* cffi: end */\nint hidden(void);\n"
            "  /* cffi: begin */\nint b(void);\n/* cffi: end */\n",
        )
    )
    assert "int a(void);" in text
    assert "int b(void);" in text
    assert "hidden" not in text
    assert "include" not in text


def test_callbacks_and_attributes(build: ModuleType, tmp_path: Path) -> None:
    text = build.declarations(
        header(
            tmp_path,
            '/* cffi: begin */\n/* cffi-only: extern "Python" void on_event(int); */\n'
            "DQPLB_API int f(const char *s, ...) __attribute__((format(printf, 1, 2)));\n/* cffi: end */\n",
        )
    )
    ffi = cffi.FFI()
    ffi.cdef(text)
    assert 'extern "Python" void on_event(int);' in text
    assert "__attribute__" not in text
    assert "DQPLB_API" not in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("int a(void);\n", "no '/* cffi: begin */' line"),
        ("/* cffi: begin */\nint a(void);\n", "without '/* cffi: end */'"),
        ("int a;\n/* cffi: end */\n", "x.h:2: marker 'cffi: end' has no counterpart"),
        ("/* cffi: begin */\n/* cffi: begin */\n/* cffi: end */\n", "x.h:2: marker 'cffi: begin' has no counterpart"),
    ],
)
def test_markers_must_match(build: ModuleType, tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ValueError, match="cffi") as caught:
        build.declarations(header(tmp_path, text))
    assert says in str(caught.value)


def test_command_names_the_header_that_cffi_cannot_read(tmp_path: Path) -> None:
    path = header(tmp_path, "/* cffi: begin */\nint a(unknown_type);\n/* cffi: end */\n")
    command = [sys.executable, str(SCRIPT), "--module", "m", "--root", str(tmp_path), "--output", str(tmp_path / "m.c")]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{path}: cffi cannot read")
    assert not (tmp_path / "m.c").exists()


@pytest.mark.parametrize("path", MARKED, ids=lambda path: path.name)
def test_every_marked_header_compiles_alone(path: Path, tmp_path: Path) -> None:
    # A header that needs another must include it itself.
    source = tmp_path / "x.c"
    source.write_text(f'#include "{path}"\n')
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    include = [f"-I{ROOT / 'native'}", f"-I{ROOT / 'native/include'}"]
    done = subprocess.run(["gcc", *flags, *include, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_header_is_plain_c(tmp_path: Path) -> None:
    # Programs outside are not compiled with the GNU extensions that the data plane uses.
    source = tmp_path / "x.c"
    source.write_text("#include <dqplb.h>\n#include <dqplb.h>\nint main(void) { return 0; }\n")
    flags = ["-std=c99", "-Wall", "-Wextra", "-pedantic-errors", "-Werror", "-fsyntax-only"]
    done = subprocess.run(["gcc", *flags, f"-I{ROOT / 'native/include'}", str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_there_are_marked_headers() -> None:
    assert ROOT / "native/include/dqplb.h" in MARKED
