# SPDX-License-Identifier: Apache-2.0
"""Find out how many ranks a run has and which rank this process is: from options, else from the launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from pytest_nixl.cluster.launchers import LauncherPlacement, find_placement
from pytest_nixl.model.settings import Settings

DEFAULT_GROUP = "default"


@dataclass(frozen=True)
class Placement:
    """The number of ranks in a run, and the rank of this process.

    :param ranks: the number of ranks, 1 or more.
    :param rank: the rank of this process, from 0; None if the order of arrival decides it.
    :param group: the name of the group in which the ranks meet.
    :param source: the option or the launcher variable that these values come from, for messages.
    :param by_launcher: what the launcher says; None if no launcher is known.
    :param pairs: initiator and target rank of each pair that is measured.
    """

    ranks: int
    rank: int | None
    group: str
    source: str
    by_launcher: LauncherPlacement | None
    pairs: tuple[tuple[int, int], ...]

    @property
    def several(self) -> bool:
        """Whether the run has more than one rank."""
        return self.ranks > 1

    def __str__(self) -> str:
        place = f"rank {self.rank} of {self.ranks}" if self.rank is not None else f"one of {self.ranks} ranks"
        return f"{place} in group {self.group} ({self.source})"


#: A run of one rank.
ALONE = Placement(1, None, DEFAULT_GROUP, "the default", None, ((0, 1),))


def ask(settings: Settings, environ: Mapping[str, str] = os.environ) -> Placement:
    """Return how many ranks the run has, and which rank this process is.

    :param environ: the environment, from which the launcher's variables are read.
    :raises pytest.UsageError: if options and launcher contradict each other, or if the launcher's variables are not
        valid and no option replaces them.
    """
    try:
        launched = find_placement(environ)
    except ValueError as error:
        if settings.ranks is None:
            raise pytest.UsageError(f"{error}; or give --nixl-ranks N and --nixl-rank R") from None
        launched = None
    ranks, rank, source = _ranks(settings, launched)
    if ranks == 1 and settings.ranks is None and launched is not None and launched.ranks is None:
        source = (
            f"{launched.launcher} sets {launched.variable} but not the number of ranks, and --nixl-ranks is not given"
        )
    try:
        pairs = settings.pairs.of(ranks)
    except ValueError as error:
        raise pytest.UsageError(f"--nixl-pairs={settings.pairs}: {error}") from None
    if settings.pattern is not None:
        try:
            settings.pattern.ranks_of(ranks)
        except ValueError as error:
            raise pytest.UsageError(f"--nixl-pattern={settings.pattern}: {error}") from None
    group = settings.group or (launched.group if launched is not None else "") or DEFAULT_GROUP
    return Placement(ranks, rank, group, source, launched, pairs)


def _ranks(settings: Settings, launched: LauncherPlacement | None) -> tuple[int, int | None, str]:
    if settings.ranks is None:
        if launched is None or not launched.ranks:
            return 1, None, "no launcher sets a number of ranks"
        return launched.ranks, launched.rank, f"{launched.launcher}: {launched.variable}"
    if settings.rank is not None or launched is None or settings.ranks == 1:
        return settings.ranks, settings.rank, "--nixl-ranks"
    if launched.ranks not in (None, settings.ranks):
        raise pytest.UsageError(
            f"--nixl-ranks={settings.ranks}, but {launched.launcher} started {launched.ranks} ranks: remove "
            "--nixl-ranks, or also give --nixl-rank R"
        )
    if launched.rank >= settings.ranks:
        raise pytest.UsageError(
            f"{launched.variable} says that this is rank {launched.rank}, but --nixl-ranks={settings.ranks} allows "
            f"ranks 0 to {settings.ranks - 1}: set --nixl-ranks to the number of processes that are started"
        )
    return settings.ranks, launched.rank, f"--nixl-ranks and {launched.launcher}: {launched.variable}"
