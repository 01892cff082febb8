# SPDX-License-Identifier: Apache-2.0
"""Bytes that one agent writes to another: what metadata is exchanged for."""

from __future__ import annotations

import itertools

from pytest_nixl import Buffer, NixlAgent, wait_until

SIZE = 64 << 10
_seeds = itertools.count(1)


def registered(agent: NixlAgent, *, source: bool = False) -> Buffer:
    """Make memory that an agent has registered: what a run asks for of targets, or of those that write to them."""
    buffer = agent.allocate_asked(SIZE, initiator=source)
    agent.register(buffer)
    return buffer


def write_and_compare(writer: NixlAgent, owner: NixlAgent, target: Buffer, seconds: float) -> None:
    """Write to another agent's memory, and compare there what arrived; every time with other bytes."""
    seed = next(_seeds)
    source = registered(writer, source=True)
    source.fill(seed).result()
    target.fill(seed, inverted=True).result()
    local = writer.get_xfer_descs([source.descriptor()], source.memory)
    remote = writer.get_xfer_descs([target.descriptor()], target.memory)
    said = b"written %d" % seed
    handle = writer.initialize_xfer("WRITE", local, remote, owner.name, said)
    done, told = writer.transfer(handle) == "DONE", False

    def delivered() -> bool:
        # Both are asked in turn, since both make progress only then.
        nonlocal done, told
        done = done or writer.check_xfer_state(handle) == "DONE"
        told = told or owner.check_remote_xfer_done(writer.name, said)
        return done and told

    wait_until(
        delivered,
        f"a WRITE of {SIZE} bytes from {writer.name} to {owner.name}, and its notification there",
        seconds=seconds,
        remedy=lambda: (
            f"{'it is done' if done else 'it is not done'} at {writer.name}, and "
            f"{'' if told else 'not '}announced at {owner.name}: see whether the two hosts reach each other"
        ),
    )
    writer.release_xfer_handle(handle)
    wrong = target.compare(seed)
    assert wrong is None, f"the bytes that arrived at {owner.name} are not those that were sent: {wrong}"
