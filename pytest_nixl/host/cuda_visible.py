# SPDX-License-Identifier: Apache-2.0
"""Which GPUs a process sees: what CUDA makes of ``CUDA_VISIBLE_DEVICES``, without CUDA.

By NVIDIA's CUDA C++ Programming Guide (environment variables): a list of indices or of UUIDs, of which the beginning
is enough where it is of one GPU only; the first that is of none ends the list; its order is that in which CUDA counts.
A MIG instance hides everything else (NVIDIA's MIG User Guide). Not in either, and as PyTorch has it, which counts
devices in the same way without CUDA: a device named twice leaves none, and a number ends where its digits do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_nixl.host.gpu import GpuFacts

VARIABLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
_NUMBER = re.compile(r"\s*([+-]?\d+)")
#: ``MIG-GPU-<UUID>/<GPU instance>/<compute instance>`` of drivers before 470, or ``MIG-<UUID>`` of its own.
_MIG_OF_GPU = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/")


@dataclass(frozen=True)
class VisibleGpus:
    """The GPUs that CUDA shows to a process, by the numbers that it gives them.

    :param gpus: None in place of one that is there and of which it cannot be told which it is, as of a MIG instance.
    :param why: one sentence where something is hidden or not known; empty: all are seen.
    """

    gpus: tuple[GpuFacts | None, ...]
    why: str = ""


def visible(gpus: Sequence[GpuFacts], environ: Mapping[str, str]) -> VisibleGpus:
    """Return those of ``gpus``, as NVML counts them, that a process with this environment sees."""
    text = environ.get(VARIABLE)
    order = _order(gpus, environ)
    if text is None:
        return VisibleGpus(tuple(order), _unordered(gpus, environ))
    if text.strip() == "":
        return VisibleGpus((), f"{VARIABLE} is empty: CUDA shows no GPU")
    if text.startswith("MIG-"):
        return _instance(gpus, text)
    by_uuid = text.startswith("GPU-")
    found: list[int] = []
    stopped = ""
    for part in text.split(","):
        index = _of_uuid(gpus, part) if by_uuid else _of_number(gpus, part)
        if index is None:
            stopped = part.strip()
            break
        if index in found:
            return VisibleGpus((), f"{VARIABLE}={text} names one GPU twice ({part.strip()}): CUDA then shows none")
        found.append(index)
    said = ""
    if stopped or len(found) < len(gpus):
        ended = f", and ends at {stopped!r}, which is none" if stopped else ""
        said = f"{VARIABLE}={text} shows {len(found)} of the {len(gpus)} GPUs here{ended}"
    if by_uuid:
        return VisibleGpus(tuple(gpus[index] for index in found), said)
    return VisibleGpus(tuple(order[index] for index in found), said or _unordered(gpus, environ))


def _order(gpus: Sequence[GpuFacts], environ: Mapping[str, str]) -> list[GpuFacts | None]:
    """The GPUs as CUDA counts them: by the bus where it is told to, else the fastest first, which we cannot know."""
    if environ.get(ORDER) == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) < 2:
        ordered = sorted(gpus, key=lambda gpu: gpu.pci)
        return [*ordered]
    return [None] * len(gpus)


def _unordered(gpus: Sequence[GpuFacts], environ: Mapping[str, str]) -> str:
    if not gpus or None not in _order(gpus, environ):
        return ""
    return f"the GPUs here are not of one model, and CUDA counts the fastest first: set {ORDER}=PCI_BUS_ID"


def _of_number(gpus: Sequence[GpuFacts], part: str) -> int | None:
    match = _NUMBER.match(part)
    index = int(match[1]) if match else -1
    return index if 0 <= index < len(gpus) else None


def _of_uuid(gpus: Sequence[GpuFacts], part: str) -> int | None:
    name = part.strip().lower()
    found = [index for index, gpu in enumerate(gpus) if name != "gpu-" and gpu.uuid.lower().startswith(name)]
    return found[0] if len(found) == 1 else None


def _instance(gpus: Sequence[GpuFacts], text: str) -> VisibleGpus:
    """A process sees one MIG instance at most: the first that is named."""
    first = text.split(",")[0].strip()
    match = _MIG_OF_GPU.match(first)
    parent = _of_uuid(gpus, match[1]) if match else None
    why = f"{VARIABLE}={first} is an instance of a GPU (MIG), and CUDA shows that alone"
    return VisibleGpus((gpus[parent] if parent is not None else None,), why)
