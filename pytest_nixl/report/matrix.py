# SPDX-License-Identifier: Apache-2.0
"""Tables of the bandwidth between each two ranks, in which a slow link is marked."""

from __future__ import annotations

from html import escape

from pytest_nixl.core import units
from pytest_nixl.store.record_reader import RecordedRun


def matrices(run: RecordedRun) -> list[str]:
    """Return an HTML card for each kind of row that was measured between several pairs, for its largest block size."""
    kinds: dict[tuple[str, ...], dict[int, dict[tuple[int, int], float]]] = {}
    for key, row in run.rows.items():
        backend, op, memory, block, batch, depth, pair = key.split("/")
        one, _, other = pair.partition("-")
        sizes = kinds.setdefault((backend, op, memory, batch, depth), {})
        sizes.setdefault(units.parse_size(block), {})[int(one), int(other)] = row.bandwidth
    cards = []
    for kind, sizes in kinds.items():
        size = max(sizes)
        if len(sizes[size]) > 1:
            cards.append(_card(f"{' '.join(kind[:3])} of {units.format_size(size)}", sizes[size]))
    return cards


def _card(title: str, links: dict[tuple[int, int], float]) -> str:
    initiators, targets = (sorted({pair[side] for pair in links}) for side in (0, 1))
    slow, fast = min(links, key=lambda pair: links[pair]), max(links.values())
    head = "".join(f"<th>to {rank}</th>" for rank in targets)
    rows = []
    for initiator in initiators:
        cells = "".join(_cell(links.get((initiator, target)), fast, (initiator, target) == slow) for target in targets)
        rows.append(f"<tr><th>from {initiator}</th>{cells}</tr>")
    share = f"{100 * links[slow] / fast:.0f} % of the fastest"
    words = f"slowest: rank {slow[0]} to rank {slow[1]}, {units.gigabytes(links[slow])} GB/s, {share}"
    table = f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return (
        f'<figure class="card"><h3>{escape(title)}</h3><div class="scroll">{table}</div>'
        f'<p class="soft">{escape(words)}</p></figure>'
    )


def _cell(value: float | None, fast: float, slowest: bool) -> str:
    if value is None:
        return '<td class="cell">–</td>'
    # Full colour for the fastest link, no colour for half of its bandwidth or less.
    share = max(0.0, 2 * value / fast - 1)
    style = f"background: color-mix(in srgb, var(--pass) {35 * share:.0f}%, var(--fail-bg))"
    return f'<td class="cell{" slow" if slowest else ""}" style="{style}">{units.gigabytes(value)}</td>'
