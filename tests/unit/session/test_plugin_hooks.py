# SPDX-License-Identifier: Apache-2.0
"""When the plugin begins to take part in a run, and what each of its hooks hands on. The hooks of a run are doubles."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from pytest_nixl import plugin


class Scene:
    """A configuration of pytest, and what the plugin loads when it begins.

    :ivar log: the doubles, which keep their calls in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = MagicMock()
        for name in (
            "run_hooks",
            "terminal_output",
            "brief_output",
            "ending",
            "given_options",
            "selection",
            "uses_options",
            "join_flags",
        ):
            monkeypatch.setattr(plugin, name, getattr(self.log, name))
        self.log.uses_options.return_value = False
        self.options: dict[str, Any] = {}
        self.inis: dict[str, list[str]] = {"testpaths": []}
        self.config: Any = SimpleNamespace(
            stash={},
            args=[],
            pluginmanager=self.log.pluginmanager,
            addinivalue_line=self.log.addinivalue_line,
            getoption=lambda name, default=None: self.options.get(name, default),
            getini=self.inis.__getitem__,
            invocation_params=SimpleNamespace(dir=Path("/a/folder")),
            known_args_namespace=SimpleNamespace(file_or_dir=[], pyargs=False),
        )
        self.configured, self.of = self.log.run_hooks.RunHooks.configured, self.log.run_hooks.RunHooks.of

    def item(self, *fixtures: str, check: bool = False) -> Any:
        return SimpleNamespace(
            config=self.config,
            fixturenames=fixtures,
            get_closest_marker=lambda name: "a marker" if check and name == "nixl_check" else None,
        )

    def begin(self) -> MagicMock:
        """Let the plugin begin; return the hooks of the run. The log begins after it."""
        plugin.pytest_itemcollected(self.item(check=True))
        hooks: MagicMock = self.of.return_value
        self.log.reset_mock()
        return hooks


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_a_test_that_makes_a_check_or_uses_a_fixture_of_the_plugin_begins_it_once(scene: Scene) -> None:
    other: Any
    for other in (scene.item("tmp_path", "nixl_rows"), SimpleNamespace(**{**vars(scene.item()), "fixturenames": ()})):
        plugin.pytest_itemcollected(other)
        plugin.pytest_generate_tests(MagicMock(config=scene.config, definition=other))
    assert (scene.log.mock_calls, scene.config.stash) == ([], {})
    for fixture in plugin.__all__:
        scene.config.stash.clear()
        plugin.pytest_itemcollected(scene.item("tmp_path", fixture))
    metafunc = MagicMock(config=scene.config, definition=scene.item(check=True))
    plugin.pytest_generate_tests(metafunc)
    plugin.pytest_itemcollected(other)
    plugin.pytest_generate_tests(other_metafunc := MagicMock(config=scene.config, definition=other))
    hooks = scene.of.return_value
    assert scene.of.call_args_list == [call(scene.config)] * len(plugin.__all__)
    assert hooks.generate_tests.mock_calls == [call(metafunc), call(other_metafunc)]
    assert hooks.itemcollected.mock_calls[-1] == call(other)
    scene.configured.assert_not_called()


@pytest.mark.parametrize(
    ("uses", "options", "begins"),
    [
        (True, {}, "configured"),
        (True, {"dist": "load"}, "configured"),
        (False, {"dist": "load"}, "of"),
        (False, {"tx": ["popen"]}, "of"),
        (False, {}, ""),
    ],
)
def test_an_option_of_the_plugin_or_a_controller_of_xdist_begins_it(
    uses: bool, options: dict[str, Any], begins: str, scene: Scene
) -> None:
    scene.log.uses_options.return_value = uses
    scene.options.update(options)
    plugin.pytest_configure(scene.config)
    scene.log.uses_options.assert_called_once_with(scene.config)
    assert (scene.configured.mock_calls, scene.of.mock_calls) == (
        [call(scene.config)] * (begins == "configured"),
        [call(scene.config)] * (begins == "of"),
    )


@pytest.mark.parametrize(
    ("testpaths", "arguments", "quiet"),
    [("tests", ["tests"], False), ("suites", [], True), ("tests", ["tests", "pytest_nixl.suites"], True)],
)
def test_the_markers_are_declared_and_a_run_of_the_suites_is_quiet(
    testpaths: str, arguments: list[str], quiet: bool, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {} if testpaths == "tests" else {"PYTEST_NIXL_ENDING": "/a"}
    monkeypatch.setattr(plugin, "os", SimpleNamespace(environ=variables))
    scene.inis["testpaths"], scene.config.args = [testpaths], arguments
    plugin.pytest_configure(scene.config)
    markers = [entry.args for entry in scene.log.addinivalue_line.mock_calls]
    assert [(kind, text.partition(":")[0]) for kind, text in markers] == [
        ("markers", "nixl_check(id, level='standard', own=False)"),
        ("markers", "nixl_early(waits=seconds)"),
    ]
    assert scene.log.ending.mock_calls == [call.take_path(scene.config)] * len(variables)
    assert scene.log.brief_output.mock_calls == [call.quiet_benchmarks(scene.config)] * quiet


NO_HEADER = ["of pytest"]


@pytest.mark.parametrize(
    ("hook", "names", "without", "method", "passed_on", "answer"),
    [
        ("pytest_collection_finish", ["session"], None, "collection_finish", ["session"], False),
        ("pytest_report_collectionfinish", ["config"], [], "report_collectionfinish", [], True),
        ("pytest_runtestloop", ["session"], None, "runtestloop", ["session"], True),
        ("pytest_runtest_setup", ["item"], None, "runtest_setup", ["item"], False),
        ("pytest_report_teststatus", ["report", "config"], None, "report_teststatus", ["report"], True),
        ("pytest_benchmark_update_json", ["config", "document"], None, "benchmark_update_json", ["document"], False),
        ("pytest_terminal_summary", ["terminal", "config"], None, "terminal_summary", ["terminal"], False),
    ],
)
def test_a_hook_is_handed_on_to_the_hooks_of_the_run_if_there_are_any(
    hook: str, names: list[str], without: object, method: str, passed_on: list[str], answer: bool, scene: Scene
) -> None:
    values = {
        "session": SimpleNamespace(config=scene.config),
        "config": scene.config,
        "item": scene.item(),
        "report": SimpleNamespace(nixl_result=None),
        "document": {},
        "terminal": "a terminal",
    }
    function = getattr(plugin, hook)
    assert function(*(values[name] for name in names)) == without
    hooks = scene.begin()
    returned = function(*(values[name] for name in names))
    assert hooks.mock_calls == [getattr(call, method)(*(values[name] for name in passed_on))]
    assert returned is (getattr(hooks, method).return_value if answer else None)


def test_only_a_report_of_a_check_has_a_word_of_the_plugin(scene: Scene) -> None:
    hooks, report = scene.begin(), SimpleNamespace()
    assert plugin.pytest_report_teststatus(report, scene.config) is None  # type: ignore[arg-type]
    hooks.report_teststatus.assert_not_called()


def test_only_tests_that_use_the_plugin_are_handed_on(scene: Scene) -> None:
    items = [
        scene.item("tmp_path"),
        scene.item("nixl_agent"),
        scene.item(check=True),
        SimpleNamespace(**{"get_closest_marker": lambda name: None}),
    ]
    plugin.pytest_collection_modifyitems(scene.config, items)
    assert scene.log.mock_calls == []
    hooks = scene.begin()
    plugin.pytest_collection_modifyitems(scene.config, items)
    assert hooks.mock_calls == [call.collection_modifyitems(items[1:3])]
    hooks.reset_mock()
    phase: Any = "a call"
    for item in items[:2]:
        assert ended(plugin.pytest_runtest_makereport(item, phase), "a report") == "a report"
    assert hooks.mock_calls == [call.runtest_makereport(items[1], "a call", "a report")]
    scene.config.stash.clear()
    assert ended(plugin.pytest_runtest_makereport(items[1], phase), "a report") == "a report"
    assert len(hooks.mock_calls) == 1


def ended(steps: Iterator[Any], value: object) -> Any:
    """Return what a wrapper of a hook makes of a value, or of an error of the hooks in it."""
    next(steps)
    with pytest.raises(BaseException) as end:  # Ctrl-C would end the run of this test, too
        if isinstance(value, BaseException):
            steps.throw(value)  # type: ignore[attr-defined]
        else:
            steps.send(value)  # type: ignore[attr-defined]
    assert isinstance(end.value, StopIteration)
    return end.value.value


def test_the_header_and_the_end_of_a_session_are_those_of_the_run(scene: Scene) -> None:
    session: Any = SimpleNamespace(config=scene.config)
    assert ended(plugin.pytest_report_header(scene.config), NO_HEADER) is NO_HEADER
    assert ended(plugin.pytest_sessionfinish(session, 3), "of others") == "of others"
    hooks = scene.begin()

    def finish() -> Iterator[Any]:
        return (yield "begins")

    hooks.sessionfinish.side_effect = lambda session, status: finish()
    assert ended(plugin.pytest_report_header(scene.config), NO_HEADER) is hooks.report_header.return_value
    assert ended(plugin.pytest_sessionfinish(session, 3), "of others") == "of others"
    assert hooks.mock_calls == [call.report_header(NO_HEADER), call.sessionfinish(session, 3)]


OK, FAILED = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize(
    ("begun", "failed", "code", "code_after"),
    [(True, 1, OK, 1), (True, None, OK, OK), (True, 1, 3, 3), (False, 1, OK, OK), (False, None, FAILED, FAILED)],
)
def test_a_verdict_that_fails_a_run_has_the_last_word_on_success(
    begun: bool, failed: int | None, code: int, code_after: int, scene: Scene
) -> None:
    if begun:
        scene.begin().failed_code = failed
    assert ended(plugin.pytest_cmdline_main(scene.config), code) == code_after


@pytest.mark.parametrize(("begun", "uses", "hidden"), [(True, False, True), (False, True, True), (False, False, False)])
def test_a_refusal_of_a_run_with_the_plugin_shows_no_secret(
    begun: bool, uses: bool, hidden: bool, scene: Scene
) -> None:
    if begun:
        scene.begin()
    scene.log.uses_options.return_value = uses
    scene.log.given_options.printable_error.side_effect = lambda config, error: ("hidden", *error.args)
    steps, error = plugin.pytest_cmdline_main(scene.config), pytest.UsageError("a refusal")
    next(steps)
    with pytest.raises(pytest.UsageError) as raised:
        steps.throw(error)
    assert raised.value is error
    assert error.args == (("hidden", "a refusal") if hidden else ("a refusal",))
    expected = [call.printable_error(scene.config, error)] * hidden
    assert scene.log.given_options.mock_calls == expected


def test_ctrl_c_at_the_end_of_a_run_of_ours_still_ends_it(scene: Scene) -> None:
    steps = plugin.pytest_cmdline_main(scene.config)
    next(steps)
    with pytest.raises(KeyboardInterrupt):
        steps.throw(KeyboardInterrupt())
    hooks = scene.begin()
    hooks.failed_code = 1
    assert ended(plugin.pytest_cmdline_main(scene.config), KeyboardInterrupt()) == pytest.ExitCode.INTERRUPTED
    assert hooks.mock_calls == [call.unconfigure()]


def test_at_the_very_end_the_run_and_what_started_processes_are_closed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that no test needed is not loaded for that."""
    modules: dict[str, Any] = {}
    monkeypatch.setattr(plugin, "sys", SimpleNamespace(modules=modules))
    plugin.pytest_unconfigure(scene.config)
    assert scene.log.mock_calls == []
    hooks = scene.begin()
    scene.log.attach_mock(hooks, "hooks")
    modules |= {f"pytest_nixl.processes.{name}": getattr(scene.log, name) for name in ("worker_parent", "supervisor")}
    plugin.pytest_unconfigure(scene.config)
    assert scene.log.mock_calls == [
        call.hooks.unconfigure(),
        call.worker_parent.close_parent(),
        call.supervisor.close_supervisor(),
    ]


def test_a_pasted_name_of_a_test_of_the_suites_is_found(scene: Scene) -> None:
    pasted, node_id = "faults/test_x.py::test_a", "pytest_nixl.suites.faults.test_x::test_a"
    options, pyargs_of_pasted = scene.config.known_args_namespace, scene.log.selection.pyargs_of_pasted
    for matches, arguments_after, files in (
        ({}, ["-v", pasted, "other.py"], [pasted, "other.py"]),
        ({pasted: node_id}, ["-v", node_id, "other.py", "--pyargs"], [node_id, "other.py"]),
    ):
        pyargs_of_pasted.return_value, arguments = matches, ["-v", pasted, "other.py"]
        options.file_or_dir = [pasted, "other.py"]
        next(plugin.pytest_load_initial_conftests(scene.config, arguments))
        assert (arguments, options.file_or_dir, options.pyargs) == (arguments_after, files, bool(matches))
        assert scene.log.join_flags.mock_calls[-1] == call(arguments)
    next(plugin.pytest_load_initial_conftests(scene.config, ["-v", "tests"]))
    assert pyargs_of_pasted.mock_calls == [call([pasted, "other.py"], Path("/a/folder"))] * 2


@pytest.mark.parametrize(
    ("closed", "arguments", "testpaths", "reopened"),
    [
        (True, ["--nixl-gate", "tests"], [], True),
        (True, [], ["suites"], True),
        (True, ["tests"], ["tests"], False),
        (False, ["--nixl-gate"], ["suites"], False),
    ],
)
def test_a_closed_standard_output_is_opened_again_for_a_run_of_ours(
    closed: bool,
    arguments: list[str],
    testpaths: list[str],
    reopened: bool,
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugin, "sys", SimpleNamespace(stdout=None if closed else sys.stdout))
    scene.inis["testpaths"] = testpaths
    assert ended(plugin.pytest_load_initial_conftests(scene.config, arguments), None) is None
    output = scene.log.terminal_output
    opened = [call.reopen_closed_output(), call.TerminalOutput(closed=True)]
    assert output.mock_calls == (opened if reopened else [])
    registered = [call.register(output.TerminalOutput.return_value, "nixl-output")]
    assert scene.log.pluginmanager.mock_calls == registered * reopened
