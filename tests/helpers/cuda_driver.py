# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the CUDA driver, for tests only.

NIXL's LIBFABRIC plugin needs the driver's library even without a GPU, and so does the UCX plugin before NIXL 0.10.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import subprocess
import sys
from pathlib import Path

_DEVICE = Path("/dev/nvidiactl")


def real_driver(device: Path = _DEVICE) -> str | None:
    """Return the path that shows that this host has a real driver; None if there is none."""
    if device.exists():
        return str(device)
    return ctypes.util.find_library("cuda")


def build(folder: Path, *, device: Path = _DEVICE) -> Path:
    """Compile the stand-in as ``libcuda.so.1``. :raises RuntimeError: this host has a real driver."""
    found = real_driver(device)
    if found is not None:
        raise RuntimeError(f"this host has a real CUDA driver ({found}): the stand-in must not hide it")
    library = folder / "libcuda.so.1"
    source = Path(__file__).parents[1] / "driver.c"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return library


def provide(folder: Path) -> Path:
    """Return a ``libcuda.so.1`` in a folder: a link to the host's real one, or else the stand-in."""
    if real_driver() is None:
        return build(folder)
    ctypes.CDLL("libcuda.so.1")
    path = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcuda.so" in line)
    library = folder / "libcuda.so.1"
    library.unlink(missing_ok=True)
    library.symlink_to(path)
    return library


if __name__ == "__main__":
    where = Path(sys.argv[1])
    where.mkdir(parents=True, exist_ok=True)
    provide(where)
