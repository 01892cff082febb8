# SPDX-License-Identifier: Apache-2.0
"""The search for the variables that keep bytes from arriving, with a predicate in place of transfers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest

from pytest_nixl.measure.transfer_proof import SearchEndedError, find_culprits, smallest_set, steering_names

NAMES = tuple("ABCDEFGH")


def moves_unless(*faults: str) -> Callable[[frozenset[str]], bool]:
    """Bytes arrive unless all variables of one of these sets are set."""
    return lambda unset: not any(unset.isdisjoint(fault) for fault in faults)


@pytest.mark.parametrize("name", NAMES)
def test_one_variable_of_eight_is_found_in_few_attempts(name: str) -> None:
    attempts: list[frozenset[str]] = []

    def moves(unset: frozenset[str]) -> bool:
        attempts.append(unset)
        return moves_unless(name)(unset)

    assert find_culprits(NAMES, moves) == ((name,), ())
    assert len(attempts) <= 8


@pytest.mark.parametrize("pair", [("A", "B"), ("A", "H"), ("C", "F")])
def test_two_variables_that_are_each_a_fault_are_both_named(pair: tuple[str, str]) -> None:
    assert find_culprits(NAMES, moves_unless(*pair)) == (pair, ())


@pytest.mark.parametrize("pair", [("A", "B"), ("A", "H"), ("C", "F")])
def test_two_variables_that_are_only_a_fault_together_are_told_apart(pair: tuple[str, str]) -> None:
    culprits, together = find_culprits(NAMES, moves_unless("".join(pair)))
    assert len(culprits) == len(together) == 1
    assert {*culprits, *together} == {*pair}


@pytest.mark.parametrize("most", range(1, 12))
def test_search_that_ends_early_names_only_variables_without_which_bytes_arrive(most: int) -> None:
    remaining = iter(range(most))
    moves = moves_unless("BG", "D")

    def limited(unset: frozenset[str]) -> bool:
        if next(remaining, None) is None:
            raise SearchEndedError
        return moves(unset)

    culprits, together = find_culprits(NAMES, limited)
    assert moves(frozenset(culprits))
    # Variables that are blamed together have been seen to fail without any other.
    assert not together or not moves(frozenset(NAMES) - {*culprits, *together})


def test_no_set_is_tried_twice() -> None:
    attempts: list[frozenset[str]] = []

    def suffices(part: frozenset[str]) -> bool:
        attempts.append(part)
        return {"A", "D", "E"} <= part

    assert smallest_set(NAMES, suffices) == ("A", "D", "E")
    assert len(attempts) == len(set(attempts))


@pytest.mark.parametrize(("count", "most"), [(1, 6), (2, 18), (3, 29), (4, 35), (5, 37), (6, 36)])
def test_names_that_suffice_together_are_found_in_few_attempts(count: int, most: int) -> None:
    for wanted in map(frozenset, combinations(NAMES, count)):
        attempts: list[bool] = []

        def suffices(part: frozenset[str], wanted: frozenset[str] = wanted, attempts: list[bool] = attempts) -> bool:
            attempts.append(wanted <= part)
            return attempts[-1]

        assert set(smallest_set(NAMES, suffices)) == wanted
        assert len(attempts) <= most


def test_variables_that_steer_nixl_are_those_of_its_libraries_the_loader_and_cuda() -> None:
    environ = dict.fromkeys(
        ["UCX_TLS", "NIXL_PLUGIN_DIR", "FI_PROVIDER", "LD_PRELOAD", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "PATH",
         "NIXL_ETCD_ENDPOINTS", "MY_UCX_TLS", "HOME"], "x",
    )  # fmt: skip
    assert steering_names(environ) == (
        "CUDA_VISIBLE_DEVICES", "FI_PROVIDER", "LD_LIBRARY_PATH", "LD_PRELOAD", "NIXL_PLUGIN_DIR", "UCX_TLS",
    )  # fmt: skip
    names = ["GLIBC_TUNABLES", "OFI_X", "NVIDIA_X", "RDMAV_X", "IBV_X", "MLX5_X", "EFA_X", "GDRCOPY_X"]
    assert steering_names(dict.fromkeys((*names, *(f"MY_{name}" for name in names)), "x")) == tuple(sorted(names))
