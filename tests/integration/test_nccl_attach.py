# SPDX-License-Identifier: Apache-2.0
"""How the NCCL plugin attaches to a whole daemon: few clients for many communicators, and what its limits do."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dqplbd.admin.client import AdminClient
from dqplbd.lab.cluster import Cluster

MakeCluster = Callable[..., Cluster]
WaitUntil = Callable[[Callable[[], Any], str], Any]
PLUGIN = Path(sys.prefix) / "lib/libnccl-net-dqplb.so"

# Communicators of one process, by the table of version 11 (native/nccl/abi.h): init is entry 1, finalize entry 20.
COMMUNICATORS = """
import ctypes, sys
table = (ctypes.c_void_p * 22).in_dll(ctypes.CDLL(sys.argv[1]), "ncclNetPlugin_v11")
pointer = ctypes.c_void_p
init = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(pointer), ctypes.c_uint64, pointer, pointer, pointer)(table[1])
finalize = ctypes.CFUNCTYPE(ctypes.c_int, pointer)(table[20])
contexts = [pointer() for _ in range(int(sys.argv[2]))]
print([init(ctypes.byref(one), number, None, None, None) for number, one in enumerate(contexts)], flush=True)
sys.stdin.readline()
print([finalize(one) for one in contexts], flush=True)
"""


@pytest.mark.parametrize(("limits", "attached"), [({}, 4), ({"max_clients": 2}, 2), ({"max_clients": 1}, 1)])
def test_communicators_share_what_the_daemon_admits(
    make_cluster: MakeCluster, wait_until: WaitUntil, limits: dict[str, int], attached: int
) -> None:
    cluster = make_cluster(["a"], {"clients": limits})
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", COMMUNICATORS, str(PLUGIN), "7"],
        env=os.environ | {"DQPLB_SOCKET": str(cluster["a"].client_socket)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == f"{[0] * 7}\n"
        clients = AdminClient(cluster["a"].admin).clients()
        names = sorted(client.name for client in clients if client.name.startswith("nccl:"))
        assert [name.rsplit("/", 1)[1] for name in names] == [str(number) for number in range(attached)]
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == f"{[0] * 7}\n"
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
