# SPDX-License-Identifier: Apache-2.0
"""One rank of the GPU test: collectives over PyTorch's NCCL, each value looked at.

Run by job.py, which sets the environment that torch.distributed reads (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and
NCCL's.  Prints one JSON object: what it ran on, and one entry a collective.  Exit code 1: a value is wrong.

``--backend gloo`` runs the same on CPUs, without NCCL: so this file itself can be tried where no GPU is.
"""

import argparse
import dataclasses
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from tests.nccl import checks


def main() -> int:
    parser = argparse.ArgumentParser(description="One rank.")
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(checks.SIZES), help="elements a rank")
    parser.add_argument("--rate-elements", type=int, default=4 << 20, help="of the all_reduce that is timed; 0: none")
    options = parser.parse_args()

    # By name: the linters' environment has no PyTorch.
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = options.backend == "nccl"
    if on_gpu:
        torch.cuda.set_device(0)  # job.py lets each rank see one
    device = torch.device("cuda:0" if on_gpu else "cpu")
    dist.init_process_group(options.backend)

    def places(first: int, count: int) -> Any:
        return torch.arange(first, first + count, dtype=torch.int64, device=device)

    done: list[checks.Check] = []

    def compare(operation: str, found: Any, expected: Any) -> None:
        if found.numel() != expected.numel():
            done.append(checks.Check(operation, expected.numel(), expected.numel(), f"{found.numel()} elements"))
            return
        differ = (found.to(torch.int64) != expected).nonzero()
        text = ""
        if differ.numel():
            place = int(differ[0])
            text = f"place {place}: {found[place].item()}, expected {expected[place].item()}"
        done.append(checks.Check(operation, expected.numel(), differ.shape[0], text))

    for elements in options.sizes:
        everywhere = places(0, elements)
        for kind in (torch.int32, torch.float32):
            data = checks.given(rank, everywhere).to(kind)
            dist.all_reduce(data)
            compare(f"all_reduce {kind}", data, checks.summed(world, everywhere))
        # Several at a time: what is under way mixes, and must not.
        several = [checks.given(rank, places(i * 1000, elements)).to(torch.int32) for i in range(4)]
        works = [dist.all_reduce(one, async_op=True) for one in several]
        for i, work in enumerate(works):
            work.wait()
            compare(f"all_reduce {i + 1} of 4 at once", several[i], checks.summed(world, places(i * 1000, elements)))
        parts = checks.gathered(rank, world, elements)
        out = torch.zeros(sum(count for _, _, count in parts), dtype=torch.int32, device=device)
        dist.all_to_all_single(
            out,
            checks.given(rank, everywhere).to(torch.int32),
            output_split_sizes=[count for _, _, count in parts],
            input_split_sizes=checks.split_sizes(rank, world, elements),
        )
        compare("all_to_all", out, torch.cat([checks.given(of, places(first, count)) for of, first, count in parts]))

    rate = None
    if options.rate_elements:
        data = torch.ones(options.rate_elements, dtype=torch.float32, device=device)
        rounds = 5
        for timed in (False, True):
            dist.barrier()
            begin = time.monotonic()
            for _ in range(rounds if timed else 2):
                dist.all_reduce(data)
            if on_gpu:
                torch.cuda.synchronize()
            if timed:
                rate = data.numel() * 4 * rounds * 2 * (world - 1) / world / (time.monotonic() - begin)
    dist.barrier()
    dist.destroy_process_group()
    report = {
        "rank": rank,
        "world": world,
        "backend": options.backend,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "gpu": torch.cuda.get_device_name(0) if on_gpu else None,
        "bus_bytes_per_second": round(rate) if rate is not None else None,
        "checks": [dataclasses.asdict(one) for one in done],
    }
    print(json.dumps(report), flush=True)
    return 0 if all(one.ok for one in done) else 1


if __name__ == "__main__":
    sys.exit(main())
