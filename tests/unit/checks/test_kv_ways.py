# SPDX-License-Identifier: Apache-2.0
"""What the result of requests for KV blocks says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from pytest_nixl.checks.kv_cache import check
from pytest_nixl.checks.kv_cache.blocks import BlockOrder, KvCorruption, KvLayout, KvMethod
from pytest_nixl.checks.kv_cache.check import (
    WAYS,
    KvLaunches,
    KvRequestKind,
    describe,
    in_turn,
    judge_requests,
    layout_of,
    recorded,
    summary_of,
    times_of,
    with_bounds,
)
from pytest_nixl.checks.kv_cache.link import KvTraffic
from pytest_nixl.checks.kv_cache.samples import KvSamples, RequestTimes
from pytest_nixl.checks.kv_cache.storage import StoredRequests, judge_stored, measure_stored, stored_kinds
from pytest_nixl.core.errors import NixlPluginError, NotApplicableError
from pytest_nixl.core.units import format_size, gigabytes
from pytest_nixl.host.system import in_bytes
from pytest_nixl.model.agent_options import AgentOptions
from pytest_nixl.model.device_counters import CarrierBytes, LossyDevice
from pytest_nixl.model.expectation import Expectation
from pytest_nixl.model.kv_cache import KV_MODELS, KvPlan
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import Samples
from pytest_nixl.model.settings import MOST_LAUNCHES, Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.session.benchmark import versions_of

PLAN = KvPlan.of(KV_MODELS["llama-3-8b"], tokens=131072)
KIND = KvRequestKind("UCX", "READ", MemoryPair("DRAM", "DRAM"), (0, 1), "scattered-prepped", PLAN)
TIMES = RequestTimes(0.0, 0.0, (0.1, 0.2, 0.3, 0.4, 0.5))


def samples(prepare: float) -> KvSamples:
    return KvSamples(
        BlockOrder.SCATTERED, PLAN.bytes_per_rank, PLAN.descriptors, (prepare,), ((TIMES,),), True, None, (),
        CarrierBytes((), 0), (0.0,),
    )  # fmt: skip


TEXT = (
    "KV requests UCX READ DRAM:DRAM scattered-prepped: 17.2 GB/s, 524288 x 32KiB; notified after 1000.0 ms "
    "(make 100.00, post 200.00, transfer 300.00, notify 400.00)"
)
SLOW = (
    "; to prepare the 2097152 descriptors of both caches took 5.0 s, by which an engine starts later: NIXL 1.5.0 and "
    "later take strided descriptors, one for each tensor"
)


@pytest.mark.parametrize(
    ("changes", "prepare", "text"),
    [
        ({}, 0.5, TEXT),
        ({}, 5.04, TEXT + SLOW),
        ({"method": "scattered-strided"}, 5.04, TEXT.replace("prepped", "strided")),
        ({"method": "contiguous-merged", "ranks": (0, 0)}, 1.0,
         TEXT.replace("scattered-prepped", "contiguous-merged") + SLOW.replace("took 5.0", "took 1.0")),
        (
            {"requests": 2, "ranks": (2, 3), "settings": (("threads", "4"),)},
            5.04,
            f"{TEXT.replace('DRAM scattered-prepped', 'DRAM ranks 2-3 scattered-prepped threads=4')}, 2 in flight"
            f"{SLOW.replace('2097152', '4194304')}",
        ),
        ({"rate": 2.5}, 0.5, f"{TEXT}, 2.5 each second; p99 2000.0 ms from the intended start"),
    ],
)  # fmt: skip
def test_what_was_measured_is_described_with_what_prepares_descriptors_faster(
    changes: dict[str, Any], prepare: float, text: str
) -> None:
    kind, measured = replace(KIND, **changes), samples(prepare)
    if "rate" in changes:  # one of a hundred and one requests is late, and not the last
        measured = replace(measured, timed=((TIMES, replace(TIMES, intended=-1.0), replace(TIMES, intended=-1.0)),))
        text = text.replace("17.2 GB/s", "8.59 GB/s").replace("1000.0 ms", "2000.0 ms")
    assert describe(kind, measured) == text


def test_the_record_and_the_figures_of_a_row_have_its_steps_and_times() -> None:
    measured = replace(samples(0.25), timed=((*[TIMES] * 49, replace(TIMES, intended=-1.0)),))
    steps = {"prepare": 0.25, "make": 0.1, "post": 0.2, "transfer": 0.3, "notify": 0.4, "release": 0.5}
    assert summary_of(KIND, measured, None).steps == steps
    rate = measured.bandwidth
    assert recorded(KIND, measured) == {
        "steps_us": {name: pytest.approx(seconds * 1e6) for name, seconds in steps.items()},
        "descriptors": PLAN.descriptors,
        "descriptors_per_second": pytest.approx(rate * PLAN.descriptors / PLAN.bytes_per_rank),
        "plan": str(PLAN),
    }
    assert "prepare" not in summary_of(KIND, samples(0.0), None).steps
    labels = {
        "backend": "UCX", "op": "READ", "memory": "DRAM:DRAM", "way": "scattered-prepped", "model": "llama-3-8b",
        "tokens": 131072,
    }  # fmt: skip
    figures = times_of(KIND, measured)
    assert [figure.name for figure in figures] == ["kv-request-p50", "kv-request-p99"]
    assert [figure.value for figure in figures] == [pytest.approx(1.0), pytest.approx(2.0)]
    assert [dict(figure.labels) for figure in figures] == [{name: str(value) for name, value in labels.items()}] * 2


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


FILES = replace(KIND, backend="POSIX", memory=MemoryPair("DRAM", "FILE"))
COST = (
    "; fragments take {} times as long: an engine that keeps the blocks of a request together in its files, or has "
    "larger blocks, loads them faster"
)


@pytest.mark.parametrize(
    ("seconds", "transports", "name", "cost"),
    [
        (1.0, ("io_uring",), "io_uring", ""),
        (1.49, (), "storage", ""),
        (1.5, ("a", "b"), "a and b", COST.format("1.5")),
    ],
)
def test_what_fragments_of_a_file_cost_is_named_if_it_is_much(
    seconds: float, transports: tuple[str, ...], name: str, cost: str
) -> None:
    """The report that this is for read a cache in pieces of 16 KiB."""
    few = samples(0.1)
    many = replace(few, timed=((replace(TIMES, steps=(seconds, 0.0, 0.0, 0.0, 0.5)),),), transports=transports)
    stored = StoredRequests(FILES, many, few)
    rate = gigabytes(PLAN.bytes_per_rank / seconds)
    start = f"POSIX READ DRAM:FILE over {name}: {rate} GB/s in 524288 "
    assert judge_stored(stored) == Judgement(
        Verdict.PASS, f"{start}fragments of 32KiB, 17.2 GB/s in 64 pieces of 256MiB{cost}"
    )
    assert judge_stored(replace(stored, pieces=None)) == Judgement(Verdict.PASS, f"{start}objects of 32KiB")
    assert [(dict(figure.labels)["way"], figure.name) for figure in stored.figures] == [
        ("scattered-prepped", "kv-request-p50"), ("scattered-prepped", "kv-request-p99"),
        ("contiguous-merged", "kv-request-p50"), ("contiguous-merged", "kv-request-p99"),
    ]  # fmt: skip
    assert len(replace(stored, pieces=None).figures) == 2
    wrong = KvCorruption("after the first request", 1, 2, "layer 1 V, block 5, offset 77", 1, 2, "")
    bad = replace(few, corruption=wrong)
    for stored_requests, method in (
        (replace(stored, fragments=bad), "scattered-prepped"), (replace(stored, pieces=bad), "contiguous-merged"),
    ):  # fmt: skip
        judged = judge_stored(stored_requests)
        assert judged.verdict is Verdict.CORRUPT
        assert judged.reason == f"KV requests POSIX READ DRAM:FILE {method}: {wrong}"


def test_each_backend_of_storage_and_operation_is_measured_and_objects_are_fewer(
    make_settings: Callable[..., Settings],
) -> None:
    settings = make_settings(
        backend=("UCX", "POSIX", "OBJ"), op=("WRITE", "READ"), progress_thread=("on", "off"), kv_tokens=64
    )
    kinds = list(stored_kinds(settings))
    plan = settings.kv_plan
    assert plan.tokens == 64
    assert kinds == [
        KvRequestKind(
            name, op, MemoryPair("DRAM", memory), (0, 0), "scattered-prepped", replace(plan, tokens=tokens),
            settings=agent.variant(name, name), agent_options=agent,
        )
        for name, memory, tokens in (("POSIX", "FILE", 64), ("OBJ", "OBJ", 32))
        for agent in settings.agents
        for op in ("WRITE", "READ")
    ]  # fmt: skip
    few = list(stored_kinds(make_settings(backend=("OBJ",), kv_tokens=16)))
    assert {kind.plan.tokens for kind in few} == {16}
    for kind in (kinds[0], few[0]):
        launches: Any = MagicMock()
        launches.measure.side_effect = lambda kind: kind.method
        measured: Any = measure_stored(launches, kind)
        pieces = None if kind.memory.target == "OBJ" else "contiguous-merged"
        assert (measured.kind, measured.fragments, measured.pieces) == (kind, "scattered-prepped", pieces)


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


HOSTS: list[Any] = [f"host {rank}" for rank in range(4)]
SMALL = replace(KIND, plan=KvPlan.of(KV_MODELS["generic"], tokens=16))


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """What starts workers: a double, which keeps how they are started, measured and ended in ``mock_calls``."""
    double = MagicMock()
    double.side_effect = lambda *_, **__: MagicMock(
        initiator=SimpleNamespace(worker=SimpleNamespace(versions={"nixl": "1.5.0", "of": "initiator"})),
        target=SimpleNamespace(worker=SimpleNamespace(versions={"nixl": "1.5.0", "of": "target"})),
        healthy=True,
    )
    monkeypatch.setattr(check, "Launch", double)

    def link(started: Any, layout: KvLayout, op: str, timeout: float) -> Any:
        measure = partial(double.measure, started, layout, op, timeout)
        return SimpleNamespace(measure=measure, initiator=started.initiator, target=started.target)

    monkeypatch.setattr(check, "KvLink", link)
    return double


@pytest.mark.parametrize("method", sorted(WAYS))
def test_each_way_is_measured_in_workers_with_caches_of_its_size(
    method: str, launch: MagicMock, make_settings: Callable[..., Settings]
) -> None:
    options = AgentOptions(sync_mode="rw")
    settings = make_settings(duration=2.5, timeout=7.0, devices=DevicePair(0, 1))
    kind = replace(SMALL, op="WRITE", method=method, ranks=(2, 3), requests=3, rate=2.0, agent_options=options)
    launches = KvLaunches(HOSTS, settings)
    assert launches.versions == {}
    measured = launches.measure(kind)
    plan = kind.plan
    layout = KvLayout(plan.layers * 2, 3 * 2 * plan.blocks, plan.piece_bytes, 2, (1, 1), 3)
    launch.assert_called_once_with(
        ("host 2", "host 3"), settings, BACKENDS["UCX"], kind.memory, layout.size, devices=None, alignment=1,
        regions=layout.tensors, agent_options=options,
    )  # fmt: skip
    order, form, *unmerged = method.split("-")
    prepared = {"merged": "prepped", "unmerged": "prepped"}.get(form, form)
    traffic = KvTraffic(plan.blocks, BlockOrder(order), KvMethod(prepared), form != "unmerged", 3, 2.0)
    ((started, given_layout, op, timeout, measured_traffic),) = (call.args for call in launch.measure.call_args_list)
    assert (given_layout, op, timeout, measured_traffic, unmerged) == (layout, "WRITE", 7.0, traffic, [])
    assert launch.measure.call_args.kwargs == {"duration": 2.5}
    assert measured is launch.measure.return_value
    assert launches.versions == versions_of(started.initiator, started.target)
    stored = replace(kind, memory=MemoryPair("DRAM", "FILE"), backend="POSIX")
    KvLaunches(HOSTS, settings).measure(stored)
    assert launch.call_args.kwargs["alignment"] == layout.block_bytes
    on_gpu = replace(kind, memory=MemoryPair("DRAM", "VRAM"))
    KvLaunches(HOSTS, settings).measure(on_gpu)
    assert launch.call_args.kwargs["devices"] == DevicePair(0, 1)


def test_workers_stay_for_rows_of_the_same_place_and_size_while_they_are_healthy(
    launch: MagicMock, make_settings: Callable[..., Settings]
) -> None:
    launches = KvLaunches(HOSTS, make_settings())
    started: list[Any] = []

    def count(kind: KvRequestKind) -> int:
        launches.measure(kind)
        if not started or started[-1] is not launch.measure.call_args.args[0]:
            started.append(launch.measure.call_args.args[0])
        return len(started)

    same = [SMALL, replace(SMALL, op="WRITE"), replace(SMALL, method="contiguous-merged"), replace(SMALL, rate=2.0)]
    assert [count(kind) for kind in same] == [1] * 4
    locked = AgentOptions(sync_mode="rw")
    others = [
        replace(SMALL, backend="LIBFABRIC"), replace(SMALL, memory=MemoryPair("VRAM", "DRAM")),
        replace(SMALL, ranks=(0, 2)), replace(SMALL, requests=2), replace(SMALL, agent_options=locked),
    ]  # fmt: skip
    assert [count(kind) for kind in others] == [2, 3, 4, 5, 6]
    started[-1].healthy = False
    assert count(others[-1]) == 7
    launches.close()
    launches.close()
    assert [pair.close.call_count for pair in started] == [1] * 7
    assert count(others[-1]) == 8


def test_one_more_launch_has_new_workers_until_the_row_is_decided(
    launch: MagicMock, make_settings: Callable[..., Settings]
) -> None:
    launches, counts = KvLaunches(HOSTS, make_settings()), list[int]()
    launch.measure.return_value = samples(0.5)

    def needs_launch(row: Samples) -> bool:
        assert row.key == SMALL.key
        counts.append(len(row.windows_of_launches))
        return len(counts) < 3

    assert len(launches.measure_launches(SMALL, needs_launch).timed) == 3
    assert counts == [1, 2, 3]
    assert launch.call_count == 3


@pytest.mark.parametrize("room", [None, 0, -1])
def test_caches_that_do_not_fit_into_the_memory_of_this_host_are_refused(
    room: int | None, launch: MagicMock, make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is not known how much memory there is."""
    layout, local_hosts = layout_of(SMALL.plan, "READ"), [LocalHost(supervisor(), rank) for rank in range(2)]
    memory = None if room is None else MagicMock(size=2 * layout.size + room, __str__=lambda _: "little")
    monkeypatch.setattr(check, "available_memory", lambda root: memory)
    fits = room != -1
    launches = KvLaunches(local_hosts, make_settings())
    if fits:
        launches.measure(SMALL)
    else:
        with pytest.raises(NixlPluginError) as error:
            launches.measure(SMALL)
        block = f"{layout.tensors} tensors of {layout.blocks} blocks of {format_size(layout.block_bytes)}"
        assert error.value.reason == (
            f"2 KV caches of {block} need {in_bytes(2 * layout.size)}, but little are available on this host"
        )
        # One cache is on a GPU, or on another host, whose memory is not known here.
        launches.measure(replace(SMALL, memory=MemoryPair("VRAM", "DRAM")))
        launches.measure(replace(SMALL, memory=MemoryPair("DRAM", "VRAM")))
        KvLaunches([local_hosts[0], *HOSTS], make_settings()).measure(SMALL)


def test_a_release_without_strided_descriptors_is_not_asked_for_them(
    launch: MagicMock, make_settings: Callable[..., Settings]
) -> None:
    launches = KvLaunches(HOSTS, make_settings())
    launches.measure(SMALL)
    launch.measure.call_args.args[0].initiator.worker.versions["nixl"] = "1.4.1"
    launches.measure(SMALL)
    with pytest.raises(NotApplicableError, match=r"^NIXL 1\.4\.1 takes no strided descriptors"):
        launches.measure(replace(SMALL, method="scattered-strided"))
    assert launch.call_count == 1


@pytest.mark.parametrize(
    ("needed", "corrupt", "turns"),
    [
        (3, -1, "ABBAAB"),
        (1, -1, "AB"),
        (9, 0, "AB"),
        (9, 1, "ABBA"),
        (99, -1, ("ABBA" * MOST_LAUNCHES)[: 2 * MOST_LAUNCHES]),
    ],
)
def test_two_images_take_turns_in_new_workers_until_the_row_is_decided(needed: int, corrupt: int, turns: str) -> None:
    """A corruption with the other image ends them, too, and so does the largest number of launches."""
    log: list[str] = []
    wrong = KvCorruption("after the timed requests", 1, 1, "", 3, 4, "")

    def launches(name: str, prepare: float) -> Any:
        def measure(kind: KvRequestKind) -> KvSamples:
            log.append(name)
            bad = name == "B" and log.count("B") == corrupt + 1
            return replace(samples(prepare), corruption=wrong if bad else None)

        return SimpleNamespace(measure=measure, close=lambda: log.append(name.lower()))

    rows: dict[RowKey, Samples] = {}
    needs = iter(range(1, 99))
    joined = in_turn(KIND, launches("A", 0.25), launches("B", 0.5), lambda row: next(needs) < needed, rows)
    assert "".join(log) == "ab" + "".join(name + name.lower() for name in turns)
    assert joined.prepares == (0.25,) * turns.count("A")
    assert {key: len(row.windows_of_launches) for key, row in rows.items()} == {KIND.key: turns.count("B")}
