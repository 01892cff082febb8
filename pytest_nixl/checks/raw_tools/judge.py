# SPDX-License-Identifier: Apache-2.0
"""Decide whether the fabric or NIXL is slow: compare a row with the bandwidth of a raw tool over the same transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_nixl.judge.row import percentage, rate
from pytest_nixl.model.expectation import Expectation
from pytest_nixl.model.results import RawRatio
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import DISTURBED_CORES
from pytest_nixl.model.verdicts import Judgement, Verdict, most_severe

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


def judge_raw(beside: Sequence[RawComparison]) -> Judgement:
    """Judge one kind of link: the worst verdict of its rows, with the reasons of all rows that have it."""
    judgements = [judge_ratio(comparison) for comparison in beside]
    worst = most_severe(judgements)
    reasons = dict.fromkeys(comparison.reason for comparison in judgements if comparison.verdict is worst.verdict)
    return replace(worst, reason="; ".join(reasons))


def judge_ratio(one: RawComparison) -> Judgement:
    """Judge one row by the ratio of its bandwidth to the raw tool's.

    The verdict is UNKNOWN if the two used different transports and the row failed or has a bound; it is NOT-APPLICABLE
    if they did and the row neither failed nor has a bound. It is INCONCLUSIVE if other processes used the raw tool's
    cores. It is FAIL if the row failed, and the reason says which of the two is slow, or if the bound is not met. In
    all other cases it is PASS.
    """
    row, raw = one.key.words, one.ratio.raw
    required = one.failed or one.bound is not None
    if not one.ratio.comparable:
        over = " and ".join(raw.transports) or "a transport that it does not report"
        reason = f"{row}: {raw.words} used {over} and NIXL did not, so the two cannot be compared"
        return Judgement(
            Verdict.UNKNOWN if required else Verdict.NOT_APPLICABLE, reason, _OTHERWISE if required else ""
        )
    nixl, theirs = rate(one.ratio.nixl), rate(raw.value)
    figures = f"{raw.words} moves {theirs} over the same transport ({'+'.join(raw.transports)})"
    if required and raw.others > DISTURBED_CORES:
        reason = (
            f"{row}: NIXL moves {nixl} and {figures}, but other processes used {raw.others:.1f} of the raw tool's cores"
        )
        return Judgement(Verdict.INCONCLUSIVE, reason, _DISTURBED)
    share = percentage(one.ratio.nixl, raw.value)
    floor = one.expectation.floor if one.expectation is not None else None
    if one.failed and floor is not None and raw.value < floor:
        both = f", and NIXL moves only {share} of that" if one.ratio.value < BOTH else f", and NIXL moves {share} of it"
        reason = f"{row}: the fabric is slow: {figures}, which is also below the floor of {rate(floor)}{both}"
        return Judgement(Verdict.FAIL, reason, _FABRIC)
    if one.failed:
        reason = f"{row}: NIXL is slow: it moves {nixl}, {share} of what the fabric carries: {figures}"
        return Judgement(Verdict.FAIL, reason, _NIXL)
    if one.bound is not None and one.ratio.value < one.bound:
        reason = f"{row}: NIXL is slow: it moves {nixl}, {share} of the raw tool, and the profile requires "
        return Judgement(Verdict.FAIL, f"{reason}{100 * one.bound:g} %: {figures}", _NIXL)
    return Judgement(Verdict.PASS, f"{row}: NIXL moves {nixl}, {share} of the raw tool: {figures}")


def same_way(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Whether two lists of transports (``tcp/eth0``) have the same names and, if both name devices, a common device."""
    kinds = [{name.partition("/")[0] for name in names} for names in (ours, theirs)]
    devices = [{name.partition("/")[2] for name in names} - {""} for names in (ours, theirs)]
    return bool(ours) and kinds[0] == kinds[1] and (not all(devices) or bool(devices[0] & devices[1]))
