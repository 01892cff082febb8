# SPDX-License-Identifier: Apache-2.0
"""Random orders, for programs that do not repeat themselves.

Another project's client decides by its own clock when it reconnects after a lost answer. So an order cannot be repeated
up to some point and then changed, as systematic exploration needs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_nixl.checks.rank_race.events import RequestEvent


class RandomScheduler:
    """Chooses the next event at random. From run to run, the single fault of a run happens one step later.

    :param seed: seed of the random generator.
    """

    #: There is always another order.
    more = True

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._fault_at = self._deepest = 0

    def choose(self, depth: int, enabled: Sequence[RequestEvent], replaced: Mapping[int, int]) -> RequestEvent:
        """Return the next event: from the depth of the fault on, a fault if the run has had none."""
        self._deepest = max(self._deepest, depth)
        faults = [event for event in enabled if event.fault]
        if faults and depth >= self._fault_at:
            return self._random.choice(faults)
        return self._random.choice([event for event in enabled if not event.fault])

    def advance(self) -> None:
        """Prepare the next order."""
        self._fault_at = self._fault_at + 1 if self._fault_at < self._deepest else 0
