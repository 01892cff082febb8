# SPDX-License-Identifier: Apache-2.0
"""Write bytes from one agent to another, to prove that the exchanged metadata works."""

from __future__ import annotations

import itertools

from pytest_nixl import Buffer, NixlAgent, wait_until

SIZE = 64 << 10
_seeds = itertools.count(1)


def registered(agent: NixlAgent, *, source: bool = False) -> Buffer:
    """Allocate and register memory of the type that the run requests for targets, or with ``source`` for initiators."""
    buffer = agent.allocate_asked(SIZE, initiator=source)
    agent.register(buffer)
    return buffer


def write_and_compare(writer: NixlAgent, owner: NixlAgent, target: Buffer, seconds: float) -> None:
    """Write new bytes to another agent's memory, and compare every byte there.

    :param writer: the initiator.
    :param owner: the agent that owns ``target``.
    :param seconds: the deadline of the transfer.
    :raises NixlPluginError: the transfer missed its deadline, or NIXL reported an error.
    """
    seed = next(_seeds)
    source = registered(writer, source=True)
    source.fill(seed).result()
    target.fill(seed, inverted=True).result()
    local = writer.get_xfer_descs([source.descriptor()], source.memory)
    remote = writer.get_xfer_descs([target.descriptor()], target.memory)
    text = b"written %d" % seed
    writer.connect_to(owner)
    handle = writer.initialize_xfer("WRITE", local, remote, owner.name, text)
    done, notified = writer.transfer(handle) == "DONE", False

    def delivered() -> bool:
        # Poll both in turn, because agents make progress only when polled.
        nonlocal done, notified
        done = done or writer.check_xfer_state(handle) == "DONE"
        notified = notified or owner.check_remote_xfer_done(writer.name, text)
        return done and notified

    wait_until(
        delivered,
        f"a WRITE of {SIZE} bytes from {writer.name} to {owner.name}, and its notification there",
        seconds=seconds,
        remedy=lambda: (
            f"check whether the two hosts reach each other: the transfer is {'' if done else 'not '}done at "
            f"{writer.name}, and its notification has {'' if notified else 'not '}arrived at {owner.name}"
        ),
    )
    writer.release_xfer_handle(handle)
    wrong = target.compare(seed)
    assert wrong is None, f"the bytes at {owner.name} differ from those that were sent: {wrong}"
