# SPDX-License-Identifier: Apache-2.0
"""Compare the facts of all ranks' hosts, and name the ranks that differ."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_nixl.checks.doctor.check import failed, not_applicable, passed, warned
from pytest_nixl.checks.doctor.resources import amount
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.sentences import named, plural
from pytest_nixl.core.units import gigabits
from pytest_nixl.etcd.client import EtcdClient
from pytest_nixl.etcd_servers.sources import ExternalServer
from pytest_nixl.host.etcd import read_etcd
from pytest_nixl.host.facts import Facts, gather
from pytest_nixl.host.network import Nic
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict, most_severe
from pytest_nixl.session.cluster import Cluster

_NAMESPACE = "NIXL_ETCD_NAMESPACE"
_NOT_SET = "not set"
#: Variables that influence transfers and may differ between hosts for a good reason.
_OWN_OF_A_HOST = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "NIXL_PLUGIN_DIR", "NIXL_IMAGE", "NIXL_WORKER_TYPE")


@dataclass(frozen=True)
class RankDifference:
    """A property that differs between ranks.

    :param subject: the property, such as ``NIXL`` or ``MTU``.
    :param odd: the ranks that differ from the majority; all ranks if there is no majority.
    :param judgement: FAIL or WARN, with the ranks, their hosts and values, and a remedy.
    """

    subject: str
    odd: tuple[int, ...]
    judgement: Judgement


@dataclass(frozen=True)
class _Subject:
    """A property to compare.

    :param read: returns its value as text; an empty text means that it is unknown, and is not compared.
    :param is_severe: whether a difference is a FAIL; otherwise it is a WARN.
    """

    name: str
    read: Callable[[Facts], str]
    remedy: str
    is_severe: bool = True


def _first(facts: Facts) -> Nic | None:
    """Return the interface with the default route."""
    return next((nic for nic in facts.network.nics if nic.name == facts.network.default.value), None)


def _rdma(facts: Facts) -> str:
    rates = Counter(f"{gigabits(device.rate)} Gb/s" if device.rate else "unknown rate" for device in facts.rdma)
    return ", ".join(f"{count} at {rate}" for rate, count in sorted(rates.items())) or "none"


def _mtus(facts: Facts) -> str:
    nic = _first(facts)
    return str(nic.mtu or "") if nic else ""


def _rates(facts: Facts) -> str:
    nic = _first(facts)
    return f"{gigabits(nic.rate)} Gb/s" if nic and nic.rate else ""


def _gpus(facts: Facts) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(gpu.name for gpu in facts.gpu.gpus).items()) or "none"


def _memlock(facts: Facts) -> str:
    limit = facts.host.memlock.value
    return "" if limit is None else "unlimited" if limit.soft is None else amount(limit.soft)


_SAME_IMAGE = "run the same image, by its digest, on every rank"
_SUBJECTS = (
    _Subject("NIXL", lambda f: f.software.nixl.value or "none", _SAME_IMAGE),
    _Subject("NIXL's package", lambda f: f.software.nixl_package.value or "none", _SAME_IMAGE),
    _Subject("UCX", lambda f: f.software.ucx.value or "", _SAME_IMAGE),
    _Subject("libfabric", lambda f: f.software.libfabric.value or "", _SAME_IMAGE),
    _Subject("Python", lambda f: f.software.python.value or "", _SAME_IMAGE, is_severe=False),
    _Subject("the architecture", lambda f: f.host.architecture.value or "", "use hosts of one kind"),
    _Subject(
        "the kernel", lambda f: f.host.kernel.value or "", "install the same kernel on all hosts", is_severe=False
    ),
    _Subject("the GPU driver", lambda f: f.gpu.driver.value or "none", "install the same driver on all hosts"),
    _Subject("CUDA", lambda f: f.gpu.cuda.value or "none", "install the same driver on all hosts"),
    _Subject("GPUs", _gpus, "use hosts of one kind, and give each rank the same number of GPUs"),
    _Subject(
        "RDMA devices",
        _rdma,
        "use hosts of one kind, give each rank the same number of devices, and check the slow device's cable",
    ),
    _Subject("the EFA installer", lambda f: f.software.efa_installer.value or "none", _SAME_IMAGE, is_severe=False),
    _Subject(
        "the rate of the interface of the default route", _rates, "check cable and switch port of the rank that differs"
    ),
    _Subject(
        "the MTU of the interface of the default route",
        _mtus,
        "give all interfaces the same MTU: the other side silently drops larger packets",
    ),
    _Subject("locked memory", _memlock, "set memlock to unlimited on every host"),
    _Subject(
        "DMA-BUF",
        lambda f: str(f.gpu.dma_buf.value),
        "install the same driver and kernel on all hosts",
        is_severe=False,
    ),
    _Subject("the image", lambda f: f.environment.image.value or "", _SAME_IMAGE, is_severe=False),
)


def everywhere(names: Sequence[str], judgements: Sequence[Judgement]) -> Judgement:
    """Combine one check's verdicts on all ranks: return the most severe verdict, with the ranks that have it.

    :param names: the names of the ranks, such as ``rank 1 on node-b``.
    :param judgements: the judgement of each rank, in the order of ``names``.
    """
    if len(judgements) == 1:
        return judgements[0]
    worst = most_severe(judgements).verdict
    having: dict[str, list[str]] = {}
    for name, judgement in zip(names, judgements, strict=True):
        if judgement.verdict is worst:
            having.setdefault(judgement.reason, []).append(name)
    remedies = dict.fromkeys(judgement.remedy for judgement in judgements if judgement.verdict is worst)
    sentences = [f"{_whose(names, ranks)}: {reason}" for reason, ranks in having.items()]
    return Judgement(worst, "; ".join(sentences), "; ".join(filter(None, remedies)))


def _whose(names: Sequence[str], ranks: Sequence[str]) -> str:
    return f"all {len(names)} ranks" if len(ranks) == len(names) else named(ranks, 8)


def compare_hosts(hosts: Sequence[Facts]) -> tuple[RankDifference, ...]:
    """Compare the facts of ranks 0, 1, … and return one finding for each property that differs."""
    return (*_compared(hosts), *_namespaces(hosts), *_variables(hosts))


def ranks_agree(hosts: Sequence[Facts]) -> Judgement:
    """Judge whether all ranks agree: FAIL if a grave property differs, WARN if another one does."""
    if len(hosts) < 2:
        return not_applicable("this run has only one rank")
    findings = compare_hosts(hosts)
    grave = [finding for finding in findings if finding.judgement.verdict is Verdict.FAIL]
    shown = grave or findings
    reasons = "; ".join(finding.judgement.reason for finding in shown)
    remedies = "; ".join(dict.fromkeys(finding.judgement.remedy for finding in shown))
    if grave:
        return failed(reasons, remedies)
    return warned(reasons, remedies) if findings else passed(f"the hosts of {plural(len(hosts), 'rank')} agree")


def _compared(hosts: Sequence[Facts]) -> Iterator[RankDifference]:
    for subject in _SUBJECTS:
        values = [subject.read(facts) for facts in hosts]
        if "" not in values and len(set(values)) > 1:
            yield _finding(subject.name, hosts, values, subject.remedy, grave=subject.is_severe)


def _namespaces(hosts: Sequence[Facts]) -> Iterator[RankDifference]:
    values = [facts.environment.steering.get(_NAMESPACE) or "/nixl/agents/ (the default)" for facts in hosts]
    if len(set(values)) < 2:
        return
    bare = {value.removesuffix(" (the default)").strip("/") for value in values}
    reason = "; the names differ only in slashes, but etcd keeps them apart" if len(bare) == 1 else ""
    remedy = f"set {_NAMESPACE}=/nixl/agents on every rank; with different values the ranks never find each other"
    yield _finding(_NAMESPACE, hosts, values, remedy, note=reason)


def _variables(hosts: Sequence[Facts]) -> Iterator[RankDifference]:
    prefixes = ("UCX_", "FI_", "NIXL_", "ETCD_ENDPOINTS")
    names = sorted({name for facts in hosts for name in facts.environment.steering if name.startswith(prefixes)})
    for name in names:
        values = [facts.environment.steering.get(name, _NOT_SET) for facts in hosts]
        if name != _NAMESPACE and len(set(values)) > 1:
            yield _finding(name, hosts, values, _same(name, hosts, values), grave=name not in _OWN_OF_A_HOST)


def _same(name: str, hosts: Sequence[Facts], values: Sequence[str]) -> str:
    """Return what to do where, so that a variable has one value: that of most ranks, or none if some have none."""
    [(usual, most)] = Counter(values).most_common(1)
    if most <= len(values) / 2:
        usual = _NOT_SET if _NOT_SET in values else values[0]
    odd = named((_rank(hosts, rank) for rank, value in enumerate(values) if value != usual), 8)
    return f"`unset {name}` on {odd}" if usual == _NOT_SET else f"`export {name}={shlex.quote(usual)}` on {odd}"


def _rank(hosts: Sequence[Facts], rank: int) -> str:
    return f"rank {rank} ({hosts[rank].host.name.value})"


def _finding(
    subject: str, hosts: Sequence[Facts], values: Sequence[str], remedy: str, *, grave: bool = True, note: str = ""
) -> RankDifference:
    [(usual, most)] = Counter(values).most_common(1)
    clear = most > len(values) / 2
    odd = tuple(rank for rank, value in enumerate(values) if not clear or value != usual)
    listing = named((f"{_rank(hosts, rank)} has {values[rank]}" for rank in odd), 8)
    suffix = f"; the other {most} have {usual}" if clear and most > 1 else f"; the other has {usual}" if clear else ""
    return RankDifference(
        subject, odd, (failed if grave else warned)(f"{subject} differs: {listing}{suffix}{note}", remedy)
    )


def gather_hosts(settings: Settings, cluster: Cluster) -> Sequence[Facts]:
    """Return the facts of each rank's host, and of the deployment's etcd if there is one.

    :raises NixlPluginError: a rank sends facts that this version does not know.
    """
    if cluster.several:
        addresses = cluster.ask("address")
        answers = cluster.ask("facts", peers=addresses)
        return [_read(name, plain) for name, plain in zip(cluster.names, answers, strict=True)]
    facts = gather(
        FactsRoot(),
        backends=settings.backend,
        etcd=settings.etcd,
        connect=lambda: ExternalServer.of(settings).client(),
    )
    return [facts]


def with_etcd(facts: Facts, endpoint: str, client: EtcdClient) -> Facts:
    """Return the facts of a host with those of this etcd, which was started for the run."""
    return replace(facts, etcd=read_etcd(FactsRoot(), endpoint, "this run", lambda: client))


def _read(name: str, plain: dict[str, Any]) -> Facts:
    try:
        return Facts.of(plain)
    except ValueError as error:
        raise NixlPluginError(
            f"{name} sent facts that this version of pytest-nixl does not know: {error}",
            "install the same pytest-nixl on every rank",
        ) from None
