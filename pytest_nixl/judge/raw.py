# SPDX-License-Identifier: Apache-2.0
"""Is the fabric slow, or NIXL? A row beside what a raw tool moves over the same path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_nixl.judge.row import describe, percentage, rate
from pytest_nixl.model.expectation import Expectation
from pytest_nixl.model.raw_comparison import RawRatio
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.samples import DISTURBED_CORES
from pytest_nixl.model.verdicts import Judgement, Verdict

#: Below this share of a raw figure that is itself below the floor, NIXL is slow as well.
BOTH = 0.5

_FABRIC = (
    "Leave NIXL aside, and find out with the raw tool alone what holds the path up: the link's rate and errors "
    "(ethtool DEVICE, ethtool -S DEVICE, rdma link), its MTU, a shaper (tc qdisc show dev DEVICE), what else uses it; "
    "then run this again."
)
_NIXL = (
    "Leave the network alone, and compare how the two run: the transports and devices of both (UCX_PROTO_INFO=y), the "
    "versions of UCX, the agent's own environment, the cores of its container (cpu.max), --nixl-depth and --nixl-batch."
)
_OTHERWISE = (
    "Have both take the same way: name it in the environment of every rank (UCX_TLS, UCX_NET_DEVICES; FI_PROVIDER), "
    "and run this again."
)
_DISTURBED = "Stop what else runs on the machine and run this again."


@dataclass(frozen=True)
class RawComparison:
    """A row that was measured, its raw figure, and what the profile expects of it.

    :param failed: whether the row is below its floor.
    """

    key: RowKey
    ratio: RawRatio
    expectation: Expectation | None
    failed: bool = False

    @property
    def bound(self) -> float | None:
        """The share of the raw figure that the profile wants; None: it says nothing."""
        return self.expectation.raw if self.expectation is not None else None


def judge_raw(beside: Sequence[RawComparison]) -> Judgement:
    """Judge one kind of link by its rows: the worst of them, with what is said of each in the reason."""
    each = [judge_ratio(one) for one in beside]
    order = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.INCONCLUSIVE, Verdict.PASS, Verdict.NOT_APPLICABLE)
    worst = min((one.verdict for one in each), key=order.index)
    said = [one for one in each if one.verdict is worst]
    return Judgement(worst, "; ".join(dict.fromkeys(one.reason for one in said)), said[0].remedy)


def judge_ratio(one: RawComparison) -> Judgement:
    """Judge one row.

    Where both did not go the same way, the ratio says nothing: UNKNOWN for a row that failed or has a bound, else
    NOT-APPLICABLE. A row that failed is FAIL, with which of both is slow. A bound that is not met is FAIL. Where others
    took cores that the raw tool needs, neither is decided: INCONCLUSIVE. All else is PASS.
    """
    row, raw = describe(one.key), one.ratio.raw
    wanted = one.failed or one.bound is not None
    if not one.ratio.comparable:
        over = " and ".join(raw.transports) or "a transport that it does not tell"
        reason = f"{row}: {raw.words} went over {over}, and NIXL did not: the ratio says nothing"
        return Judgement(Verdict.UNKNOWN if wanted else Verdict.NOT_APPLICABLE, reason, _OTHERWISE if wanted else "")
    nixl, theirs = rate(one.ratio.nixl), rate(raw.value)
    figures = f"{raw.words} moves {theirs} over the same path ({'+'.join(raw.transports)})"
    if wanted and raw.others > DISTURBED_CORES:
        reason = f"{row}: NIXL moves {nixl} and {figures}, but others took {raw.others:.1f} of the cores that it needs"
        return Judgement(Verdict.INCONCLUSIVE, reason, _DISTURBED)
    share = percentage(one.ratio.nixl, raw.value)
    floor = one.expectation.floor if one.expectation is not None else None
    if one.failed and floor is not None and raw.value < floor:
        both = f", and NIXL moves only {share} of that" if one.ratio.value < BOTH else f", and NIXL moves {share} of it"
        reason = f"{row}: the fabric is slow: {figures}, which is below the floor of {rate(floor)} too{both}"
        return Judgement(Verdict.FAIL, reason, _FABRIC)
    if one.failed:
        reason = f"{row}: NIXL is slow: it moves {nixl}, {share} of what the fabric carries: {figures}"
        return Judgement(Verdict.FAIL, reason, _NIXL)
    if one.bound is not None and one.ratio.value < one.bound:
        reason = f"{row}: NIXL is slow: it moves {nixl}, {share} of the raw figure, and the profile wants "
        return Judgement(Verdict.FAIL, f"{reason}{100 * one.bound:g} %: {figures}", _NIXL)
    return Judgement(Verdict.PASS, f"{row}: NIXL moves {nixl}, {share} of the raw figure: {figures}")


def same_way(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Whether two lists of transports (``tcp/eth0``) name the same way: the same kinds, and a device of both."""
    if not ours or not theirs:
        return False
    kinds = [{name.partition("/")[0] for name in names} for names in (ours, theirs)]
    devices = [{name.partition("/")[2] for name in names} - {""} for names in (ours, theirs)]
    return kinds[0] == kinds[1] and (not all(devices) or bool(devices[0] & devices[1]))
