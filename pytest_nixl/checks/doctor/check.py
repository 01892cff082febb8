# SPDX-License-Identifier: Apache-2.0
"""The registry of checks. A check is a question and a pure function that answers it from facts and the profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps

from pytest_nixl.host.facts import Facts
from pytest_nixl.judge.profiles import Profile
from pytest_nixl.model.expectation import Machine
from pytest_nixl.model.transports import EFA, RDMA
from pytest_nixl.model.verdicts import Judgement, Outcome, Verdict


@dataclass(frozen=True)
class Requirements:
    """The expected state of a machine.

    :param profile: the profile that describes the expected hardware.
    :param backends: names of the requested NIXL backends, such as ``UCX``.
    :param image: whether only a container image is judged, as on a build machine without GPU, network card and etcd.
    """

    profile: Profile
    backends: tuple[str, ...]
    image: bool = False

    @property
    def machine(self) -> Machine | None:
        """The hardware that the profile describes, or None."""
        return self.profile.machine

    @property
    def rdma(self) -> bool:
        """Whether the profile's network cards support RDMA."""
        return self.machine is not None and self.machine.nic_kind in RDMA | EFA

    @property
    def efa(self) -> bool:
        """Whether the profile's network cards are EFA."""
        return self.machine is not None and self.machine.nic_kind in EFA

    @property
    def gpus(self) -> int:
        """The number of GPUs in the profile; 0 if it gives none."""
        return (self.machine.gpus or 0) if self.machine is not None else 0

    @property
    def has_gpus(self) -> bool:
        """Whether the profile's machine has a GPU, also if it does not say how many."""
        return self.machine is not None and self.machine.has_gpus


Judge = Callable[[Facts, Requirements], Judgement]
#: Returns why a question cannot be answered, or makes no sense; None if it can be asked.
Obstacle = Callable[[Facts, Requirements], "Judgement | None"]


@dataclass(frozen=True)
class Check:
    """A question about a machine, and the function that answers it.

    :param id: the name that profiles and the gate use.
    :param question: the question, in one sentence.
    :param judge: the function that answers it.
    :param image: whether ``pytest-nixl doctor --image`` runs it, too.
    """

    id: str
    question: str
    judge: Judge
    image: bool

    @property
    def topic(self) -> str:
        """The part of a machine that it is about: ours are named like their modules."""
        package, _, module = self.judge.__module__.rpartition(".")
        return _TOPICS.get(module, module) if package == __package__ else "of other packages"


#: How a topic is called, where its module's name does not say it.
_TOPICS = {"image": "versions", "rdma": "RDMA", "gpu": "GPU", "gpu_health": "GPU"}


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    :param judgement: its verdict, reason and remedy.
    :param outcome: what the verdict means for the exit code of the command.
    :param required: whether the profile requires this check.
    """

    check: Check
    judgement: Judgement
    outcome: Outcome
    required: bool


REGISTERED: dict[str, Check] = {}


def check(id: str, question: str, *, image: bool = False, unless: Obstacle | None = None) -> Callable[[Judge], Judge]:
    """Register the decorated function as a check. The other parameters are those of :class:`Check`.

    :param unless: if it returns a judgement, that is the check's, and the decorated function is not asked.
    """

    def register(judge: Judge) -> Judge:
        @wraps(judge)
        def answer(facts: Facts, expected: Requirements) -> Judgement:
            judgement = unless(facts, expected) if unless is not None else None
            if judgement is None:
                judgement = judge(facts, expected)
            # Checks read the variables as they are.
            hide = facts.environment.hide
            return replace(judgement, reason=hide(judgement.reason), remedy=hide(judgement.remedy))

        assert id not in REGISTERED
        REGISTERED[id] = Check(id, question, answer, image)
        return answer

    return register


def passed(reason: str) -> Judgement:
    """Return a PASS verdict."""
    return Judgement(Verdict.PASS, reason)


def failed(reason: str, remedy: str) -> Judgement:
    """Return a FAIL verdict with its remedy."""
    return Judgement(Verdict.FAIL, reason, remedy)


def warned(reason: str, remedy: str) -> Judgement:
    """Return a WARN verdict: it works, but worse than it could."""
    return Judgement(Verdict.WARN, reason, remedy)


def unknown(reason: str, remedy: str) -> Judgement:
    """Return an UNKNOWN verdict: what the check needs could not be read."""
    return Judgement(Verdict.UNKNOWN, reason, remedy)


def not_applicable(reason: str) -> Judgement:
    """Return a NOT-APPLICABLE verdict: the question makes no sense on this machine."""
    return Judgement(Verdict.NOT_APPLICABLE, reason)


NO_RDMA = "this host has no RDMA device, and the profile expects none"


def has_rdma(facts: Facts, expected: Requirements) -> bool:
    """Whether checks of RDMA apply: this host or the profile has RDMA devices."""
    return bool(facts.rdma) or expected.rdma


def has_gpu(facts: Facts, expected: Requirements) -> bool:
    """Whether checks of GPUs apply: the driver or the PCI bus shows a GPU, or the profile expects one."""
    driver = facts.gpu.gpus or facts.gpu.unusable
    return bool(driver) or any(device.kind == "gpu" for device in facts.pci) or expected.has_gpus


def no_rdma(facts: Facts, expected: Requirements) -> Judgement | None:
    """Return NOT-APPLICABLE if checks of RDMA do not apply."""
    return None if has_rdma(facts, expected) else not_applicable(NO_RDMA)


def no_gpu(facts: Facts, expected: Requirements) -> Judgement | None:
    """Return NOT-APPLICABLE if checks of GPUs do not apply."""
    if has_gpu(facts, expected):
        return None
    return not_applicable("this host has no GPU, and the profile expects none")
