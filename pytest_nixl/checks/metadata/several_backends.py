# SPDX-License-Identifier: Apache-2.0
"""The check ``several-backends``: one agent has several backends, and each transfer goes by the one chosen for it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.core.polling import wait_until
from pytest_nixl.core.units import KIB
from pytest_nixl.core.wire import Ref
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.nixl.backends import BACKENDS, between_agents
from pytest_nixl.nixl.buffer import Buffer

#: The bytes of each transfer.
SIZE = 64 * KIB
#: The backend that the initiator has beside the requested ones: it moves bytes to a file.
STORAGE = "POSIX"


@dataclass(frozen=True)
class BackendUse:
    """A transfer by one of several backends of an agent.

    :param chosen: the backend that the transfer was told to use.
    :param used: the plugin that NIXL says it uses, by ``query_xfer_backend``.
    :param memory: from where to where its bytes moved.
    :param transports: the transports that the backend reports; empty: unknown.
    :param wrong: the first wrong byte at the destination, as a comparison returns it; None: every byte is right.
    """

    chosen: str
    used: str
    memory: MemoryPair
    transports: tuple[str, ...]
    wrong: dict[str, int] | None

    def __str__(self) -> str:
        over = f" over {'+'.join(self.transports)}" if self.transports else ""
        return f"{self.memory} by {self.used}{over}"


@dataclass
class _Transfer:
    """A prepared transfer with its buffers."""

    backend: str
    source: Buffer
    destination: Buffer
    seed: int
    handle: Ref
    used: str
    #: The notification that the target gets; empty: the destination is the initiator's own file.
    notification: bytes


def backends_of(requested: Sequence[str]) -> tuple[str, ...]:
    """Return the backends of the initiator: the requested ones between agents, and the one for files."""
    return (*between_agents(requested), STORAGE)


def add_storage(initiator: NixlAgent) -> None:
    """Add the backend for files to an agent that has others.

    :raises NotApplicableError: this NIXL has no such plugin.
    """
    plugins = initiator.get_plugin_list()
    if STORAGE not in plugins:
        raise NotApplicableError(f"this NIXL has no plugin {STORAGE}: it has {', '.join(plugins)}")
    initiator.create_backend(STORAGE)


def use_each(
    initiator: NixlAgent, target: NixlAgent, backends: Sequence[str], *, directory: str, seconds: float
) -> list[BackendUse]:
    """Write by each backend, all at the same time, and compare every byte that arrived.

    :param initiator: an agent that has these backends and knows the target.
    :param target: an agent that has those of them that move bytes between agents.
    :param directory: the directory of the file; empty for the system's temporary directory.
    :param seconds: the time that the transfers may take.
    :raises LateError: a transfer was not complete in time.
    :raises NixlError: NIXL refused a transfer.
    """
    transfers = [_prepared(initiator, target, backend, directory) for backend in backends]
    waiting = {transfer.backend: initiator.transfer(transfer.handle) for transfer in transfers}
    missing = [transfer for transfer in transfers if transfer.notification]

    def complete() -> bool:
        # Poll both agents in turn, because they make progress only when polled.
        for transfer in transfers:
            if waiting[transfer.backend] != "DONE":
                waiting[transfer.backend] = initiator.check_xfer_state(transfer.handle)
        missing[:] = [move for move in missing if not target.check_remote_xfer_done(initiator.name, move.notification)]
        return not missing and set(waiting.values()) == {"DONE"}

    wait_until(
        complete,
        f"transfers by {' and '.join(backends)} of one agent: each state is {waiting}",
        seconds=seconds,
        remedy=lambda: f"the states at the end: {waiting}; read the workers' logs",
    )
    log = initiator.worker.output()
    uses = []
    for move in transfers:
        initiator.release_xfer_handle(move.handle)
        memory = MemoryPair(move.source.memory, move.destination.memory)
        transports = BACKENDS[move.backend].transports(log, "WRITE", SIZE, memory)
        uses.append(BackendUse(move.backend, move.used, memory, transports, move.destination.compare(move.seed)))
    return uses


def _prepared(initiator: NixlAgent, target: NixlAgent, backend: str, directory: str) -> _Transfer:
    storage = BACKENDS[backend].STORAGE
    owner = initiator if storage else target
    source = initiator.allocate(SIZE)
    initiator.register(source)
    if storage:
        destination = initiator.allocate(SIZE, "FILE", directory=directory, alignment=4096)
        initiator.register(destination)
    else:
        destination = target.allocate(SIZE)
        target.register(destination)
        metadata = target.get_agent_metadata()
        with target.polled():
            initiator.add_remote_agent(metadata)
        initiator.connect_to(target)
    seed = secrets.randbits(63)
    source.fill(seed).result()
    destination.fill(seed, inverted=True).result()
    plugin, notification = BACKENDS[backend].PLUGIN, b"" if storage else b"by %s" % backend.encode()
    local = initiator.get_xfer_descs([source.descriptor()], source.memory)
    remote = initiator.get_xfer_descs([destination.descriptor()], destination.memory)
    handle = initiator.initialize_xfer("WRITE", local, remote, owner.name, notification, backends=[plugin])
    used = initiator.query_xfer_backend(handle)
    return _Transfer(backend, source, destination, seed, handle, used, notification)


def judge_uses(uses: Sequence[BackendUse]) -> Judgement:
    """Judge transfers by several backends: CORRUPT bytes first, then a backend that was not the chosen one."""
    names = " and ".join(use.chosen for use in uses)
    for use in uses:
        if use.wrong is not None:
            wrong = use.wrong
            return Judgement(
                Verdict.CORRUPT,
                f"an agent with {names}: {wrong['wrong_bytes']} of {wrong['total_bytes']} bytes of {use} are wrong, "
                f"the first at offset {wrong['offset']}: expected 0x{wrong['expected']:02x}, found "
                f"0x{wrong['found']:02x}",
                f"Do not use an agent with {names}: create one agent for each backend, and keep the workers' logs.",
            )
    for use in uses:
        if use.used != BACKENDS[use.chosen].PLUGIN:
            return Judgement(
                Verdict.FAIL,
                f"an agent with {names}: NIXL uses {use.used} for a transfer {use.memory} for which {use.chosen} "
                "was chosen",
                "Report it at https://github.com/ai-dynamo/nixl/issues with NIXL's release; until it is fixed, create "
                "one agent for each backend.",
            )
    return Judgement(Verdict.PASS, f"an agent with {names}: {'; '.join(map(str, uses))}")
