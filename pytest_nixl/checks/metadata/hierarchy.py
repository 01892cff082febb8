# SPDX-License-Identifier: Apache-2.0
"""The check ``hierarchy``: bytes go from an object through host memory to a file, each leg by its own backend."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.core.polling import wait_until
from pytest_nixl.core.units import MIB
from pytest_nixl.core.wire import Ref
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.nixl.buffer import Buffer
from pytest_nixl.nixl.s3_server import S3Bucket
from pytest_nixl.processes.worker_errors import NixlError

#: The bytes that move.
SIZE = 4 * MIB
OBJECT, FILE = "OBJ", "POSIX"
_KEY = "pytest-nixl/hierarchy"
#: If NIXL's transfer from the object is not complete in this time, the server is asked by the other client, in seconds.
ASK_SECONDS = 5.0


@dataclass(frozen=True)
class Leg:
    """One step of the way.

    :param name: from where to where, such as ``object to host memory``.
    :param backend: the backend that was chosen for it.
    :param used: the plugin that NIXL says it uses.
    :param seconds: the time from the post of the transfer until it was complete.
    :param wrong: the offset of the first wrong byte at its end; None: every byte is right.
    """

    name: str
    backend: str
    used: str
    seconds: float
    wrong: int | None


def add_storage(reader: NixlAgent, writer: NixlAgent, bucket: S3Bucket) -> None:
    """Add OBJ to the reader, whose worker has the bucket's variables, and POSIX to the writer, maybe the same agent.

    :raises NotApplicableError: this NIXL has no such plugin.
    """
    secret = ("access_key", "secret_key", "session_token")
    parameters = {name: value for name, value in bucket.parameters.items() if name not in secret}
    for agent, name, options in ((reader, OBJECT, parameters), (writer, FILE, {})):
        plugins = agent.get_plugin_list()
        if name not in plugins:
            raise NotApplicableError(f"this NIXL has no plugin {name}: it has {', '.join(plugins)}")
        agent.create_backend(name, options)


def move_through(
    reader: NixlAgent, writer: NixlAgent, network: str, bucket: S3Bucket, *, directory: str, seconds: float
) -> list[Leg]:
    """Move bytes from an object to the reader's memory, to the writer's memory, and to the writer's file.

    :param reader: an agent with OBJ and the network's backend.
    :param writer: an agent with POSIX and the network's backend; it may be the same agent.
    :param network: the backend between the two.
    :param bucket: where the object is stored, by a client that is not NIXL's.
    :param directory: the directory of the file; empty for the system's temporary directory.
    :param seconds: the time that each leg may take.
    :raises LateError: a leg was not complete in time.
    :raises NixlError: NIXL refused a transfer.
    :raises ObjectStoreError: the server has a fault.
    """
    content = secrets.token_bytes(SIZE)
    bucket.client.put(_KEY, content)
    near, far = reader.allocate(SIZE), writer.allocate(SIZE)
    file = writer.allocate(SIZE, "FILE", directory=directory, alignment=4096)
    reader.register(near)
    reader.register_memory([(0, SIZE, 1, _KEY)], "OBJ")
    writer.register(far)
    writer.register(file)
    if writer is not reader:
        metadata = writer.get_agent_metadata()
        with writer.polled():
            reader.add_remote_agent(metadata)
        reader.connect_to(writer)
    legs = []
    try:
        for name, agent, op, backend, local, remote, owner in (
            ("object to host memory", reader, "READ", OBJECT, near, (0, SIZE, 1), reader),
            ("host memory to host memory", reader, "WRITE", network, near, far.descriptor(), writer),
            ("host memory to file", writer, "WRITE", FILE, far, file.descriptor(), writer),
        ):
            kind = {OBJECT: "OBJ", FILE: "FILE"}.get(backend, "DRAM")
            sides = agent.get_xfer_descs([local.descriptor()], "DRAM"), agent.get_xfer_descs([remote], kind)
            plugin = BACKENDS[backend].PLUGIN
            notification = b"" if owner is agent else b"hierarchy"
            handle = agent.initialize_xfer(op, *sides, owner.name, notification, backends=[plugin])
            used = agent.query_xfer_backend(handle)
            ask = (lambda: bucket.client.probe(f"{_KEY}-probe")) if backend == OBJECT else None
            took = _complete(agent, handle, owner if notification else None, name, seconds, ask)
            agent.release_xfer_handle(handle)
            end = {OBJECT: near, FILE: file}.get(backend, far)
            # DONE may say only that it was posted. A notification of an agent to itself is no better proof: with
            # LIBFABRIC 1.5.0 it arrives, and the transfer stays PROC.
            posted = backend == network and not notification and not BACKENDS[network].COMPLETION_IMPLIES_DELIVERY
            wrong = _first_wrong(agent, end, content, seconds if posted else 0.0)
            legs.append(Leg(name, backend, used, took, wrong))
    finally:
        bucket.client.discard(_KEY, ASK_SECONDS)
    return legs


def _complete(
    agent: NixlAgent,
    handle: Ref,
    target: NixlAgent | None,
    name: str,
    seconds: float,
    ask: Callable[[], None] | None = None,
) -> float:
    """Post a transfer and wait until it is complete; return the seconds that it took.

    :param ask: called after :data:`ASK_SECONDS`, and if NIXL then reports an error.
    """
    began = time.monotonic()
    ask_at = began + ASK_SECONDS
    state, arrived = agent.transfer(handle), target is None
    asks = [ask] if ask else []

    def done() -> bool:
        # Poll both agents in turn, because they make progress only when polled.
        nonlocal state, arrived
        if asks and time.monotonic() > ask_at:
            asks.pop()()
        if state != "DONE":
            state = agent.check_xfer_state(handle)
        if target is not None and not arrived:
            arrived = target.check_remote_xfer_done(agent.name, b"hierarchy")
        return state == "DONE" and arrived

    remedy = "read the workers' logs"
    try:
        wait_until(done, f"the leg {name}", seconds=seconds, remedy=lambda: f"its state is {state}; {remedy}")
    except NixlError:
        if ask is not None:
            ask()
        raise
    return time.monotonic() - began


def _first_wrong(agent: NixlAgent, end: Buffer, content: bytes, seconds: float) -> int | None:
    """Return the offset of the first wrong byte at the end of a leg; None: every byte is right.

    :param seconds: the time in which the bytes may still arrive.
    """
    deadline = time.monotonic() + seconds
    while (content_read := end.read()) != content:
        if time.monotonic() >= deadline:
            pairs = enumerate(zip(content_read, content, strict=False))
            return next((at for at, pair in pairs if pair[0] != pair[1]), len(content_read))
        agent.get_new_notifs()  # an agent may make progress only when it is polled
    return None


def judge_legs(legs: Sequence[Leg]) -> Judgement:
    """Judge the way of the bytes: the first leg that delivered wrong bytes, or that another backend moved."""
    for leg in legs:
        if leg.wrong is not None:
            return Judgement(
                Verdict.CORRUPT,
                f"{leg.name} by {leg.backend}: of {SIZE} bytes the first wrong one is at offset {leg.wrong}",
                f"do not use {leg.backend} in an agent with several backends, and keep the workers' logs",
            )
        if leg.used != BACKENDS[leg.backend].PLUGIN:
            return Judgement(
                Verdict.FAIL,
                f"{leg.name}: NIXL uses {leg.used}, although {leg.backend} was chosen",
                "create one agent for each backend",
            )
    times = ", ".join(f"{leg.name} by {leg.backend} in {leg.seconds * 1000:.3g} ms" for leg in legs)
    return Judgement(Verdict.PASS, f"{SIZE} bytes are right after each leg: {times}")
