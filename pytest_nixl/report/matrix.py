# SPDX-License-Identifier: Apache-2.0
"""Tables of the bandwidth between each two ranks, in which a slow link is marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_nixl.core import units
from pytest_nixl.model.results import RowSummary
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.store.record_reader import RecordedRun


@dataclass(frozen=True)
class MatrixCell:
    """The bandwidth of one link.

    :param text: in GB/s; the verdict, if it was not measured.
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
    :param summary: the slowest link in a sentence.
    """

    title: str
    targets: Sequence[int]
    rows: Sequence[tuple[int, Sequence[MatrixCell | None]]]
    summary: str


def matrices(run: RecordedRun) -> list[LinkMatrix]:
    """Return a table for each kind of row that was measured between several pairs, for its largest block size.

    The flows of a traffic pattern are in two tables, alone and together, each from source to target, with all sizes.
    """
    kinds: dict[RowKey, dict[int, dict[tuple[int, int], RowSummary]]] = {}
    patterns: dict[RowKey, dict[tuple[int, int], RowSummary]] = {}
    failed: dict[RowKey, dict[tuple[int, int], Verdict]] = {}
    for key, result in run.unmeasured.items():
        if isinstance(key, RowKey):
            failed.setdefault(replace(key, pair=(0, 0)), {})[key.pair] = result.verdict
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
        lost = failed.get(replace(kind, block=size), {})
        if len({*sizes[size], *lost}) > 1:
            variant = f", {kind.variant_text}" if kind.variant else ""
            title = f"{kind.backend} {kind.op} {kind.memory_text} of {units.format_size(size)}{variant}"
            cards.append(_card(title, sizes[size], lost))
    for kind, flows in patterns.items():
        title = f"{kind.backend} {kind.op} {kind.memory_text}, {kind.variant_text}, from source to target"
        cards.append(_card(title, flows, {}))
    return cards


def _card(title: str, links: dict[tuple[int, int], RowSummary], failed: dict[tuple[int, int], Verdict]) -> LinkMatrix:
    initiators, targets = (sorted({pair[side] for pair in (*links, *failed)}) for side in (0, 1))
    slow = min(links, key=lambda pair: links[pair].bandwidth)
    fast = max(link.bandwidth for link in links.values())
    rows = []
    for initiator in initiators:
        pairs = [(initiator, target) for target in targets]
        cells = [_cell(links.get(pair), fast, pair == slow, failed.get(pair)) for pair in pairs]
        rows.append((initiator, cells))
    share = f"{100 * links[slow].bandwidth / fast:.0f} % of the fastest"
    description = f"slowest: rank {slow[0]} to rank {slow[1]}, {units.gigabytes(links[slow].bandwidth)} GB/s, {share}"
    return LinkMatrix(title, targets, rows, description)


def _cell(link: RowSummary | None, fast: float, slowest: bool, failed: Verdict | None) -> MatrixCell | None:
    if link is None:
        return None if failed is None else MatrixCell(str(failed), "background: var(--fail-bg)", slowest=False)
    # Full colour for the fastest link, no colour for half of its bandwidth or less.
    share = max(0.0, 2 * link.bandwidth / fast - 1)
    style = f"background: color-mix(in srgb, var(--pass) {35 * share:.0f}%, var(--fail-bg))"
    devices = dict.fromkeys(name.partition("/")[2] for name in link.transports)
    return MatrixCell(units.gigabytes(link.bandwidth), style, slowest, " ".join(filter(None, devices)))
