#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Make sure that the system has what a target of the Makefile needs, and print the Python interpreter to use.
#
#   scripts/setup.sh demo|test|bench|rdma|qemu
#
# As root, or where sudo asks for no password, missing Debian or Ubuntu packages are installed. Otherwise the exact
# command to run is printed and the exit code is 1. A second run changes nothing and takes a few milliseconds.
# stdout: the interpreter's path and nothing else. stderr: everything meant for people.
set -euo pipefail

say() { printf '%s\n' "$*" >&2; }

case "${1-}" in
# Without libibverbs-dev everything works but the verbs provider, which is then not built.
demo) want_packages=(gcc libc6-dev pkg-config libibverbs-dev) ;;
test) want_packages=(gcc libc6-dev pkg-config libibverbs-dev libcmocka-dev procps systemd) ;;
bench) want_packages=(gcc libc6-dev pkg-config libibverbs-dev iperf3 valgrind) ;;
rdma)
    # The first line builds the guest's kernel, the second is the RDMA stack and its tools, the third what the tests run.
    want_packages=(
        gcc libc6-dev pkg-config make flex bison bc xz-utils bzip2 binutils
        libibverbs-dev ibverbs-providers ibverbs-utils rdma-core python3-pyverbs
        libcmocka-dev iproute2 kmod perftest valgrind util-linux
    )
    ;;
# For the guests of the RDMA tests where User-Mode Linux cannot run.
qemu) want_packages=(qemu-system-x86 busybox-static zstd) ;;
*)
    say "usage: $0 demo|test|bench|rdma|qemu"
    exit 2
    ;;
esac

# 3.11 or later, able to make environments, with the headers that extensions are built with.
usable() {
    "$1" - <<'PY' 2>/dev/null
import ensurepip, os, sys, sysconfig, venv
sys.exit(not (sys.version_info >= (3, 11) and os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))))
PY
}

if [[ -n "${PYTHON-}" ]] && ! { command -v "$PYTHON" >/dev/null && usable "$PYTHON"; }; then
    say "PYTHON=$PYTHON cannot be used: expected Python 3.11 or later with the venv module and Python.h"
    exit 1
fi

# The distribution's own interpreter comes first: its pyverbs package is built for that one.
find_python() {
    local candidate
    if [[ -n "${PYTHON-}" ]]; then
        command -v "$PYTHON"
        return
    fi
    for candidate in /usr/bin/python3 python3 /usr/bin/python3.{14,13,12,11} python3.{14,13,12,11}; do
        candidate=$(command -v "$candidate" || true)
        if [[ -n "$candidate" ]] && usable "$candidate"; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    return 1
}

installed() { [[ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]; }

# The packages that give a usable Python here: the default one where it is new enough, else a versioned one.
python_packages() {
    local version
    if [[ "$(apt-cache policy python3 2>/dev/null | sed -n 's/.*Candidate: 3\.\([0-9]*\).*/\1/p')" -ge 11 ]] 2>/dev/null; then
        echo python3 python3-venv python3-dev
        return
    fi
    for version in 3.13 3.12 3.11; do
        if apt-cache show "python$version-venv" >/dev/null 2>&1; then
            echo "python$version" "python$version-venv" "python$version-dev"
            return
        fi
    done
    echo python3.11 python3.11-venv python3.11-dev
}

as_root=()
can_install=no
if command -v apt-get >/dev/null; then
    if [[ $EUID -eq 0 ]]; then
        can_install=yes
    elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        as_root=(sudo -n)
        can_install=yes
    fi
fi

apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=120 "$@" </dev/null >&2; }

if ! command -v dpkg-query >/dev/null; then
    # Not Debian: say what is missing by what it is for, and leave the package names to the reader.
    problems=()
    command -v gcc >/dev/null || problems+=("a C compiler (gcc)")
    command -v pkg-config >/dev/null || problems+=("pkg-config")
    [[ $1 != test ]] || pkg-config --exists cmocka || problems+=("cmocka's development files")
    [[ $1 != test ]] || command -v systemd-analyze >/dev/null || problems+=("systemd-analyze")
    [[ $1 != bench ]] || command -v iperf3 >/dev/null || problems+=("iperf3")
    [[ $1 != bench ]] || command -v valgrind >/dev/null || problems+=("valgrind")
    if [[ $1 == rdma ]]; then
        for tool in make flex bison bc xz strip ip tc rdma ibv_devinfo ib_write_bw valgrind setpriv; do
            command -v "$tool" >/dev/null || problems+=("$tool")
        done
        pkg-config --exists libibverbs || problems+=("libibverbs' development files and its rxe provider")
        pkg-config --exists cmocka || problems+=("cmocka's development files")
    fi
    if [[ $1 == qemu ]]; then
        for tool in qemu-system-x86_64 zstd; do
            command -v "$tool" >/dev/null || problems+=("$tool")
        done
    fi
    python=$(find_python) || problems+=("Python 3.11 or later with venv and its development files")
    if ((${#problems[@]})); then
        say "Please install with your package manager, then run make again:"
        for problem in "${problems[@]}"; do say "  $problem"; done
        exit 1
    fi
    printf '%s\n' "$python"
    exit 0
fi

missing=()
for package in "${want_packages[@]}"; do
    installed "$package" || missing+=("$package")
done
need_python=no
python=$(find_python) || need_python=yes

if ((${#missing[@]})) || [[ $need_python == yes ]]; then
    if [[ $can_install == no ]]; then
        [[ $need_python == no ]] || { read -ra python_list <<<"$(python_packages)" && missing+=("${python_list[@]}"); }
        say "These packages are needed and can only be installed by root. Run this, then make again:"
        say ""
        say "  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}"
        say ""
        exit 1
    fi
    # A fresh container has no package lists; a machine in use has them, perhaps old: update when something is missing.
    apt update
    [[ $need_python == no ]] || { read -ra python_list <<<"$(python_packages)" && missing+=("${python_list[@]}"); }
    say "installing ${missing[*]}"
    apt install -y --no-install-recommends "${missing[@]}"
    python=$(find_python) || {
        say "no Python 3.11 or later with venv and Python.h, even after installing ${missing[*]}: name one with PYTHON=/path/to/python3"
        exit 1
    }
fi
printf '%s\n' "$python"
