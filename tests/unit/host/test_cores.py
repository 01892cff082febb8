# SPDX-License-Identifier: Apache-2.0
"""The cores that this process may use, and lists of cores as the kernel writes them."""

from __future__ import annotations

import os

import pytest

from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.host.system import cpu_list, cpu_numbers, read_cores


def test_the_cores_of_this_process_are_read() -> None:
    assert cpu_numbers(read_cores(FactsRoot()).allowed.value or "") == os.sched_getaffinity(0)


@pytest.mark.parametrize("listed", ["0", "0-3,8", "1,3,5-6"])
def test_a_list_of_the_kernel_is_read_and_written(listed: str) -> None:
    assert cpu_list(cpu_numbers(listed)) == listed


@pytest.mark.parametrize("listed", ["", "a", "0-", "-3", "9999999", "3 4", "0-3;"])
def test_what_is_not_such_a_list_has_no_cores(listed: str) -> None:
    assert cpu_numbers(listed) == frozenset()


def test_a_list_without_end_is_cut() -> None:
    assert len(cpu_numbers("0-999999")) == (1 << 16) + 1
