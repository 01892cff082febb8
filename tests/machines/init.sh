#!/bin/busybox sh
# SPDX-License-Identifier: Apache-2.0
# The first program of a machine: the host's file system, read-only below a file system in memory, becomes its root.
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
for module in /modules/*.ko; do $b insmod "$module" || echo "insmod $module failed"; done
name=$($b sed -n 's/.*name=\([^ ]*\).*/\1/p' /proc/cmdline)
$b hostname "$name"
p=trans=virtio,version=9p2000.L,msize=512000
$b mount -t 9p -o $p,ro,cache=loose root /lower
$b mount -t tmpfs -o size=75% tmpfs /upper
$b mkdir -p /upper/u /upper/w
$b mount -t overlay -o lowerdir=/lower,upperdir=/upper/u,workdir=/upper/w overlay /newroot
$b mkdir -p /newroot/proc /newroot/sys /newroot/dev /newroot/out
$b mount -t proc proc /newroot/proc
$b mount -t sysfs sys /newroot/sys
$b mount -t devtmpfs dev /newroot/dev
$b mkdir -p /newroot/dev/shm /newroot/dev/pts
$b mount -t tmpfs tmpfs /newroot/dev/shm
$b mount -t devpts devpts /newroot/dev/pts
$b mount -t tmpfs tmpfs /newroot/tmp
$b mount -t tmpfs tmpfs /newroot/run
# What the tests need from a folder that is hidden now, such as a clone below /tmp.
n=0
for folder in $($b sed -n 's/.* show=\([^ ]*\).*/\1/p' /proc/cmdline | $b tr : ' '); do
    n=$((n + 1))
    $b mkdir -p "/upper/u$n" "/upper/w$n" "/newroot$folder"
    $b mount -t overlay -o "lowerdir=/lower$folder,upperdir=/upper/u$n,workdir=/upper/w$n" overlay "/newroot$folder"
done
$b mount -t 9p -o $p,rw out /newroot/out
exec $b switch_root /newroot /bin/sh /out/agent.sh
