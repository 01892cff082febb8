# SPDX-License-Identifier: Apache-2.0
"""Judge a run of nixlbench by the counters of its devices, and by the line rate of its network cards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pytest_nixl.judge.profiles import Profile
from pytest_nixl.model.device_counters import CounterComparison, Moved, compare
from pytest_nixl.model.expectation import Expectation
from pytest_nixl.model.machine import Machine
from pytest_nixl.model.nixlbench_output import STORAGE, NixlbenchOutput
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.transports import EMULATED, WITHIN_A_HOST
from pytest_nixl.model.verdicts import Judgement, Verdict

#: What to do about output that is not complete.
RANKS_REMEDY = "Judge the output of rank 0, with stdout and stderr in one file (nixlbench ... > FILE 2>&1)."
_COUNTERS_REMEDY = (
    "Read the counters of every device of the initiator's host just before and just after the run, while nothing else "
    "uses the devices; if they still differ, look in the ranks' logs for the transports and devices that they opened."
)
_EMULATED_REMEDY = (
    "Check that FI_EFA_USE_DEVICE_RDMA is unset or 1 on every rank, and that libfabric, rdma-core and the efa driver "
    "come from the same EFA installer. If the cards have no RDMA write (before Nitro v4), or if the backend is UCX, "
    "which does not use it over srd, add efa-emulated or srd-emulated to the profile's transports."
)


@dataclass(frozen=True)
class CardLimit:
    """The ceiling of the network cards together in bytes per second, and a description of the cards."""

    value: float
    words: str
    #: Whether only these cards carried the bytes, so that the ceiling holds for all initiators together.
    of_the_run: bool = False


def card_limit(machine: Machine | None, carriers: tuple[Moved, ...]) -> CardLimit | None:
    """Return the ceiling of the network cards of a run; None: it is not known.

    :param machine: the profile's machine.
    :param carriers: the devices that carried the bytes; empty if they are not known.
    """
    if machine is None:
        return None
    count = len(carriers) or None
    value = machine.ceiling(count)
    if value is None:
        return None
    if count is None:
        return CardLimit(value, "the line rate of the network cards that one GPU there reaches")
    known = machine.nics
    if known is not None and known < count:
        cards = "the one network card" if known == 1 else f"the {known} network cards"
        words = f"the line rate of {cards} that the profile knows, although {count} devices carried it"
        return CardLimit(value, words, of_the_run=True)
    number = "the device that carried it" if count == 1 else f"the {count} devices that carried it"
    names = ", ".join(str(item.device) for item in carriers)
    return CardLimit(value, f"the line rate of {number} ({names})", of_the_run=True)


def is_bound(
    key: RowKey, expectation: Expectation | None, limit: CardLimit, machine: Machine | None, transports: tuple[str, ...]
) -> bool:
    """Whether the line rate of the network cards limits this row."""
    if transports and all(name.partition("/")[0] in WITHIN_A_HOST for name in transports):
        return False
    if key.backend in STORAGE:
        return False
    if limit.of_the_run:
        return True
    if expectation is not None and expectation.transports and WITHIN_A_HOST & set(expectation.transports):
        return False
    # The rate that one GPU reaches does not limit rows between host memories, which may use every card.
    return key.memory.on_gpu or (machine is not None and machine.nics == 1)


def judge_counters(
    output: NixlbenchOutput, moved: Mapping[str, Moved], profile: Profile, *, complete: bool
) -> tuple[Judgement, CounterComparison | None]:
    """Compare the bytes that devices counted with those of the run.

    :param moved: bytes that the devices of the initiator's host counted during the run.
    :param complete: whether every row of the run was printed.
    :returns: the judgement, and the comparison; None: the bytes cannot be compared.
    """
    configuration = output.configuration
    payloads = [configuration.payload(row.block, row.batch) for row in output.rows]
    if not complete:
        words = "the table is incomplete, so the counters cannot be compared with the bytes of the run"
        return Judgement(Verdict.UNKNOWN, words, RANKS_REMEDY), None
    if configuration.backend in STORAGE:
        words = f"{configuration.backend} moves bytes to storage, which network devices do not count"
        return Judgement(Verdict.NOT_APPLICABLE, words), None
    if any(payload is None for payload in payloads):
        words = "the number of bytes follows from the options only with --scheme=pairwise"
        return Judgement(
            Verdict.UNKNOWN, words, "Judge a run with --scheme=pairwise, or judge this run without counters."
        ), None
    comparison = compare(moved, configuration.op, sum(payload or 0 for payload in payloads))
    if comparison.emulated:
        return _emulated(output, comparison, profile), comparison
    if comparison.agrees:
        return Judgement(Verdict.PASS, comparison.words), comparison
    # A device without usable counters may have carried the missing bytes.
    doubt = comparison.devices or any(item.faults for item in moved.values())
    verdict = Verdict.UNKNOWN if doubt else Verdict.WRONG_TRANSPORT
    return Judgement(verdict, comparison.words, _COUNTERS_REMEDY), comparison


def _emulated(output: NixlbenchOutput, comparison: CounterComparison, profile: Profile) -> Judgement:
    """Judge a payload that EFA moved without RDMA: WRONG-TRANSPORT if the profile accepts RDMA only."""
    configuration = output.configuration
    (name,) = {
        each.partition("/")[0] for each in transports_of(configuration.backend, comparison.devices, emulated=True)
    }
    expectations = [profile.expectation(configuration.key(row.block, row.batch)) for row in output.rows]
    accepted = [each.transports for each in expectations if each is not None and each.transports is not None]
    if any(name not in transports for transports in accepted):
        return Judgement(
            Verdict.WRONG_TRANSPORT, f"{comparison.words}, and the profile does not accept {name}", _EMULATED_REMEDY
        )
    if not comparison.agrees:
        return Judgement(Verdict.UNKNOWN, comparison.words, _COUNTERS_REMEDY)
    return Judgement(Verdict.PASS if accepted else Verdict.WARN, comparison.words, "" if accepted else _EMULATED_REMEDY)


def transports_of(backend: str, carriers: tuple[Moved, ...], *, emulated: bool = False) -> tuple[str, ...]:
    """Return the transports that carried the bytes according to the counters, in the backend's names; empty if unknown.

    They are unknown for adapters other than EFA, whose counters do not separate RDMA from TCP.
    """
    names = {"efa": ("srd" if backend == "UCX" else "efa") + (EMULATED if emulated else ""), "net": "tcp"}
    if any(item.device.kind not in names for item in carriers):
        return ()
    return tuple(dict.fromkeys(f"{names[item.device.kind]}/{item.device.name}" for item in carriers))


def counter_notes(
    moved: Mapping[str, Moved] | None, carriers: tuple[Moved, ...], comparison: CounterComparison | None, op: str
) -> Iterator[str]:
    """Yield notes about the devices that carried the bytes.

    :param op: ``WRITE`` or ``READ``.
    """
    if moved is None:
        yield "counters: none given, so it is unknown which devices carried the bytes"
        return
    if comparison is not None:
        yield f"counters: {comparison.words}"
    for item in carriers:
        emulated = comparison is not None and comparison.emulated
        yield f"counters: {item.device} carried {item.packets(op) if emulated else item.carried(op):,} bytes"
    for item in moved.values():
        for fault in item.faults:
            yield f"counters: {fault}"
