# SPDX-License-Identifier: Apache-2.0
"""Check that bytes arrive: two workers have moved some each way, with the variables of this process."""

from __future__ import annotations

from dataclasses import replace

from pytest_nixl.checks.doctor.check import Requirements, check, failed, not_applicable, passed, unknown, warned
from pytest_nixl.checks.doctor.libraries import READ_LOG, not_loaded, remedy_of_files, settings_of_files
from pytest_nixl.core.sentences import named
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.software import library
from pytest_nixl.judge.profiles import Profile
from pytest_nixl.judge.row import NO_CMA
from pytest_nixl.model.memory import OPS, MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.transfer_proof import PROOF_BYTES, TransferProof
from pytest_nixl.model.verdicts import Judgement

#: The library of each backend whose file is named: it is the one that moved the bytes.
_MOVER = {"UCX": "libucp", "LIBFABRIC": "libfabric"}


def with_transfers(facts: Facts, transfers: tuple[TransferProof, ...]) -> Facts:
    """Return facts with the results of transfers, and with the libraries of the processes that moved the bytes.

    A library that these processes have not loaded stays as another process with NIXL reported it.
    """
    moved = tuple(library(path) for path in dict.fromkeys(path for proof in transfers for path in proof.libraries))
    names = {loaded.name for loaded in moved}
    unmoved = tuple(loaded for loaded in facts.software.libraries if loaded.name not in names)
    return replace(facts, transfers=transfers, software=replace(facts.software, libraries=(*moved, *unmoved)))


@check("transfers-arrive", "Do bytes arrive that two processes of this host move with each requested backend?")
def transfers_arrive(facts: Facts, expected: Requirements) -> Judgement:
    """Two workers move 64 KiB each way with each requested backend and kind of memory, and every byte is right.

    Judge real transfers, in the environment of this process. If they fail, name the variables without which the bytes
    arrive, or say that this host is the cause.
    """
    fault = next((proof for proof in facts.transfers if proof.fault), None)
    if not facts.transfers:
        return not_applicable("no transfer was tried: --no-transfer, a recorded host, or only backends with a server")
    absent = not_loaded(facts, expected)
    if absent is not None and fault is not None:
        return absent
    if fault is not None and fault.culprits:
        return failed(f"{_subject(fault)}: {fault.steering_fault} ({fault.fault})", fault.steering_remedy)
    if fault is not None:
        return _without_culprit(fault, facts)
    slower = next((proof for proof in facts.transfers if proof.obstacle and _is_refused(proof, expected.profile)), None)
    moved = "; ".join(f"{_subject(proof)}: 64 KiB each way{_carried(proof)}" for proof in facts.transfers)
    if slower is not None:
        return warned(f"{moved}, not by a copy between the two processes: {slower.obstacle}", NO_CMA)
    return passed(moved)


def _without_culprit(proof: TransferProof, facts: Facts) -> Judgement:
    if proof.late:
        return unknown(
            f"{_subject(proof)}: no bytes arrived before the deadline ({proof.fault})",
            "stop other processes on this host, and run it again",
        )
    without = (
        "nothing can be moved without any variable that steers NIXL either" if proof.bare else "no variable steers it"
    )
    if proof.backend == "UCX" and facts.ucx_files:
        return failed(
            f"{_subject(proof)}: nothing can be moved: {proof.fault}; {without}, but {settings_of_files(facts)}",
            remedy_of_files(facts),
        )
    return failed(
        f"{_subject(proof)}: nothing can be moved: {proof.fault}; {without}, so this host is the cause"
        f"{f': {proof.obstacle}' if proof.obstacle else ''}",
        # A worker's remedy may refer to lines that a failed test prints, and the doctor does not.
        READ_LOG if " below" in proof.remedy else proof.remedy or "follow the remedy of backend-loads",
    )


def _subject(proof: TransferProof) -> str:
    return proof.backend if proof.memory in ("DRAM:DRAM", "DRAM:FILE") else f"{proof.backend} {proof.memory}"


def _carried(proof: TransferProof) -> str:
    """Return the transports that carried the bytes, and the file of the library that moved them."""
    over = f" over {named(proof.transports)}" if proof.transports else ""
    mover = next((path for path in proof.libraries if library(path).name == _MOVER.get(proof.backend)), "")
    return f"{over}{f' by {mover}' if mover else ''}"


def _is_refused(proof: TransferProof, profile: Profile) -> bool:
    """Return whether a transport carried bytes that the profile does not accept for such rows."""
    rows = [RowKey(proof.backend, op, MemoryPair.parse(proof.memory), PROOF_BYTES) for op in OPS]
    accepted = [expectation.transports for row in rows if (expectation := profile.expectation(row)) is not None]
    carried = {name.partition("/")[0] for name in proof.transports}
    return any(names is not None and not carried <= set(names) for names in accepted)
