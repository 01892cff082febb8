# SPDX-License-Identifier: Apache-2.0
"""What must be alike on every rank: the facts of several hosts compared, and the odd one named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pytest_nixl.checks.doctor.check import failed, named, not_applicable, passed, plural, warned
from pytest_nixl.checks.doctor.limits import amount
from pytest_nixl.core.units import gigabits
from pytest_nixl.host.facts import Facts
from pytest_nixl.model.verdicts import Judgement, Verdict

_NAMESPACE = "NIXL_ETCD_NAMESPACE"
#: Variables that steer transfers and may differ from host to host for a good reason.
_OWN_OF_A_HOST = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "NIXL_PLUGIN_DIR", "NIXL_IMAGE", "NIXL_WORKER_TYPE")


@dataclass(frozen=True)
class RankDifference:
    """Something that differs between ranks.

    :param subject: what differs, such as ``NIXL`` or ``MTU``.
    :param odd: the ranks that are unlike most of the others; all, where no value is that of most.
    """

    subject: str
    odd: tuple[int, ...]
    judgement: Judgement


@dataclass(frozen=True)
class _Subject:
    """Something to compare: how it is read as text, and what it means where it differs."""

    name: str
    read: Callable[[Facts], str]
    remedy: str
    grave: bool = True


def _first(facts: Facts, what: str) -> str:
    """MTU or rate of the interface of the default route."""
    nic = next((nic for nic in facts.network.nics if nic.name == facts.network.default.value), None)
    if nic is None:
        return ""
    if what == "mtu":
        return str(nic.mtu or "")
    return f"{gigabits(nic.rate)} Gb/s" if nic.rate else ""


def _rdma(facts: Facts) -> str:
    rates = Counter(f"{gigabits(device.rate)} Gb/s" if device.rate else "unknown rate" for device in facts.rdma)
    return ", ".join(f"{count} at {rate}" for rate, count in sorted(rates.items())) or "none"


def _mtus(facts: Facts) -> str:
    return _first(facts, "mtu")


def _rates(facts: Facts) -> str:
    return _first(facts, "rate")


def _gpus(facts: Facts) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(gpu.name for gpu in facts.gpu.gpus).items()) or "none"


def _memlock(facts: Facts) -> str:
    limit = facts.host.memlock.value
    return "" if limit is None else "unlimited" if limit.soft is None else amount(limit.soft)


_SAME_IMAGE = "run the same image, by its digest, on every rank"
#: An empty text: it is not known, as where another backend was tried; nothing is then compared.
_SUBJECTS = (
    _Subject("NIXL", lambda f: f.software.nixl.value or "none", _SAME_IMAGE),
    _Subject("NIXL's package", lambda f: f.software.nixl_package.value or "none", _SAME_IMAGE),
    _Subject("UCX", lambda f: f.software.ucx.value or "", _SAME_IMAGE),
    _Subject("libfabric", lambda f: f.software.libfabric.value or "", _SAME_IMAGE),
    _Subject("Python", lambda f: f.software.python.value or "", _SAME_IMAGE, grave=False),
    _Subject("the architecture", lambda f: f.host.architecture.value or "", "take hosts of one kind"),
    _Subject("the kernel", lambda f: f.host.kernel.value or "", "give the hosts one kernel", grave=False),
    _Subject("the GPU driver", lambda f: f.gpu.driver.value or "none", "install one driver on all hosts"),
    _Subject("CUDA", lambda f: f.gpu.cuda.value or "none", "install one driver on all hosts"),
    _Subject("GPUs", _gpus, "take hosts of one kind, and give each rank as many GPUs"),
    _Subject("RDMA devices", _rdma, "take hosts of one kind, give each rank as many, and look at the slow one's cable"),
    _Subject("the EFA installer", lambda f: f.software.efa_installer.value or "none", _SAME_IMAGE, grave=False),
    _Subject("the rate of the interface of the default route", _rates, "look at cable and switch port of the odd one"),
    _Subject("the MTU of the interface of the default route", _mtus,
             "give all interfaces one MTU: a larger packet than the other side takes is lost without a word"),
    _Subject("locked memory", _memlock, "set memlock to unlimited on every host"),
    _Subject("DMA-BUF", lambda f: str(f.gpu.dma_buf.value), "give the hosts one driver and kernel", grave=False),
    _Subject("the image", lambda f: f.environment.image.value or "", _SAME_IMAGE, grave=False),
)  # fmt: skip


#: From the one that a check of all ranks comes to if any rank has it, to the one that it comes to if all have it.
_GRAVEST_FIRST = (
    Verdict.ERROR,
    Verdict.FAIL,
    Verdict.MISSING,
    Verdict.INCONCLUSIVE,
    Verdict.UNKNOWN,
    Verdict.WARN,
    Verdict.PASS,
    Verdict.NOT_APPLICABLE,
)


def everywhere(names: Sequence[str], judgements: Sequence[Judgement]) -> Judgement:
    """Return what one check comes to on all ranks: the gravest verdict, with the ranks that have it.

    :param names: of the ranks, such as ``rank 1 on node-b``.
    """
    if len(judgements) == 1:
        return judgements[0]
    worst = min((judgement.verdict for judgement in judgements), key=_GRAVEST_FIRST.index)
    having: dict[str, list[str]] = {}
    for name, judgement in zip(names, judgements, strict=True):
        if judgement.verdict is worst:
            having.setdefault(judgement.reason, []).append(name)
    remedies = dict.fromkeys(judgement.remedy for judgement in judgements if judgement.verdict is worst)
    told = [f"{_whose(names, who)}: {reason}" for reason, who in having.items()]
    return Judgement(worst, "; ".join(told), "; ".join(filter(None, remedies)))


def _whose(names: Sequence[str], who: Sequence[str]) -> str:
    return f"all {len(names)} ranks" if len(who) == len(names) else named(who, 8)


def compare_hosts(hosts: Sequence[Facts]) -> tuple[RankDifference, ...]:
    """Compare the facts of ranks 0, 1, …, and return what differs; nothing: they are alike."""
    return (*_compared(hosts), *_namespaces(hosts), *_variables(hosts))


def ranks_agree(hosts: Sequence[Facts]) -> Judgement:
    """Return what the comparison comes to."""
    if len(hosts) < 2:
        return not_applicable("this run has one rank: there is nothing that it could differ from")
    findings = compare_hosts(hosts)
    grave = [finding for finding in findings if finding.judgement.verdict is Verdict.FAIL]
    shown = grave or findings
    reasons = "; ".join(finding.judgement.reason for finding in shown)
    remedies = "; ".join(dict.fromkeys(finding.judgement.remedy for finding in shown))
    if grave:
        return failed(reasons, remedies)
    return warned(reasons, remedies) if findings else passed(f"{plural(len(hosts), 'rank')} are alike")


def _compared(hosts: Sequence[Facts]) -> Iterator[RankDifference]:
    for subject in _SUBJECTS:
        values = [subject.read(facts) for facts in hosts]
        if "" not in values and len(set(values)) > 1:
            yield _finding(subject.name, hosts, values, subject.remedy, grave=subject.grave)


def _namespaces(hosts: Sequence[Facts]) -> Iterator[RankDifference]:
    values = [facts.environment.get(_NAMESPACE) or "/nixl/agents/ (the default)" for facts in hosts]
    if len(set(values)) < 2:
        return
    bare = {value.removesuffix(" (the default)").strip("/") for value in values}
    why = ", which is one name with and without a slash, and to etcd two" if len(bare) == 1 else ""
    remedy = f"set {_NAMESPACE}=/nixl/agents, slash for slash, on every rank: as it is, they never find each other"
    yield _finding(_NAMESPACE, hosts, values, remedy, why=why)


def _variables(hosts: Sequence[Facts]) -> Iterator[RankDifference]:
    prefixes = ("UCX_", "FI_", "NIXL_", "ETCD_ENDPOINTS")
    names = sorted({name for facts in hosts for name in facts.environment.steering if name.startswith(prefixes)})
    for name in names:
        values = [facts.environment.steering.get(name, "not set") for facts in hosts]
        if name != _NAMESPACE and len(set(values)) > 1:
            remedy = f"give every rank one {name}"
            yield _finding(name, hosts, values, remedy, grave=name not in _OWN_OF_A_HOST)


def _finding(
    subject: str, hosts: Sequence[Facts], values: Sequence[str], remedy: str, *, grave: bool = True, why: str = ""
) -> RankDifference:
    counts = Counter(values)
    usual, most = counts.most_common(1)[0]
    clear = most > len(values) / 2
    odd = tuple(rank for rank, value in enumerate(values) if not clear or value != usual)
    told = named((f"rank {rank} ({hosts[rank].host.name.value}) has {values[rank]}" for rank in odd), 8)
    rest = f", the other {most} {usual}" if clear and most > 1 else f", the other {usual}" if clear else ""
    return RankDifference(subject, odd, (failed if grave else warned)(f"{subject} differs: {told}{rest}{why}", remedy))
