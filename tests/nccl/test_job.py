# SPDX-License-Identifier: Apache-2.0
"""What of the GPU test needs no GPU: its numbers, its environment, and that the plugin works in that environment."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dqplbd.admin.client import AdminClient
from dqplbd.lab.cluster import Cluster
from tests.nccl import checks, job

NO_GPU = job.Machine(None, 0, why="not looked for")


# -------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("elements", [0, 1, 7, 1000])
def test_what_all_give_all_get(world: int, elements: int) -> None:
    for giver in range(world):
        sizes = checks.split_sizes(giver, world, elements)
        assert len(sizes) == world
        assert sum(sizes) == elements
        assert min(sizes) >= 0
        taken = [checks.gathered(rank, world, elements)[giver] for rank in range(world)]
        assert [count for _, _, count in taken] == sizes
        # One after the other, without a gap.
        assert [first for _, first, _ in taken] == [sum(sizes[:rank]) for rank in range(world)]
        assert all(source == giver for source, _, _ in taken)


def test_a_byte_in_the_wrong_place_is_a_wrong_value() -> None:
    places = range(5000)
    assert len({checks.given(0, place) for place in places}) == len(places)
    assert all(checks.given(0, place) != checks.given(1, place) for place in places)
    # Exact in a float of 32 bits.
    assert all(checks.summed(256, place) < 2**24 for place in places)


def report(rank: int, wrong: int = 0, elements: int = 1000) -> dict[str, Any]:
    one = {
        "operation": "all_reduce torch.int32",
        "elements": elements,
        "wrong": wrong,
        "first": "place 3: 5, expected 6",
    }
    return {"rank": rank, "checks": [one]}


def test_a_wrong_value_fails() -> None:
    outcome = job.Outcome("", [report(0), report(1, wrong=2)], dict.fromkeys(job.HOSTS, 10**6))
    with pytest.raises(job.JobError, match=r"rank 1: all_reduce.*2 wrong; place 3: 5, expected 6"):
        job.check(outcome)


def test_right_values_that_went_another_way_fail() -> None:
    job.check(job.Outcome("", [report(0), report(1)], dict.fromkeys(job.HOSTS, 2000)))
    with pytest.raises(job.JobError, match="the daemon of gpu2 carried 1999 bytes"):
        job.check(job.Outcome("", [report(0), report(1)], {"gpu1": 2000, "gpu2": 1999}))
    with pytest.raises(job.JobError, match="did not go through"):
        job.check(job.Outcome("", [{"rank": 0, "checks": []}, {"rank": 1, "checks": []}], dict.fromkeys(job.HOSTS, 0)))


# ---------------------------------------------------------------------------------------------------------- environment


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with job.two_daemons() as one:
        yield one


def test_ranks_are_hosts_of_their_own(cluster: Cluster) -> None:
    first, second = (
        job.rank_environment(rank, cluster[name].client_socket, 1, job.Machine("2", 1))
        for rank, name in enumerate(job.HOSTS)
    )
    for variables in (first, second):
        assert variables["NCCL_NET_PLUGIN"] == variables["NCCL_NET"] == "dqplb"
        assert variables["CUDA_VISIBLE_DEVICES"] == "0"  # they share the one there is
        assert (Path(variables["LD_LIBRARY_PATH"].split(os.pathsep)[0]) / job.PLUGIN).is_file()
        assert "NCCL_PROTO" not in variables
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    assert first["DQPLB_SOCKET"] != second["DQPLB_SOCKET"]
    assert job.rank_environment(1, "s", 1, job.Machine("2", 2), "LL")["CUDA_VISIBLE_DEVICES"] == "1"
    assert job.rank_environment(1, "s", 1, job.Machine("2", 2), "LL")["NCCL_PROTO"] == "LL"


# What NCCL does first with a plugin, as far as it needs no structure: find it by name, find its newest table, and read
# the name there, which NCCL_NET selects by.
_LOAD = """
import ctypes, json, os
plugin = ctypes.CDLL("libnccl-net-" + os.environ["NCCL_NET_PLUGIN"] + ".so")
table = ctypes.c_char_p.in_dll(plugin, "ncclNetPlugin_v12")
print(json.dumps({"name": table.value.decode()}))
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_the_plugin_is_found_in_that_environment(cluster: Cluster, rank: int) -> None:
    variables = job.rank_environment(rank, cluster[job.HOSTS[rank]].client_socket, 1, NO_GPU)
    done = subprocess.run(
        [sys.executable, "-P", "-c", _LOAD],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"name": variables["NCCL_NET"]}


def test_ranks_that_fail_are_shown(cluster: Cluster) -> None:
    with pytest.raises(job.JobError, match=r"(?s)rank 0 ended with 2;.*no-such-option.*rank 1 ended with 2;"):
        job.run(cluster, NO_GPU, arguments=["--no-such-option"])


def test_ranks_that_use_another_network_fail(cluster: Cluster) -> None:
    """PyTorch on CPUs has all values right, and none of them came through the daemons."""
    pytest.importorskip("torch")
    with pytest.raises(job.JobError, match="did not go through"):
        job.run(cluster, NO_GPU, arguments=["--backend", "gloo", "--sizes", "1000", "--rate-elements", "0"])


def test_daemons_tell_what_they_carried(cluster: Cluster) -> None:
    assert job.carried(cluster) == dict.fromkeys(job.HOSTS, 0)
    assert AdminClient(cluster["gpu1"].admin).clients() == []


# -------------------------------------------------------------------------------------------------------------- command


def test_dry_shows_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert job.main(["--dry", "--python", sys.executable]) == 0
    shown = capsys.readouterr().out
    for word in ("NCCL_NET=dqplb", "NCCL_HOSTID=dqplb-gpu2", "client.sock", "rank.py", "# not run"):
        assert word in shown


def test_without_pytorch_nothing_is_tested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(
        '#!/bin/sh\necho \'{"torch": null, "gpus": 0, "nccl": null, "why": "No module named torch"}\'\n'
    )
    interpreter.chmod(0o755)
    assert job.main(["--python", str(interpreter)]) == job.SKIPPED
    assert "nothing was tested" in capsys.readouterr().err
    assert job.main(["--python", str(tmp_path / "no-such-interpreter")]) == job.SKIPPED
