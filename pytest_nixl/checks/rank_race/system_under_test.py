# SPDX-License-Identifier: Apache-2.0
"""Systems under test that claim ranks: a function, a command whose output names its rank, or nixlbench."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from pytest_nixl.checks.rank_race.claimants import Claimant
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.etcd.proxy import ProxyClient, State
from pytest_nixl.model.nixlbench_output import REMEDIES, Trouble
from pytest_nixl.model.nixlbench_table import read_output

#: Flags with which nixlbench registers and moves little: blocks of 4096 bytes.
_NIXLBENCH = (
    "--runtime_type=ETCD",
    "--etcd_endpoints={endpoint}",
    "--benchmark_group={group}",
    "--total_buffer_size=4096",
    "--start_block_size=4096",
    "--max_block_size=4096",
    "--num_iter=16",
    "--warmup_iter=16",
)
_RANK = r"Registered as rank (?P<rank>[0-9]+) item"
_HOST = re.compile(r"hostname (\S+)")


@dataclass(frozen=True)
class ClaimOutcome:
    """The result of one claim: a rank, or why there is none.

    :param name: name of the client.
    :param rank: its rank; None if it got none.
    :param error: why it got no rank; or an error after it got one.
    :param keys: keys that its error message names.
    """

    name: str
    rank: int | None = None
    host: str = ""
    pid: int = 0
    error: str = ""
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"{self.name} ({self.host or 'unknown host'}{f', pid {self.pid}' if self.pid else ''})"
        return f"{where}: rank {self.rank}" if self.rank is not None else f"{where}: {self.error or 'no rank'}"


class Running(Protocol):
    """A started claimant."""

    def outcome(self) -> ClaimOutcome | None:
        """Return the result of its claim; None while it is undecided."""

    def kill(self) -> None:
        """Kill it."""


class Subject(Protocol):
    """A system under test: a way to claim ranks."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    def start(self, proxy_client: ProxyClient, group: str, size: int) -> Running:
        """Start a claimant.

        :param proxy_client: the proxy's client through which it reaches etcd.
        :param group: name of the group, the same for all its claimants.
        :param size: number of ranks of the group.
        """

    def keys(self, group: str) -> str:
        """Return the prefix of the keys that a group uses."""

    def blocked(self, proxy_client: ProxyClient, group: str, keys: Mapping[str, bytes]) -> bool:
        """Whether a claimant waits for other claimants. ``keys`` are all keys of the group, oldest first."""


class FunctionSubject:
    """A function ``module:function`` that claims a rank: see :mod:`pytest_nixl.checks.rank_race.functions`."""

    def __init__(self, function: str) -> None:
        self.name = function

    def start(self, proxy_client: ProxyClient, group: str, size: int) -> Running:
        arguments = {"endpoint": proxy_client.endpoint, "group": group, "size": size}
        return _Forked(proxy_client.name, Claimant(self.name, arguments, proxy_client.path.changed))

    def keys(self, group: str) -> str:
        return group

    def blocked(self, proxy_client: ProxyClient, group: str, keys: Mapping[str, bytes]) -> bool:
        return waits_for_lock(proxy_client, keys)


class MembershipSubject(FunctionSubject):
    """The membership of pytest-nixl, which waits by watches."""

    def __init__(self, function: str = "pytest_nixl.checks.rank_race.functions:membership") -> None:
        super().__init__(function)

    def blocked(self, proxy_client: ProxyClient, group: str, keys: Mapping[str, bytes]) -> bool:
        last = proxy_client.requests[-1] if proxy_client.requests else None
        if last is None or last.method != "Watch" or last.state is not State.SENT:
            return False
        frozen = keys.get(f"{group}run/frozen")
        if len(last.accesses) == 1:  # waits for the roster
            return frozen is None
        # Waits for the rank of a member that died.
        return frozen is not None and all(f"{group}members/{item[0]}" in keys for item in json.loads(frozen)["members"])


def outcome_of(name: str, claimant: Claimant) -> ClaimOutcome | None:
    """Return what the last message of a claimant says; None if it has sent none."""
    message = claimant.message
    if message is None:
        return None
    if "rank" in message:
        return ClaimOutcome(name, message["rank"], message["host"], claimant.pid)
    return ClaimOutcome(name, None, message["host"], claimant.pid, f"{message['kind']}: {message['error']}")


class _Forked:
    def __init__(self, name: str, claimant: Claimant) -> None:
        self._name = name
        self._claimant = claimant

    def outcome(self) -> ClaimOutcome | None:
        outcome = outcome_of(self._name, self._claimant)
        if outcome is None and self._claimant.ended:
            return ClaimOutcome(self._name, pid=self._claimant.pid, error="its process ended without a message")
        return outcome

    def kill(self) -> None:
        self._claimant.close()


class CommandSubject:
    """A command whose output names its rank.

    :param command: arguments, in which ``{endpoint}``, ``{group}`` and ``{size}`` are replaced.
    :param pattern: regular expression for a line of its output, with a group ``rank``.
    :param name: its name in messages; by default the command.
    :param prefix: prefix of its keys, in which ``{group}`` is replaced.
    :raises ValueError: if the pattern is malformed or has no group ``rank``.
    """

    def __init__(self, command: Sequence[str], pattern: str, *, name: str = "", prefix: str = "{group}/") -> None:
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{pattern!r} is not a regular expression ({error}): expected one with a group (?P<rank>…)"
            ) from None
        if "rank" not in self._pattern.groupindex:
            raise ValueError(f"{pattern!r} has no group for the rank: add (?P<rank>…)")
        self.name = name or shlex.join(command)
        self._command = tuple(command)
        self._prefix = prefix

    def start(self, proxy_client: ProxyClient, group: str, size: int) -> Running:
        arguments = [
            part.format(endpoint=proxy_client.endpoint, group=group.rstrip("/"), size=size) for part in self._command
        ]
        return _Command(arguments, self._pattern, proxy_client)

    def keys(self, group: str) -> str:
        return self._prefix.format(group=group.rstrip("/"))

    def blocked(self, proxy_client: ProxyClient, group: str, keys: Mapping[str, bytes]) -> bool:
        return waits_for_lock(proxy_client, keys)


class NixlbenchSubject(CommandSubject):
    """The real nixlbench with its ETCD runtime and two ranks. ``backend`` moves its bytes afterwards."""

    def __init__(self, program: str, backend: str = "UCX") -> None:
        super().__init__(
            [program, f"--backend={backend}", *_NIXLBENCH], _RANK, name="nixlbench", prefix="xferbench/{group}/"
        )


class _Command:
    def __init__(self, arguments: Sequence[str], pattern: re.Pattern[str], proxy_client: ProxyClient) -> None:
        self._name, self._pattern, self._changed = proxy_client.name, pattern, proxy_client.path.changed
        self._lines: list[str] = []
        self._ended = False
        try:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise NixlPluginError(
                f"{arguments[0]} cannot be started: {error.strerror or error}",
                "give a program that can run on this host",
            ) from None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()
        self._process.wait()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def outcome(self) -> ClaimOutcome | None:
        text = "".join(self._lines)
        # Only a complete line counts.
        match = next(
            (matched for line in self._lines if line.endswith("\n") and (matched := self._pattern.search(line))), None
        )
        if match is not None:
            rank: int | None = int(match["rank"])
        elif self._ended:
            rank = None
        else:
            return None
        # It runs on this host, even if it has not printed that yet.
        return read_outcome(self._name, text, rank=rank, pid=self._process.pid, host=os.uname().nodename)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._reader.join()


def read_outcome(name: str, text: str, *, rank: int | None, pid: int = 0, host: str = "") -> ClaimOutcome:
    """Read the result of a claim from the output of nixlbench or another program.

    :param name: name of the client.
    :param text: its output.
    :param rank: its rank; None if it got none.
    :param host: its host, if the output does not name it.
    """
    host_match = _HOST.search(text)
    faults = [fault for fault in read_output(text).faults if fault.trouble is not Trouble.OTHER]
    keys = dict.fromkeys(token for fault in faults for token in fault.text.split() if token.startswith("xferbench/"))
    last = text.rstrip().rsplit("\n", 1)[-1]
    error = "; ".join(fault.text for fault in faults) or (last if rank is None else "")
    return ClaimOutcome(name, rank, host_match[1] if host_match else host, pid, error, tuple(keys))


def remedy_for(outcomes: Sequence[ClaimOutcome]) -> str:
    """Return the remedy for the first known failure; by default that for a duplicate rank."""
    listing = "\n".join(outcome.error for outcome in outcomes) + "\n"
    faults = read_output(listing).faults
    return faults[0].remedy if faults else REMEDIES[Trouble.DUPLICATE_RANK]


def waits_for_lock(proxy_client: ProxyClient, keys: Mapping[str, bytes]) -> bool:
    """Whether a client waits in etcd's lock behind another client: its key exists and is not the first."""
    locks = [request for request in proxy_client.requests if request.method == "Lock" and request.state is State.SENT]
    if not locks:
        return False
    queue = [key for key in keys if key.startswith(f"{locks[-1].key}/")]
    our_keys = [key for key in queue for lease in leases(proxy_client) if key.endswith(f"/{lease:x}")]
    if not our_keys and any(
        request.method == "LeaseGrant" and request.state is State.ANSWER_LOST for request in proxy_client.requests
    ):
        return len(queue) > 1  # the answer with its lease was lost, so one of these keys is its own
    return bool(our_keys) and our_keys[0] != queue[0]


def leases(proxy_client: ProxyClient) -> list[int]:
    """Return the ids of all leases that a client was granted."""
    return [lease for request in proxy_client.requests if (lease := request.granted()) is not None]


def faults(outcomes: Sequence[ClaimOutcome], size: int, keys: Iterable[str] = ()) -> list[str]:
    """Return one sentence per fault, with ranks, hosts and keys; empty if the ranks are right.

    :param outcomes: outcomes of all claimants that were not killed.
    :param size: size of the group.
    :param keys: keys of the group in etcd.
    """
    descriptions = given_twice(outcomes)
    for rank in sorted({outcome.rank for outcome in outcomes if outcome.rank is not None}):
        if not 0 <= rank < size:
            owner = next(outcome for outcome in outcomes if outcome.rank == rank)
            descriptions.append(f"rank {rank} is outside a group of {size}: {owner}")
    missing = sorted(set(range(size)) - {outcome.rank for outcome in outcomes if outcome.rank is not None})
    if missing:
        descriptions.append(f"nobody has rank {', '.join(map(str, missing))} of {size}")
    descriptions += [str(outcome) for outcome in outcomes if outcome.rank is None]
    descriptions += [
        f"{outcome.name} said: {outcome.error}" for outcome in outcomes if outcome.rank is not None and outcome.error
    ]
    named = sorted({*keys, *(key for outcome in outcomes for key in outcome.keys)})
    if descriptions and named:
        descriptions.append(f"keys in etcd: {', '.join(named)}")
    return descriptions


def given_twice(outcomes: Sequence[ClaimOutcome]) -> list[str]:
    """Return one sentence for each rank that several claimants got."""
    duplicates = []
    for rank in sorted({outcome.rank for outcome in outcomes if outcome.rank is not None}):
        owners = [outcome for outcome in outcomes if outcome.rank == rank]
        if len(owners) > 1:
            owner_list = " and ".join(str(owner).removesuffix(f": rank {rank}") for owner in owners)
            duplicates.append(f"rank {rank} was given {len(owners)} times: to {owner_list}")
    return duplicates


def owners_of_one_rank(outcomes: Sequence[ClaimOutcome]) -> frozenset[str]:
    """Return the names of the claimants that share a rank with another claimant."""
    ranks = [outcome.rank for outcome in outcomes if outcome.rank is not None]
    return frozenset(outcome.name for outcome in outcomes if outcome.rank is not None and ranks.count(outcome.rank) > 1)
