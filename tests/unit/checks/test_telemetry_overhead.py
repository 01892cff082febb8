# SPDX-License-Identifier: Apache-2.0
"""The ratio of launches with telemetry to launches without it, and its interval."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl.checks.telemetry import overhead
from pytest_nixl.checks.telemetry.overhead import overhead_figures
from pytest_nixl.judge.figure_bounds import judge_figures
from pytest_nixl.model.figure import Bound
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor

WITHOUT = (10e-6, 10.1e-6, 9.9e-6, 10.2e-6, 9.8e-6)
WITH = tuple(2 * seconds for seconds in WITHOUT)
BOUND = Bound("telemetry-overhead-least", "a test", {"exporter": ("prometheus",)}, 1.5, None)


def test_the_ratio_lies_in_its_interval_and_is_not_a_benchmark_of_its_own() -> None:
    figures = overhead_figures("UCX", "prometheus", WITHOUT, WITH)
    labels = {"backend": "UCX", "exporter": "prometheus"}
    assert [(figure.name, figure.labels, figure.rounds) for figure in figures] == [
        ("telemetry-transfer", {**labels, "exporter": "none"}, WITHOUT),
        ("telemetry-transfer", labels, WITH),
        *((f"telemetry-overhead{end}", labels, ()) for end in ("", "-least", "-most")),
    ]
    assert [figure.value for figure in figures] == pytest.approx([10e-6, 20e-6, 2, 1.9604, 2.0404], rel=1e-4)


def test_a_bound_judges_the_lower_end_of_the_interval() -> None:
    judged = judge_figures(overhead_figures("UCX", "prometheus", WITHOUT, WITH), [BOUND])
    assert judged.verdict is Verdict.FAIL
    assert judged.reason == (
        "telemetry-overhead-least (UCX prometheus): 1.96, above its bound of 1.5 (bound of the profile, from: a test)"
    )
    assert "NIXL_TELEMETRY_ENABLE=n" in judged.remedy


def test_launches_that_differ_widely_prove_no_overhead() -> None:
    scattered = (8e-6, 30e-6, 9e-6, 60e-6, 40e-6)
    figures = overhead_figures("UCX", "prometheus", WITHOUT, scattered)
    assert figures[2].value > 1.5
    assert judge_figures(figures, [BOUND]).verdict is Verdict.PASS


def test_too_few_launches_are_refused() -> None:
    for first, second in ((1, 5), (5, 4)):
        with pytest.raises(ValueError, match=rf"^{first} launches against {second}: expected 5 of each$"):
            overhead_figures("UCX", "prometheus", WITHOUT[:first], WITH[:second])


def test_the_interval_leaves_out_one_in_twenty_on_each_side_if_telemetry_costs_nothing() -> None:
    times = [1.0 + number / 10 for number in range(10)]
    least = []
    for chosen in combinations(range(10), 5):  # every way in which ten equal launches may be on the two sides
        without = [times[place] for place in range(10) if place not in chosen]
        least.append(overhead_figures("UCX", "prometheus", without, [times[place] for place in chosen])[3].value)
    assert len(least) == 252
    assert sum(value > 1 for value in least) == 12


def test_launches_with_and_without_telemetry_alternate(
    make_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents are doubles, because only they give each transfer a known duration."""
    launches: list[tuple[str, str]] = []
    times = {"none": [1.0, 2.0, 9.0], "prometheus": [1.0, 3.0, 9.0]}

    def measured(agents: Any, exporter: str, folder: Path) -> Any:
        assert folder.is_dir()
        launches.append((exporter, folder.name))
        return SimpleNamespace(
            time_transfers=lambda *transfers: times[exporter] if transfers == ("WRITE", 2000, 4096) else []
        )

    monkeypatch.setattr(overhead, "MeasuredAgents", measured)
    settings = make_settings(backend=("LIBFABRIC",))
    figures = overhead.measure_overhead(LocalHost(supervisor()), settings, "prometheus", tmp_path)
    assert figures == overhead_figures("LIBFABRIC", "prometheus", [2.0] * 5, [3.0] * 5)
    turns = ["none", "prometheus", "prometheus", "none"] * 3
    assert launches == [(exporter, f"launch-{number}") for number, exporter in enumerate(turns[:10])]
