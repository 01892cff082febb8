# SPDX-License-Identifier: Apache-2.0
"""Write keys that any process may have written as words of a shell."""

from __future__ import annotations

import shlex


def quoted(key: str) -> str:
    """Return a key as one word that can be typed in bash, also if it has control characters or is not UTF-8."""
    if key and key.isprintable():
        return shlex.quote(key)
    data = key.encode(errors="surrogateescape")
    return "$'" + "".join(chr(c) if 32 <= c < 127 and c not in b"'\\" else f"\\x{c:02x}" for c in data) + "'"
