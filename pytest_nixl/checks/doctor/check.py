# SPDX-License-Identifier: Apache-2.0
"""A check: a question, and a pure function that answers it from facts and from what the profile says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pytest_nixl.host.facts import Facts
from pytest_nixl.judge.profiles import Profile
from pytest_nixl.model.machine import EFA, RDMA, Machine
from pytest_nixl.model.verdicts import Judgement, Verdict


@dataclass(frozen=True)
class Requirements:
    """What the machine should be.

    :param image: whether only the image is judged: it is built where there is no GPU, no network card and no etcd.
    """

    profile: Profile
    backends: tuple[str, ...]
    image: bool = False

    @property
    def machine(self) -> Machine | None:
        """The hardware that the profile tells of."""
        return self.profile.machine

    @property
    def rdma(self) -> bool:
        """Whether the profile's machine has network cards that do RDMA."""
        return self.machine is not None and self.machine.nic_kind in RDMA | EFA

    @property
    def efa(self) -> bool:
        """Whether they are EFA."""
        return self.machine is not None and self.machine.nic_kind in EFA

    @property
    def gpus(self) -> int:
        """How many GPUs the profile's machine has; 0 where it does not say."""
        return (self.machine.gpus or 0) if self.machine is not None else 0


Judge = Callable[[Facts, Requirements], Judgement]


@dataclass(frozen=True)
class Check:
    """A check.

    :param id: as profiles and the gate name it.
    :param question: one sentence.
    :param image: whether it is asked of an image, too.
    """

    id: str
    question: str
    judge: Judge
    image: bool


_REGISTERED: dict[str, Check] = {}


def check(id: str, question: str, *, image: bool = False) -> Callable[[Judge], Judge]:
    """Register a function as a check."""

    def register(judge: Judge) -> Judge:
        assert id not in _REGISTERED
        _REGISTERED[id] = Check(id, question, judge, image)
        return judge

    return register


def passed(reason: str) -> Judgement:
    """It is as it should be."""
    return Judgement(Verdict.PASS, reason)


def failed(reason: str, remedy: str) -> Judgement:
    """It is not as it should be."""
    return Judgement(Verdict.FAIL, reason, remedy)


def warned(reason: str, remedy: str) -> Judgement:
    """It works, and not as well as it could."""
    return Judgement(Verdict.WARN, reason, remedy)


def unknown(reason: str, remedy: str) -> Judgement:
    """It cannot be read."""
    return Judgement(Verdict.UNKNOWN, reason, remedy)


def not_applicable(reason: str) -> Judgement:
    """The question does not arise here."""
    return Judgement(Verdict.NOT_APPLICABLE, reason)


NO_RDMA = "there is no RDMA device here, and the profile names none"
NO_GPU = "there is no GPU here, and the profile names none"


def has_rdma(facts: Facts, wanted: Requirements) -> bool:
    """Whether questions of RDMA arise."""
    return bool(facts.rdma) or wanted.rdma


def has_gpu(facts: Facts, wanted: Requirements) -> bool:
    """Whether questions of GPUs arise: one is seen, or hangs on the bus unseen, or the profile has one."""
    return bool(facts.gpu.gpus) or any(device.kind == "gpu" for device in facts.pci) or wanted.gpus > 0


def named(names: Iterable[str], most: int = 4) -> str:
    """List names, the first few of many: ``a, b, c, d and 28 more``."""
    listed = list(names)
    rest = len(listed) - most
    return ", ".join(listed) if rest <= 1 else f"{', '.join(listed[:most])} and {rest} more"


def plural(count: int, noun: str) -> str:
    """Count something: ``1 GPU``, ``8 GPUs``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
