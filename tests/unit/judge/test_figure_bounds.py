# SPDX-License-Identifier: Apache-2.0
"""Bounds of figures in profiles: what is accepted, the message for every fault, and figures judged by them."""

from __future__ import annotations

import pytest

from pytest_nixl.judge.figure_bounds import bounded, judge_figures
from pytest_nixl.judge.profiles import Profile, parse_profile
from pytest_nixl.model.figure import FIGURE_KINDS, Figure
from pytest_nixl.model.verdicts import Judgement, Verdict

LABELS = {"backend": "UCX", "op": "READ", "memory": "DRAM:DRAM", "way": "scattered-prepped", "model": "llama-3-8b",
          "tokens": 8192}  # fmt: skip
SLOW = Figure.of("kv-request-p50", 0.0631, LABELS, (0.06, 0.0631, 0.07))
P50 = 'figure = "kv-request-p50"'
FIFTY = 'at_most = "50 ms"\nsource = "the target of 2026-11-20"'
TIMES = "expected a number with a unit ns, us, ms, s, min or h"


def profile(*bounds: str) -> Profile:
    tables = "".join(f"[[bound]]\n{text}\n" for text in bounds)
    return parse_profile(f'[profile]\nname = "t"\n{tables}'.encode(), "t.toml")


P99 = Figure.of("kv-request-p99", 0.07, LABELS)
ABOVE = f"{SLOW}, above its bound of 50 ms (bound of the profile, from: the target of 2026-11-20)"
ONE_SECOND = f'{P50}\nat_least = "1 s"\nsource = "s"'


@pytest.mark.parametrize(
    ("figures", "bound", "reason"),
    [
        *(([SLOW], f"{P50}\n{selector}\n{FIFTY}", ABOVE) for selector in (
            'backend = ["ucx"]', 'op = ["read", "WRITE"]', 'memory = ["dram:DRAM"]', 'way = ["scattered-prepped"]',
            'model = ["llama-3-8b"]', "tokens = [1024, 8192]", "tokens = [8192]")),
        *(([SLOW], f"{P50}\n{selector}\n{FIFTY}", "") for selector in (
            'backend = ["libfabric"]', 'op = ["WRITE"]', 'memory = ["VRAM:VRAM"]', 'way = ["contiguous-merged"]',
            'model = ["qwen3-8b"]', "tokens = [1024]")),
        ([SLOW], ONE_SECOND, f"{SLOW}, below its bound of 1 s (bound of the profile, from: s)"),
        ([SLOW], f'{P50}\nat_most = "63.1 ms"\nat_least = "63.1 ms"\nsource = "s"', ""),
        ([P99], f"{P50}\n{FIFTY}", ""),
        ([P99, SLOW], f"{P50}\n{FIFTY}", ABOVE),
    ],
)  # fmt: skip
def test_a_figure_outside_a_bound_that_selects_it_fails(figures: list[Figure], bound: str, reason: str) -> None:
    judged = judge_figures(figures, profile(bound).bounds)
    passed = Judgement(Verdict.PASS, "; ".join(map(str, figures)))
    failed = Judgement(Verdict.FAIL, reason, FIGURE_KINDS["kv-request-p50"].remedy)
    assert judged == (failed if reason else passed)
    assert str(SLOW) == "kv-request-p50 (UCX READ DRAM:DRAM scattered-prepped llama-3-8b tokens 8192): 63.1 ms"


def test_a_figure_is_shown_with_the_bound_that_applies_to_it() -> None:
    bounds = profile(f"{P50}\n{FIFTY}").bounds
    assert bounded(P99, bounds) is P99
    assert bounded(SLOW, bounds).limit_text == "at most 50 ms"
    assert bounded(SLOW, profile(ONE_SECOND).bounds).limit_text == "at least 1 s"


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (FIFTY, "figure: missing: expected one of kv-request-p50, kv-request-p99"),
        (f'figure = "speed"\n{FIFTY}', "figure: 'speed' is not a figure that a suite records: expected one of kv-"),
        (f"figure = 3\n{FIFTY}", "figure: the bare number 3, not a text: expected one of kv-"),
        (f"{P50}\ntoken = [1]\n{FIFTY}", "token: unknown key (did you mean tokens?): expected figure, backend"),
        (f"{P50}\ncount = [1]\n{FIFTY}", "count: unknown key: expected figure, backend, op, memory, way"),
        (f'{P50}\ntokens = ["8k"]\n{FIFTY}', "tokens: a text, not an integer: expected a list of positive integers"),
        (f'{P50}\nop = ["COPY"]\n{FIFTY}', "op: 'COPY' is not an operation: expected a list of WRITE or READ"),
        (f"{P50}\nway = []\n{FIFTY}", "way: an empty list: expected a list of ways of suites/kv_cache"),
        (f'{P50}\nsource = "s"', ": bounds nothing: expected at_most or at_least"),
        (f'{P50}\nat_most = "50"\nsource = "s"', f"at_most: '50' has no unit: {TIMES}"),
        (f'{P50}\nat_most = "5 GB/s"\nsource = "s"', f"at_most: '5 GB/s' has the wrong unit 'GB/s': {TIMES}"),
        (f'{P50}\nat_most = "0 s"\nsource = "s"', f"at_most: '0 s' is not above zero: {TIMES}"),
        (f'{P50}\nat_most = "1 s"\nat_least = "2 s"\nsource = "s"',
         "at_least: '2 s' is above at_most: expected at most 1 s"),
        (f'{P50}\nat_most = "1 s"', "source: missing: expected a text that says where each figure is from"),
    ],
)  # fmt: skip
def test_a_fault_of_a_bound_is_one_sentence(table: str, sentence: str) -> None:
    with pytest.raises(ValueError, match="bound #1") as error:
        profile(table)
    message = str(error.value)
    joint = "" if sentence.startswith(":") else ", "
    assert message.startswith(f"profile t.toml, bound #1{joint}{sentence}")
    assert "\n" not in message


def test_two_bounds_for_one_figure_are_refused() -> None:
    with pytest.raises(ValueError, match="bound #2") as error:
        profile(f'{P50}\nop = ["READ"]\n{FIFTY}', f"{P50}\ntokens = [8192]\n{FIFTY}")
    assert str(error.value) == (
        "profile t.toml, bound #2: applies to kv-request-p50, op READ, tokens 8192, as bound #1 does: expected at most "
        "one [[bound]] for each figure"
    )


def test_bounds_of_different_figures_stand_beside_each_other() -> None:
    p99 = 'figure = "kv-request-p99"'
    read, write = f'{P50}\nop = ["READ"]\n{FIFTY}', f'{P50}\nop = ["WRITE"]\n{FIFTY}'
    assert len(profile(read, write, f"{p99}\n{FIFTY}").bounds) == 3
