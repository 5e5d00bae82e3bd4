# SPDX-License-Identifier: Apache-2.0
"""An outside witness: single flows and incasts on ns-3, beside the same in ``dqplb simulate``.

Builds ``tests/bench/ns3/incast.cc`` against Debian's ``libns3-dev`` (with ``g++``), runs it, and compares completion
and peak of the buffers.  Exits with 0 when all are within 5 %, 1 when not, 2 when ns-3 is not there.

    python -P tests/bench/ns3_witness.py
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from dqplbd.cli.render import Column, Table, print_table
from dqplbd.simulation.compare import compare
from dqplbd.simulation.scenario import Scenario

SOURCE: Final = Path(__file__).parent / "ns3" / "incast.cc"
LIBRARIES: Final = ("core", "network", "internet", "point-to-point", "traffic-control")
WITHIN: Final = 0.05
PACKET: Final = 4096 + 82
RTT_NS: Final = 8000


class Case(NamedTuple):
    """Senders to one receiver of their rack; sizes in bytes."""

    senders: int
    message: int
    segment: int
    window: int


CASES: Final = (
    Case(1, 16 << 20, 64 << 10, 256 << 10),  # less than the bandwidth-delay product: a window an RTT
    Case(1, 16 << 20, 64 << 10, 1 << 20),  # more: the rate of the link
    Case(2, 16 << 20, 64 << 10, 512 << 10),
    Case(8, 16 << 20, 64 << 10, 512 << 10),
    Case(8, 16 << 20, 128 << 10, 1 << 20),
)


def build(folder: Path) -> Path:
    """The program.

    :raises subprocess.CalledProcessError: it could not be built.
    :raises FileNotFoundError: there is no compiler.
    """
    program = folder / "incast"
    command = ["g++", "-std=c++17", "-O1", "-o", str(program), str(SOURCE), *(f"-lns3-{name}" for name in LIBRARIES)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


def witness(program: Path, case: Case) -> tuple[int, int]:
    """Completion in ns and peak in bytes, by ns-3."""
    done = subprocess.run(
        [str(program), *map(str, case), str(RTT_NS)], check=True, capture_output=True, text=True, timeout=600
    )
    found = json.loads(done.stdout)
    return int(found["completion_ns"]), int(found["peak_bytes"])


def simulated(case: Case) -> tuple[int, int]:
    """The same by this project."""
    scenario = {
        "region": {"buildings": 1, "zones": 1, "racks": 1, "hosts": case.senders + 1, "gpus": 1},
        "fabric": {"rtt_ns": {"rack": RTT_NS}},
        "workload": {"kind": "incast", "size_bytes": case.message},
    }
    sender = f"static:{case.segment},1,dqplb,{case.window // case.segment}"
    run = compare(Scenario.model_validate(scenario), senders=[sender]).runs[0]
    return run.completion_ns, run.peak_bytes


def main() -> int:
    rows = []
    good = True
    with tempfile.TemporaryDirectory() as folder:
        try:
            program = build(Path(folder))
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            text = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
            print(f"ns-3 cannot be built against: install libns3-dev and g++\n{text}", file=sys.stderr)
            return 2
        for case in CASES:
            (theirs_ns, theirs_bytes), (ours_ns, ours_bytes) = witness(program, case), simulated(case)
            time_ratio = ours_ns / theirs_ns
            # A queue of a packet or two, one of which is being sent, is none.
            near = abs(ours_bytes - theirs_bytes) <= 2 * PACKET
            peak_ratio = ours_bytes / max(theirs_bytes, 1)
            met = abs(time_ratio - 1) <= WITHIN and (near or abs(peak_ratio - 1) <= WITHIN)
            good &= met
            rows.append(
                (
                    f"{case.senders} to 1, window {case.window >> 10} KiB",
                    f"{theirs_ns / 1000:.1f} us",
                    f"{ours_ns / 1000:.1f} us",
                    f"{time_ratio:.4f}",
                    str(theirs_bytes),
                    str(ours_bytes),
                    f"{peak_ratio:.4f}",
                    "yes" if met else "NO",
                )
            )
    heads = ("case", "ns-3", "here", "ratio", "peak, ns-3", "peak, here", "ratio", "within 5 %")
    columns = [Column(head, "left" if i == 0 else "right") for i, head in enumerate(heads)]
    print_table(Table(columns, rows, title="ns-3 as a witness"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
