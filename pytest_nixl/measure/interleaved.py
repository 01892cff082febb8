# SPDX-License-Identifier: Apache-2.0
"""Measure two images in turn on the same nodes, so that drift affects both equally."""

from __future__ import annotations

from collections.abc import Callable

from pytest_nixl.measure.link import Link
from pytest_nixl.model.samples import Samples


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
