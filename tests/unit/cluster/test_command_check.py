# SPDX-License-Identifier: Apache-2.0
"""What the commands of two ranks differ in, and how a command travels."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from pytest_nixl.cluster.command_check import Command, differences
from pytest_nixl.core.strict import StrictError, pack

FIRST = Command("1.0", {"--nixl-timeout": "60s", "--nixl-op": "READ"}, ["t.py::a", "t.py::b"], 0)
MANY = [f"t.py::{number}" for number in range(6)]


@pytest.mark.parametrize(
    ("first", "other", "sentences"),
    [
        ({"errors": 2}, {}, ["rank 0 could not collect 2 of its files"]),
        ({}, {"version": "1.1", "errors": 3}, [
            "rank 1 on b has pytest-nixl 1.1, rank 0 has 1.0", "rank 1 on b could not collect 3 of its files",
        ]),
        ({}, {"options": {"--nixl-timeout": "30s", "--nixl-depth": "2"}}, [
            "rank 1 on b was started with --nixl-depth=2, rank 0 with --nixl-depth=none",
            "rank 1 on b was started with --nixl-op=none, rank 0 with --nixl-op=READ",
            "rank 1 on b was started with --nixl-timeout=30s, rank 0 with --nixl-timeout=60s",
        ]),
        ({}, {"tests": ["t.py::b", "t.py::a"]}, ["rank 1 on b collected the same tests as rank 0 in another order"]),
        ({}, {"tests": ["t.py::a", "t.py::c"]}, [
            "rank 1 on b did not collect tests that rank 0 collected (t.py::b), and collected tests that rank 0 did "
            "not collect (t.py::c)",
        ]),
        ({"tests": MANY}, {"tests": MANY[:1]}, [
            "rank 1 on b did not collect tests that rank 0 collected (t.py::1, t.py::2, t.py::3 and 2 more)",
        ]),
    ],
)  # fmt: skip
def test_each_difference_from_rank_0_is_one_sentence(
    first: dict[str, Any], other: dict[str, Any], sentences: list[str]
) -> None:
    of_rank_0 = replace(FIRST, **first)
    same = replace(of_rank_0, errors=0)
    by_rank = {"rank 1 on b": replace(same, **other), "rank 2 on c": same}
    assert differences(of_rank_0, by_rank) == sentences


def test_a_text_that_is_not_a_command_is_refused() -> None:
    for text in (
        "x",
        pack(b"[]"),
        *(pack(json.dumps({**asdict(FIRST), name: None}).encode()) for name in asdict(FIRST)),
    ):
        with pytest.raises(StrictError):
            Command.unpacked(text)


@pytest.mark.parametrize(
    ("limit", "beyond"),
    [
        ({"version": "v" * 256}, {"version": "v" * 257}),
        ({"options": {"--nixl-op": "x" * 65_536}}, {"options": {"--nixl-op": "x" * 65_537}}),
        ({"tests": ["t" * 65_536]}, {"tests": ["t" * 65_537]}),
        ({"errors": 1 << 32}, {"errors": (1 << 32) + 1}),
        ({"errors": 0}, {"errors": -1}),
        ({"errors": 1}, {"errors": 0.5}),
    ],
)
def test_a_command_of_another_rank_is_read_up_to_its_limits(limit: dict[str, Any], beyond: dict[str, Any]) -> None:
    command = replace(FIRST, **limit)
    assert Command.unpacked(command.packed()) == command
    with pytest.raises(StrictError):
        Command.unpacked(replace(FIRST, **beyond).packed())
