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
    one: Link, other: Link, block: int, *, batch: int, depth: int, another: Callable[[Samples, Samples], bool]
) -> tuple[Samples, Samples]:
    """Measure one row over two links in the order ABBA ABBA …, each launch in new workers.

    :param block: the size of one block in bytes.
    :param batch: blocks per transfer.
    :param depth: transfers in flight.
    :param another: returns whether both links need one more launch, from the samples so far.
    :returns: the samples of ``one`` and of ``other``, with the same number of launches.
    :raises WorkerError: a worker dies or hangs, or NIXL reports an error.
    """
    launched: set[Link] = set()

    def launch(link: Link) -> Samples:
        if link in launched:
            link.relaunch()
        launched.add(link)
        return link.measure(block, batch=batch, depth=depth)

    return take_turns(lambda: launch(one), lambda: launch(other), Samples.with_launch, another)


def take_turns(
    one: Callable[[], Measured],
    other: Callable[[], Measured],
    join: Callable[[Measured, Measured], Measured],
    another: Callable[[Measured, Measured], bool],
) -> tuple[Measured, Measured]:
    """Measure two things in the order ABBA ABBA ….

    :param one: measures one launch of the first; ``other`` of the second.
    :param join: joins the launches so far with one more.
    :param another: returns whether both need one more launch, from what was measured so far.
    """
    results, turns = [one(), other()], (1, 0)
    measures = one, other
    while another(results[0], results[1]):
        for place in turns:
            results[place] = join(results[place], measures[place]())
        turns = turns[::-1]
    return results[0], results[1]
