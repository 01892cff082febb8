# SPDX-License-Identifier: Apache-2.0
"""What is concluded from how the two processes of nixlbench end: a result, or the process at fault and a remedy.

The processes are doubles, because real ones need seconds to die; ``test_nixlbench_driver`` runs real ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from helpers.cli_run import ROOT

from pytest_nixl.checks.nixlbench import driver
from pytest_nixl.checks.nixlbench.command import Meeting
from pytest_nixl.checks.nixlbench.driver import NixlbenchError, Ran, run_at, run_in
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.model.nixlbench_output import REMEDIES, Trouble
from pytest_nixl.model.nixlbench_table import read_output

#: What a program has printed and its exit code, from a second after both have started; None: it runs.
State = tuple[float, str, int | None]


class Program:
    """A double of nixlbench on one rank, on a clock on which only looks at it take time.

    :param error: why it cannot be started.
    """

    clock: ClassVar[list[float]]

    def __init__(self, rank: int, *states: State, error: Exception | None = None) -> None:
        self.where, self.pid, self.cost = f"nixlbench of rank {rank} on h", 10 + rank, dict[str, float]()
        self.states, self.error = states, error
        self.tool, self.worker, self.versions = self, self, {"host": "h"}
        self.started: list[tuple[Sequence[str], Mapping[str, str | None]]] = []
        self.other = self

    def start(self, arguments: Sequence[str], variables: Mapping[str, str | None]) -> Program:
        self.started.append((arguments, variables))
        if self.error is not None:
            raise self.error
        return self

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def state(self) -> State:
        return [state for state in self.states if state[0] <= self.clock[0] - 100][-1]

    def poll_within(self, seconds: float) -> int | None:
        self.clock[0] += seconds
        return self.state[2] if self.other.started else None

    def output(self) -> str:
        return self.state[1]


class Etcd:
    """A double of a group in an etcd that is gone, for a reason; empty: it is not.

    :ivar only_after: it is known to be gone only if it is waited for that long.
    """

    def __init__(self, cause: str) -> None:
        self.meeting = Meeting("ETCD", {"a": "b"})
        self.endpoint, self.prefix, self.failure = "http://e:1", "xferbench/g/", ""
        self.gone = EtcdError("it went", "", "its log", cause=cause) if cause else None
        self.ranks, self.only_after = {0, 1}, 0.0

    __enter__ = Program.__enter__
    __exit__ = Program.__exit__

    def registered(self, rank: int) -> bool:
        return rank in self.ranks

    def trouble(self, seconds: float = 0.0) -> EtcdError | None:
        return self.gone if seconds >= self.only_after else None

    def remaining_keys(self) -> str:
        return "3 keys"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(Program, "clock", now, raising=False)
    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


WHOLE = (ROOT / "fixtures/nixlbench/20_asio.rank_a.out").read_text()
CHECKED = re.sub(r"(--check_consistency=.*: )0", r"\g<1>1", WHOLE)
BEGUN = "Init nixl worker, dev all rank {}, type {}, hostname h\n"
FIRST, SECOND = BEGUN.format(0, "initiator"), BEGUN.format(1, "target")
READY = "All processes are ready to proceed\n"
BOTH = FIRST + READY
LONELY = f"{FIRST}Error in barrier wait x/ rank 0 completed 1/2 ranks\n"
INITIATOR, TARGET = "the initiator (nixlbench of rank 0 on h, pid 10)", "the target (nixlbench of rank 1 on h, pid 11)"
AFTER = "after all rows were printed: the figure is not affected"
DMESG = "find out on that host what ended it: `dmesg` shows the OOM killer; its last lines below show a crash"
UNHEARD = "; the last request from here to its etcd failed: no"
LINES = "read the last lines of both processes below"
PORT = (
    "open TCP from the target's host to the initiator's host, or let the processes meet in an etcd: "
    "--nixl-nixlbench-runtime=ETCD"
)
ENDED_FIRST, ENDED_SECOND = (f"; pytest-nixl then ended {process}" for process in (INITIATOR, TARGET))


Ended = tuple[str, int | None] | list[State] | Exception


def program(rank: int, ended: Ended) -> Program:
    if isinstance(ended, Exception):
        return Program(rank, (0, "", None), error=ended)
    return Program(rank, *(ended if isinstance(ended, list) else [(0.0, *ended)]))


def run(first: Ended, second: Ended, etcd: Etcd | None = None, timeout: float = 60.0) -> Ran:
    programs = program(0, first), program(1, second)
    programs[0].other = programs[1]
    tools, variables = cast("Any", programs), {"A": None, "B": "c"}
    if etcd is not None:
        ran = run_in(tools, cast("Any", etcd), lambda meeting: [str(meeting)], variables, timeout)
        meetings = {str(etcd.meeting)}
    else:
        ran = run_at(tools, "10.0.0.1", lambda meeting: [f"{meeting.runtime} {meeting.flags['asio_address']}"],
                     variables, timeout)  # fmt: skip
        meetings = {"ASIO 10.0.0.1"}
    assert [({*words}, given) for program in programs for words, given in program.started] == [
        (meetings, variables)
    ] * 2
    return ran


@pytest.mark.parametrize(
    ("first", "second", "result"),
    [
        ((WHOLE, 0), (SECOND + READY, 0), {}),
        ((WHOLE, -11), (SECOND, 3), {"remarks": (
            f"the initiator, nixlbench of rank 0 on h, was ended by SIGSEGV {AFTER}",
            f"the target, nixlbench of rank 1 on h, ended with exit code 3 {AFTER}")}),
        ((CHECKED, 0), (SECOND, 0), {}),
        ((CHECKED, 0), (SECOND, -11), {
            "remarks": (f"the target, nixlbench of rank 1 on h, was ended by SIGSEGV {AFTER}",),
            "uncompared": f"{TARGET}, which compares the bytes of a WRITE, was ended by SIGSEGV, perhaps before it had "
                          "compared them"}),
        ((CHECKED.replace(": WRITE", ": READ"), 0), (SECOND, -11), {
            "remarks": (f"the target, nixlbench of rank 1 on h, was ended by SIGSEGV {AFTER}",)}),
        ((WHOLE, None), (f"{SECOND}Consistency check failed for iov 0:0\n", None), {
            "inconsistent": f"{TARGET} says: Consistency check failed for iov 0:0"}),
    ],
)  # fmt: skip
def test_a_run_that_printed_its_rows_has_a_result(
    first: tuple[str, int | None], second: tuple[str, int | None], result: Mapping[str, Any]
) -> None:
    assert run(first, second) == Ran(read_output(first[0]), first[0], **result)


@pytest.mark.parametrize(
    ("first", "second", "reason", "remedy"),
    [
        ((BOTH, None), (SECOND + READY, -9), f"{TARGET} was ended by SIGKILL during the run{ENDED_FIRST}", DMESG),
        ((BOTH, -15), (SECOND + READY, None), f"{INITIATOR} was ended by SIGTERM during the run{ENDED_SECOND}", DMESG),
        ((WHOLE, 0), (SECOND + READY, -9), f"{TARGET} was ended by SIGKILL after all rows were printed", DMESG),
        ((FIRST, None), ("Rank 2 is greater than or equal to global size 2\n", 1), f"{TARGET} ended with exit code 1 "
         f"before it had registered: Rank 2 is greater than or equal to global size 2{ENDED_FIRST}",
         REMEDIES[Trouble.STALE_GROUP]),
        ((LONELY, 1), (SECOND, None), f"{INITIATOR} ended with exit code 1 before the ranks "
         f"had met: Error in barrier wait x/ rank 0 completed 1/2 ranks{ENDED_SECOND}",
         REMEDIES[Trouble.RANKS_MISSING]),
        *(((BOTH, 2), (f"{SECOND}{READY}{text}\n", 1), f"{INITIATOR} ended with exit code 2 during the run", LINES)
          for text in ("REMOTE_DISCONNECT", "peer rank 0 key missing", "peer liveness", "ASIO Read head failed",
                       "ASIO Write failed")),
        ((BOTH, 2), (SECOND + READY, -6), f"{TARGET} was ended by SIGABRT during the run", DMESG),
        ((BOTH, 2), (SECOND + READY, 0), f"{INITIATOR} ended with exit code 2 during the run", LINES),
        *(((FIRST, 1), (f"{SECOND}{text}\n", -6), f"{TARGET} was ended by SIGABRT before the ranks had met", PORT)
          for text in ("ASIO Connection lost", "ASIO Receive timeout")),
    ],
)  # fmt: skip
def test_the_process_at_fault_is_named(
    first: tuple[str, int | None], second: tuple[str, int | None], reason: str, remedy: str
) -> None:
    with pytest.raises(NixlbenchError) as raised:
        run(first, second)
    assert (raised.value.reason, raised.value.remedy) == (reason, remedy)
    names = [INITIATOR, TARGET] if reason.startswith(INITIATOR) else [TARGET, INITIATOR]
    lines = [line for line in raised.value.detail.splitlines() if not line.startswith("  | ")]
    assert lines == [f"the last lines of {name}:" for name in names]


def test_the_last_lines_of_both_processes_are_shown() -> None:
    with pytest.raises(NixlbenchError) as raised:
        run((f"{FIRST}\n | a |\n-+\n{'x' * 300}\n" + "".join(f"{number}\n" for number in range(7)), 2), ("", 0))
    lines = ["x" * 200, *map(str, range(7))]
    assert raised.value.detail == "\n".join(
        [f"the last lines of {INITIATOR}:", *(f"  | {line}" for line in lines), f"{TARGET} wrote nothing"]
    )


ALONE = f": {INITIATOR} is alone"


@pytest.mark.parametrize(
    ("first", "second", "registered", "event", "silent"),
    [
        ("", "", None, f"{INITIATOR} to register", INITIATOR),
        (FIRST, "", None, f"{TARGET} to register", TARGET),
        (BOTH, SECOND, None, "the next row or the end of the run", INITIATOR),
        ("", "", set(), f"{INITIATOR} to register{UNHEARD}", INITIATOR),
        (FIRST, "", {0}, f"{TARGET} to register{ALONE}{UNHEARD}", TARGET),
        (FIRST, "", {0, 1}, f"the next row or the end of the run{ALONE}{UNHEARD}", TARGET),
        ("", SECOND, {0, 1}, f"the next row or the end of the run{UNHEARD}", INITIATOR),
        (FIRST, SECOND, set(), f"the next row or the end of the run{UNHEARD}", INITIATOR),
    ],
)
def test_silent_processes_are_named_after_the_timeout(
    first: str, second: str, registered: set[int] | None, event: str, silent: str, clock: list[float]
) -> None:
    group = Etcd("")
    group.ranks, group.failure = registered or set(), "no"
    with pytest.raises(NixlbenchError) as raised:
        run((first, None), (second, None), group if registered is not None else None)
    limit = 60 if registered is None else 80  # nixlbench sleeps for 20 s at one point of its ETCD runtime
    assert raised.value.reason == f"nixlbench: no output from either process for {limit} s, while waiting for {event}"
    assert raised.value.remedy == f"{LINES}; if the hosts are only busy, increase --nixl-timeout"
    assert raised.value.detail.startswith((f"the last lines of {silent}:\n", f"{silent} wrote nothing"))
    assert clock[0] - 100 == pytest.approx(limit, abs=1)


def test_output_of_either_process_starts_the_time_again(clock: list[float]) -> None:
    states: list[State] = [(0, FIRST, None), (50, BOTH, None), (150, WHOLE, 0)]
    ran = run(states, [(0, "", None), (40, SECOND, None), (100, SECOND + READY, None), (151, SECOND + READY, 0)])
    assert (len(ran.output.rows), ran.remarks) == (1, ())
    assert clock[0] - 100 == pytest.approx(151, abs=1)


@pytest.mark.parametrize(
    ("first", "second", "seconds", "reason"),
    [
        ((BOTH, 2), (SECOND + READY, None), 3, f"{INITIATOR} ended with exit code 2 during the run{ENDED_SECOND}"),
        ((WHOLE, 0), (SECOND + READY, None), 20,
         f"{INITIATOR} ended with exit code 0 after all rows were printed{ENDED_SECOND}"),
        ((BOTH, None), (SECOND + READY, -9), 0, f"{TARGET} was ended by SIGKILL during the run{ENDED_FIRST}"),
        ((LONELY, 1), (SECOND, None), 0, f"{INITIATOR} ended with exit code 1 before the ranks had met: Error in "
         f"barrier wait x/ rank 0 completed 1/2 ranks{ENDED_SECOND}"),
        ((BOTH, None), (SECOND + READY, -11), 3, f"{TARGET} was ended by SIGSEGV during the run{ENDED_FIRST}"),
        ([(0, BOTH, None), (2, BOTH, -9)], (SECOND + READY, 3), 2, f"{INITIATOR} was ended by SIGKILL during the run"),
    ],
)  # fmt: skip
def test_the_other_process_is_waited_for_if_it_may_be_the_cause(
    first: Ended, second: Ended, seconds: float, reason: str, clock: list[float]
) -> None:
    with pytest.raises(NixlbenchError) as raised:
        run(first, second)
    assert raised.value.reason == reason
    assert clock[0] - 100 == pytest.approx(seconds, abs=1)


def test_a_port_that_is_taken_is_tried_again_five_times() -> None:
    with pytest.raises(NixlbenchError) as raised:
        run(("ASIO runtime bind/listen error\n", None), ("", None))
    assert raised.value.reason == (
        "nixlbench cannot listen on 10.0.0.1 of the initiator's host: 5 random ports were in use, or the host does not "
        "have this address"
    )
    assert raised.value.remedy == "let the ranks meet in an etcd: --nixl-nixlbench-runtime=ETCD"


GONE = "the etcd in which nixlbench's processes meet is gone: it went"
LOST = NixlPluginError("the host of rank 1 does not answer")


@pytest.mark.parametrize(
    ("cause", "remaining", "remedy"),
    [
        ("died", "", "read the last lines of its log below; the next row gets a new etcd"),
        ("stopped", "; 3 keys are still in it", "start that etcd again and repeat; this run removes the keys if the "
         "etcd answers before its end, or remove them by hand: etcdctl --endpoints http://e:1 del --prefix "
         "xferbench/g/"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("first", "second", "only_after", "ended"),
    [
        ((FIRST, None), (SECOND, None), 0.0, f"; pytest-nixl then ended {INITIATOR} and {TARGET}"),
        ((LONELY, 1), (SECOND, None), 10.0, f"; pytest-nixl then ended {TARGET}"),
        ((LONELY, 1), (SECOND, 0), 10.0, ""),
        ((FIRST, None), LOST, 10.0, f"; pytest-nixl then ended {INITIATOR}"),
    ],
)
def test_an_etcd_that_is_gone_is_the_cause(
    cause: str, remaining: str, remedy: str, first: Ended, second: Ended, only_after: float, ended: str
) -> None:
    etcd = Etcd(cause)
    etcd.only_after = only_after
    assert run((WHOLE, 0), (SECOND + READY, 0), etcd).output.rows
    with pytest.raises(NixlbenchError) as raised:
        run(first, second, etcd)
    assert (raised.value.reason, raised.value.remedy) == (f"{GONE}{ended}{remaining}", remedy)
    assert raised.value.detail.startswith(f"its log\nthe last lines of {INITIATOR}:\n")


def test_an_etcd_that_is_not_gone_is_not_blamed() -> None:
    with pytest.raises(NixlPluginError) as lost:
        run((FIRST, None), LOST, Etcd(""))
    assert lost.value is LOST
    etcd = Etcd("stopped")
    etcd.only_after = 10.0
    with pytest.raises(NixlbenchError) as killed:
        run((BOTH, None), (SECOND + READY, -9), etcd)
    assert killed.value.reason == f"{TARGET} was ended by SIGKILL during the run{ENDED_FIRST}"
