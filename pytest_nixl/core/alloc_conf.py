# SPDX-License-Identifier: Apache-2.0
"""The variable that configures torch's allocator of GPU memory."""

from __future__ import annotations

import re

#: The variable's names in torch: the older one, and that of newer releases.
ALLOC_CONF = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def expands_segments(text: str) -> bool:
    """Return whether torch allocates GPU memory that CUDA IPC cannot share (ai-dynamo/nixl#1754)."""
    return re.search(r"(?:^|,)\s*expandable_segments\s*:\s*true\b", text, re.IGNORECASE) is not None
