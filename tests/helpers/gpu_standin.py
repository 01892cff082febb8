# SPDX-License-Identifier: Apache-2.0
"""Build stand-ins for the CUDA driver and NVML whose GPUs are host memory, because CI has no GPU.

They are for faults and calls that cannot be made otherwise, and never for a host that has a driver. What UCX does with
them is real. ``driver.c`` and ``nvml.c`` in ``tests/gpu`` say which variables change a stand-in.
"""

from __future__ import annotations

import ctypes.util
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from helpers.needs import lack, need_programs
from pytest_nixl.nixl.backends.driver_standin import real_driver
from pytest_nixl.nixl.worker.devices import make_ptx

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SOURCES = Path(__file__).parents[1] / "gpu"
DRIVER, NVML = "libcuda.so.1", "libnvidia-ml.so.1"
_FILES = {DRIVER: "driver.c", NVML: "nvml.c"}
#: A script of a shell in a mount namespace of its own: it shows two GPUs and a driver in /proc to a command.
DRIVER_TREE = """
set -e
mount -t tmpfs tmpfs /proc/driver
mkdir -p /proc/driver/nvidia/gpus
echo "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build" > /proc/driver/nvidia/version
for gpu in 1a=10 1b=11; do
    folder="/proc/driver/nvidia/gpus/0000:${gpu%=*}:00.0" byte=${gpu#*=}
    mkdir "$folder"
    echo "Model: Stand-in" > "$folder/information"
    echo "GPU UUID: GPU-$byte$byte$byte$byte-$byte$byte-$byte$byte-$byte$byte-$byte$byte$byte$byte$byte$byte" \
        >> "$folder/information"
done
exec "$@"
"""

#: The same without a driver: it shows a GPU on the PCI bus, and no other device.
PCI_TREE = """
set -e
mount -t tmpfs tmpfs /sys/bus/pci/devices
mkdir /sys/bus/pci/devices/0000:1a:00.0
echo 0x10de > /sys/bus/pci/devices/0000:1a:00.0/vendor
echo 0x030200 > /sys/bus/pci/devices/0000:1a:00.0/class
exec "$@"
"""


def faults(table: str) -> list[dict[str, Any]]:
    """Return the faults of a table of ``tests/gpu/faults.toml``."""
    entries: list[dict[str, Any]] = tomllib.loads((SOURCES / "faults.toml").read_text(encoding="utf-8"))[table]
    return entries


def build(folder: Path, *libraries: str, bindings: bool = True) -> dict[str, str]:
    """Compile the stand-ins, and return the variables with which a process finds them, and the log of the driver.

    The test is skipped, and in CI fails, on a host that has a real driver, or neither gcc nor cuda-bindings.

    :param folder: an empty folder.
    :param libraries: the sonames; none: all.
    :param bindings: whether the test needs cuda-bindings, without which our workers see no GPU.
    """
    if results := real_driver() or ctypes.util.find_library("cuda"):
        lack(f"a host without a CUDA driver, which a stand-in would hide ({results})")
    if bindings and find_spec("cuda") is None:
        lack("cuda-bindings")
    need_programs("gcc")
    for soname in libraries or _FILES:
        options = ["-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-format-truncation"]
        options += ["-Wno-unused-function", "-Wl,-Bsymbolic", f"-Wl,-soname,{soname}", f'-DKERNELS="{make_ptx.SOURCE}"']
        source, library = SOURCES / _FILES[soname], folder / soname
        subprocess.run(["gcc", *options, "-o", str(library), str(source), "-ldl", "-lpthread"], check=True)
    return {"LD_LIBRARY_PATH": str(folder), "STANDIN_LOG": str(folder / "log")}
