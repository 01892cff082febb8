# SPDX-License-Identifier: Apache-2.0
"""Name the variable that keeps bytes from arriving in the error of a check, if no transfer of the run succeeds."""

from __future__ import annotations

import os

import pytest

from pytest_nixl.measure.steering_search import steering_names
from pytest_nixl.model.memory import HOST
from pytest_nixl.model.transfer_proof import TransferProof
from pytest_nixl.processes.worker_errors import WorkerError
from pytest_nixl.session.outcome import check_of
from pytest_nixl.session.requested_links import row_of
from pytest_nixl.session.run import Run

#: The proofs of this run by backend, each made once.
_PROOFS = pytest.StashKey[dict[str, "TransferProof | None"]]()


def name_steering_fault(item: pytest.Item, error: BaseException) -> None:
    """Add to the error of a worker that nothing can be moved with a variable, and that bytes arrive without it.

    The variable is searched once for each backend, by transfers between two workers of this host. No search is made
    after a row was measured, or if no variable steers NIXL.

    :param error: the error, whose reason and remedy are changed in place.
    """
    if not isinstance(error, WorkerError) or error.late or check_of(item) is None:
        return
    run, names = Run.of(item.config), steering_names(os.environ)
    if not names or any(name in error.reason for name in names) or not run.usable:
        return
    if any(result.summary is not None for result in run.found.results):
        return
    row = row_of(item)
    backend = row.plain_backend if row is not None else run.settings.backend[0]
    proof = _proof(run, backend)
    if proof is not None and proof.culprits:
        error.reason = f"{error.reason}; {proof.steering_fault}"
        error.remedy = proof.steering_remedy


def _proof(run: Run, backend: str) -> TransferProof | None:
    from pytest_nixl.measure.transfer_proof import Prover, provable

    proofs = run.config.stash.setdefault(_PROOFS, {})
    if backend not in proofs:
        proofs[backend] = Prover(run.settings).prove(backend, HOST) if provable([backend]) else None
    return proofs[backend]
