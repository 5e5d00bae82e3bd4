# SPDX-License-Identifier: Apache-2.0
"""Looks at queues of the switch at even intervals, in a process of its own.

``sampler.py INTERVAL_NS HOST...``: writes ``ready``; samples from then on until its input ends; then writes one line of
JSON: ``{"times_ns": [...], "bytes": {HOST: [...]}, "drops": {HOST: N}}``, without the samples in which all queues are
empty.
"""

import json
import os
import select
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3]))

from tests.vm.fabric import Queue, make_port
from tests.vm.lab.worker import wake_in_time


def main() -> int:
    """See the module's text.  :returns: exit code."""
    wake_in_time()
    # Before whoever is at work when its time comes: all hosts share a CPU here.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    interval_ns = int(sys.argv[1])
    hosts = [int(argument) for argument in sys.argv[2:]]
    queues = [Queue(make_port(host).switch) for host in hosts]
    times: list[int] = []
    rows: list[list[int]] = []
    print("ready", flush=True)
    due = time.monotonic_ns()
    while True:
        due += interval_ns
        wait = max(due - time.monotonic_ns(), 0) / 1e9
        if select.select([sys.stdin], [], [], 0)[0]:
            break
        time.sleep(wait)
        row = [queue.sample().bytes for queue in queues]
        if any(row):
            times.append(time.monotonic_ns())
            rows.append(row)
    drops = {host: queue.sample().drops for host, queue in zip(hosts, queues, strict=True)}
    found = {host: [row[i] for row in rows] for i, host in enumerate(hosts)}
    print(json.dumps({"times_ns": times, "bytes": found, "drops": drops}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
