# SPDX-License-Identifier: Apache-2.0
"""How many ranks a run has and which one this process is: options against the variables of launchers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pytest_nixl.cluster.placement import ALONE, placement_of_run
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.traffic_pattern import PatternChoice, RankPairing

MakeSettings = Callable[..., Settings]
MPI = {"PMI_RANK": "2", "PMI_SIZE": "3", "PMI_JOBID": "job 7"}
JOB = {"JOB_COMPLETION_INDEX": "1"}


@pytest.mark.parametrize(
    ("options", "environ", "message"),
    [
        ({}, {}, "one of 1 ranks in group default (no launcher sets a number of ranks)"),
        ({}, MPI, "rank 2 of 3 in group job-7 (PMI: PMI_RANK)"),
        ({"group": "mine"}, MPI, "rank 2 of 3 in group mine (PMI: PMI_RANK)"),
        ({}, JOB, "one of 1 ranks in group default (an Indexed Job of Kubernetes sets JOB_COMPLETION_INDEX but not the "
         "number of ranks, and --nixl-ranks is not given)"),
        ({"ranks": 2}, JOB, "rank 1 of 2 in group default (--nixl-ranks and an Indexed Job of Kubernetes: "
         "JOB_COMPLETION_INDEX)"),
        ({"ranks": 3}, MPI, "rank 2 of 3 in group job-7 (--nixl-ranks and PMI: PMI_RANK)"),
        ({"ranks": 4, "rank": 0}, MPI, "rank 0 of 4 in group job-7 (--nixl-ranks)"),
        ({"ranks": 2}, {}, "one of 2 ranks in group default (--nixl-ranks)"),
        ({"ranks": 2, "rank": 1}, {}, "rank 1 of 2 in group default (--nixl-ranks)"),
        # A run of one rank is not a part of what the launcher started.
        ({"ranks": 1}, MPI, "one of 1 ranks in group job-7 (--nixl-ranks)"),
        ({"ranks": 1}, {"PMI_RANK": "one"}, "one of 1 ranks in group default (--nixl-ranks)"),
    ],
)  # fmt: skip
def test_options_come_before_the_variables_of_a_launcher(
    make_settings: MakeSettings, options: dict[str, Any], environ: dict[str, str], message: str
) -> None:
    placement = placement_of_run(make_settings(**options), environ)
    assert str(placement) == message
    assert placement.several is (placement.ranks > 1)
    assert placement.pairs == (
        ((0, 1),) if placement.ranks < 3 else tuple((i, (i + 1) % placement.ranks) for i in range(placement.ranks))
    )


def test_a_run_without_options_and_launcher_has_one_rank(make_settings: MakeSettings) -> None:
    assert replace(placement_of_run(make_settings(), {}), source=ALONE.source) == ALONE


@pytest.mark.parametrize(
    ("options", "environ", "fault"),
    [
        ({}, {"PMI_RANK": "one"}, r"^PMI_RANK='one' is not .*; or give --nixl-ranks N and --nixl-rank R$"),
        ({}, {**MPI, "PMI_RANK": "3"}, r"^PMI_RANK=3 is not below PMI_SIZE=3: .*; or give --nixl-ranks N and"),
        ({"ranks": 2}, MPI, r"^--nixl-ranks=2, but PMI started 3 ranks: remove --nixl-ranks, or also give"),
        ({"ranks": 4}, MPI, r"^--nixl-ranks=4, but PMI started 3 ranks"),
        ({"ranks": 2}, {"JOB_COMPLETION_INDEX": "2"},
         r"^JOB_COMPLETION_INDEX says that this is rank 2, but --nixl-ranks=2 allows ranks 0 to 1: set --nixl-ranks"),
        ({"pairs": RankPairing.parse("0:3")}, MPI,
         r"^--nixl-pairs=0:3: 0:3 names a rank that is not in the range 0 to 2$"),
        ({"pattern": PatternChoice.parse("incast:4")}, MPI, r"^--nixl-pattern=incast:4: it has 4 ranks, but the run"),
    ],
)  # fmt: skip
def test_what_contradicts_the_launcher_is_refused(
    make_settings: MakeSettings, options: dict[str, Any], environ: dict[str, str], fault: str
) -> None:
    with pytest.raises(pytest.UsageError, match=fault):
        placement_of_run(make_settings(**options), environ)
