# SPDX-License-Identifier: Apache-2.0
"""The check ``nixl-to-raw``: measure some rows of a run again with a raw tool, and compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pytest_nixl.checks.raw_tools.judge import RawComparison, judge_ratio, judge_raw, same_way
from pytest_nixl.checks.raw_tools.pair import RawPair
from pytest_nixl.checks.raw_tools.tools import RAW_TOOLS
from pytest_nixl.judge.profiles import Profile
from pytest_nixl.model.raw_comparison import RawRatio
from pytest_nixl.model.results import Result, measured_rows
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.tools import TOOLS
from pytest_nixl.model.verdicts import NO_BANDWIDTH, Judgement, Verdict
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.processes.external_program import ToolError
from pytest_nixl.session.cluster import Cluster
from pytest_nixl.session.run import Run

#: Maximum number of rank pairs that are measured.
MOST_PAIRS = 4


def link_kinds(run: Run) -> dict[str, RowKey]:
    """Return by its name each kind of requested links: one of the links that differ only in ranks or agents."""
    return {f"{link.backend}-{link.op}-{link.memory}": link for link in run.links}


def compare(kind: RowKey, run: Run, cluster: Cluster, profile: Profile) -> tuple[Judgement, tuple[RawRatio, ...]]:
    """Measure rows of this run with a raw tool, and add the cause to rows that failed.

    If the tool fails, nothing is known about NIXL: WARN, or UNKNOWN if a row failed or has a bound.

    :raises NixlPluginError: if a rank does not answer.
    """
    if BACKENDS[kind.backend].STORAGE:
        return _not_applicable(f"{kind.backend} moves bytes to files, not between two ranks"), ()
    rows = _measured(kind, run)
    if not rows:
        return _not_applicable(
            f"no row of {kind.backend} {kind.op} {kind.memory} with batch 1 and --nixl-footprint=row was measured"
        ), ()
    tool = RAW_TOOLS[kind.backend]
    comparisons: list[RawComparison] = []
    fault: Judgement | None = None
    for ranks, chosen in _chosen(rows, profile).items():
        hosts = cluster.hosts[ranks[0]], cluster.hosts[ranks[1]]
        limits = run.settings.timeout, run.settings.start_timeout
        address = str(cluster.ask("address")[ranks[1]]) if cluster.several else "127.0.0.1"
        with RawPair(tool, hosts, address, *limits) as pair:
            if pair.missing:
                return _not_applicable(f"{pair.missing} was not found: {TOOLS[tool.name]}"), ()
            if obstacle := pair.cannot(kind.memory):
                return _not_applicable(obstacle), ()
            try:
                comparisons += [_beside(pair, key, result, profile) for key, result in chosen.items()]
            except ToolError as error:
                required = any(_wanted(key, result, profile) for key, result in chosen.items())
                verdict = Verdict.UNKNOWN if required else Verdict.WARN
                fault = Judgement(
                    verdict, f"no raw figure to compare with: {error.reason}", f"{error.remedy}\n{error.detail}"
                )
                break
    for comparison in comparisons:
        if comparison.failed:
            run.found.explain(comparison.key, judge_ratio(comparison).reason.partition(": ")[2])
    judgement = judge_raw(comparisons) if comparisons else fault
    assert judgement is not None
    if fault is not None and judgement.verdict is not Verdict.FAIL:
        judgement = fault
    return judgement, tuple(comparison.ratio for comparison in comparisons)


def _beside(pair: RawPair, key: RowKey, result: Result, profile: Profile) -> RawComparison:
    """Measure one row with the raw tool."""
    summary = result.summary
    assert summary is not None
    raw = pair.measure(key, summary.bandwidth, summary.transports)
    ratio = RawRatio(key, summary.bandwidth, raw, same_way(summary.transports, raw.transports))
    return RawComparison(key, ratio, profile.expectation(key), _failed(result))


def _wanted(key: RowKey, result: Result, profile: Profile) -> bool:
    """Whether a row failed, or the profile has a bound for its share of the raw figure."""
    expectation = profile.expectation(key)
    return _failed(result) or (expectation is not None and expectation.raw is not None)


def _measured(kind: RowKey, run: Run) -> dict[RowKey, Result]:
    """Return the rows of a kind that a raw tool can repeat: rows of batch 1 with the largest depth."""
    rows = {}
    for key, result in measured_rows(run.found.results):
        if result.verdict in NO_BANDWIDTH or key.batch != 1 or key.kv or key.pattern or key.walks:
            continue
        if (key.backend, key.op, key.memory) == (kind.backend, kind.op, kind.memory):
            rows[key] = result
    depth = max((key.depth for key in rows), default=1)
    return {key: result for key, result in rows.items() if key.depth == depth}


def _chosen(rows: Mapping[RowKey, Result], profile: Profile) -> dict[tuple[int, int], dict[RowKey, Result]]:
    """Return a few rows of a few pairs.

    For the first pair: the smallest, a middle and the largest block, and the largest one that failed or has a bound in
    the profile. For other pairs: the largest block that failed.
    """
    pairs: dict[tuple[int, int], list[RowKey]] = {}
    for key in sorted(rows, key=lambda key: key.block):
        pairs.setdefault(key.pair, []).append(key)
    first, *further = sorted(pairs)
    chosen = {first: few(pairs[first], lambda key: _wanted(key, rows[key], profile))}
    for pair in further:
        if len(chosen) < MOST_PAIRS and (bad := [key for key in pairs[pair] if _failed(rows[key])]):
            chosen[pair] = bad[-1:]
    return {pair: {key: rows[key] for key in keys} for pair, keys in chosen.items()}


def few(keys: Sequence[RowKey], must: Callable[[RowKey], bool]) -> list[RowKey]:
    """Return the first, a middle and the last key, and the last key for which ``must`` is true."""
    chosen = {keys[0], keys[len(keys) // 2], keys[-1], *[key for key in keys if must(key)][-1:]}
    return [key for key in keys if key in chosen]


def _failed(result: Result) -> bool:
    """Whether a row is below its floor. Latency bounds do not count."""
    summary = result.summary
    return result.verdict is Verdict.FAIL and summary is not None and summary.bandwidth < summary.floor


def _not_applicable(reason: str) -> Judgement:
    return Judgement(Verdict.NOT_APPLICABLE, reason)
