# SPDX-License-Identifier: Apache-2.0
"""Run nixlbench's two processes: the initiator first, the target once that has registered, both ended with the first.

Nothing is slept for: their output tells how far they are, and in an etcd their keys do. What one dies of is said as
soon as it has died; by itself nixlbench waits up to three minutes for a rank that is gone.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from pytest_nixl.checks.nixlbench.command import Meeting
from pytest_nixl.checks.nixlbench.group import Group
from pytest_nixl.checks.nixlbench.table import Fault, NixlbenchOutput, Trouble, read_output
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.processes.external_program import RunningProgram, Tool, ended, others_beside

#: Seconds for which nixlbench sleeps at one point, in its ETCD runtime: nothing is to be seen of it meanwhile.
_SLEEPS = 20.0
#: Seconds for which one look at a process waits for its end.
_LOOK = 0.2
#: Seconds that its partner may still take when the first process has ended: to end too, or to say what it saw.
_GRACE = 3.0
#: Seconds for an etcd that does not answer just now to come back, before it is named as the cause.
_ETCD_DOUBT = 10.0
#: Ports to try for the ASIO runtime, below those that systems give to clients, and how often another one.
_PORTS, _TRIES = range(20000, 32000), 5
#: Lines of each process that a failure shows, and characters of a line that it quotes.
_TAIL_LINES, _QUOTED = 8, 200

#: Signals that somebody sends: no crash of its own.
_BY_OTHERS = {signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM}

_ROLES = ("initiator", "target")
_BEGUN, _READY = "Init nixl worker, dev ", "All processes are ready to proceed"
_TAKEN = "ASIO runtime bind/listen error"
#: Words of one whose partner died: it is not the cause.
_CONSEQUENCES = ("REMOTE_DISCONNECT", "peer rank", "peer liveness", "ASIO Read head failed", "ASIO Write failed")
_WANTS_PORT = (
    "see that TCP from the target's host to the initiator's is open, or have them meet in an etcd: "
    "--nixl-nixlbench-runtime=ETCD"
)


class NixlbenchError(NixlPluginError):
    """A run of nixlbench came to nothing."""


@dataclass(frozen=True)
class Ran:
    """What a run came to.

    :param output: what rank 0 said.
    :param log: all that rank 0 wrote, with UCX's tables.
    :param inconsistent: the process that found wrong bytes, and its words; empty: none did.
    :param remarks: sentences on what was odd and changes no figure.
    :param others: cores that others of the initiator's host took of those that the run needed; None: not known.
    """

    output: NixlbenchOutput
    log: str
    inconsistent: str = ""
    remarks: tuple[str, ...] = ()
    others: float | None = None


@dataclass
class _Rank:
    """One process: its number in nixlbench's own count, and what it has written."""

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
        """Whether somebody has ended it."""
        return self.code is not None and -self.code in _BY_OTHERS

    @property
    def begun(self) -> bool:
        """Whether it has registered, or listens."""
        return _BEGUN in self.text

    @property
    def faults(self) -> tuple[Fault, ...]:
        return read_output(f"{self.text}\n").faults

    def look(self, patience: float) -> None:
        """See what it has written and whether it has ended; wait ``patience`` for either."""
        if self.code is None:
            self.code = self.started.poll_within(patience)
            self.text = self.started.output()  # after the code: of one that has ended it is all

    def tail(self) -> str:
        lines = [line for line in self.text.splitlines() if line.strip() and not line.endswith(("|", "+"))]
        shown = "\n".join(f"  | {line[:_QUOTED]}" for line in lines[-_TAIL_LINES:])
        return f"the last lines of {self.name}:\n{shown}" if lines else f"{self.name} wrote nothing"


def free_meeting(address: str) -> Meeting:
    """Return a meeting of the ASIO runtime at a port that is chosen at random; it may be taken."""
    port = random.choice(_PORTS)
    return Meeting("ASIO", {"runtime_type": "ASIO", "asio_address": address, "asio_port": str(port)})


def run_at(
    tools: tuple[Tool, Tool],
    address: str,
    arguments: Callable[[Meeting], Sequence[str]],
    variables: Mapping[str, str | None],
    timeout: float,
) -> Ran:
    """Run the two processes of one table, which meet at a port of the initiator's host.

    :param address: that host's, as a number: nixlbench resolves no names there.
    :param arguments: makes a command line.
    :raises NixlPluginError: where it comes to nothing.
    """
    for _ in range(_TRIES):
        try:
            return _Run(tools, arguments(free_meeting(address)), variables, timeout, None).finish()
        except _PortTaken:
            continue
    raise NixlbenchError(
        f"nixlbench cannot listen on {address} of the initiator's host: {_TRIES} ports of it, chosen at random, were "
        "taken, or it has no such address",
        "have the ranks meet in an etcd: --nixl-nixlbench-runtime=ETCD",
    )


def run_in(
    tools: tuple[Tool, Tool],
    group: Group,
    arguments: Callable[[Meeting], Sequence[str]],
    variables: Mapping[str, str | None],
    timeout: float,
) -> Ran:
    """Run the two processes of one table, which meet in an etcd. :raises NixlPluginError: where it comes to nothing."""
    with group:
        return _Run(tools, arguments(group.meeting), variables, timeout, group).finish_or_blame_etcd(group)


class _PortTaken(Exception):  # noqa: N818 - it is no error: another port is tried
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
        self._timeout = timeout + (_SLEEPS if group is not None else 0.0)
        self._ranks: list[_Rank] = []

    def finish(self) -> Ran:
        with ExitStack() as stack:
            for number, tool in enumerate(self._tools):
                rank = _Rank(number, stack.enter_context(tool.start(self._arguments, self._variables)))
                self._ranks.append(rank)
                self._wait(partial(self._registered, rank), f"{rank.name} to register")
                if rank.over:
                    break
            self._wait(lambda: any(rank.over for rank in self._ranks), "the next row, or the end of the run")
            return self._concluded()

    def finish_or_blame_etcd(self, group: Group) -> Ran:
        """As :meth:`finish`; a rank of another host cannot be reached either, once the etcd of the run is gone."""
        try:
            return self.finish()
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
            return rank.begun or any(each.over for each in self._ranks)
        return rank.begun or self._group.registered(rank.number) or any(each.over for each in self._ranks)

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        """Wait until something is so, for as long as there is something new to see of the processes.

        :raises NixlPluginError: where one ends that should not, or nothing is seen for too long.
        """
        seen, deadline, turn = "", time.monotonic() + self._timeout, 0
        while True:
            self._ranks[turn % len(self._ranks)].look(_LOOK)
            for rank in self._ranks:
                rank.look(0.0)
            turn += 1
            if self._inconsistent() or done():
                return
            if self._group is not None and (gone := self._group.trouble()) is not None:
                raise self._etcd_gone(self._group, gone)
            if (now := "".join(rank.text for rank in self._ranks)) != seen:
                seen, deadline = now, time.monotonic() + self._timeout
            elif time.monotonic() > deadline:
                raise self._silent(what)

    def _concluded(self) -> Ran:
        """Give the other process its grace, and say what came of the run."""
        deadline = 0.0
        while not self._inconsistent() and not all(rank.over for rank in self._ranks):
            whole = self._whole()
            dead = [rank for rank in self._ranks if rank.over and _how_far(rank) == 0]
            if any(rank.killed or rank.faults or not whole for rank in dead):
                break  # the other can be no cause of that
            deadline = deadline or time.monotonic() + (_SLEEPS if whole else _GRACE)
            if time.monotonic() > deadline:
                break
            for rank in self._ranks:
                rank.look(_LOOK)
        inconsistent = self._inconsistent()
        # At the last barrier each waits for the other: one that is still there waits for one that never came to it. A
        # crash after that, while libraries are taken down, changes no figure.
        broken = any(rank.code is None or rank.killed for rank in self._ranks)
        if not inconsistent and (broken or not self._whole() or self._said()):
            culprit = self._culprit()
            # A process that ends because it has lost its etcd tells something else, if anything.
            if self._group is not None and not culprit.killed and (gone := self._group.trouble(_ETCD_DOUBT)):
                raise self._etcd_gone(self._group, gone)
            raise self._died(culprit)
        first = self._ranks[0]
        remarks = () if inconsistent else tuple(filter(None, map(_remark, self._ranks)))
        others = others_beside(*(rank.started for rank in self._ranks))
        return Ran(read_output(first.text), first.text, inconsistent, remarks, others)

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

    def _said(self) -> tuple[Fault, ...]:
        return tuple(fault for rank in self._ranks for fault in rank.faults if fault.trouble is not Trouble.OTHER)

    def _culprit(self) -> _Rank:
        return min((rank for rank in self._ranks if rank.over), key=_how_far)

    def _died(self, rank: _Rank) -> NixlbenchError:
        known = [fault for fault in rank.faults if fault.trouble is not Trouble.OTHER]
        words = known or rank.faults
        said = f": {words[0].text[:_QUOTED]}" if words else ""
        assert rank.code is not None
        reason = f"{rank.name} {ended(rank.code)} {self._where(rank)}{said}"
        others = [each.name for each in self._ranks if each is not rank and not each.over]
        if others:
            reason += f"; {others[0]} was ended with it"
        return NixlbenchError(reason, self._remedy(rank, known), self._tails(rank))

    def _remedy(self, rank: _Rank, known: Sequence[Fault]) -> str:
        if known:
            return known[0].remedy
        if "ASIO Receive timeout" in rank.text or "ASIO Connection" in rank.text:
            return _WANTS_PORT
        if rank.code is not None and rank.code < 0 and not rank.faults:
            return "see on that host what ended it: `dmesg` shows the OOM killer; a crash shows in its last lines below"
        return "read the last lines of both below: that is all that they say of it"

    def _silent(self, what: str) -> NixlbenchError:
        stopped = [rank for rank in self._ranks if not rank.begun]
        rank = stopped[0] if stopped else self._ranks[0]
        reason = f"nixlbench: nothing was to be seen for {self._timeout:g} s, while waiting for {what}"
        if self._group is not None and not rank.begun and len(self._ranks) == 2 and self._ranks[0].begun:
            reason += f": {self._ranks[0].name} is alone"
        if self._group is not None and self._group.failure:
            reason += f"; the last look at its etcd from here failed: {self._group.failure}"
        remedy = "read both ranks' last lines below; give --nixl-timeout more time if the machines are merely busy"
        return NixlbenchError(reason, remedy, self._tails(rank))

    def _etcd_gone(self, group: Group, gone: EtcdError) -> NixlbenchError:
        running = " and ".join(rank.name for rank in self._ranks if not rank.over)
        reason = f"the etcd in which nixlbench's processes meet is gone: {gone.reason}"
        if running:
            reason += f"; {running} were ended with it" if " and " in running else f"; {running} was ended with it"
        remedy = "read the last lines of its log below; the next row gets a new etcd"
        if gone.cause != "died":
            reason += f"; {group.left_behind()} are still in it"
            remedy = (
                "start that etcd again and repeat; the keys are removed once it answers, until the end of this run, or "
                f"by hand: etcdctl --endpoints {group.endpoint} del --prefix {group.prefix}"
            )
        tails = self._tails(self._ranks[0])
        return NixlbenchError(reason, remedy, f"{gone.detail}\n{tails}" if gone.detail else tails)

    def _where(self, rank: _Rank) -> str:
        if not rank.begun:
            return "before it had registered"
        if _READY not in rank.text:
            return "before the ranks had met"
        return "in the midst of the run" if not self._whole() else "when all rows were there"

    def _tails(self, rank: _Rank) -> str:
        return "\n".join(each.tail() for each in sorted(self._ranks, key=lambda each: each is not rank))


def _remark(rank: _Rank) -> str:
    """Say how a process ended once all rows were there, where that was not as it should."""
    name = f"the {_ROLES[rank.number]}, {rank.started.tool.where},"
    return f"{name} {ended(rank.code)} once all rows were there: it changes no figure" if rank.code else ""


def _how_far(rank: _Rank) -> int:
    """How far a process that has ended is from being the cause: 0 where it says so itself or was killed."""
    said = rank.faults
    if any(fault.trouble is not Trouble.OTHER for fault in said):
        return 0
    if any(words in rank.text for words in _CONSEQUENCES):
        return 3
    if rank.code is not None and rank.code < 0:
        return 0 if not said else 1
    return 2
