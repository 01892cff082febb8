# SPDX-License-Identifier: Apache-2.0
"""The record of a run, and that of the other image that is measured in turn with it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from helpers.records import KEY, ROW, record

from pytest_nixl.model.results import Result, RowSummary
from pytest_nixl.model.samples import Corruption, Samples
from pytest_nixl.model.settings import AlternateImage, Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.nixl.backends.driver_standin import RECORDED
from pytest_nixl.session.benchmark import described
from pytest_nixl.session.record_writer import add_ours, other_record, other_run, record_of, refused_run, this_run
from pytest_nixl.session.run import LiveRecord
from pytest_nixl.store.provenance import gather
from pytest_nixl.store.record_reader import parse_recorded

MakeSettings = Callable[..., Settings]
SUMMARY = RowSummary.of_launches((1e9, 2e9, 3e9), ("tcp/eth0",), floor=5e8, ceiling=9e9)
OTHER = replace(ROW, block=4096)
#: The second row has no bandwidth, and the third result is of no row.
RESULTS = (
    Result("bandwidth", "a", Verdict.PASS, row=ROW, summary=SUMMARY),
    Result("bandwidth", "b", Verdict.ERROR, row=OTHER, summary=replace(SUMMARY, values=())),
    Result("nixl-loads", "c", Verdict.PASS),
)


def a_run(settings: Settings, *hosts: str, **found: Any) -> Any:
    """Return a run of ranks on these hosts; of one rank without any."""
    members = [SimpleNamespace(host=host) for host in hosts]
    session = SimpleNamespace(membership=SimpleNamespace(members=members)) if hosts else None
    return SimpleNamespace(settings=settings, record=LiveRecord(**found), rank_session=session)


@pytest.fixture
def all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(os.cpu_count() or 0)))


@pytest.mark.usefixtures("all_cores")
@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, {}),
        ({"level": "quick"}, {"(level)": "quick"}),
        ({"sync_mode": "strict", "progress_thread": ("off", "on")},
         {"(agents)": "progress-thread=off,sync-mode=strict; progress-thread=on,sync-mode=strict"}),
        ({"footprint": 1 << 30}, {"(footprint)": "1GiB"}),
    ],
    ids=["defaults", "level", "agents", "footprint"],
)  # fmt: skip
def test_the_environment_of_a_record_has_what_makes_rows_differ(
    make_settings: MakeSettings, settings: dict[str, Any], more: dict[str, str]
) -> None:
    run = a_run(make_settings(**settings), "node-a", "node-b", versions={"nixl": "1"}, results=RESULTS)
    plain = gather("", {"nixl": "1"}, ranks=["node-a", "node-b"])
    provenance = this_run(run).provenance
    assert provenance == replace(plain, environment={**plain.environment, **more})
    data = record("nixl:1", {KEY: (1.0,)})
    add_ours(data, run)  # they are no variables, whose unknown values are hidden
    assert more.items() <= parse_recorded(data, "a test").provenance.environment.items()


def test_a_record_names_the_cores_that_a_run_may_use_if_they_are_not_all(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's cpuset is no part of an image, and one that differs makes every row slower."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for cores, text in ((8, None), (3, "3 of 8")):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert this_run(a_run(make_settings())).provenance.environment.get("(cores allowed)") == text


@pytest.mark.usefixtures("all_cores")
def test_the_driver_that_a_run_does_without_is_no_version(make_settings: MakeSettings) -> None:
    provenance = this_run(a_run(make_settings(), versions={"nixl": "1", RECORDED: "a stand-in"})).provenance
    plain = gather("", {"nixl": "1"})
    assert provenance == replace(plain, environment={**plain.environment, "(CUDA driver)": "a stand-in"})


def test_a_refused_run_has_its_image_and_notes_only(make_settings: MakeSettings) -> None:
    run = a_run(make_settings(image="nixl:1"), results=RESULTS, notes=("a note",), versions={"nixl": "1"})
    refused = refused_run(run, make_settings(image="nixl:2"))
    assert (refused.source, refused.rows, refused.results, refused.notes) == ("this run", {}, (), ("a note",))
    assert refused.provenance == gather("nixl:2", {})


@pytest.mark.usefixtures("all_cores")
def test_our_part_of_a_record(make_settings: MakeSettings) -> None:
    image, versions = "nixl:1@sha256:0123456789abcdef", {"ucx": "2", "nixl": "1"}
    run = a_run(make_settings(image=image), results=RESULTS, notes=("a note",), interrupted="INTERRUPTED",
                versions=versions)  # fmt: skip
    plain: list[dict[str, Any]] = [{"name": "of a user"}, {"extra_info": {"key": str(OTHER)}}]
    data: dict[str, Any] = {"benchmarks": [*plain, {"extra_info": {"key": KEY, "GB/s": 2}}]}
    add_ours(data, run)
    assert this_run(run).rows == {ROW: SUMMARY}
    row = {"key": KEY, "GB/s": 2, "image": "nixl:1 (0123456789ab)", "floor": 5e8, "ceiling": 9e9}
    assert data == {
        "benchmarks": [*plain, {"extra_info": row}],
        "nixl": {
            "form": 1, "provenance": gather(image, versions).plain(), "results": [each.plain() for each in RESULTS],
            "notes": ["a note"], "interrupted": "INTERRUPTED",
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        ("env -u UCX_TLS UCX_TLS=rc=x MY_TOKEN=hunter22 python -X a", {"UCX_TLS": "rc=x"}),
        ("envy UCX_TLS=rc python", {"UCX_TLS": "tcp"}),
    ],
)
def test_the_other_image_has_its_own_variables_and_digest(
    monkeypatch: pytest.MonkeyPatch, command: str, variables: dict[str, str]
) -> None:
    for name in [name for name in os.environ if name.startswith(("UCX_", "NIXL_"))]:
        monkeypatch.delenv(name)
    for name, value in {"UCX_TLS": "tcp", "UCX_LOG_LEVEL": "info", "NIXL_IMAGE_DIGEST": "sha256:88"}.items():
        monkeypatch.setenv(name, value)
    corrupt = Samples(ROW, (1.0,), (1,), (1e-6,), ("tcp",), corruption=Corruption("after it", 1, 2, 3, 4, 5))
    intact = Samples(OTHER, (1.0, 2.0), (1, 4), (1e-6,), ("tcp",))
    run: Any = SimpleNamespace(record=LiveRecord(other_versions={"nixl": "0"}, interrupted="INTERRUPTED"))
    run.record.other_samples = {ROW: corrupt, OTHER: intact}
    other = other_run(run, AlternateImage("nixl:1", tuple(shlex.split(command))))
    ours = {name: value for name, value in os.environ.items() if name != "NIXL_IMAGE_DIGEST"}
    plain = gather("nixl:1", {"nixl": "0"}, {**ours, **variables})
    started = {"(started with)": command.replace("MY_TOKEN=hunter22", "'MY_TOKEN=***'")}
    assert other.provenance == replace(plain, environment={**plain.environment, **started})
    assert (plain.image.digest, other.source, other.interrupted) == ("", "measured in turn", "INTERRUPTED")
    assert other.rows == {samples.key: RowSummary.of(samples, None) for samples in (corrupt, intact)}
    wrong = "1 of 2 bytes are wrong after it, the first at offset 3: expected 0x04, found 0x05"
    assert other.results == (Result("bandwidth", "", Verdict.CORRUPT, wrong, row=ROW),)


def test_the_record_of_the_other_image_has_its_own_samples() -> None:
    run: Any = SimpleNamespace(record=LiveRecord())
    samples = run.record.other_samples[ROW] = Samples(ROW, (1.0, 4.0, 2.0), (10, 20, 40), (1e-6,), ("tcp/eth0",))
    ours = {"version": "5", "benchmarks": [{"fullname": name, "name": "n", "stats": {}} for name in (KEY, f"{KEY}-x")]}
    other = other_run(run, AlternateImage("nixl:1", ("python",)))
    data = other_record(ours, run, other)
    [row] = data.pop("benchmarks")
    assert (data.pop("version"), data.pop("nixl")["provenance"], data) == ("5", other.provenance.plain(), {})
    stats = row.pop("stats")
    extra = {**described(samples), "image": "nixl:1"}
    assert row == {"fullname": KEY, "name": "n", "extra_info": extra}
    values = {"min": 0.05, "max": 0.2, "rounds": 3, "iterations": 1, "data": [0.1, 0.2, 0.05]}
    assert {name: stats[name] for name in values} == values


def test_a_record_is_made_by_the_hooks_of_pytest_benchmark() -> None:
    hook = MagicMock()
    config: Any = SimpleNamespace(hook=hook)
    run: Any = SimpleNamespace(record=LiveRecord())
    first, again = SimpleNamespace(extra_info={}, fullname=KEY), SimpleNamespace(extra_info={"key": KEY}, fullname="")
    run.record.benchmarks = [first, again]
    machine = hook.pytest_benchmark_generate_machine_info.return_value
    commit = hook.pytest_benchmark_generate_commit_info.return_value
    data = record_of(config, run)
    assert data is hook.pytest_benchmark_generate_json.return_value
    assert hook.mock_calls == [
        call.pytest_benchmark_generate_machine_info(config=config),
        call.pytest_benchmark_update_machine_info(config=config, machine_info=machine),
        call.pytest_benchmark_generate_commit_info(config=config),
        call.pytest_benchmark_update_commit_info(config=config, commit_info=commit),
        call.pytest_benchmark_generate_json(
            config=config, benchmarks=[again], include_data=True, machine_info=machine, commit_info=commit
        ),
        call.pytest_benchmark_update_json(config=config, benchmarks=[first, again], output_json=data),
    ]
    run.record.benchmarks = []
    record_of(config, run)
    assert run.record.notes == ("2 measurements of 1 rows: the record has the last one of each row",)
