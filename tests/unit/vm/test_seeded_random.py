# SPDX-License-Identifier: Apache-2.0
"""The library that makes randomness repeatable, preloaded into real programs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "native/tools/seeded_random.c"
PROGRAM = """
import json, os, random, secrets, uuid
fd = os.open("/dev/urandom", os.O_RDONLY)
device = os.read(fd, 16).hex()
print(json.dumps([os.urandom(16).hex(), random.random(), secrets.token_hex(8), uuid.uuid4().hex, device]))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("seeded") / "seeded.so"
    flags = [
        "-std=gnu11",
        "-D_GNU_SOURCE",
        "-D_FILE_OFFSET_BITS=64",
        "-O2",
        "-fPIC",
        "-shared",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]
    subprocess.run(["cc", *flags, "-o", str(built), str(SOURCE), "-lpthread"], check=True)
    return built


def draw(library: Path, seed: str | None) -> list[str | float]:
    env = {**os.environ, "LD_PRELOAD": str(library)}
    if seed is not None:
        env["DQPLBD_SEED"] = seed
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    drawn: list[str | float] = json.loads(done.stdout)
    return drawn


def test_one_seed_gives_the_same_numbers_again(library: Path) -> None:
    assert draw(library, "7 h3") == draw(library, "7 h3")


def test_seeds_and_names_tell_streams_apart(library: Path) -> None:
    streams = [draw(library, seed) for seed in ("7 h3", "7 h4", "8 h3")]
    for column in zip(*streams, strict=True):
        assert len(set(column)) == 3


def test_without_a_seed_the_system_answers(library: Path) -> None:
    assert draw(library, None) != draw(library, None)


def test_no_number_comes_twice_within_a_stream(library: Path) -> None:
    drawn = draw(library, "7 h3")
    assert len(set(drawn)) == len(drawn)
