# SPDX-License-Identifier: Apache-2.0
"""Run the two processes of nixlbench: first the initiator, then, once it has registered, the target.

Nothing sleeps for a fixed time: the output of the processes shows their progress, and so do their keys in etcd. If one
process dies, the other is ended too, and the cause is reported at once. nixlbench alone waits up to three minutes for a
dead rank.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from pytest_nixl.checks.nixlbench.command import Meeting
from pytest_nixl.checks.nixlbench.group import Group
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.model.nixlbench_output import Fault, NixlbenchOutput, Trouble
from pytest_nixl.model.nixlbench_table import read_output
from pytest_nixl.processes.external_program import RunningProgram, Tool, contention_of
from pytest_nixl.processes.worker_process import ended

#: Seconds for which nixlbench sleeps at one point of its ETCD runtime, without any output.
SLEEPS = 20.0
#: Seconds that one poll of a process waits for its output or end.
_LOOK = 0.2
#: Seconds that the second process may take to end, or to print what it saw, after the first has ended.
_GRACE = 3.0
#: Seconds for which an etcd may fail to answer before it is reported as the cause.
_ETCD_DOUBT = 10.0
#: Ports for the ASIO runtime, below the usual ephemeral range, and the number of attempts.
_PORTS, TRIES = range(20000, 32000), 5
#: Number of output lines per process that an error shows, and of characters per line.
_TAIL_LINES, _QUOTED = 8, 200

#: Signals that come from outside, so that the process did not crash by itself.
_BY_OTHERS = {signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM}

_ROLES = ("initiator", "target")
_BEGUN, _READY = "Init nixl worker, dev ", "All processes are ready to proceed"
_TAKEN = "ASIO runtime bind/listen error"
#: Output of a process whose partner died. It is not the cause.
_CONSEQUENCES = ("REMOTE_DISCONNECT", "peer rank", "peer liveness", "ASIO Read head failed", "ASIO Write failed")
_WANTS_PORT = (
    "open TCP from the target's host to the initiator's host, or let the processes meet in an etcd: "
    "--nixl-nixlbench-runtime=ETCD"
)


class NixlbenchError(NixlPluginError):
    """A run of nixlbench failed."""


@dataclass(frozen=True)
class Ran:
    """The result of a run of nixlbench.

    :param output: rank 0's output, parsed.
    :param log: all output of rank 0, including UCX's tables.
    :param inconsistent: the process that found wrong bytes, and its message; empty if none did.
    :param uncompared: why it is unknown whether the target compared the bytes although it was to; empty if it did.
    :param remarks: sentences about oddities that do not affect the figure.
    :param contention: how many of the run's cores other processes used on the initiator's host; None if
        unknown.
    """

    output: NixlbenchOutput
    log: str
    inconsistent: str = ""
    uncompared: str = ""
    remarks: tuple[str, ...] = ()
    contention: float | None = None


@dataclass
class _Rank:
    """One process: its rank in nixlbench, and its output."""

    number: int
    started: RunningProgram
    text: str = ""
    code: int | None = None

    @property
    def name(self) -> str:
        return f"the {_ROLES[self.number]} ({self.started.tool.where}, pid {self.started.pid})"

    @property
    def over(self) -> bool:
        return self.code is not None

    @property
    def killed(self) -> bool:
        """Whether a signal from outside ended it."""
        return self.code is not None and -self.code in _BY_OTHERS

    @property
    def begun(self) -> bool:
        """Whether it has registered (ETCD) or listens (ASIO)."""
        return _BEGUN in self.text

    @property
    def faults(self) -> tuple[Fault, ...]:
        return read_output(f"{self.text}\n").faults

    def look(self, timeout: float) -> None:
        """Update its output and exit code; wait up to ``timeout`` seconds for either."""
        if self.code is None:
            self.code = self.started.poll_within(timeout)
            self.text = self.started.output()  # after the exit code, so that it is complete

    def tail(self) -> str:
        lines = [line for line in self.text.splitlines() if line.strip() and not line.endswith(("|", "+"))]
        shown = "\n".join(f"  | {line[:_QUOTED]}" for line in lines[-_TAIL_LINES:])
        return f"the last lines of {self.name}:\n{shown}" if lines else f"{self.name} wrote nothing"


def free_meeting(address: str) -> Meeting:
    """Return an ASIO meeting at ``address`` with a random port, which may be in use."""
    port = secrets.choice(_PORTS)
    return Meeting("ASIO", {"runtime_type": "ASIO", "asio_address": address, "asio_port": str(port)})


def run_at(
    tools: tuple[Tool, Tool],
    address: str,
    arguments: Callable[[Meeting], Sequence[str]],
    variables: Mapping[str, str | None],
    timeout: float,
) -> Ran:
    """Run the two processes of one table with the ASIO runtime: they meet at a port of the initiator's host.

    :param tools: nixlbench of the initiator and of the target.
    :param address: numeric address of the initiator's host, because nixlbench resolves no names here.
    :param arguments: makes the command line for a meeting.
    :param variables: changes to the environment of both processes; None unsets a variable.
    :param timeout: seconds without output after which the run fails.
    :raises NixlPluginError: if the run fails.
    """
    for _ in range(TRIES):
        try:
            return _Run(tools, arguments(free_meeting(address)), variables, timeout, None).run()
        except _PortTaken:
            continue
    raise NixlbenchError(
        f"nixlbench cannot listen on {address} of the initiator's host: {TRIES} random ports were in use, or the host "
        "does not have this address",
        "let the ranks meet in an etcd: --nixl-nixlbench-runtime=ETCD",
    )


def run_in(
    tools: tuple[Tool, Tool],
    group: Group,
    arguments: Callable[[Meeting], Sequence[str]],
    variables: Mapping[str, str | None],
    timeout: float,
) -> Ran:
    """Run the two processes of one table with the ETCD runtime: they meet in the etcd of ``group``.

    The other parameters are those of :func:`run_at`.

    :raises NixlPluginError: if the run fails.
    """
    with group:
        return _Run(tools, arguments(group.meeting), variables, timeout, group).run_or_blame_etcd(group)


class _PortTaken(Exception):  # noqa: N818 - not an error: another port is tried
    pass


class _Run:
    def __init__(
        self,
        tools: tuple[Tool, Tool],
        arguments: Sequence[str],
        variables: Mapping[str, str | None],
        timeout: float,
        group: Group | None,
    ) -> None:
        self._tools = tools
        self._arguments = arguments
        self._variables = variables
        self._group = group
        self._timeout = timeout + (SLEEPS if group is not None else 0.0)
        self._ranks: list[_Rank] = []

    def run(self) -> Ran:
        """Start the processes, the second one when the first has registered, and return the result when one ends."""
        with ExitStack() as stack:
            for number, tool in enumerate(self._tools):
                rank = _Rank(number, stack.enter_context(tool.start(self._arguments, self._variables)))
                self._ranks.append(rank)
                self._wait(partial(self._registered, rank), f"{rank.name} to register")
                if rank.over:
                    break
            self._wait(lambda: any(rank.over for rank in self._ranks), "the next row or the end of the run")
            return self._concluded()

    def run_or_blame_etcd(self, group: Group) -> Ran:
        """Like :meth:`run`, but if the etcd is gone, report that: a rank of another host is then unreachable too."""
        try:
            return self.run()
        except NixlbenchError:
            raise
        except NixlPluginError as error:
            if (gone := group.trouble(_ETCD_DOUBT)) is None:
                raise
            raise self._etcd_gone(group, gone) from error

    def _registered(self, rank: _Rank) -> bool:
        if self._group is None:
            if rank.number == 0 and _TAKEN in rank.text:
                raise _PortTaken
            return rank.begun or any(rank.over for rank in self._ranks)
        return rank.begun or self._group.registered(rank.number) or any(rank.over for rank in self._ranks)

    def _wait(self, done: Callable[[], bool], event: str) -> None:
        """Wait until ``done`` returns true, as long as the processes produce new output.

        :raises NixlPluginError: if the etcd is gone, or there is no output for too long.
        """
        last_text, deadline, turn = "", time.monotonic() + self._timeout, 0
        while True:
            self._ranks[turn % len(self._ranks)].look(_LOOK)
            for rank in self._ranks:
                rank.look(0.0)
            turn += 1
            if self._inconsistent() or done():
                return
            if self._group is not None and (gone := self._group.trouble()) is not None:
                raise self._etcd_gone(self._group, gone)
            if (current_text := "".join(rank.text for rank in self._ranks)) != last_text:
                last_text, deadline = current_text, time.monotonic() + self._timeout
            elif time.monotonic() > deadline:
                raise self._silent(event)

    def _concluded(self) -> Ran:
        """Wait a short time for the other process, and return the result of the run or raise its failure."""
        start = time.monotonic()
        while not self._inconsistent() and not all(rank.over for rank in self._ranks):
            dead = [rank for rank in self._ranks if rank.over and _how_far(rank) == 0]
            for rank in self._ranks:
                rank.look(_LOOK)
            if any(rank.killed or rank.faults for rank in dead):
                break  # the other process cannot be the cause
            # After a crash the other process may be the cause, or have rows that it printed before and nobody has read.
            if time.monotonic() > start + (SLEEPS if self._whole() else _GRACE):
                break
        inconsistent = self._inconsistent()
        # At the last barrier each process waits for the other, so a process that still runs waits for one that never
        # arrived. A later crash, while libraries are unloaded, does not affect the result.
        broken = any(rank.code is None or rank.killed for rank in self._ranks)
        reported = any(fault.trouble is not Trouble.OTHER for rank in self._ranks for fault in rank.faults)
        if not inconsistent and (broken or not self._whole() or reported):
            culprit = min((rank for rank in self._ranks if rank.over), key=_how_far)
            # A process that ended because it lost its etcd reports something else, or nothing.
            if self._group is not None and not culprit.killed and (gone := self._group.trouble(_ETCD_DOUBT)):
                raise self._etcd_gone(self._group, gone)
            raise self._died(culprit)
        first = self._ranks[0]
        remarks = tuple(
            f"the {_ROLES[rank.number]}, {rank.started.tool.where}, {ended(rank.code)} after all rows were printed: "
            "the figure is not affected"
            for rank in self._ranks
            if rank.code and not inconsistent
        )
        contention = contention_of(*(rank.started for rank in self._ranks))
        return Ran(read_output(first.text), first.text, inconsistent, self._uncompared(), remarks, contention)

    def _uncompared(self) -> str:
        """Return why it is unknown whether the target compared the bytes of a WRITE, which it does after the row."""
        configuration, target = read_output(self._ranks[0].text).configuration, self._ranks[-1]
        if configuration.values.get("check_consistency") != "1" or configuration.op != "WRITE" or target.code == 0:
            return ""
        how = ended(target.code) if target.code is not None else "was still running"
        return f"{target.name}, which compares the bytes of a WRITE, {how}, perhaps before it had compared them"

    def _whole(self) -> bool:
        """Whether rank 0 has printed all rows."""
        output = read_output(self._ranks[0].text)
        planned = output.configuration.planned()
        return bool(planned) and {(row.block, row.batch) for row in output.rows} >= set(planned or ())

    def _inconsistent(self) -> str:
        for rank in self._ranks:
            for fault in rank.faults:
                if fault.trouble is Trouble.INCONSISTENT:
                    return f"{rank.name} says: {fault.text}"
        return ""

    def _died(self, rank: _Rank) -> NixlbenchError:
        known_faults = [fault for fault in rank.faults if fault.trouble is not Trouble.OTHER]
        quoted_faults = known_faults or rank.faults
        description = f": {quoted_faults[0].text[:_QUOTED]}" if quoted_faults else ""
        assert rank.code is not None
        reason = f"{rank.name} {ended(rank.code)} {self._where(rank)}{description}"
        survivors = [other.name for other in self._ranks if other is not rank and not other.over]
        if survivors:
            reason += f"; pytest-nixl then ended {survivors[0]}"
        return NixlbenchError(reason, self._remedy(rank, known_faults), self._tails(rank))

    def _remedy(self, rank: _Rank, known_faults: Sequence[Fault]) -> str:
        if known_faults:
            return known_faults[0].remedy
        if "ASIO Receive timeout" in rank.text or "ASIO Connection" in rank.text:
            return _WANTS_PORT
        if rank.code is not None and rank.code < 0 and not rank.faults:
            return (
                "find out on that host what ended it: `dmesg` shows the OOM killer; its last lines below show a crash"
            )
        return "read the last lines of both processes below"

    def _silent(self, event: str) -> NixlbenchError:
        stopped = [rank for rank in self._ranks if not rank.begun]
        rank = stopped[0] if stopped else self._ranks[0]
        reason = f"nixlbench: no output from either process for {self._timeout:g} s, while waiting for {event}"
        if self._group is not None and not rank.begun and len(self._ranks) == 2 and self._ranks[0].begun:
            reason += f": {self._ranks[0].name} is alone"
        if self._group is not None and self._group.failure:
            reason += f"; the last request from here to its etcd failed: {self._group.failure}"
        remedy = "read the last lines of both processes below; if the hosts are only busy, increase --nixl-timeout"
        return NixlbenchError(reason, remedy, self._tails(rank))

    def _etcd_gone(self, group: Group, gone: EtcdError) -> NixlbenchError:
        running = " and ".join(rank.name for rank in self._ranks if not rank.over)
        reason = f"the etcd in which nixlbench's processes meet is gone: {gone.reason}"
        if running:
            reason += f"; pytest-nixl then ended {running}"
        remedy = "read the last lines of its log below; the next row gets a new etcd"
        if gone.cause != "died":
            reason += f"; {group.remaining_keys()} are still in it"
            remedy = (
                "start that etcd again and repeat; this run removes the keys if the etcd answers before its end, or "
                f"remove them by hand: etcdctl --endpoints {group.endpoint} del --prefix {group.prefix}"
            )
        tails = self._tails(self._ranks[0])
        return NixlbenchError(reason, remedy, f"{gone.detail}\n{tails}" if gone.detail else tails)

    def _where(self, rank: _Rank) -> str:
        if not rank.begun:
            return "before it had registered"
        if _READY not in rank.text:
            return "before the ranks had met"
        return "during the run" if not self._whole() else "after all rows were printed"

    def _tails(self, rank: _Rank) -> str:
        return "\n".join(other.tail() for other in sorted(self._ranks, key=lambda other: other is not rank))


def _how_far(rank: _Rank) -> int:
    """Rate an ended process as the cause, from 0 (likely: it reports a fault or was killed) to 3 (unlikely)."""
    faults = rank.faults
    if any(fault.trouble is not Trouble.OTHER for fault in faults):
        return 0
    if any(consequence in rank.text for consequence in _CONSEQUENCES):
        return 3
    if rank.code is not None and rank.code < 0:
        return 0 if not faults else 1
    return 2
