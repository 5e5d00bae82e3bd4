# SPDX-License-Identifier: Apache-2.0
"""The guest where User-Mode Linux cannot be: a virtual machine of QEMU with the distribution's own kernel.

It does what the other does, on hardware virtualisation where there is that.  Without it, QEMU emulates the processor:
Python is some fifteen times slower then, and booting takes some seconds.  There is no simulated time.
"""

import fcntl
import functools
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.vm.kernel.build import KernelError

__all__ = ["command", "hardware", "no_uml", "slowdown"]

PROGRAM: Final = "qemu-system-x86_64"
_KERNEL_MB: Final = 192
"""What the distribution's kernel takes more than the small one of User-Mode Linux, with room for its start."""
_KVM_CREATE_VM: Final = 0xAE01
_PTRACE: Final = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
sys.exit(ctypes.get_errno() if libc.ptrace(0, 0, 0, 0) else 0)
"""
"""PTRACE_TRACEME, by a process of its own, which ends with the error."""


@functools.cache
def no_uml() -> str:
    """Why User-Mode Linux cannot run here; empty where it can."""
    if platform.machine() != "x86_64":
        return f"it runs on x86_64 only, and this machine is {platform.machine()}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", _PTRACE], capture_output=True, check=False)
    return f"ptrace is forbidden here ({os.strerror(done.returncode)})" if done.returncode else ""


@functools.cache
def hardware() -> bool:
    """Whether the processor has hardware virtualisation, and this process may use it.

    There are hosts that offer /dev/kvm without; what they emulate does not carry this kernel through its start.
    """
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    if flags is None or not {"vmx", "svm"} & set(flags[1].split()):
        return False
    try:
        device = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.close(fcntl.ioctl(device, _KVM_CREATE_VM, 0))
    except OSError:
        return False
    finally:
        os.close(device)
    return True


def slowdown() -> int:
    """How much longer than in User-Mode Linux a command may take."""
    return 1 if hardware() else 10


def _share(tag: str, folder: Path, *more: str) -> list[str]:
    path = str(folder).replace(",", ",,")
    options = ",".join([f"local,id={tag},path={path},security_model=none,multidevs=remap", *more])
    return ["-fsdev", options, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]


def command(image: Path, control: Path, out: Path, memory_mb: int) -> list[str]:
    """What starts the guest; its console is stdout.

    :param image: folder with ``vmlinux`` and ``initrd``.
    :param control: folder with ``init``, which the guest may write to, as to ``out``; the rest is read-only.
    :raises KernelError: QEMU is not installed, or the folder is none of distribution.py's.
    """
    for name in ("vmlinux", "initrd"):
        if not (image / name).is_file():
            raise KernelError(f"{image} has no {name}; expected a folder that tests/vm/kernel/distribution.py made")
    program = shutil.which(PROGRAM)
    if program is None:
        raise KernelError(f"{PROGRAM} is not installed; the package is qemu-system-x86")
    append = [
        *("console=ttyS0", "quiet", "panic=-1", "tsc=reliable", "mitigations=off", "random.trust_cpu=on"),
        f"dqplbd.init={control}/init",
    ]
    return [
        *(program, "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio"),
        *("-machine", "q35", "-accel", "kvm" if hardware() else "tcg", "-cpu", "max", "-smp", "1"),
        *("-m", f"{memory_mb + _KERNEL_MB}M"),
        *("-kernel", str(image / "vmlinux"), "-initrd", str(image / "initrd"), "-append", " ".join(append)),
        *_share("root", Path("/"), "readonly=on"),
        *_share("control", control),
        *_share("out", out),
    ]
