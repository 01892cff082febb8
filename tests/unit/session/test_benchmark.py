# SPDX-License-Identifier: Apache-2.0
"""Rows in the files of pytest-benchmark, and the tools of pytest-benchmark on these files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_benchmark.plugin
from helpers.cli_run import ROOT, WITHOUT, bandwidth, environment
from helpers.records import KEY, ROW

from pytest_nixl.model.device_counters import LossyDevice
from pytest_nixl.model.figure import Figure
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.samples import Samples
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.session.benchmark import (
    MachineFacts,
    described,
    make_benchmark,
    read_machine_early,
    record_samples,
    record_timed_figures,
    versions_of,
    worker_versions,
)


@pytest.mark.long
def test_a_row_is_recorded_under_its_key_with_its_values(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    done = bandwidth(
        "suites/infrastructure", "--benchmark-only", "--nixl-op=WRITE", f"--benchmark-json={path}", "-W", "error"
    )
    assert (done.verdicts, done.code) == ({"WRITE 64KiB": "PASS"}, 0), done.output
    row: dict[str, Any]
    [row] = json.loads(path.read_text())["benchmarks"]
    extra, stats = row["extra_info"], row["stats"]
    assert row["fullname"] == row["name"] == extra["key"] == KEY
    assert row["group"] == "UCX WRITE DRAM:DRAM"
    # A round is the time of one transfer in one window: each launch's bandwidth is the median over its windows.
    assert 0.999999 * 65536 / stats["max"] <= min(extra["launches"])
    assert max(extra["launches"]) <= 1.000001 * 65536 / stats["min"]
    assert 0.999999 * min(extra["launches"]) <= extra["GB/s"] * 1e9 <= 1.000001 * max(extra["launches"])
    assert stats["rounds"] >= 10
    assert extra["transports"][0] in ("cma/memory", "posix/memory", "sysv/memory")
    assert {"initiator_nixl", "target_nixl", "initiator_python", "target_host"} <= set(extra)
    assert extra["initiator_ucx"][:2] == "1."


@pytest.mark.long
def test_the_wheel_carries_the_suites_profiles_and_templates(tmp_path: Path) -> None:
    site = tmp_path / "site"
    build = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--no-build-isolation"]
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "*.egg-info", "build", "__pycache__", "tests"))
    subprocess.run([*build, f"--target={site}", str(source)], check=True, capture_output=True)
    path = tmp_path / "run.json"
    # The copy in the wheel comes first on the path, and its entry point is loaded.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *WITHOUT, "--pyargs", "pytest_nixl.suites.bandwidth",
         "--nixl-op=WRITE", "--nixl-blocks=64KiB", "--nixl-duration=20ms", "-v", f"--benchmark-json={path}"],
        cwd=tmp_path, env=environment(PYTHONPATH=str(site)), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "site/pytest_nixl/suites/bandwidth/test_bandwidth.py" in done.stdout
    assert [row["fullname"] for row in json.loads(path.read_text())["benchmarks"]] == [KEY]
    for arguments, line in (
        (("init", "files"), "files/indexed-job.yaml"),
        (("run", "quick", "--backend=UCX", "--print"), " --pyargs pytest_nixl.suites --nixl-gate --nixl-level=quick"),
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "pytest_nixl.cli", *arguments], cwd=tmp_path,
            env=environment(PYTHONPATH=str(site)), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert line in ended.stdout
    assert (tmp_path / "files" / "indexed-job.yaml").is_file()


class Fixture:
    """A double of pytest-benchmark's fixture: it times its rounds by the clock that the test's marker names."""

    def __init__(self, item: Any) -> None:
        self.extra_info: dict[str, object] = {"initiator_gpu": "H100"}
        self.fullname = self.name = self.group = ""
        self.records: list[tuple[object, ...]] = []
        [self._marker] = item.markers

    def pedantic(self, function: Callable[[], None], *, rounds: int, iterations: int, warmup_rounds: int) -> None:
        clock, seconds = self._marker.kwargs["timer"], []
        for _ in range(rounds):
            started = clock()
            function()
            seconds.append(clock() - started)
        counts = rounds, iterations, warmup_rounds
        self.records.append((self.fullname, self.name, self.group, self.extra_info, counts, seconds))


def an_item(*plugins: str, **attributes: Any) -> Any:
    manager = SimpleNamespace(has_plugin=plugins.__contains__)
    markers: list[Any] = []
    return SimpleNamespace(
        stash=pytest.Stash(), config=SimpleNamespace(pluginmanager=manager), markers=markers,
        add_marker=lambda mark: markers.append(mark.mark), **attributes,
    )  # fmt: skip


def test_a_row_is_a_benchmark_whose_rounds_are_its_windows() -> None:
    item = an_item("benchmark")
    make_benchmark(item)
    fixture = Fixture(item)
    for windows, transfers in (((0.5, 0.25, 0.125), (1, 2, 4)), ((8.0,), (2,))):
        samples = Samples(ROW, windows, transfers, (1e-6,), ("tcp/eth0",))
        record_samples(item, fixture, samples, {"target_gpu": "H200"})
        extra = {"initiator_gpu": "H100", "target_gpu": "H200", **described(samples)}
        seconds = [window / count for window, count in zip(windows, transfers, strict=True)]
        counts = len(windows), 1, 0
        assert fixture.records[-1] == (KEY, KEY, "UCX WRITE DRAM:DRAM", extra, counts, pytest.approx(seconds))


def test_a_row_records_only_what_was_measured() -> None:
    plain = Samples(replace(ROW, memory=MemoryPair("VRAM", "VRAM")), (1.0,), (10,), (), ("tcp/eth0",))
    values: dict[str, Any] = {
        "key": str(plain.key), "GB/s": pytest.approx(655_360e-9), "Gb/s": pytest.approx(8 * 655_360e-9),
        "launches": [655_360.0], "transfers": 10, "transfer_bytes": 65536, "others_cores": [],
        "transports": ["tcp/eth0"], "payload_bytes": 655_360, "counted_bytes": {},
    }  # fmt: skip
    assert described(plain) == values
    lossy = LossyDevice("node-a", "eth0", 7, {"lost": 3})
    measured = replace(
        plain, key=ROW, latencies=(1e-6, 3e-6), contention=(0.5,), gpu_waits=(2e-3,), protocol="rndv", lossy=(lossy,)
    )
    percentiles = {"p50_us": 1.0, "p90_us": 3.0, "p99_us": 3.0, "p99.9_us": 3.0}
    assert described(measured) == {
        **values, "key": KEY, "pages": "huge", **{name: pytest.approx(value) for name, value in percentiles.items()},
        "others_cores": [0.5], "gpu_waits_us": [2000.0], "protocol": "rndv", "lost_packets": [asdict(lossy)],
    }  # fmt: skip


def test_each_timed_figure_is_a_benchmark_and_has_the_others_with_it() -> None:
    item = an_item("benchmark")
    make_benchmark(item)
    fixture = Fixture(item)
    one, other = (Figure(name, 2.0, "s", samples=((1.0, 3.0), (2.0, 2.0)), rounds=rounds)
                  for name, rounds in (("one", (1.0, 3.0)), ("other", (0.5,))))  # fmt: skip
    size = Figure("size", 7.0, "B", samples=((7.0, 7.0),))
    untimed = {"figures": [replace(size, samples=()).plain()]}
    for figures, more in (((one, size, other), untimed), ((one, other), {})):
        record_timed_figures(item, fixture, figures)
        assert fixture.records == [
            (figure.key, figure.key, figure.name, {"figure": figure.plain(), **more}, (len(figure.rounds), 1, 0),
             pytest.approx(figure.rounds))
            for figure in (one, other)
        ]  # fmt: skip
        fixture.records.clear()
    assert (fixture.fullname, fixture.extra_info) == ("", {"initiator_gpu": "H100"}), "it is not used itself"


def test_a_test_that_measures_uses_the_fixture_of_pytest_benchmark() -> None:
    for names, expected in ((["nixl_rows"], ["nixl_rows", "benchmark"]), (["benchmark", "a"], ["benchmark", "a"])):
        item = an_item("benchmark", fixturenames=names)
        make_benchmark(item)
        assert (names, [mark.name for mark in item.markers]) == (expected, ["benchmark"])
    without = an_item(fixturenames=["nixl_rows"])
    make_benchmark(without)
    assert (without.fixturenames, without.markers) == (["nixl_rows"], []), "its marker is unknown then"


@pytest.mark.parametrize(
    ("plugins", "stored", "option", "readers", "early"),
    [
        (["benchmark"], True, "", 1, True),
        *((["benchmark"], False, option, 1, True)
          for option in ("benchmark_json", "benchmark_save", "benchmark_autosave")),
        (["benchmark"], False, "benchmark_storage", 1, False),
        (["benchmark"], True, "", 2, False),  # another plugin says it
        ([], True, "", 1, False),
    ],
)  # fmt: skip
def test_the_facts_of_the_machine_are_read_early_if_a_file_has_them(
    plugins: list[str], stored: bool, option: str, readers: int, early: bool
) -> None:
    registered: list[tuple[type, str]] = []
    manager = SimpleNamespace(
        has_plugin=plugins.__contains__, register=lambda plugin, name: registered.append((type(plugin), name))
    )
    hook = SimpleNamespace(get_hookimpls=lambda: [None] * readers)
    config: Any = SimpleNamespace(
        pluginmanager=manager, getoption=lambda name: name == option,
        hook=SimpleNamespace(pytest_benchmark_generate_machine_info=hook),
    )  # fmt: skip
    read_machine_early(config, stored=stored)
    assert registered == ([(MachineFacts, "nixl-machine-facts")] if early else [])


def test_the_versions_of_the_target_are_recorded_where_they_differ() -> None:
    left_out = {name: name for name in ("pid", "host", "gpu", "nixl_module", "obstacle", "ucx_tls")}
    first, other = (
        cast(NixlAgent, SimpleNamespace(worker=SimpleNamespace(versions=versions | left_out)))
        for versions in ({"nixl": "1", "ucx": 2, "python": "3"}, {"nixl": "1", "ucx": "4", "cuda": "5"})
    )
    of_first, of_other = {"nixl": "1", "ucx": "2", "python": "3"}, {"nixl": "1", "ucx": "4", "cuda": "5"}
    assert versions_of(first, other) == {**of_first, "target_ucx": "4", "target_cuda": "5"}
    assert worker_versions([first, other]) == {**of_other, **of_first}
    assert worker_versions([other]) == of_other


def test_the_facts_are_those_of_pytest_benchmark_and_each_file_has_its_own() -> None:
    facts = MachineFacts()
    first, other = (facts.pytest_benchmark_generate_machine_info() for _ in range(2))
    assert first is not None
    assert first.keys() == pytest_benchmark.plugin.pytest_benchmark_generate_machine_info().keys()
    assert first == other
    assert first["cpu"] is not other["cpu"], "hooks may change it"
