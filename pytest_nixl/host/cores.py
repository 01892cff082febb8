# SPDX-License-Identifier: Apache-2.0
"""Facts of the processors that this process may use: which ones, and how the kernel sets their frequency."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pytest_nixl.host.fact import Fact
from pytest_nixl.host.recorded_tree import FactsRoot

_STATUS = "/proc/self/status"
_POLICIES = "/sys/devices/system/cpu/cpufreq"
#: No list of processors names a higher number.
_MOST_CPUS = 1 << 16


@dataclass(frozen=True)
class FrequencyPolicy:
    """How the kernel sets the frequency of some processors.

    :param cpus: the processors, such as ``0-3``.
    :param governor: such as ``performance`` or ``powersave``.
    :param driver: such as ``intel_pstate`` or ``acpi-cpufreq``; empty if unknown.
    :param preference: the energy-performance preference, such as ``balance_power``; empty if the driver has none.
    """

    cpus: str
    governor: str
    driver: str
    preference: str
    source: str


@dataclass(frozen=True)
class Cores:
    """The processors that this process may use.

    :param allowed: the processors as the kernel lists them, such as ``0-47``.
    :param policies: how their frequency is set, of all processors of the host; none where the kernel does not set it,
        as in most virtual machines.
    """

    allowed: Fact[str]
    policies: tuple[FrequencyPolicy, ...]


def read_cores(root: FactsRoot) -> Cores:
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)$", root.read(_STATUS) or "", re.MULTILINE)
    allowed = match[1] if match else None
    return Cores(
        Fact(allowed, _STATUS) if allowed else Fact(None, _STATUS, "it has no line Cpus_allowed_list"),
        tuple(_policies(root)),
    )


def _policies(root: FactsRoot) -> Iterable[FrequencyPolicy]:
    names = [name for name in root.entries(_POLICIES) if re.fullmatch(r"policy\d+", name)]
    for name in sorted(names, key=lambda name: int(name.removeprefix("policy"))):
        place = f"{_POLICIES}/{name}"
        governor = root.read(f"{place}/scaling_governor")
        if governor:
            # The kernel separates these processors by spaces.
            cpus = ",".join((root.read(f"{place}/affected_cpus") or "").split())
            driver, preference = (root.read(f"{place}/{file}") or "" for file in _OF_POLICY)
            yield FrequencyPolicy(cpus, governor, driver, preference, place)


_OF_POLICY = ("scaling_driver", "energy_performance_preference")


def cpu_numbers(listed: str) -> frozenset[int]:
    """Return the processors in a list of the kernel: ``0-3,8`` are five; none if it is not such a list."""
    numbers: set[int] = set()
    for part in filter(None, listed.split(",")):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part, re.ASCII)
        if match is None:
            return frozenset()
        first, last = int(match[1]), int(match[2] or match[1])
        numbers.update(range(first, min(last, _MOST_CPUS) + 1))
    return frozenset(numbers)


def cpu_list(numbers: Iterable[int]) -> str:
    """Return processors as the kernel lists them: five of them are ``0-3,8``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
