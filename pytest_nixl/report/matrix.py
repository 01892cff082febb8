# SPDX-License-Identifier: Apache-2.0
"""Tables of the bandwidth between each two ranks, in which a slow link is marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_nixl.core import units
from pytest_nixl.model.results import RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.store.record_reader import RecordedRun


@dataclass(frozen=True)
class MatrixCell:
    """The bandwidth of one link.

    :param text: in GB/s.
    :param style: its colour, as CSS.
    :param slowest: whether it is the slowest link of its matrix.
    """

    text: str
    style: str
    slowest: bool
    #: The devices that carried the bytes, if the transports name them.
    devices: str = ""


@dataclass(frozen=True)
class LinkMatrix:
    """The links of one kind of row.

    :param targets: the ranks of the columns.
    :param rows: the rank of each line, and a cell for each target; None: not measured.
    :param words: the slowest link in a sentence.
    """

    title: str
    targets: Sequence[int]
    rows: Sequence[tuple[int, Sequence[MatrixCell | None]]]
    words: str


def matrices(run: RecordedRun) -> list[LinkMatrix]:
    """Return a table for each kind of row that was measured between several pairs, for its largest block size.

    The flows of a traffic pattern are in two tables, alone and together, each from source to target, with all sizes.
    """
    kinds: dict[RowKey, dict[int, dict[tuple[int, int], RowSummary]]] = {}
    patterns: dict[RowKey, dict[tuple[int, int], RowSummary]] = {}
    for key, row in run.rows.items():
        if key.pattern:
            flow = key.pair if key.op == "WRITE" else (key.pair[1], key.pair[0])
            patterns.setdefault(replace(key, block=0, pair=(0, 0)), {})[flow] = row
            continue
        sizes = kinds.setdefault(replace(key, block=0, pair=(0, 0)), {})
        sizes.setdefault(key.block, {})[key.pair] = row
    cards = []
    for kind, sizes in kinds.items():
        size = max(sizes)
        if len(sizes[size]) > 1:
            variant = f", {kind.variant_text}" if kind.variant else ""
            title = f"{kind.backend} {kind.op} {kind.memory_text} of {units.format_size(size)}{variant}"
            cards.append(_card(title, sizes[size]))
    for kind, flows in patterns.items():
        title = f"{kind.backend} {kind.op} {kind.memory_text}, {kind.variant_text}, from source to target"
        cards.append(_card(title, flows))
    return cards


def _card(title: str, links: dict[tuple[int, int], RowSummary]) -> LinkMatrix:
    initiators, targets = (sorted({pair[side] for pair in links}) for side in (0, 1))
    slow = min(links, key=lambda pair: links[pair].bandwidth)
    fast = max(link.bandwidth for link in links.values())
    rows = []
    for initiator in initiators:
        cells = [_cell(links.get((initiator, target)), fast, (initiator, target) == slow) for target in targets]
        rows.append((initiator, cells))
    share = f"{100 * links[slow].bandwidth / fast:.0f} % of the fastest"
    words = f"slowest: rank {slow[0]} to rank {slow[1]}, {units.gigabytes(links[slow].bandwidth)} GB/s, {share}"
    return LinkMatrix(title, targets, rows, words)


def _cell(link: RowSummary | None, fast: float, slowest: bool) -> MatrixCell | None:
    if link is None:
        return None
    # Full colour for the fastest link, no colour for half of its bandwidth or less.
    share = max(0.0, 2 * link.bandwidth / fast - 1)
    style = f"background: color-mix(in srgb, var(--pass) {35 * share:.0f}%, var(--fail-bg))"
    devices = dict.fromkeys(name.partition("/")[2] for name in link.transports)
    return MatrixCell(units.gigabytes(link.bandwidth), style, slowest, " ".join(filter(None, devices)))
