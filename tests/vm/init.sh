#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# First process of the guest. The root is the host's, read-only. /run/guest is the folder that guest.py made for this
# run: `settings` says what to make writable and visible, `command` is run, and `rc` is written at the end; without it,
# guest.py takes the run for failed. In a virtual machine of QEMU the initrd has
# mounted the root.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
mkdir -p /dev/pts /dev/shm
mount -t devpts pts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run

for word in $(</proc/cmdline); do
    case $word in dqplbd.control=*) control=${word#*=} ;; esac
done
# share FOLDER MODE: the host's folder at its own path, also where a file system of the guest hides it.
if [[ $(</proc/filesystems) == *hostfs* ]]; then
    share() {
        mkdir -p "$1" 2>/dev/null
        mount -t hostfs -o "$2" none "$1" -o "$1"
    }
    mkdir -p /run/guest
    mount -t hostfs none /run/guest -o "$control"
else
    # What is written goes to the host at once; only the one folder can be written.
    p9() { mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=mmap "$1" "$2"; }
    share() {
        mkdir -p "$1" 2>/dev/null
        if [[ $2 == rw ]]; then p9 out "$1"; else mount --bind "/run/host$1" "$1"; fi
    }
    mkdir -p /run/guest /run/host
    p9 control /run/guest
    mount --bind / /run/host
fi
. /run/guest/settings
for folder in "${VISIBLE[@]}"; do
    [[ -e $folder ]] || share "$folder" ro
done
share "$OUT" rw

# perftest wants to know the clock of the CPU, which this kernel does not tell.
mount --bind /run/guest/cpuinfo /proc/cpuinfo
# What is written reaches the host soon, so that one can watch, and see the end of it when the guest is killed.
echo 10 >/proc/sys/vm/dirty_writeback_centisecs
echo 10 >/proc/sys/vm/dirty_expire_centisecs
echo guest >/proc/sys/kernel/hostname
ip link set lo up

bash /run/guest/command >/run/guest/stdout 2>/run/guest/stderr </dev/null
echo $? >/run/guest/rc.new
mv /run/guest/rc.new /run/guest/rc
sync
echo o >/proc/sysrq-trigger
sleep 5
