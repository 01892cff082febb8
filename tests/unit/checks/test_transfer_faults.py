# SPDX-License-Identifier: Apache-2.0
"""Faults of transfers in flight are made with the real NIXL, and each defect is seen if a call of NIXL has it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from pytest_nixl.checks.faults import transfers as transfer_faults
from pytest_nixl.checks.faults.scene import (
    MOVED,
    MUST_REPORT,
    EarlyEndError,
    FaultOutcome,
    FaultScene,
    fault_reason,
    judge_faults,
    without,
)
from pytest_nixl.checks.faults.transfers import FAULTS, environments, make_fault
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


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (replace(GOOD, survivor="was ended by SIGSEGV", wrong_bytes=None), "the surviving agent was ended by SIGSEGV"),
        (replace(GOOD, wrong_bytes=None), "the surviving agent could not move bytes to another agent"),
        (replace(GOOD, wrong_bytes=3), "3 bytes of the survivor's next transfer are wrong"),
        (replace(GOOD, unended=2), "2 of 4 transfers did not end"),
        (replace(GOOD, changed=9), "9 bytes were written after NIXL had reported the end of the transfers"),
        (
            replace(GOOD, lost_requests=1),
            "NIXL lost 1 request for the metadata of the restarted target without an error",
        ),
        (replace(GOOD, answer="PROC", seconds=30), "NIXL did not tell the initiator of the target's death in 30 s"),
    ],
)
def test_each_defect_fails_among_good_outcomes(bad: FaultOutcome, reason: str) -> None:
    judgement = judge_faults([GOOD, bad])
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason.endswith(f"; {reason}")


def test_a_stopped_target_need_not_be_reported() -> None:
    assert set(FAULTS) > set(MUST_REPORT)
    assert judge_faults([replace(GOOD, fault="target-stopped", answer="PROC")]).verdict is Verdict.PASS


def test_a_known_defect_does_not_hide_another() -> None:
    both = [replace(GOOD, changed=9, wrong_bytes=3)]
    assert "and 9 bytes were written after that" in fault_reason(both)
    assert judge_faults(without(both, changed=0)).reason.endswith("; 3 bytes of the survivor's next transfer are wrong")


def test_lost_requests_are_counted_in_words() -> None:
    lost = [replace(GOOD, fault="listener-restarted", lost_requests=2)]
    assert fault_reason(lost).endswith("0.02 s, and NIXL lost 2 requests for the metadata of the restarted target")
    assert judge_faults(without(lost, lost_requests=0)).verdict is Verdict.PASS


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
    ended = {"said": "DONE", "completed": 9, "longest": 0.5, "unended": 2}
    scene.traffic.return_value.__enter__.return_value.result.return_value = ended
    interrupted = {"act": "returned", "seconds": 0.5, "in_flight": 4, "states": {"DONE": 4}}
    scene.request.return_value.result.return_value = interrupted
    scene.start.return_value, scene.move.return_value, scene.changed.return_value = [scene.again], 3, 5
    scene.fetch.return_value = 7
    return scene


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
STEPS = {
    "target-killed": f"{_KILLED}; move initiator third",
    "initiator-killed": "traffic 60.0 60.0; initiator.kill; mark destination; move target third; changed destination",
    "target-paused": _PAUSED.format("target"),
    "initiator-paused": _PAUSED.format("initiator"),
    "target-stopped": "traffic 3.0 6.0; target.signal SIGSTOP; move initiator third",
    "target-restarted": f"{_KILLED}; {_AGAIN}; move initiator again",
    "listener-restarted": f"{_KILLED}; target.kill; {_AGAIN}; {_FETCHED}; move initiator again memory",
    "target-replaced": "start target; request interrupt replace [[4096, 512, 0]] 30.0 metadata; move initiator again",
    "target-unmapped": "traffic 3.0 6.0; target.call unmap ref; move initiator third",
    "notified-after-death": "move initiator target; target.kill; move initiator third",
    "target-removed": _INTERRUPTED.format("remove_remote_agent"),
    "transfer-released": _INTERRUPTED.format("release_xfer_handle"),
    "source-deregistered": _INTERRUPTED.format("deregister_memory"),
}


@pytest.mark.parametrize("fault", sorted({*FAULTS, *STEPS}))
def test_each_fault_is_made_and_survived_in_steps(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_faults, "PAUSE", 0.0)
    scene = recorded_scene()
    outcome = FAULTS[fault](scene)
    assert recorded(scene) == STEPS[fault].split("; ")
    assert outcome.answer
    assert outcome.seconds >= 0
    assert outcome.wrong_bytes == 3
    assert outcome.unended == (2 if outcome.answer == "DONE" else 0)
    assert outcome.changed == (5 if "changed" in STEPS[fault] else 0)
    assert outcome.lost_requests == (7 if "fetch" in STEPS[fault] else 0)
    marked, changed = ([call.args[1] for call in mock.call_args_list] for mock in (scene.mark, scene.changed))
    assert marked == changed, "the same pattern"


def test_late_bytes_of_a_write_are_searched_at_the_target() -> None:
    scene = recorded_scene("WRITE")
    FAULTS["target-removed"](scene)
    assert recorded(scene) == STEPS["target-removed"].replace(" source", " destination").split("; ")


def test_an_initiator_that_dies_of_its_own_call_is_no_survivor() -> None:
    scene = recorded_scene()
    scene.request.return_value.result.side_effect = WorkerDiedError("a (pid 7) was ended by SIGABRT during run")
    outcome = FAULTS["target-removed"](scene)
    assert (outcome.answer, outcome.survivor) == ("remove_remote_agent", "was ended by SIGABRT")
    scene.move.assert_not_called()
    scene.mark.assert_not_called()


@pytest.mark.parametrize(("fault", "listens"), [("target-killed", False), ("listener-restarted", True)])
def test_an_error_before_a_fault_is_its_outcome(fault: str, listens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, agents, hosts = recorded_scene(), MagicMock(), (MagicMock(), MagicMock())
    scene.traffic.side_effect = EarlyEndError("nixlBackendError", 1.5)
    create = MagicMock(return_value=scene)
    monkeypatch.setattr(transfer_faults, "FaultScene", create)
    outcome = make_fault(fault, agents, "UCX", "READ", {"UCX_TLS": "tcp"}, hosts)
    *arguments, port = create.call_args.args
    assert arguments == [agents, "UCX", "READ", {"UCX_TLS": "tcp"}, () if listens else hosts]
    assert bool(port) is listens
    assert (outcome.fault, outcome.answer, outcome.seconds, outcome.early) == (fault, "nixlBackendError", 1.5, True)


@pytest.mark.parametrize(("name", "expected"), [("SIGSEGV", True), ("SIGBUS", True), ("SIGABRT", False)])
def test_only_an_access_to_freed_memory_may_end_the_target(name: str, expected: bool) -> None:
    scene = recorded_scene()
    scene.target.worker.call.side_effect = WorkerDiedError(f"a (pid 7) was ended by {name} during unmap")
    with nullcontext() if expected else pytest.raises(WorkerDiedError, match=name):
        FAULTS["target-unmapped"](scene)


@pytest.mark.parametrize(
    ("error", "answer", "survivor"),
    [
        (None, "200 times", ""),
        (NixlError("", "", "", "nixlBackendError"), "2 times and then raised nixlBackendError", ""),
        (WorkerDiedError("a (pid 7) was ended by SIGABRT during run"), "2 times and then not", "was ended by SIGABRT"),
    ],
)
def test_each_answer_to_a_notification_of_a_dead_target(error: Exception | None, answer: str, survivor: str) -> None:
    scene = recorded_scene()
    scene.initiator.send_notif.side_effect = [None, None, error] if error else None
    outcome = FAULTS["notified-after-death"](scene)
    scene.initiator.send_notif.assert_called_with("target", b"lost")
    assert (outcome.answer, outcome.survivor) == (f"send_notif returned {answer}", survivor)
    assert outcome.wrong_bytes == (None if survivor else 3)
    scene.target.worker.kill.assert_called_once_with()
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
def test_a_nixl_that_tells_of_one_transfer_only_is_caught(make: Make) -> None:
    for _ in range(10):
        outcome = make("target-killed", function="never_fail", told=1)
        assert outcome.answer == "nixlRemoteDisconnectError"
        if outcome.unended:  # more than one transfer was in flight when the target died
            break
    assert outcome.unended > 0
    assert judge_faults([outcome]).verdict is Verdict.FAIL


@pytest.mark.long
def test_a_survivor_whose_bytes_do_not_arrive_is_caught(make: Make) -> None:
    """Of what does not arrive, no byte is right by chance."""
    outcome = make("target-killed", function="accept_every_transfer")
    assert outcome.wrong_bytes == MOVED - 1024
    assert judge_faults([outcome]).reason.endswith(f"; {MOVED - 1024} bytes of the survivor's next transfer are wrong")


@pytest.mark.long
def test_a_survivor_that_crashes_is_caught(make: Make) -> None:
    outcome = make("target-killed", function="crash", method="add_remote_agent")
    assert judge_faults([outcome]).reason.endswith("; the surviving agent was ended by SIGSEGV")


@pytest.mark.long
def test_a_survivor_that_reaches_no_other_agent_is_caught(make: Make) -> None:
    outcome = make("target-killed", function="refuse", method="add_remote_agent")
    assert judge_faults([outcome]).reason.endswith("; the surviving agent gets nixlInvalidParamError from NIXL")


@pytest.mark.long
def test_a_crash_while_memory_is_withdrawn_is_caught(make: Make) -> None:
    outcome = make("source-deregistered", function="crash", method="deregister_memory")
    assert judge_faults([outcome]).reason.endswith("; the surviving agent was ended by SIGSEGV")


@pytest.mark.long
def test_a_target_that_crashes_on_the_memory_that_it_freed_is_no_fault_of_the_initiator(make: Make) -> None:
    outcome = make("target-unmapped", target="use_what_is_unmapped")
    assert judge_faults([outcome]).verdict is Verdict.PASS, str(outcome)
    assert (outcome.answer, outcome.wrong_bytes) == ("nixlRemoteDisconnectError", 0)


@pytest.mark.long
def test_a_target_that_ends_in_another_way_is_an_error(make: Make) -> None:
    with pytest.raises(WorkerDiedError, match="SIGTERM"):
        make("target-unmapped", target="end_at_unmap")


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


@pytest.mark.long
def test_a_nixl_that_refuses_to_fetch_again_is_caught(make: Make) -> None:
    outcome = make("listener-restarted", function="refuse", method="fetch_remote_metadata")
    assert judge_faults([outcome]).reason.endswith("; the surviving agent gets nixlInvalidParamError from NIXL")
