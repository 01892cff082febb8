# SPDX-License-Identifier: Apache-2.0
"""Short names of row keys for reports."""

from __future__ import annotations


def short(key: str) -> str:
    """Return a short name of a row: ``UCX WRITE DRAM:DRAM 64KiB``. Default batch, depth and ranks are left out."""
    parts = key.split("/")
    if len(parts) != 7:
        return key
    backend, op, memory, block, batch, depth, pair = parts
    more = [text for text, usual in ((batch, "batch1"), (depth, "depth1")) if text != usual]
    ranks = [] if pair in ("0-1", "0-0") else [f"ranks {pair}"]
    return " ".join((backend, op, memory, block, *more, *ranks))
