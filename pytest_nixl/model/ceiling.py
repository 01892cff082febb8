# SPDX-License-Identifier: Apache-2.0
"""TODO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_nixl.model.expectation import Expectation
    from pytest_nixl.model.samples import Samples


@dataclass(frozen=True)
class Ceiling:
    """What no row like this can exceed in bytes per second, and why: ``the line rate of ...``; empty: it was given."""

    value: float
    why: str = ""


def row_ceiling(samples: Samples, expectation: Expectation | None, machine: Machine | None) -> Ceiling | None:
    """Return the ceiling of a row: the one that the profile gives, else that of the network cards; None: there is none.

    Of the cards only where every transport is one of the network; of rows of which no transport is known, where every
    one that the profile accepts is.
    """
    if expectation is not None and expectation.ceiling is not None:
        return Ceiling(expectation.ceiling)
    if machine is None or not _over_network(samples, expectation):
        return None
    nics = devices(samples.transports)
    if samples.counted is not None and (carriers := samples.counted.carriers(samples.transports)):
        nics = tuple(item.device for item in carriers if item.device != "lo")
        if not nics:
            return None  # the kernel took it to another process of the host
    if nics is None:
        # What a GPU reaches says nothing of rows between host memories: those may use every card.
        if machine.nics > 1 and "VRAM" not in (samples.key.memory.initiator, samples.key.memory.target):
            return None
        value = machine.ceiling(None)
        return None if value is None else Ceiling(value, _reached(machine))
    value = machine.ceiling(len(nics))
    return None if value is None else Ceiling(value, _used(machine, nics))


def _over_network(samples: Samples, expectation: Expectation | None) -> bool:
    told = samples.transports or (expectation and expectation.transports) or ()
    return bool(told) and all(is_network(transport) for transport in told)


def _reached(machine: Machine) -> str:
    if machine.nics == 1:
        return f"the line rate of the machine's {machine.describe(1)}"
    return f"the line rate of the {machine.describe(machine.reach or 1)} that one GPU reaches"


def _used(machine: Machine, nics: tuple[str, ...]) -> str:
    if len(nics) > machine.nics:
        return f"the line rate of all {machine.describe(machine.nics)} that the profile knows"
    return f"the line rate of the {machine.describe(len(nics))} that carried it ({', '.join(nics)})"
