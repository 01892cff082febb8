# SPDX-License-Identifier: Apache-2.0
"""Checks of the processors that the ranks may use: their frequency, and their distance to GPUs and network cards."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_nixl.checks.doctor.check import (
    Requirements,
    check,
    not_applicable,
    passed,
    unknown,
    warned,
)
from pytest_nixl.core.sentences import named, plural
from pytest_nixl.host.cuda_visible import visible
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.rdma import network_cards
from pytest_nixl.host.system import FrequencyPolicy, cpu_list, cpu_numbers
from pytest_nixl.model.verdicts import Judgement

#: With these drivers the governor ``powersave`` is the usual one, and the preference decides how fast a core becomes.
_PREFERENCE_DECIDES = ("intel_pstate", "amd-pstate-epp")
_SAVING = ("power", "balance_power")
_STATUS_REMEDY = "run `grep Cpus_allowed_list /proc/self/status` where the ranks run"


@check("cpu-governor", "Do the processors that this process may use run at full speed while they work?")
def cpu_governor(facts: Facts, expected: Requirements) -> Judgement:
    """The kernel does not slow down the cores that a process may use to save power."""
    allowed = facts.host.cores.allowed
    policies = facts.host.cores.policies
    if not policies:
        return not_applicable("the kernel does not set the frequency of the processors, as in most virtual machines")
    if allowed.value is None:
        return unknown(f"{allowed.source}: {allowed.why}", _STATUS_REMEDY)
    ours = cpu_numbers(allowed.value)
    used = [(policy, ours & cpu_numbers(policy.cpus)) for policy in policies]
    used = [(policy, cpus) for policy, cpus in used if cpus]
    saving = [(policy, cpus) for policy, cpus in used if _saves(policy)]
    if saving:
        cpus = frozenset().union(*(cpus for _, cpus in saving))
        return warned(
            f"{plural(len(cpus), 'core')} of the {len(ours)} that this process may use save power: {cpu_list(cpus)} "
            f"({named(dict.fromkeys(map(_describe, (policy for policy, _ in saving))))}; {saving[0][0].source})",
            "while you measure, run `cpupower frequency-set --governor performance` on the host, or write performance "
            "into each /sys/devices/system/cpu/cpufreq/policy*/scaling_governor; in Kubernetes set it in the node's "
            "image or its tuned profile",
        )
    listing = named(dict.fromkeys(_describe(policy) for policy, _ in used)) or "none of these cores has a governor"
    return passed(f"frequency of cores {allowed.value}: {listing}")


def _saves(policy: FrequencyPolicy) -> bool:
    if policy.governor != "powersave":
        return False
    return policy.driver not in _PREFERENCE_DECIDES or policy.preference in _SAVING


def _describe(policy: FrequencyPolicy) -> str:
    of = f" of {policy.driver}" if policy.driver else ""
    return f"governor {policy.governor}{of}" + (f", preference {policy.preference}" if policy.preference else "")


@check("numa-cores", "May this process use cores of the NUMA nodes of its GPUs and of a network card?")
def numa_cores(facts: Facts, expected: Requirements) -> Judgement:
    """A process may use cores of the NUMA nodes of its GPUs and of a network card."""
    nodes = {node.number: cpu_numbers(node.cpus) for node in facts.host.numa}
    with_cores = [number for number, cpus in nodes.items() if cpus]
    if len(with_cores) < 2:
        return not_applicable(f"this host has {plural(len(with_cores), 'NUMA node')} with cores")
    shown = visible(facts.gpu.gpus, facts.environment.values).gpus
    gpus = {f"GPU {gpu.index}": gpu.numa for gpu in shown if gpu is not None and gpu.numa in nodes}
    cards = {card.name: card.numa for card in network_cards(facts.rdma) if card.numa in nodes}
    if not gpus and not cards:
        return not_applicable("no GPU and no RDMA device with a known NUMA node was found")
    allowed = facts.host.cores.allowed
    if allowed.value is None:
        return unknown(f"{allowed.source}: {allowed.why}", _STATUS_REMEDY)
    ours = cpu_numbers(allowed.value)
    near = {number for number, cpus in nodes.items() if cpus & ours}
    may_use = f"this process may use cores {allowed.value} of {_nodes(near)}"
    far = {name: node for name, node in gpus.items() if node not in near}
    if cards and not near & set(cards.values()):
        far |= cards
    if far:
        return warned(
            f"{may_use}, but {named(f'{name} is at node {node}' for name, node in far.items())}",
            f"give the ranks cores of {_nodes(far.values())}: `numactl --cpunodebind`, `srun --cpu-bind`, a cpuset of "
            "the container with cores of each node, or in Kubernetes the topologyManagerPolicy single-numa-node; or "
            "give this process only GPUs and cards of its own node",
        )
    other = [name for name, node in cards.items() if node not in near]
    suffix = f"; network cards at other nodes: {named(other)}" if other else ""
    return passed(
        f"{may_use}, where its {plural(len(gpus), 'GPU')} and a network card are{suffix}"
        if gpus and cards
        else f"{may_use}, where {named([*gpus, *cards])} are{suffix}"
    )


def _nodes(numbers: Iterable[int]) -> str:
    listed = sorted(set(numbers))
    return f"NUMA node{'' if len(listed) == 1 else 's'} {', '.join(map(str, listed)) or 'none'}"
