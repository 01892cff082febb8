# SPDX-License-Identifier: Apache-2.0
"""How a run with the plugin ends: when it is judged, reported and left, and with which exit code."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY, call

import pytest
from helpers.hooked_run import Scene

from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.run_hooks import RunHooks


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


RESULT = Result("a-check", "t.py::t", Verdict.WARN, "a reason")
JUDGE = "load_profile order_rows unchecked_requests add_run_results compare failing_results add_run_cases write_reports"
GATE = JUDGE.replace("unchecked_requests", "missing_results")
EARLY = "load_profile order_rows note_missing_baseline add_run_cases write_reports"
ENDED = (
    "load_profile order_rows unchecked_requests add_run_results failing_results note_missing_baseline add_run_cases "
    "write_reports"
)
DONE: dict[str, Any] = {"results": (RESULT,)}
CAUSE = "INTERRUPTED after 2 checks: Ctrl-C"


def steps_of(scene: Scene) -> dict[str, Any]:
    """Return the calls of the end of a run by their names."""
    run, config, session = scene.run, scene.config, scene.session
    settings = run.settings
    return {
        "conclude": call.conclude(session, run),
        "interrupt": call.record.interrupt(""),
        "cause": call.record.interrupt(CAUSE),
        "crash": call.record.interrupt("INTERRUPTED: it crashed"),
        "write_session_refusal": call.write_session_refusal(config, run),
        "others": call.others(),
        "load_profile": call.load_profile("a profile"),
        "order_rows": call.record.order_rows(run.collected.places),
        "missing_results": call.missing_results(scene.profile, run),
        "compare": call.compare(run),
        "unchecked_requests": call.unchecked_requests(run),
        "add_run_results": call.record.add_run_results(["missing"]),
        "failing_results": call.failing_results(run.record.results, scene.profile, gate=settings.gate),
        "note_missing_baseline": call.note_missing_baseline(run),
        "add_run_cases": call.add_run_cases(config, run),
        "write_reports": call.write_reports(config, run),
        "rewrite_reports": call.rewrite_reports(config, run),
        "leave_group": call.leave_group(session, run),
        "report_if_unwritten": call.report_if_unwritten(config, run),
        "write_ending": call.write_ending(session),
        "refuse_exit_code_0": call.refuse_exit_code_0(session, ANY),
    }


def finish(scene: Scene, *, error: BaseException | None = None, set_to: int | None = None) -> RunHooks:
    """End a session, during whose end another plugin may raise an error, or set the exit code."""
    hooks = scene.hooks()
    steps = hooks.sessionfinish(scene.session, scene.session.exitstatus)
    next(steps)
    scene.log.others()
    scene.session.exitstatus = scene.session.exitstatus if set_to is None else set_to
    with pytest.raises(BaseException) as raised:  # Ctrl-C would end the run of this test, too
        steps.throw(error) if error is not None else next(steps)
    goes_on = error is None or isinstance(error, KeyboardInterrupt)
    assert type(raised.value) is (StopIteration if goes_on else type(error))
    return hooks


@pytest.mark.parametrize(
    ("values", "code", "steps", "code_after"),
    [
        ({}, 0, "interrupt others write_ending", 0),
        (DONE, 0, f"interrupt {JUDGE} others write_ending", 0),
        (DONE, 1, f"interrupt {JUDGE} others write_ending", 1),
        (DONE, 5, f"interrupt {JUDGE} others write_ending", 5),
        (DONE, 3, "interrupt others write_ending", 3),
        (DONE, 2, "interrupt others write_ending", 2),
        ({**DONE, "failing": True}, 0, f"interrupt {JUDGE} others write_ending", 1),
        ({**DONE, "failing": True, "set_to": 0}, 0, f"interrupt {JUDGE} others write_ending", 1),
        ({**DONE, "failing": True, "set_to": 3}, 0, f"interrupt {JUDGE} others write_ending", 3),
        ({"configured": True, "gate": True}, 5, f"interrupt {GATE} others write_ending", 5),
        ({**DONE, "configured": True}, 4, "write_session_refusal others write_ending", 4),
        ({"usable": False}, 0, "others write_ending", 0),
        ({"cause": CAUSE}, 2, f"cause {EARLY} others report_if_unwritten write_ending", 2),
        ({"cause": CAUSE}, 1, f"cause {EARLY} others report_if_unwritten write_ending", 1),
        ({"cause": CAUSE}, 0, f"cause {EARLY} others report_if_unwritten write_ending", 2),
        (
            {"cause": CAUSE, "ended": "a check ended it", "failing": True},
            2,
            f"cause {ENDED} others report_if_unwritten write_ending",
            1,
        ),
        ({**DONE, "ended": "a check ended it"}, 0, f"interrupt {JUDGE.replace('compare ', '')} others write_ending", 0),
        ({**DONE, "parallel": True}, 0, "others", 0),
        (
            {"rank_session": "a rank", "serves": True},
            0,
            "conclude others leave_group report_if_unwritten write_ending",
            0,
        ),
        ({**DONE, "rank_session": "a rank"}, 0, f"conclude interrupt {JUDGE} others leave_group write_ending", 0),
    ],
)
def test_a_run_is_judged_reported_and_left_in_this_order(
    values: dict[str, Any], code: int, steps: str, code_after: int, scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only an exit code that means success is replaced. A result that fails counts whatever another plugin sets."""
    values = dict(values)
    scene.log.completeness_of.return_value.interruption.return_value = values.pop("cause", "")
    scene.log.failing_results.return_value = ["one"] * values.pop("failing", False)
    scene.log.leave_group.return_value = ["it could not be told"]
    set_to = values.pop("set_to", None)
    scene.set(exitstatus=code, **values)
    hooks = finish(scene, set_to=set_to)
    calls = [entry for entry in scene.log.mock_calls if not entry[0].startswith("completeness_of")]
    assert calls == [steps_of(scene)[step] for step in steps.split()]
    assert scene.session.exitstatus == code_after
    judged = "write_reports" in steps
    assert hooks.failed_code == (
        (1 if values.get("results") and set_to == 3 else code_after) or None if judged else None
    )
    assert capsys.readouterr().err == "it could not be told\n" * ("leave_group" in steps)
    if "interrupt" in steps.split():
        assert call.completeness_of().interruption(scene.session) in scene.log.mock_calls


@pytest.mark.parametrize(
    ("values", "error", "steps"),
    [
        (DONE, OSError(), f"interrupt {JUDGE} others crash refuse_exit_code_0 rewrite_reports"),
        ({"configured": True}, OSError(), f"interrupt {JUDGE} others crash refuse_exit_code_0 rewrite_reports"),
        (
            DONE,
            KeyboardInterrupt(),
            f"interrupt {JUDGE} others crash refuse_exit_code_0 rewrite_reports report_if_unwritten write_ending",
        ),
        ({}, OSError(), "interrupt others"),
        ({**DONE, "parallel": True}, OSError(), "others"),
        ({"configured": True, "rank_session": "a rank", "serves": True}, OSError(), "conclude others"),
        ({"results": (RESULT,), "usable": False, "exitstatus": 3}, OSError(), "others"),
    ],
)
def test_an_error_at_the_end_of_a_judged_run_is_reported_and_raised_unless_it_is_ctrl_c(
    values: dict[str, Any], error: BaseException, steps: str, scene: Scene
) -> None:
    scene.log.completeness_of.return_value.crash.side_effect = lambda raised: {error: "INTERRUPTED: it crashed"}[raised]
    scene.set(**values)
    finish(scene, error=error)
    calls = [entry for entry in scene.log.mock_calls if not entry[0].startswith("completeness_of")]
    assert calls == [steps_of(scene)[step] for step in steps.split()]
    for refused in scene.log.refuse_exit_code_0.mock_calls:
        assert refused.args == (scene.session, error)
