# SPDX-License-Identifier: Apache-2.0
"""Does each rank of this run, from its own host, get a rank of its own?"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import pytest

from pytest_nixl import Cluster, Judgement, Settings, Verdict

ROUNDS = 3


@pytest.mark.nixl_check("ranks-of-this-run", own=True)
def test_the_ranks_of_this_run_get_a_rank_each(
    nixl_cluster: Cluster, nixl_settings: Settings, verdict: Callable[[Judgement], None]
) -> None:
    """All ranks of the run claim a rank of a new group at the same time, and get the ranks 0 to n-1, each once."""
    if not nixl_cluster.several:
        verdict(Judgement(Verdict.NOT_APPLICABLE, "this run has one rank"))
        return
    size, names = nixl_cluster.ranks, nixl_cluster.names
    for _ in range(ROUNDS):
        group = secrets.token_hex(8)
        ranks: list[int] = nixl_cluster.ask("claim", group=group, size=size, seconds=nixl_settings.timeout / 2)
        if sorted(ranks) != list(range(size)):
            pairs = ", ".join(f"{name} got {rank}" for name, rank in zip(names, ranks, strict=True))
            remedy = "report this output: it shows a defect of pytest-nixl's membership"
            verdict(Judgement(Verdict.FAIL, f"{size} simultaneous claims did not give each rank once: {pairs}", remedy))
            return
    verdict(Judgement(Verdict.PASS, f"{size} ranks claimed at once, {ROUNDS} times, and each rank was given once"))
