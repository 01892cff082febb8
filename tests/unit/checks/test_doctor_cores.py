# SPDX-License-Identifier: Apache-2.0
"""The frequency of cores, and their distance to GPUs and network cards, in recorded trees."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from helpers.fake_sysfs import Tree, p5

from pytest_nixl.checks.doctor.catalogue import judge_by_id
from pytest_nixl.checks.doctor.check import Requirements
from pytest_nixl.host.facts import gather
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.host.system import cpu_list, cpu_numbers, read_cores
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.verdicts import Judgement, Verdict

POLICY = "/sys/devices/system/cpu/cpufreq/policy0"
STATUS = "/proc/self/status"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return p5(tmp_path_factory.mktemp("healthy") / "tree")


@pytest.fixture
def tree(healthy: Tree) -> Iterator[Tree]:
    with healthy.changed() as tree:
        yield tree


def ask(tree: Tree, check: str) -> Judgement:
    facts = gather(FactsRoot(tree.folder), backends=(), etcd="", environ={})
    return judge_by_id(check, facts, Requirements(load_profile("loopback"), ("UCX",)))


@pytest.mark.parametrize(
    ("driver", "preference", "verdict"),
    [
        ("acpi-cpufreq", "", Verdict.WARN),
        ("intel_cpufreq", "", Verdict.WARN),
        ("", "", Verdict.WARN),
        ("intel_pstate", "power", Verdict.WARN),
        ("intel_pstate", "balance_power", Verdict.WARN),
        ("amd-pstate-epp", "balance_power", Verdict.WARN),
        ("intel_pstate", "balance_performance", Verdict.PASS),
        ("intel_pstate", "performance", Verdict.PASS),
        ("intel_pstate", "default", Verdict.PASS),
    ],
)
def test_powersave_is_judged_by_what_it_means_for_the_driver(
    tree: Tree, driver: str, preference: str, verdict: Verdict
) -> None:
    tree.write(f"{POLICY}/scaling_governor", "powersave")
    tree.write(f"{POLICY}/scaling_driver", driver)
    if preference:
        tree.write(f"{POLICY}/energy_performance_preference", preference)
    judged = ask(tree, "cpu-governor")
    assert judged.verdict is verdict, judged.reason
    assert "governor powersave" in judged.reason
    assert preference in judged.reason
    assert bool(judged.remedy) == (verdict is Verdict.WARN)


def test_cores_that_the_process_may_not_use_do_not_count(tree: Tree) -> None:
    tree.write(f"{POLICY}/scaling_governor", "powersave")
    tree.replace(STATUS, "0-191", "1-191")
    judged = ask(tree, "cpu-governor")
    assert judged.verdict is Verdict.PASS
    assert judged.reason == "frequency of cores 1-191: governor performance of acpi-cpufreq"


def test_a_machine_without_governors_is_not_applicable(tree: Tree) -> None:
    tree.remove("/sys/devices/system/cpu/cpufreq")
    assert ask(tree, "cpu-governor").verdict is Verdict.NOT_APPLICABLE


@pytest.mark.parametrize("check", ["cpu-governor", "numa-cores"])
def test_a_status_without_the_line_is_unknown(tree: Tree, check: str) -> None:
    tree.write(STATUS, "CapEff:\t0000000000000000")
    judged = ask(tree, check)
    assert judged.verdict is Verdict.UNKNOWN
    assert judged.reason == "/proc/self/status: it has no line Cpus_allowed_list"


def test_a_rank_that_is_pinned_beside_its_own_gpu_passes(tree: Tree) -> None:
    tree.replace(STATUS, "0-191", "48-95")
    tree.change("nvml", lambda found: found.update(gpus=found["gpus"][4:], pairs=[]))
    judged = ask(tree, "numa-cores")
    assert judged.verdict is Verdict.PASS, judged.reason
    assert judged.reason.startswith("this process may use cores 48-95 of NUMA node 1, where its 4 GPUs and a network")
    assert "network cards at other nodes: rdmap79s0, rdmap80s0" in judged.reason


def test_gpus_that_cuda_hides_do_not_count(tree: Tree) -> None:
    tree.replace(STATUS, "0-191", "48-95")
    assert "GPU 0 is at node 0, GPU 1 is at node 0" in ask(tree, "numa-cores").reason
    tree.variable("CUDA_VISIBLE_DEVICES", "4,5")
    judged = ask(tree, "numa-cores")
    assert judged.verdict is Verdict.PASS
    assert "where its 2 GPUs and a network card are" in judged.reason


def test_no_near_network_card_is_named(tree: Tree) -> None:
    tree.replace(STATUS, "0-191", "0-47")
    tree.change("nvml", lambda found: found.update(gpus=found["gpus"][:4], pairs=[]))
    for place in list(tree.folder.glob("sys/class/infiniband/*/device/numa_node")):
        real = place.resolve()
        tree.write(str(real.relative_to(tree.folder.resolve())), 1)
    judged = ask(tree, "numa-cores")
    assert judged.verdict is Verdict.WARN, judged.reason
    assert "cores 0-47 of NUMA node 0, but rdmap79s0 is at node 1, " in judged.reason
    assert "give the ranks cores of NUMA node 1:" in judged.remedy


def test_a_host_of_one_node_is_not_applicable(tree: Tree) -> None:
    tree.remove("/sys/devices/system/node/node1")
    judged = ask(tree, "numa-cores")
    assert (judged.verdict, judged.reason) == (Verdict.NOT_APPLICABLE, "this host has 1 NUMA node with cores")


def test_a_host_without_devices_is_not_applicable(tree: Tree) -> None:
    tree.remove("/sys/class/infiniband")
    tree.change("nvml", lambda found: found.update(gpus=[], pairs=[]))
    assert ask(tree, "numa-cores").verdict is Verdict.NOT_APPLICABLE


def test_the_cores_of_this_process_are_read() -> None:
    assert cpu_numbers(read_cores(FactsRoot()).allowed.value or "") == os.sched_getaffinity(0)


@pytest.mark.parametrize("listed", ["0", "0-3,8", "1,3,5-6"])
def test_a_list_of_the_kernel_is_read_and_written(listed: str) -> None:
    assert cpu_list(cpu_numbers(listed)) == listed


@pytest.mark.parametrize("listed", ["", "a", "0-", "-3", "9999999", "3 4", "0-3;"])
def test_what_is_not_such_a_list_has_no_cores(listed: str) -> None:
    assert cpu_numbers(listed) == frozenset()


def test_a_list_without_end_is_cut() -> None:
    assert len(cpu_numbers("0-999999")) == (1 << 16) + 1
