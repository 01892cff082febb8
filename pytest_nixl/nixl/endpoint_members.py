# SPDX-License-Identifier: Apache-2.0
"""The members of a value of NIXL_ETCD_ENDPOINTS in messages: quoted, or by number if they may be part of a password."""

from __future__ import annotations

from pytest_nixl.core.redaction import redact
from pytest_nixl.etcd.endpoints import parse_endpoints

#: The most characters of a value or a member that an explanation shows.
MOST_SHOWN = 200


def may_be_torn(text: str) -> bool:
    """Whether a separator may be part of a password, so that a member is only a piece of that password."""
    try:
        parse_endpoints(text.replace(";", ","))
    except ValueError:
        return True
    return False


class MemberNames:
    """How messages name the members of a value: by their text, or by number if that may be part of a password."""

    def __init__(self, text: str, count: int) -> None:
        self._torn = "@" in text and may_be_torn(text)
        self._count = count

    @property
    def torn(self) -> bool:
        """Whether the members may be pieces of a password."""
        return self._torn

    def name(self, number: int, member: str) -> str:
        """Return how a message names a member. ``number`` is its 1-based index."""
        if self._torn:
            return "it" if self._count == 1 else f"member {number} of {self._count}"
        return quoted(redact(member))

    def part(self, text: str) -> str:
        """Quote part of a member after a space; return nothing if it may be part of a password."""
        return "" if self._torn else f" {quoted(text)}"


def quoted(text: str) -> str:
    """Quote a text in ASCII, shortened."""
    return ascii(text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}...")


def read_port(digits: str) -> int:
    """Read a port with any number of digits; 0 if it is not a port."""
    digits = digits.lstrip("0")
    return int(digits) if 0 < len(digits) < 6 and int(digits) <= 65535 else 0
