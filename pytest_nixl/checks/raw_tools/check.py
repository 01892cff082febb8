# SPDX-License-Identifier: Apache-2.0
"""The check ``nixl-to-raw``: measure some rows again with a raw tool, and decide whether the fabric or NIXL is slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_nixl.checks.raw_tools.tools import RAW_TOOLS, RawPair
from pytest_nixl.judge.profiles import Profile
from pytest_nixl.judge.row import percentage, rate
from pytest_nixl.model.expectation import Expectation
from pytest_nixl.model.results import RawRatio, Result, measured_rows
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import DISTURBED_CORES
from pytest_nixl.model.tools import TOOLS
from pytest_nixl.model.verdicts import NO_BANDWIDTH, Judgement, Verdict, most_severe
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.processes.external_program import ToolError
from pytest_nixl.session.cluster import Cluster
from pytest_nixl.session.run import Run

#: Maximum number of rank pairs that are measured.
MOST_PAIRS = 4
#: If the raw tool is below the floor, and NIXL is below this share of the raw tool, NIXL is slow as well.
BOTH = 0.5

_FABRIC = (
    "Search for the fault with the raw tool alone, without NIXL: check the rate and errors of the interface (ethtool "
    "DEVICE, ethtool -S DEVICE, rdma link), its MTU, a shaper (tc qdisc show dev DEVICE), and other traffic; then run "
    "this again."
)
_NIXL = (
    "The network is not the cause. Compare how NIXL and the raw tool run: their transports and devices "
    "(UCX_PROTO_INFO=y), their versions of UCX, the agent's environment, the cores of its container (cpu.max), "
    "--nixl-depth and --nixl-batch."
)
_OTHERWISE = (
    "Make both use the same transport: set it in the environment of every rank (UCX_TLS, UCX_NET_DEVICES; "
    "FI_PROVIDER), and run this again."
)
_DISTURBED = "Stop other processes on the machine and run this again."


@dataclass(frozen=True)
class RawComparison:
    """A measured row together with the bandwidth of a raw tool.

    :param ratio: the two bandwidths.
    :param expectation: what the profile expects of the row; None: nothing.
    :param failed: whether the row is below its floor.
    """

    key: RowKey
    ratio: RawRatio
    expectation: Expectation | None
    failed: bool = False

    @property
    def bound(self) -> float | None:
        """The least share of the raw tool's bandwidth by the profile; None: the profile gives none."""
        return self.expectation.raw if self.expectation is not None else None


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
                comparisons += [_compare(pair, key, result, profile) for key, result in chosen.items()]
            except ToolError as error:
                required = any(_needs_comparison(key, result, profile) for key, result in chosen.items())
                verdict = Verdict.UNKNOWN if required else Verdict.WARN
                fault = Judgement(
                    verdict, f"no raw figure to compare with: {error.reason}", f"{error.remedy}\n{error.detail}"
                )
                break
    for comparison in comparisons:
        if comparison.failed:
            run.record.explain(comparison.key, judge_ratio(comparison).reason.partition(": ")[2])
    judgement = judge_raw(comparisons) if comparisons else fault
    assert judgement is not None
    if fault is not None and judgement.verdict is not Verdict.FAIL:
        judgement = fault
    return judgement, tuple(comparison.ratio for comparison in comparisons)


def _compare(pair: RawPair, key: RowKey, result: Result, profile: Profile) -> RawComparison:
    """Measure one row with the raw tool."""
    summary = result.summary
    assert summary is not None
    raw = pair.measure(key, summary.bandwidth, summary.transports)
    ratio = RawRatio(key, summary.bandwidth, raw, same_way(summary.transports, raw.transports))
    return RawComparison(key, ratio, profile.expectation(key), _failed(result))


def _needs_comparison(key: RowKey, result: Result, profile: Profile) -> bool:
    """Whether a row failed, or the profile has a bound for its share of the raw figure."""
    expectation = profile.expectation(key)
    return _failed(result) or (expectation is not None and expectation.raw is not None)


def _measured(kind: RowKey, run: Run) -> dict[RowKey, Result]:
    """Return the rows of a kind that a raw tool can repeat: rows of batch 1 with the largest depth."""
    rows = {}
    for key, result in measured_rows(run.record.results):
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
    chosen = {first: few(pairs[first], lambda key: _needs_comparison(key, rows[key], profile))}
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


def judge_raw(comparisons: Sequence[RawComparison]) -> Judgement:
    """Judge one kind of link: the worst verdict of its rows, with the reasons of all rows that have it."""
    judgements = [judge_ratio(comparison) for comparison in comparisons]
    worst = most_severe(judgements)
    reasons = dict.fromkeys(comparison.reason for comparison in judgements if comparison.verdict is worst.verdict)
    return replace(worst, reason="; ".join(reasons))


def judge_ratio(comparison: RawComparison) -> Judgement:
    """Judge one row by the ratio of its bandwidth to the raw tool's.

    The verdict is UNKNOWN if the two used different transports and the row failed or has a bound; it is NOT-APPLICABLE
    if they did and the row neither failed nor has a bound. It is INCONCLUSIVE if other processes used the raw tool's
    cores. It is FAIL if the row failed, and the reason says which of the two is slow, or if the bound is not met. In
    all other cases it is PASS.
    """
    row, raw = comparison.key.words, comparison.ratio.raw
    required = comparison.failed or comparison.bound is not None
    if not comparison.ratio.comparable:
        over = " and ".join(raw.transports) or "a transport that it does not report"
        reason = f"{row}: {raw.words} used {over} and NIXL did not, so the two cannot be compared"
        return Judgement(
            Verdict.UNKNOWN if required else Verdict.NOT_APPLICABLE, reason, _OTHERWISE if required else ""
        )
    nixl, theirs = rate(comparison.ratio.nixl), rate(raw.value)
    figures = f"{raw.words} moves {theirs} over the same transport ({'+'.join(raw.transports)})"
    if required and raw.others > DISTURBED_CORES:
        reason = (
            f"{row}: NIXL moves {nixl} and {figures}, but other processes used {raw.others:.1f} of the raw tool's cores"
        )
        return Judgement(Verdict.INCONCLUSIVE, reason, _DISTURBED)
    share = percentage(comparison.ratio.nixl, raw.value)
    floor = comparison.expectation.floor if comparison.expectation is not None else None
    if comparison.failed and floor is not None and raw.value < floor:
        both = (
            f", and NIXL moves only {share} of that"
            if comparison.ratio.value < BOTH
            else f", and NIXL moves {share} of it"
        )
        reason = f"{row}: the fabric is slow: {figures}, which is also below the floor of {rate(floor)}{both}"
        return Judgement(Verdict.FAIL, reason, _FABRIC)
    if comparison.failed:
        reason = f"{row}: NIXL is slow: it moves {nixl}, {share} of what the fabric carries: {figures}"
        return Judgement(Verdict.FAIL, reason, _NIXL)
    if comparison.bound is not None and comparison.ratio.value < comparison.bound:
        reason = f"{row}: NIXL is slow: it moves {nixl}, {share} of the raw tool, and the profile requires "
        return Judgement(Verdict.FAIL, f"{reason}{100 * comparison.bound:g} %: {figures}", _NIXL)
    return Judgement(Verdict.PASS, f"{row}: NIXL moves {nixl}, {share} of the raw tool: {figures}")


def same_way(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Whether two lists of transports (``tcp/eth0``) have the same names and, if both name devices, a common device."""
    kinds = [{name.partition("/")[0] for name in names} for names in (ours, theirs)]
    devices = [{name.partition("/")[2] for name in names} - {""} for names in (ours, theirs)]
    return bool(ours) and kinds[0] == kinds[1] and (not all(devices) or bool(devices[0] & devices[1]))
