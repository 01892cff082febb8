# SPDX-License-Identifier: Apache-2.0
"""Orders by chance, for programs that do not do the same twice: another project's client decides by its own clock when
it connects again after a lost answer, so that no order of it can be repeated up to a point and then be changed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_nixl.checks.rank_race.events import RequestEvent


class RandomScheduler:
    """Chooses what moves next by chance; the one fault of a run happens at each depth in turn.

    :param seed: of the chance.
    """

    #: There is always one more.
    more = True

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._fault_at = self._deepest = 0

    def choose(self, depth: int, enabled: Sequence[RequestEvent], replaced: Mapping[int, int]) -> RequestEvent:
        """Return what moves next: a fault from its depth on, where one is left to a run."""
        self._deepest = max(self._deepest, depth)
        faults = [event for event in enabled if event.fault]
        if faults and depth >= self._fault_at:
            return self._random.choice(faults)
        return self._random.choice([event for event in enabled if not event.fault])

    def advance(self) -> None:
        """Go on to the next order."""
        self._fault_at = self._fault_at + 1 if self._fault_at < self._deepest else 0
