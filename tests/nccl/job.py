# SPDX-License-Identifier: Apache-2.0
"""A job of two NCCL ranks whose traffic goes through two daemons on this machine.  Run it: ``make test-gpu``.

    python -P tests/nccl/job.py             # needs PyTorch with NCCL, and one GPU or two
    python -P tests/nccl/job.py --dry       # starts the daemons, shows what the ranks would get, ends
    python -P tests/nccl/job.py --python /opt/torch/bin/python --protocols Simple

The ranks are told that they are on different hosts (NCCL_HOSTID), so NCCL takes the network between them; that also
lets two ranks share one GPU.  The network is the plugin and nothing else: with NCCL_NET set NCCL would rather fail.
Each rank attaches to a daemon of its own, and the daemons talk over loopback.  What was computed is compared value by
value (rank.py), and the daemons are asked how much they carried: results without traffic count as a failure.

Exit code: 0, all is right; 1, something is wrong; 77, this machine has no GPU or no PyTorch, and nothing was tested.
"""

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dqplbd.admin.client import AdminClient, NotReachableError
from dqplbd.lab.cluster import Cluster

__all__ = ["HOSTS", "PLUGIN", "SKIPPED", "JobError", "gpus", "plugin_file", "rank_environment", "run", "two_daemons"]

HOSTS: Final = ("gpu1", "gpu2")
PLUGIN: Final = "libnccl-net-dqplb.so"
PROTOCOLS: Final = ("", "LL", "LL128", "Simple")
"""NCCL_PROTO of each run; the empty one is NCCL's own choice."""
SKIPPED: Final = 77
RANK: Final = Path(__file__).with_name("rank.py")
TIMEOUT_S: Final = 300.0
_TAIL: Final = 6000  # characters of a failed rank's output

_LOOK: Final = """
import json
try:
    import torch
    found = {"torch": torch.__version__, "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0}
    found["nccl"] = list(torch.cuda.nccl.version()) if found["gpus"] else None
except ImportError as error:
    found = {"torch": None, "gpus": 0, "nccl": None, "why": str(error)}
print(json.dumps(found))
"""


class JobError(RuntimeError):
    """A rank failed, or what came out is not what must; the text has the reason."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is for ranks.  ``why`` says why not, where ``gpus`` is 0."""

    torch: str | None
    gpus: int
    nccl: tuple[int, ...] = ()
    why: str = ""


def gpus(python: str = sys.executable) -> Machine:
    """Ask an interpreter for PyTorch and its GPUs."""
    try:
        done = subprocess.run([python, "-P", "-c", _LOOK], capture_output=True, text=True, timeout=120, check=False)
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return Machine(None, 0, why=f"{python}: {error}")
    if found["torch"] is None:
        return Machine(None, 0, why=f"{python} has no PyTorch: {found['why']}")
    if not found["gpus"]:
        return Machine(found["torch"], 0, why=f"PyTorch {found['torch']} sees no GPU")
    return Machine(found["torch"], found["gpus"], tuple(found["nccl"] or ()))


def plugin_file() -> Path:
    """The installed plugin.  :raises JobError: it is not where the package puts it."""
    file = Path(sysconfig.get_path("data")) / "lib" / PLUGIN
    if not file.is_file():
        raise JobError(f"{file} is not there: `make install` puts it there")
    return file


def rank_environment(
    rank: int, client_socket: str, port: int, machine: Machine, protocol: str = "", debug: str = "WARN"
) -> dict[str, str]:
    """The variables that make a process a rank of the job, on top of its own environment.

    :param client_socket: of the daemon that it is to attach to.
    :param port: a free TCP port of loopback, where the ranks meet.
    :param protocol: NCCL_PROTO, or empty.
    """
    variables = {
        # The plugin, and no other network.
        "NCCL_NET_PLUGIN": "dqplb",
        "NCCL_NET": "dqplb",
        "LD_LIBRARY_PATH": os.pathsep.join(
            filter(None, [str(plugin_file().parent), os.environ.get("LD_LIBRARY_PATH")])
        ),
        "DQPLB_SOCKET": client_socket,
        # As if each rank had a host of its own, although a GPU and a memory would be shared.
        "NCCL_HOSTID": f"dqplb-{HOSTS[rank]}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_SOCKET_IFNAME": "lo",  # where the ranks exchange handles
        "CUDA_VISIBLE_DEVICES": str(rank % max(1, machine.gpus)),
        "NCCL_DEBUG": debug,
        "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
        # torch.distributed
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(len(HOSTS)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    if protocol:
        variables["NCCL_PROTO"] = protocol
    return variables


def free_port() -> int:
    """A TCP port of loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def two_daemons(config: Mapping[str, Any] | None = None) -> Iterator[Cluster]:
    """Two daemons with a tcp device each, on loopback."""
    with Cluster(HOSTS, {"logging": {"level": "warning"}, **(config or {})}) as cluster:
        yield cluster


def carried(cluster: Cluster) -> dict[str, int]:
    """Bytes that each daemon has sent to the other until now."""
    found = dict.fromkeys(HOSTS, 0)
    for name in HOSTS:
        other = next(one for one in HOSTS if one != name)
        with suppress(NotReachableError):  # a daemon that does not run has carried nothing
            found[name] = sum(path.live.tx_bytes for path in AdminClient(cluster[name].admin).paths(peer=other))
    return found


def attached(cluster: Cluster) -> set[str]:
    """Names of the processes that are attached to the daemons now."""
    found: set[str] = set()
    for host in cluster:
        with suppress(NotReachableError):
            found.update(client.name for client in AdminClient(host.admin).clients())
    return found


@dataclass(slots=True)
class Outcome:
    """Of one run of all ranks.

    :ivar reports: what the ranks printed.  :ivar carried_bytes: by daemon.  :ivar clients: names of attached processes.
    """

    protocol: str
    reports: list[dict[str, Any]] = field(default_factory=list)
    carried_bytes: dict[str, int] = field(default_factory=dict)
    clients: set[str] = field(default_factory=set)


def run(
    cluster: Cluster,
    machine: Machine,
    protocol: str = "",
    *,
    python: str = sys.executable,
    arguments: Sequence[str] = (),
    debug: str = "WARN",
) -> Outcome:
    """Run the ranks once, and ask the daemons what they saw.

    :param arguments: for rank.py.
    :raises JobError: a rank failed or did not end, a value is wrong, or the daemons carried less than the ranks gave.
    """
    port = free_port()
    before = carried(cluster)
    outcome = Outcome(protocol)
    logs = [cluster.folder / f"rank{rank}.log" for rank in range(len(HOSTS))]  # NCCL_DEBUG=INFO would fill a pipe
    ranks = []
    for rank, name in enumerate(HOSTS):
        variables = rank_environment(rank, cluster[name].client_socket, port, machine, protocol, debug)
        with logs[rank].open("wb") as log:
            ranks.append(
                subprocess.Popen(
                    [python, "-P", str(RANK), *arguments],
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
            outcome.clients |= attached(cluster)
            if any(process.poll() not in (None, 0) for process in ranks):
                deadline = min(deadline, time.monotonic() + 20)  # the other one is to notice
            time.sleep(0.2)
    finally:
        stuck = [rank for rank, process in enumerate(ranks) if process.poll() is None]
        for process in ranks:
            process.kill()
            process.wait()
    said = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
    failed = [
        f"rank {rank} {'did not end' if rank in stuck else f'ended with {process.returncode}'}; "
        f"the end of its output:\n{said[rank][-_TAIL:]}"
        for rank, process in enumerate(ranks)
        if rank in stuck or process.returncode != 0
    ]
    if failed:
        raise JobError(f"NCCL_PROTO={protocol or 'unset'}: " + "\n".join(failed))
    for rank in range(len(HOSTS)):
        outcome.reports.append(json.loads(next(line for line in said[rank].splitlines()[::-1] if line.startswith("{"))))
        if debug != "WARN":
            print(said[rank], file=sys.stderr)
    after = carried(cluster)
    outcome.carried_bytes = {name: after[name] - before[name] for name in HOSTS}
    check(outcome)
    return outcome


def check(outcome: Outcome) -> None:
    """:raises JobError: a value is wrong, or the daemons did not carry what the ranks gave each other."""
    given = 0
    for report in outcome.reports:
        for one in report["checks"]:
            if one["wrong"]:
                what = f"{one['operation']} of {one['elements']}: {one['wrong']} wrong; {one['first']}"
                raise JobError(f"rank {report['rank']}: {what}")
    for one in outcome.reports[0]["checks"]:
        # Of two ranks each gives the other at least half of what it has, whatever the algorithm.
        given += one["elements"] * 4 // 2 if one["operation"].startswith("all_reduce") else 0
    for name, carried_bytes in outcome.carried_bytes.items():
        if carried_bytes < given or given == 0:
            raise JobError(
                f"the daemon of {name} carried {carried_bytes} bytes, the ranks gave each other {given} at least: "
                "they did not go through it"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's text.  :returns: exit code."""
    parser = argparse.ArgumentParser(description="Two NCCL ranks through two daemons.")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has PyTorch (default: this one)")
    parser.add_argument("--dry", action="store_true", help="show what the ranks would get, and end")
    parser.add_argument("--protocols", nargs="*", default=list(PROTOCOLS), help="values of NCCL_PROTO; '' for none")
    parser.add_argument("--debug", default="WARN", help="NCCL_DEBUG of the ranks (default: WARN)")
    options = parser.parse_args(argv)

    machine = gpus(options.python)
    if not machine.gpus and not options.dry:
        print(f"skipped, nothing was tested: {machine.why}", file=sys.stderr)
        return SKIPPED
    try:
        with two_daemons() as cluster:
            if options.dry:
                for rank, name in enumerate(HOSTS):
                    variables = rank_environment(rank, cluster[name].client_socket, free_port(), machine)
                    words = [f"{key}={shlex.quote(value)}" for key, value in variables.items()]
                    print(
                        " \\\n    ".join([f"# rank {rank}, daemon {name}\nenv", *words, f"{options.python} -P {RANK}"])
                    )
                print(f"# not run: {machine.why or 'asked for'}")
                return 0
            print(
                f"PyTorch {machine.torch}, NCCL {'.'.join(map(str, machine.nccl))}, GPUs: {machine.gpus}",
                file=sys.stderr,
            )
            for protocol in options.protocols:
                outcome = run(cluster, machine, protocol, python=options.python, debug=options.debug)
                rate = outcome.reports[0]["bus_bytes_per_second"] or 0
                right = sum(len(one["checks"]) for one in outcome.reports)
                print(
                    f"NCCL_PROTO={protocol or 'unset'}: {right} collectives right; "
                    f"{sum(outcome.carried_bytes.values()) / 1e6:.0f} MB carried by the daemons; "
                    f"all_reduce {rate / 1e9:.2f} GB/s (bus)"
                )
    except JobError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
