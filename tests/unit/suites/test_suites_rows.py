# SPDX-License-Identifier: Apache-2.0
"""The fixtures of all suites: what tests are parametrized with, and how rows and figures are measured and recorded."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from datetime import date
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, MagicMock, call

import pytest
from helpers.suite_calls import value_of

from pytest_nixl.model.figure import Bound, Figure
from pytest_nixl.model.findings import FINDINGS
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Verdict
from suites import conftest

NAMES = ["agent_backend", "agent_progress", "block", "batch", "depth"]


def parameters(run: Any, monkeypatch: pytest.MonkeyPatch, *names: str) -> dict[str, Any]:
    """Return by argument the values and ids with which a test of a run is parametrized."""
    monkeypatch.setattr(conftest, "Run", SimpleNamespace(of={"a config": run}.__getitem__))
    metafunc = MagicMock(fixturenames=[*names], config="a config")
    conftest.pytest_generate_tests(metafunc)
    results = {}
    for (name, values), options in (parametrized for _, *parametrized in metafunc.parametrize.mock_calls):
        label = options.get("ids", str)
        results[name] = [(value, label(value)) for value in values]
    return results


def test_a_test_is_parametrized_with_each_requested_value_of_its_arguments(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: dict[str, Any] = {"blocks": (4096, 1 << 20), "batch": (1, 4), "depth": (2, 8)}
    settings = make_settings(backend=("UCX", "POSIX", "LIBFABRIC"), progress_thread=("on", "off"), **rows)
    run = SimpleNamespace(settings=settings, usable=True)
    expected = {
        "agent_backend": [("UCX", "UCX"), ("LIBFABRIC", "LIBFABRIC")],
        "agent_progress": [("on", "progress-thread=on"), ("off", "progress-thread=off")],
        "block": [(4096, "4KiB"), (1 << 20, "1MiB")],
        "batch": [(1, "batch1"), (4, "batch4")],
        "depth": [(2, "depth2"), (8, "depth8")],
    }
    assert parameters(run, monkeypatch, *NAMES) == expected
    for name in NAMES:
        assert parameters(run, monkeypatch, "verdict", name) == {name: expected[name]}
    run.settings = make_settings(backend=("UCX", "POSIX"), progress_thread=("auto",), batch=(1,), depth=(1,))
    assert parameters(run, monkeypatch, *NAMES) == {
        "block": [(65536, "64KiB")],
        "batch": [(1, "batch1")],
        "depth": [(1, "depth1")],
    }
    run.usable = False
    assert parameters(run, monkeypatch, *NAMES) == {name: [(1, "1")] for name in ("block", "batch", "depth")}


@pytest.mark.parametrize(("backends", "backend"), [(("POSIX", "UCX", "LIBFABRIC"), "UCX"), (("OBJ", "POSIX"), "OBJ")])
def test_an_agent_has_the_first_backend_between_agents_and_the_first_progress_thread(
    backends: tuple[str, ...], backend: str, make_settings: Callable[..., Settings]
) -> None:
    settings, stack = make_settings(backend=backends, progress_thread=("off", "on")), ExitStack()
    assert value_of(conftest.agent_backend, stack, nixl_settings=settings) == backend
    assert value_of(conftest.agent_progress, stack, nixl_settings=settings) == "off"


def test_checks_that_run_early_get_their_tests_and_fixtures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "early", early := MagicMock())
    item: Any = "an item"
    conftest.pytest_runtest_setup(item)
    assert conftest.pytest_pyfunc_call(item) is early.call.return_value
    assert early.mock_calls == [call.before_setup("an item"), call.call("an item")]
    request = SimpleNamespace(session=SimpleNamespace(stash={}), getfixturevalue="a function")
    value_of(conftest.session_fixtures, ExitStack(), request=request)
    assert request.session.stash == {early.FIXTURES: "a function"}


@pytest.mark.parametrize("affects", [{}, {"affects": True}])
def test_a_finding_is_judged_by_its_acceptance_of_today_and_ends_the_test(
    affects: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    today, conclude, judge = date(2026, 3, 4), MagicMock(), MagicMock()
    monkeypatch.setattr(conftest, "date", SimpleNamespace(today=lambda: today))
    monkeypatch.setattr(conftest, "judge_finding", judge)
    monkeypatch.setattr(conftest, "conclude", conclude)
    request, settings = SimpleNamespace(node="an item"), SimpleNamespace(gate="as requested")
    profile, stack = SimpleNamespace(acceptance=lambda id: f"acceptance of {id}"), ExitStack()
    verdict = value_of(conftest.verdict, stack, request=request, nixl_settings=settings, profile=profile)
    finding = value_of(conftest.finding, stack, verdict=verdict, profile=profile)
    finding("NIXL-CUT-METADATA", True, "it was seen", **affects)
    judge.assert_called_once_with(
        FINDINGS["NIXL-CUT-METADATA"],
        occurs=True,
        reason="it was seen",
        affects=bool(affects),
        acceptance="acceptance of NIXL-CUT-METADATA",
        today=today,
    )
    conclude.assert_called_once_with("an item", judge.return_value, profile, gate="as requested")


@pytest.mark.parametrize("prefix", [None, ("docker", "run")])
def test_workers_of_the_other_image_end_with_the_run(
    prefix: tuple[str, ...] | None, make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = MagicMock()
    for name, double in {
        "Launches": launches,
        "LocalHost": lambda *arguments: arguments,
        "supervisor": lambda: "supervisor",
    }.items():
        monkeypatch.setattr(conftest, name, double)
    settings = make_settings(compare_image=SimpleNamespace(prefix=prefix) if prefix else None)
    with ExitStack() as stack:
        other = value_of(conftest.other_launches, stack, nixl_settings=settings)
        assert other is (launches.return_value if prefix else None)
        launches.return_value.close.assert_not_called()
    hosts = (("supervisor", 0, prefix), ("supervisor", 1, prefix))
    assert launches.mock_calls == ([call(hosts, settings), call().close()] if prefix else [])


class Scene:
    """A run with a row, whose judges are doubles.

    :ivar rows: the fixture of a test with pytest-benchmark; ``benchmark`` None: without it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, benchmark: Any = None, other: Any = None, **settings: Any):
        self.run, self.profile = MagicMock(), MagicMock(machine="a machine")
        self.run.settings = SimpleNamespace(**settings)
        self.record = self.run.record = SimpleNamespace(
            other_samples={}, other_versions={}, versions={}, benchmarks=[], samples_so_far=None, add_row=MagicMock()
        )
        self.profile.expectation_in.side_effect = lambda settings, key: f"expectation of {key}"
        self.doubles = MagicMock()
        self.doubles.versions_of.side_effect = lambda first, second: {
            "nixl": f"{first.worker.name}-{second.worker.name}"
        }
        self.doubles.RowSummary.of.return_value = "a summary"
        for name in (
            "decisive_bandwidth",
            "alternate",
            "versions_of",
            "another_launch",
            "another_to_compare",
            "RowSummary",
            "record_samples",
            "judge_row",
        ):
            monkeypatch.setattr(conftest, name, getattr(self.doubles, name))
        item: Any = SimpleNamespace(nodeid="a test")
        self.item = item
        self.rows = conftest.Rows(item, self.run, self.profile, other, benchmark)


def samples(key: str = "a key", values: int = 1, corruption: str | None = None) -> Any:
    return SimpleNamespace(key=key, values=(1e9,) * values, corruption=corruption)


def link(*, of_target: str = "target") -> MagicMock:
    """Return a link whose workers say what they are."""
    ends = [
        SimpleNamespace(worker=SimpleNamespace(role=role, name=name, versions=versions))
        for role, name, versions in (
            ("initiator", "initiator", {"nixl": "1.5.1", "ucx": "1.18", "pid": 7, "gpu": "H100"}),
            ("target", of_target, {"nixl": "1.5.1", "nixl_package": "nixl-cu12", "python": "3.12", "host": "node-b"}),
        )
    ]
    result = MagicMock(
        initiator=ends[0],
        target=ends[1],
        backend="UCX",
        op="READ",
        memory="memory",
        agent_options="options",
        footprint=64,
    )
    result.key.side_effect = lambda block, *, batch, depth: f"{block}/{batch}/{depth}"
    return result


@pytest.mark.parametrize("fewest", [1, 3])
def test_a_row_is_measured_until_no_launch_is_needed(fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that decides alone may end early only if the row needs no more launches."""
    scene, own_link = Scene(monkeypatch, fewest_launches=fewest), link()
    assert scene.rows.measure(own_link, 4096, batch=3, depth=2) is own_link.measure_launches.return_value
    clear = scene.doubles.decisive_bandwidth
    own_link.measure_launches.assert_called_once_with(
        4096,
        batch=3,
        depth=2,
        another=scene.rows.needs_launch,
        clear_above=clear.return_value if fewest == 1 else None,
    )
    assert clear.mock_calls == [call("expectation of 4096/3/2")] * (fewest == 1)


@pytest.mark.parametrize(
    ("values", "corruption", "undecided", "more"),
    [(6, None, True, True), (7, None, True, False), (6, "3 bytes", True, False), (6, None, False, False)],
)
def test_a_row_of_two_images_is_measured_in_turn_while_both_are_right_and_one_more_launch_may_decide(
    values: int, corruption: str | None, undecided: bool, more: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, own_link = MagicMock(), link()
    other.link.return_value = other_link = link(of_target="other target")
    scene = Scene(monkeypatch, other=other, fewest_launches=1)
    scene.doubles.another_launch.return_value, scene.doubles.another_to_compare.return_value = undecided, False
    scene.doubles.alternate.return_value = ("samples of ours", "of the other")
    measured: Any = scene.rows.measure(own_link, 4096, batch=3, depth=2)
    assert measured == "samples of ours"
    other.link.assert_called_once_with("UCX", "READ", "memory", agent_options="options", footprint=64)
    scene.doubles.alternate.assert_called_once_with(own_link, other_link, 4096, batch=3, depth=2, needs_another=ANY)
    assert scene.record.other_versions == {"nixl": "initiator-other target"}
    second = samples("other key", corruption=corruption)
    needs_another = scene.doubles.alternate.call_args.kwargs["needs_another"]
    assert needs_another(samples(values=values), second) is more
    assert scene.record.other_samples == {"other key": second}


@pytest.mark.parametrize(
    ("launches", "corruption", "undecided", "compared", "needed"),
    [
        (1, None, False, False, True),
        (2, None, False, False, False),
        (2, None, True, False, True),
        (2, None, False, True, True),
        (1, "3 bytes", True, True, False),
    ],
)
def test_a_launch_is_needed_if_it_is_required_or_may_decide(
    launches: int,
    corruption: str | None,
    undecided: bool,
    compared: bool,
    needed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wrong bytes need no more launches."""
    scene, measured = Scene(monkeypatch, fewest_launches=2), samples(values=launches, corruption=corruption)
    scene.doubles.another_launch.side_effect = lambda *arguments: (
        undecided and arguments == (measured, "expectation of a key", "a machine")
    )
    scene.doubles.another_to_compare.side_effect = lambda *arguments: compared and arguments == (measured, scene.run)
    assert scene.rows.needs_launch(measured) is needed
    assert scene.record.samples_so_far is measured


@pytest.mark.parametrize("plugin", [None, "enabled", "disabled"])
def test_a_row_of_a_link_is_recorded_with_what_its_workers_say(
    plugin: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark = SimpleNamespace(stats="its statistics" if plugin == "enabled" else None, has_error=True)
    fixture = benchmark if plugin else None
    scene, measured = Scene(monkeypatch, benchmark=fixture), samples()
    scene.rows.record(measured, link())
    scene.doubles.RowSummary.of.assert_called_once_with(measured, "expectation of a key", "a machine")
    scene.record.add_row.assert_called_once_with("a test", "a summary")
    assert scene.record.versions == {"nixl": "initiator-target"}
    more = {
        "initiator_nixl": "1.5.1",
        "initiator_ucx": "1.18",
        "initiator_gpu": "H100",
        "target_nixl": "1.5.1",
        "target_nixl_package": "nixl-cu12",
        "target_python": "3.12",
        "target_host": "node-b",
    }
    recorded = [call(scene.item, fixture, measured, more)] if plugin else []
    assert scene.doubles.record_samples.mock_calls == recorded
    assert scene.record.benchmarks == (["its statistics"] if plugin == "enabled" else [])
    assert benchmark.has_error is (plugin is None)


def test_a_row_of_no_link_is_recorded_with_what_its_test_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture: Any = SimpleNamespace(stats=None)
    scene, measured, summary = Scene(monkeypatch, benchmark=fixture), samples(), MagicMock()
    scene.rows.record(measured, summary=summary, more={"flags": "-x"})
    scene.rows.record(measured, summary=summary, versions={"nixl": "2"})
    assert scene.record.add_row.mock_calls == [call("a test", summary)] * 2
    assert scene.record.versions == {"nixl": "2"}
    assert [own.args[3] for own in scene.doubles.record_samples.mock_calls] == [{"flags": "-x"}, {}]


def test_a_row_is_judged_by_its_expectation_the_machine_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, measured = Scene(monkeypatch), samples()
    assert scene.rows.judge(measured) is scene.doubles.judge_row.return_value
    scene.doubles.judge_row.assert_called_once_with(measured, "expectation of a key", "a machine", os.environ)
    scene.profile.expectation_in.assert_called_once_with(scene.run.settings, "a key")


@pytest.mark.parametrize(
    ("names", "recorded", "skipped"),
    [(["benchmark", "nixl_rows"], False, True), (["benchmark"], True, False), (["nixl_rows"], False, False)],
)
def test_a_benchmark_of_a_test_that_recorded_no_row_warns_of_nothing(
    names: list[str], recorded: bool, skipped: bool
) -> None:
    benchmark = SimpleNamespace(skipped=False, has_error=False)
    request = MagicMock(fixturenames=names)
    request.getfixturevalue.side_effect = {"benchmark": benchmark}.__getitem__
    with ExitStack() as stack:
        value_of(conftest.nixl_rows, stack, request=request, nixl_run=None, profile=None, other_launches=None)
        assert benchmark.has_error is ("benchmark" in names)
        benchmark.has_error = "benchmark" in names and not recorded
    assert benchmark.skipped is skipped


BOUNDED = Bound("agent-creation", "the profile", {}, 1.0, None)
DEFAULT = Bound("agent-creation", "the check", {}, 5.0, None, default=True)


@pytest.mark.parametrize(
    ("bounds", "defaults", "at_most", "verdict"),
    [((BOUNDED,), (DEFAULT,), 1.0, Verdict.FAIL), ((), (DEFAULT,), 5.0, Verdict.PASS), ((), (), None, Verdict.PASS)],
)
@pytest.mark.parametrize(
    ("plugin", "statistics", "skipped"), [(False, None, False), (True, None, True), (True, "used itself", False)]
)
def test_figures_are_recorded_with_their_bounds_and_judged_by_the_profile_before_the_check(
    bounds: tuple[Bound, ...],
    defaults: tuple[Bound, ...],
    at_most: float | None,
    verdict: Verdict,
    plugin: bool,
    statistics: str | None,
    skipped: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record_timed, run = MagicMock(), MagicMock()
    monkeypatch.setattr(conftest, "record_timed_figures", record_timed)
    benchmark = SimpleNamespace(stats=statistics, skipped=False)
    request = MagicMock(node=SimpleNamespace(nodeid="a test"))
    request.config.pluginmanager.has_plugin.side_effect = lambda name: plugin and name == "benchmark"
    request.getfixturevalue.side_effect = {"benchmark": benchmark}.__getitem__
    figure, profile = Figure.of("agent-creation", 2.0, {"backend": "UCX"}), SimpleNamespace(bounds=bounds)
    with ExitStack() as stack:
        write = value_of(conftest.record_figures, stack, request=request, nixl_run=run, profile=profile)
        assert write([figure], *[defaults] * bool(defaults)).verdict is verdict
        ((nodeid, limited),) = (added.args for added in run.record.add_figures.mock_calls)
        assert (nodeid, [(own.key, own.at_most) for own in limited]) == ("a test", [(figure.key, at_most)])
        assert record_timed.mock_calls == [call(request.node, benchmark, limited)] * plugin
    assert benchmark.skipped is skipped
