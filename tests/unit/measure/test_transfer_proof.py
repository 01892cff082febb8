# SPDX-License-Identifier: Apache-2.0
"""What a proof makes of attempts that fail, are late or succeed. ``test_transfers_arrive.py`` moves bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any

import pytest

from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.measure import transfer_proof
from pytest_nixl.measure.transfer_proof import GPUS, ProofsInAdvance, Prover, default_settings, provable, steering_names
from pytest_nixl.model.transfer_proof import TransferProof

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


def test_bytes_that_arrive_need_one_attempt(
    attempts: Callable[[Answer], list[frozenset[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    tried = attempts(lambda unset: ("", False, 1.0))
    assert prove().fault == ""
    assert tried == [frozenset()]


def test_deadline_that_a_busy_host_misses_without_variables_too_is_only_late(
    attempts: Callable[[Answer], list[frozenset[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt without variables arrives, but takes half as long as the deadline that the first one missed."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    attempts(lambda unset: ("", False, 30.0) if unset else ("it did not answer", True, 60.0))
    proof = prove()
    assert proof.late
    assert proof.culprits == ()


def test_deadline_that_is_missed_only_with_a_variable_is_its_fault(
    attempts: Callable[[Answer], list[frozenset[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    attempts(lambda unset: ("", False, 1.0) if unset else ("it did not answer", True, 60.0))
    proof = prove()
    assert not proof.late
    assert proof.culprits == (("UCX_TLS", "tcp"),)


def test_variables_that_say_where_libraries_are_stay_if_nothing_is_there_without_them(
    attempts: Callable[[Answer], list[frozenset[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LD_LIBRARY_PATH", "UCX_TLS", "UCX_LOG_LEVEL"):
        monkeypatch.setenv(name, "x")
    attempts(
        lambda unset: (
            "" if "UCX_TLS" in unset and "LD_LIBRARY_PATH" not in unset else "no library or no transport", False, 1.0
        )
    )  # fmt: skip
    assert prove().culprits == (("UCX_TLS", "x"),)


def test_fault_without_any_variable_is_that_of_the_host(
    attempts: Callable[[Answer], list[frozenset[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    tried = attempts(lambda unset: ("with variables" if not unset else "without", False, 1.0))
    proof = prove()
    assert (proof.fault, proof.bare, proof.culprits) == ("with variables", "without", ())
    assert len(tried) == 2


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


def test_secret_of_an_unknown_variable_is_hidden(
    attempts: Callable[[Answer], list[frozenset[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_SECRET_TOKEN", "hunter2-hunter2")
    attempts(lambda unset: ("" if unset else "refused", False, 1.0))
    assert "hunter2" not in prove().steering_fault


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
