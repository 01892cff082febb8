# SPDX-License-Identifier: Apache-2.0
"""Measure two images in turn on the same nodes, so that drift affects both equally."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pytest_nixl.measure.link import Link
from pytest_nixl.model.samples import Samples

#: What one launch, or several, measured.
Measured = TypeVar("Measured")


def alternate(
    first: Link, second: Link, block: int, *, batch: int, depth: int, needs_another: Callable[[Samples, Samples], bool]
) -> tuple[Samples, Samples]:
    """Measure one row over two links in the order ABBA ABBA …, each launch in new workers.

    :param block: the size of one block in bytes.
    :param batch: blocks per transfer.
    :param depth: transfers in flight.
    :param needs_another: returns whether both links need one more launch, from the samples so far.
    :returns: the samples of ``first`` and of ``second``, with the same number of launches.
    :raises WorkerError: a worker dies or hangs, or NIXL reports an error.
    """
    launched: set[Link] = set()

    def launch(link: Link) -> Samples:
        if link in launched:
            link.relaunch()
        launched.add(link)
        return link.measure(block, batch=batch, depth=depth)

    return take_turns(lambda: launch(first), lambda: launch(second), Samples.with_launch, needs_another)


def take_turns(
    first: Callable[[], Measured],
    second: Callable[[], Measured],
    join: Callable[[Measured, Measured], Measured],
    needs_another: Callable[[Measured, Measured], bool],
) -> tuple[Measured, Measured]:
    """Measure two things in the order ABBA ABBA ….

    :param first: measures one launch of the first; ``second`` of the second.
    :param join: joins the launches so far with one more.
    :param needs_another: returns whether both need one more launch, from what was measured so far.
    """
    results, turns = [first(), second()], (1, 0)
    measures = first, second
    while needs_another(results[0], results[1]):
        for place in turns:
            results[place] = join(results[place], measures[place]())
        turns = turns[::-1]
    return results[0], results[1]
