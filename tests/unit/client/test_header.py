# SPDX-License-Identifier: Apache-2.0
"""The public header stands alone, in C and in C++."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
INCLUDE = ROOT / "native" / "include"

SOURCE = """
#include <dqplb.h>

int use(dqplb_flow *flow, dqplb_mem *mem);
int use(dqplb_flow *flow, dqplb_mem *mem)
{
    dqplb_request *request;
    dqplb_result result;
    int done = 0;
    enum dqplb_status status = DQPLB_OK;

    (void)status;
    if (dqplb_send(flow, mem, 0, 1, 2, &request) != DQPLB_OK)
        return DQPLB_ERR_INVALID;
    return dqplb_test(request, &done, &result);
}
"""

STRICT = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-Wshadow", "-fvisibility=hidden"]


def compiles(compiler: str, source: Path, *flags: str) -> None:
    program = shutil.which(compiler)
    if program is None:
        pytest.skip(f"{compiler} is not installed")
    done = subprocess.run(
        [program, *STRICT, *flags, f"-I{INCLUDE}", "-c", str(source), "-o", str(source.with_suffix(".o"))],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("standard", ["c99", "c11", "c17"])
def test_c(tmp_path: Path, standard: str) -> None:
    source = tmp_path / "program.c"
    source.write_text(SOURCE)
    compiles("gcc", source, f"-std={standard}", "-Wstrict-prototypes", "-Wc++-compat")


@pytest.mark.parametrize("standard", ["c++11", "c++20"])
def test_cxx(tmp_path: Path, standard: str) -> None:
    source = tmp_path / "program.cpp"
    source.write_text(SOURCE)
    compiles("g++", source, f"-std={standard}", "-Wold-style-cast", "-Wzero-as-null-pointer-constant")


def test_the_complete_program_is_plain_c99(tmp_path: Path) -> None:
    source = tmp_path / "pingpong.c"
    shutil.copy(ROOT / "docs" / "examples" / "pingpong.c", source)
    compiles("gcc", source, "-std=c99", "-D_POSIX_C_SOURCE=200809L")
