# SPDX-License-Identifier: Apache-2.0
"""The GPUs that CUDA shows to a process, according to NVIDIA's guides about ``CUDA_VISIBLE_DEVICES``. No GPU needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.fake_sysfs import facts_of

from pytest_nixl.host.gpu import GpuFacts, visible

#: The first two begin with the same characters.
UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-cc33", "GPU-dd44", "GPU-ee55", "GPU-ff66", "GPU-0177", "GPU-0288"]


@pytest.fixture(scope="module")
def gpus() -> tuple[GpuFacts, ...]:
    recorded = facts_of("p5.48xl").gpu.gpus
    return tuple(replace(gpu, uuid=uuid) for gpu, uuid in zip(recorded, UUIDS, strict=True))


def indices(gpus: tuple[GpuFacts, ...], text: str | None, **more: str) -> list[int | None]:
    environment = more if text is None else {"CUDA_VISIBLE_DEVICES": text, **more}
    return [None if gpu is None else gpu.index for gpu in visible(gpus, environment).gpus]


@pytest.mark.parametrize(
    ("text", "visible_indices"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("2,1", [2, 1]),  # CUDA's device 0 is the GPU 2
        (" 3 , 4", [3, 4]),
        ("0,2,-1,1", [0, 2]),  # the guide's own example
        ("0,8,1", [0]),
        (",0", []),
        ("0,1,0", []),
        ("+1", [1]),
        ("1gpu2,2", [1, 2]),
        ("GPU-cc", [2]),
        ("gpu-cc33", []),
        ("GPU-CC33, GPU-aa11", [2, 0]),
        ("GPU-aa", []),  # of two
        ("GPU-cc33,GPU-99,GPU-dd44", [2]),
        ("3,GPU-cc33", [3]),
        ("GPU-cc33,GPU-cc", []),
        ("MIG-GPU-dd44/1/0,MIG-GPU-ee55/1/0", [3]),
        ("MIG-/1/0", [None]),
        ("MIG-3f2b8a1e-0c44-5a8f-9a2f-0b5f0c4d9b11", [None]),
    ],
)
def test_cuda_shows(gpus: tuple[GpuFacts, ...], text: str | None, visible_indices: list[int | None]) -> None:
    assert indices(gpus, text) == visible_indices


ENDS = "shows {} of this host's 8 GPUs: the list ends at {}, which matches no GPU"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("  ", " is empty: CUDA shows no GPU"),
        ("0,1", "=0,1 shows 2 of this host's 8 GPUs"),
        ("GPU-aa11, GPU-9,1", f"=GPU-aa11, GPU-9,1 {ENDS.format(1, repr('GPU-9'))}"),
        ("0,1,2,3,4,5,6,7, 8", f"=0,1,2,3,4,5,6,7, 8 {ENDS.format(8, repr('8'))}"),
        ("1, 1", "=1, 1 names one GPU twice (1), so CUDA shows no GPU"),
        ("MIG-GPU-dd44/1/0 ,2", "=MIG-GPU-dd44/1/0 names a MIG instance, and CUDA shows only that"),
        ("0,1,2,3,4,5,6,7", None),
    ],
)
def test_reason_names_the_hidden_gpus(gpus: tuple[GpuFacts, ...], text: str, reason: str | None) -> None:
    expected = "" if reason is None else f"CUDA_VISIBLE_DEVICES{reason}"
    assert visible(gpus, {"CUDA_VISIBLE_DEVICES": text}).why == expected


def test_gpus_of_several_models_are_numbered_by_pci_address_only_on_request(gpus: tuple[GpuFacts, ...]) -> None:
    mixed = (replace(gpus[0], name="NVIDIA T4"), *gpus[1:3])
    assert indices(mixed, None) == [None] * 3
    reason = "this host's GPUs are of different models, which CUDA numbers by speed: set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    assert [visible(gpus_of_host, {}).why for gpus_of_host in (mixed, gpus[:3])] == [reason, ""]
    assert visible(mixed, {"CUDA_VISIBLE_DEVICES": "2,1,0"}).why == reason
    assert indices((replace(gpus[0], pci="0000:ff:00.0"), *gpus[1:3]), None) == [1, 2, 0]
    assert indices(mixed, "1") == [None]
    assert indices(mixed, None, CUDA_DEVICE_ORDER="PCI_BUS_ID") == [0, 1, 2]
    assert indices(mixed, "1", CUDA_DEVICE_ORDER="PCI_BUS_ID") == [1]
    # A UUID identifies a GPU whatever the order.
    assert indices(mixed, "GPU-aa22") == [1]
