# SPDX-License-Identifier: Apache-2.0
"""Hand the samples that a worker measured to pytest-benchmark, so that its statistics, files and comparisons work."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
import pytest_benchmark.plugin

from pytest_nixl.model.samples import Samples, percentile

if TYPE_CHECKING:
    from pytest_nixl.model.figure import Figure
    from pytest_nixl.nixl.agent import NixlAgent


class _ReplayClock:
    """A timer for pytest-benchmark that replays times which were measured in a worker.

    pytest-benchmark reads its timer before and after each round, so round ``i`` lasts ``seconds[i]``.
    """

    __name__ = "pytest_nixl_replay_clock"

    def __init__(self) -> None:
        self._ticks: Iterator[float] = iter(())
        self._now = 0.0

    def load(self, seconds: tuple[float, ...]) -> None:
        """Set the rounds to replay. :param seconds: the duration of each round."""
        self._ticks = iter([tick for second in seconds for tick in (0.0, second)])

    def __call__(self) -> float:
        self._now += next(self._ticks, 0.0)
        return self._now


#: The clock that a test's ``benchmark`` fixture reads, on its item.
_CLOCK = pytest.StashKey[_ReplayClock]()


class MachineFacts:
    """A pytest plugin that reads what pytest-benchmark's files say of the machine while the first workers start.

    At the end of a run pytest-benchmark would wait 0.15 s for it, for each file: it starts a Python to read CPUID.
    """

    def __init__(self) -> None:
        self._facts: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._read, name="machine facts", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(Exception):  # pytest-benchmark will raise it
            self._facts = pytest_benchmark.plugin.pytest_benchmark_generate_machine_info()

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_generate_machine_info(self) -> dict[str, Any] | None:
        """Return what was read; None: pytest-benchmark reads it."""
        self._thread.join()
        return copy.deepcopy(self._facts)


def read_machine_early(config: pytest.Config, *, stored: bool) -> None:
    """Begin to read what files say of the machine, if any is written and no other plugin says it.

    :param stored: whether the run has a record of its own, besides the files of pytest-benchmark's options.
    """
    options = ("benchmark_json", "benchmark_save", "benchmark_autosave")
    if not config.pluginmanager.has_plugin("benchmark") or not (stored or any(map(config.getoption, options))):
        return
    if len(config.hook.pytest_benchmark_generate_machine_info.get_hookimpls()) == 1:
        config.pluginmanager.register(MachineFacts(), "nixl-machine-facts")


def records_figures(item: pytest.Item) -> bool:
    """Whether a test records named figures."""
    return "record_figures" in getattr(item, "fixturenames", ())


def make_benchmark(item: pytest.Item) -> None:
    """Turn a test that measures a row, or figures, into a benchmark of pytest-benchmark with a separate clock."""
    item.stash[_CLOCK] = _ReplayClock()
    if not item.config.pluginmanager.has_plugin("benchmark"):
        return  # its marker is unknown then
    item.add_marker(pytest.mark.benchmark(timer=item.stash[_CLOCK]))
    fixtures: list[str] = getattr(item, "fixturenames", [])
    if "benchmark" not in fixtures:
        # pytest-benchmark's own options recognize a benchmark by the name of this fixture.
        fixtures.append("benchmark")


def record_samples(item: pytest.Item, benchmark: Any, samples: Samples, extra: Mapping[str, object]) -> None:
    """Hand a row to pytest-benchmark.

    A round is one window, and its time is the seconds of one transfer in it, so that the median round gives the row's
    bandwidth. ``fullname`` is the row's key, so that runs from a clone and from a wheel can be compared.

    :param item: the test, which :func:`make_benchmark` made a benchmark.
    :param benchmark: pytest-benchmark's fixture.
    :param extra: further ``extra_info``.
    """
    item.stash[_CLOCK].load(rounds(samples))
    key = samples.key
    benchmark.fullname = str(key)
    benchmark.name = str(key)
    benchmark.group = f"{key.backend} {key.op} {key.memory}"
    benchmark.extra_info.update({**described(samples), **extra})
    benchmark.pedantic(_nothing, rounds=len(samples.windows), iterations=1, warmup_rounds=0)


def record_timed_figures(item: pytest.Item, benchmark: Any, figures: Sequence[Figure]) -> None:
    """Hand the figures of one test to pytest-benchmark: each that has rounds is one benchmark, with their seconds.

    ``fullname`` is the figure's key. The figures without rounds are in the ``extra_info`` of each of these benchmarks.

    :param benchmark: pytest-benchmark's fixture, which is not used itself, because it records only one benchmark.
    """
    untimed = [replace(figure, samples=()).plain() for figure in figures if not figure.rounds]
    for figure in figures:
        if not figure.rounds:
            continue
        item.stash[_CLOCK].load(figure.rounds)
        fixture_copy = copy.copy(benchmark)
        fixture_copy.fullname = fixture_copy.name = figure.key
        fixture_copy.group = figure.name
        fixture_copy.extra_info = {"figure": figure.plain(), **({"figures": untimed} if untimed else {})}
        fixture_copy.pedantic(_nothing, rounds=len(figure.rounds), iterations=1, warmup_rounds=0)


def versions_of(initiator: NixlAgent, target: NixlAgent) -> dict[str, str]:
    """Return the versions that the workers of a pair of agents report. The target's is included only if it differs."""
    of_initiator, of_target = (worker_versions([end]) for end in (initiator, target))
    return {
        **of_initiator,
        **{f"target_{name}": text for name, text in of_target.items() if of_initiator.get(name) != text},
    }


def worker_versions(agents: Sequence[NixlAgent]) -> dict[str, str]:
    """Return the versions that the workers of agents report. Those of the first are included where they differ."""
    versions: dict[str, str] = {}
    for agent in agents:
        for name, value in agent.worker.versions.items():
            if name not in ("pid", "host", "gpu", "nixl_module", "obstacle", "ucx_tls"):
                versions.setdefault(name, str(value))
    return versions


def rounds(samples: Samples) -> tuple[float, ...]:
    """Return the rounds for pytest-benchmark: for each window, the seconds of one transfer."""
    return tuple(s / n for s, n in zip(samples.windows, samples.transfers, strict=True))


def described(samples: Samples) -> dict[str, object]:
    """Return the ``extra_info`` of a row. ``launches`` are bytes per second; other units are in the names."""
    percents = (50, 90, 99, 99.9) if samples.latencies else ()
    latencies = {f"p{percent:g}_us": percentile(samples.latencies, percent) * 1e6 for percent in percents}
    return {
        "key": str(samples.key),
        **({"pages": samples.key.pages} if samples.key.pages else {}),
        "GB/s": samples.bandwidth / 1e9,
        "Gb/s": samples.bandwidth * 8 / 1e9,
        "launches": list(samples.values),
        **latencies,
        "transfers": sum(samples.transfers),
        "transfer_bytes": samples.transfer_bytes,
        "others_cores": list(samples.contention),
        **({"gpu_waits_us": [wait * 1e6 for wait in samples.gpu_waits]} if samples.gpu_waits else {}),
        "transports": list(samples.transports),
        **({"protocol": samples.protocol} if samples.protocol else {}),
        "payload_bytes": sum(samples.transfers) * samples.transfer_bytes,
        "counted_bytes": _carried(samples),
        **({"lost_packets": [asdict(wait) for wait in samples.lossy]} if samples.lossy else {}),
    }


def _carried(samples: Samples) -> dict[str, int]:
    """Return the bytes of the payload that each device of the initiator's host carried, by the device's counters."""
    carriers = samples.counted.carriers(samples.transports) if samples.counted is not None else ()
    return {item.device: item.carried for item in carriers}


def _nothing() -> None:
    """Do nothing, because the workers have already measured the row."""
