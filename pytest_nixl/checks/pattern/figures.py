# SPDX-License-Identifier: Apache-2.0
"""The figures of a traffic pattern, which a profile may bound: bandwidth, least share and Jain's index."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytest_nixl.checks.pattern.fairness import BUSY, corrupt_flow
from pytest_nixl.checks.pattern.samples import TOGETHER, PatternSamples, jain
from pytest_nixl.model.figure import Figure
from pytest_nixl.model.samples import DISTURBED_CORES
from pytest_nixl.model.verdicts import Judgement, Verdict


def pattern_figures(samples: PatternSamples) -> list[Figure]:
    """Return the bandwidth of all flows together in bytes per second, the least share, and Jain's index.

    A share is the bandwidth of a flow beside all others divided by its bandwidth without them.
    """
    kind = samples.kind
    labels = {"backend": kind.backend, "op": kind.op, "memory": kind.memory, "pattern": kind.pattern_text}
    values = {
        "pattern-bandwidth": samples.total,
        "pattern-share": min(each.ratio for each in samples.flows),
        "pattern-jain": jain(list(samples.rates(TOGETHER).values())),
    }
    return [Figure.of(name, value, labels) for name, value in values.items()]


def judge_pattern_figures(samples: PatternSamples, record: Callable[[Sequence[Figure]], Judgement]) -> Judgement:
    """Judge the figures of a pattern by a profile's bounds.

    CORRUPT if a byte is wrong: nothing is recorded then. INCONCLUSIVE in place of FAIL if other processes used more
    than :data:`DISTURBED_CORES`.

    :param record: writes figures to the report, and returns their verdict by the bounds.
    """
    if (corrupt := corrupt_flow(samples)) is not None:
        return corrupt
    judged = record(pattern_figures(samples))
    if judged.verdict is not Verdict.FAIL or samples.disturbed <= DISTURBED_CORES:
        return judged
    return Judgement(
        Verdict.INCONCLUSIVE,
        f"{judged.reason}, but other processes used up to {samples.disturbed:.1f} of the cores that the ranks need",
        BUSY,
    )
