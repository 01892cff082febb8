# SPDX-License-Identifier: Apache-2.0
"""How many ranks a run has and which of them this process is: by options, else by its launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from pytest_nixl.cluster.launchers import LauncherPlacement, find_placement
from pytest_nixl.model.rank_pairs import RankPair
from pytest_nixl.model.settings import Settings

DEFAULT_GROUP = "default"


@dataclass(frozen=True)
class Placement:
    """The ranks of a run.

    :param ranks: how many.
    :param rank: this process's; None: their order of coming decides.
    :param group: the name by which they meet.
    :param source: who says so, in words.
    :param placement: what the launcher says; None: there is none.
    :param pairs: initiator and target of each pair that is measured.
    """

    ranks: int
    rank: int | None
    group: str
    source: str
    placement: LauncherPlacement | None
    pairs: tuple[RankPair, ...]

    @property
    def several(self) -> bool:
        """Whether this process is one of several."""
        return self.ranks > 1

    def __str__(self) -> str:
        which = f"rank {self.rank} of {self.ranks}" if self.rank is not None else f"one of {self.ranks} ranks"
        return f"{which} in group {self.group} ({self.source})"


#: A run that nobody asked to be one of several.
ALONE = Placement(1, None, DEFAULT_GROUP, "nobody asks for more", None, ((0, 1),))


def ask(settings: Settings, environ: Mapping[str, str] = os.environ) -> Placement:
    """Return how many ranks there are, and which one this is.

    :raises pytest.UsageError: where options and launcher contradict each other, or are not enough.
    """
    try:
        placement = find_placement(environ)
    except ValueError as error:
        if settings.ranks is None:
            raise pytest.UsageError(f"{error}; or give --nixl-ranks and --nixl-rank") from None
        placement = None
    ranks, rank, source = _ranks(settings, placement)
    if ranks == 1 and settings.ranks is None and placement is not None and placement.ranks is None:
        source = f"{placement.variable} of {placement.launcher} says no number of ranks, and --nixl-ranks is not given"
    try:
        pairs = settings.pairs.of(ranks)
    except ValueError as error:
        raise pytest.UsageError(f"--nixl-pairs={settings.pairs}: {error}") from None
    group = settings.group or (placement.group if placement is not None else "") or DEFAULT_GROUP
    return Placement(ranks, rank, group, source, placement, pairs)


def _ranks(settings: Settings, placement: LauncherPlacement | None) -> tuple[int, int | None, str]:
    if settings.ranks is None:
        if placement is None or not placement.ranks:
            return 1, None, "no launcher names more"
        return placement.ranks, placement.rank, f"{placement.launcher}: {placement.variable}"
    if settings.rank is not None or placement is None or settings.ranks == 1:
        return settings.ranks, settings.rank, "--nixl-ranks"
    if placement.ranks not in (None, settings.ranks):
        raise pytest.UsageError(
            f"--nixl-ranks={settings.ranks}, and {placement.launcher} has started {placement.ranks}: leave the option "
            "out, or give --nixl-rank R beside it"
        )
    if placement.rank >= settings.ranks:
        raise pytest.UsageError(
            f"{placement.variable} says rank {placement.rank}, which is not below --nixl-ranks={settings.ranks}: "
            "expected as many as are started"
        )
    return settings.ranks, placement.rank, f"--nixl-ranks, and {placement.launcher}: {placement.variable}"
