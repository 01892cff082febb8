# SPDX-License-Identifier: Apache-2.0
"""What the suites' tests are written in: the sizes to measure, what to expect, how to record and conclude."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from typing import Any, Protocol

import pytest

from pytest_nixl import (
    FINDINGS,
    Cluster,
    Expectation,
    Figure,
    Judgement,
    Launches,
    Link,
    LocalHost,
    Profile,
    Run,
    Samples,
    Settings,
    between_agents,
    format_size,
    judge_finding,
    load_profile,
    supervisor,
)
from pytest_nixl.fixtures.agents import parametrize_values
from pytest_nixl.judge.figure_bounds import bounded, judge_figures
from pytest_nixl.judge.row import another_launch, decisive_bandwidth
from pytest_nixl.judge.row import judge as judge_row
from pytest_nixl.measure.interleaved import alternate
from pytest_nixl.model.figure import Bound
from pytest_nixl.model.results import RowSummary
from pytest_nixl.model.settings import MOST_LAUNCHES
from pytest_nixl.session.baseline import another_to_compare
from pytest_nixl.session.benchmark import record_samples, record_timed_figures, versions_of
from pytest_nixl.session.gate import profile_between_hosts
from pytest_nixl.session.outcome import conclude

from . import early


class FindingFixture(Protocol):
    """What the fixture ``finding`` is."""

    def __call__(self, id: str, occurs: bool, reason: str, *, affects: bool = False) -> None:
        """Fail if the defect is there and ``affects`` the deployment; else pass. One that is there is a known limit.

        What the profile accepts until a day that is not over warns; what it accepts and is not there fails.
        """


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run = Run.of(metafunc.config)
    if not run.usable:  # the tests will say so
        for name in ("block", "batch", "depth"):
            parametrize_values(metafunc, name, (1,), str)
        return
    backends = between_agents(run.settings.backend)
    if "agent_backend" in metafunc.fixturenames and len(backends) > 1:
        metafunc.parametrize("agent_backend", backends)
    progress = run.settings.progress_thread
    if "agent_progress" in metafunc.fixturenames and len(progress) > 1:
        metafunc.parametrize("agent_progress", progress, ids=lambda value: f"progress-thread={value}")
    parametrize_values(metafunc, "block", run.settings.blocks, format_size)
    parametrize_values(metafunc, "batch", run.settings.batch, lambda count: f"batch{count}")
    parametrize_values(metafunc, "depth", run.settings.depth, lambda count: f"depth{count}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    early.before_setup(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    return early.call(pyfuncitem)


@pytest.fixture(scope="session", autouse=True)
def session_fixtures(request: pytest.FixtureRequest) -> None:
    """Let checks that run beside each other take fixtures of the session."""
    request.session.stash[early.FIXTURES] = request.getfixturevalue


@pytest.fixture(scope="session")
def profile(nixl_settings: Settings, nixl_run: Run, nixl_cluster: Cluster) -> Profile:
    """What to expect of this machine."""
    return profile_between_hosts(load_profile(nixl_settings.profile), nixl_run, nixl_cluster)


@pytest.fixture
def verdict(request: pytest.FixtureRequest, nixl_settings: Settings, profile: Profile) -> Callable[[Judgement], None]:
    """End the test as the verdict table says: pass, warn, skip or fail."""

    def decide(judgement: Judgement) -> None:
        conclude(request.node, judgement, profile, gate=nixl_settings.gate)

    return decide


@pytest.fixture
def finding(verdict: Callable[[Judgement], None], profile: Profile) -> FindingFixture:
    """End the test with the verdict on a known defect, by whether it occurs and the profile accepts it."""

    def decide(id: str, occurs: bool, reason: str, *, affects: bool = False) -> None:
        acceptance = profile.acceptance(id)
        verdict(
            judge_finding(
                FINDINGS[id], occurs=occurs, reason=reason, affects=affects, acceptance=acceptance, today=date.today()
            )
        )

    return decide


@early.fixture
def agent_backend(nixl_settings: Settings) -> str:
    """The backend of the agents of a test: each requested backend in turn that moves bytes between agents.

    If only storage backends are requested, it is the first of them.
    """
    return (between_agents(nixl_settings.backend) or nixl_settings.backend)[0]


@early.fixture
def agent_progress(nixl_settings: Settings) -> str:
    """Whether the agents of a test have a progress thread: each value of ``--nixl-progress-thread`` in turn."""
    return nixl_settings.progress_thread[0]


@pytest.fixture(scope="session")
def nixl_run(pytestconfig: pytest.Config) -> Run:
    """The state of this run."""
    return Run.of(pytestconfig)


@pytest.fixture(scope="session")
def other_launches(nixl_settings: Settings) -> Iterator[Launches | None]:
    """Workers of the other image, where ``--nixl-compare-image`` names one."""
    if nixl_settings.compare_image is None:
        yield None
        return
    initiator, target = (LocalHost(supervisor(), rank, nixl_settings.compare_image.prefix) for rank in range(2))
    launches = Launches((initiator, target), nixl_settings)
    yield launches
    launches.close()


class Rows:
    """What a test does with the row that it measures: measure, record and judge it.

    :param item: the test.
    :param other_launches: workers of the other image, which measure in turn with this one; None: there is none.
    :param benchmark: pytest-benchmark's fixture; None: it is not there, or the test measures no row itself.
    """

    def __init__(
        self, item: pytest.Item, run: Run, profile: Profile, other_launches: Launches | None, benchmark: Any
    ) -> None:
        self._item = item
        self._run = run
        self._profile = profile
        self._other_launches = other_launches
        self._benchmark = benchmark

    def measure(self, link: Link, block: int, *, batch: int = 1, depth: int = 1) -> Samples:
        """Measure a row of a link in as many launches as it takes; in turn with the other image if there is one."""
        if self._other_launches is None:
            clear = None
            if self._run.settings.fewest_launches == 1:  # the values of a row in several launches are compared
                key = link.key(block, batch=batch, depth=depth)
                clear = decisive_bandwidth(self._profile.expectation_in(self._run.settings, key))
            return link.measure_launches(block, batch=batch, depth=depth, another=self.needs_launch, clear_above=clear)
        other = self._other_launches.link(
            link.backend, link.op, link.memory, agent_options=link.agent_options, footprint=link.footprint
        )

        def more(samples: Samples, second: Samples) -> bool:
            self._run.record.other_samples[second.key] = second
            return len(samples.values) < MOST_LAUNCHES and second.corruption is None and self.needs_launch(samples)

        samples, _ = alternate(link, other, block, batch=batch, depth=depth, needs_another=more)
        self._run.record.other_versions.update(versions_of(other.initiator, other.target))
        return samples

    def needs_launch(self, samples: Samples) -> bool:
        """Whether one more launch is required, or could decide what the launches so far leave open."""
        self._run.record.samples_so_far = samples
        if samples.corruption is not None:
            return False
        return (
            len(samples.values) < self._run.settings.fewest_launches
            or another_launch(samples, self._expectation(samples), self._profile.machine)
            or another_to_compare(samples, self._run)
        )

    def record(
        self,
        samples: Samples,
        link: Link | None = None,
        *,
        summary: RowSummary | None = None,
        versions: Mapping[str, str] | None = None,
        more: Mapping[str, object] | None = None,
    ) -> None:
        """Write a row to the table and, through pytest-benchmark, to its files: with the versions of its workers.

        :param link: the link that measured it; None: no link did, and the caller gives the versions.
        :param summary: its values; None: those of the samples, with what the profile expects of the row.
        :param versions: the versions of its workers, for the run; None: those of the link's.
        :param more: what its record has beside the samples; None: what each of the link's workers says of itself.
        """
        if link is not None:
            versions, more = versions_of(link.initiator, link.target), _of_each_end(link)
        if summary is None:
            summary = RowSummary.of(samples, self._expectation(samples), self._profile.machine)
        self._run.record.add_row(self._item.nodeid, summary)
        self._run.record.versions.update(versions or {})
        if self._benchmark is not None:
            self._benchmark.has_error = False
            record_samples(self._item, self._benchmark, samples, more or {})
            if self._benchmark.stats is not None:  # None: pytest-benchmark is disabled
                self._run.record.benchmarks.append(self._benchmark.stats)

    def judge(self, samples: Samples) -> Judgement:
        """Judge samples by what the profile expects of their row."""
        return judge_row(samples, self._expectation(samples), self._profile.machine, os.environ)

    def _expectation(self, samples: Samples) -> Expectation | None:
        return self._profile.expectation_in(self._run.settings, samples.key)


@pytest.fixture
def nixl_rows(
    request: pytest.FixtureRequest, nixl_run: Run, profile: Profile, other_launches: Launches | None
) -> Iterator[Rows]:
    """Measure, record and judge the row of a test."""
    benchmark: Any = request.getfixturevalue("benchmark") if "benchmark" in request.fixturenames else None
    if benchmark is not None:
        benchmark.has_error = True  # until there is something to record
    yield Rows(request.node, nixl_run, profile, other_launches, benchmark)
    if benchmark is not None and benchmark.has_error:
        benchmark.skipped = True  # it warns of a test that fails before it measures


@pytest.fixture
def record_figures(
    request: pytest.FixtureRequest, nixl_run: Run, profile: Profile
) -> Iterator[Callable[..., Judgement]]:
    """Write figures to the report and, through pytest-benchmark, to its files; judge them by the profile's bounds.

    A figure that the profile does not bound is judged by the check's ``defaults``, if it gives any.
    """
    benchmark: Any = None
    if request.config.pluginmanager.has_plugin("benchmark"):
        benchmark = request.getfixturevalue("benchmark")

    def write(figures: Sequence[Figure], defaults: Sequence[Bound] = ()) -> Judgement:
        bounds = (*profile.bounds, *defaults)
        limited = tuple(bounded(figure, bounds) for figure in figures)
        nixl_run.record.add_figures(request.node.nodeid, limited)
        if benchmark is not None:
            record_timed_figures(request.node, benchmark, limited)
        return judge_figures(figures, bounds)

    yield write
    if benchmark is not None and benchmark.stats is None:
        benchmark.skipped = True  # copies of it were used; it warns of a test that does not use itself


def _of_each_end(link: Link) -> dict[str, object]:
    """Return what the workers of a link say of themselves, by role and name: ``initiator_ucx``."""
    return {
        f"{end.worker.role}_{name}": end.worker.versions[name]
        for end in (link.initiator, link.target)
        for name in ("nixl", "nixl_package", "ucx", "python", "host", "gpu")
        if name in end.worker.versions
    }
