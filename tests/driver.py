# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the CUDA driver, for tests only: NIXL's LIBFABRIC plugin is linked to one, GPU or not."""

from __future__ import annotations

import ctypes.util
import subprocess
from pathlib import Path

_DEVICE = Path("/dev/nvidiactl")


def real_driver(device: Path = _DEVICE) -> str | None:
    """Return what shows that this host has a real driver; None where nothing does."""
    if device.exists():
        return str(device)
    return ctypes.util.find_library("cuda")


def build(folder: Path, *, device: Path = _DEVICE) -> Path:
    """Compile the stand-in as ``libcuda.so.1``. :raises RuntimeError: where a real driver exists."""
    found = real_driver(device)
    if found is not None:
        raise RuntimeError(f"this host has a real CUDA driver ({found}): the stand-in must not hide it")
    library = folder / "libcuda.so.1"
    source = Path(__file__).with_name("driver.c")
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return library
