# SPDX-License-Identifier: Apache-2.0
"""The distribution's own kernel, made ready for a guest in QEMU: where User-Mode Linux cannot be.

::

    python tests/vm/kernel/distribution.py    prints the folder, after making it where it is not there yet

The packages are downloaded and unpacked, not installed; that needs no root.  The folder lies beside the kernels that
build.py makes, and has two files: ``vmlinux``, uncompressed, because a guest without hardware virtualisation takes
seconds to do that, and ``initrd``: the modules that the tests need, and a first process that loads them, mounts the
host's files and starts the program that ``dqplbd.init=`` on the kernel's command line names.  Takes 70 MB of download,
500 MB of scratch space that is given back, and some seconds.
"""

import gzip
import hashlib
import lzma
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[3]))

# All of build.py is part of the name of the kernel that it makes: what is used of it here keeps its name there.
from tests.vm.kernel.build import (
    KernelError,
    _alone,
    _output,
    _policy,
    _Progress,
    _run,
    _say,
    cache_folder,
)

__all__ = ["distribution_kernel"]

META_PACKAGES: Final = ("linux-image-amd64", "linux-image-generic")
"""What depends on the kernel that the distribution installs: Debian's, Ubuntu's."""
BUSYBOX: Final = Path("/bin/busybox")
MODULES: Final = (
    *("virtio_pci", "9pnet_virtio", "9p"),
    *("crc32c_generic", "dummy", "veth", "bridge", "ifb"),
    *("sch_netem", "sch_tbf", "sch_htb", "sch_prio", "sch_drr", "sch_red", "sch_fq", "sch_ingress"),
    *("cls_u32", "cls_flower", "cls_matchall", "act_mirred", "act_gact"),
    *("rdma_rxe", "ib_uverbs", "ib_umad", "rdma_ucm"),
)
OPTIONAL: Final = ("crc32_generic",)
"""What kernels before 6.15 do not add an rxe device without, and later ones do not have."""
KEPT: Final = 2
INIT: Final = """#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc
for word in $($b cat /proc/cmdline); do
    case $word in dqplbd.init=*) init=${word#*=} ;; esac
done
for module in /modules/*; do
    $b insmod "$module" || echo "initrd: $module was not loaded"
done
$b mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=524288,cache=loose root /host || exit 1
$b umount /proc
exec $b switch_root /host "$init"
"""


def _uncompressed(content: bytes, what: str) -> bytes:
    """What was compressed by xz, gzip or zstd; anything else as it is.  :raises KernelError: it is damaged."""
    try:
        if content.startswith(b"\xfd7zXZ\0"):
            return lzma.LZMADecompressor().decompress(content)
        if content.startswith(b"\x1f\x8b"):
            return gzip.decompress(content)
        if content.startswith(b"\x28\xb5\x2f\xfd"):
            return subprocess.run(["zstd", "-dcq"], input=content, capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise KernelError(f"{what} is compressed by zstd, which is not installed") from None
    except (lzma.LZMAError, OSError, EOFError, subprocess.CalledProcessError) as error:
        raise KernelError(f"{what} cannot be uncompressed: {error}") from None
    return content


def vmlinux(image: bytes) -> bytes:
    """The kernel inside a bzImage, as an ELF file.

    The header is that of "The Linux/x86 Boot Protocol", version 2.08 or later (Documentation/arch/x86/boot.rst).

    :raises KernelError: it is no bzImage, or compressed in a way that is not known here.
    """
    if image[0x202:0x206] != b"HdrS" or struct.unpack_from("<H", image, 0x206)[0] < 0x208:
        raise KernelError("the package's vmlinuz is no bzImage with a boot protocol of 2.08 or later")
    sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    begin = (sectors + 1) * 512 + offset
    # The last four bytes are the uncompressed size; for gzip they belong to the format.
    payload = image[begin : begin + length]
    elf = _uncompressed(payload if payload.startswith(b"\x1f\x8b") else payload[:-4], "the package's vmlinuz")
    if not elf.startswith(b"\x7fELF"):
        raise KernelError(f"the package's vmlinuz is compressed in an unknown way: it begins with {payload[:6].hex()}")
    return elf


def _name(file: str) -> str:
    """Name of a module, from that of its file."""
    return Path(file).name.split(".ko")[0].replace("-", "_")


def in_order(tree: Path) -> Iterator[tuple[str, bytes]]:
    """The modules that are needed, each behind those that it needs, by name and content.

    :raises KernelError: the packages lack one.
    """
    files = {_name(str(path)): path for path in tree.glob("**/*.ko*")}
    built_in = {_name(line) for file in tree.glob("**/modules.builtin") for line in file.read_text().splitlines()}
    seen: set[str] = set()

    def visit(name: str, optional: bool = False) -> Iterator[tuple[str, bytes]]:
        if name in seen or name in built_in or (optional and name not in files):
            return
        seen.add(name)
        if name not in files:
            raise KernelError(f"the distribution's kernel has no module {name}")
        content = _uncompressed(files[name].read_bytes(), files[name].name)
        depends = re.search(rb"\0depends=([^\0]*)\0", content)
        for other in depends[1].decode().split(",") if depends else ():
            if other:
                yield from visit(other.replace("-", "_"))
        yield name, content

    for name in OPTIONAL:
        yield from visit(name, optional=True)
    for name in MODULES:
        yield from visit(name)


def cpio(files: Mapping[str, bytes]) -> bytes:
    """An archive as the kernel takes it ("newc", Documentation/driver-api/early-userspace/buffer-format.rst).

    :param files: by path, without a leading slash; their folders are added, all of them are executable.
    """
    folders = sorted({str(parent) for name in files for parent in Path(name).parents} - {"."})
    entries = [
        *((name, 0o040755, b"") for name in [*folders, "proc", "host"]),
        *((name, 0o100755, content) for name, content in files.items()),
        ("TRAILER!!!", 0, b""),
    ]
    archive = bytearray()
    for number, (name, mode, content) in enumerate(entries, 1):
        path = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0)
        archive += b"070701" + b"".join(b"%08X" % field for field in fields) + path
        archive += bytes(-len(archive) % 4) + content
        archive += bytes(-len(archive) % 4)
    return bytes(archive)


def _packages() -> dict[str, str]:
    """Packages of the distribution's kernel and their versions; empty when apt knows none."""
    for meta in META_PACKAGES:
        shown = _output(["apt-cache", "show", "--no-all-versions", meta])
        depends = re.search(r"^Depends: (.*)$", shown, re.M)
        names = re.findall(r"\blinux-(?:image|modules)-[\w.+-]*\d[\w.+-]*", depends[1]) if depends else []
        # Ubuntu's modules are in a package of their own.
        names += [name.replace("linux-image-", "linux-modules-") for name in names if "linux-image-" in name]
        found = {name: version for name in dict.fromkeys(names) if (version := _policy(name))}
        if found:
            return found
    return {}


def _busybox() -> bytes:
    """The program that the initrd runs.  :raises KernelError: there is none that runs without libraries."""
    content = BUSYBOX.read_bytes() if BUSYBOX.is_file() else b""
    if not content or b"/lib64/ld-linux" in content[:4096]:
        raise KernelError(f"{BUSYBOX} is missing or needs libraries; install the package busybox-static")
    return content


def _make(packages: Mapping[str, str], busybox: bytes, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as folder:
        scratch = Path(folder)
        log = scratch / "log"
        progress = _Progress(f"downloading {', '.join(packages)}")
        for name, version in packages.items():
            _run(["apt-get", "download", "-q", f"{name}={version}"], scratch, log)
        progress.end()
        progress = _Progress("unpacking")
        tree = scratch / "tree"
        for package in sorted(scratch.glob("*.deb")):
            _run(["dpkg-deb", "-x", str(package), str(tree)], scratch, log)
        images = list(tree.glob("boot/vmlinuz-*"))
        if len(images) != 1:
            raise KernelError(f"{', '.join(packages)} have {len(images)} files boot/vmlinuz-*; expected one")
        ready = scratch / "ready"
        ready.mkdir()
        (ready / "vmlinux").write_bytes(vmlinux(images[0].read_bytes()))
        files = {"init": INIT.encode(), "bin/busybox": busybox}
        files |= {f"modules/{number:03}-{name}.ko": data for number, (name, data) in enumerate(in_order(tree))}
        (ready / "initrd").write_bytes(cpio(files))
        progress.end()
        ready.rename(target)


def distribution_kernel() -> Path:
    """Folder with ``vmlinux`` and ``initrd``, made where it is not there yet.  :raises KernelError: it cannot be."""
    if platform.machine() != "x86_64":
        raise KernelError(f"guests in QEMU are known for x86_64 only; this machine is {platform.machine()}")
    busybox = _busybox()
    recipe = hashlib.sha256(Path(__file__).read_bytes() + busybox).hexdigest()[:12]
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)

    def made() -> list[Path]:
        return sorted(folder.glob("linux-distribution-*"), key=lambda path: path.stat().st_mtime)

    packages = _packages()
    if not packages:
        # No lists of packages, but a kernel of this recipe: good.
        same = [path for path in made() if path.name.endswith(recipe)]
        if same:
            return same[-1]
        raise KernelError(
            f"apt knows none of {', '.join(META_PACKAGES)}; run `apt-get update` as root where it has no lists yet"
        )
    version = re.sub(r"[^\w.+-]", "_", next(iter(packages.values())))
    target = folder / f"linux-distribution-{version}-{recipe}"
    if target.is_dir():
        return target
    with _alone(folder):
        if not target.is_dir():
            for left in folder.glob("build-*"):  # of one who was killed
                shutil.rmtree(left, ignore_errors=True)
            _say(f"kernel: making {target}, once")
            _make(packages, busybox, target)
            for old in [path for path in made() if path != target][: 1 - KEPT]:
                shutil.rmtree(old, ignore_errors=True)
    return target


if __name__ == "__main__":
    try:
        print(distribution_kernel())
    except KernelError as error:
        _say(f"kernel: {error}")
        sys.exit(1)
