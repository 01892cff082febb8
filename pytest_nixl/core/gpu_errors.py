# SPDX-License-Identifier: Apache-2.0
"""The known errors of GPUs, from one table for the doctor and the workers: results of CUDA, texts of NVML, Xids."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_nixl.core.texts import Entries


@dataclass(frozen=True)
class GpuError:
    """A known error of a GPU.

    :param id: its number in CUDA, its Xid number, or a part of NVML's text of it.
    :param remedy: what to do, as an imperative.
    :param title: what it is; empty: NVML's text says so.
    :param corrected: whether the hardware corrects it, so that it is no reason to stop using the GPU.
    """

    id: str
    remedy: str
    title: str = ""
    corrected: bool = False


#: Results of the CUDA driver's functions, by their number.
CUDA_ERRORS = Entries("gpu-errors", GpuError, "cuda")
NVML_ERRORS = Entries("gpu-errors", GpuError, "nvml")
#: Errors that a program cannot cause.
XIDS = Entries("gpu-errors", GpuError, "xid")
#: For errors that no table has.
OTHER_REMEDY = "run `nvidia-smi` and `dmesg` on the host; reboot it"
