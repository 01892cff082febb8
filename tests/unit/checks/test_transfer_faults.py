# SPDX-License-Identifier: Apache-2.0
"""Faults of transfers in flight are made with the real NIXL, and each defect is seen if a call of NIXL has it."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from pytest_nixl.checks.faults import transfers as transfer_faults
from pytest_nixl.checks.faults.scene import (
    MOVED,
    EarlyEndError,
    FaultOutcome,
    FaultScene,
    fault_reason,
    judge_faults,
    without,
)
from pytest_nixl.checks.faults.transfers import FAULTS, environments, make_fault
from pytest_nixl.checks.faults.worker.traffic import NOT_CALLED
from pytest_nixl.core.errors import LateError
from pytest_nixl.core.strict import StrictError
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.nixl.agent import Agents
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import NixlError, WorkerDiedError

GOOD = FaultOutcome("target-killed", "UCX", "WRITE", "1.5.1", "nixlRemoteDisconnectError", 0.02, wrong_bytes=0)
Make = Callable[..., FaultOutcome]


@pytest.fixture
def make(nixl_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make a fault with UCX over tcp, with a call of the initiator's or the target's NIXL replaced by a function."""

    def make_outcome(
        fault: str, op: str = "WRITE", function: str = "", timeout: float = 60, *, target: str = "", **fields: object
    ) -> FaultOutcome:
        class Replaced(FaultScene):
            def __init__(self, *arguments: object) -> None:
                super().__init__(*arguments)  # type: ignore[arg-type]
                if function:
                    self.initiator.run(f"helpers.misuse_functions:{function}", **fields)
                if target:
                    self.target.run(f"helpers.misuse_functions:{target}")

        monkeypatch.setattr(transfer_faults, "FaultScene", Replaced)
        with Agents(LocalHost(supervisor()), replace(nixl_settings, timeout=timeout)) as agents:
            return make_fault(fault, agents, "UCX", op, {"UCX_TLS": "tcp"})

    return make_outcome


def test_a_good_outcome_passes_in_words() -> None:
    judgement = judge_faults([GOOD, replace(GOOD, op="READ", transports="tcp")])
    assert judgement.verdict is Verdict.PASS
    assert judgement.reason == (
        "target-killed (WRITE, UCX of NIXL 1.5.1): nixlRemoteDisconnectError after 0.02 s; target-killed (READ, UCX of "
        "NIXL 1.5.1 with UCX_TLS=tcp): nixlRemoteDisconnectError after 0.02 s; the survivor moves correct bytes to "
        "another agent"
    )


_LOST = "NIXL lost {} for the metadata of the restarted target"
_ABORTED = "the surviving agent was ended by SIGABRT"


@pytest.mark.parametrize(
    ("changes", "defect", "after_it"),
    [
        ({"survivor": "was ended by SIGABRT", "wrong_bytes": None}, _ABORTED, f", and {_ABORTED}"),
        ({"survivor": "was ended by SIGABRT", "answer": "PROC"}, _ABORTED, f", and {_ABORTED}"),
        ({"wrong_bytes": None}, "the surviving agent could not move bytes to another agent", ""),
        ({"wrong_bytes": 3}, "3 bytes of the survivor's next transfer are wrong", ""),
        ({"unended": 2}, "2 of 4 transfers did not end", ""),
        (
            {"changed": 9},
            "9 bytes were written after NIXL had reported the end of the transfers",
            ", and 9 bytes were written after that",
        ),
        ({"lost_requests": 1}, f"{_LOST.format('1 request')} without an error", f", and {_LOST.format('1 request')}"),
        ({"lost_requests": 2}, f"{_LOST.format('2 requests')} without an error", f", and {_LOST.format('2 requests')}"),
        *[
            ({"fault": fault, "answer": answer, "seconds": 30.4}, silence, "")
            for fault in ("target-killed", "target-restarted", "listener-restarted")
            for answer in ("PROC", "DONE")
            for silence in ["NIXL did not tell the initiator of the target's death in 30 s"]
        ],
        ({"early": True, "wrong_bytes": None, "unended": 2}, "the transfers ended before the fault was made, although "
         "the target runs", ""),
        ({"fault": "target-stopped", "answer": "PROC"}, "", ""),
    ],
)  # fmt: skip
def test_each_defect_fails_among_good_outcomes(changes: dict[str, Any], defect: str, after_it: str) -> None:
    bad = replace(GOOD, **changes)
    judgement = judge_faults([GOOD, bad, GOOD])
    assert judgement.verdict is (Verdict.FAIL if defect else Verdict.PASS)
    assert not defect or judgement.reason == f"{bad}; {defect}"
    assert fault_reason([GOOD, bad]) == f"{GOOD}; {bad}{after_it}"
    assert ("https://github.com/ai-dynamo/nixl/issues" in judgement.remedy) is bool(defect)


def test_a_known_defect_does_not_hide_another() -> None:
    """The fields of the known one are set to those of an outcome without it."""
    both = [replace(GOOD, changed=9, unended=1, wrong_bytes=3), replace(GOOD, changed=9)]
    assert judge_faults(without(both, changed=0)).reason == (
        f"{GOOD}; 3 bytes of the survivor's next transfer are wrong; 1 of 4 transfers did not end"
    )


def test_ucx_is_also_tried_over_tcp(tmp_path: Path) -> None:
    """With a value that NIXL takes on this host, and on others, and once if the deployment has nothing else."""
    environment, root = {"UCX_TLS": "cma,self"}, str(tmp_path)
    assert environments("UCX", {}, root) == environments("UCX", environment, root) == [{}, {"UCX_TLS": "tcp"}]
    assert environments("LIBFABRIC", {}, root) == [{}]
    assert environments("UCX", {"UCX_TLS": "tcp"}, root) == [{"UCX_TLS": "tcp"}]
    assert environments("UCX", {"UCX_TLS": "tcp,cuda_copy"}, root) == [{"UCX_TLS": "tcp"}]
    # A deployment over RDMA has tried a network, and its devices are of no use to TCP.
    rdma = {"UCX_TLS": "rc,cuda_copy", "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1"}
    assert environments("UCX", rdma, root) == [{"UCX_TLS": "rc,cuda_copy"}]
    del rdma["UCX_TLS"]
    assert environments("UCX", rdma, root) == [{}, {"UCX_TLS": "tcp", "UCX_NET_DEVICES": None}]
    assert environments("UCX", {"UCX_NET_DEVICES": "mlx5_0:1,eth0"}, root) == [{}, {"UCX_TLS": "tcp"}]
    beside_gpus = {"UCX_TLS": "tcp,cuda_copy"}
    assert environments("UCX", {}, root, other_hosts=True) == [{}, beside_gpus]
    gpu = tmp_path / "sys/bus/pci/devices/0000:1a:00.0"
    gpu.mkdir(parents=True)
    (gpu / "vendor").write_text("0x10de\n")
    (gpu / "class").write_text("0x030200\n")
    assert environments("UCX", {}, root) == [{}, beside_gpus]
    (gpu / "class").write_text("0x068000\n")  # an NVSwitch
    assert environments("UCX", {}, root) == [{}, {"UCX_TLS": "tcp"}]


def recorded_scene(op: str = "READ") -> MagicMock:
    """Return a scene that records what a fault does. A double: the real faults below take seconds each."""
    scene = MagicMock(outcome=replace(GOOD, answer="", op=op, seconds=-1, wrong_bytes=None), op=op)
    scene.initiator.worker.timeout, scene.target.worker.timeout = 60.0, 90.0
    scene.source.address, scene.source.size, scene.destination.ref = 4096, 512, "ref"
    scene.again.get_agent_metadata.return_value = "metadata"
    for name in ("initiator", "target", "again"):
        getattr(scene, name).name = name
    scene.ended = scene.traffic.return_value.__enter__.return_value.result
    scene.ended.return_value = {"said": "DONE", "completed": 9, "longest": 0.5, "unended": 2}
    scene.interrupted = scene.request.return_value.result
    scene.interrupted.return_value = {
        "act": "returned", "seconds": 0.5, "in_flight": 3, "states": {"PROC": 1, "DONE": 3},
    }  # fmt: skip
    scene.start.return_value, scene.move.return_value, scene.changed.return_value = [scene.again], 3, 5
    scene.fetch.return_value = 7
    return scene


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[MagicMock]:
    """The scene whose calls are the time in seconds of a fault: each takes one; without a scene the time is real."""
    scenes: list[MagicMock] = []

    def monotonic() -> float:
        return float(len(scenes[0].mock_calls)) if scenes else time.monotonic()

    monkeypatch.setattr(transfer_faults, "time", SimpleNamespace(monotonic=monotonic, sleep=lambda _: None))
    return scenes


def recorded(scene: MagicMock) -> list[str]:
    """Return what was done to the agents and the memory of a scene, in order, without patterns."""
    names = {id(getattr(scene, name)): name for name in ("initiator", "target", "third", "again")}
    names |= {id(scene.source): "source", id(scene.destination): "destination", id(scene.allocate()): "memory"}

    unnamed = ("get_agent_metadata", "get_plugin_list", "send_notif", "__enter__", "__exit__", "result")

    def text(value: object) -> str:
        return names.get(id(value)) or (value.name if isinstance(value, signal.Signals) else str(value))

    steps = []
    for name, arguments, more in scene.mock_calls:
        if name.rpartition(".")[2] not in unnamed and (arguments or more or name.endswith("kill")):
            values = arguments[:1] if name in ("mark", "changed") else (*arguments, *more.values())
            steps.append(" ".join([name.replace(".worker", ""), *map(text, values)]))
    return steps


#: For each fault what is done, in order: traffic with the seconds that it may be quiet and last.
_TRAFFIC = "traffic 30.0 60.0"
_KILLED = f"{_TRAFFIC}; target.signal SIGKILL"
_PAUSED = f"{_TRAFFIC}; {{0}}.signal SIGSTOP; {{0}}.signal SIGCONT; initiator.signal SIGUSR2; move initiator target"
_AGAIN = "start target; initiator.remove_remote_agent again"
_FETCHED = f"allocate again {MOVED}; fetch again"
_INTERRUPTED = "request interrupt {} [[4096, 512, 0]] 30.0; mark source; move initiator third; changed source"
_ENDS = "{} returned with 3 of 4 transfers in flight, which end as 3 DONE, 1 PROC"
#: Also the answer, and the calls that were made from the fault until it came, each of which takes a second.
STEPS = {
    "target-killed": (f"{_KILLED}; move initiator third", "DONE", 2),
    "initiator-killed": (
        "traffic 60.0 60.0; initiator.kill; mark destination; move target third; changed destination",
        "the target is not told",
        2,
    ),
    "target-paused": (_PAUSED.format("target"), "DONE", 5),
    "initiator-paused": (_PAUSED.format("initiator"), "DONE", 4),
    "target-stopped": ("traffic 3.0 6.0; target.signal SIGSTOP; move initiator third", "DONE", 2),
    "target-restarted": (f"{_KILLED}; {_AGAIN}; move initiator again", "DONE", 2),
    "listener-restarted": (f"{_KILLED}; target.kill; {_AGAIN}; {_FETCHED}; move initiator again memory", "DONE", 2),
    "target-replaced": (
        "start target; request interrupt replace [[4096, 512, 0]] 30.0 metadata; move initiator again",
        _ENDS.format("replace"),
        0.5,
    ),
    "target-unmapped": ("traffic 3.0 6.0; target.call unmap ref; move initiator third", "DONE", 2),
    "notified-after-death": (
        "move initiator target; target.kill; move initiator third",
        "send_notif returned 200 times",
        200,
    ),
    **{
        fault: (_INTERRUPTED.format(method), _ENDS.format(method), 0.5)
        for fault, method in (
            ("target-removed", "remove_remote_agent"),
            ("transfer-released", "release_xfer_handle"),
            ("source-deregistered", "deregister_memory"),
        )
    },
}


@pytest.mark.parametrize("fault", sorted({*FAULTS, *STEPS}))
def test_each_fault_is_made_and_survived_in_steps(fault: str, clock: list[MagicMock]) -> None:
    steps, answer, seconds = STEPS[fault]
    scene = recorded_scene()
    clock.append(scene)
    outcome = FAULTS[fault](scene)
    assert recorded(scene) == steps.split("; ")
    assert outcome == replace(
        GOOD,
        op="READ",
        answer=answer,
        seconds=seconds,
        wrong_bytes=3,
        unended=2 if answer == "DONE" else 0,
        changed=5 if "changed" in steps else 0,
        lost_requests=7 if "fetch" in steps else 0,
    )
    marked, changed = ([call.args[1] for call in mock.call_args_list] for mock in (scene.mark, scene.changed))
    assert marked == changed, "the same pattern"


def test_late_bytes_of_a_write_are_searched_at_the_target() -> None:
    scene = recorded_scene("WRITE")
    scene.interrupted.return_value["states"] = {}
    outcome = FAULTS["target-removed"](scene)
    assert recorded(scene) == STEPS["target-removed"][0].replace(" source", " destination").split("; ")
    assert outcome.answer.endswith(" with 3 of 4 transfers in flight, which end as none is asked for")


ABORTED = WorkerDiedError("a (pid 7) was ended by SIGABRT during run")
REFUSED = NixlError("refused", "", "", "nixlBackendError")


@pytest.mark.parametrize("fault", sorted(FAULTS))
@pytest.mark.parametrize(
    ("error", "survivor"), [(ABORTED, "was ended by SIGABRT"), (REFUSED, "gets nixlBackendError from NIXL")]
)
def test_a_survivor_that_cannot_move_bytes_is_told_from_late_bytes(fault: str, error: Exception, survivor: str) -> None:
    scene = recorded_scene()
    # Before its death this target also gets bytes.
    scene.move.side_effect = [0, error] if fault == "notified-after-death" else error
    outcome = FAULTS[fault](scene)
    assert (outcome.survivor, outcome.wrong_bytes, outcome.changed) == (survivor, None, 0)
    scene.changed.assert_not_called()
    scene.move.side_effect = [0, LateError("late")] if fault == "notified-after-death" else LateError("late")
    with pytest.raises(LateError, match="late"):  # a busy machine proves nothing
        FAULTS[fault](scene)


def test_an_initiator_that_dies_of_its_transfers_or_of_its_own_call_is_no_survivor(clock: list[MagicMock]) -> None:
    for fault, answer, seconds in (("target-removed", "remove_remote_agent", -1), ("target-killed", "no answer", 2)):
        scene = recorded_scene()
        clock[:] = [scene]
        scene.interrupted.side_effect = scene.ended.side_effect = ABORTED
        outcome = FAULTS[fault](scene)
        assert (outcome.answer, outcome.survivor, outcome.seconds) == (answer, "was ended by SIGABRT", seconds)
        scene.move.assert_not_called()
        scene.mark.assert_not_called()


def test_an_answer_of_another_form_is_an_error_and_no_outcome() -> None:
    scene = recorded_scene()
    scene.interrupted.return_value["in_flight"] = scene.ended.return_value["unended"] = -1
    for fault, member in (("target-removed", "in_flight"), ("target-killed", "unended")):
        with pytest.raises(StrictError, match=member):
            FAULTS[fault](scene)


@pytest.mark.parametrize(
    ("fault", "listens", "seconds"),
    [("target-killed", False, 1.5), ("listener-restarted", True, 1.5), ("target-removed", False, 0.25)],
)
def test_an_error_before_a_fault_is_its_outcome(
    fault: str, listens: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if NIXL refuses transfers so early that there is nothing to interrupt."""
    scene, agents, hosts = recorded_scene(), MagicMock(), (MagicMock(), MagicMock())
    scene.traffic.side_effect = EarlyEndError("nixlBackendError", 1.5)
    refused = {"act": NOT_CALLED, "seconds": 0.25, "in_flight": 0, "states": {"nixlBackendError": 1}}
    scene.interrupted.return_value = refused
    create = MagicMock(return_value=scene)
    monkeypatch.setattr(transfer_faults, "FaultScene", create)
    outcome = make_fault(fault, agents, "UCX", "READ", {"UCX_TLS": "tcp"}, hosts)
    *arguments, port = create.call_args.args
    assert arguments == [agents, "UCX", "READ", {"UCX_TLS": "tcp"}, () if listens else hosts]
    assert bool(port) is listens
    assert outcome == replace(scene.outcome, fault=fault, answer="nixlBackendError", seconds=seconds, early=True)


@pytest.mark.parametrize(("name", "expected"), [("SIGSEGV", True), ("SIGBUS", True), ("SIGABRT", False)])
def test_only_an_access_to_freed_memory_may_end_the_target(name: str, expected: bool) -> None:
    scene = recorded_scene()
    scene.target.worker.call.side_effect = WorkerDiedError(f"a (pid 7) was ended by {name} during unmap")
    with nullcontext() if expected else pytest.raises(WorkerDiedError, match=name):
        FAULTS["target-unmapped"](scene)


@pytest.mark.parametrize(
    ("error", "answer", "survivor"),
    [
        (REFUSED, "2 times and then raised nixlBackendError", ""),
        (ABORTED, "2 times and then not", "was ended by SIGABRT"),
    ],
)
def test_each_answer_to_a_notification_of_a_dead_target(error: Exception, answer: str, survivor: str) -> None:
    scene, limits = recorded_scene(), list[float]()

    def notify(*_: object) -> None:
        limits.append(scene.initiator.worker.timeout)
        if len(limits) == 3:
            raise error

    scene.initiator.send_notif.side_effect = notify
    outcome = FAULTS["notified-after-death"](scene)
    scene.initiator.send_notif.assert_called_with("target", b"lost")
    assert (outcome.answer, outcome.survivor) == (f"send_notif returned {answer}", survivor)
    assert outcome.wrong_bytes == (None if survivor else 3)
    assert limits == [20.0] * 3
    assert scene.initiator.worker.timeout == 60.0, "as before"


# The suite faults makes both with either operation.
@pytest.mark.long
@pytest.mark.parametrize("op", [pytest.param("WRITE", marks=pytest.mark.whole), "READ"])
def test_the_death_of_a_target_is_told_and_survived(make: Make, op: str) -> None:
    outcome = make("target-killed", op)
    assert judge_faults([outcome]).verdict is Verdict.PASS
    assert (outcome.answer, outcome.wrong_bytes) == ("nixlRemoteDisconnectError", 0)


@pytest.mark.long
@pytest.mark.parametrize("op", ["WRITE", pytest.param("READ", marks=pytest.mark.whole)])
def test_a_target_survives_the_death_of_its_initiator(make: Make, op: str) -> None:
    outcome = make("initiator-killed", op)
    if "SIGABRT" not in outcome.survivor:  # NIXL-DEAD-INITIATOR-ABORTS, in a few of 100 rounds with READ
        assert judge_faults([outcome]).verdict is Verdict.PASS
        assert (outcome.answer, outcome.wrong_bytes) == ("the target is not told", 0)
    else:
        assert op == "READ"


@pytest.mark.long
def test_a_target_that_aborts_after_the_death_of_its_initiator_is_caught(make: Make) -> None:
    outcome = make("initiator-killed", "READ", target="abort_in_fill")
    assert outcome.survivor == "was ended by SIGABRT"
    assert judge_faults([outcome]).reason.endswith("; the surviving agent was ended by SIGABRT")
    assert fault_reason([outcome]).endswith(" s, and the surviving agent was ended by SIGABRT")
    assert judge_faults(without([outcome], survivor="", wrong_bytes=0)).verdict is Verdict.PASS


@pytest.mark.long
def test_a_nixl_that_does_not_tell_is_caught(make: Make) -> None:
    outcome = make("target-killed", function="never_fail", timeout=20)
    assert outcome.answer == "PROC"
    # Ten seconds, and more on a busy machine.
    assert re.search(r"NIXL did not tell the initiator of the target's death in \d\d s", judge_faults([outcome]).reason)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "function", "method", "reason"),
    [
        # Of what does not arrive, no byte is right by chance.
        ("target-killed", "accept_every_transfer", "",
         f"{MOVED - 1024} bytes of the survivor's next transfer are wrong"),
        ("target-killed", "crash", "add_remote_agent", "the surviving agent was ended by SIGSEGV"),
    ],
)  # fmt: skip
def test_a_survivor_with_a_fault_is_caught(make: Make, fault: str, function: str, method: str, reason: str) -> None:
    outcome = make(fault, function=function, **({"method": method} if method else {}))
    assert judge_faults([outcome]).reason.endswith(f"; {reason}")


@pytest.mark.long
def test_a_target_that_crashes_on_the_memory_that_it_freed_is_no_fault_of_the_initiator(make: Make) -> None:
    outcome = make("target-unmapped", target="use_what_is_unmapped")
    assert judge_faults([outcome]).verdict is Verdict.PASS, str(outcome)
    assert (outcome.answer, outcome.wrong_bytes) == ("nixlRemoteDisconnectError", 0)


@pytest.mark.long
def test_a_late_write_is_caught(make: Make) -> None:
    outcome = make("transfer-released", "READ", "write_late")
    assert outcome.changed == 1


@pytest.mark.long
def test_a_nixl_that_waits_before_it_releases_has_no_late_write(make: Make) -> None:
    outcome = make("transfer-released", "READ", "wait_before_release")
    assert outcome.changed == 0
    assert judge_faults([outcome]).verdict is Verdict.PASS


@pytest.mark.long
def test_a_target_that_listens_is_fetched_again_after_its_restart(make: Make) -> None:
    outcome = make("listener-restarted")
    assert outcome.lost_requests > 0  # the finding NIXL-RESTARTED-LISTENER-LOSES-FETCH
    assert (outcome.answer, outcome.wrong_bytes) == ("nixlRemoteDisconnectError", 0)
    assert judge_faults(without([outcome], lost_requests=0)).verdict is Verdict.PASS


@pytest.mark.long
def test_a_nixl_that_asks_the_restarted_target_again_loses_no_request(make: Make) -> None:
    outcome = make("listener-restarted", function="fetch_until_known")
    assert outcome.lost_requests == 0
    assert judge_faults([outcome]).verdict is Verdict.PASS
