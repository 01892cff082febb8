# SPDX-License-Identifier: Apache-2.0
"""What a slip of one word would change: the other side, one element less, the last instead of the first."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import cast

import pytest
from helpers.records import KEY, ROW, record
from prometheus_client.parser import text_string_to_metric_families

from pytest_nixl.core.rdma_fault import allows_cuda, wants_rdma
from pytest_nixl.judge.profiles import Profile, parse_profile
from pytest_nixl.model.figure import (
    BANDWIDTH,
    BYTES,
    COUNT,
    FIGURE_KINDS,
    PER_SECOND,
    SECONDS,
    Figure,
    FigureUnit,
)
from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import SEVERITY, Judgement, Verdict, most_severe
from pytest_nixl.report.files import metrics_text
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.session.gate import failing_results, refuse_silence
from pytest_nixl.session.outcome import Reruns
from pytest_nixl.session.requested_links import row_of
from pytest_nixl.store.record_reader import RecordedRun, parse_recorded


def profile(*required: str) -> Profile:
    checks = f"[required]\nchecks = {list(required)}\n" if required else ""
    return parse_profile(f'[profile]\nname = "mine"\nsummary = "s"\n{checks}'.encode(), "mine")


def recorded(*results: Result) -> RecordedRun:
    return parse_recorded(record("image:1", {KEY: [1.0]}, results=results), "r.json")


@pytest.mark.parametrize(
    ("unit", "suffix"),
    [
        (SECONDS, "seconds"),
        (BYTES, "bytes"),
        (BANDWIDTH, "bytes_per_second"),
        (PER_SECOND, "per_second"),
        (COUNT, "value"),
    ],
)
def test_the_name_of_a_metric_has_the_unit_of_its_figure(unit: FigureUnit, suffix: str) -> None:
    kind = next(kind for kind in FIGURE_KINDS.values() if kind.unit == unit)
    figure = Figure.of(kind.name, 2.0, dict.fromkeys(kind.labels, 1))
    text = metrics_text(RunReport(recorded(Result("x", "y", Verdict.PASS, measured=(figure,)))))
    names = [sample.name for family in text_string_to_metric_families(text) for sample in family.samples]
    assert [name for name in names if name.startswith("nixl_figure_")] == [f"nixl_figure_{suffix}"]


#: Verdicts from the most to the least severe. What a gate fails is worse than what it passes with a warning.
MOST_SEVERE_FIRST = (
    "CORRUPT", "FAIL", "WRONG-TRANSPORT", "IMPLAUSIBLE", "REGRESSED", "ERROR", "MISSING", "UNKNOWN", "INCONCLUSIVE",
    "NO-EXPECTATION", "WARN", "PASS", "IMPROVED", "UNCHANGED", "NOT-APPLICABLE",
)  # fmt: skip


def test_of_two_verdicts_the_more_severe_counts() -> None:
    assert set(MOST_SEVERE_FIRST) == {str(verdict) for verdict in SEVERITY}
    judgements = [Judgement(Verdict(name), "a reason") for name in MOST_SEVERE_FIRST]
    for worse, better in combinations(judgements, 2):
        assert most_severe([worse, better]) is most_severe([better, worse]) is worse


def test_a_repeated_check_is_inconclusive_by_its_first_attempt() -> None:
    def report(outcome: str) -> pytest.TestReport:
        return cast(pytest.TestReport, SimpleNamespace(outcome=outcome))

    reruns = Reruns()
    for number, verdict in enumerate((Verdict.FAIL, Verdict.ERROR), 1):
        reruns.judge(Result("x", "a", verdict, f"reason {number}"), report("rerun"))
    last = reruns.judge(Result("x", "a", Verdict.PASS, "well"), report("passed"))
    assert (last.verdict, last.reason) == (
        Verdict.INCONCLUSIVE, "the first attempt was FAIL (reason 1), and attempt 3 was PASS"
    )  # fmt: skip
    assert reruns.judge(Result("x", "b", Verdict.PASS), report("passed")).verdict is Verdict.PASS
    assert reruns.judge(Result("x", "a", Verdict.CORRUPT), report("failed")).verdict is Verdict.CORRUPT


@pytest.mark.parametrize(
    ("gate", "required", "fails"),
    [
        (False, (), {"FAIL"}),
        (True, (), {"FAIL", "INCONCLUSIVE"}),
        (True, ("not-applicable",), {"FAIL", "INCONCLUSIVE", "NOT-APPLICABLE"}),
        (False, ("not-applicable",), {"FAIL"}),
    ],
)
def test_a_check_that_the_profile_requires_must_apply(gate: bool, required: tuple[str, ...], fails: set[str]) -> None:
    verdicts = ("PASS", "WARN", "FAIL", "INCONCLUSIVE", "NOT-APPLICABLE")
    results = [Result(verdict.lower(), f"test_{verdict}", Verdict(verdict), "a reason") for verdict in verdicts]
    assert {str(result.verdict) for result in failing_results(results, profile(*required), gate=gate)} == fails


def test_a_test_measures_the_row_of_its_parameters() -> None:
    sizes = {"block": 4096, "batch": 2, "depth": 3}
    link = SimpleNamespace(key=ROW)
    for params, row in (
        ({"nixl_link": link, **sizes}, replace(ROW, **sizes)),  # type: ignore[arg-type]
        ({"nixl_link": link}, ROW),
        ({"mine": link, **sizes}, ROW),
        ({"mine": ROW, **sizes}, ROW),
        (sizes, None),
    ):
        item = SimpleNamespace(fixturenames=["nixl_rows"], callspec=SimpleNamespace(params=params))
        assert row_of(cast(pytest.Item, item)) == row
        assert row_of(cast(pytest.Item, SimpleNamespace(fixturenames=[], callspec=item.callspec))) is None


def test_a_row_anywhere_among_the_tests_needs_an_expectation() -> None:
    row, other = (
        cast(pytest.Item, SimpleNamespace(fixturenames=names, callspec=SimpleNamespace(params={"link": ROW})))
        for names in (["nixl_rows"], [])
    )
    refuse_silence(profile(), [other, other])
    for items in ([row], [row, other], [other, row]):
        with pytest.raises(pytest.UsageError, match="'mine' has no"):
            refuse_silence(profile(), items)


@pytest.mark.parametrize(
    ("text", "rdma"),
    [
        *((name, True) for name in ("rc", "rc_x", "ud", "ud_v", "dc", "dc_x", "ib", "srd", "gga_x", "efa", "tcp,rc")),
        *((name, False) for name in ("", "tcp", "sm", "cuda_copy", "_x", "rcx", "all", "^rc", "^rc,ud")),
    ],
)
def test_transports_of_rdma_devices_are_recognised(text: str, rdma: bool) -> None:
    assert wants_rdma({"UCX_TLS": text}) is rdma


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        *((name, True) for name in ("all", "rc,cuda_copy", "\\cuda", "^rc", "^tcp,rc")),
        *((name, False) for name in ("", "rc", "cuda_ipc", "^cuda", "^rc,\\cuda_copy", "^all")),
    ],
)
def test_transports_for_gpu_memory_are_recognised(text: str, cuda: bool) -> None:
    assert allows_cuda(text) is cuda
