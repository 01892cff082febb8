# SPDX-License-Identifier: Apache-2.0
"""What a rank says and does before the tests of a run, in place of them, and when it leaves; its group is a double."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from pytest_nixl import cluster_hooks
from pytest_nixl.cluster.group import JoinRefusedError
from pytest_nixl.cluster.peer_server import Ending
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.extras import own_version
from pytest_nixl.model.conclusion import failed_beside, verdict_fields
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.results import Result
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import OPTIONS, Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.session.run import LiveRecord


class Scene:
    """A run of three ranks, what its session of pytest is told, and its rank in the group.

    :ivar log: the doubles, which keep their calls in order.
    """

    def __init__(self, make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = log = MagicMock()
        for name in (
            "RankSession",
            "supervisor",
            "name_by_rank",
            "require_etcd",
            "require_secret",
            "add_early_end",
            "write_again",
            "rewrite_reports",
        ):
            monkeypatch.setattr(cluster_hooks, name, getattr(log, name))

        @contextmanager
        def in_order() -> Any:
            log.sigterm_is_handled()
            yield
            log.sigterm_ends()

        monkeypatch.setattr(cluster_hooks, "sigterm_ends_in_order", in_order)
        self.config = MagicMock()
        self.config.getoption.side_effect = lambda name, default=None: default
        self.rank = log.RankSession.return_value
        self.rank.drives, self.rank.fault, self.rank.faults, self.rank.ending = False, None, [], None
        self.rank.driver, self.rank.early = "a driver", False
        self.rank.name, self.rank.name_of = "rank 1 on node-b", lambda rank: f"rank {rank} on node-a"
        self.rank.ignored.return_value, self.rank.describe_loss.return_value = [], ["what it lost"]
        placement = SimpleNamespace(ranks=3, source="--nixl-ranks", by_launcher=None, rank=1)
        self.record = LiveRecord(hide=lambda text: text)
        self.run: Any = SimpleNamespace(
            placement=placement,
            settings=make_settings(),
            rank_session=None,
            usable=True,
            record=self.record,
            join=lambda rank: setattr(self.run, "rank_session", rank),
        )
        items = [SimpleNamespace(nodeid=name) for name in ("t.py::a", "t.py::b")]
        self.session: Any = SimpleNamespace(config=self.config, items=items, testsfailed=2, exitstatus=0)

    def terminal(self) -> Any:
        return self.config.pluginmanager.get_plugin.return_value

    def lines(self) -> list[str]:
        """Return the lines on the terminal."""
        return [line.args[0] for line in self.terminal().write_line.mock_calls]


@pytest.fixture
def scene(make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(make_settings, monkeypatch)


@pytest.mark.parametrize(
    ("launcher", "color", "variables", "after"),
    [
        ("mpirun", "auto", {}, "no"),
        ("mpirun", "auto", {"FORCE_COLOR": "", "PY_COLORS": ""}, "no"),
        ("mpirun", "auto", {"FORCE_COLOR": "1"}, "auto"),
        ("mpirun", "auto", {"PY_COLORS": "1"}, "auto"),
        ("mpirun", "yes", {}, "yes"),
        (None, "auto", {}, "auto"),
    ],
)
def test_a_rank_of_a_launcher_writes_colours_only_if_they_are_requested(
    launcher: str | None,
    color: str,
    variables: dict[str, str],
    after: str,
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_hooks, "os", SimpleNamespace(environ=variables))
    scene.run.placement.by_launcher, scene.config.option.color = launcher, color
    cluster_hooks.write_without_colours(scene.config, scene.run)
    assert scene.config.option.color == after


XDIST = "3 ranks (--nixl-ranks) cannot be combined with pytest-xdist: remove -n and --dist"


@pytest.mark.parametrize(
    ("options", "image", "refusal"),
    [
        ({}, None, None),
        ({"numprocesses": 0, "dist": "no"}, None, None),
        ({"numprocesses": 2}, None, XDIST),
        ({"dist": "load"}, "an image", XDIST),
        (
            {},
            "an image",
            "--nixl-compare-image is refused with 3 ranks (--nixl-ranks): its command runs on one host "
            "only; compare two runs with --nixl-baseline instead",
        ),
    ],
)
def test_options_that_several_ranks_cannot_have_are_refused(
    options: dict[str, Any], image: Any, refusal: str | None, scene: Scene
) -> None:
    scene.config.getoption.side_effect = options.get
    scene.run.settings = replace(scene.run.settings, compare_image=image)
    if refusal is None:
        cluster_hooks.refuse(scene.config, scene.run)
        arguments = (scene.run.settings, scene.run.placement)
        assert scene.log.mock_calls == [call.require_etcd(*arguments), call.require_secret(*arguments)]
        return
    with pytest.raises(pytest.UsageError) as error:
        cluster_hooks.refuse(scene.config, scene.run)
    assert str(error.value) == refusal
    assert scene.log.mock_calls == []


def test_rank_0_joins_and_runs_its_tests_until_a_rank_is_lost(scene: Scene) -> None:
    scene.rank.drives = True
    assert cluster_hooks.take_part(scene.session, scene.run) is None
    assert scene.run.rank_session is scene.rank
    names = [entry[0] for entry in scene.log.mock_calls]
    assert names == [
        "require_etcd",
        "require_secret",
        "sigterm_is_handled",
        "supervisor",
        "RankSession",
        "RankSession().drive",
        "sigterm_ends",
    ]
    settings, placement, command, supervisor, say = scene.log.RankSession.call_args.args
    assert (settings, placement, supervisor) == (
        scene.run.settings,
        scene.run.placement,
        scene.log.supervisor.return_value,
    )
    assert command == cluster_hooks.command_of(settings, ["t.py::a", "t.py::b"], 2)
    assert (command.version, command.tests, command.errors) == (own_version(), ["t.py::a", "t.py::b"], 2)
    assert command.options.keys() == {option.flag for option in OPTIONS if not option.per_rank}
    assert command.options["--nixl-timeout"] == "30s"
    say("waiting")
    terminal = scene.terminal()
    assert terminal.mock_calls == [call.ensure_newline(), call.write_line("waiting"), call.flush()]
    scene.config.pluginmanager.get_plugin.assert_called_once_with("terminalreporter")
    (lost,) = scene.rank.drive.call_args.args
    lost(NixlPluginError("rank 1 is gone"))
    assert scene.session.shouldfail == "rank 1 is gone"


def test_a_rank_without_a_terminal_says_nothing(scene: Scene) -> None:
    scene.config.pluginmanager.get_plugin.return_value = None
    scene.rank.serve.return_value = Ending(0, "PASS")
    assert cluster_hooks.take_part(scene.session, scene.run) is True


@pytest.mark.parametrize(
    ("served", "outcome", "text"),
    [
        (Ending(0, "NIXL verdict: PASS"), "passed", None),
        (Ending(1, "NIXL verdict: FAIL"), "failed", "NIXL verdict: FAIL\nreported by rank 0 on node-a"),
        (NixlPluginError("rank 0 is gone"), "failed", "rank 0 is gone"),
    ],
)
def test_a_peer_serves_rank_0_and_reports_the_verdict_as_one_test(
    served: Ending | NixlPluginError, outcome: str, text: str | None, scene: Scene
) -> None:
    scene.rank.serve.side_effect = [served]
    scene.rank.rank = 1
    try:
        assert cluster_hooks.take_part(scene.session, scene.run) is True
    except pytest.exit.Exception:  # it would end the run of this test, too
        pytest.fail("the peer ends pytest")
    assert call.name_by_rank(scene.config, 1) in scene.log.mock_calls
    assert scene.lines() == ["rank 1 on node-b serves rank 0 on node-a"]
    lost = isinstance(served, NixlPluginError)
    if lost:
        assert (scene.rank.fault, scene.rank.ending) == (served, Ending(1, "rank 0 is gone"))
    assert scene.record.notes == (("what it lost",) if lost else ())
    place = {"nodeid": scene.rank.name, "location": (scene.rank.name, None, scene.rank.name)}
    steps = scene.config.hook.mock_calls
    assert [steps[0], steps[-1]] == [call.pytest_runtest_logstart(**place), call.pytest_runtest_logfinish(**place)]
    reports = [step.kwargs["report"] for step in steps[1:-1]]
    assert [(own.nodeid, own.location) for own in reports] == [tuple(place.values())] * 3
    assert [(own.when, own.outcome, own.longrepr) for own in reports] == [
        ("setup", "passed", None),
        ("call", outcome, text),
        ("teardown", "passed", None),
    ]


@pytest.mark.parametrize(("rank", "number"), [(2, 2), (None, 0)])
def test_a_rank_that_cannot_join_ends_with_the_reason(rank: int | None, number: int, scene: Scene) -> None:
    scene.run.placement.rank = rank
    scene.log.RankSession.side_effect = JoinRefusedError("the group is complete")
    with pytest.raises(pytest.UsageError, match=r"^the group is complete$"):
        cluster_hooks.take_part(scene.session, scene.run)
    scene.log.RankSession.side_effect = NixlPluginError("no etcd", "start one")
    with pytest.raises(pytest.exit.Exception) as end:
        cluster_hooks.take_part(scene.session, scene.run)
    assert (end.value.msg, end.value.returncode) == ("no etcd\nremedy: start one", 1)
    assert scene.log.name_by_rank.mock_calls == [call(scene.config, number)]


GONE = NixlPluginError("rank 2 is gone", "look at its log")
PASSED = Ending(1, "NIXL verdict: FAIL")


@pytest.mark.parametrize(
    ("values", "code", "code_after", "ended", "lost"),
    [
        ({"ending": PASSED, "faults": [GONE]}, 0, 1, "", False),
        ({"driver": None}, 2, 2, "was interrupted", False),
        ({"driver": None}, 143, 143, "was ended by SIGTERM", False),
        ({"driver": None}, 3, 3, "ended with exit code 3", False),
        ({"driver": None, "faults": [GONE]}, 128, 128, "ended with exit code 128", False),
        ({"faults": [GONE]}, 0, 1, "", True),
        ({"faults": [GONE]}, 2, 2, "", True),
        ({}, 0, 0, "", False),
    ],
)
def test_what_a_rank_lost_or_left_is_reported_before_its_reports_are_written(
    values: dict[str, Any], code: int, code_after: int, ended: str, lost: bool, scene: Scene
) -> None:
    scene.session.exitstatus = code
    cluster_hooks.conclude(scene.session, scene.run)
    assert scene.record == LiveRecord(hide=scene.record.hide), "a run that has not joined"
    vars(scene.rank).update(values)
    scene.rank.ignored.return_value, scene.run.rank_session = ["what it ignored"], scene.rank
    cluster_hooks.conclude(scene.session, scene.run)
    assert scene.session.exitstatus == code_after
    assert scene.record.notes == ("what it ignored", *(["what it lost"] if lost else []))
    error = Result("ranks", "", Verdict.ERROR, "rank 2 is gone", "look at its log")
    assert scene.record.results == ((error,) if lost else ())
    sentence = f"rank 1 on node-b {ended} and left"
    ending = Ending(code, sentence) if ended else values.get("ending")
    assert (scene.rank.early, scene.rank.ending) == (bool(ended), ending)
    early = [call(scene.config, f"INTERRUPTED: {sentence}")] * bool(ended)
    assert scene.log.add_early_end.mock_calls == early


ROW = Result("bandwidth", "t", Verdict.INCONCLUSIVE, "slow", row=RowKey("UCX", "READ", MemoryPair("DRAM", "DRAM"), 64))
LISTED = [Result("first", "t", Verdict.PASS), ROW, Result("last", "t", Verdict.NOT_APPLICABLE, "no GPU")]
FAILED = [Result(f"check-{number}", "t", Verdict.FAIL, f"reason {number}") for number in range(13)]
SLOW = "INCONCLUSIVE: UCX/READ/DRAM:DRAM/64B/batch1/depth1/0-1: slow"


@pytest.mark.parametrize(
    ("results", "values", "code", "summary", "lines", "conclusion"),
    [
        (LISTED, {}, 0, "NIXL verdict: PASS", [SLOW], "fields"),
        (LISTED, {"gate": True}, 1, "NIXL gate: INCONCLUSIVE", [SLOW], "beside"),
        (LISTED[:1], {}, 1, "NIXL verdict: FAIL, because a test failed", [], "beside"),
        (
            FAILED[:12],
            {},
            1,
            "NIXL verdict: FAIL",
            [f"FAIL: check-{number}: reason {number}" for number in range(12)],
            "beside",
        ),
        (
            FAILED,
            {},
            1,
            "NIXL verdict: FAIL",
            [*(f"FAIL: check-{number}: reason {number}" for number in range(12)), "and 1 more"],
            "beside",
        ),
        ([], {}, 5, "no NIXL check ran; the tests of rank 0 ended with exit code 5", [], "beside"),
        (
            [],
            {"interrupted": "INTERRUPTED after 0 checks"},
            2,
            "NIXL verdict: INTERRUPTED after 0 checks",
            ["rank 0 on node-a was interrupted: every rank ends with exit code 2"],
            "beside",
        ),
        (
            LISTED,
            {},
            3,
            "NIXL verdict: FAIL",
            ["rank 0 on node-a ended with exit code 3: every rank ends with exit code 3"],
            "none",
        ),
        (
            LISTED,
            {"usable": False},
            4,
            None,
            ["rank 0 on node-a ended with exit code 4: every rank ends with exit code 4"],
            "none",
        ),
        ([], {"usable": False}, 5, None, [], "none"),
        (LISTED[1:], {"usable": False}, 1, None, [SLOW], "none"),
    ],
)
def test_the_other_ranks_are_told_the_verdict_its_fields_and_what_is_wrong(
    results: list[Result],
    values: dict[str, Any],
    code: int,
    summary: str | None,
    lines: Sequence[str],
    conclusion: str,
    scene: Scene,
) -> None:
    assert cluster_hooks.leave_group(scene.session, scene.run) == []
    gate, interrupted = values.get("gate", False), values.get("interrupted", "")
    scene.run.settings = replace(scene.run.settings, gate=gate)
    scene.run.usable, scene.record.interrupted = values.get("usable", True), interrupted
    scene.record.results, scene.run.rank_session, scene.session.exitstatus = tuple(results), scene.rank, code
    assert cluster_hooks.leave_group(scene.session, scene.run) is scene.rank.finish.return_value
    ((ending,),) = (finished.args for finished in scene.rank.finish.mock_calls)
    first, *others = ending.verdict.splitlines() if summary is not None else ["", *ending.verdict.splitlines()]
    assert first.startswith(summary or "")
    assert others == [*lines]
    fields = verdict_fields(scene.record.results, gate=gate, interrupted=interrupted)
    expected = {"fields": fields, "beside": failed_beside(fields, code), "none": {}}[conclusion]
    assert ending == Ending(code, ending.verdict, verdict_fields=expected)
    assert (scene.session.exitstatus, scene.record.interrupted) == (code, interrupted)
    assert [scene.log.write_again.mock_calls, scene.log.rewrite_reports.mock_calls] == [[], []]


@pytest.mark.parametrize("drives", [True, False])
@pytest.mark.parametrize(
    ("before", "interrupted", "code", "text"),
    [
        (True, "", 0, "INTERRUPTED: rank 2 is gone"),
        (False, "", 0, "INTERRUPTED after the last check: rank 2 is gone"),
        (False, "", 2, "INTERRUPTED after the last check: rank 2 is gone"),
        (False, "INTERRUPTED: Ctrl-C", 2, None),
    ],
)
def test_reports_are_written_again_if_a_rank_is_lost_while_the_group_ends(
    before: bool, interrupted: str, code: int, text: str | None, drives: bool, scene: Scene
) -> None:
    faults = scene.rank.faults = [GONE] if before else []

    def finish(ending: Ending) -> list[str]:
        assert ending is PASSED
        faults[:] = [GONE]
        return ["a sentence"]

    scene.rank.finish.side_effect, scene.rank.ending, scene.rank.drives = finish, PASSED, drives
    scene.run.rank_session, scene.record.interrupted, scene.session.exitstatus = scene.rank, interrupted, code
    assert cluster_hooks.leave_group(scene.session, scene.run) == ["a sentence"]
    assert scene.session.exitstatus == (code or 1)
    assert scene.record.interrupted == (text or interrupted)
    again = [call.rewrite_reports(scene.config, scene.run)] * drives + [call.write_again(scene.config, scene.run)]
    assert [entry for entry in scene.log.mock_calls if "write" in entry[0]] == (again if text else [])
