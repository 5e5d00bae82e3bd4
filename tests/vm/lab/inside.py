# SPDX-License-Identifier: Apache-2.0
"""The part of the laboratory that runs in the guest: ``inside.py JOB.json RESULT.json``.

Makes the fabric; for each setting starts a daemon a host and waits until RTT alone has given every path its class; then
starts a client a host, opens the flows, and lets all begin at one moment, while the queues of the switch are sampled.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

sys.path.append(str(Path(__file__).resolve().parents[3]))

from dqplbd.admin.client import AdminClient
from dqplbd.lab.cluster import API_PORT, Host
from dqplbd.topology.location import PathClass
from tests.vm.fabric import Fabric
from tests.vm.lab.jobs import LINK_BPS, STATIC, Job, Setting
from tests.vm.lab.places import one_way_ns
from tests.vm.lab.wires import shape

HERE: Final = Path(__file__).resolve().parent
CLASSIFY_S: Final = 10.0
READY_S: Final = 30.0
LEAD_NS: Final = 50_000_000
"""Between the last word to the clients and the begin."""


class LabError(RuntimeError):
    """Something that has to work did not."""


def say(text: str) -> None:
    """Tell how far it is, with the simulated time."""
    print(f"{time.monotonic():9.6f} {text}", flush=True)


class Child:
    """A program that takes lines of JSON and answers each with one."""

    def __init__(self, name: str, arguments: list[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-P", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, command: dict[str, Any]) -> None:
        """Send a command, without waiting for its answer."""
        if self._process.stdin is None:
            raise LabError(f"{self.name} has no input")
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def line(self) -> str:
        """The next line it writes.  :raises LabError: it ended."""
        if self._process.stdout is None:
            raise LabError(f"{self.name} has no output")
        line = self._process.stdout.readline()
        if not line:
            raise LabError(f"{self.name} ended with code {self._process.wait()}")
        return line.strip()

    def answer(self) -> dict[str, Any]:
        """The answer to the oldest command without one.  :raises LabError: it is an error."""
        answer: dict[str, Any] = json.loads(self.line())
        if "error" in answer:
            raise LabError(f"{self.name}: {answer['error']}")
        return answer

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.tell(command)
        return self.answer()

    def end(self) -> None:
        """Close its input; it goes."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            self.end()
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def configuration(job: Job, setting: Setting, fabric: Fabric, host: int, provider: str) -> dict[str, Any]:
    """Of one host's daemon."""
    port = fabric.port(host)
    device = {"name": "d0", "rate_bps": LINK_BPS}
    device |= {"address": port.address} if provider == "tcp" else {"provider": "verbs", "rdma_device": port.device}
    config: dict[str, Any] = {
        "devices": [device],
        "peers": {
            "insecure": True,
            "static": [{"address": f"{other.address}:{API_PORT}"} for other in fabric.rail(0) if other is not port],
        },
        "probing": {"interval_s": 0.05, "window_s": 0.2, "samples_per_window": 4, "max_probes_per_s": 2000},
        "transport": {"grants": setting.grants},
        "logging": {"level": "info"},
    }
    if setting.static:
        config["profiles"] = {"classes": {path_class.value: STATIC for path_class in PathClass}}
    return config


class Daemons:
    """A daemon a host."""

    def __init__(self, job: Job, setting: Setting, fabric: Fabric, folder: Path, provider: str) -> None:
        self._job = job
        folder.mkdir(mode=0o700)
        self.hosts = [
            Host(
                f"h{number}",
                fabric.port(number).address,
                folder / f"h{number}",
                configuration(job, setting, fabric, number, provider),
                sys.executable,
            )
            for number in range(len(job.places))
        ]

    def __enter__(self) -> Self:
        # One after the other: a daemon measures when it starts how late it is woken, and they share a CPU here.
        for host in self.hosts:
            host.launch()
            host.wait_state("READY=1", READY_S)
        without = [host.host_id for host in self.hosts if not AdminClient(host.admin).status().devices_up]
        if without:
            self._tell_notes()
            self._stop()
            raise LabError(f"no device is up on {', '.join(without)}")
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            self._tell_notes()
        self._stop()

    def _tell_notes(self) -> None:
        """The last that each daemon complained of."""
        for host in self.hosts:
            notes = [line for line in host.log().splitlines() if " WARNING " in line or " ERROR " in line]
            for line in notes[-5:]:
                print(f"{host.host_id}: {line}", file=sys.stderr)

    def _stop(self) -> None:
        # By force: there is nothing to put in order, and orderly ends of so many take long.
        for host in self.hosts:
            with contextlib.suppress(Exception):
                host.kill()
        for host in self.hosts:
            host.stop()

    def paths(self) -> Iterator[tuple[int, int, Any]]:
        """Every path: the host it begins at, the one it ends at, the daemon's view of it."""
        for number, host in enumerate(self.hosts):
            for path in AdminClient(host.admin).paths():
                if path.peer != host.host_id:
                    yield number, int(path.peer[1:]), path

    def classify(self) -> list[dict[str, Any]]:
        """Wait until every path has its class; at most :data:`CLASSIFY_S`.  :returns: what is known of each path."""
        layout = self._job.layout
        wanted = len(layout) * (len(layout) - 1)
        deadline = time.monotonic() + CLASSIFY_S
        while True:
            found = list(self.paths())
            right = sum(path.path_class is layout.path_class(a, b) for a, b, path in found)
            measured = sum(path.estimate.windows >= 1 for _, _, path in found)
            if (right == measured == wanted) or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        say(f"{right} of {wanted} paths have the right class")
        return [
            {
                "from": a,
                "to": b,
                "class": path.path_class.value,
                "source": path.classification.source,
                "rtt_ns": path.estimate.rtt_ns,
                "window_bytes": path.profile.window_bytes,
                "segment_bytes": path.profile.segment_bytes,
                "qps": path.profile.qps,
                "outstanding": path.profile.outstanding_per_qp,
            }
            for a, b, path in found
        ]


def open_flows(job: Job, clients: dict[int, Child]) -> None:
    """All flows of the job, one after the other, in order."""
    handles = {
        host: clients[host].ask({"do": "listen"})["handle"] for host in sorted({t.target for t in job.transfers})
    }
    for transfer in job.transfers:
        target, source = clients[transfer.target], clients[transfer.source]
        target.ask({"do": "accept", "flow": transfer.key})
        source.ask({"do": "connect", "flow": transfer.key, "handle": handles[transfer.target]})
        target.ask({"do": "accepted"})


def counters(fabric: Fabric) -> dict[str, int]:
    """What the RDMA devices of all hosts have counted, added up."""
    found: dict[str, int] = {}
    for port in fabric.rail(0):
        folder = Path("/sys/class/infiniband", port.device, "ports/1/hw_counters")
        if not folder.is_dir():
            continue
        (folder / "lifespan").write_text("0")  # else the kernel tells what it knew up to 10 ms ago
        for file in sorted(folder.iterdir()):
            if file.name != "lifespan":
                found[file.name] = found.get(file.name, 0) + int(file.read_text())
    return found


def carry(job: Job, daemons: Daemons, fabric: Fabric) -> dict[str, Any]:
    """The traffic.  :returns: when what arrived, and the queues meanwhile."""
    with contextlib.ExitStack() as stack:
        involved = sorted({host for transfer in job.transfers for host in (transfer.source, transfer.target)})
        clients = {
            host: stack.enter_context(
                Child(
                    f"client of h{host}",
                    [str(HERE / "worker.py"), daemons.hosts[host].client_socket, f"lab {host}"],
                )
            )
            for host in involved
        }
        open_flows(job, clients)
        say(f"{len(job.transfers)} flows are open")
        parts = {
            host: {
                "send": {t.key: t.bytes for t in job.transfers if t.source == host},
                "receive": {t.key: t.bytes for t in job.transfers if t.target == host},
            }
            for host in involved
        }
        for host in involved:
            clients[host].ask({"do": "prepare", **parts[host]})
        for daemon in daemons.hosts:
            AdminClient(daemon.admin).reset_peaks()
        sampler = stack.enter_context(
            Child(
                "sampler",
                [str(HERE / "sampler.py"), str(job.interval_ns), *map(str, job.measured)],
            )
        )
        if sampler.line() != "ready":
            raise LabError("the sampler did not get ready")
        before = counters(fabric)
        start_ns = time.monotonic_ns() + LEAD_NS
        for host in involved:
            clients[host].tell({"do": "run", "start_ns": start_ns, "message_bytes": job.message_bytes, **parts[host]})
        answers = {host: clients[host].answer() for host in involved}
        sampler.end()
        queues = json.loads(sampler.line())
        say("all has arrived")
        counted = {name: value - before.get(name, 0) for name, value in counters(fabric).items()}
        live = [
            {
                "from": a,
                "to": b,
                "tx_bytes": path.live.tx_bytes,
                "inflight_peak_bytes": path.live.inflight_peak_bytes,
                "window_bytes": path.live.window_bytes,
                "shrinks": path.live.window_shrinks,
                "grows": path.live.window_grows,
                "retransmits": path.live.retransmits,
                "throttled_window_ns": path.live.throttled_window_ns,
                "throttled_grant_ns": path.live.throttled_grant_ns,
                "throttled_qp_ns": path.live.throttled_qp_ns,
                "throttled_outbound_ns": path.live.throttled_outbound_ns,
            }
            for a, b, path in daemons.paths()
            if path.live.tx_bytes
        ]
    flows = {key: flow for answer in answers.values() for key, flow in answer["flows"].items()}
    for flow in flows.values():
        flow["done_ns"] -= start_ns
    queues["times_ns"] = [at - start_ns for at in queues["times_ns"]]
    return {
        "late_ns": max(answer["began_ns"] for answer in answers.values()) - start_ns,
        "flows": flows,
        "queues": queues,
        "live": live,
        "counters": counted,
    }


def main() -> int:
    """See the module's text.  :returns: exit code."""
    job = Job.from_dict(json.loads(Path(sys.argv[1]).read_text()))
    provider = os.environ.get("DQPLBD_LAB_PROVIDER", "verbs")
    results: dict[str, Any] = {}
    with Fabric(len(job.places), rdma=provider == "verbs") as fabric:
        layout = job.layout
        shape(fabric, lambda a, b: one_way_ns(layout, a, b), LINK_BPS, dict(job.egress_bps))
        say(f"fabric of {len(job.places)} hosts")
        for setting in job.settings:
            folder = Path("/tmp") / setting.name
            with Daemons(job, setting, fabric, folder, provider) as daemons:
                say(f"{len(daemons.hosts)} daemons are ready")
                result: dict[str, Any] = {"paths": daemons.classify()}
                if job.transfers:
                    result |= carry(job, daemons, fabric)
            results[setting.name] = result
    Path(sys.argv[2]).write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
