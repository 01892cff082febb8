# SPDX-License-Identifier: Apache-2.0
"""The suite ``kv_cache`` measures each combination that was requested, records it, and ends as it demands."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from helpers.suite_calls import conclusion_of, ending_of, value_of

from pytest_nixl.checks.kv_cache.check import EXTENDED_WAYS, STANDARD_WAYS, KvRequestKind
from pytest_nixl.checks.kv_cache.storage import stored_kinds
from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Judgement, Verdict
from suites.kv_cache import conftest, test_post, test_requests, test_storage

DRAM, VRAM, TO_VRAM = MemoryPair("DRAM", "DRAM"), MemoryPair("VRAM", "DRAM"), MemoryPair("DRAM", "VRAM")
STORED = MemoryPair("DRAM", "FILE")
PASSED = Judgement(Verdict.PASS, "requests")


def generated(module: Any, argument: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the values of an argument of the tests of a module."""
    monkeypatch.setattr(module, "Run", SimpleNamespace(of=lambda config: run))
    metafunc = MagicMock(fixturenames=[argument])
    module.pytest_generate_tests(metafunc)
    ((name, values),) = (tried.args for tried in metafunc.parametrize.call_args_list)
    assert (name, metafunc.parametrize.call_args.kwargs) == (argument, {"ids": str})
    return list(values)


@pytest.mark.parametrize(("argument", "ways"), [("kv_kind", STANDARD_WAYS), ("other_kv_kind", EXTENDED_WAYS)])
def test_each_combination_is_measured_one_pair_of_ranks_after_another(
    argument: str, ways: dict[str, Any], make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = DevicePair(0, 1)
    settings = make_settings(
        backend=("UCX", "POSIX", "LIBFABRIC"), memory=(DRAM, VRAM, DRAM, STORED, TO_VRAM), op=("WRITE", "READ"),
        devices=devices, progress_thread=("on", "off"), kv_requests=3, kv_rate=2.0,
    )  # fmt: skip
    run = SimpleNamespace(settings=settings, placement=SimpleNamespace(pairs=((0, 1), (2, 3))), usable=True)
    assert generated(conftest, argument, run, monkeypatch) == [
        KvRequestKind(
            backend, op, memory, ranks, method, settings.kv_plan, None if memory is DRAM else devices, 3, 2.0,
            agent.variant(backend, backend), agent,
        )
        for backend in ("UCX", "LIBFABRIC")
        for memory in (DRAM, VRAM, TO_VRAM)
        for agent in settings.agents
        for ranks in ((0, 1), (2, 3))
        for op in ("WRITE", "READ")
        for method in ways
    ]  # fmt: skip
    assert generated(test_storage, "stored_kind", run, monkeypatch) == list(stored_kinds(settings))


@pytest.mark.parametrize(
    ("module", "argument", "backend"), [(conftest, "kv_kind", "UCX"), (test_storage, "stored_kind", "POSIX")]
)
def test_without_such_a_backend_or_a_usable_run_nothing_is_measured(
    module: Any, argument: str, backend: str, make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"UCX": "POSIX", "POSIX": "UCX"}[backend]
    for name, usable in ((other, True), (backend, False)):
        settings, placement = make_settings(backend=(name,)), SimpleNamespace(pairs=((0, 1),))
        run = SimpleNamespace(settings=settings, placement=placement, usable=usable)
        assert generated(module, argument, run, monkeypatch) == [None]


def test_requests_are_measured_in_turn_only_with_another_image(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other, rows, run = MagicMock(), MagicMock(), MagicMock(), MagicMock()
    other.versions, run.record.other_versions = {"nixl": "1.4.1"}, {}
    turns = MagicMock()
    monkeypatch.setattr(conftest, "in_turn", turns)
    arguments = {"kv_launches": ours, "nixl_rows": rows, "nixl_run": run}
    kind: Any = "a kind"
    measure = value_of(conftest.measure_requests, ExitStack(), other_kv_launches=None, **arguments)
    assert measure(kind) is ours.measure_launches.return_value
    ours.measure_launches.assert_called_once_with(kind, rows.needs_launch)
    assert run.record.other_versions == {}
    measure = value_of(conftest.measure_requests, ExitStack(), other_kv_launches=other, **arguments)
    assert measure(kind) is turns.return_value
    turns.assert_called_once_with(kind, ours, other, rows.needs_launch, run.record.other_samples)
    assert run.record.other_versions == {"nixl": "1.4.1"}


@pytest.mark.parametrize("image", [None, SimpleNamespace(prefix=("docker", "run"))])
def test_workers_of_both_images_end_with_the_run(
    image: Any, make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = MagicMock()
    monkeypatch.setattr(conftest, "KvLaunches", launches)
    monkeypatch.setattr(conftest, "LocalHost", lambda keeper, rank, prefix: (rank, prefix))
    settings, cluster = make_settings(compare_image=image), SimpleNamespace(hosts=["a", "b"])
    with ExitStack() as stack:
        ours = value_of(conftest.kv_launches, stack, nixl_cluster=cluster, nixl_settings=settings)
        other = value_of(conftest.other_kv_launches, stack, nixl_settings=settings)
        assert (ours, other) == (launches.return_value, launches.return_value if image else None)
        launches.return_value.close.assert_not_called()
    of_image = [call([(rank, image.prefix) for rank in range(2)], settings)] if image else []
    assert launches.call_args_list == [call(["a", "b"], settings), *of_image]
    assert launches.return_value.close.call_count == len(launches.call_args_list)


@pytest.mark.parametrize("corruption", [None, "wrong"])
def test_requests_are_recorded_before_they_are_judged(corruption: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("summary_of", "recorded", "describe", "times_of", "judge_requests", "with_bounds"):
        monkeypatch.setattr(conftest, name, MagicMock(side_effect=lambda *arguments, name=name: (name, *arguments)))
    samples, launches, rows, figures, profile, run = (MagicMock() for _ in range(6))
    samples.corruption, kind = corruption, MagicMock()
    measure = MagicMock(return_value=samples)
    move = value_of(
        conftest.move_blocks, ExitStack(), measure_requests=measure, kv_launches=launches, nixl_rows=rows,
        record_figures=figures, profile=profile, nixl_run=run,
    )  # fmt: skip
    expectation = profile.expectation.return_value
    judged = ("judge_requests", kind, samples, expectation)
    assert move(kind) == ("with_bounds", judged, figures.return_value)
    measure.assert_called_once_with(kind)
    profile.expectation.assert_called_once_with(kind.key)
    samples.row.assert_called_once_with(kind.key)
    rows.record.assert_called_once_with(
        samples.row.return_value, summary=("summary_of", kind, samples, expectation), versions=launches.versions,
        more=("recorded", kind, samples),
    )  # fmt: skip
    figures.assert_called_once_with(("times_of", kind, samples))
    assert run.record.note_detail.mock_calls == ([call(("describe", kind, samples))] if corruption is None else [])
    with pytest.raises(NotApplicableError, match=r"^no requested backend moves bytes between the memory of two agents"):
        move(None)


def test_each_check_of_requests_ends_with_their_judgement() -> None:
    for check, argument in (
        (test_requests.test_a_request_moves_the_right_blocks, "kv_kind"),
        (test_requests.test_other_ways_to_make_a_request_move_the_right_blocks, "other_kv_kind"),
    ):
        move = MagicMock(return_value=PASSED)
        assert conclusion_of(check, move_blocks=move, **{argument: "a kind"}) == "PASS: requests"
        move.assert_called_once_with("a kind")


def test_stored_requests_are_recorded_and_noted_if_they_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = MagicMock()
    monkeypatch.setattr(test_storage, "measure_stored", measure)
    check = test_storage.test_blocks_move_between_memory_and_storage
    for judged, bounds, conclusion in (
        (PASSED, Judgement(Verdict.PASS, "figures"), "PASS: requests"),
        (PASSED, Judgement(Verdict.FAIL, "bounds"), "FAIL: bounds"),
        (Judgement(Verdict.CORRUPT, "wrong"), PASSED, "CORRUPT: wrong"),
    ):
        monkeypatch.setattr(test_storage, "judge_stored", MagicMock(return_value=judged))
        run, record = MagicMock(), MagicMock(return_value=bounds)
        arguments = {"kv_launches": "launches", "record_figures": record, "nixl_run": run}
        assert conclusion_of(check, stored_kind="a kind", **arguments) == conclusion
        measure.assert_called_with("launches", "a kind")
        record.assert_called_once_with(measure.return_value.figures)
        noted = [call("KV blocks in storage: requests")] if judged is PASSED else []
        assert run.record.note_detail.mock_calls == noted
    with pytest.raises(NotApplicableError, match=r"^no requested backend moves bytes to storage"):
        conclusion_of(check, stored_kind=None, **arguments)


@pytest.mark.parametrize(
    ("backends", "pairs"), [(("UCX", "POSIX", "LIBFABRIC"), ((1, 2), (0, 1))), (("POSIX",), ((0, 1),)), (("UCX",), ())]
)
def test_posts_of_each_backend_and_operation_are_judged_together(
    backends: tuple[str, ...],
    pairs: tuple[tuple[int, int], ...],
    make_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge = MagicMock(return_value=PASSED)
    monkeypatch.setattr(test_post, "measure_posts", lambda *arguments: arguments)
    monkeypatch.setattr(test_post, "judge_posts", judge)
    settings, run = make_settings(backend=backends, op=("WRITE", "READ")), MagicMock()
    run.placement.pairs = pairs
    arguments = {"nixl_run": run, "nixl_cluster": SimpleNamespace(hosts=["a", "b", "c"]), "nixl_settings": settings}
    ending = ending_of(test_post.test_a_post_of_many_descriptors_takes_no_longer_for_each, **arguments)
    if len(backends) == 1:
        assert ending.startswith("NotApplicableError: no requested backend moves bytes between two agents")
        return
    assert ending == "PASS: requests"
    links = [(backend, op) for backend in ("UCX", "LIBFABRIC") for op in ("WRITE", "READ")]
    judge.assert_called_once_with({f"{backend} {op}": (["b", "c"], settings, backend, op) for backend, op in links})
