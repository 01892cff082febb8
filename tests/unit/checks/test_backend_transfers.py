# SPDX-License-Identifier: Apache-2.0
"""One agent with several backends, in a NIXL in memory: each transfer, and the faults that the real NIXL lacks."""

from __future__ import annotations

import secrets
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.doubled_nixl import DoubledNixl

from pytest_nixl.checks.metadata import several_backends
from pytest_nixl.checks.metadata.several_backends import SIZE, BackendUse, add_storage, use_each
from pytest_nixl.core import polling
from pytest_nixl.core.errors import LateError, NotApplicableError
from pytest_nixl.model.memory import MemoryPair

TO_AGENT, TO_FILE = MemoryPair("DRAM", "DRAM"), MemoryPair("DRAM", "FILE")
WROTE = [
    BackendUse("UCX", "UCX", TO_AGENT, ("UCX WRITE 65536 DRAM:DRAM",), None),
    BackendUse("LIBFABRIC", "LIBFABRIC_PLUGIN", TO_AGENT, ("LIBFABRIC WRITE 65536 DRAM:DRAM",), None),
    BackendUse("POSIX", "POSIX", TO_FILE, ("POSIX WRITE 65536 DRAM:FILE",), None),
]
WRONG = {"wrong_bytes": SIZE, "offset": 0}
LATE = (
    "waited 9 s for transfers by UCX and LIBFABRIC and POSIX of one agent: each state is {{'UCX': 'PROC', 'LIBFABRIC': "
    "'PROC', 'POSIX': 'PROC'}}\nremedy: the states at the end: {{'UCX': '{}', 'LIBFABRIC': '{}', 'POSIX': '{}'}}; read "
    "the workers' logs"
)
RANDOM_BITS = (5, 6, 7)


def use(nixl: DoubledNixl, monkeypatch: pytest.MonkeyPatch) -> list[BackendUse]:
    """Write by three backends of a doubled NIXL, of which two move bytes to another agent."""

    def transports(name: str) -> Any:
        return lambda log, op, size, memory: (f"{name} {op} {size} {memory}",) * ("it starts" in log)

    backends = {
        name: SimpleNamespace(STORAGE=name == "POSIX", PLUGIN=plugin, transports=transports(name))
        for name, plugin in (("UCX", "UCX"), ("LIBFABRIC", "LIBFABRIC_PLUGIN"), ("POSIX", "POSIX"))
    }
    seeds = iter(RANDOM_BITS)
    monkeypatch.setattr(several_backends, "BACKENDS", backends)
    monkeypatch.setattr(polling, "time", nixl.clock)
    monkeypatch.setattr(secrets, "randbits", lambda count: next(seeds) + (count - 63))
    initiator, target = nixl.start_each(["initiator", "target"])
    return use_each(initiator, target, ["UCX", "LIBFABRIC", "POSIX"], directory="/d", seconds=9)


@pytest.mark.parametrize(
    ("done_after", "delivered_after"),
    [(0.02, 0.05), (0.05, 0.02), (0, 0.05)],
    ids=["done first", "notified first", "done at once"],
)
@pytest.mark.parametrize("backend", ["UCX", "LIBFABRIC"])
def test_each_backend_moves_its_bytes(
    backend: str, done_after: float, delivered_after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    nixl = DoubledNixl(backend=backend)
    nixl.done_after, nixl.delivered_after, nixl.threads = done_after, delivered_after, False
    assert use(nixl, monkeypatch) == WROTE
    assert nixl.initialized == [
        ("initiator", "target", b"by UCX", "UCX"),
        ("initiator", "target", b"by LIBFABRIC", "LIBFABRIC_PLUGIN"),
        ("initiator", "initiator", b"", "POSIX"),
    ]
    source: Any = ("initiator", SIZE, "DRAM", {})
    file = ("initiator", SIZE, "FILE", {"directory": "/d", "alignment": 4096})
    assert nixl.allocated == [*[source, ("target", SIZE, "DRAM", {})] * 2, source, file]
    assert sorted(buffer.content for buffer in nixl.buffers.values()) == [b"5", b"5", b"6", b"6", b"7", b"7"]
    assert (nixl.moved, nixl.released) == (3, 3)


@pytest.mark.parametrize(
    ("fault", "uses"),
    [
        ("spoils-2", [replace(WROTE[0], wrong=WRONG), WROTE[1], WROTE[2]]),
        ("ignores-LIBFABRIC_PLUGIN", [WROTE[0], replace(WROTE[1], used="ANOTHER"), WROTE[2]]),
    ],
)
def test_wrong_bytes_and_another_backend_are_seen(
    fault: str, uses: list[BackendUse], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert use(DoubledNixl(fault), monkeypatch) == uses


@pytest.mark.parametrize(
    ("fault", "states"),
    [
        ("stalls-POSIX", ("DONE", "DONE", "PROC")),
        ("unnotified", ("DONE", "DONE", "DONE")),
    ],
)
def test_transfers_that_are_late_are_named_with_their_states(
    fault: str, states: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LateError) as late:
        use(DoubledNixl(fault), monkeypatch)
    assert str(late.value) == LATE.format(*states)


def test_the_backend_for_files_is_added_if_nixl_has_its_plugin() -> None:
    nixl = DoubledNixl()
    initiator: Any = nixl.start("initiator")
    add_storage(initiator)
    assert nixl.created == [("initiator", "POSIX")]
    nixl.plugins = ["UCX", "GDS"]
    with pytest.raises(NotApplicableError, match=r"^this NIXL has no plugin POSIX: it has UCX, GDS$"):
        add_storage(initiator)
