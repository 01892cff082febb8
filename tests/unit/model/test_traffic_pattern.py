# SPDX-License-Identifier: Apache-2.0
"""Patterns and the rounds in which each of their flows is measured alone."""

from __future__ import annotations

import re
from itertools import chain, combinations, permutations
from pathlib import Path

import pytest

from pytest_nixl.model.traffic_pattern import PatternChoice, RankPairing, TrafficPattern, factors, rounds

MIB = 1 << 20


def pattern(text: str, ranks: int = 1) -> TrafficPattern:
    return PatternChoice.parse(text).of(ranks, MIB)


@pytest.mark.parametrize(
    ("text", "of_run", "ranks", "flows"),
    [
        ("pairs", 1, 4, [(0, 2), (1, 3)]),
        ("pairs:5", 1, 5, [(0, 2), (1, 3)]),
        ("incast", 1, 4, [(1, 0), (2, 0), (3, 0)]),
        ("incast", 3, 3, [(1, 0), (2, 0)]),
        ("incast:3", 8, 3, [(1, 0), (2, 0)]),
        ("outcast", 1, 4, [(0, 1), (0, 2), (0, 3)]),
        ("alltoall:3", 1, 3, [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]),
    ],
)
def test_a_named_pattern_has_its_flows(text: str, of_run: int, ranks: int, flows: list[tuple[int, int]]) -> None:
    named = pattern(text, of_run)
    assert (named.ranks, [flow.ranks for flow in named.flows]) == (ranks, flows)
    assert {flow.size for flow in named.flows} == {MIB}


def test_a_choice_is_shown_as_it_was_typed() -> None:
    choice = PatternChoice.parse(" incast:3 ")
    assert (str(choice), choice) == ("incast:3", PatternChoice("incast:3", "incast", 3))
    assert PatternChoice.parse("pairs") == PatternChoice("pairs", "pairs")


def test_pairs_of_ranks_are_shown_as_an_option_has_them() -> None:
    assert [str(RankPairing.parse(text)) for text in (" First ", " 0:3, 2:1")] == ["first", "0:3,2:1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, f"{text!r} is not a pair of ranks") for text in ("", "0:", ":1", "0", "0:1:2", "0:1234567", "rings")),
        ("0:1,2:2", "'2:2' pairs a rank with itself"),
        ("0:1, 0:1", "0:1 is named twice"),
    ],
)
def test_a_pair_of_ranks_has_two_numbers(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        RankPairing.parse(text)


@pytest.mark.parametrize(("ranks", "last"), [(1, 1), (3, 2)])
def test_a_listed_pair_has_ranks_of_the_run(ranks: int, last: int) -> None:
    with pytest.raises(ValueError, match=f"^0:3 names a rank that is not in the range 0 to {last}$"):
        RankPairing.parse("1:0,0:3").of(ranks)


@pytest.fixture
def matrix_file(tmp_path: Path) -> str:
    """Return the path of a matrix of three ranks."""
    file = tmp_path / "matrix.txt"
    file.write_text("0 1M 0\n0 0 5K\n0 0 0\n")
    return str(file)


def test_a_matrix_has_the_sizes_of_its_file(matrix_file: str, tmp_path: Path) -> None:
    matrix = pattern(matrix_file)
    assert [(flow.source, flow.target, flow.size) for flow in matrix.flows] == [(0, 1, MIB), (1, 2, 5120)]
    assert matrix.ranks == pattern(matrix_file, 5).ranks == 3
    other = tmp_path / "other.txt"
    other.write_text("0 1M 0\n0 0 6K\n0 0 0\n")
    assert matrix.name == pattern(matrix_file).name != pattern(str(other)).name
    assert hash(matrix) == hash(pattern(matrix_file))
    assert re.fullmatch("matrix-[0-9a-f]{8}", matrix.name)
    assert (str(matrix), [str(flow) for flow in matrix.flows]) == (f"{matrix.name} of 3 ranks", ["0->1", "1->2"])


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("incast:8", 4, "it has 8 ranks, but the run has 4"),
        ("incast", 2, "incast needs at least 3 ranks, but the run has 2"),
        ("pairs", 3, "pairs needs at least 4 ranks, but the run has 3"),
        ("", 2, "it has 3 ranks, but the run has 2"),
    ],
    ids=["more than the run", "incast", "pairs", "matrix"],
)
def test_a_pattern_that_does_not_fit_the_run_is_refused(matrix_file: str, text: str, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pattern(text or matrix_file, ranks)


@pytest.mark.parametrize("text", ["incast:1", "pairs:3", "alltoall:1", "outcast:2000"])
def test_a_number_of_ranks_without_a_pattern_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"{text}: expected . to 1024 ranks"):
        PatternChoice.parse(text)


def test_what_is_neither_a_name_nor_a_file_is_refused() -> None:
    for text, message in (("incst", "incst cannot be read: No such file"), (" ", "^' ' is not a pattern$")):
        with pytest.raises(ValueError, match=message):
            PatternChoice.parse(text)


@pytest.mark.parametrize("ranks", range(2, 34))
def test_each_two_ranks_meet_once_in_as_few_rounds_as_possible(ranks: int) -> None:
    pairings = factors(ranks)
    assert len(pairings) == (ranks - 1 if ranks % 2 == 0 else ranks)
    assert sorted(chain(*pairings)) == sorted(combinations(range(ranks), 2))
    for pairs in pairings:
        assert len(set(chain(*pairs))) == 2 * len(pairs)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 16])
def test_rounds_of_all_to_all_share_no_rank_and_have_each_flow_once(ranks: int) -> None:
    all_rounds = rounds(pattern(f"alltoall:{ranks}"))
    assert sorted(flow.ranks for flows in all_rounds for flow in flows) == sorted(permutations(range(ranks), 2))
    assert len(all_rounds) <= 2 * len(factors(ranks))
    if ranks % 2 == 0:
        assert {len(flows) for flows in all_rounds} == {ranks // 2}
    for flows in all_rounds:
        assert len({rank for flow in flows for rank in flow.ranks}) == 2 * len(flows)


@pytest.mark.parametrize(("text", "lengths"), [("incast:6", [1] * 5), ("pairs:8", [4])])
def test_a_round_has_the_flows_that_share_no_rank(text: str, lengths: list[int]) -> None:
    assert [len(flows) for flows in rounds(pattern(text))] == lengths


def test_flows_of_a_round_share_no_host() -> None:
    hosts = ["a", "a", "b", "b", "c", "c", "d", "d"]
    for flows in rounds(pattern("alltoall:8"), hosts):
        ends = [{hosts[rank] for rank in flow.ranks} for flow in flows]
        assert sum(map(len, ends)) == len(set().union(*ends))
    assert [len(flows) for flows in rounds(pattern("alltoall:4"), ["one"] * 4)] == [1] * 12
