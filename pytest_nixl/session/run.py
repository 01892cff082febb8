# SPDX-License-Identifier: Apache-2.0
"""The run in one pytest process: what is asked of it, what it collected, and its record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nixl.cluster.placement import ALONE, placement_of_run
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.redaction import redact
from pytest_nixl.core.signals import sigterm_ends_in_order
from pytest_nixl.core.strict import printable
from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.session.given_options import hider_of
from pytest_nixl.session.options import uses_options
from pytest_nixl.session.requested_links import requested_links
from pytest_nixl.session.settings import read_settings

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_nixl.cluster.placement import Placement
    from pytest_nixl.cluster.rank_session import RankSession
    from pytest_nixl.judge.run_comparison import RunComparison
    from pytest_nixl.model.figure import Figure
    from pytest_nixl.model.results import RawRatio, RowSummary
    from pytest_nixl.model.row_key import RowKey
    from pytest_nixl.model.samples import Samples
    from pytest_nixl.model.settings import Settings
    from pytest_nixl.store.record_reader import RecordedRun

RUN = pytest.StashKey["Run"]()
_RANK_SESSION: pytest.StashKey[RankSession] = pytest.StashKey()


@dataclass
class LiveRecord:
    """What a run found so far. Its methods hide the secrets in each text that they add, and escape control characters.

    :param hide: hides the secrets in a text.
    :param results: the result of each check, and results that belong to no test.
    :param benchmarks: pytest-benchmark's statistics of each measurement of a row, for the record.
    :param versions: the versions that workers report; ``other_versions`` are those of the other image.
    :param other_samples: the samples of the other image, by row key.
    :param baseline: the run to compare this one with; None: there is none, or it was not read yet.
    :param comparison: the result of the comparison with another run; None: there is none yet.
    :param notes: sentences that the report shows at its end, such as the times of KV requests.
    :param details: those of the notes that the terminal of a run of several suites shows with ``-v`` only.
    :param annotations: workflow commands for GitHub Actions, to be written on separate lines.
    :param stored: paths of this run's records in the store.
    :param ended: the required check that ended the run before its last test, as a sentence; empty: there is none.
    :param interrupted: how far the run came and what ended it early, such as ``INTERRUPTED after 2 of 10 checks:
        Ctrl-C``; empty: it is not over yet, or it was completed.
    :param samples_so_far: the samples of the row that is being measured, of the launches so far; None: none has ended.
    """

    hide: Callable[[str], str] = redact
    results: tuple[Result, ...] = ()
    benchmarks: list[Any] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    other_versions: dict[str, str] = field(default_factory=dict)
    other_samples: dict[RowKey, Samples] = field(default_factory=dict)
    baseline: RecordedRun | None = None
    comparison: RunComparison | None = None
    notes: tuple[str, ...] = ()
    details: frozenset[str] = frozenset()
    annotations: tuple[str, ...] = ()
    stored: tuple[Path, ...] = ()
    ended: str = ""
    interrupted: str = ""
    samples_so_far: Samples | None = None
    #: By node id what a test measured so far, as a result without a verdict.
    _begun: dict[str, Result] = field(default_factory=dict)
    #: The node ids of the tests that have a result.
    _judged: set[str] = field(default_factory=set)

    def begun(self, nodeid: str) -> Result:
        """Return what a test measured so far, as a result without a verdict."""
        return self._begun.get(nodeid) or Result("", nodeid, Verdict.UNKNOWN)

    def add_row(self, nodeid: str, summary: RowSummary) -> None:
        """Add the summary of the row that a test measured."""
        self._begun[nodeid] = replace(self.begun(nodeid), summary=summary)

    def add_ratios(self, nodeid: str, ratios: tuple[RawRatio, ...]) -> None:
        """Add the ratios of rows to a raw tool that a test compared."""
        self._begun[nodeid] = replace(self.begun(nodeid), ratios=ratios)

    def add_figures(self, nodeid: str, figures: tuple[Figure, ...]) -> None:
        """Add named figures that a test measured."""
        begun = self.begun(nodeid)
        self._begun[nodeid] = replace(begun, measured=(*begun.measured, *figures))

    def add_result(self, result: Result) -> None:
        """Add the result of a test. The result of its teardown replaces that of its call."""
        if result.nodeid in self._judged:
            self.results = tuple(
                result_so_far for result_so_far in self.results if result_so_far.nodeid != result.nodeid
            )
        self._judged.add(result.nodeid)
        self.results = (*self.results, self._hidden(result))

    def add_run_results(self, results: Iterable[Result]) -> None:
        """Add results that no test made, such as a required check that did not run."""
        self.results = (*self.results, *map(self._hidden, results))

    def order_rows(self, places: Mapping[str, int]) -> None:
        """Put the results of rows into the order of collection, whatever the order was in which the rows were measured.

        :param places: by node id the place of each test.
        """
        rows = [result for result in self.results if result.row is not None]
        ordered = iter(sorted(rows, key=lambda result: places.get(result.nodeid, len(places))))
        self.results = tuple(result if result.row is None else next(ordered) for result in self.results)

    def _clean(self, text: str) -> str:
        return printable(self.hide(text))

    def _hidden(self, result: Result) -> Result:
        reason, remedy, repeat = map(self._clean, (result.reason, result.remedy, result.repeat))
        return replace(result, reason=reason, remedy=remedy, repeat=repeat)

    def explain(self, row: RowKey, reason: str) -> None:
        """Append an explanation to the reason of a row's result.

        :param reason: the explanation.
        """
        hidden = self._clean(reason)
        explained = (
            replace(result, reason=f"{result.reason}; {hidden}") if result.row == row else result
            for result in self.results
        )
        self.results = tuple(explained)

    def add_comparison(self, comparison: RunComparison) -> None:
        """Add the result of the comparison with another run, and the results that follow from it."""
        self.comparison = comparison
        self.add_run_results(comparison.results)

    def note(self, *sentences: str) -> None:
        """Add sentences that the report shows at its end. A sentence that is there already is not repeated."""
        self.notes = tuple(dict.fromkeys((*self.notes, *map(self._clean, sentences))))

    def note_detail(self, sentence: str) -> None:
        """Add a note that the terminal of a run of several suites shows with ``-v`` only."""
        self.note(sentence)
        self.details = self.details | {self._clean(sentence)}

    def end(self, reason: str) -> None:
        """Note that a required check ended the run before its last test.

        :param reason: which check, as a sentence.
        """
        self.ended = self._clean(reason)

    def interrupt(self, how_far: str) -> None:
        """Note that the run was ended early. The first cause stays.

        :param how_far: how far the run came and what ended it.
        """
        self.interrupted = self.interrupted or self._clean(how_far)


@dataclass
class Collected:
    """Which of the collected tests concern the plugin, even if they were deselected later.

    :param used: whether a test that uses the plugin was selected.
    :param checks: whether a test that makes a check was collected.
    :param suites: the suites of which a test was collected.
    :param places: by node id the place of each test in the order of collection, which another plugin may shuffle.
    """

    used: bool = False
    checks: bool = False
    suites: set[str] = field(default_factory=set)
    places: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Run:
    """A run in this pytest process. What is asked of it is computed on first use and does not change."""

    config: pytest.Config
    collected: Collected = field(default_factory=Collected)

    @classmethod
    def of(cls, config: pytest.Config) -> Run:
        """Return the run that ``config`` belongs to; create it if necessary."""
        if RUN not in config.stash:
            config.stash[RUN] = cls(config)
        return config.stash[RUN]

    @cached_property
    def settings(self) -> Settings:
        """The settings, read on first use. :raises pytest.UsageError: if one of them is bad."""
        return read_settings(self.config)

    @cached_property
    def configured(self) -> bool:
        """Whether an option or ini value of the plugin is given, so that a bad value ends the run at once."""
        return uses_options(self.config)

    @property
    def parallel(self) -> bool:
        """Whether this is a worker of pytest-xdist."""
        return hasattr(self.config, "workerinput")

    @property
    def usable(self) -> bool:
        """Whether all settings are valid."""
        try:
            return bool(self.settings and self.placement)
        except pytest.UsageError:
            return False

    @property
    def placement(self) -> Placement:
        """The ranks of this run. :raises pytest.UsageError: if options and launcher contradict each other."""
        return self._placement if self._for_us else ALONE

    @cached_property
    def _placement(self) -> Placement:
        return placement_of_run(self.settings)

    @property
    def links(self) -> list[RowKey]:
        """The requested links, each as the key of one of its rows. :raises pytest.UsageError: if a setting is bad."""
        return requested_links(self.settings, self.placement)

    @property
    def in_cluster(self) -> bool:
        """Whether this process is one of several ranks. A run that does not use the plugin never reads the settings."""
        return self._for_us and self.usable and self.placement.several

    @property
    def rank_session(self) -> RankSession | None:
        """The membership of this process in a group of several ranks; None: it is alone, or has not joined yet."""
        return self.config.stash.get(_RANK_SESSION, None)

    def join(self, rank_session: RankSession) -> None:
        """Make this process one of several ranks."""
        self.config.stash[_RANK_SESSION] = rank_session

    @property
    def serves(self) -> bool:
        """Whether this process is a peer, which serves rank 0 and runs no tests itself."""
        return self.rank_session is not None and not self.rank_session.drives

    @cached_property
    def hide(self) -> Callable[[str], str]:
        """Hides the secrets of this run in a text. Every result, note and traceback passes through it."""
        return hider_of(self.config)

    @cached_property
    def record(self) -> LiveRecord:
        """What the run found so far."""
        return LiveRecord(self.hide)

    @property
    def _for_us(self) -> bool:
        return self.configured or self.collected.checks


def exit_code(config: pytest.Config) -> int | None:
    """Return pytest's exit code so far; None: it has no session."""
    session = config.pluginmanager.get_plugin("session")
    return None if session is None else int(session.exitstatus)


@contextmanager
def settings_in_use(config: pytest.Config) -> Iterator[Settings]:
    """Yield the settings of a run; meanwhile SIGTERM ends pytest like Ctrl-C, so that fixtures are torn down.

    :raises NixlPluginError: they are refused.
    """
    try:
        settings = Run.of(config).settings
    except pytest.UsageError as error:
        raise NixlPluginError(str(error)) from None
    with sigterm_ends_in_order():
        yield settings
