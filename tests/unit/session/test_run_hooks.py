# SPDX-License-Identifier: Apache-2.0
"""What each hook of a run with the plugin does, in which order, and for which runs. What it calls are doubles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, MagicMock, call

import pytest
from helpers.hooked_run import Scene

from pytest_nixl import run_hooks
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.processes.supervisor import SupervisorError
from pytest_nixl.run_hooks import RunHooks


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_the_parts_of_the_plugin_that_observe_a_run_are_registered(scene: Scene) -> None:
    hooks = RunHooks.of(scene.config)
    assert (hooks.run, hooks.failed_code) == (scene.run, None)
    names = ["nixl-results", "nixl-levels", "nixl-preconditions", "nixl-completeness", "brief", "progress"]
    assert [entry.args[1] for entry in scene.config.pluginmanager.register.mock_calls] == names


REFUSAL = "they do not fit together"
BOTH = {"several": True, "judged_by": ("--nixl-gate",)}


@pytest.mark.parametrize(
    ("values", "refused", "steps"),
    [
        ({}, "", ["TerminalOutput"]),
        ({"output": True}, "", []),
        ({"configured": False, **BOTH}, "", None),
        ({"parallel": True, **BOTH}, "", None),
        ({"several": True}, "", ["write_without_colours", "refuse", "TerminalOutput"]),
        ({"judged_by": ("--nixl-gate",)}, "", ["refuse_accidents", "find", "TerminalOutput"]),
        (BOTH, "refuse", ["write_without_colours", "refuse", "write_refusal"]),
        (BOTH, "find", ["write_without_colours", "refuse", "refuse_accidents", "find", "write_refusal"]),
    ],
)
def test_the_options_of_a_configured_run_are_checked_and_a_refusal_is_reported(
    values: dict[str, Any], refused: str, steps: list[str] | None, scene: Scene
) -> None:
    scene.config.pluginmanager.has_plugin.side_effect = lambda name: values.get("output") and name == "nixl-output"
    scene.run.placement.several = values.get("several", False)
    scene.run.configured, scene.run.parallel = values.get("configured", True), values.get("parallel", False)
    scene.run.settings.judged_by = values.get("judged_by", ())
    if refused:
        getattr(scene.log, refused).side_effect = pytest.UsageError(REFUSAL)
    with pytest.raises(pytest.UsageError, match=REFUSAL) if refused else nullcontext():
        assert RunHooks.configured(scene.config).run is scene.run
    calls = {
        "write_without_colours": call.write_without_colours(scene.config, scene.run),
        "refuse": call.refuse(scene.config, scene.run),
        "find": call.find(scene.run),
        "refuse_accidents": call.refuse_accidents(scene.config, scene.run.settings),
        "write_refusal": call.write_refusal(scene.config, scene.run, REFUSAL),
        "TerminalOutput": call.TerminalOutput(),
    }
    assert [entry for entry in scene.log.mock_calls if entry[0] in calls] == [calls[step] for step in steps or []]
    output = call(scene.log.TerminalOutput.return_value, "nixl-output")
    registered = scene.config.pluginmanager.register.mock_calls
    assert (output in registered) == ("TerminalOutput" in (steps or []))
    assert bool(registered) != bool(refused)


def report(**values: Any) -> Any:
    return SimpleNamespace(outcome="passed", **values)


RESULT = Result("a-check", "t.py::t", Verdict.WARN, "a reason")


@pytest.fixture
def results(scene: Scene) -> Any:
    """The plugin that collects results."""
    RunHooks(scene.run)
    plugin = scene.config.pluginmanager.register.mock_calls[0].args[0]
    scene.log.reset_mock()
    return plugin


def test_a_result_is_collected_as_its_reruns_demand_and_named_by_its_module(scene: Scene, results: Any) -> None:
    for values in ({}, {"nixl_module": "m"}, {"nixl_result": RESULT}, {"nixl_module": "m", "nixl_result": RESULT}):
        scene.log.reset_mock()
        results.pytest_runtest_logreport(own := report(**values))
        named = [call.name_by_module(scene.config, own)] if "nixl_module" in values else []
        judge = scene.log.Reruns.return_value.judge
        added = [call.Reruns().judge(RESULT, own), call.record.add_result(judge.return_value)]
        assert scene.log.mock_calls == [*named, *(added if "nixl_result" in values else [])]


def sent(steps: Iterator[Any], value: Any) -> Any:
    """Return what a wrapper of a hook makes of a value."""
    next(steps)
    with pytest.raises(StopIteration) as end:
        steps.send(value)  # type: ignore[attr-defined]
    return end.value.value


def test_a_result_is_sent_between_processes_as_plain_data(results: Any) -> None:
    data = sent(results.pytest_report_to_serializable(), {"nixl_result": RESULT, "when": "call"})
    assert data == {"nixl_result": RESULT.plain(), "when": "call"}
    received = sent(results.pytest_report_from_serializable(), report(nixl_result=data["nixl_result"]))
    assert received.nixl_result == RESULT
    for other in (None, {"when": "call"}, {"nixl_result": None}):
        assert sent(results.pytest_report_to_serializable(), other) == other
        assert sent(results.pytest_report_from_serializable(), other) == other


def test_the_header_comes_after_the_collection_if_only_a_test_uses_the_plugin(scene: Scene) -> None:
    scene.log.header.side_effect = lambda settings, placement, verbosity: ["a \x1bline", f"{verbosity}"]
    scene.config.get_verbosity.return_value = 2
    hooks = scene.hooks()
    assert hooks.report_header(["of pytest"]) == ["of pytest"]
    assert hooks.report_collectionfinish() == []
    scene.run.collected.used = True
    assert hooks.report_collectionfinish() == ["a \\x1bline", "2"]
    scene.set(parallel=True)
    assert hooks.report_collectionfinish() == []
    scene.set(configured=True)
    scene.log.without_benchmark_header.side_effect = lambda config, headers: headers[1:]
    assert hooks.report_header(["of pytest-benchmark", "of pytest"]) == ["of pytest", ["a \\x1bline", "2"]]


def definition(check: bool) -> Any:
    markers = {"nixl_check": "a marker"} if check else {}
    return SimpleNamespace(get_closest_marker=markers.get, path=Path("suites/x/test_x.py"))


@pytest.mark.parametrize(
    ("check", "suite", "name", "usable", "parametrized"),
    [
        (True, "bandwidth", "nixl_link", True, True),
        (True, None, "nixl_link", False, False),
        (True, "faults", "couple", True, False),
        (False, "bandwidth", "nixl_link", True, True),
    ],
)
def test_a_test_is_noted_with_its_suite_and_runs_once_for_each_link(
    check: bool, suite: str | None, name: str, usable: bool, parametrized: bool, scene: Scene
) -> None:
    scene.run.usable, scene.run.placement.several, scene.log.suite_of.return_value = usable, "several", suite
    metafunc = MagicMock(definition=definition(check), fixturenames=[name])
    scene.hooks().generate_tests(metafunc)
    suites = {suite} if check and suite else set()
    assert (scene.run.collected.checks, scene.run.collected.suites) == (check, suites)
    assert metafunc.parametrize.mock_calls == [call("nixl_link", ["a link"], ids=ANY, indirect=True)] * parametrized
    if parametrized:
        metafunc.parametrize.call_args.kwargs["ids"]("a link")
        scene.log.link_id.assert_called_once_with("a link", several="several")


def test_the_places_of_checks_are_counted_and_each_is_watched(scene: Scene) -> None:
    hooks = scene.hooks()
    for nodeid, check in (("first", True), ("plain", False), ("second", True)):
        item: Any = SimpleNamespace(nodeid=nodeid, get_closest_marker=definition(check).get_closest_marker)
        hooks.itemcollected(item)
        assert (call(item) in scene.log.watch_call.mock_calls) is check
    assert scene.run.collected.places == {"first": 0, "second": 1}


@pytest.mark.parametrize(
    ("values", "names", "prepared"),
    [
        ({}, ["nixl_agent"], True),
        ({}, ["nixl_link"], False),
        ({}, None, False),
        ({"collectonly": True}, ["nixl_agent"], False),
        ({"usable": False}, ["nixl_agent"], False),
        ({"parallel": True}, ["nixl_agent"], False),
        ({"in_cluster": True}, ["nixl_agent"], False),
    ],
)
def test_the_parent_of_workers_starts_while_tests_with_agents_are_collected(
    values: dict[str, bool], names: list[str] | None, prepared: bool, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.set(**values)
    monkeypatch.setattr(run_hooks, "os", SimpleNamespace(environ="variables"))
    item: Any = SimpleNamespace(config=scene.config, get_closest_marker=lambda name: None)
    if names is not None:
        item.fixturenames = names
    scene.log.parent_of_workers.return_value = None
    hooks = scene.hooks()
    hooks.itemcollected(item)
    supervisor = scene.log.supervisor.return_value
    started = [call.parent_of_workers(), call.supervisor(), call.prepare(supervisor, "variables")]
    assert scene.log.mock_calls == (started if prepared else [])
    for error in (SupervisorError("it cannot start"), OSError()):
        scene.log.prepare.side_effect = error
        hooks.itemcollected(item)
    scene.log.reset_mock()
    scene.log.parent_of_workers.return_value = "a parent"
    hooks.itemcollected(item)
    assert scene.log.mock_calls == [call.parent_of_workers()] * prepared


@pytest.mark.parametrize(
    ("row", "figures", "parallel", "usable", "timed", "skipped"),
    [
        ("a row", False, False, True, True, False),
        ("a row", False, True, True, True, True),
        (None, True, True, True, True, False),
        (None, False, False, True, False, False),
        ("a row", True, True, False, False, False),
        ("a row", True, False, False, True, False),
    ],
)
def test_tests_that_measure_are_benchmarks_and_no_row_is_measured_in_parallel(
    row: str | None, figures: bool, parallel: bool, usable: bool, timed: bool, skipped: bool, scene: Scene
) -> None:
    scene.set(parallel=parallel, usable=usable)
    scene.log.row_of.return_value, scene.log.records_figures.return_value = row, figures
    hooks, items = scene.hooks(), [MagicMock(), MagicMock()]
    hooks.collection_modifyitems([])
    assert scene.run.collected.used is False
    hooks.collection_modifyitems(items)
    assert scene.run.collected.used is True
    assert scene.log.make_benchmark.mock_calls == [*map(call, items)] * timed
    reason = "bandwidth is never measured in parallel: run it without pytest-xdist (-n)"
    for item in items:
        marks = [mark.args[0].mark for mark in item.add_marker.mock_calls]
        assert [(mark.name, mark.kwargs) for mark in marks] == [("skip", {"reason": reason})] * skipped


RERUNS, IMAGE, PROFILE = "refuse_marked", "ensure_image", "load_profile"
AGENTS, MACHINE, SILENCE = "refuse_agent_options", "read_machine_early", "refuse_silence"
ALL = {"gate": True, "reruns": True, "etcd_server": "container", "etcd": True}


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ({}, [PROFILE, AGENTS, MACHINE]),
        ({**ALL, "store": "runs"}, [RERUNS, IMAGE, PROFILE, AGENTS, MACHINE, PROFILE, SILENCE]),
        ({**ALL, "used": False}, [IMAGE]),
        ({**ALL, "usable": False}, [IMAGE]),
        ({**ALL, "parallel": True}, [RERUNS]),
        ({**ALL, "collectonly": True}, [RERUNS, PROFILE, PROFILE, SILENCE]),
        ({"gate": True, "etcd": True}, [PROFILE, AGENTS, MACHINE, PROFILE, SILENCE]),
        ({"etcd_server": "container"}, [PROFILE, AGENTS, MACHINE]),
    ],
)
def test_what_cannot_be_judged_is_refused_before_the_first_test(
    values: dict[str, Any], steps: list[str], scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    values = dict(values)
    reruns, etcd = values.pop("reruns", False), values.pop("etcd", False)
    scene.run.collected.used = values.pop("used", True)
    scene.set(**values)
    scene.config.pluginmanager.has_plugin.side_effect = lambda name: reruns and name == "rerunfailures"
    scene.session.items = items = [
        SimpleNamespace(),
        SimpleNamespace(fixturenames=["nixl_etcd"] * etcd),
        SimpleNamespace(fixturenames=["other"]),
    ]
    settings, calls = scene.run.settings, scene.hooks()
    with caplog.at_level("INFO", "pytest_nixl.run_hooks"):
        calls.collection_finish(scene.session)
    expected = {
        RERUNS: call.refuse_marked(items, "--nixl-gate"),
        IMAGE: call.etcd_container.ensure_image("an image"),
        PROFILE: call.load_profile("a profile"),
        AGENTS: call.refuse_agent_options(settings),
        MACHINE: call.read_machine_early(scene.config, stored=bool(settings.store)),
        SILENCE: call.refuse_silence(scene.profile, items),
    }
    assert scene.log.mock_calls == [expected[step] for step in steps]
    profile = "profile its path: 2 required checks, 1 expectations"
    assert caplog.messages == [profile] * (PROFILE in steps)


def test_a_run_whose_image_of_etcd_cannot_be_had_is_refused(scene: Scene) -> None:
    scene.run.settings.etcd_server = "container"
    scene.session.items = [SimpleNamespace(fixturenames=["nixl_etcd"])]
    scene.log.etcd_container.ensure_image.side_effect = EtcdError("no such image")
    with pytest.raises(pytest.UsageError, match=r"^--nixl-etcd-server=container: no such image$"):
        RunHooks(scene.run).collection_finish(scene.session)


def test_only_one_of_several_ranks_takes_part_in_a_group(scene: Scene) -> None:
    hooks = scene.hooks()
    assert hooks.runtestloop(scene.session) is None
    scene.set(in_cluster=True)
    for other in ("parallel", "collectonly"):
        scene.set(**{other: True})
        assert hooks.runtestloop(scene.session) is None
        scene.set(**{other: False})
    assert hooks.runtestloop(scene.session) is scene.log.take_part.return_value
    assert scene.log.mock_calls == [call.take_part(scene.session, scene.run)]


def test_only_a_check_has_its_load_watched(scene: Scene) -> None:
    hooks, item = scene.hooks(), MagicMock()
    for check, watched in ((None, []), ("an-id", [call(item)])):
        scene.log.check_of.return_value = check
        hooks.runtest_setup(item)
        assert scene.log.watch_load.mock_calls == watched


def test_a_failed_test_shows_its_agents(scene: Scene) -> None:
    error, test = AssertionError(), pytest.Function
    scene.log.agents_section.side_effect = lambda arguments, error: [("agents", [*arguments, error])]
    for failed, raised, of in (
        (True, error, test),
        (False, error, test),
        (True, None, test),
        (True, error, pytest.Item),
    ):
        item: Any = MagicMock(spec=of)
        item.funcargs = {"first": "an agent", "second": "a link"}
        phase: Any = SimpleNamespace(excinfo=None if raised is None else SimpleNamespace(value=raised))
        own = report(failed=failed, sections=[("of pytest", "x")])
        scene.hooks().runtest_makereport(item, phase, own)
        assert scene.log.add_result.mock_calls == [call(item, phase, own)]
        shown = [("agents", ["an agent", "a link", error])] if failed and raised and of is test else []
        assert own.sections == [("of pytest", "x"), *shown]


def test_what_pytest_writes_of_a_check_comes_from_its_result_and_its_run(scene: Scene) -> None:
    hooks, document, own = scene.hooks(), dict[str, Any](), report()
    assert hooks.report_teststatus(own) is scene.log.status_word.return_value
    hooks.benchmark_update_json(document)
    scene.run.record.results = (RESULT,)
    hooks.benchmark_update_json(document)
    terminal: Any = "a terminal"
    hooks.terminal_summary(terminal)
    assert scene.log.mock_calls == [
        call.status_word(own),
        call.add_ours(document, scene.run),
        call.finish("a terminal", scene.run),
    ]


@pytest.mark.parametrize("interrupted", ["", "INTERRUPTED after 2 checks"])
@pytest.mark.parametrize("member", [True, False])
def test_a_run_ends_with_the_reason_of_its_interruption_after_it_left_its_group(
    interrupted: str, member: bool, scene: Scene
) -> None:
    scene.set(interrupted=interrupted, rank_session=scene.log.rank_session if member else None)
    scene.hooks().unconfigure()
    assert scene.log.mock_calls == [
        *[call.rank_session.close()] * member,
        *[call.repeat_verdict(scene.config, scene.run)] * bool(interrupted),
    ]
