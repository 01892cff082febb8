# SPDX-License-Identifier: Apache-2.0
"""The pairs of ranks that are measured, and differences between the ranks' hosts and verdicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.fake_sysfs import facts_of

from pytest_nixl.checks.doctor.check import failed, not_applicable, passed, warned
from pytest_nixl.checks.doctor.ranks import RankDifference, compare_hosts, everywhere, gather_hosts, ranks_agree
from pytest_nixl.cluster_hooks import command_of
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.recorded_tree import Fact
from pytest_nixl.host.system import Memlock
from pytest_nixl.model.settings import OPTIONS, Settings
from pytest_nixl.model.traffic_pattern import RankPairing
from pytest_nixl.model.verdicts import Judgement

MakeSettings = Callable[..., Settings]


@pytest.mark.parametrize(
    ("text", "ranks", "expected"),
    [
        ("ring", 4, ((0, 1), (1, 2), (2, 3), (3, 0))),
        ("ring", 3, ((0, 1), (1, 2), (2, 0))),
        ("first", 4, ((0, 1), (0, 2), (0, 3))),
        ("all", 4, ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))),
        ("3:1, 0:2", 4, ((3, 1), (0, 2))),
        *((text, ranks, ((0, 1),)) for text in ("ring", "first", "all", "0:1") for ranks in (1, 2)),
    ],
)
def test_pairs_that_are_measured(text: str, ranks: int, expected: object) -> None:
    assert RankPairing.parse(text).of(ranks) == expected


def test_only_what_belongs_to_a_rank_may_differ(make_settings: MakeSettings) -> None:
    compared = command_of(make_settings(), [], 0).options
    assert {option.flag.removeprefix("--nixl-") for option in OPTIONS if option.flag not in compared} == {
        *("etcd", "etcd-server", "etcd-image", "etcd-cacert", "etcd-cert", "etcd-key", "etcd-user", "etcd-listen"),
        *("rank", "group-token", "log-dir", "file-dir", "s3", "nixlbench", "raw-tools-dir", "image", "store", "report"),
    }


GOOD, BAD, IDLE = passed("64 GiB"), failed("64 KiB", "raise it"), not_applicable("none")


@pytest.mark.parametrize(
    ("judgements", "expected"),
    [
        ([BAD], BAD),
        ([GOOD, GOOD, GOOD], passed("all 3 ranks: 64 GiB")),
        ([GOOD, BAD, GOOD], failed("rank 1: 64 KiB", "raise it")),
        ([BAD, GOOD, BAD], failed("rank 0, rank 2: 64 KiB", "raise it")),
        ([BAD, GOOD, failed("1 KiB", "raise it")], failed("rank 0: 64 KiB; rank 2: 1 KiB", "raise it")),
        ([failed("a", "b"), failed("a", "c")], failed("all 2 ranks: a", "b; c")),
        ([GOOD, IDLE, warned("odd", "look")], warned("rank 2: odd", "look")),
        ([IDLE, GOOD, IDLE], passed("rank 1: 64 GiB")),
        ([*[BAD] * 9, GOOD], failed(f"{', '.join(f'rank {n}' for n in range(9))}: 64 KiB", "raise it")),
        ([*[BAD] * 10, GOOD], failed(f"{', '.join(f'rank {n}' for n in range(8))} and 2 more: 64 KiB", "raise it")),
    ],
)
def test_the_worst_verdict_is_reported_with_its_ranks(judgements: list[Judgement], expected: Judgement) -> None:
    assert everywhere([f"rank {number}" for number in range(len(judgements))], judgements) == expected


@pytest.fixture(scope="module")
def host() -> Facts:
    facts = facts_of("g5.48xl")
    return changed(facts, "network.default", facts.network.nics[0].name)


def changed(facts: Facts, name: str, value: object) -> Facts:
    """Change a fact, such as ``software.nixl``."""
    part, _, field = name.partition(".")
    fact = Fact(value, "made by a test")
    return replace(facts, **{part: replace(getattr(facts, part), **{field: fact})})


def steering(facts: Facts, **variables: str) -> Facts:
    return replace(facts, environment=replace(facts.environment, steering=variables))


def interfaces(facts: Facts, **values: Any) -> Facts:
    nics = tuple(replace(nic, **values) for nic in facts.network.nics)
    return replace(facts, network=replace(facts.network, nics=nics))


def devices(facts: Facts, *rates: float | None) -> Facts:
    device = facts.rdma[0]
    ports = [replace(device.ports[0], rate=rate and rate / 8) for rate in rates]
    return replace(facts, rdma=tuple(replace(device, ports=(port,)) for port in ports))


def gpus(facts: Facts, *names: str) -> Facts:
    listed = tuple(replace(facts.gpu.gpus[0], name=name) for name in names)
    return replace(facts, gpu=replace(facts.gpu, gpus=listed))


IMAGE = "run the same image, by its digest, on every rank"
DRIVER = "install the same driver on all hosts"
SPACE = "NIXL_ETCD_NAMESPACE"
SPACE_REMEDY = f"set {SPACE}=/nixl/agents on every rank; with different values the ranks never find each other"
#: Of each difference: its subject, how a rank differs, its value, that of the other ranks, and the remedy.
GRAVE: list[tuple[str, Callable[[Facts], Facts], str, str, str]] = [
    ("NIXL", lambda host: changed(host, "software.nixl", "1.4.1"), "1.4.1", "1.5.0", IMAGE),
    ("NIXL", lambda host: changed(host, "software.nixl", None), "none", "1.5.0", IMAGE),
    ("NIXL's package", lambda host: changed(host, "software.nixl_package", "nixl"), "nixl", "nixl-cu12", IMAGE),
    ("UCX", lambda host: changed(host, "software.ucx", "1.19.0"), "1.19.0", "1.21.0", IMAGE),
    ("libfabric", lambda host: changed(host, "software.libfabric", "1.22"), "1.22", "2.3", IMAGE),
    ("the architecture", lambda host: changed(host, "host.architecture", "arm"), "arm", "x86_64",
     "use hosts of one kind"),
    ("the GPU driver", lambda host: changed(host, "gpu.driver", "550.54.15"), "550.54.15", "570.133.20", DRIVER),
    ("CUDA", lambda host: changed(host, "gpu.cuda", None), "none", "12.8", DRIVER),
    (
        "GPUs", lambda host: gpus(host, "A", "B", "A"), "2 A, 1 B", "8 GPU",
        "use hosts of one kind, and give each rank the same number of GPUs",
    ),
    (
        "RDMA devices", lambda host: devices(host, 25e9, 100e9, 25e9, None),
        "1 at 100 Gb/s, 2 at 25 Gb/s, 1 at unknown rate", "1 at 100 Gb/s",
        "use hosts of one kind, give each rank the same number of devices, and check the slow device's cable",
    ),
    (
        "the MTU of the interface of the default route", lambda host: interfaces(host, mtu=1500), "1500", "9001",
        "give all interfaces the same MTU: the other side silently drops larger packets",
    ),
    (
        "locked memory", lambda host: changed(host, "host.memlock", Memlock(65536, None, privileged=False)),
        "64 KiB", "unlimited", "set memlock to unlimited on every host",
    ),
    ("UCX_TLS", lambda host: steering(host, UCX_TLS="tcp"), "tcp", "not set", "`unset UCX_TLS` on rank 2 (node-a)"),
    ("ETCD_ENDPOINTS", lambda host: steering(host, ETCD_ENDPOINTS="e:1", HTTP_PROXY="p"), "e:1", "not set",
     "`unset ETCD_ENDPOINTS` on rank 2 (node-a)"),
    ("FI_X", lambda host: steering(host, FI_X="1"), "1", "not set", "`unset FI_X` on rank 2 (node-a)"),
    (SPACE, lambda host: steering(host, **{SPACE: "/a"}), "/a", "/nixl/agents/ (the default)", SPACE_REMEDY),
]  # fmt: skip
#: Those that may be meant.
MILD: list[tuple[str, Callable[[Facts], Facts], str, str, str]] = [
    ("Python", lambda host: changed(host, "software.python", "3.9.1"), "3.9.1", "3.12.3", IMAGE),
    ("the EFA installer", lambda host: changed(host, "software.efa_installer", None), "none", "1.43.2", IMAGE),
    (
        "the kernel", lambda host: changed(host, "host.kernel", "5.4.0"), "5.4.0", "6.8.0-1030-aws",
        "install the same kernel on all hosts",
    ),
    (
        "DMA-BUF", lambda host: changed(host, "gpu.dma_buf", False), "False", "True",
        "install the same driver and kernel on all hosts",
    ),
    *(
        (name, lambda host, name=name: steering(host, **{name: "a:1"}), "a:1", "not set",
         f"`unset {name}` on rank 2 (node-a)")
        for name in ("UCX_NET_DEVICES", "FI_TCP_IFACE", "NIXL_PLUGIN_DIR", "NIXL_IMAGE", "NIXL_WORKER_TYPE")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("row", "judge"), [*((row, failed) for row in GRAVE), *((row, warned) for row in MILD)])
def test_rank_that_differs_is_named(
    host: Facts,
    row: tuple[str, Callable[[Facts], Facts], str, str, str],
    judge: Callable[[str, str], Judgement],
) -> None:
    subject, change, odd, usual, remedy = row
    reason = f"{subject} differs: rank 2 (node-a) has {odd}; the other 3 have {usual}"
    assert compare_hosts([host, host, change(host), host]) == (RankDifference(subject, (2,), judge(reason, remedy)),)


def test_differences_are_in_the_order_of_their_subjects(host: Facts) -> None:
    other = host
    for _, change, *_ in (*GRAVE[1:], *MILD[:4]):
        other = change(other)
    software, cards = ["NIXL", "NIXL's package", "UCX", "libfabric", "Python"], ["GPUs", "RDMA devices"]
    assert [difference.subject for difference in compare_hosts([host, other])] == [
        *software, "the architecture", "the kernel", "the GPU driver", "CUDA", *cards, "the EFA installer",
        "the MTU of the interface of the default route", "locked memory", "DMA-BUF", SPACE,
    ]  # fmt: skip


def test_the_facts_of_every_rank_are_read(host: Facts, make_settings: MakeSettings) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    answers: dict[str, list[Any]] = {"address": ["10.0.0.1", "10.0.0.2"], "facts": [host.plain(), host.plain()]}

    def ask(name: str, **arguments: Any) -> list[Any]:
        asked.append((name, arguments))
        return answers[name]

    cluster: Any = SimpleNamespace(several=True, names=["rank 0 on a", "rank 1 on b"], ask=ask)
    assert gather_hosts(make_settings(), cluster) == [host, host]
    assert asked == [("address", {}), ("facts", {"peers": answers["address"]})]
    answers["facts"][1] = {"odd": 1}
    with pytest.raises(NixlPluginError) as raised:
        gather_hosts(make_settings(), cluster)
    assert raised.value.reason.startswith("rank 1 on b sent facts that this version of pytest-nixl does not know: ")
    assert raised.value.remedy == "install the same pytest-nixl on every rank"


@pytest.mark.parametrize(
    ("values", "odd", "reason"),
    [
        (["a", "b"], (0, 1), "rank 0 (node-a) has a, rank 1 (node-a) has b"),
        (["a", "b", "a"], (1,), "rank 1 (node-a) has b; the other 2 have a"),
        (["a", "b", "a", "b"], (0, 1, 2, 3), ", ".join(f"rank {n} (node-a) has {'ab'[n % 2]}" for n in range(4))),
        (["b", "", "a"], (), ""),  # what is not known of a rank is not compared
    ],
)
def test_the_ranks_that_differ_are_those_outside_the_majority(
    host: Facts, values: list[str], odd: tuple[int, ...], reason: str
) -> None:
    differing = compare_hosts([changed(host, "environment.image", value) for value in values])
    assert [(difference.odd, difference.judgement) for difference in differing] == (
        [(odd, warned(f"the image differs: {reason}", IMAGE))] if odd else []
    )


def test_a_slower_interface_of_the_default_route_is_named(host: Facts) -> None:
    hosts = [interfaces(host, rate=rate / 8) for rate in (25e9, 100e9, 100e9)]
    reason = "the rate of the interface of the default route differs"
    remedy = "check cable and switch port of the rank that differs"
    difference = failed(f"{reason}: rank 0 (node-a) has 25 Gb/s; the other 2 have 100 Gb/s", remedy)
    assert [rank.judgement for rank in compare_hosts(hosts)] == [difference]
    assert compare_hosts([host, *hosts[1:]]) == (), "what is not known of a rank is not compared"
    other = replace(host.network, default=Fact("eth9", "made by a test"))
    assert compare_hosts([hosts[0], replace(hosts[1], network=other)]) == (), "nor is another interface"


def test_namespaces_that_differ_only_in_slashes_are_explained(host: Facts) -> None:
    slashes = "; the names differ only in slashes, but etcd keeps them apart"
    for other, note in (("nixl/agents", slashes), ("/nixl/agents", slashes), ("/other", "")):
        judged = ranks_agree([host, steering(host, **{SPACE: other})])
        listing = f"rank 0 (node-a) has /nixl/agents/ (the default), rank 1 (node-a) has {other}"
        assert judged == failed(f"{SPACE} differs: {listing}{note}", SPACE_REMEDY)


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        (["", "tcp"], "`unset UCX_TLS` on rank 1 (node-a)"),
        (["tcp", ""], "`unset UCX_TLS` on rank 0 (node-a)"),
        (["rc,a b", "rc,a b", ""], "`export UCX_TLS='rc,a b'` on rank 2 (node-a)"),
        (["rc", "ud", "tcp"], "`export UCX_TLS=rc` on rank 1 (node-a), rank 2 (node-a)"),
        (["rc", "ud", ""], "`unset UCX_TLS` on rank 0 (node-a), rank 1 (node-a)"),
    ],
)
def test_remedy_for_a_variable_that_differs_names_the_ranks_and_their_hosts(
    host: Facts, values: list[str], remedy: str
) -> None:
    hosts = [steering(host, **({"UCX_TLS": text} if text else {})) for text in values]
    assert [difference.judgement.remedy for difference in compare_hosts(hosts)] == [remedy]


def test_ranks_agree_if_nothing_grave_differs(host: Facts) -> None:
    newer, python = changed(host, "software.nixl", "1.6"), changed(host, "software.python", "3.9.1")
    assert ranks_agree([host]) == not_applicable("this run has only one rank")
    assert ranks_agree([host, host]) == passed("the hosts of 2 ranks agree")
    first = "rank 0 (node-a) has {}, rank 1 (node-a) has {}".format
    mild = warned(f"Python differs: {first('3.12.3', '3.9.1')}", IMAGE)
    assert ranks_agree([host, python]) == mild
    ucx = changed(changed(python, "software.nixl", "1.6"), "software.ucx", "1.2")
    reason = f"NIXL differs: {first('1.5.0', '1.6')}; UCX differs: {first('1.21.0', '1.2')}"
    assert ranks_agree([host, ucx]) == failed(reason, IMAGE)
    assert ranks_agree([host, newer]) == failed(f"NIXL differs: {first('1.5.0', '1.6')}", IMAGE)
