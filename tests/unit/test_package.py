# SPDX-License-Identifier: Apache-2.0
"""What `pip install` brings for programs in C: library, header and pkg-config file, all in the environment."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PREFIX = Path(sys.prefix)
HEADER = PREFIX / "include/dqplb.h"
LIBRARY = PREFIX / "lib/libdqplb.so.0"

PROGRAM = """
#include <dqplb.h>
#include <stdio.h>
int main(void)
{
    printf("%u %u\\n", dqplb_version(), (unsigned)DQPLB_API_VERSION);
    return 0;
}
"""


def pkg_config(*arguments: str) -> list[str]:
    environment = os.environ | {"PKG_CONFIG_PATH": str(PREFIX / "lib/pkgconfig")}
    done = subprocess.run(["pkg-config", *arguments, "dqplb"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_pkg_config_and_package_have_one_version() -> None:
    assert pkg_config("--modversion") == [importlib.metadata.version("dqplbd")]


def test_pkg_config_knows_where_the_net_plugin_is() -> None:
    (found,) = pkg_config("--variable=nccl_net_plugin")
    assert Path(found).resolve() == (PREFIX / "lib/libnccl-net-dqplb.so").resolve()


def test_a_program_links_and_runs(tmp_path: Path) -> None:
    source = tmp_path / "program.c"
    source.write_text(PROGRAM)
    program = tmp_path / "program"
    flags = pkg_config("--cflags", "--libs")
    rpath = f"-Wl,-rpath,{PREFIX / 'lib'}"
    done = subprocess.run(
        ["gcc", "-Wall", "-Werror", str(source), *flags, rpath, "-o", str(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    library, header = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.split()
    assert library == header


def test_the_library_exports_what_the_header_declares() -> None:
    done = subprocess.run(
        ["nm", "--dynamic", "--defined-only", "--format=posix", str(LIBRARY)],
        capture_output=True,
        text=True,
        check=True,
    )
    exported = {line.split()[0] for line in done.stdout.splitlines()}
    code = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    declared = set(re.findall(r"^[\w *]*?\b(dqplb_\w+)\(", code, flags=re.MULTILINE))
    assert declared
    assert exported == declared


@pytest.mark.parametrize("name", ["libnccl-net-dqplb.so", "librccl-net-dqplb.so"])
def test_the_net_plugin_finds_its_library(name: str, tmp_path: Path) -> None:
    # In a process of its own, away from the environment's folders, as a job finds it.
    code = f"""
import ctypes
plugin = ctypes.CDLL({str(PREFIX / "lib" / name)!r}, mode=2)
for version in range(8, 13):
    assert ctypes.c_char_p.in_dll(plugin, f"ncclNetPlugin_v{{version}}").value == b"dqplb"
assert any({str(LIBRARY)!r} in line for line in open("/proc/self/maps"))
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["dqplbd", "dqplb"])
def test_the_commands_are_installed(name: str) -> None:
    assert os.access(PREFIX / "bin" / name, os.X_OK)
