# SPDX-License-Identifier: Apache-2.0
"""What a proof makes of attempts that fail, are late or succeed. ``test_transfers_arrive.py`` moves bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl.core.errors import NixlPluginError, NotApplicableError
from pytest_nixl.core.resource_limits import MEMORY_REMEDY
from pytest_nixl.measure import transfer_proof
from pytest_nixl.measure.transfer_proof import GPUS, ProofsInAdvance, Prover, default_settings, provable, steering_names
from pytest_nixl.model.transfer_proof import PROOF_BYTES, TransferProof
from pytest_nixl.processes.worker_errors import NixlAbsentError, WorkerDiedError, WorkerHungError

Answer = Callable[[frozenset[str]], tuple[str, bool, float]]


class Clock:
    """A clock that only attempts move."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def limits() -> list[float]:
    """The time in seconds that each attempt may take for a step."""
    return []


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch, limits: list[float]) -> Callable[[Answer], list[frozenset[str]]]:
    """Return a function that replaces attempts: by fault, lateness and seconds for the variables that are not set."""
    clock = Clock()
    monkeypatch.setattr(transfer_proof, "time", clock)
    for name in steering_names(os.environ):
        monkeypatch.delenv(name)

    def replace_by(answer: Answer) -> list[frozenset[str]]:
        tried: list[frozenset[str]] = []

        def attempt(
            prover: Prover, backend: str, memory: Any, settings: Any, unset: Collection[str] = ()
        ) -> TransferProof:
            tried.append(frozenset(unset))
            limits.append(settings.timeout)
            fault, late, seconds = answer(frozenset(unset))
            clock.now += seconds
            return TransferProof(backend, str(memory), fault, late=late)

        monkeypatch.setattr(Prover, "_attempt", attempt)
        return tried

    return replace_by


def prove() -> TransferProof:
    proof = Prover().prove("UCX")
    assert proof is not None
    return proof


TLS = (("UCX_TLS", "x"),)
HUNG = ("it did not answer", True, 60.0)


@pytest.mark.parametrize(
    ("names", "answer", "expected", "count"),
    [
        (["UCX_TLS"], lambda unset: ("", False, 1.0), {}, 1),
        # A busy host misses the deadline without variables too: that attempt takes half as long as it.
        (["UCX_TLS"], lambda unset: ("", False, 30.0) if unset else HUNG, {"fault": HUNG[0], "late": True}, 2),
        (["UCX_TLS"], lambda unset: ("", False, 1.0) if unset else HUNG, {"fault": HUNG[0], "culprits": TLS}, 2),
        (["UCX_TLS"], lambda unset: ("without" if unset else "with", False, 1.0), {"fault": "with", "bare": "without"},
         2),
        (["UCX_TLS", "UCX_LOG_LEVEL", "LD_LIBRARY_PATH"],
         lambda unset: (f"{len(unset)}", False, 1.0), {"fault": "0", "bare": "3"}, 3),
        (  # without the variable that says where libraries are, nothing is there
            ["LD_LIBRARY_PATH", "UCX_TLS", "UCX_LOG_LEVEL"],
            lambda unset: ("" if "UCX_TLS" in unset and "LD_LIBRARY_PATH" not in unset else "no library", False, 1.0),
            {"fault": "no library", "culprits": TLS}, 6,
        ),
        (["UCX_TLS", "UCX_NET_DEVICES"], lambda unset: ("" if unset else "refused", False, 1.0),
         {"fault": "refused", "culprits": (("UCX_NET_DEVICES", "x"),), "together": TLS}, 4),
        (["FI_PROVIDER", "LD_LIBRARY_PATH"],
         lambda unset: ("" if unset == {"FI_PROVIDER"} else "refused", False, 1.0),
         {"fault": "refused", "culprits": (("FI_PROVIDER", "x"),)}, 3),
        (["LD_LIBRARY_PATH"], lambda unset: ("refused", False, 1.0), {"fault": "refused", "bare": "refused"}, 2),
        (["UCX_SECRET_TOKEN"], lambda unset: ("" if unset else "refused", False, 1.0),
         {"fault": "refused", "culprits": (("UCX_SECRET_TOKEN", "***"),)}, 2),
    ],
)  # fmt: skip
def test_a_fault_is_that_of_a_variable_without_which_bytes_arrive_or_of_the_host(
    attempts: Callable[[Answer], list[frozenset[str]]], monkeypatch: pytest.MonkeyPatch, names: list[str],
    answer: Answer, expected: dict[str, Any], count: int,
) -> None:  # fmt: skip
    for name in names:
        monkeypatch.setenv(name, "x")
    tried = attempts(answer)
    assert prove() == TransferProof("UCX", "DRAM:DRAM", **expected)
    assert len(tried) == count


def test_search_ends_in_time_and_blames_what_it_has_seen(
    attempts: Callable[[Answer], list[frozenset[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"UCX_X{number}" for number in range(16)]
    for name in names:
        monkeypatch.setenv(name, "1")
    tried = attempts(lambda unset: ("" if {"UCX_X3", "UCX_X9"} <= unset else "refused", False, 6.0))
    proof = prove()
    assert {"UCX_X3", "UCX_X9"} <= set(proof.variables)
    assert len(tried) == 5, "the last begins within 20 s of the search"


@pytest.mark.parametrize(("seconds", "limit"), [(0.1, 5.0), (1.0, 20.0), (4.0, 60.0)])
def test_an_attempt_of_a_search_may_take_far_longer_than_needed(
    attempts: Callable[[Answer], list[frozenset[str]]], limits: list[float], monkeypatch: pytest.MonkeyPatch,
    seconds: float, limit: float,
) -> None:  # fmt: skip
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.setenv(name, "x")
    attempts(lambda unset: ("" if "UCX_TLS" in unset else "refused", False, seconds))
    assert prove().culprits == (("UCX_TLS", "x"),)
    assert limits[:2] == [60.0, 60.0]
    assert set(limits[2:]) == {limit}


@pytest.mark.parametrize("error", ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_DEVICE_UNAVAILABLE"])
def test_gpu_that_other_processes_occupy_is_no_fault(
    attempts: Callable[[Answer], list[frozenset[str]]], error: str
) -> None:
    attempts(lambda unset: (f"GPU 0: {error}", False, 1.0))
    assert Prover().prove("UCX", GPUS) is None
    assert prove().fault


def test_each_backend_that_moves_host_memory_is_tried_with_gpus(
    attempts: Callable[[Answer], list[frozenset[str]]],
) -> None:
    attempts(lambda unset: ("", False, 1.0))
    proofs = ProofsInAdvance(["POSIX", "UCX", "LIBFABRIC"]).results(gpus=True)
    of_host = [("POSIX", "DRAM:FILE"), ("UCX", "DRAM:DRAM"), ("LIBFABRIC", "DRAM:DRAM")]
    assert [(proof.backend, proof.memory) for proof in proofs] == [
        *of_host, ("UCX", "VRAM:VRAM"), ("LIBFABRIC", "VRAM:VRAM")
    ]  # fmt: skip


def test_a_backend_without_this_memory_has_no_proof(attempts: Callable[[Answer], list[frozenset[str]]]) -> None:
    def refuse(unset: frozenset[str]) -> tuple[str, bool, float]:
        raise NotApplicableError("it does not have this memory")

    attempts(refuse)
    assert ProofsInAdvance(["POSIX", "UCX"]).results(gpus=True) == ()


def test_prover_that_was_stopped_starts_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_proof, "supervisor", lambda: pytest.fail("a worker was started"))
    prover = Prover()
    prover.stop()
    proof = prover.prove("UCX")
    assert proof is not None
    assert proof.late


class ProofWorker:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def output(self) -> str:
        return "moved"


class Scene:
    """Two workers that move bytes as a test says. They are doubles, so that each step fails in each way.

    :ivar log: what was started, moved and ended.
    :ivar corruption: what is wrong with the bytes, by the operation.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[object] = []
        self.corruption: dict[str, str] = {}
        self.errors: dict[str, Exception] = {}
        self.pids = (os.getpid(), 0)
        scene = self

        class Launch:
            def __init__(self, hosts: Any, settings: Any, backend: Any, memory: Any, size: int) -> None:
                scene.take("launch", backend.NAME, str(memory), size, settings.timeout)
                assert hosts[0] is hosts[1]
                self.backend = SimpleNamespace(transports=lambda log, op, *_: (f"{log} by {op}", "cma"))
                self.initiator, self.target = (SimpleNamespace(worker=ProofWorker(pid)) for pid in scene.pids)

            def kill(self) -> None:
                scene.log.append("killed")

        class Link:
            def __init__(self, relaunch: Any, launch: Launch, row: Any, settings: Any) -> None:
                self._row = row

            def move(self, size: int) -> str | None:
                scene.take(self._row.op, self._row.backend, str(self._row.memory), size, self._row.block)
                return scene.corruption.get(self._row.op)

        for name, double in {
            "Launch": Launch, "Link": Link, "supervisor": lambda: None, "obstacle": lambda: "of this host",
            "obstacle_between": lambda first, other: f"between {first.pid} and {other.pid}",
            "libraries_of_nixl": lambda maps: ["/lib/libucp.so", "/lib/libnixl.so"],
        }.items():  # fmt: skip
            monkeypatch.setattr(transfer_proof, name, double)
        for name in steering_names(os.environ):
            monkeypatch.delenv(name)

    def take(self, step: str, *values: object) -> None:
        self.log.append((step, *values))
        if step in self.errors:
            raise self.errors[step]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


STEPS = [
    ("launch", "UCX", "DRAM:DRAM", PROOF_BYTES, 60.0),
    *[(op, "UCX", "DRAM:DRAM", PROOF_BYTES, PROOF_BYTES) for op in ("WRITE", "READ")],
]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_proof_moves_bytes_each_way_and_says_how(scene: Scene, swapped: bool) -> None:
    if swapped:
        scene.pids = scene.pids[::-1]
    first, other = scene.pids
    assert prove() == TransferProof(
        "UCX", "DRAM:DRAM", transports=("moved by WRITE", "cma", "moved by READ"),
        obstacle=f"between {first} and {other}", libraries=("/lib/libucp.so", "/lib/libnixl.so"),
    )  # fmt: skip
    assert scene.log == [*STEPS, "killed"]


DIED = WorkerDiedError("it died", "look", "")
DIED.last_line = "no memory"


@pytest.mark.parametrize(
    ("step", "error", "expected"),
    [
        ("launch", DIED, {"fault": "it died; its last line: no memory", "remedy": "look"}),
        ("launch", NixlAbsentError("no NIXL", "install it"),
         {"fault": "no NIXL", "remedy": "install it", "absent": True}),
        ("READ", WorkerHungError("it hung", "wait"), {"fault": "it hung", "remedy": "wait", "late": True}),
        ("WRITE", NixlPluginError("it failed", "turn it"), {"fault": "it failed", "remedy": "turn it"}),
    ],
)  # fmt: skip
def test_a_proof_that_fails_has_the_reason_of_the_worker(
    scene: Scene, step: str, error: Exception, expected: dict[str, Any]
) -> None:
    scene.errors[step] = error
    assert prove() == TransferProof("UCX", "DRAM:DRAM", obstacle="of this host", **{"bare": "", **expected})
    assert scene.log.count("killed") == (step != "launch")


@pytest.mark.parametrize(("op", "moves"), [("WRITE", 1), ("READ", 2)])
def test_a_proof_with_wrong_bytes_ends_at_once(scene: Scene, op: str, moves: int) -> None:
    scene.corruption[op] = "3 bytes are wrong"
    assert prove() == TransferProof("UCX", "DRAM:DRAM", f"{op}: 3 bytes are wrong")
    assert scene.log == [*STEPS[: 1 + moves], "killed"]


def test_what_a_limit_of_this_host_forbids_is_not_blamed_on_a_variable(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    scene.errors["launch"] = NixlPluginError("there is no memory", MEMORY_REMEDY)
    assert prove().fault == "there is no memory"
    assert len(scene.log) == 1
    scene.errors["launch"] = NixlPluginError("there is no memory", "another")
    assert prove().bare == "there is no memory"
    assert len(scene.log) == 3


def test_backends_that_need_a_server_are_not_proven() -> None:
    assert provable(["UCX", "OBJ", "POSIX", "AZURE_BLOB", "LIBFABRIC"]) == ("UCX", "POSIX", "LIBFABRIC")


@pytest.mark.parametrize(
    ("preloaded", "seconds"), [("/opt/ucx/lib/libucp.so.0", 15.0), ("/opt/libother.so", 60.0), ("", 60.0)]
)
def test_an_agent_with_a_preloaded_ucx_is_not_waited_for_as_long(
    monkeypatch: pytest.MonkeyPatch, preloaded: str, seconds: float
) -> None:
    monkeypatch.setenv("LD_PRELOAD", preloaded)
    assert default_settings().start_timeout == seconds
