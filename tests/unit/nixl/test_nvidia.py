# SPDX-License-Identifier: Apache-2.0
"""How kernels are launched. The driver is a double; ``test_vram.py`` runs the kernels on another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl.nixl.worker.devices.nvidia import DriverDevice


@pytest.mark.parametrize(
    ("size", "blocks"),
    [(8, 1), (8 * 256, 1), (8 * 256 + 1, 2), (8 * 256 * 3, 3), (8 * 256 * 4096, 4096), (8 * 256 * 4097, 4096)],
)
def test_a_kernel_has_a_thread_for_each_word_up_to_the_most_blocks(size: int, blocks: int) -> None:
    launched: list[tuple[Any, ...]] = []

    def launch(*given: Any) -> tuple[int]:
        launched.append(given)
        return (0,)

    driver = SimpleNamespace(cuLaunchKernel=launch, cuCtxSynchronize=lambda: (0,))
    DriverDevice(driver, 0)._launch("nixl_fill", 4096, size, 8192, 0, 0)
    [(function, *shape, arguments, extra)] = launched
    assert (function, shape, extra) == ("nixl_fill", [blocks, 1, 1, 256, 1, 1, 0, 0], 0)
    assert arguments[0] == (4096, size, 8192, 0, 0)
