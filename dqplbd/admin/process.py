# SPDX-License-Identifier: Apache-2.0
"""The own process as the kernel sees it, for ``Status.process``."""

import os
import resource
from pathlib import Path

from dqplbd.admin.model import ProcessStats

__all__ = ["read_process_stats"]


def read_process_stats() -> ProcessStats:
    """Memory, CPU time, file descriptors and limits of this process, from /proc/self and getrusage(2)."""
    # /proc/self/statm: pages; the second field is the resident set (proc_pid_statm(5)).
    rss_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    usage = resource.getrusage(resource.RUSAGE_SELF)
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return ProcessStats(
        pid=os.getpid(),
        rss_bytes=rss_pages * resource.getpagesize(),
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        # The listing itself holds one.
        open_fds=len(os.listdir("/proc/self/fd")) - 1,
        nofile_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memlock_limit_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        threads=len(os.listdir("/proc/self/task")),
        cpus=len(os.sched_getaffinity(0)),
    )
