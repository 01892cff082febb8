# SPDX-License-Identifier: Apache-2.0
"""The differences between NIXL releases. ``tox -e nixl090`` and the like run the releases themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.torch_for_nixl import wants_cuda

from pytest_nixl.model import nixl_releases


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("1.5.1", (1, 5, 1)), ("0.10.0+image7", (0, 10, 0)), ("1.5", (1, 5, 0)), ("1.5.x", (1, 5, 0)),
        *((text, (999,)) for text in ("", "1", "1.", "1.x", ".5.1", "of no package", "v1.5.1")),
    ],
)  # fmt: skip
def test_a_version_that_cannot_be_parsed_counts_as_the_newest(version: str, numbers: tuple[int, ...]) -> None:
    assert nixl_releases.numbers(version) == numbers


@pytest.mark.parametrize(
    ("differs", "before", "since", "is_new"),
    [
        (nixl_releases.says_that_a_port_is_taken, "0.10.9", "1.0.0", True),
        (nixl_releases.sends_the_first_notification, "0.10.9", "1.0.0", False),
        (nixl_releases.picks_a_free_port, "1.1.9", "1.2.0", True),
        (nixl_releases.has_sync_modes, "1.1.9", "1.2.0", True),
        (nixl_releases.imports_torch, "1.3.9", "1.4.0", False),
        (nixl_releases.telemetry_off_raises, "1.3.9", "1.4.0", True),
        (nixl_releases.refuses_no_endpoints, "1.4.9", "1.5.0", True),
        (nixl_releases.refuses_no_cuda, "1.4.9", "1.5.0", True),
        (nixl_releases.takes_strided_descriptors, "1.4.9", "1.5.0", True),
    ],
)
def test_a_difference_begins_with_a_release(
    differs: Callable[[str], bool], before: str, since: str, is_new: bool
) -> None:
    assert [differs(version) for version in (before, since, "an image's own")] == [not is_new, is_new, is_new]


def test_packages_and_error_classes_are_known_by_name() -> None:
    assert [nixl_releases.wheel_for(cuda) for cuda in (11, 12, 13)] == ["", "nixl-cu12", "nixl-cu13"]
    modules = ("nixl_cu12._bindings", "nixl._bindings", "other._bindings", "nixl._api")
    assert [nixl_releases.is_error(module) for module in modules] == [True, True, False, False]


def metadata(*requires: str) -> dict[str, Any]:
    return {"install": [{"metadata": {"requires_dist": list(requires)}}]}


def test_torch_that_needs_cuda_is_not_installed_for_older_releases() -> None:
    assert not wants_cuda(metadata("filelock", "sympy>=1.13.3"))
    assert wants_cuda(metadata("filelock", "nvidia-cublas==13.0; platform_system == 'Linux'"))
    assert wants_cuda(metadata("cuda-bindings<14,>=13.0.3"))
    assert wants_cuda({"install": []}), "there is none for this Python"
