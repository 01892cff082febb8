# SPDX-License-Identifier: Apache-2.0
"""Two images measured in turn on the same nodes: what drifts meanwhile befalls both alike."""

from __future__ import annotations

from collections.abc import Callable

from pytest_nixl.measure.link import Link
from pytest_nixl.model.samples import Samples


def alternate(
    one: Link, other: Link, block: int, *, batch: int, depth: int, another: Callable[[Samples, Samples], bool]
) -> tuple[Samples, Samples]:
    """Measure one row over two links in the order ABBA ABBA ..., each time in new workers.

    :param another: whether one more launch of each is wanted, by what both measured so far.
    :returns: the samples of ``one`` and of ``other``, with as many launches each.
    """
    found: dict[Link, Samples] = {}
    turns = (one, other)
    while True:
        for link in turns:
            if link in found:
                link.relaunch()
            samples = link.measure(block, batch=batch, depth=depth)
            found[link] = found[link].with_launch(samples) if link in found else samples
        turns = turns[::-1]
        if not another(found[one], found[other]):
            return found[one], found[other]
