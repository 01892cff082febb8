# SPDX-License-Identifier: Apache-2.0
"""The pairs of ranks that are measured, and differences between the ranks' commands."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pytest_nixl.checks.doctor.ranks import everywhere
from pytest_nixl.cluster.command_check import Command, _unlike, differences
from pytest_nixl.cluster_hooks import command_of
from pytest_nixl.core.strict import StrictError
from pytest_nixl.model.settings import OPTIONS, Settings
from pytest_nixl.model.traffic_pattern import RankPairing
from pytest_nixl.model.verdicts import Judgement, Verdict

MakeSettings = Callable[..., Settings]


class TestPairs:
    @pytest.mark.parametrize(
        ("text", "ranks", "expected"),
        [
            ("ring", 4, ((0, 1), (1, 2), (2, 3), (3, 0))),
            ("ring", 3, ((0, 1), (1, 2), (2, 0))),
            ("first", 4, ((0, 1), (0, 2), (0, 3))),
            ("all", 4, ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))),
            ("3:1, 0:2", 4, ((3, 1), (0, 2))),
            *((text, ranks, ((0, 1),)) for text in ("ring", "first", "all", "0:1") for ranks in (1, 2)),
        ],
    )
    def test_pairs_that_are_measured(self, text: str, ranks: int, expected: object) -> None:
        assert RankPairing.parse(text).of(ranks) == expected


class TestSameCommand:
    SAME = Command("1.0", {"--nixl-blocks": "4KiB"}, ["a.py::one", "a.py::two"], 0)

    def test_equal_commands_have_no_differences(self) -> None:
        assert differences(self.SAME, {"rank 1 on b": Command.unpacked(self.SAME.packed())}) == []

    def test_only_what_belongs_to_a_rank_may_differ(self, make_settings: MakeSettings) -> None:
        command = command_of(make_settings(), [], 0)
        assert {option.flag.removeprefix("--nixl-") for option in OPTIONS} - {
            flag.removeprefix("--nixl-") for flag in command.options
        } == {
            *("etcd", "etcd-server", "etcd-image", "etcd-cacert", "etcd-cert", "etcd-key", "etcd-user", "etcd-listen"),
            *("rank", "group-token", "log-dir", "file-dir", "s3", "nixlbench", "raw-tools-dir", "image", "store"),
            "report",
        }

    @pytest.mark.parametrize(
        ("change", "pattern"),
        [
            ({"version": "1.1"}, r".* 1\.1,.* rank 0 .*1\.0"),
            ({"options": {"--nixl-blocks": "8KiB"}}, ".* --nixl-blocks=8KiB,.* rank 0 .*--nixl-blocks=4KiB"),
            ({"options": {}}, ".* --nixl-blocks=none,.* rank 0 .*--nixl-blocks=4KiB"),
            ({"tests": ["a.py::one"]}, r".* did not collect tests that rank 0 collected \(a\.py::two\)"),
            (
                {"tests": ["a.py::one", "a.py::two", *(f"b.py::{n}" for n in range(5))]},
                r".* collected tests that rank 0 did not collect \(b\.py::0, b\.py::1, b\.py::2 and 2 more\)",
            ),
            ({"tests": ["a.py::two", "a.py::one"]}, " collected .* rank 0 in another order"),
            ({"errors": 2}, " could not collect 2 .*"),
        ],
    )
    def test_each_difference_is_named(self, change: dict[str, Any], pattern: str) -> None:
        [difference] = differences(self.SAME, {"rank 1 on b": replace(self.SAME, **change)})
        assert re.fullmatch(f"rank 1 on b{pattern}", difference), difference


class TestEverywhere:
    NAMES = ("rank 0 on a", "rank 1 on b", "rank 2 on c")
    GOOD, BAD = Judgement(Verdict.PASS, "64 GiB"), Judgement(Verdict.FAIL, "64 KiB", "raise it")

    def test_one_rank_keeps_its_verdict(self) -> None:
        assert everywhere(["rank 0"], [self.BAD]) == self.BAD

    @pytest.mark.parametrize(
        ("judgements", "expected"),
        [
            ((GOOD, GOOD, GOOD), Judgement(Verdict.PASS, "all 3 ranks: 64 GiB")),
            ((GOOD, BAD, GOOD), Judgement(Verdict.FAIL, "rank 1 on b: 64 KiB", "raise it")),
            ((BAD, GOOD, BAD), Judgement(Verdict.FAIL, "rank 0 on a, rank 2 on c: 64 KiB", "raise it")),
            (
                (GOOD, Judgement(Verdict.NOT_APPLICABLE, "none"), Judgement(Verdict.WARN, "odd", "look")),
                Judgement(Verdict.WARN, "rank 2 on c: odd", "look"),
            ),
            (
                (Judgement(Verdict.NOT_APPLICABLE, "none"), GOOD, Judgement(Verdict.NOT_APPLICABLE, "none")),
                Judgement(Verdict.PASS, "rank 1 on b: 64 GiB"),
            ),
        ],
    )
    def test_the_worst_verdict_is_reported_with_its_ranks(
        self, judgements: tuple[Judgement, ...], expected: Judgement
    ) -> None:
        assert everywhere(self.NAMES, judgements) == expected

    @pytest.mark.parametrize(("count", "end"), [(9, "r6, r7, r8"), (10, "r6, r7 and 2 more")])
    def test_up_to_nine_ranks_are_named(self, count: int, end: str) -> None:
        names = [f"r{number}" for number in range(count + 1)]
        judged = everywhere(names, [*[self.BAD] * count, self.GOOD])
        assert judged.reason == f"r0, r1, r2, r3, r4, r5, {end}: 64 KiB"


@pytest.mark.parametrize(
    ("count", "words"),
    [(1, "t0"), (2, "t0, t1"), (3, "t0, t1, t2"), (4, "t3"), (6, "t2 and 3 more")],
)
def test_at_most_three_tests_are_named(count: int, words: str) -> None:
    tests = [f"t{number}" for number in range(count)]
    assert _unlike(tests, []).startswith("did not collect tests that rank 0 collected (t0")
    assert _unlike([], tests).startswith("collected tests that rank 0 did not collect (t0")
    assert _unlike(tests, []).endswith(f"{words})")
    assert _unlike(tests, ["x", *tests[1:]]) == (
        "did not collect tests that rank 0 collected (t0), and collected tests that rank 0 did not collect (x)"
    )
    assert _unlike(["a", *tests], [*tests, "a"]) == "collected the same tests as rank 0 in another order"


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({}, True),
        ({"version": "v" * 256}, True),
        ({"version": "v" * 257}, False),
        ({"options": {"--nixl-op": "x" * 65_536}}, True),
        ({"options": {"--nixl-op": "x" * 65_537}}, False),
        ({"tests": ["t" * 65_536]}, True),
        ({"tests": ["t" * 65_537]}, False),
        ({"errors": 1 << 32}, True),
        ({"errors": (1 << 32) + 1}, False),
        ({"errors": -1}, False),
        ({"errors": 0.5}, False),
    ],
)
def test_a_command_of_another_rank_is_read_up_to_its_limits(changes: dict[str, Any], read: bool) -> None:
    usual: dict[str, Any] = {"version": "0.1.0", "options": {"--nixl-op": "WRITE"}, "tests": ["a", "b"], "errors": 0}
    command = Command(**{**usual, **changes})
    if read:
        assert Command.unpacked(command.packed()) == command
    else:
        with pytest.raises(StrictError):
            Command.unpacked(command.packed())
