# SPDX-License-Identifier: Apache-2.0
"""Row keys as people read them."""

from __future__ import annotations


def short(key: str) -> str:
    """Name a row by what is not usual of it: ``UCX WRITE DRAM:DRAM 64KiB``, with counts and ranks that are not."""
    parts = key.split("/")
    if len(parts) != 7:
        return key
    backend, op, memory, block, batch, depth, pair = parts
    more = [text for text, usual in ((batch, "batch1"), (depth, "depth1")) if text != usual]
    ranks = [] if pair in ("0-1", "0-0") else [f"ranks {pair}"]
    return " ".join((backend, op, memory, block, *more, *ranks))
