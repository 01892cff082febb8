#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# prepare.sh FOLDER: make what a machine of these tests is started from, if FOLDER does not have it yet, or if it has it
# with another init.sh.
#
# FOLDER/vmlinuz, FOLDER/initrd.gz   the kernel of Debian's package, and an initial RAM file system with its modules
# FOLDER/qemu                        QEMU and its libraries, FOLDER/rdma: the RDMA libraries that a guest installs
#
# All packages are unpacked and none is installed: if libibverbs, which QEMU depends on, were installed on the system,
# every process with a wheel of NIXL would load two copies of it and crash at its end.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
cd "$1"
sum=$(cksum < "$here/init.sh")
[ "$(cat complete 2> /dev/null || true)" != "$sum" ] || exit 0
rm -f complete
for program in apt-get dpkg-deb ip; do
    command -v "$program" > /dev/null && continue
    echo "the tests of machines need Debian with iproute2: there is no $program" >&2
    exit 1
done

# unpack FOLDER PACKAGE…: download packages and unpack them below FOLDER.
unpack() {
    into=$1
    shift
    mkdir -p "$into" packages
    (cd packages && apt-get -o APT::Sandbox::User=root download -qq "$@")
    for package in packages/*.deb; do
        dpkg-deb -x "$package" "$into"
        rm "$package"
    done
}

apt-get update -qq
rm -rf qemu rdma kernel tools root packages
kernel=$(apt-cache depends linux-image-amd64 | awk '/Depends:/{print $2; exit}')
version=${kernel#linux-image-}
unpack kernel "$kernel"
unpack tools busybox-static kmod libkmod2
# Those of QEMU's dependencies that the system does not have.
# shellcheck disable=SC2046
unpack qemu $(apt-get install --simulate --no-install-recommends qemu-system-x86 | awk '/^Inst/{print $2}')
unpack rdma libibverbs1 ibverbs-providers ibverbs-utils librdmacm1 libnl-3-200 libnl-route-3-200

LD_LIBRARY_PATH=$PWD/tools/usr/lib/x86_64-linux-gnu:$PWD/tools/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH
cp "kernel/boot/vmlinuz-$version" vmlinuz
ln -s bin/kmod tools/depmod
ln -s bin/kmod tools/modprobe
tools/depmod -b kernel "$version"
mkdir -p root/bin root/modules root/proc root/sys root/dev root/lower root/upper root/newroot
cp tools/bin/busybox root/bin/
cp "$here/init.sh" root/init
chmod 755 root/init
n=100
# The kernel loads a module's dependencies first. rdma_rxe also needs crc32_generic, or it cannot add a device.
for module in crc32_generic virtio_pci virtio_net 9pnet_virtio 9p overlay dummy veth sch_netem sch_tbf rdma_rxe \
    ib_uverbs rdma_ucm; do
    tools/modprobe -d kernel -S "$version" --show-depends "$module" | awk '/^insmod/{print $2}'
done | awk '!seen[$0]++' | while read -r file; do
    n=$((n + 1))
    cp "$file" "root/modules/$n-${file##*/}"
done
(cd root && find . | ./bin/busybox cpio -o -H newc | gzip -1) > initrd.gz
rm -rf kernel tools root packages
echo "$sum" > complete
