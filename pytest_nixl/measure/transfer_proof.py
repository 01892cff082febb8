# SPDX-License-Identifier: Apache-2.0
"""Prove that bytes can be moved on this host: move a few between two workers, and if that fails, find out why.

The variables that keep bytes from arriving are found by trying smaller and smaller sets of them.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pytest_nixl.core.errors import NixlPluginError, NotApplicableError
from pytest_nixl.core.redaction import recorded
from pytest_nixl.core.resource_limits import REMEDIES_OF_LIMITS, start_fault
from pytest_nixl.host.loaded_libraries import libraries_of_nixl
from pytest_nixl.measure.launch import Launch
from pytest_nixl.measure.link import Link, obstacle_between
from pytest_nixl.model.memory import HOST, OPS, MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import OPTIONS, Settings
from pytest_nixl.model.transfer_proof import PROOF_BYTES, TransferProof
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.nixl.backends.storage import OBJECT_PLUGINS
from pytest_nixl.nixl.worker.foreign_memory import obstacle
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import SupervisorClient, supervisor
from pytest_nixl.processes.worker_errors import NixlAbsentError, WorkerDiedError
from pytest_nixl.processes.worker_process import Process

#: Variables that steer NIXL, its libraries, or what the loader gives them.
_STEERING = re.compile(
    r"(?:UCX|NIXL|FI|OFI|CUDA|NVIDIA|RDMAV|IBV|MLX5|EFA|GDRCOPY)_\w+|GLIBC_TUNABLES|LD_PRELOAD|LD_LIBRARY_PATH"
)
#: Workers that move bytes never have these.
_UNUSED = re.compile(r"NIXL_ETCD_\w+")
#: Variables without which NIXL or its libraries may not be there at all.
SEARCH_PATHS = frozenset({"LD_LIBRARY_PATH", "NIXL_PLUGIN_DIR", "UCX_MODULE_DIR", "FI_PROVIDER_PATH"})

#: The time in seconds in which an agent with its backend has to be created: two copies of UCX may hang it.
AGENT_SECONDS = 60.0
#: The same if LD_PRELOAD names a library of UCX: with another copy than NIXL's own the agent usually hangs.
_PRELOADED_SECONDS = 15.0
#: The time in seconds for all attempts of a search for variables. It ends between two attempts.
SEARCH_SECONDS = 20.0
#: An attempt of a search may take this many times as long as one without variables did, and at least so many seconds.
_TIMES_AS_LONG, _LEAST_SECONDS = 20.0, 5.0
#: How many times as fast an attempt without variables has to be, so that a missed deadline is not blamed on the host.
_CLEARLY_FASTER = 4.0
GPUS = MemoryPair("VRAM", "VRAM")
#: Errors of a GPU that other processes occupy, as an engine that runs does: bytes of it cannot be moved now.
_OCCUPIED = ("CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_DEVICE_UNAVAILABLE")


def steering_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the variables that steer NIXL, in alphabetical order."""
    return tuple(sorted(name for name in environ if _STEERING.fullmatch(name) and not _UNUSED.fullmatch(name)))


class SearchEndedError(Exception):
    """There is no time for another attempt."""


def smallest_set(names: Sequence[str], suffices: Callable[[frozenset[str]], bool]) -> tuple[str, ...]:
    """Return a set of names that suffices and of which none can be left out, by delta debugging.

    :param names: names that suffice together.
    :param suffices: returns whether a set of them does; it is not asked twice about the same set. If it raises
        :class:`SearchEndedError`, the smallest set so far is returned, which may be larger than necessary.
    """
    answers: dict[frozenset[str], bool] = {}
    ended = False

    def ask(part: Sequence[str]) -> bool:
        nonlocal ended
        key = frozenset(part)
        if key not in answers and not ended:
            try:
                answers[key] = suffices(key)
            except SearchEndedError:
                ended = True
        return answers.get(key, False)

    candidates, count = tuple(names), 2
    while len(candidates) > 1 and not ended:
        parts = [
            candidates[len(candidates) * number // count : len(candidates) * (number + 1) // count]
            for number in range(count)
        ]
        rests = [tuple(name for name in candidates if name not in part) for part in parts] if count > 2 else []
        smaller = next(filter(ask, [*parts, *rests]), None)
        if smaller is not None:
            count = max(count - 1, 2) if smaller in rests else 2
            candidates = smaller
        elif count < len(candidates):
            count = min(2 * count, len(candidates))
        else:
            break
    return candidates


def find_culprits(
    names: Iterable[str], moves_without: Callable[[frozenset[str]], bool]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the smallest set of variables without which bytes arrive, and what is a fault only together with it.

    :param names: variables without which bytes arrive, though they do not arrive with all of them.
    :param moves_without: returns whether bytes arrive if these variables are not set; it raises
        :class:`SearchEndedError` if there is no time for another attempt.
    """
    every = tuple(names)
    culprits = smallest_set(every, moves_without)
    remaining = tuple(name for name in every if name not in culprits)
    try:
        if not remaining or not moves_without(frozenset(remaining)):
            return culprits, ()
    except SearchEndedError:
        return culprits, ()
    # The culprits alone are harmless: find the others that make them a fault.
    partners = smallest_set(remaining, lambda part: not moves_without(frozenset(remaining) - part))
    return culprits, partners


class _ProofHost(LocalHost):
    """Starts workers of this host with all variables of this process but some. They are forked where that is the same.

    :param unset: the variables that they do not have.
    """

    def __init__(self, supervisor: SupervisorClient, unset: Collection[str]) -> None:
        super().__init__(supervisor)
        self._unset = dict.fromkeys(unset)

    def _new_process(self, role: str, environment: Mapping[str, str | None], start_timeout: float) -> Process:
        # The speed of these workers does not count, so their role is not one that is always executed.
        return super()._new_process(f"proof-{role}", {**environment, **self._unset}, start_timeout)


def default_settings() -> Settings:
    """Return the settings of a run without options, but with the doctor's deadline for an agent."""
    settings = Settings(**{option.field: option.usual for option in OPTIONS}, sources={}, ignored=())
    preloaded = "libuc" in os.environ.get("LD_PRELOAD", "")
    return replace(settings, start_timeout=_PRELOADED_SECONDS if preloaded else AGENT_SECONDS)


def provable(backends: Sequence[str]) -> tuple[str, ...]:
    """Return the backends that move bytes without a server."""
    return tuple(name for name in backends if BACKENDS[name].PLUGIN not in OBJECT_PLUGINS)


class Prover:
    """Moves bytes between two workers with the variables of this process, and finds those that keep them from arriving.

    :param settings: the settings of the run, for its deadlines; None for the defaults.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or default_settings()
        self._stopped = False

    def stop(self) -> None:
        """Make no further attempt."""
        self._stopped = True

    def prove(self, backend: str, memory: MemoryPair = HOST) -> TransferProof | None:
        """Move bytes each way between two workers, and compare them.

        If they do not arrive, find the variables without which they do, and stop after :data:`SEARCH_SECONDS`.

        :param backend: the backend; one of storage has one worker and a file.
        :param memory: the memory types of initiator and target.
        :returns: the result; None if the backend or a worker does not have this memory, or if other processes occupy
            the GPU.
        """
        if BACKENDS[backend].STORAGE:
            memory = MemoryPair(memory.initiator, "FILE")
        try:
            begin = time.monotonic()
            proof = self._attempt(backend, memory, self._settings)
            if memory.on_gpu and any(error in proof.fault for error in _OCCUPIED):
                return None
            if not proof.fault or proof.remedy in REMEDIES_OF_LIMITS:
                return proof
            return self._search(proof, memory, time.monotonic() - begin)
        except NotApplicableError:
            return None

    def _attempt(
        self, backend: str, memory: MemoryPair, settings: Settings, unset: Collection[str] = ()
    ) -> TransferProof:
        """Move bytes once.

        :raises NotApplicableError: the backend or a worker does not have this memory.
        """
        proof = TransferProof(backend, str(memory))
        if self._stopped:
            return replace(proof, fault="it was not tried", late=True)
        launch: Launch | None = None
        try:
            host = _ProofHost(supervisor(), unset)
            launch = Launch((host, host), settings, BACKENDS[backend], memory, PROOF_BYTES)
            transports: list[str] = []
            for op in OPS:
                link = Link(_no_other_launch, launch, RowKey(backend, op, memory, PROOF_BYTES), settings)
                corruption = link.move(PROOF_BYTES)
                if corruption is not None:
                    return replace(proof, fault=f"{op}: {corruption}")
                log = launch.initiator.worker.output()
                transports += launch.backend.transports(log, op, PROOF_BYTES, memory)
            workers = dict.fromkeys((launch.initiator.worker, launch.target.worker))
            return replace(
                proof,
                transports=tuple(dict.fromkeys(transports)),
                obstacle=obstacle_between(launch.initiator.worker, launch.target.worker),
                libraries=tuple(dict.fromkeys(path for worker in workers for path in _libraries(worker.pid))),
            )
        except NotApplicableError:
            raise
        except NixlPluginError as error:
            absent = isinstance(error, NixlAbsentError)
            fault = error.with_last_line if isinstance(error, WorkerDiedError) else error.reason
            return replace(proof, fault=fault, remedy=error.remedy, late=error.late, absent=absent, obstacle=obstacle())
        finally:
            if launch is not None:
                launch.kill()

    def _search(self, proof: TransferProof, memory: MemoryPair, seconds: float) -> TransferProof:
        """Return a proof that failed with the variables to blame, or why the bytes do not arrive without any either.

        :param seconds: the time of the attempt that failed.
        """
        settings, bare = self._settings, ""
        end = time.monotonic() + SEARCH_SECONDS
        for unset in _bare(steering_names(os.environ)):
            begin = time.monotonic()
            control = self._attempt(proof.backend, memory, settings, unset)
            taken = time.monotonic() - begin
            if not control.fault:
                break
            bare = bare or control.fault
        else:
            return replace(proof, bare=bare)
        if proof.late and taken * _CLEARLY_FASTER > seconds:
            return proof
        limit = max(_LEAST_SECONDS, _TIMES_AS_LONG * taken)
        hurried = replace(
            settings, timeout=min(limit, settings.timeout), start_timeout=min(limit, settings.start_timeout)
        )

        def moves_without(part: frozenset[str]) -> bool:
            if part == frozenset(unset):
                return True
            if time.monotonic() > end or self._stopped:
                raise SearchEndedError
            return not self._attempt(proof.backend, memory, hurried, part).fault

        culprits, together = find_culprits(unset, moves_without)
        return replace(proof, late=False, culprits=_values(culprits), together=_values(together))


class ProofsInAdvance:
    """Proofs of host memory that are made in a thread, while the caller reads the facts of this host.

    :param backends: the backends to prove; object stores are left out.
    """

    def __init__(self, backends: Sequence[str]) -> None:
        self._prover: Prover | None = None
        self._backends = provable(backends)
        self._proofs: list[TransferProof] = []
        self._error: Exception | None = None
        # A daemon, so that Ctrl-C does not wait for it.
        self._thread = threading.Thread(target=self._prove, name="transfer-proofs", daemon=True)
        self._closed = False
        try:
            self._thread.start()
        except RuntimeError:
            raise NixlPluginError(*start_fault()) from None

    def results(self, *, gpus: bool) -> tuple[TransferProof, ...]:
        """Wait for the proofs, and return them.

        :param gpus: whether this host has GPUs: their memory is then proven too, with backends that move host memory.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        if gpus and self._prover is not None:
            able = [proof.backend for proof in self._proofs if not proof.fault and not BACKENDS[proof.backend].STORAGE]
            self._proofs += filter(None, (self._prover.prove(backend, GPUS) for backend in able))
        return tuple(self._proofs)

    def close(self) -> None:
        """Make no further attempt."""
        self._closed = True
        if self._prover is not None:
            self._prover.stop()

    def _prove(self) -> None:
        try:
            self._prover = Prover()
            for backend in self._backends:
                proof = None if self._closed else self._prover.prove(backend)
                self._proofs += [proof] if proof is not None else []
        except Exception as error:  # the caller raises it
            self._error = error


def _no_other_launch(launch: Launch) -> Launch:
    raise AssertionError("a proof has one launch")


def _libraries(pid: int) -> list[str]:
    with suppress(OSError):
        return libraries_of_nixl(Path(f"/proc/{pid}/maps").read_text(errors="replace"))
    return []


def _bare(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield sets of variables to unset: all, and all but those that say where libraries are."""
    if names:
        yield tuple(names)
    remaining = tuple(name for name in names if name not in SEARCH_PATHS)
    if remaining and len(remaining) < len(names):
        yield remaining


def _values(names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, recorded(name, os.environ.get(name, ""))) for name in names)
