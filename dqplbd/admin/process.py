# SPDX-License-Identifier: Apache-2.0
"""The own process as the kernel sees it, for ``Status.process``."""

import os
import re
import resource
from pathlib import Path
from typing import Final

from dqplbd.admin.model import ProcessStats

__all__ = ["memlock_limit", "read_process_stats"]

_CAP_IPC_LOCK: Final = 14  # capabilities(7)


def memlock_limit() -> int | None:
    """Bytes that this process may lock; None for no limit."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    if effective is not None and int(effective[1], 16) >> _CAP_IPC_LOCK & 1:
        return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def read_process_stats() -> ProcessStats:
    """Memory, CPU time, file descriptors and limits of this process, from /proc/self and getrusage(2)."""
    # /proc/self/statm: pages; the second field is the resident set (proc_pid_statm(5)).
    rss_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return ProcessStats(
        pid=os.getpid(),
        rss_bytes=rss_pages * resource.getpagesize(),
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        # The listing itself holds one.
        open_fds=len(os.listdir("/proc/self/fd")) - 1,
        nofile_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memlock_limit_bytes=memlock_limit(),
        threads=len(os.listdir("/proc/self/task")),
        cpus=len(os.sched_getaffinity(0)),
    )
