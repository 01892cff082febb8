# SPDX-License-Identifier: Apache-2.0
"""Print keys that any process may have written, and write them as words of a shell."""

from __future__ import annotations

import shlex

#: The number of characters of a key that a sentence shows.
_SHOWN = 160


def shown(key: str, most: int = _SHOWN) -> str:
    """Return a key as one printable line: what is not printable is escaped, and a long key is shortened."""
    text = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in key[: most + 1])
    return text if len(key) <= most else f"{text[:most]}… ({len(key)} characters)"


def quoted(key: str) -> str:
    """Return a key as one word that can be typed in bash, also if it has control characters or is not UTF-8."""
    if key and key.isprintable():
        return shlex.quote(key)
    data = key.encode(errors="surrogateescape")
    return "$'" + "".join(chr(c) if 32 <= c < 127 and c not in b"'\\" else f"\\x{c:02x}" for c in data) + "'"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 key``, ``2 keys``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
