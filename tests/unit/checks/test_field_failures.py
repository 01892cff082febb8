# SPDX-License-Identifier: Apache-2.0
"""Failures that users reported in public, as data: each is made here or by a named test, and named by a check.

Rows with ``tree`` or ``pods`` plant the fault in a healthy p5.48xlarge's tree, or in two pod specs, and see it named.
Rows with ``test`` have a test of their own, which makes the fault with the real NIXL or says what it doubles.
``only_symptom`` says that a check fails, but does not name the cause. The others say why nothing catches them.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_sysfs import Tree, p5

from pytest_nixl.checks.connector.comparison import compare_connectors
from pytest_nixl.checks.connector.containers import read_engine
from pytest_nixl.checks.connector.rules import RULES
from pytest_nixl.checks.doctor.catalogue import judge_by_id
from pytest_nixl.checks.doctor.check import Requirements
from pytest_nixl.host.facts import gather
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.session.parsers import parse_backends
from pytest_nixl.session.selection import suite_checks

TESTS = Path(__file__).parents[2]
BACKENDS = ("UCX", "LIBFABRIC")
BAD = (Verdict.FAIL, Verdict.WARN)
#: Ids that are no check of a suite: an option and commands.
OTHERS = {"--nixl-backend", "pytest-nixl telemetry"}


@dataclass(frozen=True)
class Report:
    """A failure that users reported.

    :param reports: the public reports.
    :param id: the check, or the connector's field, that names it; empty if nothing does.
    :param tree: puts the fault into a host's tree.
    :param pods: for prefill and decode what differs from a right pod: ``env``, ``transfer``, ``args`` or ``efa``.
    :param reason: what the check must say of a fault in a tree, so that the cause is named.
    :param test: the test that makes the fault, ``FILE::NAME``.
    :param only_symptom: what the check does not name; empty if it names the cause.
    :param gap: why nothing catches it.
    """

    reports: str
    id: str = ""
    tree: Callable[[Tree], Any] | None = None
    pods: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
    reason: str = ""
    test: str = ""
    only_symptom: str = ""
    gap: str = ""


def _variables(**variables: str) -> Callable[[Tree], None]:
    def plant(tree: Tree) -> None:
        for name, value in variables.items():
            tree.variable(name, value)

    return plant


def _change(answer: str, **values: Any) -> Callable[[Tree], None]:
    return lambda tree: tree.change(answer, lambda answers: answers.update(values))


def _library(path: str) -> Callable[[Tree], None]:
    return lambda tree: tree.change("nixl", lambda answers: answers["libraries"].append(path))


def _all(*plants: Callable[[Tree], Any]) -> Callable[[Tree], None]:
    def plant(tree: Tree) -> None:
        for plant in plants:
            plant(tree)

    return plant


def _change_ucx_rdma(how: Callable[[Any], Any]) -> Callable[[Tree], None]:
    return lambda tree: tree.change("nixl", lambda answers: how(answers["ucx_rdma"]))


def _other_kernel_abi(nixl: Any) -> None:
    del nixl["offered"]["rdmap79s0"]
    nixl["answers"]["rdmap79s0"].update(listed=False, shared_queues=None)
    nixl["other_abi"].update(rdmap79s0="Driver efa does not support the kernel ABI of 3")


def _management_card(tree: Tree) -> None:
    """Move a network card to a PCI root of its own, away from all GPUs; UCX cannot be created and does not say why."""
    path = "/sys/devices/pci0000:f0/0000:f0:01.0/0000:f1:00.0"
    for name, text in (("vendor", "0x1d0f"), ("device", "0xefa2"), ("class", "0x020000"), ("numa_node", "0")):
        tree.write(f"{path}/{name}", text)
    tree.link(f"{path}/driver", "/sys/bus/pci/drivers/efa")
    tree.remove("/sys/class/infiniband/rdmap79s0/device")
    tree.link("/sys/class/infiniband/rdmap79s0/device", path)
    _change("nixl", backends=_UCX_REFUSES)(tree)


def _bad_link(tree: Tree) -> None:
    for place in tree.place("/sys/class/infiniband").iterdir():
        count = 12 if place.name == "rdmap79s0" else 0
        tree.write(f"/sys/class/infiniband/{place.name}/ports/1/counters/link_downed", count)


def _both(**pod: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return pod, pod


_UCX_REFUSES = {"UCX": {
    "missing": [], "error": "nixlBackendError: NIXL_ERR_BACKEND", "remedy": "", "memories": [], "versions": {},
    "plugin": "/usr/local/nixl/lib/x86_64-linux-gnu/plugins/libplugin_UCX.so", "said": []}}  # fmt: skip
#: vLLM compares blocks across layers from 0.16.0 to 0.28.
_V25 = "vllm/vllm-openai:v0.25.0"
_CROSS = {"kv_connector_extra_config": {"enable_cross_layers_blocks": True}}
_INNER = [{"kv_connector": "DynamoConnector"}, {"kv_connector": "NixlConnector", "kv_role": "kv_both", **_CROSS}]
_PD = {"kv_connector": "PdConnector", "kv_connector_extra_config": {"connectors": _INNER}}
_SPECULATIVE = [{"args": ["--speculative-config", json.dumps({"method": name})]} for name in ("mtp", "eagle")]
_UNREAD = {"error": "nixlNoTelemetryError: NIXL_ERR_NO_TELEMETRY"}
_NO_EP = {"path": "/site/nixl_ep_cu12", "why": "it is built for torch 2.11, and torch is 2.9.0"}

FIRST = (
    Report("post cost", "kv-post-scaling", test="integration/test_kv_post_delay.py::"
           "test_a_microsecond_per_descriptor_in_post_is_found_and_nothing_where_there_is_none"),
    Report("registration", "registration-growth", test="integration/test_control_path_suite.py::"
           "test_registration_that_becomes_slower_with_each_call_is_found"),
    Report("notifications", "threads-many-notifiers",
           test="unit/checks/test_threads.py::test_notifications_of_many_peers_are_counted"),
    Report("cu12 beside cu13", "nixl-cuda", test="integration/test_two_wheels.py::"
           "test_loaded_wheel_is_named_and_fails_only_if_it_is_not_for_the_cuda_of_torch"),
    Report("a region named twice", "misuse-duplicate-descriptor",
           test="integration/test_faults_suite.py::test_new_crashes_fail_and_name_the_misuse"),
    Report("leaks", "endurance-publication",
           test="integration/test_endurance_suite.py::test_keys_that_stay_in_etcd_are_found"),
    Report("LIBFABRIC silently over tcp", "bandwidth",
           test="libfabric/test_real_libfabric.py::test_transport_that_is_not_accepted_is_wrong_transport"),
    Report("interface number of libefa", "verbs-providers", tree=lambda tree: tree.change(
        "image", lambda answers: answers["verbs"]["providers"][0].update(abi=59))),
    Report("OBJ, io_uring", "storage-queues",
           test="unit/checks/test_doctor.py::test_the_doctor_says_what_differs_from_a_healthy_host"),
    Report("plugins that do not load", "plugin-libraries",
           test="integration/test_doctor_real_faults.py::test_plugin_whose_libraries_are_missing_is_reported"),
    Report("threads", "threads-one-agent",
           test="unit/checks/test_threads.py::test_a_fault_of_shared_agents_is_counted"),
    Report("versions of ranks", "ranks-agree",
           test="cluster/test_faults.py::test_every_rank_ends_and_reports_the_fault"),
    Report("metadata over etcd's limit", "metadata-fits-etcd", test="integration/test_control_path_suite.py::"
           "test_metadata_of_40000_regions_is_refused_by_etcd_and_reported"),
    Report("nixl#1044", "endpoints-well-formed",
           test="integration/test_uri_suite.py::test_a_deployment_with_a_broken_form_fails"),
    Report("nixl#1921", gap="the hang of FI_MORE needs EFA hardware: no provider that runs here has it"),
    Report("the survivor of a restarted peer", "transfer-target-restarted", test="unit/checks/test_transfer_faults.py::"
           "test_a_survivor_with_a_fault_is_caught", only_symptom="never run over RDMA"),
    Report("telemetry", "telemetry-in-process", tree=_all(
        _variables(NIXL_TELEMETRY_ENABLE="n"), _change("nixl", telemetry=_UNREAD))),
    Report("nixl#1668", "threads-many-agents", test="unit/checks/test_threads.py::"
           "test_an_agent_that_cannot_be_created_beside_others_is_missing",
           only_symptom="the release with the defect (0.10.1) passes on a CPU"),
    Report("libfabric at build and at run time", "plugin-libraries", test="integration/test_doctor_real_faults.py::"
           "test_libfabric_without_the_symbol_versions_of_the_plugin_is_reported"),
)  # fmt: skip

SECOND = (
    Report("nixl#2266, vllm#58038, dynamo#12952, dynamo#10536", "NIXL_TELEMETRY_ENABLE",
           pods=_both(env={"NIXL_TELEMETRY_ENABLE": "n"})),
    Report("vllm#51777", "nixl-packages-agree", tree=_change(
        "image", packages={"nixl": "1.3.1", "nixl-cu13": "1.3.2"})),
    Report("nixl#1798, pytorch#187727, vllm#44143", "nixl-packages-agree", tree=_all(
        _variables(VLLM_ALL2ALL_BACKEND="nixl_ep"), _change("image", nixl_ep=_NO_EP))),
    Report("nixl#1754, InferenceX#2822", "PYTORCH_CUDA_ALLOC_CONF",
           pods=_both(env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})),
    Report("vllm#51377, modelexpress#600", "bandwidth", test="unit/judge/test_row.py::"
           "test_the_remedy_for_a_wrong_transport_is_for_the_accepted_ones"),
    Report("vllm#52607, nixl#2208", "bandwidth",
           test="unit/judge/test_row.py::test_the_remedy_for_a_wrong_transport_is_for_the_accepted_ones"),
    Report("vllm#55906, ucx#11978", "bandwidth",
           test="unit/judge/test_row.py::test_the_remedy_for_a_wrong_transport_is_for_the_accepted_ones"),
    # NIXL's error of the row is made by the fault; the response with garbage is the engine's.
    Report("dynamo#12463", "bandwidth", test="unit/core/test_rdma_fault.py::"
           "test_gpu_and_card_passed_through_under_one_switch_are_named"),
    Report("dynamo#10852", "backend-loads", tree=_management_card,
           reason="UCX uses all 32 RDMA devices, and rdmap79s0 is near no GPU"),
    Report("InferenceX#1944, sglang#29127", "rdma-ports", tree=_bad_link,
           reason="rdmap79s0 has counted 12 link_downed, and half of the others at most 0"),
    Report("ucx#11259", "gpus-together",
           test="unit/checks/test_gpus_together.py::test_gpus_are_judged_by_the_one_that_starves_and_by_the_scaling_of_the_profile"),
    Report("modelexpress#449", "bandwidth",
           test="unit/judge/test_row.py::test_cards_that_a_slow_row_left_idle_are_named"),
    Report("sglang#30099", "ucx-uses-rdma", tree=_change_ucx_rdma(lambda answers: answers["offered"].pop("rdmap79s0")),
           reason="rdmap79s0: it has no shared receive queues (max_srq is 0), which UCX's rc needs"),
    Report("nixl#1642", "ucx-uses-rdma", tree=_change_ucx_rdma(_other_kernel_abi),
           reason="libibverbs says: Driver efa does not support the kernel ABI of 3"),
    Report("prime-rl#2761, prime-rl#3204", "ucx-uses-rdma",
           tree=_change_ucx_rdma(lambda answers: answers.update(module="")),
           reason="this UCX has no RDMA module (libuct_ib.so)"),
    Report("awsome-inference#72, ray#62339", "EFA devices", pods=_both(efa=32, env={"NIXL_BACKEND": "LIBFABRIC"})),
    Report("ray#60817", "VLLM_NIXL_SIDE_CHANNEL_HOST", pods=_both(env={"VLLM_NIXL_SIDE_CHANNEL_HOST": "localhost"})),
    Report("vllm#47636", "VLLM_NIXL_SIDE_CHANNEL_HOST", pods=_both(
        env={"VLLM_NIXL_SIDE_CHANNEL_HOST": "0.0.0.0"}, transfer={"engine_id": "engine"})),
    Report("dynamo#10027", "enable_cross_layers_blocks",
           pods=({"transfer": _PD, "image": _V25}, {"transfer": _CROSS, "image": _V25})),
    Report("vllm#49230", "speculative method", pods=(_SPECULATIVE[0], _SPECULATIVE[1])),
    Report("vllm#55776", "--revision", pods=({"args": ["--revision", "v1"]}, {"args": ["--revision", "v2"]})),
    Report("TensorRT-LLM#18373", "transports-allowed", tree=_variables(UCX_TLS="tcp")),
    Report("vllm#41048", "vram-known", test="unit/nixl/test_vram.py::test_the_suite_tells_how_ucx_takes_gpu_memory"),
    Report("dynamo#6671", "libraries-once", tree=_library("/opt/nvidia/nvda_nixl/lib/libnixl.so")),
    Report("dynamo#12105, dynamo#12000", "libraries-once", tree=_library("/usr/local/lib/libfabric.so.1.30.0")),
    Report("nixl#1161", "variables-known", tree=_variables(FI_EFA_MAX_RAIL="4")),
    Report("smg#2382, smg#2503", "transfer-target-restarted", test="unit/checks/test_transfer_faults.py::"
           "test_a_target_that_listens_is_fetched_again_after_its_restart", only_symptom="never run over RDMA"),
    Report("vllm#58063", gap="the mapping of a dead peer's GPU memory by CUDA IPC needs two real GPUs to be held"),
    Report("vllm#55157, nixl#1978", "kv-requests", test="unit/checks/test_kv_ways.py::"
           "test_what_was_measured_is_described_with_what_prepares_descriptors_faster"),
    Report("dynamo#12750", "kv-storage", test="integration/test_kv_cache_suite.py::"
           "test_blocks_move_to_a_file_and_back_in_fragments_and_in_pieces"),
    Report("nixl#1769", gap="a default of OBJ that halves a fast server's rate shows only above 10 GB/s, which no S3 "
           "server here reaches"),
    Report("vllm#52234, vllm#52276", "pytest-nixl telemetry", test="unit/cli/test_telemetry.py::"
           "test_each_value_keeps_its_bound_or_fails"),
    Report("sglang#21078, LMCache#3520", "pytest-nixl telemetry", test="integration/test_live_nixl.py::"
           "test_files_that_an_engine_leaks_are_named_with_their_folder",
           only_symptom="that LMCache looks for files as if they were objects"),
    Report("nixl#1999", "--nixl-backend", test="unit/checks/test_field_failures.py::"
           "test_uccl_is_refused_with_its_reason"),
)  # fmt: skip
ALL = (*FIRST, *SECOND)
assert (len(FIRST), len(SECOND)) == (19, 34)


def _ids(reports: Sequence[Report]) -> list[str]:
    return [report.reports.partition(",")[0] for report in reports]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return p5(tmp_path_factory.mktemp("p5") / "tree")


def _judged(tree: Tree, report: Report) -> Judgement:
    facts = gather(FactsRoot(str(tree.folder)), backends=BACKENDS, environ={})
    return judge_by_id(report.id, facts, Requirements(load_profile("p5.48xlarge"), BACKENDS))


TREES = [report for report in ALL if report.tree is not None]


@pytest.mark.parametrize("report", TREES, ids=_ids(TREES))
def test_a_fault_of_a_host_is_named(report: Report, healthy: Tree) -> None:
    assert _judged(healthy, report).verdict is Verdict.PASS
    assert report.tree is not None
    with healthy.changed() as tree:
        report.tree(tree)
        judged = _judged(tree, report)
    assert judged.verdict in BAD
    assert report.reason in judged.reason


def test_only_a_card_near_no_gpu_is_left_out(healthy: Tree, tmp_path: Path) -> None:
    report = next(tree for tree in TREES if tree.reports == "dynamo#10852")
    moved, near = healthy.copy(tmp_path / "moved"), healthy.copy(tmp_path / "near")
    _management_card(moved)
    _change("nixl", backends=_UCX_REFUSES)(near)
    remedy = _judged(moved, report).remedy
    assert "`export UCX_NET_DEVICES=" in remedy
    assert "rdmap80s0:1" in remedy
    assert "rdmap79s0" not in remedy
    assert "UCX_NET_DEVICES" not in str(_judged(near, report))
    moved.variable("UCX_NET_DEVICES", "rdmap80s0:1")
    assert "near no GPU" not in str(_judged(moved, report))


def _pod(folder: Path, role: str, changes: Mapping[str, Any]) -> str:
    """Write a pod of vLLM that is right but for the changes."""
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", **changes.get("transfer", {})}
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": {"prefill": "10.0.0.1", "decode": "10.0.0.2"}[role], **changes.get("env", {})}
    container = {
        "name": role,
        "image": changes.get("image", "vllm/vllm-openai:v0.29.0"),
        "command": ["vllm", "serve", "Qwen/Qwen3-32B", "--kv-transfer-config", json.dumps(transfer)],
        "args": changes.get("args", []),
        "env": [{"name": name, "value": value} for name, value in env.items()],
        "resources": {"limits": {"vpc.amazonaws.com/efa": changes.get("efa", 0)}},
    }
    path = folder / f"{role}.json"
    path.write_text(json.dumps({"kind": "Pod", "metadata": {"name": role}, "spec": {"containers": [container]}}))
    return str(path)


def _bad_fields(folder: Path, pods: tuple[Mapping[str, Any], Mapping[str, Any]]) -> set[str]:
    sides = [read_engine(_pod(folder, role, pod)) for role, pod in zip(("prefill", "decode"), pods, strict=True)]
    return {result.rule.field for result in compare_connectors(*sides).results if result.verdict is Verdict.FAIL}


PODS = [report for report in ALL if report.pods is not None]


def test_right_pods_are_not_accused(tmp_path: Path) -> None:
    assert _bad_fields(tmp_path, _both()) == set()


@pytest.mark.parametrize("report", PODS, ids=_ids(PODS))
def test_a_fault_of_two_pods_is_named(report: Report, tmp_path: Path) -> None:
    assert report.pods is not None
    assert report.id in _bad_fields(tmp_path, report.pods)


@cache
def _tests_of(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_each_report_is_caught_by_a_check_that_exists_or_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    known_ids = {suite_check.id for suite_check in suite_checks()} | {rule.field for rule in RULES} | OTHERS
    for failure in ALL:
        file, _, name = failure.test.partition("::")
        assert bool(failure.id) is not bool(failure.gap), failure.reports
        assert not failure.id or failure.id in known_ids, failure.reports
        assert not failure.id or bool(failure.tree or failure.pods) is not bool(failure.test), failure.reports
        assert not failure.test or name in _tests_of(file), failure.test
    kinds = Counter("not" if failure.gap else "symptom" if failure.only_symptom else "named" for failure in ALL)
    with capsys.disabled():
        print(f"\nof {len(ALL)} reports {kinds['named']} are named by their cause, {kinds['symptom']} by their "
              f"symptom, and {kinds['not']} by nothing")  # fmt: skip
    assert kinds["named"] >= 46
    assert kinds["named"] + kinds["symptom"] >= 50


def test_uccl_is_refused_with_its_reason() -> None:
    with pytest.raises(ValueError, match=r"'UCCL' is not a supported backend: .*its transfers hang"):
        parse_backends("UCX,UCCL")
