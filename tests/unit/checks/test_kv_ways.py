# SPDX-License-Identifier: Apache-2.0
"""What the result of requests for KV blocks says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pytest_nixl.checks.kv_cache.blocks import BlockOrder, KvCorruption
from pytest_nixl.checks.kv_cache.check import (
    KvLaunches,
    KvRequestKind,
    describe,
    judge_requests,
    with_bounds,
)
from pytest_nixl.checks.kv_cache.samples import KvSamples, RequestTimes
from pytest_nixl.checks.kv_cache.storage import StoredRequests, judge_stored
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.measure.launch import Launch
from pytest_nixl.model.device_counters import CarrierBytes, LossyDevice
from pytest_nixl.model.expectation import Expectation
from pytest_nixl.model.kv_cache import KV_MODELS, KvPlan
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor

PLAN = KvPlan.of(KV_MODELS["llama-3-8b"], tokens=131072)
KIND = KvRequestKind("UCX", "READ", MemoryPair("DRAM", "DRAM"), (0, 1), "scattered-prepped", PLAN)
TIMES = RequestTimes(0.0, 0.0, (0.1, 0.2, 0.3, 0.4, 0.5))


def samples(prepare: float) -> KvSamples:
    return KvSamples(
        BlockOrder.SCATTERED, PLAN.bytes_per_rank, PLAN.descriptors, (prepare,), ((TIMES,),), True, None, (),
        CarrierBytes((), 0), (0.0,),
    )  # fmt: skip


def test_descriptors_that_take_long_to_prepare_are_named_with_what_prepares_them_faster() -> None:
    description = describe(KIND, samples(5.04))
    assert description.endswith(
        "; to prepare the 2097152 descriptors of both caches took 5.0 s, by which an engine starts later: NIXL 1.5.0 "
        "and later take strided descriptors, one for each tensor"
    )
    assert "descriptors of both caches" not in describe(KIND, samples(0.5))
    assert "descriptors of both caches" not in describe(replace(KIND, method="scattered-strided"), samples(5.04))


@pytest.mark.parametrize("expectation", [None, Expectation("a test"), Expectation("a test", transports=("rc_verbs",))])
def test_requests_name_the_device_that_lost_packets(expectation: Expectation | None) -> None:
    healthy = replace(samples(0.5), transports=("rc_verbs/rxe0:1",))
    passed = judge_requests(KIND, healthy, expectation)
    assert passed.verdict is Verdict.PASS
    losing = replace(healthy, lossy=(LossyDevice("node-a", "rxe0", 1000, {"rcvd_seq_err": 9}),))
    judged = judge_requests(KIND, losing, expectation)
    assert judged.verdict is Verdict.WARN
    assert judged.reason == (
        f"{passed.reason}, but packets were lost: rxe0 of node-a counted 9 rcvd_seq_err in 1,000 packets (0.9 %)"
    )
    assert "Check the cables" in judged.remedy
    wrong = Expectation("a test", transports=("tcp",))
    assert judge_requests(KIND, losing, wrong) == judge_requests(KIND, healthy, wrong)


def test_what_fragments_of_a_file_cost_is_named_if_it_is_much() -> None:
    """The report that this is for read a cache in pieces of 16 KiB."""
    kind = replace(KIND, backend="POSIX", memory=MemoryPair("DRAM", "FILE"))
    fast, slow = samples(0.1), samples(0.1)
    slow = replace(slow, timed=((replace(TIMES, steps=(0.1, 0.2, 0.3, 1.0, 0.5)),),))
    stored = StoredRequests(kind, slow, fast)
    assert "; fragments take 1.6 times as long: an engine that keeps the blocks of a request together" in str(
        judge_stored(stored)
    )
    judged = judge_stored(replace(stored, fragments=fast))
    assert judged.verdict is Verdict.PASS
    assert "times as long" not in judged.reason
    wrong = KvCorruption("after the first request", 1, 2, "layer 1 V, block 5, offset 77", 1, 2, "")
    bad = replace(fast, corruption=wrong)
    assert judge_stored(replace(stored, fragments=bad)).verdict is Verdict.CORRUPT
    assert judge_stored(replace(stored, pieces=bad)).verdict is Verdict.CORRUPT


@pytest.mark.parametrize(
    ("verdict", "bounded", "expected"),
    [
        ("PASS", "PASS", "PASS: own"),
        ("PASS", "FAIL", "FAIL: bounds"),
        ("WARN", "PASS", "WARN: own"),
        ("WARN", "FAIL", "FAIL: bounds; own"),
        ("CORRUPT", "FAIL", "CORRUPT: own"),
        ("CORRUPT", "PASS", "CORRUPT: own"),
    ],
)
def test_the_bounds_decide_only_about_requests_that_pass(verdict: str, bounded: str, expected: str) -> None:
    judgement = with_bounds(Judgement(Verdict(verdict), "own"), Judgement(Verdict(bounded), "bounds"))
    assert f"{judgement.verdict}: {judgement.reason}" == expected


def test_a_release_without_strided_descriptors_is_not_asked_for_them(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(KIND, method="scattered-strided", plan=KvPlan.of(KV_MODELS["generic"], tokens=16))
    launches = KvLaunches([LocalHost(supervisor(), rank) for rank in range(2)], make_settings())
    init = Launch.__init__

    def older(pair: Launch, *arguments: object, **options: object) -> None:
        init(pair, *arguments, **options)  # type: ignore[arg-type]
        monkeypatch.setitem(pair.initiator.worker.versions, "nixl", "1.4.1")

    monkeypatch.setattr(Launch, "__init__", older)
    try:
        with pytest.raises(NotApplicableError, match=r"^NIXL 1\.4\.1 takes no strided descriptors"):
            launches.measure(small)
    finally:
        launches.close()
