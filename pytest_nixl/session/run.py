# SPDX-License-Identifier: Apache-2.0
"""The state of the run in one pytest process: settings, requested rows, and results so far."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nixl.core.errors import NixlPluginError, NotApplicableError
from pytest_nixl.model.findings import FindingError
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.session.options import OPTIONS, given_options
from pytest_nixl.session.outcome import JUDGEMENT, check_of, is_own

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_nixl.cluster.placement import Placement
    from pytest_nixl.cluster.rank_session import RankSession
    from pytest_nixl.core.host_load import HostLoad
    from pytest_nixl.judge.run_comparison import RunComparison
    from pytest_nixl.model.rank_pairs import RankPair
    from pytest_nixl.model.results import Result
    from pytest_nixl.model.row_key import RowKey
    from pytest_nixl.model.samples import Samples
    from pytest_nixl.model.settings import Settings
    from pytest_nixl.store.record_reader import RecordedRun

RUN = pytest.StashKey["Run"]()

#: The plugin's fixtures. A test that uses one of them needs the settings.
OUR_FIXTURES = frozenset(
    (
        "nixl_settings",
        "nixl_cluster",
        "nixl_etcd",
        "nixl_private_etcd",
        "nixl_agent",
        "nixl_link",
        "nixl_buffer",
        "gpu_buffer",
        "etcd3_client",
    )
)


@dataclass(frozen=True)
class LinkParam:
    """One parameter of the fixture ``nixl_link``: a requested link."""

    backend: str
    op: str
    memory: MemoryPair
    #: Ranks of initiator and target; the same rank for a storage backend.
    ranks: RankPair = (0, 1)
    #: Whether the run has several ranks, so that the test id names them.
    several: bool = False
    #: GPUs that were requested by number; None: none were, or the link has no GPU memory.
    devices: DevicePair | None = None

    def __str__(self) -> str:
        ranks = f"-{self.ranks[0]}:{self.ranks[1]}" if self.several else ""
        return f"{self.backend}-{self.op}-{self.memory}{ranks}"

    def key(self, block: int, batch: int, depth: int) -> RowKey:
        """Return the key of a row of this link.

        :param block: block size in bytes.
        :param batch: blocks in one transfer; ``depth`` is the number of transfers in flight.
        """
        from pytest_nixl.model.row_key import RowKey

        return RowKey(self.backend, self.op, self.memory, block, batch, depth, self.ranks, self.devices)


def asked_links(settings: Settings, asked: Placement) -> list[LinkParam]:
    """Return the requested links: operations vary fastest, then pairs of ranks, and backends slowest."""
    from pytest_nixl.nixl.backends import BACKENDS

    links: dict[LinkParam, None] = {}
    for backend, memory in product(settings.backend, settings.memory):
        if BACKENDS[backend].STORAGE:
            between = [(rank, rank) for rank in range(asked.ranks)]
            memory = MemoryPair(memory.initiator, "FILE")
        else:
            between = list(asked.pairs) if memory.target != "FILE" else []
        devices = settings.devices if "VRAM" in (memory.initiator, memory.target) else None
        for ranks, op in product(between, settings.op):
            links[LinkParam(backend, op, memory, ranks, asked.several, devices)] = None
    return list(links)


@dataclass
class Run:
    """The state of this run in this process."""

    config: pytest.Config
    results: list[Result] = field(default_factory=list)
    announced: bool = False
    #: Whether a test that uses the plugin was collected, and whether a test that makes a check was.
    used: bool = False
    checks: bool = False
    #: The suites of which a test was collected, even if it was deselected later.
    suites: set[str] = field(default_factory=set)
    #: The required check that ended the run before its last test, as a sentence; empty: there is none.
    ended: str = ""
    #: pytest-benchmark's statistics of each row, for the record.
    benchmarks: list[Any] = field(default_factory=list)
    #: The keys of the measured rows, by their text.
    keys: dict[str, RowKey] = field(default_factory=dict)
    #: The versions that workers report: of this image, and of the other image that is measured in turn.
    versions: dict[str, str] = field(default_factory=dict)
    other_versions: dict[str, str] = field(default_factory=dict)
    #: The samples of the other image that is measured in turn, by row key.
    others: dict[str, Samples] = field(default_factory=dict)
    #: The run to compare this one with, and the result of the comparison.
    baseline: RecordedRun | None = None
    compared: RunComparison | None = None
    #: Sentences about other events, such as a record that could not be stored.
    notes: list[str] = field(default_factory=list)
    #: This process's membership in a group of several ranks; None: it is alone, or has not joined yet.
    party: RankSession | None = None
    #: Workflow commands for GitHub Actions, to be written on separate lines.
    annotations: list[str] = field(default_factory=list)
    #: How far the run came and what ended it early, such as ``INTERRUPTED after 2 of 10 checks: Ctrl-C``; empty: it is
    #: not over yet, or it was completed.
    interrupted: str = ""
    #: Whether the report was written to the terminal.
    reported: bool = False
    #: Paths of this run's records in the store.
    stored: list[Path] = field(default_factory=list)

    @classmethod
    def of(cls, config: pytest.Config) -> Run:
        """Return the state of the run that ``config`` belongs to; create it if necessary."""
        if RUN not in config.stash:
            config.stash[RUN] = cls(config)
        return config.stash[RUN]

    @cached_property
    def settings(self) -> Settings:
        """The settings, read on first use. :raises pytest.UsageError: if one of them is bad."""
        from pytest_nixl.session.settings import read_settings

        return read_settings(self.config)

    @property
    def asked(self) -> Placement:
        """The ranks of this run. :raises pytest.UsageError: if options and launcher contradict each other."""
        from pytest_nixl.cluster.placement import ALONE

        return self._asked if self.asked_for or self.checks else ALONE

    @cached_property
    def _asked(self) -> Placement:
        from pytest_nixl.cluster.placement import ask

        return ask(self.settings)

    @property
    def in_cluster(self) -> bool:
        """Whether this process is one of several ranks. A run that does not use the plugin never reads the settings."""
        return (self.asked_for or self.checks) and self.usable and self.asked.several

    @property
    def serves(self) -> bool:
        """Whether this process is a peer, which serves rank 0 and runs no tests itself."""
        return self.party is not None and not self.party.drives

    @property
    def usable(self) -> bool:
        """Whether all settings are valid."""
        try:
            return bool(self.settings and self.asked)
        except pytest.UsageError:
            return False

    def add(self, result: Result) -> None:
        """Add a result. The result of a test's teardown replaces that of its call."""
        self.results = [one for one in self.results if one.nodeid != result.nodeid]
        self.results.append(result)

    def explain(self, row: str, why: str) -> None:
        """Append an explanation to the reason of a row's result.

        :param row: the row key as text.
        :param why: the explanation.
        """
        self.results = [replace(one, reason=f"{one.reason}; {why}") if one.row == row else one for one in self.results]

    @property
    def asked_for(self) -> bool:
        """Whether an option or ini value of the plugin is given, so that a bad value ends the run at once."""
        return bool(given_options(self.config)) or any(self.config.getini(item.ini) for item in OPTIONS)

    @property
    def parallel(self) -> bool:
        """Whether this is a worker of pytest-xdist."""
        return hasattr(self.config, "workerinput")


def uses_ours(item: pytest.Item) -> bool:
    """Whether a test uses a fixture of the plugin or makes a check."""
    return bool(OUR_FIXTURES.intersection(getattr(item, "fixturenames", ()))) or check_of(item) is not None


def row_of(item: pytest.Item) -> RowKey | None:
    """Return the key of the row that a test measures, by its parameters; None: it measures no row."""
    if "row_benchmark" not in getattr(item, "fixturenames", ()):
        return None
    callspec = getattr(item, "callspec", None)
    params: dict[str, Any] = callspec.params if callspec is not None else {}
    if "program_row" in params:  # the row of an external program
        row: RowKey | None = params["program_row"]
        return row
    link = params.get("nixl_link")
    if not isinstance(link, LinkParam):
        return None
    return link.key(params["block"], params.get("batch", 1), params.get("depth", 1))


def result_of(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> Result | None:
    """Return the result of a check after its call, or after a failure or skip in its setup or teardown; else None."""
    check = check_of(item)
    if check is None or (report.when != "call" and report.passed):
        return None
    from pytest_nixl.model.results import FIGURES, RATIOS, Result

    judgement = _judgement(item, call, report)
    row = row_of(item)
    return Result(
        check=check,
        nodeid=item.nodeid,
        verdict=judgement.verdict,
        reason=judgement.reason,
        remedy=judgement.remedy,
        row=str(row) if row else "",
        figures=item.stash.get(FIGURES, None),
        repeat=repeat_line(item, row),
        finding=judgement.finding,
        known_limit=judgement.known_limit,
        ratios=item.stash.get(RATIOS, ()),
    )


def _judgement(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> Judgement:
    error = call.excinfo.value if call.excinfo is not None else None
    concluded = item.stash.get(JUDGEMENT, None)
    if concluded is not None and (error is None or isinstance(error, (pytest.fail.Exception, pytest.skip.Exception))):
        return concluded
    if isinstance(error, NotApplicableError):
        return Judgement(Verdict.NOT_APPLICABLE, error.reason, error.remedy)
    if isinstance(error, NixlPluginError) and (busy := _late_because(item, error)):
        verdict = Verdict.WARN if is_own(item) else Verdict.INCONCLUSIVE
        return Judgement(verdict, f"{error.reason}; {busy}", _LESS_TO_DO)
    if report.skipped:
        return Judgement(Verdict.NOT_APPLICABLE, _skip_reason(report))
    if report.passed:
        return Judgement(Verdict.PASS, "")
    if isinstance(error, FindingError):
        return Judgement(Verdict.FAIL, error.reason, error.remedy, error.finding)
    if isinstance(error, NixlPluginError):
        return Judgement(Verdict.ERROR, error.reason, error.remedy)
    kind = Verdict.FAIL if isinstance(error, (AssertionError, pytest.fail.Exception)) else Verdict.ERROR
    return Judgement(kind, _first_line(error))


_LESS_TO_DO = "stop other processes on this host, and run it again"
_LOAD: pytest.StashKey[HostLoad] = pytest.StashKey()
_BUSY = pytest.StashKey[str]()


def watch_load(item: pytest.Item) -> None:
    """Begin to measure the CPU time that other processes use while a test runs."""
    from pytest_nixl.core.host_load import HostLoad

    with contextlib.suppress(OSError):
        item.stash[_LOAD] = HostLoad()


def _late_because(item: pytest.Item, error: NixlPluginError) -> str:
    """Return what kept the host busy if the error is only a missed deadline; empty: it is not, or nothing did."""
    if not error.late or _LOAD not in item.stash:
        return ""
    if _BUSY not in item.stash:
        item.stash[_BUSY] = item.stash[_LOAD].words()
    return item.stash[_BUSY]


def _skip_reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _first_line(error: BaseException | None) -> str:
    text = str(error).strip().splitlines()
    name = "" if isinstance(error, (AssertionError, pytest.fail.Exception)) else f"{type(error).__name__}: "
    return f"{name}{text[0] if text else type(error).__name__}"


def shorten(report: pytest.TestReport, item: pytest.Item, error: BaseException, *, gate: bool, required: bool) -> None:
    """Replace the traceback in a report by the message if the error or verdict is the plugin's; skip if not applicable.

    A missed deadline on a busy host decides nothing, so the test is skipped. With the gate, only a check of pytest-nixl
    itself is skipped for that.

    :param report: the report, which is changed in place.
    :param gate: whether ``--nixl-gate`` is given.
    :param required: whether the profile requires the check.
    """
    path, line, _ = item.location
    busy = _late_because(item, error) if isinstance(error, NixlPluginError) else ""
    if isinstance(error, NotApplicableError) and not (gate and required):
        report.outcome = "skipped"
        report.longrepr = (path, (line or 0) + 1, f"Skipped: {error.reason}")
    elif busy and (is_own(item) or not gate):
        report.outcome = "skipped"
        report.longrepr = (path, (line or 0) + 1, f"Skipped: {error}; {busy}")
    elif isinstance(error, NixlPluginError) or (isinstance(error, pytest.fail.Exception) and JUDGEMENT in item.stash):
        report.longrepr = str(error)


def repeat_line(item: pytest.Item, row: RowKey | None) -> str:
    """Return the command that runs this test, or this row, again."""
    left_out = {"--nixl-gate", "--nixl-baseline", "--nixl-store", "--nixl-report", "--nixl-rank", "--nixl-log-dir"}
    from pytest_nixl.model.row_source import backend_of

    given = {flag: value for flag, value in given_options(item.config).items() if flag not in left_out}
    several = Run.of(item.config).in_cluster
    if row is None:
        where = [item.nodeid]
    else:
        where = _suite(item)
        given |= {
            "--nixl-backend": backend_of(row.backend),
            "--nixl-op": row.op,
            "--nixl-memory": str(row.memory),
            "--nixl-blocks": str(row.block),
            "--nixl-batch": str(row.batch),
            "--nixl-depth": str(row.depth),
        }
        if several and row.pair[0] != row.pair[1]:
            given["--nixl-pairs"] = f"{row.pair[0]}:{row.pair[1]}"
    for option in OPTIONS:
        if option.secret:
            given.pop(option.flag, None)
        elif option.field == "etcd" and option.flag in given:
            given[option.flag] = option.show(given[option.flag])
    return shlex.join(["pytest", *where, *(f"{flag}={value}" for flag, value in given.items())])


def _suite(item: pytest.Item) -> list[str]:
    """Return the command-line arguments that select the suite of a test: its module if importable, else its file."""
    if item.config.getoption("pyargs"):
        module = getattr(item, "module", None)
        if module is not None and module.__name__.startswith("pytest_nixl."):
            return ["--pyargs", module.__name__]
    try:
        return [str(item.path.relative_to(item.config.invocation_params.dir))]
    except ValueError:
        return [str(item.path)]
