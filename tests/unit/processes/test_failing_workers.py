# SPDX-License-Identifier: Apache-2.0
"""What pytest says of a worker that refuses, fails, dies or hangs, and how it ends it.

The process is a double, because no real one fails in each of these ways; ``test_worker_process.py`` has real ones.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from pytest_nixl.core.rdma_fault import MEMLOCK_REMEDY, PORT_REMEDY
from pytest_nixl.core.resource_limits import MEMORY_REMEDY
from pytest_nixl.core.wire import Ref, decode, encode
from pytest_nixl.processes import worker_process
from pytest_nixl.processes.worker_errors import (
    GpuFullError,
    NixlAbsentError,
    NixlError,
    WorkerDiedError,
    WorkerError,
    WorkerHungError,
    WorkerLateError,
)
from pytest_nixl.processes.worker_process import Worker, results, telling

NAME = "rank 3 (agent worker, pid 7)"
HELLO = {"number": 1, "result": {"pid": 7, "python": "3.11.0", "host": "a"}}
NO_LINES = "it wrote nothing to stderr"
#: The heading of a stack that faulthandler writes.
STACK = "Thread 1 (most recent call first):"


class ScriptedProcess:
    """A process that sends the answers of a test at once, and keeps what is done to it."""

    pid = 7

    def __init__(
        self, *replies: dict[str, Any], code: int | None = None, output: str = "", state: str = "sleeping",
        here: bool = True, alive: bool = True,
    ) -> None:  # fmt: skip
        self.code, self.text, self.here, self.alive = code, output, here, alive
        self._state = state
        self.log: list[object] = []
        self.channel, self.far_end = socket.socketpair()
        for reply in replies:
            self.far_end.sendall(encode(reply))

    def wait(self, seconds: float | None = None) -> int | None:
        self.log.append(("wait", seconds))
        return None if self.alive else self.code

    def kill(self) -> None:
        self.log.append("kill")
        self.alive = False

    def state(self) -> str:
        return self._state

    def signal(self, number: int) -> None:
        self.log.append(signal.Signals(number).name)

    def output(self) -> str:
        return self.text

    def commands(self) -> list[str]:
        """Return the commands that the process got so far."""
        return [decode(line)["command"] for line in self.far_end.recv(1 << 20).splitlines()]


Make = Callable[..., tuple[Worker, ScriptedProcess]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Return a function that makes a worker of rank 3 with such a process, which has started unless a test says so."""
    processes: list[ScriptedProcess] = []

    def worker(
        *replies: dict[str, Any], start_timeout: float = 60.0, rank: int = 3, **changes: Any
    ) -> tuple[Worker, ScriptedProcess]:
        process = ScriptedProcess(*([HELLO] if start_timeout > 1 else []), *replies, **changes)
        processes.append(process)
        return Worker(process, rank=rank, role="agent", timeout=60.0, start_timeout=start_timeout), process

    yield worker
    for process in processes:
        process.channel.close()
        process.far_end.close()


def run(worker: Worker) -> Any:
    return worker.call("run", agent=Ref(1, "agent"), function="module:function", arguments={})


def fault(kind: str, name: str, message: str, **remedy: str) -> dict[str, Any]:
    """Return the second answer of a worker, which is an error."""
    return {"number": 2, "error": {"kind": kind, "type": name, "message": message, "traceback": "the stack", **remedy}}


READ_LOG = "read the cause in NIXL's log lines below"
ADD_TCP = "add tcp to UCX_TLS, or unset UCX_TLS: NIXL needs a transport that notices a failed peer"
NO_HANDLER = "E0101 UCX has no peer failure handler"


@pytest.mark.parametrize(
    ("answer", "process", "error_type", "reason", "remedy", "detail"),
    [
        (
            fault("nixl", "nixlBackendError", "NIXL_ERR_BACKEND"), {"output": "one\nI0101 10:00:00 two\n\nE0101 three"},
            NixlError, "NIXL reported nixlBackendError (NIXL_ERR_BACKEND) in {name} during 'run'", READ_LOG,
            "its last lines:\n  | one\n  | E0101 three",
        ),
        (
            fault("nixl", "nixlMismatchError", "no"), {"output": "\n".join(map(str, range(14)))}, NixlError,
            "NIXL reported nixlMismatchError (no) in {name} during 'run'",
            f"{READ_LOG}; the metadata was cut in transit or comes from another release of NIXL: install the same "
            "release on all ranks", "its last lines:\n" + "\n".join(f"  | {number}" for number in range(2, 14)),
        ),
        (
            fault("nixl", "nixlNotAllowedError", "no"), {}, NixlError,
            "NIXL reported nixlNotAllowedError (no) in {name} during 'run'",
            f"{READ_LOG}; if metadata cannot be loaded, this agent still knows an earlier agent of that name, such as "
            "one that was restarted, or an earlier registration of its memory: call `remove_remote_agent` first",
            NO_LINES,
        ),
        (
            fault("nixl", "nixlMismatchError", "no", remedy="turn it"), {"output": NO_HANDLER}, NixlError,
            "NIXL reported nixlMismatchError (no) in {name} during 'run'", "turn it",
            f"its last lines:\n  | {NO_HANDLER}",
        ),
        (
            fault("nixl", "nixlMismatchError", "no"), {"output": NO_HANDLER}, NixlError,
            "NIXL reported nixlMismatchError (no) in {name} during 'run'", ADD_TCP,
            f"its last lines:\n  | {NO_HANDLER}",
        ),
        (
            fault("nixl", "nixlMismatchError", "no"), {"output": NO_HANDLER, "here": False}, NixlError,
            "NIXL reported nixlMismatchError (no) in {name} during 'run'",
            "bring up a network interface with an address: NIXL needs a transport that notices a failed peer, such as "
            "TCP", f"its last lines:\n  | {NO_HANDLER}",
        ),
        (fault("ours", "GpuMemoryError", "GPU 0 is full", remedy="empty it"), {}, GpuFullError,
         "GPU 0 is full (in {name} during 'run')", "empty it", ""),
        (fault("ours", "NixlPluginError", "no file", remedy="make it"), {}, WorkerError,
         "no file (in {name} during 'run')", "make it", ""),
        (fault("import", "ImportError", "no libcuda", remedy="install it"), {"output": "lines"}, NixlAbsentError,
         "NIXL cannot be loaded in {name}: no libcuda", "install it", "its last lines:\n  | lines"),
        (fault("import", "ImportError", "no libcuda"), {}, NixlAbsentError,
         "NIXL cannot be loaded in {name}: no libcuda", "", NO_LINES),
        (
            fault("timeout", "StepTimeoutError", "3 of 5 s"), {}, WorkerLateError,
            "{name} stopped 'run' at its deadline: 3 of 5 s",
            "check whether the other rank still runs, and whether the path to it drops packets; if the machine is "
            "busy, increase --nixl-timeout", NO_LINES,
        ),
        (fault("refused", "CommandRefusedError", "no field"), {}, WorkerError, "{name} refused 'run': no field", "",
         NO_LINES),
        (fault("python", "ValueError", "bad"), {}, WorkerError, "ValueError in {name} during 'run': bad", "",
         "the stack"),
        *[
            (fault("python", name, "no x"), {}, WorkerError, f"{name} in {{name}} during 'run': no x",
             "install the module for this Python, or correct the import", "the stack")
            for name in ("ImportError", "ModuleNotFoundError")
        ],
        (
            {"number": 2, "text": "no result"}, {}, WorkerError,
            "{name} sent an answer to 'run' that this version does not allow, and was ended: ",
            "install the same pytest-nixl on every rank; without --nixl-group-token a stranger may have written it", "",
        ),
    ],
)  # fmt: skip
def test_an_error_of_a_worker_has_its_reason_its_remedy_and_the_last_lines(
    make: Make, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], process: dict[str, Any],
    error_type: type[WorkerError], reason: str, remedy: str, detail: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("UCX_TLS", "sm")  # of this host alone
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    worker, double = make({"number": 99, "result": "the late answer to another request"}, answer, **process)
    with pytest.raises(error_type) as caught:
        run(worker)
    error, reason = caught.value, reason.format(name=NAME)
    assert type(error) is error_type
    assert (error.reason.removesuffix(error.reason.removeprefix(reason)), error.remedy) == (reason, remedy)
    assert (detail == "" and not error.late) or error.detail == detail
    assert error.late is (error_type is WorkerLateError)
    assert not isinstance(error, NixlError) or error.type_name == answer["error"]["type"]
    assert double.alive is ("error" in answer), "only a worker that cannot be understood is ended"


def test_an_answer_of_another_form_ends_the_worker(make: Make) -> None:
    worker, double = make({"number": 2, "result": 7})
    with pytest.raises(WorkerError) as caught:
        worker.call("read")
    reason = "sent an answer to 'read' that this version does not allow, and was ended: it is 7: expected bytes"
    assert (caught.value.reason, double.alive) == (f"{NAME} {reason}", False)


LOOK_BELOW = "read its last lines below for a crash in NIXL, UCX or a driver; run `dmesg` to look for the OOM killer"
FLUSHED = "Fatal: receive completion[0] with error on rxe1/0x55: Work Request Flushed Error"
NO_THREAD = "pthread_create() failed: Resource temporarily unavailable"


@pytest.mark.parametrize(
    ("process", "limits", "ending", "remedy", "detail"),
    [
        ({"code": 3}, {}, "ended with exit code 3 during 'run'", LOOK_BELOW, NO_LINES),
        ({"code": -9, "output": "a\n"}, {"kills": (1, 1)}, "was ended by SIGKILL during 'run'", LOOK_BELOW,
         "its last lines:\n  | a"),
        ({"code": -9}, {"kills": (1, 2), "shortage": ("no shm", "mount it")},
         "was ended by SIGKILL during 'run': 1 GiB is the limit", MEMORY_REMEDY, NO_LINES),
        ({"code": -9, "here": False}, {"kills": (1, 2)}, "was ended by SIGKILL during 'run'", LOOK_BELOW, NO_LINES),
        ({"code": -6}, {"kills": (1, 2), "shortage": ("no shm", "mount it")},
         "was ended by SIGABRT during 'run': no shm", "mount it", NO_LINES),
        ({"code": 1, "output": NO_THREAD}, {"shortage": ("no shm", "mount it")},
         "ended with exit code 1 during 'run': no shm", "mount it", f"its last lines:\n  | {NO_THREAD}"),
        ({"code": -6, "output": NO_THREAD}, {}, "was ended by SIGABRT during 'run': no thread", "end others",
         f"its last lines:\n  | {NO_THREAD}"),
        ({"code": -6, "output": FLUSHED}, {},
         "was ended by SIGABRT during 'run': rxe1 went down or was removed, and UCX aborts then", PORT_REMEDY,
         f"its last lines:\n  | {FLUSHED}"),
        ({"code": None, "output": FLUSHED, "here": False}, {}, "has gone with its rank during 'run'",
         "read below how the ranks ended", ""),
        ({"code": -9, "alive": True}, {}, "was ended by SIGKILL during 'run'", LOOK_BELOW, NO_LINES),
    ],
)  # fmt: skip
def test_a_worker_that_died_is_named_with_the_limit_that_ended_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, process: dict[str, Any], limits: dict[str, Any], ending: str,
    remedy: str, detail: str,
) -> None:  # fmt: skip
    kills, crashes = list(limits.get("kills", (0, 0))), list[bool]()
    monkeypatch.setattr(worker_process, "memory_kills", lambda: (kills[0], "1 GiB is the limit"))
    monkeypatch.setattr(worker_process, "start_fault", lambda: ("no thread", "end others"))

    def shortage(*, crashed: bool) -> tuple[str, str] | None:
        crashes.append(crashed)
        return limits.get("shortage")

    monkeypatch.setattr(worker_process, "shortage", shortage)
    worker, double = make(**{"alive": False, **process})
    pending = worker.request("run", agent=Ref(1, "agent"), function="module:function", arguments={})
    kills.pop(0)
    double.far_end.close()
    with pytest.raises(WorkerDiedError) as caught:
        pending.result()
    assert (caught.value.reason, caught.value.remedy) == (f"{NAME} {ending}", remedy)
    assert (caught.value.detail, caught.value.late) == (detail, False)
    assert caught.value.ending == ending.partition(" during ")[0]
    code = process["code"]
    assert crashes == ([code < 0] if code not in (None, -9) and process.get("here", True) else [])
    assert not worker.alive
    assert double.log[-1] == "kill", "its memory is freed"
    with pytest.raises(WorkerDiedError):
        run(worker)


@pytest.mark.parametrize(
    ("output", "last_line"),
    [
        ("I0101 10:00:00 a\n", ""),
        *[
            (f"I0101 10:00:00 first\n  it has no Fatal Python error and no == backtrace \n{crash}\nafter it\n",
             "it has no Fatal Python error and no == backtrace")
            for crash in ("Fatal Python error: Aborted", "[a:1:0:1] Caught signal 11", "==== backtrace (tid: 1) ====")
        ],
    ],
)  # fmt: skip
def test_the_last_line_of_a_crash_is_that_before_it(make: Make, output: str, last_line: str) -> None:
    worker, double = make(alive=False, code=3, output=output)
    double.far_end.close()
    with pytest.raises(WorkerDiedError) as caught:
        run(worker)
    assert caught.value.last_line == last_line
    added = f"; its last line: {last_line}" if last_line else ""
    assert caught.value.with_last_line == f"{caught.value.reason}{added}"


def test_telling_leaves_out_tables_and_lines_without_a_warning() -> None:
    text = (
        "in I0101 10:00:00 a\nE0101 10:00:00 a\na | b\nin 2026-01-01 10:00:00 NIXL INFO a\n2026-01-01 1:0 NIXL WARN a"
    )
    noise = "I0101 10:00:00.5 a\n| a |\n+---+ \n2026-01-01 10:00:00 NIXL INFO a\n \n2026-01-01 10:00:00 NIXL DEBUG a"
    assert telling(f"{noise}\n{text}\n{noise}") == text.splitlines()


@pytest.mark.parametrize(
    ("command", "state", "by_option", "step", "option"),
    [
        ("run", "sleeping", True, "answer 'run'", "--nixl-timeout"),
        ("run", "stopped by a signal", True, "answer 'run'", "--nixl-timeout"),
        ("run", "running", False, "answer 'run'", ""),
        ("hello", "sleeping", True, "start (import NIXL)", "--nixl-start-timeout"),
        ("create_agent", "sleeping", True, "create its agent", "--nixl-start-timeout"),
    ],
)
def test_a_worker_that_misses_its_deadline_shows_its_stacks_and_is_ended(
    make: Make, command: str, state: str, by_option: bool, step: str, option: str
) -> None:
    worker, double = make(start_timeout=0.05 if command == "hello" else 60.0, output=STACK, state=state)
    worker.by_option = by_option
    if command != "hello":
        assert worker.versions["host"] == "a"
        worker.timeout, worker.start_timeout = (0.05, 60.0) if command == "run" else (60.0, 0.05)
    with pytest.raises(WorkerHungError) as caught:
        _ = worker.versions if command == "hello" else worker.call(command)
    error, busy = caught.value, "if the machine is only busy, run it again with less load"
    assert error.reason == f"{NAME}, which was {state}, did not {step} before its deadline of 0.05 s, and was ended"
    more = f", or set {option} to more than 0.05 s" if option else ""
    assert error.remedy == f"read the stacks of its threads below; {busy}{more}"
    assert (error.detail, error.late) == (f"its last lines:\n  | {STACK}", not state.startswith("stopped"))
    assert double.log == ["SIGUSR1", "kill"]


#: What UCX writes for each try to lock memory beyond the limit of 64 KiB.
REFUSED = (
    "[1795616727.173610] [kept:557  :0]  ib_md.c:323  UCX  ERROR ibv_reg_mr(address=0x7f97ab800000, length=6291456, "
    "access=0xf) failed: Cannot allocate memory : Please set max locked memory (ulimit -l) to 'unlimited' (current: 64 "
    "kbytes)\n"
)


class NoAnswer:
    """A poll that waits for no answer, so that a deadline may be far."""

    def register(self, descriptor: int, events: int) -> None:
        """Wait for nothing."""

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        return []


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("command", "count"), [("create_agent", 100), ("create_agent", 99), ("run", 100)])
def test_a_worker_whose_ucx_tries_endlessly_to_lock_memory_is_ended_before_its_deadline(
    make: Make, monkeypatch: pytest.MonkeyPatch, command: str, count: int, together: bool
) -> None:
    # tests/machines/test_rdma_faults.py has the real UCX, in the step in which it does so.
    endless = (command, count) == ("create_agent", 100)
    worker, double = make(output=REFUSED * count + STACK)
    worker.agent_names[1] = "a"
    assert worker.versions["pid"] == 7
    monkeypatch.setattr("select.poll", NoAnswer)
    pending = worker.request(command, agent=Ref(1, "agent"), seconds=60.0 if endless else 0.05)
    with pytest.raises(WorkerError) as caught:
        results([pending]) if together else pending.result()
    assert type(caught.value) is (WorkerError if endless else WorkerHungError)
    if endless:
        assert caught.value.reason == (
            f"{NAME} would never end 'create_agent', and was ended: UCX has tried 100 times to lock memory for an RDMA "
            "device, and a process may lock 64 kbytes"
        )
        assert caught.value.remedy == f"{MEMLOCK_REMEDY}; read `pytest-nixl explain NIXL-LOCKED-MEMORY-HANGS`"
        assert caught.value.detail.endswith(f"(current: 64 kbytes)\n  | {STACK}")
    assert caught.value.late is not endless
    assert not double.alive


@pytest.mark.parametrize(
    ("command", "arguments", "step"),
    [
        ("call", {"agent": 1, "method": "get_plugin_list"}, "'get_plugin_list' of agent 'a'"),
        ("call", {"agent": 2, "method": "get_plugin_list"}, "'get_plugin_list' of agent 'b'"),
        ("call", {"agent": 9, "method": "get_plugin_list"}, "'get_plugin_list'"),
        ("descriptor_list", {"agent": 1, "method": "get_reg_descs"}, "'get_reg_descs' of agent 'a'"),
        ("run", {"agent": 1, "method": "of the user"}, "'run'"),
        ("add_agents", {"agent": 1}, "'add_remote_agent' of agent 'a'"),
        ("register", {"agent": 1}, "'register_memory' of agent 'a'"),
        ("row_prepare", {"agent": 1}, "'initialize_xfer' of agent 'a'"),
    ],
)
def test_a_step_is_named_by_the_method_of_nixl_and_the_agent(
    make: Make, command: str, arguments: dict[str, Any], step: str
) -> None:
    worker, _ = make()
    worker.agent_names.update({1: "a", 2: "b"})
    whole = {name: Ref(value, "agent") if name == "agent" else value for name, value in arguments.items()}
    assert worker.request(command, seconds=60.0, **whole).words == step


@pytest.mark.parametrize(
    ("names", "alive", "method", "owner"),
    [
        (["b", "c"], False, {"method": "initialize"}, "agents 'b', 'c'"),
        (["b"], True, {}, "agent 'b'"),
        ([], True, {}, "a worker without an agent"),
    ],
)
def test_an_object_of_another_worker_is_refused_with_both_workers(
    make: Make, names: list[str], alive: bool, method: dict[str, str], owner: str
) -> None:
    (worker, _), (other, double) = make(), make(rank=4, alive=alive)
    worker.agent_names[1] = "a"
    other.agent_names.update(enumerate(names))
    with pytest.raises(WorkerError) as caught:
        worker.call("run", seconds=60.0, **method, arguments=[Ref(5, "buffer", other)])
    step, process = method.get("method", "run"), other.name if alive else f"{other.name}, which has ended"
    assert caught.value.reason == (
        f"'{step}' of agent 'a' ({NAME}) was given a buffer of {owner} ({process}), and an object can be used only in "
        "its own worker"
    )
    assert caught.value.remedy == (
        f"give it to {owner}; for another worker, create one there: descriptors of remote memory are created by the "
        "agent that transfers"
    )
    assert worker.alive
    assert double.log == []


@pytest.mark.parametrize(
    ("signals", "alive", "log", "is_asked"),
    [
        ([], True, [("wait", 2), "kill"], True),
        ([signal.SIGSTOP], True, ["SIGSTOP", "kill"], False),
        ([signal.SIGSTOP, signal.SIGCONT], True, ["SIGSTOP", "SIGCONT", ("wait", 2), "kill"], True),
        ([signal.SIGSTOP, signal.SIGUSR1], True, ["SIGSTOP", "SIGUSR1", "kill"], False),
        ([], False, ["kill"], False),
    ],
)
def test_a_worker_is_asked_once_to_end_unless_it_is_stopped(
    make: Make, signals: Sequence[int], alive: bool, log: list[object], is_asked: bool
) -> None:
    worker, process = make()
    for number in signals:
        worker.signal(number)
    process.alive = alive
    worker.ask_to_end()
    worker.close()
    worker.close()
    assert process.log == [*log, *(log[-2:] if is_asked else ["kill"])]
    assert process.commands() == ["hello", *(["exit"] if is_asked else [])]


@pytest.mark.parametrize(
    ("fates", "error_type", "of_rank"),
    [
        ("refuses dies", WorkerDiedError, 1),
        ("dies refuses", WorkerDiedError, 0),
        ("refuses hangs", WorkerHungError, 1),
        ("hangs dies", WorkerDiedError, 1),
        ("refuses stopped", WorkerHungError, 1),
        ("answers refuses", WorkerError, 1),
        pytest.param("waits refuses", WorkerError, 1, marks=pytest.mark.long),  # the partner has 2 s to report
    ],
)
def test_the_error_of_several_workers_is_that_which_caused_the_others(
    make: Make, fates: str, error_type: type[WorkerError], of_rank: int
) -> None:
    pairs = []
    for rank, fate in enumerate(fates.split()):
        replies = {"answers": [{"number": 2, "result": rank}], "refuses": [fault("refused", "X", "no")]}.get(fate, [])
        state, timeout = "stopped by a signal" if fate == "stopped" else "sleeping", 60.0 if fate != "hangs" else 0.5
        worker, process = make(*replies, rank=rank, state=state, output=STACK, code=-6)
        worker.timeout = 0.5 if fate == "stopped" else timeout
        assert worker.versions["pid"] == 7
        pairs.append((worker, process))
    pending = [worker.request("run") for worker, _ in pairs]
    for fate, (_, process) in zip(fates.split(), pairs, strict=True):
        if fate == "dies":
            process.alive = False
            process.far_end.close()
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        results(pending)
    assert type(caught.value) is error_type
    assert f"rank {of_rank} (agent worker, pid 7)" in caught.value.reason
    assert time.monotonic() - began < 60.0
    if "waits" in fates or "stopped" in fates:
        unanswered = pairs[1 - of_rank if "waits" in fates else of_rank][1]
        assert unanswered.commands() == ["hello", "run", "cancel"]
        assert not unanswered.alive


def test_a_worker_that_serves_is_cancelled_when_the_others_have_answered(make: Make) -> None:
    """Two answers of one worker may arrive together; its requests are answered in their order."""
    both, process = make(*[{"number": number, "result": [number]} for number in (2, 3)])
    serving, server = make(rank=4)
    requests = [both.request("run"), both.request("run")]
    served = serving.request("serve")
    received = server.commands()

    def answer() -> None:
        received.extend(server.commands())
        server.far_end.sendall(encode({"number": 2, "result": 0}))

    thread = threading.Thread(target=answer)
    thread.start()
    assert results(requests, serving=[served]) == [[2], [3]]
    thread.join()
    assert process.commands() == ["hello", "run", "run"]
    assert received == ["hello", "serve", "cancel"]
    refusing, _ = make(fault("python", "ValueError", "bad"))
    with pytest.raises(WorkerError, match="ValueError in rank 3"):
        results([], serving=[refusing.request("serve")])
    assert refusing.alive


def test_the_deadline_of_a_request_is_that_of_its_step(make: Make) -> None:
    worker, _ = make()
    worker.timeout, worker.start_timeout = 5.0, 60.0
    before = time.monotonic()
    seconds = [
        worker.request(name, seconds=limit) for name, limit in (("run", None), ("create_agent", None), ("x", 9.0))
    ]
    assert [pending.seconds for pending in seconds] == [5.0, 60.0, 9.0]
    assert all(before < pending.deadline - pending.seconds <= time.monotonic() for pending in seconds)
