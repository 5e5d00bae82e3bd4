# SPDX-License-Identifier: Apache-2.0
"""A second witness: the kernel's RDMA stack in simulated time, beside the same in ``dqplb simulate``.

Reads what ``make lab`` wrote to ``build/rdma.json``, simulates the rack's incast and the single flow, and compares
goodput and the longest queue of the whole run.  Of the static setting what is in flight is known: ``rdma_rxe``'s 128
packets of each of 16 queue pairs.  Exits with 0 when all is within 10 %, 1 when not, 2 when the laboratory has not run.

    python -P tests/bench/lab_witness.py [build/rdma.json]
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

from dqplbd.cli.render import Column, Table, print_table
from dqplbd.simulation.compare import compare
from dqplbd.simulation.scenario import Scenario

WITHIN: Final = 0.10
GBIT: Final = 10**9
# 8 MiB a pair of hosts, as 16 queue pairs of 128 packets of 4 KiB.
STATIC: Final = "static:65536,16,dqplb,8"
COMPUTED: Final = "dqplb+grants+delay"
JOBS: Final[dict[str, dict[str, Any]]] = {
    "incast_rack": {
        "region": {"buildings": 1, "zones": 1, "racks": 1, "hosts": 9, "gpus": 1},
        "fabric": {"nic_rate_bps": 100 * GBIT, "host_ns": 0},
        "workload": {"kind": "incast", "size_bytes": 16 << 20, "senders": 8},
    },
    "single": {
        "region": {"buildings": 2, "zones": 1, "racks": 1, "hosts": 1, "gpus": 1},
        "fabric": {
            "nic_rate_bps": 100 * GBIT,
            "planes": 1,
            "oversubscription": {"rack": 1, "zone": 1, "building": 100 / 36},
            "host_ns": 0,
        },
        "workload": {"kind": "incast", "size_bytes": 128 << 20, "senders": 1},
    },
}


def main() -> int:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("build/rdma.json")
    try:
        document = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        print(f"{file}: {error}: run make lab first", file=sys.stderr)
        return 2
    measured = {row["name"]: row["value"] for row in (document["rows"] if isinstance(document, dict) else document)}
    rows = []
    good = True
    for job, scenario in JOBS.items():
        result = compare(Scenario.model_validate(scenario), senders=(STATIC, COMPUTED))
        for setting, run in zip(("static", "computed"), result.runs, strict=True):
            ours = {"goodput": run.throughput_bps / 8, "queue": float(run.peak_bytes)}
            names = {"goodput": ("goodput",), "queue": ("queue_first", "queue_after")}
            for what, value in ours.items():
                rows_of = [f"lab_{job}_{setting}_{name}" for name in names[what]]
                missing = [name for name in rows_of if measured.get(name) is None]
                if missing:
                    print(f"{file} has no {missing[0]}: run make lab first", file=sys.stderr)
                    return 2
                theirs = max(measured[name] for name in rows_of)
                ratio = value / theirs
                met = abs(ratio - 1) <= WITHIN
                good &= met
                verdict = "yes" if met else "NO"
                rows.append((job, setting, what, f"{theirs:.4g}", f"{value:.4g}", f"{ratio:.3f}", verdict))
    heads = ("job", "setting", "measure", "laboratory", "here", "ratio", "within 10 %")
    columns = [Column(head, "left" if i < 3 else "right") for i, head in enumerate(heads)]
    print_table(Table(columns, rows, title="The laboratory as a witness; bytes a second, bytes"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
