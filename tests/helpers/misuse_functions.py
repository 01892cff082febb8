# SPDX-License-Identifier: Apache-2.0
"""Functions that replace one call of the real NIXL in a worker: by one without a defect, or by one with a fault."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any


def _refuse() -> None:
    bindings = next(module for name, module in sys.modules.items() if name.endswith("._bindings") and "nixl" in name)
    raise bindings.nixlInvalidParamError("refused by the test")


def refuse_duplicates(agent: Any) -> None:
    """Let ``deregister_memory`` refuse a list that names a region twice, as a NIXL without the defect may do."""
    kind, original = type(agent), type(agent).deregister_memory

    def deregister_memory(self: Any, regions: Any, *arguments: Any, **named: Any) -> Any:
        listed = [regions[index][:2] for index in range(regions.descCount())]
        if len(set(listed)) != len(listed):
            _refuse()
        return original(self, regions, *arguments, **named)

    kind.deregister_memory = deregister_memory


def refuse_released_handles(agent: Any) -> None:
    """Let ``transfer`` refuse a handle that was released, as a NIXL without the defect may do."""
    kind = type(agent)
    post, release = kind.transfer, kind.release_xfer_handle
    # The handles themselves and not their ids, because Python gives the id of a handle that is gone to the next one.
    released: list[Any] = []

    def transfer(self: Any, handle: Any, *rest: Any, **named: Any) -> Any:
        if any(handle is released_handle for released_handle in released):
            _refuse()
        return post(self, handle, *rest, **named)

    def release_xfer_handle(self: Any, handle: Any) -> None:
        released.append(handle)
        release(self, handle)

    kind.transfer, kind.release_xfer_handle = transfer, release_xfer_handle


def refuse_deregistered_source(agent: Any) -> None:
    """Let ``transfer`` refuse a handle whose own memory was deregistered, as a NIXL without the defect may do."""
    kind = type(agent)
    make, post, deregister = kind.initialize_xfer, kind.transfer, kind.deregister_memory
    sources: dict[int, int] = {}
    gone: set[int] = set()

    def initialize_xfer(self: Any, op: str, local: Any, *arguments: Any, **named: Any) -> Any:
        handle = make(self, op, local, *arguments, **named)
        sources[id(handle)] = local[0][0]
        return handle

    def transfer(self: Any, handle: Any, *arguments: Any, **named: Any) -> Any:
        if sources[id(handle)] in gone:
            gone.clear()
            _refuse()
        return post(self, handle, *arguments, **named)

    def deregister_memory(self: Any, regions: Any, *arguments: Any, **named: Any) -> Any:
        gone.update(regions[index][0] for index in range(regions.descCount()))
        return deregister(self, regions, *arguments, **named)

    kind.initialize_xfer, kind.transfer, kind.deregister_memory = initialize_xfer, transfer, deregister_memory


def refuse_cut_metadata(agent: Any) -> None:
    """Let ``add_remote_agent`` refuse metadata that is shorter than before, as a NIXL without the defect may do."""
    kind, original = type(agent), type(agent).add_remote_agent
    lengths: list[int] = []

    def add_remote_agent(self: Any, metadata: bytes) -> Any:
        lengths.append(len(metadata))
        if len(metadata) < max(lengths):
            _refuse()
        return original(self, metadata)

    kind.add_remote_agent = add_remote_agent


def crash(agent: Any, method: str) -> None:
    """Let a method of the agent end the process with SIGSEGV."""

    def ends(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    setattr(type(agent), method, ends)


def refuse(agent: Any, method: str) -> None:
    """Let a method of the agent raise one of NIXL's errors."""
    setattr(type(agent), method, lambda *_, **__: _refuse())


def use_what_is_unmapped(agent: Any) -> None:
    """Let the process read memory that it has given back, as the thread that receives bytes may do."""
    from pytest_nixl.checks.faults.worker import traffic as fault_traffic

    original = fault_traffic.unmap

    def unmap(address: int, size: int) -> None:
        original(address, size)
        ctypes.string_at(address + size // 2, 1)

    setattr(fault_traffic, "unmap", unmap)  # noqa: B010 - the type checker allows no assignment to a function


def abort_in_fill(agent: Any) -> None:
    """Let the process abort when a pattern is written to its memory, as UCX ends a target that replies to the dead."""
    from pytest_nixl.nixl.worker import memory

    setattr(memory.DramBuffer, "fill", lambda *_, **__: os.abort())  # noqa: B010


def accept_every_transfer(agent: Any) -> None:
    """Let ``initialize_xfer`` cut the target's side to the length of its first descriptor that is registered: none."""
    kind, original = type(agent), type(agent).initialize_xfer

    def initialize_xfer(self: Any, op: str, local: Any, remote: Any, name: str, *arguments: Any, **named: Any) -> Any:
        shorter = self.get_xfer_descs([(local[0][0], 1024, 0)], "DRAM")
        other = self.get_xfer_descs([(remote[0][0], 1024, 0)], "DRAM")
        return original(self, op, shorter, other, name, *arguments, **named)

    kind.initialize_xfer = initialize_xfer


def never_fail(agent: Any) -> None:
    """Let transfers stay in flight once they have failed, as if NIXL did not notice the death of a peer."""
    kind = type(agent)

    def silent(original: Any) -> Any:
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            try:
                return original(self, *arguments, **named)
            except Exception:
                return "PROC"

        return call

    kind.transfer, kind.check_xfer_state = silent(kind.transfer), silent(kind.check_xfer_state)


def write_late(agent: Any) -> None:
    """Let ``release_xfer_handle`` wait for the transfer, and change a byte when a third agent is added."""
    kind = type(agent)
    make, add = kind.initialize_xfer, kind.add_remote_agent
    addresses: list[int] = []
    released: list[int] = []

    def initialize_xfer(self: Any, op: str, local: Any, *arguments: Any, **named: Any) -> Any:
        addresses.append(local[0][0] + local[0][1] - 1)
        return make(self, op, local, *arguments, **named)

    def release_xfer_handle(self: Any, handle: Any) -> None:
        wait_for(self, handle)
        released.append(1)

    def add_remote_agent(self: Any, *arguments: Any) -> Any:
        if released:
            byte = ctypes.c_uint8.from_address(addresses[0])
            byte.value ^= 255
        return add(self, *arguments)

    kind.initialize_xfer, kind.release_xfer_handle = initialize_xfer, release_xfer_handle
    kind.add_remote_agent = add_remote_agent


def wait_for(agent: Any, handle: Any) -> None:
    """Wait until a transfer is done."""
    while agent.check_xfer_state(handle) == "PROC":
        time.sleep(0.001)


def wait_before_release(agent: Any) -> None:
    """Let ``release_xfer_handle`` wait for its transfer, as a NIXL without the defect may do."""
    kind, original = type(agent), type(agent).release_xfer_handle

    def release_xfer_handle(self: Any, handle: Any) -> None:
        wait_for(self, handle)
        original(self, handle)

    kind.release_xfer_handle = release_xfer_handle


def fetch_until_known(agent: Any) -> None:
    """Let ``fetch_remote_metadata`` ask again if its request was lost, as a NIXL without the defect may do."""
    kind, original = type(agent), type(agent).fetch_remote_metadata

    def fetch_remote_metadata(self: Any, name: str, *arguments: Any, **named: Any) -> None:
        while not self.check_remote_metadata(name):
            original(self, name, *arguments, **named)
            until = time.monotonic() + 1
            while time.monotonic() < until and not self.check_remote_metadata(name):
                time.sleep(0.001)

    kind.fetch_remote_metadata = fetch_remote_metadata
