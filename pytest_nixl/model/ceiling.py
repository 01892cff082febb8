# SPDX-License-Identifier: Apache-2.0
"""The bandwidth that no row over a machine's network cards can exceed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_nixl.model.machine import Machine, devices, is_network

if TYPE_CHECKING:
    from pytest_nixl.model.expectation import Expectation
    from pytest_nixl.model.samples import Samples


@dataclass(frozen=True)
class Ceiling:
    """The bandwidth that a row cannot exceed.

    :param value: bytes per second.
    :param why: the reason, such as ``the line rate of ...``; empty: the profile gives the ceiling itself.
    """

    value: float
    why: str = ""


def row_ceiling(samples: Samples, expectation: Expectation | None, machine: Machine | None) -> Ceiling | None:
    """Return the ceiling of a row: the profile's, else the line rate of the network cards; None: there is none.

    The line rate is used only if every transport of the row uses a network card. If the row's transports are not known,
    every transport that the profile accepts must use one.
    """
    if expectation is not None and expectation.ceiling is not None:
        return Ceiling(expectation.ceiling)
    if machine is None or not _over_network(samples, expectation):
        return None
    nics = devices(samples.transports)
    if samples.counted is not None and (carriers := samples.counted.carriers(samples.transports)):
        nics = tuple(item.device for item in carriers if item.device != "lo")
        if not nics:
            return None  # the bytes went over the loopback device, to another process of this host
    if nics is None:
        # A row between host memories may use every card, not only the cards that one GPU reaches.
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
