# SPDX-License-Identifier: Apache-2.0
"""Find the GPUs that CUDA shows to a process with a given ``CUDA_VISIBLE_DEVICES``, without using CUDA.

According to NVIDIA's CUDA C++ Programming Guide (environment variables), the value is a list of indices or UUIDs. The
beginning of a UUID is enough if it is unique. The first entry that matches no GPU ends the list. The order of the list
is the order of CUDA's numbers. A MIG instance hides every other GPU (NVIDIA's MIG User Guide). Two rules are in
neither guide but in PyTorch, which also counts devices without CUDA: a GPU that is listed twice hides all GPUs, and a
number ends at its last digit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_nixl.core.sentences import plural
from pytest_nixl.host.driver_questions import VISIBLE_DEVICES as VARIABLE
from pytest_nixl.host.gpu import GpuFacts

ORDER = "CUDA_DEVICE_ORDER"
_NUMBER = re.compile(r"\s*([+-]?\d+)")
#: ``MIG-GPU-<UUID>/<GPU instance>/<compute instance>`` of drivers before 470; newer ones use ``MIG-<UUID>``.
_MIG_OF_GPU = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/")


@dataclass(frozen=True)
class VisibleGpus:
    """The GPUs that CUDA shows to a process, in the order of CUDA's numbers.

    :param gpus: the GPUs; None for a GPU that CUDA shows but that cannot be identified, such as a MIG instance.
    :param why: why a GPU is hidden or cannot be identified; empty if all are shown.
    """

    gpus: tuple[GpuFacts | None, ...]
    why: str = ""


def visible(gpus: Sequence[GpuFacts], environ: Mapping[str, str]) -> VisibleGpus:
    """Return the GPUs that CUDA shows to a process.

    :param gpus: all GPUs of the host, in NVML's order.
    :param environ: the environment variables of the process.
    """
    text = environ.get(VARIABLE)
    order = _order(gpus, environ)
    if text is None:
        return VisibleGpus(tuple(order), _unordered(gpus, environ))
    if text.strip() == "":
        return VisibleGpus((), f"{VARIABLE} is empty: CUDA shows no GPU")
    if text.startswith("MIG-"):
        return _instance(gpus, text)
    by_uuid = text.startswith("GPU-")
    indices: list[int] = []
    stopped = ""
    for part in text.split(","):
        index = _of_uuid(gpus, part) if by_uuid else _of_number(gpus, part)
        if index is None:
            stopped = part.strip()
            break
        if index in indices:
            return VisibleGpus((), f"{VARIABLE}={text} names one GPU twice ({part.strip()}), so CUDA shows no GPU")
        indices.append(index)
    reason = ""
    if stopped or len(indices) < len(gpus):
        ended = f": the list ends at {stopped!r}, which matches no GPU" if stopped else ""
        reason = f"{VARIABLE}={text} shows {len(indices)} of this host's {plural(len(gpus), 'GPU')}{ended}"
    if by_uuid:
        return VisibleGpus(tuple(gpus[index] for index in indices), reason)
    return VisibleGpus(tuple(order[index] for index in indices), reason or _unordered(gpus, environ))


def _order(gpus: Sequence[GpuFacts], environ: Mapping[str, str]) -> list[GpuFacts | None]:
    """Return the GPUs in CUDA's order: by PCI address if requested, else fastest first, which is unknown (None)."""
    if environ.get(ORDER) == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) < 2:
        ordered = sorted(gpus, key=lambda gpu: gpu.pci)
        return [*ordered]
    return [None] * len(gpus)


def _unordered(gpus: Sequence[GpuFacts], environ: Mapping[str, str]) -> str:
    if not gpus or None not in _order(gpus, environ):
        return ""
    return f"this host's GPUs are of different models, which CUDA numbers by speed: set {ORDER}=PCI_BUS_ID"


def _of_number(gpus: Sequence[GpuFacts], part: str) -> int | None:
    match = _NUMBER.match(part)
    index = int(match[1]) if match else -1
    return index if 0 <= index < len(gpus) else None


def _of_uuid(gpus: Sequence[GpuFacts], part: str) -> int | None:
    name = part.strip().lower()
    matches = [index for index, gpu in enumerate(gpus) if name != "gpu-" and gpu.uuid.lower().startswith(name)]
    return matches[0] if len(matches) == 1 else None


def _instance(gpus: Sequence[GpuFacts], text: str) -> VisibleGpus:
    """Return the first MIG instance of the list; CUDA shows at most one."""
    first = text.split(",")[0].strip()
    match = _MIG_OF_GPU.match(first)
    parent = _of_uuid(gpus, match[1]) if match else None
    reason = f"{VARIABLE}={first} names a MIG instance, and CUDA shows only that"
    return VisibleGpus((gpus[parent] if parent is not None else None,), reason)
