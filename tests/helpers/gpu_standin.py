# SPDX-License-Identifier: Apache-2.0
"""Build a stand-in for the CUDA driver whose GPUs are host memory, because CI has no GPU."""

from __future__ import annotations

import ctypes.util
import subprocess
from pathlib import Path

from pytest_nixl.nixl.backends.driver_standin import real_driver
from pytest_nixl.nixl.worker.devices import make_ptx


def build(folder: Path) -> Path:
    """Compile the stand-in (``gpu/driver.c``) with the kernels. :raises RuntimeError: this host has a real driver."""
    found = real_driver() or ctypes.util.find_library("cuda")
    if found:
        raise RuntimeError(f"this host has a real CUDA driver ({found}): the stand-in must not hide it")
    library = folder / "libcuda.so.1"
    source = Path(__file__).parents[1] / "gpu" / "driver.c"
    options = ["-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wl,-soname,libcuda.so.1"]
    kernels = f'-DKERNELS="{make_ptx.SOURCE}"'
    subprocess.run(["gcc", *options, kernels, "-o", str(library), str(source), "-ldl"], check=True)
    return library
